/* Products of rows with packed weights: packing, the register tiles, and the threaded entry point.
 *
 * Every output is summed over inputs in ascending order in one lane, so a row's bits depend on the row alone. With
 * AVX512-BF16 and rows that hold bfloat16 values, pairs go through the dot instruction (float32 sums). Knows no layer.
 */
#include "kvist.h"

INLINE v16 upper(u16v pairs) { return (v16)(pairs & 0xffff0000u); }
INLINE v16 lower(u16v pairs) { return (v16)(pairs << 16); }

enum { USE_DOT = 0, USE_PAIRS = 1, USE_F32 = 2 };

/* R rows x P panels in registers. `mode`, `R` and `P` are constants after inlining. */
INLINE void tile(const int mode, const int R, const int P, const float *x, int64_t ldx, const uint32_t *pairs, int64_t ldp,
                 weight_t w, int64_t panel, float *y, int64_t ldy)
{
    const int64_t depth = mode == USE_F32 ? w.inputs : (w.inputs + 1) / 2;
    const uint32_t *data = (const uint32_t *)w.data + panel * depth * 16;
    v16 acc[8][8];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int p = 0; p < P; p++) acc[r][p] = (v16){0};
    const int64_t whole = mode == USE_PAIRS ? w.inputs / 2 : depth;
    for (int64_t k = 0; k < whole; k++) {
#pragma GCC unroll 8
        for (int p = 0; p < P; p++) {
            u16v word;
            memcpy(&word, data + (p * depth + k) * 16, 64);
            if (R == 1) ask_for(data + (p * depth + k) * 16, P);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                if (mode == USE_F32) acc[r][p] = fma16(fill16(x[r * ldx + k]), (v16)word, acc[r][p]);
                else if (mode == USE_PAIRS) {
                    acc[r][p] = fma16(fill16(x[r * ldx + 2 * k]), lower(word), acc[r][p]);
                    acc[r][p] = fma16(fill16(x[r * ldx + 2 * k + 1]), upper(word), acc[r][p]);
                }
#ifdef __AVX512BF16__
                else
                    acc[r][p] = dot_pairs(acc[r][p], word, (u16v){0} + pairs[r * ldp + k]);
#endif
            }
        }
    }
    if (mode == USE_PAIRS && whole < depth)
        for (int p = 0; p < P; p++) {
            u16v word;
            memcpy(&word, data + (p * depth + whole) * 16, 64);
            for (int r = 0; r < R; r++) acc[r][p] = fma16(fill16(x[r * ldx + 2 * whole]), lower(word), acc[r][p]);
        }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int p = 0; p < P; p++) {
            int64_t at = (panel + p) * 16, left = w.outputs - at;
            if (left >= 16) store16(y + r * ldy + at, acc[r][p]);
            else memcpy(y + r * ldy + at, &acc[r][p], (size_t)left * 4);
        }
}

#define TILE(R, P) tile(mode, R, P, x + r * ldx, ldx, pairs + r * ldp, ldp, w, panel, y + r * ldy, ldy)

INLINE void all_tiles(const int mode, const float *x, int64_t ldx, const uint32_t *pairs, int64_t ldp, int64_t rows, weight_t w,
                      float *y, int64_t ldy, int64_t first, int64_t stop)
{
    int64_t r = 0;
    if (rows >= 4)
        for (int64_t panel = first; panel < stop;) { /* a few panels stay in cache while all rows pass */
            int64_t wide = stop - panel >= 4 ? 4 : stop - panel >= 2 ? 2 : 1;
            for (r = 0; r + 4 <= rows; r += 4) {
                if (wide == 4) TILE(4, 4);
                else if (wide == 2) TILE(4, 2);
                else TILE(4, 1);
            }
            panel += wide;
        }
    for (; r < rows; r++)
        for (int64_t panel = first; panel < stop;) {
            if (stop - panel >= 8) { TILE(1, 8); panel += 8; }
            else if (stop - panel >= 4) { TILE(1, 4); panel += 4; }
            else if (stop - panel >= 2) { TILE(1, 2); panel += 2; }
            else { TILE(1, 1); panel += 1; }
        }
}

/* Panels of bfloat16 pairs; `pairs` holds the rows in that form if `exact` and the processor multiplies them. */
static void pair_tiles(const float *x, int64_t ldx, const uint32_t *pairs, int64_t rows, weight_t w, float *y, int64_t ldy,
                       int exact, int64_t first, int64_t stop)
{
#ifdef __AVX512BF16__
    if (exact) {
        all_tiles(USE_DOT, x, ldx, pairs, (w.inputs + 1) / 2, rows, w, y, ldy, first, stop);
        return;
    }
#endif
    (void)exact, (void)pairs;
    all_tiles(USE_PAIRS, x, ldx, NULL, 0, rows, w, y, ldy, first, stop);
}

