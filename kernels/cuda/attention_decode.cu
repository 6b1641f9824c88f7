// Attention of one query per sequence over its paged keys and values: flash-decoding (Dao, Haziza, Massa, Sizov 2023).
//
// For each sequence n and head h, with k = h // G, G = H / K, and S = context_lens[n] positions:
//
//   out[n, h] = softmax(keys[n, :S, k] @ q[n, h] * scale) @ values[n, :S, k]          zeros where S = 0
//
// With WINDOWED only the last `window` of the S positions count, and nothing before them is read; with CAPPED a score s is
// cap tanh(s / cap); with BIASED the score of position s loses slopes[h] * (S - 1 - s); with SUNK the softmax has one more
// score, sinks[h], whose weight is dropped; with BY_DISTANCE the score of position s gains bias[h, M - d] of the distance
// d = S - 1 - s, at most M. Other builds have no code for any of them.
//
// A context, or its window, is cut into splits of SPLIT positions. A block computes GROUP heads that share one K/V head
// over one split (so K and V are read once for all of them) and leaves the maximum, the sum of weights and the weighted
// values. The block that comes last merges all splits of its sequence in their order. What a split holds depends on
// nothing but its sequence, so the result has the same bits in any batch and under any grid.
//
// Grid (splits, H / GROUP, N), block 128; dynamic shared memory: `Staged`. Blocks beyond a sequence's end leave at once, and a block takes every
// gridDim.x-th split: a grid made for a bucket of sequences stays right while they grow, as a captured graph needs.
//
// Why SPLIT = 128: the merge writes and reads 2 * 4 G (D + 2) bytes a split and K/V head, the split itself 2 b SPLIT D:
// in 16 bits 2 % for G = 1 and 13 % for G = 8. Half as long would double that; twice as long would leave
// OPT-125m (12 heads) at context 1,000 with 48 blocks for 132 multiprocessors. Rows of up to 128 bytes take 256, which a
// block still copies at once. On an H100 at context 160 that saves the merge: a step of OPT-1.3B (D = 64) took 2 % less
// at batch 1, 8 % at batch 32; of D = 128 a layer of OPT-6.7B at context 1,000 took 10 % more at batch 1.
//
// Values may be VALUE_DIM numbers of the keys' rows, of latent attention, where `values` points into the first row: then
// out is [N, H, V], and a block has two heads, whose queries of 576 numbers fill the registers. It has run on the emulator
// alone: rows are read once for two heads in place of all, and keys and values apart, though they are the same bytes.
//
// Bytes: 2 b K D min(S, window) per sequence (b bytes a number), each once; all else is small. In 16 bits at 4.3 TB/s:
// OPT-6.7B at S = 2,000 33 MB a layer, a floor of 7.6 us; Mistral 7B (K = 8, a window of 4,096) 17 MB and 3.9 us at any
// S above that.
//
// Versions:
//   1. one block per head and sequence: batch 1 of OPT-125m runs on 12 of 132 multiprocessors
//   2. splits, merged by a second kernel: one launch more a layer, about 1.3 us inside a graph
//   3. the last block merges
//   4. this one: a split is copied to shared memory asynchronously, keys and values, all of it at once (a part at a time
//      beyond D = 128 in 16 bits); before, eight latencies of device memory came one after the other at D = 128. One
//      split needs no merge, no fence and no atomic addition. Measured on an H100 (3.0 TB/s), context 1,024: OPT-1.3B 7.9
//      us at batch 1 (0.35 of the bandwidth), 34 at 8, 105 at 32 (0.85), 392 at 128 (0.91). The latency of a short context
//      is left: 5 us at 160. For G >= 8 tensor cores are expected to win: the additions and shuffles of a row take about
//      as long as its bytes.
#include "paged.cuh"
#include "mask.cuh"
#include "splits.cuh"
#include "tensor_core.cuh"

constexpr int THREADS = 128;
constexpr int WARPS = THREADS / WARP;

static_assert(HEAD_DIM % VECTOR == 0 && VALUE_DIM % VECTOR == 0, "a row must be a whole number of 16-byte pieces");

