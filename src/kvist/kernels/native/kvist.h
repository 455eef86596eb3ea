/* Shared by all native operators: vector types, bfloat16, exp, the number formats' roundings, the thread pool's interface.
 *
 * Vectors are GCC/Clang vector extensions, which compile to AVX-512, AVX2, SSE or NEON alike; intrinsics stand behind
 * #ifdef only. Must not know layers or caches. Values are float32 everywhere; sums are float32.
 */
#ifndef KVIST_H
#define KVIST_H

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef float v16 __attribute__((vector_size(64)));
typedef int32_t i16v __attribute__((vector_size(64)));
typedef uint32_t u16v __attribute__((vector_size(64)));
typedef float v8 __attribute__((vector_size(32)));
typedef float v4 __attribute__((vector_size(16)));
typedef int32_t i8v __attribute__((vector_size(32)));

/* Scratch memory of a call, on a cache line; NULL if there is none, and then `*missing` is the number of bytes. Who gets NULL
 * leaves its part of the work undone; the exported function returns -missing, and Python raises MemoryError (calls.py). */
void *claim(int64_t bytes, int64_t *missing);

#define INLINE static inline __attribute__((always_inline))
/* What released models never meet: compiled for size, in a third of the time. */
#define SELDOM static __attribute__((cold, noinline))

/* Weights that one row meets come from memory once: asked for this early, into the second cache (measured: a quarter faster than
 * what the processor asks for by itself, twice as fast as into the first). `streams`: how many are read side by side. */
enum { BYTES_AHEAD = 1 << 14 };
INLINE void ask_for(const void *p, const int streams) { __builtin_prefetch((const char *)p + BYTES_AHEAD / streams, 0, 2); }

INLINE v16 load16(const float *p) { v16 v; memcpy(&v, p, sizeof v); return v; }
INLINE void store16(float *p, v16 v) { memcpy(p, &v, sizeof v); }
INLINE v8 load8(const float *p) { v8 v; memcpy(&v, p, sizeof v); return v; }
INLINE void store8(float *p, v8 v) { memcpy(p, &v, sizeof v); }
INLINE v16 fill16(float x) { return (v16){0} + x; }
INLINE v8 fill8(float x) { return (v8){0} + x; }

/* a * b + c rounded once where the processor has the instruction, else twice. Written out, because a compiler that fuses as it
 * likes (-ffp-contract, GCC's tuning against chains of fused sums) gives one sum other bits in another tile. */
#if defined(__FMA__) || defined(__AVX512F__) || defined(__aarch64__)
#define FUSED 1
#endif

