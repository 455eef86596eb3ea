// Joint attention of 64 heads x 512 channels over FP8 window rows and FP4 rows in pages, for Hopper (sm_90a).
//
// A block owns one query, up to 64 of its heads and a share of its tiles of 64 keys. Two warpgroups expand packed rows to bfloat16
// tiles in shared memory, a half of each; two multiply: the first scores even tiles, the second odd ones, and each sums its half of the channels.
// Values are kept times 2^-9, so that a code and its scale need one product. Knows no requests and no layers.

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

static const int TILE = 64;             // keys
static const int CHANNELS = 512;
static const int CHUNK = TILE * 128;    // bytes of 64 channels of a tile: rows of 128 bytes, swizzled
static const int MOST_TILES = 10;       // a share
static const int PRODUCERS = 256;       // threads that expand rows: a warpgroup for each half of a tile
static const int Q_AT = 0, K_AT = 65536, P_AT = 196608, ROWS_AT = 212992;
static const int STATS_AT = ROWS_AT + 2 * MOST_TILES * TILE * 8;
static const int BARRIERS_AT = STATS_AT + 2048;
static const float LOG2_E = 1.4426950408889634f;
static const float NONE = -1e30f;

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// Barriers in shared memory.
__device__ __forceinline__ void barrier_init(u32 at, int count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(at), "r"(count));
}
__device__ __forceinline__ void arrive(u32 at) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(at) : "memory");
}
__device__ __forceinline__ void wait(u32 at, int parity) {
  asm volatile(
      "{\n.reg .pred p;\nAGAIN:\nmbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n@p bra DONE;\nbra AGAIN;\nDONE:\n}\n" ::"r"(at),
      "r"(parity)
      : "memory");
}
__device__ __forceinline__ void publish_writes() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void group_barrier(int name, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

// Matrix products: A and B are tiles in shared memory, swizzled by 128 bytes.
// A descriptor's low word; its high word is HIGH (rows of 128 bytes, groups of 8 rows 1,024 bytes apart).
__device__ __forceinline__ u32 descriptor(u32 at, int leading) { return ((at & 0x3FFFF) >> 4) | ((u32)(leading >> 4) << 16); }
#define HIGH "0x40000040"
__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_end() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT> __device__ __forceinline__ void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

// A 64 x 64 (heads x 16 channels a step), B keys x channels: both contiguous in channels.
__device__ __forceinline__ void product_scores(float (&d)[32], u32 a, u32 b, int keep) {
  asm volatile(
      "{\n.reg .pred p;\n.reg .b64 a, b;\nsetp.ne.b32 p, %34, 0;\nmov.b64 a, {%32, " HIGH "};\nmov.b64 b, {%33, " HIGH "};\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
      "}, a, b, p, 1, 1, 0, 0;\n}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "r"(a), "r"(b), "r"(keep));
}

__device__ __forceinline__ void product_values(float (&d)[64], u32 a, u32 b, int keep) {
  asm volatile(
      "{\n.reg .pred p;\n.reg .b64 a, b;\nsetp.ne.b32 p, %66, 0;\nmov.b64 a, {%64, " HIGH "};\nmov.b64 b, {%65, " HIGH "};\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
      "}, a, b, p, 1, 1, 0, 1;\n}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
        "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
        "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
        "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
      : "r"(a), "r"(b), "r"(keep));
}

__device__ __forceinline__ float power2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ u32 bfloat_pair(float low, float high) {
  u32 d;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}
__device__ __forceinline__ u32 times(u32 a, u32 b) {
  u32 d;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
__device__ __forceinline__ float low_of(u32 x) { return __uint_as_float(x << 16); }
__device__ __forceinline__ float high_of(u32 x) { return __uint_as_float(x & 0xFFFF0000u); }

// Rotate a pair of bfloat16 channels, rounding as the definition does.
__device__ __forceinline__ u32 turned_pair(u32 x, float c, float s) {
  float a = low_of(x), b = high_of(x);
  return bfloat_pair(a * c - b * s, a * s + b * c);
}

// Eight E2M1 codes to bfloat16 pairs of channels; `factor` twice the scale times 2^117.
__device__ __forceinline__ uint4 expand_fp4(u32 w, u32 factor) {
  u32 z = w >> 4;
  uint4 d;
  // A nibble of each half word: its sign to bit 15, its magnitude to bits 6 to 8, where it reads as code * 2^-126.
  d.x = times(((__byte_perm(w, z, 0x4400) & 0x000F000Fu) * 0x1040u) & 0x81C081C0u, factor);
  d.y = times(((__byte_perm(w, z, 0x5511) & 0x000F000Fu) * 0x1040u) & 0x81C081C0u, factor);
  d.z = times(((__byte_perm(w, z, 0x6622) & 0x000F000Fu) * 0x1040u) & 0x81C081C0u, factor);
  d.w = times(((__byte_perm(w, z, 0x7733) & 0x000F000Fu) * 0x1040u) & 0x81C081C0u, factor);
  return d;
}
__device__ __forceinline__ u32 fp4_factor(u32 e4m3) {
  u32 halves, d;
  float f;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"((unsigned short)e4m3));
  asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %1;\ncvt.f32.f16 %0, a;\n}" : "=f"(f) : "r"(halves));
  f *= 1.6615349947311448e35f;  // 2^117
  asm("cvt.rn.bf16x2.f32 %0, %1, %1;" : "=r"(d) : "f"(f));
  return d;
}

// Two E4M3 codes, already the high bytes of half words.
__device__ __forceinline__ u32 expand_fp8(u32 t, u32 factor) {
  u32 v = (t & 0x80008000u) | ((t >> 4) & 0x07F007F0u);
  return times(times(v, 0x77007700u), factor);  // the bits read as code * 2^-120; 2^111 leaves 2^-9
}
__device__ __forceinline__ u32 fp8_factor(u32 e8m0) {
  u32 bits = (e8m0 << 7) | ((e8m0 == 0 || e8m0 == 255) ? 0x40u : 0u);
  return bits | (bits << 16);
}

struct Call {
  const u8 *q, *window, *window_scales, *pages;
  u8* out;
  const float *sink, *cosines, *sines;
  const i64* spans;
  const int *slots, *table, *topk;
  float *shares, *peaks, *totals;
  i64 window_stride, scale_stride, slot_stride, slot_scale_stride, page_bytes;
  int queries, heads, selected, ring, window_length, table_width, main_codes, main_scales, page_shift, turned, splits;
  float scale;
};

// What a block works on.
struct Item {
  int n, head, split, first, tiles;  // first: tile number within the query
};
__device__ __forceinline__ Item item_of(const Call& c, int number) {
  Item x;
  int head_tiles = (c.heads + 63) / 64;
  x.split = number % c.splits;
  number /= c.splits;
  x.head = number % head_tiles * 64;
  x.n = number / head_tiles;
  int all = (c.window_length + TILE - 1) / TILE + (c.selected + TILE - 1) / TILE;
  x.first = all * x.split / c.splits;
  x.tiles = all * (x.split + 1) / c.splits - x.first;
  return x;
}

// A producer thread's loads, 128 threads together: 32 FP4 rows, or 16 FP8 rows, whose place in `scale` is that of their first code.
struct Unit {
  uint2 code[8];
  u32 scale[8];
};

struct Producer {
  const Call& c;
  u8* shared;
  int half, warp, lane, window_tiles;

  __device__ __forceinline__ uint2* rows(int item) { return (uint2*)(shared + ROWS_AT + (item & 1) * MOST_TILES * TILE * 8); }

  // Where each key of the item lies: (page, row in it) or (0, cell); row ~0: no key. In two steps that wait for nothing: first
  // the ids, then, once they are there, their pages. A thread reads what it copied itself.
  __device__ void ask_ids(const Item& x, int item) {
    uint2* to = rows(item);
    int start = (int)c.spans[2 * x.n], stop = (int)c.spans[2 * x.n + 1];
#pragma unroll
    for (int j = 0; j < (MOST_TILES * TILE + PRODUCERS - 1) / PRODUCERS; j++) {
      int i = j * PRODUCERS + half * 128 + warp * 32 + lane;
      if (i >= x.tiles * TILE) break;
      int key = x.first * TILE + i, chosen = key - window_tiles * TILE;
      if (chosen >= 0 && chosen < c.selected) copy_word(&to[i].y, c.topk + (i64)x.n * c.selected + chosen);
      else to[i].y = chosen < 0 && start + key < stop ? (u32)(start + key) % (u32)c.ring : ~0u;
    }
  }
  __device__ void ask_pages(const Item& x, int item, int slot) {
    uint2* to = rows(item);
    const int* table = c.table + (i64)slot * c.table_width;
#pragma unroll
    for (int j = 0; j < (MOST_TILES * TILE + PRODUCERS - 1) / PRODUCERS; j++) {
      int i = j * PRODUCERS + half * 128 + warp * 32 + lane;
      if (i >= x.tiles * TILE) break;
      u32 row = to[i].y;
      if (x.first * TILE + i < window_tiles * TILE || (int)row < 0) continue;
      copy_word(&to[i].x, table + (row >> c.page_shift));
      to[i].y = row & ((1u << c.page_shift) - 1);
    }
  }
  __device__ __forceinline__ void copy_word(u32* to, const int* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(to)), "l"(from) : "memory");
  }
  // 16 bytes, or zeros.
  __device__ __forceinline__ void copy_unit(u8* to, const u8* from, bool real) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(real ? 16 : 0) : "memory");
  }
  __device__ __forceinline__ void copies_end() { asm volatile("cp.async.commit_group;" ::: "memory"); }
  __device__ __forceinline__ void copies_but_last_wait() { asm volatile("cp.async.wait_group 1;" ::: "memory"); }
  __device__ __forceinline__ void copies_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

  // Rows of 288 bytes: two of a warp's eight, a quarter of their channels twice.
  __device__ __forceinline__ void load_fp4(Unit& u, int r, int i, const uint2* from) {
    int q = lane & 3, pair = (lane >> 2) & 1, chunk = (lane >> 3) + 4 * i;
    uint2 at = from[warp * 8 + 2 * r + pair];
    const u8* page = c.pages + (i64)at.x * c.page_bytes;
    u.code[2 * r + i] = make_uint2(0, 0);
    u.scale[2 * r + i] = 0;
    if (at.y != ~0u) {
      u.code[2 * r + i] = __ldg((const uint2*)(page + c.main_codes + at.y * 256 + chunk * 32 + q * 8));
      u.scale[2 * r + i] = __ldg(page + c.main_scales + at.y * 32 + chunk * 4 + q);
    }
  }
  __device__ __forceinline__ void load_fp8(Unit& u, int r, int i, const uint2* from, int slot) {
    int q = lane & 3, pair = (lane >> 2) & 1, chunk = (lane >> 3) + 4 * i;
    uint2 at = from[warp * 4 + 2 * r + pair];
    uint4 v = make_uint4(0, 0, 0, 0);
    u.scale[4 * r + 2 * i] = 0;
    if (at.y != ~0u) {
      v = __ldg((const uint4*)(c.window + slot * c.slot_stride + at.y * c.window_stride + chunk * 64 + q * 16));
      u.scale[4 * r + 2 * i] = __ldg(c.window_scales + slot * c.slot_scale_stride + at.y * c.scale_stride + chunk * 2 + (q >> 1));
    }
    u.code[4 * r + 2 * i] = make_uint2(v.x, v.y);
    u.code[4 * r + 2 * i + 1] = make_uint2(v.z, v.w);
  }
  __device__ __forceinline__ void put(u8* tile, int row, int chunk, int unit, uint4 v) {
    *(uint4*)(tile + chunk * CHUNK + row * 128 + ((unit ^ (row & 7)) << 4)) = v;
  }
  __device__ __forceinline__ void store_fp4(const Unit& u, int r, int i, u8* tile) {
    int q = lane & 3, pair = (lane >> 2) & 1, chunk = (lane >> 3) + 4 * i, row = half * 32 + warp * 8 + 2 * r + pair;
    u32 f = fp4_factor(u.scale[2 * r + i]);
    put(tile, row, chunk, 2 * q, expand_fp4(u.code[2 * r + i].x, f));
    put(tile, row, chunk, 2 * q + 1, expand_fp4(u.code[2 * r + i].y, f));
  }
  __device__ __forceinline__ void store_fp8(const Unit& u, int r, int i, u8* tile, int part) {
    int q = lane & 3, pair = (lane >> 2) & 1, chunk = (lane >> 3) + 4 * i;
    u32 f = fp8_factor(u.scale[4 * r + 2 * i]);
#pragma unroll
    for (int j = 0; j < 2; j++) {
      uint2 w = u.code[4 * r + 2 * i + j];
      uint4 v;
      v.x = expand_fp8(__byte_perm(w.x, 0, 0x1404), f);
      v.y = expand_fp8(__byte_perm(w.x, 0, 0x3424), f);
      v.z = expand_fp8(__byte_perm(w.y, 0, 0x1404), f);
      v.w = expand_fp8(__byte_perm(w.y, 0, 0x3424), f);
      put(tile, half * 32 + part * 16 + warp * 4 + 2 * r + pair, chunk, 2 * q + j, v);
    }
  }

  // Queries of an item into shared memory, rotated where a table is given. A thread has one unit of 8 channels of every fourth head.
  __device__ void load_queries(const Item& x) {
    int first_turned = c.turned ? (CHANNELS - 2 * c.turned) / 8 : CHANNELS;
    int unit = (warp * 32 + lane) & 63, first = half * 2 + (warp >> 1);
    u8* to = shared + Q_AT + (unit >> 3) * CHUNK;
    const u8* from = c.q + ((i64)x.n * c.heads + x.head) * CHANNELS * 2 + unit * 16;
    if (unit < first_turned) {
#pragma unroll 8
      for (int i = 0; i < 16; i++) {
        int row = first + 4 * i;
        bool real = x.head + row < c.heads;
        copy_unit(to + row * 128 + (((unit & 7) ^ (row & 7)) << 4), from + (real ? row : 0) * CHANNELS * 2, real);
      }
    } else {
      for (int row = first; row < 64; row += 4) {
        uint4 v = make_uint4(0, 0, 0, 0);
        if (x.head + row < c.heads) v = *(const uint4*)(from + row * CHANNELS * 2);
        u32 pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int j = 0; j < 4; j++) {
          int place = unit * 4 + j - (CHANNELS / 2 - c.turned);
          if (place >= 0)
            pairs[j] = turned_pair(pairs[j], c.cosines[(i64)x.n * c.turned + place], c.sines[(i64)x.n * c.turned + place]);
        }
        *(uint4*)(to + row * 128 + (((unit & 7) ^ (row & 7)) << 4)) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
      }
    }
  }
};

