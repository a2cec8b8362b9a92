/* Several models in one process: who is loaded, who goes when, what a swap keeps, and that engines
 * share a device. On the CPU backend behind a gauge that counts opened devices and weights, sees
 * two threads on one device, and can hold or fail a load. */
#include "engine/engine_internal.h"
#include "engine/models.h"
#include "tests/unit/tiny.h"
#include "tests/unit/unit.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { SANITIZED = 1 };
#else
enum { SANITIZED = 0 };
#endif

enum { N_MODELS = 4, N_CTX = 128, N_PROMPT = 80, N_ANSWER = 6 };

/* ---- the gauge ---- */

static struct {
    atomic_int n_open, n_opens, most_open, n_weights, n_loads, n_inside, n_overlaps;
    atomic_bool shut;     /* loads wait */
    atomic_int fail_load; /* the n-th from now fails */
    atomic_int read_us;   /* likewise reading a page */
    atomic_int run_us;    /* a run takes so long at least */
} gauge;

static void step_in(void)
{
    if (atomic_fetch_add(&gauge.n_inside, 1))
        gauge.n_overlaps++;
}

static int gauge_open(struct device **out, int i, const struct device_config *c, struct err *e)
{
    int rc = backend_cpu.open(out, i, c, e);
    gauge.n_opens += !rc;
    gauge.n_open += !rc;
    if (gauge.n_open > gauge.most_open)
        gauge.most_open = gauge.n_open;
    return rc;
}

static void gauge_close(struct device *d)
{
    gauge.n_open--;
    backend_cpu.close(d);
}

static int gauge_load(struct device *d, struct weight **out, const struct weight_src *src,
                      struct err *e)
{
    while (gauge.shut)
        usleep(200);
    if (gauge.fail_load && --gauge.fail_load == 0)
        return err_set(e, ERR_IO, "the device took no weight, as asked");
    step_in();
    int rc = backend_cpu.load(d, out, src, e);
    gauge.n_inside--;
    gauge.n_loads += !rc;
    gauge.n_weights += !rc;
    return rc;
}

static void gauge_unload(struct device *d, struct weight *w)
{
    step_in();
    backend_cpu.unload(d, w);
    gauge.n_inside--;
    gauge.n_weights--;
}

static int gauge_run(struct exec *x, const struct batch *b, struct err *e)
{
    step_in();
    if (gauge.run_us)
        usleep((useconds_t)gauge.run_us);
    int rc = backend_cpu.run(x, b, e);
    gauge.n_inside--;
    return rc;
}

static int gauge_kv_read(struct exec *x, void *dst, int32_t page, struct err *e)
{
    step_in();
    if (gauge.read_us)
        usleep((useconds_t)gauge.read_us);
    int rc = backend_cpu.kv_read(x, dst, page, e);
    gauge.n_inside--;
    return rc;
}

static const struct backend *gauge_backend(void)
{
    static struct backend be;
    if (!be.name) {
        be = backend_cpu;
        be.open = gauge_open;
        be.close = gauge_close;
        be.load = gauge_load;
        be.unload = gauge_unload;
        be.run = gauge_run;
        be.kv_read = gauge_kv_read;
    }
    return &be;
}

/* ---- helpers ---- */

static char paths[N_MODELS][512];
static uint64_t one_bytes; /* what one of them takes, placed */

static struct models_config config(void)
{
    struct models_config c;
    models_defaults(&c);
    c.engine.n_threads = 2;
    c.engine.n_ctx = N_CTX;
    c.engine.max_batch = 64;
    c.engine.prefix_ram_bytes = 1;
    return c;
}

static bool write_model(const char *path, uint64_t seed)
{
    struct tiny_spec s;
    struct err e = {0};
    tiny_defaults(&s, "llama");
    s.seed = seed;
    return OK_CALL(tiny_write(path, &s, &e), e);
}

static bool make_models(void)
{
    if (one_bytes)
        return true;
    const char *dir = unit_tmpdir();
    for (int i = 0; i < N_MODELS; i++) {
        snprintf(paths[i], sizeof paths[i], "%s/m%d.gguf", dir, i);
        if (!write_model(paths[i], 100 + (uint64_t)i))
            return false;
    }
    struct models_config c = config();
    struct model_file *f = NULL;
    struct err e = {0};
    struct engine *en = NULL;
    struct engine_info info = {0};
    bool ok = OK_CALL(model_file_open(&f, NULL, paths[0], &e), e) &&
              OK_CALL(engine_open(&en, f, &c.engine, &e), e);
    if (ok)
        info = *engine_info(en);
    engine_close(en);
    model_file_close(f);
    one_bytes = ok ? engine_placed_bytes(&info.placement) : 0;
    return ok;
}

