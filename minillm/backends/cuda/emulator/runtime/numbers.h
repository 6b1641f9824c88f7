// Numbers of 16 bits as float.
#pragma once

#include <cstdint>
#include <cstring>

namespace emulation {

inline float from_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

inline float from_bfloat16(uint16_t bits) { return from_bits(uint32_t(bits) << 16); }

inline float from_half(uint16_t bits) {
    uint32_t magnitude = bits & 0x7fffu, sign = uint32_t(bits & 0x8000u) << 16;
    if (magnitude >= 0x7c00u) return from_bits(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);  // infinity, NaN
    float x = from_bits(magnitude << 13) * from_bits(0x77800000u);  // 2^112 mends the exponent, of subnormals too
    return sign ? -x : x;
}

}  // namespace emulation
