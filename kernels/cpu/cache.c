/* Storing keys and values in the paged cache.
 *
 *     store_kv   keys[slot_pages, :, slot_offsets], values[slot_pages, :, slot_offsets] = k, v
 *
 * The cache's arrays are [pages, K, P, D] of float, of bfloat16 (its 16 bits), or of int8 with a float scale for each
 * vector, [pages, K, P]. Where values are the last V numbers of the keys (latents), one vector is stored: k, then v.
 *
 * Bytes moved: each number is read once and written once. Floor: these bytes / memory bandwidth.
 */
#include "pool.h"
#include "simd.h"
#include <math.h>
#include <stdbool.h>

typedef struct {
    const float *k, *v;          /* [T, K, D], `stride` numbers from one token to the next */
    void *keys, *values;         /* [pages, K, P, D] */
    float *key_scales, *value_scales; /* [pages, K, P], int8 only */
    const int64_t *slot_pages, *slot_offsets; /* [T] */
    float *joined;               /* [shares, D], or NULL: values of their own. Else k and v have D - V and V numbers */
    int64_t T, K, P, D, V, k_stride, v_stride, format;
} store_kv_arguments;

/* Rounds a vector to int8 and returns its scale, the largest magnitude / 127. NaN or infinity give the scale NaN, and a
 * vector without a number above 1e-36 zeros: the inverse of its scale would overflow. */
static float store_int8(const float *x, int64_t D, int8_t *out) {
    ints highest = {0}; /* magnitudes as integers: ordered like the numbers, infinity and NaN above all */
    for (int64_t d = 0; d < D; d += LANES) {
        ints size = (ints)magnitude(load_part(x + d, D - d));
        ints mask = size > highest;
        highest = (mask & size) | (~mask & highest);
    }
    int32_t bits = largest_int(highest);
    float most;
    memcpy(&most, &bits, sizeof most);
    bool finite = most < INFINITY, usable = finite && most > 1e-36f;
    float inverse = usable ? 127 / most : 0;
    for (int64_t d = 0; d < D; d++) out[d] = usable ? (int8_t)rintf(x[d] * inverse) : 0;
    return usable ? most / 127 : finite ? 0 : NAN;
}

/* Rounds a vector and writes it to slot number `slot` of the pages. */
static void store_vector(const float *x, int64_t D, int64_t format, int64_t slot, void *pages, float *scales) {
    if (format == FLOAT32) {
        memcpy((float *)pages + slot * D, x, sizeof(float) * D);
    } else if (format == INT8) {
        scales[slot] = store_int8(x, D, (int8_t *)pages + slot * D);
    } else {
        uint16_t *target = (uint16_t *)pages + slot * D, part[LANES];
        int64_t d = 0;
        for (; d + LANES <= D; d += LANES) store_bfloat16(target + d, load(x + d));
        if (d == D) return;
        store_bfloat16(part, load_part(x + d, D - d));
        memcpy(target + d, part, sizeof(uint16_t) * (D - d));
    }
}

void store_kv(const void *arguments, int64_t share, int64_t shares, int64_t worker) {
    const store_kv_arguments *a = arguments;
    int64_t first, last;
    (void)worker;
    share_of(a->T, share, shares, &first, &last);
    for (int64_t t = first; t < last; t++) {
        for (int64_t head = 0; head < a->K; head++) {
            int64_t slot = (a->slot_pages[t] * a->K + head) * a->P + a->slot_offsets[t];
            int64_t width = a->joined ? a->D - a->V : a->D;
            const float *k = a->k + t * a->k_stride + head * width, *v = a->v + t * a->v_stride + head * a->V;
            if (a->joined) {
                float *joined = a->joined + share * a->D;
                memcpy(joined, k, sizeof(float) * width);
                memcpy(joined + width, v, sizeof(float) * a->V);
                store_vector(joined, a->D, a->format, slot, a->keys, a->key_scales);
                continue;
            }
            store_vector(k, a->D, a->format, slot, a->keys, a->key_scales);
            store_vector(v, a->D, a->format, slot, a->values, a->value_scales);
        }
    }
}
