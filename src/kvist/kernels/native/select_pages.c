/* Index selection of a whole ragged batch over packed keys in pages, in one call.
 *
 * A score is what `kvist_select` gives on the unpacked keys, bit for bit. Queries and keys are small integers times powers
 * of two; where the powers of a pair lie close together every partial sum is exact in float32, so that integer dot products
 * (AVX512-VNNI) in any order give the same float. Elsewhere, and for inputs off the grid or not finite, keys are unpacked
 * and scored by the shared float code. Blocks of 16 keys pass once for a tile of queries.
 */
#include "pages.h"
#include "select.h"

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#include <immintrin.h>
#define INTEGER_DOTS 1
#endif

enum { QUERY_TILE = 8, TILE_SCORES = 1 << 20, MOST_WIDTH = 256, MOST_GROUPS = MOST_WIDTH / 32, MOST_WORDS = MOST_WIDTH / 8 };

typedef struct {
    const page_source *source;
    const segment *segments;
    const query_tile *tiles;
    const float *q, *weight;
    const int64_t *pool;
    int64_t *topk, *blocks;
    index_shape shape;
    int64_t k, block_size, pool_blocks, published, most_rows, tile;
    int64_t *missing;
} select_job;

/* Queries of a tile on the integer grid: twice the value in int8, words of 4 even and 4 odd channels of 8, an exponent a group. */
typedef struct {
    int usable;
    int32_t *even, *odd;   /* [pairs][width / 8] */
    int32_t *shift, *bias; /* [pairs][width / 32]: exponent of a unit, 12 times the sum of the group's integers */
} grid;

/* Per-thread workspace. */
typedef struct {
    float *scores, *unpacked, *block;
    v16 *dots;
    uint8_t *codes, *scales;
    int64_t *ids;
    keeper kept;
    grid on_grid;
} workspace;

#ifdef INTEGER_DOTS
/* One group of 32 values as integers 2 v / 2^e with |integer| < 16; 0 if it cannot be. */
static int grid_group(const float *q, int8_t *twice, int32_t *exponent, int32_t *sum)
{
    float top = 0;
    int good = 1;
    for (int i = 0; i < 32; i++) {
        good &= fabsf(q[i]) < 0x1p60f;
        top = fabsf(q[i]) > top ? fabsf(q[i]) : top;
    }
    if (!good || (top > 0 && top < 0x1p-60f)) return 0;
    *exponent = top > 0 ? (int32_t)(bits_of(top) >> 23) - 127 - 2 : 0;
    float unit = float_of((uint32_t)(127 + 1 - *exponent) << 23);
    int32_t total = 0;
    for (int i = 0; i < 32; i++) {
        float scaled = q[i] * unit;
        int32_t whole = (int32_t)scaled;
        good &= (float)whole == scaled;
        total += whole;
        twice[i] = (int8_t)whole;
    }
    *sum = total;
    return good;
}

static int grid_queries(const select_job *job, int64_t first, int64_t pairs, grid *out)
{
    int64_t width = job->shape.width, words = width / 8, groups = width / 32;
    int8_t twice[32];
    for (int64_t p = 0; p < pairs; p++) {
        const float *q = job->q + (first * job->shape.heads + p) * width;
        int32_t largest = -1000;
        for (int64_t g = 0; g < groups; g++) {
            int32_t *shift = out->shift + p * groups + g, sum;
            if (!grid_group(q + 32 * g, twice, shift, &sum)) return 0;
            out->bias[p * groups + g] = 12 * sum;
            int empty = 1;
            for (int i = 0; i < 32; i++) empty &= twice[i] == 0;
            if (empty) *shift = 1000;
            else largest = *shift > largest ? *shift : largest;
            for (int64_t w = 0; w < 4; w++) {
                int8_t even[4], odd[4];
                for (int i = 0; i < 4; i++) even[i] = twice[8 * w + 2 * i], odd[i] = twice[8 * w + 2 * i + 1];
                memcpy(out->even + p * words + 4 * g + w, even, 4), memcpy(out->odd + p * words + 4 * g + w, odd, 4);
            }
        }
        for (int64_t g = 0; g < groups; g++) /* a group of zeros adds nothing whatever its exponent */
            if (out->shift[p * groups + g] == 1000) out->shift[p * groups + g] = largest == -1000 ? 0 : largest;
    }
    return 1;
}

/* Sixteen keys as words of unsigned bytes 12 + twice the value, and exponents a group. */
typedef struct { __m512i even[MOST_WORDS], odd[MOST_WORDS], exponent[MOST_GROUPS]; } key_block;

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

