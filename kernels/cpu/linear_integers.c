/* The matrix product with weights of integers: out = x' @ W.T, W [outputs, inputs] of int8 or int4 with a scale for
 * each group of 32 or 64 inputs; and x' = rounded x, which `round_rows` makes.
 *
 *     x' = rint(x / scale) * scale, scale = max |x| / 127, for each 32 numbers of a row
 *
 * Bytes and floor: as in linear.c. Rounding reads x once and writes a quarter, or half if `wide`.
 *
 * Order of summation: the products of 32 integers are summed exactly; then these, times both scales, in float by
 * ascending place. Weights of 4 bits are stored as integers from 0 on; what is subtracted from scale x integer, 8 x
 * scale, zero point x scale or -offset, is the same in a group, so it is multiplied with the sums of x' ("low" below).
 * What packed integers are higher than they are, 8 or EXCESS8, is subtracted from the sums as integers.
 *
 * Versions, which give the same bits:
 * - `integers_few`, for rows that are not worth packing the weights: up to FEW_ROWS rows by LANES outputs; lanes along
 *   the inputs, integers summed across lanes.
 * - `integers_many`: a register tile of up to INT8_ROWS or INT4_ROWS rows by PANELS vectors of packed outputs; lanes
 *   along the outputs.
 */
#include "dot.h"
#include "linear.h"
#include <math.h>

enum {
    GROUP = 32,                                 /* numbers of x that share a scale */
    FEW_ROWS = 2,                               /* of a tile with the lanes along the inputs */
    PACKED_ROWS = EXCESS8 ? 2 : 6,              /* rows from which on the weights are packed: VNNI multiplies fast */
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
                store_split((int16_t *)a->integers + (row * groups + g) * GROUP, rounded);
            } else {
                store_as_bytes(a->integers + (row * groups + g) * GROUP, rounded);
            }
            x_sums[g] = -excess * (int32_t)sum(__builtin_convertvector(total, floats));
        }
    }
}

/* --- packed weights ----------------------------------------------------------------------------------------------- */

INLINE int64_t group_bytes(int64_t format) {
    return format == INT8 ? GROUP : GROUP / 2;
}

/* Bytes of a group of INTEGER_OUTPUTS packed outputs. */
INLINE int64_t packed_group(int64_t format) {
    return GROUP * INTEGER_OUTPUTS * (format == INT8 && STEP8 == 2 ? 2 : 1);
}

/* What is multiplied after INTEGER_OUTPUTS outputs from `first` on, in the order in which it lies: as much of it as
 * LANES rows have up to their group g. It is fetched while as much of this is multiplied, since LANES rows side by side
 * are more streams than the hardware fetches early by itself. */
INLINE const char *next_outputs(const linear *a, int64_t first, int64_t g) {
    const int64_t each = group_bytes(a->format);
    return (const char *)a->weight + ((first + INTEGER_OUTPUTS) * groups_of(a) + g * LANES) * each;
}

/* Packs LANES outputs from `first` on, `count` groups from g on: one vector of every PANELS. In place of outputs that
 * do not exist the last one is repeated. */
INLINE void pack_panel_as(const int format, const linear *a, int64_t first, int64_t g, int64_t count, char *panel) {
    const int64_t each = group_bytes(format);
    const char *rows[LANES];
    for (int o = 0; o < LANES; o++)
        rows[o] = (const char *)a->weight + (smaller(first + o, a->outputs - 1) * groups_of(a) + g) * each;
    const char *next = next_outputs(a, first, g);
    for (int64_t at = 0; at < count * each; at += each, panel += packed_group(format)) {
        fetch_lines(next + at * LANES, each * LANES);
        ints numbers[8];
        if (format == INT4) {
            gather_16_bytes(rows, at, numbers);
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) {
                numbers[j + 4] = numbers[j] >> 4 & 0x0F0F0F0F;
                numbers[j] &= 0x0F0F0F0F;
            }
        } else {
            gather_16_bytes(rows, at, numbers);
            gather_16_bytes(rows, at + 16, numbers + 4);
#pragma GCC unroll 8
            for (int j = 0; j < 8; j++) numbers[j] ^= EXCESS8 ? (int32_t)0x80808080 : 0; /* + 128 in each byte */
        }
        const int64_t next_vector = PANELS * sizeof(ints);
        if (format == INT8 && STEP8 == 2) {
            ints pairs[16];
            split_bytes(numbers, pairs);
#pragma GCC unroll 16
            for (int j = 0; j < 16; j++) memcpy(panel + j * next_vector, &pairs[j], sizeof(ints));
        } else {
#pragma GCC unroll 8
            for (int j = 0; j < 8; j++) memcpy(panel + j * next_vector, &numbers[j], sizeof(ints));
        }
    }
}

