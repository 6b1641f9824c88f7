// Attention of one query per sequence over its paged keys and values: flash-decoding (Dao, Haziza, Massa, Sizov 2023).
//
// For each sequence n and head h, with k = h // G, G = H / K, and S = context_lens[n] positions:
//
//   out[n, h] = softmax(keys[n, :S, k] @ q[n, h] * scale) @ values[n, :S, k]          zeros where S = 0
//
// With WINDOWED only the last `window` of the S positions count, and nothing before them is read; with BIASED the score
// of position s loses slopes[h] * (S - 1 - s). Other builds have no code for either.
//
// A context, or its window, is cut into splits of SPLIT positions. A block computes GROUP heads that share one K/V head
// over one split (so K and V are read once for all of them) and leaves the maximum, the sum of weights and the weighted
// values. The block that comes last merges all splits of its sequence in their order. What a split holds depends on
// nothing but its sequence, so the result has the same bits in any batch and under any grid.
//
// Grid (splits, H / GROUP, N), block 128. Blocks beyond a sequence's end leave at once, and a block takes every
// gridDim.x-th split: a grid made for a bucket of sequences stays right while they grow, as a captured graph needs.
//
// Why SPLIT = 128: the merge writes and reads 2 * 4 G (D + 2) bytes a split and K/V head, the split itself 2 b SPLIT D:
// in 16 bits 2 % for G = 1 and 13 % for G = 8. Half as long would double that; twice as long would leave
// OPT-125m (12 heads) at context 1,000 with 48 blocks for 132 multiprocessors.
//
// Bytes: 2 b K D min(S, window) per sequence (b bytes a number), each once; all else is small. In 16 bits at 4.3 TB/s:
// OPT-6.7B at S = 2,000 33 MB a layer, a floor of 7.6 us; Mistral 7B (K = 8, a window of 4,096) 17 MB and 3.9 us at any
// S above that.
//
// Versions, none measured on a GPU yet:
//   1. one block per head and sequence: batch 1 of OPT-125m runs on 12 of 132 multiprocessors
//   2. splits, merged by a second kernel: one launch more a layer, about 1.3 us inside a graph
//   3. this one: the last block merges. For G >= 8 tensor cores are expected to win: the additions and shuffles of a
//      row take about as long as its bytes.
#include "paged.cuh"
#include "mask.cuh"

constexpr int THREADS = 128;
constexpr int WARPS = THREADS / WARP;

static_assert(HEAD_DIM % VECTOR == 0, "a row must be a whole number of 16-byte pieces");

__host__ __device__ constexpr int lanes_of_a_row(int pieces) {
    int lanes = 1;
    while (lanes < pieces && lanes < WARP) lanes *= 2;
    return lanes;
}

__host__ __device__ constexpr int min_of(int a, int b) { return a < b ? a : b; }

constexpr int PIECES = HEAD_DIM / VECTOR;            // 16-byte pieces of a row
constexpr int LANES = lanes_of_a_row(PIECES);        // lanes that share a row
constexpr int TURNS = (PIECES + LANES - 1) / LANES;  // pieces of one lane
constexpr int WIDTH = TURNS * VECTOR;                // numbers of a row in one lane
constexpr int ROWS = THREADS / LANES;                // rows that the block reads at once
constexpr int BATCH = min_of(SPLIT / ROWS, 4 / TURNS);  // rows under way in each thread

static_assert(BATCH > 0 && SPLIT % (ROWS * BATCH) == 0, "a split must be a whole number of batches");

constexpr int PARTIAL = HEAD_DIM + 2;  // weighted values, maximum, sum of weights

struct Shared {
    float weights[GROUP][SPLIT];         // scores first
    float sums[WARPS][GROUP][HEAD_DIM];  // each warp's share of the weighted values
    bool last;
};

// A lane's part of a row as it lies in memory; zeros past the row's end.
struct Piece {
    uint4 raw[TURNS];

    __device__ __forceinline__ void load(const storage_t* row, bool valid) {
#pragma unroll
        for (int i = 0; i < TURNS; i++) {
            int piece = threadIdx.x % LANES + i * LANES;
            bool inside = valid && piece < PIECES;
            raw[i] = inside ? reinterpret_cast<const uint4*>(row)[piece] : make_uint4(0, 0, 0, 0);
        }
    }

