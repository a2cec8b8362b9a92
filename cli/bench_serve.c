/* ingot bench serve: what users of a loaded server would see. Opens a model, plays a schedule of
 * requests on it and prints waiting times and throughput. Owns the engine and the load; the numbers
 * are of one run and only of requests that got all the tokens they asked for. */
#include "cli/cli_internal.h"
#include "cli/load_gen.h"

#include <ctype.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

struct serve_opts {
    struct common_opts common;
    struct engine_opts engine;
    const char *prompt, *gen, *shared;
    float rate, duration;
    uint32_t concurrency, requests, parallel, queue, warmup, tenants;
    uint64_t seed;
    bool prefix_cache, json;
};

enum { DEFAULT_PARALLEL = 4, DEFAULT_REQUESTS = 32, DEFAULT_QUEUE = 64, MAX_TOKENS = 1 << 20 };

#define AT(field) offsetof(struct serve_opts, field)
static const struct option serve_options[] = {
    {"concurrency", "max-concurrency", 'n', false, OPTION_U32, "N", AT(concurrency), 1, 1 << 14,
     "Closed loop: N clients with one request each (default: as --parallel)"},
    {"rate", "request-rate", 'r', false, OPTION_F32, "R", AT(rate), 0.0001, 1e6,
     "Open loop: R requests a second (Poisson), however far answers lag"},
    {"requests", "num-prompts", 0, false, OPTION_U32, "N", AT(requests), 1, 1 << 20,
     "Requests in all (default: 32 when there is no --duration)"},
    {"duration", NULL, 'd', false, OPTION_F32, "S", AT(duration), 0.001, 1e6,
     "Send for S seconds, then wait for the answers"},
    {"prompt", "n-prompt random-input-len", 'p', false, OPTION_STR, "N|A:B", AT(prompt), 0, 0,
     "Tokens of a prompt, or drawn evenly from A to B (default: 512)"},
    {"gen", "n-gen random-output-len", 'g', false, OPTION_STR, "N|A:B", AT(gen), 0, 0,
     "Tokens of an answer, or drawn evenly from A to B (default: 128)"},
    {"shared-prefix", NULL, 0, false, OPTION_STR, "SHARE:TOKENS", AT(shared), 0, 0,
     "That part of the requests (0 to 1) begins with the same tokens"},
    {"tenants", NULL, 0, false, OPTION_U32, "N", AT(tenants), 1, 1 << 14,
     "The requests are of N tenants in turn, who find only their own prefixes (default: of one)"},
    {"share-prefix", NULL, 0, true, OPTION_FLAG, NULL, AT(engine.share_prefix), 0, 0,
     "All tenants find each other's prefixes"},
    {"prefix-cache", NULL, 0, false, OPTION_FLAG, NULL, AT(prefix_cache), 0, 0,
     "Keep KV pages in the store's prefix.db, and find there what it has"},
    {"prefix-ram", NULL, 0, true, OPTION_U32, "MIB", AT(engine.prefix_ram_mb), 1, 1 << 24,
     "Memory for prefixes beside the sequences' own (default: a quarter of theirs, at most 512)"},
    {"kv-pages", "num-gpu-blocks-override", 0, true, OPTION_U32, "N", AT(engine.kv_pages), 1,
     1 << 30, "KV pages of 32 tokens that sequences share (default: a whole context for each)"},
    {"swap", "swap-space", 0, true, OPTION_U32, "MIB", AT(engine.swap_mb), 1, 1 << 24,
     "Host memory for sequences that have to wait for pages (default: what is missing)"},
    {"parallel", "max-num-seqs", 0, true, OPTION_U32, "N", AT(parallel), 1, 4096,
     "Sequences the engine runs at once (default: as --concurrency, else 4)"},
    {"queue", NULL, 0, false, OPTION_U32, "N", AT(queue), 1, 1 << 14,
     "Requests that may wait; more are refused (default: 64, or the clients)"},
    {"max-step-ms", NULL, 0, true, OPTION_U32, "MS", AT(engine.max_step_ms), 1, 1000000,
     "Prompts prolong a step so much at most while others get tokens (default: 50)"},
    {"warmup", "num-warmups", 'w', false, OPTION_U32, "N", AT(warmup), 0, 1 << 16,
     "Requests of the same mix before the clock starts"},
    {"seed", NULL, 0, false, OPTION_SEED, "N", AT(seed), 0, 0,
     "Of arrivals, lengths and tokens; -1: random (default: 42)"},
    {"json", NULL, 0, false, OPTION_FLAG, NULL, AT(json), 0, 0, "For programs"},
    {0},
};
#undef AT

