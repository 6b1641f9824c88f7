// The host bodies of kernels/cuda/tensor_core.cuh, wgmma.cuh and dependent.cuh.
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

inline unsigned emulated_shared_address(const void* address) { return emulation::shared_address(address); }
inline void emulated_wgmma(float* sums, int columns, uint64_t a, uint64_t b, bool is_bfloat16, EMULATED_PLACE) {
    emulation::issue_product(sums, columns, a, b, is_bfloat16, {file, line});
}
inline void emulated_wgmma_fence(EMULATED_PLACE) { emulation::fence_products({file, line}); }
inline void emulated_wgmma_commit(EMULATED_PLACE) { emulation::commit_products({file, line}); }
inline void emulated_wgmma_wait(int groups, EMULATED_PLACE) { emulation::wait_products(groups, {file, line}); }
inline void emulated_fence_proxy_async() { emulation::fence_writes(); }
inline void emulated_wait_for_results() { emulation::wait_for_results(); }
