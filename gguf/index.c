/* Look-up of keys and tensors by name: open-addressed tables of positions at most half full, hashed
 * with a seed that a file's author cannot know. Owns its tables; names stay where they are. */
#include "gguf/gguf_internal.h"

#include <string.h>

struct gguf_index *gguf_index_new(void)
{
    struct gguf_index *x = mem_zalloc(sizeof *x);
    if (x)
        x->seed = now_ns() * 0x9e3779b97f4a7c15u ^ (uint64_t)(uintptr_t)x;
    return x;
}

void gguf_index_free(struct gguf_index *x)
{
    if (!x)
        return;
    mem_free(x->keys.slots);
    mem_free(x->tensors.slots);
    mem_free(x);
}

static uint64_t table_bytes(const struct gguf_table *t)
{
    return t->slots ? (uint64_t)(t->mask + 1) * sizeof *t->slots : 0;
}

uint64_t gguf_index_bytes(const struct gguf_index *x)
{
    return sizeof *x + table_bytes(&x->keys) + table_bytes(&x->tensors);
}

static struct gguf_str key_name(const struct gguf *g, uint64_t i)
{
    return g->kv[i].key;
}

static struct gguf_str tensor_name(const struct gguf *g, uint64_t i)
{
    return (struct gguf_str){g->tensors[i].name, strlen(g->tensors[i].name)};
}

typedef struct gguf_str (*name_of)(const struct gguf *g, uint64_t i);

/* The slot that holds the name, or the free one where it belongs. */
static uint32_t *table_slot(const struct gguf *g, const struct gguf_table *t, name_of name,
                            struct gguf_str s)
{
    const struct gguf_index *x = g->index;
    size_t at = (size_t)hash_xxh3(s.p, s.n, x->seed).lo;
    for (;; at++) {
        uint32_t *slot = &t->slots[at & t->mask];
        if (!*slot)
            return slot;
        struct gguf_str have = name(g, *slot - 1);
        if (have.n == s.n && memcmp(have.p, s.p, s.n) == 0)
            return slot;
    }
}

/* Enter positions from .. to-1; as gguf_index_keys. */
static int table_enter(uint64_t *dup, const struct gguf *g, struct gguf_table *t, name_of name,
                       uint64_t from, uint64_t to)
{
    if (!t->slots || to > (t->mask + 1) / 2) {
        size_t n = 16;
        while (n / 2 < to)
            n *= 2;
        uint32_t *slots = mem_array(n, sizeof *slots);
        if (!slots)
            return -1;
        mem_free(t->slots);
        *t = (struct gguf_table){slots, n - 1};
        from = 0;
    }
    for (uint64_t i = from; i < to; i++) {
        uint32_t *slot = table_slot(g, t, name, name(g, i));
        if (*slot) {
            *dup = i;
            return 1;
        }
        *slot = (uint32_t)i + 1;
    }
    return 0;
}

int gguf_index_keys(uint64_t *dup, struct gguf *g)
{
    struct gguf_index *x = g->index;
    return table_enter(dup, g, &x->keys, key_name, 0, g->n_kv);
}

int gguf_index_tensors(uint64_t *dup, struct gguf *g, uint64_t from)
{
    struct gguf_index *x = g->index;
    return table_enter(dup, g, &x->tensors, tensor_name, from, g->n_tensors);
}

const struct gguf_kv *gguf_find(const struct gguf *g, const char *key)
{
    const struct gguf_index *x = g->index;
    uint32_t pos = *table_slot(g, &x->keys, key_name, (struct gguf_str){key, strlen(key)});
    return pos ? &g->kv[pos - 1] : NULL;
}

const struct gguf_tensor *gguf_find_tensor(const struct gguf *g, const char *name)
{
    const struct gguf_index *x = g->index;
    uint32_t pos = *table_slot(g, &x->tensors, tensor_name, (struct gguf_str){name, strlen(name)});
    return pos ? &g->tensors[pos - 1] : NULL;
}
