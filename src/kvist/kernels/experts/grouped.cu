// Many rows through experts of FP4 panels, for Hopper (sm_90a): needs `device/stream.cuh`.
//
// `gather` lays the rows of each expert side by side, in the order that matrix units read. A block then takes 256 outputs (four panels)
// of an expert and up to WIDTH of its rows: four lanes bring both by bulk copies (one is too slow for that), two or four warpgroups expand codes
// into the left operand's registers and multiply; half a panel is expanded while the half before is multiplied. An expert's tiles are
// about equally full, and products are made for so many rows, in steps of 16. WIDTH, the most rows of a tile, stands before this source.
// Gate and up leave as quantised hidden rows in the order of `gather`, downs as each choice's output. Knows no layers.

static const int PANELS = 4;                    // of a block
static const int STAGES = WIDTH > 64 ? 4 : 5;   // of 128 inputs
static const int LEAST = WIDTH > 64 ? 80 : 32;  // rows that products are made for
// Of few rows expansions are what takes time: more warps, each with fewer sums, wait for each other's instructions.
static const int GROUPS = WIDTH > 64 ? 2 : 4;   // multiplying warpgroups
static const int OWN = PANELS / GROUPS;         // panels of a warpgroup
static const int MULTIPLY = 4 * GROUPS;         // warps
static const int THREADS = 128 * GROUPS + 128;
static const int LAID = 5;                      // units that a thread of `gather` has on their way
static const int ROWS_BYTES = WIDTH * 256;
static const int STAGE = ROWS_BYTES + PANELS * (CODES + FP4_SCALES);
static const int AHEAD = GROUPS == 2 ? 2 : 1;   // half panels' products on their way: of four groups another one expands meanwhile
// Behind the stages and their barriers: of a multiplying warpgroup rows on their way out, 64 values each; of two panels the largest
// sizes of pairs of rows a panel and warp, a row's scale and its reciprocal, and its weight.
static const int OUT_BYTES = WIDTH * 128, PEAK_BYTES = 2 * WIDTH / 2 * 16, FACTOR_BYTES = 2 * WIDTH * 8, WEIGHT_BYTES = WIDTH * 4;
static const int PAIR_BYTES = PEAK_BYTES + FACTOR_BYTES + WEIGHT_BYTES;
static const int BARRIERS = 1024;  // bytes kept for them, so that what follows lies on whole units of a swizzle

struct Call {
  const u16* rows;       // [N, inputs]: what `gather` reads
  u8* laid;              // [inputs / 64, octets, 8 rows, 128 bytes]: units of 16 bytes exchanged by row
  const u8* codes;       // [E, panels, chunks, 4096]
  const u8* scales;
  const i64* ids;        // [N * S] what `count` and `place` read: experts, -1 for none
  int* begin;            // [E + 1] each expert's first octet, and the one behind the last
  int* tiles;            // their number
  int* expert;           // a tile's expert, first octet, rows
  int* octet;
  int* count;
  int* choice;           // [8 octets] a laid row's choice (row * S + slot), -1 for none
  const float* weights;  // [N * S]
  u8* hidden;            // laid, [outputs / 128, octets, 1024]
  u16* each;             // [N * S, outputs]
  int inputs, panels, octets, choices_of_row, choices, experts;
  float limit;
};

