// One row's tokens as candidates for a draw, and the search for the candidate at which a running sum reaches a target.
//
// Candidates are ordered by score, best first, and equal scores by ascending id. The search never sorts them: it counts
// them into BINS bins, looks in which bin the target is reached, and divides that bin until few candidates are left.
#pragma once

#include "ranks.cuh"

constexpr int BINS = 2048;
constexpr float BINS_PER_NAT = 64.0f;     // 2048 / 64 = 32: what is less than e^-32 as likely as the best is in the last
constexpr float ONE = 17592186044416.0f;  // 2^44, the mass of the best candidate
constexpr int PART_BITS = 9, PARTS = 1 << PART_BITS;  // into which a bin is divided
constexpr int FEW = WARP;                             // candidates that a warp takes without dividing them further
constexpr int LISTED = 1536;                          // candidates that are collected from the bins in question
constexpr int ID_BITS = 19;                           // sampling.py takes no larger vocabulary

// Where does top-k end, where top-p, which is the token?
constexpr int TOP_K = 0, TOP_P = 1, TOKEN = 2, QUESTIONS = 3;

typedef unsigned long long Mass;
typedef unsigned long long Key;  // a place in the order of the candidates

// Stored after the bins by a row's first division: the mass of all candidates and of those that min-p keeps.
constexpr int ROW_MASS = BINS, KEPT_MASS = BINS + 1, MASSES = BINS + 2;

struct Sums {
    Mass mass;
    unsigned count;
};

__device__ __forceinline__ Sums operator+(Sums a, Sums b) { return {a.mass + b.mass, a.count + b.count}; }
__device__ __forceinline__ Sums operator-(Sums a, Sums b) { return {a.mass - b.mass, a.count - b.count}; }

// A row of logits as the candidates that it holds.
struct Row {
    const float* logits;
    int V;
    float temperature;
    unsigned long long top;  // the best logit
    float best;              // its score

    __device__ __forceinline__ float score(float logit) const { return logit / temperature; }
    __device__ __forceinline__ float weight(float score) const { return expf(score - best); }
    __device__ __forceinline__ Mass mass(float score) const { return (Mass)(weight(score) * ONE); }
    __device__ __forceinline__ int bin(float score) const {
        return (int)fminf((best - score) * BINS_PER_NAT, BINS - 1);
    }
    // True if the logits have NaN or +inf, or only -inf.
    __device__ __forceinline__ bool is_none() const { return !(fabsf(best) < infinity()); }
};

