/* Vectors of LANES numbers: 16 with AVX-512, 8 with AVX2, 4 with NEON and anywhere else.
 *
 * Arithmetic on them is written with the compiler's operators (GCC and Clang: a + b, a < b, a[i]). Here is what has no
 * operator. Each function has a plain form, and intrinsics where compilers do not find the instruction by themselves.
 * -DPLAIN_LANES=16 (or 8, 4) selects the plain forms alone, to test them on any machine.
 */
#ifndef MINILLM_SIMD_H
#define MINILLM_SIMD_H
#include <stdint.h>
#include <string.h>
#if defined(PLAIN_LANES)
enum { LANES = PLAIN_LANES, VECTOR_REGISTERS = 16 };
#elif defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#include <immintrin.h>
#define HAS_AVX512 1
enum { LANES = 16, VECTOR_REGISTERS = 32 };
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>
#define HAS_AVX2 1
enum { LANES = 8, VECTOR_REGISTERS = 16 };
#elif defined(__aarch64__)
#include <arm_neon.h>
#define HAS_NEON 1
enum { LANES = 4, VECTOR_REGISTERS = 32 };
#else
enum { LANES = 4, VECTOR_REGISTERS = 16 };
#endif

#define INLINE static inline __attribute__((always_inline))

/* Before a loop over the inputs of a tile, which with NEON has few products in a turn beside what counts the turns. */
#define PRAGMA(WORDS) _Pragma(#WORDS)
#if HAS_NEON && defined(__clang__)
#define UNROLL(TURNS) PRAGMA(clang loop unroll_count(TURNS))
#elif HAS_NEON
#define UNROLL(TURNS) PRAGMA(GCC unroll TURNS)
#else
#define UNROLL(TURNS)
#endif

typedef float floats __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef float four_floats __attribute__((vector_size(16)));
typedef double four_doubles __attribute__((vector_size(32)));
typedef uint16_t vector_of_16_bits __attribute__((vector_size(2 * LANES)));
typedef uint8_t vector_of_bytes __attribute__((vector_size(LANES)));

/* --- memory: no address needs to be aligned ---------------------------------------------------------------------- */

INLINE floats load(const float *p) {
    floats v;
    memcpy(&v, p, sizeof v);
    return v;
}

INLINE void store(float *p, floats v) {
    memcpy(p, &v, sizeof v);
}

#if HAS_AVX512
/* The first `count` lanes, 0 to LANES or more. */
INLINE uint16_t first_lanes(int64_t count) {
    return count >= LANES ? 0xFFFF : (1u << count) - 1;
}
#endif

/* The first `count` numbers, 0 to LANES or more, then zeros. */
INLINE floats load_part(const float *p, int64_t count) {
    if (count >= LANES) return load(p);
#if HAS_AVX512
    return (floats)_mm512_maskz_loadu_ps(first_lanes(count), p);
#else
    floats v = {0};
    memcpy(&v, p, sizeof(float) * count);
    return v;
#endif
}

INLINE void store_part(float *p, floats v, int64_t count) {
    if (count >= LANES) {
        store(p, v);
        return;
    }
#if HAS_AVX512
    _mm512_mask_storeu_ps(p, first_lanes(count), (__m512)v);
#else
    memcpy(p, &v, sizeof(float) * count);
#endif
}

INLINE floats splat(float x) {
    return x - (floats){0}; /* not x + 0, which makes 0 of -0 */
}

/* Keeps a vector in a register: GCC would otherwise load it again for each of its uses. */
INLINE void keep(floats *v) {
#if defined(PLAIN_LANES)
    (void)v;
#elif HAS_AVX512
    __asm__("" : "+v"(*v)); /* any of 32 registers */
#elif defined(__x86_64__)
    __asm__("" : "+x"(*v));
#elif defined(__aarch64__)
    __asm__("" : "+w"(*v));
#else
    (void)v;
#endif
}

INLINE void keep_ints(ints *v) {
    floats same = (floats)*v;
    keep(&same);
    *v = (ints)same;
}

/* --- arithmetic --------------------------------------------------------------------------------------------------- */

