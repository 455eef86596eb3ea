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
#include "key_block.h"
#define INTEGER_DOTS 1
#endif

enum { QUERY_TILE = 8, TILE_SCORES = 1 << 20, MUCH_SCORED = 1 << 25 };

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
    int32_t *even, *odd;   /* [width / 8] a pair, see `place` */
    int32_t *shift, *bias; /* [width / 32] a pair: exponent of a unit, 12 times the sum of the group's integers */
    int32_t *scale;        /* 2^(shift - 2) as a step of a float's exponent bits */
    int32_t least, most, spread; /* of all shifts; the widest spread within a pair */
} grid;

/* Where item i of a pair lies: those of eight pairs side by side, so that one address serves them all. */
INLINE int64_t place(int64_t pair, int64_t i, int64_t items) { return (pair / 8 * items + i) * 8 + pair % 8; }

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
    out->least = 1000, out->most = -1000, out->spread = 0;
    for (int64_t p = 0; p < pairs; p++) {
        const float *q = job->q + (first * job->shape.heads + p) * width;
        int32_t largest = -1000;
        for (int64_t g = 0; g < groups; g++) {
            int32_t *shift = out->shift + place(p, g, groups), sum;
            if (!grid_group(q + 32 * g, twice, shift, &sum)) return 0;
            out->bias[place(p, g, groups)] = 12 * sum;
            int empty = 1;
            for (int i = 0; i < 32; i++) empty &= twice[i] == 0;
            if (empty) *shift = 1000;
            else largest = *shift > largest ? *shift : largest;
            for (int64_t w = 0; w < 4; w++) {
                int8_t even[4], odd[4];
                for (int i = 0; i < 4; i++) even[i] = twice[8 * w + 2 * i], odd[i] = twice[8 * w + 2 * i + 1];
                memcpy(out->even + place(p, 4 * g + w, words), even, 4), memcpy(out->odd + place(p, 4 * g + w, words), odd, 4);
            }
        }
        int32_t least = 1000, most = -1000;
        for (int64_t g = 0; g < groups; g++) { /* a group of zeros adds nothing whatever its exponent */
            int32_t *shift = out->shift + place(p, g, groups);
            if (*shift == 1000) *shift = largest == -1000 ? 0 : largest;
            least = *shift < least ? *shift : least, most = *shift > most ? *shift : most;
            out->scale[place(p, g, groups)] = (*shift - 2) * (1 << 23);
        }
        out->spread = most - least > out->spread ? most - least : out->spread;
        out->least = least < out->least ? least : out->least, out->most = most > out->most ? most : out->most;
    }
    return 1;
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
        for (int p = 0; p < P; p++) sum[p] = _mm512_set1_epi32(-q->bias[place(pair, g, groups) + p]);
        for (int64_t w = 4 * g; w < 4 * g + 4; w++) {
#pragma GCC unroll 4
            for (int p = 0; p < P; p++) {
                sum[p] = _mm512_dpbusd_epi32(sum[p], keys->even[w], _mm512_set1_epi32(q->even[place(pair, w, words) + p]));
                sum[p] = _mm512_dpbusd_epi32(sum[p], keys->odd[w], _mm512_set1_epi32(q->odd[place(pair, w, words) + p]));
            }
        }
