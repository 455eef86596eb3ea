// Index selection of queries that share no keys, for Hopper (sm_90a): scores of 32 heads x 128 channels and the exact K best.
//
// A block scores a share of a query's keys (keys are the left operand, expanded in registers), writes each score as an ordered number
// and counts them in 4,096 bins of their leading bits. Once all shares of a query are counted, each block keeps what lies in the bins
// that hold the K best; the last to do so picks exactly, ties to the lower id, ascending. Knows no requests and no layers.

static const int THREADS = 256, WARPS = THREADS / 32;
static const int TILE = 128, STEP = THREADS;           // keys that a warpgroup takes at once, and all of a block
static const int STAGES = 3;                          // of a warp: tiles under way and the one in use
static const int STAGE_BYTES = 32 * 68;               // 32 keys' codes, then their scales
static const int ENTRIES = 1000;                      // candidate blocks whose places are held
static const int SCANS_ONLY = 1, REST_ONLY = 2;

__device__ __forceinline__ void product_32(float (&d)[16], const u32* a, u32 b, int keep) {
  asm volatile(
      "{\n.reg .pred p;\n.reg .b64 b;\nsetp.ne.b32 p, %21, 0;\nmov.b64 b, {%20, " HIGH "};\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
      "{%16, %17, %18, %19}, b, p, 1, 1, 0;\n}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]),
        "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(keep));
}
__device__ __forceinline__ void fetch_unit(u8* to, const u8* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}
__device__ __forceinline__ void fetch_word(u8* to, const u8* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(to)), "l"(from) : "memory");
}
__device__ __forceinline__ void copies_close() { asm volatile("cp.async.commit_group;" ::: "memory"); }
__device__ __forceinline__ void copies_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory"); }
__device__ __forceinline__ void count_if(u32* bins, u32 order) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %1, 0;\n@p red.shared.add.u32 [%0], 1;\n}" ::"r"(
                   shared_address(bins + (order >> BIN_SHIFT))),
               "r"(order)
               : "memory");
}
// A word that other blocks change.
__device__ __forceinline__ u32 word_of_others(const u32* p) {
  u32 x;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
  return x;
}

struct Entry {  // where a candidate block's keys lie
  const u8* codes;
  int scales, first;  // from codes to scales; the first row, or a row that nobody sees
};
struct Shared {  // its parts of 1,024 bytes alignment first
  u32 room[33], cut[3], count, last, unused[218];
  uint4 bins[BINS / 4];
  u8 queries[8192];
  // The places of a pool's blocks, or bins of candidate blocks; scores done, candidates lie from `held` on.
  uint4 behind[BINS / 4];
  u8 ring[WARPS][STAGES][STAGE_BYTES];
};
static const int HELD_AT = 1024 + 4096;  // behind the bins that choosing needs

