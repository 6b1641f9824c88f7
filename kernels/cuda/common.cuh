// Shared by all kernels: the storage type, sums and maxima over a warp, and the check of indices.
//
// A module is compiled for one storage type, chosen by -DMINILLM_STORAGE=32 (float), 16 (half) or 17 (bfloat16):
// weights, activations and the K/V cache are storage_t, and every sum is taken in float.
#pragma once

#ifndef MINILLM_EMULATED
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

#include "dependent.cuh"

#ifndef MINILLM_STORAGE
#error "compile with -DMINILLM_STORAGE=32, 16 or 17"
#endif

#if MINILLM_STORAGE == 32
using storage_t = float;
__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float from_float(float x) { return x; }
#elif MINILLM_STORAGE == 16
using storage_t = __half;
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ __half from_float(float x) { return __float2half_rn(x); }
#elif MINILLM_STORAGE == 17
using storage_t = __nv_bfloat16;
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ __nv_bfloat16 from_float(float x) { return __float2bfloat16_rn(x); }
#else
#error "MINILLM_STORAGE is 32, 16 or 17"
#endif

constexpr int WARP = 32;
constexpr unsigned ALL_LANES = 0xffffffffu;

// Numbers of storage_t in 16 bytes, the widest load a thread can make.
constexpr int VECTOR = 16 / sizeof(storage_t);

// A kernel built with -DMINILLM_CUDA_DEBUG checks indices from block tables, ids and slots against their bounds.
#ifdef MINILLM_CUDA_DEBUG
#ifndef __CUDACC_RTC__
#include <cstdio>  // NVRTC has no headers of the C++ library, and knows printf without one
#endif
#ifdef MINILLM_EMULATED
#define CHECK_INDEX(index, size) emulated_check((index), (size), #index, __FILE__, __LINE__)
#else
#define CHECK_INDEX(index, size)                                                                     \
    do {                                                                                             \
        if ((index) < 0 || (index) >= (size)) {                                                      \
            printf("%s:%d: %s is %lld, should be below %lld\n", __FILE__, __LINE__, #index,          \
                   (long long)(index), (long long)(size));                                           \
            __trap();                                                                                \
        }                                                                                            \
    } while (0)
#endif
#else
#define CHECK_INDEX(index, size) ((void)0)
#endif

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(ALL_LANES, x, offset);
    return x;
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, offset));
    return x;
}

// The sum over a block whose size is a multiple of WARP; `scratch` holds one float per warp. All threads get it.
// The order of the additions is fixed, so equal input gives equal bits.
__device__ __forceinline__ float block_sum(float x, float* scratch) {
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, warps = blockDim.x / WARP;
    x = warp_sum(x);
    __syncthreads();  // scratch may still be read from the sum before
    if (lane == 0) scratch[warp] = x;
    __syncthreads();
    return warp_sum(lane < warps ? scratch[lane] : 0.0f);
}
