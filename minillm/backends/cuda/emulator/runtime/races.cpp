// Races: two threads touch the same bytes, one of them writes, and no barrier makes one come after the other.
//
// A build with -fsanitize=thread calls __tsan_readN and __tsan_writeN at each access; these are ours, so libtsan is
// not needed, and know CUDA's rules: __syncthreads orders all accesses of a block, __syncwarp those of a warp, shuffles
// order nothing, and nothing orders two blocks. So a race is found in whatever order the threads happen to run.
//
// For every 4 bytes the last four accesses are kept, as ThreadSanitizer does (Serebryany and Iskhodzhanov 2009).
// A block that used an atomic is taken to be in order with others that did: counters of finished blocks work that way.
#include "races.h"

#include "faults.h"
#include "scheduler.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <sys/mman.h>

namespace emulation {

namespace {

constexpr unsigned GRAIN = 4, KEPT = 4;

struct Cell {
    uint32_t epoch;       // barriers of all blocks before this access; 0: an empty cell
    uint32_t warp_epoch;  // barriers of the warp
    uint32_t block;
    uint16_t thread;
    uint8_t bytes;  // of the grain: a bit each
    uint8_t access;
    const void* instruction;
};

struct Grain {
    Cell cells[KEPT];
};

// By whom a grain was last written, and how often that thread had fenced its writes for wgmma before.
struct Written {
    uint32_t thread;  // 0: by nobody; else 1 + its number
    uint32_t fences;
};

struct Region {
    const char* start;
    size_t bytes;
    bool shared, is_result;
    Grain* grains;
    uint8_t* copying;  // per grain of shared memory: a cp.async is under way
    uint8_t* reading;  // likewise: warps whose wgmma are under way, once for each
    Written* written;  // likewise
};

std::vector<Region> regions;
bool watching, in_order, some_waited;
LoggedAccess* log;
size_t log_capacity, *logged;
uint32_t shared_regions;  // they come first
uint32_t epoch = 1, warp_epochs[32], fences[1024], block_number;
uint32_t first_epoch_of_block = 1;
std::vector<bool> used_atomics;  // by block number
unsigned next_victim;

uint16_t thread_number() { return current->warp * 32 + current->lane; }

bool ordered(const Cell& before, const Cell& now, bool shared) {
    if (before.block != now.block) return shared || (used_atomics[before.block] && used_atomics[now.block]);
    if (before.thread == now.thread || before.epoch < now.epoch) return true;
    return before.thread / 32 == now.thread / 32 && before.warp_epoch < now.warp_epoch;
}

bool conflict(const Cell& a, const Cell& b) {
    return (a.bytes & b.bytes) && ((a.access | b.access) & WRITE) && !(a.access & b.access & ATOMIC);
}

const char* verb(uint8_t access) { return access & ATOMIC ? "updates" : access & WRITE ? "writes" : "reads"; }

[[noreturn]] void report(const Cell& before, const Cell& now, bool shared) {
    Text here = describe_instruction(now.instruction), there = describe_instruction(before.instruction);
    fail_at(here, "race on %s memory: this thread %s what thread %u of %s block %s at %s, and nothing orders the two",
            shared ? "shared" : "global", verb(now.access), before.thread,
            before.block == now.block ? "the same" : "another", verb(before.access), there.characters);
}

// Where to keep `now`: the same thread's cell if it says no more, else one that later accesses are ordered after.
Cell& place_for(Grain& grain, const Cell& now, bool shared) {
    for (Cell& cell : grain.cells)
        if (!cell.epoch || (cell.block == now.block && cell.thread == now.thread && cell.bytes == now.bytes &&
                            (cell.access & ~now.access) == 0))
            return cell;
    for (Cell& cell : grain.cells)
        if (cell.block == now.block && cell.epoch < now.epoch && (shared || !(cell.access & ~now.access))) return cell;
    for (Cell& cell : grain.cells)
        if (!(cell.access & WRITE)) return cell;
    return grain.cells[next_victim++ % KEPT];
}

void note(Region& region, size_t offset, size_t bytes, uint8_t access, const void* instruction) {
    Cell now{epoch, warp_epochs[current->warp], block_number, thread_number(), 0, access, instruction};
    for (size_t end = offset + bytes; offset < end; offset = (offset / GRAIN + 1) * GRAIN) {
        size_t number = offset / GRAIN;
        size_t last = std::min(end, (number + 1) * GRAIN) - number * GRAIN;
        now.bytes = (1u << last) - (1u << offset % GRAIN);
        if (region.shared && region.copying[number])
            fail_at(describe_instruction(instruction), "this thread %s shared memory that a cp.async is still writing",
                    verb(access));
        if (region.shared && access & WRITE) {
            if (region.reading[number])
                fail_at(describe_instruction(instruction), "this thread writes to shared memory that a wgmma is still reading");
            region.written[number] = {thread_number() + 1u, fences[thread_number()]};
        }
        Grain& grain = region.grains[number];
        for (const Cell& cell : grain.cells) {
            bool live = cell.epoch >= (region.shared ? first_epoch_of_block : 1);
            if (live && conflict(cell, now) && !ordered(cell, now, region.shared)) report(cell, now, region.shared);
        }
        place_for(grain, now, region.shared) = now;
    }
}

Region* region_of(const void* address) {
    for (Region& region : regions)
        if (size_t(static_cast<const char*>(address) - region.start) < region.bytes) return &region;
    return nullptr;
}

// Hold an access to global memory to the order of kernels that are launched dependently.
void check_order(const Region& region, uint8_t access, const void* instruction) {
    if (!in_order || region.shared || self().waited) return;
    if (access & WRITE)
        fail_at(describe_instruction(instruction), "this thread %s before it has waited for the kernels before this one, "
                "which may still read there", verb(access));
    if (region.is_result)
        fail_at(describe_instruction(instruction), "this thread reads a result of a kernel before this one, and has not "
                "waited for it");
}

void note_in_log(const Region& region, size_t offset, size_t bytes, Access access, const void* instruction) {
    if (*logged < log_capacity)
        log[*logged] = {uint64_t(instruction), offset, uint32_t(&region - regions.data()) - shared_regions, block_number,
                        thread_number(), uint8_t(bytes), bool(access & WRITE), 0};
    ++*logged;
}

template <class T>
T* zeroed(size_t number) {
    void* memory = mmap(nullptr, number * sizeof(T), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) abort();
    return static_cast<T*>(memory);
}

}  // namespace

void watch_nothing() {
    for (Region& region : regions) {
        size_t grains = region.bytes / GRAIN + 1;
        munmap(region.grains, grains * sizeof(Grain));
        munmap(region.copying, grains);
        munmap(region.reading, grains);
        munmap(region.written, grains * sizeof(Written));
    }
    regions.clear();
    used_atomics.clear();
    watching = in_order = some_waited = false;
    log_capacity = shared_regions = 0;
    epoch = 1;
    block_number = ~0u;
}

void watch_order() { in_order = true; }

void log_accesses(LoggedAccess* to, size_t capacity, size_t* number) {
    log = to;
    log_capacity = capacity;
    logged = number;
}

bool has_waited() { return some_waited; }
void wait_for_results() { self().waited = some_waited = true; }

void watch(const void* start, size_t bytes, bool shared, bool is_result) {
    if (bytes == 0) return;
    size_t grains = bytes / GRAIN + 1;
    regions.push_back({static_cast<const char*>(start), bytes, shared, is_result, zeroed<Grain>(grains), zeroed<uint8_t>(grains),
                       zeroed<uint8_t>(grains), zeroed<Written>(grains)});
    shared_regions += shared;
    watching = true;
}

void note_access(const void* address, size_t bytes, Access access, const void* instruction) {
    if (!watching || !current) return;
    if (access & ATOMIC) used_atomics[block_number] = true;
    if (Region* region = region_of(address)) {
        if (bytes) check_order(*region, access, instruction);
        size_t offset = static_cast<const char*>(address) - region->start;
        note(*region, offset, bytes, access, instruction);
        if (log_capacity && !region->shared) note_in_log(*region, offset, bytes, access, instruction);
    }
}

void note_atomic(const void* address, size_t bytes) {
    note_access(address, bytes, Access(WRITE | ATOMIC), EMULATED_CALLER);
}

void note_copy_begun(const void* shared, size_t bytes) {
    Region* region = watching ? region_of(shared) : nullptr;
    if (!region || !region->shared) return;
    size_t first = (static_cast<const char*>(shared) - region->start) / GRAIN;
    for (size_t i = 0; i < bytes / GRAIN; i++) region->copying[first + i] = 1;
}

void note_copy_done(const void* shared, size_t bytes) {
    Region* region = watching ? region_of(shared) : nullptr;
    if (!region || !region->shared) return;
    size_t first = (static_cast<const char*>(shared) - region->start) / GRAIN;
    for (size_t i = 0; i < bytes / GRAIN; i++) region->copying[first + i] = 0;
}

void note_bulk_copy(const void* shared, size_t bytes, const void* instruction) {
    Region* region = watching ? region_of(shared) : nullptr;
    if (!region || !region->shared) return;
    size_t first = (static_cast<const char*>(shared) - region->start) / GRAIN;
    for (size_t i = first; i < first + bytes / GRAIN; i++)
        if (region->reading[i])
            fail_at(describe_instruction(instruction), "this bulk copy writes to shared memory that a wgmma is still reading");
}

void note_product_begins(const void* shared, size_t bytes, const void* instruction) {
    Region* region = watching ? region_of(shared) : nullptr;
    if (!region || !region->shared) return;
    size_t first = (static_cast<const char*>(shared) - region->start) / GRAIN;
    for (size_t i = first; i < first + bytes / GRAIN; i++) {
        const Written& written = region->written[i];
        if (written.thread && fences[written.thread - 1] == written.fences)
            fail_at(describe_instruction(instruction), "wgmma reads what thread %u wrote without a fence.proxy.async since",
                    written.thread - 1);
        region->reading[i]++;
    }
}

void note_product_ends(const void* shared, size_t bytes) {
    Region* region = watching ? region_of(shared) : nullptr;
    if (!region || !region->shared) return;
    size_t first = (static_cast<const char*>(shared) - region->start) / GRAIN;
    for (size_t i = first; i < first + bytes / GRAIN; i++) region->reading[i]--;
}

void fence_writes() { fences[thread_number()]++; }

void note_block_begins() {
    if (!watching) return;
    epoch++;
    first_epoch_of_block = epoch;
    block_number = used_atomics.size();
    used_atomics.push_back(false);
}

Epochs current_epochs() {
    Epochs now{epoch, {}, first_epoch_of_block, block_number};
    std::copy(std::begin(warp_epochs), std::end(warp_epochs), now.warp_epochs);
    return now;
}

void go_on_with(const Epochs& epochs) {
    epoch = epochs.epoch, first_epoch_of_block = epochs.first_of_block, block_number = epochs.block_number;
    std::copy(std::begin(epochs.warp_epochs), std::end(epochs.warp_epochs), warp_epochs);
}

void note_block_barrier() { epoch++; }
void note_warp_barrier(unsigned warp) { warp_epochs[warp]++; }

}  // namespace emulation

#define EMULATED_NOTE(name, bytes, access)                                                            \
    extern "C" EMULATED_API void name(const void* address) {                                    \
        emulation::note_access(address, bytes, emulation::access, EMULATED_CALLER);              \
    }
#define EMULATED_NOTES(bytes)                                       \
    EMULATED_NOTE(__tsan_read##bytes, bytes, READ)                  \
    EMULATED_NOTE(__tsan_write##bytes, bytes, WRITE)                \
    EMULATED_NOTE(__tsan_unaligned_read##bytes, bytes, READ)        \
    EMULATED_NOTE(__tsan_unaligned_write##bytes, bytes, WRITE)
EMULATED_NOTES(1)
EMULATED_NOTES(2)
EMULATED_NOTES(4)
EMULATED_NOTES(8)
EMULATED_NOTES(16)
extern "C" EMULATED_API void __tsan_read_range(const void* address, size_t bytes) {
    emulation::note_access(address, bytes, emulation::READ, EMULATED_CALLER);
}
extern "C" EMULATED_API void __tsan_write_range(const void* address, size_t bytes) {
    emulation::note_access(address, bytes, emulation::WRITE, EMULATED_CALLER);
}
extern "C" EMULATED_API void __tsan_init() {}
