/* The load generator on a target that serves without a model (schedule, pacing, records, failures,
 * memory, Ctrl-C), then on an engine with a tiny model, and the command with its words. */
#include "cli/cli_internal.h"
#include "cli/load_gen.h"
#include "tests/unit/tiny.h"
#include "tests/unit/unit.h"

#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static struct load_spec plain_spec(void)
{
    return (struct load_spec){.prompt = {8, 8},
                              .gen = {4, 4},
                              .concurrency = 4,
                              .max_in_flight = 64,
                              .n_requests = 20,
                              .seed = 42};
}

/* ---- a target without a model: every step gives each request one token ---- */

enum { FAKE_MAX = 256 };

struct fake {
    pthread_mutex_t mu;
    pthread_t thread;
    struct request *active[FAKE_MAX];
    uint32_t n_given[FAKE_MAX]; /* tokens so far */
    bool cancel[FAKE_MAX];
    uint32_t n, most;
    bool stop;
    atomic_bool shut; /* no step is made */
    uint32_t step_us;
    /* what goes wrong with the i-th submit, counted from 1; 0: nothing does */
    uint32_t n_submits, full_every, long_every, bad_every, fail_every, short_every;
    uint32_t interrupt_at; /* this submit comes with a Ctrl-C */
    uint32_t fails[FAKE_MAX];
    uint64_t n_tokens;
};

static void fake_end(struct fake *f, uint32_t i, enum finish how)
{
    struct request *r = f->active[i];
    struct request_stats s = {.finish = how,
                              .n_prompt = (uint32_t)r->n_ids,
                              .n_generated = f->n_given[i],
                              .queue_ns = 1000};
    if (how == FINISH_ERROR)
        err_set(&s.err, ERR_DEVICE, "the device is gone");
    f->n--;
    f->active[i] = f->active[f->n];
    f->n_given[i] = f->n_given[f->n];
    f->cancel[i] = f->cancel[f->n];
    f->fails[i] = f->fails[f->n];
    r->on_done(r->user, &s);
}

static void fake_step(struct fake *f)
{
    for (uint32_t i = 0; i < f->n;) {
        struct request *r = f->active[i];
        if (f->cancel[i]) {
            fake_end(f, i, FINISH_CANCELLED);
            continue;
        }
        if (f->fails[i] == 1) {
            fake_end(f, i, FINISH_ERROR);
            continue;
        }
        r->on_token(r->user, 1, "", 0);
        f->n_tokens++;
        if (++f->n_given[i] == r->max_tokens || f->fails[i] == 2)
            fake_end(f, i, f->fails[i] == 2 ? FINISH_CONTEXT : FINISH_LENGTH);
        else
            i++;
    }
}

static void *fake_thread(void *arg)
{
    struct fake *f = arg;
    for (;;) {
        usleep(f->step_us);
        pthread_mutex_lock(&f->mu);
        bool stop = f->stop;
        if (!f->shut)
            fake_step(f);
        pthread_mutex_unlock(&f->mu);
        if (stop)
            return NULL;
    }
}

static bool fake_nth(uint32_t n, uint32_t every)
{
    return every && n % every == 0;
}

static int fake_submit(void *self, struct request *r, struct err *e)
{
    struct fake *f = self;
    int rc = 0;
    pthread_mutex_lock(&f->mu);
    uint32_t n = ++f->n_submits;
    if (f->interrupt_at == n)
        raise(SIGINT);
    if (fake_nth(n, f->full_every))
        rc = err_set(e, ERR_FULL, "too many wait");
    else if (fake_nth(n, f->long_every))
        rc = err_set(e, ERR_LIMIT, "too long");
    else if (fake_nth(n, f->bad_every))
        rc = err_set(e, ERR_USAGE, "not like this");
    CHECK(f->n < FAKE_MAX);
    if (!rc) {
        f->active[f->n] = r;
        f->n_given[f->n] = 0;
        f->cancel[f->n] = false;
        f->fails[f->n] = fake_nth(n, f->fail_every) ? 1 : fake_nth(n, f->short_every) ? 2 : 0;
        f->n++;
        f->most = MAX(f->most, f->n);
    }
    pthread_mutex_unlock(&f->mu);
    return rc;
}

static void fake_cancel(void *self, struct request *r)
{
    struct fake *f = self;
    pthread_mutex_lock(&f->mu);
    for (uint32_t i = 0; i < f->n; i++)
        if (f->active[i] == r)
            f->cancel[i] = true;
    pthread_mutex_unlock(&f->mu);
}

