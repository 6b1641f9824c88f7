/* The thread pool: the calling thread, and helpers that spin briefly after a program and then sleep.
 *
 * Each worker takes the next free share of a launch, and goes on to the next launch when all shares of this one are
 * done. So a program completes with any number of workers, and a slower core does less.
 *
 * A helper spins for about the time between two decode steps, then sleeps on a condition variable. Within a program
 * workers wait for each other by spinning, for longer than the difference of two shares in a decode step takes, and
 * then by short sleeps, which leave the core to other processes. If the caller slept for a good part of a program, long
 * each time, other processes hold the cores: programs then run on its thread alone for a while, since every launch would
 * wait for a worker that is not scheduled.
 *
 * A forked child has none of its parent's threads and begins without helpers. While one thread's program uses the
 * helpers, programs of other threads run alone.
 *
 * On Windows there are neither forks nor signals; winpthreads has the rest.
 */
#define _GNU_SOURCE
#include "pool.h"
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <time.h>

enum {
    MOST_HELPERS = 255,
    PATIENCE = 10000,    /* polls before a worker that waits for others begins to sleep: 150 to 500 us */
    IDLE = 2 * PATIENCE, /* polls of a helper for the next program before it sleeps */
    NAP = 20000,         /* ns of a short sleep; the system adds about 50 us */
    NAP_TAKES = 70000,   /* ns */
    LATE = 10,           /* short sleeps of the caller in one wait that show a worker without a core, ... */
    LATE_SHARE = 16      /* ... if they take so large a part of a program's time, 1/16: shares differ in length */
};
static const int64_t SHORTEST = 20000000, LONGEST = 640000000; /* ns for which programs then run alone */

static pthread_mutex_t in_use = PTHREAD_MUTEX_INITIALIZER; /* held by the thread whose program has the helpers */
static pthread_mutex_t guard = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t bell = PTHREAD_COND_INITIALIZER;
static int64_t helpers; /* threads started */
static int64_t alone_for = 20000000;
static atomic_int_fast64_t alone_until; /* also read by threads that have no turn */

/* The program that helpers may join: its turn is odd while it is open. */
static atomic_int_fast64_t turn, inside, sleeping;
static launch *open_program;
static int64_t open_length, open_workers;

static int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static inline void pause_briefly(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Wait until a counter has a value. Returns the number of short sleeps, 0 if they were fewer than LATE. What a helper
 * does, counting itself `inside` and then reading `turn`, and what the caller does, changing `turn` and then reading
 * `inside`, need one order for all threads: sequential consistency, not only what was written before. */
static int64_t wait_for(atomic_int_fast64_t *counter, int64_t value) {
    int64_t naps = 0;
    for (int64_t polls = 0; atomic_load(counter) != value; polls++) {
        if (polls < PATIENCE) {
            pause_briefly();
        } else {
            nanosleep(&(struct timespec){0, NAP}, NULL);
            naps++;
        }
    }
    return naps < LATE ? 0 : naps;
}

/* One worker's part of a program. Returns the number of short sleeps, those of long waits. */
static int64_t work(launch *program, int64_t length, int64_t worker, bool timed) {
    int64_t naps = 0;
    for (launch *one = program; one < program + length; one++) {
        int64_t share;
        while ((share = atomic_fetch_add_explicit(&one->taken, 1, memory_order_relaxed)) < one->shares) {
            one->run(one->arguments, share, one->shares, worker);
            atomic_fetch_add_explicit(&one->done, 1, memory_order_release);
        }
        naps += wait_for(&one->done, one->shares);
        if (timed && worker == 0) one->ended = now();
    }
    return naps;
}

static void *help(void *number) {
    int64_t worker = (int64_t)(intptr_t)number, seen = 0;
    for (int64_t polls = 0;;) {
        int64_t current = atomic_load(&turn);
        if (current == seen || current % 2 == 0) {
            if (++polls < IDLE) {
                pause_briefly();
                continue;
            }
            pthread_mutex_lock(&guard);
            atomic_fetch_add(&sleeping, 1);
            while (atomic_load(&turn) == seen || atomic_load(&turn) % 2 == 0) pthread_cond_wait(&bell, &guard);
            atomic_fetch_sub(&sleeping, 1);
            pthread_mutex_unlock(&guard);
            continue;
        }
        seen = current;
        polls = 0;
        atomic_fetch_add(&inside, 1);
        if (atomic_load(&turn) == current && worker < open_workers) /* else it may be over by now */
            work(open_program, open_length, worker, false);
        atomic_fetch_sub(&inside, 1);
    }
    return NULL;
}

#if !defined(_WIN32)
/* A forked child has none of the helpers, nor the thread that held a lock. */
static void forget_helpers(void) {
    pthread_mutex_init(&in_use, NULL);
    pthread_mutex_init(&guard, NULL);
    pthread_cond_init(&bell, NULL);
    helpers = 0, alone_for = SHORTEST;
    atomic_store(&alone_until, 0);
    atomic_store(&turn, 0), atomic_store(&inside, 0), atomic_store(&sleeping, 0);
}

__attribute__((constructor)) static void watch_forks(void) {
    pthread_atfork(NULL, NULL, forget_helpers);
}
#endif

/* Start helpers until there are `count`; fewer if the system refuses threads. They receive no signals. */
static void start_helpers(int64_t count) {
    if (helpers >= count) return;
#if !defined(_WIN32)
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
#endif
    for (; helpers < count && helpers < MOST_HELPERS; helpers++) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, help, (void *)(intptr_t)(helpers + 1))) break;
        pthread_detach(thread);
    }
#if !defined(_WIN32)
    pthread_sigmask(SIG_SETMASK, &before, NULL);
#endif
}

void run_program(launch *program, int64_t length, int64_t workers, int64_t timed) {
    for (launch *one = program; one < program + length; one++) {
        atomic_store_explicit(&one->taken, 0, memory_order_relaxed);
        atomic_store_explicit(&one->done, 0, memory_order_relaxed);
    }
    bool alone = workers <= 1 || now() < atomic_load_explicit(&alone_until, memory_order_relaxed);
    if (alone || pthread_mutex_trylock(&in_use)) {
        work(program, length, 0, timed);
        return;
    }
    start_helpers(workers - 1);
    open_program = program, open_length = length, open_workers = workers;
    int64_t began = now();
    atomic_fetch_add(&turn, 1);
    if (atomic_load(&sleeping)) {
        pthread_mutex_lock(&guard);
        pthread_cond_broadcast(&bell);
        pthread_mutex_unlock(&guard);
    }
    int64_t naps = work(program, length, 0, timed);
    atomic_fetch_add(&turn, 1); /* closes the program to further helpers */
    naps += wait_for(&inside, 0);
    if (naps * NAP_TAKES > (now() - began) / LATE_SHARE) {
        atomic_store_explicit(&alone_until, now() + alone_for, memory_order_relaxed);
        alone_for = 2 * alone_for < LONGEST ? 2 * alone_for : LONGEST;
    } else if (alone_for > SHORTEST) {
        alone_for /= 2;
    }
    pthread_mutex_unlock(&in_use);
}
