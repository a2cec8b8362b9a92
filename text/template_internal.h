/* The template engine's private types: tokens, syntax tree, values, the state of one rendering.
 * A struct template owns its source copy, tree and constants (arena) and never changes after
 * template_new. Everything made while rendering lives in the arena of struct render, which counts
 * bytes and steps against the caller's budget. Semantics follow Jinja2 3.1 and Python 3 as chat
 * templates see them (sandboxed, autoescape off). */
#ifndef INGOT_TEMPLATE_INTERNAL_H
#define INGOT_TEMPLATE_INTERNAL_H

#include "text/text.h"

#include <jansson.h>
#include <string.h>

enum {
    TEMPLATE_MAX_SRC = 1 << 20,          /* bytes of source */
    TEMPLATE_MAX_PARSE_BYTES = 32 << 20, /* tree and constants */
    TEMPLATE_MAX_NEST = 200,             /* brackets, blocks: recursion of the parser */
    TEMPLATE_MAX_TREE = 400,             /* depth of the tree, long chains of operators included */
    TEMPLATE_MAX_EVAL = 1500,            /* nested evaluations, macros included */
    TEMPLATE_MAX_VALUE_NEST = 200,       /* of lists and dicts when walked */
    TEMPLATE_MAX_RANGE = 100000,         /* items of range(), as in Jinja2's sandbox */
};

/* ---- values ---- */

enum val_kind {
    V_MISSING, /* no value at all: argument not given, variable not set */
    V_UNDEFINED,
    V_NONE,
    V_BOOL,
    V_INT,
    V_FLOAT,
    V_STR,
    V_LIST,
    V_TUPLE,
    V_DICT,
    V_VIEW, /* dict.items(), .keys(), .values() */
    V_RANGE,
    V_ITER, /* Python's generator: consumed by walking it */
    V_NAMESPACE,
    V_MACRO,
    V_FUNC,   /* a row of the table of globals */
    V_METHOD, /* a row of a table of methods and its receiver */
    V_LOOP,
    V_CYCLER,
    V_JOINER,
    N_VAL_KINDS,
};

/* Bytes behind strings made by concatenation; `used` grows only by appending to the string that
 * ends there, so that s = s ~ t in a loop takes linear time and memory. */
struct strbuf {
    size_t used, cap;
    char data[];
};

struct tstr {
    const char *p;    /* not NUL-terminated; mostly UTF-8, never trusted to be */
    size_t n;         /* bytes */
    size_t n_chars;   /* characters; SIZE_MAX = not counted yet (never so in constants) */
    uint64_t hash;    /* 0 = not computed yet (never so in constants) */
    struct strbuf *b; /* the buffer p points into, or NULL */
};

struct value {
    uint8_t kind;
    bool markup; /* V_STR that |safe or |escape made: joining it escapes the other side */
    union {
        bool b;
        int64_t i;
        double f;
        struct tstr *s;
        const struct tstr *hint; /* V_UNDEFINED: the name that was looked up, or NULL */
        struct tlist *l;         /* V_LIST, V_TUPLE */
        struct tdict *d;         /* V_DICT, V_NAMESPACE */
        struct view *view;
        struct range *range;
        struct iter *iter;
        struct macro *macro;
        const struct builtin *func;
        struct method *method;
        struct loop *loop;
        struct cycler *cycler;
        struct joiner *joiner;
    };
};

struct tlist {
    struct value *v;
    size_t n, cap;
};

struct dict_entry {
    struct value key, val;
    uint64_t hash;
};
struct tdict { /* in order of insertion */
    struct dict_entry *e;
    uint32_t n, cap;
    uint32_t *index; /* open addressing over e, entry + 1; NULL while small */
    uint32_t index_cap;
};

struct view {
    struct tlist *items;
    char which; /* 'i'tems, 'k'eys, 'v'alues */
};
struct range {
    int64_t start, stop, step, n; /* n items */
};
struct iter {
    struct tlist *items;
    size_t at;
    const char *name; /* of the filter that made it */
};
struct method {
    const struct builtin *row;
    struct value self;
};
struct cycler {
    struct tlist *items;
    size_t at;
};
struct joiner {
    struct value sep;
    bool used;
};

#define VAL_BOOL(x)  ((struct value){.kind = V_BOOL, .b = (x)})
#define VAL_INT(x)   ((struct value){.kind = V_INT, .i = (x)})
#define VAL_FLOAT(x) ((struct value){.kind = V_FLOAT, .f = (x)})
#define VAL_NONE     ((struct value){.kind = V_NONE})
#define VAL_UNDEF    ((struct value){.kind = V_UNDEFINED})
#define VAL_LIST(x)  ((struct value){.kind = V_LIST, .l = (x)})
#define VAL_TUPLE(x) ((struct value){.kind = V_TUPLE, .l = (x)})
#define VAL_DICT(x)  ((struct value){.kind = V_DICT, .d = (x)})

