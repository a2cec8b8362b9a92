/* Several engines in one process: who is loaded, who uses it, who has to go. One thread (the
 * keeper) loads, reshapes and unloads, one model at a time, so that what is counted is what is
 * there; callers wait for it. The lock guards the list and is held during no load and no unload.
 * Owns the engines; the stores are the caller's. */
#include "engine/models.h"
#include "engine/engine_internal.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>

enum { POLL_NS = 50000000 }; /* how often a waiting caller is asked whether it still wants to */
static const int64_t keep_alive_ns = 300000000000;

struct stamp { /* of a plain file; zero: it is none */
    int64_t mtime_s, mtime_ns, n_bytes;
};

struct models_entry {
    struct models_entry *next;
    uint64_t number; /* in order of the first wish */
    char ref[PATH_MAX];
    bool is_path;
    enum models_state state;
    struct engine *en; /* the keeper's while the state is not MODELS_READY */
    struct stamp stamp;
    uint64_t bytes;
    uint32_t n_ctx; /* the engine's */
    char device[64];
    uint32_t n_leases, n_waiters; /* with any it stays */
    bool pinned, stop;            /* stop: goes as soon as nobody has it */
    int64_t keep_ns;
    uint64_t used_ns;
    /* what the keeper is asked for while the state is MODELS_LOADING */
    uint32_t want_ctx;
    bool reload;
    uint64_t done, total;
    /* failed: it is out of the list, and the last waiter frees it */
    bool failed;
    uint64_t n_refused; /* times that a loaded one did not take another shape */
    struct err err;
};

struct models {
    struct models_config cfg;
    const struct backend *be;
    pthread_t keeper;
    pthread_mutex_t mu;
    pthread_cond_t wake, changed; /* the keeper's; everybody else's */
    /* under mu */
    struct models_entry *list;
    uint64_t n_entries; /* ever */
    uint64_t sleep_until;
    bool closing;
};

void models_defaults(struct models_config *c)
{
    *c = (struct models_config){.keep_alive_ns = keep_alive_ns};
}

/* ---- names ---- */

struct key {
    char ref[PATH_MAX];
    bool is_path;
    struct stamp stamp;
};

/* A path in whatever spelling is one model; what is not there keeps its own, for the error. */
static int key_make(struct key *k, const char *ref, struct err *e)
{
    size_t n = strlen(ref);
    struct stat st;
    memset(k, 0, sizeof *k);
    if (n >= sizeof k->ref)
        return err_set(e, ERR_USAGE, "the name of the model is too long: %zu bytes", n);
    k->is_path = strchr(ref, '/') || (n >= 5 && !strcmp(ref + n - 5, ".gguf"));
    if (!k->is_path || !realpath(ref, k->ref))
        memcpy(k->ref, ref, n + 1);
    if (k->is_path && !stat(k->ref, &st))
        k->stamp = (struct stamp){st.st_mtim.tv_sec, st.st_mtim.tv_nsec, st.st_size};
    return 0;
}

static bool same_stamp(const struct stamp *a, const struct stamp *b)
{
    return a->mtime_s == b->mtime_s && a->mtime_ns == b->mtime_ns && a->n_bytes == b->n_bytes;
}

/* A file that is gone now says nothing about the model that came from it. */
static bool file_changed(const struct models_entry *m, const struct key *k)
{
    static const struct stamp none;
    return !same_stamp(&k->stamp, &none) && !same_stamp(&k->stamp, &m->stamp);
}

static struct models_entry *find_entry(const struct models *ms, const struct key *k)
{
    struct models_entry *m = ms->list;
    while (m && (m->is_path != k->is_path ||
                 (k->is_path ? strcmp(m->ref, k->ref) : strcasecmp(m->ref, k->ref))))
        m = m->next;
    return m;
}

static void unlink_entry(struct models *ms, struct models_entry *m)
{
    struct models_entry **at = &ms->list;
    while (*at != m)
        at = &(*at)->next;
    *at = m->next;
}

/* ---- who may go, and when; all under the lock ---- */

static bool in_use(const struct models_entry *m)
{
    return m->state != MODELS_READY || m->n_leases || m->n_waiters;
}

static uint64_t expires(const struct models_entry *m, uint64_t from_ns)
{
    uint64_t at;
    if (m->stop)
        return 0;
    if (m->pinned || m->keep_ns < 0 || add_over(from_ns, (uint64_t)m->keep_ns, &at))
        return UINT64_MAX;
    return at;
}

