// A decode step of 1 to 4 sequences in one launch: from the first layer's norm to the logits (a persistent kernel, or
// "megakernel"; Spector et al., "Look Ma, No Bubbles!", hazyresearch.stanford.edu, 2025).
//
//   for operation in operations:            # each by all blocks; the next begins when all have ended
//       PRODUCT  y = activation(norm(x) @ W.T + b) + r      LOGITS  the same in float32
//       GATE     y = activation(gate) * up                  of gate, up = norm(x) @ W.T + b
//       STORE    q, keys[slot], values[slot] = rotated q, k, v of norm(x) @ W.T + b
//       HEADS    q, keys[slot], values[slot] = rotated norm(q), norm(k), v of each head
//       ATTENTION  out = softmax(keys @ q * scale) @ values
//
// `norm` is the RMS norm, where the operation has a gain. The operations are those of the recorded step's launches, which
// remain the specification: rms_norm (norm.cu), gemv_fma and fused_fma (gemv.cu, gemv_fused.cu), attention_decode; HEADS
// is rms_norm twice, rotary and store_kv, after a PRODUCT in place of STORE. The same numbers are added in the same order
// and rounded at the same places, so the results are the same bits. (On a GPU but for what the compiler contracts to fma
// here and not there.) minillm/backends/cuda/persistent.py makes the list. W has 16 bits, or 8 or 4 with a scale for 32 of
// them, each operation its own (step_integers.cuh; gemv_mma, fused_mma).
//
// Why. Between two launches of a step the memory is idle for about 2 us: the last blocks add up, the next ones begin, and
// their first loads take a latency of device memory. Weights depend on nothing, so here they do not stop: each warp has a
// ring of slots in shared memory, filled by bulk copies (step_ring.cuh). As soon as a warp has read a slot it has it
// filled with the part that it will need so many slots later, of a later operation if need be. So a warp waits for
// nothing but its own reading before it asks for weights, and while the blocks wait for each other the copies go on: with
// 144 KiB of ring in each of 132 processors, 19 MB, 6 us of a stream of 3 TB/s. (A producer warp would wait for the same
// empty slots, and take registers and barriers for it.)
//
// Rows of W are dealt out to all blocks, on from one operation to the next. x lies in shared memory, copied or normalised
// by each block for itself. A row's sums are those of as many warps as gemv_fma had for it (`splits`), here all in one.
//
// Blocks wait by one counter: each adds 1 when it has ended an operation, and begins the next when all have. The counter
// goes on from launch to launch: a launch adds a multiple of the blocks. All blocks must run at once: a cooperative
// launch. Watchdog (cooperative.cuh): a wait of more than 2 s ends the kernel.
//
// Grid: as many blocks as processors; block: THREADS (128). Dynamic shared memory: the rings, `room` bytes for x or for
// attention's keys and values, the list, mbarriers, sums of tiles. Constants: TOKENS (1, 2 or 4), the rows; of attention
// HEAD_DIM, PAGE_SIZE, GROUP, SPLIT, WINDOWED; INTEGERS, whether a matrix has 8 or 4 bits; HEAD_NORMS, whether there are
// HEADS. Activations of 16 bits, sm_90 and later.
//
// Bytes and floor: all weights once, and keys and values: Llama-3.2-1B in 16 bits 2.5 GB, 0.82 ms at 3.0 TB/s. Expected by
// the model of kernels/README.md 0.86 ms, where the step of launches is expected to take 1.1; not measured. Multiply-adds:
// 4 rows of 3 TB/s take about half of what four warps of a processor can issue. In 4 bits, its head in 8: 0.83 GB, 0.28 ms
// at 3.0 TB/s.
#define DECODE_STEP 1
#ifndef INTEGERS
#define INTEGERS 0
#endif
#ifndef HEAD_NORMS
#define HEAD_NORMS 0
#endif
#include "attention_decode.cu"
#include "epilogue.cuh"
#include "rotary.cuh"
#if INTEGERS
#include "step_integers.cuh"
#else
#include "step_ring.cuh"
#endif

constexpr int MOST_SPLITS = 4, MOST_NORM_WARPS = 16;
static_assert(sizeof(storage_t) == 2 && CHUNK % (MOST_SPLITS * WARP * VECTOR) == 0, "a chunk has whole turns of all splits");
static_assert(TOKENS <= 4, "a lane has a row's sum");

