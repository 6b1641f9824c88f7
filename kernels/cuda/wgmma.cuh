// Products of a warpgroup (four warps) on sm_90a, each instruction behind a small function.
//
// Both operands lie in shared memory and the instruction runs by itself: the warps issue it, go on, and wait later. The
// emulator's bodies (`emulated_*`) follow the same sections of the PTX manual, "Asynchronous Warpgroup Level Matrix
// Instructions": matrix descriptor format, register fragments of wgmma .m64nNk16, strided and swizzled layouts.
#pragma once

#include "tensor_core.cuh"

// A descriptor of rows of 64 numbers of 16 bits, one after the other in shared memory from a multiple of 1,024 bytes
// on, along k. They are swizzled by 128 bytes: the hardware takes bits 4 to 6 of an address xor bits 7 to 9, so piece
// c (16 bytes) of row r lies where piece c ^ (r % 8) would. `tile` may be the beginning plus 32 bytes for each 16 of k.
// Fields: address / 16; 1 (unused when swizzled) from bit 16; bytes of 8 rows / 16 from bit 32; 1, the swizzle, from 62.
__device__ __forceinline__ unsigned long long swizzled_tile(const void* tile) {
#ifdef MINILLM_EMULATED
    unsigned address = emulated_shared_address(tile);
#else
    unsigned address = (unsigned)__cvta_generic_to_shared(tile);
#endif
    return (address & 0x3ffff) >> 4 | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

// A descriptor of a matrix by columns, to be transposed on the way: rows of 64 numbers of 16 bits, swizzled as above, each
// row one k. Blocks of 64 columns are `block` bytes apart: / 16 from bit 16.
__device__ __forceinline__ unsigned long long transposed_tile(const void* tile, int block) {
    return (swizzled_tile(tile) & ~(0x3fffull << 16)) | (unsigned long long)(block >> 4) << 16;
}

// Before the first product, and again after the program has used their registers.
__device__ __forceinline__ void wgmma_fence() {
#ifdef MINILLM_EMULATED
    emulated_wgmma_fence();
#else
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}

// Registers of products: the compiler leaves writes to them before this, and reads after it, on their side of it.
template <int N>
__device__ __forceinline__ void wgmma_hold(float (&d)[N]) {
#ifndef MINILLM_EMULATED
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
#endif
}

template <int N>
__device__ __forceinline__ void wgmma_hold(unsigned (&a)[N][4]) {
#ifndef MINILLM_EMULATED
#pragma unroll
    for (int i = 0; i < 4 * N; ++i) asm volatile("" : "+r"(a[i / 4][i % 4])::"memory");
#endif
}

// Close the group of products issued since the last commit.
__device__ __forceinline__ void wgmma_commit() {
#ifdef MINILLM_EMULATED
    emulated_wgmma_commit();
#else
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}

// Wait until at most GROUPS of the newest groups are still under way.
template <int GROUPS>
__device__ __forceinline__ void wgmma_wait() {
#ifdef MINILLM_EMULATED
    emulated_wgmma_wait(GROUPS);
#else
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(GROUPS) : "memory");
#endif
}

