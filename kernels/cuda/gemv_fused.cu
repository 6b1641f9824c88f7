// A product of few rows with what comes after it in a layer: the launches of a recorded decode step in one.
//
//   y = x @ W.T + b                                         its sums and their order are those of gemv.cu
//   out[:, :H D], keys[slot], values[slot] = q, k, v of y   STORES=1, with HEAD_DIM and PAGE_SIZE; q and k rotated where
//                                                           ROTATED > 0, of each head ROTATED pairs
//   out = activation(y[:, :F]) * y[:, F:]                   GATED=1
//
// The plain kernels (gemv.cu, rotary.cu, kv.cu, glu.cu) remain the specification: here the same numbers are added in the
// same order and rounded to storage_t at the same places, so the results are the same bits. (On a GPU but for what the
// compiler contracts to fma here and not there.)
//
// Constants, grid, block and floor: those of gemv.cu; OUTS is even where there are pairs.
//
// Versions:
//   1. the norm before the product was part of it, in each block, to save a launch. On an H100 that took as long as the
//      launch at 1 row, and longer at more: a step of OPT-1.3B at batch 8 2,034 us, and 1,582 without.
//   2. this one, measured there: TinyLlama 1.1B, which stores rotated keys and has gates, 1,236 in place of 1,347 us at
//      batch 1, 1,388 in place of 1,514 at 8; OPT-1.3B 1,395 in place of 1,416 and 1,579 in place of 1,609.

#include "endings.cuh"

static_assert(STORES != GATED, "compile with -DSTORES=1 or with -DGATED=1");

// The arguments of both kernels: those of gemv.cu, and of kv.cu and rotary.cu or of glu.cu. What a build has no use for is
// null or 0. q goes to out.

#if OUTS < 8

extern "C" __global__ __launch_bounds__(WARPS * WARP, RESIDENT) void fused_fma(
    out_t* out, const storage_t* x, const storage_t* weight, const float* bias, const storage_t* residual, int rows,
    int inputs, int outputs, int x_stride, int out_stride, int residual_stride, int activation, int gate_activation,
    storage_t* keys, storage_t* values, const int* slots, int H, int K, int pages, const int* positions,
    const float* frequencies, const int* text_lens, const int* query_starts, int N, float scale, double factor,
    int original, int splits) {
    Epilogue e{out, bias, residual, outputs, out_stride, residual_stride, activation};
    if constexpr (GATED) {
        fuse(e, Gate{gate_activation}, x, weight, rows, inputs, x_stride, splits);
    } else {
        Rotation rotation{positions, frequencies, text_lens, query_starts, N, ROTATED, original, scale, factor};
        fuse(e, Store{keys, values, slots, H, K, pages, rotation}, x, weight, rows, inputs, x_stride, splits);
    }
}

#elif MINILLM_STORAGE != 32

template <class Ending>
__device__ __forceinline__ void fuse(const Epilogue& e, const Ending& ending, const storage_t* x,
                                     const Weight<typename Ending::Order>& w, int rows, int x_stride) {
    int first = blockIdx.x * OUTS;
    launch_dependents();
    prefetch_bias(e.bias, w, first, OUTS);
    begin_weights(w, first);
    wait_for_results();
    Sums sums = {};
    accumulate(sums, x, w, first, rows, x_stride);
    share(sums);
    __syncthreads();
    finish_all(e, ending, rows, first, OUTS, [&](int row, int i) { return shared_sum(row, i); });
}

extern "C" __global__ __launch_bounds__(WARPS * WARP, RESIDENT) void fused_mma(
    out_t* out, const storage_t* x, const void* weight, const float* bias, const storage_t* residual, int rows,
    int inputs, int outputs, int x_stride, int out_stride, int residual_stride, int activation, int gate_activation,
    storage_t* keys, storage_t* values, const int* slots, int H, int K, int pages, const int* positions,
    const float* frequencies, const int* text_lens, const int* query_starts, int N, float scale, double factor,
    int original, const __half* scales, const void* offsets) {
    Epilogue e{out, bias, residual, outputs, out_stride, residual_stride, activation};
    if constexpr (GATED) {
        Weight<Gate::Order> w(weight, scales, offsets, inputs, outputs);
        fuse(e, Gate{gate_activation}, x, w, rows, x_stride);
    } else {
        Weight<Store::Order> w(weight, scales, offsets, inputs, outputs);
        Rotation rotation{positions, frequencies, text_lens, query_starts, N, ROTATED, original, scale, factor};
        fuse(e, Store{keys, values, slots, H, K, pages, rotation}, x, w, rows, x_stride);
    }
}

#endif