__host__ __device__ constexpr int lanes_of_a_row(int pieces) {
    int lanes = 1;
    while (lanes < pieces && lanes < WARP) lanes *= 2;
    return lanes;
}

__host__ __device__ constexpr int min_of(int a, int b) { return a < b ? a : b; }

__host__ __device__ constexpr int power_of_two_in(int n) {
    int power = 1;
    while (2 * power <= n) power *= 2;
    return power;
}

constexpr int PIECES = HEAD_DIM / VECTOR;            // 16-byte pieces of a row
constexpr int VALUE_PIECES = VALUE_DIM / VECTOR;     // likewise of a value
constexpr int LANES = lanes_of_a_row(PIECES);        // lanes that share a row
constexpr int TURNS = (PIECES + LANES - 1) / LANES;  // pieces of one lane
constexpr int WIDTH = TURNS * VECTOR;                // numbers of a row in one lane
constexpr int ROWS = THREADS / LANES;                // rows that the block reads at once
constexpr int BATCH = min_of(SPLIT / ROWS, power_of_two_in(16 / TURNS));  // rows under way in each thread: 32 kB of keys, 32 of values

static_assert(BATCH > 0 && SPLIT % (ROWS * BATCH) == 0, "a split must be a whole number of batches");

// Blocks that are to fit on a processor; named, so that the compiler takes the registers that this leaves it. Shared
// memory has room for 3 of the largest on an H100.
constexpr int RESIDENT = GROUP < 4 ? 3 : 2;

constexpr int PARTIAL = VALUE_DIM + 2;  // weighted values, maximum, sum of weights

struct Shared {
    float weights[GROUP][SPLIT];  // scores first
    float totals[GROUP];          // sums of weights
};

// Each thread's part of a batch of rows, which no other thread reads: so they need no barrier.
using Slots = uint4[BATCH][TURNS][THREADS];

// Dynamic shared memory. The keys are used up when each warp's share of the weighted values takes their place.
struct Staged {
    union {
        Slots keys;
        float sums[WARPS][GROUP][VALUE_DIM];
    };
    Slots values;
};

static_assert(sizeof(Staged) == 2 * sizeof(Slots), "attention.py asks for so much");

// A lane's part of a row as it lies in memory; zeros past the row's end.
struct Piece {
    uint4 raw[TURNS];

    __device__ __forceinline__ void load(const storage_t* row) {
#pragma unroll
        for (int i = 0; i < TURNS; i++) {
            int piece = threadIdx.x % LANES + i * LANES;
            raw[i] = piece < PIECES ? reinterpret_cast<const uint4*>(row)[piece] : make_uint4(0, 0, 0, 0);
        }
    }

    __device__ __forceinline__ void load(const uint4 slots[TURNS][THREADS]) {
#pragma unroll
        for (int i = 0; i < TURNS; i++) raw[i] = slots[i][threadIdx.x];
    }

    __device__ __forceinline__ float operator[](int i) const {
        return to_float(reinterpret_cast<const storage_t*>(raw)[i]);
    }
};

// One split of one sequence and K/V head: `count` positions from `first`.
struct Split {
    const int* block_row;
    int first, count, head, K, pages;

    // Begin to copy a batch of this thread's rows, base + its row, + ROWS, ..., of keys or of values. Asynchronous
    // copies take no registers, so the compiler has no reason to put any of them off.
    template <int OWN_PIECES>
    __device__ __forceinline__ void copy(Slots& to, const storage_t* cache, const long long places[BATCH],
                                         int base) const {
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
            bool valid = base + b * ROWS + (int)threadIdx.x / LANES < count;
#pragma unroll
            for (int i = 0; i < TURNS; i++) {
                int piece = threadIdx.x % LANES + i * LANES;
                bool inside = piece < OWN_PIECES;  // zeros past the row's end, and for rows past the split's
                cp_async_16(&to[b][i][threadIdx.x], cache + places[b] + (inside ? piece * VECTOR : 0), inside && valid);
            }
        }
        cp_async_commit();
    }

    // Where the rows of a batch lie. Beyond the end it is the last row, which the block table has for certain, so that
    // no load of a page waits for another, or for a branch.
    __device__ __forceinline__ void find(long long places[BATCH], int base) const {
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
            int row = min(base + b * ROWS + (int)threadIdx.x / LANES, count - 1);
            places[b] = cache_row(block_row, first + row, head, K, pages);
        }
    }
};

