/* The matrix product with weights of floats: out = x @ W.T, W [outputs, inputs] of float32, float16 or bfloat16, or
 * of code books (codebooks.h).
 *
 * Bytes and floor: as in linear.c.
 *
 * Order of summation: a block of DEPTH inputs is summed by lane and then across lanes, and the blocks by ascending
 * place. In `floats_across` and `floats_over_rows` the inputs of a panel are summed by ascending place, and these sums
 * likewise, so that both have the same bits; `one_order` does without them.
 *
 * Versions:
 * - `floats_few` and `floats_many`, which linear.c describes, with one register tile: up to ROWS rows by 4 outputs, or
 *   a single row by 8; lanes along the inputs.
 * - `floats_across`, in place of `floats_along` with vectors of 8 and 16: up to ACROSS_ROWS rows by PANEL outputs, lanes
 *   along the outputs of W, which is transposed in panels. With vectors of 8 a tile of 12 sums then loads 8 numbers for 12
 *   products, not 7 vectors, and needs no sum across lanes.
 * - `floats_over_rows`, in its place for fewer than SET_ROWS rows, too few to transpose W for: x is transposed instead,
 *   and lanes are along its rows. 12 outputs of W are read as they lie, or, if not of float32, expanded.
 */
#include "codebooks.h"
#include "dot.h"
#include "linear.h"

enum {
    AHEAD = LANES == 16 ? 4096 : 2048,     /* how far ahead a stream of W is fetched, in bytes, ... */
    AHEAD_OF_ONE = LANES == 16 ? 1024 : 2048, /* ... and for a single row of x if not of float32 */
    ROWS = VECTOR_REGISTERS == 32 ? 6 : 3, /* of a tile: ROWS * 4 sums, ROWS + 1 operands */
    STRIDE = DEPTH + 16,                   /* from row to row of an expanded block: not a power of 2, for the cache */
    ACROSS = LANES >= 8,                   /* whether many rows are multiplied with the lanes along the outputs, ... */
    ACROSS_ROWS = 6,                       /* ... by a tile of so many rows ... */
    VECTORS = LANES == 16 ? 4 : 2,         /* ... and so many vectors of outputs, a panel, ... */
    PANEL = VECTORS * LANES,
    PANEL_DEPTH = 256,                     /* ... of so many inputs at a time: with vectors of 8 W's are in the L1 cache */
    FETCHED = 16,                          /* bytes of W that are fetched while an input is multiplied */
    ROW_VECTORS = LANES == 16 ? 4 : 3,     /* most vectors of rows of a tile of `floats_over_rows` */
    GROUP_OUTPUTS = 12,                    /* outputs that meet all of them, in tiles of 6 or 4, ... */
    OUTPUTS_OVER_ROWS = LANES == 16 ? 768 : 192, /* ... of so many at a time, for which x is transposed once, ... */
    TRANSPOSED = 32768                     /* ... so many of its numbers at a time: they stay in the L2 cache */
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
                for (int r = 0; r < R; r++) total[r][o] = multiply_add(numbers[r], weights, total[r][o]);
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
            for (int o = 0; o < O; o++) total[r][o] = multiply_add(numbers, weights[o], total[r][o]);
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
        if (R <= ROWS) multiply(FORMAT, R, 4, STREAMS, m, count, add, out, out_stride); \
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

/* Calls a function of `a->format`, which the compiler knows by the name `known`. */
#define WITH_FORMAT(CALL) \
    switch (a->format) { \
    case FLOAT32: { enum { known = FLOAT32 }; CALL; break; } \
    case FLOAT16: { enum { known = FLOAT16 }; CALL; break; } \
    case BFLOAT16: { enum { known = BFLOAT16 }; CALL; break; } \
    case NF4: { enum { known = NF4 }; CALL; break; } \
    case FP4: { enum { known = FP4 }; CALL; break; } \
    }

/* --- few rows ----------------------------------------------------------------------------------------------------- */

static tile *const *tiles_of(int64_t format) {
    switch (format) {
    case FLOAT16: return of_float16;
    case BFLOAT16: return of_bfloat16;
    case NF4: return of_NF4;
    case FP4: return of_FP4;
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
            of_expanded[rows](&m, smaller(4, last - o), add, a->out + row * a->stride + o, a->stride);
        }
    }
}

int64_t floats_scratch(void) {
    return sizeof(float) * FLOAT_OUTPUTS * STRIDE;
}

