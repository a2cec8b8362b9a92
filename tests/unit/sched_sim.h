/* A machine for the scheduler's tests: sequences whose KV really lies in pages (a cell a token,
 * made from the token and the cell before it, so that a lost, swapped or mixed-up page shows), a
 * pool of pages with references, a swap area, tenants, a clock. It carries decisions out step by
 * step and checks each of them against the rules and bounds of engine/sched.h. It owns its jobs:
 * they stay for the test to look at until sim_free, but for fleeting ones, which are gone when they
 * end. */
#ifndef INGOT_SCHED_SIM_H
#define INGOT_SCHED_SIM_H

#include "engine/sched.h"
#include "tests/unit/unit.h"

#include <string.h>

enum {
    SIM_JOBS = 512, /* at the same time, at most */
    SIM_TENANTS = 8,
    SIM_PAGES = 128,
    SIM_TOKENS = 1024, /* of a job */
    SIM_PAGE_TOKENS = 8,
    SIM_SEQ_PAGES = SIM_TOKENS / SIM_PAGE_TOKENS,
};

enum job_state {
    JOB_WAITING,
    JOB_RESIDENT,
    JOB_SWAPPED,
    JOB_DONE,
    JOB_CANCELLED,
    JOB_EXPIRED,
    JOB_REFUSED,
};

struct job {
    /* what it is */
    uint64_t id;
    uint32_t tenant, prompt, gen; /* tokens; gen >= 1 */
    int32_t priority;
    uint32_t group, shared; /* the first `shared` tokens are the group's, when not 0 */
    uint64_t deadline_ns;
    bool cancelled, all_logits, fleeting;
    /* how it goes */
    enum job_state state;
    uint64_t arrival, last_run, ready_step;    /* ready: decodes without a stall since then */
    uint64_t admit_step, first_step, end_step; /* first: of its first token */
    uint32_t n_kv, n_out, n_swaps;
    uint32_t n_pages, pages[SIM_SEQ_PAGES];
    uint64_t out[SIM_TOKENS];  /* [n_out] generated tokens */
    uint64_t swap[SIM_TOKENS]; /* [n_kv] cells, while it is swapped out */
    struct job *next;          /* of the sim's; NULL for fleeting ones */
};

struct sim {
    /* the machine: set by the test */
    uint32_t max_seqs, max_rows, max_out, n_pages, n_tenants;
    uint64_t max_step_ns, step_ns; /* step_ns: how far the clock goes in a step */
    struct sched_cost cost;
    /* state */
    uint64_t step, now_ns, vtime, n_arrived, n_swaps;
    struct sched_tenant tenants[SIM_TENANTS];
    uint64_t served[SIM_TENANTS]; /* rows */
    struct job *jobs[SIM_JOBS];   /* in flight in order of admission, then waiting ones */
    uint32_t n_jobs, n_active;
    struct job *all; /* those that are not fleeting */
    uint32_t refs[SIM_PAGES], n_free;
    uint64_t cells[SIM_PAGES][SIM_PAGE_TOKENS];
    /* bound 2 of sched.h: how far ahead of another a tenant was as its wait began, and what
     * that other has been given since */
    bool waits[SIM_TENANTS];
    int64_t wait_ahead[SIM_TENANTS][SIM_TENANTS], wait_given[SIM_TENANTS][SIM_TENANTS];
    uint32_t longest; /* n_max of the longest job so far */
    /* the last decision, and the jobs as it saw them */
    struct sched_seq seqs[SIM_JOBS];
    struct sched_verdict verdicts[SIM_JOBS];
    uint32_t admitted[SIM_JOBS];
    struct sched_tenant next_tenants[SIM_TENANTS];
    struct sched_decision d;
};

