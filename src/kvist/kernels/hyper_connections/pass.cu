// Hyper-connections of two or more rows: streams left and entered in one pass over them, for Hopper (sm_90a). Needs `device/stream.cuh`.
//
// A warp owns 8 or 16 rows and 32 channels of all streams at a time, in the registers of a product's right operand: no value changes
// its thread between memory, mixing and product. What a thread will mix is on its way to a place of its own in shared memory two steps
// ahead; the weight's part for a step comes once a block. The float32 weight comes cut into three terms of eight bits, which hold
// all 24, in the order of a product's left operand; rows are exact in bfloat16. Each part of the channels writes its own sums, which
// another launch adds (`finish.cu`). Knows no layers.

static const int BLOCK_ROWS = 64;   // by warps side by side in rows; where rows are many, two such columns stand side by side in channels
static const int ROW_STAGES = 3;    // of 5 units of 16 bytes for each of a thread's rows
static const int PART_UNITS = 288;  // of a stream's weight for 32 channels

struct Call {
  const u16* y;  // null: the streams are the input already
  const u16* x;
  const float* pre;
  const float* post;
  const float* comb;
  const uint4* weight;  // [D / 32, 4 streams, 9 units, 32 lanes, 8], bfloat16: `cut_weight`
  u16* streams;
  u16* h;
  float* parts;    // [N, parts, 32]: 24 logits, the streams' squares
  float* squares;  // [N, parts] of the collapse
  int rows, width, splits, steps;
};

__device__ __forceinline__ float row_sum(float x) {
  x += __shfl_xor_sync(0xFFFFFFFF, x, 1);
  return x + __shfl_xor_sync(0xFFFFFFFF, x, 2);
}

// Nine eights of a row's logits: three terms of each eight. Eights 2 i and 2 i + 1 are [i][0, 1] and [i][2, 3] of rows 2 t and 2 t + 1, the
// last one's first and second half of channels [4][0, 1] and [5][2, 3]. What else these two hold means nothing.
typedef float Products[6][4];

// Eight channels of four streams of one row, as pairs.
struct Row {
  u32 x[4][4], y[4];
};

struct Mix {
  float comb[4][4], post[4], pre[4];
  __device__ __forceinline__ void load(const Call& c, i64 n) {
    float4 none = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int i = 0; i < 4; i++) *(float4*)comb[i] = c.y ? ((const float4*)c.comb)[n * 4 + i] : none;
    *(float4*)post = c.y ? ((const float4*)c.post)[n] : none, *(float4*)pre = ((const float4*)c.pre)[n];
  }
};

// Mixes a row in place, writes streams and collapse, adds squares.
template <bool LEAVE>
__device__ __forceinline__ void turn(Row& row, const Mix& mix, const Call& c, i64 n, int d, bool there, float& length,
                                     float& collapsed) {
  u32 one[4];
#pragma unroll
  for (int p = 0; p < 4; p++) {
    float old[4][2], sum[2] = {0.f, 0.f};
#pragma unroll
    for (int s = 0; s < 4; s++) old[s][0] = low_of(row.x[s][p]), old[s][1] = high_of(row.x[s][p]);
#pragma unroll
    for (int s = 0; s < 4; s++) {
      float now[2] = {old[s][0], old[s][1]};
      if (LEAVE) {
        float y[2] = {low_of(row.y[p]), high_of(row.y[p])};
#pragma unroll
        for (int e = 0; e < 2; e++) {
          float mixed = mix.comb[0][s] * old[0][e] + mix.comb[1][s] * old[1][e] + mix.comb[2][s] * old[2][e];
          now[e] = mix.post[s] * y[e] + (mixed + mix.comb[3][s] * old[3][e]);
        }
        u32 pair = bfloat_pair(now[0], now[1]);
        row.x[s][p] = pair;
        now[0] = low_of(pair), now[1] = high_of(pair);
      }
#pragma unroll
      for (int e = 0; e < 2; e++) {
        length += now[e] * now[e];
        sum[e] += mix.pre[s] * now[e];
      }
    }
    one[p] = bfloat_pair(sum[0], sum[1]);
    collapsed += low_of(one[p]) * low_of(one[p]) + high_of(one[p]) * high_of(one[p]);
  }
  if (!there) return;
  if (LEAVE) {
#pragma unroll
    for (int s = 0; s < 4; s++) *(uint4*)(c.streams + (n * 4 + s) * c.width + d) = *(uint4*)row.x[s];
  }
  *(uint4*)(c.h + n * c.width + d) = *(uint4*)one;
}

