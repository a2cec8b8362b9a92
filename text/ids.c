/* A growing array of token ids with sticky failure. The caller owns the memory (ids_fini). */
#include "text/text.h"

void ids_put(struct ids *s, int32_t id)
{
    if (s->failed)
        return;
    if (s->n == s->cap) {
        size_t cap, bytes;
        if (mul_over(s->cap ? s->cap : (size_t)32, (size_t)2, &cap) ||
            mul_over(cap, sizeof *s->v, &bytes)) {
            s->failed = true;
            return;
        }
        int32_t *v = mem_realloc(s->v, bytes);
        if (!v) {
            s->failed = true;
            return;
        }
        s->v = v;
        s->cap = cap;
    }
    s->v[s->n++] = id;
}

void ids_fini(struct ids *s)
{
    mem_free(s->v);
    *s = (struct ids){0};
}
