// mbarriers and bulk copies (PTX manual, "Parallel Synchronization and Communication Instructions: mbarrier" and
// "cp.async.bulk"): counters with phases, and copies that land as late as the program allows.
#include "scheduler.h"

#include "races.h"

#include <algorithm>
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

// What lies at `address` here, in block `rank` of the cluster.
Barrier& at(const void* address, int rank, Place place) {
    Block& other = of_cluster(rank, place);
    if (!other.alive) fail(place, "this reaches into the shared memory of block %d of the cluster, which has ended", rank);
    auto barrier = other.mbarriers.find(same_place(other, address));
    if (barrier == other.mbarriers.end()) fail(place, "there is no mbarrier here: block %d has not initialised it", rank);
    return barrier->second;
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

void arrive(const void* address, int rank, Place place) {
    Barrier& barrier = at(address, rank, place);
    if (barrier.arrivals_left == 0) fail(place, "more arrivals at an mbarrier than it was made for");
    barrier.arrivals_left--;
    end_phase_if_complete(barrier);
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
    barrier.copies.push_back({shared, global, bytes, bytes});
    barrier.place = place;
}

void copy_tensor(void* shared, const void* tensor_map, const int* first, int dimensions, const void* address,
                 unsigned targets, Place place) {
    constexpr unsigned PIECE = 16, ROW = 128;
    const void* instruction = EMULATED_CALLER;
    const auto& map = *static_cast<const TensorMap*>(tensor_map);
    if (map.dimensions != unsigned(dimensions)) fail(place, "a map of %d dimensions, for a copy of %d", int(map.dimensions), dimensions);
    unsigned rows = map.box[1] * map.box[2] * map.box[3];
    unsigned start = shared_address(shared);
    if (start % 1024 || map.box[0] * 2 != ROW)
        fail(place, "this emulator has boxes of rows of 128 bytes only, from a multiple of 1024 bytes of shared memory on");
    if (!in_shared_memory(static_cast<char*>(shared) + rows * ROW - 1)) fail(place, "a bulk copy goes elsewhere than to shared memory");
    if (targets == 0) targets = 1u << cluster_rank();
    if (targets >> cluster_size) fail(place, "a copy to blocks %x of a cluster of %u", targets, cluster_size);
    for (unsigned row = 0; row < rows; row++) {
        unsigned in_box[] = {0, row % map.box[1], row / map.box[1] % map.box[2], row / map.box[1] / map.box[2]};
        uint64_t from = map.address;
        bool inside = true;
        for (int d = 1; d < dimensions; d++) {
            int64_t index = int64_t(first[d]) + in_box[d];
            inside = inside && index >= 0 && uint64_t(index) < map.sizes[d];
            from += index * map.strides[d];
        }
        for (unsigned c = 0; c < ROW / PIECE; c++) {
            int64_t column = first[0] + int64_t(c) * 8, left = int64_t(map.sizes[0]) - column;
            int valid = inside && column >= 0 ? std::clamp<int64_t>(2 * left, 0, PIECE) : 0;
            const void* source = reinterpret_cast<const void*>(from + 2 * column);
            if (valid) note_access(source, valid, READ, instruction);
            unsigned linear = start + row * ROW + c * PIECE;
            char* here = static_cast<char*>(shared_memory_at(linear ^ (linear >> 7 & 7) << 4));
            for (unsigned rank = 0; rank < cluster_size; rank++) {
                if (!(targets >> rank & 1)) continue;
                Barrier& barrier = at(address, rank, place);
                void* to = same_place(of_cluster(rank, place), here);
                note_bulk_copy(to, PIECE, instruction);
                memset(to, 0xff, PIECE);
                note_copy_begun(to, PIECE);
                barrier.copies.push_back({to, source, PIECE, valid});
                barrier.place = place;
            }
        }
    }
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
        memcpy(copy.to, copy.from, copy.valid);
        memset(static_cast<char*>(copy.to) + copy.valid, 0, copy.bytes - copy.valid);
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
