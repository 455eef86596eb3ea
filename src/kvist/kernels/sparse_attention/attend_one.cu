// Joint attention of few queries, 64 heads x 512 channels, over FP8 window rows and FP4 rows in pages, for Hopper (sm_90a); after
// `stream.cuh` and `rows.cuh`. A block has one query, up to 64 of its heads, one tile of 64 keys and a quarter of the output channels: all that it does it
// does once, so code is short. Its two warpgroups expand rows straight into the left operands of products: keys x heads for half of the
// channels each, then channels x heads, 64 channels each. Probabilities need no maximum, unless a head's total leaves 2^-60..2^60. The
// tiles of a query are a cluster, which joins its sums. Values are kept times 2^-9, so that a code and its scale need one product.

static const int PARTS = 4, CHANNELS_HERE = CHANNELS / PARTS;
static const int MOST_SHARES = 10;
static const int Q_AT = 0, P_AT = Q_AT, SCORES_AT = P_AT + CHUNK;  // probabilities, half of the scores: where queries were
static const int CODES_AT = 65536, BY_KEY = 32768, BY_GROUP = BY_KEY + 4096;  // scales as factors by key, by group of 16 channels
static const int ROWS_AT = CODES_AT + BY_GROUP + 4096, SUMS_AT = ROWS_AT + TILE * 8, PEAKS_AT = SUMS_AT + 4 * 64 * 4;
static const int HIGHEST_AT = PEAKS_AT + 256, VALID_AT = HIGHEST_AT + 256, FLAGS_AT = VALID_AT + 8;  // flags: out of range
static const float LEAST = 8.673617379884035e-19f, MOST = 1.152921504606847e18f;  // 2^-60, 2^60

