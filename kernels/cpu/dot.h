/* Products of integers of 8 and 4 bits with integers of 8 bits, summed as 32 bits. They have no portable form.
 *
 * Lanes along the inputs, for weights as they are stored. An `octets` holds GROUPS groups of 32 numbers. A dot product
 * leaves parts of a group's sum in the lanes of that group; `spread` puts the groups' scales into the same lanes.
 *
 * Lanes along the outputs, for weights that were packed. A lane holds 4 inputs of one output in 8 bits, or 2 in 16 bits
 * (STEP8 of int8 weights; int4 always 4). Weights of 4 bits are packed as they are stored, 8 higher than they are;
 * weights of 8 bits EXCESS8 higher, since some instructions multiply numbers without sign by numbers with sign.
 */
#ifndef MINILLM_DOT_H
#define MINILLM_DOT_H
#include "simd.h"

#if HAS_AVX512
enum { GROUPS = 2 };
typedef __m512i octets;
#elif HAS_AVX2
enum { GROUPS = 1 };
typedef __m256i octets;
#elif HAS_NEON
enum { GROUPS = 1 };
typedef int8x16x2_t octets;
#else
enum { GROUPS = 1 };
typedef struct {
    int8_t number[32];
} octets;
#endif

/* SHORT4: sums of products of weights of 4 bits are of 16 bits until `total4`. */
#if HAS_AVX512 && defined(__AVX512VNNI__)
#define HAS_VNNI 1
enum { STEP8 = 4, EXCESS8 = 128, SHORT4 = 0, PACKED = 1 };
#elif HAS_AVX512 || HAS_AVX2
enum { STEP8 = 2, EXCESS8 = 0, SHORT4 = 1, PACKED = 0 };
#else
enum { STEP8 = 4, EXCESS8 = 0, SHORT4 = 0, PACKED = 0 };
#endif

/* --- lanes along the inputs --------------------------------------------------------------------------------------- */

INLINE octets load_octets(const void *p) {
#if HAS_AVX512
    return _mm512_loadu_si512(p);
#elif HAS_AVX2
    return _mm256_loadu_si256(p);
#elif HAS_NEON
    return (octets){{vld1q_s8(p), vld1q_s8((const int8_t *)p + 16)}};
#else
    octets v;
    memcpy(&v, p, sizeof v);
    return v;
#endif
}

/* From 4 bits, 0 to 15. The 16 bytes of a group hold numbers j and j + 16 in byte j. */
INLINE octets load_nibbles(const void *p) {
#if HAS_AVX512
    __m512i stored = _mm512_castsi256_si512(_mm256_loadu_si256(p));
    __m512i twice = _mm512_permutexvar_epi64(_mm512_set_epi64(3, 2, 3, 2, 1, 0, 1, 0), stored);
    __m512i low_or_high = _mm512_srlv_epi64(twice, _mm512_set_epi64(4, 4, 0, 0, 4, 4, 0, 0));
    return _mm512_and_si512(low_or_high, _mm512_set1_epi8(15));
#elif HAS_AVX2
    __m128i stored = _mm_loadu_si128(p);
    __m256i low_or_high = _mm256_inserti128_si256(_mm256_castsi128_si256(stored), _mm_srli_epi16(stored, 4), 1);
    return _mm256_and_si256(low_or_high, _mm256_set1_epi8(15));
#elif HAS_NEON
    uint8x16_t stored = vld1q_u8(p), low = vandq_u8(stored, vdupq_n_u8(15));
    return (octets){{vreinterpretq_s8_u8(low), vreinterpretq_s8_u8(vshrq_n_u8(stored, 4))}};
#else
    octets v;
    const uint8_t *stored = p;
    for (int i = 0; i < 16; i++) v.number[i] = stored[i] & 15, v.number[i + 16] = stored[i] >> 4;
    return v;
#endif
}

#if HAS_NEON
/* s + the products of 16 numbers, four to a lane */
INLINE int32x4_t add_dot(int32x4_t s, int8x16_t w, int8x16_t x) {
#if defined(__ARM_FEATURE_DOTPROD)
    return vdotq_s32(s, w, x);
#else
    int16x8_t low = vmull_s8(vget_low_s8(w), vget_low_s8(x)), high = vmull_high_s8(w, x);
    return vaddq_s32(s, vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high)));
#endif
}
#endif

