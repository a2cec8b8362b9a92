/* The option tables that several commands share, and opening stores, models and engines the way
 * every command does it. Owns nothing; what it opens is the caller's. */
#include "cli/cli_internal.h"

#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define AT(field) offsetof(struct common_opts, field)
const struct option common_options[] = {
    {"home", NULL, 0, false, OPTION_STR, "DIR", AT(home), 0, 0,
     "The store's directory (default: $INGOT_HOME, else ~/.ingot)"},
    {"verbose", NULL, 'v', true, OPTION_FLAG, NULL, AT(verbose), 0, 0,
     "Say more on standard error"},
    {"quiet", NULL, 'q', true, OPTION_FLAG, NULL, AT(quiet), 0, 0, "Only results and errors"},
    {"help", NULL, 'h', false, OPTION_FLAG, NULL, AT(help), 0, 0, "Show this"},
    {0},
};
#undef AT

#define KV_NAMES  "f16|bf16|f32|q8_0|q4_0" /* in the order of enum kv_type */
#define AT(field) offsetof(struct engine_opts, field)
const struct option engine_options[] = {
    {"ctx", "ctx-size num-ctx max-model-len", 'c', true, OPTION_U32, "N", AT(ctx), 0, 0,
     "Context in tokens (default of run: the model's, at most 8192)"},
    {"threads", "num-thread", 't', true, OPTION_I32, "N", AT(threads), 0, 4096,
     "Threads (default: every processor it may use)"},
    {"backend", "device", 0, true, OPTION_STR, "NAME", AT(backend), 0, 0,
     "auto or cpu (default: auto; see `ingot devices`)"},
    {"kv", "kv-cache-dtype", 0, true, OPTION_CHOICE, KV_NAMES, AT(kv), 0, 0,
     "Type of the key/value cache (default: f16)"},
    {"kv-keys", "kv-k cache-type-k", 0, true, OPTION_CHOICE, "auto|" KV_NAMES, AT(kv_keys), 0, 0,
     "Of its keys (default: auto, as --kv)"},
    {"kv-values", "kv-v cache-type-v", 0, true, OPTION_CHOICE, "auto|" KV_NAMES, AT(kv_values), 0,
     0, "Of its values (default: auto, as --kv)"},
    {"max-batch", "batch-size max-num-batched-tokens", 'b', true, OPTION_U32, "N", AT(max_batch), 0,
     65536, "Prompt tokens in one step at most (default: 512)"},
    {0},
};
#undef AT

bool ref_is_path(const char *ref)
{
    size_t n = strlen(ref);
    return strchr(ref, '/') || (n >= 5 && !strcmp(ref + n - 5, ".gguf"));
}

int open_store(struct store **out, const struct common_opts *c, struct err *e)
{
    return store_open(out, c->home, e);
}

int model_ref_open(struct model_ref *s, const char *ref, const struct common_opts *c, struct err *e)
{
    if (!ref_is_path(ref) && open_store(&s->store, c, e))
        return -1;
    struct err fe = {0};
    if (model_file_open(&s->file, s->store, ref, &fe) == 0)
        return 0;
    if (fe.code == ERR_NOT_FOUND && ref_is_path(ref) && access(ref, F_OK))
        return err_set(e, ERR_NOT_FOUND,
                       "no file '%s'; check the path (`ingot list` shows the names in "
                       "the store)",
                       ref);
    *e = fe;
    return -1;
}

void model_ref_open_prefix(struct model_ref *s, const struct common_opts *c)
{
    struct err e = {0};
    if ((!s->store && open_store(&s->store, c, &e)) ||
        prefix_open(&s->prefix, store_home(s->store), NULL, &e))
        log_line(LOG_WARN, "nothing is kept for the next start: %s", e.msg);
}

void model_ref_close(struct model_ref *s)
{
    prefix_close(s->prefix);
    model_file_close(s->file);
    store_close(s->store);
    *s = (struct model_ref){0};
}

int model_ref_template(struct gguf_str *out, const struct model_ref *s, struct err *e)
{
    *out = (struct gguf_str){0};
    return gguf_get_str(model_file_gguf(s->file), "tokenizer.chat_template", out, e);
}

int cpu_count(void)
{
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0)
        return MAX(1, CPU_COUNT(&set));
    return MAX(1, (int)sysconf(_SC_NPROCESSORS_ONLN));
}

