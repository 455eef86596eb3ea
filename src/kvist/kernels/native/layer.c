/* Whole layers: the operators of one block in their order, on any number of rows of any requests, in one call.
 *
 * Every step is the exported operator that Python would call, with the same arguments: the bits are the same. The structures
 * mirror those in layer.py field by field. Must not know how a layer's role follows from a configuration.
 */
#include "operators.h"

/* A packed weight; `inputs` and `outputs` as `kvist_linear` takes them. `data` is NULL where a layer has no such part. */
typedef struct { const void *data; int64_t outputs, inputs, groups, kind; } matrix;

typedef struct { matrix fn; const float *base, *scale, *norm; } entrance;

typedef struct {
    entrance enter;
    matrix wq_a, wq_b, wkv, wo_a, wo_b;
    const float *q_norm, *kv_norm, *sink;
    matrix rows_kv, rows_gate, row_key;   /* layers that own rows */
    const float *rows_norm, *key_norm;
    matrix index_q, index_weight;         /* layers that select */
    int64_t heads, head_width, index_heads, index_width, chosen, block_size, published;
    float index_scale;
} attention_half;

typedef struct {
    entrance enter;
    matrix gate;
    const float *bias_text, *bias_image;
    const void *const *tables; /* w1, w2, w3 of each expert, the shared one last */
    const int32_t *kinds;
    int64_t experts, hidden, active, normalise;
    float temperature, scale, limit;
} experts_half;

typedef struct {
    int64_t streams, width, pairs, iterations;
    float hc_eps, norm_eps;
    attention_half attention;
    experts_half experts; /* no tables: the call ends with the attention half */
} layer;

/* The groups that this pass completes: batch rows of their members, and those members that lie in the ring of raw tokens. */
typedef struct {
    const int64_t *batch, *early, *early_cell, *slot, *position, *keep, *keep_cell;
    int64_t groups, earlies, kept, ratio;
    float *tail_kv, *tail_gate; /* NULL for groups of one */
    const float *cos, *sin;
} new_groups;

typedef struct {
    const segment *segments;
    int64_t count, rows, block;
    const uint8_t *text;
    const float *cos, *sin;
    const page_source *source; /* NULL: window only */
    const window_ring *ring;
    const new_groups *groups;  /* NULL: nothing to publish */
    const int64_t *pool;       /* NULL: all visible rows */
    int64_t pool_blocks, selected;
    int64_t *topk, *blocks;
    int64_t threads;
} pass;

typedef struct { float *h, *exact, *y, *post, *comb, *x, *pre; } halfway;

/* Scratch memory cut into parts; the first pass with `base` NULL only counts. */
typedef struct { char *base; int64_t used; } arena;

static void *take(arena *a, int64_t bytes)
{
    void *here = a->base ? a->base + a->used : NULL;
    a->used += (bytes + 63) / 64 * 64;
    return here;
}

static float *floats(arena *a, int64_t count) { return take(a, 4 * count); }

static product times(const matrix *w, const float *x, float *y, int format, int exact)
{
    return (product){x, w->data, y, w->groups, w->inputs, w->outputs, (int)w->kind, format, exact};
}

static int64_t apply(const matrix *w, const float *x, int64_t rows, float *y, int format, int exact, int threads)
{
    product only = times(w, x, y, format, exact);
    return multiply_all(&only, 1, rows, threads);
}

static int64_t enter_half(const layer *l, const entrance *e, const float *x, const float *pre, float *new_pre, halfway *at,
                          const pass *p)
{
    int64_t failed = kvist_enter(x, pre, e->fn.data, (int)e->fn.kind, e->base, e->scale, e->norm, at->h, new_pre, at->post, at->comb,
                                 p->rows, l->streams, l->width, (int)l->iterations, l->hc_eps, l->norm_eps, (int)p->threads);
    kvist_quantise(at->h, at->exact, p->rows, l->width, FORMAT_FP8, (int)p->threads);
    return failed;
}

typedef struct { float *rank, *q, *window, *out, *low; } attention_room;
typedef struct { float *kv, *gate, *group_kv, *group_gate, *latent, *main, *key; } groups_room;
typedef struct { float *q, *weight; } index_room;