static inline struct sim *sim_new(uint32_t n_tenants, uint32_t max_seqs, uint32_t max_rows,
                                  uint32_t n_pages)
{
    struct sim *m = mem_zalloc(sizeof *m);
    CHECK(m && n_tenants <= SIM_TENANTS && n_pages <= SIM_PAGES && max_seqs <= SIM_JOBS);
    m->n_tenants = n_tenants;
    m->max_seqs = max_seqs;
    m->max_rows = m->max_out = max_rows;
    m->n_pages = m->n_free = n_pages;
    m->max_step_ns = 50000000;
    m->step_ns = 1000000;
    m->cost = (struct sched_cost){.ns_per_row = 1e6, .ns_per_step = 1e7, .n_seen = max_rows};
    return m;
}

static inline void sim_free(struct sim *m)
{
    for (uint32_t i = 0; i < m->n_jobs; i++)
        if (m->jobs[i]->fleeting)
            mem_free(m->jobs[i]);
    while (m->all) {
        struct job *j = m->all;
        m->all = j->next;
        mem_free(j);
    }
    mem_free(m);
}

static inline struct job *job_new(uint32_t tenant, uint32_t prompt, uint32_t gen)
{
    static uint64_t id;
    struct job *j = mem_zalloc(sizeof *j);
    CHECK(j);
    j->id = ++id;
    j->tenant = tenant;
    j->prompt = prompt;
    j->gen = gen;
    return j;
}

static inline uint32_t job_max(const struct job *j)
{
    return j->prompt + j->gen - 1; /* the last token is not fed again */
}

static inline void sim_add(struct sim *m, struct job *j)
{
    CHECK(m->n_jobs < SIM_JOBS && j->prompt && j->gen && job_max(j) <= SIM_TOKENS);
    j->state = JOB_WAITING;
    j->arrival = m->n_arrived++;
    m->longest = MAX(m->longest, job_max(j));
    m->jobs[m->n_jobs++] = j;
    if (j->fleeting)
        return;
    j->next = m->all;
    m->all = j;
}

static inline struct job *job_add(struct sim *m, uint32_t tenant, uint32_t prompt, uint32_t gen)
{
    struct job *j = job_new(tenant, prompt, gen);
    sim_add(m, j);
    return j;
}

/* ---- the model: a cell follows from the token and the cell before it, a token from a cell ---- */

static inline uint64_t sim_mix(uint64_t a, uint64_t b)
{
    uint64_t state = a * 0x9e3779b97f4a7c15u ^ b;
    return unit_rand(&state);
}

static inline uint64_t job_token(const struct job *j, uint32_t pos)
{
    if (pos >= j->prompt)
        return j->out[pos - j->prompt];
    return pos < j->shared ? sim_mix(j->group, pos) : sim_mix(j->id + 1000000, pos);
}

static inline uint64_t *job_cell(struct sim *m, struct job *j, uint32_t pos)
{
    return &m->cells[j->pages[pos / SIM_PAGE_TOKENS]][pos % SIM_PAGE_TOKENS];
}

/* Its tokens are those that it would have alone, and all its cells are what they should be. */
static inline bool job_is_right(struct sim *m, struct job *j)
{
    uint64_t cell = 0;
    for (uint32_t pos = 0; pos < j->n_kv; pos++) {
        cell = sim_mix(cell, job_token(j, pos));
        if (*job_cell(m, j, pos) != cell)
            return OK_MSG(false, "job %d: wrong KV at position %u", (int)j->id, pos);
        if (pos + 1 >= j->prompt && j->out[pos + 1 - j->prompt] != sim_mix(cell, 7))
            return OK_MSG(false, "job %d: wrong token %u", (int)j->id, pos + 1 - j->prompt);
    }
    return true;
}

static inline void job_run_row(struct sim *m, struct job *j)
{
    uint32_t pos = j->n_kv;
    uint64_t before = pos ? *job_cell(m, j, pos - 1) : 0;
    uint64_t cell = sim_mix(before, job_token(j, pos));
    *job_cell(m, j, pos) = cell;
    j->n_kv++;
    if (j->n_kv < j->prompt)
        return;
    j->out[j->n_out++] = sim_mix(cell, 7);
    if (!j->first_step)
        j->first_step = j->ready_step = m->step;
}

/* ---- pages ---- */

