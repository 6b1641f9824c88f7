// What gemv.cu and gemv_fused.cu have in common: W, which of its rows is which output, and the sums, of which there are
// three kinds, by the constants of a build: gemv_fma.cuh, gemv_mma.cuh and gemv_integers.cuh.
//
// The last two have the same names: begin_weights, accumulate, share and shared_sum, which mma_product puts in a row.
#pragma once

#include "epilogue.cuh"

#ifdef BITS
#include "integers.cuh"
using Weight = Integers;
// W as a kernel is given it: before the other arguments, and after them.
#define WEIGHT const unsigned char* weight
#define MORE_WEIGHT , const __half *scales, const void *offsets
#define MATRIX Weight(weight, scales, offsets, inputs)
#else
#include "tensor_core.cuh"

struct Dense {
    const storage_t* values;  // [out, inputs]
    int inputs;

    __device__ __forceinline__ Dense(const storage_t* values, int inputs) : values(values), inputs(inputs) {}

    __device__ __forceinline__ const storage_t* row(size_t i) const { return values + i * inputs; }

    // Leave out the first rows.
    __device__ __forceinline__ void skip(size_t rows) { values += rows * inputs; }
};

using Weight = Dense;
#define WEIGHT const storage_t* weight
#define MORE_WEIGHT
#define MATRIX Weight(weight, inputs)
#endif

// gemv_fused.cu deals the rows of W out in another order (PAIRED).
#ifndef PAIRED
// The row of W of a block's output.
__device__ __forceinline__ int weight_row(int output, int outputs) { return min(output, outputs - 1); }
#endif

#if OUTS < 8
#include "gemv_fma.cuh"
#elif MINILLM_STORAGE != 32
#ifdef BITS
#include "gemv_integers.cuh"
#else
#include "gemv_mma.cuh"
#endif

// Rows of x by a block's outputs.
__device__ __forceinline__ void mma_product(const Epilogue& e, const storage_t* x, const Weight& w, int rows,
                                            int inputs, int x_stride) {
    constexpr int THREADS = WARPS * WARP, EACH = (ROWS * OUTS + THREADS - 1) / THREADS;  // sums that a thread finishes
    constexpr int EARLY = EACH <= 8 ? EACH : 0;  // of which what is added is under way while W is read
    int first = blockIdx.x * OUTS, row = threadIdx.x / OUTS, output = first + threadIdx.x % OUTS;
    constexpr int UNROLLED_ENDS = EARLY ? EACH : 1;
    Addends addends[UNROLLED_ENDS];
#pragma unroll
    for (int i = 0; i < EARLY; ++i) addends[i] = load_addends(e, rows, row + i * (THREADS / OUTS), output);

    Sums sums = {};
    accumulate(sums, x, w, first, rows, inputs, e.outputs, x_stride);
    share(sums);
    __syncthreads();

#pragma unroll UNROLLED_ENDS
    for (int i = 0; i < EACH; ++i) {
        int of = row + i * (THREADS / OUTS);
        if (of >= rows || output >= e.outputs) break;
        Addends added = EARLY ? addends[EARLY ? i : 0] : load_addends(e, rows, of, output);
        finish(e, of, output, shared_sum(of, threadIdx.x % OUTS), added);
    }
}

#endif
