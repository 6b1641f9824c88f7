// A product of few rows with what comes before and after it in a layer: the launches of a recorded decode step in one.
//
//   x = norm(x)                                             NORM=1 layer_norm, 2 rms_norm
//   y = x @ W.T + b                                         its sums and their order are those of gemv.cu
//   out[:, :H D], keys[slot], values[slot] = q, k, v of y   STORES=1, with HEAD_DIM and PAGE_SIZE; q and k rotated where
//                                                           ROTATED > 0, of each head ROTATED pairs
//   out = activation(y[:, :F]) * y[:, F:]                   GATED=1
//   out = activation(y) + r                                 otherwise, as gemv.cu
//
// The plain kernels (norm.cu, gemv.cu, rotary.cu, kv.cu, glu.cu) remain the specification: here the same numbers are
// added in the same order and rounded to storage_t at the same places, so the results are the same bits. (On a GPU but
// for what the compiler contracts to fma here and not there.)
//
// The norm. Each block needs all of its rows, so each block computes it, from L2: rows * in numbers, three times, the
// last two from L1. Its threads take the parts that norm.cu's block would have, several each. Meanwhile the first part
// of W is on its way to L2. The normed rows stay in shared memory. minillm/backends/cuda/fusing.py says up to how many
// bytes of them this is worth a launch.
//
// Pairs. Rotation and gate need two sums that lie ROTATED or F rows of W apart. So the rows are dealt out in pairs: a warp's
// or a tile's outputs 2i and 2i + 1 are the two of a pair, and one thread has both in the end.
//
// Constants, grid, block and floor: those of gemv.cu; OUTS is even where there are pairs. Dynamic shared memory with NORM:
// ROWS * (in + PADDING) * sizeof(storage_t).
//
// Versions: this one, not measured on a GPU. Expected: a launch and its wait, 1.3 us or more, for each kernel saved.

#if (defined(GATED) && GATED) || (defined(STORES) && STORES && ROTATED > 0)
#define PAIRED 1
#endif
#ifndef NORM
#define NORM 0
#endif
#ifndef STORES
#define STORES 0
#endif
#ifndef GATED
#define GATED 0
#endif
#ifndef ROTATED
#define ROTATED 0
#endif

#if defined(PAIRED) && GATED
// Gate and up, side by side.
__device__ __forceinline__ int weight_row(int output, int outputs) {
    return min(output, outputs - 1) / 2 + output % 2 * (outputs / 2);
}
#elif defined(PAIRED)
// The two numbers that turn together, side by side; what does not turn, at the end of a head, where it is.
__device__ __forceinline__ int weight_row(int output, int outputs) {
    output = output < outputs ? output : outputs - 1;
    int in_head = output % HEAD_DIM;
    return in_head < 2 * ROTATED ? output - in_head + in_head / 2 + in_head % 2 * ROTATED : output;
}
#endif

#define FUSED 1
#include "gemv.cu"
#include "rows.cuh"
#if STORES
#include "paged.cuh"
#include "rotary.cuh"
#endif

constexpr int PADDING = 32;  // numbers between rows of x in shared memory: 8 rows meet fewer banks twice

struct Norm {
    const float *gain, *bias;
    int vectors;  // VECTORS of norm.cu
    float epsilon;
};

