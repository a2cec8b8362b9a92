/* The line editor without a terminal: keys in, text out; and its drawing against a small terminal
 * that knows the sequences it may use. */
#include "cli/lineedit.h"
#include "tests/unit/unit.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- helpers ---- */

static enum edit_event feed(struct editor *ed, const char *keys)
{
    enum edit_event ev = EDIT_NONE;
    for (; *keys; keys++)
        ev = editor_byte(ed, (unsigned char)*keys);
    return ev;
}

static void start(struct editor *ed, const struct linehist *h)
{
    *ed = (struct editor){.prompt = ">>> ", .more = "... ", .history = h};
    editor_start(ed);
    editor_resize(ed, 20, 10);
}

/* Feed keys to a fresh editor; the text and the cursor must be these. */
static void check_keys(const char *keys, const char *text, size_t at)
{
    struct editor ed;
    start(&ed, NULL);
    feed(&ed, keys);
    OK_MSG(!strcmp(buf_str(&ed.text), text), "text is '%s', not '%s'", buf_str(&ed.text), text);
    OK_MSG(ed.at == at, "'%s': cursor at %zu, not %zu", text, ed.at, at);
    editor_fini(&ed);
}

#define C(x)  "\x1b[" x
#define LEFT  C("D")
#define RIGHT C("C")
#define UP    C("A")
#define DOWN  C("B")

/* ---- editing ---- */

static void test_moves_and_inserts(void)
{
    check_keys("abc" LEFT LEFT "X", "aXbc", 2);
    check_keys("abc\x01X\x05Y", "XabcY", 5);
    check_keys("abc" C("H") "X" C("F") "Y", "XabcY", 5);
    check_keys("abc" C("1~") "X" C("4~") "Y", "XabcY", 5);
    check_keys("abc\x1bOHX\x1bOFY", "XabcY", 5);
    check_keys("abc" LEFT "\x7f", "ac", 1);
    check_keys("abc" LEFT LEFT C("3~"), "ac", 1);
    check_keys("abc" LEFT LEFT "\x04", "ac", 1);
    check_keys("\x7f" LEFT RIGHT C("3~"), "", 0);
}

static void test_words(void)
{
    check_keys("one two-three\x1b"
               "b\x1b"
               "bX",
               "one Xtwo-three", 5);
    check_keys("one two three" C("1;5D") "X", "one two Xthree", 9);
    check_keys("one two\x01\x1b"
               "fX",
               "oneX two", 4);
    check_keys("one two\x17", "one ", 4);
    check_keys("one a-b\x1b\x7f", "one a-", 6);
    check_keys("one two\x01\x1b"
               "d",
               " two", 0);
}

static void test_kill_and_yank(void)
{
    check_keys("one two\x15\x19\x19", "one twoone two", 14);
    check_keys("one two\x01\x0b"
               "x\x19",
               "xone two", 8);
    check_keys("one two\x17X\x19", "one Xtwo", 8);
}

static void test_wide_and_combining_characters_move_as_one(void)
{
    check_keys("a\xe6\xbc\xa2"
               "b" LEFT LEFT "X",
               "aX\xe6\xbc\xa2"
               "b",
               2);
    check_keys("e\xcc\x81z" LEFT LEFT "X", "Xe\xcc\x81z", 1);
    check_keys("e\xcc\x81\x7f", "", 0);
    check_keys("\xf0\x9f\x98\x80\x7fok", "ok", 2);
}

static void test_bad_bytes_become_replacement_characters(void)
{
    check_keys("a\xff"
               "b",
               "a\xef\xbf\xbd"
               "b",
               5);
    check_keys("a\xc3"
               "b",
               "a\xef\xbf\xbd"
               "b",
               5);
}