static struct load_target fake_start(struct fake *f)
{
    pthread_mutex_init(&f->mu, NULL);
    f->step_us = f->step_us ? f->step_us : 200;
    CHECK(pthread_create(&f->thread, NULL, fake_thread, f) == 0);
    return (struct load_target){f, 1000, fake_submit, fake_cancel};
}

static void fake_stop(struct fake *f)
{
    pthread_mutex_lock(&f->mu);
    f->stop = true;
    pthread_mutex_unlock(&f->mu);
    pthread_join(f->thread, NULL);
    pthread_mutex_destroy(&f->mu);
}

/* Warm up and run; NULL (and a failure is noted) when one of the two fails. */
static struct load *played(const struct load_spec *s, struct fake *f)
{
    struct err e = {0};
    struct load *l = NULL;
    struct load_target t = fake_start(f);
    OK_CALL(load_new(&l, s, &t, &e), e);
    if (l && (!OK_CALL(load_warm(l, &e), e) || !OK_CALL(load_run(l, &e), e))) {
        load_free(l);
        l = NULL;
    }
    fake_stop(f);
    return l;
}

/* ---- the schedule ---- */

static void test_a_seed_gives_the_same_requests_in_any_order(void)
{
    struct load_spec s = plain_spec(), other;
    s.prompt = (struct load_range){4, 64};
    s.gen = (struct load_range){1, 32};
    s.rate = 5;
    s.share = 0.5;
    s.n_shared = 3;
    other = s;
    other.seed = 43;
    uint32_t n_same = 0;
    for (uint64_t i = 100; i-- > 0;) {
        struct load_item a, b, c;
        int32_t x[64], y[64], z[64];
        load_item_at(&a, &s, i);
        load_item_at(&b, &s, i);
        load_item_at(&c, &other, i);
        load_item_ids(x, &s, i, 1000);
        load_item_ids(y, &s, i, 1000);
        load_item_ids(z, &other, i, 1000);
        OK(!memcmp(&a, &b, sizeof a) && !memcmp(x, y, a.n_prompt * sizeof *x));
        OK(load_gap_ns(&s, i) == load_gap_ns(&s, i));
        n_same += load_gap_ns(&s, i) == load_gap_ns(&other, i) || !memcmp(x, z, 3 * sizeof *x);
    }
    OK_MSG(n_same == 0, "%u of 100 do not depend on the seed", n_same);
}

static void test_lengths_are_even_over_the_whole_range(void)
{
    struct load_spec s = plain_spec();
    s.prompt = (struct load_range){10, 19};
    s.gen = (struct load_range){1, 3};
    uint32_t prompts[10] = {0}, gens[3] = {0};
    enum { N = 30000 };
    for (uint64_t i = 0; i < N; i++) {
        struct load_item it;
        load_item_at(&it, &s, i);
        CHECK(it.n_prompt >= 10 && it.n_prompt <= 19 && it.n_gen >= 1 && it.n_gen <= 3);
        prompts[it.n_prompt - 10]++;
        gens[it.n_gen - 1]++;
    }
    /* Five standard deviations of a binomial count. */
    for (int k = 0; k < 10; k++)
        OK_MSG(abs((int)prompts[k] - N / 10) < 260, "%d: %u times", k + 10, prompts[k]);
    for (int k = 0; k < 3; k++)
        OK_MSG(abs((int)gens[k] - N / 3) < 410, "%d: %u times", k + 1, gens[k]);
}

static void test_arrivals_are_poisson(void)
{
    struct load_spec s = plain_spec();
    enum { N = 40000 };
    double sum = 0, sum2 = 0;
    int longer = 0;
    s.rate = 50;
    for (uint64_t i = 0; i < N; i++) {
        double g = (double)load_gap_ns(&s, i) / 1e9 * s.rate; /* exponential, mean 1 */
        sum += g;
        sum2 += g * g;
        longer += g > 1;
    }
    double mean = sum / N, var = sum2 / N - mean * mean;
    OK_MSG(fabs(mean - 1) < 0.025, "mean %g", mean);
    OK_MSG(fabs(var - 1) < 0.08, "variance %g", var);
    OK_MSG(fabs((double)longer / N - exp(-1)) < 0.0125, "%g are longer", (double)longer / N);
}

