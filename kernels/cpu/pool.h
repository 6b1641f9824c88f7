/* Programs and the thread pool that runs them.
 *
 * A program is an array of launches. A launch is a kernel, its arguments, and the number of shares its work is split
 * into; any worker may do any share, in any order. Kernels of one program run one after the other.
 */
#ifndef MINILLM_POOL_H
#define MINILLM_POOL_H
#include <stdatomic.h>
#include <stdint.h>

/* Does one share of a launch. `worker` numbers the thread, for scratch memory of its own. */
typedef void kernel(const void *arguments, int64_t share, int64_t shares, int64_t worker);

typedef struct {
    kernel *run;
    const void *arguments;
    int64_t shares;
    int64_t ended;        /* out, if the program is timed: ns of CLOCK_MONOTONIC */
    _Alignas(64) atomic_int_fast64_t taken; /* shares that a worker has begun ... */
    _Alignas(64) atomic_int_fast64_t done;  /* ... and finished */
} launch;

/* Begin and end of one share of `items`. Later shares are smaller (of four: 7, 5, 3 and 1 sixteenths), so that workers
 * of different speeds end at nearly the same time. */
static inline void share_of(int64_t items, int64_t share, int64_t shares, int64_t *first, int64_t *last) {
    int64_t left = shares - share, rest = left - 1, whole = shares * shares;
    *first = items - (items * left * left + whole - 1) / whole;
    *last = items - (items * rest * rest + whole - 1) / whole;
}

/* Run a program on the calling thread and up to `workers` - 1 helpers. */
void run_program(launch *program, int64_t length, int64_t workers, int64_t timed);
#endif
