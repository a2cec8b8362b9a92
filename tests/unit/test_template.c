/* Tests of the chat template engine: every published template with its reference cases (a table of
 * counts; listed templates must be complete), replay cases, and a promise a feature. */
#include "tests/unit/unit.h"
#include "text/text.h"

#include <dirent.h>
#include <jansson.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const int64_t FIXED_NOW = 1768478400; /* 2026-01-15 12:00:00 UTC */

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { MAX_MS = 20000 }; /* instrumented code: only that it ends */
#else
enum { MAX_MS = 1000 };
#endif

/* ---- one rendering ---- */

static int render_source(struct buf *out, const char *src, size_t n, const struct template_args *a,
                         struct err *e)
{
    struct template *t = NULL;
    if (template_new(&t, src, n, e))
        return -1;
    int rc = template_render(out, t, a, e);
    template_free(t);
    return rc;
}

/* Renders src with the variables of the JSON text; the result is in a static buffer, or the error's
 * message behind "!". */
static const char *shown(const char *src, const char *vars)
{
    static struct buf out;
    struct err e = {0};
    json_error_t je;
    json_t *extra = vars ? json_loads(vars, JSON_DECODE_ANY, &je) : json_object();
    buf_clear(&out);
    OK_MSG(extra != NULL, "bad test data: %s", vars ? vars : "");
    struct template_args a = {.extra = extra, .now = FIXED_NOW};
    if (render_source(&out, src, strlen(src), &a, &e)) {
        OK(out.n == 0);
        OK(e.code != ERR_NONE);
        buf_printf(&out, "!%s", e.msg);
    }
    json_decref(extra);
    return buf_str(&out);
}

#define SHOWS(src, vars, want)                                                                     \
    do {                                                                                           \
        const char *got_ = shown(src, vars);                                                       \
        OK_MSG(!strcmp(got_, want), "%s\n  gives  %s\n  not    %s", src, got_, want);              \
    } while (0)
#define FAILS(src, vars, has)                                                                      \
    do {                                                                                           \
        const char *got_ = shown(src, vars);                                                       \
        OK_MSG(got_[0] == '!' && strstr(got_, has), "%s\n  gives  %s\n  not an error with %s",     \
               src, got_, has);                                                                    \
    } while (0)

/* ---- the reference cases ---- */

/* Every published template was complete when this was written, so each must stay so. */
struct tally {
    int n, n_right;
};

static bool error_is_right(const json_t *c, const struct err *e)
{
    const char *kind = json_string_value(json_object_get(c, "error_kind"));
    const char *words = json_string_value(json_object_get(c, "error"));
    if (!words || !kind)
        return false;
    if (strcmp(kind, "raised"))
        return e->code == ERR_CORRUPT;
    return e->code == ERR_USAGE && !strncmp(e->msg, words, sizeof e->msg - 1);
}

static bool text_is_right(const json_t *c, const struct buf *out)
{
    const json_t *want = json_object_get(c, "expected");
    return want && json_string_length(want) == out->n &&
           (!out->n || !memcmp(json_string_value(want), out->data, out->n));
}

static void args_of(struct template_args *a, const json_t *c)
{
    const json_t *tools = json_object_get(c, "tools");
    *a = (struct template_args){
        .messages = json_object_get(c, "messages"),
        .tools = json_is_null(tools) ? NULL : tools,
        .extra = json_object_get(c, "extra"),
        .add_generation_prompt = json_is_true(json_object_get(c, "add_generation_prompt")),
        .bos_token = json_string_value(json_object_get(c, "bos_token")),
        .eos_token = json_string_value(json_object_get(c, "eos_token")),
        .now = FIXED_NOW,
    };
}

static bool run_case(const struct template *t, const json_t *c, const char *name)
{
    struct template_args a;
    struct buf out = {0};
    struct err e = {0};
    args_of(&a, c);
    int rc = template_render(&out, t, &a, &e);
    bool right = rc ? error_is_right(c, &e) : text_is_right(c, &out);
    if (!right && getenv("TEMPLATE_SHOW"))
        printf("--- %s %s\n=== got\n%s\n=== want\n%s\n", name,
               json_string_value(json_object_get(c, "name")), rc ? e.msg : buf_str(&out),
               json_string_value(json_object_get(c, "expected") ? json_object_get(c, "expected")
                                                                : json_object_get(c, "error")));
    buf_fini(&out);
    return right;
}

static void run_cases(struct tally *n, const struct template *t, const char *cases_path,
                      const char *name)
{
    struct buf text = {0};
    struct err e = {0};
    if (OK_CALL(file_read_all(&text, cases_path, 64 << 20, &e), e))
        for (char *line = text.data, *end; line && *line; line = end) {
            json_error_t je;
            end = strchr(line, '\n');
            if (end)
                *end++ = 0;
            json_t *c = json_loads(line, JSON_ALLOW_NUL, &je);
            if (OK_MSG(c != NULL, "%s: %s", cases_path, je.text)) {
                n->n++;
                n->n_right += run_case(t, c, name);
            }
            json_decref(c);
        }
    buf_fini(&text);
}

static struct tally run_template(const char *dir, const char *name)
{
    char path[1000];
    struct tally n = {0};
    struct buf src = {0};
    struct err e = {0};
    struct template *t = NULL;
    snprintf(path, sizeof path, "%s/%s.jinja", dir, name);
    if (OK_CALL(file_read_all(&src, path, 1 << 20, &e), e) &&
        OK_CALL(template_new(&t, src.data, src.n, &e), e)) {
        snprintf(path, sizeof path, "%s/%s.cases.jsonl", dir, name);
        run_cases(&n, t, path, name);
    }
    template_free(t);
    buf_fini(&src);
    return n;
}

