/* FP4 weights in panels: re-ordering what a file stores, and expanding panels to bfloat16 pairs for the product.
 *
 * Panel layout: codes [ceil(depth / 4)][16 lanes][4 bytes] (a byte holds inputs 2k and 2k + 1 of one output), then for all
 * panels scales [ceil(groups / 4)][16][4], a group being 16 bytes of codes. A value is an E2M1 code times 2^(scale - 127),
 * exact in bfloat16. Must not know layers.
 */
#include "kvist.h"

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

static const float E2M1[16] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

/* The E2M1 values of the low four bits of each lane. */
INLINE v16 decode(u16v codes, v16 table)
{
#if defined(__GNUC__) && !defined(__clang__)
    return __builtin_shuffle(table, (i16v)codes); /* indices count modulo 16 */
#else
    v16 values;
    for (int lane = 0; lane < 16; lane++) values[lane] = table[codes[lane] & 15];
    return values;
#endif
}

/* 2^(byte - 127) for the low byte of each lane; 255 is NaN. */
INLINE v16 scale_of(u16v bytes)
{
    u16v low = bytes & 255u, bits = low << 23;
    u16v zero = (u16v)(low == 0u), bad = (u16v)(low == 255u);
    return (v16)(bits | (zero & (1u << 22)) | (bad & (1u << 22)));
}

INLINE u16v load_words(const uint8_t *p) { u16v v; memcpy(&v, p, 64); return v; }

int64_t fp4_panel_bytes(int64_t depth, int scales)
{
    int64_t bytes = scales ? (depth + 15) / 16 : depth;
    return (bytes + 3) / 4 * 64;
}

void expand_fp4(const uint8_t *codes, const uint8_t *scales, int64_t depth, uint32_t *pairs)
{
    v16 table = load16(E2M1), scale = {0};
    for (int64_t k = 0; k < depth; k += 4) {
        if (k % 16 == 0) scale = scale_of(load_words(scales + k / 64 * 64) >> (uint32_t)(k / 16 % 4 * 8));
        u16v word = load_words(codes + k * 16);
#pragma GCC unroll 4
        for (int64_t j = 0; j < 4; j++) {
            u16v even = (u16v)(decode(word, table) * scale), odd = (u16v)(decode(word >> 4, table) * scale);
            u16v pair = (odd & 0xffff0000u) | (even >> 16);
            word >>= 8;
            if (k + j < depth) memcpy(pairs + (k + j) * 16, &pair, 64);
        }
    }
}

/* One row times P panels, expanded in registers as they are multiplied: the operations of kind 0 in their order, and so its bits.
 * `P` and `dot` are constants after inlining. */
INLINE void row_panels(const int P, const int dot, const float *x, const uint32_t *pairs, const uint8_t *codes, int64_t code_bytes,
                       const uint8_t *scales, int64_t scale_bytes, int64_t depth, v16 *out)
{
    v16 table = load16(E2M1), acc[4], scale[4];
    for (int p = 0; p < P; p++) acc[p] = scale[p] = (v16){0};
    for (int64_t k = 0; k < depth; k += 4) {
        if (k % 16 == 0)
            for (int p = 0; p < P; p++)
                scale[p] = scale_of(load_words(scales + p * scale_bytes + k / 64 * 64) >> (uint32_t)(k / 16 % 4 * 8));
        u16v word[4];
        for (int p = 0; p < P; p++) word[p] = load_words(codes + p * code_bytes + k * 16);
#pragma GCC unroll 4
        for (int64_t j = 0; j < 4; j++)
#pragma GCC unroll 4
            for (int p = 0; p < P && k + j < depth; p++) {
                v16 even = decode(word[p], table) * scale[p], odd = decode(word[p] >> 4, table) * scale[p];
                word[p] >>= 8;
#ifdef __AVX512BF16__
                if (dot) {
                    u16v pair = ((u16v)odd & 0xffff0000u) | ((u16v)even >> 16);
                    acc[p] = (v16)_mm512_dpbf16_ps((__m512)acc[p], (__m512bh)pair, (__m512bh)_mm512_set1_epi32((int)pairs[k + j]));
                    continue;
                }
#endif
                acc[p] = fma16(fill16(x[2 * (k + j)]), even, acc[p]);
                acc[p] = fma16(fill16(x[2 * (k + j) + 1]), odd, acc[p]);
            }
    }
    for (int p = 0; p < P; p++) out[p] = acc[p];
}

void fp4_row(const float *x, const uint32_t *pairs, const uint8_t *codes, int64_t code_bytes, const uint8_t *scales,
             int64_t scale_bytes, int64_t depth, int panels, v16 *out)
{
    if (panels == 4 && pairs) row_panels(4, 1, x, pairs, codes, code_bytes, scales, scale_bytes, depth, out);
    else if (panels == 4) row_panels(4, 0, x, pairs, codes, code_bytes, scales, scale_bytes, depth, out);
    else
        for (int p = 0; p < panels; p++) {
            const uint8_t *own = codes + p * code_bytes, *scale = scales + p * scale_bytes;
            if (pairs) row_panels(1, 1, x, pairs, own, code_bytes, scale, scale_bytes, depth, out + p);
            else row_panels(1, 0, x, pairs, own, code_bytes, scale, scale_bytes, depth, out + p);
        }
}

/* One matrix [outputs][depth] bytes, four columns to a lane; what is not there is `fill`. */
static void panels_of(const uint8_t *rows, int64_t outputs, int64_t depth, uint8_t fill, uint8_t *panels)
{
    int64_t whole = depth / 4 * 4, words = (depth + 3) / 4;
    for (int64_t first = 0; first < outputs; first += 16, panels += words * 64) {
        int64_t lanes = outputs - first < 16 ? outputs - first : 16;
        if (lanes < 16 || whole < depth) memset(panels, fill, (size_t)words * 64);
        for (int64_t start = 0; start < whole; start += 64) {
            int64_t stop = start + 64 < whole ? start + 64 : whole;
            for (int64_t lane = 0; lane < lanes; lane++) {
                const uint8_t *row = rows + (first + lane) * depth;
                for (int64_t k = start; k < stop; k += 4) memcpy(panels + k * 16 + lane * 4, row + k, 4);
            }
        }
        for (int64_t lane = 0; lane < lanes; lane++)
            for (int64_t k = whole; k < depth; k++) panels[whole * 16 + lane * 4 + k - whole] = rows[(first + lane) * depth + k];
    }
}

void kvist_pack_fp4(const uint8_t *codes, const uint8_t *scales, int64_t outputs, int64_t depth, uint8_t *packed)
{
    panels_of(codes, outputs, depth, 0, packed);
    panels_of(scales, outputs, (depth + 15) / 16, 127, packed + (outputs + 15) / 16 * fp4_panel_bytes(depth, 0));
}
