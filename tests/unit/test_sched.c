/* The scheduler: its rules by hand, its bounds under hostile loads, and 10,000 random schedules on
 * a machine that checks every decision (sched_sim.h). */
#include "tests/unit/sched_sim.h"

#include <math.h>
#include <stdlib.h>

/* Keep n jobs of a tenant waiting or running. */
static void keep_busy(struct sim *m, uint32_t tenant, uint32_t n, uint32_t prompt, uint32_t gen)
{
    uint32_t have = 0;
    for (uint32_t i = 0; i < m->n_jobs; i++)
        have += m->jobs[i]->tenant == tenant;
    for (; have < n; have++) {
        struct job *j = job_new(tenant, prompt, gen);
        j->fleeting = true;
        sim_add(m, j);
    }
}

/* ---- rows ---- */

static void test_a_prompt_alone_takes_whole_steps(void)
{
    struct sim *m = sim_new(1, 4, 100, 64);
    struct job *j = job_add(m, 0, 250, 3);
    m->max_step_ns = 0;
    for (uint32_t n = 100; n <= 250; n += n == 200 ? 50 : 100) {
        sim_step(m);
        OK(j->n_kv == n && j->n_out == n / 250);
    }
    sim_step(m);
    OK(j->n_kv == 251 && j->n_out == 2);
    OK(sim_run(m) && j->n_kv == 252 && m->step == 5);
    sim_free(m);
}

static void test_prompts_beside_decoding_keep_the_time_bound(void)
{
    struct sim *m = sim_new(1, 4, 512, 128);
    struct job *a = job_add(m, 0, 10, 100), *b = job_add(m, 0, 10, 100);
    sim_step(m);
    OK(a->n_out == 1 && b->n_out == 1);
    struct job *c = job_add(m, 0, 300, 1);
    m->cost.ns_per_row = 7e6; /* 50 ms are 7 rows */
    sim_step(m);
    OK(a->n_out == 2 && b->n_out == 2 && c->n_kv == 7);
    OK(m->d.expect_ns == 1e7 + 9 * 7e6);
    m->cost.ns_per_row = 80e6; /* slower than the bound: prompts go on all the same */
    sim_step(m);
    OK(a->n_out == 3 && c->n_kv == 8);
    m->cost = (struct sched_cost){0}; /* nothing is known */
    sim_step(m);
    OK(c->n_kv == 16);
    m->cost.ns_per_row = 1; /* fast as it seems: not believed at once */
    m->cost.n_seen = 10;
    sim_step(m);
    OK(c->n_kv == 36);
    m->cost.n_seen = 500;
    sim_step(m);
    OK(c->state == JOB_DONE);
    OK(sim_run(m));
    sim_free(m);
}

static void test_a_short_prompt_does_not_wait_for_a_long_one(void)
{
    struct sim *m = sim_new(1, 8, 32, 128);
    struct job *a = job_add(m, 0, 640, 1), *shorts[6];
    sim_step(m);
    uint64_t last = 0;
    for (int i = 0; i < 6; i++)
        shorts[i] = job_add(m, 0, 20, 1);
    OK(sim_run(m));
    for (int i = 0; i < 6; i++) {
        OK(shorts[i]->end_step <= 2 + 2 * (uint64_t)(i + 1));
        last = MAX(last, shorts[i]->end_step);
    }
    OK(last < 16 && a->end_step < 30); /* 640 / 32 = 20 steps alone, 6 short ones beside it */
    sim_free(m);
}

static void test_a_long_prompt_goes_on_beside_endless_short_ones(void)
{
    struct sim *m = sim_new(1, 8, 32, 128);
    struct job *a = job_add(m, 0, 640, 1); /* 20 steps alone */
    while (a->state != JOB_DONE && m->step < 200 && sim_step(m))
        keep_busy(m, 0, 6, 20, 1);
    OK_MSG(a->end_step < 45, "%d steps", (int)a->end_step);
    sim_free(m);
}

static void test_short_prompts_of_less_priority_do_not_delay_a_long_one(void)
{
    struct sim *m = sim_new(1, 8, 32, 128);
    struct job *a = job_new(0, 640, 1);
    a->priority = 1;
    sim_add(m, a);
    while (a->state != JOB_DONE && m->step < 200 && sim_step(m))
        keep_busy(m, 0, 6, 20, 1);
    OK_MSG(a->end_step == 20, "%d steps", (int)a->end_step);
    sim_free(m);
}

