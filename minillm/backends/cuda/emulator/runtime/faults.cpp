// Memory that a kernel must not touch: the signal ends the launch with a message instead of the process.
//
// The kernel's instruction is given as `file.so+0xoffset`; Python looks its line up (lines.py).
#include "faults.h"

#include "scheduler.h"

#include <csignal>
#include <cstdint>
#include <cstdio>
#include <dlfcn.h>
#include <ucontext.h>

namespace emulation {

namespace {

constexpr int SIGNALS[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
struct sigaction before[4];
stack_t stack_before;
alignas(16) char signal_stack[64 * 1024];

bool is_stack_guard(uintptr_t address) {
    auto first = reinterpret_cast<uintptr_t>(block->stacks) - GUARD_BYTES;
    constexpr size_t stride = STACK_BYTES + GUARD_BYTES;
    return address >= first && address < first + 1024 * stride && (address - first) % stride < GUARD_BYTES;
}

void handle(int signal, siginfo_t* info, void* context) {
    const auto& registers = static_cast<ucontext_t*>(context)->uc_mcontext;
#ifdef __x86_64__
    auto* instruction = reinterpret_cast<void*>(registers.gregs[REG_RIP]);
    const char* verb = registers.gregs[REG_ERR] & 2 ? "writes to" : "reads";
#else
    auto* instruction = reinterpret_cast<void*>(registers.pc);
    const char* verb = "touches";
#endif
    if (!current) {  // not a kernel's doing: as if we had never been here
        restore_signals();
        return;
    }
    Text where = describe_instruction(instruction);
    if (signal == SIGFPE) fail_at(where, "integer division by zero");
    if (signal == SIGILL) fail_at(where, "illegal instruction");
    if (is_stack_guard(reinterpret_cast<uintptr_t>(info->si_addr))) fail_at(where, "a thread's stack is full (64 KiB)");
    fail_at(where, "the kernel %s <%p>", verb, info->si_addr);
}

}  // namespace

Text describe_instruction(const void* instruction) {
    Text text;
    Dl_info module{};
    if (dladdr(instruction, &module) && module.dli_fname)
        snprintf(text.characters, sizeof text.characters, "%s+0x%zx", module.dli_fname,
                 size_t(static_cast<const char*>(instruction) - static_cast<const char*>(module.dli_fbase)));
    else
        snprintf(text.characters, sizeof text.characters, "%p", instruction);
    return text;
}

void catch_signals() {
    stack_t stack{};
    stack.ss_sp = signal_stack;
    stack.ss_size = sizeof signal_stack;
    sigaltstack(&stack, &stack_before);
    struct sigaction action {};
    action.sa_sigaction = handle;
    // The handler leaves by switching to another stack and never returns, so nothing may stay blocked.
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    for (int i = 0; i < 4; i++) sigaction(SIGNALS[i], &action, &before[i]);
}

void restore_signals() {
    for (int i = 0; i < 4; i++) sigaction(SIGNALS[i], &before[i], nullptr);
    sigaltstack(&stack_before, nullptr);
}

}  // namespace emulation
