/* The command line without models: the option parser and its tables, suggestions, sizes and text
 * for a terminal, word wrap. */
#include "cli/cli_internal.h"
#include "tests/unit/unit.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* ---- a command to parse for ---- */

struct probe_opts {
    struct common_opts common;
    struct engine_opts engine;
    struct sampling_opts sampling;
};

static int probe_run(const struct command_args *a, struct err *e)
{
    return 0;
}

static const struct command probe = {
    .name = "probe",
    .usage = "MODEL [TEXT...]",
    .opts_bytes = sizeof(struct probe_opts),
    .groups = {ENGINE_GROUP(struct probe_opts), SAMPLING_GROUP(struct probe_opts), COMMON_GROUP},
    .min_words = 1,
    .max_words = 3,
    .run = probe_run,
};

enum { MAX_WORDS = 16 };

struct parsed {
    struct command_args a;
    struct probe_opts o;
    struct err e;
    int rc;
    char *argv[MAX_WORDS];
};

/* Parse a line split at blanks. */
static void parse(struct parsed *p, const char *line)
{
    static char copy[512];
    int argc = 0;
    *p = (struct parsed){0};
    snprintf(copy, sizeof copy, "%s", line);
    for (char *w = strtok(copy, " "); w && argc < MAX_WORDS; w = strtok(NULL, " "))
        p->argv[argc++] = w;
    p->rc = options_parse(&p->a, &p->o, &probe, argc, p->argv, &p->e);
}

static void done(struct parsed *p)
{
    sampling_fini(&p->o.sampling);
    options_free(&p->a, &p->o);
}

/* ---- the parser ---- */

static void test_options_in_every_spelling(void)
{
    static const char *const lines[] = {
        "m --ctx 77 x", "m x --ctx=77",           "-c 77 m x",        "-c77 m x",
        "m -c=77 x",    "--max-model-len 77 m x", "m x --num_ctx=77", "--max_model_len 77 m x",
    };
    for (size_t i = 0; i < ARRAY_LEN(lines); i++) {
        struct parsed p;
        parse(&p, lines[i]);
        OK_MSG(p.rc == 0 && p.o.engine.ctx == 77, "'%s': %s", lines[i], p.e.msg);
        OK_MSG(p.a.n_words == 2 && !strcmp(p.a.words[0], "m") && !strcmp(p.a.words[1], "x"),
               "'%s': %zu words", lines[i], p.a.n_words);
        OK(options_given(&p.a, engine_options) == 1 && options_given(&p.a, sampling_options) == 0);
        done(&p);
    }
}

static void test_every_kind_of_value(void)
{
    struct parsed p;
    parse(&p, "m --temp 0.25 --top-k -1 --kv f32 --seed 18446744073709551615 --stop a --stop b -v "
              "--logit-bias 5-inf --logit-bias 7+1.5");
    OK_MSG(p.rc == 0, "%s", p.e.msg);
    OK(p.o.sampling.p.temperature == 0.25f && p.o.sampling.p.top_k == -1);
    OK(p.o.engine.kv == KV_F32 && p.o.sampling.p.seed == UINT64_MAX && p.o.common.verbose);
    OK(p.o.sampling.stop.n == 2 && !strcmp(p.o.sampling.stop.v[1], "b"));
    done(&p);
    parse(&p, "m --seed -1");
    OK(p.rc == 0 && p.o.sampling.p.seed == 0);
    done(&p);
}

static void test_kv_types_by_name_for_both_or_apart(void)
{
    static const char *const names[] = {"f16", "bf16", "f32", "q8_0", "q4_0"};
    for (size_t i = 0; i < ARRAY_LEN(names); i++) {
        struct parsed p;
        char line[96];
        int32_t t = (int32_t)kv_type_find(names[i]);
        snprintf(line, sizeof line, "m --kv %s", names[i]);
        parse(&p, line);
        OK(p.rc == 0 && p.o.engine.kv == t && !p.o.engine.kv_keys && !p.o.engine.kv_values);
        done(&p);
        snprintf(line, sizeof line, "m --cache-type-k %s --kv-v %s", names[i], names[4 - i]);
        parse(&p, line);
        OK(p.rc == 0 && p.o.engine.kv == KV_F16 && p.o.engine.kv_keys == 1 + t);
        OK(p.o.engine.kv_values == 1 + (int32_t)kv_type_find(names[4 - i]));
        done(&p);
    }
}

