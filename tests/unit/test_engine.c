/* The engine on a backend that computes nothing (scheduling, text, limits, reuse, cancelling,
 * memory) and on the CPU backend behind a spy that holds it to the bit-for-bit rule. */
#include "tests/unit/fake_engine.h"
#include "tests/unit/spy.h"

#include <sys/resource.h>

/* Run text as the answer to a prompt of one token; returns what came out. */
static void run_text(struct client *c, const char *answer, uint32_t max_tokens,
                     const char *const *stop, size_t n_stop)
{
    static int32_t script[N_CTX];
    struct engine_config cfg = {0};
    struct engine *en = fake_engine(&cfg);
    for (size_t i = 0; answer[i]; i++)
        script[i] = BYTE0 + (unsigned char)answer[i];
    script[strlen(answer)] = 2; /* </s> */
    fake.script = script;
    client_init(c, 1, 1, max_tokens);
    c->r.ignore_eog = false;
    c->r.stop = stop;
    c->r.n_stop = n_stop;
    if (en)
        client_run(c, en);
    engine_close(en);
}

/* ---- text ---- */

static void test_stop_string_across_tokens_ends_the_answer_and_never_shows(void)
{
    static const char *const stop[] = {"###", "<END>"};
    struct client c;
    run_text(&c, "one <EN two # <END> three", 0, stop, 2);
    OK_MSG(!strcmp(buf_str(&c.text), "one <EN two # "), "'%s'", buf_str(&c.text));
    OK(c.stats.finish == FINISH_STOP_STRING);
    OK(c.stats.n_generated == strlen("one <EN two # <END>"));
    client_fini(&c);
}

static void test_held_text_comes_out_when_no_stop_string_follows(void)
{
    static const char *const stop[] = {"<END>"};
    struct client c;
    run_text(&c, "ab<EN", 0, stop, 1);
    OK_MSG(!strcmp(buf_str(&c.text), "ab<EN"), "'%s'", buf_str(&c.text));
    OK(c.stats.finish == FINISH_STOP);
    client_fini(&c);
    run_text(&c, "ab<END>", 4, stop, 1);
    OK_MSG(!strcmp(buf_str(&c.text), "ab<E"), "'%s'", buf_str(&c.text));
    OK(c.stats.finish == FINISH_LENGTH && c.stats.n_generated == 4);
    client_fini(&c);
}

static void test_text_comes_in_whole_characters(void)
{
    struct client c;
    run_text(&c, "\xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80!", 0, NULL, 0);
    OK_MSG(!strcmp(buf_str(&c.text), "\xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80!"), "'%s'",
           buf_str(&c.text));
    OK(c.whole && c.stats.finish == FINISH_STOP);
    client_fini(&c);
    run_text(&c, "a\xf0\x9f\x98\x80", 3, NULL, 0); /* cut inside the character */
    OK_MSG(!strcmp(buf_str(&c.text), "a\xef\xbf\xbd"), "'%s'", buf_str(&c.text));
    OK(c.whole && c.stats.finish == FINISH_LENGTH);
    client_fini(&c);
}

static void test_stop_find_says_what_must_be_held(void)
{
    static const char *const stop[] = {"abab", "x"};
    static const size_t len[] = {4, 1};
    size_t hold;
    OK(stop_find(&hold, "zabab", 5, stop, len, 2) == 1);
    OK(stop_find(&hold, "zababx", 6, stop, len, 2) == 1);
    OK(stop_find(&hold, "zxabab", 6, stop, len, 2) == 1);
    OK(stop_find(&hold, "zaba", 4, stop, len, 2) == -1 && hold == 3);
    OK(stop_find(&hold, "zabab" + 1, 3, stop, len, 1) == -1 && hold == 3);
    OK(stop_find(&hold, "abaab", 5, stop, len, 1) == -1 && hold == 2);
    OK(stop_find(&hold, "b", 1, stop, len, 2) == -1 && hold == 0);
    OK(stop_find(&hold, "", 0, stop, len, 2) == -1 && hold == 0);
}

/* ---- limits ---- */

static void test_answer_ends_where_the_context_is_full(void)
{
    struct engine_config cfg = {.n_ctx = 40};
    struct engine *en = fake_engine(&cfg);
    struct client c;
    client_init(&c, 33, 1, 0);
    if (en && client_run(&c, en)) {
        OK(c.stats.finish == FINISH_CONTEXT);
        OK_MSG(c.stats.n_generated == 7, "%u tokens", c.stats.n_generated);
    }
    client_fini(&c);
    engine_close(en);
}