/* a * b + c, rounded once where the CPU can. Said explicitly: of a * b + c compilers round one copy so, another not. */
INLINE floats multiply_add(floats a, floats b, floats c) {
#if HAS_AVX512
    return (floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif HAS_AVX2
    return (floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif HAS_NEON
    return (floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#elif defined(__FP_FAST_FMAF)
    for (int i = 0; i < LANES; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
#else
    return a * b + c;
#endif
}

/* a where the mask is -1, b where it is 0. Comparisons of vectors are such masks. */
INLINE floats pick(ints mask, floats a, floats b) {
    return (floats)((mask & (ints)a) | (~mask & (ints)b));
}

/* max(a, x); NaN if x is NaN. */
INLINE floats at_least(floats a, floats x) {
#if HAS_AVX512
    return (floats)_mm512_max_ps((__m512)a, (__m512)x);
#elif HAS_AVX2
    return (floats)_mm256_max_ps((__m256)a, (__m256)x);
#else
    return pick(x < a, a, x);
#endif
}

/* min(a, x); NaN if x is NaN. */
INLINE floats at_most(floats a, floats x) {
#if HAS_AVX512
    return (floats)_mm512_min_ps((__m512)a, (__m512)x);
#elif HAS_AVX2
    return (floats)_mm256_min_ps((__m256)a, (__m256)x);
#else
    return pick(x > a, a, x);
#endif
}

INLINE floats magnitude(floats v) {
    return (floats)((ints)v & 0x7FFFFFFF);
}

/* --- across lanes ------------------------------------------------------------------------------------------------- */

/* The halves added until four lanes are left. */
INLINE four_floats fold(floats v) {
#if HAS_AVX512
    __m256 eight = _mm256_add_ps(_mm512_castps512_ps256((__m512)v), _mm512_extractf32x8_ps((__m512)v, 1));
    return (four_floats)_mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
#elif HAS_AVX2
    return (four_floats)_mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
#else
    four_floats part[LANES / 4];
    memcpy(part, &v, sizeof v);
    for (int n = LANES / 8; n; n /= 2)
        for (int i = 0; i < n; i++) part[i] += part[i + n];
    return part[0];
#endif
}

/* The same in double. */
INLINE four_doubles folded(floats v) {
#if HAS_AVX512
    __m256 low = _mm512_castps512_ps256((__m512)v), high = _mm512_extractf32x8_ps((__m512)v, 1);
    __m512d eight = _mm512_add_pd(_mm512_cvtps_pd(low), _mm512_cvtps_pd(high));
    return (four_doubles)_mm256_add_pd(_mm512_castpd512_pd256(eight), _mm512_extractf64x4_pd(eight, 1));
#elif HAS_AVX2
    __m128 low = _mm256_castps256_ps128((__m256)v), high = _mm256_extractf128_ps((__m256)v, 1);
    return (four_doubles)_mm256_add_pd(_mm256_cvtps_pd(low), _mm256_cvtps_pd(high));
#else
    four_floats part[LANES / 4];
    four_doubles found = {0};
    memcpy(part, &v, sizeof v);
    for (int i = 0; i < LANES / 4; i++) found += __builtin_convertvector(part[i], four_doubles);
    return found;
#endif
}

INLINE float sum(floats v) {
    four_floats s = fold(v);
    return (s[0] + s[2]) + (s[1] + s[3]);
}

/* The sums of four vectors: each is the same whatever the others are. */
INLINE four_floats sums(floats a, floats b, floats c, floats d) {
#if HAS_AVX512
    __m512 low = _mm512_add_ps(_mm512_unpacklo_ps((__m512)a, (__m512)b), _mm512_unpackhi_ps((__m512)a, (__m512)b));
    __m512 high = _mm512_add_ps(_mm512_unpacklo_ps((__m512)c, (__m512)d), _mm512_unpackhi_ps((__m512)c, (__m512)d));
    __m512d first = _mm512_unpacklo_pd(_mm512_castps_pd(low), _mm512_castps_pd(high));
    __m512d second = _mm512_unpackhi_pd(_mm512_castps_pd(low), _mm512_castps_pd(high));
    return fold((floats)_mm512_add_ps(_mm512_castpd_ps(first), _mm512_castpd_ps(second)));
#elif HAS_AVX2
    __m256 low = _mm256_hadd_ps((__m256)a, (__m256)b), high = _mm256_hadd_ps((__m256)c, (__m256)d);
    return fold((floats)_mm256_hadd_ps(low, high));
#elif HAS_NEON
    float32x4_t low = vpaddq_f32((float32x4_t)a, (float32x4_t)b), high = vpaddq_f32((float32x4_t)c, (float32x4_t)d);
    return (four_floats)vpaddq_f32(low, high);
#else
    return (four_floats){sum(a), sum(b), sum(c), sum(d)};
#endif
}

/* The largest number of a vector without NaN. */
INLINE float largest(floats v) {
#if HAS_AVX512
    return _mm512_reduce_max_ps((__m512)v);
#elif HAS_AVX2
    __m128 four = _mm_max_ps(_mm256_extractf128_ps((__m256)v, 1), _mm256_castps256_ps128((__m256)v));
    four = _mm_max_ps(_mm_movehl_ps(four, four), four);
    return _mm_cvtss_f32(_mm_max_ss(_mm_movehdup_ps(four), four));
#else
    float x = v[0];
    for (int i = 1; i < LANES; i++) x = v[i] > x ? v[i] : x;
    return x;
#endif
}

INLINE int32_t largest_int(ints v) {
#if HAS_AVX512
    return _mm512_reduce_max_epi32((__m512i)v);
#elif HAS_AVX2
    __m128i four = _mm_max_epi32(_mm256_extracti128_si256((__m256i)v, 1), _mm256_castsi256_si128((__m256i)v));
    four = _mm_max_epi32(_mm_unpackhi_epi64(four, four), four);
    return _mm_cvtsi128_si32(_mm_max_epi32(_mm_shuffle_epi32(four, 1), four));
#else
    int32_t x = v[0];
    for (int i = 1; i < LANES; i++) x = v[i] > x ? v[i] : x;
    return x;
#endif
}

/* --- stored numbers ----------------------------------------------------------------------------------------------- */

/* Formats of stored numbers, as Python numbers them; from Q4_K on the block formats of reference/blocks.py, from NF4 on
 * those of codebooks.h. PAIRS is none of them, but how bfloat16 may be multiplied (floats.h). */
enum {
    FLOAT32, FLOAT16, BFLOAT16, INT8, INT4, Q4_K, Q5_K, Q6_K, Q5_0, Q5_1, IQ4_NL, MXFP4, IQ4_XS, Q3_K, Q2_K, NVFP4, Q5_0X2,
    NF4, FP4, PAIRS
};

/* Whether products with numbers of a format are of integers, for which x is rounded. */
INLINE int has_integers(int64_t format) {
    return format >= INT8 && format < NF4;
}

/* LANES numbers of 16 or 8 bits as 32 bits. */
INLINE words load_16_bits(const uint16_t *p) {
#if HAS_AVX512
    return (words)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)p));
#elif HAS_AVX2
    return (words)_mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)p));