static int by_name(const struct dirent **a, const struct dirent **b)
{
    return strcmp((*a)->d_name, (*b)->d_name);
}

static int is_template(const struct dirent *d)
{
    size_t n = strlen(d->d_name);
    return n > 6 && !strcmp(d->d_name + n - 6, ".jinja");
}

static void test_published_templates_give_reference_text(void)
{
    const char *dir = unit_shared("templates");
    if (!dir)
        return;
    struct dirent **files = NULL;
    int n = scandir(dir, &files, is_template, by_name), total = 0, right = 0;
    OK(n > 0);
    for (int i = 0; i < n; i++) {
        char name[256];
        snprintf(name, sizeof name, "%.*s", (int)strlen(files[i]->d_name) - 6, files[i]->d_name);
        struct tally t = run_template(dir, name);
        printf("  %-55s %3d of %3d\n", name, t.n_right, t.n);
        OK_MSG(t.n > 0 && t.n == t.n_right, "%s: %d of %d cases are right", name, t.n_right, t.n);
        total += t.n;
        right += t.n_right;
        free(files[i]);
    }
    free(files);
    printf("  %-55s %3d of %3d\n", "all", right, total);
}

/* ---- replay cases ---- */

static void append_parts(struct buf *out, const json_t *parts)
{
    if (json_is_string(parts)) {
        buf_put(out, json_string_value(parts), json_string_length(parts));
        return;
    }
    for (size_t i = 0; i < json_array_size(parts); i++) {
        const json_t *p = json_array_get(parts, i), *again = json_object_get(p, "repeat");
        json_int_t n = again ? json_integer_value(json_array_get(again, 1)) : 1;
        for (json_int_t k = 0; k < n; k++)
            append_parts(out, again ? json_array_get(again, 0) : p);
    }
}

static bool has_any(const char *text, const json_t *words)
{
    for (size_t i = 0; i < json_array_size(words); i++)
        if (strcasestr(text, json_string_value(json_array_get(words, i))))
            return true;
    return false;
}

static void replay_case(const json_t *c)
{
    const char *id = json_string_value(json_object_get(c, "id"));
    struct template_args a;
    struct buf src = {0}, out = {0};
    struct err e = {0};
    append_parts(&src, json_object_get(c, "template"));
    args_of(&a, c);
    uint64_t start = now_ns();
    int rc = render_source(&out, src.data, src.n, &a, &e);
    uint64_t ms = (now_ns() - start) / 1000000;
    OK_MSG(ms < MAX_MS, "%s: took %llu ms", id, (unsigned long long)ms);
    if (json_is_true(json_object_get(c, "error")))
        OK_MSG(rc && has_any(e.msg, json_object_get(c, "message_has_any")), "%s: %s", id,
               rc ? e.msg : "no error");
    else if (json_object_get(c, "expected"))
        OK_MSG(!rc && text_is_right(c, &out), "%s: %s", id, rc ? e.msg : buf_str(&out));
    else
        OK_MSG(rc || !has_any(buf_str(&out), json_object_get(c, "not_contains")), "%s: %s", id,
               buf_str(&out));
    buf_fini(&src);
    buf_fini(&out);
}

static void test_replayed_reports_end_soon_with_a_named_error(void)
{
    const char *path = unit_shared("cases/templates/cases.jsonl");
    struct buf text = {0};
    struct err e = {0};
    int n = 0;
    if (!path)
        return;
    if (OK_CALL(file_read_all(&text, path, 64 << 20, &e), e))
        for (char *line = text.data, *end; line && *line; line = end) {
            json_error_t je;
            if ((end = strchr(line, '\n')))
                *end++ = 0;
            json_t *c = json_loads(line, 0, &je);
            /* Cases of the layer "chat" need the preparation of messages, which is not here. */
            if (c && !strcmp(json_string_value(json_object_get(c, "layer")), "engine")) {
                replay_case(c);
                n++;
            }
            json_decref(c);
        }
    OK(n >= 10);
    buf_fini(&text);
}

/* ---- chatml, as small models carry it ---- */

static const char chatml[] =
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are helpful<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

static void test_chatml_text_is_exact(void)
{
    json_error_t je;
    struct buf out = {0};
    struct err e = {0};
    json_t *m = json_loads("[{\"role\":\"user\",\"content\":\"Hi {{ 1 }} \\u00e9\"}]", 0, &je);
    struct template_args a = {.messages = m, .add_generation_prompt = true};
    buf_puts(&out, "kept:");
    OK_CALL(render_source(&out, chatml, strlen(chatml), &a, &e), e);
    OK(!strcmp(buf_str(&out),
               "kept:<|im_start|>system\nYou are helpful<|im_end|>\n<|im_start|>user\n"
               "Hi {{ 1 }} \xc3\xa9<|im_end|>\n<|im_start|>assistant\n"));
    json_decref(m);
    buf_fini(&out);
}

static void test_variables_are_bound_as_promised(void)
{
    SHOWS("{{ tools is none }}{{ documents is none }}{{ [bos_token, eos_token, nothing is defined] "
          "}}",
          NULL, "TrueTrue['', '', False]");
    SHOWS("{{ tools }}{{ documents }}{{ bos_token }}",
          "{\"tools\":[1],\"documents\":2,\"bos_token\":\"b\"}", "[1]2b");
    SHOWS("{{ a }} {{ b }} {{ c }}", "{\"a\":[1,2.5,null],\"b\":{\"x\":true},\"c\":\"d\"}",
          "[1, 2.5, None] {'x': True} d");
}

