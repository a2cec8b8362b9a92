/* Drawing of the line editor: lays the prompt and the text out over screen rows, and puts the
 * sequences that bring the screen up to date. Long lines are left to the terminal's own wrapping,
 * so that it can reflow and copy them. Sequences: ECMA-48 CUU, CUF, EL, ED, and DECTCEM. */
#include "cli/lineedit.h"

#include <stdlib.h>
#include <string.h>

struct spot {
    int row, col; /* col == columns: the row is full and the terminal has not wrapped yet */
};

/* What one byte position looks like. */
struct cell {
    const char *p;
    size_t n; /* bytes shown */
    int width;
    size_t n_text; /* bytes of the text it stands for */
};

static struct cell cell_at(const char *p, size_t n)
{
    static const char carets[] =
        "^@^A^B^C^D^E^F^G^H^I^J^K^L^M^N^O^P^Q^R^S^T^U^V^W^X^Y^Z^[^\\^]^^^_";
    uint32_t cp;
    int len = utf8_decode(&cp, p, n);
    if (len < 0)
        return (struct cell){"?", 1, 1, (size_t)-len};
    if (cp == '\t')
        return (struct cell){"    ", 4, 4, 1};
    if (cp < 0x20)
        return (struct cell){carets + 2 * cp, 2, 2, 1};
    if (cp >= 0x7f && cp < 0xa0)
        return (struct cell){"?", 1, 1, (size_t)len};
    return (struct cell){p, (size_t)len, utf8_width(cp), (size_t)len};
}

static struct spot place(struct spot s, int width, int columns)
{
    if (width && s.col + width > columns)
        s = (struct spot){s.row + 1, 0};
    s.col += width;
    return s;
}

/* A full row's end is the next row's start, for a cursor. */
static struct spot settle(struct spot s, int columns)
{
    return s.col >= columns ? (struct spot){s.row + 1, 0} : s;
}

struct layout {
    struct editor *ed;
    struct buf *out;               /* NULL: measure only */
    int first, last;               /* rows that are shown */
    struct spot at, cursor, shown; /* shown: where the last cell that was put ended */
};

static void put_cells(struct layout *l, const char *p, size_t n)
{
    int columns = l->ed->columns;
    for (size_t i = 0; i < n;) {
        struct cell c = cell_at(p + i, n - i);
        /* A wide character that wraps leaves one column, in which something may stand. */
        if (l->out && l->at.col < columns && l->at.col + c.width > columns &&
            l->at.row >= l->first && l->at.row <= l->last)
            buf_puts(l->out, "\x1b[K");
        l->at = place(l->at, c.width, columns);
        if (l->out && l->at.row >= l->first && l->at.row <= l->last) {
            buf_put(l->out, c.p, c.n);
            l->shown = l->at;
        }
        i += c.n_text;
    }
}

static void put_prompt(struct layout *l, const char *prompt)
{
    if (l->out && l->ed->style_on)
        buf_puts(l->out, l->ed->style_on);
    put_cells(l, prompt, strlen(prompt));
    if (l->out && l->ed->style_off)
        buf_puts(l->out, l->ed->style_off);
}

static void put_newline(struct layout *l)
{
    bool shown = l->out && l->at.row >= l->first && l->at.row < l->last;
    /* Erasing on a full row would take its last character. */
    if (shown && l->at.col < l->ed->columns)
        buf_puts(l->out, "\x1b[K");
    if (shown) {
        buf_puts(l->out, "\r\n");
        l->shown = (struct spot){l->at.row + 1, 0};
    }
    l->at = (struct spot){l->at.row + 1, 0};
}

static void walk(struct layout *l)
{
    const struct editor *ed = l->ed;
    l->at = (struct spot){0, 0};
    l->shown = (struct spot){l->first, 0};
    if (ed->searching) {
        put_prompt(l, "(search) ");
        put_cells(l, ed->query.data, ed->query.n);
        put_prompt(l, ": ");
    } else {
        put_prompt(l, ed->prompt);
    }
    for (size_t i = 0; i < ed->text.n;) {
        size_t n = strcspn(ed->text.data + i, "\n"), end = i + MIN(n, ed->text.n - i);
        if (ed->at >= i && ed->at <= end) {
            put_cells(l, ed->text.data + i, ed->at - i);
            l->cursor = l->at;
            put_cells(l, ed->text.data + ed->at, end - ed->at);
        } else {
            put_cells(l, ed->text.data + i, end - i);
        }
        i = end;
        if (i < ed->text.n) {
            put_newline(l);
            put_prompt(l, ed->more);
            i++;
        }
    }
    if (ed->at == ed->text.n)
        l->cursor = l->at;
}

static void up(struct buf *out, int rows)
{
    if (rows > 0)
        buf_printf(out, "\x1b[%dA", rows);
}

void editor_resize(struct editor *ed, int columns, int rows)
{
    ed->columns = MAX(columns, 2);
    ed->rows = MAX(rows, 1);
    /* The terminal has wrapped what was drawn anew; so does this. */
    struct layout l = {.ed = ed};
    buf_str(&ed->text);
    walk(&l);
    int row = settle(l.cursor, ed->columns).row;
    ed->top = MIN(ed->top, row);
    ed->cursor_row = MIN(row - ed->top, ed->rows - 1);
}

void editor_draw(struct buf *out, struct editor *ed, bool final)
{
    struct layout l = {.ed = ed};
    buf_str(&ed->text); /* NUL behind it, for strcspn */
    if (final)
        ed->at = ed->text.n;
    walk(&l);
    int columns = ed->columns;
    struct spot cursor = settle(l.cursor, columns), end = settle(l.at, columns);
    if (cursor.row < ed->top)
        ed->top = cursor.row;
    if (cursor.row >= ed->top + ed->rows)
        ed->top = cursor.row - ed->rows + 1;
    if (end.row < ed->top + ed->rows - 1)
        ed->top = MAX(0, end.row - ed->rows + 1);

    buf_puts(out, ed->bell ? "\a\x1b[?25l" : "\x1b[?25l");
    ed->bell = false;
    up(out, ed->cursor_row);
    buf_putc(out, '\r');
    l.out = out;
    l.first = ed->top;
    l.last = ed->top + ed->rows - 1;
    walk(&l);
    /* A blank makes the terminal wrap a row that is full to its end. */
    if (l.shown.col >= columns && l.shown.row < l.last) {
        buf_puts(out, " \r");
        l.shown = (struct spot){l.shown.row + 1, 0};
    }
    if (l.shown.col < columns)
        buf_puts(out, "\x1b[J");
    up(out, l.shown.row - cursor.row);
    buf_putc(out, '\r');
    if (cursor.col > 0)
        buf_printf(out, "\x1b[%dC", cursor.col);
    ed->cursor_row = cursor.row - ed->top;
    buf_puts(out, final ? "\r\n\x1b[?25h" : "\x1b[?25h");
    if (final)
        ed->top = ed->cursor_row = 0;
}
