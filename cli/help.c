/* Help: made from the commands' tables, so that it cannot disagree with the parser. Prints to
 * standard output. */
#include "cli/cli_internal.h"

#include <stdio.h>
#include <string.h>

enum { HELP_COLUMN = 30 }; /* where the explanations start */

/* " (default: 40)" for a number that a command sets before it reads its options. */
static void put_default(struct buf *out, const struct option *o, const void *base)
{
    struct buf v = {0};
    if (base && (o->kind == OPTION_I32 || o->kind == OPTION_U32 || o->kind == OPTION_F32)) {
        option_format(&v, o, base);
        if (strcmp(buf_str(&v), "0"))
            buf_printf(out, " (default: %s)", buf_str(&v));
    }
    buf_fini(&v);
}

static void help_option(const struct option *o, const void *base)
{
    struct buf text = {0};
    buf_puts(&text, o->help);
    put_default(&text, o, base);
    char left[80], letter[8] = "    ";
    if (o->letter)
        snprintf(letter, sizeof letter, "-%c, ", o->letter);
    int n = snprintf(left, sizeof left, "  %s--%s%s%s", letter, o->name, o->value ? " " : "",
                     o->value ? o->value : "");
    if (n >= HELP_COLUMN)
        printf("%s\n%*s%s\n", left, HELP_COLUMN, "", buf_str(&text));
    else
        printf("%-*s%s\n", HELP_COLUMN, left, buf_str(&text));
    buf_fini(&text);
}

static void help_group(const struct option_group *g, const void *opts)
{
    printf("\n%s%s:%s\n", style(1, STYLE_BOLD), g->title, style(1, STYLE_NONE));
    for (const struct option *o = g->options; o->name; o++)
        help_option(o, opts ? (const char *)opts + g->base : NULL);
}

void help_command(const struct command *c)
{
    bool settings = false;
    void *opts = c->defaults ? mem_zalloc(c->opts_bytes) : NULL;
    if (opts)
        c->defaults(opts);
    printf("%sUsage:%s ingot %s %s\n\n%s\n", style(1, STYLE_BOLD), style(1, STYLE_NONE), c->name,
           c->usage, c->about);
    if (c->alias)
        printf("Also called `ingot %s`.\n", c->alias);
    for (size_t g = 0; g < COMMAND_GROUPS; g++) {
        if (!c->groups[g].options)
            continue;
        help_group(&c->groups[g], opts);
        settings |= c->groups[g].options != common_options && c->groups[g].options->setting;
    }
    printf("\n%sExamples:%s\n%s", style(1, STYLE_BOLD), style(1, STYLE_NONE), c->examples);
    if (settings)
        printf("\nModel and sampling options may also come from the environment: --top-k is "
               "INGOT_TOP_K.\n");
    mem_free(opts);
}

void help_overview(const struct command *const *commands)
{
    printf("ingot %s: one file that serves language models\n\n", INGOT_VERSION);
    printf("%sFirst steps:%s\n"
           "  ingot import model.gguf      bring a model file into the store\n"
           "  ingot run NAME               chat with it (or: ingot run ./model.gguf)\n"
           "  ingot run NAME \"Why?\"        one answer, then back to the shell\n",
           style(1, STYLE_BOLD), style(1, STYLE_NONE));
    printf("\n%sCommands:%s\n", style(1, STYLE_BOLD), style(1, STYLE_NONE));
    for (size_t i = 0; commands[i]; i++) {
        char name[32];
        snprintf(name, sizeof name, "%s%s%s", commands[i]->name, commands[i]->alias ? ", " : "",
                 commands[i]->alias ? commands[i]->alias : "");
        printf("  %-13s %s\n", name, commands[i]->summary);
    }
    printf("\n`ingot COMMAND --help` explains one, with examples.\n");
}
