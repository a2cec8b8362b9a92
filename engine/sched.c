/* The scheduler: phases over one snapshot, each a short pass over the sequences. Who ends, who must
 * leave for lack of pages, who comes back, who is admitted, who gets rows. sched.h states the rules
 * and proves the bounds. It owns nothing and uses no memory but the caller's arrays.
 *
 * Fairness between tenants counts rows as the virtual token counter does (Sheng et al., "Fairness
 * in serving large language models", OSDI 2024), but charges prompts chunk by chunk as they run,
 * and shares out the prompt rows of a step in quanta (Shreedhar & Varghese 1995). */
#include "engine/sched.h"

#include <math.h>
#include <string.h>

enum {
    QUANTUM_ROWS = 32, /* of a prompt given at a time: a KV page, and enough for a matmul's tile */
    PROBE_ROWS = 8,    /* beside decoding ones, as long as nothing is known about the cost */
    ALONE_STEPS = 16,  /* every so many steps nothing but decoding runs */
    MANY_ROWS = 128,   /* as long as prompts have more than so many rows left */
    N_DEVIATIONS = 2,  /* steps are planned to keep their bound though they stray so far */
};
#define NOBODY UINT32_MAX

struct work { /* one decision in the making */
    const struct sched_snapshot *s;
    struct sched_decision *d;
    uint32_t n_free;     /* pages that are neither held nor set aside */
    uint32_t n_promised; /* of them, that running prompts will want before they decode */
    uint32_t n_growing;  /* running sequences that may want one more after that */
    uint32_t n_resident;
    bool tight;  /* somebody leaves, or stays away, for lack of pages: nobody else comes in */
    bool leaver; /* a resident one ends: what others would share with it is not there for nothing */
};

static uint32_t pages_for(const struct sched_snapshot *s, uint64_t n_tokens)
{
    uint64_t n = (n_tokens + s->page_tokens - 1) / s->page_tokens;
    return (uint32_t)(s->max_held ? MIN(n, (uint64_t)s->max_held) : n);
}

/* Pages that it has without taking any. */
static uint32_t pages_held(const struct work *w, const struct sched_seq *q)
{
    return q->state != SCHED_RESIDENT && w->leaver ? 0 : q->n_pages;
}

/* Pages beyond those, to have KV for n tokens more. */
static uint32_t pages_missing(const struct work *w, const struct sched_seq *q, uint32_t n)
{
    uint32_t all = pages_for(w->s, MIN((uint64_t)q->n_kv + n, (uint64_t)q->n_max));
    uint32_t held = pages_held(w, q);
    return all > held ? all - held : 0;
}

/* To finish its prompt and decode the first token. */
static uint32_t pages_to_enter(const struct work *w, const struct sched_seq *q)
{
    return pages_missing(w, q, q->n_left + 1);
}

static bool has_ended(const struct sched_verdict *v)
{
    return v->move == SCHED_CANCEL || v->move == SCHED_EXPIRE || v->move == SCHED_REFUSE;
}

static bool is_running(const struct work *w, uint32_t i)
{
    enum sched_move m = w->d->verdicts[i].move;
    if (m == SCHED_STAY)
        return w->s->seqs[i].state == SCHED_RESIDENT;
    return m == SCHED_SWAP_IN || m == SCHED_ADMIT;
}

/* The admitted sequences, those of this decision included, are numbers 0 .. n_in_flight - 1. */
static uint32_t n_in_flight(const struct work *w)
{
    return w->s->n_active + w->d->n_admitted;
}

static uint32_t in_flight(const struct work *w, uint32_t k)
{
    return k < w->s->n_active ? k : w->d->admitted[k - w->s->n_active];
}

static int32_t priority_of(const struct sched_seq *q)
{
    return MAX(-SCHED_PRIORITY_MAX, MIN(q->priority, SCHED_PRIORITY_MAX));
}

/* The order within a tenant. Every level of priority is a fixed head start in arrivals, so that a
 * low one is passed by a bounded number of others. */
static bool goes_before(const struct sched_seq *a, const struct sched_seq *b)
{
    int64_t ahead = (int64_t)(b->arrival - a->arrival) +
                    SCHED_PRIORITY_ARRIVALS * (int64_t)(priority_of(a) - priority_of(b));
    return ahead ? ahead > 0 : a->arrival < b->arrival;
}

