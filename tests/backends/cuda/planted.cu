// Kernels with a fault that the argument `plant` brings about: the tests of test_emulator.py see each fault found, and
// the same kernel pass without it. No kernel of the engine is here.
#include "../../../kernels/cuda/wgmma.cuh"
#include "../../../kernels/cuda/tma.cuh"

enum Plant {
    NONE,
    MISSING_BARRIER,         // reads before others have written
    MISSING_SECOND_BARRIER,  // writes before others have read
    MISSING_WARP_BARRIER,
    BEYOND_THE_END,
    READ_BEYOND_THE_END,
    BETWEEN_ROWS,
    THROUGH_NULL,
    NOT_WAITED_FOR,
    NEVER_WAITED_FOR,
    NO_BARRIER_AFTER_WAIT,
    DIVERGENT_BARRIER,
    ENDLESS_BARRIER,
    MISSING_LANE,
    TWO_PLACES,
    NEVER_WRITTEN,
    TOO_MUCH_SHARED,
    OUTSIDE_SHARED_ARRAY,
    WRONG_INDEX,
    MISALIGNED,
    PLAIN_ADD,
    NOT_SWIZZLED,
    NO_PROXY_FENCE,
    NO_REGISTER_FENCE,
    PRODUCT_NOT_WAITED_FOR,
    PRODUCT_NEVER_WAITED_FOR,
    WRITES_WHAT_A_PRODUCT_READS,
    OTHER_PRODUCTS,
    BETWEEN_TILES,
    CHANGES_REGISTERS,
    READ_BEFORE_THE_WAIT,
    WRITTEN_BEFORE_THE_WAIT,
    COPIED_BEFORE_THE_WAIT,
    NO_WAIT_FOR_RESULTS,
    ONE_THREAD_WAITS,
    NO_WAIT_FOR_BLOCKS,
    BLOCK_NOT_COUNTED,
    NO_WAIT_FOR_COPY,
    COPY_NEVER_AWAITED,
    SLOT_TAKEN_TOO_EARLY,
    MORE_BYTES_THAN_EXPECTED,
    NO_BARRIER_BEFORE,
    NO_BARRIER_AFTER,
    BOX_TO_ONE_BLOCK,
    FEWER_BYTES_EXPECTED,
    BOX_AT_AN_ODD_PLACE,
};

// out [n] = x [n] reversed within each block, twice (so x again), through one shared buffer.
extern "C" __global__ void reverse_twice(float* out, const float* x, int plant) {
    __shared__ float buffer[256];
    int here = threadIdx.x, there = blockDim.x - 1 - threadIdx.x, first = blockIdx.x * blockDim.x;
    buffer[here] = x[first + here];
    if (plant != MISSING_BARRIER) __syncthreads();
    float once = buffer[there];
    if (plant != MISSING_SECOND_BARRIER) __syncthreads();
    buffer[here] = once;
    __syncthreads();
    out[first + here] = buffer[there];
}

// out [32] = x [32] reversed, by one warp.
extern "C" __global__ void reverse_warp(float* out, const float* x, int plant) {
    __shared__ float buffer[32];
    buffer[threadIdx.x] = x[threadIdx.x];
    if (plant == MISSING_WARP_BARRIER) __shfl_sync(ALL_LANES, 0, 0);  // waits for all lanes but orders no memory
    else __syncwarp();
    out[threadIdx.x] = buffer[31 - threadIdx.x];
}

// out [rows, columns] = 2 x, rows `stride` numbers apart in both.
extern "C" __global__ void twice(float* out, const float* x, int columns, int stride, int plant) {
    const float* from = x + blockIdx.x * stride;
    float* to = out + blockIdx.x * stride;
    int first = 0, last = gridDim.x - 1, block = blockIdx.x;
    int reads = columns, writes = columns;
    if (plant == BETWEEN_ROWS && block == first) writes++;
    if (plant == BEYOND_THE_END && block == last) writes++;
    if (plant == READ_BEYOND_THE_END && block == last) reads++;
    if (plant == THROUGH_NULL && block == first) from = nullptr;
    for (int i = threadIdx.x; i < max(reads, writes); i += blockDim.x)
        to[min(i, writes - 1)] = 2 * from[min(i, reads - 1)];
}

