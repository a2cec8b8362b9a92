/* The scenarios of ../shared/cases that need no server, by their ids: what they must hold is
 * checked on the engine, its prefix cache and its models. The ids of those that wait for the server
 * or for parts that are not there are printed. Counts of tokens, clients and seconds are scaled to
 * a tiny model, the situation is the same: where a step has to last, the backend sleeps. */
#include "engine/models.h"
#include "store/prefix.h"
#include "tests/unit/asks.h"

#include <fcntl.h>
#include <inttypes.h>
#include <jansson.h>
#include <math.h>
#include <sys/stat.h>

/* ---- the list ---- */

static json_t *listed; /* id -> true: implemented here */

static bool read_list(void)
{
    const char *path = unit_shared("cases/scenarios/cases.jsonl");
    FILE *f = path && !listed ? fopen(path, "r") : NULL;
    char *line = NULL;
    size_t cap = 0;
    if (!f)
        return listed != NULL;
    listed = json_object();
    while (getline(&line, &cap, f) > 0) {
        json_t *j = json_loads(line, 0, NULL);
        const char *id = json_string_value(json_object_get(j, "id"));
        if (OK_MSG(id, "a scenario without an id: %.60s", line))
            json_object_set_new(listed, id, json_false());
        json_decref(j);
    }
    free(line);
    fclose(f);
    return true;
}

/* Whether the running test has to show scenario `id`; it is marked as here. */
static bool scenario(const char *id)
{
    if (!read_list() || !OK_MSG(json_object_get(listed, id), "%s is not among the scenarios", id))
        return false;
    json_object_set_new(listed, id, json_true());
    return true;
}

static void test_the_rest_is_named(void)
{
    const char *id;
    json_t *here;
    size_t n = 0;
    if (!read_list())
        return;
    printf("  not here:");
    json_object_foreach(listed, id, here)
    {
        n += json_is_true(here);
        if (!json_is_true(here))
            printf(" %s", id);
    }
    printf("\n  %zu of %zu scenarios are shown on the engine\n", n, json_object_size(listed));
    json_decref(listed);
}

/* ---- a machine that takes its time ---- */

static struct {
    struct backend be;
    _Atomic uint64_t step_us, row_us;
    atomic_int n_prepared;
} slow;

static int slow_run(struct exec *x, const struct batch *b, struct err *e)
{
    uint64_t us = slow.step_us + slow.row_us * (uint64_t)b->n_rows;
    if (us)
        usleep((useconds_t)us);
    return backend_cpu.run(x, b, e);
}

static int slow_prepare(struct device *d, struct exec **out, const struct plan *p, struct err *e)
{
    slow.n_prepared++;
    return backend_cpu.prepare(d, out, p, e);
}

static const struct backend *slowed(uint64_t step_us, uint64_t row_us)
{
    slow.be = backend_cpu;
    slow.be.run = slow_run;
    slow.be.prepare = slow_prepare;
    slow.step_us = step_us;
    slow.row_us = row_us;
    slow.n_prepared = 0;
    return &slow.be;
}

static struct engine_counters counters(struct engine *en)
{
    struct engine_counters k;
    engine_counters(en, &k);
    return k;
}

