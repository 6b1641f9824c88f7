// wgmma: products of a warpgroup, after the sections of the PTX manual that kernels/cuda/wgmma.cuh names.
//
// A product is done as late as the program allows, when it is waited for: until then its sums hold NaN, and whoever
// writes to the shared memory that it reads is stopped. Each warp computes its own 16 of the 64 rows; that the four
// warps of a group have issued the same products is checked when the block ends.
#include "scheduler.h"

#include "faults.h"
#include "numbers.h"
#include "races.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <map>
#include <vector>

namespace emulation {

namespace {

constexpr int DEPTH = 16, ROWS = 16;  // of k, and of A in one warp
constexpr unsigned ALL = 0xffffffffu;

struct Operand {
    float* sums;
    int columns;
    const unsigned* registers;  // of A, or null where it lies in shared memory
    uint64_t a, b;
    bool transposed;  // B lies by columns
    bool is_bfloat16;
    const void* instruction;
};

struct Product {
    int columns;
    const unsigned* registers[32];
    unsigned numbers[32][4];  // what they held
    uint64_t a, b;
    bool transposed, is_bfloat16;
    int group;
    size_t sums;  // index of its Sums
    const void* instruction;
};

// Registers that products under way add to: what they held before and what is added since.
struct Sums {
    float* registers[32];
    std::vector<float> values[32];
    int pending;
};

struct Warpgroup {
    std::vector<Product> products;
    std::vector<Sums> sums;
    int group = 0;
    bool fenced = false;
    uint64_t issued = 0;  // a hash of all products so far
};

std::map<const Block*, std::vector<Warpgroup>> warps;  // of each block that runs

Warpgroup& mine() { return warps[block][self().warp]; }

// The 16 bytes of k = 8 `half` ... of a row, as a matrix descriptor says: swizzled by 128 bytes.
const uint16_t* piece(uint64_t descriptor, int row, int half) {
    uint32_t start = (descriptor & 0x3fff) << 4, stride = (descriptor >> 32 & 0x3fff) << 4;
    uint32_t linear = start + row / 8 * stride + row % 8 * 128 + half * 16;
    return static_cast<const uint16_t*>(shared_memory_at(linear ^ (linear >> 7 & 7) << 4));
}

// The 16 bytes of columns 8 `part` ... of row k of B by columns: blocks of 64 columns lie as far apart as bits 16 to 29 say.
const uint16_t* transposed_piece(uint64_t descriptor, int k, int part) {
    uint32_t start = (descriptor & 0x3fff) << 4, stride = (descriptor >> 32 & 0x3fff) << 4;
    uint32_t block = (descriptor >> 16 & 0x3fff) << 4;
    uint32_t linear = start + part / 8 * block + k / 8 * stride + k % 8 * 128 + part % 8 * 16;
    return static_cast<const uint16_t*>(shared_memory_at(linear ^ (linear >> 7 & 7) << 4));
}

void check_descriptor(uint64_t descriptor, const void* instruction) {
    if (descriptor >> 62 != 1 || (descriptor >> 49 & 7))
        fail_at(describe_instruction(instruction), "this emulator has matrices with a swizzle of 128 bytes and no base offset only");
    if (descriptor << 4 & 0x380)
        fail_at(describe_instruction(instruction), "a matrix that is swizzled by 128 bytes begins at a multiple of 1024");
}

// Call `note(address)` for each 16 bytes that a warp reads.
template <class Note>
void for_each_piece(const Product& product, Note note) {
    int first = self().warp % 4 * ROWS;
    for (int half = 0; half < 2; half++) {
        for (int row = 0; row < ROWS && !product.registers[0]; row++) note(piece(product.a, first + row, half));
        for (int row = 0; row < product.columns && !product.transposed; row++) note(piece(product.b, row, half));
    }
    for (int k = 0; k < DEPTH && product.transposed; k++)
        for (int part = 0; part < product.columns / 8; part++) note(transposed_piece(product.b, k, part));
}

void complete_issue(unsigned mask, void* const operands[32]) {
    if (mask != ALL || (self().warp / 4 + 1) * 4 > block->warps.size())
        fail(meeting_place(), "wgmma needs all lanes of four warps");
    auto* first = static_cast<Operand*>(operands[0]);
    Warpgroup& warp = mine();
    if (!warp.fenced) fail(meeting_place(), "wgmma without wgmma.fence since its registers could last be used");
    if (!first->registers) check_descriptor(first->a, first->instruction);
    check_descriptor(first->b, first->instruction);
    size_t found = 0;
    while (found < warp.sums.size() && warp.sums[found].registers[0] != first->sums) found++;
    if (found == warp.sums.size()) warp.sums.push_back({});
    Sums& sums = warp.sums[found];
    Product product{};
    for (int lane = 0; lane < 32; lane++) {
        auto* own = static_cast<Operand*>(operands[lane]);
        if (own->a != first->a || own->b != first->b)
            fail(meeting_place(), "lanes of one warp name different matrices to wgmma");
        product.registers[lane] = own->registers;
        if (own->registers) std::copy_n(own->registers, 4, product.numbers[lane]);
        if (sums.pending) continue;
        sums.registers[lane] = own->sums;
        sums.values[lane].assign(own->sums, own->sums + own->columns / 2);
        std::fill_n(own->sums, own->columns / 2, std::numeric_limits<float>::quiet_NaN());
    }
    sums.pending++;
    product.columns = first->columns, product.a = first->a, product.b = first->b, product.group = warp.group;
    product.transposed = first->transposed, product.is_bfloat16 = first->is_bfloat16;
    product.sums = found, product.instruction = first->instruction;
    for_each_piece(product, [&](const void* at) {
        note_access(at, 16, READ, product.instruction);
        note_product_begins(at, 16, product.instruction);
    });
    for (uint64_t part : {product.a, product.b, uint64_t(product.columns)}) warp.issued = (warp.issued ^ part) * 0x100000001b3u;
    warp.products.push_back(product);
}

void multiply(const Product& product, Sums& sums) {
    float a[ROWS][DEPTH], b[256][DEPTH];
    auto number = [&](uint16_t bits) { return product.is_bfloat16 ? from_bfloat16(bits) : from_half(bits); };
    auto load = [&](float* to, const uint16_t* from) {
        for (int i = 0; i < 8; i++) to[i] = number(from[i]);
    };
    for (int half = 0; half < 2; half++) {
        for (int row = 0; row < ROWS && !product.registers[0]; row++)
            load(a[row] + half * 8, piece(product.a, self().warp % 4 * ROWS + row, half));
        for (int row = 0; row < product.columns && !product.transposed; row++)
            load(b[row] + half * 8, piece(product.b, row, half));
    }
    for (int k = 0; k < DEPTH && product.transposed; k++)
        for (int column = 0; column < product.columns; column++)
            b[column][k] = number(transposed_piece(product.b, k, column / 8)[column % 8]);
    for (int lane = 0; lane < 32 && product.registers[0]; lane++) {
        if (!std::equal(product.numbers[lane], product.numbers[lane] + 4, product.registers[lane]))
            fail_at(describe_instruction(product.instruction), "registers of A changed while this wgmma was under way");
        for (int i = 0; i < 8; i++) {
            int half = i / 2 % 2 * 8, k = i / 4 * 8 + lane % 4 * 2 + i % 2;
            a[lane / 4 + half][k] = number(product.numbers[lane][i / 2] >> i % 2 * 16);
        }
    }
    for (int lane = 0; lane < 32; lane++) {
        for (int i = 0; i < product.columns / 2; i++) {
            const float *row = a[lane / 4 + i / 2 % 2 * 8], *column = b[i / 4 * 8 + lane % 4 * 2 + i % 2];
            float sum = 0;
            for (int k = 0; k < DEPTH; k++) sum += row[k] * column[k];
            sums.values[lane][i] += sum;
        }
    }
}

void complete_wait(unsigned mask, void* const operands[32]) {
    if (mask != ALL) fail(meeting_place(), "wgmma.wait_group needs all lanes of the warp");
    Warpgroup& warp = mine();
    int groups_left = *static_cast<int*>(operands[0]);
    size_t kept = 0;
    for (const Product& product : warp.products) {
        if (product.group >= warp.group - groups_left) {
            warp.products[kept++] = product;
            continue;
        }
        for_each_piece(product, [&](const void* at) { note_product_ends(at, 16); });
        Sums& sums = warp.sums[product.sums];
        multiply(product, sums);
        if (--sums.pending == 0)
            for (int lane = 0; lane < 32; lane++)
                std::copy(sums.values[lane].begin(), sums.values[lane].end(), sums.registers[lane]);
    }
    warp.products.resize(kept);
    warp.fenced = false;
}

void complete_fence(unsigned, void* const[32]) { mine().fenced = true; }
void complete_commit(unsigned, void* const[32]) { mine().group++; }

}  // namespace

void issue_product(float* sums, int columns, uint64_t a, uint64_t b, bool is_bfloat16, Place place) {
    Operand operand{sums, columns, nullptr, a, b, false, is_bfloat16, EMULATED_CALLER};
    meet(ALL, complete_issue, &operand, place);
}
void issue_product_of_registers(float* sums, int columns, const unsigned* a, uint64_t b, bool by_columns,
                                bool is_bfloat16, Place place) {
    Operand operand{sums, columns, a, 0, b, by_columns, is_bfloat16, EMULATED_CALLER};
    meet(ALL, complete_issue, &operand, place);
}
void fence_products(Place place) { meet(ALL, complete_fence, nullptr, place); }
void commit_products(Place place) { meet(ALL, complete_commit, nullptr, place); }
void wait_products(int groups_left, Place place) { meet(ALL, complete_wait, &groups_left, place); }

void begin_products() { warps[block].assign(block->warps.size(), {}); }

void end_products() {
    const Warpgroup& warp = mine();
    if (!warp.products.empty())
        fail_at(describe_instruction(warp.products[0].instruction), "a thread ended with this wgmma never waited for");
    if (block->alive) return;
    const auto& all = warps[block];
    for (size_t i = 0; i < all.size(); i++)
        if (all[i].issued != all[i / 4 * 4].issued)
            fail({"wgmma", 0}, "warp %zu issued other products than the first of its warpgroup", i);
}

}  // namespace emulation
