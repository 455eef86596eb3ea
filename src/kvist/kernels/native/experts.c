/* Routing and routed experts: scores, exact top-k with the lower id winning ties, SwiGLU experts over blocks of rows.
 *
 * A thread owns rows and runs all their experts in ascending id, so sums need no locks and do not depend on the batch.
 */
#include "kvist.h"

typedef struct {
    const float *x, *bias_text, *bias_image;
    const uint8_t *text;
    weight_t gate;
    int64_t *ids;
    float *weights;
    int64_t active;
    float temperature, scale;
    int normalise;
    int64_t *missing;
} route_job;

static void route_row(const route_job *job, const float *logits, float *score, float *biased, int64_t row)
{
    int64_t experts = job->gate.outputs, k = job->active;
    const float *bias = job->text[row] ? job->bias_text : job->bias_image;
    for (int64_t e = 0; e < experts; e++) {
        float z = logits[e] / job->temperature;
        score[e] = sqrtf(z > 20.0f ? z : log1pf(expf(z)));
        biased[e] = score[e] + bias[e];
    }
    int64_t *ids = job->ids + row * k;
    float *weights = job->weights + row * k, total = 0;
    for (int64_t n = 0; n < k; n++) {
        int64_t best = -1;
        for (int64_t e = 0; e < experts; e++)
            if (biased[e] > -INFINITY && (best < 0 || biased[e] > biased[best])) best = e;
        ids[n] = best;
        if (best < 0) continue;
        biased[best] = -INFINITY;
        int64_t at = n;
        for (; at > 0 && ids[at - 1] > best; at--) ids[at] = ids[at - 1];
        ids[at] = best;
    }
    for (int64_t n = 0; n < k; n++) total += weights[n] = ids[n] < 0 ? 0.0f : score[ids[n]];
    for (int64_t n = 0; n < k; n++) weights[n] = (job->normalise ? weights[n] / (total + 1e-20f) : weights[n]) * job->scale;
}

enum { ROUTE_ROWS = 16 };

static void route_range(void *context, int64_t first, int64_t stop)
{
    const route_job *job = context;
    int64_t experts = job->gate.outputs, inputs = job->gate.inputs;
    float *buffer = claim((ROUTE_ROWS + 2) * experts * 4, job->missing);
    if (!buffer) return;
    float *score = buffer + ROUTE_ROWS * experts, *biased = score + experts;
    for (int64_t at = first; at < stop; at += ROUTE_ROWS) {
        int64_t rows = stop - at < ROUTE_ROWS ? stop - at : ROUTE_ROWS;
        product_rows(job->x + at * inputs, inputs, rows, job->gate, buffer, experts, 0, NULL, job->missing);
        for (int64_t r = 0; r < rows; r++) route_row(job, buffer + r * experts, score, biased, at + r);
    }
    free(buffer);
}

int64_t kvist_route(const float *x, int64_t rows, const void *gate, int kind, int64_t experts, int64_t inputs,
                 const float *bias_text, const float *bias_image, const uint8_t *text, int64_t active, float temperature,
                 int normalise, float scale, int64_t *ids, float *weights, int threads)
{
    weight_t w = {gate, experts, inputs, kind};
    int64_t missing = 0;
    route_job job = {x, bias_text, bias_image, text, w, ids, weights, active, temperature, scale, normalise, &missing};
    parallel_ranges(route_range, &job, rows, rows < 32 ? 1 : threads);
    return -missing;
}

/* `tables` holds, for each listed expert, pointers to packed w1, w2 and w3; `expert_ids` ascending, a trailing shared
 * expert has id -1 and runs every row with weight 1. `begun`: `out` holds the sum over experts of earlier calls. */
typedef struct {
    const float *x;
    const int64_t *ids;
    const float *weights;
    const void *const *tables;
    const int64_t *expert_ids;
    const int32_t *kinds;
    float *out;
    int64_t rows, active, experts, width, hidden;
    float limit;
    int quantise;
    int64_t *missing;
} experts_job;

enum { EXPERT_ROWS = 32, MUCH_WORK = 1 << 19, MUCH_HIDDEN = 1 << 13 };

static void swiglu_row(float *gate, const float *up, int64_t n, float limit, float weight)
{
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        v16 g = load16(gate + i), u = load16(up + i), top = fill16(limit), bottom = fill16(-limit);
        i16v over = g > top, high = u > top, low = u < bottom, far = g < fill16(-80.0f);
        g = (v16)((over & (i16v)top) | (~over & (i16v)g));
        u = (v16)((high & (i16v)top) | (~high & (i16v)u));
        u = (v16)((low & (i16v)bottom) | (~low & (i16v)u));
        v16 e = exp16(-(v16)((far & (i16v)fill16(-80.0f)) | (~far & (i16v)g)));
        store16(gate + i, g * (1.0f / (1.0f + e)) * u * weight);
    }
    for (; i < n; i++) {
        float g = gate[i] > limit ? limit : gate[i], u = up[i] > limit ? limit : up[i] < -limit ? -limit : up[i];
        gate[i] = g * (1.0f / (1.0f + expf(-(g < -80.0f ? -80.0f : g)))) * u * weight;
    }
}

