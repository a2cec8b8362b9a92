/* engine, inside: what its own files share. arch.c reads a model's keys and tensors into a struct
 * model, plan.c turns that into ops, load.c puts the weights on a device, kv.c counts KV pages,
 * seq.c is one request's state and its text, schedule.c says what a step holds, engine.c is the
 * thread that steps them all. */
#ifndef INGOT_ENGINE_INTERNAL_H
#define INGOT_ENGINE_INTERNAL_H

#include "engine/engine.h"
#include "engine/sched.h"

#include <pthread.h>

/* ---- a model as data (arch.c) ---- */

/* The part a tensor plays. The first group is there once, the second once a layer. */
enum role {
    ROLE_TOKEN_EMBD,
    ROLE_OUTPUT_NORM,
    ROLE_OUTPUT,
    ROLE_ROPE_FREQS,
    ROLE_LAYER, /* the first one of a layer */
    ROLE_ATTN_NORM = ROLE_LAYER,
    ROLE_Q,
    ROLE_K,
    ROLE_V,
    ROLE_Q_BIAS,
    ROLE_K_BIAS,
    ROLE_V_BIAS,
    ROLE_Q_NORM,
    ROLE_K_NORM,
    ROLE_O,
    ROLE_O_BIAS,
    ROLE_FFN_NORM,
    ROLE_GATE,
    ROLE_UP,
    ROLE_DOWN,
    ROLE_END,
};
#define ROLE_BIT(r) (1u << (r))

/* One architecture: what tells it from the others of its shape. */
struct arch {
    const char *name;       /* general.architecture */
    bool rope_halves;       /* pairs (i, i + n_rot/2), else (2i, 2i+1) */
    uint32_t need, allowed; /* ROLE_BITs beyond what every one needs; allowed ones may be absent */
};
const struct arch *arch_find(const char *name, size_t n); /* or NULL */

struct model_tensor {
    const struct gguf_tensor *t; /* NULL: this model has none */
    struct weight *w;            /* the device's; NULL until loaded */
};

struct model { /* zeroed: an empty one */
    const struct arch *arch;
    struct hparams hp;
    float rope_mscale;            /* factor on sin and cos */
    float *rope_freqs;            /* [n_rot/2] divisors of theta, or NULL; owned */
    uint32_t window;              /* attention reaches so many tokens back; 0: all */
    uint64_t n_params;            /* weights over all tensors in use */
    uint64_t n_bytes;             /* of them in the file */
    struct model_tensor *tensors; /* [model_n_tensors()]; owned; read by model_tensor_at */
};
/* Check keys and the tensor table, fill *m. Reads no tensor data. */
int model_describe(struct model *m, const struct gguf *g, struct err *e);
void model_fini(struct model *m);
size_t model_n_tensors(const struct model *m);
bool model_tensor_is_vector(size_t i); /* of entry i of the list: a norm, a bias, factors */
/* layer is ignored for the roles that are there once. */
struct model_tensor *model_tensor_at(const struct model *m, enum role role, uint32_t layer);
/* The handle that makes logits: the output matrix, or the embedding when the two are tied. */
struct model_tensor *model_output(const struct model *m);

/* ---- plans (plan.c) ---- */

enum slot_id {               /* activation slots of every plan here */
               SLOT_X,       /* the residual stream, [n_embd] */
               SLOT_H,       /* normed, [n_embd] */
               SLOT_Q,       /* [n_heads * head_dim] */
               SLOT_K,       /* [n_kv_heads * head_dim] */
               SLOT_V,       /* [n_kv_heads * head_dim] */
               SLOT_ATT,     /* [n_heads * head_dim] */
               SLOT_ATT_OUT, /* wanted rows of SLOT_ATT */
               SLOT_X_OUT,   /* wanted rows of SLOT_X, and from there on the residual stream */
               SLOT_G,       /* [n_ff] */
               SLOT_U,       /* [n_ff] */
               SLOT_LOGITS,  /* [n_vocab] */
               SLOT_END,
};

struct limits { /* an engine's sizes, settled */
    uint32_t n_ctx, n_seqs, max_batch, max_out, queue_len, max_step_ms;
    uint32_t pages_per_seq; /* of a whole context */
    uint32_t max_held;      /* of them at once: fewer where attention has a window */
    uint32_t n_pages;       /* of all sequences together, and those of the prefix cache alone */
    uint32_t n_swap_pages;  /* host memory for sequences that are swapped out */
    uint32_t window;        /* attention reaches so many tokens back; 0: all */
    enum kv_type kv_key_type, kv_value_type;
};

/* Build the model's plan for one shard. Ops and slots live in the arena; the RoPE factors and the
 * weights stay the model's (weights may still be NULL: then only sizes can be asked of it). */
