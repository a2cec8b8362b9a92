/* engine: requests in, tokens out. One engine is one loaded model; its one thread owns all mutable
 * inference state. Callers exchange requests with it over a bounded queue and get events back on
 * the engine's thread. It introduces store, text and backends to each other; it knows no HTTP. */
#ifndef INGOT_ENGINE_H
#define INGOT_ENGINE_H

#include "backends/backend.h"
#include "engine/prefix.h"
#include "engine/sample.h"
#include "gguf/gguf.h"
#include "store/store.h"
#include "text/text.h"

struct engine;

struct engine_config {   /* zero gives the defaults */
    const char *backend; /* NULL: "auto" */
    int32_t n_threads;   /* 0: as many as the process may use */
    uint64_t max_bytes;  /* that it may take on the device at most; 0: what is free there */
    uint32_t n_ctx;      /* tokens of one sequence; 0: what the header states, at most 8192 */
    uint32_t n_seqs;     /* sequences that run at the same time; 0: 1 */
    /* KV pages (of KV_PAGE_TOKENS tokens) that sequences share; one whole context at least. 0: a
     * whole context for each, or as many as fit. With fewer than that, sequences that find no page
     * are swapped out and come back later: first to swap_bytes of host memory (0: what is missing,
     * at most a quarter of what is free), then to the persistent tier; what neither takes is
     * computed again. Nothing is lost. */
    uint32_t kv_pages;
    uint64_t swap_bytes;
    uint32_t max_batch;   /* rows of one step, = longest prefill chunk; 0: 512 */
    uint32_t queue_len;   /* requests that may wait; 0: 64 */
    uint32_t max_step_ms; /* prompts prolong a step so much at most while others decode; 0: 50 */
    enum kv_type kv_key_type, kv_value_type; /* how keys and values are kept; 0: KV_F16 */
    bool quiet_load;                         /* no progress calls */
    /* The prefix cache: KV of prompts and answers is found again by what it was computed from. In
     * RAM it has the pages that sequences do not need just now, and prefix_ram_bytes beside them
     * (0: a quarter of theirs, at most 512 MiB and what is free; less than a page: none). */
    uint64_t prefix_ram_bytes;
    struct prefix_store *prefix_store; /* the tier that survives; outlives the engine. NULL: none */
    bool prefix_counted; /* its own memory is in somebody else's sum: several engines share it */
    const char *tenant;  /* whose pages the requests share that name nobody; NULL: "" */
    bool share_prefix;   /* all tenants share them */
    /* Loading progress in bytes; non-zero cancels. NULL: none. Called on the opening thread. */
    store_progress progress;
    void *user;
};

struct engine_placement { /* worked out before anything is loaded */
    char device[160];
    uint64_t weight_bytes, kv_bytes, scratch_bytes; /* on the device */
    /* Host memory for all else: logits, samplers, bookkeeping, text, the open model, the persistent
     * tier. Before loading the tokenizer's part is an estimate; engine_info has what it took. */
    uint64_t host_bytes;
    uint64_t staging_bytes; /* host memory while loading, given back when that is done */
    uint64_t free_bytes;    /* on the device, before */
    enum kv_type kv_key_type, kv_value_type; /* what kv_bytes are of */
    uint32_t n_ctx, n_seqs;
    uint32_t n_pages, n_prefix_pages; /* in all; of them for the prefix cache alone */
    uint64_t swap_bytes;              /* host memory that swapping out may take */
};
/* What loading would take; ERR_MEMORY (with the numbers and what would fit) when it does not fit.
 */
int engine_place(struct engine_placement *p, struct model_file *f, const struct engine_config *c,
                 struct err *e);

/* What a person should compare with the process's resident memory while requests run; the program
 * itself (a few MiB) comes on top, and what nothing has used yet does not show there. */
uint64_t engine_placed_bytes(const struct engine_placement *p);

/* Load. The model_file's mapped pages and readers are let go of (model_file_forget), so no other
 * thread may read it meanwhile. It must outlive the engine only until this returns. */
int engine_open(struct engine **out, struct model_file *f, const struct engine_config *c,
                struct err *e);
void engine_close(struct engine *en); /* cancels what runs, joins the thread; NULL is fine */
/* Another context length, number of sequences, KV type ...: the weights stay where they are, KV
 * goes through the persistent tier. Nobody else may use the engine meanwhile; requests that run are
 * cancelled. f is the same model (ERR_CORRUPT: it has changed), c's backend and n_threads are those
 * it was opened with. When the new shape is refused or does not fit, the engine stays as it was;
 * when memory runs out after that it is closed, and *en is NULL. */
int engine_reshape(struct engine **en, struct model_file *f, const struct engine_config *c,
                   struct err *e);

