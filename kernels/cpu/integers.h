/* What linear_integers.c and linear_blocks.c share: the constants and loops of products of integers, which
 * linear_integers.c describes. */
#ifndef MINILLM_INTEGERS_H
#define MINILLM_INTEGERS_H
#include "dot.h"
#include "linear.h"

enum {
    GROUP = 32,                                 /* numbers of x that share a scale */
    AHEAD = 512,                                /* how far ahead a stream of W is fetched, in bytes, ... */
    SCALES_AHEAD = 64,                          /* ... and its scales, in numbers */
    FEW_ROWS = EXCESS8 ? 4 : 2,                 /* of a tile with the lanes along the inputs */
    PACKED_ROWS = EXCESS8 ? 7 : 6,              /* rows from which on the weights are packed */
    PANELS = INTEGER_OUTPUTS / LANES,           /* vectors of outputs of a tile with the lanes along the outputs ... */
    INT8_ROWS = VECTOR_REGISTERS == 32 ? 6 : 4, /* ... and its rows: of int4 fewer, since they are bound by what ... */
    INT4_ROWS = VECTOR_REGISTERS == 32 ? 6 : 3, /* ... follows a group, for which sums must then fit in registers */
    SCALE_ROWS = DEPTH / GROUP,                 /* groups of a panel */
    SETS = LANES == 8 ? 6 : 1                   /* of INTEGER_OUTPUTS packed outputs at a time, with SET_ROWS rows or
                                                   more (with vectors of 16 not measured) */
};

INLINE ints load_ints(const void *p) {
    ints v;
    memcpy(&v, p, sizeof v);
    return v;
}

INLINE ints splat_4_bytes(const void *p) {
    int32_t v;
    memcpy(&v, p, sizeof v);
    return v - (ints){0};
}

/* Numbers of a row of W in groups, in groups of 32. */
INLINE int64_t groups_of(const linear *a) {
    return (a->inputs + a->group - 1) / a->group * (a->group / GROUP);
}

/* From row to row of x_scales; of x_sums as much for each of the parts of a group with scales of their own. */
INLINE int64_t scale_stride(int64_t groups) {
    return (groups + 15) / 16 * 16;
}

/* Bytes of a group of INTEGER_OUTPUTS packed outputs. */
INLINE int64_t packed_group(int64_t format) {
    return GROUP * INTEGER_OUTPUTS * (format == INT8 && STEP8 == 2 ? 2 : 1);
}

/* Bytes that are fetched early with each group of a tile. */
INLINE int64_t fetched_bytes(int64_t format) {
    return format == INT8 ? 256 : 128;
}

/* Outputs first to last of PANELS panels, with `count` groups from g on. */
typedef struct {
    const char *numbers; /* [count, 8 or 16, PANELS, LANES] lanes */
    const float *scales, *lows; /* [PANELS, SCALE_ROWS x parts, LANES], of 2^shift groups each */
    int64_t g, count, shift, first, last;
    const char *next; /* what is multiplied later, to be fetched */
} packed;

/* LANES outputs `gap` apart, the first one and `count` in all; in place of those that do not exist another is taken. */
typedef struct {
    int64_t first, gap, count;
} lanes;

INLINE int64_t output_of(const linear *a, lanes of, int lane) {
    return smaller(of.first + lane * of.gap, a->outputs - 1);
}

typedef void few_tile(const linear *a, lanes of, int64_t row, int64_t start, int64_t end, const float *scales,
                      const float *lows);
typedef void many_tile(const linear *a, const packed *m, int64_t row);

/* How a format is multiplied. */
typedef struct {
    few_tile *const *few;   /* by their rows, 1 to FEW_ROWS */
    many_tile *const *many; /* by their rows, 1 to most_rows */
    /* Packs `count` groups from g on: one vector of every PANELS. */
    void (*pack)(const linear *a, lanes of, int64_t g, int64_t count, char *panel);
    /* Their scales [count x parts, LANES], and an eighth of what is subtracted; of groups of 64 half as many. */
    void (*pack_scales)(const linear *a, lanes of, int64_t g, int64_t count, float *scales, float *lows);
    int64_t most_rows;
    int64_t format;      /* INT8, or INT4 if the packed numbers are as theirs: one in a byte, of 6 bits at most */
    int64_t parts;       /* scales of 32 numbers, 1 or 2 */
    int64_t packed_rows; /* rows from which on W is packed, as long as no `wide` says so */
} integer_format;

/* That of a block format, the bytes of a row of W in one, and how much higher than they are its numbers are multiplied,
 * or 8 where drops are subtracted. */
const integer_format *block_format(int64_t format);
int64_t block_row_bytes(const linear *a);
int32_t block_excess(int64_t format);

/* As of plain int8 and int4 with offsets. */
extern many_tile *const many_int8[], *const many_int4_offsets[];

/* total + x' @ W in a group of LANES outputs: `dot` are the sums of integers. */
INLINE floats add_scaled(const bool offsets, floats total, ints dot, floats scale, floats low, float x_scale,
                         int32_t x_sum) {
    floats exact = __builtin_convertvector(dot, floats), same = splat(x_scale);
    if (!offsets) return multiply_add(exact, scale * same, total);
    low *= __builtin_convertvector(x_sum - (ints){0}, floats);
    return multiply_add(multiply_add(exact, scale, low), same, total);
}