static void test_words_after_two_dashes_are_words(void)
{
    struct parsed p;
    parse(&p, "m -- --ctx -");
    OK(p.rc == 0 && p.a.n_words == 3 && !strcmp(p.a.words[1], "--ctx"));
    done(&p);
}

static void test_bad_usage_is_named(void)
{
    static const struct {
        const char *line, *has;
    } cases[] = {
        {"m --contxt 5", "unknown option '--contxt'"},
        {"m --tempp 5", "did you mean --temp?"},
        {"m --top_q=5", "did you mean --top-"},
        {"m -x", "unknown option '-x'"},
        {"m --c 5", "unknown option '--c'"},
        {"m --ctx", "--ctx needs a value"},
        {"m --ctx abc", "'abc' is not a number"},
        {"m --ctx 1.5", "not a whole number"},
        {"m --ctx -5", "out of range"},
        {"m --ctx 99999999999", "out of range"},
        {"m --top-p nan", "not a number"},
        {"m --temp 1e999", "not a number"},
        {"m --kv q8", "not one of f16|bf16|f32|q8_0|q4_0"},
        {"m --kv-k q9", "not one of auto|f16|bf16|f32|q8_0|q4_0"},
        {"m --seed -2", "not a seed"},
        {"m --seed 1x", "not a seed"},
        {"m --quiet=perhaps", "neither on nor off"},
        {"", "argument is missing"},
        {"m a b c", "unexpected 'c'"},
    };
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        struct parsed p;
        parse(&p, cases[i].line);
        OK_MSG(p.rc == COMMAND_USAGE && strstr(p.e.msg, cases[i].has), "'%s' gave %d: '%s'",
               cases[i].line, p.rc, p.e.msg);
        done(&p);
    }
}

static void test_settings_come_from_the_environment_unless_given(void)
{
    struct parsed p;
    setenv("INGOT_TOP_K", "7", 1);
    setenv("INGOT_CTX", "99", 1);
    parse(&p, "m --ctx 5");
    OK(p.rc == 0 && p.o.sampling.p.top_k == 7 && p.o.engine.ctx == 5);
    OK(options_given(&p.a, sampling_options) != 0);
    done(&p);
    setenv("INGOT_CTX", "many", 1);
    parse(&p, "m");
    OK_MSG(p.rc == COMMAND_USAGE && strstr(p.e.msg, "INGOT_CTX: 'many'"), "%s", p.e.msg);
    done(&p);
    setenv("INGOT_CTX", "", 1);
    unsetenv("INGOT_TOP_K");
    parse(&p, "m");
    OK(p.rc == 0 && p.o.engine.ctx == 0);
    done(&p);
    unsetenv("INGOT_CTX");
}

static void test_given_options_override_recommended_ones(void)
{
    struct parsed p;
    struct sampling_opts s = {0};
    sample_defaults(&s.p);
    s.p.top_k = 20;
    s.p.temperature = 0.6f;
    parse(&p, "m --temp 0");
    options_copy(&s, &p.o.sampling, sampling_options, options_given(&p.a, sampling_options));
    OK(s.p.temperature == 0 && s.p.top_k == 20);
    done(&p);
}

static void test_sampling_lists_are_resolved(void)
{
    struct parsed p;
    parse(&p, "m --stop a\\nb --dry-sequence-breaker \\t --logit-bias 5-inf --logit-bias 7+1.5");
    sample_defaults(&p.o.sampling.p);
    OK(p.rc == 0 && sampling_resolve(&p.o.sampling, &p.e) == 0);
    const struct sampling_opts *s = &p.o.sampling;
    OK(s->stops && !strcmp(s->stops[0], "a\nb"));
    OK(s->p.n_dry_breakers == 1 && !strcmp(s->p.dry_breakers[0], "\t"));
    OK(s->p.n_bias == 2 && s->p.bias[0].id == 5 && s->p.bias[0].bias < -1e30f &&
       s->p.bias[1].bias == 1.5f);
    done(&p);
    static const char *const bad[] = {"x", "5", "5+", "-5+1", "5+inf", "5+1x", "99999999999+1"};
    for (size_t i = 0; i < ARRAY_LEN(bad); i++) {
        char line[64];
        snprintf(line, sizeof line, "m --logit-bias %s", bad[i]);
        parse(&p, line);
        sample_defaults(&p.o.sampling.p);
        OK_MSG(sampling_resolve(&p.o.sampling, &p.e) == COMMAND_USAGE, "%s was taken", bad[i]);
        done(&p);
    }
}

