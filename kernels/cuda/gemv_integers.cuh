// The sums of gemv.cu for a matrix of 8 or 4 bits and 1 to 64 rows of x: the numbers become 16 bits in registers, exactly,
// tensor cores add up a group of them in float, and the sum is scaled. Included by gemv.cuh where BITS is defined,
// for gemv_mma, experts_mma and fused_mma.
//
//   y = x @ dequantize(W).T                            # of each group g: scale * ((q - zero) @ x) + offset * sum(x)
//
// W is the left operand of mma: 16 of its rows by 16 k; the right one is 8 rows of x. So a lane's sums are of two rows of
// W, g and g + 8, whose scales it loads itself. That all four lanes of a row have numbers of the same group is the work of
// `interleave` (expand.cu), once, when a matrix is sent to the device (integers.cuh has the order): a lane's 16 bytes are a
// quarter of each of four pieces, in the order in which mma wants them. Nothing is exchanged between lanes.
//
// x and W come through shared memory by asynchronous copies, in STAGES stages: while one is multiplied, the others are on
// the way. The first copies of W begin before the block waits for x. A stage has 64 bytes of each of the block's rows of
// W for each of the SPLITS parts of k, and x for these. WIDE warps side by side share x: it is read from L2 once for
// OUTS rows of W.
//
// Constants: ROWS, 4, 8, 16, 32 or 64 (with offsets or groups of 16 up to 32, for registers); OUTS, the rows of W of a
//            block: 16, 32, 64 or 128, of which a warp has 16 or 32; SPLITS, the parts of k, each with OUTS / 32 warps;
//            STAGES. backends/cuda/integers.py chooses them by shape. Grid and block: as of gemv_mma in gemv.cu.
// Shared:    STAGES * SPLITS * (ROWS * (2 * 512 / BITS + 16) + 64 * OUTS) bytes, dynamically.
//
// Bytes and floor. W: out * in * (BITS / 8 + 2 / GROUP) from device memory; x from L2 for each block: 2 ROWS / OUTS bytes
// for each number of W, as many as of W itself at 4 rows and 16 outputs or at 32 rows and 128 outputs with 4 bits. Under way on
// a processor: (STAGES - 1) of STAGES stages, 16 to 48 kB of W. 4096 x 16384 in 4 bits: 38 MB, 12.6 us at 3.0 TB/s.
//
// Instructions of a warp for 2,048 numbers of 4 bits, 85 cycles of a processor's share of 3 TB/s: 88 to make them 16 bits,
// 8 mma, 4 ldmatrix and 16 fma for each 8 rows of x, some 40 for the rest.
//
// Versions:
//   1. W as right operand, scales and words exchanged by shuffles, x from L1 just before each mma: 5 to 64 rows took 1.8 to
//      4 times the floor (OPT-6.7B up, 32 rows: 56 us with 4 bits, 65 with 8).
//   2. for 1 to 4 rows W as left operand in row-major order, a lane's pieces kept apart by zeros in x. Measured on an H100
//      with 1 row, OPT-1.3B qkv, out, up, down and OPT-6.7B qkv, down, in us:
//        8 bits 7.0  3.9  8.7  9.1  21.7 27.2  (floor 4.4 1.5 5.9 5.9 17.7 23.6); 4 bits 5.2  3.2  5.7  6.4  12.5 16.4  (half)
//   3. this one, in place of both. Not yet run on a GPU. Expected: 1 to 4 rows as version 2; a step of OPT-6.7B in 4 bits
//      at 8 rows 2.5 in place of 4.0 ms, at 32 rows 3.4 in place of 7.1.

constexpr int TILES = OUTS > 16 ? 2 : 1;          // of 16 rows of W, of a warp
constexpr int WIDE = OUTS / (16 * TILES);         // warps side by side
constexpr int WARPS = WIDE * SPLITS;
constexpr int COLUMNS = (ROWS + 7) / 8;           // tiles of 8 rows of x
constexpr int PIECE = 128 / BITS;                 // numbers in 16 bytes of W
constexpr int CHUNK = 4 * PIECE;                  // in 64
constexpr int GROUPS = CHUNK / GROUP;             // of a chunk: 1, 2 or 4
constexpr int UNIT = GROUP > 32 ? GROUP : 32;     // numbers that are multiplied before sums are scaled: a group, or two
constexpr int RUN = UNIT / PIECE;                 // pieces of a unit: 1, 2 or 4
constexpr int STEPS = UNIT / 16;                  // products of mma in it
constexpr int SCALED = UNIT / GROUP;              // its groups
constexpr int CHAINS = SCALED > 1 || TILES * COLUMNS == 1 ? 2 : 1;  // of mma, one waiting for the other: two of two groups
constexpr int UNROLLED = COLUMNS >= 4 ? 1 : TILES > 1 ? 2 : 4;  // units that are multiplied at a time, by registers
// Blocks on a processor, likewise; of few rows 16 warps, of experts 12 where the compiler takes more registers.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
constexpr int RESIDENT_EXPERTS = ROWS <= 4 && WARPS <= 12 ? 12 / WARPS : 1;
#else
constexpr int RESIDENT_EXPERTS = ROWS <= 4 ? 16 / WARPS : 1;
#endif
constexpr int RESIDENT = ROWS <= 4 ? 16 / WARPS : ROWS <= 8 && OFFSETS < 16 ? 2 : 1;

