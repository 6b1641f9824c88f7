// A product of many rows, the prefill's: y[t, o] = activation(sum_k x[t, k] W[o, k] + b[o]) + r[t, o].
//
//   y = activation(x @ W.T + b) + r
//
// Constants: TILE_ROWS, TILE_OUTS, the part of y that one block computes: 128 x 128 or 64 x 64, the larger where it still
//            makes enough blocks.  FLOAT_OUT, see epilogue.cuh.
//
// Floor. 2 T in out operations against (T in + in out + T out) * sizeof(storage_t) bytes: from about 200 rows on the
// arithmetic is the longer of the two. 2048 x 4096 x 4096 in 16 bits: 69 GFLOP, 88 us at the 780 TFLOP/s of a large
// library product on an H200; the 67 MB take 16 us.
//
// Grid: (ceil(T / TILE_ROWS), ceil(out / TILE_OUTS)); block: 128 (gemm_mma) or 256. Row tiles are neighbours in time, so
// they find their part of W in the L2 cache, where all of x stays in any case.
//
// Versions:
//   gemm_tiled  Tiles of x and W go through shared memory as floats, and a thread keeps TILE_ROWS / 16 x TILE_OUTS / 16
//               sums in registers: 64 multiply-adds for 16 numbers read. While a tile is computed the next is loaded
//               into registers. This is also the path of float storage, which is not rounded to tf32.
//   gemm_mma    16-bit storage on tensor cores (m16n8k16): four warps, each a quarter of the tile; cp.async keeps
//               STAGES - 1 steps of k under way; ldmatrix reads swizzled shared memory without bank conflicts. Up to 128
//               rows, a decode step of many sequences, there are too few tiles to keep W under way on every processor;
//               blocks then share a tile, each with a part of k, and the last to arrive adds their sums in order: equal
//               input gives equal bits. Hopper has gemm_wgmma.cu in its place. Measured there, on an H100: 2000 x 12288
//               x 4096 at 234 TFLOP/s, where the library has 720; 128 rows of 2048 x 2048 in 15 us, of 2048 x 8192 in
//               46. A step of 32 k takes 0.27 us: three of them cover the latency of memory.
//
// What should limit gemm_mma on other GPUs: at 128 x 128, 16 steps of k keep shared memory busy for 192 cycles (16 kB
// read by ldmatrix, 8 kB written by cp.async, 128 bytes a cycle) and the tensor cores for about 205 (60 % of 2,048
// multiply-adds a cycle): 64 x 64 a warp is what keeps the first below. Fewer than 132 tiles of more than 128 rows leave
// processors idle.

#include "epilogue.cuh"
#include "splits.cuh"
#include "tensor_core.cuh"

// ---- tiled ------------------------------------------------------------------------------------------------------

namespace tiled {

constexpr int DEPTH = 2 * VECTOR;                            // of k in a tile: 32 bytes, what memory gives at least
constexpr int THREADS = 256;                                 // 16 x 16
constexpr int ROWS = TILE_ROWS / 16, OUTS = TILE_OUTS / 16;  // of one thread

// A thread's part of a tile of SIZE rows, on its way from global to shared memory.
template <int SIZE, bool ALIGNED>
struct Passing {
    static constexpr int PIECES = SIZE * DEPTH / VECTOR, EACH = (PIECES + THREADS - 1) / THREADS;
    uint4 pieces[EACH];

    // Rows first .. first + SIZE of a matrix of `size` rows, from k on; zeros beyond its end.
    __device__ __forceinline__ void load(const storage_t* from, int first, int size, int stride, int k, int inputs) {
#pragma unroll
        for (int e = 0; e < EACH; ++e) {
            int i = e * THREADS + threadIdx.x, row = first + i % SIZE;
            const storage_t* start = from + (size_t)min(row, size - 1) * stride;
            pieces[e] = load_vector<ALIGNED, false>(start, k + i / SIZE * VECTOR, row < size ? inputs : 0);
        }
    }