static void test_ids(void)
{
    static const char *const bad[] = {"", " ", "1,x", "-1", "1.5", "99999999999"};
    struct ids ids = {0};
    struct err e = {0};
    OK_CALL(parse_ids(&ids, "1,2 3,\n4", "--tokens", &e), e);
    OK(ids.n == 4 && ids.v[0] == 1 && ids.v[3] == 4);
    for (size_t i = 0; i < ARRAY_LEN(bad); i++) {
        e = (struct err){0};
        ids.n = 0;
        OK_MSG(parse_ids(&ids, bad[i], "--tokens", &e) == COMMAND_USAGE, "'%s' was taken", bad[i]);
    }
    ids_fini(&ids);
}

/* One table serves flags, environment and /set: two rows must not answer to one name. */
static void check_unique(const struct option *a, const struct option *b)
{
    for (const struct option *o = a; o->name; o++) {
        OK_MSG(option_find(a, o->name, strlen(o->name)) == o, "--%s is hidden", o->name);
        if (a != b)
            OK_MSG(!option_find(b, o->name, strlen(o->name)), "--%s is in two tables", o->name);
        OK_MSG(!o->letter || a == b || !option_find(b, &o->letter, 1), "-%c is in two tables",
               o->letter);
        OK_MSG((o->kind == OPTION_FLAG) == !o->value, "--%s: value and kind disagree", o->name);
    }
}

static void test_option_names_are_unique(void)
{
    const struct option *const tables[] = {common_options, engine_options, sampling_options};
    for (size_t i = 0; i < ARRAY_LEN(tables); i++)
        for (size_t k = 0; k < ARRAY_LEN(tables); k++)
            check_unique(tables[i], tables[k]);
}

/* ---- output ---- */

static void test_sizes(void)
{
    static const struct {
        uint64_t n;
        const char *bytes, *count;
    } cases[] = {
        {0, "0 B", "0"},
        {999, "999 B", "999"},
        {1000, "1.0 kB", "1.0 k"},
        {98362432, "98.4 MB", "98.4 M"},
        {134515008, "135 MB", "135 M"},
        {999960, "1.0 MB", "1.0 M"},
        {70000000000, "70.0 GB", "70.0 B"},
        {UINT64_MAX, "18447 PB", "18447 Q"},
    };
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        char bytes[16], count[16];
        format_bytes(bytes, cases[i].n);
        format_count(count, cases[i].n);
        OK_MSG(!strcmp(bytes, cases[i].bytes), "'%s', not '%s'", bytes, cases[i].bytes);
        OK_MSG(!strcmp(count, cases[i].count), "'%s', not '%s'", count, cases[i].count);
    }
}

static void test_ages(void)
{
    char age[24];
    int64_t now = (int64_t)time(NULL);
    format_age(age, now);
    OK(!strcmp(age, "just now"));
    format_age(age, now - 61);
    OK(!strcmp(age, "1 minute ago"));
    format_age(age, now - 3 * 86400 - 5);
    OK(!strcmp(age, "3 days ago"));
    format_age(age, INT64_MIN / 2);
    OK(strlen(age) < sizeof age);
}

static void check_clean(const char *in, size_t max, const char *want)
{
    struct buf b = {0};
    put_clean(&b, in, strlen(in), max);
    OK_MSG(!strcmp(buf_str(&b), want), "'%s', not '%s'", buf_str(&b), want);
    buf_fini(&b);
}

static void test_text_for_one_line_is_safe_and_short(void)
{
    check_clean("plain", 80, "plain");
    check_clean("a\x1b[31mb\nc\x7f\xff", 80, "a?[31mb?c??");
    check_clean("\xc2\x9b"
                "31m",
                80, "?31m"); /* CSI as one character */
    check_clean("abcdefghij", 10, "abcdefghij");
    check_clean("abcdefghijk", 10, "abcdefg...");
    check_clean("\xe6\xbc\xa2\xe6\xbc\xa2\xe6\xbc\xa2", 5, "\xe6\xbc\xa2...");
}

static void test_streamed_text_keeps_lines_and_drops_controls(void)
{
    struct buf b = {0};
    const char *in = "a\n\tb\x1b]0;title\x07\r";
    put_terminal(&b, in, strlen(in));
    OK(!strcmp(buf_str(&b), "a\n\tb?]0;title??"));
    buf_fini(&b);
}

