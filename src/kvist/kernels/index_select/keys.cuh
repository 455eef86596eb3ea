// What the kernels of index selection share: a call, packed keys as matrix operands, ordered scores, sums over a block.
//
// Put before each source (there are no include paths). Owns formats and layouts; knows no launch.

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

static const int BINS = 4096, BIN_SHIFT = 20;
static const int BLOCK = 8;  // keys of a candidate block

struct List {  // scores to choose from: of keys, or of candidate blocks
  u32 *orders, *bins, *counts;
  uint2* found;
  int* out;
  uint4* entries;  // of shares, if they list their best
  int stride, chosen, room, number_shift;
};
struct Call {
  const u8 *q, *weights, *pages;
  const int *table, *slots;
  const i64 *visible;
  const int *pool, *groups;
  u32* arrivals;
  int* left;
  uint2* spill;
  List rows, blocks;
  i64 page_bytes;
  int queries, heads, table_width, key_codes, key_scales, page_shift, pool_blocks, publish, limit, share, shares, group_count, inverse;
};

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ u32 times(u32 a, u32 b) {
  u32 d;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
// Twice the positive part; NaN stays NaN. (Heads' weights are halved: two instructions at full rate instead of a maximum at half.)
__device__ __forceinline__ float twice_positive(float x) { return x + fabsf(x); }
// A number of the same order: -0 as 0, NaN above all, never 0.
__device__ __forceinline__ u32 ordered(float x) {
  u32 bits = __float_as_uint(x + 0.f);
  return bits ^ ((u32)((int)bits >> 31) | 0x80000000u);
}

// Eight E2M1 codes as four bfloat16 pairs (codes r and r + 4 of the word), times `factor`.
__device__ __forceinline__ void expand(u32 w, u32 factor, u32* even, u32* odd, int row) {
  u32 z = w >> 8;
  // A nibble of each half word: its sign to bit 15, its magnitude to bits 6 to 8, where it reads as code * 2^-126.
  even[row] = times(((w & 0x000F000Fu) * 0x1040u) & 0x81C081C0u, factor);
  even[2 + row] = times(((w & 0x00F000F0u) * 0x104u) & 0x81C081C0u, factor);
  odd[row] = times(((z & 0x000F000Fu) * 0x1040u) & 0x81C081C0u, factor);
  odd[2 + row] = times(((z & 0x00F000F0u) * 0x104u) & 0x81C081C0u, factor);
}

struct Keys {  // a thread's part of two rows: a group of 32 channels
  uint4 code[2];
  u32 scale[2];
};


// A thread's part of two rows 8 apart, tile after tile, `step` rows on: while a tile is scored, the next one's keys and the page of the
// one after that are on their way. The 16 rows of a warp lie in one page.
struct Feed {
  const Call& c;
  const int* table;
  int end, group, step;
  int at, next_at;  // the first of both rows
  int next_page;
  Keys keys;

  __device__ __forceinline__ void find(int row) {
    next_at = row;
    // A page beyond the last is not looked up; its rows do not count.
    next_page = table[min(row & ~15, end - 1) >> c.page_shift];
  }
  __device__ __forceinline__ void load() {
    int inside = next_at & ((1 << c.page_shift) - 1);
    const u8* base = c.pages + next_page * c.page_bytes;
    const u8* codes = base + c.key_codes + inside * 64 + group * 16;
    const u8* scales = base + c.key_scales + inside * 4 + group;
    keys.code[0] = __ldg((const uint4*)codes), keys.code[1] = __ldg((const uint4*)(codes + 512));
    keys.scale[0] = __ldg(scales), keys.scale[1] = __ldg(scales + 32);
  }
  __device__ __forceinline__ void start() {
    find(at);
    load();
    find(at + step);
  }
};

// Both rows as the left operand of 8 products of 16 channels.
__device__ __forceinline__ void expand_keys(const Keys& k, u32 (&a)[8][4]) {
#pragma unroll
  for (int h = 0; h < 2; h++) {
    // 2^62 of the factor of 2^126 that codes need: no scale below 2^66 overflows, and scores (2^-64 of them) keep their order.
    u32 factor = (min(k.scale[h], 193u) + 62u) * 0x00800080u;
    expand(k.code[h].x, factor, a[0], a[1], h);
    expand(k.code[h].y, factor, a[2], a[3], h);
    expand(k.code[h].z, factor, a[4], a[5], h);
    expand(k.code[h].w, factor, a[6], a[7], h);
  }
}

// FP8 (E5M2) products. Keys are E2M1 codes times powers of two and released queries too, so both are E5M2 numbers as long as exponents
// stay near; products are then exact. Sums are what Hopper's FP8 units keep: measured on random keys and queries in this format, scores
// are as near to float64 as those of bfloat16 products (7e-8 of the largest). Callers find what does not fit and use bfloat16 for it.
static const int WIDE_FP8 = 13, MIDDLE_FP8 = 127 - 7, LOWEST_FP8 = MIDDLE_FP8 - WIDE_FP8;  // scales whose codes are normal numbers
__device__ __forceinline__ bool beyond_fp8(u32 scale) { return scale - LOWEST_FP8 > 2 * WIDE_FP8; }

// __byte_perm for a selector without its upper bits, which the compiler would mask again.
__device__ __forceinline__ u32 look_up(u32 low, u32 high, u32 selector) {
  u32 d;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(low), "r"(high), "r"(selector));
  return d;
}
// Both rows, 2^7 times as large, as the left operand of 4 products of 32 channels.
__device__ __forceinline__ void expand_fp8(const Keys& k, u32 (&a)[4][4]) {
#pragma unroll
  for (int h = 0; h < 2; h++) {
    // E5M2 numbers of the eight magnitudes times the scale; 0 stays 0.
    u32 by = k.scale[h] - MIDDLE_FP8, low = 0x3E3C3800u + by * 0x04040400u, high = 0x46444240u + by * 0x04040404u;
    const u32 words[4] = {k.code[h].x, k.code[h].y, k.code[h].z, k.code[h].w};
#pragma unroll
    for (int s = 0; s < 4; s++) {
      u32 w = words[s], magnitudes = w & 0x77777777u, signs = w << 4;
      a[s][h] = look_up(low, high, magnitudes) | (__byte_perm(signs, w, 0x5140) & 0x80808080u);
      a[s][2 + h] = look_up(low, high, magnitudes >> 16) | (__byte_perm(signs, w, 0x7362) & 0x80808080u);
    }
  }
}
__device__ __forceinline__ u32 larger_halves(u32 a, u32 b) {
  u32 d;
  asm("max.u16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
// The largest exponent of 8 channels of a query (bfloat16).
__device__ __forceinline__ u32 largest_exponent(uint4 v) {
  u32 most = larger_halves(larger_halves(v.x & 0x7FFF7FFFu, v.y & 0x7FFF7FFFu), larger_halves(v.z & 0x7FFF7FFFu, v.w & 0x7FFF7FFFu));
  return max(most >> 16, most & 0xFFFF) >> 7;
}
// What is taken out of a head whose largest exponent is `most`, for any of a head of zeros.
__device__ __forceinline__ u32 exponent_taken(u32 most, bool& unfit) {
  unfit |= most && (most < 112 || most > 150);
  return most ? most : 130;
}
// 8 channels (unit 0 to 15 of a head) to their places in a row of 128 bytes, the head's largest exponent becoming E5M2's largest.
// `unfit` if one has more than 3 significant bits or is no normal number then.
__device__ __forceinline__ void put_unit_fp8(u8* tile, int row, int unit, uint4 v, u32 most, bool& unfit) {
  const u32 pairs[4] = {v.x, v.y, v.z, v.w};
  u32 less = (most - 30) * 0x00040004u, bytes[4], bad = 0;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    // Two numbers of exponent and 2 bits of mantissa; what is less than `less` becomes 0, which only 0 may.
    u32 x = pairs[i], whole = (x & 0x7FFF7FFFu) >> 5 & 0x03FF03FFu, y = larger_halves(whole, less) - less;
    bad |= (x & 0x001F001Fu) | (((y + 0x007C007Cu) >> 7 ^ (whole + 0x7FFF7FFFu) >> 15) & 0x00010001u);
    bytes[i] = y | (x >> 8 & 0x00800080u);
  }
  unfit |= bad != 0;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    // A thread of the left operand holds 32 channels in a row: 4 bytes of each half of each product are one group's.
    int place = 32 * (unit & 3) + 16 * half + 4 * (unit >> 2);
    u32 word = __byte_perm(bytes[2 * half], bytes[2 * half + 1], 0x6420);
    *(u32*)(tile + row * 128 + ((((place >> 4) ^ (row & 7)) << 4) | (place & 15))) = word;
  }
}
// A head's weight for scores of the scale that bfloat16 products give (2^-64).
__device__ __forceinline__ float scaled_weight(float weight, u32 most, bool& unfit) {
  float product = weight * __uint_as_float((most - 142 - 7 - 64 + 127) << 23);
  unfit |= weight != 0.f && fabsf(product) < 1.17549435e-38f;
  return product;
}
// Both keys' sums over a quad: lanes with bit 0 get the second's, the others the first's.
__device__ __forceinline__ float quad_half(float first, float second, int lane) {
  float mine = lane & 1 ? second : first, other = lane & 1 ? first : second;
  return mine + __shfl_xor_sync(~0u, other, 1);
}

