// Joint attention of 64 heads x 512 channels over FP8 window rows and FP4 rows in pages, for Hopper (sm_90a); after
// `stream.cuh` and `rows.cuh`.
//
// A block owns one query, up to 64 of its heads, a share of its tiles of 64 keys and a part of the output channels. Eight warps expand
// packed rows to bfloat16 tiles in shared memory, eight keys each; two warpgroups multiply: the first scores even tiles, the second odd
// ones, each sums its half of the block's channels. Shares of a query are a cluster of blocks that join through each other's shared
// memory. Every eight channels lie in the order 0 4 1 5 2 6 3 7, in which the nibbles of a word come apart. Values are kept times
// 2^-9, so that a code and its scale need one product. Knows no requests and no layers.

static const int MOST_TILES = 10;       // a share
static const int PRODUCERS = 256;       // threads that expand rows
static const int Q_AT = 0, K_AT = 65536, P_AT = 196608, ROWS_AT = 212992;
static const int STATS_AT = ROWS_AT + 2 * MOST_TILES * TILE * 8;
static const int BARRIERS_AT = STATS_AT + 2048;
static const int VALID_AT = BARRIERS_AT + 128;  // which keys of a half tile exist
static const float SLACK = 8.f;         // how far (powers of 2) a score may exceed the peak before sums are scaled again

// Clusters: the first half of their barrier without publishing what was written; other blocks' shared memory.
__device__ __forceinline__ void cluster_announce() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ __forceinline__ u32 address_in(u32 at, int block) {
  u32 there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(block));
  return there;
}
__device__ __forceinline__ float4 read_from(u32 at) {
  float4 v;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(at) : "memory");
  return v;
}
__device__ __forceinline__ float2 read_pair_from(u32 at) {
  float2 v;
  asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(at) : "memory");
  return v;
}

// Matrix products: A and B are tiles in shared memory, swizzled by 128 bytes.
__device__ __forceinline__ u32 descriptor(u32 at, int leading) { return ((at & 0x3FFFF) >> 4) | ((u32)(leading >> 4) << 16); }

