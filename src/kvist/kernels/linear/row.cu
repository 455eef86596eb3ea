// One row times an FP8 weight of 32 x 32 scales, for Hopper (sm_90a): after `pieces.cuh` and what that needs.
//
// Every block takes an equal run of chunks, panel after panel; its warps take them in turn and their sums are added in their order.
// Panels that blocks share are left as parts, which whoever reads them adds in their order: bits never depend on timing. What stands
// before the product (norm, quantiser, sum of parts) is done by every block for itself. Knows no layers.

static const int STAGES = 5;
static const int ROW_STEPS = 2;  // of 4,096 inputs, where they are whole

enum { ROW, QUANTISED, PARTS, STREAMS };

// A panel's 64 sums of a warp: outputs 16 m + g and 8 more lie in lanes 4 g, at [m][0] and [m][1].
typedef float PanelSums[4][2];
// How a lane makes right operands of a word of inputs: the first 32 of a chunk in column 0, the others in column 1.
struct Columns {
  u32 low, high;
  __device__ __forceinline__ Columns(int lane) {
    low = lane < 4 ? 0x4410 : lane < 8 ? 0x1044 : 0x4444, high = lane < 4 ? 0x4432 : lane < 8 ? 0x3244 : 0x4444;
  }
};
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
      write_entry(c, 0, room, thread);
      return false;
    }
    // Nobody needs the coefficients before the next pass: here they are made beside the longest product.
    if (blockIdx.x == c.blocks + 2) {
      part_sums(c.streams, room + (thread >> 5) * 32, thread >> 5, 8, thread & 31);
      group_barrier(1, ROW_THREADS);
      if (thread < 32) coefficients(c.streams, room, 8, thread);
      return false;
    }
    inputs_from_parts(c, 0, norm, x, scales, room, thread, !streams, behind);
    return streams;
  }
  wait_for_launch();
  const u16* row = c.rows + (i64)(first / c.chunks / (c.panels / c.groups)) * c.inputs;
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
