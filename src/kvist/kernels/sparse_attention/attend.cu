// Joint attention of 64 heads x 512 channels over FP8 window rows and FP4 rows in pages, for Hopper (sm_90a); after
// `stream.cuh` and `rows.cuh`.
//
// A block owns one query, up to 64 of its heads, a share of its tiles of 64 keys and a part of the output channels. Eight warps expand
// packed rows to bfloat16 tiles in shared memory, eight keys each; two warpgroups multiply: the first scores and weighs every tile and sums
// values of fewer channels, the second only sums those of the others. So nothing but a free buffer stands between tiles. A block that
// serves several queries takes neighbours and has their windows last and first in turns: two tiles stay for the next query, of which only
// changed rows are expanded. Shares of a query are a cluster of blocks, which send each other their sums. Every eight channels lie in the
// order 0 4 1 5 2 6 3 7, in which the nibbles of a word come apart. Values are kept times 2^-9, so that a code and its scale need one
// product. Knows no requests and no layers.

static const int MOST_TILES = 10;       // a share
static const int PRODUCERS = 256;       // threads that expand rows
static const int Q_AT = 0, K_AT = 65536, P_AT = 196608, ROWS_AT = 212992;
static const int STATS_AT = ROWS_AT + 2 * MOST_TILES * TILE * 8;
static const int BARRIERS_AT = STATS_AT + 2048;
static const int SINKS_AT = P_AT + 4096;        // where shares are joined, behind their peaks and totals
static const int VALID_AT = BARRIERS_AT + 128;  // which keys of a half tile exist
static const float SLACK = 8.f;         // how far (powers of 2) a score may exceed the peak before sums are scaled again

// Clusters: the first half of their barrier without publishing what was written; other blocks' shared memory.
__device__ __forceinline__ void cluster_announce() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ __forceinline__ u32 address_in(u32 at, int block) {
  u32 there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(block));
  return there;
}
// A run of bytes into another block's shared memory, and as many that this block awaits.
__device__ __forceinline__ void send_run(u32 at, const u8* from, int bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(at),
               "r"(shared_address(from)), "r"(bytes), "r"(barrier)
               : "memory");
}
__device__ __forceinline__ void expect_sent(u32 at, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
}

// Matrix products: A and B are tiles in shared memory, swizzled by 128 bytes.
__device__ __forceinline__ u32 descriptor(u32 at, int leading) { return ((at & 0x3FFFF) >> 4) | ((u32)(leading >> 4) << 16); }

// Operands in lists: `TEN(4)` stands for %40 to %49, `SUMS8(i)` for eight of the sums.
#define TEN(t) "%" #t "0, %" #t "1, %" #t "2, %" #t "3, %" #t "4, %" #t "5, %" #t "6, %" #t "7, %" #t "8, %" #t "9"
#define SIXTEEN TEN() ", %10, %11, %12, %13, %14, %15"
#define THIRTY_TWO TEN() ", " TEN(1) ", " TEN(2) ", %30, %31"
#define SIXTY_FOUR TEN() ", " TEN(1) ", " TEN(2) ", " TEN(3) ", " TEN(4) ", " TEN(5) ", %60, %61, %62, %63"
#define NINETY_SIX \
  TEN() ", " TEN(1) ", " TEN(2) ", " TEN(3) ", " TEN(4) ", " TEN(5) ", " TEN(6) ", " TEN(7) ", " TEN(8) ", %90, %91, %92, %93, %94, %95"
#define SUMS8(i) \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define SUMS32(i) SUMS8(i), SUMS8(i + 8), SUMS8(i + 16), SUMS8(i + 24)

// Heads x keys, 16 channels a step: both sides contiguous in channels.
__device__ __forceinline__ void product_scores(float (&d)[32], u32 a, u32 b, int keep) {
  asm volatile(
      "{\n.reg .pred p;\n.reg .b64 a, b;\nsetp.ne.b32 p, %34, 0;\nmov.b64 a, {%32, " HIGH "};\nmov.b64 b, {%33, " HIGH "};\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" THIRTY_TWO "}, a, b, p, 1, 1, 0, 0;\n}\n"
      : SUMS32(0)
      : "r"(a), "r"(b), "r"(keep));
}

