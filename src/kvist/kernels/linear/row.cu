// One row times an FP8 weight of 32 x 32 scales, for Hopper (sm_90a): needs `device/stream.cuh` and `hyper_connections/collapse.cuh`.
//
// Every block takes an equal run of chunks, panel after panel; its warps take them in turn and their sums are added in their order.
// Panels that blocks share are left as parts, which whoever reads them adds in their order: bits never depend on timing. What stands
// before the product (norm, quantiser, sum of parts) is done by every block for itself. Knows no layers.

static const int WARPS = 8;  // of a block
static const int STAGES = 5;
static const int THREADS = 32 * WARPS;  // as many as norm and quantise a row
static const int PART_STEPS = 2;  // of 1,024 inputs, where inputs are parts of sums
static const int ROW_STEPS = 2;   // of 4,096 inputs, where they are whole
static const int TOGETHER = 6;    // parts of a step that are read at once

struct Call {
  const u8* codes;     // panels [P, chunks, 4096]
  const u32* scales;   // [P, chunks]
  const u16* row;      // inputs, bfloat16
  const float* parts;  // or parts of inputs [parts, in_width]
  const float* norm;   // weights of the norm of `parts`
  u16* out;            // [64 P], or null:
  float* out_parts;    // [parts, 64 P]
  u16* rank;           // the quantised inputs that parts became, or null
  // What lies behind the rank in `parts` and becomes a window entry.
  const float* entry_norm;
  const float* cosines;  // [pairs]
  const float* sines;
  u8* entry_codes;       // the ring of all slots
  u8* entry_scales;
  const int* slot;
  const i64* cell;
  Streams streams;
  i64 code_slot, code_cell, scale_slot, scale_cell;
  int inputs, panels, chunks, share, blocks, groups, in_width, in_chunks, in_share, entry_width, pairs, quantise, ahead;
  float eps;
};

enum { ROW, QUANTISED, PARTS, STREAMS };

__device__ __forceinline__ void copy_scales(u32* to, const u32* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(to)), "l"(from) : "memory");
}
// A warp's chunks on their way. Stages of all warps lie in turn: a block of few chunks needs room for those alone.
template <int STAGES> struct Chunks {
  u8* data;
  int stage, next;
  __device__ __forceinline__ void open(u8* room, int warp) { data = room + warp * CODES, stage = next = 0; }
  // Begins to read a chunk, or nothing where there is none: every turn counts. All stages may be on their way; one is filled again
  // when its chunk has been multiplied by all lanes.
  __device__ __forceinline__ void fill(bool there, const u8* codes, int lane) {
    u32 to = own_address(data + next * (WARPS * CODES)) + lane * 16;
    if (there) copy_chunk(to, codes + lane * 16);
    copies_commit();
    if (++next == STAGES) next = 0;
  }
  __device__ __forceinline__ const u8* arrived() {
    copies_wait<STAGES - 1>();
    __syncwarp();
    const u8* at = data + stage * (WARPS * CODES);
    if (++stage == STAGES) stage = 0;
    return at;
  }
};

__device__ __forceinline__ float whole_of(const float* parts, int at, int width, int chunks, int share) {
  int panel = at / 64, first = panel * chunks / share, last = (panel * chunks + chunks - 1) / share;
  float sum = 0.f;
  for (int part = 0; part <= last - first; part++) sum += parts[(i64)part * width + at];
  return rounded(sum);
}

// Two E4M3 codes, of a word's lower or upper half, as a pair of halves: exact.
__device__ __forceinline__ u32 lower_codes(u32 w) {
  u32 d;
  asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %1;\ncvt.rn.f16x2.e4m3x2 %0, a;\n}" : "=r"(d) : "r"(w));
  return d;
}
__device__ __forceinline__ u32 upper_codes(u32 w) {
  u32 d;
  asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %1;\ncvt.rn.f16x2.e4m3x2 %0, b;\n}" : "=r"(d) : "r"(w));
  return d;
}
__device__ __forceinline__ u32 half_pair(float low, float high) {
  u32 d;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}
