/* The engine's thread: takes requests from a bounded queue, keeps a batch running, hands tokens
 * back. It alone touches KV bookkeeping, samplers and the backend. The lock guards the queue, the
 * counters and the cancel flags, and is never held while a step runs or an event is given out.
 *
 * A step holds what schedule.c decides. Nothing is allocated from admission to the end of a
 * request. Complete KV pages go to the persistent tier in the gaps. */
#include "engine/prefix_cache.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

enum {
    IDLE_WRITE_NS = 2000000,  /* writing behind at a time while nobody waits */
    IDLE_AGAIN_NS = 20000000, /* until the persistent tier is asked again to take more */
    WRITE_SHARE = 10,         /* writing behind takes one part in so many of a step */
};
static const uint64_t drain_ns = 30000000000u; /* that closing waits for the persistent tier */

/* ---- the end of a request ---- */

/* Under the lock, on the engine's thread: the pool is its own. */
static void publish(struct engine *en)
{
    struct engine_counters *c = &en->counters;
    c->n_free_pages = (uint32_t)en->pool.n_free;
    c->n_pages = (uint32_t)en->pool.n_pages;
    c->n_held_pages = (uint32_t)en->pool.n_held;
    c->n_active = en->n_active;
    c->n_waiting = en->n_queue;
    c->n_swapped = (uint32_t)en->prefix->n_swapped;
    c->n_swapped_out = en->n_swapped_out;
    c->n_swapped_in = en->n_swapped_in;
    memcpy(c->n_back_tokens, en->prefix->back_tokens, sizeof c->n_back_tokens);
    c->prefix = en->prefix->counters;
    c->prefix.n_pages = (uint32_t)en->prefix->tree.n_pages;
    c->n_reused_rows = 0;
    for (int i = 0; i < PREFIX_TIER_END; i++)
        c->n_reused_rows += c->prefix.hit_tokens[i];
}

/* The sequence leaves; its KV stays in the prefix tree. After the event the request is the
 * caller's. */
static void deliver(struct engine *en, struct seq *s)
{
    struct request *r = s->req;
    uint64_t now = now_ns();
    if (s->kv) {
        s->stats.n_cached = (uint32_t)s->kv->n_cached;
        prefix_cache_detach(en->prefix, s->kv);
        s->kv->owner = NULL;
    }
    schedule_leave(&en->schedule, s);
    if (!s->start_ns)
        s->stats.queue_ns = now - s->submit_ns;
    else if (!s->first_ns)
        s->stats.prompt_ns = now - s->start_ns;
    else
        s->stats.decode_ns = now - s->first_ns;
    pthread_mutex_lock(&en->mu);
    r->seq = NULL;
    en->counters.n_requests++;
    publish(en);
    pthread_mutex_unlock(&en->mu);
    struct request_stats stats = s->stats;
    struct waiter *w = s->waiter;
    seq_free(s);
    if (!w) {
        r->on_done(r->user, &stats);
        return;
    }
    pthread_mutex_lock(&w->mu);
    w->stats = stats;
    w->done = true;
    pthread_cond_signal(&w->cond);
    pthread_mutex_unlock(&w->mu);
}

static void reap(struct engine *en)
{
    for (uint32_t i = 0; i < en->n_active;) {
        struct seq *s = en->active[i];
        if (!s->ended) {
            i++;
            continue;
        }
        pthread_mutex_lock(&en->mu);
        en->n_active--;
        pthread_mutex_unlock(&en->mu);
        memmove(&en->active[i], &en->active[i + 1], (en->n_active - i) * sizeof *en->active);
        deliver(en, s);
    }
}

static void deliver_dropped(struct engine *en)
{
    for (uint32_t i = 0; i < en->n_dropped; i++)
        deliver(en, en->dropped[i]);
    pthread_mutex_lock(&en->mu);
    en->n_dropped = 0;
    pthread_mutex_unlock(&en->mu);
}

/* ---- a step ---- */

