/* Times the matmul kernels of every ISA level here, one thread, in processor time (so that a busy
 * machine disturbs little): 128 rows against the level's own int8 peak in registers, and one row in
 * bytes of weights a second, from the cache. Repacking speed beside. Then attention with each KV
 * type, one row and many of a prompt, and how fast rows are written. */
#include "backends/cpu/cpu_internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { N_IN = 2048, N_OUT = 512, N_ROWS = 128, N_BLOCKS = N_IN / 32 + 1, REPEATS = 9 };

struct bench {
    const struct kernels *k;
    struct weight w;
    struct act act;
    uint8_t *blocks;
    size_t row_bytes;
    float *out;
};

static double cpu_seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static float noise(uint32_t *state)
{
    *state = *state * 1664525u + 1013904223u;
    return (float)(int32_t)*state / 2147483648.0f;
}

static void *need(size_t n)
{
    void *p = calloc(1, n);
    CHECK(p);
    return p;
}

static void make_weight(struct bench *b, uint32_t type)
{
    const struct gguf_dtype_info *t = gguf_dtype_find(type);
    uint32_t rng = type + 1;
    float row[N_IN];
    b->row_bytes = N_IN / t->block_len * (size_t)t->block_bytes;
    b->blocks = need(N_OUT * b->row_bytes);
    for (int r = 0; r < N_OUT; r++) {
        for (int i = 0; r < 16 && i < N_IN; i++)
            row[i] = noise(&rng);
        if (r < 16)
            t->from_f32(b->blocks + (size_t)r * b->row_bytes, row, N_IN);
        else
            memcpy(b->blocks + (size_t)r * b->row_bytes,
                   b->blocks + (size_t)(r % 16) * b->row_bytes, b->row_bytes);
    }
    struct weight *w = &b->w;
    *w = (struct weight){
        .info = pack_info_find(type), .n_in = N_IN, .n_out = N_OUT, .lanes = b->k->lanes};
    w->n_panels = N_OUT / w->lanes;
    w->panel_bytes = pack_panel_bytes(w->info, N_IN, w->lanes);
    w->n_bytes = w->panel_bytes * (size_t)w->n_panels;
    w->data = mem_pages(w->n_bytes);
    CHECK(w->data);
}

static double pack_seconds(struct bench *b)
{
    double best = 1e9;
    for (int i = 0; i < 3; i++) {
        double t0 = cpu_seconds();
        for (int p = 0; p < b->w.n_panels; p++)
            pack_panel(&b->w, b->w.data + (size_t)p * b->w.panel_bytes,
                       b->blocks + (size_t)(p * b->w.lanes) * b->row_bytes, b->row_bytes,
                       b->w.lanes);
        best = MIN(best, cpu_seconds() - t0);
    }
    return best;
}

static void make_act(struct bench *b)
{
    uint32_t rng = 7;
    float *x = need(sizeof(float) * N_ROWS * (N_IN + 16));
    b->act =
        (struct act){.x = x, .x_stride = N_IN + 16, .q_stride = N_IN + 64, .n_blocks = N_BLOCKS};
    b->act.q = need(N_ROWS * (N_IN + 64));
    b->act.d = need(sizeof(float) * N_ROWS * N_BLOCKS);
    b->act.s = need(sizeof(float) * N_ROWS * N_BLOCKS);
    b->act.sums = need(sizeof(int32_t) * N_ROWS * N_BLOCKS);
    for (int r = 0; r < N_ROWS; r++) {
        for (int i = 0; i < N_IN; i++)
            x[r * (N_IN + 16) + i] = noise(&rng);
        b->k->quantize(&b->act, x + r * (N_IN + 16), r, N_IN);
    }
    b->out = need(sizeof(float) * N_ROWS * (N_OUT + 16));
}

static double matmul_seconds(const struct bench *b, int rows)
{
    struct mm m = {.w = &b->w, .a = &b->act, .out = b->out, .out_stride = N_OUT + 16};
    m.panel_end = (int32_t)b->w.n_panels;
    m.row_end = rows;
    double best = 1e9;
    for (int i = 0; i < REPEATS; i++) {
        double t0 = cpu_seconds();
        b->k->matmul(&m);
        best = MIN(best, cpu_seconds() - t0);
    }
    return best;
}