static void serve_defaults(void *opts)
{
    struct serve_opts *o = opts;
    o->prompt = "512";
    o->gen = "128";
    o->warmup = 2;
    o->seed = 42;
}

/* ---- from words to a spec ---- */

/* "N" or "A:B" */
static int parse_range(struct load_range *out, const char *text, const char *name, struct err *e)
{
    char *end;
    const char *p = text;
    unsigned long v[2];
    for (int i = 0; i < 2; i++) {
        errno = 0;
        v[i] = strtoul(p, &end, 10);
        if (*p < '0' || *p > '9' || errno || (*end && (i || *end != ':')))
            return usage_error(e, "%s: '%.40s' is not a number of tokens; write 512, or 64:2048",
                               name, text);
        if (!*end) {
            v[1] = v[i];
            break;
        }
        p = end + 1;
    }
    if (!v[0] || v[1] < v[0] || v[1] > MAX_TOKENS)
        return usage_error(e, "%s: %.40s is out of range; 1 to %d, the smaller one first", name,
                           text, MAX_TOKENS);
    *out = (struct load_range){(uint32_t)v[0], (uint32_t)v[1]};
    return 0;
}

/* "SHARE:TOKENS" */
static int parse_shared(struct load_spec *s, const char *text, struct err *e)
{
    char *end;
    struct load_range n;
    s->share = strtod(text, &end);
    if (end == text || *end != ':' || !(s->share >= 0 && s->share <= 1))
        return usage_error(e,
                           "--shared-prefix: '%.40s' is not SHARE:TOKENS; write 0.5:256 (half of "
                           "the requests begin with the same 256 tokens)",
                           text);
    int rc = parse_range(&n, end + 1, "--shared-prefix", e);
    if (rc)
        return rc;
    if (n.min != n.max)
        return usage_error(e, "--shared-prefix: %.40s tokens; write one number", end + 1);
    if (n.min >= s->prompt.min)
        return usage_error(e,
                           "--shared-prefix: %u tokens are not less than the shortest --prompt, %u",
                           n.min, s->prompt.min);
    s->n_shared = n.min;
    return 0;
}

/* The spec, and in c the sizes of an engine for it. */
static int resolve(struct load_spec *s, struct engine_opts *c, const struct serve_opts *o,
                   struct err *e)
{
    if (o->rate > 0 && o->concurrency)
        return usage_error(e, "bench serve: --rate is an open loop and --concurrency a closed one; "
                              "give one of them");
    int rc = parse_range(&s->prompt, o->prompt, "--prompt", e);
    if (!rc)
        rc = parse_range(&s->gen, o->gen, "--gen", e);
    if (!rc && o->shared)
        rc = parse_shared(s, o->shared, e);
    if (rc)
        return rc;
    uint32_t n_ctx = s->prompt.max + s->gen.max;
    if (o->engine.ctx && o->engine.ctx < n_ctx)
        return usage_error(e,
                           "bench serve: --ctx %u is less than the longest prompt and answer, %u "
                           "and %u tokens",
                           o->engine.ctx, s->prompt.max, s->gen.max);
    c->n_seqs = o->parallel ? o->parallel : o->concurrency ? o->concurrency : DEFAULT_PARALLEL;
    s->concurrency = o->concurrency ? o->concurrency : c->n_seqs;
    c->queue_len = o->queue ? o->queue : MAX((uint32_t)DEFAULT_QUEUE, s->concurrency);
    c->ctx = o->engine.ctx ? o->engine.ctx : n_ctx;
    s->rate = (double)o->rate;
    s->max_in_flight = c->n_seqs + c->queue_len + 1; /* one that is being refused */
    s->duration_s = (double)o->duration;
    s->n_requests = o->requests ? o->requests : o->duration > 0 ? 0 : DEFAULT_REQUESTS;
    s->n_warmup = o->warmup;
    s->n_tenants = o->tenants;
    s->seed = o->seed;
    if (s->seed > INT64_MAX)
        return usage_error(e, "--seed: %" PRIu64 " is out of range (up to %" PRId64 ")", s->seed,
                           INT64_MAX);
    if (!s->seed && getrandom(&s->seed, sizeof s->seed, 0) != sizeof s->seed)
        return err_errno(e, "cannot draw a seed");
    s->seed &= INT64_MAX; /* what JSON can carry */
    return 0;
}

