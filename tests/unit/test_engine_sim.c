/* The whole engine in a simulation: no thread, a clock that only the simulated machine moves, and
 * schedules drawn from a seed. Whatever runs beside a sequence, and whatever is done to it (chunks,
 * shared pages, swapping, the persistent tier), its tokens are those of the sequence run alone, bit
 * for bit; no page is lost; nobody starves beyond the bounds of sched.h. INGOT_SIM_SEED and
 * INGOT_SIM_N choose other schedules, INGOT_SIM_ONLY one engine's alone.
 *
 * The program is linked with --wrap=now_ns. */
#include "engine/prefix_cache.h"
#include "tests/unit/tiny.h"
#include "tests/unit/unit.h"

#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { N_NATIVE = 500, N_SCALAR = 250 };
#else
enum { N_NATIVE = 10000, N_SCALAR = 10000 };
#endif
enum {
    PER_ENGINE = 250, /* schedules on one engine */
    N_CTX = 128,
    WINDOW = 63, /* of one model: the last token of a page is not in it */
    N_TEXTS = 5,
    N_PROMPTS = 48,
    N_KINDS = 20,
    MAX_NEW = 96, /* three pages: where one more each was counted on, somebody has to leave */
    MAX_TEXT = 1024,
    MAX_JOBS = 8,
    N_TENANTS = 4,
    MAX_TURNS = 20000, /* of a schedule; what takes longer is stuck */
};

/* ---- the clock ---- */

/* The simulating thread's clock; 0: the machine's. Other threads (the persistent tier's) have the
 * machine's always. */
static _Thread_local uint64_t sim_now;
uint64_t __real_now_ns(void);
uint64_t __wrap_now_ns(void);
uint64_t __wrap_now_ns(void)
{
    return sim_now ? sim_now++ : __real_now_ns();
}

/* ---- what a sequence gives when it runs alone ---- */

struct prompt {
    int32_t ids[N_CTX];
    uint32_t n;
    bool known[2];
    uint64_t bits[2][N_CTX]; /* of each model's logits at each position */
};

struct answer {
    bool known;
    enum finish finish;
    uint32_t n_generated, n_calls;
    int32_t ids[MAX_NEW];
    uint32_t text_end[MAX_NEW]; /* how much text there is after that call */
    char text[MAX_TEXT];
};

struct job {
    struct request r;
    const struct prompt *prompt;
    uint32_t kind, tenant;
    uint64_t at;        /* the turn in which it comes */
    uint64_t cancel_at; /* and in which it is cancelled, or after so many tokens; 0: never */
    uint32_t cancel_after;
    bool cancel_swapped;
    uint64_t cancelled; /* from this turn on it has no rows; 0: it was not cancelled */
    bool submitted, entered, admitted, done;
    uint64_t arrival;
    uint32_t high; /* positions that had KV at some time */
    struct request_stats stats;
    struct answer got;
};

/* While tenant t has sequences that wait and none that is admitted: bound (2) of sched.h. */
struct wait {
    bool on;
    uint64_t given[N_TENANTS], most[N_TENANTS];
};

static struct {
    uint64_t seed, rng;
    char models[2][4096]; /* with whole attention, with a window */
    struct prompt prompts[N_PROMPTS];
    struct answer alone[2][N_PROMPTS][N_KINDS];
    struct backend be;
    struct prefix_store *store;
    /* the engine of now */
    struct engine *en;
    int32_t n_swap_kept; /* swap pages that nobody may have */
    uint64_t ns_per_row, ns_per_page;
    bool squeezed; /* many sequences for few pages */
    int model;
    uint32_t config, schedule;
    /* the schedule of now */
    struct job jobs[MAX_JOBS];
    uint32_t n_jobs;
    uint64_t turn, rows_in_turn;
    uint64_t tenant_rows[N_TENANTS]; /* of this turn */
    struct wait waits[N_TENANTS];
    bool bad;
    /* figures of all */
    uint64_t trace; /* hash over all batches */
    uint64_t n_schedules, n_seqs, n_steps, n_tokens, n_rows, n_again_rows, n_logits, n_refused;
    uint64_t n_out, n_in, n_cancels[5], n_deadlines, n_waits, hits[PREFIX_TIER_END];
    uint32_t most_idle, n_stored;
    double most_wait; /* part of its bound */
} sim;

