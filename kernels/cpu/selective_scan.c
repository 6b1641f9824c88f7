/* Mamba-2's recurrence: each head of a sequence has a state S [P, N] that decays, is added to and is read.
 *
 *     step  = minimum(maximum(log1p(exp(steps + step_bias)), least), most)
 *     S     = exp(-exp(decay) * step) * S + outer(step * x, B)
 *     out   = S @ C + skip * x
 *     states[after[t]] = S
 *
 * `before` leads from a token to the one before it, in this pass or in a state (reference/selective_scan.py).
 *
 * Bytes moved: in a decode step each state is read and written once, 2 H P N floats of a sequence and layer; of a
 * prompt's tokens S is in the L1 cache. Floor: of a decode step these bytes / bandwidth; of a prompt's token 3 vector
 * instructions for LANES numbers of S.
 *
 * A share is some of the pieces of ROWS rows of all heads' states: rows do not depend on one another. Each goes through
 * all tokens in order. A sum has one order, wherever its state comes from: a token has the same bits in any batch and
 * in chunks of any size.
 *
 * Versions:
 *   1. this one: token by token. Granite 4.0 H Tiny (H = 48, P = 64, N = 128) on one core of a busy EPYC (Zen 3):
 *      80 us of CPU time for a prompt's token, where both projections of the layer in float32 take 440 us; 310 us and
 *      5.1 ms in a decode step of one sequence, whose states come from memory.
 */
#include "activation.h"
#include "pool.h"
#include <math.h>

enum { MOST_STATE = 256, ROWS = 16 };

typedef struct {
    const float *x;         /* [T, H P + 2 G N], `stride` numbers from one row to the next: values, B, C */
    const float *steps;     /* [T, H], rows `step_stride` apart */
    const float *rates;     /* [2 H]: the logarithm of each head's rate of decay, then its factor to skip */
    const float *step_bias; /* [H] */
    float *states;          /* [slots, H, P, N] */
    const int64_t *before;  /* [T]: a row, -1 for none, or -2 - slot */
    const int64_t *after;   /* [T]: a slot that no token of the pass reads, or -1 */
    float *out;             /* [T, H P] */
    int64_t T, H, P, G, N, stride, step_stride;
    double least, most;
} selective_scan_arguments;

/* Some rows of the state of one head, zeros beyond N. */
typedef struct {
    _Alignas(64) float S[ROWS][MOST_STATE];
    int64_t head, row, count;
} piece;

/* S after token t from S before it, and the token's result unless `out` is NULL. */
static void advance(const selective_scan_arguments *a, piece *c, int64_t t, float *out) {
    int64_t h = c->head, N = a->N;
    const float *row = a->x + t * a->stride, *x = row + h * a->P + c->row;
    const float *B = row + a->H * a->P + h / (a->H / a->G) * N, *C = B + a->G * N;
    float y = a->steps[t * a->step_stride + h] + a->step_bias[h];
    float step = (y > 0 ? y : 0) + log1pf(expf(-fabsf(y)));
    if (step < (float)a->least) step = (float)a->least;
    if (step > (float)a->most) step = (float)a->most;
    floats decay = splat(expf(-expf(a->rates[h]) * step));
    for (int64_t r = 0; r < c->count; r += 4) {
        float value[4];
        floats added[4], read[4] = {0};
        for (int64_t i = 0; i < 4; i++) {
            value[i] = r + i < c->count ? x[r + i] : 0;
            added[i] = splat(step * value[i]);
        }
        for (int64_t n = 0; n < N; n += LANES) {
            floats b = load_part(B + n, N - n), to = load_part(C + n, N - n);
            for (int64_t i = 0; i < 4; i++) {
                floats s = multiply_add(added[i], b, decay * load(c->S[r + i] + n));
                store(c->S[r + i] + n, s);
                read[i] = multiply_add(s, to, read[i]);
            }
        }
        if (!out) continue;
        four_floats sum = sums(read[0], read[1], read[2], read[3]);
        for (int64_t i = 0; i < 4 && r + i < c->count; i++) out[r + i] = sum[i] + a->rates[a->H + h] * value[i];
    }
}

/* S after a row of this pass, or the one that it stands for: computed again from the last state on. */
static void recall(const selective_scan_arguments *a, piece *c, int64_t place) {
    int64_t distance = 0, base = place, N = a->N;
    for (; base >= 0; base = a->before[base]) distance++;
    memset(c->S, 0, sizeof c->S);
    if (base != -1) {
        const float *from = a->states + (((-2 - base) * a->H + c->head) * a->P + c->row) * N;
        for (int64_t r = 0; r < c->count; r++) memcpy(c->S[r], from + r * N, sizeof(float) * N);
    }
    while (distance--) {
        int64_t row = place;
        for (int64_t i = 0; i < distance; i++) row = a->before[row];
        advance(a, c, row, NULL);
    }
}

static void keep_state(const selective_scan_arguments *a, const piece *c, int64_t slot) {
    float *to = a->states + ((slot * a->H + c->head) * a->P + c->row) * a->N;
    for (int64_t r = 0; r < c->count; r++) memcpy(to + r * a->N, c->S[r], sizeof(float) * a->N);
}

void selective_scan(const void *arguments, int64_t share, int64_t shares, int64_t worker) {
    const selective_scan_arguments *a = arguments;
    int64_t first, last, pieces = (a->P + ROWS - 1) / ROWS;
    piece c;
    (void)worker;
    share_of(a->H * pieces, share, shares, &first, &last);
    for (int64_t i = first; i < last; i++) {
        c.head = i / pieces;
        c.row = i % pieces * ROWS;
        c.count = a->P - c.row < ROWS ? a->P - c.row : ROWS;
        for (int64_t t = 0; t < a->T; t++) {
            if (t == 0 || a->before[t] != t - 1) recall(a, &c, a->before[t]);
            advance(a, &c, t, a->out + t * a->H * a->P + c.head * a->P + c.row);
            if (a->after[t] >= 0) keep_state(a, &c, a->after[t]);
        }
    }
}