/* ---- tokens ---- */

enum tok_kind {
    T_EOF,
    T_TEXT,
    T_BLOCK_BEGIN,
    T_BLOCK_END,
    T_VAR_BEGIN,
    T_VAR_END,
    T_NAME,
    T_STR, /* quotes included */
    T_INT,
    T_FLOAT,
    T_OP,
};
enum op { /* one-character operators are their character */
          OP_EQ = 128,
          OP_NE,
          OP_LE,
          OP_GE,
          OP_POW,
          OP_FLOORDIV,
          OP_IN,
          OP_NOT_IN,
};
struct token {
    uint8_t kind, op; /* op: of T_OP */
    uint32_t line, at, n;
};
struct tokens {
    struct token *v; /* ends with T_EOF; mem_free */
    size_t n, cap;
};
/* src has its newlines normalized already. */
int template_lex(struct tokens *out, const char *src, size_t n, struct err *e);

/* ---- syntax tree ---- */

enum node_kind {
    E_CONST,   /* v */
    E_NAME,    /* sym */
    E_LIST,    /* items */
    E_TUPLE,   /* items; as a target: names, nested tuples, E_NSREF */
    E_DICT,    /* items: key, value, key, value ... */
    E_ATTR,    /* a.v (v a string constant, rows: methods of that name) */
    E_ITEM,    /* a[b] */
    E_SLICE,   /* a[items[0]:items[1]:items[2]], absent ones NULL */
    E_CALL,    /* a(args) */
    E_FILTER,  /* a | v(args); a is NULL at the head of a filter block's chain */
    E_TEST,    /* a is v(args) */
    E_NOT,     /* not a */
    E_NEG,     /* - a */
    E_POS,     /* + a */
    E_AND,     /* a and b */
    E_OR,      /* a or b */
    E_BINARY,  /* a op b */
    E_CONCAT,  /* items joined by ~ */
    E_COMPARE, /* a ops[0] items[0] ops[1] items[1] ... */
    E_COND,    /* b if a else c (c may be NULL) */
    E_NSREF,   /* assignment target sym.v */
    N_EXPR_KINDS,
    S_BLOCK = N_EXPR_KINDS, /* items in order */
    S_TEXT,                 /* v */
    S_OUTPUT,               /* {{ a }} */
    S_IF,                   /* items: test, block, test, block ...; c: else block or NULL */
    S_FOR,                  /* for a in b if c: d, else: rest; flag: recursive */
    S_SET,                  /* a = b */
    S_SET_BLOCK,            /* a = d through the filters b (or NULL) */
    S_MACRO,                /* sym, params, d */
    S_CALL,                 /* macro (params, d) given as caller to the call a */
    S_FILTER,               /* d through the filters b */
    S_WITH,                 /* items: target, value, target, value ...; d */
    S_SCOPE,                /* d in a scope of its own */
    S_DO,                   /* a, result dropped */
    S_BREAK,
    S_CONTINUE,
    N_NODE_KINDS,
};

enum arg_kind { ARG_POS, ARG_KEYWORD, ARG_STAR, ARG_STARSTAR };
struct arg {
    enum arg_kind kind;
    const struct tstr *name; /* ARG_KEYWORD */
    struct node *e;
};
struct param {
    uint32_t sym;
    struct node *fallback; /* default expression, or NULL */
};

enum { METHODS_STR, METHODS_DICT, METHODS_LIST, METHODS_TUPLE, N_METHOD_TABLES };
struct attr_rows {
    const struct builtin *row[N_METHOD_TABLES];
};

enum { MACRO_CALLER = 1, MACRO_KWARGS = 2, MACRO_VARARGS = 4 }; /* which the body mentions */

struct node {
    uint8_t kind, op;
    uint8_t uses; /* S_MACRO, S_CALL: MACRO_* */
    bool flag;
    uint16_t depth; /* 1 for a leaf */
    uint32_t line, sym;
    struct node *a, *b, *c, *d, *rest;
    uint32_t n_items, n_args;
    struct node **items;
    union {
        struct arg *args;     /* n_args: E_CALL, E_FILTER, E_TEST */
        struct param *params; /* n_args: S_MACRO, S_CALL */
        uint8_t *ops;         /* n_items: E_COMPARE */
    };
    struct value v;
    const struct attr_rows *rows; /* E_ATTR: NULL when no method has the name */
    const struct builtin *row;    /* E_FILTER, E_TEST: NULL when there is none of that name */
};

