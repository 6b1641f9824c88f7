/* Operations on each row (token) by itself: norms, gates, embedding, rotary embedding, selection of rows.
 *
 *     layer_norm    y = x - x.mean(); out = y / sqrt((y * y).mean() + epsilon) * gain + bias
 *     rms_norm      out = x / sqrt((x * x).mean() + epsilon) * gain + residual, over the row; or over each head's D numbers
 *     glu           out = activation(x[:, :F]) * x[:, F:], or gpt-oss's clamped gate of both
 *     gate          out = x * sigmoid(logits), each of n equal parts of a row by a logit of its own; or silu(logits)
 *     multiply      out = x * others * factor, of which one may be missing
 *     embed         out = scale * table[ids] + position_table[positions] + type_table[types]; table[id] is 0 for ids of
 *                   other ranks
 *     rotary        out[j], out[j + h] = x[j] c[j] - x[j + h] s[j], x[j + h] c[j] + x[j] s[j], by head, h = r / 2
 *     take_rows     out = x[rows]
 *     move_heads    out[:, :, :width] = x[:, :, :width], of heads with any strides
 *     add_changes   out = activation(y + changes) + residual
 *     scale_logits  logits = cap * tanh(scale * logits / cap), or scale * logits
 *
 * Bytes moved: each row is read once and its result written once; a row is in the L1 cache from its second pass on.
 * Floor: (bytes read + written) / bandwidth of the cache or memory that holds the rows; only `glu` of gelu or gelu_new
 * is bound by arithmetic, about 30 instructions for LANES numbers.
 *
 * A share is some of the rows. A row's result does not depend on the others, so it has the same bits in any batch and
 * with any number of workers.
 */
#include "activation.h"
#include "blocks.h"
#include "codebooks.h"
#include "pool.h"
#include <math.h>
#include <stdbool.h>

/* --- norms -------------------------------------------------------------------------------------------------------- */

typedef struct {
    const float *x;    /* [T, heads, width], `stride` numbers from one row to the next; may be `out` */
    const float *gain; /* [width], or [heads, width] if gain_stride is width, or NULL */
    const float *bias; /* [width], or NULL; layer_norm only */
    const float *residual; /* [T, width], or NULL; rms_norm of one head only */
    float *out;        /* [T, heads, width] */
    int64_t T, heads, width, stride, gain_stride;
    double epsilon;
} norm_arguments;

/* sum(x - shift), sum((x - shift)^2) */
typedef struct {
    float first, second;
} moments;

INLINE moments moments_of(const float *x, int64_t width, float shift) {
    floats first[4] = {{0}}, second[4] = {{0}};
    int64_t i = 0;
    for (; i + 4 * LANES <= width; i += 4 * LANES) {
#pragma GCC unroll 4
        for (int k = 0; k < 4; k++) {
            floats y = load(x + i + k * LANES) - shift;
            first[k] += y;
            second[k] = multiply_add(y, y, second[k]);
        }
    }
    for (; i + LANES <= width; i += LANES) {
        floats y = load(x + i) - shift;
        first[0] += y;
        second[0] = multiply_add(y, y, second[0]);
    }
    floats all_first = (first[0] + first[1]) + (first[2] + first[3]);
    floats all_second = (second[0] + second[1]) + (second[2] + second[3]);
    moments m = {sum(all_first), sum(all_second)};
    for (; i < width; i++) {
        float y = x[i] - shift;
        m.first += y;
        m.second += y * y;
    }
    return m;
}

/* (x - mean - rest) * factor * gain + bias or residual, for LANES numbers from number i on, of which `count` exist. */
INLINE void scale_part(const norm_arguments *a, const float *x, const float *added, float *out, float mean, float rest,
                       float factor, int64_t i, int64_t count) {
    floats y = (load_part(x + i, count) - mean - rest) * factor;
    if (a->gain) y *= load_part(a->gain + i, count);
    if (added) y += load_part(added + i, count);
    store_part(out + i, y, count);
}

INLINE void scale_row(const norm_arguments *a, const float *x, const float *added, float *out, float mean, float rest,
                      float factor) {
    int64_t i = 0;
    for (; i + LANES <= a->width; i += LANES) scale_part(a, x, added, out, mean, rest, factor, i, LANES);
    if (i < a->width) scale_part(a, x, added, out, mean, rest, factor, i, a->width - i);
}

