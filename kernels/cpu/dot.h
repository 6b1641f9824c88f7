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

#if HAS_AVX512 && defined(__AVX512VNNI__)
#define HAS_VNNI 1
enum { STEP8 = 4, EXCESS8 = 128 };
#elif HAS_AVX512 || HAS_AVX2
enum { STEP8 = 2, EXCESS8 = 0 };
#else
enum { STEP8 = 4, EXCESS8 = 0 };
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
#endif