/* Whether rows go through the dot instruction, as pairs. */
INLINE int takes_pairs(weight_t w, int exact)
{
#ifdef __AVX512BF16__
    return exact && w.kind != WEIGHT_F32;
#else
    (void)w, (void)exact;
    return 0;
#endif
}

enum { EXPANDED_BYTES = 1 << 19 };

enum { FP4_ROWS = 8 };

/* A few rows times up to four panels (one row: eight), a weight's code looked up once for as many rows as registers hold. */
static void fp4_few(const float *x, int64_t ldx, const uint32_t *pairs, int64_t rows, const fp4_panels *w, int panels, float *y,
                    int64_t ldy, int64_t left, int plain)
{
    v16 sums[16];
    size_t bytes = (size_t)(left < panels * 16 ? left : panels * 16) * 4;
    for (int64_t r = 0, some; r < rows; r += some) {
        const uint32_t *own = pairs ? pairs + r * w->depth : NULL;
        some = rows - r >= 4 ? 4 : rows - r >= 2 ? 2 : 1;
        if (!plain || !fp4_rows(own, w->depth, (int)some, w, panels, sums))
            for (int64_t n = 0; n < some; n++)
                fp4_row(x + (r + n) * ldx, own ? own + n * w->depth : NULL, w, panels, sums + panels * n);
        for (int64_t n = 0; n < some; n++) memcpy(y + (r + n) * ldy, sums + panels * n, bytes);
    }
}

/* FP4 panels, expanded a few at a time into memory that stays in the cache: the sums are those of kind 0. */
static void fp4_tiles(const float *x, int64_t ldx, const uint32_t *pairs, int64_t rows, weight_t w, float *y, int64_t ldy,
                      int exact, int64_t first, int64_t stop, int64_t *missing)
{
    int64_t depth = (w.inputs + 1) / 2, panels = (w.outputs + 15) / 16;
    int64_t code_bytes = fp4_panel_bytes(depth, 0), scale_bytes = fp4_panel_bytes(depth, 1);
    int64_t fitting = EXPANDED_BYTES / (depth * 64), step = fitting >= 8 ? 8 : fitting >= 4 ? 4 : 2;
    const uint8_t *codes = w.data, *scales = codes + panels * code_bytes;
    if (rows <= FP4_ROWS && w.inputs % 2 == 0) {
        int dot = takes_pairs(w, exact), plain = dot && w.kind == WEIGHT_NEAR_FP4 && (exact == EXACT_PLAIN || plain_rows(x, ldx, rows, w.inputs));
        for (int64_t panel = first, count; panel < stop; panel += count) {
            int64_t more = stop - panel; /* eight sums hide an operation's latency: of one row those of eight panels */
            count = rows == 1 && more >= 8 ? 8 : more < 4 ? more : 4;
            fp4_panels some = {codes + panel * code_bytes, scales + panel * scale_bytes, code_bytes, scale_bytes, depth};
            fp4_few(x, ldx, dot ? pairs : NULL, rows, &some, (int)count, y + panel * 16, ldy, w.outputs - panel * 16, plain);
        }
        return;
    }
    uint32_t *expanded = claim(step * depth * 64, missing);
    if (!expanded) return;
    for (int64_t panel = first; panel < stop; panel += step) {
        int64_t count = stop - panel < step ? stop - panel : step;
        for (int64_t n = 0; n < count; n++)
            expand_fp4(codes + (panel + n) * code_bytes, scales + (panel + n) * scale_bytes, depth, expanded + n * depth * 16);
        weight_t part = {expanded, w.outputs - panel * 16, w.inputs, WEIGHT_BF16};
        pair_tiles(x, ldx, pairs, rows, part, y + panel * 16, ldy, exact, 0, count);
    }
    free(expanded);
}

void make_pairs(const float *x, int64_t ldx, int64_t rows, int64_t inputs, uint32_t *pairs)
{
    int64_t depth = (inputs + 1) / 2, whole = inputs / 2;
    for (int64_t r = 0; r < rows; r++, x += ldx, pairs += depth) {
        for (int64_t k = 0; k < whole; k++) pairs[k] = (bits_of(x[2 * k]) >> 16) | (bits_of(x[2 * k + 1]) & 0xffff0000u);
        if (whole < depth) pairs[whole] = bits_of(x[2 * whole]) >> 16;
    }
}