static void load_keys(const uint8_t *codes, const uint8_t *scales, int64_t width, key_block *keys)
{
    const __m512i table = _mm512_broadcast_i32x4(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
    const __m512i low = _mm512_set1_epi8(15), byte = _mm512_set1_epi32(255), bias = _mm512_set1_epi32(127);
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    __m512i words[MOST_WORDS];
    int64_t w = 0, groups = width / 32;
    for (; w + 8 <= width / 8; w += 8) transpose_words(codes + 4 * w, width / 2, words + w);
    __m512i code_at = _mm512_mullo_epi32(lane, _mm512_set1_epi32((int)(width / 2)));
    for (; w < width / 8; w++) words[w] = _mm512_i32gather_epi32(code_at, (const int *)(codes + 4 * w), 1);
    for (w = 0; w < width / 8; w++) {
        keys->even[w] = _mm512_shuffle_epi8(table, _mm512_and_si512(words[w], low));
        keys->odd[w] = _mm512_shuffle_epi8(table, _mm512_and_si512(_mm512_srli_epi32(words[w], 4), low));
    }
    if (groups == 2) {
        __m512i both = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)scales));
        keys->exponent[0] = _mm512_sub_epi32(_mm512_and_si512(both, byte), bias);
        keys->exponent[1] = _mm512_sub_epi32(_mm512_srli_epi32(both, 8), bias);
        return;
    }
    int32_t exponent[LANES];
    for (int64_t g = 0; g < groups; g++) {
        for (int i = 0; i < LANES; i++) exponent[i] = (int32_t)scales[i * groups + g] - 127;
        keys->exponent[g] = _mm512_loadu_si512(exponent);
    }
}

/* Exact dot products of P pairs with 16 keys; 0 if a sum might round. A unit of a group is 2^(shift + exponent - 2). */
INLINE int exact_dots(const int P, const grid *q, int64_t pair, int64_t width, const key_block *keys, int32_t most_spread, v16 *dots)
{
    int64_t words = width / 8, groups = width / 32;
    __m512i least[4], most[4];
#pragma GCC unroll 4
    for (int p = 0; p < P; p++) {
        dots[p] = (v16){0};
        least[p] = _mm512_set1_epi32(1000), most[p] = _mm512_set1_epi32(-1000);
    }
    for (int64_t g = 0; g < groups; g++) {
        __m512i sum[4];
#pragma GCC unroll 4
        for (int p = 0; p < P; p++) sum[p] = _mm512_set1_epi32(-q->bias[(pair + p) * groups + g]);
        for (int64_t w = 4 * g; w < 4 * g + 4; w++) {
#pragma GCC unroll 4
            for (int p = 0; p < P; p++) {
                sum[p] = _mm512_dpbusd_epi32(sum[p], keys->even[w], _mm512_set1_epi32(q->even[(pair + p) * words + w]));
                sum[p] = _mm512_dpbusd_epi32(sum[p], keys->odd[w], _mm512_set1_epi32(q->odd[(pair + p) * words + w]));
            }
        }
#pragma GCC unroll 4
        for (int p = 0; p < P; p++) {
            __m512i unit = _mm512_add_epi32(keys->exponent[g], _mm512_set1_epi32(q->shift[(pair + p) * groups + g] - 2));
            least[p] = _mm512_min_epi32(least[p], unit), most[p] = _mm512_max_epi32(most[p], unit);
            __m512i scale = _mm512_slli_epi32(_mm512_add_epi32(unit, _mm512_set1_epi32(127)), 23);
            dots[p] += (v16)_mm512_cvtepi32_ps(sum[p]) * (v16)scale;
        }
    }
    for (int p = 0; p < P; p++) {
        __mmask16 wide = _mm512_cmpgt_epi32_mask(_mm512_sub_epi32(most[p], least[p]), _mm512_set1_epi32(most_spread));
        wide |= _mm512_cmpgt_epi32_mask(most[p], _mm512_set1_epi32(90)) | _mm512_cmplt_epi32_mask(least[p], _mm512_set1_epi32(-90));
        if (wide) return 0;
    }
    return 1;
}

static int integer_scores(const select_job *job, const workspace *room, int64_t first, int64_t queries, const uint8_t *codes,
                          const uint8_t *scales, float *scores, int64_t ld)
{
    key_block keys;
    int64_t pairs = queries * job->shape.heads, width = job->shape.width, p = 0;
    int32_t spread = 24 - 15 - (width > 128); /* |sum| <= 180 width units < 2^15 up to 128 channels */
    load_keys(codes, scales, width, &keys);
    for (; p + 4 <= pairs; p += 4)
        if (!exact_dots(4, &room->on_grid, p, width, &keys, spread, room->dots + p)) return 0;
    for (; p < pairs; p++)
        if (!exact_dots(1, &room->on_grid, p, width, &keys, spread, room->dots + p)) return 0;
    for (int64_t n = 0; n < queries; n++) {
        const float *weight = job->weight + (first + n) * job->shape.heads;
        v16 total = {0};
        for (int64_t j = 0; j < job->shape.heads; j++) total = add_head(total, room->dots[n * job->shape.heads + j], weight[j]);
        store16(scores + n * ld, total);
    }
    return 1;
}
#endif

