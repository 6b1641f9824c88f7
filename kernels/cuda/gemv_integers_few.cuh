// The sums of gemv.cu for 1 to 4 rows of x and a matrix of 8 or 4 bits: as gemv_integers.cuh, but nothing is exchanged
// between lanes. Included by gemv.cu for gemv_mma and its fused form where ROWS is 4 or less.
//
// A lane loads 16 bytes of a row of W, a piece: 16 numbers of 8 bits or 32 of 4, all of one group. mma adds up what the
// four lanes of a row have, which their scales forbid. But it has eight columns, more than there are rows of x: so W is
// its left operand, 16 rows of it, and a column is one row of x where lane t of each four has its k, and zeros elsewhere.
// Columns 2t and 2t + 1 are two rows of x for the pieces of lane t, and the two sums come out in lane t: it scales them
// itself. Of 4 rows there are two such products. The order of k is free as long as W and x agree in it.
//
// x comes through shared memory, where each warp puts its own part, with a row of zeros: so the lanes that have nothing
// for a column read that one, and neither x nor its end need masks.
//
// Constants: SPLITS, the warps of a block, which split k; STEPS, the pieces of a row of W that a lane has loaded before
// the first is used: of two rows, so twice as many are in flight in each lane. The first are loaded before the block waits
// for x. OUTS is 16; 32 were no faster anywhere.
//
// Instructions for a number of W (8 bits, 1 row): 1.3 to make it 16 bits, 0.13 for mma, 0.5 for the rest. At
// 3 TB/s a processor is sent 13 numbers of 8 bits or 24 of 4 in a cycle, and has 128 instructions of lanes for them. The
// exchange between lanes of gemv_integers.cuh takes as many again, and more of a warp's time: 12 shuffles and as many
// waits for 1 kB of W. Bits depend on SPLITS, STEPS and whether ROWS is 4, so on the shape of W and on the rows.
//
// Versions, as measured on an H100 (3.0 TB/s) with 1 row, of OPT-1.3B qkv, out, up, down and OPT-6.7B qkv, down, in us:
//                            8 bits                            4 bits                             floor
//   1. gemv_integers.cuh     9.6  6.3 10.4 18.3                7.6  4.6  8.3 12.5                 8 bits: 4.4 1.5 5.9 5.9
//   2. this one              7.0  3.9  8.7  9.1  21.7 27.2     5.2  3.2  5.7  6.4  12.5 16.4      and 17.7 23.6; 4: half
// With it a step of OPT-1.3B takes 0.99 and 0.84 in place of 1.56 and 1.29 ms, and 1.37 in 16 bits.

constexpr int PIECE = 128 / BITS;         // numbers in 16 bytes
constexpr int RUN = GROUP / PIECE;        // pieces of one group: 1, 2 or 4
constexpr int PAIRS = (ROWS + 1) / 2;     // of rows of x
constexpr int CHAINS = PAIRS == 1 ? 2 : 1;  // of mma, one waiting for the other; of 4 rows there are two anyway
constexpr int ROUND = WARPS * STEPS * 4;  // pieces of a row of W that a block has in flight
static_assert(OUTS == 16 && RUN >= 1, "mma has 16 rows, and a piece is of one group");

// The pieces of W that a lane has in flight, and what belongs to them: of two rows.
struct Begun {
    uint4 raw[STEPS][2];
    __half scale[STEPS][2];
    offset_t offset[STEPS][2];

    // Pieces from number `begin` on of each row; beyond the end the last, where x is zero.
    __device__ __forceinline__ void load(const Integers& w, int first, int outputs, int begin) {
        int g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
#pragma unroll
        for (int s = 0; s < STEPS; ++s) {
            int piece = min(begin + s * 4 + t, w.groups * RUN - 1);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                // One number that leads to all, of 32 bits: a matrix has less than 2^36 numbers.
                unsigned row = weight_row(first + half * 8 + g, outputs);
                unsigned at = row * (w.groups * RUN) + piece;
                raw[s][half] = __ldcs(reinterpret_cast<const uint4*>(w.values) + at);
                scale[s][half] = w.scales[at / RUN];
                if (OFFSETS) offset[s][half] = w.offsets[at / RUN];
            }
        }
    }
};

// A warp's part of x in a round, in shared memory: its rows, and one of zeros.
struct Segment {
    static constexpr int NUMBERS = STEPS * 4 * PIECE, EACH = (NUMBERS + WARP * VECTOR - 1) / (WARP * VECTOR);

    __align__(16) storage_t rows[ROWS + 1][NUMBERS + VECTOR];  // padded: neighbours are in other banks
};

// Fill it with x from k on, by its warp.
__device__ __forceinline__ void bring(Segment& to, const storage_t* x, int k, int rows, int inputs, int x_stride) {
    if (rows_are_aligned(x, x, inputs, x_stride)) {
        uint4 v[ROWS][Segment::EACH];
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
#pragma unroll
            for (int i = 0; i < Segment::EACH; ++i) {
                int at = (i * WARP + (int)threadIdx.x % WARP) * VECTOR;
                v[r][i] = load_vector<true, false>(x + (size_t)min(r, rows - 1) * x_stride, k + at, inputs);
            }
        }
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
#pragma unroll
            for (int i = 0; i < Segment::EACH; ++i) {
                int at = (i * WARP + (int)threadIdx.x % WARP) * VECTOR;
                if (at < Segment::NUMBERS) *reinterpret_cast<uint4*>(&to.rows[r][at]) = v[r][i];
            }
        }
    } else {
        for (int r = 0; r < rows; ++r) {
#pragma unroll 4
            for (int at = threadIdx.x % WARP; at < Segment::NUMBERS; at += WARP)
                to.rows[r][at] = k + at < inputs ? x[(size_t)r * x_stride + k + at] : storage_t(0.0f);
        }
    }
}

