// Index selection of queries that share no keys, for Hopper (sm_90a): scores of 32 heads x 128 channels and the exact K best.
//
// A block scores a share of a query's keys (keys are the left operand, expanded in registers) with FP8 products, or with bfloat16 ones
// where a key or the query does not fit, keeps each score as an ordered number and counts them in 4,096 bins of their leading bits. Shares
// of up to 4,096 keys list their best, and one block picks among these (`lists.cuh`). Otherwise, or where the lists do not hold the K best,
// all learn which bin these surely reach, each sends what does, and one block chooses exactly (`choose.cuh`). Ties go to the lower id, ids
// are ascending. Knows no requests and no layers.

static const int THREADS = 256, WARPS = THREADS / 32;
static const int TILE = 128, STEP = THREADS;           // keys that a warpgroup takes at once, and all of a block
static const int STAGES = 3;                          // of a warp: tiles under way and the one in use
static const int STAGE_BYTES = 32 * 68;               // 32 keys' codes, then their scales
static const int ENTRIES = 1000;                      // candidate blocks whose places are held
static const int KEPT = 4096;                         // scores of a share that stay in shared memory

__device__ __forceinline__ void product_32(float (&d)[16], const u32* a, u32 b, int keep) {
  asm volatile(PRODUCT_32("m64n32k16.f32.bf16.bf16", ", 0", d, a, b, keep));
}
__device__ __forceinline__ void product_32_fp8(float (&d)[16], const u32* a, u32 b, int keep) {
  asm volatile(PRODUCT_32("m64n32k32.f32.e5m2.e5m2", "", d, a, b, keep));
}
__device__ __forceinline__ void fetch_unit(u8* to, const u8* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}
__device__ __forceinline__ void fetch_word(u8* to, const u8* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(to)), "l"(from) : "memory");
}
__device__ __forceinline__ void copies_close() { asm volatile("cp.async.commit_group;" ::: "memory"); }
__device__ __forceinline__ void copies_end() { asm volatile("cp.async.wait_all;" ::: "memory"); }
__device__ __forceinline__ void copies_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory"); }
__device__ __forceinline__ void count_if(u32* bins, u32 order) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %1, 0;\n@p red.shared.add.u32 [%0], 1;\n}" ::"r"(
                   shared_address(bins + (order >> BIN_SHIFT))),
               "r"(order)
               : "memory");
}
__device__ __forceinline__ u32 count_up(u32* p) {
  u32 x;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(x) : "l"(p) : "memory");
  return x;
}
__device__ __forceinline__ void ask_for(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
// A word that other blocks change, and how one changes it once what it stands for is written.
__device__ __forceinline__ u32 word_of_others(const u32* p) {
  u32 x;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
  return x;
}

// The same where it stands for nothing else.
__device__ __forceinline__ u32 glimpse(const u32* p) {
  u32 x;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
  return x;
}
__device__ __forceinline__ void tell(u32* p, u32 x) { asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(x) : "memory"); }

struct Entry {  // where a candidate block's keys lie
  const u8* codes;
  int scales, first;  // from codes to scales; the first row, or a row that nobody sees
};
struct Shared {  // its parts of 1,024 bytes alignment first
  u32 room[33], cut[3], count, last, unfit, spare;
  float weights[32];
  // The block's share and its query's pages: kept here, as registers are short while it is scored.
  int first, end, share;
  const int* table;
  u32 before[2], unused[176];  // verdicts on both lists when the launch began
  uint4 bins[BINS / 4];
  u8 queries[8192];
  // The places of a pool's blocks, or bins of candidate blocks; scores done, candidates lie from `held` on.
  uint4 behind[BINS / 4];
  u8 ring[WARPS][STAGES][STAGE_BYTES];
  u32 scores[KEPT];
};
static const int HELD_AT = 1024 + 4096;  // behind the bins that choosing needs
struct Progress {                        // of the blocks of a query; zero between launches, but for verdicts
  u32 scored, sifted, chosen, unused[29];
  u32 verdicts[2], others[30];  // on a line of their own: all wait for them
};
static const u32 VERDICT_BITS = 13;  // a verdict: how many there were, then DONE or 1 + a bin that the K best reach

