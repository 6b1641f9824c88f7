/* Storing keys and values in the paged cache.
 *
 *     store_kv   keys[slot_pages, :, slot_offsets], values[slot_pages, :, slot_offsets] = k, v
 *
 * The cache's arrays are [pages, K, P, D] of float, of bfloat16 (its 16 bits), or of int8 with a float scale for each
 * vector, [pages, K, P]. Of int4 vectors are rotated (hadamard.h) and rounded in groups of 32, the last one with zeros:
 * 16 bytes, of which byte j has numbers j, low, and j + 16, 8 higher than they are; with float16 scales [pages, K, P,
 * groups]. Where values are the last V numbers of the keys (latents), one vector is stored: k, then v.
 *
 * Bytes moved: each number is read once and written once. Floor: these bytes / memory bandwidth.
 */
#include "hadamard.h"
#include "pool.h"
#include "simd.h"
#include <math.h>
#include <stdbool.h>

enum { MOST_WIDTH = 1024 }; /* of a vector in int4 */

typedef struct {
    const float *k, *v;          /* [T, K, D], `stride` numbers from one token to the next */
    void *keys, *values;         /* [pages, K, P, D] */
    void *key_scales, *value_scales; /* [pages, K, P] of float for int8, [pages, K, P, groups] of float16 for int4 */
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

/* The nearest float16, ties to even. NaN stays NaN. */
static uint16_t to_float16(float x) {
    uint32_t bits, sign, rest;
    float size;
    memcpy(&bits, &x, sizeof bits);
    sign = bits >> 16 & 0x8000, bits &= 0x7FFFFFFF;
    memcpy(&size, &bits, sizeof size);
    if (bits > 0x7F800000) return (uint16_t)(sign | 0x7E00);
    if (bits >= 0x477FF000) return (uint16_t)(sign | 0x7C00);
    if (bits < 0x38800000) { /* subnormal: half the last place of 0.5 in float is that of these */
        size += 0.5f;
        memcpy(&rest, &size, sizeof rest);
        return (uint16_t)(sign | (rest - 0x3F000000));
    }
    return (uint16_t)(sign | (bits + 0xFFF + (bits >> 13 & 1) - 0x38000000) >> 13);
}

/* Rounds 32 numbers to int4 and returns their scale, by which the first one of largest magnitude becomes -8. NaN and
 * infinity give the scale NaN, and so do numbers for which float16 is too narrow. */
static uint16_t store_int4(const float *x, uint8_t *out) {
    int32_t bits[32], highest = 0;
    float most = 0;
    memcpy(bits, x, sizeof bits);
    for (int i = 0; i < 32; i++) highest = (bits[i] & 0x7FFFFFFF) > highest ? bits[i] & 0x7FFFFFFF : highest;
    for (int i = 31; i >= 0; i--) most = (bits[i] & 0x7FFFFFFF) == highest ? x[i] : most;
    uint16_t scale = to_float16(most * -0.125f);
    bool usable = (scale & 0x7C00) != 0x7C00 && (scale & 0x7FFF);
    float inverse = usable ? 1 / float16_to_float(scale) : 0;
    int32_t integers[32];
    for (int i = 0; i < 32; i++) {
        float whole = usable ? rintf(x[i] * inverse) : 0;
        whole = whole < -8 ? -8 : whole > 7 ? 7 : whole;
        integers[i] = (int32_t)whole + 8;
    }
    for (int i = 0; i < 16; i++) out[i] = (uint8_t)(integers[i] | integers[i + 16] << 4);
    return usable ? scale : (scale & 0x7C00) == 0x7C00 ? 0x7E00 : 0;
}

static void store_rotated(const float *x, int64_t D, uint8_t *out, uint16_t *scales) {
    float rotated[MOST_WIDTH];
    const int64_t groups = (D + 31) / 32;
    memcpy(rotated, x, sizeof(float) * D);
    rotate(rotated, D);
    for (int64_t d = D; d < groups * 32; d++) rotated[d] = 0;
    for (int64_t g = 0; g < groups; g++) scales[g] = store_int4(rotated + g * 32, out + g * 16);
}

/* Rounds a vector and writes it to slot number `slot` of the pages. */
static void store_vector(const float *x, int64_t D, int64_t format, int64_t slot, void *pages, void *scales) {
    if (format == FLOAT32) {
        memcpy((float *)pages + slot * D, x, sizeof(float) * D);
    } else if (format == INT8) {
        ((float *)scales)[slot] = store_int8(x, D, (int8_t *)pages + slot * D);
    } else if (format == INT4) {
        const int64_t groups = (D + 31) / 32;
        store_rotated(x, D, (uint8_t *)pages + slot * groups * 16, (uint16_t *)scales + slot * groups);
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
