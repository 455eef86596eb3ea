// Runs the package's CUDA sources on a processor, for tests: a block's threads are fibers that take turns at barriers.
//
// Owns what the sources use of CUDA (built-in types, shuffles, barriers) and what Hopper's matrix products and shared-memory barriers
// mean, as the PTX manual defines them. Products are finished when they are issued, so that missing waits do not show here.

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) alignas(n)

using std::max;
using std::min;
typedef unsigned long long wide_word;

struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct Place { unsigned x, y, z; };

static uint2 make_uint2(unsigned a, unsigned b) { return {a, b}; }
static uint4 make_uint4(unsigned a, unsigned b, unsigned c, unsigned d) { return {a, b, c, d}; }
static float2 make_float2(float a, float b) { return {a, b}; }
static float4 make_float4(float a, float b, float c, float d) { return {a, b, c, d}; }

// Fibers. ---------------------------------------------------------------------------------------------------------------------
static const int MOST_THREADS = 1024, MOST_CLUSTER = 16;  // blocks: of a cluster, which run side by side
static const size_t STACK_BYTES = 96 << 10;
static Place threadIdx, blockIdx, gridDim;
static int threads_of_block, blocks_of_cluster, fiber;
static ucontext_t scheduler, fibers[MOST_CLUSTER * MOST_THREADS];
static bool finished[MOST_CLUSTER * MOST_THREADS];
static long progress;  // barriers passed: without any for long, the block hangs
static std::function<void()> body;

static void take_turns() {
  int me = fiber;
  swapcontext(&fibers[me], &scheduler);
}
struct Gate {  // a barrier of threads
  int here = 0;
  unsigned passed = 0;
  unsigned enter(int count) {
    unsigned turn = passed;
    if (++here == count) {
      here = 0;
      passed++;
      progress++;
    }
    return turn;
  }
  void leave(unsigned turn) {
    while (passed == turn) take_turns();
  }
  void pass(int count) { leave(enter(count)); }
};
struct Arrivals {
  int expected = 0, left = 0, bytes = 0;
  unsigned phase = 0;
  void turn() {
    if (left == 0 && bytes == 0) left = expected, phase++, progress++;
  }
};
struct Block {
  Gate gates[16], warps[MOST_THREADS / 32];
  unsigned lane_words[MOST_THREADS], lane_fragments[MOST_THREADS][6];
  Arrivals arrivals[1 << 15];
  unsigned char* memory = (unsigned char*)aligned_alloc(1 << 18, 1 << 18);
};
static Block cluster[MOST_CLUSTER], *block;
static unsigned char* shared_memory;  // of the block whose thread runs
static Gate cluster_gate;
static unsigned cluster_turns[MOST_CLUSTER * MOST_THREADS];

static void enter() {
  body();
  finished[fiber] = true;
  progress++;
  swapcontext(&fibers[fiber], &scheduler);
}
// Blocks from `from` on. 0, or 1 if a block hangs.
static int run_blocks(int from, int blocks, int threads, int together, std::function<void()> kernel) {
  static char* stacks = (char*)malloc(MOST_CLUSTER * MOST_THREADS * STACK_BYTES);
  body = kernel;
  gridDim = {(unsigned)blocks, 1, 1};
  threads_of_block = threads;
  blocks_of_cluster = together;
  for (int first = from; first < blocks; first += together) {
    int all = together * threads;
    for (int f = 0; f < all; f++) {
      finished[f] = false;
      getcontext(&fibers[f]);
      fibers[f].uc_stack.ss_sp = stacks + f * STACK_BYTES;
      fibers[f].uc_stack.ss_size = STACK_BYTES;
      fibers[f].uc_link = nullptr;
      makecontext(&fibers[f], enter, 0);
    }
    int left = all;
    for (long idle = 0; left; idle++) {
      long before = progress;
      left = 0;
      for (fiber = 0; fiber < all; fiber++) {
        if (finished[fiber]) continue;
        threadIdx = {(unsigned)(fiber % threads), 0, 0};
        blockIdx = {(unsigned)(first + fiber / threads), 0, 0};
        block = &cluster[fiber / threads];
        shared_memory = block->memory;
        swapcontext(&scheduler, &fibers[fiber]);
        left += !finished[fiber];
      }
      if (progress != before) idle = 0;
      if (idle > 100) return 1;
    }
  }
  return 0;
}

