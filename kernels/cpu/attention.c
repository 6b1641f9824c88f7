/* Attention over the paged K/V cache.
 *
 *     attention  out = softmax(score(q @ keys.T * scale) + mask) @ values, for each query of each sequence, by head
 *
 * A query sees the keys at its own position and before: of these, those in its window if there is one, and of a tree of
 * guesses at the end of the sequence its own ancestors. If attention is not causal it also sees the keys after it,
 * those in its window if there is one. A score may be bounded by a soft cap, cap * tanh(score / cap); then a bias by
 * the distance is added; then ALiBi subtracts the head's slope times the distance. A head's sink is one more score of
 * each query, of a key without a value: the blocks are merged after it.
 *
 * Keys and values are [pages, K, P, D] in a format of the cache (`cache.c` stores them). Position i of a sequence is in
 * page table[i / P] at offset i % P. Values may be the last V numbers of the keys, and then have no memory of their
 * own: out is [T, H, V].
 *
 * Bytes moved: at decode each visible key and value is read once for all query heads of its K/V head.
 * Floor: decode, these bytes / memory bandwidth; prefill, 2 (D + V) FLOPs per (query, visible key, head) / peak of FMA.
 *
 * Order of summation. The context is divided into blocks of BLOCK positions, at fixed places. A query attends to each
 * block by itself: dot products summed by lane and then across lanes, the block's maximum, weights exp(score - maximum)
 * summed by lane, values added by ascending position. Then the blocks are merged by ascending position, as in Dao et
 * al., "Flash-Decoding", 2023. Nothing in this depends on the other queries, the batch or the number of workers: a
 * query alone has the same bits as within a prefill.
 *
 * Versions:
 * - Few query rows (decode; a row is a query and a head): a piece of work is one block of one K/V head. Its result is
 *   kept, and who completes the last block of a head merges them. Numbers of the cache are converted in registers.
 * - Many (prefill): a piece of work is TILE rows of one K/V head. Keys and values are converted to float once for all
 *   of them, in strips that stay in the L1 cache. Products are register tiles of GROUP rows by 4 keys, or 4 vectors.
 */
#include "activation.h"
#include "attention_tiles.h"
#include "hadamard.h"
#include "pool.h"
#include <math.h>
#include <stdbool.h>

enum {
    TILE = 48,     /* query rows in a tile */
    FEW = 16,      /* query rows up to which a sequence's work is divided by blocks */
    STRIP = 64,    /* positions converted together */
    FETCHED = 2048 /* bytes of the cache that are asked for at once */
};

/* --- one block ---------------------------------------------------------------------------------------------------- */

/* One sequence of a batch. */
typedef struct {
    int64_t start;   /* its first row in the batch */
    int64_t n;       /* its new tokens, the last of its context */
    int64_t context; /* S */
    int64_t tree;    /* m: the last m tokens are a tree, 0 if there is none */
    int64_t seen;    /* where the tree's mask [m, m] begins in `seen` */
} span;

typedef struct {
    const float *q; /* [T, H, D], `stride` numbers from one token to the next */
    float *out;     /* [T, H, V], likewise */
    const void *keys, *values; /* both D numbers from one position to the next */
    const void *key_scales, *value_scales; /* of int8 float, a vector's; of int4 float16, of each 32 numbers; or NULL */
    const float *slopes;      /* [H], or NULL: ALiBi */
    const span *spans;        /* [N] */
    const int64_t *tables;    /* [N, table_stride]: pages of each sequence */
    const int64_t *positions; /* [T] */
    const uint8_t *seen;      /* the masks of all trees: 1 if the row's token sees the column's */
    float *scratch;           /* [workers, attention_scratch(D)] */
    float *parts;             /* [attention_parts(arguments)] */
    atomic_int_fast64_t *done; /* [N, K], 0 at first and again after each call */
    int64_t N, H, K, P, D, V, stride, out_stride, table_stride, format; /* V at most D */
    int64_t window;           /* positions that a query sees, its own included, on each side; 0: all */
    int64_t causal;           /* whether a query sees no key after it; else there are no trees */
    double scale;
    double cap;               /* soft cap of scores; 0: none */
    const float *bias;        /* [H, 2 M + 1]: added by distance from query to key, -M to M; or NULL */
    int64_t distances;        /* M: beyond it the first or the last bias counts */
    const float *sinks;       /* [H]: one more score of each query, or NULL */
} attention_arguments;

