/* Attention of a whole ragged batch over rings, batch rows and packed rows in pages, in one call.
 *
 * Keys are those that `kvist_attend` would get, in its order, and go through the same `attend_keys`: the same bits.
 * A tile of queries of one request decodes each selected row once.
 */
#include "pages.h"

enum { MOST_TILE = 32, TILE_BYTES = 1 << 18, HEADS = 8, MUCH_ATTENDED = 1 << 17 };

typedef struct {
    const page_source *source;
    const window_ring *ring;
    const segment *segments;
    const query_tile *tiles;
    const float *q, *window, *sink;
    const int64_t *topk, *firsts;
    float *out;
    int64_t heads, selected, tile, most_keys, parts, part_heads; /* heads are shared out where tiles are fewer than threads */
    int block;
    int64_t *missing;
} attend_job;

/* Row ids of a tile that are decoded already: open addressing; a cell counts only under the current stamp. */
typedef struct {
    int64_t *id;
    int32_t *stamp, *place;
    int64_t mask;
    int32_t now;
} row_map;

static row_map make_map(int64_t most, int64_t *missing)
{
    int64_t cells = 16;
    while (cells < 2 * most) cells *= 2;
    row_map map = {claim(cells * 8, missing), claim(cells * 4, missing), claim(cells * 4, missing), cells - 1, 0};
    if (map.stamp) memset(map.stamp, 0, (size_t)cells * 4);
    return map;
}

/* Where row `id` lies among the decoded ones; `next` if it is new. */
INLINE int32_t map_place(row_map *map, int64_t id, int32_t next)
{
    uint64_t at = ((uint64_t)id * 0x9e3779b97f4a7c15u >> 32) & (uint64_t)map->mask;
    for (; map->stamp[at] == map->now; at = (at + 1) & (uint64_t)map->mask)
        if (map->id[at] == id) return map->place[at];
    map->stamp[at] = map->now, map->id[at] = id, map->place[at] = next;
    return next;
}

/* Window keys of one query, oldest first: ring cells, then rows of the batch. */
static int64_t list_window(const attend_job *job, const query_tile *tile, int64_t row, const float **keys)
{
    const segment *part = job->segments + tile->segment;
    const window_ring *ring = job->ring;
    int64_t n = 0, c = ring->width, own = part->position + row, first = job->firsts[tile->segment];
    int64_t stop = job->block ? part->position + part->length : own + 1;
    if (!job->block && own + 1 - ring->window > first) first = own + 1 - ring->window;
    const float *held = ring->values + part->slot * ring->size * c;
    for (int64_t t = first; t < part->position; t++) keys[n++] = held + t % ring->size * c;
    const float *fresh = job->window + part->start * c;
    for (int64_t t = first > part->position ? first : part->position; t < stop; t++) keys[n++] = fresh + (t - part->position) * c;
    return n;
}

static void attend_range(void *context, int64_t first, int64_t stop)
{
    const attend_job *job = context;
    int64_t c = job->ring->width, k = job->selected, size = job->heads * c;
    const float **keys = claim((job->most_keys + 1) * (int64_t)sizeof *keys, job->missing);
    float *scratch = claim((job->most_keys + 16 + c) * 32, job->missing);
    float *decoded = claim(job->tile * k * c * 4, job->missing);
    row_map map = make_map(k ? job->tile * k : 1, job->missing);
    int ready = keys && scratch && decoded && map.id && map.stamp && map.place;
    for (int64_t t = first; t < stop && ready; t++) {
        const query_tile *tile = job->tiles + t / job->parts;
        int64_t head = t % job->parts * job->part_heads, heads = job->heads - head;
        heads = heads < job->part_heads ? heads : job->part_heads;
        const segment *part = job->segments + tile->segment;
        int32_t rows = 0;
        map.now++;
        for (int64_t r = tile->first; r < tile->first + tile->count; r++) {
            int64_t n = list_window(job, tile, r, keys), row = part->start + r;
            for (int64_t i = 0; i < k; i++) {
                int64_t id = job->topk[row * k + i];
                if (id < 0) continue;
                int32_t place = tile->count == 1 ? rows : map_place(&map, id, rows);
                if (place == rows) read_main_row(job->source, part->slot, id, decoded + rows++ * c);
                keys[n++] = decoded + place * c;
            }
            attend_keys(job->q + row * size + head * c, keys, n, heads, c, job->sink + head, 0, job->out + row * size + head * c, scratch);
        }
    }
    free(map.id), free(map.stamp), free(map.place);
    free(decoded), free(scratch), free(keys);
}