static int lane_here() { return threadIdx.x & 31; }
static void __syncwarp() { block->warps[threadIdx.x >> 5].pass(32); }
static void __syncthreads() { block->gates[0].pass(threads_of_block); }
template <class T> T from_lane(T value, int lane) {
  unsigned word;
  memcpy(&word, &value, 4);
  block->lane_words[threadIdx.x] = word;
  __syncwarp();
  word = block->lane_words[(threadIdx.x & ~31) + (lane & 31)];
  __syncwarp();
  memcpy(&value, &word, 4);
  return value;
}
template <class T> T __shfl_sync(unsigned, T v, int lane) { return from_lane(v, lane); }
template <class T> T __shfl_xor_sync(unsigned, T v, int by) { return from_lane(v, lane_here() ^ by); }
template <class T> T __shfl_down_sync(unsigned, T v, int by) { return from_lane(v, min(lane_here() + by, 31)); }
static unsigned __ballot_sync(unsigned, int yes) {
  unsigned all = 0;
  block->lane_words[threadIdx.x] = yes != 0;
  __syncwarp();
  for (int i = 0; i < 32; i++) all |= block->lane_words[(threadIdx.x & ~31) + i] << i;
  __syncwarp();
  return all;
}
static unsigned __reduce_max_sync(unsigned mask, unsigned x) {
  for (int by = 16; by; by >>= 1) x = max(x, __shfl_xor_sync(mask, x, by));
  return x;
}
static unsigned __reduce_add_sync(unsigned mask, unsigned x) {
  for (int by = 16; by; by >>= 1) x += __shfl_xor_sync(mask, x, by);
  return x;
}
static int __syncthreads_or(int yes) {
  int any = 0;
  block->lane_words[threadIdx.x] = yes != 0;
  __syncthreads();
  for (int i = 0; i < threads_of_block; i++) any |= block->lane_words[i];
  __syncthreads();
  return any;
}
static int __all_sync(unsigned mask, int yes) { return __ballot_sync(mask, yes) == ~0u; }

