// Shuffles, votes and reductions over a warp.
#pragma once

namespace emulation {

template <class T>
struct Shuffle {
    T value;
    int source;
    T result;
};

template <class T>
void complete_shuffle(unsigned mask, void* const operands[32]) {
    for (int lane = 0; lane < 32; lane++) {
        if (!(mask >> lane & 1)) continue;
        auto* mine = static_cast<Shuffle<T>*>(operands[lane]);
        if (mask >> mine->source & 1)
            mine->result = static_cast<Shuffle<T>*>(operands[mine->source])->value;
        else
            memset((void*)&mine->result, 0xff, sizeof(T));  // from a lane that does not take part: undefined
    }
}

template <class T>
T shuffle(unsigned mask, T value, int source, Place place) {
    Shuffle<T> operand{value, source, value};
    meet(mask, complete_shuffle<T>, &operand, place);
    return operand.result;
}

struct Ballot {
    int predicate;
    unsigned result;
};

inline void complete_ballot(unsigned mask, void* const operands[32]) {
    unsigned votes = 0;
    for (int lane = 0; lane < 32; lane++)
        if (mask >> lane & 1 && static_cast<Ballot*>(operands[lane])->predicate) votes |= 1u << lane;
    for (int lane = 0; lane < 32; lane++)
        if (mask >> lane & 1) static_cast<Ballot*>(operands[lane])->result = votes;
}

inline unsigned ballot(unsigned mask, int predicate, Place place) {
    Ballot operand{predicate, 0};
    meet(mask, complete_ballot, &operand, place);
    return operand.result;
}

template <class T, class Operation>
void complete_reduce(unsigned mask, void* const operands[32]) {
    T result = *static_cast<T*>(operands[__builtin_ctz(mask)]);
    for (int lane = __builtin_ctz(mask) + 1; lane < 32; lane++)
        if (mask >> lane & 1) result = Operation()(result, *static_cast<T*>(operands[lane]));
    for (int lane = 0; lane < 32; lane++)
        if (mask >> lane & 1) *static_cast<T*>(operands[lane]) = result;
}

}  // namespace emulation

inline void __syncwarp(unsigned mask = 0xffffffffu, EMULATED_PLACE) {
    emulation::meet(mask, nullptr, nullptr, {file, line});
}

// In each of these a warp is cut into groups of `width` lanes; a lane that would read beyond its group reads itself.
template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, EMULATED_PLACE) {
    int lane = emulation::current->lane;
    return emulation::shuffle(mask, value, (lane & ~(width - 1)) | (source & (width - 1)), {file, line});
}

template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32, EMULATED_PLACE) {
    int lane = emulation::current->lane, source = lane ^ lane_mask;
    if ((source & ~(width - 1)) > (lane & ~(width - 1)) || source > 31) source = lane;
    return emulation::shuffle(mask, value, source, {file, line});
}

template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, EMULATED_PLACE) {
    int lane = emulation::current->lane, source = lane + (int)delta;
    if (source >= (lane & ~(width - 1)) + width) source = lane;
    return emulation::shuffle(mask, value, source, {file, line});
}

template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, EMULATED_PLACE) {
    int lane = emulation::current->lane, source = lane - (int)delta;
    if (source < (lane & ~(width - 1))) source = lane;
    return emulation::shuffle(mask, value, source, {file, line});
}

inline unsigned __ballot_sync(unsigned mask, int predicate, EMULATED_PLACE) {
    return emulation::ballot(mask, predicate, {file, line});
}
inline int __any_sync(unsigned mask, int predicate, EMULATED_PLACE) {
    return emulation::ballot(mask, predicate, {file, line}) != 0;
}
inline int __all_sync(unsigned mask, int predicate, EMULATED_PLACE) {
    return emulation::ballot(mask, !predicate, {file, line}) == 0;
}

// sm_80 and newer reduce 32-bit integers over a warp in one instruction.
#define EMULATED_REDUCE(name, type, operation)                                                  \
    inline type name(unsigned mask, type value, EMULATED_PLACE) {                               \
        struct Operation {                                                                      \
            type operator()(type a, type b) { return operation; }                               \
        };                                                                                      \
        emulation::meet(mask, emulation::complete_reduce<type, Operation>, &value, {file, line}); \
        return value;                                                                           \
    }
EMULATED_REDUCE(__reduce_add_sync, int, int(unsigned(a) + unsigned(b)))
EMULATED_REDUCE(__reduce_add_sync, unsigned, a + b)
EMULATED_REDUCE(__reduce_min_sync, int, a < b ? a : b)
EMULATED_REDUCE(__reduce_min_sync, unsigned, a < b ? a : b)
EMULATED_REDUCE(__reduce_max_sync, int, a > b ? a : b)
EMULATED_REDUCE(__reduce_max_sync, unsigned, a > b ? a : b)
EMULATED_REDUCE(__reduce_and_sync, unsigned, a& b)
EMULATED_REDUCE(__reduce_or_sync, unsigned, a | b)
EMULATED_REDUCE(__reduce_xor_sync, unsigned, a ^ b)
