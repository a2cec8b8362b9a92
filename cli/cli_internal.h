/* What the commands share: options, tables of common options, output helpers, progress, opening a
 * model with a progress bar, and streaming an answer. Private to cli/ and its tests. */
#ifndef INGOT_CLI_INTERNAL_H
#define INGOT_CLI_INTERNAL_H

#include "cli/cli.h"
#include "engine/engine.h"
#include "store/prefix.h"

#include <jansson.h>

/* ---- options.c ---- */

/* An error of usage: fills e and returns COMMAND_USAGE. */
int usage_error(struct err *e, const char *fmt, ...) PRINTF_LIKE(2, 3);
/* Give one option's field (of the struct at base) the value spelled by text. `spelled` names the
 * option as the user wrote it, for the message. Returns 0 or COMMAND_USAGE. */
int option_assign(const struct option *o, void *base, const char *text, const char *spelled,
                  struct err *e);
/* The field as text, for /set: "0.8", "on". */
void option_format(struct buf *out, const struct option *o, const void *base);
/* By long name, alias or (for one character) letter; NULL if there is none. */
const struct option *option_find(const struct option *table, const char *name, size_t n);
/* Copy the fields whose bits are set in `given` from one struct to another of the same kind. */
void options_copy(void *to, const void *from, const struct option *table, uint64_t given);
/* Parse words and the environment into opts (of c->opts_bytes) and a. a->words is owned. */
int options_parse(struct command_args *a, void *opts, const struct command *c, int argc,
                  char **argv, struct err *e);
void options_free(struct command_args *a, void *opts);
/* The bits of a's group that uses this table. */
uint64_t options_given(const struct command_args *a, const struct option *table);
/* The candidate nearest to a mistyped word; NULL if none comes near. Call with *best = SIZE_MAX. */
void suggest(const char **nearest, size_t *best, const char *word, const char *candidate);
/* Parse "1,2,3" (blanks and newlines also separate). */
int parse_ids(struct ids *out, const char *text, const char *what, struct err *e);

/* ---- help.c ---- */
void help_command(const struct command *c);                /* to standard output */
void help_overview(const struct command *const *commands); /* every command, and first steps */

/* ---- dispatch.c ---- */
const char *program_name(void); /* as it was typed, for commands that a hint shows */

/* ---- tables of common options (common.c) ---- */

struct common_opts { /* first in every command's struct */
    const char *home;
    bool help, verbose, quiet;
};
extern const struct option common_options[];
#define COMMON_GROUP                                                                               \
    {                                                                                              \
        "General", common_options, 0                                                               \
    }

struct engine_opts {
    const char *backend;
    int32_t threads;
    uint32_t ctx, max_batch;
    int32_t kv;                 /* enum kv_type */
    int32_t kv_keys, kv_values; /* 1 + enum kv_type; 0: as kv */
    /* no options here: for commands that serve many; 0: the defaults */
    uint32_t n_seqs, queue_len, max_step_ms, kv_pages;
    uint32_t swap_mb, prefix_ram_mb;
    bool share_prefix;
};
extern const struct option engine_options[];
#define ENGINE_GROUP(type)                                                                         \
    {                                                                                              \
        "Model", engine_options, offsetof(type, engine)                                            \
    }

struct sampling_opts {
    struct sample_params p;
    uint32_t max_tokens;
    struct strings stop, bias, breakers; /* as given */
    char **stops;                        /* stop, unescaped; stop.n of them */
};
extern const struct option sampling_options[];
#define SAMPLING_GROUP(type)                                                                       \
    {                                                                                              \
        "Sampling", sampling_options, offsetof(type, sampling)                                     \
    }
/* Take the lists into p and stops, with \n, \t and \\ unescaped; freed by sampling_fini. Returns 0
 * or COMMAND_USAGE. */
int sampling_resolve(struct sampling_opts *s, struct err *e);
void sampling_fini(struct sampling_opts *s); /* what sampling_resolve took */

/* ---- models (common.c) ---- */

bool ref_is_path(const char *ref); /* a file is meant, not a name in the store */
int open_store(struct store **out, const struct common_opts *c, struct err *e);
/* A model and, for a name, the store it is in. Zero it first; close with model_ref_close. */
struct model_ref {
    struct store *store; /* NULL when the reference is a path */
    struct model_file *file;
    struct prefix_store *prefix; /* what load_engine gives the engine; NULL: no persistent tier */
};
int model_ref_open(struct model_ref *s, const char *ref, const struct common_opts *c,
                   struct err *e);
/* Engines loaded from now on keep KV pages in the store's prefix.db. Where it cannot be opened they
 * do without, and the log says so. */
void model_ref_open_prefix(struct model_ref *s, const struct common_opts *c);
void model_ref_close(struct model_ref *s);
/* The file's tokenizer.chat_template; n = 0 if it has none. */
int model_ref_template(struct gguf_str *out, const struct model_ref *s, struct err *e);
/* Load with a progress bar. ERR_USAGE (an unknown backend) becomes COMMAND_USAGE. */
int load_engine(struct engine **out, struct model_ref *s, const struct engine_opts *o,
                const struct common_opts *c, struct err *e);
/* "11.8 MB of f16", "4.7 MB of q8_0 keys and q4_0 values": the KV pages' memory. */
void format_kv(char out[64], const struct engine_placement *p);
json_t *kv_json(const struct engine_placement *p); /* {keys, values, bytes} */
int cpu_count(void); /* processors this process may use */
/* "placed 218 MB (weights 97.9 MB, KV ...), resident 221 MB"; resident 0: not loaded, left out. */
void format_memory(struct buf *out, const struct engine_placement *p, uint64_t resident);
json_t *memory_json(const struct engine_placement *p, uint64_t resident); /* NULL: out of memory */

