// Atomic operations. One thread runs at a time and none is interrupted, so each is a plain read and write.
//
// With races looked for, the plain read and write are hidden, and the atomic operation is noted instead.
//
// Only the types that CUDA has are here: atomicAdd of a signed 64-bit number, say, does not compile here either.
#pragma once

#ifdef __SANITIZE_THREAD__
#define EMULATED_NOTE_ATOMIC(address) emulation::note_atomic(address, sizeof *(address))
#else
#define EMULATED_NOTE_ATOMIC(address) ((void)0)
#endif
#define EMULATED_UNSEEN inline __attribute__((no_sanitize("thread")))

#define EMULATED_ATOMIC(name, type, operation)             \
    EMULATED_UNSEEN type name(type* address, type value) { \
        EMULATED_NOTE_ATOMIC(address);                     \
        type old = *address;                               \
        *address = operation;                              \
        return old;                                        \
    }
#define EMULATED_ATOMIC_INTEGERS(name, operation)      \
    EMULATED_ATOMIC(name, int, operation)              \
    EMULATED_ATOMIC(name, unsigned, operation)         \
    EMULATED_ATOMIC(name, unsigned long long, operation)

EMULATED_ATOMIC(atomicAdd, int, int(unsigned(old) + unsigned(value)))
EMULATED_ATOMIC(atomicAdd, unsigned, old + value)
EMULATED_ATOMIC(atomicAdd, unsigned long long, old + value)
EMULATED_ATOMIC(atomicAdd, float, old + value)
EMULATED_ATOMIC(atomicAdd, double, old + value)
EMULATED_ATOMIC(atomicSub, int, int(unsigned(old) - unsigned(value)))
EMULATED_ATOMIC(atomicSub, unsigned, old - value)
EMULATED_ATOMIC_INTEGERS(atomicMax, value > old ? value : old)
EMULATED_ATOMIC(atomicMax, long long, value > old ? value : old)
EMULATED_ATOMIC_INTEGERS(atomicMin, value < old ? value : old)
EMULATED_ATOMIC(atomicMin, long long, value < old ? value : old)
EMULATED_ATOMIC_INTEGERS(atomicAnd, old& value)
EMULATED_ATOMIC_INTEGERS(atomicOr, old | value)
EMULATED_ATOMIC_INTEGERS(atomicXor, old ^ value)
EMULATED_ATOMIC_INTEGERS(atomicExch, value)
EMULATED_ATOMIC(atomicExch, float, value)
EMULATED_ATOMIC(atomicInc, unsigned, old >= value ? 0 : old + 1)
EMULATED_ATOMIC(atomicDec, unsigned, old == 0 || old > value ? value : old - 1)

#define EMULATED_COMPARE_AND_SWAP(type)                                       \
    EMULATED_UNSEEN type atomicCAS(type* address, type compare, type value) { \
        EMULATED_NOTE_ATOMIC(address);                                        \
        type old = *address;                                                  \
        if (old == compare) *address = value;                                 \
        return old;                                                           \
    }
EMULATED_COMPARE_AND_SWAP(int)
EMULATED_COMPARE_AND_SWAP(unsigned)
EMULATED_COMPARE_AND_SWAP(unsigned long long)
EMULATED_COMPARE_AND_SWAP(unsigned short)
