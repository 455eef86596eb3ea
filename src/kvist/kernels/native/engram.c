/* Engram's integers and bytes: n-grams of token classes to table rows, and FP8 rows of a table as values.
 *
 * Whole numbers and exact products, so there is one result. Must not know layers or where a table came from.
 */
#include "kvist.h"

/* `ids` [tokens] -> rows of positions start.. of `layers` tables: out [layers][tokens - start][(reach - 1) * heads]. A token outside
 * of the text, before the first one, and all behind it count as `pad`. Returns 0, or 1 + the token whose id has no class below
 * `classes`, with `out` unfinished. */
int64_t kvist_ngram_rows(const int64_t *ids, const uint8_t *text, int64_t tokens, int64_t start, const int64_t *class_of,
                         int64_t vocabulary, int64_t classes, int64_t pad, const int64_t *multipliers, const int64_t *primes,
                         const int64_t *offsets, int64_t layers, int64_t reach, int64_t heads, int64_t *out)
{
    for (int64_t t = 0; t < tokens; t++)
        if (ids[t] < 0 || ids[t] >= vocabulary || class_of[ids[t]] < 0 || class_of[ids[t]] >= classes) return 1 + t;
    for (int64_t l = 0; l < layers; l++)
        for (int64_t t = start; t < tokens; t++) {
            int64_t mixed = 0;
            int open = 1;
            for (int64_t back = 0; back < reach; back++) {
                open = open && t >= back && text[t - back];
                mixed ^= (open ? class_of[ids[t - back]] : pad) * multipliers[l * reach + back];
                int64_t order = (l * (reach - 1) + back - 1) * heads; /* one token alone is no n-gram */
                for (int64_t h = 0; back && h < heads; h++) *out++ = mixed % primes[order + h] + offsets[order + h];
            }
        }
    return 0;
}

/* Rows `ids` of a table: codes [rows][width] E4M3, scales [rows][width / 32] E8M0 -> float32. Returns 0, or 1 + the first id that the
 * table does not have. */
int64_t kvist_table_rows(const uint8_t *codes, const uint8_t *scales, int64_t rows, int64_t width, const int64_t *ids, int64_t count,
                         float *out)
{
    for (int64_t n = 0; n < count; n++)
        if (ids[n] < 0 || ids[n] >= rows) return 1 + n;
    for (int64_t n = 0; n < count; n++, out += width) {
        const uint8_t *code = codes + ids[n] * width, *scale = scales + ids[n] * (width / 32);
        for (int64_t i = 0; i < width; i++) out[i] = e4m3_value(code[i]) * e8m0_value(scale[i / 32]);
    }
    return 0;
}
