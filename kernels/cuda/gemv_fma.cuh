// The sums of gemv.cu by multiply-adds in float: 1 to 4 rows of x in 16 bits, up to 16 in float32.
//
// A lane reads 16 bytes of each of OUTS rows of W, then of each row of x, and adds up ROWS x OUTS sums; the lanes of a warp,
// and the warps that share a row of W, are added up in the end.

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
