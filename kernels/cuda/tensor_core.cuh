// The instructions of tensor cores and of asynchronous copies, each behind a small function.
//
// This file, wgmma.cuh, dependent.cuh, cooperative.cuh and tma.cuh hold all PTX there is. Where there is no GPU the
// emulator runs a body of its own (`emulated_*`), which
// follows the same tables of the PTX manual: ldmatrix 9.7.14.5.15, mma.m16n8k16 9.7.14.5.8, cp.async 9.7.9.25.3.
#pragma once

#include "common.cuh"

#if MINILLM_STORAGE != 32

// Two numbers side by side; `low` lies first in memory.
__device__ __forceinline__ unsigned pack(float low, float high) {
#if MINILLM_STORAGE == 17
    __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
#else
    __half2 pair = __floats2half2_rn(low, high);
#endif
    return *reinterpret_cast<unsigned*>(&pair);
}

// d += a b for one tile: a [16, 16] by rows, b [16, 8] by columns, d [16, 8] in float; one warp together.
//
// Lane l, with g = l / 4 and t = l % 4, holds
//   a[0] (g, 2t..2t+1)  a[1] (g+8, 2t..)  a[2] (g, 2t+8..)  a[3] (g+8, 2t+8..)
//   b[0] (2t..2t+1, g)  b[1] (2t+8.., g)
//   d[0], d[1] (g, 2t..2t+1)  d[2], d[3] (g+8, 2t..2t+1)
__device__ __forceinline__ void mma_16816(float d[4], const unsigned a[4], const unsigned b[2]) {
#ifdef MINILLM_EMULATED
    emulated_mma_16816(d, a, b, MINILLM_STORAGE == 17);
#elif MINILLM_STORAGE == 17
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

// Four 8 x 8 tiles from shared memory: lane l names row l % 8 of tile l / 8, each 16 bytes; r[i] is tile i in the
// layout that mma_16816 wants.
__device__ __forceinline__ void ldmatrix_x4(unsigned r[4], const void* row) {
#ifdef MINILLM_EMULATED
    emulated_ldmatrix_x4(r, row, false);
#else
    unsigned address = (unsigned)__cvta_generic_to_shared(row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
#endif
}

// The same, each tile transposed.
__device__ __forceinline__ void ldmatrix_x4_transposed(unsigned r[4], const void* row) {
#ifdef MINILLM_EMULATED
    emulated_ldmatrix_x4(r, row, true);
#else
    unsigned address = (unsigned)__cvta_generic_to_shared(row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
#endif
}

#endif

// Copy 16 bytes from global to shared memory asynchronously; zeros instead where `valid` is false.
// They are visible to this thread after commit and wait, to others after a further barrier.
__device__ __forceinline__ void cp_async_16(void* shared, const void* global, bool valid = true) {
#ifdef MINILLM_EMULATED
    emulated_cp_async(shared, global, 16, valid ? 16 : 0);
#else
    unsigned address = (unsigned)__cvta_generic_to_shared(shared);
    int bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(global), "r"(bytes) : "memory");
#endif
}

// Close the group of copies begun since the last commit.
__device__ __forceinline__ void cp_async_commit() {
#ifdef MINILLM_EMULATED
    emulated_cp_async_commit();
#else
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Wait until at most GROUPS of the newest groups are still under way.
template <int GROUPS>
__device__ __forceinline__ void cp_async_wait() {
#ifdef MINILLM_EMULATED
    emulated_cp_async_wait(GROUPS);
#else
    asm volatile("cp.async.wait_group %0;" ::"n"(GROUPS) : "memory");
#endif
}

// Begin to bring the 32 bytes at `address` in device memory to the L2 cache; nothing waits for them.
__device__ __forceinline__ void prefetch(const void* address) {
#ifndef MINILLM_EMULATED
    asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
#endif
}
