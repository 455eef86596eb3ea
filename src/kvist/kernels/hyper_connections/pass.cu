// Hyper-connections of two or more rows: streams left and entered in one pass over them, for Hopper (sm_90a). Needs `device/stream.cuh`.
//
// A warp owns 16 rows and 32 channels of all streams at a time, in the registers of a product's left operand: no value changes
// its thread between memory, mixing and product. What a thread will mix is on its way to a place of its own in shared memory two steps
// ahead; the weight's part for a step comes once a block. The float32 weight comes cut into three terms of eight bits, which hold
// all 24, in the order of a product's right operand; rows are exact in bfloat16. Each part of the channels writes its own sums, which
// another launch adds (`finish.cu`). Knows no layers.

static const int ROW_WARPS = 4;     // of a block, side by side in rows; where rows are many, two of them stand side by side in channels
static const int ROW_STAGES = 3;    // of 2 rows x 5 units of 16 bytes a thread
static const int ROW_UNITS = 10;
static const int PART_UNITS = 288;  // of a stream's weight for 32 channels

struct Call {
  const u16* y;  // null: the streams are the input already
  const u16* x;
  const float* pre;
  const float* post;
  const float* comb;
  const uint4* weight;  // [D / 32, 4 streams, 3 x 8 logits, 3 terms, 32 lanes, 8 channels], bfloat16
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

// Eight channels of four streams of one row, as pairs.
struct Row {
  u32 x[4][4], y[4];
};

struct Mix {
  float comb[4][4], post[4], pre[4];
  __device__ __forceinline__ void load(const Call& c, i64 n) {
#pragma unroll
    for (int i = 0; i < 16; i++) comb[i / 4][i % 4] = c.y ? c.comb[n * 16 + i] : 0.f;
#pragma unroll
    for (int i = 0; i < 4; i++) post[i] = c.y ? c.post[n * 4 + i] : 0.f, pre[i] = c.pre[n * 4 + i];
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
template <int COLUMNS> __device__ __forceinline__ void fetch_weights(uint4* to, const Call& c, int step) {
  const uint4* at = c.weight + (i64)step * (COLUMNS * 4 * PART_UNITS);
#pragma unroll
  for (int i = 0; i < 4 * PART_UNITS / (32 * ROW_WARPS); i++) {
    int unit = i * 32 * ROW_WARPS * COLUMNS + threadIdx.x;
    copy_unit((u8*)(to + unit), at + unit, true);
  }
}
// A thread's own units of two rows: nobody else reads them.
template <bool LEAVE, int COLUMNS> __device__ __forceinline__ void fetch_rows(uint4* to, const Call& c, const i64 (&n)[2], int d) {
  static const int THREADS = 32 * ROW_WARPS * COLUMNS;
#pragma unroll
  for (int r = 0; r < 2; r++) {
#pragma unroll
    for (int s = 0; s < 4; s++) fetch_unit<COLUMNS>(to + (r * 5 + s) * THREADS, c.x + (n[r] * 4 + s) * c.width + d);
    if (LEAVE) fetch_unit<COLUMNS>(to + (r * 5 + 4) * THREADS, c.y + n[r] * c.width + d);
  }
}

template <bool LEAVE, int COLUMNS> __device__ __forceinline__ void pass(const Call& c) {
  static const int THREADS = 32 * ROW_WARPS * COLUMNS, WEIGHT_UNITS = COLUMNS * 4 * PART_UNITS;
  extern __shared__ u8 raw[];
  uint4 *weights = (uint4*)raw, *own = weights + 2 * WEIGHT_UNITS + threadIdx.x;
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, column = warp % COLUMNS, blocks = c.splits / COLUMNS;
  int at = blockIdx.x % blocks * c.steps, d = (at * COLUMNS + column) * 32 + (lane & 3) * 8;
  int first = (blockIdx.x / blocks * ROW_WARPS + warp / COLUMNS) * 16 + (lane >> 2);
  i64 n[2];
  bool there[2], idle = first - (lane >> 2) >= c.rows;  // idle: a warp without rows only brings weights
#pragma unroll
  for (int r = 0; r < 2; r++) there[r] = first + 8 * r < c.rows, n[r] = min(first + 8 * r, c.rows - 1);
  fetch_weights<COLUMNS>(weights, c, at);
  wait_for_launch();
  let_next();
  if (!idle) fetch_rows<LEAVE, COLUMNS>(own, c, n, d);
  copies_commit();
  if (!idle && c.steps > 1) fetch_rows<LEAVE, COLUMNS>(own + ROW_UNITS * THREADS, c, n, d + 32 * COLUMNS);
  copies_commit();
  Mix mix[2];
  mix[0].load(c, n[0]);
  mix[1].load(c, n[1]);
  // Sums by terms of the weight: a product seldom waits for the one before.
  float acc[3][3][4] = {}, length[2] = {0.f, 0.f}, collapsed[2] = {0.f, 0.f};
  Row rows[2];
  int slot = 0;
#pragma unroll 1
  for (int step = 0; step < c.steps; step++, d += 32 * COLUMNS) {
    // All but the next step's rows are here; nobody reads the step before's weights any more.
    copies_wait<1>();
    __syncthreads();
    if (step + 1 < c.steps) fetch_weights<COLUMNS>(weights + ((step + 1) & 1) * WEIGHT_UNITS, c, at + step + 1);
    copies_commit();
    int ahead = slot + 2 >= ROW_STAGES ? slot + 2 - ROW_STAGES : slot + 2;
    if (!idle && step + 2 < c.steps) fetch_rows<LEAVE, COLUMNS>(own + ahead * (ROW_UNITS * THREADS), c, n, d + 64 * COLUMNS);
    copies_commit();
    if (idle) continue;
#pragma unroll
    for (int r = 0; r < 2; r++) {
#pragma unroll
      for (int s = 0; s < 4; s++) *(uint4*)rows[r].x[s] = own[(slot * ROW_UNITS + r * 5 + s) * THREADS];
      if (LEAVE) *(uint4*)rows[r].y = own[(slot * ROW_UNITS + r * 5 + 4) * THREADS];
      turn<LEAVE>(rows[r], mix[r], c, n[r], d, there[r], length[r], collapsed[r]);
    }
    if (++slot == ROW_STAGES) slot = 0;
    const uint4* now = weights + (step & 1) * WEIGHT_UNITS + column * (4 * PART_UNITS) + lane;
#pragma unroll
    for (int s = 0; s < 4; s++) {
#pragma unroll
      for (int term = 0; term < 3; term++)
#pragma unroll
        for (int j = 0; j < 3; j++) {
          uint4 b = now[s * PART_UNITS + (j * 3 + term) * 32];
          product_16(acc[term][j], rows[0].x[s][0], rows[1].x[s][0], rows[0].x[s][1], rows[1].x[s][1], b.x, b.y);
          product_16(acc[term][j], rows[0].x[s][2], rows[1].x[s][2], rows[0].x[s][3], rows[1].x[s][3], b.z, b.w);
        }
    }
  }
  int part = blockIdx.x % blocks * COLUMNS + column;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    length[r] = row_sum(length[r]);
    collapsed[r] = row_sum(collapsed[r]);
    if (!there[r]) continue;
    float* to = c.parts + (n[r] * c.splits + part) * 32 + (lane & 3) * 2;
#pragma unroll
    for (int j = 0; j < 3; j++) {
      float2 sum = make_float2(acc[0][j][2 * r], acc[0][j][2 * r + 1]);
#pragma unroll
      for (int term = 1; term < 3; term++) sum.x += acc[term][j][2 * r], sum.y += acc[term][j][2 * r + 1];
      *(float2*)(to + j * 8) = sum;
    }
    if ((lane & 3) == 0) {
      to[24] = length[r];
      c.squares[n[r] * c.splits + part] = collapsed[r];
    }
  }
}

extern "C" __global__ void __launch_bounds__(128, 2) leave_and_enter(const __grid_constant__ Call c) { pass<true, 1>(c); }
extern "C" __global__ void __launch_bounds__(128, 2) enter(const __grid_constant__ Call c) { pass<false, 1>(c); }
extern "C" __global__ void __launch_bounds__(256, 1) leave_and_enter_wide(const __grid_constant__ Call c) { pass<true, 2>(c); }
extern "C" __global__ void __launch_bounds__(256, 1) enter_wide(const __grid_constant__ Call c) { pass<false, 2>(c); }
