// One row times stored FP4 and FP8 weights at the rate of memory, for Hopper (sm_90a): pieces of several kernels.
//
// A warp reads chunks of panels (64 outputs; `panels.py`) through a ring of its own in shared memory: no warp waits for another. Weights do
// not depend on the launch before, so rings are filled before it has ended. Products are exact in bfloat16, sums float32. Knows no
// operator.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;

static const int ROW_THREADS = 256;   // that norm and quantise a row
static const int CODES = 4096;        // bytes of a chunk: 64 outputs x 128 FP4 or 64 FP8 inputs
static const int FP4_SCALES = 256;    // bytes of a chunk of FP4

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// Barriers in shared memory, and copies to it.
__device__ __forceinline__ void barrier_init(u32 at, int count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(at), "r"(count));
}
__device__ __forceinline__ void arrive(u32 at) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(at) : "memory");
}
__device__ __forceinline__ void wait(u32 at, int parity) {
  asm volatile(
      "{\n.reg .pred p;\nAGAIN:\nmbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n@p bra DONE;\nbra AGAIN;\nDONE:\n}\n" ::"r"(at),
      "r"(parity)
      : "memory");
}
// 16 bytes, past the cache of a multiprocessor.
__device__ __forceinline__ void copy_unit(u8* to, const void* from, bool real) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(real ? 16 : 0) : "memory");
}
// The same for weights, which nobody reads again soon: they leave L2 before code and rows do. `to` is an address in shared memory that no
// compiler can see to be the same for all lanes plus a lane's own part (`own_address`): some encode a policy beside such a sum wrongly.
template <int AT = 0> __device__ __forceinline__ void copy_once(u32 to, const void* from) {
  const unsigned long long evict_first = 0x12F0000000000000ull;  // what `createpolicy.fractional.L2::evict_first`, 1.0, gives
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0 + %3], [%1 + %3], 16, %2;" ::"r"(to), "l"(from), "l"(evict_first), "n"(AT)
               : "memory");
}
// A warp's address, the same in all lanes, as a value that lanes hand to each other.
__device__ __forceinline__ u32 own_address(const void* p) { return __shfl_sync(0xFFFFFFFF, shared_address(p), 0); }
// A lane's 16 bytes of each 512 bytes of a chunk.
__device__ __forceinline__ void copy_chunk(u32 to, const u8* from) {
  copy_once<0>(to, from), copy_once<512>(to, from), copy_once<1024>(to, from), copy_once<1536>(to, from);
  copy_once<2048>(to, from), copy_once<2560>(to, from), copy_once<3072>(to, from), copy_once<3584>(to, from);
}
__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT> __device__ __forceinline__ void copies_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory"); }
__device__ __forceinline__ void group_barrier(int name, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory");
}
__device__ __forceinline__ void barriers_ready() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// The launch before, the launch after, and other blocks of this one.
__device__ __forceinline__ void wait_for_launch() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void let_next() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ __forceinline__ u32 seen(const u32* p) {
  u32 value;
  asm volatile("ld.acquire.gpu.u32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");
  return value;
}
__device__ __forceinline__ void publish(u32* p, u32 by) {
  asm volatile("red.release.gpu.add.u32 [%0], %1;" ::"l"(p), "r"(by) : "memory");
}

// Products of a warpgroup: what they read is written, they are on their way, all but LEFT of them are done.
__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_end() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT> __device__ __forceinline__ void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