// Addresses of the barriers: tiles full and free (buffer, half), probabilities ready (buffer), queries full and free.
struct Barriers {
  u32 base;
  __device__ u32 full(int b, int half) { return base + 8 * (2 * b + half); }
  __device__ u32 free_(int b, int half) { return base + 32 + 8 * (2 * b + half); }
  __device__ u32 ready(int b) { return base + 64 + 8 * b; }
  __device__ u32 queries() { return base + 80; }
  __device__ u32 queries_free() { return base + 88; }
};
// After the barriers: which keys of a half tile exist.
static const int VALID_AT = BARRIERS_AT + 128;

__device__ void produce(const Call& c, u8* shared, Barriers bars, int items) {
  int half = (threadIdx.x >> 7) - 2, warp = (threadIdx.x >> 5) & 3, lane = threadIdx.x & 31;
  Producer p{c, shared, half, warp, lane, (c.window_length + TILE - 1) / TILE};
  u32* valid = (u32*)(shared + VALID_AT);
  u32 filled = 0;  // bit b: parity of buffer b's uses
  int item = 0, number = blockIdx.x;
  Item x = item_of(c, number);
  int slot = c.slots[x.n];
  p.ask_ids(x, item);
  p.copies_wait();
  p.ask_pages(x, item, slot);
  p.copies_end();
  p.load_queries(x);
  p.copies_end();
  p.copies_but_last_wait();
  group_barrier(2, PRODUCERS);
  for (; number < items; number += gridDim.x, item++) {
    int windows = min(max(p.window_tiles - x.first, 0), x.tiles);
    bool more = number + gridDim.x < items;
    Item next = more ? item_of(c, number + gridDim.x) : x;
    int next_slot = c.slots[next.n];
    const uint2* rows = p.rows(item) + half * 32;
    Unit unit;
    // The first tile's rows are on their way while the queries are fetched.
#pragma unroll
    for (int k = 0; k < 8; k++) {
      if (windows == 0) p.load_fp4(unit, k >> 1, k & 1, rows);
      else if (k % 2 == 0) p.load_fp8(unit, k >> 2, (k >> 1) & 1, rows, slot);
    }
    if (item > 0) {
      wait(bars.queries_free(), (item - 1) & 1);
      p.load_queries(x);
    }
    if (more) p.ask_ids(next, item + 1);
    for (int tile = 0; tile < x.tiles; tile++, rows += TILE) {
      int b = tile & 1;
      u8* to = shared + K_AT + b * 8 * CHUNK;
      wait(bars.free_(b, half), ((filled >> b) & 1) ^ 1);
      // A value that has been expanded makes room for one of the rows after it.
      if (tile < windows) {
#pragma unroll
        for (int k = 0; k < 4; k++) {
          p.store_fp8(unit, k >> 1, k & 1, to, 0);
          p.load_fp8(unit, k >> 1, k & 1, rows + 16, slot);
        }
        bool fp8 = tile + 1 < windows;
#pragma unroll
        for (int k = 0; k < 4; k++) {
          p.store_fp8(unit, k >> 1, k & 1, to, 1);
          if (fp8) p.load_fp8(unit, k >> 1, k & 1, rows + TILE, slot);
        }
        if (!fp8 && tile + 1 < x.tiles)
#pragma unroll
          for (int k = 0; k < 8; k++) p.load_fp4(unit, k >> 1, k & 1, rows + TILE);
      } else {
        bool last = tile + 1 == x.tiles;
#pragma unroll
        for (int k = 0; k < 8; k++) {
          p.store_fp4(unit, k >> 1, k & 1, to);
          if (!last) p.load_fp4(unit, k >> 1, k & 1, rows + TILE);
        }
      }
      if (warp == 0) {
        u32 here = __ballot_sync(~0u, rows[lane].y != ~0u);
        if (lane == 0) valid[2 * b + half] = here;
      }
      publish_writes();
      __syncwarp();
      if (lane == 0) arrive(bars.full(b, half));
      filled ^= 1u << b;
      if (tile == 0) {
        p.copies_wait();
        publish_writes();
        __syncwarp();
        if (lane == 0) arrive(bars.queries());
        if (more) p.ask_pages(next, item + 1, next_slot);
      }
    }
    p.copies_wait();
    group_barrier(2, PRODUCERS);
    x = next;
    slot = next_slot;
  }
}

