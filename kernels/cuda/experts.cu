// A mixture of experts: the choice of experts, the order of rows, and the sum of results (reference/experts.py). The
// products between them are experts_fma and experts_mma in gemv_experts.cu.
//
//     scores = softmax(logits), or sigmoid(logits)                  # route, [T, X] -> [T, k]
//     experts = top_k(scores + bias, k), of the groups whose best two have the largest sums, or whose best one is
//     weights = scores[experts], / their sum if normalised, * scale, * factors[experts]
//     rows, tokens, starts = places in a stable sort by expert      # sort_rows
//     out[t] = sum_j weights[t, j] * y[rows[t, j]] + r[t]           # combine, [T k, E] -> [T, E]
//
// Nothing of it is known to the host: `sort_rows` also lists the experts that have rows, and the products have as many
// blocks as there can be such experts.
//
// Bytes: 4 T X of logits, 16 T k of places; combine reads k + 1 and writes 1 row of E numbers for each token. Floor: each is
// a launch in a decode step. Of a prompt of 2,048 tokens, with k = 8 and E = 2048 in 16 bits, combine moves 84 MB: 20 us at
// 4.3 TB/s; `sort_rows` is one block whatever T, and walks over the T k choices X / 32 times.
//
// Versions:
//   1. by the array module: a dozen launches, and the host waits in each layer to learn which experts have rows.
//   2. these: three launches, recorded. Right on an H100, not timed.
#include "rows.cuh"
#include "softmax.cuh"

constexpr int MOST_EXPERTS = 1024;

// Whether (value, place) comes before another: larger, of equal ones the first; place -1 is nothing, NaN comes last.
__device__ __forceinline__ bool precedes(float value, int place, float other, int other_place) {
    if (place < 0 || other_place < 0) return place >= 0;
    bool nan = value != value, other_nan = other != other;
    if (nan != other_nan) return other_nan;
    return value > other || ((value == other || nan) && place < other_place);
}

// Grid: T / 4; block: 4 warps, a token each. Constant: VALUES, the logits of a lane, X / 32 or more (32 at most).
// experts, weights: [T, k]; logits: [T, X], contiguous; bias, factors: [X] or null; up to
// 32 groups.
#ifdef VALUES
// The groups whose best two numbers have the largest sums, a bit for each. ranked: a lane's numbers, of a group of `size`
// experts after the other.
__device__ __forceinline__ unsigned best_groups(const float* ranked, int X, int groups, int chosen_groups, int group_best,
                                                int lane) {
    int size = X / groups;
    float sum = minus_infinity();  // lane g has that of group g
    for (int g = 0; g < groups; ++g) {
        float first = minus_infinity(), second = minus_infinity();
#pragma unroll
        for (int i = 0; i < VALUES; ++i) {
            int expert = i * WARP + lane;
            if (expert >= X || expert / size != g) continue;
            second = fmaxf(second, fminf(first, ranked[i]));
            first = fmaxf(first, ranked[i]);
        }
#pragma unroll
        for (int offset = WARP / 2; offset > 0; offset /= 2) {
            float other = __shfl_xor_sync(ALL_LANES, first, offset);
            float other_second = __shfl_xor_sync(ALL_LANES, second, offset);
            second = fmaxf(fminf(first, other), fmaxf(second, other_second));
            first = fmaxf(first, other);
        }
        if (lane == g) sum = group_best == 1 ? first : first + second;
    }
    unsigned chosen = 0;
    for (int j = 0; j < chosen_groups; ++j) {
        float best = sum;
        int place = lane < groups && !(chosen >> lane & 1) ? lane : -1;
#pragma unroll
        for (int offset = WARP / 2; offset > 0; offset /= 2) {
            float other = __shfl_xor_sync(ALL_LANES, best, offset);
            int other_place = __shfl_xor_sync(ALL_LANES, place, offset);
            if (precedes(other, other_place, best, place)) best = other, place = other_place;
        }
        chosen |= 1u << place;
    }
    return chosen;
}