// What the operations of a step have in common.
struct Common {
    const int* slots;  // [rows], page * P + offset, or -1
    Rotation rotation;
    float* partials;
    int* arrived;
    const int *context_lens, *block_table;
    int rows, H, K, pages, table_width, max_splits, window;
    float scale;
    dim3 attention_grid;
};

// Numbers from one row of x to the next in shared memory: neighbours are in other banks.
__device__ __forceinline__ int staged_stride(int inputs) { return inputs + VECTOR; }

// The product of the warp's next row of W and row t of x, in lane t. x: [TOKENS, inputs] in shared memory, staged_stride
// apart.
template <int SPLITS>
__device__ __forceinline__ float row_product(Ring& ring, const uint4* x, int inputs) {
    int lane = threadIdx.x % WARP;
    int x_vectors = staged_stride(inputs) / VECTOR;
    float sums[SPLITS][TOKENS] = {};
    for (int at = 0; at < inputs; at += CHUNK) {
        const uint4* chunk = reinterpret_cast<const uint4*>(ring.wait(ring.warp));
        int vectors = min(CHUNK, inputs - at) / VECTOR;
#pragma unroll 2
        for (int first = 0; first < vectors; first += SPLITS * WARP) {
#pragma unroll
            for (int s = 0; s < SPLITS; ++s) {
                int v = first + s * WARP + lane;
                if (v >= vectors) continue;
                uint4 w = chunk[v];
#pragma unroll
                for (int t = 0; t < TOKENS; ++t) {
                    uint4 xs = x[t * x_vectors + at / VECTOR + v];
#pragma unroll
                    for (int i = 0; i < VECTOR; ++i) {
                        float xi = to_float(reinterpret_cast<const storage_t*>(&xs)[i]);
                        sums[s][t] = fmaf(xi, to_float(reinterpret_cast<const storage_t*>(&w)[i]), sums[s][t]);
                    }
                }
            }
        }
        ring.release(false);
    }
    float mine = 0.0f;
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
        float total = 0.0f;
#pragma unroll
        for (int s = 0; s < SPLITS; ++s) total += warp_sum(sums[s][t]);
        if (lane == t) mine = total;
    }
    return mine;
}

__device__ __forceinline__ float row_product(Ring& ring, const uint4* x, const Operation& op) {
    if (op.splits == 1) return row_product<1>(ring, x, op.inputs);
    if (op.splits == 2) return row_product<2>(ring, x, op.inputs);
    return row_product<4>(ring, x, op.inputs);
}

// x to shared memory, as it is or normalised; all threads. The sum of squares is that of rms_norm's threads.
__device__ __forceinline__ void stage(uint4* to, const Operation& op, int rows) {
    __shared__ float scratch[TOKENS][MOST_NORM_WARPS];
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, vectors = op.inputs / VECTOR;
    int threads = op.norm_threads, apart = staged_stride(op.inputs) / VECTOR;
    if (op.gain == nullptr) {
        for (int i = threadIdx.x; i < rows * vectors; i += THREADS) {
            const storage_t* row = op.x + (size_t)(i / vectors) * op.x_stride;
            to[i / vectors * apart + i % vectors] = reinterpret_cast<const uint4*>(row)[i % vectors];
        }
        __syncthreads();
        return;
    }
    for (int t = 0; t < rows; ++t) {
        const uint4* row = reinterpret_cast<const uint4*>(op.x + (size_t)t * op.x_stride);
        for (int part = warp; part < threads / WARP; part += WARPS) {  // of the warps of rms_norm
            float squares = 0.0f;
            for (int v = part * WARP + lane; v < vectors; v += threads) {
                uint4 bits = row[v];
                to[t * apart + v] = bits;
#pragma unroll
                for (int i = 0; i < VECTOR; ++i) {
                    float value = to_float(reinterpret_cast<const storage_t*>(&bits)[i]);
                    squares += value * value;
                }
            }
            squares = warp_sum(squares);
            if (lane == 0) scratch[t][part] = squares;
        }
    }
    __syncthreads();
    for (int t = 0; t < rows; ++t) {
        float squares = warp_sum(lane < threads / WARP ? scratch[t][lane] : 0.0f);
        float scale = 1.0f / sqrtf(squares / op.inputs + op.epsilon);
        for (int v = threadIdx.x; v < vectors; v += THREADS) {
            uint4 bits = to[t * apart + v];
            storage_t* values = reinterpret_cast<storage_t*>(&bits);
#pragma unroll
            for (int i = 0; i < VECTOR; ++i) {
                float value = to_float(values[i]);
                value *= scale * op.gain[v * VECTOR + i];
                values[i] = from_float(value);
            }
            to[t * apart + v] = bits;
            if (op.normed && blockIdx.x == 0) reinterpret_cast<uint4*>(op.normed + (size_t)t * op.inputs)[v] = bits;
        }
    }
    __syncthreads();
}

