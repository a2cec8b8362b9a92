/* A spy around the CPU backend that holds it to the bit-for-bit rule. It keeps which token is at
 * each place of the KV (also on its way through the persistent tier), so that a row's whole history
 * is known; the logits after the same history must always be the same bits. One a test program. */
#ifndef INGOT_TEST_SPY_H
#define INGOT_TEST_SPY_H

#include "backends/backend.h"

#include <stdatomic.h>
#include <string.h>

enum { SPY_SLOTS = 1 << 16, SPY_MAX_CTX = 512, SPY_IDS_BYTES = KV_PAGE_TOKENS * 4 };
static struct {
    uint64_t key[SPY_SLOTS], bits[SPY_SLOTS];
    int32_t n_known, n_again, n_differ;
    int32_t *ids; /* [n_pages][KV_PAGE_TOKENS] */
    int32_t n_vocab;
    atomic_int n_reads, n_writes, n_copies, n_rows, fail_run;
} spy;

/* Forget all that was seen. */
static void spy_reset(void)
{
    mem_free(spy.ids);
    memset((void *)&spy, 0, sizeof spy);
}

static void spy_logits(uint64_t history, const float *logits)
{
    uint64_t bits = hash_xxh3(logits, (size_t)spy.n_vocab * sizeof *logits, 1).lo | 1;
    size_t at = history % SPY_SLOTS;
    while (spy.key[at] && spy.key[at] != history)
        at = (at + 1) % SPY_SLOTS;
    CHECK(spy.n_known < SPY_SLOTS / 2);
    spy.n_known += !spy.key[at];
    spy.n_again += spy.key[at] != 0;
    spy.n_differ += spy.key[at] && spy.bits[at] != bits;
    spy.key[at] = history;
    spy.bits[at] = bits;
}

static int spy_prepare(struct device *d, struct exec **out, const struct plan *p, struct err *e)
{
    mem_free(spy.ids);
    spy.ids = mem_array((size_t)p->n_pages * KV_PAGE_TOKENS, sizeof *spy.ids);
    spy.n_vocab = p->n_vocab;
    return backend_cpu.prepare(d, out, p, e);
}

static int32_t *spy_cell(const struct batch_seq *q, int32_t pos)
{
    return &spy.ids[q->pages[pos / KV_PAGE_TOKENS] * KV_PAGE_TOKENS + pos % KV_PAGE_TOKENS];
}

static int spy_run(struct exec *x, const struct batch *b, struct err *e)
{
    if (spy.fail_run && --spy.fail_run == 0)
        return err_set(e, ERR_DEVICE, "the device failed, as asked");
    int rc = backend_cpu.run(x, b, e);
    int32_t w = 0;
    spy.n_rows += b->n_rows;
    for (int32_t s = 0; !rc && s < b->n_seqs; s++) {
        const struct batch_seq *q = &b->seqs[s];
        for (int32_t i = 0; i < q->n_rows; i++)
            *spy_cell(q, q->pos + i) = b->ids[q->first_row + i];
        for (; w < b->n_want && b->want[w] < q->first_row + q->n_rows; w++) {
            int32_t history[SPY_MAX_CTX], n = q->pos + b->want[w] - q->first_row + 1;
            CHECK(n <= SPY_MAX_CTX);
            for (int32_t p = 0; p < n; p++)
                history[p] = *spy_cell(q, p);
            spy_logits(hash_xxh3(history, (size_t)n * sizeof *history, 7).lo | 1,
                       b->logits + (size_t)w * (size_t)spy.n_vocab);
        }
    }
    return rc;
}

static void spy_kv_copy(struct exec *x, int32_t to, int32_t from)
{
    spy.n_copies++;
    memcpy(&spy.ids[to * KV_PAGE_TOKENS], &spy.ids[from * KV_PAGE_TOKENS], SPY_IDS_BYTES);
    backend_cpu.kv_copy(x, to, from);
}

/* A page on its way to the persistent tier takes its tokens along. */
static uint64_t spy_page_bytes(struct exec *x)
{
    return backend_cpu.kv_page_bytes(x) + SPY_IDS_BYTES;
}

static int spy_kv_read(struct exec *x, void *dst, int32_t page, struct err *e)
{
    spy.n_reads++;
    memcpy((uint8_t *)dst + backend_cpu.kv_page_bytes(x), &spy.ids[page * KV_PAGE_TOKENS],
           SPY_IDS_BYTES);
    return backend_cpu.kv_read(x, dst, page, e);
}

static int spy_kv_write(struct exec *x, int32_t page, const void *src, struct err *e)
{
    spy.n_writes++;
    memcpy(&spy.ids[page * KV_PAGE_TOKENS], (const uint8_t *)src + backend_cpu.kv_page_bytes(x),
           SPY_IDS_BYTES);
    return backend_cpu.kv_write(x, page, src, e);
}

/* The CPU backend with the spy in it. */
static struct backend spy_backend(void)
{
    struct backend be = backend_cpu;
    be.prepare = spy_prepare;
    be.run = spy_run;
    be.kv_copy = spy_kv_copy;
    be.kv_page_bytes = spy_page_bytes;
    be.kv_read = spy_kv_read;
    be.kv_write = spy_kv_write;
    return be;
}

#endif
