/* Load on a language model: which requests come, when, and how each one fared. One thread (the
 * caller of load_run) plays all clients; the target's thread brings the events. The schedule is a
 * pure function of the spec and its seed. Everything is allocated by load_new. */
#ifndef INGOT_CLI_LOAD_GEN_H
#define INGOT_CLI_LOAD_GEN_H

#include "engine/engine.h"

struct load_range { /* tokens; drawn evenly, both ends included */
    uint32_t min, max;
};

struct load_spec {
    struct load_range prompt, gen;
    double rate;            /* open loop: requests a second, Poisson arrivals. 0: closed loop */
    uint32_t concurrency;   /* closed loop and warm-up: requests in flight; >= 1 */
    uint32_t max_in_flight; /* open loop: as many buffers for prompts; >= 1 */
    uint32_t n_requests;    /* 0: no bound, then duration_s is one */
    double duration_s;      /* no request is sent later than this; 0: no bound */
    uint32_t n_warmup;      /* requests of the same mix, before the clock starts */
    double share;           /* part of the requests that begin with the same n_shared tokens */
    uint32_t n_shared;      /* < prompt.min */
    uint32_t n_tenants;     /* the requests are of so many tenants in turn; 0: of none */
    uint64_t seed;
};

/* The i-th request. i >= LOAD_WARMUP: those of the warm-up, which share nothing with the measured
 * ones but the common prefix. */
struct load_item {
    uint32_t n_prompt, n_gen, n_shared; /* n_shared: 0 or the spec's */
};
#define LOAD_WARMUP (UINT64_C(1) << 32)
void load_item_at(struct load_item *out, const struct load_spec *s, uint64_t i);
/* From the arrival before it (or the start) to the i-th one's: exponential with mean 1 / rate. */
uint64_t load_gap_ns(const struct load_spec *s, uint64_t i);
/* The item's n_prompt token ids, below n_vocab. */
void load_item_ids(int32_t *ids, const struct load_spec *s, uint64_t i, uint32_t n_vocab);

/* ---- what takes the load ---- */

struct load_target {
    void *self;
    uint32_t n_vocab;
    /* As engine_submit and engine_cancel. on_done may also come before submit returns. */
    int (*submit)(void *self, struct request *r, struct err *e);
    void (*cancel)(void *self, struct request *r);
};
void load_target_engine(struct load_target *out, struct engine *en);

/* ---- a run ---- */

enum load_outcome {
    LOAD_DONE,       /* as many tokens as asked for */
    LOAD_SHORT,      /* ended early by the context's end or a stop */
    LOAD_QUEUE_FULL, /* refused: too many wait */
    LOAD_TOO_LONG,   /* refused: does not fit the context */
    LOAD_REFUSED,    /* refused for another reason */
    LOAD_FAILED,     /* ended with an error */
    LOAD_CANCELLED,  /* interrupted */
    LOAD_OUTCOMES,
};
const char *load_outcome_name(enum load_outcome o); /* "queue_full" */

struct load_record { /* times in ns from the start of the run; 0: did not come to it */
    uint64_t due, sent, first, last, done; /* due: scheduled arrival; closed loop: = sent */
    uint64_t queue_ns; /* the engine's: from submit to the first step's admission */
    uint64_t gaps_at;  /* its delays between tokens start here in the result's gaps */
    uint32_t n_gaps, n_prompt, n_gen, n_cached, n_out;
    enum load_outcome outcome;
};

struct load_result {                   /* load's memory */
    const struct load_record *records; /* [n_records], in the order of sending */
    const uint64_t *gaps_ns;           /* between two tokens of one request */
    uint64_t n_records, n_outcome[LOAD_OUTCOMES];
    double seconds; /* from the start to the last event */
    struct err why; /* of the first request that failed */
    bool no_room;   /* a run bounded by time ended early: the sample arrays are full */
    bool interrupted;
};

struct load;
/* Check the spec's sizes and take all memory. */
int load_new(struct load **out, const struct load_spec *s, const struct load_target *t,
             struct err *e);
void load_free(struct load *l); /* NULL is fine */
/* Send n_warmup requests, concurrency at a time; fails when one of them fails. */
int load_warm(struct load *l, struct err *e);
/* Play the schedule; returns when every request has ended. Ctrl-C cancels what is in flight when
 * wake_fd, an eventfd that the load owns, was given to interrupt_begin. Call once. */
int load_run(struct load *l, struct err *e);
int load_wake_fd(const struct load *l);
const struct load_result *load_result(const struct load *l);

/* ---- numbers ---- */

struct load_dist { /* of n samples; all 0 when there are none */
    uint64_t n;
    double mean_ms, p50_ms, p95_ms, p99_ms, max_ms;
};
/* Sorts the samples. Nearest rank: p is the smallest sample that p % of all do not exceed. */
void load_dist_of(struct load_dist *out, uint64_t *samples_ns, uint64_t n);

struct load_summary {               /* of the requests that ended as LOAD_DONE */
    struct load_dist first;         /* due to first token */
    struct load_dist gap;           /* between two tokens */
    struct load_dist whole;         /* due to last token */
    struct load_dist queue;         /* sent to admission */
    struct load_dist late;          /* due to sent: how far the generator itself lagged */
    uint64_t n_in, n_cached, n_out; /* tokens */
};
/* Uses the load's scratch: the records stay, the gaps are sorted away. Call once. */
void load_summarize(struct load_summary *out, struct load *l);

#endif
