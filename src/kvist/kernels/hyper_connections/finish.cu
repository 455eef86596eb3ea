// What follows the pass over the streams of several rows (`pass.cu`), for Hopper (sm_90a): norm and FP8 of the collapse, which lies in L2
// still, and the coefficients of the next sublayer. Needs `device/stream.cuh` and `collapse.cuh`.
//
// The last blocks make coefficients: a block a row where rows are few, a warp a row otherwise. The others norm a row at a time, and
// have the next one on its way meanwhile; they leave room beside them, so that coefficients are made in their shadow. Knows no layers.

static const int WARPS = 5;
static const int THREADS = 32 * WARPS;
static const int UNITS = 4;  // of eight channels a thread: widths up to 5,120
static const int TOGETHER = 32;  // parts that a warp has on their way

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
  int rows, width, count, iterations, makers, spread;
  float norm_eps, hc_eps;
};

__device__ __forceinline__ void make_coefficients(const Call& c, float* room, int block, int warp, int lane) {
  int row = c.spread ? block : block * WARPS + warp, first = c.spread ? warp : 0, by = c.spread ? WARPS : 1;
  float total = 0.f;
  if (row < c.rows) {
    const float* parts = c.parts + (i64)row * c.count * 32 + lane;
#pragma unroll 1
    for (int begin = first; begin < c.count; begin += TOGETHER * by) {
      float own[TOGETHER];
#pragma unroll
      for (int i = 0; i < TOGETHER; i++) own[i] = begin + i * by < c.count ? parts[(begin + i * by) * 32] : 0.f;
#pragma unroll
      for (int i = 0; i < TOGETHER; i++) total += own[i];
    }
  }
  room[warp * 32 + lane] = total;
  if (c.spread) __syncthreads();
  else __syncwarp();
  if (row >= c.rows || (c.spread && warp)) return;
  Streams s = {nullptr,   nullptr, nullptr, nullptr,         c.base,           c.scale,          nullptr,
               nullptr,   c.pre + (i64)row * 4, c.post + (i64)row * 4, c.comb + (i64)row * 16, c.width, c.count, c.iterations,
               c.norm_eps, c.hc_eps};
  coefficients(s, room + (c.spread ? 0 : warp * 32), c.spread ? WARPS : 1, lane);
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
    make_coefficients(c, (float*)raw, row - step, warp, lane);
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
