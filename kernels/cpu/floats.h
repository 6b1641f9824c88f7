/* Weights that are multiplied as floats: stored as float32, float16, bfloat16 or in code books, or pairs of bfloat16.
 *
 * A pair is two neighbouring inputs, which take a lane of 32 bits, in W as it is stored and in x rounded to bfloat16
 * (`round_to_bfloat16`). One instruction multiplies the pairs of all lanes and adds both products to a float32. So a
 * matrix of pairs is treated as one of float32 with half as many inputs.
 *
 * The instruction takes subnormal numbers as zeros. Intel's VDPBF16PS and Arm's BFDOT round the sums of a pair in ways of
 * their own.
 */
#ifndef MINILLM_FLOATS_H
#define MINILLM_FLOATS_H
#include "codebooks.h"
#include "linear.h"

/* Zen 4 and 5 have one in a cycle, as multiply-adds of floats. Xeons have one in two cycles, where they multiply half as much
 * as these; GCC 12.2 takes a Zen 4 for a Zen 3 with more instructions. */
#if HAS_AVX512 && defined(__AVX512BF16__) && (defined(__znver3__) || defined(__znver4__) || defined(__znver5__))
#define HAS_PAIRS 1
#elif HAS_NEON && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#include <arm_bf16.h>
#define HAS_PAIRS 1
#endif

#ifndef HAS_PAIRS
#define HAS_PAIRS 0
#endif

/* Calls a function of `a->format`, which the compiler knows by the name `known`. */
#define WITH_FORMAT(CALL) \
    switch (a->format) { \
    case FLOAT32: { enum { known = FLOAT32 }; CALL; break; } \
    case FLOAT16: { enum { known = FLOAT16 }; CALL; break; } \
    case BFLOAT16: { enum { known = BFLOAT16 }; CALL; break; } \
    case NF4: { enum { known = NF4 }; CALL; break; } \
    case FP4: { enum { known = FP4 }; CALL; break; } \
    case PAIRS: { enum { known = PAIRS }; CALL; break; } \
    }

/* Whether x is rounded to pairs, which W, of bfloat16, then has too. */
INLINE bool takes_pairs(const linear *a) {
    return HAS_PAIRS && a->format == BFLOAT16 && a->x_rounded && a->inputs % 2 == 0;
}

/* Whether numbers of a format lie in memory as the 32 bits of a lane. */
INLINE bool is_whole(int64_t format) {
    return format == FLOAT32 || format == PAIRS;
}

INLINE bool is_code_book(int64_t format) {
    return format == NF4 || format == FP4;
}

/* Bytes of some numbers of a row: of code books of whole blocks. */
INLINE int64_t bytes_of(int64_t format, int64_t count) {
    return is_code_book(format) ? code_bytes(count) : count * (is_whole(format) ? 4 : 2);
}

INLINE floats load_weights(const int format, const char *p, int64_t i) {
    if (is_whole(format)) return load((const float *)p + i);
    if (format == FLOAT16) return load_float16((const uint16_t *)p + i);
    if (is_code_book(format)) return load_codes(format, p, i);
    return load_bfloat16((const uint16_t *)p + i);
}

/* The first `count` of them, fewer than LANES, then zeros. */
INLINE floats load_last_weights(const int format, const char *p, int64_t i, int64_t count) {
    char part[4 * LANES] = {0};
    memcpy(part, p + bytes_of(format, i), bytes_of(format, count));
    return load_weights(format, part, 0);
}

/* Inputs k to k + depth of W's rows first to last. -> [last - first, stride] */
INLINE void expand(const int format, const linear *a, int64_t first, int64_t last, int64_t k, int64_t depth,
                   float *block, int64_t stride) {
    for (int64_t o = first; o < last; o++, block += stride) {
        const char *w = (const char *)a->weight + bytes_of(format, o * a->inputs + k);
        int64_t i = 0;
        for (; i + LANES <= depth; i += LANES) store(block + i, load_weights(format, w, i));
        if (i < depth) store(block + i, load_last_weights(format, w, i, depth - i));
    }
}

/* x * w + total; of pairs both products + total. */
INLINE floats multiply_add_as(const int format, floats x, floats w, floats total) {
#if HAS_AVX512 && HAS_PAIRS
    if (format == PAIRS) return (floats)_mm512_dpbf16_ps((__m512)total, (__m512bh)x, (__m512bh)w);
#elif HAS_PAIRS
    if (format == PAIRS) return (floats)vbfdotq_f32((float32x4_t)total, (bfloat16x8_t)x, (bfloat16x8_t)w);
#endif
    return multiply_add(x, w, total);
}

/* The number at any address in all lanes. */
INLINE floats splat_bits(const void *p) {
    int32_t bits;
    memcpy(&bits, p, sizeof bits);
    return (floats)(bits - (ints){0});
}
#endif
