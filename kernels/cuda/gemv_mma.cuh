// The sums of gemv.cu by tensor cores: 5 to 64 rows of x, and W, in 16 bits.
//
// Eight warps split k. A lane's 16 bytes of a row of W, and of x, are its part of two products m16n8k16, x on the left: both
// are given to mma in the same order of k, which need not be theirs in memory.

constexpr int WARPS = 8;
constexpr int TILES = OUTS / 8;              // tiles of mma side by side
constexpr int ROW_TILES = (ROWS + 15) / 16;  // and one below the other
// Blocks on a processor, by the registers that they need.
constexpr int RESIDENT = ROWS > 32 ? 1 : 2, RESIDENT_EXPERTS = RESIDENT;

constexpr bool ROWS_OF_BLOCKS = false;  // all of x is every block's

using Sums = float[ROW_TILES][TILES][4];

// Bring this lane's first vectors of W to L2, while the block still waits for x.
template <class Order>
__device__ __forceinline__ void begin_weights(const Weight<Order>& w, int first) {
    if (!DEPENDENT) return;
    int warp = threadIdx.x / WARP, g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
    for (int tile = 0; tile < TILES; ++tile) {
        int at = warp * 8 * VECTOR + t * 2 * VECTOR;
        if (at < w.inputs) prefetch(w.at(w.row(first + tile * 8 + g)) + at);
    }
}

// The sums over this warp's part of k. A lane loads 16 bytes of a row, twice; four lanes together 128 bytes of it.
template <bool ALIGNED, class Order>
__device__ __forceinline__ void accumulate(Sums& sums, const storage_t* x, const Weight<Order>& w, int first, int rows,
                                           int x_stride) {
    constexpr int HALF = 4 * VECTOR, STEP = 2 * HALF;
    int warp = threadIdx.x / WARP, g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;  // as in tensor_core.cuh
    for (int k = warp * STEP; k < w.inputs; k += WARPS * STEP) {
        uint4 weights[2][TILES], v[2][ROWS / 8];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            int at = k + half * HALF + t * VECTOR;
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) {
                const storage_t* row = w.at(w.row(first + tile * 8 + g));
                weights[half][tile] = load_vector<ALIGNED, true>(row, at, w.inputs);
            }
#pragma unroll
            for (int r = 0; r < ROWS / 8; ++r) {
                const storage_t* row = x + (size_t)min(r * 8 + g, rows - 1) * x_stride;
                v[half][r] = load_vector<ALIGNED, false>(row, at, w.inputs);
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
                    const uint4& own = weights[half][tile];
                    unsigned b0[2] = {own.x, own.y}, b1[2] = {own.z, own.w};
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

template <class Order>
__device__ __forceinline__ void accumulate(Sums& sums, const storage_t* x, const Weight<Order>& w, int first, int rows,
                                           int x_stride) {
    if (rows_are_aligned(x, w.values, w.inputs, x_stride)) {
        accumulate<true>(sums, x, w, first, rows, x_stride);
    } else {
        accumulate<false>(sums, x, w, first, rows, x_stride);
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