/* A worker's memory for one tile. Vectors are padded with zeros to `width`, a multiple of LANES. */
typedef struct {
    float *queries, *result, *merged;            /* [TILE, width], of D or V */
    float *scores;                               /* [TILE, ROW], then weights */
    float *strip;                                /* [STRIP, width], likewise */
    float *strip_scales;                         /* [STRIP, width / 32 rounded up]: int4 only */
    float *key_scales, *value_scales;            /* [BLOCK]: int8 only */
    float *key_positions;                        /* [BLOCK]: ALiBi only */
    float *best, *mass, *merged_best, *merged_mass; /* [TILE]: maximum of the scores, and sum of the weights */
} memory;

static int64_t width_of(int64_t D) {
    return (D + LANES - 1) / LANES * LANES;
}

/* Groups of 32 numbers that share a scale in int4. */
static int64_t groups_of(int64_t D) {
    return (D + 31) / 32;
}

/* Numbers from one position to the next. */
static int64_t stored_width(const attention_arguments *a) {
    return a->format == INT4 ? groups_of(a->D) * 32 : a->D;
}

/* Numbers of float that a worker needs. */
int64_t attention_scratch(int64_t D) {
    return (3 * TILE + STRIP) * width_of(D) + TILE * (ROW + 4) + 3 * BLOCK + STRIP * groups_of(D);
}

static memory memory_of(float *p, int64_t width) {
    memory m;
    m.queries = p;
    m.result = m.queries + TILE * width;
    m.merged = m.result + TILE * width;
    m.strip = m.merged + TILE * width;
    m.scores = m.strip + STRIP * width;
    m.key_scales = m.scores + TILE * ROW;
    m.value_scales = m.key_scales + BLOCK;
    m.key_positions = m.value_scales + BLOCK;
    m.best = m.key_positions + BLOCK;
    m.mass = m.best + TILE;
    m.merged_best = m.mass + TILE;
    m.merged_mass = m.merged_best + TILE;
    m.strip_scales = m.merged_mass + TILE;
    return m;
}

/* Some rows of one K/V head of one sequence. Row r is head r % G of the group, of the sequence's query r / G. */
typedef struct {
    const span *sequence;
    const int64_t *table;
    int64_t head, row, rows;
} tile;

static int64_t smaller(int64_t a, int64_t b) {
    return a < b ? a : b;
}

static int64_t larger(int64_t a, int64_t b) {
    return a > b ? a : b;
}

/* The first key that a query sees, and the first after those. */
static int64_t first_visible(const attention_arguments *a, const span *s, int64_t query) {
    return a->window ? larger(0, a->positions[s->start + query] - a->window + 1) : 0;
}

static int64_t after_visible(const attention_arguments *a, const span *s, int64_t query) {
    if (a->causal) return s->context - s->n + query + 1;
    return a->window ? smaller(s->context, larger(0, a->positions[s->start + query] + a->window)) : s->context;
}

/* The least `first_visible` of some queries: in a tree positions do not ascend. */
static int64_t first_visible_of(const attention_arguments *a, const span *s, int64_t query, int64_t end) {
    int64_t first = first_visible(a, s, query);
    for (query++; a->window && query < end; query++) first = smaller(first, first_visible(a, s, query));
    return first;
}

static float cached_number(const void *p, int64_t format, int64_t i) {
    if (format == FLOAT32) return ((const float *)p)[i];
    if (format == INT8) return ((const int8_t *)p)[i];
    uint32_t bits = (uint32_t)((const uint16_t *)p)[i] << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* Converts vectors to float, padded with zeros. [count, D], `stride` numbers apart -> [count, width] */
INLINE void convert_from(const int format, vectors p, int64_t stride, int64_t D, int64_t count, float *out) {
    int64_t width = width_of(D), whole = format == INT4 ? width : D; /* groups of int4 end with zeros */
    for (int64_t j = 0; j < count; j++) {
        int64_t d = 0;
        for (; d + LANES <= whole; d += LANES) store(out + j * width + d, load_cached(p, format, j * stride, d));
        for (; d < width; d++) out[j * width + d] = d < D ? cached_number(p.numbers, format, j * stride + d) : 0;
    }
}

static void convert(vectors p, int64_t format, int64_t stride, int64_t D, int64_t count, float *out) {
    switch (format) {
    case FLOAT32: convert_from(FLOAT32, p, stride, D, count, out); break;
    case BFLOAT16: convert_from(BFLOAT16, p, stride, D, count, out); break;
    case INT8: convert_from(INT8, p, stride, D, count, out); break;
    case INT4: convert_from(INT4, p, stride, D, count, out); break;
    }
}

/* Number of a position's vector in [pages, K, P]. */
static int64_t slot_of(const attention_arguments *a, const tile *t, int64_t position) {
    return (t->table[position / a->P] * a->K + t->head) * a->P + position % a->P;
}

/* Scales of int4 as float. */
static const float *strip_scales(const void *scales, int64_t first, int64_t count, float *out) {
    const uint16_t *from = (const uint16_t *)scales + first;
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) store(out + i, load_float16(from + i));
    for (; i < count; i++) out[i] = float16_to_float(from[i]);
    return out;
}

