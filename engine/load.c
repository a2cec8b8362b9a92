/* Placement and loading: settles the engine's sizes, counts what weights, KV and scratch will take
 * on the device before anything is loaded, refuses what does not fit (with the numbers and what
 * would), then hands the weights to the backend one by one. Owns the device and what is on it. */
#include "engine/engine_internal.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

enum {
    DEFAULT_CTX = 8192,
    DEFAULT_BATCH = 512,
    DEFAULT_QUEUE = 64,
    DEFAULT_STEP_MS = 50,
    MIN_OUT = 32, /* wanted rows of one step, when fewer sequences ask: `eval` wants every row */
    MAX_SEQS = 4096,
    MAX_BATCH = 1 << 16,
    MAX_QUEUE = 1 << 16,
    PREFIX_SHARE = 4,         /* the prefix cache has one page for so many of the sequences' */
    PREFIX_BYTES = 512 << 20, /* and at most so many bytes, unless told */
};

static int check_config(const struct engine_config *c, struct err *e)
{
    if (c->n_seqs > MAX_SEQS)
        return err_set(e, ERR_USAGE, "%u sequences at a time are too many, at most %d", c->n_seqs,
                       MAX_SEQS);
    if (c->max_batch > MAX_BATCH)
        return err_set(e, ERR_USAGE, "a batch of %u rows is too large, at most %d", c->max_batch,
                       MAX_BATCH);
    if (c->queue_len > MAX_QUEUE)
        return err_set(e, ERR_USAGE, "a queue of %u requests is too long, at most %d", c->queue_len,
                       MAX_QUEUE);
    if ((unsigned)c->kv_key_type >= KV_TYPE_END || (unsigned)c->kv_value_type >= KV_TYPE_END)
        return err_set(e, ERR_USAGE, "unknown KV type number %d or %d", (int)c->kv_key_type,
                       (int)c->kv_value_type);
    if (c->n_threads < 0)
        return err_set(e, ERR_USAGE, "the number of threads cannot be %d", c->n_threads);
    return 0;
}

static int settle_ctx(struct limits *l, const struct model *m, const struct engine_config *c,
                      struct err *e)
{
    uint32_t most = m->hp.n_ctx_train;
    l->n_ctx = c->n_ctx ? c->n_ctx : MIN(most, (uint32_t)DEFAULT_CTX);
    if (l->n_ctx <= most)
        return 0;
    return err_set(e, ERR_LIMIT,
                   "a context of %u is more than the %u tokens that the model states "
                   "(%s.context_length); use --ctx %u or less",
                   l->n_ctx, most, m->arch->name, most);
}

/* A quantized type keeps whole blocks of a head. */
static int settle_kv_types(struct limits *l, const struct model *m, const struct engine_config *c,
                           struct err *e)
{
    const enum kv_type types[] = {c->kv_key_type, c->kv_value_type};
    l->kv_key_type = c->kv_key_type;
    l->kv_value_type = c->kv_value_type;
    for (int i = 0; i < 2; i++)
        if (m->hp.head_dim % (uint32_t)kv_type_block(types[i]))
            return err_set(e, ERR_UNSUPPORTED,
                           "KV type %s keeps blocks of %d values, but this model's heads have %u; "
                           "for its %s use f16, bf16 or f32",
                           kv_type_name(types[i]), kv_type_block(types[i]), m->hp.head_dim,
                           i ? "values" : "keys");
    return 0;
}

static uint32_t pages_for(uint32_t n_tokens)
{
    return n_tokens / KV_PAGE_TOKENS + (n_tokens % KV_PAGE_TOKENS != 0);
}