    __device__ __forceinline__ float operator[](int i) const {
        return to_float(reinterpret_cast<const storage_t*>(raw)[i]);
    }
};

// One split of one sequence and K/V head: `count` positions from `first`.
struct Split {
    const int* block_row;
    int first, count, head, K, pages;

    // The part of rows base + this thread's row, + ROWS, ...: BATCH loads under way at once hide the memory's latency.
    __device__ __forceinline__ void load(Piece pieces[BATCH], const storage_t* cache, int base) const {
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
            int row = base + b * ROWS + threadIdx.x / LANES;
            bool valid = row < count;
            pieces[b].load(valid ? cache + cache_row(block_row, first + row, head, K, pages) : cache, valid);
        }
    }
};

// weights[g][row] = q[g] . keys[row]; `query` and `slopes` are scaled. S: of the sequence.
__device__ __forceinline__ void score_keys(Shared& shared, const float query[GROUP][WIDTH], const float slopes[GROUP],
                                           const storage_t* keys, const Split& split, int S) {
    for (int base = 0; base < split.count; base += ROWS * BATCH) {
        Piece pieces[BATCH];
        split.load(pieces, keys, base);
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
#pragma unroll
            for (int g = 0; g < GROUP; g++) {
                float score = 0.0f;
#pragma unroll
                for (int i = 0; i < WIDTH; i++) score += query[g][i] * pieces[b][i];
                score = neighbours_sum<LANES>(score);
                int row = base + b * ROWS + threadIdx.x / LANES;
                if (BIASED) score -= slopes[g] * (S - 1 - split.first - row);
                if (threadIdx.x % LANES == 0) shared.weights[g][row] = score;
            }
        }
    }
}

// Scores to weights; their maximum and sum go to the partial result. A warp takes every WARPS-th head.
__device__ __forceinline__ void weigh_scores(Shared& shared, float* partial, int head_stride, int count) {
    int lane = threadIdx.x % WARP;
    for (int g = threadIdx.x / WARP; g < GROUP; g += WARPS) {
        float maximum = minus_infinity(), total = 0.0f;
        for (int row = lane; row < count; row += WARP) maximum = fmaxf(maximum, shared.weights[g][row]);
        maximum = warp_max(maximum);
        for (int row = lane; row < count; row += WARP) {
            float weight = exp2f(shared.weights[g][row] - maximum);
            shared.weights[g][row] = weight;
            total += weight;
        }
        total = warp_sum(total);
        if (lane == 0) {
            partial[g * head_stride + HEAD_DIM] = maximum;
            partial[g * head_stride + HEAD_DIM + 1] = total;
        }
    }
}

// sums[warp][g] = the sum over the warp's rows of weights[g][row] * values[row]
__device__ __forceinline__ void sum_values(Shared& shared, const storage_t* values, const Split& split) {
    float sums[GROUP][WIDTH] = {};
    for (int base = 0; base < split.count; base += ROWS * BATCH) {
        Piece pieces[BATCH];
        split.load(pieces, values, base);
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
            int row = base + b * ROWS + threadIdx.x / LANES;
#pragma unroll
            for (int g = 0; g < GROUP; g++) {
                float weight = row < split.count ? shared.weights[g][row] : 0.0f;
#pragma unroll
                for (int i = 0; i < WIDTH; i++) sums[g][i] += weight * pieces[b][i];
            }
        }
    }
#pragma unroll
    for (int g = 0; g < GROUP; g++) {
#pragma unroll
        for (int i = 0; i < WIDTH; i++) {
            int piece = threadIdx.x % LANES + i / VECTOR * LANES;
#pragma unroll
            for (int offset = LANES; offset < WARP; offset *= 2)
                sums[g][i] += __shfl_xor_sync(ALL_LANES, sums[g][i], offset);
            if (threadIdx.x % WARP < LANES && piece < PIECES)
                shared.sums[threadIdx.x / WARP][g][piece * VECTOR + i % VECTOR] = sums[g][i];
        }
    }
}

