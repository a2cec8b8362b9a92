/* backend: the small contract between the engine and a device. A backend takes weights one by one
 * and keeps them in the layout it likes, takes a plan (a flat array of ops over activation slots),
 * and runs ragged batches of it over paged KV. It knows nothing of HTTP, SQL, text or scheduling.
 *
 * Bit-for-bit rule: a row of a batch gives the same bits whatever else is in the batch, however its
 * prompt was chunked and however many threads run, on one kind of device.
 *
 * Threads: load/unload/prepare/exec_free/run/kv_* of one `struct device` are called by one thread
 * at a time, not always the same one. Several models may live on one device. */
#ifndef INGOT_BACKEND_H
#define INGOT_BACKEND_H

#include "base/base.h"

enum { KV_PAGE_TOKENS = 32 }; /* a constant of the KV layout version */

/* How keys and values are kept, chosen apart: a table in kv_type.c. A row is one token's key or
 * value of one head; the quantized ones are blocks of 32 with a float16 scale, as GGUF's of that
 * name. */
enum kv_type { KV_F16, KV_BF16, KV_F32, KV_Q8_0, KV_Q4_0, KV_TYPE_END };
enum kv_type kv_type_find(const char *name); /* "q8_0"; KV_TYPE_END: there is none */
const char *kv_type_name(enum kv_type t);
int32_t kv_type_block(enum kv_type t); /* a row is a multiple of so many values */
size_t kv_row_bytes(enum kv_type t, int32_t head_dim);

struct device_info {
    char name[128];    /* the maker's: "AMD EPYC 9B14" */
    char detail[128];  /* what else a person wants to know: "avx2 (used) scalar" */
    uint64_t free_bytes, total_bytes;
    bool usable;
    char why_not[160]; /* if not usable */
};

/* ---- weights ---- */

struct weight; /* opaque; owned by the device */

struct weight_src {
    const char *name;  /* for messages */
    uint32_t type;     /* enum gguf_dtype number of the source bytes */
    int64_t n_in;      /* row length (values); of a vector its length */
    int64_t n_out;     /* rows; 0 for a vector (norms, biases, factors), which is kept as float32 */
    const void *map;   /* the bytes, when they are in memory already, else NULL */
    /* else this: from several threads at once; fills *e when it fails */
    int (*read)(void *user, void *dst, uint64_t offset, size_t n, struct err *e);
    void *user;
};

/* ---- plans ---- */

/* A slot is a named activation: `width` floats a batch row. Slots 0.. are the plan's own numbers. */
struct plan_slot {
    const char *name; /* "x", "h", "q" ... for taps and messages */
    int32_t width;
};

enum op_kind {
    OP_EMBED,     /* out = row token_id of w (times scale, when not 0) */
    OP_NORM,      /* out = in / rms(in) * w, over groups of `group` values (0: the whole row).
                     RMSNorm: Zhang & Sennrich 2019. in may be out. */
    OP_MATMUL,    /* out = w . in (+ bias) (+ add slot, which may be out) */
    OP_ROPE,      /* rotate n_heads heads of head_dim in place (out = in): Su et al. 2021, eq. 34 */
    OP_KV_WRITE,  /* k from slot in, v from slot in2, into the layer's KV at the row's position */
    OP_ATTENTION, /* out = softmax(q k^T * scale) v, causal, grouped heads, over the row's pages: a row
                     at position p sees p - window + 1 .. p (window 0: all up to p) */
    OP_GLU,       /* out = silu(in) * in2 */
    OP_ROWS,      /* out = the rows of in that the batch wants; from here on ops run on these only */
    OP_KIND_END,
};

struct op {
    enum op_kind kind;
    int16_t layer;             /* KV layer for KV_WRITE and ATTENTION; else where it belongs */
    int16_t in, in2, out, add; /* slots; -1 where there is none. OP_ROWS: add unused */
    struct weight *w, *bias;   /* NULL where there is none */
    bool out_rows;             /* runs on the wanted rows only (after OP_ROWS) */
    union {
        struct {
            float scale;
        } embed;
        struct {
            float eps;
            int32_t group;
        } norm;
        struct {
            int32_t n_heads, head_dim, n_rot; /* n_rot <= head_dim values are rotated */
            bool halves;                      /* pairs (i, i + n_rot/2), else (2i, 2i+1) */
            float base, freq_scale;           /* theta = pos * freq_scale * base^(-2i/n_rot) */
            float mscale;                     /* factor on sin and cos; 1 as a rule */
            const float *factors;             /* n_rot/2 divisors of theta, or NULL; plan's memory */
        } rope;
        struct {
            int32_t n_heads, n_kv_heads, head_dim, window;
            float scale;
        } attention;
    };
};

