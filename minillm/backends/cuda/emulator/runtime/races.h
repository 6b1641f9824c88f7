// Which threads touched which bytes, and whether a barrier lay between.
#pragma once

#include "../include/runtime.h"
#include "scheduler.h"

#include <cstddef>

namespace emulation {

enum Access : unsigned char { READ = 0, WRITE = 1, ATOMIC = 2 };  // flags; an atomic operation is WRITE | ATOMIC

// A stretch of memory that all accesses are noted for. At most SHADOWED of them: shared memory, and the arguments.
void watch_nothing();
void watch(const void* start, size_t bytes, bool shared, bool is_result = false);

// From here on a thread that has not called wait_for_results() may neither read results nor write anywhere.
void watch_order();
// Note accesses to watched global memory, in the order of their doing.
void log_accesses(LoggedAccess* to, size_t capacity, size_t* number);
// Whether some thread has called it since.
bool has_waited();

void note_access(const void* address, size_t bytes, Access access, const void* instruction);

// cp.async: nobody may touch the destination until it has been waited for.
void note_copy_begun(const void* shared, size_t bytes);
void note_copy_done(const void* shared, size_t bytes);

// A bulk copy is about to begin, which overwrites what no wgmma may still read.
void note_bulk_copy(const void* shared, size_t bytes, const void* instruction);

// wgmma: nobody may write to what one reads until it has been waited for, and what it reads must be visible to it.
void note_product_begins(const void* shared, size_t bytes, const void* instruction);
void note_product_ends(const void* shared, size_t bytes);

// All before is ordered before all that follows: in the block, or in one warp.
void note_block_begins();
// Of the block that has run, to be given back when it runs on.
Epochs current_epochs();
void go_on_with(const Epochs& epochs);
void note_block_barrier();
void note_warp_barrier(unsigned warp);

}  // namespace emulation