// Copies that arrive at a barrier in shared memory, which expects their bytes.
__device__ __forceinline__ void expect(u32 at, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
}
__device__ __forceinline__ void bulk_copy(u8* to, const u8* from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(to)),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}
__device__ __forceinline__ void bulk_store(u8* to, const u8* from, u32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(shared_address(from)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void stores_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// What they read may be written again; they have been written.
__device__ __forceinline__ void stores_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ __forceinline__ void stores_done() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
// Four 8 x 8 tiles of a product's sums, stored by columns: lane 8 i + c gives the address of tile i's column c.
__device__ __forceinline__ void store_columns(u32 at, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}
__device__ __forceinline__ u32 larger_halves(u32 a, u32 b) {
  u32 d;
  asm("max.u16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
// A block's rows of 128 bytes lie swizzled, eight of them in 1,024 bytes.
__device__ __forceinline__ u32 descriptor(u32 at) { return (at & 0x3FFFF) >> 4; }
__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// A product's sums, eight at a time: where they stand in its text, and the numbers that stand there.
#define TEXT_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define TEXT_16 TEXT_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define TEXT_24 TEXT_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define TEXT_32 TEXT_24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define TEXT_40 TEXT_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define TEXT_48 TEXT_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define TEXT_56 TEXT_48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define EIGHT(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define SUMS_8 EIGHT(0)
#define SUMS_16 SUMS_8, EIGHT(8)
#define SUMS_24 SUMS_16, EIGHT(16)
#define SUMS_32 SUMS_24, EIGHT(24)
#define SUMS_40 SUMS_32, EIGHT(32)
#define SUMS_48 SUMS_40, EIGHT(40)
#define SUMS_56 SUMS_48, EIGHT(48)
#define PRODUCT(N, HALF, SECOND, THIRD, FOURTH, RIGHT)                                            \
  template <> struct Products<N> {                                                                \
    static __device__ __forceinline__ void add(float (&d)[N / 2], const u32 (&a)[4], u32 b) {     \
      asm volatile("{\n.reg .b64 b;\nmov.b64 b, {%" #RIGHT ", 0x40000040};\n"                     \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" TEXT_##HALF "}, " \
                   "{%" #HALF ", %" #SECOND ", %" #THIRD ", %" #FOURTH "}, b, 1, 1, 1, 0;\n}\n"   \
                   : SUMS_##HALF                                                                  \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b));                         \
    }                                                                                             \
  };
template <int N> struct Products;
PRODUCT(32, 16, 17, 18, 19, 20)
PRODUCT(48, 24, 25, 26, 27, 28)
PRODUCT(64, 32, 33, 34, 35, 36)
PRODUCT(80, 40, 41, 42, 43, 44)
PRODUCT(96, 48, 49, 50, 51, 52)
PRODUCT(112, 56, 57, 58, 59, 60)
// Left operand in registers, rows in shared memory: sums [64, N].
template <int N> __device__ __forceinline__ void add_product(float (&d)[N / 2], const u32 (&a)[4], u32 b) {
  Products<N>::add(d, a, b);
}

// A panel's part of a stage: a thread's words, and the powers of two of its two outputs.
__device__ __forceinline__ void take_panel(u32 (&words)[8], u32 (&powers)[2], const u8* stage, int panel, int top, int low, int t) {
  const uint4* codes = (const uint4*)(stage + ROWS_BYTES + panel * CODES);
  const u32* scales = (const u32*)(stage + ROWS_BYTES + PANELS * CODES + panel * FP4_SCALES);
  uint4 first = codes[top * 4 + t], second = codes[low * 4 + t];
  words[0] = first.x, words[1] = second.x, words[2] = first.y, words[3] = second.y;
  words[4] = first.z, words[5] = second.z, words[6] = first.w, words[7] = second.w;
  powers[0] = scales[top] + 0x7E7E7E7E, powers[1] = scales[low] + 0x7E7E7E7E;
}
// Two runs of them, as left operands of four products of 16 inputs in their order.
template <int FIRST> __device__ __forceinline__ void expand_runs(u32 (&a)[4][4], const u32 (&words)[8], const u32 (&powers)[2]) {
#pragma unroll
  for (int i = 0; i < 8; i++) {
    u32 w = words[i], p = powers[i & 1], low, high;
    if (FIRST == 0) low = w & 0x81C081C0u, high = (w << 3) & 0x81C081C0u;
    else low = (w << 6) & 0x81C081C0u, high = (((w >> 8) & 0x006C006Cu) * 1057u) & 0x81C081C0u;
    a[i >> 2][i & 3] = times(low, factor_of(p, FIRST));
    a[2 + (i >> 2)][i & 3] = times(high, factor_of(p, FIRST + 1));
  }
}

struct Item {
  int expert, octet, rows, block;  // block: of 256 outputs
};

__device__ __forceinline__ bool item_of(Item& item, const Call& c, int index) {
  // Tiles of an expert come in twos: both read a block's weights at about the same time.
  int blocks = c.panels / PANELS, pair = index / (2 * blocks), within = index % (2 * blocks), tiles = c.tiles[0];
  int pair_tiles = min(2, tiles - 2 * pair), tile = 2 * pair + within % 2;
  if (pair_tiles <= 0) return false;
  if (pair_tiles == 1) {
    if (within >= blocks) return false;
    tile = 2 * pair, item.block = within;
  } else item.block = within / 2;
  item.expert = c.expert[tile], item.octet = c.octet[tile], item.rows = c.count[tile];
  return true;
}

// A stage's place in the ring.
struct StageRing {
  u8* raw;
  u32 full, empty;
  int stage, parity;
  __device__ __forceinline__ void next() {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
};
template <int N> using TileSums = float[OWN][N / 2];

// Sums of all panels of a warpgroup for N rows. Codes are taken from shared memory a half panel ahead of their use.
template <int N>
__device__ __forceinline__ void multiply(TileSums<N>& sums, int steps, StageRing& ring, int group, int top, int low, int lane) {
  u32 a[AHEAD][4][4], words[8], powers[2];
  int before = 0, t = lane & 3;
  wait(ring.full + 8 * ring.stage, ring.parity);
  take_panel(words, powers, ring.raw + ring.stage * STAGE, OWN * group, top, low, t);
#pragma unroll 1
  for (int step = 0; step < steps; step++) {
    const u8* at = ring.raw + ring.stage * STAGE;
    u32 rows = descriptor(shared_address(at));
    int now = ring.stage;
    ring.next();
#pragma unroll
    for (int i = 0; i < 2 * OWN; i++) {
      const int p = i / 2, half = i % 2, own = i % AHEAD;
      if (half) expand_runs<2>(a[own], words, powers);
      else expand_runs<0>(a[own], words, powers);
      products_begin();
#pragma unroll
      for (int k = 0; k < 4; k++)
        add_product<N>(sums[p], a[own][k], rows + (half * (WIDTH * 128) + k * 32) / 16);
      products_end();
      if (half && p + 1 < OWN) take_panel(words, powers, at, OWN * group + p + 1, top, low, t);
      if (i == 2 * OWN - 1 && step + 1 < steps) {
        wait(ring.full + 8 * ring.stage, ring.parity);
        take_panel(words, powers, ring.raw + ring.stage * STAGE, OWN * group, top, low, t);
      }
      products_wait<AHEAD - 1>();
      // The last products of the stage before, or of this one, have ended.
      if (AHEAD == 2 && i == 0 && step && lane == 0) arrive(ring.empty + 8 * before);
      if (AHEAD == 1 && i == 2 * OWN - 1 && lane == 0) arrive(ring.empty + 8 * now);
    }
    before = now;
  }
  products_wait<0>();
  // No sum may be read before this.
#pragma unroll
  for (int i = 0; i < OWN * N / 2; i++) asm volatile("" : "+f"(sums[i / (N / 2)][i % (N / 2)])::"memory");
  if (AHEAD == 2 && lane == 0) arrive(ring.empty + 8 * before);
}
// Which outputs of a panel a thread's two rows of a product are. Of gates and ups a thread has both of a hidden value, so that a
// warp's eight lie side by side as the next product wants them; every other thread has the up first: no bank of memory is asked twice.
template <bool UP> __device__ __forceinline__ int top_of(int warp, int g) {
  return UP ? (g >> 1) * 16 + warp * 4 + (g & 1) * 3 : warp * 16 + g;
}
template <bool UP> __device__ __forceinline__ int low_of_pair(int top, int g) { return UP ? top + 1 - 2 * (g & 1) : top + 8; }

__device__ __forceinline__ float activated(float gate, float up, float limit, float weight) {
  u32 both = bfloat_pair(gate, up);
  gate = min(low_of(both), limit), up = high_of(both);
  up = up > limit ? limit : up < -limit ? -limit : up;
  return gate * reciprocal(1.f + power2(-1.4426950408889634f * max(gate, -80.f))) * up * weight;
}

// Warps of two panels, which make 64 hidden values of a row together, wait for each other.
__device__ __forceinline__ void pair_barrier(int pair) { group_barrier(1 + pair, 256 / OWN); }

// Activation, weight and FP8 of gate+up sums. `rooms`: behind the barriers.
template <int N>
__device__ __forceinline__ void leave_hidden(TileSums<N>& sums, const Call& c, const Item& item, u8* rooms, int group, int warp, int lane) {
  int g = lane >> 2, t = lane & 3, odd = g & 1, thread = warp * 32 + lane, pair = group * OWN / 2, first_panel = group * OWN % 2;
  u8 *room = rooms + pair * OUT_BYTES, *shared = rooms + GROUPS * OUT_BYTES + pair * PAIR_BYTES;
  u32* peaks = (u32*)shared;
  float2* factors = (float2*)(shared + PEAK_BYTES);
  float* weights = (float*)(shared + PEAK_BYTES + FACTOR_BYTES);
  bool leads = first_panel == 0 && thread == 0;
  if (thread < N) {
    int choice = thread < item.rows ? c.choice[item.octet * 8 + thread] : -1;
    weights[thread] = choice >= 0 ? __ldg(c.weights + choice) : 0.f;
  }
  if (leads) stores_read();
  pair_barrier(pair);
  u32 kept[OWN][N / 8];
#pragma unroll
  for (int j = 0; j < N / 8; j++) {
    float2 weight = *(const float2*)(weights + 8 * j + 2 * t);
#pragma unroll
    for (int p = 0; p < OWN; p++) {
      float value[2];
#pragma unroll
      for (int e = 0; e < 2; e++) {
        float first = sums[p][4 * j + e], second = sums[p][4 * j + 2 + e];
        value[e] = activated(odd ? second : first, odd ? first : second, c.limit, e ? weight.y : weight.x);
      }
      u32 pair = bfloat_pair(value[0], value[1]), largest = pair & 0x7FFF7FFFu;
      kept[p][j] = pair;
#pragma unroll
      for (int by = 4; by < 32; by *= 2) largest = larger_halves(largest, __shfl_xor_sync(0xFFFFFFFF, largest, by));
      if (g == 0) peaks[((first_panel + p) * (WIDTH / 2) + 4 * j + t) * 4 + warp] = largest;
    }
  }
  pair_barrier(pair);
  if (thread < N) {
#pragma unroll
    for (int p = 0; p < OWN; p++) {
      uint4 own = *(const uint4*)(peaks + ((first_panel + p) * (WIDTH / 2) + thread / 2) * 4);
      u32 largest = larger_halves(larger_halves(own.x, own.y), larger_halves(own.z, own.w));
      float scale = fp8_scale(thread & 1 ? largest & 0xFFFF0000u : largest << 16);
      factors[(first_panel + p) * WIDTH + thread] = make_float2(scale, power_reciprocal(scale));
    }
  }
  pair_barrier(pair);
  u32 at = shared_address(room) + lane * 128;
#pragma unroll
  for (int p = 0; p < OWN; p++) {
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
      float4 two = *(const float4*)(factors + (first_panel + p) * WIDTH + 8 * j + 2 * t);
      float2 near = nearest_fp8(low_of(kept[p][j]) * two.y, high_of(kept[p][j]) * two.w);
      kept[p][j] = bfloat_pair(near.x * two.x, near.y * two.z);
    }
    u32 unit = (((first_panel + p) * 4 + warp) ^ (lane & 7)) << 4;
#pragma unroll
    for (int j = 0; j < N / 8; j += 4) {
      // Where fewer than four tiles are left, lanes without one point to the first.
      if (j + 4 <= N / 8) store_columns(at + j * 1024 + unit, kept[p][j], kept[p][j + 1], kept[p][j + 2], kept[p][j + 3]);
      else store_columns(at + (j - 2) * 1024 + unit, kept[p][j - 2], kept[p][j - 1], kept[p][j], kept[p][j + 1]);
    }
  }
  barriers_ready();
  pair_barrier(pair);
  if (leads) {
    u8* to = c.hidden + ((i64)(item.block * (PANELS / 2) + pair) * c.octets + item.octet) * 1024;
    bulk_store(to, room, (item.rows + 7) / 8 * 1024);
    stores_commit();
  }
}

template <int N>
__device__ __forceinline__ void leave_each(TileSums<N>& sums, const Call& c, const Item& item, u8* rooms, int group, int warp, int lane) {
  u8* room = rooms + group * OUT_BYTES;
  int thread = warp * 32 + lane, outputs = c.panels * 64, row = thread >> 3, unit = thread & 7;
  u16* to = c.each + (item.block * PANELS + group * OWN) * 64 + unit * 8;
  int choice[N / 16];
#pragma unroll
  for (int i = 0; i < N / 16; i++) choice[i] = row + 16 * i < item.rows ? c.choice[item.octet * 8 + row + 16 * i] : -1;
  u32 at = shared_address(room) + (lane >> 4) * 1024 + (lane & 7) * 128 + (((2 * warp + (lane >> 3 & 1)) ^ (lane & 7)) << 4);
#pragma unroll
  for (int p = 0; p < OWN; p++) {
    group_barrier(1 + group, 128);
#pragma unroll
    for (int j = 0; j < N / 8; j += 2)
      store_columns(at + j * 1024, bfloat_pair(sums[p][4 * j], sums[p][4 * j + 1]), bfloat_pair(sums[p][4 * j + 2], sums[p][4 * j + 3]),
                    bfloat_pair(sums[p][4 * j + 4], sums[p][4 * j + 5]), bfloat_pair(sums[p][4 * j + 6], sums[p][4 * j + 7]));
    group_barrier(1 + group, 128);
#pragma unroll
    for (int i = 0; i < N / 16; i++) {
      uint4 value = *(const uint4*)(room + (row + 16 * i) * 128 + ((unit ^ (row & 7)) << 4));
      if (choice[i] >= 0) *(uint4*)(to + (i64)choice[i] * outputs + p * 64) = value;
    }
  }
}

// A tile of up to N rows, or of more.
template <bool UP, int N = LEAST>
__device__ __forceinline__ void tile(const Call& c, const Item& item, StageRing& ring, u8* rooms, int group, int warp, int lane) {
  if constexpr (N + 16 <= WIDTH) {
    if (item.rows > N) return tile<UP, N + 16>(c, item, ring, rooms, group, warp, lane);
  }
  // Zeros, not products without a sum: what is read before it is written would stay alive, and other tiles have no registers then.
  TileSums<N> sums = {};
  int top = top_of<UP>(warp, lane >> 2), low = low_of_pair<UP>(top, lane >> 2);
  multiply<N>(sums, c.inputs / 128, ring, group, top, low, lane);
  if (UP) leave_hidden<N>(sums, c, item, rooms, group, warp, lane);
  else leave_each<N>(sums, c, item, rooms, group, warp, lane);
}

// A bringing warp's lane: codes of one of the block's panels, and for two of them half of the rows' inputs.
__device__ __forceinline__ void bring(const Call& c, StageRing& ring, int panel) {
  static const int SCALES_AT = ROWS_BYTES + PANELS * CODES;
  int chunks = c.inputs / 128, filled = 0;
  i64 half = (i64)c.octets * 1024;
  Item item;
#pragma unroll 1
  for (int index = blockIdx.x; item_of(item, c, index); index += gridDim.x) {
    i64 first = ((i64)item.expert * c.panels + item.block * PANELS + panel) * chunks;
    const u8 *codes = c.codes + first * CODES, *scales = c.scales + first * FP4_SCALES;
    const u8* rows = c.laid + item.octet * 1024 + panel * half;
    u32 bytes = panel < 2 ? max(LEAST / 16, (item.rows + 15) / 16) * 2048 : 0;
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; chunk++) {
      if (filled >= STAGES) wait(ring.empty + 8 * ring.stage, ring.parity ^ 1);
      else filled++;
      u8* to = ring.raw + ring.stage * STAGE;
      u32 barrier = ring.full + 8 * ring.stage;
      expect(barrier, bytes + CODES + FP4_SCALES);
      if (panel < 2) bulk_copy(to + panel * (WIDTH * 128), rows, bytes, barrier);
      bulk_copy(to + ROWS_BYTES + panel * CODES, codes, CODES, barrier);
      bulk_copy(to + SCALES_AT + panel * FP4_SCALES, scales, FP4_SCALES, barrier);
      rows += 2 * half, codes += CODES, scales += FP4_SCALES;
      ring.next();
    }
  }
}

template <bool UP> __device__ __forceinline__ void grouped(const Call& c) {
  extern __shared__ u8 raw[];
  int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
  u32 full = shared_address(raw + STAGES * STAGE), empty = full + 8 * STAGES;
  StageRing ring = {raw, full, empty, 0, 0};
  if (thread == 0) {
    for (int s = 0; s < STAGES; s++) barrier_init(full + 8 * s, PANELS), barrier_init(empty + 8 * s, MULTIPLY);
    barriers_ready();
  }
  __syncthreads();
  Item item;
  if (warp >= MULTIPLY) {
    if (GROUPS == 2) asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    else asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
    if (lane == 0) bring(c, ring, warp - MULTIPLY);
  } else {
    if (GROUPS == 2) asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    else asm volatile("setmaxnreg.inc.sync.aligned.u32 112;");
    int group = warp >> 2;
    u8* rooms = raw + STAGES * STAGE + BARRIERS;
#pragma unroll 1
    for (int index = blockIdx.x; item_of(item, c, index); index += gridDim.x)
      tile<UP>(c, item, ring, rooms, group, warp & 3, lane);
    if (UP && (thread & 127) == 0) stores_done();
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) gate_up(const __grid_constant__ Call c) { grouped<true>(c); }
extern "C" __global__ void __launch_bounds__(THREADS, 1) down(const __grid_constant__ Call c) { grouped<false>(c); }

// A block lays eight rows. In every 32 inputs those of the bits t1 t0 s h e lie at s h t1 t0 e: a product's thread t finds what it
// multiplies in 16 bytes of a weight's codes. Four threads exchange the words of their four units for that.
extern "C" __global__ void __launch_bounds__(256) gather(const __grid_constant__ Call c) {
  int octet = blockIdx.x, row = threadIdx.x >> 3 & 7, unit = threadIdx.x & 7, odd = unit & 1, high = unit & 2;
  int choice = c.choice[octet * 8 + row];
  const uint4* from = (const uint4*)(c.rows + (i64)(choice < 0 ? 0 : choice / c.choices_of_row) * c.inputs) + unit;
  u8* to = c.laid + (i64)octet * 1024 + row * 128 + ((unit ^ row) << 4);
  int chunks = c.inputs / 64;
#pragma unroll 1
  for (int first = threadIdx.x >> 6; first < chunks; first += 4 * LAID) {
    uint4 v[LAID];
#pragma unroll
    for (int i = 0; i < LAID; i++)
      v[i] = choice < 0 || first + 4 * i >= chunks ? make_uint4(0, 0, 0, 0) : __ldg(from + (first + 4 * i) * 8);
#pragma unroll
    for (int i = 0; i < LAID; i++) {
      uint4 w = v[i];
      u32 a = __shfl_xor_sync(0xFFFFFFFF, odd ? w.x : w.y, 1), b = __shfl_xor_sync(0xFFFFFFFF, odd ? w.z : w.w, 1);
      if (odd) w.x = a, w.z = b;
      else w.y = a, w.w = b;
      a = __shfl_xor_sync(0xFFFFFFFF, high ? w.x : w.z, 2), b = __shfl_xor_sync(0xFFFFFFFF, high ? w.y : w.w, 2);
      if (high) w.x = a, w.y = b;
      else w.z = a, w.w = b;
      if (first + 4 * i < chunks) *(uint4*)(to + (i64)(first + 4 * i) * c.octets * 1024) = w;
    }
  }
}

static const int MOST_EXPERTS = 1024;
// Exclusive sums of a value a thread, over 1,024 threads; `room`: 33 words.
__device__ __forceinline__ u32 sum_before(u32 value, u32* room, u32& all, int thread) {
  u32 sum = value;
#pragma unroll
  for (int by = 1; by < 32; by *= 2) {
    u32 other = __shfl_sync(0xFFFFFFFF, sum, max((thread & 31) - by, 0));
    if ((thread & 31) >= by) sum += other;
  }
  if ((thread & 31) == 31) room[thread >> 5] = sum;
  __syncthreads();
  u32 before = 0;
  all = 0;
  for (int w = 0; w < 32; w++) {
    if (w == thread >> 5) before = all;
    all += room[w];
  }
  __syncthreads();
  return before + sum - value;
}

// One block: how many rows each expert has, where they begin, and its tiles.
extern "C" __global__ void __launch_bounds__(1024) count(const __grid_constant__ Call c) {
  extern __shared__ u8 raw[];
  u32 *counts = (u32*)raw, *room = counts + MOST_EXPERTS, octets, tiles;
  int thread = threadIdx.x;
  counts[thread] = 0;
  __syncthreads();
  for (int first = thread; first < c.choices; first += 8 * 1024) {
    i64 id[8];
#pragma unroll
    for (int i = 0; i < 8; i++) id[i] = first + i * 1024 < c.choices ? c.ids[first + i * 1024] : -1;
#pragma unroll
    for (int i = 0; i < 8; i++)
      if (id[i] >= 0) atomicAdd(counts + id[i], 1u);
  }
  __syncthreads();
  u32 rows = thread < c.experts ? counts[thread] : 0, own = (rows + WIDTH - 1) / WIDTH;
  u32 octet = sum_before((rows + 7) / 8, room, octets, thread), tile = sum_before(own, room, tiles, thread);
  if (thread < c.experts) c.begin[thread] = octet;
  if (thread == 0) c.begin[c.experts] = octets, c.tiles[0] = tiles;
  // An expert's tiles are about equally full, in whole units of 16 rows.
  u32 units = (rows + 15) / 16, each = own ? units / own : 0, more = own ? units % own : 0;
  for (u32 j = 0; j < own; j++) {
    u32 first = j * each + min(j, more);
    c.expert[tile + j] = thread;
    c.octet[tile + j] = octet + 2 * first;
    c.count[tile + j] = min(rows - 16 * first, 16 * (each + (j < more)));
  }
}

// Which of 256 choices from `first` on are an expert's, 32 a word.
__device__ __forceinline__ void chosen(u32 (&words)[8], const Call& c, int first, int stop, int expert, int lane) {
  i64 id[8];
#pragma unroll
  for (int i = 0; i < 8; i++) id[i] = first + i * 32 + lane < stop ? c.ids[first + i * 32 + lane] : -1;
#pragma unroll
  for (int i = 0; i < 8; i++) words[i] = __ballot_sync(0xFFFFFFFF, id[i] == expert);
}

// A block an expert: its choices in their order, then none up to the next expert's; the last block fills what is left. Each warp
// looks at a part of all choices twice: how many of them are the expert's, and where they go.
extern "C" __global__ void __launch_bounds__(1024) place(const __grid_constant__ Call c) {
  extern __shared__ u8 raw[];
  u32* counts = (u32*)raw;
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, expert = blockIdx.x;
  int begin = c.begin[expert] * 8, end = (expert == c.experts - 1 ? c.octets : c.begin[expert + 1]) * 8;
  int part = (c.choices + 8191) / 8192 * 256, from = warp * part, stop = min(from + part, c.choices);
  u32 words[8], own = 0;
#pragma unroll 1
  for (int first = from; first < stop; first += 256) {
    chosen(words, c, first, stop, expert, lane);
#pragma unroll
    for (int i = 0; i < 8; i++) own += __popc(words[i]);
  }
  if (lane == 0) counts[warp] = own;
  __syncthreads();
  u32 at = begin, all = 0;
  for (int w = 0; w < 32; w++) at += w < warp ? counts[w] : 0, all += counts[w];
#pragma unroll 1
  for (int first = from; first < stop; first += 256) {
    chosen(words, c, first, stop, expert, lane);
#pragma unroll
    for (int i = 0; i < 8; i++) {
      if (words[i] >> lane & 1) c.choice[at + __popc(words[i] & ((1u << lane) - 1))] = first + i * 32 + lane;
      at += __popc(words[i]);
    }
  }
  for (int i = begin + all + threadIdx.x; i < end; i += 1024) c.choice[i] = -1;
}