__device__ __forceinline__ void halves_begin(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(0.f));
}
__device__ __forceinline__ void halves_add(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Sixteen inputs of a thread, whose neighbour has the others of a group of 32, as halves and what these are to be multiplied by:
// quantised to FP8, or bfloat16 values times a power of two, exact down to 2^-30 of the group's largest.
template <bool QUANTISE> __device__ __forceinline__ float halve_sixteen(u32 (&v)[8]) {
  u32 largest = 0;
#pragma unroll
  for (int i = 0; i < 8; i++) largest = max(largest, max(v[i] << 16 & 0x7FFFFFFFu, v[i] & 0x7FFF0000u));
  largest = max(largest, __shfl_xor_sync(0xFFFFFFFF, largest, 1));
  u32 exponent = max(largest >> 23, 27u);
  float scale = QUANTISE ? fp8_scale(largest) : __uint_as_float((exponent - 13) << 23);
  float back = QUANTISE ? power_reciprocal(scale) : __uint_as_float((267 - exponent) << 23);
#pragma unroll
  for (int i = 0; i < 8; i++) {
    float low = low_of(v[i]) * back, high = high_of(v[i]) * back;
    v[i] = QUANTISE ? nearest_halves(low, high) : half_pair(low, high);
  }
  return scale;
}

// A panel's 64 sums of a warp: outputs 16 m + g and 8 more lie in lanes 4 g, at [m][0] and [m][1].
typedef float PanelSums[4][2];
// How a lane makes right operands of a word of inputs: the first 32 of a chunk in column 0, the others in column 1.
struct Columns {
  u32 low, high;
  __device__ __forceinline__ Columns(int lane) {
    low = lane < 4 ? 0x4410 : lane < 8 ? 0x1044 : 0x4444, high = lane < 4 ? 0x4432 : lane < 8 ? 0x3244 : 0x4444;
  }
};
__device__ __forceinline__ float power_of(u32 e8m0) { return __uint_as_float(max((e8m0 & 255) << 23, 0x400000u)); }
// Adds a chunk: codes of both runs of 32 inputs lie side by side, so that each is a column of its own and a scale multiplies 32 products.
__device__ __forceinline__ void add_chunk(PanelSums& sums, const u8* codes, u32 exponents, const u8* x, const float* scales, Columns pick, int lane) {
  int g = lane >> 2, t = lane & 3;
  uint4 in = shared_words(x + (g & 1) * 64 + t * 16);
  u32 words[4] = {in.x, in.y, in.z, in.w};
  float2 of_runs = *(const float2*)scales;
#pragma unroll
  for (int m = 0; m < 4; m += 2) {
    float first = power_of(exponents >> (8 * m)) * of_runs.x, second = power_of(exponents >> (8 * m + 8)) * of_runs.y;
    u32 top[2][4], low[2][4];
    float d[2][4];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const u8* at = codes + ((m + i) * 16 + g) * 64 + t * 16;
      *(uint4*)top[i] = shared_words(at), *(uint4*)low[i] = shared_words(at + 512);
    }
#pragma unroll
    for (int k = 0; k < 4; k++) {
      u32 b0 = __byte_perm(words[k], 0, pick.low), b1 = __byte_perm(words[k], 0, pick.high);
#pragma unroll
      for (int i = 0; i < 2; i++) {
        u32 a[4] = {lower_codes(top[i][k]), lower_codes(low[i][k]), upper_codes(top[i][k]), upper_codes(low[i][k])};
        if (k) halves_add(d[i], a[0], a[1], a[2], a[3], b0, b1);
        else halves_begin(d[i], a[0], a[1], a[2], a[3], b0, b1);
      }
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
      sums[m + i][0] = fmaf(d[i][1], second, fmaf(d[i][0], first, sums[m + i][0]));
      sums[m + i][1] = fmaf(d[i][3], second, fmaf(d[i][2], first, sums[m + i][1]));
    }
  }
}

