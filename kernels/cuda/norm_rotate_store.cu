// Norms of queries' and keys' heads, their rotation, and the store of keys and values, of a recorded decode step.
//
//     q = rms_norm(q, q_gain), k = rms_norm(k, k_gain)        each head of q [T, H, D], k [T, K, D]; or all heads of a
//                                                             token as one row, where ROWS_NORMED (OLMo 2)
//     v = rms_norm(v, v_gain)                                 if norms_values (Gemma 4); else v [T, K, D] as it is
//     q_out, k = rotary(q, k)                                 ROTATED pairs of each head; none if 0
//     keys[slots // P, :, slots % P] = k; likewise v          slots below 0 are skipped
//
// The plain kernels (norm.cu, rotary.cu, kv.cu) remain the specification: here the same numbers are added in the same
// order and rounded to storage_t at the same places, so the results are the same bits. (On a GPU but for what the
// compiler contracts to fma here and not there.)
//
// Grid: (T, (H + 2 K) / 4 rounded up), a warp for each head of a token; block: 128. A lane keeps 16-byte pieces of its
// head and of the gain in registers for the sum of squares, as in norm.cu. Meanwhile the block takes the token's sines,
// once for its four heads. The two numbers that turn together are other lanes': heads pass through shared memory.
// Of whole rows each block takes the sums of squares that its heads need, from L2: blocks do not wait for each other.
// Constants: HEAD_DIM (D), a multiple of VECTOR; PAGE_SIZE; ROTATED; ROWS_NORMED.
// Moved: 2 T (H + 2 K) D numbers, and 4 T bytes of positions and slots each, and 8 D bytes of gains.
// Floor: 2 T (H + 2 K) D sizeof(storage_t) / bandwidth. Qwen3 1.7B (16 heads of 128, 8 of keys) in 16 bits, one token:
// 16 kB, which is nothing; it is a launch.
//
// Versions: this one, for four or five launches. Expected 6 us less a layer (three of 2 us); not yet measured.
#include "paged.cuh"
#include "rotary.cuh"
#include "rows.cuh"

#ifndef ROTATED
#define ROTATED 0
#endif

#ifndef ROWS_NORMED
#define ROWS_NORMED 0
#endif

constexpr int WARPS = 4, MOST_NORM_WARPS = 16;  // the latter of rms_norm's block
constexpr int PIECES = HEAD_DIM / VECTOR, PARTS = (PIECES + WARP - 1) / WARP;
static_assert(HEAD_DIM % VECTOR == 0, "a head is whole pieces");
static_assert(2 * ROTATED <= HEAD_DIM, "no more numbers turn than a head has");

// The factor of a warp's head. Its sum is that of norm.cu: of each 32 pieces one by a warp, and these by a warp.
__device__ __forceinline__ float head_scale(const Loaded<storage_t> row[PARTS], float epsilon) {
    float of_parts = 0.0f;
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
        float values[VECTOR], squares = 0.0f;
        row[part].convert(values);
#pragma unroll
        for (int i = 0; i < VECTOR; i++) squares += values[i] * values[i];  // beyond the head is 0
        squares = warp_sum(squares);
        if (threadIdx.x % WARP == part) of_parts = squares;
    }
    return 1.0f / sqrtf(warp_sum(of_parts) / HEAD_DIM + epsilon);
}

// The factor of a row of E numbers, which a block of `threads` of norm.cu has; all threads of this block call it.
__device__ __forceinline__ float row_scale(float partial[MOST_NORM_WARPS], const storage_t* x, int E, int threads,
                                           float epsilon) {
    int lane = threadIdx.x % WARP;
    for (int part = threadIdx.x / WARP; part < threads / WARP; part += WARPS) {  // of that block's warps
        float squares = 0.0f;
        for (int at = (part * WARP + lane) * VECTOR; at < E; at += threads * VECTOR) {
            float values[VECTOR];
            load_vector(values, x + at, VECTOR, true);
#pragma unroll
            for (int i = 0; i < VECTOR; i++) squares += values[i] * values[i];
        }
        squares = warp_sum(squares);
        if (lane == 0) partial[part] = squares;
    }
    __syncthreads();
    return 1.0f / sqrtf(warp_sum(lane < threads / WARP ? partial[lane] : 0.0f) / E + epsilon);
}

// A head [D], normed by a warp into `to` in shared memory.
__device__ __forceinline__ void norm_head(storage_t* to, const Loaded<storage_t> row[PARTS],
                                          const Loaded<float> gains[PARTS], bool has_gain, float scale) {
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
        float values[VECTOR], factor[VECTOR];
        row[part].convert(values);
        gains[part].convert(factor);
#pragma unroll
        for (int i = 0; i < VECTOR; i++) values[i] *= has_gain ? scale * factor[i] : scale;
        int at = (part * WARP + threadIdx.x % WARP) * VECTOR;
        store_vector(to + at, values, HEAD_DIM - at, true);
    }
}