struct Consumer {
  const Call& c;
  u8* shared;
  Barriers bars;
  int group, warp, lane;  // group 0 scores even tiles, group 1 odd ones
  float peak[2], total[2];

  __device__ __forceinline__ float* peaks(int b) { return (float*)(shared + STATS_AT) + b * 64; }
  __device__ __forceinline__ float* shrinks(int b) { return (float*)(shared + STATS_AT + 512) + b * 64; }
  __device__ __forceinline__ float* sums(int item) { return (float*)(shared + STATS_AT + 1024) + (item & 1) * 128; }
  __device__ __forceinline__ int row() { return warp * 16 + (lane >> 2); }

  __device__ __forceinline__ void score(float (&s)[32], int b) {
    u32 q = descriptor(shared_address(shared + Q_AT), 16), k = descriptor(shared_address(shared + K_AT + b * 8 * CHUNK), 16);
    products_begin();
#pragma unroll
    for (int chunk = 0; chunk < 8; chunk++)
#pragma unroll
      for (int step = 0; step < 4; step++)
        product_scores(s, q + chunk * (CHUNK / 16) + step * 2, k + chunk * (CHUNK / 16) + step * 2, chunk + step > 0);
    products_end();
  }

  // Probabilities of the tile in buffer b, its peaks and shrink factors, for both groups.
  __device__ __forceinline__ void weigh(float (&s)[32], int b, float (&shrink)[2]) {
    const u32* valid = (const u32*)(shared + VALID_AT);
    u32 low = valid[2 * b], high = valid[2 * b + 1];
    int column = 2 * (lane & 3);
    if ((low & high) != ~0u) {
#pragma unroll
      for (int j = 0; j < 8; j++)
#pragma unroll
        for (int k = 0; k < 2; k++) {
          bool here = ((j < 4 ? low : high) >> ((8 * j + column + k) & 31)) & 1;
          if (!here) s[4 * j + k] = s[4 * j + 2 + k] = -__int_as_float(0x7F800000);
        }
    }
    u8* to = shared + P_AT + b * CHUNK + row() * 128 + (lane & 3) * 4;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float most = s[2 * h];
#pragma unroll
      for (int j = 0; j < 8; j++) most = fmaxf(most, fmaxf(s[4 * j + 2 * h], s[4 * j + 2 * h + 1]));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
      // Whole numbers: shrinking is exact, and a probability is rounded the same whatever tile it is in (see ref.py).
      float higher = fmaxf(peak[h], ceilf(most * c.scale));
      shrink[h] = power2(peak[h] - higher);
      peak[h] = higher;
      float sum = 0.f;
#pragma unroll
      for (int j = 0; j < 8; j++) {
        float p0 = power2(fmaf(s[4 * j + 2 * h], c.scale, -higher)), p1 = power2(fmaf(s[4 * j + 2 * h + 1], c.scale, -higher));
        sum += p0 + p1;
        // Rows h * 8 apart share their place in the swizzle.
        *(u32*)(to + h * 1024 + ((j ^ (row() & 7)) << 4)) = bfloat_pair(p0, p1);
      }
      total[h] = total[h] * shrink[h] + sum;
      if ((lane & 3) == 0) {
        peaks(b)[row() + 8 * h] = higher;
        shrinks(b)[row() + 8 * h] = shrink[h];
      }
    }
    publish_writes();
    __syncwarp();
    if (lane == 0) arrive(bars.ready(b));
  }

  // Take over the other group's peaks of the tile in buffer b.
  __device__ __forceinline__ void follow(int b, float (&shrink)[2]) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      shrink[h] = shrinks(b)[row() + 8 * h];
      peak[h] = peaks(b)[row() + 8 * h];
      total[h] *= shrink[h];
    }
  }

  __device__ __forceinline__ void shrink_sums(float (&acc)[2][64], const float (&shrink)[2]) {
    if (__all_sync(~0u, shrink[0] == 1.f && shrink[1] == 1.f)) return;
#pragma unroll
    for (int i = 0; i < 64; i++) {
      acc[0][i] *= shrink[(i >> 1) & 1];
      acc[1][i] *= shrink[(i >> 1) & 1];
    }
  }

  // acc += probabilities x values of the tile in buffer b, this group's half of the channels.
  __device__ __forceinline__ void gather(float (&acc)[2][64], int b, bool keep) {
    u32 p = descriptor(shared_address(shared + P_AT + b * CHUNK), 16);
    u32 k = descriptor(shared_address(shared + K_AT + (8 * b + 4 * group) * CHUNK), CHUNK);
    products_begin();
#pragma unroll
    for (int step = 0; step < 4; step++) {
      product_values(acc[0], p + step * 2, k + step * 128, keep || step > 0);
      product_values(acc[1], p + step * 2, k + step * 128 + 2 * CHUNK / 16, keep || step > 0);
      if (step & 1) products_end();
    }
  }
  __device__ __forceinline__ void release(int b) {
    products_wait<1>();
    __syncwarp();
    if (lane == 0) arrive(bars.free_(b, 0));
    products_wait<0>();
    __syncwarp();
    if (lane == 0) arrive(bars.free_(b, 1));
  }

  __device__ __forceinline__ void finish(float (&acc)[2][64], const Item& x, int item) {
    float* mine = sums(item);
#pragma unroll
    for (int h = 0; h < 2; h++) {
      total[h] += __shfl_xor_sync(~0u, total[h], 1);
      total[h] += __shfl_xor_sync(~0u, total[h], 2);
      if ((lane & 3) == 0) mine[group * 64 + row() + 8 * h] = total[h];
    }
    group_barrier(1, 256);
#pragma unroll
    for (int h = 0; h < 2; h++) {
      int head = x.head + row() + 8 * h;
      if (head >= c.heads) continue;
      float sum = mine[row() + 8 * h] + mine[64 + row() + 8 * h];
      int channel = group * 256 + 2 * (lane & 3);
      if (c.splits > 1) {
        i64 place = ((i64)x.n * c.splits + x.split) * c.heads + head;
        if (group == 0 && (lane & 3) == 0) {
          c.peaks[place] = peak[h];
          c.totals[place] = sum;
        }
        float* to = c.shares + place * CHANNELS + channel;
#pragma unroll
        for (int j = 0; j < 32; j++) *(float2*)(to + 8 * j) = make_float2(acc[j >> 4][4 * (j & 15) + 2 * h], acc[j >> 4][4 * (j & 15) + 2 * h + 1]);
        continue;
      }
      // The best key alone weighs 1: a sum of 0 means no key (and NaN is not 0). 512 undoes the keys' 2^-9.
      float by = sum == 0.f ? 0.f : 512.f / (sum + power2(c.sink[head] * LOG2_E - peak[h]));
      u8* to = c.out + (((i64)x.n * c.heads + head) * CHANNELS + channel) * 2;
#pragma unroll
      for (int j = 0; j < 32; j++) {
        u32 v = bfloat_pair(acc[j >> 4][4 * (j & 15) + 2 * h] * by, acc[j >> 4][4 * (j & 15) + 2 * h + 1] * by);
        int place = (channel + 8 * j) / 2 - (CHANNELS / 2 - c.turned);
        if (place >= 0)
          v = turned_pair(v, c.cosines[(i64)x.n * c.turned + place], -c.sines[(i64)x.n * c.turned + place]);
        *(u32*)(to + 16 * j) = v;
      }
    }
  }
};

