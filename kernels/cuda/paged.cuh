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
