// Angles of rotary position embedding; rotary.cu has the formulas.
#pragma once

// The sequence that a token belongs to: the last n with query_starts[n] <= t.
__device__ __forceinline__ int sequence_of(const int* query_starts, int N, int t) {
    int low = 0, high = N - 1;
    while (low < high) {
        int middle = (low + high + 1) / 2;
        if (query_starts[middle] <= t)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

struct Rotation {
    const int* positions;      // [T]
    const float* frequencies;  // [half] or [2, half]
    const int* text_lens;      // [N] or null
    const int* query_starts;   // [N + 1]
    int N, half, original;
    float scale;
    double factor;

    // The factor a of token t's text, or its second row of frequencies.
    __device__ __forceinline__ float stretch(int t) {
        if (text_lens == nullptr) return 1.0f;
        int length = text_lens[sequence_of(query_starts, N, t)];
        if (length > original && factor == 0.0) frequencies += half;
        return length > original && factor != 0.0 ? (float)(factor * length / original - (factor - 1.0)) : 1.0f;
    }

    // Cosine and sine of token t's angle number j.
    __device__ __forceinline__ void turn(int t, int j, float growth, float& cosine, float& sine) const {
        float frequency = frequencies[j];
        if (growth != 1.0f) frequency /= powf(growth, (float)j / (float)max(half - 1, 1));
        sincosf(__fmul_rn((float)positions[t], frequency), &sine, &cosine);
        cosine *= scale;
        sine *= scale;
    }
};

__device__ __forceinline__ void rotate(float& first, float& second, float cosine, float sine) {
    float before = first;
    first = before * cosine - second * sine;
    second = second * cosine + before * sine;
}
