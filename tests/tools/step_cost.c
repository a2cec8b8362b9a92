/* What one step of a model costs on the CPU by its rows and by the tokens that they look at:
 * medians of some runs, for one sequence of n rows and for n sequences of one row each. step_cost
 * MODEL [MAX_DEPTH [THREADS]] */
#include "engine/engine_internal.h"

#include <stdio.h>
#include <stdlib.h>

enum { MAX_ROWS = 128, REPS = 5 };

static struct engine *en;
static int32_t n_seq_pages;

/* Pages of random bits that are small numbers in every plain type. */
static int fill_pages(struct err *e)
{
    uint64_t n = en->ld.be->kv_page_bytes(en->ld.exec), x = 1;
    uint16_t *page = calloc(1, n);
    for (int32_t p = 0; p < en->pool.n_pages; p++) {
        for (uint64_t i = 0; i < n / 2; i++) {
            x ^= x << 13, x ^= x >> 7, x ^= x << 17;
            page[i] = (uint16_t)(0x3000 | (x & 0x83ff));
        }
        if (en->ld.be->kv_write(en->ld.exec, p, page, e)) {
            free(page);
            return -1;
        }
    }
    free(page);
    return 0;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double step_ms(int32_t n_seqs, int32_t n_rows, int32_t depth, struct err *e)
{
    static int32_t ids[MAX_ROWS], pages[1 << 16];
    struct batch_seq seqs[MAX_ROWS];
    int32_t want = n_seqs * n_rows - 1;
    double ms[REPS];
    for (int32_t i = 0; i < en->pool.n_pages; i++)
        pages[i] = i;
    for (int32_t s = 0; s < n_seqs; s++)
        seqs[s] = (struct batch_seq){s * n_rows, n_rows, depth, pages + s * n_seq_pages};
    struct batch b = {.ids = ids,
                      .n_rows = n_seqs * n_rows,
                      .seqs = seqs,
                      .n_seqs = n_seqs,
                      .want = &want,
                      .n_want = 1,
                      .logits = en->logits};
    for (int r = 0; r < REPS; r++) {
        uint64_t start = now_ns();
        if (en->ld.be->run(en->ld.exec, &b, e))
            return -1;
        ms[r] = (double)(now_ns() - start) / 1e6;
    }
    qsort(ms, REPS, sizeof *ms, by_value);
    return ms[REPS / 2];
}

static int table(const char *name, bool many, int32_t max_depth, struct err *e)
{
    static const int32_t rows[] = {1, 2, 4, 8, 32, 128};
    printf("%-14s", name);
    for (size_t i = 0; i < ARRAY_LEN(rows) && (!many || rows[i] <= 4); i++)
        printf("%9d", rows[i]);
    printf("   ms a step\n");
    for (int32_t depth = 0; depth <= max_depth; depth = depth ? depth * 4 : max_depth / 64) {
        printf("depth %8d", depth);
        for (size_t i = 0; i < ARRAY_LEN(rows) && (!many || rows[i] <= 4); i++) {
            double ms = many ? step_ms(rows[i], 1, depth, e) : step_ms(1, rows[i], depth, e);
            if (ms < 0)
                return -1;
            printf("%9.1f", ms);
            fflush(stdout);
        }
        printf("\n");
    }
    return 0;
}

int main(int argc, char **argv)
{
    struct err e = {0};
    struct model_file *f = NULL;
    int32_t depth = argc > 2 ? atoi(argv[2]) : 8192;
    if (argc < 2 || depth < 64)
        return 2;
    n_seq_pages = (depth + MAX_ROWS) / KV_PAGE_TOKENS + 1;
    struct engine_config c = {.n_ctx = (uint32_t)(n_seq_pages * KV_PAGE_TOKENS),
                              .n_seqs = 4,
                              .n_threads = argc > 3 ? atoi(argv[3]) : 0,
                              .prefix_ram_bytes = 1,
                              .kv_pages = (uint32_t)n_seq_pages * 4};
    int rc = model_file_open(&f, NULL, argv[1], &e) ||
             engine_open_stepped(&en, f, &c, &backend_cpu, &e) || fill_pages(&e) ||
             table("one, rows", false, depth, &e) || table("sequences", true, depth, &e);
    if (rc)
        fprintf(stderr, "step_cost: %s\n", e.msg);
    engine_close(en);
    model_file_close(f);
    return rc ? 1 : 0;
}
