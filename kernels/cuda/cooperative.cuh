// What a kernel needs whose blocks run together and wait for each other: counters in device memory, a clock, and copies
// that a block begins long before it reads them.
//
// One of the five files with PTX. The emulator's bodies (`emulated_*`) follow the sections of the PTX manual on mbarrier,
// cp.async.bulk, red, ld (.acquire) and %globaltimer. Of sm_90 and later.
#pragma once

#include "common.cuh"

// An mbarrier in shared memory: its phase ends with so many arrivals, one unless said, and all the bytes that are
// expected. Phases have the parities 0, 1, 0 ...
using mbarrier_t = unsigned long long;

#ifndef MINILLM_EMULATED
__device__ __forceinline__ unsigned shared_address(const void* pointer) {
    return (unsigned)__cvta_generic_to_shared(pointer);
}
#endif

// Before anybody uses it; a barrier of those who do must follow.
__device__ __forceinline__ void mbarrier_init(mbarrier_t* barrier, int arrivals = 1) {
#ifdef MINILLM_EMULATED
    emulated_mbarrier_init(barrier, arrivals);
#else
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");  // bulk copies see it, by their own way
#endif
}

// Arrive at the barrier for this phase, which ends when so many bytes have been copied; some may have come already. By one
// thread.
__device__ __forceinline__ void mbarrier_expect(mbarrier_t* barrier, int bytes) {
#ifdef MINILLM_EMULATED
    emulated_mbarrier_expect(barrier, bytes);
#else
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
#endif
}

// Copy `bytes` (16 and multiples; addresses likewise) from device to shared memory, as a part of those that the phase
// expects. Those who read `shared` before must have met this thread since.
__device__ __forceinline__ void bulk_copy(void* shared, const void* global, int bytes, mbarrier_t* barrier) {
#ifdef MINILLM_EMULATED
    emulated_bulk_copy(shared, global, bytes, barrier);
#else
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(shared)),
                 "l"(global), "r"(bytes), "r"(shared_address(barrier))
                 : "memory");
#endif
}

// Whether the phase of this parity is complete; then what was copied in it is visible to this thread.
__device__ __forceinline__ bool mbarrier_completed(mbarrier_t* barrier, unsigned parity) {
#ifdef MINILLM_EMULATED
    return emulated_mbarrier_completed(barrier, parity);
#else
    unsigned completed;
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
        : "=r"(completed)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
    return completed != 0;
#endif
}

// Count this block in. What its threads wrote before a __syncthreads is visible to whoever reads the sum.
__device__ __forceinline__ void count_in(unsigned long long* counter) {
#ifdef MINILLM_EMULATED
    atomicAdd(counter, 1ull);
#else
    asm volatile("red.release.gpu.global.add.u64 [%0], 1;" ::"l"(counter) : "memory");
#endif
}

// The sum; with it what those counted in have written is visible to this thread, and after a __syncthreads to its block.
__device__ __forceinline__ unsigned long long counted(const unsigned long long* counter) {
#ifdef MINILLM_EMULATED
    return emulated_load_acquire(counter);
#else
    unsigned long long sum;
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(sum) : "l"(counter) : "memory");
    return sum;
#endif
}

__device__ __forceinline__ unsigned long long nanoseconds() {
#ifdef MINILLM_EMULATED
    return emulated_nanoseconds();
#else
    unsigned long long now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)::"memory");
    return now;
#endif
}

// Ends the kernel, and with it the process's use of the GPU, where a wait takes longer than MOST_NANOSECONDS: a fault is
// an error then, and not a machine that hangs. The clock is read in every 256th look only.
#ifdef MINILLM_EMULATED
constexpr unsigned long long MOST_NANOSECONDS = 200 * 1000 * 1000;
#else
constexpr unsigned long long MOST_NANOSECONDS = 2000ull * 1000 * 1000;  // others of the GPU may have its time meanwhile
#endif

struct Watchdog {
    unsigned looks = 0;
    unsigned long long began = 0;

    __device__ __forceinline__ void look() {
        if (++looks % 256) return;
        unsigned long long now = nanoseconds();
        if (began == 0) began = now;
        if (now - began > MOST_NANOSECONDS) __trap();
    }
};
