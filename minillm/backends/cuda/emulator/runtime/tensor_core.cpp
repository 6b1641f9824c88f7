// mma, ldmatrix and cp.async, after the tables of the PTX manual that kernels/cuda/tensor_core.cuh names.
#include "scheduler.h"

#include "faults.h"
#include "numbers.h"
#include "races.h"

#include <cstdint>
#include <cstring>

namespace emulation {

namespace {

bool aligned(const void* address) { return reinterpret_cast<uintptr_t>(address) % 16 == 0; }

struct Mma {
    float* d;
    const unsigned *a, *b;
    bool is_bfloat16;
};

struct Ldmatrix {
    unsigned* result;
    const void* row;
    bool transposed;
};

void complete_mma(unsigned mask, void* const operands[32]) {
    if (mask != 0xffffffffu) fail(meeting_place(), "mma.sync needs all lanes of the warp");
    bool is_bfloat16 = static_cast<Mma*>(operands[0])->is_bfloat16;
    float a[16][16], b[8][16];  // b by columns
    for (int lane = 0; lane < 32; lane++) {
        auto* mine = static_cast<Mma*>(operands[lane]);
        int g = lane / 4, t = lane % 4;
        for (int i = 0; i < 8; i++) {
            uint16_t x = mine->a[i / 2] >> (i % 2 * 16);
            a[g + (i / 2 % 2) * 8][2 * t + i % 2 + i / 4 * 8] = is_bfloat16 ? from_bfloat16(x) : from_half(x);
        }
        for (int i = 0; i < 4; i++) {
            uint16_t x = mine->b[i / 2] >> (i % 2 * 16);
            b[g][2 * t + i % 2 + i / 2 * 8] = is_bfloat16 ? from_bfloat16(x) : from_half(x);
        }
    }
    for (int lane = 0; lane < 32; lane++) {
        float* d = static_cast<Mma*>(operands[lane])->d;
        int g = lane / 4, t = lane % 4;
        for (int i = 0; i < 4; i++) {
            const float *row = a[g + i / 2 * 8], *column = b[2 * t + i % 2];
            float sum = 0;
            for (int k = 0; k < 16; k++) sum += row[k] * column[k];
            d[i] += sum;
        }
    }
}

void complete_ldmatrix(unsigned mask, void* const operands[32]) {
    if (mask != 0xffffffffu) fail(meeting_place(), "ldmatrix needs all lanes of the warp");
    for (int lane = 0; lane < 32; lane++) {
        auto* mine = static_cast<Ldmatrix*>(operands[lane]);
        for (int tile = 0; tile < 4; tile++) {
            uint16_t pair[2];
            for (int i = 0; i < 2; i++) {
                int row = mine->transposed ? lane % 4 * 2 + i : lane / 4;
                int column = mine->transposed ? lane / 4 : lane % 4 * 2 + i;
                auto* from = static_cast<const uint16_t*>(static_cast<Ldmatrix*>(operands[tile * 8 + row])->row);
                pair[i] = from[column];
            }
            mine->result[tile] = pair[0] | uint32_t(pair[1]) << 16;
        }
    }
}

}  // namespace

void multiply_tiles(float* d, const unsigned* a, const unsigned* b, bool is_bfloat16, Place place) {
    Mma operand{d, a, b, is_bfloat16};
    meet(0xffffffffu, complete_mma, &operand, place);
}

void load_tiles(unsigned* result, const void* row, bool transposed, Place place) {
    if (!aligned(row)) fail_at(describe_instruction(EMULATED_CALLER), "a row of ldmatrix is not aligned to 16 bytes");
    if (!in_shared_memory(row)) fail_at(describe_instruction(EMULATED_CALLER), "a row of ldmatrix is not in shared memory");
    note_access(row, 16, READ, EMULATED_CALLER);
    Ldmatrix operand{result, row, transposed};
    meet(0xffffffffu, complete_ldmatrix, &operand, place);
}

void begin_copy(void* shared, const void* global, int bytes, int valid) {
    const void* instruction = EMULATED_CALLER;
    if (!aligned(shared) || (valid > 0 && !aligned(global)))
        fail_at(describe_instruction(instruction), "cp.async of %d bytes from an address that is not aligned to 16 bytes, or to one",
                bytes);
    if (!in_shared_memory(shared)) fail_at(describe_instruction(instruction), "cp.async goes elsewhere than to shared memory");
    note_access(global, valid, READ, instruction);
    note_access(shared, bytes, WRITE, instruction);
    note_copy_begun(shared, bytes);
    memset(shared, 0xff, bytes);
    Fiber& fiber = self();
    fiber.copies.push_back({shared, global, bytes, valid, fiber.group, instruction});
}

void commit_copies() { self().group++; }

void wait_copies(int groups_left) {
    Fiber& fiber = self();
    size_t kept = 0;
    for (const Copy& copy : fiber.copies) {
        if (copy.group < fiber.group - groups_left) {
            note_copy_done(copy.to, copy.bytes);
            note_access(copy.to, copy.bytes, WRITE, copy.instruction);
            memcpy(copy.to, copy.from, copy.valid);
            memset(static_cast<char*>(copy.to) + copy.valid, 0, copy.bytes - copy.valid);
        } else {
            fiber.copies[kept++] = copy;
        }
    }
    fiber.copies.resize(kept);
}

}  // namespace emulation
