/* Statements of the template language: tokens to a tree in the template's arena. Owns the symbol
 * table and the helpers that the expression parser (template_expr.c) shares. Recursion is bounded
 * by TEMPLATE_MAX_NEST, the tree's depth by TEMPLATE_MAX_TREE, memory by TEMPLATE_MAX_PARSE_BYTES.
 * Grammar: Jinja2 3.1 template designer documentation. */
#include "text/template_internal.h"

#include <stdio.h>

/* ---- shared helpers ---- */

int parse_fail(struct parser *p, uint32_t line, const char *fmt, ...)
{
    char what[400];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(what, sizeof what, fmt, ap);
    va_end(ap);
    return err_set(p->e, ERR_CORRUPT, "chat template line %u: %s", line, what);
}

void *parse_alloc(struct parser *p, size_t n)
{
    if (n > TEMPLATE_MAX_PARSE_BYTES ||
        p->t->arena.used_bytes > (size_t)TEMPLATE_MAX_PARSE_BYTES - n) {
        err_set(p->e, ERR_LIMIT, "chat template: too large, its tree would take over %d MiB",
                TEMPLATE_MAX_PARSE_BYTES >> 20);
        return NULL;
    }
    void *r = arena_alloc(&p->t->arena, n);
    if (!r)
        err_set(p->e, ERR_MEMORY, "chat template: out of memory while parsing");
    return r;
}

struct node *node_new(struct parser *p, enum node_kind kind, uint32_t line)
{
    struct node *x = parse_alloc(p, sizeof *x);
    if (!x)
        return NULL;
    x->kind = (uint8_t)kind;
    x->line = line;
    x->depth = 1;
    return x;
}

int node_list_put(struct parser *p, struct node_list *l, struct node *x)
{
    if (l->n == l->cap) {
        uint32_t cap = l->cap ? l->cap * 2 : 4;
        struct node **v = parse_alloc(p, cap * sizeof *v);
        if (!v)
            return -1;
        if (l->n)
            memcpy(v, l->v, l->n * sizeof *v);
        l->v = v;
        l->cap = cap;
    }
    l->v[l->n++] = x;
    return 0;
}

static unsigned deeper(unsigned depth, const struct node *child)
{
    return child && child->depth > depth ? child->depth : depth;
}

struct node *node_finish(struct parser *p, struct node *x)
{
    if (!x)
        return NULL;
    unsigned depth = 0;
    const struct node *fixed[] = {x->a, x->b, x->c, x->d, x->rest};
    for (size_t i = 0; i < ARRAY_LEN(fixed); i++)
        depth = deeper(depth, fixed[i]);
    for (uint32_t i = 0; i < x->n_items; i++)
        depth = deeper(depth, x->items[i]);
    bool params = x->kind == S_MACRO || x->kind == S_CALL;
    for (uint32_t i = 0; i < x->n_args; i++)
        depth = deeper(depth, params ? x->params[i].fallback : x->args[i].e);
    if (depth >= TEMPLATE_MAX_TREE) {
        parse_fail(p, x->line, "nested too deep (over %d levels)", TEMPLATE_MAX_TREE);
        return NULL;
    }
    x->depth = (uint16_t)(depth + 1);
    return x;
}

int parse_enter(struct parser *p)
{
    if (p->nest >= TEMPLATE_MAX_NEST)
        return parse_fail(p, tok_now(p)->line, "nested too deep (over %d levels)",
                          TEMPLATE_MAX_NEST);
    p->nest++;
    return 0;
}

int const_str(struct value *out, struct parser *p, const char *s, size_t n)
{
    struct tstr *t = parse_alloc(p, sizeof *t);
    if (!t)
        return -1;
    *t = (struct tstr){.p = s, .n = n, .n_chars = SIZE_MAX};
    /* Counted and hashed now, so that rendering threads never write to a constant. */
    str_chars(t);
    str_hash(t);
    *out = (struct value){.kind = V_STR, .s = t};
    return 0;
}

/* ---- symbols ---- */

