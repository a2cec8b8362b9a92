/* Between the engine and its scheduler: takes the snapshots, carries decisions out, and fills the
 * batch of a step. Owns the table of tenants and the arrays that decisions are made in; all of them
 * are taken when the engine opens. The engine's thread only. */
#include "engine/prefix_cache.h"

#include <string.h>

enum {
    IDLE_TENANTS = 64,         /* remembered beside those that may have requests here */
    FETCH_NS = 5000000,        /* reading known pages of prompts, in a step where others decode */
    FETCH_ALONE_NS = 50000000, /* and where nobody does: the bound on cancelling */
};

int schedule_init(struct schedule *c, const struct limits *l, struct err *e)
{
    size_t n = (size_t)l->n_seqs + l->queue_len;
    c->max_tenants = (uint32_t)n + IDLE_TENANTS;
    c->seqs = mem_array(n, sizeof *c->seqs);
    c->verdicts = mem_array(n, sizeof *c->verdicts);
    c->admitted = mem_array(l->n_seqs, sizeof *c->admitted);
    c->tenants = mem_array(c->max_tenants, sizeof *c->tenants);
    c->next_tenants = mem_array(c->max_tenants, sizeof *c->next_tenants);
    c->keys = mem_array(c->max_tenants, sizeof *c->keys);
    c->uses = mem_array(c->max_tenants, sizeof *c->uses);
    if (c->seqs && c->verdicts && c->admitted && c->tenants && c->next_tenants && c->keys &&
        c->uses)
        return 0;
    schedule_fini(c);
    return err_set(e, ERR_MEMORY, "out of memory for the scheduler of %zu requests", n);
}

uint64_t schedule_bytes(const struct limits *l)
{
    const struct schedule c = {0};
    uint64_t n = (uint64_t)l->n_seqs + l->queue_len, n_tenants = n + IDLE_TENANTS;
    return n * (sizeof *c.seqs + sizeof *c.verdicts) + l->n_seqs * sizeof *c.admitted +
           n_tenants * (2 * sizeof *c.tenants + sizeof *c.keys + sizeof *c.uses);
}

void schedule_fini(struct schedule *c)
{
    mem_free(c->seqs);
    mem_free(c->verdicts);
    mem_free(c->admitted);
    mem_free(c->tenants);
    mem_free(c->next_tenants);
    mem_free(c->keys);
    mem_free(c->uses);
    *c = (struct schedule){0};
}

/* ---- tenants ---- */

/* The entry of this key. When the table is full the idle one that has had the least is forgotten:
 * what it had no longer counts against it. There is one, as there are fewer requests than entries.
 */
static uint32_t find_tenant(struct schedule *c, struct hash128 key)
{
    uint32_t idle = UINT32_MAX;
    for (uint32_t i = 0; i < c->n_tenants; i++) {
        if (c->keys[i].lo == key.lo && c->keys[i].hi == key.hi)
            return i;
        if (!c->uses[i] && (idle == UINT32_MAX || c->tenants[i].vtime < c->tenants[idle].vtime))
            idle = i;
    }
    if (c->n_tenants < c->max_tenants)
        idle = c->n_tenants++;
    CHECK(idle != UINT32_MAX);
    c->keys[idle] = key;
    c->tenants[idle] = (struct sched_tenant){0};
    return idle;
}

static void enter(struct schedule *c, struct seq *s)
{
    const char *name = s->req->tenant;
    /* a request that names none is the engine's own; no name makes this key */
    struct hash128 key = name ? hash_xxh3(name, strlen(name), 1) : (struct hash128){0};
    s->tenant = find_tenant(c, key);
    s->entered = true;
    c->uses[s->tenant]++;
}

void schedule_leave(struct schedule *c, const struct seq *s)
{
    if (s->entered)
        c->uses[s->tenant]--;
}

/* ---- snapshots ---- */

/* How many tokens' KV it is to have before the next one is decoded. */
static uint32_t n_known(const struct seq *s)
{
    if (s->state != SEQ_DECODE)
        return (uint32_t)s->req->n_ids;
    return (uint32_t)kv_find_end(s->kv); /* more than it has when some of it was lost */
}