struct engine_info {
    char arch[32], name[128],
        describe[64]; /* describe: the device's own words, "avx2, 2 threads" */
    uint32_t n_vocab, n_ctx, n_ctx_train, n_layers, n_embd;
    uint64_t n_params, weight_file_bytes;
    struct engine_placement placement;
    double load_seconds;
};
const struct engine_info *engine_info(const struct engine *en);
const struct tokenizer *engine_tokenizer(const struct engine *en);
/* The model's chat template; NULL when the GGUF has none. */
const struct template *engine_template(const struct engine *en);
/* Render messages (jansson array) with the model's template and tokenize them. Knows which BOS the
 * template already wrote, so that it is never doubled. */
int engine_chat_ids(struct ids *out, const struct engine *en, const struct json_t *messages,
                    const struct json_t *tools, const struct json_t *extra, struct err *e);
/* sample_defaults(), then what the GGUF recommends (general.sampling.*). */
void engine_sample_defaults(struct sample_params *p, const struct engine *en);

/* ---- requests ---- */

enum finish {
    FINISH_STOP,
    FINISH_STOP_STRING,
    FINISH_LENGTH,
    FINISH_CONTEXT,
    FINISH_CANCELLED,
    FINISH_DEADLINE,
    FINISH_ERROR
};
const char *finish_name(enum finish f); /* "stop", "length", ... */

struct request_stats {
    enum finish finish;
    uint32_t n_prompt, n_cached; /* tokens of the prompt; of them found in KV already */
    uint32_t n_generated;
    uint64_t queue_ns, prompt_ns,
        decode_ns;  /* prompt: first step to first token; decode: the rest */
    struct err err; /* with FINISH_ERROR */
};

struct request {
    const int32_t *ids; /* the prompt, n_ids >= 1; must stay until on_done */
    size_t n_ids;
    uint32_t max_tokens; /* 0: until the end or the context is full */
    struct sample_params sample;
    const char *const *stop; /* strings that end the answer; not part of the text given out */
    size_t n_stop;
    bool ignore_eog;      /* go on past end-of-generation tokens (bench) */
    bool special_text;    /* give out the spelling of control tokens */
    bool no_reuse;        /* compute every row, and leave none to the prefix cache */
    const char *tenant;   /* shares prefix pages with its like only, and the machine's time fairly
                             with others; NULL: the engine's. Stays until on_done */
    int32_t priority;     /* -8 .. 8 among its tenant's: higher first; 1 is worth 16 arrivals */
    uint64_t deadline_ns; /* of now_ns: it ends then, done or not; 0: never */
    /* Events, on the engine's thread; must be quick and must not call the engine but for
     * engine_cancel. Any may be NULL but on_done. */
    void (*on_token)(void *user, int32_t id, const char *text,
                     size_t n); /* text: whole characters */
    /* Every prompt position's logits, in order (eval): [n_vocab]; implies no_reuse. */
    void (*on_logits)(void *user, uint32_t pos, const float *logits);
    void (*on_done)(void *user,
                    const struct request_stats *s); /* the request is the caller's again */
    void *user;
    struct seq *seq; /* private to the engine; NULL when submitted */
};
/* Queue it. Refused at once: ERR_LIMIT for a prompt that does not fit the context (with both
 * numbers), ERR_FULL when the queue is full, ERR_USAGE for bad parameters or ids. */
int engine_submit(struct engine *en, struct request *r, struct err *e);
/* All of them or none: the choices of one prompt (n > 1), say. The prompt is computed once, and
 * they share its pages; the page in which they part is copied. ERR_LIMIT: more than may wait. */
int engine_submit_all(struct engine *en, struct request *const *r, size_t n, struct err *e);
/* Ask for its end; on_done comes within one step. From any thread, also after it is done. */
void engine_cancel(struct engine *en, struct request *r);
/* Submit and wait for the end; r->on_done is not called. -1 with FINISH_ERROR too. */
int engine_run(struct engine *en, struct request *r, struct request_stats *s, struct err *e);

struct engine_counters {
    uint64_t n_steps, n_rows, n_prompt_rows, n_requests, n_reused_rows;
    uint64_t step_ns, run_ns;                /* of all steps; of that, that the device computed */
    uint64_t n_swapped_out, n_swapped_in;    /* times that a sequence had to leave and came back */
    uint64_t n_back_tokens[PREFIX_TIER_END]; /* that came back with them, from where */
    uint32_t n_free_pages, n_pages, n_active, n_waiting;
    uint32_t n_held_pages, n_swapped; /* pages of running sequences; sequences swapped out now */
    struct prefix_counters prefix;
};
void engine_counters(struct engine *en, struct engine_counters *c);

/* ---- architectures ---- */

struct hparams { /* from the GGUF's keys, checked: every one in range, products do not overflow */
    uint32_t n_layers, n_embd, n_ff, n_heads, n_kv_heads, head_dim, n_vocab, n_ctx_train, n_rot;
    float norm_eps, rope_base, rope_freq_scale;
};
const char *arch_name_at(size_t i); /* the table's rows, for messages and lists; NULL at the end */

#endif
