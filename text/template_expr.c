/* Expressions of the template language, by precedence climbing over one table of operators. Works
 * on the parser of template_parse.c and its bounds. Grammar: Jinja2 3.1, section "Expressions";
 * string escapes: Python 3 language reference, section 2.4.1. */
#include "text/template_internal.h"

#include <errno.h>
#include <stdlib.h>

static struct node *parse_level(struct parser *p, int level);
static struct node *parse_unary(struct parser *p, bool with_filters);

/* ---- literals ---- */

static int hex_value(uint32_t *cp, const char *s, size_t n, size_t digits)
{
    uint32_t v = 0;
    if (n < digits)
        return -1;
    for (size_t i = 0; i < digits; i++) {
        char c = s[i];
        int d = c >= '0' && c <= '9'                     ? c - '0'
                : (c | 0x20) >= 'a' && (c | 0x20) <= 'f' ? (c | 0x20) - 'a' + 10
                                                         : -1;
        if (d < 0)
            return -1;
        v = v << 4 | (uint32_t)d;
    }
    *cp = v;
    return 0;
}

/* \uD83D\uDE00 spells one character in two halves. */
static size_t join_surrogates(uint32_t *cp, const char *s, size_t n)
{
    uint32_t low;
    if (*cp < 0xd800 || *cp > 0xdbff || n < 6 || s[0] != '\\' || s[1] != 'u' ||
        hex_value(&low, s + 2, n - 2, 4) || low < 0xdc00 || low > 0xdfff)
        return 0;
    *cp = 0x10000 + ((*cp - 0xd800) << 10) + (low - 0xdc00);
    return 6;
}

/* The escape at s, behind its backslash (n > 0): characters used, 0 for one that stays as it is,
 * -1 for a bad one. *cp is UINT32_MAX when it stands for nothing. */
static int read_escape(uint32_t *cp, const char *s, size_t n)
{
    static const char simple[] = "\\\\''\"\"a\ab\bf\fn\nr\rt\tv\v";
    for (size_t i = 0; simple[i]; i += 2)
        if (simple[i] == s[0])
            return (int)(*cp = (uint8_t)simple[i + 1], 1);
    if (s[0] == '\n')
        return (int)(*cp = UINT32_MAX, 1);
    if (s[0] >= '0' && s[0] <= '7') {
        size_t used = 0;
        for (*cp = 0; used < 3 && used < n && s[used] >= '0' && s[used] <= '7'; used++)
            *cp = *cp * 8 + (uint32_t)(s[used] - '0');
        return (int)used;
    }
    size_t digits = s[0] == 'x' ? 2 : s[0] == 'u' ? 4 : s[0] == 'U' ? 8 : 0;
    if (!digits)
        return s[0] == 'N' ? -1 : 0;
    if (hex_value(cp, s + 1, n - 1, digits) || *cp > 0x10ffff)
        return -1;
    return (int)(1 + digits + join_surrogates(cp, s + 1 + digits, n - 1 - digits));
}

/* The inside of a string literal into dst, which has room for n bytes: no escape is shorter than
 * what it stands for. Returns the length, or -1. */
static long unescape(char *dst, struct parser *p, const struct token *t)
{
    const char *s = p->t->src + t->at + 1;
    size_t n = t->n - 2, to = 0;
    for (size_t i = 0; i < n;) {
        uint32_t cp = 0;
        int used = s[i] == '\\' && i + 1 < n ? read_escape(&cp, s + i + 1, n - i - 1) : 0;
        if (used < 0)
            return parse_fail(p, t->line, "a string has a bad \\%c escape", s[i + 1]);
        if (!used) {
            dst[to++] = s[i++];
            continue;
        }
        if (cp != UINT32_MAX)
            to += (size_t)utf8_encode(dst + to, cp);
        i += 1 + (size_t)used;
    }
    return (long)to;
}

