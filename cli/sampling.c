/* The sampling options: one table for the flags of `run`, for INGOT_... and for the chat's /set.
 * Names are those of llama.cpp, with Ollama's and OpenAI's as aliases. */
#include "cli/cli_internal.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define AT(field) offsetof(struct sampling_opts, field)
const struct option sampling_options[] = {
    {"temp", "temperature", 0, true, OPTION_F32, "T", AT(p.temperature), 0, 100,
     "Temperature; 0 always takes the likeliest token"},
    {"top-k", NULL, 0, true, OPTION_I32, "N", AT(p.top_k), -1, INT32_MAX,
     "Keep the N likeliest tokens; 0 is off"},
    {"top-p", NULL, 0, true, OPTION_F32, "P", AT(p.top_p), 0, 1,
     "Keep the likeliest tokens up to this probability; 1 is off"},
    {"min-p", NULL, 0, true, OPTION_F32, "P", AT(p.min_p), 0, 1,
     "Drop tokens below P times the likeliest; 0 is off"},
    {"typical", "typical-p", 0, true, OPTION_F32, "P", AT(p.typical_p), 0, 1,
     "Locally typical sampling; 1 is off"},
    {"xtc-probability", NULL, 0, true, OPTION_F32, "P", AT(p.xtc_probability), 0, 1,
     "Chance of excluding the top choices (XTC); 0 is off"},
    {"xtc-threshold", NULL, 0, true, OPTION_F32, "P", AT(p.xtc_threshold), 0, 1,
     "What counts as a top choice for XTC"},
    {"repeat-penalty", NULL, 0, true, OPTION_F32, "X", AT(p.repeat_penalty), 0, 0,
     "Divide the odds of recent tokens; 1 is off"},
    {"repeat-last-n", NULL, 0, true, OPTION_I32, "N", AT(p.repeat_last_n), -1, INT32_MAX,
     "Tokens that the penalties look back; -1: the context"},
    {"presence-penalty", NULL, 0, true, OPTION_F32, "X", AT(p.presence_penalty), 0, 0,
     "Taken from tokens that occurred; 0 is off"},
    {"frequency-penalty", NULL, 0, true, OPTION_F32, "X", AT(p.frequency_penalty), 0, 0,
     "Taken from tokens, once for every time they occurred; 0 is off"},
    {"dry-multiplier", NULL, 0, true, OPTION_F32, "X", AT(p.dry_multiplier), 0, 0,
     "Strength of the penalty on repeated sequences (DRY); 0 is off"},
    {"dry-base", NULL, 0, true, OPTION_F32, "X", AT(p.dry_base), 0, 0,
     "Growth of the DRY penalty with the length"},
    {"dry-allowed-length", NULL, 0, true, OPTION_I32, "N", AT(p.dry_allowed_length), 0, 0,
     "Longest repetition without a DRY penalty"},
    {"dry-penalty-last-n", "dry-last-n", 0, true, OPTION_I32, "N", AT(p.dry_last_n), -1, INT32_MAX,
     "Tokens that DRY looks back; -1: the context"},
    {"dry-sequence-breaker", NULL, 0, false, OPTION_LIST, "TEXT", AT(breakers), 0, 0,
     "Text that ends a DRY sequence (repeatable; \\n is a newline)"},
    {"mirostat", NULL, 0, true, OPTION_I32, "N", AT(p.mirostat), 0, 2,
     "Mirostat version 1 or 2 in place of the cuts above; 0 is off"},
    {"mirostat-ent", "mirostat-tau", 0, true, OPTION_F32, "TAU", AT(p.mirostat_tau), 0, 0,
     "Mirostat's target surprise"},
    {"mirostat-lr", "mirostat-eta", 0, true, OPTION_F32, "ETA", AT(p.mirostat_eta), 0, 0,
     "Mirostat's learning rate"},
    {"dynatemp-range", NULL, 0, true, OPTION_F32, "R", AT(p.dynatemp_range), 0, 0,
     "Temperature moves by up to R with the entropy; 0 is off"},
    {"dynatemp-exp", NULL, 0, true, OPTION_F32, "X", AT(p.dynatemp_exponent), 0, 0,
     "Exponent of the moving temperature"},
    {"seed", NULL, 's', true, OPTION_SEED, "N", AT(p.seed), 0, 0,
     "The same seed gives the same answer; 0 is random"},
    {"logit-bias", NULL, 0, false, OPTION_LIST, "ID+B", AT(bias), 0, 0,
     "Add B to a token's logit: 15043+1, 15043-1, 15043-inf (repeatable)"},
    {"max-tokens", "n-predict predict num-predict", 'n', true, OPTION_U32, "N", AT(max_tokens), 0,
     INT32_MAX, "End the answer after N tokens; 0 is no limit"},
    {"stop", NULL, 0, false, OPTION_LIST, "TEXT", AT(stop), 0, 0,
     "End the answer before this text (repeatable; \\n is a newline)"},
    {0},
};
#undef AT

