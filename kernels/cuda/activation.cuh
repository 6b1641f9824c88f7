// The activations of an MLP, in float: the same as minillm/reference/activation.py.
#pragma once

#include "common.cuh"

// The numbers by which minillm/backends/cuda/linear.py names them; 0 is none.
constexpr int RELU = 1, GELU = 2, GELU_NEW = 3, SILU = 4, SWIGLU_OAI = 5;

// GELU's approximation is x (1 + tanh(u)) / 2 with u = sqrt(2 / pi) (x + 0.044715 x^3); and (1 + tanh(u)) / 2 is the
// sigmoid of 2u. So it takes one exponential, as SiLU does, and loses no digits where tanh comes near -1.
__device__ __forceinline__ float activate(float x, int activation) {
    if (activation == RELU) return x < 0.0f ? 0.0f : x;  // not fmaxf, which would hide a NaN
    if (activation == GELU) return 0.5f * x * (1.0f + erff(x * 0.70710678f));
    if (activation == GELU_NEW || activation == SILU) {
        float u = activation == SILU ? x : 1.5957691f * x * (1.0f + 0.044715f * x * x);
        return x / (1.0f + expf(-u));
    }
    return x;
}

// The gate of a gated MLP: activation(gate) * up, or gpt-oss's of both clamped. No fminf, which would hide a NaN.
__device__ __forceinline__ float gated(float gate, float up, int activation) {
    if (activation != SWIGLU_OAI) return activate(gate, activation) * up;
    gate = gate > 7.0f ? 7.0f : gate;
    up = up > 7.0f ? 7.0f : up < -7.0f ? -7.0f : up;
    return gate / (1.0f + expf(-1.702f * gate)) * (up + 1.0f);
}
