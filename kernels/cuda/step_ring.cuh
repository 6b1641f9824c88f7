// The list of operations of step.cu, and the stream of their weights: which rows of W a warp is dealt, and the ring of
// slots in shared memory through which they come.
//
// W is dealt out to the blocks in units, one at a time; the dealing goes on from one operation to the next, so that no
// block has more than one unit more than another in the whole step. A unit is
//   of 16 bits       a row (of GATE and STORE a pair of rows) for each warp, which reads it alone
//   of 8 and 4 bits  a tile of TILE rows (or half as many pairs), of which a warp copies a quarter, and reads a quarter of k
// In both each warp fills as many slots as the others, so that a slot has one number in the rings of all warps.
//
// A slot has CHUNK numbers of 16 bits of one row; or PIECE bytes of each of ROWS_OF_SLOT rows with their scales after
// them, rows ROW_STRIDE bytes apart, which leaves neighbours in other banks.
#pragma once

#include "common.cuh"
#include "cooperative.cuh"
#include "wgmma.cuh"

// One operation, as persistent.py packs it. What it has not is null or 0.
struct Operation {
    const void* weight;         // [outputs, inputs] of storage_t, or of integers as integers.cuh orders their bytes
    const __half* scales;       // [outputs, inputs / GROUP_OF_SCALE], of integers
    const storage_t* x;         // [rows, inputs]; of attention the queries, of HEADS the heads of q, k and v
    void* out;                  // [rows, outputs] of storage_t or float; of STORE and HEADS the queries
    const float* bias;          // [outputs]; of HEADS the gain of a key's norm, [D]
    const storage_t* residual;  // [rows, outputs]
    const float* gain;          // [inputs] of the norm before the product; of HEADS that of a query's norm, [D]
    storage_t* normed;          // [rows, inputs], where somebody reads what the norm gives
    storage_t *keys, *values;   // [pages, K, P, D]
    int kind, units, first;     // units of W, and the block that has the first of them
    int inputs, outputs, x_stride, out_stride, residual_stride, splits;
    int norm_threads;  // of a block of rms_norm: they determine the order of its sum
    short activation, bits;
    float epsilon;
};
static_assert(sizeof(Operation) == 128, "persistent.py packs it so");

enum Kind { ATTENTION, HEADS, PRODUCT, LOGITS, GATE, STORE };

constexpr int CHUNK = 2048, CHUNK_BYTES = CHUNK * sizeof(storage_t);  // of a row of W, in one slot
constexpr int TILE = 16, ROWS_OF_SLOT = TILE / WARPS;
constexpr int PIECE = 1024;  // bytes
constexpr int GROUP_OF_SCALE = 32, MOST_SCALE_BYTES = PIECE * 2 / GROUP_OF_SCALE * (int)sizeof(__half);
constexpr int ROW_STRIDE = PIECE + MOST_SCALE_BYTES + 64;
static_assert(ROW_STRIDE % 128 == 64, "16 bytes of 8 rows, four of each, lie in all banks");

__device__ __forceinline__ bool paired(const Operation& op) { return op.kind >= GATE; }

// Rows or pairs that are dealt out.
__device__ __forceinline__ int items_of(const Operation& op) { return paired(op) ? op.outputs / 2 : op.outputs; }

// The row of W that an item has first, or second.
__device__ __forceinline__ int row_of(const Operation& op, int item, int side, int half) {
    if (op.kind < GATE) return item;
    if (op.kind == GATE) return item + side * (op.outputs / 2);
    int output = 2 * item + side, in_head = output % HEAD_DIM;  // two numbers that turn together lie `half` apart
    return in_head < 2 * half ? output - in_head + in_head / 2 + in_head % 2 * half : output;
}

// A warp's weights, slot after slot in the order in which it needs them: through the units that its block is dealt of
// each operation, their rows, and the parts of these. All lanes have the same values.
struct Ring {
    const Operation* list;
    int count, half, warp;  // operations; the warp's number in its block
    unsigned char* slots;   // those of the block's first warp
    mbarrier_t* full;       // likewise
    int size, slot_bytes, slot, parity;
    int op, unit, side, at;  // of the part that the next free slot gets