static int sym_grow(struct parser *p)
{
    uint32_t cap = p->table_cap ? p->table_cap * 2 : 256;
    uint32_t *table = mem_array(cap, sizeof *table);
    if (!table)
        return err_set(p->e, ERR_MEMORY, "chat template: out of memory while parsing");
    for (uint32_t i = 0; i < p->t->n_syms; i++) {
        uint32_t at = (uint32_t)p->t->syms[i]->hash & (cap - 1);
        while (table[at])
            at = (at + 1) & (cap - 1);
        table[at] = i + 1;
    }
    mem_free(p->table);
    p->table = table;
    p->table_cap = cap;
    return 0;
}

static int sym_add(uint32_t *sym, struct parser *p, const char *s, size_t n)
{
    struct template *t = p->t;
    if (t->n_syms == p->syms_cap) {
        uint32_t cap = p->syms_cap ? p->syms_cap * 2 : 64;
        struct tstr **v = parse_alloc(p, cap * sizeof *v);
        if (!v)
            return -1;
        if (t->n_syms)
            memcpy(v, t->syms, t->n_syms * sizeof *v);
        t->syms = v;
        p->syms_cap = cap;
    }
    struct value name;
    if (const_str(&name, p, s, n))
        return -1;
    *sym = t->n_syms;
    t->syms[t->n_syms++] = name.s;
    return 0;
}

int sym_intern(uint32_t *sym, struct parser *p, const char *s, size_t n)
{
    if ((p->t->n_syms + 1) * 2 > p->table_cap && sym_grow(p))
        return -1;
    struct tstr key = {.p = s, .n = n};
    uint32_t at = (uint32_t)str_hash(&key) & (p->table_cap - 1);
    for (; p->table[at]; at = (at + 1) & (p->table_cap - 1)) {
        *sym = p->table[at] - 1;
        if (str_equal(p->t->syms[*sym], &key))
            return 0;
    }
    if (sym_add(sym, p, s, n))
        return -1;
    p->table[at] = *sym + 1;
    return 0;
}

/* ---- tokens ---- */

const struct token *tok_now(const struct parser *p)
{
    return &p->toks.v[p->at];
}

const struct token *tok_ahead(const struct parser *p)
{
    return &p->toks.v[MIN(p->at + 1, p->toks.n - 1)];
}

static void tok_next(struct parser *p)
{
    if (p->at + 1 < p->toks.n)
        p->at++;
}

static bool tok_spells(const struct parser *p, const struct token *t, const char *name)
{
    return t->kind == T_NAME && strlen(name) == t->n && !memcmp(p->t->src + t->at, name, t->n);
}

bool tok_is_op(const struct parser *p, int op)
{
    return tok_now(p)->kind == T_OP && tok_now(p)->op == op;
}

bool tok_is_name(const struct parser *p, const char *name)
{
    return tok_spells(p, tok_now(p), name);
}

bool tok_skip_op(struct parser *p, int op)
{
    bool yes = tok_is_op(p, op);
    if (yes)
        tok_next(p);
    return yes;
}

bool tok_skip_name(struct parser *p, const char *name)
{
    bool yes = tok_is_name(p, name);
    if (yes)
        tok_next(p);
    return yes;
}

int tok_unexpected(struct parser *p, const char *wanted)
{
    const struct token *t = tok_now(p);
    if (t->kind == T_EOF)
        return parse_fail(p, t->line, "the template ends where %s should be", wanted);
    if (t->kind == T_BLOCK_END || t->kind == T_VAR_END)
        return parse_fail(p, t->line, "the tag ends where %s should be", wanted);
    return parse_fail(p, t->line, "'%.*s' where %s should be", (int)MIN(t->n, 60u),
                      p->t->src + t->at, wanted);
}

int tok_want_op(struct parser *p, int op)
{
    char wanted[4] = {'\'', (char)op, '\'', 0};
    return tok_skip_op(p, op) ? 0 : tok_unexpected(p, wanted);
}

const struct token *tok_want_name(struct parser *p)
{
    const struct token *t = tok_now(p);
    if (t->kind != T_NAME) {
        tok_unexpected(p, "a name");
        return NULL;
    }
    tok_next(p);
    return t;
}

static int want_block_end(struct parser *p)
{
    if (tok_now(p)->kind != T_BLOCK_END)
        return tok_unexpected(p, "%}");
    tok_next(p);
    return 0;
}

/* ---- statements ---- */

