// Who runs next. A thread runs until it has to wait; which of those that can go on follows is the schedule.
//
// A correct kernel gives the same bits under every schedule. A missing barrier shows under some: reads before writes
// when threads run in one order or the other, writes before reads when a warp runs far ahead of the rest.
#pragma once

#include "../include/runtime.h"
#include "fiber.h"

#include <vector>

namespace emulation {

enum Schedule { FORWARD, REVERSE, RANDOM, WARPS, WARPS_REVERSED };

struct Copy {
    void* to;
    const void* from;
    int bytes, valid, group;
    Place place;
};

struct Fiber : Thread {
    Context context;
    bool alive;            // in this block
    bool at_barrier;       // waits in __syncthreads
    Complete complete;     // waits for lanes of its warp: in this operation
    void* operand;
    unsigned mask;
    Place place;           // where it waited last
    int group;             // cp.async groups committed
    std::vector<Copy> copies;
};

struct Warp {
    unsigned ready, alive, waiting;  // a bit per lane: can run; has not ended; waits in meet()
};

struct Block {
    std::vector<Fiber> fibers;  // as many as the largest block so far
    std::vector<Warp> warps;
    char* stacks = nullptr;
    int threads = 0, alive = 0;
    int arrived = 0;  // at the barrier
    Votes votes{}, result{};
    Place barrier{};

    void (*kernel)(void*) = nullptr;
    void* arguments = nullptr;
    Schedule schedule = FORWARD;
    unsigned random = 1;

    Context caller;
    char error[2048];
};

extern Block block;

inline Fiber& self() { return static_cast<Fiber&>(*current); }

// Let others run until somebody makes this fiber ready again. Its ready bit is cleared by this.
void suspend();

void make_ready(Fiber& fiber);

// Things that may go on now that a thread has ended.
void release_barrier_if_all_there();
void release_lanes_if_all_there(unsigned warp);

// Fibers and stacks for `threads` threads, each at its beginning.
bool prepare_block(int threads);

// Run one block to its end. False if it failed; block.error says why.
bool run_block();

}  // namespace emulation
