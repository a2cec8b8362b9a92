/* Fuzz target of the GGUF reader: parse, look at everything, verify with the weights. Seeds are the
 * loader cases; the input is the file as it is. */
#include "gguf/gguf.h"

#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static volatile double sink; /* keeps the reads */

/* What the loader would ask of a key, whatever its kind. */
static void ask(const struct gguf *g, const struct gguf_kv *kv)
{
    struct err e = {0};
    char key[64];
    uint32_t u;
    float f;
    bool b;
    struct gguf_str s;
    double sum = 0;
    for (uint64_t i = 0; i < kv->n; i++)
        sum += kv->strings ? (double)(kv->strings[i].n ? kv->strings[i].p[0] : 0)
                           : gguf_kv_number(kv, i) + (double)gguf_kv_int(kv, i);
    sink = sum;
    if (kv->key.n >= sizeof key)
        return;
    memcpy(key, kv->key.p, kv->key.n);
    key[kv->key.n] = 0;
    CHECK(gguf_find(g, key) == kv);
    int n_ok = !gguf_get_u32(g, key, &u, &e) + !gguf_get_bool(g, key, &b, &e) +
               !gguf_get_str(g, key, &s, &e);
    CHECK(n_ok <= 1 && (n_ok == 1 || e.msg[0]));
    gguf_get_f32(g, key, &f, &e);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    struct err e = {0};
    struct gguf *g = NULL;
    if (gguf_parse(&g, data, n, n, &e)) {
        CHECK(!g && e.code && e.msg[0]);
        return 0;
    }
    CHECK(g->arena.used_bytes <= 3 * n + (1u << 20));
    for (uint64_t i = 0; i < g->n_kv; i++)
        ask(g, &g->kv[i]);
    for (uint64_t i = 0; i < g->n_tensors; i++) {
        const struct gguf_tensor *t = &g->tensors[i];
        CHECK(gguf_find_tensor(g, t->name) == t);
        CHECK(g->shards[0].header_bytes + t->offset + t->n_bytes <= n);
    }
    if (g->n_shards > 1) {
        struct err again = {0};
        gguf_add_shard(g, 1, data, n, n, &again);
    }
    g->shards[0].map = (struct mapped){.data = data, .n = n}; /* lent: taken back before free would unmap it */
    gguf_verify(g, true, &e);
    for (uint64_t i = 0; i < g->n_tensors; i++) {
        const struct gguf_tensor *t = &g->tensors[i];
        float row[256];
        const struct gguf_dtype_info *info = gguf_dtype_find(t->type);
        if (t->shard == 0)
            info->to_f32(row, gguf_tensor_data(g, t), info->block_len);
    }
    g->shards[0].map = (struct mapped){0};
    gguf_free(g);
    return 0;
}
