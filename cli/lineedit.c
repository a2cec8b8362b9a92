/* The line editor's state machine: bytes in, text and events out. Knows no file descriptor; drawing
 * is in linedraw.c. Owns its text, kill and draft buffers.
 *
 * Keys: those of Emacs and readline that people's fingers know. Escape sequences: ECMA-48 control
 * sequences as xterm sends them (Xterm Control Sequences, "PC-Style Function Keys"), bracketed
 * paste (same document, "Bracketed Paste Mode"). */
#include "cli/lineedit.h"

#include <stdlib.h>
#include <string.h>

enum { GROUND, ESCAPE, CSI, SS3, PASTE }; /* states of the input parser */

enum { MAX_TEXT = 1 << 20 }; /* bytes; more is refused with a bell */

enum key { /* above the bytes; ALT is a bit */
           KEY_UP = 256,
           KEY_DOWN,
           KEY_LEFT,
           KEY_RIGHT,
           KEY_HOME,
           KEY_END,
           KEY_DELETE,
           KEY_WORD_LEFT,
           KEY_WORD_RIGHT,
           KEY_ALT = 512,
};
#define CTRL(c) ((c)&31)

/* ---- the text ---- */

/* A character with the marks that combine with it moves as one. */
static size_t next_char(const struct editor *ed, size_t at)
{
    bool first = true;
    while (at < ed->text.n) {
        uint32_t cp;
        int len = utf8_decode(&cp, ed->text.data + at, ed->text.n - at);
        if (!first && (utf8_width(cp) > 0 || cp < 0x20))
            break;
        first = false;
        at += (size_t)abs(len);
    }
    return at;
}

static size_t prev_char(const struct editor *ed, size_t at)
{
    while (at > 0) {
        do
            at--;
        while (at > 0 && ((unsigned char)ed->text.data[at] & 0xc0) == 0x80);
        uint32_t cp;
        utf8_decode(&cp, ed->text.data + at, ed->text.n - at);
        if (utf8_width(cp) > 0 || cp < 0x20)
            break;
    }
    return at;
}

static size_t line_start(const struct editor *ed, size_t at)
{
    while (at > 0 && ed->text.data[at - 1] != '\n')
        at--;
    return at;
}

static size_t line_end(const struct editor *ed, size_t at)
{
    while (at < ed->text.n && ed->text.data[at] != '\n')
        at++;
    return at;
}

