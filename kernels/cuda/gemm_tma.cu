// A product of many rows on Hopper, whose copies are the tensor memory accelerator's:
// y[t, o] = activation(sum_k x[t, k] W[o, k] + b[o]) + r[t, o].
//
//   y = activation(x @ W.T + b) + r
//
// The next version after gemm_wgmma.cu, for prompts: one launch in the place of the library's product and finish_product,
// and one that a graph can hold. -arch=sm_90a is given to the compiler first. Rows of x and W begin at multiples of 16
// bytes, and W has eights of outputs.
//
// Constants: TILE_OUTS, 128 or 256, outputs of a tile; its rows are 128.  CLUSTER, blocks of a cluster: 1 or 2, which share
//            a part of W and lie below one another, or with SHARED_X=1 a part of x and lie side by side.  FLOAT_OUT, see
//            epilogue.cuh.
//
// Floor: as in gemm.cu. Grid: CLUSTER times any number of clusters, each of which takes every so many-th group of CLUSTER
// tiles; so as many as the processors hold. Block: 288, two warpgroups that multiply, with 64 rows each, and a warp that
// copies. Dynamic shared memory: 192 kB and two barriers for each stage; one block on a multiprocessor.
//
// One thread asks for whole tiles, and steps of k arrive in a ring of STAGES: `full` counts their bytes, `empty` the warps
// that are done with them, in all blocks of the cluster, since each block copies its share of what they have in common to
// all of them. Copies of the next tile begin while this one's sums are finished. No instruction computes an address of a
// copy, no thread waits for one to be issued, and no fence is needed: wgmma reads by the way by which they write.
//
// What it should gain, not measured: gemm_wgmma copies 31 bytes a clock on a multiprocessor at every tile, by its
// instructions, so a step of 64 k of 128 x 256 takes 1.05 us, of which tensor cores need 0.58. Here a block asks L2 for
// 32 kB of those 48 in a cluster of two. If a step takes 0.7 us then, 2000 x 12288 x 4096 takes 0.28 ms (linear.py's
// `tma_time`), 720 TFLOP/s: as long as the library, which then leaves 4 to 60 us to finish_product.

#include "epilogue.cuh"
#include "tma.cuh"
#include "wgmma.cuh"

#ifndef SHARED_X
#define SHARED_X 0
#endif

constexpr int TILE_ROWS = 128;
constexpr int CONSUMERS = 2 * 4 * WARP, THREADS = CONSUMERS + WARP;
constexpr int DEPTH = 64;                          // of k in a step: 128 bytes, the width of the swizzle
constexpr int ROW = DEPTH * sizeof(storage_t);     // bytes of a row of a tile
constexpr int STAGES = TILE_OUTS == 256 ? 4 : 6;   // steps in shared memory
constexpr int X_BYTES = TILE_ROWS * ROW, STAGE = X_BYTES + TILE_OUTS * ROW;
constexpr unsigned short ALL_BLOCKS = CLUSTER == 1 ? 0 : (1 << CLUSTER) - 1;  // as tensor_copy takes them

// A lane ends up with two outputs of each 8 columns of wgmma. W's map deals its rows out: of each 8 outputs part j of a
// tile has 2j and 2j + 1, so that four columns of a lane, one of each part, are 8 neighbours in y.
constexpr int RUN = 8, PARTS = 4, PART = TILE_OUTS / PARTS;

// The groups of CLUSTER tiles, neighbours along the rows first, so that they find their part of W in the L2 cache.
struct Groups {
    int below, number;  // one below the other; all

    __device__ __forceinline__ Groups(int rows, int outputs) {
        int row_tiles = (rows + TILE_ROWS - 1) / TILE_ROWS, columns = (outputs + TILE_OUTS - 1) / TILE_OUTS;
        below = SHARED_X ? row_tiles : (row_tiles + CLUSTER - 1) / CLUSTER;
        number = below * (SHARED_X ? (columns + CLUSTER - 1) / CLUSTER : columns);
    }
    // The first row and output of a block's tile, which may lie beyond the last.
    __device__ __forceinline__ int row(int group, int rank) const {
        return (SHARED_X ? group % below : group % below * CLUSTER + rank) * TILE_ROWS;
    }
    __device__ __forceinline__ int output(int group, int rank) const {
        return (SHARED_X ? group / below * CLUSTER + rank : group / below) * TILE_OUTS;
    }
};

// The ring of stages and its barriers.
struct Ring {
    unsigned char* stages;
    mbarrier_t *full, *empty;
    int stage = 0;
    unsigned parity = 0;  // of the phase of `full` in which this stage is filled

