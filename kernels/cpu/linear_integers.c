/* The matrix product with weights of integers: out = x' @ W.T, W [outputs, inputs] of int8 or int4 with a scale for
 * each group of 32 or 64 inputs; and x' = rounded x, which `round_to_integers` makes.
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
 *   along the outputs, or pairs of rows by pairs of outputs (HAS_I8MM).
 */
#include "quads.h"
#include <math.h>

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

static const integer_format *format_of(const linear *a);

void round_to_integers(const linear *a, int64_t first, int64_t last) {
    const integer_format *form = format_of(a);
    const int64_t groups = groups_of(a), stride = scale_stride(groups), parts = form->parts;
    const int32_t excess = a->format > INT4 ? block_excess(a->format) : a->format == INT8 ? EXCESS8 : 8;
    for (int64_t row = first; row < last; row++) {
        float *scales = a->x_scales + row * stride;
        int32_t *x_sums = a->x_sums + row * stride * parts;
        memset(x_sums, 0, sizeof(int32_t) * stride * parts);
        for (int64_t g = 0; g < stride; g++) {
            const float *x = a->x + row * a->inputs + g * GROUP;
            int64_t count = g < groups ? smaller(GROUP, a->inputs - g * GROUP) : 0;
            scales[g] = 0;
            if (g >= groups) continue;
            float part[GROUP];
            if (count < GROUP) {
                memset(part, 0, sizeof part);
                if (count > 0) memcpy(part, x, sizeof(float) * count);
                x = part;
            }
            ints rounded[GROUP / LANES], total[2] = {{0}};
            scales[g] = round_group(x, rounded);
            for (int i = 0; i < GROUP / LANES; i++) total[i / (GROUP / LANES / 2)] += rounded[i];
            if (a->wide) {
                store_split((int16_t *)a->x_rounded + (row * groups + g) * GROUP, rounded);
            } else {
                store_as_bytes(a->x_rounded + (row * groups + g) * GROUP, rounded);
            }
            if (parts == 1) total[0] += total[1];
            for (int64_t part = 0; part < parts; part++)
                x_sums[g * parts + part] = -excess * (int32_t)sum(__builtin_convertvector(total[part], floats));
        }
    }
}

/* --- packed weights ----------------------------------------------------------------------------------------------- */

INLINE int64_t group_bytes(int64_t format) {
    return format == INT8 ? GROUP : GROUP / 2;
}

INLINE void pack_panel_as(const int format, const linear *a, lanes of, int64_t g, int64_t count, char *panel) {
    const int64_t each = group_bytes(format);
    const char *rows[LANES];
    for (int o = 0; o < LANES; o++)
        rows[o] = (const char *)a->weight + (output_of(a, of, o) * groups_of(a) + g) * each;
    for (int64_t at = 0; at < count * each; at += each, panel += packed_group(format)) {
        ints numbers[8];
        if (format == INT4) {
            gather_packed(rows, at, numbers);
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) {
                numbers[j + 4] = numbers[j] >> 4 & 0x0F0F0F0F;
                numbers[j] &= 0x0F0F0F0F;
            }
        } else {
            gather_packed(rows, at, numbers);
            gather_packed(rows, at + 16, numbers + 4);
#pragma GCC unroll 8
            for (int j = 0; j < 8; j++) numbers[j] ^= EXCESS8 ? (int32_t)0x80808080 : 0; /* + 128 in each byte */
        }
        const int64_t next_vector = PANELS * sizeof(ints);
        if (format == INT8 && STEP8 == 2) {
#pragma GCC unroll 8
            for (int j = 0; j < 8; j++) {
                ints pairs[2];
                split_four(numbers[j], pairs);
                memcpy(panel + 2 * j * next_vector, &pairs[0], sizeof(ints));
                memcpy(panel + (2 * j + 1) * next_vector, &pairs[1], sizeof(ints));
            }
        } else {
#pragma GCC unroll 8
            for (int j = 0; j < 8; j++) memcpy(panel + j * next_vector, &numbers[j], sizeof(ints));
        }
    }
}