// What this thread has written to shared memory, also by cp.async that it has waited for, becomes visible to wgmma,
// which reads by another way (the async proxy). A barrier must follow, as for other threads.
__device__ __forceinline__ void fence_proxy_async() {
#ifdef MINILLM_EMULATED
    emulated_fence_proxy_async();
#else
    // Of shared memory alone: without the state space the compiler adds a fence of all memory, 1 us in each step.
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

#if MINILLM_STORAGE == 17
#define WGMMA_TYPES "bf16.bf16"
#else
#define WGMMA_TYPES "f16.f16"
#endif

// The text of the instruction, as far as its first sum; the sums' numbers in it; and the sums as operands.
#define WGMMA(columns)                             \
    "{ .reg .pred add; setp.eq.u32 add, 0, 0;\n" \
    "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." WGMMA_TYPES " {"
#define FIRST_32 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define FIRST_64 \
    FIRST_32 ", " \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define NEXT_64 \
    "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
    "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, " \
    "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
    "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define SUMS_4(i) "+f"(d[i]), "+f"(d[(i) + 1]), "+f"(d[(i) + 2]), "+f"(d[(i) + 3])
#define SUMS_16(i) SUMS_4(i), SUMS_4((i) + 4), SUMS_4((i) + 8), SUMS_4((i) + 12)
#define SUMS_32(i) SUMS_16(i), SUMS_16((i) + 16)
#define SUMS_64(i) SUMS_32(i), SUMS_32((i) + 32)

// d += a b: a [64, 16] by rows, b [N, 16] by rows, both by descriptors; d [64, N] in float. All four warps together.
//
// Warp w of the four holds the rows 16 w ...; lane l, with g = l / 4 and t = l % 4, of each 8 columns j
//   d[4j], d[4j + 1] (g, 8j + 2t..)  d[4j + 2], d[4j + 3] (g + 8, 8j + 2t..)
template <int N>
__device__ __forceinline__ void wgmma_64xNx16(float (&d)[N / 2], unsigned long long a, unsigned long long b) {
    static_assert(N == 64 || N == 128 || N == 256, "tiles of the products here");
#ifdef MINILLM_EMULATED
    emulated_wgmma(d, N, a, b, MINILLM_STORAGE == 17);
#else
    if constexpr (N == 64) {
        asm volatile(WGMMA(64) FIRST_32 "}, %32, %33, add, 1, 1, 0, 0; }" : SUMS_32(0) : "l"(a), "l"(b));
    } else if constexpr (N == 128) {
        asm volatile(WGMMA(128) FIRST_64 "}, %64, %65, add, 1, 1, 0, 0; }" : SUMS_64(0) : "l"(a), "l"(b));
    } else {
        asm volatile(WGMMA(256) FIRST_64 ", " NEXT_64 "}, %128, %129, add, 1, 1, 0, 0; }"
                     : SUMS_64(0), SUMS_64(64)
                     : "l"(a), "l"(b));
    }
#endif
}

// d += a b for a in registers, b [16, N] by columns (as `transposed_tile` says), or [N, 16] by rows. Warp w of the four
// holds the rows 16 w ... of a, by lane
//   a[0] (g, 2t..2t+1)  a[1] (g + 8, 2t..)  a[2] (g, 2t + 8..)  a[3] (g + 8, 2t + 8..)
// Nobody may change them until the product has been waited for.
template <int N, bool BY_COLUMNS = true>
__device__ __forceinline__ void wgmma_64xNx16(float (&d)[N / 2], const unsigned (&a)[4], unsigned long long b) {
    static_assert(N == 64 || N == 128 || N == 256, "tiles of the products here");
#ifdef MINILLM_EMULATED
    emulated_wgmma_registers(d, N, a, b, BY_COLUMNS, MINILLM_STORAGE == 17);
#else
    if constexpr (N == 64) {
        asm volatile(WGMMA(64) FIRST_32 "}, {%32, %33, %34, %35}, %36, add, 1, 1, %37; }"
                     : SUMS_32(0)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"((int)BY_COLUMNS));
    } else if constexpr (N == 128) {
        asm volatile(WGMMA(128) FIRST_64 "}, {%64, %65, %66, %67}, %68, add, 1, 1, %69; }"
                     : SUMS_64(0)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"((int)BY_COLUMNS));
    } else {
        asm volatile(WGMMA(256) FIRST_64 ", " NEXT_64 "}, {%128, %129, %130, %131}, %132, add, 1, 1, %133; }"
                     : SUMS_64(0), SUMS_64(64)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"((int)BY_COLUMNS));
    }
#endif
}

#undef WGMMA
#undef FIRST_32
#undef FIRST_64
#undef NEXT_64
#undef SUMS_4
#undef SUMS_16
#undef SUMS_32
#undef SUMS_64
