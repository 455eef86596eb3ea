// Joint attention of few queries, 512 channels, over FP8 window rows and FP4 rows in pages, for Hopper (sm_90a); after `stream.cuh` and
// `rows.cuh`. A block has 16 heads of a query and a share of its tiles of 64 keys: one tile (`attend_one`) or several. Each of four
// warpgroups has 128 channels: a thread fetches its part of two rows straight into registers, expands it once, multiplies it with queries
// as it lies there and leaves it in shared memory, where values are read. A warp weighs all keys of a head. Shares of a query are a
// cluster: blocks tell each other peaks and totals, leave their sums in L2 and scale and add up a part of all. Values are kept times
// 2^-9, so that a code and its scale need one product. Slots and page tables are read before the launch before has ended.

static const int HEADS = 16, GROUPS = 4, THREADS = 128 * GROUPS, SUMS = HEADS / 2;  // SUMS: of a thread, of 64 rows
static const int MOST_SHARES = 10, MOST_PAGES = 8192;  // pages: of a table that shared memory takes
static const int PITCH = TILE + 4;                     // floats from head to head of partial scores
static const float SLACK = 8.f;  // how far (powers of 2) a score may exceed the peak before sums are scaled again
static const int QUADS = THREADS * 2 * SUMS / 4;  // of a block's sums
static const int Q_CHUNK = HEADS * 128;           // bytes of 64 channels of the queries
static const int Q_AT = 0, P_AT = HEADS * 1024, PARTIAL_AT = P_AT + HEADS * 128, STATS_AT = PARTIAL_AT + GROUPS * HEADS * PITCH * 4;
static const int FACTORS_AT = STATS_AT + MOST_SHARES * HEADS * 8;
// Factors: between tiles, then [share, head].
static const int TILES_AT = (FACTORS_AT + (1 + MOST_SHARES) * HEADS * 4 + 1023) / 1024 * 1024;
static const int TILE_BYTES = TILE * CHANNELS * 2;

__device__ __forceinline__ u32 descriptor(u32 at) { return ((at & 0x3FFFF) >> 4) | (1u << 16); }
// 64 keys x heads, 16 channels: the left side in registers, queries contiguous in channels.
__device__ __forceinline__ void add_scores(float (&d)[SUMS], const u32 (&a)[4], u32 b) {
  asm volatile(
      "{\n.reg .b64 b;\nmov.b64 b, {%12, " HIGH "};\n"
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, %11}, b, 1, 1, 1, 0;\n}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b));
}
// 64 channels x heads, 16 keys: the left side a tile (contiguous in channels), probabilities contiguous in keys.
__device__ __forceinline__ void add_values(float (&d)[SUMS], u32 a, u32 b) {
  asm volatile(
      "{\n.reg .b64 a, b;\nmov.b64 a, {%8, " HIGH "};\nmov.b64 b, {%9, " HIGH "};\n"
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7}, a, b, 1, 1, 1, 1, 0;\n}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
      : "r"(a), "r"(b));
}
// Clusters: the first half of their barrier without publishing what was written; a block's place, and other blocks' shared memory.
__device__ __forceinline__ void cluster_announce() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ __forceinline__ int place_in_cluster() {
  int x;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(x));
  return x;
}
__device__ __forceinline__ int number_of_cluster() {
  int x;
  asm("mov.u32 %0, %%clusterid.x;" : "=r"(x));
  return x;
}
__device__ __forceinline__ u32 address_in(u32 at, int block) {
  u32 there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(block));
  return there;
}
__device__ __forceinline__ void write_pair_to(u32 at, float x, float y) {
  asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(at), "f"(x), "f"(y) : "memory");
}

// Two E4M3 scales as factors of `expand_fp4`; an E8M0 one as a pair.
__device__ __forceinline__ u32 factor_pair(u32 scales) {
  u32 halves, d;
  float low, high;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"((unsigned short)scales));
  asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %2;\ncvt.f32.f16 %0, a;\ncvt.f32.f16 %1, b;\n}" : "=f"(low), "=f"(high) : "r"(halves));
  low *= 1.6615349947311448e35f, high *= 1.6615349947311448e35f;  // 2^117
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}
// Eight E4M3 codes: pairs (i, i + 4).
__device__ __forceinline__ uint4 expand_fp8(u32 low, u32 high, u32 f) {
  return make_uint4(expand_fp8_pair(__byte_perm(low, high, 0x4000), f), expand_fp8_pair(__byte_perm(low, high, 0x5010), f),
                    expand_fp8_pair(__byte_perm(low, high, 0x6020), f), expand_fp8_pair(__byte_perm(low, high, 0x7030), f));
}

