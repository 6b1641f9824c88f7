/* Products of integers of 8 and 4 bits with integers of 8 bits, summed as 32 bits. They have no portable form.
 *
 * Lanes along the inputs, for weights as they are stored: `dot_rows` sums across lanes what is in each group.
 *
 * Lanes along the outputs, for weights that were packed. A lane holds 4 inputs of one output in 8 bits, or 2 in 16 bits
 * (STEP8 of int8 weights; int4 always 4). Weights of 4 bits are packed as they are stored, 8 higher than they are;
 * weights of 8 bits EXCESS8 higher, since some instructions multiply numbers without sign by numbers with sign. Those
 * in 16 bits are TIMES8 as large, so that `split_four` needs no extension of signs: of 4 inputs it makes two pairs,
 * the even and the odd ones, and x is stored in this order.
 *
 * Pairs of outputs, on AArch64 with products of matrices of integers (HAS_I8MM): of two packed vectors the first has 8
 * inputs of outputs 0 and 1, the second those of outputs 2 and 3. An instruction multiplies two outputs by two rows of x
 * (`add_packed` in integers.h), and has twice as many products as one with the lanes along the outputs.
 */
#ifndef MINILLM_DOT_H
#define MINILLM_DOT_H
#include "simd.h"

/* SHORT4: sums of products of weights of 4 bits are of 16 bits until `total4`. */
#if HAS_AVX512 && defined(__AVX512VNNI__)
#define HAS_VNNI 1
enum { STEP8 = 4, EXCESS8 = 128, TIMES8 = 1, SHORT4 = 0 };
#elif HAS_AVX512 || HAS_AVX2
enum { STEP8 = 2, EXCESS8 = 0, TIMES8 = 256, SHORT4 = 1 };
#else
enum { STEP8 = 4, EXCESS8 = 0, TIMES8 = 1, SHORT4 = 0 };
#endif

#if HAS_NEON && defined(__ARM_FEATURE_MATMUL_INT8)
#define HAS_I8MM 1
#endif

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

/* --- lanes along the inputs --------------------------------------------------------------------------------------- */

/* Groups of 32 that are read at once of a row of W with 8 and with 4 bits. The 16 bytes of a group of 4 bits hold
 * numbers j and j + 16 in byte j. */
#if HAS_AVX512
enum { AT_ONCE8 = 2, AT_ONCE4 = 4 };
typedef __m512i octets;
#elif HAS_AVX2
enum { AT_ONCE8 = 1, AT_ONCE4 = 2 };
typedef __m256i octets;
#else
enum { AT_ONCE8 = 1, AT_ONCE4 = 1 };
#if HAS_NEON
typedef int8x16_t octets;
#else
typedef struct {
    int8_t number[16];
} octets;
#endif
#endif

/* Of W with 8 bits on x86 the numbers, and what they are multiplied as; else two halves of groups, of W or x. */
typedef struct {
    octets v[2];
} halves;

#if HAS_AVX512 || HAS_AVX2
/* The first `count` bytes, then zeros. */
INLINE octets load_octets(const void *p, int64_t count) {
#if HAS_AVX512
    return count >= 64 ? _mm512_loadu_si512(p) : _mm512_maskz_loadu_epi8(_bzhi_u64(~0ULL, count < 0 ? 0 : count), p);
#else
    char part[32] = {0};
    if (count < 32) p = memcpy(part, p, count < 0 ? 0 : count);
    return _mm256_loadu_si256(p);
#endif
}

INLINE octets low_nibbles(octets v) {
#if HAS_AVX512
    return _mm512_and_si512(v, _mm512_set1_epi8(15));
#else
    return _mm256_and_si256(v, _mm256_set1_epi8(15));
#endif
}
#endif

#if HAS_AVX512 || HAS_AVX2
/* Numbers of 8 bits, and what they are multiplied as. */
INLINE halves as_factors(octets stored) {
#if HAS_AVX512
    return (halves){{stored, EXCESS8 ? _mm512_xor_si512(stored, _mm512_set1_epi8(-128)) : _mm512_abs_epi8(stored)}};
#else
    return (halves){{stored, _mm256_abs_epi8(stored)}};
#endif
}
#endif