static void test_bad_requests_are_refused_by_name(void)
{
    static const char *const empty[] = {"a", ""};
    struct engine_config cfg = {.n_ctx = 64};
    struct engine *en = fake_engine(&cfg);
    struct client c;
    client_init(&c, 65, 1, 1);
    struct err e[6] = {0};
    if (!en)
        return;
    OK(engine_submit(en, &c.r, &e[0]) && e[0].code == ERR_LIMIT);
    OK_MSG(strstr(e[0].msg, "65") && strstr(e[0].msg, "64"), "%s", e[0].msg);
    c.r.n_ids = 64;
    OK(engine_submit(en, &c.r, &e[1]) && e[1].code == ERR_LIMIT);
    c.r.n_ids = 0;
    OK(engine_submit(en, &c.r, &e[2]) && e[2].code == ERR_USAGE);
    c.r.n_ids = 2;
    c.ids[1] = 283;
    OK(engine_submit(en, &c.r, &e[3]) && e[3].code == ERR_USAGE && strstr(e[3].msg, "283"));
    c.ids[1] = 282;
    c.r.stop = empty;
    c.r.n_stop = 2;
    OK(engine_submit(en, &c.r, &e[4]) && strstr(e[4].msg, "stop string 2 is empty"));
    c.r.n_stop = 0;
    c.r.sample.top_p = -1;
    OK(engine_submit(en, &c.r, &e[5]) && strstr(e[5].msg, "top_p"));
    client_fini(&c);
    engine_close(en);
}

static void wait_for_active(struct engine *en, uint32_t n)
{
    struct engine_counters k = {0};
    for (int t = 0; t < 10000 && k.n_active != n; t++) {
        usleep(500);
        engine_counters(en, &k);
    }
    OK(k.n_active == n);
}

static void test_full_queue_refuses_and_the_others_are_answered(void)
{
    enum { N = 5 };
    struct engine_config cfg = {.n_seqs = 1, .queue_len = 3};
    struct engine *en = fake_engine(&cfg);
    struct client c[N];
    struct err e = {0};
    for (int i = 0; i < N; i++)
        client_init(&c[i], 4, (uint64_t)i, 3);
    if (en) {
        fake.shut = true; /* the first one's step is held, three wait */
        OK_CALL(engine_submit(en, &c[0].r, &e), e);
        wait_for_active(en, 1);
        for (int i = 1; i < 4; i++)
            OK_CALL(engine_submit(en, &c[i].r, &e), e);
        OK(engine_submit(en, &c[4].r, &e) && e.code == ERR_FULL && strstr(e.msg, "3 requests"));
        fake.shut = false;
        for (int i = 0; i < 4; i++)
            OK(client_wait(&c[i]) && c[i].stats.finish == FINISH_LENGTH && c[i].n_got == 3);
        OK(!c[4].done);
    }
    engine_close(en);
    for (int i = 0; i < N; i++)
        client_fini(&c[i]);
}

static void test_what_does_not_fit_is_refused_with_what_would(void)
{
    struct engine *en;
    struct err e = {0}, e2 = {0}, e3 = {0};
    struct engine_config cfg = {.n_ctx = 512}, more = {.n_ctx = 513};
    const char *rel = "cases/loader/ok-base.gguf";
    if (!unit_shared(rel))
        return;
    uint64_t beside = 0; /* the host's part */
    if ((en = fake_engine(&cfg))) {
        const struct engine_placement *p = &engine_info(en)->placement;
        beside = MAX(p->host_bytes, p->staging_bytes);
    }
    engine_close(en); /* it fits */
    /* and weights, scratch and KV for 8 pages; bookkeeping and text are not counted to the byte */
    fake.free_bytes = beside + 11000 + 5000 + 8 * 32000 + 7 + 10000;
    OK(!open_model(&en, rel, &backend_fake, &cfg, &e) && e.code == ERR_MEMORY);
    OK_MSG(strstr(e.msg, "--ctx 256") && strstr(e.msg, "0.5 MiB"), "%s", e.msg);
    fake.free_bytes = 100;
    OK(!open_model(&en, rel, &backend_fake, &cfg, &e2) && strstr(e2.msg, "smaller quantization"));
    OK(!open_model(&en, rel, &backend_fake, &more, &e3) && e3.code == ERR_LIMIT);
    OK_MSG(strstr(e3.msg, "513") && strstr(e3.msg, "512"), "%s", e3.msg);
}

