// What philox.cuh gives, stored, so that a test can hold it against NumPy.
#include "../../../kernels/cuda/philox.cuh"

extern "C" __global__ void words(unsigned* out, const unsigned* counters, const unsigned* keys) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    unsigned counter[4], key[2] = {keys[2 * i], keys[2 * i + 1]};
    for (int j = 0; j < 4; j++) counter[j] = counters[4 * i + j];
    philox4x32(counter, key);
    for (int j = 0; j < 4; j++) out[4 * i + j] = counter[j];
}

extern "C" __global__ void uniforms(unsigned* out, const unsigned long long* seeds, const unsigned* sequences,
                                    const unsigned* positions, const unsigned* purposes) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    out[i] = uniform_24(seeds[i], sequences[i], positions[i], purposes[i]);
}