/* Inputs k to k + depth of W's rows first to last. -> [last - first, STRIDE] */
INLINE void expand(const int format, const linear *a, int64_t first, int64_t last, int64_t k, int64_t depth,
                   float *block) {
    for (int64_t o = first; o < last; o++, block += STRIDE) {
        const char *w = (const char *)a->weight + bytes_of(format, o * a->inputs + k);
        int64_t i = 0;
        for (; i + LANES <= depth; i += LANES) store(block + i, load_weights(format, w, i));
        if (i < depth) store(block + i, load_last_weights(format, w, i, depth - i));
    }
}

/* --- many rows, lanes along the outputs --------------------------------------------------------------------------- */

/* Inputs of a panel: all have about as many, in whole blocks of code books, for a short one costs more. */
INLINE int64_t panel_depth(int64_t inputs) {
    int64_t panels = (inputs + PANEL_DEPTH - 1) / PANEL_DEPTH, blocks = (inputs + CODES - 1) / CODES;
    return inputs ? (blocks + panels - 1) / panels * CODES : CODES;
}

/* From vector to vector of a panel. */
INLINE int64_t panel_stride(int64_t depth) {
    return (depth + 15) / 16 * 16 * LANES;
}

/* Inputs k to k + depth, 1 to PANEL_DEPTH, of PANEL outputs of W from o on; in place of outputs from `last` on the one
 * before it is repeated. 32 bytes of each row at a time; of 16 bits, two inputs are moved as one number, then split.
 * -> [VECTORS, depth in whole sixteens, LANES] */
INLINE void transpose_panel(const int format, const linear *a, int64_t o, int64_t last, int64_t k, int64_t depth,
                            float *panel) {
    const int64_t each = bytes_of(format, 1), bytes = bytes_of(format, depth);
    const char *rows[PANEL], *parts[LANES];
    char part[LANES][32];
    int32_t pairs[8 * LANES];
    for (int i = 0; i < PANEL; i++)
        rows[i] = (const char *)a->weight + bytes_of(format, smaller(o + i, last - 1) * a->inputs + k);
    for (int v = 0; v < VECTORS; v++) {
        float *to = panel + v * panel_stride(depth);
        if (format >= NF4) {
            for (int r = 0; r < LANES; r++) parts[r] = part[r];
            for (int64_t i = 0; i < depth; i += 8, to += 8 * LANES) {
                for (int r = 0; r < LANES; r++) {
                    floats numbers = load_codes(format, rows[v * LANES + r], i / LANES * LANES);
                    memcpy(part[r], (const char *)&numbers + i % LANES * 4, 32);
                }
                transpose(parts, 0, (int32_t *)to);
            }
            continue;
        }
        for (int64_t at = 0; at < bytes; at += 32, to += 32 / each * LANES) {
            const char *const *from = rows + v * LANES;
            int64_t place = at;
            if (at + 32 > bytes) { /* the last ones, then zeros */
                for (int r = 0; r < LANES; r++) parts[r] = memcpy(memset(part[r], 0, 32), from[r] + at, bytes - at);
                from = parts, place = 0;
            }
            if (format == FLOAT32) {
                transpose(from, place, (int32_t *)to);
                continue;
            }
            transpose(from, place, pairs);
#pragma GCC unroll 8
            for (int i = 0; i < 8; i++) {
                ints pair;
                floats even, odd;
                memcpy(&pair, pairs + i * LANES, sizeof pair);
                if (format == FLOAT16) {
                    split_float16(pair, &even, &odd);
                } else {
                    even = (floats)(pair << 16), odd = (floats)(pair & (int32_t)0xFFFF0000);
                }
                store(to + 2 * i * LANES, even);
                store(to + (2 * i + 1) * LANES, odd);
            }
        }
    }
}

/* Some rows of x and the panel that they meet, of `depth` inputs. */
typedef struct {
    const float *x, *panel;
    int64_t x_stride, depth;
    const char *next; /* rows of W to fetch early, or NULL, ... */
    int64_t next_stride, next_bytes; /* ... from row to row, and of each */
} panel_operands;

/* total[r] += x[r] * the panel's outputs, for one input. */
INLINE void multiply_input(const int R, const panel_operands *m, int64_t k, floats total[][VECTORS]) {
    floats outputs[VECTORS];
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) {
        outputs[v] = load(m->panel + v * panel_stride(m->depth) + k * LANES);
        keep(&outputs[v]);
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) {
        float number; /* at any address */
        memcpy(&number, m->x + r * m->x_stride + k, sizeof number);
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) total[r][v] = multiply_add(splat(number), outputs[v], total[r][v]);
    }
}