static int settle_limits(struct limits *l, const struct model *m, const struct engine_config *c,
                         struct err *e)
{
    if (check_config(c, e) || settle_ctx(l, m, c, e) || settle_kv_types(l, m, c, e))
        return -1;
    l->n_seqs = c->n_seqs ? c->n_seqs : 1;
    l->max_batch = c->max_batch ? c->max_batch : DEFAULT_BATCH;
    l->max_out = MIN(l->max_batch, MAX(l->n_seqs, (uint32_t)MIN_OUT));
    l->queue_len = c->queue_len ? c->queue_len : DEFAULT_QUEUE;
    l->max_step_ms = c->max_step_ms ? c->max_step_ms : DEFAULT_STEP_MS;
    l->window = m->window < l->n_ctx ? m->window : 0;
    l->pages_per_seq = pages_for(l->n_ctx);
    l->max_held = l->pages_per_seq;
    if (l->window) /* and a page at both ends that is not used whole */
        l->max_held = MIN(l->max_held, pages_for(l->window) + pages_for(l->max_batch) + 2);
    if (mul_over(l->max_held, l->n_seqs, &l->n_pages) || l->n_pages > INT32_MAX)
        return err_set(e, ERR_LIMIT, "%u sequences of %u tokens are too many; use less --ctx",
                       l->n_seqs, l->n_ctx);
    if (c->kv_pages && c->kv_pages < l->max_held)
        return err_set(e, ERR_LIMIT,
                       "%u KV pages of %d tokens are less than one sequence may need, %u; use more "
                       "pages, or a smaller context",
                       c->kv_pages, KV_PAGE_TOKENS, l->max_held);
    if (c->kv_pages)
        l->n_pages = MIN(l->n_pages, c->kv_pages);
    return 0;
}

/* ---- weights ---- */

struct tensor_reader {
    struct model_file *f;
    const struct gguf_tensor *t;
};

static int read_tensor(void *user, void *dst, uint64_t offset, size_t n, struct err *e)
{
    const struct tensor_reader *r = user;
    return model_file_read(r->f, r->t, dst, offset, n, e);
}

static struct weight_src weight_source(struct tensor_reader *r, bool vector)
{
    const struct gguf_tensor *t = r->t;
    return (struct weight_src){
        .name = t->name,
        .type = t->type,
        .n_in = (int64_t)t->ne[0],
        .n_out = vector ? 0 : (int64_t)t->ne[1],
        .map = model_file_map(r->f, t),
        .read = read_tensor,
        .user = r,
    };
}

/* The factors are part of the plan, not a weight: there is no op that could read them. */
static int read_rope_freqs(struct model *m, struct model_file *f, struct err *e)
{
    const struct gguf_tensor *t = model_tensor_at(m, ROLE_ROPE_FREQS, 0)->t;
    if (!t)
        return 0;
    size_t n = m->hp.n_rot / 2;
    void *raw = mem_alloc(t->n_bytes);
    m->rope_freqs = mem_array(n, sizeof *m->rope_freqs);
    int rc = -1;
    if (!raw || !m->rope_freqs) {
        err_set(e, ERR_MEMORY, "out of memory for tensor %s", t->name);
        goto out;
    }
    if (model_file_read(f, t, raw, 0, t->n_bytes, e))
        goto out;
    gguf_dtype_find(t->type)->to_f32(m->rope_freqs, raw, n);
    for (size_t i = 0; i < n; i++) {
        if (isfinite(m->rope_freqs[i]) && m->rope_freqs[i] > 0)
            continue;
        err_set(e, ERR_CORRUPT, "tensor %s: factor %zu is %g; it must be finite and above 0",
                t->name, i, (double)m->rope_freqs[i]);
        goto out;
    }
    rc = 0;
out:
    mem_free(raw);
    return rc;
}

static uint64_t count_weight_bytes(const struct loaded *ld, struct model_file *f)
{
    uint64_t sum = 0;
    size_t n = model_n_tensors(&ld->model);
    for (size_t i = 0; i < n; i++) {
        struct tensor_reader r = {f, ld->model.tensors[i].t};
        if (!r.t || i == ROLE_ROPE_FREQS)
            continue;
        struct weight_src src = weight_source(&r, model_tensor_is_vector(i));
        if (add_over(sum, ld->be->weight_bytes(ld->dev, &src), &sum))
            return UINT64_MAX;
    }
    return sum;
}

