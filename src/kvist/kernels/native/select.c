/* Index scores, exact top-k (equal scores: the lower id), and candidate blocks, query by query.
 *
 * Scores are float32 sums over channels, then over heads in order. Few queries read keys as they lie; many queries share
 * a transposed copy in which lanes are keys. Knows nothing of where keys come from.
 */
#include "select.h"

typedef struct {
    const float *q, *weight, *keys, *keys_t;
    const int64_t *visible, *pool;
    int64_t *topk, *blocks;
    int64_t heads, width, rows, k, block_size, pool_blocks, published;
    int64_t *missing;
} select_job;

/* keys [rows][width] -> [ceil(rows / 16)][width][16], missing rows zero. */
static void transpose_keys(const float *keys, int64_t rows, int64_t width, float *keys_t)
{
    for (int64_t b = 0; b < (rows + LANES - 1) / LANES; b++)
        for (int64_t lane = 0; lane < LANES; lane++) {
            int64_t row = b * LANES + lane;
            for (int64_t i = 0; i < width; i++)
                keys_t[(b * width + i) * LANES + lane] = row < rows ? keys[row * width + i] : 0.0f;
        }
}

/* One query head against 16 keys, in `score_row`'s order of sums: channels modulo 16 apart, then halves, then the rest. */
INLINE v16 block_dot(const float *q, const float *block, int64_t width)
{
    v16 acc[LANES];
    int64_t i = 0, rest = width % LANES;
#pragma GCC unroll 16
    for (int l = 0; l < LANES; l++) acc[l] = (v16){0};
    for (; i + LANES <= width; i += LANES)
#pragma GCC unroll 16
        for (int l = 0; l < LANES; l++) acc[l] = fma16(fill16(q[i + l]), load16(block + (i + l) * LANES), acc[l]);
    if (rest)
#pragma GCC unroll 16
        for (int l = 0; l < LANES; l++)
            if (l < rest) acc[l] = fma16(fill16(q[i + l]), load16(block + (i + l) * LANES), acc[l]);
#pragma GCC unroll 8
    for (int l = 0; l < 8; l++) acc[l] += acc[l + 8];
#pragma GCC unroll 4
    for (int l = 0; l < 4; l++) acc[l] += acc[l + 4];
    return (acc[0] + acc[2]) + (acc[1] + acc[3]);
}

void score_block(index_shape shape, const float *q, const float *weight, int64_t queries, const float *block, float *scores,
                 int64_t ld)
{
    for (int64_t n = 0; n < queries; n++) {
        v16 total = {0};
        for (int64_t j = n * shape.heads; j < (n + 1) * shape.heads; j++)
            total = add_head(total, block_dot(q + j * shape.width, block, shape.width), weight[j]);
        store16(scores + n * ld, total);
    }
}

float score_row(index_shape shape, const float *q, const float *weight, const float *key)
{
    v16 total = {0};
    int64_t rest = shape.width % LANES, whole = shape.width - rest;
    for (int64_t j = 0; j < shape.heads; j++, q += shape.width) {
        v16 acc = {0};
        for (int64_t i = 0; i < whole; i += LANES) acc = fma16(load16(q + i), load16(key + i), acc);
        if (rest) {
            float left[2 * LANES] = {0};
            memcpy(left, q + whole, (size_t)rest * 4), memcpy(left + LANES, key + whole, (size_t)rest * 4);
            acc = fma16(load16(left), load16(left + LANES), acc);
        }
        total = add_head(total, fill16(sum16(acc)), weight[j]);
    }
    return total[0];
}

/* A float's bits as an integer of the same order (-0 just below +0). */
INLINE i16v ordered(v16 x)
{
    i16v bits = (i16v)x;
    return bits ^ ((bits >> 31) & 0x7fffffff);
}

/* The k-th largest of n values, none NaN, by the bits of the answer from the top. `v` has room for a multiple of 16. */
static float kth_largest(float *v, int64_t n, int64_t k)
{
    int64_t whole = (n + LANES - 1) / LANES * LANES;
    for (int64_t i = n; i < whole; i++) v[i] = -INFINITY;
    for (int64_t i = 0; i < whole; i += LANES) store16(v + i, (v16)ordered(load16(v + i)));
    uint32_t answer = 0; /* offset by 2^31: unsigned order */
    for (uint32_t bit = 1u << 31; bit; bit >>= 1) {
        i16v least = (i16v){0} + (int32_t)((answer | bit) ^ 0x80000000u), count = {0};
        for (int64_t i = 0; i < whole; i += LANES) count -= (i16v)load16(v + i) >= least;
        int64_t total = 0;
        for (int i = 0; i < LANES; i++) total += count[i];
        if (total >= k) answer |= bit;
    }
    int32_t bits = (int32_t)(answer ^ 0x80000000u);
    return float_of((uint32_t)(bits ^ ((bits >> 31) & 0x7fffffff)));
}

