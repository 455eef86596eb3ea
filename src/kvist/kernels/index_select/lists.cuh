// The exact K best of a query whose shares each list their best: one wait for all of them, then one block picks.
//
// Put after `choose.cuh`. A share lists every score from a bound of its own on, as many as fit its part of the query's entries, in the order
// of its places. Where the K best lie above all bounds, and they do unless they lie together, the lists hold them. An entry bears its
// launch's tag, so that nobody counts who is ready: the block that picks reads until all have theirs. Knows nothing of how scores came to be.

static const int OWN_ROWS = 16, OWN_BLOCKS = 32;  // entries of a thread that picks
static const int FINE = 2048;                     // bins to pick by
static const u32 DONE = 0;                        // instead of a bin: all is picked
static const int PLACE_BITS = 12;                 // of an entry: its place in the share; the tag lies above

// Two entries (score, then place and tag) as others write them.
__device__ __forceinline__ uint4 pair_of_others(const uint4* p) {
  u64 a, b;
  asm volatile("ld.relaxed.gpu.global.v2.b64 {%0, %1}, [%2];" : "=l"(a), "=l"(b) : "l"(p) : "memory");
  return make_uint4((u32)a, (u32)(a >> 32), (u32)b, (u32)(b >> 32));
}
// One more in a bin, unless that is -1.
__device__ __forceinline__ void count_at(u32* bins, int bin) {
  asm volatile("{\n.reg .pred p;\nsetp.ge.s32 p, %1, 0;\n@p red.shared.add.u32 [%0], 1;\n}" ::"r"(shared_address(bins + bin)), "r"(bin)
               : "memory");
}
// Threads of one that picks, as a power of two, to read a list.
template <int THREADS> __device__ __forceinline__ int slots_of(int lists) { return __clz(lists - 1) - __clz(THREADS - 1); }

// List the block's scores from `least` on (none if that is ~0). `order_of` gives a place's score. All threads.
template <int THREADS, int OWN, class Order>
__device__ __forceinline__ void write_list(uint4* entries, int number, int lists, int length, u32 least, u32 tag, u32* room, Order order_of) {
  int t = threadIdx.x, slots = slots_of<THREADS>(lists), each = (length + THREADS - 1) / THREADS;
  // A thread's places lie side by side; the order in which it looks at them spreads over banks.
  int turned = each & each - 1 ? 0 : t & each - 1;
  u32 hits = 0;
#pragma unroll 2
  for (int j = 0; j < each; j++) {
    int k = j ^ turned, i = t * each + k;
    if (i < length && order_of(i) >= max(least, 1u)) hits |= 1u << k;
  }
  if (least == ~0u) hits = 0;
  Sums sums = above_short<THREADS>(__popc(hits), room);
  u32 at = sums.all - sums.higher - __popc(hits);
  u32 last = (OWN << slots) - 1;
  auto put = [&](u32 at, u32 order, u32 place) {
    u64* to = (u64*)(entries + ((at & OWN - 1) >> 1) * THREADS + (number << slots) + at / OWN) + (at & 1);
    *(volatile u64*)to = (u64)(tag << PLACE_BITS | place) << 32 | order;
  };
#pragma unroll 1
  for (; hits; hits &= hits - 1, at++) {
    int i = t * each + __popc((hits & -hits) - 1);
    put(at, order_of(i), i);
  }
  // Nothing behind them; the last entry is the bound.
#pragma unroll 1
  for (u32 i = sums.all + t; i <= last; i += THREADS) put(i, i == last ? least : 0, 0);
}

