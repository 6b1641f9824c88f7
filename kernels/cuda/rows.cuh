// Loads and stores of a row, VECTOR numbers at a time: 16 bytes at once if the row is aligned, else one by one.
#pragma once

#include "common.cuh"

// Whether all rows, from `pointer` on and `stride` numbers apart, are aligned to 16 bytes. A null pointer counts as
// aligned: it stands for an absent array.
template <class T>
__device__ __forceinline__ bool rows_aligned(const T* pointer, int stride) {
    return (unsigned long long)pointer % 16 == 0 && stride % VECTOR == 0;
}

#if MINILLM_STORAGE != 32
__device__ __forceinline__ float to_float(float x) { return x; }  // gains and biases are float beside any storage_t
#endif

// p[0 .. VECTOR) as they lie in memory, of which only the first `left` are there; the others are 0. To convert a number
// is to wait for it: what is to be under way together is loaded so, and converted where it is used.
template <class T>
struct __align__(16) Loaded {
    T numbers[VECTOR];

    __device__ __forceinline__ void load(const T* p, int left, bool wide) {
        if (!wide || left < VECTOR) {
#pragma unroll
            for (int i = 0; i < VECTOR; i++) numbers[i] = i < left ? p[i] : T(0.0f);
            return;
        }
        constexpr int PER_PIECE = 16 / sizeof(T);
#pragma unroll
        for (int i = 0; i < VECTOR; i += PER_PIECE)
            *reinterpret_cast<uint4*>(numbers + i) = *reinterpret_cast<const uint4*>(p + i);
    }

    __device__ __forceinline__ void convert(float x[VECTOR]) const {
#pragma unroll
        for (int i = 0; i < VECTOR; i++) x[i] = to_float(numbers[i]);
    }
};

// The same as floats.
template <class T>
__device__ __forceinline__ void load_vector(float x[VECTOR], const T* p, int left, bool wide) {
    Loaded<T> loaded;
    loaded.load(p, left, wide);
    loaded.convert(x);
}

// p[0 .. VECTOR) = x, of which only the first `left` have a place.
__device__ __forceinline__ void store_vector(storage_t* p, const float x[VECTOR], int left, bool wide) {
    if (!wide || left < VECTOR) {
#pragma unroll
        for (int i = 0; i < VECTOR; i++) {
            if (i < left) p[i] = from_float(x[i]);
        }
        return;
    }
    uint4 piece;
    storage_t* numbers = reinterpret_cast<storage_t*>(&piece);
#pragma unroll
    for (int i = 0; i < VECTOR; i++) numbers[i] = from_float(x[i]);
    *reinterpret_cast<uint4*>(p) = piece;
}