#else
    vector_of_16_bits v;
    memcpy(&v, p, sizeof v);
    return __builtin_convertvector(v, words);
#endif
}

INLINE ints load_bytes(const uint8_t *p) {
#if HAS_AVX512
    return (ints)_mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)p));
#elif HAS_AVX2
    return (ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const void *)p));
#elif HAS_NEON
    uint32_t four;
    memcpy(&four, p, sizeof four);
    return (ints)vmovl_u16(vget_low_u16(vmovl_u8(vreinterpret_u8_u32(vdup_n_u32(four)))));
#else
    vector_of_bytes v;
    memcpy(&v, p, sizeof v);
    return __builtin_convertvector(v, ints);
#endif
}

INLINE floats load_int8(const int8_t *p) {
#if HAS_AVX512
    ints v = (ints)_mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)p));
#elif HAS_AVX2
    ints v = (ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)p));
#else
    ints v = load_bytes((const uint8_t *)p) << 24 >> 24;
#endif
    return __builtin_convertvector(v, floats);
}

INLINE floats load_bfloat16(const uint16_t *p) {
    return (floats)(load_16_bits(p) << 16);
}

INLINE floats load_float16(const uint16_t *p) {
#if HAS_AVX512
    return (floats)_mm512_cvtph_ps(_mm256_loadu_si256((const void *)p));
#elif HAS_AVX2
    return (floats)_mm256_cvtph_ps(_mm_loadu_si128((const void *)p));
#elif HAS_NEON
    float16x4_t v;
    memcpy(&v, p, sizeof v);
    return (floats)vcvt_f32_f16(v);
#else
    words bits = load_16_bits(p), rest = (bits & 0x7FFF) << 13;
    floats scaled = (floats)rest * 0x1p112f; /* moves the exponent, and makes subnormal numbers normal */
    words special = (words)((ints)rest >= 0x0F800000) & 0x7F800000; /* infinity and NaN */
    return (floats)((words)scaled | special | (bits & 0x8000) << 16);
#endif
}