// 16 bytes, and what follows them into L2: the next step wants it, and memory gives long pieces more willingly than short ones.
template <int COLUMNS> __device__ __forceinline__ void fetch_unit(uint4* to, const void* from) {
  if (COLUMNS == 1)
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
  else
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}
// A step's weights for all warps of a block.
template <int COLUMNS, int THREADS> __device__ __forceinline__ void fetch_weights(uint4* to, const Call& c, int step) {
  const uint4* at = c.weight + (i64)step * (COLUMNS * 4 * PART_UNITS);
#pragma unroll
  for (int i = 0; i < COLUMNS * 4 * PART_UNITS; i += THREADS)
    if (i + THREADS <= COLUMNS * 4 * PART_UNITS || i + threadIdx.x < COLUMNS * 4 * PART_UNITS)
      copy_unit((u8*)(to + i + threadIdx.x), at + i + threadIdx.x, true);
}
// A thread's own units of its rows: nobody else reads them.
template <bool LEAVE, int COLUMNS, int ROWS, int THREADS>
__device__ __forceinline__ void fetch_rows(uint4* to, const Call& c, const i64 (&n)[ROWS], int d) {
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
#pragma unroll
    for (int s = 0; s < 4; s++) fetch_unit<COLUMNS>(to + (r * 5 + s) * THREADS, c.x + (n[r] * 4 + s) * c.width + d);
    if (LEAVE) fetch_unit<COLUMNS>(to + (r * 5 + 4) * THREADS, c.y + n[r] * c.width + d);
  }
}

