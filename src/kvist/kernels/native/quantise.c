/* Fake quantisation of rows: FP8 and MXFP4 in groups of 32 with power-of-two scales, main FP4 in groups of 16 with E4M3 scales.
 *
 * Bit for bit what kvist.quant gives, NaN groups and the sign of zero included. Must not know what the rows are.
 */
#include "kvist.h"

static const uint32_t EXPONENT = 0x7f800000u, MAGNITUDE = 0x7fffffffu;

INLINE uint32_t largest_bits(const float *x, int n)
{
    uint32_t best = 0;
    for (int i = 0; i < n; i++) {
        uint32_t u = bits_of(x[i]) & MAGNITUDE;
        best = u > best ? u : best;
    }
    return best;
}

/* Adding and subtracting a power of two whose last place is the format's step lets the adder round, ties to even. */
INLINE float round_steps(float magnitude, float smallest_normal, float magic_factor)
{
    float at_least = magnitude > smallest_normal ? magnitude : smallest_normal;
    float magic = float_of(bits_of(at_least) & EXPONENT) * magic_factor;
    return (magnitude + magic) - magic;
}

INLINE float round_e4m3(float magnitude) { return round_steps(magnitude, 0x1p-6f, 0x1p20f); }

INLINE float round_e2m1(float value)
{
    float magnitude = fabsf(value);
    magnitude = magnitude < 6.0f ? magnitude : 6.0f;
    return copysignf(round_steps(magnitude, 1.0f, 0x1p22f), value);
}

INLINE float power_scale(uint32_t amax_bits, float floor_value, float reciprocal)
{
    float amax = float_of(amax_bits);
    amax = (amax > floor_value ? amax : floor_value) * reciprocal;
    return float_of(bits_of(amax * (2.0f - 0x1p-23f)) & EXPONENT);
}

INLINE void fill_nan(float *y, int n)
{
    for (int i = 0; i < n; i++) y[i] = NAN;
}

INLINE void fp8_group(const float *x, float *y)
{
    uint32_t amax = largest_bits(x, 32);
    if (amax >= EXPONENT) { fill_nan(y, 32); return; }
    float scale = power_scale(amax, 1e-4f, 1.0f / 448.0f), inverse = 1.0f / scale;
    for (int i = 0; i < 32; i++) y[i] = copysignf(round_e4m3(fabsf(x[i]) * inverse), x[i]) * scale;
}

INLINE void mxfp4_group(const float *x, float *y)
{
    uint32_t amax = largest_bits(x, 32);
    if (amax >= EXPONENT) { fill_nan(y, 32); return; }
    float scale = power_scale(amax, 6 * 0x1p-126f, 1.0f / 6.0f), inverse = 1.0f / scale;
    for (int i = 0; i < 32; i++) y[i] = round_e2m1(x[i] * inverse) * scale;
}

INLINE void main_group(const float *x, float *y)
{
    uint32_t amax_bits = largest_bits(x, 16);
    if (amax_bits >= EXPONENT) { fill_nan(y, 16); return; }
    float amax = float_of(amax_bits), floor_value = 6 * 0x1p-9f;
    float scale = (amax > floor_value ? amax : floor_value) / 6.0f;
    scale = round_e4m3(scale < 448.0f ? scale : 448.0f);
    for (int i = 0; i < 16; i++) y[i] = round_e2m1(x[i] / scale) * scale;
}

void quantise_row(const float *x, float *y, int64_t n, int format)
{
    if (format == FORMAT_FP8)
        for (int64_t i = 0; i < n; i += 32) fp8_group(x + i, y + i);
    else if (format == FORMAT_MXFP4)
        for (int64_t i = 0; i < n; i += 32) mxfp4_group(x + i, y + i);
    else
        for (int64_t i = 0; i < n; i += 16) main_group(x + i, y + i);
}

/* Twice a magnitude of the E2M1 grid (0, 1, 2, 3, 4, 6, 8, 12) -> its code. */
static const uint8_t CODE_OF_TWICE[16] = {0, 1, 2, 3, 4, 4, 5, 5, 6, 6, 6, 6, 7, 7, 7, 7};

INLINE uint8_t e2m1_code(float value)
{
    float rounded = round_e2m1(value);
    return CODE_OF_TWICE[(int)(2.0f * fabsf(rounded))] | (uint8_t)(signbit(rounded) ? 8 : 0);
}

INLINE uint8_t e4m3_byte(float scale) /* an exact E4M3 value above 0 */
{
    if (scale < 0x1p-6f) return (uint8_t)(scale * 0x1p9f);
    return (uint8_t)((bits_of(scale) >> 20) - ((127 - 7) << 3));
}

void pack_main_row(const float *x, uint8_t *codes, uint8_t *scales, int64_t n)
{
    for (int64_t g = 0; g < n / 16; g++, x += 16, codes += 8) {
        uint32_t amax_bits = largest_bits(x, 16);
        if (amax_bits >= EXPONENT) {
            memset(codes, 0, 8), scales[g] = 0x7f;
            continue;
        }
        float amax = float_of(amax_bits), floor_value = 6 * 0x1p-9f;
        float scale = (amax > floor_value ? amax : floor_value) / 6.0f;
        scale = round_e4m3(scale < 448.0f ? scale : 448.0f);
        scales[g] = e4m3_byte(scale);
        for (int i = 0; i < 8; i++) codes[i] = (uint8_t)(e2m1_code(x[2 * i] / scale) | e2m1_code(x[2 * i + 1] / scale) << 4);
    }
}

void pack_key_row(const float *x, uint8_t *codes, uint8_t *scales, int64_t n)
{
    for (int64_t g = 0; g < n / 32; g++, x += 32, codes += 16) {
        uint32_t amax = largest_bits(x, 32);
        if (amax >= EXPONENT) {
            memset(codes, 0, 16), scales[g] = 0xff;
            continue;
        }
        float scale = power_scale(amax, 6 * 0x1p-126f, 1.0f / 6.0f), inverse = 1.0f / scale;
        scales[g] = (uint8_t)(bits_of(scale) >> 23);
        for (int i = 0; i < 16; i++)
            codes[i] = (uint8_t)(e2m1_code(x[2 * i] * inverse) | e2m1_code(x[2 * i + 1] * inverse) << 4);
    }
}

typedef struct { const float *x; float *y; int64_t n; int format; } quantise_job;

static void quantise_range(void *context, int64_t first, int64_t stop)
{
    const quantise_job *job = context;
    for (int64_t r = first; r < stop; r++) quantise_row(job->x + r * job->n, job->y + r * job->n, job->n, job->format);
}

void kvist_quantise(const float *x, float *y, int64_t rows, int64_t n, int format, int threads)
{
    quantise_job job = {x, y, n, format};
    parallel_ranges(quantise_range, &job, rows, rows * n < 65536 ? 1 : threads);
}
