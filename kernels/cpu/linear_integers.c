/* The matrix product with weights of integers: out = x' @ W.T, W [outputs, inputs] of int8 or int4 with a scale for
 * each group of 32 or 64 inputs; and x' = rounded x, which `round_rows` makes.
 *
 *     x' = rint(x / scale) * scale, scale = max |x| / 127, for each 32 numbers of a row
 *
 * Bytes and floor: as in linear.c. Rounding reads x once and writes a quarter, or half if `wide`.
 *
 * Order of summation: the products of 32 integers are summed exactly; then float sums of these, times both scales, by
 * ascending place, in each version its own way. Weights of 4 bits are stored as integers from 0 on; what is subtracted
 * from scale x integer, 8 x scale, zero point x scale or -offset, is the same in a group, so it is multiplied with the
 * sums of x' ("low" below). What packed integers are higher than they are, 8 or EXCESS8, is subtracted from the sums as
 * integers.
 *
 * Versions:
 * - `integers_few`: a register tile of up to FEW_ROWS rows by 4 outputs; lanes along the inputs. The scales of LANES
 *   groups are multiplied as one vector, then the groups' products are added, with AVX2 of two groups of int4 at once.
 * - `integers_many`: a register tile of up to INT8_ROWS or INT4_ROWS rows by PANELS vectors of outputs; lanes along
 *   the outputs. With AVX-512 VNNI for any number of rows, but a single one:
 * - `multiply_one`: a row by LANES outputs; lanes along the inputs, integers summed across lanes.
 */
#include "dot.h"
#include "linear.h"
#include <math.h>

enum {
    GROUP = 32,                                 /* numbers of x that share a scale */
    FEW_ROWS = VECTOR_REGISTERS == 32 ? 4 : 2,  /* of a tile with the lanes along the inputs */
    PANELS = INTEGER_OUTPUTS / LANES,           /* vectors of outputs of a tile with the lanes along the outputs ... */
    INT8_ROWS = VECTOR_REGISTERS == 32 ? 6 : 4, /* ... and its rows: of int4 fewer, since they are bound by what ... */
    INT4_ROWS = VECTOR_REGISTERS == 32 ? 6 : 3, /* ... follows a group, for which sums must then fit in registers */
    SCALE_ROWS = DEPTH / GROUP                  /* groups of a panel */
};

INLINE ints load_ints(const void *p) {
    ints v;
    memcpy(&v, p, sizeof v);
    return v;
}

/* The numbers of float16, or of bytes, of LANES groups of 32 from g on, of which a row has `groups`; zeros beyond.
 * There is one for 2^shift groups, at any address: weights may be mapped from a file. From the row on there are
 * `room`, with those of later rows, so that most rows' last ones are read as a whole vector. */
INLINE floats halves_of_groups(const uint16_t *row, int64_t g, int64_t groups, int64_t shift, int64_t room) {
    const uint16_t *from = (const uint16_t *)((const char *)row + (2 * g >> shift));
    const int64_t left = groups - g, stored = (smaller(left, LANES) + shift) >> shift;
    uint16_t part[LANES] = {0};
    if (left < LANES && room - (g >> shift) < LANES) {
        memcpy(part, from, 2 * stored);
    } else if (shift) {
        memcpy(part, from, LANES);
    } else {
        memcpy(part, from, 2 * LANES);
    }
    floats found = load_float16(part);
    if (shift) found = doubled(found);
    return left < LANES ? first_numbers(found, left) : found;
}

INLINE floats bytes_of_groups(const uint8_t *row, int64_t g, int64_t groups, int64_t shift, int64_t room) {
    const uint8_t *from = row + (g >> shift);
    const int64_t left = groups - g, stored = (smaller(left, LANES) + shift) >> shift;
    uint8_t part[LANES] = {0};
    if (left < LANES && room - (g >> shift) < LANES) {
        memcpy(part, from, stored);
    } else {
        memcpy(part, from, shift ? LANES / 2 : LANES);
    }
    floats found = __builtin_convertvector(load_bytes(part), floats);
    if (shift) found = doubled(found);
    return left < LANES ? first_numbers(found, left) : found;
}

/* Numbers of a row of W in groups, in groups of 32. */
static int64_t groups_of(const linear *a) {
    return (a->inputs + a->group - 1) / a->group * (a->group / GROUP);
}