#if NORM
// to[r] = norm(x[r]) for all rows, in shared memory, by the whole block.
__device__ __forceinline__ const storage_t* normed(const Norm& norm, const storage_t* x, int rows, int E, int x_stride) {
    extern __shared__ __align__(16) unsigned char dynamic_shared[];
    storage_t* to = reinterpret_cast<storage_t*>(dynamic_shared);
    __shared__ float sums[2][ROWS][WARP];
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    int each = VECTOR * norm.vectors, threads = ((E + each - 1) / each + WARP - 1) / WARP * WARP;  // of norm.cu's block
    int warps = threads / WARP;
    bool wide = rows_aligned(x, x_stride) && E % VECTOR == 0;

    // The sum over a row of what `part` makes of each vector, as block_sum has it. Left in sums[which] for each warp.
    auto sum_up = [&](int which, auto part) {
        for (int i = warp; i < rows * warps; i += WARPS) {
            int r = i / warps, thread = i % warps * WARP + lane;
            float total = 0.0f;
            for (int v = 0; v < norm.vectors; v++) {
                int at = (v * threads + thread) * VECTOR;
                float values[VECTOR];
                load_vector(values, x + (size_t)r * x_stride + at, E - at, wide);
                part(total, values, r, E - at);
            }
            total = warp_sum(total);
            if (lane == 0) sums[which][r][i % warps] = total;
        }
        __syncthreads();
    };
    auto summed = [&](int which, int r) { return warp_sum(lane < warps ? sums[which][r][lane] : 0.0f); };

    float mean[ROWS] = {}, scale[ROWS];
    if (NORM == 1) {
        sum_up(0, [](float& total, float (&values)[VECTOR], int, int) {
            for (int i = 0; i < VECTOR; i++) total += values[i];
        });
#pragma unroll
        for (int r = 0; r < ROWS; r++) mean[r] = r < rows ? summed(0, r) / E : 0.0f;
    }
    sum_up(1, [&](float& total, float (&values)[VECTOR], int of, int left) {
        float middle = 0.0f;
#pragma unroll
        for (int r = 0; r < ROWS; r++) middle = r == of ? mean[r] : middle;
        for (int i = 0; i < VECTOR; i++) {
            values[i] -= middle;
            if (i < left) total += values[i] * values[i];
        }
    });
#pragma unroll
    for (int r = 0; r < ROWS; r++) scale[r] = 1.0f / sqrtf((r < rows ? summed(1, r) : 0.0f) / E + norm.epsilon);

    for (int at = threadIdx.x * VECTOR; at < E; at += WARPS * WARP * VECTOR) {
        float gain[VECTOR], bias[VECTOR];
        bool aligned = rows_aligned(norm.gain, E) && rows_aligned(norm.bias, E) && E % VECTOR == 0;
        if (norm.gain != nullptr) load_vector(gain, norm.gain + at, E - at, aligned);
        if (norm.bias != nullptr) load_vector(bias, norm.bias + at, E - at, aligned);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            if (r >= rows) break;
            float values[VECTOR];
            load_vector(values, x + (size_t)r * x_stride + at, E - at, wide);
#pragma unroll
            for (int i = 0; i < VECTOR; i++) {
                values[i] = (values[i] - mean[r]) * (norm.gain != nullptr ? scale[r] * gain[i] : scale[r]);
                if (norm.bias != nullptr) values[i] += bias[i];
            }
            store_vector(to + r * (E + PADDING) + at, values, E - at, E % VECTOR == 0);
        }
    }
    __syncthreads();
    return to;
}
#endif

#if STORES || GATED

// What gemv.cu would have written for an output: it is rounded before it is used on.
__device__ __forceinline__ storage_t rounded(const Epilogue& e, int output, float sum) {
    storage_t y;
    Epilogue alone = e;
    alone.out = &y;
    finish(alone, 0, 0, sum, Addends{e.bias ? e.bias[output] : 0.0f, storage_t(0.0f)});
    return y;
}

#endif

#if STORES

struct Ending {
    storage_t *keys, *values;  // [pages, K, P, D]
    const int* slots;          // [T], page * P + offset, or -1
    int H, K, pages;
    Rotation rotation;

    // Output number `output` of a token: a query goes to `out`, a key or a value to its place in the cache.
    __device__ __forceinline__ void place(const Epilogue& e, int row, int output, storage_t y) const {
        int head = output / HEAD_DIM, column = output % HEAD_DIM, slot = slots[row];
        if (head < H) {
            e.out[(size_t)row * e.out_stride + output] = y;
        } else if (slot >= 0) {
            int page = slot / PAGE_SIZE, kv_head = head - H;
            CHECK_INDEX(page, pages);
            storage_t* cache = kv_head < K ? keys : values;
            cache[page_row(page, slot % PAGE_SIZE, kv_head % K, K) + column] = y;
        }
    }

    __device__ __forceinline__ void finish_pair(const Epilogue& e, int row, int output, float one, float other) const {
        int first = weight_row(output, e.outputs), second = weight_row(output + 1, e.outputs), j = first % HEAD_DIM;
        storage_t a = rounded(e, first, one), b = rounded(e, second, other);
        if (ROTATED > 0 && first / HEAD_DIM < H + K && j < ROTATED) {
            Rotation turned = rotation;
            float growth = turned.stretch(row), cosine, sine;
            turned.turn(row, j, growth, cosine, sine);
            one = to_float(a), other = to_float(b);
            rotate(one, other, cosine, sine);
            a = from_float(one), b = from_float(other);
        }
        place(e, row, first, a);
        place(e, row, second, b);
    }
};

#elif GATED

struct Ending {
    int activation;  // of the gate

    __device__ __forceinline__ void finish_pair(const Epilogue& e, int row, int output, float gate, float up) const {
        int first = weight_row(output, e.outputs);
        float a = to_float(rounded(e, first, gate)), b = to_float(rounded(e, first + e.outputs / 2, up));
        e.out[(size_t)row * e.out_stride + first] = from_float(activate(a, activation) * b);
    }
};

#else

struct Ending {};

#endif

// Finish a block's outputs first, first + 1 ..., `count` of them, in all rows; sum_of(row, i) is the sum of the i-th.
template <class Sum>
__device__ __forceinline__ void finish_all(const Epilogue& e, const Ending& ending, int rows, int first, int count,
                                           Sum sum_of) {
    constexpr int WIDTH = STORES || GATED ? 2 : 1;
    for (int i = threadIdx.x; i < rows * count / WIDTH; i += WARPS * WARP) {
        int row = i / (count / WIDTH), of = i % (count / WIDTH) * WIDTH, output = first + of;
        if (output >= e.outputs) continue;
#if STORES || GATED
        ending.finish_pair(e, row, output, sum_of(row, of), sum_of(row, of + 1));
#else
        finish(e, row, output, sum_of(row, of), load_addends(e, rows, row, output));
#endif
    }
}

