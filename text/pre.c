/* Split rules of byte-level BPE: one row a name of `tokenizer.ggml.pre`, each a few patterns
 * applied one inside the other (what a pattern does not match is a piece of its own), run by
 * PCRE2's JIT. The patterns are the models' own published ones (tokenizer.json, tiktoken sources).
 * Refuses nothing: no byte is ever left out; a matcher that runs out of room falls back to a slower
 * one. Compiled rules belong to the tokenizer, a pre_run to one call. */
#include "text/text_internal.h"

#include <string.h>
#include <utf8proc.h>
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

/* White_Space (PropList.txt) for use inside a class; PCRE2's own \s has U+180E besides. */
#define WS                                                                                         \
    "\\t-\\r "                                                                                     \
    "\\x{85}\\x{A0}\\x{1680}\\x{2000}-\\x{200A}\\x{2028}\\x{2029}\\x{202F}\\x{205F}\\x{3000}"
#define S  "[" WS "]"
#define NS "[^" WS "]"
/* Blanks at the end of a run but for the last one, which goes to the next word; else all. */
#define GAP S "+(?!" NS ")|" S "+"

#define CONTRACTIONS     "'s|'t|'re|'ve|'m|'ll|'d"
#define ANY_CONTRACTIONS "(?i:'s|'t|'re|'ve|'m|'ll|'d)"

#define GPT2 CONTRACTIONS "| ?\\p{L}+| ?\\p{N}+| ?[^" WS "\\p{L}\\p{N}]+|" GAP

/* cl100k and its kin; they differ in how many digits go together. */
#define CL100K(digits)                                                                             \
    ANY_CONTRACTIONS "|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|" digits "| ?[^" WS                           \
                     "\\p{L}\\p{N}]+[\\r\\n]*|" S "*[\\r\\n]+|" GAP

/* o200k and its kin. */
#define UPPER "[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]"
#define LOWER "[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]"
#define O200K(contractions, digits)                                                                \
    "[^\\r\\n\\p{L}\\p{N}]?" UPPER "*" LOWER "+" contractions "|[^\\r\\n\\p{L}\\p{N}]?" UPPER      \
    "+" LOWER "*" contractions "|" digits "| ?[^" WS "\\p{L}\\p{N}]+[\\r\\n/]*|" S                 \
    "*[\\r\\n]+|" GAP

#define HAN_KANA "[\\x{4E00}-\\x{9FA5}\\x{3040}-\\x{309F}\\x{30A0}-\\x{30FF}]+"
#define PUNCT    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~]"
#define DEEPSEEK3                                                                                  \
    PUNCT "[A-Za-z]+|[^\\r\\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\\r\\n]*|" S    \
          "*[\\r\\n]+|" GAP

#define NOT_HAN(class) "(?:(?!\\p{Han})" class ")"
#define KIMI                                                                                       \
    "\\p{Han}+|[^\\r\\n\\p{L}\\p{N}]?" NOT_HAN(UPPER) "*" NOT_HAN(                                 \
        LOWER) "+" ANY_CONTRACTIONS                                                                \
               "?|[^\\r\\n\\p{L}\\p{N}]?" NOT_HAN(UPPER) "+" NOT_HAN(                              \
                   LOWER) "*" ANY_CONTRACTIONS "?|\\p{N}{1,3}| ?[^" WS                             \
                          "\\p{L}\\p{N}]+[\\r\\n]*|" S "*[\\r\\n]+|" GAP

/* Not a pattern: runs of decimal digits in groups of three counted from the right. The published
 * look-ahead, (?=(\d{3})+(?!\d)) or \d{1,3}(?=(?:\d{3})*\b), would take quadratic time. */
static const char digit_groups[] = "digit groups";
static const char digit_groups_bounded[] = "digit groups before a word boundary";

#define STEPS(name, ...) static const char *const name[PRE_MAX_STEPS + 1] = {__VA_ARGS__}

