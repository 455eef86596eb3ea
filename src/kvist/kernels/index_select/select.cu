// Index selection over MXFP4 keys in pages, for Hopper (sm_90a): scores of 32 heads x 128 channels, then the exact K best.
//
// `scan` scores a share of a query's keys (keys are the left operand, expanded in registers), writes each score as an ordered number
// and counts them in 4,096 bins; `sift` collects what lies in the bins that hold the K best; `choose` picks exactly, ties to the
// lower id, ascending. The three overlap their launches. Knows no requests and no layers.

__device__ __forceinline__ void product_32(float (&d)[16], const u32* a, u32 b, int keep) {
  asm volatile(
      "{\n.reg .pred p;\n.reg .b64 b;\nsetp.ne.b32 p, %21, 0;\nmov.b64 b, {%20, " HIGH "};\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
      "{%16, %17, %18, %19}, b, p, 1, 1, 0;\n}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]),
        "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(keep));
}

struct Counters {
  uint4 bins[BINS / 4], block_bins[BINS / 4];
};
__device__ __forceinline__ void count_in(uint4* bins, u32 order) { atomicAdd((u32*)bins + (order >> BIN_SHIFT), 1); }
__device__ __forceinline__ void add_bins(const uint4* mine, u32* to) {
  for (int i = threadIdx.x; i < BINS / 4; i += 128) {
    uint4 v = mine[i];
    if (!(v.x | v.y | v.z | v.w)) continue;
    if (v.x) atomicAdd(to + 4 * i, v.x);
    if (v.y) atomicAdd(to + 4 * i + 1, v.y);
    if (v.z) atomicAdd(to + 4 * i + 2, v.z);
    if (v.w) atomicAdd(to + 4 * i + 3, v.w);
  }
}

template <bool POOL>
__device__ __forceinline__ void scan_share(const Call& c, u32 queries, Counters& counters, const float (&weight)[8], int n, int first,
                                           int end, int sees) {
  int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, group = lane & 3;
  Feed<POOL> feed{c, c.table + (i64)c.slots[n] * c.table_width, c.pool + (i64)n * c.pool_blocks, end, sees, group, 64,
                  first + warp * 16 + (lane >> 2)};
  feed.start();
  u32* orders = c.rows.orders + (i64)n * c.rows.stride;
  for (int tile = first; tile < end; tile += 64) {
    u32 a[8][4];
    expand_keys(feed.keys, a);
    bool here = (lane & 1 ? feed.row_of(1) : feed.row_of(0)) >= 0;
    feed.load();
    float d[16];
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int step = 0; step < 8; step++) product_32(d, a[step], queries + (step >> 2) * 256 + (step & 3) * 2, step > 0);
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    feed.find(feed.at + 128);
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    float sum[2] = {0.f, 0.f};
#pragma unroll
    for (int j = 0; j < 8; j++)
#pragma unroll
      for (int h = 0; h < 2; h++) sum[h] = fmaf(twice_positive(d[4 * (j >> 1) + 2 * h + (j & 1)]), weight[j], sum[h]);
    float score = quad_half(sum[0], sum[1], lane);
    score += __shfl_xor_sync(~0u, score, 2);
    u32 order = here ? ordered(score) : 0u;
    // Lanes 0 and 1 of a quad write the keys 8 apart.
    int place = feed.at + 8 * group;
    if (group < 2 && place < end) {
      orders[place] = order;
      if (order) count_in(counters.bins, order);
    }
    if (c.publish) {
#pragma unroll
      for (int by = 4; by < 32; by *= 2) order = max(order, __shfl_xor_sync(~0u, order, by));
      int block = (tile + warp * 16) / BLOCK + lane;
      if (lane < 2 && block * BLOCK < end) {
        u32 best = block == (sees - 1) / BLOCK ? ~0u : order;
        c.blocks.orders[(i64)n * c.blocks.stride + block] = best;
        count_in(counters.block_bins, best);
      }
    }
    feed.at += 64;
  }
}

extern "C" __global__ void __launch_bounds__(128, 5) scan(const __grid_constant__ Call c) {
  __shared__ __align__(1024) u8 queries[8192];
  __shared__ Counters counters;
  int n = blockIdx.x / c.shares, first = blockIdx.x % c.shares * c.share;
  int sees = min((int)c.visible[n], c.limit), end = min(first + c.share, c.pool_blocks ? c.pool_blocks * BLOCK : sees);
  if (first >= end) return;
  for (int i = threadIdx.x; i < 512; i += 128) {
    int head = i >> 4, unit = i & 15;
    uint4 v = make_uint4(0, 0, 0, 0);
    if (head < c.heads) v = *(const uint4*)(c.q + (((i64)n * c.heads + head) * 128 + unit * 8) * 2);
    put_query(queries, 32, head, unit, v);
  }
  float weight[8];
#pragma unroll
  for (int j = 0; j < 8; j++) {
    int head = 8 * (j >> 1) + 2 * (threadIdx.x & 3) + (j & 1);
    weight[j] = head < c.heads ? 0.5f * bfloat_at(c.weights + ((i64)n * c.heads + head) * 2) : 0.f;
  }
  for (int i = threadIdx.x; i < BINS / 4; i += 128) counters.bins[i] = make_uint4(0, 0, 0, 0);
  if (c.publish)
    for (int i = threadIdx.x; i < BINS / 4; i += 128) counters.block_bins[i] = make_uint4(0, 0, 0, 0);
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  if (c.pool_blocks) scan_share<true>(c, descriptor(queries), counters, weight, n, first, end, sees);
  else scan_share<false>(c, descriptor(queries), counters, weight, n, first, end, sees);
  __syncthreads();
  add_bins(counters.bins, c.rows.bins + (i64)n * BINS);
  if (c.publish) add_bins(counters.block_bins, c.blocks.bins + (i64)n * BINS);
}