// Heads x channels, 16 keys a step: values are contiguous in channels; probabilities in shared memory, or a thread's own.
__device__ __forceinline__ void values_192(float* d, u32 a, u32 b) {
  asm volatile(
      "{\n.reg .b64 a, b;\nmov.b64 a, {%96, " HIGH "};\nmov.b64 b, {%97, " HIGH "};\n"
      "wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 {" NINETY_SIX "}, a, b, 1, 1, 1, 0, 1;\n}\n"
      : SUMS32(0), SUMS32(32), SUMS32(64)
      : "r"(a), "r"(b));
}
__device__ __forceinline__ void values_128(float* d, u32 a, u32 b) {
  asm volatile(
      "{\n.reg .b64 a, b;\nmov.b64 a, {%64, " HIGH "};\nmov.b64 b, {%65, " HIGH "};\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" SIXTY_FOUR "}, a, b, 1, 1, 1, 0, 1;\n}\n"
      : SUMS32(0), SUMS32(32)
      : "r"(a), "r"(b));
}
__device__ __forceinline__ void values_64(float* d, u32 a, u32 b) {
  asm volatile(
      "{\n.reg .b64 a, b;\nmov.b64 a, {%32, " HIGH "};\nmov.b64 b, {%33, " HIGH "};\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" THIRTY_TWO "}, a, b, 1, 1, 1, 0, 1;\n}\n"
      : SUMS32(0)
      : "r"(a), "r"(b));
}
__device__ __forceinline__ void values_32(float* d, u32 a, u32 b) {
  asm volatile(
      "{\n.reg .b64 a, b;\nmov.b64 a, {%16, " HIGH "};\nmov.b64 b, {%17, " HIGH "};\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {" SIXTEEN "}, a, b, 1, 1, 1, 0, 1;\n}\n"
      : SUMS8(0), SUMS8(8)
      : "r"(a), "r"(b));
}
__device__ __forceinline__ void own_values_192(float* d, const u32* p, u32 b) {
  asm volatile(
      "{\n.reg .b64 b;\nmov.b64 b, {%100, " HIGH "};\n"
      "wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 {" NINETY_SIX "}, {%96, %97, %98, %99}, b, 1, 1, 1, 1;\n}\n"
      : SUMS32(0), SUMS32(32), SUMS32(64)
      : "r"(p[0]), "r"(p[1]), "r"(p[2]), "r"(p[3]), "r"(b));
}
__device__ __forceinline__ void own_values_64(float* d, const u32* p, u32 b) {
  asm volatile(
      "{\n.reg .b64 b;\nmov.b64 b, {%36, " HIGH "};\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" THIRTY_TWO "}, {%32, %33, %34, %35}, b, 1, 1, 1, 1;\n}\n"
      : SUMS32(0)
      : "r"(p[0]), "r"(p[1]), "r"(p[2]), "r"(p[3]), "r"(b));
}
__device__ __forceinline__ void own_values_32(float* d, const u32* p, u32 b) {
  asm volatile(
      "{\n.reg .b64 b;\nmov.b64 b, {%20, " HIGH "};\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {" SIXTEEN "}, {%16, %17, %18, %19}, b, 1, 1, 1, 1;\n}\n"
      : SUMS8(0), SUMS8(8)
      : "r"(p[0]), "r"(p[1]), "r"(p[2]), "r"(p[3]), "r"(b));
}
template <int N> __device__ __forceinline__ void product_values(float* d, u32 a, u32 b) {
  if constexpr (N == 192) values_192(d, a, b);
  else if constexpr (N == 128) values_128(d, a, b);
  else if constexpr (N == 64) values_64(d, a, b);
  else if constexpr (N == 32) values_32(d, a, b);
}
template <int N> __device__ __forceinline__ void product_own(float* d, const u32* p, u32 b) {
  if constexpr (N == 192) own_values_192(d, p, b);
  else if constexpr (N == 64) own_values_64(d, p, b);
  else own_values_32(d, p, b);
}

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