// Matrix products: the left side in registers, the right one a tile in shared memory, swizzled by 128 bytes.
__device__ __forceinline__ u32 descriptor(u32 at) { return ((at & 0x3FFFF) >> 4) | (1u << 16); }
// 64 x 64 sums of 16 products; the right side contiguous in what is summed over, or in its columns.
__device__ __forceinline__ void product_64_rows(float (&d)[32], const u32 (&a)[4], u32 b) {
  asm volatile(
      "{\n.reg .b64 b;\nmov.b64 b, {%36, " HIGH "};\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
      "}, {%32, %33, %34, %35}, b, 1, 1, 1, 0;\n}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b));
}
__device__ __forceinline__ void product_64_columns(float (&d)[32], const u32 (&a)[4], u32 b) {
  asm volatile(
      "{\n.reg .b64 b;\nmov.b64 b, {%36, " HIGH "};\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
      "}, {%32, %33, %34, %35}, b, 1, 1, 1, 1;\n}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b));
}

// Two E4M3 scales as factors of `expand_fp4`.
__device__ __forceinline__ u32 factor_pair(u32 scales) {
  u32 halves, d;
  float low, high;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"((unsigned short)scales));
  asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %2;\ncvt.f32.f16 %0, a;\ncvt.f32.f16 %1, b;\n}" : "=f"(low), "=f"(high) : "r"(halves));
  low *= 1.6615349947311448e35f, high *= 1.6615349947311448e35f;  // 2^117
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}
__device__ __forceinline__ u32 fp8_factor(u32 e8m0) { return (e8m0 << 7) | ((e8m0 == 0 || e8m0 == 255) ? 0x40u : 0u); }

struct Call {
  const u8 *q, *window, *window_scales, *pages;
  u8* out;
  const float *sink, *cosines, *sines;
  const i64* spans;
  const int *slots, *table, *topk;
  i64 window_stride, scale_stride, slot_stride, slot_scale_stride, page_bytes;
  int queries, heads, selected, ring, window_length, table_width, main_codes, main_scales, page_shift, turned, splits;
  float scale;
  float* shares;   // [query, share, head, channel]
  float2* totals;  // [query, share, part, head]: peak and total
};

// What a block works on.
struct Item {
  int n, head, part, share;
};
// No division where there is one tile of heads: this is every block's beginning.
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
__device__ __forceinline__ Item item_of(const Call& c) {
  int number = number_of_cluster(), head_tiles = (c.heads + 63) / 64;
  Item x{number / PARTS, 0, number % PARTS, place_in_cluster()};
  if (head_tiles > 1) x.head = x.n % head_tiles * 64, x.n /= head_tiles;
  return x;
}

// Queries of an item in shared memory, rotated where a table is given, in the order in which products take channels: quarter t of a
// thread group of four holds channels 128 t to 128 t + 127 of keys, so that 16 bytes here are pairs (i, i + 4) of eight channels of all
// quarters. They come as they are (`ask`) and are put in order through registers; a task is eight channels of the quarters of a head.
struct Queries {
  const Call& c;
  u8* shared;
  int warp, lane;

  __device__ __forceinline__ u8* place(int head, int unit) {
    return shared + Q_AT + (unit >> 3) * CHUNK + head * 128 + (((unit & 7) ^ (head & 7)) << 4);
  }
  __device__ __forceinline__ void ask(const Item& x) {
    int unit = (warp & 1) * 32 + lane;
    const u8* from = c.q + ((i64)x.n * c.heads + x.head) * CHANNELS * 2 + unit * 16;
#pragma unroll 4
    for (int head = warp >> 1; head < 64; head += 4) {
      bool real = x.head + head < c.heads;
      copy_unit(place(head, unit), from + (real ? head : 0) * CHANNELS * 2, real);
    }
    copies_commit();
  }
  __device__ __forceinline__ void order(const Item& x) {
    int block = warp & 3, word = lane >> 3, first = (warp >> 2) * 8 + (lane & 7);
    Turn turn(c, x.n, 48 + 4 * block + word, 1.f);
    uint4 v[4][4];
    copies_wait<1>();
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 4; i++) {
#pragma unroll
      for (int t = 0; t < 4; t++) v[i][t] = *(uint4*)place(first + 16 * i, 16 * t + 4 * block + word);
      v[i][3] = turn.of(v[i][3]);
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        u32 by = half ? 0x7632 : 0x5410;
        int unit = 8 * (2 * block + (word >> 1)) + 4 * (word & 1) + half;
        *(uint4*)place(first + 16 * i, unit) = make_uint4(__byte_perm(v[i][0].x, v[i][0].z, by), __byte_perm(v[i][1].x, v[i][1].z, by),
                                                          __byte_perm(v[i][2].x, v[i][2].z, by), __byte_perm(v[i][3].x, v[i][3].z, by));
        *(uint4*)place(first + 16 * i, unit + 2) = make_uint4(__byte_perm(v[i][0].y, v[i][0].w, by), __byte_perm(v[i][1].y, v[i][1].w, by),
                                                              __byte_perm(v[i][2].y, v[i][2].w, by), __byte_perm(v[i][3].y, v[i][3].w, by));
      }
    barriers_ready();
  }
};

// Where 16 bytes of a row's codes lie: lanes that read together, along a row or down keys two apart, meet different banks.
__device__ __forceinline__ int fp4_place(int unit, int row) { return (unit ^ (unit >> 3) ^ ((row & 1) << 1) ^ (row & 6)) << 4; }
__device__ __forceinline__ int fp8_place(int unit, int row) { return (unit ^ ((unit >> 3) << 1) ^ (row & 7)) << 4; }
// Where the factors of two keys lie among a group's.
__device__ __forceinline__ int factor_turn(int group) { return ((group & 3) << 2) ^ ((group >> 3) << 3); }

// A thread's scales of a tile: a quarter of two neighbouring keys'.
struct Scales {
  uint2 first, second;
};

struct Rows {
  const Call& c;
  u8* shared;
  int window_tiles;

  __device__ __forceinline__ uint2* places() const { return (uint2*)(shared + ROWS_AT); }

