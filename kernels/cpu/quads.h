/* Products of up to FEW_ROWS rows of x with blocks of 256 as they are stored, by VNNI: lanes along four outputs.
 *
 * 64 bytes of each of four outputs are transposed within 16 bytes, and then unpacked: a lane has four numbers of one output,
 * 16 bytes a piece, 16 numbers of a group, of all four. The sums of a piece then end in 16 bytes, and `arrange` puts those of
 * 16 outputs side by side, once for 32 numbers. Four numbers of x are repeated in 16 bytes.
 *
 * Bits that are not the lowest of a byte are multiplied where they are, 4 or 16 times as large or more, and the sums, which
 * are exact, divided afterwards.
 */
#ifndef MINILLM_QUADS_H
#define MINILLM_QUADS_H
#include "blocks.h"
#include "integers.h"

/* Whether few rows of x meet a format so. Its scales are then read with the numbers. */
INLINE bool has_quads(int64_t format) {
#if HAS_VNNI
    return format >= Q4_K && block_numbers((int)format) == 256;
#else
    (void)format;
    return false;
#endif
}

#if HAS_VNNI

static const uint8_t NONLINEAR_FROM_0[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};

/* Keeps bytes in a register: GCC would otherwise load them again for their next use. */
INLINE octets keep_octets(octets v) {
    __asm__("" : "+v"(v));
    return v;
}

INLINE octets load_twice(const char *p) {
    return _mm512_broadcast_i64x4(_mm256_loadu_si256((const void *)p));
}

/* 64 bytes of each of four rows `at` bytes after its beginning, or 32 `twice`.
 * -> in 16 bytes p of vector j: bytes 16 p + 4 j to 16 p + 4 j + 3 of each row */
INLINE void gather_quad(const char *const *rows, int64_t at, const bool twice, ints *to) {
    octets own[4], low[2], high[2];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) own[i] = keep_octets(twice ? load_twice(rows[i] + at) : _mm512_loadu_si512(rows[i] + at));
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
        low[i] = _mm512_unpacklo_epi32(own[2 * i], own[2 * i + 1]);
        high[i] = _mm512_unpackhi_epi32(own[2 * i], own[2 * i + 1]);
    }
    to[0] = (ints)_mm512_unpacklo_epi64(low[0], low[1]), to[1] = (ints)_mm512_unpackhi_epi64(low[0], low[1]);
    to[2] = (ints)_mm512_unpacklo_epi64(high[0], high[1]), to[3] = (ints)_mm512_unpackhi_epi64(high[0], high[1]);
}

/* 128 numbers of x as they meet the two vectors of `unpack_quad`: [vector][j] */
INLINE void load_x_of_quads(const int format, const int8_t *x, ints to[][4]) {
    halves own = format == IQ4_XS ? load_x(INT4, x, 128) : load_x_in_order(x, 128);
    if (format == Q4_K || format == Q5_K) { /* groups 0 and 2, 1 and 3 */
        const octets first = own.v[0], second = own.v[1];
        own = (halves){{_mm512_shuffle_i64x2(first, second, 0x44), _mm512_shuffle_i64x2(first, second, 0xEE)}};
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
        to[i][0] = (ints)_mm512_shuffle_epi32(own.v[i], 0x00), to[i][1] = (ints)_mm512_shuffle_epi32(own.v[i], 0x55);
        to[i][2] = (ints)_mm512_shuffle_epi32(own.v[i], 0xAA), to[i][3] = (ints)_mm512_shuffle_epi32(own.v[i], 0xFF);
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) keep_ints(&to[i][j]);
    }
}

/* A number for the first two pieces of a vector, and one for the others. */
INLINE ints by_halves(uint32_t a, uint32_t b) {
    return (ints)(words){a, a, a, a, a, a, a, a, b, b, b, b, b, b, b, b};
}

#if defined(__GFNI__)
/* Which bit of a byte each bit is taken from, a matrix for `_mm512_gf2p8affine_epi64_epi8`: bit i from bit i - moved where
 * `mask` has bit i, else 0. */