// Heads x keys, 16 channels a step: both sides contiguous in channels.
__device__ __forceinline__ void product_scores(float (&d)[32], u32 a, u32 b, int keep) {
  asm volatile(
      "{\n.reg .pred p;\n.reg .b64 a, b;\nsetp.ne.b32 p, %34, 0;\nmov.b64 a, {%32, " HIGH "};\nmov.b64 b, {%33, " HIGH "};\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, "
      "%25, %26, %27, %28, %29, %30, %31"
      "}, a, b, p, 1, 1, 0, 0;\n}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
        "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
        "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "r"(a), "r"(b), "r"(keep));
}

// Heads x channels, 16 keys a step: values are contiguous in channels.
__device__ __forceinline__ void values_128(float (&d)[64], u32 a, u32 b) {
  asm volatile(
      "{\n.reg .b64 a, b;\nmov.b64 a, {%64, " HIGH "};\nmov.b64 b, {%65, " HIGH "};\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, "
      "%25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
      "}, a, b, 1, 1, 1, 0, 1;\n}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
        "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
        "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]),
        "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]),
        "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),
        "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]),
        "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
      : "r"(a), "r"(b));
}
__device__ __forceinline__ void values_64(float (&d)[32], u32 a, u32 b) {
  asm volatile(
      "{\n.reg .b64 a, b;\nmov.b64 a, {%32, " HIGH "};\nmov.b64 b, {%33, " HIGH "};\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, "
      "%25, %26, %27, %28, %29, %30, %31"
      "}, a, b, 1, 1, 1, 0, 1;\n}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
        "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
        "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "r"(a), "r"(b));
}
__device__ __forceinline__ void values_32(float (&d)[16], u32 a, u32 b) {
  asm volatile(
      "{\n.reg .b64 a, b;\nmov.b64 a, {%16, " HIGH "};\nmov.b64 b, {%17, " HIGH "};\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
      "}, a, b, 1, 1, 1, 0, 1;\n}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
      : "r"(a), "r"(b));
}
__device__ __forceinline__ void product_values(float (&d)[64], u32 a, u32 b) { values_128(d, a, b); }
__device__ __forceinline__ void product_values(float (&d)[32], u32 a, u32 b) { values_64(d, a, b); }
__device__ __forceinline__ void product_values(float (&d)[16], u32 a, u32 b) { values_32(d, a, b); }

// Eight channels as bfloat16: from their own order to that of tiles, and back.
__device__ __forceinline__ uint4 tile_order(uint4 v) {
  return make_uint4(__byte_perm(v.x, v.z, 0x5410), __byte_perm(v.x, v.z, 0x7632), __byte_perm(v.y, v.w, 0x5410),
                    __byte_perm(v.y, v.w, 0x7632));
}
__device__ __forceinline__ uint4 own_order(uint4 v) {
  return make_uint4(__byte_perm(v.x, v.y, 0x5410), __byte_perm(v.z, v.w, 0x5410), __byte_perm(v.x, v.y, 0x7632),
                    __byte_perm(v.z, v.w, 0x7632));
}

// Two E4M3 scales as factors of `expand_fp4`.
__device__ __forceinline__ uint2 fp4_factors(u32 scales) {
  u32 halves;
  uint2 d;
  float low, high;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"((unsigned short)scales));
  asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %2;\ncvt.f32.f16 %0, a;\ncvt.f32.f16 %1, b;\n}" : "=f"(low), "=f"(high) : "r"(halves));
  low *= 1.6615349947311448e35f, high *= 1.6615349947311448e35f;  // 2^117
  asm("cvt.rn.bf16x2.f32 %0, %1, %1;" : "=r"(d.x) : "f"(low));
  asm("cvt.rn.bf16x2.f32 %0, %1, %1;" : "=r"(d.y) : "f"(high));
  return d;
}

// Eight E4M3 codes in the order of tiles.
__device__ __forceinline__ uint4 expand_fp8(u32 low, u32 high, u32 factor) {
  return make_uint4(expand_fp8_pair(__byte_perm(low, high, 0x4000), factor), expand_fp8_pair(__byte_perm(low, high, 0x5010), factor),
                    expand_fp8_pair(__byte_perm(low, high, 0x6020), factor), expand_fp8_pair(__byte_perm(low, high, 0x7030), factor));
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
  i64 window_stride, scale_stride, slot_stride, slot_scale_stride, page_bytes;
  int queries, heads, selected, ring, window_length, table_width, main_codes, main_scales, page_shift, turned, splits;
  float scale;
};

// What a block works on.
struct Item {
  int n, head, part, split, first, tiles;  // first: tile number within the query
};
template <int PARTS> __device__ __forceinline__ Item item_of(const Call& c, int number) {
  Item x;
  int head_tiles = (c.heads + 63) / 64;
  x.split = number % c.splits;
  number /= c.splits;
  x.part = number % PARTS;
  number /= PARTS;
  x.head = number % head_tiles * 64;
  x.n = number / head_tiles;
  int all = (c.window_length + TILE - 1) / TILE + (c.selected + TILE - 1) / TILE;
  x.first = all * x.split / c.splits;
  x.tiles = all * (x.split + 1) / c.splits - x.first;
  return x;
}

// Addresses of the barriers: tiles full (buffer) and free (buffer, half), probabilities ready (buffer), queries full and free.
struct Barriers {
  u32 base;
  __device__ u32 full(int b) { return base + 8 * b; }
  __device__ u32 free_(int b, int half) { return base + 32 + 8 * (2 * b + half); }
  __device__ u32 ready(int b) { return base + 64 + 8 * b; }
  __device__ u32 queries() { return base + 80; }
  __device__ u32 queries_free() { return base + 88; }
};

// Queries of an item into shared memory, rotated where a table is given, by 256 threads. A thread has one unit of 8 channels of every
// fourth head, eight of them under way; LATER: after the first are, waits for the place to be free.
template <bool LATER> __device__ __forceinline__ void load_queries(const Call& c, const Item& x, u8* shared, int thread, u32 is_free, int parity) {
  const int AHEAD = 8;
  int unit = thread & 63, first = thread >> 6;
  u8* to = shared + Q_AT + (unit >> 3) * CHUNK;
  const u8* from = c.q + ((i64)x.n * c.heads + x.head) * CHANNELS * 2 + unit * 16;
  Turn turn(c, x.n, unit, 1.f);
#pragma unroll 1
  for (int i = 0; i < 16; i += AHEAD) {
    uint4 v[AHEAD];
#pragma unroll
    for (int j = 0; j < AHEAD; j++) {
      int row = first + 4 * (i + j);
      v[j] = make_uint4(0, 0, 0, 0);
      if (x.head + row < c.heads) v[j] = __ldg((const uint4*)(from + row * CHANNELS * 2));
    }
    if (LATER && i == 0) wait(is_free, parity);
#pragma unroll
    for (int j = 0; j < AHEAD; j++) {
      int row = first + 4 * (i + j);
      *(uint4*)(to + row * 128 + (((unit & 7) ^ (row & 7)) << 4)) = tile_order(turn.of(v[j]));
    }
  }
}

// A producer thread's loads: its part of a warp's 8 FP4 rows (two rows, 16 bytes of codes twice), or of 4 of its FP8 rows.
struct Unit {
  uint4 code[4];
  u32 scale[4];
};

// The same number, computed again wherever it is used: what follows from a lane costs less than the registers to keep it.
__device__ __forceinline__ int fresh(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

struct Producer {
  const Call& c;
  u8* shared;
  int warp, lane, window_tiles;

  __device__ __forceinline__ uint2* rows(int item) { return (uint2*)(shared + ROWS_AT + (item & 1) * MOST_TILES * TILE * 8); }

  // Where each key of the item lies: (page, row in it) or (0, cell); row ~0: no key. In two steps that wait for nothing: first
  // the ids, then, once they are there, their pages. A thread reads what it copied itself.
  __device__ void ask_ids(const Item& x, int item) {
    uint2* to = rows(item);
    int start = (int)c.spans[2 * x.n], stop = (int)c.spans[2 * x.n + 1];
#pragma unroll
    for (int j = 0; j < (MOST_TILES * TILE + PRODUCERS - 1) / PRODUCERS; j++) {
      int i = j * PRODUCERS + warp * 32 + lane;
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
      int i = j * PRODUCERS + warp * 32 + lane;
      if (i >= x.tiles * TILE) break;
      u32 row = to[i].y;
      if (x.first * TILE + i < window_tiles * TILE) continue;
      if ((int)row < 0) {
        to[i].y = ~0u;
        continue;
      }
      copy_word(&to[i].x, table + (row >> c.page_shift));
      to[i].y = row & ((1u << c.page_shift) - 1);
    }
  }
  __device__ __forceinline__ void copy_word(u32* to, const int* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(to)), "l"(from) : "memory");
  }
  __device__ __forceinline__ void copies_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

  // A lane's half of a chunk (32 bytes of codes) in two of the warp's rows, four apart, for chunks four apart.
  __device__ __forceinline__ void load_fp4(Unit& u, const uint2* from) {
    int lane = fresh(this->lane), side = lane & 1, quarter = (lane >> 1) & 3, chunk = lane >> 3;
    const u8 *codes = c.pages + c.main_codes + chunk * 32 + side * 16, *scales = c.pages + c.main_scales + chunk * 4 + side * 2;
#pragma unroll
    for (int j = 0; j < 2; j++) {
      uint2 at = from[8 * warp + 4 * j + quarter];
      i64 page = (i64)at.x * c.page_bytes;
      bool real = at.y != ~0u;
#pragma unroll
      for (int i = 0; i < 2; i++) {
        u.code[2 * j + i] = make_uint4(0, 0, 0, 0);
        u.scale[2 * j + i] = 0;
        if (real) {
          u.code[2 * j + i] = __ldg((const uint4*)(codes + page + (u64)at.y * 256 + i * 128));
          u.scale[2 * j + i] = __ldg((const u16*)(scales + page + (u64)at.y * 32 + i * 16));
        }
      }
    }
  }
  __device__ __forceinline__ void store_fp4(const Unit& u, u8* tile) {
    int lane = fresh(this->lane), side = lane & 1, quarter = (lane >> 1) & 3, chunk = lane >> 3;
    u8* to = tile + chunk * CHUNK + (8 * warp + quarter) * 128;
#pragma unroll
    for (int k = 0; k < 4; k++) {
      int j = k >> 1, i = k & 1;
      uint2 f = fp4_factors(u.scale[k]);
      u32 w[4] = {u.code[k].x, u.code[k].y, u.code[k].z, u.code[k].w};
#pragma unroll
      for (int word = 0; word < 4; word++) {
        int unit = 4 * (side ^ j) + (word ^ quarter);  // (4 side + word) ^ (row & 7)
        *(uint4*)(to + i * 4 * CHUNK + j * 512 + unit * 16) = expand_fp4(w[word], word < 2 ? f.x : f.y);
      }
    }
  }
  // Rows of 512 bytes: a quarter of a chunk in two of the four rows of a part, two apart, for chunks four apart.
  __device__ __forceinline__ void load_fp8(Unit& u, const uint2* from, int part, int slot) {
    int lane = fresh(this->lane), q = lane & 3, pair = (lane >> 2) & 1, chunk = lane >> 3;
    const u8 *codes = c.window + slot * c.slot_stride + chunk * 64 + q * 16;
    const u8 *scales = c.window_scales + slot * c.slot_scale_stride + chunk * 2 + (q >> 1);
#pragma unroll
    for (int r = 0; r < 2; r++) {
      uint2 at = from[8 * warp + 4 * part + 2 * r + pair];
      bool real = at.y != ~0u;
#pragma unroll
      for (int i = 0; i < 2; i++) {
        u.code[2 * r + i] = make_uint4(0, 0, 0, 0);
        u.scale[2 * r + i] = 0;
        if (real) {
          u.code[2 * r + i] = __ldg((const uint4*)(codes + at.y * c.window_stride + i * 256));
          u.scale[2 * r + i] = __ldg(scales + at.y * c.scale_stride + i * 8);
        }
      }
    }
  }
  __device__ __forceinline__ void store_fp8(const Unit& u, u8* tile, int part) {
    int lane = fresh(this->lane), q = lane & 3, pair = (lane >> 2) & 1, chunk = lane >> 3;
#pragma unroll
    for (int k = 0; k < 4; k++) {
      int row = 8 * warp + 4 * part + 2 * (k >> 1) + pair;
      u8* to = tile + (chunk + 4 * (k & 1)) * CHUNK + row * 128;
      u32 f = fp8_factor(u.scale[k]);
      *(uint4*)(to + (((2 * q) ^ (row & 7)) << 4)) = expand_fp8(u.code[k].x, u.code[k].y, f);
      *(uint4*)(to + (((2 * q + 1) ^ (row & 7)) << 4)) = expand_fp8(u.code[k].z, u.code[k].w, f);
    }
  }
};

