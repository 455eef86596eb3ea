/* Joint attention of each query over a span of window entries and its selected rows, one softmax, a sink in the denominator.
 *
 * Keys are read in place, never copied together. Heads lie in vector lanes for scores and softmax, channels for the output.
 */
#include "kvist.h"

typedef struct {
    const float *q, *window, *rows, *sink;
    const int64_t *span, *topk;
    float *out;
    int64_t heads, width, selected, most_keys;
    int round_weights;
    int64_t *missing;
} attend_job;

/* qT [C][8] of one group of 8 heads; scores[l] = q . key[l] for all of them. */
static void score_keys(const float *q_t, const float *const *keys, int64_t n, int64_t c, float scale, float *scores, int64_t ld)
{
    int64_t l = 0;
    for (; l + 4 <= n; l += 4) {
        v8 a = {0}, b = {0}, d = {0}, e = {0};
        const float *k0 = keys[l], *k1 = keys[l + 1], *k2 = keys[l + 2], *k3 = keys[l + 3];
        for (int64_t i = 0; i < c; i++) {
            v8 q = load8(q_t + i * 8);
            a = fma8(q, fill8(k0[i]), a), b = fma8(q, fill8(k1[i]), b);
            d = fma8(q, fill8(k2[i]), d), e = fma8(q, fill8(k3[i]), e);
        }
        store8(scores + l * ld, a * scale), store8(scores + (l + 1) * ld, b * scale);
        store8(scores + (l + 2) * ld, d * scale), store8(scores + (l + 3) * ld, e * scale);
    }
    for (; l < n; l++) {
        v8 a = {0};
        for (int64_t i = 0; i < c; i++) a = fma8(load8(q_t + i * 8), fill8(keys[l][i]), a);
        store8(scores + l * ld, a * scale);
    }
}

/* scores [n][ld] of 8 heads -> weights in place and inverse denominators. */
static v8 softmax_keys(float *scores, int64_t n, int64_t ld, v8 sink, int round_weights)
{
    v8 peak = fill8(-1e30f), total = {0};
    for (int64_t l = 0; l < n; l++) {
        v8 s = load8(scores + l * ld);
        i8v above = s > peak;
        peak = (v8)((above & (i8v)s) | (~above & (i8v)peak));
    }
    for (int64_t l = 0; l < n; l++) {
        v8 w = exp8(load8(scores + l * ld) - peak);
        total += w;
        if (round_weights)
            for (int h = 0; h < 8; h++) w[h] = float_of(bf16_bits(w[h]) << 16);
        store8(scores + l * ld, w);
    }
    return 1.0f / (total + exp8(sink - peak));
}

/* H heads x 4 vectors of channels in registers while all keys pass. */
INLINE void mix_block(const int H, const float *weights, int64_t ld, const float *const *keys, int64_t n, const float *inverse,
                      float *out, int64_t c, int64_t at)
{
    v16 acc[4][4];
#pragma GCC unroll 4
    for (int h = 0; h < H; h++)
#pragma GCC unroll 4
        for (int v = 0; v < 4; v++) acc[h][v] = (v16){0};
    for (int64_t l = 0; l < n; l++) {
        const float *key = keys[l] + at;
        v16 k0 = load16(key), k1 = load16(key + 16), k2 = load16(key + 32), k3 = load16(key + 48);
#pragma GCC unroll 4
        for (int h = 0; h < H; h++) {
            v16 w = fill16(weights[l * ld + h]);
            acc[h][0] = fma16(w, k0, acc[h][0]), acc[h][1] = fma16(w, k1, acc[h][1]);
            acc[h][2] = fma16(w, k2, acc[h][2]), acc[h][3] = fma16(w, k3, acc[h][3]);
        }
    }
#pragma GCC unroll 4
    for (int h = 0; h < H; h++)
#pragma GCC unroll 4
        for (int v = 0; v < 4; v++) store16(out + h * c + at + 16 * v, acc[h][v] * inverse[h]);
}

