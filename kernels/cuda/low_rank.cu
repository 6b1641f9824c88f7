// LoRA adapters of single requests beside a projection (Hu et al., arXiv 2106.09685): rows of different adapters together.
//
//     h[t] = A[n[t]] @ x[t]                                        # low_rank_down, [T, in] -> [T, R] float
//     out[t] = activation(y[t] + B[n[t]] @ h[t]) + r[t]            # low_rank_up, [T, R] -> [T, out]
//
// n[t] is the number of row t's adapter, -1 for none, and is read on the device: a recorded step serves any mixture of
// adapters. All A and B [R, out] of a projection are one array each, with room for the highest rank R; what lies beyond
// an adapter's own rank is not read. The scale is in B. Both are float32, as they are trained.
//
// Bytes: 4 r (in + out) of each row's adapter, from device memory once for each adapter in the step; y is read and
// written once more than without adapters. Floor: rank 16 of 4096 x 4096: 0.5 MB, 0.1 us at 4.3 TB/s, so two launches are
// what it takes; rank 64 with 32 different adapters 67 MB, 16 us.
//
// Versions:
//   1. by the array module for each adapter in turn: seven launches an adapter, rows sent from the host, not recorded.
//   2. these, two launches for all adapters, recorded. Right on an H100, not timed.
#include "epilogue.cuh"
#include "rows.cuh"

// Grid: (R, T); block: 128 threads, which share one sum.
// h: [T, most]; x: rows x_stride apart; down: [adapters, most, inputs]; numbers: [T]; ranks: [adapters].
extern "C" __global__ void low_rank_down(float* h, const storage_t* x, const float* down, const int* numbers,
                                         const int* ranks, int adapters, int most, int inputs, int x_stride) {
    __shared__ float scratch[WARP];
    follow();
    int j = blockIdx.x, t = blockIdx.y, number = numbers[t];
    if (number < 0) return;
    CHECK_INDEX(number, adapters);
    if (j >= ranks[number]) return;
    const float* a = down + ((size_t)number * most + j) * inputs;
    const storage_t* row = x + (size_t)t * x_stride;
    bool wide = rows_aligned(x, x_stride) && rows_aligned(down, inputs);
    float sum = 0.0f;
#pragma unroll 4
    for (int k = threadIdx.x * VECTOR; k < inputs; k += blockDim.x * VECTOR) {
        float weights[VECTOR], values[VECTOR];
        load_vector(weights, a + k, inputs - k, wide);
        load_vector(values, row + k, inputs - k, wide);
#pragma unroll
        for (int i = 0; i < VECTOR; i++) sum = fmaf(weights[i], values[i], sum);
    }
    sum = block_sum(sum, scratch);
    if (threadIdx.x == 0) h[(size_t)t * most + j] = sum;
}

// Grid: (outputs / threads of a block, T); block: 128 threads, an output each.
// out: [T, outputs], contiguous; y and residual: rows y_stride and residual_stride apart; up: [adapters, most, outputs].
extern "C" __global__ void low_rank_up(out_t* out, const out_t* y, const float* h, const float* up,
                                       const storage_t* residual, const int* numbers, const int* ranks, int adapters,
                                       int most, int outputs, int y_stride, int residual_stride, int activation) {
    follow();
    int output = blockIdx.x * blockDim.x + threadIdx.x, t = blockIdx.y;
    if (output >= outputs) return;
    int number = numbers[t], rank = 0;
    float y_value = read(y[(size_t)t * y_stride + output]);
    float added = residual ? to_float(residual[(size_t)t * residual_stride + output]) : 0.0f;
    if (number >= 0) {
        CHECK_INDEX(number, adapters);
        rank = ranks[number];
        up += (size_t)number * most * outputs + output;
    }
    float sum = 0.0f;
#pragma unroll 8
    for (int j = 0; j < rank; ++j) sum = fmaf(h[(size_t)t * most + j], up[(size_t)j * outputs], sum);
    write(out + (size_t)t * outputs + output, activate(y_value + sum, activation) + added);
}