constexpr int X_STRIDE = CHUNK + VECTOR;          // padded: neighbours are in other banks
constexpr int X_BYTES = ROWS * X_STRIDE * 2, W_BYTES = OUTS * 64, STAGE = SPLITS * (X_BYTES + W_BYTES);
static_assert(GROUPS >= 1 && RUN >= 1, "a chunk has whole groups, and a unit whole pieces");
static_assert(ROWS * OUTS * 4 <= STAGES * (X_BYTES + W_BYTES), "in the end the sums lie where the stages were");

constexpr bool ROWS_OF_BLOCKS = true;            // blocks of the second dimension of the grid have the next ROWS of x

extern __shared__ __align__(16) unsigned char dynamic_shared[];

using Sums = float[COLUMNS][TILES][4];  // [c][i][j]: row c * 8 + 2t + j % 2 of x, row i * 16 + g + j / 2 * 8 of W
using Partial = float[ROWS][OUTS];      // the sums of one of SPLITS parts, in `dynamic_shared` in the end

// Where this warp is in its block, and this lane in its warp (as in tensor_core.cuh).
struct Place {
    int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    int split = threadIdx.x / WARP / WIDE, side = threadIdx.x / WARP % WIDE;

    __device__ __forceinline__ storage_t* x(int stage) const {
        return reinterpret_cast<storage_t*>(dynamic_shared + stage * STAGE + split * X_BYTES);
    }
    // Of this lane's row of W, g of half a tile.
    __device__ __forceinline__ unsigned char* weights(int stage, int tile, int half) const {
        int row = (side * TILES + tile) * 16 + half * 8 + g;
        return dynamic_shared + stage * STAGE + SPLITS * X_BYTES + split * W_BYTES + row * 64 + t * 16;
    }
};

// Begin to copy chunk number `chunk` of this warp's rows of W: each lane what it reads itself. Zeros beyond the end.
template <class Order>
__device__ __forceinline__ void copy_weights(const Place& at, const Weight<Order>& w, int first, int chunk, int stage) {
    int left = w.row_bytes() / 16 - 4 * chunk;  // pieces
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            size_t row = w.row(first + (at.side * TILES + tile) * 16 + half * 8 + at.g);
            const unsigned char* from = w.values + row * w.row_bytes() + (left > 0 ? chunk * 64 : 0);
            unsigned char* to = at.weights(stage, tile, half);
            if (left >= 4 || left <= 0) {
                cp_async_16(to, left > 0 ? from + at.t * 16 : w.values, left > 0);
            } else {  // the end of a row, where a lane has fewer words
                uint4 words = make_uint4(0, 0, 0, 0);
                const unsigned* own = reinterpret_cast<const unsigned*>(from) + at.t * left;
                words.x = own[0];
                if (left > 1) words.y = own[1];
                if (left > 2) words.z = own[2];
                *reinterpret_cast<uint4*>(to) = words;
            }
        }
    }
}

// Begin to copy x from k on, by all warps that share it. Zeros beyond its end; rows that are not there stay undefined, and
// so do their sums.
__device__ __forceinline__ void copy_x(const Place& at, const storage_t* x, int rows, int inputs, int x_stride, int k,
                                       int stage, bool aligned) {
    constexpr int VECTORS = CHUNK / VECTOR;  // of a row
    storage_t* stored = at.x(stage);
#pragma unroll 4
    for (int i = at.side * WARP + at.lane; i < rows * VECTORS; i += WIDE * WARP) {
        int row = i / VECTORS, column = i % VECTORS * VECTOR, from = k + column;
        storage_t* to = stored + row * X_STRIDE + column;
        if (aligned) {
            cp_async_16(to, from < inputs ? x + (size_t)row * x_stride + from : x, from < inputs);
        } else {
#pragma unroll
            for (int j = 0; j < VECTOR; ++j)
                to[j] = from + j < inputs ? x[(size_t)row * x_stride + from + j] : storage_t(0.0f);
        }
    }
}