static int load_weights(struct loaded *ld, struct model_file *f, const struct engine_config *c,
                        struct err *e)
{
    size_t n = model_n_tensors(&ld->model);
    uint64_t done = 0;
    for (size_t i = 0; i < n; i++) {
        struct model_tensor *mt = &ld->model.tensors[i];
        struct tensor_reader r = {f, mt->t};
        if (!r.t)
            continue;
        struct weight_src src = weight_source(&r, model_tensor_is_vector(i));
        if (i != ROLE_ROPE_FREQS && shared_load(ld->shared, &mt->w, &src, e))
            return -1;
        done += r.t->n_bytes;
        if (c->progress && !c->quiet_load && c->progress(c->user, done, ld->model.n_bytes))
            return err_set(e, ERR_CANCELLED, "loading was cancelled");
    }
    return 0;
}

/* ---- placement ---- */

static const char *human(char out[32], uint64_t bytes)
{
    if (bytes >= (1u << 30))
        snprintf(out, 32, "%.2f GiB", (double)bytes / (1u << 30));
    else
        snprintf(out, 32, "%.1f MiB", (double)bytes / (1u << 20));
    return out;
}

static uint64_t bytes_needed(const struct engine_placement *p)
{
    uint64_t all = engine_placed_bytes(p), rest = p->staging_bytes;
    /* while the weights are loaded nothing of the host's part is used yet */
    rest -= MIN(rest, p->host_bytes);
    return add_over(all, rest, &all) ? UINT64_MAX : all;
}

/* The context whose growing part is what is free beside the fixed one, in whole pages. */
static uint64_t context_in(const struct engine_placement *p, uint64_t growing, uint64_t fixed)
{
    if (fixed >= p->free_bytes || !growing)
        return 0;
    double part = (double)(p->free_bytes - fixed) / (double)growing;
    return (uint64_t)(MIN(part, 1.0) * p->n_ctx / KV_PAGE_TOKENS) * KV_PAGE_TOKENS;
}

/* What would fit: KV grows with the context, weights and scratch stay. The host's part stays where
 * it is small, and grows too where it is large. */
static void suggest(char *out, size_t n, const struct engine_placement *p)
{
    uint64_t all = bytes_needed(p), kv = p->kv_bytes, host = p->host_bytes + p->swap_bytes;
    uint64_t ctx = context_in(p, kv, all - kv);
    if (ctx < 256)
        ctx = context_in(p, kv + host, all - kv - host);
    if (ctx >= 256)
        snprintf(out, n, "--ctx %" PRIu64 "%s would fit", MIN(ctx, (uint64_t)p->n_ctx),
                 p->n_seqs > 1 ? " (or fewer sequences)" : "");
    else if (p->n_seqs > 1)
        snprintf(out, n, "use fewer sequences, a smaller quantization or a larger machine");
    else
        snprintf(out, n, "use a smaller quantization or a larger machine");
}

/* Where whole contexts for all do not fit, and nobody said how many pages there are to be: as many
 * as fit, one context at least. */
static void settle_pages(struct limits *l, struct engine_placement *p,
                         const struct engine_config *c)
{
    uint64_t page_bytes = MAX(p->kv_bytes / MAX(l->n_pages, 1u), 1u), need = bytes_needed(p);
    if (c->kv_pages || need <= p->free_bytes)
        return;
    uint64_t fit = p->free_bytes / 16 * 15, fixed = need - p->kv_bytes;
    fit = fit > fixed ? (fit - fixed) / page_bytes : 0;
    l->n_pages = MIN(l->n_pages, (uint32_t)MAX(fit, (uint64_t)l->max_held));
    p->kv_bytes = l->n_pages * page_bytes;
}

/* Host memory for those that are swapped out, where all may not be here at once. */
static void settle_swap(struct limits *l, struct engine_placement *p, const struct engine_config *c)
{
    uint64_t page_bytes = MAX(p->kv_bytes / MAX(l->n_pages, 1u), 1u), need = bytes_needed(p);
    uint64_t missing = (uint64_t)l->max_held * l->n_seqs - l->n_pages;
    uint64_t left = need < p->free_bytes ? p->free_bytes - need : 0;
    if (!missing)
        return;
    uint64_t n = c->swap_bytes ? c->swap_bytes / page_bytes : left / 4 / page_bytes;
    l->n_swap_pages = (uint32_t)MIN(MIN(n, missing) + l->n_seqs, (uint64_t)INT32_MAX);
    p->swap_bytes = l->n_swap_pages * page_bytes;
}

