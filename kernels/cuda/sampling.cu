// Chooses each row's next token: the argmax, or a sample after temperature, top-k, top-p and min-p.
//
//     argmax:  logits.argmax(-1)                                                      # [R, V] -> [R]
//     sample:  reference.sample(logits, uniform(seed, sequence, position), temperature=..., top_k=..., top_p=..., min_p=...)
//
// How the draw is defined is said in minillm/reference/sampling.py. The tokens here are the same, but where rounding
// decides (exp is rounded otherwise): u within 1e-5 of the edge between two candidates, or a share of top-p or min-p
// within 1e-6 of itself of where it keeps one more. Nothing is sorted. Three things make that work:
//
//   - In the order of the candidates (score, then id) each filter keeps a prefix, so all it does is to lower the mass
//     that the uniform number is a share of. Each question (where does top-k end, where top-p, which token) is the
//     same: at which candidate does a running count or a running mass reach a target?
//   - Scores are counted into BINS bins of 1/64 nat below the best. The bin in which the target is reached is divided
//     again by the bits of its scores, until it holds one candidate or equals only. Typically one division is enough.
//   - Masses are whole numbers, weight * 2^44 cut off, so atomic additions give the same bits in any order. What
//     is cut off is less than 2^-44 of the best candidate's mass for each candidate: 2^-26 for a vocabulary of 2^18.
//
// Launches: best_of_chunks, then take_best (argmax) or count_scores and draw (sample).
//
//   kernel          grid         block             reads                                  writes
//   best_of_chunks  (R, C)       256               the logits                             best [R, C]
//   take_best       R            32                best                                   ids, not_finite [R]
//   count_scores    (R, C)       256               the logits                             masses, counts of the bins
//   draw            R            32 to 1024 by V   bins; the logits, 1 to 3 times each    ids, not_finite [R]
//                                                  for top-k, for top-p and for the token
//
// with C = V / CHUNK rounded up. Floor of argmax: 4 R V / bandwidth; of sample without filters three times that, each
// filter once more. Logits just written lie in L2; one multiprocessor takes 64 bytes of it a clock, so that 50k of them
// are expected to take draw 2 us each time.
//
// Versions (none measured on a GPU yet):
//   1. one block for each row does it all: a row of 256k leaves all multiprocessors but one idle in every pass.
//   2. this one: the passes with an atomic addition for each logit are spread over chunks. draw keeps one block a row:
//      its passes add only what lies in one bin, and spread they would cost a launch each. Masses are added in shared
//      memory as two halves of 32 bits (`add_mass`), as the 64-bit addition there is a loop; expected: rows with most
//      candidates in few bins, peaked ones and flat ones, then take as long as others.
#include "candidates.cuh"
#include "philox.cuh"

constexpr int CHUNK = 2048;  // logits of one block; sampling.py knows it too

// The best candidate of a row, for a whole warp.
__device__ __forceinline__ unsigned long long best_of_row(const unsigned long long* best, int chunks) {
    unsigned long long found = NO_CANDIDATE;
    for (int c = threadIdx.x % WARP; c < chunks; c += WARP) {
        unsigned long long other = best[c];
        found = other < found ? other : found;
    }
    return warp_best(found);
}

// A temperature of 0 means argmax; the scores are then the logits.
__device__ __forceinline__ Row row_of(const float* logits, const unsigned long long* best, float temperature, int r,
                                      int V, int stride, int chunks) {
    Row row{logits + (long long)r * stride, V, temperature > 0.0f ? temperature : 1.0f, 0.0f};
    unsigned rank = (unsigned)(best_of_row(best + (long long)r * chunks, chunks) >> 32);
    row.best = (rank == 0 ? infinity() : of_rank(rank)) / row.temperature;
    return row;
}

// The best candidate of each chunk. `masses` and `counts`, where they are given, are set to 0 for count_scores.
extern "C" __global__ void best_of_chunks(unsigned long long* best, Mass* masses, unsigned* counts,
                                          const float* logits, int V, int stride) {
    __shared__ unsigned long long of_warps[WARP];
    follow();
    int r = blockIdx.x, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    int begin = blockIdx.y * CHUNK, end = min(begin + CHUNK, V);
    const float* row = logits + (long long)r * stride;

    unsigned long long found = NO_CANDIDATE;
#pragma unroll 4
    for (int id = begin + threadIdx.x; id < end; id += blockDim.x) {
        unsigned long long other = candidate(row[id], id);
        found = other < found ? other : found;
    }
    found = warp_best(found);
    if (lane == 0) of_warps[warp] = found;
    __syncthreads();
    if (warp == 0) {
        found = warp_best(lane < blockDim.x / WARP ? of_warps[lane] : NO_CANDIDATE);
        if (lane == 0) best[(long long)r * gridDim.y + blockIdx.y] = found;
    }

    if (masses == nullptr) return;
    for (int i = blockIdx.y * blockDim.x + threadIdx.x; i < MASSES; i += gridDim.y * blockDim.x) {
        masses[(long long)r * MASSES + i] = 0;
        if (i < COUNTS) counts[(long long)r * COUNTS + i] = 0;
    }
}