/* One string literal, or several in a row, which are one. */
static struct node *parse_strings(struct parser *p)
{
    const struct token *first = tok_now(p);
    size_t total = 0, at = 0;
    for (const struct token *t = first; t->kind == T_STR; t++)
        total += t->n;
    struct node *x = node_new(p, E_CONST, first->line);
    char *text = x ? parse_alloc(p, total) : NULL;
    if (!text)
        return NULL;
    for (; tok_now(p)->kind == T_STR; p->at++) {
        long n = unescape(text + at, p, tok_now(p));
        if (n < 0)
            return NULL;
        at += (size_t)n;
    }
    return const_str(&x->v, p, text, at) ? NULL : x;
}

static struct node *parse_number(struct parser *p)
{
    const struct token *t = tok_now(p);
    char digits[400];
    size_t n = 0;
    for (uint32_t i = 0; i < t->n && n + 1 < sizeof digits; i++)
        if (p->t->src[t->at + i] != '_')
            digits[n++] = p->t->src[t->at + i];
    digits[n] = 0;
    struct node *x = node_new(p, E_CONST, t->line);
    if (!x)
        return NULL;
    p->at++;
    if (t->kind == T_FLOAT) {
        x->v = VAL_FLOAT(strtod(digits, NULL));
        return x;
    }
    char kind = n > 1 ? (char)(digits[1] | 0x20) : 0;
    int base = kind == 'x' ? 16 : kind == 'o' ? 8 : kind == 'b' ? 2 : 10;
    char *end;
    errno = 0;
    x->v = VAL_INT(strtoll(digits + (base == 10 ? 0 : 2), &end, base));
    if (errno || *end || (base != 10 && n == 2) || n + 1 >= sizeof digits)
        return parse_fail(p, t->line, "the number %.40s does not fit 64 bits", digits), NULL;
    return x;
}

/* ---- primary expressions ---- */

static bool is_tuple_end(const struct parser *p, const char *stop)
{
    const struct token *t = tok_now(p);
    return t->kind == T_BLOCK_END || t->kind == T_VAR_END || t->kind == T_EOF ||
           tok_is_op(p, ')') || (stop && tok_is_name(p, stop));
}

typedef struct node *(*item_fn)(struct parser *p, bool flag);

static struct node *parse_list_of(struct parser *p, item_fn item, bool flag, const char *stop,
                                  bool parens)
{
    uint32_t line = tok_now(p)->line;
    struct node_list l = {0};
    bool tuple = false;
    for (;;) {
        if (is_tuple_end(p, stop))
            break;
        struct node *x = item(p, flag);
        if (!x || node_list_put(p, &l, x))
            return NULL;
        if (!tok_skip_op(p, ','))
            break;
        tuple = true;
    }
    if (!tuple && l.n)
        return l.v[0];
    if (!l.n && !(parens && !tuple))
        return tok_unexpected(p, "an expression"), NULL;
    struct node *x = node_new(p, E_TUPLE, line);
    if (!x)
        return NULL;
    x->items = l.v;
    x->n_items = l.n;
    return node_finish(p, x);
}

struct node *parse_tuple(struct parser *p, bool with_cond, bool parens, const char *stop)
{
    return parse_list_of(p, parse_expression, with_cond, stop, parens);
}

static struct node *parse_target_item(struct parser *p, bool with_namespace)
{
    const struct token *t = tok_now(p);
    if (tok_is_op(p, '(')) {
        if (parse_enter(p))
            return NULL;
        p->at++;
        struct node *x = parse_list_of(p, parse_target_item, with_namespace, NULL, false);
        p->nest--;
        return x && !tok_want_op(p, ')') ? x : NULL;
    }
    static const char *const reserved[] = {"true", "false", "none", "True", "False", "None"};
    for (size_t i = 0; i < ARRAY_LEN(reserved); i++)
        if (tok_is_name(p, reserved[i]))
            return parse_fail(p, t->line, "cannot assign to %s", reserved[i]), NULL;
    if (!tok_want_name(p))
        return NULL;
    bool dotted = with_namespace && tok_is_op(p, '.');
    struct node *x = node_new(p, dotted ? E_NSREF : E_NAME, t->line);
    if (!x || sym_intern(&x->sym, p, p->t->src + t->at, t->n))
        return NULL;
    if (!dotted)
        return x;
    p->at++;
    const struct token *attr = tok_want_name(p);
    return attr && !const_str(&x->v, p, p->t->src + attr->at, attr->n) ? x : NULL;
}