/* Under the lock: end what was cancelled. */
static void collect(struct engine *en)
{
    for (uint32_t i = 0; i < en->n_active; i++)
        if (en->active[i]->cancel || en->closing)
            seq_end(en->active[i], FINISH_CANCELLED, NULL);
    uint32_t kept = 0;
    for (uint32_t i = 0; i < en->n_queue; i++) {
        struct seq *s = en->queue[i];
        if (s->cancel || en->closing) {
            seq_end(s, FINISH_CANCELLED, NULL);
            en->dropped[en->n_dropped++] = s;
        } else {
            en->queue[kept++] = s;
        }
    }
    en->n_queue = kept;
    publish(en);
}

/* For eval: every position once, also when some had to be computed again. */
static void give_logits(struct seq *s, const float *logits, size_t n_vocab)
{
    const struct request *r = s->req;
    for (int32_t i = 0; i < s->n_want; i++)
        if (s->kv->n_kv + i == s->n_logits)
            r->on_logits(r->user, (uint32_t)s->n_logits++, logits + (size_t)i * n_vocab);
}

/* The step's rows of one sequence are in the KV now; give out logits, choose the next token. */
static void take_rows(struct engine *en, struct seq *s)
{
    const struct request *r = s->req;
    size_t n_vocab = en->ld.model.hp.n_vocab;
    const float *logits = en->logits + (size_t)s->first_want * n_vocab;
    if (r->on_logits && s->state == SEQ_PROMPT)
        give_logits(s, logits, n_vocab);
    s->kv->n_kv += s->n_rows;
    prefix_cache_filled(en->prefix, s->kv);
    if (s->state == SEQ_DECODE && !s->n_want)
        return; /* it had been lost */
    if (s->state == SEQ_PROMPT) {
        if (s->kv->n_kv < (int32_t)r->n_ids)
            return;
        prefix_cache_prompt_done(en->prefix, s->kv);
        s->state = SEQ_DECODE;
        s->first_ns = now_ns();
        s->stats.prompt_ns = s->first_ns - s->start_ns;
        if (r->n_ids >= en->ld.lim.n_ctx) {
            seq_end(s, FINISH_CONTEXT, NULL);
            return;
        }
    }
    struct err why = {0};
    int32_t id;
    logits += (size_t)(s->n_want - 1) * n_vocab;
    if (sampler_next(s->sampler, &id, logits, NULL, &why))
        seq_end(s, FINISH_ERROR, &why);
    else
        seq_take_token(s, en, id);
}

/* Once an answer has begun its prompt's pages are worth writing; until then only the first token
 * counts. */
static void write_behind(struct engine *en, uint64_t step_ns)
{
    bool decoding = false, again;
    for (uint32_t i = 0; i < en->n_active; i++)
        decoding = decoding || (en->active[i]->state == SEQ_DECODE && !en->active[i]->ended);
    if (decoding)
        prefix_cache_write_behind(en->prefix, &again, now_ns() + step_ns / WRITE_SHARE);
}

static void run_step(struct engine *en)
{
    struct err why = {0};
    struct batch *b = &en->batch;
    uint64_t begin = now_ns();
    schedule_step(en);
    if (!b->n_rows)
        return;
    int32_t n_prompt_rows = 0;
    for (int32_t i = 0; i < b->n_seqs; i++)
        if (en->batch_owner[i]->state == SEQ_PROMPT)
            n_prompt_rows += b->seqs[i].n_rows;
    uint64_t start = now_ns();
    int rc = shared_run(en->ld.shared, en->ld.exec, b, &why);
    uint64_t step_ns = now_ns() - start;
    if (!rc)
        sched_cost_add(&en->schedule.cost, (uint32_t)b->n_rows, en->schedule.n_keys, step_ns);
    en->prefix->ns_per_row = en->schedule.cost.ns_per_row;
    en->prefix->ns_per_key = en->schedule.cost.ns_per_key;
    pthread_mutex_lock(&en->mu);
    en->counters.n_steps++;
    en->counters.n_rows += (uint64_t)b->n_rows;
    en->counters.n_prompt_rows += (uint64_t)n_prompt_rows;
    en->counters.run_ns += step_ns;
    publish(en);
    pthread_mutex_unlock(&en->mu);
    for (int32_t i = 0; i < b->n_seqs; i++) {
        struct seq *s = en->batch_owner[i];
        if (!rc) {
            take_rows(en, s);
        } else {
            /* what the failed step left in the pages is unknown */
            prefix_cache_distrust(en->prefix, s->kv);
            seq_end(s, FINISH_ERROR, &why);
        }
    }
    write_behind(en, step_ns);
    pthread_mutex_lock(&en->mu);
    en->counters.step_ns += now_ns() - begin;
    pthread_mutex_unlock(&en->mu);
}