__device__ void consume(const Call& c, u8* shared, Barriers bars, int items) {
  int group = threadIdx.x >> 7;
  Consumer w{c, shared, bars, group, (int)(threadIdx.x >> 5) & 3, (int)threadIdx.x & 31};
  int uses[2] = {0, 0};
  int item = 0;
  float acc[2][64], s[32], shrink[2];
  for (int number = blockIdx.x; number < items; number += gridDim.x, item++) {
    Item x = item_of(c, number);
    w.peak[0] = w.peak[1] = NONE;
    w.total[0] = w.total[1] = 0.f;
    wait(bars.queries(), item & 1);
    if (group == 1 && x.tiles < 2 && w.lane == 0) arrive(bars.queries_free());
    for (int tile = 0; tile < x.tiles; tile += 2) {
      bool pair = tile + 1 < x.tiles, last = tile + 2 >= x.tiles, later = tile + 3 >= x.tiles;
      if (group == 0) {
        wait(bars.full(0, 0), uses[0] & 1);
        wait(bars.full(0, 1), uses[0] & 1);
        w.score(s, 0);
        products_wait<0>();
        __syncwarp();
        if (last && w.lane == 0) arrive(bars.queries_free());
        w.weigh(s, 0, shrink);
        w.shrink_sums(acc, shrink);
        wait(bars.ready(0), uses[0] & 1);
        w.gather(acc, 0, tile > 0);
        w.release(0);
        uses[0]++;
        if (pair) {
          wait(bars.ready(1), uses[1] & 1);
          w.follow(1, shrink);
          w.shrink_sums(acc, shrink);
          w.gather(acc, 1, true);
          w.release(1);
          uses[1]++;
        }
      } else if (pair) {
        wait(bars.full(1, 0), uses[1] & 1);
        wait(bars.full(1, 1), uses[1] & 1);
        w.score(s, 1);
        products_wait<0>();
        __syncwarp();
        if (later && w.lane == 0) arrive(bars.queries_free());
        wait(bars.ready(0), uses[0] & 1);
        w.follow(0, shrink);
        w.shrink_sums(acc, shrink);
        w.gather(acc, 0, tile > 0);
        w.weigh(s, 1, shrink);
        w.release(0);
        w.shrink_sums(acc, shrink);
        wait(bars.ready(1), uses[1] & 1);
        w.gather(acc, 1, true);
        w.release(1);
        uses[0]++;
        uses[1]++;
      } else {
        wait(bars.ready(0), uses[0] & 1);
        w.follow(0, shrink);
        w.shrink_sums(acc, shrink);
        w.gather(acc, 0, tile > 0);
        w.release(0);
        uses[0]++;
      }
    }
    w.finish(acc, x, item);
  }
}