static uint32_t below(uint32_t n)
{
    return (uint32_t)(unit_rand(&sim.rng) % n);
}

static bool chance(uint32_t one_in)
{
    return below(one_in) == 0;
}

/* As unit_check, with the place in the schedules in front; the schedule is bad then. */
static bool sim_check(bool cond, int line, const char *fmt, ...) PRINTF_LIKE(3, 4);
static bool sim_check(bool cond, int line, const char *fmt, ...)
{
    char what[512];
    va_list ap;
    if (cond)
        return true;
    sim.bad = true;
    va_start(ap, fmt);
    vsnprintf(what, sizeof what, fmt, ap);
    va_end(ap);
    return unit_check(false, __FILE__, line,
                      "seed %" PRIu64 " engine %u schedule %u turn %" PRIu64 ": %s", sim.seed,
                      sim.config, sim.schedule, sim.turn, what);
}
#define SIM_OK(cond, ...) sim_check(!!(cond), __LINE__, __VA_ARGS__)

static void job_token(void *user, int32_t id, const char *text, size_t n)
{
    struct job *j = user;
    struct answer *a = &j->got;
    uint32_t at = a->n_calls ? a->text_end[a->n_calls - 1] : 0;
    CHECK(a->n_calls < MAX_NEW && at + n <= sizeof a->text);
    memcpy(a->text + at, text, n);
    a->text_end[a->n_calls] = at + (uint32_t)n;
    a->ids[a->n_calls++] = id;
    if (j->cancel_after == a->n_calls && !j->cancelled) {
        engine_cancel(sim.en, &j->r);
        j->cancelled = sim.turn + 1;
        sim.n_cancels[SEQ_DECODE]++;
    }
}

static void job_done(void *user, const struct request_stats *s)
{
    struct job *j = user;
    SIM_OK(!j->done, "on_done comes twice");
    j->done = true;
    j->stats = *s;
}

static uint64_t bits_of(const float *logits)
{
    return hash_xxh3(logits, (size_t)sim.en->info.n_vocab * sizeof *logits, 1).lo;
}

static void job_logits(void *user, uint32_t pos, const float *logits)
{
    struct job *j = user;
    sim.n_logits++;
    SIM_OK(j->prompt->bits[sim.model][pos] == bits_of(logits),
           "job %d: other logits at position %u", (int)(j - sim.jobs), pos);
}

static void keep_logits(void *user, uint32_t pos, const float *logits)
{
    struct job *j = user;
    ((struct prompt *)j->prompt)->bits[sim.model][pos] = bits_of(logits);
}

/* One of every kind of sampling, stopping and ending. */
static void set_kind(struct request *r, uint32_t kind)
{
    static const char *const letters[] = {"a", "b", "c", "d", "e", "f", "g", "h",
                                          "i", "j", "k", "l", "m", "n", "o", "p"};
    static const char *const longer[] = {"ab", "xyz", "never to be seen", "\n"};
    static const struct logit_bias bias[] = {{40, -INFINITY}, {60, 3}, {2, 2}};
    struct sample_params *p = &r->sample;
    sample_defaults(p);
    p->seed = 1000 + kind;
    p->temperature = kind < 4 ? 0 : 0.3f + 0.1f * (float)kind;
    r->ignore_eog = kind % 2;
    if (kind % 3 == 1) {
        r->stop = kind % 2 ? letters : longer;
        r->n_stop = kind % 2 ? ARRAY_LEN(letters) : ARRAY_LEN(longer);
    }
    p->repeat_penalty = kind % 5 == 1 ? 1.3f : 1;
    p->presence_penalty = kind == 3 || kind == 9 ? 0.5f : 0;
    p->dry_multiplier = kind == 2 || kind == 12 ? 0.8f : 0;
    p->mirostat = kind == 7 ? 1 : kind == 17 ? 2 : 0;
    p->typical_p = kind == 8 ? 0.7f : 1;
    p->xtc_probability = kind == 10 ? 0.5f : 0;
    p->top_n_sigma = kind == 13 ? 1.5f : 0;
    p->dynatemp_range = kind == 14 ? 0.5f : 0;
    p->n_probs = kind == 15 ? 5 : 0;
    if (kind == 5 || kind == 16) {
        p->bias = bias;
        p->n_bias = ARRAY_LEN(bias);
    }
}