template <int PARTS> __device__ __forceinline__ void produce(const Call& c, u8* shared, Barriers bars, int items) {
  int warp = (threadIdx.x >> 5) - 8, lane = threadIdx.x & 31, half = warp >> 2;
  Producer p{c, shared, warp, lane, (c.window_length + TILE - 1) / TILE};
  u32* valid = (u32*)(shared + VALID_AT);
  u32 filled = 0;  // bit b: parity of buffer b's uses
  int item = 0, number = blockIdx.x;
  Item opening = item_of<PARTS>(c, number);
  int slot = c.slots[opening.n];
  p.ask_ids(opening, item);
  p.copies_wait();
  p.ask_pages(opening, item, slot);
  p.copies_wait();
  group_barrier(2, PRODUCERS);
  for (; number < items; number += gridDim.x, item++) {
    Item x = item_of<PARTS>(c, number);
    int windows = min(max(p.window_tiles - x.first, 0), x.tiles);
    bool more = number + gridDim.x < items;
    int next_number = more ? number + gridDim.x : number, next_slot = c.slots[item_of<PARTS>(c, next_number).n];
    const uint2* rows = p.rows(item);
    if (item > 0) {
      load_queries<true>(c, x, shared, threadIdx.x - 256, bars.queries_free(), (item - 1) & 1);
      barriers_ready();
      __syncwarp();
      if (lane == 0) arrive(bars.queries());
    }
    Unit unit;
    if (windows) p.load_fp8(unit, rows, 0, slot);
    else p.load_fp4(unit, rows);
    if (more) p.ask_ids(item_of<PARTS>(c, next_number), item + 1);
    for (int tile = 0; tile < x.tiles; tile++, rows += TILE) {
      int b = tile & 1;
      u8* to = shared + K_AT + b * 8 * CHUNK;
      wait(bars.free_(b, half), ((filled >> b) & 1) ^ 1);
      filled ^= 1u << b;
      if (tile < windows) {
        p.store_fp8(unit, to, 0);
        p.load_fp8(unit, rows, 1, slot);
        p.store_fp8(unit, to, 1);
      } else {
        p.store_fp4(unit, to);
      }
      if ((warp & 3) == 0) {
        u32 here = __ballot_sync(~0u, rows[half * 32 + lane].y != ~0u);
        if (lane == 0) valid[2 * b + half] = here;
      }
      // Loads come after the fence, which would wait for them.
      barriers_ready();
      __syncwarp();
      if (lane == 0) arrive(bars.full(b));
      if (tile + 1 < windows) p.load_fp8(unit, rows + TILE, 0, slot);
      else if (tile + 1 < x.tiles) p.load_fp4(unit, rows + TILE);
      if (tile == 0 && more) {
        p.copies_wait();
        p.ask_pages(item_of<PARTS>(c, next_number), item + 1, next_slot);
      }
    }
    p.copies_wait();
    group_barrier(2, PRODUCERS);
    slot = next_slot;
  }
}

