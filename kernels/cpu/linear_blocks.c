/* The matrix product with blocks, read where they lie, as a file has them: out = x' @ W.T, W [outputs, blocks], x' as in
 * linear_integers.c. Formats: minillm/reference/blocks.py.
 *
 *     weight = scale x (integer - excess) - drop, for each 32 or 16 numbers; none has both
 *
 * Bytes and floor: as in linear.c.
 *
 * Order of summation: as in linear_integers.c. The products of 32 integers, or of 16 where these share a scale, are summed
 * exactly, less excess x the sum of x'; then these, times both scales, in float by ascending place. The scale of a group,
 * d x a small integer, is exact in float. A drop is the same in a group and is multiplied with the sum of x' ("low").
 * So results have the same bits in any batch and with any number of workers, by either version:
 * - few rows: blocks are unpacked to registers, lanes along the inputs, and meet up to FEW_ROWS rows. With VNNI blocks of
 *   256 are transposed by four outputs first (quads.h).
 * - many rows: they are unpacked to panels of bytes, lanes along the outputs.
 * Both unpack with the functions of blocks.h.
 */
#include "quads.h"

enum {
    BYTE_ROWS = VECTOR_REGISTERS == 32 ? 6 : 3, /* of a tile of bytes with the lanes along the outputs */
    PACKED_BLOCK_ROWS = EXCESS8 ? 5 : 3         /* as PACKED_ROWS: each pass unpacks, which takes longer */
};

/* --- scales ------------------------------------------------------------------------------------------------------- */

INLINE int64_t row_bytes(const int format, const linear *a) {
    return a->inputs / block_numbers(format) * block_bytes(format);
}

/* The block with group g of LANES outputs. */
INLINE void find_blocks(const int format, const linear *a, lanes of, int64_t g, const char **rows) {
    const int64_t size = row_bytes(format, a), at = g * GROUP / block_numbers(format) * block_bytes(format);
    for (int o = 0; o < LANES; o++) rows[o] = (const char *)a->weight + output_of(a, of, o) * size + at;
}

INLINE void pack_block_scales(const int format, const linear *a, lanes of, int64_t g, int64_t count, float *scales,
                              float *lows) {
    const int64_t numbers = block_numbers(format), of_block = numbers / GROUP * scale_parts(format);
    const char *rows[LANES];
    find_blocks(format, a, of, g, rows);
    for (int64_t i = 0; i < count; i += numbers / GROUP) {
        floats own[16], less[16];
        block_scales(format, rows, i / (numbers / GROUP) * block_bytes(format), own, less);
#pragma GCC unroll 16
        for (int64_t j = 0; j < of_block; j++) {
            store(scales + j * LANES, own[j]);
            if (has_offsets(format)) store(lows + j * LANES, less[j]);
        }
        if (has_signs(format) && a->wide)
            for (int64_t j = 0; j < of_block; j++) store(scales + j * LANES, own[j] / TIMES8);
        scales += of_block * LANES, lows += of_block * LANES;
    }
}

/* --- few rows ----------------------------------------------------------------------------------------------------- */

/* The sums of AT_ONCE4 groups from g on of a block of each of LANES rows, `start` bytes after rows: [R][group x parts].
 * `at`: from block to block, of blocks of 32 or 64. */
INLINE void dot_blocks(const int format, const int R, const char *const *rows, int64_t start, const int g,
                       const int64_t *at, const int8_t *x, int64_t x_stride, int64_t left, ints sums[][2][4]) {
    const bool signs = has_signs(format);
    const int parts = scale_parts(format), sums_of = signs ? INT8 : format == Q4_K ? INT4 : BYTES;
    halves own[FEW_ROWS], sizes[FEW_ROWS];
    ints fours[FEW_ROWS][2][LANES / 4];
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
        own[r] = parts == 2 ? load_x_in_order(x + r * x_stride, left) : load_x(INT4, x + r * x_stride, left);
        if (signs) sizes[r] = (halves){{sizes_of(own[r].v[0]), sizes_of(own[r].v[1])}};
    }