static void job_init(struct job *j, const struct prompt *p, uint32_t kind)
{
    *j = (struct job){.prompt = p, .kind = kind};
    j->r = (struct request){.ids = p->ids,
                            .n_ids = p->n,
                            .max_tokens = MAX_NEW,
                            .on_token = job_token,
                            .on_done = job_done,
                            .user = j};
    set_kind(&j->r, kind);
}

static struct engine *open_stepped(const struct engine_config *c, const struct backend *be)
{
    struct engine_config cfg = *c;
    struct model_file *f = NULL;
    struct engine *en = NULL;
    struct err e = {0};
    cfg.n_ctx = N_CTX;
    cfg.n_threads = 1;
    cfg.quiet_load = true;
    if (OK_CALL(model_file_open(&f, NULL, sim.models[sim.model], &e), e))
        OK_CALL(engine_open_stepped(&en, f, &cfg, be, &e), e);
    model_file_close(f);
    return en;
}

/* On an engine of its own. */
static void run_alone(struct job *j)
{
    struct engine_config cfg = {.max_batch = N_CTX};
    struct engine *busy = sim.en;
    struct err e = {0};
    uint64_t now = sim_now;
    sim_now = 0;
    sim.en = open_stepped(&cfg, &backend_cpu);
    if (sim.en && OK_CALL(engine_submit(sim.en, &j->r, &e), e))
        for (int i = 0; i < 2 * MAX_NEW && !j->done; i++)
            engine_turn(sim.en);
    OK(j->done && j->stats.finish < FINISH_CANCELLED);
    engine_close(sim.en);
    sim.en = busy;
    sim_now = now;
}

static const struct answer *answer_alone(const struct prompt *p, uint32_t kind)
{
    struct answer *a = &sim.alone[sim.model][p - sim.prompts][kind];
    struct job j;
    if (a->known)
        return a;
    job_init(&j, p, kind);
    run_alone(&j);
    *a = j.got;
    a->known = true;
    a->finish = j.stats.finish;
    a->n_generated = j.stats.n_generated;
    return a;
}

static void learn_logits(struct prompt *p)
{
    struct job j;
    if (p->known[sim.model])
        return;
    job_init(&j, p, 0);
    j.r.max_tokens = 1;
    j.r.on_logits = keep_logits;
    run_alone(&j);
    p->known[sim.model] = true;
}

/* ---- the simulated machine: the CPU backend on the simulated clock, looked at ---- */

static void see_rows(struct job *j, const struct batch_seq *q)
{
    uint32_t end = (uint32_t)(q->pos + q->n_rows);
    uint32_t again = MIN(MAX(j->high, (uint32_t)q->pos), end) - (uint32_t)q->pos;
    SIM_OK(!j->cancelled || sim.turn < j->cancelled, "job %d has rows though it was cancelled",
           (int)(j - sim.jobs));
    SIM_OK(!j->done, "job %d has rows though it is done", (int)(j - sim.jobs));
    sim.n_again_rows += again;
    sim.tenant_rows[j->tenant] += (uint64_t)q->n_rows;
    j->high = MAX(j->high, end);
    int32_t seen[4] = {(int32_t)(j - sim.jobs), (int32_t)sim.turn, q->pos, q->n_rows};
    sim.trace = hash_xxh3(seen, sizeof seen, sim.trace).lo;
}

static int sim_run(struct exec *x, const struct batch *b, struct err *e)
{
    for (int32_t i = 0; i < b->n_seqs; i++)
        see_rows(sim.en->batch_owner[i]->req->user, &b->seqs[i]);
    sim.rows_in_turn += (uint64_t)b->n_rows;
    sim.n_rows += (uint64_t)b->n_rows;
    sim_now += 200000 + sim.ns_per_row * (uint64_t)b->n_rows * (90 + below(20)) / 100;
    return backend_cpu.run(x, b, e);
}

static int sim_kv_write(struct exec *x, int32_t page, const void *src, struct err *e)
{
    sim_now += sim.ns_per_page;
    return backend_cpu.kv_write(x, page, src, e);
}

/* ---- engines ---- */