/* ---- white space ---- */

static void test_blocks_take_their_line_with_them(void)
{
    SHOWS("a\n  {% if true %}\n  b\n  {% endif %}\n  c\n", NULL, "a\n  b\n  c");
    SHOWS("a\n  {%+ if true +%}\n b{% endif %}", NULL, "a\n  \n b");
    SHOWS("a \n {%- if true -%} \n b \n {%- endif -%} \n c", NULL, "abc");
    SHOWS("x \n {{- 1 -}} \n y", NULL, "x1y");
    SHOWS("a\n  {# c #}\n b{#- c -#} d", NULL, "a\n bd");
    SHOWS("  {{ 1 }}\n\n", NULL, "  1\n");
    SHOWS("a\r\nb\rc\r\n", NULL, "a\nb\nc");
    SHOWS("x {%- raw -%}  {{ y }} {% z {%- endraw %} w", NULL, "x{{ y }} {% z w");
    SHOWS("{{ {'a': {'b': 1}}['a']['b'] }}{{ '}}' }}", NULL, "1}}");
    SHOWS("{#-#} b{#", NULL, "!chat template line 1: the comment opened by {# has no #}");
}

/* ---- statements ---- */

static void test_loops_know_where_they_are(void)
{
    SHOWS("{% for x in [7,8] %}{{ [loop.index, loop.index0, loop.revindex, loop.revindex0, "
          "loop.first,"
          " loop.last, loop.length, loop.depth, loop.previtem, loop.nextitem] }}{% endfor %}",
          NULL,
          "[1, 0, 2, 1, True, False, 2, 1, Undefined, 8]"
          "[2, 1, 1, 0, False, True, 2, 1, 7, Undefined]");
    SHOWS(
        "{% for x in [1,2,3,4] if x is even %}{{ x }}{{ loop.last }}{{ loop.length }};{% endfor %}",
        NULL, "2False2;4True2;");
    SHOWS("{% for x in [] %}a{% else %}b{% endfor %}", NULL, "b");
    SHOWS("{% for a, (b, c) in [(1, (2, 3))] %}{{ a }}{{ b }}{{ c }}{% endfor %}", NULL, "123");
    SHOWS("{% for x in [1,2,3] %}{% if x == 2 %}{% continue %}{% endif %}{{ x }}{% endfor %}", NULL,
          "13");
    SHOWS("{% for x in [1,2,3] %}{% if x == 2 %}{% break %}{% endif %}{{ x }}{% endfor %}z", NULL,
          "1z");
    SHOWS("{% for x in [1,1,2] %}{{ loop.cycle('a', 'b') }}{{ loop.changed(x) }} {% endfor %}",
          NULL, "aTrue bFalse aTrue ");
    SHOWS("{% for x in [[1,[2,[]]]] recursive %}{{ x[0] }}{{ loop.depth }}"
          "{% if x[1] %}({{ loop([x[1]]) }}){% endif %}{% endfor %}",
          NULL, "11(22)");
    FAILS("{% for x in 5 %}{% endfor %}", NULL, "not iterable");
    FAILS("\n{% for a, b in [[1]] %}{% endfor %}", NULL, "line 2");
}

static void test_scopes_hold_what_is_set_inside(void)
{
    SHOWS("{% set x = 1 %}{% for i in [2,3] %}{{ x }}{% set x = i %}{{ x }}{% endfor %}{{ x }}",
          NULL, "12131");
    SHOWS("{% set ns = namespace(x=0) %}{% for i in [2,3] %}{% set ns.x = ns.x + i %}{% endfor %}"
          "{{ ns.x }}",
          NULL, "5");
    SHOWS("{% if true %}{% set x = 1 %}{% endif %}{{ x }}", NULL, "1");
    SHOWS("{% set x | upper %}a{{ 1 }}{% endset %}{{ x }}", NULL, "A1");
    SHOWS("{% with a = 1, b = a %}[{{ a }}{{ b }}]{% endwith %}{{ a }}", NULL, "[1]");
    SHOWS("{% filter upper | replace('A', 'x') %}a{{ 'b' }}{% endfilter %}", NULL, "xB");
    SHOWS("{% generation %}x{% set g = 1 %}{% endgeneration %}{{ g }}", NULL, "x");
    FAILS("{% set s.x = 1 %}", "{\"s\":{}}", "namespace");
}

static void test_macros_bind_arguments_as_python_does(void)
{
    SHOWS("{% macro m(a, b=2, c=a) %}{{ a }}{{ b }}{{ c }} {% endmacro %}"
          "{{ m(1) }}{{ m(1, 3) }}{{ m(c=5, a=1) }}{{ m(*[7, 8]) }}{{ m(**{'a': 9}) }}",
          NULL, "121 131 125 787 929 ");
    SHOWS("{% macro m(a) %}{{ a }}{{ varargs }}{{ kwargs }}{% endmacro %}{{ m(1, 2, z=3) }}", NULL,
          "1(2,){'z': 3}");
    SHOWS("{% macro m() %}<{{ caller(1) }}>{% endmacro %}{% call(x) m() %}{{ x }}{% endcall %}",
          NULL, "<1>");
    SHOWS("{% macro m() %}{{ i }}{{ top }}{% endmacro %}{% for i in [1] %}{{ m() }}{% endfor %}"
          "{% set top = 't' %}{{ m() }}",
          NULL, "t");
    SHOWS("{% macro f(n) %}{% if n %}{{ n }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(3) }}",
          NULL, "321");
    FAILS("{% macro m(a) %}{% endmacro %}{{ m(1, 2) }}", NULL, "not more than 1");
    FAILS("{% macro m(a) %}{% endmacro %}{{ m(q=2) }}", NULL, "'q'");
}

