// Fibers: one stack for each CUDA thread, and a switch from one to another that takes a few nanoseconds.
#pragma once

#include <cstddef>

#ifndef __x86_64__
#define EMULATED_UCONTEXT
#endif
#ifdef EMULATED_UCONTEXT
#include <ucontext.h>
#endif

namespace emulation {

constexpr size_t STACK_BYTES = 64 * 1024;
constexpr size_t GUARD_BYTES = 4096;  // below each stack, not accessible: an overflow is caught (faults.cpp)

// Where a suspended computation goes on.
struct Context {
#ifdef EMULATED_UCONTEXT
    ucontext_t context;
#else
    void* stack_pointer;
#endif
};

// `number` stacks of STACK_BYTES, lowest address of the first; each has its guard below.
char* allocate_stacks(int number);

// Make `context` start with `entry()`, which never returns, on the stack at `stack`.
void prepare(Context& context, char* stack, int number, void (*entry)());

#ifdef EMULATED_UCONTEXT
inline void switch_context(Context& from, Context& to) { swapcontext(&from.context, &to.context); }
#else
extern "C" void emulated_switch_stacks(void** save, void* load);
inline void switch_context(Context& from, Context& to) {
    emulated_switch_stacks(&from.stack_pointer, to.stack_pointer);
}
#endif

}  // namespace emulation