/* Sleep until there is something to do, and use the time for writing behind. */
static void wait_for_work(struct engine *en)
{
    bool more = true, again = false;
    pthread_mutex_lock(&en->mu);
    while (!en->closing && !en->n_active && !en->n_queue) {
        if (more) {
            pthread_mutex_unlock(&en->mu);
            more = prefix_cache_write_behind(en->prefix, &again, now_ns() + IDLE_WRITE_NS);
            pthread_mutex_lock(&en->mu);
            publish(en);
        } else if (again) {
            uint64_t until = now_ns() + IDLE_AGAIN_NS;
            struct timespec t = {.tv_sec = (time_t)(until / 1000000000u),
                                 .tv_nsec = (long)(until % 1000000000u)};
            pthread_cond_clockwait(&en->wake, &en->mu, CLOCK_MONOTONIC, &t);
            more = true;
        } else {
            pthread_cond_wait(&en->wake, &en->mu);
        }
    }
    pthread_mutex_unlock(&en->mu);
}

bool engine_turn(struct engine *en)
{
    pthread_mutex_lock(&en->mu);
    collect(en);
    bool last = en->closing;
    pthread_mutex_unlock(&en->mu);
    deliver_dropped(en);
    reap(en);
    if (last)
        return false;
    run_step(en);
    deliver_dropped(en);
    reap(en);
    return true;
}

static void *engine_thread(void *arg)
{
    struct engine *en = arg;
    do
        wait_for_work(en);
    while (engine_turn(en));
    return NULL;
}

/* ---- requests ---- */

static int check_request(const struct engine *en, const struct request *r, struct err *e)
{
    uint32_t n_ctx = en->ld.lim.n_ctx;
    if (!r->ids || !r->n_ids)
        return err_set(e, ERR_USAGE, "the prompt has no tokens");
    if (r->n_ids > n_ctx)
        return err_set(e, ERR_LIMIT,
                       "the prompt has %zu tokens, the context holds %u; shorten it or load the "
                       "model with more --ctx",
                       r->n_ids, n_ctx);
    if (r->n_ids == n_ctx && !r->on_logits)
        return err_set(e, ERR_LIMIT,
                       "the prompt has %zu tokens, the context holds %u: no room for an answer; "
                       "shorten it or load the model with more --ctx",
                       r->n_ids, n_ctx);
    for (size_t i = 0; i < r->n_ids; i++)
        if (r->ids[i] < 0 || (uint32_t)r->ids[i] >= en->info.n_vocab)
            return err_set(e, ERR_USAGE,
                           "token %zu of the prompt is %d; the vocabulary has ids 0 to %u", i,
                           r->ids[i], en->info.n_vocab - 1);
    if (r->priority < -SCHED_PRIORITY_MAX || r->priority > SCHED_PRIORITY_MAX)
        return err_set(e, ERR_USAGE, "the priority is %d; it must be %d to %d", r->priority,
                       -SCHED_PRIORITY_MAX, SCHED_PRIORITY_MAX);
    return sample_check(&r->sample, e);
}

/* Under the lock, or nothing. */
static int put_in_queue(struct engine *en, struct request *const *r, struct seq *const *s, size_t n,
                        struct err *e)
{
    if (en->closing)
        return err_set(e, ERR_CANCELLED, "the engine is closing");
    /* those that have ended there keep their places until they are told so */
    uint32_t most = en->ld.lim.queue_len, n_queue = en->n_queue + en->n_dropped;
    if (n > most)
        return err_set(e, ERR_LIMIT, "%zu requests at once are more than may wait, %u; send fewer",
                       n, most);
    if (n > most - n_queue)
        return err_set(e, ERR_FULL,
                       "%u requests are waiting already, at most %u may; try again later", n_queue,
                       most);
    for (size_t i = 0; i < n; i++) {
        r[i]->seq = s[i];
        s[i]->arrival = en->n_arrived++;
        en->queue[en->n_queue++] = s[i];
    }
    en->counters.n_waiting = en->n_queue;
    pthread_cond_signal(&en->wake);
    return 0;
}

