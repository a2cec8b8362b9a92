/* ingot eval: what a model computes, as numbers: the logits of given ids, or the perplexity of a
 * text. Runs on the engine thread's callbacks; owns its output file and its sums. */
#include "cli/cli_internal.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

struct eval_opts {
    struct common_opts common;
    struct engine_opts engine;
    const char *tokens, *logits, *text;
    bool json;
};

#define AT(field) offsetof(struct eval_opts, field)
static const struct option eval_options[] = {
    {"tokens", NULL, 0, false, OPTION_STR, "IDS", AT(tokens), 0, 0,
     "Token ids to evaluate as one sequence: 1,2,3"},
    {"logits", NULL, 'o', false, OPTION_STR, "FILE", AT(logits), 0, 0,
     "Where their logits go: little-endian float32, one row a position"},
    {"text", NULL, 'f', false, OPTION_STR, "FILE", AT(text), 0, 0,
     "Text whose perplexity is measured; - is standard input"},
    {"json", NULL, 0, false, OPTION_FLAG, NULL, AT(json), 0, 0, "For programs"},
    {0},
};
#undef AT

enum { EVAL_WINDOW = 512, EVAL_MIN_WINDOW = 4, EVAL_MAX_TEXT = 1 << 30 };

static int run_ids(struct engine *en, struct request *r, struct err *e)
{
    struct request_stats s;
    r->max_tokens = 1;
    r->no_reuse = true;
    sample_defaults(&r->sample);
    r->sample.temperature = 0;
    return engine_run(en, r, &s, e);
}

/* ---- logits of ids ---- */

struct logits_out {
    FILE *file;
    uint32_t n_vocab, n_rows;
    int error; /* errno of the first failed write */
};

static void write_row(void *user, uint32_t pos, const float *logits)
{
    struct logits_out *o = user;
    o->n_rows++;
    if (!o->error && fwrite(logits, sizeof *logits, o->n_vocab, o->file) != o->n_vocab)
        o->error = errno ? errno : EIO;
}

/* What the engine would refuse, before a file of that name is overwritten. */
static int check_ids(const struct engine_info *i, const struct ids *ids, struct err *e)
{
    for (size_t k = 0; k < ids->n; k++)
        if (ids->v[k] < 0 || (uint32_t)ids->v[k] >= i->n_vocab)
            return err_set(e, ERR_USAGE, "--tokens: token %d is outside the vocabulary (0 to %u)",
                           ids->v[k], i->n_vocab - 1);
    if (ids->n > i->n_ctx)
        return err_set(e, ERR_LIMIT, "--tokens: %zu tokens are more than the context of %u holds",
                       ids->n, i->n_ctx);
    return 0;
}

static int eval_tokens(const struct eval_opts *o, struct engine *en, const struct ids *ids,
                       struct err *e)
{
    struct logits_out out = {.n_vocab = engine_info(en)->n_vocab};
    struct request r = {.ids = ids->v, .n_ids = ids->n, .on_logits = write_row, .user = &out};
    if (check_ids(engine_info(en), ids, e))
        return -1;
    out.file = fopen(o->logits, "wbe");
    if (!out.file)
        return err_errno(e, "cannot write %s", o->logits);
    int rc = run_ids(en, &r, e);
    if (fclose(out.file) && !out.error)
        out.error = errno;
    if (!rc && out.error) {
        errno = out.error;
        rc = err_errno(e, "cannot write %s", o->logits);
    }
    struct stat st;
    if (rc && stat(o->logits, &st) == 0 && S_ISREG(st.st_mode))
        unlink(o->logits);
    if (rc)
        return rc;
    if (o->json)
        return print_json(json_pack("{so sI sI}", "logits", json_text(o->logits, strlen(o->logits)),
                                    "rows", (json_int_t)out.n_rows, "width",
                                    (json_int_t)out.n_vocab),
                          e);
    if (!o->common.quiet)
        printf("%s: %u rows of %u float32\n", o->logits, out.n_rows, out.n_vocab);
    return 0;
}

/* ---- perplexity ---- */

/* Windows of `width` tokens that do not overlap; each starts with BOS where the model has one (it
 * takes the place of the window's first token). Of each window the second half is scored, every
 * token given all before it in the window, so that no score lacks context. */
struct perplexity {
    const int32_t *ids;             /* of the window that runs */
    uint32_t width, first, n_vocab; /* scored: targets at positions first+1 .. width-1 */
    double sum, sum_sq;             /* of the scored tokens' negative log likelihoods, nats */
    uint64_t n;
};

static void score_row(void *user, uint32_t pos, const float *logits)
{
    struct perplexity *p = user;
    if (pos < p->first || pos + 1 >= p->width)
        return;
    double max = logits[0], sum = 0;
    for (uint32_t i = 1; i < p->n_vocab; i++)
        max = MAX(max, (double)logits[i]);
    for (uint32_t i = 0; i < p->n_vocab; i++)
        sum += (double)expf(logits[i] - (float)max);
    double nll = max + log(sum) - (double)logits[p->ids[pos + 1]];
    p->sum += nll;
    p->sum_sq += nll * nll;
    p->n++;
}