/* ---- scheduling ---- */

static void test_answers_do_not_depend_on_load_or_chunks(void)
{
    enum { N = 20 };
    static struct client c[N];
    int32_t want[N][8];
    for (int pass = 0; pass < 5; pass++) {
        struct engine_config cfg = {.n_seqs = pass ? 6 : 1,
                                    .max_batch = (uint32_t[]){512, 1, 7, 64, 3}[pass]};
        struct engine *en = fake_engine(&cfg);
        struct err e = {0};
        for (int i = 0; i < N; i++)
            client_init(&c[i], 5 + (size_t)(i * 37 % 90), (uint64_t)i, 8);
        for (int i = 0; en && i < N; i++) {
            OK_CALL(engine_submit(en, &c[i].r, &e), e);
            if (!pass)
                client_wait(&c[i]);
        }
        for (int i = 0; en && i < N; i++) {
            OK(client_wait(&c[i]) && c[i].n_got == 8);
            if (!pass)
                memcpy(want[i], c[i].got, sizeof want[i]);
            OK_MSG(!memcmp(want[i], c[i].got, sizeof want[i]), "pass %d request %d", pass, i);
            client_fini(&c[i]);
        }
        if (en && pass) {
            OK(fake.max_rows <= (int)cfg.max_batch);
            OK_MSG(fake.max_seqs > 1 || pass == 1, "pass %d: never more than one", pass);
        }
        engine_close(en);
    }
}

static void test_long_prompt_does_not_stop_a_decoding_sequence(void)
{
    struct engine_config cfg = {.n_seqs = 2, .max_batch = 16};
    struct engine *en = fake_engine(&cfg);
    struct client a, b;
    client_init(&a, 4, 1, 400);
    client_init(&b, 480, 2, 1);
    struct err e = {0};
    if (en) {
        fake.step_us = 200;
        OK_CALL(engine_submit(en, &a.r, &e), e);
        while (fake.n_runs < 10)
            usleep(100);
        int before = fake.n_runs;
        OK_CALL(engine_submit(en, &b.r, &e), e);
        client_wait(&b);
        int steps = fake.n_runs - before;
        client_wait(&a);
        OK_MSG(steps >= 32 && steps < 60, "%d steps", steps); /* 15 rows a step are left: 32 */
        OK(a.n_got == 400);
        OK_MSG(fake.n_runs <= 404, "%d runs", fake.n_runs); /* a took part in each of them */
    }
    engine_close(en);
    client_fini(&a);
    client_fini(&b);
}

static void test_token_loop_allocates_nothing(void)
{
    struct engine_config cfg = {0};
    struct engine *en = fake_engine(&cfg);
    static const char *const stop[] = {"never to be seen"};
    struct client c;
    client_init(&c, 30, 5, 80);
    c.r.stop = stop;
    c.r.n_stop = 1;
    c.r.on_token = NULL;
    if (en && client_run(&c, en)) {
        OK_MSG(fake.n_decode_runs >= 64, "%d runs", fake.n_decode_runs);
        OK_MSG(fake.n_decode_allocs == 0, "%d allocations", fake.n_decode_allocs);
    }
    client_fini(&c);
    engine_close(en);
}

static double cpu_seconds(void)
{
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    return (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) +
           (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec) / 1e6;
}

static void test_idle_engine_takes_no_cpu(void)
{
    struct engine_config cfg = {0};
    struct engine *en = fake_engine(&cfg);
    struct client c;
    client_init(&c, 3, 1, 3);
    if (en && client_run(&c, en)) {
        usleep(20000);
        double before = cpu_seconds();
        usleep(300000);
        OK(cpu_seconds() - before < 0.01);
    }
    client_fini(&c);
    engine_close(en);
}

/* ---- ends ---- */

