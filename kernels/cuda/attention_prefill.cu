// Attention of many queries in one pass over paged keys and values: FlashAttention-2 (Dao, arXiv 2307.08691).
//
// Sequence n owns the rows query_starts[n] : query_starts[n + 1] of q; they are the last of its S = context_lens[n]
// positions, whose keys and values are in the cache already. So a prompt, a chunk of one, a decoding sequence and any
// mixture of them are the same to it. For its query number i of count, at position p = S - count + i, and head h:
//
//   out[start + i, h] = softmax(keys[: p + 1, k] @ q[start + i, h] * scale) @ values[: p + 1, k]         k = h // G
//
// With WINDOWED a query sees only the last `window` of those positions, and tiles that lie before the windows of all of
// a block's queries are not read; with CAPPED a score s is cap tanh(s / cap); with BIASED the score of position s loses
// slopes[h] * (p - s); with SUNK the softmax has one more score, sinks[h], whose weight is dropped. With TREED the last
// tree_sizes[n] tokens of a sequence are a tree of guesses, which speculation verifies in one pass: such a query sees,
// of those, the ones whose bit is set in its row of tree_seen, and positions are those of `positions`, by depth. A score
// of a tile that the tree is in costs a load of 4 bytes (L1) more. With BY_DISTANCE the score of position s gains
// bias[h, M + d] of the distance d = s - p, at most M. With BIDIRECTIONAL a query sees all keys of the context, as in an
// encoder or from a decoder to its source, or those nearer than the window on either side; p is then in `positions`, as
// rows need not be the context's last. Other builds have no code for any of them.
//
// Values may be VALUE_DIM numbers of the keys' rows, of latent attention, where `values` points into the first row. COLUMNS
// of them are a block's: with 512 a thread could not hold its results, so the blocks of a head divide them, and each
// computes the scores. That has run on the emulator alone.
//
// A sequence without a context (padding) gets zeros; rows past query_starts[N] are left alone.
//
// Grid (T / QUERIES + N, H, VALUE_DIM / COLUMNS), block 2 QUERIES threads (16-bit) or 128. A block takes QUERIES queries of one head; a warp
// owns some of them alone, with their softmax and results in registers, and walks over tiles of KEYS keys and values
// that cp.async brings from their pages into shared memory, one tile ahead of the arithmetic. The grid is a bound that
// needs no look at the device: sequence n's tiles are numbered from query_starts[n] / QUERIES + n on, which leaves room
// for a ragged last tile of each; blocks without queries leave. Late tiles, which see most keys, start first.
//
// FLOPs: 4 D per query, head and key seen. Bytes: each block reads K and V of all it sees, 2 b D per key (b bytes a
// number), once for QUERIES queries; blocks that share a head find them in the L2 cache mostly. The floor is the
// arithmetic: OPT-6.7B, one prompt of 2,000 tokens, 33 GFLOP a layer, 43 us at the 770 TFLOP/s of a large product.
// Shared memory sets a lower ceiling: for each key a warp of 16 queries reads 4 D bytes for 64 D FLOP, which at 128
// bytes a clock is 2,048 FLOP a clock, about half of the tensor cores' rate.
//
// Versions:
//   1. attention_fma.cuh: the same walk with FMAs. It is what float32 storage runs.
//   2. attention_mma.cuh: tensor cores; the weights go from one product to the next in registers.
//   3. the same, with RESIDENT blocks of 4 warps to a multiprocessor: 12 of them at D = 128, 16 at D = 64, in place of 8.
//      On an H100 a prompt of 2,000 tokens at 162 TFLOP/s (D = 64, 101 us) and 169 (D = 128, 194 us). Expected next: 32
//      queries a warp, which halves what is read from shared memory.
#include "paged.cuh"
#include "tensor_core.cuh"

#ifndef COLUMNS
#define COLUMNS VALUE_DIM
#endif

#if MINILLM_STORAGE == 32
#include "attention_fma.cuh"
#else
#include "attention_mma.cuh"
#endif

// Blocks that are to fit on a multiprocessor: as many as registers allow without a spill, so that more warps hide each
// other's waiting. 0 leaves it to the compiler: builds that would spill or fit anyway, and sm_120 with its shared memory.
// With a cap or trees it is 1: left to itself the compiler saves registers until a number spills, and a pass with trees
// has few blocks.
#if CAPPED || TREED
constexpr int RESIDENT = 1;
#elif MINILLM_STORAGE == 32 || BIASED || BY_DISTANCE || BIDIRECTIONAL || (defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200)
constexpr int RESIDENT = 0;
#else
constexpr int RESIDENT = HEAD_DIM <= 64 ? 4 : 96 < HEAD_DIM && HEAD_DIM <= 128 ? 3 : 0;
#endif

// Begin to copy rows of positions first_key ... into shared memory [KEYS, OWN_STRIDE]; zeros from `stop` on and past the
// row's end.
template <int OWN_DIM, int OWN_DEPTH, int OWN_STRIDE>
__device__ __forceinline__ void begin_rows(storage_t* tile, const storage_t* rows, const int* block_row, int first_key,
                                           int stop, int head, int K, int pages) {
    constexpr int PIECES = OWN_DEPTH / VECTOR;
    for (int i = threadIdx.x; i < KEYS * PIECES; i += THREADS) {
        int position = first_key + i / PIECES, column = i % PIECES * VECTOR;
        bool valid = position < stop && column < OWN_DIM;
        long long from = valid ? cache_row(block_row, position, head, K, pages) + column : 0;
        cp_async_16(tile + i / PIECES * OWN_STRIDE + column, rows + from, valid);
    }
}

