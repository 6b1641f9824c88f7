/* The numbers and the scales of blocks, whose layouts are in minillm/reference/blocks.py.
 *
 * `unpack` gives the integers of some groups of 32 in bytes, in the order that dot.h multiplies: without sign, `excess_of`
 * higher than they are, but of IQ4_NL and IQ4_XS with it. `block_scales` gives the scales of LANES rows, one in a lane.
 */
#ifndef MINILLM_BLOCKS_H
#define MINILLM_BLOCKS_H
#include "dot.h"
#include <stdbool.h>

/* 16 bytes of each group that is unpacked at once: a part of the vector each. */
typedef uint8_t sixteens __attribute__((vector_size(16 * AT_ONCE4)));
typedef uint32_t shifts __attribute__((vector_size(16 * AT_ONCE4)));
typedef uint64_t eights __attribute__((vector_size(16 * AT_ONCE4)));

/* Numbers of a block. */
INLINE int64_t block_numbers(const int format) {
    switch (format) {
    case Q5_0:
    case Q5_1:
    case IQ4_NL:
    case MXFP4:
    case NVFP4: return 32;
    case Q5_0X2: return 64;
    default: return 256;
    }
}

INLINE int64_t block_bytes(const int format) {
    switch (format) {
    case Q4_K: return 144;
    case Q5_K: return 176;
    case Q6_K: return 210;
    case Q5_0: return 22;
    case Q5_1: return 24;
    case IQ4_NL: return 18;
    case MXFP4: return 17;
    case IQ4_XS: return 136;
    case Q3_K: return 110;
    case NVFP4: return 24;
    case Q5_0X2: return 44;
    default: return 84;
    }
}

INLINE bool has_signs(const int format) {
    return format == IQ4_NL || format == IQ4_XS;
}

/* Scales of 32 numbers. */
INLINE int scale_parts(const int format) {
    return format == Q6_K || format == Q3_K || format == Q2_K || format == NVFP4 ? 2 : 1;
}

INLINE bool has_offsets(const int format) {
    return format == Q4_K || format == Q5_K || format == Q5_1 || format == Q2_K;
}

INLINE int excess_of(const int format) {
    switch (format) {
    case Q6_K: return 32;
    case Q5_0: return 16;
    case Q5_0X2: return 16;
    case MXFP4: return 12;
    case NVFP4: return 12;
    case Q3_K: return 4;
    default: return 0;
    }
}

/* --- integers ----------------------------------------------------------------------------------------------------- */

/* 16 bytes `at` after p for each group. */
INLINE sixteens load_sixteens(const char *p, int64_t a, int64_t b, int64_t c, int64_t d) {
    sixteens v;
#if HAS_AVX512
    if (__builtin_constant_p(b - a == 16 && d - c == 16) && b - a == 16 && d - c == 16) {
        __m512i both = _mm512_castsi256_si512(_mm256_loadu_si256((const void *)(p + a)));
        return (sixteens)_mm512_inserti64x4(both, _mm256_loadu_si256((const void *)(p + c)), 1);
    }
    __m512i first = _mm512_castsi128_si512(_mm_loadu_si128((const void *)(p + a)));
    first = _mm512_inserti32x4(first, _mm_loadu_si128((const void *)(p + b)), 1);
    first = _mm512_inserti32x4(first, _mm_loadu_si128((const void *)(p + c)), 2);
    v = (sixteens)_mm512_inserti32x4(first, _mm_loadu_si128((const void *)(p + d)), 3);
#elif HAS_AVX2
    (void)c, (void)d;
    __m128i first = _mm_loadu_si128((const void *)(p + a));
    if (__builtin_constant_p(a == b) && a == b) {
        v = (sixteens)_mm256_broadcastsi128_si256(first);
    } else if (__builtin_constant_p(b - a) && b - a == 16) {
        v = (sixteens)_mm256_loadu_si256((const void *)(p + a));
    } else {
        __m256i wide = _mm256_castsi128_si256(first);
        v = (sixteens)_mm256_inserti128_si256(wide, _mm_loadu_si128((const void *)(p + b)), 1);
    }
#else
    (void)b, (void)c, (void)d;
    memcpy(&v, p + a, sizeof v);
#endif
    return v;
}

