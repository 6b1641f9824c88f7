/* The choice of a token from logits: argmax, and sampling.
 *
 *     argmax    tokens, finite = logits.argmax(-1), (logits < inf).all(-1)
 *     sample    the token at which the cumulative mass reaches a uniform number, as reference/sampling.py defines it:
 *               temperature, top-k, top-p, min-p, then candidates by descending score and ascending id
 *     keep_allowed    logits[rows][~bits] = -inf, left = (logits[rows] > -inf).any(-1)
 *
 * Bytes moved: argmax reads each logit once, keep_allowed reads and writes it. Sampling reads a row about four times,
 * after the first from the L2 cache.
 * Floor: argmax, 4 V bytes / bandwidth; sampling, V exponentials and V additions to buckets in the L1 cache.
 *
 * argmax is divided into pieces of a row; whoever completes the last piece of a row compares them. The others are
 * divided by rows. No result depends on the division.
 *
 * Sampling does not sort. Every filter keeps a prefix of the candidates in their order, so it only lowers the mass that
 * the uniform number is a fraction of. Weights are summed in buckets of scores, best first; only the bucket in which
 * a mass is reached is searched: divided again, and sorted when few are left. Logits that are far below the best, nearly
 * all of a real model's, are only summed at first: they seldom have the token, then a second pass over all finds it.
 */
#include "activation.h"
#include "pool.h"
#include "selection.h"

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

/* The index of the first of n numbers that is `most`, which is among them. */
static int64_t place_of(const float *x, int64_t n, float most) {
    int64_t found = 0;
    for (; found + 8 * LANES <= n; found += 8 * LANES) { /* some vectors at a time, then one by one */
        floats high = splat(-INFINITY);
        for (int64_t j = 0; j < 8 * LANES; j += LANES) high = at_least(load(x + found + j), high);
        if (largest(high) == most) break;
    }
    while (x[found] != most) found++;
    return found;
}

/* The index of the largest of n numbers, the first of equals. The second pass finds its place. */
static int64_t search(const float *x, int64_t n) {
    bool ordinary = true;
    float most = largest_of(x, n, &ordinary);
    int64_t found = 0;
    if (ordinary) return place_of(x, n, most);
    for (int64_t j = 1; j < n; j++)
        if (beats(x[j], x[found])) found = j;
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
    BUCKETS = 2048, /* of equal width, from the best to the worst candidate */
    SORTED = 32,    /* up to so many candidates are sorted by insertion */
    BLOCK = 64,     /* candidates that are looked at together */
    NEAR = 3,       /* one of so many blocks has a near candidate, about */
    SAMPLED = 4     /* one of so many decides which are near */
};
static const float WIDEST = 32; /* nats: candidates further below the best share the last bucket */
static const float STEEP = 4;   /* nats below the best where far candidates begin, at least: else they have the token */
static const double FAR = 104;  /* nats below the best at which a weight is 0 in float */

/* The arguments of one draw; a temperature of 0 takes the most likely token. */
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

/* Candidates that are searched. */
typedef struct {
    int64_t *indices;
    float *scores, *weights;
} members;

/* The M candidates of a row, the score of each x / temperature, and memory to search them. */
typedef struct {
    const float *x;          /* [M]: the logits, or the scores that top-k leaves */
    float temperature, best; /* best: the largest score */
    float per_nat;           /* buckets per nat */
    double rest, sure;       /* the mass of the far candidates, and of all others; 0 and infinity if none is far */
    int64_t M;
    double *coarse, *fine; /* [BUCKETS]: mass by bucket, of all and of some members of a bucket */
    members found;         /* [V] each */
    int64_t *ids;          /* [V], of the candidates that top-k leaves, or of the near ones; they ascend */
    float *maxima;         /* [V / BLOCK], the largest logit of each block */
    float *scratch;        /* [3 V] */
    int16_t *buckets;      /* [V] */
} candidates;

/* Numbers of double that a worker needs for V logits. */
int64_t sample_scratch(int64_t V) {
    return 2 * BUCKETS + 6 * V + V / BLOCK;
}

static candidates candidates_of(double *p, int64_t V) {
    candidates c = {.coarse = p, .fine = p + BUCKETS, .found.indices = (int64_t *)(p + 2 * BUCKETS)};
    c.ids = c.found.indices + V;
    c.found.scores = (float *)(c.ids + V);
    c.found.weights = c.found.scores + V;
    c.maxima = c.found.weights + V;
    c.scratch = c.maxima + V / BLOCK;
    c.buckets = (int16_t *)(c.scratch + 3 * V);
    return c;
}