__device__ __forceinline__ int length_of(const Call& c, const List& list, int n, bool blocks) {
  int sees = min((int)c.visible[n], c.limit);
  if (blocks) return (sees + BLOCK - 1) / BLOCK;
  return c.pool_blocks ? c.pool_blocks * BLOCK : sees;
}
__device__ __forceinline__ int id_at(const Call& c, int n, bool blocks, int place) {
  if (blocks || !c.pool_blocks) return place;
  return c.pool[(i64)n * c.pool_blocks + (place >> 3)] * BLOCK + (place & 7);
}

static const int SIFTED = 4096;  // scores a block reads at once

extern "C" __global__ void __launch_bounds__(256) sift(const __grid_constant__ Call c) {
  __shared__ u32 room[33];
  __shared__ u32 least, first;
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");
  bool blocks = blockIdx.x >= c.queries * c.rows.shares;
  const List& list = blocks ? c.blocks : c.rows;
  int number = blocks ? blockIdx.x - c.queries * c.rows.shares : blockIdx.x;
  int n = number / list.shares, share = number % list.shares;
  // The lowest bin that still holds one of the K best.
  const uint4* from = (const uint4*)(list.bins + (i64)n * BINS + threadIdx.x * 16);
  u32 held[16], mine = 0, all;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    uint4 v = from[i];
    held[4 * i] = v.x, held[4 * i + 1] = v.y, held[4 * i + 2] = v.z, held[4 * i + 3] = v.w;
    mine += v.x + v.y + v.z + v.w;
  }
  if (threadIdx.x == 0) least = 0;
  u32 higher = above<256>(mine, room, &all);
  if (higher < (u32)list.chosen && higher + mine >= (u32)list.chosen) {
    int bin = 15;
    u32 sum = higher;
#pragma unroll
    for (int i = 15; i >= 0; i--) {
      if (sum < (u32)list.chosen) bin = i;
      sum += held[i];
    }
    least = threadIdx.x * 16 + bin;
  }
  __syncthreads();
  u32 floor = max(least << BIN_SHIFT, 1u);
  const u32* orders = list.orders + (i64)n * list.stride;
  int end = min((share + 1) * list.share, length_of(c, list, n, blocks));
  for (int at = share * list.share; at < end; at += SIFTED) {
    u32 x[SIFTED / 256], hits = 0;
#pragma unroll
    for (int j = 0; j < SIFTED / 1024; j++) {
      int place = at + j * 1024 + 4 * threadIdx.x;
      if (place + 3 < end) {
        uint4 v = *(const uint4*)(orders + place);
        x[4 * j] = v.x, x[4 * j + 1] = v.y, x[4 * j + 2] = v.z, x[4 * j + 3] = v.w;
      } else {
#pragma unroll
        for (int i = 0; i < 4; i++) x[4 * j + i] = place + i < end ? orders[place + i] : 0;
      }
    }
#pragma unroll
    for (int i = 0; i < SIFTED / 256; i++) hits += x[i] >= floor;
    u32 to = above<256>(hits, room, &all);
    if (!all) continue;
    if (threadIdx.x == 0) first = atomicAdd(list.counts + n, all);
    __syncthreads();
    to += first;
#pragma unroll
    for (int i = 0; i < SIFTED / 256; i++) {
      if (x[i] < floor) continue;
      int place = at + (i >> 2) * 1024 + 4 * threadIdx.x + (i & 3);
      if (to < (u32)list.room) list.found[(i64)n * list.room + to] = make_uint2(x[i], id_at(c, n, blocks, place));
      to++;
    }
    __syncthreads();
  }
}

static const int CHOOSERS = 512;

