/* How fast the store gives a model back, beside a plain mapped file: every tensor once, 1 MiB at a
 * time. `read` is only that; `load` is what a backend does: the bytes go, eight rows interleaved,
 * into fresh memory. All from the page cache; best of several alternating rounds, wall time and
 * processor time. usage: bench_store FILE.gguf STORE-FOLDER (made, and kept: a second run skips the
 * import). */
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "store/store.h"

enum { ROUNDS = 7, PIECE = 1 << 20, LANES = 8, UNIT = 16 };

static double cpu_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

struct timing {
    double wall_s, cpu_s;
    uint64_t n_bytes;
};

/* 16-byte units of eight rows side by side. */
static void interleave(uint8_t *dst, const uint8_t *src, size_t n)
{
    size_t row = n / LANES;
    for (size_t i = 0; i + UNIT <= row; i += UNIT)
        for (size_t r = 0; r < LANES; r++, dst += UNIT)
            memcpy(dst, src + r * row + i, UNIT);
}

static int load_tensor(struct model_file *f, const struct gguf_tensor *t, bool pack, struct err *e)
{
    static uint8_t piece[PIECE];
    uint8_t *packed = pack ? mem_pages(t->n_bytes) : NULL;
    int rc = pack && !packed ? err_set(e, ERR_MEMORY, "out of memory") : 0;
    for (uint64_t at = 0; at < t->n_bytes && !rc; at += PIECE) {
        size_t n = (size_t)MIN(t->n_bytes - at, (uint64_t)PIECE);
        rc = model_file_read(f, t, piece, at, n, e);
        if (pack && !rc)
            interleave(packed + at, piece, n);
    }
    mem_pages_free(packed, t->n_bytes);
    return rc;
}

/* Opens, reads everything, closes; keeps the better time. */
static int load(struct timing *best, struct store *s, const char *ref, bool pack, struct err *e)
{
    struct model_file *f;
    double cpu = cpu_s();
    uint64_t t0 = now_ns(), n_bytes = 0;
    if (model_file_open(&f, s, ref, e))
        return -1;
    const struct gguf *g = model_file_gguf(f);
    int rc = 0;
    for (uint64_t i = 0; i < g->n_tensors && !rc; i++) {
        rc = load_tensor(f, &g->tensors[i], pack, e);
        n_bytes += g->tensors[i].n_bytes;
    }
    model_file_close(f);
    double wall = (double)(now_ns() - t0) * 1e-9;
    cpu = cpu_s() - cpu;
    best->wall_s = best->n_bytes ? MIN(best->wall_s, wall) : wall;
    best->cpu_s = best->n_bytes ? MIN(best->cpu_s, cpu) : cpu;
    best->n_bytes = n_bytes;
    return rc;
}

static void print(const char *what, struct timing t)
{
    double gb = (double)t.n_bytes * 1e-9;
    printf("%-12s %.3f s %6.2f GB/s   processor %.3f s %6.2f GB/s\n", what, t.wall_s, gb / t.wall_s,
           t.cpu_s, gb / t.cpu_s);
}

static int compare(struct store *s, const char *path, bool pack, struct err *e)
{
    struct timing plain = {0}, stored = {0};
    for (int i = 0; i < ROUNDS; i++)
        if (load(&plain, s, path, pack, e) || load(&stored, s, "bench", pack, e))
            return -1;
    print(pack ? "load plain" : "read plain", plain);
    print(pack ? "load store" : "read store", stored);
    printf("store / plain: wall %.2f, processor %.2f\n", stored.wall_s / plain.wall_s,
           stored.cpu_s / plain.cpu_s);
    return 0;
}

static int bench(const char *path, const char *home, struct err *e)
{
    struct store *s;
    struct store_model m = {0};
    struct store_import in = {.path = path, .name = "bench"};
    if (store_open(&s, home, e))
        return -1;
    double cpu = cpu_s();
    uint64_t t0 = now_ns();
    int rc = 0;
    if (store_find(s, &m, "bench", NULL)) {
        rc = store_import(s, &m, &in, e);
        if (!rc)
            print("import",
                  (struct timing){(double)(now_ns() - t0) * 1e-9, cpu_s() - cpu, m.n_bytes});
    }
    if (!rc)
        rc = compare(s, path, false, e);
    if (!rc)
        rc = compare(s, path, true, e);
    store_close(s);
    return rc;
}

int main(int argc, char **argv)
{
    struct err e = {0};
    if (argc != 3) {
        fprintf(stderr, "usage: bench_store FILE.gguf STORE-FOLDER\n");
        return 2;
    }
    if (bench(argv[1], argv[2], &e)) {
        fprintf(stderr, "bench_store: %s\n", e.msg);
        return 1;
    }
    return 0;
}