    __device__ __forceinline__ explicit Ring(unsigned char* shared)
        : stages(shared), full(reinterpret_cast<mbarrier_t*>(shared + STAGES * STAGE)), empty(full + STAGES) {}
    __device__ __forceinline__ unsigned char* tile() const { return stages + stage * STAGE; }
    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

__device__ __forceinline__ void wait(mbarrier_t* barrier, unsigned parity) {
    while (!mbarrier_completed(barrier, parity)) {}
}

// By one thread: all steps of this cluster's tiles.
__device__ __forceinline__ void copy_tiles(Ring ring, const TensorMap& x_map, const TensorMap& w_map, Groups groups,
                                           int inputs, int rank) {
    for (int group = blockIdx.x / CLUSTER; group < groups.number; group += gridDim.x / CLUSTER) {
        int row = groups.row(group, rank), output = groups.output(group, rank);
        for (int k = 0; k < inputs; k += DEPTH, ring.advance()) {
            // The first time round at once: it is the phase before the first. Here alone a wait that does not end stops the
            // kernel: a branch out of the other loop has the assembler put products in a row.
            Watchdog watchdog;
            while (!mbarrier_completed(ring.empty + ring.stage, ring.parity ^ 1)) watchdog.look();
            mbarrier_t* full = ring.full + ring.stage;
            mbarrier_expect(full, STAGE);
            unsigned char *xs = ring.tile(), *ws = xs + X_BYTES;
            if (SHARED_X) {
                constexpr int SHARE = TILE_ROWS / CLUSTER;
                tensor_copy(xs + rank * SHARE * ROW, x_map, k, row + rank * SHARE, full, ALL_BLOCKS);
            } else {
                tensor_copy(xs, x_map, k, row, full);
            }
#pragma unroll
            for (int i = 0; i < (SHARED_X ? PARTS : PARTS / CLUSTER); ++i) {
                int part = SHARED_X ? i : rank * (PARTS / CLUSTER) + i;
                tensor_copy(ws + part * PART * ROW, w_map, k, 0, part, output / RUN, full, SHARED_X ? 0 : ALL_BLOCKS);
            }
        }
    }
    for (int i = 0; i < STAGES; ++i, ring.advance()) {  // until the last steps are multiplied, likewise
        Watchdog watchdog;
        while (!mbarrier_completed(ring.empty + ring.stage, ring.parity ^ 1)) watchdog.look();
    }
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
            for (int i = 0; i < RUN; ++i) run[i] = sums[(i / 2 * (PART / 8) + part) * 4 + half * 2 + i % 2];
            if (row < rows) finish_run(e, row, first_output + part * 32 + t * RUN, run);
        }
    }
}

// By two warpgroups: this cluster's tiles, each of them its own 64 rows.
__device__ __forceinline__ void multiply_tiles(Ring ring, Groups groups, int rows, int inputs, const Epilogue& e, int rank) {
    int lane = threadIdx.x % WARP, group_of_warps = threadIdx.x / (4 * WARP);
    auto release = [&](int stage) {  // in the blocks that copy to here
        if (lane < CLUSTER) mbarrier_arrive(ring.empty + stage, lane);
    };
    for (int group = blockIdx.x / CLUSTER; group < groups.number; group += gridDim.x / CLUSTER) {
        float sums[TILE_OUTS / 2] = {};
        int before = 0;
        for (int k = 0; k < inputs; k += DEPTH, ring.advance()) {
            wait(ring.full + ring.stage, ring.parity);
            const unsigned char *xs = ring.tile() + group_of_warps * 64 * ROW, *ws = ring.tile() + X_BYTES;
            if (k == 0) wgmma_hold(sums);
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < ROW; i += 32) {  // 16 of k
                wgmma_64xNx16<TILE_OUTS>(sums, swizzled_tile(xs + i), swizzled_tile(ws + i));
            }
            wgmma_commit();
            wgmma_wait<1>();  // for the products of the step before
            if (k) release(before);
            before = ring.stage;
        }
        wgmma_wait<0>();
        wgmma_hold(sums);
        release(before);
        finish_tile(sums, e, rows, groups.row(group, rank), groups.output(group, rank));
    }
}

extern "C" __global__ __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1) void gemm_tma(
    out_t* out, const storage_t* x, const storage_t* weight, const float* bias, const storage_t* residual, int rows,
    int inputs, int outputs, int x_stride, int out_stride, int residual_stride, int activation,
    const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map) {
    extern __shared__ __align__(1024) unsigned char dynamic_shared[];
    Ring ring(dynamic_shared);
    follow();
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            mbarrier_init(ring.full + i);
            mbarrier_init(ring.empty + i, CLUSTER * CONSUMERS / WARP);
        }
    }
    __syncwarp();
    cluster_sync();  // all of its barriers are there
    int rank = cluster_rank();
    Groups groups(rows, outputs);
    if (threadIdx.x < CONSUMERS) {
        multiply_tiles(ring, groups, rows, inputs, {out, bias, residual, outputs, out_stride, residual_stride, activation}, rank);
    } else if (threadIdx.x == CONSUMERS) {
        copy_tiles(ring, x_map, w_map, groups, inputs, rank);
    }
    __syncwarp();
    cluster_sync();  // nobody reaches into a block that has ended
}