// The same number, computed again wherever it is used: what follows from it costs less than the registers to keep it.
__device__ __forceinline__ int fresh(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// What a block works on.
struct Item {
  int n, head, part, split, first, tiles;  // first: tile number within the query
};
template <int PARTS> __device__ __forceinline__ Item item_of(const Call& c, u32 number) {
  Item x;
  u32 head_tiles = (u32)(c.heads + 63) / 64, splits = c.splits;
  x.split = number % splits;
  number /= splits;
  x.part = number % PARTS;
  number /= PARTS;
  x.head = number % head_tiles * 64;
  x.n = number / head_tiles;
  u32 all = (u32)(c.window_length + TILE - 1) / TILE + (u32)(c.selected + TILE - 1) / TILE;
  x.first = all * x.split / splits;
  x.tiles = all * (x.split + 1) / splits - x.first;
  return x;
}

// A block's items are neighbours, so that successive queries share most of their windows.
__device__ __forceinline__ int first_item(u32 items) { return items * blockIdx.x / gridDim.x; }
__device__ __forceinline__ int last_item(u32 items) { return items * (blockIdx.x + 1) / gridDim.x; }

// Addresses of the barriers: tiles full (buffer) and free (buffer, half), probabilities ready (buffer), queries full and free.
struct Barriers {
  u32 base;
  __device__ u32 full(int b) { return base + 8 * b; }
  __device__ u32 free_(int b, int half) { return base + 32 + 8 * (2 * b + half); }
  __device__ u32 ready(int b) { return base + 64 + 8 * b; }
  __device__ u32 queries() { return base + 80; }
  __device__ u32 queries_free() { return base + 88; }
  __device__ u32 joined() { return base + 112; }
  __device__ u32 summed(int item) { return base + 96 + 8 * (item & 1); }
};

// Queries of an item into shared memory, rotated where a table is given, by 256 threads. A thread has one unit of 8 channels of every
// fourth head, several of them under way; LATER: after the first are, waits for the place to be free.
template <bool LATER> __device__ __forceinline__ void load_queries(const Call& c, const Item& x, u8* shared, int thread, u32 is_free, int parity) {
  const int AHEAD = LATER ? 4 : 8;
  int unit = thread & 63, first = thread >> 6, left = c.heads - x.head - first;
  const u8* from = c.q + ((i64)x.n * c.heads + x.head + first) * CHANNELS * 2 + unit * 16;
  int to = Q_AT + (unit >> 3) * CHUNK + first * 128 + (((unit & 7) ^ first) << 4);
#pragma unroll 1
  for (int i = 0; i < 16; i += AHEAD, from += AHEAD * 4 * CHANNELS * 2, to += AHEAD * 512) {
    uint4 v[AHEAD];
#pragma unroll
    for (int j = 0; j < AHEAD; j++) {
      v[j] = make_uint4(0, 0, 0, 0);
      if (4 * (i + j) < left) v[j] = __ldg((const uint4*)(from + j * 4 * CHANNELS * 2));
    }
    if (LATER && i == 0) wait(is_free, parity);
#pragma unroll
    for (int j = 0; j < AHEAD; j++) *(uint4*)(shared + ((to ^ ((j & 1) << 6)) + j * 512)) = tile_order(v[j]);
  }
  // Few units are rotated: they are read again, so that the code for it stands here once.
  if (unit * 8 + 8 <= CHANNELS - 2 * c.turned) return;
  Turn turn(c, x.n, unit, 1.f);
#pragma unroll 1
  for (int i = 15; i >= 0; i--) {
    to -= 512;
    uint4* at = (uint4*)(shared + (to ^ ((i & 1) << 6)));
    *at = tile_order(turn.of(own_order(*at)));
  }
}

// A producer thread's loads: its part of a warp's 8 FP4 rows (two rows, 16 bytes of codes twice), or of 4 of its FP8 rows.
struct Unit {
  uint4 code[4];
  u32 scale[4];
};

struct Producer {
  const Call& c;
  u8* shared;
  int warp, lane, window_tiles;

  __device__ __forceinline__ uint2* rows(int item) { return (uint2*)(shared + ROWS_AT + (item & 1) * MOST_TILES * TILE * 8); }

  // Where each key of the item lies: (page, row in it) or (0, cell); row ~0: no key. In two steps that wait for nothing: first
  // the ids, then, once they are there, their pages. A thread reads what it copied itself.
  __device__ void ask_ids(const Item& x, int item) {
    uint2* to = rows(item);
    int thread = fresh(warp * 32 + lane), start = (int)c.spans[2 * x.n], stop = (int)c.spans[2 * x.n + 1];
    // From the last on: ids are asked for before it is known where the window lies.
#pragma unroll 1
    for (int i = thread + x.tiles * TILE / PRODUCERS * PRODUCERS; i >= 0; i -= PRODUCERS) {
      int key = x.first * TILE + i, places = window_tiles * TILE, chosen = key - places;
      if (i >= x.tiles * TILE) continue;
      if (chosen >= 0 && chosen < c.selected) copy_word(&to[i].y, c.topk + (i64)x.n * c.selected + chosen);
      else {
        // A row of the window keeps its place in the tiles from query to query.
        int row = start + ((key - start) % places + places) % places;
        to[i].y = chosen < 0 && row < stop ? (u32)row % (u32)c.ring : ~0u;
      }
    }
  }
  __device__ void ask_pages(const Item& x, int item, int slot) {
    uint2* to = rows(item);
    const int* table = c.table + (i64)slot * c.table_width;
    int thread = fresh(warp * 32 + lane);
#pragma unroll 1
    for (int i = thread; i < x.tiles * TILE; i += PRODUCERS) {
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
  // Which of this warp's parts of the window's tiles (2 tile + part) differ from those of the item before.
  __device__ __forceinline__ u32 changed_parts(int item) {
    int row = ((lane >> 3) & 1) * TILE + 8 * warp + (lane & 7);
    u32 rows_changed = __ballot_sync(~0u, rows(item)[row].y != rows(item - 1)[row].y), parts = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) parts |= (rows_changed >> (4 * i) & 15) != 0 ? 1u << i : 0;
    return parts;
  }
  // Rows of 512 bytes, one (r) of the two that a thread has of a part's four: a quarter of a chunk, for chunks four apart.
  __device__ __forceinline__ void load_fp8(Unit& u, int r, const uint2* from, int part, int slot) {
    int lane = fresh(this->lane), q = lane & 3, pair = (lane >> 2) & 1, chunk = lane >> 3;
    const u8* codes = c.window + slot * c.slot_stride + chunk * 64 + q * 16;
    const u8* scales = c.window_scales + slot * c.slot_scale_stride + chunk * 2 + (q >> 1);
    uint2 at = from[8 * warp + 4 * part + 2 * r + pair];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      u.code[2 * r + i] = make_uint4(0, 0, 0, 0);
      u.scale[2 * r + i] = 0;
      if (at.y != ~0u) {
        u.code[2 * r + i] = __ldg((const uint4*)(codes + at.y * c.window_stride + i * 256));
        u.scale[2 * r + i] = __ldg(scales + at.y * c.scale_stride + i * 8);
      }
    }
  }
  __device__ __forceinline__ void store_fp8(const Unit& u, int r, u8* tile, int part) {
    int lane = fresh(this->lane), q = lane & 3, pair = (lane >> 2) & 1, chunk = lane >> 3, row = 8 * warp + 4 * part + 2 * r + pair;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      int k = 2 * r + i;
      u8* to = tile + (chunk + 4 * i) * CHUNK + row * 128;
      u32 f = fp8_factor(u.scale[k]);
      *(uint4*)(to + (((2 * q) ^ (row & 7)) << 4)) = expand_fp8(u.code[k].x, u.code[k].y, f);
      *(uint4*)(to + (((2 * q + 1) ^ (row & 7)) << 4)) = expand_fp8(u.code[k].z, u.code[k].w, f);
    }
  }
  // What is expanded first of a tile; `parts`: of a tile of the window.
  __device__ __forceinline__ void load_first(Unit& u, const uint2* from, bool window, u32 parts, int slot) {
    if (!window) load_fp4(u, from);
    else if (parts & 3) load_fp8(u, 0, from, parts & 1 ? 0 : 1, slot), load_fp8(u, 1, from, parts & 1 ? 0 : 1, slot);
  }
};