static void mix_keys(const float *weights, int64_t ld, const float *const *keys, int64_t n, const float *inverse, float *out,
                     int64_t heads, int64_t c)
{
    int64_t at = 0;
    for (; at + 64 <= c; at += 64) {
        int64_t h = 0;
        for (; h + 4 <= heads; h += 4) mix_block(4, weights + h, ld, keys, n, inverse + h, out + h * c, c, at);
        for (; h < heads; h++) mix_block(1, weights + h, ld, keys, n, inverse + h, out + h * c, c, at);
    }
    for (; at + 16 <= c; at += 16)
        for (int64_t h = 0; h < heads; h++) {
            v16 acc = {0};
            for (int64_t l = 0; l < n; l++) acc = fma16(fill16(weights[l * ld + h]), load16(keys[l] + at), acc);
            store16(out + h * c + at, acc * inverse[h]);
        }
    for (; at < c; at++)
        for (int64_t h = 0; h < heads; h++) {
            float acc = 0;
            for (int64_t l = 0; l < n; l++) acc = fma1(weights[l * ld + h], keys[l][at], acc);
            out[h * c + at] = acc * inverse[h];
        }
}

static int64_t list_keys(const attend_job *job, int64_t row, const float **keys)
{
    int64_t n = 0, c = job->width;
    for (int64_t t = job->span[2 * row]; t < job->span[2 * row + 1]; t++) keys[n++] = job->window + t * c;
    for (int64_t k = 0; k < job->selected; k++) {
        int64_t id = job->topk[row * job->selected + k];
        if (id >= 0) keys[n++] = job->rows + id * c;
    }
    return n;
}

void attend_keys(const float *q, const float *const *keys, int64_t n, int64_t heads, int64_t width, const float *sink,
                 int round_weights, float *out, float *scratch)
{
    if (n == 0) {
        memset(out, 0, (size_t)(heads * width) * 4);
        return;
    }
    float scale = 1.0f / sqrtf((float)width), *scores = scratch, *q_t = scratch + n * 8, inverse[8];
    for (int64_t first = 0; first < heads; first += 8) {
        int64_t some = heads - first < 8 ? heads - first : 8;
        const float *q_some = q + first * width;
        v8 bias = {0};
        for (int64_t h = 0; h < some; h++) bias[h] = sink[first + h];
        for (int64_t i = 0; i < width; i++)
            for (int64_t h = 0; h < 8; h++) q_t[i * 8 + h] = h < some ? q_some[h * width + i] : 0.0f;
        score_keys(q_t, keys, n, width, scale, scores, 8);
        store8(inverse, softmax_keys(scores, n, 8, bias, round_weights));
        mix_keys(scores, 8, keys, n, inverse, out + first * width, some, width);
    }
}

static void attend_range(void *context, int64_t first, int64_t stop)
{
    const attend_job *job = context;
    int64_t size = job->heads * job->width;
    const float **keys = claim((job->most_keys + 1) * (int64_t)sizeof *keys, job->missing);
    float *scratch = claim((job->most_keys + 1 + job->width) * 8 * 4, job->missing);
    for (int64_t row = first; row < stop && keys && scratch; row++) {
        int64_t n = list_keys(job, row, keys);
        attend_keys(job->q + row * size, keys, n, job->heads, job->width, job->sink, job->round_weights, job->out + row * size,
                    scratch);
    }
    free(keys);
    free(scratch);
}

int64_t kvist_attend(const float *q, const float *window, const int64_t *span, const float *rows, const int64_t *topk,
                  const float *sink, float *out, int64_t queries, int64_t heads, int64_t width, int64_t selected,
                  int64_t longest_span, int round_weights, int threads)
{
    int64_t missing = 0;
    attend_job job = {q, window, rows, sink, span, topk, out, heads, width, selected, longest_span + selected, round_weights,
                      &missing};
    parallel_ranges(attend_range, &job, queries, queries < 4 ? 1 : threads);
    return -missing;
}
