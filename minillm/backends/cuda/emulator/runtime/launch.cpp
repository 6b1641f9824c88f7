// One launch: its limits, shared memory, and one block after another.
#include "scheduler.h"

#include "faults.h"
#include "races.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <link.h>
#include <numeric>

alignas(128) thread_local unsigned char (*emulated_dynamic_shared)[];

namespace emulation {

namespace {

constexpr size_t MOST_SHARED = 227 * 1024;  // sm_90; the launcher holds a kernel to what it was allowed
constexpr size_t RED_ZONE = 4096;           // after the launch's dynamic shared memory: nobody may write there

alignas(1024) unsigned char dynamic_memory[MOST_SHARED + RED_ZONE];

struct Segment {
    const void* anchor;
    char* start;
    size_t bytes;
};
Segment statics;
size_t dynamic_bytes;

// The TLS segment of the module that `anchor` lies in: all its __shared__ variables.
int find_segment(dl_phdr_info* info, size_t, void* data) {
    auto* wanted = static_cast<Segment*>(data);
    if (!info->dlpi_tls_data) return 0;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const auto& header = info->dlpi_phdr[i];
        char* start = static_cast<char*>(info->dlpi_tls_data);
        if (header.p_type != PT_TLS || wanted->anchor < start || wanted->anchor >= start + header.p_memsz) continue;
        wanted->start = start;
        wanted->bytes = header.p_memsz;
        return 1;
    }
    return 0;
}

const char* refuse(const Launch& launch) {
    const unsigned *grid = launch.grid, *size = launch.block;
    size_t threads = size_t(size[0]) * size[1] * size[2];
    if (!grid[0] || !grid[1] || !grid[2] || grid[0] > 0x7fffffffu || grid[1] > 65535 || grid[2] > 65535)
        return "the grid must be from 1 to (2147483647, 65535, 65535)";
    if (threads < 1 || threads > 1024 || size[2] > 64) return "a block must have from 1 to 1024 threads, at most 64 in z";
    if (threads % 32) return "the threads of a block must be a multiple of 32: kernels rely on full warps";
    if (launch.shared_bytes > MOST_SHARED) return "more than 227 KiB of dynamic shared memory";
    return nullptr;
}

bool red_zone_intact() {
    const unsigned char* zone = dynamic_memory + dynamic_bytes;
    if (zone[0] == 0xff && !memcmp(zone, zone + 1, RED_ZONE - 1)) return true;
    size_t at = 0;
    while (zone[at] == 0xff) at++;
    snprintf(block.error, sizeof block.error,
             "block (%u, %u, %u) wrote byte %zu of dynamic shared memory; the launch gave it %zu bytes", block_index.x,
             block_index.y, block_index.z, dynamic_bytes + at, dynamic_bytes);
    return false;
}

// In which order blocks run: up, down, or shuffled.
std::vector<uint64_t> block_order(uint64_t blocks) {
    std::vector<uint64_t> order(blocks);
    std::iota(order.begin(), order.end(), 0);
    if (block.schedule == REVERSE || block.schedule == WARPS_REVERSED) std::reverse(order.begin(), order.end());
    if (block.schedule == RANDOM)
        for (uint64_t i = blocks - 1; i > 0; i--) {
            block.random = block.random * 1664525u + 1013904223u;
            std::swap(order[i], order[(block.random >> 4) % (i + 1)]);
        }
    return order;
}

void watch_memory(const Launch& launch) {
    watch_nothing();
    if (!launch.find_races) return;
    watch(dynamic_memory, dynamic_bytes, true);
    watch(statics.start, statics.bytes, true);
    for (size_t i = 0; i < launch.watched_number; i++)
        watch(launch.watched[i].start, launch.watched[i].bytes, false, launch.watched[i].is_result);
    if (launch.dependent) watch_order();
    log_accesses(launch.log, launch.log_capacity, launch.logged);
}

bool within(const void* address, const void* start, size_t bytes) {
    return size_t(static_cast<const char*>(address) - static_cast<const char*>(start)) < bytes;
}

}  // namespace

bool in_shared_memory(const void* address) {
    // The red zone counts: a write there is reported as what it is.
    return within(address, dynamic_memory, dynamic_bytes + RED_ZONE) || within(address, statics.start, statics.bytes);
}

unsigned shared_address(const void* address) {
    if (!within(address, dynamic_memory, dynamic_bytes))
        fail_at(describe_instruction(EMULATED_CALLER), "a matrix for wgmma is not in dynamic shared memory");
    return static_cast<const unsigned char*>(address) - dynamic_memory;
}

void* shared_memory_at(unsigned address) { return dynamic_memory + address; }

const char* run(const Launch* launch, void (*kernel)(void*), void* arguments, const void* anchor) {
    if (const char* reason = refuse(*launch)) return reason;
    const unsigned *grid = launch->grid, *size = launch->block;
    block_size = dim3(size[0], size[1], size[2]);
    grid_size = dim3(grid[0], grid[1], grid[2]);
    block.kernel = kernel;
    block.arguments = arguments;
    block.schedule = Schedule(launch->schedule);
    block.random = launch->seed * 2654435761u | 1u;
    if (!prepare_block(size[0] * size[1] * size[2])) return "no memory for the stacks";

    statics = {anchor, nullptr, 0};
    dl_iterate_phdr(find_segment, &statics);
    dynamic_bytes = launch->shared_bytes;
    emulated_dynamic_shared = reinterpret_cast<unsigned char(*)[]>(dynamic_memory);
    memset(dynamic_memory + dynamic_bytes, 0xff, RED_ZONE);
    watch_memory(*launch);

    catch_signals();
    bool good = true;
    for (uint64_t number : block_order(uint64_t(grid[0]) * grid[1] * grid[2])) {
        block_index = {unsigned(number % grid[0]), unsigned(number / grid[0] % grid[1]),
                       unsigned(number / grid[0] / grid[1])};
        // NaN in every storage type. The guards that g++ puts beside arrays of __half then say "constructed already".
        memset(statics.start, 0xff, statics.bytes);
        memset(dynamic_memory, 0xff, dynamic_bytes);
        good = run_block() && red_zone_intact();
        if (!good) break;
    }
    restore_signals();
    if (good && launch->find_races && launch->dependent && !has_waited())
        return "no thread waits for the kernels before this one, so what comes later would not either";
    return good ? nullptr : block.error;
}

}  // namespace emulation
