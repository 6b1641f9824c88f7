/* The matrix product: out = activation(x @ W.T + bias) + residual, x [rows, inputs], W [outputs, inputs].
 *
 * W is stored as float32, float16 or bfloat16, or as int8 or int4 in groups with a scale (reference/quantize.py). For
 * integers the rows of x are rounded first (`round_rows`), to int8 with a scale for each 32 numbers, and the products
 * within these 32 are summed exactly.
 *
 * Bytes moved: W is read once. Floor: up to some 16 rows, W's bytes / memory bandwidth; beyond, 2 rows inputs outputs
 * FLOPs / peak of FMA, or of the products of integers.
 *
 * Order of summation. Floats: the inputs are divided into blocks of DEPTH, at fixed places; a block is summed by lane
 * and then across lanes, and the blocks by ascending place. So an output has the same bits in any batch and with any
 * number of workers. Integers: the same within `linear_few`, and within `linear_many`.
 *
 * Versions:
 * - `linear_few`: a register tile multiplies up to ROWS rows by 4 rows of W as they are stored; lanes along the inputs.
 * - `linear_many`, floats: BLOCK outputs by DEPTH inputs of W are expanded to float, stay in the L2 cache and meet all
 *   rows, with the same tile; DEPTH inputs of a tile's rows stay in the L1 cache.
 * - `linear_many`, integers: PANELS * LANES outputs by DEPTH inputs are packed with the lanes along the outputs and
 *   stay in the L1 cache. Sums are integers until a group ends, and then need no sum across lanes.
 */
#include "activation.h"
#include "dot.h"
#include "pool.h"
#include <math.h>
#include <stdbool.h>

enum {
    GROUP = 32,                                     /* numbers of x that share a scale */
    DEPTH = 768,                                    /* inputs of a block; divides into groups and vectors */
    BLOCK = 48,                                     /* outputs of a block of floats */
    ROWS = VECTOR_REGISTERS == 32 ? 6 : 3,          /* of a tile of floats: ROWS * 4 sums, ROWS + 1 operands */
    INTEGER_ROWS = VECTOR_REGISTERS == 32 ? 4 : 2,  /* of a tile of integers, lanes along the inputs */
    PANELS = 2,                                     /* vectors of outputs of a tile with the lanes along the outputs */
    PANEL_ROWS = VECTOR_REGISTERS == 32 ? 6 : 4,    /* and its rows */
    SCALES = 96,                                    /* groups of 4 rows of W whose scales are converted together */
    AHEAD = 16384,                                  /* bytes of W that `linear_few` fetches early */
    FINISHED = 16,                                  /* outputs that `linear_few` finishes together */
    STRIDE = DEPTH + 16                             /* from row to row of a block: not a power of 2, for the cache */
};

typedef struct {
    const void *weight;     /* [outputs, inputs] of float or of 16 bits, int8 [outputs, inputs'], or uint8 [outputs,
                               inputs' / 2]; inputs' are inputs in whole groups */
    const uint16_t *scales; /* float16 [outputs, inputs' / group] of int8 and int4, else NULL */
    const float *bias;      /* [outputs], or NULL */
    const float *residual;  /* [rows, outputs], or NULL; not `out` */
    const float *x;         /* [rows, inputs] */
    float *out;             /* [rows, outputs] */
    int8_t *integers;       /* x rounded, [rows, inputs'] and 32 more; of int16 if `wide`. For integers only, as ... */
    float *x_scales;        /* [rows, inputs' / 32 rounded up to 16] */
    float *x_sums;          /* 8 times the sum of each 32 integers, as x_scales */
    char *scratch;          /* linear_scratch() bytes for each worker, aligned to 64; `linear_many` only */
    int64_t rows, inputs, outputs, format, group, activation;
    int64_t wide;           /* whether the integers are int16: for int8 in `linear_many`, if wide_integers() */
} linear;

static int64_t smaller(int64_t a, int64_t b) {
    return a < b ? a : b;
}