// The sum over the threads of a row, on all of them. `room`: 8 floats.
__device__ __forceinline__ float row_sum(float x, float* room, int thread) {
  x = warp_sum(x);
  if ((thread & 31) == 0) room[thread >> 5] = x;
  group_barrier(1, ROW_THREADS);
  float total = 0.f;
  for (int w = 0; w < 8; w++) total += room[w];
  return total;
}

__device__ __forceinline__ void add_four(float4& sum, float4 x) { sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w; }

template <class Behind>
__device__ __forceinline__ void inputs_from_parts(const Call& c, const float4 (&norm)[PART_STEPS], u8* x, float* scales, float* room, int thread, bool write,
                                                  const Behind& behind) {
  float v[PART_STEPS][4], squares = 0.f;
  float4 own[PART_STEPS][TOGETHER];
  int parts[PART_STEPS];
#pragma unroll
  for (int i = 0; i < PART_STEPS; i++) {
    int at = 4 * (thread + ROW_THREADS * i), panel = at / 64;
    parts[i] = at < c.inputs ? (panel * c.in_chunks + c.in_chunks - 1) / c.in_share - panel * c.in_chunks / c.in_share + 1 : 0;
#pragma unroll
    for (int j = 0; j < TOGETHER; j++)
      if (j < parts[i]) own[i][j] = *(const float4*)(c.parts + (i64)j * c.in_width + at);
  }
  behind();
#pragma unroll
  for (int i = 0; i < PART_STEPS; i++) {
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int j = 0; j < TOGETHER; j++)
      if (j < parts[i]) add_four(sum, own[i][j]);
#pragma unroll 1
    for (int j = TOGETHER; j < parts[i]; j++) add_four(sum, *(const float4*)(c.parts + (i64)j * c.in_width + 4 * (thread + ROW_THREADS * i)));
    v[i][0] = rounded(sum.x), v[i][1] = rounded(sum.y), v[i][2] = rounded(sum.z), v[i][3] = rounded(sum.w);
#pragma unroll
    for (int e = 0; e < 4; e++) squares += v[i][e] * v[i][e];
  }
  float factor = 1.f / sqrtf(row_sum(squares, room, thread) / c.inputs + c.eps);
#pragma unroll
  for (int i = 0; i < PART_STEPS; i++) {
    int at = 4 * (thread + ROW_THREADS * i);
    v[i][0] = rounded(v[i][0] * factor * norm[i].x), v[i][1] = rounded(v[i][1] * factor * norm[i].y);
    v[i][2] = rounded(v[i][2] * factor * norm[i].z), v[i][3] = rounded(v[i][3] * factor * norm[i].w);
    float scale = scale_of_group(v[i]);
    if (at >= c.inputs) continue;
    *(uint2*)(x + 2 * at) = halves_of_four(v[i], scale);
    if ((thread & 7) == 0) scales[at / 32] = scale;
    if (write) *(uint2*)(c.rank + at) = quantised_four(v[i], scale);
  }
}

