// Which threads touched which bytes, and whether a barrier lay between.
#pragma once

#include <cstddef>

namespace emulation {

enum Access : unsigned char { READ = 0, WRITE = 1, ATOMIC = 2 };  // flags; an atomic operation is WRITE | ATOMIC

// A stretch of memory that all accesses are noted for. At most SHADOWED of them: shared memory, and the arguments.
void watch_nothing();
void watch(const void* start, size_t bytes, bool shared);

void note_access(const void* address, size_t bytes, Access access, const void* instruction);

// cp.async: nobody may touch the destination until it has been waited for.
void note_copy_begun(const void* shared, size_t bytes);
void note_copy_done(const void* shared, size_t bytes);

// All before is ordered before all that follows: in the block, or in one warp.
void note_block_begins();
void note_block_barrier();
void note_warp_barrier(unsigned warp);

}  // namespace emulation
