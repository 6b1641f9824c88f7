// The CUDA language for g++: forced into every `.cu` file by -include.
//
// Keywords become what g++ has: a kernel is a plain function, called once per thread, and __shared__ becomes
// thread_local, the one storage class that is allowed beside `extern` and implies `static` inside a function. Blocks
// run one after another on one operating-system thread, so such a variable is one per block, as it should be; the
// runtime finds all of a module's in its TLS segment and fills them with NaN before each block.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <math.h>
#include <type_traits>
#include <utility>

#include <vector_functions.h>
#include <vector_types.h>
// These give half and bfloat16 with the arithmetic NVIDIA wrote for the host.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "runtime.h"

#undef __shared__
#undef __global__
#undef __device__
#undef __host__
#undef __constant__
#undef __forceinline__
#undef __launch_bounds__
#undef __align__
#undef __grid_constant__
#undef __cluster_dims__
#define __shared__ thread_local
#define __global__ __attribute__((emulated_kernel))  // not known to g++; building.py looks for it to find the kernels
#define __device__
#define __host__
#define __constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __cluster_dims__(...)  // the launcher knows it from the option CLUSTER
#define __align__(n) __attribute__((aligned(n)))

// Makes `extern __shared__ unsigned char dynamic_shared[]` the declaration of a pointer to that array, and each use of
// the name the array: so the runtime can place it.
#define dynamic_shared (*emulated_dynamic_shared)

#define threadIdx (emulation::current->index)
#define blockIdx emulation::block_index
#define blockDim emulation::block_size
#define gridDim emulation::grid_size
constexpr int warpSize = 32;

inline void __syncthreads(EMULATED_PLACE) { emulation::block_barrier(0, {file, line}); }
inline int __syncthreads_count(int p, EMULATED_PLACE) { return emulation::block_barrier(p, {file, line}).count; }
inline int __syncthreads_and(int p, EMULATED_PLACE) { return emulation::block_barrier(p, {file, line}).all; }
inline int __syncthreads_or(int p, EMULATED_PLACE) { return emulation::block_barrier(p, {file, line}).any; }

// Threads run one at a time and switch only where they wait, so memory is always up to date.
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}

[[noreturn]] inline void __trap(EMULATED_PLACE) { emulation::fail({file, line}, "the kernel stopped itself by __trap"); }

inline void emulated_check(long long index, long long size, const char* text, const char* file, int line) {
    if (index < 0 || index >= size)
        emulation::fail({file, line}, "%s is %lld, should be from 0 to below %lld", text, index, size);
}

#include "arithmetic.h"
#include "atomics.h"
#include "tensor_core.h"
#include "warp.h"