static void test_device_error_ends_its_requests_and_no_others(void)
{
    struct engine_config cfg = {.n_seqs = 2};
    struct engine *en = fake_engine(&cfg);
    struct client c, d;
    client_init(&c, 40, 1, 8);
    client_init(&d, 40, 1, 8);
    if (en) {
        fake.fail_run = 4;
        client_run(&c, en);
        OK(c.stats.finish == FINISH_ERROR && c.n_got == 3 && c.stats.err.code == ERR_DEVICE);
        client_run(&d, en);
        OK(d.stats.finish == FINISH_LENGTH && d.n_got == 8);
        OK(d.stats.n_cached == 0); /* what a failed step wrote is not trusted */
        OK(!memcmp(c.got, d.got, 3 * sizeof *c.got));
        client_fini(&d);
        client_init(&d, 9, 2, 8);
        fake.nan_logits = true;
        client_run(&d, en);
        OK(d.stats.finish == FINISH_ERROR && d.n_got == 0);
    }
    engine_close(en);
    client_fini(&c);
    client_fini(&d);
}

static void test_cancel_works_in_every_state(void)
{
    struct engine_config cfg = {.n_seqs = 1, .max_batch = 4};
    struct engine *en = fake_engine(&cfg);
    struct client waits, prompt, decode;
    struct err e = {0};
    client_init(&decode, 4, 1, 100);
    client_init(&prompt, 400, 2, 100);
    client_init(&waits, 4, 3, 100);
    if (en) {
        decode.cancel_in = en;
        decode.cancel_at = 5;
        client_run(&decode, en);
        OK(decode.stats.finish == FINISH_CANCELLED && decode.n_got == 5);
        engine_cancel(en, &decode.r); /* done already: nothing happens */
        fake.step_us = 2000;
        OK_CALL(engine_submit(en, &prompt.r, &e), e);
        OK_CALL(engine_submit(en, &waits.r, &e), e);
        engine_cancel(en, &waits.r);
        client_wait(&waits);
        OK(waits.stats.finish == FINISH_CANCELLED && !prompt.done);
        int at = fake.n_runs;
        engine_cancel(en, &prompt.r);
        client_wait(&prompt);
        OK(prompt.stats.finish == FINISH_CANCELLED && !prompt.n_got);
        OK_MSG(fake.n_runs <= at + 1, "%d steps after the cancel", fake.n_runs - at);
        struct engine_counters k;
        engine_counters(en, &k);
        OK(!k.n_active && !k.n_waiting && k.n_requests == 3);
    }
    engine_close(en);
    client_fini(&waits);
    client_fini(&prompt);
    client_fini(&decode);
}

static void test_cancel_storm_loses_no_request_and_no_page(void)
{
    enum { N = 200 };
    static struct client c[N];
    struct engine_config cfg = {.n_seqs = 5, .max_batch = 16, .queue_len = N};
    struct engine *en = fake_engine(&cfg);
    uint64_t seed = 99;
    struct err e = {0};
    for (int i = 0; en && i < N; i++) {
        client_init(&c[i], 1 + unit_rand(&seed) % 100, unit_rand(&seed) % 8, 20);
        OK_CALL(engine_submit(en, &c[i].r, &e), e);
        if (unit_rand(&seed) % 2)
            engine_cancel(en, &c[unit_rand(&seed) % (uint64_t)(i + 1)].r);
        if (unit_rand(&seed) % 8 == 0)
            usleep(200);
    }
    int n_cancelled = 0;
    for (int i = 0; en && i < N; i++) {
        client_wait(&c[i]);
        n_cancelled += c[i].stats.finish == FINISH_CANCELLED;
        OK(c[i].stats.finish == FINISH_CANCELLED || c[i].n_got == 20);
    }
    if (en) {
        struct client last;
        OK(n_cancelled > 0);
        client_init(&last, 511, 1234, 1);
        client_run(&last, en);
        OK(last.stats.finish == FINISH_LENGTH);
        client_fini(&last);
        struct engine_counters k;
        engine_counters(en, &k);
        OK_MSG(k.n_free_pages + k.prefix.n_pages == k.n_pages, "%u free, %u in the tree, %u in all",
               k.n_free_pages, k.prefix.n_pages, k.n_pages);
    }
    engine_close(en);
    for (int i = 0; i < N; i++)
        client_fini(&c[i]);
}