static void test_several_lines(void)
{
    check_keys("one\x1b\rtwo", "one\ntwo", 7);
    check_keys("one\x1b\rtwo" UP "X", "oneX\ntwo", 4);
    check_keys("one\x1b\rtwo\x01" UP "X" DOWN "Y", "Xone\ntYwo", 7);
    check_keys("\"\"\"\rone\r", "\"\"\"\none\n", 8);
    check_keys("one\\\rtwo", "one\\\ntwo", 8);
    struct editor ed;
    start(&ed, NULL);
    OK(feed(&ed, "\"\"\"one\rtwo\"\"\"\r") == EDIT_DONE);
    lineedit_unquote(&ed.text);
    OK(!strcmp(buf_str(&ed.text), "one\ntwo"));
    editor_start(&ed);
    OK(feed(&ed, "one\\\rtwo\\\\\r") == EDIT_DONE);
    lineedit_unquote(&ed.text);
    OK(!strcmp(buf_str(&ed.text), "one\ntwo\\\\"));
    editor_fini(&ed);
}

static void test_a_command_may_have_a_block(void)
{
    struct editor ed;
    start(&ed, NULL);
    OK(feed(&ed, "/system \"\"\"one\rtwo\"\"\"\r") == EDIT_DONE);
    lineedit_unquote(&ed.text);
    OK_MSG(!strcmp(buf_str(&ed.text), "/system one\ntwo"), "'%s'", buf_str(&ed.text));
    editor_start(&ed);
    OK(feed(&ed, "/etc/x \"\"\"one\r") == EDIT_DONE);
    editor_start(&ed);
    OK(feed(&ed, "/\"\"\"one\r") == EDIT_DONE);
    editor_fini(&ed);
}

static void test_escape_alone_is_no_part_of_a_key(void)
{
    struct editor ed;
    start(&ed, NULL);
    feed(&ed, "one two\x1b");
    OK(editor_waits(&ed));
    editor_idle(&ed);
    OK(!editor_waits(&ed));
    feed(&ed, "b");
    OK_MSG(!strcmp(buf_str(&ed.text), "one twob"), "'%s'", buf_str(&ed.text));
    feed(&ed, "\x1b[");
    editor_idle(&ed); /* a sequence that has begun is waited for */
    feed(&ed, "D");
    OK(ed.at == 7 && !strcmp(buf_str(&ed.text), "one twob"));
    feed(&ed, "\x12o\x1b");
    editor_idle(&ed);
    OK(!ed.searching);
    editor_fini(&ed);
}

static void test_unquote_leaves_other_text_alone(void)
{
    static const char *const same[] = {"", "\"\"\"", "plain", "a \"\"\"b\"\"\" c", "back\\slash"};
    for (size_t i = 0; i < ARRAY_LEN(same); i++) {
        struct buf b = {0};
        buf_puts(&b, same[i]);
        lineedit_unquote(&b);
        OK_MSG(!strcmp(buf_str(&b), same[i]), "'%s' became '%s'", same[i], buf_str(&b));
        buf_fini(&b);
    }
    struct buf b = {0};
    buf_puts(&b, "\"\"\"\"\"\"");
    lineedit_unquote(&b);
    OK(b.n == 0);
    buf_fini(&b);
}

static void test_paste_is_text_and_never_keys(void)
{
    check_keys(C("200~") "one\rtwo\x03\x04\r\n" C("201~") "X", "one\ntwo\nX", 9);
    check_keys(C("200~") "a\tb" C("31m") C("201~"), "a\tb[31m", 7);
}

static void test_events(void)
{
    struct editor ed;
    start(&ed, NULL);
    OK(feed(&ed, "\x04") == EDIT_EOF);
    OK(feed(&ed, "a\x03") == EDIT_INTERRUPT);
    OK(feed(&ed, "\x0c") == EDIT_CLEAR);
    OK(feed(&ed, "\x1a") == EDIT_SUSPEND);
    OK(feed(&ed, "\r") == EDIT_DONE);
    OK(feed(&ed, C("99;99;99x") C("?1;2c") "\x1bOZ") == EDIT_NONE);
    OK(!strcmp(buf_str(&ed.text), "a"));
    editor_fini(&ed);
}