static void test_the_share_of_common_prefixes_is_kept_and_only_they_are_common(void)
{
    static const double shares[] = {0, 0.1, 0.5, 0.8, 1};
    for (size_t k = 0; k < ARRAY_LEN(shares); k++) {
        struct load_spec s = plain_spec();
        int32_t first[8], ids[8], seen[1001][8];
        double n_shared = 0;
        s.share = shares[k];
        s.n_shared = 6;
        memset(first, 0, sizeof first);
        for (uint64_t i = 0; i < 1000; i++) {
            struct load_item it;
            load_item_at(&it, &s, i);
            load_item_ids(ids, &s, i, 1 << 30);
            if (it.n_shared && !n_shared++)
                memcpy(first, ids, sizeof first);
            OK(it.n_shared == 0 || it.n_shared == 6);
            OK(!it.n_shared == !!memcmp(ids, first, 6 * sizeof *ids));
            OK_MSG(fabs(n_shared - (double)(i + 1) * s.share) <= 1, "%g of %d", n_shared,
                   (int)i + 1);
            memcpy(seen[i], ids, sizeof ids);
            for (uint64_t j = i < 50 ? 0 : i; j < i; j++)
                OK(memcmp(seen[j] + 6, ids + 6, 2 * sizeof *ids));
        }
        /* The warm-up has the prefix, and nothing else, in common with the measured ones. */
        load_item_ids(seen[1000], &s, LOAD_WARMUP, 1 << 30);
        OK(memcmp(seen[1000] + 6, seen[0] + 6, 2 * sizeof *ids));
        OK((s.share < 1) == !!memcmp(seen[1000], seen[0], 6 * sizeof *ids) || s.share == 0.8);
    }
}

static void test_ids_are_in_the_vocabulary(void)
{
    struct load_spec s = plain_spec();
    bool seen[3] = {0};
    int32_t ids[8];
    for (uint64_t i = 0; i < 100; i++) {
        load_item_ids(ids, &s, i, 3);
        for (int k = 0; k < 8; k++) {
            CHECK(ids[k] >= 0 && ids[k] < 3);
            seen[ids[k]] = true;
        }
    }
    OK(seen[0] && seen[1] && seen[2]);
}

/* ---- percentiles ---- */

static void test_percentiles_are_nearest_rank(void)
{
    static const struct {
        uint64_t n;
        double p50, p95, p99; /* of the samples 1..n ms */
    } cases[] = {{1, 1, 1, 1},         {2, 1, 2, 2},         {4, 2, 4, 4},      {5, 3, 5, 5},
                 {20, 10, 19, 20},     {21, 11, 20, 21},     {100, 50, 95, 99}, {101, 51, 96, 100},
                 {200, 100, 190, 198}, {1000, 500, 950, 990}};
    static uint64_t v[1000];
    for (size_t k = 0; k < ARRAY_LEN(cases); k++) {
        uint64_t n = cases[k].n;
        struct load_dist d;
        for (uint64_t i = 0; i < n; i++)
            v[i] = (i * 7919 % n + 1) * 1000000; /* a permutation where n has no factor 7919 */
        load_dist_of(&d, v, n);
        OK_MSG(d.n == n && d.p50_ms == cases[k].p50 && d.p95_ms == cases[k].p95 &&
                   d.p99_ms == cases[k].p99 && d.max_ms == (double)n,
               "n %d: %g %g %g %g", (int)n, d.p50_ms, d.p95_ms, d.p99_ms, d.max_ms);
        OK_MSG(fabs(d.mean_ms - (double)(n + 1) / 2) < 1e-9, "n %d: mean %g", (int)n, d.mean_ms);
    }
    struct load_dist none;
    load_dist_of(&none, v, 0);
    OK(none.n == 0 && none.p99_ms == 0);
}

/* ---- runs ---- */

static void check_times(const struct load_result *r)
{
    for (uint64_t i = 0; i < r->n_records; i++) {
        const struct load_record *c = &r->records[i];
        uint64_t sum = 0;
        OK(c->due <= c->sent && c->sent <= c->done);
        if (c->outcome != LOAD_DONE)
            continue;
        OK(c->sent < c->first && c->first <= c->last && c->last <= c->done);
        OK(c->n_out == c->n_gen && c->n_gaps == c->n_gen - 1);
        for (uint32_t k = 0; k < c->n_gaps; k++)
            sum += r->gaps_ns[c->gaps_at + k];
        OK_MSG(sum == c->last - c->first, "request %d: gaps do not add up", (int)i);
        OK((double)c->done <= r->seconds * 1e9 + 1);
    }
}