/* Statements up to a tag whose word is in `ends` (NULL-terminated); stops at that word. */
static struct node *parse_body(struct parser *p, const char *const *ends, const char *opened);

static bool at_end_word(const struct parser *p, const char *const *ends)
{
    for (; ends && *ends; ends++)
        if (tok_spells(p, tok_ahead(p), *ends))
            return true;
    return false;
}

/* A body whose end word and closing bracket are taken too. */
static struct node *parse_whole_body(struct parser *p, const char *end, const char *opened)
{
    const char *const ends[] = {end, NULL};
    struct node *d = parse_body(p, ends, opened);
    tok_next(p);
    return d && !want_block_end(p) ? d : NULL;
}

static struct node *parse_for(struct parser *p, uint32_t line)
{
    static const char *const ends[] = {"endfor", "else", NULL};
    struct node *x = node_new(p, S_FOR, line);
    if (!x || !(x->a = parse_target(p, false, "in")))
        return NULL;
    if (!tok_skip_name(p, "in"))
        return tok_unexpected(p, "'in'"), NULL;
    if (!(x->b = parse_tuple(p, false, false, "recursive")))
        return NULL;
    if (tok_skip_name(p, "if") && !(x->c = parse_expression(p, true)))
        return NULL;
    x->flag = tok_skip_name(p, "recursive");
    if (want_block_end(p))
        return NULL;
    p->n_loops++;
    x->d = parse_body(p, ends, "for");
    p->n_loops--;
    if (!x->d)
        return NULL;
    bool has_else = tok_is_name(p, "else");
    tok_next(p);
    if (want_block_end(p))
        return NULL;
    if (has_else && !(x->rest = parse_whole_body(p, "endfor", "for")))
        return NULL;
    return x;
}

static struct node *parse_if(struct parser *p, uint32_t line)
{
    static const char *const ends[] = {"elif", "else", "endif", NULL};
    struct node *x = node_new(p, S_IF, line);
    struct node_list l = {0};
    for (bool more = true; x && more;) {
        struct node *test = parse_tuple(p, false, false, NULL);
        if (!test || want_block_end(p))
            return NULL;
        struct node *body = parse_body(p, ends, "if");
        if (!body || node_list_put(p, &l, test) || node_list_put(p, &l, body))
            return NULL;
        more = tok_is_name(p, "elif");
        bool has_else = tok_is_name(p, "else");
        tok_next(p);
        if (!more && want_block_end(p))
            return NULL;
        if (has_else && !(x->c = parse_whole_body(p, "endif", "if")))
            return NULL;
    }
    if (x) {
        x->items = l.v;
        x->n_items = l.n;
    }
    return x;
}

static struct node *parse_set(struct parser *p, uint32_t line)
{
    struct node *target = parse_target(p, true, NULL);
    if (!target)
        return NULL;
    if (tok_skip_op(p, '=')) {
        struct node *x = node_new(p, S_SET, line);
        if (!x || !(x->b = parse_tuple(p, true, false, NULL)) || want_block_end(p))
            return NULL;
        x->a = target;
        return x;
    }
    struct node *x = node_new(p, S_SET_BLOCK, line);
    if (!x)
        return NULL;
    x->a = target;
    if (tok_is_op(p, '|') && !(x->b = parse_filters(p, NULL)))
        return NULL;
    if (want_block_end(p) || !(x->d = parse_whole_body(p, "endset", "set")))
        return NULL;
    return x;
}

/* (a, b=1, ...) of a macro or call block. */
static int parse_params(struct parser *p, struct node *x)
{
    uint32_t cap = 0;
    if (tok_want_op(p, '('))
        return -1;
    while (!tok_is_op(p, ')')) {
        if (x->n_args && (tok_skip_op(p, ',') ? 0 : tok_unexpected(p, "','")))
            return -1;
        const struct token *name = tok_want_name(p);
        if (!name)
            return -1;
        if (x->n_args == cap) {
            cap = cap ? cap * 2 : 4;
            struct param *v = parse_alloc(p, cap * sizeof *v);
            if (!v)
                return -1;
            if (x->n_args)
                memcpy(v, x->params, x->n_args * sizeof *v);
            x->params = v;
        }
        struct param *m = &x->params[x->n_args];
        if (sym_intern(&m->sym, p, p->t->src + name->at, name->n))
            return -1;
        if (tok_skip_op(p, '=') && !(m->fallback = parse_expression(p, true)))
            return -1;
        if (!m->fallback && x->n_args && x->params[x->n_args - 1].fallback)
            return parse_fail(p, name->line, "a parameter without default follows one with");
        x->n_args++;
    }
    return tok_want_op(p, ')');
}