void keeper_trim(keeper *kept)
{
    if (kept->count <= kept->k) return;
    memcpy(kept->work, kept->score, (size_t)kept->count * 4);
    float cut = kth_largest(kept->work, kept->count, kept->k);
    int64_t above = 0, n = 0;
    for (int64_t i = 0; i < kept->count; i++) above += kept->score[i] > cut;
    int64_t ties = kept->k - above;
    for (int64_t i = 0; i < kept->count; i++)
        if (kept->score[i] > cut || (kept->score[i] == cut && ties-- > 0)) {
            kept->score[n] = kept->score[i];
            kept->id[n++] = kept->id[i];
        }
    kept->count = n;
    kept->bar = cut;
}

void keeper_finish(keeper *kept, int64_t *out)
{
    keeper_trim(kept);
    for (int64_t i = 0; i < kept->k; i++) out[i] = i < kept->count ? kept->id[i] : -1;
}

void publish_blocks(int64_t block_size, int64_t published, const float *scores, int64_t visible, keeper *kept, int64_t *out)
{
    keeper_reset(kept, published);
    int64_t newest = (visible - 1) / block_size;
    for (int64_t b = 0; visible > 0 && b <= newest; b++) {
        float best = -INFINITY;
        int64_t stop = (b + 1) * block_size < visible ? (b + 1) * block_size : visible;
        for (int64_t m = b * block_size; m < stop; m++) best = scores[m] > best ? scores[m] : best;
        if (b == newest) best = INFINITY;
        if (best > -INFINITY) keeper_offer(kept, best, b);
    }
    keeper_finish(kept, out);
}

INLINE float score_of(const select_job *job, int64_t query, int64_t row)
{
    index_shape shape = {job->heads, job->width};
    int64_t pair = query * job->heads;
    return score_row(shape, job->q + pair * job->width, job->weight + pair, job->keys + row * job->width);
}

static void choose(const select_job *job, int64_t query, const float *scores, keeper *kept)
{
    int64_t visible = job->visible[query] < job->rows ? job->visible[query] : job->rows;
    keeper_reset(kept, job->k);
    if (job->pool)
        for (int64_t b = 0; b < job->pool_blocks; b++) {
            int64_t block = job->pool[query * job->pool_blocks + b];
            int64_t stop = (block + 1) * job->block_size < visible ? (block + 1) * job->block_size : visible;
            if (block < 0) continue;
            for (int64_t m = block * job->block_size; m < stop; m++)
                keeper_offer(kept, scores ? scores[m] : score_of(job, query, m), m);
        }
    else
        keeper_offer_range(kept, scores, 0, visible);
    keeper_finish(kept, job->topk + query * job->k);
    if (job->published) publish_blocks(job->block_size, job->published, scores, visible, kept, job->blocks + query * job->published);
}

enum { QUERY_TILE = 4 };

static void select_range(void *context, int64_t first, int64_t stop)
{
    const select_job *job = context;
    int64_t ld = (job->rows + LANES - 1) / LANES * LANES, most = job->k > job->published ? job->k : job->published;
    int64_t room = keeper_room(most);
    index_shape shape = {job->heads, job->width};
    float *scores = claim((QUERY_TILE * ld + 2 * room) * 4, job->missing);
    int64_t *ids = claim(room * 8, job->missing);
    keeper kept = {.score = scores + QUERY_TILE * ld, .work = scores + QUERY_TILE * ld + room, .id = ids};
    int only_pool = job->pool && !job->published;
    for (int64_t at = first; at < stop && scores && ids; at += QUERY_TILE) {
        int64_t queries = stop - at < QUERY_TILE ? stop - at : QUERY_TILE, rows = 0;
        for (int64_t n = at; n < at + queries; n++) rows = job->visible[n] > rows ? job->visible[n] : rows;
        rows = rows < job->rows ? rows : job->rows;
        for (int64_t b = 0; job->keys_t && !only_pool && b < (rows + LANES - 1) / LANES; b++)
            score_block(shape, job->q + at * job->heads * job->width, job->weight + at * job->heads, queries,
                        job->keys_t + b * job->width * LANES, scores + b * LANES, ld);
        for (int64_t n = 0; n < queries; n++) {
            if (!job->keys_t && !only_pool)
                for (int64_t m = 0; m < job->visible[at + n] && m < rows; m++) scores[m + n * ld] = score_of(job, at + n, m);
            choose(job, at + n, only_pool ? NULL : scores + n * ld, &kept);
        }
    }
    free(scores);
    free(ids);
}

int64_t kvist_select(const float *q, const float *weight, const float *keys, const int64_t *visible, const int64_t *pool,
                  int64_t *topk, int64_t *blocks, int64_t queries, int64_t heads, int64_t width, int64_t rows, int64_t k,
                  int64_t block_size, int64_t pool_blocks, int64_t published, int threads)
{
    float *keys_t = NULL;
    int64_t missing = 0;
    if (queries >= 4 && rows && !(pool && !published)) {
        keys_t = claim((rows + LANES - 1) / LANES * LANES * width * 4, &missing);
        if (!keys_t) return -missing;
        transpose_keys(keys, rows, width, keys_t);
    }
    select_job job = {q, weight, keys, keys_t, visible, pool, topk, blocks, heads, width, rows, k, block_size, pool_blocks, published,
                      &missing};
    parallel_ranges(select_range, &job, queries, queries < 4 ? 1 : threads);
    free(keys_t);
    return -missing;
}
