// What kernel code and the runtime know of each other.
//
// Kernel code (a `.cu` file with emulated.h forced in) asks the runtime who it is, and tells it where it waits. The
// runtime (runtime/*.cpp, one library for all modules) knows nothing of a kernel but a function to call per thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector_types.h>

#define EMULATED_API __attribute__((visibility("default")))

namespace emulation {

// What a running thread can ask about itself.
struct Thread {
    uint3 index;    // threadIdx
    unsigned lane;  // within its warp
    unsigned warp;  // within its block
};

// A line of a kernel's source. The default arguments of the intrinsics fill it in.
struct Place {
    const char* file;
    int line;
};
#define EMULATED_PLACE const char *file = __builtin_FILE(), int line = __builtin_LINE()

EMULATED_API extern Thread* current;
EMULATED_API extern uint3 block_index;
EMULATED_API extern dim3 block_size, grid_size;

// All threads of the block meet. The three results are those of __syncthreads_count, _and and _or.
struct Votes {
    int count, all, any;
};
EMULATED_API Votes block_barrier(int predicate, Place place);

// The lanes of `mask` meet, each with an operand on its own stack; the last to arrive calls `complete` once with all
// operands, by lane. Stacks of waiting fibers stay where they are, so `complete` can read and write them directly.
using Complete = void (*)(unsigned mask, void* const operands[32]);
// Without `complete` they only wait, and their memory accesses are in order: __syncwarp. Shuffles and votes order none.
EMULATED_API void meet(unsigned mask, Complete complete, void* operand, Place place);

// End the launch: the kernel did what a GPU would not allow.
[[noreturn]] EMULATED_API void fail(Place place, const char* format, ...);

// cp.async, done as late as the program allows: until it is waited for, the destination holds NaN.
EMULATED_API void begin_copy(void* shared, const void* global, int bytes, int valid);
EMULATED_API void commit_copies();
EMULATED_API void wait_copies(int groups_left);

EMULATED_API void multiply_tiles(float* d, const unsigned* a, const unsigned* b, bool is_bfloat16, Place place);
EMULATED_API void load_tiles(unsigned* result, const void* row, bool transposed, Place place);

// wgmma: `sums` [columns / 2] += a b for the 64 rows of four warps; a and b are matrix descriptors.
EMULATED_API unsigned shared_address(const void* address);
EMULATED_API void issue_product(float* sums, int columns, uint64_t a, uint64_t b, bool is_bfloat16, Place place);
// The same with a [16, 16 of k] of each warp in registers and b by columns.
EMULATED_API void issue_product_of_registers(float* sums, int columns, const unsigned* a, uint64_t b, bool by_columns,
                                             bool is_bfloat16, Place place);
EMULATED_API void fence_products(Place place);
EMULATED_API void commit_products(Place place);
EMULATED_API void wait_products(int groups_left, Place place);
// fence.proxy.async: what this thread has written to shared memory is visible to wgmma.
EMULATED_API void fence_writes();

// Let the other threads run, and in a cooperative launch the other blocks: for a loop that looks whether something has
// happened. A launch in which nothing but that happens for a virtual second fails.
EMULATED_API void pause(Place place);
// A clock that goes on where nothing happens: 10 us each time that all threads of all blocks have paused.
EMULATED_API uint64_t nanoseconds();

// mbarriers in dynamic shared memory, for arrivals and the bytes of bulk copies. A copy lands when somebody has waited for
// it twice; until then its destination holds NaN.
EMULATED_API void init_mbarrier(const void* barrier, int count, Place place);
EMULATED_API void expect_bytes(const void* barrier, int bytes, Place place);
EMULATED_API void copy_bulk(void* shared, const void* global, int bytes, const void* barrier, Place place);
// Whether the phase of this parity has been completed; it pauses first.
EMULATED_API bool phase_completed(const void* barrier, unsigned parity, Place place);

// Blocks of a cluster: this one's number, all of them meeting, and an arrival at another's mbarrier.
EMULATED_API int cluster_rank();
EMULATED_API void cluster_barrier(Place place);
EMULATED_API void arrive(const void* barrier, int rank, Place place);

// A tensor map, as emulator/tensor_map.py makes it in place of the driver's: numbers of 2 bytes, the first dimension along
// memory, rows of the box swizzled by 128 bytes.
constexpr int MOST_DIMENSIONS = 4;
struct TensorMap {
    uint64_t address, dimensions, sizes[MOST_DIMENSIONS], strides[MOST_DIMENSIONS];  // strides in bytes; the first is 2
    uint32_t box[MOST_DIMENSIONS];
};
// A bulk copy of the box at `at` to the same place in each block of the cluster that `blocks` has a bit of; 0: in this one.
EMULATED_API void copy_tensor(void* shared, const void* map, const int* at, int dimensions, const void* barrier,
                              unsigned blocks, Place place);

// griddepcontrol.wait: what kernels before this one wrote is visible to this thread.
EMULATED_API void wait_for_results();

// An atomic operation on `bytes` at `address` is about to be done.
EMULATED_API void note_atomic(const void* address, size_t bytes);

// One access to global memory, as Python counts them (traffic.py has the same structure).
struct LoggedAccess {
    uint64_t instruction, offset;  // the address of the code; bytes from the extent's start
    uint32_t extent, block;
    uint16_t thread;
    uint8_t bytes, is_write;
    uint32_t unused;
};

// One launch, as Python asks for it (emulator.py has the same structure).
struct Extent {
    const void* start;
    size_t bytes;
    int is_result;  // of a kernel before this one in a step that is launched dependently
};
struct Launch {
    unsigned grid[3], block[3];
    size_t shared_bytes;  // dynamic shared memory
    int schedule;         // a value of Schedule (runtime/schedule.h)
    unsigned seed;
    const Extent* watched;  // where races in global memory are looked for
    size_t watched_number;
    int find_races;
    int dependent;  // may begin before the kernels before it have ended
    int cooperative;  // all blocks run together
    int cluster;      // so many run together, side by side
    LoggedAccess* log;  // of the first `log_capacity` accesses to what is watched; `*logged` counts all
    size_t log_capacity;
    size_t* logged;
};

// Run `kernel(arguments)` once for each thread of the grid. `anchor` is a thread_local of the module: all __shared__
// variables of the module lie beside it. Returns an error message or null.
EMULATED_API const char* run(const Launch* launch, void (*kernel)(void*), void* arguments, const void* anchor);

}  // namespace emulation

// `extern __shared__ unsigned char dynamic_shared[]` declares this pointer; see emulated.h.
EMULATED_API extern thread_local unsigned char (*emulated_dynamic_shared)[];