INLINE floats add_group(const bool offsets, floats total, ints dot, const float *scales, const float *lows,
                        float x_scale, int32_t x_sum) {
    return add_scaled(offsets, total, dot, load(scales), offsets ? load(lows) : (floats){0}, x_scale, x_sum);
}

/* What is multiplied later is fetched while the bytes from `at` on of LANES rows are, each of `size` bytes. Rows far from
 * one another are streams, each read as it lies: hardware fetches them early by itself too, but not as much as it could
 * since it waits for products. Neighbours are too many short streams for it: of those that follow as much is fetched in
 * the order in which it lies. Where `bytes` are few, with 4 lanes, a line is fetched once. `near`: into the L1 cache. */
INLINE void fetch_ahead(const char *const *rows, lanes of, int64_t size, int64_t at, int64_t bytes, const bool near) {
    if (of.gap == 1) {
        fetch_lines(rows[0] + LANES * size + at * LANES, bytes * LANES);
    } else if (LANES != 4 || (at & 63) < bytes) {
#pragma GCC unroll 16
        for (int o = 0; o < LANES; o++) {
            if (near) fetch_near(rows[o] + at + AHEAD, bytes);
            if (!near) fetch_lines(rows[o] + at + AHEAD, bytes);
        }
    }
}

#if HAS_I8MM
/* dots[r] += the products of R rows of x with a panel's next `count` inputs, 16 or 32. The last of an odd number of
 * rows is a pair with itself. */
INLINE void add_packed(const int R, const int count, const char *w, const char *x, int64_t x_stride,
                      ints dots[][PANELS]) {
#define LOW(A, B) (ints)vzip1q_s64((int64x2_t)(A), (int64x2_t)(B))
#define HIGH(A, B) (ints)vzip2q_s64((int64x2_t)(A), (int64x2_t)(B))
    ints s[3][2 * PANELS]; /* of two rows and two outputs: [row, output] */
#pragma GCC unroll 3
    for (int r = 0; r < R; r += 2)
#pragma GCC unroll 2
        for (int p = 0; p < PANELS; p++) {
            ints first = dots[r][p], second = r + 1 < R ? dots[r + 1][p] : first;
            s[r / 2][2 * p] = LOW(first, second), s[r / 2][2 * p + 1] = HIGH(first, second);
        }
#pragma GCC unroll 2
    for (int i = 0; i < count; i += 16) {
        ints own[3][2]; /* 8 numbers of each of two rows */
#pragma GCC unroll 3
        for (int r = 0; r < R; r += 2) {
            const int64_t next = r + 1 < R ? x_stride : 0;
            ints first = load_ints(x + r * x_stride + i), second = load_ints(x + r * x_stride + next + i);
            own[r / 2][0] = LOW(first, second), own[r / 2][1] = HIGH(first, second);
        }
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++)
#pragma GCC unroll 4
            for (int o = 0; o < 2 * PANELS; o++) {
                const int place = (i / 4 + 2 * half + o % 2) * PANELS + o / 2;
                int8x16_t weights = (int8x16_t)load_ints(w + place * sizeof(ints));
#pragma GCC unroll 3
                for (int r = 0; r < R; r += 2)
                    s[r / 2][o] = (ints)vmmlaq_s32((int32x4_t)s[r / 2][o], (int8x16_t)own[r / 2][half], weights);
            }
    }
#pragma GCC unroll 3
    for (int r = 0; r < R; r += 2)
#pragma GCC unroll 2
        for (int p = 0; p < PANELS; p++) {
            dots[r][p] = LOW(s[r / 2][2 * p], s[r / 2][2 * p + 1]);
            if (r + 1 < R) dots[r + 1][p] = HIGH(s[r / 2][2 * p], s[r / 2][2 * p + 1]);
        }
#undef LOW
#undef HIGH
}
#elif HAS_DOT_LANES
/* The same with the lanes along the outputs. */
INLINE void add_packed(const int R, const int count, const char *w, const char *x, int64_t x_stride,
                      ints dots[][PANELS]) {
#pragma GCC unroll 2
    for (int i = 0; i < count; i += 16) {
        ints own[6];
#pragma GCC unroll 6
        for (int r = 0; r < R; r++) own[r] = load_ints(x + r * x_stride + i);
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++)
#pragma GCC unroll 2
            for (int p = 0; p < PANELS; p++) {
                ints weights = load_ints(w + ((i / 4 + j) * PANELS + p) * sizeof(ints));
#pragma GCC unroll 6
                for (int r = 0; r < R; r++) dots[r][p] = add_products_of(j, dots[r][p], weights, own[r]);
            }
    }
}
#endif

/* Addresses of LANES rows stay in memory: GCC would otherwise keep some of 16 in vector registers. */
INLINE void keep_in_memory(const char **rows) {
#if HAS_AVX512
    __asm__("" : "+m"(*(const char *(*)[LANES])rows));
#else
    (void)rows;
#endif
}

/* The sums of a row of x, wherever its outputs are. */
INLINE floats load_lanes(const float *out, lanes of) {
    floats v = {0};
    for (int i = 0; i < of.count; i++) v[i] = out[of.first + i * of.gap];
    return v;
}

INLINE void store_lanes(float *out, lanes of, floats v) {
    for (int i = 0; i < of.count; i++) out[of.first + i * of.gap] = v[i];
}
#endif