/* One number for each group's part of a vector. */
INLINE shifts each_part(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
#if HAS_AVX512
    return (shifts){a, a, a, a, b, b, b, b, c, c, c, c, d, d, d, d};
#elif HAS_AVX2
    (void)c, (void)d;
    return (shifts){a, a, a, a, b, b, b, b};
#else
    (void)b, (void)c, (void)d;
    return (shifts){a, a, a, a};
#endif
}

/* Each group's bytes shifted right, by a negative number left; bits come from neighbours, so a mask follows. */
INLINE sixteens move(sixteens v, int a, int b, int c, int d) {
    shifts words = (shifts)v;
    if (a > 0 || (AT_ONCE4 > 1 && b > 0) || (AT_ONCE4 > 2 && (c > 0 || d > 0)))
        words = words >> each_part(a > 0 ? a : 0, b > 0 ? b : 0, c > 0 ? c : 0, d > 0 ? d : 0);
    if (a < 0 || (AT_ONCE4 > 1 && b < 0) || (AT_ONCE4 > 2 && (c < 0 || d < 0)))
        words = words << each_part(a < 0 ? -a : 0, b < 0 ? -b : 0, c < 0 ? -c : 0, d < 0 ? -d : 0);
    return (sixteens)words;
}

/* table[v] in each part: `table` has the same 16 bytes in each, or others; v is below 16. */
INLINE sixteens look_up_16(sixteens table, sixteens v) {
#if HAS_AVX512
    return (sixteens)_mm512_shuffle_epi8((__m512i)table, (__m512i)v);
#elif HAS_AVX2
    return (sixteens)_mm256_shuffle_epi8((__m256i)table, (__m256i)v);
#elif HAS_NEON
    return (sixteens)vqtbl1q_u8((uint8x16_t)table, (uint8x16_t)v);
#else
    sixteens chosen;
    for (int i = 0; i < 16; i++) chosen[i] = table[v[i] & 15];
    return chosen;
#endif
}

INLINE sixteens repeat_sixteen(const void *p) {
    return load_sixteens(p, 0, 0, 0, 0);
}

static const int8_t NONLINEAR[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
static const uint8_t E2M1[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0}; /* 12 higher */
static const uint8_t BYTE_OF_BIT[2][16] = {{0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1},
                                           {2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3}};
static const uint8_t BIT_IN_BYTE[16] = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};

/* Where group g of a block has the lowest bits of its first 16 numbers, and how far these are to be shifted. */
INLINE int64_t place_of(const int format, int g) {
    switch (format) {
    case Q4_K: return 16 + g / 2 * 32;
    case Q5_K: return 48 + g / 2 * 32;
    case Q6_K: return g / 4 * 64 + g % 2 * 32;
    case Q3_K: return 32 + g / 4 * 32;
    default: return 16 + g / 4 * 32; /* Q2_K */
    }
}

INLINE int shift_of(const int format, int g) {
    return format == Q4_K || format == Q5_K ? g % 2 * 4 : format == Q6_K ? g % 4 / 2 * 4 : g % 4 * 2;
}

/* Bits above the lowest, likewise, shifted to their place. */
INLINE int64_t high_place_of(const int format, int g) {
    return format == Q5_K ? 16 : format == Q6_K ? 128 + g / 4 * 32 : 0;
}

INLINE int high_shift_of(const int format, int g) {
    return format == Q5_K ? g - 4 : format == Q6_K ? g % 4 * 2 - 4 : g - 2;
}

#define OF_GROUPS(FUNCTION, FORMAT, G) \
    FUNCTION(FORMAT, G), FUNCTION(FORMAT, (G) + 1), FUNCTION(FORMAT, (G) + 2), FUNCTION(FORMAT, (G) + 3)

/* Half `half` of groups g to g + AT_ONCE4 of a block of 256, in parts of a vector. */
INLINE sixteens unpack_half(const int format, const char *block, const int g, const int half) {
    sixteens low = load_sixteens(block + 16 * half, OF_GROUPS(place_of, format, g));
    low = move(low, OF_GROUPS(shift_of, format, g)) & (uint8_t)(format == Q3_K || format == Q2_K ? 3 : 15);
    if (format == Q4_K || format == Q2_K) return low;
    sixteens high = load_sixteens(block + 16 * half, OF_GROUPS(high_place_of, format, g));
    high = move(high, OF_GROUPS(high_shift_of, format, g));
    return low | (high & (uint8_t)(format == Q5_K ? 16 : format == Q6_K ? 48 : 4));
}

