// Mamba-2's recurrence: each head of a sequence has a state S [P, N] that decays, is added to and is read.
//
//     step = minimum(maximum(log1p(exp(steps + step_bias)), least), most)            # in float32, as all of it
//     S    = exp(-exp(decay) * step) * S + outer(step * x, B)
//     out  = S @ C + skip * x
//     states[after[t]] = S
//
// `before` leads from a token to the one before it, in this pass or in a state (reference/selective_scan.py). A slot
// that is written is none that is read, so the blocks of a launch need no order, and a launch can be repeated.
//
// Grid: H P / warps of a block; block: 4 warps, each with one row of a head's state in its registers, N / 32 numbers a
// lane (VALUES), which goes through all tokens in order. A branch of a tree computes the states of its path again.
// Moved: H P + 2 G N + H numbers of a token, H P of its result, a state of H P N floats read and written per sequence;
// B and C of a group hit the L1 cache in all but the first of its rows.
// Floor: these bytes / bandwidth. Granite 4.0 H Small (H = 128, P = 64, N = 128), a decode step of a sequence: 8.4 MB a
// layer, 2.5 us at 3.35 TB/s.
//
// Versions:
//   1. this one: a prompt's tokens one by one, some 8,000 rows at a time. Not yet measured on a GPU.
#include "common.cuh"

#ifndef VALUES
#define VALUES 4
#endif

struct Scan {
    const storage_t *x, *steps;
    const float *rates, *step_bias;
    int H, P, G, N, x_stride, step_stride;
    float least, most;
};

// A lane's numbers of S after token t from those before it; returns its share of S C.
__device__ __forceinline__ float advance(const Scan& a, float S[VALUES], int h, float value, int t, int lane) {
    const storage_t* B = a.x + (long long)t * a.x_stride + a.H * a.P + h / (a.H / a.G) * a.N;
    const storage_t* C = B + a.G * a.N;
    float y = to_float(a.steps[(long long)t * a.step_stride + h]) + a.step_bias[h];
    float step = fmaxf(y, 0.0f) + log1pf(expf(-fabsf(y)));
    step = fminf(fmaxf(step, a.least), a.most);
    float decay = expf(-expf(a.rates[h]) * step), added = step * value, read = 0.0f;
#pragma unroll
    for (int i = 0; i < VALUES; i++) {
        int n = i * WARP + lane;
        if (n >= a.N) break;
        S[i] = fmaf(added, to_float(B[n]), decay * S[i]);
        read = fmaf(S[i], to_float(C[n]), read);
    }
    return read;
}

// x: [T, H P + 2 G N], steps: [T, H], rows x_stride and step_stride apart. rates: [2 H]. step_bias: [H].
// states: [slots, H, P, N]. before, after: [T]. out: [T, H P], contiguous.
extern "C" __global__ void selective_scan(storage_t* out, const storage_t* x, const storage_t* steps,
                                          const float* rates, const float* step_bias, float* states, const int* before,
                                          const int* after, int T, int H, int P, int G, int N, int slots, int x_stride,
                                          int step_stride, float least, float most) {
    follow();
    int row = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (row >= H * P) return;
    int h = row / P;
    Scan a = {x, steps, rates, step_bias, H, P, G, N, x_stride, step_stride, least, most};
    float S[VALUES];
    for (int t = 0; t < T; t++) {
        int place = before[t];
        CHECK_INDEX(place < 0 ? 0 : place, T);
        if (t == 0 || place != t - 1) {  // the state after the token before: from the last stored one on
            int distance = 0, base = place;
            for (; base >= 0; base = before[base]) distance++;
            CHECK_INDEX(base < -1 ? -2 - base : 0, slots);
#pragma unroll
            for (int i = 0; i < VALUES; i++) {
                int n = i * WARP + lane;
                bool stored = base < -1 && n < N;
                S[i] = stored ? states[((long long)(-2 - base) * H * P + row) * N + n] : 0.0f;
            }
            while (distance--) {
                int past = place;
                for (int i = 0; i < distance; i++) past = before[past];
                advance(a, S, h, to_float(x[(long long)past * x_stride + row]), past, lane);
            }
        }
        float value = to_float(x[(long long)t * x_stride + row]);
        float sum = warp_sum(advance(a, S, h, value, t, lane));
        if (lane == 0) out[(long long)t * H * P + row] = from_float(fmaf(rates[H + h], value, sum));
        int slot = after[t];
        CHECK_INDEX(slot < 0 ? 0 : slot, slots);
        if (slot < 0) continue;
#pragma unroll
        for (int i = 0; i < VALUES; i++) {
            int n = i * WARP + lane;
            if (n < N) states[((long long)slot * H * P + row) * N + n] = S[i];
        }
    }
}
