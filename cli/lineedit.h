/* Line editing of our own: no terminfo, so that it works in an empty chroot. An `editor` is a pure
 * state machine, bytes in, text and drawing out (tested without a terminal); a `lineedit` binds one
 * to the terminal, with history on disk. */
#ifndef INGOT_CLI_LINEEDIT_H
#define INGOT_CLI_LINEEDIT_H

#include "base/base.h"

/* ---- history (linehist.c) ---- */

struct linehist {
    char **v; /* oldest first; owned */
    size_t n, cap;
    char *path; /* NULL: not kept on disk */
};
enum { HISTORY_MAX = 1000 };
int linehist_open(struct linehist *h, const char *path,
                  struct err *e); /* a missing file is empty */
/* Append (and to the file, readable by its owner only), unless it repeats the last one. */
int linehist_add(struct linehist *h, const char *text, struct err *e);
void linehist_fini(struct linehist *h);

/* ---- the editor (lineedit.c) ---- */

enum edit_event {
    EDIT_NONE,
    EDIT_DONE,      /* Enter: the text is complete */
    EDIT_EOF,       /* Ctrl-D on an empty line */
    EDIT_INTERRUPT, /* Ctrl-C */
    EDIT_SUSPEND,   /* Ctrl-Z */
    EDIT_CLEAR,     /* Ctrl-L: clear the screen and draw again */
};

struct editor {
    const char *prompt, *more;        /* of the first and of further lines; plain text */
    const char *style_on, *style_off; /* escape sequences around them */
    const char *const *words;         /* what Tab completes at the start; ends with NULL */
    const struct linehist *history;
    struct buf text;
    size_t at;              /* the cursor: a byte offset, always at a character */
    struct buf kill, draft; /* last killed text; the new line while history is looked at */
    size_t hist_at;         /* history->n: the new line */
    bool searching;         /* Ctrl-R */
    struct buf query;
    size_t found; /* entry that the search shows; history->n: none */
    int state;    /* of the input parser */
    char seq[32];
    size_t n_seq;
    struct buf paste;
    /* The drawing: rows are screen rows counted from the first row of the text. */
    int columns, rows; /* of the terminal */
    int top;           /* first row shown when the text is taller than the terminal */
    int cursor_row;    /* where the last drawing left the cursor, from `top` */
    bool bell;
};

enum { EDITOR_ESCAPE_MS = 50 }; /* the bytes of one key come closer to each other than this */

void editor_start(struct editor *ed); /* an empty text; kill and history stay */
enum edit_event editor_byte(struct editor *ed, unsigned char c);
/* Is an Escape taken that may be a key of its own, or the start of one? Then call editor_idle when
 * no byte has come for EDITOR_ESCAPE_MS. */
bool editor_waits(const struct editor *ed);
void editor_idle(struct editor *ed);
/* Put the escape sequences and text that bring the screen up to date. With `final` the cursor goes
 * behind the text, on a fresh line. */
void editor_draw(struct buf *out, struct editor *ed, bool final);
/* After the terminal's size changed: where the cursor is now. */
void editor_resize(struct editor *ed, int columns, int rows);
void editor_fini(struct editor *ed);

/* Is a text unfinished: an opened """ block (it may follow a command, `/system """`), or a
 * backslash at its end? */
bool lineedit_wants_more(const char *text, size_t n);
/* Strip the """ of a block and the backslashes that continued lines, in place. */
void lineedit_unquote(struct buf *text);

/* ---- the terminal (lineterm.c) ---- */

enum line_result { LINE_OK, LINE_EOF, LINE_INTERRUPT, LINE_FAILED };

struct lineedit;
/* Without a capable terminal (TERM=dumb, pipes) lines are read plainly. From here to lineedit_free
 * keys are not echoed between two reads: what is typed while an answer runs waits for the next
 * ones. Ctrl-C sends its signal then. */
int lineedit_new(struct lineedit **out, const char *history_path, const char *const *words,
                 struct err *e);
void lineedit_free(struct lineedit *l);
/* Read one text, which may have several lines; it is put into out, unquoted. LINE_FAILED: out is
 * not the whole text. LINE_OK with e filled: only the history could not be kept. */
enum line_result lineedit_read(struct buf *out, struct lineedit *l, const char *prompt,
                               const char *more, struct err *e);
/* Drop what was typed ahead. */
void lineedit_flush(struct lineedit *l);

#endif
