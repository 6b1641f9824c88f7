// What gemv_fused.cu and gemv_deferred.cu do with the sums of a product: rotation and stores, or a gate.
//
// Pairs. Rotation and gate need two sums that lie ROTATED or F rows of W apart. So the rows are dealt out in pairs: a warp's
// or a tile's outputs 2i and 2i + 1 are the two of a pair, and one thread has both in the end.
#pragma once

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

// What gemv.cu would have written for an output: it is rounded before it is used on.
__device__ __forceinline__ storage_t rounded(const Epilogue& e, int output, float sum) {
    return from_float(activate(sum + (e.bias ? e.bias[output] : 0.0f), e.activation) + to_float(storage_t(0.0f)));
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

#if OUTS < 8

// A product by multiply-adds and its ending; the norm before it is put off, if there is one.
template <class Ending, class Norm = NoNorm>
__device__ __forceinline__ void fuse(const Epilogue& e, const Ending& ending, const storage_t* x,
                                     const storage_t* weight, int rows, int inputs, int x_stride, int splits,
                                     Norm norm = {}) {
    Weight<typename Ending::Order> w(weight, nullptr, nullptr, inputs, e.outputs);
    Part part(splits);
    int count = part.groups * OUTS, first = blockIdx.x * count;
    launch_dependents();
    prefetch_bias(e.bias, w, first, count);
    prefetch_weights(w, part, norm);
    wait_for_results();
    Partial<Norm>& partial = share(x, w, part, rows, x_stride, norm);
    __syncthreads();
    finish_all(e, ending, rows, first, count, [&](int row, int i) {
        return shared_sum(partial, part, i / OUTS, row, i % OUTS, inputs, norm);
    });
}

#endif