STEPS(split_default, "[\\p{P}\\$\\+<=>\\^~\\|]+", GPT2, "\\p{N}+", "[0-9][0-9][0-9]");
STEPS(split_gpt2, GPT2);
STEPS(split_digit_gpt2, "\\p{N}", GPT2);
STEPS(split_llama3, CL100K("\\p{N}{1,3}"));
STEPS(split_qwen2, CL100K("\\p{N}"));
STEPS(split_qwen35, ANY_CONTRACTIONS "|[^\\r\\n\\p{L}\\p{N}]?[\\p{L}\\p{M}]+|\\p{N}| ?[^" WS
                                     "\\p{L}\\p{M}\\p{N}]+[\\r\\n]*|" S "*[\\r\\n]+|" GAP);
STEPS(split_gpt4o, O200K(ANY_CONTRACTIONS "?", "\\p{N}{1,3}"));
STEPS(split_tekken, O200K("", "\\p{N}"));
STEPS(split_falcon, "[\\p{P}\\$\\+<=>\\^~\\|`]+", GPT2, "[0-9][0-9][0-9]");
/* The second lists the cased letters of the Unicode version its makers used. The fourth is \s+$,
 * before the run, lest every blank of a long run start a search of its own. */
STEPS(split_deepseek_llm, "[\\r\\n]",
      S "?["
        "A-Za-z\\x{B5}\\x{C0}-\\x{D6}\\x{D8}-\\x{F6}\\x{F8}-\\x{1BA}\\x{1BC}-\\x{1BF}"
        "\\x{1C4}-\\x{293}\\x{295}-\\x{2AF}\\x{370}-\\x{373}\\x{376}\\x{377}\\x{37B}-\\x{37D}"
        "\\x{37F}\\x{386}\\x{388}-\\x{38A}\\x{38C}\\x{38E}-\\x{3A1}\\x{3A3}-\\x{3F5}"
        "\\x{3F7}-\\x{481}\\x{48A}-\\x{52F}\\x{531}-\\x{556}\\x{10A0}-\\x{10C5}"
        "\\x{13A0}-\\x{13F5}\\x{13F8}-\\x{13FD}\\x{1C90}-\\x{1CBA}\\x{1CBD}-\\x{1CBF}"
        "\\x{1D00}-\\x{1D2B}\\x{1D6B}-\\x{1D77}\\x{1D79}-\\x{1D9A}\\x{1E00}-\\x{1F15}"
        "\\x{1F18}-\\x{1F1D}\\x{1F20}-\\x{1F45}\\x{1F48}-\\x{1F4D}\\x{1F50}-\\x{1F57}\\x{1F59}"
        "\\x{1F5B}\\x{1F5D}\\x{1F5F}-\\x{1F7D}\\x{1F80}-\\x{1FB4}\\x{1FB6}-\\x{1FBC}\\x{1FBE}"
        "\\x{1FC2}-\\x{1FC4}\\x{1FC6}-\\x{1FCC}\\x{1FD0}-\\x{1FD3}\\x{1FD6}-\\x{1FDB}"
        "\\x{1FE0}-\\x{1FEC}\\x{1FF2}-\\x{1FF4}\\x{1FF6}-\\x{1FFC}\\x{2102}\\x{2107}"
        "\\x{210A}-\\x{2113}\\x{2115}\\x{2119}-\\x{211D}\\x{2124}\\x{2126}\\x{2128}"
        "\\x{212A}-\\x{212D}\\x{212F}-\\x{2134}\\x{2139}\\x{213C}-\\x{213F}\\x{2145}-\\x{2149}"
        "\\x{214E}\\x{2183}\\x{2184}\\x{2C00}-\\x{2C7B}\\x{2C7E}-\\x{2CE4}\\x{2CEB}-\\x{2CEE}"
        "\\x{2CF2}\\x{2CF3}\\x{A640}-\\x{A66D}\\x{A680}-\\x{A69B}\\x{A722}-\\x{A76F}"
        "\\x{A771}-\\x{A787}\\x{A78B}-\\x{A78E}\\x{AB70}-\\x{ABBF}\\x{FB00}-\\x{FB06}"
        "\\x{FB13}-\\x{FB17}\\x{FF21}-\\x{FF3A}\\x{FF41}-\\x{FF5A}\\x{10400}-\\x{1044F}"
        "\\x{104B0}-\\x{104D3}\\x{104D8}-\\x{104FB}\\x{10C80}-\\x{10CB2}\\x{10CC0}-\\x{10CF2}"
        "\\x{118A0}-\\x{118DF}\\x{1E900}-\\x{1E943}]+",
      S "?[!-/:-~\\x{FF01}-\\x{FF0F}\\x{FF1A}-\\x{FF5E}\\x{2018}-\\x{201F}\\x{3000}-\\x{3002}]+",
      "(?<!" S ")" S "++\\z", "[\\x{4E00}-\\x{9FA5}\\x{0800}-\\x{4E00}\\x{AC00}-\\x{D7FF}]+",
      "\\p{N}+");