// out [8 * threads] = x of the thread opposite, through cp.async: storage_t has 16 bits.
#if MINILLM_STORAGE != 32
extern "C" __global__ void copy_async(storage_t* out, const storage_t* x, int plant) {
    extern __shared__ __align__(16) unsigned char dynamic_shared[];
    auto* buffer = reinterpret_cast<storage_t*>(dynamic_shared);
    cp_async_16(buffer + 8 * threadIdx.x, x + 8 * threadIdx.x);
    cp_async_commit();
    if (plant == NOT_WAITED_FOR) cp_async_wait<1>();  // of one group in all: waits for none
    else if (plant != NEVER_WAITED_FOR) cp_async_wait<0>();
    if (plant != NO_BARRIER_AFTER_WAIT) __syncthreads();
    int there = blockDim.x - 1 - threadIdx.x;
    for (int i = 0; i < 8; i++) out[8 * threadIdx.x + i] = buffer[8 * there + i];
    if (plant == NOT_WAITED_FOR) cp_async_wait<0>();
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

// d [64, 128] = a [64, 64] b [128, 64]^T by one warpgroup, in two products of 64 x 128 x 16 of a group, and two more.
extern "C" __global__ void warpgroup(float* d, const storage_t* a, const storage_t* b, int plant) {
    extern __shared__ __align__(1024) unsigned char dynamic_shared[];
    auto* rows = reinterpret_cast<uint4*>(dynamic_shared);  // [64 + 128, 8 pieces]
    for (int i = threadIdx.x; i < (64 + 128) * 8; i += 128) {
        int row = i / 8, c = i % 8;
        const storage_t* from = row < 64 ? a + row * 64 : b + (row - 64) * 64;
        cp_async_16(rows + row * 8 + (plant == NOT_SWIZZLED ? c : c ^ row % 8), from + c * 8);
    }
    cp_async_commit();
    cp_async_wait<0>();
    if (plant != NO_PROXY_FENCE) fence_proxy_async();
    __syncthreads();
    float sums[64];
    for (float& sum : sums) sum = 1;
    if (plant != NO_REGISTER_FENCE) wgmma_fence();
    for (int k = 0; k < 4; k++) {
        const uint4* right = rows + (plant == BETWEEN_TILES ? 65 : 64) * 8 + 2 * k;
        bool other = plant == OTHER_PRODUCTS && k == 3 && threadIdx.x >= 96;
        wgmma_64xNx16<128>(sums, swizzled_tile(rows + (other ? 0 : 2 * k)), swizzled_tile(right));
        if (k % 2 == 1) wgmma_commit();
    }
    if (plant == WRITES_WHAT_A_PRODUCT_READS && threadIdx.x == 5) rows[100] = make_uint4(0, 0, 0, 0);
    if (plant == PRODUCT_NOT_WAITED_FOR) wgmma_wait<1>();
    else if (plant != PRODUCT_NEVER_WAITED_FOR) wgmma_wait<0>();
    int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
    for (int i = 0; i < 64; i++) d[(row + i / 2 % 2 * 8) * 128 + i / 4 * 8 + lane % 4 * 2 + i % 2] = sums[i];
    if (plant == PRODUCT_NOT_WAITED_FOR) wgmma_wait<0>();
}

// d [64, 128] = a [64, 16] b [16, 128] by one warpgroup, a in registers and b by columns: blocks of 64 of them, each 2 kB.
extern "C" __global__ void warpgroup_registers(float* d, const storage_t* a, const storage_t* b, int plant) {
    extern __shared__ __align__(1024) unsigned char dynamic_shared[];
    auto* rows = reinterpret_cast<uint4*>(dynamic_shared);  // [2, 16, 8 pieces]
    for (int i = threadIdx.x; i < 16 * 16; i += 128) {
        int row = i / 16, c = i % 16;
        rows[c / 8 * 128 + row * 8 + (plant == NOT_SWIZZLED ? c % 8 : c % 8 ^ row % 8)] =
            *reinterpret_cast<const uint4*>(b + row * 128 + c * 8);
    }
    int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
    unsigned own[4];
    for (int i = 0; i < 4; i++)
        own[i] = *reinterpret_cast<const unsigned*>(a + (row + i % 2 * 8) * 16 + i / 2 * 8 + lane % 4 * 2);
    if (plant != NO_PROXY_FENCE) fence_proxy_async();
    __syncthreads();
    float sums[64] = {};
    wgmma_fence();
    wgmma_64xNx16<128>(sums, own, transposed_tile(rows, plant == WRONG_INDEX ? 1024 : 2048));
    wgmma_commit();
    if (plant == CHANGES_REGISTERS) own[2] ^= 1;
    wgmma_wait<0>();
    for (int i = 0; i < 64; i++) d[(row + i / 2 % 2 * 8) * 128 + i / 4 * 8 + lane % 4 * 2 + i % 2] = sums[i];
}
#endif

// out [threads] = the block's sum of x [threads].
extern "C" __global__ void sum(float* out, const float* x, int plant) {
    __shared__ float scratch[32];
    int thread = threadIdx.x;
    if (plant == DIVERGENT_BARRIER && thread < 32) __syncthreads();
    if (plant == DIVERGENT_BARRIER && thread >= 32) __syncthreads();
    if (plant == ENDLESS_BARRIER && thread % 32 == 0) __syncthreads();
    if (plant == ENDLESS_BARRIER && thread % 32 != 0) __syncwarp();
    if (plant == MISSING_LANE && thread == 3) __shfl_sync(ALL_LANES, 1, 0);
    if (plant == MISSING_LANE && thread != 3) __syncwarp();
    if (plant == TWO_PLACES && thread % 2 == 0) __syncwarp();
    if (plant == TWO_PLACES && thread % 2 != 0) __syncwarp();
    if (plant == NEVER_WRITTEN) {
        out[thread] = scratch[31];
        return;
    }
    out[threadIdx.x] = block_sum(x[threadIdx.x], scratch);
}

// out [numbers] = x [numbers] by way of dynamic shared memory of numbers * 4 bytes and a static array of 32.
extern "C" __global__ void through_shared(float* out, const float* x, int numbers, int plant) {
    extern __shared__ __align__(16) unsigned char dynamic_shared[];
    __shared__ float last[32];
    auto* buffer = reinterpret_cast<float*>(dynamic_shared);
    for (int i = threadIdx.x; i < numbers; i += blockDim.x) buffer[i] = x[i];
    if (plant == TOO_MUCH_SHARED && threadIdx.x == 0) buffer[numbers] = 1;
    if (plant == OUTSIDE_SHARED_ARRAY && threadIdx.x == 0) last[numbers] = 1;
    if (plant == WRONG_INDEX) CHECK_INDEX(numbers, 32);
    last[threadIdx.x % 32] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < numbers; i += blockDim.x) out[i] = buffer[i];
}