/* ---- expressions ---- */

static void test_numbers_are_pythons(void)
{
    SHOWS("{{ [7 // 2, -7 // 2, 7 % -3, -7 % 3, 7 / 2, 2 ** 10, 2 ** -1, -2 ** 2, 1 + true] }}",
          NULL, "[3, -4, -2, 2, 3.5, 1024, 0.5, 4, 2]");
    SHOWS(
        "{{ [0.1, 1e16, 1e15, 1e-5, 0.0001, 0.1 + 0.2, 1e22, 5e-324, -0.0, 100.0] }}", NULL,
        "[0.1, 1e+16, 1000000000000000.0, 1e-05, 0.0001, 0.30000000000000004, 1e+22, 5e-324, -0.0, "
        "100.0]");
    SHOWS("{{ [1 < 2 < 3, 1 < 3 < 2, 1 == 1.0, true == 1, 1 in [1.0]] }}", NULL,
          "[True, False, True, True, True]");
    FAILS("{{ 9223372036854775807 + 1 }}", NULL, "64 bits");
    FAILS("{{ 9223372036854775808 }}", NULL, "64 bits");
    FAILS("{{ 1 // 0 }}", NULL, "zero");
    FAILS("{{ 'a' < 1 }}", NULL, "ordered");
    FAILS("{{ 'a' + 1 }}", NULL, "string");
}

static void test_operators_bind_as_in_jinja(void)
{
    SHOWS("{{ 1 + 2 ~ 3 * 2 }}", NULL, "!chat template line 1: cannot compute 'int' + 'str'");
    SHOWS("{{ 'a' ~ 1 ~ none ~ 1.0 ~ [1] }}", NULL, "a1None1.0[1]");
    SHOWS("{{ not 1 == 2 and 'x' or 'y' }}{{ 0 or none }}{{ 1 if false }}", NULL, "xNone");
    SHOWS("{{ -1 | abs }}{{ 1 + 1 | string | length }}{{ 'a' 'b' \"c\" }}", NULL, "12abc");
    SHOWS("{{ 1 is not odd }}{{ 3 is divisibleby 3 and 2 is in [2] }}", NULL, "FalseTrue");
    SHOWS("{{ 'a' in 'abc', 'a' not in {'a': 1}, 2 in (1, 2) }}", NULL, "(True, False, True)");
}

static void test_undefined_is_empty_but_has_no_parts(void)
{
    SHOWS("[{{ x }}{{ x is defined }}{{ x or 'd' }}{{ x | length }}{{ x ~ 'y' }}{{ {}.a }}{{ [][0] "
          "}}]",
          NULL, "[Falsed0y]");
    FAILS("{{ x.y }}", NULL, "'x' is undefined");
    FAILS("{{ x[0] }}", NULL, "undefined");
    FAILS("{{ x + 1 }}", NULL, "undefined");
    FAILS("{{ {}.a.b }}", NULL, "'a' is undefined");
    FAILS("{{ x() }}", NULL, "undefined");
    FAILS("{{ none.strip() }}", NULL, "'strip' is undefined");
}

static void test_slices_count_characters(void)
{
    const char *vars = "{\"u\":\"h\\u00e9llo\",\"l\":[1,2,3,4]}";
    SHOWS("{{ u[1] }}{{ u[-1] }}{{ u[1:3] }}{{ u[::-1] }}{{ u | length }}{{ u[9] }}", vars,
          "\xc3\xa9o\xc3\xa9loll\xc3\xa9h5");
    SHOWS("{{ l[1:] }}{{ l[:-1] }}{{ l[::-1] }}{{ l[-9:2] }}{{ l[2:0:-1] }}{{ l[5:] }}", vars,
          "[2, 3, 4][1, 2, 3][4, 3, 2, 1][1, 2][3, 2][]");
    SHOWS("{{ range(10)[2:8:3] | list }}", vars, "[2, 5]");
    SHOWS("{{ u[2::9223372036854775807] }}{{ l[1::9223372036854775807] }}", vars, "l[2]");
    SHOWS("{{ u[-1::-9223372036854775807 - 1] }}", vars, "o");
    FAILS("{{ range(0, 9223372036854775807, 4611686018427387904)[2:] }}", vars, "64 bits");
    FAILS("{{ l[::0] }}", vars, "zero");
    FAILS("{{ none[1:] }}", vars, "NoneType");
}

static void test_values_print_in_pythons_form(void)
{
    SHOWS(
        "{{ [none, true, 'it\\'s', \"q\\\"'\", '\\n\\x01\\u200b\\u00e9', (1,), {}, {'a': 1.0}] }}",
        NULL, "[None, True, \"it's\", 'q\"\\'', '\\n\\x01\\u200b\xc3\xa9', (1,), {}, {'a': 1.0}]");
    SHOWS("{{ {'a': 1}.items() }}{{ range(2) }}{{ namespace(a=1) }}", NULL,
          "dict_items([('a', 1)])range(0, 2)<Namespace {'a': 1}>");
    SHOWS("{{ {'items': 5}.items() | list }}{{ {'items': 5}['items'] }}", NULL, "[('items', 5)]5");
}

