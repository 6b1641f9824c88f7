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
//   - Scores are counted into BINS bins of 1/64 nat below the best. The bin in which the target is reached tells which
//     few candidates may be asked for; a bin with more of them is divided again, by the bits of scores and ids.
//   - Masses are whole numbers, weight * 2^44 cut off, so atomic additions give the same bits in any order. What
//     is cut off is less than 2^-44 of the best candidate's mass for each candidate: 2^-26 for a vocabulary of 2^18.
//
// Launches: best_of_chunks, then take_best (argmax) or count_scores and draw (sample).
//
//   kernel          grid         block             reads                                  writes
//   best_of_chunks  (R, C)       256               the logits                             best [R, C]
//   take_best       R            32                best                                   ids, not_finite [R]
//   count_scores    (R, B)       512               the logits                             masses, counts of the bins
//   draw            R            32 to 1024 by V   bins; the logits, once                 ids, not_finite [R]
//
// with C = V / CHUNK rounded up, B = 512 / R blocks that share the C chunks, 1 to C. Floor of argmax: 4 R V /
// bandwidth; of sample three times that. Logits just written lie in L2; one multiprocessor takes 64 bytes of it a
// clock, so that draw takes 2 us at least for 50k of them.
//
// Versions (times of sample: V = 50,272, logits of std 3 in steps of float16; temperature 0.8, top-k 50, top-p 0.9):
//   1. one block for each row does it all: a row of 256k leaves all multiprocessors but one idle in every pass.
//   2. the passes with an atomic addition for each logit are spread over chunks. draw keeps one block a row, and
//      divides the bin of each question by reading all logits again, with a division for each. Masses are added in
//      shared memory as two halves of 32 bits (`add_mass`), as the 64-bit addition there is a loop; expected: rows with
//      most candidates in few bins, peaked ones and flat ones, then take as long as others.
//      Measured on an H100: 66 to 79, 93, 100 to 121, 151 to 165 us for 1, 8, 32, 128 rows.
//   3. this one. draw looks at the logits once, to list the candidates of all bins in question, by comparisons with the
//      ends of the bins, and answers from the list; equal scores are told apart there and not by a search of the whole
//      row. At most 512 blocks of count_scores add bins to those of rows, or R if these are more, not R C. Rows with
//      more than LISTED candidates in these bins, flat ones, are still read again for each division.
//      Measured beside version 2 in one run: 31, 32, 38, 59 us in place of 79, 93, 100, 151.
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
    Row row{logits + (long long)r * stride, V, temperature > 0.0f ? temperature : 1.0f, 0, 0.0f};
    row.top = best_of_row(best + (long long)r * chunks, chunks);
    unsigned rank = (unsigned)(row.top >> 32);
    row.best = row.score(rank == 0 ? infinity() : of_rank(rank));
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
        if (i < BINS) counts[(long long)r * BINS + i] = 0;
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

// Number and mass of the candidates in each bin of a row; after the bins the masses of all and of what min-p keeps.
extern "C" __global__ void count_scores(Mass* masses, unsigned* counts, const float* logits,
                                        const unsigned long long* best, const float* temperatures, const float* min_ps,
                                        int V, int stride, int chunks) {
    __shared__ Mass bin_mass[MASSES];
    __shared__ unsigned bin_count[BINS];
    int r = blockIdx.x;
    float min_p = min_ps[r];
    Row row = row_of(logits, best, temperatures[r], r, V, stride, chunks);
    if (row.is_none()) return;
#pragma unroll 1
    for (int b = threadIdx.x; b < MASSES; b += blockDim.x) {
        bin_mass[b] = 0;
        if (b < BINS) bin_count[b] = 0;
    }
    __syncthreads();

    Mass all = 0, kept = 0;
    for (int chunk = blockIdx.y; chunk < chunks; chunk += gridDim.y) {
        int begin = chunk * CHUNK;
        for_each_logit<1>(row, begin, min(begin + CHUNK, V), [&](int, float logit) {
            float score = row.score(logit);
            if (score == -infinity()) return;
            Mass mass = row.mass(score);
            int b = row.bin(score);
            add_mass(&bin_mass[b], mass);
            atomicAdd(&bin_count[b], 1u);
            all += mass;
            if (row.weight(score) >= min_p) kept += mass;
        });
    }
    all = warp_total(all);
    kept = warp_total(kept);
    if (threadIdx.x % WARP == 0) {
        add_mass(&bin_mass[ROW_MASS], all);
        add_mass(&bin_mass[KEPT_MASS], kept);
    }
    __syncthreads();

    masses += (long long)r * MASSES;
    counts += (long long)r * BINS;
#pragma unroll 1
    for (int b = threadIdx.x; b < MASSES; b += blockDim.x) {
        if (bin_mass[b] != 0) atomicAdd(&masses[b], bin_mass[b]);
        if (b < BINS && bin_count[b] != 0) atomicAdd(&counts[b], bin_count[b]);
    }
}

