// A product of many rows on Hopper's tensor cores: y[t, o] = activation(sum_k x[t, k] W[o, k] + b[o]) + r[t, o].
//
//   y = activation(x @ W.T + b) + r
//
// The next version after gemm_mma of gemm.cu, for 16-bit storage on sm_90a alone: wgmma reads both operands from shared
// memory, so no warp spends issue slots or registers on fragments. -arch=sm_90a is given to the compiler first.
//
// Constants: TILE_OUTS, 64 or 128, outputs of a block; its rows are 128.  FLOAT_OUT, see epilogue.cuh.
//
// Floor: as in gemm.cu. Grid: any number of blocks up to the steps of all tiles: each takes an equal share of them
// (stream-K, Osama et al., arXiv 2301.03598), so that no wave of tiles leaves processors idle; a tile that several share
// is added up in the order of k by the last of them to get there, and nobody waits. Block: 256, two warpgroups with 64
// rows each. Dynamic shared memory: STAGES * (128 + TILE_OUTS) * 128 bytes, 192 kB; one block on a multiprocessor.
// `partials` has room for the sums of two tiles of each block, `arrived` a counter of each tile (splits.cuh); both may be
// null where the shares are whole tiles.
//
// Versions, as measured on an H100 (its library: 720 to 760 TFLOP/s):
//   1. cp.async into swizzled shared memory, STAGES steps of 64 k, of which two are on their way while wgmma computes one
//      and the one before is let go. 330 TFLOP/s of 2000 x 12288 x 4096, and 1.2 us a step whatever the tile: a
//      fence.proxy.async that names no state space is a fence of all memory too.
//   2. a fence of shared memory alone, as many stages as there is room for, narrow tiles, and 1, 2, 4 ... blocks for each
//      tile. 490 TFLOP/s of 2000 x 12288 x 4096; of 128 rows, a decode step of many sequences, 12288 x 4096 in 44 us (98
//      by gemm_mma; the bytes' floor is 33), 2048 x 8192 in 21 (46; 11), 2048 x 2048 in 10 (15; 2.8).
//   3. this one: equal shares of all tiles' steps, and copies that go on from tile to tile. Not measured. By the model of
//      linear.py (`shared_time`: 4 us, a block's steps, and 0.6 us for each 32 kB of sums that it leaves or takes), for
//      128 rows on 132 processors: of OPT-13B 5120 x 20480 in 69 us (version 2: 145), 20480 x 5120 in 65 (97), 5120 x
//      5120 in 24 (39); of Llama-3.1-8B a layer's four products in 158 (185), of Qwen2.5-1.5B in 63 (74).
//
// What limits it: copies arrive at about 32 bytes a clock on each multiprocessor, however many steps are under way: a step
// of 64 k takes 0.44 us at TILE_OUTS of 64 and 0.58 at 128, however few rows there are. At 256 it is 1.05, of which the
// tensor cores need 0.58. gemm_tma.cu, whose copies cost no instructions and no fence, is the next version for whole tiles.

#include "epilogue.cuh"
#include "splits.cuh"
#include "wgmma_tiles.cuh"

constexpr int DEPTH = WIDTH;                              // of k in a step
constexpr int STAGES = TILE_OUTS == 128 ? 6 : 8;          // steps in shared memory, of 192 kB
constexpr int STAGE = (TILE_ROWS + TILE_OUTS) * PER_ROW;  // pieces

// A lane ends up with two outputs of each 8 columns of wgmma. W's rows are dealt out so that the four columns that it
// has of 32 are 8 neighbours in y, which it then writes 16 bytes at a time: it costs nothing but other places for the
// copies. The outputs of 32 are eights by lane: output 8t + i lies in column 2t + i % 2 of the i / 2-th 8 columns.
constexpr int RUN = 8;
__device__ __forceinline__ int column_of(int output) {
    int t = output / RUN % 4, i = output % RUN;
    return output / 32 * 32 + i / 2 * 8 + 2 * t + i % 2;
}

