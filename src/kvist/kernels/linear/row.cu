// One row times an FP8 weight of 32 x 32 scales, for Hopper (sm_90a): needs `device/stream.cuh` and `hyper_connections/collapse.cuh`.
//
// Every block takes an equal run of chunks, panel after panel; its warps take them in turn and their sums are added in their order.
// Panels that blocks share are left as parts, which whoever reads them adds in their order: bits never depend on timing. What stands
// before the product (norm, quantiser, sum of parts) is done by every block for itself. Knows no layers.

static const int WARPS = 8;  // of a block
static const int STAGES = 4;
static const int THREADS = 32 * WARPS;  // as many as norm and quantise a row
static const int PART_STEPS = 2;  // of 1,024 inputs, where inputs are parts of sums
static const int ROW_STEPS = 8;   // of 1,024 inputs, where they are whole
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
    if (there)
#pragma unroll
      for (int i = 0; i < CODES / 512; i++) copy_once(to + i * 512, codes + i * 512 + lane * 16);
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
__device__ __forceinline__ void inputs_from_parts(const Call& c, const float4 (&norm)[PART_STEPS], u8* x, float* room, int thread, bool write,
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
    if (at < c.inputs) {
      v[i][0] = rounded(v[i][0] * factor * norm[i].x), v[i][1] = rounded(v[i][1] * factor * norm[i].y);
      v[i][2] = rounded(v[i][2] * factor * norm[i].z), v[i][3] = rounded(v[i][3] * factor * norm[i].w);
    }
    if (at < c.inputs) *(uint2*)(x + 2 * at) = make_uint2(bfloat_pair(v[i][0], v[i][1]), bfloat_pair(v[i][2], v[i][3]));
  }
  quantise_row(x, c.inputs, thread, ROW_THREADS);
  if (write)
    for (int at = 4 * thread; at < c.inputs; at += 4 * ROW_THREADS) *(uint2*)(c.rank + at) = *(const uint2*)(x + 2 * at);
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
__device__ __forceinline__ bool take_inputs(const Call& c, const float4 (&norm)[PART_STEPS], u8* x, float* room, int first, int thread,
                                            bool streams, const Behind& behind) {
  if (KIND == STREAMS) {
    float4 w[D_STEPS];
    norm_weights(w, c.streams, thread);
    wait_for_launch();
    float one[D_STEPS][4];
    norm_row(one, x, w, c.streams, thread, !streams, true);
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
    inputs_from_parts(c, norm, x, room, thread, !streams, behind);
    return streams;
  }
  wait_for_launch();
  const u16* row = c.row + (i64)(first / c.chunks / (c.panels / c.groups)) * c.inputs;
  uint2 v[ROW_STEPS];
#pragma unroll
  for (int i = 0; i < ROW_STEPS; i++) {
    int at = 4 * (thread + ROW_THREADS * i);
    v[i] = at < c.inputs ? *(const uint2*)(row + at) : make_uint2(0, 0);
  }
  behind();
#pragma unroll
  for (int i = 0; i < ROW_STEPS; i++) {
    int at = 4 * (thread + ROW_THREADS * i);
    if (at < c.inputs) *(uint2*)(x + 2 * at) = v[i];
  }
  if (KIND == QUANTISED) quantise_row(x, c.inputs, thread, ROW_THREADS);
  return true;
}

template <int KIND> __device__ __forceinline__ void row_product(const Call& c) {
  extern __shared__ u8 raw[];
  int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31, block = blockIdx.x;
  u8* x = raw + min(STAGES * WARPS, c.share) * CODES;
  float* room = (float*)(x + 2 * c.inputs);
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
#pragma unroll 1
  for (int s = 0; s < c.ahead; s++, next += WARPS) ring.fill(next < end, c.codes + (i64)next * CODES, lane);
  if (KIND != STREAMS) let_next();
  auto behind = [&] {
#pragma unroll 1
    for (int s = c.ahead; s < STAGES; s++, next += WARPS) ring.fill(next < end, c.codes + (i64)next * CODES, lane);
  };
  if (!take_inputs<KIND>(c, norm, x, room, first, thread, streams, behind)) return;
  copies_wait<STAGES>();
  __syncthreads();

#pragma unroll 1
  for (int slot = 0; slot < slots; slot++, panel++) {
    int stop = min(end, (panel + 1) * c.chunks);
    Sums sums = {};
#pragma unroll 1
    for (; unit < stop; unit += WARPS, next += WARPS) {
      const u8* chunk = ring.arrived();
      add_fp8(sums, chunk, table[unit - first], x + (unit - panel * c.chunks) * 128, false, lane);
      __syncwarp();
      ring.fill(next < end, c.codes + (i64)next * CODES, lane);
    }
    keep(sums_of_warps + (slot * WARPS + warp) * 64, sums, lane);
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