/* Vectors of one strip and one page. */
typedef struct {
    const char *start;
    int64_t count, bytes; /* of each */
} strip;

/* The first of the vectors i : end of the tile's head. */
static strip strip_at(const attention_arguments *a, const tile *t, const void *cache, int64_t i, int64_t end) {
    int64_t count = smaller(end - i, smaller(a->P - i % a->P, STRIP - i % STRIP));
    int64_t bytes = cached_bytes(a->format, stored_width(a));
    return (strip){(const char *)cache + slot_of(a, t, i) * bytes, count, bytes};
}

/* Asks for some vectors, from number `first` on. Into the L2 cache: two strips of floats would fill the L1 cache. */
static void fetch(strip next, int64_t first, int64_t count) {
    int64_t end = smaller(first + count, next.count) * next.bytes;
    for (int64_t i = first * next.bytes; i < end; i += 64) __builtin_prefetch(next.start + i, 0, 2);
}

/* The tile's scores with the keys first : end of the block that begins at `start`; or, with a result, the sum of values
 * by weight. Rows of a group skip what none of them sees. A few rows are multiplied sooner than memory delivers: the
 * next strip is fetched meanwhile, and with the last one what will be read `after` the block. */
static void multiply_block(const attention_arguments *a, const tile *t, const memory *m, int64_t start, int64_t first,
                           int64_t end, const void *cache, const void *scales, float *result, strip after) {
    const span *s = t->sequence;
    int64_t G = a->H / a->K, own = result ? a->V : a->D, width = width_of(own), stored = stored_width(a);
    bool direct = width == own && (a->format == FLOAT32 || t->rows <= GROUP) && (a->format != INT4 || stored == own);
    int64_t format = direct ? a->format : FLOAT32, stride = direct ? stored : width, groups = groups_of(a->D);
    for (int64_t i = first, count; i < end; i += count) {
        strip here = strip_at(a, t, cache, i, end), next = {0};
        count = here.count;
        if (t->rows <= FEW) next = i + count < end ? strip_at(a, t, cache, i + count, end) : after;
        vectors from = {here.start, NULL};
        if (a->format == INT4)
            from.scales = strip_scales(scales, slot_of(a, t, i) * groups, count * groups, m->strip_scales);
        if (!direct) {
            convert(from, a->format, stored, own, count, m->strip);
            from = (vectors){m->strip, NULL};
        }
        for (int64_t row = 0; row < t->rows; row += GROUP, next.count = 0) {
            int64_t rows = smaller(GROUP, t->rows - row);
            int64_t visible = smaller(count, after_visible(a, s, (t->row + row + rows - 1) / G) - i);
            int64_t step = next.count ? larger(8, FETCHED / here.bytes / 8 * 8) : STRIP;
            for (int64_t j = 0; j < visible; j += step) {
                int64_t some = smaller(step, visible - j);
                vectors these = {(const char *)from.numbers + j * cached_bytes(format, stride), NULL};
                if (from.scales) these.scales = from.scales + j * groups;
                float *scores = m->scores + row * ROW + i + j - start;
                fetch(next, j, step);
                if (result) {
                    add_values(rows, format, scores, these, stride, width, some, result + row * width);
                } else {
                    compute_scores(rows, format, m->queries + row * width, these, width, some, scores);
                }
            }
        }
    }
}