static void test_a_prompt_does_not_wait_for_another_tenants(void)
{
    struct sim *m = sim_new(2, 8, 32, 128);
    struct job *a = job_add(m, 0, 640, 1);
    for (int i = 0; i < 5; i++)
        sim_step(m);
    struct job *b = job_add(m, 1, 100, 1);
    OK(sim_run(m));
    OK_MSG(b->end_step <= 5 + 9 && a->end_step <= 26, "steps %d, %d", (int)a->end_step,
           (int)b->end_step);
    sim_free(m);
}

static void test_chunks_of_one_step_do_not_take_the_same_page(void)
{
    struct sched_seq q[2] = {
        {.state = SCHED_RESIDENT, .n_kv = 8, .n_left = 24, .n_max = 40, .n_pages = 1, .n_own = 1}};
    q[1] = q[0];
    q[1].arrival = 1;
    struct sched_tenant t = {0}, next;
    struct sched_verdict v[2];
    uint32_t admitted[4];
    struct sched_snapshot s = {.seqs = q,
                               .n_seqs = 2,
                               .n_active = 2,
                               .tenants = &t,
                               .n_tenants = 1,
                               .step = 1,
                               .max_seqs = 4,
                               .max_rows = 64,
                               .max_out = 64,
                               .page_tokens = 8,
                               .n_pages = 12,
                               .n_free = 3};
    struct sched_decision d = {.verdicts = v, .tenants = &next, .admitted = admitted};
    sched_decide(&d, &s);
    OK(v[0].n_rows == 16 && v[0].n_pages == 2 && v[1].n_rows == 8 && v[1].n_pages == 1);
    q[0].blocked = true; /* has its page kept for it all the same */
    sched_decide(&d, &s);
    OK(v[0].n_rows == 0 && v[1].n_rows == 16);
}

static void test_more_decoders_than_rows_take_turns_and_leave_prompts_a_share(void)
{
    const uint32_t rows[] = {1, 2, 3, 5, 8};
    for (size_t k = 0; k < ARRAY_LEN(rows); k++) {
        struct sim *m = sim_new(1, 9, rows[k], 128);
        struct job *jobs[8];
        for (int i = 0; i < 8; i++)
            jobs[i] = job_add(m, 0, 3, 100);
        for (int i = 0; i < 60; i++)
            sim_step(m);
        struct job *prompt = job_add(m, 0, 20, 2);
        while (!prompt->first_step && sim_step(m))
            ;
        OK_MSG(prompt->first_step <= 60 + 41, "%d steps", (int)prompt->first_step - 60);
        OK(jobs[7]->n_out < 100); /* they were still at it */
        OK(sim_run(m));
        for (int i = 0; i < 8; i++) /* the machine's checks saw to the turns */
            OK(jobs[i]->state == JOB_DONE);
        sim_free(m);
    }
}

static void test_wanted_rows_stay_within_the_machines(void)
{
    struct sim *m = sim_new(1, 4, 64, 128);
    m->max_out = 3;
    struct job *a = job_add(m, 0, 20, 1);
    a->all_logits = true;
    sim_step(m);
    OK(a->n_kv == 3);
    for (int i = 0; i < 6; i++)
        job_add(m, 0, 5, 4);
    OK(sim_run(m));
    OK(a->state == JOB_DONE);
    sim_free(m);
}

/* ---- pages ---- */