// Whether a key that counts, of a warp's 32 at `at`, does not fit FP8 products; `entries` are a pool's, from `first` on.
__device__ __noinline__ bool unfit(const u8* held, int at, int first, int end, int sees, const Entry* entries) {
  bool bad = false;
  int lane = threadIdx.x & 31;
  for (int i = 0; i < 4; i++) {
    int place = at + 8 * i + (lane >> 2);
    const uint4& v = *(const uint4*)(held + i * 512 + lane * 16);
    bool counts = place < end && (!entries || (u32)entries[(place - first) >> 3].first + (place & 7) < (u32)sees);
    bad |= counts && beyond_fp8(held[2048 + i * 32 + lane]) && ((v.x | v.y | v.z | v.w) & 0x77777777u);
  }
  return bad;
}

template <bool POOL, bool PUBLISH> struct Scan {
  const Call& c;
  Shared& s;
  u32* block_bins;
  const Entry* entries;
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
      u32 inside = place & ((1 << c.page_shift) - 1);
      const u8* base = c.pages + (u64)(u32)page * (u32)c.page_bytes;
      const u8* codes = base + (u32)(c.key_codes + inside * 64 + lane * 16);
#pragma unroll
      for (int i = 0; i < 4; i++) fetch_unit(to + i * 512, codes + i * 512);
      fetch_word(to + 2048 - lane * 12, base + (u32)(c.key_scales + inside * 4 + lane * 4));
    }
  }
  __device__ __forceinline__ int page_of(int place) const { return POOL || place >= end ? 0 : __ldg(s.table + ((u32)place >> c.page_shift)); }

  // Start the first copies.
  __device__ __forceinline__ void start(const int* table) const {
    int at = first + warp * 32, pages[STAGES - 1];
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) pages[i] = POOL || at + i * STEP >= end ? 0 : __ldg(table + ((u32)(at + i * STEP) >> c.page_shift));
#pragma unroll 1
    for (int i = 0; i < STAGES - 1; i++) {
      if (at + i * STEP < end) copy(at + i * STEP, i ? pages[1] : pages[0], s.ring[warp][i] + lane * 16);
      copies_close();
    }
  }
  // Score and count the share. With FP8 products: whether a key did not fit.
  template <bool IN_FP8> __device__ __forceinline__ bool run(u32 queries, const float (&weight)[8]) const {
    u8* ring = s.ring[warp][0];
    // Of 32 keys a lane ends with number lane / 4 + 8 (lane % 4).
    int at = first + warp * 32, mine = (lane >> 2) + 8 * (lane & 3), stage = 0, ahead = at + (STAGES - 1) * STEP, page = page_of(ahead);
    u32 *to = c.rows.orders + (i64)n * c.rows.stride + mine, *kept = s.scores + mine;
    bool bad = false;
    for (int tile = first + warp / 4 * TILE; tile < end; tile += STEP) {
      copies_wait();
      __syncwarp();
      const u8* held = ring + stage * STAGE_BYTES;
      float d[2][16];
      u32 scales = 0;
#pragma unroll
      for (int u = 0; u < 2; u++) {
        Keys keys;
#pragma unroll
        for (int h = 0; h < 2; h++) {
          keys.code[h] = *(const uint4*)(held + (2 * u + h) * 512 + lane * 16);
          keys.scale[h] = held[2048 + (2 * u + h) * 32 + lane];
          scales = max(scales, keys.scale[h] - LOWEST_FP8);
        }
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
        if (IN_FP8) {
          u32 a[4][4];
          expand_fp8(keys, a);
#pragma unroll
          for (int k = 0; k < 4; k++) product_32_fp8(d[u], a[k], queries + k * 2, k > 0);
        } else {
          u32 a[8][4];
          expand_keys(keys, a);
#pragma unroll
          for (int k = 0; k < 8; k++) product_32(d[u], a[k], queries + (k >> 2) * 256 + (k & 3) * 2, k > 0);
        }
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
      // A scale below the lowest wraps around. (Here, as products must not be under way at a call.)
      if (IN_FP8 && scales > 2 * WIDE_FP8) bad |= unfit(held, at, POOL ? first : s.first, end, sees, POOL ? entries : nullptr);
      float score = lane & 2 ? half[1] : half[0];
      score += __shfl_xor_sync(~0u, lane & 2 ? half[0] : half[1], 2);
      u32 order = ordered(score);
      bool here = at + mine < end;
      if (POOL) here = here && (u32)entries[(at + mine - first) >> 3].first + (mine & 7) < (u32)sees;
      if (!here) order = 0;
      if (at + mine < end && !c.rows.entries) to[(u32)at] = order;
      kept[at - (POOL ? first : s.first) & KEPT - 1] = order;
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
    return bad;
  }
};

// Add the highest of this block's bins, `enough` of its scores, to the query's.
__device__ __noinline__ void add_best(const uint4* mine, u32* to, u32 enough, Shared& s) {
  u32 sum = 0, all;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    uint4 v = mine[threadIdx.x * 4 + i];
    sum += v.x + v.y + v.z + v.w;
  }
  u32 higher = above<THREADS>(sum, s.room, &all);
  if (!sum || higher >= enough) return;
#pragma unroll 1
  for (int i = 15; i >= 0 && higher < enough; i--) {
    u32 x = ((const u32*)mine)[threadIdx.x * 16 + i];
    if (x) atomicAdd(to + threadIdx.x * 16 + i, x);
    higher += x;
  }
}
// Count this block in: what its threads wrote is seen by whoever sees the count, and what is read afterwards is what those before it
// wrote (from L2: the first level may hold older lines). The count before it, in all threads.
__device__ __forceinline__ u32 count_block(u32* counter, Shared& s) {
  __syncthreads();
  if (threadIdx.x == 0) s.last = count_up(counter);
  __syncthreads();
  return s.last;
}
// A bin that the K best reach by what was counted: the lowest of theirs if all was. 0 if fewer were counted.
__device__ __noinline__ u32 bin_of(const List& list, int n, Shared& s) {
  const uint4* from = (const uint4*)(list.bins + (i64)n * BINS + threadIdx.x * 16);
  u32 held[16], mine = 0, all;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    uint4 v = __ldcg(from + i);
    held[4 * i] = v.x, held[4 * i + 1] = v.y, held[4 * i + 2] = v.z, held[4 * i + 3] = v.w;
    mine += v.x + v.y + v.z + v.w;
  }
  if (threadIdx.x == 0) s.cut[0] = 0;
  u32 higher = above<THREADS>(mine, s.room, &all), want = list.chosen;
  if (higher < want && higher + mine >= want) {
    u32 bin = 15, sum = higher;
#pragma unroll
    for (int i = 15; i >= 0; i--) {
      if (sum < want) bin = i;
      sum += held[i];
    }
    s.cut[0] = threadIdx.x * 16 + bin;
  }
  __syncthreads();
  u32 bin = s.cut[0];
  __syncthreads();
  return bin;
}

