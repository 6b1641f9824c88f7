// Layer norm and RMS norm of rows: of activations, or of the heads of queries and keys.
//
//     layer_norm: out = (x - x.mean()) / sqrt(x.var() + epsilon) * gain + bias       # each row of [T, E]
//     rms_norm:   out = x / sqrt((x * x).mean() + epsilon) * gain + residual          # likewise, or of [T, heads, D]
//
// Grid: (T, heads), one block for each row (heads = 1 but for heads' norms); block: E / (VECTOR * VECTORS) threads,
// rounded up to warps; 512 at most. The heads of a token lie side by side, tokens x_stride apart: q and k are views of
// one fused projection.
// A thread keeps VECTORS vectors of its row in registers, so x is read once, and the variance is the mean square of
// differences from the mean, as in the reference: no cancellation, which a one-pass E[x^2] - E[x]^2 has.
// Moved: 2 T E numbers of storage_t, and 8 E bytes of gain and bias from L2.
// Floor: 2 T E sizeof(storage_t) / bandwidth; for a few rows it is a launch and two sums over a block.
//
// A residual is added here where the norm comes after the sublayer. Elsewhere the product before a norm adds it, where
// its sums are still in registers.
//
// Versions:
//   1. three passes over the row in memory (mean, variance, result): 4 T E numbers, the later reads mostly from L2.
//   2. this one, the row in registers: 2 T E numbers. Expected: half the time for many rows, two L2 latencies for one
//      row. Gain, bias and residual are loaded together with the row (`EARLY`): expected, two latencies of device
//      memory less for a row. H100, rows of 4,096: RMS norm 2.1 us for one, 10.9 for 2,000, 0.99 of the copy
//      bandwidth; layer norm 2.5 and 14.8, 0.74. Expected next, for heads: several of them in a block, which now
//      is one warp.
#include "rows.cuh"

#ifndef VECTORS
#define VECTORS 1
#endif

// What a vector of the row is multiplied with, and what is added to it; undefined where it is absent.
struct Parameters {
    Loaded<float> gain, bias;
    Loaded<storage_t> residual;
};

// Parameters are under way before the sums are taken, where registers suffice: a decode step finds them in device memory
// each time, since the weights between two steps push them out of L2.
constexpr bool EARLY = VECTORS * VECTOR <= 16;

// VECTOR numbers of a parameter: loaded now, if they are not there.
template <class T>
__device__ __forceinline__ void parameter(float x[VECTOR], const Loaded<T>& early, const T* p, int left, bool wide) {
    if (EARLY)
        early.convert(x);
    else
        load_vector(x, p, left, wide);
}

template <bool CENTRED>
__device__ __forceinline__ void norm_row(storage_t* out, const storage_t* x, const float* gain, const float* bias,
                                         const storage_t* residual, int E, int x_stride, int gain_stride,
                                         float epsilon) {
    __shared__ float scratch[WARP];
    bool wide = rows_aligned(x, x_stride) && rows_aligned(out, E) && rows_aligned(gain, E) && rows_aligned(bias, E);
    wide = wide && rows_aligned(residual, E);
    follow();
    x += (long long)blockIdx.x * x_stride + blockIdx.y * E;
    if (gain != nullptr) gain += blockIdx.y * gain_stride;
    if (residual != nullptr) residual += ((long long)blockIdx.x * gridDim.y + blockIdx.y) * E;
    out += ((long long)blockIdx.x * gridDim.y + blockIdx.y) * E;

    Loaded<storage_t> loaded[VECTORS];
    Parameters early[VECTORS];
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        int at = (v * blockDim.x + threadIdx.x) * VECTOR, left = E - at;
        loaded[v].load(x + at, left, wide);
        if (EARLY && gain != nullptr) early[v].gain.load(gain + at, left, wide);
        if (EARLY && bias != nullptr) early[v].bias.load(bias + at, left, wide);
        if (EARLY && residual != nullptr) early[v].residual.load(residual + at, left, wide);
    }
    float values[VECTORS][VECTOR];
    float total = 0.0f;
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        loaded[v].convert(values[v]);
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
        if (gain != nullptr) parameter(factor, early[v].gain, gain + at, left, wide);
#pragma unroll
        for (int i = 0; i < VECTOR; i++) values[v][i] *= gain != nullptr ? scale * factor[i] : scale;
        if (bias != nullptr) {
            parameter(factor, early[v].bias, bias + at, left, wide);
#pragma unroll
            for (int i = 0; i < VECTOR; i++) values[v][i] += factor[i];
        }
        if (residual != nullptr) {
            parameter(factor, early[v].residual, residual + at, left, wide);
#pragma unroll
            for (int i = 0; i < VECTOR; i++) values[v][i] += factor[i];
        }
        store_vector(out + at, values[v], left, wide);
    }
}

// One block on a multiprocessor is enough (the 1): without it ptxas saves registers until a row spills.
extern "C" __global__ void __launch_bounds__(512, 1)
    layer_norm(storage_t* out, const storage_t* x, const float* gain, const float* bias, int E, int x_stride,
               float epsilon) {
    norm_row<true>(out, x, gain, bias, nullptr, E, x_stride, 0, epsilon);
}

extern "C" __global__ void __launch_bounds__(512, 1)
    rms_norm(storage_t* out, const storage_t* x, const float* gain, const storage_t* residual, int E, int x_stride,
             int gain_stride, float epsilon) {
    norm_row<false>(out, x, gain, nullptr, residual, E, x_stride, gain_stride, epsilon);
}
