/* models: several models in one process. Engines are loaded when somebody asks for them, counted in
 * bytes, and unloaded when they have not been used for a while or when their room is needed: the
 * least recently used first, never one in use or pinned. What an engine knows of prompts goes to
 * the persistent tier before it closes, so that coming back costs the weights only. */
#ifndef INGOT_MODELS_H
#define INGOT_MODELS_H

#include "engine/engine.h"

struct models;
struct models_entry;

struct models_config {           /* models_defaults fills it */
    struct store *store;         /* for names; NULL: paths only. Outlives the models */
    struct prefix_store *prefix; /* the tier that survives; outlives them too. NULL: none */
    /* Of every engine, but for what is said here: prefix_store, prefix_counted, max_bytes,
     * progress and user are set by the models. Its strings stay the caller's. */
    struct engine_config engine;
    uint64_t budget_bytes; /* of all engines together, as placed, without what the prefix store
                              they share takes itself; 0: what the device has free */
    uint32_t max_loaded;   /* engines at the same time; 0: no bound but the bytes */
    int64_t keep_alive_ns; /* an engine stays so long after its last use: 0 goes at once, below 0
                              stays until its room is needed */
};
void models_defaults(struct models_config *c); /* all zero, and five minutes */

/* Starts one thread, which loads and unloads. It sleeps until something is asked or due. */
int models_open(struct models **out, const struct models_config *c, struct err *e);
/* Unloads all. Every lease must be back and no other call under way. NULL is fine. */
void models_close(struct models *ms);

struct models_options { /* zero: as it is loaded, else the defaults */
    uint32_t n_ctx;     /* another context length than the loaded one keeps the weights */
    bool has_keep_alive;
    int64_t keep_alive_ns; /* instead of the default, from this use on */
    bool pin;              /* as models_pin */
    /* Called on the calling thread while it waits, some 20 times a second; non-zero ends the wait
     * with ERR_CANCELLED. The load goes on as long as anybody waits for it. NULL: none. */
    store_progress progress;
    void *user;
};

struct models_lease {
    struct engine *engine; /* stays until the lease is given back */
    struct models_entry *entry;
};
/* A lease on the engine of `ref` (a name in the store or a path to a .gguf), loaded if it is not
 * there. All who ask for one model share one load. A plain file that has changed is loaded anew
 * once nobody uses it. o may be NULL. ERR_MEMORY: it does not fit beside what may not go (with the
 * numbers and who that is); ERR_BUSY: it is in use with another context, or as many models are as
 * may be. A failed load leaves nothing behind. From any thread. */
int models_get(struct models *ms, struct models_lease *out, const char *ref,
               const struct models_options *o, struct err *e);
void models_release(struct models *ms, struct models_lease *l); /* l is empty then */

/* Let it go: now (and wait for that, also for a load of another model that is under way), or with
 * its last lease. Also when it is pinned.
 * ERR_NOT_FOUND: it is not loaded. */
int models_unload(struct models *ms, const char *ref, struct err *e);
/* A pinned model goes neither for room nor for want of use. ERR_NOT_FOUND: it is not loaded. */
int models_pin(struct models *ms, const char *ref, bool pinned, struct err *e);

enum models_state { MODELS_LOADING, MODELS_READY, MODELS_UNLOADING };
struct models_status {
    char ref[512], device[64]; /* the canonical path or the name; the device's own words */
    enum models_state state;
    uint64_t bytes;      /* as placed; 0 while it is not */
    uint64_t expires_ns; /* of now_ns; UINT64_MAX: not by itself. In use: counted from now */
    uint64_t done_bytes, total_bytes; /* of loading */
    uint32_t n_leases, n_ctx;
    bool pinned;
};
/* Fill at most max entries, the latest used first; returns how many there are. */
size_t models_list(struct models *ms, struct models_status *out, size_t max);

#endif