INLINE long long moving(int moved, int mask) {
    uint64_t rows = 0;
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++)
        if (mask >> i & 1) rows |= (uint64_t)1 << (8 * (7 - i) + i - moved);
    return (long long)rows;
}
#endif

/* The bits of each byte moved to higher places by `a`, which may be negative, of which those in `mask` stay; in the last two
 * pieces by `b`, and those in `other`. */
INLINE ints move_bits(ints v, const int a, const int mask, const int b, const int other) {
#if defined(__GFNI__)
    const long long first = moving(a, mask), second = moving(b, other);
    const __m512i matrices = (__m512i){first, first, first, first, second, second, second, second};
    return (ints)_mm512_gf2p8affine_epi64_epi8((__m512i)v, matrices, 0);
#else
    ints moved = (ints)_mm512_rolv_epi32((__m512i)v, (__m512i)by_halves(a & 31, b & 31));
    return moved & by_halves(mask * 0x01010101u, other * 0x01010101u);
#endif
}

/* The numbers of groups g to g + 3, of which `low` has the lowest bits and `high` those above: two vectors of four pieces,
 * each of which may be too large (`quad_shift`). */
INLINE void unpack_quad(const int format, const int g, ints low, ints high, ints *to) {
    const int32_t nibbles = 0x0F0F0F0F;
    switch (format) {
    case Q4_K: to[0] = low & nibbles, to[1] = low & ~nibbles; break;
    case Q5_K:
        to[0] = (low & nibbles) | move_bits(high, 4 - g, 16, 2 - g, 16);
        to[1] = (low >> 4 & nibbles) | move_bits(high, 3 - g, 16, 1 - g, 16);
        break;
    case Q6_K:
        to[0] = (low & nibbles) | move_bits(high, 4, 48, 2, 48);
        to[1] = (low >> 4 & nibbles) | move_bits(high, 0, 48, -2, 48);
        break;
    case IQ4_XS:
        to[0] = look_up_bytes(NONLINEAR_FROM_0, low & nibbles);
        to[1] = look_up_bytes(NONLINEAR_FROM_0, low >> 4 & nibbles);
        break;
    case Q3_K:
        to[0] = (low & by_halves(0x03030303, 0x0C0C0C0C)) | move_bits(high, 2 - g, 4, 3 - g, 16);
        to[1] = (low >> 2 & by_halves(0x0C0C0C0C, 0x30303030)) | move_bits(high, 2 - g, 16, 3 - g, 64);
        break;
    default: /* Q2_K */
        to[0] = low & by_halves(0x03030303, 0x0C0C0C0C), to[1] = low & by_halves(0x30303030, 0xC0C0C0C0);
    }
}

/* The power of two by which piece `p` of vector `i` is too large. */
INLINE int quad_shift(const int format, int i, int p) {
    switch (format) {
    case Q4_K: return i * 4;
    case Q3_K: return i * 2 + p / 2 * 2;
    case Q2_K: return i * 4 + p / 2 * 2;
    default: return 0;
    }
}

/* The sums of groups g to g + 3 of a block of each of LANES rows, `start` bytes after rows: [R][part][group] */
INLINE void dot_quads(const int format, const int R, const char *const *rows, int64_t start, const int g, const int8_t *x,
                      int64_t x_stride, ints sums[][2][4]) {
    const int64_t place = format == IQ4_XS ? 8 + 16 * g : place_of(format, g), high_place = high_place_of(format, g);
    const int parts = scale_parts(format), vectors = format == IQ4_XS ? 1 : 2; /* of sums */
    ints own[FEW_ROWS][2][4], fours[FEW_ROWS][2][4];
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) load_x_of_quads(format, x + r * x_stride, own[r]);
#pragma GCC unroll 4
    for (int q = 0; q < 4; q++) {
        ints low[4], high[4] = {{0}};
        gather_quad(rows + 4 * q, start + place, format == Q3_K || format == Q2_K, low);
        if (has_high(format)) gather_quad(rows + 4 * q, start + high_place, true, high);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) fours[r][0][q] = fours[r][1][q] = (ints){0};
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            ints w[2];
            unpack_quad(format, g, low[j], high[j], w);