// What belongs to a chunk of this lane's rows of W.
struct Belongings {
    __align__(8) __half scales[TILES][2][GROUPS];
    __align__(8) offset_t offsets[TILES][2][GROUPS];

    template <class Order>
    __device__ __forceinline__ void load(const Place& at, const Weight<Order>& w, int first, int chunk) {
        chunk = min(chunk, (w.groups - 1) / GROUPS);  // beyond the end the last, where x is zero
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                size_t row = w.row(first + (at.side * TILES + tile) * 16 + half * 8 + at.g);
                const __half* scale = w.scales + row * w.groups;
                const offset_t* offset = w.offsets + row * w.groups;
                if (w.groups % GROUPS == 0) {
                    load_together(scales[tile][half], scale + chunk * GROUPS);
                    if (OFFSETS) load_together(offsets[tile][half], offset + chunk * GROUPS);
                } else {
#pragma unroll
                    for (int i = 0; i < GROUPS; ++i) {
                        int group = min(chunk * GROUPS + i, w.groups - 1);
                        scales[tile][half][i] = scale[group];
                        if (OFFSETS) offsets[tile][half][i] = offset[group];
                    }
                }
            }
        }
    }

    // GROUPS neighbours in one load: 1 to 8 bytes.
    template <class T>
    static __device__ __forceinline__ void load_together(T (&to)[GROUPS], const T* from) {
        constexpr int BYTES = GROUPS * sizeof(T);
        if (BYTES == 8) *reinterpret_cast<uint2*>(to) = *reinterpret_cast<const uint2*>(from);
        if (BYTES == 4) *reinterpret_cast<unsigned*>(to) = *reinterpret_cast<const unsigned*>(from);
        if (BYTES == 2) *reinterpret_cast<unsigned short*>(to) = *reinterpret_cast<const unsigned short*>(from);
        if (BYTES == 1) to[0] = from[0];
    }

    // What is subtracted from the first group's numbers of 4 bits.
    __device__ __forceinline__ unsigned zero(int tile, int half) const {
        return OFFSETS == 0 ? 8 : OFFSETS == 8 ? (unsigned)(unsigned char)offsets[tile][half][0] : 0;
    }

    __device__ __forceinline__ void next_group() {
#pragma unroll
        for (int i = 0; i < 2 * TILES * GROUPS; ++i) {
            if (i % GROUPS == GROUPS - 1) continue;
            (&scales[0][0][0])[i] = (&scales[0][0][0])[i + 1];
            if (OFFSETS) (&offsets[0][0][0])[i] = (&offsets[0][0][0])[i + 1];
        }
    }
};

// Take the first of four words. So a loop that is not unrolled needs no index.
__device__ __forceinline__ unsigned first_word(uint4& words) {
    unsigned first = words.x;
    words = make_uint4(words.y, words.z, words.w, 0);
    return first;
}

// Add the products of a stage.
__device__ __forceinline__ void multiply(const Place& at, Sums& sums, Belongings& own, int stage) {
    constexpr unsigned ONE = MINILLM_STORAGE == 16 ? 0x3c003c00u : 0x3f803f80u;
    // A lane names a row of x for ldmatrix, and 8 k of 32.
    const storage_t* x = at.x(stage) + at.lane % 8 % ROWS * X_STRIDE + at.lane / 8 * 8;
    uint4 raw[TILES][2];
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
        for (int half = 0; half < 2; ++half)
            raw[tile][half] = *reinterpret_cast<const uint4*>(at.weights(stage, tile, half));
    }
#pragma unroll UNROLLED
    for (int unit = 0; unit < CHUNK / UNIT; ++unit) {
        unsigned a[TILES][STEPS][4];
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
            for (int piece = 0; piece < RUN; ++piece) {
                unsigned low[8 / BITS][2], high[8 / BITS][2];
                unpack(low, first_word(raw[tile][0]), own.zero(tile, 0));
                unpack(high, first_word(raw[tile][1]), own.zero(tile, 1));
#pragma unroll
                for (int part = 0; part < 8 / BITS; ++part) {
                    unsigned* to = a[tile][piece * (8 / BITS) + part];
                    to[0] = low[part][0], to[1] = high[part][0], to[2] = low[part][1], to[3] = high[part][1];
                }
            }
        }