static struct sched_seq describe(const struct engine *en, const struct seq *s)
{
    const struct request *r = s->req;
    const struct kv_seq *kv = s->kv;
    uint32_t n_kv = kv ? (uint32_t)(s->swapped_out ? kv->n_parked : kv->n_kv) : 0, n_gone = 0;
    uint64_t n_max = en->ld.lim.n_ctx;
    if (r->max_tokens) /* the last token is not fed again */
        n_max = MIN(n_max, (uint64_t)r->n_ids + r->max_tokens - 1);
    if (kv) /* what a window has left is behind it */
        n_gone = (uint32_t)(s->swapped_out ? kv->n_parked_gone : kv->n_gone) * KV_PAGE_TOKENS;
    uint32_t n_left = n_known(s) - n_kv;
    /* Pages that several share are free to take for the next one, but not counted on. */
    return (struct sched_seq){
        .state = s->swapped_out ? SCHED_SWAPPED
                 : kv           ? SCHED_RESIDENT
                                : SCHED_WAITING,
        .tenant = s->tenant,
        .priority = r->priority,
        .arrival = s->arrival,
        .last_run = s->last_run,
        .deadline_ns = r->deadline_ns,
        .n_kv = n_kv - n_gone,
        .n_left = n_left,
        .n_max = MAX((uint32_t)n_max, n_kv + n_left) - n_gone,
        .n_pages = kv ? (uint32_t)(kv->n_pages - kv->n_gone) : 0,
        .n_own = kv ? (uint32_t)kv_seq_own(kv, &en->pool) : 0,
        .cancelled = s->ended,
        .blocked = kv && (kv->looking || kv->following),
        .all_logits = r->on_logits != NULL,
    };
}

/* The first n_waiting of the queue are seen; more may be added to it meanwhile. */
static void decide(struct engine *en, struct sched_decision *d, uint32_t n_waiting)
{
    struct schedule *c = &en->schedule;
    const struct limits *l = &en->ld.lim;
    for (uint32_t i = 0; i < en->n_active; i++)
        c->seqs[i] = describe(en, en->active[i]);
    for (uint32_t i = 0; i < n_waiting; i++) {
        if (!en->queue[i]->entered)
            enter(c, en->queue[i]);
        c->seqs[en->n_active + i] = describe(en, en->queue[i]);
    }
    struct sched_snapshot s = {
        .seqs = c->seqs,
        .n_seqs = en->n_active + n_waiting,
        .n_active = en->n_active,
        .tenants = c->tenants,
        .n_tenants = c->n_tenants,
        .vtime = c->vtime,
        .step = en->counters.n_steps + 1,
        .now_ns = now_ns(),
        .max_seqs = l->n_seqs,
        .max_rows = l->max_batch,
        .max_out = l->max_out,
        .page_tokens = KV_PAGE_TOKENS,
        .n_pages = l->n_pages,
        .n_free = l->n_pages - (uint32_t)en->pool.n_held,
        .max_held = l->max_held,
        .max_step_ns = l->max_step_ms * (uint64_t)1000000,
        .cost = c->cost,
    };
    *d = (struct sched_decision){
        .verdicts = c->verdicts, .tenants = c->next_tenants, .admitted = c->admitted};
    sched_decide(d, &s);
}

/* ---- moves ---- */

static void admit(struct engine *en, struct seq *s)
{
    struct err why = {0};
    s->start_ns = now_ns();
    s->stats.queue_ns = s->start_ns - s->submit_ns;
    struct kv_seq *kv = en->kv;
    while (kv->owner)
        kv++; /* there are as many slots as active sequences may be */
    kv->owner = s;
    s->kv = kv;
    prefix_cache_attach(en->prefix, kv, s->req);
    s->state = SEQ_PROMPT;
    if (seq_prepare(s, en, &why))
        seq_end(s, FINISH_ERROR, &why);
}

/* Has it ended, by this decision or before? */
static bool end_by(struct seq *s, const struct sched_verdict *v, const struct limits *l)
{
    struct err why = {0};
    if (v->move == SCHED_EXPIRE)
        seq_end(s, FINISH_DEADLINE, NULL);
    if (v->move == SCHED_REFUSE) {
        err_set(&why, ERR_LIMIT,
                "the request needs %u KV pages, the engine has %u; ask for fewer tokens",
                v->n_pages, l->n_pages);
        seq_end(s, FINISH_ERROR, &why);
    }
    return s->ended;
}