struct node *parse_target(struct parser *p, bool with_namespace, const char *stop)
{
    return parse_list_of(p, parse_target_item, with_namespace, stop, false);
}

static struct node *parse_list(struct parser *p)
{
    struct node *x = node_new(p, E_LIST, tok_now(p)->line);
    struct node_list l = {0};
    for (p->at++; x && !tok_is_op(p, ']');) {
        struct node *item = parse_expression(p, true);
        if (!item || node_list_put(p, &l, item))
            return NULL;
        if (!tok_skip_op(p, ',') && !tok_is_op(p, ']'))
            return tok_unexpected(p, "',' or ']'"), NULL;
    }
    if (!x || tok_want_op(p, ']'))
        return NULL;
    x->items = l.v;
    x->n_items = l.n;
    return x;
}

static struct node *parse_dict(struct parser *p)
{
    struct node *x = node_new(p, E_DICT, tok_now(p)->line);
    struct node_list l = {0};
    for (p->at++; x && !tok_is_op(p, '}');) {
        struct node *key = parse_expression(p, true);
        if (!key || tok_want_op(p, ':'))
            return NULL;
        struct node *value = parse_expression(p, true);
        if (!value || node_list_put(p, &l, key) || node_list_put(p, &l, value))
            return NULL;
        if (!tok_skip_op(p, ',') && !tok_is_op(p, '}'))
            return tok_unexpected(p, "',' or '}'"), NULL;
    }
    if (!x || tok_want_op(p, '}'))
        return NULL;
    x->items = l.v;
    x->n_items = l.n;
    return x;
}

static const struct {
    const char *word;
    struct value v;
} word_consts[] = {
    {"true", {.kind = V_BOOL, .b = true}},
    {"True", {.kind = V_BOOL, .b = true}},
    {"false", {.kind = V_BOOL, .b = false}},
    {"False", {.kind = V_BOOL, .b = false}},
    {"none", {.kind = V_NONE}},
    {"None", {.kind = V_NONE}},
};

/* Macros take caller, kwargs and varargs only if their body mentions them. */
static void note_macro_use(struct parser *p, const struct token *t)
{
    static const char *const words[] = {"caller", "kwargs", "varargs"};
    for (unsigned i = 0; p->macro && i < ARRAY_LEN(words); i++)
        if (t->n == strlen(words[i]) && !memcmp(p->t->src + t->at, words[i], t->n))
            p->macro->uses |= (uint8_t)(1u << i);
}

static struct node *parse_name(struct parser *p)
{
    const struct token *t = tok_now(p);
    for (size_t i = 0; i < ARRAY_LEN(word_consts); i++)
        if (tok_skip_name(p, word_consts[i].word)) {
            struct node *x = node_new(p, E_CONST, t->line);
            if (x)
                x->v = word_consts[i].v;
            return x;
        }
    struct node *x = node_new(p, E_NAME, t->line);
    if (!x || sym_intern(&x->sym, p, p->t->src + t->at, t->n))
        return NULL;
    note_macro_use(p, t);
    p->at++;
    return x;
}