/* From row to row of x_scales and x_sums. */
static int64_t scale_stride(int64_t groups) {
    return (groups + 15) / 16 * 16;
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
    int32_t bits = largest_int(highest);
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

/* Rounds the rows of x for weights of integers. A share is some of the rows. */
void round_rows(const void *arguments, int64_t share, int64_t shares, int64_t worker) {
    const linear *a = arguments;
    int64_t groups = groups_of(a), stride = scale_stride(groups), first, last;
    const int32_t excess = a->format == INT8 ? EXCESS8 : 8;
    (void)worker;
    share_of(a->rows, share, shares, &first, &last);
    for (int64_t row = first; row < last; row++) {
        float *scales = a->x_scales + row * stride;
        int32_t *x_sums = a->x_sums + row * stride;
        for (int64_t g = 0; g < stride; g++) {
            const float *x = a->x + row * a->inputs + g * GROUP;
            int64_t count = g < groups ? smaller(GROUP, a->inputs - g * GROUP) : 0;
            scales[g] = x_sums[g] = 0;
            if (g >= groups) continue;
            float part[GROUP];
            if (count < GROUP) {
                memset(part, 0, sizeof part);
                if (count > 0) memcpy(part, x, sizeof(float) * count);
                x = part;
            }
            ints rounded[GROUP / LANES], total = {0};
            scales[g] = round_group(x, rounded);
            for (int i = 0; i < GROUP / LANES; i++) total += rounded[i];
            if (a->wide) {
                store_as_16_bits((int16_t *)a->integers + (row * groups + g) * GROUP, rounded);
            } else {
                store_as_bytes(a->integers + (row * groups + g) * GROUP, rounded);
            }
            x_sums[g] = -excess * (int32_t)sum(__builtin_convertvector(total, floats));
        }
    }
}

/* --- few rows: lanes along the inputs ----------------------------------------------------------------------------- */

INLINE int64_t group_bytes(int64_t format) {
    return format == INT8 ? GROUP : GROUP / 2;
}

/* total[r, o] += x'[r] @ W[o] for GROUPS or GROUPS4 groups, from byte `at` of a row of W on and from `x` on. If only
 * `left` of them exist, not 0, zeros are in place of the others. */
INLINE void add_groups(const int format, const int R, const char *const *w, int64_t at, const int8_t *x,
                       int64_t x_stride, int64_t left, const float *scales, floats total[4][4]) {
    octets numbers[4][2];
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
        if (format == INT8) {
            numbers[r][0] = load_octets(x + r * x_stride);
        } else {
            load_for_nibbles(x + r * x_stride, numbers[r]);
        }
    }
#pragma GCC unroll 4
    for (int o = 0; o < 4; o++) {
        const char *p = w[o] + at;
        char last[4 * GROUP];
        if (left) p = memcpy(memset(last, 0, sizeof last), p, left * group_bytes(format));
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            ints dots = format == INT8 ? dot_signed(load_octets(p), numbers[r][0]) : dot_nibbles(p, numbers[r]);
            const float *own = scales + (r * 4 + o) * LANES;
            total[r][o] = multiply_add(__builtin_convertvector(dots, floats),
                                       format == INT8 ? spread(own) : spread4(own), total[r][o]);
        }
    }
}

/* Scales of 4 rows of W and what is subtracted from their integers; rows as they are stored, of `each` numbers. */
typedef struct {
    const uint16_t *scales[4];
    const char *offsets[4];
    int64_t room; /* numbers from the last of the 4 rows on */
} columns;

/* out[r, o] = x'[r] @ W[o] for R rows from `row` on and `count` outputs, 1 to 4, from `output` on. In place of those
 * beyond, the last is repeated. The scales of LANES groups are multiplied together, and then meet their groups. */