/* The next groups of a row of W, of which `left` bytes exist. */
INLINE halves load_row(const int format, const char *p, int64_t left) {
    halves w;
#if HAS_AVX512
    octets stored = load_octets(p, left);
    if (format == INT4) {
        w.v[0] = low_nibbles(stored), w.v[1] = low_nibbles(_mm512_srli_epi16(stored, 4));
    } else {
        w = as_factors(stored);
    }
#elif HAS_AVX2
    octets stored = load_octets(p, left);
    __asm__("" : "+x"(stored)); /* GCC would otherwise load it twice */
    if (format == INT4) {
        w.v[0] = low_nibbles(stored), w.v[1] = low_nibbles(_mm256_srli_epi16(stored, 4));
    } else {
        w = as_factors(stored);
    }
#else
    (void)left;
    memcpy(&w, p, format == INT8 ? 32 : 16);
    if (format == INT4) {
#if HAS_NEON
        uint8x16_t stored = vreinterpretq_u8_s8(w.v[0]);
        w.v[0] = vreinterpretq_s8_u8(vandq_u8(stored, vdupq_n_u8(15)));
        w.v[1] = vreinterpretq_s8_u8(vshrq_n_u8(stored, 4));
#else
        for (int i = 0; i < 16; i++) {
            uint8_t both = (uint8_t)w.v[0].number[i];
            w.v[0].number[i] = both & 15, w.v[1].number[i] = both >> 4;
        }
#endif
    }
#endif
    return w;
}

/* What meets them of a row of x, of which `left` bytes exist, and 32 more with AVX2. */
INLINE halves load_x(const int format, const int8_t *p, int64_t left) {
    halves x;
#if HAS_AVX512
    octets own = load_octets(p, left), more = own;
    if (format == INT4) more = load_octets(p + 64, left - 64);
    x.v[0] = format == INT4 ? _mm512_shuffle_i32x4(own, more, 0x88) : own;
    x.v[1] = _mm512_shuffle_i32x4(own, more, 0xDD);
#elif HAS_AVX2
    (void)left;
    octets own = load_octets(p, 32), more = own;
    if (format == INT4) more = load_octets(p + 32, 32);
    x.v[0] = format == INT4 ? _mm256_permute2x128_si256(own, more, 0x20) : own;
    x.v[1] = _mm256_permute2x128_si256(own, more, 0x31);
#else
    (void)format, (void)left;
    memcpy(&x, p, 32);
#endif
    return x;
}

/* As `load_x` with 4 bits, but in the order of x. */
INLINE halves load_x_in_order(const int8_t *p, int64_t left) {
    halves x;
#if HAS_AVX512 || HAS_AVX2
    const int64_t size = sizeof(octets);
    for (int i = 0; i < 2; i++) x.v[i] = load_octets(p + i * size, LANES == 16 ? left - i * size : size);
#else
    (void)left;
    memcpy(&x, p, sizeof x);
#endif
    return x;
}

/* Parts of the sums of products: in each four lanes those of a group of 4 bits, in each eight of a group of 8 bits;
 * elsewhere than on x86 of one group. Where the lanes are two sums of 16 bits, `sum_fours` adds them up. */
INLINE ints dot(const int format, halves w, halves x) {
#if HAS_VNNI
    __m512i zero = _mm512_setzero_si512();
    if (format == INT8) return (ints)_mm512_dpbusd_epi32(zero, w.v[1], x.v[0]);
    return (ints)_mm512_dpbusd_epi32(_mm512_dpbusd_epi32(zero, w.v[0], x.v[0]), w.v[1], x.v[1]);
#elif HAS_AVX512
    __m512i pairs;
    if (format == INT8) { /* |w| times x with the sign of w */
        octets same = _mm512_mask_sub_epi8(x.v[0], _mm512_movepi8_mask(w.v[0]), _mm512_setzero_si512(), x.v[0]);
        pairs = _mm512_maddubs_epi16(w.v[1], same);
    } else { /* four products fit into 16 bits */
        pairs = _mm512_add_epi16(_mm512_maddubs_epi16(w.v[0], x.v[0]), _mm512_maddubs_epi16(w.v[1], x.v[1]));
    }
    return (ints)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
#elif HAS_AVX2
    if (format == INT4) /* sixteen products fit into 16 bits */
        return (ints)_mm256_add_epi16(_mm256_maddubs_epi16(w.v[0], x.v[0]), _mm256_maddubs_epi16(w.v[1], x.v[1]));
    __m256i pairs = _mm256_maddubs_epi16(w.v[1], _mm256_sign_epi8(x.v[0], w.v[0]));
    return (ints)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#elif HAS_NEON
    (void)format;
    return (ints)add_dot(add_dot(vdupq_n_s32(0), w.v[0], x.v[0]), w.v[1], x.v[1]);
#else
    ints s = {0};
    (void)format;
    for (int i = 0; i < 32; i++) s[i % 4] += w.v[i / 16].number[i % 16] * x.v[i / 16].number[i % 16];
    return s;
#endif
}

