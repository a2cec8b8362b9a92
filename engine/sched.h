/* sched: which sequence gets how many rows in the next step. A pure function from a snapshot (the
 * sequences, their tenants, the machine) to a decision; it holds no state, allocates nothing and
 * touches no page. Private to the engine, which takes the snapshot between two steps and carries
 * the decision out. All arrays are the caller's.
 *
 * Time is counted in rows: a row is one token of one sequence going through the model once. */
#ifndef INGOT_SCHED_H
#define INGOT_SCHED_H

#include "base/base.h"

enum {
    SCHED_PRIORITY_MAX = 8,       /* priorities are -8 .. 8, higher first; others are clamped */
    SCHED_PRIORITY_ARRIVALS = 16, /* arrivals that one level of priority is worth */
};

/* ---- the snapshot ---- */

enum sched_state {
    SCHED_WAITING,  /* not admitted yet: holds no page */
    SCHED_RESIDENT, /* admitted, its KV on the device: a prompt while n_left > 0, else decoding */
    SCHED_SWAPPED,  /* admitted, its KV elsewhere */
};

struct sched_seq {
    enum sched_state state;
    uint32_t tenant; /* index into the snapshot's tenants */
    int32_t priority;
    uint64_t arrival;     /* its number in order of arrival, unique over all tenants */
    uint64_t last_run;    /* the last step that had a row of it; 0: none */
    uint64_t deadline_ns; /* it ends when the clock is there; 0: never */
    uint32_t n_kv;    /* tokens whose KV exists; waiting: that it would take over when admitted */
    uint32_t n_left;  /* prompt tokens without KV; at least 1 while it waits */
    uint32_t n_max;   /* tokens whose KV it may ever have at once, n_kv + n_left at least */
    uint32_t n_pages; /* device pages it holds. Waiting or swapped: those that it would share with
                         resident sequences, which cost nothing to take. The caller
                         takes them before it carries out moves that would free them */
    uint32_t n_own;   /* of a resident one's: pages that nobody else holds, free when it goes */
    bool cancelled;
    bool blocked;    /* no rows in this step: it waits for something else than the scheduler */
    bool all_logits; /* every row of the prompt wants logits, not only the last */
};

/* One API key. Kept between steps; a zeroed one is new. An entry may be reused for another key once
 * it is idle and its vtime is not above the decision's. */
struct sched_tenant {
    uint64_t vtime; /* rows given, or the virtual time at which it began to compete if later */
    int32_t lead;   /* rows that its first prompts were given more than its shortest ones */
    bool competing; /* it had a prompt waiting or unfinished in the last step */
    /* sched_decide's scratch */
    bool active;      /* has an unfinished sequence */
    uint32_t head;    /* its first waiting sequence, or UINT32_MAX */
    uint64_t pending; /* prompt rows of its admitted sequences still to be run */
};

/* What steps cost on this machine, learnt from them: a step of n rows that look at m keys in all (a
 * row at position p looks at p + 1, or at those of its window) takes about
 * ns_per_step + n * ns_per_row + m * ns_per_key. Zeroed: nothing is known. */
struct sched_cost {
    double ns_per_step, ns_per_row, ns_per_key;
    double ns_noise; /* how far steps lie from that, as a rule */
    uint32_t n_seen; /* rows of the largest step so far */
    /* fading sums over the steps, each weighed by 1/t^2: of h h' and h t for h = (1, n, m) */
    double sum_hh[3][3], sum_ht[3];
};

struct sched_snapshot {
    /* [n_seqs]: first the n_active admitted ones in order of admission, then the waiting ones in
     * any order */
    const struct sched_seq *seqs;
    uint32_t n_seqs, n_active;
    const struct sched_tenant *tenants; /* [n_tenants] */
    uint32_t n_tenants;
    uint64_t vtime; /* of the last decision; 0 at first */
    uint64_t step;  /* this step's number, from 1 */
    uint64_t now_ns;
    /* the machine */
    uint32_t max_seqs;        /* admitted sequences, swapped ones included */
    uint32_t max_rows;        /* rows of a step */
    uint32_t max_out;         /* rows of a step that may want logits */
    uint32_t page_tokens;     /* tokens of one KV page */
    uint32_t n_pages, n_free; /* free: unused, or given up by a cache when asked for */
    uint32_t max_held;        /* pages that a sequence needs at once at most; 0: no such bound */
    uint64_t max_step_ns;     /* prompts may prolong a step so much while somebody decodes */
    struct sched_cost cost;
};

