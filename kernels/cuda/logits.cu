// The scale and the soft cap of logits, in place (Gemma Team, arXiv 2408.00118, section 2).
//
//     logits = cap * tanh(scale * logits / cap)               # [R, V]
//     logits = scale * logits                                 # where cap is 0
//
// Grid: R V / 1,024, at most 65,535 blocks, which then walk on; block: 256, four neighbours each.
// Moved: 2 R V floats; a hyperbolic tangent for each.
// Floor: 8 R V / bandwidth; for one row of 256,000 logits it is a launch.
//
// Versions:
//   1. this one. Not yet measured on a GPU. Expected next: in the epilogue of the head's product, no launch.
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(256)
    scale_logits(float* logits, long long count, float scale, float cap) {
    follow();
    long long step = (long long)gridDim.x * blockDim.x * 4;
    for (long long at = ((long long)blockIdx.x * blockDim.x + threadIdx.x) * 4; at < count; at += step) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (at + i >= count) break;
            float x = logits[at + i] * scale;
            logits[at + i] = cap != 0.0f ? cap * tanhf(x / cap) : x;
        }
    }
}