/* The one that is due first, and when. NULL: nothing is by itself. */
static struct models_entry *first_due(const struct models *ms, uint64_t *at)
{
    struct models_entry *first = NULL;
    *at = UINT64_MAX;
    for (struct models_entry *m = ms->list; m; m = m->next) {
        if (in_use(m) || expires(m, m->used_ns) >= *at)
            continue;
        first = m;
        *at = expires(m, m->used_ns);
    }
    return first;
}

static struct models_entry *least_recently_used(const struct models *ms)
{
    struct models_entry *lru = NULL;
    for (struct models_entry *m = ms->list; m; m = m->next)
        if (!in_use(m) && !m->pinned && (!lru || m->used_ns < lru->used_ns))
            lru = m;
    return lru;
}

struct held {                   /* of all but one */
    uint64_t bytes, kept_bytes; /* all of it, and what may not go */
    uint32_t n, n_kept;
    char who[200]; /* has what may not go */
};

static void count_held(struct held *h, const struct models *ms, const struct models_entry *but)
{
    size_t at = 0;
    *h = (struct held){0};
    for (const struct models_entry *m = ms->list; m; m = m->next) {
        if (m == but || !m->en)
            continue;
        h->n++;
        h->bytes += m->bytes;
        if (!in_use(m) && !m->pinned)
            continue;
        h->n_kept++;
        h->kept_bytes += m->bytes;
        const char *slash = strrchr(m->ref, '/'), *name = slash ? slash + 1 : m->ref;
        if (at < sizeof h->who)
            at += (size_t)snprintf(h->who + at, sizeof h->who - at, "%s%.60s (%s)", at ? ", " : "",
                                   name, m->pinned ? "pinned" : "in use");
    }
}

/* A sleeping keeper need not hear of what is due after it wakes. */
static void wake_for(struct models *ms, const struct models_entry *m)
{
    if (!in_use(m) && expires(m, m->used_ns) < ms->sleep_until)
        pthread_cond_signal(&ms->wake);
}

/* ---- the keeper ---- */

/* Under the lock, which it leaves meanwhile. */
static void unload(struct models *ms, struct models_entry *m)
{
    m->state = MODELS_UNLOADING;
    pthread_mutex_unlock(&ms->mu);
    engine_close(m->en);
    pthread_mutex_lock(&ms->mu);
    unlink_entry(ms, m);
    mem_free(m);
    pthread_cond_broadcast(&ms->changed);
}

struct loading {
    struct models *ms;
    struct models_entry *m;
};

static int load_progress(void *user, uint64_t done, uint64_t total)
{
    struct loading *l = user;
    pthread_mutex_lock(&l->ms->mu);
    l->m->done = done;
    l->m->total = total;
    bool unwanted = !l->m->n_waiters || l->ms->closing;
    pthread_cond_broadcast(&l->ms->changed);
    pthread_mutex_unlock(&l->ms->mu);
    return unwanted;
}

static int refuse_bytes(const struct models *ms, const struct models_entry *m, const struct held *h,
                        uint64_t need, struct err *e)
{
    return err_set(e, ERR_MEMORY,
                   "%.120s: it needs %.1f MiB, but of the %.1f MiB for all models %.1f MiB are "
                   "held by %s; wait for them, stop one, or allow more memory",
                   m->ref, (double)need / (1 << 20), (double)ms->cfg.budget_bytes / (1 << 20),
                   (double)h->kept_bytes / (1 << 20), h->n_kept ? h->who : "none");
}

/* Under the lock: one that is not needed goes. It is m that needs `need` bytes; 0: nobody knows,
 * but what the device has is too little, as `why` says. 1: there is room; 0: look again; -1: there
 * will be none. */