// The argmax of each row, and whether the row has NaN or +inf.
extern "C" __global__ void take_best(int* ids, int* not_finite, const unsigned long long* best, int chunks) {
    follow();
    int r = blockIdx.x;
    unsigned long long found = best_of_row(best + (long long)r * chunks, chunks);
    if (threadIdx.x == 0) {
        ids[r] = (int)(unsigned)found;
        not_finite[r] = (unsigned)(found >> 32) <= RANK_OF_INFINITY;
    }
}

// Number and mass of the candidates in each bin of a row; their totals after the bins.
extern "C" __global__ void count_scores(Mass* masses, unsigned* counts, const float* logits,
                                        const unsigned long long* best, const float* temperatures, const float* min_ps,
                                        int V, int stride) {
    __shared__ Mass bin_mass[BINS];
    __shared__ unsigned bin_count[BINS];
    int r = blockIdx.x;
    Row row = row_of(logits, best, temperatures[r], r, V, stride, gridDim.y);
    if (row.is_none()) return;
    masses += (long long)r * MASSES;
    counts += (long long)r * COUNTS;
    for (int b = threadIdx.x; b < BINS; b += blockDim.x) {
        bin_mass[b] = 0;
        bin_count[b] = 0;
    }
    __syncthreads();

    float min_p = min_ps[r];
    Sums all{0, 0};
    Mass kept = 0;
    int begin = blockIdx.y * CHUNK;
    for_each_candidate(row, begin, min(begin + CHUNK, V), [&](int, float score) {
        Mass mass = row.mass(score);
        int b = row.bin(score);
        add_mass(&bin_mass[b], mass);
        atomicAdd(&bin_count[b], 1u);
        all.mass += mass;
        all.count += 1;
        if (row.weight(score) >= min_p) kept += mass;
    });
    __syncthreads();

    for (int b = threadIdx.x; b < BINS; b += blockDim.x) {
        if (bin_count[b] == 0) continue;
        if (bin_mass[b] != 0) atomicAdd(&masses[b], bin_mass[b]);
        atomicAdd(&counts[b], bin_count[b]);
    }
    all = warp_total(all);
    kept = warp_total(Sums{kept, 0}).mass;
    if (threadIdx.x % WARP == 0) {
        atomicAdd(&masses[ROW_MASS], all.mass);
        atomicAdd(&masses[KEPT_MASS], kept);
        atomicAdd(&counts[ROW_COUNT], all.count);
    }
}

// The token that each row's uniform number selects, and whether the row has no distribution (the token is then 0).
extern "C" __global__ void __launch_bounds__(1024)
    draw(int* ids, int* no_distribution, const float* logits, const unsigned long long* best, const Mass* masses,
         const unsigned* counts, const float* temperatures, const int* top_ks, const double* top_ps,
         const unsigned long long* seeds, const int* sequences, const int* positions, int V, int stride, int chunks) {
    __shared__ Search search;
    int r = blockIdx.x;
    Row row = row_of(logits, best, temperatures[r], r, V, stride, chunks);
    if (threadIdx.x == 0) {
        ids[r] = 0;
        no_distribution[r] = row.is_none();
    }
    if (row.is_none()) return;
    masses += (long long)r * MASSES;
    counts += (long long)r * COUNTS;

    Mass mass = masses[ROW_MASS];
    int top_k = top_ks[r];
    if (0 < top_k && top_k < counts[ROW_COUNT]) {
        Group last = reach(search, row, masses, counts, true, top_k);
        mass = last.before.mass + last.sums.mass;  // equals of the k-th survive
    }
    double top_p = top_ps[r];
    if (top_p < 1.0) {
        Mass target = max((Mass)ceil(top_p * (double)mass), 1ull);
        Group last = reach(search, row, masses, counts, false, target);
        mass = last.before.mass + last.nth(target) * last.each();
    }
    mass = min(mass, masses[KEPT_MASS]);

    Mass n = uniform_24(seeds[r], sequences[r], positions[r], 0);  // the target is n / 2^24 of the mass, rounded up
    Mass target = max((mass >> 24) * n + (((mass & 0xffffff) * n + 0xffffff) >> 24), 1ull);
    if (temperatures[r] == 0.0f) target = 1;
    Group last = reach(search, row, masses, counts, false, target);
    write_nth(&ids[r], search, row, last, last.nth(target));
}
