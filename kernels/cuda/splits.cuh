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

// The sums of a tile that `parts` blocks compute together, each a part of k; this block's is number `part`. They are added
// in the order of the parts by the last of the blocks to get here, which alone returns true. `place(part)` says which of
// the rooms of `partials`, each SUMS * THREADS numbers, is a part's; `arrived` is the tile's own.
template <int SUMS, int THREADS, class Place>
__device__ __forceinline__ bool add_parts(float (&sums)[SUMS], float* partials, int* arrived, int part, int parts,
                                          Place place) {
    if (parts == 1) return true;
    auto room = [&](int of) { return partials + (size_t)place(of) * SUMS * THREADS + threadIdx.x; };
    float* own = room(part);
#pragma unroll
    for (int i = 0; i < SUMS; ++i) own[i * THREADS] = sums[i];
    if (!arrives_last(arrived, parts)) return false;
    const float* first = room(0);
#pragma unroll
    for (int i = 0; i < SUMS; ++i) sums[i] = first[i * THREADS];
    for (int of = 1; of < parts; ++of) {
        const float* next = room(of);
#pragma unroll
        for (int i = 0; i < SUMS; ++i) sums[i] += next[i * THREADS];
    }
    return true;
}

// The same of a grid whose blocks of one tile lie along z.
template <int SUMS, int THREADS>
__device__ __forceinline__ bool add_splits(float (&sums)[SUMS], float* partials, int* arrived) {
    int tile = blockIdx.y * gridDim.x + blockIdx.x;
    auto place = [&](int part) { return tile * (int)gridDim.z + part; };
    return add_parts<SUMS, THREADS>(sums, partials, arrived + tile, blockIdx.z, gridDim.z, place);
}