/* w without sign. Two products must fit into 16 bits: w up to 128. */
INLINE ints dot_unsigned(octets w, octets x) {
#if HAS_VNNI
    return (ints)_mm512_dpbusd_epi32(_mm512_setzero_si512(), w, x);
#elif HAS_AVX512
    return (ints)_mm512_madd_epi16(_mm512_maddubs_epi16(w, x), _mm512_set1_epi16(1));
#elif HAS_AVX2
    return (ints)_mm256_madd_epi16(_mm256_maddubs_epi16(w, x), _mm256_set1_epi16(1));
#elif HAS_NEON
    return (ints)add_dot(add_dot(vdupq_n_s32(0), w.val[0], x.val[0]), w.val[1], x.val[1]);
#else
    ints s = {0};
    for (int i = 0; i < 32; i++) s[i % LANES] += w.number[i] * x.number[i];
    return s;
#endif
}

/* w with sign; x above -128. */
INLINE ints dot_signed(octets w, octets x) {
#if HAS_AVX512 /* |w| times x with the sign of w */
    return dot_unsigned(_mm512_abs_epi8(w), _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(w), _mm512_setzero_si512(), x));
#elif HAS_AVX2
    return dot_unsigned(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
#else
    return dot_unsigned(w, x);
#endif
}

/* Weights of 4 bits are read GROUPS4 groups at a time, and x so that `dot_nibbles` needs no permutation of weights. */
#if HAS_AVX2
enum { GROUPS4 = 2 };
#else
enum { GROUPS4 = GROUPS };
#endif

INLINE void load_for_nibbles(const int8_t *x, octets *to) {
    to[0] = load_octets(x);
#if HAS_AVX2 /* the first halves of two groups, and the second ones */
    octets next = load_octets(x + 32);
    to[1] = _mm256_permute2x128_si256(to[0], next, 0x31);
    to[0] = _mm256_permute2x128_si256(to[0], next, 0x20);
#endif
}

INLINE ints dot_nibbles(const void *w, const octets *x) {
#if HAS_AVX2 /* four products fit into 16 bits */
    __m256i stored = _mm256_loadu_si256(w), mask = _mm256_set1_epi8(15);
    __m256i low = _mm256_maddubs_epi16(_mm256_and_si256(stored, mask), x[0]);
    __m256i high = _mm256_maddubs_epi16(_mm256_and_si256(_mm256_srli_epi16(stored, 4), mask), x[1]);
    return (ints)_mm256_madd_epi16(_mm256_add_epi16(low, high), _mm256_set1_epi16(1));
#else
    return dot_unsigned(load_nibbles(w), x[0]);
#endif
}

/* The scales of GROUPS4 groups, each in the lanes of its group. */
INLINE floats spread4(const float *scales) {
#if HAS_AVX2
    double both;
    memcpy(&both, scales, sizeof both);
    __m256 repeated = _mm256_castpd_ps(_mm256_set1_pd(both));
    return (floats)_mm256_permutevar_ps(repeated, _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1));
#elif HAS_AVX512
    return (floats)_mm512_insertf32x8(_mm512_set1_ps(scales[0]), _mm256_set1_ps(scales[1]), 1);
#else
    return splat(scales[0]);
#endif
}

/* The scales of GROUPS groups, each in the lanes of its group. */
INLINE floats spread(const float *scales) {
#if HAS_AVX512
    return (floats)_mm512_insertf32x8(_mm512_set1_ps(scales[0]), _mm256_set1_ps(scales[1]), 1);
#else
    return splat(scales[0]);
#endif
}

/* --- lanes along the outputs -------------------------------------------------------------------------------------- */

/* s + w * x of the numbers in each lane, summed by lane */
INLINE ints add_products8(ints s, ints w, ints x) {
#if HAS_VNNI
    return (ints)_mm512_dpbusd_epi32((__m512i)s, (__m512i)w, (__m512i)x);
#elif HAS_AVX512
    return s + (ints)_mm512_madd_epi16((__m512i)w, (__m512i)x);
#elif HAS_AVX2
    return s + (ints)_mm256_madd_epi16((__m256i)w, (__m256i)x);
#elif HAS_NEON
    return (ints)add_dot((int32x4_t)s, (int8x16_t)w, (int8x16_t)x);
#else
    int8_t numbers[2][4 * LANES];
    memcpy(numbers[0], &w, sizeof w);
    memcpy(numbers[1], &x, sizeof x);
    for (int i = 0; i < 4 * LANES; i++) s[i / 4] += numbers[0][i] * numbers[1][i];
    return s;
#endif
}