/* Out of the queue with those who were admitted or have ended there. */
static void leave_queue(struct engine *en, const struct sched_decision *d, uint32_t n_waiting)
{
    pthread_mutex_lock(&en->mu);
    uint32_t kept = 0, first = en->n_active; /* verdicts of the queue begin there */
    for (uint32_t k = 0; k < d->n_admitted; k++)
        en->active[first + k] = en->queue[d->admitted[k] - first];
    en->n_active += d->n_admitted;
    for (uint32_t i = 0; i < en->n_queue; i++) {
        struct seq *s = en->queue[i];
        if (i < n_waiting && s->ended)
            en->dropped[en->n_dropped++] = s;
        else if (i >= n_waiting || !d->n_admitted || d->verdicts[first + i].move != SCHED_ADMIT)
            en->queue[kept++] = s;
    }
    en->n_queue = kept;
    en->counters.n_waiting = kept;
    en->counters.n_active = en->n_active;
    pthread_mutex_unlock(&en->mu);
    for (uint32_t k = 0; k < d->n_admitted; k++)
        admit(en, en->active[first + k]);
}

static void swap_out(struct engine *en, struct seq *s)
{
    prefix_cache_park(en->prefix, s->kv);
    s->swapped_out = true;
    s->out_step = en->counters.n_steps + 1;
    en->n_swapped_out++;
}

static void swap_in(struct engine *en, struct seq *s)
{
    prefix_cache_return(en->prefix, s->kv, s->req);
    s->swapped_out = false;
    en->n_swapped_in++;
}

/* Those that leave go first: the others are to have their pages. One that has just left does not
 * come back in the same step. */
static bool swap_some(struct engine *en, const struct sched_decision *d)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < en->n_active; i++)
        if (d->verdicts[i].move == SCHED_SWAP_OUT) {
            swap_out(en, en->active[i]);
            n++;
        }
    for (uint32_t i = 0; i < en->n_active; i++)
        if (d->verdicts[i].move == SCHED_SWAP_IN &&
            en->active[i]->out_step != en->counters.n_steps + 1) {
            swap_in(en, en->active[i]);
            n++;
        }
    return n > 0;
}

enum carried { ROWS_STAND, MOVED, SLOT_TO_LEAVE };

static enum carried carry_out(struct engine *en, struct sched_decision *d, uint32_t n_waiting)
{
    uint32_t n_active = en->n_active;
    bool leaver = false, moved = false;
    for (uint32_t i = 0; i < n_active; i++)
        leaver = end_by(en->active[i], &d->verdicts[i], &en->ld.lim) || leaver;
    for (uint32_t i = 0; i < n_waiting; i++)
        moved = end_by(en->queue[i], &d->verdicts[n_active + i], &en->ld.lim) || moved;
    if (leaver)
        d->n_admitted = 0; /* its slot is not empty yet */
    bool swapped = !leaver && swap_some(en, d);
    if (moved || d->n_admitted)
        leave_queue(en, d, n_waiting);
    moved = moved || swapped || d->n_admitted;
    return leaver ? SLOT_TO_LEAVE : moved ? MOVED : ROWS_STAND;
}

/* ---- prompts that need not be computed ---- */

/* Does `lead` compute what s wants next? Then it is worth waiting for: all that s wants of the page
 * where both stand, or half a page of it. */
static bool is_ahead(const struct seq *lead, const struct seq *s)
{
    const struct kv_seq *a = lead->kv, *b = s->kv;
    if (lead->state != SEQ_PROMPT || lead->ended || a->node != b->node || a->node < 0)
        return false;
    int32_t first = b->n_tree * KV_PAGE_TOKENS, n = first;
    int32_t want = MIN(kv_find_end(b), first + KV_PAGE_TOKENS), end = MIN(want, a->n_prompt);
    while (n < end && a->ids[n] == b->ids[n])
        n++;
    return n > b->n_kv && (n == want || n - b->n_kv >= KV_PAGE_TOKENS / 2);
}