static void test_json_is_that_of_json_dumps(void)
{
    const char *vars = "{\"d\":{\"b\":[1,2.0,null,true],\"a\":\"\\u00e9</\\\"\\n\"},\"e\":[{},[]]}";
    SHOWS("{{ d | tojson }}", vars, "{\"b\": [1, 2.0, null, true], \"a\": \"\xc3\xa9</\\\"\\n\"}");
    SHOWS("{{ d | tojson(ensure_ascii=true, sort_keys=true, separators=(',', ':')) }}", vars,
          "{\"a\":\"\\u00e9</\\\"\\n\",\"b\":[1,2.0,null,true]}");
    SHOWS("{{ e | tojson(indent=2) }}{{ [[1]] | tojson(indent=1) }}", vars,
          "[\n  {},\n  []\n][\n [\n  1\n ]\n]");
    SHOWS("{{ ('[1, {\"a\": null}]' | from_json)[1] }}", vars, "{'a': None}");
    FAILS("{{ '[1,' | from_json }}", vars, "JSON");
    FAILS("{{ nothing | tojson }}", vars, "Undefined");
}

static void test_string_methods_are_pythons(void)
{
    SHOWS("{{ ' a  b '.split() }}{{ 'a,b,c'.split(',', 1) }}{{ 'a,b,c'.rsplit(',', 1) }}{{ "
          "''.split(',') }}",
          NULL, "['a', 'b']['a', 'b,c']['a,b', 'c']['']");
    SHOWS("{{ 'xaxbx'.strip('x') }}{{ '  a '.lstrip() }}|{{ 'ab'.rstrip('b') }}{{ "
          "'\\u3000a'.strip() }}",
          NULL, "axba |aa");
    SHOWS("{{ 'stra\\u00dfe'.upper() }}{{ 'A\\u03a3'.lower() }}{{ \"it's\".title() }}{{ "
          "'aB'.swapcase() }}",
          NULL, "STRASSEa\xcf\x82It'SAb");
    SHOWS(
        "{{ 'abc'.startswith(('x', 'a')) }}{{ 'abc'.find('c') }}{{ 'aXbX'.replace('X', '-', 1) }}",
        NULL, "True2a-bX");
    SHOWS("{{ '%s|%05.1f|%x' % ('a', 2.25, 255) }}{{ '{0}{x:>3}{0!r}'.format('a', x=1) }}", NULL,
          "a|002.2|ffa  1'a'");
    SHOWS("{{ '{0[1]}{0[01]}{1[1x]}'.format([3, 4], {'1x': 5}) }}", NULL, "445");
    SHOWS("{{ ('{0[' ~ '1' * 131072 ~ ']}').format([1]) }}", NULL, "");
    SHOWS("{{ 'a\\nb'.splitlines() }}{{ 'a-b'.partition('-') }}{{ ','.join(['a', 'b']) }}", NULL,
          "['a', 'b']('a', '-', 'b')a,b");
}

static void test_filters_do_what_jinja_documents(void)
{
    const char *vars = "{\"m\":[{\"r\":\"b\",\"n\":1},{\"r\":\"A\"}]}";
    SHOWS("{{ m | map(attribute='r') | join('-') }}{{ m | selectattr('n', 'defined') | list | "
          "length }}"
          "{{ m | rejectattr('r', 'eq', 'b') | map(attribute='r') | first }}{{ m | "
          "sort(attribute='r') | last }}",
          vars, "b-A1A{'r': 'b', 'n': 1}");
    SHOWS("{{ [3, 1, 3] | unique | list }}{{ [1, 2] | sum }}{{ ['b', 'A'] | min }}{{ {'b': 1, 'a': "
          "2} | dictsort }}",
          vars, "[3, 1]3A[('a', 2), ('b', 1)]");
    SHOWS("{{ x | default('d') }}{{ '' | default('e', true) }}{{ '5.7' | int }}{{ 'x' | int(3) "
          "}}{{ 2.5 | round }}",
          vars, "de532.0");
    SHOWS("{{ 'a\\n\\nb' | indent(2) }}{{ 'foo bar baz qux' | truncate(9) }}{{ [1, 2, 3] | "
          "batch(2) | list }}",
          vars, "a\n\n  bfoo...[[1, 2], [3]]");
    SHOWS("{{ ('<' | safe) + '<' }}{{ '<' | e }}{{ ('<' | safe) ~ '<' }}", vars, "<&lt;&lt;<<");
    SHOWS("{% set g = [1, 2] | map('string') %}{{ g | list }}{{ g | list }}", vars, "['1', '2'][]");
    SHOWS("{{ ('0' * 90 ~ 'x') | int(7) }}{{ ('0' * 90 ~ '8') | int }}", vars, "78");
    SHOWS("{{ 155 | round(-1) }}{{ 5 | round(-9223372036854775807 - 1) }}", vars, "1600");
    FAILS("{{ 9223372036854775807 | round(-1) }}", vars, "64 bits");
    FAILS("{{ 1 | nothing }}", vars, "no filter is named 'nothing'");
    FAILS("{{ 1 is nothing }}", vars, "no test is named 'nothing'");
    FAILS("{{ 'a' | trim(1, 2) }}", vars, "at most 1");
}

