/* The largest of many numbers, and the n-th largest. */
#ifndef MINILLM_SELECTION_H
#define MINILLM_SELECTION_H
#include "simd.h"
#include <math.h>
#include <stdbool.h>

/* The largest of n numbers but NaN; `ordinary` becomes false if any is NaN or +infinity. */
static inline float largest_of(const float *x, int64_t n, bool *ordinary) {
    floats best[4];
    ints below = {0}; /* -1 where all numbers so far were below infinity */
    below = ~below;
    for (int k = 0; k < 4; k++) best[k] = splat(-INFINITY);
    int64_t i = 0;
    for (; i + 4 * LANES <= n; i += 4 * LANES)
#pragma GCC unroll 4
        for (int k = 0; k < 4; k++) {
            floats v = load(x + i + k * LANES);
            best[k] = at_least(v, best[k]);
            below &= v < INFINITY;
        }
    float most = largest(at_least(at_least(best[0], best[1]), at_least(best[2], best[3])));
    for (int k = 0; k < LANES; k++) *ordinary &= below[k] != 0;
    for (; i < n; i++) {
        most = x[i] > most ? x[i] : most;
        *ordinary &= x[i] < INFINITY;
    }
    return most;
}

/* The largest of each of some blocks of `size`, a multiple of LANES, and the largest of all. `ordinary` as above. */
INLINE float largest_of_vectors(const float *x, int64_t blocks, int64_t size, float *maxima, bool *ordinary) {
    floats best = splat(-INFINITY);
    ints below = {0};
    below = ~below;
    for (int64_t b = 0; b < blocks; b++) {
        floats most = splat(-INFINITY);
        for (int64_t i = 0; i < size; i += LANES) {
            floats v = load(x + b * size + i);
            most = at_least(v, most);
            below &= v < INFINITY;
        }
        maxima[b] = largest(most);
        best = at_least(most, best);
    }
    for (int k = 0; k < LANES; k++) *ordinary &= below[k] != 0;
    return largest(best);
}

/* The largest of each whole block of `size` among n numbers, and the largest of all. `ordinary` as above. */
static inline float largest_of_blocks(const float *x, int64_t n, int64_t size, float *maxima, bool *ordinary) {
    int64_t blocks = n / size;
    float rest = largest_of(x + blocks * size, n - blocks * size, ordinary), most = -INFINITY;
    if (size == 64) most = largest_of_vectors(x, blocks, 64, maxima, ordinary); /* known when it is compiled */
    else if (size % LANES == 0) most = largest_of_vectors(x, blocks, size, maxima, ordinary);
    else
        for (int64_t b = 0; b < blocks; b++) {
            maxima[b] = largest_of(x + b * size, size, ordinary);
            most = maxima[b] > most ? maxima[b] : most;
        }
    return rest > most ? rest : most;
}

/* The k-th largest of n numbers, which are reordered (Hoare's selection). 0 < k <= n; no NaN */
static inline float select_largest(float *x, int64_t n, int64_t k) {
    int64_t low = 0, high = n - 1;
    while (low < high) {
        float pivot = x[low + (high - low) / 2];
        int64_t i = low, j = high;
        while (i <= j) {
            while (x[i] > pivot) i++;
            while (x[j] < pivot) j--;
            if (i <= j) {
                float swapped = x[i];
                x[i++] = x[j];
                x[j--] = swapped;
            }
        }
        if (k - 1 <= j) high = j;
        else if (k - 1 >= i) low = i;
        else break;
    }
    return x[k - 1];
}

/* Ids, ascending, of numbers x / divisor among which the k largest of V are, with all ties of the last one. Returns how
 * many.
 *
 * k of the maxima of blocks, which are numbers of x too, reach the k-th largest maximum: so do the k largest numbers.
 * Few blocks have a number that does. 0 < k <= V, divisor > 0; `scratch` has 2 V floats. */
static inline int64_t best_few(const float *x, float divisor, int64_t V, int64_t k, int64_t *ids, float *scratch) {
    int64_t size = 64, count = 0;
    while (size > 1 && V / size < 2 * k) size /= 2;
    int64_t blocks = V / size;
    float *maxima = scratch, *reordered = scratch + blocks;
    bool ordinary = true;
    largest_of_blocks(x, V, size, maxima, &ordinary);
    memcpy(reordered, maxima, sizeof(float) * blocks);
    float least = select_largest(reordered, blocks, k) / divisor;
    for (int64_t b = 0; b * size < V; b++) {
        if (b < blocks && maxima[b] / divisor < least) continue;
        int64_t end = (b + 1) * size < V ? (b + 1) * size : V;
        for (int64_t i = b * size; i < end; i++)
            if (x[i] / divisor >= least) ids[count++] = i;
    }
    return count;
}
#endif