static int make_room(struct models *ms, const struct models_entry *m, uint64_t need,
                     const struct err *why, struct err *e)
{
    uint64_t sum, budget = ms->cfg.budget_bytes;
    uint32_t most = ms->cfg.max_loaded;
    struct held h;
    count_held(&h, ms, m);
    if (most && h.n_kept >= most)
        return err_set(e, ERR_BUSY,
                       "%.120s: %u models may be loaded at a time, and all are needed: %s", m->ref,
                       most, h.who);
    if (need && budget && (add_over(h.kept_bytes, need, &sum) || sum > budget))
        return refuse_bytes(ms, m, &h, need, e);
    bool fits = need && (!most || h.n < most) && (!budget || h.bytes + need <= budget);
    if (fits)
        return 1;
    struct models_entry *lru = least_recently_used(ms);
    if (lru) {
        unload(ms, lru);
        return 0;
    }
    return err_set(e, why->code, "%s%s%s", why->msg, h.n ? "; loaded are " : "", h.who);
}

static struct engine_config config_for(struct models *ms, struct loading *l)
{
    struct engine_config c = ms->cfg.engine;
    c.prefix_store = ms->cfg.prefix;
    c.prefix_counted = true;
    c.n_ctx = l->m->want_ctx ? l->m->want_ctx : c.n_ctx;
    c.max_bytes = ms->cfg.budget_bytes;
    c.quiet_load = false; /* by its progress a load is cancelled */
    c.progress = load_progress;
    c.user = l;
    return c;
}

/* Without the lock. Others go until it fits; then c->max_bytes is what is left to it. */
static int find_room(struct models *ms, struct models_entry *m, struct model_file *f,
                     struct engine_config *c, struct err *e)
{
    uint64_t budget = ms->cfg.budget_bytes;
    for (int room = 0; !room;) {
        struct engine_placement p = {0};
        struct err why = {0};
        int rc = engine_place_on(&p, f, c, ms->be, &why);
        /* what the whole budget does not hold needs nobody to go */
        if (rc && (why.code != ERR_MEMORY || (budget && p.free_bytes >= budget)))
            return err_set(e, why.code, "%s", why.msg);
        pthread_mutex_lock(&ms->mu);
        room = make_room(ms, m, rc ? 0 : engine_placed_bytes(&p), &why, e);
        struct held h;
        count_held(&h, ms, m);
        c->max_bytes = room > 0 && budget > h.bytes ? budget - h.bytes : budget;
        pthread_mutex_unlock(&ms->mu);
        if (room < 0)
            return -1;
    }
    return 0;
}

/* The engine stays where it is; as long as another shape does not fit beside them, others go. */
static int reshape(struct models *ms, struct models_entry *m, struct model_file *f,
                   struct engine_config *c, struct err *e)
{
    for (;;) {
        struct err why = {0};
        struct held h;
        pthread_mutex_lock(&ms->mu);
        count_held(&h, ms, m);
        pthread_mutex_unlock(&ms->mu);
        if (ms->cfg.budget_bytes) /* 0 would be no bound */
            c->max_bytes = h.bytes < ms->cfg.budget_bytes ? ms->cfg.budget_bytes - h.bytes : 1;
        if (!engine_reshape(&m->en, f, c, &why))
            return 0;
        if (why.code != ERR_MEMORY || !m->en)
            return err_set(e, why.code, "%s", why.msg);
        pthread_mutex_lock(&ms->mu);
        int room = make_room(ms, m, 0, &why, e);
        pthread_mutex_unlock(&ms->mu);
        if (room < 0)
            return -1;
    }
}

/* Without the lock: from the file to an engine of the shape that is wanted. */
static int bring(struct models *ms, struct models_entry *m, struct err *e)
{
    struct loading l = {ms, m};
    struct engine_config c = config_for(ms, &l);
    struct model_file *f = NULL;
    struct key k;
    int rc = -1;
    /* the stamp first: a file that changes in between is seen to differ next time */
    if (key_make(&k, m->ref, e) || model_file_open(&f, ms->cfg.store, m->ref, e))
        goto out;
    if (m->en)
        rc = reshape(ms, m, f, &c, e);
    else if (!find_room(ms, m, f, &c, e))
        rc = engine_open_on(&m->en, f, &c, ms->be, e);
    if (!rc)
        m->stamp = k.stamp;
out:
    model_file_close(f);
    return rc;
}