struct template
{
    struct arena arena;
    char *src;
    size_t n_src;
    struct node *root; /* S_BLOCK */
    uint32_t n_syms;
    struct tstr **syms;             /* n_syms names */
    const struct builtin **globals; /* n_syms: the global function of that name, or NULL */
    uint32_t sym_loop;              /* `loop` */
    uint32_t sym_macro[3];          /* caller, kwargs, varargs: the bits of MACRO_* */
};

/* ---- parser: one struct for statements (template_parse.c) and expressions (template_expr.c) ----
 */

struct macro_frame {
    struct macro_frame *up;
    uint8_t uses;
};
struct parser {
    struct template *t;
    struct err *e;
    struct tokens toks;
    size_t at;
    int nest;    /* recursion now */
    int n_loops; /* for loops around, within the macro */
    struct macro_frame *macro;
    uint32_t *table; /* symbol hash table, sym + 1; mem_free */
    uint32_t table_cap, syms_cap;
};
struct node_list {
    struct node **v;
    uint32_t n, cap;
};
int parse_fail(struct parser *p, uint32_t line, const char *fmt, ...) PRINTF_LIKE(3, 4);
void *parse_alloc(struct parser *p, size_t n);
struct node *node_new(struct parser *p, enum node_kind kind, uint32_t line);
int node_list_put(struct parser *p, struct node_list *l, struct node *x);
/* Set x's depth from its children; error when the tree gets too deep. NULL passes through. */
struct node *node_finish(struct parser *p, struct node *x);
int sym_intern(uint32_t *sym, struct parser *p, const char *s, size_t n);
int const_str(struct value *out, struct parser *p, const char *s, size_t n);
int parse_enter(struct parser *p); /* one level deeper, or the error that it is too deep */

const struct token *tok_now(const struct parser *p);
const struct token *tok_ahead(const struct parser *p);
bool tok_is_op(const struct parser *p, int op);
bool tok_is_name(const struct parser *p, const char *name);
bool tok_skip_op(struct parser *p, int op);
bool tok_skip_name(struct parser *p, const char *name);
int tok_want_op(struct parser *p, int op);
const struct token *tok_want_name(struct parser *p); /* NULL and an error */
int tok_unexpected(struct parser *p, const char *wanted);

struct node *parse_expression(struct parser *p, bool with_cond);
/* Comma list as Jinja's tags take it: one expression, or a tuple. `stop` (or NULL) is a name that
 * ends it. */
struct node *parse_tuple(struct parser *p, bool with_cond, bool parens, const char *stop);
struct node *parse_target(struct parser *p, bool with_namespace, const char *stop);
struct node *parse_filters(struct parser *p, struct node *of); /* zero or more | filters */
int parse_args(struct parser *p, struct node *call);           /* at ( */
int parse_program(struct template *t, struct err *e);

/* ---- rendering ---- */

struct var {
    uint32_t sym;
    struct value v;
};
struct scope {
    struct scope *up;
    struct var *vars;
    uint32_t n, cap;
    bool kept; /* a macro remembers it: may not be reused for the next round of a loop */
};
enum flow { FLOW_ON, FLOW_BREAK, FLOW_CONTINUE };

struct render {
    const struct template *t;
    struct err *e;
    struct arena arena;
    struct buf *out;  /* finished text, and above a mark the text being captured */
    size_t out_base;  /* out->n when rendering began */
    size_t n_bytes;   /* taken from the arena */
    size_t max_bytes; /* of n_bytes and out together */
    uint64_t n_steps; /* left */
    int depth;        /* nested evaluations now */
    uint32_t line;
    enum flow flow;
    struct value *root; /* t->n_syms top-level variables */
    struct scope *scope;
    struct scope top; /* its variables are `root` */
    int64_t now;
    json_t *held; /* array of what from_json parsed: values point into it */
};

/* Errors; all return -1. render_fail puts the line in front. */
int render_fail(struct render *r, const char *fmt, ...) PRINTF_LIKE(2, 3);
int render_over(struct render *r, const char *what);
/* Spend n steps; -1 when the budget is used up. */
int render_spend(struct render *r, uint64_t n);
/* Scanning costs: bytes copied or compared at once, and characters handled one by one. */
int render_reserve(struct render *r, size_t n_bytes); /* would so much fit? */
int render_spend_bulk(struct render *r, size_t n_bytes);
int render_spend_chars(struct render *r, size_t n_bytes);
void *render_alloc(struct render *r, size_t n_bytes); /* zeroed; NULL and an error */
void *render_array(struct render *r, size_t n, size_t item_bytes);
int render_put(struct render *r, const void *p, size_t n);
int render_puts(struct render *r, const char *s);
static inline size_t render_mark(const struct render *r)
{
    return r->out->n;
}
/* The text put since mark becomes a string and leaves the output. */
int render_take(struct value *out, struct render *r, size_t mark);