// weights[g][row] = q[g] . keys[row] for a batch of rows; `query` and `slopes` are scaled. S: of the sequence.
__device__ __forceinline__ void score_keys(Shared& shared, const Slots& keys, const float query[GROUP][WIDTH],
                                           const float slopes[GROUP], const DistanceBias& bias, int base,
                                           const Split& split, int S) {
    constexpr int SIDE = min_of(BATCH, GROUP == 1 ? 8 : GROUP < 4 ? 4 : GROUP < 8 ? 2 : 1);  // rows side by side: their shuffles overlap
#pragma unroll
    for (int b = 0; b < BATCH; b += SIDE) {
        float scores[SIDE][GROUP];
#pragma unroll
        for (int side = 0; side < SIDE; side++) {
            Piece key;
            key.load(keys[b + side]);
#pragma unroll
            for (int g = 0; g < GROUP; g++) {
                float score = 0.0f;
#pragma unroll
                for (int i = 0; i < WIDTH; i++) score += query[g][i] * key[i];
                scores[side][g] = neighbours_sum<LANES>(score);
            }
        }
#pragma unroll
        for (int side = 0; side < SIDE; side++) {
            int row = base + (b + side) * ROWS + threadIdx.x / LANES;
#pragma unroll
            for (int g = 0; g < GROUP; g++) {
                if (BIASED) scores[side][g] -= slopes[g] * (S - 1 - split.first - row);
                if (BY_DISTANCE) scores[side][g] += bias.of(g)[min(0, split.first + row - (S - 1))] * LOG2_E;
                if (threadIdx.x % LANES == 0) shared.weights[g][row] = scores[side][g];
            }
        }
    }
}

// Scores, capped, to weights and their sum, which goes with their maximum to the partial result too, unless that is
// null: then the sinks, scaled, count here and not in the merge. A warp takes every WARPS-th head.
__device__ __forceinline__ void weigh_scores(Shared& shared, float* partial, int head_stride, int count, float cap,
                                             const float sinks[GROUP]) {
    int lane = threadIdx.x % WARP;
    for (int g = threadIdx.x / WARP; g < GROUP; g += WARPS) {
        float maximum = minus_infinity(), total = 0.0f;
        for (int row = lane; row < count; row += WARP) {
            if (CAPPED) shared.weights[g][row] = capped(shared.weights[g][row], cap);
            maximum = fmaxf(maximum, shared.weights[g][row]);
        }
        maximum = warp_max(maximum);
        if (SUNK && partial == nullptr) maximum = fmaxf(maximum, sinks[g]);
        for (int row = lane; row < count; row += WARP) {
            float weight = exp2f(shared.weights[g][row] - maximum);
            shared.weights[g][row] = weight;
            total += weight;
        }
        total = warp_sum(total);
        if (SUNK && partial == nullptr) total += exp2f(sinks[g] - maximum);
        if (lane == 0) shared.totals[g] = total;
        if (lane == 0 && partial != nullptr) {
            partial[g * head_stride + VALUE_DIM] = maximum;
            partial[g * head_stride + VALUE_DIM + 1] = total;
        }
    }
}

// sums[g] += the sum over a batch of this thread's rows of weights[g][row] * values[row]
__device__ __forceinline__ void add_values(float sums[GROUP][WIDTH], const Shared& shared, const Slots& values,
                                           int base, int count) {
#pragma unroll
    for (int b = 0; b < BATCH; b++) {
        int row = base + b * ROWS + threadIdx.x / LANES;
        Piece value;
        value.load(values[b]);
#pragma unroll
        for (int g = 0; g < GROUP; g++) {
            float weight = row < count ? shared.weights[g][row] : 0.0f;
#pragma unroll
            for (int i = 0; i < WIDTH; i++) sums[g][i] += weight * value[i];
        }
    }
}