/* ---- output (output.c) ---- */

enum style { STYLE_NONE, STYLE_DIM, STYLE_BOLD, STYLE_PROMPT, STYLE_END };
/* The escape sequence that switches a style on for the stream of fd (1 or 2), or "" when it is no
 * terminal or NO_COLOR is set. STYLE_NONE switches back. */
const char *style(int fd, enum style s);
bool term_plain(void);                      /* TERM is dumb or unset: no cursor movement */
int term_columns(int fd);                   /* 80 when unknown */
bool locale_is_utf8(void);                  /* the environment says that the terminal shows UTF-8 */
int format_bytes(char out[16], uint64_t n); /* "97.9 MB" */
int format_count(char out[16], uint64_t n); /* "134.5 M" */
int format_age(char out[24], int64_t then); /* "3 hours ago" */
/* Text that came from a file, safe and short for one line of a terminal: control characters and
 * broken UTF-8 become '?', more than max columns are cut with "...". */
void put_clean(struct buf *out, const char *p, size_t n, size_t max_columns);
/* As put_clean for streamed text: newlines and tabs stay, nothing is cut. */
void put_terminal(struct buf *out, const char *p, size_t n);
/* Print and release; fails when j is NULL (out of memory). */
int print_json(json_t *j, struct err *e);
json_t *json_text(const char *p, size_t n); /* a string value; broken UTF-8 becomes U+FFFD */
/* Before standard input is read: at a terminal, say how it ends. */
void say_reading(void);
int read_stream(struct buf *out, int fd, const char *name, size_t max_bytes, struct err *e);
/* "-" is standard input. */
int read_input(struct buf *out, const char *path, size_t max_bytes, struct err *e);
/* A JSON document of a file or "-"; NULL with e filled. */
json_t *read_json(const char *path, struct err *e);
/* One line of a stream, without its end; false at the end of it. */
bool read_line(struct buf *out, void *file);

/* ---- progress (progress.c) ---- */

struct progress {
    const char *verb; /* "importing" */
    const char *unit; /* of done and total; NULL: bytes */
    uint64_t start_ns, last_ns, done, total;
    uint64_t after_ns; /* no bar before this much time has passed */
    bool terminal, shown, quiet;
};
/* verb must stay; after_s: show nothing for operations that take less. */
void progress_begin(struct progress *p, const char *verb, double after_s, bool quiet);
int progress_tick(void *p, uint64_t done, uint64_t total); /* a store_progress; 1 after Ctrl-C */
/* Remove the bar; when `past` is given and standard error is no terminal, one line is left. */
void progress_end(struct progress *p, const char *past);

/* ---- Ctrl-C (interrupt.c) ---- */

/* From here on SIGINT is noted (and, when wake_fd >= 0, 1 is added to that eventfd) in place of
 * what it did before; a second one does that again. Calls do not nest. */
void interrupt_begin(int wake_fd);
bool interrupt_seen(void); /* since interrupt_begin */
void interrupt_end(void);  /* SIGINT does again what it did before */

/* ---- word wrap (wrap.c) ---- */

struct wrap {
    int columns, column; /* of the terminal; where the cursor is */
    char word[128];      /* the word being written */
    size_t n_word;
    int word_columns;
    bool whole; /* all of it is in `word` */
};
void wrap_begin(struct wrap *w, int columns);
/* Text without control characters but \n and \t; what to write comes out. */
void wrap_put(struct wrap *w, struct buf *out, const char *p, size_t n);

/* ---- answers (answer.c) ---- */

struct answer {
    struct request_stats stats;
    uint64_t n_read; /* tokens of the prompt that were computed, also of one that was stopped */
    struct buf text; /* what was printed, owned by the caller */
    bool no_wrap;    /* in: leave long lines to the terminal */
    bool interrupted;
};
/* Run the request and print its text on standard output as it comes; Ctrl-C ends the answer. */
int answer_stream(struct answer *a, struct engine *en, struct request *r, struct err *e);
/* "prompt 31 at 412 tok/s; answer 128 at 71.2 tok/s; first token 0.12 s; load 0.31 s" */
void format_stats(struct buf *out, const struct request_stats *s, uint64_t n_read,
                  double load_seconds);

/* ---- chat (chat.c) ---- */

struct run_opts {
    struct common_opts common;
    struct engine_opts engine;
    struct sampling_opts sampling;
    const char *system;
    bool stats, raw, no_wrap, no_prefix_cache;
};
/* What both one-shot and chat need. */
struct session {
    struct engine *engine;
    struct model_ref *source;
    const struct run_opts *opts;
    struct sampling_opts sampling; /* defaults of the model, then flags, then /set */
    json_t *messages;              /* array */
    bool raw;                      /* no chat template: text is continued as it is */
    bool chat;                     /* a person goes on after the answer */
};
int session_answer(struct answer *a, struct session *s, const char *text, size_t n, struct err *e);
/* A larger context to start again with, for `need` tokens; 0: the model has none. */
uint32_t session_more_ctx(const struct session *s, size_t need);
/* Messages hold the system prompt, if any, and nothing else. */
int session_clear(struct session *s, const char *system, struct err *e);
const char *session_system(const struct session *s); /* or NULL */
int chat_run(struct session *s, struct err *e);

#endif
