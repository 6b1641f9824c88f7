// Causal depthwise convolution over the last k tokens of each sequence, whose inputs before a pass are in a state.
//
//     u   = x, or b * x of rows (b, c, x) if gated, in float32
//     out = activation(sum(w[j] * u[t - (k - 1) + j] for j in range(k)) + bias), or c * (...) if gated
//     states[after[t]] = u[t - (k - 2) : t + 1]                                    # float32
//
// `before` leads from a token to the one before it, in this pass or in a state (reference/convolution.py). A slot that
// is written is none that is read, so the blocks of a launch need no order, and a launch can be repeated.
//
// Grid: (T, channels / threads of a block); block: up to 256 threads, a channel each.
// Moved: 3 T C numbers of a gated x and T C of the result, a state of (k - 1) C floats read and written per sequence;
// the k reads of a row by later tokens hit the L2 cache.
// Floor: these bytes / bandwidth. LFM2 1.2B (C = 2048, k = 3) in 16 bits, a prompt of 2,000 tokens: 33 MB a layer, 10 us
// at 3.35 TB/s; of a decode step it is a launch.
//
// Versions:
//   1. this one. Not yet measured on a GPU.
#include "activation.cuh"
#include "common.cuh"

constexpr int MOST_TAPS = 64;

// The input of a token, `place` its row, or below 0 the number of a state that holds it `age` tokens back from its end.
__device__ __forceinline__ float input_of(const storage_t* x, const float* states, int place, int age, int k, int C,
                                          int x_stride, int gated, int c) {
    if (place == -1) return 0.0f;
    if (place < -1) return states[((long long)(-2 - place) * (k - 1) + k - 1 - age) * C + c];
    const storage_t* row = x + (long long)place * x_stride + c;
    return gated ? to_float(row[0]) * to_float(row[2 * C]) : to_float(row[0]);
}

// x: [T, C], or gated [T, 3 C], rows x_stride apart. taps: [k, C]. bias: [C] or NULL. states: [slots, k - 1, C].
// before, after: [T]. out: [T, C], contiguous.
extern "C" __global__ void convolve(storage_t* out, const storage_t* x, const float* taps, const float* bias,
                                    float* states, const int* before, const int* after, int C, int k, int slots,
                                    int x_stride, int gated, int activation) {
    __shared__ int places[MOST_TAPS], ages[MOST_TAPS];  // by the distance to this token
    follow();
    int t = blockIdx.x, c = blockIdx.y * blockDim.x + threadIdx.x;
    if (threadIdx.x == 0) {
        int place = t, age = 0;
        for (int d = 0; d < k; d++) {
            if (d && place >= 0) place = before[place];
            age += place < 0;
            CHECK_INDEX(place < 0 ? 0 : place, (int)gridDim.x);
            CHECK_INDEX(place < -1 ? -2 - place : 0, slots);
            places[d] = place;
            ages[d] = age;
        }
    }
    __syncthreads();
    if (c >= C) return;
    float sum = 0.0f;
    int slot = after[t];
    CHECK_INDEX(slot < 0 ? 0 : slot, slots);
    for (int d = k - 1; d >= 0; d--) {
        float u = input_of(x, states, places[d], ages[d], k, C, x_stride, gated, c);
        sum = fmaf(u, taps[(k - 1 - d) * C + c], sum);
        if (slot >= 0 && d < k - 1) states[((long long)slot * (k - 1) + k - 2 - d) * C + c] = u;
    }
    if (bias) sum += bias[c];
    if (gated) sum *= to_float(x[(long long)t * x_stride + C + c]);
    out[(long long)t * C + c] = from_float(activate(sum, activation));
}