static void test_the_youngest_is_swapped_out_and_the_eldest_comes_back_first(void)
{
    struct sim *m = sim_new(1, 4, 64, 12);
    struct job *j[4];
    for (int i = 0; i < 3; i++)
        j[i] = job_add(m, 0, 8, 57); /* 8 pages each in the end, 24 together */
    sim_step(m);
    OK(m->n_active == 3);
    while (!m->n_swaps && sim_step(m))
        ;
    OK(j[2]->state == JOB_SWAPPED && j[1]->state == JOB_RESIDENT && j[0]->state == JOB_RESIDENT);
    j[3] = job_add(m, 0, 4, 1); /* small enough, but nobody goes before those who are away */
    while (j[1]->state != JOB_SWAPPED && sim_step(m))
        ;
    OK(j[2]->state == JOB_SWAPPED && j[0]->state == JOB_RESIDENT && j[3]->state == JOB_WAITING);
    while (j[1]->state == JOB_SWAPPED && sim_step(m))
        ;
    OK(j[0]->state == JOB_DONE);
    OK(sim_run(m));
    OK(j[0]->end_step < j[1]->end_step && j[1]->end_step < j[2]->end_step);
    OK(j[0]->n_swaps == 0 && j[3]->admit_step > j[1]->admit_step);
    OK_MSG(m->n_swaps <= 4, "%d swaps", (int)m->n_swaps); /* no to and fro */
    for (int i = 0; i < 4; i++) {
        OK(j[i]->state == JOB_DONE && j[i]->n_out == j[i]->gen);
    }
    sim_free(m);
}

static void test_what_can_never_fit_is_refused_at_once_with_the_number(void)
{
    struct sim *m = sim_new(1, 4, 64, 10);
    struct job *busy = job_add(m, 0, 60, 20);
    sim_step(m);
    struct job *fits = job_add(m, 0, 80, 1), *not = job_add(m, 0, 80, 2);
    sim_step(m);
    OK(not ->state == JOB_REFUSED && m->verdicts[2].n_pages == 11);
    OK(fits->state == JOB_WAITING);
    OK(sim_run(m));
    OK(fits->state == JOB_DONE && busy->state == JOB_DONE);
    sim_free(m);
}

static void test_small_ones_do_not_slip_past_a_large_one_for_ever(void)
{
    struct sim *m = sim_new(2, 4, 64, 32);
    struct job *large = NULL;
    while (m->step < 2000 && (!large || large->state != JOB_DONE)) {
        keep_busy(m, 1, 6, 20, 20);
        if (m->step == 20)
            large = job_add(m, 0, 250, 7); /* the whole machine */
        if (!sim_step(m))
            break;
    }
    OK(large && large->state == JOB_DONE && large->admit_step < 100);
    sim_free(m);
}

static void test_who_comes_in_is_not_swapped_out_for_what_was_foreseen(void)
{
    /* the rest of a prompt is promised to it */
    struct sim *m = sim_new(1, 4, 8, 12);
    job_add(m, 0, 80, 1);
    job_add(m, 0, 80, 1);
    OK(sim_run(m) && m->n_swaps == 0);
    sim_free(m);
    /* a running one is about to need a page */
    m = sim_new(1, 4, 64, 4);
    job_add(m, 0, 15, 8);
    sim_step(m);
    job_add(m, 0, 15, 8);
    OK(sim_run(m) && m->n_swaps == 0);
    sim_free(m);
}

static void test_a_pool_for_every_place_fills_every_place(void)
{
    struct sim *m = sim_new(1, 2, 256, 16);
    job_add(m, 0, 60, 5);
    job_add(m, 0, 60, 5); /* 8 pages each */
    sim_step(m);
    OK(m->n_active == 2);
    OK(sim_run(m) && m->n_swaps == 0);
    sim_free(m);
}

static struct job *add_sharer(struct sim *m, uint32_t prompt, uint32_t gen)
{
    struct job *j = job_new(0, prompt, gen);
    j->group = 1;
    j->shared = 56; /* 7 pages */
    sim_add(m, j);
    return j;
}

static void test_shared_pages_cost_nothing_and_are_not_counted_as_freed(void)
{
    struct sim *m = sim_new(1, 4, 64, 16);
    struct job *a = add_sharer(m, 60, 60);
    sim_step(m);
    struct job *b = add_sharer(m, 60, 10), *c = add_sharer(m, 60, 10);
    sim_step(m);
    OK(m->n_active == 3 && b->first_step == 2 && m->d.n_rows == 1 + 4 + 4);
    OK(m->n_free == 16 - 8 - 1 - 1);
    struct job *d = job_add(m, 0, 60, 1); /* 8 pages: the one of b's is not enough */
    b->cancelled = true;
    sim_step(m);
    OK(m->n_free == 16 - 8 - 1 && d->state == JOB_WAITING);
    OK(sim_run(m));
    OK(a->state == JOB_DONE && c->state == JOB_DONE && d->state == JOB_DONE);
    sim_free(m);
}

