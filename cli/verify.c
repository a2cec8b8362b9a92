/* ingot verify: the structural check of a GGUF file without loading it; of a model in the store,
 * every checksum as well. */
#include "cli/cli_internal.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

struct verify_opts {
    struct common_opts common;
    bool deep, json;
};

#define AT(field) offsetof(struct verify_opts, field)
static const struct option verify_options[] = {
    {"deep", NULL, 0, false, OPTION_FLAG, NULL, AT(deep), 0, 0,
     "Read the weights too: no NaN or infinite scale"},
    {"json", NULL, 0, false, OPTION_FLAG, NULL, AT(json), 0, 0, "For programs"},
    {0},
};
#undef AT

/* Reading a tensor from the store checks the checksums of its chunks. */
static int read_weights(struct model_ref *s, const struct common_opts *c, struct err *e)
{
    const struct gguf *g = model_file_gguf(s->file);
    uint64_t total = 0, done = 0;
    for (uint64_t i = 0; i < g->n_tensors; i++)
        total += g->tensors[i].n_bytes;
    void *chunk = mem_alloc(STORE_CHUNK_BYTES);
    if (!chunk)
        return err_set(e, ERR_MEMORY, "out of memory for one chunk of weights");
    struct progress p;
    progress_begin(&p, "verifying", 0.3, c->quiet);
    int rc = 0;
    for (uint64_t i = 0; i < g->n_tensors && !rc; i++) {
        const struct gguf_tensor *t = &g->tensors[i];
        for (uint64_t at = 0; at < t->n_bytes && !rc;) {
            size_t n = MIN(t->n_bytes - at, (uint64_t)STORE_CHUNK_BYTES);
            rc = model_file_read(s->file, t, chunk, at, n, e);
            at += n;
            done += n;
            if (!rc && progress_tick(&p, done, total))
                rc = err_set(e, ERR_CANCELLED, "verify was interrupted");
        }
    }
    progress_end(&p, NULL);
    mem_free(chunk);
    return rc;
}

static int report(const struct verify_opts *o, const char *ref, const struct gguf *g,
                  const char *what, struct err *e)
{
    uint64_t n_bytes = 0;
    for (uint32_t i = 0; g && i < g->n_shards; i++)
        n_bytes += g->shards[i].file_bytes;
    if (o->json) {
        /* The finding is data here; the exit status says it too. */
        json_t *j = json_pack("{so sb}", "file", json_text(ref, strlen(ref)), "ok", !e->code);
        if (j && e->code)
            json_object_set_new(j, "error", json_text(e->msg, strlen(e->msg)));
        else if (j)
            json_object_update_new(j, json_pack("{sI sI sI sI}", "version", (json_int_t)g->version,
                                                "tensors", (json_int_t)g->n_tensors, "keys",
                                                (json_int_t)g->n_kv, "bytes", (json_int_t)n_bytes));
        bool failed = e->code != 0;
        *e = (struct err){0}; /* it is said */
        return print_json(j, e) || failed ? -1 : 0;
    }
    if (e->code)
        return -1;
    char bytes[16];
    format_bytes(bytes, n_bytes);
    if (!o->common.quiet)
        printf("%s: %s (GGUF version %u, %" PRIu64 " tensors, %" PRIu64 " keys, %s)\n", ref, what,
               g->version, g->n_tensors, g->n_kv, bytes);
    return 0;
}

static int verify_run(const struct command_args *a, struct err *e)
{
    const struct verify_opts *o = a->opts;
    const char *ref = a->words[0];
    struct gguf *g = NULL;
    struct model_ref s = {0};
    struct stat st;
    int rc;
    /* A word without a slash may be a file of any name; the store is asked when there is none. */
    if (ref_is_path(ref) || (stat(ref, &st) == 0 && S_ISREG(st.st_mode))) {
        if (gguf_open(&g, ref, e) == 0)
            gguf_verify(g, o->deep, e);
        rc = report(o, ref, g,
                    o->deep ? "ok, every weight read: no NaN or infinite scale"
                            : "header and sizes ok, weights not read (--deep reads them)",
                    e);
    } else if (o->deep) {
        rc = usage_error(e, "verify: --deep is for files; of a model in the store every checksum "
                            "is checked without it");
    } else {
        if (model_ref_open(&s, ref, &o->common, e) == 0 &&
            gguf_verify(model_file_gguf(s.file), false, e) == 0)
            read_weights(&s, &o->common, e);
        rc = report(o, ref, s.file ? model_file_gguf(s.file) : NULL,
                    "ok, every weight read and every checksum right", e);
    }
    gguf_free(g);
    model_ref_close(&s);
    return rc;
}

const struct command command_verify = {
    .name = "verify",
    .summary = "check a GGUF file without loading it",
    .usage = "FILE.gguf [--deep] [--json]",
    .about = "Check a file's header, keys, tensor table and sizes; exit status 1 and one line for\n"
             "the first finding. With a name, check a model in the store and all its checksums.",
    .examples = "  ingot verify model.gguf\n"
                "  ingot verify --deep model.gguf\n"
                "  ingot verify smollm2\n",
    .opts_bytes = sizeof(struct verify_opts),
    .groups = {{"Verify", verify_options, 0}, COMMON_GROUP},
    .min_words = 1,
    .max_words = 1,
    .run = verify_run,
};