static void test_clock_is_the_callers(void)
{
    SHOWS("{{ strftime_now('%Y-%m-%d %H:%M:%S %d %b %B %j %p%Z %-m %% %q') }}", NULL,
          "2026-01-15 12:00:00 15 Jan January 015 PM 1 % %q");
}

/* ---- errors ---- */

static void test_raised_words_reach_the_caller(void)
{
    struct err e = {0};
    struct buf out = {0};
    struct template_args a = {0};
    const char *src = "text{{ raise_exception('roles\\nmust ' ~ 'alternate') }}";
    buf_puts(&out, "kept");
    OK(render_source(&out, src, strlen(src), &a, &e) == -1);
    OK(e.code == ERR_USAGE);
    OK_MSG(!strcmp(e.msg, "roles?must alternate"), "%s", e.msg);
    OK(!strcmp(buf_str(&out), "kept"));
    buf_fini(&out);
}

static void test_bad_source_is_refused_with_its_line(void)
{
    static const char *const bad[] = {"{{ }}",
                                      "{{ 1",
                                      "{% if %}",
                                      "{% if x %}",
                                      "{% endif %}",
                                      "{% for x in y %}",
                                      "{% foo %}",
                                      "{% else %}",
                                      "{{ (1 }}",
                                      "{{ 1 2 }}",
                                      "{{ 'a }}",
                                      "{% set 1 = 2 %}",
                                      "{% macro %}",
                                      "{% break %}",
                                      "{{ a. }}",
                                      "{{ a | }}",
                                      "{{ {'a' 1} }}",
                                      "{{ x is }}",
                                      "{{ f(a=1, 2) }}",
                                      "{{ '\\x4' }}",
                                      "{% raw %}",
                                      "{{ @ }}",
                                      "{% include 'x' %}",
                                      "{% import 'x' as y %}",
                                      "{% extends 'x' %}",
                                      "{% for x in y %}{% endif %}"};
    for (size_t i = 0; i < ARRAY_LEN(bad); i++) {
        char src[200];
        struct err e = {0};
        struct template *t = NULL;
        snprintf(src, sizeof src, "a\n\n%s", bad[i]);
        OK_MSG(template_new(&t, src, strlen(src), &e) == -1, "%s was taken", bad[i]);
        OK_MSG(t == NULL && e.code == ERR_CORRUPT && strstr(e.msg, "line 3"), "%s: %s", bad[i],
               e.msg);
    }
    struct err e = {0};
    struct template *t = NULL;
    OK(template_new(&t, "a\xff", 2, &e) == -1 && strstr(e.msg, "UTF-8"));
}

/* ---- budgets ---- */

/* Ends soon by a limit, whose message has these words. */
static void check_hostile(const char *src, const char *has)
{
    struct err e = {0};
    struct buf out = {0};
    struct template_args a = {0};
    uint64_t start = now_ns();
    int rc = render_source(&out, src, strlen(src), &a, &e);
    uint64_t ms = (now_ns() - start) / 1000000;
    OK_MSG(rc && e.code == ERR_LIMIT && strstr(e.msg, has), "%.300s: %d %s", src, e.code,
           rc ? e.msg : "rendered");
    OK_MSG(ms < MAX_MS, "%.300s: took %llu ms", src, (unsigned long long)ms);
    buf_fini(&out);
}

static void test_hostile_templates_end_by_a_limit(void)
{
    static const char *const hostile[] = {
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% "
        "endfor %}",
        "{% set ns = namespace(l=[1]) %}{% for i in range(60) %}{% set ns.l = ns.l + ns.l %}{% "
        "endfor %}",
        "{{ 'a' * 99999999999 }}",
        "{{ [1] * 99999999999 }}",
        "{{ 'a' | center(99999999999) }}",
        "{{ 'a'.ljust(99999999999) }}",
        "{{ 'a' | indent(99999999999, true) }}",
        "{{ '%1000000s' % 1 * 1000 }}",
        "{{ [1] | tojson(indent=99999999999) }}",
        "{{ range(9999999999) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% macro f() %}{% call f() %}{{ caller() }}{% endcall %}{% endmacro %}{{ f() }}",
        "{% for x in [[1]] recursive %}{{ loop([x]) }}{% endfor %}",
        "{% set l = [1] %}{% for x in l %}{% do l.append(x) %}{% endfor %}",
        "{% set l = [] %}{% do l.append(l) %}{{ l }}",
        "{% set l = [] %}{% do l.append(l) %}{{ l | tojson }}",
        "{% set l = [] %}{% do l.append(l) %}{% set k = [] %}{% do k.append(k) %}{{ l == k }}",
        "{% set ns = namespace(l=[]) %}{% for i in range(999) %}{% set ns.l = [ns.l] %}{% endfor "
        "%}{{ ns.l }}",
        "{% set s = 'a' * 999999 %}{% for i in range(99999) %}{{ s | upper | length }}{% endfor %}",
        "{% set s = 'a' * 9999999 %}{% for i in range(99999) %}{% if 'b' in s %}{% endif %}{% "
        "endfor %}",
        "{% set s = 'ab' * 9999 %}{% for i in range(99999) %}{% set x = s.replace('a', s) %}{% "
        "endfor %}",
        "{% set s = '\\u00e9' * 99999 %}{% for c in s %}{% set x = s[99998] %}{% endfor %}",
        "{% for i in range(99999) %}{% set x = '1' | float | string | int | tojson %}{% endfor %}"
        "{% for i in range(99999) %}{% for j in range(999) %}{{ 0.1 }}{% endfor %}{% endfor %}",
    };
    for (size_t i = 0; i < ARRAY_LEN(hostile); i++)
        check_hostile(hostile[i], "limit");
}

