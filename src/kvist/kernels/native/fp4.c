/* FP4 weights in panels: re-ordering what a file stores, and expanding panels to bfloat16 pairs for the product.
 *
 * Panel layout: codes [ceil(depth / 4)][16 lanes] words of 8 inputs of one output, the even inputs' codes in the lower half and the
 * odd ones' in the upper, so that a shift by 4 j leaves two codes where a pair of bfloat16 stands; then for all panels scales
 * [ceil(groups / 4)][16][4], a group being 16 bytes of codes. A value is an E2M1 code times 2^(scale - 127), exact in bfloat16.
 * Must not know layers.
 */
#include "kvist.h"

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
            u16v even = (u16v)(decode(word, table) * scale), odd = (u16v)(decode(word >> 16, table) * scale);
            u16v pair = (odd & 0xffff0000u) | (even >> 16);
            word >>= 4;
            if (k + j < depth) memcpy(pairs + (k + j) * 16, &pair, 64);
        }
    }
}

/* One row times P panels, expanded in registers as they are multiplied: the operations of kind 0 in their order, and so its bits.
 * `P` and `dot` are constants after inlining. */
INLINE void row_panels(const int P, const int dot, const float *x, const uint32_t *pairs, const fp4_panels *w, v16 *out)
{
    v16 table = load16(E2M1), acc[4], scale[4];
    for (int p = 0; p < P; p++) acc[p] = scale[p] = (v16){0};
    for (int64_t k = 0; k < w->depth; k += 4) {
        if (k % 16 == 0)
            for (int p = 0; p < P; p++)
                scale[p] = scale_of(load_words(w->scales + p * w->scale_bytes + k / 64 * 64) >> (uint32_t)(k / 16 % 4 * 8));
        u16v word[4];
        for (int p = 0; p < P; p++) word[p] = load_words(w->codes + p * w->code_bytes + k * 16);
#pragma GCC unroll 4
        for (int64_t j = 0; j < 4; j++)
#pragma GCC unroll 4
            for (int p = 0; p < P && k + j < w->depth; p++) {
                v16 even = decode(word[p], table) * scale[p], odd = decode(word[p] >> 16, table) * scale[p];
                word[p] >>= 4;
#ifdef __AVX512BF16__
                if (dot) {
                    u16v pair = ((u16v)odd & 0xffff0000u) | ((u16v)even >> 16);
                    acc[p] = dot_pairs(acc[p], pair, (u16v){0} + pairs[k + j]);
                    continue;
                }
#endif
                acc[p] = fma16(fill16(x[2 * (k + j)]), even, acc[p]);
                acc[p] = fma16(fill16(x[2 * (k + j) + 1]), odd, acc[p]);
            }
    }
    for (int p = 0; p < P; p++) out[p] = acc[p];
}

#ifdef __AVX512BF16__
/* R rows times P panels with codes looked up as bfloat16 pairs. Sums are held in units of the present group's scale, so no weight
 * is multiplied by it; at a group's border they change their unit. A power of two changes no rounding while all numbers stay
 * normal: `plain_rows` looks after the rows, WEIGHT_NEAR_FP4 after the scales. */
INLINE void unit_panels(const int R, const int P, const uint32_t *pairs, int64_t ldp, const fp4_panels *w, v16 *out)
{
    static const uint16_t E2M1_BF16[32] = {
        0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0, 0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0,
        0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0, 0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0};
    const u16v table = load_words((const uint8_t *)E2M1_BF16);
    v16 acc[4][8];
    i16v unit[8]; /* as a float's exponent bits */
    const i16v one = (i16v){0} + (127 << 23);
#pragma GCC unroll 8
    for (int p = 0; p < P; p++) {
        unit[p] = one;
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) acc[r][p] = (v16){0};
    }
    for (int64_t first = 0; first < w->depth; first += 16) {
#pragma GCC unroll 8
        for (int p = 0; p < P; p++) {
            u16v bytes = load_words(w->scales + p * w->scale_bytes + first / 64 * 64) >> (uint32_t)(first / 16 % 4 * 8);
            i16v next = (i16v)(bytes << 23 & 0x7f800000u);
            v16 factor = (v16)(unit[p] - next + one);
            unit[p] = next;
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) acc[r][p] *= factor;
        }
        for (int64_t k = first; k < first + 16 && k < w->depth; k += 4) {
            u16v word[8];
#pragma GCC unroll 8
            for (int p = 0; p < P; p++) {
                word[p] = load_words(w->codes + p * w->code_bytes + k * 16);
                ask_for(w->codes + p * w->code_bytes + k * 16, P);
            }
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++)
#pragma GCC unroll 8
                for (int p = 0; p < P; p++) {
                    u16v pair = look_up(table, word[p] >> (uint32_t)(4 * j));
#pragma GCC unroll 4
                    for (int r = 0; r < R; r++) acc[r][p] = dot_pairs(acc[r][p], pair, (u16v){0} + pairs[r * ldp + k + j]);
                }
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int p = 0; p < P; p++) out[r * P + p] = acc[r][p] * (v16)unit[p];
}
#endif