template <bool LEAVE, int COLUMNS, int ROWS> __device__ __forceinline__ void pass(const Call& c) {
  static const int ROW_WARPS = BLOCK_ROWS / (8 * ROWS), THREADS = 32 * ROW_WARPS * COLUMNS, ROW_UNITS = 5 * ROWS, WEIGHT_UNITS = COLUMNS * 4 * PART_UNITS;
  extern __shared__ u8 raw[];
  uint4 *weights = (uint4*)raw, *own = weights + 2 * WEIGHT_UNITS + threadIdx.x;
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, column = warp % COLUMNS, blocks = c.splits / COLUMNS;
  int at = blockIdx.x % blocks * c.steps, d = (at * COLUMNS + column) * 32 + (lane & 3) * 8;
  int first = (blockIdx.x / blocks * ROW_WARPS + warp / COLUMNS) * (8 * ROWS) + (lane >> 2);
  i64 n[ROWS];
  bool there[ROWS], idle = first - (lane >> 2) >= c.rows;  // idle: a warp without rows only brings weights
#pragma unroll
  for (int r = 0; r < ROWS; r++) there[r] = first + 8 * r < c.rows, n[r] = min(first + 8 * r, c.rows - 1);
  fetch_weights<COLUMNS, THREADS>(weights, c, at);
  wait_for_launch();
  let_next();
  if (!idle) fetch_rows<LEAVE, COLUMNS, ROWS, THREADS>(own, c, n, d);
  copies_commit();
  if (!idle && c.steps > 1) fetch_rows<LEAVE, COLUMNS, ROWS, THREADS>(own + ROW_UNITS * THREADS, c, n, d + 32 * COLUMNS);
  copies_commit();
  Mix mix[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; r++) mix[r].load(c, n[r]);
  Products acc[ROWS] = {};
  float length[ROWS] = {}, collapsed[ROWS] = {};
  Row rows[ROWS];
  int slot = 0;
#pragma unroll 1
  for (int step = 0; step < c.steps; step++, d += 32 * COLUMNS) {
    // All but the next step's rows are here; nobody reads the step before's weights any more.
    copies_wait<1>();
    __syncthreads();
    if (step + 1 < c.steps) fetch_weights<COLUMNS, THREADS>(weights + ((step + 1) & 1) * WEIGHT_UNITS, c, at + step + 1);
    copies_commit();
    int ahead = slot + 2 >= ROW_STAGES ? slot + 2 - ROW_STAGES : slot + 2;
    if (!idle && step + 2 < c.steps) fetch_rows<LEAVE, COLUMNS, ROWS, THREADS>(own + ahead * (ROW_UNITS * THREADS), c, n, d + 64 * COLUMNS);
    copies_commit();
    if (idle) continue;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
#pragma unroll
      for (int s = 0; s < 4; s++) *(uint4*)rows[r].x[s] = own[(slot * ROW_UNITS + r * 5 + s) * THREADS];
      if (LEAVE) *(uint4*)rows[r].y = own[(slot * ROW_UNITS + r * 5 + 4) * THREADS];
      turn<LEAVE>(rows[r], mix[r], c, n[r], d, there[r], length[r], collapsed[r]);
    }
    if (++slot == ROW_STAGES) slot = 0;
    const uint4* now = weights + (step & 1) * WEIGHT_UNITS + column * (4 * PART_UNITS) + lane;
#pragma unroll
    for (int s = 0; s < 4; s++)
#pragma unroll
      for (int i = 0; i < 9; i++) {
        uint4 a = now[s * PART_UNITS + i * 32];
        int half = i == 8 ? 1 : i & 1;
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
          if (i == 8) product_16(acc[r][4], a.x, a.y, a.z, a.w, rows[r].x[s][0], rows[r].x[s][1]);
          product_16(acc[r][i == 8 ? 5 : i >> 1], a.x, a.y, a.z, a.w, rows[r].x[s][2 * half], rows[r].x[s][2 * half + 1]);
        }
      }
  }
  int part = blockIdx.x % blocks * COLUMNS + column;
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    length[r] = row_sum(length[r]);
    collapsed[r] = row_sum(collapsed[r]);
    // Here a lane has logits lane / 4 of each eight, of two rows.
#pragma unroll
    for (int e = 0; e < 2; e++) {
      i64 row = first - (lane >> 2) + 8 * r + (lane & 3) * 2 + e;
      if (row >= c.rows) continue;
      float* to = c.parts + (row * c.splits + part) * 32 + (lane >> 2);
      to[0] = acc[r][0][e] + acc[r][0][2 + e] + acc[r][1][e];
      to[8] = acc[r][1][2 + e] + acc[r][2][e] + acc[r][2][2 + e];
      to[16] = acc[r][3][e] + acc[r][3][2 + e] + (acc[r][4][e] + acc[r][5][2 + e]);
    }
    if (there[r] && (lane & 3) == 0) {
      c.parts[(n[r] * c.splits + part) * 32 + 24] = length[r];
      c.squares[n[r] * c.splits + part] = collapsed[r];
    }
  }
}

extern "C" __global__ void __launch_bounds__(256, 2) leave_and_enter_few(const __grid_constant__ Call c) { pass<true, 1, 1>(c); }
extern "C" __global__ void __launch_bounds__(256, 2) enter_few(const __grid_constant__ Call c) { pass<false, 1, 1>(c); }
extern "C" __global__ void __launch_bounds__(128, 2) leave_and_enter(const __grid_constant__ Call c) { pass<true, 1, 2>(c); }
extern "C" __global__ void __launch_bounds__(128, 2) enter(const __grid_constant__ Call c) { pass<false, 1, 2>(c); }
extern "C" __global__ void __launch_bounds__(256, 1) leave_and_enter_wide(const __grid_constant__ Call c) { pass<true, 2, 2>(c); }
extern "C" __global__ void __launch_bounds__(256, 1) enter_wide(const __grid_constant__ Call c) { pass<false, 2, 2>(c); }