static bool make_models(void)
{
    struct tiny_spec s;
    struct err e = {0};
    bool ok = true;
    if (*sim.models[0])
        return true;
    tiny_defaults(&s, "llama");
    s.width = s.n_ffn = 32;
    s.n_layers = 1;
    s.n_heads = 2;
    s.n_kv_heads = 1;
    s.n_vocab = TINY_MIN_VOCAB;
    const char *dir = unit_tmpdir();
    for (int i = 0; i < 2; i++) {
        s.window = i ? WINDOW : 0;
        snprintf(sim.models[i], sizeof sim.models[i], "%s/sim%d.gguf", dir, i);
        ok = ok && OK_CALL(tiny_write(sim.models[i], &s, &e), e);
    }
    return ok;
}

/* A few texts, and prompts that begin with one and part from it early, late or never. */
static void make_prompts(void)
{
    uint64_t rng = sim.seed ^ 0x5eed;
    for (uint32_t i = 0; i < N_PROMPTS; i++) {
        struct prompt *p = &sim.prompts[i];
        uint32_t most = i % 4 == 0 ? 120 : i % 4 == 1 ? 70 : 40;
        p->n = 1 + (uint32_t)(unit_rand(&rng) % most);
        uint32_t common = i % 3 ? p->n : (uint32_t)(unit_rand(&rng) % (p->n + 1));
        for (uint32_t k = 0; k < p->n; k++) {
            uint64_t text = (k < common ? i % N_TEXTS : 100 + i) * 1000 + k;
            p->ids[k] = 3 + (int32_t)(unit_rand(&text) % (TINY_MIN_VOCAB - 3));
        }
    }
}

static uint32_t draw_batch(void)
{
    static const uint32_t few[] = {1, 2, 3, 5, 7, 16, 33, 64};
    return chance(2) ? 1 + below(64) : few[2 + below(ARRAY_LEN(few) - 2)];
}

static bool open_engine(uint32_t n_page_bytes)
{
    sim.squeezed = chance(2);
    sim.model = chance(3);
    uint32_t n_seqs = sim.squeezed ? 3 + below(4) : 1 + below(6);
    uint32_t whole = n_seqs * (N_CTX / KV_PAGE_TOKENS);
    struct engine_config c = {
        .n_seqs = n_seqs,
        .max_batch = chance(12) ? 1 + below(2) : draw_batch(),
        .queue_len = 4 + below(8),
        .kv_pages = sim.squeezed ? 4 + below(4)
                    : chance(3)  ? 0
                                 : 4 + below(whole - 3),
        .swap_bytes = chance(2) ? 0 : 1 + below(4) * n_page_bytes,
        .prefix_ram_bytes = sim.squeezed || chance(2) ? 1 : below(12) * n_page_bytes + 1,
        .max_step_ms = 1 + below(8),
        .share_prefix = chance(4),
        .prefix_store = chance(5) ? sim.store : NULL,
    };
    sim.ns_per_row = 20000 * (1 + below(20));
    sim.ns_per_page = chance(2) ? 0 : 1000000 * (uint64_t)below(60);
    sim.en = open_stepped(&c, &sim.be);
    sim.n_swap_kept = 0;
    if (sim.en && chance(4)) /* nothing can be swapped out but by forgetting it */
        while (kv_swap_take(&sim.en->swap) >= 0)
            sim.n_swap_kept++;
    return sim.en;
}

static void close_engine(void)
{
    struct engine_counters k;
    engine_counters(sim.en, &k);
    sim.n_steps += k.n_steps;
    sim.n_out += k.n_swapped_out;
    sim.n_in += k.n_swapped_in;
    for (int i = 0; i < PREFIX_TIER_END; i++)
        sim.hits[i] += k.prefix.hit_tokens[i] + k.n_back_tokens[i];
    engine_close(sim.en);
    sim.en = NULL;
}

/* ---- schedules ---- */

static void draw_end(struct job *j)
{
    switch (below(9)) {
    case 0:
    case 1:
        j->cancel_at = j->at + below(40) + 1;
        break;
    case 2:
        j->cancel_after = 1 + below(MAX_NEW / 2);
        break;
    case 4:
        j->cancel_swapped = true;
        break;
    case 3:
        j->r.deadline_ns = sim_now + 1000000 * (uint64_t)(1 + below(300));
        break;
    default:
        break;
    }
}

