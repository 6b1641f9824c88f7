/* Log-probabilities of a row's tokens: its normaliser, and its most likely tokens.
 *
 *     log_probs    sums = log(exp(logits).sum(-1)), and the n largest logits of each row, ties by ascending id, as
 *                  log_sum_exp and top_indices of reference/softmax.py
 *
 * Bytes moved: a row is read three times (maximum, sum, maxima of blocks), after the first from the L2 cache.
 * Floor: V exponentials.
 *
 * Divided by rows.
 */
#include "activation.h"
#include "pool.h"
#include "selection.h"
#include <stdlib.h>

typedef struct {
    const float *logits; /* [R, V], no NaN */
    double *sums;        /* [R], out; or NULL */
    int64_t *ids;        /* [R, n], out: the most likely tokens, best first */
    uint8_t *scratch;    /* [workers, log_probs_scratch(V)] */
    int64_t R, V, n;
} log_probs_arguments;

typedef struct {
    float score;
    int64_t id;
} scored;

/* Bytes that a worker needs for V logits. */
int64_t log_probs_scratch(int64_t V) {
    return (int64_t)(sizeof(scored) + sizeof(int64_t) + 2 * sizeof(float)) * V;
}

static int best_first(const void *a, const void *b) {
    const scored *x = a, *y = b;
    if (x->score != y->score) return x->score > y->score ? -1 : 1;
    return (x->id > y->id) - (x->id < y->id);
}

/* Blocks of a few hundred numbers are summed in float, blocks in double. */
static double log_sum_exp(const float *x, int64_t V) {
    enum { BLOCK = 32 * LANES };
    bool ordinary = true;
    float best = largest_of(x, V, &ordinary);
    double total = 0;
    for (int64_t first = 0; first < V; first += BLOCK) {
        int64_t end = first + BLOCK < V ? first + BLOCK : V, i = first;
        floats part[2] = {{0}};
        for (; i + 2 * LANES <= end; i += 2 * LANES)
#pragma GCC unroll 2
            for (int k = 0; k < 2; k++) part[k] += exponential(load(x + i + k * LANES) - best);
        for (; i < end; i += LANES) {
            floats y = exponential(load_part(x + i, end - i) - best);
            for (int k = 0; k < LANES && i + k < end; k++) total += y[k];
        }
        total += sum(part[0] + part[1]);
    }
    return best + log(total);
}

static void top_n(const float *x, int64_t V, int64_t n, int64_t *ids, uint8_t *scratch) {
    scored *found = (scored *)scratch;
    int64_t *few = (int64_t *)(found + V), count = best_few(x, 1, V, n, few, (float *)(few + V));
    for (int64_t j = 0; j < count; j++) found[j] = (scored){x[few[j]], few[j]};
    qsort(found, count, sizeof(scored), best_first);
    for (int64_t j = 0; j < n; j++) ids[j] = j < count ? found[j].id : 0; /* fewer where there is NaN */
}

void log_probs(const void *arguments, int64_t share, int64_t shares, int64_t worker) {
    const log_probs_arguments *a = arguments;
    int64_t first, last;
    share_of(a->R, share, shares, &first, &last);
    for (int64_t r = first; r < last; r++) {
        const float *row = a->logits + r * a->V;
        if (a->sums) a->sums[r] = log_sum_exp(row, a->V);
        if (a->n) top_n(row, a->V, a->n, a->ids + r * a->n, a->scratch + worker * log_probs_scratch(a->V));
    }
}