static struct models *open_with(const struct models_config *c)
{
    struct models *ms = NULL;
    struct err e = {0};
    if (!make_models())
        return NULL;
    gauge.n_loads = gauge.n_opens = gauge.most_open = gauge.n_overlaps = 0;
    OK_CALL(models_open_on(&ms, c, gauge_backend(), &e), e);
    return ms;
}

/* Everything is back where it came from. */
static void close_all(struct models *ms)
{
    models_close(ms);
    OK_MSG(!gauge.n_weights, "%d weights are left", gauge.n_weights);
    OK_MSG(!gauge.n_open, "%d devices are open", gauge.n_open);
    OK_MSG(!gauge.n_overlaps, "two threads were on the device %d times", gauge.n_overlaps);
}

static bool get(struct models *ms, struct models_lease *l, int i, const struct models_options *o)
{
    struct err e = {0};
    return OK_CALL(models_get(ms, l, paths[i], o, &e), e);
}

static bool touch(struct models *ms, int i, const struct models_options *o)
{
    struct models_lease l;
    bool ok = get(ms, &l, i, o);
    models_release(ms, &l);
    return ok;
}

static bool status(struct models *ms, struct models_status *s, int i)
{
    struct models_status all[16];
    char real[4096];
    size_t n = MIN(models_list(ms, all, ARRAY_LEN(all)), ARRAY_LEN(all));
    if (!realpath(paths[i], real))
        return false;
    for (size_t k = 0; k < n; k++) {
        if (strcmp(all[k].ref, real))
            continue;
        *s = all[k];
        return true;
    }
    return false;
}

static bool is_loaded(struct models *ms, int i)
{
    struct models_status s;
    return status(ms, &s, i) && s.state == MODELS_READY;
}

static bool gone_within(struct models *ms, int i, int ms_wait)
{
    struct models_status s;
    for (int t = 0; t < ms_wait && status(ms, &s, i); t++)
        usleep(1000);
    return !status(ms, &s, i);
}

struct answer {
    int32_t ids[N_ANSWER];
    uint32_t n, n_cached;
};

static void take_token(void *user, int32_t id, const char *text, size_t n)
{
    struct answer *a = user;
    if (a->n < N_ANSWER)
        a->ids[a->n] = id;
    a->n++;
}

static bool ask_for(struct answer *a, struct engine *en, uint64_t prompt, uint32_t n_answer)
{
    int32_t ids[N_PROMPT];
    struct request_stats s;
    struct err e = {0};
    *a = (struct answer){0};
    for (int i = 0; i < N_PROMPT; i++)
        ids[i] = 3 + (int32_t)(unit_rand(&prompt) % 250);
    struct request r = {.ids = ids,
                        .n_ids = N_PROMPT,
                        .max_tokens = n_answer,
                        .ignore_eog = true,
                        .on_token = take_token,
                        .user = a};
    sample_defaults(&r.sample);
    r.sample.temperature = 0;
    bool ok = OK_CALL(engine_run(en, &r, &s, &e), e) && OK(a->n == n_answer);
    a->n_cached = s.n_cached;
    return ok;
}

static bool ask(struct answer *a, struct engine *en, uint64_t prompt)
{
    return ask_for(a, en, prompt, N_ANSWER);
}

static bool same(const struct answer *a, const struct answer *b)
{
    return a->n == b->n && !memcmp(a->ids, b->ids, sizeof a->ids);
}

/* What an engine of its own says, opened without models.c. */
static bool ask_alone(struct answer *a, int i, uint32_t n_ctx, uint64_t prompt)
{
    struct models_config c = config();
    struct model_file *f = NULL;
    struct engine *en = NULL;
    struct err e = {0};
    c.engine.n_ctx = n_ctx;
    bool ok = OK_CALL(model_file_open(&f, NULL, paths[i], &e), e) &&
              OK_CALL(engine_open_on(&en, f, &c.engine, &backend_cpu, &e), e) && ask(a, en, prompt);
    engine_close(en);
    model_file_close(f);
    return ok;
}

/* ---- loading ---- */

static void test_a_model_is_loaded_once_and_in_any_spelling_of_its_path(void)
{
    struct models_config c = config();
    struct models *ms = open_with(&c);
    struct models_lease a, b, other;
    struct models_status s;
    struct err e = {0};
    char spelt[600];
    if (!ms)
        return;
    snprintf(spelt, sizeof spelt, "%.*s/./m0.gguf", (int)(strlen(paths[0]) - 8), paths[0]);
    if (get(ms, &a, 0, NULL) && OK_CALL(models_get(ms, &b, spelt, NULL, &e), e)) {
        int loads = gauge.n_loads;
        OK(a.engine && a.engine == b.engine && loads == gauge.n_weights);
        OK(status(ms, &s, 0) && s.n_leases == 2 && s.bytes == one_bytes && s.n_ctx == N_CTX);
        OK_MSG(strstr(s.device, "2 threads"), "%s", s.device);
        OK(get(ms, &other, 1, NULL) && other.engine != a.engine);
        OK_MSG(models_list(ms, &s, 1) == 2 && strstr(s.ref, "m1.gguf"), "%s is first", s.ref);
        models_release(ms, &other);
        models_release(ms, &b);
    }
    models_release(ms, &a);
    OK(!a.engine);
    close_all(ms);
}

