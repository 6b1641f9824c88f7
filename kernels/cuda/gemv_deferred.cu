// A product of 1 to 4 rows with the RMS norm before it, which is put off: a norm's launch less in a decode step.
//
//   y = s * ((x * gain) @ W.T) + b, s = 1 / sqrt((x * x).mean() + epsilon)       # rms_norm(x) @ W.T + b, of each row of x
//
// and then what gemv_fma does with it (activation, + r), or fused_fma (STORES, GATED).
//
// The scale s of a row is a factor of all its sums, so it may wait until they are there. A warp adds up the squares of the x
// that it reads anyway; so nobody waits for a norm, as blocks did when it was in the prologue (gemv_fused.cu, version 1).
// What norm.cu rounds to storage_t, rms_norm(x), is not rounded here: the results are nearer to those in float32, and other
// bits. Products and squares are float, as in norm.cu.
//
// Constants, grid and block: those of gemv_fma and fused_fma. Bytes and floor: theirs, and 4 `in` of the gain, from L2.
// Instructions: for each number of x 2 beside OUTS multiply-adds, for each number of the gain its load, for all rows.
//
// Not yet run on a GPU, and off unless MINILLM_CUDA_DEFERRED=1 asks for it (backends/cuda/deferring.py). Expected: 2 us of
// each norm less, 6 or 7 % of a step of models of 1 to 2 billion parameters, 2 % of 8 billion.

#include "endings.cuh"

static_assert(!(STORES && GATED) && OUTS < 8, "compile with -DSTORES=1, -DGATED=1 or neither");

extern "C" __global__ __launch_bounds__(WARPS * WARP, RESIDENT_DEFERRED) void deferred_fma(
    out_t* out, const storage_t* x, const storage_t* weight, const float* bias, const storage_t* residual, int rows,
    int inputs, int outputs, int x_stride, int out_stride, int residual_stride, int activation, int gate_activation,
    storage_t* keys, storage_t* values, const int* slots, int H, int K, int pages, const int* positions,
    const float* frequencies, const int* text_lens, const int* query_starts, int N, float scale, double factor,
    int original, const float* gain, float epsilon, int splits) {
    Epilogue e{out, bias, residual, outputs, out_stride, residual_stride, activation};
    RmsNorm norm{gain, epsilon};
    if constexpr (GATED) {
        fuse(e, Gate{gate_activation}, x, weight, rows, inputs, x_stride, splits, norm);
    } else if constexpr (STORES) {
        Rotation rotation{positions, frequencies, text_lens, query_starts, N, ROTATED, original, scale, factor};
        fuse(e, Store{keys, values, slots, H, K, pages, rotation}, x, weight, rows, inputs, x_stride, splits, norm);
    } else {
        launch_dependents();
        Weight<InOrder> w(weight, nullptr, nullptr, inputs, outputs);
        Part part(splits);
        prefetch_weights(w, part, norm);
        wait_for_results();
        fma_product(e, x, w, part, rows, x_stride, norm);
    }
}