/* Keeps the k best of V scores and all ties with the last of them. */
static void keep_top_k(candidates *c, int64_t V, int64_t k) {
    int64_t found = best_few(c->x, c->temperature, V, k, c->ids, c->scratch), kept = 0;
    float *scores = c->scratch, *copy = c->scratch + V;
    for (int64_t j = 0; j < found; j++) scores[j] = copy[j] = c->x[c->ids[j]] / c->temperature;
    float least = select_largest(copy, found, k);
    for (int64_t j = 0; j < found; j++)
        if (scores[j] >= least) {
            c->ids[kept] = c->ids[j];
            scores[kept++] = scores[j];
        }
    c->x = scores;
    c->temperature = 1;
    c->M = kept;
}

/* x / temperature. A division takes as long as half an exponential. */
INLINE floats scores_of(const candidates *c, floats x) {
    return c->temperature == 1 ? x : x / c->temperature;
}

static float smallest_of(const float *x, int64_t n) {
    floats least[4];
    float found = INFINITY;
    int64_t i = 0;
    for (int k = 0; k < 4; k++) least[k] = splat(INFINITY);
    for (; i + 4 * LANES <= n; i += 4 * LANES)
#pragma GCC unroll 4
        for (int k = 0; k < 4; k++) least[k] = at_most(load(x + i + k * LANES), least[k]);
    floats most = -at_most(at_most(least[0], least[1]), at_most(least[2], least[3]));
    found = -largest(most);
    for (; i < n; i++) found = x[i] < found ? x[i] : found;
    return found;
}

/* The score below which candidates are far; -infinity if none are, as in a flat distribution. */
static float edge_of(const candidates *c) {
    int64_t blocks = c->M / BLOCK, count = 0;
    float *copy = c->scratch;
    if (blocks < 2 * NEAR * SAMPLED) return -INFINITY;
    for (int64_t b = 0; b < blocks; b += SAMPLED) copy[count++] = c->maxima[b];
    float edge = select_largest(copy, count, count / NEAR) / c->temperature;
    return c->best - edge >= STEEP ? edge : -INFINITY;
}

/* Appends those of n <= LANES candidates from index i on that are near. */
INLINE void append_near(candidates *c, floats scores, int64_t i, int64_t n, float edge) {
    for (int64_t k = 0; k < n; k++) {
        c->ids[c->M] = i + k; /* overwritten if it is far: no branch to be predicted */
        c->scratch[c->M] = scores[k];
        c->M += scores[k] >= edge;
    }
}

/* Keeps the candidates at the edge and above, and sums the others; `cold` says if the temperature is other than 1. */
INLINE void keep_near_of(candidates *c, float edge, bool cold) {
    int64_t V = c->M, first = 0;
    candidates a = *c; /* known to be no alias of what is written */
    a.temperature = cold ? a.temperature : 1;
    const floats best = splat(a.best);
    four_doubles rest = {0};
    double few = 0;
    a.M = 0;
    for (; first + BLOCK <= V; first += BLOCK) {
        const float *x = a.x + first;
        floats part[2] = {{0}};
        if (a.maxima[first / BLOCK] / a.temperature < edge) {
            for (int64_t i = 0; i < BLOCK; i += 2 * LANES)
#pragma GCC unroll 2
                for (int k = 0; k < 2; k++) {
                    floats v = load(x + i + k * LANES);
                    part[k] += decay((cold ? v / a.temperature : v) - best);
                }
        } else
            for (int64_t i = 0; i < BLOCK; i += LANES) {
                floats v = load(x + i), scores = cold ? v / a.temperature : v;
                part[i / LANES % 2] += pick(scores >= edge, splat(0), decay(scores - best));
                if (largest(scores) >= edge) append_near(&a, scores, first + i, LANES, edge);
            }
        rest += folded(part[0] + part[1]);
    }
    for (; first < V; first += LANES) {
        int64_t n = V - first < LANES ? V - first : LANES;
        floats scores = scores_of(&a, load_part(a.x + first, n)), weights = decay(scores - best);
        append_near(&a, scores, first, n, edge);
        for (int64_t k = 0; k < n; k++) few += scores[k] >= edge ? 0 : weights[k];
    }
    a.x = a.scratch;
    a.temperature = 1;
    a.rest = few + rest[0] + rest[1] + rest[2] + rest[3];
    *c = a;
}

static void keep_near(candidates *c, float edge) {
    if (c->temperature == 1) keep_near_of(c, edge, false);
    else keep_near_of(c, edge, true);
}

