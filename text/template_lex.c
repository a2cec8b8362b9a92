/* Template source to tokens: text, tags, and what is inside tags, with all white space control
 * (trim_blocks, lstrip_blocks, the - and + signs, raw blocks, comments) already applied.
 * Rules: Jinja2 3.1 documentation, "White space control" and "Escaping". The tokens point into the
 * source; the array is the caller's to free. */
#include "text/template_internal.h"

struct lexer {
    const char *src;
    size_t n, at;
    uint32_t line;  /* of line_at */
    size_t line_at; /* newlines before it are counted */
    struct tokens *out;
    struct err *e;
    size_t n_open;
    char open[TEMPLATE_MAX_NEST]; /* closing brackets still awaited in this tag */
};

static uint32_t line_of(struct lexer *x, size_t at)
{
    for (; x->line_at < at; x->line_at++)
        x->line += x->src[x->line_at] == '\n';
    return x->line;
}

static int lex_fail(struct lexer *x, size_t at, const char *what)
{
    return err_set(x->e, ERR_CORRUPT, "chat template line %u: %s", line_of(x, at), what);
}

static int put_token(struct lexer *x, int kind, int op, size_t at, size_t n)
{
    struct tokens *t = x->out;
    if (t->n == t->cap) {
        size_t cap = t->cap ? t->cap * 2 : 256;
        struct token *v = mem_realloc(t->v, cap * sizeof *v);
        if (!v)
            return err_set(x->e, ERR_MEMORY, "chat template: out of memory for its tokens");
        t->v = v;
        t->cap = cap;
    }
    t->v[t->n++] = (struct token){.kind = (uint8_t)kind,
                                  .op = (uint8_t)op,
                                  .line = line_of(x, at),
                                  .at = (uint32_t)at,
                                  .n = (uint32_t)n};
    return 0;
}

static size_t skip_space_to(const struct lexer *x, size_t at, size_t end)
{
    while (at < end) {
        uint32_t cp;
        size_t len = char_decode(&cp, x->src + at, end - at);
        if (!char_is_space(cp))
            break;
        at += len;
    }
    return at;
}

static size_t skip_space(const struct lexer *x, size_t at)
{
    return skip_space_to(x, at, x->n);
}

static bool all_space(const struct lexer *x, size_t from, size_t to)
{
    return skip_space_to(x, from, to) == to;
}

static bool looking_at(const struct lexer *x, size_t at, const char *lit)
{
    size_t n = strlen(lit);
    return x->n - at >= n && !memcmp(x->src + at, lit, n);
}

/* Where text that ends at `to`, before a tag with this sign, really ends. */
static size_t trim_before_tag(const struct lexer *x, size_t from, size_t to, char sign, bool lstrip)
{
    if (sign == '-') {
        while (to > from) {
            size_t back = to - 1;
            while (back > from && (x->src[back] & 0xc0) == 0x80)
                back--;
            if (!all_space(x, back, to))
                break;
            to = back;
        }
        return to;
    }
    if (sign == '+' || !lstrip)
        return to;
    size_t bol = to;
    while (bol > from && x->src[bol - 1] != '\n')
        bol--;
    bool line_start = bol == 0 || x->src[bol - 1] == '\n';
    return line_start && all_space(x, bol, to) ? bol : to;
}

/* After a tag's closing sign and bracket at `at`: the position behind, white space eaten; 0 when
 * the tag does not close here. */
static size_t close_tag(const struct lexer *x, size_t at, const char *end, bool trim_newline)
{
    if (x->src[at] == '-' && looking_at(x, at + 1, end))
        return skip_space(x, at + 3);
    if (trim_newline && x->src[at] == '+' && looking_at(x, at + 1, end))
        return at + 3;
    if (!looking_at(x, at, end))
        return 0;
    at += 2;
    return trim_newline && at < x->n && x->src[at] == '\n' ? at + 1 : at;
}

static bool is_sign(const struct lexer *x, size_t at)
{
    return at < x->n && (x->src[at] == '-' || x->src[at] == '+');
}

/* A tag that holds nothing but this word, opened at `at`: position behind its word and blanks. */
static size_t match_word_tag(const struct lexer *x, size_t at, const char *word)
{
    at += 2;
    at = skip_space(x, is_sign(x, at) ? at + 1 : at);
    if (at >= x->n || !looking_at(x, at, word))
        return 0;
    at = skip_space(x, at + strlen(word));
    return at < x->n ? at : 0;
}

