/* A storm on the engine's real thread: requests from many threads, half of them cancelled from
 * others in every state there is. Each ends once, nothing runs for the cancelled ones, what the
 * others get is what they get alone, and all pages come back. */
#include "engine/engine_internal.h"
#include "tests/unit/tiny.h"
#include "tests/unit/unit.h"

#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum {
    N_REQUESTS = 500,
    N_SUBMITTERS = 8,
    N_CANCELLERS = 4,
    N_CTX = 128,
    N_PROMPTS = 20,
    N_NEW = 90, /* more pages than were counted on at admission: somebody has to leave */
};

/* Where a request is, as the last step has seen it; also the moments for cancelling. */
enum place { AT_SUBMIT, AT_WAITING, AT_PROMPT, AT_DECODE, AT_SWAPPED, AT_DONE, PLACE_END };
static const char *const place_names[PLACE_END] = {"submit", "waiting", "prompt",
                                                   "decode", "swapped", "done"};

struct job {
    struct request r;
    uint32_t prompt;
    bool to_cancel;
    enum place cancel_at;
    atomic_bool submitted;
    atomic_int place, n_done;
    atomic_llong cancel_step; /* steps begun when engine_cancel had returned; -1: it has not */
    enum place cancelled_at;
    int32_t got[N_NEW];
    uint32_t n_got;
    struct request_stats stats;
};

static struct {
    char model[4096];
    struct engine *en;
    int32_t ids[N_PROMPTS][N_CTX], alone[N_PROMPTS][N_NEW];
    uint32_t n_ids[N_PROMPTS];
    struct job jobs[N_REQUESTS];
    atomic_llong step; /* begun */
    atomic_int n_late, n_dead_rows, n_full;
    atomic_bool closed;
} storm;

static void job_token(void *user, int32_t id, const char *text, size_t n)
{
    struct job *j = user;
    CHECK(j->n_got < N_NEW);
    j->got[j->n_got++] = id;
}

static void job_done(void *user, const struct request_stats *s)
{
    struct job *j = user;
    j->stats = *s;
    j->place = AT_DONE;
    j->n_done++;
}

/* The CPU backend. Step k + 1 may have been decided on when the cancel came during step k; in k + 2
 * nothing of it may run. */
static int storm_run(struct exec *x, const struct batch *b, struct err *e)
{
    struct engine *en = storm.en;
    long long step = ++storm.step;
    for (uint32_t i = 0; i < en->n_active; i++) {
        const struct seq *s = en->active[i];
        struct job *j = s->req->user;
        j->place = s->swapped_out ? AT_SWAPPED : s->state == SEQ_DECODE ? AT_DECODE : AT_PROMPT;
    }
    for (int32_t i = 0; i < b->n_seqs; i++) {
        const struct job *j = en->batch_owner[i]->req->user;
        long long at = j->cancel_step;
        storm.n_late += at >= 0 && step > at + 1;
        storm.n_dead_rows += j->n_done > 0;
    }
    return backend_cpu.run(x, b, e);
}

/* ---- the threads ---- */

static void cancel(struct job *j)
{
    j->cancelled_at = (enum place)j->place;
    engine_cancel(storm.en, &j->r);
    j->cancel_step = storm.step;
}

/* Every N_SUBMITTERS-th request, some at once, some in twos, with pauses. */
static void *submitter(void *arg)
{
    uint32_t first = (uint32_t)(uintptr_t)arg;
    uint64_t rng = 77 + first;
    for (uint32_t i = first; i < N_REQUESTS;) {
        struct request *r[2] = {&storm.jobs[i].r, NULL};
        uint32_t second = i + N_SUBMITTERS, n = 1;
        struct err e = {0};
        if (second < N_REQUESTS && unit_rand(&rng) % 4 == 0)
            r[n++] = &storm.jobs[second].r;
        if (engine_submit_all(storm.en, r, n, &e)) {
            CHECK(e.code == ERR_FULL);
            storm.n_full++;
            usleep(300);
            continue;
        }
        for (uint32_t k = 0; k < n; k++, i += N_SUBMITTERS) {
            struct job *j = &storm.jobs[i];
            if (j->to_cancel && j->cancel_at == AT_SUBMIT)
                cancel(j);
            j->submitted = true;
        }
        if (unit_rand(&rng) % 4 == 0)
            usleep(unit_rand(&rng) % 500);
    }
    return NULL;
}