#pragma GCC unroll 4
    for (int o = 0; o < LANES; o += 4) {
        ints twos[FEW_ROWS][2][2], dots[FEW_ROWS][2][2]; /* added up soon: they would not all fit in registers */
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            octets w[2];
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++)
                w[half] = as_octets(parts == 2 ? unpack_halves(format, rows[o + i] + start, g, at, half)
                                               : unpack_groups(format, rows[o + i] + start, g, at, half));
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) {
                ints both[2];
#pragma GCC unroll 2
                for (int half = 0; half < 2; half++)
                    both[half] = signs ? dot_signs(w[half], own[r].v[half], sizes[r].v[half])
                                       : dot_bytes(w[half], own[r].v[half]);
                dots[r][0][i % 2] = parts == 2 ? both[0] : signs ? both[0] + both[1] : add_parts(both[0], both[1]);
                dots[r][1][i % 2] = both[1];
            }
            if (i % 2)
#pragma GCC unroll 4
                for (int r = 0; r < R; r++)
#pragma GCC unroll 2
                    for (int part = 0; part < parts; part++)
                        twos[r][part][i / 2] = add_twos(sums_of, dots[r][part][0], dots[r][part][1]);
        }
#pragma GCC unroll 4
        for (int r = 0; r < R; r++)
#pragma GCC unroll 2
            for (int part = 0; part < parts; part++)
                fours[r][part][o / 4] = add_fours(sums_of, twos[r][part][0], twos[r][part][1]);
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
        for (int i = 0; i < parts; i++) {
            ints own_sums[4];
            arrange(INT4, fours[r][i], parts == 1 ? sums[r][0] : own_sums);
#pragma GCC unroll 4
            for (int j = 0; j < AT_ONCE4 && parts == 2; j++)
                sums[r][HALF_OF(i, j)][GROUP_OF(0, i, j)] = own_sums[j];
        }
}

/* Groups start to end, with their scales, for R rows from `row` on. */
INLINE void multiply_blocks(const int format, const int R, const linear *a, lanes of, int64_t row, int64_t start,
                            int64_t end, const float *scales, const float *lows) {
    const bool offsets = has_offsets(format), excess = has_signs(format) ? EXCESS8 != 0 : !offsets;
    const int parts = scale_parts(format), step = AT_ONCE4;
    const int64_t groups = groups_of(a), stride = scale_stride(groups), size = block_bytes(format);
    const int64_t of_block = block_numbers(format) / GROUP; /* groups */
    const int64_t at_once = larger(of_block, step);
    const int8_t *x = a->x_rounded + row * groups * GROUP;
    const float *x_scales = a->x_scales + row * stride;
    const int32_t *x_sums = a->x_sums + row * stride * parts;
    float *out = a->out + row * a->stride;
    const char *rows[LANES];
    int64_t done = 0; /* bytes of each row */
    floats total[FEW_ROWS];
    find_blocks(format, a, of, start, rows);
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) total[r] = start ? load_lanes(out + r * a->stride, of) : (floats){0};
    for (int64_t g = start; g < end; g += at_once) {
        const int64_t bytes = at_once / of_block * size;
#pragma GCC unroll 8
        for (int j = 0; j < at_once; j += step) {
            if (!row) fetch_ahead(rows, of, row_bytes(format, a), done + j * size / of_block,
                                  step * size / of_block, true);
            const int8_t *own = x + (g + j) * GROUP;
            int64_t at[4]; /* from block to block; in place of those that do not exist the last one */
            for (int i = 0; i < 4; i++) at[i] = smaller(i / of_block, (groups - g - 1) / of_block) * size;
            ints sums[FEW_ROWS][2][4];
            __asm__("" : "+r"(done)); /* GCC would otherwise keep bytes of several groups, on the stack */
            dot_blocks(format, R, rows, done, j, at, own, groups * GROUP, (groups - g - j) * GROUP, sums);
#pragma GCC unroll 4
            for (int i = 0; i < step; i++) {
                if (of_block < step && g + i >= end) break;
#pragma GCC unroll 2
                for (int part = 0; part < parts; part++) {
                    const int64_t place = (g + j + i) * parts + part, scale = (place - start * parts) * LANES;
#pragma GCC unroll 4
                    for (int r = 0; r < R; r++) {
                        int32_t x_sum = x_sums[r * stride * parts + place];
                        ints exact = excess ? sums[r][part][i] + x_sum : sums[r][part][i];
                        total[r] = add_group(offsets, total[r], exact, scales + scale, lows + scale,
                                             x_scales[r * stride + g + j + i], x_sum);
                    }
                }
            }
        }
        done += bytes;
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) store_lanes(out + r * a->stride, of, total[r]);
}

