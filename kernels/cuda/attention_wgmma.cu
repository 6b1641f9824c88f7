// Causal attention of many queries on Hopper's tensor cores: FlashAttention-3 (Shah et al., arXiv 2407.08608), without
// its TMA and producer warps.
//
// As attention_prefill.cu, whose numbering of tiles it has, for 16-bit storage, heads of 64, 128 or 256 numbers and values
// as wide as keys, on sm_90a alone; with windows, slopes, caps and sinks, but no trees, biases by distance or keys after
// a query. For query number i of count of a sequence, at position p = S - count + i, and head h:
//
//   out[start + i, h] = softmax(keys[: p + 1, k] @ q[start + i, h] * scale) @ values[: p + 1, k]         k = h // G
//
// attention_prefill stays for other GPUs, other heads and few queries, and is what this one is held against.
//
// Grid (T / 128 + N, H), block 256: two warpgroups, each with 64 of 128 queries of one head. Queries, keys and values lie
// in shared memory swizzled, so that wgmma reads them by itself: scores are products of queries and keys; the weights go
// from registers into the product with the values, which are rows of keys and so transposed on the way. Dynamic shared
// memory: the queries, two tiles of KEYS keys and two of values: 2 D (128 + 4 KEYS) bytes, 80 kB for D = 64 (KEYS = 128),
// 160 for 128 (128) and 192 for 256 (64).
//
// A tile's keys are multiplied while the weights of the tile before are with its values, and their softmax runs beside
// the latter product. Copies of the next keys and the next values have the time of one tile.
//
// FLOPs: 4 D per query, head and key seen. Bytes: as attention_prefill, with half the reads of K and V. The floor is the
// arithmetic: OPT-6.7B, one prompt of 2,000 tokens, 33 GFLOP a layer, 43 us at the 770 TFLOP/s of a large product. Keys
// and values are read from shared memory once for 64 queries by wgmma, not for 16 by warps, so the ceiling of
// attention_prefill, half of the tensor cores' rate, is gone.
//
// Versions:
//   1. this one. Not measured. Expected by counting, D = 128: of 128 queries and 128 keys the tensor cores need 2,048
//      clocks, copies, powers and sums about 2,000 beside them: 400 TFLOP/s of a long prompt (attention_mma: 170;
//      FlashAttention-3: 521 at 2,000 tokens).
// Expected next: TMA and a warp that issues it; the two warpgroups in turns, one at its softmax while the other multiplies.
#include "mask.cuh"
#include "paged.cuh"
#include "wgmma.cuh"

static_assert(HEAD_DIM == 64 || HEAD_DIM == 128 || HEAD_DIM == 256, "a product's columns");
static_assert(KEYS == 64 || KEYS == 128, "a product's columns");
static_assert(!TREED && !BIDIRECTIONAL && !BY_DISTANCE, "left to attention_prefill");

constexpr int QUERIES = 128;
constexpr int GROUP_QUERIES = 64;  // of a warpgroup
constexpr int THREADS = 2 * 4 * WARP;
constexpr int WIDTH = 64;                   // numbers of a row in shared memory: 128 bytes, the width of the swizzle
constexpr int PER_ROW = WIDTH / VECTOR;     // 16-byte pieces of it
constexpr int PIECES = HEAD_DIM / VECTOR;   // of a head
constexpr int TILE = KEYS * PIECES;         // pieces
constexpr int KEY_BLOCK = KEYS * PER_ROW, QUERY_BLOCK = QUERIES * PER_ROW;  // pieces of WIDTH columns of a tile

// Where piece c of row r lies in a tile of SIZE rows: blocks of WIDTH columns, one after the other.
template <int SIZE>
__device__ __forceinline__ int place(int r, int c) {
    return c / PER_ROW * (SIZE * PER_ROW) + r * PER_ROW + (c % PER_ROW ^ r % 8);
}

// Begin to copy rows of positions first_key ... into shared memory; zeros from `stop` on.
__device__ __forceinline__ void begin_tile(uint4* tile, const storage_t* rows, const int* block_row, int first_key,
                                           int stop, int head, int K, int pages) {
#pragma unroll
    for (int e = 0; e < TILE / THREADS; e++) {
        int i = e * THREADS + threadIdx.x, row = i / PIECES, c = i % PIECES, position = first_key + row;
        bool valid = position < stop;
        long long from = valid ? cache_row(block_row, position, head, K, pages) + c * VECTOR : 0;
        cp_async_16(tile + place<KEYS>(row, c), rows + from, valid);
    }
}

