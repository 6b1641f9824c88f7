// Where threads wait for each other: barriers of a block, and operations of a warp.
#include "scheduler.h"

namespace emulation {

namespace {

bool same(Place a, Place b) { return a.line == b.line && a.file == b.file; }

void release_lanes(Warp& warp, unsigned warp_number, unsigned mask) {
    Fiber* lanes = &block.fibers[warp_number * 32];
    void* operands[32];
    for (unsigned rest = mask; rest; rest &= rest - 1) {
        int lane = __builtin_ctz(rest);
        operands[lane] = lanes[lane].operand;
    }
    lanes[__builtin_ctz(mask)].complete(mask, operands);
    warp.waiting &= ~mask;
    warp.ready |= mask;
}

}  // namespace

Votes block_barrier(int predicate, Place place) {
    Fiber& fiber = self();
    fiber.place = place;
    if (block.arrived == 0) block.barrier = place;
    else if (!same(block.barrier, place))
        fail(place, "threads of one block wait in different barriers: here, and at %s:%d", block.barrier.file,
             block.barrier.line);
    block.arrived++;
    block.votes.count += predicate != 0;
    block.votes.all &= predicate != 0;
    block.votes.any |= predicate != 0;
    fiber.at_barrier = true;
    release_barrier_if_all_there();
    if (fiber.at_barrier) suspend();
    return block.result;
}

void release_barrier_if_all_there() {
    if (block.arrived == 0 || block.arrived != block.alive) return;
    block.result = block.votes;
    block.votes = {0, 1, 0};
    block.arrived = 0;
    for (int i = 0; i < block.threads; i++) block.fibers[i].at_barrier = false;
    for (Warp& warp : block.warps) warp.ready = warp.alive;
}

void meet(unsigned mask, Complete complete, void* operand, Place place) {
    Fiber& fiber = self();
    Warp& warp = block.warps[fiber.warp];
    unsigned bit = 1u << fiber.lane;
    if (!(mask & bit)) fail(place, "lane %u is not in the mask %08x that it names", fiber.lane, mask);
    for (unsigned others = warp.waiting & mask; others; others &= others - 1) {
        const Fiber& other = block.fibers[fiber.warp * 32 + __builtin_ctz(others)];
        if (other.complete != complete || other.mask != mask || !same(other.place, place))
            fail(place, "lanes of one warp meet in different operations: here with mask %08x, and at %s:%d with mask %08x",
                 mask, other.place.file, other.place.line, other.mask);
        break;  // those that wait have been compared with each other
    }
    fiber.complete = complete;
    fiber.operand = operand;
    fiber.mask = mask;
    fiber.place = place;
    warp.waiting |= bit;
    unsigned expected = mask & warp.alive;
    if ((warp.waiting & expected) == expected) release_lanes(warp, fiber.warp, expected);
    else suspend();
}

void release_lanes_if_all_there(unsigned warp_number) {
    Warp& warp = block.warps[warp_number];
    for (unsigned rest = warp.waiting; rest;) {
        unsigned expected = block.fibers[warp_number * 32 + __builtin_ctz(rest)].mask & warp.alive;
        if ((warp.waiting & expected) == expected) release_lanes(warp, warp_number, expected);
        rest &= ~expected;
    }
}

}  // namespace emulation