/* Two in each lane: those of the lower 16 bits, and those of the upper ones. */
INLINE void split_float16(ints v, floats *low, floats *high) {
#if HAS_AVX512
    *low = (floats)_mm512_cvtph_ps(_mm512_cvtepi32_epi16((__m512i)v));
    *high = (floats)_mm512_cvtph_ps(_mm512_cvtepi32_epi16((__m512i)(v >> 16)));
#elif HAS_AVX2
    __m256i lower = _mm256_and_si256((__m256i)v, _mm256_set1_epi32(0xFFFF)), upper = _mm256_srli_epi32((__m256i)v, 16);
    __m256i both = _mm256_permute4x64_epi64(_mm256_packus_epi32(lower, upper), 0xD8);
    *low = (floats)_mm256_cvtph_ps(_mm256_castsi256_si128(both));
    *high = (floats)_mm256_cvtph_ps(_mm256_extracti128_si256(both, 1));
#elif HAS_NEON
    *low = (floats)vcvt_f32_f16(vreinterpret_f16_u16(vmovn_u32((uint32x4_t)v)));
    *high = (floats)vcvt_f32_f16(vreinterpret_f16_u16(vshrn_n_u32((uint32x4_t)v, 16)));
#else
    uint16_t part[2][LANES];
    for (int i = 0; i < LANES; i++) part[0][i] = (uint16_t)v[i], part[1][i] = (uint16_t)(v[i] >> 16);
    *low = load_float16(part[0]), *high = load_float16(part[1]);
#endif
}

INLINE float float16_to_float(uint16_t x) {
#if HAS_AVX512 || HAS_AVX2
    return _cvtsh_ss(x);
#else
    uint16_t part[LANES] = {x};
    return load_float16(part)[0];
#endif
}

/* 32 integers that fit into bytes, as these. */
INLINE void store_as_bytes(int8_t *p, const ints *v) {
#if HAS_AVX2
    __m256i low = _mm256_packs_epi32((__m256i)v[0], (__m256i)v[1]);
    __m256i high = _mm256_packs_epi32((__m256i)v[2], (__m256i)v[3]);
    __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    _mm256_storeu_si256((void *)p, _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order));
#else
    typedef int8_t bytes __attribute__((vector_size(LANES)));
    for (int i = 0; i < 32 / LANES; i++) {
        bytes narrow = __builtin_convertvector(v[i], bytes);
        memcpy(p + i * LANES, &narrow, sizeof narrow);
    }
#endif
}

/* The nearest bfloat16, ties to even. NaN stays NaN. */
INLINE void store_bfloat16(uint16_t *p, floats x) {
    words bits = (words)x, rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16, quiet = bits >> 16 | 0x40;
    words number = (words)(x == x);
    vector_of_16_bits v = __builtin_convertvector((number & rounded) | (~number & quiet), vector_of_16_bits);
    memcpy(p, &v, sizeof v);
}
#endif