/* Looking at long texts again and again: memory is not what ends these. */
static void test_comparing_and_searching_cost_steps(void)
{
    static const char *const slow[] = {
        "{{ s.strip('b' * 2000000 ~ 'a') }}",
        "{{ s.rstrip('b' * 2000000 ~ 'a') }}",
        "{{ s.rfind('a' * 1000000 ~ 'b') }}",
        "{{ s.rpartition('a' * 1000000 ~ 'b') }}",
        "{% for i in range(99999) %}{% if s.startswith(t) %}{% endif %}{% endfor %}",
        "{% for i in range(99999) %}{% if s.endswith((t, t)) %}{% endif %}{% endfor %}",
        "{% for i in range(99999) %}{% set x = t.removeprefix(s) %}{% endfor %}",
        "{% set d = {s: 1} %}{% for i in range(99999) %}{% if t in d %}{% endif %}{% endfor %}",
        "{% set u = ' ' ~ '\u00e9' * 1000000 %}{% for i in range(99999) %}"
        "{% set x = u | truncate(900000) %}{% endfor %}",
    };
    for (size_t i = 0; i < ARRAY_LEN(slow); i++) {
        struct buf src = {0};
        buf_printf(&src, "{%% set s = 'a' * 2000000 %%}{%% set t = s ~ '' %%}%s", slow[i]);
        check_hostile(buf_str(&src), "steps");
        buf_fini(&src);
    }
}

static void test_reading_a_full_scope_costs_steps(void)
{
    struct buf src = {0};
    buf_puts(&src, "{% macro m() %}");
    for (int i = 0; i < 40000; i++)
        buf_printf(&src, "{%%set v%d=1%%}", i);
    buf_puts(&src, "{% for i in range(999) %}{% for j in range(999) %}{% if v39999 %}{% endif %}"
                   "{% endfor %}{% endfor %}{% endmacro %}{{ m() }}");
    check_hostile(buf_str(&src), "steps");
    buf_fini(&src);
}

static void test_white_space_before_a_tag_takes_linear_time(void)
{
    struct buf src = {0};
    for (int i = 0; i < 1000000; i++)
        buf_putc(&src, ' ');
    buf_puts(&src, "{%- if 1 -%} x{% endif %}");
    uint64_t start = now_ns();
    SHOWS(buf_str(&src), NULL, "x");
    OK((now_ns() - start) / 1000000 < MAX_MS);
    buf_fini(&src);
}

/* A source of `open` n times, `mid`, `close` n times. */
static void check_nested(const char *open, const char *mid, const char *close)
{
    struct buf src = {0};
    struct err e = {0};
    struct template *t = NULL;
    for (int i = 0; i < 50000; i++)
        buf_puts(&src, open);
    buf_puts(&src, mid);
    for (int i = 0; i < 50000; i++)
        buf_puts(&src, close);
    uint64_t start = now_ns();
    OK_MSG(template_new(&t, src.data, src.n, &e) == -1, "%s nested without end is taken", open);
    OK_MSG((now_ns() - start) / 1000000 < MAX_MS, "%s: slow", open);
    OK_MSG(e.msg[0], "%s", open);
    template_free(t);
    buf_fini(&src);
}

static void test_nesting_of_the_source_is_bounded(void)
{
    check_nested("{{ (", "1", ")");
    check_nested("{% if 1 %}", "x", "{% endif %}");
    check_nested("{% for x in y %}", "x", "{% endfor %}");
    check_nested("{{ not ", "1", " }}");
    check_nested("{{ -", "1", " }}");
    check_nested("{{ [", "1", "]");
    check_nested("{{ {1:", "1", "}");
    check_nested("{{ a(", "1", ")");
    check_nested("{{ a[", "1", "]");
    check_nested("{{ a|b(", "1", ")");
    check_nested("{{ 1 if 1 else ", "1", " }}");
    struct buf src = {0};
    buf_puts(&src, "{{ 1");
    for (int i = 0; i < 50000; i++)
        buf_puts(&src, i % 2 ? "+1" : "|abs");
    buf_puts(&src, " }}");
    FAILS(buf_str(&src), NULL, "deep");
    buf_fini(&src);
}

static void test_growing_a_text_piece_by_piece_is_linear(void)
{
    SHOWS("{% set ns = namespace(s='') %}{% for i in range(90000) %}{% set ns.s = ns.s ~ "
          "'abcdefghij' %}"
          "{% endfor %}{{ ns.s | length }}",
          NULL, "900000");
    SHOWS("{% set a = 'x' ~ 'y' %}{% set b = a ~ '1' %}{% set c = a ~ '2' %}{{ a }}{{ b }}{{ c }}",
          NULL, "xyxy1xy2");
}

static void test_step_budget_is_the_callers(void)
{
    struct err e = {0};
    struct buf out = {0};
    const char *src = "{% for i in range(1000) %}{{ i }}{% endfor %}";
    struct template_args a = {.max_steps = 500};
    OK(render_source(&out, src, strlen(src), &a, &e) == -1 && e.code == ERR_LIMIT);
    a.max_steps = 0;
    a.max_bytes = 1000;
    e = (struct err){0};
    OK(render_source(&out, src, strlen(src), &a, &e) == -1 && e.code == ERR_LIMIT);
    a.max_bytes = 0;
    e = (struct err){0};
    OK_CALL(render_source(&out, src, strlen(src), &a, &e), e);
    buf_fini(&out);
}

