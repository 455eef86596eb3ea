/* FP4 weights in panels: re-ordering what a file stores, and expanding panels to bfloat16 pairs for the product.
 *
 * Panel layout: codes [depth][16] (a byte holds inputs 2k and 2k + 1 of one output), then for all panels scales
 * [ceil(depth / 16)][16]. A value is an E2M1 code times 2^(scale - 127), exact in bfloat16. Must not know layers.
 */
#include "kvist.h"

#include <math.h>

typedef uint8_t u8v __attribute__((vector_size(16)));

static const float E2M1[16] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

/* The low four bits of each lane. */
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

INLINE v16 scales_of(const uint8_t *bytes)
{
    float lanes[16];
    for (int lane = 0; lane < 16; lane++)
        lanes[lane] = bytes[lane] == 255 ? NAN : float_of(bytes[lane] ? (uint32_t)bytes[lane] << 23 : 1u << 22);
    return load16(lanes);
}

void expand_fp4(const uint8_t *codes, const uint8_t *scales, int64_t depth, uint32_t *pairs)
{
    v16 table = load16(E2M1), scale = {0};
    for (int64_t k = 0; k < depth; k++) {
        if (k % 16 == 0) scale = scales_of(scales + k);
        u8v bytes;
        memcpy(&bytes, codes + k * 16, 16);
        u16v code = __builtin_convertvector(bytes, u16v);
        u16v even = (u16v)(decode(code, table) * scale), odd = (u16v)(decode(code >> 4, table) * scale);
        u16v word = (odd & 0xffff0000u) | (even >> 16);
        memcpy(pairs + k * 16, &word, 64);
    }
}

/* One matrix [outputs][depth] bytes with columns gathered into lanes; lanes beyond the outputs are `fill`. */
static void panels_of(const uint8_t *rows, int64_t outputs, int64_t depth, uint8_t fill, uint8_t *panels)
{
    for (int64_t first = 0; first < outputs; first += 16) {
        int64_t lanes = outputs - first < 16 ? outputs - first : 16;
        uint8_t *panel = panels + first * depth;
        if (lanes < 16) memset(panel, fill, (size_t)depth * 16);
        for (int64_t start = 0; start < depth; start += 64) {
            int64_t stop = start + 64 < depth ? start + 64 : depth;
            for (int64_t lane = 0; lane < lanes; lane++) {
                const uint8_t *row = rows + (first + lane) * depth;
                for (int64_t k = start; k < stop; k++) panel[k * 16 + lane] = row[k];
            }
        }
    }
}

void kvist_pack_fp4(const uint8_t *codes, const uint8_t *scales, int64_t outputs, int64_t depth, uint8_t *packed)
{
    panels_of(codes, outputs, depth, 0, packed);
    panels_of(scales, outputs, (depth + 15) / 16, 127, packed + (outputs + 15) / 16 * 16 * depth);
}