STEPS(split_deepseek_coder, "[\\r\\n]", S "?\\p{L}+", S "?\\p{P}+",
      "[\\x{4E00}-\\x{9FA5}\\x{0800}-\\x{4E00}\\x{AC00}-\\x{D7FF}]+", "\\p{N}");
STEPS(split_deepseek3, "\\p{N}{1,3}", HAN_KANA, DEEPSEEK3);
STEPS(split_stops,
      " ?[^(" WS "|.,!?\\x{2026}\\x{3002}\\x{FF0C}\\x{3001}\\x{964}\\x{6D4}\\x{60C})]+");
STEPS(split_stops_digits,
      " ?[^(" WS "|.,!?\\x{2026}\\x{3002}\\x{FF0C}\\x{3001}\\x{964}\\x{6D4}\\x{60C})]+", "\\p{N}");
STEPS(split_jais2, ANY_CONTRACTIONS
      "|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^" WS "\\p{L}\\p{N}]+[\\r\\n]*|" S
      "*[\\r\\n]+|" S "{512}(?!" NS ")|" S "{256}(?!" NS ")|" S "{128}(?!" NS ")|" S "{64}(?!" NS
      ")|" S "{32}(?!" NS ")|" S "{16}(?!" NS ")|" S "{8}(?!" NS ")|" S "{4}(?!" NS ")|" S
      "{1,2}(?!" NS ")|" S);
STEPS(split_kimi, KIMI);
STEPS(split_superbpe, "\\p{N}+", digit_groups);
STEPS(split_tiny_aya, digit_groups_bounded, O200K(ANY_CONTRACTIONS "?", "\\p{N}{1,3}"));
STEPS(split_bailing, "'(?i:[sdmt]|ll|ve|re)|[^\\r\\n\\p{L}\\p{N}]?+\\p{L}+|\\p{N}| ?[^" WS
                     "\\p{L}\\p{N}]++[\\r\\n]*|" S "*[\\r\\n]|" GAP);
STEPS(split_seed, ANY_CONTRACTIONS "|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| ?[^" WS
                                   "\\p{L}\\p{N}\\r\\n]+|" S "*[\\r\\n]+|" GAP);
STEPS(split_youtu,
      "[\\x{AC00}-\\x{D7A3}\\x{3131}-\\x{318E}]+|[\\x{FF01}\\x{2026}\\x{201C}\\x{201D}\\x{2018}\\x{"
      "2019}\\x{2014}\\x{FF1A}\\x{FF1B}\\x{FF0C}\\x{3001}-\\x{303F}\\x{FE30}-\\x{FE4F}]+|[\\x{3105}"
      "-\\x{312F}]+|" HAN_KANA,
      O200K(ANY_CONTRACTIONS "?", "\\p{N}"));
