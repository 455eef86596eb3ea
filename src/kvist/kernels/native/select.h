/* What both index selections share: scores of rows and of blocks of 16, and the keeper of the k best.
 *
 * Scores are float32 sums over channels, then over heads in order; how many queries or keys share a call changes no bit.
 */
#ifndef KVIST_SELECT_H
#define KVIST_SELECT_H

#include "kvist.h"

enum { LANES = 16 };

/* Index heads of one model: `width` channels each. */
typedef struct { int64_t heads, width; } index_shape;

/* Adds a head's part to scores. */
INLINE v16 add_head(v16 total, v16 dot, float weight) { return fma16((v16)((dot > fill16(0)) & (i16v)dot), fill16(weight), total); }

/* Score of one query (q [heads][width], weight [heads]) for one key. */
float score_row(index_shape shape, const float *q, const float *weight, const float *key);
/* The same scores, bit for bit, of consecutive queries for 16 keys that lie transposed, [width][16]; scores[query * ld]. */
void score_block(index_shape shape, const float *q, const float *weight, int64_t queries, const float *block, float *scores,
                 int64_t ld);

/* The k best of what is offered, ids ascending; `score`, `work` and `id` have room for keeper_room(k). */
typedef struct { float *score, *work; int64_t *id; int64_t count, k, room; float bar; } keeper;

INLINE int64_t keeper_room(int64_t k) { return (2 * k + 31) / 16 * 16; }
INLINE void keeper_reset(keeper *kept, int64_t k)
{
    kept->count = 0, kept->k = k, kept->room = keeper_room(k), kept->bar = -INFINITY;
}
/* Of equal scores the earlier ids stay. */
void keeper_trim(keeper *kept);
/* The ids into out[k], -1 last. */
void keeper_finish(keeper *kept, int64_t *out);

/* Offers come in ascending id, so a later equal of the k-th best loses. NaN counts as the lowest score. */
INLINE void keeper_offer(keeper *kept, float score, int64_t id)
{
    if (kept->count >= kept->k && !(score > kept->bar)) return;
    kept->score[kept->count] = score == score ? score : -INFINITY;
    kept->id[kept->count++] = id;
    if (kept->count == kept->room) keeper_trim(kept);
}

/* Offer scores of consecutive ids. */
INLINE void keeper_offer_range(keeper *kept, const float *scores, int64_t first, int64_t stop)
{
    int64_t m = first;
    for (; m + LANES <= stop; m += LANES) {
        v16 s = load16(scores + m);
        i16v above = s > fill16(kept->bar);
        int32_t any = 0;
        for (int i = 0; i < LANES; i++) any |= above[i];
        if (!any && kept->count >= kept->k) continue;
        for (int64_t i = m; i < m + LANES; i++) keeper_offer(kept, scores[i], i);
    }
    for (; m < stop; m++) keeper_offer(kept, scores[m], m);
}

/* The best `published` blocks by their best visible score, the newest always kept, ids into out[published]. */
void publish_blocks(int64_t block_size, int64_t published, const float *scores, int64_t visible, keeper *kept, int64_t *out);

#endif