INLINE void multiply_few(const int format, const int R, const linear *a, lanes of, int64_t row, int64_t start, int64_t end,
                         const float *scales, const float *lows) {
#if HAS_VNNI
    if (has_quads(format)) return multiply_quads(format, R, a, of, row, start, end);
#endif
    multiply_blocks(format, R, a, of, row, start, end, scales, lows);
}

/* --- many rows ---------------------------------------------------------------------------------------------------- */

/* Vector j of a group, four numbers of each output, to its place. */
INLINE void put_numbers(const bool signs, char *group, int j, ints v) {
    const int64_t next_vector = PANELS * sizeof(ints);
    if (signs && EXCESS8 != 0) v ^= (int32_t)0x80808080;
    if (signs && STEP8 == 2) {
        ints pairs[2];
        split_four(v, pairs);
        memcpy(group + 2 * j * next_vector, &pairs[0], sizeof v);
        memcpy(group + (2 * j + 1) * next_vector, &pairs[1], sizeof v);
    } else {
        memcpy(group + j * next_vector, &v, sizeof v);
    }
}

/* The block with group g of LANES outputs is taken to pieces with the lanes along the outputs: 16 bytes of each are
 * transposed as they are stored, and then have numbers of several groups. */
INLINE void pack_blocks(const int format, const linear *a, lanes of, int64_t g, int64_t count, char *panel) {
    const bool signs = has_signs(format);
    const int64_t of_block = block_numbers(format) / GROUP, size = block_bytes(format);
    const int64_t each = packed_group(signs ? INT8 : INT4);
    const char *rows[LANES];
    find_blocks(format, a, of, g, rows);
    for (int64_t i = 0; i < count; i += of_block, panel += of_block * each) {
        const int64_t at = i / of_block * size;
        if (of_block <= 2 || format == IQ4_XS) {
#pragma GCC unroll 1
            for (int64_t j = 0; j < of_block; j++) {
                ints numbers[8];
                unpack_small_outputs(format, rows, at, j, numbers);
#pragma GCC unroll 8
                for (int k = 0; k < 8; k++) put_numbers(signs, panel + j * each, k, numbers[k]);
            }
            continue;
        }
        const int shared = groups_sharing(format);
#pragma GCC unroll 1
        for (int half = 0; half < 2; half++) {
            ints low[4], high[4] = {{0}};
#pragma GCC unroll 4
            for (int p = 0; p < 8 / shared; p++) {
                const int j = sharing_group(format, p, 0);
                gather_packed(rows, at + place_of(format, j) + 16 * half, low);
                if (has_high(format) && (!p || high_place_of(format, j) != high_place_of(format, j - 1)))
                    gather_packed(rows, at + high_place_of(format, j) + 16 * half, high);
#pragma GCC unroll 4
                for (int s = 0; s < shared; s++) {
                    const int group = sharing_group(format, p, s);
#pragma GCC unroll 4
                    for (int k = 0; k < 4; k++)
                        put_numbers(signs, panel + group * each, 4 * half + k,
                                    joined_bits(format, group, low[k], high[k]));
                }
            }
        }
    }
}

/* out[row + r] = x'[row + r] @ W for R rows and panels of numbers up to 31, or 63 with two scales in 32 (`parts`); as
 * `multiply_panels`. */