    // As floats, k by rows, so that the threads of a warp write and read neighbours.
    __device__ __forceinline__ void store(float (&to)[DEPTH][SIZE]) const {
#pragma unroll
        for (int e = 0; e < EACH; ++e) {
            int i = e * THREADS + threadIdx.x;
            const storage_t* values = reinterpret_cast<const storage_t*>(&pieces[e]);
            if (PIECES % THREADS != 0 && i >= PIECES) break;
#pragma unroll
            for (int j = 0; j < VECTOR; ++j) to[i / SIZE * VECTOR + j][i % SIZE] = to_float(values[j]);
        }
    }
};

// sums = x W^T for this thread's part of the block's tile: ROWS neighbouring rows from `row` on; outputs in fours, 64
// apart, from `four` on, so that a warp reads 256 bytes side by side.
template <bool ALIGNED>
__device__ __forceinline__ void multiply(float (&sums)[ROWS][OUTS], float (&xs)[DEPTH][TILE_ROWS],
                                         float (&ws)[DEPTH][TILE_OUTS], const storage_t* x, const storage_t* weight,
                                         int rows, int inputs, int outputs, int x_stride, int row, int four) {
    int first_row = blockIdx.x * TILE_ROWS, first_out = blockIdx.y * TILE_OUTS;
    Passing<TILE_ROWS, ALIGNED> x_passing;
    Passing<TILE_OUTS, ALIGNED> w_passing;
    x_passing.load(x, first_row, rows, x_stride, 0, inputs);
    w_passing.load(weight, first_out, outputs, inputs, 0, inputs);
    for (int k = 0; k < inputs; k += DEPTH) {
        __syncthreads();  // the tile before is done with
        x_passing.store(xs);
        w_passing.store(ws);
        if (k + DEPTH < inputs) {  // before the barrier, which keeps the compiler from putting it off
            x_passing.load(x, first_row, rows, x_stride, k + DEPTH, inputs);
            w_passing.load(weight, first_out, outputs, inputs, k + DEPTH, inputs);
        }
        __syncthreads();
#pragma unroll
        for (int d = 0; d < DEPTH; ++d) {
            float w[OUTS];
#pragma unroll
            for (int o = 0; o < OUTS; ++o) w[o] = ws[d][four + o / 4 * 64 + o % 4];
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                float value = xs[d][row + r];
#pragma unroll
                for (int o = 0; o < OUTS; ++o) sums[r][o] = fmaf(value, w[o], sums[r][o]);
            }
        }
    }
}

}  // namespace tiled

// Grid: (ceil(rows / TILE_ROWS), ceil(outputs / TILE_OUTS)); block: 256.
extern "C" __global__ __launch_bounds__(tiled::THREADS, 2) void gemm_tiled(
    out_t* out, const storage_t* x, const storage_t* weight, const float* bias, const storage_t* residual, int rows,
    int inputs, int outputs, int x_stride, int out_stride, int residual_stride, int activation) {
    int row = threadIdx.x / 16 * tiled::ROWS, four = threadIdx.x % 16 * 4;
    follow();
    __shared__ __align__(16) float xs[tiled::DEPTH][TILE_ROWS];
    __shared__ __align__(16) float ws[tiled::DEPTH][TILE_OUTS];
    float sums[tiled::ROWS][tiled::OUTS] = {};
    if (rows_are_aligned(x, weight, inputs, x_stride)) {
        tiled::multiply<true>(sums, xs, ws, x, weight, rows, inputs, outputs, x_stride, row, four);
    } else {
        tiled::multiply<false>(sums, xs, ws, x, weight, rows, inputs, outputs, x_stride, row, four);
    }

    Epilogue e{out, bias, residual, outputs, out_stride, residual_stride, activation};
#pragma unroll
    for (int r = 0; r < tiled::ROWS; ++r) {
#pragma unroll
        for (int o = 0; o < tiled::OUTS; o += 4) {
            float run[4] = {sums[r][o], sums[r][o + 1], sums[r][o + 2], sums[r][o + 3]};
            int at = blockIdx.x * TILE_ROWS + row + r;
            if (at < rows) finish_run(e, at, blockIdx.y * TILE_OUTS + four + o * 16, run);
        }
    }
}