/* out[r, o] = x[r] @ panel[:, o], or += that, for R rows and the first `count` of PANEL outputs. */
INLINE void multiply_panel(const int R, const panel_operands *m, int64_t count, bool add, float *out,
                           int64_t out_stride) {
    floats total[ACROSS_ROWS][VECTORS];
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) total[r][v] = (floats){0};
    int64_t k = 0;
    for (; k + 16 <= m->depth; k += 16) {
        if (m->next) {
            int64_t at = k * FETCHED;
            fetch_lines(m->next + at / m->next_bytes * m->next_stride + at % m->next_bytes, 16 * FETCHED);
        }
#pragma GCC unroll 4
        for (int i = 0; i < 16; i++) multiply_input(R, m, k + i, total);
    }
    for (; k < m->depth; k++) multiply_input(R, m, k, total);
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) {
            float *to = out + r * out_stride + v * LANES;
            int64_t left = count - v * LANES;
            if (left <= 0) break;
            floats y = total[r][v];
            store_part(to, add ? y + load_part(to, left) : y, left);
        }
}

typedef void panel_tile(const panel_operands *m, int64_t count, bool add, float *out, int64_t out_stride);

#define PANEL_TILE(R) \
    SEPARATE void of_panel_##R(const panel_operands *m, int64_t count, bool add, float *out, int64_t out_stride) { \
        if (ACROSS) multiply_panel(R, m, count, add, out, out_stride); \
    }
PANEL_TILE(5)
PANEL_TILE(6)
static panel_tile *const of_panel[] = {[5] = of_panel_5, [6] = of_panel_6}; /* SET_ROWS rows have no smaller ones */

/* Panels of all outputs meet a tile's rows, one after the other. Meanwhile W's next numbers are fetched: by the last
 * tiles, so that they are still in the cache when they are transposed. */
static void floats_across(const linear *a, int64_t first, int64_t last, float *panels) {
    const int64_t tiles = (a->rows + ACROSS_ROWS - 1) / ACROSS_ROWS;
    const int64_t stride = bytes_of(a->format, a->inputs), step = panel_depth(a->inputs);
    const int64_t block = bytes_of(a->format, step);
    const int64_t fetching = PANEL * block / step / FETCHED; /* of code books 0 */
    for (int64_t k = 0; k < larger(a->inputs, 1); k += step) {
        int64_t depth = smaller(step, a->inputs - k);
        const bool ends = k + step >= a->inputs;
        const char *next = (const char *)a->weight + first * stride + bytes_of(a->format, k + step);
        if (ends) next = (const char *)a->weight + last * stride;
        for (int64_t o = first; o < last; o += PANEL) {
            float *panel = panels + (o - first) * PANEL_DEPTH;
            WITH_FORMAT(transpose_panel(known, a, o, last, k, depth, panel))
        }
        for (int64_t i = 0; i < tiles; i++) {
            int64_t row = a->rows * i / tiles, rows = a->rows * (i + 1) / tiles - row;
            int64_t part = i - larger(tiles - fetching, 0);
            panel_operands m = {.x = a->x + row * a->inputs + k, .x_stride = a->inputs, .depth = depth,
                                .next_stride = stride, .next_bytes = block};
            for (int64_t o = first; o < last; o += PANEL) {
                m.panel = panels + (o - first) * PANEL_DEPTH;
                if (part >= 0) m.next = next + (o - first + part * PANEL / fetching) * stride;
                of_panel[rows](&m, smaller(PANEL, last - o), k > 0, a->out + row * a->stride + o, a->stride);
            }
            if (ends) finish(a, row, row + rows, first, last);
        }
    }
}

/* --- some tens of rows, lanes along the rows of x ----------------------------------------------------------------- */

/* Some vectors of rows of x, transposed, and the outputs of W that they meet. Strides are from one vector or output to
 * the next, W's in bytes. */
typedef struct {
    const float *x; /* [vectors, x_stride / LANES, LANES] */
    const char *w;  /* of float */
    int64_t x_stride, w_stride, depth;
    const char *next; /* W's stored rows to fetch early, one for each output, or NULL, ... */
    int64_t next_stride, each; /* ... from row to row, and bytes of a number */
} row_operands;

