// A product of few rows, the decode step's: y[t, o] = activation(sum_k x[t, k] W[o, k] + b[o]) + r[t, o], t < 64.
//
//   y = activation(x @ W.T + b) + r
//
// Constants: ROWS (1 to 64, a power of two), the rows that the code is unrolled for; a launch may have fewer.
//            BITS, GROUP and OFFSETS: W is a matrix of integers, see integers.cuh; it goes to gemv_mma, with SPLITS and
//            STAGES, see gemv_integers.cuh (OUTS 16 to 128).
//            OUTS, the outputs of one warp: 1, 2, 4 for gemv_fma, 8, 16, 32 for gemv_mma.
//            FLOAT_OUT, see epilogue.cuh.
//
// Bytes and floor. Each weight is read once from device memory, whatever the rows: out * in * sizeof(storage_t) bytes,
// while x and y are negligible. 4096 x 4096 in 16 bits: 34 MB, 7.8 us at 4.3 TB/s; 768 x 768: 1.2 MB, 0.3 us,
// less than a launch. Nothing is used twice, so what counts is bytes in flight: about 20 kB on every processor at all
// times (4.3 TB/s x 600 ns of latency / 132). Hence 16-byte loads, several of them issued before the first is used.
//
// Grid: out / outputs of a block; block: 128 (gemv_fma) or 256 (gemv_mma). A warp owns OUTS neighbouring rows of W and
// reads each vector of x once for all of them. The warps of a block split `in` between them where there are too few
// outputs to occupy every processor, and add up through shared memory in a fixed order: equal input gives equal bits.
// x is not staged in shared memory: it stays in the L1 cache, its loads need no barrier, and so they are under way
// together with those of W.
//
// Versions; times on an H100, whose copy moves 3.0 TB/s:
//   gemv_fma  Multiply-adds in float. At 4.3 TB/s 2.15 T 16-bit weights arrive a second; with R rows they need R times
//             as many multiply-adds, of about 29 T a second that 132 processors have. Meant for R up to 4, and for
//             float storage (half as many weights arrive). One row of OPT-1.3B's qkv, out, up and down in 10.2, 4.7, 12.9
//             and 13.0 us, at 0.82, 0.60, 0.86 and 0.86 of the floor; of 6.7B's 34, 13, 45 and 46: 0.97, 0.86, 0.98,
//             0.96. About 2 us are the beginning and the end of a launch.
//   gemv_mma  For 5 to 64 rows of 16-bit storage: the same loads feed tensor cores, m16n8k16 with x as the 16 rows and
//             W as the 8 columns; 32 and 64 rows are 2 and 4 such tiles of a warp, for which W is still read once. A
//             lane's 16 bytes hold 8 neighbouring k of one row, where mma wants two pairs 8 apart; but a sum may be
//             taken in any order, so x and W are given to mma in the same permutation of k and nothing is moved.
//             Of 32 and 64 rows each block reads x from L2: ROWS / OUTS as many bytes as of W. The products above in 11.2,
//             5.7, 13.9, 15.3 us with 8 rows, 12.6, 6.7, 15.5, 19.7 with 32, 21.7, 9.0, 23.9, 26.2 with 64; gemm_mma with
//             several blocks for a tile takes 19, 9.5, 25, 24 with 32 and 24, 11, 29, 29 with 64.
//
// What limits it: bandwidth for large matrices; for small ones (OPT-125m) latency of launch, first load and reduction.
//
// The sums of each kind are in a file of their own: gemv_fma.cuh, gemv_mma.cuh, gemv_integers.cuh; what they end with is in
// epilogue.cuh, or in gemv_fused.cu. Of a mixture of experts gemv_experts.cu has the same products.

#include "gemv.cuh"

#if OUTS < 8

// Grid: ceil(outputs / (OUTS * WARPS / splits)); block: WARPS warps; splits (1, 2, 4): the warps that share a row of W.
extern "C" __global__ __launch_bounds__(WARPS * WARP, RESIDENT) void gemv_fma(
    out_t* out, const storage_t* x, const storage_t* weight, const float* bias, const storage_t* residual, int rows,
    int inputs, int outputs, int x_stride, int out_stride, int residual_stride, int activation, int splits) {
    launch_dependents();
    Weight<InOrder> w(weight, nullptr, nullptr, inputs, outputs);
    Part part(splits);
    prefetch_weights(w, part);
    wait_for_results();
    Epilogue e{out, bias, residual, outputs, out_stride, residual_stride, activation};
    fma_product(e, x, w, part, rows, x_stride);
}

#elif MINILLM_STORAGE != 32

// weight, scales, offsets: those of the constructor of `Dense` or `Integers`.
// Grid: ceil(outputs / OUTS), of integers (that, ceil(rows / ROWS)); block: WARPS warps, which split `in`.
extern "C" __global__ __launch_bounds__(WARPS * WARP, RESIDENT) void gemv_mma(
    out_t* out, const storage_t* x, const void* weight, const float* bias, const storage_t* residual, int rows,
    int inputs, int outputs, int x_stride, int out_stride, int residual_stride, int activation, const __half* scales,
    const void* offsets) {
    if constexpr (ROWS_OF_BLOCKS) {
        x += (size_t)blockIdx.y * ROWS * x_stride;
        out += (size_t)blockIdx.y * ROWS * out_stride;
        if (residual) residual += (size_t)blockIdx.y * ROWS * residual_stride;
        rows = min(rows - (int)blockIdx.y * ROWS, ROWS);
    }
    launch_dependents();
    Weight<InOrder> w(weight, scales, offsets, inputs, outputs);
    begin_weights(w, blockIdx.x * OUTS);
    wait_for_results();
    Epilogue e{out, bias, residual, outputs, out_stride, residual_stride, activation};
    mma_product(e, x, w, rows, x_stride);
}

#endif