static void test_pages_of_who_ends_are_not_both_freed_and_shared(void)
{
    struct sim *m = sim_new(1, 4, 64, 16);
    struct job *a = add_sharer(m, 60, 60);
    sim_step(m);
    struct job *b = add_sharer(m, 128, 1); /* 16 pages, 7 of them a's */
    struct job *c = job_add(m, 0, 8, 1);
    a->cancelled = true;
    sim_step(m); /* sees a's 8 pages come back, and takes b alone in */
    OK(b->admit_step == 2 && c->state == JOB_WAITING);
    OK(sim_run(m) && m->n_swaps == 0);
    sim_free(m);
}

/* ---- ends ---- */

static void test_cancel_and_deadline_take_effect_within_a_step_in_every_state(void)
{
    for (int by_deadline = 0; by_deadline < 2; by_deadline++) {
        struct sim *m = sim_new(1, 4, 24, 12);
        struct job *j[5];
        for (int i = 0; i < 3; i++)
            j[i] = job_add(m, 0, 8, 57);
        while (!m->n_swaps && sim_step(m))
            ;
        j[3] = job_add(m, 0, 60, 4);
        j[1]->cancelled = true; /* room for the prompt is made by hand */
        j[2]->cancelled = true;
        sim_step(m);
        OK(j[3]->state == JOB_RESIDENT || j[3]->state == JOB_WAITING);
        j[4] = job_add(m, 0, 80, 4);
        sim_step(m);
        OK(j[4]->state == JOB_WAITING && j[0]->state == JOB_RESIDENT);
        for (int i = 0; i < 5; i++) {
            j[i]->cancelled = j[i]->cancelled || !by_deadline;
            j[i]->deadline_ns = by_deadline ? m->now_ns + m->step_ns : 0;
        }
        sim_step(m);
        OK(m->n_jobs == 0 && m->n_free == m->n_pages && m->d.n_rows == 0);
        OK(j[0]->state == (by_deadline ? JOB_EXPIRED : JOB_CANCELLED));
        OK(j[4]->state == (by_deadline ? JOB_EXPIRED : JOB_CANCELLED));
        OK(j[2]->state == JOB_CANCELLED && j[2]->n_swaps == 1);
        sim_free(m);
    }
}

static void test_room_of_ended_ones_is_given_out_in_the_same_step(void)
{
    struct sim *m = sim_new(1, 1, 64, 8);
    struct job *a = job_add(m, 0, 60, 4), *b = job_add(m, 0, 60, 1);
    sim_step(m);
    a->cancelled = true;
    sim_step(m);
    OK(a->state == JOB_CANCELLED && b->state == JOB_DONE);
    sim_free(m);
}

/* ---- fairness ---- */

static void test_greedy_tenants_get_equal_shares(void)
{
    /* tenant 1 sends ten times as many, tenant 2 longer prompts, tenant 3 long answers */
    struct sim *m = sim_new(4, 8, 64, 128);
    for (int i = 0; i < 20000; i++) {
        keep_busy(m, 0, 6, 40, 10);
        keep_busy(m, 1, 60, 40, 10);
        keep_busy(m, 2, 6, 200, 10);
        keep_busy(m, 3, 6, 10, 50);
        if (!sim_step(m))
            break;
    }
    uint64_t least = UINT64_MAX, most = 0;
    for (int t = 0; t < 4; t++) {
        least = MIN(least, m->served[t]);
        most = MAX(most, m->served[t]);
    }
    OK_MSG(most <= least + least / 10, "rows of the tenants: %d to %d", (int)least, (int)most);
    sim_free(m);
}

static void test_free_places_are_split_among_tenants(void)
{
    struct sim *m = sim_new(2, 4, 16, 128);
    for (int i = 0; i < 20; i++)
        job_add(m, i >= 10, 100, 5);
    sim_step(m);
    uint32_t n[2] = {0};
    for (uint32_t i = 0; i < m->n_active; i++)
        n[m->jobs[i]->tenant]++;
    OK(n[0] == 2 && n[1] == 2);
    OK(sim_run(m));
    sim_free(m);
}