// Call visit(id, logit) for each logit of ids [begin, end), in no order, and with -inf for some ids beyond. `begin` is
// a multiple of 4. AHEAD loads of 16 bytes go ahead of the visits.
template <int AHEAD, class Visit>
__device__ __forceinline__ void for_each_logit(const Row& row, int begin, int end, Visit visit) {
    bool aligned = reinterpret_cast<unsigned long long>(row.logits) % 16 == 0;
    int step = 4 * blockDim.x;
#pragma unroll 1
    for (int first = begin + 4 * threadIdx.x; first < end; first += AHEAD * step) {
        float4 logits[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            int id = first + i * step;
            const float* from = row.logits + id;
            if (aligned && id + 4 <= end) {
                logits[i] = *reinterpret_cast<const float4*>(from);
            } else {
                logits[i].x = id < end ? from[0] : -infinity();
                logits[i].y = id + 1 < end ? from[1] : -infinity();
                logits[i].z = id + 2 < end ? from[2] : -infinity();
                logits[i].w = id + 3 < end ? from[3] : -infinity();
            }
        }
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            int id = first + i * step;
            visit(id, logits[i].x);
            visit(id + 1, logits[i].y);
            visit(id + 2, logits[i].z);
            visit(id + 3, logits[i].w);
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

// The sum over a warp, for all its lanes.
__device__ __forceinline__ Mass warp_total(Mass x) {
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(ALL_LANES, x, offset);
    return x;
}

// The sums of all lanes up to this one.
__device__ __forceinline__ Sums sums_through(Sums x) {
    int lane = threadIdx.x % WARP;
#pragma unroll
    for (int offset = 1; offset < WARP; offset *= 2) {
        Sums other{__shfl_up_sync(ALL_LANES, x.mass, offset), __shfl_up_sync(ALL_LANES, x.count, offset)};
        if (lane >= offset) x = x + other;
    }
    return x;
}

// The first number from `begin` to `last` for which holds(number), as it does for all after it and for `last`: 32 at a
// time are tried, by a whole warp.
template <class Holds>
__device__ __forceinline__ unsigned first_that(unsigned begin, unsigned last, Holds holds) {
#pragma unroll 1
    while (begin < last) {
        unsigned step = (last - begin) / WARP + 1;
        unsigned tried = begin + (threadIdx.x % WARP) * step + step - 1;
        unsigned lane = __ffs((int)__ballot_sync(ALL_LANES, tried >= last || holds(tried))) - 1;
        begin += lane * step;
        last = min(last, begin + step - 1);
    }
    return begin;
}

// Sums of bins; after `accumulate` each is that of the bin and of all before it.
template <int SIZE>
struct Bins {
    Mass mass[SIZE];
    unsigned count[SIZE];

    __device__ __forceinline__ Sums through(int b) const { return b < 0 ? Sums{0, 0} : Sums{mass[b], count[b]}; }

    // `of_warps` is scratch for one of each warp. For the whole block; a barrier comes before and after.
    __device__ __forceinline__ void accumulate(Sums* of_warps) {
        __syncthreads();
        int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, warps = blockDim.x / WARP;
        int each = (SIZE + blockDim.x - 1) / blockDim.x;
        int begin = threadIdx.x * each, end = min(begin + each, SIZE);
        Sums own{0, 0};
#pragma unroll 1
        for (int b = begin; b < end; b++) own = own + Sums{mass[b], count[b]};
        Sums until = sums_through(own);
        if (lane == WARP - 1) of_warps[warp] = until;
        __syncthreads();
        Sums others = sums_through(lane < warps ? of_warps[lane] : Sums{0, 0});
        if (warp > 0) {
            until.mass += __shfl_sync(ALL_LANES, others.mass, warp - 1);
            until.count += __shfl_sync(ALL_LANES, others.count, warp - 1);
        }
        until = until - own;
#pragma unroll 1
        for (int b = begin; b < end; b++) {
            until = until + Sums{mass[b], count[b]};
            mass[b] = until.mass;
            count[b] = until.count;
        }
        __syncthreads();
    }

    // The bin in which the running sum reaches `target`: 1 at least, and no more than all bins together.
    __device__ __forceinline__ int reaching(bool by_count, Mass target) const {
        return first_that(0, SIZE - 1, [&](unsigned b) { return (by_count ? count[b] : mass[b]) >= target; });
    }
};

// State of a row's search, shared by the threads of a block.
struct Search {
    unsigned uniform;  // the row's number, in units of 2^-24
    Mass kept;         // by min-p
    Bins<BINS> bins;
    Bins<PARTS> parts;
    // Each question's first and last bin, and the largest and the least logit that lie in them.
    int wanted[2 * QUESTIONS];
    float edges[2 * QUESTIONS];
    // The candidates there, in any order. More than LISTED are not held: the logits are read again for each question.
    unsigned listed;
    float logits[LISTED];
    int ids[LISTED];
    unsigned ranks[2];
    // The last few candidates of a question.
    unsigned few;
    Key keys[FEW];
    Mass masses[FEW];
    Sums of_warps[WARP];
};

// The best rank of a score that lies in bin b or in a later one: the bin only grows with the rank. For a whole warp.
__device__ __forceinline__ unsigned first_rank(const Row& row, int b) {
    return first_that(rank_of(row.best), RANK_OF_MINUS_INFINITY,
                      [&](unsigned rank) { return row.bin(of_rank(rank)) >= b; });
}

// The same of a logit.
__device__ __forceinline__ unsigned first_rank_of_logits(const Row& row, int b) {
    return first_that((unsigned)(row.top >> 32), RANK_OF_MINUS_INFINITY,
                      [&](unsigned rank) { return row.bin(row.score(of_rank(rank))) >= b; });
}

// List the candidates that lie in the wanted bins. Ranges of logits stand for the bins, since a comparison costs a
// tenth of a division. A barrier must come before.
__device__ __forceinline__ void collect(Search& search, const Row& row) {
    int warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
#pragma unroll 1
    for (int i = warp; i < 2 * QUESTIONS; i += warps) {
        bool last = i % 2 == 1;
        unsigned rank = first_rank_of_logits(row, search.wanted[i] + last) - last;
        if (threadIdx.x % WARP == 0) search.edges[i] = of_rank(rank);
    }
    if (threadIdx.x == 0) search.listed = 0;
    __syncthreads();
    float most[QUESTIONS], least[QUESTIONS], lowest = infinity();
#pragma unroll
    for (int q = 0; q < QUESTIONS; q++) {
        most[q] = search.edges[2 * q];
        least[q] = search.edges[2 * q + 1];
        lowest = fminf(lowest, least[q]);
    }
    for_each_logit<4>(row, 0, row.V, [&](int id, float logit) {
        if (logit < lowest) return;  // most of them, where there is a filter
        bool found = false;
#pragma unroll
        for (int q = 0; q < QUESTIONS; q++) found |= least[q] <= logit && logit <= most[q];
        if (!found) return;
        unsigned at = atomicAdd(&search.listed, 1u);
        if (at >= LISTED) return;
        search.logits[at] = logit;
        search.ids[at] = id;
    });
    __syncthreads();
}

// Call visit(id, score) for all candidates that were collected, or, if they were too many, for all there are.
template <class Visit>
__device__ __forceinline__ void for_each_collected(const Search& search, const Row& row, Visit visit) {
    auto take = [&](int id, float logit) {
        float score = row.score(logit);
        if (score != -infinity()) visit(id, score);
    };
    if (search.listed <= LISTED) {
#pragma unroll 1
        for (unsigned i = threadIdx.x; i < search.listed; i += blockDim.x) take(search.ids[i], search.logits[i]);
    } else {
        for_each_logit<1>(row, 0, row.V, take);
    }
}

// A candidate at which a target is reached, and the mass of the candidates through it.
struct Reached {
    Mass mass;
    int id;
};

// The candidate at which the running count, or the running mass, reaches `target`: at least 1, at most all there is. By
// count equal scores are one place in the order, by mass each candidate is one. All threads get the same. Sums over a
// bin that is divided again are the same to the bit, as they are of whole numbers by the same expression.
__device__ __forceinline__ Reached reach(Search& search, const Row& row, bool by_count, Mass target) {
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, warps = blockDim.x / WARP;
    int id_bits = by_count ? 0 : ID_BITS;
    auto key_of = [&](int id, float score) { return (Key)rank_of(score) << id_bits | (by_count ? 0 : id); };

    int b = search.bins.reaching(by_count, target);
    Sums before = search.bins.through(b - 1), inside = search.bins.through(b) - before;
#pragma unroll 1
    for (int i = warp; i < 2; i += warps) {
        unsigned rank = first_rank(row, b + i);
        if (lane == 0) search.ranks[i] = rank;
    }
    if (threadIdx.x == 0) search.few = 0;
    __syncthreads();
    Key first = (Key)search.ranks[0] << id_bits, last = ((Key)search.ranks[1] << id_bits) - 1;

    while (inside.count > FEW && first < last) {
        int shift = max(64 - __clzll((long long)(last - first)) - PART_BITS, 0);
#pragma unroll 1
        for (int p = threadIdx.x; p < PARTS; p += blockDim.x) {
            search.parts.mass[p] = 0;
            search.parts.count[p] = 0;
        }
        __syncthreads();
        for_each_collected(search, row, [&](int id, float score) {
            Key key = key_of(id, score);
            if (key < first || key > last) return;
            int p = (int)((key - first) >> shift);
            add_mass(&search.parts.mass[p], row.mass(score));
            atomicAdd(&search.parts.count[p], 1u);
        });
        search.parts.accumulate(search.of_warps);
        int p = search.parts.reaching(by_count, target - (by_count ? before.count : before.mass));
        Sums skipped = search.parts.through(p - 1);
        before = before + skipped;
        inside = search.parts.through(p) - skipped;
        first += (Key)p << shift;
        last = min(last, first + (((Key)1 << shift) - 1));
        __syncthreads();  // the parts have been read
    }
    if (inside.count > FEW) return {before.mass + inside.mass, 0};  // equals of the k-th: their ids are of no matter

    for_each_collected(search, row, [&](int id, float score) {
        Key key = key_of(id, score);
        if (key < first || key > last) return;
        unsigned at = atomicAdd(&search.few, 1u);
        search.keys[at] = key;
        search.masses[at] = row.mass(score);
    });
    __syncthreads();
    // Each lane has one of them, and looks which come before it: its bits do not depend on the order in the list.
    Key own = lane < inside.count ? search.keys[lane] : 0;
    Sums equals{0, 0};
    for (unsigned i = 0; i < inside.count; i++) {
        Key other = search.keys[i];
        Sums one{search.masses[i], 1};
        if (other < own) before = before + one;
        if (other == own) equals = equals + one;
    }
    Sums through = before + equals;
    bool reached = by_count ? before.count < target && target <= through.count
                            : before.mass < target && target <= through.mass;
    int found = __ffs((int)__ballot_sync(ALL_LANES, lane < inside.count && reached)) - 1;
    own = __shfl_sync(ALL_LANES, own, found);
    return {__shfl_sync(ALL_LANES, through.mass, found), (int)(own & ((1u << ID_BITS) - 1))};
}
