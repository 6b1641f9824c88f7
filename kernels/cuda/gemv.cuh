// What gemv.cu, gemv_experts.cu and gemv_fused.cu have in common: W, which of its rows is which output, and the sums, of
// which there are three kinds, by the constants of a build: gemv_fma.cuh, gemv_mma.cuh and gemv_integers.cuh.
//
// The last two have the same names: begin_weights, accumulate, share and shared_sum, which mma_product puts in a row.
#pragma once

#include "epilogue.cuh"
#include "tensor_core.cuh"

#ifdef BITS
#include "integers.cuh"
using Matrix = Integers;
#else
// A matrix of storage_t; scales and offsets are those of another kind, and null.
struct Dense {
    const storage_t* values;  // [out, in]
    int row_numbers;

    __device__ __forceinline__ Dense(const void* values, const __half*, const void*, int inputs)
        : values(static_cast<const storage_t*>(values)), row_numbers(inputs) {}

    __device__ __forceinline__ const storage_t* at(size_t row) const { return values + row * row_numbers; }

    // Leave out the first rows.
    __device__ __forceinline__ void skip(size_t rows) { values += rows * row_numbers; }
};
using Matrix = Dense;
#endif

// Which row of W is an output: in their own order; gemv_fused.cu has others. Outputs beyond the last have a row, so that it
// may be read, and are not stored.
struct InOrder {
    static __device__ __forceinline__ int row(int output, int outputs) { return min(output, outputs - 1); }
};

// W, whose rows are outputs in an order.
template <class Order>
struct Weight : Matrix {
    int inputs, outputs;

    __device__ __forceinline__ Weight(const void* values, const __half* scales, const void* offsets, int inputs,
                                      int outputs)
        : Matrix(values, scales, offsets, inputs), inputs(inputs), outputs(outputs) {}

    __device__ __forceinline__ size_t row(int output) const { return Order::row(output, outputs); }
};

#if OUTS < 8
#include "gemv_fma.cuh"
#elif MINILLM_STORAGE != 32
#ifdef BITS
#include "gemv_integers.cuh"
#else
#include "gemv_mma.cuh"
#endif

// Rows of x by a block's outputs.
template <class Order>
__device__ __forceinline__ void mma_product(const Epilogue& e, const storage_t* x, const Weight<Order>& w, int rows,
                                            int x_stride) {
    constexpr int THREADS = WARPS * WARP, EACH = (ROWS * OUTS + THREADS - 1) / THREADS;  // sums that a thread finishes
    constexpr int EARLY = EACH <= 8 ? EACH : 0;  // of which what is added is under way while W is read
    int first = blockIdx.x * OUTS, row = threadIdx.x / OUTS, output = first + threadIdx.x % OUTS;
    constexpr int UNROLLED_ENDS = EARLY ? EACH : 1;
    Addends addends[UNROLLED_ENDS];
#pragma unroll
    for (int i = 0; i < EARLY; ++i) addends[i] = load_addends(e, rows, row + i * (THREADS / OUTS), output);

    Sums sums = {};
    accumulate(sums, x, w, first, rows, x_stride);
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