static inline bool job_take_pages(struct sim *m, struct job *j, uint32_t n_tokens)
{
    while (j->n_pages * SIM_PAGE_TOKENS < n_tokens) {
        uint32_t page = 0;
        while (page < m->n_pages && m->refs[page])
            page++;
        if (page == m->n_pages)
            return OK_MSG(false, "job %d: no page is free", (int)j->id);
        m->refs[page] = 1;
        m->n_free--;
        j->pages[j->n_pages++] = page;
    }
    return true;
}

static inline void job_drop_pages(struct sim *m, struct job *j)
{
    while (j->n_pages)
        m->n_free += --m->refs[j->pages[--j->n_pages]] == 0;
}

/* A resident job with whole pages of the same beginning; *n is how many, one row being left. */
static inline struct job *job_donor(struct sim *m, const struct job *j, uint32_t *n)
{
    struct job *best = NULL;
    *n = 0;
    for (uint32_t i = 0; i < m->n_active; i++) {
        struct job *o = m->jobs[i];
        if (o->state != JOB_RESIDENT || o->group != j->group || o->tenant != j->tenant)
            continue;
        uint32_t same = MIN(MIN(o->shared, j->shared), MIN(MIN(o->n_kv, o->prompt), j->prompt - 1));
        if (same / SIM_PAGE_TOKENS > *n) {
            *n = same / SIM_PAGE_TOKENS;
            best = o;
        }
    }
    return best;
}

/* ---- a snapshot ---- */

static inline void sim_describe(struct sim *m, uint32_t i)
{
    struct job *j = m->jobs[i];
    struct sched_seq *q = &m->seqs[i];
    *q = (struct sched_seq){.tenant = j->tenant,
                            .priority = j->priority,
                            .arrival = j->arrival,
                            .last_run = j->last_run,
                            .deadline_ns = j->deadline_ns,
                            .n_kv = j->n_kv,
                            .n_max = job_max(j),
                            .n_pages = j->n_pages,
                            .cancelled = j->cancelled,
                            .all_logits = j->all_logits};
    q->state = j->state == JOB_RESIDENT  ? SCHED_RESIDENT
               : j->state == JOB_SWAPPED ? SCHED_SWAPPED
                                         : SCHED_WAITING;
    if (j->state == JOB_WAITING && job_donor(m, j, &q->n_pages))
        q->n_kv = q->n_pages * SIM_PAGE_TOKENS;
    q->n_left = j->prompt > q->n_kv ? j->prompt - q->n_kv : 0;
    for (uint32_t k = 0; k < j->n_pages; k++)
        q->n_own += m->refs[j->pages[k]] == 1;
}

static inline struct sched_snapshot sim_snapshot(struct sim *m)
{
    for (uint32_t i = 0; i < m->n_jobs; i++)
        sim_describe(m, i);
    return (struct sched_snapshot){.seqs = m->seqs,
                                   .n_seqs = m->n_jobs,
                                   .n_active = m->n_active,
                                   .tenants = m->tenants,
                                   .n_tenants = m->n_tenants,
                                   .vtime = m->vtime,
                                   .step = m->step,
                                   .now_ns = m->now_ns,
                                   .max_seqs = m->max_seqs,
                                   .max_rows = m->max_rows,
                                   .max_out = m->max_out,
                                   .page_tokens = SIM_PAGE_TOKENS,
                                   .n_pages = m->n_pages,
                                   .n_free = m->n_free,
                                   .max_step_ns = m->max_step_ns,
                                   .cost = m->cost};
}

/* ---- what must hold of every decision ---- */

static inline bool sim_ends(enum sched_move move)
{
    return move == SCHED_CANCEL || move == SCHED_EXPIRE || move == SCHED_REFUSE;
}

/* Moves are legal; victims are the last admitted, those who come back the first; nobody is admitted
 * while somebody is away. */
