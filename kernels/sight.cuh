// Which keys a query sees beside the causal mask, and what they lose: compiled in where a model has it, and no trace of
// it in any other build.
#pragma once

#include "softmax.cuh"

#ifndef WINDOWED
#define WINDOWED 0  // a query at position p sees the positions p - window + 1 ... p (Mistral, arXiv 2310.06825)
#endif
#ifndef BIASED
#define BIASED 0  // a key loses slopes[h] for each position that it lies before its query (ALiBi, arXiv 2108.12409)
#endif

// The first position that a query at `position` sees.
__device__ __forceinline__ int first_seen(int position, int window) {
    return WINDOWED ? max(0, position - window + 1) : 0;
}

// How the queries of one head see.
struct Sight {
    int window;
    float slope;  // of raw scores, those before `scale`

    // Whether queries at `first` ... `last` see each of the keys up to `last_key`, `first_key` the earliest.
    __device__ __forceinline__ bool all_seen(int first, int last, int first_key, int last_key) const {
        return last_key <= first && (!WINDOWED || first_key > last - window);
    }

    // A raw score as it counts: minus infinity where a key lies after its query or before the query's window.
    __device__ __forceinline__ float seen(float score, int key, int query) const {
        if (key > query || (WINDOWED && key <= query - window)) return minus_infinity();
        return BIASED ? score - slope * (query - key) : score;
    }
};
