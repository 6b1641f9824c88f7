// What -fsanitize=bounds,alignment,... calls: the kernel does what C++ leaves undefined, and a GPU does otherwise.
//
// The names and the layout of the first argument are those of libubsan, which is not needed here.
#include "scheduler.h"

#include <cstdint>

namespace {

struct Location {
    const char* file;
    uint32_t line, column;
};

struct TypeMismatch {
    Location location;
    const void* type;
    unsigned char log_alignment, check_kind;
};

[[noreturn]] void refuse(const void* data, const char* what) {
    auto* location = static_cast<const Location*>(data);
    emulation::fail({location->file, int(location->line)}, "%s", what);
}

}  // namespace

extern "C" {

EMULATED_API void __ubsan_handle_type_mismatch_v1(const TypeMismatch* data, uintptr_t address) {
    unsigned alignment = 1u << data->log_alignment;
    if (address % alignment == 0) return;  // no other kind of mismatch is asked for
    emulation::fail({data->location.file, int(data->location.line)}, "address <%p> is not aligned to %u bytes",
                    reinterpret_cast<void*>(address), alignment);
}
EMULATED_API void __ubsan_handle_out_of_bounds(const void* data, uintptr_t index) {
    auto* location = static_cast<const Location*>(data);
    emulation::fail({location->file, int(location->line)}, "index %lld is outside the array", (long long)index);
}
EMULATED_API void __ubsan_handle_shift_out_of_bounds(const void* data, uintptr_t, uintptr_t) {
    refuse(data, "a shift by more bits than the number has");
}
EMULATED_API void __ubsan_handle_add_overflow(const void* data, uintptr_t, uintptr_t) { refuse(data, "+ overflows"); }
EMULATED_API void __ubsan_handle_sub_overflow(const void* data, uintptr_t, uintptr_t) { refuse(data, "- overflows"); }
EMULATED_API void __ubsan_handle_mul_overflow(const void* data, uintptr_t, uintptr_t) { refuse(data, "* overflows"); }
EMULATED_API void __ubsan_handle_negate_overflow(const void* data, uintptr_t) { refuse(data, "- overflows"); }
EMULATED_API void __ubsan_handle_divrem_overflow(const void* data, uintptr_t, uintptr_t) {
    refuse(data, "division by zero, or a quotient that overflows");
}
}