static void test_closed_loop_keeps_its_clients_busy_and_no_more(void)
{
    struct load_spec s = plain_spec();
    struct fake f = {0};
    s.gen = (struct load_range){1, 9};
    s.n_requests = 40;
    struct load *l = played(&s, &f);
    if (!l)
        return;
    const struct load_result *r = load_result(l);
    uint64_t n_tokens = 0;
    OK_MSG(f.most == 4, "%u in flight", f.most);
    OK(r->n_records == 40 && r->n_outcome[LOAD_DONE] == 40 && !r->why.code && !r->interrupted);
    for (uint64_t i = 0; i < r->n_records; i++) {
        struct load_item it;
        load_item_at(&it, &s, i);
        OK(r->records[i].n_gen == it.n_gen && r->records[i].due == r->records[i].sent);
        n_tokens += it.n_gen;
    }
    check_times(r);
    struct load_summary sum;
    load_summarize(&sum, l);
    OK(sum.n_out == n_tokens && f.n_tokens == n_tokens && sum.n_in == 40 * 8);
    OK(sum.gap.n == n_tokens - 40 && sum.first.n == 40 && sum.whole.n == 40 && sum.queue.n == 40);
    OK(sum.gap.p50_ms >= 0.2 && sum.queue.max_ms == 0.001 && sum.late.max_ms == 0);
    OK(sum.whole.max_ms >= sum.first.max_ms && sum.whole.p99_ms <= r->seconds * 1e3);
    load_free(l);
}

static void *open_later(void *arg)
{
    struct fake *f = arg;
    usleep(120000);
    f->shut = false;
    return NULL;
}

static void test_open_loop_sends_on_time_while_nothing_is_answered(void)
{
    struct load_spec s = plain_spec();
    struct fake f = {.shut = true};
    pthread_t opener;
    s.rate = 1000;
    s.n_requests = 40;
    CHECK(pthread_create(&opener, NULL, open_later, &f) == 0);
    struct load *l = played(&s, &f);
    pthread_join(opener, NULL);
    if (!l)
        return;
    const struct load_result *r = load_result(l);
    uint64_t due = 0;
    OK_MSG(f.most == 40, "%u in flight", f.most);
    for (uint64_t i = 0; i < r->n_records; i++) {
        due += load_gap_ns(&s, i);
        OK(r->records[i].due == due && r->records[i].sent >= due);
    }
    check_times(r);
    /* The wait counts from when a request was due, not from when somebody had time for it. */
    struct load_summary sum;
    load_summarize(&sum, l);
    OK_MSG(sum.first.n == 40 && sum.first.max_ms > 60, "%g ms", sum.first.max_ms);
    load_free(l);
}

static void test_open_loop_with_few_buffers_is_late_and_says_so(void)
{
    struct load_spec s = plain_spec();
    struct fake f = {.step_us = 2000};
    s.rate = 100000;
    s.concurrency = s.max_in_flight = 2;
    s.n_requests = 6;
    struct load *l = played(&s, &f);
    if (!l)
        return;
    struct load_summary sum;
    load_summarize(&sum, l);
    OK(f.most == 2 && sum.late.n == 6);
    OK_MSG(sum.late.max_ms >= 12 && sum.first.max_ms > sum.late.max_ms, "%g", sum.late.max_ms);
    load_free(l);
}

static void test_failures_are_counted_by_kind_and_the_first_is_told(void)
{
    struct load_spec s = plain_spec();
    struct fake f = {
        .full_every = 4, .long_every = 6, .bad_every = 10, .fail_every = 7, .short_every = 9};
    s.n_requests = 20;
    struct load *l = played(&s, &f);
    if (!l)
        return;
    const struct load_result *r = load_result(l);
    /* 4 8 12 16 20; 6 18; 10; 7 14; 9 */
    OK(r->n_outcome[LOAD_QUEUE_FULL] == 5 && r->n_outcome[LOAD_TOO_LONG] == 2);
    OK(r->n_outcome[LOAD_REFUSED] == 1 && r->n_outcome[LOAD_FAILED] == 2);
    OK(r->n_outcome[LOAD_SHORT] == 1 && r->n_outcome[LOAD_DONE] == 9 && r->n_records == 20);
    OK_MSG(r->why.code == ERR_FULL && !strcmp(r->why.msg, "too many wait"), "%s", r->why.msg);
    check_times(r);
    struct load_summary sum;
    load_summarize(&sum, l);
    OK(sum.first.n == 9 && sum.gap.n == 27 && sum.n_out == 36 && sum.n_in == 72);
    load_free(l);
}

static void test_warmup_is_not_measured(void)
{
    struct load_spec s = plain_spec();
    struct fake f = {0};
    s.n_warmup = 7;
    struct load *l = played(&s, &f);
    if (!l)
        return;
    const struct load_result *r = load_result(l);
    OK(f.n_submits == 27 && r->n_records == 20 && r->n_outcome[LOAD_DONE] == 20);
    OK(r->records[0].gaps_at == 0 && r->records[0].sent < 1000000000);
    load_free(l);
}