int plan_build(struct plan *p, struct arena *a, const struct model *m, const struct limits *l,
               struct err *e);

/* ---- devices that engines share (device.c) ---- */

struct shared_device;
/* The device that is open already for the same three, or a new one. From any thread. */
int shared_device_take(struct shared_device **out, const struct backend *be, int index,
                       int32_t n_threads, struct err *e);
void shared_device_drop(struct shared_device *s); /* the last one closes it; NULL is fine */
struct device *shared_device_get(const struct shared_device *s);
/* What the backend's functions of these names do, when it is the caller's turn. */
int shared_load(struct shared_device *s, struct weight **out, const struct weight_src *src,
                struct err *e);
void shared_unload(struct shared_device *s, struct weight *w);
int shared_prepare(struct shared_device *s, struct exec **out, const struct plan *p, struct err *e);
void shared_exec_free(struct shared_device *s, struct exec *x);
int shared_run(struct shared_device *s, struct exec *x, const struct batch *b, struct err *e);
int shared_kv_read(struct shared_device *s, struct exec *x, void *dst, int32_t page, struct err *e);
int shared_kv_write(struct shared_device *s, struct exec *x, int32_t page, const void *src,
                    struct err *e);
void shared_kv_copy(struct shared_device *s, struct exec *x, int32_t to, int32_t from);

/* ---- placement and loading (load.c) ---- */

struct loaded { /* one model on one device; zeroed: nothing */
    const struct backend *be;
    struct shared_device *shared;
    struct device *dev; /* shared's */
    char digest[96];    /* of the weights; set when they are there */
    struct exec *exec;
    struct model model;
    struct limits lim;
    struct plan plan;
    struct arena arena; /* the plan's */
    struct engine_placement placement;
};
/* footprint.c: the placement's host_bytes for these limits. tok and tmpl NULL: not read yet, what
 * they will take is estimated from the file. */
uint64_t footprint_host_bytes(const struct loaded *ld, const struct model_file *f,
                              const struct engine_config *c, const struct tokenizer *tok,
                              const struct template *tmpl);
uint64_t footprint_staging_bytes(const struct loaded *ld, const struct engine_config *c);

/* Open the device, check the model, settle the limits, count bytes, refuse what does not fit. */
int loaded_place(struct loaded *ld, struct model_file *f, const struct engine_config *c,
                 const struct backend *be, struct err *e);
/* Then: weights to the device, and the plan prepared. */
int loaded_fill(struct loaded *ld, struct model_file *f, const struct engine_config *c,
                struct err *e);
void loaded_fini(struct loaded *ld);
/* For another shape of `old`, whose weights stay: as loaded_place, on the same device; its weights
 * are not counted as missing. Then loaded_move takes them over and prepares the plan: `old` is
 * without exec and weights from there on, and both are to be ended with loaded_fini. */
int loaded_place_again(struct loaded *ld, const struct loaded *old, struct model_file *f,
                       const struct engine_config *c, struct err *e);
int loaded_move(struct loaded *ld, struct loaded *old, struct err *e);

/* ---- KV pages (kv.c) ---- */

struct kv_pool {     /* page numbers only; the bytes are the backend's */
    int32_t *free;   /* [n_pages] stack of free pages; owned */
    uint32_t *refs;  /* [n_pages]; owned */
    uint32_t *slots; /* [n_pages] of the references those of slots; owned */
    int32_t n_pages, n_free;
    int32_t n_held; /* by slots. The others are free, or the prefix tree gives them up when asked */
};
/* Bytes of memory that the bookkeeping will take: pool, slots and the swap area's list. */
uint64_t kv_lists_bytes(const struct limits *l);
int kv_pool_init(struct kv_pool *p, uint32_t n_pages, struct err *e);
void kv_pool_fini(struct kv_pool *p);
int32_t kv_page_take(struct kv_pool *p);             /* one reference; -1 when none is free */
void kv_page_share(struct kv_pool *p, int32_t page); /* one more reference */
void kv_page_drop(struct kv_pool *p, int32_t page);  /* the last reference frees it */

/* Host memory for pages of sequences that were swapped out. All of it is taken when the engine
 * opens; the system gives it bytes as it is used. Zeroed: there is none. */
struct kv_swap {
    uint8_t *mem;
    size_t page_bytes;
    int32_t *free; /* [n_pages] stack; owned */
    int32_t n_pages, n_free;
};
int kv_swap_init(struct kv_swap *w, uint32_t n_pages, uint64_t page_bytes, struct err *e);
void kv_swap_fini(struct kv_swap *w);
int32_t kv_swap_take(struct kv_swap *w); /* -1: it is full */
void kv_swap_drop(struct kv_swap *w, int32_t at);
uint8_t *kv_swap_page(const struct kv_swap *w, int32_t at);

