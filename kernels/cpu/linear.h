/* The matrix product's arguments, and what its files share.
 *
 * linear.c is the operation, and has its description. linear_floats.c, linear_across.c, linear_integers.c and
 * linear_blocks.c multiply, by the type of W: several files, since they are compiled side by side.
 */
#ifndef MINILLM_LINEAR_H
#define MINILLM_LINEAR_H
#include "pool.h"
#include "simd.h"
#include <stdbool.h>

enum {
    ACROSS = LANES >= 8,                    /* whether many rows of floats have lanes along outputs or rows */
    DEPTH = 768,                            /* inputs of a block; divides into groups and vectors */
    FLOAT_OUTPUTS = LANES == 16 ? 192 : 96, /* outputs that `floats_many` multiplies together: W in the L2 cache */
    INTEGER_OUTPUTS = 2 * LANES,            /* outputs of a register tile of `integers_any` */
    SET_ROWS = 65 /* rows from which on W is taken by many outputs: they stay in the L2 cache while a tile's rows are in
                     the L1 cache. Fewer rows meet few outputs at a time, in the L1 cache, while the next are fetched */
};

typedef struct {
    const void *weight;     /* [outputs, inputs] of float or of 16 bits, int8 [outputs, inputs'], or uint8 [outputs,
                               inputs' / 2]; inputs' are inputs in whole groups; or blocks, [outputs, blocks] */
    const uint16_t *scales; /* float16 [outputs, inputs' / group] of int8 and int4, else NULL */
    const void *offsets;    /* of int4, [outputs, inputs' / group]: float16 offsets, or uint8 zero points if `zeros`;
                               NULL: all zero points are 8 */
    const float *bias;      /* [outputs], or NULL */
    const float *residual;  /* [rows, outputs], `stride` numbers from row to row, or NULL; not `out` */
    const float *x;         /* [rows, inputs] */
    float *out;             /* [rows, outputs], as `residual` */
    int8_t *x_rounded;      /* x rounded, [rows, inputs'] and 32 more; of int16 if `wide`. Of bfloat16 [rows, inputs] of
                               bfloat16, or, if not `takes_pairs`, float; NULL: x is not rounded */
    float *x_scales;        /* [rows, inputs' / 32 rounded up to 16], for integers only, as ... */
    int32_t *x_sums;        /* minus the sum of each 32 integers, or 16 for some blocks, times what packed weights are
                               higher than they are, or 8 */
    char *scratch;          /* linear_scratch() bytes for each worker, aligned to 64; for integers and many rows */
    int64_t rows, inputs, outputs, format, group, activation;
    int64_t zeros;          /* whether the offsets are zero points */
    int64_t wide;           /* whether the integers are int16: for int8, wide_rows() rows or more */
    int64_t one_order;      /* whether floats are summed in the order of `linear_few` for any number of rows; with
                               vectors of 4 they always are */
    int64_t stride;         /* outputs, or more where `out` has columns of other products too */
} linear;

/* Bias, activation and residual for some rows and outputs while they are in the cache. */
void finish(const linear *a, int64_t row, int64_t end, int64_t first, int64_t last);

/* out = x @ W.T, for all rows and the outputs first to last; all but the first finish them. `scratch` is memory of the
 * worker's own. */
void floats_few(const linear *a, int64_t first, int64_t last);
void floats_many(const linear *a, int64_t first, int64_t last, char *scratch);
void floats_across(const linear *a, int64_t first, int64_t last, char *scratch);
void integers_any(const linear *a, int64_t first, int64_t last, char *scratch);

/* Round some rows of x for weights of integers, or of bfloat16. */
void round_to_integers(const linear *a, int64_t first, int64_t last);
void round_to_bfloat16(const linear *a, int64_t first, int64_t last);

/* Bytes of that memory. */
int64_t floats_scratch(void);
int64_t integers_scratch(void);

/* A register tile of each size is a function of its own: one function with all of them takes several times as long to
 * compile. */
#define SEPARATE static __attribute__((noinline))

INLINE int64_t smaller(int64_t a, int64_t b) {
    return a < b ? a : b;
}

INLINE int64_t larger(int64_t a, int64_t b) {
    return a > b ? a : b;
}

INLINE void fetch_near(const char *p, int64_t bytes) {
#pragma GCC unroll 8
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(p + i);
}

/* With AVX-512 into the L2 cache, since what an L1 cache waits for at once is less than what memory delivers meanwhile
 * (measured on a Xeon; on a Zen 4 true of weights of 8 bits and more). */
INLINE void fetch_lines(const char *p, int64_t bytes) {
#pragma GCC unroll 8
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(p + i, 0, LANES == 16 ? 2 : 3);
}

/* The first `count` of four numbers, 1 to 4. */
INLINE void store_four(float *p, four_floats v, int64_t count) {
    if (count >= 4) {
        memcpy(p, &v, sizeof v);
    } else {
        for (int i = 0; i < count; i++) p[i] = v[i];
    }
}

INLINE four_floats load_four(const float *p, int64_t count) {
    four_floats v = {0};
    if (count >= 4) {
        memcpy(&v, p, sizeof v);
    } else {
        for (int i = 0; i < count; i++) v[i] = p[i];
    }
    return v;
}
#endif
