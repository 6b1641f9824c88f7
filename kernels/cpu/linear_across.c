/* The matrix product of many rows with weights of floats, for vectors of 8 and 16: out = x @ W.T.
 *
 * Bytes and floor: as in linear.c.
 *
 * Order of summation: the inputs of a panel are summed by ascending place, and these sums likewise; in both versions, which
 * have the same bits.
 *
 * Versions:
 * - `over_outputs`: up to TILE_ROWS rows by PANEL outputs, lanes along the outputs of W, which is transposed in panels.
 *   With vectors of 8 a tile of 12 sums loads 8 numbers for 12 products, where lanes along the inputs load 7 vectors,
 *   and it needs no sum across lanes.
 * - `over_rows`, in its place for fewer than SET_ROWS rows, too few to transpose W for: x is transposed instead, and lanes
 *   are along its rows. 12 outputs of W are read as they lie, or, if they are not whole lanes, expanded.
 */
#include "dot.h"
#include "floats.h"

enum {
    TILE_ROWS = 6,                         /* rows of a tile of `over_outputs`, ... */
    VECTORS = LANES == 16 ? 4 : 2,         /* ... and so many vectors of outputs, a panel, ... */
    PANEL = VECTORS * LANES,
    PANEL_DEPTH = 256,                     /* ... of so many inputs at a time: with vectors of 8 W's are in the L1 cache */
    FETCHED = 16,                          /* bytes of W that are fetched while an input is multiplied */
    ROW_VECTORS = LANES == 16 ? 4 : 3,     /* most vectors of rows of a tile of `over_rows` */
    GROUP_OUTPUTS = 12,                    /* outputs that meet all of them, in tiles of 6 or 4, ... */
    OUTPUTS_OVER_ROWS = LANES == 16 ? 768 : 192, /* ... of so many at a time, for which x is transposed once, ... */
    TRANSPOSED = 32768                     /* ... so many of its numbers at a time: they stay in the L2 cache */
};

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
        if (is_code_book(format)) {
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
            if (is_whole(format)) {
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
INLINE void multiply_input(const int format, const int R, const panel_operands *m, int64_t k, floats total[][VECTORS]) {
    floats outputs[VECTORS];
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) {
        outputs[v] = load(m->panel + v * panel_stride(m->depth) + k * LANES);
        keep(&outputs[v]);
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) {
        floats number = splat_bits(m->x + r * m->x_stride + k);
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) total[r][v] = multiply_add_as(format, number, outputs[v], total[r][v]);
    }
}

/* out[r, o] = x[r] @ panel[:, o], or += that, for R rows and the first `count` of PANEL outputs. */
INLINE void multiply_panel(const int format, const int R, const panel_operands *m, int64_t count, bool add, float *out,
                           int64_t out_stride) {
    floats total[TILE_ROWS][VECTORS];
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
        for (int i = 0; i < 16; i++) multiply_input(format, R, m, k + i, total);
    }
    for (; k < m->depth; k++) multiply_input(format, R, m, k, total);
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

#define PANEL_TILE(NAME, FORMAT, R) \
    SEPARATE void NAME##_##R(const panel_operands *m, int64_t count, bool add, float *out, int64_t out_stride) { \
        if (ACROSS && (HAS_PAIRS || FORMAT != PAIRS)) multiply_panel(FORMAT, R, m, count, add, out, out_stride); \
    }
PANEL_TILE(of_panel, FLOAT32, 5)
PANEL_TILE(of_panel, FLOAT32, 6)
PANEL_TILE(of_pair_panel, PAIRS, 5)
PANEL_TILE(of_pair_panel, PAIRS, 6)
static panel_tile *const of_panel[] = {[5] = of_panel_5, [6] = of_panel_6}; /* SET_ROWS rows have no smaller ones */
static panel_tile *const of_pair_panel[] = {[5] = of_pair_panel_5, [6] = of_pair_panel_6};