// to[warp][g] = the sum of a warp's `sums`
__device__ __forceinline__ void share_sums(float to[WARPS][GROUP][VALUE_DIM], float sums[GROUP][WIDTH]) {
#pragma unroll
    for (int g = 0; g < GROUP; g++) {
#pragma unroll
        for (int i = 0; i < WIDTH; i++) {
            int piece = threadIdx.x % LANES + i / VECTOR * LANES;
#pragma unroll
            for (int offset = LANES; offset < WARP; offset *= 2)
                sums[g][i] += __shfl_xor_sync(ALL_LANES, sums[g][i], offset);
            if (threadIdx.x % WARP < LANES && piece < VALUE_PIECES)
                to[threadIdx.x / WARP][g][piece * VECTOR + i % VECTOR] = sums[g][i];
        }
    }
}

// All of one split: partial[g] = weighted values, maximum, sum of weights; or, where `partial` is null because there is
// no other split, `out`.
__device__ __forceinline__ void attend_split(Shared& shared, Staged& staged, storage_t* out, float* partial,
                                             int head_stride, const float query[GROUP][WIDTH],
                                             const float slopes[GROUP], const float sinks[GROUP],
                                             const DistanceBias& bias, const storage_t* keys,
                                             const storage_t* values, const Split& split, int S, float cap) {
    constexpr int STEP = ROWS * BATCH;  // all of SPLIT, but for wide heads
    long long places[BATCH];
    split.find(places, 0);
    split.copy<PIECES>(staged.keys, keys, places, 0);
    split.copy<VALUE_PIECES>(staged.values, values, places, 0);  // under way while the scores are taken
    cp_async_wait<1>();
    score_keys(shared, staged.keys, query, slopes, bias, 0, split, S);
    for (int base = STEP; STEP < SPLIT && base < split.count; base += STEP) {
        split.find(places, base);
        split.copy<PIECES>(staged.keys, keys, places, base);
        cp_async_wait<0>();
        score_keys(shared, staged.keys, query, slopes, bias, base, split, S);
    }
    __syncthreads();
    weigh_scores(shared, partial, head_stride, split.count, cap, sinks);
    cp_async_wait<0>();
    __syncthreads();
    float sums[GROUP][WIDTH] = {};
    add_values(sums, shared, staged.values, 0, split.count);
    for (int base = STEP; STEP < SPLIT && base < split.count; base += STEP) {
        split.find(places, base);
        split.copy<VALUE_PIECES>(staged.values, values, places, base);
        cp_async_wait<0>();
        add_values(sums, shared, staged.values, base, split.count);
    }
    share_sums(staged.sums, sums);
    __syncthreads();
    for (int i = threadIdx.x; i < GROUP * VALUE_DIM; i += THREADS) {
        float sum = 0.0f;
#pragma unroll
        for (int warp = 0; warp < WARPS; warp++) sum += staged.sums[warp][i / VALUE_DIM][i % VALUE_DIM];
        if (partial != nullptr)
            partial[i / VALUE_DIM * head_stride + i % VALUE_DIM] = sum;
        else
            out[i] = from_float(sum / shared.totals[i / VALUE_DIM]);
    }
}

// Partial results of one head to the result: each split weighs as much as its share of the log-sum-exp, in which a sink
// counts too.
__device__ __forceinline__ void merge_splits(storage_t* out, const float* partials, int head_stride, int splits,
                                             const float sinks[GROUP]) {
    for (int i = threadIdx.x; i < GROUP * VALUE_DIM; i += THREADS) {
        const float* partial = partials + i / VALUE_DIM * head_stride;
        float maximum = SUNK ? sinks[i / VALUE_DIM] : minus_infinity(), total = 0.0f, sum = 0.0f;
        for (int split = 0; split < splits; split++) maximum = fmaxf(maximum, partial[split * PARTIAL + VALUE_DIM]);
        for (int split = 0; split < splits; split++) {
            float share = exp2f(partial[split * PARTIAL + VALUE_DIM] - maximum);
            total += share * partial[split * PARTIAL + VALUE_DIM + 1];
            sum += share * partial[split * PARTIAL + i % VALUE_DIM];
        }
        if (SUNK) total += exp2f(sinks[i / VALUE_DIM] - maximum);
        out[i] = from_float(sum / total);
    }
}