INLINE void multiply_four(const int format, const int R, const linear *a, int64_t output, int64_t count, int64_t row) {
    const int64_t groups = groups_of(a), stride = scale_stride(groups), shift = a->group == 64;
    const int64_t bytes = group_bytes(format), step = format == INT8 ? GROUPS : GROUPS4, each = groups >> shift;
    const int8_t *x = a->integers + row * groups * GROUP;
    const float *x_scales = a->x_scales + row * stride;
    const int32_t *x_sums = a->x_sums + row * stride;
    const char *w[4];
    columns c;
    floats total[4][4];
    c.room = (a->outputs - output - count + 1) * each;
#pragma GCC unroll 4
    for (int o = 0; o < 4; o++) {
        int64_t at = output + smaller(o, count - 1);
        w[o] = (const char *)a->weight + at * groups * bytes;
        c.scales[o] = (const uint16_t *)((const char *)a->scales + 2 * at * each);
        c.offsets[o] = a->offsets ? (const char *)a->offsets + at * each * (a->zeros ? 1 : 2) : NULL;
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) total[r][o] = (floats){0};
    }
    for (int64_t g = 0; g < groups; g += LANES) {
        const int64_t until = smaller(g + LANES, groups);
        float scales[4][4][LANES];
#pragma GCC unroll 4
        for (int o = 0; o < 4; o++) {
            __builtin_prefetch((const char *)c.scales[o] + (2 * g >> shift) + 2 * AHEAD / bytes);
            floats scale = halves_of_groups(c.scales[o], g, groups, shift, c.room);
            floats low = scale; /* x_sums are -8 sums */
            if (format == INT4 && a->offsets) {
                low = (a->zeros ? scale * bytes_of_groups((const uint8_t *)c.offsets[o], g, groups, shift, c.room)
                                : -halves_of_groups((const uint16_t *)c.offsets[o], g, groups, shift, c.room)) / 8;
            }
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) {
                floats own = load(x_scales + r * stride + g);
                store(scales[r][o], own * scale);
                if (format != INT4) continue;
                floats sums_of_x = __builtin_convertvector(load_ints(x_sums + r * stride + g), floats);
                total[r][o] = multiply_add(own * low, sums_of_x, total[r][o]);
            }
        }
        int64_t i = g;
        for (; i + step <= until; i += step) {
            fetch_lines(w[0] + 4 * i * bytes + AHEAD, 4 * step * bytes);
            add_groups(format, R, w, i * bytes, x + i * GROUP, groups * GROUP, 0, scales[0][0] + i - g, total);
        }
        if (step > 1 && i < until)
            add_groups(format, R, w, i * bytes, x + i * GROUP, groups * GROUP, until - i, scales[0][0] + i - g, total);
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
        store_four(a->out + (row + r) * a->outputs + output, sums(total[r][0], total[r][1], total[r][2], total[r][3]),
                   count);
}

typedef void few_tile(const linear *a, int64_t output, int64_t count, int64_t row);

#define FEW_TILE(NAME, FORMAT, R) \
    SEPARATE void NAME##_##R(const linear *a, int64_t output, int64_t count, int64_t row) { \
        if (R <= FEW_ROWS && !PACKED) multiply_four(FORMAT, R, a, output, count, row); \
    }