/* The products of 16 numbers in each 16 bytes, w from 0 to 63, as `dot` has them: parts that may be added once if w is
 * not above 31, and that `sum_fours` adds up as sums of BYTES. */
INLINE ints dot_bytes(octets w, octets x) {
#if HAS_VNNI
    return (ints)_mm512_dpbusd_epi32(_mm512_setzero_si512(), w, x);
#elif HAS_AVX512
    return (ints)_mm512_madd_epi16(_mm512_maddubs_epi16(w, x), _mm512_set1_epi16(1));
#elif HAS_AVX2
    return (ints)_mm256_maddubs_epi16(w, x);
#elif HAS_NEON
    return (ints)add_dot(vdupq_n_s32(0), w, x);
#else
    ints s = {0};
    for (int i = 0; i < 16; i++) s[i % 4] += w.number[i] * x.number[i];
    return s;
#endif
}

/* |x|, which `dot_signs` multiplies in place of it. */
INLINE octets sizes_of(octets x) {
#if HAS_AVX512
    return _mm512_abs_epi8(x);
#elif HAS_AVX2
    return _mm256_abs_epi8(x);
#else
    return x;
#endif
}

/* As `dot_bytes` for w from -127 to 127, taken EXCESS8 higher; its sums are of 32 bits, as those of INT8 are. */
INLINE ints dot_signs(octets w, octets x, octets sizes) {
#if HAS_VNNI
    (void)sizes;
    return dot_bytes(_mm512_xor_si512(w, _mm512_set1_epi8(-128)), x);
#elif HAS_AVX512
    octets same = _mm512_mask_sub_epi8(w, _mm512_movepi8_mask(x), _mm512_setzero_si512(), w);
    return (ints)_mm512_madd_epi16(_mm512_maddubs_epi16(sizes, same), _mm512_set1_epi16(1));
#elif HAS_AVX2
    return (ints)_mm256_madd_epi16(_mm256_maddubs_epi16(sizes, _mm256_sign_epi8(w, x)), _mm256_set1_epi16(1));
#else
    (void)sizes;
    return dot_bytes(w, x);
#endif
}

/* The sums of two results of `dot_bytes`. */
INLINE ints add_parts(ints a, ints b) {
#if HAS_AVX2
    return (ints)_mm256_add_epi16((__m256i)a, (__m256i)b);
#else
    return a + b;
#endif
}

enum { BYTES = -1 }; /* sums of `dot_bytes`, in place of a format */

/* The sums of each four neighbouring lanes of four vectors side by side, in two steps: of two vectors `add_twos`, then of
 * both results `add_fours`. */