STEPS(split_minicpm5, "\\p{N}{1,3}", CL100K("\\p{N}+"));
/* Letters with single blanks between them; possessive, so that a long text needs no stack. */
STEPS(split_exaone_moe, ANY_CONTRACTIONS
      "|[^\\r\\n\\p{L}\\p{N}]?+(?:\\p{L}\\p{M}*+(?: \\p{L}\\p{M}*+)*+)++|\\p{N}| ?[^" WS
      "\\p{L}\\p{N}]+[\\r\\n/]?|" S "*[\\r\\n]|" GAP);
STEPS(split_chameleon, "<sentinel:[0-9]+>", "IMGIMG[A-I]{1,4}Z", "[\\t\\n]|    |  ", "\\p{N}",
      "[\\p{P}!-/:-@\\[-`{-~]", GPT2);

static const struct pre_rule rules[] = {
    {"default", split_default, 0},
    {"gpt-2", split_gpt2, 0},
    {"phi-2", split_gpt2, 0},
    {"jina-es", split_gpt2, 0},
    {"jina-de", split_gpt2, 0},
    {"jina-v1-en", split_gpt2, 0},
    {"jina-v2-es", split_gpt2, 0},
    {"jina-v2-de", split_gpt2, 0},
    {"jina-v2-code", split_gpt2, 0},
    {"roberta-bpe", split_gpt2, 0},
    {"gigachat", split_gpt2, 0},
    {"a.x-4.0", split_gpt2, 0},
    {"mellum", split_gpt2, 0},
    {"jais", split_gpt2, 0},
    {"trillion", split_gpt2, 0},
    {"granite-docling", split_gpt2, 0},
    {"exaone4", split_gpt2, 0},
    {"modern-bert", split_gpt2, PRE_NFC},
    {"mpt", split_gpt2, PRE_NFC},
    {"olmo", split_gpt2, PRE_NFC},
    {"starcoder", split_digit_gpt2, 0},
    {"refact", split_digit_gpt2, 0},
    {"smollm", split_digit_gpt2, 0},
    {"codeshell", split_digit_gpt2, 0},
    {"exaone", split_digit_gpt2, 0},
    {"minerva-7b", split_digit_gpt2, 0},
    {"mellum2", split_digit_gpt2, 0},
    {"command-r", split_digit_gpt2, PRE_NFC},
    {"llama-bpe", split_llama3, PRE_WHOLE_FIRST | PRE_ADD_BOS},
    {"llama3", split_llama3, PRE_WHOLE_FIRST | PRE_ADD_BOS},
    {"llama-v3", split_llama3, PRE_WHOLE_FIRST | PRE_ADD_BOS},
    {"falcon3", split_llama3, PRE_WHOLE_FIRST | PRE_ADD_BOS},
    {"falcon-h1", split_llama3, PRE_WHOLE_FIRST | PRE_ADD_BOS},
    {"pixtral", split_llama3, PRE_WHOLE_FIRST | PRE_ADD_BOS},
    {"midm-2.0", split_llama3, PRE_WHOLE_FIRST | PRE_ADD_BOS},
    {"lfm2", split_llama3, PRE_WHOLE_FIRST | PRE_ADD_BOS},
    {"jina-v5-nano", split_llama3, PRE_WHOLE_FIRST | PRE_ADD_BOS},
    {"dbrx", split_llama3, 0},
    {"smaug-bpe", split_llama3, 0},
    {"chatglm-bpe", split_llama3, 0},
    {"glm4", split_llama3, 0},
    {"qwen2", split_qwen2, PRE_NFC},
    {"deepseek-r1-qwen", split_qwen2, PRE_NFC},
    {"megrez", split_qwen2, PRE_NFC},
    {"stablelm2", split_qwen2, 0},
    {"hunyuan", split_qwen2, 0},
    {"solar-open", split_qwen2, 0},
    {"grok-2", split_qwen2, 0},
    {"qwen35", split_qwen35, PRE_NFC},
    {"gpt-4o", split_gpt4o, 0},
    {"llama4", split_gpt4o, 0},
    {"kanana2", split_gpt4o, 0},
    {"minimax-m2", split_gpt4o, 0},
    {"granite-embed-multi-97m", split_gpt4o, PRE_WHOLE_FIRST},
    {"tekken", split_tekken, PRE_WHOLE_FIRST | PRE_ADD_BOS},
    {"falcon", split_falcon, 0},
    {"deepseek-llm", split_deepseek_llm, 0},
    {"deepseek-coder", split_deepseek_coder, 0},
    {"deepseek-v3", split_deepseek3, 0},
    {"hunyuan-dense", split_deepseek3, 0},
    {"joyai-llm", split_deepseek3, 0},
    {"poro-chat", split_stops, 0},
    {"bloom", split_stops, 0},
    {"gpt3-finnish", split_stops, 0},
    {"viking", split_stops_digits, 0},
    {"jais-2", split_jais2, 0},
    {"kimi-k2", split_kimi, 0},
    {"superbpe", split_superbpe, 0},
    {"tiny_aya", split_tiny_aya, 0},
    {"bailingmoe", split_bailing, 0},
    {"bailingmoe2", split_bailing, 0},
    {"llada-moe", split_bailing, 0},
    {"seed-coder", split_seed, 0},
    {"youtu", split_youtu, PRE_WHOLE_FIRST},
    {"minicpm5", split_minicpm5, PRE_WHOLE_FIRST},
    {"exaone-moe", split_exaone_moe, 0},
    {"chameleon", split_chameleon, PRE_ADD_BOS},
};