/* Where a block of 32 has its lowest four bits; fifth ones are before them. */
INLINE int64_t small_place(const int format) {
    return format == Q5_0 ? 6 : format == Q5_1 || format == NVFP4 ? 8 : format == IQ4_NL ? 2 : 1;
}

/* Half `half` of AT_ONCE4 blocks of 32, which are `stride` bytes apart; a stride of 0 repeats the first. */
INLINE sixteens unpack_small_half(const int format, const char *block, const int64_t *at, const int half) {
    const int64_t numbers = small_place(format);
    sixteens low = load_sixteens(block + numbers, at[0], at[1], at[2], at[3]);
    low = (half ? move(low, 4, 4, 4, 4) : low) & 15;
    if (format == MXFP4 || format == NVFP4) return look_up_16(repeat_sixteen(E2M1), low);
    sixteens words = load_sixteens(block + numbers - 4, at[0], at[1], at[2], at[3]); /* of which 4 bytes are looked up */
    sixteens bits = look_up_16(words, repeat_sixteen(BYTE_OF_BIT[half]));
    sixteens mask = repeat_sixteen(BIT_IN_BYTE);
    return low | ((sixteens)((bits & mask) == mask) & 16);
}

/* Half `half` of AT_ONCE4 groups from group g of a pair of blocks on, also of the next pair, `at` after the first. */
INLINE sixteens unpack_pair_half(const char *pair, const int g, const int64_t *at, const int half) {
    const int64_t bits = 4, numbers = 12;
    sixteens low;
    eights fifths; /* of 8 numbers each: bit 4 of a byte, or of the second half bit 0 */
#if HAS_AVX512
    (void)g;
    __m256i first = _mm256_loadu_si256((const void *)(pair + numbers));
    __m256i second = _mm256_loadu_si256((const void *)(pair + at[2] + numbers));
    low = (sixteens)_mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1);
    uint64_t own, other;
    memcpy(&own, pair + bits, sizeof own);
    memcpy(&other, pair + at[2] + bits, sizeof other);
    fifths = (eights){own, own, own, own, other, other, other, other} >> (eights){0, 1, 2, 3, 0, 1, 2, 3};
#else
    uint64_t own;
    (void)at;
    memcpy(&low, pair + numbers + 16 * g, sizeof low);
    memcpy(&own, pair + bits, sizeof own);
#if HAS_AVX2
    fifths = (eights){own, own, own, own} >> (eights){0, 1, 2, 3};
#else
    fifths = (eights){own, own} >> (eights){2 * g, 2 * g + 1};
#endif
#endif
    if (half) low = move(low, 4, 4, 4, 4), fifths <<= 4;
    return (low & 15) | ((sixteens)fifths & 16);
}

/* Half `half` of AT_ONCE4 groups in parts of a vector: from group g of a block of 256 or 64 on, or of blocks of 32, which
 * lie `at` after the first. */
INLINE sixteens unpack_groups(const int format, const char *block, const int g, const int64_t *at, const int half) {
    if (has_signs(format)) {
        sixteens v = format == IQ4_NL ? load_sixteens(block + 2, at[0], at[1], at[2], at[3])
                                      : load_sixteens(block + 8 + 16 * g, 0, 16, 32, 48);
        return look_up_16(repeat_sixteen(NONLINEAR), (half ? move(v, 4, 4, 4, 4) : v) & 15);
    }
    if (format == Q5_0X2) return unpack_pair_half(block, g, at, half);
    return block_numbers(format) == 32 ? unpack_small_half(format, block, at, half)
                                       : unpack_half(format, block, g, half);
}

/* Piece `i` of those that vector `vector` of `unpack_halves` has: the group, from g on, and which half of it. */
#define GROUP_OF(G, VECTOR, I) ((G) + ((VECTOR) * AT_ONCE4 + (I)) / 2)
#define HALF_OF(VECTOR, I) (((VECTOR) * AT_ONCE4 + (I)) % 2)
#define OF_HALVES(FUNCTION, FORMAT, G, VECTOR) \
    FUNCTION(FORMAT, GROUP_OF(G, VECTOR, 0)), FUNCTION(FORMAT, GROUP_OF(G, VECTOR, 1)), \
        FUNCTION(FORMAT, GROUP_OF(G, VECTOR, 2)), FUNCTION(FORMAT, GROUP_OF(G, VECTOR, 3))
