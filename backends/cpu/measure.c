/* What this machine can do at most, measured: bytes read per second and int8 multiply-adds per
 * second, by all threads together. The figures that `ingot bench` sets its own beside. */
#include "backends/cpu/cpu_internal.h"

#include <string.h>

enum { READ_BYTES = 512 << 20, PEAK_ROUNDS = 20 * 1000 * 1000, REPEATS = 3 };

struct measure {
    const struct kernels *k;
    const uint8_t *mem;
    size_t part; /* bytes of one thread */
    double macs; /* of thread 0 */
    uint64_t sink;
};

static void read_part(void *ctx, int32_t thread)
{
    struct measure *m = ctx;
    const uint64_t *p = (const uint64_t *)(m->mem + (size_t)thread * m->part);
    uint64_t sum[8] = {0};
    for (size_t i = 0; i + 8 <= m->part / 8; i += 8)
        for (size_t j = 0; j < 8; j++)
            sum[j] += p[i + j];
    for (size_t j = 1; j < 8; j++)
        sum[0] += sum[j];
    __atomic_fetch_add(&m->sink, sum[0], __ATOMIC_RELAXED);
}

static void multiply(void *ctx, int32_t thread)
{
    struct measure *m = ctx;
    double macs = m->k->int8_peak(PEAK_ROUNDS);
    if (thread == 0)
        m->macs = macs;
}

/* The best of some repeats of fn by all threads, in seconds. */
static double best_seconds(struct pool *p, void (*fn)(void *ctx, int32_t thread), struct measure *m)
{
    double best = 1e9;
    for (int i = 0; i < REPEATS; i++) {
        uint64_t t0 = now_ns();
        pool_run(p, fn, m);
        best = MIN(best, (double)(now_ns() - t0) * 1e-9);
    }
    return best;
}

void cpu_measure(double *read_bytes_s, double *int8_macs_s, int32_t n_threads)
{
    struct measure m = {0};
    struct pool *p;
    *read_bytes_s = *int8_macs_s = 0;
    if (kernels_choose(&m.k, NULL) || pool_new(&p, n_threads, NULL))
        return;
    uint8_t *mem = mem_pages(READ_BYTES);
    if (mem) {
        memset(mem, 1, READ_BYTES); /* real pages, else zeros would come from one */
        m.mem = mem;
        m.part = READ_BYTES / (size_t)pool_threads(p) / 64 * 64;
        *read_bytes_s = (double)m.part * pool_threads(p) / best_seconds(p, read_part, &m);
        mem_pages_free(mem, READ_BYTES);
    }
    double s = best_seconds(p, multiply, &m);
    *int8_macs_s = m.macs * pool_threads(p) / s;
    pool_free(p);
}
