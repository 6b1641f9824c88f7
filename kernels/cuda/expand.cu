// Rows of a matrix of 8 or 4 bits as 16-bit numbers: tokens' vectors from a table, or a matrix before a product of many
// rows.
//
//   out[t] = scale * w[ids[t]]                                     w as in integers.cuh; ids may be null: row t
//   out[t] = scale * w[ids[t]] + position_table[positions[t] + offset]
//
// Grid: (T, vectors of a row / threads of a block); block: up to 256 threads, 8 numbers each.
// Moved: BITS / 8 bytes read and 2 written for each number, scales and positions beside them; a few operations each.
// Floor: (2 + BITS / 8) T E / bandwidth. A matrix of OPT-6.7B, 4096 x 16384 of 4 bits: 168 MB, 39 us at 4.3 TB/s, where the
// product of 2,000 rows that follows takes 350.
//
// Versions: this one. Right on an H100; timed only within steps.
#include "integers.cuh"
#include "rows.cuh"

#if MINILLM_STORAGE == 32
#error "activations of a model with such matrices have 16 bits"
#endif

extern "C" __global__ void expand(storage_t* out, const unsigned char* values, const __half* scales,
                                  const void* offsets, const int* ids, const storage_t* position_table,
                                  const int* positions, int E, int table_rows, int position_rows, int position_offset,
                                  float scale) {
    follow();
    int t = blockIdx.x, at = (blockIdx.y * blockDim.x + threadIdx.x) * VECTOR, left = E - at;
    if (left <= 0) return;
    int row = ids == nullptr ? t : ids[t];
    CHECK_INDEX(row, table_rows);

    Integers w{values, scales, offsets, E};
    size_t group = (size_t)row * w.groups + at / GROUP;
    float own = __half2float(w.scales[group]), zero = BITS == 4 && OFFSETS == 0 ? 8.0f : 0.0f, offset = 0.0f;
    if (OFFSETS == 8) zero = (float)w.offsets[group];
    if (OFFSETS == 16) offset = (float)w.offsets[group];
    // 8 bytes of a piece, of 4 bits their low halves, or their high ones: two bytes of each of four words.
    int first = BITS == 4 ? at / 32 * 16 + at % 16 : at;
    const unsigned char* from = values + (size_t)row * w.row_bytes() + first % 16 / 8 * 2;
    unsigned short pairs[4];
#pragma unroll
    for (int t = 0; t < 4; t++) pairs[t] = *reinterpret_cast<const unsigned short*>(from + w.word_at(first / 16, t));
    float x[VECTOR];
#pragma unroll
    for (int i = 0; i < VECTOR; i++) {
        unsigned byte = pairs[i / 2] >> i % 2 * 8 & 255;
        float q = BITS == 8 ? (float)(signed char)byte : (float)(byte >> at % 32 / 16 * 4 & 15);
        x[i] = scale * (own * (q - zero) + offset);
    }
    bool wide = rows_aligned(out, E) && rows_aligned(position_table, E);
    if (position_table != nullptr) {
        int position = positions[t] + position_offset;
        CHECK_INDEX(position, position_rows);
        float y[VECTOR];
        load_vector(y, position_table + (size_t)position * E + at, left, wide);
#pragma unroll
        for (int i = 0; i < VECTOR; i++) x[i] += y[i];
    }
    store_vector(out + (size_t)t * E + at, x, left, wide);
}

// The bytes of a matrix from the order of reference/quantize.py to that of integers.cuh, in place, once when it has been sent
// to the device. Grid: (rows, chunks of a row / threads of a block); block: up to 256 threads, a chunk of 64 bytes each.
// Moved: the matrix, read and written; 6.7B numbers of 4 bits: 6.7 GB, some 2 ms at 3 TB/s.
//
//   chunk.reshape(pieces, 2, 4, 2).transpose(2, 0, 1, 3)                    # [piece, half, t, byte] -> [t, piece, half, byte]
extern "C" __global__ void interleave(unsigned char* values, int row_bytes) {
    int chunk = blockIdx.y * blockDim.x + threadIdx.x, pieces = min(4, row_bytes / 16 - 4 * chunk);
    if (pieces <= 0) return;
    uint4* at = reinterpret_cast<uint4*>(values + (size_t)blockIdx.x * row_bytes + chunk * 64);
    uint4 before[4], after[4];
    for (int piece = 0; piece < pieces; ++piece) before[piece] = at[piece];
    const unsigned short* from = reinterpret_cast<const unsigned short*>(before);
    unsigned short* to = reinterpret_cast<unsigned short*>(after);
    for (int t = 0; t < 4; ++t) {
        for (int piece = 0; piece < pieces; ++piece) {
            for (int half = 0; half < 2; ++half)
                to[(t * pieces + piece) * 2 + half] = from[piece * 8 + half * 4 + t];
        }
    }
    for (int piece = 0; piece < pieces; ++piece) at[piece] = after[piece];
}
