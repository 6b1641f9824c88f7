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
 * sums of x' ("low" below).
 *
 * Versions:
 * - `integers_few`: a register tile of up to FEW_ROWS rows by 4 outputs; lanes along the inputs.
 * - `integers_many`: a register tile of up to INT8_ROWS or INT4_ROWS rows by PANELS vectors of outputs; lanes along
 *   the outputs.
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
    SCALES = 96                                 /* groups of 4 rows of W whose scales are converted together */
};

/* Scale i, at any address: weights may be mapped from a file. */
INLINE uint16_t scale_at(const uint16_t *scales, int64_t i) {
    uint16_t scale;
    memcpy(&scale, (const char *)scales + 2 * i, sizeof scale);
    return scale;
}

/* LANES numbers of float16, or of bytes, of the groups of 32 from g on, of which there are `count`; zeros beyond. A
 * number is that of 2^shift groups. */
INLINE floats halves_of_groups(const uint16_t *from, int64_t g, int64_t count, int64_t shift) {
    if (!shift && count >= LANES) return load_float16(from + g);
    uint16_t part[LANES] = {0};
    for (int64_t i = 0; i < LANES && i < count; i++) part[i] = scale_at(from, (g + i) >> shift);
    return load_float16(part);
}

INLINE floats bytes_of_groups(const uint8_t *from, int64_t g, int64_t count, int64_t shift) {
    if (!shift && count >= LANES) return __builtin_convertvector(load_bytes(from + g), floats);
    uint8_t part[LANES] = {0};
    for (int64_t i = 0; i < LANES && i < count; i++) part[i] = from[(g + i) >> shift];
    return __builtin_convertvector(load_bytes(part), floats);
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

/* --- few rows: lanes along the inputs ----------------------------------------------------------------------------- */

INLINE int64_t group_bytes(int64_t format) {
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
    float scales[4][SCALES], lows[4][SCALES]; /* lows: an eighth of what is subtracted, if there are offsets */
    int64_t output, count; /* the first of the outputs, of which `count` exist, 1 to 4; the last is repeated */
    int64_t g, groups;     /* the first of the groups, and how many */
} strip;

static void load_strip(const linear *a, strip *s) {
    const int64_t groups = groups_of(a), shift = a->group == 64;
    for (int o = 0; o < 4; o++) {
        int64_t output = s->output + smaller(o, s->count - 1);
        const uint16_t *scales = a->scales + output * (groups >> shift);
        __builtin_prefetch(scales + s->g + AHEAD / group_bytes(a->format));
        s->w[o] = (const char *)a->weight + (output * groups + s->g) * group_bytes(a->format);
        for (int64_t i = 0; i < s->groups; i += LANES)
            store(s->scales[o] + i, halves_of_groups(scales, s->g + i, s->groups - i, shift));
        if (!a->offsets) continue;
        const int64_t first = output * (groups >> shift), size = a->zeros ? 1 : 2;
        const char *offsets = (const char *)a->offsets + first * size;
        __builtin_prefetch(offsets + (s->g + AHEAD / group_bytes(a->format)) * size);
        for (int64_t i = 0; i < s->groups; i += LANES) {
            int64_t g = s->g + i, count = s->groups - i;
            floats low = a->zeros ? load(s->scales[o] + i) * bytes_of_groups((const void *)offsets, g, count, shift)
                                  : -halves_of_groups((const void *)offsets, g, count, shift);
            store(s->lows[o] + i, low / 8);
        }
    }
}

/* out[r, o] = x'[r] @ W[o], or += that, for R rows from `row` on and the outputs and groups of a strip. */
INLINE void multiply_strip(const int format, const int R, const linear *a, const strip *s, int64_t row) {
    const int64_t x_stride = groups_of(a) * GROUP, stride = scale_stride(groups_of(a));
    const char *next = s->w[0] + 3 * s->g * group_bytes(format) + AHEAD;
    const float *lows = a->offsets ? s->lows[0] : s->scales[0]; /* x_sums are 8 sums */
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
                floats low = own * load(lows + o * SCALES + g);
                if (format == INT4) excess[r][o] = multiply_add(low, own_sums, excess[r][o]);
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

typedef void few_tile(const linear *a, const strip *s, int64_t row);

#define FEW_TILE(NAME, FORMAT, R) \
    SEPARATE void NAME##_##R(const linear *a, const strip *s, int64_t row) { \
        if (R <= FEW_ROWS) multiply_strip(FORMAT, R, a, s, row); \
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
    int64_t count = (a->rows + FEW_ROWS - 1) / FEW_ROWS, groups = groups_of(a);
    for (int64_t o = first; o < last; o += 4) {
        int64_t g = 0;
        do {
            strip s; /* an initialiser would fill 3 kB with zeros */
            s.output = o, s.count = smaller(4, last - o), s.g = g, s.groups = smaller(SCALES, groups - g);
            load_strip(a, &s);
            for (int64_t i = 0; i < count; i++) {
                int64_t row = a->rows * i / count;
                tiles[a->rows * (i + 1) / count - row](a, &s, row);
            }
            g += SCALES;
        } while (g < groups);
    }
}

/* --- many rows: lanes along the outputs --------------------------------------------------------------------------- */

/* Whether `linear_many` takes x as int16 for weights of int8. */
int64_t wide_integers(void) {
    return STEP8 == 2;
}

/* Bytes of a group of a panel: LANES outputs by 32 inputs. */
INLINE int64_t panel_group(int64_t format) {
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

/* An eighth of what is subtracted in a group with this scale; i counts groups. */
INLINE float low_at(const linear *a, int64_t i, float scale) {
    if (a->zeros) return scale * (float)((const uint8_t *)a->offsets)[i] / 8;
    return float16_to_float(scale_at(a->offsets, i)) / -8;
}

/* Packs LANES outputs from `first` on, `count` groups from g on, their scales [count, LANES] and, with offsets, their
 * lows. In place of outputs that do not exist the last one is repeated. */
INLINE void pack_panel_as(const int format, const bool offsets, const linear *a, int64_t first, int64_t g,
                          int64_t count, char *panel, float *scales, float *lows) {
    const int64_t groups = groups_of(a), shift = a->group == 64, size = panel_group(format);
    const int words_each = format == INT8 && STEP8 == 2 ? 16 : 8; /* of an output's group */
    for (int64_t end = g + count; g < end; g++, panel += size, scales += LANES, lows += LANES) {
        int32_t unpacked[LANES * 16];
        for (int o = 0; o < LANES; o++) {
            int64_t output = smaller(first + o, a->outputs - 1);
            unpack_group(format, (const char *)a->weight + (output * groups + g) * group_bytes(format),
                         unpacked + o * words_each);
            int64_t i = output * (groups >> shift) + (g >> shift);
            scales[o] = float16_to_float(scale_at(a->scales, i));
            if (offsets) lows[o] = low_at(a, i, scales[o]);
        }
        for (int i = 0; i < words_each; i += 8)
            transpose(unpacked + i, words_each, (int32_t *)panel + i * LANES);
    }
}

#define PACK_PANEL(NAME, FORMAT, OFFSETS) \
    SEPARATE void NAME(const linear *a, int64_t first, int64_t g, int64_t count, char *panel, float *scales, \
                       float *lows) { \
        pack_panel_as(FORMAT, OFFSETS, a, first, g, count, panel, scales, lows); \
    }

PACK_PANEL(pack_int8, INT8, false)
PACK_PANEL(pack_int4, INT4, false)
PACK_PANEL(pack_int4_offsets, INT4, true)

/* Outputs first to last of PANELS panels, with `count` groups from g on. */
typedef struct {
    const char *panels;
    const float *scales, *lows;
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

/* out[row + r] = x'[row + r] @ W for the outputs of the panels and R rows; += that beyond the first block of inputs. */
INLINE void multiply_panels(const int format, const bool offsets, const int R, const linear *a, const packed *m,
                            int64_t row) {
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
                if (offsets) {
                    floats low = load(m->lows + (p * m->count + g) * LANES);
                    exact = exact * own - low * x_sums[r * stride + g];
                    total[r][p] = multiply_add(exact, splat(x_scales[r * stride + g]), total[r][p]);
                } else {
                    if (excess) exact -= excess * x_sums[r * stride + g];
                    total[r][p] = multiply_add(exact, own * x_scales[r * stride + g], total[r][p]);
                }
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
    return PANELS * (DEPTH / GROUP) * (panel_group(INT8) + 2 * (int64_t)sizeof(float) * LANES);
}

/* INTEGER_OUTPUTS outputs at most. */
void integers_many(const linear *a, int64_t first, int64_t last, char *scratch) {
    many_tile *const *tiles = a->format == INT8 ? many_int8 : a->offsets ? many_int4_offsets : many_int4;
    void (*const pack)(const linear *, int64_t, int64_t, int64_t, char *, float *, float *) =
        a->format == INT8 ? pack_int8 : a->offsets ? pack_int4_offsets : pack_int4;
    const int64_t groups = groups_of(a), size = panel_group(a->format);
    const int64_t most = a->format == INT8 ? INT8_ROWS : INT4_ROWS;
    float *scales = (float *)(scratch + PANELS * (DEPTH / GROUP) * size);
    float *lows = scales + PANELS * (DEPTH / GROUP) * LANES;
    int64_t g = 0;
    do {
        int64_t depth = smaller(DEPTH / GROUP, groups - g), count = (a->rows + most - 1) / most;
        for (int p = 0; p < PANELS; p++)
            pack(a, first + p * LANES, g, depth, scratch + p * depth * size, scales + p * depth * LANES,
                 lows + p * depth * LANES);
        packed m = {scratch, scales, lows, g, depth, first, last};
        for (int64_t i = 0; i < count; i++) {
            int64_t row = a->rows * i / count;
            tiles[a->rows * (i + 1) / count - row](a, &m, row);
        }
        g += DEPTH / GROUP;
    } while (g < groups);
}
