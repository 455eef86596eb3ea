// Index selection of many queries that share keys (prefill), for Hopper (sm_90a). No score leaves a block unless it may be chosen.
//
// A block owns up to 16 queries of one request and a share of their keys. Its three warpgroups expand a tile of 64 keys each into
// registers and multiply it with all queries; what beats a query's K-th best so far goes to its spill of 4,096 entries, which is cut
// back to the K best when it might overflow. `choose` picks among what is left. Knows no requests and no layers.

static const int MEMBERS = 16, TOGETHER = 4;     // queries of a block, of one product
static const int THREADS = 384, GROUPS = THREADS / 128;
static const int SPILL = 4096, EPOCH = 10;       // entries of a query; tiles of a warpgroup between two looks at the spills
static const int FULL = SPILL - EPOCH * GROUPS * 64;
static const int SET_BYTES = 128 * 256;          // four queries' tile
static const int WEIGHTS_AT = MEMBERS / TOGETHER * SET_BYTES;

__device__ __forceinline__ void product_128(float (&d)[64], const u32* a, u32 b, int keep) {
  asm volatile(PRODUCT_128("m64n128k16.f32.bf16.bf16", ", 0", d, a, b, keep));
}

struct Held {  // what the threads of a block share beside the queries
  u32 count[MEMBERS], least[MEMBERS];
  int sees[MEMBERS];
  u32 bins[256], room[33], cut[2], kept;
};

// Keep the K best of a query's spill; among equals of the K-th the lower ids. All threads of the block.
__device__ void cut_back(const Call& c, Held& b, uint2* spill, int member) {
  static const int MINE = (SPILL + THREADS - 1) / THREADS;
  uint2 e[MINE];
  u32 count = b.count[member], t = threadIdx.x;
#pragma unroll
  for (int i = 0; i < MINE; i++) {
    u32 at = t + i * THREADS;
    e[i] = at < count ? spill[at] : make_uint2(0, 0);
  }
  u32 value = 0, number = 0, want = c.rows.chosen;
  for (int pass = 0; pass < 8; pass++) {
    int shift = 24 - 8 * (pass & 3);
    if (t < 256) b.bins[t] = 0;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < MINE; i++) {
      if (!e[i].x || (pass >= 4 && e[i].x != value)) continue;
      u32 x = pass < 4 ? e[i].x : ~e[i].y, known = pass < 4 ? value : number;
      if (shift < 24 && (x ^ known) >> (shift + 8)) continue;
      atomicAdd(b.bins + ((x >> shift) & 255), 1);
    }
    __syncthreads();
    u32 mine = t < 256 ? b.bins[t] : 0, total;
    u32 higher = above<THREADS>(mine, b.room, &total);
    if (pass == 4 && total == want) break;
    if (t < 256 && higher < want && higher + mine >= want) b.cut[0] = t, b.cut[1] = want - higher;
    __syncthreads();
    if (pass < 4) value |= b.cut[0] << shift;
    else number |= b.cut[0] << shift;
    want = b.cut[1];
  }
  if (t == 0) b.kept = 0;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < MINE; i++)
    if (e[i].x > value || (e[i].x && e[i].x == value && ~e[i].y >= number)) spill[atomicAdd(&b.kept, 1)] = e[i];
  __syncthreads();
  if (t == 0) b.count[member] = b.kept, b.least[member] = value;
  __syncthreads();
}

// Take what beats its query's least into the spill. Lanes that differ in bit 1 hold scores of different queries.
__device__ __forceinline__ void take(Held& b, uint2* spills, int member, u32 order, int row, int lane) {
  bool taken = order > b.least[member];
  u32 who = __ballot_sync(~0u, taken);
  if (!who) return;
  who &= lane & 2 ? 0xCCCCCCCCu : 0x33333333u;
  u32 to = 0;
  if (!(lane & ~2) && who) to = atomicAdd(b.count + member, __popc(who));
  to = __shfl_sync(~0u, to, lane & 2) + __popc(who & ((1u << lane) - 1));
  if (taken) spills[member * SPILL + to] = make_uint2(order, row);
}

// Best of each block of 8 rows of a warp's 16, of two queries: four lanes write them.
__device__ __forceinline__ void write_maxima(const Call& c, int line, int sees, u32 order, int tile_row, int lane) {
#pragma unroll
  for (int by = 4; by < 32; by *= 2) order = max(order, __shfl_xor_sync(~0u, order, by));
  int block = tile_row / BLOCK + (lane & 1);
  if (lane < 4 && block * BLOCK < sees)
    c.blocks.orders[(i64)line * c.blocks.stride + block] = block == (sees - 1) / BLOCK ? ~0u : order;
}

struct Span {  // of tiles of 64 keys
  int first_query, members, first, stop;
};