/* ---- the report ---- */

struct serve { /* one run, for the two printers */
    const struct serve_opts *o;
    struct load_spec spec;
    struct engine *engine;
    struct load *load;
    struct load_summary sum;
    struct engine_counters before, after;
    uint64_t resident; /* when the last request had ended */
};

struct row { /* a distribution of the report */
    const char *name, *key;
    const struct load_dist *d;
};
enum { N_ROWS = 5 };

static void rows_of(struct row out[N_ROWS], const struct serve *s)
{
    const struct row rows[N_ROWS] = {
        {"first token", "ttft_ms", &s->sum.first},
        {"between tokens", "inter_token_ms", &s->sum.gap},
        {"whole answer", "end_to_end_ms", &s->sum.whole},
        {"queue", "queue_ms", &s->sum.queue},
        {"sent late", "late_ms", &s->sum.late},
    };
    memcpy(out, rows, sizeof rows);
}

static double per_second(const struct serve *s, uint64_t n)
{
    double seconds = load_result(s->load)->seconds;
    return seconds > 0 ? (double)n / seconds : 0;
}

static double hit_rate(const struct serve *s)
{
    return s->sum.n_in ? (double)s->sum.n_cached / (double)s->sum.n_in : 0;
}

static double rows_a_step(const struct serve *s)
{
    uint64_t steps = s->after.n_steps - s->before.n_steps;
    return steps ? (double)(s->after.n_rows - s->before.n_rows) / (double)steps : 0;
}

/* Part of the engine's time that was not the device's: scheduling, sampling, handing out. */
static double beside_device(const struct serve *s)
{
    uint64_t all = s->after.step_ns - s->before.step_ns, run = s->after.run_ns - s->before.run_ns;
    return all > run ? (double)(all - run) / (double)all : 0;
}

static void print_range(const char *what, const struct load_range *r)
{
    if (r->min == r->max)
        printf("%s %u", what, r->min);
    else
        printf("%s %u to %u", what, r->min, r->max);
}

static void print_load(const struct serve *s)
{
    const struct load_spec *p = &s->spec;
    if (p->rate > 0)
        printf("load      open loop, %g requests/s (Poisson)", p->rate);
    else
        printf("load      closed loop, %u client%s", p->concurrency,
               p->concurrency == 1 ? "" : "s");
    print_range("; prompt", &p->prompt);
    print_range(", answer", &p->gen);
    if (p->share > 0)
        printf("; %g %% of the prompts share %u tokens", 100 * p->share, p->n_shared);
    if (p->n_tenants > 1)
        printf("; %u tenants", p->n_tenants);
    printf("; seed %" PRIu64 ", warm-up %u\n", p->seed, p->n_warmup);
}

static void print_requests(const struct serve *s)
{
    const struct load_result *r = load_result(s->load);
    printf("requests  %" PRIu64 " sent, %" PRIu64 " done in %.3f s, %.2f/s", r->n_records,
           r->n_outcome[LOAD_DONE], r->seconds, per_second(s, r->n_outcome[LOAD_DONE]));
    for (int o = LOAD_DONE + 1; o < LOAD_OUTCOMES; o++)
        if (r->n_outcome[o])
            printf(", %" PRIu64 " %s", r->n_outcome[o], load_outcome_name((enum load_outcome)o));
    printf("\n");
    if (r->why.code)
        printf("          first failure: %s\n", r->why.msg);
    if (r->no_room)
        printf("          ended before its time: no room for more samples; shorten --duration\n");
}

