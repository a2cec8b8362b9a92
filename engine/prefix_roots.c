/* Which roots the persistent tier has seen, so that a miss after a restart can say what differs:
 * the model, the KV type, the layout version. Each engine leaves its facets in one of a few
 * numbered rows of the tier; a sequence that misses a page asks whether it is there below another
 * root. For the counters only: no page is ever taken from there. */
#include "engine/prefix_cache.h"

#include <stdio.h>
#include <string.h>

static struct prefix_page row_of(int i, const int32_t *number, struct prefix_facets *f)
{
    char name[32];
    int n = snprintf(name, sizeof name, "prefix root %d", i);
    struct hash128 h = prefix_facet_hash(name, (size_t)n);
    struct prefix_page p = {
        .ids = number, .n_ids = 1, .kv = f, .kv_bytes = sizeof *f, .cost_us = UINT32_MAX};
    memcpy(p.key.b, &h, sizeof p.key.b);
    return p;
}

void prefix_roots_read(struct prefix_roots *r, struct prefix_store *store,
                       const struct prefix_facets *own, uint64_t model_tag)
{
    struct prefix_facets mine = *own;
    bool known = false;
    int free_row = -1; /* own is among them: another tenant of the same engine has it elsewhere */
    r->n = 0;
    for (int i = 0; i < PREFIX_N_ROOTS; i++) {
        int32_t number = i;
        struct prefix_facets *f = &r->root[r->n];
        struct prefix_page row = row_of(i, &number, f);
        if (prefix_get(store, f, &row) != PREFIX_HIT)
            free_row = free_row < 0 ? i : free_row;
        else {
            known = known || !memcmp(f, own, sizeof *f);
            r->n++;
        }
    }
    if (known || free_row < 0)
        return;
    int32_t number = free_row;
    struct prefix_page row = row_of(free_row, &number, &mine);
    row.model_tag = model_tag;
    if (prefix_put(store, &row))
        r->root[r->n++] = mine;
}

static int n_differ(const struct prefix_facets *a, const struct prefix_facets *b, int *first)
{
    int n = 0;
    for (int k = PREFIX_FACET_END - 1; k >= 0; k--)
        if (memcmp(&a->part[k], &b->part[k], sizeof a->part[k])) {
            *first = k;
            n++;
        }
    return n;
}

enum prefix_miss prefix_roots_why(const struct prefix_roots *r, struct prefix_store *store,
                                  struct kv_seq *kv, const struct prefix_facets *own)
{
    int best = INT32_MAX, facet = 0;
    for (int i = 0; i < r->n; i++) {
        struct prefix_elsewhere *x = &kv->elsewhere;
        int first = 0, n = n_differ(&r->root[i], own, &first);
        if (!n || x->n_pages[i] < 0)
            continue; /* its own; or it did not have the page before */
        if (x->n_pages[i] == 0)
            x->key[i] = prefix_key_root(&r->root[i]);
        while (x->n_pages[i] <= kv->n_tree) {
            const int32_t *ids = kv->ids + x->n_pages[i]++ * KV_PAGE_TOKENS;
            x->key[i] = prefix_key_next(x->key[i], ids, KV_PAGE_TOKENS);
        }
        struct prefix_key key;
        memcpy(key.b, &x->key[i], sizeof key.b);
        if (!prefix_has(store, &key)) {
            x->n_pages[i] = -1;
        } else if (n < best) {
            best = n;
            facet = first;
        }
    }
    return best < INT32_MAX ? prefix_facet_miss((enum prefix_facet)facet) : PREFIX_MISS_FIRST_SEEN;
}