static void bench_level(const struct kernels *k)
{
    double t0 = cpu_seconds(), macs = k->int8_peak(10 * 1000 * 1000);
    double peak = macs / (cpu_seconds() - t0);
    printf("%s: int8 peak %.0f G multiply-adds/s on one thread\n", k->name, peak * 1e-9);
    printf("  type      128 rows      of peak     1 row         pack\n");
    for (uint32_t type = 0; type < GGUF_DTYPE_END; type++) {
        struct bench b = {.k = k};
        if (!pack_info_find(type))
            continue;
        make_weight(&b, type);
        double pack = (double)(N_OUT * b.row_bytes) / pack_seconds(&b);
        make_act(&b);
        double many = 1.0 * N_ROWS * N_IN * N_OUT / matmul_seconds(&b, N_ROWS);
        double one = (double)b.w.n_bytes / matmul_seconds(&b, 1);
        printf("  %-7s %6.1f G/s %10.0f %% %8.1f GB/s %8.2f GB/s\n", gguf_dtype_find(type)->name,
               many * 1e-9, 100 * many / peak, one * 1e-9, pack * 1e-9);
        mem_pages_free(b.w.data, b.w.n_bytes);
        free(b.blocks);
        free((void *)(uintptr_t)b.act.x);
        free(b.act.q);
        free(b.act.d);
        free(b.act.s);
        free(b.act.sums);
        free(b.out);
    }
}

/* ---- attention ---- */

enum { HEAD = 64, GROUP = 3, N_KEYS = 2048, N_PAGES = N_KEYS / KV_PAGE_TOKENS };

struct attn_bench {
    const struct kernels *k;
    struct attn a;
    uint8_t *kv;
    float *q, *out, *scratch;
    int32_t pages[N_PAGES];
    double put_seconds;
};

static void attn_init(struct attn_bench *b, const struct kernels *k, enum kv_type t)
{
    size_t half = KV_PAGE_TOKENS * kv_row_bytes(t, HEAD);
    uint32_t rng = 3;
    float row[HEAD];
    *b = (struct attn_bench){.k = k};
    b->kv = mem_pages(N_PAGES * 2 * half);
    b->q = need(sizeof(float) * ATTN_ROWS * GROUP * HEAD);
    b->out = need(sizeof(float) * ATTN_ROWS * GROUP * HEAD);
    b->scratch = need(sizeof(float) * attn_scratch_floats(HEAD, GROUP));
    CHECK(b->kv);
    for (int i = 0; i < ATTN_ROWS * GROUP * HEAD; i++)
        b->q[i] = noise(&rng);
    for (int i = 0; i < HEAD; i++)
        row[i] = noise(&rng);
    double t0 = cpu_seconds();
    for (int32_t i = 0; i < N_KEYS; i++) {
        uint8_t *page = b->kv + (size_t)(i / KV_PAGE_TOKENS) * 2 * half;
        b->pages[i / KV_PAGE_TOKENS] = i / KV_PAGE_TOKENS;
        row[i % HEAD] += 0.5f;
        k->key_put(page, row, HEAD, i % KV_PAGE_TOKENS, t);
        k->value_put(page + half, row, HEAD, i % KV_PAGE_TOKENS, t);
    }
    b->put_seconds = cpu_seconds() - t0;
    b->a = (struct attn){.k_base = b->kv,
                         .v_base = b->kv + half,
                         .page_stride = 2 * half,
                         .pages = b->pages,
                         .key_type = t,
                         .value_type = t,
                         .head_dim = HEAD,
                         .n_heads_group = GROUP,
                         .scale = 0.125f,
                         .q = b->q,
                         .out = b->out,
                         .q_stride = GROUP * HEAD,
                         .out_stride = GROUP * HEAD,
                         .scratch = b->scratch};
}

/* Microseconds of the last n_rows positions over all keys. */
static double attn_us(struct attn_bench *b, int32_t n_rows)
{
    double best = 1e9;
    b->a.n_rows = n_rows;
    b->a.pos = N_KEYS - n_rows;
    for (int i = 0; i < 10 * REPEATS; i++) {
        double t0 = cpu_seconds();
        b->k->attention(&b->a);
        best = MIN(best, cpu_seconds() - t0);
    }
    return best * 1e6;
}

static void bench_attention(const struct kernels *k)
{
    printf("%s: attention, %d heads of %d on one KV head, over %d keys\n", k->name, GROUP, HEAD,
           N_KEYS);
    printf("  type      1 row      %d rows     write a row     bytes a token\n", ATTN_ROWS);
    for (enum kv_type t = 0; t < KV_TYPE_END; t++) {
        struct attn_bench b;
        attn_init(&b, k, t);
        double one = attn_us(&b, 1), many = attn_us(&b, ATTN_ROWS);
        printf("  %-5s %8.1f us %8.1f us %10.1f ns %14zu\n", kv_type_name(t), one, many,
               b.put_seconds / N_KEYS * 1e9, 2 * kv_row_bytes(t, HEAD));
        mem_pages_free(b.kv, N_PAGES * b.a.page_stride);
        free(b.q);
        free(b.out);
        free(b.scratch);
    }
}

int main(void)
{
    bool here;
    const struct kernels *k;
    for (size_t i = 0; (k = kernels_at(i, &here)); i++)
        if (here && strcmp(k->name, "scalar"))
            bench_level(k);
    for (size_t i = 0; (k = kernels_at(i, &here)); i++)
        if (here && strcmp(k->name, "scalar"))
            bench_attention(k);
    return 0;
}