static void test_warmup_of_an_open_loop_keeps_to_its_clients(void)
{
    struct load_spec s = plain_spec();
    struct fake f = {0};
    struct err e = {0};
    struct load *l = NULL;
    s.rate = 1;
    s.n_warmup = 30;
    s.concurrency = 3;
    struct load_target t = fake_start(&f);
    OK_CALL(load_new(&l, &s, &t, &e), e);
    OK_CALL(load_warm(l, &e), e);
    OK_MSG(f.most == 3 && f.n_submits == 30, "%u in flight", f.most);
    fake_stop(&f);
    load_free(l);
}

static void test_failing_warmup_fails(void)
{
    struct load_spec s = plain_spec();
    struct fake f = {.fail_every = 3};
    struct err e = {0};
    struct load *l = NULL;
    s.n_warmup = 5;
    struct load_target t = fake_start(&f);
    OK_CALL(load_new(&l, &s, &t, &e), e);
    OK(load_warm(l, &e) == -1 && e.code == ERR_DEVICE && strstr(e.msg, "the device is gone"));
    OK(f.n_submits == 5 && f.n == 0);
    fake_stop(&f);
    load_free(l);
}

static void test_duration_bounds_what_is_sent(void)
{
    for (int open = 0; open < 2; open++) {
        struct load_spec s = plain_spec();
        struct fake f = {0};
        s.n_requests = 0;
        s.duration_s = 0.06;
        s.rate = open ? 1000 : 0;
        struct load *l = played(&s, &f);
        if (!l)
            return;
        const struct load_result *r = load_result(l);
        OK_MSG(r->n_records >= 4 && r->n_outcome[LOAD_DONE] == r->n_records, "%d sent",
               (int)r->n_records);
        for (uint64_t i = 0; i < r->n_records; i++)
            OK(r->records[i].due < 60000000 && (open || r->records[i].sent < 90000000));
        OK(!r->no_room && (open || r->seconds >= 0.055));
        check_times(r);
        load_free(l);
    }
}

static void test_interrupt_cancels_what_runs_and_keeps_what_is_done(void)
{
    struct load_spec s = plain_spec();
    struct fake f = {.interrupt_at = 11};
    struct err e = {0};
    struct load *l = NULL;
    s.gen = (struct load_range){2, 60};
    struct load_target t = fake_start(&f);
    OK_CALL(load_new(&l, &s, &t, &e), e);
    interrupt_begin(load_wake_fd(l));
    OK_CALL(load_run(l, &e), e);
    const struct load_result *r = load_result(l);
    OK(r->interrupted && r->n_records == 11);
    OK(r->n_outcome[LOAD_CANCELLED] >= 1 && r->n_outcome[LOAD_DONE] >= 7);
    OK(r->n_outcome[LOAD_CANCELLED] + r->n_outcome[LOAD_DONE] == 11);
    check_times(r);
    /* Still pending: the next phase ends at once, too. */
    s.n_warmup = 1;
    struct load *l2 = NULL;
    OK_CALL(load_new(&l2, &s, &t, &e), e);
    OK(load_warm(l2, &e) == -1 && e.code == ERR_CANCELLED);
    interrupt_begin(-1); /* forget it */
    interrupt_end();
    fake_stop(&f);
    load_free(l);
    load_free(l2);
}

/* Serves within submit, before it returns. */
static int instant_submit(void *self, struct request *r, struct err *e)
{
    struct request_stats s = {.finish = FINISH_LENGTH, .n_generated = r->max_tokens};
    for (uint32_t i = 0; i < r->max_tokens; i++)
        r->on_token(r->user, 1, "", 0);
    r->on_done(r->user, &s);
    return 0;
}

static void test_a_target_may_answer_within_submit_and_nothing_is_allocated(void)
{
    struct load_spec s = plain_spec();
    struct load_target t = {NULL, 10, instant_submit, NULL};
    struct err e = {0};
    struct load *l = NULL;
    s.n_requests = 500;
    s.n_warmup = 3;
    OK_CALL(load_new(&l, &s, &t, &e), e);
    uint64_t allocs = mem_alloc_count();
    OK_CALL(load_warm(l, &e), e);
    OK_CALL(load_run(l, &e), e);
    struct load_summary sum;
    load_summarize(&sum, l);
    OK(mem_alloc_count() == allocs);
    OK(sum.first.n == 500 && sum.gap.n == 1500);
    load_free(l);
}

static void test_a_timed_run_ends_when_its_samples_are_full(void)
{
    struct load_spec s = plain_spec();
    struct load_target t = {NULL, 10, instant_submit, NULL};
    struct err e = {0};
    struct load *l = NULL;
    s.prompt = (struct load_range){1, 1};
    s.gen = (struct load_range){40000, 40000};
    s.n_requests = 0;
    s.duration_s = 1e6;
    OK_CALL(load_new(&l, &s, &t, &e), e);
    OK_CALL(load_run(l, &e), e);
    const struct load_result *r = load_result(l);
    OK_MSG(r->no_room && r->n_records == (1 << 24) / 39999, "%d sent", (int)r->n_records);
    load_free(l);
}