#pragma unroll
        for (int column = 0; column < COLUMNS; ++column) {
            float of_group[TILES][CHAINS][4] = {}, of_x[SCALED][4] = {};
#pragma unroll
            for (int step = 0; step < STEPS; step += 2) {
                unsigned b[4], ones[4] = {ONE, ONE, ONE, ONE};
                ldmatrix_x4(b, x + column * 8 * X_STRIDE + unit * UNIT + step * 16);
#pragma unroll
                for (int i = 0; i < 2; ++i) {
#pragma unroll
                    for (int tile = 0; tile < TILES; ++tile)
                        mma_16816(of_group[tile][i % CHAINS], a[tile][step + i], b + 2 * i);
                    if (OFFSETS == 16) mma_16816(of_x[i % SCALED], ones, b + 2 * i);
                }
            }
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    float& sum = sums[column][tile][j];
                    const float(&part)[CHAINS][4] = of_group[tile];
#pragma unroll
                    for (int i = 0; i < SCALED; ++i) {
                        float total = SCALED < CHAINS ? part[0][j] + part[CHAINS - 1][j] : part[i][j];
                        sum = fmaf(__half2float(own.scales[tile][j / 2][i]), total, sum);
                        if (OFFSETS == 16) sum = fmaf((float)own.offsets[tile][j / 2][i], of_x[i][j], sum);
                    }
                }
            }
        }
#pragma unroll
        for (int i = 0; i < SCALED; ++i) own.next_group();
    }
}

// Begin to copy the first chunks of W, while the block waits for x.
template <class Order>
__device__ __forceinline__ void begin_weights(const Weight<Order>& w, int first) {
    Place at;
#pragma unroll 1  // or the addresses of all stages stay in registers
    for (int stage = 0; stage < STAGES - 1; ++stage)
        copy_weights(at, w, first, stage * SPLITS + at.split, stage);
}

// The sums over this warp's part of k, after begin_weights: chunks split, split + SPLITS, ...
template <class Order>
__device__ __forceinline__ void accumulate(Sums& sums, const storage_t* x, const Weight<Order>& w, int first, int rows,
                                           int x_stride) {
    Place at;
    bool aligned = rows_are_aligned(x, x, w.inputs, x_stride);
    int rounds = ((w.groups + GROUPS - 1) / GROUPS + SPLITS - 1) / SPLITS;
    Belongings own, next;
    next.load(at, w, first, at.split);
#pragma unroll 1
    for (int stage = 0; stage < STAGES - 1; ++stage) {
        copy_x(at, x, rows, w.inputs, x_stride, (stage * SPLITS + at.split) * CHUNK, stage, aligned);
        cp_async_commit();
    }
    int stage = 0, free = STAGES - 1;  // the stage to multiply, and the one to fill
    for (int round = 0; round < rounds; ++round) {
        own = next;
        cp_async_wait<STAGES - 2>();
        // Others' copies have come, and nobody still reads the stage of the round before.
        if (WIDE > 1) __syncthreads();
        else __syncwarp();
        if (round + STAGES - 1 < rounds) {
            int chunk = (round + STAGES - 1) * SPLITS + at.split;
            copy_weights(at, w, first, chunk, free);
            copy_x(at, x, rows, w.inputs, x_stride, chunk * CHUNK, free, aligned);
        }
        cp_async_commit();  // also of nothing: groups are counted
        if (round + 1 < rounds) next.load(at, w, first, (round + 1) * SPLITS + at.split);
        multiply(at, sums, own, stage);
        free = stage;
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
    cp_async_wait<0>();
}

// The sums of all warps in `dynamic_shared`, for when all threads are past a barrier.
__device__ __forceinline__ void share(const Sums& sums) {
    Place at;
    __syncthreads();  // until then stages are read
    Partial& to = reinterpret_cast<Partial*>(dynamic_shared)[at.split];
#pragma unroll
    for (int column = 0; column < COLUMNS; ++column) {
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                int row = column * 8 + 2 * at.t + j % 2;
                if (row < ROWS) to[row][(at.side * TILES + tile) * 16 + at.g + j / 2 * 8] = sums[column][tile][j];
            }
        }
    }
}

__device__ __forceinline__ float shared_sum(int row, int output) {
    float sum = 0.0f;
#pragma unroll
    for (int split = 0; split < SPLITS; ++split) sum += reinterpret_cast<Partial*>(dynamic_shared)[split][row][output];
    return sum;
}