/* Members of one kind (channels or gates) of all groups; the newest raw tokens go into the ring after they were read. */
static void join_groups(const new_groups *g, const float *fresh, float *ring, float *out, int64_t width)
{
    size_t bytes = (size_t)width * 4;
    for (int64_t m = 0; m < g->groups * g->ratio; m++) memcpy(out + m * width, fresh + g->batch[m] * width, bytes);
    if (!ring) return;
    for (int64_t e = 0; e < g->earlies; e++) memcpy(out + g->early[e] * width, ring + g->early_cell[e] * width, bytes);
    for (int64_t k = 0; k < g->kept; k++) memcpy(ring + g->keep_cell[k] * width, fresh + g->keep[k] * width, bytes);
}

/* Compressed rows and index keys of the groups that this pass completes, into their pages; `room` holds the raw tokens'. */
static int64_t publish_groups(const layer *l, const pass *p, const groups_room *room)
{
    const attention_half *a = &l->attention;
    const new_groups *g = p->groups;
    int64_t c = a->head_width, n = g->groups;
    join_groups(g, room->kv, g->tail_kv, room->group_kv, c);
    if (a->rows_gate.data) {
        join_groups(g, room->gate, g->tail_gate, room->group_gate, c);
        kvist_group_pool(room->group_kv, room->group_gate, room->latent, n, g->ratio, c);
    }
    const float *latent = a->rows_gate.data ? room->latent : room->group_kv;
    if (!n) return 0;
    kvist_rms_norm(latent, a->rows_norm, room->latent, n, c, l->norm_eps, (int)p->threads);
    kvist_rotate(room->latent, g->cos, g->sin, room->main, n, 1, c, l->pairs, 0, (int)p->threads);
    int64_t failed = apply(&a->row_key, room->latent, n, room->key, -1, 0, (int)p->threads);
    if (failed) return failed;
    kvist_rms_norm(room->key, a->key_norm, room->key, n, a->index_width, l->norm_eps, (int)p->threads);
    kvist_rotate(room->key, g->cos, g->sin, room->key, n, 1, a->index_width, l->pairs, 0, (int)p->threads);
    kvist_pages_write(p->source, room->main, room->key, g->slot, g->position, n, (int)p->threads);
    return 0;
}

static int64_t select_rows(const layer *l, const pass *p, const index_room *room)
{
    const attention_half *a = &l->attention;
    kvist_rotate(room->q, p->cos, p->sin, room->q, p->rows, a->index_heads, a->index_width, l->pairs, 0, (int)p->threads);
    kvist_quantise(room->q, room->q, p->rows, a->index_heads * a->index_width, FORMAT_MXFP4, (int)p->threads);
    for (int64_t i = 0; i < p->rows * a->index_heads; i++) room->weight[i] *= a->index_scale;
    return kvist_pages_select(p->source, p->segments, p->count, room->q, room->weight, p->pool, p->topk, p->blocks, a->index_heads,
                              a->chosen, a->block_size, p->pool_blocks, a->published, (int)p->threads);
}

/* Products of the layer's input, then of its query rank: those of one input at once. */
static int64_t project(const layer *l, const pass *p, const halfway *at, const attention_room *room, const groups_room *rows,
                       const index_room *index)
{
    const attention_half *a = &l->attention;
    int64_t count = 2, n = p->rows, failed;
    product of_input[MOST_PRODUCTS] = {times(&a->wq_a, at->exact, room->rank, -1, 1), times(&a->wkv, at->exact, room->window, -1, 1)};
    if (p->groups) of_input[count++] = times(&a->rows_kv, at->h, rows->kv, -1, 0);
    if (p->groups && a->rows_gate.data) of_input[count++] = times(&a->rows_gate, at->h, rows->gate, -1, 0);
    if (a->index_q.data) of_input[count++] = times(&a->index_weight, at->h, index->weight, -1, 0);
    if ((failed = multiply_all(of_input, count, n, (int)p->threads))) return failed;
    kvist_rms_norm(room->rank, a->q_norm, room->rank, n, a->wq_a.outputs, l->norm_eps, (int)p->threads);
    product of_rank[] = {times(&a->wq_b, room->rank, room->q, FORMAT_FP8, 1), times(&a->index_q, room->rank, index->q, FORMAT_FP8, 1)};
    return multiply_all(of_rank, a->index_q.data ? 2 : 1, n, (int)p->threads);
}