/* Scale i, at any address: weights may be mapped from a file. */
INLINE uint16_t scale_at(const uint16_t *scales, int64_t i) {
    uint16_t scale;
    memcpy(&scale, (const char *)scales + 2 * i, sizeof scale);
    return scale;
}

/* Numbers of a row of W in groups, in groups of 32. */
static int64_t groups_of(const linear *a) {
    return (a->inputs + a->group - 1) / a->group * (a->group / GROUP);
}

/* From row to row of x_scales and x_sums. */
static int64_t scale_stride(int64_t groups) {
    return (groups + 15) / 16 * 16;
}

/* Four rows of W that are read side by side are more streams than the hardware fetches early by itself. So what lies
 * AHEAD bytes further in memory is fetched, in the order in which it lies. */
INLINE void fetch_lines(const char *p, int64_t bytes) {
#pragma GCC unroll 8
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(p + i);
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

/* --- end of a product --------------------------------------------------------------------------------------------- */

INLINE void finish_as(const int activation, const linear *a, int64_t first, int64_t last) {
    for (int64_t r = 0; r < a->rows; r++) {
        float *out = a->out + r * a->outputs;
        for (int64_t o = first; o < last; o += LANES) {
            int64_t count = last - o;
            floats y = load_part(out + o, count);
            if (a->bias) y += load_part(a->bias + o, count);
            y = activate(y, activation);
            if (a->residual) y += load_part(a->residual + r * a->outputs + o, count);
            store_part(out + o, y, count);
        }
    }
}

/* Bias, activation and residual, for some outputs of all rows while they are in the cache. */
static void finish(const linear *a, int64_t first, int64_t last) {
    switch (a->activation) {
    case RELU: finish_as(RELU, a, first, last); break;
    case GELU: finish_as(GELU, a, first, last); break;
    case GELU_NEW: finish_as(GELU_NEW, a, first, last); break;
    case SILU: finish_as(SILU, a, first, last); break;
    default:
        if (a->bias || a->residual) finish_as(NO_ACTIVATION, a, first, last);
    }
}

/* --- floats ------------------------------------------------------------------------------------------------------- */

INLINE int64_t bytes_of(const int format) {
    return format == FLOAT32 ? 4 : 2;
}

INLINE floats load_weights(const int format, const char *p, int64_t i) {
    if (format == FLOAT32) return load((const float *)p + i);
    if (format == FLOAT16) return load_float16((const uint16_t *)p + i);
    return load_bfloat16((const uint16_t *)p + i);
}

/* The first `count` of them, fewer than LANES, then zeros. */
INLINE floats load_last_weights(const int format, const char *p, int64_t i, int64_t count) {
    char part[4 * LANES] = {0};
    memcpy(part, p + i * bytes_of(format), count * bytes_of(format));
    return load_weights(format, part, 0);
}

/* Some rows of x and the numbers of W that they meet. Strides are from one row to the next, W's in bytes. */
typedef struct {
    const float *x;
    const char *w;
    int64_t x_stride, w_stride, depth;
    const char *next; /* `linear_few`: W's bytes to fetch early, in the order in which they lie; or NULL, then ... */
    int64_t ahead;    /* ... what lies so many bytes further in the same rows: measured faster for long rows */
} operands;

/* out[r, o] = x[r] @ W[o], or += that, for R rows and `count` outputs, 1 to 4. */
INLINE void multiply_floats(const int format, const int R, const bool fetch, const operands *m, int64_t count,
                            bool add, float *out, int64_t out_stride) {
    floats total[6][4];
    const char *w[4];
    const float *x = m->x;
    const int64_t x_stride = m->x_stride, depth = m->depth;
#pragma GCC unroll 4
    for (int o = 0; o < 4; o++) w[o] = m->w + (o < count ? o : count - 1) * m->w_stride;
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int o = 0; o < 4; o++) total[r][o] = (floats){0};
    int64_t k = 0;
    for (; k + LANES <= depth; k += LANES) {
        if (fetch && m->next) fetch_lines(m->next + 4 * k * bytes_of(format), 4 * LANES * bytes_of(format));
        floats numbers[6];
#pragma GCC unroll 6
        for (int r = 0; r < R; r++) {
            numbers[r] = load(x + r * x_stride + k);
            keep(&numbers[r]);
        }
#pragma GCC unroll 4
        for (int o = 0; o < 4; o++) {
            floats weights = load_weights(format, w[o], k);
            if (R > 1) keep(&weights);
            if (fetch && !m->next) __builtin_prefetch(w[o] + m->ahead + k * bytes_of(format));
#pragma GCC unroll 6
            for (int r = 0; r < R; r++) total[r][o] = multiply_add(numbers[r], weights, total[r][o]);
        }
    }
    if (k < depth) {
#pragma GCC unroll 4
        for (int o = 0; o < 4; o++) {
            floats weights = load_last_weights(format, w[o], k, depth - k);
#pragma GCC unroll 6
            for (int r = 0; r < R; r++)
                total[r][o] = multiply_add(load_part(x + r * x_stride + k, depth - k), weights, total[r][o]);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) {
        four_floats four = sums(total[r][0], total[r][1], total[r][2], total[r][3]);
        if (add) four += load_four(out + r * out_stride, count);
        store_four(out + r * out_stride, four, count);
    }
}

/* The same for all rows, in tiles of nearly the same size, and for outputs in fours. `m` holds the first of both. */
INLINE void multiply_block(const int format, const bool fetch, const linear *a, operands m, int64_t first,
                           int64_t last, bool add) {
    int64_t tiles = (a->rows + ROWS - 1) / ROWS;
    const float *x = m.x;
    const char *w = m.w;
    for (int64_t tile = 0; tile < tiles; tile++) {
        int64_t row = a->rows * tile / tiles, rows = a->rows * (tile + 1) / tiles - row;
        m.x = x + row * m.x_stride;
        for (int64_t o = first; o < last; o += 4) {
            int64_t count = smaller(4, last - o);
            float *out = a->out + row * a->outputs + o;
            m.w = w + (o - first) * m.w_stride;
            switch (rows) {
            case 1: multiply_floats(format, 1, fetch, &m, count, add, out, a->outputs); break;
            case 2: multiply_floats(format, 2, fetch, &m, count, add, out, a->outputs); break;
            case 3: multiply_floats(format, 3, fetch, &m, count, add, out, a->outputs); break;
            case 4: multiply_floats(format, ROWS > 3 ? 4 : 1, fetch, &m, count, add, out, a->outputs); break;
            case 5: multiply_floats(format, ROWS > 3 ? 5 : 1, fetch, &m, count, add, out, a->outputs); break;
            case 6: multiply_floats(format, ROWS > 3 ? 6 : 1, fetch, &m, count, add, out, a->outputs); break;
            }
        }
    }
}

/* Four outputs at a time meet all rows, one block of inputs after the other: W is read nearly as it lies. */
INLINE void few_floats(const int format, const linear *a, int64_t first, int64_t last) {
    for (int64_t o = first; o < last; o += 4) {
        int64_t k = 0;
        do {
            const char *w = (const char *)a->weight + (o * a->inputs + k) * bytes_of(format);
            int64_t stride = a->inputs * bytes_of(format), depth = smaller(DEPTH, a->inputs - k);
            const char *next = (const char *)a->weight + o * stride + 4 * k * bytes_of(format) + AHEAD;
            if (a->inputs > DEPTH) next = NULL;
            operands m = {a->x + k, w, a->inputs, stride, depth, next, depth * bytes_of(format)};
            multiply_block(format, true, a, m, o, smaller(o + 4, last), k > 0);
            k += DEPTH;
        } while (k < a->inputs);
    }
}

/* Inputs k to k + depth of W's rows first to last. -> [last - first, STRIDE] */
INLINE void expand(const int format, const linear *a, int64_t first, int64_t last, int64_t k, int64_t depth,
                   float *block) {
    for (int64_t o = first; o < last; o++, block += STRIDE) {
        const char *w = (const char *)a->weight + (o * a->inputs + k) * bytes_of(format);
        int64_t i = 0;
        for (; i + LANES <= depth; i += LANES) store(block + i, load_weights(format, w, i));
        if (i < depth) store(block + i, load_last_weights(format, w, i, depth - i));
    }
}

static void many_floats(const linear *a, int64_t first, int64_t last, float *block) {
    int64_t k = 0;
    do {
        int64_t depth = smaller(DEPTH, a->inputs - k);
        switch (a->format) {
        case FLOAT32: expand(FLOAT32, a, first, last, k, depth, block); break;
        case FLOAT16: expand(FLOAT16, a, first, last, k, depth, block); break;
        case BFLOAT16: expand(BFLOAT16, a, first, last, k, depth, block); break;
        }
        operands m = {a->x + k, (const char *)block, a->inputs, STRIDE * 4, depth, NULL, 0};
        multiply_block(FLOAT32, false, a, m, first, last, k > 0);
        k += DEPTH;
    } while (k < a->inputs);
}

/* --- rounding of x ------------------------------------------------------------------------------------------------ */

/* Rounds 32 numbers to integers and returns their scale, the largest magnitude / 127. NaN or infinity give the scale
 * NaN, and numbers not above 1e-36 zeros: the inverse of their scale would overflow. */
INLINE float round_group(const float *x, ints *integers) {
    ints highest = {0}; /* magnitudes as integers: ordered like the numbers, infinity and NaN above all */
    for (int i = 0; i < GROUP / LANES; i++) {
        ints size = (ints)magnitude(load(x + i * LANES)), mask = size > highest;
        highest = (mask & size) | (~mask & highest);
    }
    int32_t bits = 0;
    for (int i = 0; i < LANES; i++) bits = highest[i] > bits ? highest[i] : bits;
    float most;
    memcpy(&most, &bits, sizeof most);
    bool finite = most < INFINITY, usable = finite && most > 1e-36f;
    floats inverse = splat(usable ? 127 / most : 0);
    const floats big = splat(0x1.8p23f); /* adding it rounds to an integer, which is then in the lowest bits */
    for (int i = 0; i < GROUP / LANES; i++) {
        floats scaled = load(x + i * LANES) * inverse;
        integers[i] = usable ? (ints)(scaled + big) - 0x4B400000 : (ints){0};
    }
    return usable ? most / 127 : finite ? 0 : NAN;
}

typedef int8_t eighth_vector __attribute__((vector_size(LANES)));
typedef int16_t half_vector __attribute__((vector_size(2 * LANES)));

/* Rounds the rows of x for weights of integers. A share is some of the rows. */
void round_rows(const void *arguments, int64_t share, int64_t shares, int64_t worker) {
    const linear *a = arguments;
    int64_t groups = groups_of(a), stride = scale_stride(groups), first, last;
    (void)worker;
    share_of(a->rows, share, shares, &first, &last);
    for (int64_t row = first; row < last; row++) {
        float *scales = a->x_scales + row * stride, *x_sums = a->x_sums + row * stride;
        for (int64_t g = 0; g < stride; g++) {
            const float *x = a->x + row * a->inputs + g * GROUP;
            int64_t count = g < groups ? smaller(GROUP, a->inputs - g * GROUP) : 0;
            scales[g] = x_sums[g] = 0;
            if (g >= groups) continue;
            float part[GROUP] = {0};
            if (count > 0 && count < GROUP) memcpy(part, x, sizeof(float) * count);
            ints rounded[GROUP / LANES], total = {0};
            scales[g] = round_group(count == GROUP ? x : part, rounded);
            for (int i = 0; i < GROUP / LANES; i++) {
                int64_t at = (row * groups + g) * GROUP + i * LANES;
                total += rounded[i];
                if (a->wide) {
                    half_vector narrow = __builtin_convertvector(rounded[i], half_vector);
                    memcpy((int16_t *)a->integers + at, &narrow, sizeof narrow);
                } else {
                    eighth_vector narrow = __builtin_convertvector(rounded[i], eighth_vector);
                    memcpy(a->integers + at, &narrow, sizeof narrow);
                }
            }
            x_sums[g] = 8 * sum(__builtin_convertvector(total, floats));
        }
    }
}

/* --- integers, few rows: lanes along the inputs ------------------------------------------------------------------- */

INLINE int64_t group_bytes(const int format) {
    return format == INT8 ? GROUP : GROUP / 2;
}

/* GROUPS groups of a row of W from group g on; zeros beyond the last. */
INLINE octets load_groups(const int format, const char *row, int64_t g, int64_t groups) {
    char last[2 * GROUP] = {0};
    const char *p = row + g * group_bytes(format);
    if (GROUPS > 1 && g + GROUPS > groups) p = memcpy(last, p, group_bytes(format));
    return format == INT8 ? load_octets(p) : load_nibbles(p);
}

/* Up to SCALES groups of 4 rows of W, with their scales as float. `w` points to group g of each row. */
typedef struct {
    const char *w[4];
    float scales[4][SCALES];
    int64_t output, count; /* the first of the outputs, of which `count` exist, 1 to 4; the last is repeated */
    int64_t g, groups;     /* the first of the groups, and how many */
} strip;

INLINE void load_strip(const int format, const linear *a, strip *s) {
    const int64_t groups = groups_of(a), shift = a->group == 64;
    for (int o = 0; o < 4; o++) {
        int64_t output = s->output + smaller(o, s->count - 1);
        const uint16_t *scales = a->scales + output * (groups >> shift);
        __builtin_prefetch(scales + s->g + AHEAD / group_bytes(format));
        s->w[o] = (const char *)a->weight + (output * groups + s->g) * group_bytes(format);
        for (int64_t i = 0; i < s->groups; i += LANES) {
            uint16_t part[LANES] = {0};
            const uint16_t *p = scales + s->g + i;
            if (shift || i + LANES > s->groups) {
                p = part;
                for (int64_t j = 0; j < LANES && i + j < s->groups; j++)
                    part[j] = scale_at(scales, (s->g + i + j) >> shift);
            }
            store(s->scales[o] + i, load_float16(p));
        }
    }
}

/* out[r, o] = x[r] @ W[o], or += that, for R rows from `row` on and the outputs and groups of a strip. Weights of 4
 * bits are 8 too high as they are stored, which x_sums corrects. */
INLINE void multiply_strip(const int format, const int R, const linear *a, const strip *s, int64_t row) {
    const int64_t x_stride = groups_of(a) * GROUP, stride = scale_stride(groups_of(a));
    const char *next = s->w[0] + 3 * s->g * group_bytes(format) + AHEAD;
    const int8_t *x = a->integers + row * x_stride + s->g * GROUP;
    const char *w[4] = {s->w[0], s->w[1], s->w[2], s->w[3]};
    floats total[4][4], excess[4][4];
    float scales[4][4][SCALES];
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int o = 0; o < 4; o++) total[r][o] = excess[r][o] = (floats){0};
    for (int64_t g = 0; g < s->groups; g += LANES) {
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            floats own = load(a->x_scales + (row + r) * stride + s->g + g);
            floats own_sums = load(a->x_sums + (row + r) * stride + s->g + g);
#pragma GCC unroll 4
            for (int o = 0; o < 4; o++) {
                floats both = own * load(s->scales[o] + g);
                if (format == INT4) excess[r][o] = multiply_add(both, own_sums, excess[r][o]);
                store(scales[r][o] + g, both);
            }
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int o = 0; o < 4; o++) total[r][o] = -excess[r][o];
#pragma GCC unroll 2
    for (int64_t g = 0; g < s->groups; g += GROUPS) {
        fetch_lines(next + 4 * g * group_bytes(format), 4 * GROUPS * group_bytes(format));
        octets numbers[4];
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) numbers[r] = load_octets(x + r * x_stride + g * GROUP);
#pragma GCC unroll 4
        for (int o = 0; o < 4; o++) {
            octets weights = load_groups(format, w[o], g, s->groups);
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) {
                ints dots = format == INT8 ? dot_signed(weights, numbers[r]) : dot_unsigned(weights, numbers[r]);
                floats scale = spread(&scales[r][o][g]);
                total[r][o] = multiply_add(__builtin_convertvector(dots, floats), scale, total[r][o]);
            }
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
        float *out = a->out + (row + r) * a->outputs + s->output;
        four_floats four = sums(total[r][0], total[r][1], total[r][2], total[r][3]);
        if (s->g) four += load_four(out, s->count);
        store_four(out, four, s->count);
    }
}