static void test_a_failed_load_leaves_nothing_and_the_next_try_works(void)
{
    struct models_config c = config();
    struct models *ms = open_with(&c);
    struct models_lease l;
    struct models_status s;
    struct err e = {0}, e2 = {0};
    if (!ms)
        return;
    OK(models_get(ms, &l, "/nowhere/at-all.gguf", NULL, &e) && e.code == ERR_NOT_FOUND);
    gauge.fail_load = 5;
    OK(models_get(ms, &l, paths[0], NULL, &e2) && e2.code == ERR_IO && !l.engine);
    OK_MSG(strstr(e2.msg, "as asked") && strstr(e2.msg, "m0.gguf"), "%s", e2.msg);
    OK(!models_list(ms, &s, 1) && !gauge.n_weights && !gauge.n_open);
    OK(touch(ms, 0, NULL));
    close_all(ms);
}

struct caller { /* a thread that wants a model */
    struct models *ms;
    struct models_options o;
    int i;
    atomic_bool cancel, done, asked;
    int rc;
    struct err e;
    struct models_lease l;
    pthread_t id;
};

static int caller_progress(void *user, uint64_t done, uint64_t total)
{
    struct caller *c = user;
    c->asked = true;
    return c->cancel;
}

static void *caller_main(void *arg)
{
    struct caller *c = arg;
    c->o.progress = caller_progress;
    c->o.user = c;
    c->rc = models_get(c->ms, &c->l, paths[c->i], &c->o, &c->e);
    c->done = true;
    return NULL;
}

static void caller_start(struct caller *c, struct models *ms)
{
    c->ms = ms;
    CHECK(!pthread_create(&c->id, NULL, caller_main, c));
    while (!c->asked)
        usleep(500);
}

static bool done_within(struct caller *c, int ms_wait)
{
    for (int t = 0; t < ms_wait && !c->done; t++)
        usleep(1000);
    return c->done;
}

static void test_two_callers_share_one_load_and_the_first_may_leave(void)
{
    struct models_config c = config();
    struct models *ms = open_with(&c);
    static struct caller a, b;
    if (!ms)
        return;
    gauge.shut = true;
    caller_start(&a, ms);
    caller_start(&b, ms);
    a.cancel = true;
    OK_MSG(done_within(&a, 5000), "the load is held, but who cancels does not wait for it");
    OK(a.rc && a.e.code == ERR_CANCELLED && !a.l.engine && !b.done);
    gauge.shut = false;
    OK(done_within(&b, 20000));
    pthread_join(a.id, NULL);
    pthread_join(b.id, NULL);
    OK_MSG(!b.rc && b.l.engine, "%s", b.e.msg);
    OK_MSG(gauge.n_loads == gauge.n_weights, "%d loads, %d weights", gauge.n_loads,
           gauge.n_weights);
    models_release(ms, &b.l);
    close_all(ms);
}

static void test_a_load_that_nobody_waits_for_ends(void)
{
    struct models_config c = config();
    struct models *ms = open_with(&c);
    static struct caller a;
    if (!ms)
        return;
    gauge.shut = true;
    caller_start(&a, ms);
    a.cancel = true;
    OK(done_within(&a, 5000) && a.e.code == ERR_CANCELLED);
    pthread_join(a.id, NULL);
    gauge.shut = false;
    OK(gone_within(ms, 0, 5000) && !gauge.n_weights);
    OK_MSG(gauge.n_loads <= 2, "%d weights were loaded for nobody", gauge.n_loads);
    OK(touch(ms, 0, NULL));
    close_all(ms);
}

static void test_any_allocation_of_a_load_may_fail(void)
{
    struct models_config c = config();
    bool whole = false;
    int n_failed = 0;
    for (uint64_t n = 1; !whole && n < 5000; n += n < 150 ? 1 : 1 + (uint64_t)SANITIZED * 6) {
        struct models *ms = open_with(&c);
        struct models_lease l;
        struct models_status s;
        struct err e = {0};
        if (!ms)
            return;
        uint64_t before = mem_alloc_count();
        mem_fail_at(n);
        int rc = models_get(ms, &l, paths[0], NULL, &e);
        whole = mem_alloc_count() - before < n;
        mem_fail_at(0);
        n_failed += rc != 0;
        if (rc) {
            OK_MSG(e.code == ERR_MEMORY && *e.msg && !l.engine, "allocation %d: %s", (int)n, e.msg);
            OK(!models_list(ms, &s, 1) && !gauge.n_weights && !gauge.n_open);
            OK(get(ms, &l, 0, NULL));
        }
        models_release(ms, &l);
        close_all(ms);
    }
    OK(whole && n_failed > 20);
}

