// The sums of gemv.cu for a matrix of 8 or 4 bits: the numbers become 16 bits in registers, exactly, and so the sum over a
// group is that of float; then it is scaled. Included by gemv.cu where BITS is defined, for gemv_mma and its fused
// form, of more than 4 rows.
//
// A lane loads 16 bytes of a row of W, and its group's scale: four lanes together 64 numbers of 8 bits or 128 of 4. mma
// wants numbers of one group from all four, or their sum could not be scaled; so they exchange words until each has one
// of every lane's. Scales belong to lanes by rows of W and are wanted by columns of the result: two shuffles.
//
// With float16 offsets the sum of x over a group is wanted too: one product more with a matrix of ones.

constexpr int PIECE = 128 / BITS;        // numbers in 16 bytes
constexpr int STEP = 4 * PIECE;          // of k, of the four lanes of a row
constexpr int RUN = GROUP / PIECE;       // pieces of one group: 1, 2 or 4
static_assert(RUN >= 1 && RUN <= 4, "a group is not split between two steps of k");

// What a lane has loaded of its row of W, and what belongs to it.
struct Part {
    uint4 raw;
    float scale;
    offset_t offset;

    // Piece number `piece` of row `row`; zeros beyond the end.
    __device__ __forceinline__ void load(const Integers& w, int row, int piece) {
        int group = min(piece / RUN, w.groups - 1);
        unsigned mask = piece / RUN < w.groups ? 0xffffffffu : 0u;
        const uint4* from = reinterpret_cast<const uint4*>(w.values + (size_t)row * w.row_bytes());
        raw = __ldcs(from + (piece & (int)mask));
        raw = make_uint4(raw.x & mask, raw.y & mask, raw.z & mask, raw.w & mask);
        size_t at = (size_t)row * w.groups + group;
        scale = __half2float(w.scales[at]);
        if (OFFSETS) offset = w.offsets[at];
    }
};

// Words of four neighbouring lanes, dealt out again: word j of lane t becomes word t of lane j.
__device__ __forceinline__ void transpose(unsigned (&words)[4]) {
#pragma unroll
    for (int bit = 1; bit < 4; bit *= 2) {
        bool upper = threadIdx.x & bit;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            int low = bit == 1 ? 2 * i : i, high = low + bit;
            unsigned sent = __shfl_xor_sync(ALL_LANES, upper ? words[low] : words[high], bit);
            words[low] = upper ? sent : words[low];
            words[high] = upper ? words[high] : sent;
        }
    }
}

// Four numbers of a row of x from k on, zeros beyond its end.
template <bool ALIGNED>
__device__ __forceinline__ uint2 load_four(const storage_t* row, int k, int inputs) {
    uint2 bits = make_uint2(0, 0);
    if (ALIGNED) {
        unsigned mask = k < inputs ? 0xffffffffu : 0u;
        bits = *reinterpret_cast<const uint2*>(row + (k & (int)mask));
        bits = make_uint2(bits.x & mask, bits.y & mask);
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (k + i < inputs) reinterpret_cast<storage_t*>(&bits)[i] = row[k + i];
        }
    }
    return bits;
}

__device__ __forceinline__ bool rows_are_aligned(const storage_t* x, const Integers&, int inputs, int x_stride) {
    return (size_t)x % 8 == 0 && (inputs | x_stride) % 4 == 0;
}

__device__ __forceinline__ void prefetch_weights(const Integers& w, int first, int inputs, int outputs) {
    int warp = threadIdx.x / WARP, g = threadIdx.x % WARP / 4, piece = warp * 4 + threadIdx.x % 4;
#pragma unroll 1  // or the addresses stay in registers, of which 16 rows by 32 with 4 bits have none left
    for (int tile = 0; tile < TILES; ++tile) {
        size_t row = weight_row(first + tile * 8 + g, outputs);
        if (piece * PIECE < inputs) prefetch(w.values + row * w.row_bytes() + piece * 16);
    }
}