template <bool POOL, bool PUBLISH> struct Scan {
  const Call& c;
  Shared& s;
  u32* block_bins;
  const Entry* entries;
  const int* table;
  int n, first, end, sees;  // places of the share; rows that the query sees
  int warp, lane;

  // Start the copies of the warp's 32 keys at `place` to `stage`; `page` is theirs unless they are a pool's.
  __device__ __forceinline__ void copy(int place, int page, u8* to) const {
    if (POOL) {
      const Entry* four = entries + ((place - first) >> 3);
#pragma unroll
      for (int i = 0; i < 4; i++) fetch_unit(to + i * 512, four[i].codes + lane * 16);
      const Entry& mine = four[lane >> 3];
      fetch_word(to + 2048 - lane * 12, mine.codes + mine.scales + (lane & 7) * 4);
    } else {
      int inside = place & ((1 << c.page_shift) - 1);
      const u8* base = c.pages + page * c.page_bytes;
      const u8* codes = base + (c.key_codes + inside * 64 + lane * 16);
#pragma unroll
      for (int i = 0; i < 4; i++) fetch_unit(to + i * 512, codes + i * 512);
      fetch_word(to + 2048 - lane * 12, base + (c.key_scales + inside * 4 + lane * 4));
    }
  }
  __device__ __forceinline__ int page_of(int place) const { return POOL || place >= end ? 0 : __ldg(table + (place >> c.page_shift)); }

  // Start the first copies.
  __device__ __forceinline__ void start() const {
    int at = first + warp * 32, pages[STAGES - 1];
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) pages[i] = page_of(at + i * STEP);
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) {
      if (at + i * STEP < end) copy(at + i * STEP, pages[i], s.ring[warp][i] + lane * 16);
      copies_close();
    }
  }
  __device__ __forceinline__ void run(u32 queries, const float (&weight)[8]) const {
    u8* ring = s.ring[warp][0];
    // Of 32 keys a lane ends with number lane / 4 + 8 (lane % 4).
    int at = first + warp * 32, mine = (lane >> 2) + 8 * (lane & 3), stage = 0, ahead = at + (STAGES - 1) * STEP, page = page_of(ahead);
    u32* to = c.rows.orders + (i64)n * c.rows.stride + mine;
    for (int tile = first + warp / 4 * TILE; tile < end; tile += STEP) {
      copies_wait();
      __syncwarp();
      const u8* held = ring + stage * STAGE_BYTES;
      float d[2][16];
#pragma unroll
      for (int u = 0; u < 2; u++) {
        Keys keys;
#pragma unroll
        for (int h = 0; h < 2; h++) {
          keys.code[h] = *(const uint4*)(held + (2 * u + h) * 512 + lane * 16);
          keys.scale[h] = held[2048 + (2 * u + h) * 32 + lane];
        }
        u32 a[8][4];
        expand_keys(keys, a);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int k = 0; k < 8; k++) product_32(d[u], a[k], queries + (k >> 2) * 256 + (k & 3) * 2, k > 0);
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      }
      // The stage read in the last turn is free.
      stage = stage == 0 ? STAGES - 1 : stage - 1;
      if (ahead < end) copy(ahead, page, ring + stage * STAGE_BYTES + lane * 16);
      copies_close();
      ahead += STEP, page = page_of(ahead);
      stage = stage >= STAGES - 2 ? stage - (STAGES - 2) : stage + 2;
      float half[2];
#pragma unroll
      for (int u = 0; u < 2; u++) {
        if (u == 0) asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
        else asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
        float sum[2] = {0.f, 0.f};
#pragma unroll
        for (int j = 0; j < 8; j++)
#pragma unroll
          for (int h = 0; h < 2; h++) sum[h] = fmaf(twice_positive(d[u][4 * (j >> 1) + 2 * h + (j & 1)]), weight[j], sum[h]);
        half[u] = quad_half(sum[0], sum[1], lane);
      }
      float score = lane & 2 ? half[1] : half[0];
      score += __shfl_xor_sync(~0u, lane & 2 ? half[0] : half[1], 2);
      u32 order = ordered(score);
      bool here = at + mine < end;
      if (POOL) here = here && (u32)entries[(at + mine - first) >> 3].first + (mine & 7) < (u32)sees;
      if (!here) order = 0;
      if (at + mine < end) to[at] = order;
      count_if((u32*)s.bins, order);
      if (PUBLISH) {
#pragma unroll
        for (int by = 4; by < 32; by *= 2) order = max(order, __shfl_xor_sync(~0u, order, by));
        int block = (at >> 3) + lane;
        if (lane < 4 && block * BLOCK < end) {
          u32 best = block == (sees - 1) / BLOCK ? ~0u : order;
          c.blocks.orders[(i64)n * c.blocks.stride + block] = best;
          count_if(block_bins, best);
        }
      }
      at += STEP;
    }
  }
};

__device__ __forceinline__ void add_bins(const uint4* mine, u32* to) {
#pragma unroll 1
  for (int i = threadIdx.x; i < BINS / 4; i += THREADS) {
    uint4 v = mine[i];
    if (!(v.x | v.y | v.z | v.w)) continue;
    if (v.x) atomicAdd(to + 4 * i, v.x);
    if (v.y) atomicAdd(to + 4 * i + 1, v.y);
    if (v.z) atomicAdd(to + 4 * i + 2, v.z);
    if (v.w) atomicAdd(to + 4 * i + 3, v.w);
  }
}
// Count this block in; all its writes come before. The count before it, in all threads.
__device__ __forceinline__ u32 count_block(u32* counter, Shared& s) {
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) s.last = atomicAdd(counter, 1);
  __syncthreads();
  return s.last;
}