    __device__ __forceinline__ int first_unit(const Operation& operation) const {
        int ahead = blockIdx.x - operation.first;
        return ahead < 0 ? ahead + gridDim.x : ahead;
    }

    __device__ __forceinline__ unsigned char* slot_of(int of, int number) const {
        return slots + (of * size + number) * slot_bytes;
    }

    // Go to the block's first unit of operation `op`, or of the next that has one for it.
    __device__ __forceinline__ void find_unit() {
        while (op < count && unit >= list[op].units) {
            if (++op < count) unit = first_unit(list[op]);
        }
    }

    // A row, or the last where the unit has none for this warp.
    __device__ __forceinline__ void fill_with_row(const Operation& operation, int into) {
        if (threadIdx.x % WARP == 0) {
            int item = min(unit * WARPS + warp, items_of(operation) - 1);
            size_t first = (size_t)row_of(operation, item, side, half) * operation.inputs + at;
            int bytes = min(CHUNK, operation.inputs - at) * (int)sizeof(storage_t);
            mbarrier_t* barrier = full + warp * size + into;
            mbarrier_expect(barrier, bytes);
            bulk_copy(slot_of(warp, into), static_cast<const storage_t*>(operation.weight) + first, bytes, barrier);
        }
        at += CHUNK;
        if (at < operation.inputs) return;
        at = 0;
        if (side++ < paired(operation)) return;
        side = 0;
        go_on();
    }

    // Rows of a tile: a lane begins to copy the numbers or the scales of one of them.
    __device__ __forceinline__ void fill_with_tile(const Operation& operation, int into) {
        int lane = threadIdx.x % WARP, bits = operation.bits, row_bytes = operation.inputs * bits / 8;
        int bytes = min(PIECE, row_bytes - at), of_scale = GROUP_OF_SCALE * bits / 8 / (int)sizeof(__half);
        mbarrier_t* barrier = full + warp * size + into;
        if (lane == 0) mbarrier_expect(barrier, ROWS_OF_SLOT * (bytes + bytes / of_scale));
        __syncwarp();
        if (lane < 2 * ROWS_OF_SLOT) {
            int dealt = unit * TILE + warp * ROWS_OF_SLOT + lane / 2, last = items_of(operation) - 1;
            int item = paired(operation) ? dealt / 2 : dealt;
            size_t row = row_of(operation, min(item, last), dealt % 2, half);
            unsigned char* to = slot_of(warp, into) + lane / 2 * ROW_STRIDE;
            if (lane % 2) {
                const char* scales = reinterpret_cast<const char*>(operation.scales);
                bulk_copy(to + PIECE, scales + (row * row_bytes + at) / of_scale, bytes / of_scale, barrier);
            } else {
                bulk_copy(to, static_cast<const char*>(operation.weight) + row * row_bytes + at, bytes, barrier);
            }
        }
        at += PIECE;
        if (at < row_bytes) return;
        at = 0;
        go_on();
    }

    __device__ __forceinline__ void go_on() {
        unit += gridDim.x;
        find_unit();
    }

    __device__ __forceinline__ void fill(int into) {
        if (op == count) return;
        const Operation& operation = list[op];
        if (!INTEGERS || operation.bits == 16)
            fill_with_row(operation, into);
        else
            fill_with_tile(operation, into);
    }

    // A barrier of the block must follow.
    __device__ __forceinline__ void begin() {
        if (threadIdx.x % WARP == 0)
            for (int i = 0; i < size; ++i) mbarrier_init(full + warp * size + i);
        __syncwarp();
        slot = parity = side = at = op = 0;
        unit = first_unit(list[0]);
        find_unit();
        for (int i = 0; i < size; ++i) fill(i);
    }

    // The oldest slot of a warp, once it is full.
    __device__ __forceinline__ const unsigned char* wait(int of) const {
        Watchdog watchdog;
        while (!mbarrier_completed(full + of * size + slot, parity)) watchdog.look();
        return slot_of(of, slot);
    }

    // All lanes have read the warp's slot, or all threads the slots of all warps (`shared`): on to the next.
    __device__ __forceinline__ void release(bool shared) {
        fence_proxy_async();  // the reads before, the copy after
        if (shared)
            __syncthreads();
        else
            __syncwarp();
        fill(slot);
        if (++slot == size) slot = 0, parity ^= 1;
    }
};