struct FewCall : Call {
  uint4* shares;  // [query, part of the heads, share, quad]
};

// What a block works on.
struct Item {
  int n, part, head, share, first, tiles;  // first: tile number within the query
};
__device__ __forceinline__ int parts_of(const FewCall& c) { return (c.heads + HEADS - 1) / HEADS; }
template <bool ONE> __device__ __forceinline__ Item item_of(const FewCall& c) {
  int number = number_of_cluster(), parts = parts_of(c);
  Item x{number / parts, number % parts, 0, place_in_cluster(), 0, 1};
  x.head = x.part * HEADS, x.first = x.share;
  if (!ONE) {
    int all = (c.window_length + TILE - 1) / TILE + (c.selected + TILE - 1) / TILE;
    x.first = all * x.share / c.splits, x.tiles = all * (x.share + 1) / c.splits - x.first;
  }
  return x;
}

// A thread's part of two rows of a tile, eight apart: 32 channels of each, and what scales them.
struct Part {
  uint4 codes[2][2];
  u32 scales[2];
  bool real[2];  // whether they exist
};

struct Reader {
  const FewCall& c;
  int n, slot, row, unit, window_tiles;  // row: the thread's first of a tile; unit: its 32 channels
  const int* far;                        // the slot's pages
  int* here;                             // their copy in shared memory
  int start, stop;

  // Ids of two rows of a tile, or their cells in the ring; below 0: none.
  __device__ __forceinline__ void find(int (&id)[2], int tile) const {
    int key = tile * TILE + row;
    if (tile >= window_tiles) {
      key -= window_tiles * TILE;
      const int* from = c.topk + (i64)n * c.selected + key;
      id[0] = key < c.selected ? __ldg(from) : -1, id[1] = key + 8 < c.selected ? __ldg(from + 8) : -1;
    } else {
      key += start;
      id[0] = key < stop ? (int)((u32)key % (u32)c.ring) : -1, id[1] = key + 8 < stop ? (int)((u32)(key + 8) % (u32)c.ring) : -1;
    }
  }
  __device__ __forceinline__ void fetch(Part& x, const int (&id)[2], bool window) const {
#pragma unroll
    for (int h = 0; h < 2; h++) x.codes[h][0] = x.codes[h][1] = make_uint4(0, 0, 0, 0), x.scales[h] = 0, x.real[h] = id[h] >= 0;
    if (window) {
      const u8 *codes = c.window + slot * c.slot_stride + unit * 32, *scales = c.window_scales + slot * c.slot_scale_stride + unit;
#pragma unroll
      for (int h = 0; h < 2; h++) {
        if (id[h] < 0) continue;
        const uint4* from = (const uint4*)(codes + id[h] * c.window_stride);
        x.codes[h][0] = __ldg(from), x.codes[h][1] = __ldg(from + 1), x.scales[h] = __ldg(scales + id[h] * c.scale_stride);
      }
      return;
    }
    int page[2], in_page = (1 << c.page_shift) - 1;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      int number = max(id[h], 0) >> c.page_shift;
      page[h] = c.table_width > MOST_PAGES ? __ldg(far + number) : here[number];
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
      if (id[h] < 0) continue;
      const u8* from = c.pages + (i64)page[h] * c.page_bytes;
      u32 at = id[h] & in_page;
      x.codes[h][0] = __ldg((const uint4*)(from + (c.main_codes + at * 256 + unit * 16)));
      x.scales[h] = __ldg((const u16*)(from + (c.main_scales + at * 32 + unit * 2)));
    }
  }
};

// A group's queries in shared memory, rotated where a table is given, in the order in which products take channels: of each 32, a
// thread's four groups of eight are taken in pairs (i, i + 4). A task, of half of the group's threads: the i-th eight channels of a head
// in four units of 32.
struct Queries {
  uint4 v[4];
  int head, i, quarter;