extern "C" __global__ void __launch_bounds__(CHOOSERS) choose(const __grid_constant__ Call c) {
  extern __shared__ uint2 held[];
  __shared__ u32 room[33];
  __shared__ u32 bins[1024];
  __shared__ u32 cut[2];
  asm volatile("griddepcontrol.wait;" ::: "memory");
  bool blocks = blockIdx.x >= c.queries;
  const List& list = blocks ? c.blocks : c.rows;
  int n = blocks ? blockIdx.x - c.queries : blockIdx.x, t = threadIdx.x;
  u32 count = list.counts[n];
  // More candidates than there is room for (many equal scores): read all scores again, as often as needed.
  bool again = count > (u32)list.room;
  const u32* orders = list.orders + (i64)n * list.stride;
  int length = again ? length_of(c, list, n, blocks) : (int)count;
  auto entry = [&](int i) {
    if (!again) return held[i];
    return make_uint2(orders[i], (u32)id_at(c, n, blocks, i));
  };
  if (!again)
    for (int i = t; i < length; i += CHOOSERS) held[i] = list.found[(i64)n * list.room + i];
  if (list.bins)
    for (int i = t; i < BINS; i += CHOOSERS) list.bins[(i64)n * BINS + i] = 0;
  __syncthreads();
  if (t == 0) list.counts[n] = 0;

  // The lowest bin among what `sift` found holds the K-th best score, whose 12 bits are known then.
  if (t < 2) cut[t] = t ? 0 : ~0u;
  __syncthreads();
  u32 value = 0, number = 0, want = list.chosen;
  int known = 0;
  if (!again && list.bins) {
    u32 least = ~0u;
    for (int i = t; i < length; i += CHOOSERS) least = min(least, held[i].x >> BIN_SHIFT);
    if (least != ~0u) atomicMin(cut, least);
    __syncthreads();
    value = cut[0] << BIN_SHIFT;
    u32 more = 0, total;
    for (int i = t; i < length; i += CHOOSERS) more += held[i].x >> BIN_SHIFT > cut[0];
    above<CHOOSERS>(more, room, &total);
    want -= min(total, want);
    known = 32 - BIN_SHIFT;
  }
  bool all = !again && length <= list.chosen;  // every entry is taken
  // The rest of its bits, 10 at a time; then, among its equals, the last id that is taken (as ~id: higher is better).
  for (int ids = 0; ids < 2 && !all; ids++, known = 0) {
    while (known < 32) {
      int bits = min(10, 32 - known), shift = 32 - known - bits;
      bins[2 * t] = bins[2 * t + 1] = 0;
      __syncthreads();
      for (int i = t; i < length; i += CHOOSERS) {
        uint2 e = entry(i);
        if (!e.x || (ids && e.x != value)) continue;
        u32 x = ids ? ~e.y : e.x;
        if (!known || !((x ^ (ids ? number : value)) >> (32 - known))) atomicAdd(bins + ((x >> shift) & ((1 << bits) - 1)), 1);
      }
      __syncthreads();
      u32 low = bins[2 * t], high = bins[2 * t + 1], total;
      u32 higher = above<CHOOSERS>(low + high, room, &total);
      if (!known && total <= want) {
        // All that there are, or all equals of the K-th.
        all = !ids;
        break;
      }
      if (higher < want && higher + high >= want) cut[0] = 2 * t + 1, cut[1] = want - higher;
      else if (higher + high < want && higher + high + low >= want) cut[0] = 2 * t, cut[1] = want - higher - high;
      __syncthreads();
      if (ids) number |= cut[0] << shift;
      else value |= cut[0] << shift;
      want = cut[1];
      known += bits;
    }
  }
  auto chosen = [&](uint2 e) { return e.x && (all || e.x > value || (e.x == value && ~e.y >= number)); };
  // Ascending: 1,024 runs of ids, then the rank within a run.
  for (int i = t; i < 1024; i += CHOOSERS) bins[i] = 0;
  __syncthreads();
  for (int i = t; i < length; i += CHOOSERS) {
    uint2 e = entry(i);
    if (chosen(e)) atomicAdd(bins + (1023 - (e.y >> list.number_shift)), 1);
  }
  __syncthreads();
  // Runs lie reversed, so that the sum over higher threads is the start of a run.
  u32 first = bins[2 * t], second = bins[2 * t + 1], total;
  u32 higher = above<CHOOSERS>(first + second, room, &total);
  __syncthreads();
  bins[2 * t] = higher + second, bins[2 * t + 1] = higher;
  __syncthreads();
  int* out = list.out + (i64)n * list.chosen;
  u32* sorted = (u32*)(held + list.room);
  for (int i = t; i < length; i += CHOOSERS) {
    uint2 e = entry(i);
    if (chosen(e)) sorted[atomicAdd(bins + (1023 - (e.y >> list.number_shift)), 1)] = e.y;
  }
  __syncthreads();
  for (u32 i = t; i < total; i += CHOOSERS) {
    u32 id = sorted[i], run = 1023 - (id >> list.number_shift);
    u32 start = run == 1023 ? 0 : bins[run + 1], stop = bins[run], rank = start;
    for (u32 j = start; j < stop; j++) rank += sorted[j] < id;
    out[rank] = (int)id;
  }
  for (int i = total + t; i < list.chosen; i += CHOOSERS) out[i] = -1;
}
