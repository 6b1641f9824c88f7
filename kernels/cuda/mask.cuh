// What a score is besides a product, and which keys a query sees: compiled in only for models and passes that need it.
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
#ifndef BY_DISTANCE
#define BY_DISTANCE 0  // a score has one of 2 M + 1 learned numbers added, by distance (T5: arXiv 1910.10683, section 2.1)
#endif
#ifndef BIDIRECTIONAL
#define BIDIRECTIONAL 0  // a query sees the keys after it too, up to p + window - 1 (BERT, arXiv 1810.04805), or a source
#endif
#ifndef TREED
#define TREED 0  // the last tokens may be a tree of guesses: each sees the line before it and its ancestors (arXiv 2305.09781)
#endif
static_assert(CAPPED + BIASED + BY_DISTANCE < 2, "no model has two of them");
static_assert(!(BIDIRECTIONAL && TREED), "guesses follow a text");

// The soft cap c of a score, both in the same unit.
__device__ __forceinline__ float capped(float score, float cap) { return cap * tanhf(score / cap); }

// The first position visible to a query at `position`.
__device__ __forceinline__ int first_seen(int position, int window) {
    return WINDOWED ? max(0, position - window + 1) : 0;
}

// The tree of guesses that a sequence ends in. Queries and keys have numbers in the order of the cache; a node's position
// is by its depth.
struct Tree {
    int first, stop;        // the numbers of its nodes; `stop` is the length of the context
    const unsigned* seen;   // [stop - first, words]: bit k of a row says whether its node sees node k
    int words;
    const int* positions;  // [stop - first]

    // Whether a query that sees all before the tree does not see this key.
    __device__ __forceinline__ bool hides(int key, int query) const {
        if (key < first) return false;
        return (seen[(query - first) * words + (key - first) / 32] >> (key - first) % 32 & 1) == 0;
    }

    __device__ __forceinline__ int position(int number) const {
        return number < first ? number : positions[number - first];
    }
};

// Learned numbers of one head, by the steps from a query to a key after it.
struct DistanceBias {
    const float* middle;  // that of distance 0, of [2 most + 1]
    int most;

    // Those of the head that is so many after this one.
    __device__ __forceinline__ DistanceBias of(int heads) const {
        return DistanceBias{middle + heads * (2 * most + 1), most};
    }

    __device__ __forceinline__ float operator[](int distance) const {
        return middle[max(-most, min(distance, most))];
    }
};

// All of this for one head's queries in one sequence.
struct Mask {
    int window, stop;  // `stop`: the length of the context
    float slope, cap;  // of raw scores, those before `scale`
    DistanceBias bias;
    float unscale;  // 1 / scale
    Tree tree;

    // The least position that one of the queries from number `first` on has: a tree's begin at its first one's.
    __device__ __forceinline__ int least_position(int first) const { return TREED ? min(first, tree.first) : first; }

    // The first key from which on no query before `last` sees one.
    __device__ __forceinline__ int after_all(int last) const {
        return !BIDIRECTIONAL ? last : WINDOWED ? min(stop, last - 1 + window) : stop;
    }

    // Whether every query `first` ... `last` sees all keys `first_key` ... `last_key`.
    __device__ __forceinline__ bool all_visible(int first, int last, int first_key, int last_key) const {
        if (TREED && last_key >= tree.first) return false;
        if (WINDOWED && (first_key <= last - window || (BIDIRECTIONAL && last_key >= first + window))) return false;
        return BIDIRECTIONAL ? last_key < stop : last_key <= first;
    }

    // A raw score with all of them applied: minus infinity for a key that the query does not see.
    __device__ __forceinline__ float masked(float score, int key, int query) const {
        if (BIDIRECTIONAL ? key >= stop : key > query) return minus_infinity();
        if (TREED && (query >= tree.stop || tree.hides(key, query))) return minus_infinity();
        int back = TREED ? tree.position(query) - tree.position(key) : query - key;
        if (BY_DISTANCE) score += bias[-back] * unscale;
        if (BIDIRECTIONAL) back = abs(back);
        if (WINDOWED && back >= window) return minus_infinity();
        if (CAPPED) score = capped(score, cap);
        return BIASED ? score - slope * back : score;
    }
};