/* ---- who ends ---- */

static void end_some(struct work *w)
{
    const struct sched_snapshot *s = w->s;
    for (uint32_t i = 0; i < s->n_seqs; i++) {
        const struct sched_seq *q = &s->seqs[i];
        struct sched_verdict *v = &w->d->verdicts[i];
        CHECK(q->tenant < s->n_tenants && (q->state == SCHED_WAITING) == (i >= s->n_active));
        *v = (struct sched_verdict){.move = SCHED_STAY};
        if (q->cancelled)
            v->move = SCHED_CANCEL;
        else if (q->deadline_ns && s->now_ns >= q->deadline_ns)
            v->move = SCHED_EXPIRE;
        else if (q->state == SCHED_WAITING && pages_for(s, q->n_max) > s->n_pages)
            v->move = SCHED_REFUSE;
        if (v->move == SCHED_REFUSE)
            v->n_pages = pages_for(s, q->n_max);
        if (q->state != SCHED_RESIDENT)
            continue;
        if (!has_ended(v)) {
            w->n_resident++;
            continue;
        }
        w->n_free += q->n_own;
        w->leaver = true;
    }
}

/* ---- pages ---- */

static bool swap_out_last(struct work *w, uint32_t but_after)
{
    for (uint32_t i = w->s->n_active; i-- > but_after + 1;) {
        if (!is_running(w, i))
            continue;
        w->d->verdicts[i].move = SCHED_SWAP_OUT;
        w->n_free += w->s->seqs[i].n_own;
        w->n_resident--;
        w->tight = true;
        return true;
    }
    return false;
}

/* Will it want pages beyond those that it enters with? */
static bool may_grow(const struct work *w, const struct sched_seq *q)
{
    return pages_for(w->s, q->n_max) > pages_for(w->s, (uint64_t)q->n_kv + q->n_left + 1);
}

/* What a sequence may count on for its next token; the rest of a prompt is only promised. */
static void set_aside(struct work *w, uint32_t i)
{
    const struct sched_seq *q = &w->s->seqs[i];
    uint32_t next = pages_missing(w, q, 1);
    w->d->verdicts[i].n_pages = next;
    w->n_free -= next;
    w->n_promised += pages_to_enter(w, q) - next;
    w->n_growing += may_grow(w, q);
}

/* In order of admission, so that nobody who has pages set aside is swapped out. */
static void keep_running(struct work *w)
{
    for (uint32_t i = 0; i < w->s->n_active; i++) {
        if (!is_running(w, i))
            continue;
        uint32_t next = pages_missing(w, &w->s->seqs[i], 1);
        while (w->n_free < next && swap_out_last(w, i))
            ;
        w->d->verdicts[i].stalled = w->n_free < next;
        if (w->n_free >= next)
            set_aside(w, i);
    }
}

/* A newcomer must leave every running sequence that may grow a page for it, or it would soon be
 * swapped out for them; when nobody runs, it is enough that it fits. */
static bool has_room(const struct work *w, const struct sched_seq *q)
{
    uint64_t need = pages_to_enter(w, q);
    if (w->n_resident)
        need += (uint64_t)w->n_promised + w->n_growing + may_grow(w, q);
    return w->n_free >= need;
}

static void enter(struct work *w, uint32_t i, enum sched_move move)
{
    w->d->verdicts[i].move = move;
    w->n_resident++;
    set_aside(w, i);
}

static void swap_in(struct work *w)
{
    for (uint32_t i = 0; i < w->s->n_active; i++) {
        const struct sched_seq *q = &w->s->seqs[i];
        if (q->state != SCHED_SWAPPED || has_ended(&w->d->verdicts[i]))
            continue;
        w->tight = w->tight || !has_room(w, q);
        if (w->tight)
            return;
        enter(w, i, SCHED_SWAP_IN);
    }
}

/* ---- tenants ---- */

static uint64_t least_vtime(const struct work *w, bool competing)
{
    uint64_t least = UINT64_MAX;
    for (uint32_t i = 0; i < w->s->n_tenants; i++) {
        const struct sched_tenant *t = &w->d->tenants[i];
        if (competing ? t->competing : t->active)
            least = MIN(least, t->vtime);
    }
    return least;
}

