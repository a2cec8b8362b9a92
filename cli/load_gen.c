/* The load generator. The schedule comes from counters hashed with the seed, so that request 1000
 * is what it is whatever happened to the 999 before it. Each request in flight has a slot (its
 * struct request and its prompt); events fill its record, which only one thread touches at a time.
 * The lock guards the stack of free slots. All memory is the load's, taken before the first
 * request. Prints nothing. */
#include "cli/load_gen.h"
#include "cli/cli_internal.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <poll.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

enum {
    MAX_REQUESTS = 1 << 20,   /* records of one run */
    MAX_GAPS = 1 << 27,       /* delays between tokens of one run */
    MAX_GAPS_TIMED = 1 << 24, /* of one whose number of requests nobody knows beforehand */
};

/* ---- the schedule ---- */

enum stream {
    STREAM_PROMPT = 1,
    STREAM_GEN,
    STREAM_ARRIVAL,
    STREAM_SHARE,
    STREAM_PREFIX,
    STREAM_TOKENS
};

/* The finalizer of splitmix64 (Steele et al., "Fast splittable pseudorandom number generators",
 * OOPSLA 2014). */
static uint64_t mix(uint64_t z)
{
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* 64 random bits that belong to (seed, stream, i). */
static uint64_t draw(uint64_t seed, enum stream st, uint64_t i)
{
    const uint64_t golden = 0x9e3779b97f4a7c15u;
    return mix(mix(mix(seed + golden) + golden * (uint64_t)st) + golden * (i + 1));
}

/* [0, 1) */
static double draw_unit(uint64_t seed, enum stream st, uint64_t i)
{
    return (double)(draw(seed, st, i) >> 11) / 9007199254740992.0;
}

static uint32_t draw_range(const struct load_range *r, uint64_t seed, enum stream st, uint64_t i)
{
    uint64_t span = (uint64_t)r->max - r->min + 1;
    return r->min + (uint32_t)((draw(seed, st, i) >> 32) * span >> 32);
}

void load_item_at(struct load_item *out, const struct load_spec *s, uint64_t i)
{
    out->n_prompt = draw_range(&s->prompt, s->seed, STREAM_PROMPT, i);
    out->n_gen = draw_range(&s->gen, s->seed, STREAM_GEN, i);
    /* Steps of a line with slope `share`, so that any run of n requests has n * share of them, give
     * or take one. */
    double k = (double)(i % LOAD_WARMUP), start = draw_unit(s->seed, STREAM_SHARE, 0);
    bool shared = floor((k + 1) * s->share + start) > floor(k * s->share + start);
    out->n_shared = shared ? s->n_shared : 0;
}

uint64_t load_gap_ns(const struct load_spec *s, uint64_t i)
{
    return (uint64_t)(-log1p(-draw_unit(s->seed, STREAM_ARRIVAL, i)) / s->rate * 1e9);
}

static void fill_ids(int32_t *ids, uint32_t n, uint64_t key, uint32_t n_vocab)
{
    for (uint32_t k = 0; k < n; k++)
        ids[k] = (int32_t)(((draw(key, STREAM_TOKENS, k) >> 32) * n_vocab) >> 32);
}

void load_item_ids(int32_t *ids, const struct load_spec *s, uint64_t i, uint32_t n_vocab)
{
    struct load_item item;
    load_item_at(&item, s, i);
    fill_ids(ids, item.n_shared, draw(s->seed, STREAM_PREFIX, 0), n_vocab);
    fill_ids(ids + item.n_shared, item.n_prompt - item.n_shared, draw(s->seed, STREAM_TOKENS, i),
             n_vocab);
}

/* ---- requests in flight ---- */

struct slot {
    struct request req;
    struct load *load;
    int32_t *ids;                  /* [prompt.max], part of load->ids */
    struct load_record *rec, warm; /* warm: what rec is in the warm-up */
    uint64_t *gaps;                /* rec's */
    uint64_t last_ns;              /* its last token */
    char tenant[24];
    uint32_t n_seen, cap; /* tokens; room in gaps */
    struct err why;
};

struct load {
    struct load_spec spec;
    struct load_target target;
    uint32_t n_slots, concurrency; /* concurrency: of this phase; n_slots in an open loop */
    struct slot *slots;            /* [n_slots] */
    int32_t *ids;                  /* [n_slots][prompt.max] */
    struct load_record *records;   /* [n_max] */
    uint64_t *gaps, *scratch;      /* [gaps_max], [n_max] */
    uint64_t n_max, gaps_max, n_gaps;
    uint64_t start_ns;
    struct load_result result;
    bool warming;
    int wake_fd;          /* a request ended, or Ctrl-C */
    pthread_mutex_t lock; /* over free and n_free, and result.why */
    struct slot **free;   /* [n_slots] stack */
    uint32_t n_free;
};

static int engine_target_submit(void *self, struct request *r, struct err *e)
{
    return engine_submit(self, r, e);
}

static void engine_target_cancel(void *self, struct request *r)
{
    engine_cancel(self, r);
}

void load_target_engine(struct load_target *out, struct engine *en)
{
    *out = (struct load_target){.self = en,
                                .n_vocab = engine_info(en)->n_vocab,
                                .submit = engine_target_submit,
                                .cancel = engine_target_cancel};
}

static void wake(struct load *l)
{
    uint64_t one = 1;
    while (write(l->wake_fd, &one, sizeof one) < 0 && errno == EINTR)
        ;
}

static void on_token(void *user, int32_t id, const char *text, size_t n)
{
    struct slot *s = user;
    uint64_t now = now_ns();
    if (!s->n_seen)
        s->rec->first = now - s->load->start_ns;
    else if (s->n_seen <= s->cap)
        s->gaps[s->n_seen - 1] = now - s->last_ns;
    s->n_seen++;
    s->last_ns = now;
}

/* Under the lock the slot becomes another request's; its record is final before that. */
static void slot_release(struct slot *s, enum load_outcome outcome, const struct err *why)
{
    struct load *l = s->load;
    struct load_record *r = s->rec;
    r->done = now_ns() - l->start_ns;
    r->last = s->n_seen ? s->last_ns - l->start_ns : 0;
    r->n_gaps = s->n_seen ? MIN(s->n_seen - 1, s->cap) : 0;
    r->outcome = outcome;
    pthread_mutex_lock(&l->lock);
    l->result.n_outcome[outcome]++;
    if (why && why->code && !l->result.why.code)
        l->result.why = *why;
    l->free[l->n_free++] = s;
    wake(l); /* under the lock: the load may be gone right after it */
    pthread_mutex_unlock(&l->lock);
}

static void on_done(void *user, const struct request_stats *st)
{
    struct slot *s = user;
    struct load_record *r = s->rec;
    r->queue_ns = st->queue_ns;
    r->n_cached = st->n_cached;
    r->n_out = st->n_generated;
    enum load_outcome o = st->finish == FINISH_ERROR       ? LOAD_FAILED
                          : st->finish == FINISH_CANCELLED ? LOAD_CANCELLED
                          : st->n_generated < r->n_gen     ? LOAD_SHORT
                                                           : LOAD_DONE;
    slot_release(s, o, st->finish == FINISH_ERROR ? &st->err : NULL);
}

static enum load_outcome refusal(const struct err *e)
{
    return e->code == ERR_FULL    ? LOAD_QUEUE_FULL
           : e->code == ERR_LIMIT ? LOAD_TOO_LONG
                                  : LOAD_REFUSED;
}

static struct slot *slot_take(struct load *l)
{
    pthread_mutex_lock(&l->lock);
    struct slot *s = l->n_slots - l->n_free < l->concurrency ? l->free[--l->n_free] : NULL;
    pthread_mutex_unlock(&l->lock);
    return s;
}

static uint32_t in_flight(struct load *l)
{
    pthread_mutex_lock(&l->lock);
    uint32_t n = l->n_slots - l->n_free;
    pthread_mutex_unlock(&l->lock);
    return n;
}

/* Send item i, which was due at due_ns from the start (UINT64_MAX: now). */
static void slot_send(struct load *l, struct slot *s, uint64_t i, uint64_t due_ns)
{
    struct load_item item;
    load_item_at(&item, &l->spec, i);
    load_item_ids(s->ids, &l->spec, i, l->target.n_vocab);
    struct load_record *r = l->warming ? &s->warm : &l->records[l->result.n_records++];
    struct load_record fresh = {
        .n_prompt = item.n_prompt, .n_gen = item.n_gen, .gaps_at = l->n_gaps};
    s->cap = l->warming ? 0 : item.n_gen - 1;
    s->gaps = l->gaps + l->n_gaps;
    l->n_gaps += s->cap;
    s->n_seen = 0;
    s->req = (struct request){.ids = s->ids,
                              .n_ids = item.n_prompt,
                              .max_tokens = item.n_gen,
                              .ignore_eog = true,
                              .on_token = on_token,
                              .on_done = on_done,
                              .user = s};
    if (l->spec.n_tenants) {
        snprintf(s->tenant, sizeof s->tenant, "tenant %u", (uint32_t)(i % l->spec.n_tenants));
        s->req.tenant = s->tenant;
    }
    sample_defaults(&s->req.sample);
    s->req.sample.temperature = 0;
    fresh.sent = now_ns() - l->start_ns;
    fresh.due = due_ns == UINT64_MAX ? fresh.sent : due_ns;
    s->rec = r;
    *r = fresh;
    struct err why = {0};
    if (l->target.submit(l->target.self, &s->req, &why))
        slot_release(s, refusal(&why), &why);
}

/* ---- phases ---- */

/* Until a request ends, Ctrl-C, or `until` (ns of the monotonic clock; 0: for ever). */
static int wait_event(struct load *l, uint64_t until, struct err *e)
{
    uint64_t now = now_ns(), left = until > now ? until - now : 0, count;
    struct timespec t = {(time_t)(left / 1000000000u), (long)(left % 1000000000u)};
    struct pollfd fd = {.fd = l->wake_fd, .events = POLLIN};
    if (ppoll(&fd, 1, until ? &t : NULL, NULL) < 0 && errno != EINTR)
        return err_errno(e, "cannot wait for the requests in flight");
    if ((fd.revents & POLLIN) && read(l->wake_fd, &count, sizeof count) < 0 && errno != EINTR &&
        errno != EAGAIN)
        return err_errno(e, "cannot read from the event queue");
    return 0;
}

/* Nothing is sent any more; the requests end by themselves or because they are cancelled. */
static int drain(struct load *l, struct err *e)
{
    int rc = 0;
    bool told = false;
    while (in_flight(l)) {
        if ((interrupt_seen() || rc) && !told) {
            told = true;
            for (uint32_t i = 0; i < l->n_slots; i++)
                if (l->slots[i].rec) /* sent once; cancelling one that is done does nothing */
                    l->target.cancel(l->target.self, &l->slots[i].req);
        }
        if (!rc)
            rc = wait_event(l, 0, e);
        else
            usleep(1000); /* the events' channel is broken, and the slots are still in use */
    }
    return rc;
}

int load_warm(struct load *l, struct err *e)
{
    int rc = 0;
    l->warming = true;
    l->start_ns = now_ns();
    l->concurrency = MIN(l->spec.concurrency, l->n_slots);
    for (uint64_t i = 0; i < l->spec.n_warmup && !rc && !interrupt_seen();) {
        struct slot *s = slot_take(l);
        if (s)
            slot_send(l, s, LOAD_WARMUP + i++, UINT64_MAX);
        else
            rc = wait_event(l, 0, e);
    }
    if (drain(l, rc ? NULL : e))
        rc = -1;
    l->warming = false;
    struct load_result *r = &l->result;
    if (!rc && interrupt_seen())
        rc = err_set(e, ERR_CANCELLED, "interrupted during the warm-up");
    else if (!rc && r->n_outcome[LOAD_DONE] < l->spec.n_warmup)
        rc = err_set(e, r->why.code ? r->why.code : ERR_LIMIT, "the warm-up failed: %s",
                     r->why.code ? r->why.msg : "an answer ended early");
    *r = (struct load_result){0};
    return rc;
}

/* Is there one more request, with the arrival `due` in an open loop? */
static bool want_more(struct load *l, uint64_t due)
{
    const struct load_spec *s = &l->spec;
    uint64_t i = l->result.n_records;
    uint64_t at = s->rate > 0 ? due : now_ns() - l->start_ns;
    if ((s->n_requests && i >= s->n_requests) || interrupt_seen() ||
        (s->duration_s > 0 && (double)at >= s->duration_s * 1e9))
        return false;
    if (i < l->n_max && l->gaps_max - l->n_gaps >= s->gen.max - 1)
        return true;
    CHECK(!s->n_requests && !(s->rate > 0)); /* the other kinds were counted beforehand */
    l->result.no_room = true;
    return false;
}

int load_run(struct load *l, struct err *e)
{
    const struct load_spec *s = &l->spec;
    struct load_result *r = &l->result;
    bool open = s->rate > 0;
    int rc = 0;
    l->concurrency = open ? l->n_slots : MIN(s->concurrency, l->n_slots);
    l->start_ns = now_ns();
    uint64_t due = open ? load_gap_ns(s, 0) : 0;
    while (!rc && want_more(l, due)) {
        if (open && now_ns() < l->start_ns + due) {
            rc = wait_event(l, l->start_ns + due, e);
            continue;
        }
        struct slot *slot = slot_take(l);
        if (!slot) {
            rc = wait_event(l, 0, e);
            continue;
        }
        slot_send(l, slot, r->n_records, open ? due : UINT64_MAX);
        if (open)
            due += load_gap_ns(s, r->n_records);
    }
    if (drain(l, rc ? NULL : e))
        rc = -1;
    uint64_t end = 0;
    for (uint64_t i = 0; i < r->n_records; i++)
        end = MAX(end, l->records[i].done);
    r->seconds = (double)end / 1e9;
    r->interrupted = interrupt_seen();
    r->records = l->records;
    r->gaps_ns = l->gaps;
    return rc;
}

int load_wake_fd(const struct load *l)
{
    return l->wake_fd;
}

const struct load_result *load_result(const struct load *l)
{
    return &l->result;
}

/* ---- sizes, before anything is taken ---- */

/* How many requests there can be, and delays between their tokens. */
static int count_samples(struct load *l, struct err *e)
{
    const struct load_spec *s = &l->spec;
    if (!s->n_requests && !(s->rate > 0)) {
        l->n_max = MAX_REQUESTS;
        l->gaps_max = MAX((uint64_t)MAX_GAPS_TIMED, s->gen.max);
        return 0;
    }
    uint64_t due = 0;
    for (uint64_t i = 0; !s->n_requests || i < s->n_requests; i++) {
        due += s->rate > 0 ? load_gap_ns(s, i) : 0;
        if (s->rate > 0 && s->duration_s > 0 && (double)due >= s->duration_s * 1e9)
            break;
        struct load_item item;
        load_item_at(&item, s, i);
        l->n_max++;
        l->gaps_max += item.n_gen - 1;
        if (l->n_max > MAX_REQUESTS || l->gaps_max > MAX_GAPS)
            return err_set(e, ERR_LIMIT,
                           "a run records %d requests and %d tokens of answers at most; ask for "
                           "fewer requests, a shorter time or shorter answers",
                           MAX_REQUESTS, MAX_GAPS);
    }
    l->gaps_max += s->gen.max; /* want_more asks for room for the longest answer */
    return 0;
}

static int check_spec(const struct load_spec *s, const struct load_target *t, struct err *e)
{
    if (!s->prompt.min || s->prompt.max < s->prompt.min || !s->gen.min || s->gen.max < s->gen.min)
        return err_set(e, ERR_USAGE, "a prompt and an answer have at least 1 token");
    if (!s->concurrency || (s->rate > 0 && !s->max_in_flight))
        return err_set(e, ERR_USAGE, "at least 1 request must be in flight");
    if (!s->n_requests && !(s->duration_s > 0))
        return err_set(e, ERR_USAGE, "a run needs a number of requests or a duration");
    if (s->share > 0 && s->n_shared >= s->prompt.min)
        return err_set(e, ERR_USAGE,
                       "the shared prefix has %u tokens, the shortest prompt %u; it must have more",
                       s->n_shared, s->prompt.min);
    if (!t->n_vocab)
        return err_set(e, ERR_USAGE, "the model has no vocabulary");
    return 0;
}

static int take_memory(struct load *l, struct err *e)
{
    size_t n_prompt = l->spec.prompt.max, n_ids;
    l->n_slots = MAX(l->spec.concurrency, l->spec.rate > 0 ? l->spec.max_in_flight : 1);
    l->slots = mem_array(l->n_slots, sizeof *l->slots);
    l->free = mem_array(l->n_slots, sizeof *l->free);
    if (!mul_over((size_t)l->n_slots, n_prompt, &n_ids))
        l->ids = mem_array(n_ids, sizeof *l->ids);
    l->records = mem_array(l->n_max, sizeof *l->records);
    l->scratch = mem_array(l->n_max, sizeof *l->scratch);
    l->gaps = mem_array(l->gaps_max, sizeof *l->gaps);
    if (!l->slots || !l->free || !l->ids || !l->records || !l->scratch || !l->gaps)
        return err_set(e, ERR_MEMORY,
                       "out of memory for %u prompts of %zu tokens in flight and the samples of "
                       "%" PRIu64 " requests",
                       l->n_slots, n_prompt, l->n_max);
    for (uint32_t i = 0; i < l->n_slots; i++) {
        l->slots[i].load = l;
        l->slots[i].ids = l->ids + i * n_prompt;
        l->free[l->n_free++] = &l->slots[i];
    }
    return 0;
}

int load_new(struct load **out, const struct load_spec *s, const struct load_target *t,
             struct err *e)
{
    if (check_spec(s, t, e))
        return -1;
    struct load *l = mem_zalloc(sizeof *l);
    if (!l)
        return err_set(e, ERR_MEMORY, "out of memory");
    l->spec = *s;
    l->target = *t;
    l->lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    l->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (l->wake_fd < 0) {
        err_errno(e, "cannot make an event queue");
        goto fail;
    }
    if (count_samples(l, e) || take_memory(l, e))
        goto fail;
    *out = l;
    return 0;
fail:
    load_free(l);
    return -1;
}

void load_free(struct load *l)
{
    if (!l)
        return;
    if (l->wake_fd >= 0)
        close(l->wake_fd);
    pthread_mutex_destroy(&l->lock);
    mem_free(l->slots);
    mem_free(l->free);
    mem_free(l->ids);
    mem_free(l->records);
    mem_free(l->scratch);
    mem_free(l->gaps);
    mem_free(l);
}

/* ---- numbers ---- */

const char *load_outcome_name(enum load_outcome o)
{
    static const char *const names[LOAD_OUTCOMES] = {
        [LOAD_DONE] = "done",
        [LOAD_SHORT] = "short",
        [LOAD_QUEUE_FULL] = "queue_full",
        [LOAD_TOO_LONG] = "too_long",
        [LOAD_REFUSED] = "refused",
        [LOAD_FAILED] = "failed",
        [LOAD_CANCELLED] = "cancelled",
    };
    return names[o];
}

static int compare_u64(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

/* The smallest sample that at least `percent` of all do not exceed. */
static double nearest_rank_ms(const uint64_t *sorted, uint64_t n, uint64_t percent)
{
    return (double)sorted[(n * percent + 99) / 100 - 1] / 1e6;
}

void load_dist_of(struct load_dist *out, uint64_t *samples_ns, uint64_t n)
{
    *out = (struct load_dist){.n = n};
    if (!n)
        return;
    double sum = 0;
    qsort(samples_ns, n, sizeof *samples_ns, compare_u64);
    for (uint64_t i = 0; i < n; i++)
        sum += (double)samples_ns[i];
    out->mean_ms = sum / (double)n / 1e6;
    out->p50_ms = nearest_rank_ms(samples_ns, n, 50);
    out->p95_ms = nearest_rank_ms(samples_ns, n, 95);
    out->p99_ms = nearest_rank_ms(samples_ns, n, 99);
    out->max_ms = (double)samples_ns[n - 1] / 1e6;
}

/* The distribution of one interval over the requests that were done. */
static void summarize(struct load_dist *out, struct load *l,
                      uint64_t (*interval)(const struct load_record *r))
{
    uint64_t n = 0;
    for (uint64_t i = 0; i < l->result.n_records; i++)
        if (l->records[i].outcome == LOAD_DONE)
            l->scratch[n++] = interval(&l->records[i]);
    load_dist_of(out, l->scratch, n);
}

static uint64_t interval_first(const struct load_record *r)
{
    return r->first - r->due;
}

static uint64_t interval_whole(const struct load_record *r)
{
    return r->last - r->due;
}

static uint64_t interval_queue(const struct load_record *r)
{
    return r->queue_ns;
}

static uint64_t interval_late(const struct load_record *r)
{
    return r->sent - r->due;
}

void load_summarize(struct load_summary *out, struct load *l)
{
    *out = (struct load_summary){0};
    uint64_t n = 0;
    for (uint64_t i = 0; i < l->result.n_records; i++) {
        const struct load_record *r = &l->records[i];
        if (r->outcome != LOAD_DONE)
            continue;
        out->n_in += r->n_prompt;
        out->n_cached += r->n_cached;
        out->n_out += r->n_out;
        memmove(l->gaps + n, l->gaps + r->gaps_at, r->n_gaps * sizeof *l->gaps);
        n += r->n_gaps;
    }
    load_dist_of(&out->gap, l->gaps, n);
    summarize(&out->first, l, interval_first);
    summarize(&out->whole, l, interval_whole);
    summarize(&out->queue, l, interval_queue);
    summarize(&out->late, l, interval_late);
}