// What reaches `bin` among places [first, end) of a list, to the query's candidates. `kept`: these places' scores.
template <bool BLOCKS>
__device__ __noinline__ void sift(const Call& c, const List& list, int n, int first, int end, u32 bin, Shared& s, const u32* kept, uint2* held) {
  if (threadIdx.x == 0) s.count = 0;
  __syncthreads();
  u32 least = max(bin << BIN_SHIFT, 1u);
  const int* pool = c.pool + (i64)n * c.pool_blocks;
  int length = end - first;
  // Lists did without these; where more is kept than there is room for, they are read.
  if (!BLOCKS && list.entries)
    for (int i = threadIdx.x; i < length; i += THREADS) list.orders[(i64)n * list.stride + first + i] = kept[i];
  for (int at = 4 * threadIdx.x; at < length; at += 16 * THREADS) {
    uint4 v[4];
    u32 hits = 0;
#pragma unroll
    for (int j = 0; j < 4; j++) v[j] = *(const uint4*)(kept + min(at + j * 4 * THREADS, length - 1 & ~3));
#pragma unroll
    for (int j = 0; j < 4; j++)
      hits |= ((v[j].x >= least) | (v[j].y >= least) << 1 | (v[j].z >= least) << 2 | (v[j].w >= least) << 3) << (4 * j);
    for (; hits; hits &= hits - 1) {
      int bit = __popc((hits & -hits) - 1), i = at + (bit >> 2) * 4 * THREADS + (bit & 3), place = first + i;
      if (i >= length) break;
      u32 to = atomicAdd(&s.count, 1), order = kept[i];
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

__device__ __forceinline__ u32 by_shares(const Call& c, u32 x) { return (u64)x * (u32)c.inverse >> 31; }  // x / c.shares, exact below 2^22
struct Work {  // a block's share of a query's places (rows, or rows of its pool), whatever the launch was cut for
  int n, first, end, sees, share;
  const int* table;

  __device__ __forceinline__ static int share_of(const Call& c, int places) {
    return by_shares(c, (u32)(places + STEP * c.shares - 1) / STEP) * STEP;
  }
  __device__ __forceinline__ Work(const Call& c, int query, int number, int places, int visible, const int* pages)
      : n(query), sees(visible), share(share_of(c, places)), table(pages) {
    first = number * share;
    end = min(first + share, places);
  }
  __device__ __forceinline__ void note(Shared& s) const {
    if (threadIdx.x == 0) s.first = first, s.end = end, s.share = share, s.table = table;
  }
};
struct Query {  // a thread's part of a query's heads: channels of unit thread % 16, and in the first of these threads their weights
  uint4 part[512 / THREADS];
  float weight[512 / THREADS];

  __device__ __forceinline__ Query(const Call& c, int n) {
    int t = threadIdx.x;
#pragma unroll
    for (int i = 0; i < 512 / THREADS; i++) {
      int head = (t + i * THREADS) >> 4;
      part[i] = head < c.heads ? *(const uint4*)(c.q + (((i64)n * c.heads + head) * 16 + (t & 15)) * 16) : make_uint4(0, 0, 0, 0);
      weight[i] = head < c.heads && !(t & 15) ? 0.5f * bfloat_at(c.weights + ((i64)n * c.heads + head) * 2) : 0.f;
    }
  }
  // To shared memory, as FP8 numbers if so asked; false, in all threads, if they do not fit these. `own` are the weights of a thread's sums.
  template <bool IN_FP8> __device__ __forceinline__ bool put(Shared& s, float (&own)[8]) const {
    int t = threadIdx.x;
    bool unfit = false;
    if (IN_FP8 && t == 0) s.unfit = 0;
#pragma unroll 1
    for (int i = 0; i < 512 / THREADS; i++) {
      int head = (t + i * THREADS) >> 4;
      uint4 v = i ? part[1] : part[0];
      float mine = i ? weight[1] : weight[0];
      if (IN_FP8) {
        u32 most = largest_exponent(v);
#pragma unroll
        for (int by = 1; by < 16; by *= 2) most = max(most, __shfl_xor_sync(~0u, most, by));
        most = exponent_taken(most, unfit);
        put_unit_fp8(s.queries, head, t & 15, v, most, unfit);
        mine = scaled_weight(mine, most, unfit);
      } else {
        put_query(s.queries, 32, head, t & 15, v);
      }
      if (!(t & 15)) s.weights[head] = mine;
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    bool fits = !__syncthreads_or(unfit);
#pragma unroll
    for (int j = 0; j < 4; j++) {
      float2 w = *(const float2*)(s.weights + 8 * j + 2 * (t & 3));
      own[2 * j] = w.x, own[2 * j + 1] = w.y;
    }
    return fits;
  }
};
template <bool PUBLISH> __device__ __forceinline__ void clear_bins(Shared& s) {
#pragma unroll
  for (int i = 0; i < BINS / 4 / THREADS; i++) {
    s.bins[threadIdx.x + i * THREADS] = make_uint4(0, 0, 0, 0);
    if (PUBLISH) s.behind[threadIdx.x + i * THREADS] = make_uint4(0, 0, 0, 0);
  }
}
// Score a share. `IN_FP8`: with FP8 products; false if a key or the query did not fit these.
template <bool POOL, bool PUBLISH, bool IN_FP8>
__device__ __forceinline__ bool score(const Call& c, Shared& s, const Work& x, const Query& query) {
  int t = threadIdx.x, warp = t >> 5, lane = t & 31;
  Entry* entries = (Entry*)s.behind;
  float weight[8];
  bool fit = true;
  clear_bins<PUBLISH>(s);
  for (int from = x.first; from < x.end; from += ENTRIES * BLOCK) {
    int to = POOL ? min(x.end, from + ENTRIES * BLOCK) : x.end;
    if (POOL) {
      __syncthreads();
      // Up to three more than there are, for a warp's 32 keys. All ids are asked for, then all pages.
      int block[4], page[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        int place = from + (t + i * THREADS) * BLOCK;
        block[i] = place < to ? c.pool[(i64)x.n * c.pool_blocks + (place >> 3)] : -1;
      }
#pragma unroll
      for (int i = 0; i < 4; i++) {
        // A block that nobody sees reads the first rows of page 0 and does not count.
        if (block[i] >= 0 && block[i] * BLOCK >= x.sees) block[i] = -1;
        page[i] = block[i] < 0 ? 0 : __ldg(x.table + (block[i] * BLOCK >> c.page_shift));
      }
      x.note(s);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        int row = block[i] * BLOCK, inside = block[i] < 0 ? 0 : row & ((1 << c.page_shift) - 1);
        const u8* codes = c.pages + page[i] * c.page_bytes + (c.key_codes + inside * 64);
        if (t + i * THREADS < ENTRIES + 3) entries[t + i * THREADS] = {codes, c.key_scales - c.key_codes - inside * 60, block[i] < 0 ? 0x40000000 : row};
      }
      __syncthreads();
    }
    Scan<POOL, PUBLISH> scan{c, s, (u32*)s.behind, entries, x.n, from, to, x.sees, warp, lane};
    scan.start(x.table);
    if (!POOL) x.note(s);
    if (from == x.first) {
      fit = query.template put<IN_FP8>(s, weight);
    }
    if (fit && scan.template run<IN_FP8>(descriptor(s.queries), weight)) s.unfit = 1;
    if (!POOL) break;
  }
  if (!IN_FP8) return true;
  copies_end();
  __syncthreads();
  return fit && !s.unfit;
}
__device__ __forceinline__ u32 tag_of(const Shared& s, bool blocks) { return (s.before[blocks] >> VERDICT_BITS) + 1 & (1 << 32 - PLACE_BITS) - 1; }
template <int OWN> __device__ __forceinline__ uint4* entries_of(const List& list, int n) { return list.entries + (i64)n * (THREADS * OWN / 2); }
// Both lists' best of `length` places of this block, 0 if it has no share.
template <bool PUBLISH> __device__ __forceinline__ void write_lists(const Call& c, Shared& s, const Work& x, int number, int length) {
  int slots = slots_of<THREADS>(c.shares);
  u32 least = length ? bound_of<THREADS>((const u32*)s.bins, (OWN_ROWS << slots) - 1, s.room, s.cut) : 0;
  write_list<THREADS, OWN_ROWS>(entries_of<OWN_ROWS>(c.rows, x.n), number, c.shares, length, least, tag_of(s, false), s.room,
                                [&](int i) { return s.scores[i]; });
  if (!PUBLISH) return;
  int newest = (x.sees - 1) / BLOCK - x.first / BLOCK;
  __syncthreads();
  least = length ? bound_of<THREADS>((const u32*)s.behind, (OWN_BLOCKS << slots) - 1, s.room, s.cut) : 0;
  write_list<THREADS, OWN_BLOCKS>(entries_of<OWN_BLOCKS>(c.blocks, x.n), number, c.shares, (length + BLOCK - 1) / BLOCK, least, tag_of(s, true),
                                  s.room, [&](int i) {
                                    u32 best = i == newest ? ~0u : 0;
#pragma unroll 1
                                    for (int j = i * BLOCK; j < min(i * BLOCK + BLOCK, length); j++) best = max(best, s.scores[j]);
                                    return best;
                                  });
}

__device__ __forceinline__ u32 next_verdict(const Shared& s, bool blocks) { return ((s.before[blocks] >> VERDICT_BITS) + 1) << VERDICT_BITS; }
// A verdict on a list to the other blocks, and theirs, once it is there.
__device__ __forceinline__ void give(Progress& progress, const Shared& s, bool blocks, u32 bin) {
  tell(progress.verdicts + blocks, next_verdict(s, blocks) | bin);
}
__device__ __forceinline__ u32 verdict_of(const Progress& progress, Shared& s, bool blocks) {
  if (threadIdx.x == 0)
    while ((s.cut[blocks] = glimpse(progress.verdicts + blocks)) == s.before[blocks]) {}
  __syncthreads();
  return s.cut[blocks] & (1 << VERDICT_BITS) - 1;
}
// Pick from what all blocks list, once they have. The verdict.
template <int OWN> __device__ __forceinline__ u32 pick_listed(const Call& c, const List& list, bool blocks, const Work& x, Shared& s, Progress& progress) {
  Picking from{entries_of<OWN>(list, x.n), list.out + (i64)x.n * list.chosen, c.pool_blocks ? c.pool + (i64)x.n * c.pool_blocks : nullptr,
               (u32)list.chosen, tag_of(s, blocks), c.shares, blocks ? x.share / BLOCK : x.share};
  u32 bin = pick<THREADS, OWN>(from, (u32*)s.bins, (u32*)s.queries, s.behind, s.room, s.cut, progress.verdicts + blocks, next_verdict(s, blocks) | DONE);
  if (threadIdx.x == 0 && bin != DONE) give(progress, s, blocks, bin);
  return bin;
}
// Where shares do not list their best: add up the bins of these, and tell the bin that the K best reach. When this block was ready.
template <bool PUBLISH> __device__ __noinline__ u32 agree(const Call& c, Shared& s, const Work x, Progress& progress) {
  int n = x.n, last = c.shares - 1, places = c.pool_blocks ? c.pool_blocks * BLOCK : x.sees, blocks = (places + x.share - 1) / x.share;
  if (x.first < x.end) {
    // So much of every share that the K best are among what all add, and nearly nothing else if they are spread evenly.
    add_best(s.bins, c.rows.bins + (i64)n * BINS, max(32, 4 * c.rows.chosen / blocks), s);
    if (PUBLISH) add_best(s.behind, c.blocks.bins + (i64)n * BINS, max(32, 4 * c.blocks.chosen / blocks), s);
  }
  u32 ticket = count_block(&progress.scored, s);
  if (ticket == last) {
    u32 bin = bin_of(c.rows, n, s) + 1, block_bin = PUBLISH ? bin_of(c.blocks, n, s) + 1 : DONE;
    if (threadIdx.x == 0) give(progress, s, false, bin), give(progress, s, true, block_bin);
  } else if (ticket <= PUBLISH) {
    // Meanwhile those that pick run what they will need once, on nothing: its instructions come from far.
    choose_best<THREADS>(c, c.rows, false, n, 0, (uint2*)((u8*)&s + HELD_AT), (u32*)s.bins, s.room, s.cut, true);
  }
  return ticket;
}
// What reaches the bins told, to the query's candidates (nothing of a list that is DONE); then those that pick choose among them.
template <bool PUBLISH>
__device__ __noinline__ void finish(const Call& c, Shared& s, const Work x, Progress& progress, u32 bin, u32 block_bin, bool picks, bool second) {
  int n = x.n, last = c.shares - 1;
  uint2* held = (uint2*)((u8*)&s + HELD_AT);
  if (x.first < x.end) {
    const u32* orders = c.rows.orders + (i64)n * c.rows.stride + x.first;
    if (bin != DONE) sift<false>(c, c.rows, n, x.first, x.end, bin - 1, s, x.share <= KEPT ? s.scores : orders, held);
    int block = x.first / BLOCK;
    orders = c.blocks.orders + (i64)n * c.blocks.stride + block;
    if (block_bin != DONE) sift<true>(c, c.blocks, n, block, (x.end + BLOCK - 1) / BLOCK, block_bin - 1, s, orders, held);
  }
  count_block(&progress.sifted, s);
  bool alone = !PUBLISH || !last || bin == DONE || block_bin == DONE;
  picks = picks && bin != DONE, second = second && block_bin != DONE;
  if (!picks && !second) return;
  if (threadIdx.x == 0)
    while (word_of_others(&progress.sifted) <= last) {}
  __syncthreads();
  for (int blocks = !picks; blocks <= (int)second; blocks++) {
    u32 reached = (blocks ? block_bin : bin) - 1;
    choose_best<THREADS>(c, blocks ? c.blocks : c.rows, blocks, n, reached, held, (u32*)s.bins, s.room, s.cut, false);
    __syncthreads();
  }
  if (alone || count_block(&progress.chosen, s)) {
    if (threadIdx.x == 0) progress.scored = progress.sifted = progress.chosen = 0;
  }
}

// What follows scoring.
template <bool PUBLISH> __device__ __forceinline__ void choose(const Call& c, Shared& s, const Work& x, int number) {
  __syncthreads();
  Progress& progress = ((Progress*)c.arrivals)[x.n];
  u32 ticket = number, last = c.shares - 1, bin = DONE, block_bin = DONE;
  if (c.rows.entries) write_lists<PUBLISH>(c, s, x, number, max(x.end - x.first, 0));
  else ticket = agree<PUBLISH>(c, s, x, progress);
  // The first block picks rows; where candidate blocks are published, the next one picks these beside it.
  bool picks = ticket == 0, second = PUBLISH && ticket == min(1u, last);
  __syncthreads();
  if (c.rows.entries && picks) bin = pick_listed<OWN_ROWS>(c, c.rows, false, x, s, progress);
  else bin = verdict_of(progress, s, false);
  if (PUBLISH) {
    __syncthreads();
    if (c.rows.entries && second) block_bin = pick_listed<OWN_BLOCKS>(c, c.blocks, true, x, s, progress);
    else block_bin = verdict_of(progress, s, true);
  }
  if (bin != DONE || block_bin != DONE) __syncthreads(), finish<PUBLISH>(c, s, x, progress, bin, block_bin, picks, second);
}
template <bool PUBLISH> __device__ __noinline__ void choose_apart(const Call& c, Shared& s, const Work x, int number) {
  choose<PUBLISH>(c, s, x, number);
}
// What runs in nearly every call lies in one piece, in its order: a block runs it once, and instructions come from far.
template <bool POOL, bool PUBLISH> __device__ __forceinline__ void select(const Call& c) {
  extern __shared__ u8 raw[];
  Shared& s = *(Shared*)(raw + ((1024 - (shared_address(raw) & 1023)) & 1023));
  int n = by_shares(c, blockIdx.x), number = blockIdx.x - n * c.shares;
  // Launched early: what came before has written what is read here. The next kernel may come as this one's blocks end.
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  // The lines of the share's ids (32 in each) are on their way before it is known what the query sees.
  if (POOL) {
    int ids = Work::share_of(c, c.pool_blocks * BLOCK) / BLOCK, at = threadIdx.x * 32, id = number * ids + at;
    if (at < ids && id < c.pool_blocks) ask_for(c.pool + (i64)n * c.pool_blocks + id);
  }
  if (threadIdx.x < 2) s.before[threadIdx.x] = __ldcg(((Progress*)c.arrivals)[n].verdicts + threadIdx.x);
  const int* table = c.table + (i64)c.slots[n] * c.table_width;
  int sees = min((int)c.visible[n], c.limit);
  Query query(c, n);
  Work x(c, n, number, POOL ? c.pool_blocks * BLOCK : sees, sees, table);
  if (x.first < x.end) {
    if (score<POOL, PUBLISH, true>(c, s, x, query)) return choose<PUBLISH>(c, s, x, number);
    score<POOL, PUBLISH, false>(c, s, x, Query(c, n));
  } else {
    x.note(s);
  }
  choose_apart<PUBLISH>(c, s, x, number);
}
extern "C" __global__ void __launch_bounds__(THREADS, 2) few(const __grid_constant__ Call c) { select<false, false>(c); }
extern "C" __global__ void __launch_bounds__(THREADS, 2) few_with_blocks(const __grid_constant__ Call c) { select<false, true>(c); }
extern "C" __global__ void __launch_bounds__(THREADS, 2) few_in_pool(const __grid_constant__ Call c) { select<true, false>(c); }