static int print_perplexity(const struct eval_opts *o, const struct perplexity *p, size_t n_windows,
                            struct err *e)
{
    double n = (double)p->n, mean = p->sum / n;
    double error = sqrt(fmax(0, p->sum_sq / n - mean * mean) / fmax(1, n - 1));
    if (o->json)
        return print_json(json_pack("{sf sf sf sf sI sI sI}", "perplexity", exp(mean),
                                    "perplexity_error", exp(mean) * error, "nll", mean, "nll_error",
                                    error, "tokens", (json_int_t)p->n, "windows",
                                    (json_int_t)n_windows, "ctx", (json_int_t)p->width),
                          e);
    printf("perplexity  %.4f +- %.4f\n"
           "mean NLL    %.5f +- %.5f nats a token\n"
           "method      %zu windows of %u tokens, the second half of each scored: %" PRIu64
           " tokens\n",
           exp(mean), exp(mean) * error, mean, error, n_windows, p->width, p->n);
    return 0;
}

static int eval_windows(const struct eval_opts *o, struct engine *en, struct ids *ids,
                        struct err *e)
{
    uint32_t width = (uint32_t)MIN(ids->n, (size_t)engine_info(en)->n_ctx);
    struct perplexity p = {.width = width, .first = width / 2, .n_vocab = engine_info(en)->n_vocab};
    size_t n_windows = ids->n / width;
    int32_t bos = ids->n ? ids->v[0] : -1;
    bool add_bos = bos >= 0 && bos == tokenizer_bos(engine_tokenizer(en));
    struct progress bar;
    progress_begin(&bar, "evaluating", 0.3, o->common.quiet);
    bar.unit = " tokens";
    int rc = 0;
    for (size_t w = 0; w < n_windows && !rc; w++) {
        p.ids = ids->v + w * width;
        if (add_bos)
            ids->v[w * width] = bos;
        struct request r = {.ids = p.ids, .n_ids = width, .on_logits = score_row, .user = &p};
        rc = run_ids(en, &r, e);
        if (!rc && progress_tick(&bar, (w + 1) * width, n_windows * width))
            rc = err_set(e, ERR_CANCELLED, "eval was interrupted");
    }
    progress_end(&bar, NULL);
    return rc ? rc : print_perplexity(o, &p, n_windows, e);
}

static int tokenize_text(struct ids *ids, const struct eval_opts *o, const struct model_ref *s,
                         struct err *e)
{
    struct buf text = {0};
    struct tokenizer *t = NULL;
    int rc = -1;
    if (read_input(&text, o->text, EVAL_MAX_TEXT, e) ||
        tokenizer_new(&t, model_file_gguf(s->file), e) ||
        tokenizer_encode(ids, t, buf_str(&text), text.n, TOKENIZE_ADD_SPECIAL, e))
        goto out;
    rc = 0;
    if (ids->failed)
        rc = err_set(e, ERR_MEMORY, "%s: out of memory for its tokens", o->text);
    else if (ids->n < EVAL_MIN_WINDOW)
        rc =
            err_set(e, ERR_USAGE, "%s: %zu tokens are too few for a perplexity; give a longer text",
                    o->text, ids->n);
out:
    buf_fini(&text);
    tokenizer_free(t);
    return rc;
}

static int eval_run(const struct command_args *a, struct err *e)
{
    const struct eval_opts *o = a->opts;
    struct engine_opts eo = o->engine;
    struct model_ref s = {0};
    struct engine *en = NULL;
    struct ids ids = {0};
    if (!o->tokens == !o->text || !o->tokens != !o->logits)
        return usage_error(e,
                           "eval: give either --text FILE, or --tokens 1,2,3 with --logits FILE");
    if (o->text && eo.ctx && eo.ctx < EVAL_MIN_WINDOW)
        return usage_error(e,
                           "eval: --ctx %u is too short a window for a perplexity; use %d or more",
                           eo.ctx, EVAL_MIN_WINDOW);
    int rc = o->tokens ? parse_ids(&ids, o->tokens, "--tokens", e) : 0;
    if (rc)
        goto out;
    rc = model_ref_open(&s, a->words[0], &o->common, e);
    if (!rc && o->text)
        rc = tokenize_text(&ids, o, &s, e);
    if (rc)
        goto out;
    /* One more than the ids, for the token that ends the request. */
    if (!eo.ctx)
        eo.ctx = o->tokens ? (uint32_t)MIN(ids.n + 1, (size_t)UINT32_MAX) : EVAL_WINDOW;
    rc = load_engine(&en, &s, &eo, &o->common, e);
    if (rc)
        goto out;
    rc = o->tokens ? eval_tokens(o, en, &ids, e) : eval_windows(o, en, &ids, e);
out:
    engine_close(en);
    model_ref_close(&s);
    ids_fini(&ids);
    return rc;
}

const struct command command_eval = {
    .name = "eval",
    .summary = "perplexity of a text, or logits of token ids",
    .usage = "MODEL --text FILE | --tokens IDS --logits FILE",
    .about = "With --text: perplexity over windows of --ctx tokens (here 512 if not given), of "
             "each the\n"
             "second half scored, with standard errors. With --tokens: the logits at every "
             "position, in\n"
             "a context just long enough for them.",
    .examples = "  ingot eval smollm2 --text book.txt\n"
                "  ingot eval smollm2 --text book.txt --ctx 2048 --kv f32 --json\n"
                "  ingot eval model.gguf --tokens 1,15043,29892 --logits out.f32\n",
    .opts_bytes = sizeof(struct eval_opts),
    .groups = {{"Eval", eval_options, 0}, ENGINE_GROUP(struct eval_opts), COMMON_GROUP},
    .min_words = 1,
    .max_words = 1,
    .run = eval_run,
};
