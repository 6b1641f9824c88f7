// A product of many rows with a matrix of 8 or 4 bits on Hopper's tensor cores, without its 16-bit numbers in memory.
//
//   y = activation(x @ dequantize(W).T + b) + r                 # numbers of W rounded to 16 bits, once
//
// W is the left operand of wgmma, from registers: its numbers become 16 bits there, scaled. So 64 outputs are the rows of
// a product and 128 rows of x its columns, which lie in shared memory as in gemm_wgmma.cu. The order in which a matrix
// lies on the device (integers.cuh) is that of wgmma's left operand as well as of mma's: a lane copies what it multiplies
// itself, and nothing is exchanged. Of a block's outputs it has 2 or 4 neighbours, and with the lane four after it 4 or 8.
//
// A step is a chunk, 64 bytes of each row of W: 128 k of 4 bits, 64 of 8. It is multiplied 32 k at a time, in registers
// that take turns: while the tensor cores multiply those of one, the others are filled.
//
// Constants: TILE_OUTS, 128 or 256, outputs of a block; BITS, GROUP and OFFSETS, see integers.cuh; FLOAT_OUT, see
// epilogue.cuh.
//
// Floor: as in gemm.cu, with BITS / 8 + 2 / GROUP bytes for a number of W (more with offsets). Grid: equal shares of all
// tiles' steps, as in gemm_wgmma.cu, whose block, `partials` and `arrived` it has too. Dynamic shared memory: up to 200 kB.
//
// Versions: this one. Not measured. Expected by counting, for a step of 256 outputs in 4 bits: the tensor cores need 2,048
// clocks, copies 1,536 at the 32 bytes a clock that gemm_wgmma had, and a processor's share of the instructions that make
// 16 bits some 700 (bfloat16: 1,100). A layer of OPT-6.7B at batch 128 so takes 105 us in four products, by the model of
// linear.py, and a step 9.8 ms, where `expand` and 16-bit products take 19.7 and 16 bits alone 11.7, as measured on an H100.
#include "integers.cuh"
#include "splits.cuh"
#include "wgmma_tiles.cuh"

constexpr int TILES = TILE_OUTS / 128;        // of 64 outputs and all rows of x, of a warpgroup
constexpr int OWN = 2 * TILES;                // rows of W that a lane has numbers of: neighbours
constexpr int PIECE = 128 / BITS;             // numbers in 16 bytes of W
constexpr int DEPTH = 4 * PIECE;              // of k in a step
constexpr int GROUPS = DEPTH / GROUP;         // of a row in a step
constexpr int UNIT = 32;                      // of k that are multiplied at a time: two products
constexpr int UNITS = DEPTH / UNIT;           // of a step
constexpr int X_TILE = TILE_ROWS * PER_ROW;   // 16-byte pieces of 64 k of x
constexpr int X_PIECES = DEPTH / WIDTH * X_TILE;
constexpr int STAGE = X_PIECES + TILE_OUTS * 4;
constexpr int STAGES = (200 << 10) / 16 / STAGE;  // steps in shared memory
static_assert(UNITS % 2 == 0 && STAGES >= 4, "registers take turns; two steps are on their way");

using Sums = float[TILES][TILE_ROWS / 2];  // [tile][4j + 2 half + i]: row 8j + 2t + i of x, row 2 tile + half of the lane's
using Operands = unsigned[TILES * 2][4];   // of UNIT numbers of each row: [tile and 16 k]

// The first of this lane's rows of W in the block; they are dealt so that it has neighbours.
__device__ __forceinline__ int own_row() { return (threadIdx.x / WARP * 8 + threadIdx.x % WARP / 4) * OWN; }

// What belongs to a step of this lane's rows of W.
struct Belongings {
    __align__(8) __half scales[OWN][GROUPS];
    __align__(8) offset_t offsets[OWN][GROUPS];

    __device__ __forceinline__ void load(const Integers& w, int output, int outputs, int step) {
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            size_t at = (size_t)min(output + own_row() + i, outputs - 1) * w.groups;
            load_groups(scales[i], w.scales + at, w.groups, step);
            if (OFFSETS) load_groups(offsets[i], w.offsets + at, w.groups, step);
        }
    }

    // Those of the last group stand in for what is beyond the end of a row, where x is zero.
    template <class T>
    static __device__ __forceinline__ void load_groups(T (&to)[GROUPS], const T* row, int groups, int step) {
        constexpr int BYTES = GROUPS * sizeof(T);
        const T* from = row + step * GROUPS;
        if (BYTES == 8 && groups % GROUPS == 0) {
            *reinterpret_cast<uint2*>(to) = *reinterpret_cast<const uint2*>(from);
        } else if (BYTES == 4 && groups % GROUPS == 0) {
            *reinterpret_cast<unsigned*>(to) = *reinterpret_cast<const unsigned*>(from);
        } else {
#pragma unroll
            for (int i = 0; i < GROUPS; ++i) to[i] = row[min(step * GROUPS + i, groups - 1)];
        }
    }

    // Two numbers less their zero as they are multiplied: scaled, with their offset, and rounded once.
    __device__ __forceinline__ unsigned scaled(unsigned pair, int row, int group) const {
#if MINILLM_STORAGE == 16
        pair_t numbers = *reinterpret_cast<pair_t*>(&pair), scale = __half2half2(scales[row][group]);
#if OFFSETS == 16
        numbers = __hfma2(numbers, scale, __half2half2(offsets[row][group]));
#else
        numbers = __hmul2(numbers, scale);
#endif
        return *reinterpret_cast<unsigned*>(&numbers);
#else
        float scale = __half2float(scales[row][group]), offset = OFFSETS == 16 ? (float)offsets[row][group] : 0.0f;
        float low = __uint_as_float(pair << 16), high = __uint_as_float(pair & 0xffff0000u);
        return pack(fmaf(low, scale, offset), fmaf(high, scale, offset));
#endif
    }

    // What is subtracted from a group's numbers of 4 bits.
    __device__ __forceinline__ unsigned zero(int row, int group) const {
        return OFFSETS == 0 ? 8 : OFFSETS == 8 ? (unsigned)(unsigned char)offsets[row][group] : 0;
    }
};

