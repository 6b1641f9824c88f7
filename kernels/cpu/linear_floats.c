/* The matrix product with weights of floats: out = x @ W.T, W [outputs, inputs] of float32, float16 or bfloat16, or of
 * code books or pairs of bfloat16 (floats.h).
 *
 * Bytes and floor: as in linear.c.
 *
 * Order of summation: a block of DEPTH inputs is summed by lane and then across lanes, and the blocks by ascending
 * place.
 *
 * Versions: `floats_few` and `floats_many`, which linear.c describes, with one register tile: up to ROWS rows by 4
 * outputs, or a single row by 8; lanes along the inputs. Many rows are multiplied by linear_across.c with vectors of 8 and
 * 16, unless `one_order`.
 */
#include "floats.h"

enum {
    AHEAD = LANES == 16 ? 4096 : 2048,     /* how far ahead a stream of W is fetched, in bytes, ... */
    AHEAD_OF_ONE = LANES == 16 ? 1024 : 2048, /* ... and for a single row of x if not of float32 */
    ROWS = VECTOR_REGISTERS == 32 ? 6 : 3, /* of a tile: ROWS * 4 sums, ROWS + 1 operands */
    STRIDE = DEPTH + 16                    /* from row to row of an expanded block: not a power of 2, for the cache */
};

/* Inputs of a turn of a tile's loop: with NEON so many that counting the turns takes little, for up to so many rows, since
 * sums of more would not stay in registers. */
#if HAS_NEON
enum { STEP = 16, STEP_ROWS = 4 };
#else
enum { STEP = LANES, STEP_ROWS = ROWS };
#endif

/* --- a register tile ---------------------------------------------------------------------------------------------- */

/* Some rows of x and the numbers of W that they meet. Strides are from one row to the next, W's in bytes; `gap` is from
 * one output to the next. */
typedef struct {
    const float *x;
    const char *w;
    int64_t x_stride, w_stride, depth, gap;
} operands;

/* out[r, o] = x[r] @ W[o], or += that, for R rows and `count` outputs, 1 to O (4 or 8). Where W's rows are `streams`, the
 * hardware fetches them early by itself, but not as much as it could if they wait for the products of several rows. */