/* Under the lock: what came of it, for all who wait. */
static void settle(struct models *ms, struct models_entry *m, int rc, const struct err *why)
{
    m->done = m->total = 0;
    m->used_ns = now_ns();
    m->reload = false;
    if (rc)
        m->err = *why;
    m->bytes = 0;
    if (m->en) {
        const struct engine_info *i = engine_info(m->en);
        m->n_refused += rc != 0;
        m->state = MODELS_READY;
        m->bytes = engine_placed_bytes(&i->placement);
        m->n_ctx = i->n_ctx;
        snprintf(m->device, sizeof m->device, "%s", i->describe);
    } else {
        unlink_entry(ms, m);
        m->failed = true;
        if (!m->n_waiters)
            mem_free(m);
    }
    pthread_cond_broadcast(&ms->changed);
}

/* Under the lock, which it leaves meanwhile. */
static void load(struct models *ms, struct models_entry *m)
{
    struct engine *old = m->reload ? m->en : NULL;
    struct err why = {0};
    int rc = 0;
    if (!m->n_waiters) {
        rc = err_set(&why, ERR_CANCELLED, "loading was cancelled");
        settle(ms, m, rc, &why);
        return;
    }
    if (old) {
        m->en = NULL;
        m->bytes = 0;
    }
    pthread_mutex_unlock(&ms->mu);
    engine_close(old);
    rc = bring(ms, m, &why);
    pthread_mutex_lock(&ms->mu);
    settle(ms, m, rc, &why);
}

static struct models_entry *next_wish(const struct models *ms)
{
    struct models_entry *first = NULL;
    for (struct models_entry *m = ms->list; m; m = m->next)
        if (m->state == MODELS_LOADING && (!first || m->number < first->number))
            first = m;
    return first;
}

static void keeper_sleep(struct models *ms, uint64_t until)
{
    struct timespec t = {.tv_sec = (time_t)(until / 1000000000u),
                         .tv_nsec = (long)(until % 1000000000u)};
    ms->sleep_until = until;
    if (until == UINT64_MAX)
        pthread_cond_wait(&ms->wake, &ms->mu);
    else
        pthread_cond_clockwait(&ms->wake, &ms->mu, CLOCK_MONOTONIC, &t);
    ms->sleep_until = 0; /* awake: it looks by itself */
}

static void *keeper_thread(void *arg)
{
    struct models *ms = arg;
    pthread_mutex_lock(&ms->mu);
    while (!ms->closing) {
        uint64_t at;
        struct models_entry *due = first_due(ms, &at), *wish = next_wish(ms);
        if (due && at <= now_ns())
            unload(ms, due);
        else if (wish)
            load(ms, wish);
        else
            keeper_sleep(ms, at);
    }
    while (ms->list)
        unload(ms, ms->list);
    pthread_mutex_unlock(&ms->mu);
    return NULL;
}

/* ---- leases ---- */

static bool asks_to_stop(struct models *ms, const struct models_options *o, uint64_t done,
                         uint64_t total)
{
    if (!o->progress)
        return false;
    pthread_mutex_unlock(&ms->mu);
    bool stop = o->progress(o->user, done, MAX(total, (uint64_t)1));
    pthread_mutex_lock(&ms->mu);
    return stop;
}

static void wait_for_change(struct models *ms, const struct models_options *o)
{
    uint64_t until = now_ns() + POLL_NS;
    struct timespec t = {.tv_sec = (time_t)(until / 1000000000u),
                         .tv_nsec = (long)(until % 1000000000u)};
    if (o->progress)
        pthread_cond_clockwait(&ms->changed, &ms->mu, CLOCK_MONOTONIC, &t);
    else
        pthread_cond_wait(&ms->changed, &ms->mu);
}

/* Under the lock: until the keeper has done what it was asked for. 0: look again. */
static int wait_for_load(struct models *ms, struct models_entry *m, const struct models_options *o,
                         struct err *e)
{
    uint64_t n_refused = m->n_refused;
    bool cancelled = false;
    m->n_waiters++;
    while (m->state == MODELS_LOADING && !m->failed && !cancelled) {
        cancelled = asks_to_stop(ms, o, m->done, m->total);
        if (m->state == MODELS_LOADING && !m->failed && !cancelled)
            wait_for_change(ms, o);
    }
    m->n_waiters--;
    int rc = 0;
    /* what others gave up, or asked for in vain, is not this one's: it looks again */
    bool failed = m->failed && m->err.code != ERR_CANCELLED;
    bool refused = m->n_refused != n_refused && o->n_ctx && o->n_ctx != m->n_ctx;
    if (cancelled)
        rc = err_set(e, ERR_CANCELLED, "loading was cancelled");
    else if (failed || refused)
        rc = err_set(e, m->err.code, "%s", m->err.msg);
    if (!m->failed)
        wake_for(ms, m);
    else if (!m->n_waiters)
        mem_free(m);
    return rc;
}