const struct pre_rule *pre_find(const char *name, size_t n)
{
    for (size_t i = 0; i < ARRAY_LEN(rules); i++)
        if (strlen(rules[i].name) == n && !memcmp(rules[i].name, name, n))
            return &rules[i];
    return NULL;
}

/* ---- compiled rules ---- */

struct pre {
    const struct pre_rule *rule;
    pcre2_general_context *gc; /* PCRE2 allocates through our seam */
    unsigned n_steps;
    struct step {
        pcre2_code *code; /* NULL for the digit groups */
        bool jit, bounded;
    } steps[PRE_MAX_STEPS];
};

struct pre_run {
    const struct pre *pre;
    pcre2_match_data *md;
    pcre2_match_context *mc;
    pcre2_jit_stack *stack; /* only once the machine stack's share was too small */
    pre_word word;
    void *user;
    struct err *e;
};

static void *pcre_alloc(size_t n, void *user)
{
    return mem_alloc(n);
}

static void pcre_free(void *p, void *user)
{
    mem_free(p);
}

static int step_compile(struct pre *pre, struct step *s, const char *pattern, struct err *e)
{
    if (pattern == digit_groups || pattern == digit_groups_bounded) {
        s->bounded = pattern == digit_groups_bounded;
        return 0;
    }
    int code;
    PCRE2_SIZE at;
    pcre2_compile_context *cc = pcre2_compile_context_create(pre->gc);
    if (!cc)
        return err_set(e, ERR_MEMORY, "no memory for the split rule '%s'", pre->rule->name);
    s->code = pcre2_compile((PCRE2_SPTR)pattern, PCRE2_ZERO_TERMINATED, PCRE2_UTF | PCRE2_UCP,
                            &code, &at, cc);
    pcre2_compile_context_free(cc);
    if (!s->code && code == PCRE2_ERROR_HEAP_FAILED)
        return err_set(e, ERR_MEMORY, "no memory for the split rule '%s'", pre->rule->name);
    if (!s->code)
        return err_set(e, ERR_UNSUPPORTED, "the split rule '%s' does not compile: %d at byte %zu",
                       pre->rule->name, code, (size_t)at);
    /* Where the system forbids code made at run time the interpreter does the same, slower. */
    s->jit = pcre2_jit_compile(s->code, PCRE2_JIT_COMPLETE) == 0;
    return 0;
}