static void test_unused_time_is_no_credit(void)
{
    struct sim *m = sim_new(2, 4, 64, 128);
    for (int i = 0; i < 3000; i++) {
        keep_busy(m, 0, 8, 50, 10);
        if (!sim_step(m))
            break;
    }
    uint64_t before = m->served[0];
    OK(before > 10000);
    for (int i = 0; i < 400; i++) {
        keep_busy(m, 0, 8, 50, 10);
        keep_busy(m, 1, 8, 50, 10);
        if (!sim_step(m))
            break;
    }
    uint64_t a = m->served[0] - before, b = m->served[1];
    OK_MSG(b <= a + a / 10 + 300 && a <= b + b / 10 + 300, "%d and %d rows", (int)a, (int)b);
    /* nor is a long answer that goes on alone while nobody wants prompts */
    sim_free(m);
    m = sim_new(2, 2, 64, 128);
    job_add(m, 0, 10, 900);
    for (int i = 0; i < 800; i++)
        sim_step(m);
    keep_busy(m, 1, 4, 50, 10);
    sim_step(m);
    OK(m->tenants[1].vtime + 100 > m->tenants[0].vtime);
    sim_free(m);
}

static void test_a_tenant_waits_no_longer_than_the_bound(void)
{
    /* Six tenants flood the machine without end. The machine's own checks hold bound 2 at every
     * step; here the job of the quiet tenant counts the rows that all others were given. */
    for (uint32_t max_seqs = 1; max_seqs <= 4; max_seqs++) {
        struct sim *m = sim_new(7, max_seqs, 16, 32);
        for (int i = 0; i < 500; i++) {
            for (uint32_t t = 0; t < 6; t++)
                keep_busy(m, t, 4, 16 + t, 8);
            sim_step(m);
        }
        struct job *quiet = job_new(6, 20, 8);
        quiet->priority = -SCHED_PRIORITY_MAX; /* says nothing against other tenants */
        sim_add(m, quiet);
        uint64_t given = 0;
        while (quiet->state == JOB_WAITING && m->step < 5000) {
            uint64_t before = 0, after = 0;
            for (uint32_t t = 0; t < 6; t++)
                keep_busy(m, t, 4, 16 + t, 8);
            for (uint32_t t = 0; t < 6; t++)
                before += m->served[t];
            if (!sim_step(m))
                break;
            for (uint32_t t = 0; t < 6; t++)
                after += m->served[t];
            given += after - before;
        }
        OK(quiet->state != JOB_WAITING);
        OK_MSG(given <= 6 * 2 * max_seqs * m->longest, "%d rows", (int)given);
        sim_free(m);
    }
}

static void test_priority_goes_first_and_cannot_starve_its_own_tenant(void)
{
    struct sim *m = sim_new(1, 1, 64, 32);
    job_add(m, 0, 10, 5);
    sim_step(m);
    struct job *low = job_new(0, 10, 2), *mid = job_new(0, 10, 2), *high = job_new(0, 10, 2);
    low->priority = -1;
    high->priority = 1000; /* clamped */
    sim_add(m, low);
    sim_add(m, mid);
    sim_add(m, high);
    while (low->state < JOB_DONE && m->step < 10000) {
        struct job *j = job_add(m, 0, 10, 2); /* an endless stream of priority 1 */
        j->priority = 1;
        if (!sim_step(m))
            break;
    }
    OK(high->admit_step < mid->admit_step && mid->admit_step < low->admit_step);
    OK_MSG(low->state == JOB_DONE && mid->admit_step > 20, "low %d, mid %d", (int)low->admit_step,
           (int)mid->admit_step);
    sim_free(m);
}

/* ---- random schedules ---- */

static uint32_t below(uint64_t *rng, uint32_t n)
{
    return (uint32_t)(unit_rand(rng) % n);
}