#define FEW_TILES(NAME, FORMAT) /* by their rows */ \
    FEW_TILE(NAME, FORMAT, 1) \
    FEW_TILE(NAME, FORMAT, 2) \
    FEW_TILE(NAME, FORMAT, 3) \
    FEW_TILE(NAME, FORMAT, 4) \
    static few_tile *const NAME[] = {NULL, NAME##_1, NAME##_2, NAME##_3, NAME##_4};

FEW_TILES(few_int8, INT8)
FEW_TILES(few_int4, INT4)

void integers_few(const linear *a, int64_t first, int64_t last) {
    few_tile *const *tiles = a->format == INT8 ? few_int8 : few_int4;
    const int64_t count = (a->rows + FEW_ROWS - 1) / FEW_ROWS;
    for (int64_t o = first; o < last; o += 4)
        for (int64_t i = 0; i < count; i++) {
            int64_t row = a->rows * i / count;
            tiles[a->rows * (i + 1) / count - row](a, o, smaller(4, last - o), row);
        }
}

/* --- many rows: lanes along the outputs --------------------------------------------------------------------------- */

/* Whether also few rows are multiplied by packed weights: the products of bytes are then so fast that lanes along the
 * inputs lose more by the scales, one for each product of a row and an output. */
int64_t integers_packed(void) {
    return PACKED;
}

/* Whether `linear_many` takes x as int16 for weights of int8. */
int64_t wide_integers(void) {
    return STEP8 == 2;
}

/* Bytes of a group of a panel: LANES outputs by 32 inputs. */
INLINE int64_t panel_group(int64_t format) {
    return GROUP * LANES * (format == INT8 && STEP8 == 2 ? 2 : 1);
}

/* One group of int8 weights of LANES rows as pairs of 16 bits. */
INLINE void pack_pairs(const char *const *rows, int64_t at, char *to) {
    int32_t pairs[LANES * 16];
    for (int o = 0; o < LANES; o++) {
        int16_t numbers[GROUP];
        for (int i = 0; i < GROUP; i++) numbers[i] = (int8_t)rows[o][at + i];
        memcpy(pairs + o * 16, numbers, sizeof numbers);
    }
    for (int i = 0; i < 16; i += 8) transpose(pairs + i, 16, (int32_t *)to + i * LANES);
}

/* What is multiplied after INTEGER_OUTPUTS outputs from `first` on, in the order in which it lies: as much of it as LANES
 * rows have up to their group g. It is fetched while as much of this is multiplied, since LANES rows side by side are
 * more streams than the hardware fetches early by itself. */
INLINE const char *next_outputs(const linear *a, int64_t first, int64_t g) {
    const int64_t each = group_bytes(a->format);
    return (const char *)a->weight + ((first + INTEGER_OUTPUTS) * groups_of(a) + g * LANES) * each;
}

/* Packs LANES outputs from `first` on, `count` groups from g on. In place of outputs that do not exist the last one is
 * repeated. */
INLINE void pack_panel_as(const int format, const linear *a, int64_t first, int64_t g, int64_t count, char *panel) {
    const int64_t each = group_bytes(format);
    const char *rows[LANES];
    for (int o = 0; o < LANES; o++)
        rows[o] = (const char *)a->weight + (smaller(first + o, a->outputs - 1) * groups_of(a) + g) * each;
    const char *next = next_outputs(a, first, g);
    for (int64_t at = 0; at < count * each; at += each, panel += panel_group(format)) {
        fetch_lines(next + at * LANES, each * LANES);
        ints numbers[8];
        if (format == INT4) {
            gather_16_bytes(rows, at, numbers);
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) {
                numbers[j + 4] = numbers[j] >> 4 & 0x0F0F0F0F;
                numbers[j] &= 0x0F0F0F0F;
            }
        } else if (STEP8 == 4) {
            gather_16_bytes(rows, at, numbers);
            gather_16_bytes(rows, at + 16, numbers + 4);
#pragma GCC unroll 8
            for (int j = 0; j < 8; j++) numbers[j] ^= EXCESS8 ? (int32_t)0x80808080 : 0; /* + 128 in each byte */
        } else {
            pack_pairs(rows, at, panel);
            continue;
        }
        memcpy(panel, numbers, sizeof numbers);
    }
}

SEPARATE void pack_int8(const linear *a, int64_t first, int64_t g, int64_t count, char *panel) {
    pack_panel_as(INT8, a, first, g, count, panel);
}

SEPARATE void pack_int4(const linear *a, int64_t first, int64_t g, int64_t count, char *panel) {
    pack_panel_as(INT4, a, first, g, count, panel);
}

/* Numbers of float16 of LANES outputs from `first` on, `count` from number i of a row on, which has `each` of them.
 * -> [count, LANES] */
static void pack_halves(const uint16_t *from, const linear *a, int64_t each, int64_t first, int64_t i, int64_t count,
                        float *to) {
    const char *rows[LANES];
    for (int o = 0; o < LANES; o++)
        rows[o] = (const char *)from + 2 * each * smaller(first + o, a->outputs - 1);
    for (int64_t end = i + count, at = i; at < end; at += 8) {
        int64_t eight = larger(0, smaller(at, each - 8)); /* the last of a row may be packed twice */
        ints pairs[4];
        char copied[LANES][16] = {{0}};
        if (each < 8) { /* a short row */
            for (int o = 0; o < LANES; o++) rows[o] = memcpy(copied[o], rows[o], 2 * each);
        }
        gather_16_bytes(rows, 2 * eight, pairs);
        for (int64_t j = larger(0, at - eight); j < 8 && eight + j < end; j++)
            store(to + (eight + j - i) * LANES, float16_of_lanes(j % 2 ? pairs[j / 2] >> 16 : pairs[j / 2]));
    }
}

/* Scales of LANES outputs from `first` on, `count` groups from g on, [count, LANES], and with offsets an eighth of what
 * is subtracted. Both count groups as they are stored, of 32 or 64. */