// Eight channels of a query (unit 0 to 15 of a head) to their places in a tile of `rows` rows of 128 bytes and two chunks.
__device__ __forceinline__ void put_query(u8* tile, int rows, int row, int unit, uint4 v) {
  int of = unit >> 2, word = unit & 3;
  // Pairs of channels (r, r + 4), as `expand` gives the keys'.
  u32 pairs[4] = {__byte_perm(v.x, v.z, 0x5410), __byte_perm(v.x, v.z, 0x7632), __byte_perm(v.y, v.w, 0x5410),
                  __byte_perm(v.y, v.w, 0x7632)};
#pragma unroll
  for (int r = 0; r < 4; r++) {
    int place = 16 * (2 * word + (r >> 1)) + 2 * of + 8 * (r & 1), inner = (place & 63) * 2;
    *(u32*)(tile + (place >> 6) * rows * 128 + row * 128 + ((((inner >> 4) ^ (row & 7)) << 4) | (inner & 15))) = pairs[r];
  }
}
// The low word of a matrix descriptor; its high word is HIGH (rows of 128 bytes, groups of 8 rows 1,024 bytes apart).
__device__ __forceinline__ u32 descriptor(const void* p) { return ((shared_address(p) & 0x3FFFF) >> 4) | (1u << 16); }
#define HIGH "0x40000040"
// A product of 64 keys with 32 or 128 heads of queries, keys in registers: its text, then its operands, sums first.
#define PRODUCT(shape, sums, a, b, keep, rest)                                                  \
  "{\n.reg .pred p;\n.reg .b64 b;\nsetp.ne.b32 p, " keep ", 0;\nmov.b64 b, {" b ", " HIGH "};\n" \
  "wgmma.mma_async.sync.aligned." shape " {" sums "}, {" a "}, b, p, 1, 1" rest ";\n}\n"
