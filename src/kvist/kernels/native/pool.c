/* A small thread pool and the memory that its workers claim: ranges of rows go to workers that sleep when no call comes. Knows nothing of what they compute.
 *
 * Workers are made on first use and again after a fork (a child inherits no threads). One call at a time uses the pool;
 * a second caller meanwhile runs alone on its own thread, which gives the same bits, because rows do not share sums.
 * Not OpenMP: its barriers wait for every thread, also one that has not woken (measured on two busy cores: a quarter of
 * the speed), while here whoever is awake takes the remaining ranges.
 */
#include "kvist.h"

#include <pthread.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <unistd.h>

enum { MOST_WORKERS = 63, LARGE_PAGE = 1 << 21 };

static pthread_mutex_t owner = PTHREAD_MUTEX_INITIALIZER;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t wake = PTHREAD_COND_INITIALIZER, idle = PTHREAD_COND_INITIALIZER;
static int workers, invited;
static atomic_int active;
static _Atomic uint64_t round_number;
static range_task task;
static void *context;
static int64_t count, step;
static atomic_llong next_start;
static int fork_hook;

static void work(void)
{
    int64_t start;
    while ((start = atomic_fetch_add(&next_start, step)) < count)
        task(context, start, start + step < count ? start + step : count);
}

/* A little patience before sleeping: waking a halted processor of a virtual machine takes longer than a small product, and calls
 * of one pass follow each other closely. Some 50 us, so that an idle process costs nothing and a busy machine little. */
enum { PATIENCE = 4000 };

INLINE void relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void await_round(uint64_t seen)
{
    for (int i = 0; i < PATIENCE && atomic_load_explicit(&round_number, memory_order_relaxed) == seen; i++) relax();
}

static void await_workers(void)
{
    for (int i = 0; i < PATIENCE && atomic_load_explicit(&active, memory_order_relaxed); i++) relax();
}

static void *worker(void *seat_as_pointer)
{
    int seat = (int)(intptr_t)seat_as_pointer;
    uint64_t seen = 0;
    pthread_mutex_lock(&lock);
    for (;;) {
        while (seen == round_number || seat >= invited) {
            seen = round_number;
            pthread_cond_wait(&wake, &lock);
        }
        seen = round_number;
        active++;
        pthread_mutex_unlock(&lock);
        work();
        pthread_mutex_lock(&lock);
        if (--active == 0) pthread_cond_signal(&idle);
        pthread_mutex_unlock(&lock);
        await_round(seen);
        pthread_mutex_lock(&lock);
    }
    return NULL;
}

static void after_fork(void)
{
    workers = invited = active = 0;
    pthread_mutex_init(&owner, NULL);
    pthread_mutex_init(&lock, NULL);
    pthread_cond_init(&wake, NULL);
    pthread_cond_init(&idle, NULL);
}

static void hire(int wanted)
{
    if (!fork_hook) fork_hook = pthread_atfork(NULL, NULL, after_fork) == 0;
    while (workers < wanted && workers < MOST_WORKERS) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, worker, (void *)(intptr_t)workers)) break;
        pthread_detach(thread);
        workers++;
    }
}

void *claim(int64_t bytes, int64_t *missing)
{
    int64_t whole = bytes > 0 ? (bytes + 63) / 64 * 64 : 64;
    void *memory = aligned_alloc(64, (size_t)whole);
    if (!memory) __atomic_store_n(missing, whole, __ATOMIC_RELAXED); /* several workers may say so at once */
    return memory;
}

void kvist_ask_large_pages(void *data, int64_t bytes)
{
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    uintptr_t first = ((uintptr_t)data + LARGE_PAGE - 1) / LARGE_PAGE * LARGE_PAGE, stop = ((uintptr_t)data + (uintptr_t)bytes) / LARGE_PAGE * LARGE_PAGE;
    if (first < stop) madvise((void *)first, stop - first, MADV_HUGEPAGE);
#else
    (void)data, (void)bytes;
#endif
}

void parallel_ranges(range_task run, void *with, int64_t total, int threads) { parallel_pieces(run, with, total, threads, 4); }

void parallel_pieces(range_task run, void *with, int64_t total, int threads, int pieces)
{
    if (total <= 0) return;
    if (threads <= 1 || total == 1 || pthread_mutex_trylock(&owner)) {
        run(with, 0, total);
        return;
    }
    pthread_mutex_lock(&lock);
    hire(threads - 1);
    task = run, context = with, count = total;
    int helpers = workers < threads - 1 ? workers : threads - 1;
    /* Several ranges a thread: a thread that loses its core to another program then delays one range only. */
    step = (total + pieces * (helpers + 1) - 1) / (pieces * (helpers + 1));
    atomic_store(&next_start, 0);
    invited = helpers;
    round_number++;
    pthread_cond_broadcast(&wake);
    pthread_mutex_unlock(&lock);
    work();
    pthread_mutex_lock(&lock);
    invited = 0; /* no range is left: a worker that has not woken yet (a busy machine) is not waited for */
    pthread_mutex_unlock(&lock);
    await_workers();
    pthread_mutex_lock(&lock);
    while (active) pthread_cond_wait(&idle, &lock);
    pthread_mutex_unlock(&lock);
    pthread_mutex_unlock(&owner);
}
