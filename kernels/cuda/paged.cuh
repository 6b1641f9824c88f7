// Where keys and values lie: pages [pages, K, PAGE_SIZE, HEAD_DIM] of one layer, found through a block table.
//
// HEAD_DIM (D) and PAGE_SIZE (P) are constants, so that the divisions below cost a shift.
#pragma once

#include "common.cuh"

#if !defined(HEAD_DIM) || !defined(PAGE_SIZE)
#error "compile with -DHEAD_DIM=... and -DPAGE_SIZE=..."
#endif

// Numbers of a value, where they are a part of each key's row; `values` then points into the first row.
#ifndef VALUE_DIM
#define VALUE_DIM HEAD_DIM
#endif

// The first number of one head's row at `offset` in `page`.
__device__ __forceinline__ long long page_row(int page, int offset, int head, int K) {
    return (((long long)page * K + head) * PAGE_SIZE + offset) * HEAD_DIM;
}

// The same for a position of a sequence whose pages `block_row` lists.
__device__ __forceinline__ long long cache_row(const int* block_row, unsigned position, int head, int K, int pages) {
    int page = block_row[position / PAGE_SIZE];
    CHECK_INDEX(page, pages);
    return page_row(page, position % PAGE_SIZE, head, K);
}

// Of tiles of SIZE queries each, the sequence whose range of tile numbers holds `tile`: the last n with
// query_starts[n] / SIZE + n <= tile.
template <int SIZE>
__device__ __forceinline__ int sequence_of_tile(const int* query_starts, int N, int tile) {
    int low = 0, high = N - 1;
    while (low < high) {
        int middle = (low + high + 1) / 2;
        if (query_starts[middle] / SIZE + middle <= tile)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}