// What gemv.cu would have written for an output without activation: it is rounded before it is used on.
__device__ __forceinline__ storage_t rounded(const Operation& op, int output, float sum) {
    return from_float(sum + (op.bias ? op.bias[output] : 0.0f) + 0.0f);
}

// Row `row` of a STORE's output: a query goes to `out`, a key or a value to its place in the cache.
__device__ __forceinline__ void place(const Operation& op, const Common& common, int row, int output, storage_t y) {
    int head = output / HEAD_DIM, column = output % HEAD_DIM, slot = common.slots[row];
    if (head < common.H) {
        static_cast<storage_t*>(op.out)[(size_t)row * op.out_stride + output] = y;
    } else if (slot >= 0) {
        int page = slot / PAGE_SIZE, kv_head = head - common.H;
        CHECK_INDEX(page, common.pages);
        storage_t* cache = kv_head < common.K ? op.keys : op.values;
        cache[page_row(page, slot % PAGE_SIZE, kv_head % common.K, common.K) + column] = y;
    }
}

// What is added to a sum of PRODUCT or LOGITS.
__device__ __forceinline__ Addends load_addends(const Operation& op, bool finishes, int row, int item) {
    return {op.bias && finishes ? op.bias[item] : 0.0f,
            op.residual && finishes ? op.residual[(size_t)row * op.residual_stride + item] : storage_t(0.0f)};
}

__device__ __forceinline__ void finish(const Operation& op, int row, int item, float sum, Addends added) {
    float y = activate(sum + added.bias, op.activation) + to_float(added.residual);
    size_t to = (size_t)row * op.out_stride + item;
    if (op.kind == LOGITS) static_cast<float*>(op.out)[to] = y;
    if (op.kind == PRODUCT) static_cast<storage_t*>(op.out)[to] = from_float(y);
}

// Rotate the numbers j and j + half of a head of row `row`.
__device__ __forceinline__ void rotate_pair(const Common& common, int row, int j, storage_t& a, storage_t& b) {
    Rotation turned = common.rotation;
    float growth = turned.stretch(row), cosine, sine, one = to_float(a), other = to_float(b);
    turned.turn(row, j, growth, cosine, sine);
    rotate(one, other, cosine, sine);
    a = from_float(one), b = from_float(other);
}

__device__ __forceinline__ void finish_pair(const Operation& op, const Common& common, int row, int item, float one,
                                            float other) {
    int half = common.rotation.half;
    int first = row_of(op, item, 0, half), second = row_of(op, item, 1, half), j = first % HEAD_DIM;
    storage_t a = rounded(op, first, one), b = rounded(op, second, other);
    if (op.kind == GATE) {
        storage_t y = from_float(gated(to_float(a), to_float(b), op.activation));
        static_cast<storage_t*>(op.out)[(size_t)row * op.out_stride + item] = y;
        return;
    }
    if (first / HEAD_DIM < common.H + common.K && j < half) rotate_pair(common, row, j, a, b);
    place(op, common, row, first, a);
    place(op, common, row, second, b);
}

// By rows of 16 bits, one for each warp. x: staged.
__device__ __forceinline__ void multiply_rows(const Operation& op, const Common& common, Ring& ring, const uint4* x) {
    int row = threadIdx.x % WARP, items = items_of(op);
    for (int unit = ring.first_unit(op); unit < op.units; unit += gridDim.x) {
        int item = unit * WARPS + ring.warp;
        bool finishes = row < common.rows && item < items;
        item = min(item, items - 1);  // whose row the ring has
        if (paired(op)) {
            float one = row_product(ring, x, op), other = row_product(ring, x, op);
            if (finishes) finish_pair(op, common, row, item, one, other);
            continue;
        }
        Addends added = load_addends(op, finishes, row, item);  // under way while W is read
        float sum = row_product(ring, x, op);
        if (finishes) finish(op, row, item, sum, added);
    }
}