void format_kv(char out[64], const struct engine_placement *p)
{
    char bytes[16];
    format_bytes(bytes, p->kv_bytes);
    if (p->kv_key_type == p->kv_value_type)
        snprintf(out, 64, "%s of %s", bytes, kv_type_name(p->kv_key_type));
    else
        snprintf(out, 64, "%s of %s keys and %s values", bytes, kv_type_name(p->kv_key_type),
                 kv_type_name(p->kv_value_type));
}

json_t *kv_json(const struct engine_placement *p)
{
    return json_pack("{ss ss sI}", "keys", kv_type_name(p->kv_key_type), "values",
                     kv_type_name(p->kv_value_type), "bytes", (json_int_t)p->kv_bytes);
}

int load_engine(struct engine **out, struct model_ref *s, const struct engine_opts *o,
                const struct common_opts *c, struct err *e)
{
    const struct backend *b;
    if (backend_choose(&b, o->backend, e))
        return e->code == ERR_USAGE ? COMMAND_USAGE : -1;
    struct progress p;
    progress_begin(&p, "loading", 0.3, c->quiet);
    struct engine_config cfg = {
        .backend = o->backend,
        .n_threads = o->threads,
        .n_ctx = o->ctx,
        .n_seqs = o->n_seqs,
        .queue_len = o->queue_len,
        .max_batch = o->max_batch,
        .max_step_ms = o->max_step_ms,
        .kv_pages = o->kv_pages,
        .swap_bytes = (uint64_t)o->swap_mb << 20,
        .prefix_ram_bytes = (uint64_t)o->prefix_ram_mb << 20,
        .share_prefix = o->share_prefix,
        .kv_key_type = (enum kv_type)(o->kv_keys ? o->kv_keys - 1 : o->kv),
        .kv_value_type = (enum kv_type)(o->kv_values ? o->kv_values - 1 : o->kv),
        .prefix_store = s->prefix,
        .progress = progress_tick,
        .user = &p,
    };
    int rc = engine_open(out, s->file, &cfg, e);
    progress_end(&p, NULL);
    if (rc)
        return rc;
    const struct engine_info *i = engine_info(*out);
    char kv[64];
    format_kv(kv, &i->placement);
    struct buf memory = {0};
    format_memory(&memory, &i->placement, mem_resident_bytes());
    log_line(LOG_INFO, "%s on %s: context %u, KV %s, loaded in %.2f s", i->name, i->describe,
             i->n_ctx, kv, i->load_seconds);
    log_line(LOG_INFO, "memory: %s", buf_str(&memory));
    buf_fini(&memory);
    return 0;
}

/* ---- memory ---- */

void format_memory(struct buf *out, const struct engine_placement *p, uint64_t resident)
{
    const struct {
        const char *name;
        uint64_t n_bytes;
    } parts[] = {{"weights", p->weight_bytes},
                 {"KV", p->kv_bytes},
                 {"scratch", p->scratch_bytes},
                 {"host", p->host_bytes},
                 {"swap", p->swap_bytes}};
    char bytes[16];
    const char *gap = "";
    format_bytes(bytes, engine_placed_bytes(p));
    buf_printf(out, "placed %s (", bytes);
    for (size_t i = 0; i < ARRAY_LEN(parts); i++) {
        if (!parts[i].n_bytes)
            continue;
        format_bytes(bytes, parts[i].n_bytes);
        buf_printf(out, "%s%s %s", gap, parts[i].name, bytes);
        gap = ", ";
    }
    buf_putc(out, ')');
    if (!resident)
        return;
    format_bytes(bytes, resident);
    buf_printf(out, ", resident %s", bytes);
}

json_t *memory_json(const struct engine_placement *p, uint64_t resident)
{
    json_t *j =
        json_pack("{sI sI sI sI sI sI}", "placed", (json_int_t)engine_placed_bytes(p), "weights",
                  (json_int_t)p->weight_bytes, "kv", (json_int_t)p->kv_bytes, "scratch",
                  (json_int_t)p->scratch_bytes, "host", (json_int_t)p->host_bytes, "swap",
                  (json_int_t)p->swap_bytes);
    if (j && resident)
        json_object_set_new(j, "resident", json_integer((json_int_t)resident));
    return j;
}