/* Pages of the prefix cache alone: what was asked for, else what is free without crowding others.
 */
static int settle_prefix(struct limits *l, struct engine_placement *p,
                         const struct engine_config *c, struct err *e)
{
    uint64_t page_bytes = MAX(p->kv_bytes / MAX(l->n_pages, 1u), 1u), need = bytes_needed(p);
    uint64_t left = need < p->free_bytes ? p->free_bytes - need : 0;
    uint64_t n = c->prefix_ram_bytes / page_bytes;
    if (!c->prefix_ram_bytes)
        n = MIN(l->n_pages / PREFIX_SHARE, MIN((uint64_t)PREFIX_BYTES, left / 2) / page_bytes);
    if (n > INT32_MAX / 2 || l->n_pages + n > INT32_MAX / 2)
        return err_set(e, ERR_LIMIT, "a prefix cache of %llu KV pages is too large; use less",
                       (unsigned long long)n);
    l->n_pages += (uint32_t)n;
    p->n_prefix_pages = (uint32_t)n;
    return 0;
}

static int check_fits(const struct engine_placement *p, uint64_t max_bytes, struct err *e)
{
    uint64_t need = bytes_needed(p);
    if (need <= p->free_bytes)
        return 0;
    char all[32], w[32], kv[32], scratch[32], host[32], left[32], hint[128];
    suggest(hint, sizeof hint, p);
    return err_set(
        e, ERR_MEMORY,
        "the model needs %s (weights %s, KV %s for %u x %u tokens, scratch %s, host %s) but %.80s "
        "has %s %s; %s",
        human(all, need), human(w, p->weight_bytes), human(kv, p->kv_bytes), p->n_seqs, p->n_ctx,
        human(scratch, p->scratch_bytes), human(host, p->host_bytes + p->swap_bytes), p->device,
        human(left, p->free_bytes), max_bytes && p->free_bytes >= max_bytes ? "for it" : "free",
        hint);
}

static int open_device(struct loaded *ld, const struct engine_config *c, struct err *e)
{
    struct device_info info[16] = {0};
    int n = ld->be->probe(info, ARRAY_LEN(info)), at = 0;
    n = MIN(n, (int)ARRAY_LEN(info));
    while (at < n && !info[at].usable)
        at++;
    if (at >= n)
        return err_set(e, ERR_DEVICE, "backend '%s' has no usable device: %s", ld->be->name,
                       n > 0 ? info[0].why_not : "none was found");
    if (shared_device_take(&ld->shared, ld->be, at, c->n_threads, e))
        return -1;
    ld->dev = shared_device_get(ld->shared);
    snprintf(ld->placement.device, sizeof ld->placement.device, "%s", info[at].name);
    ld->placement.free_bytes = info[at].free_bytes;
    return 0;
}

static int place(struct loaded *ld, struct model_file *f, const struct engine_config *c,
                 const struct backend *be, uint64_t held_bytes, struct err *e)
{
    struct arena sizing = {0};
    struct plan plan;
    int rc = -1;
    ld->be = be;
    if (model_describe(&ld->model, model_file_gguf(f), e) ||
        settle_limits(&ld->lim, &ld->model, c, e) || open_device(ld, c, e) ||
        plan_build(&plan, &sizing, &ld->model, &ld->lim, e))
        goto out;
    struct engine_placement *p = &ld->placement;
    if (add_over(p->free_bytes, held_bytes, &p->free_bytes))
        p->free_bytes = UINT64_MAX;
    if (c->max_bytes)
        p->free_bytes = MIN(p->free_bytes, c->max_bytes);
    p->n_ctx = ld->lim.n_ctx;
    p->n_seqs = ld->lim.n_seqs;
    p->kv_key_type = ld->lim.kv_key_type;
    p->kv_value_type = ld->lim.kv_value_type;
    p->weight_bytes = count_weight_bytes(ld, f);
    be->plan_bytes(ld->dev, &plan, &p->kv_bytes, &p->scratch_bytes);
    if (!c->max_bytes) /* a budget is for what stays */
        p->staging_bytes = footprint_staging_bytes(ld, c);
    p->host_bytes = footprint_host_bytes(ld, f, c, NULL, NULL);
    settle_pages(&ld->lim, p, c);
    settle_swap(&ld->lim, p, c);
    if (settle_prefix(&ld->lim, p, c, e))
        goto out;
    p->n_pages = (uint32_t)(plan.n_pages = (int32_t)ld->lim.n_pages);
    be->plan_bytes(ld->dev, &plan, &p->kv_bytes, &p->scratch_bytes);
    p->host_bytes = footprint_host_bytes(ld, f, c, NULL, NULL);
    rc = check_fits(p, c->max_bytes, e);
out:
    if (rc)
        err_prefix(e, "%.120s", model_file_name(f));
    arena_fini(&sizing);
    return rc;
}