static void test_deadline_ends_what_runs_and_what_waits(void)
{
    struct engine_config cfg = {.n_seqs = 1};
    struct engine *en = fake_engine(&cfg);
    struct client c[3];
    struct err e = {0};
    for (int i = 0; i < 3; i++)
        client_init(&c[i], 4, (uint64_t)i, 400);
    if (en) {
        fake.step_us = 1000;
        c[0].r.deadline_ns = now_ns() + 60000000;
        c[1].r.deadline_ns = now_ns() + 30000000; /* ends before its turn comes */
        c[2].r.max_tokens = 3;
        for (int i = 0; i < 3; i++)
            OK_CALL(engine_submit(en, &c[i].r, &e), e);
        for (int i = 0; i < 3; i++)
            client_wait(&c[i]);
        OK(c[0].stats.finish == FINISH_DEADLINE && c[0].n_got > 0 && c[0].n_got < 400);
        OK(c[1].stats.finish == FINISH_DEADLINE && c[1].n_got == 0 && c[1].order < c[0].order);
        OK(c[2].stats.finish == FINISH_LENGTH && c[2].n_got == 3);
        OK(!strcmp(finish_name(FINISH_DEADLINE), "deadline"));
    }
    engine_close(en);
    for (int i = 0; i < 3; i++)
        client_fini(&c[i]);
}

static void test_tenants_take_turns_and_priority_goes_first(void)
{
    enum { N = 6 };
    static const struct {
        const char *tenant;
        int32_t priority;
        int place;
    } plan[N] = {{NULL, 0, 0}, {"x", 0, 3}, {"x", 0, 4}, {"x", 5, 1}, {"y", 0, 2}, {"x", -8, 5}};
    struct engine_config cfg = {.n_seqs = 1};
    struct engine *en = fake_engine(&cfg);
    struct client c[N];
    struct err e = {0};
    for (int i = 0; i < N; i++) {
        client_init(&c[i], 20, (uint64_t)i, 3);
        c[i].r.tenant = plan[i].tenant;
        c[i].r.priority = plan[i].priority;
    }
    if (en) {
        fake.shut = true;
        OK_CALL(engine_submit(en, &c[0].r, &e), e);
        wait_for_active(en, 1);
        for (int i = 1; i < N; i++)
            OK_CALL(engine_submit(en, &c[i].r, &e), e);
        fake.shut = false;
        for (int i = 0; i < N; i++)
            client_wait(&c[i]);
        for (int i = 0; i < N; i++)
            OK_MSG(c[i].order == c[0].order + plan[i].place, "request %d came as number %d", i,
                   c[i].order - c[0].order);
        c[0].r.priority = 9;
        OK(engine_submit(en, &c[0].r, &e) && e.code == ERR_USAGE && strstr(e.msg, "-8 to 8"));
    }
    engine_close(en);
    for (int i = 0; i < N; i++)
        client_fini(&c[i]);
}

static void test_a_long_prompt_beside_decoding_is_cut_to_the_time_bound(void)
{
    struct engine_config cfg = {.n_seqs = 2, .max_batch = 256, .max_step_ms = 4};
    struct engine *en = fake_engine(&cfg);
    struct client a, b;
    client_init(&a, 200, 1, 300);
    client_init(&b, 480, 2, 1);
    struct err e = {0};
    if (en) {
        fake.row_us = 100; /* 40 rows are 4 ms, if the machine sleeps no longer than it is told */
        OK_CALL(engine_submit(en, &a.r, &e), e);
        while (fake.n_runs < 10)
            usleep(100);
        fake.max_rows = 0;
        OK_CALL(engine_submit(en, &b.r, &e), e);
        client_wait(&b);
        OK_MSG(fake.max_rows >= 3 && fake.max_rows <= 60, "%d rows", fake.max_rows);
        client_wait(&a);
    }
    engine_close(en);
    client_fini(&a);
    client_fini(&b);
}

static void test_close_ends_what_runs_and_what_waits(void)
{
    struct engine_config cfg = {.n_seqs = 1};
    struct engine *en = fake_engine(&cfg);
    struct client c[3];
    struct err e = {0};
    for (int i = 0; i < 3; i++)
        client_init(&c[i], 4, (uint64_t)i, 0);
    if (en) {
        fake.step_us = 1000;
        for (int i = 0; i < 3; i++)
            OK_CALL(engine_submit(en, &c[i].r, &e), e);
        engine_close(en);
        for (int i = 0; i < 3; i++)
            OK(c[i].done && c[i].stats.finish == FINISH_CANCELLED);
    }
    for (int i = 0; i < 3; i++)
        client_fini(&c[i]);
}

