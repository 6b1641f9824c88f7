/* The products of attention as register tiles of a few rows, queries by keys and weights by values, with the cache's
 * numbers converted in registers. attention.c says what is computed, and in which order it is summed. */
#ifndef MINILLM_ATTENTION_TILES_H
#define MINILLM_ATTENTION_TILES_H
#include "simd.h"

enum {
    BLOCK = 256,                            /* positions in a block */
    GROUP = VECTOR_REGISTERS == 32 ? 4 : 3, /* rows of a register tile: GROUP * 4 sums, GROUP + 1 operands */
    ROW = BLOCK + 8                         /* scores of a row; the last register tile may write beyond the block */
};

/* Some vectors of the cache, or of a strip. */
typedef struct {
    const void *numbers;
    const float *scales; /* of each 32 numbers, int4 only */
} vectors;

/* Bytes of numbers in a format of the cache; of int4 whole groups of 32. */
INLINE int64_t cached_bytes(int64_t format, int64_t numbers) {
    return format == INT4 ? numbers / 2 : numbers * (format == FLOAT32 ? 4 : format == BFLOAT16 ? 2 : 1);
}

/* Numbers i + e to i + e + LANES; of int4 i is that of whole groups. */
INLINE floats load_cached(vectors from, int format, int64_t i, int64_t e) {
    const void *p = from.numbers;
    if (format == FLOAT32) return load((const float *)p + i + e);
    if (format == BFLOAT16) return load_bfloat16((const uint16_t *)p + i + e);
    if (format == INT8) return load_int8((const int8_t *)p + i + e);
    i += e / 32 * 32, e %= 32;
    ints both = load_bytes((const uint8_t *)p + i / 2 + e % 16);
    ints numbers = (e < 16 ? both & 15 : both >> 4) - 8;
    return __builtin_convertvector(numbers, floats) * from.scales[i / 32];
}

/* scores[r, j] = queries[r] @ keys[j] for R rows and `count` keys, C (4 or 8) at a time. queries [R, width] */
INLINE void multiply_keys(const int R, const int C, const int format, const float *queries, vectors keys,
                          int64_t width, int64_t count, float *scores) {
    for (int64_t j = 0; j < count; j += C) {
        floats total[4][8];
        int64_t key[8];
#pragma GCC unroll 8
        for (int c = 0; c < C; c++) key[c] = (j + c < count ? j + c : count - 1) * width;
#pragma GCC unroll 4
        for (int r = 0; r < R; r++)
#pragma GCC unroll 8
            for (int c = 0; c < C; c++) total[r][c] = (floats){0};
        const int64_t step = format == INT4 ? 32 : LANES;
        for (int64_t d = 0; d < width; d += step)
#pragma GCC unroll 8
            for (int64_t e = 0; e < step; e += LANES) {
                floats q[4];
#pragma GCC unroll 4
                for (int r = 0; r < R; r++) {
                    q[r] = load(queries + r * width + d + e);
                    keep(&q[r]);
                }
#pragma GCC unroll 8
                for (int c = 0; c < C; c++) {
                    floats k = load_cached(keys, format, key[c] + d, e);
                    if (R > 1) keep(&k);
#pragma GCC unroll 4
                    for (int r = 0; r < R; r++) total[r][c] = multiply_add(q[r], k, total[r][c]);
                }
            }
#pragma GCC unroll 4
        for (int r = 0; r < R; r++)
#pragma GCC unroll 2
            for (int c = 0; c < C; c += 4) {
                four_floats four = sums(total[r][c], total[r][c + 1], total[r][c + 2], total[r][c + 3]);
                memcpy(scores + r * ROW + j + c, &four, sizeof four);
            }
    }
}

INLINE void multiply_keys_by_rows(int64_t rows, const int format, const float *queries, vectors keys, int64_t width,
                                  int64_t count, float *scores) {
    switch (rows) {
    case 1: multiply_keys(1, 8, format, queries, keys, width, count, scores); break;
    case 2: multiply_keys(2, 4, format, queries, keys, width, count, scores); break;
    case 3: multiply_keys(3, 4, format, queries, keys, width, count, scores); break;
    case 4: multiply_keys(4, 4, format, queries, keys, width, count, scores); break;
    }
}

/* The same for up to GROUP rows and any format. */
static void compute_scores(int64_t rows, int64_t format, const float *queries, vectors keys, int64_t width,
                           int64_t count, float *scores) {
    switch (format) {
    case FLOAT32: multiply_keys_by_rows(rows, FLOAT32, queries, keys, width, count, scores); break;
    case BFLOAT16: multiply_keys_by_rows(rows, BFLOAT16, queries, keys, width, count, scores); break;
    case INT8: multiply_keys_by_rows(rows, INT8, queries, keys, width, count, scores); break;
    case INT4: multiply_keys_by_rows(rows, INT4, queries, keys, width, count, scores); break;
    }
}

/* result[r, d] += sum over j of weights[r, j] * values[j, d] for R rows and V vectors of d. result [R, width]; values
 * are `stride` numbers apart. */
INLINE void add_vectors(const int R, const int V, const int format, const float *weights, vectors values,
                        int64_t stride, int64_t width, int64_t first, int64_t count, float *result) {
    floats total[4][8];
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) total[r][v] = load(result + r * width + first + v * LANES);
    const int64_t whole = V * LANES % 32 ? first / 32 * 32 : first; /* the first number of a group */
    for (int64_t j = 0; j < count; j++) {
        floats weight[4];
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) weight[r] = splat(weights[r * ROW + j]);
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) {
            floats value = load_cached(values, format, j * stride + whole, first - whole + v * LANES);
            if (R > 1) keep(&value);
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) total[r][v] = multiply_add(weight[r], value, total[r][v]);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) store(result + r * width + first + v * LANES, total[r][v]);
}

INLINE void add_values_to(const int R, const int format, const float *weights, vectors values, int64_t stride,
                          int64_t width, int64_t count, float *result) {
    int64_t d = 0;
    if (R == 1)
        for (; d + 8 * LANES <= width; d += 8 * LANES)
            add_vectors(R, 8, format, weights, values, stride, width, d, count, result);
    for (; d + 4 * LANES <= width; d += 4 * LANES) add_vectors(R, 4, format, weights, values, stride, width, d, count, result);
    for (; d < width; d += LANES) add_vectors(R, 1, format, weights, values, stride, width, d, count, result);
}

INLINE void add_values_to_rows(int64_t rows, const int format, const float *weights, vectors values, int64_t stride,
                               int64_t width, int64_t count, float *result) {
    switch (rows) {
    case 1: add_values_to(1, format, weights, values, stride, width, count, result); break;
    case 2: add_values_to(2, format, weights, values, stride, width, count, result); break;
    case 3: add_values_to(3, format, weights, values, stride, width, count, result); break;
    case 4: add_values_to(4, format, weights, values, stride, width, count, result); break;
    }
}

static void add_values(int64_t rows, int64_t format, const float *weights, vectors values, int64_t stride,
                       int64_t width, int64_t count, float *result) {
    switch (format) {
    case FLOAT32: add_values_to_rows(rows, FLOAT32, weights, values, stride, width, count, result); break;
    case BFLOAT16: add_values_to_rows(rows, BFLOAT16, weights, values, stride, width, count, result); break;
    case INT8: add_values_to_rows(rows, INT8, weights, values, stride, width, count, result); break;
    case INT4: add_values_to_rows(rows, INT4, weights, values, stride, width, count, result); break;
    }
}
#endif