  // A key's id, or its cell in the ring; below 0: none.
  __device__ __forceinline__ int id_of(const Item& x, int key) const {
    int chosen = key - window_tiles * TILE;
    if (chosen >= 0) return chosen < c.selected ? c.topk[(i64)x.n * c.selected + chosen] : -1;
    int start = (int)c.spans[2 * x.n], stop = (int)c.spans[2 * x.n + 1];
    return start + key < stop ? (int)((u32)(start + key) % (u32)c.ring) : -1;
  }
  // Where its codes and scales lie, in 16 bytes from the first page, or (0, cell); y ~0: no key.
  __device__ __forceinline__ uint2 place_of(const Item& x, int id, int slot) const {
    if (id < 0) return make_uint2(0, ~0u);
    if (x.share < window_tiles) return make_uint2(0, id);
    i64 page = (i64)c.table[(i64)slot * c.table_width + (id >> c.page_shift)] * c.page_bytes;
    i64 row = id & ((1 << c.page_shift) - 1);
    return make_uint2((u32)((page + c.main_codes + row * 256) >> 4), (u32)((page + c.main_scales + row * 32) >> 4));
  }

  // Begin to bring the tile's codes and scales.
  __device__ __forceinline__ void ask_fp4(Scales& s) const {
    int thread = threadIdx.x, unit = thread & 15, first = thread >> 4;
    u8* to = shared + CODES_AT + first * 256 + fp4_place(unit, first);
    const u8* codes = c.pages + unit * 16;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      uint2 at = places()[first + 16 * i];
      bool real = at.y != ~0u;
      copy_unit(to + i * 4096, codes + (u64)(real ? at.x : 0) * 16, real);
    }
    if (thread >= 128) return;
    u32 a = places()[thread >> 2 << 1].y, b = places()[(thread >> 2 << 1) + 1].y;
    const u8* scales = c.pages + (thread & 3) * 8;
    if (a != ~0u) s.first = __ldg((const uint2*)(scales + (u64)a * 16));
    if (b != ~0u) s.second = __ldg((const uint2*)(scales + (u64)b * 16));
  }
  __device__ __forceinline__ void ask_fp8(Scales& s, int slot) const {
    int thread = threadIdx.x, unit = thread & 31, first = thread >> 5;
    const u8* codes = c.window + slot * c.slot_stride + unit * 16;
    u8* to = shared + CODES_AT + first * 512 + fp8_place(unit, first);
#pragma unroll
    for (int i = 0; i < 8; i++) {
      u32 cell = places()[first + 8 * i].y;
      bool real = cell != ~0u;
      copy_unit(to + i * 4096, codes + (real ? cell : 0) * c.window_stride, real);
    }
    if (thread >= 128) return;
    u32 a = places()[thread >> 2 << 1].y, b = places()[(thread >> 2 << 1) + 1].y;
    const u8* scales = c.window_scales + slot * c.slot_scale_stride + (thread & 3) * 4;
    if (a != ~0u) s.first.x = __ldg((const u32*)(scales + a * c.scale_stride));
    if (b != ~0u) s.second.x = __ldg((const u32*)(scales + b * c.scale_stride));
  }
  // Scales become factors, for keys by their groups of channels and for groups by their keys.
  __device__ __forceinline__ void finish(const Scales& s, bool window) const {
    int thread = threadIdx.x, pair = thread >> 2, quarter = thread & 3;
    u8* stage = shared + CODES_AT;
    u32* valid = (u32*)(shared + VALID_AT);
    u32 v[8];
    if (window) {
#pragma unroll
      for (int j = 0; j < 4; j++)
        v[2 * j] = v[2 * j + 1] = fp8_factor((s.first.x >> (8 * j)) & 255) | fp8_factor((s.second.x >> (8 * j)) & 255) << 16;
    } else {
#pragma unroll
      for (int j = 0; j < 8; j += 2) {
        u32 both = __byte_perm(j < 4 ? s.first.x : s.first.y, j < 4 ? s.second.x : s.second.y, j & 2 ? 0x7362 : 0x5140);
        v[j] = factor_pair(both & 0xFFFF), v[j + 1] = factor_pair(both >> 16);
      }
    }
    u32* groups = (u32*)(stage + BY_GROUP);
#pragma unroll
    for (int j = 0; j < 8; j++) groups[(8 * quarter + j) * 32 + (pair ^ factor_turn(8 * quarter + j))] = v[j];
    uint4* keys = (uint4*)(stage + BY_KEY + pair * 128 + quarter * 16);
    keys[0] = make_uint4(__byte_perm(v[0], v[1], 0x5410), __byte_perm(v[2], v[3], 0x5410), __byte_perm(v[4], v[5], 0x5410),
                         __byte_perm(v[6], v[7], 0x5410));
    keys[4] = make_uint4(__byte_perm(v[0], v[1], 0x7632), __byte_perm(v[2], v[3], 0x7632), __byte_perm(v[4], v[5], 0x7632),
                         __byte_perm(v[6], v[7], 0x7632));
    if (thread < TILE) {
      u32 here = __ballot_sync(~0u, places()[thread].y != ~0u);
      if ((thread & 31) == 0) valid[thread >> 5] = here;
    }
  }
};