/* ---- reuse ---- */

/* The next turn of c: its prompt, its answer, and n_more new tokens. */
static void next_turn(struct client *next, const struct client *c, size_t n_more, uint64_t seed)
{
    client_init(next, c->r.n_ids + c->n_got + n_more, seed, c->r.max_tokens);
    memcpy(next->ids, c->ids, c->r.n_ids * sizeof *c->ids);
    memcpy(next->ids + c->r.n_ids, c->got, c->n_got * sizeof *c->got);
}

static void test_next_turn_reuses_kv_and_gives_the_same_answer(void)
{
    struct engine_config cfg = {0};
    struct engine *en = fake_engine(&cfg);
    struct client a, b, again;
    client_init(&a, 50, 1, 30);
    if (en && client_run(&a, en)) {
        next_turn(&b, &a, 9, 7);
        client_run(&b, en);
        OK_MSG(b.stats.n_cached == 79, "%u of 79 tokens reused", b.stats.n_cached);
        next_turn(&again, &a, 9, 7);
        again.r.no_reuse = true;
        client_run(&again, en);
        OK(again.stats.n_cached == 0 && again.n_got == 30);
        OK(!memcmp(again.got, b.got, 30 * sizeof *b.got));
        client_fini(&again);
        /* the very same prompt: all but its last token, and the branch is cut back */
        client_init(&again, 50, 1, 30);
        client_run(&again, en);
        OK_MSG(again.stats.n_cached == 49, "%u", again.stats.n_cached);
        OK(!memcmp(again.got, a.got, 30 * sizeof *a.got));
        client_fini(&again);
        client_fini(&b);
    }
    client_fini(&a);
    engine_close(en);
}

static void test_shared_prefix_is_not_computed_twice_and_not_overwritten(void)
{
    struct engine_config cfg = {.n_seqs = 3};
    struct engine *en = fake_engine(&cfg);
    struct client a, b, c;
    client_init(&a, 200, 1, 40);
    client_init(&b, 120, 2, 40);
    client_init(&c, 130, 3, 40);
    memcpy(b.ids, a.ids, 100 * sizeof *a.ids); /* 100 = 3 whole pages and 4 tokens */
    memcpy(c.ids, a.ids, 64 * sizeof *a.ids);
    if (en && client_run(&a, en)) {
        struct err e = {0};
        OK_CALL(engine_submit(en, &b.r, &e), e);
        OK_CALL(engine_submit(en, &c.r, &e), e);
        OK(client_wait(&b) && client_wait(&c));
        OK_MSG(b.stats.n_cached == 100, "%u", b.stats.n_cached);
        OK_MSG(c.stats.n_cached == 64, "%u", c.stats.n_cached);
        OK_MSG(fake.n_copies == 1, "%d pages copied", fake.n_copies);
        /* a's own KV is whole still */
        struct client turn, fresh[3];
        next_turn(&turn, &a, 5, 9);
        client_run(&turn, en);
        OK_MSG(turn.stats.n_cached == 239, "%u", turn.stats.n_cached);
        next_turn(&fresh[0], &a, 5, 9);
        client_init(&fresh[1], 120, 2, 40);
        memcpy(fresh[1].ids, b.ids, sizeof b.ids);
        client_init(&fresh[2], 130, 3, 40);
        memcpy(fresh[2].ids, c.ids, sizeof c.ids);
        for (int i = 0; i < 3; i++) {
            fresh[i].r.no_reuse = true;
            client_run(&fresh[i], en);
            const struct client *want = (const struct client *[]){&turn, &b, &c}[i];
            OK_MSG(!memcmp(fresh[i].got, want->got, 40 * sizeof *want->got), "sequence %d", i);
            client_fini(&fresh[i]);
        }
        client_fini(&turn);
    }
    client_fini(&a);
    client_fini(&b);
    client_fini(&c);
    engine_close(en);
}

/* ---- the bit-for-bit rule, on the CPU backend ---- */

static bool isa_runs_here(const char *isa)
{
    struct device_info info = {0};
    setenv("INGOT_ISA", isa, 1);
    return backend_cpu.probe(&info, 1) > 0 && info.usable;
}

static void drop_logits(void *user, uint32_t pos, const float *logits)
{
}