// The lowest order of a bin from which on at most `most` scores were counted: 0 if that is all of them, ~0 if no bin is. All threads.
template <int THREADS> __device__ __forceinline__ u32 bound_of(const u32* mine, u32 most, u32* room, u32* cut) {
  u32 sum = 0;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    uint4 v = ((const uint4*)mine)[threadIdx.x * 4 + i];
    sum += v.x + v.y + v.z + v.w;
  }
  if (threadIdx.x == 0) cut[0] = 0;
  u32 higher = above_short<THREADS>(sum, room).higher;
  if (higher <= most && higher + sum > most) {
    u32 bin = threadIdx.x * 16 + 16;
#pragma unroll 1
    while ((higher += mine[bin - 1]) <= most) bin--;
    cut[0] = bin;
  }
  __syncthreads();
  return cut[0] < BINS ? cut[0] << BIN_SHIFT : ~0u;
}

struct Picking {  // from what, to where (a line of the output)
  const uint4* entries;
  int* out;
  const int* pool;  // if places are a pool's
  u32 wanted, tag;
  int lists, share;  // places of a list
};
// Write what is `chosen` (a bit of each of the thread's entries): lists and their entries are in the order of ids. All threads.
template <int THREADS> __device__ __forceinline__ void write_chosen(const Picking& x, const uint4* held, u32* room, u32 chosen) {
  int t = threadIdx.x, first = (t >> slots_of<THREADS>(x.lists)) * x.share;
  Sums sums = above_short<THREADS>(__popc(chosen), room);
  u32 to = sums.all - sums.higher - __popc(chosen);
#pragma unroll 1
  for (; chosen; chosen &= chosen - 1, to++) {
    int i = __popc((chosen & -chosen) - 1);
    int place = first + (((const uint2*)held)[((i >> 1) * THREADS + t) * 2 + (i & 1)].y & (1 << PLACE_BITS) - 1);
    x.out[to] = x.pool ? x.pool[place >> 3] * BLOCK + (place & 7) : place;
  }
#pragma unroll 1
  for (u32 i = sums.all + t; i < x.wanted; i += THREADS) x.out[i] = -1;
}
// Pick from the lists. DONE if the K best are in them: `done` is then told at once, and they are written out; else 1 + a bin that the K
// best reach. All threads; `bins` holds FINE words, `some` 3 * THREADS, `held` THREADS * OWN / 2.
template <int THREADS, int OWN>
__device__ __forceinline__ u32 pick(const Picking& x, u32* bins, u32* some, uint4* held, u32* room, u32* cut, u32* verdict, u32 done) {
  int t = threadIdx.x, lane = t & 31, warp = t >> 5, slots = slots_of<THREADS>(x.lists);
  u32 most = 0, bound = 0, differ = t < x.lists << slots;
#pragma unroll
  for (int i = 0; i < FINE / 4 / THREADS; i++) ((uint4*)bins)[t + i * THREADS] = make_uint4(0, 0, 0, 0);
  if (t == 0) room[32] = 0;
  some[2 * THREADS + t] = 0;
  uint4 pair[OWN / 2];
#pragma unroll
  for (int i = 0; i < OWN / 2; i++) pair[i] = make_uint4(0, 0, 0, 0);
  while (differ) {
    differ = 0;
#pragma unroll
    for (int i = 0; i < OWN / 2; i++) pair[i] = pair_of_others(x.entries + i * THREADS + t);
#pragma unroll
    for (int i = 0; i < OWN / 2; i++) differ |= (pair[i].y >> PLACE_BITS ^ x.tag) | (pair[i].w >> PLACE_BITS ^ x.tag);
  }
  if (!(~t & (1 << slots) - 1)) bound = pair[OWN / 2 - 1].z, pair[OWN / 2 - 1].z = 0;
#pragma unroll
  for (int i = 0; i < OWN / 2; i++) {
    held[i * THREADS + t] = pair[i];
    // The newest candidate block, above all others, must not widen the bins.
    most = max(most, max(OWN == OWN_BLOCKS && pair[i].x == ~0u ? 0 : pair[i].x, OWN == OWN_BLOCKS && pair[i].z == ~0u ? 0 : pair[i].z));
  }
  most = __reduce_max_sync(~0u, most), bound = __reduce_max_sync(~0u, bound);
  if (lane == 0) room[warp] = most, room[16 + warp] = bound;
  __syncthreads();
  most = __reduce_max_sync(~0u, room[lane & THREADS / 32 - 1]), bound = __reduce_max_sync(~0u, room[16 + (lane & THREADS / 32 - 1)]);
  // Bins of equal width from the bound on; then, if too few reach it, of leading bits.
  u32 least = max(bound, 1u), want, bin, total;
  int shift = max(0, 21 - __clz(max(most, least) - least | 1));
  bool enough;
  // -1 below the bound
  auto digit = [&](u32 order) { return order >= least ? (int)min(order - least >> shift, FINE - 1u) : -1; };
#pragma unroll 1
  for (;;) {
#pragma unroll 2
    for (int i = 0; i < OWN / 2; i++) {
      uint4 v = held[i * THREADS + t];
      count_at(bins, digit(v.x)), count_at(bins, digit(v.z));
    }
    __syncthreads();
    u32 sum = 0;
#pragma unroll
    for (int i = 0; i < FINE / THREADS / 4; i++) {
      uint4 v = ((const uint4*)bins)[t * (FINE / THREADS / 4) + i];
      sum += v.x + v.y + v.z + v.w;
    }
    Sums sums = above_short<THREADS>(sum, room);
    u32 higher = sums.higher;
    total = sums.all;
    if (higher < x.wanted && higher + sum >= x.wanted) {
      u32 b = t * (FINE / THREADS) + FINE / THREADS, here;
#pragma unroll 1
      while (higher + (here = bins[--b]) < x.wanted) higher += here;
      cut[0] = b, cut[1] = x.wanted - higher, cut[2] = here;
    }
    __syncthreads();
    enough = total >= x.wanted;
    bin = enough ? cut[0] : 0, want = enough ? cut[1] : 0;
    if ((enough && least != ~0u) || least == 1) break;
    least = 1, shift = BIN_SHIFT + 1;
    __syncthreads();
#pragma unroll 1
    for (int i = t; i < FINE; i += THREADS) bins[i] = 0;
    __syncthreads();
  }
  u32 edge = least + (bin << shift), members = enough ? cut[2] : 0;
  if ((bound > 1 && (!enough || least != bound)) || members > (u32)THREADS) return enough ? (edge >> BIN_SHIFT) + 1 : 1;
  // Nobody has to wait for what follows. What is above the K-th's bin is chosen (a bit of `chosen` each), and the best in it.
  if (t == 0) *(volatile u32*)verdict = done;
  u32 chosen = 0, there = 0;
#pragma unroll 2
  for (int i = 0; i < OWN / 2; i++) {
    uint4 v = held[i * THREADS + t];
    int a = digit(v.x), b = digit(v.z), over = enough ? (int)bin : -1;
    chosen |= (u32)(a > over) << 2 * i | (u32)(b > over) << 2 * i + 1;
    there |= (u32)(a == over) << 2 * i | (u32)(b == over) << 2 * i + 1;
  }
#pragma unroll 1
  for (; enough && there; there &= there - 1) {
    int i = __popc((there & -there) - 1);
    u32 to = atomicAdd(room + 32, 1);
    some[2 * to] = ((const uint2*)held)[((i >> 1) * THREADS + t) * 2 + (i & 1)].x, some[2 * to + 1] = t * OWN + i;
  }
  __syncthreads();
  if (t < (int)members) {
    u32 order = some[2 * t], at = some[2 * t + 1], better = 0;
#pragma unroll 1
    for (u32 i = 0; i < members; i++) better += some[2 * i] > order || (some[2 * i] == order && some[2 * i + 1] < at);
    if (better < want) atomicAdd(some + 2 * THREADS + at / OWN, 1u << at % OWN);
  }
  __syncthreads();
  write_chosen<THREADS>(x, held, room, chosen | some[2 * THREADS + t]);
  return DONE;
}