#define PLACES_OF_HALVES(FUNCTION, FORMAT, G, VECTOR) \
    FUNCTION(FORMAT, GROUP_OF(G, VECTOR, 0)) + 16 * HALF_OF(VECTOR, 0), \
        FUNCTION(FORMAT, GROUP_OF(G, VECTOR, 1)) + 16 * HALF_OF(VECTOR, 1), \
        FUNCTION(FORMAT, GROUP_OF(G, VECTOR, 2)) + 16 * HALF_OF(VECTOR, 2), \
        FUNCTION(FORMAT, GROUP_OF(G, VECTOR, 3)) + 16 * HALF_OF(VECTOR, 3)

/* As `unpack_groups` for two scales in 32 numbers: halves of groups one after the other, as x has them, in two vectors. */
INLINE sixteens unpack_halves(const int format, const char *block, const int g, const int64_t *at, const int vector) {
    if (format == NVFP4) {
        sixteens both = load_sixteens(block + small_place(format), at[GROUP_OF(0, vector, 0)], at[GROUP_OF(0, vector, 1)],
                                      at[GROUP_OF(0, vector, 2)], at[GROUP_OF(0, vector, 3)]);
        both = move(both, 4 * HALF_OF(vector, 0), 4 * HALF_OF(vector, 1), 4 * HALF_OF(vector, 2), 4 * HALF_OF(vector, 3));
        return look_up_16(repeat_sixteen(E2M1), both & 15);
    }
    sixteens low = load_sixteens(block, PLACES_OF_HALVES(place_of, format, g, vector));
    low = move(low, OF_HALVES(shift_of, format, g, vector)) & (uint8_t)(format == Q6_K ? 15 : 3);
    if (format == Q2_K) return low;
    sixteens high = load_sixteens(block, PLACES_OF_HALVES(high_place_of, format, g, vector));
    high = move(high, OF_HALVES(high_shift_of, format, g, vector));
    return low | (high & (uint8_t)(format == Q6_K ? 48 : 4));
}

/* --- integers with the lanes along the outputs -------------------------------------------------------------------- */

/* Of a block of 256: how many groups have their lowest bits in the same bytes, and number `i` of those that have them in
 * the p-th ones. */
INLINE int groups_sharing(const int format) {
    return format == Q3_K || format == Q2_K ? 4 : 2;
}

INLINE int sharing_group(const int format, int p, int i) {
    return format == Q6_K ? p / 2 * 4 + p % 2 + 2 * i : p * groups_sharing(format) + i;
}

INLINE bool has_high(const int format) {
    return format == Q5_K || format == Q6_K || format == Q3_K;
}

/* Four numbers of group g in each lane, from the bytes that have their lowest bits and the bits above. */
INLINE ints joined_bits(const int format, int g, ints low, ints high) {
    const int shift = high_shift_of(format, g), mask = format == Q5_K ? 16 : format == Q6_K ? 48 : 4;
    low = low >> shift_of(format, g) & (format == Q3_K || format == Q2_K ? 3 : 15) * 0x01010101;
    if (!has_high(format)) return low;
    return low | ((shift > 0 ? high >> shift : high << -shift) & mask * 0x01010101);
}

INLINE ints look_up_bytes(const void *table, ints v) {
    sixteens parts[sizeof v / sizeof(sixteens)];
    memcpy(parts, &v, sizeof v);
    for (size_t i = 0; i < sizeof v / sizeof(sixteens); i++) parts[i] = look_up_16(repeat_sixteen(table), parts[i]);
    memcpy(&v, parts, sizeof v);
    return v;
}

/* Bit 4 of vector k of the 32 numbers of each output, whose bits are one lane: bit i of four to bit 4 of byte i; products
 * of single bits do not meet. */
INLINE ints fifth_bits(ints bits, int k) {
#if HAS_I8MM
    int32x4_t low = (int32x4_t)bits, next = vshrq_n_s32(low, 4);
    bits = (ints)(k % 2 ? vzip2q_s32(low, next) : vzip1q_s32(low, next)) >> 8 * (k / 2);
#else
    bits >>= 4 * k;
#endif
    return (bits & 15) * 0x02040810 & 0x10101010;
}