static void find_head(struct work *w, uint32_t tenant)
{
    const struct sched_seq *seqs = w->s->seqs;
    uint32_t head = NOBODY;
    for (uint32_t i = w->s->n_active; i < w->s->n_seqs; i++) {
        if (w->d->verdicts[i].move != SCHED_STAY || seqs[i].tenant != tenant)
            continue;
        if (head == NOBODY || goes_before(&seqs[i], &seqs[head]))
            head = i;
    }
    w->d->tenants[tenant].head = head;
}

/* Who wants what; and who begins to compete now does so without credit for the time before. */
static void count_tenants(struct work *w)
{
    const struct sched_snapshot *s = w->s;
    struct sched_tenant *tenants = w->d->tenants;
    for (uint32_t i = 0; i < s->n_tenants; i++) {
        tenants[i] = s->tenants[i];
        tenants[i].competing = tenants[i].active = false;
        tenants[i].head = NOBODY;
        tenants[i].pending = 0;
    }
    for (uint32_t i = 0; i < s->n_seqs; i++) {
        const struct sched_seq *q = &s->seqs[i];
        struct sched_tenant *t = &tenants[q->tenant];
        if (has_ended(&w->d->verdicts[i]))
            continue;
        t->active = true;
        t->competing = t->competing || q->n_left;
        if (q->state != SCHED_WAITING)
            t->pending += q->n_left;
        else if (t->head == NOBODY || goes_before(q, &s->seqs[t->head]))
            t->head = i;
    }
    w->d->vtime = s->vtime;
    for (uint32_t i = 0; i < s->n_tenants; i++)
        if (tenants[i].competing && !s->tenants[i].competing)
            tenants[i].vtime = MAX(tenants[i].vtime, s->vtime);
    uint64_t least = least_vtime(w, true);
    if (least == UINT64_MAX)
        least = least_vtime(w, false);
    if (least != UINT64_MAX)
        w->d->vtime = MAX(w->d->vtime, least);
}

/* ---- admission ---- */

static uint32_t next_tenant(const struct work *w)
{
    const struct sched_tenant *tenants = w->d->tenants;
    const struct sched_seq *seqs = w->s->seqs;
    uint32_t best = NOBODY;
    for (uint32_t i = 0; i < w->s->n_tenants; i++) {
        if (tenants[i].head == NOBODY)
            continue;
        if (best != NOBODY) {
            uint64_t a = tenants[i].vtime + tenants[i].pending;
            uint64_t b = tenants[best].vtime + tenants[best].pending;
            if (a != b ? a > b : seqs[tenants[i].head].arrival > seqs[tenants[best].head].arrival)
                continue;
        }
        best = i;
    }
    return best;
}

static void admit(struct work *w)
{
    while (!w->tight && w->n_resident < w->s->max_seqs) {
        uint32_t tenant = next_tenant(w);
        if (tenant == NOBODY)
            return;
        struct sched_tenant *t = &w->d->tenants[tenant];
        uint32_t i = t->head;
        /* no smaller one slips past it: else it might never find room */
        if (!has_room(w, &w->s->seqs[i]))
            return;
        enter(w, i, SCHED_ADMIT);
        w->d->admitted[w->d->n_admitted++] = i;
        t->pending += w->s->seqs[i].n_left;
        find_head(w, tenant);
    }
}

/* ---- rows ---- */

static bool may_run(const struct work *w, uint32_t i)
{
    return is_running(w, i) && !w->d->verdicts[i].stalled && !w->s->seqs[i].blocked;
}

/* Returns how many rows of prompts are left. */
static uint64_t count_runnable(const struct work *w, uint32_t *n_decode, uint32_t *n_prompt)
{
    uint64_t n_left = 0;
    *n_decode = *n_prompt = 0;
    for (uint32_t k = 0; k < n_in_flight(w); k++) {
        uint32_t i = in_flight(w, k);
        if (!may_run(w, i))
            continue;
        *n_decode += w->s->seqs[i].n_left == 0;
        *n_prompt += w->s->seqs[i].n_left > 0;
        n_left += w->s->seqs[i].n_left;
    }
    return n_left;
}

static double cost_of(const struct sched_cost *c, double n_rows, double n_keys)
{
    return c->ns_per_step + n_rows * c->ns_per_row + n_keys * c->ns_per_key;
}