// Norm, rotation, FP8: one window entry, two channels a thread.
__device__ __forceinline__ void write_entry(const Call& c, float* room, int thread) {
  int d = 2 * thread, at = c.inputs + d;
  bool there = d < c.entry_width;
  float v[2] = {0.f, 0.f}, w[2] = {0.f, 0.f}, cosine = 1.f, sine = 0.f;
  int pair = thread - (c.entry_width / 2 - c.pairs);
  if (there) {
    for (int e = 0; e < 2; e++) w[e] = __ldg(c.entry_norm + d + e), v[e] = whole_of(c.parts, at + e, c.in_width, c.in_chunks, c.in_share);
    if (pair >= 0) cosine = c.cosines[pair], sine = c.sines[pair];
  }
  float factor = 1.f / sqrtf(row_sum(v[0] * v[0] + v[1] * v[1], room, thread) / c.entry_width + c.eps);
  float even = rounded(v[0] * factor * w[0]), odd = rounded(v[1] * factor * w[1]);
  if (pair >= 0) {
    float turned = rounded(even * cosine - odd * sine);
    odd = rounded(even * sine + odd * cosine);
    even = turned;
  }
  u32 largest = max(size_of(even), size_of(odd));
#pragma unroll
  for (int by = 8; by; by >>= 1) largest = max(largest, __shfl_xor_sync(0xFFFFFFFF, largest, by));
  if (!there) return;
  float scale = fp8_scale(largest), back = power_reciprocal(scale);
  u32 low, high;
  e4m3_value(fabsf(even) * back, low);
  e4m3_value(fabsf(odd) * back, high);
  low |= (__float_as_uint(even) >> 24) & 0x80, high |= (__float_as_uint(odd) >> 24) & 0x80;
  i64 slot = c.slot[0], cell = c.cell[0];
  *(u16*)(c.entry_codes + slot * c.code_slot + cell * c.code_cell + d) = (u16)(low | high << 8);
  if ((thread & 15) == 0)
    c.entry_scales[slot * c.scale_slot + cell * c.scale_cell + d / 32] = (u8)(__float_as_uint(scale) >> 23);
}

// What stands before the product, by the threads of a row; `behind` is called when its loads are on their way. False where the block's
// work ends with it.
template <int KIND, class Behind>
__device__ __forceinline__ bool take_inputs(const Call& c, const float4 (&norm)[PART_STEPS], u8* x, float* scales, float* room, int first, int thread,
                                            bool streams, const Behind& behind) {
  if (KIND == STREAMS) {
    float4 w[D_STEPS];
    norm_weights(w, c.streams, thread);
    wait_for_launch();
    float one[D_STEPS][4];
    norm_row(one, x, w, c.streams, thread, !streams, true, scales);
    return streams;
  }
  if (KIND == PARTS) {
    wait_for_launch();
    if (blockIdx.x == c.blocks + 1) {
      write_entry(c, room, thread);
      return false;
    }
    // Nobody needs the coefficients before the next pass: here they are made beside the longest product.
    if (blockIdx.x == c.blocks + 2) {
      part_sums(c.streams, room + (thread >> 5) * 32, thread >> 5, 8, thread & 31);
      group_barrier(1, ROW_THREADS);
      if (thread < 32) coefficients(c.streams, room, 8, thread);
      return false;
    }
    inputs_from_parts(c, norm, x, scales, room, thread, !streams, behind);
    return streams;
  }
  wait_for_launch();
  const u16* row = c.row + (i64)(first / c.chunks / (c.panels / c.groups)) * c.inputs;
  u32 v[ROW_STEPS][8];
#pragma unroll
  for (int i = 0; i < ROW_STEPS; i++) {
    int at = 16 * (thread + ROW_THREADS * i);
#pragma unroll
    for (int h = 0; h < 2; h++) *(uint4*)(v[i] + 4 * h) = at < c.inputs ? *(const uint4*)(row + at + 8 * h) : make_uint4(0, 0, 0, 0);
  }
  behind();
#pragma unroll
  for (int i = 0; i < ROW_STEPS; i++) {
    int at = 16 * (thread + ROW_THREADS * i);
    float scale = halve_sixteen<KIND == QUANTISED>(v[i]);
    if (at >= c.inputs) continue;
#pragma unroll
    for (int h = 0; h < 2; h++) *(uint4*)(x + 2 * at + 16 * h) = *(const uint4*)(v[i] + 4 * h);
    if ((thread & 1) == 0) scales[at / 32] = scale;
  }
  return true;
}