static int64_t attend_half(const layer *l, const pass *p, const float *x, float *out, const halfway *at, const attention_room *room,
                           const groups_room *rows, const index_room *index)
{
    const attention_half *a = &l->attention;
    int64_t n = p->rows, c = a->head_width, failed = project(l, p, at, room, rows, index);
    int threads = (int)p->threads;
    if (failed) return failed;
    kvist_rotate(room->q, p->cos, p->sin, room->q, n, a->heads, c, l->pairs, 0, threads);
    kvist_rms_norm(room->window, a->kv_norm, room->window, n, c, l->norm_eps, threads);
    kvist_rotate(room->window, p->cos, p->sin, room->window, n, 1, c, l->pairs, 0, threads);
    kvist_quantise(room->window, room->window, n, c, FORMAT_FP8, threads);
    if (p->groups && (failed = publish_groups(l, p, rows))) return failed;
    if (a->index_q.data && (failed = select_rows(l, p, index))) return failed;
    failed = kvist_pages_attend(p->source, p->ring, p->segments, p->count, room->q, room->window, p->topk, p->selected, a->sink,
                                room->out, a->heads, (int)p->block, threads);
    if (failed) return failed;
    kvist_rotate(room->out, p->cos, p->sin, room->out, n, a->heads, c, l->pairs, 1, threads);
    if ((failed = apply(&a->wo_a, room->out, n, room->low, -1, 0, threads))) return failed;
    if ((failed = apply(&a->wo_b, room->low, n, at->y, FORMAT_FP8, 1, threads))) return failed;
    kvist_leave(at->y, x, at->post, at->comb, out, n, l->streams, l->width, threads);
    return 0;
}

typedef struct { int64_t *ids, *listed; float *weights; int32_t *kinds; const void **tables; uint8_t *wanted; } experts_room;

/* The experts that some row chose, ascending, and the shared one: what the call for experts takes. */
static int64_t list_experts(const experts_half *e, int64_t rows, const experts_room *room)
{
    int64_t count = 0;
    memset(room->wanted, 0, (size_t)e->experts);
    room->wanted[e->experts] = 1;
    for (int64_t i = 0; i < rows * e->active; i++)
        if (room->ids[i] >= 0) room->wanted[room->ids[i]] = 1;
    for (int64_t i = 0; i <= e->experts; i++) {
        if (!room->wanted[i]) continue;
        room->listed[count] = i < e->experts ? i : -1, room->kinds[count] = e->kinds[i];
        memcpy(room->tables + 3 * count++, e->tables + 3 * i, 3 * sizeof *e->tables);
    }
    return count;
}

static int64_t experts_of(const layer *l, const pass *p, float *out, const halfway *at, const experts_room *room)
{
    const experts_half *e = &l->experts;
    int threads = (int)p->threads;
    int64_t failed = kvist_route(at->h, p->rows, e->gate.data, (int)e->gate.kind, e->experts, l->width, e->bias_text, e->bias_image,
                                 p->text, e->active, e->temperature, (int)e->normalise, e->scale, room->ids, room->weights, threads);
    if (failed) return failed;
    int64_t count = list_experts(e, p->rows, room);
    failed = kvist_experts(at->exact, room->ids, room->weights, room->tables, room->listed, room->kinds, at->y, p->rows, e->active,
                           count, l->width, e->hidden, e->limit, 1, 0, threads);
    if (!failed) kvist_leave(at->y, at->x, at->post, at->comb, out, p->rows, l->streams, l->width, threads);
    return failed;
}

