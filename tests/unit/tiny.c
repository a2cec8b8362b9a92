/* Tiny seeded models, see tiny.h: weights from a counter-based generator in exact arithmetic, so
 * that a spec gives the same bytes everywhere. Refuses what the writer or the block type cannot
 * hold. Needs base and gguf only. */
#include "tests/unit/tiny.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

void tiny_defaults(struct tiny_spec *s, const char *arch)
{
    bool qwen = strncmp(arch, "qwen", 4) == 0;
    *s = (struct tiny_spec){
        .arch = arch,
        .seed = 1,
        .width = 64,
        .n_layers = 2,
        .n_heads = 4,
        .n_kv_heads = 2,
        .n_ffn = 128,
        .n_vocab = 384,
        .n_ctx = 256,
        .rope_base = qwen ? 1e6f : 1e4f,
        .tied = qwen,
        .biases = strcmp(arch, "qwen2") == 0,
        .qk_norm = strcmp(arch, "qwen3") == 0,
        .bpe = qwen,
    };
}

/* ---- weights ---- */

/* splitmix64 at a counter. */
static uint64_t hash64(uint64_t seed, uint64_t at)
{
    uint64_t z = seed + (at + 1) * 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* Nearly normal, mean 0, deviation 1: the sum of four even 16-bit numbers. No library function is
 * called, so every machine gives the same bits. */
static float nearly_normal(uint64_t bits)
{
    int32_t sum = 0;
    for (int i = 0; i < 4; i++)
        sum += (int32_t)(bits >> 16 * i & 0xffff);
    return (float)(sum - 131070) * (1.7320508f / 65536);
}

struct tiny_tensor {
    const struct gguf_dtype_info *info;
    uint64_t seed, ne[2];
    float center, spread;
    bool vary_rows; /* rows differ in size by up to 3 */
    bool factors;   /* values 1 to 8, rising */
    void *data;     /* while it is being written; owned */
};

static float tensor_value(const struct tiny_tensor *t, uint64_t row, uint64_t col)
{
    if (t->factors)
        return 1 + 7 * (float)col / (float)MAX(t->ne[0] - 1, 1u);
    float size = t->vary_rows ? 0.5f + (float)(hash64(~t->seed, row) >> 40) * 0x1p-24f : 1;
    return t->center + t->spread * size * nearly_normal(hash64(t->seed, row * t->ne[0] + col));
}

static int tensor_make(struct tiny_tensor *t, struct err *e)
{
    size_t row_bytes = (size_t)(t->ne[0] / t->info->block_len * t->info->block_bytes);
    float *row = mem_array(t->ne[0], sizeof *row);
    t->data = mem_array(t->ne[1], row_bytes);
    if (!row || !t->data) {
        mem_free(row);
        return err_set(e, ERR_MEMORY, "no memory for a test model's tensor");
    }
    for (uint64_t r = 0; r < t->ne[1]; r++) {
        for (uint64_t c = 0; c < t->ne[0]; c++)
            row[c] = tensor_value(t, r, c);
        t->info->from_f32((char *)t->data + r * row_bytes, row, t->ne[0]);
    }
    mem_free(row);
    return 0;
}

static int tensor_fill(void *user, void *dst, uint64_t offset, size_t n, struct err *e)
{
    struct tiny_tensor *t = user;
    if (!t->data && tensor_make(t, e))
        return -1;
    memcpy(dst, (char *)t->data + offset, n);
    uint64_t end = t->ne[0] / t->info->block_len * t->info->block_bytes * t->ne[1];
    if (offset + n == end) {
        mem_free(t->data);
        t->data = NULL;
    }
    return 0;
}

/* ---- the file ---- */

struct tiny_file {
    const struct tiny_spec *s;
    struct gguf_writer *w;
    struct tiny_tensor *tensors; /* every fill's user */
    size_t n_tensors, cap;
    struct arena arena;
};

static void put_str(struct tiny_file *f, const char *key, const char *v)
{
    gguf_writer_str(f->w, key, v, strlen(v));
}

static const char *arch_key(struct tiny_file *f, const char *rest)
{
    static char key[128]; /* the writer copies it at once */
    snprintf(key, sizeof key, "%s.%s", f->s->arch, rest);
    return key;
}

static uint32_t head_dim(const struct tiny_spec *s)
{
    return s->head_dim ? s->head_dim : s->width / s->n_heads;
}

static void put_keys(struct tiny_file *f)
{
    const struct tiny_spec *s = f->s;
    const struct {
        const char *name;
        uint32_t v;
    } numbers[] = {
        {"block_count", s->n_layers},          {"context_length", s->n_ctx},
        {"embedding_length", s->width},        {"feed_forward_length", s->n_ffn},
        {"attention.head_count", s->n_heads},  {"attention.head_count_kv", s->n_kv_heads},
        {"attention.key_length", head_dim(s)}, {"attention.value_length", head_dim(s)},
        {"rope.dimension_count", head_dim(s)}, {"vocab_size", s->n_vocab},
    };
    put_str(f, "general.architecture", s->arch);
    put_str(f, "general.name", "tiny");
    for (size_t i = 0; i < ARRAY_LEN(numbers); i++)
        gguf_writer_u32(f->w, arch_key(f, numbers[i].name), numbers[i].v);
    if (s->window)
        gguf_writer_u32(f->w, arch_key(f, "attention.sliding_window"), s->window);
    gguf_writer_f32(f->w, arch_key(f, "rope.freq_base"), s->rope_base);
    gguf_writer_f32(f->w, arch_key(f, "attention.layer_norm_rms_epsilon"), 1e-5f);
}

/* A tensor of ne1 rows (1: a vector, in F32). */
static void put_tensor(struct tiny_file *f, const char *name, uint32_t ne0, uint32_t ne1,
                       float center, float spread)
{
    CHECK(f->n_tensors < f->cap);
    struct tiny_tensor *t = &f->tensors[f->n_tensors++];
    bool matrix = ne1 > 1;
    uint32_t dtype = matrix ? f->s->dtype : GGUF_F32;
    *t = (struct tiny_tensor){
        .info = gguf_dtype_find(dtype),
        .seed = hash_xxh3(name, strlen(name), f->s->seed).lo,
        .ne = {ne0, ne1},
        .center = center,
        .spread = spread,
        .vary_rows = matrix,
        .factors = strcmp(name, "rope_freqs.weight") == 0,
    };
    gguf_writer_tensor(f->w, name, dtype, matrix ? 2 : 1, t->ne, tensor_fill, t);
}

static void put_layer(struct tiny_file *f, uint32_t layer)
{
    const struct tiny_spec *s = f->s;
    uint32_t q = s->n_heads * head_dim(s), kv = s->n_kv_heads * head_dim(s);
    const struct {
        const char *name;
        uint32_t ne0, ne1;
        bool wanted;
    } t[] = {
        {"attn_norm.weight", s->width, 1, true},
        {"attn_q.weight", s->width, q, true},
        {"attn_k.weight", s->width, kv, true},
        {"attn_v.weight", s->width, kv, true},
        {"attn_q.bias", q, 1, s->biases},
        {"attn_k.bias", kv, 1, s->biases},
        {"attn_v.bias", kv, 1, s->biases},
        {"attn_q_norm.weight", head_dim(s), 1, s->qk_norm},
        {"attn_k_norm.weight", head_dim(s), 1, s->qk_norm},
        {"attn_output.weight", q, s->width, true},
        {"ffn_norm.weight", s->width, 1, true},
        {"ffn_gate.weight", s->width, s->n_ffn, true},
        {"ffn_up.weight", s->width, s->n_ffn, true},
        {"ffn_down.weight", s->n_ffn, s->width, true},
    };
    for (size_t i = 0; i < ARRAY_LEN(t); i++) {
        char name[64];
        snprintf(name, sizeof name, "blk.%u.%s", layer, t[i].name);
        if (!t[i].wanted)
            continue;
        if (t[i].ne1 > 1)
            put_tensor(f, name, t[i].ne0, t[i].ne1, 0, 1 / sqrtf((float)t[i].ne0));
        else if (strstr(name, "norm"))
            put_tensor(f, name, t[i].ne0, 1, 1, 0.1f);
        else
            put_tensor(f, name, t[i].ne0, 1, 0, 0.1f);
    }
}

static void put_tensors(struct tiny_file *f)
{
    const struct tiny_spec *s = f->s;
    /* A tied matrix is read in both directions: rows near 1 long in the embedding would give logits
     * of size sqrt(width). */
    float spread = s->tied ? 2 / sqrtf((float)s->width) : 1;
    put_tensor(f, "token_embd.weight", s->width, s->n_vocab, 0, spread);
    put_tensor(f, "output_norm.weight", s->width, 1, 1, 0.1f);
    if (!s->tied)
        put_tensor(f, "output.weight", s->width, s->n_vocab, 0, 2 / sqrtf((float)s->width));
    if (s->rope_factors)
        put_tensor(f, "rope_freqs.weight", head_dim(s) / 2, 1, 1, 0);
    for (uint32_t i = 0; i < s->n_layers; i++)
        put_layer(f, i);
}

/* ---- tokenizer ---- */

enum { TOKEN_NORMAL = 1, TOKEN_UNKNOWN = 2, TOKEN_CONTROL = 3, TOKEN_BYTE = 6 };

struct tiny_vocab {
    struct gguf_str *tokens; /* [n_vocab] */
    float *scores;           /* [n_vocab] */
    int32_t *types;          /* [n_vocab] */
    uint32_t n;
    struct gguf_str *merges; /* BPE: one for each filler */
    uint32_t n_merges;
};

static void vocab_put(struct tiny_file *f, struct tiny_vocab *v, const char *text, int32_t type)
{
    size_t n = strlen(text);
    char *copy = arena_strdup(&f->arena, text, n);
    if (!copy || v->n >= f->s->n_vocab)
        return;
    v->tokens[v->n] = (struct gguf_str){copy, n};
    v->types[v->n] = type;
    v->scores[v->n] = type == TOKEN_NORMAL ? -(float)v->n : 0;
    v->n++;
}

/* The i-th word over a to z of two or more letters, shorter ones first: every word is a shorter one
 * and a letter, so that both tokenizers can reach it by merges. */
static void filler_word(char out[12], uint32_t i)
{
    size_t n = 2;
    for (uint64_t count = 26 * 26; i >= count; count *= 26, n++)
        i -= (uint32_t)count;
    out[n] = 0;
    while (n > 0) {
        out[--n] = (char)('a' + i % 26);
        i /= 26;
    }
}

/* How byte-level BPE spells a byte: itself where it is printable Latin-1, else a letter from U+0100
 * on (Radford et al. 2019, section 2.2, and their encoder's table). */
static void byte_symbol(char out[5], int byte)
{
    uint32_t next = 256, cp = 0;
    for (int b = 0; b <= byte; b++) {
        bool printable = (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174;
        cp = printable ? (uint32_t)b : next;
        next += !printable;
    }
    out[utf8_encode(out, cp)] = 0;
}

static void fill_bpe(struct tiny_file *f, struct tiny_vocab *v)
{
    static const char *const control[] = {"<|endoftext|>", "<|im_start|>", "<|im_end|>"};
    char text[16];
    for (int b = 0; b < 256; b++) {
        byte_symbol(text, b);
        vocab_put(f, v, text, TOKEN_NORMAL);
    }
    uint32_t n_filler = f->s->n_vocab - 256 - (uint32_t)ARRAY_LEN(control);
    for (uint32_t i = 0; i < n_filler; i++) {
        char merge[16];
        filler_word(text, i);
        vocab_put(f, v, text, TOKEN_NORMAL);
        int n = snprintf(merge, sizeof merge, "%.*s %s", (int)strlen(text) - 1, text,
                         text + strlen(text) - 1);
        char *copy = arena_strdup(&f->arena, merge, (size_t)n);
        if (copy)
            v->merges[v->n_merges++] = (struct gguf_str){copy, (size_t)n};
    }
    for (size_t i = 0; i < ARRAY_LEN(control); i++)
        vocab_put(f, v, control[i], TOKEN_CONTROL);
}

static void fill_spm(struct tiny_file *f, struct tiny_vocab *v)
{
    char text[16];
    vocab_put(f, v, "<unk>", TOKEN_UNKNOWN);
    vocab_put(f, v, "<s>", TOKEN_CONTROL);
    vocab_put(f, v, "</s>", TOKEN_CONTROL);
    for (int b = 0; b < 256; b++) {
        snprintf(text, sizeof text, "<0x%02X>", (unsigned)b);
        vocab_put(f, v, text, TOKEN_BYTE);
    }
    vocab_put(f, v, "\xe2\x96\x81", TOKEN_NORMAL); /* U+2581 stands for a blank */
    for (char c = 'a'; c <= 'z'; c++) {
        snprintf(text, sizeof text, "%c", c);
        vocab_put(f, v, text, TOKEN_NORMAL);
    }
    for (uint32_t i = 0; v->n < f->s->n_vocab; i++) {
        uint32_t before = v->n;
        filler_word(text, i);
        vocab_put(f, v, text, TOKEN_NORMAL);
        if (v->n == before)
            return; /* out of memory: the caller sees that tokens are missing */
    }
}

static int put_tokenizer(struct tiny_file *f, struct err *e)
{
    static const char chat[] = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n"
                               "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}";
    const struct tiny_spec *s = f->s;
    struct tiny_vocab v = {
        .tokens = arena_alloc(&f->arena, s->n_vocab * sizeof *v.tokens),
        .scores = arena_alloc(&f->arena, s->n_vocab * sizeof *v.scores),
        .types = arena_alloc(&f->arena, s->n_vocab * sizeof *v.types),
        .merges = arena_alloc(&f->arena, s->n_vocab * sizeof *v.merges),
    };
    bool ok = v.tokens && v.scores && v.types && v.merges;
    if (ok)
        (s->bpe ? fill_bpe : fill_spm)(f, &v);
    if (!ok || v.n < s->n_vocab)
        return err_set(e, ERR_MEMORY, "no memory for a test model's vocabulary");
    bool llama = strcmp(s->arch, "llama") == 0;
    put_str(f, "tokenizer.ggml.model", s->bpe ? "gpt2" : "llama");
    put_str(f, "tokenizer.ggml.pre", !s->bpe ? "default" : llama ? "llama-bpe" : "qwen2");
    gguf_writer_strings(f->w, "tokenizer.ggml.tokens", v.n, v.tokens);
    gguf_writer_array(f->w, "tokenizer.ggml.token_type", GGUF_I32, v.n, v.types);
    if (s->bpe)
        gguf_writer_strings(f->w, "tokenizer.ggml.merges", v.n_merges, v.merges);
    else
        gguf_writer_array(f->w, "tokenizer.ggml.scores", GGUF_FLOAT32, v.n, v.scores);
    gguf_writer_u32(f->w, "tokenizer.ggml.bos_token_id", s->bpe ? v.n - 3 : 1);
    gguf_writer_u32(f->w, "tokenizer.ggml.eos_token_id", s->bpe ? v.n - 1 : 2);
    if (!s->bpe)
        gguf_writer_u32(f->w, "tokenizer.ggml.unknown_token_id", 0);
    gguf_writer_bool(f->w, "tokenizer.ggml.add_bos_token", !s->bpe || llama);
    put_str(f, "tokenizer.chat_template", chat);
    return 0;
}

static int check_spec(const struct tiny_spec *s, struct err *e)
{
    const struct gguf_dtype_info *info = gguf_dtype_find(s->dtype);
    if (!s->arch ||
        (strcmp(s->arch, "llama") && strcmp(s->arch, "qwen2") && strcmp(s->arch, "qwen3")))
        return err_set(e, ERR_UNSUPPORTED, "a tiny model is llama, qwen2 or qwen3, not '%s'",
                       s->arch ? s->arch : "");
    if (!s->width || !s->n_layers || !s->n_heads || !s->n_kv_heads || !s->n_ffn || !s->n_ctx ||
        s->n_heads % s->n_kv_heads || head_dim(s) < 2 || head_dim(s) % 2)
        return err_set(e, ERR_USAGE,
                       "a tiny model's sizes must be positive, its heads a multiple of "
                       "the key/value heads, and a head's width even");
    if (s->n_vocab < TINY_MIN_VOCAB)
        return err_set(e, ERR_USAGE, "a tiny vocabulary has at least %d tokens, not %u",
                       TINY_MIN_VOCAB, s->n_vocab);
    if (!info || !info->from_f32)
        return err_set(e, ERR_UNSUPPORTED, "there is no encoder for block type %u", s->dtype);
    if (s->width % info->block_len || s->n_ffn % info->block_len ||
        s->n_heads * head_dim(s) % info->block_len)
        return err_set(e, ERR_USAGE, "%s needs row lengths that are multiples of %u", info->name,
                       info->block_len);
    return 0;
}

int tiny_write(const char *path, const struct tiny_spec *s, struct err *e)
{
    struct tiny_file f = {.s = s};
    int rc = -1;
    if (check_spec(s, e))
        return -1;
    f.cap = 4 + 14 * (size_t)s->n_layers;
    f.tensors = mem_array(f.cap, sizeof *f.tensors);
    f.w = gguf_writer_new(3, 32);
    if (!f.tensors || !f.w) {
        err_set(e, ERR_MEMORY, "no memory for a test model");
        goto out;
    }
    put_keys(&f);
    if (put_tokenizer(&f, e))
        goto out;
    put_tensors(&f);
    rc = gguf_writer_finish(f.w, path, e);
out:
    for (size_t i = 0; i < f.n_tensors; i++)
        mem_free(f.tensors[i].data);
    mem_free(f.tensors);
    gguf_writer_free(f.w);
    arena_fini(&f.arena);
    return rc;
}
