// Attention's rows, for Hopper (sm_90a): tiles, the order of channels, codes to bfloat16, rotation. After `device/stream.cuh`; knows no
// requests and no kernel.

typedef unsigned long long u64;

static const int TILE = 64;           // keys
static const int CHANNELS = 512;
static const int CHUNK = TILE * 128;  // bytes of 64 channels of a tile: rows of 128 bytes, swizzled
static const float LOG2_E = 1.4426950408889634f;
static const float NONE = -1e30f;
// The high word of a product's descriptor: rows of 128 bytes, groups of 8 rows 1,024 bytes apart.
#define HIGH "0x40000040"

// What both kernels take: pointers, strides in bytes, counts; `scale` brings scores to powers of two.
struct Call {
  const u8 *q, *window, *window_scales, *pages;
  u8* out;
  const float *sink, *cosines, *sines;
  const i64* spans;
  const int *slots, *table, *topk;
  i64 window_stride, scale_stride, slot_stride, slot_scale_stride, page_bytes;
  int queries, heads, selected, ring, window_length, table_width, main_codes, main_scales, page_shift, turned, splits;
  float scale;
};

// A barrier of all threads of a cluster's blocks.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// Eight E2M1 codes: those of nibbles 0 and 4, 1 and 5, 2 and 6, 3 and 7; `factors` the scales of the lower and upper four times 2^117.
__device__ __forceinline__ uint4 expand_fp4(u32 w, u32 factors) {
  // A nibble of each half word: its sign to bit 15, its magnitude to bits 6 to 8, where it reads as code * 2^-126.
  const u32 kept = 0x81C081C0u;
  u32 z = w >> 8;
  return make_uint4(times(((w & 0x000F000Fu) * 0x1040u) & kept, factors), times(((w & 0x00F000F0u) * 0x0104u) & kept, factors),
                    times(((z & 0x000F000Fu) * 0x1040u) & kept, factors), times(((z & 0x00F000F0u) * 0x0104u) & kept, factors));
}
// Two E4M3 codes, in the upper byte of each half.
__device__ __forceinline__ u32 expand_fp8_pair(u32 codes, u32 factors) {
  u32 v = (codes & 0x80008000u) | ((codes >> 4) & 0x07F007F0u);
  return times(times(v, 0x77007700u), factors);  // the bits read as code * 2^-120; 2^111 leaves 2^-9
}
// The bfloat16 factor of a row's E8M0 scale, twice; 0 is a subnormal number, 255 stays NaN.
__device__ __forceinline__ u32 fp8_factor(u32 e8m0) {
  u32 bits = (e8m0 << 7) | ((e8m0 == 0 || e8m0 == 255) ? 0x40u : 0u);
  return bits | (bits << 16);
}

// A fragment of 16 x 16 to shared memory, in rows of eight: a lane gives the address of one.
__device__ __forceinline__ void store_rows(u32 at, const u32* a) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])
               : "memory");
}

// Rotate a pair of bfloat16 channels, rounding as the definition does.
__device__ __forceinline__ u32 turned_pair(u32 x, float c, float s) {
  float a = low_of(x), b = high_of(x);
  return bfloat_pair(a * c - b * s, a * s + b * c);
}
// How the pairs of a unit of eight channels are rotated, if any is; `back`: -1 for outputs.
struct Turn {
  bool any;
  float cosine[4], sine[4];

  __device__ __forceinline__ Turn(const Call& c, int n, int unit, float back) {
    any = unit * 8 + 8 > CHANNELS - 2 * c.turned;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      int place = unit * 4 + j - (CHANNELS / 2 - c.turned);
      cosine[j] = 1.f, sine[j] = 0.f;
      if (place >= 0) cosine[j] = c.cosines[(i64)n * c.turned + place], sine[j] = back * c.sines[(i64)n * c.turned + place];
    }
  }
  __device__ __forceinline__ uint4 of(uint4 v) const {
    if (!any) return v;
    return make_uint4(turned_pair(v.x, cosine[0], sine[0]), turned_pair(v.y, cosine[1], sine[1]), turned_pair(v.z, cosine[2], sine[2]),
                      turned_pair(v.w, cosine[3], sine[3]));
  }
};