static void draw_job(struct job *j, const struct job *like)
{
    static const char *const names[N_TENANTS] = {NULL, "a", "b", "c"};
    const struct prompt *p = like ? like->prompt : &sim.prompts[below(N_PROMPTS)];
    while (sim.squeezed && p->n > 60 && !chance(8))
        p = &sim.prompts[below(N_PROMPTS)];
    job_init(j, p, below(N_KINDS));
    j->at = like ? like->at : chance(2) ? 1 : 1 + below(sim.squeezed ? 6 : 30);
    j->tenant = like ? like->tenant : chance(2) ? 0 : below(N_TENANTS);
    j->r.tenant = names[j->tenant];
    j->r.priority = chance(4) ? (int32_t)below(17) - 8 : 0;
    j->r.max_tokens = 1 + below(24);
    if (chance(sim.squeezed ? 1 : 8)) /* pages beyond those that were counted on at admission */
        j->r.max_tokens = MAX_NEW - below(MAX_NEW / 2);
    if (p->n > N_CTX - MAX_NEW && chance(4))
        j->r.max_tokens = 0;
    j->r.no_reuse = chance(8);
    if (chance(10)) {
        learn_logits((struct prompt *)p);
        j->r.on_logits = job_logits;
    }
    draw_end(j);
    answer_alone(p, j->kind);
}

/* Neighbours that come in the same turn with the same prompt are submitted as one. */
static void draw_jobs(void)
{
    sim.n_jobs = 2 + below(MAX_JOBS - 1);
    sim.n_jobs = sim.squeezed ? MAX(sim.n_jobs, 5u) : sim.n_jobs;
    bool few = chance(3); /* tenants */
    for (uint32_t i = 0; i < sim.n_jobs; i++) {
        draw_job(&sim.jobs[i], i && chance(4) ? &sim.jobs[i - 1] : NULL);
        if (few && sim.jobs[i].tenant > 1) {
            sim.jobs[i].tenant = 0;
            sim.jobs[i].r.tenant = NULL;
        }
    }
}

static uint32_t group_size(uint32_t first)
{
    uint32_t n = 1;
    while (first + n < sim.n_jobs && n < 4 &&
           sim.jobs[first + n].prompt == sim.jobs[first].prompt &&
           sim.jobs[first + n].at == sim.jobs[first].at)
        n++;
    return n;
}

/* Those whose time it is; a full queue is tried again in the next turn. */
static void submit_some(void)
{
    for (uint32_t i = 0, n; i < sim.n_jobs; i += n) {
        struct request *r[4];
        struct err e = {0};
        n = group_size(i);
        if (sim.jobs[i].submitted || sim.jobs[i].at > sim.turn)
            continue;
        for (uint32_t k = 0; k < n; k++)
            r[k] = &sim.jobs[i + k].r;
        bool fits = sim.en->n_queue + n <= sim.en->ld.lim.queue_len;
        int rc = engine_submit_all(sim.en, r, n, &e);
        SIM_OK(fits ? !rc : rc && e.code == ERR_FULL, "submit gives %d: %s", rc, e.msg);
        sim.n_refused += rc != 0;
        for (uint32_t k = 0; k < n; k++) {
            SIM_OK(!rc == !!r[k]->seq, "a refused request is in the engine");
            sim.jobs[i + k].submitted = !rc;
            if (!rc)
                sim.jobs[i + k].arrival = r[k]->seq->arrival;
        }
    }
}

static void cancel_some(void)
{
    for (uint32_t i = 0; i < sim.n_jobs; i++) {
        struct job *j = &sim.jobs[i];
        const struct seq *s = j->r.seq;
        if (!j->submitted || j->cancelled)
            continue;
        if (j->cancel_at != sim.turn && !(j->cancel_swapped && s && s->swapped_out && chance(3)))
            continue;
        sim.n_cancels[!s ? 4 : s->swapped_out ? 3 : s->state]++;
        engine_cancel(sim.en, &j->r);
        j->cancelled = j->done ? 0 : sim.turn;
    }
}

/* ---- fairness ---- */

static uint64_t most_tokens(const struct job *j)
{
    return j->r.max_tokens ? MIN((uint64_t)N_CTX, j->r.n_ids + j->r.max_tokens - 1) : N_CTX;
}

/* The vtime that counts for tenant i: what it has, or where it would begin. */
static uint64_t vtime_of(uint32_t i)
{
    const struct schedule *c = &sim.en->schedule;
    const char *name = (const char *[N_TENANTS]){NULL, "a", "b", "c"}[i];
    struct hash128 key = name ? hash_xxh3(name, strlen(name), 1) : (struct hash128){0};
    for (uint32_t k = 0; k < c->n_tenants; k++)
        if (c->keys[k].lo == key.lo && c->keys[k].hi == key.hi)
            return c->tenants[k].competing ? c->tenants[k].vtime
                                           : MAX(c->tenants[k].vtime, c->vtime);
    return c->vtime;
}