static void test_tab_completes_commands(void)
{
    static const char *const words[] = {"/save", "/set", "/show", "/bye", NULL};
    struct editor ed;
    start(&ed, NULL);
    ed.words = words;
    feed(&ed, "/b\t");
    OK(!strcmp(buf_str(&ed.text), "/bye "));
    feed(&ed, "\x15/sh\t");
    OK(!strcmp(buf_str(&ed.text), "/show "));
    feed(&ed, "\x15/s\t");
    OK(!strcmp(buf_str(&ed.text), "/s") && ed.bell);
    editor_fini(&ed);
}

/* ---- history ---- */

static void test_history_keys(void)
{
    struct linehist h;
    struct err e = {0};
    struct editor ed;
    OK_CALL(linehist_open(&h, NULL, &e), e);
    OK_CALL(linehist_add(&h, "first", &e), e);
    OK_CALL(linehist_add(&h, "second\nline", &e), e);
    OK_CALL(linehist_add(&h, "second\nline", &e), e);
    OK(h.n == 2);
    start(&ed, &h);
    feed(&ed, "new" UP);
    OK(!strcmp(buf_str(&ed.text), "second\nline"));
    feed(&ed, UP UP);
    OK(!strcmp(buf_str(&ed.text), "first"));
    feed(&ed, UP);
    OK(ed.bell && !strcmp(buf_str(&ed.text), "first"));
    feed(&ed, DOWN DOWN DOWN);
    OK_MSG(!strcmp(buf_str(&ed.text), "new"), "the new line came back as '%s'", buf_str(&ed.text));
    editor_start(&ed);
    OK(feed(&ed, "\x12"
                 "fir\r") == EDIT_DONE);
    OK(!strcmp(buf_str(&ed.text), "first"));
    editor_start(&ed);
    feed(&ed, "draft\x12"
              "sec\x07");
    OK(!strcmp(buf_str(&ed.text), "draft"));
    editor_start(&ed);
    feed(&ed, "\x12"
              "i\x12" LEFT);
    OK(!strcmp(buf_str(&ed.text), "first"));
    editor_fini(&ed);
    linehist_fini(&h);
}

static void test_history_survives_on_disk_for_its_owner_only(void)
{
    char path[300];
    struct linehist h;
    struct err e = {0};
    struct stat st;
    snprintf(path, sizeof path, "%s/history", unit_tmpdir());
    OK_CALL(linehist_open(&h, path, &e), e);
    OK_CALL(linehist_add(&h, "one\\n\ntwo", &e), e);
    OK_CALL(linehist_add(&h, "three", &e), e);
    linehist_fini(&h);
    OK(stat(path, &st) == 0 && (st.st_mode & 0777) == 0600);
    OK_CALL(linehist_open(&h, path, &e), e);
    OK(h.n == 2 && !strcmp(h.v[0], "one\\n\ntwo") && !strcmp(h.v[1], "three"));
    linehist_fini(&h);
}

static void test_history_is_bounded(void)
{
    char path[300], text[32];
    struct linehist h;
    struct err e = {0};
    struct stat st;
    snprintf(path, sizeof path, "%s/history", unit_tmpdir());
    OK_CALL(linehist_open(&h, path, &e), e);
    for (int i = 0; i < 2 * HISTORY_MAX + 10; i++) {
        snprintf(text, sizeof text, "entry %d", i);
        linehist_add(&h, text, &e);
    }
    OK(h.n == HISTORY_MAX);
    linehist_fini(&h);
    stat(path, &st);
    off_t before = st.st_size;
    OK_CALL(linehist_open(&h, path, &e), e);
    snprintf(text, sizeof text, "entry %d", 2 * HISTORY_MAX + 9);
    OK(h.n == HISTORY_MAX && !strcmp(h.v[h.n - 1], text));
    OK(stat(path, &st) == 0 && st.st_size < before && (st.st_mode & 0777) == 0600);
    linehist_fini(&h);
}