/* The sums of O outputs for one input and V vectors of rows. */
INLINE void multiply_input_of_rows(const int O, const int V, const row_operands *m, int64_t k, floats total[][4]) {
    floats numbers[4];
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) {
        numbers[v] = load(m->x + v * m->x_stride + k * LANES);
        keep(&numbers[v]);
    }
#pragma GCC unroll 6
    for (int o = 0; o < O; o++) {
        float weight; /* at any address */
        memcpy(&weight, m->w + o * m->w_stride + 4 * k, sizeof weight);
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) total[o][v] = multiply_add(splat(weight), numbers[v], total[o][v]);
    }
}

/* sums[o] = W[o] @ x.T, or += that. -> [O, stride] */
INLINE void multiply_rows(const int O, const int V, const row_operands *m, bool add, float *sums, int64_t stride) {
    floats total[6][4];
#pragma GCC unroll 6
    for (int o = 0; o < O; o++)
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) total[o][v] = (floats){0};
    int64_t k = 0;
    for (; k + 16 <= m->depth; k += 16) {
        if (m->next)
#pragma GCC unroll 6
            for (int o = 0; o < O; o++) __builtin_prefetch(m->next + o * m->next_stride + k * m->each);
#pragma GCC unroll 4
        for (int i = 0; i < 16; i++) multiply_input_of_rows(O, V, m, k + i, total);
    }
    for (; k < m->depth; k++) multiply_input_of_rows(O, V, m, k, total);
#pragma GCC unroll 6
    for (int o = 0; o < O; o++)
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) {
            float *to = sums + o * stride + v * LANES;
            store(to, add ? total[o][v] + load(to) : total[o][v]);
        }
}

typedef void row_tile(const row_operands *m, bool add, float *sums, int64_t stride);

#define ROW_TILE(O, V) \
    SEPARATE void of_rows_##V(const row_operands *m, bool add, float *sums, int64_t stride) { \
        if (ACROSS && V <= ROW_VECTORS) multiply_rows(O, V, m, add, sums, stride); \
    }
ROW_TILE(6, 1)
ROW_TILE(6, 2)
ROW_TILE(LANES == 16 ? 6 : 4, 3)
ROW_TILE(6, 4)
static row_tile *const of_rows[] = {NULL, of_rows_1, of_rows_2, of_rows_3, of_rows_4};

/* Inputs k to k + depth of all rows of x; in place of rows that do not exist the last one is repeated.
 * -> [vectors, depth, LANES] */
static void transpose_rows(const linear *a, int64_t k, int64_t depth, float *to) {
    for (int64_t row = 0; row < a->rows; row += LANES, to += depth * LANES) {
        const char *rows[LANES];
        for (int r = 0; r < LANES; r++) rows[r] = (const char *)(a->x + smaller(row + r, a->rows - 1) * a->inputs + k);
        int64_t i = 0;
        for (; i + 8 <= depth; i += 8) transpose(rows, 4 * i, (int32_t *)(to + i * LANES));
        for (; i < depth; i++)
            for (int r = 0; r < LANES; r++) memcpy(to + i * LANES + r, rows[r] + 4 * i, sizeof(float));
    }
}

/* Inputs k to k + depth of GROUP_OUTPUTS outputs from o on; in place of outputs from `last` on the one before it is
 * repeated. -> [GROUP_OUTPUTS, PANEL_DEPTH] */
INLINE void expand_group(const int format, const linear *a, int64_t o, int64_t last, int64_t k, int64_t depth,
                         float *to) {
    for (int i = 0; i < GROUP_OUTPUTS; i++)
        expand(format, a, smaller(o + i, last - 1), smaller(o + i, last - 1) + 1, k, depth, to + i * PANEL_DEPTH);
}

/* The sums of outputs first to last, [last - first, rows] with `stride` numbers from one to the next, to their places:
 * whole lines of memory at a time. */
static void write_sums(const linear *a, int64_t first, int64_t last, const float *sums, int64_t stride) {
    for (int64_t o = first; o < last; o += PANEL)
        for (int64_t row = 0; row < a->rows; row += 8) {
            const char *from[PANEL];
            float block[VECTORS][8 * LANES];
            for (int i = 0; i < PANEL; i++)
                from[i] = (const char *)(sums + (smaller(o + i, last - 1) - first) * stride);
            for (int v = 0; v < VECTORS; v++) transpose(from + v * LANES, 4 * row, (int32_t *)block[v]);
            for (int64_t r = 0; r < smaller(8, a->rows - row); r++)
                for (int64_t v = 0, place = o; v < VECTORS && place < last; v++, place += LANES)
                    store_part(a->out + (row + r) * a->stride + place, load(block[v] + r * LANES), last - place);
        }
}