static bool is_waiting(const struct job *j)
{
    return j->submitted && !j->done && !j->r.seq->kv;
}

static bool is_admitted(const struct job *j)
{
    return j->submitted && !j->done && j->r.seq->kv;
}

/* After a turn: bound (2), for every tenant that waits with nothing admitted. */
static void check_other_tenants(void)
{
    uint64_t f = 0;
    for (uint32_t i = 0; i < sim.n_jobs; i++)
        f = MAX(f, sim.en->ld.lim.n_seqs * most_tokens(&sim.jobs[i]));
    for (uint32_t t = 0; t < N_TENANTS; t++) {
        struct wait *w = &sim.waits[t];
        bool waits = false, admitted = false, was = w->on;
        for (uint32_t i = 0; i < sim.n_jobs; i++) {
            const struct job *j = &sim.jobs[i];
            waits = waits || (j->tenant == t && is_waiting(j) && j->r.seq->entered);
            admitted = admitted || (j->tenant == t && is_admitted(j));
        }
        w->on = waits && !admitted;
        sim.n_waits += w->on && !was;
        for (uint32_t i = 0; i < N_TENANTS && w->on; i++) {
            w->given[i] = was && i != t ? w->given[i] + sim.tenant_rows[i] : 0;
            if (!was) {
                uint64_t until = vtime_of(t) + f, from = vtime_of(i);
                w->most[i] = f + (until > from ? until - from : 0);
            }
            sim.most_wait = MAX(sim.most_wait, (double)w->given[i] / (double)w->most[i]);
            SIM_OK(w->given[i] <= w->most[i],
                   "tenant %u waits while %u has %" PRIu64 " rows, %" PRIu64 " are the bound", t, i,
                   w->given[i], w->most[i]);
        }
    }
}

/* Bound (1): who was admitted in this turn has passed nobody of its tenant that it may not. */
static void check_own_tenant(void)
{
    for (uint32_t i = 0; i < sim.n_jobs; i++) {
        struct job *y = &sim.jobs[i];
        if (y->admitted || !is_admitted(y))
            continue;
        y->admitted = true;
        for (uint32_t k = 0; k < sim.n_jobs; k++) {
            const struct job *x = &sim.jobs[k];
            if (x->tenant == y->tenant && is_waiting(x))
                SIM_OK((int64_t)y->arrival <=
                           (int64_t)x->arrival +
                               SCHED_PRIORITY_ARRIVALS * (y->r.priority - x->r.priority),
                       "job %u was admitted before %u", i, k);
        }
    }
}

/* ---- the end of a schedule ---- */

static void check_job(const struct job *j)
{
    const struct answer *want = &sim.alone[sim.model][j->prompt - sim.prompts][j->kind],
                        *got = &j->got;
    uint32_t n = want->n_calls, most = j->r.max_tokens ? j->r.max_tokens : UINT32_MAX;
    enum finish finish = want->finish, is = j->stats.finish;
    int at = (int)(j - sim.jobs);
    bool cut = most < want->n_generated, torn = is == FINISH_CANCELLED || is == FINISH_DEADLINE;
    if (cut || (most == want->n_generated && finish == FINISH_CONTEXT))
        finish = FINISH_LENGTH;
    n = cut ? most : n;
    SIM_OK(torn ? (is == FINISH_CANCELLED ? j->cancelled != 0 : j->r.deadline_ns != 0)
                : is == finish,
           "job %d ends with %s, not %s", at, finish_name(is), finish_name(finish));
    SIM_OK(torn ? got->n_calls <= n : got->n_calls == n, "job %d gives %u tokens, not %u", at,
           got->n_calls, n);
    n = MIN(n, got->n_calls);
    SIM_OK(!memcmp(got->ids, want->ids, n * sizeof *got->ids), "job %d: other tokens", at);
    uint32_t whole = !n ? 0 : cut || torn ? n - 1 : n; /* the last text may have been held back */
    SIM_OK(!memcmp(got->text_end, want->text_end, whole * sizeof *got->text_end) &&
               (!whole || !memcmp(got->text, want->text, got->text_end[whole - 1])),
           "job %d: other text", at);
    SIM_OK(torn || j->stats.n_generated == MIN(most, want->n_generated), "job %d counts %u", at,
           j->stats.n_generated);
    sim.n_tokens += got->n_calls;
    sim.n_deadlines += is == FINISH_DEADLINE;
}

