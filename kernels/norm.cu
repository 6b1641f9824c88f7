// Layer norm and RMS norm, alone or fused with the addition of a residual in front of them.
//
//     s = x + residual                                                     # where there is one; stored in `sum`
//     layer_norm: out = (s - s.mean()) / sqrt(s.var() + epsilon) * gain + bias       # each row of [T, E]
//     rms_norm:   out = s / sqrt((s * s).mean() + epsilon) * gain
//
// The norm is taken of the sum as it is stored, so that fused and apart give the same bits. `sum` may be x or the
// residual itself: a thread writes only what it has read.
//
// Grid: T, one block for each row; block: E / (VECTOR * VECTORS) threads, rounded up to warps; 512 at most.
// A thread keeps VECTORS vectors of its row in registers, so x is read once, and the variance is the mean square of
// differences from the mean, as in the reference: no cancellation, which a one-pass E[x^2] - E[x]^2 has.
// Moved: 2 T E numbers of storage_t (4 T E with a residual), and 8 E bytes of gain and bias from L2.
// Floor: 2 T E sizeof(storage_t) / bandwidth; for a few rows it is a launch and two sums over a block.
//
// Versions:
//   1. three passes over the row in memory (mean, variance, result): 4 T E numbers, the later reads mostly from L2.
//   2. the row in registers: 2 T E numbers. Expected: half the time for many rows, two L2 latencies for one row.
//   3. this one, with the addition fused: saves a launch and 2 T E numbers a norm. Not yet measured on a GPU.
#include "rows.cuh"

#ifndef VECTORS
#define VECTORS 1
#endif

template <bool CENTRED>
__device__ __forceinline__ void norm_row(storage_t* out, storage_t* sum, const storage_t* x, const storage_t* residual,
                                         const float* gain, const float* bias, int E, float epsilon) {
    __shared__ float scratch[WARP];
    long long row = (long long)blockIdx.x * E;
    bool wide = lies_wide(x, E) && lies_wide(residual, E) && lies_wide(sum, E) && lies_wide(out, E) &&
                lies_wide(gain, E) && lies_wide(bias, E);

    float values[VECTORS][VECTOR];
    float total = 0.0f;
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        int at = (v * blockDim.x + threadIdx.x) * VECTOR, left = E - at;
        load_vector(values[v], x + row + at, left, wide);
        if (residual != nullptr) {
            float added[VECTOR];
            load_vector(added, residual + row + at, left, wide);
#pragma unroll
            for (int i = 0; i < VECTOR; i++) values[v][i] = to_float(from_float(values[v][i] + added[i]));
            store_vector(sum + row + at, values[v], left, wide);
        }
#pragma unroll
        for (int i = 0; i < VECTOR; i++) total += values[v][i];  // what lies beyond the row is 0
    }
    float mean = CENTRED ? block_sum(total, scratch) / E : 0.0f;

    float squares = 0.0f;
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        int left = E - (int)(v * blockDim.x + threadIdx.x) * VECTOR;
#pragma unroll
        for (int i = 0; i < VECTOR; i++) {
            values[v][i] -= mean;
            if (i < left) squares += values[v][i] * values[v][i];
        }
    }
    float scale = 1.0f / sqrtf(block_sum(squares, scratch) / E + epsilon);

#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        int at = (v * blockDim.x + threadIdx.x) * VECTOR, left = E - at;
        if (left <= 0) break;
        float factor[VECTOR];
        if (gain != nullptr) load_vector(factor, gain + at, left, wide);
#pragma unroll
        for (int i = 0; i < VECTOR; i++) values[v][i] *= gain != nullptr ? scale * factor[i] : scale;
        if (bias != nullptr) {
            load_vector(factor, bias + at, left, wide);
#pragma unroll
            for (int i = 0; i < VECTOR; i++) values[v][i] += factor[i];
        }
        store_vector(out + row + at, values[v], left, wide);
    }
}

// One block on a multiprocessor is enough (the 1): without it ptxas saves registers until a row spills.
extern "C" __global__ void __launch_bounds__(512, 1)
    layer_norm(storage_t* out, storage_t* sum, const storage_t* x, const storage_t* residual, const float* gain,
               const float* bias, int E, float epsilon) {
    norm_row<true>(out, sum, x, residual, gain, bias, E, epsilon);
}

extern "C" __global__ void __launch_bounds__(512, 1)
    rms_norm(storage_t* out, storage_t* sum, const storage_t* x, const storage_t* residual, const float* gain, int E,
             float epsilon) {
    norm_row<false>(out, sum, x, residual, gain, nullptr, E, epsilon);
}