static struct sim *random_machine(uint64_t *rng)
{
    struct sim *m =
        sim_new(1 + below(rng, 4), 1 + below(rng, 8), 1 + below(rng, 40), 4 + below(rng, 24));
    m->max_out = MIN(m->max_rows, 1 + below(rng, 2) * (m->max_seqs + below(rng, 8)));
    m->cost.ns_per_row = below(rng, 8) ? 1e5 * (double)(1 + below(rng, 2000)) : 0;
    m->cost.ns_per_key = below(rng, 2) ? 1e3 * (double)below(rng, 1000) : 0;
    m->cost.ns_noise = below(rng, 2) ? 1e6 * (double)below(rng, 30) : 0;
    m->cost.n_seen = below(rng, 64);
    m->max_step_ns = 1000000u * below(rng, 100);
    return m;
}

static struct job *random_job(struct sim *m, uint64_t *rng)
{
    uint32_t room = m->n_pages * SIM_PAGE_TOKENS;
    struct job *j = job_new(below(rng, m->n_tenants), 1 + below(rng, MIN(room, 100)),
                            1 + below(rng, below(rng, 2) ? 20 : 150));
    if (below(rng, 4) == 0)
        j->prompt = 1 + below(rng, 12);
    if (below(rng, 3) == 0)
        j->priority = (int32_t)below(rng, 25) - 12;
    if (below(rng, 3) == 0) {
        j->group = 1 + below(rng, 3);
        j->shared = 1 + below(rng, 80);
    }
    if (below(rng, 12) == 0)
        j->deadline_ns = m->now_ns + m->step_ns * (1 + below(rng, 100));
    j->all_logits = below(rng, 12) == 0;
    return j;
}

struct totals {
    uint64_t n_steps, n_swaps, n_ended[JOB_REFUSED + 1];
};

static bool one_schedule(uint64_t seed, struct totals *total)
{
    struct job *jobs[40];
    uint64_t rng = seed;
    struct sim *m = random_machine(&rng);
    uint32_t n = 0, n_all = 4 + below(&rng, 37), rate = 1 + below(&rng, 12);
    bool ok = true;
    while (ok && (n < n_all || m->n_jobs)) {
        while (n < n_all && (below(&rng, rate) == 0 || !m->n_jobs)) {
            jobs[n] = random_job(m, &rng);
            sim_add(m, jobs[n++]);
        }
        if (below(&rng, 16) == 0)
            jobs[below(&rng, n)]->cancelled = true;
        ok = sim_step(m) && OK(m->step < 100000);
    }
    ok = ok && OK(m->n_free == m->n_pages);
    for (uint32_t i = 0; i < n; i++) {
        ok = ok && OK(jobs[i]->state >= JOB_DONE);
        ok = ok && OK(jobs[i]->state != JOB_DONE || jobs[i]->n_out == jobs[i]->gen);
        total->n_ended[jobs[i]->state]++;
    }
    total->n_steps += m->step;
    total->n_swaps += m->n_swaps;
    sim_free(m);
    return ok;
}

static void test_ten_thousand_random_schedules_hold_every_rule(void)
{
    struct totals total = {0};
    for (uint64_t seed = 1; seed <= 10000; seed++)
        if (!OK_MSG(one_schedule(seed, &total), "schedule of seed %d", (int)seed))
            break;
    /* what was meant to happen did happen */
    for (int i = JOB_DONE; i <= JOB_REFUSED; i++)
        OK_MSG(total.n_ended[i] > 1000, "%d jobs ended in state %d", (int)total.n_ended[i], i);
    OK_MSG(total.n_swaps > 5000, "%d swaps", (int)total.n_swaps);
}

static void test_the_same_snapshot_gives_the_same_decision(void)
{
    uint64_t rng = 77;
    struct sim *m = random_machine(&rng);
    struct job *jobs[30];
    for (int i = 0; i < 30; i++) {
        jobs[i] = random_job(m, &rng);
        sim_add(m, jobs[i]);
    }
    for (int i = 0; i < 40 && m->n_jobs; i++) {
        struct sched_snapshot s = sim_snapshot(m);
        static struct sched_verdict v[2][SIM_JOBS];
        struct sched_tenant t[2][SIM_TENANTS];
        uint32_t a[2][SIM_JOBS];
        struct sched_decision d[2] = {{.verdicts = v[0], .tenants = t[0], .admitted = a[0]},
                                      {.verdicts = v[1], .tenants = t[1], .admitted = a[1]}};
        memset(v[1], 0xff, sizeof v[1]);
        memset(t[1], 0xff, sizeof t[1]);
        sched_decide(&d[0], &s);
        sched_decide(&d[1], &s);
        OK(!memcmp(v[0], v[1], s.n_seqs * sizeof v[0][0]) && d[0].n_rows == d[1].n_rows);
        OK(!memcmp(a[0], a[1], d[0].n_admitted * sizeof a[0][0]) && d[0].vtime == d[1].vtime);
        if (!sim_step(m))
            break;
    }
    sim_free(m);
}