struct Multiplier {
  const Call& c;
  u8* shared;
  int group, warp, lane;

  __device__ __forceinline__ int g() const { return lane >> 2; }
  __device__ __forceinline__ int t() const { return lane & 3; }
  __device__ __forceinline__ float* peaks() const { return (float*)(shared + PEAKS_AT); }
  __device__ __forceinline__ int* highest() const { return (int*)(shared + HIGHEST_AT); }
  // The first of a thread's two channels, which it has for 16 heads.
  __device__ __forceinline__ int channel(const Item& x) const { return x.part * CHANNELS_HERE + group * 64 + (8 * warp + g()) * 2; }

  // Left operands of two steps of 16 channels: eight of two keys.
  __device__ __forceinline__ void pairs_of(u32 (&first)[4], u32 (&second)[4], uint4 low, uint4 high) {
    first[0] = low.x, first[1] = high.x, first[2] = low.y, first[3] = high.y;
    second[0] = low.z, second[1] = high.z, second[2] = low.w, second[3] = high.w;
  }
  // Keys x queries: 16 keys a warp. A thread has a quarter of a row's channels and takes 32 at a time, in two halves: one is expanded while
  // the products of the other run.
  __device__ __forceinline__ void multiply_scores(float (&s)[32], const u32 (&a)[4][4], u32 q) {
    products_begin();
#pragma unroll
    for (int k = 0; k < 4; k++) product_64_rows(s, a[k], q + k * 2);
    products_end();
  }
  __device__ __forceinline__ void operands_fp4(u32 (&a)[4][4], u32 u0, u32 u1, u32 v0, u32 v1, u32 f, u32 h) {
    pairs_of(a[0], a[1], expand_fp4(u0, f), expand_fp4(v0, h));
    pairs_of(a[2], a[3], expand_fp4(u1, f), expand_fp4(v1, h));
  }
  __device__ __forceinline__ void score_fp4(float (&s)[32], const u8* stage, int first, int stop) {
    int row = 16 * warp + g(), key_at = row * 256 + fp4_place(4 * t(), row), factors_at = BY_KEY + row * 64 + t() * 16;
    u32 q = descriptor(shared_address(shared + Q_AT)) + first * (2 * CHUNK / 16);
    int next = key_at ^ (16 * first);
    u32 low = *(const u32*)(stage + factors_at + 4 * first), high = *(const u32*)(stage + factors_at + 512 + 4 * first);
    uint4 u = *(const uint4*)(stage + next), v = *(const uint4*)(stage + next + 2048);
    u32 a[4][4], b[4][4];
    operands_fp4(a, u.x, u.y, v.x, v.y, __byte_perm(low, 0, 0x1010), __byte_perm(high, 0, 0x1010));
#pragma unroll 1
    for (int block = first; block < stop; block++) {
      multiply_scores(s, a, q);
      operands_fp4(b, u.z, u.w, v.z, v.w, __byte_perm(low, 0, 0x3232), __byte_perm(high, 0, 0x3232));
      int later = block + 1 & 3;
      next = key_at ^ (16 * later);
      u = *(const uint4*)(stage + next), v = *(const uint4*)(stage + next + 2048);
      low = *(const u32*)(stage + factors_at + 4 * later), high = *(const u32*)(stage + factors_at + 512 + 4 * later);
      products_wait<0>();
      multiply_scores(s, b, q + CHUNK / 16);
      q += 2 * CHUNK / 16;
      if (block + 1 < stop) operands_fp4(a, u.x, u.y, v.x, v.y, __byte_perm(low, 0, 0x1010), __byte_perm(high, 0, 0x1010));
      products_wait<0>();
    }
  }
  // Eight E4M3 codes: pairs (i, i + 4).
  __device__ __forceinline__ uint4 expand_fp8(u32 low, u32 high, u32 f) {
    return make_uint4(expand_fp8_pair(__byte_perm(low, high, 0x4000), f), expand_fp8_pair(__byte_perm(low, high, 0x5010), f),
                      expand_fp8_pair(__byte_perm(low, high, 0x6020), f), expand_fp8_pair(__byte_perm(low, high, 0x7030), f));
  }
  __device__ __forceinline__ void operands_fp8(u32 (&a)[4][4], uint4 u, uint4 v, u32 f, u32 h) {
    pairs_of(a[0], a[1], expand_fp8(u.x, u.y, f), expand_fp8(v.x, v.y, h));
    pairs_of(a[2], a[3], expand_fp8(u.z, u.w, f), expand_fp8(v.z, v.w, h));
  }
  __device__ __forceinline__ void score_fp8(float (&s)[32], const u8* stage, int first, int stop) {
    int row = 16 * warp + g();
    const u8* codes = stage + row * 512;
    u32 at = fp8_place(8 * t(), row), q = descriptor(shared_address(shared + Q_AT)) + first * (2 * CHUNK / 16);
    int factors_at = BY_KEY + row * 64 + t() * 16;
    u32 a[4][4], b[4][4];
    int next = at ^ (32 * first);
    u32 low = *(const u32*)(stage + factors_at + 4 * first), high = *(const u32*)(stage + factors_at + 512 + 4 * first);
    operands_fp8(a, *(const uint4*)(codes + next), *(const uint4*)(codes + 4096 + next), low, high);
#pragma unroll 1
    for (int block = first; block < stop; block++) {
      multiply_scores(s, a, q);
      next = at ^ (32 * block + 16);
      operands_fp8(b, *(const uint4*)(codes + next), *(const uint4*)(codes + 4096 + next), low, high);
      int later = block + 1 & 3;
      low = *(const u32*)(stage + factors_at + 4 * later), high = *(const u32*)(stage + factors_at + 512 + 4 * later);
      products_wait<0>();
      multiply_scores(s, b, q + CHUNK / 16);
      q += 2 * CHUNK / 16;
      next = at ^ (32 * later);
      if (block + 1 < stop) operands_fp8(a, *(const uint4*)(codes + next), *(const uint4*)(codes + 4096 + next), low, high);
      products_wait<0>();
    }
  }