static void test_bad_specs_are_refused(void)
{
    struct load_spec good = plain_spec(), bad[10];
    struct load_target t = {NULL, 10, instant_submit, NULL};
    for (size_t i = 0; i < ARRAY_LEN(bad); i++)
        bad[i] = good;
    bad[0].prompt.min = 0;
    bad[1].gen.min = 0;
    bad[2].gen.max = 1;
    bad[3].concurrency = 0;
    bad[4].n_requests = 0;
    bad[5].share = 0.5;
    bad[5].n_shared = 8;
    bad[6].n_requests = 2000000;
    bad[7].gen.max = bad[7].gen.min = 1 << 30;
    bad[8].rate = 1e6;
    bad[8].n_requests = 0;
    bad[8].duration_s = 1e6;
    bad[9].rate = 1;
    bad[9].max_in_flight = 0;
    for (size_t i = 0; i < ARRAY_LEN(bad); i++) {
        struct load *l = NULL;
        struct err e = {0};
        OK_MSG(load_new(&l, &bad[i], &t, &e) == -1 && e.code && !l, "%zu was taken", i);
        OK_MSG((e.code == ERR_LIMIT) == (i >= 6 && i <= 8), "%zu: %s", i, e.msg);
    }
}

static void test_out_of_memory_is_an_error(void)
{
    struct load_spec s = plain_spec();
    struct load_target t = {NULL, 10, instant_submit, NULL};
    int rc = -1, n_failed = 0;
    for (uint64_t n = 1; rc && n < 50; n++) {
        struct load *l = NULL;
        struct err e = {0};
        mem_fail_at(n);
        rc = load_new(&l, &s, &t, &e);
        mem_fail_at(0);
        n_failed += rc != 0;
        OK(rc ? e.code == ERR_MEMORY && !l : !!l);
        load_free(l);
    }
    OK_MSG(rc == 0 && n_failed == 7, "%d failures", n_failed);
}

/* ---- an engine ---- */

static struct engine *open_tiny(struct model_file **mf, uint32_t n_seqs, uint32_t queue_len)
{
    static char path[256];
    struct tiny_spec spec;
    struct err e = {0};
    struct engine *en = NULL;
    tiny_defaults(&spec, "llama");
    snprintf(path, sizeof path, "%s/tiny.gguf", unit_tmpdir());
    OK_CALL(tiny_write(path, &spec, &e), e);
    OK_CALL(model_file_open(mf, NULL, path, &e), e);
    struct engine_config c = {.n_threads = 2, .n_seqs = n_seqs, .queue_len = queue_len};
    OK_CALL(engine_open(&en, *mf, &c, &e), e);
    CHECK(en);
    return en;
}

/* The whole of it on a tiny model; the caller frees the load. */
static struct load *play_engine(const struct load_spec *s, uint32_t n_seqs, uint32_t queue_len)
{
    struct model_file *mf = NULL;
    struct engine *en = open_tiny(&mf, n_seqs, queue_len);
    struct load_target t;
    struct err e = {0};
    struct load *l = NULL;
    load_target_engine(&t, en);
    OK(t.n_vocab == 384);
    OK_CALL(load_new(&l, s, &t, &e), e);
    CHECK(l);
    OK_CALL(load_warm(l, &e), e);
    OK_CALL(load_run(l, &e), e);
    engine_close(en);
    model_file_close(mf);
    return l;
}

static void test_engine_serves_every_request_in_full(void)
{
    struct load_spec s = plain_spec();
    s.prompt = (struct load_range){8, 100};
    s.gen = (struct load_range){1, 24};
    s.n_warmup = 2;
    s.concurrency = 6;
    struct load *l = play_engine(&s, 3, 16);
    const struct load_result *r = load_result(l);
    OK_MSG(r->n_outcome[LOAD_DONE] == 20, "%s", r->why.msg);
    check_times(r);
    struct load_summary sum;
    load_summarize(&sum, l);
    /* Six clients and three sequences: somebody waits. */
    OK(sum.queue.max_ms > 0 && sum.first.p50_ms >= sum.queue.p50_ms);
    OK_MSG(sum.n_cached == 0, "%d of the random tokens were found", (int)sum.n_cached);
    load_free(l);
}