int loaded_place(struct loaded *ld, struct model_file *f, const struct engine_config *c,
                 const struct backend *be, struct err *e)
{
    return place(ld, f, c, be, 0, e);
}

int loaded_place_again(struct loaded *ld, const struct loaded *old, struct model_file *f,
                       const struct engine_config *c, struct err *e)
{
    const char *digest = model_file_digest(f);
    if (strcmp(digest, old->digest))
        return err_set(e, ERR_CORRUPT, "%.120s is not the model that was loaded: it has changed",
                       model_file_name(f));
    /* Of the old pages and scratch nobody knows how much had been touched: not counted on. */
    if (place(ld, f, c, old->be, old->placement.weight_bytes, e))
        return -1;
    CHECK(model_n_tensors(&ld->model) == model_n_tensors(&old->model));
    if (ld->shared != old->shared)
        return err_set(e, ERR_USAGE, "another number of threads needs the model to be loaded anew");
    snprintf(ld->digest, sizeof ld->digest, "%s", digest);
    return 0;
}

int loaded_move(struct loaded *ld, struct loaded *old, struct err *e)
{
    shared_exec_free(old->shared, old->exec);
    old->exec = NULL;
    for (size_t i = 0, n = model_n_tensors(&ld->model); i < n; i++) {
        ld->model.tensors[i].w = old->model.tensors[i].w;
        old->model.tensors[i].w = NULL;
    }
    ld->model.rope_freqs = old->model.rope_freqs;
    old->model.rope_freqs = NULL;
    if (plan_build(&ld->plan, &ld->arena, &ld->model, &ld->lim, e))
        return -1;
    return shared_prepare(ld->shared, &ld->exec, &ld->plan, e);
}

int loaded_fill(struct loaded *ld, struct model_file *f, const struct engine_config *c,
                struct err *e)
{
    if (read_rope_freqs(&ld->model, f, e) || load_weights(ld, f, c, e) ||
        plan_build(&ld->plan, &ld->arena, &ld->model, &ld->lim, e) ||
        shared_prepare(ld->shared, &ld->exec, &ld->plan, e)) {
        if (!e || e->code != ERR_CANCELLED)
            err_prefix(e, "%.120s", model_file_name(f));
        return -1;
    }
    snprintf(ld->digest, sizeof ld->digest, "%s", model_file_digest(f));
    return 0;
}

void loaded_fini(struct loaded *ld)
{
    if (ld->exec)
        shared_exec_free(ld->shared, ld->exec);
    for (size_t i = 0; ld->model.tensors && i < model_n_tensors(&ld->model); i++)
        if (ld->model.tensors[i].w)
            shared_unload(ld->shared, ld->model.tensors[i].w);
    shared_device_drop(ld->shared);
    model_fini(&ld->model);
    arena_fini(&ld->arena);
    *ld = (struct loaded){0};
}

int engine_place_on(struct engine_placement *p, struct model_file *f, const struct engine_config *c,
                    const struct backend *be, struct err *e)
{
    struct loaded ld = {0};
    int rc = loaded_place(&ld, f, c, be, e);
    *p = ld.placement;
    loaded_fini(&ld);
    return rc;
}

int engine_place(struct engine_placement *p, struct model_file *f, const struct engine_config *c,
                 struct err *e)
{
    const struct backend *be;
    if (backend_choose(&be, c->backend, e))
        return -1;
    return engine_place_on(p, f, c, be, e);
}
