/* The choice of a token from logits: argmax, and sampling.
 *
 *     argmax    tokens, finite = logits.argmax(-1), (logits < inf).all(-1)
 *     sample    the token at which the cumulative mass reaches a uniform number, as reference/sampling.py defines it:
 *               temperature, top-k, top-p, min-p, then candidates by descending score and ascending id
 *
 * Bytes moved: argmax reads each logit once. Sampling reads a row about four times, after the first from the L2 cache.
 * Floor: argmax, 4 V bytes / bandwidth; sampling, V exponentials and V additions to buckets in the L1 cache.
 *
 * argmax is divided into pieces of a row; whoever completes the last piece of a row compares them. sample is divided by
 * rows. Neither result depends on the division.
 *
 * Sampling does not sort. Every filter keeps a prefix of the candidates in their order, so it only lowers the mass that
 * the uniform number is a fraction of. Weights are summed in buckets of 1/128 nat, best first; only the bucket in which
 * a mass is reached is searched: divided again, and sorted when few are left.
 */
#include "activation.h"
#include "pool.h"
#include <math.h>
#include <stdbool.h>

/* --- argmax ------------------------------------------------------------------------------------------------------- */

enum { PIECE = 4096 }; /* logits searched together */

typedef struct {
    const float *logits;       /* [R, V] */
    int64_t *tokens;           /* [R], out: the smallest id of the largest logit, or of the first NaN if there is one */
    int64_t *finite;           /* [R], out: 0 if any logit is NaN or +infinity */
    int64_t *pieces;           /* [R, ceil(V / PIECE)], scratch */
    atomic_int_fast64_t *done; /* [R], 0 at first and again after each call */
    int64_t R, V;
} argmax_arguments;

/* Whether x comes before the best so far. NaN comes first, as in NumPy. */
INLINE bool beats(float x, float best) {
    return x > best || (x != x && best == best);
}

/* The largest of n numbers but NaN; `ordinary` becomes false if any is NaN or +infinity. */
static float largest_of(const float *x, int64_t n, bool *ordinary) {
    floats best[4];
    ints below = {0}; /* -1 where all numbers so far were below infinity */
    below = ~below;
    for (int k = 0; k < 4; k++) best[k] = splat(-INFINITY);
    int64_t i = 0;
    for (; i + 4 * LANES <= n; i += 4 * LANES)
#pragma GCC unroll 4
        for (int k = 0; k < 4; k++) {
            floats v = load(x + i + k * LANES);
            best[k] = at_least(v, best[k]);
            below &= v < INFINITY;
        }
    float most = largest(at_least(at_least(best[0], best[1]), at_least(best[2], best[3])));
    for (int k = 0; k < LANES; k++) *ordinary &= below[k] != 0;
    for (; i < n; i++) {
        most = x[i] > most ? x[i] : most;
        *ordinary &= x[i] < INFINITY;
    }
    return most;
}

/* The index of the largest of n numbers, the first of equals. The second pass finds its place. */
static int64_t search(const float *x, int64_t n) {
    bool ordinary = true;
    float most = largest_of(x, n, &ordinary);
    int64_t found = 0;
    if (!ordinary) {
        for (int64_t j = 1; j < n; j++)
            if (beats(x[j], x[found])) found = j;
        return found;
    }
    for (bool here = false; found + 64 <= n; found += 64) { /* a block at a time, then one by one */
        for (int64_t j = 0; j < 64; j++) here |= x[found + j] == most;
        if (here) break;
    }
    while (x[found] != most) found++;
    return found;
}

void argmax(const void *arguments, int64_t share, int64_t shares, int64_t worker) {
    const argmax_arguments *a = arguments;
    int64_t each = (a->V + PIECE - 1) / PIECE, first, last;
    (void)worker;
    share_of(a->R * each, share, shares, &first, &last);
    for (int64_t piece = first; piece < last; piece++) {
        int64_t row = piece / each, start = piece % each * PIECE;
        const float *logits = a->logits + row * a->V;
        a->pieces[piece] = start + search(logits + start, a->V - start < PIECE ? a->V - start : PIECE);
        if (atomic_fetch_add_explicit(a->done + row, 1, memory_order_acq_rel) < each - 1) continue;
        atomic_store_explicit(a->done + row, 0, memory_order_relaxed);
        int64_t best = a->pieces[row * each];
        for (int64_t i = 1; i < each; i++)
            if (beats(logits[a->pieces[row * each + i]], logits[best])) best = a->pieces[row * each + i];
        a->tokens[row] = best;
        a->finite[row] = logits[best] < INFINITY;
    }
}

