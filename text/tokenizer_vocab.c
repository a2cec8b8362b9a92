/* The two look-ups of a vocabulary: bytes of a piece -> id, and for byte-level BPE a pair of ids ->
 * merged id. Open addressing, linear probing, load at most one half; memory is the tokenizer's. */
#include "text/text_internal.h"

#include <string.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

uint64_t piece_map_slots(uint64_t n_expected)
{
    uint64_t n_slots = 64;
    while (n_slots < 2 * n_expected)
        n_slots *= 2;
    return n_slots;
}

uint64_t pair_map_slots(uint64_t n_expected)
{
    uint64_t n_slots = 64;
    while (n_slots < n_expected + n_expected / 2)
        n_slots *= 2;
    return n_slots;
}

int piece_map_init(struct piece_map *m, uint32_t n_expected)
{
    uint64_t n_slots = piece_map_slots(n_expected);
    if (n_slots > (uint64_t)1 << 31 || !(m->slots = mem_array(n_slots, sizeof *m->slots)))
        return -1;
    m->mask = (uint32_t)(n_slots - 1);
    m->n_used = 0;
    return 0;
}

static inline uint32_t piece_hash(const struct tokenizer *t, const char *p, size_t n)
{
    return (uint32_t)XXH3_64bits_withSeed(p, n, t->seed);
}

static struct piece_slot *piece_slot_of(const struct tokenizer *t, uint32_t hash, const char *p,
                                        size_t n)
{
    const struct piece_map *m = &t->words;
    for (uint32_t i = hash & m->mask;; i = (i + 1) & m->mask) {
        struct piece_slot *s = &m->slots[i];
        if (!s->id1)
            return s;
        const struct piece *q = &t->pieces[s->id1 - 1];
        if (s->hash == hash && q->n == n && !memcmp(q->p, p, n))
            return s;
    }
}

int32_t piece_find(const struct tokenizer *t, const char *p, size_t n)
{
    if (n > t->longest)
        return -1;
    return (int32_t)piece_slot_of(t, piece_hash(t, p, n), p, n)->id1 - 1;
}

struct piece_warm piece_warm_slot(const struct tokenizer *t, const char *p, size_t n)
{
    struct piece_warm w = {piece_hash(t, p, n) & t->words.mask, 0};
    __builtin_prefetch(&t->words.slots[w.slot]);
    return w;
}

void piece_warm_entry(const struct tokenizer *t, struct piece_warm *w)
{
    w->id1 = t->words.slots[w->slot].id1;
    if (w->id1)
        __builtin_prefetch(&t->pieces[w->id1 - 1]);
}

void piece_warm_bytes(const struct tokenizer *t, const struct piece_warm *w)
{
    if (w->id1)
        __builtin_prefetch(t->pieces[w->id1 - 1].p);
}

static int piece_map_grow(struct piece_map *m)
{
    struct piece_map bigger = {0};
    if (piece_map_init(&bigger, m->mask + 1))
        return -1;
    for (uint64_t i = 0; i <= m->mask; i++) {
        if (!m->slots[i].id1)
            continue;
        uint32_t j = m->slots[i].hash & bigger.mask;
        while (bigger.slots[j].id1)
            j = (j + 1) & bigger.mask;
        bigger.slots[j] = m->slots[i];
    }
    bigger.n_used = m->n_used;
    mem_free(m->slots);
    *m = bigger;
    return 0;
}

int piece_put(struct tokenizer *t, int32_t id)
{
    const struct piece *q = &t->pieces[id];
    if (!q->n)
        return 0;
    if (t->words.n_used >= t->words.mask / 2 && piece_map_grow(&t->words))
        return -1;
    uint32_t hash = piece_hash(t, q->p, q->n);
    struct piece_slot *s = piece_slot_of(t, hash, q->p, q->n);
    if (s->id1)
        return 0;
    *s = (struct piece_slot){hash, (uint32_t)id + 1};
    t->words.n_used++;
    t->longest = MAX(t->longest, q->n);
    return 0;
}

int32_t piece_add(struct tokenizer *t, const char *p, size_t n)
{
    if (t->n_pieces == t->cap_pieces) {
        size_t cap = (size_t)t->cap_pieces + t->cap_pieces / 2 + 256;
        struct piece *v = cap > INT32_MAX ? NULL : mem_realloc(t->pieces, cap * sizeof *v);
        if (!v)
            return -1;
        t->pieces = v;
        t->cap_pieces = (uint32_t)cap;
    }
    char *copy = arena_strdup(&t->arena, p, n);
    if (!copy)
        return -1;
    t->pieces[t->n_pieces] = (struct piece){copy, (uint32_t)n};
    int32_t id = (int32_t)t->n_pieces++;
    return piece_put(t, id) ? -1 : id;
}

int pair_map_init(struct tokenizer *t, uint64_t n_expected)
{
    uint64_t n_slots = pair_map_slots(n_expected);
    t->pairs.slots = mem_array(n_slots, sizeof *t->pairs.slots);
    t->pairs.mask = n_slots - 1;
    return t->pairs.slots ? 0 : -1;
}

static inline uint64_t pair_hash(const struct tokenizer *t, int32_t left, int32_t right)
{
    uint64_t key = ((uint64_t)(uint32_t)left << 32 | (uint32_t)right) ^ t->seed;
    __uint128_t m = (__uint128_t)key * 0x9e3779b97f4a7c15u;
    return (uint64_t)m ^ (uint64_t)(m >> 64);
}

static struct pair_slot *pair_slot_of(const struct tokenizer *t, int32_t left, int32_t right)
{
    const struct pair_map *m = &t->pairs;
    for (uint64_t i = pair_hash(t, left, right) & m->mask;; i = (i + 1) & m->mask) {
        struct pair_slot *s = &m->slots[i];
        if (!s->left1 || (s->left1 == left + 1 && s->right == right))
            return s;
    }
}

void pair_warm(const struct tokenizer *t, int32_t left, int32_t right)
{
    __builtin_prefetch(&t->pairs.slots[pair_hash(t, left, right) & t->pairs.mask], 1);
}

void pair_put(struct tokenizer *t, const struct pair_slot *pair)
{
    struct pair_slot *s = pair_slot_of(t, pair->left1 - 1, pair->right);
    if (!s->left1)
        *s = *pair;
}

const struct pair_slot *pair_find(const struct tokenizer *t, int32_t left, int32_t right)
{
    const struct pair_slot *s = pair_slot_of(t, left, right);
    return s->left1 ? s : NULL;
}
