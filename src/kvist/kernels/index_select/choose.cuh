// The exact K best of a query's candidates, ties to the lower id, ascending: what every way of index selection ends with.
//
// Put after `keys.cuh` and before the source that calls it. Knows nothing of how candidates were found.

__device__ __forceinline__ int length_of(const Call& c, int n, bool blocks) {
  int sees = min((int)c.visible[n], c.limit);
  if (blocks) return (sees + BLOCK - 1) / BLOCK;
  return c.pool_blocks ? c.pool_blocks * BLOCK : sees;
}
__device__ __forceinline__ int id_at(const Call& c, int n, bool blocks, int place) {
  if (blocks || !c.pool_blocks) return place;
  return c.pool[(i64)n * c.pool_blocks + (place >> 3)] * BLOCK + (place & 7);
}

// All threads of a block. `held` has room for the list's candidates and, behind them, for K ids; `bins` holds 1,024 words, `room` 33,
// `cut` 3. Where the list has bins, all candidates reach `bin`. Counters are zero afterwards.
template <int THREADS>
__device__ __noinline__ void choose_best(const Call& c, const List& list, bool blocks, int n, u32 bin, uint2* held, u32* bins, u32* room,
                                         u32* cut) {
  static const int EACH = 1024 / THREADS;
  int t = threadIdx.x;
  // The first 1,024 candidates are on their way before their number is known.
  const uint2* found = list.found + (i64)n * list.room;
  uint2 early[EACH];
  u32 count = __ldcg(list.counts + n);
#pragma unroll
  for (int i = 0; i < EACH; i++) early[i] = __ldcg(found + t + i * THREADS);
  // More candidates than there is room for (many equal scores): read all scores again, as often as needed.
  bool again = count > (u32)list.room;
  const u32* orders = list.orders + (i64)n * list.stride;
  int length = again ? length_of(c, n, blocks) : (int)count;
  u32 least = max(bin << BIN_SHIFT, 1u);
  auto entry = [&](int i) {
    if (!again) return held[i];
    u32 order = __ldcg(orders + i);
    return make_uint2(order >= least ? order : 0, (u32)id_at(c, n, blocks, i));
  };
  if (!again) {
#pragma unroll
    for (int i = 0; i < EACH; i++)
      if (t + i * THREADS < length) held[t + i * THREADS] = early[i];
#pragma unroll 1
    for (int i = t + 1024; i < length; i += THREADS) held[i] = __ldcg(found + i);
  }
  if (list.bins)
#pragma unroll 1
    for (int i = t; i < BINS / 4; i += THREADS) ((uint4*)(list.bins + (i64)n * BINS))[i] = make_uint4(0, 0, 0, 0);
  __syncthreads();
  if (t == 0) list.counts[n] = 0;
  u32 value = 0, number = 0, want = list.chosen;
  int known = 0;
  // In descending order, `EACH` bins a thread: the one that holds the last wanted, and what is wanted of it.
  auto find = [&](u32* all) {
    u32 mine[EACH], sum = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++) sum += mine[i] = bins[EACH * t + i];
    u32 higher = above<THREADS>(sum, room, all);
#pragma unroll
    for (int i = EACH - 1; i >= 0; i--) {
      if (higher < want && higher + mine[i] >= want) cut[0] = EACH * t + i, cut[1] = want - higher, cut[2] = mine[i];
      higher += mine[i];
    }
    __syncthreads();
  };
  bool all = !again && length <= list.chosen, more = true;  // every entry is taken; more equals of the K-th than wanted
  auto clear = [&] {
#pragma unroll
    for (int i = 0; i < EACH; i++) bins[EACH * t + i] = 0;
    __syncthreads();
  };
  u32 total;
  if (list.bins && !all) {
    // Candidates mostly lie in 64 bins from the lowest on: 16 bits of theirs at once.
    clear();
#pragma unroll 1
    for (int i = t; i < length; i += THREADS) {
      u32 order = entry(i).x;
      if (order) atomicAdd(bins + min((order >> 16) - (bin << 4), 1023u), 1);
    }
    __syncthreads();
    find(&total);
    if (total <= want) all = true;
    else if (cut[0] < 1023) value = ((bin << 4) + cut[0]) << 16, known = 16, want = cut[1], more = cut[2] != want;
    __syncthreads();
  }
  // The rest of the K-th's bits, 10 at a time, as long as they tell apart what is wanted; then, among its equals, the last id that is
  // taken (as ~id: higher is better).
  for (int ids = 0; ids < 2 && !all && more; ids++, known = 0) {
    while (known < 32 && more) {
      int bits = min(10, 32 - known), shift = 32 - known - bits;
      clear();
#pragma unroll 1
      for (int i = t; i < length; i += THREADS) {
        uint2 e = entry(i);
        if (!e.x || (ids && e.x != value)) continue;
        u32 x = ids ? ~e.y : e.x;
        if (!known || !((x ^ (ids ? number : value)) >> (32 - known))) atomicAdd(bins + ((x >> shift) & ((1 << bits) - 1)), 1);
      }
      __syncthreads();
      find(&total);
      if (!known && total <= want) {
        all = !ids;  // All that there are, or all equals of the K-th.
        break;
      }
      if (ids) number |= cut[0] << shift;
      else value |= cut[0] << shift;
      want = cut[1];
      more = cut[2] != want;
      known += bits;
      __syncthreads();
    }
  }
  auto chosen = [&](uint2 e) { return e.x && (all || e.x > value || (e.x == value && ~e.y >= number)); };
  // Ascending: 1,024 runs of ids, then the rank within a run.
  clear();
#pragma unroll 1
  for (int i = t; i < length; i += THREADS) {
    uint2 e = entry(i);
    if (chosen(e)) atomicAdd(bins + (1023 - (e.y >> list.number_shift)), 1);
  }
  __syncthreads();
  // Runs lie reversed, so that the sum over higher threads is the start of a run.
  u32 mine[EACH], sum = 0;
#pragma unroll
  for (int i = 0; i < EACH; i++) sum += mine[i] = bins[EACH * t + i];
  u32 higher = above<THREADS>(sum, room, &total);
#pragma unroll
  for (int i = EACH - 1; i >= 0; i--) bins[EACH * t + i] = higher, higher += mine[i];
  __syncthreads();
  int* out = list.out + (i64)n * list.chosen;
  u32* sorted = (u32*)(held + list.room);
#pragma unroll 1
  for (int i = t; i < length; i += THREADS) {
    uint2 e = entry(i);
    if (chosen(e)) sorted[atomicAdd(bins + (1023 - (e.y >> list.number_shift)), 1)] = e.y;
  }
  __syncthreads();
#pragma unroll 1
  for (u32 i = t; i < total; i += THREADS) {
    u32 id = sorted[i], run = 1023 - (id >> list.number_shift);
    u32 start = run == 1023 ? 0 : bins[run + 1], stop = bins[run], rank = start;
#pragma unroll 1
    for (u32 j = start; j < stop; j++) rank += sorted[j] < id;
    out[rank] = (int)id;
  }
#pragma unroll 1
  for (int i = total + t; i < list.chosen; i += THREADS) out[i] = -1;
}