int pre_new(struct pre **out, const struct pre_rule *rule, struct err *e)
{
    struct pre *pre = mem_zalloc(sizeof *pre);
    if (!pre || !(pre->gc = pcre2_general_context_create(pcre_alloc, pcre_free, NULL))) {
        pre_free(pre);
        return err_set(e, ERR_MEMORY, "no memory for the split rule '%s'", rule->name);
    }
    pre->rule = rule;
    for (; pre->n_steps < PRE_MAX_STEPS && rule->steps[pre->n_steps]; pre->n_steps++) {
        if (step_compile(pre, &pre->steps[pre->n_steps], rule->steps[pre->n_steps], e)) {
            pre_free(pre);
            return -1;
        }
    }
    *out = pre;
    return 0;
}

void pre_free(struct pre *pre)
{
    if (!pre)
        return;
    for (unsigned i = 0; i < PRE_MAX_STEPS; i++)
        pcre2_code_free(pre->steps[i].code);
    pcre2_general_context_free(pre->gc);
    mem_free(pre);
}

uint64_t pre_bytes(const struct pre *pre)
{
    uint64_t sum = sizeof *pre;
    for (unsigned i = 0; i < pre->n_steps; i++) {
        size_t code = 0, jit = 0;
        if (pre->steps[i].code && !pcre2_pattern_info(pre->steps[i].code, PCRE2_INFO_SIZE, &code) &&
            !pcre2_pattern_info(pre->steps[i].code, PCRE2_INFO_JITSIZE, &jit))
            sum += code + jit;
    }
    return sum;
}

/* ---- one call ---- */

int pre_run_new(struct pre_run **out, const struct pre *pre, pre_word word, void *user,
                struct err *e)
{
    struct pre_run *r = mem_zalloc(sizeof *r);
    if (!r)
        return err_set(e, ERR_MEMORY, "no memory to split text");
    *r = (struct pre_run){.pre = pre, .word = word, .user = user, .e = e};
    r->md = pcre2_match_data_create(1, pre->gc);
    r->mc = pcre2_match_context_create(pre->gc);
    if (!r->md || !r->mc) {
        pre_run_free(r);
        return err_set(e, ERR_MEMORY, "no memory to split text");
    }
    /* The patterns are ours and run in linear time: limits would only cut long texts. */
    pcre2_set_match_limit(r->mc, UINT32_MAX);
    pcre2_set_depth_limit(r->mc, UINT32_MAX);
    pcre2_set_heap_limit(r->mc, UINT32_MAX);
    *out = r;
    return 0;
}

void pre_run_free(struct pre_run *r)
{
    if (!r)
        return;
    pcre2_match_data_free(r->md);
    pcre2_match_context_free(r->mc);
    pcre2_jit_stack_free(r->stack);
    mem_free(r);
}

enum { JIT_STACK_START = 256 << 10, JIT_STACK_MAX = 256 << 20 };

static int pattern_match(struct pre_run *r, const struct step *s, const char *p, size_t n,
                         size_t at)
{
    int rc = PCRE2_ERROR_JIT_STACKLIMIT;
    if (s->jit)
        rc = pcre2_jit_match(s->code, (PCRE2_SPTR)p, n, at, 0, r->md, r->mc);
    if (s->jit && rc == PCRE2_ERROR_JIT_STACKLIMIT && !r->stack) {
        r->stack = pcre2_jit_stack_create(JIT_STACK_START, JIT_STACK_MAX, r->pre->gc);
        if (r->stack) {
            pcre2_jit_stack_assign(r->mc, NULL, r->stack);
            rc = pcre2_jit_match(s->code, (PCRE2_SPTR)p, n, at, 0, r->md, r->mc);
        }
    }
    if (rc == PCRE2_ERROR_JIT_STACKLIMIT)
        rc = pcre2_match(s->code, (PCRE2_SPTR)p, n, at, PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT, r->md,
                         r->mc);
    return rc;
}

