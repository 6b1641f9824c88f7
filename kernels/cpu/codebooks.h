/* Numbers that are one of 16 floats, times a scale of 64 of them: bitsandbytes' NF4 and FP4 (reference/blocks.py).
 *
 *     block   the scale, a float; nibbles [32 bytes]: of each 32 numbers byte j has j, low, and j + 16, high
 *
 * Vectors of x meet them as floats, since no small integers are to each other as these codes are.
 */
#ifndef MINILLM_CODEBOOKS_H
#define MINILLM_CODEBOOKS_H
#include "simd.h"

enum { CODES = 64, CODE_BLOCK = 36 }; /* numbers and bytes of a block */

static const float CODES_NF4[16] = {
    -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f,
    -0.18477343022823334f, -0.09105003625154495f, 0.0f, 0.07958029955625534f, 0.16093020141124725f,
    0.24611230194568634f, 0.33791524171829224f, 0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f};
static const float CODES_FP4[16] = {0.0f, 0.0625f / 12, 8.0f / 12, 1.0f, 4.0f / 12, 0.5f, 2.0f / 12, 0.25f,
                                    -0.0f, -0.0625f / 12, -8.0f / 12, -1.0f, -4.0f / 12, -0.5f, -2.0f / 12, -0.25f};

INLINE int64_t code_bytes(int64_t count) {
    return count * CODE_BLOCK / CODES;
}

/* table[v], v from 0 to 15; bits above these are ignored. */
INLINE floats look_up_code(const float *table, ints v) {
#if HAS_AVX512
    return (floats)_mm512_permutexvar_ps((__m512i)v, _mm512_loadu_ps(table));
#elif HAS_AVX2
    __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table), (__m256i)v);
    __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table + 8), (__m256i)v);
    return (floats)_mm256_blendv_ps(low, high, _mm256_castsi256_ps((__m256i)(v << 28)));
#else
    floats numbers;
    for (int i = 0; i < LANES; i++) numbers[i] = table[v[i] & 15];
    return numbers;
#endif
}

/* LANES numbers of a row of blocks, from number i on. */
INLINE floats load_codes(const int format, const char *row, int64_t i) {
    const char *block = row + i / CODES * CODE_BLOCK;
    float scale;
    memcpy(&scale, block, sizeof scale);
    ints both = load_bytes((const uint8_t *)block + 4 + i % CODES / 32 * 16 + i % 16);
    return look_up_code(format == NF4 ? CODES_NF4 : CODES_FP4, i % 32 < 16 ? both : both >> 4) * scale;
}
#endif