SEPARATE void pack_int8(const linear *a, int64_t first, int64_t g, int64_t count, char *panel) {
    pack_panel_as(INT8, a, first, g, count, panel);
}

SEPARATE void pack_int4(const linear *a, int64_t first, int64_t g, int64_t count, char *panel) {
    pack_panel_as(INT4, a, first, g, count, panel);
}

/* Eight numbers of float16, or of bytes, from number i of each of LANES rows on. -> [8, LANES] */
INLINE void load_eight(const bool bytes, const char *const *rows, int64_t i, floats *found) {
    if (bytes) {
        int32_t numbers[LANES][8], across[8 * LANES];
        const char *eight[LANES];
        for (int o = 0; o < LANES; o++) {
            for (int j = 0; j < 8; j++) numbers[o][j] = (uint8_t)rows[o][i + j];
            eight[o] = (const char *)numbers[o];
        }
        transpose(eight, 0, across);
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++) found[j] = __builtin_convertvector(load_ints(across + j * LANES), floats);
    } else {
        ints pairs[4];
        gather_16_bytes(rows, 2 * i, pairs);
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) split_float16(pairs[j], &found[2 * j], &found[2 * j + 1]);
    }
}

/* As `pack_numbers` for `count` < 8 of them, the last of rows, of which some are loaded twice. */
SEPARATE void pack_last_numbers(bool bytes, const char *const *rows, int64_t each, int64_t i, int64_t count,
                                float *to) {
    const int64_t from = larger(0, smaller(i, each - 8)), size = bytes ? 1 : 2;
    const char *own[LANES];
    char copied[LANES][16];
    floats found[8];
    for (int o = 0; o < LANES; o++)
        own[o] = each < 8 ? memcpy(memset(copied[o], 0, 16), rows[o], size * each) : rows[o]; /* a short row */
    load_eight(bytes, own, from, found);
    for (int64_t j = 0; j < count; j++) store(to + j * LANES, found[i - from + j]);
}

/* Numbers of float16, or of bytes, of LANES outputs from `first` on, `count` from number i of a row on, which has
 * `each` of them. -> [count, LANES] */
INLINE void pack_numbers(const bool bytes, const void *from, const linear *a, int64_t each, int64_t first, int64_t i,
                         int64_t count, float *to) {
    const char *rows[LANES];
    for (int o = 0; o < LANES; o++)
        rows[o] = (const char *)from + (bytes ? 1 : 2) * each * smaller(first + o, a->outputs - 1);
    for (int64_t end = i + count; i < end; i += 8, to += 8 * LANES) {
        if (i + 8 > end) {
            pack_last_numbers(bytes, rows, each, i, end - i, to);
            break;
        }
        floats found[8];
        load_eight(bytes, rows, i, found);
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++) store(to + j * LANES, found[j]);
    }
}

/* Scales of LANES outputs from `first` on, `count` groups from g on, [count, LANES], and with offsets an eighth of what
 * is subtracted. Both count groups as they are stored, of 32 or 64. */