/* Vectors of rows in twos meet GROUP_OUTPUTS outputs, of an odd number of vectors three; and inputs of a panel at a
 * time, in the order in which W lies. Meanwhile the next ones are fetched, by the last tiles. */
static void floats_over_rows(const linear *a, int64_t first, int64_t last, float *scratch) {
    const int64_t vectors = (a->rows + LANES - 1) / LANES, rows = vectors * LANES;
    const int64_t stride = bytes_of(a->format, a->inputs), step = panel_depth(a->inputs);
    const int64_t at_once = TRANSPOSED / larger(rows, 1) / step * step; /* inputs */
    float *expanded = scratch, *sums = expanded + GROUP_OUTPUTS * PANEL_DEPTH; /* [last - first, rows] */
    float *x = sums + (OUTPUTS_OVER_ROWS + GROUP_OUTPUTS) * rows;
    int64_t start = 0;
    if (!rows) return;
    do {
        const int64_t end = smaller(start + at_once, a->inputs);
        transpose_rows(a, start, end - start, x);
        for (int64_t o = first; o < last; o += GROUP_OUTPUTS) {
            int64_t k = start;
            do {
                const bool in_place = a->format == FLOAT32 && o + GROUP_OUTPUTS <= last, ends = k + step >= end;
                const char *w = (const char *)a->weight + o * stride;
                const char *next = ends ? w + GROUP_OUTPUTS * stride + bytes_of(a->format, start)
                                        : w + bytes_of(a->format, k + step);
                row_operands m = {.x_stride = (end - start) * LANES, .depth = smaller(step, end - k),
                                  .w_stride = in_place ? stride : 4 * PANEL_DEPTH,
                                  .next_stride = stride, .each = bytes_of(a->format, 1)};
                if (!in_place)
                    WITH_FORMAT(expand_group(known, a, o, last, k, m.depth, expanded))
                int64_t v = 0;
                do {
                    const int64_t left = vectors - v, count = LANES == 16 || left == 1 ? left : left % 2 ? 3 : 2;
                    const int64_t outputs = LANES == 8 && count == 3 ? 4 : 6;
                    m.x = x + v * m.x_stride + (k - start) * LANES;
                    for (int64_t g = 0; g < GROUP_OUTPUTS; g += outputs) {
                        m.w = in_place ? w + 4 * k + g * stride : (const char *)(expanded + g * PANEL_DEPTH);
                        m.next = v + count < vectors ? NULL : next + g * stride;
                        float *to = sums + (o - first + g) * rows + v * LANES;
                        of_rows[count](&m, k > 0, to, rows);
                    }
                    v += count;
                } while (v < vectors);
                k += step;
            } while (k < end);
        }
        start = end;
    } while (start < a->inputs);
    write_sums(a, first, last, sums, rows);
    finish(a, 0, a->rows, first, last);
}

/* --- many rows, lanes along the inputs ---------------------------------------------------------------------------- */

/* Blocks of W are expanded, and meet all rows. */
static void floats_along(const linear *a, int64_t first, int64_t last, float *block) {
    int64_t k = 0;
    do {
        int64_t depth = smaller(DEPTH, a->inputs - k);
        WITH_FORMAT(expand(known, a, first, last, k, depth, block))
        operands m = {a->x + k, (const char *)block, a->inputs, STRIDE * 4, depth, 1};
        multiply_block(a, m, first, last, k > 0);
        k += DEPTH;
    } while (k < a->inputs);
    finish(a, 0, a->rows, first, last);
}

/* Some outputs at a time, as many as stay in the L2 cache. */
void floats_many(const linear *a, int64_t first, int64_t last, char *scratch) {
    const bool across = ACROSS && !a->one_order, over_rows = across && a->rows < SET_ROWS;
    const int64_t at_once = over_rows ? OUTPUTS_OVER_ROWS : FLOAT_OUTPUTS;
    if (ACROSS && a->one_order && a->rows < SET_ROWS) { /* expanding W would take longer */
        floats_few(a, first, last);
        finish(a, 0, a->rows, first, last);
        return;
    }
    for (int64_t o = first; o < last; o += at_once)
        (over_rows ? floats_over_rows : across ? floats_across : floats_along)(a, o, smaller(o + at_once, last),
                                                                               (float *)scratch);
}
