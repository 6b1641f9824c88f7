// A product of few rows, the decode step's: y[t, o] = activation(sum_k x[t, k] W[o, k] + b[o]) + r[t, o], t < 64.
//
//   y = activation(x @ W.T + b) + r
//
// Constants: ROWS (1 to 64, a power of two), the rows that the code is unrolled for; a launch may have fewer.
//            BITS, GROUP and OFFSETS: W is a matrix of integers, see integers.cuh; it goes to gemv_mma, with SPLITS and
//            STAGES, see gemv_integers.cuh (OUTS 16 to 128).
//            OUTS, the outputs of one warp: 1, 2, 4 for gemv_fma, 8, 16, 32 for gemv_mma.
//            FLOAT_OUT, see epilogue.cuh.
//            EXPERTS: in place of gemv_fma and gemv_mma the kernels experts_fma and experts_mma, below.
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
//   experts_fma, experts_mma  The same products for a mixture of experts, all experts in one launch: blocks of the second
//             dimension of the grid are the experts that have rows, as sort_rows has listed them on the device, so that
//             nobody waits for the host (experts.cu). An expert with more than ROWS rows goes on to the next of them.
//
// What limits it: bandwidth for large matrices; for small ones (OPT-125m) latency of launch, first load and reduction.

#include "epilogue.cuh"
#ifdef BITS
#include "integers.cuh"
// W as a kernel is given it, and as `accumulate` takes it.
#define WEIGHT const unsigned char* weight
#define MORE_WEIGHT , const __half *scales, const void *offsets
#define MATRIX (Integers{weight, scales, offsets, inputs})
#define MORE , scales, offsets
#else
#include "tensor_core.cuh"
#define WEIGHT const storage_t* weight
#define MORE_WEIGHT
#define MATRIX weight
#define MORE
#endif

// gemv_fused.cu includes this file for its sums (FUSED), and deals the rows of W out in another order (PAIRED).
#ifndef PAIRED
// The row of W of a block's output.
__device__ __forceinline__ int weight_row(int output, int outputs) { return min(output, outputs - 1); }
#endif

#if OUTS < 8

constexpr int WARPS = 4;
// Blocks that are to fit on a processor. Named, because else the compiler saves registers for more of them, and puts
// off the loads that should be under way together.
constexpr int RESIDENT = ROWS <= 4 ? 4 : 2;

// Bring the vectors k and k + stride of this lane's rows of W to L2, while the block still waits for x.
__device__ __forceinline__ void prefetch_weights(const storage_t* weight, int first, int inputs, int outputs, int k,
                                                 int stride) {
    for (int at = k; at < min(inputs, k + 2 * stride); at += stride) {
        for (int o = 0; o < OUTS; ++o) prefetch(weight + (size_t)weight_row(first + o, outputs) * inputs + at);
    }
}

// The sums over this lane's part of k: vectors k, k + stride, ... of OUTS rows of W and ROWS rows of x.
template <bool ALIGNED>
__device__ __forceinline__ void accumulate(float (&sums)[ROWS][OUTS], const storage_t* x, const storage_t* weight,
                                           int first, int rows, int inputs, int outputs, int x_stride, int k,
                                           int stride) {
    constexpr int DEPTH = OUTS < 4 && ROWS < 8 ? 4 : 2;  // vectors of each row loaded before the first is used
    for (; k < inputs; k += DEPTH * stride) {
        uint4 w[DEPTH][OUTS];
#pragma unroll
        for (int d = 0; d < DEPTH; ++d) {
#pragma unroll
            for (int o = 0; o < OUTS; ++o) {  // outputs beyond the last repeat it, and are not stored
                const storage_t* row = weight + (size_t)weight_row(first + o, outputs) * inputs;
                w[d][o] = load_vector<ALIGNED, true>(row, k + d * stride, inputs);
            }
        }
#pragma unroll
        for (int d = 0; d < DEPTH; ++d) {
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                const storage_t* row = x + (size_t)min(r, rows - 1) * x_stride;
                uint4 v = load_vector<ALIGNED, false>(row, k + d * stride, inputs);
#pragma unroll
                for (int i = 0; i < VECTOR; ++i) {
                    float xi = to_float(reinterpret_cast<const storage_t*>(&v)[i]);
#pragma unroll
                    for (int o = 0; o < OUTS; ++o) {
                        sums[r][o] = fmaf(xi, to_float(reinterpret_cast<const storage_t*>(&w[d][o])[i]), sums[r][o]);
                    }
                }
            }
        }
    }
}

