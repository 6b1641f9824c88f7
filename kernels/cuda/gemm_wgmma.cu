// A product of many rows on Hopper's tensor cores: y[t, o] = activation(sum_k x[t, k] W[o, k] + b[o]) + r[t, o].
//
//   y = activation(x @ W.T + b) + r
//
// The next version after gemm_mma of gemm.cu, for 16-bit storage on sm_90a alone: wgmma reads both operands from shared
// memory, so no warp spends issue slots or registers on fragments. -arch=sm_90a is given to the compiler first.
//
// Constants: TILE_OUTS, 128 or 256, outputs of a block; its rows are 128.  FLOAT_OUT, see epilogue.cuh.
//
// Floor: as in gemm.cu. Grid: (ceil(T / 128), ceil(out / TILE_OUTS)); block: 256, two warpgroups with 64 rows each.
// Dynamic shared memory: STAGES * (128 + TILE_OUTS) * 128 bytes; one block on a multiprocessor.
//
// Versions (none measured on a GPU yet):
//   1. this one: cp.async into swizzled shared memory, STAGES steps of 64 k, of which two are on their way while wgmma
//      computes one and the one before is let go. Expected: 500 to 600 TFLOP/s of a large product, where gemm_mma is
//      expected at 300 to 470. Expected next: TMA, whose copies cost no instructions, and a warp apart to issue them.
//
// What should limit it: for 16 steps of k a block of 128 x 256 keeps the tensor cores busy for 256 cycles (of 2,048
// multiply-adds) and shared memory for as many: 160 to read (A 2 kB and B 8 kB a warpgroup), 96 to write. At 128 x 128
// it is 128 against 160. Products of fewer than 132 tiles leave processors idle, as there.

#include "epilogue.cuh"
#include "wgmma.cuh"

constexpr int TILE_ROWS = 128;
constexpr int THREADS = 2 * 4 * WARP;
constexpr int DEPTH = 64;                                 // of k in a step: 128 bytes, the width of the swizzle
constexpr int STAGES = 4;                                 // steps in shared memory
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
    int steps = (inputs + DEPTH - 1) / DEPTH;
    auto begin = [&](int step) {
        uint4* stage = stages + step % STAGES * STAGE;
        if (step < steps) {
            copy_tile<TILE_ROWS, row_of, ALIGNED>(stage, x, blockIdx.x * TILE_ROWS, rows, x_stride, step * DEPTH,
                                                  inputs);
            copy_tile<TILE_OUTS, column_of, ALIGNED>(stage + TILE_ROWS * PER_ROW, weight, blockIdx.y * TILE_OUTS,
                                                     outputs, inputs, step * DEPTH, inputs);
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
    int inputs, int outputs, int x_stride, int out_stride, int residual_stride, int activation) {
    extern __shared__ __align__(1024) unsigned char dynamic_shared[];
    uint4* stages = reinterpret_cast<uint4*>(dynamic_shared);
    float sums[TILE_OUTS / 2] = {};
    if (rows_are_aligned(x, weight, inputs, x_stride)) {
        pipeline<true>(sums, stages, x, weight, rows, inputs, outputs, x_stride);
    } else {
        pipeline<false>(sums, stages, x, weight, rows, inputs, outputs, x_stride);
    }

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