/* Seventeen requests with some prefixes in common, one of them wanting every position's logits. */
static void run_crowd(const char *model, const struct engine_config *cfg)
{
    enum { N = 17 };
    static struct client c[N];
    struct backend be = spy_backend();
    struct engine *en;
    struct err e = {0};
    if (!open_model(&en, model, &be, cfg, &e)) {
        OK_MSG(false, "%s", e.msg);
        return;
    }
    for (int i = 0; i < N; i++) {
        client_init(&c[i], 3 + (size_t)(i * 29 % 47), (uint64_t)(i % 11), 6);
        if (i == 3)
            c[i].r.on_logits = drop_logits;
        c[i].r.no_reuse = i % 5 == 0;
        OK_CALL(engine_submit(en, &c[i].r, &e), e);
    }
    for (int i = 0; i < N; i++) {
        OK(client_wait(&c[i]) && c[i].n_got == 6);
        client_fini(&c[i]);
    }
    engine_close(en);
}

static void test_logits_are_the_same_bits_in_any_batch(void)
{
    static const char *const isas[] = {"scalar", "avx2", "avx512", "avx512vnni"};
    static const char *const models[] = {"refs/llama-Q4_K_M_mix.gguf", "refs/qwen3.gguf"};
    static const struct {
        uint32_t n_seqs, max_batch;
        int32_t n_threads;
    } ways[] = {{1, 512, 1}, {1, 7, 2}, {17, 512, 1}, {17, 512, 2}, {17, 7, 1}, {17, 1, 2}};
    const size_t n_models = SANITIZED ? 1 : ARRAY_LEN(models);
    for (size_t k = 0; k < ARRAY_LEN(isas) * n_models; k++) {
        const char *isa = isas[k % ARRAY_LEN(isas)], *model = models[k / ARRAY_LEN(isas)];
        if (!isa_runs_here(isa) || (SANITIZED && !strcmp(isa, "scalar")) || !unit_shared(model))
            continue;
        memset(&spy, 0, sizeof spy);
        for (size_t i = SANITIZED ? 3 : 0; i < ARRAY_LEN(ways); i++) {
            struct engine_config cfg = {.n_ctx = 256,
                                        .n_threads = ways[i].n_threads,
                                        .n_seqs = ways[i].n_seqs,
                                        .max_batch = ways[i].max_batch,
                                        .quiet_load = true};
            run_crowd(model, &cfg);
        }
        OK_MSG(spy.n_again > (SANITIZED ? 150 : 500), "only %d of them were seen again",
               spy.n_again);
        OK_MSG(!spy.n_differ, "%s, %s: %d of %d logits differ", model, isa, spy.n_differ,
               spy.n_again);
        spy_reset();
        spy.ids = NULL;
    }
    unsetenv("INGOT_ISA");
}

int main(int argc, char **argv)
{
#define T(f)                                                                                       \
    {                                                                                              \
#f, test_##f                                                                               \
    }
    static const struct unit_test tests[] = {
        T(stop_string_across_tokens_ends_the_answer_and_never_shows),
        T(held_text_comes_out_when_no_stop_string_follows),
        T(text_comes_in_whole_characters),
        T(stop_find_says_what_must_be_held),
        T(answer_ends_where_the_context_is_full),
        T(bad_requests_are_refused_by_name),
        T(full_queue_refuses_and_the_others_are_answered),
        T(what_does_not_fit_is_refused_with_what_would),
        T(answers_do_not_depend_on_load_or_chunks),
        T(long_prompt_does_not_stop_a_decoding_sequence),
        T(token_loop_allocates_nothing),
        T(idle_engine_takes_no_cpu),
        T(device_error_ends_its_requests_and_no_others),
        T(cancel_works_in_every_state),
        T(cancel_storm_loses_no_request_and_no_page),
        T(deadline_ends_what_runs_and_what_waits),
        T(tenants_take_turns_and_priority_goes_first),
        T(a_long_prompt_beside_decoding_is_cut_to_the_time_bound),
        T(close_ends_what_runs_and_what_waits),
        T(next_turn_reuses_kv_and_gives_the_same_answer),
        T(shared_prefix_is_not_computed_twice_and_not_overwritten),
        T(logits_are_the_same_bits_in_any_batch),
    };
    log_threshold = LOG_ERROR;
    return unit_main(argc, argv, tests, ARRAY_LEN(tests));
}
