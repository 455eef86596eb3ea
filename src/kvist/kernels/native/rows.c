/* Row-wise operators: RMSNorm, rotary embedding of the last channels, group pooling, hyper-connection enter and leave. Knows no layer. */
#include "kvist.h"

INLINE float mean_square(const float *x, int64_t n)
{
    v16 acc = {0};
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) { v16 v = load16(x + i); acc = fma16(v, v, acc); }
    float total = sum16(acc);
    for (; i < n; i++) total = fma1(x[i], x[i], total);
    return total / (float)n;
}

INLINE void norm_row(const float *x, const float *weight, float *y, int64_t n, float eps)
{
    float factor = 1.0f / sqrtf(mean_square(x, n) + eps);
    for (int64_t i = 0; i < n; i++) y[i] = x[i] * factor * weight[i];
}

typedef struct { const float *x, *weight; float *y; int64_t n; float eps; } norm_job;

static void norm_range(void *context, int64_t first, int64_t stop)
{
    const norm_job *job = context;
    for (int64_t r = first; r < stop; r++) norm_row(job->x + r * job->n, job->weight, job->y + r * job->n, job->n, job->eps);
}

void kvist_rms_norm(const float *x, const float *weight, float *y, int64_t rows, int64_t n, float eps, int threads)
{
    norm_job job = {x, weight, y, n, eps};
    parallel_ranges(norm_range, &job, rows, rows * n < 65536 ? 1 : threads);
}

typedef struct { const float *x, *cos, *sin; float *y; int64_t heads, width, pairs; float sign; } rotate_job;

static void rotate_range(void *context, int64_t first, int64_t stop)
{
    const rotate_job *job = context;
    int64_t still = job->width - 2 * job->pairs;
    for (int64_t r = first; r < stop; r++) {
        const float *cos = job->cos + r * job->pairs, *sin = job->sin + r * job->pairs;
        for (int64_t h = 0; h < job->heads; h++) {
            const float *x = job->x + (r * job->heads + h) * job->width;
            float *y = job->y + (r * job->heads + h) * job->width;
            if (y != x) memcpy(y, x, (size_t)still * 4);
            for (int64_t p = 0; p < job->pairs; p++) {
                float even = x[still + 2 * p], odd = x[still + 2 * p + 1], s = job->sign * sin[p];
                y[still + 2 * p] = even * cos[p] - odd * s;
                y[still + 2 * p + 1] = even * s + odd * cos[p];
            }
        }
    }
}

void kvist_rotate(const float *x, const float *cos, const float *sin, float *y, int64_t rows, int64_t heads, int64_t width,
                  int64_t pairs, int back, int threads)
{
    rotate_job job = {x, cos, sin, y, heads, width, pairs, back ? -1.0f : 1.0f};
    parallel_ranges(rotate_range, &job, rows, rows * heads * width < 65536 ? 1 : threads);
}

enum { MOST_STREAMS = 8 };

typedef struct {
    const float *x, *pre, *base, *scale, *norm;
    float *h, *new_pre, *post, *comb, *made; /* `made`: the projections of a few rows, made before */
    weight_t fn;
    int64_t rows, streams, width;
    int iterations;
    float hc_eps, norm_eps;
    int64_t *missing;
} enter_job;

INLINE float sigmoid(float x) { return 1.0f / (1.0f + expf(-(x > -80.0f ? x : -80.0f))); }

INLINE void divide_rows(float *c, int s, float eps)
{
    for (int i = 0; i < s; i++) {
        float total = 0;
        for (int j = 0; j < s; j++) total += c[i * s + j];
        for (int j = 0; j < s; j++) c[i * s + j] /= total + eps;
    }
}

INLINE void divide_columns(float *c, int s, float eps)
{
    float total[MOST_STREAMS] = {0};
    for (int i = 0; i < s; i++)
        for (int j = 0; j < s; j++) total[j] += c[i * s + j];
    for (int i = 0; i < s; i++)
        for (int j = 0; j < s; j++) c[i * s + j] /= total[j] + eps;
}

/* Inlined with s = 4, where all loops unroll. */
INLINE void sinkhorn(float *c, const int s, int iterations, float eps)
{
    for (int i = 0; i < s; i++) {
        float peak = c[i * s], total = 0;
        for (int j = 1; j < s; j++) peak = c[i * s + j] > peak ? c[i * s + j] : peak;
        for (int j = 0; j < s; j++) total += c[i * s + j] = expf(c[i * s + j] - peak);
        for (int j = 0; j < s; j++) c[i * s + j] = c[i * s + j] / total + eps;
    }
    divide_columns(c, s, eps);
    for (int t = 1; t < iterations; t++) {
        divide_rows(c, s, eps);
        divide_columns(c, s, eps);
    }
}

SELDOM void any_sinkhorn(float *c, int s, int iterations, float eps) { sinkhorn(c, s, iterations, eps); }

static void coefficients(const enter_job *job, const float *mixes, int64_t r)
{
    int s = (int)job->streams;
    const float *scale = job->scale, *base = job->base;
    float *comb = job->comb + r * s * s;
    for (int i = 0; i < s; i++) {
        job->new_pre[r * s + i] = sigmoid(mixes[i] * scale[0] + base[i]) + job->hc_eps;
        job->post[r * s + i] = 2.0f * sigmoid(mixes[s + i] * scale[1] + base[s + i]);
    }
    for (int i = 0; i < s * s; i++) comb[i] = mixes[2 * s + i] * scale[2] + base[2 * s + i];
    if (s == 4) sinkhorn(comb, 4, job->iterations, job->hc_eps);
    else any_sinkhorn(comb, s, job->iterations, job->hc_eps);
}