INLINE float fma1(float a, float b, float c)
{
#ifdef FUSED
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

/* Builtins of the compilers instead of <immintrin.h>, which would cost every file a tenth of a second to read. */
INLINE v8 fma8(v8 a, v8 b, v8 c)
{
#if defined(__clang__) && __has_builtin(__builtin_elementwise_fma) && defined(FUSED)
    return __builtin_elementwise_fma(a, b, c);
#elif defined(__FMA__) && !defined(__clang__)
    return __builtin_ia32_vfmaddps256(a, b, c);
#elif defined(FUSED)
    for (int i = 0; i < 8; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
#else
    return a * b + c;
#endif
}

INLINE v16 fma16(v16 a, v16 b, v16 c)
{
#if defined(__clang__) && __has_builtin(__builtin_elementwise_fma) && defined(FUSED)
    return __builtin_elementwise_fma(a, b, c);
#elif defined(__AVX512F__) && !defined(__clang__)
    return __builtin_ia32_vfmaddps512_mask(a, b, c, (unsigned short)-1, 4); /* all lanes, rounding as set */
#elif defined(__FMA__) && !defined(__clang__)
    v8 low[3], high[3];
    memcpy(&low[0], &a, 32), memcpy(&low[1], &b, 32), memcpy(&low[2], &c, 32);
    memcpy(&high[0], (char *)&a + 32, 32), memcpy(&high[1], (char *)&b + 32, 32), memcpy(&high[2], (char *)&c + 32, 32);
    low[0] = fma8(low[0], low[1], low[2]), high[0] = fma8(high[0], high[1], high[2]);
    memcpy(&c, &low[0], 32), memcpy((char *)&c + 32, &high[0], 32);
    return c;
#elif defined(FUSED)
    for (int i = 0; i < 16; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
#else
    return a * b + c;
#endif
}

/* Instructions by name where a header of intrinsics would take longer to read than the rest of a file to compile. */
#ifdef __AVX512BF16__
INLINE v16 dot_pairs(v16 sum, u16v a, u16v b)
{
    __asm__("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
    return sum;
}
/* The 16-bit entries of a table of 32 that the low five bits of each half of a lane name. */
INLINE u16v look_up(u16v table, u16v indices)
{
    u16v found;
    __asm__("vpermw %1, %2, %0" : "=v"(found) : "v"(table), "v"(indices));
    return found;
}
#endif

/* Halves are added to halves, so the order is the same with and without the shuffle builtin. */
INLINE float sum16(v16 v)
{
#if defined(__has_builtin) && __has_builtin(__builtin_shufflevector)
    v8 a = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) + __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
    v4 b = __builtin_shufflevector(a, a, 0, 1, 2, 3) + __builtin_shufflevector(a, a, 4, 5, 6, 7);
    return (b[0] + b[2]) + (b[1] + b[3]);
#else
    float lane[16];
    store16(lane, v);
    for (int width = 8; width; width /= 2)
        for (int i = 0; i < width; i++) lane[i] += lane[i + width];
    return lane[0];
#endif
}

INLINE uint32_t bits_of(float x) { uint32_t u; memcpy(&u, &x, 4); return u; }
INLINE float float_of(uint32_t u) { float x; memcpy(&x, &u, 4); return x; }

/* Nearest bfloat16, ties to even, as the upper half of a float32; NaN stays NaN. */
INLINE uint32_t bf16_bits(float x)
{
    uint32_t u = bits_of(x);
    if ((u & 0x7fffffffu) > 0x7f800000u) return (u >> 16) | 0x40u;
    return (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
}

/* exp in lanes, about 1 ulp for -87 < x < 88; 0 below, large values saturate. NaN gives NaN. */
#define DEFINE_EXP(NAME, V, I)                                                                                        \
    INLINE V NAME(V x)                                                                                                \
    {                                                                                                                 \
        V low = (V){0} - 87.3f, high = (V){0} + 88.3f;                                                                \
        I under = x < low;                                                                                            \
        V t = (V)((under & (I)low) | (~under & (I)x));                                                                \
        I over = t > high; t = (V)((over & (I)high) | (~over & (I)t));                                                \
        V magic = (V){0} + 12582912.0f;                                                                               \
        V n = (t * 1.44269504088896341f + magic) - magic;                                                             \
        V r = t - n * 0.693359375f;                                                                                   \
        r = r + n * 2.12194440e-4f;                                                                                   \
        V p = (V){0} + 1.9875691500e-4f;                                                                              \
        p = p * r + 1.3981999507e-3f;                                                                                 \
        p = p * r + 8.3334519073e-3f;                                                                                 \
        p = p * r + 4.1665795894e-2f;                                                                                 \
        p = p * r + 1.6666665459e-1f;                                                                                 \
        p = p * r + 5.0000001201e-1f;                                                                                 \
        p = p * r * r + r + 1.0f;                                                                                     \
        I e = (__builtin_convertvector(n, I) + 127) << 23;                                                            \
        p = p * (V)e;                                                                                                 \
        return (V)(~under & (I)p);                                                                                    \
    }
DEFINE_EXP(exp16, v16, i16v)
DEFINE_EXP(exp8, v8, i8v)

/* The formats of activations and cache rows; see kvist.quant for the meaning. */
enum { FORMAT_FP8 = 0, FORMAT_MXFP4 = 1, FORMAT_MAIN_FP4 = 2 };
void quantise_row(const float *x, float *y, int64_t n, int format);
/* Rows as cache bytes: two E2M1 codes a byte, the even one low, and a scale byte a group (16: E4M3, 32: E8M0). */
void pack_main_row(const float *x, uint8_t *codes, uint8_t *scales, int64_t n);
void pack_key_row(const float *x, uint8_t *codes, uint8_t *scales, int64_t n);

/* Values of the formats' bytes: an E4M3 code, an E8M0 scale. */
INLINE float e4m3_value(uint8_t byte)
{
    int exponent = (byte >> 3) & 15, mantissa = byte & 7;
    if ((byte & 0x7f) == 0x7f) return NAN;
    float value = exponent ? float_of((uint32_t)(exponent + 120) << 23 | (uint32_t)mantissa << 20) : (float)mantissa * 0x1p-9f;
    return byte & 0x80 ? -value : value;
}

INLINE float e8m0_value(uint8_t byte)
{
    if (byte == 255) return NAN;
    return float_of(byte ? (uint32_t)byte << 23 : 1u << 22);
}

/* Attention of one query [heads][width] over n keys; `scratch` holds 8 (n + width) floats. */
void attend_keys(const float *q, const float *const *keys, int64_t n, int64_t heads, int64_t width, const float *sink,
                 int round_weights, float *out, float *scratch);

/* A weight [outputs, inputs] in panels of 16 outputs: lanes are outputs, so products need no sum across lanes.
 * kind 0: bfloat16 pairs, uint32 [panels][ceil(inputs / 2)][16]; kind 1: float32 [panels][inputs][16]; kind 2: FP4 codes and
 * scales (fp4.c), expanded a few panels at a time to what kind 0 holds; kind 3: the same with no scale far from 1. */
enum { WEIGHT_BF16 = 0, WEIGHT_F32 = 1, WEIGHT_FP4 = 2, WEIGHT_NEAR_FP4 = 3 };
typedef struct {
    const void *data;
    int64_t outputs, inputs;
    int kind;
} weight_t;

/* y[r][0..outputs) = x[r] W^T for `rows` rows on the calling thread. `exact`: x holds bfloat16 values.
 * `pairs` is scratch for rows * ceil(inputs / 2) words. Sums run over inputs in ascending order, whatever `rows` is.
 * `missing`: see `claim`; y is then not complete. */
void product_rows(const float *x, int64_t ldx, int64_t rows, weight_t w, float *y, int64_t ldy, int exact, uint32_t *pairs,
                  int64_t *missing);
/* The same for panels first..stop-1 only, with pairs that `make_pairs` made ([rows][ceil(inputs / 2)], unless `exact` is 0); y points
 * at output 0. EXACT_PLAIN: `plain_rows` holds as well. */
enum { EXACT = 1, EXACT_PLAIN = 2 };
void product_prepared(const float *x, int64_t ldx, int64_t rows, weight_t w, float *y, int64_t ldy, int exact,
                      const uint32_t *pairs, int64_t first, int64_t stop, int64_t *missing);
/* x [rows][groups][inputs] times a packed weight [outputs][inputs], a part of the outputs for each group, to y [rows][outputs]; x is
 * quantised on the way if `format` >= 0. */
typedef struct {
    const float *x;
    const void *data;
    float *y;
    int64_t groups, inputs, outputs;
    int kind, format, exact;
} product;
/* Up to MOST_PRODUCTS of the same number of rows at once, a few rows' weights shared out together. Returns 0 or -missing. */
enum { MOST_PRODUCTS = 5 };
int64_t multiply_all(const product *products, int64_t count, int64_t rows, int threads);
/* Rows of bfloat16 values as pairs, the even input low. */
void make_pairs(const float *x, int64_t ldx, int64_t rows, int64_t inputs, uint32_t *pairs);

/* Matrices one after the other are shared out in shares of some panels, as many as one row's product takes at once. A range of
 * shares is worked through in pieces, each of one matrix: panels [from, to), then go on at share `next`. */
enum { SHARE_PANELS = 8, PIECES = 12 };
typedef struct { int64_t matrix, from, to, next; } piece;

INLINE int64_t share_count(int64_t outputs) { return (outputs + 16 * SHARE_PANELS - 1) / (16 * SHARE_PANELS); }

INLINE piece piece_of(int64_t first, int64_t stop, int64_t outputs)
{
    int64_t shares = share_count(outputs), panels = (outputs + 15) / 16, matrix = first / shares;
    int64_t next = stop < (matrix + 1) * shares ? stop : (matrix + 1) * shares, to = (next - matrix * shares) * SHARE_PANELS;
    return (piece){matrix, (first - matrix * shares) * SHARE_PANELS, to < panels ? to : panels, next};
}

/* Bytes of one panel's codes or scales for `depth` code bytes a row. */
int64_t fp4_panel_bytes(int64_t depth, int scales);
/* FP4 panels side by side; see fp4.c. */
typedef struct {
    const uint8_t *codes, *scales;
    int64_t code_bytes, scale_bytes, depth;
} fp4_panels;
/* One row times one to four, or eight panels, expanded in registers; `pairs`: the row as bfloat16 pairs for the dot instruction, or NULL. */
void fp4_row(const float *x, const uint32_t *pairs, const fp4_panels *w, int panels, v16 *out);
/* The same sums for rows of pairs that `plain_rows` accepts, out[row * panels + panel], in fewer operations; 0 where it does not apply. */
int fp4_rows(const uint32_t *pairs, int64_t ldp, int rows, const fp4_panels *w, int panels, v16 *out);
int plain_rows(const float *x, int64_t ldx, int64_t rows, int64_t inputs);
/* One FP4 panel as kind 0 holds it: `depth` words of 16 lanes. */
void expand_fp4(const uint8_t *codes, const uint8_t *scales, int64_t depth, uint32_t *pairs);

/* A weight that a few rows are about to meet: threads that wait then read ahead what followed it the last time. */
enum { FEW_ROWS = 8 };
void reads_weight(const void *data, int64_t bytes);

/* Calls task(context, first, stop) for disjoint ranges that cover [0, count), on up to `threads` threads. */
typedef void (*range_task)(void *context, int64_t first, int64_t stop);
void parallel_ranges(range_task task, void *context, int64_t count, int threads);
/* The same with `pieces` ranges a thread instead of four: many small ones end more nearly together. */
void parallel_pieces(range_task task, void *context, int64_t count, int threads, int pieces);

#endif
