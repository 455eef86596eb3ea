/* The exported operators that whole layers run one after the other. What they mean stands where they are defined.
 *
 * Those with an int64_t result return -missing where scratch memory could not be had (see `claim`).
 */
#ifndef KVIST_OPERATORS_H
#define KVIST_OPERATORS_H

#include "pages.h"

void kvist_quantise(const float *x, float *y, int64_t rows, int64_t n, int format, int threads);
void kvist_rms_norm(const float *x, const float *weight, float *y, int64_t rows, int64_t n, float eps, int threads);
void kvist_rotate(const float *x, const float *cos, const float *sin, float *y, int64_t rows, int64_t heads, int64_t width,
                  int64_t pairs, int back, int threads);
void kvist_group_pool(const float *kv, const float *gate, float *out, int64_t groups, int64_t ratio, int64_t width);
int64_t kvist_linear(const float *x, int64_t rows, int64_t groups, int64_t inputs, const void *data, int kind, int64_t outputs,
                     float *y, int format, int exact, int threads);
int64_t kvist_enter(const float *x, const float *pre, const void *fn, int fn_kind, const float *base, const float *scale,
                    const float *norm, float *h, float *new_pre, float *post, float *comb, int64_t rows, int64_t streams,
                    int64_t width, int iterations, float hc_eps, float norm_eps, int threads);
void kvist_leave(const float *y, const float *x, const float *post, const float *comb, float *out, int64_t rows, int64_t streams,
                 int64_t width, int threads);
int64_t kvist_route(const float *x, int64_t rows, const void *gate, int kind, int64_t experts, int64_t inputs,
                    const float *bias_text, const float *bias_image, const uint8_t *text, int64_t active, float temperature,
                    int normalise, float scale, int64_t *ids, float *weights, int threads);
int64_t kvist_experts(const float *x, const int64_t *ids, const float *weights, const void *const *tables,
                      const int64_t *expert_ids, const int32_t *kinds, float *out, int64_t rows, int64_t active, int64_t experts,
                      int64_t width, int64_t hidden, float limit, int quantise, int begun, int threads);
void kvist_pages_write(const page_source *source, const float *main, const float *key, const int64_t *slots,
                       const int64_t *positions, int64_t count, int threads);
void kvist_rings_write(const window_ring *ring, const segment *segments, int64_t count, const float *window);
int64_t kvist_pages_attend(const page_source *source, const window_ring *ring, const segment *segments, int64_t count,
                           const float *q, const float *window, const int64_t *topk, int64_t selected, const float *sink,
                           float *out, int64_t heads, int block, int threads);
int64_t kvist_pages_select(const page_source *source, const segment *segments, int64_t count, const float *q, const float *weight,
                           const int64_t *pool, int64_t *topk, int64_t *blocks, int64_t heads, int64_t k, int64_t block_size,
                           int64_t pool_blocks, int64_t published, int threads);

#endif