struct Cut {  // the lowest bin that holds one of the K best, and how many lie above it
  u32 bin, above;
};
__device__ Cut cut_of(const List& list, int n, Shared& s) {
  const uint4* from = (const uint4*)(list.bins + (i64)n * BINS + threadIdx.x * 16);
  u32 held[16], mine = 0, all;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    uint4 v = __ldcg(from + i);
    held[4 * i] = v.x, held[4 * i + 1] = v.y, held[4 * i + 2] = v.z, held[4 * i + 3] = v.w;
    mine += v.x + v.y + v.z + v.w;
  }
  if (threadIdx.x == 0) s.cut[0] = s.cut[1] = 0;
  u32 higher = above<THREADS>(mine, s.room, &all), want = list.chosen;
  if (higher < want && higher + mine >= want) {
    u32 bin = 15, sum = higher, over = higher;
#pragma unroll
    for (int i = 15; i >= 0; i--) {
      if (sum < want) bin = i, over = sum;
      sum += held[i];
    }
    s.cut[0] = threadIdx.x * 16 + bin, s.cut[1] = over;
  }
  __syncthreads();
  Cut cut = {s.cut[0], s.cut[1]};
  __syncthreads();
  return cut;
}

// What reaches the cut among places [first, end) of a list, to the query's candidates.
template <bool BLOCKS>
__device__ void sift(const Call& c, const List& list, int n, int first, int end, u32 bin, Shared& s, uint2* held) {
  if (threadIdx.x == 0) s.count = 0;
  __syncthreads();
  u32 least = max(bin << BIN_SHIFT, 1u);
  const u32* orders = list.orders + (i64)n * list.stride;
  const int* pool = c.pool + (i64)n * c.pool_blocks;
  for (int at = first + 4 * threadIdx.x; at < end; at += 16 * THREADS) {
    uint4 v[4];
    u32 hits = 0;
#pragma unroll
    for (int j = 0; j < 4; j++) v[j] = at + j * 4 * THREADS < end ? *(const uint4*)(orders + at + j * 4 * THREADS) : make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int j = 0; j < 4; j++)
      hits |= ((v[j].x >= least) | (v[j].y >= least) << 1 | (v[j].z >= least) << 2 | (v[j].w >= least) << 3) << (4 * j);
    for (; hits; hits &= hits - 1) {
      int bit = __popc((hits & -hits) - 1), place = at + (bit >> 2) * 4 * THREADS + (bit & 3);
      if (place >= end) break;
      u32 to = atomicAdd(&s.count, 1), order = orders[place];
      if (!BLOCKS && c.pool_blocks) place = pool[place >> 3] * BLOCK + (place & 7);
      if (to < (u32)list.room) held[to] = make_uint2(order, place);
    }
  }
  __syncthreads();
  u32 count = s.count;
  if (!count) return;
  if (threadIdx.x == 0) s.last = atomicAdd(list.counts + n, count);
  __syncthreads();
  for (u32 i = threadIdx.x; i < count && i + s.last < (u32)list.room; i += THREADS) list.found[(i64)n * list.room + s.last + i] = held[i];
  __syncthreads();
}

struct Work {  // a block's share of a query's keys
  int n, first, end, sees;
  const int* table;
};
struct Query {  // a thread's part of a query's heads, and its quad's weights
  uint4 part[512 / THREADS];
  float weight[8];