struct plan {
    const struct op *ops;
    int32_t n_ops;
    const struct plan_slot *slots;
    int32_t n_slots;
    int32_t logits_slot; /* what run copies out for the wanted rows */
    int32_t n_vocab;
    int32_t n_kv_layers;
    int32_t n_kv_heads, head_dim; /* the same for every KV layer */
    int32_t max_batch;            /* rows in one run at most */
    int32_t max_out;              /* wanted rows in one run at most */
    int32_t n_ctx;                /* positions 0 .. n_ctx-1 */
    enum kv_type kv_key_type, kv_value_type; /* head_dim is a multiple of their blocks */
    int32_t n_pages; /* KV pages to be kept, for all sequences together */
};

/* ---- batches ---- */

struct batch_seq { /* consecutive rows of one sequence */
    int32_t first_row, n_rows;
    int32_t pos;           /* position of its first row; the others follow */
    const int32_t *pages;  /* page numbers: position p lives in pages[p / 32]. All that a row sees are
                              there; those wholly behind every window may be -1 */
};

struct batch {
    const int32_t *ids; /* n_rows token ids, each below n_vocab */
    int32_t n_rows;
    const struct batch_seq *seqs;
    int32_t n_seqs;
    const int32_t *want; /* n_want row numbers, ascending, whose logits come back */
    int32_t n_want;
    float *logits;       /* out: [n_want][n_vocab] */
    /* For tests: called after each op with its out slot, rows and width; NULL as a rule. Ops run
     * one by one then, with the same bits. */
    void (*tap)(void *user, const struct op *op, const float *rows, int32_t n_rows, int32_t width,
                int32_t stride);
    void *tap_user;
};

/* ---- the contract ---- */

struct device; /* an opened one: weights, KV pages and scratch live in it */
struct exec;   /* a prepared plan */

struct device_config {
    int32_t n_threads; /* 0: as many as the process may use */
};

struct backend {
    const char *name; /* "cpu" */
    /* Fill at most max entries; returns how many devices there are. Never fails. */
    int (*probe)(struct device_info *out, int max);
    int (*open)(struct device **out, int index, const struct device_config *c, struct err *e);
    void (*close)(struct device *d); /* frees all weights and plans */
    /* Bytes the weight will take on the device; for the placement, before anything is loaded. */
    uint64_t (*weight_bytes)(struct device *d, const struct weight_src *src);
    int (*load)(struct device *d, struct weight **out, const struct weight_src *src, struct err *e);
    /* Free one weight that no exec uses any more; the device stays. */
    void (*unload)(struct device *d, struct weight *w);
    /* Bytes of KV and of scratch that a plan (its ops' weights may be NULL) will need. */
    void (*plan_bytes)(struct device *d, const struct plan *p, uint64_t *kv, uint64_t *scratch);
    int (*prepare)(struct device *d, struct exec **out, const struct plan *p, struct err *e);
    void (*exec_free)(struct exec *x);
    int (*run)(struct exec *x, const struct batch *b, struct err *e);
    /* One page to and from host memory, in a layout that only this backend (and layout version)
     * reads; page_bytes long. kv_copy: page `from` over page `to`. */
    uint64_t (*kv_page_bytes)(struct exec *x);
    int (*kv_read)(struct exec *x, void *dst, int32_t page, struct err *e);
    int (*kv_write)(struct exec *x, int32_t page, const void *src, struct err *e);
    void (*kv_copy)(struct exec *x, int32_t to, int32_t from);
    /* A few words on how it computes, for `devices`, `bench` and logs: "avx2, 2 threads". */
    const char *(*describe)(struct device *d);
    /* What else the bits and the layout of a KV page depend on ("avx2"): pages of this backend may
     * be read where the answer is the same. NULL: nothing. */
    const char *(*kv_kind)(struct device *d);
};

/* All backends, best first (the order of `--backend auto`); NULL-terminated. */
extern const struct backend *const backends[];
/* The one named, or for "auto" the first with a usable device; the error says why not. */
int backend_choose(const struct backend **out, const char *name, struct err *e);

extern const struct backend backend_cpu;
/* Machine figures for `bench`: bytes per second that all threads read from memory, and int8
 * multiply-accumulates per second that the matmul kernels' instructions can reach. */
void cpu_measure(double *read_bytes_s, double *int8_macs_s, int32_t n_threads);

#endif