/* The 32 numbers of a block of 32 that lies `at` bytes after each of LANES rows, or of group j of IQ4_XS or Q5_0X2, as
 * packed weights have them: vector k has numbers 4 k to 4 k + 3 of each output, or is of pairs of outputs. */
INLINE void unpack_small_outputs(const int format, const char *const *rows, int64_t at, int64_t j, ints *numbers) {
    ints bits = {0}, fifths[4];
    if (format == Q5_0X2) gather_packed(rows, at + 4, fifths); /* the first two vectors have them */
    at += format == IQ4_XS ? 8 + 16 * j : format == Q5_0X2 ? 12 + 16 * j : small_place(format);
    gather_packed(rows, at, numbers);
    if (format == Q5_0 || format == Q5_1)
        for (int o = 0; o < LANES; o++) {
            int32_t own;
            memcpy(&own, rows[o] + at - 4, sizeof own);
            bits[o] = own;
        }
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++) {
        numbers[k + 4] = numbers[k] >> 4 & 0x0F0F0F0F;
        numbers[k] &= 0x0F0F0F0F;
    }
#pragma GCC unroll 8
    for (int k = 0; k < 8; k++) {
        if (has_signs(format)) {
            numbers[k] = look_up_bytes(NONLINEAR, numbers[k]);
        } else if (format == MXFP4 || format == NVFP4) {
            numbers[k] = look_up_bytes(E2M1, numbers[k]);
        } else if (format == Q5_0X2) {
            ints own = fifths[k % 2] >> (int)(2 * j + k % 4 / 2);
            numbers[k] |= (k < 4 ? own : own << 4) & 0x10101010;
        } else {
            numbers[k] |= fifth_bits(bits, k);
        }
    }
}

INLINE octets as_octets(sixteens v) {
    octets w;
    memcpy(&w, &v, sizeof w);
    return w;
}

/* --- scales ------------------------------------------------------------------------------------------------------- */

#if HAS_AVX512 || HAS_AVX2
/* Bytes of each four lanes: those of the first at the places that `first` has as bytes, negative ones zeros; of the next
 * ones `next` further. */
INLINE ints take_bytes(ints v, int32_t first, int32_t next) {
    const int32_t second = first + next, third = second + next, last = third + next;
#if HAS_AVX512
    const ints places = {first, second, third, last, first, second, third, last,
                         first, second, third, last, first, second, third, last};
    return (ints)_mm512_shuffle_epi8((__m512i)v, (__m512i)places);
#else
    const ints places = {first, second, third, last, first, second, third, last};
    return (ints)_mm256_shuffle_epi8((__m256i)v, (__m256i)places);
#endif
}
#endif

/* Byte i of each lane, with zeros before it; and SIGNED_BYTES times that with its sign. */
#if HAS_AVX512 || HAS_AVX2
enum { SIGNED_BYTES = 1 << 24 };

INLINE ints byte_in(ints v, int i) {
    return take_bytes(v, i - 256, 4); /* three bytes of zeros */
}

INLINE ints signed_byte_in(ints v, int i) {
    return take_bytes(v, (i << 24) | 0x808080, 4 << 24);
}
#else
enum { SIGNED_BYTES = 1 };

INLINE ints byte_in(ints v, int i) {
    return v >> (i * 8) & 255;
}

INLINE ints signed_byte_in(ints v, int i) {
    return v << (24 - i * 8) >> 24;
}
#endif

/* Byte i of the 16 that `gather_16_bytes` found, with zeros before it. */
INLINE ints byte_of(const ints *v, int i) {
    return byte_in(v[i / 4], i % 4);
}

INLINE int16_t short_at(const char *p) {
    int16_t v;
    memcpy(&v, p, sizeof v);
    return v;
}

/* The float16 that lies `at` bytes after the beginning of each of LANES rows. */
INLINE floats gather_float16(const char *const *rows, int64_t at) {
#if HAS_AVX2 && !HAS_AVX512
    __m128i v = _mm_setzero_si128();
#define INSERT(O) v = _mm_insert_epi16(v, short_at(rows[O] + at), O)
    INSERT(0), INSERT(1), INSERT(2), INSERT(3), INSERT(4), INSERT(5), INSERT(6), INSERT(7);
#undef INSERT
    return (floats)_mm256_cvtph_ps(v);
#else
    ints v[4];
    floats low, high;
    gather_16_bytes(rows, at, v);
    split_float16(v[0], &low, &high);
    return low;
#endif
}