/* ---- the decision ---- */

enum sched_move { /* carried out in this order */
                  SCHED_STAY,
                  SCHED_CANCEL,   /* ends: it was cancelled */
                  SCHED_EXPIRE,   /* ends: its deadline has passed */
                  SCHED_REFUSE,   /* ends: it needs n_pages pages, more than the machine has */
                  SCHED_SWAP_OUT, /* its KV leaves the device */
                  SCHED_SWAP_IN,  /* its KV comes back */
                  SCHED_ADMIT,
};

struct sched_verdict {
    enum sched_move move;
    uint32_t n_rows;  /* in this step, from where its KV ends */
    uint32_t n_pages; /* to be taken for them at most, KV that comes in included. SCHED_REFUSE: what
                         it needs */
    bool stalled;     /* resident, but there is no page for its next token */
    bool full;        /* scratch: no more rows in this step */
};

struct sched_decision {
    struct sched_verdict *verdicts; /* [n_seqs], the caller's; filled */
    struct sched_tenant *tenants;   /* [n_tenants], the caller's; filled: the next snapshot's */
    uint32_t *admitted;             /* [max_seqs], the caller's; filled: whom, in order */
    uint32_t n_admitted;
    uint64_t vtime; /* the next snapshot's */
    uint32_t n_rows, n_decode_rows, n_out;
    double n_keys;    /* that the rows look at */
    double expect_ns; /* how long the step should take */
};

/* Decide one step. In short:
 *  - Cancelled, expired and impossible sequences end now; their pages count as free at once.
 *  - Every resident sequence gets a page for its next token, first admitted first; where there is
 *    none, the last admitted one is swapped out for it. Nobody is ever dropped.
 *  - Swapped ones come back in order of admission, before anybody new is admitted.
 *  - Then the tenant that has had the least is admitted first; within a tenant the order is
 *    arrival - 16 * priority. Nobody passes the first one in line.
 *  - Decoding sequences get a row each (the longest unserved first, when not all fit), prompts what
 *    is left of the rows and of max_step_ns, one at least (but for one step of 16, which tells what
 *    decoding takes alone): chunk by chunk the tenant that has had
 *    the least; half of it for its first prompt, half for the shortest of no lower priority.
 *
 * Bounds, where F = max_seqs * the largest n_max: all admitted ones together can be given no more.
 *
 * (1) Own tenant. A waiting sequence is passed only by later ones that arrived within
 * 16 * (difference of priorities) arrivals after it: by none of its priority, and by 256 at most.
 *
 * (2) Other tenants. While tenant t has a sequence waiting and none of it is admitted, any other
 * tenant i is given at most max(0, v_t + F - v_i) + F rows, where v are the vtimes when the wait
 * began (the decision's vtime for v_i, if i came later). Proof: i is admitted only while v_i +
 * pending_i <= v_t + pending_t. The right side grows only by what t's admitted ones are given in
 * decoding, which with pending_t is F at most; so i is admitted only while v_i <= v_t + F, and what
 * it then has admitted takes it F further at most.
 *
 * (3) Progress. A step gives a row to somebody, or frees pages for the next one to do so, unless
 * all are blocked: the first admitted one can take every other's pages, and alone it fits. So the
 * rows of (2) are a bound in steps as well.
 *
 * (4) Delay. While somebody decodes a step takes at most max(max_step_ns, one row) longer than its
 * decoding rows alone would, by the costs as learnt; it is planned to take less by as much as steps
 * are known to stray. A decoding sequence waits for a page only when
 * its own is missing, and for others that decode ceil(n / k) steps, where k rows of a step are for
 * them: all, but when they fill a step and prompts wait too all but a quarter. */
void sched_decide(struct sched_decision *d, const struct sched_snapshot *s);

/* A step of n_rows that looked at n_keys took ns: learn from it. Fading least squares of relative
 * errors, damped towards what was known (Levenberg 1944), so that steps of one kind do not unlearn
 * what others have taught. */
void sched_cost_add(struct sched_cost *c, uint32_t n_rows, double n_keys, uint64_t ns);

#endif