// ---- tensor cores -----------------------------------------------------------------------------------------------

#if MINILLM_STORAGE != 32

namespace mma {

constexpr int THREADS = 4 * WARP;                             // 2 x 2 warps
constexpr int WARP_ROWS = TILE_ROWS / 2, WARP_OUTS = TILE_OUTS / 2;
constexpr int DEPTH = 32;                                     // of k in a step
constexpr int STAGES = 4;                                     // steps in shared memory
constexpr int PER_ROW = DEPTH / VECTOR;                       // 16-byte pieces in a row of a tile: 4
constexpr int STAGE = (TILE_ROWS + TILE_OUTS) * PER_ROW;      // pieces

// A lane ends up with two outputs of each of the warp's WARP_OUTS / 8 tiles of mma. The columns of those tiles are
// dealt out so that these are RUN neighbours in y: column c of tile j is output c / 2 * RUN + 2 j + c % 2. They are
// then written 16 bytes at a time, and it costs nothing but other addresses for ldmatrix.
constexpr int RUN = WARP_OUTS / 4;

// Where piece c of row r lies. Two rows fill the 128 bytes of all banks, and the eight rows that one ldmatrix reads
// would meet in the same banks four by four; so each pair of rows, in the order in which they are read, permutes its
// pieces.
__device__ __forceinline__ int x_piece(int row, int c) { return row * PER_ROW + (c ^ (row / 2 % PER_ROW)); }
__device__ __forceinline__ int w_piece(int row, int c) { return row * PER_ROW + (c ^ (row / RUN % PER_ROW)); }

// Begin to copy SIZE rows from k on into shared memory, `piece` saying where to; zeros beyond the last row and k.
template <int SIZE, int (*piece)(int, int), bool ALIGNED>
__device__ __forceinline__ void copy_tile(uint4* to, const storage_t* from, int first, int size, int stride, int k,
                                          int inputs) {
#pragma unroll
    for (int e = 0; e < SIZE * PER_ROW / THREADS; ++e) {
        int i = e * THREADS + threadIdx.x, row = first + i / PER_ROW, c = i % PER_ROW, at = k + c * VECTOR;
        const storage_t* start = from + (size_t)min(row, size - 1) * stride;
        bool inside = row < size && at < inputs;
        uint4* place = to + piece(i / PER_ROW, c);
        if (ALIGNED) {
            cp_async_16(place, start + (inside ? at : 0), inside);
        } else {
            *place = load_vector<false, false>(start, at, inside ? inputs : 0);
        }
    }
}

// sums += x W^T over the DEPTH of one stage, for the warp whose first row and first output these are.
__device__ __forceinline__ void multiply(float (&sums)[WARP_ROWS / 16][WARP_OUTS / 8][4], const uint4* xs,
                                         const uint4* ws, int first_row, int first_out) {
    int lane = threadIdx.x % WARP, tile = lane / 8, c = lane % 8;
#pragma unroll
    for (int k = 0; k < PER_ROW; k += 2) {
        unsigned a[WARP_ROWS / 16][4], b[WARP_OUTS / 8][2];
#pragma unroll
        for (int m = 0; m < WARP_ROWS / 16; ++m) {
            ldmatrix_x4(a[m], xs + x_piece(first_row + m * 16 + lane % 16, k + lane / 16));
        }
#pragma unroll
        for (int n = 0; n < WARP_OUTS / 8; n += 2) {
            unsigned both[4];
            ldmatrix_x4(both, ws + w_piece(first_out + c / 2 * RUN + 2 * (n + tile / 2) + c % 2, k + tile % 2));
            b[n][0] = both[0], b[n][1] = both[1], b[n + 1][0] = both[2], b[n + 1][1] = both[3];
        }
#pragma unroll
        for (int m = 0; m < WARP_ROWS / 16; ++m) {
#pragma unroll
            for (int n = 0; n < WARP_OUTS / 8; ++n) mma_16816(sums[m][n], a[m], b[n]);
        }
    }
}

template <bool ALIGNED>
__device__ __forceinline__ void pipeline(float (&sums)[WARP_ROWS / 16][WARP_OUTS / 8][4], uint4* stages,
                                         const storage_t* x, const storage_t* weight, int rows, int inputs, int outputs,
                                         int x_stride, int warp_row, int warp_out) {
    // Of the steps of k this block takes its share: gridDim.z blocks compute a tile together.
    int all = (inputs + DEPTH - 1) / DEPTH, share = (all + gridDim.z - 1) / gridDim.z, first = blockIdx.z * share;
    int steps = min(share, all - first);

    auto begin = [&](int step) {
        uint4* stage = stages + step % STAGES * STAGE;
        int k = (first + step) * DEPTH;
        if (step < steps) {
            copy_tile<TILE_ROWS, x_piece, ALIGNED>(stage, x, blockIdx.x * TILE_ROWS, rows, x_stride, k, inputs);
            copy_tile<TILE_OUTS, w_piece, ALIGNED>(stage + TILE_ROWS * PER_ROW, weight, blockIdx.y * TILE_OUTS,
                                                   outputs, inputs, k, inputs);
        }
        cp_async_commit();  // an empty group too, so that the number of groups tells the step
    };
    for (int step = 0; step < STAGES - 1; ++step) begin(step);

    for (int step = 0; step < steps; ++step) {
        cp_async_wait<STAGES - 2>();
        __syncthreads();  // this step's stage is there for all, and the stage of the step before is done with
        begin(step + STAGES - 1);
        const uint4* stage = stages + step % STAGES * STAGE;
        multiply(sums, stage, stage + TILE_ROWS * PER_ROW, warp_row, warp_out);
    }
    cp_async_wait<0>();
}

}  // namespace mma