  // Bits 0 and 8: whether the thread's two keys exist.
  // Bits 0 and 8: whether the thread's two keys exist.
  __device__ __forceinline__ u32 valid_keys() const { return ((const u32*)(shared + VALID_AT))[warp >> 1] >> (16 * (warp & 1) + g()); }

  // Both groups have half of the channels: the second group's scores to the first.
  __device__ __forceinline__ void join_scores(float (&s)[32]) {
    float4* at = (float4*)(shared + SCORES_AT) + (threadIdx.x & 127);
    __syncthreads();
    if (group)
#pragma unroll
      for (int i = 0; i < 8; i++) at[i * 128] = make_float4(s[4 * i], s[4 * i + 1], s[4 * i + 2], s[4 * i + 3]);
    __syncthreads();
    if (!group)
#pragma unroll
      for (int i = 0; i < 8; i++) {
        float4 v = at[i * 128];
        s[4 * i] += v.x, s[4 * i + 1] += v.y, s[4 * i + 2] += v.z, s[4 * i + 3] += v.w;
      }
  }
  // Of 2 BY sums of two lanes, BY to each.
  template <int BY> __device__ __forceinline__ void share_out(float (&x)[16]) {
    bool upper = lane & (2 * BY);
#pragma unroll
    for (int i = 0; i < BY; i++) {
      float other = __shfl_xor_sync(~0u, upper ? x[i] : x[i + BY], 2 * BY);
      x[i] = (upper ? x[i + BY] : x[i]) + other;
    }
  }
  // Probabilities relative to the peaks, and their sums over a warp's keys.
  __device__ __forceinline__ void weigh(const float (&s)[32], u32 valid) {
    int g = lane >> 2;
    u8* to = shared + P_AT + (16 * warp + g) * 128 + (lane & 3) * 4;
    float here_sum[16];
#pragma unroll
    for (int j = 0; j < 8; j++) {
      here_sum[2 * j] = here_sum[2 * j + 1] = 0.f;
      float2 peak = *(const float2*)(peaks() + 8 * j + 2 * (lane & 3));
#pragma unroll
      for (int h = 0; h < 2; h++) {
        bool here = (valid >> (8 * h)) & 1;
        float p = here ? power2(fmaf(s[4 * j + 2 * h], c.scale, -peak.x)) : 0.f;
        float r = here ? power2(fmaf(s[4 * j + 2 * h + 1], c.scale, -peak.y)) : 0.f;
        here_sum[2 * j] += p, here_sum[2 * j + 1] += r;
        *(u32*)(to + h * 1024 + ((j ^ g) << 4)) = bfloat_pair(p, r);
      }
    }
    barriers_ready();
    // Lanes that hold the same heads share them out: each adds up two.
    share_out<8>(here_sum);
    share_out<4>(here_sum);
    share_out<2>(here_sum);
    int place = 8 * (lane >> 4) + 4 * ((lane >> 3) & 1) + 2 * ((lane >> 2) & 1);  // of 16: two heads a group of eight
    *(float2*)((float*)(shared + SUMS_AT) + warp * 64 + 4 * place + 2 * t()) = make_float2(here_sum[0], here_sum[1]);
  }
  // Only the largest scores, by head.
  __device__ __forceinline__ void raise(const float (&s)[32], u32 valid) {
    float none = -__int_as_float(0x7F800000);
#pragma unroll
    for (int i = 0; i < 16; i++) {
      int at = 4 * (i / 2) + i % 2, bits = __float_as_int(fmaxf(valid & 1 ? s[at] : none, valid & 256 ? s[at + 2] : none) * c.scale);
      atomicMax(highest() + 8 * (i / 2) + 2 * t() + i % 2, bits ^ ((bits >> 31) & 0x7FFFFFFF));
    }
  }

