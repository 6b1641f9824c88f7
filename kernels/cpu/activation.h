/* exp, tanh and the activations of the MLP, on vectors. NaN stays NaN.
 *
 *     relu      max(x, 0)
 *     gelu      x Phi(x), Phi the normal distribution          (Hendrycks and Gimpel, arXiv 1606.08415)
 *     gelu_new  x (1 + tanh(sqrt(2 / pi) x (1 + 0.044715 x^2))) / 2
 *     silu      x / (1 + e^-x)
 *     swiglu_oai  min(g, 7) / (1 + e^(-1.702 min(g, 7))) (clamp(u, -7, 7) + 1), of two numbers       (arXiv 2508.10925)
 *     relu2     max(x, 0)^2
 *
 * The polynomials were fitted to the least largest relative error (Lawson's algorithm).
 */
#ifndef MINILLM_ACTIVATION_H
#define MINILLM_ACTIVATION_H
#include "simd.h"

/* Codes of the activations, as Python numbers them. */
enum { NO_ACTIVATION, RELU, GELU, GELU_NEW, SILU, SWIGLU_OAI, RELU2 };

/* e^x / 2^n with an integer n, which becomes `power`: x = n ln 2 + r, and e^r = 1 + r + r^2 q(r); q's error is 3e-9. */
INLINE floats scaled_exponential(floats x, ints *power) {
    const floats big = splat(0x1.8p23f); /* adding it rounds to an integer, which is then in the lowest bits */
    floats shifted = multiply_add(x, splat(1.4426950408889634f), big), n = shifted - big;
    floats r = multiply_add(n, splat(-0.693359375f), x); /* ln 2 in two parts; this product is exact */
    r = multiply_add(n, splat(2.12194440e-4f), r);
    floats q = splat(0.001381459878757596f);
    q = multiply_add(q, r, splat(0.008368716575205326f));
    q = multiply_add(q, r, splat(0.04166838899254799f));
    q = multiply_add(q, r, splat(0.1666652113199234f));
    q = multiply_add(q, r, splat(0.4999999403953552f));
    *power = (ints)shifted - 0x4B400000;
    return multiply_add(q, r * r, r) + 1.0f;
}

/* e^x, within 1 ulp; 0 below -104, infinity above 88.8, subnormal results too. e^0 is exactly 1. */
INLINE floats exponential(floats x) {
    ints power;
    floats y = scaled_exponential(at_most(splat(89.0f), at_least(splat(-104.0f), x)), &power);
    ints half = power >> 1; /* 2^n as two factors: n goes from -150 to 128 */
    return y * (floats)((half + 127) << 23) * (floats)((power - half + 127) << 23);
}

/* e^x of x <= 0, the same number as above down to -87, and e^-87 below. */
INLINE floats decay(floats x) {
    x = at_least(splat(-87.0f), x);
    ints power;
    floats y = scaled_exponential(x, &power);
    return y * (floats)((power + 127) << 23);
}

/* tanh x, within 1.5 ulp, and of the sign of x. Up to 0.625 x + x^3 p(x^2), p's error is 4e-9; then
 * 1 - 2 / (1 + e^2x), which would cancel for small x. */
INLINE floats hyperbolic_tangent(floats x) {
    floats a = magnitude(x), z = x * x;
    floats p = splat(-0.005704986862838268f);
    p = multiply_add(p, z, splat(0.02063908614218235f));
    p = multiply_add(p, z, splat(-0.05373971536755562f));
    p = multiply_add(p, z, splat(0.13331441581249237f));
    p = multiply_add(p, z, splat(-0.3333328068256378f));
    floats small = multiply_add(p * z, a, a), large = 1.0f - 2.0f / (1.0f + exponential(a + a));
    return (floats)((ints)pick(a < 0.625f, small, large) | ((ints)x ^ (ints)a));
}

/* x / (1 + e^-z) */
INLINE floats logistic(floats x, floats z) {
    return x / (1.0f + exponential(-z));
}

/* x Phi(x). The tail 1 - Phi(a) of a = |x| is e^(-a^2 / 2) t Q(t - 1/2), t = 1 / (1 + 0.35 a); Q's error is 3e-8. */
INLINE floats gelu(floats x) {
    floats a = at_most(splat(14.5f), magnitude(x)); /* the tail is 0 in float32 from there on */
    floats t = 1.0f / multiply_add(a, splat(0.35f), splat(1.0f)), s = t - 0.5f;
    floats q = splat(-0.02915745973587036f);
    q = multiply_add(q, s, splat(0.027399210259318352f));
    q = multiply_add(q, s, splat(0.04416390508413315f));
    q = multiply_add(q, s, splat(-0.05614015460014343f));
    q = multiply_add(q, s, splat(-0.08173985034227371f));
    q = multiply_add(q, s, splat(0.08187086135149002f));
    q = multiply_add(q, s, splat(0.2843957841396332f));
    q = multiply_add(q, s, splat(0.3429916203022003f));
    q = multiply_add(q, s, splat(0.2532442808151245f));
    floats square = a * a, lost = multiply_add(a, a, -square); /* a^2 = square + lost, exactly */
    floats density = exponential(-0.5f * square);
    density = multiply_add(density * -0.5f, lost, density);
    floats tail = density * t * q;
    return x * pick(x < 0.0f, tail, 1.0f - tail);
}

/* (1 + tanh u) / 2 = 1 / (1 + e^-2u) */
INLINE floats gelu_new(floats x) {
    return logistic(x, 1.5957691216057308f * x * multiply_add(0.044715f * x, x, splat(1.0f)));
}

/* With a constant code the switch leaves no trace. */
INLINE floats activate(floats x, int64_t activation) {
    switch (activation) {
    case RELU: return at_least(splat(0.0f), x);
    case RELU2: {
        floats y = at_least(splat(0.0f), x);
        return y * y;
    }
    case GELU: return gelu(x);
    case GELU_NEW: return gelu_new(x);
    case SILU: return logistic(x, x);
    default: return x;
    }
}

/* The gate of a gated MLP: activation(gate) * up, or swiglu_oai. */
INLINE floats gated(floats gate, floats up, int64_t activation) {
    if (activation != SWIGLU_OAI) return activate(gate, activation) * up;
    gate = at_most(splat(7.0f), gate), up = at_least(splat(-7.0f), at_most(splat(7.0f), up));
    return logistic(gate, 1.702f * gate) * (up + 1.0f);
}
#endif