/* Until cond holds, at most ten seconds. */
#define WAIT(cond)                                                                                 \
    ({                                                                                             \
        for (int wait_i = 0; wait_i < 50000 && !(cond); wait_i++)                                  \
            usleep(200);                                                                           \
        OK_MSG(cond, "it never came to %s", #cond);                                                \
    })

/* The answer of a request alone, on an engine without any cache. */
static bool answer_alone(struct ask *want, const struct ask *a, struct engine *plain)
{
    memcpy(want->ids, a->ids, sizeof want->ids);
    ask_ready(want, a->r.n_ids, a->r.max_tokens);
    want->r.no_reuse = true;
    return ask_run(want, plain);
}

static bool same_answer(const struct ask *a, const struct ask *want)
{
    return OK_MSG(a->n_got == want->n_got && ask_agrees(a, want), "%zu tokens, %zu wanted%s",
                  a->n_got, want->n_got, a->n_got == want->n_got ? ", but others" : "");
}

/* ---- concurrency ---- */

static void test_many_on_small_context(void)
{
    enum { N = 16, N_CTX = 512 };
    static struct ask asks[N], want;
    struct engine_config c = {.n_ctx = N_CTX, .n_seqs = 8, .kv_pages = N_CTX / P};
    if (!scenario("many-on-small-context"))
        return;
    struct engine *en = asks_engine(asks_model(1, 2048), &c, &backend_cpu);
    struct engine *plain =
        asks_engine(asks_model(1, 2048), &(struct engine_config){.n_ctx = N_CTX}, &backend_cpu);
    struct request *all[N];
    struct err e = {0};
    for (uint64_t i = 0; i < N; i++) {
        ask_init(&asks[i], 7, 7, 0, i);
        for (int k = 3; k < 7; k++)
            asks[i].ids[k] = 3 + 'a';
        asks[i].r.max_tokens = 120;
        all[i] = &asks[i].r;
    }
    if (en && plain && OK_CALL(engine_submit_all(en, all, N, &e), e))
        for (int i = 0; i < N; i++)
            if (ask_wait(&asks[i]) && answer_alone(&want, &asks[i], plain))
                same_answer(&asks[i], &want);
    if (en && OK(counters(en).n_held_pages == 0))
        ask_run(&asks[3], en);
    engine_close(en);
    engine_close(plain);
}

/* The client of `a` goes away: it ends as cancelled within a second and its pages are back. */
static void leave(struct engine *en, struct ask *a)
{
    uint64_t begin = now_ns();
    engine_cancel(en, &a->r);
    if (!ask_wait(a))
        return;
    OK_MSG(now_ns() - begin < 1000000000, "%.1f s until it ended",
           (double)(now_ns() - begin) / 1e9);
    OK_MSG(a->s.finish == FINISH_CANCELLED, "it ended with %s", finish_name(a->s.finish));
}

static void test_client_leaves_while_queued(void)
{
    static struct ask busy, queued, want;
    struct engine_config c = {.n_ctx = 2048, .n_seqs = 1};
    if (!scenario("client-leaves-while-queued"))
        return;
    struct engine *en = asks_engine(asks_model(1, 2048), &c, slowed(1000, 0));
    ask_init(&busy, 1, 40, 40, 0);
    ask_init(&queued, 2, 300, 300, 0);
    busy.r.max_tokens = 400;
    if (en && OK(ask_submit(&busy, en))) {
        WAIT(counters(en).n_rows > 45);
        OK(ask_submit(&queued, en));
        usleep(100000);
        OK(counters(en).n_waiting == 1);
        leave(en, &queued);
        OK(!busy.done && queued.n_got == 0);
        ask_wait(&busy);
        OK_MSG(counters(en).n_prompt_rows == 40, "%" PRIu64 " prompt rows",
               counters(en).n_prompt_rows);
        if (answer_alone(&want, &busy, en))
            same_answer(&busy, &want);
        queued.r.seq = NULL;
        ask_run(&queued, en);
    }
    engine_close(en);
}

static void test_client_leaves_while_prefilling(void)
{
    static struct ask a;
    struct engine_config c = {.n_ctx = 2048, .n_seqs = 1, .max_batch = 16};
    if (!scenario("client-leaves-while-prefilling"))
        return;
    struct engine *en = asks_engine(asks_model(1, 2048), &c, slowed(2000, 0));
    ask_init(&a, 1, 1500, 1500, 0);
    if (en && OK(ask_submit(&a, en))) {
        WAIT(counters(en).n_prompt_rows >= 64);
        uint64_t steps = counters(en).n_steps;
        leave(en, &a);
        OK_MSG(counters(en).n_steps - steps <= 2, "%" PRIu64 " steps more",
               counters(en).n_steps - steps);
        OK(counters(en).n_prompt_rows < 1000 && !counters(en).n_active &&
           !counters(en).n_held_pages);
        slow.step_us = 0;
        ask_run(&a, en);
    }
    engine_close(en);
}

static void test_client_leaves_non_streaming(void)
{
    static struct ask a;
    struct engine_config c = {.n_ctx = 2048, .n_seqs = 4};
    if (!scenario("client-leaves-non-streaming"))
        return;
    struct engine *en = asks_engine(asks_model(1, 2048), &c, slowed(2000, 0));
    ask_init(&a, 1, 40, 40, 0);
    a.r.max_tokens = 1000;
    if (en && OK(ask_submit(&a, en))) {
        usleep(200000);
        leave(en, &a);
        OK_MSG(a.n_got > 0 && a.n_got < 1000, "%zu tokens", a.n_got);
        OK(!counters(en).n_active && !counters(en).n_held_pages);
        ask_init(&a, 1, 40, 40, 0);
        ask_run(&a, en);
    }
    engine_close(en);
}

/* Gaps between the tokens of a stream. */
struct stream {
    struct ask a;
    uint64_t at[2048];
    atomic_uint n;
};

static void stream_token(void *user, int32_t id, const char *text, size_t n)
{
    struct stream *s = user;
    ask_token(&s->a, id, text, n);
    s->at[s->n] = now_ns();
    s->n++;
}

static void stream_done(void *user, const struct request_stats *st)
{
    ask_done(&((struct stream *)user)->a, st);
}

static int by_size(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

/* One run: the longest gap beside the prompt, as a part of what it may be at most. */
static double gap_beside_prompt(struct engine *en)
{
    static struct stream s;
    static struct ask prompt;
    uint64_t before[2048], worst = 0;
    memset((void *)&s, 0, sizeof s);
    ask_init(&s.a, 1, 30, 30, 0);
    ask_init(&prompt, 2, 1500, 1500, 0);
    prompt.r.no_reuse = true;
    s.a.r.max_tokens = 600;
    s.a.r.on_token = stream_token;
    s.a.r.on_done = stream_done;
    s.a.r.user = &s;
    if (!OK(ask_submit(&s.a, en)))
        return INFINITY;
    WAIT(s.n >= 60);
    uint32_t first = s.n;
    OK(ask_submit(&prompt, en));
    ask_wait(&prompt);
    uint32_t last = s.n;
    OK_MSG(!s.a.done && last > first + 3, "the stream was not beside it: %u to %u", first, last);
    ask_wait(&s.a);
    for (uint32_t i = 1; i < first; i++)
        before[i - 1] = s.at[i] - s.at[i - 1];
    qsort(before, first - 1, sizeof *before, by_size);
    for (uint32_t i = first; i < last; i++)
        worst = MAX(worst, s.at[i] - s.at[i - 1]);
    double median = (double)before[(first - 1) / 2];
    /* a step: what it takes alone, and what --max-step-ms adds */
    return (double)worst / (5 * median + (median + 50e6));
}

static void test_decode_beside_prefill(void)
{
    static struct ask want;
    double part = INFINITY;
    struct engine_config c = {.n_ctx = 2048, .n_seqs = 4};
    if (!scenario("decode-beside-prefill"))
        return;
    struct engine *en = asks_engine(asks_model(1, 2048), &c, slowed(1000, 300));
    /* another process may have the core for a moment, so three tries; without chunks the prompt
     * alone takes 450 ms each time */
    for (int i = 0; i < 3 && en && part > 1; i++)
        part = gap_beside_prompt(en);
    OK_MSG(part <= 1, "the longest gap is %.2f of what it may be", part);
    printf("  the longest gap is %.2f of what it may be\n", part);
    ask_init(&want, 1, 30, 30, 0);
    engine_close(en);
}

static double seconds_of_four(int32_t n_threads, struct ask *four)
{
    struct engine_config c = {.n_ctx = 256, .n_seqs = 4, .n_threads = n_threads};
    struct engine *en = asks_engine(asks_model(1, 2048), &c, &backend_cpu);
    struct request *all[4];
    struct err e = {0};
    for (uint64_t i = 0; i < 4; i++) {
        ask_init(&four[i], i, 30, 30, 0);
        four[i].r.max_tokens = 50;
        all[i] = &four[i].r;
    }
    uint64_t begin = now_ns();
    if (en && OK_CALL(engine_submit_all(en, all, 4, &e), e))
        for (int i = 0; i < 4; i++)
            ask_wait(&four[i]);
    double s = (double)(now_ns() - begin) / 1e9;
    engine_close(en);
    return s;
}

static void test_threads_above_cpus(void)
{
    static struct ask few[4], many[4];
    int32_t n = (int32_t)sysconf(_SC_NPROCESSORS_ONLN);
    double ratio = INFINITY;
    if (!scenario("threads-above-cpus"))
        return;
    for (int t = 0; t < 5 && ratio > 4; t++) {
        double base = seconds_of_four(n, few);
        ratio = MIN(ratio, seconds_of_four(4 * n, many) / base);
        for (int i = 0; i < 4; i++)
            same_answer(&many[i], &few[i]);
    }
    printf("  %d threads on %d cores take %.1f times as long\n", 4 * n, n, ratio);
    OK_MSG(ratio <= 4, "%.1f times slower", ratio);
}

/* ---- the cache ---- */

enum { N_TALKS = 8, N_SECRET = 32, MAX_TALK = 700 };

struct talk {
    int32_t ids[ASK_MAX_IDS], secret[N_SECRET];
    char secret_text[N_SECRET + 1];
    size_t n;
};

static void talk_begin(struct talk *t, uint64_t number)
{
    uint64_t rng = 900 + number;
    for (size_t i = 0; i < N_SECRET; i++) {
        t->secret_text[i] = (char)('a' + unit_rand(&rng) % 26);
        t->secret[i] = 3 + t->secret_text[i];
    }
    memcpy(t->ids, t->secret, sizeof t->secret);
    t->n = N_SECRET;
}

static void talk_add(struct talk *t, const int32_t *ids, size_t n)
{
    memcpy(t->ids + t->n, ids, n * sizeof *ids);
    t->n += n;
}

static bool holds_secret(const struct ask *a, const struct talk *t)
{
    for (size_t i = 0; i + 4 <= a->n_got; i++)
        for (size_t k = 0; k + 4 <= N_SECRET; k++)
            if (!memcmp(a->got + i, t->secret + k, 4 * sizeof *a->got))
                return true;
    return false;
}

/* Two talks go on at the same moment; the answers are those of an engine without a cache. */
static void go_on(struct engine *en, struct engine *plain, struct talk *talks, uint64_t *rng)
{
    static struct ask a[2], want;
    size_t who[2] = {unit_rand(rng) % N_TALKS, unit_rand(rng) % (N_TALKS - 1)};
    struct request *all[2] = {&a[0].r, &a[1].r};
    struct err e = {0};
    who[1] += who[1] >= who[0];
    for (int i = 0; i < 2; i++) {
        struct talk *t = &talks[who[i]];
        if (t->n > MAX_TALK)
            talk_begin(t, who[i]);
        for (int k = 0; k < 9; k++)
            t->ids[t->n++] = 3 + (int32_t)(unit_rand(rng) % 250);
        memcpy(a[i].ids, t->ids, sizeof t->ids);
        ask_ready(&a[i], t->n, 8);
    }
    if (!OK_CALL(engine_submit_all(en, all, 2, &e), e))
        return;
    for (int i = 0; i < 2; i++) {
        if (!ask_wait(&a[i]) || !answer_alone(&want, &a[i], plain) || !same_answer(&a[i], &want))
            return;
        for (size_t k = 0; k < N_TALKS; k++)
            OK_MSG(k == who[i] || !holds_secret(&a[i], &talks[k]), "talk %zu tells of %zu", who[i],
                   k);
        talk_add(&talks[who[i]], a[i].got, a[i].n_got);
    }
}

/* What the rounds wrote to the log, whole. */
static char *log_of_rounds(struct engine *en, struct engine *plain, struct talk *talks,
                           const char *path, int n_rounds)
{
    enum log_level was = log_threshold;
    uint64_t rng = 17;
    int keep = dup(2), fd = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);
    log_threshold = LOG_DEBUG;
    dup2(fd, 2);
    log_line(LOG_DEBUG, "rounds begin");
    for (int i = 0; i < n_rounds; i++)
        go_on(en, plain, talks, &rng);
    dup2(keep, 2);
    log_threshold = was;
    off_t n = lseek(fd, 0, SEEK_END);
    char *text = calloc(1, (size_t)n + 1);
    if (!OK(pread(fd, text, (size_t)n, 0) == n))
        text[0] = 0;
    close(fd);
    close(keep);
    return text;
}

static void test_eight_secrets(void)
{
    static struct talk talks[N_TALKS];
    char home[160], path[200];
    if (!scenario("eight-secrets"))
        return;
    snprintf(home, sizeof home, "%s", unit_memdir());
    snprintf(path, sizeof path, "%s/log", home);
    for (uint64_t i = 0; i < N_TALKS; i++)
        talk_begin(&talks[i], i);
    /* room for about three talks of middle length, two of which run */
    struct engine_config c = {.n_ctx = 1024,
                              .n_seqs = 2,
                              .kv_pages = 1024 / P,
                              .prefix_ram_bytes = 1,
                              .prefix_store = asks_store(home)};
    struct engine *en = asks_engine(asks_model(1, 2048), &c, &backend_cpu);
    struct engine *plain =
        asks_engine(asks_model(1, 2048), &(struct engine_config){.n_ctx = 1024}, &backend_cpu);
    if (en && plain) {
        char *log = log_of_rounds(en, plain, talks, path, SANITIZED ? 60 : 400);
        OK(strstr(log, "rounds begin"));
        for (int i = 0; i < N_TALKS; i++)
            OK_MSG(!strstr(log, talks[i].secret_text), "the log has secret %d", i);
        free(log);
        struct prefix_counters k = counters(en).prefix;
        printf("  hit tokens: ram %" PRIu64 ", copy %" PRIu64 ", disk %" PRIu64
               "; missed pages: first seen %" PRIu64 ", evicted %" PRIu64 "\n",
               k.hit_tokens[PREFIX_RAM], k.hit_tokens[PREFIX_COPY], k.hit_tokens[PREFIX_DISK],
               k.miss_pages[PREFIX_MISS_FIRST_SEEN], k.miss_pages[PREFIX_MISS_EVICTED]);
        OK(k.hit_tokens[PREFIX_RAM] && k.hit_tokens[PREFIX_COPY] && k.hit_tokens[PREFIX_DISK]);
        OK(k.miss_pages[PREFIX_MISS_FIRST_SEEN] > 0);
    }
    engine_close(en);
    engine_close(plain);
    prefix_close(c.prefix_store);
}

/* Start with the tier in `home`, ask the three prompts, stop. Gives the tokens that were found. */
static uint32_t three_prompts(const char *home, struct ask *asks, struct prefix_counters *k)
{
    struct engine_config c = {.n_ctx = 1024, .prefix_store = home ? asks_store(home) : NULL};
    struct engine *en = asks_engine(asks_model(1, 2048), &c, &backend_cpu);
    uint32_t n_found = 0;
    for (uint64_t i = 0; i < 3 && en; i++) {
        ask_init(&asks[i], 20 + i, 500, 500, 0);
        asks[i].r.no_reuse = !home;
        ask_run(&asks[i], en);
        n_found += asks[i].s.n_cached;
    }
    if (en && k)
        *k = counters(en).prefix;
    engine_close(en);
    prefix_close(c.prefix_store);
    return n_found;
}

static char *read_whole(const char *path, size_t *n)
{
    struct stat st = {0};
    int fd = open(path, O_RDONLY);
    fstat(fd, &st);
    char *b = malloc((size_t)st.st_size + 1);
    *n = (size_t)st.st_size;
    OK(read(fd, b, *n) == (ssize_t)*n);
    close(fd);
    return b;
}

static bool write_whole(const char *path, const char *b, size_t n)
{
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    bool ok = OK(fd >= 0 && write(fd, b, n) == (ssize_t)n);
    close(fd);
    return ok;
}

static void test_prefix_store_damaged(void)
{
    enum { ALL = 3 * (500 / P * P) };
    static struct ask want[3], got[3];
    char home[160], path[200];
    size_t n = 0, n_less = 0, n_starts = 0;
    enum log_level was = log_threshold;
    uint64_t rng = 5;
    if (!scenario("prefix-store-damaged"))
        return;
    snprintf(home, sizeof home, "%s", unit_memdir());
    snprintf(path, sizeof path, "%s/prefix.db", home);
    three_prompts(NULL, want, NULL);
    OK(three_prompts(home, got, NULL) == 0 && three_prompts(home, got, NULL) == ALL);
    char *whole = read_whole(path, &n);
    log_threshold = LOG_ERROR;
    for (size_t at = 0; at < n; at += (SANITIZED ? 4 : 1) * 4096, n_starts++) {
        struct prefix_counters k = {0};
        size_t where = at + unit_rand(&rng) % 4096;
        asks_forget(home);
        whole[where] ^= (char)(1 << at / 4096 % 8);
        write_whole(path, whole, n);
        whole[where] ^= (char)(1 << at / 4096 % 8);
        uint32_t found = three_prompts(home, got, &k);
        for (int i = 0; i < 3; i++)
            same_answer(&got[i], &want[i]);
        uint64_t missed = 0;
        for (int i = 0; i < PREFIX_MISS_END; i++)
            missed += k.miss_pages[i];
        OK_MSG(missed * P + found == ALL, "byte %zu: %u found, %" PRIu64 " pages missed", where,
               found, missed);
        n_less += found < ALL;
    }
    log_threshold = was;
    printf("  %zu starts, %zu with a miss\n", n_starts, n_less);
    OK(n_starts > 5 && n_less > 0);
    asks_forget(home);
    OK(three_prompts(home, got, NULL) == 0 && same_answer(&got[0], &want[0]));
    free(whole);
}

static void test_prefix_two_models(void)
{
    static struct ask a, want;
    char home[160], path[200];
    if (!scenario("prefix-two-models"))
        return;
    snprintf(home, sizeof home, "%s", unit_memdir());
    snprintf(path, sizeof path, "%s/m.gguf", home);
    for (uint64_t seed = 1; seed <= 2; seed++) {
        size_t n;
        char *bytes = read_whole(asks_model(seed, 2048), &n);
        struct engine_config c = {.n_ctx = 512, .prefix_store = asks_store(home)};
        struct engine_config plain = {.n_ctx = 512};
        struct engine *en =
            write_whole(path, bytes, n) ? asks_engine(path, &c, &backend_cpu) : NULL;
        ask_init(&a, 3, 200, 200, 0);
        if (en && ask_run(&a, en)) {
            OK_MSG(a.s.n_cached == 0, "%u tokens of another model", a.s.n_cached);
            OK(seed == 1 || counters(en).prefix.miss_pages[PREFIX_MISS_OTHER_MODEL] == 200 / P);
        }
        engine_close(en);
        prefix_close(c.prefix_store);
        en = asks_engine(asks_model(seed, 2048), &plain, &backend_cpu);
        if (en && answer_alone(&want, &a, en))
            same_answer(&a, &want);
        engine_close(en);
        free(bytes);
    }
}

/* ---- models ---- */

static void *get_and_ask(void *arg)
{
    struct ask *a = arg;
    struct models_lease l = {0};
    struct models *ms = a->r.user;
    ask_init(a, 1, 30, 30, 0);
    if (!models_get(ms, &l, asks_model(1, 2048), NULL, &a->e) && ask_submit(a, l.engine))
        for (int i = 0; i < 50000 && !a->done; i++)
            usleep(200);
    models_release(ms, &l);
    return NULL;
}

static void test_idle_unload_busy(void)
{
    static struct ask stream, three[3];
    struct models_config c;
    struct models *ms = NULL;
    struct models_lease l = {0};
    struct models_status st = {0};
    struct err e = {0};
    pthread_t t[3];
    if (!scenario("idle-unload-busy"))
        return;
    models_defaults(&c);
    c.engine = (struct engine_config){.n_ctx = 512, .n_seqs = 4, .n_threads = 1};
    c.keep_alive_ns = 100000000;
    if (!OK_CALL(models_open_on(&ms, &c, slowed(2000, 0), &e), e))
        return;
    ask_init(&stream, 1, 30, 30, 0);
    stream.r.max_tokens = 300;
    if (OK_CALL(models_get(ms, &l, asks_model(1, 2048), NULL, &e), e) &&
        OK(ask_submit(&stream, l.engine))) {
        while (!stream.done) {
            OK(models_list(ms, &st, 1) == 1 && st.state == MODELS_READY && st.n_leases == 1);
            usleep(20000);
        }
        models_release(ms, &l);
    }
    OK_MSG(stream.n_got == 300 && slow.n_prepared == 1, "%zu tokens, %d loads", stream.n_got,
           slow.n_prepared);
    WAIT(models_list(ms, &st, 1) == 0);
    slow.step_us = 0;
    for (int i = 0; i < 3; i++) {
        three[i].r.user = ms;
        CHECK(!pthread_create(&t[i], NULL, get_and_ask, &three[i]));
    }
    for (int i = 0; i < 3; i++) {
        pthread_join(t[i], NULL);
        OK_MSG(three[i].done && three[i].n_got == 6, "%zu tokens: %s", three[i].n_got,
               three[i].e.msg);
    }
    OK_MSG(slow.n_prepared == 2, "%d loads", slow.n_prepared);
    models_close(ms);
}

static void test_nan_weights(void)
{
    static struct ask a;
    const char *path = unit_shared("cases/loader/weights-nan-block.gguf");
    struct engine_config c = {.n_ctx = 128, .n_threads = 1, .quiet_load = true};
    struct model_file *f = NULL;
    struct engine *en = NULL;
    struct err e = {0};
    if (!scenario("nan-weights") || !path)
        return;
    if (model_file_open(&f, NULL, path, &e) || engine_open_on(&en, f, &c, &backend_cpu, &e))
        OK_MSG(e.code && *e.msg, "refused without a word");
    for (uint64_t i = 0; i < 2 && en; i++) {
        ask_init(&a, i, 5, 5, 0);
        a.r.ignore_eog = false;
        if (ask_submit(&a, en) && ask_wait(&a))
            OK_MSG(a.s.finish < FINISH_CANCELLED || (a.s.finish == FINISH_ERROR && *a.s.err.msg),
                   "it ends with %s", finish_name(a.s.finish));
    }
    printf("  %s\n", !en ? e.msg : a.s.finish == FINISH_ERROR ? a.s.err.msg : "it answers");
    engine_close(en);
    model_file_close(f);
}

int main(int argc, char **argv)
{
#define T(f)                                                                                       \
    {                                                                                              \
#f, test_##f                                                                               \
    }
    static const struct unit_test tests[] = {
        T(many_on_small_context),
        T(client_leaves_while_queued),
        T(client_leaves_while_prefilling),
        T(client_leaves_non_streaming),
        T(decode_beside_prefill),
        T(threads_above_cpus),
        T(eight_secrets),
        T(prefix_store_damaged),
        T(prefix_two_models),
        T(idle_unload_busy),
        T(nan_weights),
        T(the_rest_is_named),
    };
    return unit_main(argc, argv, tests, ARRAY_LEN(tests));
}