// Queries [rows, D], q_stride apart, to shared memory; zeros beyond them. Four bytes at a time: more may not be aligned.
__device__ __forceinline__ void copy_queries(uint4* tile, const storage_t* q, int q_stride, int rows) {
    for (int i = threadIdx.x; i < QUERIES * PIECES; i += THREADS) {
        int row = i / PIECES, c = i % PIECES;
        const unsigned* from = reinterpret_cast<const unsigned*>(q + (long long)row * q_stride + c * VECTOR);
        bool inside = row < rows;
        tile[place<QUERIES>(row, c)] = inside ? make_uint4(from[0], from[1], from[2], from[3]) : make_uint4(0, 0, 0, 0);
    }
}

// 64 queries of a warpgroup. A lane holds of every result and score the rows g and g + 8 of its warp's 16 and the columns
// 2t, 2t + 1 of each 8 (see wgmma_64xNx16).
struct Queries {
    float result[HEAD_DIM / 2] = {};  // not yet divided by the sum of weights
    unsigned weights[KEYS / 16][4];   // of one tile, as a left operand
    RunningSoftmax softmax[2];        // of rows g and g + 8

    // The first row of this lane among the block's; the other is 8 below.
    __device__ __forceinline__ static int row() { return threadIdx.x / WARP * 16 + threadIdx.x % WARP / 4; }

    // Begin each query with its head's sink, a raw score.
    __device__ __forceinline__ void sink(float score) {
#pragma unroll
        for (int half = 0; half < 2; half++) softmax[half].begin(score, threadIdx.x % 4 == 0);
    }

    // Issue scores += queries keys^T.
    __device__ __forceinline__ static void score_keys(float (&scores)[KEYS / 2], const uint4* queries, const uint4* keys) {
        const uint4* own = queries + threadIdx.x / (4 * WARP) * GROUP_QUERIES * PER_ROW;
#pragma unroll
        for (int c = 0; c < PIECES; c += 2) {
            const uint4* left = own + c / PER_ROW * QUERY_BLOCK + c % PER_ROW;
            const uint4* right = keys + c / PER_ROW * KEY_BLOCK + c % PER_ROW;
            wgmma_64xNx16<KEYS>(scores, swizzled_tile(left), swizzled_tile(right));
        }
        wgmma_commit();
    }

    // Issue result += weights values.
    __device__ __forceinline__ void add_values(const uint4* values) {
#pragma unroll
        for (int step = 0; step < KEYS / 16; step++) {
            unsigned long long right = transposed_tile(values + step * 16 * PER_ROW, KEY_BLOCK * 16);
            wgmma_64xNx16<HEAD_DIM>(result, weights[step], right);
        }
        wgmma_commit();
    }

    // Scores as they count, at keys first_key ...; position: of the block's first query.
    __device__ __forceinline__ static void mask_scores(float (&scores)[KEYS / 2], int first_key, int position,
                                                       const Mask& mask) {
        int first = position + threadIdx.x / WARP * 16;
        if (!(BIASED || CAPPED) && mask.all_visible(first, first + 15, first_key, first_key + KEYS - 1)) return;
#pragma unroll
        for (int i = 0; i < KEYS / 2; i++) {
            int key = first_key + i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
            scores[i] = mask.masked(scores[i], key, position + row() + i / 2 % 2 * 8);
        }
    }

    // Scores to weights; `shrink` is what sums so far are to be multiplied by.
    __device__ __forceinline__ void weigh(float (&scores)[KEYS / 2], float (&shrink)[2], float scale) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float maximum = minus_infinity();
#pragma unroll
            for (int j = half * 2; j < KEYS / 2; j += 4) maximum = fmaxf(maximum, fmaxf(scores[j], scores[j + 1]));
            shrink[half] = softmax[half].raise(neighbours_max<4>(maximum), scale);
#pragma unroll
            for (int j = half * 2; j < KEYS / 2; j += 4) {
                scores[j] = softmax[half].weigh(scores[j], scale);
                scores[j + 1] = softmax[half].weigh(scores[j + 1], scale);
            }
        }
    }

    // Weights as the next product's left operand.
    __device__ __forceinline__ void keep(const float (&scores)[KEYS / 2]) {
#pragma unroll
        for (int i = 0; i < KEYS / 4; i++) weights[i / 4][i % 4] = pack(scores[2 * i], scores[2 * i + 1]);
    }

    // out: [rows, D], out_stride apart
    __device__ __forceinline__ void store(storage_t* out, int out_stride, int rows) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float share = 1.0f / neighbours_sum<4>(softmax[half].total);
            int r = row() + half * 8;
            if (r >= rows) continue;
#pragma unroll
            for (int j = 0; j < HEAD_DIM / 8; j++) {
                storage_t* to = out + (long long)r * out_stride + j * 8 + threadIdx.x % 4 * 2;
                *reinterpret_cast<unsigned*>(to) = pack(result[4 * j + 2 * half] * share, result[4 * j + 2 * half + 1] * share);
            }
        }
    }
};