#if HAS_AVX512
#define PAIR(SIZE, WIDTH, A, B) \
    (ints)_mm512_add_epi32(_mm512_unpacklo_epi##SIZE((__m512i)A, (__m512i)B), \
                           _mm512_unpackhi_epi##SIZE((__m512i)A, (__m512i)B))
#elif HAS_AVX2
#define PAIR(SIZE, WIDTH, A, B) \
    (ints)_mm256_add_epi##WIDTH(_mm256_unpacklo_epi##SIZE((__m256i)A, (__m256i)B), \
                                _mm256_unpackhi_epi##SIZE((__m256i)A, (__m256i)B))
#endif

INLINE ints add_twos(const int format, ints a, ints b) {
    (void)format;
#if HAS_AVX512
    return PAIR(32, 32, a, b);
#elif HAS_AVX2
    return format == INT8 ? PAIR(32, 32, a, b) : PAIR(64, 16, a, b);
#elif HAS_NEON
    return (ints)vpaddq_s32((int32x4_t)a, (int32x4_t)b);
#else
    ints s = {0};
    s[0] = a[0] + a[1], s[1] = a[2] + a[3], s[2] = b[0] + b[1], s[3] = b[2] + b[3];
    return s;
#endif
}

INLINE ints add_fours(const int format, ints low, ints high) {
    (void)format;
#if HAS_AVX512
    return PAIR(64, 32, low, high);
#elif HAS_AVX2
    if (format == INT8) return PAIR(64, 32, low, high);
    __m256i even = (__m256i)_mm256_shuffle_ps((__m256)low, (__m256)high, 0x88);
    __m256i odd = (__m256i)_mm256_shuffle_ps((__m256)low, (__m256)high, 0xDD), ones = _mm256_set1_epi16(1);
    if (format == BYTES) /* eight products of 31, or four of 63, fit into 16 bits */
        return (ints)_mm256_add_epi32(_mm256_madd_epi16(even, ones), _mm256_madd_epi16(odd, ones));
    return (ints)_mm256_madd_epi16(_mm256_add_epi16(even, odd), ones);
#else
    return add_twos(format, low, high);
#endif
}

INLINE ints sum_fours(const int format, const ints *v) {
    return add_fours(format, add_twos(format, v[0], v[1]), add_twos(format, v[2], v[3]));
}

/* sums[i] has group i of LANES rows; fours[o] are the sums of rows 4 o to 4 o + 3. */
INLINE void arrange(const int format, const ints *fours, ints *sums) {
#if HAS_AVX512 /* of two vectors of four parts: parts 0 and 2 of each, or 1 and 3 */
#define EVEN_PARTS(A, B) _mm512_shuffle_i32x4((__m512i)A, (__m512i)B, 0x88)
#define ODD_PARTS(A, B) _mm512_shuffle_i32x4((__m512i)A, (__m512i)B, 0xDD)
    __m512i even[2], odd[2];
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
        even[i] = EVEN_PARTS(fours[2 * i], fours[2 * i + 1]);
        odd[i] = ODD_PARTS(fours[2 * i], fours[2 * i + 1]);
        if (format == INT8) even[i] = _mm512_add_epi32(even[i], odd[i]);
    }
    if (format == INT8) {
        sums[0] = (ints)EVEN_PARTS(even[0], even[1]), sums[1] = (ints)ODD_PARTS(even[0], even[1]);
    } else {
        sums[0] = (ints)EVEN_PARTS(even[0], even[1]), sums[2] = (ints)ODD_PARTS(even[0], even[1]);
        sums[1] = (ints)EVEN_PARTS(odd[0], odd[1]), sums[3] = (ints)ODD_PARTS(odd[0], odd[1]);
    }
#undef EVEN_PARTS
#undef ODD_PARTS
#elif HAS_AVX2
    __m256i first = (__m256i)fours[0], second = (__m256i)fours[1];
    sums[0] = (ints)_mm256_permute2x128_si256(first, second, 0x20);
    sums[1] = (ints)_mm256_permute2x128_si256(first, second, 0x31);
    if (format == INT8) sums[0] += sums[1];
#else
    ints all = {0};
    for (int o = 0; o < LANES; o++) all[o] = fours[o / 4][o % 4];
    sums[0] = all;
#endif
}

/* sums[r][i] = x[r] @ W.T in group i of those that are read at once, for R rows of x and LANES rows of W, of which
 * `left` bytes exist from byte `at` on. Weights are taken as much higher as packed ones. */
INLINE void dot_rows(const int format, const int R, const char *const *rows, int64_t at, int64_t left, const int8_t *x,
                     int64_t x_stride, ints sums[][4]) {
    halves own[4];
    ints fours[4][LANES / 4];
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) own[r] = load_x(format, x + r * x_stride, format == INT8 ? left : 2 * left);
#pragma GCC unroll 4
    for (int o = 0; o < LANES; o += 4) {
        ints dots[4][4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            halves w = load_row(format, rows[o + i] + at, left);
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) dots[r][i] = dot(format, w, own[r]);
        }
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) fours[r][o / 4] = sum_fours(format, dots[r]);
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) arrange(format, fours[r], sums[r]);
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

#if HAS_NEON && defined(__ARM_FEATURE_DOTPROD)
#define HAS_DOT_LANES 1
/* The same with numbers 4 j to 4 j + 3 of 16 of x in every lane. */
INLINE ints add_products_of(const int j, ints s, ints w, ints x) {
    int32x4_t sum = (int32x4_t)s;
    int8x16_t numbers = (int8x16_t)x;
    switch (j) {
    case 0: return (ints)vdotq_laneq_s32(sum, (int8x16_t)w, numbers, 0);
    case 1: return (ints)vdotq_laneq_s32(sum, (int8x16_t)w, numbers, 1);
    case 2: return (ints)vdotq_laneq_s32(sum, (int8x16_t)w, numbers, 2);
    default: return (ints)vdotq_laneq_s32(sum, (int8x16_t)w, numbers, 3);
    }
}
#endif

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
#elif HAS_NEON
    int32x4_t own[LANES];
    for (int o = 0; o < LANES; o++) memcpy(&own[o], rows[o] + at, sizeof own[o]);
    int64x2_t low = (int64x2_t)vtrn1q_s32(own[0], own[1]), other_low = (int64x2_t)vtrn1q_s32(own[2], own[3]);
    int64x2_t high = (int64x2_t)vtrn2q_s32(own[0], own[1]), other_high = (int64x2_t)vtrn2q_s32(own[2], own[3]);
    to[0] = (ints)vzip1q_s64(low, other_low), to[1] = (ints)vzip1q_s64(high, other_high);
    to[2] = (ints)vzip2q_s64(low, other_low), to[3] = (ints)vzip2q_s64(high, other_high);