// Grid: (ceil(rows / TILE_ROWS), ceil(outputs / TILE_OUTS), splits); block: 128; dynamic shared memory: STAGES *
// (TILE_ROWS + TILE_OUTS) * 64 bytes. With more than one split `partials` holds TILE_ROWS * TILE_OUTS numbers for each
// block, and `arrived` a zero for each tile, which is there again afterwards.
extern "C" __global__ __launch_bounds__(mma::THREADS, 2) void gemm_mma(
    out_t* out, const storage_t* x, const storage_t* weight, const float* bias, const storage_t* residual, int rows,
    int inputs, int outputs, int x_stride, int out_stride, int residual_stride, int activation,
    float* partials, int* arrived) {
    using namespace mma;
    extern __shared__ __align__(16) unsigned char dynamic_shared[];
    uint4* stages = reinterpret_cast<uint4*>(dynamic_shared);
    follow();
    int warp = threadIdx.x / WARP, warp_row = warp / 2 * WARP_ROWS, warp_out = warp % 2 * WARP_OUTS;
    float sums[WARP_ROWS / 16][WARP_OUTS / 8][4] = {};
    if (rows_are_aligned(x, weight, inputs, x_stride)) {
        pipeline<true>(sums, stages, x, weight, rows, inputs, outputs, x_stride, warp_row, warp_out);
    } else {
        pipeline<false>(sums, stages, x, weight, rows, inputs, outputs, x_stride, warp_row, warp_out);
    }

    constexpr int SUMS = WARP_ROWS * WARP_OUTS / WARP;
    if (!add_splits<SUMS, THREADS>(reinterpret_cast<float(&)[SUMS]>(sums), partials, arrived)) return;

    Epilogue e{out, bias, residual, outputs, out_stride, residual_stride, activation};
    int g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < WARP_ROWS / 8; ++i) {
        int row = blockIdx.x * TILE_ROWS + warp_row + i * 8 + g;
        float run[RUN];
#pragma unroll
        for (int j = 0; j < RUN; ++j) run[j] = sums[i / 2][j / 2][i % 2 * 2 + j % 2];
        if (row < rows) finish_run(e, row, blockIdx.y * TILE_OUTS + warp_out + t * RUN, run);
    }
}

#endif