static void test_engine_finds_shared_prefixes(void)
{
    struct load_spec s = plain_spec();
    s.prompt = (struct load_range){80, 80};
    s.share = 1;
    s.n_shared = 64;
    s.n_warmup = 1;
    s.concurrency = 1;
    struct load *l = play_engine(&s, 2, 16);
    struct load_summary sum;
    OK(load_result(l)->n_outcome[LOAD_DONE] == 20);
    load_summarize(&sum, l);
    OK_MSG(sum.n_cached == 20 * 64, "%d tokens were found", (int)sum.n_cached);
    load_free(l);
}

static void test_engine_refuses_what_does_not_fit_its_queue_or_context(void)
{
    struct load_spec s = plain_spec();
    s.rate = 100000;
    s.n_requests = 30;
    s.gen = (struct load_range){40, 40};
    struct load *l = play_engine(&s, 1, 2);
    const struct load_result *r = load_result(l);
    OK_MSG(r->n_outcome[LOAD_QUEUE_FULL] > 0 && r->n_outcome[LOAD_DONE] >= 2 &&
               r->n_outcome[LOAD_QUEUE_FULL] + r->n_outcome[LOAD_DONE] == 30,
           "%d, %s", (int)r->n_outcome[LOAD_QUEUE_FULL], r->why.msg);
    load_free(l);
    s = plain_spec();
    s.prompt = (struct load_range){300, 300}; /* the context has 256 */
    l = play_engine(&s, 1, 2);
    r = load_result(l);
    OK(r->n_outcome[LOAD_TOO_LONG] == 20 && strstr(r->why.msg, "256"));
    load_free(l);
    s.prompt = (struct load_range){200, 200};
    s.gen = (struct load_range){100, 100};
    s.n_requests = 2;
    l = play_engine(&s, 1, 4);
    OK(load_result(l)->n_outcome[LOAD_SHORT] == 2);
    load_free(l);
}

/* ---- the command ---- */

enum { MAX_WORDS = 24 };

/* Parse a line split at blanks and run the command. */
static int command(const char *line, struct err *e)
{
    static char copy[512];
    const struct command *c = &command_bench_serve;
    struct command_args a = {0};
    char *argv[MAX_WORDS + 1] = {0};
    int argc = 0;
    snprintf(copy, sizeof copy, "%s", line);
    for (char *w = strtok(copy, " "); w && argc < MAX_WORDS; w = strtok(NULL, " "))
        argv[argc++] = w;
    void *opts = mem_zalloc(c->opts_bytes);
    c->defaults(opts);
    int rc = options_parse(&a, opts, c, argc, argv, e);
    if (!rc)
        rc = c->run(&a, e);
    options_free(&a, opts);
    mem_free(opts);
    return rc;
}

static void test_bad_words_are_named(void)
{
    static const struct {
        const char *line, *has;
    } cases[] = {
        {"m --rate 2 --concurrency 3", "give one of them"},
        {"m --rate 0", "--rate: 0 is out of range"},
        {"m --prompt x", "--prompt: 'x' is not a number of tokens"},
        {"m --prompt 5:", "'5:' is not a number of tokens"},
        {"m --prompt 5:6:7", "'5:6:7' is not"},
        {"m --prompt -5", "'-5' is not"},
        {"m --prompt 6:5", "6:5 is out of range"},
        {"m --gen 0", "--gen: 0 is out of range"},
        {"m --gen 99999999999999999999", "--gen: '99999999999999999999' is not"},
        {"m --gen 2000000", "--gen: 2000000 is out of range"},
        {"m --shared-prefix 5", "'5' is not SHARE:TOKENS"},
        {"m --shared-prefix 1.5:5", "'1.5:5' is not SHARE:TOKENS"},
        {"m --shared-prefix nan:5", "'nan:5' is not SHARE:TOKENS"},
        {"m --shared-prefix 0.5:512", "not less than the shortest --prompt, 512"},
        {"m --shared-prefix 0.5:1:2", "write one number"},
        {"m --ctx 100", "--ctx 100 is less than the longest prompt and answer, 512 and 128"},
        {"m --seed 9223372036854775808", "--seed: 9223372036854775808 is out of range"},
        {"m --concurency 5", "did you mean --concurrency?"},
        {"", "argument is missing"},
    };
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        struct err e = {0};
        int rc = command(cases[i].line, &e);
        OK_MSG(rc == COMMAND_USAGE && strstr(e.msg, cases[i].has), "'%s' gave %d: '%s'",
               cases[i].line, rc, e.msg);
    }
    struct err e = {0};
    OK(command("https://127.0.0.1:8080", &e) == -1 && e.code == ERR_UNSUPPORTED);
    OK_MSG(strstr(e.msg, "the server comes later"), "%s", e.msg);
}

