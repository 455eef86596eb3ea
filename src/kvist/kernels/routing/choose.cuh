// The router's choice by one launch's blocks, for Hopper (sm_90a): scores that blocks tell each other, and the best of them. Needs
// `device/stream.cuh`. Knows no operator.

typedef unsigned long long u64;

static const u32 BROKEN = 0xFFFFFFFF;  // order of a score that is no number

__device__ __forceinline__ void tell_wide(u64* p, u64 x) { asm volatile("st.relaxed.gpu.u64 [%0], %1;" ::"l"(p), "l"(x) : "memory"); }
__device__ __forceinline__ u64 seen_wide(const u64* p) {
  u64 x;
  asm volatile("ld.relaxed.gpu.u64 %0, [%1];" : "=l"(x) : "l"(p) : "memory");
  return x;
}

__device__ __forceinline__ float score_of(float logit) {
  float x = min(logit, 20.f), grown = power2(1.4426950408889634f * x), one = 1.f + grown;
  float small = one == 1.f ? grown : logf(one) * (grown / (one - 1.f));
  return sqrtf(logit > 20.f ? logit : small);
}

// A lane's expert's order and score, in one word, so that whoever sees it needs no other: never zero.
__device__ __forceinline__ u64 scored(float logit, float bias, float temperature) {
  float score = score_of(logit / temperature), order = score + bias + 0.f;
  u32 bits = __float_as_uint(order), key = order != order ? BROKEN : max(bits & 0x80000000u ? ~bits : bits | 0x80000000u, 1u);
  return (u64)key << 32 | __float_as_uint(score);
}

// A lane's chosen expert, its place among them (ascending) and its weight before the scale; of lanes from `chosen` on nothing is set.
struct Choice {
  int expert, place;
  float weight;
  bool whole;  // no score was NaN
};

// The chosen experts of a row by one warp, whose lanes have KEYS experts each: waits until all scores are told.
template <int KEYS> __device__ __forceinline__ Choice choose(const u64* scores, int experts, int chosen, bool normalise, int lane) {
  u64 word[KEYS] = {};
  bool there;
  do {
    there = true;
#pragma unroll
    for (int i = 0; i < KEYS; i++)
      if (lane + 32 * i < experts && !word[i]) word[i] = seen_wide(scores + lane + 32 * i);
#pragma unroll
    for (int i = 0; i < KEYS; i++) there &= lane + 32 * i >= experts || word[i];
  } while (__ballot_sync(0xFFFFFFFF, there) != 0xFFFFFFFF);
  u32 broken = 0;
#pragma unroll
  for (int i = 0; i < KEYS; i++) broken |= (word[i] >> 32) == BROKEN;
  bool whole = __ballot_sync(0xFFFFFFFF, broken) == 0;
  int mine = 0;
  float score = 0.f;  // of the lane's turn; a row with a NaN weighs nothing
#pragma unroll 1
  for (int turn = 0; turn < chosen; turn++) {
    u32 best = 0, at = 0, its = 0;
#pragma unroll
    for (int i = 0; i < KEYS; i++)
      if ((u32)(word[i] >> 32) > best) best = word[i] >> 32, at = lane + 32 * i, its = (u32)word[i];
    u32 highest = warp_max(best), first = warp_min(best == highest ? at : 0xFFFFFFFF);
    its = __shfl_sync(0xFFFFFFFF, its, first & 31);
    if (lane == turn) mine = first, score = whole ? __uint_as_float(its) : 0.f;
#pragma unroll
    for (int i = 0; i < KEYS; i++)
      if (lane + 32 * i == first) word[i] = 0;
  }
  float sum = 0.f, weight = score;
  int place = 0;
#pragma unroll 1
  for (int k = 0; k < chosen; k++) place += __shfl_sync(0xFFFFFFFF, mine, k) < mine, sum += __shfl_sync(0xFFFFFFFF, score, k);
  if (normalise) weight = weight / (sum + 1e-20f);
  return {mine, place, weight, whole};
}
