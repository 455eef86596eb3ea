/* A small thread pool, the memory that its workers claim, and what waiting threads read ahead. Knows nothing of what they compute.
 *
 * Ranges of rows go to workers that sleep when no call comes. Workers are made on first use and again after a fork (a child
 * inherits no threads). One call at a time uses the pool; a second caller meanwhile runs alone on its own thread, which gives the
 * same bits, because rows do not share sums.
 * Not OpenMP: its barriers wait for every thread, also one that has not woken (measured on two busy cores: a quarter of
 * the speed), while here whoever is awake takes the remaining ranges.
 */
#include "kvist.h"

#include <pthread.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <unistd.h>

enum { MOST_WORKERS = 63, LARGE_PAGE = 1 << 21 };

/* Reading ahead. Weights come in the same order for every token, so which one follows another is remembered, and threads that wait
 * ask for the next ones: while a row is normed, attention runs, Python works. A wrong guess asks for bytes that nobody reads. */
enum { ROUTES = 1 << 10, NEXT = 8, MOST_AHEAD = 1 << 22, STEP = 1 << 10 };

typedef struct { _Atomic uintptr_t from, to; atomic_llong bytes; } route; /* written by callers at once: then a guess is wrong */
static route routes[ROUTES];
static struct { _Atomic uintptr_t at, stop; } ahead[NEXT];
static _Atomic uintptr_t newest;
static atomic_int asking = NEXT;

static route *route_from(uintptr_t place) { return routes + (place >> 6) * 0x9e3779b97f4a7c15u / (UINT64_MAX / ROUTES + 1); }

void reads_weight(const void *data, int64_t bytes)
{
    uintptr_t place = (uintptr_t)data, before = atomic_exchange(&newest, place);
    route *r = route_from(before);
    r->from = before;
    r->to = place;
    r->bytes = bytes;
    atomic_store(&asking, NEXT);
    int64_t left = MOST_AHEAD;
    for (int n = 0; n < NEXT; n++) {
        r = route_from(place);
        int64_t some = r->from != place || left <= 0 ? 0 : r->bytes < left ? r->bytes : left;
        place = r->to, left -= some;
        ahead[n].at = place;
        ahead[n].stop = place + (uintptr_t)some;
        if (!some) place = 0;
    }
    atomic_store(&asking, 0);
}

/* A little of what comes next into the second cache; 0 if there is nothing left to ask for. */
static int ask_ahead(void)
{
    int n = atomic_load_explicit(&asking, memory_order_relaxed);
    if (n >= NEXT) return 0;
    uintptr_t at = atomic_fetch_add_explicit(&ahead[n].at, STEP, memory_order_relaxed);
    if (at >= ahead[n].stop) atomic_compare_exchange_strong(&asking, &n, n + 1);
    else
        for (int64_t i = 0; i < STEP; i += 64) __builtin_prefetch((const char *)at + i, 0, 2);
    return 1;
}

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
    for (int i = 0; i < PATIENCE && atomic_load_explicit(&round_number, memory_order_relaxed) == seen;)
        if (!ask_ahead()) relax(), i++;
}

static void await_workers(void)
{
    for (int i = 0; i < PATIENCE && atomic_load_explicit(&active, memory_order_relaxed);)
        if (!ask_ahead()) relax(), i++;
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
