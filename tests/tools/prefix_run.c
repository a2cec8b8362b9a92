/* For tests/e2e/prefix.sh: one process that opens a model with the prefix store, asks for an answer
 * to a prompt of so many tokens, a number of times, prints for each the time to first token and a
 * hash of the tokens, and may end by SIGKILL a moment after the last answer, as a crash would.
 *     prefix_run MODEL HOME|- N_PROMPT N_ANSWER TIMES [kill|wait]       (HOME -: no store)
 * With `wait` it stays, loaded and idle, until its standard input ends.
 * A line an answer: `TTFT_MS N_CACHED HASH hits RAM COPY DISK miss REASON=N...` */
#include "engine/engine.h"
#include "store/prefix.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct answer {
    int32_t ids[4096];
    size_t n;
};

static void on_token(void *user, int32_t id, const char *text, size_t n)
{
    struct answer *a = user;
    if (a->n < ARRAY_LEN(a->ids))
        a->ids[a->n++] = id;
}

static int ask(struct engine *en, const int32_t *ids, size_t n, uint32_t n_answer, struct err *e)
{
    static struct answer a;
    struct request_stats s;
    struct engine_counters k;
    struct request r = {.ids = ids,
                        .n_ids = n,
                        .max_tokens = n_answer,
                        .ignore_eog = true,
                        .on_token = on_token,
                        .user = &a};
    a.n = 0;
    sample_defaults(&r.sample);
    r.sample.temperature = 0;
    if (engine_run(en, &r, &s, e))
        return -1;
    engine_counters(en, &k);
    printf("%.2f %u %016llx hits", (double)(s.queue_ns + s.prompt_ns) / 1e6, s.n_cached,
           (unsigned long long)hash_xxh3(a.ids, a.n * sizeof *a.ids, 0).lo);
    for (int i = 0; i < PREFIX_TIER_END; i++)
        printf(" %llu", (unsigned long long)k.prefix.hit_tokens[i]);
    printf(" miss");
    for (int i = 0; i < PREFIX_MISS_END; i++)
        if (k.prefix.miss_pages[i])
            printf(" %s=%llu", prefix_miss_name((enum prefix_miss)i),
                   (unsigned long long)k.prefix.miss_pages[i]);
    printf("\n");
    fflush(stdout);
    return 0;
}

int main(int argc, char **argv)
{
    struct err e = {0};
    struct model_file *f = NULL;
    struct prefix_store *store = NULL;
    struct engine *en = NULL;
    static int32_t ids[1 << 16];
    if (argc < 6)
        return 2;
    size_t n = strtoul(argv[3], NULL, 10);
    uint32_t n_answer = (uint32_t)strtoul(argv[4], NULL, 10);
    int rc = model_file_open(&f, NULL, argv[1], &e);
    if (!rc && strcmp(argv[2], "-"))
        rc = prefix_open(&store, argv[2], NULL, &e);
    struct engine_config c = {.prefix_store = store, .quiet_load = true};
    if (!rc)
        rc = engine_open(&en, f, &c, &e);
    uint64_t x = 88172645463325252u; /* xorshift64: any text does, but always the same */
    for (size_t i = 0; !rc && i < n && i < ARRAY_LEN(ids); i++) {
        x ^= x << 13, x ^= x >> 7, x ^= x << 17;
        ids[i] = (int32_t)(100 + x % (engine_info(en)->n_vocab - 200));
    }
    for (long t = strtol(argv[5], NULL, 10); !rc && t > 0; t--)
        rc = ask(en, ids, n, n_answer, &e);
    if (!rc && argc > 6 && !strcmp(argv[6], "wait")) {
        while (getchar() != EOF)
            ;
    } else if (!rc && argc > 6) {
        usleep(1000000); /* the person reads the answer */
        raise(SIGKILL);
    }
    engine_close(en);
    prefix_close(store);
    model_file_close(f);
    if (rc)
        fprintf(stderr, "prefix_run: %s\n", e.msg);
    return rc ? 1 : 0;
}