/* All has ended: nobody has a page, and those of the tree come back when asked for. */
static void check_balance(void)
{
    struct engine *en = sim.en;
    struct engine_counters k;
    engine_counters(en, &k);
    SIM_OK(!k.n_held_pages && !k.n_active && !k.n_waiting && !k.n_swapped,
           "%u pages held, %u active, %u waiting, %u swapped", k.n_held_pages, k.n_active,
           k.n_waiting, k.n_swapped);
    SIM_OK(en->pool.n_free + en->prefix->tree.n_pages == en->pool.n_pages,
           "%d pages free, %d in the tree, %d in all", en->pool.n_free, en->prefix->tree.n_pages,
           en->pool.n_pages);
    SIM_OK(en->swap.n_free + sim.n_swap_kept == en->swap.n_pages, "%d of %d swap pages free",
           en->swap.n_free, en->swap.n_pages);
    if (!chance(3))
        return;
    prefix_tree_purge(&en->prefix->tree);
    SIM_OK(en->pool.n_free == en->pool.n_pages, "%d of %d pages free after a purge",
           en->pool.n_free, en->pool.n_pages);
}

static bool all_done(void)
{
    bool done = true;
    for (uint32_t i = 0; i < sim.n_jobs; i++)
        done = done && sim.jobs[i].done;
    return done;
}

static void one_turn(uint32_t *n_idle)
{
    uint64_t start = sim_now;
    sim.turn++;
    sim.rows_in_turn = 0;
    memset(sim.tenant_rows, 0, sizeof sim.tenant_rows);
    submit_some();
    cancel_some();
    bool busy = sim.en->n_active || sim.en->n_queue;
    engine_turn(sim.en);
    check_own_tenant();
    check_other_tenants();
    for (uint32_t i = 0; i < sim.n_jobs; i++) {
        const struct job *j = &sim.jobs[i];
        bool over = (j->cancelled && j->cancelled <= sim.turn) ||
                    (j->r.deadline_ns && j->r.deadline_ns <= start);
        SIM_OK(!j->submitted || !over || j->done, "job %u should have ended in this turn", i);
    }
    *n_idle = busy && !sim.rows_in_turn ? *n_idle + 1 : 0;
    sim.most_idle = MAX(sim.most_idle, *n_idle);
}

static void run_schedule(void)
{
    uint32_t n_idle = 0;
    sim.turn = 0;
    sim.bad = false;
    memset(sim.waits, 0, sizeof sim.waits);
    draw_jobs();
    while (!all_done() && sim.turn < MAX_TURNS)
        one_turn(&n_idle);
    if (!SIM_OK(all_done(), "it does not come to an end"))
        return;
    for (uint32_t i = 0; i < sim.n_jobs; i++)
        check_job(&sim.jobs[i]);
    check_balance();
    sim.n_schedules++;
    sim.n_seqs += sim.n_jobs;
}

/* Engine number i and its schedules are the same whatever ran before. */
static void run_engine(uint32_t i, uint32_t n_schedules)
{
    sim.config = i;
    sim.rng = sim.seed * 1000003 + i;
    sim_now = 1000000000;
    /* keys and values of one head of 16, two bytes each */
    if (OK(open_engine(KV_PAGE_TOKENS * 2 * 16 * 2))) {
        for (sim.schedule = 0; sim.schedule < n_schedules && !sim.bad; sim.schedule++)
            run_schedule();
        close_engine();
    }
    sim_now = 0;
}

static uint64_t from_env(const char *name, uint64_t otherwise)
{
    const char *v = getenv(name);
    return v && *v ? strtoull(v, NULL, 10) : otherwise;
}

static void begin(void)
{
    char models[2][sizeof *sim.models];
    memcpy(models, sim.models, sizeof models);
    memset(&sim, 0, sizeof sim);
    memcpy(sim.models, models, sizeof models);
    sim.seed = from_env("INGOT_SIM_SEED", 1);
    sim.be = backend_cpu;
    sim.be.run = sim_run;
    sim.be.kv_write = sim_kv_write;
    make_prompts();
}