/* Scores of a tile's queries for the 16 rows ids[0..15] of a slot (-1: none) into scores[query * ld + lane]. */
static void score_rows(const select_job *job, workspace *room, int64_t slot, int64_t first, int64_t queries, const int64_t *ids,
                       float *scores, int64_t ld)
{
    const page_source *s = job->source;
    int64_t width = job->shape.width, heads = job->shape.heads;
#ifdef INTEGER_DOTS
    if (room->on_grid.usable) {
        const uint8_t *page = page_of(s, slot, ids[0]), *codes = room->codes, *scales = room->scales;
        int64_t at = ids[0] % s->rows;
        if (ids[LANES - 1] == ids[0] + LANES - 1 && at + LANES <= s->rows) {
            codes = page + s->key_codes + at * (width / 2), scales = page + s->key_scales + at * (width / 32);
        } else
            for (int64_t lane = 0, run; lane < LANES; lane += run) { /* a run of rows that lie side by side at a time */
                int64_t row = ids[lane] < 0 ? ids[0] : ids[lane];
                page = page_of(s, slot, row), at = row % s->rows, run = 1;
                while (lane + run < LANES && ids[lane + run] == row + run && at + run < s->rows) run++;
                memcpy(room->codes + lane * (width / 2), page + s->key_codes + at * (width / 2), (size_t)(run * width / 2));
                memcpy(room->scales + lane * (width / 32), page + s->key_scales + at * (width / 32), (size_t)(run * width / 32));
            }
        if (integer_scores(job, room, first, queries, codes, scales, scores, ld)) return;
    }
#endif
    for (int64_t lane = 0; lane < LANES; lane++) {
        float *key = room->unpacked + lane * width;
        if (ids[lane] >= 0) read_key_row(s, slot, ids[lane], key);
        else memset(key, 0, (size_t)width * 4);
    }
    const float *q = job->q + first * heads * width, *weight = job->weight + first * heads;
    if (queries < 4) {
        for (int64_t n = 0; n < queries; n++)
            for (int64_t lane = 0; lane < LANES && ids[lane] >= 0; lane++)
                scores[n * ld + lane] = score_row(job->shape, q + n * heads * width, weight + n * heads, room->unpacked + lane * width);
        return;
    }
    for (int64_t lane = 0; lane < LANES; lane++)
        for (int64_t i = 0; i < width; i++) room->block[i * LANES + lane] = room->unpacked[lane * width + i];
    score_block(job->shape, q, weight, queries, room->block, scores, ld);
}

INLINE int64_t visible_rows(const select_job *job, const segment *part, int64_t row)
{
    return (part->position + row + 1) / job->source->ratio;
}

/* Queries that see a pool only: its visible rows, 16 at a time, one query after the other. */
static void choose_in_pool(const select_job *job, workspace *room, const segment *part, int64_t row)
{
    int64_t visible = visible_rows(job, part, row), query = part->start + row, n = 0;
    for (int64_t b = 0; b < job->pool_blocks; b++) {
        int64_t block = job->pool[query * job->pool_blocks + b];
        if (block < 0) continue;
        for (int64_t m = block * job->block_size; m < (block + 1) * job->block_size && m < visible; m++) room->ids[n++] = m;
    }
    int64_t padded = (n + LANES - 1) / LANES * LANES;
    for (int64_t i = n; i < padded; i++) room->ids[i] = -1;
    for (int64_t i = 0; i < padded; i += LANES) score_rows(job, room, part->slot, query, 1, room->ids + i, room->scores + i, padded);
    keeper_reset(&room->kept, job->k);
    for (int64_t i = 0; i < n; i++) keeper_offer(&room->kept, room->scores[i], room->ids[i]);
    keeper_finish(&room->kept, job->topk + query * job->k);
}

/* The choice of one query from the scores of all its visible rows. */
static void choose(const select_job *job, workspace *room, int64_t query, int64_t visible, const float *scores)
{
    keeper *kept = &room->kept;
    keeper_reset(kept, job->k);
    if (job->pool)
        for (int64_t b = 0; b < job->pool_blocks; b++) {
            int64_t block = job->pool[query * job->pool_blocks + b];
            int64_t stop = (block + 1) * job->block_size < visible ? (block + 1) * job->block_size : visible;
            for (int64_t m = block * job->block_size; block >= 0 && m < stop; m++) keeper_offer(kept, scores[m], m);
        }
    else
        keeper_offer_range(kept, scores, 0, visible);
    keeper_finish(kept, job->topk + query * job->k);
    if (job->published)
        publish_blocks(job->block_size, job->published, scores, visible, kept, job->blocks + query * job->published);
}

