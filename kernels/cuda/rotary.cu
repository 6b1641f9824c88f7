// Rotary position embedding of queries and keys, before keys are stored (Su et al., arXiv 2104.09864).
//
//     angle[t, j] = positions[t] * frequencies[j]                                   # [T], [r / 2] -> [T, r / 2]
//     out[.., :r/2] = x[.., :r/2] * cos - x[.., r/2:r] * sin                          each head of q [T, H, D] and
//     out[.., r/2:r] = x[.., r/2:r] * cos + x[.., :r/2] * sin                         of k [T, K, D]
//     out[.., r:] = x[.., r:]
//
// with cosines and sines times `scale`. Where `text_lens` is given, a text of S > original tokens has its frequencies
// divided by a^(2 j / (r - 2)), a = factor S / original - (factor - 1): `Stretch` of minillm/reference/rotary.py. Or, if
// the factor is 0, it has the second of two rows of frequencies (`Rotation.short`).
//
// An angle is the float product of position and frequency, as transformers has it, and its sine and cosine are those of
// the full range (sincosf, not the hardware's): at position 100,000 the hardware's would have no right digit.
//
// Grid: T, one block for each token; block: 256. The pairs' cosines and sines come to shared memory once; then threads
// walk over the heads, 16 bytes of first and of second numbers at a time.
// Moved: 2 T (H + K) D numbers, and 4 T bytes of positions.
// Floor: 2 T (H + K) D sizeof(storage_t) / bandwidth. Llama 3.1 8B (40 heads of 128) in 16 bits, a prompt of 2,000
// tokens: 41 MB a layer, 10 us at 4.3 TB/s; of a decode step it is a launch.
//
// Versions:
//   1. queries and keys apart, an angle for each number: two launches, and as many sines as numbers.
//   2. this one: one launch, r / 2 sines a token. H100, 32 heads of 128: 3.0 us for a token, 26 for 2,000,
//      0.84 of the copy bandwidth.
//   3. for a decode step that is recorded: in the product that makes the queries and keys (gemv_fused.cu).
#include "rotary.cuh"
#include "rows.cuh"

// `heads` rows of D, side by side in `x` and `out`: `half` pairs of each turn, the rest is copied.
__device__ __forceinline__ void turn(storage_t* out, const storage_t* x, const float* cosines, const float* sines,
                                     int heads, int D, int half, bool wide) {
    int pieces = (half + VECTOR - 1) / VECTOR, rest = D - 2 * half, rest_pieces = (rest + VECTOR - 1) / VECTOR;
    wide = wide && D % VECTOR == 0 && half % VECTOR == 0;
    for (int i = threadIdx.x; i < heads * pieces; i += blockDim.x) {
        int at = i % pieces * VECTOR, left = half - at, head = i / pieces * D + at;
        float first[VECTOR], second[VECTOR];
        load_vector(first, x + head, left, wide);
        load_vector(second, x + head + half, left, wide);
#pragma unroll
        for (int j = 0; j < VECTOR; j++) {
            if (j >= left) break;
            rotate(first[j], second[j], cosines[at + j], sines[at + j]);
        }
        store_vector(out + head, first, left, wide);
        store_vector(out + head + half, second, left, wide);
    }
    for (int i = threadIdx.x; i < heads * rest_pieces; i += blockDim.x) {
        int at = i % rest_pieces * VECTOR, place = i / rest_pieces * D + 2 * half + at;
        float same[VECTOR];
        load_vector(same, x + place, rest - at, wide);
        store_vector(out + place, same, rest - at, wide);
    }
}

// q: [T, H, D] and k: [T, K, key_dim], heads side by side, rows q_stride and k_stride apart; q_out, k_out: contiguous.
// positions: [T]. frequencies: [half] or [2, half]. text_lens: [N] or null; query_starts: [N + 1]. Dynamic shared memory: 8 half.
// Four blocks are to fit on a multiprocessor (the 4): without it ptxas saves registers for more until a number spills.
extern "C" __global__ void __launch_bounds__(256, 4)
    rotary(storage_t* q_out, storage_t* k_out, const storage_t* q, const storage_t* k, const int* positions,
           const float* frequencies, const int* text_lens, const int* query_starts, int N, int H, int K, int D,
           int key_dim, int half, int q_stride, int k_stride, float scale, double factor, int original) {
    extern __shared__ __align__(16) unsigned char dynamic_shared[];
    float* cosines = reinterpret_cast<float*>(dynamic_shared);  // [half]
    float* sines = cosines + half;
    int t = blockIdx.x;
    follow();
    Rotation rotation{positions, frequencies, text_lens, query_starts, N, half, original, scale, factor};
    float growth = rotation.stretch(t);
    for (int j = threadIdx.x; j < half; j += blockDim.x) rotation.turn(t, j, growth, cosines[j], sines[j]);
    __syncthreads();
    bool wide = rows_aligned(q, q_stride) && rows_aligned(q_out, D);
    turn(q_out + (long long)t * H * D, q + (long long)t * q_stride, cosines, sines, H, D, half, wide);
    wide = rows_aligned(k, k_stride) && rows_aligned(k_out, key_dim);
    turn(k_out + (long long)t * K * key_dim, k + (long long)t * k_stride, cosines, sines, K, key_dim, half, wide);
}