/* Tokens that were found, by tier, and whole pages that were not, by reason. */
static void print_prefix(const struct serve *s)
{
    const struct prefix_counters *b = &s->before.prefix, *a = &s->after.prefix;
    const char *gap = "prefix    found ";
    for (int t = 0; t < PREFIX_TIER_END; t++)
        if (a->hit_tokens[t] > b->hit_tokens[t]) {
            printf("%s%" PRIu64 " tokens (%s)", gap, a->hit_tokens[t] - b->hit_tokens[t],
                   prefix_tier_name((enum prefix_tier)t));
            gap = ", ";
        }
    gap = *gap == ',' ? "; pages not found: " : "prefix    pages not found: ";
    for (int m = 0; m < PREFIX_MISS_END; m++)
        if (a->miss_pages[m] > b->miss_pages[m]) {
            printf("%s%" PRIu64 " %s", gap, a->miss_pages[m] - b->miss_pages[m],
                   prefix_miss_name((enum prefix_miss)m));
            gap = ", ";
        }
    printf("%s", *gap == 'p' ? "" : "\n");
}

static void serve_print(const struct serve *s)
{
    const struct engine_info *i = engine_info(s->engine);
    char bytes[16], params[16], kv[64];
    struct buf name = {0};
    put_clean(&name, i->name, strlen(i->name), 60);
    format_bytes(bytes, i->weight_file_bytes);
    format_kv(kv, &i->placement);
    format_count(params, i->n_params);
    printf("model     %s (%s, %s parameters, %s)\n", buf_str(&name), i->arch, params, bytes);
    buf_fini(&name);
    printf("engine    %s; %u sequence%s of %u tokens, queue %u; KV %s\n", i->describe,
           i->placement.n_seqs, i->placement.n_seqs == 1 ? "" : "s", i->n_ctx,
           s->spec.max_in_flight - 1 - i->placement.n_seqs, kv);
    print_load(s);
    print_requests(s);
    printf("tokens    in %.1f tok/s (%" PRIu64 ", of them %.1f %% from the cache), out %.1f tok/s "
           "(%" PRIu64 ")\n",
           per_second(s, s->sum.n_in), s->sum.n_in, 100 * hit_rate(s), per_second(s, s->sum.n_out),
           s->sum.n_out);
    printf("steps     %" PRIu64 " of %.1f rows, %.2f %% of their time outside the device",
           s->after.n_steps - s->before.n_steps, rows_a_step(s), 100 * beside_device(s));
    if (s->after.n_swapped_out > s->before.n_swapped_out)
        printf("; %" PRIu64 " times a sequence was swapped out",
               s->after.n_swapped_out - s->before.n_swapped_out);
    printf("\n");
    print_prefix(s);
    struct buf memory = {0};
    format_memory(&memory, &i->placement, s->resident);
    printf("memory:   %s\n", buf_str(&memory));
    buf_fini(&memory);
    struct row rows[N_ROWS];
    rows_of(rows, s);
    printf("\n%-15s %10s %10s %10s %10s %10s\n", "ms", "mean", "p50", "p95", "p99", "max");
    for (int k = 0; k < N_ROWS; k++) {
        const struct load_dist *d = rows[k].d;
        if (k == N_ROWS - 1 && !(s->spec.rate > 0))
            continue; /* a closed loop has no time to be late for */
        if (!d->n)
            printf("%-15s %10s %10s %10s %10s %10s\n", rows[k].name, "-", "-", "-", "-", "-");
        else
            printf("%-15s %10.2f %10.2f %10.2f %10.2f %10.2f\n", rows[k].name, d->mean_ms,
                   d->p50_ms, d->p95_ms, d->p99_ms, d->max_ms);
    }
}

static json_t *dist_json(const struct load_dist *d)
{
    if (!d->n)
        return json_null();
    return json_pack("{sI sf sf sf sf sf}", "n", (json_int_t)d->n, "mean", d->mean_ms, "p50",
                     d->p50_ms, "p95", d->p95_ms, "p99", d->p99_ms, "max", d->max_ms);
}