// All that was copied is there for wgmma, and nobody reads any more what he has waited for.
__device__ __forceinline__ void meet_copies() {
    cp_async_wait<0>();
    fence_proxy_async();
    __syncthreads();
    wgmma_fence();
}

extern "C" __global__ __launch_bounds__(THREADS, 1) void attention_wgmma(
    storage_t* out, const storage_t* q, const storage_t* keys, const storage_t* values, const int* query_starts,
    const int* context_lens, const int* block_table, const float* slopes, const float* sinks, int N, int H, int K,
    int pages, int table_width, int q_stride, int out_stride, int window, float scale, float cap) {
    extern __shared__ __align__(1024) unsigned char dynamic_shared[];
    uint4* queries = reinterpret_cast<uint4*>(dynamic_shared);  // [D / 64][QUERIES][PER_ROW]
    uint4* key_tiles = queries + QUERIES * PIECES;              // [2][D / 64][KEYS][PER_ROW]
    uint4* value_tiles = key_tiles + 2 * TILE;                  // likewise

    int tile = gridDim.x - 1 - blockIdx.x;
    int n = sequence_of_tile<QUERIES>(query_starts, N, tile);
    int start = query_starts[n], count = query_starts[n + 1] - start;
    int first = (tile - (start / QUERIES + n)) * QUERIES;  // of this block's queries in the sequence
    if (first >= count) return;
    int rows = min(QUERIES, count - first), head = blockIdx.y;
    int position = context_lens[n] - count + first;  // of the first query
    int stop = position + rows;                      // no query here sees a key from there on
    out += (long long)(start + first) * out_stride + head * HEAD_DIM;
    if (context_lens[n] == 0) {
        for (int i = threadIdx.x; i < rows * HEAD_DIM; i += THREADS)
            out[(long long)(i / HEAD_DIM) * out_stride + i % HEAD_DIM] = from_float(0.0f);
        return;
    }

    const int* block_row = block_table + (long long)n * table_width;
    int kv_head = head / (H / K), begin = first_seen(position, window) / KEYS * KEYS, tiles = (stop - begin + KEYS - 1) / KEYS;
    auto begin_keys = [&](int i) {
        begin_tile(key_tiles + i % 2 * TILE, keys, block_row, begin + i * KEYS, stop, kv_head, K, pages);
    };
    auto begin_values = [&](int i) {
        begin_tile(value_tiles + i % 2 * TILE, values, block_row, begin + i * KEYS, stop, kv_head, K, pages);
    };
    Mask mask{window, context_lens[n], BIASED ? slopes[head] / scale : 0.0f, cap / scale};
    Queries own;
    if (SUNK) own.sink(sinks[head] / scale);
    scale *= LOG2_E;
    float scores[KEYS / 2], shrink[2];

    begin_keys(0);
    cp_async_commit();
    copy_queries(queries, q + (long long)(start + first) * q_stride + head * HEAD_DIM, q_stride, rows);
#pragma unroll
    for (int i = 0; i < KEYS / 2; i++) scores[i] = 0.0f;
    wgmma_hold(scores);
    meet_copies();
    own.score_keys(scores, queries, key_tiles);
    begin_values(0);
    if (tiles > 1) begin_keys(1);
    cp_async_commit();
    wgmma_wait<0>();
    wgmma_hold(scores);
    own.mask_scores(scores, begin, position, mask);
    own.weigh(scores, shrink, scale);
    own.keep(scores);
    wgmma_hold(own.weights);

    for (int i = 1; i < tiles; i++) {
#pragma unroll
        for (int j = 0; j < KEYS / 2; j++) scores[j] = 0.0f;
        wgmma_hold(scores);
        meet_copies();
        own.score_keys(scores, queries, key_tiles + i % 2 * TILE);
        own.add_values(value_tiles + (i - 1) % 2 * TILE);
        begin_values(i);
        if (i + 1 < tiles) begin_keys(i + 1);
        cp_async_commit();
        wgmma_wait<1>();  // for the scores; the products with values go on
        wgmma_hold(scores);
        own.mask_scores(scores, begin + i * KEYS, position, mask);
        own.weigh(scores, shrink, scale);
        wgmma_wait<0>();
        wgmma_hold(own.result);
#pragma unroll
        for (int j = 0; j < HEAD_DIM / 2; j++) own.result[j] *= shrink[j / 2 % 2];
        own.keep(scores);
        wgmma_hold(own.result);
        wgmma_hold(own.weights);
    }
    meet_copies();
    own.add_values(value_tiles + (tiles - 1) % 2 * TILE);
    wgmma_wait<0>();
    wgmma_hold(own.result);
    own.store(out, out_stride, rows);
}
