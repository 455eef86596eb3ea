/* Uniform numbers keyed by (seed, position, use): Philox 4x64-10 (Salmon et al., SC 2011), the numbers that numpy's generator
 * gives for that key, so that the reference and this file agree bit for bit. Knows nothing of sampling.
 */
#include "kvist.h"

typedef unsigned __int128 u128;
enum { ROUNDS = 10 };

/* The four words of block `index`; numpy counts up before the first block, hence from 1. */
INLINE void philox(uint64_t seed, uint64_t position, uint64_t use, uint64_t index, uint64_t word[4])
{
    uint64_t a = index + 1, b = 0, c = 0, d = use, key0 = seed, key1 = position;
    for (int round = 0; round < ROUNDS; round++) {
        u128 left = (u128)a * 0xD2E7470EE14C6C93u, right = (u128)c * 0xCA5A826395121157u;
        a = (uint64_t)(right >> 64) ^ b ^ key0;
        b = (uint64_t)right;
        c = (uint64_t)(left >> 64) ^ d ^ key1;
        d = (uint64_t)left;
        key0 += 0x9E3779B97F4A7C15u;
        key1 += 0xBB67AE8584CAA73Bu;
    }
    word[0] = a, word[1] = b, word[2] = c, word[3] = d;
}

INLINE double uniform(uint64_t word) { return (double)(word >> 11) * 0x1p-53; }

/* The first `count` numbers of a stream. */
void kvist_uniform(uint64_t seed, uint64_t position, uint64_t use, int64_t count, double *out)
{
    uint64_t word[4];
    int64_t at = 0;
    for (; at + 4 <= count; at += 4) {
        philox(seed, position, use, (uint64_t)at / 4, word);
        for (int lane = 0; lane < 4; lane++) out[at + lane] = uniform(word[lane]);
    }
    if (at == count) return;
    philox(seed, position, use, (uint64_t)at / 4, word);
    for (int lane = 0; at + lane < count; lane++) out[at + lane] = uniform(word[lane]);
}

/* Number ids[n] of the stream of (seeds[n], positions[n], use). */
void kvist_uniform_at(const uint64_t *seeds, const uint64_t *positions, const int64_t *ids, uint64_t use, int64_t count, double *out)
{
    for (int64_t n = 0; n < count; n++) {
        uint64_t word[4];
        philox(seeds[n], positions[n], use, (uint64_t)ids[n] / 4, word);
        out[n] = uniform(word[ids[n] % 4]);
    }
}