/* The body of a macro: loops outside do not reach in, and what it mentions is noted. */
static int parse_macro_body(struct parser *p, struct node *x, const char *end, const char *opened)
{
    struct macro_frame frame = {.up = p->macro};
    int n_loops = p->n_loops;
    p->macro = &frame;
    p->n_loops = 0;
    x->d = parse_whole_body(p, end, opened);
    p->n_loops = n_loops;
    p->macro = frame.up;
    x->uses = frame.uses;
    if (p->macro)
        p->macro->uses |= frame.uses;
    return x->d ? 0 : -1;
}

static struct node *parse_macro(struct parser *p, uint32_t line)
{
    struct node *x = node_new(p, S_MACRO, line);
    const struct token *name = x ? tok_want_name(p) : NULL;
    if (!name || sym_intern(&x->sym, p, p->t->src + name->at, name->n))
        return NULL;
    if (parse_params(p, x) || want_block_end(p))
        return NULL;
    return parse_macro_body(p, x, "endmacro", "macro") ? NULL : x;
}

static struct node *parse_call_block(struct parser *p, uint32_t line)
{
    struct node *x = node_new(p, S_CALL, line);
    if (!x || (tok_is_op(p, '(') && parse_params(p, x)))
        return NULL;
    if (!(x->a = parse_expression(p, true)) || want_block_end(p))
        return NULL;
    if (x->a->kind != E_CALL)
        return parse_fail(p, line, "{%% call %%} needs a call, like name(...)"), NULL;
    return parse_macro_body(p, x, "endcall", "call") ? NULL : x;
}

static struct node *parse_filter_block(struct parser *p, uint32_t line)
{
    struct node *x = node_new(p, S_FILTER, line);
    if (!x || !(x->b = parse_filters(p, NULL)) || want_block_end(p))
        return NULL;
    return (x->d = parse_whole_body(p, "endfilter", "filter")) ? x : NULL;
}

static struct node *parse_with(struct parser *p, uint32_t line)
{
    struct node *x = node_new(p, S_WITH, line);
    struct node_list l = {0};
    while (x && tok_now(p)->kind != T_BLOCK_END) {
        if (l.n && !tok_skip_op(p, ','))
            return tok_unexpected(p, "','"), NULL;
        struct node *target = parse_target(p, false, NULL);
        if (!target || tok_want_op(p, '='))
            return NULL;
        struct node *value = parse_expression(p, true);
        if (!value || node_list_put(p, &l, target) || node_list_put(p, &l, value))
            return NULL;
    }
    if (!x || want_block_end(p) || !(x->d = parse_whole_body(p, "endwith", "with")))
        return NULL;
    x->items = l.v;
    x->n_items = l.n;
    return x;
}

static struct node *parse_generation(struct parser *p, uint32_t line)
{
    struct node *x = node_new(p, S_SCOPE, line);
    if (!x || want_block_end(p))
        return NULL;
    return (x->d = parse_whole_body(p, "endgeneration", "generation")) ? x : NULL;
}

static struct node *parse_do(struct parser *p, uint32_t line)
{
    struct node *x = node_new(p, S_DO, line);
    if (!x || !(x->a = parse_tuple(p, true, false, NULL)) || want_block_end(p))
        return NULL;
    return x;
}

static struct node *parse_jump(struct parser *p, enum node_kind kind, uint32_t line)
{
    if (!p->n_loops)
        return parse_fail(p, line, "break or continue outside of a for loop"), NULL;
    struct node *x = node_new(p, kind, line);
    return x && !want_block_end(p) ? x : NULL;
}

static struct node *parse_break(struct parser *p, uint32_t line)
{
    return parse_jump(p, S_BREAK, line);
}

static struct node *parse_continue(struct parser *p, uint32_t line)
{
    return parse_jump(p, S_CONTINUE, line);
}

