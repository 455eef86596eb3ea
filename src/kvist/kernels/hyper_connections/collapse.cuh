// What follows the pass over the streams of one row, or of each of several, in kernels that need its result: the collapse normed and
// quantised, and the coefficients of the next sublayer. Needs `device/stream.cuh`.

struct Streams {
  const u16* h;          // [D] collapse before its norm
  const float* squares;  // [parts] of the collapse
  const float* parts;    // [parts, 32]: 24 logits, the streams' squares
  const float* norm;     // [D]
  const float* base;     // [24]
  const float* scale;    // [3]
  u16* normed;           // [D], written by one block
  u16* quantised;        // [D], written by the same
  float* pre;            // [4] [4] [16]
  float* post;
  float* comb;
  int width, count, iterations;
  float norm_eps, hc_eps;
};

// A row's own, where several lie one after the other.
__device__ __forceinline__ Streams row_of(const Streams& s, int row) {
  Streams own = s;
  i64 at = (i64)row * s.width;
  own.h += at, own.squares += row * s.count, own.parts += row * s.count * 32, own.pre += row * 4, own.post += row * 4, own.comb += row * 16;
  if (s.normed) own.normed += at;
  if (s.quantised) own.quantised += at;
  return own;
}

static const int D_STEPS = 5;  // of 1,024 inputs: widths up to 5,120

__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Norm weights of a thread's inputs: read before the launch before has ended.
__device__ __forceinline__ void norm_weights(float4 (&w)[D_STEPS], const Streams& s, int thread) {
#pragma unroll
  for (int i = 0; i < D_STEPS; i++) {
    int d = 4 * (thread + 256 * i);
    if (d < s.width) w[i] = __ldg((const float4*)(s.norm + d));
  }
}

// Writes the quantised input to `x`, or its halves if there is a place for `scales` of 32; `one` keeps a thread's normed values. 256
// threads, whole warps. `let`: the next launch comes in when the row is here, so that its weights do not keep this waiting.
__device__ __forceinline__ void norm_row(float (&one)[D_STEPS][4], u8* x, const float4 (&w)[D_STEPS], const Streams& s, int thread,
                                         bool write, bool let = false, float* scales = nullptr) {
#pragma unroll
  for (int i = 0; i < D_STEPS; i++) {
    int d = 4 * (thread + 256 * i);
    four_of(d < s.width ? *(const uint2*)(s.h + d) : make_uint2(0, 0), one[i]);
  }
  float total = 0.f;
  for (int part = thread & 31; part < s.count; part += 32) total += s.squares[part];
  float factor = 1.f / sqrtf(warp_sum(total) / s.width + s.norm_eps);
  if (let) let_next();
#pragma unroll
  for (int i = 0; i < D_STEPS; i++) {
    int d = 4 * (thread + 256 * i);
    float weight[4] = {w[i].x, w[i].y, w[i].z, w[i].w};
#pragma unroll
    for (int e = 0; e < 4; e++) one[i][e] = d < s.width ? rounded(one[i][e] * factor * weight[e]) : 0.f;
    float scale = scale_of_group(one[i]);
    if (d >= s.width) continue;
    if (scales && (thread & 7) == 0) scales[d / 32] = scale;
    uint2 near = !scales || write ? quantised_four(one[i], scale) : make_uint2(0, 0);
    *(uint2*)(x + 2 * d) = scales ? halves_of_four(one[i], scale) : near;
    if (write && s.normed) *(uint2*)(s.normed + d) = make_uint2(bfloat_pair(one[i][0], one[i][1]), bfloat_pair(one[i][2], one[i][3]));
    if (write && s.quantised) *(uint2*)(s.quantised + d) = near;
  }
}

__device__ __forceinline__ void share(float& a, float& b, float& c, float& d, float eps) {
  float r = reciprocal((a + b) + ((c + d) + eps));
  a *= r, b *= r, c *= r, d *= r;
}

// A warp's share of the sums over parts, which `coefficients` adds: 32 floats. Many loads at once: each waits for L2.
template <int MANY = 10> __device__ __forceinline__ void part_sums(const Streams& s, float* to, int first, int by, int lane) {
  float total = 0.f;
#pragma unroll 1
  for (int begin = first; begin < s.count; begin += MANY * by) {
    float own[MANY];
#pragma unroll
    for (int i = 0; i < MANY; i++) own[i] = begin + i * by < s.count ? s.parts[(begin + i * by) * 32 + lane] : 0.f;
#pragma unroll
    for (int i = 0; i < MANY; i++) total += own[i];
  }
  to[lane] = total;
}
// A row's sixteen weights by one thread: softmax of the logits, then balanced.
__device__ __forceinline__ void balance(float (&p)[16], int iterations, float eps) {
#pragma unroll
  for (int i = 0; i < 16; i += 4) {
    float highest = max(max(p[i], p[i + 1]), max(p[i + 2], p[i + 3]));
#pragma unroll
    for (int j = 0; j < 4; j++) p[i + j] = power2(1.4426950408889634f * (p[i + j] - highest));
    float r = reciprocal((p[i] + p[i + 1]) + (p[i + 2] + p[i + 3]));
#pragma unroll
    for (int j = 0; j < 4; j++) p[i + j] = p[i + j] * r + eps;
  }
#pragma unroll
  for (int j = 0; j < 4; j++) share(p[j], p[4 + j], p[8 + j], p[12 + j], eps);
#pragma unroll 1
  for (int turn = 1; turn < iterations; turn++) {
#pragma unroll
    for (int i = 0; i < 16; i += 4) share(p[i], p[i + 1], p[i + 2], p[i + 3], eps);
#pragma unroll
    for (int j = 0; j < 4; j++) share(p[j], p[4 + j], p[8 + j], p[12 + j], eps);
  }
}
__device__ __forceinline__ float gate_of(float logit) { return 1.f / (1.f + power2(-1.4426950408889634f * max(logit, -80.f))); }

// By one warp, from `shares` warps' sums.
__device__ __forceinline__ void coefficients(const Streams& s, const float* room, int shares, int lane) {
  float total = 0.f;
  for (int w = 0; w < shares; w++) total += room[w * 32 + lane];
  total *= 1.f / sqrtf(__shfl_sync(0xFFFFFFFF, total, 24) / (4.f * s.width) + s.norm_eps);
  float logit = lane < 24 ? total * s.scale[lane < 4 ? 0 : lane < 8 ? 1 : 2] + s.base[lane] : 0.f;
  float gate = gate_of(logit);
  if (lane < 4) s.pre[lane] = gate + s.hc_eps;
  else if (lane < 8) s.post[lane - 4] = 2.f * gate;
  float p[16];
#pragma unroll
  for (int i = 0; i < 16; i++) p[i] = __shfl_sync(0xFFFFFFFF, logit, 8 + i);
  if (lane) return;
  balance(p, s.iterations, s.hc_eps);
#pragma unroll
  for (int i = 0; i < 16; i++) s.comb[i] = p[i];
}