template <int PARTS> __device__ __forceinline__ void produce(const Call& c, u8* shared, Barriers bars, int items) {
  int warp = (threadIdx.x >> 5) - 8, lane = threadIdx.x & 31, half = warp >> 2;
  Producer p{c, shared, warp, lane, (c.window_length + TILE - 1) / TILE};
  u32* valid = (u32*)(shared + VALID_AT);
  u32 filled = 0;  // bit b: parity of buffer b's uses
  int item = 0, number = first_item(items), stop = last_item(items);
  Item opening = item_of<PARTS>(c, number);
  int slot = c.slots[opening.n], slot_before = -1;
  // Every other query has its window last: its two tiles stay in the buffers for the next one, which has them first.
  // Layers that have a window alone have nothing to put before it.
  bool kept = c.splits == 1 && p.window_tiles == 2 && opening.tiles > 2 && opening.tiles % 2 == 0;
  p.ask_ids(opening, item);
  p.copies_wait();
  p.ask_pages(opening, item, slot);
  p.copies_wait();
  group_barrier(2, PRODUCERS);
  for (; number < stop; number++, item++) {
    Item x = item_of<PARTS>(c, number);
    int windows = min(max(p.window_tiles - x.first, 0), x.tiles), tile = kept && !(item & 1) ? windows : 0;
    bool more = number + 1 < stop;
    int next_number = more ? number + 1 : number, next_slot = c.slots[item_of<PARTS>(c, fresh(next_number)).n];
    u32 parts = ~0u;  // of the window's tiles that are expanded
    if (kept && (item & 1)) {
      if (slot == slot_before) parts = p.changed_parts(item);
      group_barrier(2, PRODUCERS);  // before the rows of the item before are written over
    }
    const uint2* rows = p.rows(item) + tile * TILE;
    if (item > 0) {
      load_queries<true>(c, x, shared, threadIdx.x - 256, bars.queries_free(), (item - 1) & 1);
      barriers_ready();
      __syncwarp();
      if (lane == 0) arrive(bars.queries());
    }
    Unit unit;
    p.load_first(unit, rows, tile < windows, parts >> (2 * tile), slot);
    if (more) p.ask_ids(item_of<PARTS>(c, fresh(next_number)), item + 1);
    for (int i = 0; i < x.tiles; i++) {
      int b = i & 1;
      u8* to = shared + K_AT + b * 8 * CHUNK;
      wait(bars.free_(b, half), ((filled >> b) & 1) ^ 1);
      filled ^= 1u << b;
      if (tile < windows) {
        u32 these = parts >> (2 * tile);
        // Half a part's registers are loaded again while the other half is expanded.
        if (these & 1) {
#pragma unroll
          for (int r = 0; r < 2; r++) {
            p.store_fp8(unit, r, to, 0);
            if (these & 2) p.load_fp8(unit, r, rows, 1, slot);
          }
        }
        if (these & 2) p.store_fp8(unit, 0, to, 1), p.store_fp8(unit, 1, to, 1);
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
      tile = tile + 1 == x.tiles ? 0 : tile + 1;
      rows = p.rows(item) + tile * TILE;
      if (i + 1 < x.tiles) p.load_first(unit, rows, tile < windows, parts >> (2 * tile), slot);
      if (i == 0 && more) {
        p.copies_wait();
        Item y = item_of<PARTS>(c, fresh(next_number));
        p.ask_pages(y, item + 1, next_slot);
        // Its queries come from memory: 128 bytes at a time.
        int thread = fresh(warp * 32 + lane);
        const u8* far = c.q + ((i64)y.n * c.heads + y.head) * CHANNELS * 2 + thread * 256;
        if (y.head + thread / 4 < c.heads) asm volatile("prefetch.global.L2 [%0];\nprefetch.global.L2 [%0+128];" ::"l"(far));
      }
    }
    p.copies_wait();
    group_barrier(2, PRODUCERS);
    slot_before = slot, slot = next_slot;
  }
}

// The channels of a block's part that the scoring group sums (OWN), and those of the other group (two products).
template <int PARTS> struct Width {
  static const int OWN = PARTS == 1 ? 192 : PARTS == 8 ? 32 : 64;
  static const int FIRST = PARTS == 1 ? 192 : PARTS == 2 ? 192 : PARTS == 4 ? 64 : 32, SECOND = PARTS == 1 ? 128 : 0;
  static const int CHANNELS_HERE = CHANNELS / PARTS;  // of the block
  // Shares are joined in planes of these.
  static const int PLANES = PARTS == 1 ? 2 : 1, WIDE = CHANNELS_HERE / PLANES, PLANE_BYTES = 64 * WIDE * 4;
};

// The best key alone weighs more than 1/2: a sum of 0 means no key (and NaN is not 0). 512 undoes the keys' 2^-9.
__device__ __forceinline__ float share_of_one(float sum, float highest, float sink) {
  return sum == 0.f ? 0.f : 512.f / (sum + power2(sink * LOG2_E - highest));
}

// GROUP 0 scores and weighs every tile, both add up values of their channels.
template <int PARTS, int GROUP> struct Consumer {
  typedef Width<PARTS> W;
  static const int BASE = GROUP ? W::OWN : 0, COUNT = (GROUP ? W::FIRST + W::SECOND : W::OWN) / 2;  // first channel of the part, sums
  typedef float Sums[COUNT];
  const Call& c;
  u8* shared;
  Barriers bars;
  int warp, lane;
  float peak[2], total[2];  // of GROUP 0

  __device__ __forceinline__ float* shrinks(int b) { return (float*)(shared + STATS_AT + 512) + b * 64; }
  __device__ __forceinline__ float* factors(int item) { return (float*)(shared + STATS_AT + 1024) + (item & 1) * 64; }
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

  // Probabilities of the tile in buffer b, for this group in `p`, and shrink factors.
  __device__ __forceinline__ void weigh(float (&s)[32], int b, float (&shrink)[2], u32 (&p)[16]) {
    const u32* valid = (const u32*)(shared + VALID_AT);
    int lane = fresh(this->lane), row = warp * 16 + (lane >> 2), column = 2 * (lane & 3);
    u32 low = valid[2 * b], high = valid[2 * b + 1];
    if ((low & high) != ~0u) {
      low >>= column, high >>= column;
#pragma unroll
      for (int j = 0; j < 8; j++)
#pragma unroll
        for (int k = 0; k < 2; k++)
          if (!((j < 4 ? low : high) & (1u << ((8 * j + k) & 31)))) s[4 * j + k] = s[4 * j + 2 + k] = -__int_as_float(0x7F800000);
    }
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
        p[2 * j + h] = bfloat_pair(p0, p1);
      }
      total[h] = total[h] * shrink[h] + sum;
      if ((lane & 3) == 0) shrinks(b)[row + 8 * h] = shrink[h];
    }
    // Four parts of 8 x 8 at a time: both rows, two neighbours in columns.
    u32 to = shared_address(shared + P_AT + b * CHUNK + (warp * 16 + (lane & 15)) * 128) + (((lane >> 4) ^ (lane & 7)) << 4);
#pragma unroll
    for (int j = 0; j < 8; j += 2) store_rows(to ^ (j << 4), p + 2 * j);
    barriers_ready();
    __syncwarp();
    if (lane == 0) arrive(bars.ready(b));
  }

  __device__ __forceinline__ void follow(int b, float (&shrink)[2]) {
#pragma unroll
    for (int h = 0; h < 2; h++) shrink[h] = shrinks(b)[row() + 8 * h];
  }

  __device__ __forceinline__ void shrink_sums(Sums& acc, const float (&shrink)[2]) {
    if (__all_sync(~0u, shrink[0] == 1.f && shrink[1] == 1.f)) return;
#pragma unroll
    for (int i = 0; i < COUNT; i++) acc[i] *= shrink[(i >> 1) & 1];
  }

  // acc += probabilities x values of the tile in buffer b, this group's channels of the block's.
  __device__ __forceinline__ u32 values_at(const Item& x, int b) {
    int channel = x.part * W::CHANNELS_HERE + BASE;
    return descriptor(shared_address(shared + K_AT + 8 * b * CHUNK + (channel >> 6) * CHUNK + (channel & 63) * 2), CHUNK);
  }
  __device__ __forceinline__ void gather_own(Sums& acc, const u32 (&p)[16], const Item& x, int b) {
    u32 k = values_at(x, b);
    products_begin();
#pragma unroll
    for (int step = 0; step < 4; step++) product_own<W::OWN>(acc, p + 4 * step, k + step * 128);
    products_end();
  }
  __device__ __forceinline__ void gather(Sums& acc, const Item& x, int b) {
    u32 p = descriptor(shared_address(shared + P_AT + b * CHUNK), 16), k = values_at(x, b);
    products_begin();
#pragma unroll
    for (int step = 0; step < 4; step++) {
      product_values<W::FIRST>(acc, p + step * 2, k + step * 128);
      if (W::SECOND) product_values<W::SECOND>(acc + W::FIRST / 2, p + step * 2, k + step * 128 + W::FIRST / 64 * (CHUNK / 16));
      if (step & 1) products_end();
    }
  }
  __device__ __forceinline__ void free_half(int b, int half) {
    __syncwarp();
    if (lane == 0) arrive(bars.free_(b, half));
  }

  // Whole rows' totals.
  __device__ __forceinline__ void join_totals() {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      total[h] += __shfl_xor_sync(~0u, total[h], 1);
      total[h] += __shfl_xor_sync(~0u, total[h], 2);
    }
  }
  __device__ __forceinline__ void ask_sinks(const Item& x, float (&sink)[2]) {
#pragma unroll
    for (int h = 0; h < 2; h++) sink[h] = c.sink[min(x.head + row() + 8 * h, c.heads - 1)];
  }
  // What outputs are multiplied by: the first group tells the other one.
  __device__ __forceinline__ void leave_factors(int item, const float (&sink)[2], float (&by)[2]) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      by[h] = share_of_one(total[h], peak[h], sink[h]);
      if ((lane & 3) == 0) factors(item)[row() + 8 * h] = by[h];
    }
    __syncwarp();
    if (lane == 0) arrive(bars.summed(item));
  }
  __device__ __forceinline__ void take_factors(int item, float (&by)[2]) {
    wait(bars.summed(item), (item >> 1) & 1);
#pragma unroll
    for (int h = 0; h < 2; h++) by[h] = factors(item)[row() + 8 * h];
  }

  // Outputs of a block that had all keys: four lanes exchange words, so that each has 8 channels in a row.
  __device__ __forceinline__ void write_out(Sums& acc, const Item& x, const float (&by)[2]) {
    int q = lane & 3;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      int head = x.head + row() + 8 * h;
      bool real = head < c.heads;
      int first = (x.part * W::CHANNELS_HERE + BASE) / 8 + q;
      u8* to = c.out + ((i64)x.n * c.heads + head) * CHANNELS * 2;
#pragma unroll
      for (int four = 0; four < COUNT / 16; four++) {
        u32 w[4];
#pragma unroll
        for (int g = 0; g < 4; g++) {
          int at = 4 * four + g;
          const float* pair = &acc[4 * at + 2 * h];
          w[g] = bfloat_pair(pair[0] * by[h], pair[1] * by[h]);
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
        if (real) *(uint4*)(to + unit * 16) = v;
      }
    }
    // What is rotated is read again: few channels are, and the code for them would stand at every store.
    const int FOURS = COUNT / 16;  // of units
    int turned = (x.part * W::CHANNELS_HERE + BASE + FOURS * 32 - CHANNELS + 2 * c.turned + 31) / 32;
#pragma unroll 1
    for (int i = 2 * (FOURS - min(max(turned, 0), FOURS)); i < 2 * FOURS; i++) {
      int head = x.head + row() + 8 * (i & 1), unit = (x.part * W::CHANNELS_HERE + BASE) / 8 + q + i / 2 * 4;
      if (head >= c.heads) continue;
      uint4* at = (uint4*)(c.out + ((i64)x.n * c.heads + head) * CHANNELS * 2) + unit;
      *at = Turn(c, x.n, unit, -1.f).of(*at);
    }
  }

  // This share's sums and peaks, where the other blocks' copies find them; units of 8 channels change places within a row.
  __device__ __forceinline__ void leave_share(Sums& acc, const Item& x) {
    group_barrier(1, 256);  // both groups have read what is written over
#pragma unroll
    for (int h = 0; h < 2; h++) {
      int lane = fresh(this->lane), row = warp * 16 + (lane >> 2) + 8 * h;
      if (GROUP == 0 && (lane & 3) == 0) {
        ((float2*)(shared + P_AT))[x.split * 64 + row] = make_float2(peak[h], total[h]);
        ((float*)(shared + SINKS_AT))[row] = c.sink[min(x.head + row, c.heads - 1)];
      }
#pragma unroll
      for (int j = 0; j < COUNT / 4; j++) {
        int unit = BASE / 8 + j, plane = unit / (W::WIDE / 8);
        int at = K_AT + plane * W::PLANE_BYTES + row * W::WIDE * 4 + (((unit % (W::WIDE / 8)) ^ (row & 7)) * 32) + (lane & 3) * 8;
        *(float2*)(shared + at) = make_float2(acc[4 * j + 2 * h], acc[4 * j + 2 * h + 1]);
      }
    }
    barriers_ready();
  }
};