INLINE void multiply_bytes(const int parts, const bool offsets, const int R, const linear *a, const packed *m,
                           int64_t row) {
    const int64_t size = packed_group(INT4), groups = groups_of(a), stride = scale_stride(groups);
    const char *x = (const char *)a->x_rounded + (row * groups + m->g) * GROUP;
    const float *x_scales = a->x_scales + row * stride + m->g;
    const int32_t *x_sums = a->x_sums + (row * stride + m->g) * parts;
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
        const char *w = m->numbers + g * size, *numbers = x + g * GROUP;
        fetch_lines(m->next + g * fetched_bytes(INT4), fetched_bytes(INT4));
#pragma GCC unroll 6
        for (int r = 0; r < R; r++) __builtin_prefetch(numbers + (r + R) * groups * GROUP); /* of the next tile */
#pragma GCC unroll 2
        for (int part = 0; part < parts; part++) {
            ints dots[6][PANELS];
#if HAS_I8MM || HAS_DOT_LANES
            memset(dots, 0, sizeof dots);
            add_packed(R, GROUP / parts, w + part * (size / 2), numbers + part * (GROUP / 2), groups * GROUP, dots);
#else
            const int flush = SHORT4 ? 4 / parts : 8 / parts; /* vectors whose products fit into 16 bits */
#pragma GCC unroll 8
            for (int from = 0; from < 8 / parts; from += flush) {
                ints some[6][PANELS];
#pragma GCC unroll 6
                for (int r = 0; r < R; r++)
#pragma GCC unroll 2
                    for (int p = 0; p < PANELS; p++) some[r][p] = (ints){0};
#pragma GCC unroll 8
                for (int k = 0; k < flush; k++) {
                    const int j = part * 4 + from + k;
                    ints weights[PANELS];
#pragma GCC unroll 2
                    for (int p = 0; p < PANELS; p++) {
                        weights[p] = load_ints(w + (j * PANELS + p) * sizeof(ints));
                        keep_ints(&weights[p]);
                    }
#pragma GCC unroll 6
                    for (int r = 0; r < R; r++) {
                        ints same = splat_4_bytes(numbers + r * groups * GROUP + j * 4);
#pragma GCC unroll 2
                        for (int p = 0; p < PANELS; p++) {
                            some[r][p] = add_products4(some[r][p], weights[p], same);
                            keep_ints(&some[r][p]);
                        }
                    }
                }
#pragma GCC unroll 6
                for (int r = 0; r < R; r++)
#pragma GCC unroll 2
                    for (int p = 0; p < PANELS; p++)
                        dots[r][p] = from ? dots[r][p] + total4(some[r][p]) : total4(some[r][p]);
            }
#endif
#pragma GCC unroll 2
            for (int p = 0; p < PANELS; p++) {
                const int64_t scale = ((p * SCALE_ROWS + g) * parts + part) * LANES;
#pragma GCC unroll 6
                for (int r = 0; r < R; r++) {
                    const int32_t x_sum = x_sums[(r * stride + g) * parts + part];
                    total[r][p] = add_group(offsets, total[r][p], offsets ? dots[r][p] : dots[r][p] + x_sum,
                                            m->scales + scale, m->lows + scale, x_scales[r * stride + g], x_sum);
                }
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

#define MANY_TILE(NAME, PARTS, OFFSETS, R) \
    SEPARATE void NAME##_##R(const linear *a, const packed *m, int64_t row) { \
        if (R <= BYTE_ROWS) multiply_bytes(PARTS, OFFSETS, R, a, m, row); \
    }
#define MANY_TILES(NAME, PARTS, OFFSETS) /* by their rows */ \
    MANY_TILE(NAME, PARTS, OFFSETS, 1) \
    MANY_TILE(NAME, PARTS, OFFSETS, 2) \
    MANY_TILE(NAME, PARTS, OFFSETS, 3) \
    MANY_TILE(NAME, PARTS, OFFSETS, 4) \
    MANY_TILE(NAME, PARTS, OFFSETS, 5) \
    MANY_TILE(NAME, PARTS, OFFSETS, 6) \
    static many_tile *const NAME[] = {NULL, NAME##_1, NAME##_2, NAME##_3, NAME##_4, NAME##_5, NAME##_6};

MANY_TILES(many_bytes, 1, false)
MANY_TILES(many_bytes_offsets, 1, true)
MANY_TILES(many_halves, 2, false)
MANY_TILES(many_halves_offsets, 2, true)

/* --- formats ------------------------------------------------------------------------------------------------------ */

#define FEW_TILE(NAME, R) \
    SEPARATE void few_##NAME##_##R(const linear *a, lanes of, int64_t row, int64_t start, int64_t end, \
                                   const float *scales, const float *lows) { \
        if (R <= FEW_ROWS) multiply_few(NAME, R, a, of, row, start, end, scales, lows); \
    }

#define FORMAT(NAME, MANY, ROWS, PACKED, PARTS) \
    FEW_TILE(NAME, 1) \
    FEW_TILE(NAME, 2) \
    FEW_TILE(NAME, 3) \
    FEW_TILE(NAME, 4) \
    static few_tile *const few_##NAME[] = {NULL, few_##NAME##_1, few_##NAME##_2, few_##NAME##_3, few_##NAME##_4}; \
    SEPARATE void pack_##NAME(const linear *a, lanes of, int64_t g, int64_t count, char *panel) { \
        pack_blocks(NAME, a, of, g, count, panel); \
    } \
    SEPARATE void scales_##NAME(const linear *a, lanes of, int64_t g, int64_t count, float *scales, float *lows) { \
        pack_block_scales(NAME, a, of, g, count, scales, lows); \
    } \
    static const integer_format of_##NAME = { \
        few_##NAME, MANY, pack_##NAME, scales_##NAME, ROWS, PACKED, PARTS, PACKED_BLOCK_ROWS, \
    };