// Begin to copy a step of this lane's rows of W: its word of each of four pieces. Zeros beyond the end.
__device__ __forceinline__ void copy_words(uint4* to, const Integers& w, int output, int outputs, int step) {
    int left = w.row_bytes() / 16 - 4 * step, t = threadIdx.x % 4;  // pieces
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        size_t row = min(output + own_row() + i, outputs - 1);
        const unsigned char* from = w.values + row * w.row_bytes() + step * 64;
        uint4* piece = to + i * THREADS + threadIdx.x;
        if (left >= 4) {
            cp_async_16(piece, from + t * 16);
        } else {  // the end of a row, where a lane has fewer words
            const unsigned* words = reinterpret_cast<const unsigned*>(from) + t * left;
            *piece = make_uint4(words[0], left > 1 ? words[1] : 0, left > 2 ? words[2] : 0, 0);
        }
    }
}

// Bring what belongs to a step of the block's rows to L2: it is loaded just before it is needed.
__device__ __forceinline__ void prefetch_groups(const Integers& w, int output, int outputs, int step) {
    int row = output + threadIdx.x % TILE_OUTS;
    if (row >= outputs) return;
    size_t at = (size_t)row * w.groups + step * GROUPS;
    if (threadIdx.x < TILE_OUTS) prefetch(w.scales + at);
    if (OFFSETS && threadIdx.x >= THREADS - TILE_OUTS) prefetch(w.offsets + at);
}

// Numbers 32 `unit` ... of each of this lane's rows as left operands.
__device__ __forceinline__ void dequantize(Operands& to, const uint4 (&words)[OWN], const Belongings& own, int unit) {
    constexpr int PARTS = 8 / BITS;  // of 16 numbers, in a word of each of four lanes
#pragma unroll
    for (int step = 0; step < 2; step += PARTS) {
#pragma unroll
        for (int row = 0; row < OWN; ++row) {
            int word = unit * 2 / PARTS + step, group = (unit * UNIT + step * 16) / GROUP;
            const uint4& w = words[row];
            unsigned numbers[PARTS][2];
            unpack(numbers, word == 0 ? w.x : word == 1 ? w.y : word == 2 ? w.z : w.w, own.zero(row, group));
#pragma unroll
            for (int part = 0; part < PARTS; ++part) {
                unsigned* operand = to[row / 2 * 2 + step + part] + row % 2;
                operand[0] = own.scaled(numbers[part][0], row, group);
                operand[2] = own.scaled(numbers[part][1], row, group);
            }
        }
    }
}

// The end of a tile's product. A lane and that of the rows of W after its own exchange half of what they have, so that
// each has twice as many outputs of one row of x.
__device__ __forceinline__ void finish_tile(Sums& sums, const Epilogue& e, int rows, int first_row, int first_output) {
    int odd = threadIdx.x / 4 % 2, t = threadIdx.x % 4;
#pragma unroll 1  // of a quarter of the sums: all at once are four times the code
    for (int first = first_row + 2 * t + odd; first < first_row + TILE_ROWS; first += TILE_ROWS / 4) {
#pragma unroll
        for (int j = 0; j < TILE_ROWS / 32; ++j) {
            float run[2 * OWN];
#pragma unroll
            for (int i = 0; i < OWN; ++i) {
                const float* both = &sums[i / 2][4 * j + i % 2 * 2];  // of rows 2t and 2t + 1 of x
                float other = __shfl_xor_sync(ALL_LANES, odd ? both[0] : both[1], 4);
                run[i] = odd ? other : both[0];
                run[OWN + i] = odd ? both[1] : other;
            }
            if (first + 8 * j < rows) finish_run(e, first + 8 * j, first_output + own_row() - odd * OWN, run);
        }
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
#pragma unroll
            for (int j = 0; j < TILE_ROWS * 3 / 8; ++j) sums[i][j] = sums[i][TILE_ROWS / 8 + j];
        }
    }
}

