// A product of many rows on Hopper's tensor cores: y[t, o] = activation(sum_k x[t, k] W[o, k] + b[o]) + r[t, o].
//
//   y = activation(x @ W.T + b) + r
//
// The next version after gemm_mma of gemm.cu, for 16-bit storage on sm_90a alone: wgmma reads both operands from shared
// memory, so no warp spends issue slots or registers on fragments. -arch=sm_90a is given to the compiler first.
//
// Constants: TILE_OUTS, 64, 128 or 256, outputs of a block; its rows are 128.  FLOAT_OUT, see epilogue.cuh.
//
// Floor: as in gemm.cu. Grid: (ceil(T / 128), ceil(out / TILE_OUTS), splits), blocks with a part of k each that share a
// tile; block: 256, two warpgroups with 64 rows each. Dynamic shared memory: STAGES * (128 + TILE_OUTS) * 128 bytes, 192 kB;
// one block on a multiprocessor. `partials` and `arrived` are those of splits.cuh.
//
// Versions, as measured on an H100 (its library: 720 to 760 TFLOP/s):
//   1. cp.async into swizzled shared memory, STAGES steps of 64 k, of which two are on their way while wgmma computes one
//      and the one before is let go. 330 TFLOP/s of 2000 x 12288 x 4096, and 1.2 us a step whatever the tile: a
//      fence.proxy.async that names no state space is a fence of all memory too.
//   2. this one: a fence of shared memory alone, as many stages as there is room for, narrow tiles, and blocks that share
//      one. 490 TFLOP/s of 2000 x 12288 x 4096; of 128 rows, a decode step of many sequences, 12288 x 4096 in 44 us (98
//      by gemm_mma; the bytes' floor is 33), 2048 x 8192 in 21 (46; 11), 2048 x 2048 in 10 (15; 2.8).
//
// What limits it: copies arrive at about 32 bytes a clock on each multiprocessor, however many steps are under way: a step
// of 64 k takes 0.44 us at TILE_OUTS of 64 and 0.58 at 128, however few rows there are. At 256 it is 1.05, of which the
// tensor cores need 0.58. Expected next: TMA, whose copies cost no instructions and no fence, and a warp apart to issue them.

#include "epilogue.cuh"
#include "splits.cuh"
#include "wgmma.cuh"

constexpr int TILE_ROWS = 128;
constexpr int THREADS = 2 * 4 * WARP;
constexpr int DEPTH = 64;                                 // of k in a step: 128 bytes, the width of the swizzle
constexpr int STAGES = TILE_OUTS == 256 ? 4 : TILE_OUTS == 128 ? 6 : 8;  // steps in shared memory, of 192 kB
constexpr int PER_ROW = DEPTH / VECTOR;                   // 16-byte pieces in a row of a tile: 8
constexpr int STAGE = (TILE_ROWS + TILE_OUTS) * PER_ROW;  // pieces

// A lane ends up with two outputs of each 8 columns of wgmma. W's rows are dealt out so that the four columns that it
// has of 32 are 8 neighbours in y, which it then writes 16 bytes at a time: it costs nothing but other places for the
// copies. The outputs of 32 are eights by lane: output 8t + i lies in column 2t + i % 2 of the i / 2-th 8 columns.
constexpr int RUN = 8;
__device__ __forceinline__ int column_of(int output) {
    int t = output / RUN % 4, i = output % RUN;
    return output / 32 * 32 + i / 2 * 8 + 2 * t + i % 2;
}
__device__ __forceinline__ int row_of(int row) { return row; }

// Begin to copy SIZE rows from k on into shared memory, `place` saying to which row; zeros beyond the last row and k.
template <int SIZE, int (*place)(int), bool ALIGNED>
__device__ __forceinline__ void copy_tile(uint4* to, const storage_t* from, int first, int size, int stride, int k,
                                          int inputs) {
#pragma unroll
    for (int e = 0; e < SIZE * PER_ROW / THREADS; ++e) {
        int i = e * THREADS + threadIdx.x, row = first + i / PER_ROW, c = i % PER_ROW, at = k + c * VECTOR;
        const storage_t* start = from + (size_t)min(row, size - 1) * stride;
        bool inside = row < size && at < inputs;
        int there = place(i / PER_ROW);
        uint4* piece = to + there * PER_ROW + (c ^ there % 8);
        if (ALIGNED) {
            cp_async_16(piece, start + (inside ? at : 0), inside);
        } else {
            *piece = load_vector<false, false>(start, at, inside ? inputs : 0);
        }
    }
}

