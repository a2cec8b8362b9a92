/* Where the engine meets text: the model's tokenizer and chat template, what the file recommends
 * for sampling, and messages to token ids. Renders for the caller's thread; changes nothing after
 * the engine is open. */
#include "engine/engine_internal.h"

#include <jansson.h>
#include <math.h>
#include <string.h>

/* ---- sampling recommended by the file ---- */

static const struct {
    const char *key;
    size_t at;
    bool whole; /* an int32_t, else a float */
} sampling_keys[] = {
    {"general.sampling.temp", offsetof(struct sample_params, temperature), false},
    {"general.sampling.top_k", offsetof(struct sample_params, top_k), true},
    {"general.sampling.top_p", offsetof(struct sample_params, top_p), false},
    {"general.sampling.min_p", offsetof(struct sample_params, min_p), false},
    {"general.sampling.xtc_probability", offsetof(struct sample_params, xtc_probability), false},
    {"general.sampling.xtc_threshold", offsetof(struct sample_params, xtc_threshold), false},
    {"general.sampling.penalty_last_n", offsetof(struct sample_params, repeat_last_n), true},
    {"general.sampling.penalty_repeat", offsetof(struct sample_params, repeat_penalty), false},
    {"general.sampling.mirostat", offsetof(struct sample_params, mirostat), true},
    {"general.sampling.mirostat_tau", offsetof(struct sample_params, mirostat_tau), false},
    {"general.sampling.mirostat_eta", offsetof(struct sample_params, mirostat_eta), false},
};

/* A recommendation that makes no sense is left aside with a line in the log: it is only advice. */
static void read_sampling(struct sample_params *p, const struct gguf *g)
{
    sample_defaults(p);
    for (size_t i = 0; i < ARRAY_LEN(sampling_keys); i++) {
        const struct gguf_kv *kv = gguf_find(g, sampling_keys[i].key);
        if (!kv)
            continue;
        if (kv->type == GGUF_STRING || kv->type == GGUF_ARRAY) {
            log_line(LOG_WARN, "%s is not a number; ignored", sampling_keys[i].key);
            continue;
        }
        double v = gguf_kv_number(kv, 0);
        struct sample_params next = *p;
        struct err why = {0};
        if (!sampling_keys[i].whole) {
            float f = (float)v;
            memcpy((char *)&next + sampling_keys[i].at, &f, sizeof f);
        } else if (v >= INT32_MIN && v <= INT32_MAX && v == floor(v)) {
            int32_t n = (int32_t)v;
            memcpy((char *)&next + sampling_keys[i].at, &n, sizeof n);
        } else {
            err_set(&why, ERR_CORRUPT, "it must be a whole number of 32 bits");
        }
        if (why.code || sample_check(&next, &why))
            log_line(LOG_WARN, "%s is %g; ignored: %s", sampling_keys[i].key, v, why.msg);
        else
            *p = next;
    }
}

void engine_sample_defaults(struct sample_params *p, const struct engine *en)
{
    *p = en->sample;
}

/* ---- opening ---- */

int engine_read_text(struct engine *en, const struct gguf *g, struct err *e)
{
    struct gguf_str src = {0};
    if (tokenizer_new(&en->tok, g, e))
        return -1;
    uint32_t n_vocab = en->ld.model.hp.n_vocab;
    if (tokenizer_n_vocab(en->tok) != n_vocab)
        return err_set(e, ERR_CORRUPT,
                       "tensor token_embd.weight has %u rows, but the tokenizer has %u tokens",
                       n_vocab, tokenizer_n_vocab(en->tok));
    for (uint32_t id = 0; id < n_vocab; id++) {
        size_t n;
        tokenizer_piece(en->tok, (int32_t)id, &n);
        en->max_piece = MAX(en->max_piece, n);
    }
    if (gguf_get_str(g, "tokenizer.chat_template", &src, e))
        return -1;
    if (src.n && template_new(&en->tmpl, src.p, src.n, &en->tmpl_err)) {
        if (en->tmpl_err.code == ERR_MEMORY)
            return err_set(e, ERR_MEMORY, "%s", en->tmpl_err.msg);
        log_line(LOG_WARN, "the model's chat template cannot be used: %s", en->tmpl_err.msg);
    }
    read_sampling(&en->sample, g);
    return 0;
}

/* ---- messages to ids ---- */

static void put_piece(struct buf *out, const struct tokenizer *t, int32_t id)
{
    size_t n = 0;
    const char *p = id >= 0 ? tokenizer_piece(t, id, &n) : "";
    buf_put(out, p, n);
}

/* The id that the tokenizer puts in front of every text by itself, or -1. */
static int leading_id(int32_t *id, const struct tokenizer *t, struct err *e)
{
    struct ids none = {0};
    *id = -1;
    int rc = tokenizer_encode(&none, t, "", 0, TOKENIZE_ADD_SPECIAL, e);
    if (!rc && none.n && none.v[0] == tokenizer_bos(t))
        *id = none.v[0];
    ids_fini(&none);
    return rc;
}

static int render(struct buf *text, const struct engine *en, const struct template_args *in,
                  struct err *e)
{
    struct template_args a = *in;
    struct buf bos = {0}, eos = {0};
    put_piece(&bos, en->tok, tokenizer_bos(en->tok));
    put_piece(&eos, en->tok, tokenizer_eos(en->tok));
    a.bos_token = buf_str(&bos);
    a.eos_token = buf_str(&eos);
    int rc = bos.failed || eos.failed ? err_set(e, ERR_MEMORY, "out of memory for a chat prompt")
                                      : template_render(text, en->tmpl, &a, e);
    if (!rc && text->failed)
        rc = err_set(e, ERR_MEMORY, "out of memory for a chat prompt");
    buf_fini(&bos);
    buf_fini(&eos);
    return rc;
}

int engine_chat_ids(struct ids *out, const struct engine *en, const struct json_t *messages,
                    const struct json_t *tools, const struct json_t *extra, struct err *e)
{
    struct template_args a = {
        .messages = messages, .tools = tools, .extra = extra, .add_generation_prompt = true};
    struct buf text = {0};
    struct ids ids = {0};
    int32_t bos;
    int rc = -1;
    if (!en->tmpl) {
        if (en->tmpl_err.code)
            return err_set(e, en->tmpl_err.code, "the model's chat template cannot be used: %s",
                           en->tmpl_err.msg);
        return err_set(e, ERR_UNSUPPORTED,
                       "the model has no chat template (tokenizer.chat_template); give it plain "
                       "text to complete instead of messages");
    }
    if (render(&text, en, &a, e) || leading_id(&bos, en->tok, e) ||
        tokenizer_encode(&ids, en->tok, buf_str(&text), text.n, TOKENIZE_PARSE_SPECIAL, e))
        goto out;
    if (bos >= 0 && (!ids.n || ids.v[0] != bos))
        ids_put(out, bos);
    for (size_t i = 0; i < ids.n; i++)
        ids_put(out, ids.v[i]);
    if (ids.failed || out->failed) {
        err_set(e, ERR_MEMORY, "out of memory for a chat prompt");
        goto out;
    }
    rc = 0;
out:
    buf_fini(&text);
    ids_fini(&ids);
    return rc;
}