/* Up to EXPERT_ROWS rows of one expert; `index` names them, `share` their weights. Returns its outputs [rows][width]. */
static float *expert_block(const experts_job *job, int64_t e, const int64_t *index, const float *share, int64_t rows, float *buffer)
{
    int64_t d = job->width, f = job->hidden;
    float *x = buffer, *gate = x + EXPERT_ROWS * d, *up = gate + EXPERT_ROWS * f, *y = up + EXPERT_ROWS * f;
    uint32_t *pairs = (uint32_t *)(y + EXPERT_ROWS * d);
    weight_t w1 = {job->tables[3 * e], f, d, job->kinds[e]};
    weight_t w2 = {job->tables[3 * e + 1], d, f, job->kinds[e]};
    weight_t w3 = {job->tables[3 * e + 2], f, d, job->kinds[e]};
    for (int64_t r = 0; r < rows; r++) memcpy(x + r * d, job->x + index[r] * d, (size_t)d * 4);
    product_rows(x, d, rows, w1, gate, f, job->quantise, pairs, job->missing);
    product_rows(x, d, rows, w3, up, f, job->quantise, pairs, job->missing);
    for (int64_t r = 0; r < rows; r++) {
        swiglu_row(gate + r * f, up + r * f, f, job->limit, share[r]);
        if (job->quantise) quantise_row(gate + r * f, gate + r * f, f, FORMAT_FP8);
    }
    product_rows(gate, f, rows, w2, y, d, job->quantise, pairs, job->missing);
    return y;
}

INLINE void add_row(float *out, const float *y, int64_t d)
{
    for (int64_t c = 0; c < d; c++) out[c] += y[c];
}

static float *expert_buffer(const experts_job *job)
{
    int64_t d = job->width, f = job->hidden, most = d > f ? d : f;
    return claim(EXPERT_ROWS * (2 * d + 2 * f + most + 2) * 4, job->missing);
}

/* The place of the e-th listed expert among a row's choices: -1 if it was not chosen, `active` for the shared one. */
INLINE int64_t place_of(const experts_job *job, int64_t e, int64_t row)
{
    if (job->expert_ids[e] < 0) return job->active;
    for (int64_t n = job->active - 1; n >= 0; n--)
        if (job->ids[row * job->active + n] == job->expert_ids[e]) return n;
    return -1;
}

INLINE float share_of(const experts_job *job, int64_t row, int64_t place)
{
    return place == job->active ? 1.0f : job->weights[row * job->active + place];
}

/* Many rows: a thread owns rows and runs all their experts. */
static void rows_range(void *context, int64_t first, int64_t stop)
{
    const experts_job *job = context;
    int64_t d = job->width, index[EXPERT_ROWS];
    float share[EXPERT_ROWS], *buffer = expert_buffer(job);
    if (!buffer) return;
    for (int64_t e = 0; e < job->experts; e++)
        for (int64_t r = first, rows = 0; r < stop; r++) {
            int64_t place = place_of(job, e, r);
            if (place >= 0) index[rows] = r, share[rows++] = share_of(job, r, place);
            if (rows < EXPERT_ROWS && (r + 1 < stop || !rows)) continue;
            const float *y = expert_block(job, e, index, share, rows, buffer);
            for (int64_t n = 0; n < rows; n++) add_row(job->out + index[n] * d, y + n * d, d);
            rows = 0;
        }
    free(buffer);
}

/* Few rows: every expert is read once, its panels shared out. `rows` of an expert stand at `first` of these arrays; its inputs at
 * `input`, because a lone row is prepared once for all. */
typedef struct { int64_t expert, first, rows, input; int exact; } chosen_expert;

typedef struct {
    const experts_job *job;
    chosen_expert *list;
    int64_t *index; /* the batch row of each of their rows, and its weight */
    float *share, *x, *gate, *up, *y;
    uint32_t *pairs;
    int64_t count, depth;
} few_job;

static weight_t part_of(const experts_job *job, int64_t e, int part)
{
    int64_t d = job->width, f = job->hidden;
    return (weight_t){job->tables[3 * e + part], part == 1 ? d : f, part == 1 ? f : d, job->kinds[e]};
}

/* Rows as the products take them; whether FP4 panels may hold sums in units of a scale is found once. */
static int prepare_rows(const few_job *few, const chosen_expert *c, const float *x, int64_t inputs)
{
    if (!few->job->quantise) return 0;
    make_pairs(x, inputs, c->rows, inputs, few->pairs + c->first * few->depth);
    return plain_rows(x, inputs, c->rows, inputs) ? EXACT_PLAIN : EXACT;
}

static void inner_range(void *context, int64_t first, int64_t stop)
{
    const few_job *few = context;
    const experts_job *job = few->job;
    int64_t d = job->width, f = job->hidden;
    for (piece p; first < stop; first = p.next) {
        p = piece_of(first, stop, f);
        const chosen_expert *c = few->list + few->count - 1 - p.matrix / 2;
        float *out = (p.matrix % 2 ? few->up : few->gate) + c->first * f;
        product_prepared(few->x + c->input * d, d, c->rows, part_of(job, c->expert, p.matrix % 2 ? 2 : 0), out, f, c->exact,
                         few->pairs + c->input * few->depth, p.from, p.to, job->missing);
    }
}

