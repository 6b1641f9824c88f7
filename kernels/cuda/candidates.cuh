// One row's tokens as candidates for a draw, and the search for the candidate at which a running sum reaches a target.
//
// Candidates are ordered by score, best first, and equal scores by ascending id. The search never sorts them: it counts
// them into BINS bins, looks in which bin the target is reached, and divides that bin again.
#pragma once

#include "ranks.cuh"

constexpr int BINS = 2048;
constexpr float BINS_PER_NAT = 64.0f;     // 2048 / 64 = 32: what is less than e^-32 as likely as the best is in the last
constexpr float ONE = 17592186044416.0f;  // 2^44, the mass of the best candidate

typedef unsigned long long Mass;

// Stored after the bins by a row's first division: the mass of all candidates and of those that min-p
// keeps, and the number of all.
constexpr int ROW_MASS = BINS, KEPT_MASS = BINS + 1, MASSES = BINS + 2;
constexpr int ROW_COUNT = BINS, COUNTS = BINS + 1;

struct Sums {
    Mass mass;
    unsigned count;
};

__device__ __forceinline__ Sums operator+(Sums a, Sums b) { return {a.mass + b.mass, a.count + b.count}; }

// A row of logits as the candidates that it holds.
struct Row {
    const float* logits;
    int V;
    float temperature;
    float best;  // the best score

    __device__ __forceinline__ float weight(float score) const { return expf(score - best); }
    __device__ __forceinline__ Mass mass(float score) const { return (Mass)(weight(score) * ONE); }
    __device__ __forceinline__ int bin(float score) const {
        return (int)fminf((best - score) * BINS_PER_NAT, BINS - 1);
    }
    // True if the logits have NaN or +inf, or only -inf.
    __device__ __forceinline__ bool is_none() const { return !(fabsf(best) < infinity()); }
};

// Call visit(id, score) for each candidate among ids [begin, end), in no order. Loads go ahead of the visits.
template <class Visit>
__device__ __forceinline__ void for_each_candidate(const Row& row, int begin, int end, Visit visit) {
    constexpr int AHEAD = 8;
    for (int first = begin + threadIdx.x; first < end; first += AHEAD * blockDim.x) {
        float logits[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            int id = first + i * blockDim.x;
            logits[i] = id < end ? row.logits[id] : -infinity();
        }
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            float score = logits[i] / row.temperature;
            if (score != -infinity()) visit(first + i * blockDim.x, score);
        }
    }
}

// Add a mass in shared memory. Of 64 bits at once that would be a loop of compare and swap, in which the threads of a
// full bin wait for each other; of 32 bits it is one instruction. The sums of both halves, with what the lower one
// carries, are exact in any order. What is less than e^-30.5 as likely as the best has no mass, and adds nothing.
__device__ __forceinline__ void add_mass(Mass* to, Mass mass) {
    unsigned* halves = reinterpret_cast<unsigned*>(to);
    unsigned low = (unsigned)mass, high = (unsigned)(mass >> 32);
    if (low != 0) high += atomicAdd(&halves[0], low) > ~low;
    if (high != 0) atomicAdd(&halves[1], high);
}

// The sums over a warp, for all its lanes.
__device__ __forceinline__ Sums warp_total(Sums x) {
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) {
        x.mass += __shfl_xor_sync(ALL_LANES, x.mass, offset);
        x.count += __shfl_xor_sync(ALL_LANES, x.count, offset);
    }
    return x;
}

// Candidates that rank side by side: one, or equals; and the sums of what ranks before them.
struct Group {
    Sums before, sums;
    unsigned first;  // the smallest id
    unsigned rank;   // of their score, where there are several

    __device__ __forceinline__ Mass each() const { return sums.mass / sums.count; }
    // Index of the one at which the mass reaches `target`, from 1.
    __device__ __forceinline__ Mass nth(Mass target) const { return (target - before.mass + each() - 1) / each(); }
};

// State of a search shared by the threads of a block.
struct Search {
    Mass mass[BINS];
    unsigned count[BINS];
    unsigned first[BINS];  // the smallest id in the bin
    Sums of_warps[WARP];
    unsigned edges[2];
    // The bin that was found, its sums, and the sums of the bins before it.
    int bin;
    Sums before, sums;
    unsigned first_id;
};

