/* Sixteen packed index keys laid out for integer dot products (AVX512-VNNI): a lane a key.
 *
 * Included where the processor has the instructions. Must not know queries or where keys lie.
 */
#ifndef KVIST_KEY_BLOCK_H
#define KVIST_KEY_BLOCK_H

#include "select.h"

#include <immintrin.h>

enum { MOST_WIDTH = 256, MOST_GROUPS = MOST_WIDTH / 32, MOST_WORDS = MOST_WIDTH / 8 };

/* Sixteen keys as words of unsigned bytes 12 + twice the value, and exponents a group. */
typedef struct {
    __m512i even[MOST_WORDS], odd[MOST_WORDS], exponent[MOST_GROUPS];
    __m512i scale[MOST_GROUPS]; /* as floats */
    int32_t least, most, spread; /* of all exponents; the widest spread within a key */
} key_block;

/* Word w of each of 16 keys for 8 words a key that lie `stride` bytes apart: a transpose of 16 x 8 words. */
INLINE void transpose_words(const uint8_t *codes, int64_t stride, __m512i *words)
{
    const __m512i low = _mm512_setr_epi32(0, 8, 16, 24, 1, 9, 17, 25, 2, 10, 18, 26, 3, 11, 19, 27);
    const __m512i high = _mm512_setr_epi32(4, 12, 20, 28, 5, 13, 21, 29, 6, 14, 22, 30, 7, 15, 23, 31);
    const __m512i first = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), second = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
    __m512i two[8], four[2][4], eight[4][2];
    for (int i = 0; i < 8; i++) {
        const uint8_t *at = codes + 2 * i * stride;
        __m256i one = _mm256_loadu_si256((const __m256i *)at), next = _mm256_loadu_si256((const __m256i *)(at + stride));
        two[i] = _mm512_inserti64x4(_mm512_castsi256_si512(one), next, 1);
    }
    for (int j = 0; j < 4; j++) { /* words 0-3 and 4-7 of four keys */
        four[0][j] = _mm512_permutex2var_epi32(two[2 * j], low, two[2 * j + 1]);
        four[1][j] = _mm512_permutex2var_epi32(two[2 * j], high, two[2 * j + 1]);
    }
    for (int j = 0; j < 2; j++) /* a pair of words of eight keys */
        for (int part = 0; part < 2; part++) {
            eight[2 * part][j] = _mm512_permutex2var_epi64(four[part][2 * j], first, four[part][2 * j + 1]);
            eight[2 * part + 1][j] = _mm512_permutex2var_epi64(four[part][2 * j], second, four[part][2 * j + 1]);
        }
    for (int w = 0; w < 4; w++) {
        words[2 * w] = _mm512_shuffle_i64x2(eight[w][0], eight[w][1], 0x44);
        words[2 * w + 1] = _mm512_shuffle_i64x2(eight[w][0], eight[w][1], 0xee);
    }
}

/* Exponents of powers of two, one a group. */
static void load_exponents(const uint8_t *scales, int64_t groups, key_block *keys)
{
    const __m512i byte = _mm512_set1_epi32(255), bias = _mm512_set1_epi32(127);
    if (groups == 2) {
        __m512i both = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)scales));
        keys->exponent[0] = _mm512_sub_epi32(_mm512_and_si512(both, byte), bias);
        keys->exponent[1] = _mm512_sub_epi32(_mm512_srli_epi32(both, 8), bias);
        return;
    }
    if (groups == 4) {
        __m512i all = _mm512_loadu_si512(scales);
        for (int g = 0; g < 4; g++)
            keys->exponent[g] = _mm512_sub_epi32(_mm512_and_si512(_mm512_srli_epi32(all, 8 * (unsigned)g), byte), bias);
        return;
    }
    int32_t exponent[LANES];
    for (int64_t g = 0; g < groups; g++) {
        for (int i = 0; i < LANES; i++) exponent[i] = (int32_t)scales[i * groups + g] - 127;
        keys->exponent[g] = _mm512_loadu_si512(exponent);
    }
}

static void load_keys(const uint8_t *codes, const uint8_t *scales, int64_t width, key_block *keys)
{
    const __m512i table = _mm512_broadcast_i32x4(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
    const __m512i low = _mm512_set1_epi8(15), bias = _mm512_set1_epi32(127);
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    __m512i words[MOST_WORDS];
    int64_t w = 0, groups = width / 32;
    for (int64_t line = 0; line < LANES * width / 2; line += 64) ask_for(codes + line, 8);
    for (; w + 8 <= width / 8; w += 8) transpose_words(codes + 4 * w, width / 2, words + w);
    __m512i code_at = _mm512_mullo_epi32(lane, _mm512_set1_epi32((int)(width / 2)));
    for (; w < width / 8; w++) words[w] = _mm512_i32gather_epi32(code_at, (const int *)(codes + 4 * w), 1);
    for (w = 0; w < width / 8; w++) {
        keys->even[w] = _mm512_shuffle_epi8(table, _mm512_and_si512(words[w], low));
        keys->odd[w] = _mm512_shuffle_epi8(table, _mm512_and_si512(_mm512_srli_epi32(words[w], 4), low));
    }
    load_exponents(scales, groups, keys);
    __m512i least = keys->exponent[0], most = least;
    for (int64_t g = 0; g < groups; g++) {
        least = _mm512_min_epi32(least, keys->exponent[g]), most = _mm512_max_epi32(most, keys->exponent[g]);
        keys->scale[g] = _mm512_slli_epi32(_mm512_add_epi32(keys->exponent[g], bias), 23);
    }
    keys->least = _mm512_reduce_min_epi32(least), keys->most = _mm512_reduce_max_epi32(most);
    keys->spread = _mm512_reduce_max_epi32(_mm512_sub_epi32(most, least));
}

#endif
