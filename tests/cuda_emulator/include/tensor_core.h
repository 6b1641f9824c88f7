// The host bodies of kernels/cuda/tensor_core.cuh.
#pragma once

inline void emulated_mma_16816(float d[4], const unsigned a[4], const unsigned b[2], bool is_bfloat16, EMULATED_PLACE) {
    emulation::multiply_tiles(d, a, b, is_bfloat16, {file, line});
}

inline void emulated_ldmatrix_x4(unsigned r[4], const void* row, bool transposed, EMULATED_PLACE) {
    emulation::load_tiles(r, row, transposed, {file, line});
}

inline void emulated_cp_async(void* shared, const void* global, int bytes, int valid_bytes) {
    emulation::begin_copy(shared, global, bytes, valid_bytes);
}
inline void emulated_cp_async_commit() { emulation::commit_copies(); }
inline void emulated_cp_async_wait(int groups) { emulation::wait_copies(groups); }
