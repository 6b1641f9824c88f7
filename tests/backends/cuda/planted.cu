// Kernels with a fault that -DPLANT=<number> plants: each test of test_emulator.py has its fault found, and its twin
// without the fault pass. No kernel of the engine is here.
#include "../../../kernels/tensor_core.cuh"

#ifndef PLANT
#define PLANT 0
#endif
#define MISSING_BARRIER 1         // reads before others have written
#define MISSING_SECOND_BARRIER 2  // writes before others have read
#define MISSING_WARP_BARRIER 3
#define BEYOND_THE_END 4
#define READ_BEYOND_THE_END 5
#define BETWEEN_ROWS 6
#define NOT_WAITED_FOR 7
#define NEVER_WAITED_FOR 8
#define NO_BARRIER_AFTER_WAIT 9
#define DIVERGENT_BARRIER 10
#define ENDLESS_BARRIER 11
#define MISSING_LANE 12
#define TOO_MUCH_SHARED 13
#define OUTSIDE_SHARED_ARRAY 14
#define MISALIGNED 15
#define PLAIN_ADD 16
#define NEVER_WRITTEN 17
#define WRONG_INDEX 18
#define THROUGH_NULL 19
#define TWO_PLACES 20

// out [n] = x [n] reversed within each block, twice (so x again), through one shared buffer.
extern "C" __global__ void reverse_twice(float* out, const float* x) {
    __shared__ float buffer[256];
    int here = threadIdx.x, there = blockDim.x - 1 - threadIdx.x, first = blockIdx.x * blockDim.x;
    buffer[here] = x[first + here];
#if PLANT != MISSING_BARRIER
    __syncthreads();
#endif
    float once = buffer[there];
#if PLANT != MISSING_SECOND_BARRIER
    __syncthreads();
#endif
    buffer[here] = once;
    __syncthreads();
    out[first + here] = buffer[there];
}

// out [32] = x [32] reversed, by one warp.
extern "C" __global__ void reverse_warp(float* out, const float* x) {
    __shared__ float buffer[32];
    buffer[threadIdx.x] = x[threadIdx.x];
#if PLANT == MISSING_WARP_BARRIER
    __shfl_sync(ALL_LANES, 0, 0);  // waits for all lanes but orders no memory
#else
    __syncwarp();
#endif
    out[threadIdx.x] = buffer[31 - threadIdx.x];
}

// out [rows, columns] = 2 x, rows `stride` numbers apart in both.
extern "C" __global__ void twice(float* out, const float* x, int columns, int stride) {
    const float* from = x + blockIdx.x * stride;
    float* to = out + blockIdx.x * stride;
    int end = columns;
#if PLANT == BEYOND_THE_END
    if (blockIdx.x == gridDim.x - 1) end = columns + 1;
    for (int i = threadIdx.x; i < end; i += blockDim.x) to[i] = 2 * from[min(i, columns - 1)];
#elif PLANT == READ_BEYOND_THE_END
    if (blockIdx.x == gridDim.x - 1) end = columns + 1;
    for (int i = threadIdx.x; i < end; i += blockDim.x) to[min(i, columns - 1)] = 2 * from[i];
#else
#if PLANT == BETWEEN_ROWS
    if (blockIdx.x == 0) end = columns + 1;
#elif PLANT == THROUGH_NULL
    if (blockIdx.x == 0) from = nullptr;
#endif
    for (int i = threadIdx.x; i < end; i += blockDim.x) to[i] = 2 * from[i];
#endif
}

// out [8 * threads] = x of the thread opposite, through cp.async: storage_t has 16 bits.
#if MINILLM_STORAGE != 32
extern "C" __global__ void copy_async(storage_t* out, const storage_t* x) {
    extern __shared__ __align__(16) unsigned char dynamic_shared[];
    auto* buffer = reinterpret_cast<storage_t*>(dynamic_shared);
    cp_async_16(buffer + 8 * threadIdx.x, x + 8 * threadIdx.x);
    cp_async_commit();
#if PLANT == NOT_WAITED_FOR
    cp_async_wait<1>();  // of one group in all: waits for none
#elif PLANT != NEVER_WAITED_FOR
    cp_async_wait<0>();
#endif
#if PLANT != NO_BARRIER_AFTER_WAIT
    __syncthreads();
#endif
    int there = blockDim.x - 1 - threadIdx.x;
    for (int i = 0; i < 8; i++) out[8 * threadIdx.x + i] = buffer[8 * there + i];
#if PLANT == NOT_WAITED_FOR
    cp_async_wait<0>();
#endif
}