#if INTEGERS
// By tiles of integers, one for the block. x: staged; sums: of two tiles, so that one is finished while the next is summed.
template <int BITS>
__device__ __forceinline__ void multiply_tiles(const Operation& op, const Common& common, Ring& ring,
                                               const storage_t* x, PartOfTile* sums) {
    bool pairs = paired(op);
    int items = items_of(op), of_tile = pairs ? TILE / 2 : TILE, row = threadIdx.x / of_tile;
    int output = threadIdx.x % of_tile, turn = 0;
    for (int unit = ring.first_unit(op); unit < op.units; unit += gridDim.x) {
        PartOfTile* parts = sums + turn * MOST_SPLITS_OF_TILE;
        turn ^= 1;
        int item = unit * of_tile + output;
        bool finishes = row < common.rows && item < items;
        Addends added = load_addends(op, finishes && !pairs, row, item);
        multiply_tile<BITS>(ring, x, staged_stride(op.inputs), op, parts);
        if (!finishes) continue;
        float one = 0.0f, other = 0.0f;
        for (int split = 0; split < op.splits; ++split) {
            one += parts[split][row][pairs ? 2 * output : output];
            if (pairs) other += parts[split][row][2 * output + 1];
        }
        if (pairs)
            finish_pair(op, common, row, item, one, other);
        else
            finish(op, row, item, one, added);
    }
}

#endif

// sums: room for those of two tiles.
__device__ __forceinline__ void multiply(const Operation& op, const Common& common, Ring& ring, uint4* x, void* sums) {
    stage(x, op, common.rows);
    if (op.bits == 16) multiply_rows(op, common, ring, x);
#if INTEGERS
    const storage_t* numbers = reinterpret_cast<const storage_t*>(x);
    if (op.bits == 8) multiply_tiles<8>(op, common, ring, numbers, static_cast<PartOfTile*>(sums));
    if (op.bits == 4) multiply_tiles<4>(op, common, ring, numbers, static_cast<PartOfTile*>(sums));
#endif
}

#if HEAD_NORMS
// HEADS, one for each warp: normalised as by a block of rms_norm, which is one warp. scratch: [WARPS, HEAD_DIM].
__device__ __forceinline__ void store_heads(const Operation& op, const Common& common, storage_t* scratch) {
    static_assert(HEAD_DIM <= WARP * VECTOR, "a lane has 16 bytes of a head");
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, heads = common.H + 2 * common.K;
    storage_t* head = scratch + warp * HEAD_DIM;
    for (int i = warp * gridDim.x + blockIdx.x; i < common.rows * heads; i += WARPS * gridDim.x) {
        int row = i / heads, number = i % heads, at = lane * VECTOR;
        bool turns = number < common.H + common.K;  // a value does not, and has no norm
        const storage_t* from = op.x + (size_t)row * op.x_stride + number * HEAD_DIM;
        uint4 bits = at < HEAD_DIM ? *reinterpret_cast<const uint4*>(from + at) : make_uint4(0, 0, 0, 0);
        storage_t* numbers = reinterpret_cast<storage_t*>(&bits);
        if (turns) {
            const float* gain = number < common.H ? op.gain : op.bias;
            float squares = 0.0f;
#pragma unroll
            for (int k = 0; k < VECTOR; ++k) {
                float value = to_float(numbers[k]);
                squares += value * value;
            }
            float scale = 1.0f / sqrtf(warp_sum(squares) / HEAD_DIM + op.epsilon);
#pragma unroll
            for (int k = 0; k < VECTOR; ++k) {
                float value = to_float(numbers[k]);
                if (at < HEAD_DIM) value *= scale * gain[at + k];
                numbers[k] = from_float(value);
            }
        }
        if (at < HEAD_DIM) *reinterpret_cast<uint4*>(head + at) = bits;
        __syncwarp();
        int half = turns ? common.rotation.half : 0, first = number * HEAD_DIM;
        for (int j = lane; j < half; j += WARP) {
            storage_t a = head[j], b = head[j + half];
            rotate_pair(common, row, j, a, b);
            place(op, common, row, first + j, a);
            place(op, common, row, first + j + half, b);
        }
        for (int j = 2 * half + lane; j < HEAD_DIM; j += WARP) place(op, common, row, first + j, head[j]);
        __syncwarp();  // until then the head is read
    }
}
#endif