#pragma GCC unroll 4
        for (int p = 0; p < P; p++) {
            __m512i unit = _mm512_add_epi32(keys->exponent[g], _mm512_set1_epi32(q->shift[place(pair, g, groups) + p] - 2));
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

/* The same where the exponents of the block and of all queries lie so close that no sum of any pair can round. */
INLINE void near_dots(const int P, const grid *q, int64_t pair, int64_t width, const key_block *keys, v16 *dots)
{
    int64_t words = width / 8, groups = width / 32;
    __m512 total[8];
#pragma GCC unroll 8
    for (int p = 0; p < P; p++) total[p] = _mm512_setzero_ps();
    for (int64_t g = 0; g < groups; g++) {
        __m512i sum[8];
#pragma GCC unroll 8
        for (int p = 0; p < P; p++) sum[p] = _mm512_set1_epi32(-q->bias[place(pair, g, groups) + p]);
#pragma GCC unroll 4
        for (int64_t w = 4 * g; w < 4 * g + 4; w++) {
#pragma GCC unroll 8
            for (int p = 0; p < P; p++) {
                sum[p] = _mm512_dpbusd_epi32(sum[p], keys->even[w], _mm512_set1_epi32(q->even[place(pair, w, words) + p]));
                sum[p] = _mm512_dpbusd_epi32(sum[p], keys->odd[w], _mm512_set1_epi32(q->odd[place(pair, w, words) + p]));
            }
        }
#pragma GCC unroll 8
        for (int p = 0; p < P; p++) { /* exact products: rounded once or twice is the same */
            __m512i scale = _mm512_add_epi32(keys->scale[g], _mm512_set1_epi32(q->scale[place(pair, g, groups) + p]));
            total[p] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[p]), (__m512)scale, total[p]);
        }
    }
#pragma GCC unroll 8
    for (int p = 0; p < P; p++) dots[p] = (v16)total[p];
}