/* What n rows after n_kv tokens look at. */
static double keys_of(double n_kv, double n)
{
    return n * (n_kv + (n + 1) / 2);
}

static void give_rows(struct work *w, uint32_t i, uint32_t n)
{
    struct sched_decision *d = w->d;
    const struct sched_seq *q = &w->s->seqs[i];
    struct sched_verdict *v = &d->verdicts[i];
    v->n_rows += n;
    uint32_t pages = pages_missing(w, q, v->n_rows);
    if (pages > v->n_pages) {
        w->n_free -= pages - v->n_pages;
        v->n_pages = pages;
    }
    d->n_rows += n;
    d->n_decode_rows += q->n_left ? 0 : n;
    d->n_out += q->all_logits && q->n_left ? n : v->n_rows >= q->n_left;
    d->n_keys += keys_of(q->n_kv + v->n_rows - n, n);
    d->tenants[q->tenant].vtime += n;
}

static bool decodes_unserved(const struct work *w, uint32_t i)
{
    return may_run(w, i) && !w->s->seqs[i].n_left && !w->d->verdicts[i].n_rows;
}

/* One row each for `most` of them, those first that have waited longest. Sequences that ran in the
 * same step are equals, so that a pass serves many and passes are few. */
static void run_decoding(struct work *w, uint32_t most)
{
    const struct sched_snapshot *s = w->s;
    while (w->d->n_rows < most) {
        uint64_t oldest = UINT64_MAX;
        for (uint32_t i = 0; i < s->n_active; i++)
            if (decodes_unserved(w, i))
                oldest = MIN(oldest, s->seqs[i].last_run);
        if (oldest == UINT64_MAX)
            return;
        for (uint32_t i = 0; i < s->n_active && w->d->n_rows < most; i++)
            if (decodes_unserved(w, i) && s->seqs[i].last_run == oldest)
                give_rows(w, i, 1);
    }
}

static bool wants_chunk(const struct work *w, uint32_t i)
{
    const struct sched_verdict *v = &w->d->verdicts[i];
    return may_run(w, i) && !v->full && v->n_rows < w->s->seqs[i].n_left;
}

struct turn {
    uint32_t i; /* the prompt that is next, or NOBODY */
    int sign;   /* 1: first in line, -1: shortest, 0: both */
};

/* Of the tenant's prompts the first in line, or the one with the fewest tokens left among those of
 * that priority or a higher one, whichever kind has had less. */
static struct turn tenant_turn(const struct work *w, uint32_t tenant)
{
    const struct sched_seq *seqs = w->s->seqs;
    uint32_t first = NOBODY, best = NOBODY, least = UINT32_MAX;
    for (uint32_t k = 0; k < n_in_flight(w); k++) {
        uint32_t i = in_flight(w, k);
        if (wants_chunk(w, i) && seqs[i].tenant == tenant &&
            (first == NOBODY || goes_before(&seqs[i], &seqs[first])))
            first = i;
    }
    for (uint32_t k = 0; k < n_in_flight(w); k++) {
        uint32_t i = in_flight(w, k), left = seqs[i].n_left - w->d->verdicts[i].n_rows;
        if (!wants_chunk(w, i) || seqs[i].tenant != tenant || left > least ||
            priority_of(&seqs[i]) < priority_of(&seqs[first]))
            continue;
        if (left < least || goes_before(&seqs[i], &seqs[best]))
            best = i;
        least = left;
    }
    if (first == best)
        return (struct turn){first, 0};
    return w->d->tenants[tenant].lead > 0 ? (struct turn){best, -1} : (struct turn){first, 1};
}

static struct turn next_turn(const struct work *w)
{
    const struct sched_tenant *tenants = w->d->tenants;
    uint32_t tenant = NOBODY;
    for (uint32_t k = 0; k < n_in_flight(w); k++) {
        uint32_t i = in_flight(w, k), t = w->s->seqs[i].tenant;
        if (wants_chunk(w, i) && (tenant == NOBODY || tenants[t].vtime < tenants[tenant].vtime))
            tenant = t;
    }
    return tenant == NOBODY ? (struct turn){NOBODY, 0} : tenant_turn(w, tenant);
}

