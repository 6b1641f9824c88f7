// Heads copied elsewhere: sorted by head for the products of latent attention, and back by token.
//
//     out[t, h, :width] = x[t, h, :width]                     # both with any strides
//
// Between two copies the matrices of all heads multiply their rows as experts do (experts_fma, experts_mma of gemv_experts.cu).
//
// Grid: (T, H); block: up to 256 threads, a number each.
// Moved: 2 T H width numbers. Floor: a launch; of DeepSeek-V2-Lite (16 heads of 128 and 512 numbers) in 16 bits, a prompt
// of 2,000 tokens, 8 and 33 MB each way: 4 and 16 us at 4.3 TB/s.
//
// Versions:
//   1. this one: three copies around two products of a layer. Run on the emulator, not measured. Products that read and
//      write heads where they lie would save them.
#include "rows.cuh"

// x, out: numbers from token to token, and from head to head.
extern "C" __global__ void move_heads(storage_t* out, const storage_t* x, int width, int out_stride, int out_head_stride,
                                      int x_stride, int x_head_stride) {
    follow();
    storage_t* to = out + (long long)blockIdx.x * out_stride + (long long)blockIdx.y * out_head_stride;
    const storage_t* from = x + (long long)blockIdx.x * x_stride + (long long)blockIdx.y * x_head_stride;
    for (int i = threadIdx.x; i < width; i += blockDim.x) to[i] = from[i];
}
