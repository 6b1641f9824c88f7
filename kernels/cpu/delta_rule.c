/* The gated delta rule: each head of a sequence has a matrix S [dk, dv] that decays, is corrected and is asked.
 *
 *     q, k  = q / |q| / sqrt(dk), k / |k|;  beta = sigmoid(b);  g = exp(-exp(decay) * softplus(a + step_bias))
 *     S     = g * S;  S = S + outer(k, beta * (v - S.T @ k));  out = S.T @ q
 *     states[after[t]] = S
 *
 * `before` leads from a token to the one before it, in this pass or in a state (reference/delta_rule.py).
 *
 * Bytes moved: in a decode step each state is read and written once, 2 V dk dv floats of a sequence and layer; of a
 * prompt's tokens S is in the L1 cache. Floor: of a decode step these bytes / bandwidth; of a prompt's token 4 vector
 * instructions for LANES numbers of S.
 *
 * A share is some of the pieces of COLUMNS columns of all heads' matrices: columns do not depend on one another. Each
 * goes through all tokens in order. A sum has one order, wherever its state comes from: a token has the same bits in
 * any batch and in chunks of any size.
 *
 * Versions:
 *   1. this one: token by token. Chunks of a line by matrix products, as on GPUs, would save the less the smaller a
 *      part of a prompt's time this is.
 */
#include "activation.h"
#include "pool.h"
#include <math.h>

enum { MOST_KEYS = 256, COLUMNS = 32, VECTORS = COLUMNS / LANES };

typedef struct {
    const float *x;         /* [T, 2 K dk + V dv], `stride` numbers from one row to the next: queries, keys, values */
    const float *gates;     /* [T, 2 V], rows `gate_stride` apart: b and a */
    const float *decay;     /* [V]: the logarithm of the rate */
    const float *step_bias; /* [V] */
    float *states;          /* [slots, V, dk, dv] */
    const int64_t *before;  /* [T]: a row, -1 for none, or -2 - slot */
    const int64_t *after;   /* [T]: a slot that no token of the pass reads, or -1 */
    float *out;             /* [T, V dv] */
    int64_t T, K, V, dk, dv, stride, gate_stride;
} delta_rule_arguments;

/* Some columns of the matrix of one value head, zeros beyond the last; and a token's query and key. */
typedef struct {
    _Alignas(64) float S[MOST_KEYS][COLUMNS];
    float q[MOST_KEYS], k[MOST_KEYS];
    int64_t head, column, count;
} columns;

/* `count` numbers, maybe none, then zeros. */
INLINE floats load_some(const float *p, int64_t count) {
    return count > 0 ? load_part(p, count) : (floats){0};
}

/* x / |x| * factor */
INLINE void normalise(const float *x, int64_t count, float factor, float *out) {
    floats squares = {0};
    for (int64_t i = 0; i < count; i += LANES) {
        floats v = load_part(x + i, count - i);
        squares = multiply_add(v, v, squares);
    }
    factor /= sqrtf(sum(squares) + 1e-6f);
    for (int64_t i = 0; i < count; i += LANES) store_part(out + i, load_part(x + i, count - i) * factor, count - i);
}