static inline void check_moves(struct sim *m)
{
    bool stays_out = false, victim = false;
    for (uint32_t i = 0; i < m->n_jobs; i++) {
        const struct job *j = m->jobs[i];
        enum sched_move move = m->verdicts[i].move;
        bool expired = j->deadline_ns && m->now_ns >= j->deadline_ns;
        OK((move == SCHED_CANCEL) == j->cancelled);
        OK((move == SCHED_EXPIRE) == (expired && !j->cancelled));
        if (move == SCHED_REFUSE) {
            OK(job_max(j) > m->n_pages * SIM_PAGE_TOKENS && j->state == JOB_WAITING);
            OK(m->verdicts[i].n_pages * SIM_PAGE_TOKENS >= job_max(j));
        }
        if (sim_ends(move))
            continue;
        OK(move != SCHED_SWAP_OUT || j->state == JOB_RESIDENT);
        OK(move != SCHED_SWAP_IN || (j->state == JOB_SWAPPED && !stays_out));
        OK(move != SCHED_ADMIT || (j->state == JOB_WAITING && !stays_out));
        OK(!(victim && move == SCHED_STAY && j->state == JOB_RESIDENT));
        victim = victim || move == SCHED_SWAP_OUT;
        stays_out =
            stays_out || move == SCHED_SWAP_OUT || (j->state == JOB_SWAPPED && move == SCHED_STAY);
    }
}

static inline int32_t job_priority(const struct job *j)
{
    return MAX(-SCHED_PRIORITY_MAX, MIN(j->priority, SCHED_PRIORITY_MAX));
}

/* Of its own tenant only those pass a waiting job that may. */
static inline void check_passing(struct sim *m)
{
    for (uint32_t k = 0; k < m->d.n_admitted; k++) {
        const struct job *y = m->jobs[m->admitted[k]];
        for (uint32_t i = m->n_active; i < m->n_jobs; i++) {
            const struct job *x = m->jobs[i];
            if (m->verdicts[i].move == SCHED_STAY && x->tenant == y->tenant)
                OK((int64_t)y->arrival <=
                   (int64_t)x->arrival +
                       SCHED_PRIORITY_ARRIVALS * (job_priority(y) - job_priority(x)));
        }
    }
}

static inline void check_rows(struct sim *m)
{
    uint32_t n = 0, n_out = 0, n_decode = 0, n_left = 0;
    double decode_keys = 0, most_keys = 0;
    bool decoding = false, moved = false;
    for (uint32_t i = 0; i < m->n_jobs; i++) {
        const struct sched_seq *q = &m->seqs[i];
        const struct sched_verdict *v = &m->verdicts[i];
        bool runs = v->move == SCHED_ADMIT || v->move == SCHED_SWAP_IN ||
                    (v->move == SCHED_STAY && q->state == SCHED_RESIDENT);
        OK(v->n_rows <= (runs && !v->stalled ? MAX(q->n_left, 1u) : 0));
        n += v->n_rows;
        n_decode += q->n_left ? 0 : v->n_rows;
        decode_keys += q->n_left || !v->n_rows ? 0 : q->n_kv + 1;
        most_keys = MAX(most_keys, q->n_kv + 1.0);
        n_out += q->all_logits && q->n_left ? v->n_rows : v->n_rows && v->n_rows >= q->n_left;
        n_left += !sim_ends(v->move);
        decoding = decoding || (runs && !v->stalled && !q->n_left);
        moved = moved || v->move == SCHED_SWAP_OUT;
    }
    OK(n == m->d.n_rows && n_out == m->d.n_out && n_decode == m->d.n_decode_rows);
    OK(n <= m->max_rows && n_out <= m->max_out);
    OK_MSG(n || moved || !n_left, "step %d does nothing for %u jobs", (int)m->step, n_left);
    const struct sched_cost *c = &m->cost;
    double alone = c->ns_per_step + n_decode * c->ns_per_row + decode_keys * c->ns_per_key;
    double row = c->ns_per_row + most_keys * c->ns_per_key;
    OK(!decoding || c->ns_per_row <= 0 ||
       m->d.expect_ns <= alone + MAX((double)m->max_step_ns, row) + 1);
}

