// One launch: its limits, shared memory, and one block after another.
#include "scheduler.h"

#include "faults.h"
#include "races.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <link.h>
#include <memory>
#include <numeric>

unsigned emulation::cluster_size = 1;
alignas(128) thread_local unsigned char (*emulated_dynamic_shared)[];

namespace emulation {

namespace {

constexpr size_t MOST_SHARED = 227 * 1024;  // sm_90; the launcher holds a kernel to what it was allowed
constexpr size_t RED_ZONE = 4096;           // after the launch's dynamic shared memory: nobody may write there

struct Segment {
    const void* anchor;
    char* start;
    size_t bytes;
};
Segment statics;
size_t dynamic_bytes;
std::vector<std::unique_ptr<Block>> blocks;  // as many as have run together so far; the first serves all others
size_t blocks_used;
constexpr unsigned MOST_TOGETHER = 8;        // what tests need; each has stacks of its own
constexpr int MOST_ROUNDS = 100000;          // of nothing but polls: a second

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
    if (launch.cooperative && (grid[0] > MOST_TOGETHER || grid[1] > 1 || grid[2] > 1))
        return "a cooperative launch has at most 8 blocks here, side by side";
    if (launch.cluster < 0 || unsigned(launch.cluster) > MOST_TOGETHER || (launch.cluster && grid[0] % launch.cluster))
        return "the grid must be whole clusters of at most 8 blocks";
    return nullptr;
}

bool red_zone_intact() {
    const unsigned char* zone = block->dynamic_memory + dynamic_bytes;
    if (zone[0] == 0xff && !memcmp(zone, zone + 1, RED_ZONE - 1)) return true;
    size_t at = 0;
    while (zone[at] == 0xff) at++;
    snprintf(block->error, sizeof block->error,
             "block (%u, %u, %u) wrote byte %zu of dynamic shared memory; the launch gave it %zu bytes", block_index.x,
             block_index.y, block_index.z, dynamic_bytes + at, dynamic_bytes);
    return false;
}

// In which order blocks run: up, down, or shuffled.
std::vector<uint64_t> block_order(uint64_t blocks) {
    std::vector<uint64_t> order(blocks);
    std::iota(order.begin(), order.end(), 0);
    if (block->schedule == REVERSE || block->schedule == WARPS_REVERSED) std::reverse(order.begin(), order.end());
    if (block->schedule == RANDOM)
        for (uint64_t i = blocks - 1; i > 0; i--) {
            block->random = block->random * 1664525u + 1013904223u;
            std::swap(order[i], order[(block->random >> 4) % (i + 1)]);
        }
    return order;
}

void watch_memory(const Launch& launch) {
    watch_nothing();
    if (!launch.find_races) return;
    for (size_t i = 0; i < blocks_used; i++) watch(blocks[i]->dynamic_memory, dynamic_bytes, true);
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
    return within(address, block->dynamic_memory, dynamic_bytes + RED_ZONE) || within(address, statics.start, statics.bytes);
}

unsigned shared_address(const void* address) {
    if (!within(address, block->dynamic_memory, dynamic_bytes))
        fail_at(describe_instruction(EMULATED_CALLER), "a matrix for wgmma is not in dynamic shared memory");
    return static_cast<const unsigned char*>(address) - block->dynamic_memory;
}

Block& of_cluster(int rank, Place place) {
    if (rank < 0 || unsigned(rank) >= cluster_size) fail(place, "there is no block %d in a cluster of %u", rank, cluster_size);
    return *blocks[rank];
}

void* same_place(const Block& other, const void* address) { return other.dynamic_memory + shared_address(address); }

int cluster_rank() { return block_index.x % cluster_size; }

void* shared_memory_at(unsigned address) { return block->dynamic_memory + address; }

namespace {

// Make a block the one that runs: what it is called, and where its shared memory is.
void take_up(Block* next) {
    block = next;
    block_index = block->index;
    emulated_dynamic_shared = reinterpret_cast<unsigned char(*)[]>(block->dynamic_memory);
}

void begin(uint64_t number) {
    block->index = {unsigned(number % grid_size.x), unsigned(number / grid_size.x % grid_size.y),
                    unsigned(number / grid_size.x / grid_size.y)};
    take_up(block);
    // NaN in every storage type. The guards that g++ puts beside arrays of __half then say "constructed already".
    memset(statics.start, 0xff, statics.bytes);
    memset(block->dynamic_memory, 0xff, dynamic_bytes);
    memset(block->dynamic_memory + dynamic_bytes, 0xff, RED_ZONE);
    begin_block();
}

bool waits_for_ever(int& rounds) {
    pass_time();
    if (++rounds < MOST_ROUNDS) return false;
    snprintf(block->error, sizeof block->error, "block (%u, %u, %u) waits for ever: a thread looks again and again at %s:%d",
             block_index.x, block_index.y, block_index.z, block->poll.file, block->poll.line);
    return true;
}

bool run_one_after_another(const std::vector<uint64_t>& order) {
    int rounds = 0;
    for (uint64_t number : order) {
        begin(number);
        do {
            if (!run_block()) return false;
        } while (block->alive && !waits_for_ever(rounds));
        if (block->alive || !red_zone_intact()) return false;
    }
    return true;
}

// Blocks `first` and those after it, each until its threads have ended or wait for another block, again and again in the
// same order. They share the addresses of the __shared__ variables, whose contents are changed with them.
bool run_together(uint64_t first, const std::vector<uint64_t>& order) {
    for (uint64_t number : order) {
        block = blocks[number].get();
        begin(first + number);
        block->statics.assign(statics.start, statics.start + statics.bytes);
        block->epochs = current_epochs();
    }
    size_t ended = 0;
    for (int rounds = 0; ended < order.size();) {
        for (uint64_t number : order) {
            if (!blocks[number]->alive) continue;
            take_up(blocks[number].get());
            std::copy(block->statics.begin(), block->statics.end(), statics.start);
            go_on_with(block->epochs);
            if (!run_block() || !red_zone_intact()) return false;
            block->statics.assign(statics.start, statics.start + statics.bytes);
            block->epochs = current_epochs();
            ended += !block->alive;
        }
        if (ended < order.size() && waits_for_ever(rounds)) return false;
    }
    return true;
}

}  // namespace

const char* run(const Launch* launch, void (*kernel)(void*), void* arguments, const void* anchor) {
    if (const char* reason = refuse(*launch)) return reason;
    const unsigned *grid = launch->grid, *size = launch->block;
    block_size = dim3(size[0], size[1], size[2]);
    grid_size = dim3(grid[0], grid[1], grid[2]);
    cluster_size = std::max(1, launch->cluster);
    blocks_used = launch->cooperative ? grid[0] : cluster_size;
    while (blocks.size() < blocks_used) blocks.push_back(std::make_unique<Block>());
    for (size_t i = blocks_used; i-- > 0;) {
        block = blocks[i].get();
        block->kernel = kernel;
        block->arguments = arguments;
        block->schedule = Schedule(launch->schedule);
        block->random = (launch->seed + i) * 2654435761u | 1u;
        if (!block->dynamic_memory)
            block->dynamic_memory = static_cast<unsigned char*>(aligned_alloc(1024, MOST_SHARED + RED_ZONE));
        if (!block->dynamic_memory || !prepare_block(size[0] * size[1] * size[2])) return "no memory for the stacks";
    }

    statics = {anchor, nullptr, 0};
    dl_iterate_phdr(find_segment, &statics);
    dynamic_bytes = launch->shared_bytes;
    watch_memory(*launch);

    catch_signals();
    uint64_t all = uint64_t(grid[0]) * grid[1] * grid[2];
    bool good = true;
    if (launch->cooperative) {
        good = run_together(0, block_order(all));
    } else if (launch->cluster) {
        for (uint64_t cluster : block_order(all / cluster_size))
            good = good && run_together(cluster * cluster_size, block_order(cluster_size));
    } else {
        good = run_one_after_another(block_order(all));
    }
    restore_signals();
    if (!good)
        for (size_t i = 0; i < blocks_used; i++) blocks[i]->abandoned = true;
    if (good && launch->find_races && launch->dependent && !has_waited())
        return "no thread waits for the kernels before this one, so what comes later would not either";
    return good ? nullptr : block->error;
}

}  // namespace emulation