/* Divides the candidates into buckets, and returns their mass and that of the far ones. */
static double weigh(candidates *c) {
    double *odd = c->fine, mass = 0; /* of every other candidate: additions to one bucket wait for each other */
    float range = c->best - smallest_of(c->x, c->M) / c->temperature;
    c->per_nat = (BUCKETS - 1) / (range > 1e-30f ? (range < WIDEST ? range : WIDEST) : 1);

    memset(c->coarse, 0, sizeof(double) * BUCKETS);
    memset(odd, 0, sizeof(double) * BUCKETS);
    for (int64_t first = 0; first < c->M; first += BLOCK) {
        int64_t count = c->M - first < BLOCK ? c->M - first : BLOCK, i;
        float weights[BLOCK];
        int32_t places[BLOCK];
        for (i = 0; i < count; i += LANES) {
            floats below = scores_of(c, load_part(c->x + first + i, count - i)) - c->best;
            ints place = __builtin_convertvector(at_most(splat(BUCKETS - 1), below * -c->per_nat), ints);
            store(weights + i, exponential(below));
            memcpy(places + i, &place, sizeof place);
        }
        for (i = 0; i < count; i++) c->buckets[first + i] = (int16_t)places[i];
        for (i = 0; i + 2 <= count; i += 2) {
            c->coarse[places[i]] += weights[i];
            odd[places[i + 1]] += weights[i + 1];
        }
        if (i < count) c->coarse[places[i]] += weights[i];
    }
    four_doubles sums[4] = {{0}};
    for (int64_t b = 0; b < BUCKETS; b += 16)
        for (int64_t k = 0; k < 4; k++) {
            four_doubles even, other;
            memcpy(&even, c->coarse + b + 4 * k, sizeof even);
            memcpy(&other, odd + b + 4 * k, sizeof other);
            even += other;
            memcpy(c->coarse + b + 4 * k, &even, sizeof even);
            sums[k] += even;
        }
    sums[0] = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    mass = (sums[0][0] + sums[0][1]) + (sums[0][2] + sums[0][3]);
    c->sure = c->rest > 0 ? mass * (1 - 1e-12) : INFINITY; /* a sum in another order is as far as 1e-12 */
    return mass + c->rest;
}

/* Lists the candidates in some buckets. Returns how many. */
static int64_t members_of(const candidates *c, int64_t lowest, int64_t highest) {
    const members found = c->found;
    int16_t low = (int16_t)lowest, high = (int16_t)highest;
    int64_t count = 0;
    for (int64_t first = 0; first < c->M; first += BLOCK) {
        int64_t end = first + BLOCK < c->M ? first + BLOCK : c->M;
        int16_t here = 0; /* most blocks have no member */
        for (int64_t i = first; i < end; i++) here |= (c->buckets[i] >= low) & (c->buckets[i] <= high);
        for (int64_t i = first; here && i < end; i++) {
            found.indices[count] = i; /* overwritten if it is none: no branch to be predicted */
            count += (c->buckets[i] >= low) & (c->buckets[i] <= high);
        }
    }
    for (int64_t j = 0; j < count; j++) found.scores[j] = c->x[found.indices[j]] / c->temperature;
    for (int64_t j = 0; j < count; j += LANES) {
        floats below = load_part(found.scores + j, count - j) - c->best;
        store_part(found.weights + j, exponential(below), count - j);
    }
    return count;
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
    members m = c->found;
    float high = m.scores[0], low = high;
    for (int64_t j = 0; j < count; j++) {
        high = m.scores[j] > high ? m.scores[j] : high;
        low = m.scores[j] < low ? m.scores[j] : low;
    }
    if (high == low) return count;
    double width = (double)high - low, last = BUCKETS - 1, per_unit = last / (width < FAR ? width : FAR);
    memset(c->fine, 0, sizeof(double) * BUCKETS);
    for (int64_t j = 0; j < count; j++) {
        double place = ((double)high - m.scores[j]) * per_unit;
        c->fine[(int64_t)(place < last ? place : last)] += m.weights[j];
    }
    int64_t wanted = bucket_reaching(c->fine, target, before), kept = 0;
    for (int64_t j = 0; j < count; j++) {
        double place = ((double)high - m.scores[j]) * per_unit;
        if ((int64_t)(place < last ? place : last) != wanted) continue;
        m.indices[kept] = m.indices[j];
        m.scores[kept] = m.scores[j];
        m.weights[kept++] = m.weights[j];
    }
    return kept;
}

/* The first candidate at which the cumulative mass reaches `target`; `through` becomes the mass including it. -1 if it
 * may be far. */
