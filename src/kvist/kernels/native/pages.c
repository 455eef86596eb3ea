/* Rows in pages: packing and unpacking. A packed row read back gives the bits of the fake-quantised values.
 *
 * An E2M1 value times its scale is exact in float32, so only the table and the product matter, not their order.
 */
#include "pages.h"

static const float E2M1[16] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

/* 32 values of 16 bytes of codes; each half has its scale. */
INLINE void unpack32(const uint8_t *codes, float first, float second, float *out)
{
#if defined(__GNUC__) && !defined(__clang__)
    typedef uint8_t b16 __attribute__((vector_size(16)));
    const i16v low = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23};
    b16 bytes;
    memcpy(&bytes, codes, 16);
    i16v code = __builtin_convertvector(bytes, i16v);
    v16 even = __builtin_shuffle(load16(E2M1), code), odd = __builtin_shuffle(load16(E2M1), code >> 4); /* modulo 16 */
    store16(out, __builtin_shuffle(even, odd, low) * first);
    store16(out + 16, __builtin_shuffle(even, odd, low + 8) * second);
#else
    for (int i = 0; i < 16; i++) {
        float scale = i < 8 ? first : second;
        out[2 * i] = E2M1[codes[i] & 15] * scale, out[2 * i + 1] = E2M1[codes[i] >> 4] * scale;
    }
#endif
}

void read_main_row(const page_source *source, int64_t slot, int64_t row, float *out)
{
    const uint8_t *page = page_of(source, slot, row);
    int64_t at = row % source->rows, width = source->main_width;
    const uint8_t *codes = page + source->main_codes + at * (width / 2);
    const uint8_t *scales = page + source->main_scales + at * (width / 16);
    for (int64_t g = 0; g < width / 32; g++)
        unpack32(codes + 16 * g, e4m3_value(scales[2 * g]), e4m3_value(scales[2 * g + 1]), out + 32 * g);
}

void read_key_row(const page_source *source, int64_t slot, int64_t row, float *out)
{
    const uint8_t *page = page_of(source, slot, row);
    int64_t at = row % source->rows, width = source->key_width;
    const uint8_t *codes = page + source->key_codes + at * (width / 2);
    const uint8_t *scales = page + source->key_scales + at * (width / 32);
    for (int64_t g = 0; g < width / 32; g++) {
        float scale = e8m0_value(scales[g]);
        unpack32(codes + 16 * g, scale, scale, out + 32 * g);
    }
}

query_tile *tile_segments(const segment *segments, int64_t count, int64_t most, int64_t *tiles, int64_t *missing)
{
    int64_t n = 0;
    for (int64_t s = 0; s < count; s++) n += (segments[s].length + most - 1) / most;
    query_tile *list = claim(n * (int64_t)sizeof *list, missing);
    *tiles = n, n = 0;
    if (!list) return NULL;
    for (int64_t s = 0; s < count; s++)
        for (int64_t at = 0; at < segments[s].length; at += most) {
            int64_t left = segments[s].length - at;
            list[n++] = (query_tile){s, at, left < most ? left : most};
        }
    return list;
}

typedef struct {
    const page_source *source;
    const float *main, *key;
    const int64_t *slots, *positions;
} write_job;

static void write_range(void *context, int64_t first, int64_t stop)
{
    const write_job *job = context;
    const page_source *s = job->source;
    for (int64_t g = first; g < stop; g++) {
        int64_t row = job->positions[g] / s->ratio, at = row % s->rows;
        uint8_t *page = page_of(s, job->slots[g], row);
        pack_main_row(job->main + g * s->main_width, page + s->main_codes + at * (s->main_width / 2),
                      page + s->main_scales + at * (s->main_width / 16), s->main_width);
        pack_key_row(job->key + g * s->key_width, page + s->key_codes + at * (s->key_width / 2),
                     page + s->key_scales + at * (s->key_width / 32), s->key_width);
    }
}

/* Pack main rows and keys of groups that start at `positions` of `slots`. */
void kvist_pages_write(const page_source *source, const float *main, const float *key, const int64_t *slots,
                       const int64_t *positions, int64_t count, int threads)
{
    write_job job = {source, main, key, slots, positions};
    parallel_ranges(write_range, &job, count, count < 32 ? 1 : threads);
}
