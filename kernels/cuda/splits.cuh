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