// All of one split: partial[g] = weighted values, maximum, sum of weights.
__device__ __forceinline__ void attend_split(Shared& shared, float* partial, int head_stride,
                                             const float query[GROUP][WIDTH], const float slopes[GROUP],
                                             const storage_t* keys, const storage_t* values, const Split& split,
                                             int S) {
    score_keys(shared, query, slopes, keys, split, S);
    __syncthreads();
    weigh_scores(shared, partial, head_stride, split.count);
    __syncthreads();
    sum_values(shared, values, split);
    __syncthreads();
    for (int i = threadIdx.x; i < GROUP * HEAD_DIM; i += THREADS) {
        float sum = 0.0f;
#pragma unroll
        for (int warp = 0; warp < WARPS; warp++) sum += shared.sums[warp][i / HEAD_DIM][i % HEAD_DIM];
        partial[i / HEAD_DIM * head_stride + i % HEAD_DIM] = sum;
    }
}

// Whether this block is the last of `blocks` to get here; then it sees all that the others wrote.
__device__ __forceinline__ bool arrives_last(Shared& shared, int* arrived, int blocks) {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        shared.last = atomicAdd(arrived, 1) == blocks - 1;
        if (shared.last) *arrived = 0;  // as the next launch wants it
    }
    __syncthreads();
    __threadfence();
    return shared.last;
}

// Partial results of one head to the result: each split weighs as much as its share of the log-sum-exp.
__device__ __forceinline__ void merge_splits(storage_t* out, const float* partials, int head_stride, int splits) {
    for (int i = threadIdx.x; i < GROUP * HEAD_DIM; i += THREADS) {
        const float* partial = partials + i / HEAD_DIM * head_stride;
        float maximum = minus_infinity(), total = 0.0f, sum = 0.0f;
        for (int split = 0; split < splits; split++) maximum = fmaxf(maximum, partial[split * PARTIAL + HEAD_DIM]);
        for (int split = 0; split < splits; split++) {
            float share = exp2f(partial[split * PARTIAL + HEAD_DIM] - maximum);
            total += share * partial[split * PARTIAL + HEAD_DIM + 1];
            sum += share * partial[split * PARTIAL + i % HEAD_DIM];
        }
        out[i] = from_float(sum / total);
    }
}

// q, out: [N, H, D], rows q_stride and out_stride apart. keys, values: [pages, K, P, D]. context_lens: [N].
// block_table: [N, table_width]. partials: [N, H, max_splits, D + 2]. arrived: [N, H / GROUP], zeros before and after.
// slopes: [H], or null where nothing is biased.
extern "C" __global__ __launch_bounds__(THREADS) void attention_decode(
    storage_t* out, float* partials, int* arrived, const storage_t* q, const storage_t* keys, const storage_t* values,
    const int* context_lens, const int* block_table, const float* slopes, int H, int K, int pages, int table_width,
    int max_splits, int q_stride, int out_stride, int window, float scale) {
    __shared__ Shared shared;
    int n = blockIdx.z, first_head = blockIdx.y * GROUP;
    int S = context_lens[n], begin = first_seen(S - 1, window), splits = (S - begin + SPLIT - 1) / SPLIT;
    storage_t* result = out + (long long)n * out_stride + first_head * HEAD_DIM;
    if (S == 0 && blockIdx.x == 0)
        for (int i = threadIdx.x; i < GROUP * HEAD_DIM; i += THREADS) result[i] = from_float(0.0f);
    if (blockIdx.x >= splits) return;

    float query[GROUP][WIDTH], scaled_slopes[GROUP];
#pragma unroll
    for (int g = 0; g < GROUP; g++) {
        scaled_slopes[g] = BIASED ? slopes[first_head + g] * LOG2_E : 0.0f;
        Piece piece;
        piece.load(q + (long long)n * q_stride + (first_head + g) * HEAD_DIM, true);
#pragma unroll
        for (int i = 0; i < WIDTH; i++) query[g][i] = piece[i] * (scale * LOG2_E);
    }
    int head_stride = max_splits * PARTIAL;
    partials += ((long long)n * H + first_head) * head_stride;
    Split split{block_table + (long long)n * table_width, 0, 0, first_head / (H / K), K, pages};
    for (int i = blockIdx.x; i < splits; i += gridDim.x) {
        split.first = begin + i * SPLIT;
        split.count = min(SPLIT, S - split.first);
        attend_split(shared, partials + i * PARTIAL, head_stride, query, scaled_slopes, keys, values, split, S);
    }
    if (arrives_last(shared, arrived + n * gridDim.y + blockIdx.y, min((int)gridDim.x, splits)))
        merge_splits(result, partials, head_stride, splits);
}
