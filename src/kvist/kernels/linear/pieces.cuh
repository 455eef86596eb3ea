// What kernels of one row (`row.cu`) and of several (`rows.cu`) share, for Hopper (sm_90a): their call, chunks on their way, FP8 codes and
// inputs as halves, sums of parts normed, window entries. Needs `device/stream.cuh` and `hyper_connections/collapse.cuh`. Knows no layers.

static const int WARPS = 8;  // of a block
static const int THREADS = 32 * WARPS;  // as many as norm and quantise a row
static const int PART_STEPS = 2;  // of 1,024 inputs, where inputs are parts of sums
static const int TOGETHER = 6;  // parts of a step that are read at once

struct Call {
  const u8* codes;     // panels [P, chunks, 4096]
  const u32* scales;   // [P, chunks]
  const u16* rows;     // inputs [N, groups * inputs], bfloat16
  const float* parts;  // or parts of inputs [parts, N, in_width]
  const float* norm;   // weights of the norm of `parts`
  u16* out;            // [N, 64 P], or null:
  float* out_parts;    // [parts, N, 64 P]
  u16* rank;           // [N, inputs]: the quantised inputs that parts became, or null
  // What lies behind the rank in `parts` and becomes a window entry.
  const float* entry_norm;
  const float* cosines;  // [N, pairs]
  const float* sines;
  u8* entry_codes;       // the ring of all slots
  u8* entry_scales;
  const int* slot;
  const i64* cell;
  Streams streams;
  i64 code_slot, code_cell, scale_slot, scale_cell;
  int count, inputs, panels, chunks, share, blocks, groups, in_width, in_chunks, in_share, entry_width, pairs, quantise, ahead;
  float eps;
};

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

__device__ __forceinline__ float whole_of(const float* parts, int at, i64 step, int chunks, int share) {
  int panel = at / 64, first = panel * chunks / share, last = (panel * chunks + chunks - 1) / share;
  float sum = 0.f;
  for (int part = 0; part <= last - first; part++) sum += parts[part * step + at];
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
__device__ __forceinline__ float power_of(u32 e8m0) { return __uint_as_float(max((e8m0 & 255) << 23, 0x400000u)); }

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

// The inputs that a row's parts become, normed and quantised, as halves and what these are to be multiplied by.
template <class Behind>
__device__ __forceinline__ void inputs_from_parts(const Call& c, int row, const float4 (&norm)[PART_STEPS], u8* x, float* scales,
                                                  float* room, int thread, bool write, const Behind& behind) {
  const float* from = c.parts + (i64)row * c.in_width;
  i64 step = (i64)c.count * c.in_width;
  float v[PART_STEPS][4], squares = 0.f;
  float4 own[PART_STEPS][TOGETHER];
  int parts[PART_STEPS];
#pragma unroll
  for (int i = 0; i < PART_STEPS; i++) {
    int at = 4 * (thread + ROW_THREADS * i), panel = at / 64;
    parts[i] = at < c.inputs ? (panel * c.in_chunks + c.in_chunks - 1) / c.in_share - panel * c.in_chunks / c.in_share + 1 : 0;
#pragma unroll
    for (int j = 0; j < TOGETHER; j++)
      if (j < parts[i]) own[i][j] = *(const float4*)(from + j * step + at);
  }
  behind();
#pragma unroll
  for (int i = 0; i < PART_STEPS; i++) {
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int j = 0; j < TOGETHER; j++)
      if (j < parts[i]) add_four(sum, own[i][j]);
#pragma unroll 1
    for (int j = TOGETHER; j < parts[i]; j++) add_four(sum, *(const float4*)(from + j * step + 4 * (thread + ROW_THREADS * i)));
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
    if (write) *(uint2*)(c.rank + (i64)row * c.inputs + at) = quantised_four(v[i], scale);
  }
}

// Norm, rotation, FP8: one window entry, two channels a thread.
__device__ __forceinline__ void write_entry(const Call& c, int row, float* room, int thread) {
  int d = 2 * thread, at = c.inputs + d;
  bool there = d < c.entry_width;
  float v[2] = {0.f, 0.f}, w[2] = {0.f, 0.f}, cosine = 1.f, sine = 0.f;
  int pair = thread - (c.entry_width / 2 - c.pairs);
  if (there) {
    const float* parts = c.parts + (i64)row * c.in_width;
    i64 step = (i64)c.count * c.in_width;
    for (int e = 0; e < 2; e++) w[e] = __ldg(c.entry_norm + d + e), v[e] = whole_of(parts, at + e, step, c.in_chunks, c.in_share);
    if (pair >= 0) cosine = c.cosines[row * c.pairs + pair], sine = c.sines[row * c.pairs + pair];
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
  i64 slot = c.slot[row], cell = c.cell[row];
  *(u16*)(c.entry_codes + slot * c.code_slot + cell * c.code_cell + d) = (u16)(low | high << 8);
  if ((thread & 15) == 0)
    c.entry_scales[slot * c.scale_slot + cell * c.scale_cell + d / 32] = (u8)(__float_as_uint(scale) >> 23);
}