/* The rounding of a large mean would be most of the error. So the mean is corrected by that of the differences to it,
 * and the variance is (y * y).mean() - y.mean()^2 of the differences y, whose mean is next to 0. */
void layer_norm(const void *arguments, int64_t share, int64_t shares, int64_t worker) {
    const norm_arguments *a = arguments;
    int64_t first, last;
    (void)worker;
    share_of(a->T, share, shares, &first, &last);
    for (int64_t t = first; t < last; t++) {
        const float *x = a->x + t * a->stride;
        float mean = moments_of(x, a->width, 0).first / a->width;
        moments m = moments_of(x, a->width, mean);
        float rest = m.first / a->width, variance = m.second / a->width - rest * rest;
        scale_row(a, x, a->bias, a->out + t * a->width, mean, rest, 1 / sqrtf(variance + (float)a->epsilon));
    }
}

void rms_norm(const void *arguments, int64_t share, int64_t shares, int64_t worker) {
    const norm_arguments *a = arguments;
    int64_t first, last;
    (void)worker;
    share_of(a->T, share, shares, &first, &last);
    norm_arguments own = *a; /* with the gain of a head */
    for (int64_t t = first; t < last; t++) {
        for (int64_t head = 0; head < a->heads; head++) {
            own.gain = a->gain ? a->gain + head * a->gain_stride : NULL;
            const float *x = a->x + t * a->stride + head * a->width;
            float mean_square = moments_of(x, a->width, 0).second / a->width;
            float factor = 1 / sqrtf(mean_square + (float)a->epsilon);
            const float *residual = a->residual ? a->residual + t * a->width : NULL;
            scale_row(&own, x, residual, a->out + (t * a->heads + head) * a->width, 0, 0, factor);
        }
    }
}

/* --- gates -------------------------------------------------------------------------------------------------------- */

typedef struct {
    const float *x; /* [T, 2 F]: gate and up; or [T, F], which is both, if `alone` */
    float *out;     /* [T, F] */
    int64_t T, F, activation, alone;
} glu_arguments;

INLINE void glu_rows(const glu_arguments *a, int64_t activation, int64_t first, int64_t last) {
    for (int64_t t = first; t < last; t++) {
        const float *gate = a->x + t * (a->alone ? a->F : 2 * a->F), *up = a->alone ? gate : gate + a->F;
        float *out = a->out + t * a->F;
        int64_t i = 0;
        for (; i + LANES <= a->F; i += LANES) store(out + i, gated(load(gate + i), load(up + i), activation));
        int64_t count = a->F - i;
        if (!count) continue;
        store_part(out + i, gated(load_part(gate + i, count), load_part(up + i, count), activation), count);
    }
}

void glu(const void *arguments, int64_t share, int64_t shares, int64_t worker) {
    const glu_arguments *a = arguments;
    int64_t first, last;
    (void)worker;
    share_of(a->T, share, shares, &first, &last);
    switch (a->activation) { /* outside of the loop: one loop for each activation */
    case RELU: glu_rows(a, RELU, first, last); break;
    case GELU: glu_rows(a, GELU, first, last); break;
    case GELU_NEW: glu_rows(a, GELU_NEW, first, last); break;
    case SILU: glu_rows(a, SILU, first, last); break;
    case SWIGLU_OAI: glu_rows(a, SWIGLU_OAI, first, last); break;
    case RELU2: glu_rows(a, RELU2, first, last); break;
    default: glu_rows(a, NO_ACTIVATION, first, last); break;
    }
}

typedef struct {
    const float *x;      /* [T, F] */
    const float *logits; /* [T, n], `stride` numbers from one row to the next */
    float *out;          /* [T, F] */
    int64_t T, F, n, stride, silu;
} gate_arguments;

INLINE floats gate_factor(floats logits, int64_t silu) {
    return logistic(silu ? logits : splat(1.0f), logits);
}