/* As `kvist_layers`, for one. */
static int64_t run_layer(const layer *l, const pass *p, const float *x, const float *pre, float *x_out, float *pre_out)
{
    const attention_half *a = &l->attention;
    const experts_half *e = &l->experts;
    int64_t n = p->rows, s = l->streams, d = l->width, c = a->head_width, missing = 0, failed;
    int64_t made = p->groups ? p->groups->groups : 0, members = p->groups ? made * p->groups->ratio : 0;
    arena room = {NULL, 0};
    for (int counted = 0;; counted = 1) {
        room.used = 0;
        halfway at = {floats(&room, n * d), floats(&room, n * d), floats(&room, n * d), floats(&room, n * s), floats(&room, n * s * s),
                      floats(&room, n * s * d), floats(&room, n * s)};
        attention_room own = {floats(&room, n * a->wq_a.outputs), floats(&room, n * a->heads * c), floats(&room, n * c),
                              floats(&room, n * a->heads * c), floats(&room, n * a->wo_a.outputs)};
        groups_room rows = {0};
        if (p->groups)
            rows = (groups_room){floats(&room, n * c), floats(&room, n * c), floats(&room, members * c), floats(&room, members * c),
                                 floats(&room, made * c), floats(&room, made * c), floats(&room, made * a->index_width)};
        index_room index = {floats(&room, n * a->index_heads * a->index_width), floats(&room, n * a->index_heads)};
        int64_t k = e->experts + 1;
        experts_room chosen = {take(&room, 8 * n * e->active), take(&room, 8 * k), floats(&room, n * e->active), take(&room, 4 * k),
                               take(&room, 3 * k * (int64_t)sizeof(void *)), take(&room, k)};
        if (!counted) {
            room.base = claim(room.used, &missing);
            if (!room.base) return -missing;
            continue;
        }
        failed = enter_half(l, &a->enter, x, pre, e->tables ? at.pre : pre_out, &at, p);
        if (!failed) failed = attend_half(l, p, x, e->tables ? at.x : x_out, &at, &own, &rows, &index);
        if (failed || !e->tables) break;
        failed = enter_half(l, &e->enter, at.x, at.pre, pre_out, &at, p);
        if (!failed) failed = experts_of(l, p, x_out, &at, &chosen);
        break;
    }
    free(room.base);
    return failed;
}

/* `count` layers one after the other, each with its own part of `passes` (the same rows): x [rows][streams][width] and pre
 * [rows][streams] -> the same after the last (`x_out` may not be `x`). Only the last may end with its attention half. Returns 0,
 * -missing, or 1 + the segment whose ring has lost entries that it needs; the outputs then hold anything. */
int64_t kvist_layers(const layer *const *layers, const pass *passes, int64_t count, const float *x, const float *pre, float *x_out,
                     float *pre_out)
{
    int64_t rows = passes->rows, s = layers[0]->streams, d = layers[0]->width, missing = 0, failed = 0;
    if (count == 1) return run_layer(layers[0], passes, x, pre, x_out, pre_out);
    float *between = claim(rows * s * (d + 1) * 4, &missing);
    if (!between) return -missing;
    float *streams[2] = {between, x_out}, *weights[2] = {between + rows * s * d, pre_out};
    for (int64_t n = 0; n < count && !failed; n++) { /* the last one writes to the caller's */
        int64_t to = (count - n) % 2;
        failed = run_layer(layers[n], passes + n, x, pre, streams[to], weights[to]);
        x = streams[to], pre = weights[to];
    }
    free(between);
    return failed;
}

/* The draft blocks' view of accepted tokens: one context, a window entry for each block. */
typedef struct {
    const matrix *wkv;
    const float *const *norm;
    const window_ring *const *ring;
    int64_t blocks, head_width, pairs;
    float eps;
} window_blocks;

/* context [rows][width] -> entries in every block's ring. Returns 0 or -missing; rings are then written in part. */
int64_t kvist_windows(const window_blocks *w, const pass *p, const float *context, int64_t width)
{
    int64_t missing = 0, failed = 0, n = p->rows, c = w->head_width;
    int threads = (int)p->threads;
    float *exact = claim(n * (width + c) * 4, &missing), *entry = exact + n * width;
    if (!exact) return -missing;
    kvist_quantise(context, exact, n, width, FORMAT_FP8, threads);
    for (int64_t b = 0; b < w->blocks && !failed; b++) {
        if ((failed = apply(&w->wkv[b], exact, n, entry, -1, 1, threads))) break;
        kvist_rms_norm(entry, w->norm[b], entry, n, c, w->eps, threads);
        kvist_rotate(entry, p->cos, p->sin, entry, n, 1, c, w->pairs, 0, threads);
        kvist_quantise(entry, entry, n, c, FORMAT_FP8, threads);
        kvist_rings_write(w->ring[b], p->segments, p->count, entry);
    }
    free(exact);
    return failed;
}