  __device__ __forceinline__ bool works() const { return (threadIdx.x & 127) < 4 * HEADS; }
  __device__ __forceinline__ void fetch(const FewCall& c, const Item& x) {
    i = threadIdx.x & 3, head = (threadIdx.x >> 2) & 31, quarter = threadIdx.x >> 7;
    if (!works()) return;
    const u8* from = c.q + ((i64)x.n * c.heads + x.head + head) * CHANNELS * 2 + (16 * quarter + i) * 16;
#pragma unroll
    for (int t = 0; t < 4; t++) {
      v[t] = make_uint4(0, 0, 0, 0);
      if (x.head + head < c.heads) v[t] = __ldg((const uint4*)(from + 64 * t));
    }
  }
  __device__ __forceinline__ void store(const FewCall& c, const Item& x, u8* shared) {
    if (!works()) return;
    if (quarter == 3 && c.turned) v[2] = Turn(c, x.n, 56 + i, 1.f).of(v[2]), v[3] = Turn(c, x.n, 60 + i, 1.f).of(v[3]);
    u8* to = shared + Q_AT + (2 * quarter + (i >> 1)) * Q_CHUNK + head * 128;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      u32 by = half ? 0x7632 : 0x5410;
      int unit = 4 * (i & 1) + half;
      *(uint4*)(to + ((unit ^ (head & 7)) << 4)) = make_uint4(__byte_perm(v[0].x, v[0].z, by), __byte_perm(v[1].x, v[1].z, by),
                                                              __byte_perm(v[2].x, v[2].z, by), __byte_perm(v[3].x, v[3].z, by));
      *(uint4*)(to + (((unit + 2) ^ (head & 7)) << 4)) = make_uint4(__byte_perm(v[0].y, v[0].w, by), __byte_perm(v[1].y, v[1].w, by),
                                                                    __byte_perm(v[2].y, v[2].w, by), __byte_perm(v[3].y, v[3].w, by));
    }
    barriers_ready();
  }
};

struct Multiplier {
  const FewCall& c;
  u8* shared;
  int group, warp, lane;  // warp: of four

  __device__ __forceinline__ int g() const { return lane >> 2; }
  __device__ __forceinline__ int t() const { return lane & 3; }
  __device__ __forceinline__ u8* tile(int buffer) const { return shared + TILES_AT + buffer * TILE_BYTES; }
  __device__ __forceinline__ float2* stats() const { return (float2*)(shared + STATS_AT); }  // [share, head]
  __device__ __forceinline__ float* factors() const { return (float*)(shared + FACTORS_AT); }
  __device__ __forceinline__ float* share_factors() const { return factors() + HEADS; }  // [share, head]