static void print_figures(const char *name)
{
    printf("  %s, seed %" PRIu64 ": %" PRIu64 " schedules, %" PRIu64 " sequences, %" PRIu64
           " steps, %" PRIu64 " rows (%" PRIu64 " again), %" PRIu64 " tokens, %" PRIu64
           " rows of logits\n",
           name, sim.seed, sim.n_schedules, sim.n_seqs, sim.n_steps, sim.n_rows, sim.n_again_rows,
           sim.n_tokens, sim.n_logits);
    printf("    swapped %" PRIu64 " out, %" PRIu64 " in; hit tokens: ram %" PRIu64 ", copy %" PRIu64
           ", disk %" PRIu64 ", swap %" PRIu64 "; cancelled: waiting %" PRIu64 ", prompt %" PRIu64
           ", decode %" PRIu64 ", swapped %" PRIu64 ", done %" PRIu64 "; %" PRIu64
           " deadlines, %" PRIu64 " refused\n",
           sim.n_out, sim.n_in, sim.hits[PREFIX_RAM], sim.hits[PREFIX_COPY], sim.hits[PREFIX_DISK],
           sim.hits[PREFIX_SWAP], sim.n_cancels[0], sim.n_cancels[1], sim.n_cancels[2],
           sim.n_cancels[3], sim.n_cancels[4], sim.n_deadlines, sim.n_refused);
    printf("    %" PRIu64 " waits of a tenant, the longest %.0f %% of its bound; at most %u turns "
           "without a row\n",
           sim.n_waits, 100 * sim.most_wait, sim.most_idle);
}

/* Nothing of this is worth much when it never happens. */
static void check_figures(void)
{
    OK(sim.n_tokens > 10 * sim.n_schedules && sim.n_out > 0 && sim.n_in > 0 && sim.n_logits > 0);
    OK(sim.n_deadlines > 0 && sim.n_refused > 0 && sim.n_waits > 0);
    for (int i = 0; i < PREFIX_TIER_END; i++)
        OK_MSG(sim.hits[i] > 0, "no hits of tier %s", prefix_tier_name(i));
    for (int i = 0; i < 5; i++)
        OK_MSG(sim.n_cancels[i] > 0, "nobody was cancelled in state %d", i);
}

static void run_all(const char *isa, uint64_t n)
{
    struct err e = {0};
    if (isa)
        setenv("INGOT_ISA", isa, 1);
    begin();
    OK_CALL(prefix_open(&sim.store, unit_memdir(), NULL, &e), e);
    n = from_env("INGOT_SIM_N", n);
    uint64_t only = from_env("INGOT_SIM_ONLY", UINT64_MAX);
    uint32_t per_engine = (uint32_t)MIN((uint64_t)PER_ENGINE, MAX(n / 40, (uint64_t)1));
    for (uint32_t i = 0; i * (uint64_t)per_engine < n && !sim.bad; i++)
        if (only == UINT64_MAX || only == i)
            run_engine(i, per_engine);
    prefix_close(sim.store);
    print_figures(isa ? isa : "native");
    if (n >= 400 && only == UINT64_MAX && !sim.bad)
        check_figures();
    if (isa)
        unsetenv("INGOT_ISA");
}

static void test_ten_thousand_schedules_give_every_sequence_its_own_tokens(void)
{
    if (make_models())
        run_all(NULL, N_NATIVE);
}

static void test_the_same_holds_with_scalar_kernels(void)
{
    if (make_models())
        run_all("scalar", N_SCALAR);
}

static void test_a_seed_gives_the_same_steps_again(void)
{
    uint64_t trace[2] = {0};
    for (int pass = 0; pass < 2 && make_models(); pass++) {
        begin();
        for (uint32_t i = 0; i < 6; i++)
            run_engine(i, 10);
        trace[pass] = sim.trace;
    }
    OK(trace[0] && trace[0] == trace[1]);
}

int main(int argc, char **argv)
{
#define T(f)                                                                                       \
    {                                                                                              \
#f, test_##f                                                                               \
    }
    static const struct unit_test tests[] = {
        T(ten_thousand_schedules_give_every_sequence_its_own_tokens),
        T(the_same_holds_with_scalar_kernels),
        T(a_seed_gives_the_same_steps_again),
    };
    log_threshold = LOG_ERROR;
    return unit_main(argc, argv, tests, ARRAY_LEN(tests));
}