// out [4 * threads] = x [4 * threads], 16 bytes at a time.
extern "C" __global__ void copy_wide(float* out, const float* x, int plant) {
    const float* from = x + 4 * threadIdx.x;
    if (plant == MISALIGNED && threadIdx.x == 1) from -= 1;
    reinterpret_cast<float4*>(out)[threadIdx.x] = *reinterpret_cast<const float4*>(from);
}

// total [1] += the number of threads of all blocks.
extern "C" __global__ void count(int* total, int plant) {
    int votes = __syncthreads_count(1);
    if (threadIdx.x + threadIdx.y + threadIdx.z != 0) return;
    if (plant == PLAIN_ADD) *total += votes;
    else atomicAdd(total, votes);
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

// out [threads] = weight * x [threads], where kernels before this one have written x and read out.
extern "C" __global__ void follows(float* out, const float* x, const float* weight, int plant) {
    extern __shared__ __align__(16) unsigned char dynamic_shared[];
    float own = *weight;  // a parameter: nobody writes it
    float early = plant == READ_BEFORE_THE_WAIT ? x[threadIdx.x] : 0.0f;
    if (plant == WRITTEN_BEFORE_THE_WAIT) out[threadIdx.x] = 0.0f;
    if (plant == COPIED_BEFORE_THE_WAIT) cp_async_16(dynamic_shared + 16 * threadIdx.x, x + 4 * threadIdx.x);
    bool waits = plant != NO_WAIT_FOR_RESULTS && (plant != ONE_THREAD_WAITS || threadIdx.x == 0);
    if (waits) wait_for_results();
    if (plant == COPIED_BEFORE_THE_WAIT) cp_async_wait<0>();
    if (plant == NO_WAIT_FOR_RESULTS) return;
    if (plant == ONE_THREAD_WAITS) __syncthreads();
    out[threadIdx.x] = own * (early + x[threadIdx.x]);
}

// out [blocks, 64]: each block writes its row of `between`, x + 1, and then twice the row of the block after it. `counter`
// is 0 before, and the number of blocks after.
extern "C" __global__ void neighbours(float* out, float* between, const float* x, unsigned long long* counter, int plant) {
    __shared__ float row[64];
    int t = threadIdx.x, next = (blockIdx.x + 1) % gridDim.x;
    row[t] = x[blockIdx.x * 64 + t] + 1.0f;
    __syncthreads();
    between[blockIdx.x * 64 + 63 - t] = row[63 - t];
    __syncthreads();
    if (t == 0) {
        if (plant != BLOCK_NOT_COUNTED || blockIdx.x) count_in(counter);
        Watchdog watchdog;
        while (plant != NO_WAIT_FOR_BLOCKS && counted(counter) < gridDim.x) watchdog.look();
    }
    __syncthreads();
    out[blockIdx.x * 64 + t] = 2.0f * between[next * 64 + t] + 0.0f * row[t];
}

__device__ __forceinline__ void copy_piece(float* slot, const float* x, int bytes, mbarrier_t* full) {
    mbarrier_expect(full, bytes);
    bulk_copy(slot, x, bytes, full);
}

// out [128] = x [pieces, 128] summed over pieces, by one warp and a ring of two slots.
extern "C" __global__ void ring(float* out, const float* x, int pieces, int plant) {
    extern __shared__ __align__(16) unsigned char dynamic_shared[];
    float(*slots)[128] = reinterpret_cast<float(*)[128]>(dynamic_shared);
    mbarrier_t* full = reinterpret_cast<mbarrier_t*>(slots + 2);
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; ++i) {
            mbarrier_init(full + i);
            copy_piece(slots[i], x + i * 128, 512, full + i);
        }
    }
    __syncwarp();
    float sums[4] = {};
    for (int i = 0; i < pieces; ++i) {
        if (plant == COPY_NEVER_AWAITED && i == pieces - 1) break;
        bool late = plant == NO_WAIT_FOR_COPY && i == 1;
        while (!late && !mbarrier_completed(full + i % 2, i / 2 & 1)) {}
        if (plant == SLOT_TAKEN_TOO_EARLY && i == 1 && threadIdx.x == 0) copy_piece(slots[1], x + 3 * 128, 512, full + 1);
        for (int j = 0; j < 4; ++j) sums[j] += slots[i % 2][threadIdx.x * 4 + j];
        while (late && !mbarrier_completed(full + i % 2, i / 2 & 1)) {}
        __syncwarp();
        if (threadIdx.x == 0 && i + 2 < pieces && !(plant == SLOT_TAKEN_TOO_EARLY && i == 1))
            copy_piece(slots[i % 2], x + (i + 2) * 128, plant == MORE_BYTES_THAN_EXPECTED ? 520 : 512, full + i % 2);
    }
    for (int j = 0; j < 4; ++j) out[threadIdx.x * 4 + j] = sums[j];
}