static void pack_scales(const linear *a, int64_t first, int64_t g, int64_t count, float *scales, float *lows) {
    const int64_t each = groups_of(a) / (a->group / GROUP);
    pack_halves(a->scales, a, each, first, g, count, scales);
    if (!a->offsets) return;
    if (!a->zeros) pack_halves(a->offsets, a, each, first, g, count, lows);
    for (int64_t i = 0; i < count; i++) {
        floats low = -load(lows + i * LANES);
        if (a->zeros) {
            for (int o = 0; o < LANES; o++) {
                int64_t at = smaller(first + o, a->outputs - 1) * each + g + i;
                low[o] = ((const uint8_t *)a->offsets)[at];
            }
            low *= load(scales + i * LANES);
        }
        store(lows + i * LANES, low / 8);
    }
}

/* total + x' @ W in a group of LANES outputs: `dot` are the sums of integers. */
INLINE floats add_group(const bool offsets, floats total, ints dot, const float *scales, const float *lows,
                        float x_scale, int32_t x_sum) {
    floats exact = __builtin_convertvector(dot, floats), own = load(scales), same = splat(x_scale);
    if (!offsets) return multiply_add(exact, own * same, total);
    return multiply_add(multiply_add(exact, own, load(lows) * (float)x_sum), same, total);
}

/* Outputs first to last of PANELS panels, with `count` groups from g on. */
typedef struct {
    const char *panels;
    const float *scales, *lows; /* [PANELS, SCALE_ROWS, LANES], of 2^shift groups each */
    int64_t g, count, shift, first, last;
} packed;

INLINE ints splat_4_bytes(const void *p) {
    int32_t v;
    memcpy(&v, p, sizeof v);
    return v - (ints){0};
}

