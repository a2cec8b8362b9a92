/* For the engine's tests: a backend that computes nothing and looks at everything, the small model
 * of the loader cases on it, and a client that keeps what comes back. The backend's state is one
 * static struct, cleared by fake_engine. */
#ifndef INGOT_FAKE_ENGINE_H
#define INGOT_FAKE_ENGINE_H

#include "engine/engine_internal.h"
#include "tests/unit/unit.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- a backend that computes nothing: its KV holds token ids, its logits point at one token. The
 * next token is the script's or a hash of all that the row sees through its pages, so that a wrong
 * page, position or order changes the answer ---- */

static struct {
    uint64_t free_bytes;   /* what probe says */
    const int32_t *script; /* the token after position p is script[p - script_at]; NULL: the hash */
    int32_t script_at;
    atomic_int fail_run; /* the n-th run from now fails; 0: none */
    atomic_int step_us;  /* how long a run takes */
    atomic_int row_us;   /* and how much longer for each of its rows */
    bool nan_logits;
    atomic_bool shut; /* runs wait while it is */
    /* what was seen */
    atomic_int n_runs, n_copies, max_seqs, max_rows;
    uint64_t allocs_at; /* mem_alloc_count at the end of the last run with one row */
    atomic_int n_decode_runs, n_decode_allocs;
} fake;

struct exec {
    struct plan plan;
    int32_t *kv; /* [n_pages][KV_PAGE_TOKENS] */
};

static int fake_probe(struct device_info *out, int max)
{
    if (max > 0)
        *out = (struct device_info){.name = "fake: no device",
                                    .free_bytes = fake.free_bytes,
                                    .total_bytes = fake.free_bytes,
                                    .usable = true};
    return 1;
}

static int fake_open(struct device **out, int index, const struct device_config *c, struct err *e)
{
    *out = mem_alloc(1);
    return 0;
}

static void fake_close(struct device *d)
{
    mem_free(d);
}

static uint64_t fake_weight_bytes(struct device *d, const struct weight_src *src)
{
    return 1000;
}

static int fake_load(struct device *d, struct weight **out, const struct weight_src *src,
                     struct err *e)
{
    static char any;
    *out = (struct weight *)&any;
    return 0;
}

static void fake_unload(struct device *d, struct weight *w)
{
}

static void fake_plan_bytes(struct device *d, const struct plan *p, uint64_t *kv, uint64_t *scratch)
{
    *kv = (uint64_t)p->n_pages * 32000;
    *scratch = 5000;
}

static int fake_prepare(struct device *d, struct exec **out, const struct plan *p, struct err *e)
{
    struct exec *x = mem_zalloc(sizeof *x);
    x->plan = *p;
    x->kv = mem_array((size_t)p->n_pages * KV_PAGE_TOKENS, sizeof *x->kv);
    *out = x;
    return 0;
}

static void fake_exec_free(struct exec *x)
{
    mem_free(x->kv);
    mem_free(x);
}

static int32_t *fake_cell(struct exec *x, const struct batch_seq *q, int32_t pos)
{
    int32_t page = q->pages[pos / KV_PAGE_TOKENS];
    CHECK(page >= 0 && page < x->plan.n_pages);
    return &x->kv[page * KV_PAGE_TOKENS + pos % KV_PAGE_TOKENS];
}

static int32_t fake_next(struct exec *x, const struct batch_seq *q, int32_t pos)
{
    if (fake.script)
        return pos < fake.script_at ? 0 : fake.script[pos - fake.script_at];
    uint64_t h = 1;
    for (int32_t p = 0; p <= pos; p++)
        h = (h ^ (uint64_t)*fake_cell(x, q, p)) * 0x9e3779b97f4a7c15u + (uint64_t)p;
    return 3 + (int32_t)((h >> 33) % (uint64_t)(x->plan.n_vocab - 3));
}

static void count_allocs(const struct batch *b)
{
    uint64_t now = mem_alloc_count();
    if (b->n_rows == 1 && fake.allocs_at) {
        fake.n_decode_runs++;
        fake.n_decode_allocs += (int)(now - fake.allocs_at);
    }
    fake.allocs_at = b->n_rows == 1 ? now : 0;
}

