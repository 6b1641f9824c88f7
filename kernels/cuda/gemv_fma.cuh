// The sums of gemv.cu by multiply-adds in float: 1 to 4 rows of x in 16 bits, up to 16 in float32.
//
// A lane reads 16 bytes of each of OUTS rows of W, then of each row of x, and adds up ROWS x OUTS sums; the lanes of a warp,
// and the warps that share a row of W, are added up in the end.

constexpr int WARPS = 4;
// Blocks that are to fit on a processor. Named, because else the compiler saves registers for more of them, and puts
// off the loads that should be under way together.
constexpr int RESIDENT = ROWS <= 4 ? 4 : 2;
constexpr int SUMS = ROWS * OUTS;  // of a warp
// With a norm's squares and gains 16 sums need more registers than four blocks leave.
constexpr int RESIDENT_DEFERRED = SUMS < 16 ? RESIDENT : 3;
static_assert(SUMS <= WARP, "a thread finishes one sum");

// What a lane has of a product: its warp is one of `splits` that share OUTS rows of W, each with a part of k.
struct Part {
    int splits, groups;  // groups of such warps in a block
    int first;           // output of the warp
    int k, stride;       // the lane's first number of a row, and how far apart its vectors are

    __device__ __forceinline__ explicit Part(int splits) : splits(splits), groups(WARPS / splits) {
        int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
        first = (blockIdx.x * groups + warp / splits) * OUTS;
        k = (warp % splits * WARP + lane) * VECTOR, stride = splits * WARP * VECTOR;
    }
};

// The norm of x: it has been taken, or none is.
struct NoNorm {
    static constexpr bool DEFERRED = false;
};

// An RMS norm that is put off (gemv_deferred.cu): x is multiplied by the gain before the sums are taken, which are scaled
// in the end.
struct RmsNorm {
    static constexpr bool DEFERRED = true;
    const float* gain;  // [in]
    float epsilon;

    // VECTOR numbers of the gain from k on; beyond its end, where x is 0, any.
    template <bool ALIGNED>
    __device__ __forceinline__ void load(float (&gains)[VECTOR], int k, int inputs) const {
#pragma unroll
        for (int i = 0; i < VECTOR; i += 4) {
            float4 four;
            if (ALIGNED) {
                four = *reinterpret_cast<const float4*>(gain + (k < inputs ? k + i : 0));
            } else {
                int last = inputs - 1;
                four = make_float4(gain[min(k + i, last)], gain[min(k + i + 1, last)], gain[min(k + i + 2, last)],
                                   gain[min(k + i + 3, last)]);
            }
            gains[i] = four.x, gains[i + 1] = four.y, gains[i + 2] = four.z, gains[i + 3] = four.w;
        }
    }
};

// Bring the first two vectors of this lane's rows of W to L2, and their gains, while the block still waits for x.
template <class Order, class Norm = NoNorm>
__device__ __forceinline__ void prefetch_weights(const Weight<Order>& w, const Part& part, Norm norm = {}) {
    if (!DEPENDENT) return;
    for (int at = part.k; at < min(w.inputs, part.k + 2 * part.stride); at += part.stride) {
        for (int o = 0; o < OUTS; ++o) prefetch(w.at(w.row(part.first + o)) + at);
        if constexpr (Norm::DEFERRED) prefetch(norm.gain + at);
    }
}