// Joins a cluster's shares by 256 threads: a block sends every other one the heads which that one adds up, where queries were.
template <int PARTS> struct Joining {
  typedef Width<PARTS> W;
  const Call& c;
  u8* shared;
  Barriers bars;
  Item x;

  __device__ __forceinline__ int rows() { return (64 + c.splits - 1) / c.splits; }
  __device__ __forceinline__ int rows_of(int block) { return max(0, min(rows(), 64 - block * rows())); }
  // Planes that come together: as much as there is room for.
  __device__ __forceinline__ int planes() { return c.splits > 2 ? 1 : W::PLANES; }
  __device__ __forceinline__ int received(int share, int at, int plane) {
    return Q_AT + ((share - (share > at)) * planes() + plane % planes()) * rows() * W::WIDE * 4;
  }
  __device__ __forceinline__ void send(int first) {
    int thread = threadIdx.x, own = (planes() * W::WIDE * 4) * rows_of(x.split) + (first ? 0 : 512);
    if (thread == 0) expect_sent(bars.joined(), own * (c.splits - 1));
    if (thread >= c.splits || thread == x.split) return;
    u32 there = address_in(bars.joined(), thread);
    if (first == 0) send_run(address_in(shared_address(shared + P_AT + x.split * 512), thread), shared + P_AT + x.split * 512, 512, there);
    for (int plane = first; plane < first + planes() && rows_of(thread); plane++)
      send_run(address_in(shared_address(shared + received(x.split, thread, plane)), thread),
               shared + K_AT + plane * W::PLANE_BYTES + thread * rows() * W::WIDE * 4, rows_of(thread) * W::WIDE * 4, there);
  }
  // Eight channels of a head from all shares. Peaks are whole numbers, so that scaling what has been summed is exact.
  __device__ __forceinline__ void add_up(int row, int unit, int plane) {
    float highest = NONE, whole = 0.f;
    float4 low = make_float4(0.f, 0.f, 0.f, 0.f), high = low;
    int head = x.split * rows() + row, place = (unit ^ (head & 7)) * 32;
#pragma unroll 4
    for (int s = 0; s < c.splits; s++) {
      int at = s == x.split ? K_AT + plane * W::PLANE_BYTES + head * W::WIDE * 4 : received(s, x.split, plane) + row * W::WIDE * 4;
      float4 a = *(const float4*)(shared + at + place), b = *(const float4*)(shared + at + place + 16);
      float2 stats = ((const float2*)(shared + P_AT))[s * 64 + head];
      float higher = fmaxf(highest, stats.x), before = power2(highest - higher), by = power2(stats.x - higher);
      highest = higher, whole = whole * before + by * stats.y;
      low.x = low.x * before + by * a.x, low.y = low.y * before + by * a.y;
      low.z = low.z * before + by * a.z, low.w = low.w * before + by * a.w;
      high.x = high.x * before + by * b.x, high.y = high.y * before + by * b.y;
      high.z = high.z * before + by * b.z, high.w = high.w * before + by * b.w;
    }
    float by = share_of_one(whole, highest, ((const float*)(shared + SINKS_AT))[head]);
    uint4 v = own_order(make_uint4(bfloat_pair(low.x * by, low.y * by), bfloat_pair(low.z * by, low.w * by),
                                   bfloat_pair(high.x * by, high.y * by), bfloat_pair(high.z * by, high.w * by)));
    unit += (x.part * W::CHANNELS_HERE + plane * W::WIDE) / 8;
    if (unit * 8 + 8 > CHANNELS - 2 * c.turned) v = Turn(c, x.n, unit, -1.f).of(v);
    ((uint4*)(c.out + ((i64)x.n * c.heads + x.head + head) * CHANNELS * 2))[unit] = v;
  }
  __device__ __forceinline__ void join() {
    const int UNITS = W::WIDE / 8;
    group_barrier(1, 256);
    cluster_announce();
    cluster_wait();  // all shares lie there, and no queries are read any more
    int heads = max(0, min(rows_of(x.split), c.heads - x.head - x.split * rows()));
#pragma unroll 1
    for (int first = 0; first < W::PLANES; first += planes()) {
      send(first);
      wait(bars.joined(), first & 1);
#pragma unroll 2
      for (int i = threadIdx.x; i < heads * UNITS * planes(); i += 256) {
        int row = i / UNITS;
        add_up(row < heads ? row : row - heads, i % UNITS, first + (row < heads ? 0 : 1));
      }
      cluster_announce();
      cluster_wait();  // nobody reads this block's memory any more, and there is room for the next plane
    }
  }
  // The other threads of a block.
  __device__ __forceinline__ void look_on() {
    cluster_announce();
    cluster_wait();
#pragma unroll 1
    for (int first = 0; first < W::PLANES; first += planes()) {
      cluster_announce();
      cluster_wait();
    }
  }
};