extern "C" __global__ __launch_bounds__(128) void route(int* experts, float* weights, const float* logits,
                                                        const float* bias, const float* factors, int T, int X, int k,
                                                        int normalised, int sigmoid, int groups, int chosen_groups, int group_best,
                                                        float scale) {
    follow();
    int t = blockIdx.x * 4 + threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (t >= T) return;
    float values[VALUES], highest = minus_infinity();
#pragma unroll
    for (int i = 0; i < VALUES; ++i) {
        int expert = i * WARP + lane;
        values[i] = expert < X ? logits[(size_t)t * X + expert] : minus_infinity();
        highest = fmaxf(highest, values[i]);
    }
    highest = warp_max(highest);
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < VALUES; ++i) sum += i * WARP + lane < X ? expf(values[i] - highest) : 0.0f;
    sum = warp_sum(sum);
    const float* own = logits + (size_t)t * X;
    if (bias != nullptr || groups > 1) {  // the scores, not the logits, are compared
#pragma unroll
        for (int i = 0; i < VALUES; ++i) {
            int expert = i * WARP + lane;
            if (expert >= X) continue;
            values[i] = sigmoid ? 1.0f / (1.0f + expf(-values[i])) : expf(values[i] - highest) / sum;
            if (bias != nullptr) values[i] += bias[expert];
        }
    }
    if (groups > 1) {
        unsigned counted = best_groups(values, X, groups, chosen_groups, group_best, lane);
#pragma unroll
        for (int i = 0; i < VALUES; ++i) {
            int expert = i * WARP + lane;
            if (expert < X && !(counted >> expert / (X / groups) & 1)) values[i] = minus_infinity();
        }
    }

    unsigned taken = 0;  // a bit for each of this lane's logits
    float chosen_sum = 0.0f;
    for (int j = 0; j < k; ++j) {
        float best = 0.0f;
        int place = -1;
#pragma unroll
        for (int i = 0; i < VALUES; ++i) {
            int expert = i * WARP + lane;
            bool free = expert < X && !(taken >> i & 1);
            if (free && precedes(values[i], expert, best, place)) best = values[i], place = expert;
        }
#pragma unroll
        for (int offset = WARP / 2; offset > 0; offset /= 2) {
            float other = __shfl_xor_sync(ALL_LANES, best, offset);
            int other_place = __shfl_xor_sync(ALL_LANES, place, offset);
            if (precedes(other, other_place, best, place)) best = other, place = other_place;
        }
        if (place % WARP == lane) taken |= 1u << place / WARP;
        float weight = sigmoid ? 1.0f / (1.0f + expf(-own[place])) : expf(own[place] - highest) / sum;
        chosen_sum += weight;
        if (lane == 0) {
            experts[(size_t)t * k + j] = place;
            weights[(size_t)t * k + j] = weight;
        }
    }
    if ((normalised || scale != 1.0f || factors != nullptr) && lane == 0) {
        float divisor = normalised ? chosen_sum + (sigmoid ? 1e-20f : 0.0f) : 1.0f;
        for (int j = 0; j < k; ++j) {
            size_t at = (size_t)t * k + j;
            weights[at] = weights[at] / divisor * scale * (factors == nullptr ? 1.0f : factors[experts[at]]);
        }
    }
}
#else

// Grid: 1; block: a multiple of 32 threads.
// rows: [choices], of each choice; tokens: [choices], of each row; starts: [X + 1]; present: [listed], the experts that
// have rows, then -1. experts: [choices], k of each token.
extern "C" __global__ void sort_rows(int* rows, int* tokens, int* starts, int* present, const int* experts, int choices,
                                     int X, int k, int listed) {
    __shared__ int begins[MOST_EXPERTS];  // first the rows of each expert, then where they begin
    follow();
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, warps = blockDim.x / WARP;
    unsigned before = (1u << lane) - 1;  // the lanes before this one
    for (int e = threadIdx.x; e < X; e += blockDim.x) begins[e] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < choices; i += blockDim.x) {
        int expert = experts[i];
        CHECK_INDEX(expert, X);
        atomicAdd(&begins[expert], 1);
    }
    __syncthreads();
    if (warp == 0) {
        int sum = 0, used = 0;
        for (int first = 0; first < X; first += WARP) {
            int e = first + lane, count = e < X ? begins[e] : 0, upto = count;
#pragma unroll
            for (int offset = 1; offset < WARP; offset *= 2) {
                int other = __shfl_up_sync(ALL_LANES, upto, offset);
                if (lane >= offset) upto += other;
            }
            unsigned has_rows = __ballot_sync(ALL_LANES, count > 0);
            if (e < X) {
                begins[e] = starts[e] = sum + upto - count;
                if (count > 0) present[used + __popc(has_rows & before)] = e;
            }
            sum += __shfl_sync(ALL_LANES, upto, WARP - 1);
            used += __popc(has_rows);
        }
        if (lane == 0) starts[X] = sum;
        for (int i = used + lane; i < listed; i += WARP) present[i] = -1;
    }
    __syncthreads();
    for (int e = warp; e < X; e += warps) {  // a warp deals out the rows of an expert
        int next = begins[e];
        for (int first = 0; first < choices; first += WARP) {
            int i = first + lane;
            bool mine = i < choices && experts[i] == e;
            unsigned ours = __ballot_sync(ALL_LANES, mine);
            if (mine) {
                int row = next + __popc(ours & before);
                rows[i] = row;
                tokens[row] = i / k;
            }
            next += __popc(ours);
        }
    }
}

// Grid: (T, vectors of a row / threads of a block); block: up to 256 threads.
// out: [T, E], contiguous; y: [T k, E], contiguous; weights, rows: [T, k]; residual: [T, E] or null.
extern "C" __global__ void combine(storage_t* out, const storage_t* y, const float* weights, const int* rows,
                                   const storage_t* residual, int E, int k, int residual_stride, int choices) {
    follow();
    int t = blockIdx.x, at = (blockIdx.y * blockDim.x + threadIdx.x) * VECTOR, left = E - at;
    if (left <= 0) return;
    bool wide = rows_aligned(y, E) && rows_aligned(out, E);
    float sums[VECTOR] = {};
    for (int j = 0; j < k; ++j) {
        int row = rows[(size_t)t * k + j];
        CHECK_INDEX(row, choices);
        float values[VECTOR], weight = weights[(size_t)t * k + j];
        load_vector(values, y + (size_t)row * E + at, left, wide);
#pragma unroll
        for (int i = 0; i < VECTOR; i++) sums[i] = fmaf(weight, values[i], sums[i]);
    }
    if (residual) {
        float values[VECTOR];
        bool aligned = rows_aligned(residual, residual_stride);
        load_vector(values, residual + (size_t)t * residual_stride + at, left, aligned);
#pragma unroll
        for (int i = 0; i < VECTOR; i++) sums[i] += values[i];
    }
    store_vector(out + (size_t)t * E + at, sums, left, wide);
}
#endif