// out [blocks, 16, 64] = rows y ... y + 16 and columns x ... of a matrix of 16 bits, by boxes of 8 x 64: each block of a
// cluster of two copies one of them to both.
extern "C" __global__ void boxes(unsigned short* out, const __grid_constant__ TensorMap map, int x, int y, int plant) {
    extern __shared__ __align__(1024) unsigned char dynamic_shared[];
    mbarrier_t *full = reinterpret_cast<mbarrier_t*>(dynamic_shared + 4096), *done = full + 1;
    int rank = cluster_rank();
    if (threadIdx.x == 0) {
        mbarrier_init(full);
        mbarrier_init(done, 2);
    }
    if (plant == NO_BARRIER_BEFORE) __syncthreads();
    else cluster_sync();
    if (threadIdx.x == 0) {
        mbarrier_expect(full, plant == FEWER_BYTES_EXPECTED ? 1024 : 2048);
        tensor_copy(dynamic_shared + (plant == BOX_AT_AN_ODD_PLACE ? 512 : 1024) * rank, map, x, y + 8 * rank, full,
                    plant == BOX_TO_ONE_BLOCK ? 1 << rank : 3);
    }
    while (!mbarrier_completed(full, 0)) {}
    for (int i = threadIdx.x; i < 128; i += 32) {
        for (int j = 0; j < 8; ++j) {
            int piece = i ^ i / 8 % 8;  // swizzled
            out[(blockIdx.x * 128 + i) * 8 + j] = reinterpret_cast<unsigned short*>(dynamic_shared)[piece * 8 + j];
        }
    }
    if (threadIdx.x == 0) {
        for (int block = 0; block < 2; ++block) mbarrier_arrive(done, block);
    }
    if (plant != NO_BARRIER_AFTER) cluster_sync();
    else __syncwarp();
}
