// The gate of a gated MLP: one half of a projection, activated, times the other (Shazeer, arXiv 2002.05202).
//
//     out = activation(x[:, :F]) * x[:, F:]                   # [T, 2 F] -> [T, F]; or gpt-oss's gate (activation.cuh)
//     out = activation(x) * x                                 # [T, F] -> [T, F]: a row with itself; ReLU's is its square
//
// Grid: (T, vectors of a row / threads of a block); block: up to 256 threads, 16 bytes of the gate and of `up` each.
// Moved: 3 T F numbers; an exponential and a division for each result.
// Floor: 3 T F sizeof(storage_t) / bandwidth. Llama 3.1 8B (F = 14,336) in 16 bits, a prompt of 2,000 tokens: 172 MB a
// layer, 40 us at 4.3 TB/s; of a decode step it is a launch.
//
// Versions:
//   1. activation and product apart: 5 T F numbers, two launches.
//   2. this one, in one pass: 3 T F numbers, one launch. H100: 2.1 us for a row, 68 for 2,000 of 16,384 numbers, 0.95
//      of the copy bandwidth.
//   3. for a decode step that is recorded: in the projection, whose epilogue multiplies (gemv_fused.cu): T F numbers.
#include "activation.cuh"
#include "rows.cuh"

// x: [T, 2 F], rows x_stride apart, `up_at` numbers from gate to up: F, or 0 of a row with itself, [T, F]. out: [T, F],
// contiguous.
extern "C" __global__ void glu(storage_t* out, const storage_t* x, int F, int x_stride, int up_at, int activation) {
    follow();
    int at = (blockIdx.y * blockDim.x + threadIdx.x) * VECTOR, left = F - at;
    if (left <= 0) return;
    const storage_t* row = x + (long long)blockIdx.x * x_stride;
    bool wide = rows_aligned(x, x_stride) && rows_aligned(out, F);  // with F that of `up` too
    float gate[VECTOR], up[VECTOR];
    load_vector(gate, row + at, left, wide);
    load_vector(up, row + up_at + at, left, wide);
#pragma unroll
    for (int i = 0; i < VECTOR; i++) gate[i] = gated(gate[i], up[i], activation);
    store_vector(out + (long long)blockIdx.x * F + at, gate, left, wide);
}

// out = x * sigmoid(logits), each of n equal parts of a row by a logit of its own. [T, F], [T, n] -> [T, F]
// With `silu` the factor is logits * sigmoid(logits).
// Grid and block as of glu. x, out: [T, F], logits: [T, n], rows x_stride and logits_stride apart.
extern "C" __global__ void gate(storage_t* out, const storage_t* x, const storage_t* logits, int F, int n, int x_stride,
                                int logits_stride, int silu) {
    follow();
    int at = (blockIdx.y * blockDim.x + threadIdx.x) * VECTOR, left = F - at, width = F / n;
    if (left <= 0) return;
    bool wide = rows_aligned(x, x_stride) && rows_aligned(out, F);
    float values[VECTOR];
    load_vector(values, x + (long long)blockIdx.x * x_stride + at, left, wide);
#pragma unroll
    for (int i = 0; i < VECTOR; i++) {
        if (i >= left) break;
        float logit = to_float(logits[(long long)blockIdx.x * logits_stride + (at + i) / width]);
        values[i] *= (silu ? logit : 1.0f) / (1.0f + expf(-logit));
    }
    store_vector(out + (long long)blockIdx.x * F + at, values, left, wide);
}

// out = x * others * factor, of which one may be missing (null). [T, F], [T, F], [1] or [F] -> [T, F]
// Grid and block as of glu. x, others: [T, F], rows x_stride and others_stride apart; factor: one number, or one of each
// column.
extern "C" __global__ void multiply(storage_t* out, const storage_t* x, const storage_t* others, const float* factor,
                                    int F, int x_stride, int others_stride, int by_column) {
    follow();
    int at = (blockIdx.y * blockDim.x + threadIdx.x) * VECTOR, left = F - at;
    if (left <= 0) return;
    bool wide = rows_aligned(x, x_stride) && rows_aligned(others, others_stride) && rows_aligned(out, F);
    float values[VECTOR], factors[VECTOR], number = factor && !by_column ? *factor : 1.0f;
    load_vector(values, x + (long long)blockIdx.x * x_stride + at, left, wide);
    if (others) load_vector(factors, others + (long long)blockIdx.x * others_stride + at, left, wide);
#pragma unroll
    for (int i = 0; i < VECTOR; i++) {
        if (by_column && i < left) number = factor[at + i];
        values[i] *= others ? factors[i] * number : number;
    }
    store_vector(out + (long long)blockIdx.x * F + at, values, left, wide);
}
