// Hyper-connections of a few rows: streams left and entered, for Hopper (sm_90a). Needs `device/stream.cuh`.
//
// A block owns 64 channels of all streams of a row. The sublayer's output comes whole, or as parts that are added here in their order. The
// projection's weights do not depend on the launch before and are read before it has ended. Norm, quantiser and coefficients are
// left to whoever needs them (`collapse.cuh`). Knows no layers.

static const int CHANNELS = 64;
static const int THREADS = 256;

struct Call {
  const u16* y;        // [N, D], or null:
  const float* parts;  // of sums [parts, N, D], or null: the streams are the input already
  const u16* x;        // [N, 4, D]
  const float* pre;    // [N, 4] [N, 4] [N, 16]
  const float* post;
  const float* comb;
  const float* weight;  // [24, 4 D], or null: streams are only left
  u16* streams;
  u16* h;
  float* sums;     // [N, D / 64, 32]: 24 logits, the streams' squares
  float* squares;  // [N, D / 64] of the collapse
  int count, width, chunks, share;
};

extern "C" __global__ void __launch_bounds__(THREADS) streams_row(const __grid_constant__ Call c) {
  extern __shared__ u8 raw[];
  float(*mixed)[CHANNELS] = (float(*)[CHANNELS])raw;
  float(*logits)[24] = (float(*)[24])(raw + 4 * CHANNELS * 4);  // a warp
  float* lengths = (float*)(raw + 4 * CHANNELS * 4 + 8 * 24 * 4);
  float* collapsed = lengths + 8;
  int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31, row = blockIdx.x / (c.width / CHANNELS);
  int first = (blockIdx.x - row * (c.width / CHANNELS)) * CHANNELS;
  i64 own = (i64)row * c.width;
  // For the projection: four channels of stream `from`, six logits.
  int quad = thread & 15, from = thread >> 4 & 3, six = thread >> 6;
  float4 weight[6];
  if (c.weight) {
#pragma unroll
    for (int j = 0; j < 6; j++)
      weight[j] = __ldg((const float4*)(c.weight + (i64)((six * 6 + j) * 4 + from) * c.width + first + quad * 4));
  }
  let_next();
  wait_for_launch();
  int stream = thread >> 6, channel = thread & 63, d = first + channel;
  float old[4], comb[4], y = 0.f;
  bool leave = c.y || c.parts;
#pragma unroll
  for (int s = 0; s < 4; s++) {
    old[s] = __uint_as_float((u32)c.x[4 * own + (i64)s * c.width + d] << 16);
    comb[s] = leave ? c.comb[row * 16 + s * 4 + stream] : 0.f;
  }
  float post = leave ? c.post[row * 4 + stream] : 0.f;
  float pre[4];
#pragma unroll
  for (int s = 0; s < 4; s++) pre[s] = c.weight ? c.pre[row * 4 + s] : 0.f;
  if (c.y) y = __uint_as_float((u32)c.y[own + d] << 16);
  else if (c.parts) {
    int panel = d / 64, last = (panel * c.chunks + c.chunks - 1) / c.share - panel * c.chunks / c.share;
    float sum = 0.f;
#pragma unroll 3
    for (int part = 0; part <= last; part++) sum += c.parts[((i64)part * c.count + row) * c.width + d];
    y = rounded(sum);
  }
  float now = stream == 0 ? old[0] : stream == 1 ? old[1] : stream == 2 ? old[2] : old[3];
  if (leave) {
    now = rounded(post * y + (comb[0] * old[0] + comb[1] * old[1] + comb[2] * old[2] + comb[3] * old[3]));
    c.streams[4 * own + (i64)stream * c.width + d] = (u16)(__float_as_uint(now) >> 16);
  }
  if (!c.weight) return;
  mixed[stream][channel] = now;
  float length = warp_sum(now * now);
  if (lane == 0) lengths[warp] = length;
  __syncthreads();
  if (thread < CHANNELS) {
    float one = rounded(pre[0] * mixed[0][thread] + pre[1] * mixed[1][thread] + pre[2] * mixed[2][thread] + pre[3] * mixed[3][thread]);
    c.h[own + first + thread] = (u16)(__float_as_uint(one) >> 16);
    one = warp_sum(one * one);
    if (lane == 0) collapsed[warp] = one;
  }
  float4 in = *(const float4*)(mixed[from] + quad * 4);
#pragma unroll
  for (int j = 0; j < 6; j++) {
    float sum = in.x * weight[j].x + in.y * weight[j].y + in.z * weight[j].z + in.w * weight[j].w;
    sum = warp_sum(sum);  // 16 quads of two streams
    if (lane == 0) logits[warp][six * 6 + j] = sum;
  }
  __syncthreads();
  if (thread < 24) c.sums[blockIdx.x * 32 + thread] = logits[thread / 6 * 2][thread] + logits[thread / 6 * 2 + 1][thread];
  if (thread == 24) {
    float total = 0.f;
    for (int w = 0; w < 8; w++) total += lengths[w];
    c.sums[blockIdx.x * 32 + 24] = total;
    c.squares[blockIdx.x] = collapsed[0] + collapsed[1];
  }
}