static bool is_digit(uint32_t cp)
{
    return cp < 0x80 ? cp - '0' < 10
                     : utf8proc_category((utf8proc_int32_t)cp) == UTF8PROC_CATEGORY_ND;
}

static bool is_word(uint32_t cp)
{
    switch (utf8proc_category((utf8proc_int32_t)cp)) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_MC:
    case UTF8PROC_CATEGORY_ME:
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_PC:
        return true;
    default:
        return false;
    }
}

static int split_at(struct pre_run *r, const char *p, size_t n, unsigned step);

/* Hand over the run of n_digits digits at p in groups of three from the right. */
static int digits_split(struct pre_run *r, const char *p, size_t n, size_t n_digits, unsigned step)
{
    size_t from = 0, at = 0;
    for (; n_digits; n_digits--) {
        uint32_t cp;
        at += (size_t)utf8_decode(&cp, p + at, n - at);
        if (n_digits % 3 == 1) {
            if (split_at(r, p + from, at - from, step + 1))
                return -1;
            from = at;
        }
    }
    return 0;
}

static int groups_split(struct pre_run *r, const char *p, size_t n, unsigned step)
{
    size_t done = 0, run = 0, n_digits = 0;
    for (size_t at = 0; at <= n;) {
        uint32_t cp = 0;
        int len = at < n ? utf8_decode(&cp, p + at, n - at) : 1;
        if (at < n && is_digit(cp)) {
            run = n_digits++ ? run : at;
            at += (size_t)len;
            continue;
        }
        if (n_digits && !(r->pre->steps[step].bounded && at < n && is_word(cp))) {
            if (run > done && split_at(r, p + done, run - done, step + 1))
                return -1;
            if (digits_split(r, p + run, at - run, n_digits, step))
                return -1;
            done = at;
        }
        n_digits = 0;
        at += (size_t)len;
    }
    return n > done ? split_at(r, p + done, n - done, step + 1) : 0;
}

/* Apply one step to a piece and the later ones to what it yields: as deep as there are steps. */
static int split_at(struct pre_run *r, const char *p, size_t n, unsigned step)
{
    if (step == r->pre->n_steps)
        return r->word(r->user, p, n);
    const struct step *s = &r->pre->steps[step];
    if (!s->code)
        return groups_split(r, p, n, step);
    const PCRE2_SIZE *v = pcre2_get_ovector_pointer(r->md);
    for (size_t done = 0; done < n;) {
        int rc = pattern_match(r, s, p, n, done);
        if (rc < 0 && rc != PCRE2_ERROR_NOMATCH)
            return err_set(r->e, rc == PCRE2_ERROR_NOMEMORY ? ERR_MEMORY : ERR_LIMIT,
                           "splitting a text of %zu bytes by the rule '%s' failed (%d)", n,
                           r->pre->rule->name, rc);
        size_t from = rc < 0 ? n : v[0], to = rc < 0 ? n : v[1];
        CHECK(rc < 0 || to > from); /* no pattern matches the empty string */
        if (from > done && split_at(r, p + done, from - done, step + 1))
            return -1;
        if (to > from && split_at(r, p + from, to - from, step + 1))
            return -1;
        done = to;
    }
    return 0;
}

int pre_run_split(struct pre_run *r, const char *p, size_t n)
{
    return split_at(r, p, n, 0);
}

bool unicode_is_space(uint32_t cp)
{
    return (cp >= 9 && cp <= 13) || cp == ' ' || cp == 0x85 || cp == 0xa0 || cp == 0x1680 ||
           (cp >= 0x2000 && cp <= 0x200a) || cp == 0x2028 || cp == 0x2029 || cp == 0x202f ||
           cp == 0x205f || cp == 0x3000;
}
