// Two to eight rows times an FP8 weight of 32 x 32 scales, for Hopper (sm_90a): after `pieces.cuh` and what that needs.
//
// Chunks, warps, parts and the order of all sums are those of one row (`row.cu`), which uses two columns of a product's right operand;
// here every row has two of its eight, so a product serves four rows. A row's bits are therefore what they are alone. A block holds the
// inputs of its own chunks. Knows no layers.

static const int UNITS = 4;  // of a row's inputs that a thread has on their way

enum { ROWS, STREAMS };

// A panel's sums of a warp for four rows a group: outputs 16 m + g and 8 more of row t lie in lane 4 g + t, at [m][0] and [m][1].
template <int GROUPS> struct RowSums { float of[GROUPS][4][2]; };

template <int GROUPS>
__device__ __forceinline__ void add_rows(RowSums<GROUPS>& sums, const u8* codes, u32 exponents, const u8* const (&x)[GROUPS],
                                         const float* const (&scales)[GROUPS], u32 pick_low, u32 pick_high, int lane) {
  int g = lane >> 2, t = lane & 3;
  u32 right[GROUPS][4][2];
  float2 of_runs[GROUPS];
#pragma unroll
  for (int r = 0; r < GROUPS; r++) {
    uint4 in = shared_words(x[r]);
    u32 words[4] = {in.x, in.y, in.z, in.w};
#pragma unroll
    for (int k = 0; k < 4; k++) right[r][k][0] = __byte_perm(words[k], 0, pick_low), right[r][k][1] = __byte_perm(words[k], 0, pick_high);
    of_runs[r] = *(const float2*)scales[r];
  }
#pragma unroll
  for (int m = 0; m < 4; m += 2) {
    float first = power_of(exponents >> (8 * m)), second = power_of(exponents >> (8 * m + 8));
    u32 top[2][4], low[2][4];
    float d[GROUPS][2][4];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const u8* at = codes + ((m + i) * 16 + g) * 64 + t * 16;
      *(uint4*)top[i] = shared_words(at), *(uint4*)low[i] = shared_words(at + 512);
    }
#pragma unroll
    for (int k = 0; k < 4; k++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        u32 a[4] = {lower_codes(top[i][k]), lower_codes(low[i][k]), upper_codes(top[i][k]), upper_codes(low[i][k])};
#pragma unroll
        for (int r = 0; r < GROUPS; r++) {
          if (k) halves_add(d[r][i], a[0], a[1], a[2], a[3], right[r][k][0], right[r][k][1]);
          else halves_begin(d[r][i], a[0], a[1], a[2], a[3], right[r][k][0], right[r][k][1]);
        }
      }
#pragma unroll
    for (int r = 0; r < GROUPS; r++) {
      float one = first * of_runs[r].x, two = second * of_runs[r].y;
#pragma unroll
      for (int i = 0; i < 2; i++) {
        sums.of[r][m + i][0] = fmaf(d[r][i][1], two, fmaf(d[r][i][0], one, sums.of[r][m + i][0]));
        sums.of[r][m + i][1] = fmaf(d[r][i][3], two, fmaf(d[r][i][2], one, sums.of[r][m + i][1]));
      }
    }
  }
}

// The inputs of a block's chunks, as halves and what these are to be multiplied by: `held` chunks of each row, the block's first before
// the others.
__device__ __forceinline__ void take_rows(const Call& c, u8* x, float* scales, int first, int held, int thread) {
  int start = first % c.chunks, units = held * 4, all = units * c.count;
  const u16* rows = c.rows + (i64)(first / c.chunks / (c.panels / c.groups)) * c.inputs;
  i64 stride = (i64)c.groups * c.inputs;
#pragma unroll 1
  for (int begin = thread; begin < (all + 31) / 32 * 32; begin += THREADS * UNITS) {
    u32 v[UNITS][8];
#pragma unroll
    for (int i = 0; i < UNITS; i++) {
      int unit = begin + i * THREADS, row = unit / units, at = unit - row * units, chunk = start + at / 4;
      if (chunk >= c.chunks) chunk -= c.chunks;
      const uint4* from = (const uint4*)(rows + row * stride + chunk * 64 + at % 4 * 16);
#pragma unroll
      for (int h = 0; h < 2; h++) *(uint4*)(v[i] + 4 * h) = unit < all ? from[h] : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int i = 0; i < UNITS; i++) {
      int unit = begin + i * THREADS;
      float scale = halve_sixteen<false>(v[i]);
      if (unit >= all) continue;
#pragma unroll
      for (int h = 0; h < 2; h++) *(uint4*)(x + 32 * unit + 16 * h) = *(const uint4*)(v[i] + 4 * h);
      if ((unit & 1) == 0) scales[unit / 2] = scale;
    }
  }
}

