// A product of few rows with what comes after it in a layer: the launches of a recorded decode step in one.
//
//   y = x @ W.T + b                                         its sums and their order are those of gemv.cu
//   out[:, :H D], keys[slot], values[slot] = q, k, v of y   STORES=1, with HEAD_DIM and PAGE_SIZE; q and k rotated where
//                                                           ROTATED > 0, of each head ROTATED pairs
//   out = activation(y[:, :F]) * y[:, F:]                   GATED=1
//
// The plain kernels (gemv.cu, rotary.cu, kv.cu, glu.cu) remain the specification: here the same numbers are added in the
// same order and rounded to storage_t at the same places, so the results are the same bits. (On a GPU but for what the
// compiler contracts to fma here and not there.)
//
// Pairs. Rotation and gate need two sums that lie ROTATED or F rows of W apart. So the rows are dealt out in pairs: a warp's
// or a tile's outputs 2i and 2i + 1 are the two of a pair, and one thread has both in the end.
//
// Constants, grid, block and floor: those of gemv.cu; OUTS is even where there are pairs.
//
// Versions:
//   1. the norm before the product was part of it, in each block, to save a launch. On an H100 that took as long as the
//      launch at 1 row, and longer at more: a step of OPT-1.3B at batch 8 2,034 us, and 1,582 without.
//   2. this one, measured there: TinyLlama 1.1B, which stores rotated keys and has gates, 1,236 in place of 1,347 us at
//      batch 1, 1,388 in place of 1,514 at 8; OPT-1.3B 1,395 in place of 1,416 and 1,579 in place of 1,609.

#ifndef ROTATED
#define ROTATED 0
#endif
#ifndef GATED
#define GATED 0
#endif
#ifndef STORES
#define STORES 0
#define HEAD_DIM 1  // nothing is stored
#define PAGE_SIZE 1
#endif

#include "gemv.cuh"
#include "paged.cuh"
#include "rotary.cuh"

static_assert(STORES != GATED, "compile with -DSTORES=1 or with -DGATED=1");

// What gemv.cu would have written for an output: it is rounded before it is used on.
__device__ __forceinline__ storage_t rounded(const Epilogue& e, int output, float sum) {
    storage_t y;
    Epilogue alone = e;
    alone.out = &y;
    finish(alone, 0, 0, sum, Addends{e.bias ? e.bias[output] : 0.0f, storage_t(0.0f)});
    return y;
}

// Queries, keys and values.
struct Store {
    // The two numbers that turn together, side by side; what does not turn, at the end of a head, where it is.
    struct Order {
        static __device__ __forceinline__ int row(int output, int outputs) {
            output = min(output, outputs - 1);
            if (ROTATED == 0) return output;
            int in_head = output % HEAD_DIM;
            return in_head < 2 * ROTATED ? output - in_head + in_head / 2 + in_head % 2 * ROTATED : output;
        }
    };

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
        int first = Order::row(output, e.outputs), second = Order::row(output + 1, e.outputs), j = first % HEAD_DIM;
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

struct Gate {
    // Gate and up, side by side.
    struct Order {
        static __device__ __forceinline__ int row(int output, int outputs) {
            return min(output, outputs - 1) / 2 + output % 2 * (outputs / 2);
        }
    };

    int activation;