/* --- sampling ----------------------------------------------------------------------------------------------------- */

enum {
    BUCKETS = 4096,
    BUCKETS_PER_NAT = 128, /* 32 nats in all: candidates further below the best share the last bucket */
    SORTED = 32            /* up to so many candidates are sorted by insertion */
};
static const double FAR = 104; /* nats below the best at which a weight is 0 in float */

/* The arguments of one draw. */
typedef struct {
    double temperature, top_p, min_p, uniform;
    int64_t top_k; /* 0: all */
} draw;

typedef struct {
    const float *logits; /* [R, V] */
    const draw *draws;   /* [R] */
    int64_t *tokens;     /* [R], out; -1 if the largest logit of the row is not finite */
    double *scratch;     /* [workers, sample_scratch(V)] */
    int64_t R, V;
} sample_arguments;

/* The M candidates of a row that top-k leaves, and memory to search them. */
typedef struct {
    double *coarse, *fine;  /* [BUCKETS]: mass by bucket, of all and of some members of a bucket */
    int64_t *members, *ids; /* [M]; ids ascend */
    float *scores, *weights;
    int16_t *buckets;
    int64_t M;
} candidates;

/* Numbers of double that a worker needs for V logits. */
int64_t sample_scratch(int64_t V) {
    return 2 * BUCKETS + 4 * V;
}

static candidates candidates_of(double *p, int64_t V) {
    candidates c = {.coarse = p, .fine = p + BUCKETS, .members = (int64_t *)(p + 2 * BUCKETS)};
    c.ids = c.members + V;
    c.scores = (float *)(c.ids + V);
    c.weights = c.scores + V;
    c.buckets = (int16_t *)(c.weights + V);
    return c;
}

/* The k-th largest of n numbers, which are reordered (Hoare's selection). 0 < k <= n; no NaN */
static float select_largest(float *x, int64_t n, int64_t k) {
    int64_t low = 0, high = n - 1;
    while (low < high) {
        float pivot = x[low + (high - low) / 2];
        int64_t i = low, j = high;
        while (i <= j) {
            while (x[i] > pivot) i++;
            while (x[j] < pivot) j--;
            if (i <= j) {
                float swapped = x[i];
                x[i++] = x[j];
                x[j--] = swapped;
            }
        }
        if (k - 1 <= j) high = j;
        else if (k - 1 >= i) low = i;
        else break;
    }
    return x[k - 1];
}

/* Keeps the k best of V scores and all ties with the last of them.
 *
 * k of the maxima of blocks, which are scores too, reach the k-th largest maximum. So the k-th largest score is not
 * below it, and only the few scores that reach it are searched. */
static void keep_top_k(candidates *c, int64_t V, int64_t k) {
    int64_t size = (int64_t)sqrt((double)V), blocks = size ? V / size : 0;
    float *copy = c->weights, least = -INFINITY;
    bool ordinary = true;
    if (k <= blocks) {
        for (int64_t b = 0; b < blocks; b++) copy[b] = largest_of(c->scores + b * size, size, &ordinary);
        least = select_largest(copy, blocks, k);
    }
    int64_t found = 0, kept = 0;
    for (int64_t first = 0; first < V; first += 64) {
        int64_t end = first + 64 < V ? first + 64 : V;
        bool here = false; /* most blocks have none */
        for (int64_t i = first; i < end; i++) here |= c->scores[i] >= least;
        for (int64_t i = first; here && i < end; i++)
            if (c->scores[i] >= least) {
                c->ids[found] = i;
                c->scores[found++] = c->scores[i];
            }
    }
    memcpy(copy, c->scores, sizeof(float) * found);
    least = select_largest(copy, found, k);
    for (int64_t i = 0; i < found; i++)
        if (c->scores[i] >= least) {
            c->ids[kept] = c->ids[i];
            c->scores[kept++] = c->scores[i];
        }
    c->M = kept;
}

/* The first bucket with which the mass reaches `target` (else the last that has any); `before` becomes the mass before
 * that bucket. */
static int64_t bucket_reaching(const double *masses, double target, double *before) {
    int64_t found = 0;
    double mass = *before;
    for (int64_t b = 0; b < BUCKETS; b++) {
        if (!(masses[b] > 0)) continue;
        found = b;
        *before = mass;
        mass += masses[b];
        if (mass >= target) break;
    }
    return found;
}

/* Keeps the members in the bucket that reaches `target`, of buckets between the highest and the lowest of them. Returns
 * how many are left. */
