// Products of step.cu with matrices of 8 and 4 bits (GROUP 32, no offsets): the arithmetic of gemv_integers.cuh, and so
// the same bits.
//
//   y = x @ dequantize(W).T                            # of each group g: scale * ((q - zero) @ x)
//
// A block multiplies a tile of TILE rows of W; its warps share k, and read the slots of all of them. Chunks of 64 bytes of
// a row go to the warps in turn. gemv_integers.cuh has `splits` (4, 8 or 16) warps for that; here a warp has the sums of
// splits / WARPS of them, since the order of a sum is what its bits depend on.
//
// Instructions of a warp for PIECE bytes of a tile (18 kB with scales, which come in some 1,400 cycles of a processor's
// share of 3 TB/s) in 4 bits: some 580 to multiply, 100 for the rest; counted, not measured.
#pragma once

#include "step_ring.cuh"
#include "unpack.cuh"

constexpr int MOST_SPLITS_OF_TILE = 16;
constexpr int CHUNKS = PIECE / 64, CHUNKS_OF_WARP = CHUNKS / WARPS;  // of a row in a slot
static_assert(CHUNKS % MOST_SPLITS_OF_TILE == 0, "a chunk's split is known from its place in the slot");

using PartOfTile = float[TOKENS][TILE];  // the sums of one of `splits`

// One chunk of two rows of W in this lane, as an mma has them: 16 bytes of each, and the scales of its groups.
template <int BITS>
struct TileChunk {
    static constexpr int NUMBERS = 64 * 8 / BITS, UNITS = NUMBERS / GROUP_OF_SCALE;
    unsigned words[2][4];
    __align__(8) __half scales[2][UNITS];

    // `rows`: the two, in shared memory.
    __device__ __forceinline__ void load(const unsigned char* const rows[2], int chunk) {
#pragma unroll
        for (int side = 0; side < 2; ++side) {
            const unsigned char* row = rows[side];
            uint4 raw = *reinterpret_cast<const uint4*>(row + chunk * 64 + threadIdx.x % 4 * 16);
            words[side][0] = raw.x, words[side][1] = raw.y, words[side][2] = raw.z, words[side][3] = raw.w;
            const __half* from = reinterpret_cast<const __half*>(row + PIECE) + chunk * UNITS;
            if (UNITS == 4)
                *reinterpret_cast<uint2*>(scales[side]) = *reinterpret_cast<const uint2*>(from);
            else
                *reinterpret_cast<unsigned*>(scales[side]) = *reinterpret_cast<const unsigned*>(from);
        }
    }

    // sums += the products with x, of which this lane names a row and 8 k of 32.
    __device__ __forceinline__ void multiply(float (&sums)[4], const storage_t* x) const {
        unsigned b[UNITS][4];
#pragma unroll
        for (int unit = 0; unit < UNITS; ++unit) ldmatrix_x4(b[unit], x + unit * GROUP_OF_SCALE);
#pragma unroll
        for (int unit = 0; unit < UNITS; ++unit) {
            unsigned a[2][4];  // of two mma, each of 16 k
            constexpr int PARTS = 8 / BITS;
#pragma unroll
            for (int word = 0; word < 2 / PARTS; ++word) {
                unsigned low[PARTS][2], high[PARTS][2];
                unpack(low, words[0][unit * 2 / PARTS + word], 8);
                unpack(high, words[1][unit * 2 / PARTS + word], 8);
#pragma unroll
                for (int part = 0; part < PARTS; ++part) {
                    unsigned* to = a[word + part];
                    to[0] = low[part][0], to[1] = high[part][0], to[2] = low[part][1], to[3] = high[part][1];
                }
            }
            float products[2][4] = {};
            mma_16816(products[0], a[0], b[unit]);
            mma_16816(products[1], a[1], b[unit] + 2);
#pragma unroll
            for (int j = 0; j < 4; ++j)
                sums[j] = fmaf(__half2float(scales[j / 2][unit]), products[0][j] + products[1][j], sums[j]);
        }
    }
};

// The block's next tile multiplied by x: to[split] are the sums of the chunks split, split + splits ...; all threads, which
// see them at once. x: [TOKENS, inputs] in shared memory, rows x_stride numbers apart. SETS: splits / WARPS.
template <int BITS, int SETS>
__device__ __forceinline__ void multiply_tile(Ring& ring, const storage_t* x, int x_stride, int inputs,
                                              PartOfTile* to) {
    constexpr int NUMBERS = TileChunk<BITS>::NUMBERS;
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    x += lane % 8 % TOKENS * x_stride + lane / 8 * 8;
    float sums[SETS][4] = {};
    for (int row_bytes = inputs * BITS / 8, at = 0; at < row_bytes; at += PIECE) {
        for (int of = 0; of < WARPS; ++of) ring.wait(of);
        const unsigned char* rows[2];
#pragma unroll
        for (int side = 0; side < 2; ++side) {
            int row = g + side * 8;
            rows[side] = ring.slot_of(row / ROWS_OF_SLOT, ring.slot) + row % ROWS_OF_SLOT * ROW_STRIDE;
        }
        int chunks = min(PIECE, row_bytes - at) / 64;
        TileChunk<BITS> own[CHUNKS_OF_WARP];
#pragma unroll
        for (int i = 0; i < CHUNKS_OF_WARP; ++i) own[i].load(rows, min(i * WARPS + warp, chunks - 1));
#pragma unroll
        for (int i = 0; i < CHUNKS_OF_WARP; ++i) {
            int chunk = i * WARPS + warp;
            if (chunk < chunks) own[i].multiply(sums[i % SETS], x + at * (8 / BITS) + chunk * NUMBERS);
        }
        if (at + PIECE >= row_bytes) {
#pragma unroll
            for (int i = 0; i < SETS * 4; ++i) {
                int row = 2 * t + i % 2, output = g + i % 4 / 2 * 8;
                if (row < TOKENS) to[i / 4 * WARPS + warp][row][output] = sums[i / 4][i % 4];
            }
        }
        ring.release(true);
    }
}

template <int BITS>
__device__ __forceinline__ void multiply_tile(Ring& ring, const storage_t* x, int x_stride, const Operation& op,
                                              PartOfTile* to) {
    if (op.splits == WARPS) multiply_tile<BITS, 1>(ring, x, x_stride, op.inputs, to);
    if (op.splits == 2 * WARPS) multiply_tile<BITS, 2>(ring, x, x_stride, op.inputs, to);
    if (op.splits == 4 * WARPS) multiply_tile<BITS, 4>(ring, x, x_stride, op.inputs, to);
}