// Four channels a unit of streams' collapses, which a block needs of its chunks; `writes`: others read what becomes of them.
struct Unit {
  uint2 in;
  float4 weight;
  int row, place;
  bool writes;
};
__device__ __forceinline__ void find_unit(Unit& u, const Call& c, int unit, int first, int held) {
  u.row = unit / (held * 16);
  int at = unit - u.row * held * 16, chunk = first % c.chunks + at / 16;
  u.writes = first + at / 16 < c.chunks;
  if (chunk >= c.chunks) chunk -= c.chunks;
  int d = chunk * 64 + at % 16 * 4;
  u.place = u.row * c.streams.width + d, u.weight = __ldg((const float4*)(c.streams.norm + d));
}

// The same inputs of streams' collapses, normed and quantised on the way; blocks of the first panel write what others read of it. Calls
// `wait_for_launch`. `factors`: a float a row.
__device__ __forceinline__ void take_streams(const Call& c, u8* x, float* scales, float* factors, int first, int held, int thread) {
  const Streams& s = c.streams;
  int all = held * 16 * c.count;
  Unit units[UNITS];
#pragma unroll
  for (int i = 0; i < UNITS; i++) find_unit(units[i], c, min(thread + i * THREADS, all - 1), first, held);
  wait_for_launch();
#pragma unroll
  for (int i = 0; i < UNITS; i++) units[i].in = *(const uint2*)(s.h + units[i].place);
  int warp = thread >> 5;
  if (warp < c.count) {
    float total = 0.f;
    for (int part = thread & 31; part < s.count; part += 32) total += s.squares[warp * s.count + part];
    factors[warp] = 1.f / sqrtf(warp_sum(total) / s.width + s.norm_eps);
  }
  __syncthreads();
#pragma unroll 1
  for (int begin = thread;;) {
#pragma unroll
    for (int i = 0; i < UNITS; i++) {
      int unit = begin + i * THREADS;
      Unit& u = units[i];
      float one[4], w[4] = {u.weight.x, u.weight.y, u.weight.z, u.weight.w};
      four_of(u.in, one);
#pragma unroll
      for (int e = 0; e < 4; e++) one[e] = rounded(one[e] * factors[u.row] * w[e]);
      float scale = scale_of_group(one);
      if (unit >= all) continue;
      *(uint2*)(x + 8 * unit) = halves_of_four(one, scale);
      if ((unit & 7) == 0) scales[unit / 8] = scale;
      if (!u.writes) continue;
      *(uint2*)(s.normed + u.place) = make_uint2(bfloat_pair(one[0], one[1]), bfloat_pair(one[2], one[3]));
      *(uint2*)(s.quantised + u.place) = quantised_four(one, scale);
    }
    begin += THREADS * UNITS;
    if (begin >= (all + 31) / 32 * 32) break;
#pragma unroll
    for (int i = 0; i < UNITS; i++) {
      find_unit(units[i], c, min(begin + i * THREADS, all - 1), first, held);
      units[i].in = *(const uint2*)(s.h + units[i].place);
    }
  }
}

