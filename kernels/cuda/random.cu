// Normal random numbers for the weights of benchmarks, drawn where they stay.
//
//     out = std * standard_normal(size)
//
// Number i comes from the i-th pair of words of Philox4x32-10 under the key `seed`, through Box and Muller ("A note on
// the generation of random normal deviates", Ann. Math. Statist. 29, 1958): sqrt(-2 ln u) cos(2 pi v), and the sine.
// So it depends on i and the seed alone, not on the grid.
//
// Grid: any number of blocks; block: any number of threads, each with four numbers at a time.
// Moved: size numbers written; about 100 whole-number operations for four of them.
// Floor: size sizeof(storage_t) / bandwidth; arithmetic may hold it back. It runs once for each weight.
//
// Versions:
//   1. this one. Not yet measured on a GPU.
#include "common.cuh"
#include "philox.cuh"

constexpr float TWO_PI = 6.2831853f;

// A word as a number in (0, 1), in steps of 2^-23.
__device__ __forceinline__ float open_uniform(unsigned word) { return (2 * (word >> 9) + 1) * (1.0f / (1 << 24)); }

extern "C" __global__ void fill_normal(storage_t* out, unsigned long long size, unsigned long long seed, float std) {
    unsigned long long quads = (size + 3) / 4, step = (unsigned long long)gridDim.x * blockDim.x;
    for (unsigned long long i = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x; i < quads; i += step) {
        unsigned word[4] = {(unsigned)i, 0, 0, 0}, key[2] = {(unsigned)seed, (unsigned)(seed >> 32)};
        philox4x32(word, key);
#pragma unroll
        for (int pair = 0; pair < 2; pair++) {
            float radius = std * sqrtf(-2.0f * logf(open_uniform(word[2 * pair])));
            float angle = TWO_PI * open_uniform(word[2 * pair + 1]);
            unsigned long long at = 4 * i + 2 * pair;
            if (at < size) out[at] = from_float(radius * __cosf(angle));
            if (at + 1 < size) out[at + 1] = from_float(radius * __sinf(angle));
        }
    }
}

// Random bits, four words at a time: the numbers of matrices of 8 and 4 bits.
extern "C" __global__ void fill_bits(unsigned* out, unsigned long long quads, unsigned long long seed) {
    unsigned long long step = (unsigned long long)gridDim.x * blockDim.x;
    for (unsigned long long i = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x; i < quads; i += step) {
        unsigned word[4] = {(unsigned)i, 0, 0, 0}, key[2] = {(unsigned)seed, (unsigned)(seed >> 32)};
        philox4x32(word, key);
#pragma unroll
        for (int j = 0; j < 4; j++) out[4 * i + j] = word[j];
    }
}
