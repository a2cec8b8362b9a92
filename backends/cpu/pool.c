/* Threads that take tasks from one counter. Between phases they spin for some microseconds and then
 * sleep in the kernel (futex), so an idle pool costs nothing. Owns its threads. */
#include "backends/cpu/cpu_internal.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <sys/syscall.h>
#include <unistd.h>

enum {
    SPIN_ROUNDS = 2000, /* some 20 to 50 us of pause instructions */
    TASK_BITS = 20,
    MAX_THREADS = 1024,
};

_Static_assert(POOL_MAX_TASKS + 2 * MAX_THREADS <= 1 << TASK_BITS, "late claims do not overflow");

/* The claim word: phase number << 40 | tasks of the phase << 20 | next task. Taking a task is one
 * addition; since the phase's size comes with it, a thread that was held up between two
 * instructions can never take a task of a phase that it does not know. */
struct pool {
    int32_t n_threads;
    size_t n_bytes;        /* of this object */
    struct pool_work work; /* read by holders of a task only; so is n_tasks */
    int32_t n_tasks;
    _Alignas(64) atomic_uint_fast64_t claim;
    _Alignas(64) atomic_int n_done;
    _Alignas(64) atomic_uint phase; /* one up for each phase; what sleepers wait on */
    atomic_bool running;
    atomic_bool quit;
    _Alignas(64) atomic_int n_sleepers;
    int32_t n_started;
    struct worker {
        struct pool *pool;
        int32_t thread;
        pthread_t id;
    } workers[];
};

static void futex_wait(atomic_uint *p, unsigned value)
{
    syscall(SYS_futex, p, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

static void futex_wake_all(atomic_uint *p)
{
    syscall(SYS_futex, p, FUTEX_WAKE_PRIVATE, 1 << 30, NULL, NULL, 0);
}

static void cpu_relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Wait until *p differs from `old`. A sleeper announces itself before it looks again, and a waker
 * looks for sleepers after it has changed *p (both sequentially consistent), so none is missed. */
static void wait_change(struct pool *p, atomic_uint *gen, unsigned old)
{
    for (int i = 0; i < SPIN_ROUNDS; i++) {
        if (atomic_load_explicit(gen, memory_order_acquire) != old)
            return;
        cpu_relax();
    }
    atomic_fetch_add(&p->n_sleepers, 1);
    while (atomic_load(gen) == old)
        futex_wait(gen, old);
    atomic_fetch_sub(&p->n_sleepers, 1);
}

static void announce_change(struct pool *p, atomic_uint *gen)
{
    atomic_fetch_add(gen, 1);
    if (atomic_load(&p->n_sleepers))
        futex_wake_all(gen);
}

/* Open a phase of n tasks; 0 ends the work. By the only thread that holds a task, or the caller of
 * pool_run while nothing runs. */
static void open_phase(struct pool *p, int32_t n)
{
    CHECK(n >= 0 && n <= POOL_MAX_TASKS);
    uint64_t old = atomic_load_explicit(&p->claim, memory_order_relaxed);
    uint64_t number = (old >> 2 * TASK_BITS) + 1;
    p->n_tasks = n;
    atomic_store_explicit(&p->n_done, 0, memory_order_relaxed);
    if (!n)
        atomic_store(&p->running, false);
    atomic_store(&p->claim, number << 2 * TASK_BITS | (uint64_t)n << TASK_BITS);
    announce_change(p, &p->phase);
}

static bool take_task(int32_t *task, struct pool *p)
{
    const uint64_t mask = (1u << TASK_BITS) - 1;
    uint64_t c = atomic_load_explicit(&p->claim, memory_order_acquire);
    if ((c & mask) >= (c >> TASK_BITS & mask))
        return false; /* looked at before it is added to, so that it does not grow without bound */
    c = atomic_fetch_add(&p->claim, 1);
    *task = (int32_t)(c & mask);
    return (c & mask) < (c >> TASK_BITS & mask);
}

static void do_task(struct pool *p, int32_t task, int32_t thread)
{
    int32_t n_tasks = p->n_tasks; /* once this task is counted the phase may be another */
    p->work.task(p->work.ctx, task, thread);
    if (atomic_fetch_add(&p->n_done, 1) + 1 == n_tasks)
        open_phase(p, p->work.next ? p->work.next(p->work.ctx) : 0);
}

static void *worker_main(void *arg)
{
    struct worker *w = arg;
    struct pool *p = w->pool;
    while (!atomic_load(&p->quit)) {
        unsigned seen = atomic_load(&p->phase);
        int32_t task;
        if (take_task(&task, p))
            do_task(p, task, w->thread);
        else if (!atomic_load(&p->quit))
            wait_change(p, &p->phase, seen);
    }
    return NULL;
}

void pool_run(struct pool *p, const struct pool_work *w)
{
    if (!w->n_tasks)
        return;
    p->work = *w;
    atomic_store(&p->running, true);
    open_phase(p, w->n_tasks);
    for (;;) {
        unsigned seen = atomic_load(&p->phase);
        int32_t task;
        if (take_task(&task, p))
            do_task(p, task, 0);
        else if (!atomic_load(&p->running))
            return;
        else
            wait_change(p, &p->phase, seen);
    }
}

int32_t pool_threads(const struct pool *p)
{
    return p->n_threads;
}

static int32_t threads_allowed(void)
{
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0 && CPU_COUNT(&set) > 0)
        return CPU_COUNT(&set);
    long n = sysconf(_SC_NPROCESSORS_ONLN);
    return n > 0 ? (int32_t)n : 1;
}

int pool_new(struct pool **out, int32_t n_threads, struct err *e)
{
    if (n_threads <= 0)
        n_threads = threads_allowed();
    if (n_threads > MAX_THREADS)
        return err_set(e, ERR_USAGE, "%d threads asked for; %d is the most", n_threads,
                       MAX_THREADS);
    size_t bytes = sizeof(struct pool) + (size_t)n_threads * sizeof(struct worker);
    struct pool *p = mem_pages(bytes); /* for its alignment: cache lines must not be shared */
    if (!p)
        return err_set(e, ERR_MEMORY, "out of memory for %d threads", n_threads);
    p->n_bytes = bytes;
    p->n_threads = n_threads;
    for (int32_t i = 1; i < n_threads; i++) {
        p->workers[i] = (struct worker){.pool = p, .thread = i};
        if (pthread_create(&p->workers[i].id, NULL, worker_main, &p->workers[i])) {
            pool_free(p);
            return err_set(e, ERR_IO, "cannot start thread %d of %d; use fewer (--threads)", i + 1,
                           n_threads);
        }
        p->n_started++;
    }
    *out = p;
    return 0;
}

void pool_free(struct pool *p)
{
    if (!p)
        return;
    atomic_store(&p->quit, true);
    announce_change(p, &p->phase);
    for (int32_t i = 1; i <= p->n_started; i++)
        pthread_join(p->workers[i].id, NULL);
    mem_pages_free(p, p->n_bytes);
}