/* Who decodes and lacks no page gets its row in time. */
static inline void check_gaps(struct sim *m)
{
    uint32_t most = MIN(m->max_rows, m->max_out), k = most > 1 ? most - (most + 3) / 4 : 1;
    uint32_t bound = ((m->max_seqs + k - 1) / k) * (most > 1 ? 1 : 2);
    for (uint32_t i = 0; i < m->n_active; i++) {
        struct job *j = m->jobs[i];
        const struct sched_verdict *v = &m->verdicts[i];
        if (j->state != JOB_RESIDENT || v->stalled || v->move != SCHED_STAY || v->n_rows ||
            m->seqs[i].n_left)
            continue;
        uint64_t since = MAX(j->last_run, j->ready_step);
        OK_MSG(m->step - since < bound, "job %d decodes and got no row for %d steps", (int)j->id,
               (int)(m->step - since));
    }
}

/* What a tenant has had before this step, lifted if it begins to compete. */
static inline int64_t tenant_vtime(const struct sim *m, uint32_t t)
{
    return (int64_t)MAX(m->tenants[t].vtime, m->tenants[t].competing ? 0 : m->vtime);
}

/* Bound 2: while tenant t waits with nothing admitted, others get no more than they may. */
static inline void check_waits(struct sim *m)
{
    int64_t f = (int64_t)m->max_seqs * m->longest;
    bool waits[SIM_TENANTS] = {0}, served[SIM_TENANTS] = {0};
    for (uint32_t i = m->n_active; i < m->n_jobs; i++) {
        waits[m->jobs[i]->tenant] |= m->verdicts[i].move == SCHED_STAY;
        served[m->jobs[i]->tenant] |= m->verdicts[i].move == SCHED_ADMIT;
    }
    for (uint32_t t = 0; t < m->n_tenants; t++) {
        bool began = waits[t] && (!m->waits[t] || served[t]);
        m->waits[t] = waits[t];
        for (uint32_t i = 0; i < m->n_tenants && began; i++) {
            m->wait_ahead[t][i] = tenant_vtime(m, t) - tenant_vtime(m, i);
            m->wait_given[t][i] = 0;
        }
        /* a job admitted in this step is in flight for the wait that begins with it */
        for (uint32_t i = 0; i < m->n_jobs && waits[t]; i++)
            m->wait_given[t][m->jobs[i]->tenant] += m->verdicts[i].n_rows;
        for (uint32_t i = 0; i < m->n_tenants && waits[t]; i++) {
            int64_t limit = MAX(m->wait_ahead[t][i] + f, 0) + f;
            OK_MSG(i == t || m->wait_given[t][i] <= limit,
                   "tenant %u waits, tenant %u was given %d rows, more than %d", t, i,
                   (int)m->wait_given[t][i], (int)limit);
        }
    }
}

/* ---- a step ---- */

static inline void job_end(struct sim *m, struct job *j, enum job_state how)
{
    j->state = how;
    j->end_step = m->step;
    job_drop_pages(m, j);
}

static inline void job_move(struct sim *m, struct job *j, enum sched_move move)
{
    if (sim_ends(move))
        job_end(m, j,
                move == SCHED_CANCEL   ? JOB_CANCELLED
                : move == SCHED_EXPIRE ? JOB_EXPIRED
                                       : JOB_REFUSED);
    if (move != SCHED_SWAP_OUT)
        return;
    for (uint32_t pos = 0; pos < j->n_kv; pos++)
        j->swap[pos] = *job_cell(m, j, pos);
    job_drop_pages(m, j);
    j->state = JOB_SWAPPED;
    j->n_swaps++;
    m->n_swaps++;
}

static inline bool job_come_in(struct sim *m, struct job *j, enum sched_move move)
{
    if (move != SCHED_SWAP_IN && move != SCHED_ADMIT)
        return true;
    bool was_swapped = j->state == JOB_SWAPPED;
    j->state = JOB_RESIDENT;
    j->ready_step = m->step;
    if (!was_swapped) {
        j->admit_step = m->step;
        return true;
    }
    if (!job_take_pages(m, j, j->n_kv))
        return false;
    for (uint32_t pos = 0; pos < j->n_kv; pos++)
        *job_cell(m, j, pos) = j->swap[pos];
    return true;
}

