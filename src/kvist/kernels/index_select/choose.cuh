// The exact K best of a query's candidates, ties to the lower id, ascending: what every way of index selection ends with.
//
// Put after `keys.cuh` and before the source that calls it. One block runs it once, so that its instructions come from far: it is kept
// short. Knows nothing of how candidates were found.

struct Chooser {
  const Call& c;
  const List& list;
  bool blocks;  // of candidate blocks, not rows
  int n;
  bool again;
  u32 least;
};

// Score and id of a query's place `i`: where there are more candidates than room, all are read as often as needed.
__device__ __noinline__ uint2 read_again(const Chooser& x, int i) {
  u32 order = __ldcg(x.list.orders + (i64)x.n * x.list.stride + i);
  int id = i;
  if (!x.blocks && x.c.pool_blocks) id = x.c.pool[(i64)x.n * x.c.pool_blocks + (i >> 3)] * BLOCK + (i & 7);
  return make_uint2(order >= x.least ? order : 0, id);
}

// All threads of a block. `held` has room for the list's candidates and, behind them, for K ids; `bins` holds 1,024 words, `room` 33,
// `cut` 3. Where the list has bins, all candidates reach `bin`. Counters are zero afterwards. `dry`: as if there were no
// candidates and none were wanted, nothing is written; the instructions are near then.
template <int THREADS>
__device__ __noinline__ void choose_best(const Call& c, const List& list, bool blocks, int n, u32 bin, uint2* held, u32* bins, u32* room,
                                         u32* cut, bool dry) {
  static const int EACH = 1024 / THREADS;
  int t = threadIdx.x;
  // The first 1,024 candidates are on their way before their number is known.
  const uint2* found = list.found + (i64)n * list.room;
  uint2 early[EACH];
  u32 count = dry ? 0 : __ldcg(list.counts + n);
  int wanted = dry ? 0 : list.chosen;
#pragma unroll
  for (int i = 0; i < EACH; i++) early[i] = __ldcg(found + t + i * THREADS);
  if (list.bins && !dry)
#pragma unroll 1
    for (int i = t; i < BINS / 4; i += THREADS) ((uint4*)(list.bins + (i64)n * BINS))[i] = make_uint4(0, 0, 0, 0);
  Chooser x{c, list, blocks, n, count > (u32)list.room, max(bin << BIN_SHIFT, 1u)};
  int sees = min((int)c.visible[n], c.limit), length = count;
  if (x.again) length = blocks ? (sees + BLOCK - 1) / BLOCK : c.pool_blocks ? c.pool_blocks * BLOCK : sees;
  else {
#pragma unroll
    for (int i = 0; i < EACH; i++)
      if (t + i * THREADS < length) held[t + i * THREADS] = early[i];
#pragma unroll 1
    for (int i = t + 1024; i < length; i += THREADS) held[i] = __ldcg(found + i);
  }
  auto entry = [&](int i) { return x.again ? read_again(x, i) : held[i]; };
  __syncthreads();
  if (t == 0 && !dry) list.counts[n] = 0;
  // The K-th's score, some bits at a time as long as they tell apart what is wanted; then, among its equals, the last id that is taken
  // (as ~id: higher is better). First 16 bits at once, counted from the lowest that a candidate can have: most lie in 1,024 of these.
  u32 value = 0, number = 0, want = wanted, base = bin << 4, limit = 1024;
  int known = 0, shift = list.bins ? 16 : 22;  // Without bins: bits from the highest on.
  bool ids = false, all = !x.again && length <= wanted, more = !all || dry, clip = list.bins;
#pragma unroll 1
  while (more) {
#pragma unroll
    for (int i = 0; i < EACH; i++) bins[EACH * t + i] = 0;
    __syncthreads();
#pragma unroll 1
    for (int i = t; i < length; i += THREADS) {
      uint2 e = entry(i);
      if (!e.x || (ids && e.x != value)) continue;
      u32 digit = ((ids ? ~e.y : e.x) >> shift) - base;
      if (clip) digit = min(digit, 1023u);
      if (digit < limit) atomicAdd(bins + digit, 1);
    }
    __syncthreads();
    // In descending order, `EACH` bins a thread: the one that holds the last wanted, and what is wanted of it.
    u32 mine[EACH], sum = 0, total;
#pragma unroll
    for (int i = 0; i < EACH; i++) sum += mine[i] = bins[EACH * t + i];
    u32 higher = above<THREADS>(sum, room, &total);
#pragma unroll
    for (int i = EACH - 1; i >= 0; i--) {
      if (higher < want && higher + mine[i] >= want) cut[0] = EACH * t + i, cut[1] = want - higher, cut[2] = mine[i];
      higher += mine[i];
    }
    __syncthreads();
    if (!known && total <= want) {
      all = !ids;  // All that there are, or all equals of the K-th.
      break;
    }
    if (clip && cut[0] == 1023) {
      clip = false, base = 0, shift = 22;  // Not near the lowest: bits from the highest on.
      continue;
    }
    u32 digits = (base + cut[0]) << shift;
    if (ids) number = digits;
    else value = digits;
    want = cut[1], more = cut[2] != want, clip = false;
    known = 32 - shift;
    if (more && !shift) ids = true, known = 0, shift = 32;
    int bits = min(10, shift);
    shift -= bits, limit = 1 << bits;
    base = (ids ? number : value) >> shift;
    __syncthreads();
  }
  auto chosen = [&](uint2 e) { return e.x && (all || e.x > value || (e.x == value && ~e.y >= number)); };
  // Ascending: 1,024 runs of ids, then the rank within a run. First runs are counted, then (`pass` 1) ids go to theirs.
  u32* sorted = (u32*)(held + list.room);
  u32 total;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < EACH; i++) bins[EACH * t + i] = 0;
  __syncthreads();
#pragma unroll 1
  for (int pass = 0; pass < 2; pass++) {
#pragma unroll 1
    for (int i = t; i < length; i += THREADS) {
      uint2 e = entry(i);
      if (!chosen(e)) continue;
      u32 to = atomicAdd(bins + (1023 - (e.y >> list.number_shift)), 1);
      if (pass) sorted[to] = e.y;
    }
    __syncthreads();
    if (pass) break;
    // Runs lie reversed, so that the sum over higher threads is the start of a run.
    u32 mine[EACH], sum = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++) sum += mine[i] = bins[EACH * t + i];
    u32 higher = above<THREADS>(sum, room, &total);
#pragma unroll
    for (int i = EACH - 1; i >= 0; i--) bins[EACH * t + i] = higher, higher += mine[i];
    __syncthreads();
  }
  int* out = list.out + (i64)n * list.chosen;
#pragma unroll 1
  for (u32 i = t; i < (u32)wanted; i += THREADS) {
    if (i >= total) {
      out[i] = -1;
      continue;
    }
    u32 id = sorted[i], run = 1023 - (id >> list.number_shift);
    u32 start = run == 1023 ? 0 : bins[run + 1], stop = bins[run], rank = start;
#pragma unroll 1
    for (u32 j = start; j < stop; j++) rank += sorted[j] < id;
    out[rank] = (int)id;
  }
}