/* ---- who goes ---- */

static void test_the_least_recently_used_goes_first(void)
{
    struct models_config c = config();
    if (!make_models())
        return;
    c.budget_bytes = 2 * one_bytes + one_bytes / 2;
    struct models *ms = open_with(&c);
    if (!ms)
        return;
    OK(touch(ms, 0, NULL) && touch(ms, 1, NULL) && touch(ms, 0, NULL));
    OK(touch(ms, 2, NULL));
    OK(is_loaded(ms, 0) && !is_loaded(ms, 1) && is_loaded(ms, 2));
    OK(touch(ms, 3, NULL));
    OK(!is_loaded(ms, 0) && is_loaded(ms, 2) && is_loaded(ms, 3));
    close_all(ms);
}

static void test_what_is_in_use_or_pinned_is_never_taken(void)
{
    struct models_config c = config();
    struct models_options pin = {.pin = true};
    struct models_lease held, l;
    struct err e = {0}, none = {0};
    if (!make_models())
        return;
    c.budget_bytes = 2 * one_bytes + one_bytes / 2;
    struct models *ms = open_with(&c);
    if (!ms)
        return;
    OK(touch(ms, 0, &pin) && get(ms, &held, 1, NULL));
    OK(models_get(ms, &l, paths[2], NULL, &e) && e.code == ERR_MEMORY && !l.engine);
    char need[32], budget[32];
    snprintf(need, sizeof need, "needs %.1f MiB", (double)one_bytes / (1 << 20));
    snprintf(budget, sizeof budget, "of the %.1f MiB", (double)c.budget_bytes / (1 << 20));
    OK_MSG(strstr(e.msg, need) && strstr(e.msg, budget) && strstr(e.msg, "m0.gguf (pinned)") &&
               strstr(e.msg, "m1.gguf (in use)"),
           "%s", e.msg);
    OK(is_loaded(ms, 0) && is_loaded(ms, 1));
    models_release(ms, &held);
    OK(touch(ms, 2, NULL) && is_loaded(ms, 0) && !is_loaded(ms, 1));
    OK_CALL(models_pin(ms, paths[0], false, &none), none);
    OK(touch(ms, 3, NULL) && !is_loaded(ms, 0) && is_loaded(ms, 2));
    close_all(ms);
}

static void test_what_never_fits_takes_nobody(void)
{
    struct models_config c = config();
    struct models_options more = {.n_ctx = 256};
    struct models_lease l;
    struct err e = {0};
    if (!make_models())
        return;
    c.budget_bytes = one_bytes + 1000;
    struct models *ms = open_with(&c);
    if (!ms)
        return;
    OK(touch(ms, 0, NULL));
    OK(models_get(ms, &l, paths[1], &more, &e) && e.code == ERR_MEMORY);
    OK_MSG(strstr(e.msg, "MiB for it"), "%s", e.msg);
    OK(is_loaded(ms, 0));
    close_all(ms);
}

static void test_no_more_than_so_many_at_a_time(void)
{
    struct models_config c = config();
    struct models_lease a, l;
    struct err e = {0};
    c.max_loaded = 1;
    struct models *ms = open_with(&c);
    if (!ms)
        return;
    OK(touch(ms, 0, NULL) && get(ms, &a, 1, NULL) && !is_loaded(ms, 0));
    OK(models_get(ms, &l, paths[2], NULL, &e) && e.code == ERR_BUSY);
    OK_MSG(strstr(e.msg, "1 models") && strstr(e.msg, "m1.gguf"), "%s", e.msg);
    models_release(ms, &a);
    close_all(ms);
}