static int submit(struct engine *en, struct request *const *r, size_t n, struct waiter *w,
                  struct err *e)
{
    struct seq *one = NULL, **s = n == 1 ? &one : mem_array(n, sizeof *s);
    int rc = s ? 0 : err_set(e, ERR_MEMORY, "out of memory for %zu requests", n);
    for (size_t i = 0; !rc && i < n; i++) {
        rc = check_request(en, r[i], e) || seq_new(&s[i], r[i], e) ? -1 : 0;
        if (!rc) {
            s[i]->waiter = w;
            s[i]->submit_ns = now_ns();
        }
    }
    if (!rc) {
        pthread_mutex_lock(&en->mu);
        rc = put_in_queue(en, r, s, n, e);
        pthread_mutex_unlock(&en->mu);
    }
    for (size_t i = 0; rc && s && i < n; i++)
        seq_free(s[i]);
    if (s != &one)
        mem_free(s);
    return rc;
}

int engine_submit_all(struct engine *en, struct request *const *r, size_t n, struct err *e)
{
    for (size_t i = 0; i < n; i++)
        if (!r[i]->on_done)
            return err_set(e, ERR_USAGE, "a request needs on_done");
    return n ? submit(en, r, n, NULL, e) : 0;
}

int engine_submit(struct engine *en, struct request *r, struct err *e)
{
    return engine_submit_all(en, &r, 1, e);
}

void engine_cancel(struct engine *en, struct request *r)
{
    pthread_mutex_lock(&en->mu);
    if (r->seq) {
        r->seq->cancel = true;
        pthread_cond_signal(&en->wake);
    }
    pthread_mutex_unlock(&en->mu);
}

int engine_run(struct engine *en, struct request *r, struct request_stats *s, struct err *e)
{
    struct waiter w = {.mu = PTHREAD_MUTEX_INITIALIZER, .cond = PTHREAD_COND_INITIALIZER};
    int rc = submit(en, &r, 1, &w, e);
    if (!rc) {
        pthread_mutex_lock(&w.mu);
        while (!w.done)
            pthread_cond_wait(&w.cond, &w.mu);
        pthread_mutex_unlock(&w.mu);
        *s = w.stats;
        if (s->finish == FINISH_ERROR)
            rc = err_set(e, s->err.code ? s->err.code : ERR_DEVICE, "%s", s->err.msg);
    }
    pthread_cond_destroy(&w.cond);
    pthread_mutex_destroy(&w.mu);
    return rc;
}

void engine_counters(struct engine *en, struct engine_counters *c)
{
    pthread_mutex_lock(&en->mu);
    *c = en->counters;
    pthread_mutex_unlock(&en->mu);
}

/* ---- opening and closing ---- */

static int take_buffers(struct engine *en, struct err *e)
{
    const struct limits *l = &en->ld.lim;
    size_t n_logits;
    en->kv = mem_array(l->n_seqs, sizeof *en->kv);
    en->active = mem_array(l->n_seqs, sizeof *en->active);
    en->batch_owner = mem_array(l->n_seqs, sizeof *en->batch_owner);
    en->batch_seqs = mem_array(l->n_seqs, sizeof *en->batch_seqs);
    en->queue = mem_array(l->queue_len, sizeof *en->queue);
    en->dropped = mem_array(l->queue_len, sizeof *en->dropped);
    en->row_ids = mem_array(l->max_batch, sizeof *en->row_ids);
    en->want = mem_array(l->max_out, sizeof *en->want);
    if (!mul_over((size_t)l->max_out, en->ld.model.hp.n_vocab, &n_logits))
        en->logits = mem_array(n_logits, sizeof *en->logits);
    if (!en->kv || !en->active || !en->batch_owner || !en->batch_seqs || !en->queue ||
        !en->dropped || !en->row_ids || !en->want || !en->logits)
        return err_set(e, ERR_MEMORY, "out of memory for the engine's batches");
    en->batch.ids = en->row_ids;
    en->batch.want = en->want;
    en->batch.seqs = en->batch_seqs;
    en->batch.logits = en->logits;
    for (uint32_t i = 0; i < l->n_seqs; i++)
        if (kv_seq_init(&en->kv[i], l, e))
            return -1;
    if (kv_pool_init(&en->pool, l->n_pages, e) || schedule_init(&en->schedule, l, e))
        return -1;
    if (!l->n_swap_pages)
        return 0;
    return kv_swap_init(&en->swap, l->n_swap_pages, en->ld.be->kv_page_bytes(en->ld.exec), e);
}