// q: [N, H, D], out: [N, H, V], rows q_stride and out_stride apart. keys, values: [pages, K, P, D], or V numbers of each
// row of the keys. context_lens: [N].
// block_table: [N, table_width]. partials: [N, H, max_splits, V + 2]. arrived: [N, H / GROUP], zeros before and after.
// slopes, sinks: [H], or null where there are none; bias: [H, 2 most + 1], likewise. The block `at` of the grid `blocks`.
__device__ __forceinline__ void attend_block(
    Shared& shared, Staged& staged, dim3 at, dim3 blocks, storage_t* out, float* partials, int* arrived,
    const storage_t* q, const storage_t* keys, const storage_t* values, const int* context_lens, const int* block_table,
    const float* slopes, const float* sinks, const float* bias, int H, int K, int pages, int table_width, int max_splits,
    int q_stride, int out_stride, int window, int most, float scale, float cap) {
    int n = at.z, first_head = at.y * GROUP;
    Piece queries[GROUP];  // under way while the length is read, and the pages
#pragma unroll
    for (int g = 0; g < GROUP; g++) queries[g].load(q + (long long)n * q_stride + (first_head + g) * HEAD_DIM);
    int S = context_lens[n], begin = first_seen(S - 1, window), splits = (S - begin + SPLIT - 1) / SPLIT;
    storage_t* result = out + (long long)n * out_stride + first_head * VALUE_DIM;
    if (S == 0 && at.x == 0)
        for (int i = threadIdx.x; i < GROUP * VALUE_DIM; i += THREADS) result[i] = from_float(0.0f);
    if (at.x >= splits) return;

    float query[GROUP][WIDTH], scaled_slopes[GROUP], scaled_sinks[GROUP];
#pragma unroll
    for (int g = 0; g < GROUP; g++) {
        scaled_slopes[g] = BIASED ? slopes[first_head + g] * LOG2_E : 0.0f;
        scaled_sinks[g] = SUNK ? sinks[first_head + g] * LOG2_E : 0.0f;
#pragma unroll
        for (int i = 0; i < WIDTH; i++) query[g][i] = queries[g][i] * (scale * LOG2_E);
    }
    int head_stride = max_splits * PARTIAL;
    partials += ((long long)n * H + first_head) * head_stride;
    Split split{block_table + (long long)n * table_width, 0, 0, first_head / (H / K), K, pages};
    DistanceBias distances{BY_DISTANCE ? bias + (long long)first_head * (2 * most + 1) + most : nullptr, most};
    bool alone = splits == 1;  // nothing to merge, and nobody to wait for
    for (int i = at.x; i < splits; i += blocks.x) {
        split.first = begin + i * SPLIT;
        split.count = min(SPLIT, S - split.first);
        float* partial = alone ? nullptr : partials + i * PARTIAL;
        if (i != at.x) __syncthreads();  // the sums of the split before are read, where keys are to lie
        attend_split(shared, staged, result, partial, head_stride, query, scaled_slopes, scaled_sinks, distances,
                     keys, values, split, S, cap * LOG2_E);
    }
    if (!alone && arrives_last(arrived + n * blocks.y + at.y, min((int)blocks.x, splits)))
        merge_splits(result, partials, head_stride, splits, scaled_sinks);
}

#ifndef DECODE_STEP  // step.cu takes what is above

extern "C" __global__ __launch_bounds__(THREADS, RESIDENT) void attention_decode(
    storage_t* out, float* partials, int* arrived, const storage_t* q, const storage_t* keys, const storage_t* values,
    const int* context_lens, const int* block_table, const float* slopes, const float* sinks, const float* bias,
    int H, int K, int pages, int table_width, int max_splits, int q_stride, int out_stride, int window, int most,
    float scale, float cap) {
    __shared__ Shared shared;
    extern __shared__ __align__(16) unsigned char dynamic_shared[];
    follow();
    attend_block(shared, *reinterpret_cast<Staged*>(dynamic_shared), blockIdx, gridDim, out, partials, arrived, q, keys,
                 values, context_lens, block_table, slopes, sinks, bias, H, K, pages, table_width, max_splits, q_stride,
                 out_stride, window, most, scale, cap);
}

#endif
