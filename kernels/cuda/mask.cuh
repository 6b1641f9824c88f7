// Soft cap, sliding window, ALiBi and sinks, in addition to the causal mask: compiled in only for models that have them.
#pragma once

#include "softmax.cuh"

#ifndef WINDOWED
#define WINDOWED 0  // a query at position p sees the positions p - window + 1 ... p (Mistral, arXiv 2310.06825)
#endif
#ifndef BIASED
#define BIASED 0  // a score decreases by slopes[h] per position between key and query (ALiBi, arXiv 2108.12409)
#endif
#ifndef CAPPED
#define CAPPED 0  // a score s becomes c tanh(s / c) (Gemma Team, arXiv 2408.00118, section 2)
#endif
#ifndef SUNK
#define SUNK 0  // sinks[h] is one more score of each query, of a key without a value (gpt-oss, arXiv 2508.10925)
#endif
static_assert(!(CAPPED && BIASED), "no model has both");

// The soft cap c of a score, both in the same unit.
__device__ __forceinline__ float capped(float score, float cap) { return cap * tanhf(score / cap); }

// The first position visible to a query at `position`.
__device__ __forceinline__ int first_seen(int position, int window) {
    return WINDOWED ? max(0, position - window + 1) : 0;
}

// Window, slope and cap of one head's queries.
struct Mask {
    int window;
    float slope, cap;  // of raw scores, those before `scale`

    // Whether every query at `first` ... `last` sees all keys `first_key` ... `last_key`.
    __device__ __forceinline__ bool all_visible(int first, int last, int first_key, int last_key) const {
        return last_key <= first && (!WINDOWED || first_key > last - window);
    }

    // A raw score with all of them applied: minus infinity for a key after its query or before its window.
    __device__ __forceinline__ float masked(float score, int key, int query) const {
        if (key > query || (WINDOWED && key <= query - window)) return minus_infinity();
        if (CAPPED) score = capped(score, cap);
        return BIASED ? score - slope * (query - key) : score;
    }
};