/* ---- cost ---- */

static void test_cost_of_rows_keys_and_steps_is_learnt(void)
{
    struct sched_cost c = {0};
    uint64_t rng = 5;
    for (int i = 0; i < 400; i++) {
        uint32_t n = i % 10 ? 4 : 1 + below(&rng, 200);
        double keys = n * (double)below(&rng, 8000);
        double noise = 1 + 0.05 * unit_randn(&rng);
        sched_cost_add(&c, n, keys, (uint64_t)((30e6 + 2e6 * n + 1e3 * keys) * noise));
    }
    OK_MSG(c.ns_per_row > 1.7e6 && c.ns_per_row < 2.3e6, "%g ns a row", c.ns_per_row);
    OK_MSG(c.ns_per_step > 24e6 && c.ns_per_step < 36e6, "%g ns a step", c.ns_per_step);
    OK_MSG(c.ns_per_key > 0.8e3 && c.ns_per_key < 1.2e3, "%g ns a key", c.ns_per_key);
    OK_MSG(c.ns_noise > 1e6 && c.ns_noise < 40e6, "%g ns of noise", c.ns_noise);
    /* steps of one kind are expected rightly in the end, whatever makes them slower */
    for (int i = 0; i < 3000; i++)
        sched_cost_add(&c, 4, 4000, 58000000);
    double expect = c.ns_per_step + 4 * c.ns_per_row + 4000 * c.ns_per_key;
    OK_MSG(expect > 56e6 && expect < 60e6, "%g ns expected of 58e6", expect);
    OK_MSG(c.ns_per_row < 8e6, "%g ns a row", c.ns_per_row);
    OK_MSG(c.ns_noise < 3e6, "%g ns of noise", c.ns_noise);
    /* a clock that stands still, and one that jumped */
    for (int i = 0; i < 200; i++)
        sched_cost_add(&c, 1 + below(&rng, 200), 1e4, 0);
    OK(c.ns_per_row >= 0 && c.ns_per_step >= 0 && c.ns_per_key >= 0);
    sched_cost_add(&c, 1, 1, UINT64_MAX);
    OK(isfinite(c.ns_per_row) && isfinite(c.ns_per_step) && isfinite(c.ns_per_key));
    struct sched_cost one = {0};
    sched_cost_add(&one, 100, 5000, 5000000);
    expect = one.ns_per_step + 100 * one.ns_per_row + 5000 * one.ns_per_key;
    OK_MSG(expect > 4e6 && expect <= 5e6 && one.n_seen == 100, "%g ns of 5e6", expect);
}

/* A machine like a small one with a model of 1.2 thousand million weights, whose steps stray by a
 * twentieth: four streams decode, then a prompt of 8,000 tokens comes, where each row looks at ever
 * more keys. How far are the streams' delays beyond what they were? */
