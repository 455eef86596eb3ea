// Index selection of many queries that share keys (prefill), for Hopper (sm_90a), in FP8 products where they are exact.
//
// What does not fit FP8 is found here and left to `scan_many` (many.cu). A block owns up to 16 queries of one request and a share of their
// keys; what beats a query's K-th best so far goes to its spill, which is cut back to the K best when it might overflow. Knows no
// requests and no layers.

static const int MEMBERS = 16, TOGETHER = 4;  // queries of a block, of one product
static const int THREADS = 512, GROUPS = THREADS / 128;
static const int SPILL = 4096, EPOCH = 8;     // entries of a query; tiles of a warpgroup between two looks at the spills
static const int FULL = SPILL - EPOCH * GROUPS * 64;
static const int SET_BYTES = 128 * 128;       // four queries' tile
static const int WEIGHTS_AT = MEMBERS / TOGETHER * SET_BYTES;

__device__ __forceinline__ void product_fp8(float (&d)[64], const u32* a, u32 b, int keep) {
  asm volatile(PRODUCT_128("m64n128k32.f32.e5m2.e5m2", "", d, a, b, keep));
}
__device__ __forceinline__ void group_barrier(int name, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory"); }

struct Held {  // what the threads of a block share beside the queries
  u32 count[MEMBERS];
  float least[MEMBERS];
  int sees[MEMBERS];
  u32 bins[GROUPS][256], room[GROUPS][4], cut[GROUPS][2], kept[GROUPS], unfit, first;
};

// Keep the K best of a query's spill; among equals of the K-th the lower ids. All threads of a warpgroup.
__device__ __noinline__ void cut_back(Held& b, uint2* spill, int member, int chosen) {
  static const int MINE = SPILL / 128;
  int wide = threadIdx.x >> 7, t = threadIdx.x & 127, lane = t & 31, warp = t >> 5;
  u32 count = b.count[member], order[MINE], id[MINE], *bins = b.bins[wide];
#pragma unroll
  for (int i = 0; i < MINE; i++) order[i] = t + i * 128 < count ? spill[t + i * 128].x : 0;
  u32 value = 0, number = 0, want = chosen;
  bool more = true;
  for (int pass = 0; pass < 8 && more; pass++) {
    int shift = 24 - 8 * (pass & 3);
    bins[t] = bins[t + 128] = 0;
    if (t == 0) b.kept[wide] = 0;
    group_barrier(1 + wide, 128);
#pragma unroll
    for (int i = 0; i < MINE; i++) {
      if (!order[i] || (pass >= 4 && order[i] != value)) continue;
      u32 x = pass < 4 ? order[i] : ~spill[t + i * 128].y, known = pass < 4 ? value : number;
      if (shift < 24 && (x ^ known) >> (shift + 8)) continue;
      atomicAdd(bins + ((x >> shift) & 255), 1);
    }
    group_barrier(1 + wide, 128);
    u32 low = bins[2 * t], high = bins[2 * t + 1], sum = low + high;
#pragma unroll
    for (int by = 1; by < 32; by *= 2) {
      u32 other = __shfl_down_sync(~0u, sum, by);
      if (lane + by < 32) sum += other;
    }
    if (lane == 0) b.room[wide][warp] = sum;
    group_barrier(1 + wide, 128);
    u32 higher = sum - low - high;
#pragma unroll
    for (int w = 0; w < 4; w++)
      if (w > warp) higher += b.room[wide][w];
    if (higher < want && higher + high >= want) b.cut[wide][0] = 2 * t + 1, b.cut[wide][1] = want - higher;
    else if (higher + high < want && higher + high + low >= want) b.cut[wide][0] = 2 * t, b.cut[wide][1] = want - higher - high;
    group_barrier(1 + wide, 128);
    if (pass < 4) value |= b.cut[wide][0] << shift;
    else number |= b.cut[wide][0] << shift;
    want = b.cut[wide][1];
    // All equals of the K-th are wanted: no need to compare ids.
    if (pass == 3) more = bins[b.cut[wide][0]] != want;
    group_barrier(1 + wide, 128);
  }
#pragma unroll
  for (int i = 0; i < MINE; i++) id[i] = order[i] >= value && order[i] ? spill[t + i * 128].y : 0;
  group_barrier(1 + wide, 128);
#pragma unroll
  for (int i = 0; i < MINE; i++)
    if (order[i] && (order[i] > value || (order[i] == value && ~id[i] >= number)))
      spill[atomicAdd(&b.kept[wide], 1)] = make_uint2(order[i], id[i]);
  group_barrier(1 + wide, 128);
  if (t == 0) b.count[member] = b.kept[wide], b.least[member] = __uint_as_float(value & 0x80000000u ? value ^ 0x80000000u : ~value);
}

// Best of each block of 8 rows of a warp's 16, of two queries: four lanes write them.
__device__ __forceinline__ void write_maxima(const Call& c, int line, int sees, u32 order, int tile_row, int lane) {
#pragma unroll
  for (int by = 4; by < 32; by *= 2) order = max(order, __shfl_xor_sync(~0u, order, by));
  int block = tile_row / BLOCK + (lane & 1);
  if (lane < 4 && block * BLOCK < sees)
    c.blocks.orders[(i64)line * c.blocks.stride + block] = block == (sees - 1) / BLOCK ? ~0u : order;
}

// A head of a query to its row of a tile, and its weight. Whether it does not fit.
__device__ __forceinline__ bool put_head(u8* tile, int row, const uint4* from, float weight, float* scaled) {
  u32 most = 0;
  bool unfit = false;
  for (int unit = 0; unit < 16; unit++) most = max(most, largest_exponent(from[unit]));
  most = exponent_taken(most, unfit);
  for (int unit = 0; unit < 16; unit++) put_unit_fp8(tile, row, unit, from[unit], most, unfit);
  *scaled = scaled_weight(weight, most, unfit);
  return unfit;
}

struct Span {  // of tiles of 64 keys
  int first_query, members, first, stop;
};

__device__ __forceinline__ bool scan_share(const Call& c, u8* shared, Held& b, uint2* spills, const Span& x) {
  int wide = threadIdx.x >> 7, warp = (threadIdx.x >> 5) & 3, lane = threadIdx.x & 31, group = lane & 3;
  int most = 0, fewest = b.sees[0];
  // Of whole products: what a place without a query sees is nothing, and its scores must not count either.
  for (int m = 0; m < (x.members + TOGETHER - 1) / TOGETHER * TOGETHER; m++) most = max(most, b.sees[m]), fewest = min(fewest, b.sees[m]);
  int stop = min(x.stop, (most + 63) / 64), tile = x.first + wide;
  if (x.first >= stop) return false;
  bool unfit = false;
  const float4* weights = (const float4*)(shared + WEIGHTS_AT) + 2 * group;
  Feed feed{c, c.table + (i64)c.slots[x.first_query] * c.table_width, most, group, GROUPS * 64,
            tile * 64 + warp * 16 + (lane >> 2)};
  feed.start();
  u32 queries = descriptor(shared);
  for (int from = x.first; from < stop; from += EPOCH * GROUPS) {
    for (int i = 0; i < EPOCH && tile < stop; i++, tile += GROUPS) {
      u32 a[4][4];
      expand_fp8(feed.keys, a);
#pragma unroll
      for (int h = 0; h < 2; h++)
        if (beyond_fp8(feed.keys.scale[h]) && feed.at + 8 * h < most) {
          uint4 v = feed.keys.code[h];
          unfit |= ((v.x | v.y | v.z | v.w) & 0x77777777u) != 0;
        }
      int row = feed.at + 8 * (lane & 1);
      bool seen = tile * 64 + 64 <= fewest;
      feed.load();
      feed.find(feed.at + 2 * GROUPS * 64);
      feed.at += GROUPS * 64;
      for (int set = 0; set * TOGETHER < x.members; set++) {
        float d[64];
        u32 base = queries + set * (SET_BYTES >> 4);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int step = 0; step < 4; step++) product_fp8(d, a[step], base + step * 2, step > 0);
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
        float half[TOGETHER];
#pragma unroll
        for (int r = 0; r < TOGETHER; r++) {
          float sum[2] = {0.f, 0.f};
#pragma unroll
          for (int j = 0; j < 4; j += 2) {
            float4 w = weights[(set * TOGETHER + r) * 8 + j / 2];
#pragma unroll
            for (int h = 0; h < 2; h++) {
              sum[h] = fmaf(twice_positive(d[16 * r + 4 * j + 2 * h]), w.x, sum[h]);
              sum[h] = fmaf(twice_positive(d[16 * r + 4 * j + 2 * h + 1]), w.y, sum[h]);
              sum[h] = fmaf(twice_positive(d[16 * r + 4 * j + 4 + 2 * h]), w.z, sum[h]);
              sum[h] = fmaf(twice_positive(d[16 * r + 4 * j + 4 + 2 * h + 1]), w.w, sum[h]);
            }
          }
          half[r] = quad_half(sum[0], sum[1], lane);
        }
        // A lane ends with two queries' scores of one key: bit 0 tells the key, bit 1 the query.
#pragma unroll
        for (int r = 0; r < TOGETHER; r += 2) {
          float mine = lane & 2 ? half[r + 1] : half[r], other = lane & 2 ? half[r] : half[r + 1];
          float score = mine + __shfl_xor_sync(~0u, other, 2);
          int member = set * TOGETHER + r + ((lane >> 1) & 1);
          bool counts = seen || row < b.sees[member];
          // NaN is above all, and so is everything before there are K.
          if (counts && !(score <= b.least[member])) spills[member * SPILL + atomicAdd(b.count + member, 1)] = make_uint2(ordered(score), row);
          if (c.publish) write_maxima(c, x.first_query + member, b.sees[member], counts ? ordered(score) : 0u, tile * 64 + warp * 16, lane);
        }
      }
    }
    __syncthreads();
    for (int m = wide; m < x.members; m += GROUPS)
      if (b.count[m] > FULL) cut_back(b, spills + m * SPILL, m, c.rows.chosen);
    __syncthreads();
  }
  return unfit;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) scan_many_fp8(const __grid_constant__ Call c) {
  extern __shared__ u8 raw[];
  u8* shared = raw + ((1024 - (shared_address(raw) & 1023)) & 1023);
  Held& b = *(Held*)(shared + WEIGHTS_AT + MEMBERS * 32 * 4);
  uint2* spills = c.spill + (i64)blockIdx.x * MEMBERS * SPILL;
  int t = threadIdx.x;
  for (int item = blockIdx.x; item < c.group_count * c.shares; item += gridDim.x) {
    int number = item / c.shares, share = item % c.shares;
    Span x{c.groups[2 * number], min(c.groups[2 * number + 1], MEMBERS), share * c.share, (share + 1) * c.share};
    __syncthreads();
    if (t == 0) b.unfit = 0;
    if (t < MEMBERS) {
      b.count[t] = 0, b.least[t] = __uint_as_float(0x7FC00000u);
      b.sees[t] = t < x.members ? min((int)c.visible[x.first_query + t], c.limit) : 0;
    }
    // A thread takes a head; weights lie as the quads' lanes read them.
    int member = t >> 5, head = t & 31;
    bool real = member < x.members && head < c.heads, unfit = false;
    float* weight = (float*)(shared + WEIGHTS_AT) + member * 32 + (head >> 1 & 3) * 8 + (head >> 3) * 2 + (head & 1);
    i64 line = (i64)(x.first_query + member) * c.heads + head;
    u8* tile = shared + member / TOGETHER * SET_BYTES;
    int place = member % TOGETHER * 32 + head;
    *weight = 0.f;
    if (real) unfit = put_head(tile, place, (const uint4*)(c.q + line * 256), 0.5f * bfloat_at(c.weights + line * 2), weight);
    else
      for (int i = 0; i < 8; i++) *(uint4*)(tile + place * 128 + i * 16) = make_uint4(0, 0, 0, 0);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    unfit |= scan_share(c, shared, b, spills, x);
    if (unfit) b.unfit = 1;
    __syncthreads();
    if (t == 0) c.left[item] = b.unfit;
    // Lists of several shares must fit one query's room.
    for (int m = t >> 7; m < x.members && c.shares > 1; m += GROUPS)
      if (b.count[m] > (u32)c.rows.chosen) cut_back(b, spills + m * SPILL, m, c.rows.chosen);
    __syncthreads();
    for (int m = t >> 7; m < x.members && !b.unfit; m += GROUPS) {
      u32 count = b.count[m];
      if ((t & 127) == 0) b.kept[t >> 7] = atomicAdd(c.rows.counts + x.first_query + m, count);
      group_barrier(1 + (t >> 7), 128);
      uint2* to = c.rows.found + (i64)(x.first_query + m) * c.rows.room + b.kept[t >> 7];
      for (u32 i = t & 127; i < count; i += 128) to[i] = spills[m * SPILL + i];
      group_barrier(1 + (t >> 7), 128);
    }
  }
}