  // Keys x queries of the group's channels; the tile's expanded rows stay in shared memory, in the order in which products take channels.
  template <bool ONE> __device__ __forceinline__ void score(float (&s)[SUMS], const Part& x, bool window, int buffer) {
    u32 a[8][4], f[2][2], q = descriptor(shared_address(shared + Q_AT + 2 * group * Q_CHUNK));
    u32 to = shared_address(tile(buffer)) + 2 * group * CHUNK + (16 * warp + (lane & 15)) * 128 + (((lane >> 4) ^ (lane & 7)) << 4);
#pragma unroll
    for (int h = 0; h < 2; h++) {
      u32 both = window ? fp8_factor(x.scales[h]) : factor_pair(x.scales[h]);
      f[h][0] = window ? both : __byte_perm(both, 0, 0x1010), f[h][1] = window ? both : __byte_perm(both, 0, 0x3232);
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
      uint4 v[2][2];  // of eight channels, of rows
#pragma unroll
      for (int h = 0; h < 2; h++) {
        uint4 near = x.codes[h][0], code = x.codes[h][half];
        if (window) v[0][h] = expand_fp8(code.x, code.y, f[h][half]), v[1][h] = expand_fp8(code.z, code.w, f[h][half]);
        else v[0][h] = expand_fp4(half ? near.z : near.x, f[h][half]), v[1][h] = expand_fp4(half ? near.w : near.y, f[h][half]);
      }
#pragma unroll
      for (int odd = 0; odd < 2; odd++) {
        u32(&first)[4] = a[4 * half + 2 * odd], (&second)[4] = a[4 * half + 2 * odd + 1];
        first[0] = v[odd][0].x, first[1] = v[odd][1].x, first[2] = v[odd][0].y, first[3] = v[odd][1].y;
        second[0] = v[odd][0].z, second[1] = v[odd][1].z, second[2] = v[odd][0].w, second[3] = v[odd][1].w;
        store_rows((to ^ (odd * 64)) + half * CHUNK, first);
        store_rows((to ^ (odd * 64 + 32)) + half * CHUNK, second);
      }
      products_begin();
#pragma unroll
      for (int k = 0; k < 4; k++) add_scores(s, a[4 * half + k], q + half * (Q_CHUNK / 16) + 2 * k);
      products_end();
      if (ONE) products_wait<0>();  // more registers side by side would have every product waited for
    }
  }
  // The group's part of scores for others; minus infinity where there is no key.
  __device__ __forceinline__ void hand_over(const float (&s)[SUMS], const bool (&real)[2]) {
    float* to = (float*)(shared + PARTIAL_AT) + (group * HEADS + 2 * t()) * PITCH + 16 * warp + g();
    float none = -__int_as_float(0x7F800000);
#pragma unroll
    for (int i = 0; i < SUMS; i++) {
      int h = i >> 1 & 1;
      to[(i / 4 * 8 + i % 2) * PITCH + 8 * h] = real[h] ? s[i] : none;
    }
  }
  // The highest number of a warp.
  __device__ __forceinline__ static float highest(float x) {
    u32 bits = __float_as_uint(x), most = warp_max(bits ^ ((u32)((int)bits >> 31) | 0x80000000u));
    return __uint_as_float(most ^ ((u32)((int)~most >> 31) | 0x80000000u));
  }
  // Probabilities of a head's 64 keys, relative to its peak, two keys a lane; whether sums must be scaled first.
  __device__ __forceinline__ bool weigh(int head, float& peak, float& total, bool opening) {
    const float* from = (const float*)(shared + PARTIAL_AT) + head * PITCH + 2 * lane;
    float2 v[GROUPS];
#pragma unroll
    for (int i = 0; i < GROUPS; i++) v[i] = *(const float2*)(from + i * HEADS * PITCH);
    float x = (v[0].x + v[1].x) + (v[2].x + v[3].x), y = (v[0].y + v[1].y) + (v[2].y + v[3].y);
    x *= c.scale, y *= c.scale;
    float most = highest(fmaxf(x, y)), shrink = 1.f;
    bool rises = most > (peak == NONE ? NONE : peak + SLACK);
    if (rises) {
      float next = ceilf(most);
      shrink = power2(peak - next), peak = next;
    }
    x = power2(x - peak), y = power2(y - peak);
    total = total * shrink + (x + y);
    *(u32*)(shared + P_AT + head * 128 + (((lane >> 2) ^ (head & 7)) << 4) + (lane & 3) * 4) = bfloat_pair(x, y);
    barriers_ready();
    if (!opening && lane == 0) factors()[head] = shrink;
    return rises && !opening;
  }
  // A head's peak and total to all blocks of the cluster.
  __device__ __forceinline__ void tell_peak(int head, int share, float peak, float total) {
    u32 at = shared_address(stats() + share * HEADS + head);
    float whole = warp_sum(total);
    if (lane < c.splits) write_pair_to(address_in(at, lane), peak, whole);
  }
  __device__ __forceinline__ void shrink(float (&acc)[2][SUMS]) {
#pragma unroll
    for (int i = 0; i < SUMS; i += 4) {
      float2 by = *(const float2*)(factors() + i * 2 + 2 * t());
#pragma unroll
      for (int b = 0; b < 2; b++) acc[b][i] *= by.x, acc[b][i + 1] *= by.y, acc[b][i + 2] *= by.x, acc[b][i + 3] *= by.y;
    }
  }
  // Channels x keys times probabilities; not waited for.
  __device__ __forceinline__ void gather(float (&acc)[2][SUMS], int buffer) {
    u32 a = descriptor(shared_address(tile(buffer) + 2 * group * CHUNK)), p = descriptor(shared_address(shared + P_AT));
    products_begin();
#pragma unroll
    for (int step = 0; step < 4; step++)
#pragma unroll
      for (int b = 0; b < 2; b++) add_values(acc[b], a + b * (CHUNK / 16) + step * 128, p + 2 * step);
    products_end();
  }