// The end of a tile's product.
__device__ __forceinline__ void finish_tile(float (&sums)[TILE_OUTS / 2], const Epilogue& e, int rows, int first_row,
                                            int first_output) {
    int g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        int row = first_row + threadIdx.x / WARP * 16 + half * 8 + g;
#pragma unroll
        for (int part = 0; part < TILE_OUTS / 32; ++part) {
            float run[RUN];
#pragma unroll
            for (int i = 0; i < RUN; ++i) run[i] = sums[(part * 4 + i / 2) * 4 + half * 2 + i % 2];
            if (row < rows) finish_run(e, row, first_output + part * 32 + t * RUN, run);
        }
    }
}

// All of this block's steps, whose copies go on from tile to tile.
template <bool ALIGNED>
__device__ __forceinline__ void pipeline(uint4* stages, const storage_t* x, const storage_t* weight, int rows,
                                         int inputs, const Epilogue& e, int x_stride, float* partials, int* arrived) {
    Work work(rows, TILE_OUTS, e.outputs, DEPTH, inputs);
    int at = work.first(blockIdx.x), stop = work.first(blockIdx.x + 1);
    int coming = at, tile_coming = at / work.steps, step_coming = at % work.steps;  // the next to be copied
    uint4* to = stages;
    auto begin = [&]() {
        if (coming < stop) {
            int k = step_coming * DEPTH;
            copy_tile<TILE_ROWS, row_of, ALIGNED>(to, x, work.row(tile_coming), rows, x_stride, k, inputs);
            copy_tile<TILE_OUTS, column_of, ALIGNED>(to + TILE_ROWS * PER_ROW, weight, work.output(tile_coming),
                                                     e.outputs, inputs, k, inputs);
        }
        cp_async_commit();  // an empty group too, so that the number of groups tells the step
        ++coming;
        if (++step_coming == work.steps) ++tile_coming, step_coming = 0;
        to = to + STAGE == stages + STAGES * STAGE ? stages : to + STAGE;
    };
    for (int i = 0; i < STAGES - 2; ++i) begin();

    const uint4* stage = stages;
    while (at < stop) {
        int tile = at / work.steps, until = min(stop, (tile + 1) * work.steps);
        float sums[TILE_OUTS / 2] = {};
        for (; at < until; ++at) {
            cp_async_wait<STAGES - 3>();
            fence_proxy_async();
            __syncthreads();  // this step's stage is there for all, and all have waited for the products of two steps ago
            const uint4* mine = stage + threadIdx.x / (4 * WARP) * 64 * PER_ROW;
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < PER_ROW; k += 2) {
                wgmma_64xNx16<TILE_OUTS>(sums, swizzled_tile(mine + k), swizzled_tile(stage + TILE_ROWS * PER_ROW + k));
            }
            wgmma_commit();
            begin();        // while the tensor cores compute
            wgmma_wait<1>();  // for the products of the step before
            stage = stage + STAGE == stages + STAGES * STAGE ? stages : stage + STAGE;
        }
        wgmma_wait<0>();
        int first = work.block_of(tile * work.steps), last = work.block_of((tile + 1) * work.steps - 1);
        // A block has room for the sums of a tile that it begins with, and of one that another ends.
        auto place = [&](int part) { return 2 * (first + part) + (part == 0); };
        if (add_parts<TILE_OUTS / 2, THREADS>(sums, partials, arrived + tile, blockIdx.x - first, last - first + 1, place))
            finish_tile(sums, e, rows, work.row(tile), work.output(tile));
    }
    cp_async_wait<0>();
}

extern "C" __global__ __launch_bounds__(THREADS, 1) void gemm_wgmma(
    out_t* out, const storage_t* x, const storage_t* weight, const float* bias, const storage_t* residual, int rows,
    int inputs, int outputs, int x_stride, int out_stride, int residual_stride, int activation,
    float* partials, int* arrived) {
    extern __shared__ __align__(1024) unsigned char dynamic_shared[];
    uint4* stages = reinterpret_cast<uint4*>(dynamic_shared);
    follow();
    Epilogue e{out, bias, residual, outputs, out_stride, residual_stride, activation};
    if (rows_are_aligned(x, weight, inputs, x_stride)) {
        pipeline<true>(stages, x, weight, rows, inputs, e, x_stride, partials, arrived);
    } else {
        pipeline<false>(stages, x, weight, rows, inputs, e, x_stride, partials, arrived);
    }
}