void gate(const void *arguments, int64_t share, int64_t shares, int64_t worker) {
    const gate_arguments *a = arguments;
    int64_t first, last, width = a->F / a->n;
    (void)worker;
    share_of(a->T, share, shares, &first, &last);
    for (int64_t t = first; t < last; t++) {
        const float *x = a->x + t * a->F, *logits = a->logits + t * a->stride;
        float *out = a->out + t * a->F;
        if (a->n == a->F) {
            for (int64_t i = 0; i < a->F; i += LANES) {
                int64_t count = a->F - i;
                floats factor = gate_factor(load_part(logits + i, count), a->silu);
                store_part(out + i, load_part(x + i, count) * factor, count);
            }
            continue;
        }
        for (int64_t j = 0; j < a->n; j++) {
            floats factor = gate_factor(splat(logits[j]), a->silu);
            for (int64_t i = 0; i < width; i += LANES) {
                int64_t at = j * width + i, count = width - i;
                store_part(out + at, load_part(x + at, count) * factor, count);
            }
        }
    }
}

typedef struct {
    const float *x;      /* [T, F] */
    const float *others; /* [T, F], rows `stride` apart, or NULL */
    const float *factor; /* one number, or one of each column if `by_column`; or NULL */
    float *out;          /* [T, F] */
    int64_t T, F, stride, by_column;
} multiply_arguments;

void multiply(const void *arguments, int64_t share, int64_t shares, int64_t worker) {
    const multiply_arguments *a = arguments;
    int64_t first, last;
    (void)worker;
    share_of(a->T, share, shares, &first, &last);
    for (int64_t t = first; t < last; t++) {
        const float *x = a->x + t * a->F, *row = a->others ? a->others + t * a->stride : NULL;
        float *out = a->out + t * a->F;
        for (int64_t i = 0; i < a->F; i += LANES) {
            int64_t count = a->F - i;
            floats y = load_part(x + i, count);
            if (row) y *= load_part(row + i, count);
            if (a->factor) y *= a->by_column ? load_part(a->factor + i, count) : splat(*a->factor);
            store_part(out + i, y, count);
        }
    }
}

/* --- embedding ---------------------------------------------------------------------------------------------------- */

/* A matrix in one of the formats of weights; the layouts are those of reference/quantize.py and reference/blocks.py. */
typedef struct {
    const void *values;     /* [V, E] of float or of 16 bits, int8 [V, E'], or uint8 [V, E' / 2]; E' in whole groups;
                               or blocks */
    const uint16_t *scales; /* float16 [V, E' / group] of int8 and int4, else NULL */
    const void *offsets;    /* of int4, [V, E' / group]: float16, or uint8 zero points; NULL: they are 8 */
    int64_t format, group, zeros;
} table;

typedef struct {
    const int64_t *ids; /* [T] */
    table words;        /* of tokens `first` to `stop`; the vectors of others are zero */
    const int64_t *positions; /* [T] */
    table places;             /* without a position table its values are NULL */
    const int64_t *types;     /* [T] */
    table kinds;              /* of token types, likewise */
    float *out;               /* [T, E] */
    int64_t T, E, first, stop;
    double scale; /* of the token's vector */
} embed_arguments;

/* LANES numbers of 4 bits, from 0 to 15: those from number i on. 16 bytes hold 32 of them, j and j + 16 in byte j. */
INLINE floats load_int4(const uint8_t *p, int64_t i) {
    ints both = load_bytes(p + i / 32 * 16 + i % 16);
    return __builtin_convertvector((i % 32 < 16 ? both : both >> 4) & 15, floats);
}

/* out = y, or out += y, for the first `count` of LANES numbers. */
INLINE void put(float *out, floats y, int64_t count, bool add) {
    store_part(out, add ? load_part(out, count) + y : y, count);
}

INLINE void look_up_floats(const table *m, int64_t row, int64_t E, bool add, float *out) {
    const float *from = (const float *)m->values + row * E;
    int64_t i = 0;
    for (; i + LANES <= E; i += LANES) put(out + i, load(from + i), LANES, add);
    if (i < E) put(out + i, load_part(from + i, E - i), E - i, add);
}

