// Many rows through experts of FP4 panels, for Hopper (sm_90a): needs `device/stream.cuh`.
//
// `gather` lays the rows of each expert side by side, in the order that matrix units read. A block then takes 256 outputs (four panels)
// of an expert and up to WIDTH of its rows: one warp brings both by bulk copies, two warpgroups expand codes into the left operand's
// registers and multiply; half a panel is expanded while the half before is multiplied. WIDTH, the most rows of a tile, stands before
// this source. Gate and up leave as quantised hidden rows in the order of `gather`, downs as each choice's output. Knows no layers.

static const int PANELS = 4;    // of a block
static const int STAGES = 4;    // of 128 inputs
static const int MULTIPLY = 8;  // warps
static const int THREADS = 384;
static const int ROWS_BYTES = WIDTH * 256;
static const int STAGE = ROWS_BYTES + PANELS * (CODES + FP4_SCALES);

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
// A block's rows of 128 bytes lie swizzled, eight of them in 1,024 bytes.
__device__ __forceinline__ u32 descriptor(u32 at) { return (at & 0x3FFFF) >> 4; }
__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_end() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT> __device__ __forceinline__ void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}
// Two E4M3 values nearest to the magnitudes (at most 448), ties to even, as numbers.
__device__ __forceinline__ float2 nearest_fp8(float first, float second) {
  unsigned short codes;
  u32 halves;
  float2 out;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(second), "f"(first));
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(codes));
  asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %2;\ncvt.f32.f16 %0, a;\ncvt.f32.f16 %1, b;\n}" : "=f"(out.x), "=f"(out.y) : "r"(halves));
  return out;
}
__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Left operand in registers, rows in shared memory: sums [64, N].
__device__ __forceinline__ void product_32(float (&d)[16], const u32 (&a)[4], u32 b, int keep) {
  asm volatile(
      "{\n.reg .pred p;\n.reg .b64 b;\nsetp.ne.b32 p, %21, 0;\nmov.b64 b, {%20, 0x40000040};\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
      "}, {%16, %17, %18, %19}, b, p, 1, 1, 0;\n}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(keep));
}
__device__ __forceinline__ void product_64(float (&d)[32], const u32 (&a)[4], u32 b, int keep) {
  asm volatile(
      "{\n.reg .pred p;\n.reg .b64 b;\nsetp.ne.b32 p, %37, 0;\nmov.b64 b, {%36, 0x40000040};\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
      "}, {%32, %33, %34, %35}, b, p, 1, 1, 0;\n}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(keep));
}
__device__ __forceinline__ void product_80(float (&d)[40], const u32 (&a)[4], u32 b, int keep) {
  asm volatile(
      "{\n.reg .pred p;\n.reg .b64 b;\nsetp.ne.b32 p, %45, 0;\nmov.b64 b, {%44, 0x40000040};\n"
      "wgmma.mma_async.sync.aligned.m64n80k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39"
      "}, {%40, %41, %42, %43}, b, p, 1, 1, 0;\n}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
        "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(keep));
}
__device__ __forceinline__ void product_96(float (&d)[48], const u32 (&a)[4], u32 b, int keep) {
  asm volatile(
      "{\n.reg .pred p;\n.reg .b64 b;\nsetp.ne.b32 p, %53, 0;\nmov.b64 b, {%52, 0x40000040};\n"
      "wgmma.mma_async.sync.aligned.m64n96k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
      "}, {%48, %49, %50, %51}, b, p, 1, 1, 0;\n}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
        "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
        "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(keep));
}
__device__ __forceinline__ void product_112(float (&d)[56], const u32 (&a)[4], u32 b, int keep) {
  asm volatile(
      "{\n.reg .pred p;\n.reg .b64 b;\nsetp.ne.b32 p, %61, 0;\nmov.b64 b, {%60, 0x40000040};\n"
      "wgmma.mma_async.sync.aligned.m64n112k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55"
      "}, {%56, %57, %58, %59}, b, p, 1, 1, 0;\n}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
        "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
        "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
        "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(keep));
}
__device__ __forceinline__ void product_128(float (&d)[64], const u32 (&a)[4], u32 b, int keep) {
  asm volatile(
      "{\n.reg .pred p;\n.reg .b64 b;\nsetp.ne.b32 p, %69, 0;\nmov.b64 b, {%68, 0x40000040};\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
      "}, {%64, %65, %66, %67}, b, p, 1, 1, 0;\n}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
        "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
        "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
        "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(keep));
}

template <int N> struct Products;
template <> struct Products<32> {
  static __device__ __forceinline__ void add(float (&d)[16], const u32 (&a)[4], u32 b, int keep) { product_32(d, a, b, keep); }
};
template <> struct Products<64> {
  static __device__ __forceinline__ void add(float (&d)[32], const u32 (&a)[4], u32 b, int keep) { product_64(d, a, b, keep); }
};
template <> struct Products<80> {
  static __device__ __forceinline__ void add(float (&d)[40], const u32 (&a)[4], u32 b, int keep) { product_80(d, a, b, keep); }
};
template <> struct Products<96> {
  static __device__ __forceinline__ void add(float (&d)[48], const u32 (&a)[4], u32 b, int keep) { product_96(d, a, b, keep); }
};
template <> struct Products<112> {
  static __device__ __forceinline__ void add(float (&d)[56], const u32 (&a)[4], u32 b, int keep) { product_112(d, a, b, keep); }
};
template <> struct Products<128> {
  static __device__ __forceinline__ void add(float (&d)[64], const u32 (&a)[4], u32 b, int keep) { product_128(d, a, b, keep); }
};

// A panel's part of a stage: a thread's words, and the powers of two of its two outputs.
__device__ __forceinline__ void take_panel(u32 (&words)[8], u32 (&powers)[2], const u8* stage, int panel, int row, int t) {
  const u32* codes = (const u32*)(stage + ROWS_BYTES + panel * CODES);
  const u32* scales = (const u32*)(stage + ROWS_BYTES + PANELS * CODES + panel * FP4_SCALES);
#pragma unroll
  for (int i = 0; i < 8; i++) words[i] = codes[(row + (i & 1) * 8) * 16 + (i >> 1) * 4 + t];
  powers[0] = scales[row] + 0x7E7E7E7E, powers[1] = scales[row + 8] + 0x7E7E7E7E;
}
// Two runs of them, as left operands of four products of 16 inputs in their order.
template <int FIRST> __device__ __forceinline__ void expand_runs(u32 (&a)[4][4], const u32 (&words)[8], const u32 (&powers)[2]) {
#pragma unroll
  for (int i = 0; i < 8; i++) {
    u32 w = words[i], p = powers[i & 1], low, high;
    if (FIRST == 0) low = w & 0x81C081C0u, high = (w << 3) & 0x81C081C0u;
    else low = (w << 6) & 0x81C081C0u, high = ((w >> 4) & 0x00C000C0u) | ((w >> 5) & 0x01000100u) | ((w << 1) & 0x80008000u);
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

// Sums of both panels of a warpgroup.
__device__ __forceinline__ void multiply(float (&sums)[2][WIDTH / 2], const Call& c, u8* raw, u32 full, u32 empty, int& stage, int& parity,
                                         int group, int row, int t, int lane) {
  u32 a[2][4][4], words[8], powers[2];
  int steps = c.inputs / 128, before = 0;
#pragma unroll 1
  for (int step = 0; step < steps; step++) {
    wait(full + 8 * stage, parity);
    const u8* at = raw + stage * STAGE;
    u32 rows = shared_address(at);
#pragma unroll
    for (int p = 0; p < 2; p++) {
      take_panel(words, powers, at, 2 * group + p, row, t);
#pragma unroll
      for (int half = 0; half < 2; half++) {
        if (half) expand_runs<2>(a[1], words, powers);
        else expand_runs<0>(a[0], words, powers);
        products_begin();
#pragma unroll
        for (int k = 0; k < 4; k++)
          Products<WIDTH>::add(sums[p], a[half][k], descriptor(rows + half * (WIDTH * 128) + k * 32), step || half || k);
        products_end();
        // The half before has been multiplied: its registers are free, and after the last one its stage.
        products_wait<1>();
        if (p == 0 && half == 0 && step && lane == 0) arrive(empty + 8 * before);
      }
    }
    before = stage;
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
  products_wait<0>();
  // No sum may be read before this.
#pragma unroll
  for (int i = 0; i < WIDTH; i++) asm volatile("" : "+f"(sums[i / (WIDTH / 2)][i % (WIDTH / 2)])::"memory");
  if (lane == 0) arrive(empty + 8 * before);
}

// Activation, weight and FP8 of gate+up sums; a lane keeps one hidden value of each of two rows of every eight.
__device__ __forceinline__ void leave_hidden(float (&sums)[2][WIDTH / 2], const Call& c, const Item& item, u32* peaks, int group, int warp,
                                             int lane) {
  int g = lane >> 2, t = lane & 3, odd = g & 1, place = odd ? 4 + g / 2 : g / 2;
  float kept[2][WIDTH / 4];
#pragma unroll
  for (int p = 0; p < 2; p++) {
    u32* own = peaks + (group * 2 + p) * 4 * WIDTH;
    // Row g is a gate where g is even, row g + 1 its up: an even lane takes both of the first eight rows, an odd one of the second.
#pragma unroll
    for (int j = 0; j < WIDTH / 8; j++) {
#pragma unroll
      for (int e = 0; e < 2; e++) {
        float low = sums[p][4 * j + e], high = sums[p][4 * j + 2 + e], other = __shfl_xor_sync(0xFFFFFFFF, odd ? low : high, 4);
        float gate = rounded(odd ? other : low), up = rounded(odd ? high : other);
        int column = 8 * j + 2 * t + e, choice = column < item.rows ? c.choice[item.octet * 8 + column] : -1;
        gate = min(gate, c.limit);
        up = up > c.limit ? c.limit : up < -c.limit ? -c.limit : up;
        float weight = choice >= 0 ? __ldg(c.weights + choice) : 0.f;
        float value = rounded(gate * reciprocal(1.f + power2(-1.4426950408889634f * max(gate, -80.f))) * up * weight);
        kept[p][2 * j + e] = value;
        u32 largest = size_of(value);
        largest = max(largest, __shfl_xor_sync(0xFFFFFFFF, largest, 4));
        largest = max(largest, __shfl_xor_sync(0xFFFFFFFF, largest, 8));
        largest = max(largest, __shfl_xor_sync(0xFFFFFFFF, largest, 16));
        if (g == 0) own[(warp & 3) * WIDTH + column] = largest;
      }
    }
  }
  group_barrier(1 + group, 128);
#pragma unroll
  for (int p = 0; p < 2; p++) {
    const u32* own = peaks + (group * 2 + p) * 4 * WIDTH;
    int f = ((item.block * PANELS + group * 2 + p) * 32) + (warp & 3) * 8 + (place & ~1);
#pragma unroll
    for (int j = 0; j < WIDTH / 8; j++) {
      float value[2], scale[2];
#pragma unroll
      for (int e = 0; e < 2; e++) {
        int column = 8 * j + 2 * t + e;
        u32 largest = max(max(own[column], own[WIDTH + column]), max(own[2 * WIDTH + column], own[3 * WIDTH + column]));
        scale[e] = fp8_scale(largest);
        value[e] = kept[p][2 * j + e];
      }
      float2 codes = nearest_fp8(fabsf(value[0]) * power_reciprocal(scale[0]), fabsf(value[1]) * power_reciprocal(scale[1]));
      value[0] = (value[0] < 0.f ? -codes.x : codes.x) * scale[0];
      value[1] = (value[1] < 0.f ? -codes.y : codes.y) * scale[1];
      // Two neighbours in width for one row each, four bytes a store.
      int second = place & 1, column = 8 * j + 2 * t + second;
      float other = __shfl_xor_sync(0xFFFFFFFF, second ? value[0] : value[1], 8);
      u32 pair = second ? bfloat_pair(other, value[1]) : bfloat_pair(value[0], other);
      if (column < item.rows) {
        int at = item.octet * 8 + column, byte = f % 64 * 2;
        *(u32*)(c.hidden + ((i64)(f / 64) * c.octets * 8 + at) * 128 + (((byte >> 4) ^ (at & 7)) << 4) + (byte & 15)) = pair;
      }
    }
  }
  group_barrier(1 + group, 128);
}

__device__ __forceinline__ void leave_each(float (&sums)[2][WIDTH / 2], const Call& c, const Item& item, int group, int warp, int lane) {
  int g = lane >> 2, t = lane & 3, odd = g & 1, outputs = c.panels * 64;
#pragma unroll
  for (int j = 0; j < WIDTH / 8; j++) {
    int column = 8 * j + 2 * t + odd, choice = column < item.rows ? c.choice[item.octet * 8 + column] : -1;
#pragma unroll
    for (int p = 0; p < 2; p++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        // Two neighbouring outputs for one row: an even lane takes the first row's, an odd one the second's.
        float first = sums[p][4 * j + 2 * half], second = sums[p][4 * j + 2 * half + 1];
        float other = __shfl_xor_sync(0xFFFFFFFF, odd ? first : second, 4);
        u32 pair = odd ? bfloat_pair(other, second) : bfloat_pair(first, other);
        int o = (item.block * PANELS + group * 2 + p) * 64 + (warp & 3) * 16 + half * 8 + (g & ~1);
        if (choice >= 0) *(u32*)(c.each + (i64)choice * outputs + o) = pair;
      }
  }
}

template <bool UP> __device__ __forceinline__ void grouped(const Call& c) {
  extern __shared__ u8 raw[];
  int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31, stage = 0, parity = 0;
  u32 full = shared_address(raw + STAGES * STAGE), empty = full + 8 * STAGES;
  u32* peaks = (u32*)(raw + STAGES * STAGE + 16 * STAGES);
  if (thread == 0) {
    for (int s = 0; s < STAGES; s++) barrier_init(full + 8 * s, 1), barrier_init(empty + 8 * s, MULTIPLY);
    barriers_ready();
  }
  __syncthreads();
  Item item;
  if (warp >= MULTIPLY) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (thread != 32 * MULTIPLY) return;
    int chunks = c.inputs / 128, filled = 0;
#pragma unroll 1
    for (int index = blockIdx.x; item_of(item, c, index); index += gridDim.x) {
      i64 panel = (i64)item.expert * c.panels + item.block * PANELS;
#pragma unroll 1
      for (int chunk = 0; chunk < chunks; chunk++) {
        if (filled >= STAGES) wait(empty + 8 * stage, parity ^ 1);
        u8* to = raw + stage * STAGE;
        u32 barrier = full + 8 * stage;
        expect(barrier, STAGE);
#pragma unroll 1
        for (int half = 0; half < 2; half++)
          bulk_copy(to + half * WIDTH * 128, c.laid + ((i64)(2 * chunk + half) * c.octets + item.octet) * 1024, WIDTH * 128, barrier);
#pragma unroll 1
        for (int p = 0; p < PANELS; p++) {
          i64 at = (panel + p) * chunks + chunk;
          bulk_copy(to + ROWS_BYTES + p * CODES, c.codes + at * CODES, CODES, barrier);
          bulk_copy(to + ROWS_BYTES + PANELS * CODES + p * FP4_SCALES, c.scales + at * FP4_SCALES, FP4_SCALES, barrier);
        }
        filled++;
        if (++stage == STAGES) stage = 0, parity ^= 1;
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
#pragma unroll 1
    for (int index = blockIdx.x; item_of(item, c, index); index += gridDim.x) {
      float sums[2][WIDTH / 2];
      int group = warp >> 2, row = (warp & 3) * 16 + (lane >> 2);
      multiply(sums, c, raw, full, empty, stage, parity, group, row, lane & 3, lane);
      if (UP) leave_hidden(sums, c, item, peaks, group, warp, lane);
      else leave_each(sums, c, item, group, warp, lane);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) gate_up(const __grid_constant__ Call c) { grouped<true>(c); }
extern "C" __global__ void __launch_bounds__(THREADS, 1) down(const __grid_constant__ Call c) { grouped<false>(c); }

// A block lays eight rows.
extern "C" __global__ void __launch_bounds__(256) gather(const __grid_constant__ Call c) {
  int octet = blockIdx.x, row = threadIdx.x >> 3 & 7, unit = threadIdx.x & 7;
  int choice = c.choice[octet * 8 + row];
  const uint4* from = (const uint4*)(c.rows + (i64)(choice < 0 ? 0 : choice / c.choices_of_row) * c.inputs) + unit;
#pragma unroll 4
  for (int chunk = threadIdx.x >> 6; chunk < c.inputs / 64; chunk += 4) {
    uint4 value = choice < 0 ? make_uint4(0, 0, 0, 0) : __ldg(from + chunk * 8);
    *(uint4*)(c.laid + (((i64)chunk * c.octets + octet) * 8 + row) * 128 + ((unit ^ row) << 4)) = value;
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
  for (int i = thread; i < c.choices; i += 1024) {
    i64 id = c.ids[i];
    if (id >= 0) atomicAdd(counts + id, 1u);
  }
  __syncthreads();
  u32 rows = thread < c.experts ? counts[thread] : 0, own = (rows + WIDTH - 1) / WIDTH;
  u32 octet = sum_before((rows + 7) / 8, room, octets, thread), tile = sum_before(own, room, tiles, thread);
  if (thread < c.experts) c.begin[thread] = octet;
  if (thread == 0) c.begin[c.experts] = octets, c.tiles[0] = tiles;
  for (u32 j = 0; j < own; j++) {
    c.expert[tile + j] = thread;
    c.octet[tile + j] = octet + j * (WIDTH / 8);
    c.count[tile + j] = min(rows - j * WIDTH, (u32)WIDTH);
  }
}

// A block an expert: its choices in their order, then none up to the next expert's; the last block fills what is left.
extern "C" __global__ void __launch_bounds__(1024) place(const __grid_constant__ Call c) {
  extern __shared__ u8 raw[];
  u32 *room = (u32*)raw, all;
  int thread = threadIdx.x, at = c.begin[blockIdx.x] * 8, stop = (blockIdx.x == c.experts - 1 ? c.octets : c.begin[blockIdx.x + 1]) * 8;
  i64 next = thread < c.choices ? c.ids[thread] : -1;
  for (int first = 0; first < c.choices; first += 1024) {
    int i = first + thread;
    bool mine = next == blockIdx.x;
    if (i + 1024 < c.choices) next = c.ids[i + 1024];
    else next = -1;
    u32 before = sum_before(mine, room, all, thread);
    if (mine) c.choice[at + before] = i;
    at += all;
  }
  for (int i = at + thread; i < stop; i += 1024) c.choice[i] = -1;
}