SEPARATE void pack_int8(const linear *a, lanes of, int64_t g, int64_t count, char *panel) {
    pack_panel_as(INT8, a, of, g, count, panel);
}

SEPARATE void pack_int4(const linear *a, lanes of, int64_t g, int64_t count, char *panel) {
    pack_panel_as(INT4, a, of, g, count, panel);
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

/* Numbers of float16, or of bytes, of LANES outputs, `count` from number i of a row on, which has `each` of them.
 * -> [count, LANES] */
INLINE void pack_numbers(const bool bytes, const void *from, const linear *a, int64_t each, lanes of, int64_t i,
                         int64_t count, float *to) {
    const char *rows[LANES];
    for (int o = 0; o < LANES; o++)
        rows[o] = (const char *)from + (bytes ? 1 : 2) * each * output_of(a, of, o);
    for (int64_t end = i + count; i < end; i += 8, to += 8 * LANES) {
        if (i + 8 > end) {
            if (count < 8) {
                pack_last_numbers(bytes, rows, each, i, end - i, to);
                break;
            }
            to -= (i + 8 - end) * LANES, i = end - 8; /* some of them once more */
        }
        floats found[8];
        load_eight(bytes, rows, i, found);
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++) store(to + j * LANES, found[j]);
    }
}

static void pack_scales(const linear *a, lanes of, int64_t g, int64_t count, float *scales, float *lows) {
    const int64_t shift = a->group == 64, each = groups_of(a) >> shift;
    g >>= shift, count >>= shift;
    if (of.gap == 1) {
        fetch_lines((const char *)(a->scales + (of.first + INTEGER_OUTPUTS) * each + g * LANES), 2 * count * LANES);
    } else {
        for (int o = 0; o < LANES; o++) {
            const int64_t next = output_of(a, of, o) * each + g + SCALES_AHEAD;
            fetch_lines((const char *)(a->scales + next), 1);
            if (a->offsets) fetch_lines((const char *)a->offsets + (a->zeros ? 1 : 2) * next, 1);
        }
    }
    pack_numbers(false, a->scales, a, each, of, g, count, scales);
    if (a->wide)
        for (int64_t i = 0; i < count; i++) store(scales + i * LANES, load(scales + i * LANES) / TIMES8);
    if (!a->offsets) return;
    if (a->zeros) {
        pack_numbers(true, a->offsets, a, each, of, g, count, lows);
    } else {
        pack_numbers(false, a->offsets, a, each, of, g, count, lows);
    }
    for (int64_t i = 0; i < count; i++) {
        floats low = -load(lows + i * LANES);
        if (a->zeros) low = load(lows + i * LANES) * load(scales + i * LANES);
        store(lows + i * LANES, low / 8);
    }
}

/* --- few rows: lanes along the inputs ----------------------------------------------------------------------------- */

/* Groups start to end, with their scales, for R rows from `row` on. */
INLINE void multiply_stored(const int format, const bool offsets, const int R, const linear *a, lanes of, int64_t row,
                            int64_t start, int64_t end, const float *scales, const float *lows) {
    const bool excess = format == INT8 ? EXCESS8 > 0 : !offsets;
    const int64_t groups = groups_of(a), stride = scale_stride(groups), each = group_bytes(format);
    const int64_t shift = a->group == 64, step = format == INT8 ? AT_ONCE8 : AT_ONCE4;
    const int8_t *x = a->x_rounded + row * groups * GROUP;
    const float *x_scales = a->x_scales + row * stride;
    const int32_t *x_sums = a->x_sums + row * stride;
    float *out = a->out + row * a->stride;
    const char *rows[LANES];
    floats total[FEW_ROWS];
    for (int o = 0; o < LANES; o++) rows[o] = (const char *)a->weight + output_of(a, of, o) * groups * each;
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) total[r] = start ? load_lanes(out + r * a->stride, of) : (floats){0};
    UNROLL(2)
    for (int64_t g = start; g < end; g += step) {
        const int8_t *own = x + g * GROUP;
        ints dots[FEW_ROWS][4];
        if (!row) fetch_ahead(rows, of, groups * each, g * each, step * each, format != INT8);
        if (g + step <= groups) {
            dot_rows(format, R, rows, g * each, step * each, own, groups * GROUP, dots);
        } else {
            dot_rows(format, R, rows, g * each, (groups - g) * each, own, groups * GROUP, dots);
        }
#pragma GCC unroll 4
        for (int i = 0; i < step; i++) {
            if (g + i >= end) break;
            int64_t scale = ((g + i - start) >> shift) * LANES;
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) {
                int32_t x_sum = x_sums[r * stride + g + i];
                total[r] = add_group(offsets, total[r], excess ? dots[r][i] + x_sum : dots[r][i], scales + scale,
                                     lows + scale, x_scales[r * stride + g + i], x_sum);
            }
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) store_lanes(out + r * a->stride, of, total[r]);
}