static void test_suggestions(void)
{
    static const char *const names[] = {"run", "remove", "list", "show"};
    static const struct {
        const char *word, *want;
    } cases[] = {{"rnu", "run"},    {"lst", "list"}, {"remvoe", "remove"},
                 {"rem", "remove"}, {"xyz", NULL},   {"r", NULL},
                 {"", NULL}};
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        const char *nearest = NULL;
        size_t best = SIZE_MAX;
        for (size_t k = 0; k < ARRAY_LEN(names); k++)
            suggest(&nearest, &best, cases[i].word, names[k]);
        OK_MSG(cases[i].want ? nearest && !strcmp(nearest, cases[i].want) : !nearest,
               "'%s' gave '%s'", cases[i].word, nearest ? nearest : "nothing");
    }
}

/* ---- word wrap ---- */

/* What a terminal of 10 columns shows, rows joined by '|'. */
static void check_wrap(const char *in, const char *want)
{
    for (size_t step = 1; step <= 64; step *= 4) { /* however it is streamed */
        struct wrap w;
        struct buf out = {0}, shown = {0};
        wrap_begin(&w, 10);
        for (size_t i = 0; i < strlen(in); i += step)
            wrap_put(&w, &out, in + i, MIN(step, strlen(in) - i));
        char row[10] = "          ";
        int col = 0;
        for (size_t i = 0; i <= out.n; i++) {
            char c = i < out.n ? out.data[i] : '\n';
            if (c == '\r') {
                col = 0;
            } else if (c == 0x1b) {
                int n = atoi(out.data + i + 2);
                i += strcspn(out.data + i, "CK");
                if (out.data[i] == 'C')
                    col += n;
                else
                    memset(row + col, ' ', 10 - (size_t)col);
            } else if (c == '\n' || col == 10) {
                size_t end = 10;
                while (end && row[end - 1] == ' ')
                    end--;
                buf_put(&shown, row, end);
                buf_puts(&shown, i < out.n ? "|" : "");
                memset(row, ' ', 10);
                col = 0;
                if (c != '\n')
                    row[col++] = c;
            } else {
                row[col++] = c;
            }
        }
        OK_MSG(!strcmp(buf_str(&shown), want), "by %zu: '%s', not '%s'", step, buf_str(&shown),
               want);
        buf_fini(&out);
        buf_fini(&shown);
    }
}

static void test_words_are_not_cut_at_the_edge(void)
{
    check_wrap("one two three four", "one two|three four");
    check_wrap("0123456789 x", "0123456789|x");
    check_wrap("one 01234567890123 x", "one|0123456789|0123 x");
    check_wrap("0123456789abc de", "0123456789|abc de");
    check_wrap("a\n\nb c d e f g h", "a||b c d e f|g h");
    check_wrap("abcde fghi jk", "abcde fghi|jk");
}

/* ---- Ctrl-C ---- */

static void test_a_second_interrupt_does_what_it_did_before(void)
{
    struct sigaction now;
    signal(SIGINT, SIG_IGN);
    interrupt_begin(-1);
    OK(!interrupt_seen());
    raise(SIGINT);
    OK(interrupt_seen());
    raise(SIGINT); /* would end this program, had it not been ignored before */
    interrupt_end();
    OK(sigaction(SIGINT, NULL, &now) == 0 && now.sa_handler == SIG_IGN);
    signal(SIGINT, SIG_DFL);
    interrupt_begin(-1);
    interrupt_end();
    OK(sigaction(SIGINT, NULL, &now) == 0 && now.sa_handler == SIG_DFL);
}

static const struct unit_test tests[] = {
    {"options in every spelling", test_options_in_every_spelling},
    {"every kind of value", test_every_kind_of_value},
    {"KV types by name, for both or apart", test_kv_types_by_name_for_both_or_apart},
    {"words after two dashes are words", test_words_after_two_dashes_are_words},
    {"bad usage is named", test_bad_usage_is_named},
    {"settings come from the environment unless given",
     test_settings_come_from_the_environment_unless_given},
    {"given options override recommended ones", test_given_options_override_recommended_ones},
    {"sampling lists are resolved", test_sampling_lists_are_resolved},
    {"ids", test_ids},
    {"option names are unique", test_option_names_are_unique},
    {"sizes", test_sizes},
    {"ages", test_ages},
    {"text for one line is safe and short", test_text_for_one_line_is_safe_and_short},
    {"streamed text keeps lines and drops controls",
     test_streamed_text_keeps_lines_and_drops_controls},
    {"suggestions", test_suggestions},
    {"words are not cut at the edge", test_words_are_not_cut_at_the_edge},
    {"a second interrupt does what it did before", test_a_second_interrupt_does_what_it_did_before},
};

int main(int argc, char **argv)
{
    return unit_main(argc, argv, tests, ARRAY_LEN(tests));
}