INLINE void multiply(const int format, const int R, const int O, const bool streams, const operands *m, int64_t count,
                     bool add, float *out, int64_t out_stride) {
    floats total[6][8];
    const char *w[8];
    const float *x = m->x;
    const int64_t x_stride = m->x_stride, depth = m->depth;
    const int64_t ahead = R == 1 && format != FLOAT32 ? AHEAD_OF_ONE : AHEAD;
#pragma GCC unroll 8
    for (int o = 0; o < O; o++) w[o] = m->w + (o < count ? o : count - 1) * m->w_stride;
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int o = 0; o < O; o++) total[r][o] = (floats){0};
    const bool whole = (int)STEP > (int)LANES && R <= STEP_ROWS && depth % STEP == 0;
    int64_t k = 0;
    for (; k + LANES <= depth; k += whole ? STEP : LANES) {
        if (streams && (R > 2 || LANES != 8))
#pragma GCC unroll 8
            for (int o = 0; o < O; o++) fetch_lines(w[o] + bytes_of(format, k) + ahead, 1);
#if HAS_NEON
#pragma GCC unroll 4
        for (int64_t i = k; i < k + STEP && (i == k || whole); i += LANES) {
#else
        const int64_t i = k;
        {
#endif
            floats numbers[6];
#pragma GCC unroll 6
            for (int r = 0; r < R; r++) {
                numbers[r] = load(x + r * x_stride + i);
                keep(&numbers[r]);
            }
#pragma GCC unroll 8
            for (int o = 0; o < O; o++) {
                floats weights = load_weights(format, w[o], i);
                if (R > 1) keep(&weights);
#pragma GCC unroll 6
                for (int r = 0; r < R; r++) {
                    total[r][o] = multiply_add_as(format, numbers[r], weights, total[r][o]);
                }
            }
        }
    }
    if (k < depth) {
        floats weights[8];
#pragma GCC unroll 8
        for (int o = 0; o < O; o++) weights[o] = load_last_weights(format, w[o], k, depth - k);
#pragma GCC unroll 6
        for (int r = 0; r < R; r++) {
            floats numbers = load_part(x + r * x_stride + k, depth - k);
#pragma GCC unroll 8
            for (int o = 0; o < O; o++) {
                total[r][o] = multiply_add_as(format, numbers, weights[o], total[r][o]);
            }
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
        for (int o = 0; o < O; o += 4) {
            if (o >= count) break;
            four_floats four = sums(total[r][o], total[r][o + 1], total[r][o + 2], total[r][o + 3]);
            float *to = out + r * out_stride + o * m->gap;
            if (m->gap == 1) {
                if (add) four += load_four(to, count - o);
                store_four(to, four, count - o);
            } else {
                for (int64_t i = 0; i < smaller(4, count - o); i++, to += m->gap) *to = add ? *to + four[i] : four[i];
            }
        }
}

typedef void tile(const operands *m, int64_t count, bool add, float *out, int64_t out_stride);

#define TILE(NAME, FORMAT, STREAMS, R) \
    SEPARATE void NAME##_##R(const operands *m, int64_t count, bool add, float *out, int64_t out_stride) { \
        if (R <= ROWS && (HAS_PAIRS || FORMAT != PAIRS)) \
            multiply(FORMAT, R, 4, STREAMS, m, count, add, out, out_stride); \
    }
#define TILES(NAME, FORMAT, STREAMS) /* by their rows */ \
    TILE(NAME, FORMAT, STREAMS, 1) \
    TILE(NAME, FORMAT, STREAMS, 2) \
    TILE(NAME, FORMAT, STREAMS, 3) \
    TILE(NAME, FORMAT, STREAMS, 4) \
    TILE(NAME, FORMAT, STREAMS, 5) \
    TILE(NAME, FORMAT, STREAMS, 6) \
    static tile *const NAME[] = {NULL, NAME##_1, NAME##_2, NAME##_3, NAME##_4, NAME##_5, NAME##_6};

TILES(of_float32, FLOAT32, true)
TILES(of_float16, FLOAT16, true)
TILES(of_bfloat16, BFLOAT16, true)
TILES(of_NF4, NF4, true)
TILES(of_FP4, FP4, true)
TILES(of_pairs, PAIRS, true)
TILES(of_expanded, FLOAT32, false)

/* A single row by 8 outputs. */
#define LONE_TILE(NAME, FORMAT) \
    SEPARATE void NAME(const operands *m, int64_t count, bool add, float *out, int64_t out_stride) { \
        multiply(FORMAT, 1, 8, true, m, count, add, out, out_stride); \
    }
LONE_TILE(lone_float32, FLOAT32)
LONE_TILE(lone_float16, FLOAT16)
LONE_TILE(lone_bfloat16, BFLOAT16)

/* The same for all rows, in tiles of nearly the same size. `m` holds the first. */
INLINE void multiply_all_rows(tile *const *tiles, const linear *a, operands m, int64_t count, bool add, float *out) {
    const int64_t tiles_of_rows = (a->rows + ROWS - 1) / ROWS;
    const float *x = m.x;
    for (int64_t i = 0; i < tiles_of_rows; i++) {
        int64_t row = a->rows * i / tiles_of_rows, rows = a->rows * (i + 1) / tiles_of_rows - row;
        m.x = x + row * m.x_stride;
        tiles[rows](&m, count, add, out + row * a->stride, a->stride);
    }
}

/* --- few rows ----------------------------------------------------------------------------------------------------- */

static tile *const *tiles_of(int64_t format) {
    switch (format) {
    case FLOAT16: return of_float16;
    case BFLOAT16: return of_bfloat16;
    case NF4: return of_NF4;
    case FP4: return of_FP4;
    case PAIRS: return of_pairs;
    default: return of_float32;
    }
}

static tile *lone_tile_of(int64_t format) {
    return format == FLOAT32 ? lone_float32 : format == FLOAT16 ? lone_float16 : format == BFLOAT16 ? lone_bfloat16 : NULL;
}

/* W's rows are divided into as many streams as a tile has outputs, of which each is read as it lies: the hardware then
 * fetches them early by itself, at up to 1.6 times the rate of rows that are neighbours and fetched by instructions
 * (measured on a Zen 3). A row of each stream meets all rows of x, one block of inputs after the other. */
void floats_few(const linear *a, int64_t first, int64_t last) {
    const bool alone = a->rows == 1 && (LANES != 16 || a->format == FLOAT32); /* 16 bits in 8 streams: 0.95 on a Zen 4 */
    tile *const *tiles = tiles_of(a->format), *lone = alone ? lone_tile_of(a->format) : NULL;
    const int64_t stride = bytes_of(a->format, a->inputs), streams = lone ? 8 : 4;
    const int64_t length = (last - first + streams - 1) / streams; /* of all but the last ones */
    for (int64_t o = first; o < smaller(first + length, last); o++) {
        const int64_t count = (last - o + length - 1) / length;
        int64_t k = 0;
        do {
            operands m = {a->x + k, (const char *)a->weight + o * stride + bytes_of(a->format, k), a->inputs,
                          length * stride, smaller(DEPTH, a->inputs - k), length};
            if (lone) {
                lone(&m, count, k > 0, a->out + o, a->stride);
            } else {
                multiply_all_rows(tiles, a, m, count, k > 0, a->out + o);
            }
            k += DEPTH;
        } while (k < a->inputs);
    }
}

/* --- many rows ---------------------------------------------------------------------------------------------------- */

/* A block of inputs of outputs first to last, expanded, meets all rows. Where rows of x are longer than a block, the next
 * tile's lie apart, and are fetched early. */
static void multiply_block(const linear *a, operands m, int64_t first, int64_t last, bool add) {
    int64_t count = (a->rows + ROWS - 1) / ROWS;
    const int64_t each = DEPTH / FLOAT_OUTPUTS; /* inputs of a row to fetch for each output */
    const bool apart = last - first > 4 && a->inputs > DEPTH;
    tile *const *tiles = a->format == PAIRS ? of_pairs : of_expanded;
    const float *x = m.x;
    const char *w = m.w;
    for (int64_t i = 0; i < count; i++) {
        int64_t row = a->rows * i / count, rows = a->rows * (i + 1) / count - row;
        m.x = x + row * m.x_stride;
        for (int64_t o = first; o < last; o += 4) {
            if (apart)
                for (int64_t r = 0; r < ROWS; r++)
                    fetch_lines((const char *)(m.x + (rows + r) * m.x_stride + (o - first) * each), 4 * 4 * each);
            m.w = w + (o - first) * m.w_stride;
            tiles[rows](&m, smaller(4, last - o), add, a->out + row * a->stride + o, a->stride);
        }
    }
}

int64_t floats_scratch(void) {
    return sizeof(float) * FLOAT_OUTPUTS * STRIDE;
}

/* --- many rows, lanes along the inputs ---------------------------------------------------------------------------- */

/* Blocks of W are expanded, and meet all rows. */
static void floats_along(const linear *a, int64_t first, int64_t last, float *block) {
    int64_t k = 0;
    do {
        int64_t depth = smaller(DEPTH, a->inputs - k);
        WITH_FORMAT(expand(known, a, first, last, k, depth, block, STRIDE))
        operands m = {a->x + k, (const char *)block, a->inputs, STRIDE * 4, depth, 1};
        multiply_block(a, m, first, last, k > 0);
        k += DEPTH;
    } while (k < a->inputs);
    finish(a, 0, a->rows, first, last);
}

/* Some outputs at a time, as many as stay in the L2 cache. `floats_few` is faster for fewer than SET_ROWS rows in one order,
 * for which W would be expanded, and for up to 24 rows with vectors of 16, of which half a vector would be idle. */
void floats_many(const linear *a, int64_t first, int64_t last, char *scratch) {
    if (ACROSS && (a->one_order ? a->rows < SET_ROWS : LANES == 16 && a->rows <= 3 * LANES / 2)) {
        floats_few(a, first, last);
        finish(a, 0, a->rows, first, last);
    } else if (ACROSS && !a->one_order) {
        floats_across(a, first, last, scratch);
    } else {
        for (int64_t o = first; o < last; o += FLOAT_OUTPUTS)
            floats_along(a, o, smaller(o + FLOAT_OUTPUTS, last), (float *)scratch);
    }
}

/* --- x rounded to bfloat16 ---------------------------------------------------------------------------------------- */

void round_to_bfloat16(const linear *a, int64_t first, int64_t last) {
    const bool pairs = takes_pairs(a);
    for (int64_t i = first * a->inputs; i < last * a->inputs; i += LANES) {
        const int64_t count = smaller(LANES, last * a->inputs - i);
        uint16_t part[LANES];
        store_bfloat16(part, load_part(a->x + i, count));
        if (pairs) {
            memcpy((uint16_t *)a->x_rounded + i, part, count * sizeof *part);
        } else {
            store_part((float *)a->x_rounded + i, load_bfloat16(part), count);
        }
    }
}