static json_t *load_json(const struct serve *s)
{
    const struct load_spec *p = &s->spec;
    json_t *j = json_pack("{ss s[II] s[II] sI sI sf sI}", "loop", p->rate > 0 ? "open" : "closed",
                          "prompt", (json_int_t)p->prompt.min, (json_int_t)p->prompt.max, "gen",
                          (json_int_t)p->gen.min, (json_int_t)p->gen.max, "warmup",
                          (json_int_t)p->n_warmup, "seed", (json_int_t)p->seed, "shared_share",
                          p->share, "shared_tokens", (json_int_t)p->n_shared);
    if (j && p->n_tenants)
        json_object_set_new(j, "tenants", json_integer(p->n_tenants));
    if (j && p->rate > 0)
        json_object_set_new(j, "rate", json_real(p->rate));
    else if (j)
        json_object_set_new(j, "concurrency", json_integer(p->concurrency));
    return j;
}

static json_t *outcomes_json(const struct load_result *r)
{
    json_t *j = json_object();
    for (int o = 0; j && o < LOAD_OUTCOMES; o++)
        json_object_set_new(j, load_outcome_name((enum load_outcome)o),
                            json_integer((json_int_t)r->n_outcome[o]));
    return j;
}

/* "other KV type" as a key: other_kv_type */
static const char *json_name(char out[32], const char *words)
{
    size_t i = 0;
    for (; words[i] && i < 31; i++)
        out[i] = words[i] == ' ' ? '_' : (char)tolower((unsigned char)words[i]);
    out[i] = 0;
    return out;
}

static json_t *prefix_json(const struct serve *s)
{
    const struct prefix_counters *b = &s->before.prefix, *a = &s->after.prefix;
    json_t *hits = json_object(), *misses = json_object();
    char name[32];
    for (int t = 0; t < PREFIX_TIER_END; t++)
        json_object_set_new(hits, prefix_tier_name((enum prefix_tier)t),
                            json_integer((json_int_t)(a->hit_tokens[t] - b->hit_tokens[t])));
    for (int m = 0; m < PREFIX_MISS_END; m++)
        json_object_set_new(misses, json_name(name, prefix_miss_name((enum prefix_miss)m)),
                            json_integer((json_int_t)(a->miss_pages[m] - b->miss_pages[m])));
    return json_pack("{so so}", "hit_tokens", hits, "missed_pages", misses);
}

static json_t *serve_json(const struct serve *s)
{
    const struct engine_info *i = engine_info(s->engine);
    const struct load_result *r = load_result(s->load);
    json_t *j = json_pack(
        "{so ss so so sI sI so sI so sf sb sf sI sI sI sf sf sf sf sI sf sI}", "model",
        json_text(i->name, strlen(i->name)), "arch", i->arch, "device",
        json_text(i->describe, strlen(i->describe)), "kv", kv_json(&i->placement), "parallel",
        (json_int_t)i->placement.n_seqs, "ctx", (json_int_t)i->n_ctx, "load", load_json(s),
        "requests", (json_int_t)r->n_records, "outcomes", outcomes_json(r), "seconds", r->seconds,
        "interrupted", r->interrupted, "requests_s", per_second(s, r->n_outcome[LOAD_DONE]),
        "tokens_in", (json_int_t)s->sum.n_in, "tokens_cached", (json_int_t)s->sum.n_cached,
        "tokens_out", (json_int_t)s->sum.n_out, "hit_rate", hit_rate(s), "in_tok_s",
        per_second(s, s->sum.n_in), "out_tok_s", per_second(s, s->sum.n_out), "rows_a_step",
        rows_a_step(s), "steps", (json_int_t)(s->after.n_steps - s->before.n_steps),
        "outside_device", beside_device(s), "swapped_out",
        (json_int_t)(s->after.n_swapped_out - s->before.n_swapped_out));
    struct row rows[N_ROWS];
    rows_of(rows, s);
    for (int k = 0; j && k < N_ROWS; k++)
        json_object_set_new(j, rows[k].key, dist_json(rows[k].d));
    if (j)
        json_object_set_new(j, "memory", memory_json(&i->placement, s->resident));
    if (j)
        json_object_set_new(j, "prefix", prefix_json(s));
    if (j && r->why.code)
        json_object_set_new(j, "first_failure", json_text(r->why.msg, strlen(r->why.msg)));
    return j;
}