static struct models_entry *add_entry(struct models *ms, const struct key *k, uint32_t n_ctx,
                                      struct err *e)
{
    struct models_entry *m = mem_zalloc(sizeof *m);
    if (!m) {
        err_set(e, ERR_MEMORY, "out of memory for model '%.200s'", k->ref);
        return NULL;
    }
    memcpy(m->ref, k->ref, sizeof m->ref);
    m->is_path = k->is_path;
    m->keep_ns = ms->cfg.keep_alive_ns;
    m->want_ctx = n_ctx;
    m->number = ms->n_entries++;
    m->next = ms->list;
    ms->list = m;
    pthread_cond_signal(&ms->wake);
    return m;
}

/* Under the lock: is it there as it is wanted? If not, ask the keeper, unless somebody uses it. */
static int ask_for(struct models *ms, struct models_entry *m, const struct key *k,
                   const struct models_options *o, struct err *e)
{
    bool other = o->n_ctx && o->n_ctx != m->n_ctx;
    bool reload = file_changed(m, k) && !in_use(m);
    if (!other && !reload)
        return 0;
    if (in_use(m))
        return err_set(e, ERR_BUSY,
                       "'%.200s' is in use with a context of %u, not %u; try again later, or "
                       "leave the context to the server",
                       k->ref, m->n_ctx, o->n_ctx);
    m->state = MODELS_LOADING;
    m->want_ctx = o->n_ctx ? o->n_ctx : m->n_ctx;
    m->reload = reload;
    pthread_cond_signal(&ms->wake);
    return 0;
}

static void give_lease(struct models *ms, struct models_lease *out, struct models_entry *m,
                       const struct models_options *o)
{
    m->n_leases++;
    m->used_ns = now_ns();
    m->keep_ns = o->has_keep_alive ? o->keep_alive_ns : ms->cfg.keep_alive_ns;
    m->pinned = m->pinned || o->pin;
    m->stop = false;
    *out = (struct models_lease){m->en, m};
}

int models_get(struct models *ms, struct models_lease *out, const char *ref,
               const struct models_options *o, struct err *e)
{
    static const struct models_options none;
    struct key k;
    int rc = 0;
    *out = (struct models_lease){0};
    o = o ? o : &none;
    if (key_make(&k, ref, e))
        return -1;
    pthread_mutex_lock(&ms->mu);
    while (!rc && !out->entry) {
        struct models_entry *m = find_entry(ms, &k);
        if (!m && !(m = add_entry(ms, &k, o->n_ctx, e)))
            rc = -1;
        else if (m->state == MODELS_READY && (rc = ask_for(ms, m, &k, o, e)))
            break;
        else if (m->state == MODELS_READY)
            give_lease(ms, out, m, o);
        else if (m->state == MODELS_LOADING)
            rc = wait_for_load(ms, m, o, e);
        else if (asks_to_stop(ms, o, 0, 1))
            rc = err_set(e, ERR_CANCELLED, "loading was cancelled");
        else if (find_entry(ms, &k) == m)
            wait_for_change(ms, o);
    }
    pthread_mutex_unlock(&ms->mu);
    return rc;
}

void models_release(struct models *ms, struct models_lease *l)
{
    struct models_entry *m = l->entry;
    if (!m)
        return;
    pthread_mutex_lock(&ms->mu);
    CHECK(m->n_leases);
    m->n_leases--;
    m->used_ns = now_ns();
    wake_for(ms, m);
    pthread_mutex_unlock(&ms->mu);
    *l = (struct models_lease){0};
}

/* ---- what people ask ---- */

static int not_loaded(const struct key *k, struct err *e)
{
    return err_set(e, ERR_NOT_FOUND, "'%.200s' is not loaded", k->ref);
}