// The sums over this warp's part of k.
template <bool ALIGNED>
__device__ __forceinline__ void accumulate(float (&sums)[ROW_TILES][TILES][4], const storage_t* x, const Integers& w,
                                           int first, int rows, int inputs, int outputs, int x_stride) {
    constexpr unsigned ONE = MINILLM_STORAGE == 16 ? 0x3c003c00u : 0x3f803f80u;
    constexpr int STAGES = TILES == 1 && ROWS <= 16 ? 2 : 1;  // steps of k loaded before the first is used
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
    for (int begin = warp * STEP * STAGES; begin < inputs; begin += WARPS * STEP * STAGES) {
        Part parts[STAGES][TILES];
#pragma unroll
        for (int s = 0; s < STAGES; ++s) {
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile)
                parts[s][tile].load(w, weight_row(first + tile * 8 + g, outputs), begin / PIECE + s * 4 + t);
        }
#pragma unroll
        for (int s = 0; s < STAGES; ++s) {
            unsigned words[TILES][4];
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) {
                const uint4& raw = parts[s][tile].raw;
                words[tile][0] = raw.x, words[tile][1] = raw.y, words[tile][2] = raw.z, words[tile][3] = raw.w;
                transpose(words[tile]);
            }
#pragma unroll
            for (int run = 0; run < 4; run += RUN) {  // pieces of one group
                float of_group[ROW_TILES][TILES][4] = {}, of_x[ROW_TILES][4] = {};
#pragma unroll
                for (int piece = run; piece < run + RUN; ++piece) {
                    unsigned b[TILES][8 / BITS][2];
#pragma unroll
                    for (int tile = 0; tile < TILES; ++tile) {
                        unsigned zero = OFFSETS == 0 ? 8 : 0;
                        if (OFFSETS == 8)
                            zero = __shfl_sync(ALL_LANES, (unsigned)(unsigned char)parts[s][tile].offset, g * 4 + run);
                        unpack(b[tile], words[tile][piece], zero);
                    }
#pragma unroll
                    for (int half = 0; half < 8 / BITS; ++half) {
                        int k = begin + (s * 4 + piece) * PIECE + half * 16 + t * 4;
                        if (ROWS > 16) asm volatile("" ::: "memory");  // or all of x is loaded first, and spilled
                        uint2 v[ROWS / 8];
#pragma unroll
                        for (int r = 0; r < ROWS / 8; ++r)
                            v[r] = load_four<ALIGNED>(x + (size_t)min(r * 8 + g, rows - 1) * x_stride, k, inputs);
#pragma unroll
                        for (int r = 0; r < ROW_TILES; ++r) {
                            uint2 low = v[2 * r], high = ROWS > 8 ? v[(2 * r + 1) % (ROWS / 8)] : make_uint2(0, 0);
                            unsigned a[4] = {low.x, high.x, low.y, high.y}, ones[2] = {ONE, ONE};
#pragma unroll
                            for (int tile = 0; tile < TILES; ++tile) mma_16816(of_group[r][tile], a, b[tile][half]);
                            if (OFFSETS == 16) mma_16816(of_x[r], a, ones);
                        }
                    }
                }
#pragma unroll
                for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
                    for (int i = 0; i < 2; ++i) {  // columns 2t and 2t + 1 of a tile, whose lanes are those of row 2t + i of W
                        int owner = (2 * t + i) * 4 + run;
                        float scale = __shfl_sync(ALL_LANES, parts[s][tile].scale, owner), offset = 0.0f;
                        if (OFFSETS == 16)
                            offset = __shfl_sync(ALL_LANES, (float)parts[s][tile].offset, owner);
#pragma unroll
                        for (int r = 0; r < ROW_TILES; ++r) {
#pragma unroll
                            for (int at = i; at < (ROWS > 8 ? 4 : 2); at += 2) {
                                float& sum = sums[r][tile][at];
                                sum = fmaf(scale, of_group[r][tile][at], sum);
                                if (OFFSETS == 16) sum = fmaf(offset, of_x[r][at], sum);
                            }
                        }
                    }
                }
            }
        }
    }
}
