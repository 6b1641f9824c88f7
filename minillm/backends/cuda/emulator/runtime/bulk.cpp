// mbarriers and bulk copies (PTX manual, "Parallel Synchronization and Communication Instructions: mbarrier" and
// "cp.async.bulk"): counters with phases, and copies that land as late as the program allows.
#include "scheduler.h"

#include "races.h"

#include <cstdint>
#include <cstring>

namespace emulation {

namespace {

Barrier& at(const void* address, Place place) {
    auto barrier = block->mbarriers.find(address);
    if (barrier == block->mbarriers.end()) fail(place, "there is no mbarrier here: nobody has initialised it");
    return barrier->second;
}

void end_phase_if_complete(Barrier& barrier) {
    if (barrier.arrivals_left > 0 || barrier.pending_bytes != 0) return;
    barrier.phase++;
    barrier.arrivals_left = barrier.count;
    barrier.awaited = false;
}

bool completed(const Barrier& barrier, unsigned parity) { return (barrier.phase & 1) != (parity & 1); }

}  // namespace

void init_mbarrier(const void* address, int count, Place place) {
    if (!in_shared_memory(address) || uintptr_t(address) % 8) fail(place, "an mbarrier is 8 bytes of shared memory");
    Barrier fresh{};
    fresh.count = fresh.arrivals_left = count;
    fresh.place = place;
    block->mbarriers[address] = fresh;
}

void expect_bytes(const void* address, int bytes, Place place) {
    Barrier& barrier = at(address, place);
    if (barrier.arrivals_left == 0) fail(place, "more arrivals at an mbarrier than it was made for");
    barrier.arrivals_left--;
    barrier.pending_bytes += bytes;
    end_phase_if_complete(barrier);
}

void copy_bulk(void* shared, const void* global, int bytes, const void* address, Place place) {
    Barrier& barrier = at(address, place);
    if ((uintptr_t(shared) | uintptr_t(global) | uintptr_t(bytes)) % 16 || bytes <= 0)
        fail(place, "a bulk copy is of 16 bytes and multiples, from and to addresses that are such: %d bytes from <%p>", bytes,
             global);
    if (!in_shared_memory(shared) || !in_shared_memory(static_cast<char*>(shared) + bytes - 1))
        fail(place, "a bulk copy goes elsewhere than to shared memory");
    memset(shared, 0xff, bytes);
    note_copy_begun(shared, bytes);
    barrier.copies.push_back({shared, global, bytes});
    barrier.place = place;
}

bool phase_completed(const void* address, unsigned parity, Place place) {
    if (completed(at(address, place), parity)) return true;
    pause(place);
    Barrier& barrier = at(address, place);
    if (completed(barrier, parity) || !barrier.awaited) {
        barrier.awaited = true;
        return completed(barrier, parity);
    }
    for (const BulkCopy& copy : barrier.copies) {
        memcpy(copy.to, copy.from, copy.bytes);
        note_copy_done(copy.to, copy.bytes);
        barrier.pending_bytes -= copy.bytes;
    }
    barrier.copies.clear();
    end_phase_if_complete(barrier);
    return completed(barrier, parity);
}

void end_bulk_copies() {
    for (const auto& [address, barrier] : block->mbarriers)
        if (!barrier.copies.empty()) fail(barrier.place, "the block ends with this bulk copy never waited for");
}

}  // namespace emulation
