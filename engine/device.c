/* Devices that engines share: at most one opened device for a backend, index and thread count in
 * the process, counted by its users and closed by the last. A backend lets one thread at a time
 * touch a device, so what engines do on it passes here, in order of arrival: none waits for more
 * than one step (or one weight) of each of the others. Owns the devices, knows no models. */
#include "engine/engine_internal.h"

struct shared_device {
    const struct backend *be;
    int index;
    int32_t n_threads; /* as asked for */
    struct device *dev;
    uint32_t n_users; /* under table_mu, as the list is */
    struct shared_device *next;
    pthread_mutex_t mu;
    pthread_cond_t turn;
    uint64_t n_tickets, serving; /* under mu */
};

static pthread_mutex_t table_mu = PTHREAD_MUTEX_INITIALIZER;
static struct shared_device *table;

static int open_shared(struct shared_device **out, const struct backend *be, int index,
                       int32_t n_threads, struct err *e)
{
    struct shared_device *s = mem_zalloc(sizeof *s);
    struct device_config c = {.n_threads = n_threads};
    if (!s)
        return err_set(e, ERR_MEMORY, "out of memory opening backend '%s'", be->name);
    *s = (struct shared_device){.be = be, .index = index, .n_threads = n_threads};
    if (be->open(&s->dev, index, &c, e)) {
        mem_free(s);
        return -1;
    }
    pthread_mutex_init(&s->mu, NULL);
    pthread_cond_init(&s->turn, NULL);
    s->next = table;
    table = s;
    *out = s;
    return 0;
}

int shared_device_take(struct shared_device **out, const struct backend *be, int index,
                       int32_t n_threads, struct err *e)
{
    int rc = 0;
    pthread_mutex_lock(&table_mu);
    struct shared_device *s = table;
    while (s && !(s->be == be && s->index == index && s->n_threads == n_threads))
        s = s->next;
    if (!s)
        rc = open_shared(&s, be, index, n_threads, e);
    if (!rc)
        s->n_users++;
    pthread_mutex_unlock(&table_mu);
    *out = rc ? NULL : s;
    return rc;
}

void shared_device_drop(struct shared_device *s)
{
    if (!s)
        return;
    pthread_mutex_lock(&table_mu);
    bool last = !--s->n_users;
    if (last) {
        struct shared_device **at = &table;
        while (*at != s)
            at = &(*at)->next;
        *at = s->next;
    }
    pthread_mutex_unlock(&table_mu);
    if (!last)
        return;
    s->be->close(s->dev);
    pthread_cond_destroy(&s->turn);
    pthread_mutex_destroy(&s->mu);
    mem_free(s);
}

struct device *shared_device_get(const struct shared_device *s)
{
    return s->dev;
}

/* A plain mutex would let the engine that just had its step have the next one too. */
static void enter(struct shared_device *s)
{
    pthread_mutex_lock(&s->mu);
    uint64_t ticket = s->n_tickets++;
    while (s->serving != ticket)
        pthread_cond_wait(&s->turn, &s->mu);
    pthread_mutex_unlock(&s->mu);
}

static void leave(struct shared_device *s)
{
    pthread_mutex_lock(&s->mu);
    s->serving++;
    if (s->serving != s->n_tickets)
        pthread_cond_broadcast(&s->turn);
    pthread_mutex_unlock(&s->mu);
}

int shared_load(struct shared_device *s, struct weight **out, const struct weight_src *src,
                struct err *e)
{
    enter(s);
    int rc = s->be->load(s->dev, out, src, e);
    leave(s);
    return rc;
}

void shared_unload(struct shared_device *s, struct weight *w)
{
    enter(s);
    s->be->unload(s->dev, w);
    leave(s);
}

int shared_prepare(struct shared_device *s, struct exec **out, const struct plan *p, struct err *e)
{
    enter(s);
    int rc = s->be->prepare(s->dev, out, p, e);
    leave(s);
    return rc;
}

void shared_exec_free(struct shared_device *s, struct exec *x)
{
    enter(s);
    s->be->exec_free(x);
    leave(s);
}

int shared_run(struct shared_device *s, struct exec *x, const struct batch *b, struct err *e)
{
    enter(s);
    int rc = s->be->run(x, b, e);
    leave(s);
    return rc;
}

int shared_kv_read(struct shared_device *s, struct exec *x, void *dst, int32_t page, struct err *e)
{
    enter(s);
    int rc = s->be->kv_read(x, dst, page, e);
    leave(s);
    return rc;
}

int shared_kv_write(struct shared_device *s, struct exec *x, int32_t page, const void *src,
                    struct err *e)
{
    enter(s);
    int rc = s->be->kv_write(x, page, src, e);
    leave(s);
    return rc;
}

void shared_kv_copy(struct shared_device *s, struct exec *x, int32_t to, int32_t from)
{
    enter(s);
    s->be->kv_copy(x, to, from);
    leave(s);
}