template <int KIND> __device__ __forceinline__ void row_product(const Call& c) {
  extern __shared__ u8 raw[];
  int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31, block = blockIdx.x;
  u8* x = raw + min(STAGES * WARPS, c.share) * CODES;
  float* scales = (float*)(x + 2 * c.inputs);  // of 32 inputs
  float* room = scales + c.inputs / 32;
  float* sums_of_warps = room + 256;
  int first = block * c.share, end = min(first + c.share, c.panels * c.chunks);
  bool streams = block < c.blocks;
  if (!streams) first = end = 0;
  int panel = first / c.chunks, slots = first < end ? (end - 1) / c.chunks - panel + 1 : 0;
  u32* table = (u32*)(sums_of_warps + slots * WARPS * 64);
  // What is small comes first: behind a ring's chunks it would wait for all of them.
#pragma unroll 1
  for (int i = thread; i < end - first; i += THREADS) copy_scales(table + i, c.scales + first + i);
  copies_commit();
  float4 norm[PART_STEPS] = {};
  if (KIND == PARTS)
#pragma unroll
    for (int i = 0; i < PART_STEPS; i++) {
      int at = 4 * (thread + ROW_THREADS * i);
      if (at < c.inputs) norm[i] = __ldg((const float4*)(c.norm + at));
    }
  Chunks<STAGES> ring;
  ring.open(raw, warp);
  int unit = first + warp, next = unit;
  Columns columns(lane);
#pragma unroll 1
  for (int s = 0; s < c.ahead; s++, next += WARPS) ring.fill(next < end, c.codes + (i64)next * CODES, lane);
  if (KIND != STREAMS) let_next();
  auto behind = [&] {
#pragma unroll 1
    for (int s = c.ahead; s < STAGES; s++, next += WARPS) ring.fill(next < end, c.codes + (i64)next * CODES, lane);
  };
  if (!take_inputs<KIND>(c, norm, x, scales, room, first, thread, streams, behind)) return;
  copies_wait<STAGES>();
  __syncthreads();

#pragma unroll 1
  for (int slot = 0; slot < slots; slot++, panel++) {
    int stop = min(end, (panel + 1) * c.chunks);
    PanelSums sums = {};
#pragma unroll 1
    for (; unit < stop; unit += WARPS, next += WARPS) {
      const u8* chunk = ring.arrived();
      int place = unit - panel * c.chunks;
      add_chunk(sums, chunk, table[unit - first], x + place * 128, scales + place * 2, columns, lane);
      __syncwarp();
      ring.fill(next < end, c.codes + (i64)next * CODES, lane);
    }
    float* mine = sums_of_warps + (slot * WARPS + warp) * 64 + (lane >> 2);
    if ((lane & 3) == 0)
#pragma unroll
      for (int m = 0; m < 4; m++) mine[m * 16] = sums[m][0], mine[m * 16 + 8] = sums[m][1];
  }
  __syncthreads();
  for (int i = thread; i < slots * 64; i += 32 * WARPS) {
    float total = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) total += sums_of_warps[((i / 64) * WARPS + w) * 64 + i % 64];
    int p = first / c.chunks + i / 64, at = p * 64 + i % 64;
    if (c.out) {
      total = rounded(total);
      // A warp's 32 outputs are a group of the next product's inputs.
      if (c.quantise) total = fake_fp8(total, fp8_scale(warp_max(size_of(total))));
      c.out[at] = (u16)bfloat_pair(total, 0.f);
    }
    else c.out_parts[(i64)(block - p * c.chunks / c.share) * c.panels * 64 + at] = total;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) from_row(const __grid_constant__ Call c) { row_product<ROW>(c); }
extern "C" __global__ void __launch_bounds__(THREADS, 2) from_row_quantised(const __grid_constant__ Call c) {
  row_product<QUANTISED>(c);
}
extern "C" __global__ void __launch_bounds__(THREADS, 2) from_parts(const __grid_constant__ Call c) { row_product<PARTS>(c); }
extern "C" __global__ void __launch_bounds__(THREADS, 2) from_streams(const __grid_constant__ Call c) { row_product<STREAMS>(c); }