__device__ void scan_share(const Call& c, u8* shared, Held& b, uint2* spills, Span x) {
  int wide = threadIdx.x >> 7, warp = (threadIdx.x >> 5) & 3, lane = threadIdx.x & 31, group = lane & 3;
  int most = 0;
  for (int m = 0; m < x.members; m++) most = max(most, b.sees[m]);
  int stop = min(x.stop, (most + 63) / 64), tile = x.first + wide;
  if (x.first >= stop) return;
  const float* weights = (const float*)(shared + WEIGHTS_AT) + 2 * group;
  Feed feed{c, c.table + (i64)c.slots[x.first_query] * c.table_width, most, group, GROUPS * 64,
            tile * 64 + warp * 16 + (lane >> 2)};
  feed.start();
  for (int from = x.first; from < stop; from += EPOCH * GROUPS) {
    for (int i = 0; i < EPOCH && tile < stop; i++, tile += GROUPS) {
      u32 a[8][4];
      expand_keys(feed.keys, a);
      int row = feed.at + 8 * (lane & 1);
      feed.load();
      feed.find(feed.at + 2 * GROUPS * 64);
      feed.at += GROUPS * 64;
      for (int set = 0; set * TOGETHER < x.members; set++) {
        float d[64];
        u32 base = descriptor(shared + set * SET_BYTES);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int step = 0; step < 8; step++) product_128(d, a[step], base + (step >> 2) * 1024 + (step & 3) * 2, step > 0);
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
        float half[TOGETHER];
#pragma unroll
        for (int r = 0; r < TOGETHER; r++) {
          float sum[2] = {0.f, 0.f};
#pragma unroll
          for (int j = 0; j < 4; j++) {
            float2 w = *(const float2*)(weights + (set * TOGETHER + r) * 32 + 8 * j);
#pragma unroll
            for (int h = 0; h < 2; h++) {
              sum[h] = fmaf(twice_positive(d[4 * (4 * r + j) + 2 * h]), w.x, sum[h]);
              sum[h] = fmaf(twice_positive(d[4 * (4 * r + j) + 2 * h + 1]), w.y, sum[h]);
            }
          }
          half[r] = quad_half(sum[0], sum[1], lane);
        }
        // A lane ends with two queries' scores of one key: bit 0 tells the key, bit 1 the query.
#pragma unroll
        for (int r = 0; r < TOGETHER; r += 2) {
          float mine = lane & 2 ? half[r + 1] : half[r], other = lane & 2 ? half[r] : half[r + 1];
          float score = mine + __shfl_xor_sync(~0u, other, 2);
          int member = set * TOGETHER + r + ((lane >> 1) & 1), sees = b.sees[member];
          u32 order = row < sees ? ordered(score) : 0u;
          take(b, spills, member, order, row, lane);
          if (c.publish) write_maxima(c, x.first_query + member, sees, order, tile * 64 + warp * 16, lane);
        }
      }
    }
    __syncthreads();
    for (int m = 0; m < x.members; m++)
      if (b.count[m] > FULL) cut_back(c, b, spills + m * SPILL, m);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) scan_many(const __grid_constant__ Call c) {
  extern __shared__ u8 raw[];
  u8* shared = raw + ((1024 - (shared_address(raw) & 1023)) & 1023);
  Held& b = *(Held*)(shared + WEIGHTS_AT + MEMBERS * 32 * 4);
  uint2* spills = c.spill + (i64)blockIdx.x * MEMBERS * SPILL;
  int t = threadIdx.x;
  for (int item = blockIdx.x; item < c.group_count * c.shares; item += gridDim.x) {
    if (c.left && !c.left[item]) continue;
    int number = item / c.shares, share = item % c.shares;
    Span x{c.groups[2 * number], min(c.groups[2 * number + 1], MEMBERS), share * c.share, (share + 1) * c.share};
    __syncthreads();
    for (int i = t; i < MEMBERS * 512; i += THREADS) {
      int member = i >> 9, head = (i >> 4) & 31, unit = i & 15;
      uint4 v = make_uint4(0, 0, 0, 0);
      if (member < x.members && head < c.heads)
        v = *(const uint4*)(c.q + (((i64)(x.first_query + member) * c.heads + head) * 128 + unit * 8) * 2);
      put_query(shared + member / TOGETHER * SET_BYTES, 128, member % TOGETHER * 32 + head, unit, v);
    }
    for (int i = t; i < MEMBERS * 32; i += THREADS) {
      int member = i >> 5, head = i & 31;
      bool real = member < x.members && head < c.heads;
      ((float*)(shared + WEIGHTS_AT))[i] = real ? 0.5f * bfloat_at(c.weights + ((i64)(x.first_query + member) * c.heads + head) * 2) : 0.f;
    }
    if (t < MEMBERS) {
      b.count[t] = b.least[t] = 0;
      b.sees[t] = t < x.members ? min((int)c.visible[x.first_query + t], c.limit) : 0;
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    scan_share(c, shared, b, spills, x);
    __syncthreads();
    for (int m = 0; m < x.members; m++) {
      // Lists of several shares must fit one query's room.
      if (c.shares > 1 && b.count[m] > (u32)c.rows.chosen) cut_back(c, b, spills + m * SPILL, m);
      int line = x.first_query + m;
      u32 count = b.count[m];
      if (t == 0) b.kept = atomicAdd(c.rows.counts + line, count);
      __syncthreads();
      uint2* to = c.rows.found + (i64)line * c.rows.room + b.kept;
      for (u32 i = t; i < count; i += THREADS) to[i] = spills[m * SPILL + i];
      __syncthreads();
    }
  }
}

static const int CHOOSERS = 512;

extern "C" __global__ void __launch_bounds__(CHOOSERS) choose(const __grid_constant__ Call c) {
  extern __shared__ uint2 held[];
  __shared__ u32 room[33], bins[1024], cut[3];
  choose_best<CHOOSERS>(c, c.rows, false, blockIdx.x, 0, held, bins, room, cut, false);
}