/* Rows after n_kv tokens that take no longer than ns: n (b + c (n_kv + (n + 1) / 2)) <= ns. */
static uint32_t rows_in(const struct sched_cost *c, double n_kv, double ns)
{
    double half = c->ns_per_key / 2, lin = c->ns_per_row + c->ns_per_key * n_kv + half;
    if (ns <= 0 || !(lin > 0))
        return ns > 0 ? UINT32_MAX : 0;
    /* the root of the quadratic, in the form that is right for half = 0 as well */
    double n = 2 * ns / (lin + sqrt(lin * lin + 4 * half * ns));
    return n < UINT32_MAX ? (uint32_t)(n + 1e-9) : UINT32_MAX;
}

/* What is left of a step for prompts. */
struct room {
    uint32_t rows;
    double ns;
};

/* How many rows of prompt i fit: a quantum at most, within pages, wanted rows and time; the step's
 * first one whatever it takes. */
static uint32_t chunk_size(const struct work *w, uint32_t i, const struct room *room)
{
    const struct sched_snapshot *s = w->s;
    const struct sched_seq *q = &s->seqs[i];
    const struct sched_verdict *v = &w->d->verdicts[i];
    uint32_t left = q->n_left - v->n_rows, n = MIN(MIN(left, room->rows), (uint32_t)QUANTUM_ROWS);
    uint32_t in_time = rows_in(&s->cost, (double)q->n_kv + v->n_rows, room->ns);
    n = MIN(n, MAX(in_time, (uint32_t)(w->d->n_rows == w->d->n_decode_rows)));
    uint64_t held = (uint64_t)pages_held(w, q) + v->n_pages + w->n_free;
    uint64_t fit = held * s->page_tokens - q->n_kv - v->n_rows;
    n = (uint32_t)MIN((uint64_t)n, fit);
    uint32_t out = s->max_out - w->d->n_out;
    if (q->all_logits)
        return MIN(n, out);
    return n == left && !out ? n - 1 : n;
}

static void run_prompts(struct work *w, struct room room)
{
    while (room.rows) {
        struct turn t = next_turn(w);
        if (t.i == NOBODY)
            return;
        uint32_t n = chunk_size(w, t.i, &room);
        if (!n) {
            w->d->verdicts[t.i].full = true;
            continue;
        }
        double keys = w->d->n_keys;
        w->d->tenants[w->s->seqs[t.i].tenant].lead += t.sign * (int32_t)n;
        give_rows(w, t.i, n);
        room.rows -= n;
        room.ns -= n * w->s->cost.ns_per_row + (w->d->n_keys - keys) * w->s->cost.ns_per_key;
    }
}

/* What prompts may have of a step while others decode. Rows far beyond the steps measured so far
 * are not believed: cost is not linear there, and the first try must not break the bound. */
static struct room room_beside_decoding(const struct sched_snapshot *s, uint32_t rows)
{
    const struct sched_cost *c = &s->cost;
    uint64_t trusted = 2 * (uint64_t)c->n_seen;
    double most = (double)s->max_step_ns;
    return (struct room){.rows = (uint32_t)MIN((uint64_t)rows, MAX(trusted, (uint64_t)PROBE_ROWS)),
                         .ns = MAX(most - N_DEVIATIONS * c->ns_noise, most / 4)};
}

static void share_rows(struct work *w)
{
    const struct sched_snapshot *s = w->s;
    uint32_t n_decode, n_prompt, most = MIN(s->max_rows, s->max_out);
    uint64_t n_left = count_runnable(w, &n_decode, &n_prompt);
    uint32_t decode_most = most;
    if (n_prompt && n_decode >= most)
        decode_most = most > 1 ? most - (most + 3) / 4 : (uint32_t)(s->step & 1);
    run_decoding(w, decode_most);
    struct room room = {.rows = s->max_rows - w->d->n_rows, .ns = INFINITY};
    if (w->d->n_rows && n_left > MANY_ROWS && s->step % ALONE_STEPS == 0)
        return; /* what decoding takes alone must stay known */
    run_prompts(w, n_decode ? room_beside_decoding(s, room.rows) : room);
}

