// The router of two to eight rows in one launch, for Hopper (sm_90a): norm, FP8, scores, the choice, and the coefficients of the streams.
// After `device/stream.cuh`, `hyper_connections/collapse.cuh` and `choose.cuh`.
//
// A block norms every row for itself, as the experts' launch of one row does (`experts/row.cu`, whose sums these are), and scores some
// experts; the first block waits for all scores, a warp a row, and chooses. Knows no layers.

static const int THREADS = 256;
static const int WARPS = THREADS / 32;
static const int MOST_ROWS = 8;
static const int MOST_EXPERTS = 384;
static const int MOST_GATES = 3;  // experts of a block
static const int SIDE = 4;        // rows whose collapse a thread has on its way

struct Call {
  const u16* gate;  // [E, D]
  const float* bias_text;
  const float* bias_image;
  const u8* text;   // [N] whether a row is text
  i64* ids;         // [N, K]
  float* weights;   // [N, K]
  u64* scores;      // [N, E] an expert's order and score: zero before and after
  Streams streams;  // of N rows
  int count, experts, chosen, scorers, normalise;
  float temperature, scale;
};

template <int KEYS> __device__ __forceinline__ void choose_row(const Call& c, int row, int lane) {
  u64* scores = c.scores + (i64)row * c.experts;
  Choice one = choose<KEYS>(scores, c.experts, c.chosen, c.normalise, lane);
  if (lane < c.chosen) {
    i64 at = (i64)row * c.chosen + one.place;
    c.ids[at] = one.whole ? one.expert : -1, c.weights[at] = one.weight * c.scale;
  }
  for (int e = lane; e < c.experts; e += 32) scores[e] = 0;
}

typedef float Partial[MOST_ROWS][WARPS];

__device__ __forceinline__ void take_row(uint2 (&in)[D_STEPS], float& squares, const Streams& s, int row, int thread) {
#pragma unroll
  for (int i = 0; i < D_STEPS; i++) {
    int d = 4 * (thread + 256 * i);
    in[i] = d < s.width ? *(const uint2*)(s.h + (i64)row * s.width + d) : make_uint2(0, 0);
  }
  squares = 0.f;
  for (int part = thread & 31; part < s.count; part += 32) squares += s.squares[row * s.count + part];
}
// A warp's part of the logits of a row, which one block writes quantised.
__device__ __forceinline__ void score_row(const Call& c, Partial* partial, const uint2 (&in)[D_STEPS], float squares, const float4 (&norm)[D_STEPS],
                                          const uint2 (&gates)[MOST_GATES][D_STEPS], int row, int thread) {
  const Streams& s = c.streams;
  float factor = 1.f / sqrtf(warp_sum(squares) / s.width + s.norm_eps), sums[MOST_GATES] = {};
#pragma unroll
  for (int i = 0; i < D_STEPS; i++) {
    int d = 4 * (thread + 256 * i);
    float one[4], w[4] = {norm[i].x, norm[i].y, norm[i].z, norm[i].w}, gate[4];
    four_of(in[i], one);
#pragma unroll
    for (int e = 0; e < 4; e++) one[e] = d < s.width ? rounded(one[e] * factor * w[e]) : 0.f;
#pragma unroll
    for (int g = 0; g < MOST_GATES; g++) {
      four_of(gates[g][i], gate);
#pragma unroll
      for (int e = 0; e < 4; e++) sums[g] += one[e] * gate[e];
    }
    if (blockIdx.x != row % c.scorers) continue;
    float scale = scale_of_group(one);
    if (d < s.width) *(uint2*)(s.quantised + (i64)row * s.width + d) = quantised_four(one, scale);
  }
#pragma unroll
  for (int g = 0; g < MOST_GATES; g++) {
    sums[g] = warp_sum(sums[g]);
    if ((thread & 31) == 0) partial[g][row][thread >> 5] = sums[g];
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) route_rows(const __grid_constant__ Call c) {
  extern __shared__ u8 raw[];
  Partial* partial = (Partial*)raw;
  int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31, block = blockIdx.x;
  if (block >= c.scorers) {
    let_next();
    wait_for_launch();
    Streams s = row_of(c.streams, block - c.scorers);
    if (warp) return;
    part_sums<40>(s, (float*)raw, 0, 1, lane);
    __syncwarp();
    coefficients(s, (float*)raw, 1, lane);
    return;
  }
  float4 norm[D_STEPS];
  norm_weights(norm, c.streams, thread);
  uint2 gates[MOST_GATES][D_STEPS];
#pragma unroll
  for (int g = 0; g < MOST_GATES; g++) {
    int e = block + g * c.scorers;
#pragma unroll
    for (int i = 0; i < D_STEPS; i++) {
      int d = 4 * (thread + 256 * i);
      gates[g][i] = e < c.experts && d < c.streams.width ? __ldg((const uint2*)(c.gate + (i64)e * c.streams.width + d)) : make_uint2(0, 0);
    }
  }
  let_next();
  wait_for_launch();
#pragma unroll 1
  for (int base = 0; base < c.count; base += SIDE) {
    uint2 rows[SIDE][D_STEPS];
    float squares[SIDE];
#pragma unroll
    for (int r = 0; r < SIDE; r++) take_row(rows[r], squares[r], c.streams, min(base + r, c.count - 1), thread);
#pragma unroll
    for (int r = 0; r < SIDE; r++)
      if (base + r < c.count) score_row(c, partial, rows[r], squares[r], norm, gates, base + r, thread);
  }
  __syncthreads();
  int g = thread / MOST_ROWS, row = thread % MOST_ROWS, e = block + g * c.scorers;
  if (g < MOST_GATES && row < c.count && e < c.experts) {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < WARPS; i++) sum += partial[g][row][i];
    tell_wide(c.scores + (i64)row * c.experts + e, scored(sum, c.text[row] ? c.bias_text[e] : c.bias_image[e], c.temperature));
  }
  if (block || warp >= c.count) return;
  __syncwarp();
  if (c.experts <= 128) choose_row<4>(c, warp, lane);
  else choose_row<MOST_EXPERTS / 32>(c, warp, lane);
}