static const struct {
    const char *word;
    struct node *(*parse)(struct parser *p, uint32_t line); /* behind the word */
} statements[] = {
    {"if", parse_if},
    {"set", parse_set},
    {"for", parse_for},
    {"macro", parse_macro},
    {"generation", parse_generation},
    {"break", parse_break},
    {"continue", parse_continue},
    {"call", parse_call_block},
    {"filter", parse_filter_block},
    {"with", parse_with},
    {"do", parse_do},
};

static struct node *parse_statement(struct parser *p)
{
    const struct token *word = tok_want_name(p);
    if (!word)
        return NULL;
    for (size_t i = 0; i < ARRAY_LEN(statements); i++)
        if (tok_spells(p, word, statements[i].word)) {
            if (parse_enter(p))
                return NULL;
            struct node *x = node_finish(p, statements[i].parse(p, word->line));
            p->nest--;
            return x;
        }
    static const char *const foreign[] = {"include", "import",     "from", "extends",
                                          "block",   "autoescape", NULL};
    for (size_t i = 0; foreign[i]; i++)
        if (tok_spells(p, word, foreign[i]))
            return parse_fail(p, word->line, "{%% %s %%} is not supported in chat templates",
                              foreign[i]),
                   NULL;
    parse_fail(p, word->line, "unknown tag '%.*s'", (int)MIN(word->n, 60u), p->t->src + word->at);
    return NULL;
}

/* One piece of a body: text, an output, a statement. */
static struct node *parse_piece(struct parser *p)
{
    const struct token *t = tok_now(p);
    tok_next(p);
    if (t->kind == T_BLOCK_BEGIN)
        return parse_statement(p);
    if (t->kind == T_TEXT) {
        struct node *x = node_new(p, S_TEXT, t->line);
        return x && !const_str(&x->v, p, p->t->src + t->at, t->n) ? x : NULL;
    }
    struct node *x = node_new(p, S_OUTPUT, t->line);
    if (!x || !(x->a = parse_tuple(p, true, false, NULL)))
        return NULL;
    if (tok_now(p)->kind != T_VAR_END)
        return tok_unexpected(p, "}}"), NULL;
    tok_next(p);
    return node_finish(p, x);
}

static struct node *parse_body(struct parser *p, const char *const *ends, const char *opened)
{
    uint32_t line = tok_now(p)->line;
    struct node *x = node_new(p, S_BLOCK, line);
    struct node_list l = {0};
    for (;;) {
        const struct token *t = tok_now(p);
        if (t->kind == T_EOF && !ends)
            break;
        if (t->kind == T_EOF)
            return parse_fail(p, line, "the template ends inside {%% %s %%}: no {%% %s %%}", opened,
                              ends[0] && ends[1] ? "end" : ends[0]),
                   NULL;
        if (t->kind == T_BLOCK_BEGIN && at_end_word(p, ends)) {
            tok_next(p);
            break;
        }
        struct node *piece = x ? parse_piece(p) : NULL;
        if (!piece || node_list_put(p, &l, piece))
            return NULL;
    }
    if (x) {
        x->items = l.v;
        x->n_items = l.n;
    }
    return node_finish(p, x);
}

int parse_program(struct template *t, struct err *e)
{
    struct parser p = {.t = t, .e = e};
    int rc = -1;
    if (template_lex(&p.toks, t->src, t->n_src, e))
        goto out;
    t->root = parse_body(&p, NULL, NULL);
    if (!t->root)
        goto out;
    static const char *const own[] = {"loop", "caller", "kwargs", "varargs"};
    uint32_t *const slots[] = {&t->sym_loop, &t->sym_macro[0], &t->sym_macro[1], &t->sym_macro[2]};
    for (size_t i = 0; i < ARRAY_LEN(own); i++)
        if (sym_intern(slots[i], &p, own[i], strlen(own[i])))
            goto out;
    t->globals = parse_alloc(&p, (t->n_syms + 1) * sizeof *t->globals);
    if (!t->globals)
        goto out;
    for (uint32_t i = 0; i < t->n_syms; i++)
        t->globals[i] = global_find(t->syms[i]);
    rc = 0;
out:
    mem_free(p.toks.v);
    mem_free(p.table);
    return rc;
}