int plain_rows(const float *x, int64_t ldx, int64_t rows, int64_t inputs)
{
    int odd = 0;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < inputs; i++) {
            uint32_t magnitude = bits_of(x[r * ldx + i]) & 0x7fffffffu;
            odd |= (magnitude - (87u << 23) > 80u << 23) & (magnitude != 0); /* 2^-40..2^40 */
        }
    return !odd;
}

int fp4_rows(const uint32_t *pairs, int64_t ldp, int rows, const fp4_panels *w, int panels, v16 *out)
{
#ifdef __AVX512BF16__
    if (w->depth % 4) return 0;
    if (panels == 8 && rows == 1) unit_panels(1, 8, pairs, ldp, w, out);
    else if (panels == 4 && rows == 1) unit_panels(1, 4, pairs, ldp, w, out);
    else if (panels == 4 && rows == 2) unit_panels(2, 4, pairs, ldp, w, out);
    else if (panels == 4 && rows == 4) unit_panels(4, 4, pairs, ldp, w, out);
    else return 0;
    return 1;
#else
    (void)pairs, (void)ldp, (void)rows, (void)w, (void)panels, (void)out;
    return 0;
#endif
}

void fp4_row(const float *x, const uint32_t *pairs, const fp4_panels *w, int panels, v16 *out)
{
    if (panels == 4 && pairs) row_panels(4, 1, x, pairs, w, out);
    else if (panels == 4) row_panels(4, 0, x, pairs, w, out);
    else if (panels == 8) {
        fp4_panels rest = {w->codes + 4 * w->code_bytes, w->scales + 4 * w->scale_bytes, w->code_bytes, w->scale_bytes, w->depth};
        fp4_row(x, pairs, w, 4, out);
        fp4_row(x, pairs, &rest, 4, out + 4);
    } else
        for (int p = 0; p < panels; p++) {
            fp4_panels own = {w->codes + p * w->code_bytes, w->scales + p * w->scale_bytes, w->code_bytes, w->scale_bytes, w->depth};
            if (pairs) row_panels(1, 1, x, pairs, &own, out + p);
            else row_panels(1, 0, x, pairs, &own, out + p);
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

/* Nibbles 0 2 4 6 into the lower half of each word, 1 3 5 7 into the upper. */
static void part_nibbles(uint8_t *words, int64_t bytes)
{
    for (int64_t i = 0; i < bytes; i += 4) {
        uint32_t w, swap;
        memcpy(&w, words + i, 4);
        swap = (w ^ w >> 4) & 0x00f000f0u, w ^= swap ^ swap << 4;
        swap = (w ^ w >> 8) & 0x0000ff00u, w ^= swap ^ swap << 8;
        memcpy(words + i, &w, 4);
    }
}

/* Returns the kind that the weight may be called by: WEIGHT_NEAR_FP4 if all scales lie within 2^-30..2^30. */
int kvist_pack_fp4(const uint8_t *codes, const uint8_t *scales, int64_t outputs, int64_t depth, uint8_t *packed)
{
    int far = 0;
    for (int64_t i = 0; i < outputs * ((depth + 15) / 16); i++) far |= (uint8_t)(scales[i] - (127 - 30)) > 60;
    panels_of(codes, outputs, depth, 0, packed);
    part_nibbles(packed, (outputs + 15) / 16 * fp4_panel_bytes(depth, 0));
    panels_of(scales, outputs, (depth + 15) / 16, 127, packed + (outputs + 15) / 16 * fp4_panel_bytes(depth, 0));
    return far ? WEIGHT_FP4 : WEIGHT_NEAR_FP4;
}
