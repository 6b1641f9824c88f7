// Numbers of 8 and 4 bits, of a word as integers.cuh orders them, as the two operands of 16 bits that tensor cores take.
#pragma once

#include "tensor_core.cuh"

#if MINILLM_STORAGE == 16
using pair_t = __half2;
constexpr unsigned MAGIC = 0x64006400u;  // twice 1,024: the lowest bits of such a number count ones
#elif MINILLM_STORAGE == 17
using pair_t = __nv_bfloat162;
constexpr unsigned MAGIC = 0x43004300u;  // twice 128
#endif

#if MINILLM_STORAGE != 32

// Two numbers of up to 10 bits (bfloat16: 7), each in the low bits of a half of `bits`, less those of `less`; exact.
// Both have MAGIC's bits set.
__device__ __forceinline__ unsigned difference(unsigned bits, unsigned less) {
    pair_t result = __hsub2(*reinterpret_cast<pair_t*>(&bits), *reinterpret_cast<pair_t*>(&less));
    return *reinterpret_cast<unsigned*>(&result);
}

// Eight numbers of 4 bits, less `zero`, which is that of their group: operands of two mma, the second for the high halves
// of the word's bytes.
__device__ __forceinline__ void unpack(unsigned (&to)[2][2], unsigned word, unsigned zero) {
    unsigned low = word & 0x0f0f0f0fu, high = word >> 4 & 0x0f0f0f0fu, less = zero * 0x00010001u | MAGIC;
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {  // two bytes, each with the high byte of MAGIC after it
        to[0][pair] = difference(__byte_perm(low, MAGIC, pair ? 0x7372 : 0x7170), less);
        to[1][pair] = difference(__byte_perm(high, MAGIC, pair ? 0x7372 : 0x7170), less);
    }
}

// Four numbers of 8 bits, operands of one mma. They have no zero.
__device__ __forceinline__ void unpack(unsigned (&to)[1][2], unsigned word, unsigned) {
#if MINILLM_STORAGE == 16
#pragma unroll
    for (int pair = 0; pair < 2; ++pair)
        to[0][pair] = difference(__byte_perm(word ^ 0x80808080u, MAGIC, pair ? 0x7372 : 0x7170), 0x00800080u | MAGIC);
#else
    // bfloat16 has 8 significant bits: enough for the number, not for 128 more. So by way of float, where 2^23 + n has n
    // in its lowest bits.
    word ^= 0x80808080u;
    float n[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) n[i] = __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7440 | i)) - 8388736.0f;
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
        pair_t both = __floats2bfloat162_rn(n[2 * pair], n[2 * pair + 1]);
        to[0][pair] = *reinterpret_cast<unsigned*>(&both);
    }
#endif
}

#endif
