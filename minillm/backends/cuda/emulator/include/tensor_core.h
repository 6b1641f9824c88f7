// The host bodies of kernels/cuda/tensor_core.cuh, wgmma.cuh, dependent.cuh, cooperative.cuh and tma.cuh.
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
inline void emulated_wgmma_registers(float* sums, int columns, const unsigned* a, uint64_t b, bool by_columns,
                                     bool is_bfloat16, EMULATED_PLACE) {
    emulation::issue_product_of_registers(sums, columns, a, b, by_columns, is_bfloat16, {file, line});
}
inline void emulated_wgmma_fence(EMULATED_PLACE) { emulation::fence_products({file, line}); }
inline void emulated_wgmma_commit(EMULATED_PLACE) { emulation::commit_products({file, line}); }
inline void emulated_wgmma_wait(int groups, EMULATED_PLACE) { emulation::wait_products(groups, {file, line}); }
inline void emulated_fence_proxy_async() { emulation::fence_writes(); }
inline void emulated_mbarrier_init(void* barrier, int count, EMULATED_PLACE) {
    emulation::init_mbarrier(barrier, count, {file, line});
}
inline void emulated_mbarrier_expect(void* barrier, int bytes, EMULATED_PLACE) {
    emulation::expect_bytes(barrier, bytes, {file, line});
}
inline void emulated_bulk_copy(void* shared, const void* global, int bytes, void* barrier, EMULATED_PLACE) {
    emulation::copy_bulk(shared, global, bytes, barrier, {file, line});
}
inline bool emulated_mbarrier_completed(void* barrier, unsigned parity, EMULATED_PLACE) {
    return emulation::phase_completed(barrier, parity, {file, line});
}
inline void emulated_mbarrier_arrive(void* barrier, int rank, EMULATED_PLACE) {
    emulation::arrive(barrier, rank, {file, line});
}
inline void emulated_tensor_copy(void* shared, const void* map, const int* at, int dimensions, void* barrier,
                                 unsigned blocks, EMULATED_PLACE) {
    emulation::copy_tensor(shared, map, at, dimensions, barrier, blocks, {file, line});
}
inline int emulated_cluster_rank() { return emulation::cluster_rank(); }
inline void emulated_cluster_sync(EMULATED_PLACE) { emulation::cluster_barrier({file, line}); }
inline unsigned long long emulated_nanoseconds() { return emulation::nanoseconds(); }
// Of a counter that other blocks add to; other threads and blocks run first.
EMULATED_UNSEEN unsigned long long emulated_load_acquire(const unsigned long long* address, EMULATED_PLACE) {
    emulation::pause({file, line});
    EMULATED_NOTE_ATOMIC(address);
    return *address;
}
inline void emulated_wait_for_results() { emulation::wait_for_results(); }
