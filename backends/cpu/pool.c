/* Threads that run one function together. Between regions they spin for some microseconds and then
 * sleep in the kernel (futex), so an idle pool costs nothing. Owns its threads. */
#include "backends/cpu/cpu_internal.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { SPIN_ROUNDS = 4000 }; /* about 20 to 50 us of pause instructions */

struct pool {
    int32_t n_threads;
    size_t n_bytes; /* of this object */
    void (*fn)(void *ctx, int32_t thread);
    void *ctx;
    _Alignas(64) atomic_uint run_gen; /* one up for each pool_run; workers wait on it */
    _Alignas(64) atomic_uint gen;     /* one up for each barrier passed */
    _Alignas(64) atomic_int n_arrived;
    _Alignas(64) atomic_int n_sleepers;
    atomic_bool quit;
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

void pool_barrier(struct pool *p, void (*last)(void *ctx), void *ctx)
{
    unsigned old = atomic_load_explicit(&p->gen, memory_order_relaxed);
    if (atomic_fetch_add(&p->n_arrived, 1) + 1 < p->n_threads) {
        wait_change(p, &p->gen, old);
        return;
    }
    atomic_store_explicit(&p->n_arrived, 0, memory_order_relaxed);
    if (last)
        last(ctx);
    announce_change(p, &p->gen);
}

static void *worker_main(void *arg)
{
    struct worker *w = arg;
    struct pool *p = w->pool;
    for (unsigned seen = 0;;) {
        wait_change(p, &p->run_gen, seen);
        seen++;
        if (atomic_load(&p->quit))
            return NULL;
        p->fn(p->ctx, w->thread);
        pool_barrier(p, NULL, NULL);
    }
}

void pool_run(struct pool *p, void (*fn)(void *ctx, int32_t thread), void *ctx)
{
    p->fn = fn;
    p->ctx = ctx;
    if (p->n_threads > 1)
        announce_change(p, &p->run_gen);
    fn(ctx, 0);
    pool_barrier(p, NULL, NULL);
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
    if (n_threads > 1024)
        return err_set(e, ERR_USAGE, "%d threads asked for; 1024 is the most", n_threads);
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
    announce_change(p, &p->run_gen);
    for (int32_t i = 1; i <= p->n_started; i++)
        pthread_join(p->workers[i].id, NULL);
    mem_pages_free(p, p->n_bytes);
}
