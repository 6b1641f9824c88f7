/* Causal depthwise convolution over the last k tokens of each sequence, whose inputs before a pass are in a state.
 *
 *     u   = x, or b * x of rows (b, c, x) if gated
 *     out = activation(sum(w[j] * u[t - (k - 1) + j] for j in range(k)) + bias), or c * (...) if gated
 *     states[after[t]] = u[t - (k - 2) : t + 1]
 *
 * `before` leads from a token to the one before it, in this pass or in a state (reference/convolution.py).
 *
 * Bytes moved: each row of x is read once, or three times if gated, and is in the L1 or L2 cache when later tokens read
 * it again; the result is written once. Floor: these bytes / bandwidth.
 *
 * A share is some of the tokens. A token's sum has one order, from the oldest input on, wherever that is read from: its
 * result has the same bits in any batch and in chunks of any size.
 */
#include "activation.h"
#include "pool.h"

enum { MOST_TAPS = 64 };

typedef struct {
    const float *x;        /* [T, C], or [T, 3 C] if gated; rows `stride` numbers apart */
    const float *taps;     /* [k, C], of the oldest input first */
    const float *bias;     /* [C], or NULL */
    float *states;         /* [slots, k - 1, C], the newest input last */
    const int64_t *before; /* [T]: a row, -1 for none, or -2 - slot */
    const int64_t *after;  /* [T]: a slot that no token of the pass reads, or -1 */
    float *out;            /* [T, C] */
    int64_t T, C, k, gated, activation, stride;
} convolve_arguments;

/* An input of the sum: a row of a state, or of x with its gate; both are NULL before the beginning. */
typedef struct {
    const float *u, *gate;
} input;

INLINE floats value_of(input in, int64_t i, int64_t count) {
    floats u = load_part(in.u + i, count);
    return in.gate ? load_part(in.gate + i, count) * u : u;
}

/* The inputs of token t and of the k - 1 before it, by their distance. */
static void find_inputs(const convolve_arguments *a, int64_t t, input *inputs) {
    int64_t place = t, age = 0;
    for (int64_t d = 0; d < a->k; d++) {
        if (d && place >= 0) place = a->before[place];
        age += place < 0;
        if (place >= 0) {
            const float *row = a->x + place * a->stride;
            inputs[d] = a->gated ? (input){row + 2 * a->C, row} : (input){row, NULL};
        } else if (place == -1) {
            inputs[d] = (input){NULL, NULL};
        } else {
            inputs[d] = (input){a->states + ((-2 - place) * (a->k - 1) + a->k - 1 - age) * a->C, NULL};
        }
    }
}

void convolve(const void *arguments, int64_t share, int64_t shares, int64_t worker) {
    const convolve_arguments *a = arguments;
    int64_t first, last, C = a->C, k = a->k;
    input inputs[MOST_TAPS];
    (void)worker;
    share_of(a->T, share, shares, &first, &last);
    for (int64_t t = first; t < last; t++) {
        find_inputs(a, t, inputs);
        for (int64_t i = 0; i < C; i += LANES) {
            int64_t count = C - i;
            floats y = {0};
            for (int64_t d = k - 1; d >= 0; d--)
                if (inputs[d].u) y = multiply_add(value_of(inputs[d], i, count), load_part(a->taps + (k - 1 - d) * C + i, count), y);
            if (a->bias) y += load_part(a->bias + i, count);
            if (a->gated) y *= load_part(a->x + t * a->stride + C + i, count);
            store_part(a->out + t * C + i, activate(y, a->activation), count);
        }
        if (a->after[t] < 0) continue;
        float *state = a->states + a->after[t] * (k - 1) * C;
        for (int64_t d = k - 2; d >= 0; d--, state += C) {
            if (!inputs[d].u) {
                memset(state, 0, sizeof(float) * C);
                continue;
            }
            for (int64_t i = 0; i < C; i += LANES) store_part(state + i, value_of(inputs[d], i, C - i), C - i);
        }
    }
}