static bool has_come(const struct job *j)
{
    return j->submitted && (j->place >= (int)j->cancel_at || j->place == AT_DONE);
}

/* Goes round those that are to be cancelled until all are: each when its moment has come. */
static void *canceller(void *arg)
{
    uint32_t first = (uint32_t)(uintptr_t)arg, n_left = 1;
    while (n_left && !storm.closed) {
        n_left = 0;
        for (uint32_t i = first; i < N_REQUESTS; i += N_CANCELLERS) {
            struct job *j = &storm.jobs[i];
            if (!j->to_cancel || j->cancel_step >= 0)
                continue;
            if (j->cancel_at != AT_SUBMIT && has_come(j))
                cancel(j);
            n_left++;
        }
        usleep(50);
    }
    return NULL;
}

/* ---- before and after ---- */

static bool make_model(void)
{
    struct tiny_spec s;
    struct err e = {0};
    tiny_defaults(&s, "llama");
    s.width = s.n_ffn = 32;
    s.n_layers = 1;
    s.n_heads = 2;
    s.n_kv_heads = 1;
    s.n_vocab = TINY_MIN_VOCAB;
    snprintf(storm.model, sizeof storm.model, "%s/storm.gguf", unit_tmpdir());
    return OK_CALL(tiny_write(storm.model, &s, &e), e);
}

static bool open_engine(const struct engine_config *c, const struct backend *be)
{
    struct model_file *f = NULL;
    struct err e = {0};
    storm.en = NULL;
    if (OK_CALL(model_file_open(&f, NULL, storm.model, &e), e))
        OK_CALL(engine_open_on(&storm.en, f, c, be, &e), e);
    model_file_close(f);
    return storm.en;
}

static void fill_request(struct job *j, uint32_t prompt)
{
    j->prompt = prompt;
    j->cancel_step = -1;
    j->r = (struct request){.ids = storm.ids[prompt],
                            .n_ids = storm.n_ids[prompt],
                            .max_tokens = N_NEW,
                            .ignore_eog = true,
                            .on_token = job_token,
                            .on_done = job_done,
                            .user = j};
    sample_defaults(&j->r.sample);
    j->r.sample.seed = 5 + prompt;
}

/* The prompts, every one with half of another, and what comes of them alone. */
static bool learn_answers(void)
{
    struct engine_config cfg = {.n_ctx = N_CTX, .n_threads = 1, .quiet_load = true};
    static struct job j;
    struct err e = {0};
    uint64_t rng = 3;
    bool ok = open_engine(&cfg, &backend_cpu);
    for (uint32_t p = 0; p < N_PROMPTS && ok; p++) {
        storm.n_ids[p] = 1 + (uint32_t)(unit_rand(&rng) % (N_CTX - N_NEW));
        for (uint32_t i = 0; i < N_CTX; i++)
            storm.ids[p][i] = p && i < N_CTX / 3 && p % 4
                                  ? storm.ids[p - 1][i]
                                  : 3 + (int32_t)(unit_rand(&rng) % (TINY_MIN_VOCAB - 3));
        memset((void *)&j, 0, sizeof j);
        fill_request(&j, p);
        j.r.no_reuse = true;
        ok = OK_CALL(engine_run(storm.en, &j.r, &j.stats, &e), e) && OK(j.n_got == N_NEW);
        memcpy(storm.alone[p], j.got, sizeof j.got);
    }
    engine_close(storm.en);
    return ok;
}

