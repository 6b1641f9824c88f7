// A warp's queries against a tile of keys and values, with multiply-adds: float32 storage.
//
// A warp owns QUERIES / 4 queries, eight lanes ROWS of them: lane l has rows l / 8 * ROWS ..., of the scores the keys
// l % 8, l % 8 + 8, ..., and of the results every eighth group of 4 columns. Weights pass between the eight
// lanes through shared memory.
#pragma once

#include "mask.cuh"

constexpr int THREADS = 128;
constexpr int WARP_QUERIES = QUERIES * WARP / THREADS;
constexpr int ROWS = WARP_QUERIES / 4;
constexpr int DEPTH = HEAD_DIM;
constexpr int VALUE_DEPTH = COLUMNS;
constexpr int VALUE_STRIDE = COLUMNS + 4;
constexpr int STRIDE = HEAD_DIM + 4;            // an odd number of 16-byte pieces: eight rows meet no bank twice
constexpr int TURNS = (COLUMNS / 4 + 7) / 8;    // groups of 4 columns of one lane
constexpr int WEIGHT_STRIDE = KEYS + 1;

static_assert(HEAD_DIM % VECTOR == 0 && QUERIES % 16 == 0 && KEYS % 8 == 0, "eight lanes share a tile");

struct QueryTile {
    float* queries;  // [ROWS, STRIDE] in shared memory: this lane's
    float* weights;  // [ROWS, WEIGHT_STRIDE] likewise
    float result[ROWS][TURNS][4];
    RunningSoftmax softmax[ROWS];

    __device__ __forceinline__ static int row() {
        return threadIdx.x / WARP * WARP_QUERIES + threadIdx.x % WARP / 8 * ROWS;
    }

    // q: [rows, D], q_stride apart. shared: [QUERIES, STRIDE] and [QUERIES, WEIGHT_STRIDE], 16-byte aligned
    __device__ __forceinline__ QueryTile(const float* q, int q_stride, int rows, float* shared)
        : queries(shared + row() * STRIDE), weights(shared + QUERIES * STRIDE + row() * WEIGHT_STRIDE) {
        int part = threadIdx.x % 8;
        for (int i = part; i < ROWS * HEAD_DIM; i += 8) {
            int r = i / HEAD_DIM, column = i % HEAD_DIM;
            queries[r * STRIDE + column] = row() + r < rows ? q[(long long)(row() + r) * q_stride + column] : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < ROWS * TURNS * 4; i++) result[i / (TURNS * 4)][i / 4 % TURNS][i % 4] = 0.0f;
    }  // the block's barrier before the first tile makes the queries known to all eight lanes

    // Begin each query with its head's sink, a raw score.
    __device__ __forceinline__ void sink(float score) {
#pragma unroll
        for (int r = 0; r < ROWS; r++) softmax[r].begin(score, threadIdx.x % 8 == 0);
    }

    // Take in the keys and values at positions first_key ... ; position: of the block's first query.
    __device__ __forceinline__ void attend(const float* keys, const float* values, int first_key, int position,
                                           Mask mask, float scale) {
        float scores[ROWS][KEYS / 8] = {};
        score_keys(scores, keys);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            float maximum = minus_infinity();
#pragma unroll
            for (int j = 0; j < KEYS / 8; j++) {
                int key = first_key + threadIdx.x % 8 + j * 8;
                scores[r][j] = mask.masked(scores[r][j], key, position + row() + r);
                maximum = fmaxf(maximum, scores[r][j]);
            }
            float shrink = softmax[r].raise(neighbours_max<8>(maximum), scale);
#pragma unroll
            for (int i = 0; i < TURNS * 4; i++) result[r][i / 4][i % 4] *= shrink;
#pragma unroll
            for (int j = 0; j < KEYS / 8; j++)
                weights[r * WEIGHT_STRIDE + threadIdx.x % 8 + j * 8] = softmax[r].weigh(scores[r][j], scale);
        }
        __syncwarp();
        add_values(values);  // the block's barrier comes before these weights are written over
    }

    // scores = queries keys^T
    __device__ __forceinline__ void score_keys(float scores[ROWS][KEYS / 8], const float* keys) const {
#pragma unroll 4
        for (int column = 0; column < HEAD_DIM; column += 4) {
            float4 query[ROWS];
#pragma unroll
            for (int r = 0; r < ROWS; r++) query[r] = *reinterpret_cast<const float4*>(queries + r * STRIDE + column);
#pragma unroll
            for (int j = 0; j < KEYS / 8; j++) {
                const float* row = keys + (threadIdx.x % 8 + j * 8) * STRIDE;
                float4 key = *reinterpret_cast<const float4*>(row + column);
#pragma unroll
                for (int r = 0; r < ROWS; r++)
                    scores[r][j] += query[r].x * key.x + query[r].y * key.y + query[r].z * key.z + query[r].w * key.w;
            }
        }
    }

    // result += weights values
    __device__ __forceinline__ void add_values(const float* values) {
#pragma unroll 2
        for (int key = 0; key < KEYS; key++) {
            float weight[ROWS];
#pragma unroll
            for (int r = 0; r < ROWS; r++) weight[r] = weights[r * WEIGHT_STRIDE + key];
#pragma unroll
            for (int turn = 0; turn < TURNS; turn++) {
                int column = (threadIdx.x % 8 + turn * 8) * 4;
                if (column >= COLUMNS) continue;
                float4 value = *reinterpret_cast<const float4*>(values + key * VALUE_STRIDE + column);
#pragma unroll
                for (int r = 0; r < ROWS; r++) {
                    result[r][turn][0] += weight[r] * value.x;
                    result[r][turn][1] += weight[r] * value.y;
                    result[r][turn][2] += weight[r] * value.z;
                    result[r][turn][3] += weight[r] * value.w;
                }
            }
        }
    }

    // out: [rows, COLUMNS], out_stride apart
    __device__ __forceinline__ void store(float* out, int out_stride, int rows) {
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            float share = 1.0f / neighbours_sum<8>(softmax[r].total);
            if (row() + r >= rows) continue;
#pragma unroll
            for (int i = 0; i < TURNS * 4; i++) {
                int column = (threadIdx.x % 8 + i / 4 * 8) * 4 + i % 4;
                storage_t* place = out + (long long)(row() + r) * out_stride + column;
                if (column < COLUMNS) *place = result[r][i / 4][i % 4] * share;
            }
        }
    }
};
