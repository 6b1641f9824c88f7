// Norms of queries' and keys' heads, their rotation, and the store of keys and values, of a recorded decode step.
//
//     q = rms_norm(q, q_gain), k = rms_norm(k, k_gain)        each head of q [T, H, D], k [T, K, D]
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
// Constants: HEAD_DIM (D), a multiple of VECTOR; PAGE_SIZE; ROTATED.
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

constexpr int WARPS = 4;
constexpr int PIECES = HEAD_DIM / VECTOR, PARTS = (PIECES + WARP - 1) / WARP;
static_assert(HEAD_DIM % VECTOR == 0, "a head is whole pieces");
static_assert(2 * ROTATED <= HEAD_DIM, "no more numbers turn than a head has");

// A head's row [D] in memory, normed by a warp into `to` in shared memory; `gain` [D] or null. Its sums are those of
// norm.cu: of each 32 pieces one by a warp, and these by a warp.
__device__ __forceinline__ void norm_head(storage_t* to, const Loaded<storage_t> row[PARTS],
                                          const Loaded<float> gains[PARTS], bool has_gain, float epsilon) {
    int lane = threadIdx.x % WARP;
    float values[PARTS][VECTOR], of_parts = 0.0f;
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
        row[part].convert(values[part]);
        float squares = 0.0f;
#pragma unroll
        for (int i = 0; i < VECTOR; i++) squares += values[part][i] * values[part][i];  // beyond the row is 0
        squares = warp_sum(squares);
        if (lane == part) of_parts = squares;
    }
    float scale = 1.0f / sqrtf(warp_sum(of_parts) / HEAD_DIM + epsilon);
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
        float factor[VECTOR];
        gains[part].convert(factor);
#pragma unroll
        for (int i = 0; i < VECTOR; i++) values[part][i] *= has_gain ? scale * factor[i] : scale;
        int at = (part * WARP + lane) * VECTOR;
        store_vector(to + at, values[part], HEAD_DIM - at, true);
    }
}

// q: [T, H, D], k, v: [T, K, D], rows q_stride, k_stride and v_stride apart; q_out: [T, H, D], contiguous. Rows, caches
// and gains begin at multiples of 16 bytes. keys, values: [pages, K, P, D]. slots: [T], page * P + offset, or -1.
// The arguments from `positions` on are those of rotary.cu, null or 0 where nothing turns.
extern "C" __global__ void __launch_bounds__(WARPS * WARP)
    norm_rotate_store(storage_t* q_out, storage_t* keys, storage_t* values, const storage_t* q, const storage_t* k,
                      const storage_t* v, const float* q_gain, const float* k_gain, const float* v_gain,
                      const int* slots, int H, int K, int pages, int q_stride, int k_stride, int v_stride,
                      int norms_values, float epsilon, const int* positions, const float* frequencies,
                      const int* text_lens, const int* query_starts, int N, float scale, double factor, int original) {
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
    if (!is_value || norms_values) {
        norm_head(rows[warp], row, gains, gain != nullptr, epsilon);
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