static int parse_bias(struct logit_bias *b, const char *text, struct err *e)
{
    char *end, *stop;
    errno = 0;
    long id = strtol(text, &end, 10);
    double bias = *end == '+' || *end == '-' ? strtod(end, &stop) : NAN;
    if (end == text || errno == ERANGE || id < 0 || id > INT32_MAX || isnan(bias) || *stop ||
        bias > 1e30)
        return usage_error(
            e, "--logit-bias: '%.40s' is not ID+B or ID-B, as in 15043+1 or 15043-inf", text);
    *b = (struct logit_bias){(int32_t)id, (float)bias};
    return 0;
}

/* A shell has no easy way to write a newline, so that \n and \t are taken for what they mean. */
static char *unescape(const char *s)
{
    char *out = mem_strdup(s), *w = out;
    for (; out && *s; s++) {
        bool known = *s == '\\' && s[1] && strchr("nt\\", s[1]);
        if (known)
            s++;
        *w++ = known && *s == 'n' ? '\n' : known && *s == 't' ? '\t' : *s;
    }
    if (out)
        *w = 0;
    return out;
}

/* n strings of `from`, unescaped; NULL when there are none or memory ran out. */
static char **unescape_all(const struct strings *from)
{
    char **v = from->n ? mem_array(from->n, sizeof *v) : NULL;
    for (size_t i = 0; v && i < from->n; i++) {
        v[i] = unescape(from->v[i]);
        if (!v[i]) {
            while (i)
                mem_free(v[--i]);
            mem_free(v);
            return NULL;
        }
    }
    return v;
}

int sampling_resolve(struct sampling_opts *s, struct err *e)
{
    sampling_fini(s);
    struct logit_bias *bias = s->bias.n ? mem_array(s->bias.n, sizeof *bias) : NULL;
    s->p.bias = bias;
    s->p.n_bias = bias ? s->bias.n : 0;
    s->stops = unescape_all(&s->stop);
    s->p.dry_breakers = (const char *const *)unescape_all(&s->breakers);
    s->p.n_dry_breakers = s->p.dry_breakers ? s->breakers.n : 0;
    if ((s->bias.n && !bias) || (s->stop.n && !s->stops) || (s->breakers.n && !s->p.dry_breakers))
        return err_set(e, ERR_MEMORY, "out of memory for the sampling options");
    for (size_t i = 0; i < s->bias.n; i++) {
        int rc = parse_bias(&bias[i], s->bias.v[i], e);
        if (rc)
            return rc;
    }
    return sample_check(&s->p, e) ? COMMAND_USAGE : 0;
}

void sampling_fini(struct sampling_opts *s)
{
    for (size_t i = 0; s->stops && i < s->stop.n; i++)
        mem_free(s->stops[i]);
    mem_free(s->stops);
    for (size_t i = 0; i < s->p.n_dry_breakers; i++)
        mem_free((void *)s->p.dry_breakers[i]);
    mem_free((void *)s->p.dry_breakers);
    mem_free((void *)s->p.bias);
    s->stops = NULL;
    s->p.dry_breakers = NULL;
    s->p.bias = NULL;
    s->p.n_dry_breakers = s->p.n_bias = 0;
}