/* Hides from one row the keys that its query does not see, of a block of `size` keys. */
static void mask_row(const attention_arguments *a, const span *s, int64_t query, int64_t start, int64_t size,
                     float *scores) {
    int64_t first = larger(0, first_visible(a, s, query) - start), end = larger(0, after_visible(a, s, query) - start);
    for (int64_t j = 0; j < smaller(first, size); j++) scores[j] = -INFINITY;
    for (int64_t j = end; j < width_of(size); j++) scores[j] = -INFINITY;
    const int64_t *tree_positions = a->positions + s->start + s->n - s->tree;
    int64_t branch = query - (s->n - s->tree), line = s->context - s->tree;
    if (branch < 0) return;
    for (int64_t j = larger(0, line - start); j < smaller(end, size); j++) {
        int64_t token = start + j - line, back = tree_positions[branch] - tree_positions[token];
        if (!a->seen[s->seen + branch * s->tree + token] || (a->window && back >= a->window)) scores[j] = -INFINITY;
    }
}

/* Adds the bias of each key's distance: within M a piece of the table, beyond it one of its ends. */
static void add_bias(const attention_arguments *a, const span *s, int64_t query, int64_t head, int64_t start,
                     int64_t size, float *scores) {
    int64_t M = a->distances, position = a->positions[s->start + query], tree = s->context - s->tree;
    const float *bias = a->bias + head * (2 * M + 1) + M;
    int64_t line = smaller(size, larger(0, tree - start));
    int64_t low = smaller(line, larger(0, position - M - start));
    int64_t high = smaller(line, larger(0, position + M + 1 - start));
    for (int64_t j = 0; j < low; j++) scores[j] += bias[-M];
    for (int64_t j = low; j < high; j++) scores[j] += bias[start + j - position];
    for (int64_t j = high; j < line; j++) scores[j] += bias[M];
    for (int64_t j = line; j < size; j++) {
        int64_t distance = a->positions[s->start + s->n - s->tree + start + j - tree] - position;
        scores[j] += bias[smaller(M, larger(-M, distance))];
    }
}

/* Turns one row's scores into weights, exp(score - best). */
static void softmax_row(const attention_arguments *a, const tile *t, const memory *m, int64_t row, int64_t start,
                        int64_t size) {
    const span *s = t->sequence;
    int64_t G = a->H / a->K, query = (t->row + row) / G, head = t->head * G + (t->row + row) % G;
    int64_t padded = width_of(size);
    float *scores = m->scores + row * ROW;
    if (a->format == INT8)
        for (int64_t j = 0; j < padded; j += LANES) store(scores + j, load(scores + j) * load(m->key_scales + j));
    if (a->cap) {
        floats cap = splat((float)a->cap);
        for (int64_t j = 0; j < padded; j += LANES)
            store(scores + j, cap * hyperbolic_tangent(load(scores + j) / cap));
    }
    if (a->bias) add_bias(a, s, query, head, start, size, scores);
    if (a->slopes) {
        floats slope = splat(a->slopes[head]);
        float position = (float)a->positions[s->start + query];
        for (int64_t j = 0; j < padded; j += LANES) {
            floats distance = magnitude(load(m->key_positions + j) - position);
            store(scores + j, multiply_add(-slope, distance, load(scores + j)));
        }
    }
    mask_row(a, s, query, start, size, scores);
    floats most = splat(-INFINITY), total = {0};
    for (int64_t j = 0; j < padded; j += LANES) most = at_least(load(scores + j), most);
    float best = largest(most);
    floats base = splat(best == -INFINITY ? 0 : best); /* if it sees no key: all weights 0, not NaN */
    for (int64_t j = 0; j < padded; j += LANES) {
        floats weight = exponential(load(scores + j) - base);
        total += weight;
        if (a->format == INT8) weight *= load(m->value_scales + j);
        store(scores + j, weight);
    }
    m->best[row] = best;
    m->mass[row] = sum(total);
}

/* Scales and positions of the keys first : end of the block that begins at `start`; 0 for the others. */
static void load_scales(const attention_arguments *a, const tile *t, const memory *m, int64_t start, int64_t first,
                        int64_t end) {
    for (int64_t j = 0; a->format == INT8 && j < BLOCK; j++) {
        bool visible = start + j >= first && start + j < end;
        int64_t slot = visible ? slot_of(a, t, start + j) : 0;
        m->key_scales[j] = visible ? ((const float *)a->key_scales)[slot] : 0;
        m->value_scales[j] = visible ? ((const float *)a->value_scales)[slot] : 0;
    }
    const span *s = t->sequence;
    int64_t line = s->context - s->tree;
    for (int64_t j = 0; a->slopes && j < BLOCK; j++) {
        int64_t token = start + j - line; /* of the tree */
        bool in_tree = token >= 0 && token < s->tree;
        m->key_positions[j] = (float)(in_tree ? a->positions[s->start + s->n - s->tree + token] : start + j);
    }
}