/* ---- memory, threads, speed ---- */

static const char busy[] =
    "{% macro m(a, b=1) %}{{ a | upper }}{% endmacro %}{% for m2 in messages %}{{ m(m2.content) }}"
    "{{ m2 | tojson(indent=2) }}{{ m2.content.split(' ') | join('-') }}{% set x %}{{ loop.index }}"
    "{% endset %}{{ x ~ m2.role }}{% endfor %}{{ '{\"a\": [1]}' | from_json }}";

static json_t *chat(int n)
{
    json_t *m = json_array();
    for (int i = 0; i < n; i++)
        json_array_append_new(
            m, json_pack("{s:s,s:s}", "role", i % 2 ? "assistant" : "user", "content",
                         "What is the capital of France, and how far is it from here?"));
    return m;
}

static void test_failing_allocations_give_errors(void)
{
    json_t *m = chat(2);
    struct template_args a = {.messages = m};
    bool done = false;
    for (uint64_t n = 1; n < 1000 && !done; n++) {
        struct buf out = {0};
        struct err e = {0};
        mem_fail_at(n);
        done = !render_source(&out, busy, strlen(busy), &a, &e);
        mem_fail_at(0);
        OK_MSG(done || e.code == ERR_MEMORY, "allocation %d: %d %s", (int)n, e.code, e.msg);
        buf_fini(&out);
    }
    OK(done);
    json_decref(m);
}

struct job {
    const struct template *t;
    const json_t *messages;
    struct buf out;
    int rc;
};

static void *render_job(void *p)
{
    struct job *j = p;
    struct template_args a = {.messages = j->messages};
    for (int i = 0; i < 50 && !j->rc; i++) {
        struct err e = {0};
        buf_clear(&j->out);
        j->rc = template_render(&j->out, j->t, &a, &e);
    }
    return NULL;
}

static void test_threads_share_a_template(void)
{
    struct template *t = NULL;
    struct err e = {0};
    struct job jobs[4] = {0};
    pthread_t threads[4];
    json_t *m = chat(4);
    if (!OK_CALL(template_new(&t, busy, strlen(busy), &e), e))
        return;
    for (int i = 0; i < 4; i++) {
        jobs[i] = (struct job){.t = t, .messages = m};
        OK(!pthread_create(&threads[i], NULL, render_job, &jobs[i]));
    }
    for (int i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
    for (int i = 0; i < 4; i++) {
        OK(!jobs[i].rc && jobs[i].out.n == jobs[0].out.n &&
           !memcmp(jobs[i].out.data, jobs[0].out.data, jobs[0].out.n));
    }
    for (int i = 0; i < 4; i++)
        buf_fini(&jobs[i].out);
    json_decref(m);
    template_free(t);
}

static void test_a_chat_renders_in_under_a_millisecond(void)
{
    const char *path = unit_shared("templates/Qwen-Qwen3-0.6B.jinja");
    struct buf src = {0}, out = {0};
    struct err e = {0};
    json_t *m = chat(10);
    struct template_args a = {.messages = m, .add_generation_prompt = true};
    uint64_t best = UINT64_MAX;
    if (path && OK_CALL(file_read_all(&src, path, 1 << 20, &e), e))
        for (int i = 0; i < 20; i++) {
            uint64_t start = now_ns();
            buf_clear(&out);
            OK_CALL(render_source(&out, src.data, src.n, &a, &e), e);
            best = MIN(best, now_ns() - start);
        }
    if (path)
        printf("  parse and render of 10 messages: %.3f ms\n", (double)best / 1e6);
    OK_MSG(!path || best < 10000000, "took %.3f ms", (double)best / 1e6); /* slack for sanitizers */
    json_decref(m);
    buf_fini(&src);
    buf_fini(&out);
}

int main(int argc, char **argv)
{
#define T(name)                                                                                    \
    {                                                                                              \
#name, test_##name                                                                         \
    }
    static const struct unit_test tests[] = {
        T(published_templates_give_reference_text),
        T(replayed_reports_end_soon_with_a_named_error),
        T(chatml_text_is_exact),
        T(variables_are_bound_as_promised),
        T(blocks_take_their_line_with_them),
        T(loops_know_where_they_are),
        T(scopes_hold_what_is_set_inside),
        T(macros_bind_arguments_as_python_does),
        T(numbers_are_pythons),
        T(operators_bind_as_in_jinja),
        T(undefined_is_empty_but_has_no_parts),
        T(slices_count_characters),
        T(values_print_in_pythons_form),
        T(json_is_that_of_json_dumps),
        T(string_methods_are_pythons),
        T(filters_do_what_jinja_documents),
        T(clock_is_the_callers),
        T(raised_words_reach_the_caller),
        T(bad_source_is_refused_with_its_line),
        T(hostile_templates_end_by_a_limit),
        T(comparing_and_searching_cost_steps),
        T(reading_a_full_scope_costs_steps),
        T(white_space_before_a_tag_takes_linear_time),
        T(nesting_of_the_source_is_bounded),
        T(growing_a_text_piece_by_piece_is_linear),
        T(step_budget_is_the_callers),
        T(failing_allocations_give_errors),
        T(threads_share_a_template),
        T(a_chat_renders_in_under_a_millisecond),
    };
    return unit_main(argc, argv, tests, ARRAY_LEN(tests));
}