static void test_keep_alive_unloads_what_is_idle(void)
{
    struct models_config c = config();
    struct models_options at_once = {.has_keep_alive = true},
                          soon = {.has_keep_alive = true, .keep_alive_ns = 300000000},
                          never = {.has_keep_alive = true, .keep_alive_ns = -1},
                          pin = {.has_keep_alive = true, .pin = true};
    struct models_lease l;
    struct models_status s = {0};
    struct models *ms = open_with(&c);
    if (!ms)
        return;
    OK(get(ms, &l, 0, &at_once));
    usleep(50000);
    OK(is_loaded(ms, 0)); /* in use */
    models_release(ms, &l);
    OK(gone_within(ms, 0, 5000));
    OK(touch(ms, 1, &never) && touch(ms, 2, &pin) && touch(ms, 3, &soon));
    uint64_t start = now_ns();
    OK(status(ms, &s, 3) && s.expires_ns > start && s.expires_ns <= start + 300000000);
    OK(status(ms, &s, 1) && s.expires_ns == UINT64_MAX);
    OK(gone_within(ms, 3, 5000));
    OK_MSG(now_ns() - start > 200000000, "after %d ms", (int)((now_ns() - start) / 1000000));
    OK(is_loaded(ms, 1) && is_loaded(ms, 2));
    OK(touch(ms, 0, NULL) && status(ms, &s, 0)); /* the default is five minutes */
    OK(s.expires_ns > now_ns() + 290000000000u && s.expires_ns <= now_ns() + 300000000000u);
    close_all(ms);
}

/* Who waited for a load has it, though nothing keeps the model but that. */
static void test_a_load_is_not_undone_before_its_caller_has_it(void)
{
    struct models_config c = config();
    c.keep_alive_ns = 0;
    struct models *ms = open_with(&c);
    if (!ms || !touch(ms, 0, NULL))
        return;
    OK(gone_within(ms, 0, 5000));
    int one = gauge.n_loads;
    for (int i = 1; i < 20; i++)
        OK(touch(ms, 0, NULL) && gone_within(ms, 0, 5000));
    OK_MSG(gauge.n_loads == 20 * one, "%d weights of %d", gauge.n_loads, 20 * one);
    close_all(ms);
}

/* Nothing is due for five minutes: nobody wakes up. */
static void test_idle_models_wake_nobody(void)
{
    struct models_config c = config();
    struct models *ms = open_with(&c);
    struct rusage a, b;
    if (!ms)
        return;
    OK(touch(ms, 0, NULL) && touch(ms, 1, NULL));
    usleep(100000);
    getrusage(RUSAGE_SELF, &a);
    usleep(500000);
    getrusage(RUSAGE_SELF, &b);
    OK_MSG(SANITIZED || b.ru_nvcsw - a.ru_nvcsw <= 4, "%ld waits ended", b.ru_nvcsw - a.ru_nvcsw);
    close_all(ms);
}

static void test_stop_lets_a_model_go_now_or_with_its_last_lease(void)
{
    struct models_config c = config();
    struct models_options pin = {.pin = true};
    struct models_lease l;
    struct err e = {0}, none = {0};
    struct models *ms = open_with(&c);
    if (!ms)
        return;
    OK(models_unload(ms, paths[0], &e) && e.code == ERR_NOT_FOUND);
    OK(touch(ms, 0, &pin));
    OK_CALL(models_unload(ms, paths[0], &none), none);
    OK(!is_loaded(ms, 0) && !gauge.n_weights);
    OK(get(ms, &l, 1, NULL));
    OK_CALL(models_unload(ms, paths[1], &none), none);
    OK(is_loaded(ms, 1));
    models_release(ms, &l);
    OK(gone_within(ms, 1, 5000));
    close_all(ms);
}

static void test_a_file_that_changed_is_loaded_anew_when_idle(void)
{
    struct models_config c = config();
    struct models *ms = open_with(&c);
    struct models_lease a, b;
    struct answer before, during, after, want;
    if (!ms)
        return;
    if (get(ms, &a, 3, NULL) && ask(&before, a.engine, 5)) {
        char next[600];
        snprintf(next, sizeof next, "%s.new", paths[3]);
        write_model(next, 999);
        OK(!rename(next, paths[3]));
        OK(get(ms, &b, 3, NULL) && b.engine == a.engine); /* in use: as it was */
        OK(ask(&during, b.engine, 5) && same(&before, &during));
        models_release(ms, &b);
        models_release(ms, &a);
        OK(get(ms, &a, 3, NULL) && ask(&after, a.engine, 5));
        OK(ask_alone(&want, 3, N_CTX, 5) && same(&after, &want) && !same(&after, &before));
    }
    models_release(ms, &a);
    close_all(ms);
}

/* ---- what a swap keeps ---- */

static void test_a_model_that_comes_back_finds_its_prompts_on_disk(void)
{
    struct models_config c = config();
    struct models_lease l;
    struct answer first, again;
    struct err e = {0};
    if (!make_models() || !OK_CALL(prefix_open(&c.prefix, unit_memdir(), NULL, &e), e))
        return;
    c.budget_bytes = one_bytes + one_bytes / 2;
    struct models *ms = open_with(&c);
    if (ms && get(ms, &l, 0, NULL)) {
        OK(ask(&first, l.engine, 7) && first.n_cached == 0);
        models_release(ms, &l);
        OK(touch(ms, 1, NULL) && !is_loaded(ms, 0));
        OK(get(ms, &l, 0, NULL) && ask(&again, l.engine, 7));
        struct engine_counters k;
        engine_counters(l.engine, &k);
        OK_MSG(k.prefix.hit_tokens[PREFIX_DISK] == 64 && again.n_cached >= 64, "%u known",
               again.n_cached);
        OK(same(&first, &again));
        models_release(ms, &l);
    }
    close_all(ms);
    prefix_close(c.prefix);
}