static void pack_scales(const linear *a, int64_t first, int64_t g, int64_t count, float *scales, float *lows) {
    const int64_t each = groups_of(a) / (a->group / GROUP);
    pack_numbers(false, a->scales, a, each, first, g, count, scales);
    if (a->wide)
        for (int64_t i = 0; i < count; i++) store(scales + i * LANES, load(scales + i * LANES) / TIMES8);
    if (!a->offsets) return;
    if (a->zeros) {
        pack_numbers(true, a->offsets, a, each, first, g, count, lows);
    } else {
        pack_numbers(false, a->offsets, a, each, first, g, count, lows);
    }
    for (int64_t i = 0; i < count; i++) {
        floats low = -load(lows + i * LANES);
        if (a->zeros) low = load(lows + i * LANES) * load(scales + i * LANES);
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

/* --- few rows: lanes along the inputs ----------------------------------------------------------------------------- */

/* Groups start to end, with their scales, of outputs first to last, LANES at most, for R rows from `row` on. */
INLINE void multiply_stored(const int format, const bool offsets, const int R, const linear *a, int64_t first,
                            int64_t last, int64_t row, int64_t start, int64_t end, const float *scales,
                            const float *lows) {
    const bool excess = format == INT8 ? EXCESS8 > 0 : !offsets;
    const int64_t groups = groups_of(a), stride = scale_stride(groups), each = group_bytes(format);
    const int64_t shift = a->group == 64, step = format == INT8 ? AT_ONCE8 : AT_ONCE4;
    const int8_t *x = a->integers + row * groups * GROUP;
    const float *x_scales = a->x_scales + row * stride;
    const int32_t *x_sums = a->x_sums + row * stride;
    float *out = a->out + row * a->outputs + first;
    const char *rows[LANES];
    floats total[FEW_ROWS];
    for (int o = 0; o < LANES; o++)
        rows[o] = (const char *)a->weight + smaller(first + o, a->outputs - 1) * groups * each;
#pragma GCC unroll 2
    for (int r = 0; r < R; r++) total[r] = start ? load_part(out + r * a->outputs, last - first) : (floats){0};
    for (int64_t g = start; g < end; g += step) {
        const int8_t *own = x + g * GROUP;
        ints dots[FEW_ROWS][4];
        if (!row) fetch_lines(next_outputs(a, first, g), step * each * LANES);
        if (g + step <= groups) {
            dot_rows(format, R, rows, g * each, step * each, own, groups * GROUP, dots);
        } else {
            dot_rows(format, R, rows, g * each, (groups - g) * each, own, groups * GROUP, dots);
        }
#pragma GCC unroll 4
        for (int i = 0; i < step; i++) {
            if (g + i >= end) break;
            int64_t scale = ((g + i - start) >> shift) * LANES;
#pragma GCC unroll 2
            for (int r = 0; r < R; r++) {
                int32_t x_sum = x_sums[r * stride + g + i];
                total[r] = add_group(offsets, total[r], excess ? dots[r][i] + x_sum : dots[r][i], scales + scale,
                                     lows + scale, x_scales[r * stride + g + i], x_sum);
            }
        }
    }
#pragma GCC unroll 2
    for (int r = 0; r < R; r++) store_part(out + r * a->outputs, total[r], last - first);
}

typedef void few_tile(const linear *a, int64_t first, int64_t last, int64_t row, int64_t start, int64_t end,
                      const float *scales, const float *lows);

#define FEW_TILE(NAME, FORMAT, OFFSETS, R) \
    SEPARATE void NAME##_##R(const linear *a, int64_t first, int64_t last, int64_t row, int64_t start, int64_t end, \
                             const float *scales, const float *lows) { \
        multiply_stored(FORMAT, OFFSETS, R, a, first, last, row, start, end, scales, lows); \
    }
#define FEW_TILES(NAME, FORMAT, OFFSETS) /* by their rows */ \
    FEW_TILE(NAME, FORMAT, OFFSETS, 1) \
    FEW_TILE(NAME, FORMAT, OFFSETS, 2) \
    static few_tile *const NAME[] = {NULL, NAME##_1, NAME##_2};

FEW_TILES(few_int8, INT8, false)
FEW_TILES(few_int4, INT4, false)
FEW_TILES(few_int4_offsets, INT4, true)

static void integers_few(const linear *a, int64_t first, int64_t last, char *scratch) {
    few_tile *const *tiles = a->format == INT8 ? few_int8 : a->offsets ? few_int4_offsets : few_int4;
    const int64_t groups = groups_of(a), shift = a->group == 64, each = groups >> shift;
    float *scales = (float *)scratch, *lows = scales + SCALE_ROWS * LANES;
    for (int64_t o = first; o < last; o += LANES) {
        int64_t start = 0;
        do {
            int64_t end = smaller(start + DEPTH / GROUP, groups), g = start >> shift, count = (end - start) >> shift;
            fetch_lines((const char *)(a->scales + (o + INTEGER_OUTPUTS) * each + g * LANES), 2 * count * LANES);
            pack_scales(a, o, g, count, scales, lows);
            for (int64_t row = 0; row < a->rows; row += FEW_ROWS)
                tiles[smaller(FEW_ROWS, a->rows - row)](a, o, smaller(o + LANES, last), row, start, end, scales, lows);
            start = end;
        } while (start < groups);
    }
    finish(a, 0, a->rows, first, last);
}

/* --- many rows: lanes along the outputs --------------------------------------------------------------------------- */

/* Outputs first to last of PANELS panels, with `count` groups from g on. */
typedef struct {
    const char *numbers; /* [count, 8 or 16, PANELS, LANES] lanes */
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
    const int64_t size = packed_group(format), x_group = two_bytes ? 2 * GROUP : GROUP;
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
        const char *w = m->numbers + g * size, *numbers = x + g * x_group;
#pragma GCC unroll 6
        for (int r = 0; r < R; r++) __builtin_prefetch(numbers + (r + R) * groups * x_group); /* of the next tile */
#pragma GCC unroll 4
        for (int j = 0; j < x_group / 4; j++) {
            ints weights[PANELS];
#pragma GCC unroll 2
            for (int p = 0; p < PANELS; p++) weights[p] = load_ints(w + (j * PANELS + p) * sizeof(ints));
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

/* Bytes of INTEGER_OUTPUTS packed outputs, with their scales and offsets. */
static int64_t packed_bytes(void) {
    return SCALE_ROWS * packed_group(INT8) + 2 * (int64_t)sizeof(float) * SCALE_ROWS * INTEGER_OUTPUTS;
}

int64_t integers_scratch(void) {
    return SETS * packed_bytes();
}

/* SETS * INTEGER_OUTPUTS outputs at most: sets of them meet a tile's rows, one after the other. */
static void integers_many(const linear *a, int64_t first, int64_t last, char *scratch) {
    many_tile *const *tiles = a->format == INT8 ? many_int8 : a->offsets ? many_int4_offsets : many_int4;
    void (*const pack)(const linear *, int64_t, int64_t, int64_t, char *) = a->format == INT8 ? pack_int8 : pack_int4;
    const int64_t groups = groups_of(a), size = packed_group(a->format);
    const int64_t most = a->format == INT8 ? INT8_ROWS : INT4_ROWS, shift = a->group == 64;
    const int64_t count = (a->rows + most - 1) / most;
    int64_t g = 0;
    do {
        int64_t depth = smaller(SCALE_ROWS, groups - g), sets = 0;
        packed m[SETS];
        for (int64_t o = first; o < last; o += INTEGER_OUTPUTS, sets++) {
            char *numbers = scratch + sets * packed_bytes();
            float *scales = (float *)(numbers + SCALE_ROWS * size), *lows = scales + SCALE_ROWS * INTEGER_OUTPUTS;
            m[sets] = (packed){numbers, scales, lows, g, depth, shift, o, smaller(o + INTEGER_OUTPUTS, last)};
            for (int p = 0; p < PANELS; p++) {
                pack(a, o + p * LANES, g, depth, numbers + p * sizeof(ints));
                pack_scales(a, o + p * LANES, g >> shift, depth >> shift, scales + p * SCALE_ROWS * LANES,
                            lows + p * SCALE_ROWS * LANES);
            }
        }
        for (int64_t i = 0; i < count; i++) {
            int64_t row = a->rows * i / count;
            many_tile *tile = tiles[a->rows * (i + 1) / count - row];
            for (int64_t set = 0; set < sets; set++) tile(a, &m[set], row);
            if (g + SCALE_ROWS >= groups) finish(a, row, a->rows * (i + 1) / count, first, last);
        }
        g += SCALE_ROWS;
    } while (g < groups);
}

/* Rows from which on x is taken as int16 for weights of int8; 0: never. */
int64_t wide_rows(void) {
    return STEP8 == 2 ? PACKED_ROWS : 0;
}

void integers_any(const linear *a, int64_t first, int64_t last, char *scratch) {
    const bool packed = a->format == INT8 && STEP8 == 2 ? a->wide : a->rows >= PACKED_ROWS;
    const int64_t size = INTEGER_OUTPUTS * (a->rows < SET_ROWS ? 1 : SETS);
    if (!packed) return integers_few(a, first, last, scratch);
    for (int64_t o = first; o < last; o += size) integers_many(a, o, smaller(o + size, last), scratch);
}