static void select_tile(const select_job *job, workspace *room, const query_tile *tile)
{
    const segment *part = job->segments + tile->segment;
    int64_t first = part->start + tile->first, rows = visible_rows(job, part, tile->first + tile->count - 1);
    int64_t ld = (rows + LANES - 1) / LANES * LANES, ids[LANES];
    int only_pool = job->pool && !job->published;
#ifdef INTEGER_DOTS
    if (!only_pool)
        room->on_grid.usable = job->shape.width <= MOST_WIDTH
                               && grid_queries(job, first, tile->count * job->shape.heads, &room->on_grid);
#endif
    for (int64_t b = 0; b < rows && !only_pool; b += LANES) {
        for (int64_t lane = 0; lane < LANES; lane++) ids[lane] = b + lane < rows ? b + lane : -1;
        score_rows(job, room, part->slot, first, tile->count, ids, room->scores + b, ld);
    }
    for (int64_t r = 0; r < tile->count; r++) {
        if (!only_pool) {
            choose(job, room, first + r, visible_rows(job, part, tile->first + r), room->scores + r * ld);
            continue;
        }
#ifdef INTEGER_DOTS
        room->on_grid.usable = job->shape.width <= MOST_WIDTH && grid_queries(job, first + r, job->shape.heads, &room->on_grid);
#endif
        choose_in_pool(job, room, part, tile->first + r);
    }
}

static void *grab(char **at, int64_t bytes)
{
    char *here = *at;
    *at += (bytes + 63) / 64 * 64;
    return here;
}

static void select_range(void *context, int64_t first, int64_t stop)
{
    const select_job *job = context;
    int64_t width = job->shape.width, pairs = job->tile * job->shape.heads, pooled = job->pool_blocks * job->block_size;
    int64_t most = keeper_room(job->k > job->published ? job->k : job->published);
    int64_t scores = job->tile * ((job->most_rows + LANES - 1) / LANES * LANES);
    scores = scores > pooled + LANES ? scores : pooled + LANES;
    int64_t bytes = 4 * (scores + 2 * LANES * width + 2 * most) + 8 * (pooled + LANES + most) + 64 * pairs + 2 * LANES * width
                    + 4 * pairs * (width / 4 + width / 16) + 64 * 16;
    char *base = claim(bytes, job->missing), *at = base;
    if (!base) return;
    workspace room = {0};
    room.scores = grab(&at, 4 * scores);
    room.unpacked = grab(&at, 4 * LANES * width), room.block = grab(&at, 4 * LANES * width);
    room.dots = grab(&at, 64 * pairs);
    room.codes = grab(&at, LANES * width / 2), room.scales = grab(&at, LANES * width / 32);
    room.ids = grab(&at, 8 * (pooled + LANES));
    room.kept = (keeper){.score = grab(&at, 4 * most), .work = grab(&at, 4 * most), .id = grab(&at, 8 * most)};
    room.on_grid.even = grab(&at, 4 * pairs * (width / 8)), room.on_grid.odd = grab(&at, 4 * pairs * (width / 8));
    room.on_grid.shift = grab(&at, 4 * pairs * (width / 32)), room.on_grid.bias = grab(&at, 4 * pairs * (width / 32));
    for (int64_t t = first; t < stop; t++) select_tile(job, &room, job->tiles + t);
    free(base);
}

/* See kvist.kernels.index_select.select; visibility follows from the segments' positions and the source's ratio. */
int64_t kvist_pages_select(const page_source *source, const segment *segments, int64_t count, const float *q, const float *weight,
                        const int64_t *pool, int64_t *topk, int64_t *blocks, int64_t heads, int64_t k, int64_t block_size,
                        int64_t pool_blocks, int64_t published, int threads)
{
    int64_t tiles, most = 0, missing = 0;
    for (int64_t s = 0; s < count; s++) {
        int64_t rows = (segments[s].position + segments[s].length) / source->ratio;
        most = rows > most ? rows : most;
    }
    int only_pool = pool && !published;
    int64_t tile = only_pool || most <= TILE_SCORES / QUERY_TILE ? QUERY_TILE : most < TILE_SCORES ? TILE_SCORES / most : 1;
    query_tile *list = tile_segments(segments, count, tile, &tiles, &missing);
    if (!list) return -missing;
    index_shape shape = {heads, source->key_width};
    select_job job = {source, segments, list, q, weight, pool, topk, blocks, shape, k, block_size, pool_blocks, published,
                      only_pool ? 0 : most, tile, &missing};
    parallel_ranges(select_range, &job, tiles, tiles < 2 ? 1 : threads);
    free(list);
    return -missing;
}