static void test_history_that_grew_too_large_keeps_its_newest_part(void)
{
    enum { ENTRY = 60000, N = 80 };
    char path[300];
    static char text[ENTRY + 1];
    struct linehist h;
    struct err e = {0};
    struct stat st;
    snprintf(path, sizeof path, "%s/history", unit_tmpdir());
    OK_CALL(linehist_open(&h, path, &e), e);
    for (int i = 0; i < N; i++) {
        memset(text, 'a' + i % 26, ENTRY);
        linehist_add(&h, text, &e);
    }
    linehist_fini(&h);
    OK(stat(path, &st) == 0 && st.st_size == (off_t)N * (ENTRY + 1));
    OK_CALL(linehist_open(&h, path, &e), e);
    OK(h.n > N / 2 && h.n < N && !strcmp(h.v[h.n - 1], text) && strlen(h.v[0]) == ENTRY);
    OK(stat(path, &st) == 0 && st.st_size == (off_t)h.n * (ENTRY + 1));
    linehist_fini(&h);
}

static void test_a_line_is_whole_though_its_history_cannot_be_kept(void)
{
    struct lineedit *l = NULL;
    struct buf line = {0};
    struct err e = {0};
    int ends[2], old = dup(0);
    OK(pipe(ends) == 0 && write(ends[1], "hello\n", 6) == 6);
    dup2(ends[0], 0);
    close(ends[0]);
    close(ends[1]);
    OK_CALL(lineedit_new(&l, "/nowhere/history", NULL, &e), e);
    OK(l && lineedit_read(&line, l, "", "", &e) == LINE_OK && !strcmp(buf_str(&line), "hello"));
    OK(strstr(e.msg, "/nowhere/history"));
    e = (struct err){0};
    OK(l && lineedit_read(&line, l, "", "", &e) == LINE_EOF && !e.code);
    lineedit_free(l);
    buf_fini(&line);
    dup2(old, 0);
    close(old);
}

/* ---- drawing ---- */

enum { SCREEN_COLUMNS = 20, SCREEN_ROWS = 10 };

/* Enough of a terminal: deferred wrap, wide characters, CR LF, CUU, CUF, EL, ED, modes. */
struct screen {
    uint32_t cell[SCREEN_ROWS][SCREEN_COLUMNS];
    int row, col; /* col == SCREEN_COLUMNS: wrap is pending */
    bool odd;     /* a sequence that it does not know */
};

static void screen_scroll(struct screen *s)
{
    memmove(s->cell[0], s->cell[1], sizeof s->cell - sizeof s->cell[0]);
    memset(s->cell[SCREEN_ROWS - 1], 0, sizeof s->cell[0]);
}

static void screen_down(struct screen *s)
{
    if (++s->row == SCREEN_ROWS) {
        screen_scroll(s);
        s->row--;
    }
}

static void screen_char(struct screen *s, uint32_t cp)
{
    int w = utf8_width(cp);
    if (!w)
        return;
    if (s->col + w > SCREEN_COLUMNS) {
        s->col = 0;
        screen_down(s);
    }
    s->cell[s->row][s->col] = cp;
    for (int i = 1; i < w; i++)
        s->cell[s->row][s->col + i] = 0xffffffff;
    s->col += w;
}

static void screen_csi(struct screen *s, int n, char final)
{
    int col = MIN(s->col, SCREEN_COLUMNS - 1);
    if (final == 'A')
        s->row = MAX(0, s->row - MAX(n, 1));
    else if (final == 'C')
        s->col = MIN(SCREEN_COLUMNS - 1, col + MAX(n, 1));
    else if (final == 'K' || final == 'J')
        memset(&s->cell[s->row][col], 0, (size_t)(SCREEN_COLUMNS - col) * sizeof s->cell[0][0]);
    else if (final != 'h' && final != 'l' && final != 'm')
        s->odd = true;
    for (int r = s->row + 1; final == 'J' && r < SCREEN_ROWS; r++)
        memset(s->cell[r], 0, sizeof s->cell[r]);
}