  // What shares' sums of a head are multiplied by, a share a lane, from all peaks (whole numbers) and totals; 512 undoes 2^-9.
  __device__ __forceinline__ void find_factors(int head, float sink) {
    float2 own = lane < c.splits ? stats()[lane * HEADS + head] : make_float2(NONE, 0.f);
    float most = highest(own.x), part = power2(own.x - most), total = warp_sum(part * own.y);
    float factor = total == 0.f ? 0.f : 512.f / (total + power2(sink * LOG2_E - most)) * part;
    if (lane < c.splits) share_factors()[lane * HEADS + head] = factor;
  }
  __device__ __forceinline__ uint4* share_of(const Item& x, int share) const {
    return c.shares + (((i64)x.n * parts_of(c) + x.part) * c.splits + share) * QUADS;
  }
  // Sums in quads of two neighbouring channels of two neighbouring heads.
  __device__ __forceinline__ void write_sums(const float (&acc)[2][SUMS], const Item& x) {
    uint4* to = share_of(x, x.share) + threadIdx.x;
#pragma unroll
    for (int j = 0; j < 2; j++)
#pragma unroll
      for (int b = 0; b < 2; b++)
        to[(2 * b + j) * THREADS] = make_uint4(__float_as_uint(acc[b][4 * j]), __float_as_uint(acc[b][4 * j + 1]),
                                               __float_as_uint(acc[b][4 * j + 2]), __float_as_uint(acc[b][4 * j + 3]));
  }
  // Two channels of the first or second head of a quad.
  __device__ __forceinline__ void write_pair(const Item& x, u32 at, u32 second, float low, float high) const {
    u32 quad = at / THREADS, thread = at % THREADS, of = thread >> 5 & 3, row = thread >> 2 & 7;
    int head = x.head + 8 * (quad & 1) + 2 * (thread & 3) + second;
    int channel = 128 * (thread >> 7) + 32 * (row >> 1) + 16 * (quad >> 1) + 8 * (of >> 1) + 2 * (of & 1) + 4 * (row & 1);
    int place = channel / 2 - (CHANNELS / 2 - c.turned);
    if (head >= c.heads) return;
    u32 pair = bfloat_pair(low, high);
    if (place >= 0) pair = turned_pair(pair, c.cosines[(i64)x.n * c.turned + place], -c.sines[(i64)x.n * c.turned + place]);
    *(u32*)(c.out + (((i64)x.n * c.heads + head) * CHANNELS + channel) * 2) = pair;
  }
  // Every block adds up a part of the quads, ITEMS a thread at once; TURNS threads take turns with its shares, and with its heads.
  template <int TURNS, int ITEMS> __device__ __forceinline__ void join_shares(const Item& x, int head, float sink) {
    const int MOST = MOST_SHARES / 2, STEP = THREADS / TURNS;
    int each = (QUADS + c.splits - 1) / c.splits, begin = x.share * each, end = min(begin + each, QUADS), turn = threadIdx.x % TURNS;
    int first = begin + threadIdx.x / TURNS;
    const uint4* from = share_of(x, turn);
    cluster_arrive();
    cluster_wait();
#pragma unroll 1
    for (int done = 0; done < each; done += ITEMS * STEP) {
      uint4 v[ITEMS][MOST];
#pragma unroll
      for (int p = 0; p < ITEMS; p++)
#pragma unroll
        for (int k = 0; k < MOST; k++) {
          int at = first + done + p * STEP;
          v[p][k] = make_uint4(0, 0, 0, 0);
          if (at < end && TURNS * k + turn < c.splits) v[p][k] = __ldcg(from + at + TURNS * k * QUADS);
        }
      if (done == 0) {  // while these come
        find_factors(head, sink);
        __syncthreads();
      }
#pragma unroll
      for (int p = 0; p < ITEMS; p++) {
        int at = first + done + p * STEP;
        const float* by = share_factors() + turn * HEADS + 8 * (at / THREADS & 1) + 2 * (at & 3);
        float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
        for (int k = 0; k < MOST; k++) {
          if (TURNS * k + turn >= c.splits) continue;
          float2 f = *(const float2*)(by + TURNS * k * HEADS);
          sum.x += __uint_as_float(v[p][k].x) * f.x, sum.y += __uint_as_float(v[p][k].y) * f.y;
          sum.z += __uint_as_float(v[p][k].z) * f.x, sum.w += __uint_as_float(v[p][k].w) * f.y;
        }
        if (TURNS == 2) {
          sum.x += __shfl_xor_sync(~0u, sum.x, 1), sum.y += __shfl_xor_sync(~0u, sum.y, 1);
          sum.z += __shfl_xor_sync(~0u, sum.z, 1), sum.w += __shfl_xor_sync(~0u, sum.w, 1);
        }
        if (at >= end) continue;
        if (turn == 0) write_pair(x, at, 0, sum.x, sum.z);
        if (TURNS == 1 || turn == 1) write_pair(x, at, 1, sum.y, sum.w);
      }
    }
  }
};