static struct node *parse_primary(struct parser *p)
{
    struct node *x = NULL;
    const struct token *t = tok_now(p);
    if (t->kind == T_NAME)
        return parse_name(p);
    if (t->kind == T_STR)
        return parse_strings(p);
    if (t->kind == T_INT || t->kind == T_FLOAT)
        return parse_number(p);
    if (parse_enter(p))
        return NULL;
    if (tok_skip_op(p, '(')) {
        x = parse_tuple(p, true, true, NULL);
        if (x && tok_want_op(p, ')'))
            x = NULL;
    } else if (tok_is_op(p, '[')) {
        x = node_finish(p, parse_list(p));
    } else if (tok_is_op(p, '{')) {
        x = node_finish(p, parse_dict(p));
    } else {
        tok_unexpected(p, "an expression");
    }
    p->nest--;
    return x;
}

/* ---- postfix: .name [index] (args) | filter, is test ---- */

static int set_attr_rows(struct parser *p, struct node *x)
{
    struct attr_rows rows;
    bool any = false;
    for (int i = 0; i < N_METHOD_TABLES; i++)
        any |= (rows.row[i] = method_find(i, x->v.s)) != NULL;
    if (!any)
        return 0;
    struct attr_rows *kept = parse_alloc(p, sizeof *kept);
    if (!kept)
        return -1;
    *kept = rows;
    x->rows = kept;
    return 0;
}

static struct node *parse_attr(struct parser *p, struct node *of)
{
    uint32_t line = tok_now(p)->line;
    p->at++;
    if (tok_now(p)->kind == T_INT) {
        struct node *x = node_new(p, E_ITEM, line);
        if (!x || !(x->b = parse_number(p)))
            return NULL;
        x->a = of;
        return x;
    }
    struct node *x = node_new(p, E_ATTR, line);
    const struct token *name = x ? tok_want_name(p) : NULL;
    if (!name || const_str(&x->v, p, p->t->src + name->at, name->n) || set_attr_rows(p, x))
        return NULL;
    x->a = of;
    return x;
}

static bool at_slice_gap(const struct parser *p)
{
    return tok_is_op(p, ':') || tok_is_op(p, ']');
}

static struct node *parse_slice(struct parser *p, struct node *x, struct node *start)
{
    x->kind = E_SLICE;
    x->n_items = 3;
    if (!(x->items = parse_alloc(p, 3 * sizeof *x->items)))
        return NULL;
    x->items[0] = start;
    for (int i = 1; i < 3 && tok_skip_op(p, ':'); i++)
        if (!at_slice_gap(p) && !(x->items[i] = parse_expression(p, true)))
            return NULL;
    return x;
}

static struct node *parse_subscript(struct parser *p, struct node *of)
{
    struct node *x = node_new(p, E_ITEM, tok_now(p)->line), *start = NULL;
    if (!x || parse_enter(p))
        return NULL;
    p->at++;
    x->a = of;
    bool ok = true;
    if (!tok_is_op(p, ':'))
        ok = (start = parse_list_of(p, parse_expression, true, NULL, false)) != NULL;
    if (ok && tok_is_op(p, ':'))
        ok = parse_slice(p, x, start) != NULL;
    else
        x->b = start;
    p->nest--;
    return ok && !tok_want_op(p, ']') ? x : NULL;
}

static int add_arg(struct parser *p, struct node *call, uint32_t *cap, struct arg a)
{
    if (call->n_args == *cap) {
        *cap = *cap ? *cap * 2 : 4;
        struct arg *v = parse_alloc(p, *cap * sizeof *v);
        if (!v)
            return -1;
        if (call->n_args)
            memcpy(v, call->args, call->n_args * sizeof *v);
        call->args = v;
    }
    call->args[call->n_args++] = a;
    return 0;
}