static int open_prefix(struct engine *en, struct model_file *f, const struct engine_config *c,
                       struct err *e)
{
    en->prefix = mem_zalloc(sizeof *en->prefix);
    if (!en->prefix)
        return err_set(e, ERR_MEMORY, "out of memory for the prefix cache");
    return prefix_cache_init(en->prefix, &en->pool, &en->swap, &en->ld, c, model_file_digest(f), e);
}

static void fill_info(struct engine *en, struct model_file *f, double seconds)
{
    const struct loaded *ld = &en->ld;
    const struct gguf *g = model_file_gguf(f);
    struct engine_info *i = &en->info;
    struct gguf_str name = {0};
    gguf_get_str(g, "general.name", &name, NULL);
    if (name.n && utf8_valid(name.p, MIN(name.n, sizeof i->name - 1)))
        snprintf(i->name, sizeof i->name, "%.*s", (int)MIN(name.n, sizeof i->name - 1), name.p);
    else
        snprintf(i->name, sizeof i->name, "%.127s", model_file_name(f));
    snprintf(i->arch, sizeof i->arch, "%s", ld->model.arch->name);
    snprintf(i->describe, sizeof i->describe, "%s", ld->be->describe(ld->dev));
    i->n_vocab = ld->model.hp.n_vocab;
    i->n_ctx = ld->lim.n_ctx;
    i->n_ctx_train = ld->model.hp.n_ctx_train;
    i->n_layers = ld->model.hp.n_layers;
    i->n_embd = ld->model.hp.n_embd;
    i->n_params = ld->model.n_params;
    i->weight_file_bytes = ld->model.n_bytes;
    i->placement = ld->placement;
    i->load_seconds = seconds;
}

static int make_locks(struct engine *en, struct err *e)
{
    if (pthread_mutex_init(&en->mu, NULL))
        return err_set(e, ERR_MEMORY, "cannot make a lock");
    if (pthread_cond_init(&en->wake, NULL)) {
        pthread_mutex_destroy(&en->mu);
        return err_set(e, ERR_MEMORY, "cannot make a condition variable");
    }
    en->mu_ready = true;
    publish(en);
    return 0;
}

static int start_thread(struct engine *en, struct err *e)
{
    int rc = pthread_create(&en->thread, NULL, engine_thread, en);
    if (rc)
        return err_set(e, ERR_IO, "cannot start the engine's thread: %s", strerror(rc));
    en->thread_ready = true;
    return 0;
}

/* The model is on the device: all that depends on the engine's sizes, but the thread. */
static int prepare(struct engine *en, struct model_file *f, const struct engine_config *c,
                   uint64_t begin_ns, struct err *e)
{
    if (take_buffers(en, e) || open_prefix(en, f, c, e))
        return -1;
    model_file_forget(f);
    mem_trim();
    en->ld.placement.host_bytes = footprint_host_bytes(&en->ld, f, c, en->tok, en->tmpl);
    fill_info(en, f, (double)(now_ns() - begin_ns) / 1e9);
    return make_locks(en, e);
}

