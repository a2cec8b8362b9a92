/* What this machine can do at most, measured: bytes read per second and int8 multiply-adds per
 * second, by all threads together. The figures that `ingot bench` sets its own beside. */
#include "backends/cpu/cpu_internal.h"

#include <string.h>

enum { READ_BYTES = 512 << 20, PARTS = 128, PEAK_ROUNDS = 200 * 1000, REPEATS = 3 };

struct measure {
    const struct kernels *k;
    const uint8_t *mem;
    uint64_t sink;
};

static void read_part(void *ctx, int32_t part, int32_t thread)
{
    struct measure *m = ctx;
    const uint64_t *p = (const uint64_t *)(m->mem + (size_t)part * (READ_BYTES / PARTS));
    uint64_t sum[8] = {0};
    for (size_t i = 0; i < READ_BYTES / PARTS / 8; i += 8)
        for (size_t j = 0; j < 8; j++)
            sum[j] += p[i + j];
    for (size_t j = 1; j < 8; j++)
        sum[0] += sum[j];
    __atomic_fetch_add(&m->sink, sum[0], __ATOMIC_RELAXED);
}

static void multiply_part(void *ctx, int32_t part, int32_t thread)
{
    struct measure *m = ctx;
    m->k->int8_peak(PEAK_ROUNDS);
}

/* The best of some repeats of all parts by all threads, in seconds. */
static double best_seconds(struct pool *p, void (*part)(void *ctx, int32_t part, int32_t thread),
                           struct measure *m)
{
    struct pool_work w = {.task = part, .ctx = m, .n_tasks = PARTS};
    double best = 1e9;
    for (int i = 0; i < REPEATS; i++) {
        uint64_t t0 = now_ns();
        pool_run(p, &w);
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
        *read_bytes_s = READ_BYTES / best_seconds(p, read_part, &m);
        mem_pages_free(mem, READ_BYTES);
    }
    double macs = m.k->int8_peak(PEAK_ROUNDS);
    *int8_macs_s = macs * PARTS / best_seconds(p, multiply_part, &m);
    pool_free(p);
}