void product_prepared(const float *x, int64_t ldx, int64_t rows, weight_t w, float *y, int64_t ldy, int exact,
                      const uint32_t *pairs, int64_t first, int64_t stop, int64_t *missing)
{
    if (w.kind == WEIGHT_F32) all_tiles(USE_F32, x, ldx, NULL, 0, rows, w, y, ldy, first, stop);
    else if (w.kind != WEIGHT_BF16) fp4_tiles(x, ldx, pairs, rows, w, y, ldy, exact, first, stop, missing);
    else pair_tiles(x, ldx, pairs, rows, w, y, ldy, exact, first, stop);
}

void product_rows(const float *x, int64_t ldx, int64_t rows, weight_t w, float *y, int64_t ldy, int exact, uint32_t *pairs,
                  int64_t *missing)
{
    if (takes_pairs(w, exact)) make_pairs(x, ldx, rows, w.inputs, pairs);
    product_prepared(x, ldx, rows, w, y, ldy, exact, pairs, 0, (w.outputs + 15) / 16, missing);
}

/* w float32 [outputs, inputs] -> packed panels; returns 0 and leaves garbage if kind is bfloat16 and a value does not fit. */
int kvist_pack(const float *w, int64_t outputs, int64_t inputs, int kind, void *packed)
{
    int64_t panels = (outputs + 15) / 16, depth = kind == WEIGHT_F32 ? inputs : (inputs + 1) / 2;
    for (int64_t p = 0; p < panels; p++)
        for (int64_t k = 0; k < depth; k++)
            for (int64_t lane = 0; lane < 16; lane++) {
                int64_t o = p * 16 + lane;
                uint32_t word = 0;
                if (o < outputs && kind == WEIGHT_F32) word = bits_of(w[o * inputs + k]);
                else if (o < outputs) {
                    uint32_t low = bits_of(w[o * inputs + 2 * k]);
                    uint32_t high = 2 * k + 1 < inputs ? bits_of(w[o * inputs + 2 * k + 1]) : 0;
                    if ((low | high) & 0xffffu) return 0;
                    word = (low >> 16) | high;
                }
                ((uint32_t *)packed)[(p * depth + k) * 16 + lane] = word;
            }
    return 1;
}

/* `groups`: x [rows][groups][inputs], y [rows][groups][each], weight panels group by group. `pairs` [groups][rows][depth] is
 * made before if panels are shared out. */
typedef struct {
    const float *x;
    float *y;
    const uint32_t *pairs;
    int64_t rows, ldx, groups, each, panels;
    weight_t w;
    int format, exact;
    int64_t *missing;
} linear_job;

enum { BLOCK_ROWS = 64, MUCH_READ = 1 << 21, MUCH_WORK = 1 << 20 };

static weight_t group_weight(const linear_job *job, int64_t g)
{
    int64_t depth = job->w.kind == WEIGHT_F32 ? job->w.inputs : (job->w.inputs + 1) / 2;
    const uint32_t *data = job->w.data;
    return (weight_t){data + g * job->panels * 16 * depth, job->each, job->w.inputs, job->w.kind};
}

typedef struct { linear_job *jobs; int64_t count; } linear_list;

/* Shares [first, stop) of the panels of all jobs and their groups, for all rows: each weight is read once. */
static void linear_panels(void *context, int64_t first, int64_t stop)
{
    const linear_list *list = context;
    for (const linear_job *job = list->jobs; job < list->jobs + list->count; job++) {
        int64_t depth = (job->w.inputs + 1) / 2, ldy = job->groups * job->each, shares = job->groups * share_count(job->each);
        int64_t at = first > 0 ? first : 0, end = stop < shares ? stop : shares;
        for (piece p; at < end; at = p.next) {
            p = piece_of(at, end, job->each);
            product_prepared(job->x + p.matrix * job->w.inputs, job->ldx, job->rows, group_weight(job, p.matrix),
                             job->y + p.matrix * job->each, ldy, job->exact, job->pairs + p.matrix * job->rows * depth, p.from, p.to,
                             job->missing);
        }
        first -= shares, stop -= shares;
    }
}