/* Run the command with its output in buf. */
static int command_output(struct buf *out, const char *line, struct err *e)
{
    char path[256];
    snprintf(path, sizeof path, "%s/out", unit_tmpdir());
    fflush(stdout);
    int saved = dup(1), fd = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);
    CHECK(saved >= 0 && fd >= 0 && dup2(fd, 1) == 1);
    int rc = command(line, e);
    fflush(stdout);
    CHECK(dup2(saved, 1) == 1);
    close(saved);
    close(fd);
    struct err re = {0};
    OK_CALL(file_read_all(out, path, 1 << 20, &re), re);
    return rc;
}

static double number_at(const json_t *j, const char *a, const char *b)
{
    json_t *v = json_object_get(j, a);
    if (b)
        v = json_object_get(v, b);
    return json_is_number(v) ? json_number_value(v) : -1;
}

static void test_command_prints_what_was_measured(void)
{
    struct tiny_spec spec;
    struct err e = {0};
    struct buf out = {0};
    char path[200], line[400];
    tiny_defaults(&spec, "llama");
    snprintf(path, sizeof path, "%s/t.gguf", unit_tmpdir());
    OK_CALL(tiny_write(path, &spec, &e), e);
    snprintf(line, sizeof line,
             "%s -q --concurrency 3 --requests 10 --prompt 40:60 --gen 5 --shared-prefix 1:32 "
             "--seed 7 --json",
             path);
    OK_CALL(command_output(&out, line, &e), e);
    json_t *j = json_loads(buf_str(&out), 0, NULL);
    OK_MSG(j, "no JSON: %s", buf_str(&out));
    OK(number_at(j, "requests", NULL) == 10 && number_at(j, "outcomes", "done") == 10);
    OK(number_at(j, "tokens_out", NULL) == 50 && number_at(j, "inter_token_ms", "n") == 40);
    OK(number_at(j, "ttft_ms", "n") == 10 && number_at(j, "ttft_ms", "p99") > 0);
    OK(number_at(j, "end_to_end_ms", "p50") >= number_at(j, "ttft_ms", "p50"));
    OK(number_at(j, "parallel", NULL) == 3 && number_at(j, "ctx", NULL) == 65);
    OK(number_at(j, "load", "seed") == 7 && number_at(j, "load", "concurrency") == 3);
    OK(number_at(j, "hit_rate", NULL) > 0.3 && number_at(j, "rows_a_step", NULL) >= 1);
    double in = number_at(j, "tokens_in", NULL), s = number_at(j, "seconds", NULL);
    OK(in >= 400 && in <= 600 && fabs(number_at(j, "in_tok_s", NULL) * s - in) < 1e-3 * in);
    json_decref(j);
    buf_clear(&out);
    snprintf(line, sizeof line, "%s -q --rate 500 --requests 8 --prompt 8 --gen 4", path);
    OK_CALL(command_output(&out, line, &e), e);
    OK_MSG(strstr(buf_str(&out), "open loop, 500 requests/s") &&
               strstr(buf_str(&out), "8 sent, 8 done") && strstr(buf_str(&out), "sent late") &&
               strstr(buf_str(&out), "between tokens"),
           "%s", buf_str(&out));
    buf_fini(&out);
}

static const struct unit_test tests[] = {
#define T(x)                                                                                       \
    {                                                                                              \
#x, test_##x                                                                               \
    }
    T(a_seed_gives_the_same_requests_in_any_order),
    T(lengths_are_even_over_the_whole_range),
    T(arrivals_are_poisson),
    T(the_share_of_common_prefixes_is_kept_and_only_they_are_common),
    T(ids_are_in_the_vocabulary),
    T(percentiles_are_nearest_rank),
    T(closed_loop_keeps_its_clients_busy_and_no_more),
    T(open_loop_sends_on_time_while_nothing_is_answered),
    T(open_loop_with_few_buffers_is_late_and_says_so),
    T(failures_are_counted_by_kind_and_the_first_is_told),
    T(warmup_is_not_measured),
    T(warmup_of_an_open_loop_keeps_to_its_clients),
    T(failing_warmup_fails),
    T(duration_bounds_what_is_sent),
    T(interrupt_cancels_what_runs_and_keeps_what_is_done),
    T(a_target_may_answer_within_submit_and_nothing_is_allocated),
    T(a_timed_run_ends_when_its_samples_are_full),
    T(bad_specs_are_refused),
    T(out_of_memory_is_an_error),
    T(engine_serves_every_request_in_full),
    T(engine_finds_shared_prefixes),
    T(engine_refuses_what_does_not_fit_its_queue_or_context),
    T(bad_words_are_named),
    T(command_prints_what_was_measured),
};

int main(int argc, char **argv)
{
    return unit_main(argc, argv, tests, ARRAY_LEN(tests));
}
