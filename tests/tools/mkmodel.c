/* Writes a llama-shaped model with random weights for speed measurements: the shape of a 1.2B model
 * unless told otherwise. The weights are random codes with scales that keep activations finite; the
 * model says nothing. The same file loads in other runtimes, so that they can be timed beside ours.
 *
 *   mkmodel OUT.gguf TYPE [--width N --layers N --heads N --kv-heads N --ffn N --vocab N]
 *
 * TYPE: Q4_K_M (Q4_K, with Q6_K where that recipe puts it), or one block type for all matrices. */
#include "gguf/blocks.h"
#include "gguf/gguf.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct shape {
    uint32_t width, layers, heads, kv_heads, ffn, vocab;
};

struct fill { /* one tensor: what to write, from which seed */
    uint32_t type;
    uint64_t seed;
    float deviation; /* of the weights; 0: all ones (norms) */
};

static uint64_t mix(uint64_t z)
{
    z += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* Scales for a block of random codes: codes of mean c and deviation s become weights of mean 0 and
 * the deviation wanted. */
static void set_scales(uint8_t *block, uint32_t type, float deviation)
{
    if (type == GGUF_Q8_0) {
        ((struct block_q8_0 *)(void *)block)->d = f32_to_f16(deviation / 74);
    } else if (type == GGUF_Q4_0) {
        ((struct block_q4_0 *)(void *)block)->d = f32_to_f16(deviation / 4.6f);
    } else if (type == GGUF_Q4_1) {
        ((struct block_q4_1 *)(void *)block)->d = f32_to_f16(deviation / 4.6f);
        ((struct block_q4_1 *)(void *)block)->m = f32_to_f16(-7.5f * deviation / 4.6f);
    } else if (type == GGUF_Q4_K) {
        struct block_q4_k *b = (void *)block;
        memset(b->scales, 0x20, sizeof b->scales);
        b->d = f32_to_f16(deviation / 4.6f / 32);
        b->dmin = f32_to_f16(7.5f * deviation / 4.6f / 32);
    } else if (type == GGUF_Q6_K) {
        struct block_q6_k *b = (void *)block;
        memset(b->scales, 32, sizeof b->scales);
        b->d = f32_to_f16(deviation / 18.5f / 32);
    }
}

static int fill_tensor(void *user, void *dst, uint64_t offset, size_t n, struct err *e)
{
    const struct fill *f = user;
    const struct gguf_dtype_info *t = gguf_dtype_find(f->type);
    for (size_t at = 0; at < n;) {
        uint8_t block[512];
        uint64_t no = (offset + at) / t->block_bytes, in = (offset + at) % t->block_bytes;
        for (size_t i = 0; i < sizeof block; i += 8) {
            uint64_t r = mix(f->seed ^ no * 64 ^ i / 8);
            memcpy(block + i, &r, 8);
        }
        if (f->type == GGUF_F32) {
            float v = f->deviation > 0 ? f->deviation * ((float)(block[0] | block[1] << 8) / 32768 - 1) * 1.7f : 1;
            memcpy(block, &v, 4);
        }
        set_scales(block, f->type, f->deviation);
        size_t take = MIN(n - at, (size_t)(t->block_bytes - in));
        memcpy((uint8_t *)dst + at, block + in, take);
        at += take;
    }
    return 0;
}

static void add(struct gguf_writer *w, const char *name, uint32_t type, uint64_t n_in, uint64_t n_out)
{
    static uint64_t seed = 1;
    struct fill *f = calloc(1, sizeof *f); /* lives until the program ends */
    *f = (struct fill){type, mix(seed++), n_out ? 1 / sqrtf((float)n_in) : 0};
    uint64_t ne[2] = {n_in, n_out};
    gguf_writer_tensor(w, name, type, n_out ? 2 : 1, ne, fill_tensor, f);
}

/* Which layers the Q4_K_M recipe gives more bits: the first and last eighth, and each third between. */
static bool more_bits(uint32_t i, uint32_t n)
{
    return i < n / 8 || i >= 7 * n / 8 || (i - n / 8) % 3 == 2;
}

static void add_layer(struct gguf_writer *w, const struct shape *s, uint32_t i, int type)
{
    uint32_t low = type < 0 ? GGUF_Q4_K : (uint32_t)type;
    uint32_t high = type < 0 && more_bits(i, s->layers) ? GGUF_Q6_K : low;
    uint64_t kv = (uint64_t)s->width / s->heads * s->kv_heads;
    const struct {
        const char *name;
        uint32_t type;
        uint64_t n_in, n_out;
    } rows[] = {
        {"attn_norm", GGUF_F32, s->width, 0},      {"attn_q", low, s->width, s->width},
        {"attn_k", low, s->width, kv},             {"attn_v", high, s->width, kv},
        {"attn_output", low, s->width, s->width},  {"ffn_norm", GGUF_F32, s->width, 0},
        {"ffn_gate", low, s->width, s->ffn},       {"ffn_up", low, s->width, s->ffn},
        {"ffn_down", high, s->ffn, s->width},
    };
    for (size_t j = 0; j < ARRAY_LEN(rows); j++) {
        char name[64];
        snprintf(name, sizeof name, "blk.%u.%s.weight", i, rows[j].name);
        add(w, name, rows[j].type, rows[j].n_in, rows[j].n_out);
    }
}

/* A vocabulary that loads everywhere: the 256 byte symbols of byte-level BPE, then numbered pieces. */
static void add_vocabulary(struct gguf_writer *w, uint32_t n)
{
    struct gguf_str *tokens = calloc(n, sizeof *tokens);
    int32_t *kinds = calloc(n, sizeof *kinds);
    char *text = calloc(n, 16);
    uint32_t extra = 0;
    for (uint32_t i = 0; i < n; i++) {
        char *p = text + 16 * i;
        bool plain = (i >= 33 && i <= 126) || (i >= 161 && i <= 172) || (i >= 174 && i <= 255);
        int len = i < 256 ? utf8_encode(p, plain ? i : 256 + extra++) : snprintf(p, 16, "t%u", i);
        tokens[i] = (struct gguf_str){p, (size_t)len};
        kinds[i] = i == n - 1 ? 3 : 1;
    }
    struct gguf_str merge = {"t 2", 3};
    gguf_writer_str(w, "tokenizer.ggml.model", "gpt2", 4);
    gguf_writer_str(w, "tokenizer.ggml.pre", "llama-bpe", 9);
    gguf_writer_strings(w, "tokenizer.ggml.tokens", n, tokens);
    gguf_writer_array(w, "tokenizer.ggml.token_type", GGUF_I32, n, kinds);
    gguf_writer_strings(w, "tokenizer.ggml.merges", 1, &merge);
    gguf_writer_u32(w, "tokenizer.ggml.bos_token_id", n - 1);
    gguf_writer_u32(w, "tokenizer.ggml.eos_token_id", n - 1);
    gguf_writer_bool(w, "tokenizer.ggml.add_bos_token", false);
}

static int write_model(const char *path, const struct shape *s, int type, struct err *e)
{
    struct gguf_writer *w = gguf_writer_new(3, 32);
    gguf_writer_str(w, "general.architecture", "llama", 5);
    gguf_writer_str(w, "general.name", "random bench model", 18);
    gguf_writer_u32(w, "llama.block_count", s->layers);
    gguf_writer_u32(w, "llama.context_length", 8192);
    gguf_writer_u32(w, "llama.embedding_length", s->width);
    gguf_writer_u32(w, "llama.feed_forward_length", s->ffn);
    gguf_writer_u32(w, "llama.attention.head_count", s->heads);
    gguf_writer_u32(w, "llama.attention.head_count_kv", s->kv_heads);
    gguf_writer_f32(w, "llama.attention.layer_norm_rms_epsilon", 1e-5f);
    gguf_writer_f32(w, "llama.rope.freq_base", 500000);
    gguf_writer_u32(w, "llama.vocab_size", s->vocab);
    add_vocabulary(w, s->vocab);
    add(w, "token_embd.weight", type < 0 ? GGUF_Q6_K : (uint32_t)type, s->width, s->vocab);
    for (uint32_t i = 0; i < s->layers; i++)
        add_layer(w, s, i, type);
    add(w, "output_norm.weight", GGUF_F32, s->width, 0);
    int rc = gguf_writer_finish(w, path, e);
    gguf_writer_free(w);
    return rc;
}

int main(int argc, char **argv)
{
    struct shape s = {2048, 16, 32, 8, 8192, 128256};
    const struct {
        const char *name;
        uint32_t *v;
    } options[] = {{"--width", &s.width},       {"--layers", &s.layers}, {"--heads", &s.heads},
                   {"--kv-heads", &s.kv_heads}, {"--ffn", &s.ffn},       {"--vocab", &s.vocab}};
    int type = argc > 2 && strcmp(argv[2], "Q4_K_M") ? gguf_dtype_by_name(argv[2]) : -1;
    if (argc < 3 || (strcmp(argv[2], "Q4_K_M") && type < 0)) {
        fprintf(stderr, "usage: mkmodel OUT.gguf Q4_K_M|Q8_0|Q4_0|Q4_1|Q6_K|F32 [--width N ...]\n");
        return 2;
    }
    for (int i = 3; i + 1 < argc; i += 2)
        for (size_t j = 0; j < ARRAY_LEN(options); j++)
            if (!strcmp(argv[i], options[j].name))
                *options[j].v = (uint32_t)strtoul(argv[i + 1], NULL, 10);
    struct err e = {0};
    if (write_model(argv[1], &s, type, &e)) {
        fprintf(stderr, "mkmodel: %s\n", e.msg);
        return 1;
    }
    return 0;
}