// Begin to copy the keys and values of positions first_key ... into shared memory [KEYS, STRIDE] each; zeros from
// `stop` on and past the row's end.
__device__ __forceinline__ void begin_tile(storage_t* key_tile, storage_t* value_tile, const storage_t* keys,
                                           const storage_t* values, const int* block_row, int first_key, int stop,
                                           int head, int K, int pages) {
    if (COLUMNS != HEAD_DIM) {
        begin_rows<HEAD_DIM, DEPTH, STRIDE>(key_tile, keys, block_row, first_key, stop, head, K, pages);
        begin_rows<COLUMNS, VALUE_DEPTH, VALUE_STRIDE>(value_tile, values, block_row, first_key, stop, head, K, pages);
        cp_async_commit();
        return;
    }
    constexpr int PIECES = DEPTH / VECTOR;
    for (int i = threadIdx.x; i < KEYS * PIECES; i += THREADS) {
        int position = first_key + i / PIECES, column = i % PIECES * VECTOR;
        bool valid = position < stop && column < HEAD_DIM;
        long long from = valid ? cache_row(block_row, position, head, K, pages) + column : 0;
        int to = i / PIECES * STRIDE + column;
        cp_async_16(key_tile + to, keys + from, valid);
        cp_async_16(value_tile + to, values + from, valid);
    }
    cp_async_commit();
}

// q: [T, H, D], out: [T, H, V], rows q_stride and out_stride apart. keys, values: [pages, K, P, D], or V numbers of each
// row of the keys. query_starts: [N + 1].
// context_lens: [N]. block_table: [N, table_width]. slopes, sinks: [H], or null where there are none. bias:
// [H, 2 most + 1], likewise. positions: [T], or null where only their order counts. tree_seen: [T, tree_words], whose
// rows of no tree are not read, and tree_sizes: [N]; or null without trees.
extern "C" __global__ __launch_bounds__(THREADS, RESIDENT) void attention_prefill(
    storage_t* out, const storage_t* q, const storage_t* keys, const storage_t* values, const int* query_starts,
    const int* context_lens, const int* block_table, const float* slopes, const float* sinks, const float* bias,
    const int* positions, const unsigned* tree_seen, const int* tree_sizes, int N, int H, int K, int pages,
    int table_width, int q_stride, int out_stride, int window, int most, int tree_words, float scale, float cap) {
    extern __shared__ __align__(16) unsigned char dynamic_shared[];
    constexpr int TILE = KEYS * STRIDE, BOTH = TILE + KEYS * VALUE_STRIDE;
    storage_t* tiles = reinterpret_cast<storage_t*>(dynamic_shared);  // [2][keys, values][KEYS, STRIDE]
    int column = blockIdx.z * COLUMNS;
    values += column;

    int tile = gridDim.x - 1 - blockIdx.x;
    int n = sequence_of_tile<QUERIES>(query_starts, N, tile);
    int start = query_starts[n], count = query_starts[n + 1] - start;
    int first = (tile - (start / QUERIES + n)) * QUERIES;  // of this block's queries in the sequence
    if (first >= count) return;
    int rows = min(QUERIES, count - first), head = blockIdx.y;
    // Of the first query; in a tree its number in the context, and where all keys are seen alike, nothing.
    int position = context_lens[n] - count + first;
    if (BIDIRECTIONAL) position = WINDOWED || BIASED || BY_DISTANCE ? positions[start + first] : 0;
    out += (long long)(start + first) * out_stride + head * VALUE_DIM + column;
    if (context_lens[n] == 0) {
        for (int i = threadIdx.x; i < rows * COLUMNS; i += THREADS)
            out[(long long)(i / COLUMNS) * out_stride + i % COLUMNS] = from_float(0.0f);
        return;
    }

    const int* block_row = block_table + (long long)n * table_width;
    int kv_head = head / (H / K);
    Mask mask{window, context_lens[n], BIASED ? slopes[head] / scale : 0.0f, cap / scale};
    if (BY_DISTANCE) {
        mask.bias = DistanceBias{bias + (long long)head * (2 * most + 1) + most, most};
        mask.unscale = 1.0f / scale;
    }
    if (TREED) {
        int size = tree_sizes[n];
        long long row = start + count - size;  // of the tree's first node
        mask.tree = Tree{context_lens[n] - size, context_lens[n], tree_seen + row * tree_words, tree_words, positions + row};
    }
    int stop = mask.after_all(position + rows);  // no query here sees a key from there on
    int begin = first_seen(mask.least_position(position), window) / KEYS * KEYS;
    storage_t* first_tile = tiles + begin / KEYS % 2 * BOTH;
    begin_tile(first_tile, first_tile + TILE, keys, values, block_row, begin, stop, kv_head, K, pages);
    QueryTile queries(q + (long long)(start + first) * q_stride + head * HEAD_DIM, q_stride, rows, tiles + 2 * BOTH);
    if (SUNK) queries.sink(sinks[head] / scale);
    for (int first_key = begin; first_key < stop; first_key += KEYS) {
        storage_t* key_tile = tiles + first_key / KEYS % 2 * BOTH;
        cp_async_wait<0>();
        __syncthreads();  // this tile is there for all, and nobody reads the one before any more
        if (first_key + KEYS < stop) {
            storage_t* next = tiles + (first_key / KEYS + 1) % 2 * BOTH;
            begin_tile(next, next + TILE, keys, values, block_row, first_key + KEYS, stop, kv_head, K, pages);
        }
        queries.attend(key_tile, key_tile + TILE, first_key, position, mask, scale * LOG2_E);
    }
    queries.store(out, out_stride, rows);
}