/* The same for w from 0 to 15. Lanes may hold two sums of 16 bits, which have room for one group: 8 additions of at most
 * 2 * 15 * 127. `total4` adds them up. */
INLINE ints add_products4(ints s, ints w, ints x) {
#if HAS_AVX512 && !HAS_VNNI
    return (ints)_mm512_add_epi16((__m512i)s, _mm512_maddubs_epi16((__m512i)w, (__m512i)x));
#elif HAS_AVX2
    return (ints)_mm256_add_epi16((__m256i)s, _mm256_maddubs_epi16((__m256i)w, (__m256i)x));
#else
    return add_products8(s, w, x);
#endif
}

INLINE ints total4(ints s) {
#if HAS_AVX512 && !HAS_VNNI
    return (ints)_mm512_madd_epi16((__m512i)s, _mm512_set1_epi16(1));
#elif HAS_AVX2
    return (ints)_mm256_madd_epi16((__m256i)s, _mm256_set1_epi16(1));
#else
    return s;
#endif
}

/* 16 bytes of each of LANES rows, those `at` bytes after its beginning: vector j has bytes 4 j to 4 j + 3 of each row. */
INLINE void gather_16_bytes(const char *const *rows, int64_t at, ints *to) {
#if HAS_AVX512 || HAS_AVX2
    ints four[4], pair[4]; /* four[i]: 16 bytes of each fourth row, from row i on */
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        __m128i first = _mm_loadu_si128((const void *)(rows[i] + at));
        __m128i second = _mm_loadu_si128((const void *)(rows[i + 4] + at));
#if HAS_AVX512
        __m128i third = _mm_loadu_si128((const void *)(rows[i + 8] + at));
        __m128i fourth = _mm_loadu_si128((const void *)(rows[i + 12] + at));
        __m512i two = _mm512_inserti32x4(_mm512_castsi128_si512(first), second, 1);
        four[i] = (ints)_mm512_inserti32x4(_mm512_inserti32x4(two, third, 2), fourth, 3);
#else
        four[i] = (ints)_mm256_inserti128_si256(_mm256_castsi128_si256(first), second, 1);
#endif
    }
#if HAS_AVX512
#define LOW(SIZE, A, B) (ints)_mm512_unpacklo_epi##SIZE((__m512i)A, (__m512i)B)
#define HIGH(SIZE, A, B) (ints)_mm512_unpackhi_epi##SIZE((__m512i)A, (__m512i)B)
#else
#define LOW(SIZE, A, B) (ints)_mm256_unpacklo_epi##SIZE((__m256i)A, (__m256i)B)
#define HIGH(SIZE, A, B) (ints)_mm256_unpackhi_epi##SIZE((__m256i)A, (__m256i)B)
#endif
    pair[0] = LOW(32, four[0], four[1]), pair[1] = LOW(32, four[2], four[3]);
    pair[2] = HIGH(32, four[0], four[1]), pair[3] = HIGH(32, four[2], four[3]);
    to[0] = LOW(64, pair[0], pair[1]), to[1] = HIGH(64, pair[0], pair[1]);
    to[2] = LOW(64, pair[2], pair[3]), to[3] = HIGH(64, pair[2], pair[3]);
#undef LOW
#undef HIGH
#else
    for (int o = 0; o < LANES; o++) {
        int32_t four[4];
        memcpy(four, rows[o] + at, sizeof four);
        for (int j = 0; j < 4; j++) to[j][o] = four[j];
    }
#endif
}

/* [LANES, 8] -> [8, LANES]; rows of `from` are `stride` apart. */
INLINE void transpose(const int32_t *from, int64_t stride, int32_t *to) {
#if HAS_AVX512 || HAS_AVX2
    for (int o = 0; o < LANES; o += 8, from += 8 * stride) {
        __m256i row[8], pair[8], four[8];
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) row[i] = _mm256_loadu_si256((const void *)(from + i * stride));
#pragma GCC unroll 4
        for (int i = 0; i < 8; i += 2) {
            pair[i] = _mm256_unpacklo_epi32(row[i], row[i + 1]);
            pair[i + 1] = _mm256_unpackhi_epi32(row[i], row[i + 1]);
        }
#pragma GCC unroll 2
        for (int i = 0; i < 8; i += 4) {
            four[i] = _mm256_unpacklo_epi64(pair[i], pair[i + 2]);
            four[i + 1] = _mm256_unpackhi_epi64(pair[i], pair[i + 2]);
            four[i + 2] = _mm256_unpacklo_epi64(pair[i + 1], pair[i + 3]);
            four[i + 3] = _mm256_unpackhi_epi64(pair[i + 1], pair[i + 3]);
        }
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            __m256i first = _mm256_permute2x128_si256(four[i], four[i + 4], 0x20);
            __m256i second = _mm256_permute2x128_si256(four[i], four[i + 4], 0x31);
            _mm256_storeu_si256((void *)(to + i * LANES + o), first);
            _mm256_storeu_si256((void *)(to + (i + 4) * LANES + o), second);
        }
    }