// d [16, 8] = a [16, 16] b [8, 16]^T by one warp, with b loaded transposed from its rows or not.
extern "C" __global__ void tile(float* d, const storage_t* a, const storage_t* b, int transposed) {
    __shared__ __align__(16) storage_t left[16 * 16], right[16 * 16];
    int lane = threadIdx.x;
    for (int i = lane; i < 256; i += 32) {
        left[i] = a[i];
        int row = i / 16, column = i % 16;
        // Not transposed: right[n][k] = b[n][k]. Transposed: right[k][n] = b[n][k], n padded to 16.
        right[i] = transposed ? (column < 8 ? b[column * 16 + row] : from_float(0)) : (row < 8 ? b[i] : from_float(0));
    }
    __syncwarp();
    unsigned tiles_a[4], tiles_b[4];
    ldmatrix_x4(tiles_a, &left[lane % 16 * 16 + lane / 16 * 8]);
    if (transposed) ldmatrix_x4_transposed(tiles_b, &right[lane % 16 * 16 + lane / 16 * 8]);
    else ldmatrix_x4(tiles_b, &right[(lane % 8 + lane / 16 * 8) * 16 + lane / 8 % 2 * 8]);
    float sums[4] = {1, 1, 1, 1};
    mma_16816(sums, tiles_a, tiles_b);
    int g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; i++) d[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = sums[i];
}
#endif

// out [threads] = the block's sum of x [threads].
extern "C" __global__ void sum(float* out, const float* x) {
    __shared__ float scratch[32];
#if PLANT == DIVERGENT_BARRIER
    if (threadIdx.x < 32) __syncthreads();
    else
        __syncthreads();
#elif PLANT == ENDLESS_BARRIER
    if (threadIdx.x % 32 == 0) __syncthreads();
    else __syncwarp();
#elif PLANT == MISSING_LANE
    if (threadIdx.x != 3) __syncwarp();
    else __shfl_sync(ALL_LANES, 1, 0);
#elif PLANT == TWO_PLACES
    if (threadIdx.x % 2) __syncwarp();
    else
        __syncwarp();
#elif PLANT == NEVER_WRITTEN
    if (x == nullptr) scratch[31] = 0;  // never, but the compiler cannot know
    float unset = scratch[31];
    out[threadIdx.x] = unset;
    return;
#endif
    out[threadIdx.x] = block_sum(x[threadIdx.x], scratch);
}

// out [numbers] = x [numbers] by way of dynamic shared memory of numbers * 4 bytes and a static array of 32.
extern "C" __global__ void through_shared(float* out, const float* x, int numbers) {
    extern __shared__ __align__(16) unsigned char dynamic_shared[];
    __shared__ float last[32];
    auto* buffer = reinterpret_cast<float*>(dynamic_shared);
    for (int i = threadIdx.x; i < numbers; i += blockDim.x) buffer[i] = x[i];
#if PLANT == TOO_MUCH_SHARED
    if (threadIdx.x == 0) buffer[numbers] = 1;
#elif PLANT == OUTSIDE_SHARED_ARRAY
    if (threadIdx.x == 0) last[numbers] = 1;
#elif PLANT == WRONG_INDEX
    CHECK_INDEX(numbers, 32);
#endif
    last[threadIdx.x % 32] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < numbers; i += blockDim.x) out[i] = buffer[i];
}

// out [4 * threads] = x [4 * threads], 16 bytes at a time.
extern "C" __global__ void copy_wide(float* out, const float* x) {
    const float* from = x + 4 * threadIdx.x;
#if PLANT == MISALIGNED
    if (threadIdx.x == 1) from -= 1;
#endif
    reinterpret_cast<float4*>(out)[threadIdx.x] = *reinterpret_cast<const float4*>(from);
}

// total [1] += the number of threads of all blocks.
extern "C" __global__ void count(int* total) {
    int votes = __syncthreads_count(1);
    if (threadIdx.x + threadIdx.y + threadIdx.z != 0) return;
#if PLANT == PLAIN_ADD
    *total += votes;
#else
    atomicAdd(total, votes);
#endif
}

// One number per lane from each of the warp's operations, for NumPy to compare.
extern "C" __global__ void warp_operations(int* out, const int* x) {
    int lane = threadIdx.x, value = x[lane], n = 0;
    out[32 * n++ + lane] = __shfl_sync(ALL_LANES, value, lane * 7);
    out[32 * n++ + lane] = __shfl_xor_sync(ALL_LANES, value, 5);
    out[32 * n++ + lane] = __shfl_up_sync(ALL_LANES, value, 3);
    out[32 * n++ + lane] = __shfl_down_sync(ALL_LANES, value, 3);
    out[32 * n++ + lane] = __shfl_sync(ALL_LANES, value, 3, 8);
    out[32 * n++ + lane] = __shfl_down_sync(ALL_LANES, value, 3, 8);
    out[32 * n++ + lane] = __ballot_sync(ALL_LANES, value & 1);
    out[32 * n++ + lane] = __any_sync(ALL_LANES, value == 1000) + 2 * __all_sync(ALL_LANES, value >= 0);
    out[32 * n++ + lane] = __reduce_add_sync(ALL_LANES, value);
    if (lane < 16) out[32 * n + lane] = __shfl_xor_sync(0x0000ffffu, value, 1);  // half a warp by itself
    else out[32 * n + lane] = __shfl_xor_sync(0xffff0000u, value, 2);
}
