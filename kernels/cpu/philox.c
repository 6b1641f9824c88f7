/* The uniform numbers of draws: Philox4x32-10, the upper 23 bits of the first word, as reference/philox.py defines it.
 *
 *     uniforms    numbers = uniform(seeds, sequences, positions, purpose)
 *
 * Bytes moved: a key and a number for each draw. Floor: ten rounds of two products; a launch takes longer.
 */
#include "pool.h"

typedef struct {
    const uint64_t *seeds;                /* [R] */
    const int64_t *sequences, *positions; /* [R] */
    double *numbers;                      /* [R], out: in (0, 1), exact in float32 */
    int64_t R, purpose;
} uniforms_arguments;

static uint32_t first_word(uint64_t seed, uint32_t c0, uint32_t c1, uint32_t c2) {
    uint32_t c3 = 0, k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    for (int round = 0; round < 10; round++) {
        uint64_t product0 = (uint64_t)0xD2511F53 * c0, product1 = (uint64_t)0xCD9E8D57 * c2;
        c0 = (uint32_t)(product1 >> 32) ^ c1 ^ k0;
        c1 = (uint32_t)product1;
        c2 = (uint32_t)(product0 >> 32) ^ c3 ^ k1;
        c3 = (uint32_t)product0;
        k0 += 0x9E3779B9;
        k1 += 0xBB67AE85;
    }
    return c0;
}

void uniforms(const void *arguments, int64_t share, int64_t shares, int64_t worker) {
    const uniforms_arguments *a = arguments;
    int64_t first, last;
    (void)worker;
    share_of(a->R, share, shares, &first, &last);
    for (int64_t r = first; r < last; r++) {
        uint32_t k = first_word(a->seeds[r], (uint32_t)a->positions[r], (uint32_t)a->sequences[r], (uint32_t)a->purpose);
        a->numbers[r] = (2 * (k >> 9) + 1) * 0x1p-24;
    }
}