int models_unload(struct models *ms, const char *ref, struct err *e)
{
    struct key k;
    if (key_make(&k, ref, e))
        return -1;
    pthread_mutex_lock(&ms->mu);
    struct models_entry *m = find_entry(ms, &k);
    uint64_t number = m ? m->number : 0;
    int rc = m ? 0 : not_loaded(&k, e);
    if (m && m->state != MODELS_UNLOADING) {
        m->stop = true;
        m->pinned = false;
        wake_for(ms, m);
    }
    /* until it is gone, or somebody has taken it */
    while (m && m->number == number && (m->state == MODELS_UNLOADING || (m->stop && !in_use(m)))) {
        pthread_cond_wait(&ms->changed, &ms->mu);
        m = find_entry(ms, &k);
    }
    pthread_mutex_unlock(&ms->mu);
    return rc;
}

int models_pin(struct models *ms, const char *ref, bool pinned, struct err *e)
{
    struct key k;
    if (key_make(&k, ref, e))
        return -1;
    pthread_mutex_lock(&ms->mu);
    struct models_entry *m = find_entry(ms, &k);
    int rc = m && m->state != MODELS_UNLOADING ? 0 : not_loaded(&k, e);
    if (!rc) {
        m->pinned = pinned;
        wake_for(ms, m);
    }
    pthread_mutex_unlock(&ms->mu);
    return rc;
}

static void status_of(struct models_status *s, const struct models_entry *m)
{
    *s = (struct models_status){.state = m->state,
                                .bytes = m->bytes,
                                .done_bytes = m->done,
                                .total_bytes = m->total,
                                .n_leases = m->n_leases,
                                .n_ctx = m->n_ctx,
                                .pinned = m->pinned};
    s->expires_ns = expires(m, in_use(m) ? now_ns() : m->used_ns);
    snprintf(s->ref, sizeof s->ref, "%.511s", m->ref);
    snprintf(s->device, sizeof s->device, "%s", m->device);
}

/* The one used last before `after`, with the number below `number` among equals. */
static const struct models_entry *used_before(const struct models *ms,
                                              const struct models_entry *after)
{
    const struct models_entry *best = NULL;
    for (const struct models_entry *m = ms->list; m; m = m->next) {
        bool later = after && (m->used_ns > after->used_ns ||
                               (m->used_ns == after->used_ns && m->number >= after->number));
        if (!later && (!best || m->used_ns > best->used_ns ||
                       (m->used_ns == best->used_ns && m->number > best->number)))
            best = m;
    }
    return best;
}

size_t models_list(struct models *ms, struct models_status *out, size_t max)
{
    size_t n = 0;
    pthread_mutex_lock(&ms->mu);
    const struct models_entry *m = used_before(ms, NULL);
    for (; m; m = used_before(ms, m), n++)
        if (n < max)
            status_of(&out[n], m);
    pthread_mutex_unlock(&ms->mu);
    return n;
}

/* ---- opening and closing ---- */

int models_open_on(struct models **out, const struct models_config *c, const struct backend *be,
                   struct err *e)
{
    struct models *ms = mem_zalloc(sizeof *ms);
    if (!ms)
        return err_set(e, ERR_MEMORY, "out of memory for the list of models");
    ms->cfg = *c;
    ms->be = be;
    pthread_mutex_init(&ms->mu, NULL);
    pthread_cond_init(&ms->wake, NULL);
    pthread_cond_init(&ms->changed, NULL);
    int rc = pthread_create(&ms->keeper, NULL, keeper_thread, ms);
    if (!rc) {
        *out = ms;
        return 0;
    }
    pthread_cond_destroy(&ms->changed);
    pthread_cond_destroy(&ms->wake);
    pthread_mutex_destroy(&ms->mu);
    mem_free(ms);
    return err_set(e, ERR_IO, "cannot start the thread that loads models: %s", strerror(rc));
}

int models_open(struct models **out, const struct models_config *c, struct err *e)
{
    const struct backend *be;
    if (backend_choose(&be, c->engine.backend, e))
        return -1;
    return models_open_on(out, c, be, e);
}

void models_close(struct models *ms)
{
    if (!ms)
        return;
    pthread_mutex_lock(&ms->mu);
    for (const struct models_entry *m = ms->list; m; m = m->next)
        CHECK(!m->n_leases && !m->n_waiters);
    ms->closing = true;
    pthread_cond_signal(&ms->wake);
    pthread_mutex_unlock(&ms->mu);
    pthread_join(ms->keeper, NULL);
    pthread_cond_destroy(&ms->changed);
    pthread_cond_destroy(&ms->wake);
    pthread_mutex_destroy(&ms->mu);
    mem_free(ms);
}