// The sums over this warp's part of k. sums[p][i]: row 2 p + i % 2 of x, row g + i / 2 * 8 of W.
__device__ __forceinline__ void accumulate(float (&sums)[PAIRS][4], const storage_t* x, const Integers& w,
                                           int first, int rows, int inputs, int outputs, int x_stride, Begun& begun) {
    constexpr unsigned ONE = MINILLM_STORAGE == 16 ? 0x3c003c00u : 0x3f803f80u;
    int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4, pieces = w.groups * RUN;
    __shared__ Segment segments[WARPS];
    Segment& segment = segments[threadIdx.x / WARP];
    const storage_t* column[PAIRS];  // of this lane as a right operand
#pragma unroll
    for (int p = 0; p < PAIRS; ++p) {
        int row = 2 * p + g % 2;
        column[p] = &segment.rows[g / 2 == t && row < ROWS ? row : ROWS][g / 2 * PIECE];
    }
    int begin = threadIdx.x / WARP * STEPS * 4;
    for (int at = lane * VECTOR; at < Segment::NUMBERS; at += WARP * VECTOR)
        *reinterpret_cast<uint4*>(&segment.rows[ROWS][at]) = make_uint4(0, 0, 0, 0);
    for (; begin < pieces; begin += ROUND) {
        __syncwarp();
        bring(segment, x, begin * PIECE, rows, inputs, x_stride);
        __syncwarp();
#pragma unroll
        for (int s = 0; s < STEPS; ++s) {
            unsigned v[PAIRS][PIECE / 2];
#pragma unroll
            for (int p = 0; p < PAIRS; ++p) {
#pragma unroll
                for (int i = 0; i < PIECE / VECTOR; ++i) {
                    uint4 bits = *reinterpret_cast<const uint4*>(column[p] + s * 4 * PIECE + i * VECTOR);
                    v[p][4 * i] = bits.x, v[p][4 * i + 1] = bits.y, v[p][4 * i + 2] = bits.z, v[p][4 * i + 3] = bits.w;
                }
            }
            float of_x[PAIRS][4] = {};
            unsigned words[2][4], zeros[2];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const uint4& raw = begun.raw[s][half];
                words[half][0] = raw.x, words[half][1] = raw.y, words[half][2] = raw.z, words[half][3] = raw.w;
                zeros[half] = OFFSETS == 8 ? (unsigned)(unsigned char)begun.offset[s][half] : 8;
                if (OFFSETS == 16) zeros[half] = 0;
            }
            float of_piece[PAIRS][CHAINS][4] = {};
#pragma unroll
            for (int word = 0; word < 4; ++word) {
                unsigned low[8 / BITS][2], high[8 / BITS][2];
                unpack(low, words[0][word], zeros[0]);
                unpack(high, words[1][word], zeros[1]);
#pragma unroll
                for (int half = 0; half < 8 / BITS; ++half) {
                    unsigned a[4] = {low[half][0], high[half][0], low[half][1], high[half][1]};
                    unsigned ones[4] = {ONE, ONE, ONE, ONE};
#pragma unroll
                    for (int p = 0; p < PAIRS; ++p) {
                        unsigned b[2] = {v[p][half * 8 + word * 2], v[p][half * 8 + word * 2 + 1]};
                        mma_16816(of_piece[p][word % CHAINS], a, b);
                        if (OFFSETS == 16) mma_16816(of_x[p], ones, b);
                    }
                }
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float scale = __half2float(begun.scale[s][i / 2]);
#pragma unroll
                for (int p = 0; p < PAIRS; ++p) {
                    float& sum = sums[p][i];
                    sum = fmaf(scale, of_piece[p][0][i] + (CHAINS > 1 ? of_piece[p][CHAINS - 1][i] : 0.0f), sum);
                    if (OFFSETS == 16) sum = fmaf((float)begun.offset[s][i / 2], of_x[p][i], sum);
                }
            }
        }
        if (begin + ROUND < pieces) begun.load(w, first, outputs, begin + ROUND);
    }
#pragma unroll
    for (int p = 0; p < PAIRS; ++p) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float& sum = sums[p][i];
            sum += __shfl_xor_sync(ALL_LANES, sum, 1);
            sum += __shfl_xor_sync(ALL_LANES, sum, 2);
        }
    }
}

// Visit each of a warp's sums with its place, by one of the four lanes that have it.
template <class Visit>
__device__ __forceinline__ void for_each_sum(float (&sums)[PAIRS][4], Visit visit) {
    int g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int p = 0; p < PAIRS; ++p) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (t == i && 2 * p + i % 2 < ROWS) visit(2 * p + i % 2, g + i / 2 * 8, sums[p][i]);
        }
    }
}