template <bool ONE> __device__ __forceinline__ void attend_few(const FewCall& c) {
  extern __shared__ u8 raw[];
  u8* shared = raw + ((1024 - (shared_address(raw) & 1023)) & 1023);
  int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;  // the same for all lanes, as the compiler then knows
  Item x = item_of<ONE>(c);
  Multiplier m{c, shared, warp >> 2, warp & 3, lane};
  int window_tiles = (c.window_length + TILE - 1) / TILE, slot = __ldg(c.slots + x.n);
  Reader rows{c, x.n, slot, 16 * m.warp + m.g(), 4 * m.group + m.t(), window_tiles,
              c.table + (i64)slot * c.table_width, (int*)(shared + TILES_AT + (ONE ? 1 : 2) * TILE_BYTES), 0, 0};
  if (x.first + x.tiles > window_tiles && c.table_width <= MOST_PAGES)
#pragma unroll 4
    for (int i = threadIdx.x; i < c.table_width; i += THREADS) rows.here[i] = __ldg(rows.far + i);
  cluster_announce();
  cluster_wait();  // all blocks have begun
  __syncthreads();
  wait_for_launch();
  if (!ONE) let_next();
  if (x.first < window_tiles) rows.start = (int)__ldg(c.spans + 2 * x.n), rows.stop = (int)__ldg(c.spans + 2 * x.n + 1);
  int next[2];
  Part part;
  Queries queries;
  bool window = x.first < window_tiles;
  if (!window) rows.find(next, x.first);  // rows wait for their ids: these go first
  queries.fetch(c, x);
  if (window) rows.find(next, x.first);
  rows.fetch(part, next, window);
  if (x.tiles > 1) rows.find(next, x.first + 1);
  float sink = __ldg(c.sink + min(x.head + warp, c.heads - 1));
  queries.store(c, x, shared);
  group_barrier(1 + m.group, 128);

  float acc[2][SUMS], peak = NONE, total = 0.f;
#pragma unroll
  for (int i = 0; i < SUMS; i++) acc[0][i] = acc[1][i] = 0.f;
  int tile = 0;
#pragma unroll 1
  do {  // not `while`: what might not run at all has its products serialised
    int buffer = tile & 1, now = x.first + tile;
    bool real[2] = {part.real[0], part.real[1]};
    float s[SUMS];
#pragma unroll
    for (int i = 0; i < SUMS; i++) s[i] = 0.f;
    m.score<ONE>(s, part, now < window_tiles, buffer);
    if (tile + 1 < x.tiles) rows.fetch(part, next, now + 1 < window_tiles);
    if (tile + 2 < x.tiles) rows.find(next, now + 2);
    if (ONE) let_next();  // behind the arrival of rows: what it reads would come before them
    products_wait<0>();
    m.hand_over(s, real);
    __syncthreads();
    bool rises = m.weigh(warp, peak, total, tile == 0);
    if (ONE) __syncthreads();
    else if (__syncthreads_or(rises)) m.shrink(acc);
    m.gather(acc, buffer);
  } while (++tile < x.tiles);
  m.tell_peak(warp, x.share, peak, total);
  products_wait<0>();
  m.write_sums(acc, x);
  if (c.splits > MOST_SHARES / 2) m.join_shares<2, 1>(x, warp, sink);
  else m.join_shares<1, ONE ? 1 : 2>(x, warp, sink);
}

extern "C" __global__ void __launch_bounds__(512, 2) attend_one(const __grid_constant__ FewCall c) { attend_few<true>(c); }
extern "C" __global__ void __launch_bounds__(512, 1) attend_several(const __grid_constant__ FewCall c) { attend_few<false>(c); }