static void screen_put(struct screen *s, const char *p, size_t n)
{
    for (size_t i = 0; i < n;) {
        uint32_t cp;
        int len = utf8_decode(&cp, p + i, n - i);
        i += (size_t)abs(len);
        if (cp == '\r') {
            s->col = 0;
        } else if (cp == '\n') {
            screen_down(s);
        } else if (cp == 0x1b && i < n && p[i] == '[') {
            i++;
            i += i < n && p[i] == '?';
            int v = 0;
            for (; i < n && p[i] >= '0' && p[i] <= '9'; i++)
                v = 10 * v + p[i] - '0';
            screen_csi(s, v, p[i++]);
        } else if (cp >= 0x20) {
            screen_char(s, cp);
        } else if (cp != '\a') {
            s->odd = true;
        }
    }
}

static void draw_on(struct screen *s, struct editor *ed)
{
    struct buf b = {0};
    editor_draw(&b, ed, false);
    screen_put(s, b.data, b.n);
    buf_fini(&b);
}

static void row_text(char *out, const struct screen *s, int row)
{
    int end = 0, n = 0;
    for (int c = 0; c < SCREEN_COLUMNS; c++)
        if (s->cell[row][c] && s->cell[row][c] != ' ')
            end = c + 1;
    for (int c = 0; c < end; c++)
        if (s->cell[row][c] != 0xffffffff)
            n += utf8_encode(out + n, s->cell[row][c] ? s->cell[row][c] : ' ');
    out[n] = 0;
}

static void check_row(const struct screen *s, int row, const char *want)
{
    char got[4 * SCREEN_COLUMNS + 1];
    row_text(got, s, row);
    OK_MSG(!strcmp(got, want), "row %d is '%s', not '%s'", row, got, want);
}

static void test_draws_lines_wider_than_the_screen(void)
{
    struct editor ed;
    struct screen s = {0};
    start(&ed, NULL);
    draw_on(&s, &ed);
    check_row(&s, 0, ">>>");
    feed(&ed, "abcdefghijklmnop"); /* fills the row to its end */
    draw_on(&s, &ed);
    check_row(&s, 0, ">>> abcdefghijklmnop");
    OK(s.row == 1 && s.col == 0);
    feed(&ed, "q\x01");
    draw_on(&s, &ed);
    check_row(&s, 1, "q");
    OK(s.row == 0 && s.col == 4);
    feed(&ed, "XY\x05");
    draw_on(&s, &ed);
    check_row(&s, 0, ">>> XYabcdefghijklmn");
    check_row(&s, 1, "opq");
    OK(s.row == 1 && s.col == 3);
    feed(&ed, "\x15");
    draw_on(&s, &ed);
    check_row(&s, 0, ">>>");
    check_row(&s, 1, "");
    OK(s.row == 0 && s.col == 4 && !s.odd);
    editor_fini(&ed);
}

static void test_draws_wide_characters_at_the_edge(void)
{
    struct editor ed;
    struct screen s = {0};
    start(&ed, NULL);
    feed(&ed, "abcdefghijklmno\xe6\xbc\xa2"); /* one column is left: it wraps */
    draw_on(&s, &ed);
    check_row(&s, 0, ">>> abcdefghijklmno");
    check_row(&s, 1, "\xe6\xbc\xa2");
    OK(s.row == 1 && s.col == 2);
    feed(&ed, LEFT LEFT);
    draw_on(&s, &ed);
    OK_MSG(s.row == 0 && s.col == 18, "cursor at %d, %d", s.row, s.col);
    editor_fini(&ed);
}

static void test_draws_several_lines_and_controls(void)
{
    struct editor ed;
    struct screen s = {0};
    start(&ed, NULL);
    feed(&ed, "one\x1b\rtwo\x1b\r" C("200~") "a\tb" C("201~") UP UP);
    draw_on(&s, &ed);
    check_row(&s, 0, ">>> one");
    check_row(&s, 1, "... two");
    check_row(&s, 2, "... a    b");
    OK(s.row == 0 && s.col == 7);
    editor_fini(&ed);
}

