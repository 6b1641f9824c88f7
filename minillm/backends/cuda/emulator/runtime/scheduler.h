// Who runs next. A thread runs until it has to wait; which of those that can go on follows is the schedule.
//
// A correct kernel gives the same bits under every schedule. A missing barrier shows under some: reads before writes
// when threads run in one order or the other, writes before reads when a warp runs far ahead of the rest.
#pragma once

#include "../include/runtime.h"
#include "fiber.h"

#include <map>
#include <vector>

namespace emulation {

enum Schedule { FORWARD, REVERSE, RANDOM, WARPS, WARPS_REVERSED };

struct Copy {
    void* to;
    const void* from;
    int bytes, valid, group;
    const void* instruction;
};

struct Fiber : Thread {
    Context context;
    bool alive;            // in this block
    unsigned barrier;      // the number of the last barrier it came to
    int group;             // cp.async groups committed
    bool waited;           // for the results of the kernels before this one
    unsigned cluster_barriers;  // that it has come to
    std::vector<Copy> copies;
};

// What the lanes of a mask wait for.
struct Meeting {
    unsigned mask;
    Complete complete;
    Place place;
};

struct Warp {
    unsigned ready, alive, waiting;  // a bit per lane: can run; has not ended; waits in meet()
    unsigned polling;                // likewise: looks again when nobody else of its block can run
    unsigned char first[32];         // by waiting lane: the first lane that came to its meeting
    Meeting meetings[32];            // by that lane
    void* operands[32];
};

// An mbarrier, and the bulk copies that it counts; what is beyond the valid bytes becomes zeros.
struct BulkCopy {
    void* to;
    const void* from;
    int bytes, valid;
};
struct Barrier {
    int count, arrivals_left;
    long pending_bytes = 0;
    unsigned phase = 0;  // completed so far
    bool awaited = false;
    std::vector<BulkCopy> copies;
    Place place;
};

// What races.cpp keeps of a block that is not running.
struct Epochs {
    uint32_t epoch, warp_epochs[32], first_of_block, block_number;
};

struct Block {
    uint3 index{};
    unsigned char* dynamic_memory = nullptr;  // all of a block's, and the red zone after it
    std::vector<char> statics;                // its __shared__ variables, while another block runs
    std::map<const void*, Barrier> mbarriers;  // by address
    Epochs epochs{};
    bool abandoned = false;  // a launch failed: its stacks hold what was left
    Place poll{};            // where a thread last looked whether something has happened

    std::vector<Fiber> fibers;  // as many as the largest block so far
    std::vector<Warp> warps;
    char* stacks = nullptr;
    int threads = 0, alive = 0;
    int arrived = 0;        // at the barrier
    unsigned barriers = 0;  // completed
    unsigned cluster_barriers = 0;  // that all its threads have come to
    Votes votes{}, result{};
    Place barrier{};

    void (*kernel)(void*) = nullptr;
    void* arguments = nullptr;
    Schedule schedule = FORWARD;
    unsigned random = 1;

    Context caller;
    char error[2048];
};

extern Block* block;
extern unsigned cluster_size;

// The instruction that called the function this stands in.
#define EMULATED_CALLER (static_cast<const char*>(__builtin_return_address(0)) - 1)

inline Fiber& self() { return static_cast<Fiber&>(*current); }

// Let others run until somebody makes this fiber ready again. Its ready bit is cleared by this.
void suspend();

void make_ready(Fiber& fiber);

// Things that may go on now that a thread has ended.
void release_barrier_if_all_there();
void release_lanes_if_all_there(unsigned warp);

// Fibers and stacks for `threads` threads, each at its beginning.
bool prepare_block(int threads);

// Whether an address is in the dynamic shared memory of the launch, or in a __shared__ variable.
bool in_shared_memory(const void* address);

// Block `rank` of the cluster that runs, and the address there that is at the same place as one in this block's dynamic
// shared memory.
Block& of_cluster(int rank, Place place);
void* same_place(const Block& other, const void* address);

// The address that the hardware would have for one in the dynamic shared memory, and back.
void* shared_memory_at(unsigned address);

// Products of warpgroups: none is under way when a block begins, nor when one of its threads ends.
void begin_products();
void end_products();

// Where the lane that runs now meets others.
Place meeting_place();

// Set all threads to their beginning.
void begin_block();

// Run the block that `block` names until all of its threads have ended or poll. False if it failed; block->error says
// why.
bool run_block();

// Nothing but polls has happened in any block: time passes.
void pass_time();

// The end of a block whose bulk copies have all landed, else a failure.
void end_bulk_copies();

}  // namespace emulation