extern "C" __global__ __launch_bounds__(THREADS, 1) void gemm_wgmma_integers(
    out_t* out, const storage_t* x, const unsigned char* weight, const float* bias, const storage_t* residual, int rows,
    int inputs, int outputs, int x_stride, int out_stride, int residual_stride, int activation, const __half* scales,
    const void* offsets, float* partials, int* arrived) {
    extern __shared__ __align__(1024) unsigned char dynamic_shared[];
    uint4* stages = reinterpret_cast<uint4*>(dynamic_shared);
    follow();
    Epilogue e{out, bias, residual, outputs, out_stride, residual_stride, activation};
    Integers w{weight, scales, offsets, inputs};
    bool aligned = rows_are_aligned(x, x, inputs, x_stride);
    Work work(rows, TILE_OUTS, outputs, DEPTH, inputs);
    int at = work.first(blockIdx.x), stop = work.first(blockIdx.x + 1);
    int coming = at, tile_coming = at / work.steps, step_coming = at % work.steps;  // the next to be copied
    uint4* to = stages;
    auto begin = [&]() {
        if (coming < stop) {
            int row = work.row(tile_coming), output = work.output(tile_coming);
#pragma unroll 1  // registers are few here
            for (int i = 0; i < DEPTH / WIDTH; ++i) {
                int k = step_coming * DEPTH + i * WIDTH;
                if (aligned) copy_tile<TILE_ROWS, row_of, true>(to + i * X_TILE, x, row, rows, x_stride, k, inputs);
                else copy_tile<TILE_ROWS, row_of, false>(to + i * X_TILE, x, row, rows, x_stride, k, inputs);
            }
            copy_words(to + X_PIECES, w, output, outputs, step_coming);
            prefetch_groups(w, output, outputs, step_coming);
        }
        cp_async_commit();  // an empty group too, so that the number of groups tells the step
        ++coming;
        if (++step_coming == work.steps) ++tile_coming, step_coming = 0;
        to = to + STAGE == stages + STAGES * STAGE ? stages : to + STAGE;
    };
    for (int i = 0; i < STAGES - 2; ++i) begin();

    const uint4* stage = stages;
    Belongings own;
    Operands operands[2];  // of units that are even, and odd
    uint4 words[OWN];
    // Wait for the stage, and make the first numbers of its step operands.
    auto meet = [&]() {
        cp_async_wait<STAGES - 3>();
        fence_proxy_async();
        __syncthreads();  // the stage is there for all, and all have waited for the products of the step before the last
#pragma unroll
        for (int i = 0; i < OWN; ++i) words[i] = stage[X_PIECES + i * THREADS + threadIdx.x];
        dequantize(operands[0], words, own, 0);
        wgmma_hold(operands[0]);
    };
    if (at < stop) {
        own.load(w, work.output(at / work.steps), outputs, at % work.steps);
        meet();
    }
    while (at < stop) {
        int tile = at / work.steps, until = min(stop, (tile + 1) * work.steps);
        Sums sums = {};
#pragma unroll
        for (int i = 0; i < TILES; ++i) wgmma_hold(sums[i]);
        for (; at < until; ++at) {
            const uint4* here = stage;
            stage = stage + STAGE == stages + STAGES * STAGE ? stages : stage + STAGE;
#pragma unroll
            for (int unit = 0; unit < UNITS; ++unit) {
                wgmma_fence();
#pragma unroll
                for (int step = 0; step < 2; ++step) {
                    int k = unit * UNIT + step * 16;
                    auto right = swizzled_tile(here + k / WIDTH * X_TILE + k % WIDTH / VECTOR);
#pragma unroll
                    for (int i = 0; i < TILES; ++i)
                        wgmma_64xNx16<TILE_ROWS, false>(sums[i], operands[unit % 2][2 * i + step], right);
                }
                wgmma_commit();
                // While the tensor cores compute. After the last step this prepares what nobody multiplies.
                if (unit == 0) begin();
                if (unit + 1 < UNITS) {
                    dequantize(operands[(unit + 1) % 2], words, own, unit + 1);
                    wgmma_hold(operands[(unit + 1) % 2]);
                } else {
                    meet();
                }
                if (unit + 2 == UNITS) {
                    int next = min(at + 1, stop - 1);
                    own.load(w, work.output(next / work.steps), outputs, next % work.steps);
                }
                // Here, before the loop goes on: ptxas runs products one by one whose registers it cannot follow.
                wgmma_wait<0>();
            }
        }
#pragma unroll
        for (int i = 0; i < TILES; ++i) wgmma_hold(sums[i]);
        int first = work.block_of(tile * work.steps), last = work.block_of((tile + 1) * work.steps - 1);
        // A block has room for the sums of a tile that it begins with, and of one that another ends.
        auto place = [&](int part) { return 2 * (first + part) + (part == 0); };
        auto& flat = reinterpret_cast<float(&)[TILES * TILE_ROWS / 2]>(sums);
        if (add_parts<TILES * TILE_ROWS / 2, THREADS>(flat, partials, arrived + tile, blockIdx.x - first,
                                                      last - first + 1, place))
            finish_tile(sums, e, rows, work.row(tile), work.output(tile));
    }
    cp_async_wait<0>();
}