// The sums of all threads before this one. A barrier must follow before the next call.
__device__ __forceinline__ Sums sums_before(Search& search, Sums own) {
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    Sums through = own;
#pragma unroll
    for (int offset = 1; offset < WARP; offset *= 2) {
        Sums other{__shfl_up_sync(ALL_LANES, through.mass, offset), __shfl_up_sync(ALL_LANES, through.count, offset)};
        if (lane >= offset) through = through + other;
    }
    if (lane == WARP - 1) search.of_warps[warp] = through;
    __syncthreads();
    Sums before{through.mass - own.mass, through.count - own.count};
    for (int w = 0; w < warp; w++) before = before + search.of_warps[w];
    return before;
}

// Find the bin in which the running sum reaches `target`, 1 at least and no more than all bins together. A bin that is
// divided again holds the same sums to the bit, since they are whole numbers of the same expression.
__device__ __forceinline__ void find_bin(Search& search, bool by_count, Mass target) {
    int each = BINS / blockDim.x, begin = threadIdx.x * each;  // blockDim.x is a power of two
    Sums own{0, 0};
    for (int b = begin; b < begin + each; b++) own = own + Sums{search.mass[b], search.count[b]};
    Sums before = sums_before(search, own);
    for (int b = begin; b < begin + each; b++) {
        Sums sums{search.mass[b], search.count[b]};
        Mass until = by_count ? before.count : before.mass;
        Mass here = by_count ? sums.count : sums.mass;
        if (until < target && target <= until + here) {
            search.bin = b;
            search.before = before;
            search.sums = sums;
            search.first_id = search.first[b];
        }
        before = before + sums;
    }
    __syncthreads();
}

// The best rank that lies in bin b of the first division or in a later one. The bin only grows with the rank.
__device__ __forceinline__ unsigned first_rank(const Row& row, int b) {
    unsigned low = rank_of(row.best), high = RANK_OF_MINUS_INFINITY;
    while (low < high) {
        unsigned middle = low + (high - low) / 2;
        if (row.bin(of_rank(middle)) >= b)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

// Count the candidates of ranks low to high into bins of 2^shift ranks.
__device__ __forceinline__ void divide(Search& search, const Row& row, unsigned low, unsigned high, int shift) {
    for (int b = threadIdx.x; b < BINS; b += blockDim.x) {
        search.mass[b] = 0;
        search.count[b] = 0;
        search.first[b] = ~0u;
    }
    __syncthreads();
    for_each_candidate(row, 0, row.V, [&](int id, float score) {
        unsigned rank = rank_of(score);
        if (rank < low || rank > high) return;
        int b = (rank - low) >> shift;
        add_mass(&search.mass[b], row.mass(score));
        atomicAdd(&search.count[b], 1u);
        atomicMin(&search.first[b], (unsigned)id);
    });
    __syncthreads();
}

// The group in which the running count, or the running mass, reaches `target`: at least 1, at most all there is.
// `masses` and `counts` are the row's first division. All threads get the same.
__device__ Group reach(Search& search, const Row& row, const Mass* masses, const unsigned* counts, bool by_count,
                       Mass target) {
    for (int b = threadIdx.x; b < BINS; b += blockDim.x) {
        search.mass[b] = masses[b];
        search.count[b] = counts[b];
    }
    __syncthreads();
    find_bin(search, by_count, target);
    Sums before = search.before;
    if (threadIdx.x < 2) search.edges[threadIdx.x] = first_rank(row, search.bin + threadIdx.x);
    __syncthreads();
    unsigned low = search.edges[0], high = search.edges[1] - 1;

    for (int division = 0; division < 3; division++) {  // three times 11 bits are more than a rank has
        int shift = 0;
        while ((high - low) >> shift >= BINS) shift++;
        divide(search, row, low, high, shift);
        find_bin(search, by_count, target - (by_count ? before.count : before.mass));
        before = before + search.before;
        low += (unsigned)search.bin << shift;
        high = min(high, low + ((1u << shift) - 1));
        if (shift == 0 || search.sums.count == 1) break;
    }
    return {before, search.sums, search.first_id, low};
}

// Write the id of the nth candidate of a group, in ascending order of ids.
__device__ __forceinline__ void write_nth(int* out, Search& search, const Row& row, const Group& group, Mass nth) {
    if (nth == 1) {
        if (threadIdx.x == 0) *out = (int)group.first;
        return;
    }
    int span = (row.V + blockDim.x - 1) / blockDim.x;
    int begin = threadIdx.x * span, end = min(begin + span, row.V);
    Sums own{0, 0};
    for (int id = begin; id < end; id++) own.count += rank_of(row.logits[id] / row.temperature) == group.rank;
    Mass rank = sums_before(search, own).count;
    for (int id = begin; id < end; id++) {
        if (rank_of(row.logits[id] / row.temperature) == group.rank && ++rank == nth) *out = id;
    }
}