#ifndef FUSED

// Rows of x by a block's outputs.
__device__ __forceinline__ void fma_product(const Epilogue& e, const storage_t* x, const storage_t* weight, int rows,
                                            int inputs, int x_stride, int splits) {
    __shared__ float partial[WARPS][ROWS * OUTS];
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    int groups = WARPS / splits;  // of warps; each group has its own outputs
    int first = (blockIdx.x * groups + warp / splits) * OUTS;
    int k = (warp % splits * WARP + lane) * VECTOR, stride = splits * WARP * VECTOR;

    // In the end each thread finishes one sum at most. What is added to it is under way while W is read.
    constexpr int SUMS = ROWS * OUTS;  // of a group
    static_assert(SUMS <= WARP, "a thread finishes one sum");
    int group = threadIdx.x / SUMS, value = threadIdx.x % SUMS, row = value / OUTS;
    int output = (blockIdx.x * groups + group) * OUTS + value % OUTS;
    bool finishes = group < groups && row < rows && output < e.outputs;
    Addends addends = load_addends(e, rows, row, output);

    float sums[ROWS][OUTS] = {};
    if (rows_are_aligned(x, weight, inputs, x_stride)) {
        accumulate<true>(sums, x, weight, first, rows, inputs, e.outputs, x_stride, k, stride);
    } else {
        accumulate<false>(sums, x, weight, first, rows, inputs, e.outputs, x_stride, k, stride);
    }

#pragma unroll
    for (int i = 0; i < SUMS; ++i) {
        float sum = warp_sum(sums[i / OUTS][i % OUTS]);
        if (lane == 0) partial[warp][i] = sum;
    }
    __syncthreads();
    if (!finishes) return;
    float sum = 0.0f;
    for (int split = 0; split < splits; ++split) sum += partial[group * splits + split][value];
    finish(e, row, output, sum, addends);
}

#ifndef EXPERTS

// Grid: ceil(outputs / (OUTS * WARPS / splits)); block: WARPS warps; splits (1, 2, 4): the warps that share a row of W.
extern "C" __global__ __launch_bounds__(WARPS * WARP, RESIDENT) void gemv_fma(
    out_t* out, const storage_t* x, const storage_t* weight, const float* bias, const storage_t* residual, int rows,
    int inputs, int outputs, int x_stride, int out_stride, int residual_stride, int activation, int splits) {
    launch_dependents();
    if (DEPENDENT) {
        int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
        int first = (blockIdx.x * (WARPS / splits) + warp / splits) * OUTS;
        prefetch_weights(weight, first, inputs, outputs, (warp % splits * WARP + lane) * VECTOR,
                         splits * WARP * VECTOR);
    }
    wait_for_results();
    Epilogue e{out, bias, residual, outputs, out_stride, residual_stride, activation};
    fma_product(e, x, weight, rows, inputs, x_stride, splits);
}

#else

// weight: [X, outputs, inputs]; starts: [X + 1], expert e has the rows starts[e] : starts[e + 1] of x and out; present:
// the experts that have rows, then -1; biases: [X, outputs], or null.
// Grid: (as of gemv_fma, length of `present`); block: WARPS warps.
extern "C" __global__ __launch_bounds__(WARPS * WARP, RESIDENT) void experts_fma(
    out_t* out, const storage_t* x, const storage_t* weight, const int* starts, const int* present, const float* biases,
    int inputs, int outputs, int x_stride, int out_stride, int splits) {
    follow();
    int expert = present[blockIdx.y];
    if (expert < 0) return;
    weight += (size_t)expert * outputs * inputs;
    const float* bias = biases ? biases + (size_t)expert * outputs : nullptr;
    int stop = starts[expert + 1];
    for (int row = starts[expert]; row < stop; row += ROWS) {
        Epilogue e{out + (size_t)row * out_stride, bias, nullptr, outputs, out_stride, 0, 0};
        fma_product(e, x + (size_t)row * x_stride, weight, min(ROWS, stop - row), inputs, x_stride, splits);
        __syncthreads();  // until then sums of these rows are read
    }
}

#endif

#endif

#elif MINILLM_STORAGE != 32

#ifdef BITS
#include "gemv_integers.cuh"
#else

