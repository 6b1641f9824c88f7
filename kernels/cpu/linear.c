/* The matrix product: out = activation(x @ W.T + bias) + residual, x [rows, inputs], W [outputs, inputs].
 *
 * W is stored as float32, float16 or bfloat16, as int8 or int4 in groups with a scale (reference/quantize.py), or in
 * blocks (reference/blocks.py). For integers the rows of x are rounded first (`round_rows`), to int8 with a scale for each 32 numbers, and the products
 * within these 32 are summed exactly.
 *
 * Bytes moved: W is read once. Floor: up to some 16 rows, W's bytes / memory bandwidth; beyond, 2 rows inputs outputs
 * FLOPs / peak of FMA, or of the products of integers.
 *
 * Order of summation. Floats: the inputs are divided into blocks of DEPTH, at fixed places; a block is summed by lane
 * and then across lanes, and the blocks by ascending place. So an output has the same bits in any batch and with any
 * number of workers; with vectors of 8 and 16 within `linear_few`, and within `linear_many`, which with vectors of 16 has
 * the bits of `linear_few` for up to 24 rows; unless `one_order` makes these equal. Integers: likewise, by ascending
 * groups, and the same in both.
 *
 * Versions:
 * - `linear_few`, floats: W's rows are divided into as many streams as a register tile has outputs, 4, or 8 for a single
 *   row of x; lanes along the inputs. Integers: as `linear_many`.
 * - `linear_many`, floats: FLOAT_OUTPUTS outputs by DEPTH inputs of W are expanded to float, stay in the L2 cache and
 *   meet all rows, with the same tile; DEPTH inputs of a tile's rows stay in the L1 cache. With vectors of 8 and 16 they
 *   are transposed instead, and lanes are along the outputs, without `one_order`; of fewer than SET_ROWS rows x is
 *   transposed, and lanes are along these.
 * - `linear_many`, integers: some INTEGER_OUTPUTS outputs by DEPTH inputs are packed with the lanes along the outputs.
 *   Sums are integers until a group ends, and then need no sum across lanes. A few rows meet W as it is stored, in
 *   streams too.
 * - `linear_parts`: several matrices of different formats, such as queries', keys' and values', in one launch.
 */
#include "activation.h"
#include "floats.h"

INLINE void finish_as(const int activation, const linear *a, int64_t row, int64_t end, int64_t first, int64_t last) {
    for (int64_t r = row; r < end; r++) {
        float *out = a->out + r * a->stride;
        for (int64_t o = first; o < last; o += LANES) {
            int64_t count = last - o;
            floats y = load_part(out + o, count);
            if (a->bias) y += load_part(a->bias + o, count);
            y = activate(y, activation);
            if (a->residual) y += load_part(a->residual + r * a->stride + o, count);
            store_part(out + o, y, count);
        }
    }
}

void finish(const linear *a, int64_t row, int64_t end, int64_t first, int64_t last) {
    switch (a->activation) {
    case RELU: finish_as(RELU, a, row, end, first, last); break;
    case GELU: finish_as(GELU, a, row, end, first, last); break;
    case GELU_NEW: finish_as(GELU_NEW, a, row, end, first, last); break;
    case SILU: finish_as(SILU, a, row, end, first, last); break;
    case RELU2: finish_as(RELU2, a, row, end, first, last); break;
    default:
        if (a->bias || a->residual) finish_as(NO_ACTIVATION, a, row, end, first, last);
    }
}

/* --- kernels ------------------------------------------------------------------------------------------------------ */

/* Bytes of scratch memory that each worker needs in `linear_many`. */
int64_t linear_scratch(void) {
    int64_t of_floats = floats_scratch(), of_integers = integers_scratch();
    return of_floats > of_integers ? of_floats : of_integers;
}

/* Rounds the rows of x to what W's format takes. A share is some of the rows. */
void round_rows(const void *arguments, int64_t share, int64_t shares, int64_t worker) {
    const linear *a = arguments;
    int64_t first, last;
    (void)worker;
    share_of(a->rows, share, shares, &first, &last);
    (has_integers(a->format) ? round_to_integers : round_to_bfloat16)(a, first, last);
}

/* The product with x rounded to bfloat16, or as it is. */
static linear with_rounded(const linear *a) {
    linear one = *a;
    if (a->x_rounded && !has_integers(a->format)) one.x = (const float *)a->x_rounded;
    if (takes_pairs(a)) one.format = PAIRS, one.inputs = a->inputs / 2;
    return one;
}

/* For more rows, though correct for fewer. A share is some of the outputs of all rows. */
void linear_many(const void *arguments, int64_t share, int64_t shares, int64_t worker) {
    const linear one = with_rounded(arguments);
    char *scratch = one.scratch + worker * linear_scratch();
    const bool integers = has_integers(one.format);
    int64_t first, last, unit = integers ? INTEGER_OUTPUTS : 4;
    share_of((one.outputs + unit - 1) / unit, share, shares, &first, &last);
    (integers ? integers_any : floats_many)(&one, unit * first, smaller(unit * last, one.outputs), scratch);
}

/* For 1 to 16 rows, though correct for more. A share is some of the outputs of all rows. */
void linear_few(const void *arguments, int64_t share, int64_t shares, int64_t worker) {
    const linear one = with_rounded(arguments);
    int64_t first, last;
    if (has_integers(one.format)) return linear_many(arguments, share, shares, worker);
    share_of((one.outputs + 3) / 4, share, shares, &first, &last);
    first *= 4, last = smaller(4 * last, one.outputs);
    floats_few(&one, first, last);
    finish(&one, 0, one.rows, first, last);
}

/* Matrices below one another, each in a format of its own, that meet the same x: a product writes its columns. */
typedef struct {
    const linear *parts; /* [count] */
    int64_t count, many; /* whether `linear_many` multiplies */
} linear_parts_arguments;

/* Rounds the rows of x once for each format. A share is some of the rows. */
void round_parts(const void *arguments, int64_t share, int64_t shares, int64_t worker) {
    const linear_parts_arguments *a = arguments;
    for (int64_t i = 0; i < a->count; i++) {
        bool rounded = !a->parts[i].x_rounded;
        for (int64_t j = 0; j < i; j++) rounded |= a->parts[j].x_rounded == a->parts[i].x_rounded;
        if (!rounded) round_rows(&a->parts[i], share, shares, worker);
    }
}

/* All products in one launch. A share is some of the outputs of every part. */
void linear_parts(const void *arguments, int64_t share, int64_t shares, int64_t worker) {
    const linear_parts_arguments *a = arguments;
    for (int64_t i = 0; i < a->count; i++) (a->many ? linear_many : linear_few)(&a->parts[i], share, shares, worker);
}
