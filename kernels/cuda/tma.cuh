// Copies of boxes of a matrix to the shared memory of one block or of several, by the tensor memory accelerator of sm_90;
// and clusters, blocks that run on neighbouring multiprocessors and reach each other's shared memory.
//
// The emulator's bodies follow the sections of the PTX manual on cp.async.bulk.tensor, mapa, mbarrier and barrier.cluster.
#pragma once

#include "cooperative.cuh"

// CUtensorMap of cuda.h: where a matrix lies, and the box that a copy takes of it (backends/cuda/tensor_maps.py). A kernel
// takes it by value as `const __grid_constant__ TensorMap`.
struct alignas(64) TensorMap {
    unsigned long long opaque[16];
};

// The text of a copy as far as its source.
#define TENSOR_COPY(dimensions, blocks) \
    "cp.async.bulk.tensor." dimensions ".shared::cluster.global.mbarrier::complete_tx::bytes" blocks " [%0], "

// This block's number in its cluster.
__device__ __forceinline__ int cluster_rank() {
#ifdef MINILLM_EMULATED
    return emulated_cluster_rank();
#else
    int rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
#endif
}

// All threads of all blocks of the cluster meet: before any reaches into another's shared memory, and before it ends.
__device__ __forceinline__ void cluster_sync() {
#ifdef MINILLM_EMULATED
    emulated_cluster_sync();
#else
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// Arrive at the barrier that lies at the same place in block `rank` of the cluster: what this thread has waited for there
// is done with.
__device__ __forceinline__ void mbarrier_arrive(mbarrier_t* barrier, int rank) {
#ifdef MINILLM_EMULATED
    emulated_mbarrier_arrive(barrier, rank);
#else
    asm volatile(
        "{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [there]; }" ::"r"(shared_address(barrier)),
        "r"(rank)
        : "memory");
#endif
}

// Copy the box at (x, y) of a matrix of 2 dimensions, the first along memory, to the same place in the shared memory of
// each block whose bit `blocks` has, or of this one alone; their barriers, at the same place too, count its bytes. Zeros
// beyond the matrix's end. By one thread. Rows of 128 bytes, swizzled as wgmma.cuh says, from a multiple of 1,024 bytes on.
__device__ __forceinline__ void tensor_copy(void* shared, const TensorMap& map, int x, int y, mbarrier_t* barrier,
                                            unsigned short blocks = 0) {
#ifdef MINILLM_EMULATED
    int at[] = {x, y};
    emulated_tensor_copy(shared, &map, at, 2, barrier, blocks);
#else
    if (blocks) {
        asm volatile(TENSOR_COPY("2d", ".multicast::cluster") "[%1, {%2, %3}], [%4], %5;" ::"r"(shared_address(shared)),
                     "l"(&map), "r"(x), "r"(y), "r"(shared_address(barrier)), "h"(blocks)
                     : "memory");
    } else {
        asm volatile(TENSOR_COPY("2d", "") "[%1, {%2, %3}], [%4];" ::"r"(shared_address(shared)), "l"(&map), "r"(x),
                     "r"(y), "r"(shared_address(barrier))
                     : "memory");
    }
#endif
}

// The same of 4 dimensions.
__device__ __forceinline__ void tensor_copy(void* shared, const TensorMap& map, int x, int y, int z, int w,
                                            mbarrier_t* barrier, unsigned short blocks = 0) {
#ifdef MINILLM_EMULATED
    int at[] = {x, y, z, w};
    emulated_tensor_copy(shared, &map, at, 4, barrier, blocks);
#else
    if (blocks) {
        asm volatile(TENSOR_COPY("4d", ".multicast::cluster")
                     "[%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(shared_address(shared)),
                     "l"(&map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(shared_address(barrier)), "h"(blocks)
                     : "memory");
    } else {
        asm volatile(TENSOR_COPY("4d", "") "[%1, {%2, %3, %4, %5}], [%6];" ::"r"(shared_address(shared)), "l"(&map),
                     "r"(x), "r"(y), "r"(z), "r"(w), "r"(shared_address(barrier))
                     : "memory");
    }
#endif
}

#undef TENSOR_COPY