#pragma GCC unroll 4
            for (int r = 0; r < R; r++)
#pragma GCC unroll 2
                for (int i = 0; i < 2; i++) {
                    ints *sum = &fours[r][i % vectors][q];
                    *sum = add_products8(*sum, w[i], own[r][i][j]);
                }
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
        for (int i = 0; i < vectors; i++) {
            ints pieces[4]; /* or groups: those of two vectors have two pieces each, of which INT8's are one sum */
            arrange(parts == 1 && vectors == 2 ? INT8 : INT4, fours[r][i], pieces);
#pragma GCC unroll 4
            for (int p = 0; p < 4; p++) {
                if (vectors == 1) {
                    sums[r][0][p] = pieces[p];
                } else if (parts == 2) {
                    sums[r][p % 2][2 * i + p / 2] = pieces[p] >> quad_shift(format, i, p);
                } else if (p < 2) {
                    sums[r][0][2 * p + i] = pieces[p] >> quad_shift(format, i, p);
                }
            }
        }
}

/* Groups start to end of R rows from `row` on; as `multiply_blocks`. */
INLINE void multiply_quads(const int format, const int R, const linear *a, lanes of, int64_t row, int64_t start,
                           int64_t end) {
    const bool offsets = has_offsets(format);
    const bool behind = format == Q6_K || format == Q3_K; /* whether a block's scales are behind its numbers */
    const int parts = scale_parts(format);
    const int64_t groups = groups_of(a), stride = scale_stride(groups), size = block_bytes(format);
    const int64_t row_size = groups / 8 * size;
    const int8_t *x = a->x_rounded + row * groups * GROUP;
    const float *x_scales = a->x_scales + row * stride;
    const int32_t *x_sums = a->x_sums + row * stride * parts;
    float *out = a->out + row * a->stride;
    const char *rows[LANES];
    floats total[FEW_ROWS];
    for (int o = 0; o < LANES; o++) rows[o] = (const char *)a->weight + output_of(a, of, o) * row_size;
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) total[r] = start ? load_lanes(out + r * a->stride, of) : (floats){0};
    for (int64_t g = start, done = start / 8 * size; g < end; g += 8, done += size) {
        floats scales[16], lows[16];
        keep_in_memory(rows);
        if (!behind) block_scales(format, rows, done, scales, lows);
#pragma GCC unroll 2
        for (int j = 0; j < 8; j += 4) {
            ints sums[FEW_ROWS][2][4];
            if (!row) fetch_ahead(rows, of, row_size, done + j * size / 8, size / 2, true);
            if (!row && size > 144) /* of long blocks also into the L2 cache (1.03 to 1.15, measured on a Zen 4) */
#pragma GCC unroll 16
                for (int o = 0; o < LANES; o++) fetch_lines(rows[o] + done + j * size / 8 + 2 * AHEAD, 1);
            dot_quads(format, R, rows, done, j, x + (g + j) * GROUP, groups * GROUP, sums);
            if (j == 0 && behind) block_scales(format, rows, done, scales, lows);
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++)
#pragma GCC unroll 2
                for (int part = 0; part < parts; part++)
#pragma GCC unroll 4
                    for (int r = 0; r < R; r++) {
                        const int place = (j + i) * parts + part;
                        const int32_t x_sum = x_sums[(r * stride + g) * parts + place];
                        ints exact = offsets ? sums[r][part][i] : sums[r][part][i] + x_sum;
                        total[r] = add_scaled(offsets, total[r], exact, scales[place], lows[place],
                                              x_scales[r * stride + g + j + i], x_sum);
                    }
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) store_lanes(out + r * a->stride, of, total[r]);
}
#endif
#endif