enum { PREFIX_N_ROOTS = 32 };
struct prefix_elsewhere { /* a prompt's keys below other roots (prefix_roots.c) */
    struct hash128 key[PREFIX_N_ROOTS];
    int32_t n_pages[PREFIX_N_ROOTS]; /* that the key stands for; -1: the page is not there */
};

/* One timeline's KV: a slot. Without an owner it is empty. Which pages it has is prefix_cache.c's
 * matter: pages[0 .. n_tree) are shared with the prefix tree and may be with other slots, the
 * others are its own. */
struct kv_seq {
    struct seq *owner;
    int32_t *ids;    /* [n_ctx] tokens; the KV of the first n_kv is there. Owned */
    int32_t *pages;  /* [pages_per_seq]; of the first n_pages all are held but the first n_gone,
                        which are -1: the sliding window has left them. Owned */
    int32_t *parked; /* [pages_per_seq] where its pages wait in the swap area, or -1. Owned */
    int32_t n_kv, n_pages, n_gone;
    int32_t n_had;              /* the most that n_kv has been */
    int32_t n_prompt, n_cached; /* tokens; those that were found in KV */
    int32_t n_counted;          /* whole pages of the prompt that were hits or misses */
    int32_t node, n_tree;       /* where it stands in the tree, pinned; -1: it keeps out of it */
    bool looking;               /* in the swap area and the persistent tier too */
    bool swapped;               /* swapped out, or looking for what it had when it was */
    bool following;             /* another sequence is computing the same */
    int32_t n_parked, n_parked_gone; /* n_kv and n_gone when it was swapped out */
    enum prefix_miss why;            /* the next page was not there; PREFIX_MISS_END: not known */
    struct prefix_elsewhere elsewhere;
};
/* Tokens whose KV is looked for before it is computed: of a prompt all but the last, and all that
 * it had. */
static inline int32_t kv_find_end(const struct kv_seq *s)
{
    return MAX(s->n_prompt - 1, s->n_had);
}
/* kv_seq_add takes over the caller's reference; kv_seq_replace too, and drops the one that was
 * there. */
void kv_seq_add(struct kv_seq *s, struct kv_pool *p, int32_t page);
void kv_seq_replace(struct kv_seq *s, struct kv_pool *p, int32_t at, int32_t page);
void kv_seq_slide(struct kv_seq *s, struct kv_pool *p,
                  int32_t n_pages);                                  /* give back the first ones */
void kv_seq_drop(struct kv_seq *s, struct kv_pool *p);               /* and all */
int32_t kv_seq_own(const struct kv_seq *s, const struct kv_pool *p); /* pages no other slot holds */
int kv_seq_init(struct kv_seq *s, const struct limits *l, struct err *e);
void kv_seq_fini(struct kv_seq *s);

/* ---- one request (seq.c) ---- */

enum seq_state { SEQ_WAITING, SEQ_PROMPT, SEQ_DECODE };

struct waiter { /* engine_run's end of the line */
    pthread_mutex_t mu;
    pthread_cond_t cond;
    bool done;
    struct request_stats stats;
};

struct seq {
    struct request *req;
    struct waiter *waiter; /* engine_run's, or NULL: then req->on_done is called */
    enum seq_state state;
    bool ended;        /* stats.finish is set; to be reaped. The engine thread's */
    bool swapped_out;  /* admitted, but its KV is not on the device */
    uint64_t out_step; /* the step in which it was swapped out last */
    int32_t n_logits;  /* rows that on_logits has had */
    struct kv_seq *kv; /* NULL until it starts */
    struct sampler *sampler;
    struct decoder dec;
    struct buf text;    /* whole characters not given out yet: they may begin a stop string */
    size_t *stop_len;   /* [req->n_stop] */
    int32_t next;       /* SEQ_DECODE: the token to feed */
    int32_t first_want; /* this step: its first entry in the batch's want list */
    int32_t n_rows;     /* this step: its rows */
    int32_t n_want;     /* this step: its wanted rows */
    uint64_t submit_ns, start_ns, first_ns;
    uint64_t arrival, last_run; /* its number in order of submission; its last step's, 0: none */
    uint32_t tenant;            /* the schedule's entry, when it has entered */
    bool entered;
    struct request_stats stats;
    bool cancel; /* under the engine's lock; away from what the engine thread reads without it */
};
int seq_new(struct seq **out, struct request *r, struct err *e);
void seq_free(struct seq *s);
/* Take everything that the token loop will use: sampler, text buffer. */
int seq_prepare(struct seq *s, const struct engine *en, struct err *e);
void seq_end(struct seq *s, enum finish f, const struct err *why);
/* One sampled token: text, stop strings, limits; ends the sequence or leaves `next` set. */
void seq_take_token(struct seq *s, const struct engine *en, int32_t id);
/* Where the first stop string begins in n bytes at p, or -1; then *n_hold is how many bytes at the
 * end may still become one. */