template <int KIND, int GROUPS, int STAGES> __device__ __forceinline__ void rows_product(const Call& c) {
  extern __shared__ u8 raw[];
  int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31, block = blockIdx.x;
  int first = block * c.share, end = min(first + c.share, c.panels * c.chunks), held = min(c.share, c.chunks);
  int panel = first / c.chunks, slots = (end - 1) / c.chunks - panel + 1;
  u8* x = raw + min(STAGES * WARPS, c.share) * CODES;
  float* scales = (float*)(x + c.count * held * 128);  // of 32 inputs
  float* factors = scales + c.count * held * 2;
  float* sums_of_warps = factors + 8;
  u32* table = (u32*)(sums_of_warps + slots * WARPS * c.count * 64);
  // What is small comes first: behind a ring's chunks it would wait for all of them.
#pragma unroll 1
  for (int i = thread; i < end - first; i += THREADS) copy_scales(table + i, c.scales + first + i);
  copies_commit();
  Chunks<STAGES> ring;
  ring.open(raw, warp);
  int unit = first + warp, next = unit;
#pragma unroll 1
  for (int s = 0; s < c.ahead; s++, next += WARPS) ring.fill(next < end, c.codes + (i64)next * CODES, lane);
  let_next();
  if (KIND == STREAMS) take_streams(c, x, scales, factors, first, held, thread);
  else {
    wait_for_launch();
    take_rows(c, x, scales, first, held, thread);
  }
#pragma unroll 1
  for (int s = c.ahead; s < STAGES; s++, next += WARPS) ring.fill(next < end, c.codes + (i64)next * CODES, lane);
  copies_wait<STAGES>();
  __syncthreads();

  // Lane 4 g + t makes the right operand of row g / 2, of a chunk's first or second 32 inputs, and has the products of row t.
  u32 pick_low = lane & 4 ? 0x1044 : 0x4410, pick_high = lane & 4 ? 0x3244 : 0x4432;
  const u8* own_x[GROUPS];
  const float* own_scales[GROUPS];
#pragma unroll
  for (int r = 0; r < GROUPS; r++) {
    own_x[r] = x + min(4 * r + (lane >> 3), c.count - 1) * held * 128 + (lane >> 2 & 1) * 64 + (lane & 3) * 16;
    own_scales[r] = scales + min(4 * r + (lane & 3), c.count - 1) * held * 2;
  }
  int place = warp % held;
#pragma unroll 1
  for (int slot = 0; slot < slots; slot++, panel++) {
    int stop = min(end, (panel + 1) * c.chunks);
    RowSums<GROUPS> sums = {};
#pragma unroll 1
    for (; unit < stop; unit += WARPS, next += WARPS) {
      const u8* chunk = ring.arrived();
      const u8* at[GROUPS];
      const float* scale[GROUPS];
#pragma unroll
      for (int r = 0; r < GROUPS; r++) at[r] = own_x[r] + place * 128, scale[r] = own_scales[r] + place * 2;
      add_rows<GROUPS>(sums, chunk, table[unit - first], at, scale, pick_low, pick_high, lane);
      for (place += WARPS; place >= held;) place -= held;
      __syncwarp();
      ring.fill(next < end, c.codes + (i64)next * CODES, lane);
    }
#pragma unroll
    for (int r = 0; r < GROUPS; r++) {
      int row = 4 * r + (lane & 3);
      float* mine = sums_of_warps + ((slot * WARPS + warp) * c.count + row) * 64 + (lane >> 2);
      if (row < c.count)
#pragma unroll
        for (int m = 0; m < 4; m++) mine[m * 16] = sums.of[r][m][0], mine[m * 16 + 8] = sums.of[r][m][1];
    }
  }
  __syncthreads();
  int each = c.count * 64;
  for (int i = thread; i < slots * each; i += THREADS) {
    int slot = i / each, of = i - slot * each;
    float total = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) total += sums_of_warps[(slot * WARPS + w) * each + of];
    int p = first / c.chunks + slot, row = of / 64;
    i64 at = (i64)row * c.panels * 64 + p * 64 + of % 64;
    if (c.out) {
      total = rounded(total);
      // A warp's 32 outputs are a group of the next product's inputs.
      if (c.quantise) total = fake_fp8(total, fp8_scale(warp_max(size_of(total))));
      c.out[at] = (u16)bfloat_pair(total, 0.f);
    }
    else c.out_parts[(i64)(block - p * c.chunks / c.share) * c.count * c.panels * 64 + at] = total;
  }
}

// For up to four rows or eight, with five, four or three chunks of a warp on their way: more rows need room for inputs.
extern "C" __global__ void __launch_bounds__(THREADS, 1) rows_4_5(const __grid_constant__ Call c) { rows_product<ROWS, 1, 5>(c); }
extern "C" __global__ void __launch_bounds__(THREADS, 1) rows_8_4(const __grid_constant__ Call c) { rows_product<ROWS, 2, 4>(c); }
extern "C" __global__ void __launch_bounds__(THREADS, 1) rows_8_3(const __grid_constant__ Call c) { rows_product<ROWS, 2, 3>(c); }
extern "C" __global__ void __launch_bounds__(THREADS, 1) streams_4_5(const __grid_constant__ Call c) { rows_product<STREAMS, 1, 5>(c); }
extern "C" __global__ void __launch_bounds__(THREADS, 1) streams_8_4(const __grid_constant__ Call c) { rows_product<STREAMS, 2, 4>(c); }
extern "C" __global__ void __launch_bounds__(THREADS, 1) streams_8_3(const __grid_constant__ Call c) { rows_product<STREAMS, 2, 3>(c); }

// What stands between two products: of each row the rank, a window entry, and the coefficients of its streams, a block each.
extern "C" __global__ void __launch_bounds__(THREADS) finish_rows(const __grid_constant__ Call c) {
  extern __shared__ u8 raw[];
  float* room = (float*)raw;
  float* scales = room + 256;
  u8* x = (u8*)(scales + c.inputs / 32);
  int thread = threadIdx.x, part = blockIdx.x / c.count, row = blockIdx.x - part * c.count;
  float4 norm[PART_STEPS] = {};
#pragma unroll
  for (int i = 0; i < PART_STEPS; i++) {
    int at = 4 * (thread + ROW_THREADS * i);
    if (part == 0 && at < c.inputs) norm[i] = __ldg((const float4*)(c.norm + at));
  }
  let_next();
  wait_for_launch();
  if (part == 0) inputs_from_parts(c, row, norm, x, scales, room, thread, true, [] {});
  else if (part == 1) write_entry(c, row, room, thread);
  else {
    Streams s = row_of(c.streams, row);
    part_sums(s, room + (thread >> 5) * 32, thread >> 5, 8, thread & 31);
    __syncthreads();
    if (thread < 32) coefficients(s, room, 8, thread);
  }
}