static int64_t reach(const candidates *c, double target, double *through) {
    double before = 0;
    if (target > c->sure) return -1;
    int64_t bucket = bucket_reaching(c->coarse, target, &before), count = members_of(c, bucket, bucket);
    members m = c->found;
    while (count > SORTED) {
        int64_t kept = narrow(c, count, target, &before);
        if (kept == count) break; /* all are equal, and their ids ascend */
        count = kept;
    }
    if (count <= SORTED) /* by descending score, stable */
        for (int64_t j = 1; j < count; j++) {
            int64_t index = m.indices[j], k = j;
            float score = m.scores[j], weight = m.weights[j];
            for (; k > 0 && m.scores[k - 1] < score; k--) {
                m.indices[k] = m.indices[k - 1];
                m.scores[k] = m.scores[k - 1];
                m.weights[k] = m.weights[k - 1];
            }
            m.indices[k] = index;
            m.scores[k] = score;
            m.weights[k] = weight;
        }
    int64_t j = 0;
    before += m.weights[0];
    while (j + 1 < count && before < target) before += m.weights[++j]; /* may miss it by a rounding error */
    *through = before;
    return m.indices[j];
}

/* The mass of the candidates at least min_p times as likely as the best: those in the buckets before the one at the
 * edge, and some of those near it. -1 if some may be far. */
static double mass_of_likely(const candidates *c, float min_p) {
    double edge = -log(min_p) * c->per_nat, mass = 0;
    int64_t low = edge < BUCKETS - 1 ? (int64_t)edge - 1 : BUCKETS - 2, high = low + 2;
    if (high >= BUCKETS - 2 && c->sure < INFINITY) return -1;
    for (int64_t b = 0; b < low; b++) mass += c->coarse[b];
    int64_t count = members_of(c, low, high < BUCKETS ? high : BUCKETS - 1);
    for (int64_t j = 0; j < count; j++) mass += c->found.weights[j] >= min_p ? c->found.weights[j] : 0;
    return mass;
}

/* A draw from the candidates; -1 if its token may be far. */
static int64_t choose(candidates *c, const draw *d) {
    double mass = weigh(c), through;
    if (d->top_p < 1) {
        if (reach(c, d->top_p * mass, &through) < 0) return -1;
        mass = through;
    }
    if (d->min_p > 0) {
        double likely = mass_of_likely(c, (float)d->min_p);
        if (likely < 0) return -1;
        mass = likely < mass ? likely : mass;
    }
    return reach(c, d->uniform * mass, &through);
}

static int64_t sample_row(const float *logits, int64_t V, const draw *d, candidates c) {
    bool ordinary = true, filtered = 0 < d->top_k && d->top_k < V;
    float temperature = (float)d->temperature;
    float best = filtered || temperature == 0 ? largest_of(logits, V, &ordinary)
                                              : largest_of_blocks(logits, V, BLOCK, c.maxima, &ordinary);
    if (!ordinary || best == -INFINITY) return -1;
    if (temperature == 0) return place_of(logits, V, best);
    c.x = logits;
    c.temperature = temperature;
    c.best = best / temperature;
    c.M = V;
    c.rest = 0;
    if (c.best == INFINITY) return -1;
    if (filtered) {
        keep_top_k(&c, V, d->top_k);
        return c.ids[choose(&c, d)];
    }
    float edge = edge_of(&c);
    if (edge > -INFINITY) {
        candidates near = c;
        keep_near(&near, edge);
        int64_t index = choose(&near, d);
        if (index >= 0) return near.ids[index];
    }
    return choose(&c, d);
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

/* --- tokens that a grammar allows --------------------------------------------------------------------------------- */

typedef struct {
    float *logits;         /* [R, V], in place */
    const int64_t *rows;   /* [G], the row of each mask */
    const uint32_t *masks; /* [G, W], a bit for each token, the first in the lowest; 32 W >= V */
    int64_t *left;         /* [G], out: whether any token is left */
    int64_t G, V, W;
} keep_allowed_arguments;

void keep_allowed(const void *arguments, int64_t share, int64_t shares, int64_t worker) {
    const keep_allowed_arguments *a = arguments;
    int64_t first, last;
    (void)worker;
    words lanes;
    for (int k = 0; k < LANES; k++) lanes[k] = (uint32_t)k;
    share_of(a->G, share, shares, &first, &last);
    for (int64_t g = first; g < last; g++) {
        float *row = a->logits + a->rows[g] * a->V;
        const uint32_t *mask = a->masks + g * a->W;
        floats best = splat(-INFINITY);
        for (int64_t i = 0; i < a->V; i += LANES) { /* LANES divides 32: the bits of a vector are in one word */
            words bits = (mask[i / 32] >> i % 32) - (words){0};
            ints allowed = -(ints)(bits >> lanes & 1);
            floats kept = pick(allowed, load_part(row + i, a->V - i), splat(-INFINITY));
            store_part(row + i, kept, a->V - i);
            if (a->V - i < LANES)
                for (int k = (int)(a->V - i); k < LANES; k++) kept[k] = -INFINITY;
            best = at_least(best, kept);
        }
        a->left[g] = largest(best) > -INFINITY;
    }
}