  // Whole totals by head; whether any must be done again. A total of 0 means no key or all out of range (and NaN is not 0).
  __device__ __forceinline__ bool join_totals(float& total, bool real, bool last) {
    u32* flags = (u32*)(shared + FLAGS_AT);
    const u32* valid = (const u32*)(shared + VALID_AT);
    __syncthreads();
    if (real) {
      total = 0.f;
#pragma unroll
      for (int w = 0; w < 4; w++) total += ((const float*)(shared + SUMS_AT))[w * 64 + threadIdx.x];
      if (!last && (total < LEAST || total > MOST) && (total != 0.f || (valid[0] | valid[1]))) flags[0] = 1;
    }
    __syncthreads();
    return flags[0];
  }
  // The peaks of heads that need one.
  __device__ __forceinline__ void find_peaks(const float (&s)[32], u32 valid) {
    if (!group) raise(s, valid);
    __syncthreads();
    if (threadIdx.x < 64) {
      int bits = highest()[threadIdx.x];
      float most = __int_as_float(bits ^ ((bits >> 31) & 0x7FFFFFFF));
      peaks()[threadIdx.x] = most > NONE && (most > 50.f || most < -60.f) ? ceilf(most) : 0.f;
    }
    __syncthreads();
  }

  // Left operands of 16 keys for the thread's two channels.
  __device__ __forceinline__ void values(u32 (&a)[4], const Item& x, bool window, int step) {
    int first = channel(x), byte = window ? first : first / 2, row = 2 * t(), size = window ? 512 : 256;
    const u8* stage = shared + CODES_AT;
    const u32* factors = (const u32*)(stage + BY_GROUP) + first / 16 * 32;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      int key = 16 * step + 8 * h + row;
      const u8 *even = stage + key * size + (byte & 15), *odd = even + size;
      u32 f = factors[(key / 2) ^ factor_turn(first / 16)];
      if (window) {
        u32 low = *(const u16*)(even + fp8_place(byte >> 4, row)), high = *(const u16*)(odd + fp8_place(byte >> 4, row + 1));
        a[2 * h] = expand_fp8_pair(__byte_perm(low, high, 0x4000), f), a[2 * h + 1] = expand_fp8_pair(__byte_perm(low, high, 0x5010), f);
      } else {
        uint4 v = expand_fp4(even[fp4_place(byte >> 4, row)] | odd[fp4_place(byte >> 4, row + 1)] << 16, f);
        a[2 * h] = v.x, a[2 * h + 1] = v.y;
      }
    }
  }
  // Channels x keys times probabilities.
  __device__ __forceinline__ void gather(float (&acc)[32], const Item& x, bool window) {
    u32 a[4][4], p = descriptor(shared_address(shared + P_AT));
#pragma unroll
    for (int step = 0; step < 4; step++) values(a[step], x, window, step);
    products_begin();
#pragma unroll
    for (int step = 0; step < 4; step++) product_64_columns(acc, a[step], p + step * 128);
    products_end();
    products_wait<0>();
  }

  // Every block writes its sums to memory, where they stay in L2, and adds up every `splits`-th run of outputs.
  __device__ __forceinline__ void write_share(const float (&acc)[32], const Item& x) {
    int head = x.head + 2 * t();
    float* to = c.shares + (((i64)x.n * c.splits + x.share) * c.heads + head) * CHANNELS + channel(x);
#pragma unroll
    for (int i = 0; i < 16; i++) {
      int j = i / 2, e = i % 2;
      if (head + 8 * j + e < c.heads) *(float2*)(to + (8 * j + e) * CHANNELS) = make_float2(acc[4 * j + e], acc[4 * j + 2 + e]);
    }
  }
  // 512 undoes the keys' 2^-9.
  __device__ __forceinline__ float share_of_one(float total, float peak, int head) {
    return total == 0.f ? 0.f : 512.f / (total + power2(c.sink[head] * LOG2_E - peak));
  }
  // Adds sums of another peak. Peaks are whole numbers, so that scaling is exact.
  __device__ __forceinline__ void add_share(float2& whole, float (&sums)[8], float2 stats, const float (&v)[8]) {
    float peak = fmaxf(whole.x, stats.x), before = power2(whole.x - peak), by = power2(stats.x - peak);
    whole.x = peak, whole.y = whole.y * before + by * stats.y;
#pragma unroll
    for (int i = 0; i < 8; i++) sums[i] = sums[i] * before + by * v[i];
  }
  // Runs of 8 channels; two threads take turns with a run's shares.
  __device__ __forceinline__ void join_shares(const Item& x) {
    const int units = CHANNELS_HERE / 8, turn = threadIdx.x & 1;
    int all = min(64, c.heads - x.head) * units;
    const float* values = c.shares + ((i64)x.n * c.splits * c.heads + x.head) * CHANNELS + x.part * CHANNELS_HERE;
    const float2* totals = c.totals + ((i64)x.n * c.splits * PARTS + x.part) * c.heads + x.head;
#pragma unroll 1
    for (int first = x.share * 128; first < all; first += c.splits * 128) {
      int at = first + threadIdx.x / 2, head = at / units, channel = at % units * 8;
      float v[MOST_SHARES / 2][8], sums[8];
      float2 stats[MOST_SHARES / 2], whole = make_float2(NONE, 0.f);
#pragma unroll
      for (int i = 0; i < MOST_SHARES / 2; i++) {
        int s = 2 * i + turn;
        float4 low = make_float4(0.f, 0.f, 0.f, 0.f), high = low;
        stats[i] = whole;
        if (at < all && s < c.splits) {
          const float* from = values + ((i64)s * c.heads + head) * CHANNELS + channel;
          low = __ldcg((const float4*)from), high = __ldcg((const float4*)(from + 4));
          stats[i] = __ldcg(totals + (i64)s * PARTS * c.heads + head);
        }
        v[i][0] = low.x, v[i][1] = low.y, v[i][2] = low.z, v[i][3] = low.w;
        v[i][4] = high.x, v[i][5] = high.y, v[i][6] = high.z, v[i][7] = high.w;
      }
#pragma unroll
      for (int i = 0; i < 8; i++) sums[i] = 0.f;
#pragma unroll
      for (int i = 0; i < MOST_SHARES / 2; i++) add_share(whole, sums, stats[i], v[i]);
      float others[8];
      float2 other = make_float2(__shfl_xor_sync(~0u, whole.x, 1), __shfl_xor_sync(~0u, whole.y, 1));
#pragma unroll
      for (int i = 0; i < 8; i++) others[i] = __shfl_xor_sync(~0u, sums[i], 1);
      add_share(whole, sums, other, others);
      if (at >= all || turn) continue;
      head += x.head, channel += x.part * CHANNELS_HERE;
      float by = share_of_one(whole.y, whole.x, head);
      uint4 out = make_uint4(bfloat_pair(sums[0] * by, sums[1] * by), bfloat_pair(sums[2] * by, sums[3] * by),
                             bfloat_pair(sums[4] * by, sums[5] * by), bfloat_pair(sums[6] * by, sums[7] * by));
      if (channel + 8 > CHANNELS - 2 * c.turned) out = Turn(c, x.n, channel / 8, -1.f).of(out);
      *(uint4*)(c.out + (((i64)x.n * c.heads + head) * CHANNELS + channel) * 2) = out;
    }
  }
};