/* Panels of all outputs meet a tile's rows, one after the other. Meanwhile W's next numbers are fetched: by the last
 * tiles, so that they are still in the cache when they are transposed. */
static void over_outputs(const linear *a, int64_t first, int64_t last, float *panels) {
    panel_tile *const *of = a->format == PAIRS ? of_pair_panel : of_panel;
    const int64_t tiles = (a->rows + TILE_ROWS - 1) / TILE_ROWS;
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
                of[rows](&m, smaller(PANEL, last - o), k > 0, a->out + row * a->stride + o, a->stride);
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
INLINE void multiply_input_of_rows(const int format, const int O, const int V, const row_operands *m, int64_t k, floats total[][4]) {
    floats numbers[4];
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) {
        numbers[v] = load(m->x + v * m->x_stride + k * LANES);
        keep(&numbers[v]);
    }
#pragma GCC unroll 6
    for (int o = 0; o < O; o++) {
        floats weight = splat_bits(m->w + o * m->w_stride + 4 * k);
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) total[o][v] = multiply_add_as(format, weight, numbers[v], total[o][v]);
    }
}

/* sums[o] = W[o] @ x.T, or += that. -> [O, stride] */
INLINE void multiply_rows(const int format, const int O, const int V, const row_operands *m, bool add, float *sums,
                          int64_t stride) {
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
        for (int i = 0; i < 16; i++) multiply_input_of_rows(format, O, V, m, k + i, total);
    }
    for (; k < m->depth; k++) multiply_input_of_rows(format, O, V, m, k, total);
#pragma GCC unroll 6
    for (int o = 0; o < O; o++)
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) {
            float *to = sums + o * stride + v * LANES;
            store(to, add ? total[o][v] + load(to) : total[o][v]);
        }
}

typedef void row_tile(const row_operands *m, bool add, float *sums, int64_t stride);

#define ROW_TILE(NAME, FORMAT, O, V) \
    SEPARATE void NAME##_##V(const row_operands *m, bool add, float *sums, int64_t stride) { \
        if (ACROSS && V <= ROW_VECTORS && (HAS_PAIRS || FORMAT != PAIRS)) \
            multiply_rows(FORMAT, O, V, m, add, sums, stride); \
    }
#define ROW_TILES(NAME, FORMAT) /* by their vectors */ \
    ROW_TILE(NAME, FORMAT, 6, 1) \
    ROW_TILE(NAME, FORMAT, 6, 2) \
    ROW_TILE(NAME, FORMAT, LANES == 16 ? 6 : 4, 3) \
    ROW_TILE(NAME, FORMAT, 6, 4) \
    static row_tile *const NAME[] = {NULL, NAME##_1, NAME##_2, NAME##_3, NAME##_4};
ROW_TILES(of_rows, FLOAT32)
ROW_TILES(of_pair_rows, PAIRS)

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
        expand(format, a, smaller(o + i, last - 1), smaller(o + i, last - 1) + 1, k, depth, to + i * PANEL_DEPTH, 0);
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
static void over_rows(const linear *a, int64_t first, int64_t last, float *scratch) {
    row_tile *const *of = a->format == PAIRS ? of_pair_rows : of_rows;
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
                const bool in_place = is_whole(a->format) && o + GROUP_OUTPUTS <= last, ends = k + step >= end;
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
                        of[count](&m, k > 0, to, rows);
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

/* Some outputs at a time, as many as stay in the L2 cache. */
void floats_across(const linear *a, int64_t first, int64_t last, char *scratch) {
    const bool few = a->rows < SET_ROWS;
    if (!ACROSS) return;
    const int64_t at_once = few ? OUTPUTS_OVER_ROWS : FLOAT_OUTPUTS;
    for (int64_t o = first; o < last; o += at_once)
        (few ? over_rows : over_outputs)(a, o, smaller(o + at_once, last), (float *)scratch);
}