// The token that each row's uniform number selects, and whether the row has no distribution (the token is then 0).
//
// Each filter lowers the mass, to a number that only the candidates of one bin tell in full. What the bins tell is
// between which masses it lies, and so between which bins the next question's answer: candidates are collected from
// these bins for all questions at once. Typically that is one bin, or two, for each.
extern "C" __global__ void __launch_bounds__(1024)
    draw(int* ids, int* no_distribution, const float* logits, const unsigned long long* best, const Mass* masses,
         const unsigned* counts, const float* temperatures, const int* top_ks, const double* top_ps,
         const unsigned long long* seeds, const int* sequences, const int* positions, int V, int stride, int chunks) {
    __shared__ Search search;
    int r = blockIdx.x;
    masses += (long long)r * MASSES;
    counts += (long long)r * BINS;
    for (int b = 2 * threadIdx.x; b < BINS; b += 2 * blockDim.x) {
        ulonglong2 two = *reinterpret_cast<const ulonglong2*>(masses + b);
        uint2 of_two = *reinterpret_cast<const uint2*>(counts + b);
        search.bins.mass[b] = two.x;
        search.bins.mass[b + 1] = two.y;
        search.bins.count[b] = of_two.x;
        search.bins.count[b + 1] = of_two.y;
    }
    Mass mass = masses[ROW_MASS];
    float temperature = temperatures[r];
    unsigned top_k = (unsigned)max(top_ks[r], 0);
    double top_p = top_ps[r];
    if (threadIdx.x == 0) {
        search.uniform = uniform_24(seeds[r], sequences[r], positions[r], 0);
        search.kept = masses[KEPT_MASS];
    }
    Row row = row_of(logits, best, temperature, r, V, stride, chunks);
    if (row.is_none() || temperature == 0.0f) {
        if (threadIdx.x == 0) {
            ids[r] = row.is_none() ? 0 : (int)(unsigned)row.top;
            no_distribution[r] = row.is_none();
        }
        return;
    }
    search.bins.accumulate(search.of_warps);
    bool has_top_k = 0 < top_k && top_k < search.bins.count[BINS - 1];

    // What a question asks for, where `of` is the mass that the ones before it leave.
    auto is_asked = [&](int question) { return question == TOP_K ? has_top_k : question == TOKEN || top_p < 1.0; };
    auto target = [&](int question, Mass of) {
        if (question == TOP_K) return (Mass)top_k;
        if (question == TOP_P) return max((Mass)ceil(top_p * (double)of), 1ull);
        of = min(of, search.kept);
        Mass n = search.uniform;
        return max((of >> 24) * n + (((of & 0xffffff) * n + 0xffffff) >> 24), 1ull);  // n / 2^24 of it, rounded up
    };

    Mass least = mass, most = mass;
#pragma unroll 1  // here and below: code that runs once takes longer to fetch than to run
    for (int question = 0; question < QUESTIONS; question++) {
        int first = 0, last = -1;  // no bin
        if (is_asked(question)) {
            first = search.bins.reaching(question == TOP_K, target(question, least));
            last = search.bins.reaching(question == TOP_K, target(question, most));
            least = search.bins.through(first - 1).mass;
            most = search.bins.through(last).mass;
        }
        if (threadIdx.x < 2) search.wanted[2 * question + threadIdx.x] = threadIdx.x == 0 ? first : last;
    }
    __syncthreads();
    collect(search, row);

    Reached found;
#pragma unroll 1
    for (int question = 0; question < QUESTIONS; question++) {
        if (!is_asked(question)) continue;
        found = reach(search, row, question == TOP_K, target(question, mass));
        mass = found.mass;  // equals of the k-th survive
    }
    if (threadIdx.x == 0) {
        ids[r] = found.id;
        no_distribution[r] = 0;
    }
}
