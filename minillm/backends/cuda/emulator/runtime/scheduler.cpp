// Blocks, fibers and the order in which they run.
#include "scheduler.h"

#include "faults.h"
#include "races.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>

namespace emulation {

Thread* current;
uint3 block_index;
dim3 block_size, grid_size;
Block* block;

namespace {

bool failed;
uint64_t time_passed;

bool polls() {
    return std::any_of(block->warps.begin(), block->warps.end(), [](const Warp& warp) { return warp.polling != 0; });
}

// The lowest set bit above `after`, else the lowest of all; -1 if there is none. The other way round with `down`.
int following(unsigned bits, int after, bool down) {
    if (!bits) return -1;
    unsigned beyond = down ? (after > 0 ? bits & (0xffffffffu >> (32 - after)) : 0)
                           : (after < 31 ? bits & (0xffffffffu << (after + 1)) : 0);
    if (!beyond) beyond = bits;
    return down ? 31 - __builtin_clz(beyond) : __builtin_ctz(beyond);
}

// Whether `bits` has one beyond `after`, in the direction.
bool has_beyond(unsigned bits, int after, bool down) {
    if (down) return after > 0 && (bits & (0xffffffffu >> (32 - after)));
    return after < 31 && (bits & (0xffffffffu << (after + 1)));
}

// The next ready fiber after thread (warp, lane) in cyclic order, or null.
Fiber* next_after(int warp, int lane) {
    bool down = block->schedule == REVERSE || block->schedule == WARPS_REVERSED;
    bool stay = block->schedule == WARPS || block->schedule == WARPS_REVERSED;
    int warps = block->warps.size();
    unsigned here = block->warps[warp].ready;
    if (stay ? here != 0 : has_beyond(here, lane, down)) return &block->fibers[warp * 32 + following(here, lane, down)];
    int edge = down ? 32 : -1;
    for (int step = 1; step <= warps; step++) {
        int other = down ? warp - step : warp + step;
        other = other < 0 ? other + warps : other >= warps ? other - warps : other;
        if (unsigned ready = block->warps[other].ready) return &block->fibers[other * 32 + following(ready, edge, down)];
    }
    return nullptr;
}

Fiber* choose(const Fiber& from) {
    if (block->schedule != RANDOM) return next_after(from.warp, from.lane);
    block->random ^= block->random << 13, block->random ^= block->random >> 17, block->random ^= block->random << 5;
    return next_after((block->random >> 8) % block->warps.size(), block->random & 31);
}

// Leave the fiber that runs now, for another or for run_block().
void leave(Fiber& from, Fiber* to) {
    if (to == &from) return;
    current = to;
    switch_context(from.context, to ? to->context : block->caller);
}

void describe_deadlock() {
    char* text = block->error;
    char* end = block->error + sizeof block->error;
    text += snprintf(text, end - text, "block (%u, %u, %u) waits for ever:", block_index.x, block_index.y, block_index.z);
    int lanes = 0;
    const Meeting* meeting = nullptr;
    for (const Warp& warp : block->warps) {
        lanes += __builtin_popcount(warp.waiting);
        if (warp.waiting) meeting = &warp.meetings[warp.first[__builtin_ctz(warp.waiting)]];
    }
    if (block->arrived)
        text += snprintf(text, end - text, " %d threads in __syncthreads (%s:%d),", block->arrived, block->barrier.file,
                         block->barrier.line);
    if (lanes)
        text += snprintf(text, end - text, " %d threads for lanes of their warp (%s:%d, mask %08x),", lanes,
                         meeting->place.file, meeting->place.line, meeting->mask);
    snprintf(text, end - text, " %d threads have ended", block->threads - block->alive);
}

void end_of_thread(Fiber& fiber) {
    if (!fiber.copies.empty())
        fail_at(describe_instruction(fiber.copies[0].instruction), "a thread ended with this cp.async never waited for");
    fiber.alive = false;
    block->warps[fiber.warp].alive &= ~(1u << fiber.lane);
    block->alive--;
    end_products();
    if (!block->alive) end_bulk_copies();
    release_lanes_if_all_there(fiber.warp);
    release_barrier_if_all_there();
}

// What each fiber does: one thread of each block, for ever. So its stack is set up once.
void entry() {
    Fiber& fiber = self();
    for (;;) {
        block->kernel(block->arguments);
        end_of_thread(fiber);
        suspend();
    }
}

}  // namespace

void suspend() {
    Fiber& fiber = self();
    block->warps[fiber.warp].ready &= ~(1u << fiber.lane);
    Fiber* next = choose(fiber);
    if (!next && block->alive && !polls()) {
        describe_deadlock();
        failed = true;
    }
    leave(fiber, next);
}

void pause(Place place) {
    Fiber& fiber = self();
    block->poll = place;
    block->warps[fiber.warp].polling |= 1u << fiber.lane;
    block->warps[fiber.warp].ready &= ~(1u << fiber.lane);
    leave(fiber, choose(fiber));
}

uint64_t nanoseconds() { return ++time_passed; }

void pass_time() { time_passed += 10000; }

void make_ready(Fiber& fiber) { block->warps[fiber.warp].ready |= 1u << fiber.lane; }

namespace {

[[noreturn]] void stop(const char* where, const char* format, va_list arguments) {
    char* text = block->error;
    char* end = block->error + sizeof block->error;
    text += snprintf(text, end - text, "%s: ", where);
    text += vsnprintf(text, end - text, format, arguments);
    text = std::min(text, end);
    uint3 at = current->index;
    snprintf(text, end - text, " [block (%u, %u, %u), thread (%u, %u, %u)]", block_index.x, block_index.y, block_index.z,
             at.x, at.y, at.z);
    failed = true;
    leave(self(), nullptr);
    abort();  // a fiber that failed is never resumed
}

}  // namespace

void fail(Place place, const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    char where[512];
    snprintf(where, sizeof where, "%s:%d", place.file, place.line);
    stop(where, format, arguments);
}

void fail_at(const Text& where, const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    stop(where.characters, format, arguments);
}

bool prepare_block(int threads) {
    constexpr int MOST = 1024;
    if (!block->stacks) {
        block->stacks = allocate_stacks(MOST);
        if (!block->stacks) return false;
    }
    if (block->abandoned) block->fibers.clear();
    block->abandoned = failed = false;
    int before = block->fibers.size();
    if (before < threads) {
        block->fibers.reserve(MOST);  // they never move
        block->fibers.resize(threads);
        for (int i = before; i < threads; i++)
            prepare(block->fibers[i].context, block->stacks + i * (STACK_BYTES + GUARD_BYTES), i, entry);
    }
    block->threads = threads;
    block->warps.resize(threads / 32);
    for (int i = 0; i < threads; i++) {
        Fiber& fiber = block->fibers[i];
        fiber.lane = i % 32;
        fiber.warp = i / 32;
        fiber.index = {i % block_size.x, i / block_size.x % block_size.y, i / (block_size.x * block_size.y)};
    }
    return true;
}

void begin_block() {
    note_block_begins();
    for (Warp& warp : block->warps) warp.ready = warp.alive = 0xffffffffu, warp.waiting = warp.polling = 0;
    for (int i = 0; i < block->threads; i++) {
        Fiber& fiber = block->fibers[i];
        fiber.alive = true;
        fiber.barrier = 0;
        fiber.group = 0;
        fiber.waited = false;
        fiber.cluster_barriers = 0;
        fiber.copies.clear();
    }
    block->alive = block->threads;
    block->arrived = 0;
    block->barriers = block->cluster_barriers = 0;
    block->votes = {0, 1, 0};
    block->mbarriers.clear();
    begin_products();
}

bool run_block() {
    for (Warp& warp : block->warps) warp.ready |= warp.polling, warp.polling = 0;
    // As if the thread before the first had just ended; of a warp that stays, the last before it.
    bool down = block->schedule == REVERSE || block->schedule == WARPS_REVERSED;
    bool stay = block->schedule == WARPS || block->schedule == WARPS_REVERSED;
    int last = block->warps.size() - 1;
    Fiber* first = down ? next_after(stay ? last : 0, 0) : next_after(stay ? 0 : last, 31);
    if (block->schedule == RANDOM) first = choose(block->fibers[0]);
    current = first;
    switch_context(block->caller, first->context);
    current = nullptr;
    return !failed;
}

}  // namespace emulation