// The sums over this lane's part of k, of OUTS rows of W and ROWS rows of x; and the squares of x for a norm.
template <bool ALIGNED, class Order, class Norm>
__device__ __forceinline__ void accumulate(float (&sums)[ROWS][OUTS], float (&squares)[ROWS], const storage_t* x,
                                           const Weight<Order>& w, const Part& part, int rows, int x_stride,
                                           Norm norm) {
    constexpr int DEPTH = OUTS < 4 && ROWS < 8 ? 4 : 2;  // vectors of each row loaded before the first is used
    for (int k = part.k; k < w.inputs; k += DEPTH * part.stride) {
        uint4 weights[DEPTH][OUTS];
#pragma unroll
        for (int d = 0; d < DEPTH; ++d) {
#pragma unroll
            for (int o = 0; o < OUTS; ++o) {
                const storage_t* row = w.at(w.row(part.first + o));
                weights[d][o] = load_vector<ALIGNED, true>(row, k + d * part.stride, w.inputs);
            }
        }
#pragma unroll
        for (int d = 0; d < DEPTH; ++d) {
            float gains[VECTOR];
            if constexpr (Norm::DEFERRED) norm.template load<ALIGNED>(gains, k + d * part.stride, w.inputs);
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                const storage_t* row = x + (size_t)min(r, rows - 1) * x_stride;
                uint4 v = load_vector<ALIGNED, false>(row, k + d * part.stride, w.inputs);
#pragma unroll
                for (int i = 0; i < VECTOR; ++i) {
                    float xi = to_float(reinterpret_cast<const storage_t*>(&v)[i]);
                    if constexpr (Norm::DEFERRED) {
                        squares[r] = fmaf(xi, xi, squares[r]);
                        xi *= gains[i];
                    }
#pragma unroll
                    for (int o = 0; o < OUTS; ++o) {
                        float wi = to_float(reinterpret_cast<const storage_t*>(&weights[d][o])[i]);
                        sums[r][o] = fmaf(xi, wi, sums[r][o]);
                    }
                }
            }
        }
    }
}

template <class Norm>
using Partial = float[WARPS][SUMS + (Norm::DEFERRED ? ROWS : 0)];  // the last ones are squares

// The sums of all warps in shared memory, for when all threads are past a barrier.
template <class Order, class Norm>
__device__ __forceinline__ Partial<Norm>& share(const storage_t* x, const Weight<Order>& w, const Part& part, int rows,
                                                int x_stride, Norm norm) {
    __shared__ Partial<Norm> partial;
    float sums[ROWS][OUTS] = {}, squares[ROWS] = {};
    if (rows_are_aligned(x, w.values, w.inputs, x_stride)) {
        accumulate<true>(sums, squares, x, w, part, rows, x_stride, norm);
    } else {
        accumulate<false>(sums, squares, x, w, part, rows, x_stride, norm);
    }
#pragma unroll
    for (int i = 0; i < SUMS; ++i) {
        float sum = warp_sum(sums[i / OUTS][i % OUTS]);
        if (threadIdx.x % WARP == 0) partial[threadIdx.x / WARP][i] = sum;
    }
    if constexpr (Norm::DEFERRED) {
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            float sum = warp_sum(squares[r]);
            if (threadIdx.x % WARP == 0) partial[threadIdx.x / WARP][SUMS + r] = sum;
        }
    }
    return partial;
}

// The sum of a group's output in a row, over all of k, and scaled if there is a norm.
template <class Norm>
__device__ __forceinline__ float shared_sum(const Partial<Norm>& partial, const Part& part, int group, int row,
                                            int output, int inputs, Norm norm) {
    int warp = group * part.splits;
    float sum = 0.0f, squares = 0.0f;
    for (int split = 0; split < part.splits; ++split) sum += partial[warp + split][row * OUTS + output];
    if constexpr (Norm::DEFERRED) {
        for (int split = 0; split < part.splits; ++split) squares += partial[warp + split][SUMS + row];
        sum *= 1.0f / sqrtf(squares / inputs + norm.epsilon);
    }
    return sum;
}

// Rows of x by a block's outputs.
template <class Order, class Norm = NoNorm>
__device__ __forceinline__ void fma_product(const Epilogue& e, const storage_t* x, const Weight<Order>& w,
                                            const Part& part, int rows, int x_stride, Norm norm = {}) {
    // In the end each thread finishes one sum at most. What is added to it is under way while W is read.
    int group = threadIdx.x / SUMS, row = threadIdx.x % SUMS / OUTS, column = threadIdx.x % OUTS;
    int output = (blockIdx.x * part.groups + group) * OUTS + column;
    bool finishes = group < part.groups && row < rows && output < e.outputs;
    Addends addends = load_addends(e, rows, row, output);
    Partial<Norm>& partial = share(x, w, part, rows, x_stride, norm);
    __syncthreads();
    if (finishes) finish(e, row, output, shared_sum(partial, part, group, row, column, w.inputs, norm), addends);
}