static int parse_arg(struct arg *a, struct parser *p, enum arg_kind last)
{
    const struct token *t = tok_now(p);
    *a = (struct arg){.kind = ARG_POS};
    if (tok_skip_op(p, '*')) {
        a->kind = ARG_STAR;
    } else if (tok_skip_op(p, OP_POW)) {
        a->kind = ARG_STARSTAR;
    } else if (t->kind == T_NAME && tok_ahead(p)->kind == T_OP && tok_ahead(p)->op == '=') {
        struct value name;
        if (const_str(&name, p, p->t->src + t->at, t->n))
            return -1;
        a->kind = ARG_KEYWORD;
        a->name = name.s;
        p->at += 2;
    }
    bool order_ok = a->kind == ARG_POS       ? last == ARG_POS
                    : a->kind == ARG_KEYWORD ? last != ARG_STARSTAR
                                             : last < a->kind;
    if (!order_ok)
        return parse_fail(p, t->line, "arguments of a call are in the wrong order");
    return (a->e = parse_expression(p, true)) ? 0 : -1;
}

int parse_args(struct parser *p, struct node *call)
{
    uint32_t cap = 0;
    enum arg_kind last = ARG_POS;
    if (tok_want_op(p, '(') || parse_enter(p))
        return -1;
    while (!tok_is_op(p, ')')) {
        struct arg a;
        if (parse_arg(&a, p, last) || add_arg(p, call, &cap, a))
            return -1;
        last = MAX(last, a.kind);
        if (!tok_skip_op(p, ',') && !tok_is_op(p, ')'))
            return tok_unexpected(p, "',' or ')'");
    }
    p->nest--;
    return tok_want_op(p, ')');
}

static struct node *parse_call(struct parser *p, struct node *of)
{
    struct node *x = node_new(p, E_CALL, tok_now(p)->line);
    if (!x || parse_args(p, x))
        return NULL;
    x->a = of;
    return x;
}

static struct node *parse_postfix(struct parser *p, struct node *x)
{
    while (x) {
        if (tok_is_op(p, '.'))
            x = node_finish(p, parse_attr(p, x));
        else if (tok_is_op(p, '['))
            x = node_finish(p, parse_subscript(p, x));
        else if (tok_is_op(p, '('))
            x = node_finish(p, parse_call(p, x));
        else
            break;
    }
    return x;
}

/* A filter's or test's name, which may have dots. */
static int parse_row_name(struct value *out, struct parser *p)
{
    const struct token *first = tok_want_name(p), *last = first;
    while (last && tok_skip_op(p, '.'))
        last = tok_want_name(p);
    return last ? const_str(out, p, p->t->src + first->at, last->at + last->n - first->at) : -1;
}

static struct node *parse_filter(struct parser *p, struct node *of)
{
    struct node *x = node_new(p, E_FILTER, tok_now(p)->line);
    if (!x || parse_row_name(&x->v, p))
        return NULL;
    x->a = of;
    x->row = filter_find(x->v.s);
    return tok_is_op(p, '(') && parse_args(p, x) ? NULL : x;
}

struct node *parse_filters(struct parser *p, struct node *of)
{
    struct node *x = of;
    if (!of && !tok_is_op(p, '|')) /* {% filter name %} has no bar before the first */
        x = node_finish(p, parse_filter(p, NULL));
    while ((x || !of) && tok_skip_op(p, '|')) {
        x = node_finish(p, parse_filter(p, x));
        if (!x)
            return NULL;
    }
    return x;
}

static bool at_bare_test_arg(const struct parser *p)
{
    const struct token *t = tok_now(p);
    if (t->kind == T_NAME)
        return !tok_is_name(p, "else") && !tok_is_name(p, "or") && !tok_is_name(p, "and");
    return t->kind == T_STR || t->kind == T_INT || t->kind == T_FLOAT || tok_is_op(p, '[') ||
           tok_is_op(p, '{');
}