template <bool ALIGNED>
__device__ __forceinline__ void pipeline(float (&sums)[TILE_OUTS / 2], uint4* stages, const storage_t* x,
                                         const storage_t* weight, int rows, int inputs, int outputs, int x_stride) {
    // Of the steps of k this block takes its share: gridDim.z blocks compute a tile together.
    int all = (inputs + DEPTH - 1) / DEPTH, share = (all + gridDim.z - 1) / gridDim.z, first = blockIdx.z * share;
    int steps = min(share, all - first);
    auto begin = [&](int step) {
        uint4* stage = stages + step % STAGES * STAGE;
        int k = (first + step) * DEPTH;
        if (step < steps) {
            copy_tile<TILE_ROWS, row_of, ALIGNED>(stage, x, blockIdx.x * TILE_ROWS, rows, x_stride, k, inputs);
            copy_tile<TILE_OUTS, column_of, ALIGNED>(stage + TILE_ROWS * PER_ROW, weight, blockIdx.y * TILE_OUTS,
                                                     outputs, inputs, k, inputs);
        }
        cp_async_commit();  // an empty group too, so that the number of groups tells the step
    };
    for (int step = 0; step < STAGES - 2; ++step) begin(step);

    for (int step = 0; step < steps; ++step) {
        cp_async_wait<STAGES - 3>();
        fence_proxy_async();
        __syncthreads();  // this step's stage is there for all, and all have waited for the products of two steps ago
        const uint4* stage = stages + step % STAGES * STAGE;
        const uint4* mine = stage + threadIdx.x / (4 * WARP) * 64 * PER_ROW;
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < PER_ROW; k += 2) {
            wgmma_64xNx16<TILE_OUTS>(sums, swizzled_tile(mine + k), swizzled_tile(stage + TILE_ROWS * PER_ROW + k));
        }
        wgmma_commit();
        begin(step + STAGES - 2);  // while the tensor cores compute
        wgmma_wait<1>();           // for the products of the step before
    }
    wgmma_wait<0>();
    cp_async_wait<0>();
}

extern "C" __global__ __launch_bounds__(THREADS, 1) void gemm_wgmma(
    out_t* out, const storage_t* x, const storage_t* weight, const float* bias, const storage_t* residual, int rows,
    int inputs, int outputs, int x_stride, int out_stride, int residual_stride, int activation,
    float* partials, int* arrived) {
    extern __shared__ __align__(1024) unsigned char dynamic_shared[];
    uint4* stages = reinterpret_cast<uint4*>(dynamic_shared);
    follow();
    float sums[TILE_OUTS / 2] = {};
    if (rows_are_aligned(x, weight, inputs, x_stride)) {
        pipeline<true>(sums, stages, x, weight, rows, inputs, outputs, x_stride);
    } else {
        pipeline<false>(sums, stages, x, weight, rows, inputs, outputs, x_stride);
    }
    if (!add_splits<TILE_OUTS / 2, THREADS>(sums, partials, arrived)) return;

    Epilogue e{out, bias, residual, outputs, out_stride, residual_stride, activation};
    int g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        int row = blockIdx.x * TILE_ROWS + threadIdx.x / WARP * 16 + half * 8 + g;
#pragma unroll
        for (int part = 0; part < TILE_OUTS / 32; ++part) {
            float run[RUN];
#pragma unroll
            for (int i = 0; i < RUN; ++i) run[i] = sums[(part * 4 + i / 2) * 4 + half * 2 + i % 2];
            if (row < rows) finish_run(e, row, blockIdx.y * TILE_OUTS + part * 32 + t * RUN, run);
        }
    }
}
