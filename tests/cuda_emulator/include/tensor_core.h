// The host bodies of kernels/tensor_core.cuh.
#pragma once

inline void emulated_mma_16816(float d[4], const unsigned a[4], const unsigned b[2], bool is_bfloat16, EMULATED_PLACE) {
    emulation::Mma operand{d, a, b, is_bfloat16};
    emulation::meet(0xffffffffu, emulation::complete_mma, &operand, {file, line});
}

inline void emulated_ldmatrix_x4(unsigned r[4], const void* row, bool transposed, EMULATED_PLACE) {
    emulation::Ldmatrix operand{r, row, transposed, {file, line}};
    emulation::meet(0xffffffffu, emulation::complete_ldmatrix, &operand, {file, line});
}

inline void emulated_cp_async(void* shared, const void* global, int bytes, int valid_bytes, EMULATED_PLACE) {
    emulation::begin_copy(shared, global, bytes, valid_bytes, {file, line});
}
inline void emulated_cp_async_commit() { emulation::commit_copies(); }
inline void emulated_cp_async_wait(int groups) { emulation::wait_copies(groups); }