static struct node *parse_test(struct parser *p, struct node *of)
{
    uint32_t line = tok_now(p)->line;
    bool negated = tok_skip_name(p, "not");
    struct node *x = node_new(p, E_TEST, line);
    if (!x || parse_row_name(&x->v, p))
        return NULL;
    x->a = of;
    x->row = test_find(x->v.s);
    if (tok_is_op(p, '(')) {
        if (parse_args(p, x))
            return NULL;
    } else if (at_bare_test_arg(p)) {
        uint32_t cap = 0;
        if (tok_is_name(p, "is"))
            return parse_fail(p, line, "tests cannot be chained with 'is'"), NULL;
        struct arg a = {.kind = ARG_POS, .e = parse_postfix(p, parse_primary(p))};
        if (!a.e || add_arg(p, x, &cap, a))
            return NULL;
    }
    if (!negated || !(x = node_finish(p, x)))
        return x;
    struct node *no = node_new(p, E_NOT, line);
    if (no)
        no->a = x;
    return no;
}

static struct node *parse_filter_chain(struct parser *p, struct node *x)
{
    while (x) {
        if (tok_skip_op(p, '|'))
            x = node_finish(p, parse_filter(p, x));
        else if (tok_skip_name(p, "is"))
            x = node_finish(p, parse_test(p, x));
        else if (tok_is_op(p, '('))
            x = node_finish(p, parse_call(p, x));
        else
            break;
    }
    return x;
}

static struct node *parse_sign(struct parser *p, bool negate)
{
    struct node *x = node_new(p, negate ? E_NEG : E_POS, tok_now(p)->line);
    if (!x || parse_enter(p))
        return NULL;
    p->at++;
    x->a = parse_unary(p, false);
    p->nest--;
    return x->a ? node_finish(p, x) : NULL;
}

static struct node *parse_unary(struct parser *p, bool with_filters)
{
    struct node *x;
    if (tok_is_op(p, '-') || tok_is_op(p, '+'))
        x = parse_sign(p, tok_is_op(p, '-'));
    else
        x = parse_primary(p);
    x = parse_postfix(p, x);
    return with_filters ? parse_filter_chain(p, x) : x;
}

/* ---- binary operators ---- */

enum level {
    LEVEL_OR,
    LEVEL_AND,
    LEVEL_NOT,
    LEVEL_COMPARE,
    LEVEL_ADD,
    LEVEL_CONCAT,
    LEVEL_MUL,
    LEVEL_POW,
    LEVEL_UNARY,
};

static int level_op(const struct parser *p, int level)
{
    static const struct {
        uint8_t level, op;
    } rows[] = {{LEVEL_COMPARE, OP_EQ},   {LEVEL_COMPARE, OP_NE}, {LEVEL_COMPARE, OP_LE},
                {LEVEL_COMPARE, OP_GE},   {LEVEL_COMPARE, '<'},   {LEVEL_COMPARE, '>'},
                {LEVEL_ADD, '+'},         {LEVEL_ADD, '-'},       {LEVEL_CONCAT, '~'},
                {LEVEL_MUL, '*'},         {LEVEL_MUL, '/'},       {LEVEL_MUL, '%'},
                {LEVEL_MUL, OP_FLOORDIV}, {LEVEL_POW, OP_POW}};
    const struct token *t = tok_now(p);
    for (size_t i = 0; t->kind == T_OP && i < ARRAY_LEN(rows); i++)
        if (rows[i].level == level && rows[i].op == t->op)
            return t->op;
    return 0;
}

/* The comparison at hand, its tokens taken; 0 when there is none. */
static int take_compare_op(struct parser *p)
{
    int op = level_op(p, LEVEL_COMPARE);
    if (op) {
        p->at++;
        return op;
    }
    if (tok_skip_name(p, "in"))
        return OP_IN;
    const struct token *next = tok_ahead(p);
    if (!tok_is_name(p, "not") || next->kind != T_NAME || next->n != 2 ||
        memcmp(p->t->src + next->at, "in", 2))
        return 0;
    p->at += 2;
    return OP_NOT_IN;
}

