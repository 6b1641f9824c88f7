// Ending a launch from places that know an instruction, not a line.
#pragma once

namespace emulation {

struct Text {
    char characters[512];
};

// `file.so+0xoffset` of an instruction.
Text describe_instruction(const void* instruction);

[[noreturn]] void fail_at(const Text& where, const char* format, ...);

// While a launch runs, its faults are ours.
void catch_signals();
void restore_signals();

}  // namespace emulation
