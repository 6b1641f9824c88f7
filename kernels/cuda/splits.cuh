// Blocks that share a result: each leaves its part in device memory, and the last to arrive merges them all.
#pragma once

#include "common.cuh"

// Whether this block is the last of `blocks` to get here; then it sees all that the others wrote. `arrived` is 0 before
// the launch, and after it.
__device__ __forceinline__ bool arrives_last(int* arrived, int blocks) {
    __shared__ bool last;
    if (blocks > 1) __threadfence();
    __syncthreads();
    if (blocks == 1) return true;
    if (threadIdx.x == 0) {
        last = atomicAdd(arrived, 1) == blocks - 1;
        if (last) *arrived = 0;
    }
    __syncthreads();
    __threadfence();
    return last;
}

// The sums of a tile that gridDim.z blocks compute together, each a part of k: they are added in the order of the blocks,
// by the last of them to get here, which alone returns true. `partials` holds SUMS * THREADS numbers for each block.
template <int SUMS, int THREADS>
__device__ __forceinline__ bool add_splits(float (&sums)[SUMS], float* partials, int* arrived) {
    if (gridDim.z == 1) return true;
    int tile = blockIdx.y * gridDim.x + blockIdx.x;
    float* own = partials + (size_t)tile * gridDim.z * SUMS * THREADS + threadIdx.x;
#pragma unroll
    for (int i = 0; i < SUMS; ++i) own[(blockIdx.z * SUMS + i) * THREADS] = sums[i];
    if (!arrives_last(arrived + tile, gridDim.z)) return false;
#pragma unroll
    for (int i = 0; i < SUMS; ++i) sums[i] = own[i * THREADS];
    for (int split = 1; split < gridDim.z; ++split) {
#pragma unroll
        for (int i = 0; i < SUMS; ++i) sums[i] += own[(split * SUMS + i) * THREADS];
    }
    return true;
}