// Numbers.
__device__ __forceinline__ float low_of(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_of(u32 pair) { return __uint_as_float(pair & 0xFFFF0000u); }
__device__ __forceinline__ u32 bfloat_pair(float low, float high) {
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
__device__ __forceinline__ float rounded(float x) { return low_of(bfloat_pair(x, 0.f)); }
__device__ __forceinline__ u32 times(u32 a, u32 b) {
  u32 d;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
__device__ __forceinline__ float power2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ u32 warp_max(u32 x) {
  u32 y;
  asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(y) : "r"(x));
  return y;
}
__device__ __forceinline__ u32 warp_min(u32 x) {
  u32 y;
  asm volatile("redux.sync.min.u32 %0, %1, 0xffffffff;" : "=r"(y) : "r"(x));
  return y;
}
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int by = 16; by; by >>= 1) x += __shfl_xor_sync(0xFFFFFFFF, x, by);
  return x;
}
__device__ __forceinline__ u32 size_of(float x) { return __float_as_uint(x) & 0x7FFFFFFF; }
// A group's largest size (bits) -> its power-of-two scale: 1e-4 at least, infinity where a value is not finite.
__device__ __forceinline__ float fp8_scale(u32 largest) {
  float raised = (__uint_as_float(max(largest, 0x38D1B717u)) * 0.002232142857142857f) * 1.9999998807907104f;
  return __uint_as_float(__float_as_uint(raised) & 0x7F800000);
}
__device__ __forceinline__ float power_reciprocal(float scale) {
  int exponent = 254 - ((__float_as_uint(scale) >> 23) & 255);
  return __uint_as_float((u32)max(exponent, 0) << 23);
}
// |value| -> E4M3's nearest, ties to even; and its code.
__device__ __forceinline__ float e4m3_value(float value, u32& code) {
  u32 magic = (__float_as_uint(value > 0.015625f ? value : 0.015625f) & 0x7F800000) + (20 << 23);
  float shifted = value + __uint_as_float(magic);
  code = (__float_as_uint(shifted) & 31) + 8 * ((magic >> 23) - (127 + 20 - 6));
  return shifted - __uint_as_float(magic);
}
__device__ __forceinline__ float fake_fp8(float x, float scale) {
  u32 code;
  float value = e4m3_value(fabsf(x) * power_reciprocal(scale), code);
  return (x < 0.f ? -value : value) * scale;
}

// The two E4M3 values nearest (at most 448 in size), ties to even, as numbers.
__device__ __forceinline__ float2 nearest_fp8(float first, float second) {
  unsigned short codes;
  u32 halves;
  float2 out;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(second), "f"(first));
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(codes));
  asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %2;\ncvt.f32.f16 %0, a;\ncvt.f32.f16 %1, b;\n}" : "=f"(out.x), "=f"(out.y) : "r"(halves));
  return out;
}

// The same as halves.
__device__ __forceinline__ u32 nearest_halves(float first, float second) {
  unsigned short codes;
  u32 halves;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(second), "f"(first));
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(codes));
  return halves;
}