/* The one admitted first never follows, so that somebody always leads. */
static bool has_leader(const struct engine *en, uint32_t i)
{
    for (uint32_t k = 0; k < i; k++)
        if (is_ahead(en->active[k], en->active[i]))
            return true;
    return false;
}

/* Sequences take over what has become known of them since the last step: what comes from the swap
 * area and the persistent tier, or what another sequence has just computed. */
static void advance_prompts(struct engine *en)
{
    bool alone = true;
    for (uint32_t i = 0; i < en->n_active; i++)
        alone = alone && (en->active[i]->state != SEQ_DECODE || en->active[i]->ended ||
                          en->active[i]->swapped_out);
    uint64_t deadline = now_ns() + (alone ? FETCH_ALONE_NS : FETCH_NS);
    for (uint32_t i = 0; i < en->n_active; i++) {
        struct seq *s = en->active[i];
        if (s->swapped_out || s->ended)
            continue;
        if (!s->kv->looking && s->kv->n_kv >= kv_find_end(s->kv))
            continue;
        if (!prefix_cache_advance(en->prefix, s->kv, deadline))
            return;
        bool followed = s->kv->following;
        s->kv->following = s->state == SEQ_PROMPT && has_leader(en, i);
        if (followed && !s->kv->following)
            prefix_cache_copy(en->prefix, s->kv);
    }
}

/* ---- the batch ---- */

/* Add n rows of s from where its KV ends; n_want of them, the last ones, want logits. */
static void add_rows(struct engine *en, struct seq *s, int32_t n, int32_t n_want)
{
    struct batch *b = &en->batch;
    struct kv_seq *kv = s->kv;
    prefix_cache_reserve(en->prefix, kv, kv->n_kv + n);
    memcpy(en->row_ids + b->n_rows, kv->ids + kv->n_kv, (size_t)n * sizeof *kv->ids);
    en->batch_owner[b->n_seqs] = s;
    en->batch_seqs[b->n_seqs++] = (struct batch_seq){
        .first_row = b->n_rows, .n_rows = n, .pos = kv->n_kv, .pages = kv->pages};
    s->first_want = b->n_want;
    s->n_rows = n;
    s->n_want = n_want;
    for (int32_t i = n - n_want; i < n; i++)
        en->want[b->n_want++] = b->n_rows + i;
    b->n_rows += n;
}

static void fill_batch(struct engine *en, const struct sched_decision *d)
{
    for (uint32_t i = 0; i < en->n_active; i++) {
        struct seq *s = en->active[i];
        int32_t n = (int32_t)d->verdicts[i].n_rows, n_want = n;
        if (!n || s->swapped_out)
            continue;
        if (s->state == SEQ_DECODE && s->kv->n_kv < s->kv->n_had)
            n_want = 0; /* it was lost, and what followed from it is known */
        else if (s->state == SEQ_DECODE)
            s->kv->ids[s->kv->n_kv] = s->next;
        else if (!s->req->on_logits)
            n_want = s->kv->n_kv + n == (int32_t)s->req->n_ids;
        add_rows(en, s, n, n_want);
        s->last_run = en->counters.n_steps + 1;
    }
}

void schedule_step(struct engine *en)
{
    struct schedule *c = &en->schedule;
    struct sched_decision d;
    enum carried carried;
    en->batch.n_rows = en->batch.n_seqs = en->batch.n_want = 0;
    /* Who comes in may find that much of its prompt is known: rows are shared out knowing that. */
    do {
        pthread_mutex_lock(&en->mu);
        uint32_t n_waiting = en->n_queue;
        pthread_mutex_unlock(&en->mu);
        advance_prompts(en);
        decide(en, &d, n_waiting);
        carried = carry_out(en, &d, n_waiting);
    } while (carried == MOVED);
    if (carried == SLOT_TO_LEAVE)
        return;
    struct sched_tenant *tenants = c->tenants;
    c->tenants = c->next_tenants;
    c->next_tenants = tenants;
    c->vtime = d.vtime;
    c->n_keys = d.n_keys;
    fill_batch(en, &d);
}
