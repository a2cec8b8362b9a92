/* What a long prompt costs those who read answers meanwhile: N streams decode; after a while one
 * prompt arrives. Prints the delays between the streams' tokens alone and while it is computed,
 * and against the engine's bound: --max-step-ms beyond the machine's own step, which grows with
 * the streams' contexts (measured before and after, and taken to grow evenly between).
 *     prefill_beside MODEL N_PROMPT [N_STREAMS [MAX_STEP_MS]] */
#include "engine/engine.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { MAX_STREAMS = 32, STREAM_PROMPT = 64, MAX_GAPS = 1 << 16, ALONE = 48, BATCH = 512 };

static struct engine *en;
static atomic_int n_alone[3], n_ended; /* gaps of a phase; requests that are done */
static atomic_int phase;               /* 0: before the prompt, 1: beside it, 2: after it */

struct stream {
    struct request r;
    struct request_stats stats;
    uint64_t last_ns;
    int32_t *ids;
};

static struct gaps { /* written by the engine's thread only */
    double ms[MAX_GAPS];
    size_t n;
} gaps[3];

static void on_token(void *user, int32_t id, const char *text, size_t n)
{
    struct stream *s = user;
    uint64_t now = now_ns();
    struct gaps *g = &gaps[phase];
    if (s->last_ns && g->n < MAX_GAPS)
        g->ms[g->n++] = (double)(now - s->last_ns) / 1e6;
    s->last_ns = now;
    n_alone[phase]++;
}

static void on_done(void *user, const struct request_stats *stats)
{
    struct stream *s = user;
    s->stats = *stats;
    n_ended++;
}

static void on_first(void *user, int32_t id, const char *text, size_t n)
{
    phase = 2;
}

static int begin(struct stream *s, size_t n_prompt, uint32_t n_answer, struct err *e)
{
    static uint64_t x = 88172645463325252u; /* xorshift64 */
    s->ids = malloc(n_prompt * sizeof *s->ids);
    for (size_t i = 0; s->ids && i < n_prompt; i++) {
        x ^= x << 13, x ^= x >> 7, x ^= x << 17;
        s->ids[i] = (int32_t)(100 + x % (engine_info(en)->n_vocab - 200));
    }
    s->r = (struct request){.ids = s->ids,
                            .n_ids = n_prompt,
                            .max_tokens = n_answer,
                            .ignore_eog = true,
                            .on_token = n_answer == 1 ? on_first : on_token,
                            .on_done = on_done,
                            .user = s};
    sample_defaults(&s->r.sample);
    s->r.sample.temperature = 0;
    return engine_submit(en, &s->r, e);
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double quantile(struct gaps *g, double q)
{
    qsort(g->ms, g->n, sizeof *g->ms, by_value);
    return g->n ? g->ms[(size_t)(q * (double)(g->n - 1) + 0.5)] : 0;
}

static void print_gaps(const char *name, struct gaps *g)
{
    printf("%-8s %6zu gaps, p50 %7.1f p95 %7.1f p99 %7.1f most %7.1f ms\n", name, g->n,
           quantile(g, 0.5), quantile(g, 0.95), quantile(g, 0.99), quantile(g, 1));
}

/* What the gaps beside the prompt are longer than a step without it. */
static struct gaps *beyond_own_step(void)
{
    static struct gaps g;
    double before = quantile(&gaps[0], 0.5), after = quantile(&gaps[2], 0.5);
    g.n = gaps[1].n;
    for (size_t i = 0; i < g.n; i++)
        g.ms[i] = gaps[1].ms[i] - before - (after - before) * (double)i / (double)g.n;
    return &g;
}

static int play(size_t n_prompt, int n_streams, uint32_t n_ctx, struct err *e)
{
    static struct stream streams[MAX_STREAMS], prompt;
    for (int i = 0; i < n_streams; i++)
        if (begin(&streams[i], STREAM_PROMPT, n_ctx - STREAM_PROMPT, e))
            return -1;
    while (n_alone[0] < ALONE * n_streams)
        usleep(1000);
    phase = 1;
    if (begin(&prompt, n_prompt, 1, e))
        return -1;
    while (n_alone[2] < ALONE * n_streams)
        usleep(1000);
    for (int i = 0; i < n_streams; i++)
        engine_cancel(en, &streams[i].r);
    while (n_ended < n_streams + 1)
        usleep(1000);
    for (int i = 0; i < n_streams; i++)
        free(streams[i].ids);
    free(prompt.ids);
    printf("a prompt of %zu tokens beside %d streams: first token after %.2f s\n", n_prompt,
           n_streams, (double)(prompt.stats.queue_ns + prompt.stats.prompt_ns) / 1e9);
    return 0;
}

int main(int argc, char **argv)
{
    struct err e = {0};
    struct model_file *f = NULL;
    if (argc < 3)
        return 2;
    size_t n_prompt = strtoul(argv[2], NULL, 10);
    int n_streams = argc > 3 ? atoi(argv[3]) : 4;
    struct engine_config c = {.n_ctx = (uint32_t)n_prompt + 64,
                              .n_seqs = (uint32_t)n_streams + 1,
                              .max_step_ms = argc > 4 ? (uint32_t)atoi(argv[4]) : 0,
                              .max_batch = BATCH};
    if (n_prompt < 1 || n_streams < 1 || n_streams > MAX_STREAMS)
        return 2;
    int rc = model_file_open(&f, NULL, argv[1], &e) || engine_open(&en, f, &c, &e) ||
             play(n_prompt, n_streams, c.n_ctx, &e);
    if (!rc) {
        uint32_t bound = c.max_step_ms ? c.max_step_ms : 50;
        struct gaps *beyond = beyond_own_step();
        print_gaps("alone", &gaps[0]);
        print_gaps("beside", &gaps[1]);
        print_gaps("after", &gaps[2]);
        print_gaps("beyond", beyond);
        printf("bound    %u ms beyond the own step, %.1f then %.1f ms: p99 %s\n", bound,
               quantile(&gaps[0], 0.5), quantile(&gaps[2], 0.5),
               quantile(beyond, 0.99) <= bound ? "within" : "BEYOND");
    } else {
        fprintf(stderr, "prefill_beside: %s\n", e.msg);
    }
    engine_close(en);
    model_file_close(f);
    return rc ? 1 : 0;
}