int engine_open_stepped(struct engine **out, struct model_file *f, const struct engine_config *c,
                        const struct backend *be, struct err *e)
{
    uint64_t begin = now_ns();
    struct engine *en = mem_zalloc(sizeof *en);
    if (!en)
        return err_set(e, ERR_MEMORY, "out of memory for the engine");
    if (loaded_place(&en->ld, f, c, be, e) || engine_read_text(en, model_file_gguf(f), e) ||
        loaded_fill(&en->ld, f, c, e) || prepare(en, f, c, begin, e)) {
        engine_close(en);
        return -1;
    }
    *out = en;
    return 0;
}

int engine_open_on(struct engine **out, struct model_file *f, const struct engine_config *c,
                   const struct backend *be, struct err *e)
{
    struct engine *en;
    if (engine_open_stepped(&en, f, c, be, e))
        return -1;
    if (start_thread(en, e)) {
        engine_close(en);
        return -1;
    }
    *out = en;
    return 0;
}

int engine_open(struct engine **out, struct model_file *f, const struct engine_config *c,
                struct err *e)
{
    const struct backend *be;
    if (backend_choose(&be, c->backend, e))
        return -1;
    return engine_open_on(out, f, c, be, e);
}

/* The other way round: what is left is the model on the device, and its text. */
static void stop(struct engine *en)
{
    if (en->mu_ready) {
        pthread_mutex_lock(&en->mu);
        en->closing = true;
        pthread_cond_signal(&en->wake);
        pthread_mutex_unlock(&en->mu);
        if (en->thread_ready)
            pthread_join(en->thread, NULL);
        else
            engine_turn(en);
        prefix_cache_drain(en->prefix, now_ns() + drain_ns);
        pthread_cond_destroy(&en->wake);
        pthread_mutex_destroy(&en->mu);
    }
    for (uint32_t i = 0; en->kv && i < en->ld.lim.n_seqs; i++)
        kv_seq_fini(&en->kv[i]);
    if (en->prefix)
        prefix_cache_fini(en->prefix);
    mem_free(en->prefix);
    kv_pool_fini(&en->pool);
    kv_swap_fini(&en->swap);
    schedule_fini(&en->schedule);
    mem_free(en->kv);
    mem_free(en->active);
    mem_free(en->batch_owner);
    mem_free(en->batch_seqs);
    mem_free(en->queue);
    mem_free(en->dropped);
    mem_free(en->row_ids);
    mem_free(en->want);
    mem_free(en->logits);
}

void engine_close(struct engine *en)
{
    if (!en)
        return;
    stop(en);
    template_free(en->tmpl);
    tokenizer_free(en->tok);
    loaded_fini(&en->ld);
    mem_free(en);
}

/* What stop() has freed must not be found again; what was read from the file stays. */
static void reset(struct engine *en, const struct loaded *ld)
{
    struct engine kept = {.ld = *ld,
                          .tok = en->tok,
                          .tmpl = en->tmpl,
                          .tmpl_err = en->tmpl_err,
                          .sample = en->sample,
                          .max_piece = en->max_piece};
    *en = kept;
}

int engine_reshape(struct engine **en, struct model_file *f, const struct engine_config *c,
                   struct err *e)
{
    uint64_t begin = now_ns();
    struct loaded next = {0}, old;
    if (loaded_place_again(&next, &(*en)->ld, f, c, e)) {
        loaded_fini(&next);
        return -1;
    }
    stop(*en);
    old = (*en)->ld;
    reset(*en, &next);
    int rc = loaded_move(&(*en)->ld, &old, e);
    loaded_fini(&old);
    if (!rc && !prepare(*en, f, c, begin, e) && !start_thread(*en, e))
        return 0;
    engine_close(*en);
    *en = NULL;
    return -1;
}

const struct engine_info *engine_info(const struct engine *en)
{
    return &en->info;
}

const struct tokenizer *engine_tokenizer(const struct engine *en)
{
    return en->tok;
}

const struct template *engine_template(const struct engine *en)
{
    return en->tmpl;
}

void engine_set_tap(struct engine *en,
                    void (*tap)(void *user, const struct op *op, const float *rows, int32_t n_rows,
                                int32_t width, int32_t stride),
                    void *user)
{
    en->batch.tap = tap;
    en->batch.tap_user = user;
}