/* As WindowRings.first: -1 if entries that a causal query needs were overwritten. */
static int64_t first_held(const window_ring *ring, const segment *part)
{
    const int64_t *state = ring->state + part->slot * 3;
    int64_t origin = state[0], low = state[1], stop = state[2], p = part->position;
    if (origin < 0 || p > stop || p <= origin) return p;
    int64_t needed = p - ring->window + 1 > origin ? p - ring->window + 1 : origin;
    if (needed < low) return -1;
    return p - ring->window > low ? p - ring->window : low;
}

/* Keep the newest entries of each segment; window [N][width]. */
void kvist_rings_write(const window_ring *ring, const segment *segments, int64_t count, const float *window)
{
    for (int64_t s = 0; s < count; s++) {
        const segment *part = segments + s;
        int64_t c = ring->width, stop = part->position + part->length, *state = ring->state + part->slot * 3;
        if (!part->length) continue;
        int64_t from = stop - ring->size > part->position ? stop - ring->size : part->position;
        for (int64_t t = from; t < stop; t++)
            memcpy(ring->values + (part->slot * ring->size + t % ring->size) * c, window + (part->start + t - part->position) * c,
                   (size_t)c * 4);
        if (state[0] < 0 || part->position > state[2] || part->position <= state[0]) state[0] = state[1] = part->position;
        if (stop - ring->size > state[1]) state[1] = stop - ring->size;
        state[2] = stop;
    }
}

/* Returns 0, 1 + the segment whose ring has lost entries it needs, or -missing (see `claim`); no ring is written then.
 * `block`: every query sees its whole segment, nothing is kept. `source` may be NULL (window only). */
int64_t kvist_pages_attend(const page_source *source, const window_ring *ring, const segment *segments, int64_t count,
                           const float *q, const float *window, const int64_t *topk, int64_t selected, const float *sink,
                           float *out, int64_t heads, int block, int threads)
{
    int64_t longest = 0, failed = 0, missing = 0, tiles, *firsts = claim(count * 8, &missing);
    if (!firsts) return -missing;
    for (int64_t s = 0; s < count; s++) {
        firsts[s] = first_held(ring, segments + s);
        if (firsts[s] < 0 && !failed) failed = s + 1;
        longest = segments[s].length > longest ? segments[s].length : longest;
    }
    if (!failed) {
        int64_t k = source ? selected : 0, tile = k ? TILE_BYTES / (k * ring->width * 4) : MOST_TILE;
        tile = tile > MOST_TILE ? MOST_TILE : tile;
        tile = tile > longest ? longest : tile;
        tile = tile < 1 ? 1 : tile;
        query_tile *list = tile_segments(segments, count, tile, &tiles, &missing);
        int64_t most = ring->window + k + (block ? longest : 0);
        int64_t sets = (heads + HEADS - 1) / HEADS, parts = tiles < threads && most * heads * ring->width >= MUCH_ATTENDED ? threads : 1;
        int64_t each = (sets + parts - 1) / parts * HEADS; /* eight heads are scored at once */
        parts = (heads + each - 1) / each;
        attend_job job = {source, ring, segments, list, q, window, sink, topk, firsts, out, heads, k, tile, most, parts, each, block, &missing};
        if (list) parallel_ranges(attend_range, &job, tiles * parts, tiles * parts < 2 ? 1 : threads);
        free(list);
        if (!block && !missing) kvist_rings_write(ring, segments, count, window);
    }
    free(firsts);
    return missing ? -missing : failed;
}