extern "C" __global__ void __launch_bounds__(256, 2) attend_one(const __grid_constant__ Call c) {
  extern __shared__ u8 raw[];
  u8* shared = raw + ((1024 - (shared_address(raw) & 1023)) & 1023);
  int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;  // the same for all lanes, as the compiler then knows
  Item x = item_of(c);
  Rows rows{c, shared, (c.window_length + TILE - 1) / TILE};
  Queries queries{c, shared, warp, lane};
  Multiplier m{c, shared, warp >> 2, warp & 3, lane};
  bool window = x.share < rows.window_tiles, real = threadIdx.x < 64 && x.head + (int)threadIdx.x < c.heads;
  wait_for_launch();
  int slot = c.slots[x.n], id = -1;
  if (threadIdx.x < TILE) id = rows.id_of(x, x.share * TILE + threadIdx.x);
  queries.ask(x);
  if (threadIdx.x < TILE) {
    rows.places()[threadIdx.x] = rows.place_of(x, id, slot);
    m.peaks()[threadIdx.x] = 0.f, m.highest()[threadIdx.x] = 0x80000000;
    if (threadIdx.x == 0) *(u32*)(shared + FLAGS_AT) = 0;
  }
  __syncthreads();
  Scales scales = {make_uint2(0, 0), make_uint2(0, 0)};
  if (window) rows.ask_fp8(scales, slot);
  else rows.ask_fp4(scales);
  copies_commit();
  queries.order(x);
  if (threadIdx.x < 128) rows.finish(scales, window);
  copies_wait<0>();
  __syncthreads();
  let_next();  // the next launch's weights would keep these rows waiting

  float s[32], acc[32], total = 0.f;
#pragma unroll
  for (int i = 0; i < 32; i++) s[i] = acc[i] = 0.f;
  if (window) m.score_fp8(s, shared + CODES_AT, 2 * m.group, 2 * m.group + 2);
  else m.score_fp4(s, shared + CODES_AT, 2 * m.group, 2 * m.group + 2);
  m.join_scores(s);
  u32 valid = m.valid_keys();
  if (!m.group) m.weigh(s, valid);
  if (m.join_totals(total, real, false)) {
    m.find_peaks(s, valid);
    if (!m.group) m.weigh(s, valid);
    m.join_totals(total, real, true);
  }
  if (real) {
    float2* to = c.totals + ((((i64)x.n * c.splits + x.share) * PARTS + x.part) * c.heads + x.head + threadIdx.x);
    *to = make_float2(total == 0.f ? NONE : m.peaks()[threadIdx.x], total);
  }
  m.gather(acc, x, window);
  m.write_share(acc, x);
  cluster_arrive();
  cluster_wait();
  m.join_shares(x);
}