constexpr int WARPS = 8;
constexpr int TILES = OUTS / 8;              // tiles of mma side by side
constexpr int ROW_TILES = (ROWS + 15) / 16;  // and one below the other
// Blocks on a processor, by the registers that they need.
constexpr int RESIDENT = ROWS > 32 ? 1 : 2;

using Sums = float[ROW_TILES][TILES][4];

// Bring this lane's first vectors of W to L2, while the block still waits for x.
__device__ __forceinline__ void begin_weights(const storage_t* weight, int first, int inputs, int outputs) {
    if (!DEPENDENT) return;
    int warp = threadIdx.x / WARP, g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
    for (int tile = 0; tile < TILES; ++tile) {
        int at = warp * 8 * VECTOR + t * 2 * VECTOR;
        if (at < inputs) prefetch(weight + (size_t)weight_row(first + tile * 8 + g, outputs) * inputs + at);
    }
}

// The sums over this warp's part of k. A lane loads 16 bytes of a row, twice; four lanes together 128 bytes of it.
template <bool ALIGNED>
__device__ __forceinline__ void accumulate(Sums& sums, const storage_t* x, const storage_t* weight,
                                           int first, int rows, int inputs, int outputs, int x_stride) {
    constexpr int HALF = 4 * VECTOR, STEP = 2 * HALF;
    int warp = threadIdx.x / WARP, g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;  // as in tensor_core.cuh
    for (int k = warp * STEP; k < inputs; k += WARPS * STEP) {
        uint4 w[2][TILES], v[2][ROWS / 8];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            int at = k + half * HALF + t * VECTOR;
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) {  // outputs beyond the last repeat it, and are not stored
                const storage_t* row = weight + (size_t)weight_row(first + tile * 8 + g, outputs) * inputs;
                w[half][tile] = load_vector<ALIGNED, true>(row, at, inputs);
            }
#pragma unroll
            for (int r = 0; r < ROWS / 8; ++r) {
                const storage_t* row = x + (size_t)min(r * 8 + g, rows - 1) * x_stride;
                v[half][r] = load_vector<ALIGNED, false>(row, at, inputs);
            }
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int r = 0; r < ROW_TILES; ++r) {
                // Of its k, 8t .. 8t + 7, a lane gives the first four to the first mma and the rest to the second.
                uint4 low = v[half][2 * r], high = ROWS > 8 ? v[half][(2 * r + 1) % (ROWS / 8)] : make_uint4(0, 0, 0, 0);
                unsigned a0[4] = {low.x, high.x, low.y, high.y}, a1[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
                for (int tile = 0; tile < TILES; ++tile) {
                    unsigned b0[2] = {w[half][tile].x, w[half][tile].y}, b1[2] = {w[half][tile].z, w[half][tile].w};
                    mma_16816(sums[r][tile], a0, b0);
                    mma_16816(sums[r][tile], a1, b1);
                }
            }
        }
    }
}

// Visit each of a lane's sums with its place among those of the warp.
template <class Visit>
__device__ __forceinline__ void for_each_sum(Sums& sums, Visit visit) {
    int g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r) {
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
            for (int i = 0; i < (ROWS > 8 ? 4 : 2); ++i)
                visit(r * 16 + g + i / 2 * 8, tile * 8 + 2 * t + i % 2, sums[r][tile][i]);
        }
    }
}

__device__ __forceinline__ void accumulate(Sums& sums, const storage_t* x, const storage_t* weight, int first,
                                           int rows, int inputs, int outputs, int x_stride) {
    if (rows_are_aligned(x, weight, inputs, x_stride)) {
        accumulate<true>(sums, x, weight, first, rows, inputs, outputs, x_stride);
    } else {
        accumulate<false>(sums, x, weight, first, rows, inputs, outputs, x_stride);
    }
}

// As many warps' sums as 32 kB hold; with 64 x 32 of them the upper half of the warps adds to the lower first.
constexpr int HELD = ROWS * OUTS > 1024 ? WARPS / 2 : WARPS;
using Partial = float[ROWS][OUTS];

__device__ __forceinline__ Partial* partials() {
    __shared__ float partial[HELD][ROWS][OUTS];
    return partial;
}