enum { ENTER_ROWS = 16, MUCH_PROJECTED = 1 << 17, MOST_LOGITS = 2 * MOST_STREAMS + MOST_STREAMS * MOST_STREAMS };

static void enter_range(void *context, int64_t first, int64_t stop)
{
    const enter_job *job = context;
    int64_t s = job->streams, d = job->width, logits = 2 * s + s * s;
    float mixes[ENTER_ROWS * MOST_LOGITS];
    for (int64_t at = first; at < stop; at += ENTER_ROWS) {
        int64_t rows = stop - at < ENTER_ROWS ? stop - at : ENTER_ROWS;
        if (job->made) memcpy(mixes, job->made, (size_t)(rows * logits) * 4);
        else product_rows(job->x + at * s * d, s * d, rows, job->fn, mixes, logits, 0, NULL, job->missing);
        for (int64_t r = at; r < at + rows; r++) {
            const float *x = job->x + r * s * d, *pre = job->pre + r * s;
            float *h = job->h + r * d, *mix = mixes + (r - at) * logits;
            float rms = 1.0f / sqrtf(mean_square(x, s * d) + job->norm_eps);
            for (int64_t i = 0; i < logits; i++) mix[i] *= rms;
            coefficients(job, mix, r);
            for (int64_t i = 0; i < d; i++) h[i] = pre[0] * x[i];
            for (int64_t j = 1; j < s; j++)
                for (int64_t i = 0; i < d; i++) h[i] += pre[j] * x[j * d + i];
            norm_row(h, job->norm, h, d, job->norm_eps);
        }
    }
}

/* Few rows and a large weight: its panels are shared out. */
static void project_range(void *context, int64_t first, int64_t stop)
{
    const enter_job *job = context;
    int64_t inputs = job->fn.inputs, rows = job->rows;
    product_prepared(job->x, inputs, rows, job->fn, job->made, job->fn.outputs, 0, NULL, first, stop, job->missing);
}

int64_t kvist_enter(const float *x, const float *pre, const void *fn, int fn_kind, const float *base, const float *scale,
                 const float *norm, float *h, float *new_pre, float *post, float *comb, int64_t rows, int64_t streams,
                 int64_t width, int iterations, float hc_eps, float norm_eps, int threads)
{
    weight_t w = {fn, 2 * streams + streams * streams, streams * width, fn_kind};
    int64_t missing = 0;
    float made[ENTER_ROWS * MOST_LOGITS];
    enter_job job = {x, pre, base, scale, norm, h, new_pre, post, comb, NULL, w, rows, streams, width, iterations, hc_eps, norm_eps,
                     &missing};
    if (rows <= ENTER_ROWS && w.outputs * w.inputs >= MUCH_PROJECTED) {
        job.made = made;
        if (rows < FEW_ROWS) reads_weight(fn, w.outputs * w.inputs * 4);
        parallel_ranges(project_range, &job, (w.outputs + 15) / 16, threads);
    }
    parallel_ranges(enter_range, &job, rows, rows < 32 ? 1 : threads);
    return -missing;
}

typedef struct { const float *y, *x, *post, *comb; float *out; int64_t streams, width; } leave_job;

static void leave_range(void *context, int64_t first, int64_t stop)
{
    const leave_job *job = context;
    int64_t s = job->streams, d = job->width;
    for (int64_t r = first; r < stop; r++) {
        const float *x = job->x + r * s * d, *y = job->y + r * d, *comb = job->comb + r * s * s;
        for (int64_t j = 0; j < s; j++) {
            float *out = job->out + (r * s + j) * d, post = job->post[r * s + j];
            for (int64_t c = 0; c < d; c++) out[c] = comb[j] * x[c];
            for (int64_t i = 1; i < s; i++)
                for (int64_t c = 0; c < d; c++) out[c] += comb[i * s + j] * x[i * d + c];
            for (int64_t c = 0; c < d; c++) out[c] += post * y[c];
        }
    }
}

void kvist_leave(const float *y, const float *x, const float *post, const float *comb, float *out, int64_t rows, int64_t streams,
                 int64_t width, int threads)
{
    leave_job job = {y, x, post, comb, out, streams, width};
    parallel_ranges(leave_range, &job, rows, rows < 32 ? 1 : threads);
}

/* kv, gate [groups][ratio][width]: each channel's softmax over the group's gates weighs its values. */
void kvist_group_pool(const float *kv, const float *gate, float *out, int64_t groups, int64_t ratio, int64_t width)
{
    for (int64_t g = 0; g < groups; g++, kv += ratio * width, gate += ratio * width, out += width)
        for (int64_t c = 0; c < width; c++) {
            float peak = gate[c], total = 0, sum = 0;
            for (int64_t r = 1; r < ratio; r++) peak = gate[r * width + c] > peak ? gate[r * width + c] : peak;
            for (int64_t r = 0; r < ratio; r++) {
                float weight = expf(gate[r * width + c] - peak);
                total += weight;
                sum += weight * kv[r * width + c];
            }
            out[c] = sum / total;
        }
}