// A warpgroup's sums: COUNT accumulators of WIDTH registers, 2 WIDTH channels each.
template <int PARTS> struct Width {
  static const int COUNT = PARTS == 1 ? 2 : 1, WIDTH = PARTS == 1 ? 64 : 128 / PARTS;
  static const int CHANNELS_HERE = CHANNELS / PARTS;  // of the block
  static const int STRIDE = CHANNELS_HERE + 8;        // floats from head to head where shares are joined
  static const int TOGETHER = PARTS <= 2 ? 4 : 8 / PARTS;  // units of 8 channels whose shares a thread reads at once
  static const int AHEAD = PARTS <= 2 ? 2 : 4;             // shares of these
};

template <int PARTS> struct Consumer {
  typedef Width<PARTS> W;
  typedef float Sums[W::COUNT][W::WIDTH];
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
      most *= c.scale;
      // Whole numbers: shrinking is exact, and a probability is rounded the same whatever tile it is in (see ref.py).
      float higher = most > peak[h] + SLACK ? ceilf(most) : peak[h];
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
    barriers_ready();
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

  __device__ __forceinline__ void shrink_sums(Sums& acc, const float (&shrink)[2]) {
    if (__all_sync(~0u, shrink[0] == 1.f && shrink[1] == 1.f)) return;
#pragma unroll
    for (int a = 0; a < W::COUNT; a++)
#pragma unroll
      for (int i = 0; i < W::WIDTH; i++) acc[a][i] *= shrink[(i >> 1) & 1];
  }

  // acc += probabilities x values of the tile in buffer b, this group's half of the block's channels.
  __device__ __forceinline__ void gather(Sums& acc, const Item& x, int b) {
    int channel = x.part * W::CHANNELS_HERE + group * (W::CHANNELS_HERE / 2);
    u32 p = descriptor(shared_address(shared + P_AT + b * CHUNK), 16);
    u32 k = descriptor(shared_address(shared + K_AT + 8 * b * CHUNK + (channel >> 6) * CHUNK + (channel & 63) * 2), CHUNK);
    products_begin();
#pragma unroll
    for (int step = 0; step < 4; step++) {
#pragma unroll
      for (int a = 0; a < W::COUNT; a++) product_values(acc[a], p + step * 2, k + step * 128 + a * 2 * CHUNK / 16);
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

  // Whole rows' totals, from what the groups summed over their own tiles.
  __device__ __forceinline__ void join_totals(int item) {
    float* mine = sums(item);
#pragma unroll
    for (int h = 0; h < 2; h++) {
      total[h] += __shfl_xor_sync(~0u, total[h], 1);
      total[h] += __shfl_xor_sync(~0u, total[h], 2);
      if ((lane & 3) == 0) mine[group * 64 + row() + 8 * h] = total[h];
    }
    group_barrier(1, 256);
#pragma unroll
    for (int h = 0; h < 2; h++) total[h] = mine[row() + 8 * h] + mine[64 + row() + 8 * h];
  }
  // The best key alone weighs more than 1/2: a sum of 0 means no key (and NaN is not 0). 512 undoes the keys' 2^-9.
  __device__ __forceinline__ float share_of_one(float sum, float highest, int head) {
    return sum == 0.f ? 0.f : 512.f / (sum + power2(c.sink[head] * LOG2_E - highest));
  }

  // Outputs of a block that had all keys: four lanes exchange words, so that each has 8 channels in a row.
  __device__ __forceinline__ void write_out(Sums& acc, const Item& x) {
    int q = lane & 3;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      int head = x.head + row() + 8 * h;
      bool real = head < c.heads;
      float by = real ? share_of_one(total[h], peak[h], head) : 0.f;
      int first = (x.part * W::CHANNELS_HERE + group * (W::CHANNELS_HERE / 2)) / 8 + q;
      u8* to = c.out + ((i64)x.n * c.heads + head) * CHANNELS * 2;
#pragma unroll
      for (int four = 0; four < W::COUNT * W::WIDTH / 16; four++) {
        u32 w[4];
#pragma unroll
        for (int g = 0; g < 4; g++) {
          int at = 4 * four + g;
          const float* pair = &acc[at / (W::WIDTH / 4)][4 * (at % (W::WIDTH / 4)) + 2 * h];
          w[g] = bfloat_pair(pair[0] * by, pair[1] * by);
        }
        // Afterwards lane q has the four words of group q.
#pragma unroll
        for (int g = 0; g < 4; g += 2) {
          u32 other = __shfl_xor_sync(~0u, q & 1 ? w[g] : w[g + 1], 1);
          if (q & 1) w[g] = other;
          else w[g + 1] = other;
        }
        u32 a = __shfl_xor_sync(~0u, q & 2 ? w[0] : w[2], 2), b = __shfl_xor_sync(~0u, q & 2 ? w[1] : w[3], 2);
        uint4 v = own_order(q & 2 ? make_uint4(a, b, w[2], w[3]) : make_uint4(w[0], w[1], a, b));
        int unit = first + 4 * four;
        if (real) *(uint4*)(to + unit * 16) = Turn(c, x.n, unit, -1.f).of(v);
      }
    }
  }

  // Join the cluster's shares: every block leaves its sums, peaks and totals in its own shared memory and adds up every `splits`-th
  // run of outputs.
  __device__ __forceinline__ void join_shares(Sums& acc, const Item& x) {
    float* mine = (float*)(shared + K_AT);
    float2* of_rows = (float2*)(shared + STATS_AT);
#pragma unroll
    for (int h = 0; h < 2; h++) {
      if (group == 0 && (lane & 3) == 0) of_rows[row() + 8 * h] = make_float2(peak[h], total[h]);
      float* to = mine + (row() + 8 * h) * W::STRIDE + group * (W::CHANNELS_HERE / 2) + 2 * (lane & 3);
#pragma unroll
      for (int j = 0; j < W::COUNT * W::WIDTH / 4; j++) {
        const float* pair = &acc[j / (W::WIDTH / 4)][4 * (j % (W::WIDTH / 4)) + 2 * h];
        *(float2*)(to + 8 * j) = make_float2(pair[0], pair[1]);
      }
    }
    cluster_arrive();
    cluster_wait();
    const int units = W::CHANNELS_HERE / 8;
    int all = min(64, c.heads - x.head) * units, step = c.splits * 256;
    for (int start = x.split * 256 + threadIdx.x; start < all; start += W::TOGETHER * step) {
      float4 low[W::TOGETHER], high[W::TOGETHER];
      float highest[W::TOGETHER], whole[W::TOGETHER];
#pragma unroll
      for (int k = 0; k < W::TOGETHER; k++) {
        low[k] = high[k] = make_float4(0.f, 0.f, 0.f, 0.f);
        highest[k] = NONE, whole[k] = 0.f;
      }
#pragma unroll W::AHEAD
      for (int s = 0; s < c.splits; s++) {
        float4 a[W::TOGETHER], b[W::TOGETHER];
        float2 stats[W::TOGETHER];
#pragma unroll
        for (int k = 0; k < W::TOGETHER; k++) {
          int i = min(start + k * step, all - 1);
          stats[k] = read_pair_from(address_in(shared_address(of_rows + i / units), s));
          u32 there = address_in(shared_address(mine + i / units * W::STRIDE + i % units * 8), s);
          a[k] = read_from(there), b[k] = read_from(there + 16);
        }
        // Peaks are whole numbers, so that scaling what has been summed is exact.
#pragma unroll
        for (int k = 0; k < W::TOGETHER; k++) {
          float higher = fmaxf(highest[k], stats[k].x), before = power2(highest[k] - higher), by = power2(stats[k].x - higher);
          highest[k] = higher;
          whole[k] = whole[k] * before + by * stats[k].y;
          low[k].x = low[k].x * before + by * a[k].x, low[k].y = low[k].y * before + by * a[k].y;
          low[k].z = low[k].z * before + by * a[k].z, low[k].w = low[k].w * before + by * a[k].w;
          high[k].x = high[k].x * before + by * b[k].x, high[k].y = high[k].y * before + by * b[k].y;
          high[k].z = high[k].z * before + by * b[k].z, high[k].w = high[k].w * before + by * b[k].w;
        }
      }
#pragma unroll
      for (int k = 0; k < W::TOGETHER; k++) {
        int i = start + k * step;
        if (i >= all) continue;
        int head = x.head + i / units, unit = x.part * units + i % units;
        float by = share_of_one(whole[k], highest[k], head);
        uint4 v = own_order(make_uint4(bfloat_pair(low[k].x * by, low[k].y * by), bfloat_pair(low[k].z * by, low[k].w * by),
                                       bfloat_pair(high[k].x * by, high[k].y * by), bfloat_pair(high[k].z * by, high[k].w * by)));
        *(uint4*)(c.out + ((i64)x.n * c.heads + head) * CHANNELS * 2 + unit * 16) = Turn(c, x.n, unit, -1.f).of(v);
      }
    }
    cluster_announce();
    cluster_wait();  // nobody reads this block's memory any more
  }
};

template <int PARTS> __device__ __forceinline__ void consume(const Call& c, u8* shared, Barriers bars, int items) {
  int group = threadIdx.x >> 7;
  Consumer<PARTS> w{c, shared, bars, group, (int)(threadIdx.x >> 5) & 3, (int)threadIdx.x & 31};
  int uses[2] = {0, 0};
  int item = 0;
  typename Consumer<PARTS>::Sums acc;
  float s[32], shrink[2];
  // The first queries are fetched here, where nothing else is to be done; producers fetch the later ones.
  load_queries<false>(c, item_of<PARTS>(c, blockIdx.x), shared, threadIdx.x, 0, 0);
  barriers_ready();
  __syncwarp();
  if (w.lane == 0) arrive(bars.queries());
  for (int number = blockIdx.x; number < items; number += gridDim.x, item++) {
    Item x = item_of<PARTS>(c, number);
    w.peak[0] = w.peak[1] = NONE;
    w.total[0] = w.total[1] = 0.f;
    // Sums that began with a product that ignores them would count as used before it.
#pragma unroll
    for (int a = 0; a < Width<PARTS>::COUNT; a++)
#pragma unroll
      for (int i = 0; i < Width<PARTS>::WIDTH; i++) acc[a][i] = 0.f;
    wait(bars.queries(), item & 1);
    if (group == 1 && x.tiles < 2 && w.lane == 0) arrive(bars.queries_free());
    for (int tile = 0; tile < x.tiles; tile += 2) {
      bool pair = tile + 1 < x.tiles, last = tile + 2 >= x.tiles, later = tile + 3 >= x.tiles;
      if (group == 0) {
        wait(bars.full(0), uses[0] & 1);
        w.score(s, 0);
        products_wait<0>();
        __syncwarp();
        if (last && w.lane == 0) arrive(bars.queries_free());
        w.weigh(s, 0, shrink);
        w.shrink_sums(acc, shrink);
        wait(bars.ready(0), uses[0] & 1);
        w.gather(acc, x, 0);
        w.release(0);
        uses[0]++;
        if (pair) {
          wait(bars.ready(1), uses[1] & 1);
          w.follow(1, shrink);
          w.shrink_sums(acc, shrink);
          w.gather(acc, x, 1);
          w.release(1);
          uses[1]++;
        }
      } else if (pair) {
        wait(bars.full(1), uses[1] & 1);
        w.score(s, 1);
        products_wait<0>();
        __syncwarp();
        if (later && w.lane == 0) arrive(bars.queries_free());
        wait(bars.ready(0), uses[0] & 1);
        w.follow(0, shrink);
        w.shrink_sums(acc, shrink);
        w.gather(acc, x, 0);
        w.weigh(s, 1, shrink);
        w.release(0);
        w.shrink_sums(acc, shrink);
        wait(bars.ready(1), uses[1] & 1);
        w.gather(acc, x, 1);
        w.release(1);
        uses[0]++;
        uses[1]++;
      } else {
        wait(bars.ready(0), uses[0] & 1);
        w.follow(0, shrink);
        w.shrink_sums(acc, shrink);
        w.gather(acc, x, 0);
        w.release(0);
        uses[0]++;
      }
    }
    w.join_totals(item);
    if (c.splits > 1) w.join_shares(acc, x);
    else w.write_out(acc, x);
  }
}

template <int PARTS> __device__ __forceinline__ void attend(const Call& c) {
  extern __shared__ u8 raw[];
  u8* shared = raw + ((1024 - (shared_address(raw) & 1023)) & 1023);
  Barriers bars{shared_address(shared + BARRIERS_AT)};
  if (threadIdx.x == 0) {
    for (int b = 0; b < 2; b++) {
      barrier_init(bars.full(b), 8);
      for (int half = 0; half < 2; half++) barrier_init(bars.free_(b, half), 8);
      barrier_init(bars.ready(b), 4);
    }
    barrier_init(bars.queries(), 8);
    barrier_init(bars.queries_free(), 8);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  int items = c.queries * ((c.heads + 63) / 64) * PARTS * c.splits;
  if (threadIdx.x >= 256) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 64;");
    produce<PARTS>(c, shared, bars, items);
    if (c.splits > 1) {
      cluster_announce();
      cluster_wait();
      cluster_announce();
      cluster_wait();
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 192;");
    consume<PARTS>(c, shared, bars, items);
  }
}
extern "C" __global__ void __launch_bounds__(512, 1) attend_1(const __grid_constant__ Call c) { attend<1>(c); }
extern "C" __global__ void __launch_bounds__(512, 1) attend_2(const __grid_constant__ Call c) { attend<2>(c); }
extern "C" __global__ void __launch_bounds__(512, 1) attend_4(const __grid_constant__ Call c) { attend<4>(c); }
extern "C" __global__ void __launch_bounds__(512, 1) attend_8(const __grid_constant__ Call c) { attend<8>(c); }
