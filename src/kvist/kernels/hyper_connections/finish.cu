// What follows the pass over the streams of several rows (`pass.cu`), for Hopper (sm_90a): norm and FP8 of the collapse, which lies in L2
// still, and the coefficients of the next sublayer. Needs `device/stream.cuh` and `collapse.cuh`.
//
// The last blocks make coefficients: a block a row where rows are few, otherwise of up to 32 rows, which a warp balances side by side. The
// others norm a row at a time, and
// have the next one on its way meanwhile; they leave room beside them, so that coefficients are made in their shadow. Knows no layers.

static const int WARPS = 5;
static const int THREADS = 32 * WARPS;
static const int UNITS = 4;  // of eight channels a thread: widths up to 5,120
static const int TOGETHER = 32;  // parts that a warp has on their way
static const int STRIDE = 33;    // floats of a row's sums

struct Call {
  u16* h;                // [N, D] collapse; normed where it lies
  const float* parts;    // [N, parts, 32]: 24 logits, the streams' squares
  const float* squares;  // [N, parts] of the collapse
  const float* base;     // [24]
  const float* scale;    // [3]
  const float* norm;     // [D]
  u16* quantised;        // [N, D], or null
  float* pre;
  float* post;
  float* comb;
  int rows, width, count, iterations, makers, share;
  float norm_eps, hc_eps;
};

// Of one row: every `by`-th part.
__device__ __forceinline__ float part_sum(const Call& c, int row, int first, int by, int lane) {
  const float* parts = c.parts + (i64)row * c.count * 32 + lane;
  float total = 0.f;
#pragma unroll 1
  for (int begin = first; begin < c.count; begin += TOGETHER * by) {
    float own[TOGETHER];
#pragma unroll
    for (int i = 0; i < TOGETHER; i++) own[i] = begin + i * by < c.count ? parts[(begin + i * by) * 32] : 0.f;
#pragma unroll
    for (int i = 0; i < TOGETHER; i++) total += own[i];
  }
  return total;
}
__device__ __forceinline__ void make_row(const Call& c, float* room, int row, int warp, int lane) {
  room[warp * 32 + lane] = part_sum(c, row, warp, WARPS, lane);
  __syncthreads();
  if (warp) return;
  Streams s = {nullptr,   nullptr, nullptr, nullptr,         c.base,           c.scale,          nullptr,
               nullptr,   c.pre + (i64)row * 4, c.post + (i64)row * 4, c.comb + (i64)row * 16, c.width, c.count, c.iterations,
               c.norm_eps, c.hc_eps};
  coefficients(s, room, WARPS, lane);
}
__device__ __forceinline__ void make_rows(const Call& c, float* room, int first, int warp, int lane) {
  for (int i = warp; i < c.share && first + i < c.rows; i += WARPS) room[i * STRIDE + lane] = part_sum(c, first + i, 0, 1, lane);
  __syncthreads();
  i64 row = first + lane;
  if (warp || lane >= c.share || row >= c.rows) return;
  const float* sums = room + lane * STRIDE;
  float factor = 1.f / sqrtf(sums[24] / (4.f * c.width) + c.norm_eps), pre[4], post[4], p[16];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    pre[i] = gate_of(sums[i] * factor * c.scale[0] + c.base[i]) + c.hc_eps;
    post[i] = 2.f * gate_of(sums[4 + i] * factor * c.scale[1] + c.base[4 + i]);
  }
#pragma unroll
  for (int i = 0; i < 16; i++) p[i] = sums[8 + i] * factor * c.scale[2] + c.base[8 + i];
  balance(p, c.iterations, c.hc_eps);
  *(float4*)(c.pre + row * 4) = *(float4*)pre, *(float4*)(c.post + row * 4) = *(float4*)post;
#pragma unroll
  for (int i = 0; i < 4; i++) *(float4*)(c.comb + row * 16 + 4 * i) = *(float4*)(p + 4 * i);
}

// Eight channels normed, as pairs, and the largest of their sizes.
__device__ __forceinline__ u32 normed_unit(uint4& unit, const float (&weight)[8], float factor) {
  u32 largest = 0, *pairs = (u32*)&unit;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    pairs[i] = bfloat_pair(low_of(pairs[i]) * factor * weight[2 * i], high_of(pairs[i]) * factor * weight[2 * i + 1]);
    largest = max(largest, max(pairs[i] << 16 & 0x7FFFFFFFu, pairs[i] & 0x7FFF0000u));
  }
  return largest;
}

__device__ __forceinline__ void take_row(uint4 (&unit)[UNITS], float& total, const Call& c, int row, int thread) {
#pragma unroll
  for (int i = 0; i < UNITS; i++) {
    int d = 8 * (thread + THREADS * i);
    if (d < c.width) unit[i] = *(const uint4*)(c.h + (i64)row * c.width + d);
  }
  total = 0.f;
  for (int part = thread & 31; part < c.count; part += 32) total += c.squares[(i64)row * c.count + part];
}

extern "C" __global__ void __launch_bounds__(THREADS) finish(const __grid_constant__ Call c) {
  extern __shared__ u8 raw[];
  int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
  int row = blockIdx.x, step = gridDim.x - c.makers;
  if (row >= step) {
    wait_for_launch();
    let_next();
    if (c.share == 1) make_row(c, (float*)raw, row - step, warp, lane);
    else make_rows(c, (float*)raw, (row - step) * c.share, warp, lane);
    return;
  }
  float weight[UNITS][8];
#pragma unroll
  for (int i = 0; i < UNITS; i++) {
    int d = 8 * (thread + THREADS * i);
    if (d < c.width) *(float4*)weight[i] = __ldg((const float4*)(c.norm + d)), *(float4*)(weight[i] + 4) = __ldg((const float4*)(c.norm + d + 4));
  }
  wait_for_launch();
  let_next();
  uint4 unit[UNITS], next[UNITS];
  float total, next_total = 0.f;
  take_row(unit, total, c, row, thread);
#pragma unroll 1
  while (true) {
    int after = row + step;
    if (after < c.rows) take_row(next, next_total, c, after, thread);
    float factor = 1.f / sqrtf(warp_sum(total) / c.width + c.norm_eps);
#pragma unroll
    for (int i = 0; i < UNITS; i++) {
      int d = 8 * (thread + THREADS * i);
      bool there = d < c.width;
      if (!there) unit[i] = make_uint4(0, 0, 0, 0);
      u32 largest = normed_unit(unit[i], weight[i], factor);
      largest = max(largest, __shfl_xor_sync(0xFFFFFFFF, largest, 1));
      largest = max(largest, __shfl_xor_sync(0xFFFFFFFF, largest, 2));
      if (there) *(uint4*)(c.h + (i64)row * c.width + d) = unit[i];
      if (!c.quantised) continue;
      float scale = fp8_scale(largest), inverse = power_reciprocal(scale);
      u32* pairs = (u32*)&unit[i];
#pragma unroll
      for (int k = 0; k < 4; k++) {
        float2 near = nearest_fp8(low_of(pairs[k]) * inverse, high_of(pairs[k]) * inverse);
        pairs[k] = bfloat_pair(near.x * scale, near.y * scale);
      }
      if (there) *(uint4*)(c.quantised + (i64)row * c.width + d) = unit[i];
    }
    if (after >= c.rows) return;
    row = after, total = next_total;
#pragma unroll
    for (int i = 0; i < UNITS; i++) unit[i] = next[i];
  }
}
