// The end of every product: y = activation(sum + bias) + residual, rounded once to the type of the output.
//
// Also the loads that products share: 16 bytes of a row where it is aligned, single numbers where it is not.
#pragma once

#include "activation.cuh"

// The output is storage_t, or float with -DFLOAT_OUT=1 (the LM head, whose logits are float).
#if defined(FLOAT_OUT) && FLOAT_OUT
using out_t = float;
#else
using out_t = storage_t;
#endif

__device__ __forceinline__ float read(float x) { return x; }
#if MINILLM_STORAGE != 32
__device__ __forceinline__ float read(storage_t x) { return to_float(x); }
#endif
__device__ __forceinline__ void write(float* to, float x) { *to = x; }
#if MINILLM_STORAGE != 32
__device__ __forceinline__ void write(storage_t* to, float x) { *to = from_float(x); }
#endif

// The epilogue's arguments. `bias` [outputs] and `residual` [rows, outputs] may be null.
struct Epilogue {
    out_t* out;
    const float* bias;
    const storage_t* residual;
    int outputs, out_stride, residual_stride, activation;
};

// What is added to one sum, 0 where it is absent. A kernel may load it long before the sum is there; to convert the
// residual is to wait for it, and so is left to the end.
struct Addends {
    float bias;
    storage_t residual;
};

// Of an output beyond the last row or column those of the last: they are not used, and a branch would have to be waited
// for.
__device__ __forceinline__ Addends load_addends(const Epilogue& e, int rows, int row, int output) {
    row = min(row, rows - 1), output = min(output, e.outputs - 1);
    return {e.bias ? e.bias[output] : 0.0f,
            e.residual ? e.residual[(size_t)row * e.residual_stride + output] : storage_t(0.0f)};
}

__device__ __forceinline__ void finish(const Epilogue& e, int row, int output, float sum, Addends addends) {
    float y = activate(sum + addends.bias, e.activation) + to_float(addends.residual);
    write(e.out + (size_t)row * e.out_stride + output, y);
}

// COUNT numbers as floats, 16 bytes a load where the address allows it; zeros from `left` on.
template <int COUNT, typename T>
__device__ __forceinline__ void load_run(float (&to)[COUNT], const T* from, int left) {
    constexpr int WIDTH = 16 / sizeof(T);
    if (COUNT % WIDTH == 0 && left >= COUNT && (size_t)from % 16 == 0) {
#pragma unroll
        for (int i = 0; i < COUNT; i += WIDTH) {
            uint4 bits = *reinterpret_cast<const uint4*>(from + i);
#pragma unroll
            for (int j = 0; j < WIDTH; ++j) {
                if (i + j < COUNT) to[i + j] = read(reinterpret_cast<const T*>(&bits)[j]);
            }
        }
    } else {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) to[i] = i < left ? read(from[i]) : 0.0f;
    }
}

// The reverse of load_run: the first `left` of COUNT numbers are written.
template <int COUNT, typename T>
__device__ __forceinline__ void store_run(T* to, const float (&from)[COUNT], int left) {
    constexpr int WIDTH = 16 / sizeof(T);
    if (COUNT % WIDTH == 0 && left >= COUNT && (size_t)to % 16 == 0) {
#pragma unroll
        for (int i = 0; i < COUNT; i += WIDTH) {
            uint4 bits;
#pragma unroll
            for (int j = 0; j < WIDTH; ++j) {
                if (i + j < COUNT) write(reinterpret_cast<T*>(&bits) + j, from[i + j]);
            }
            *reinterpret_cast<uint4*>(to + i) = bits;
        }
    } else {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            if (i < left) write(to + i, from[i]);
        }
    }
}

// Finish COUNT neighbouring outputs of one row; those beyond the last output are left out.
template <int COUNT>
__device__ __forceinline__ void finish_run(const Epilogue& e, int row, int first, float (&sums)[COUNT]) {
    int left = e.outputs - first;
    if (left <= 0) return;
    float other[COUNT];
    if (e.bias) {
        load_run(other, e.bias + first, left);
#pragma unroll
        for (int i = 0; i < COUNT; ++i) sums[i] += other[i];
    }
#pragma unroll
    for (int i = 0; i < COUNT; ++i) sums[i] = activate(sums[i], e.activation);
    if (e.residual) {
        load_run(other, e.residual + (size_t)row * e.residual_stride + first, left);
#pragma unroll
        for (int i = 0; i < COUNT; ++i) sums[i] += other[i];
    }
    store_run(e.out + (size_t)row * e.out_stride + first, sums, left);
}

// May x and weight be read 16 bytes at a time, every row of them?
__device__ __forceinline__ bool rows_are_aligned(const storage_t* x, const storage_t* weight, int inputs,
                                                 int x_stride) {
    return ((size_t)x | (size_t)weight) % 16 == 0 && (inputs | x_stride) % VECTOR == 0;
}

// VECTOR numbers of a row from k on, zeros beyond its end. ALIGNED is what rows_are_aligned says; STREAMED marks data
// that is read once, which the caches need not keep.
template <bool ALIGNED, bool STREAMED>
__device__ __forceinline__ uint4 load_vector(const storage_t* row, int k, int inputs) {
    uint4 bits = make_uint4(0, 0, 0, 0);
    if (ALIGNED) {
        // Loaded in any case and then masked: a branch around each load would keep the compiler from issuing several.
        unsigned mask = k < inputs ? 0xffffffffu : 0u;
        const uint4* at = reinterpret_cast<const uint4*>(row + (k & (int)mask));
        bits = STREAMED ? __ldcs(at) : *at;
        bits = make_uint4(bits.x & mask, bits.y & mask, bits.z & mask, bits.w & mask);
    } else {
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) {
            if (k + i < inputs) reinterpret_cast<storage_t*>(&bits)[i] = row[k + i];
        }
    }
    return bits;
}