static int fake_run(struct exec *x, const struct batch *b, struct err *e)
{
    while (fake.shut)
        usleep(100);
    if (fake.step_us || fake.row_us)
        usleep((useconds_t)(fake.step_us + fake.row_us * b->n_rows));
    count_allocs(b);
    fake.n_runs++;
    fake.max_seqs = MAX(fake.max_seqs, b->n_seqs);
    fake.max_rows = MAX(fake.max_rows, b->n_rows);
    CHECK(b->n_rows > 0 && b->n_rows <= x->plan.max_batch && b->n_want <= x->plan.max_out);
    if (fake.fail_run && --fake.fail_run == 0)
        return err_set(e, ERR_DEVICE, "the fake device failed, as asked");
    int32_t w = 0;
    for (int32_t s = 0; s < b->n_seqs; s++) {
        const struct batch_seq *q = &b->seqs[s];
        CHECK(q->pos >= 0 && q->n_rows > 0 && q->pos + q->n_rows <= x->plan.n_ctx);
        for (int32_t i = 0; i < q->n_rows; i++)
            *fake_cell(x, q, q->pos + i) = b->ids[q->first_row + i];
        for (; w < b->n_want && b->want[w] < q->first_row + q->n_rows; w++) {
            float *logits = b->logits + (size_t)w * (size_t)x->plan.n_vocab;
            for (int32_t v = 0; v < x->plan.n_vocab; v++)
                logits[v] = fake.nan_logits ? __builtin_nanf("") : 0;
            logits[fake_next(x, q, q->pos + b->want[w] - q->first_row)] += 100;
        }
    }
    CHECK(w == b->n_want);
    return 0;
}

static void fake_kv_copy(struct exec *x, int32_t to, int32_t from)
{
    fake.n_copies++;
    memcpy(&x->kv[to * KV_PAGE_TOKENS], &x->kv[from * KV_PAGE_TOKENS],
           KV_PAGE_TOKENS * sizeof *x->kv);
}

static const char *fake_describe(struct device *d)
{
    return "fake";
}

static const struct backend backend_fake = {
    .name = "fake",
    .probe = fake_probe,
    .open = fake_open,
    .close = fake_close,
    .weight_bytes = fake_weight_bytes,
    .load = fake_load,
    .unload = fake_unload,
    .plan_bytes = fake_plan_bytes,
    .prepare = fake_prepare,
    .exec_free = fake_exec_free,
    .run = fake_run,
    .kv_copy = fake_kv_copy,
    .describe = fake_describe,
};

/* ---- helpers ---- */

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { SANITIZED = 1 }; /* slow: fewer ways of the same */
#else
enum { SANITIZED = 0 };
#endif

enum { N_CTX = 512, BYTE0 = 3 }; /* of the model: context, and the token of byte 0 */

static bool open_model(struct engine **en, const char *rel, const struct backend *be,
                       const struct engine_config *c, struct err *e)
{
    const char *path = unit_shared(rel);
    struct model_file *f = NULL;
    *en = NULL;
    if (!path || !OK_CALL(model_file_open(&f, NULL, path, e), *e))
        return false;
    int rc = engine_open_on(en, f, c, be, e);
    model_file_close(f);
    return rc == 0;
}

static struct engine *fake_engine(const struct engine_config *c)
{
    struct engine *en;
    struct err e = {0};
    memset((void *)&fake, 0, sizeof fake);
    fake.free_bytes = 1u << 30;
    if (!open_model(&en, "cases/loader/ok-base.gguf", &backend_fake, c, &e))
        OK_MSG(!e.code, "%s", e.msg);
    return en;
}

struct client { /* one request and what came back */
    struct request r;
    int32_t ids[N_CTX], got[N_CTX + 1];
    size_t n_got;
    struct buf text;
    bool whole; /* every piece was whole characters */
    atomic_bool done;
    int order; /* the how many-th it was that ended */
    struct request_stats stats;
    struct engine *cancel_in; /* cancel from on_token after cancel_at tokens */
    size_t cancel_at;
};

static void client_token(void *user, int32_t id, const char *text, size_t n)
{
    struct client *c = user;
    c->got[c->n_got++] = id;
    buf_put(&c->text, text, n);
    c->whole = c->whole && utf8_valid(text, n);
    if (c->cancel_in && c->n_got == c->cancel_at)
        engine_cancel(c->cancel_in, &c->r);
}

static void client_done(void *user, const struct request_stats *s)
{
    static int n_done; /* the engine's threads run one after the other */
    struct client *c = user;
    c->stats = *s;
    c->order = ++n_done;
    c->done = true;
}

static void client_init(struct client *c, size_t n_ids, uint64_t seed, uint32_t max_tokens)
{
    memset((void *)c, 0, sizeof *c);
    c->whole = true;
    for (size_t i = 0; i < n_ids; i++)
        c->ids[i] = BYTE0 + (int32_t)(unit_rand(&seed) % 256);
    c->r = (struct request){.ids = c->ids,
                            .n_ids = n_ids,
                            .max_tokens = max_tokens,
                            .ignore_eog = true,
                            .on_token = client_token,
                            .on_done = client_done,
                            .user = c};
    sample_defaults(&c->r.sample);
    c->r.sample.temperature = 0;
    buf_puts(&c->text, "");
}

static bool client_wait(struct client *c)
{
    for (int i = 0; i < 120000 && !c->done; i++)
        usleep(1000);
    return OK(c->done);
}

static bool client_run(struct client *c, struct engine *en)
{
    struct err e = {0};
    return OK_CALL(engine_submit(en, &c->r, &e), e) && client_wait(c);
}

static void client_fini(struct client *c)
{
    buf_fini(&c->text);
}

#endif