/* Half of the requests, evenly over the moments. */
static void draw_jobs(void)
{
    static const char *const tenants[] = {NULL, "a", "b"};
    uint64_t rng = 4;
    uint32_t n_cancel = 0;
    for (uint32_t i = 0; i < N_REQUESTS; i++) {
        struct job *j = &storm.jobs[i];
        fill_request(j, (uint32_t)(unit_rand(&rng) % N_PROMPTS));
        j->r.tenant = tenants[unit_rand(&rng) % 3];
        j->r.priority = (int32_t)(unit_rand(&rng) % 5) - 2;
        uint32_t left = N_REQUESTS - i;
        j->to_cancel = unit_rand(&rng) % left < N_REQUESTS / 2 - n_cancel;
        if (j->to_cancel)
            j->cancel_at = (enum place)(n_cancel++ % PLACE_END);
        j->place = AT_WAITING;
    }
}

static bool all_done(void)
{
    for (uint32_t i = 0; i < N_REQUESTS; i++) {
        const struct job *j = &storm.jobs[i];
        if (!j->n_done || (j->to_cancel && j->cancel_step < 0))
            return false;
    }
    return true;
}

static void run_threads(void)
{
    pthread_t t[N_SUBMITTERS + N_CANCELLERS];
    for (uintptr_t i = 0; i < N_SUBMITTERS; i++)
        CHECK(!pthread_create(&t[i], NULL, submitter, (void *)i));
    for (uintptr_t i = 0; i < N_CANCELLERS; i++)
        CHECK(!pthread_create(&t[N_SUBMITTERS + i], NULL, canceller, (void *)i));
    for (int i = 0; i < 120000 && !all_done(); i++)
        usleep(1000);
    OK(all_done());
    storm.closed = true;
    for (uint32_t i = 0; i < ARRAY_LEN(t); i++)
        pthread_join(t[i], NULL);
}

static void check_job(const struct job *j)
{
    int at = (int)(j - storm.jobs);
    bool cancelled = j->stats.finish == FINISH_CANCELLED;
    OK_MSG(j->n_done == 1, "request %d ends %d times", at, j->n_done);
    OK_MSG(cancelled ? j->to_cancel : j->stats.finish == FINISH_LENGTH && j->n_got == N_NEW,
           "request %d ends with %s after %u tokens", at, finish_name(j->stats.finish), j->n_got);
    OK_MSG(!memcmp(j->got, storm.alone[j->prompt], j->n_got * sizeof *j->got),
           "request %d: other tokens", at);
    OK_MSG(!j->r.seq && j->n_got == j->stats.n_generated, "request %d: %u tokens of %u", at,
           j->n_got, j->stats.n_generated);
}

static void check_counters(uint64_t n_cancelled)
{
    struct engine_counters k;
    engine_counters(storm.en, &k);
    OK_MSG(k.n_requests == N_REQUESTS, "%" PRIu64 " requests", k.n_requests);
    OK(k.n_steps == (uint64_t)storm.step && k.n_rows >= k.n_prompt_rows);
    OK_MSG(!k.n_held_pages && !k.n_active && !k.n_waiting && !k.n_swapped,
           "%u pages held, %u active, %u waiting, %u swapped", k.n_held_pages, k.n_active,
           k.n_waiting, k.n_swapped);
    OK_MSG(k.n_free_pages + k.prefix.n_pages == k.n_pages, "%u free, %u in the tree, %u in all",
           k.n_free_pages, k.prefix.n_pages, k.n_pages);
    OK(k.n_swapped_out >= k.n_swapped_in && k.n_swapped_out > 0);
    printf("  %d requests, %" PRIu64 " ended as cancelled, %" PRIu64 " steps, %" PRIu64
           " swapped out, %" PRIu64 " in, %d times full\n",
           N_REQUESTS, n_cancelled, k.n_steps, k.n_swapped_out, k.n_swapped_in, storm.n_full);
}