FORMAT(Q4_K, many_int4_offsets, INT4_ROWS, INT4, 1)
FORMAT(Q5_K, many_bytes_offsets, BYTE_ROWS, INT4, 1)
FORMAT(Q6_K, many_halves, BYTE_ROWS, INT4, 2)
FORMAT(Q5_0, many_bytes, BYTE_ROWS, INT4, 1)
FORMAT(Q5_1, many_bytes_offsets, BYTE_ROWS, INT4, 1)
FORMAT(IQ4_NL, many_int8, INT8_ROWS, INT8, 1)
FORMAT(MXFP4, many_bytes, BYTE_ROWS, INT4, 1)
FORMAT(IQ4_XS, many_int8, INT8_ROWS, INT8, 1)
FORMAT(Q3_K, many_halves, BYTE_ROWS, INT4, 2)
FORMAT(Q2_K, many_halves_offsets, BYTE_ROWS, INT4, 2)
FORMAT(NVFP4, many_halves, BYTE_ROWS, INT4, 2)
FORMAT(Q5_0X2, many_bytes, BYTE_ROWS, INT4, 1)

const integer_format *block_format(int64_t format) {
    switch (format) {
    case Q4_K: return &of_Q4_K;
    case Q5_K: return &of_Q5_K;
    case Q6_K: return &of_Q6_K;
    case Q5_0: return &of_Q5_0;
    case Q5_1: return &of_Q5_1;
    case IQ4_NL: return &of_IQ4_NL;
    case MXFP4: return &of_MXFP4;
    case IQ4_XS: return &of_IQ4_XS;
    case Q3_K: return &of_Q3_K;
    case NVFP4: return &of_NVFP4;
    case Q5_0X2: return &of_Q5_0X2;
    default: return &of_Q2_K;
    }
}

int64_t block_row_bytes(const linear *a) {
    return row_bytes((int)a->format, a);
}

int32_t block_excess(int64_t format) {
    return has_signs((int)format) ? EXCESS8 : has_offsets((int)format) ? 8 : excess_of((int)format);
}