static void test_draws_a_window_of_text_taller_than_the_screen(void)
{
    struct editor ed;
    struct screen s = {0};
    char want[16];
    start(&ed, NULL);
    for (int i = 0; i < 30; i++) {
        snprintf(want, sizeof want, "%sline %d", i ? "\x1b\r" : "", i);
        feed(&ed, want);
        draw_on(&s, &ed);
    }
    check_row(&s, 0, "... line 20");
    check_row(&s, 9, "... line 29");
    for (int i = 0; i < 29; i++) {
        feed(&ed, UP);
        draw_on(&s, &ed);
    }
    check_row(&s, 0, ">>> line 0");
    check_row(&s, 9, "... line 9");
    OK(s.row == 0 && !s.odd);
    editor_fini(&ed);
}

/* Whatever is typed, a drawing that goes on from the last one shows what a fresh one shows. */
static void test_redrawing_equals_drawing_afresh(void)
{
    static const char *const keys[] = {
        "a",    "word ", "\xe6\xbc\xa2", "e\xcc\x81", "\x1b\r", LEFT,   RIGHT,
        UP,     DOWN,    "\x01",         "\x05",      "\x7f",   "\x17", "\x0b",
        "\x19", "\t",    "0123456789",   "\x12",      "\r"};
    uint64_t seed = 7;
    for (int round = 0; round < 300; round++) {
        struct editor ed;
        struct screen s = {0};
        start(&ed, NULL);
        draw_on(&s, &ed);
        for (int k = 0; k < 40; k++) {
            feed(&ed, keys[unit_rand(&seed) % ARRAY_LEN(keys)]);
            if (ed.searching)
                feed(&ed, "\x07");
            draw_on(&s, &ed);
        }
        struct screen fresh = {0};
        int top = ed.top;
        ed.cursor_row = 0;
        draw_on(&fresh, &ed);
        bool same = !memcmp(s.cell, fresh.cell, sizeof s.cell) || ed.top != top;
        for (int r = 0; r < SCREEN_ROWS && !same; r++) { /* blanks and nothing look alike */
            char a[4 * SCREEN_COLUMNS + 1], b[4 * SCREEN_COLUMNS + 1];
            row_text(a, &s, r);
            row_text(b, &fresh, r);
            if (!OK_MSG(!strcmp(a, b), "round %d, row %d: '%s', afresh '%s'", round, r, a, b))
                break;
        }
        OK(s.row == fresh.row && s.col == fresh.col && !s.odd);
        editor_fini(&ed);
    }
}

static const struct unit_test tests[] = {
    {"moves and inserts", test_moves_and_inserts},
    {"words", test_words},
    {"kill and yank", test_kill_and_yank},
    {"wide and combining characters move as one", test_wide_and_combining_characters_move_as_one},
    {"bad bytes become replacement characters", test_bad_bytes_become_replacement_characters},
    {"several lines", test_several_lines},
    {"a command may have a block", test_a_command_may_have_a_block},
    {"escape alone is no part of a key", test_escape_alone_is_no_part_of_a_key},
    {"unquote leaves other text alone", test_unquote_leaves_other_text_alone},
    {"paste is text and never keys", test_paste_is_text_and_never_keys},
    {"events", test_events},
    {"tab completes commands", test_tab_completes_commands},
    {"history keys", test_history_keys},
    {"history survives on disk for its owner only",
     test_history_survives_on_disk_for_its_owner_only},
    {"history is bounded", test_history_is_bounded},
    {"history that grew too large keeps its newest part",
     test_history_that_grew_too_large_keeps_its_newest_part},
    {"a line is whole though its history cannot be kept",
     test_a_line_is_whole_though_its_history_cannot_be_kept},
    {"draws lines wider than the screen", test_draws_lines_wider_than_the_screen},
    {"draws wide characters at the edge", test_draws_wide_characters_at_the_edge},
    {"draws several lines and controls", test_draws_several_lines_and_controls},
    {"draws a window of text taller than the screen",
     test_draws_a_window_of_text_taller_than_the_screen},
    {"redrawing equals drawing afresh", test_redrawing_equals_drawing_afresh},
};

int main(int argc, char **argv)
{
    return unit_main(argc, argv, tests, ARRAY_LEN(tests));
}