INLINE void few_integers(const int format, const linear *a, int64_t first, int64_t last) {
    int64_t tiles = (a->rows + INTEGER_ROWS - 1) / INTEGER_ROWS, groups = groups_of(a);
    for (int64_t o = first; o < last; o += 4) {
        int64_t g = 0;
        do {
            strip s = {.output = o, .count = smaller(4, last - o), .g = g, .groups = smaller(SCALES, groups - g)};
            load_strip(format, a, &s);
            for (int64_t tile = 0; tile < tiles; tile++) {
                int64_t row = a->rows * tile / tiles;
                switch (a->rows * (tile + 1) / tiles - row) {
                case 1: multiply_strip(format, 1, a, &s, row); break;
                case 2: multiply_strip(format, 2, a, &s, row); break;
                case 3: multiply_strip(format, INTEGER_ROWS > 2 ? 3 : 1, a, &s, row); break;
                case 4: multiply_strip(format, INTEGER_ROWS > 2 ? 4 : 1, a, &s, row); break;
                }
            }
            g += SCALES;
        } while (g < groups);
    }
}

/* --- integers, many rows: lanes along the outputs ----------------------------------------------------------------- */

/* Whether `linear_many` takes x as int16 for weights of int8. */
int64_t wide_integers(void) {
    return STEP8 == 2;
}