static void hidden_range(void *context, int64_t first, int64_t stop)
{
    const few_job *few = context;
    const experts_job *job = few->job;
    int64_t f = job->hidden;
    for (int64_t n = first; n < stop; n++) {
        chosen_expert *c = few->list + n;
        for (int64_t r = c->first; r < c->first + c->rows; r++) {
            swiglu_row(few->gate + r * f, few->up + r * f, f, job->limit, few->share[r]);
            if (job->quantise) quantise_row(few->gate + r * f, few->gate + r * f, f, FORMAT_FP8);
        }
        c->exact = prepare_rows(few, c, few->gate + c->first * f, f);
    }
}

static void outer_range(void *context, int64_t first, int64_t stop)
{
    const few_job *few = context;
    const experts_job *job = few->job;
    int64_t d = job->width, f = job->hidden;
    for (piece p; first < stop; first = p.next) {
        p = piece_of(first, stop, d);
        const chosen_expert *c = few->list + few->count - 1 - p.matrix;
        product_prepared(few->gate + c->first * f, f, c->rows, part_of(job, c->expert, 1), few->y + c->first * d, d, c->exact,
                         few->pairs + c->first * few->depth, p.from, p.to, job->missing);
    }
}

/* Which rows each listed expert has, their copies and pairs. */
static void list_chosen(few_job *few)
{
    const experts_job *job = few->job;
    int64_t d = job->width, at = 0;
    for (int64_t e = 0; e < job->experts; e++) {
        chosen_expert *c = few->list + few->count;
        *c = (chosen_expert){e, at, 0, at, 0};
        for (int64_t r = 0; r < job->rows; r++) {
            int64_t place = place_of(job, e, r);
            if (place < 0) continue;
            few->index[at] = r, few->share[at] = share_of(job, r, place);
            if (job->rows > 1 || !few->count) memcpy(few->x + at * d, job->x + r * d, (size_t)d * 4);
            at++, c->rows++;
        }
        if (!c->rows) continue;
        if (job->rows > 1 || !few->count) c->exact = prepare_rows(few, c, few->x + c->first * d, d);
        else c->input = few->list->input, c->exact = few->list->exact;
        few->count++;
    }
}

/* The first weight of the inner or outer products, if there are any. */
static void announce(const few_job *few, int part)
{
    if (!few->count || few->job->rows >= FEW_ROWS) return;
    weight_t w = part_of(few->job, few->list[few->count - 1].expert, part);
    reads_weight(w.data, w.outputs * w.inputs * 2);
}

static void few_rows(const experts_job *job, int threads)
{
    int64_t d = job->width, f = job->hidden, most = job->rows * (job->active + 1), depth = ((d > f ? d : f) + 1) / 2;
    float *x = claim(most * (2 * d + 2 * f + depth + 1) * 4, job->missing);
    chosen_expert *list = claim((job->experts + 1) * (int64_t)sizeof *list + most * 8, job->missing);
    if (x && list) {
        few_job few = {.job = job, .list = list, .index = (int64_t *)(list + job->experts + 1), .x = x, .depth = depth};
        few.y = x + most * d, few.gate = few.y + most * d, few.up = few.gate + most * f, few.share = few.up + most * f;
        few.pairs = (uint32_t *)(few.share + most);
        list_chosen(&few);
        /* From the last to the first: the shared one is known before rows choose, so it may be read ahead, and its wide panels
         * do not come last, where a thread would wait for another's. */
        announce(&few, 0);
        parallel_pieces(inner_range, &few, few.count * 2 * share_count(f), threads, PIECES);
        parallel_ranges(hidden_range, &few, few.count, few.count * f < MUCH_HIDDEN ? 1 : threads);
        announce(&few, 1);
        parallel_pieces(outer_range, &few, few.count * share_count(d), threads, PIECES);
        for (int64_t n = 0; n < few.count; n++)
            for (int64_t r = list[n].first; r < list[n].first + list[n].rows; r++) add_row(job->out + few.index[r] * d, few.y + r * d, d);
    }
    free(x);
    free(list);
}

int64_t kvist_experts(const float *x, const int64_t *ids, const float *weights, const void *const *tables, const int64_t *expert_ids,
                   const int32_t *kinds, float *out, int64_t rows, int64_t active, int64_t experts, int64_t width, int64_t hidden,
                   float limit, int quantise, int begun, int threads)
{
    int64_t missing = 0;
    experts_job job = {x, ids, weights, tables, expert_ids, kinds, out, rows, active, experts, width, hidden, limit, quantise,
                       &missing};
    if (!begun) memset(out, 0, (size_t)(rows * width) * 4);
    if (rows > EXPERT_ROWS) parallel_ranges(rows_range, &job, rows, threads);
    else few_rows(&job, rows * (active + 1) * width * hidden < MUCH_WORK ? 1 : threads);
    return -missing;
}
