// Rows of tables: a token's vector, with a position's added where there is one; and the rows whose logits are wanted.
//
//     out = scale * tokens[ids]                               # [V, E], [T] -> [T, E]
//     out = scale * tokens[ids] + positions_table[positions + offset]
//
// With SHARED, ranks share the tokens' table, this one's from row `first` on: the vectors of other ids are zero.
//
// Ids and positions are read from the device, so that a captured step follows them. Where the host launches a step
// before it has read the tokens of the one before, known_ids puts these in their places:
//
//     ids[t] = ids[t] < 0 ? chosen[-1 - ids[t]] : ids[t]      # [T], [rows] -> [T]
//
// Grid: (T, vectors of a row / threads of a block); block: up to 256 threads, 16 bytes of the row each.
// Moved: T rows of each table and T rows of the result, 4 T bytes of ids (and of positions); no arithmetic to speak of.
// Floor: (3 T E sizeof(storage_t) + 8 T) / bandwidth with positions, which for a few rows is below a launch.
//
// Versions:
//   1. one launch for each table and one for the sum: 5 T E numbers moved, three launches.
//   2. this one, in one pass: 3 T E numbers, one launch. H100: 1.9 us for a token, 17.8 for 2,000
//      of OPT-6.7B, 0.92 of the copy bandwidth.
#include "rows.cuh"

#if SHARED
#define FIRST , int first
#else
#define FIRST
#endif

extern "C" __global__ void embed(storage_t* out, const storage_t* table, const int* ids,
                                 const storage_t* position_table, const int* positions, int E, int table_rows,
                                 int table_stride, int position_rows, int position_offset, float scale FIRST) {
    follow();
    int t = blockIdx.x;
    int at = (blockIdx.y * blockDim.x + threadIdx.x) * VECTOR;
    if (at >= E) return;

    int id = ids[t];
#if SHARED
    id -= first;
    bool own = 0 <= id && id < table_rows;
    if (!own) id = 0;
#else
    constexpr bool own = true;
#endif
    CHECK_INDEX(id, table_rows);
    const storage_t* row = table + (long long)id * table_stride;
    bool wide = rows_aligned(out, E) && rows_aligned(table, table_stride) && rows_aligned(position_table, E);
    float x[VECTOR];
    load_vector(x, row + at, E - at, wide);
#pragma unroll
    for (int i = 0; i < VECTOR; i++) x[i] = own ? x[i] * scale : 0.0f;

    if (position_table != nullptr) {
        int position = positions[t] + position_offset;
        CHECK_INDEX(position, position_rows);
        float y[VECTOR];
        load_vector(y, position_table + (long long)position * E + at, E - at, wide);
#pragma unroll
        for (int i = 0; i < VECTOR; i++) x[i] += y[i];
    }
    store_vector(out + (long long)t * E + at, x, E - at, wide);
}

// Grid: blocks of at most 256 threads, one for each id. Moved: 8 T bytes; a launch costs far more.
extern "C" __global__ void known_ids(int* ids, const int* chosen, int T, int rows) {
    int t = blockIdx.x * blockDim.x + threadIdx.x;
    if (t >= T || ids[t] >= 0) return;
    CHECK_INDEX(-1 - ids[t], rows);
    ids[t] = chosen[-1 - ids[t]];
}