/* Bytes of a group of a panel: LANES outputs by 32 inputs. */
INLINE int64_t panel_group(const int format) {
    return GROUP * LANES * (format == INT8 && STEP8 == 2 ? 2 : 1);
}

typedef uint8_t sixteen_bytes __attribute__((vector_size(16)));

/* One group of one output, as panels hold it: 8 or 16 times 4 bytes. */
INLINE void unpack_group(const int format, const char *w, int32_t *to) {
    if (format == INT4) {
        sixteen_bytes both;
        memcpy(&both, w, sizeof both);
        sixteen_bytes low = both & 15, high = both >> 4;
        memcpy(to, &low, sizeof low);
        memcpy(to + 4, &high, sizeof high);
    } else if (STEP8 == 2) {
        int16_t numbers[GROUP];
        for (int i = 0; i < GROUP; i++) numbers[i] = (int8_t)w[i];
        memcpy(to, numbers, sizeof numbers);
    } else {
        uint8_t numbers[GROUP];
        for (int i = 0; i < GROUP; i++) numbers[i] = (uint8_t)(w[i] + EXCESS8);
        memcpy(to, numbers, sizeof numbers);
    }
}

/* Packs LANES outputs from `first` on, `count` groups from g on, and their scales [count, LANES]. In place of outputs
 * that do not exist the last one is repeated. */