INLINE void look_up_16_bits(const int format, const table *m, int64_t row, int64_t E, bool add, float *out) {
    const uint16_t *from = (const uint16_t *)m->values + row * E;
    int64_t i = 0;
    for (; i + LANES <= E; i += LANES)
        put(out + i, format == FLOAT16 ? load_float16(from + i) : load_bfloat16(from + i), LANES, add);
    if (i == E) return;
    uint16_t part[LANES] = {0};
    memcpy(part, from + i, sizeof(uint16_t) * (E - i));
    put(out + i, format == FLOAT16 ? load_float16(part) : load_bfloat16(part), E - i, add);
}

INLINE void look_up_groups(const int format, const table *m, int64_t row, int64_t E, bool add, float *out) {
    int64_t groups = (E + m->group - 1) / m->group, padded = groups * m->group;
    const int8_t *eight = (const int8_t *)m->values + row * padded;
    const uint8_t *four = (const uint8_t *)m->values + row * padded / 2;
    for (int64_t g = 0, i = 0; g < groups; g++) {
        float scale = float16_to_float(m->scales[row * groups + g]), zero = 8, offset = 0;
        if (m->offsets && m->zeros) zero = ((const uint8_t *)m->offsets)[row * groups + g];
        if (m->offsets && !m->zeros)
            zero = 0, offset = float16_to_float(((const uint16_t *)m->offsets)[row * groups + g]);
        for (int64_t end = i + m->group; i < end && i < E; i += LANES) {
            floats y = format == INT8 ? load_int8(eight + i) : load_int4(four, i) - zero;
            put(out + i, scale * y + offset, E - i, add);
        }
    }
}

/* Some groups are unpacked and then scaled; each of LANES rows is the same one. */
INLINE void look_up_blocks(const int format, const table *m, int64_t row, int64_t E, bool add, float *out) {
    const int of_block = (int)block_numbers(format) / 32, parts = scale_parts(format);
    const int64_t size = block_bytes(format), at[4] = {0, 0, 0, 0};
    const char *block = (const char *)m->values + row * (E / block_numbers(format)) * size;
    for (int64_t i = 0; i < E; block += size) {
        const char *same[LANES];
        floats scales[16], lows[16];
        for (int o = 0; o < LANES; o++) same[o] = block;
        block_scales(format, same, 0, scales, lows);
#pragma GCC unroll 8
        for (int g = 0; g < of_block; g += AT_ONCE4) {
            uint8_t numbers[4][32];
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++) {
                sixteens v = unpack_groups(format, block, g, at, half);
#pragma GCC unroll 4
                for (int k = 0; k < AT_ONCE4; k++) memcpy(numbers[k] + 16 * half, (char *)&v + 16 * k, 16);
            }
            for (int k = 0; k < AT_ONCE4 && g + k < of_block; k++)
                for (int j = 0; j < 32; j += LANES, i += LANES) {
                    const int scale = (g + k) * parts + (parts == 2 ? j / 16 : 0);
                    const int excess = excess_of(format);
                    floats y = has_signs(format) ? load_int8((int8_t *)numbers[k] + j)
                                                 : __builtin_convertvector(load_bytes(numbers[k] + j) - excess, floats);
                    y *= scales[scale];
                    put(out + i, has_offsets(format) ? y - lows[scale] * 8 : y, LANES, add);
                }
        }
    }
}

INLINE void look_up_codes(const int format, const table *m, int64_t row, int64_t E, bool add, float *out) {
    const char *from = (const char *)m->values + row * code_bytes(E);
    for (int64_t i = 0; i < E; i += LANES) put(out + i, load_codes(format, from, i), E - i, add);
}