#define FEW_TILE(NAME, FORMAT, OFFSETS, R) \
    SEPARATE void NAME##_##R(const linear *a, lanes of, int64_t row, int64_t start, int64_t end, const float *scales, \
                             const float *lows) { \
        if (R <= FEW_ROWS) multiply_stored(FORMAT, OFFSETS, R, a, of, row, start, end, scales, lows); \
    }
#define FEW_TILES(NAME, FORMAT, OFFSETS) /* by their rows */ \
    FEW_TILE(NAME, FORMAT, OFFSETS, 1) \
    FEW_TILE(NAME, FORMAT, OFFSETS, 2) \
    FEW_TILE(NAME, FORMAT, OFFSETS, 3) \
    FEW_TILE(NAME, FORMAT, OFFSETS, 4) \
    static few_tile *const NAME[] = {NULL, NAME##_1, NAME##_2, NAME##_3, NAME##_4};

FEW_TILES(few_int8, INT8, false)
FEW_TILES(few_int4, INT4, false)
FEW_TILES(few_int4_offsets, INT4, true)

/* --- many rows: lanes along the outputs --------------------------------------------------------------------------- */

/* out[row + r] = x'[row + r] @ W for the outputs of the panels and R rows; += that beyond the first block of inputs. */
INLINE void multiply_panels(const int format, const bool offsets, const int R, const linear *a, const packed *m,
                            int64_t row) {
    const bool two_bytes = format == INT8 && STEP8 == 2;
    const int64_t size = packed_group(format), x_group = two_bytes ? 2 * GROUP : GROUP;
    const int64_t groups = groups_of(a), stride = scale_stride(groups);
    const bool excess = format == INT4 ? !offsets : EXCESS8 > 0, at_once = excess && !(format == INT4 && SHORT4);
    const char *x = (const char *)a->x_rounded + (row * groups + m->g) * x_group;
    const float *x_scales = a->x_scales + row * stride + m->g;
    const int32_t *x_sums = a->x_sums + row * stride + m->g;
    float *out = a->out + row * a->stride + m->first;
    floats total[6][PANELS];
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
        for (int p = 0; p < PANELS; p++) {
            int64_t count = m->last - m->first - p * LANES;
            total[r][p] = (floats){0};
            if (m->g && count > 0) total[r][p] = load_part(out + r * a->stride + p * LANES, count);
        }
    for (int64_t g = 0; g < m->count; g++) {
        ints dots[6][PANELS];
#pragma GCC unroll 6
        for (int r = 0; r < R; r++)
#pragma GCC unroll 2
            for (int p = 0; p < PANELS; p++)
                dots[r][p] = at_once ? splat_4_bytes(x_sums + r * stride + g) : (ints){0};
        const char *w = m->numbers + g * size, *numbers = x + g * x_group;
        fetch_lines(m->next + g * fetched_bytes(format), fetched_bytes(format));
#pragma GCC unroll 6
        for (int r = 0; r < R; r++) __builtin_prefetch(numbers + (r + R) * groups * x_group); /* of the next tile */
#if HAS_I8MM || HAS_DOT_LANES
        add_packed(R, GROUP, w, numbers, groups * x_group, dots);
#else
#pragma GCC unroll 16
        for (int j = 0; j < x_group / 4; j++) {
            ints weights[PANELS];
#pragma GCC unroll 2
            for (int p = 0; p < PANELS; p++) {
                weights[p] = load_ints(w + (j * PANELS + p) * sizeof(ints));
                keep_ints(&weights[p]);
            }
#pragma GCC unroll 6
            for (int r = 0; r < R; r++) {
                ints same = splat_4_bytes(numbers + r * groups * x_group + j * 4);
#pragma GCC unroll 2
                for (int p = 0; p < PANELS; p++) {
                    dots[r][p] = format == INT8 ? add_products8(dots[r][p], weights[p], same)
                                                : add_products4(dots[r][p], weights[p], same);
                    keep_ints(&dots[r][p]);
                }
            }
        }
#endif
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
            if (count > 0) store_part(out + r * a->stride + p * LANES, total[r][p], count);
        }
}

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
    many_tile *const NAME[] = {NULL, NAME##_1, NAME##_2, NAME##_3, NAME##_4, NAME##_5, NAME##_6};

MANY_TILES(many_int8, INT8, false)
MANY_TILES(many_int4, INT4, false)
MANY_TILES(many_int4_offsets, INT4, true)

/* --- formats ------------------------------------------------------------------------------------------------------ */

static const integer_format int8_format = {few_int8, many_int8, pack_int8, pack_scales, INT8_ROWS, INT8, 1, PACKED_ROWS};
static const integer_format int4_format = {few_int4, many_int4, pack_int4, pack_scales, INT4_ROWS, INT4, 1, PACKED_ROWS};
static const integer_format int4_offsets_format = {
    few_int4_offsets, many_int4_offsets, pack_int4, pack_scales, INT4_ROWS, INT4, 1, PACKED_ROWS,
};

static const integer_format *format_of(const linear *a) {
    if (a->format > INT4) return block_format(a->format);
    return a->format == INT8 ? &int8_format : a->offsets ? &int4_offsets_format : &int4_format;
}

/* From row to row of x_sums, for a format. */
int64_t sum_parts(int64_t format) {
    return format > INT4 ? block_format(format)->parts : 1;
}

/* Rows from which on x is taken as int16 for a format; 0: never. */
int64_t wide_rows(int64_t format) {
    bool bytes = format > INT4 ? block_format(format)->format == INT8 : format == INT8;
    return bytes && STEP8 == 2 ? PACKED_ROWS : 0;
}

/* --- the product -------------------------------------------------------------------------------------------------- */

static int64_t bytes_of_row(const linear *a) {
    return a->format > INT4 ? block_row_bytes(a) : groups_of(a) * group_bytes(a->format);
}

/* For one pass over W's rows they are LANES streams, as in `floats_few`; for several, neighbours, which are faster
 * (measured on a Zen 3). Streams whose distance is a multiple of 4 KB would all meet in one set of the L1 cache: the
 * distance is then made an odd number of rows (1.2 to 1.8 times as fast, measured on a Zen 4, also held to AVX2). */
static void integers_few(const linear *a, const integer_format *form, int64_t first, int64_t last, char *scratch) {
    const bool streams = a->rows <= FEW_ROWS;
    const int64_t groups = groups_of(a), size = bytes_of_row(a), at_once = has_quads(a->format) ? groups : SCALE_ROWS;
    int64_t gap = streams ? larger(1, (last - first + LANES - 1) / LANES) : 1;
    if (gap >= 8 && gap % 2 == 0 && gap * size % 4096 == 0) gap++;
    float *scales = (float *)scratch, *lows = scales + form->parts * SCALE_ROWS * LANES;
    for (int64_t o = first; o < (streams ? smaller(first + gap, last) : last); o += streams ? 1 : LANES) {
        const lanes of = {o, gap, smaller(LANES, (last - o + gap - 1) / gap)};
        int64_t start = 0;
        do {
            int64_t end = smaller(start + at_once, groups);
            if (!has_quads(a->format)) form->pack_scales(a, of, start, end - start, scales, lows);
            for (int64_t row = 0; row < a->rows; row += FEW_ROWS)
                form->few[smaller(FEW_ROWS, a->rows - row)](a, of, row, start, end, scales, lows);
            start = end;
        } while (start < groups);
    }
    finish(a, 0, a->rows, first, last);
}

/* Bytes of INTEGER_OUTPUTS packed outputs, with their scales and offsets. */
static int64_t packed_bytes(void) {
    return SCALE_ROWS * packed_group(INT8) + 4 * (int64_t)sizeof(float) * SCALE_ROWS * INTEGER_OUTPUTS;
}

int64_t integers_scratch(void) {
    return SETS * packed_bytes();
}

/* SETS * INTEGER_OUTPUTS outputs at most: sets of them meet a tile's rows, one after the other. */
static void integers_many(const linear *a, const integer_format *form, int64_t first, int64_t last, char *scratch) {
    const int64_t groups = groups_of(a), size = packed_group(form->format), panel = form->parts * SCALE_ROWS * LANES;
    const int64_t count = (a->rows + form->most_rows - 1) / form->most_rows; /* of tiles */
    const int64_t row_bytes = bytes_of_row(a);
    int64_t g = 0;
    do {
        int64_t depth = smaller(SCALE_ROWS, groups - g), sets = 0;
        packed m[SETS];
        for (int64_t o = first; o < last; o += INTEGER_OUTPUTS, sets++) {
            char *numbers = scratch + sets * packed_bytes();
            float *scales = (float *)(numbers + SCALE_ROWS * size), *lows = scales + PANELS * panel;
            m[sets] = (packed){
                numbers, scales, lows, g, depth, a->group == 64, o, smaller(o + INTEGER_OUTPUTS, last), NULL,
            };
            for (int p = 0; p < PANELS; p++) {
                const lanes of = {o + p * LANES, 1, LANES};
                form->pack(a, of, g, depth, numbers + p * sizeof(ints));
                form->pack_scales(a, of, g, depth, scales + p * panel, lows + p * panel);
            }
        }
        /* Of the outputs that follow as much is fetched, in the order in which it lies, as is multiplied of these. A core
         * waits for few lines at once: they are spread over the groups, what these leave before them. */
        const int64_t bytes = last < a->outputs ? row_bytes * depth / larger(1, groups) * (last - first) : 0;
        const char *next = (const char *)a->weight + last * row_bytes + row_bytes * g / larger(1, groups) * (last - first);
        int64_t fetched = larger(0, bytes - count * sets * depth * fetched_bytes(form->format));
        fetch_lines(next, fetched);
        for (int64_t i = 0; i < count; i++) {
            int64_t row = a->rows * i / count;
            many_tile *tile = form->many[a->rows * (i + 1) / count - row];
            for (int64_t set = 0; set < sets; set++) {
                m[set].next = next + smaller(fetched, bytes);
                tile(a, &m[set], row);
                fetched += depth * fetched_bytes(form->format);
            }
            if (g + SCALE_ROWS >= groups) finish(a, row, a->rows * (i + 1) / count, first, last);
        }
        g += SCALE_ROWS;
    } while (g < groups);
}

void integers_any(const linear *a, int64_t first, int64_t last, char *scratch) {
    const integer_format *form = format_of(a);
    const bool packs = wide_rows(a->format) ? a->wide : a->rows >= form->packed_rows;
    const int64_t size = INTEGER_OUTPUTS * (a->rows < SET_ROWS ? 1 : SETS);
    if (!packs) return integers_few(a, form, first, last, scratch);
    for (int64_t o = first; o < last; o += size) integers_many(a, form, o, smaller(o + size, last), scratch);
}