/* Scales of the groups of a block of each of LANES rows, and an eighth of what is subtracted (`has_offsets`). The blocks
 * are `at` bytes after rows. -> [256 or 32 numbers / those that share a scale] each */
INLINE void block_scales(const int format, const char *const *rows, int64_t at, floats *scales, floats *lows) {
    ints v[4];
    floats d, other;
    if (format == Q4_K || format == Q5_K) {
        gather_16_bytes(rows, at, v);
        split_float16(v[0], &d, &other);
        /* four of 6 bits in each lane: groups 0 to 3, whose two highest bits are those of groups 4 to 7 */
        const ints own[2] = {v[1] & 0x3F3F3F3F, (v[3] & 0x0F0F0F0F) | (v[1] >> 2 & 0x30303030)};
        const ints less[2] = {v[2] & 0x3F3F3F3F, (v[3] >> 4 & 0x0F0F0F0F) | (v[2] >> 2 & 0x30303030)};
        other *= 0.125f;
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++) {
            scales[j] = d * __builtin_convertvector(byte_of(own, j), floats);
            lows[j] = other * __builtin_convertvector(byte_of(less, j), floats);
        }
    } else if (format == Q6_K) {
        ints last[4];
        gather_16_bytes(rows, at + 194, last);
        split_float16(last[3], &other, &d);
        d /= SIGNED_BYTES;
        gather_16_bytes(rows, at + 192, v);
#pragma GCC unroll 16
        for (int j = 0; j < 16; j++)
            scales[j] = d * __builtin_convertvector(signed_byte_in(v[j / 4], j % 4), floats);
    } else if (format == IQ4_XS) {
        gather_16_bytes(rows, at, v);
        split_float16(v[0], &d, &other);
        /* four of 6 bits in each lane: a byte has the lowest four of groups 2 i and 2 i + 1, a nibble their highest two */
        const ints high = (v[0] >> 16 & 0xFF) | (v[0] >> 8 & 0xFF0000), pairs = (high | high << 4) & 0x0F0F0F0F;
        const ints own[2] = {(v[1] & 0x0F0F0F0F) | (pairs & 0x03030303) << 4,
                             (v[1] >> 4 & 0x0F0F0F0F) | (pairs & 0x0C0C0C0C) << 2};
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++)
            scales[j] = d * __builtin_convertvector(byte_in(own[j % 2], j / 2) - 32, floats);
    } else if (format == Q3_K) {
        gather_16_bytes(rows, at + 94, v); /* the last bytes of a block; its scales are 2 further */
        split_float16(v[3], &other, &d);
#pragma GCC unroll 16
        for (int j = 0; j < 16; j++) {
            ints low = byte_of(v, 2 + j % 8) >> (j / 8 * 4) & 15, high = byte_of(v, 10 + j % 4) >> (j / 4 * 2) & 3;
            scales[j] = d * __builtin_convertvector((low | high << 4) - 32, floats);
        }
    } else if (format == Q2_K) {
        gather_16_bytes(rows, at + 68, v);
        split_float16(v[3], &d, &other);
        other *= 0.125f;
        gather_16_bytes(rows, at, v);
#pragma GCC unroll 16
        for (int j = 0; j < 16; j++) {
            ints both = byte_of(v, j);
            scales[j] = d * __builtin_convertvector(both & 15, floats);
            lows[j] = other * __builtin_convertvector(both >> 4, floats);
        }
    } else if (format == MXFP4) {
        gather_16_bytes(rows, at, v);
        ints e = v[0] & 255, tiny = e < 2;
        scales[0] = (floats)((tiny & (0x200000 + (e & 1) * 0x200000)) | (~tiny & (e - 1) << 23));
    } else if (format == NVFP4) {
        gather_16_bytes(rows, at, v);
        scales[0] = (floats)v[0] * 0.5f, scales[1] = (floats)v[1] * 0.5f;
    } else if (format == Q5_0X2) {
        gather_16_bytes(rows, at, v);
        split_float16(v[0], &scales[0], &scales[1]);
    } else if (format == Q5_0 || format == IQ4_NL) {
        scales[0] = gather_float16(rows, at);
    } else {
        gather_16_bytes(rows, at, v);
        split_float16(v[0], &scales[0], &other);
        lows[0] = other * -0.125f;
    }
}
#endif
