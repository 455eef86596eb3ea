// Hyper-connections of two or more rows: streams left and entered in one pass over them, for Hopper (sm_90a).
//
// A warp owns 16 rows and 32 channels of all streams at a time, in the registers of a product's left operand: no value changes
// its thread between memory, mixing and product. The float32 weight comes cut into three terms of eight bits, which hold all 24, in the
// order of a product's right operand; rows are exact in bfloat16. Each part of the channels writes its own sums, which another launch adds. Knows no layers.

typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;

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
  int rows, width, splits, steps, row_warps;
};

__device__ __forceinline__ float low_of(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_of(u32 pair) { return __uint_as_float(pair & 0xFFFF0000); }
__device__ __forceinline__ u32 bfloat_pair(float low, float high) {
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
__device__ __forceinline__ void product_16(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ float row_sum(float x) {
  x += __shfl_xor_sync(0xFFFFFFFF, x, 1);
  return x + __shfl_xor_sync(0xFFFFFFFF, x, 2);
}

// Eight channels of four streams of one row, as pairs.
struct Row {
  u32 x[4][4], y[4];
};

template <bool LEAVE> __device__ __forceinline__ void load(Row& row, const Call& c, i64 n, int d) {
#pragma unroll
  for (int s = 0; s < 4; s++) *(uint4*)row.x[s] = __ldg((const uint4*)(c.x + (n * 4 + s) * c.width + d));
  if (LEAVE) *(uint4*)row.y = __ldg((const uint4*)(c.y + n * c.width + d));
}

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

// A lane's part of the weight for one stream and 32 channels: right operands of two products for each eight logits and term.
struct Part {
  uint4 w[3][3];
  __device__ __forceinline__ void load(const Call& c, int lane, int stream, int step) {
    const uint4* at = c.weight + ((i64)step * 4 + stream) * 288 + lane;
#pragma unroll
    for (int i = 0; i < 9; i++) w[i / 3][i % 3] = __ldg(at + i * 32);
  }
};

template <bool LEAVE> __device__ __forceinline__ void pass(const Call& c) {
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2;
  int columns = 4 / c.row_warps;  // warps side by side in channels
  int part = blockIdx.x % (c.splits / columns) * columns + warp % columns;
  int first = (blockIdx.x / (c.splits / columns) * c.row_warps + warp / columns) * 16 + g;
  i64 n[2];
  bool there[2];
#pragma unroll
  for (int r = 0; r < 2; r++) there[r] = first + 8 * r < c.rows, n[r] = min(first + 8 * r, c.rows - 1);
  int at = part * c.steps, d = at * 32 + (lane & 3) * 8;
  Part next;
  next.load(c, lane, 0, at);
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  Mix mix[2];
  mix[0].load(c, n[0]);
  mix[1].load(c, n[1]);
  float acc[3][4] = {}, length[2] = {0.f, 0.f}, collapsed[2] = {0.f, 0.f};
  Row rows[2];
  load<LEAVE>(rows[0], c, n[0], d);
  load<LEAVE>(rows[1], c, n[1], d);
  for (int step = 0; step < c.steps; step++, d += 32) {
#pragma unroll
    for (int r = 0; r < 2; r++) turn<LEAVE>(rows[r], mix[r], c, n[r], d, there[r], length[r], collapsed[r]);
#pragma unroll
    for (int s = 0; s < 4; s++) {
      // The next stream's part is on its way while this one's is multiplied.
      Part now = next;
      if (s < 3) next.load(c, lane, s + 1, at + step);
      else if (step + 1 < c.steps) next.load(c, lane, 0, at + step + 1);
#pragma unroll
      for (int term = 0; term < 3; term++)
#pragma unroll
        for (int j = 0; j < 3; j++) {
          uint4 b = now.w[j][term];
          product_16(acc[j], rows[0].x[s][0], rows[1].x[s][0], rows[0].x[s][1], rows[1].x[s][1], b.x, b.y);
          product_16(acc[j], rows[0].x[s][2], rows[1].x[s][2], rows[0].x[s][3], rows[1].x[s][3], b.z, b.w);
        }
    }
    if (step + 1 < c.steps) {
      load<LEAVE>(rows[0], c, n[0], d + 32);
      load<LEAVE>(rows[1], c, n[1], d + 32);
    }
  }
#pragma unroll
  for (int r = 0; r < 2; r++) {
    length[r] = row_sum(length[r]);
    collapsed[r] = row_sum(collapsed[r]);
    if (!there[r]) continue;
    float* to = c.parts + (n[r] * c.splits + part) * 32;
#pragma unroll
    for (int j = 0; j < 3; j++) *(float2*)(to + j * 8 + (lane & 3) * 2) = make_float2(acc[j][2 * r], acc[j][2 * r + 1]);
    if ((lane & 3) == 0) {
      to[24] = length[r];
      c.squares[n[r] * c.splits + part] = collapsed[r];
    }
  }
}

extern "C" __global__ void __launch_bounds__(128, 2) leave_and_enter(const __grid_constant__ Call c) {
  pass<true>(c);
}
extern "C" __global__ void __launch_bounds__(128, 2) enter(const __grid_constant__ Call c) { pass<false>(c); }
