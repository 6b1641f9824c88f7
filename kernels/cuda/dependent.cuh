// Programmatic dependent launch: a kernel of a recorded step begins while the one before it still runs (CUDA Programming
// Guide, "Programmatic Dependent Launch and Synchronization"). The launch and what comes before the first wait, such as
// bringing weights to L2, then cost no time of their own.
//
// Each kernel says when the next may be launched, which is at once, and waits for those before it. A kernel that has
// waited is after all of them, and not only after the last: that one waited before it ended. Before the wait a kernel
// may read only what no kernel of a step writes, the parameters, and may write nothing.
//
// Compiled in with -DDEPENDENT=1, for sm_90 and later. This file, tensor_core.cuh, wgmma.cuh, cooperative.cuh and tma.cuh hold all
// PTX there is; the emulator's body notes the wait, and its checks refuse what comes too early.
#pragma once

#ifndef DEPENDENT
#define DEPENDENT 0
#endif

// Let the next kernel be launched as soon as all blocks of this one have come here, or have ended.
__device__ __forceinline__ void launch_dependents() {
#if DEPENDENT && !defined(MINILLM_EMULATED)
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Wait until the kernels before this one have ended and their writes are visible. Every thread must call it.
__device__ __forceinline__ void wait_for_results() {
#if DEPENDENT
#ifdef MINILLM_EMULATED
    emulated_wait_for_results();
#else
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
#endif
}

// Both, for a kernel with nothing to do in between.
__device__ __forceinline__ void follow() {
    launch_dependents();
    wait_for_results();
}
