// Floats as whole numbers in order of rank: NaN first, then the largest; -0 and +0 share a rank.
//
// So the best of a row is one minimum over (rank, id), and of equal scores it is the smallest id.
#pragma once

#include "common.cuh"

constexpr unsigned RANK_OF_INFINITY = 0x007fffffu;        // this and less: NaN or +inf
constexpr unsigned RANK_OF_MINUS_INFINITY = 0xff800000u;  // the last

__device__ __forceinline__ float infinity() { return __uint_as_float(0x7f800000u); }  // NVRTC has no INFINITY

__device__ __forceinline__ unsigned rank_of(float x) {
    if (x != x) return 0;
    unsigned bits = x == 0.0f ? 0 : __float_as_uint(x);
    return bits & 0x80000000u ? bits : bits ^ 0x7fffffffu;
}

// The float of a rank: the inverse of rank_of, for all but NaN.
__device__ __forceinline__ float of_rank(unsigned rank) {
    return __uint_as_float(rank & 0x80000000u ? rank : rank ^ 0x7fffffffu);
}

// A candidate as (rank, id): less is better.
__device__ __forceinline__ unsigned long long candidate(float x, int id) {
    return (unsigned long long)rank_of(x) << 32 | (unsigned)id;
}

constexpr unsigned long long NO_CANDIDATE = ~0ull;

__device__ __forceinline__ unsigned long long warp_best(unsigned long long x) {
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) {
        unsigned long long other = __shfl_xor_sync(ALL_LANES, x, offset);
        x = other < x ? other : x;
    }
    return x;
}
