// Products of a warpgroup (four warps) on sm_90a, each instruction behind a small function: the only other file with PTX.
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

// Before the first product, and again after the program has used their registers.
__device__ __forceinline__ void wgmma_fence() {
#ifdef MINILLM_EMULATED
    emulated_wgmma_fence();
#else
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
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
    asm volatile("fence.proxy.async;" ::: "memory");
#endif
}

#if MINILLM_STORAGE == 17
#define WGMMA_TYPES "bf16.bf16"
#else
#define WGMMA_TYPES "f16.f16"
#endif

// d += a b: a [64, 16] by rows, b [N, 16] by rows, both by descriptors; d [64, N] in float. All four warps together.
//
// Warp w of the four holds the rows 16 w ...; lane l, with g = l / 4 and t = l % 4, of each 8 columns j
//   d[4j], d[4j + 1] (g, 8j + 2t..)  d[4j + 2], d[4j + 3] (g + 8, 8j + 2t..)
template <int N>
__device__ __forceinline__ void wgmma_64xNx16(float (&d)[N / 2], unsigned long long a, unsigned long long b) {
    static_assert(N == 128 || N == 256, "tiles of the products here");
#ifdef MINILLM_EMULATED
    emulated_wgmma(d, N, a, b, MINILLM_STORAGE == 17);
#else
    if constexpr (N == 128) {
        asm volatile(
            "{ .reg .pred add; setp.eq.u32 add, 0, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n128k16.f32." WGMMA_TYPES " {"
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
            "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
            "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
            "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
            "}, %64, %65, add, 1, 1, 0, 0; }"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]),
              "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
              "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]),
              "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
              "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]),
              "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
              "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),
              "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
              "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]),
              "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
              "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]),
              "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
              "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]),
              "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
              "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]),
              "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
            : "l"(a), "l"(b));
    } else {
        asm volatile(
            "{ .reg .pred add; setp.eq.u32 add, 0, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n256k16.f32." WGMMA_TYPES " {"
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
            "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
            "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
            "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
            "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
            "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
            "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
            "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
            "}, %128, %129, add, 1, 1, 0, 0; }"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]),
              "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
              "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]),
              "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
              "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]),
              "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
              "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),
              "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
              "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]),
              "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
              "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]),
              "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
              "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]),
              "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
              "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]),
              "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]),
              "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]),
              "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]),
              "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]),
              "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79]),
              "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]),
              "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]),
              "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]),
              "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95]),
              "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99]),
              "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]),
              "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]),
              "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111]),
              "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]),
              "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119]),
              "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]),
              "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])
            : "l"(a), "l"(b));
    }
#endif
}