ptrdiff_t stop_find(size_t *n_hold, const char *p, size_t n, const char *const *stop,
                    const size_t *stop_len, size_t n_stop);

/* ---- what a step holds (schedule.c) ---- */

struct schedule {                                /* decisions are made in its arrays; all owned */
    struct sched_seq *seqs;                      /* [n_seqs + queue_len] */
    struct sched_verdict *verdicts;              /* [n_seqs + queue_len] */
    uint32_t *admitted;                          /* [n_seqs] */
    struct sched_tenant *tenants, *next_tenants; /* [max_tenants] */
    struct hash128 *keys;                        /* [max_tenants] of their names */
    uint32_t *uses;                              /* [max_tenants] requests that are here */
    uint32_t n_tenants, max_tenants;
    uint64_t vtime;
    struct sched_cost cost; /* learnt from the steps */
    double n_keys;          /* that the decided step's rows look at */
};
int schedule_init(struct schedule *c, const struct limits *l, struct err *e);
uint64_t schedule_bytes(const struct limits *l); /* of memory that it will take */
void schedule_fini(struct schedule *c);
/* Admit, end, and fill the engine's batch with the next step's rows. None: there is nothing to run
 * just now, or an active one has ended and must be reaped first. Those that ended while they waited
 * are in `dropped` then. */
void schedule_step(struct engine *en);
void schedule_leave(struct schedule *c, const struct seq *s); /* before it is freed */

/* ---- the engine (engine.c) ---- */

struct engine {
    struct loaded ld;
    struct tokenizer *tok;
    struct template *tmpl; /* NULL: none, or it did not parse: see tmpl_err */
    struct err tmpl_err;
    struct sample_params sample; /* what the model recommends */
    struct engine_info info;
    size_t max_piece; /* longest text of one token, bytes */

    /* the engine thread's */
    struct kv_pool pool;
    struct kv_swap swap;
    struct prefix_cache *prefix; /* owned */
    struct kv_seq *kv;           /* [n_seqs] */
    struct seq **active;         /* [n_seqs] in order of admission */
    struct seq **dropped;        /* [queue_len] ended while they waited */
    uint32_t n_dropped;
    uint64_t n_swapped_out, n_swapped_in;
    struct schedule schedule;
    struct batch batch; /* its arrays below */
    int32_t *row_ids, *want;
    struct batch_seq *batch_seqs;
    struct seq **batch_owner; /* [n_seqs] whose rows batch_seqs[i] are */
    float *logits;            /* [max_out][n_vocab] */

    /* shared, under mu */
    pthread_mutex_t mu;
    pthread_cond_t wake;
    bool mu_ready, thread_ready, closing;
    struct seq **queue; /* [queue_len], oldest first */
    uint32_t n_queue, n_active;
    uint64_t n_arrived;
    struct engine_counters counters;
    pthread_t thread;
};

/* engine_open on a given backend, for tests that bring their own. */
int engine_open_on(struct engine **out, struct model_file *f, const struct engine_config *c,
                   const struct backend *be, struct err *e);
/* The same without a thread, for simulations: its steps are the caller's, who is the only one to
 * touch it. Nothing is written behind but beside decoding and by engine_close. */
int engine_open_stepped(struct engine **out, struct model_file *f, const struct engine_config *c,
                        const struct backend *be, struct err *e);
/* One turn of the engine's thread: end what was cancelled, run the next step if there is one, hand
 * out what came of both. False: the engine is closing, and all requests have ended. */
bool engine_turn(struct engine *en);
int engine_place_on(struct engine_placement *p, struct model_file *f, const struct engine_config *c,
                    const struct backend *be, struct err *e);
/* Likewise models_open (models.c). */
struct models;
struct models_config;
int models_open_on(struct models **out, const struct models_config *c, const struct backend *be,
                   struct err *e);
/* For tests: see every op's output. Set before the first request. */
void engine_set_tap(struct engine *en,
                    void (*tap)(void *user, const struct op *op, const float *rows, int32_t n_rows,
                                int32_t width, int32_t stride),
                    void *user);

/* chat.c, called while the engine opens */
int engine_read_text(struct engine *en, const struct gguf *g, struct err *e);

#endif
