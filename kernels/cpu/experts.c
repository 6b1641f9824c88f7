/* A mixture of experts: the choice of each token's experts, their products, and the sum of the results.
 *
 *     route           scores = softmax(logits) or sigmoid(logits); experts = argsort(-(scores + bias))[:, :k], of each
 *                     token's best groups; weights = scores[experts], / their sum if normalised, * scale,
 *                     * factors[experts];
 *                     the T k rows are sorted by expert and then by token: rows, tokens, starts
 *     linear_experts  out[starts[e]:starts[e + 1]] = x[starts[e]:starts[e + 1]] @ W[e].T + b[e], for each expert e
 *     combine         out = (weights * y[rows]).sum(axis=1) + residual
 *
 * Bytes moved: of W the matrices of the experts that have rows, once each. Floor: those bytes / memory bandwidth, as long
 * as an expert has some 16 rows or fewer; beyond, the FLOPs of the products.
 *
 * The experts are read from memory when a launch runs, so a recorded program serves every choice. A share of
 * `linear_experts` is some of the outputs of every used expert: shares are equal however the rows are distributed.
 * Products have the bits that linear.c gives them; `combine` adds likeliest first.
 */
#include "activation.h"
#include "floats.h"
#include <math.h>

void linear_few(const void *arguments, int64_t share, int64_t shares, int64_t worker);
void linear_many(const void *arguments, int64_t share, int64_t shares, int64_t worker);

/* --- choice ------------------------------------------------------------------------------------------------------- */

typedef struct {
    const float *logits; /* [T, X] */
    const float *bias;   /* [X], or NULL */
    const float *factors; /* [X], or NULL */
    int64_t *experts;    /* out, [T, k] */
    float *weights;      /* out, [T, k] */
    int64_t *rows;       /* out, [T, k]: the row of each choice */
    int64_t *tokens;     /* out, [T k]: the token of each row */
    int64_t *starts;     /* out, [X + 1]: the first row of each expert */
    int64_t T, X, k, normalised, sigmoid, groups, chosen_groups;
    int64_t group_best; /* a group's best two are added up, or its best one counts */
    double scale;
} route_arguments;

#define MOST_EXPERTS 4096
#define LEAST_SUM 1e-20f

/* Whether an expert comes before one that was found earlier; NaN is below all numbers. */
static bool is_likelier(float logit, float than) {
    return logit > than || isnan(than);
}

/* The k largest numbers, largest first, of equal ones the first. */
static void take_largest(const float *ranked, int64_t X, int64_t k, int64_t *experts) {
    for (int64_t e = 0; e < X; e++) {
        int64_t place = e < k ? e : k; /* after those chosen so far */
        while (place > 0 && is_likelier(ranked[e], ranked[experts[place - 1]])) place--;
        for (int64_t i = (e < k ? e : k - 1); i > place; i--) experts[i] = experts[i - 1];
        if (place < k) experts[place] = e;
    }
}

/* Minus infinity for the experts outside of the groups whose best two have the largest sums, or whose best one is. */
static void keep_groups(const route_arguments *a, float *ranked) {
    int64_t size = a->X / a->groups, best[MOST_EXPERTS];
    float sums[MOST_EXPERTS];
    for (int64_t g = 0; g < a->groups; g++) {
        float first = -INFINITY, second = -INFINITY;
        for (int64_t e = g * size; e < (g + 1) * size; e++) {
            float value = ranked[e];
            if (value > first) second = first, first = value;
            else if (value > second) second = value;
        }
        sums[g] = a->group_best == 1 ? first : first + second;
    }
    take_largest(sums, a->groups, a->chosen_groups, best);
    for (int64_t g = 0; g < a->groups; g++) {
        bool counts = false;
        for (int64_t i = 0; i < a->chosen_groups; i++) counts |= best[i] == g;
        for (int64_t e = g * size; !counts && e < (g + 1) * size; e++) ranked[e] = -INFINITY;
    }
}

/* The experts of a token, likeliest first, and their weights. */
static void choose(const route_arguments *a, const float *logits, int64_t *experts, float *weights) {
    int64_t X = a->X, k = a->k;
    float scores[MOST_EXPERTS + LANES], ranked[MOST_EXPERTS], most = logits[0], total = 0;
    for (int64_t e = 1; e < X; e++) most = is_likelier(logits[e], most) ? logits[e] : most;
    for (int64_t e = 0; e < X; e += LANES) {
        floats part = load_part(logits + e, X - e);
        store(scores + e, a->sigmoid ? 1 / (1 + exponential(-part)) : exponential(part - most));
    }
    if (!a->sigmoid)
        for (int64_t e = 0; e < X; e++) total += scores[e];
    if (a->bias || a->groups > 1) {
        for (int64_t e = 0; e < X; e++)
            ranked[e] = (a->sigmoid ? scores[e] : scores[e] / total) + (a->bias ? a->bias[e] : 0);
        if (a->groups > 1) keep_groups(a, ranked);
    }
    take_largest(a->bias || a->groups > 1 ? ranked : logits, X, k, experts);
    float chosen = 0, scale = a->scale;
    for (int64_t i = 0; i < k; i++) chosen += weights[i] = scores[experts[i]];
    float divisor = a->normalised ? chosen + (a->sigmoid ? LEAST_SUM : 0) : a->sigmoid ? 1 : total;
    for (int64_t i = 0; i < k; i++) {
        weights[i] = weights[i] / divisor * scale;
        if (a->factors) weights[i] *= a->factors[experts[i]];
    }
}

