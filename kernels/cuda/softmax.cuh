// Shared by the attention kernels: softmax in powers of two, and reductions over neighbouring lanes.
#pragma once

#include "common.cuh"

// Scores are scaled by this once, so that exp(x) becomes exp2f(x), which the hardware has.
constexpr float LOG2_E = 1.4426950408889634f;
__device__ __forceinline__ float minus_infinity() { return __uint_as_float(0xff800000u); }  // NVRTC has no INFINITY

// The sum over groups of COUNT neighbouring lanes (a power of two); every lane of a group gets it.
template <int COUNT>
__device__ __forceinline__ float neighbours_sum(float x) {
#pragma unroll
    for (int offset = COUNT / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(ALL_LANES, x, offset);
    return x;
}

template <int COUNT>
__device__ __forceinline__ float neighbours_max(float x) {
#pragma unroll
    for (int offset = COUNT / 2; offset > 0; offset /= 2) x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, offset));
    return x;
}

// One query's softmax while its scores arrive tile by tile (Milakov and Gimelshein, arXiv 1805.02867). Scores are
// raw; `scale` (above 0) holds LOG2_E as well. With fmaf the only rounding before the power is that of the maximum's
// product, which all weights share.
struct RunningSoftmax {
    // Of the raw scores so far; at first less than any. Not minus infinity: a window may hide all of a tile, and its
    // weights are then 0 and not NaN. A power of 2, so that its product with `scale` is exact.
    float maximum = -0x1p100f;
    float total = 0.0f;  // of the weights so far, a lane's part of it

    // Begin with a raw score whose key has no value; `counts` in the one lane of a row that adds its weight, 1.
    __device__ __forceinline__ void begin(float score, bool counts) {
        maximum = score;
        total = counts ? 1.0f : 0.0f;
    }

    // Update the maximum for a new tile. Returns the factor for all earlier sums.
    __device__ __forceinline__ float raise(float tile_maximum, float scale) {
        float raised = fmaxf(maximum, tile_maximum);
        float shrink = exp2f(fmaf(maximum, scale, -raised * scale));
        maximum = raised;
        total *= shrink;
        return shrink;
    }

    __device__ __forceinline__ float weigh(float score, float scale) {
        float weight = exp2f(fmaf(score, scale, -maximum * scale));
        total += weight;
        return weight;
    }
};