template <int PARTS> __device__ __forceinline__ void first_queries(const Call& c, u8* shared, Barriers bars, int items) {
  // The first queries are fetched here, where nothing else is to be done; producers fetch the later ones.
  load_queries<false>(c, item_of<PARTS>(c, first_item(items)), shared, threadIdx.x, 0, 0);
  barriers_ready();
  __syncwarp();
  if ((threadIdx.x & 31) == 0) arrive(bars.queries());
}

template <int PARTS> __device__ __forceinline__ void score_and_sum(const Call& c, u8* shared, Barriers bars, int items) {
  Consumer<PARTS, 0> w{c, shared, bars, (int)(threadIdx.x >> 5) & 3, (int)threadIdx.x & 31};
  u32 used = 0;  // bit b: parity of buffer b's uses
  int item = 0;
  typename Consumer<PARTS, 0>::Sums acc;
  float s[32], shrink[2], sink[2], by[2];
  u32 p[16];
  for (int number = first_item(items), stop = last_item(items); number < stop; number++, item++) {
    Item x = item_of<PARTS>(c, number);
    w.peak[0] = w.peak[1] = NONE;
    w.total[0] = w.total[1] = 0.f;
    // Sums that began with a product that ignores them would count as used before it.
#pragma unroll
    for (int i = 0; i < Consumer<PARTS, 0>::COUNT; i++) acc[i] = 0.f;
    wait(bars.queries(), item & 1);
#pragma unroll 1
    for (int tile = 0; tile < x.tiles; tile++) {
      int b = tile & 1;
      wait(bars.full(b), (used >> b) & 1);
      used ^= 1u << b;
      w.score(s, b);
      products_wait<0>();
      __syncwarp();
      if (tile + 1 == x.tiles && w.lane == 0) arrive(bars.queries_free());
      w.weigh(s, b, shrink, p);
      w.shrink_sums(acc, shrink);
      w.gather_own(acc, p, x, b);
      products_wait<0>();
      w.free_half(b, 0), w.free_half(b, 1);
    }
    w.ask_sinks(x, sink);
    w.join_totals();
    if (c.splits > 1) {
      w.leave_share(acc, x);
    } else {
      w.leave_factors(item, sink, by);
      w.write_out(acc, x, by);
    }
  }
}

