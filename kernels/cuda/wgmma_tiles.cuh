// What products by warpgroups have in common: a block's tiles in shared memory, and its share of the work.
#pragma once

#include "epilogue.cuh"
#include "wgmma.cuh"

constexpr int TILE_ROWS = 128;           // rows of x of a block
constexpr int THREADS = 2 * 4 * WARP;    // of a block: two warpgroups
constexpr int WIDTH = 64;                // numbers of a row of a tile: 128 bytes, the width of the swizzle
constexpr int PER_ROW = WIDTH / VECTOR;  // 16-byte pieces of it: 8

__device__ __forceinline__ int row_of(int row) { return row; }

// Begin to copy SIZE rows from k on into shared memory, `place` saying to which row; zeros beyond the last row and k.
template <int SIZE, int (*place)(int), bool ALIGNED>
__device__ __forceinline__ void copy_tile(uint4* to, const storage_t* from, int first, int size, int stride, int k,
                                          int inputs) {
#pragma unroll
    for (int e = 0; e < SIZE * PER_ROW / THREADS; ++e) {
        int i = e * THREADS + threadIdx.x, row = first + i / PER_ROW, c = i % PER_ROW, at = k + c * VECTOR;
        const storage_t* start = from + (size_t)min(row, size - 1) * stride;
        bool inside = row < size && at < inputs;
        int there = place(i / PER_ROW);
        uint4* piece = to + there * PER_ROW + (c ^ there % 8);
        if (ALIGNED) {
            cp_async_16(piece, start + (inside ? at : 0), inside);
        } else {
            *piece = load_vector<false, false>(start, at, inside ? inputs : 0);
        }
    }
}

// Of all tiles' steps of k, one tile after the other, each block takes the same share, but for one step: so the end of
// one tile, some whole ones, and the beginning of another. Tiles follow each other along the rows first.
struct Work {
    int steps, row_tiles, tile_outs;  // of a tile; in a column of tiles; outputs of a tile
    long long total;       // steps of all tiles

    __device__ __forceinline__ Work(int rows, int tile_outs, int outputs, int depth, int inputs) : tile_outs(tile_outs) {
        steps = (inputs + depth - 1) / depth;
        row_tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
        total = (long long)steps * row_tiles * ((outputs + tile_outs - 1) / tile_outs);
    }
    __device__ __forceinline__ int first(int block) const { return (int)(total * block / gridDim.x); }
    __device__ __forceinline__ int block_of(int step) const {
        return (int)(((long long)gridDim.x * (step + 1) - 1) / total);
    }
    __device__ __forceinline__ int row(int tile) const { return tile % row_tiles * TILE_ROWS; }
    __device__ __forceinline__ int output(int tile) const { return tile / row_tiles * tile_outs; }
};
