/* What operators are measured against: memory that is read and nothing else, and integer dot products of registers.
 *
 * Results depend on all of the work, so that no compiler leaves it out. Must not know what is measured.
 */
#include "kvist.h"

#include <stdatomic.h>

typedef struct { const uint8_t *data; int64_t bytes; atomic_llong sum; } read_job;

enum { BLOCK = 1 << 18 };

static void read_range(void *context, int64_t first, int64_t stop)
{
    read_job *job = context;
    u16v sum[8] = {{0}};
    for (int64_t block = first; block < stop; block++)
        for (int64_t at = 0; at < BLOCK / 8; at += 64)
#pragma GCC unroll 8
            for (int i = 0; i < 8; i++) { /* streams side by side are the fastest way, as products read */
                const uint8_t *place = job->data + block * BLOCK + i * (BLOCK / 8) + at;
                u16v word;
                memcpy(&word, place, 64);
                ask_for(place, 8);
                sum[i] ^= word;
            }
    uint32_t all = 0;
    for (int i = 0; i < 8; i++)
        for (int lane = 0; lane < 16; lane++) all ^= sum[i][lane];
    atomic_fetch_xor(&job->sum, (long long)all);
}

/* The exclusive or of the 32-bit words of whole blocks of 256 KB. */
int64_t kvist_read_memory(const void *data, int64_t bytes, int threads)
{
    read_job job = {data, bytes, 0};
    parallel_ranges(read_range, &job, bytes / BLOCK, threads);
    return atomic_load(&job.sum);
}

typedef struct { atomic_llong sum; } dots_job;

enum { CHAINS = 8, OPERATIONS = 1024 };

static void dots_range(void *context, int64_t first, int64_t stop)
{
    dots_job *job = context;
    int64_t total = 0;
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
    i16v sum[CHAINS], bytes = (i16v){0} + (int32_t)(first | 0x01010101);
#pragma GCC unroll 8
    for (int i = 0; i < CHAINS; i++) sum[i] = (i16v){0} + i;
    for (int64_t n = first * OPERATIONS; n < stop * OPERATIONS; n += CHAINS)
#pragma GCC unroll 8
        for (int i = 0; i < CHAINS; i++) /* one after the other, none folded into another */
            __asm__ volatile("vpdpbusd %1, %1, %0" : "+v"(sum[i]) : "v"(bytes));
    for (int i = 0; i < CHAINS; i++)
        for (int lane = 0; lane < 16; lane++) total += sum[i][lane];
#else
    (void)first, (void)stop;
#endif
    atomic_fetch_add(&job->sum, total);
}

/* `count` times 1,024 dot products of 64 bytes in 16 lanes. Returns 0 where the processor has no such instruction. */
int64_t kvist_integer_dots(int64_t count, int threads)
{
    dots_job job = {0};
    parallel_ranges(dots_range, &job, count, threads);
    return atomic_load(&job.sum);
}