/* Attention of a tile to one block: fills m->result (not divided by its mass), m->best and m->mass. */
static void attend_block(const attention_arguments *a, const tile *t, const memory *m, int64_t block) {
    const span *s = t->sequence;
    int64_t G = a->H / a->K, width = width_of(a->V), start = block * BLOCK;
    int64_t query = t->row / G, last = (t->row + t->rows - 1) / G;
    int64_t first = larger(start, first_visible_of(a, s, query, last + 1));
    int64_t end = smaller(start + BLOCK, after_visible(a, s, last));
    tile following = *t;
    following.head++;
    strip values = strip_at(a, t, a->values, first, end), after = {0};
    if (following.head < a->K) after = strip_at(a, &following, a->keys, first, end);
    load_scales(a, t, m, start, first, end);
    multiply_block(a, t, m, start, first, end, a->keys, a->key_scales, NULL, values);
    for (int64_t row = 0; row < t->rows; row++) softmax_row(a, t, m, row, start, end - start);
    memset(m->result, 0, sizeof(float) * t->rows * width);
    multiply_block(a, t, m, start, first, end, a->values, a->value_scales, m->result, after);
}

/* Merges a block's result into that of the blocks before it, for one row. Not inlined: compilers may round two copies
 * differently. */
static __attribute__((noinline)) void merge(const memory *m, int64_t row, const float *result, float best, float mass,
                                            int64_t width) {
    float *merged = m->merged + row * width, earlier = m->merged_best[row];
    float highest = best > earlier ? best : earlier, base = highest == -INFINITY ? 0 : highest;
    floats factors = exponential((floats){earlier - base, best - base});
    floats before = splat(factors[0]), now = splat(factors[1]);
    for (int64_t d = 0; d < width; d += LANES)
        store(merged + d, multiply_add(load(result + d), now, load(merged + d) * before));
    m->merged_best[row] = highest;
    m->merged_mass[row] = m->merged_mass[row] * factors[0] + mass * factors[1];
}

/* Before the first block there is nothing, or the sink of each row's head: a score of weight 1. */
static void begin_merging(const attention_arguments *a, const tile *t, const memory *m, int64_t width) {
    int64_t G = a->H / a->K;
    memset(m->merged, 0, sizeof(float) * t->rows * width);
    for (int64_t row = 0; row < t->rows; row++) {
        m->merged_best[row] = a->sinks ? a->sinks[t->head * G + (t->row + row) % G] : -INFINITY;
        m->merged_mass[row] = a->sinks ? 1 : 0;
    }
}

static void write_result(const attention_arguments *a, const tile *t, const memory *m) {
    int64_t G = a->H / a->K, width = width_of(a->V);
    for (int64_t row = 0; row < t->rows; row++) {
        int64_t token = t->sequence->start + (t->row + row) / G, head = t->head * G + (t->row + row) % G;
        float *out = a->out + token * a->out_stride + head * a->V;
        for (int64_t d = 0; d < width; d += LANES)
            store_part(out + d, load(m->merged + row * width + d) / m->merged_mass[row], a->V - d);
        if (a->format == INT4) rotate(out, a->V);
    }
}

static void load_queries(const attention_arguments *a, const tile *t, const memory *m) {
    int64_t G = a->H / a->K, width = width_of(a->D);
    for (int64_t row = 0; row < t->rows; row++) {
        int64_t token = t->sequence->start + (t->row + row) / G, head = t->head * G + (t->row + row) % G;
        const float *q = a->q + token * a->stride + head * a->D;
        for (int64_t d = 0; d < width; d += LANES)
            store(m->queries + row * width + d, load_part(q + d, a->D - d) * (float)a->scale);
        if (a->format == INT4) rotate(m->queries + row * width, a->D);
    }
}

/* --- division of the work ----------------------------------------------------------------------------------------- */

/* The work on one K/V head of a sequence: all blocks of each tile, or each block of the only tile. */
typedef struct {
    int64_t rows, first_block, blocks, pieces;
    bool by_blocks;
} division;