static void test_storm_of_cancels_ends_each_request_once_and_returns_all_pages(void)
{
    struct engine_config cfg = {.n_ctx = N_CTX,
                                .n_threads = 1,
                                .n_seqs = 6,
                                .max_batch = 12,
                                .kv_pages = 5,
                                .prefix_ram_bytes = 1,
                                .queue_len = 40,
                                .quiet_load = true};
    struct backend be = backend_cpu;
    uint32_t n_at[PLACE_END] = {0};
    uint64_t n_cancelled = 0;
    be.run = storm_run;
    if (!make_model() || !learn_answers() || !open_engine(&cfg, &be))
        return;
    draw_jobs();
    run_threads();
    for (uint32_t i = 0; i < N_REQUESTS; i++) {
        const struct job *j = &storm.jobs[i];
        check_job(j);
        n_cancelled += j->stats.finish == FINISH_CANCELLED;
        n_at[j->cancelled_at] += j->to_cancel;
    }
    OK_MSG(!storm.n_late, "%d times rows of a cancelled request were run", storm.n_late);
    OK_MSG(!storm.n_dead_rows, "%d times rows of an ended request were run", storm.n_dead_rows);
    check_counters(n_cancelled);
    for (int i = AT_WAITING; i < PLACE_END; i++) {
        printf("  %s%s %u%s", i == AT_WAITING ? "cancelled while " : "", place_names[i], n_at[i],
               i == AT_DONE ? "\n" : ",");
        OK_MSG(n_at[i] > 0, "nobody was cancelled while %s", place_names[i]);
    }
    engine_close(storm.en);
    for (uint32_t i = 0; i < N_REQUESTS; i++)
        OK(storm.jobs[i].n_done == 1);
}

/* ---- a queue that ends faster than it is told ---- */

enum { N_FLOODERS = 3, N_FLOOD = 4000 };

struct flooder {
    pthread_t id;
    atomic_int n_done, n_wrong;
};

static void flood_done(void *user, const struct request_stats *s)
{
    struct flooder *f = user;
    f->n_wrong += s->finish != FINISH_DEADLINE;
    f->n_done++;
}

/* Requests whose time is over when they come. */
static void *flood(void *arg)
{
    struct flooder *f = arg;
    for (int i = 0; i < N_FLOOD;) {
        struct request r = {.ids = storm.ids[0],
                            .n_ids = 1,
                            .max_tokens = 1,
                            .deadline_ns = 1,
                            .on_done = flood_done,
                            .user = f};
        struct err e = {0};
        sample_defaults(&r.sample);
        if (engine_submit(storm.en, &r, &e)) {
            CHECK(e.code == ERR_FULL);
            sched_yield();
            continue;
        }
        i++;
        while (f->n_done < i)
            sched_yield();
    }
    return NULL;
}

static void test_requests_that_end_in_the_queue_keep_their_place_until_they_are_told(void)
{
    static struct flooder f[N_FLOODERS];
    struct engine_config cfg = {.n_ctx = N_CTX, .n_threads = 1, .queue_len = 1, .quiet_load = true};
    if (!*storm.model && !make_model())
        return;
    if (!open_engine(&cfg, &backend_cpu))
        return;
    for (int i = 0; i < N_FLOODERS; i++)
        CHECK(!pthread_create(&f[i].id, NULL, flood, &f[i]));
    for (int i = 0; i < N_FLOODERS; i++) {
        pthread_join(f[i].id, NULL);
        OK_MSG(f[i].n_done == N_FLOOD && !f[i].n_wrong, "%d told, %d of them wrongly", f[i].n_done,
               f[i].n_wrong);
    }
    struct request *two[2] = {&storm.jobs[0].r, &storm.jobs[1].r};
    struct err e = {0};
    fill_request(&storm.jobs[0], 0);
    fill_request(&storm.jobs[1], 0);
    storm.jobs[0].r.n_ids = storm.jobs[1].r.n_ids = 1;
    OK_MSG(engine_submit_all(storm.en, two, 2, &e) && e.code == ERR_LIMIT &&
               strstr(e.msg, "2 requests at once") && strstr(e.msg, "1;"),
           "%s", e.msg);
    engine_close(storm.en);
}

int main(int argc, char **argv)
{
#define T(f)                                                                                       \
    {                                                                                              \
#f, test_##f                                                                               \
    }
    static const struct unit_test tests[] = {
        T(storm_of_cancels_ends_each_request_once_and_returns_all_pages),
        T(requests_that_end_in_the_queue_keep_their_place_until_they_are_told),
    };
    log_threshold = LOG_ERROR;
    return unit_main(argc, argv, tests, ARRAY_LEN(tests));
}