void sched_decide(struct sched_decision *d, const struct sched_snapshot *s)
{
    CHECK(s->max_rows && s->max_out && s->page_tokens && s->n_active <= s->n_seqs);
    struct work w = {.s = s, .d = d, .n_free = s->n_free};
    d->n_admitted = d->n_rows = d->n_decode_rows = d->n_out = 0;
    d->n_keys = 0;
    end_some(&w);
    keep_running(&w);
    swap_in(&w);
    count_tenants(&w);
    admit(&w);
    share_rows(&w);
    /* what was set aside and not used is not taken */
    for (uint32_t i = 0; i < s->n_seqs; i++)
        if (!has_ended(&d->verdicts[i]))
            d->verdicts[i].n_pages =
                is_running(&w, i) ? pages_missing(&w, &s->seqs[i], d->verdicts[i].n_rows) : 0;
    d->expect_ns = d->n_rows ? cost_of(&s->cost, d->n_rows, d->n_keys) : 0;
}

/* ---- learning what steps cost ---- */

enum { N_COSTS = 3, REMEMBERED = 64 }; /* steps that count, fading */
static const double damping = 0.01;

/* Solve the equations a x = b for those of the costs that are in use; the others are nothing.
 * Gaussian elimination: a is symmetric and, with the damping, positive definite. */
static void solve(double x[N_COSTS], const double a0[N_COSTS][N_COSTS], const double b[N_COSTS],
                  const bool in_use[N_COSTS])
{
    double a[N_COSTS][N_COSTS + 1];
    for (int i = 0; i < N_COSTS; i++) {
        for (int k = 0; k < N_COSTS; k++)
            a[i][k] = in_use[i] && in_use[k] ? a0[i][k] : i == k;
        a[i][N_COSTS] = in_use[i] ? b[i] : 0;
    }
    for (int p = 0; p < N_COSTS; p++)
        for (int i = p + 1; i < N_COSTS; i++) {
            double f = a[i][p] / a[p][p];
            for (int k = p; k <= N_COSTS; k++)
                a[i][k] -= f * a[p][k];
        }
    for (int i = N_COSTS - 1; i >= 0; i--) {
        x[i] = a[i][N_COSTS];
        for (int k = i + 1; k < N_COSTS; k++)
            x[i] -= a[i][k] * x[k];
        x[i] /= a[i][i];
    }
}

/* The least squares of what is remembered, drawn a little to what the costs were: what the steps
 * cannot tell apart stays as it is. A cost that would be negative is nothing. */
static void fit(struct sched_cost *c)
{
    double a[N_COSTS][N_COSTS], b[N_COSTS], x[N_COSTS] = {0};
    const double was[N_COSTS] = {c->ns_per_step, c->ns_per_row, c->ns_per_key};
    bool in_use[N_COSTS], again = true;
    memcpy(a, c->sum_hh, sizeof a);
    for (int i = 0; i < N_COSTS; i++) {
        double d = damping * a[i][i];
        in_use[i] = d > 0;
        a[i][i] += d;
        b[i] = c->sum_ht[i] + d * was[i];
    }
    while (again) {
        again = false;
        solve(x, a, b, in_use);
        for (int i = 0; i < N_COSTS; i++)
            if (in_use[i] && !(x[i] >= 0)) {
                in_use[i] = false;
                again = true;
            }
    }
    c->ns_per_step = x[0];
    c->ns_per_row = x[1];
    c->ns_per_key = x[2];
}

void sched_cost_add(struct sched_cost *c, uint32_t n_rows, double n_keys, uint64_t ns)
{
    const double h[N_COSTS] = {1, n_rows, n_keys}, fade = 1 - 1.0 / REMEMBERED;
    double t = (double)MAX(ns, (uint64_t)1), weight = 1 / (t * t);
    if (!n_rows)
        return;
    if (c->n_seen) {
        double off = fabs(t - cost_of(c, n_rows, n_keys)), known = c->ns_noise * c->ns_noise;
        off = MIN(off, t / 4); /* one wild step says little of the others */
        c->ns_noise = sqrt(known + (off * off - known) / REMEMBERED);
    }
    for (int i = 0; i < N_COSTS; i++) {
        for (int k = 0; k < N_COSTS; k++)
            c->sum_hh[i][k] = fade * c->sum_hh[i][k] + weight * h[i] * h[k];
        c->sum_ht[i] = fade * c->sum_ht[i] + weight * h[i] * t;
    }
    fit(c);
    c->n_seen = MAX(c->n_seen, n_rows);
}
