// Stacks, and how a fiber begins.
#include "fiber.h"

#include <cstdint>
#include <sys/mman.h>

namespace emulation {

char* allocate_stacks(int number) {
    constexpr size_t stride = STACK_BYTES + GUARD_BYTES;
    void* memory = mmap(nullptr, number * stride, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) return nullptr;
    char* first = static_cast<char*>(memory);
    for (int i = 0; i < number; i++) mprotect(first + i * stride, GUARD_BYTES, PROT_NONE);
    return first + GUARD_BYTES;
}

#ifdef EMULATED_UCONTEXT

void prepare(Context& context, char* stack, int, void (*entry)()) {
    getcontext(&context.context);
    context.context.uc_stack.ss_sp = stack;
    context.context.uc_stack.ss_size = STACK_BYTES;
    context.context.uc_link = nullptr;
    makecontext(&context.context, entry, 0);
}

#else

// Keep what a called function must preserve, leave the stack, and take up the other one the same way.
asm(R"(
.text
.globl emulated_switch_stacks
.hidden emulated_switch_stacks
.type emulated_switch_stacks, @function
emulated_switch_stacks:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size emulated_switch_stacks, .-emulated_switch_stacks
)");

void prepare(Context& context, char* stack, int number, void (*entry)()) {
    // Tops at the same offset of a page would all fall into the same few sets of the L1 cache.
    size_t colour = size_t(number) * 192 % 4096;
    auto** top = reinterpret_cast<void**>(stack + STACK_BYTES - 64 - colour);
    *--top = nullptr;  // the return address of `entry`, for the alignment the ABI asks for
    *--top = reinterpret_cast<void*>(entry);
    for (int i = 0; i < 6; i++) *--top = nullptr;  // the six registers
    context.stack_pointer = top;
}

#endif

}  // namespace emulation