static int integer_scores(const select_job *job, const workspace *room, int64_t first, int64_t queries, const uint8_t *codes,
                          const uint8_t *scales, float *scores, int64_t ld)
{
    key_block keys;
    int64_t pairs = queries * job->shape.heads, width = job->shape.width, p = 0;
    int32_t spread = 24 - 15 - (width > 128); /* |sum| <= 180 width units < 2^15 up to 128 channels */
    load_keys(codes, scales, width, &keys);
    const grid *q = &room->on_grid;
    int near = q->spread + keys.spread <= spread && q->most + keys.most - 2 <= 90 && q->least + keys.least - 2 >= -90
               && q->most <= 100 && q->least >= -100 && keys.most <= 100 && keys.least >= -100;
    for (; near && p + 8 <= pairs; p += 8) near_dots(8, q, p, width, &keys, room->dots + p);
    for (; near && p + 4 <= pairs; p += 4) near_dots(4, q, p, width, &keys, room->dots + p);
    for (; near && p < pairs; p++) near_dots(1, q, p, width, &keys, room->dots + p);
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

/* Scores of a tile's queries for rows first..stop-1 of those that its last query sees; `first` is a multiple of 16. */
static void score_span(const select_job *job, workspace *room, const query_tile *tile, int64_t first, int64_t stop, float *scores,
                       int64_t ld)
{
    const segment *part = job->segments + tile->segment;
    int64_t query = part->start + tile->first, rows = visible_rows(job, part, tile->first + tile->count - 1), ids[LANES];
    stop = stop < rows ? stop : rows;
#ifdef INTEGER_DOTS
    room->on_grid.usable = job->shape.width <= MOST_WIDTH && grid_queries(job, query, tile->count * job->shape.heads, &room->on_grid);
#endif
    for (int64_t b = first; b < stop; b += LANES) {
        for (int64_t lane = 0; lane < LANES; lane++) ids[lane] = b + lane < rows ? b + lane : -1;
        score_rows(job, room, part->slot, query, tile->count, ids, scores + b, ld);
    }
}

INLINE int64_t score_ld(int64_t rows) { return (rows + LANES - 1) / LANES * LANES; }

static void select_tile(const select_job *job, workspace *room, const query_tile *tile)
{
    const segment *part = job->segments + tile->segment;
    int64_t first = part->start + tile->first, rows = visible_rows(job, part, tile->first + tile->count - 1), ld = score_ld(rows);
    int only_pool = job->pool && !job->published;
    if (!only_pool) score_span(job, room, tile, 0, rows, room->scores, ld);
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

/* A thread's workspace with room for `scores` scores; returns its memory, NULL if there is none. */
static char *open_room(const select_job *job, workspace *room, int64_t scores)
{
    int64_t width = job->shape.width, pairs = (job->tile * job->shape.heads + 7) / 8 * 8, pooled = job->pool_blocks * job->block_size;
    int64_t most = keeper_room(job->k > job->published ? job->k : job->published);
    scores = scores > pooled + LANES ? scores : pooled + LANES;
    int64_t bytes = 4 * (scores + 2 * LANES * width + 2 * most) + 8 * (pooled + LANES + most) + 64 * pairs + 2 * LANES * width
                    + 4 * pairs * (width / 4 + 3 * width / 32) + 64 * 17;
    char *base = claim(bytes, job->missing), *at = base;
    if (!base) return NULL;
    *room = (workspace){0};
    room->scores = grab(&at, 4 * scores);
    room->unpacked = grab(&at, 4 * LANES * width), room->block = grab(&at, 4 * LANES * width);
    room->dots = grab(&at, 64 * pairs);
    room->codes = grab(&at, LANES * width / 2), room->scales = grab(&at, LANES * width / 32);
    room->ids = grab(&at, 8 * (pooled + LANES));
    room->kept = (keeper){.score = grab(&at, 4 * most), .work = grab(&at, 4 * most), .id = grab(&at, 8 * most)};
    grid *q = &room->on_grid;
    q->even = grab(&at, 4 * pairs * (width / 8)), q->odd = grab(&at, 4 * pairs * (width / 8));
    q->shift = grab(&at, 4 * pairs * (width / 32)), q->bias = grab(&at, 4 * pairs * (width / 32));
    q->scale = grab(&at, 4 * pairs * (width / 32));
    return base;
}

static void select_range(void *context, int64_t first, int64_t stop)
{
    const select_job *job = context;
    workspace room;
    char *base = open_room(job, &room, job->tile * score_ld(job->most_rows));
    for (int64_t t = first; t < stop && base; t++) select_tile(job, &room, job->tiles + t);
    free(base);
}

/* Fewer tiles than threads: their keys are shared out, then their queries. */
typedef struct { const select_job *job; float *scores; int64_t ld, spans; } span_job;

enum { SPAN_ROWS = 2048 };

static void span_range(void *context, int64_t first, int64_t stop)
{
    const span_job *spans = context;
    const select_job *job = spans->job;
    workspace room;
    char *base = open_room(job, &room, 0);
    for (int64_t n = first; n < stop && base; n++) {
        int64_t tile = n / spans->spans, at = n % spans->spans * SPAN_ROWS;
        score_span(job, &room, job->tiles + tile, at, at + SPAN_ROWS, spans->scores + tile * job->tile * spans->ld, spans->ld);
    }
    free(base);
}

static void choose_range(void *context, int64_t first, int64_t stop)
{
    const span_job *spans = context;
    const select_job *job = spans->job;
    workspace room;
    char *base = open_room(job, &room, 0);
    for (int64_t n = first; n < stop && base; n++) {
        const query_tile *tile = job->tiles + n / job->tile;
        int64_t r = n % job->tile;
        if (r >= tile->count) continue;
        const segment *part = job->segments + tile->segment;
        choose(job, &room, part->start + tile->first + r, visible_rows(job, part, tile->first + r), spans->scores + n * spans->ld);
    }
    free(base);
}

static void select_spans(const select_job *job, int64_t tiles, int threads)
{
    span_job spans = {job, NULL, score_ld(job->most_rows), (job->most_rows + SPAN_ROWS - 1) / SPAN_ROWS};
    spans.scores = claim(4 * tiles * job->tile * spans.ld, job->missing);
    if (!spans.scores) return;
    parallel_ranges(span_range, &spans, tiles * spans.spans, threads);
    parallel_ranges(choose_range, &spans, tiles * job->tile, threads);
    free(spans.scores);
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
    int much = most > 2 * SPAN_ROWS && most * tiles * tile * heads * source->key_width > MUCH_SCORED;
    if (tiles < threads && !only_pool && much) select_spans(&job, tiles, threads);
    else parallel_ranges(select_range, &job, tiles, tiles < 2 ? 1 : threads);
    free(list);
    return -missing;
}