static int put_text(struct lexer *x, size_t from, size_t to)
{
    return to > from ? put_token(x, T_TEXT, 0, from, to - from) : 0;
}

static int lex_comment(struct lexer *x, size_t tag)
{
    for (size_t at = tag + 2 + is_sign(x, tag + 2); at + 1 < x->n; at++) {
        size_t behind = close_tag(x, at, "#}", true);
        if (behind) {
            x->at = behind;
            return 0;
        }
    }
    return lex_fail(x, tag, "the comment opened by {# has no #}");
}

/* The body of a raw block, from x->at to its endraw. */
static int lex_raw(struct lexer *x, size_t tag)
{
    size_t from = x->at;
    for (size_t at = from; at + 1 < x->n; at++) {
        if (!looking_at(x, at, "{%"))
            continue;
        size_t word = match_word_tag(x, at, "endraw");
        size_t behind = word ? close_tag(x, word, "%}", true) : 0;
        if (!behind)
            continue;
        char sign = x->src[at + 2];
        x->at = behind;
        return put_text(x, from, trim_before_tag(x, from, at, sign, true));
    }
    return lex_fail(x, tag, "the raw block has no {% endraw %}");
}

static const struct {
    char text[3];
    uint8_t op;
} long_ops[] = {{"==", OP_EQ}, {"!=", OP_NE},  {"<=", OP_LE},
                {">=", OP_GE}, {"**", OP_POW}, {"//", OP_FLOORDIV}};

static int lex_bracket(struct lexer *x, char c)
{
    static const char pairs[] = "()[]{}";
    const char *at = strchr(pairs, c);
    if (!at)
        return 0;
    if ((at - pairs) % 2 == 0) {
        if (x->n_open == sizeof x->open)
            return lex_fail(x, x->at, "brackets are nested too deep (over 200)");
        x->open[x->n_open++] = at[1];
        return 0;
    }
    if (!x->n_open || x->open[x->n_open - 1] != c)
        return err_set(x->e, ERR_CORRUPT, "chat template line %u: unexpected '%c'",
                       line_of(x, x->at), c);
    x->n_open--;
    return 0;
}

static int lex_operator(struct lexer *x)
{
    for (size_t i = 0; i < ARRAY_LEN(long_ops); i++)
        if (looking_at(x, x->at, long_ops[i].text)) {
            x->at += 2;
            return put_token(x, T_OP, long_ops[i].op, x->at - 2, 2);
        }
    char c = x->src[x->at];
    if (!c || !strchr("+-/*%~[](){}<>=.:|,;", c))
        return err_set(x->e, ERR_CORRUPT, "chat template line %u: unexpected character '%c'",
                       line_of(x, x->at), (uint8_t)c < 0x7f ? c : '?');
    if (lex_bracket(x, c))
        return -1;
    x->at++;
    return put_token(x, T_OP, c, x->at - 1, 1);
}

static int lex_string(struct lexer *x)
{
    char quote = x->src[x->at];
    size_t at = x->at + 1;
    while (at < x->n && x->src[at] != quote)
        at += x->src[at] == '\\' ? 2 : 1;
    if (at >= x->n)
        return lex_fail(x, x->at, "a string is not closed");
    size_t from = x->at;
    x->at = at + 1;
    return put_token(x, T_STR, 0, from, x->at - from);
}

static bool is_digit(const struct lexer *x, size_t at)
{
    return at < x->n && x->src[at] >= '0' && x->src[at] <= '9';
}

static size_t skip_digits(const struct lexer *x, size_t at)
{
    while (is_digit(x, at) || (at < x->n && x->src[at] == '_' && is_digit(x, at + 1)))
        at++;
    return at;
}

static size_t skip_prefixed(const struct lexer *x, size_t at)
{
    static const struct {
        char letter;
        const char *digits;
    } kinds[] = {{'x', "0123456789abcdefABCDEF_"}, {'o', "01234567_"}, {'b', "01_"}};
    char c = at + 1 < x->n ? (char)(x->src[at + 1] | 0x20) : 0;
    for (size_t i = 0; i < ARRAY_LEN(kinds); i++)
        if (c == kinds[i].letter && x->src[at] == '0')
            for (at += 2;; at++)
                if (at >= x->n || !x->src[at] || !strchr(kinds[i].digits, x->src[at]))
                    return at;
    return 0;
}