/* S after token t from S before it, and the token's result unless `out` is NULL. */
static void advance(const delta_rule_arguments *a, columns *c, int64_t t, float *out) {
    int64_t h = c->head, key = h / (a->V / a->K), dk = a->dk, keys = a->K * dk;
    const float *row = a->x + t * a->stride, *v = row + 2 * keys + h * a->dv + c->column;
    const float *gates = a->gates + t * a->gate_stride;
    normalise(row + keys + key * dk, dk, 1, c->k);
    float y = gates[a->V + h] + a->step_bias[h];
    float softplus = (y > 0 ? y : 0) + log1pf(expf(-fabsf(y)));
    floats g = splat(expf(-expf(a->decay[h]) * softplus)), beta = splat(1 / (1 + expf(-gates[h])));
    floats even[VECTORS] = {0}, odd[VECTORS] = {0}, correction[VECTORS], result[VECTORS] = {0};
    int64_t i = 0;
    for (; i + 2 <= dk; i += 2) { /* two sums of each column: one would wait for each of its products */
        floats first = splat(c->k[i]), second = splat(c->k[i + 1]);
        for (int64_t n = 0; n < VECTORS; n++) even[n] = multiply_add(load(c->S[i] + n * LANES), first, even[n]);
        for (int64_t n = 0; n < VECTORS; n++) odd[n] = multiply_add(load(c->S[i + 1] + n * LANES), second, odd[n]);
    }
    for (int64_t n = 0; n < VECTORS && i < dk; n++)
        even[n] = multiply_add(load(c->S[i] + n * LANES), splat(c->k[i]), even[n]);
    for (int64_t n = 0; n < VECTORS; n++) {
        floats value = load_some(v + n * LANES, c->count - n * LANES);
        correction[n] = beta * (value - g * (even[n] + odd[n]));
    }
    if (!out) {
        for (i = 0; i < dk; i++)
            for (int64_t n = 0; n < VECTORS; n++)
                store(c->S[i] + n * LANES, multiply_add(splat(c->k[i]), correction[n], g * load(c->S[i] + n * LANES)));
        return;
    }
    normalise(row + key * dk, dk, 1 / sqrtf((float)dk), c->q);
    for (i = 0; i < dk; i++) {
        floats k = splat(c->k[i]), q = splat(c->q[i]);
        for (int64_t n = 0; n < VECTORS; n++) {
            floats s = multiply_add(k, correction[n], g * load(c->S[i] + n * LANES));
            store(c->S[i] + n * LANES, s);
            result[n] = multiply_add(s, q, result[n]);
        }
    }
    for (int64_t n = 0; n < VECTORS; n++)
        if (c->count > n * LANES) store_part(out + n * LANES, result[n], c->count - n * LANES);
}

/* S after a row of this pass, or the one that it stands for: computed again from the last state on. */
static void recall(const delta_rule_arguments *a, columns *c, int64_t place) {
    int64_t distance = 0, base = place;
    for (; base >= 0; base = a->before[base]) distance++;
    if (base == -1) {
        memset(c->S, 0, sizeof(float) * COLUMNS * a->dk);
    } else {
        const float *from = a->states + (((-2 - base) * a->V + c->head) * a->dk) * a->dv + c->column;
        for (int64_t i = 0; i < a->dk; i++)
            for (int64_t n = 0; n < VECTORS; n++)
                store(c->S[i] + n * LANES, load_some(from + i * a->dv + n * LANES, c->count - n * LANES));
    }
    while (distance--) {
        int64_t row = place;
        for (int64_t i = 0; i < distance; i++) row = a->before[row];
        advance(a, c, row, NULL);
    }
}

static void keep_state(const delta_rule_arguments *a, const columns *c, int64_t slot) {
    float *to = a->states + ((slot * a->V + c->head) * a->dk) * a->dv + c->column;
    for (int64_t i = 0; i < a->dk; i++) memcpy(to + i * a->dv, c->S[i], sizeof(float) * c->count);
}

void delta_rule(const void *arguments, int64_t share, int64_t shares, int64_t worker) {
    const delta_rule_arguments *a = arguments;
    int64_t first, last, pieces = (a->dv + COLUMNS - 1) / COLUMNS;
    columns c;
    (void)worker;
    share_of(a->V * pieces, share, shares, &first, &last);
    for (int64_t piece = first; piece < last; piece++) {
        c.head = piece / pieces;
        c.column = piece % pieces * COLUMNS;
        c.count = a->dv - c.column < COLUMNS ? a->dv - c.column : COLUMNS;
        for (int64_t t = 0; t < a->T; t++) {
            if (t == 0 || a->before[t] != t - 1) recall(a, &c, a->before[t]);
            advance(a, &c, t, a->out + t * a->V * a->dv + c.head * a->dv + c.column);
            if (a->after[t] >= 0) keep_state(a, &c, a->after[t]);
        }
    }
}