/* Rows [first, stop) for all panels, a block of rows at a time, quantised on the way if `format` >= 0. */
static void linear_rows(void *context, int64_t first, int64_t stop)
{
    const linear_job *job = context;
    int64_t inputs = job->w.inputs, width = inputs * job->groups, ldy = job->groups * job->each;
    float *buffer = claim(2 * BLOCK_ROWS * (width + 2) * 4, job->missing);
    if (!buffer) return;
    uint32_t *pairs = (uint32_t *)(buffer + BLOCK_ROWS * width);
    for (int64_t row = first; row < stop; row += BLOCK_ROWS) {
        int64_t rows = stop - row < BLOCK_ROWS ? stop - row : BLOCK_ROWS;
        const float *x = job->x + row * job->ldx;
        for (int64_t r = 0; r < rows && job->format >= 0; r++) quantise_row(x + r * width, buffer + r * width, width, job->format);
        if (job->format >= 0) x = buffer;
        for (int64_t g = 0; g < job->groups; g++)
            product_rows(x + g * inputs, width, rows, group_weight(job, g), job->y + row * ldy + g * job->each, ldy, job->exact, pairs,
                         job->missing);
    }
    free(buffer);
}

static linear_job job_of(const product *p, int64_t rows, int64_t *missing)
{
    int64_t each = p->outputs / p->groups;
    weight_t w = {p->data, p->outputs, p->inputs, p->kind};
    return (linear_job){p->x, p->y, NULL, rows, p->groups * p->inputs, p->groups, each, (each + 15) / 16, w, p->format, p->exact, missing};
}

static int64_t prepared_bytes(const linear_job *job) { return job->rows * (job->ldx + job->groups * ((job->w.inputs + 1) / 2)) * 4; }

/* Quantised rows and their pairs into `buffer`, or those of the job before if it takes the same. Returns what is left of it. */
static char *prepare_job(linear_job *job, const product *own, const product *before, char *buffer)
{
    if (before && before->x == own->x && before->format == own->format && before->inputs == own->inputs && before->groups == own->groups) {
        job->x = job[-1].x, job->pairs = job[-1].pairs;
        if (takes_pairs(job->w, job->exact) <= takes_pairs(job[-1].w, job[-1].exact)) return buffer;
    }
    float *quantised = (float *)buffer;
    uint32_t *pairs = (uint32_t *)(quantised + job->rows * job->ldx);
    int64_t depth = (job->w.inputs + 1) / 2;
    if (job->x == own->x && job->format >= 0) {
        for (int64_t r = 0; r < job->rows; r++) quantise_row(job->x + r * job->ldx, quantised + r * job->ldx, job->ldx, job->format);
        job->x = quantised;
    }
    for (int64_t g = 0; g < job->groups && takes_pairs(job->w, job->exact); g++)
        make_pairs(job->x + g * job->w.inputs, job->ldx, job->rows, job->w.inputs, pairs + g * job->rows * depth);
    job->pairs = pairs;
    return buffer + prepared_bytes(job);
}

int64_t multiply_all(const product *products, int64_t count, int64_t rows, int threads)
{
    linear_job jobs[MOST_PRODUCTS];
    int64_t missing = 0, bytes = 0, shares = 0, work = 0;
    for (int64_t n = 0; n < count; n++) {
        jobs[n] = job_of(products + n, rows, &missing);
        if (rows > BLOCK_ROWS) parallel_ranges(linear_rows, jobs + n, rows, threads);
        bytes += prepared_bytes(jobs + n), shares += jobs[n].groups * share_count(jobs[n].each), work += rows * jobs[n].w.outputs * jobs[n].w.inputs;
    }
    if (rows > BLOCK_ROWS) return -missing;
    char *buffer = claim(bytes, &missing), *left = buffer;
    if (!buffer) return -missing;
    for (int64_t n = 0; n < count; n++) {
        left = prepare_job(jobs + n, products + n, n ? products + n - 1 : NULL, left);
        if (rows < FEW_ROWS) reads_weight(jobs[n].w.data, jobs[n].w.outputs * jobs[n].w.inputs * (jobs[n].w.kind == WEIGHT_F32 ? 4 : 2));
    }
    /* A few rows are bound by reading the weight: waking a thread pays from some 4 MB on; many rows by their products. */
    int alone = rows < FEW_ROWS ? work < MUCH_READ : work < MUCH_WORK;
    linear_list list = {jobs, count};
    parallel_pieces(linear_panels, &list, shares, alone ? 1 : threads, PIECES);
    free(buffer);
    return -missing;
}

int64_t kvist_linear(const float *x, int64_t rows, int64_t groups, int64_t inputs, const void *data, int kind, int64_t outputs,
                     float *y, int format, int exact, int threads)
{
    product only = {x, data, y, groups, inputs, outputs, kind, format, exact};
    return multiply_all(&only, 1, rows, threads);
}
