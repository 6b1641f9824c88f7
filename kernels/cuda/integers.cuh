// Matrices of 8 and 4 bits in memory, and their numbers as tensor cores take them (minillm/reference/quantize.py):
//
//   w[o, k] = scales[o, k / GROUP] * (q[o, k] - zeros[o, k / GROUP])             # [out, in]
//   w[o, k] = scales[o, k / GROUP] * q[o, k] + offsets[o, k / GROUP]             with OFFSETS of 16
//
// Constants: BITS, 8 (q from -128 to 127) or 4 (from 0 to 15); GROUP, 32 or 64, of 8 bits also 16; OFFSETS, the bits of `offsets`: 0 (none;
//            a zero of 4 bits is 8), 8 (zero points) or 16 (float16 offsets).
//
// A row is padded to whole groups. 16 bytes are a piece: 16 numbers of 8 bits, or 32 of 4, of which byte j has number j in
// its low half and number j + 16 in its high half. On the device the bytes of a row lie in another order (`interleave` in
// expand.cu): 4 pieces are a chunk, and of each piece bytes 2t, 2t + 1, 2t + 8 and 2t + 9 are word t, what lane t of four
// gives to an mma of 16 k (tensor_core.cuh). The words t of all pieces of a chunk lie side by side, so that the lane has
// them with one load. The last chunk of a row may have fewer pieces.
#pragma once

#include "unpack.cuh"

#if BITS != 8 && BITS != 4 || GROUP != 32 && GROUP != 64 && (GROUP != 16 || BITS == 4)
#error "compile with -DBITS=8 or 4, -DGROUP=32 or 64 (of 8 bits also 16) and -DOFFSETS=0, 8 or 16"
#endif

#if OFFSETS == 16
using offset_t = __half;
#else
using offset_t = unsigned char;
#endif

struct Integers {
    const unsigned char* values;  // [out, row_bytes]
    const __half* scales;         // [out, groups]
    const offset_t* offsets;      // likewise, or null
    int groups;

    __device__ __forceinline__ Integers(const void* values, const __half* scales, const void* offsets, int inputs)
        : values(static_cast<const unsigned char*>(values)), scales(scales),
          offsets(static_cast<const offset_t*>(offsets)), groups((inputs + GROUP - 1) / GROUP) {}

    __device__ __forceinline__ int row_bytes() const { return groups * (GROUP * BITS / 8); }

    // Leave out the first rows.
    __device__ __forceinline__ void skip(size_t rows) {
        values += rows * row_bytes(), scales += rows * groups;
        if (OFFSETS) offsets += rows * groups;
    }

    // Where word t of a piece lies in its row.
    __device__ __forceinline__ int word_at(int piece, int t) const {
        int chunk = piece / 4, pieces = min(4, row_bytes() / 16 - 4 * chunk);
        return chunk * 64 + (t * pieces + piece % 4) * 4;
    }
};