#else
    for (int o = 0; o < LANES; o++) {
        int32_t four[4];
        memcpy(four, rows[o] + at, sizeof four);
        for (int j = 0; j < 4; j++) to[j][o] = four[j];
    }
#endif
}

/* The same as packed weights have them: with pairs of outputs vectors 2 j and 2 j + 1 have bytes 8 j to 8 j + 7. */
INLINE void gather_packed(const char *const *rows, int64_t at, ints *to) {
#if HAS_I8MM
    int64x2_t own[LANES];
    for (int o = 0; o < LANES; o++) memcpy(&own[o], rows[o] + at, sizeof own[o]);
    to[0] = (ints)vzip1q_s64(own[0], own[1]), to[1] = (ints)vzip1q_s64(own[2], own[3]);
    to[2] = (ints)vzip2q_s64(own[0], own[1]), to[3] = (ints)vzip2q_s64(own[2], own[3]);
#else
    gather_16_bytes(rows, at, to);
#endif
}

/* 32 integers as 16 bits: of each four the even ones, then the odd ones. */
INLINE void store_split(int16_t *p, const ints *v) {
#if HAS_AVX512 || HAS_AVX2
    for (int i = 0; i < 2; i++, p += 16) {
#if HAS_AVX512
        __m256i numbers = _mm512_cvtepi32_epi16((__m512i)v[i]);
#else
        __m256i both = _mm256_packs_epi32((__m256i)v[2 * i], (__m256i)v[2 * i + 1]);
        __m256i numbers = _mm256_permute4x64_epi64(both, 0xD8);
#endif
        _mm256_storeu_si256((void *)p, _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(numbers, 0xD8), 0xD8));
    }
#else
    static const int order[] = {0, 2, 1, 3};
    for (int i = 0; i < 32; i++) {
        int from = i / 4 * 4 + order[i % 4];
        p[i] = (int16_t)v[from / LANES][from % LANES];
    }
#endif
}

/* Of the four bytes in each lane the even ones, times 256, then the odd ones. */
INLINE void split_four(ints bytes, ints *to) {
    typedef uint16_t shorts __attribute__((vector_size(4 * LANES)));
    to[0] = (ints)((shorts)bytes << 8);
    to[1] = bytes & (int32_t)0xFF00FF00;
}

/* Eight numbers of each of LANES rows, those `at` bytes after its beginning: [LANES, 8] -> [8, LANES] */
INLINE void transpose(const char *const *rows, int64_t at, int32_t *to) {
#if HAS_AVX512 || HAS_AVX2
    for (int o = 0; o < LANES; o += 8, rows += 8)
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) { /* four numbers of rows i and i + 4 in a vector */
            __m256i two[4], pair[4];
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) {
                __m128i first = _mm_loadu_si128((const void *)(rows[i] + at + 16 * half));
                __m128i second = _mm_loadu_si128((const void *)(rows[i + 4] + at + 16 * half));
                two[i] = _mm256_inserti128_si256(_mm256_castsi128_si256(first), second, 1);
            }
#pragma GCC unroll 2
            for (int i = 0; i < 4; i += 2) {
                pair[i] = _mm256_unpacklo_epi32(two[i], two[i + 1]);
                pair[i + 1] = _mm256_unpackhi_epi32(two[i], two[i + 1]);
            }
#pragma GCC unroll 2
            for (int i = 0; i < 2; i++) {
                int32_t *p = to + (4 * half + 2 * i) * LANES + o;
                _mm256_storeu_si256((void *)p, _mm256_unpacklo_epi64(pair[i], pair[i + 2]));
                _mm256_storeu_si256((void *)(p + LANES), _mm256_unpackhi_epi64(pair[i], pair[i + 2]));
            }
        }
#else
    for (int o = 0; o < LANES; o++) {
        int32_t eight[8];
        memcpy(eight, rows[o] + at, sizeof eight);
        for (int i = 0; i < 8; i++) to[i * LANES + o] = eight[i];
    }
#endif
}
#endif