/* A model that goes the moment it has answered has had no time for writing behind: pages of the
 * prompt are still in RAM alone then, and reading each takes long. */
static void test_unloading_first_writes_what_only_ram_has(void)
{
    struct models_config c = config();
    struct models_lease l;
    struct answer first, again;
    struct err e = {0};
    if (!make_models() || !OK_CALL(prefix_open(&c.prefix, unit_memdir(), NULL, &e), e))
        return;
    c.keep_alive_ns = 0;
    struct models *ms = open_with(&c);
    if (ms && get(ms, &l, 0, NULL)) {
        gauge.read_us = 100000;
        OK(ask_for(&first, l.engine, 7, 1));
        models_release(ms, &l);
        OK(gone_within(ms, 0, 10000));
        gauge.read_us = 0;
        OK(get(ms, &l, 0, NULL) && ask_for(&again, l.engine, 7, 1));
        OK_MSG(again.n_cached >= 64, "%u known", again.n_cached);
        OK(same(&first, &again));
        models_release(ms, &l);
    }
    close_all(ms);
    prefix_close(c.prefix);
}

static void test_another_context_keeps_the_weights_and_answers_as_a_fresh_engine(void)
{
    static const uint32_t ctx[] = {256, 96, N_CTX};
    struct models_config c = config();
    struct models_lease l;
    struct answer first, again, want;
    struct err e = {0};
    if (!make_models() || !OK_CALL(prefix_open(&c.prefix, unit_memdir(), NULL, &e), e))
        return;
    struct models *ms = open_with(&c);
    if (ms && get(ms, &l, 0, NULL) && ask(&first, l.engine, 11)) {
        int loads = gauge.n_loads, opens = gauge.n_opens;
        models_release(ms, &l);
        for (size_t i = 0; i < ARRAY_LEN(ctx); i++) {
            struct models_options o = {.n_ctx = ctx[i]};
            if (!get(ms, &l, 0, &o))
                break;
            OK(engine_info(l.engine)->n_ctx == ctx[i]);
            OK(ask(&again, l.engine, 11) && same(&first, &again));
            OK_MSG(again.n_cached >= 64, "%u known", again.n_cached);
            OK(ask(&again, l.engine, 12 + i) && ask_alone(&want, 0, ctx[i], 12 + i));
            OK(again.n_cached == 0 && same(&want, &again));
            models_release(ms, &l);
        }
        OK_MSG(gauge.n_loads == loads, "%d weights were loaded again", gauge.n_loads - loads);
        OK_MSG(gauge.n_opens == opens && gauge.most_open == 1, "the device was opened anew");
    }
    close_all(ms);
    prefix_close(c.prefix);
}

static void test_a_context_that_is_refused_leaves_the_engine_as_it_was(void)
{
    struct models_config c = config();
    struct models_options much = {.n_ctx = 100000}, other = {.n_ctx = 64};
    struct models_lease l, l2;
    struct answer a;
    struct err e = {0}, e2 = {0};
    struct models *ms = open_with(&c);
    if (!ms)
        return;
    OK(touch(ms, 0, NULL));
    int loads = gauge.n_loads;
    OK(models_get(ms, &l, paths[0], &much, &e) && e.code == ERR_LIMIT && !l.engine);
    OK_MSG(strstr(e.msg, "100000"), "%s", e.msg);
    OK(get(ms, &l, 0, NULL) && engine_info(l.engine)->n_ctx == N_CTX && ask(&a, l.engine, 1));
    OK(models_get(ms, &l2, paths[0], &other, &e2) && e2.code == ERR_BUSY);
    OK_MSG(strstr(e2.msg, "128, not 64"), "%s", e2.msg);
    OK(gauge.n_loads == loads);
    models_release(ms, &l);
    close_all(ms);
}