static division divide(const attention_arguments *a, const span *s) {
    int64_t rows = s->n * (a->H / a->K);
    if (!rows) return (division){0};
    int64_t first_block = first_visible_of(a, s, 0, s->n) / BLOCK;
    int64_t blocks = (s->context + BLOCK - 1) / BLOCK - first_block;
    bool by_blocks = rows <= FEW && blocks > 1;
    return (division){rows, first_block, blocks, by_blocks ? blocks : (rows + TILE - 1) / TILE, by_blocks};
}

/* Numbers of float that the results of blocks take, in all sequences. */
int64_t attention_parts(const attention_arguments *a) {
    int64_t total = 0;
    for (int64_t i = 0; i < a->N; i++) {
        division d = divide(a, a->spans + i);
        if (d.by_blocks) total += d.blocks * d.rows * a->K * (width_of(a->V) + 2);
    }
    return total;
}

/* Attend with one tile to all blocks that it sees. */
static void attend_tile(const attention_arguments *a, const tile *t, const memory *m) {
    const span *s = t->sequence;
    int64_t G = a->H / a->K, width = width_of(a->V), query = t->row / G, last = (t->row + t->rows - 1) / G;
    int64_t first = first_visible_of(a, s, query, last + 1) / BLOCK;
    int64_t end = (after_visible(a, s, last) + BLOCK - 1) / BLOCK;
    load_queries(a, t, m);
    begin_merging(a, t, m, width);
    for (int64_t block = first; block < end; block++) {
        attend_block(a, t, m, block);
        for (int64_t r = 0; r < t->rows; r++)
            merge(m, r, m->result + r * width, m->best[r], m->mass[r], width);
    }
    write_result(a, t, m);
}

/* Attend to one block, and merge all if the others are complete. `parts` [blocks, rows, width + 2] are this head's. */
static void attend_piece(const attention_arguments *a, const tile *t, const memory *m, const division *d, int64_t block,
                         float *parts, atomic_int_fast64_t *done) {
    int64_t width = width_of(a->V), each = width + 2;
    load_queries(a, t, m);
    attend_block(a, t, m, d->first_block + block);
    for (int64_t r = 0; r < d->rows; r++) {
        float *part = parts + (block * d->rows + r) * each;
        memcpy(part, m->result + r * width, sizeof(float) * width);
        part[width] = m->best[r];
        part[width + 1] = m->mass[r];
    }
    if (atomic_fetch_add_explicit(done, 1, memory_order_acq_rel) < d->blocks - 1) return;
    atomic_store_explicit(done, 0, memory_order_relaxed);
    begin_merging(a, t, m, width);
    for (int64_t part = 0; part < d->blocks; part++)
        for (int64_t r = 0; r < d->rows; r++) {
            const float *from = parts + (part * d->rows + r) * each;
            merge(m, r, from, from[width], from[width + 1], width);
        }
    write_result(a, t, m);
}

/* Pieces are numbered by sequence, then by tile or block, then by head. The last tiles, which see most, come first. */
void attention(const void *arguments, int64_t share, int64_t shares, int64_t worker) {
    const attention_arguments *a = arguments;
    memory m = memory_of(a->scratch + worker * attention_scratch(a->D), width_of(a->D));
    int64_t all = 0, first, last;
    for (int64_t i = 0; i < a->N; i++) all += divide(a, a->spans + i).pieces * a->K;
    share_of(all, share, shares, &first, &last);
    float *parts = a->parts;
    for (int64_t i = 0, before = 0; i < a->N && before < last; i++) {
        const span *s = a->spans + i;
        division d = divide(a, s);
        int64_t here = d.pieces * a->K, part_size = d.blocks * d.rows * (width_of(a->V) + 2);
        for (int64_t item = larger(first - before, 0); item < smaller(last - before, here); item++) {
            int64_t head = item % a->K, piece = item / a->K;
            tile t = {s, a->tables + i * a->table_stride, head, 0, d.rows};
            if (d.by_blocks) {
                attend_piece(a, &t, &m, &d, piece, parts + head * part_size, a->done + i * a->K + head);
            } else {
                t.row = (d.pieces - 1 - piece) * TILE;
                t.rows = smaller(TILE, d.rows - t.row);
                attend_tile(a, &t, &m);
            }
        }
        before += here;
        if (d.by_blocks) parts += a->K * part_size;
    }
}
