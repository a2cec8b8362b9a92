/* The CPU backend's private face: packed weights, quantized activations, the kernel table with one
 * entry an operation, the thread pool.
 *
 * One lane, one row: a matrix is cut into panels of R rows (R = the ISA's float lanes: 8 or 16),
 * and inside a panel the R rows are interleaved so that one SIMD register holds the same 4 (or 1)
 * inputs of R rows. A row's sum then runs over the inputs in one fixed order in one lane, whether
 * one token or five hundred are multiplied: the same bits, at full speed.
 *
 * A panel of a quantized type is a run of units, one for each 32 or 256 inputs:
 *
 *   head:  n_head float16 vectors [R]      d, then the minimum's factor where the type has one
 *   n_sub times (one for each 32 inputs):
 *     scales: scale_bytes x R              integers: [R] for 32 inputs, [R][2] for two times 16
 *     mins:   min_bytes x R                likewise
 *     low:    low_bytes x R                4-bit: byte j of word g of lane r = code 4g+j | code
 *                                          16+4g+j << 4; 2-bit: word h holds groups 4h..4h+3 in bit
 *                                          pairs; 8-bit: word g is codes 4g..4g+3
 *     high:   high_bytes x R               bits above the low ones: 4 bytes = one bit a code (bit g
 *                                          of byte j = code 4g+j), 8 bytes = two bits, as 2-bit low
 *
 * where a "word" is 4 bytes and words of the R lanes lie side by side: [word][R][4].
 * A float panel is [n_in][R] values. */
#ifndef INGOT_CPU_INTERNAL_H
#define INGOT_CPU_INTERNAL_H

#include "backends/backend.h"
#include "gguf/gguf.h"

enum { ACT_BLOCK = 32, MAX_LANES = 16, MAX_UNIT = 256 };

enum pack_kind {
    PACK_SCALE,   /* d * (q - zero)                       Q4_0 Q5_0 */
    PACK_MIN,     /* d * q + m                            Q4_1 Q5_1 */
    PACK_SIGNED,  /* d * q, q signed                      Q8_0 */
    PACK_TABLE,   /* d * table[q]                         IQ4_NL */
    PACK_K_MIN,   /* d * sc * q - dmin * mn, per 32       Q4_K Q5_K */
    PACK_K_TABLE, /* d * sc * table[q], per 32            IQ4_XS */
    PACK_K16,     /* d * sc * (q - zero), per 16          Q6_K Q3_K */
    PACK_K16_MIN, /* d * sc * q - dmin * mn, per 16       Q2_K */
    PACK_FLOAT,   /* as it is                             F32 F16 BF16 */
};

/* A source block taken apart: what every quantized type is made of. */
struct canon {
    uint16_t head[2]; /* float16: d; m or dmin */
    int8_t scale[16]; /* per 32 or per 16 inputs */
    int8_t min[16];
    uint8_t q[MAX_UNIT]; /* codes, not yet offset; bytes of PACK_SIGNED are int8 */
};

struct pack_info { /* one row a block type */
    uint32_t type; /* enum gguf_dtype */
    enum pack_kind kind;
    uint8_t n_sub, n_head, scale_bytes, min_bytes, low_bytes, high_bytes, low_bits;
    uint8_t zero;
    void (*take)(struct canon *c, const void *block);
};
const struct pack_info *pack_info_find(uint32_t type); /* NULL: not a type of this backend */

struct weight { /* a packed matrix, or a float32 vector (n_out == 0) */
    const struct pack_info *info;
    int64_t n_in, n_out;
    int32_t lanes;      /* R */
    int64_t n_panels;   /* ceil(n_out / R) */
    size_t panel_bytes; /* multiple of 64 */
    size_t n_bytes;
    uint8_t *data;       /* mem_pages; vectors: floats, padded with zeros to 16 */
    struct weight *next; /* the device's list */
    struct weight **at;  /* what points at this one there */
};
size_t pack_panel_bytes(const struct pack_info *info, int64_t n_in, int32_t lanes);
/* Put R (or fewer: n_rows) source rows, row_bytes apart at src, into one zeroed panel. */
void pack_panel(const struct weight *w, uint8_t *panel, const uint8_t *src, size_t row_bytes,
                int32_t n_rows);
/* One row back as floats (embedding look-up). */
void pack_row(float *dst, const struct weight *w, int64_t row);
/* The codes of 32 inputs of one lane from a sub-block's low and high parts. */
void pack_codes(uint8_t q[ACT_BLOCK], const struct pack_info *info, const uint8_t *low,
                const uint8_t *high, int32_t lanes, int32_t lane);

/* Activations of one matmul input, in float and, where a quantized weight wants it, in int8 blocks
 * of 32 with one float scale: x = d * q, d = max|x| / 127. A block that holds an infinity or a NaN
 * has d = NaN, so that it shows in every row of the result. */