static int64_t narrow(const candidates *c, int64_t count, double target, double *before) {
    float high = c->scores[c->members[0]], low = high;
    for (int64_t j = 0; j < count; j++) {
        float score = c->scores[c->members[j]];
        high = score > high ? score : high;
        low = score < low ? score : low;
    }
    if (high == low) return count;
    double width = (double)high - low, last = BUCKETS - 1, per_unit = last / (width < FAR ? width : FAR);
    memset(c->fine, 0, sizeof(double) * BUCKETS);
    for (int64_t j = 0; j < count; j++) {
        double place = ((double)high - c->scores[c->members[j]]) * per_unit;
        c->fine[(int64_t)(place < last ? place : last)] += c->weights[c->members[j]];
    }
    int64_t wanted = bucket_reaching(c->fine, target, before), kept = 0;
    for (int64_t j = 0; j < count; j++) {
        double place = ((double)high - c->scores[c->members[j]]) * per_unit;
        if ((int64_t)(place < last ? place : last) == wanted) c->members[kept++] = c->members[j];
    }
    return kept;
}

/* The first candidate at which the cumulative mass reaches `target`; `through` becomes the mass including it. */
static int64_t reach(const candidates *c, double target, double *through) {
    double before = 0;
    int64_t bucket = bucket_reaching(c->coarse, target, &before), count = 0;
    for (int64_t first = 0; first < c->M; first += 64) {
        int64_t end = first + 64 < c->M ? first + 64 : c->M;
        bool here = false; /* most blocks have no member */
        for (int64_t i = first; i < end; i++) here |= c->buckets[i] == bucket;
        for (int64_t i = first; here && i < end; i++)
            if (c->buckets[i] == bucket) c->members[count++] = i;
    }
    int64_t *members = c->members;
    while (count > SORTED) {
        int64_t kept = narrow(c, count, target, &before);
        if (kept == count) break; /* all are equal, and their ids ascend */
        count = kept;
    }
    if (count <= SORTED) /* by descending score, stable */
        for (int64_t j = 1; j < count; j++) {
            int64_t one = members[j], k = j;
            for (; k > 0 && c->scores[members[k - 1]] < c->scores[one]; k--) members[k] = members[k - 1];
            members[k] = one;
        }
    int64_t j = 0;
    before += c->weights[members[0]];
    while (j + 1 < count && before < target) before += c->weights[members[++j]]; /* may miss it by a rounding error */
    *through = before;
    return members[j];
}

static int64_t sample_row(const float *logits, int64_t V, const draw *d, candidates c) {
    float temperature = (float)d->temperature;
    for (int64_t i = 0; i < V; i++) c.scores[i] = logits[i] / temperature;
    bool ordinary = true;
    float best = largest_of(c.scores, V, &ordinary);
    if (!ordinary || best == -INFINITY) return -1;
    c.M = V;
    bool filtered = 0 < d->top_k && d->top_k < V;
    if (filtered) keep_top_k(&c, V, d->top_k);
    memset(c.coarse, 0, sizeof(double) * BUCKETS);
    for (int64_t i = 0; i < c.M; i += LANES) {
        floats below = load_part(c.scores + i, c.M - i) - best;
        store_part(c.weights + i, exponential(below), c.M - i);
    }
    for (int64_t i = 0; i < c.M; i++) {
        float place = (best - c.scores[i]) * BUCKETS_PER_NAT;
        c.buckets[i] = (int16_t)(place < BUCKETS - 1 ? place : BUCKETS - 1);
    }
    for (int64_t i = 0; i < c.M; i++) c.coarse[c.buckets[i]] += c.weights[i];
    double mass = 0, through;
    for (int64_t b = 0; b < BUCKETS; b++) mass += c.coarse[b];
    if (d->top_p < 1) {
        reach(&c, d->top_p * mass, &through);
        mass = through;
    }
    if (d->min_p > 0) {
        double likely = 0;
        for (int64_t i = 0; i < c.M; i++) likely += c.weights[i] >= (float)d->min_p ? c.weights[i] : 0;
        mass = likely < mass ? likely : mass;
    }
    int64_t index = reach(&c, d->uniform * mass, &through);
    return filtered ? c.ids[index] : index;
}

void sample(const void *arguments, int64_t share, int64_t shares, int64_t worker) {
    const sample_arguments *a = arguments;
    int64_t first, last;
    share_of(a->R, share, shares, &first, &last);
    for (int64_t r = first; r < last; r++) {
        candidates c = candidates_of(a->scratch + worker * sample_scratch(a->V), a->V);
        a->tokens[r] = sample_row(a->logits + r * a->V, a->V, a->draws + r, c);
    }
}
