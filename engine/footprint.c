/* Host memory beside weights, KV and scratch, counted before it is taken: logits, samplers, the
 * bookkeeping of KV and prefix tree, batches, text, the open model, the persistent tier. What is
 * counted is what may be touched while requests run; parts below some KiB are left out. Takes no
 * memory. Sums stop at UINT64_MAX, which fits nowhere. */
#include "engine/prefix_cache.h"

#include <unistd.h>

static uint64_t add(uint64_t a, uint64_t b)
{
    uint64_t r;
    return add_over(a, b, &r) ? UINT64_MAX : r;
}

static uint64_t mul(uint64_t a, uint64_t b)
{
    uint64_t r;
    return mul_over(a, b, &r) ? UINT64_MAX : r;
}

/* One sequence's sampler with every stage on that takes memory: a request may ask for that. */
static uint64_t largest_sampler(const struct loaded *ld)
{
    struct sample_params p;
    sample_defaults(&p);
    p.repeat_penalty = 1.1f;
    p.repeat_last_n = -1;
    p.dry_multiplier = 1;
    p.typical_p = 0.5f;
    p.n_probs = 128; /* as many as an API gives, and more */
    return sampler_bytes(&p, ld->model.hp.n_vocab, ld->lim.n_ctx);
}

/* The engine's own arrays, and the requests that run and wait. */
static uint64_t engine_arrays(const struct loaded *ld)
{
    const struct limits *l = &ld->lim;
    const struct engine en = {0};
    uint64_t a_seq = sizeof *en.active + sizeof *en.batch_owner + sizeof *en.batch_seqs;
    uint64_t a_waiting = sizeof *en.queue + sizeof *en.dropped + sizeof(struct seq);
    uint64_t sum = sizeof en + mul(l->n_seqs, a_seq + sizeof(struct seq));
    sum = add(sum, mul(l->queue_len, a_waiting));
    sum = add(sum, mul(l->max_batch, sizeof *en.row_ids));
    uint64_t a_row = add(mul(ld->model.hp.n_vocab, sizeof *en.logits), sizeof *en.want);
    return add(sum, mul(l->max_out, a_row));
}

static uint64_t prefix_tiers(const struct loaded *ld, const struct engine_config *c)
{
    const struct limits *l = &ld->lim;
    uint64_t page_bytes = ld->placement.kv_bytes / MAX(l->n_pages, 1u);
    uint64_t sum = add(sizeof(struct prefix_cache), prefix_tree_bytes(l->n_pages, l->n_seqs));
    if (!c->prefix_store)
        return sum;
    if (c->prefix_counted)
        return add(sum, page_bytes);
    return add(sum, add(page_bytes, prefix_store_bytes(c->prefix_store, page_bytes)));
}

/* A template's tree takes a multiple of its source. */
static uint64_t template_estimate(const struct gguf *g)
{
    struct gguf_str src = {0};
    gguf_get_str(g, "tokenizer.chat_template", &src, NULL);
    return mul(src.n, 16);
}

uint64_t footprint_host_bytes(const struct loaded *ld, const struct model_file *f,
                              const struct engine_config *c, const struct tokenizer *tok,
                              const struct template *tmpl)
{
    const struct gguf *g = model_file_gguf(f);
    const uint64_t parts[] = {
        engine_arrays(ld),
        mul(ld->lim.n_seqs, largest_sampler(ld)),
        kv_lists_bytes(&ld->lim),
        schedule_bytes(&ld->lim),
        prefix_tiers(ld, c),
        tok ? tokenizer_bytes(tok) : tokenizer_bytes_of(g),
        tmpl  ? template_bytes(tmpl)
        : tok ? 0
              : template_estimate(g),
        model_file_bytes(f),
        mul(model_n_tensors(&ld->model), sizeof *ld->model.tensors),
    };
    uint64_t sum = 0;
    for (size_t i = 0; i < ARRAY_LEN(parts); i++)
        sum = add(sum, parts[i]);
    return sum;
}

uint64_t footprint_staging_bytes(const struct loaded *ld, const struct engine_config *c)
{
    /* each thread: source rows for a panel, 1 MiB of them or what a panel needs, and a checked
     * chunk of the store's */
    long n = c->n_threads > 0 ? c->n_threads : sysconf(_SC_NPROCESSORS_ONLN);
    uint64_t panel = 0;
    for (size_t i = 0; i < model_n_tensors(&ld->model); i++) {
        const struct gguf_tensor *t = ld->model.tensors[i].t;
        if (t && !model_tensor_is_vector(i))
            panel = MAX(panel, t->n_bytes / MAX(t->ne[1], (uint64_t)1) * 16);
    }
    return mul((uint64_t)MAX(n, 1L), add(MAX(panel, (uint64_t)1 << 20), STORE_CHUNK_BYTES));
}

uint64_t engine_placed_bytes(const struct engine_placement *p)
{
    uint64_t device = add(add(p->weight_bytes, p->kv_bytes), p->scratch_bytes);
    return add(add(device, p->host_bytes), p->swap_bytes);
}