static int lex_number(struct lexer *x)
{
    size_t from = x->at, at = skip_prefixed(x, from);
    int kind = T_INT;
    if (!at) {
        at = skip_digits(x, from);
        bool after_dot = from > 0 && x->src[from - 1] == '.';
        if (!after_dot && at < x->n && x->src[at] == '.' && is_digit(x, at + 1)) {
            kind = T_FLOAT;
            at = skip_digits(x, at + 1);
        }
        if (!after_dot && at < x->n && (x->src[at] | 0x20) == 'e') {
            size_t exp = at + 1 + is_sign(x, at + 1);
            if (is_digit(x, exp)) {
                kind = T_FLOAT;
                at = skip_digits(x, exp);
            }
        }
    }
    /* A whole number that starts with 0 is nothing but zeros: 08 is two tokens, and so an error. */
    if (kind == T_INT && x->src[from] == '0' && is_digit(x, from + 1))
        for (at = from; at < x->n && (x->src[at] == '0' || x->src[at] == '_'); at++)
            ;
    x->at = at;
    return put_token(x, kind, 0, from, at - from);
}

static size_t skip_name(const struct lexer *x, size_t at)
{
    while (at < x->n) {
        uint32_t cp;
        size_t len = char_decode(&cp, x->src + at, x->n - at);
        if (cp != '_' && !char_is_alpha(cp) && !char_is_numeric(cp))
            break;
        at += len;
    }
    return at;
}

static int lex_in_tag(struct lexer *x)
{
    char c = x->src[x->at];
    if (c == '"' || c == '\'')
        return lex_string(x);
    if (c >= '0' && c <= '9')
        return lex_number(x);
    size_t behind = skip_name(x, x->at), from = x->at;
    if (behind == from)
        return lex_operator(x);
    x->at = behind;
    return put_token(x, T_NAME, 0, from, behind - from);
}

/* Everything from behind `{%` or `{{` to behind the tag's end. */
static int lex_tag(struct lexer *x, size_t tag, bool block)
{
    if (put_token(x, block ? T_BLOCK_BEGIN : T_VAR_BEGIN, 0, tag, 2))
        return -1;
    uint32_t line = x->line;
    x->n_open = 0;
    for (;;) {
        x->at = skip_space(x, x->at);
        if (x->at >= x->n)
            return err_set(x->e, ERR_CORRUPT,
                           "chat template line %u: the tag opened here by %s is not closed", line,
                           block ? "{%" : "{{");
        size_t behind = x->n_open ? 0 : close_tag(x, x->at, block ? "%}" : "}}", block);
        if (behind) {
            size_t at = x->at;
            x->at = behind;
            return put_token(x, block ? T_BLOCK_END : T_VAR_END, 0, at, 2);
        }
        if (lex_in_tag(x))
            return -1;
    }
}

/* Text up to the next tag, and that tag. */
static int lex_root(struct lexer *x)
{
    size_t from = x->at, tag = from;
    for (;; tag++) {
        const char *brace = memchr(x->src + tag, '{', x->n - tag);
        if (!brace || (size_t)(brace - x->src) + 1 >= x->n) {
            x->at = x->n;
            return put_text(x, from, x->n);
        }
        tag = (size_t)(brace - x->src);
        if (strchr("{%#", brace[1]) && brace[1])
            break;
    }
    char kind = x->src[tag + 1], sign = is_sign(x, tag + 2) ? x->src[tag + 2] : 0;
    if (put_text(x, from, trim_before_tag(x, from, tag, sign, kind != '{')))
        return -1;
    if (kind == '#')
        return lex_comment(x, tag);
    size_t word = kind == '%' ? match_word_tag(x, tag, "raw") : 0;
    size_t behind = word ? close_tag(x, word, "%}", false) : 0;
    if (behind) {
        x->at = behind;
        return lex_raw(x, tag);
    }
    x->at = tag + 2 + (sign != 0);
    return lex_tag(x, tag, kind == '%');
}

int template_lex(struct tokens *out, const char *src, size_t n, struct err *e)
{
    struct lexer x = {.src = src, .n = n, .line = 1, .out = out, .e = e};
    while (x.at < n)
        if (lex_root(&x))
            return -1;
    return put_token(&x, T_EOF, 0, n, 0);
}
