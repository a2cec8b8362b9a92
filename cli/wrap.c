/* Word wrap for streamed text on a terminal: characters go out at once; a word that runs into the
 * edge is taken back and put on the next line. Holds one word. Sequences: ECMA-48 CUF and EL. */
#include "cli/cli_internal.h"

#include <stdlib.h>
#include <string.h>

static void end_word(struct wrap *w)
{
    w->n_word = 0;
    w->word_columns = 0;
    w->whole = true;
}

static void take_back(struct wrap *w, struct buf *out)
{
    int start = w->column - w->word_columns;
    buf_putc(out, '\r');
    if (start > 0)
        buf_printf(out, "\x1b[%dC", start);
    buf_puts(out, "\x1b[K\n");
    buf_put(out, w->word, w->n_word);
    w->column = w->word_columns;
}

static void put_blank(struct wrap *w, struct buf *out, char c)
{
    int width = c == '\t' ? 8 - w->column % 8 : 1;
    end_word(w);
    if (w->column + width > w->columns) { /* the line break stands for it */
        buf_putc(out, '\n');
        w->column = 0;
        return;
    }
    buf_putc(out, c);
    w->column += width;
}

static void put_word_char(struct wrap *w, struct buf *out, const char *p, size_t n, int width)
{
    if (w->column + width > w->columns) {
        /* A word that fills the line from its start, or was too long to hold, is the terminal's. */
        if (w->whole && w->n_word && w->word_columns < w->column)
            take_back(w, out);
        else
            w->column = 0;
    }
    buf_put(out, p, n);
    w->column += width;
    if (width > 1) { /* between Chinese or Japanese characters a line may break anywhere */
        end_word(w);
    } else if (w->n_word + n <= sizeof w->word) {
        memcpy(w->word + w->n_word, p, n);
        w->n_word += n;
        w->word_columns += width;
    } else {
        w->whole = false;
    }
}

void wrap_begin(struct wrap *w, int columns)
{
    *w = (struct wrap){.columns = columns, .whole = true};
}

void wrap_put(struct wrap *w, struct buf *out, const char *p, size_t n)
{
    for (size_t i = 0; i < n;) {
        uint32_t cp;
        int len = utf8_decode(&cp, p + i, n - i);
        size_t bytes = (size_t)abs(len);
        if (p[i] == '\n') {
            buf_putc(out, '\n');
            w->column = 0;
            end_word(w);
        } else if (p[i] == ' ' || p[i] == '\t') {
            put_blank(w, out, p[i]);
        } else {
            put_word_char(w, out, p + i, bytes, len > 0 ? utf8_width(cp) : 1);
        }
        i += bytes;
    }
}