static inline void job_share(struct sim *m, struct job *j)
{
    uint32_t n;
    struct job *donor = job_donor(m, j, &n);
    for (uint32_t k = 0; k < n; k++) {
        m->refs[donor->pages[k]]++;
        j->pages[j->n_pages++] = donor->pages[k];
    }
    j->n_kv = n * SIM_PAGE_TOKENS;
}

static inline bool sim_carry_out(struct sim *m)
{
    for (uint32_t k = 0; k < m->d.n_admitted; k++)
        job_share(m, m->jobs[m->admitted[k]]); /* pinned before anything is freed */
    for (uint32_t i = 0; i < m->n_jobs; i++)
        job_move(m, m->jobs[i], m->verdicts[i].move);
    for (uint32_t i = 0; i < m->n_jobs; i++) {
        struct job *j = m->jobs[i];
        const struct sched_verdict *v = &m->verdicts[i];
        uint32_t before = m->n_free;
        if (!job_come_in(m, j, v->move))
            return false;
        if (v->stalled)
            j->ready_step = m->step + 1;
        if (!job_take_pages(m, j, v->n_rows ? j->n_kv + v->n_rows : 0))
            return false;
        if (!sim_ends(v->move))
            OK(before - m->n_free <= v->n_pages);
        for (uint32_t k = 0; k < v->n_rows; k++)
            job_run_row(m, j);
        m->served[j->tenant] += v->n_rows;
        if (v->n_rows)
            j->last_run = m->step;
    }
    return true;
}

/* Finished ones leave; admitted ones move behind those in flight, in the order of the decision. */
static inline void sim_reorder(struct sim *m)
{
    struct job *next[SIM_JOBS];
    uint32_t n = 0;
    for (uint32_t i = 0; i < m->n_jobs; i++)
        if (m->jobs[i]->state == JOB_RESIDENT && m->jobs[i]->n_out == m->jobs[i]->gen &&
            job_is_right(m, m->jobs[i]))
            job_end(m, m->jobs[i], JOB_DONE);
    for (uint32_t i = 0; i < m->n_active; i++)
        if (m->jobs[i]->state <= JOB_SWAPPED)
            next[n++] = m->jobs[i];
    for (uint32_t k = 0; k < m->d.n_admitted; k++)
        if (m->jobs[m->admitted[k]]->state <= JOB_SWAPPED)
            next[n++] = m->jobs[m->admitted[k]];
    uint32_t n_active = n;
    for (uint32_t i = m->n_active; i < m->n_jobs; i++)
        if (m->jobs[i]->state == JOB_WAITING)
            next[n++] = m->jobs[i];
    for (uint32_t i = 0; i < m->n_jobs; i++)
        if (m->jobs[i]->state > JOB_SWAPPED && m->jobs[i]->fleeting)
            mem_free(m->jobs[i]);
    memcpy(m->jobs, next, n * sizeof *next);
    m->n_jobs = n;
    m->n_active = n_active;
}

/* One step; false when a check failed or a decision cannot be carried out. */
static inline bool sim_step(struct sim *m)
{
    m->step++;
    m->now_ns += m->step_ns;
    struct sched_snapshot s = sim_snapshot(m);
    m->d = (struct sched_decision){
        .verdicts = m->verdicts, .tenants = m->next_tenants, .admitted = m->admitted};
    uint64_t n_alloc = mem_alloc_count();
    sched_decide(&m->d, &s);
    OK(mem_alloc_count() == n_alloc);
    check_moves(m);
    check_passing(m);
    check_rows(m);
    check_gaps(m);
    check_waits(m);
    OK(m->d.vtime >= m->vtime);
    memcpy(m->tenants, m->next_tenants, sizeof m->tenants);
    m->vtime = m->d.vtime;
    if (!sim_carry_out(m))
        return false;
    sim_reorder(m);
    OK(m->n_active <= m->max_seqs);
    return true;
}

static inline bool sim_run(struct sim *m)
{
    uint64_t limit = m->step + 1000000;
    while (m->n_jobs)
        if (!sim_step(m) || !OK(m->step < limit))
            return false;
    return OK(m->n_free == m->n_pages);
}

#endif