INLINE void pack_panel(const int format, const linear *a, int64_t first, int64_t g, int64_t count, char *panel,
                       float *scales) {
    const int64_t groups = groups_of(a), shift = a->group == 64, size = panel_group(format);
    const int words_each = format == INT8 && STEP8 == 2 ? 16 : 8; /* of an output's group */
    for (int64_t end = g + count; g < end; g++, panel += size, scales += LANES) {
        int32_t unpacked[LANES * 16];
        for (int o = 0; o < LANES; o++) {
            int64_t output = smaller(first + o, a->outputs - 1);
            unpack_group(format, (const char *)a->weight + (output * groups + g) * group_bytes(format),
                         unpacked + o * words_each);
            scales[o] = float16_to_float(scale_at(a->scales, output * (groups >> shift) + (g >> shift)));
        }
        for (int i = 0; i < words_each; i += 8)
            transpose(unpacked + i, words_each, (int32_t *)panel + i * LANES);
    }
}

/* Outputs first to last of PANELS panels, with `count` groups from g on. */
typedef struct {
    const char *panels;
    const float *scales;
    int64_t g, count, first, last;
} packed;

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

/* out[row + r] = x[row + r] @ W for the outputs of the panels and R rows; += that beyond the first block of inputs. */
INLINE void multiply_panels(const int format, const int R, const linear *a, const packed *m, int64_t row) {
    const bool two_bytes = format == INT8 && STEP8 == 2;
    const int64_t size = panel_group(format), x_group = two_bytes ? 2 * GROUP : GROUP;
    const int64_t groups = groups_of(a), stride = scale_stride(groups);
    const float excess = format == INT4 ? 1 : EXCESS8 / 8; /* of x_sums, which are 8 sums */
    const char *x = (const char *)a->integers + (row * groups + m->g) * x_group;
    const float *x_scales = a->x_scales + row * stride + m->g, *x_sums = a->x_sums + row * stride + m->g;
    float *out = a->out + row * a->outputs + m->first;
    floats total[6][PANELS];
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
        for (int p = 0; p < PANELS; p++) {
            int64_t count = m->last - m->first - p * LANES;
            total[r][p] = (floats){0};
            if (m->g && count > 0) total[r][p] = load_part(out + r * a->outputs + p * LANES, count);
        }
    for (int64_t g = 0; g < m->count; g++) {
        ints dots[6][PANELS];
#pragma GCC unroll 6
        for (int r = 0; r < R; r++)
#pragma GCC unroll 2
            for (int p = 0; p < PANELS; p++) dots[r][p] = (ints){0};
        const char *w = m->panels + g * size, *numbers = x + g * x_group;
#pragma GCC unroll 6
        for (int r = 0; r < R; r++) __builtin_prefetch(numbers + (r + R) * groups * x_group); /* of the next tile */
#pragma GCC unroll 2
        for (int j = 0; j < x_group / 4; j++) {
            ints weights[PANELS];
#pragma GCC unroll 2
            for (int p = 0; p < PANELS; p++) weights[p] = load_ints(w + p * m->count * size + j * (4 * LANES));
#pragma GCC unroll 6
            for (int r = 0; r < R; r++) {
                ints same = splat_4_bytes(numbers + r * groups * x_group + j * 4);
#pragma GCC unroll 2
                for (int p = 0; p < PANELS; p++)
                    dots[r][p] = format == INT8 ? add_products8(dots[r][p], weights[p], same)
                                                : add_products4(dots[r][p], weights[p], same);
            }
        }
#pragma GCC unroll 2
        for (int p = 0; p < PANELS; p++) {
            floats own = load(m->scales + (p * m->count + g) * LANES);
#pragma GCC unroll 6
            for (int r = 0; r < R; r++) {
                ints dot = format == INT8 ? dots[r][p] : total4(dots[r][p]);
                floats exact = __builtin_convertvector(dot, floats);
                if (excess) exact -= excess * x_sums[r * stride + g];
                total[r][p] = multiply_add(exact, own * x_scales[r * stride + g], total[r][p]);
            }
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
        for (int p = 0; p < PANELS; p++) {
            int64_t count = m->last - m->first - p * LANES;
            if (count > 0) store_part(out + r * a->outputs + p * LANES, total[r][p], count);
        }
}

INLINE void many_integers(const int format, const linear *a, int64_t first, int64_t last, char *scratch) {
    const int64_t groups = groups_of(a), size = panel_group(format);
    float *scales = (float *)(scratch + PANELS * (DEPTH / GROUP) * size);
    int64_t g = 0;
    do {
        int64_t count = smaller(DEPTH / GROUP, groups - g);
        for (int p = 0; p < PANELS; p++)
            pack_panel(format, a, first + p * LANES, g, count, scratch + p * count * size, scales + p * count * LANES);
        packed m = {scratch, scales, g, count, first, last};
        int64_t tiles = (a->rows + PANEL_ROWS - 1) / PANEL_ROWS;
        for (int64_t tile = 0; tile < tiles; tile++) {
            int64_t row = a->rows * tile / tiles;
            switch (a->rows * (tile + 1) / tiles - row) {
            case 1: multiply_panels(format, 1, a, &m, row); break;
            case 2: multiply_panels(format, 2, a, &m, row); break;
            case 3: multiply_panels(format, 3, a, &m, row); break;
            case 4: multiply_panels(format, 4, a, &m, row); break;
            case 5: multiply_panels(format, PANEL_ROWS > 4 ? 5 : 1, a, &m, row); break;
            case 6: multiply_panels(format, PANEL_ROWS > 4 ? 6 : 1, a, &m, row); break;
            }
        }
        g += DEPTH / GROUP;
    } while (g < groups);
}

/* --- kernels ------------------------------------------------------------------------------------------------------ */

/* Bytes of scratch memory that each worker needs in `linear_many`. */
int64_t linear_scratch(void) {
    int64_t of_floats = sizeof(float) * BLOCK * STRIDE;
    int64_t of_integers = PANELS * (DEPTH / GROUP) * (panel_group(INT8) + (int64_t)sizeof(float) * LANES);
    return of_floats > of_integers ? of_floats : of_integers;
}

/* For 1 to 16 rows, though correct for more. A share is some of the outputs of all rows. */
void linear_few(const void *arguments, int64_t share, int64_t shares, int64_t worker) {
    const linear *a = arguments;
    int64_t first, last;
    (void)worker;
    share_of((a->outputs + 3) / 4, share, shares, &first, &last);
    for (int64_t o = 4 * first, end = smaller(4 * last, a->outputs); o < end; o += FINISHED) {
        int64_t until = smaller(o + FINISHED, end);
        switch (a->format) {
        case FLOAT32: few_floats(FLOAT32, a, o, until); break;
        case FLOAT16: few_floats(FLOAT16, a, o, until); break;
        case BFLOAT16: few_floats(BFLOAT16, a, o, until); break;
        case INT8: few_integers(INT8, a, o, until); break;
        case INT4: few_integers(INT4, a, o, until); break;
        }
        finish(a, o, until);
    }
}

/* For more rows, though correct for fewer. A share is some of the outputs of all rows. */
void linear_many(const void *arguments, int64_t share, int64_t shares, int64_t worker) {
    const linear *a = arguments;
    char *scratch = a->scratch + worker * linear_scratch();
    int64_t first, last, unit = a->format >= INT8 ? LANES : 4, size = a->format >= INT8 ? PANELS * LANES : BLOCK;
    share_of((a->outputs + unit - 1) / unit, share, shares, &first, &last);
    for (int64_t o = unit * first, end = smaller(unit * last, a->outputs); o < end; o += size) {
        int64_t until = smaller(o + size, end);
        switch (a->format) {
        case INT8: many_integers(INT8, a, o, until, scratch); break;
        case INT4: many_integers(INT4, a, o, until, scratch); break;
        default: many_floats(a, o, until, (float *)scratch); break;
        }
        finish(a, o, until);
    }
}