/* out[row + r] = x'[row + r] @ W for the outputs of the panels and R rows; += that beyond the first block of inputs. */
INLINE void multiply_panels(const int format, const bool offsets, const int R, const linear *a, const packed *m,
                            int64_t row) {
    const bool two_bytes = format == INT8 && STEP8 == 2;
    const int64_t size = panel_group(format), x_group = two_bytes ? 2 * GROUP : GROUP;
    const int64_t groups = groups_of(a), stride = scale_stride(groups);
    const bool excess = format == INT4 ? !offsets : EXCESS8 > 0, at_once = excess && !(format == INT4 && SHORT4);
    const char *x = (const char *)a->integers + (row * groups + m->g) * x_group;
    const float *x_scales = a->x_scales + row * stride + m->g;
    const int32_t *x_sums = a->x_sums + row * stride + m->g;
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
            for (int p = 0; p < PANELS; p++)
                dots[r][p] = at_once ? splat_4_bytes(x_sums + r * stride + g) : (ints){0};
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
            int64_t scale = (p * SCALE_ROWS + (g >> m->shift)) * LANES;
#pragma GCC unroll 6
            for (int r = 0; r < R; r++) {
                ints dot = format == INT4 ? total4(dots[r][p]) : dots[r][p];
                if (excess && !at_once) dot += x_sums[r * stride + g];
                total[r][p] = add_group(offsets, total[r][p], dot, m->scales + scale, m->lows + scale,
                                        x_scales[r * stride + g], x_sums[r * stride + g]);
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

typedef void many_tile(const linear *a, const packed *m, int64_t row);

#define MANY_TILE(NAME, FORMAT, OFFSETS, R) \
    SEPARATE void NAME##_##R(const linear *a, const packed *m, int64_t row) { \
        if (R <= FORMAT##_ROWS) multiply_panels(FORMAT, OFFSETS, R, a, m, row); \
    }
#define MANY_TILES(NAME, FORMAT, OFFSETS) /* by their rows */ \
    MANY_TILE(NAME, FORMAT, OFFSETS, 1) \
    MANY_TILE(NAME, FORMAT, OFFSETS, 2) \
    MANY_TILE(NAME, FORMAT, OFFSETS, 3) \
    MANY_TILE(NAME, FORMAT, OFFSETS, 4) \
    MANY_TILE(NAME, FORMAT, OFFSETS, 5) \
    MANY_TILE(NAME, FORMAT, OFFSETS, 6) \
    static many_tile *const NAME[] = {NULL, NAME##_1, NAME##_2, NAME##_3, NAME##_4, NAME##_5, NAME##_6};

MANY_TILES(many_int8, INT8, false)
MANY_TILES(many_int4, INT4, false)
MANY_TILES(many_int4_offsets, INT4, true)

int64_t integers_scratch(void) {
    return PANELS * ((DEPTH / GROUP) * panel_group(INT8) + 2 * (int64_t)sizeof(float) * SCALE_ROWS * LANES);
}

#if HAS_VNNI
/* A single row by LANES outputs, whose weights are not worth packing: integers are summed across lanes, which gives the
 * same sums as lanes along the outputs. */
INLINE void multiply_one(const int format, const bool offsets, const linear *a, int64_t first, int64_t last,
                         float *scales, float *lows) {
    const bool excess = format == INT8 || !offsets;
    const int64_t groups = groups_of(a), each = group_bytes(format), shift = a->group == 64, step = 64 / each;
    const char *rows[LANES];
    floats total = {0};
    for (int o = 0; o < LANES; o++)
        rows[o] = (const char *)a->weight + smaller(first + o, a->outputs - 1) * groups * each;
    for (int64_t start = 0; start < groups; start += DEPTH / GROUP) {
        int64_t end = smaller(start + DEPTH / GROUP, groups);
        pack_scales(a, first, start >> shift, (end - start) >> shift, scales, lows);
        for (int64_t g = start; g < end; g += step) {
            ints dots[4];
            fetch_lines(next_outputs(a, first, g), smaller(step, end - g) * each * LANES);
            dot_row(format, rows, g * each, (groups - g) * each, a->integers + g * GROUP, dots);
#pragma GCC unroll 4
            for (int i = 0; i < step; i++) {
                if (g + i >= end) break;
                int64_t scale = (g + i - start) / (1 << shift) * LANES;
                ints dot = excess ? dots[i] + a->x_sums[g + i] : dots[i];
                total = add_group(offsets, total, dot, scales + scale, lows + scale, a->x_scales[g + i], a->x_sums[g + i]);
            }
        }
    }
    store_part(a->out + first, total, last - first);
}

#define ONE(NAME, FORMAT, OFFSETS) \
    SEPARATE void NAME(const linear *a, int64_t first, int64_t last, float *scales, float *lows) { \
        multiply_one(FORMAT, OFFSETS, a, first, last, scales, lows); \
    }
ONE(one_int8, INT8, false)
ONE(one_int4, INT4, false)
ONE(one_int4_offsets, INT4, true)
#endif

/* INTEGER_OUTPUTS outputs at most. */
void integers_many(const linear *a, int64_t first, int64_t last, char *scratch) {
#if HAS_VNNI
    if (a->rows == 1) {
        for (int64_t o = first; o < last; o += LANES)
            (a->format == INT8 ? one_int8 : a->offsets ? one_int4_offsets : one_int4)(
                a, o, smaller(o + LANES, last), (float *)scratch, (float *)scratch + SCALE_ROWS * LANES);
        return;
    }
#endif
    many_tile *const *tiles = a->format == INT8 ? many_int8 : a->offsets ? many_int4_offsets : many_int4;
    void (*const pack)(const linear *, int64_t, int64_t, int64_t, char *) = a->format == INT8 ? pack_int8 : pack_int4;
    const int64_t groups = groups_of(a), size = panel_group(a->format);
    const int64_t most = a->format == INT8 ? INT8_ROWS : INT4_ROWS, shift = a->group == 64;
    float *scales = (float *)(scratch + PANELS * (DEPTH / GROUP) * size), *lows = scales + PANELS * SCALE_ROWS * LANES;
    int64_t g = 0;
    do {
        int64_t depth = smaller(DEPTH / GROUP, groups - g), count = (a->rows + most - 1) / most;
        for (int p = 0; p < PANELS; p++) {
            pack(a, first + p * LANES, g, depth, scratch + p * depth * size);
            pack_scales(a, first + p * LANES, g >> shift, depth >> shift, scales + p * SCALE_ROWS * LANES,
                        lows + p * SCALE_ROWS * LANES);
        }
        packed m = {scratch, scales, lows, g, depth, shift, first, last};
        for (int64_t i = 0; i < count; i++) {
            int64_t row = a->rows * i / count;
            tiles[a->rows * (i + 1) / count - row](a, &m, row);
        }
        g += DEPTH / GROUP;
    } while (g < groups);
}