/* strings: template_string.c */
int str_new(struct value *out, struct render *r, const char *p, size_t n);  /* copies */
int str_view(struct value *out, struct render *r, const char *p, size_t n); /* p must last */
/* Part of a string, sharing its bytes and its markup. */
int str_sub(struct value *out, struct render *r, struct value of, size_t at, size_t n);
int str_cstr(struct value *out, struct render *r, const char *s);
int str_concat(struct value *out, struct render *r, struct value a, struct value b);
size_t str_chars(struct tstr *s);
uint64_t str_hash(struct tstr *s);
bool str_equal(const struct tstr *a, const struct tstr *b);
bool str_is(const struct tstr *s, const char *lit);
size_t char_len(const char *p, size_t n);                  /* bytes of the first character, >= 1 */
size_t char_decode(uint32_t *cp, const char *p, size_t n); /* as char_len; bad bytes give U+FFFD */
size_t str_byte_of(struct tstr *s, size_t char_index);     /* clamped to the end */
const char *mem_find(const char *p, size_t n, const char *what, size_t n_what);
bool char_is_space(uint32_t cp);     /* str.isspace */
bool char_is_printable(uint32_t cp); /* str.isprintable */
bool char_is_alpha(uint32_t cp);
bool char_is_numeric(uint32_t cp);
bool char_is_cased(uint32_t cp, bool *upper);
enum { TRIM_LEFT = 1, TRIM_RIGHT = 2 };
/* Trim white space, or the characters of `set`. */
int str_trim(struct value *out, struct render *r, struct value s, const struct tstr *set, int ends);
enum str_case { CASE_LOWER, CASE_UPPER, CASE_TITLE, CASE_CAPITAL, CASE_SWAP, CASE_FOLD };
int str_recase(struct value *out, struct render *r, struct value s, enum str_case how);
int str_replace(struct value *out, struct render *r, struct value s, const struct value from_to[2],
                int64_t max);
int str_escape_html(struct value *out, struct render *r, struct value s);
void float_repr(char out[32], double f);
int put_str_repr(struct render *r, const struct tstr *s);

/* values: template_value.c */
const char *val_type(struct value v); /* Python's name of the type */
bool val_truth(struct value v);
int val_equal(bool *eq, struct render *r, struct value a, struct value b);
int val_order(int *cmp, struct render *r, struct value a, struct value b); /* -1, 0, 1 */
int val_hash(uint64_t *h, struct render *r, struct value v);
int val_contains(bool *in, struct render *r, struct value item, struct value box);
int val_len(int64_t *n, struct render *r, struct value v);
bool val_is_number(struct value v);                               /* int, float or bool */
double val_double(struct value v);                                /* of a number */
int put_str(struct render *r, struct value v);                    /* as str() */
int put_repr(struct render *r, struct value v);                   /* as repr() */
int val_str(struct value *out, struct render *r, struct value v); /* strings stay as they are */
int val_from_json(struct value *out, struct render *r, const json_t *j);

int list_new(struct tlist **out, struct render *r, size_t cap);
int list_put(struct render *r, struct tlist *l, struct value v);
int dict_new(struct tdict **out, struct render *r);
int dict_find(struct value **val, struct render *r, struct tdict *d,
              struct value key); /* or NULL */
int dict_put(struct render *r, struct tdict *d, struct value key, struct value val);
int dict_put_cstr(struct render *r, struct tdict *d, const char *key, struct value val);
struct value *dict_find_str(struct tdict *d, struct tstr *key); /* NULL when absent */
int dict_remove(struct render *r, struct tdict *d, size_t at);
int dict_items(struct tlist **out, struct render *r, struct tdict *d, char which); /* see view */

struct walk { /* over anything iterable */
    struct value src;
    size_t at;
};
int walk_begin(struct walk *w, struct render *r, struct value v);      /* error: not iterable */
int walk_next(struct value *out, struct walk *w, struct render *r);    /* 1 item, 0 end, -1 error */
int val_to_list(struct tlist **out, struct render *r, struct value v); /* a new list */