static void test_a_long_prompt_keeps_the_bound_while_its_cost_grows(void)
{
    enum { STREAMS = 4, PROMPT = 8000, ALONE = 50, MOST = 4000 };
    struct sched_seq q[STREAMS + 1] = {{.n_left = 0}};
    struct sched_verdict v[STREAMS + 1];
    struct sched_tenant t = {0}, next;
    uint32_t admitted[STREAMS + 1];
    struct sched_decision d = {.verdicts = v, .tenants = &next, .admitted = admitted};
    struct sched_snapshot s = {.seqs = q,
                               .tenants = &t,
                               .n_tenants = 1,
                               .max_seqs = STREAMS + 1,
                               .max_rows = 512,
                               .max_out = 32,
                               .page_tokens = 32,
                               .n_pages = 2000,
                               .n_free = 1000,
                               .max_step_ns = 50000000};
    static double beyond[MOST];
    uint64_t rng = 11;
    uint32_t n = 0, n_prompt_steps = 0;
    for (int i = 0; i <= STREAMS; i++)
        q[i] = (struct sched_seq){.state = SCHED_RESIDENT,
                                  .arrival = (uint64_t)i,
                                  .n_kv = 64,
                                  .n_max = 9000,
                                  .n_pages = 300,
                                  .n_own = 300};
    q[STREAMS].n_kv = 0;
    q[STREAMS].n_left = PROMPT;
    sched_cost_add(&s.cost, 256, 256 * 32, 1000000000); /* the streams' own prompts */
    for (s.step = 1; q[STREAMS].n_left && n < MOST; s.step++) {
        s.n_active = s.n_seqs = STREAMS + (s.step > ALONE);
        sched_decide(&d, &s);
        double base = 22e6, own = base;
        for (int i = 0; i < STREAMS; i++)
            own += 4e6 + 1e3 * q[i].n_kv;
        double took = base + 4e6 * d.n_rows + 1e3 * d.n_keys;
        took *= 1 + 0.05 * MAX(-2.0, MIN(3.0, unit_randn(&rng)));
        sched_cost_add(&s.cost, d.n_rows, d.n_keys, (uint64_t)took);
        for (uint32_t i = 0; i < s.n_seqs; i++) {
            OK(v[i].n_rows >= (i < STREAMS || s.step % 16));
            q[i].n_kv += v[i].n_rows;
            q[i].n_left -= i == STREAMS ? v[i].n_rows : 0;
        }
        if (s.step > ALONE) {
            beyond[n++] = took - own;
            n_prompt_steps++;
        }
    }
    OK_MSG(!q[STREAMS].n_left, "%u tokens are left", q[STREAMS].n_left);
    uint32_t over = 0;
    double sum = 0;
    for (uint32_t i = 0; i < n; i++) {
        over += beyond[i] > 50e6;
        sum += beyond[i];
    }
    OK_MSG(over * 100 <= n, "%u of %u steps beyond the bound", over, n);
    OK_MSG(sum / n > 30e6, "only %.1f ms of 50 used in %u steps", sum / n / 1e6,
           n); /* and prompts get their room */
}

int main(int argc, char **argv)
{
    static const struct unit_test tests[] = {
#define T(name) {#name, test_##name}
        T(a_prompt_alone_takes_whole_steps),
        T(prompts_beside_decoding_keep_the_time_bound),
        T(a_short_prompt_does_not_wait_for_a_long_one),
        T(a_long_prompt_goes_on_beside_endless_short_ones),
        T(short_prompts_of_less_priority_do_not_delay_a_long_one),
        T(a_prompt_does_not_wait_for_another_tenants),
        T(chunks_of_one_step_do_not_take_the_same_page),
        T(more_decoders_than_rows_take_turns_and_leave_prompts_a_share),
        T(wanted_rows_stay_within_the_machines),
        T(the_youngest_is_swapped_out_and_the_eldest_comes_back_first),
        T(what_can_never_fit_is_refused_at_once_with_the_number),
        T(small_ones_do_not_slip_past_a_large_one_for_ever),
        T(who_comes_in_is_not_swapped_out_for_what_was_foreseen),
        T(a_pool_for_every_place_fills_every_place),
        T(shared_pages_cost_nothing_and_are_not_counted_as_freed),
        T(pages_of_who_ends_are_not_both_freed_and_shared),
        T(cancel_and_deadline_take_effect_within_a_step_in_every_state),
        T(room_of_ended_ones_is_given_out_in_the_same_step),
        T(greedy_tenants_get_equal_shares),
        T(free_places_are_split_among_tenants),
        T(unused_time_is_no_credit),
        T(a_tenant_waits_no_longer_than_the_bound),
        T(priority_goes_first_and_cannot_starve_its_own_tenant),
        T(ten_thousand_random_schedules_hold_every_rule),
        T(the_same_snapshot_gives_the_same_decision),
        T(cost_of_rows_keys_and_steps_is_learnt),
        T(a_long_prompt_keeps_the_bound_while_its_cost_grows),
    };
    return unit_main(argc, argv, tests, ARRAY_LEN(tests));
}
