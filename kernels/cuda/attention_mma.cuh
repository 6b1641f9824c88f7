// A warp's queries against a tile of keys and values, on tensor cores: 16-bit storage, float sums.
//
// A warp owns 16 queries. Lane l, with g = l / 4 and t = l % 4, holds of every result and score the rows g and g + 8
// and the columns 2t, 2t + 1 of each 8 (see mma_16816). The weights it has so computed are, packed in pairs, just
// what the second product wants as its left operand: they never leave the registers.
#pragma once

#include "mask.cuh"
#include "tensor_core.cuh"

constexpr int WARP_QUERIES = 16;
constexpr int THREADS = QUERIES / WARP_QUERIES * WARP;
constexpr int DEPTH = (HEAD_DIM + 15) / 16 * 16;  // a row in shared memory, filled up with zeros
constexpr int VALUE_DEPTH = (COLUMNS + 15) / 16 * 16;
constexpr int VALUE_STRIDE = VALUE_DEPTH + 8;
constexpr int STRIDE = DEPTH + 8;                 // an odd number of 16-byte pieces: ldmatrix meets no bank twice

static_assert(HEAD_DIM % VECTOR == 0 && QUERIES % 16 == 0 && KEYS % 16 == 0, "tiles are 16 wide");

struct QueryTile {
    unsigned query[DEPTH / 16][4];  // left operands
    float result[VALUE_DEPTH / 8][4];  // [8 columns each]: not yet divided by the sum of weights
    RunningSoftmax softmax[2];      // of rows g and g + 8

    // The first row of this lane; the other is 8 below.
    __device__ __forceinline__ static int row() {
        return threadIdx.x / WARP * WARP_QUERIES + threadIdx.x % WARP / 4;
    }

    // q: [rows, D], q_stride apart
    __device__ __forceinline__ QueryTile(const storage_t* q, int q_stride, int rows, storage_t*) {
#pragma unroll
        for (int i = 0; i < DEPTH / 8 * 2; i++) {
            int r = row() + i % 2 * 8, column = i / 2 * 8 + threadIdx.x % 4 * 2;
            bool inside = r < rows && column < HEAD_DIM;
            query[i / 4][i % 4] = inside ? *reinterpret_cast<const unsigned*>(q + (long long)r * q_stride + column) : 0;
        }
#pragma unroll
        for (int i = 0; i < VALUE_DEPTH / 8 * 4; i++) result[i / 4][i % 4] = 0.0f;
    }

    // Begin each query with its head's sink, a raw score.
    __device__ __forceinline__ void sink(float score) {
#pragma unroll
        for (int half = 0; half < 2; half++) softmax[half].begin(score, threadIdx.x % 4 == 0);
    }

    // Take in the keys and values at positions first_key ... ; position: of the block's first query.
    __device__ __forceinline__ void attend(const storage_t* keys, const storage_t* values, int first_key, int position,
                                           Mask mask, float scale) {
        float scores[KEYS / 8][4] = {};
        score_keys(scores, keys);
        int warp_position = position + threadIdx.x / WARP * WARP_QUERIES;
        int last_position = warp_position + WARP_QUERIES - 1;
        bool all_visible = mask.all_visible(warp_position, last_position, first_key, first_key + KEYS - 1);
        if (BIASED || BY_DISTANCE || CAPPED || !all_visible)
            mask_scores(scores, first_key, position, mask);
        weigh(scores, scale);
        add_values(scores, values);
    }

    // scores = queries keys^T
    __device__ __forceinline__ void score_keys(float scores[KEYS / 8][4], const storage_t* keys) const {
        int lane = threadIdx.x % WARP;
        const storage_t* corner = keys + (lane / 16 * 8 + lane % 8) * STRIDE + lane / 8 % 2 * 8;
#pragma unroll
        for (int step = 0; step < DEPTH / 16; step++) {
#pragma unroll
            for (int pair = 0; pair < KEYS / 16; pair++) {
                unsigned key[4];  // right operands of 16 keys
                ldmatrix_x4(key, corner + pair * 16 * STRIDE + step * 16);
                mma_16816(scores[2 * pair], query[step], key);
                mma_16816(scores[2 * pair + 1], query[step], key + 2);
            }
        }
    }

    // Scores as they count, where a query does not see all keys of the tile.
    __device__ __forceinline__ static void mask_scores(float scores[KEYS / 8][4], int first_key, int position,
                                                       Mask mask) {
#pragma unroll
        for (int i = 0; i < KEYS / 8 * 4; i++) {
            int key = first_key + i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
            float& score = scores[i / 4][i % 4];
            score = mask.masked(score, key, position + row() + i % 4 / 2 * 8);
        }
    }

    // Scores to weights; what was summed before shrinks where a maximum rises.
    __device__ __forceinline__ void weigh(float scores[KEYS / 8][4], float scale) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float maximum = minus_infinity();
#pragma unroll
            for (int j = 0; j < KEYS / 8; j++)
                maximum = fmaxf(maximum, fmaxf(scores[j][2 * half], scores[j][2 * half + 1]));
            float shrink = softmax[half].raise(neighbours_max<4>(maximum), scale);
#pragma unroll
            for (int j = 0; j < VALUE_DEPTH / 8 * 2; j++) result[j / 2][2 * half + j % 2] *= shrink;
#pragma unroll
            for (int j = 0; j < KEYS / 8 * 2; j++) {
                float& score = scores[j / 2][2 * half + j % 2];
                score = softmax[half].weigh(score, scale);
            }
        }
    }

    // result += weights values
    __device__ __forceinline__ void add_values(const float weights[KEYS / 8][4], const storage_t* values) {
        int lane = threadIdx.x % WARP;
        const storage_t* corner = values + lane % 16 * VALUE_STRIDE + lane / 16 * 8;
#pragma unroll
        for (int step = 0; step < KEYS / 16; step++) {
            const float* left = weights[2 * step];
            const float* right = weights[2 * step + 1];
            unsigned weight[4] = {pack(left[0], left[1]), pack(left[2], left[3]), pack(right[0], right[1]),
                                  pack(right[2], right[3])};
#pragma unroll
            for (int pair = 0; pair < VALUE_DEPTH / 16; pair++) {
                unsigned value[4];  // right operands of 16 columns
                ldmatrix_x4_transposed(value, corner + step * 16 * VALUE_STRIDE + pair * 16);
                mma_16816(result[2 * pair], weight, value);
                mma_16816(result[2 * pair + 1], weight, value + 2);
            }
        }
    }

    // out: [rows, COLUMNS], out_stride apart
    __device__ __forceinline__ void store(storage_t* out, int out_stride, int rows) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float share = 1.0f / neighbours_sum<4>(softmax[half].total);
            int r = row() + half * 8;
            if (r >= rows) continue;
#pragma unroll
            for (int j = 0; j < COLUMNS / 8; j++) {
                storage_t* place = out + (long long)r * out_stride + j * 8 + threadIdx.x % 4 * 2;
                float left = result[j][2 * half], right = result[j][2 * half + 1];
                *reinterpret_cast<unsigned*>(place) = pack(left * share, right * share);
            }
        }
    }
};