extern "C" __global__ void __launch_bounds__(512, 1) attend(const __grid_constant__ Call c) {
  extern __shared__ u8 raw[];
  u8* shared = raw + ((1024 - (shared_address(raw) & 1023)) & 1023);
  Barriers bars{shared_address(shared + BARRIERS_AT)};
  if (threadIdx.x == 0) {
    for (int b = 0; b < 2; b++) {
      for (int half = 0; half < 2; half++) {
        barrier_init(bars.full(b, half), 4);
        barrier_init(bars.free_(b, half), 8);
      }
      barrier_init(bars.ready(b), 4);
    }
    barrier_init(bars.queries(), 8);
    barrier_init(bars.queries_free(), 8);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (c.splits > 1) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  int items = c.queries * ((c.heads + 63) / 64) * c.splits;
  if (threadIdx.x >= 256) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 64;");
    produce(c, shared, bars, items);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 192;");
    consume(c, shared, bars, items);
  }
}

// Join the shares of one query and head: 128 threads of four channels.
extern "C" __global__ void __launch_bounds__(128) combine(const __grid_constant__ Call c) {
  asm volatile("griddepcontrol.wait;" ::: "memory");
  int n = blockIdx.x / c.heads, head = blockIdx.x % c.heads, channel = threadIdx.x * 4;
  i64 first = (i64)n * c.splits * c.heads + head;
  float highest = NONE, total = 0.f;
  for (int s = 0; s < c.splits; s++) highest = fmaxf(highest, c.peaks[first + (i64)s * c.heads]);
  float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 4
  for (int s = 0; s < c.splits; s++) {
    i64 place = first + (i64)s * c.heads;
    float by = power2(c.peaks[place] - highest);
    float4 v = *(const float4*)(c.shares + place * CHANNELS + channel);
    total += by * c.totals[place];
    sum.x += by * v.x, sum.y += by * v.y, sum.z += by * v.z, sum.w += by * v.w;
  }
  float by = total == 0.f ? 0.f : 512.f / (total + power2(c.sink[head] * LOG2_E - highest));
  u32 pairs[2] = {bfloat_pair(sum.x * by, sum.y * by), bfloat_pair(sum.z * by, sum.w * by)};
#pragma unroll
  for (int j = 0; j < 2; j++) {
    int place = channel / 2 + j - (CHANNELS / 2 - c.turned);
    if (place >= 0)
      pairs[j] = turned_pair(pairs[j], c.cosines[(i64)n * c.turned + place], -c.sines[(i64)n * c.turned + place]);
  }
  *(uint2*)(c.out + (((i64)n * c.heads + head) * CHANNELS + channel) * 2) = make_uint2(pairs[0], pairs[1]);
}