static struct node *parse_compare(struct parser *p)
{
    uint32_t line = tok_now(p)->line;
    struct node *a = parse_level(p, LEVEL_ADD);
    int op = a ? take_compare_op(p) : 0;
    if (!op)
        return a;
    struct node *x = node_new(p, E_COMPARE, line);
    struct node_list l = {0};
    uint32_t cap = 0;
    for (; x && op; op = take_compare_op(p)) {
        if (l.n == cap) {
            cap = cap ? cap * 2 : 2;
            uint8_t *ops = parse_alloc(p, cap);
            if (!ops)
                return NULL;
            if (l.n)
                memcpy(ops, x->ops, l.n);
            x->ops = ops;
        }
        x->ops[l.n] = (uint8_t)op;
        struct node *b = parse_level(p, LEVEL_ADD);
        if (!b || node_list_put(p, &l, b))
            return NULL;
    }
    if (!x)
        return NULL;
    x->a = a;
    x->items = l.v;
    x->n_items = l.n;
    return node_finish(p, x);
}

static struct node *parse_not(struct parser *p)
{
    uint32_t line = tok_now(p)->line;
    if (!tok_skip_name(p, "not"))
        return parse_compare(p);
    struct node *x = node_new(p, E_NOT, line);
    if (!x || parse_enter(p))
        return NULL;
    x->a = parse_not(p);
    p->nest--;
    return x->a ? node_finish(p, x) : NULL;
}

static struct node *parse_concat(struct parser *p)
{
    uint32_t line = tok_now(p)->line;
    struct node *a = parse_level(p, LEVEL_MUL);
    if (!a || !tok_is_op(p, '~'))
        return a;
    struct node *x = node_new(p, E_CONCAT, line);
    struct node_list l = {0};
    if (!x || node_list_put(p, &l, a))
        return NULL;
    while (tok_skip_op(p, '~')) {
        struct node *b = parse_level(p, LEVEL_MUL);
        if (!b || node_list_put(p, &l, b))
            return NULL;
    }
    x->items = l.v;
    x->n_items = l.n;
    return node_finish(p, x);
}

static struct node *make_binary(struct parser *p, enum node_kind kind, int op, struct node *ab[2])
{
    struct node *x = ab[1] ? node_new(p, kind, ab[0]->line) : NULL;
    if (!x)
        return NULL;
    x->op = (uint8_t)op;
    x->a = ab[0];
    x->b = ab[1];
    return node_finish(p, x);
}

static struct node *parse_level(struct parser *p, int level)
{
    if (level == LEVEL_NOT)
        return parse_not(p);
    if (level == LEVEL_CONCAT)
        return parse_concat(p);
    if (level == LEVEL_UNARY)
        return parse_unary(p, true);
    struct node *ab[2] = {parse_level(p, level + 1)};
    while (ab[0]) {
        enum node_kind kind = E_BINARY;
        int op = 0;
        if (level == LEVEL_OR && tok_skip_name(p, "or"))
            kind = E_OR;
        else if (level == LEVEL_AND && tok_skip_name(p, "and"))
            kind = E_AND;
        else if (level >= LEVEL_ADD && (op = level_op(p, level)))
            p->at++;
        else
            break;
        ab[1] = parse_level(p, level + 1);
        ab[0] = make_binary(p, kind, op, ab);
    }
    return ab[0];
}

struct node *parse_expression(struct parser *p, bool with_cond)
{
    if (parse_enter(p))
        return NULL;
    struct node *x = parse_level(p, LEVEL_OR);
    while (x && with_cond && tok_skip_name(p, "if")) {
        struct node *c = node_new(p, E_COND, x->line);
        if (!c)
            return NULL;
        c->b = x;
        if (!(c->a = parse_level(p, LEVEL_OR)))
            return NULL;
        if (tok_skip_name(p, "else") && !(c->c = parse_expression(p, true)))
            return NULL;
        x = node_finish(p, c);
    }
    p->nest--;
    return x;
}