/* Whichever allocation fails: the old shape, the new one, or none; then a load brings it back. */
static void test_any_allocation_of_another_context_may_fail(void)
{
    struct models_config c = config();
    struct models_options o = {.n_ctx = 256};
    bool whole = false;
    int n_failed = 0;
    for (uint64_t n = 1; !whole && n < 5000; n++) {
        struct models *ms = open_with(&c);
        struct models_lease l;
        struct answer a;
        struct err e = {0};
        if (!ms || !touch(ms, 0, NULL))
            return;
        uint64_t before = mem_alloc_count();
        mem_fail_at(n);
        int rc = models_get(ms, &l, paths[0], &o, &e);
        whole = mem_alloc_count() - before < n;
        mem_fail_at(0);
        n_failed += rc != 0;
        OK_MSG(!rc || (e.code == ERR_MEMORY && !l.engine), "allocation %d: %s", (int)n, e.msg);
        OK(!rc || get(ms, &l, 0, &o));
        OK(l.engine && engine_info(l.engine)->n_ctx == 256 && ask(&a, l.engine, 3));
        models_release(ms, &l);
        close_all(ms);
    }
    OK(whole && n_failed > 10);
}

/* ---- the device ---- */

struct asker {
    struct engine *en;
    int i, n;
    uint64_t prompt;
    struct answer got;
    bool ok;
    pthread_t id;
};

static void *asker_main(void *arg)
{
    struct asker *a = arg;
    a->ok = true;
    for (int k = 0; k < a->n; k++)
        a->ok = ask(&a->got, a->en, a->prompt) && a->ok;
    return NULL;
}

static void test_engines_share_one_device_one_at_a_time(void)
{
    struct models_config c = config();
    struct models_lease l[2];
    struct asker a[2] = {0};
    struct answer want;
    struct models *ms = open_with(&c);
    if (!ms || !get(ms, &l[0], 0, NULL) || !get(ms, &l[1], 1, NULL))
        return;
    OK_MSG(gauge.most_open == 1 && gauge.n_open == 1, "%d devices were open", gauge.most_open);
    int one = gauge.n_weights / 2;
    gauge.run_us = 200;
    for (int i = 0; i < 2; i++) {
        a[i] = (struct asker){.en = l[i].engine, .i = i, .n = 10, .prompt = 30 + (uint64_t)i};
        CHECK(!pthread_create(&a[i].id, NULL, asker_main, &a[i]));
    }
    for (int i = 0; i < 2; i++) {
        pthread_join(a[i].id, NULL);
        OK(a[i].ok && ask_alone(&want, i, N_CTX, a[i].prompt) && same(&want, &a[i].got));
    }
    gauge.run_us = 0;
    struct err e = {0};
    models_release(ms, &l[0]);
    OK_CALL(models_unload(ms, paths[0], &e), e);
    OK_MSG(gauge.n_weights == one && gauge.n_open == 1, "%d weights of %d", gauge.n_weights, one);
    models_release(ms, &l[1]);
    close_all(ms);
}

enum { N_TURNS = 100, N_TAKERS = 3 };
static struct {
    struct shared_device *s;
    pthread_barrier_t start;
    int n[N_TAKERS];     /* turns so far; the device's holder's, as the rest */
    int last, n_repeats; /* who had the last turn; turns that followed one of the same taker */
} turns;

/* Counted while all go on: then there is somebody to give way to. */
static int slow_run(struct exec *x, const struct batch *b, struct err *e)
{
    int taker = b->n_rows;
    bool all = true;
    usleep(500);
    for (int i = 0; i < N_TAKERS; i++)
        all = all && turns.n[i] < N_TURNS - 1;
    turns.n_repeats += all && turns.last == taker;
    turns.last = taker;
    turns.n[taker]++;
    return 0;
}

static void *taker_main(void *arg)
{
    pthread_barrier_wait(&turns.start);
    for (int i = 0; i < N_TURNS; i++)
        shared_run(turns.s, NULL, arg, NULL);
    return NULL;
}

/* Who comes back from its turn finds the others waiting. */
static void test_turns_on_a_device_are_fair(void)
{
    static struct backend be;
    struct batch taker[N_TAKERS];
    pthread_t id[N_TAKERS];
    struct err e = {0};
    be = backend_cpu;
    be.run = slow_run;
    turns.last = -1;
    if (!OK_CALL(shared_device_take(&turns.s, &be, 0, 1, &e), e))
        return;
    pthread_barrier_init(&turns.start, NULL, N_TAKERS);
    for (int i = 0; i < N_TAKERS; i++) {
        taker[i] = (struct batch){.n_rows = i};
        CHECK(!pthread_create(&id[i], NULL, taker_main, &taker[i]));
    }
    for (int i = 0; i < N_TAKERS; i++)
        pthread_join(id[i], NULL);
    OK_MSG(turns.n_repeats <= N_TURNS / 5, "%d turns followed one of the same taker",
           turns.n_repeats);
    pthread_barrier_destroy(&turns.start);
    shared_device_drop(turns.s);
}

/* ---- all at once ---- */

enum { N_STORM = 8, N_ROUNDS = SANITIZED ? 25 : 60 };

struct storm {
    struct models *ms;
    uint64_t seed;
    const struct answer *want;
    int n_got, n_refused, n_wrong;
    char bad[500];
    pthread_t id;
};