/* One share: the choice of a token takes less than a microsecond. */
void route(const void *arguments, int64_t share, int64_t shares, int64_t worker) {
    const route_arguments *a = arguments;
    (void)share, (void)shares, (void)worker;
    for (int64_t e = 0; e <= a->X; e++) a->starts[e] = 0;
    for (int64_t t = 0; t < a->T; t++) {
        int64_t *experts = a->experts + t * a->k;
        choose(a, a->logits + t * a->X, experts, a->weights + t * a->k);
        for (int64_t i = 0; i < a->k; i++) a->starts[experts[i] + 1]++;
    }
    for (int64_t e = 0; e < a->X; e++) a->starts[e + 1] += a->starts[e];
    for (int64_t i = 0; i < a->T * a->k; i++) { /* starts[e] goes through the rows of e, and ends at the next expert's */
        int64_t row = a->starts[a->experts[i]]++;
        a->rows[i] = row, a->tokens[row] = i / a->k;
    }
    for (int64_t e = a->X; e > 0; e--) a->starts[e] = a->starts[e - 1];
    a->starts[0] = 0;
}

/* --- products ----------------------------------------------------------------------------------------------------- */

typedef struct {
    const void *weight;
    const uint16_t *scales;
    const void *offsets;
} matrix;

typedef struct {
    linear all;             /* the product of all rows; weight, scales and offsets are those of the experts */
    const matrix *matrices; /* [X] */
    const int64_t *starts;  /* [X + 1] */
    const float *biases;    /* [X, outputs], or NULL */
    int64_t X;
    int64_t many;         /* whether `linear_many` multiplies */
    int64_t row_bytes;    /* from row to row of all.x_rounded, and ... */
    int64_t scale_stride, sum_stride; /* ... of all.x_scales and of all.x_sums, in numbers */
} expert_arguments;

void linear_experts(const void *arguments, int64_t share, int64_t shares, int64_t worker) {
    const expert_arguments *a = arguments;
    for (int64_t e = 0; e < a->X; e++) {
        int64_t first = a->starts[e];
        linear one = a->all;
        one.rows = a->starts[e + 1] - first;
        if (!one.rows) continue;
        one.weight = a->matrices[e].weight, one.scales = a->matrices[e].scales;
        one.offsets = a->matrices[e].offsets;
        one.bias = a->biases ? a->biases + e * one.outputs : NULL;
        one.x += first * one.inputs, one.out += first * one.stride;
        if (has_integers(one.format)) {
            one.x_rounded += first * a->row_bytes;
            one.x_scales += first * a->scale_stride, one.x_sums += first * a->sum_stride;
        } else if (one.x_rounded) {
            one.x_rounded += first * one.inputs * (takes_pairs(&one) ? 2 : 4);
        }
        (a->many ? linear_many : linear_few)(&one, share, shares, worker);
    }
}

/* --- sum ---------------------------------------------------------------------------------------------------------- */

typedef struct {
    const float *y;        /* [T k, E] */
    const float *weights;  /* [T, k] */
    const int64_t *rows;   /* [T, k] */
    const float *residual; /* [T, E], or NULL; not `out` */
    float *out;            /* [T, E] */
    int64_t T, E, k;
} combine_arguments;

/* A share is some of the tokens. */
void combine(const void *arguments, int64_t share, int64_t shares, int64_t worker) {
    const combine_arguments *a = arguments;
    int64_t first, last;
    (void)worker;
    share_of(a->T, share, shares, &first, &last);
    for (int64_t t = first; t < last; t++)
        for (int64_t i = 0; i < a->E; i += LANES) {
            floats total = {0};
            for (int64_t j = t * a->k; j < (t + 1) * a->k; j++) {
                floats part = load_part(a->y + a->rows[j] * a->E + i, a->E - i);
                total = multiply_add(splat(a->weights[j]), part, total);
            }
            if (a->residual) total += load_part(a->residual + t * a->E + i, a->E - i);
            store_part(a->out + t * a->E + i, total, a->E - i);
        }
}