// Weights' codes to bfloat16 pairs: bits of FP8 read as value * 2^-120.
__device__ __forceinline__ void expand_fp8(u32 w, const u32 (&factor)[2], u32 (&out)[2]) {
  out[0] = times(((w << 4) & 0x07F007F0u) | ((w << 8) & 0x80008000u), factor[0]);
  out[1] = times(((w >> 4) & 0x07F007F0u) | (w & 0x80008000u), factor[1]);
}
// Byte `run` of the exponents as a pair of powers of two.
__device__ __forceinline__ u32 factor_of(u32 exponents, int run) {
  return __byte_perm(exponents, 0, 0x0404 | (run << 4) | (run << 12)) >> 1;
}
__device__ __forceinline__ void product_16(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ uint4 shared_words(const u8* at) { return *(const uint4*)at; }

// A panel's 64 sums of a warp: outputs 16 m + g and 8 more lie in lanes 4 g, at [m][0] and [m][2].
typedef float Sums[4][4];

// Adds a chunk of FP8 (64 inputs at `x`, bfloat16; `pairs` its four exponents). Two tiles of 16 outputs go side by side, so that a
// product seldom waits for the one before.
__device__ __forceinline__ void add_fp8(Sums& sums, const u8* stage, u32 pairs, const u8* x, bool paired, int lane) {
  int g = lane >> 2, t = lane & 3;
  uint4 in[2];
#pragma unroll
  for (int r = 0; r < 2; r++) in[r] = g ? make_uint4(0, 0, 0, 0) : shared_words(x + r * 64 + t * 16);
  // Exponents belong to outputs of one parity (gates, ups), or to the first and second 32 outputs.
  u32 both = pairs + 0x78787878;
#pragma unroll
  for (int m = 0; m < 4; m += 2) {
    u32 own = both >> ((paired ? g & 1 : m / 2) * 16), f[2] = {factor_of(own, 0), factor_of(own, 1)}, a[2][2][4];
    uint4 top[2], low[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      int row = (m + i) * 16 + g;
      top[i] = shared_words(stage + row * 64 + t * 16), low[i] = shared_words(stage + (row + 8) * 64 + t * 16);
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
#pragma unroll
      for (int i = 0; i < 2; i++) {
        u32 o[4][2];
        expand_fp8(h ? top[i].z : top[i].x, f, o[0]), expand_fp8(h ? low[i].z : low[i].x, f, o[1]);
        expand_fp8(h ? top[i].w : top[i].y, f, o[2]), expand_fp8(h ? low[i].w : low[i].y, f, o[3]);
#pragma unroll
        for (int q = 0; q < 4; q++) a[i][0][q] = o[q][0], a[i][1][q] = o[q][1];
      }
#pragma unroll
      for (int r = 0; r < 2; r++)
#pragma unroll
        for (int i = 0; i < 2; i++)
          product_16(sums[m + i], a[i][r][0], a[i][r][1], a[i][r][2], a[i][r][3], h ? in[r].z : in[r].x, h ? in[r].w : in[r].y);
    }
  }
}
__device__ __forceinline__ void keep(float* to, const Sums& sums, int lane) {
  if (lane & 3) return;
#pragma unroll
  for (int m = 0; m < 4; m++) to[m * 16 + (lane >> 2)] = sums[m][0], to[m * 16 + (lane >> 2) + 8] = sums[m][2];
}

// The scale of a group of 32 inputs, four a lane.
__device__ __forceinline__ float scale_of_group(const float (&v)[4]) {
  u32 largest = max(max(size_of(v[0]), size_of(v[1])), max(size_of(v[2]), size_of(v[3])));
#pragma unroll
  for (int by = 4; by; by >>= 1) largest = max(largest, __shfl_xor_sync(0xFFFFFFFF, largest, by));
  return fp8_scale(largest);
}
// Four inputs FP8-quantised: as bfloat16, and as halves that are to be multiplied by the scale.
__device__ __forceinline__ uint2 quantised_four(const float (&v)[4], float scale) {
  float back = power_reciprocal(scale);
  float2 first = nearest_fp8(v[0] * back, v[1] * back), second = nearest_fp8(v[2] * back, v[3] * back);
  return make_uint2(bfloat_pair(first.x * scale, first.y * scale), bfloat_pair(second.x * scale, second.y * scale));
}
__device__ __forceinline__ uint2 halves_of_four(const float (&v)[4], float scale) {
  float back = power_reciprocal(scale);
  return make_uint2(nearest_halves(v[0] * back, v[1] * back), nearest_halves(v[2] * back, v[3] * back));
}
__device__ __forceinline__ void four_of(uint2 pairs, float (&v)[4]) {
  v[0] = low_of(pairs.x), v[1] = high_of(pairs.x), v[2] = low_of(pairs.y), v[3] = high_of(pairs.y);
}

// A warp's chunks on their way: `STAGES` of `BYTES` in shared memory, which its lanes fill and read by themselves.
template <int STAGES, int BYTES> struct Ring {
  u8* data;
  int stage, next;
  __device__ __forceinline__ void open(u8* rings, int warp) { data = rings + warp * STAGES * BYTES, stage = next = 0; }
  // Begins to read a chunk, or nothing where there is none: every turn counts. A stage is filled again when its chunk has been read and
  // `arrived` has been called once more.
  __device__ __forceinline__ void fill(bool there, const u8* codes, const u8* scales, int lane) {
    u32 to = own_address(data + next * BYTES) + lane * 16;
    if (there) {
#pragma unroll
      for (int i = 0; i < CODES / 512; i++) copy_once(to + i * 512, codes + i * 512 + lane * 16);
      if (scales && lane < FP4_SCALES / 16) copy_once(to + CODES, scales + lane * 16);
    }
    copies_commit();
    if (++next == STAGES) next = 0;
  }
  __device__ __forceinline__ const u8* arrived() {
    copies_wait<STAGES - 2>();
    __syncwarp();
    const u8* at = data + stage * BYTES;
    if (++stage == STAGES) stage = 0;
    return at;
  }
};