// Words and numbers. ----------------------------------------------------------------------------------------------------------
template <class T> T __ldg(const T* p) { return *p; }
template <class T> T __ldcg(const T* p) { return *p; }
static void __threadfence() {}
static void __threadfence_block() {}
static void __nanosleep(unsigned) { take_turns(); }
template <class To, class From> To same_bits(From x) {
  To y;
  memcpy(&y, &x, 4);
  return y;
}
static float __uint_as_float(unsigned x) { return same_bits<float>(x); }
static float __int_as_float(int x) { return same_bits<float>(x); }
static int __float_as_int(float x) { return same_bits<int>(x); }
static unsigned __float_as_uint(float x) { return same_bits<unsigned>(x); }
static int __popc(unsigned x) { return __builtin_popcount(x); }
static int __clz(unsigned x) { return x ? __builtin_clz(x) : 32; }
static unsigned atomicAdd(unsigned* p, unsigned by) {
  unsigned old = *p;
  *p += by;
  return old;
}
static void atomicMax(int* p, int x) { *p = max(*p, x); }
static void atomicMax(unsigned* p, unsigned x) { *p = max(*p, x); }
static void atomicOr(unsigned* p, unsigned x) { *p |= x; }
static void atomicMin(unsigned* p, unsigned x) { *p = min(*p, x); }
static unsigned __byte_perm(unsigned low, unsigned high, unsigned choice) {
  unsigned char bytes[8];
  unsigned out = 0;
  memcpy(bytes, &low, 4);
  memcpy(bytes + 4, &high, 4);
  for (int i = 0; i < 4; i++) out |= (unsigned)bytes[(choice >> (4 * i)) & 7] << (8 * i);
  return out;
}
static float of_bfloat(unsigned bits) { return __uint_as_float(bits << 16); }
static unsigned to_bfloat(float x) {
  unsigned bits = __float_as_uint(x);
  return x != x ? 0x7FFF : (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
}
static unsigned two_bfloats(float low, float high) { return to_bfloat(low) | to_bfloat(high) << 16; }
static float of_e4m3(unsigned code) {
  int exponent = (code >> 3) & 15, mantissa = code & 7;
  float value = exponent ? ldexpf(1 + mantissa / 8.f, exponent - 7) : ldexpf(mantissa / 8.f, -6);
  if ((code & 127) == 127) value = NAN;
  return code & 128 ? -value : value;
}

// Shared memory. --------------------------------------------------------------------------------------------------------------
static void arrivals_init(unsigned at, int count) { block->arrivals[at / 8] = {count, count, 0, 0}; }
static void arrivals_arrive(unsigned at) {
  Arrivals& a = block->arrivals[at / 8];
  a.left--, a.turn();
}
static bool arrivals_passed(unsigned at, int parity) { return (int)(block->arrivals[at / 8].phase & 1) != parity; }
static void arrivals_wait(unsigned at, int parity) {
  while ((int)(block->arrivals[at / 8].phase & 1) == parity) take_turns();
}
// The same, and so many bytes that other blocks send; they may come before.
static void arrivals_expect(unsigned at, int bytes) { block->arrivals[at / 8].bytes += bytes, arrivals_arrive(at); }
// An address in another block of the cluster: the block's number + 1 above 20 bits.
static unsigned char* in_cluster(unsigned at) { return cluster[(at >> 20) - 1].memory + (at & 0xFFFFF); }
static void arrivals_sent(unsigned at, int bytes) {
  Arrivals& a = cluster[(at >> 20) - 1].arrivals[(at & 0xFFFFF) / 8];
  a.bytes -= bytes, a.turn();
}
static void cluster_enter() { cluster_turns[fiber] = cluster_gate.enter(blocks_of_cluster * threads_of_block); }
static void cluster_leave() { cluster_gate.leave(cluster_turns[fiber]); }

// Four tiles of 8 x 8 halves, a lane's pairs of each: column c of tile i goes to the address that lane 8 i + c gives.
static void store_turned(unsigned at, unsigned a, unsigned b, unsigned c, unsigned d) {
  unsigned tiles[4] = {a, b, c, d};
  for (int i = 0; i < 4; i++)
    for (int e = 0; e < 2; e++) {
      unsigned to = from_lane(at, 8 * i + (lane_here() & 3) * 2 + e);
      unsigned short half = tiles[i] >> (16 * e);
      memcpy(shared_memory + to + lane_here() / 4 * 2, &half, 2);
    }
}

// Four tiles of 8 x 8 halves as products hold them: row r of tile i goes to the address that lane 8 i + r gives.
static void store_straight(unsigned at, const unsigned* a) {
  for (int i = 0; i < 4; i++) memcpy(shared_memory + from_lane(at, 8 * i + lane_here() / 4) + (lane_here() & 3) * 4, &a[i], 4);
}

// Matrix products. ------------------------------------------------------------------------------------------------------------
// A descriptor: start, leading and stride offsets in 16 bytes; rows of 128 bytes whose 16-byte units are exchanged by row.
static const wide_word HIGH_WORD = 0x40000040ull << 32;
static float swizzled(unsigned at) {
  unsigned short bits;
  memcpy(&bits, shared_memory + (at ^ (((at >> 7) & 7) << 4)), 2);
  return of_bfloat(bits);
}
static unsigned offset_at(wide_word d, int shift) { return ((d >> shift) & 0x3FFF) << 4; }
static float by_rows(wide_word d, int row, int k) {
  return swizzled(offset_at(d, 0) + row / 8 * offset_at(d, 32) + row % 8 * 128 + k * 2);
}
static float by_columns(wide_word d, int n, int k) {
  return swizzled(offset_at(d, 0) + n / 64 * offset_at(d, 16) + n % 64 * 2 + k / 8 * offset_at(d, 32) + k % 8 * 128);
}
// d [64,N] (+)= a [64,16] x b [16,N]; `fragments` holds a thread's part of a, or a is in shared memory (`turned`: as its transpose).
static void multiply(
    float* d, int N, const unsigned* fragments, unsigned a_low, unsigned b_low, int keep, bool columns, bool turned = false) {
  wide_word a = a_low | HIGH_WORD, b = b_low | HIGH_WORD;
  int row = (threadIdx.x >> 5 & 3) * 16 + lane_here() / 4, own = lane_here() & 3;
  if (fragments) {
    memcpy(block->lane_fragments[threadIdx.x], fragments, 16);
    __syncwarp();
  }
  for (int h = 0; h < 2; h++) {
    float left[16];
    for (int k = 0; k < 16 && !fragments; k++) left[k] = turned ? by_columns(a, row + 8 * h, k) : by_rows(a, row + 8 * h, k);
    for (int q = 0; q < 4 && fragments; q++)
      for (int half = 0; half < 2; half++) {
        unsigned pair = block->lane_fragments[(threadIdx.x & ~3) | q][2 * half + h];
        left[8 * half + 2 * q] = of_bfloat(pair & 0xFFFF), left[8 * half + 2 * q + 1] = of_bfloat(pair >> 16);
      }
    for (int j = 0; j < N / 8; j++)
      for (int e = 0; e < 2; e++) {
        int n = 8 * j + 2 * own + e;
        float sum = keep ? d[4 * j + 2 * h + e] : 0.f;
        for (int k = 0; k < 16; k++) sum += left[k] * (columns ? by_columns(b, n, k) : by_rows(b, n, k));
        d[4 * j + 2 * h + e] = sum;
      }
  }
  if (fragments) __syncwarp();
}
// The same of FP8 numbers (E5M2, the upper bytes of half precision): 32 of k, 4 in a word.
static float of_e5m2(unsigned code) {
  int exponent = (code >> 2) & 31, mantissa = code & 3;
  float value = exponent ? ldexpf(1 + mantissa / 4.f, exponent - 15) : ldexpf(mantissa / 4.f, -14);
  if (exponent == 31) value = mantissa ? NAN : INFINITY;
  return code & 128 ? -value : value;
}
static void multiply_fp8(float* d, int N, const unsigned* fragments, unsigned b_low, int keep) {
  wide_word b = b_low | HIGH_WORD;
  int own = lane_here() & 3;
  for (int h = 0; h < 2; h++) {
    float left[32];
    for (int q = 0; q < 4; q++)
      for (int half = 0; half < 2; half++) {
        unsigned four = from_lane(fragments[2 * half + h], (lane_here() & ~3) | q);
        for (int i = 0; i < 4; i++) left[16 * half + 4 * q + i] = of_e5m2(four >> (8 * i) & 255);
      }
    for (int j = 0; j < N / 8; j++)
      for (int e = 0; e < 2; e++) {
        int n = 8 * j + 2 * own + e;
        float sum = keep ? d[4 * j + 2 * h + e] : 0.f;
        for (int k = 0; k < 32; k++) {
          unsigned at = offset_at(b, 0) + n / 8 * offset_at(b, 32) + n % 8 * 128 + k;
          sum += left[k] * of_e5m2(shared_memory[at ^ (((at >> 7) & 7) << 4)]);
        }
        d[4 * j + 2 * h + e] = sum;
      }
  }
}

// Half precision: nearest, ties to even.
static float of_half(unsigned h) {
  int exponent = h >> 10 & 31;
  float size = exponent == 31 ? (h & 1023 ? NAN : INFINITY) : exponent ? ldexpf(1024 + (h & 1023), exponent - 25) : ldexpf(h & 1023, -24);
  return h & 0x8000 ? -size : size;
}
static unsigned half_of(float x) {
  unsigned bits, sign;
  memcpy(&bits, &x, 4), sign = bits >> 16 & 0x8000;
  float size = fabsf(x);
  if (size != size) return 0x7FFF;
  if (size >= 65520.f) return sign | 0x7C00;
  int exponent;
  frexpf(size, &exponent);
  if (size == 0 || exponent < -13) return sign | (unsigned)nearbyintf(ldexpf(size, 24));
  return sign | ((unsigned)(exponent + 14) << 10) + ((unsigned)nearbyintf(ldexpf(size, 11 - exponent)) - 1024);
}
static unsigned two_halves(float low, float high) { return half_of(low) | half_of(high) << 16; }
// A product of 16 x 16 and 16 x 8 by a warp.
template <float (*VALUE)(unsigned)> static void multiply_16(float* d, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
  unsigned own[6] = {a0, a1, a2, a3, b0, b1}, *first = block->lane_fragments[threadIdx.x & ~31];
  memcpy(block->lane_fragments[threadIdx.x], own, sizeof own);
  __syncwarp();
  for (int i = 0; i < 4; i++) {
    int row = lane_here() / 4 + i / 2 * 8, column = (lane_here() & 3) * 2 + i % 2;
    for (int k = 0; k < 16; k++) {
      unsigned a = first[(row % 8 * 4 + k % 8 / 2) * 6 + k / 8 * 2 + row / 8], b = first[(column * 4 + k % 8 / 2) * 6 + 4 + k / 8];
      d[i] += VALUE(k % 2 ? a >> 16 : a & 0xFFFF) * VALUE(k % 2 ? b >> 16 : b & 0xFFFF);
    }
  }
  __syncwarp();
}