static bool is_word(unsigned char c)
{
    return c >= 0x80 || (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
}

static size_t word_left(const struct editor *ed, size_t at)
{
    const char *s = ed->text.data;
    while (at > 0 && !is_word((unsigned char)s[at - 1]))
        at--;
    while (at > 0 && is_word((unsigned char)s[at - 1]))
        at--;
    return at;
}

static size_t word_right(const struct editor *ed, size_t at)
{
    const char *s = ed->text.data;
    while (at < ed->text.n && !is_word((unsigned char)s[at]))
        at++;
    while (at < ed->text.n && is_word((unsigned char)s[at]))
        at++;
    return at;
}

static void insert(struct editor *ed, const char *p, size_t n)
{
    if (!n)
        return;
    if (ed->text.n + n > MAX_TEXT) {
        ed->bell = true;
        return;
    }
    size_t tail = ed->text.n - ed->at;
    buf_put(&ed->text, p, n);
    if (ed->text.failed)
        return;
    memmove(ed->text.data + ed->at + n, ed->text.data + ed->at, tail);
    memcpy(ed->text.data + ed->at, p, n);
    ed->at += n;
}

static void erase(struct editor *ed, size_t from, size_t to)
{
    if (from == to)
        return;
    memmove(ed->text.data + from, ed->text.data + to, ed->text.n - to);
    ed->text.n -= to - from;
    ed->text.data[ed->text.n] = 0;
    ed->at = from;
}

static void kill_range(struct editor *ed, size_t from, size_t to)
{
    if (from == to)
        return;
    buf_clear(&ed->kill);
    buf_put(&ed->kill, ed->text.data + from, to - from);
    erase(ed, from, to);
}

static void set_text(struct editor *ed, const char *p, size_t n)
{
    buf_clear(&ed->text);
    buf_put(&ed->text, p, n);
    ed->at = ed->text.n;
}

/* ---- history ---- */

static size_t history_n(const struct editor *ed)
{
    return ed->history ? ed->history->n : 0;
}

static void history_go(struct editor *ed, size_t to)
{
    size_t n = history_n(ed);
    if (to > n) {
        ed->bell = true;
        return;
    }
    if (ed->hist_at == n) {
        buf_clear(&ed->draft);
        buf_put(&ed->draft, ed->text.data, ed->text.n);
    }
    ed->hist_at = to;
    if (to == n)
        set_text(ed, ed->draft.data, ed->draft.n);
    else
        set_text(ed, ed->history->v[to], strlen(ed->history->v[to]));
}

/* The nearest entry before `from` that holds the query. */
static void search_from(struct editor *ed, size_t from)
{
    for (size_t i = from; i-- > 0;) {
        if (strstr(ed->history->v[i], buf_str(&ed->query))) {
            ed->found = i;
            set_text(ed, ed->history->v[i], strlen(ed->history->v[i]));
            return;
        }
    }
    ed->bell = true;
}

static void search_start(struct editor *ed)
{
    if (!ed->searching) {
        ed->searching = true;
        buf_clear(&ed->query);
        buf_clear(&ed->draft);
        buf_put(&ed->draft, ed->text.data, ed->text.n);
        ed->found = history_n(ed);
    } else if (ed->query.n) {
        search_from(ed, ed->found);
    }
}

static void search_end(struct editor *ed, bool keep)
{
    ed->searching = false;
    if (!keep)
        set_text(ed, ed->draft.data, ed->draft.n);
    ed->hist_at = keep && ed->found < history_n(ed) ? ed->found : history_n(ed);
}

static void search_text(struct editor *ed, const char *p, size_t n)
{
    buf_put(&ed->query, p, n);
    search_from(ed, history_n(ed));
}

/* ---- what keys do ---- */

static void do_left(struct editor *ed)
{
    ed->at = prev_char(ed, ed->at);
}

static void do_right(struct editor *ed)
{
    ed->at = next_char(ed, ed->at);
}

static void do_home(struct editor *ed)
{
    ed->at = line_start(ed, ed->at);
}

static void do_end(struct editor *ed)
{
    ed->at = line_end(ed, ed->at);
}

static void do_word_left(struct editor *ed)
{
    ed->at = word_left(ed, ed->at);
}

static void do_word_right(struct editor *ed)
{
    ed->at = word_right(ed, ed->at);
}

/* Characters between the start of the line and the cursor. */
static size_t column_of(const struct editor *ed)
{
    size_t n = 0;
    for (size_t i = line_start(ed, ed->at); i < ed->at; i = next_char(ed, i))
        n++;
    return n;
}

static void go_column(struct editor *ed, size_t start, size_t column)
{
    size_t end = line_end(ed, start);
    for (ed->at = start; column-- > 0 && ed->at < end;)
        ed->at = next_char(ed, ed->at);
}

static void do_up(struct editor *ed)
{
    size_t start = line_start(ed, ed->at);
    if (start > 0)
        go_column(ed, line_start(ed, start - 1), column_of(ed));
    else if (ed->hist_at > 0)
        history_go(ed, ed->hist_at - 1);
    else
        ed->bell = true;
}

static void do_down(struct editor *ed)
{
    size_t end = line_end(ed, ed->at);
    if (end < ed->text.n)
        go_column(ed, end + 1, column_of(ed));
    else
        history_go(ed, ed->hist_at + 1);
}

static void do_older(struct editor *ed)
{
    if (ed->hist_at > 0)
        history_go(ed, ed->hist_at - 1);
}

static void do_newer(struct editor *ed)
{
    history_go(ed, ed->hist_at + 1);
}

static void do_backspace(struct editor *ed)
{
    erase(ed, prev_char(ed, ed->at), ed->at);
}

static void do_delete(struct editor *ed)
{
    erase(ed, ed->at, next_char(ed, ed->at));
}

/* At the end of a line the newline itself goes, as in readline. */
static void do_kill_end(struct editor *ed)
{
    size_t end = line_end(ed, ed->at);
    kill_range(ed, ed->at, end == ed->at && end < ed->text.n ? end + 1 : end);
}

static void do_kill_start(struct editor *ed)
{
    kill_range(ed, line_start(ed, ed->at), ed->at);
}

/* Ctrl-W takes what lies between blanks. */
static void do_kill_blank(struct editor *ed)
{
    size_t at = ed->at;
    while (at > 0 && strchr(" \t\n", ed->text.data[at - 1]))
        at--;
    while (at > 0 && !strchr(" \t\n", ed->text.data[at - 1]))
        at--;
    kill_range(ed, at, ed->at);
}

static void do_kill_word_left(struct editor *ed)
{
    kill_range(ed, word_left(ed, ed->at), ed->at);
}

static void do_kill_word_right(struct editor *ed)
{
    kill_range(ed, ed->at, word_right(ed, ed->at));
}

static void do_yank(struct editor *ed)
{
    insert(ed, ed->kill.data, ed->kill.n);
}

static void do_newline(struct editor *ed)
{
    insert(ed, "\n", 1);
}

/* Complete the first word as far as the words that begin so agree. */
static void do_complete(struct editor *ed)
{
    const char *first = NULL;
    size_t common = 0, n_found = 0;
    if (!ed->words || !ed->text.n || ed->at != ed->text.n) {
        ed->bell = true;
        return;
    }
    for (size_t i = 0; ed->words[i]; i++) {
        const char *w = ed->words[i];
        if (strncmp(w, ed->text.data, ed->text.n))
            continue;
        size_t same = 0;
        while (first && same < common && w[same] == first[same])
            same++;
        common = first ? same : strlen(w);
        first = first ? first : w;
        n_found++;
    }
    if (n_found && common > ed->text.n)
        insert(ed, first + ed->text.n, common - ed->text.n);
    else
        ed->bell = true;
    if (n_found == 1)
        insert(ed, " ", 1);
}

static const struct {
    int key;
    void (*act)(struct editor *ed);
} bindings[] = {
    {KEY_LEFT, do_left},
    {CTRL('B'), do_left},
    {KEY_RIGHT, do_right},
    {CTRL('F'), do_right},
    {KEY_UP, do_up},
    {KEY_DOWN, do_down},
    {CTRL('P'), do_older},
    {CTRL('N'), do_newer},
    {KEY_HOME, do_home},
    {CTRL('A'), do_home},
    {KEY_END, do_end},
    {CTRL('E'), do_end},
    {KEY_WORD_LEFT, do_word_left},
    {KEY_ALT | 'b', do_word_left},
    {KEY_WORD_RIGHT, do_word_right},
    {KEY_ALT | 'f', do_word_right},
    {127, do_backspace},
    {CTRL('H'), do_backspace},
    {KEY_DELETE, do_delete},
    {CTRL('K'), do_kill_end},
    {CTRL('U'), do_kill_start},
    {CTRL('W'), do_kill_blank},
    {KEY_ALT | 127, do_kill_word_left},
    {KEY_ALT | CTRL('H'), do_kill_word_left},
    {KEY_ALT | 'd', do_kill_word_right},
    {CTRL('Y'), do_yank},
    {KEY_ALT | '\r', do_newline},
    {KEY_ALT | '\n', do_newline},
    {CTRL('J'), do_newline},
    {'\t', do_complete},
    {CTRL('R'), search_start},
};

/* ---- finished, or not ---- */

static size_t trailing_backslashes(const char *text, size_t n)
{
    size_t k = 0;
    while (k < n && text[n - 1 - k] == '\\')
        k++;
    return k;
}

static bool is_quotes(const char *p)
{
    return !memcmp(p, "\"\"\"", 3);
}

/* Where the """ that opens a block stands: at the start, or behind a command; n if nowhere. */
static size_t block_start(const char *text, size_t n)
{
    size_t at = 0;
    if (n && text[0] == '/') {
        for (at = 1; at < n && text[at] >= 'a' && text[at] <= 'z';)
            at++;
        size_t name = at;
        while (at < n && text[at] == ' ')
            at++;
        if (name == 1 || at == name)
            return n;
    }
    return at + 3 <= n && is_quotes(text + at) ? at : n;
}

bool lineedit_wants_more(const char *text, size_t n)
{
    size_t at = block_start(text, n);
    if (at < n)
        return n < at + 6 || !is_quotes(text + n - 3);
    return trailing_backslashes(text, n) % 2;
}

void lineedit_unquote(struct buf *text)
{
    size_t start = block_start(text->data, text->n), w = 0;
    bool block = start + 6 <= text->n;
    for (size_t i = 0; i < text->n; i++) {
        /* A backslash that continued its line left a newline behind itself. */
        if (!block && text->data[i] == '\\' && i + 1 < text->n && text->data[i + 1] == '\n' &&
            trailing_backslashes(text->data, i + 1) % 2)
            continue;
        text->data[w++] = text->data[i];
    }
    text->n = w;
    if (text->data)
        text->data[w] = 0;
    if (!block)
        return;
    size_t from = start + 3, to = text->n - 3;
    from += from < to && text->data[from] == '\n';
    to -= to > from && text->data[to - 1] == '\n';
    memmove(text->data + start, text->data + from, to - from);
    text->n = start + to - from;
    text->data[text->n] = 0;
}

static enum edit_event enter(struct editor *ed)
{
    if (lineedit_wants_more(ed->text.data, ed->text.n)) {
        ed->at = ed->text.n;
        insert(ed, "\n", 1);
        return EDIT_NONE;
    }
    return EDIT_DONE;
}

/* ---- input ---- */

/* A key while Ctrl-R searches: true when it was for the search alone. */
static bool search_key(enum edit_event *ev, struct editor *ed, int key)
{
    *ev = EDIT_NONE;
    if (key == CTRL('R'))
        return false;
    if (key == 127 || key == CTRL('H')) {
        if (!ed->query.n)
            return true;
        do
            ed->query.n--;
        while (ed->query.n && ((unsigned char)ed->query.data[ed->query.n] & 0xc0) == 0x80);
        ed->query.data[ed->query.n] = 0;
        if (ed->query.n)
            search_from(ed, history_n(ed));
        return true;
    }
    if (key == CTRL('G') || key == CTRL('C')) {
        search_end(ed, false);
        return true;
    }
    search_end(ed, true);
    return false;
}

static enum edit_event take_key(struct editor *ed, int key)
{
    enum edit_event ev;
    if (ed->searching && search_key(&ev, ed, key))
        return ev;
    if (key == '\r')
        return enter(ed);
    if (key == CTRL('C'))
        return EDIT_INTERRUPT;
    if (key == CTRL('Z'))
        return EDIT_SUSPEND;
    if (key == CTRL('L'))
        return EDIT_CLEAR;
    if (key == CTRL('D')) {
        if (!ed->text.n)
            return EDIT_EOF;
        do_delete(ed);
        return EDIT_NONE;
    }
    for (size_t i = 0; i < ARRAY_LEN(bindings); i++) {
        if (bindings[i].key == key) {
            bindings[i].act(ed);
            return EDIT_NONE;
        }
    }
    ed->bell = true;
    return EDIT_NONE;
}

/* Text that was typed or pasted as bytes: newlines of any kind become \n, other controls go. */
static void take_text(struct editor *ed, const char *p, size_t n)
{
    struct buf clean = {0};
    for (size_t i = 0; i < n;) {
        uint32_t cp;
        int len = utf8_decode(&cp, p + i, n - i);
        if (len < 0)
            buf_puts(&clean, "\xef\xbf\xbd");
        else if (cp == '\r')
            buf_puts(&clean, i + 1 < n && p[i + 1] == '\n' ? "" : "\n");
        else if (cp >= 0xa0 || (cp >= 0x20 && cp < 0x7f) || cp == '\n' || cp == '\t')
            buf_put(&clean, p + i, (size_t)len);
        i += (size_t)abs(len);
    }
    if (ed->searching)
        search_text(ed, clean.data, clean.n);
    else
        insert(ed, clean.data, clean.n);
    buf_fini(&clean);
}

static enum edit_event csi_key(struct editor *ed, char final)
{
    static const struct {
        const char *seq; /* parameters and final byte */
        int key;
    } keys[] = {
        {"A", KEY_UP},
        {"B", KEY_DOWN},
        {"C", KEY_RIGHT},
        {"D", KEY_LEFT},
        {"H", KEY_HOME},
        {"F", KEY_END},
        {"1~", KEY_HOME},
        {"7~", KEY_HOME},
        {"4~", KEY_END},
        {"8~", KEY_END},
        {"3~", KEY_DELETE},
        {"1;5C", KEY_WORD_RIGHT},
        {"1;5D", KEY_WORD_LEFT},
        {"1;3C", KEY_WORD_RIGHT},
        {"1;3D", KEY_WORD_LEFT},
        {"5C", KEY_WORD_RIGHT},
        {"5D", KEY_WORD_LEFT},
        {"13;2u", KEY_ALT | '\r'},
        {"27;2;13~", KEY_ALT | '\r'},
        {"3;5~", KEY_ALT | 'd'},
        {"3;3~", KEY_ALT | 'd'},
    };
    ed->state = GROUND;
    ed->seq[ed->n_seq] = final;
    ed->seq[ed->n_seq + 1] = 0;
    ed->n_seq = 0;
    if (!strcmp(ed->seq, "200~")) {
        ed->state = PASTE;
        buf_clear(&ed->paste);
        return EDIT_NONE;
    }
    for (size_t i = 0; i < ARRAY_LEN(keys); i++)
        if (!strcmp(ed->seq, keys[i].seq))
            return take_key(ed, keys[i].key);
    return EDIT_NONE; /* a key that means nothing here */
}

static enum edit_event in_csi(struct editor *ed, unsigned char c)
{
    if (c >= 0x40 && c <= 0x7e)
        return csi_key(ed, (char)c);
    if (c < 0x20 || ed->n_seq + 2 >= sizeof ed->seq) {
        ed->state = GROUND;
        ed->n_seq = 0;
    } else
        ed->seq[ed->n_seq++] = (char)c;
    return EDIT_NONE;
}

static void in_paste(struct editor *ed, unsigned char c)
{
    static const char end[] = "\x1b[201~";
    size_t k = sizeof end - 1;
    buf_putc(&ed->paste, (char)c);
    bool over = ed->paste.n >= k && !memcmp(ed->paste.data + ed->paste.n - k, end, k);
    if (!over && !ed->paste.failed && ed->paste.n < MAX_TEXT + k)
        return;
    ed->state = GROUND;
    if (over)
        take_text(ed, ed->paste.data, ed->paste.n - k);
    else
        ed->bell = true;
    buf_clear(&ed->paste);
}

static enum edit_event in_ground(struct editor *ed, unsigned char c)
{
    if (c == 0x1b) {
        ed->state = ESCAPE;
        return EDIT_NONE;
    }
    if (c < 0x20 || c == 0x7f) {
        ed->n_seq = 0;
        return take_key(ed, c);
    }
    /* A character may arrive byte by byte. */
    ed->seq[ed->n_seq++] = (char)c;
    if (utf8_tail(ed->seq, ed->n_seq) < ed->n_seq || ed->n_seq >= 4) {
        take_text(ed, ed->seq, ed->n_seq);
        ed->n_seq = 0;
    }
    return EDIT_NONE;
}

enum edit_event editor_byte(struct editor *ed, unsigned char c)
{
    switch (ed->state) {
    case ESCAPE:
        ed->n_seq = 0;
        ed->state = c == '[' ? CSI : c == 'O' ? SS3 : c == 0x1b ? ESCAPE : GROUND;
        return ed->state == GROUND ? take_key(ed, KEY_ALT | c) : EDIT_NONE;
    case CSI:
        return in_csi(ed, c);
    case SS3:
        return csi_key(ed, (char)c);
    case PASTE:
        in_paste(ed, c);
        return EDIT_NONE;
    default:
        return in_ground(ed, c);
    }
}

bool editor_waits(const struct editor *ed)
{
    return ed->state == ESCAPE;
}

/* Escape alone leaves a search and means nothing else. */
void editor_idle(struct editor *ed)
{
    if (!editor_waits(ed))
        return;
    ed->state = GROUND;
    if (ed->searching)
        search_end(ed, true);
}

void editor_start(struct editor *ed)
{
    buf_clear(&ed->text);
    buf_clear(&ed->draft);
    ed->at = ed->n_seq = 0;
    ed->state = GROUND;
    ed->searching = ed->bell = false;
    ed->hist_at = ed->found = history_n(ed);
    ed->top = ed->cursor_row = 0;
}

void editor_fini(struct editor *ed)
{
    buf_fini(&ed->text);
    buf_fini(&ed->kill);
    buf_fini(&ed->draft);
    buf_fini(&ed->query);
    buf_fini(&ed->paste);
}
