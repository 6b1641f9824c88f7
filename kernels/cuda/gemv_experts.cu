// The products of gemv.cu for a mixture of experts, all experts in one launch: y[t] = x[t] @ W[e].T + b[e] for each row t of
// expert e.
//
//   y[starts[e]:starts[e + 1]] = x[starts[e]:starts[e + 1]] @ W[e].T + b[e]
//
// Rows of x are sorted by expert. Blocks of the second dimension of the grid are the experts that have rows, as sort_rows has
// listed them on the device, so that nobody waits for the host (experts.cu). An expert with more than ROWS rows goes on to
// the next of them.
//
// Constants, block and what limits it: those of gemv.cu. Bytes and floor: the matrices of the experts that have rows, once for
// each ROWS of these, at the bandwidth of device memory.

#include "gemv.cuh"

// The arguments of both kernels. weight: [X, outputs, inputs], with scales and offsets where it is of integers; starts:
// [X + 1], expert e has the rows starts[e] : starts[e + 1] of x and out; present: the experts that have rows, then -1;
// biases: [X, outputs], or null.

#if OUTS < 8

// Grid: (as of gemv_fma, length of `present`); block: WARPS warps.
extern "C" __global__ __launch_bounds__(WARPS * WARP, RESIDENT) void experts_fma(
    out_t* out, const storage_t* x, const storage_t* weight, const int* starts, const int* present, const float* biases,
    int inputs, int outputs, int x_stride, int out_stride, int splits) {
    follow();
    int expert = present[blockIdx.y];
    if (expert < 0) return;
    size_t skipped = (size_t)expert * outputs;  // rows of the experts before
    const float* bias = biases ? biases + skipped : nullptr;
    Weight<InOrder> w(weight, nullptr, nullptr, inputs, outputs);
    w.skip(skipped);
    Part part(splits);
    int stop = starts[expert + 1];
    for (int row = starts[expert]; row < stop; row += ROWS) {
        Epilogue e{out + (size_t)row * out_stride, bias, nullptr, outputs, out_stride, 0, 0};
        fma_product(e, x + (size_t)row * x_stride, w, part, min(ROWS, stop - row), x_stride);
        __syncthreads();  // until then sums of these rows are read
    }
}

#elif MINILLM_STORAGE != 32

// Grid: (ceil(outputs / OUTS), length of `present`); block: WARPS warps.
extern "C" __global__ __launch_bounds__(WARPS * WARP, RESIDENT_EXPERTS) void experts_mma(
    out_t* out, const storage_t* x, const void* weight, const int* starts, const int* present, const float* biases,
    int inputs, int outputs, int x_stride, int out_stride, const __half* scales, const void* offsets) {
    follow();
    int expert = present[blockIdx.y];
    if (expert < 0) return;
    size_t skipped = (size_t)expert * outputs;  // rows of the experts before
    const float* bias = biases ? biases + skipped : nullptr;
    Weight<InOrder> w(weight, scales, offsets, inputs, outputs);
    w.skip(skipped);
    int stop = starts[expert + 1];
    for (int row = starts[expert]; row < stop; row += ROWS) {
        Epilogue e{out + (size_t)row * out_stride, bias, nullptr, outputs, out_stride, 0, 0};
        begin_weights(w, blockIdx.x * OUTS);
        mma_product(e, x + (size_t)row * x_stride, w, min(ROWS, stop - row), x_stride);
        __syncthreads();  // until then sums of these rows are read
    }
}

#endif