// The sums of all warps in shared memory, for when all threads are past a barrier.
__device__ __forceinline__ void share(Sums& sums) {
    Partial* partial = partials();
    int warp = threadIdx.x / WARP;
    auto put = [&](int of, int column, float& sum) { partial[warp % HELD][of][column] = sum; };
    auto add = [&](int of, int column, float& sum) { sum += partial[warp][of][column]; };
    if (HELD < WARPS) {
        if (warp >= HELD) for_each_sum(sums, put);
        __syncthreads();
        if (warp < HELD) for_each_sum(sums, add);
    }
    if (warp < HELD) for_each_sum(sums, put);  // where the same thread has just read
}

__device__ __forceinline__ float shared_sum(int row, int output) {
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < HELD; ++w) sum += partials()[w][row][output];
    return sum;
}

#endif

#ifndef FUSED

// Rows of x by a block's outputs.
__device__ __forceinline__ void mma_product(const Epilogue& e, const storage_t* x, WEIGHT, int rows, int inputs,
                                            int x_stride MORE_WEIGHT) {
    constexpr int THREADS = WARPS * WARP, EACH = (ROWS * OUTS + THREADS - 1) / THREADS;  // sums that a thread finishes
    constexpr int EARLY = EACH <= 8 ? EACH : 0;  // of which what is added is under way while W is read
    int first = blockIdx.x * OUTS, row = threadIdx.x / OUTS, output = first + threadIdx.x % OUTS;
    Addends addends[EACH];
#pragma unroll
    for (int i = 0; i < EARLY; ++i) addends[i] = load_addends(e, rows, row + i * (THREADS / OUTS), output);

    Sums sums = {};
    accumulate(sums, x, MATRIX, first, rows, inputs, e.outputs, x_stride);
    share(sums);
    __syncthreads();

#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        int of = row + i * (THREADS / OUTS);
        if (of >= rows || output >= e.outputs) break;
        if (i >= EARLY) addends[i] = load_addends(e, rows, of, output);
        finish(e, of, output, shared_sum(of, threadIdx.x % OUTS), addends[i]);
    }
}

#ifndef EXPERTS

// Grid: ceil(outputs / OUTS), with BITS (that, ceil(rows / ROWS)); block: WARPS warps, which split `in`.
extern "C" __global__ __launch_bounds__(WARPS * WARP, RESIDENT) void gemv_mma(
    out_t* out, const storage_t* x, WEIGHT, const float* bias, const storage_t* residual, int rows, int inputs,
    int outputs, int x_stride, int out_stride, int residual_stride, int activation MORE_WEIGHT) {
#ifdef BITS
    x += (size_t)blockIdx.y * ROWS * x_stride;
    out += (size_t)blockIdx.y * ROWS * out_stride;
    if (residual) residual += (size_t)blockIdx.y * ROWS * residual_stride;
    rows = min(rows - (int)blockIdx.y * ROWS, ROWS);
#endif
    launch_dependents();
    begin_weights(MATRIX, blockIdx.x * OUTS, inputs, outputs);
    wait_for_results();
    Epilogue e{out, bias, residual, outputs, out_stride, residual_stride, activation};
    mma_product(e, x, weight, rows, inputs, x_stride MORE);
}

#else

// Arguments as of experts_fma. Grid: (ceil(outputs / OUTS), length of `present`); block: WARPS warps.
extern "C" __global__ __launch_bounds__(WARPS * WARP, RESIDENT) void experts_mma(
    out_t* out, const storage_t* x, WEIGHT, const int* starts, const int* present, const float* biases, int inputs,
    int outputs, int x_stride, int out_stride MORE_WEIGHT) {
    follow();
    int expert = present[blockIdx.y];
    if (expert < 0) return;
    size_t skipped = (size_t)expert * outputs;  // rows of the experts before
    const float* bias = biases ? biases + skipped : nullptr;
#ifdef BITS
    Integers all = MATRIX;
    weight += skipped * all.row_bytes();
    scales += skipped * all.groups;
    if (OFFSETS) offsets = all.offsets + skipped * all.groups;
#else
    weight += skipped * inputs;
#endif
    int stop = starts[expert + 1];
    for (int row = starts[expert]; row < stop; row += ROWS) {
        Epilogue e{out + (size_t)row * out_stride, bias, nullptr, outputs, out_stride, 0, 0};
        begin_weights(MATRIX, blockIdx.x * OUTS, inputs, outputs);
        mma_product(e, x + (size_t)row * x_stride, weight, min(ROWS, stop - row), inputs, x_stride MORE);
        __syncthreads();  // until then sums of these rows are read
    }
}

#endif

#endif

#endif
