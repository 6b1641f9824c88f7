// Where threads wait for each other: barriers of a block, and operations of a warp.
#include "scheduler.h"

#include "races.h"

namespace emulation {

namespace {

bool same(Place a, Place b) { return a.line == b.line && a.file == b.file; }

void release_lanes(Warp& warp, const Meeting& meeting, unsigned lanes) {
    if (meeting.complete) meeting.complete(lanes, warp.operands);
    else note_warp_barrier(&warp - block->warps.data());
    warp.waiting &= ~lanes;
    warp.ready |= lanes;
}

}  // namespace

Votes block_barrier(int predicate, Place place) {
    Fiber& fiber = self();
    if (block->arrived == 0) block->barrier = place;
    else if (!same(block->barrier, place))
        fail(place, "threads of one block wait in different barriers: here, and at %s:%d", block->barrier.file,
             block->barrier.line);
    block->arrived++;
    block->votes.count += predicate != 0;
    block->votes.all &= predicate != 0;
    block->votes.any |= predicate != 0;
    fiber.barrier = block->barriers + 1;
    release_barrier_if_all_there();
    if (fiber.barrier > block->barriers) suspend();
    return block->result;
}

void cluster_barrier(Place place) {
    unsigned number = ++self().cluster_barriers;
    block_barrier(0, place);
    block->cluster_barriers = number;
    for (bool all = false; !all;) {
        all = true;
        for (unsigned rank = 0; rank < cluster_size; rank++) {
            Block& other = of_cluster(rank, place);
            if (other.cluster_barriers >= number) continue;
            if (!other.alive) fail(place, "block %u of the cluster has ended, and never comes to this barrier", rank);
            all = false;
        }
        if (!all) pause(place);
    }
}

void release_barrier_if_all_there() {
    if (block->arrived == 0 || block->arrived != block->alive) return;
    note_block_barrier();
    block->result = block->votes;
    block->votes = {0, 1, 0};
    block->arrived = 0;
    block->barriers++;
    for (Warp& warp : block->warps) warp.ready = warp.alive;
}

void meet(unsigned mask, Complete complete, void* operand, Place place) {
    const Fiber& fiber = self();
    Warp& warp = block->warps[fiber.warp];
    unsigned bit = 1u << fiber.lane;
    if (!(mask & bit)) fail(place, "lane %u is not in the mask %08x that it names", fiber.lane, mask);
    unsigned others = warp.waiting & mask;
    unsigned first = others ? warp.first[__builtin_ctz(others)] : fiber.lane;
    Meeting& meeting = warp.meetings[first];
    if (!others) meeting = {mask, complete, place};
    else if (meeting.mask != mask || meeting.complete != complete || !same(meeting.place, place))
        fail(place, "lanes of one warp meet in different operations: here with mask %08x, and at %s:%d with mask %08x",
             mask, meeting.place.file, meeting.place.line, meeting.mask);
    warp.first[fiber.lane] = first;
    warp.operands[fiber.lane] = operand;
    warp.waiting |= bit;
    unsigned expected = mask & warp.alive;
    if ((warp.waiting & expected) == expected) release_lanes(warp, meeting, expected);
    else suspend();
}

void release_lanes_if_all_there(unsigned warp_number) {
    Warp& warp = block->warps[warp_number];
    for (unsigned rest = warp.waiting; rest;) {
        const Meeting& meeting = warp.meetings[warp.first[__builtin_ctz(rest)]];
        unsigned expected = meeting.mask & warp.alive;
        rest &= ~meeting.mask;
        if ((warp.waiting & expected) == expected) release_lanes(warp, meeting, expected);
    }
}

Place meeting_place() {
    const Fiber& fiber = self();
    const Warp& warp = block->warps[fiber.warp];
    return warp.meetings[warp.first[fiber.lane]].place;
}

}  // namespace emulation