#define NAMES_16(a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p) \
  "%" #a ", %" #b ", %" #c ", %" #d ", %" #e ", %" #f ", %" #g ", %" #h ", %" #i ", %" #j ", %" #k ", %" #l ", %" #m ", %" #n ", %" #o ", %" #p
#define SUMS_4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SUMS_16(d, i) SUMS_4(d, i), SUMS_4(d, i + 4), SUMS_4(d, i + 8), SUMS_4(d, i + 12)
#define INPUTS(a, b, keep) "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(keep)
#define SUMS_OF_32 NAMES_16(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)
#define SUMS_OF_128                                                                                                             \
  SUMS_OF_32 ", " NAMES_16(16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31) ", "                                  \
  NAMES_16(32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43, 44, 45, 46, 47) ", "                                                  \
  NAMES_16(48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62, 63)
#define PRODUCT_32(shape, rest, d, a, b, keep) \
  PRODUCT(shape, SUMS_OF_32, "%16, %17, %18, %19", "%20", "%21", rest) : SUMS_16(d, 0) : INPUTS(a, b, keep)
#define PRODUCT_128(shape, rest, d, a, b, keep)                                   \
  PRODUCT(shape, SUMS_OF_128, "%64, %65, %66, %67", "%68", "%69", rest)           \
      : SUMS_16(d, 0), SUMS_16(d, 16), SUMS_16(d, 32), SUMS_16(d, 48) : INPUTS(a, b, keep)
__device__ __forceinline__ float bfloat_at(const u8* p) { return __uint_as_float((u32) * (const unsigned short*)p << 16); }

// Sum over a block of THREADS, and the sum over higher threads. `room` holds 33 words.
template <int THREADS> __device__ __forceinline__ u32 above(u32 mine, u32* room, u32* all) {
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  u32 sum = mine;
#pragma unroll
  for (int by = 1; by < 32; by *= 2) {
    u32 other = __shfl_down_sync(~0u, sum, by);
    if (lane + by < 32) sum += other;
  }
  __syncthreads();
  if (lane == 0) room[warp] = sum;
  __syncthreads();
  u32 higher = 0, total = 0;
#pragma unroll
  for (int w = 0; w < THREADS / 32; w++) {
    u32 x = room[w];
    total += x;
    if (w > warp) higher += x;
  }
  *all = total;
  return higher + sum - mine;
}

// The same in few instructions, for what runs once.
struct Sums {
  u32 higher, all;
};
template <int THREADS> __device__ __forceinline__ Sums above_short(u32 mine, u32* room) {
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  u32 sum = mine;
#pragma unroll 1
  for (int by = 1; by < 32; by *= 2) {
    u32 other = __shfl_down_sync(~0u, sum, by);
    if (lane + by < 32) sum += other;
  }
  __syncthreads();
  if (lane == 0) room[warp] = sum;
  __syncthreads();
  u32 x = lane < THREADS / 32 ? room[lane] : 0;
  return {__reduce_add_sync(~0u, lane > warp ? x : 0) + sum - mine, __reduce_add_sync(~0u, x)};
}