template <int PARTS> __device__ __forceinline__ void sum(const Call& c, u8* shared, Barriers bars, int items) {
  Consumer<PARTS, 1> w{c, shared, bars, (int)(threadIdx.x >> 5) & 3, (int)threadIdx.x & 31};
  u32 used = 0;
  int item = 0;
  typename Consumer<PARTS, 1>::Sums acc;
  float shrink[2], by[2];
  for (int number = first_item(items), stop = last_item(items); number < stop; number++, item++) {
    Item x = item_of<PARTS>(c, number);
#pragma unroll
    for (int i = 0; i < Consumer<PARTS, 1>::COUNT; i++) acc[i] = 0.f;
#pragma unroll 1
    for (int tile = 0; tile < x.tiles; tile++) {
      int b = tile & 1;
      wait(bars.ready(b), (used >> b) & 1);
      used ^= 1u << b;
      w.follow(b, shrink);
      w.shrink_sums(acc, shrink);
      w.gather(acc, x, b);
      products_wait<1>();
      w.free_half(b, 0);
      products_wait<0>();
      w.free_half(b, 1);
    }
    if (c.splits > 1) {
      w.leave_share(acc, x);
    } else {
      w.take_factors(item, by);
      w.write_out(acc, x, by);
    }
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
    barrier_init(bars.queries_free(), 4);
    barrier_init(bars.joined(), 1);
    for (int item = 0; item < 2; item++) barrier_init(bars.summed(item), 4);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  int items = c.queries * ((c.heads + 63) / 64) * PARTS * c.splits;
  if (threadIdx.x >= 256) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 64;");
    produce<PARTS>(c, shared, bars, items);
    if (c.splits > 1) Joining<PARTS>{c, shared, bars, item_of<PARTS>(c, blockIdx.x)}.look_on();
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 192;");
    first_queries<PARTS>(c, shared, bars, items);
    if (threadIdx.x < 128) score_and_sum<PARTS>(c, shared, bars, items);
    else sum<PARTS>(c, shared, bars, items);
    if (c.splits > 1) Joining<PARTS>{c, shared, bars, item_of<PARTS>(c, blockIdx.x)}.join();
  }
}
extern "C" __global__ void __launch_bounds__(512, 1) attend_1(const __grid_constant__ Call c) { attend<1>(c); }
extern "C" __global__ void __launch_bounds__(512, 1) attend_2(const __grid_constant__ Call c) { attend<2>(c); }
extern "C" __global__ void __launch_bounds__(512, 1) attend_4(const __grid_constant__ Call c) { attend<4>(c); }
extern "C" __global__ void __launch_bounds__(512, 1) attend_8(const __grid_constant__ Call c) { attend<8>(c); }