// q: [T, H, D], k, v: [T, K, D], rows q_stride, k_stride and v_stride apart; q_out: [T, H, D], contiguous. Rows, caches
// and gains begin at multiples of 16 bytes. keys, values: [pages, K, P, D]. slots: [T], page * P + offset, or -1.
// q_threads, k_threads: of the blocks that norm whole rows of q and k, else 0. Gains: [D]; of rows [H D] and [K D].
// The arguments from `positions` on are those of rotary.cu, null or 0 where nothing turns.
// Eight blocks are to fit on a multiprocessor (the 8): without it ptxas saves registers for more until a number spills.
extern "C" __global__ void __launch_bounds__(WARPS * WARP, 8)
    norm_rotate_store(storage_t* q_out, storage_t* keys, storage_t* values, const storage_t* q, const storage_t* k,
                      const storage_t* v, const float* q_gain, const float* k_gain, const float* v_gain,
                      const int* slots, int H, int K, int pages, int q_stride, int k_stride, int v_stride,
                      int norms_values, int q_threads, int k_threads, float epsilon, const int* positions,
                      const float* frequencies, const int* text_lens, const int* query_starts, int N, float scale,
                      double factor, int original) {
    constexpr int ANGLES = ROTATED > 0 ? ROTATED : 1;
    __shared__ float cosines[ANGLES], sines[ANGLES];
    __shared__ __align__(16) storage_t rows[WARPS][HEAD_DIM];
    int t = blockIdx.x, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, number = blockIdx.y * WARPS + warp;
    bool is_query = number < H, is_value = number >= H + K, is_head = number < H + 2 * K;
    int head = is_query ? number : (number - H) % K;
    follow();

    int slot = slots[t];
    const storage_t* x = is_query ? q + (long long)t * q_stride : is_value ? v + (long long)t * v_stride
                                                                           : k + (long long)t * k_stride;
    const float* gain = is_query ? q_gain : is_value ? v_gain : k_gain;
    if (ROWS_NORMED && !is_value && gain != nullptr) gain += head * HEAD_DIM;
    Loaded<storage_t> row[PARTS];
    Loaded<float> gains[PARTS];
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
        int at = (part * WARP + lane) * VECTOR, left = is_head ? HEAD_DIM - at : 0;
        row[part].load(x + head * HEAD_DIM + at, left, true);
        gains[part].load(gain + at, gain == nullptr ? 0 : left, true);
    }
    if (ROTATED > 0) {
        Rotation rotation{positions, frequencies, text_lens, query_starts, N, ROTATED, original, scale, factor};
        float growth = rotation.stretch(t);
        for (int j = threadIdx.x; j < ROTATED; j += WARPS * WARP) rotation.turn(t, j, growth, cosines[j], sines[j]);
    }
    float own = 1.0f;
    if (ROWS_NORMED) {
        __shared__ float of_q[MOST_NORM_WARPS], of_k[MOST_NORM_WARPS];
        int first = blockIdx.y * WARPS;
        float of_row;
        if (first < H) {
            of_row = row_scale(of_q, q + (long long)t * q_stride, H * HEAD_DIM, q_threads, epsilon);
            if (is_query) own = of_row;
        }
        if (first < H + K && first + WARPS > H) {
            of_row = row_scale(of_k, k + (long long)t * k_stride, K * HEAD_DIM, k_threads, epsilon);
            if (!is_query) own = of_row;
        }
    } else {
        own = head_scale(row, epsilon);
    }
    if (!is_value || norms_values) {
        norm_head(rows[warp], row, gains, gain != nullptr, own);
    } else {
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
            int piece = part * WARP + lane;
            if (piece < PIECES)
                reinterpret_cast<uint4*>(rows[warp])[piece] = *reinterpret_cast<const uint4*>(row[part].numbers);
        }
    }
    __syncthreads();
    if (!is_head) return;

    if (ROTATED > 0 && !is_value) {
        for (int j = lane; j < ROTATED; j += WARP) {
            float first = to_float(rows[warp][j]), second = to_float(rows[warp][j + ROTATED]);
            rotate(first, second, cosines[j], sines[j]);
            rows[warp][j] = from_float(first);
            rows[warp][j + ROTATED] = from_float(second);
        }
        __syncwarp();
    }
    storage_t* to = q_out + ((long long)t * H + head) * HEAD_DIM;
    if (!is_query) {
        if (slot < 0) return;
        int page = slot / PAGE_SIZE;
        CHECK_INDEX(page, pages);
        to = (is_value ? values : keys) + page_row(page, slot % PAGE_SIZE, head, K);
    }
    for (int piece = lane; piece < PIECES; piece += WARP)
        reinterpret_cast<uint4*>(to)[piece] = reinterpret_cast<const uint4*>(rows[warp])[piece];
}