/* calls and tables: template_call.c */
enum { MAX_BOUND = 6 };
struct kwarg {
    const struct tstr *name;
    struct value v;
};
struct call {
    struct value self; /* the filtered value, a method's receiver, a test's subject */
    struct value *pos;
    struct kwarg *kw;
    uint32_t n_pos, n_kw;
    const struct builtin *row;
    struct value arg[MAX_BOUND]; /* bound to the row's params; V_MISSING where not given */
};
typedef int (*builtin_fn)(struct value *out, struct render *r, struct call *c);
struct builtin {
    const char *name;
    builtin_fn fn;
    const char *params; /* "a,b,c"; "*" = the function reads pos and kw itself */
    int n_required;
};
struct builtin_table {
    const struct builtin *rows;
    size_t n;
};
extern const struct builtin_table filter_table, filter_seq_table, test_table, global_table;
extern const struct builtin_table str_methods, dict_methods, list_methods, tuple_methods;
const struct builtin *filter_find(const struct tstr *name);
const struct builtin *test_find(const struct tstr *name);
const struct builtin *global_find(const struct tstr *name);
const struct builtin *method_find(int table, const struct tstr *name);
int method_table_of(struct value v); /* METHODS_*, or -1 */

/* Run a row: binds the arguments, names it in errors. */
int builtin_call(struct value *out, struct render *r, const struct builtin *row, struct call *c);
int val_call(struct value *out, struct render *r, struct value f, struct call *c);
int call_filter(struct value *out, struct render *r, const struct tstr *name, struct call *c);
int call_test(bool *out, struct render *r, const struct tstr *name, struct call *c);
/* Typed arguments with defaults; an error names the row and the parameter. */
int arg_int(int64_t *out, struct render *r, const struct call *c, int i, int64_t fallback);
int arg_str(struct tstr **out, struct render *r, const struct call *c, int i); /* required */
static inline bool arg_given(const struct call *c, int i)
{
    return c->arg[i].kind != V_MISSING && c->arg[i].kind != V_NONE;
}

/* expressions: template_eval.c, template_ops.c */
int eval(struct value *out, struct render *r, const struct node *n);
int eval_args(struct call *c, struct render *r, const struct node *n);
int eval_filters(struct value *out, struct render *r, const struct node *n, struct value input);
int op_binary(struct value *out, struct render *r, int op, struct value a, struct value b);
int op_compare(bool *out, struct render *r, int op, struct value a, struct value b);
int op_unary(struct value *out, struct render *r, bool negate, struct value a);
int op_slice(struct value *out, struct render *r, struct value of, const struct value part[3]);
int get_attr(struct value *out, struct render *r, struct value of, struct value name,
             const struct attr_rows *rows); /* of.name; rows may be NULL */
int get_item(struct value *out, struct render *r, struct value of, struct value key);
int get_path(struct value *out, struct render *r, struct value of, struct value path); /* "a.b.0" */
int undefined_use(struct render *r, struct value v); /* the error of using an undefined value */

/* statements: template_run.c */
struct macro {
    const struct node *node; /* S_MACRO or S_CALL */
    struct scope *scope;     /* where it was defined */
    const struct tstr *name; /* NULL: a caller block */
};
struct loop {
    const struct node *node; /* S_FOR */
    struct walk walk;
    struct scope *scope;                 /* of the rounds */
    struct scope *test_scope;            /* of the filter's evaluations, or NULL */
    int64_t index0, depth0, length;      /* length: -1 = not known yet */
    struct value current, before, after; /* V_MISSING where there is none; after: peeked */
    struct value changed;                /* last arguments of loop.changed() */
    bool filtered;                       /* walk holds only what passed the filter */
};
int exec(struct render *r, const struct node *n);
int macro_call(struct value *out, struct render *r, const struct macro *m, struct call *c);
int loop_attr(struct value *out, struct render *r, struct loop *l, struct value name);
int loop_recurse(struct value *out, struct render *r, struct loop *l, struct call *c);
int var_get(struct value *out, struct render *r, uint32_t sym);

/* formats: template_format.c, template_json.c */
int format_percent(struct value *out, struct render *r, struct value fmt, struct value args);
int format_braces(struct value *out, struct render *r, struct value fmt, const struct call *c);
int format_time(struct render *r, const struct tstr *fmt);
struct json_style {
    bool ascii, sort_keys;
    const struct tstr *indent; /* NULL: one line */
    const struct tstr *item_sep, *key_sep;
};
int put_json(struct render *r, const struct json_style *style, struct value v);
int filter_tojson(struct value *out, struct render *r, struct call *c);
int filter_from_json(struct value *out, struct render *r, struct call *c);

#endif