struct act {
    const float *x; /* [rows][x_stride] */
    int32_t x_stride;
    int8_t *q;        /* [rows][q_stride] */
    int32_t q_stride; /* bytes, n_in rounded up to 32 */
    float *d;         /* [rows][n_blocks] */
    float *s;         /* [rows][n_blocks]: d * sum of q */
    int32_t *sums;    /* [rows][n_blocks]: two int16, the sums of q over each half block */
    int32_t n_blocks; /* stride of d, s, sums */
};

struct mm { /* one tile of a matmul: panels [panel, panel_end) by rows [row, row_end) */
    const struct weight *w;
    const struct act *a;
    float *out;        /* [rows][out_stride], may be written to panel_end * R */
    const float *add;  /* [rows][add_stride] or NULL */
    const float *bias; /* padded to 16, or NULL */
    int32_t out_stride, add_stride;
    int32_t panel, panel_end, row, row_end;
};

struct attn { /* one task: n_q query rows that share a KV head, over the pages of one sequence */
    const void *k_base,
        *v_base;          /* layer's and head's K and V of page 0, laid out as kv_layout.h says */
    size_t page_stride;   /* bytes from page to page */
    const int32_t *pages; /* those wholly behind the first row's window are not read */
    enum kv_type key_type, value_type;
    int32_t head_dim, n_heads_group; /* query heads of this KV head */
    int32_t window;                  /* a row sees so many positions, its own the last; 0: all */
    float scale;
    const float *q; /* [n_rows][q_stride], first of the group's heads */
    float *out;     /* likewise */
    int32_t q_stride, out_stride;
    int32_t n_rows, pos; /* rows and the position of the first */
    float *scratch;      /* attn_scratch_floats() */
};
enum {
    ATTN_ROWS = 8,    /* rows of one task at most */
    ATTN_QUERIES = 4, /* queries that a kernel takes together at most */
};

#define ACT_TINY 1e-36f /* a block whose max|x| is not above it has q = 0: 127 / max overflows */

struct kernels {
    const char *name;
    int32_t lanes;
    void (*matmul)(const struct mm *m);
    void (*quantize)(const struct act *a, const float *x, int32_t row, int32_t n_in);
    void (*norm)(float *out, const float *in, const float *w, int32_t n, float eps);
    void (*glu)(float *out, const float *gate, const float *up, int32_t n);
    void (*attention)(const struct attn *a);
    /* One row into a head's K or V of a page, as token `at` of it. */
    void (*key_put)(void *k, const float *src, int32_t head_dim, int32_t at, enum kv_type type);
    void (*value_put)(void *v, const float *src, int32_t head_dim, int32_t at, enum kv_type type);
    /* Multiply-add int8 in registers, as fast as the matmul's instructions go; returns how many
     * multiply-adds were done in `rounds` rounds. For `ingot bench`. */
    double (*int8_peak)(int64_t rounds);
};
size_t attn_scratch_floats(int32_t head_dim, int32_t n_heads_group);
/* The first position that one at `pos` sees. */
static inline int32_t window_start(int32_t pos, int32_t window)
{
    return window && pos >= window ? pos - window + 1 : 0;
}

extern const struct kernels kernels_scalar, kernels_avx2, kernels_avx512, kernels_avx512vnni;
/* The table for INGOT_ISA, or the best this CPU has. An unknown or absent level is an error. */
int kernels_choose(const struct kernels **out, struct err *e);
bool cpu_emulates(const char *needs);
const struct kernels *kernels_at(size_t i, bool *runs_here); /* all levels; NULL at the end */

/* ---- pool: threads that share work in phases, spin briefly when there is none, then sleep ---- */

/* A phase is n_tasks independent tasks. When all are done the thread that finished last calls
 * `next`, which prepares the next phase and says how many tasks it has; 0 ends the work. What is
 * waited for is tasks, never threads: one that the system does not run just now, and that holds no
 * task, is not missed. */
struct pool_work {
    void (*task)(void *ctx, int32_t task, int32_t thread);
    int32_t (*next)(void *ctx); /* NULL: there is one phase */
    void *ctx;
    int32_t n_tasks; /* of the first phase */
};
enum { POOL_MAX_TASKS = (1 << 20) - 2048 }; /* of a phase */

struct pool;
int pool_new(struct pool **out, int32_t n_threads, struct err *e);
void pool_free(struct pool *p);
int32_t pool_threads(const struct pool *p);
/* Do the work on the calling thread (thread 0) and those of the pool; returns when it is done. */
void pool_run(struct pool *p, const struct pool_work *w);

struct device {
    const struct kernels *k;
    struct pool *pool;
    struct weight *weights; /* list of all */
    uint8_t **load_bufs;    /* [threads], for weights that are read; kept from one to the next */
    size_t load_buf_bytes;  /* of each */
    char describe[64];
};

int exec_new(struct device *d, struct exec **out, const struct plan *p, struct err *e);
void exec_free(struct exec *x);
int exec_run(struct exec *x, const struct batch *b, struct err *e);
void exec_bytes(struct device *d, const struct plan *p, uint64_t *kv, uint64_t *scratch);
uint64_t exec_page_bytes(struct exec *x);
uint8_t *exec_page(struct exec *x, int32_t page);

#endif
