// A product of few rows, the decode step's: y[t, o] = activation(sum_k x[t, k] W[o, k] + b[o]) + r[t, o], t < 16.
//
//   y = activation(x @ W.T + b) + r
//
// Constants: ROWS (1, 2, 4, 8, 16), the rows that the code is unrolled for; a launch may have fewer.
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
// Versions (none measured on a GPU yet):
//   gemv_fma  Multiply-adds in float. At 4.3 TB/s 2.15 T 16-bit weights arrive a second; with R rows they need R times
//             as many multiply-adds, of about 29 T a second that 132 processors have. Meant for R up to 4, and for
//             float storage (half as many weights arrive).
//   gemv_mma  For 5 to 16 rows of 16-bit storage: the same loads feed tensor cores, m16n8k16 with x as the 16 rows and
//             W as the 8 columns. A lane's 16 bytes hold 8 neighbouring k of one row, where mma wants two pairs 8
//             apart; but a sum may be taken in any order, so x and W are given to mma in the same permutation of k and
//             nothing is moved. Expected: the arithmetic hides behind the loads, and 16 rows take what one takes.
//
// What limits it: bandwidth for large matrices; for small ones (OPT-125m) latency of launch, first load and reduction.

#include "epilogue.cuh"
#include "tensor_core.cuh"

#if OUTS < 8

constexpr int WARPS = 4;
// Blocks that are to fit on a processor. Named, because else the compiler saves registers for more of them, and puts
// off the loads that should be under way together.
constexpr int RESIDENT = ROWS <= 4 ? 4 : 2;

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
                const storage_t* row = weight + (size_t)min(first + o, outputs - 1) * inputs;
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

// Grid: ceil(outputs / (OUTS * WARPS / splits)); block: WARPS warps; splits (1, 2, 4): the warps that share a row of W.
extern "C" __global__ __launch_bounds__(WARPS * WARP, RESIDENT) void gemv_fma(
    out_t* out, const storage_t* x, const storage_t* weight, const float* bias, const storage_t* residual, int rows,
    int inputs, int outputs, int x_stride, int out_stride, int residual_stride, int activation, int splits) {
    __shared__ float partial[WARPS][ROWS * OUTS];
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    int groups = WARPS / splits;  // of warps; each group has its own outputs
    int first = (blockIdx.x * groups + warp / splits) * OUTS;
    int k = (warp % splits * WARP + lane) * VECTOR, stride = splits * WARP * VECTOR;

    float sums[ROWS][OUTS] = {};
    if (rows_are_aligned(x, weight, inputs, x_stride)) {
        accumulate<true>(sums, x, weight, first, rows, inputs, outputs, x_stride, k, stride);
    } else {
        accumulate<false>(sums, x, weight, first, rows, inputs, outputs, x_stride, k, stride);
    }

#pragma unroll
    for (int i = 0; i < ROWS * OUTS; ++i) {
        float sum = warp_sum(sums[i / OUTS][i % OUTS]);
        if (lane == 0) partial[warp][i] = sum;
    }
    __syncthreads();

    Epilogue e{out, bias, residual, outputs, out_stride, residual_stride, activation};
    for (int i = threadIdx.x; i < groups * ROWS * OUTS; i += WARPS * WARP) {
        int group = i / (ROWS * OUTS), value = i % (ROWS * OUTS);
        int row = value / OUTS, output = (blockIdx.x * groups + group) * OUTS + value % OUTS;
        float sum = 0.0f;
        for (int split = 0; split < splits; ++split) sum += partial[group * splits + split][value];
        if (row < rows && output < outputs) finish(e, row, output, sum);
    }
}

#elif MINILLM_STORAGE != 32

constexpr int WARPS = 8;
constexpr int TILES = OUTS / 8;  // tiles of mma side by side

// The sums over this warp's part of k. A lane loads 16 bytes of a row, twice; four lanes together 128 bytes of it.
template <bool ALIGNED>
__device__ __forceinline__ void accumulate(float (&sums)[TILES][4], const storage_t* x, const storage_t* weight,
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
                const storage_t* row = weight + (size_t)min(first + tile * 8 + g, outputs - 1) * inputs;
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
            // Of its k, 8t .. 8t + 7, a lane gives the first four to the first mma and the rest to the second.
            uint4 low = v[half][0], high = ROWS > 8 ? v[half][ROWS / 8 - 1] : make_uint4(0, 0, 0, 0);
            unsigned a0[4] = {low.x, high.x, low.y, high.y}, a1[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) {
                unsigned b0[2] = {w[half][tile].x, w[half][tile].y}, b1[2] = {w[half][tile].z, w[half][tile].w};
                mma_16816(sums[tile], a0, b0);
                mma_16816(sums[tile], a1, b1);
            }
        }
    }
}

// Grid: ceil(outputs / OUTS); block: WARPS warps, which split `in`.
extern "C" __global__ __launch_bounds__(WARPS * WARP, 2) void gemv_mma(
    out_t* out, const storage_t* x, const storage_t* weight, const float* bias, const storage_t* residual, int rows,
    int inputs, int outputs, int x_stride, int out_stride, int residual_stride, int activation) {
    __shared__ float partial[WARPS][ROWS][OUTS];
    int warp = threadIdx.x / WARP, g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
    int first = blockIdx.x * OUTS;

    float sums[TILES][4] = {};
    if (rows_are_aligned(x, weight, inputs, x_stride)) {
        accumulate<true>(sums, x, weight, first, rows, inputs, outputs, x_stride);
    } else {
        accumulate<false>(sums, x, weight, first, rows, inputs, outputs, x_stride);
    }

#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
        for (int i = 0; i < ROWS / 4; ++i) partial[warp][g + i / 2 * 8][tile * 8 + 2 * t + i % 2] = sums[tile][i];
    }
    __syncthreads();

    Epilogue e{out, bias, residual, outputs, out_stride, residual_stride, activation};
    for (int i = threadIdx.x; i < rows * OUTS; i += WARPS * WARP) {
        int row = i / OUTS, output = first + i % OUTS;
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) sum += partial[w][row][i % OUTS];
        if (output < outputs) finish(e, row, output, sum);
    }
}

#endif