static int storm_progress(void *user, uint64_t done, uint64_t total)
{
    struct storm *s = user;
    return unit_rand(&s->seed) % 40 == 0;
}

static void storm_round(struct storm *s)
{
    static const uint32_t ctx[] = {0, 0, 0, 0, 128, 256};
    int i = (int)(unit_rand(&s->seed) % N_MODELS);
    struct models_options o = {.n_ctx = ctx[unit_rand(&s->seed) % ARRAY_LEN(ctx)],
                               .has_keep_alive = true,
                               .keep_alive_ns = (int64_t)(unit_rand(&s->seed) % 3) * 2000000,
                               .progress = unit_rand(&s->seed) % 3 ? NULL : storm_progress,
                               .user = s};
    struct models_lease l;
    struct models_status all[8];
    struct err e = {0};
    struct answer a;
    if (models_get(s->ms, &l, paths[i], &o, &e)) {
        s->n_refused++;
        if (e.code != ERR_MEMORY && e.code != ERR_BUSY && e.code != ERR_CANCELLED)
            snprintf(s->bad, sizeof s->bad, "%s", e.msg);
        return;
    }
    s->n_got++;
    s->n_wrong += !ask(&a, l.engine, (uint64_t)i) || !same(&a, &s->want[i]);
    models_list(s->ms, all, ARRAY_LEN(all));
    models_release(s->ms, &l);
    if (unit_rand(&s->seed) % 4 == 0)
        models_unload(s->ms, paths[i], NULL);
}

static void *storm_main(void *arg)
{
    for (int i = 0; i < N_ROUNDS; i++)
        storm_round(arg);
    return NULL;
}

static void test_eight_threads_and_four_models_in_room_for_two(void)
{
    static struct storm s[N_STORM];
    struct models_config c = config();
    struct answer want[N_MODELS];
    int n_got = 0;
    struct err e = {0};
    if (!make_models() || !OK_CALL(prefix_open(&c.prefix, unit_memdir(), NULL, &e), e))
        return;
    for (int i = 0; i < N_MODELS; i++)
        OK(ask_alone(&want[i], i, N_CTX, (uint64_t)i));
    c.budget_bytes = 2 * one_bytes + one_bytes / 2;
    struct models *ms = open_with(&c);
    for (int i = 0; ms && i < N_STORM; i++) {
        s[i] = (struct storm){.ms = ms, .seed = 70 + (uint64_t)i, .want = want};
        CHECK(!pthread_create(&s[i].id, NULL, storm_main, &s[i]));
    }
    for (int i = 0; ms && i < N_STORM; i++) {
        pthread_join(s[i].id, NULL);
        OK_MSG(!s[i].n_wrong && !*s[i].bad, "%d wrong; %s", s[i].n_wrong, s[i].bad);
        n_got += s[i].n_got;
    }
    OK_MSG(n_got > N_STORM * N_ROUNDS / 10, "only %d of %d came off", n_got, N_STORM * N_ROUNDS);
    close_all(ms);
    prefix_close(c.prefix);
}

int main(int argc, char **argv)
{
#define T(f)                                                                                       \
    {                                                                                              \
#f, test_##f                                                                               \
    }
    static const struct unit_test tests[] = {
        T(a_model_is_loaded_once_and_in_any_spelling_of_its_path),
        T(a_failed_load_leaves_nothing_and_the_next_try_works),
        T(two_callers_share_one_load_and_the_first_may_leave),
        T(a_load_that_nobody_waits_for_ends),
        T(any_allocation_of_a_load_may_fail),
        T(the_least_recently_used_goes_first),
        T(what_is_in_use_or_pinned_is_never_taken),
        T(what_never_fits_takes_nobody),
        T(no_more_than_so_many_at_a_time),
        T(keep_alive_unloads_what_is_idle),
        T(idle_models_wake_nobody),
        T(a_load_is_not_undone_before_its_caller_has_it),
        T(stop_lets_a_model_go_now_or_with_its_last_lease),
        T(a_file_that_changed_is_loaded_anew_when_idle),
        T(a_model_that_comes_back_finds_its_prompts_on_disk),
        T(unloading_first_writes_what_only_ram_has),
        T(another_context_keeps_the_weights_and_answers_as_a_fresh_engine),
        T(a_context_that_is_refused_leaves_the_engine_as_it_was),
        T(any_allocation_of_another_context_may_fail),
        T(engines_share_one_device_one_at_a_time),
        T(turns_on_a_device_are_fair),
        T(eight_threads_and_four_models_in_room_for_two),
    };
    log_threshold = LOG_ERROR;
    return unit_main(argc, argv, tests, ARRAY_LEN(tests));
}
