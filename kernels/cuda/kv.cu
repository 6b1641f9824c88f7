// Stores new keys and values in the cache, and copies part of a page when a fork gets a page of its own.
//
//   store_kv         keys[slots // P, :, slots % P] = k.reshape(T, K, D); likewise v. Slots below 0 are skipped.
//   copy_positions   pages[:, target, :, first:stop] = pages[:, source, :, first:stop], for keys and values
//
// Of latent attention k has KEY_DIM and v VALUE_DIM numbers, which together are a row of the keys' HEAD_DIM: `values` then
// points into the first row, and only keys are copied (grid (L K, 1)).
//
// Grid: (T, 2) for store_kv, a block per token and side (keys, values); (L K, 2) for copy_positions, one per layer and
// head and side. Block: 256 threads that walk along the row, in pieces of 16 bytes where the addresses allow it, else
// number by number.
//
// Bytes moved, with b bytes a number: store_kv 4 T K D b, copy_positions 4 L K (stop - first) D b (each number read and
// written, twice for keys and values). At 4.3 TB/s one decode step of OPT-6.7B in 16 bits (K D = 4096, one token) has a
// floor of 8 ns a layer: the launch itself costs a hundred times as much.
//
// Versions: one block per token, 16-byte pieces. H100: 1.9 us for a token of OPT-6.7B, 24.6 for 2,000, 0.88 of the copy
// bandwidth. The Q/K/V projection of a recorded decode step stores K and V itself (gemv_fused.cu), which saves the
// launch.
#include "paged.cuh"

#ifndef KEY_DIM
#define KEY_DIM HEAD_DIM
#endif

__device__ __forceinline__ bool aligned(const void* address) { return ((unsigned long long)address & 15) == 0; }

// One token's row [K, width] to its place in the pages [pages, K, P, D].
template <typename piece_t>
__device__ __forceinline__ void store_row(storage_t* cache, const storage_t* row, int page, int offset, int K,
                                          int width) {
    int pieces_of_row = width * sizeof(storage_t) / sizeof(piece_t);
    const piece_t* pieces = reinterpret_cast<const piece_t*>(row);
    for (int i = threadIdx.x; i < K * pieces_of_row; i += blockDim.x) {
        piece_t* place = reinterpret_cast<piece_t*>(cache + page_row(page, offset, i / pieces_of_row, K));
        place[i % pieces_of_row] = pieces[i];
    }
}

// k, v: [T, K, D], or k [T, K, KEY_DIM] and v [T, K, VALUE_DIM], with rows k_stride and v_stride apart. slots: [T], page * P + offset, or -1
extern "C" __global__ void store_kv(storage_t* keys, storage_t* values, const storage_t* k, const storage_t* v,
                                    const int* slots, int K, int pages, int k_stride, int v_stride) {
    follow();
    int slot = slots[blockIdx.x];
    if (slot < 0) return;
    bool is_value = blockIdx.y == 1;
    storage_t* cache = is_value ? values : keys;
    const storage_t* row = is_value ? v + (long long)blockIdx.x * v_stride : k + (long long)blockIdx.x * k_stride;
    int page = slot / PAGE_SIZE, offset = slot % PAGE_SIZE;
    CHECK_INDEX(page, pages);
    const int width = is_value ? VALUE_DIM : KEY_DIM;
    if (HEAD_DIM % VECTOR == 0 && width % VECTOR == 0 && aligned(row) && aligned(cache))
        store_row<uint4>(cache, row, page, offset, K, width);
    else
        store_row<storage_t>(cache, row, page, offset, K, width);
}

template <typename piece_t>
__device__ __forceinline__ void copy_numbers(storage_t* target, const storage_t* source, int count) {
    constexpr int WIDTH = sizeof(piece_t) / sizeof(storage_t);
    for (int i = threadIdx.x; i < count / WIDTH; i += blockDim.x)
        reinterpret_cast<piece_t*>(target)[i] = reinterpret_cast<const piece_t*>(source)[i];
}

// keys, values: [L, pages, K, P, D]
extern "C" __global__ void copy_positions(storage_t* keys, storage_t* values, int K, int pages, int source, int target,
                                          int first, int stop) {
    CHECK_INDEX(source, pages);
    CHECK_INDEX(target, pages);
    int layer = blockIdx.x / K, head = blockIdx.x % K;
    storage_t* cache = (blockIdx.y == 1 ? values : keys) + page_row(layer * pages, 0, 0, K);
    storage_t* to = cache + page_row(target, first, head, K);
    const storage_t* from = cache + page_row(source, first, head, K);
    if (HEAD_DIM % VECTOR == 0 && aligned(cache))
        copy_numbers<uint4>(to, from, (stop - first) * HEAD_DIM);
    else
        copy_numbers<storage_t>(to, from, (stop - first) * HEAD_DIM);
}