static void look_up(const table *m, int64_t row, int64_t E, bool add, float *out) {
    switch (m->format) {
    case FLOAT32: look_up_floats(m, row, E, add, out); break;
    case FLOAT16: look_up_16_bits(FLOAT16, m, row, E, add, out); break;
    case BFLOAT16: look_up_16_bits(BFLOAT16, m, row, E, add, out); break;
    case INT8: look_up_groups(INT8, m, row, E, add, out); break;
    case INT4: look_up_groups(INT4, m, row, E, add, out); break;
    case Q4_K: look_up_blocks(Q4_K, m, row, E, add, out); break;
    case Q5_K: look_up_blocks(Q5_K, m, row, E, add, out); break;
    case Q6_K: look_up_blocks(Q6_K, m, row, E, add, out); break;
    case Q5_0: look_up_blocks(Q5_0, m, row, E, add, out); break;
    case Q5_1: look_up_blocks(Q5_1, m, row, E, add, out); break;
    case IQ4_NL: look_up_blocks(IQ4_NL, m, row, E, add, out); break;
    case MXFP4: look_up_blocks(MXFP4, m, row, E, add, out); break;
    case IQ4_XS: look_up_blocks(IQ4_XS, m, row, E, add, out); break;
    case Q3_K: look_up_blocks(Q3_K, m, row, E, add, out); break;
    case Q2_K: look_up_blocks(Q2_K, m, row, E, add, out); break;
    case NVFP4: look_up_blocks(NVFP4, m, row, E, add, out); break;
    case Q5_0X2: look_up_blocks(Q5_0X2, m, row, E, add, out); break;
    case NF4: look_up_codes(NF4, m, row, E, add, out); break;
    case FP4: look_up_codes(FP4, m, row, E, add, out); break;
    }
}

void embed(const void *arguments, int64_t share, int64_t shares, int64_t worker) {
    const embed_arguments *a = arguments;
    int64_t first, last;
    (void)worker;
    share_of(a->T, share, shares, &first, &last);
    for (int64_t t = first; t < last; t++) {
        float *out = a->out + t * a->E;
        if (a->ids[t] >= a->first && a->ids[t] < a->stop) {
            look_up(&a->words, a->ids[t] - a->first, a->E, false, out);
        } else {
            memset(out, 0, sizeof(float) * a->E);
        }
        if (a->scale != 1)
            for (int64_t i = 0; i < a->E; i++) out[i] *= (float)a->scale;
        if (a->places.values) look_up(&a->places, a->positions[t], a->E, true, out);
        if (a->kinds.values) look_up(&a->kinds, a->types[t], a->E, true, out);
    }
}

/* --- rotary embedding --------------------------------------------------------------------------------------------- */

typedef struct {
    const int64_t *positions; /* [T] */
    const float *frequencies; /* [rows, half] */
    const float *growth;      /* [T], or NULL: each token divides frequency j by growth^(j / (half - 1)); of two rows of
                               * frequencies it takes that of this number, 0 or 1 */
    float *cosines, *sines;   /* [T, half] */
    int64_t T, half, rows;
    double scale;
} rotary_angles_arguments;

/* Cosines and sines of a batch, computed once and used by all layers. */
void rotary_angles(const void *arguments, int64_t share, int64_t shares, int64_t worker) {
    const rotary_angles_arguments *a = arguments;
    int64_t first, last;
    (void)worker;
    share_of(a->T, share, shares, &first, &last);
    for (int64_t t = first; t < last; t++) {
        bool second = a->rows == 2 && a->growth[t] != 0;
        for (int64_t j = 0; j < a->half; j++) {
            float frequency = a->frequencies[second ? a->half + j : j];
            if (a->growth && a->rows != 2 && a->half > 1) frequency /= powf(a->growth[t], (float)j / (float)(a->half - 1));
            float angle = (float)a->positions[t] * frequency;
            a->cosines[t * a->half + j] = cosf(angle) * (float)a->scale;
            a->sines[t * a->half + j] = sinf(angle) * (float)a->scale;
        }
    }
}

/* Queries or keys: [T, heads, D], `stride` numbers from one token to the next. `out` may be `x`. */
typedef struct {
    const float *x;
    float *out;
    int64_t heads, D, stride, out_stride;
} heads_to_rotate;

typedef struct {
    heads_to_rotate q, k;
    const float *cosines, *sines; /* [T, half] */
    int64_t T, half;
} rotary_arguments;

static void rotate(const heads_to_rotate *part, int64_t t, const rotary_arguments *a) {
    const float *cosines = a->cosines + t * a->half, *sines = a->sines + t * a->half;
    for (int64_t head = 0; head < part->heads; head++) {
        const float *x = part->x + t * part->stride + head * part->D;
        float *out = part->out + t * part->out_stride + head * part->D;
        for (int64_t j = 0; j < a->half; j += LANES) {
            int64_t count = a->half - j;
            floats c = load_part(cosines + j, count), s = load_part(sines + j, count);
            floats first = load_part(x + j, count), second = load_part(x + a->half + j, count);
            store_part(out + j, multiply_add(first, c, -(second * s)), count);
            store_part(out + a->half + j, multiply_add(second, c, first * s), count);
        }
        int64_t rest = part->D - 2 * a->half;
        if (out != x && rest) memcpy(out + 2 * a->half, x + 2 * a->half, sizeof(float) * rest);
    }
}