  __device__ __forceinline__ Query(const Call& c, int n) {
    int t = threadIdx.x;
#pragma unroll
    for (int i = 0; i < 512 / THREADS; i++) {
      int head = (t + i * THREADS) >> 4;
      part[i] = head < c.heads ? *(const uint4*)(c.q + (((i64)n * c.heads + head) * 16 + (t & 15)) * 16) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int j = 0; j < 8; j++) {
      int head = 8 * (j >> 1) + 2 * (t & 3) + (j & 1);
      weight[j] = head < c.heads ? 0.5f * bfloat_at(c.weights + ((i64)n * c.heads + head) * 2) : 0.f;
    }
  }
};
template <bool POOL, bool PUBLISH>
__device__ __forceinline__ void score(const Call& c, Shared& s, const Work& x, const Query& query) {
  int t = threadIdx.x, warp = t >> 5, lane = t & 31;
  Entry* entries = (Entry*)s.behind;
  for (int i = t; i < BINS / 4; i += THREADS) {
    s.bins[i] = make_uint4(0, 0, 0, 0);
    if (PUBLISH) s.behind[i] = make_uint4(0, 0, 0, 0);
  }
  for (int from = x.first; from < x.end; from += ENTRIES * BLOCK) {
    int to = POOL ? min(x.end, from + ENTRIES * BLOCK) : x.end;
    if (POOL) {
      __syncthreads();
      // Up to three more than there are, for a warp's 32 keys.
      for (int i = t; i < (to - from) / BLOCK + 3; i += THREADS) {
        int place = from + i * BLOCK, block = place < to ? c.pool[(i64)x.n * c.pool_blocks + (place >> 3)] : -1, row = block * BLOCK;
        bool real = block >= 0 && row < x.sees;
        int inside = real ? row & ((1 << c.page_shift) - 1) : 0;
        // A block that nobody sees reads the first rows of page 0 and does not count.
        const u8* base = c.pages + (real ? x.table[row >> c.page_shift] : 0) * c.page_bytes;
        entries[i] = {base + c.key_codes + inside * 64, c.key_scales - c.key_codes - inside * 60, real ? row : 0x40000000};
      }
      __syncthreads();
    }
    Scan<POOL, PUBLISH> scan{c, s, (u32*)s.behind, entries, x.table, x.n, from, to, x.sees, warp, lane};
    scan.start();
    if (from == x.first) {
#pragma unroll
      for (int i = 0; i < 512 / THREADS; i++) put_query(s.queries, 32, (t + i * THREADS) >> 4, t & 15, query.part[i]);
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      __syncthreads();
    }
    scan.run(descriptor(s.queries), query.weight);
    if (!POOL) break;
  }
  __syncthreads();
  add_bins(s.bins, c.rows.bins + (i64)x.n * BINS);
  if (PUBLISH) add_bins(s.behind, c.blocks.bins + (i64)x.n * BINS);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) few(const __grid_constant__ Call c) {
  extern __shared__ u8 raw[];
  Shared& s = *(Shared*)(raw + ((1024 - (shared_address(raw) & 1023)) & 1023));
  int n = blockIdx.x / c.shares, first = blockIdx.x % c.shares * c.share, t = threadIdx.x;
  Query query(c, n);  // depends on nothing and is asked for first
  const int* table = c.table + (i64)c.slots[n] * c.table_width;
  int sees = min((int)c.visible[n], c.limit), end = min(first + c.share, c.pool_blocks ? c.pool_blocks * BLOCK : sees);
  uint2* held = (uint2*)((u8*)&s + HELD_AT);
  u32* arrivals = c.arrivals + 2 * n;
  if (c.phase == SCANS_ONLY) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  if (c.phase == REST_ONLY) asm volatile("griddepcontrol.wait;" ::: "memory");
  if (c.phase != REST_ONLY) {
    if (first < end) {
      Work x{n, first, end, sees, table};
      if (c.pool_blocks) score<true, false>(c, s, x, query);
      else if (c.publish) score<false, true>(c, s, x, query);
      else score<false, false>(c, s, x, query);
    }
    if (c.phase == SCANS_ONLY) return;
    count_block(arrivals, s);
    if (t == 0)
      while (word_of_others(arrivals) < (u32)c.shares) {}
    __syncthreads();
  }
  Cut rows = cut_of(c.rows, n, s), blocks = {0, 0};
  if (first < end) sift<false>(c, c.rows, n, first, end, rows.bin, s, held);
  if (c.publish) {
    blocks = cut_of(c.blocks, n, s);
    if (first < end) sift<true>(c, c.blocks, n, first / BLOCK, (end + BLOCK - 1) / BLOCK, blocks.bin, s, held);
  }
  if (count_block(arrivals + 1, s) != (u32)c.shares - 1) return;
  __threadfence();
  for (int list = 0; list <= c.publish; list++) {
    __syncthreads();
    choose_best<THREADS>(c, list ? c.blocks : c.rows, list, n, list ? blocks.bin : rows.bin, list ? blocks.above : rows.above, held,
                         (u32*)s.bins, s.room, s.cut);
  }
  if (t < 2) arrivals[t] = 0;
}