// What `finish_all` adds is brought to L2 while the sums are taken.
__device__ __forceinline__ void prefetch_bias(const float* bias, int first, int count, int outputs) {
    if (bias && threadIdx.x < count) prefetch(bias + weight_row(first + threadIdx.x, outputs));
}

// The arguments of both kernels: those of gemv.cu, of norm.cu, of kv.cu and rotary.cu or of glu.cu. What a build has no
// use for is null or 0. q goes to out.
#define PARAMETERS                                                                                                  \
    out_t *out, const storage_t *x, WEIGHT, const float *bias, const storage_t *residual, int rows,                  \
        int inputs, int outputs, int x_stride, int out_stride, int residual_stride, int activation,                 \
        const float *gain, const float *norm_bias, int norm_vectors, float epsilon, int gate_activation,            \
        storage_t *keys, storage_t *values, const int *slots, int H, int K, int pages, const int *positions,        \
        const float *frequencies, const int *text_lens, const int *query_starts, int N, float scale, double factor, \
        int original

#if STORES
#define ENDING \
    {keys, values, slots, H, K, pages, \
     {positions, frequencies, text_lens, query_starts, N, ROTATED, original, scale, factor}}
#elif GATED
#define ENDING {gate_activation}
#else
#define ENDING {}
#endif

#if OUTS < 8

extern "C" __global__ __launch_bounds__(WARPS * WARP, RESIDENT) void fused_fma(PARAMETERS, int splits) {
    __shared__ float partial[WARPS][ROWS * OUTS];
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, groups = WARPS / splits;
    int first = (blockIdx.x * groups + warp / splits) * OUTS;
    int k = (warp % splits * WARP + lane) * VECTOR, stride = splits * WARP * VECTOR;
    Epilogue e{out, bias, residual, outputs, out_stride, residual_stride, activation};
    launch_dependents();
    prefetch_bias(bias, blockIdx.x * groups * OUTS, groups * OUTS, outputs);
    if (NORM || DEPENDENT) prefetch_weights(weight, first, inputs, outputs, k, stride);
    wait_for_results();
#if NORM
    x = normed(Norm{gain, norm_bias, norm_vectors, epsilon}, x, rows, inputs, x_stride);
    x_stride = inputs + PADDING;
#endif

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
    finish_all(e, Ending ENDING, rows, blockIdx.x * groups * OUTS, groups * OUTS, [&](int row, int i) {
        float sum = 0.0f;
        for (int split = 0; split < splits; ++split) sum += partial[i / OUTS * splits + split][row * OUTS + i % OUTS];
        return sum;
    });
}

#elif MINILLM_STORAGE != 32

#ifdef FEW
constexpr int FUSED_RESIDENT = RESIDENT;
#else
constexpr int FUSED_RESIDENT = 2;
#endif

extern "C" __global__ __launch_bounds__(WARPS * WARP, FUSED_RESIDENT) void fused_mma(PARAMETERS MORE_WEIGHT) {
    __shared__ float partial[WARPS][ROWS][OUTS];
    int warp = threadIdx.x / WARP, first = blockIdx.x * OUTS;
    Epilogue e{out, bias, residual, outputs, out_stride, residual_stride, activation};
    launch_dependents();
    prefetch_bias(bias, first, OUTS, outputs);
#ifdef FEW
    Begun begun;
    begun.load(MATRIX, first, outputs, threadIdx.x / WARP * STEPS * 4);
#else
    if (NORM || DEPENDENT) prefetch_weights(MATRIX, first, inputs, outputs);
#endif
    wait_for_results();
#if NORM
    x = normed(Norm{gain, norm_bias, norm_vectors, epsilon}, x, rows, inputs, x_stride);
    x_stride = inputs + PADDING;
#endif

    Sums sums = {};
#ifdef FEW
    accumulate(sums, x, MATRIX, first, rows, inputs, outputs, x_stride, begun);
#else
    if (rows_are_aligned(x, MATRIX, inputs, x_stride)) {
        accumulate<true>(sums, x, MATRIX, first, rows, inputs, outputs, x_stride);
    } else {
        accumulate<false>(sums, x, MATRIX, first, rows, inputs, outputs, x_stride);
    }
#endif
    for_each_sum(sums, [&](int row, int column, float& sum) { partial[warp][row][column] = sum; });
    __syncthreads();
    finish_all(e, Ending ENDING, rows, first, OUTS, [&](int row, int i) {
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) sum += partial[w][row][i];
        return sum;
    });
}

#endif
