/* The Walsh-Hadamard transform of vectors that are rounded to 4 bits: its own inverse, and a rotation.
 *
 *     x.reshape(-1, h) @ H / sqrt(h),   H[i, j] = (-1)^(bits set in i & j),   h the largest power of 2 that divides D
 *
 * A rotation keeps dot products, so keys and queries that are both rotated have the same scores; of rotated values the
 * weighted sum is rotated, and rotated back. It spreads a number that is larger than its neighbours over all of them: 16
 * integers then serve a group better.
 *
 * Order of summation: stage t adds and subtracts numbers whose places differ in bit t, as minillm/reference/rotate.py
 * does, so that both round alike.
 */
#ifndef MINILLM_HADAMARD_H
#define MINILLM_HADAMARD_H
#include "simd.h"
#include <math.h>

enum { MOST_ROTATED = 256 };

INLINE int64_t hadamard_size(int64_t D) {
    int64_t h = D & -D;
    return h < MOST_ROTATED ? h : MOST_ROTATED;
}

/* In place. Neighbours are added and subtracted, sums to the first half and differences to the second: after as many
 * stages as h has bits all numbers are back in their places. Not inlined: compilers may round two copies differently. */
static __attribute__((noinline)) void rotate(float *x, int64_t D) {
    const int64_t h = hadamard_size(D), half = h / 2;
    const float scale = 1 / sqrtf((float)h);
    float other[MOST_ROTATED];
    for (float *block = x; block < x + D; block += h) {
        for (int64_t size = h; size > 1; size /= 2) {
            for (int64_t i = 0; i < half; i++) {
                float even = block[2 * i], odd = block[2 * i + 1];
                other[i] = even + odd;
                other[half + i] = even - odd;
            }
            memcpy(block, other, sizeof(float) * h);
        }
        for (int64_t i = 0; i < h; i++) block[i] *= scale;
    }
}
#endif