// The blocks of attention_decode, dealt out to those that there are.
__device__ __forceinline__ void attend(const Operation& op, const Common& common, Shared& shared, Staged& staged) {
    dim3 grid = common.attention_grid;
    for (unsigned i = blockIdx.x; i < grid.x * grid.y * grid.z; i += gridDim.x) {
        if (i != blockIdx.x) __syncthreads();  // shared memory is read
        dim3 at(i % grid.x, i / grid.x % grid.y, i / (grid.x * grid.y));
        attend_block(shared, staged, at, grid, static_cast<storage_t*>(op.out), common.partials, common.arrived, op.x,
                     op.keys, op.values, common.context_lens, common.block_table, nullptr, nullptr, nullptr, common.H,
                     common.K, common.pages, common.table_width, common.max_splits, op.x_stride, op.out_stride,
                     common.window, 0, common.scale, 0.0f);
    }
}

// list: [count] operations. counter: one number, a multiple of the blocks before the launch and after it. ring_size: slots
// of a warp, each of slot_bytes; room: bytes of shared memory for x or `Staged`. Others as of fused_fma and
// attention_decode.
extern "C" __global__ __launch_bounds__(THREADS, 1) void step(
    const uint4* list, unsigned long long* counter, int count, int ring_size, int slot_bytes, int room, const int* slots,
    const int* positions, const float* frequencies, const int* text_lens, const int* query_starts, float* partials,
    int* arrived, const int* context_lens, const int* block_table, int rows, int N, int half, int original, int H, int K,
    int pages, int table_width, int max_splits, int window, int blocks_x, int blocks_y, float rotary_scale,
    float attention_scale, double factor) {
    __shared__ Shared shared;
    extern __shared__ __align__(128) unsigned char dynamic_shared[];
    unsigned char* after_rings = dynamic_shared + WARPS * ring_size * slot_bytes;
    uint4* x = reinterpret_cast<uint4*>(after_rings);
    Staged& staged = *reinterpret_cast<Staged*>(after_rings);
    uint4* operations = reinterpret_cast<uint4*>(after_rings + room);
    constexpr int PIECES_EACH = sizeof(Operation) / 16;
    mbarrier_t* full = reinterpret_cast<mbarrier_t*>(operations + count * PIECES_EACH);
    void* sums = full + WARPS * ring_size;
    for (int i = threadIdx.x; i < count * PIECES_EACH; i += THREADS) operations[i] = list[i];
    __syncthreads();

    Ring ring;
    ring.list = reinterpret_cast<const Operation*>(operations);
    ring.count = count, ring.half = half, ring.warp = threadIdx.x / WARP;
    ring.slots = dynamic_shared, ring.full = full;
    ring.size = ring_size, ring.slot_bytes = slot_bytes;
    ring.begin();
    __syncthreads();

    Common common{slots,
                  {positions, frequencies, text_lens, query_starts, N, half, original, rotary_scale, factor},
                  partials, arrived, context_lens, block_table, rows, H, K, pages, table_width, max_splits, window,
                  attention_scale, dim3(blocks_x, blocks_y, rows)};
    unsigned long long target = 0;  // of the counter, in thread 0
    if (threadIdx.x == 0) {
        target = counted(counter);
        target -= target % gridDim.x;  // others may have ended the first operation, but not all
    }
    for (int i = 0; i < count; ++i) {
        const Operation& op = ring.list[i];
        if (op.gain)
            for (int k = threadIdx.x * 8; k < op.inputs; k += THREADS * 8) prefetch(op.gain + k);
        if (i > 0) {
            Watchdog watchdog;
            if (threadIdx.x == 0) {
                target += gridDim.x;
                while (counted(counter) < target) watchdog.look();
            }
            __syncthreads();
        }
        if (op.kind == ATTENTION)
            attend(op, common, shared, staged);
#if HEAD_NORMS
        else if (op.kind == HEADS)
            store_heads(op, common, reinterpret_cast<storage_t*>(x));
#endif
        else
            multiply(op, common, ring, x, sums);
        if (i + 1 < count) {
            __syncthreads();
            if (threadIdx.x == 0) count_in(counter);
        }
    }
}
