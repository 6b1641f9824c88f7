// The gated delta rule: each head of a sequence has a matrix S [dk, dv] that decays, is corrected and is asked.
//
//     q, k  = q / |q| / sqrt(dk), k / |k|;  beta = sigmoid(b);  g = exp(-exp(decay) * softplus(a + step_bias))
//     S     = g * S;  S = S + outer(k, beta * (v - S.T @ k));  out = S.T @ q
//     states[after[t]] = S                                                         # float32
//
// `before` leads from a token to the one before it, in this pass or in a state (reference/delta_rule.py). A slot that is
// written is none that is read, so a launch can be repeated.
//
// Grid: (T, V, pieces of COLUMNS columns); block: COLUMNS x ROWS threads, a column each, whose rows are dealt out among
// ROWS threads. The block of the first token of a line goes through the line, S in shared memory; the others end at
// once. A token that follows neither the one before it nor a state has a block that computes its line again.
// Moved: in a decode step a state of V dk dv floats read and written per sequence; of a prompt once per line.
// Floor: of a decode step these bytes / bandwidth: Qwen3.5 0.8B (V = 16, dk = dv = 128), 64 sequences: 134 MB a layer,
// 40 us at 3.35 TB/s. Of a prompt the chain of tokens.
//
// Versions:
//   1. this one. Not yet measured on a GPU. Of a long prompt, chunks by matrix products would shorten the chain.
#include "common.cuh"

constexpr int MOST_KEYS = 256, COLUMNS = 32, ROWS = 4;

// S after a token from S before it, and its result unless `out` is NULL. q, k: the token's; v and out: this column's.
struct Step {
    float (*S)[COLUMNS];
    float *q, *k, (*parts)[COLUMNS], *scratch;
    int dk;
    bool inside;

    __device__ __forceinline__ float over_rows(float part) {
        int column = threadIdx.x % COLUMNS, row = threadIdx.x / COLUMNS;
        __syncthreads();  // the parts of the sum before have been read
        parts[row][column] = part;
        __syncthreads();
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < ROWS; i++) sum += parts[i][column];
        return sum;
    }

    __device__ __forceinline__ void advance(const storage_t* queries, const storage_t* keys, const storage_t* v,
                                            float logit, float y, float rate, storage_t* out) {
        int column = threadIdx.x % COLUMNS, row = threadIdx.x / COLUMNS;
        float q_squares = 0.0f, k_squares = 0.0f;
        __syncthreads();  // q and k of the token before have been read
        for (int i = threadIdx.x; i < dk; i += blockDim.x) {
            q[i] = to_float(queries[i]);
            k[i] = to_float(keys[i]);
            q_squares += q[i] * q[i];
            k_squares += k[i] * k[i];
        }
        float k_factor = rsqrtf(block_sum(k_squares, scratch) + 1e-6f);
        float q_factor = rsqrtf(block_sum(q_squares, scratch) + 1e-6f) * rsqrtf((float)dk);
        float softplus = fmaxf(y, 0.0f) + log1pf(expf(-fabsf(y)));
        float g = expf(-expf(rate) * softplus), beta = 1.0f / (1.0f + expf(-logit));
        float told = 0.0f, result = 0.0f;
        for (int i = row; i < dk; i += ROWS) told = fmaf(S[i][column], k[i] * k_factor, told);
        told = over_rows(told);
        float correction = inside ? beta * (to_float(*v) - g * told) : 0.0f;
        for (int i = row; i < dk; i += ROWS) {
            float s = fmaf(k[i] * k_factor, correction, g * S[i][column]);
            S[i][column] = s;
            result = fmaf(s, q[i] * q_factor, result);
        }
        if (!out) return;
        result = over_rows(result);
        if (inside && row == 0) *out = from_float(result);
    }
};

// x: [T, 2 K dk + V dv], rows x_stride apart. gates: [T, 2 V], rows gate_stride apart. decay, step_bias: [V].
// states: [slots, V, dk, dv]. before, after: [T]. out: [T, V dv], contiguous.
extern "C" __global__ void delta_rule(storage_t* out, const storage_t* x, const storage_t* gates, const float* decay,
                                      const float* step_bias, float* states, const int* before, const int* after,
                                      int T, int K, int V, int dk, int dv, int slots, int x_stride, int gate_stride) {
    __shared__ float S[MOST_KEYS][COLUMNS], parts[ROWS][COLUMNS], q[MOST_KEYS], k[MOST_KEYS], scratch[ROWS];
    follow();
    int t = blockIdx.x, head = blockIdx.y, key = head / (V / K), row = threadIdx.x / COLUMNS;
    int column = blockIdx.z * COLUMNS + threadIdx.x % COLUMNS;
    if (t > 0 && before[t] == t - 1) return;  // the block of an earlier token goes through it
    Step step = {S, q, k, parts, scratch, dk, column < dv};

    auto advance = [&](int token, bool asked) {
        const storage_t* line = x + (long long)token * x_stride;
        const storage_t* own = gates + (long long)token * gate_stride;
        step.advance(line + key * dk, line + (K + key) * dk, line + 2 * K * dk + head * dv + column,
                     to_float(own[head]), to_float(own[V + head]) + step_bias[head], decay[head],
                     asked ? out + ((long long)token * V + head) * dv + column : nullptr);
    };

    int distance = 0, base = before[t];  // to the last state, or the beginning
    for (; base >= 0; base = before[base]) {
        CHECK_INDEX(base, T);
        distance++;
    }
    CHECK_INDEX(base < -1 ? -2 - base : 0, slots);
    const float* from = base == -1 ? nullptr : states + (((long long)(-2 - base) * V + head) * dk) * dv + column;
    for (int i = row; i < dk; i += ROWS)
        S[i][threadIdx.x % COLUMNS] = from && step.inside ? from[(long long)i * dv] : 0.0f;
    while (distance--) {
        int token = before[t];
        for (int i = 0; i < distance; i++) token = before[token];
        advance(token, false);
    }
    for (int token = t; token < T && (token == t || before[token] == token - 1); token++) {
        advance(token, true);
        int slot = after[token];
        CHECK_INDEX(slot < 0 ? 0 : slot, slots);
        if (slot < 0 || !step.inside) continue;
        float* to = states + (((long long)slot * V + head) * dk) * dv + column;
        for (int i = row; i < dk; i += ROWS) to[(long long)i * dv] = S[i][threadIdx.x % COLUMNS];
    }
}