#else
    for (int i = 0; i < 8; i++)
        for (int o = 0; o < LANES; o++) to[i * LANES + o] = from[o * stride + i];
#endif
}

/* --- one row of x ------------------------------------------------------------------------------------------------- */

#if HAS_VNNI
/* The first `count` bytes, 0 to 64 or more, then zeros. */
INLINE __m512i load_part_64(const void *p, int64_t count) {
    return count >= 64 ? _mm512_loadu_si512(p) : _mm512_maskz_loadu_epi8(_bzhi_u64(~0ULL, count < 0 ? 0 : count), p);
}

/* The sums of each four neighbouring lanes, those of a, b, c and d side by side. */
INLINE __m512i sum_fours(const __m512i *v) {
    __m512i low = _mm512_add_epi32(_mm512_unpacklo_epi32(v[0], v[1]), _mm512_unpackhi_epi32(v[0], v[1]));
    __m512i high = _mm512_add_epi32(_mm512_unpacklo_epi32(v[2], v[3]), _mm512_unpackhi_epi32(v[2], v[3]));
    return _mm512_add_epi32(_mm512_unpacklo_epi64(low, high), _mm512_unpackhi_epi64(low, high));
}

/* Of two vectors of four parts: parts 0 and 2 of each, or 1 and 3. */
#define EVEN_PARTS(A, B) _mm512_shuffle_i32x4(A, B, 0x88)
#define ODD_PARTS(A, B) _mm512_shuffle_i32x4(A, B, 0xDD)

/* Sums of products of 2 groups (int8) or 4 (int4) of LANES rows of W with x, by row: sums[i] are those of group i.
 * `left` bytes of each row exist. Weights are taken as much higher as packed ones. */
INLINE void dot_row(const int format, const char *const *rows, int64_t at, int64_t left, const int8_t *x, ints *sums) {
    const int64_t numbers = format == INT8 ? left : 2 * left;
    __m512i first = load_part_64(x, numbers), second = first, quarter[4];
    if (format == INT4) {
        __m512i more = load_part_64(x + 64, numbers - 64);
        second = ODD_PARTS(first, more), first = EVEN_PARTS(first, more);
    }
#pragma GCC unroll 4
    for (int o = 0; o < LANES; o += 4) {
        __m512i dots[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            __m512i w = load_part_64(rows[o + i] + at, left), zero = _mm512_setzero_si512();
            if (format == INT8) {
                dots[i] = _mm512_dpbusd_epi32(zero, _mm512_xor_si512(w, _mm512_set1_epi8(-128)), first);
            } else {
                __m512i low = _mm512_and_si512(w, _mm512_set1_epi8(15));
                __m512i high = _mm512_and_si512(_mm512_srli_epi16(w, 4), _mm512_set1_epi8(15));
                dots[i] = _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(zero, low, first), high, second);
            }
        }
        quarter[o / 4] = sum_fours(dots); /* its four parts: the halves of two groups, or four groups */
    }
    __m512i even[2], odd[2];
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
        even[i] = EVEN_PARTS(quarter[2 * i], quarter[2 * i + 1]);
        odd[i] = ODD_PARTS(quarter[2 * i], quarter[2 * i + 1]);
        if (format == INT8) even[i] = _mm512_add_epi32(even[i], odd[i]);
    }
    if (format == INT8) {
        sums[0] = (ints)EVEN_PARTS(even[0], even[1]), sums[1] = (ints)ODD_PARTS(even[0], even[1]);
    } else {
        sums[0] = (ints)EVEN_PARTS(even[0], even[1]), sums[2] = (ints)ODD_PARTS(even[0], even[1]);
        sums[1] = (ints)EVEN_PARTS(odd[0], odd[1]), sums[3] = (ints)ODD_PARTS(odd[0], odd[1]);
    }
}
#endif
#endif
