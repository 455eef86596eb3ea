/* The engine's memory as native code sees it: pages of packed rows behind a page table, and rings of window entries.
 *
 * The structures mirror those in pages.py field by field. Must not know layers, requests or scheduling.
 */
#ifndef KVIST_PAGES_H
#define KVIST_PAGES_H

#include "kvist.h"

/* One source layer's planes. Row j of a slot lies in page table[slot * table_width + j / rows], at row j % rows. */
typedef struct {
    uint8_t *bytes;
    const int32_t *table;
    int64_t page_bytes, table_width, ratio, rows, main_width, key_width;
    int64_t main_codes, main_scales, key_codes, key_scales; /* offsets of planes in a page */
} page_source;

/* One layer's ring: values [slots][size][width], state [slots][3] = origin (-1: empty), low, stop. */
typedef struct {
    float *values;
    int64_t *state;
    int64_t size, window, width;
} window_ring;

/* One request's rows in a pass. */
typedef struct {
    int64_t slot, start, length, position, publish_from;
} segment;

typedef struct { int64_t segment, first, count; } query_tile;

INLINE uint8_t *page_of(const page_source *source, int64_t slot, int64_t row)
{
    return source->bytes + source->table[slot * source->table_width + row / source->rows] * source->page_bytes;
}

/* One main row or index key as values. */
void read_main_row(const page_source *source, int64_t slot, int64_t row, float *out);
void read_key_row(const page_source *source, int64_t slot, int64_t row, float *out);

/* Cuts the segments into tiles of at most `most` rows; the caller frees the list. NULL: see `claim`. */
query_tile *tile_segments(const segment *segments, int64_t count, int64_t most, int64_t *tiles, int64_t *missing);

#endif