    __device__ __forceinline__ void finish_pair(const Epilogue& e, int row, int output, float gate, float up) const {
        int first = Order::row(output, e.outputs);
        float a = to_float(rounded(e, first, gate)), b = to_float(rounded(e, first + e.outputs / 2, up));
        e.out[(size_t)row * e.out_stride + first] = from_float(gated(a, b, activation));
    }
};

// Finish a block's outputs first, first + 1 ..., `count` of them, in all rows; sum_of(row, i) is the sum of the i-th.
template <class Ending, class Sum>
__device__ __forceinline__ void finish_all(const Epilogue& e, const Ending& ending, int rows, int first, int count,
                                           Sum sum_of) {
    for (int i = threadIdx.x; i < rows * count / 2; i += WARPS * WARP) {
        int row = i / (count / 2), of = i % (count / 2) * 2, output = first + of;
        if (output < e.outputs) ending.finish_pair(e, row, output, sum_of(row, of), sum_of(row, of + 1));
    }
}

// What `finish_all` adds is brought to L2 while the sums are taken.
template <class Order>
__device__ __forceinline__ void prefetch_bias(const float* bias, const Weight<Order>& w, int first, int count) {
    if (bias && threadIdx.x < count) prefetch(bias + w.row(first + threadIdx.x));
}

// The arguments of both kernels: those of gemv.cu, and of kv.cu and rotary.cu or of glu.cu. What a build has no use for is
// null or 0. q goes to out.

#if OUTS < 8

template <class Ending>
__device__ __forceinline__ void fuse(const Epilogue& e, const Ending& ending, const storage_t* x,
                                     const storage_t* weight, int rows, int inputs, int x_stride, int splits) {
    Weight<typename Ending::Order> w(weight, nullptr, nullptr, inputs, e.outputs);
    Part part(splits);
    int count = part.groups * OUTS, first = blockIdx.x * count;
    launch_dependents();
    prefetch_bias(e.bias, w, first, count);
    prefetch_weights(w, part);
    wait_for_results();
    Partial& partial = share(x, w, part, rows, x_stride);
    __syncthreads();
    finish_all(e, ending, rows, first, count, [&](int row, int i) {
        return shared_sum(partial, part, i / OUTS, row, i % OUTS);
    });
}

extern "C" __global__ __launch_bounds__(WARPS * WARP, RESIDENT) void fused_fma(
    out_t* out, const storage_t* x, const storage_t* weight, const float* bias, const storage_t* residual, int rows,
    int inputs, int outputs, int x_stride, int out_stride, int residual_stride, int activation, int gate_activation,
    storage_t* keys, storage_t* values, const int* slots, int H, int K, int pages, const int* positions,
    const float* frequencies, const int* text_lens, const int* query_starts, int N, float scale, double factor,
    int original, int splits) {
    Epilogue e{out, bias, residual, outputs, out_stride, residual_stride, activation};
    if constexpr (GATED) {
        fuse(e, Gate{gate_activation}, x, weight, rows, inputs, x_stride, splits);
    } else {
        Rotation rotation{positions, frequencies, text_lens, query_starts, N, ROTATED, original, scale, factor};
        fuse(e, Store{keys, values, slots, H, K, pages, rotation}, x, weight, rows, inputs, x_stride, splits);
    }
}

#elif MINILLM_STORAGE != 32

template <class Ending>
__device__ __forceinline__ void fuse(const Epilogue& e, const Ending& ending, const storage_t* x,
                                     const Weight<typename Ending::Order>& w, int rows, int x_stride) {
    int first = blockIdx.x * OUTS;
    launch_dependents();
    prefetch_bias(e.bias, w, first, OUTS);
    begin_weights(w, first);
    wait_for_results();
    Sums sums = {};
    accumulate(sums, x, w, first, rows, x_stride);
    share(sums);
    __syncthreads();
    finish_all(e, ending, rows, first, OUTS, [&](int row, int i) { return shared_sum(row, i); });
}

extern "C" __global__ __launch_bounds__(WARPS * WARP, RESIDENT) void fused_mma(
    out_t* out, const storage_t* x, const void* weight, const float* bias, const storage_t* residual, int rows,
    int inputs, int outputs, int x_stride, int out_stride, int residual_stride, int activation, int gate_activation,
    storage_t* keys, storage_t* values, const int* slots, int H, int K, int pages, const int* positions,
    const float* frequencies, const int* text_lens, const int* query_starts, int N, float scale, double factor,
    int original, const __half* scales, const void* offsets) {
    Epilogue e{out, bias, residual, outputs, out_stride, residual_stride, activation};
    if constexpr (GATED) {
        Weight<Gate::Order> w(weight, scales, offsets, inputs, outputs);
        fuse(e, Gate{gate_activation}, x, w, rows, x_stride);
    } else {
        Weight<Store::Order> w(weight, scales, offsets, inputs, outputs);
        Rotation rotation{positions, frequencies, text_lens, query_starts, N, ROTATED, original, scale, factor};
        fuse(e, Store{keys, values, slots, H, K, pages, rotation}, x, w, rows, x_stride);
    }
}

#endif