/* ---- the command ---- */

static int serve_measure(struct serve *s, struct err *e)
{
    struct load_target t;
    load_target_engine(&t, s->engine);
    if (load_new(&s->load, &s->spec, &t, e))
        return -1;
    interrupt_begin(load_wake_fd(s->load));
    int rc = load_warm(s->load, e);
    if (!rc) {
        engine_counters(s->engine, &s->before);
        rc = load_run(s->load, e);
        engine_counters(s->engine, &s->after);
        s->resident = mem_resident_bytes();
    }
    interrupt_end();
    if (!rc)
        load_summarize(&s->sum, s->load);
    return rc;
}

/* What was measured is printed in any case; then: is it what was asked for? */
static int serve_verdict(const struct load_result *r, struct err *e)
{
    if (r->interrupted)
        return err_set(e, ERR_CANCELLED,
                       "interrupted; the numbers are of the %" PRIu64 " requests that were done",
                       r->n_outcome[LOAD_DONE]);
    if (!r->n_outcome[LOAD_DONE])
        return err_set(e, r->why.code ? r->why.code : ERR_LIMIT, "no request was done%s%s",
                       r->why.code ? "; the first failure: " : "; the time was too short",
                       r->why.msg);
    return 0;
}

static int serve_run(const struct command_args *a, struct err *e)
{
    struct serve s = {.o = a->opts};
    struct engine_opts c = s.o->engine;
    struct model_ref m = {0};
    if (strstr(a->words[0], "://"))
        return err_set(
            e, ERR_UNSUPPORTED,
            "bench serve: cannot load the running server %.200s: the server comes later; "
            "give a model's name or file, which is then served in this process",
            a->words[0]);
    int rc = resolve(&s.spec, &c, s.o, e);
    if (!rc)
        rc = model_ref_open(&m, a->words[0], &s.o->common, e);
    if (!rc && s.o->prefix_cache)
        model_ref_open_prefix(&m, &s.o->common);
    if (!rc)
        rc = load_engine(&s.engine, &m, &c, &s.o->common, e);
    if (rc && e->code == ERR_LIMIT && !s.o->engine.ctx && !s.o->engine.kv_pages)
        err_prefix(e, "use a smaller --prompt or --gen");
    if (!rc)
        rc = serve_measure(&s, e);
    if (rc)
        goto out;
    if (s.o->json)
        rc = print_json(serve_json(&s), e);
    else
        serve_print(&s);
    if (!rc)
        rc = serve_verdict(load_result(s.load), e);
out:
    engine_close(s.engine); /* before the load, whose requests it may hold */
    load_free(s.load);
    model_ref_close(&m);
    return rc;
}

const struct command command_bench_serve = {
    .name = "bench serve",
    .summary = "measure waiting times and throughput under load",
    .usage = "MODEL [--concurrency N | --rate R] [--requests N] [--duration S] [--json]",
    .about =
        "Play many users' requests on a model and report what they would see: time to the first\n"
        "token, delay between tokens, whole answers (p50, p95, p99), tokens a second in and out,\n"
        "time in the queue, and how much of the prompts came from the cache. In an open loop,\n"
        "times count from the moment a request was due. The same seed gives the same requests.",
    .examples = "  ingot bench serve smollm2 --concurrency 8\n"
                "  ingot bench serve model.gguf --rate 2 --duration 60 --prompt 64:2048 --gen "
                "16:256\n"
                "  ingot bench serve smollm2 --concurrency 8 --shared-prefix 0.8:256 --json\n",
    .opts_bytes = sizeof(struct serve_opts),
    .groups = {{"Load", serve_options, 0}, ENGINE_GROUP(struct serve_opts), COMMON_GROUP},
    .min_words = 1,
    .max_words = 1,
    .defaults = serve_defaults,
    .run = serve_run,
};