void rotary(const void *arguments, int64_t share, int64_t shares, int64_t worker) {
    const rotary_arguments *a = arguments;
    int64_t first, last;
    (void)worker;
    share_of(a->T, share, shares, &first, &last);
    for (int64_t t = first; t < last; t++) {
        rotate(&a->q, t, a);
        rotate(&a->k, t, a);
    }
}

/* --- selection of rows -------------------------------------------------------------------------------------------- */

typedef struct {
    const float *x;      /* [T, E] */
    const int64_t *rows; /* [R] */
    float *out;          /* [R, E] */
    int64_t R, E;
} take_rows_arguments;

void take_rows(const void *arguments, int64_t share, int64_t shares, int64_t worker) {
    const take_rows_arguments *a = arguments;
    int64_t first, last;
    (void)worker;
    share_of(a->R, share, shares, &first, &last);
    for (int64_t r = first; r < last; r++) memcpy(a->out + r * a->E, a->x + a->rows[r] * a->E, sizeof(float) * a->E);
}

/* --- heads elsewhere ---------------------------------------------------------------------------------------------- */

typedef struct {
    const float *x; /* [T, H, width], `stride` numbers from one token to the next, `head_stride` from head to head */
    float *out;     /* likewise */
    int64_t T, H, width, stride, head_stride, out_stride, out_head_stride;
} move_heads_arguments;

void move_heads(const void *arguments, int64_t share, int64_t shares, int64_t worker) {
    const move_heads_arguments *a = arguments;
    int64_t first, last;
    (void)worker;
    share_of(a->T * a->H, share, shares, &first, &last);
    for (int64_t i = first; i < last; i++) {
        int64_t t = i / a->H, head = i % a->H;
        memcpy(a->out + t * a->out_stride + head * a->out_head_stride, a->x + t * a->stride + head * a->head_stride,
               sizeof(float) * a->width);
    }
}

/* --- changes of some rows ----------------------------------------------------------------------------------------- */

typedef struct {
    const float *y;              /* [T, width] */
    const float *const *changes; /* [T]: [width] each, or NULL: what low-rank matrices add to a row */
    const float *residual;       /* [T, width], or NULL */
    float *out;                  /* [T, width] */
    int64_t T, width, activation;
} add_changes_arguments;

void add_changes(const void *arguments, int64_t share, int64_t shares, int64_t worker) {
    const add_changes_arguments *a = arguments;
    int64_t first, last;
    (void)worker;
    share_of(a->T, share, shares, &first, &last);
    for (int64_t t = first; t < last; t++)
        for (int64_t i = 0; i < a->width; i += LANES) {
            int64_t count = a->width - i, at = t * a->width + i;
            floats y = load_part(a->y + at, count);
            if (a->changes[t]) y += load_part(a->changes[t] + i, count);
            y = activate(y, a->activation);
            if (a->residual) y += load_part(a->residual + at, count);
            store_part(a->out + at, y, count);
        }
}

/* --- logits ------------------------------------------------------------------------------------------------------- */

typedef struct {
    float *logits; /* [count], changed in place */
    int64_t count;
    double scale, cap; /* cap 0: none */
} scale_logits_arguments;

/* A share is some of the logits, in whole vectors. */
void scale_logits(const void *arguments, int64_t share, int64_t shares, int64_t worker) {
    const scale_logits_arguments *a = arguments;
    int64_t first, last;
    (void)worker;
    share_of((a->count + LANES - 1) / LANES, share, shares, &first, &last);
    float scale = (float)a->scale, cap = (float)a->cap;
    for (int64_t i = first * LANES; i < last * LANES; i += LANES) {
        floats y = load_part(a->logits + i, a->count - i) * scale;
        store_part(a->logits + i, a->cap ? cap * hyperbolic_tangent(y / cap) : y, a->count - i);
    }
}
