/* Tiny seeded random models for tests and tools: whole GGUF files (architecture keys, weights, a
 * small but valid tokenizer, a chat template), the same bytes for the same spec on every machine.
 */
#ifndef INGOT_TINY_H
#define INGOT_TINY_H

#include "gguf/gguf.h"

struct tiny_spec {
    const char *arch; /* "llama", "qwen2" or "qwen3" */
    uint64_t seed;    /* of the weights */
    uint32_t width;   /* of a hidden state; as n_ffn a multiple of dtype's block length */
    uint32_t n_layers;
    uint32_t n_heads, n_kv_heads;
    uint32_t head_dim; /* 0: width / n_heads */
    uint32_t n_ffn;
    uint32_t n_vocab; /* at least TINY_MIN_VOCAB */
    uint32_t n_ctx;
    uint32_t window; /* of attention, in every layer; 0: none */
    float rope_base;
    bool rope_factors; /* a rope_freqs.weight tensor: divisors of the frequencies, 1 to 8 */
    bool tied;         /* no output.weight: the embedding serves */
    bool biases;       /* of q, k and v */
    bool qk_norm;      /* RMS norm of each head of q and k */
    bool bpe;          /* byte-level BPE tokenizer; else SentencePiece with byte tokens */
    uint32_t dtype;    /* enum gguf_dtype of every matrix; vectors are F32 */
};
enum { TINY_MIN_VOCAB = 288 };

/* What the architecture usually has: width 64, 2 layers, 4 heads of which 2 key/value, ffn 128,
 * vocabulary 384, context 256, F32; biases for qwen2, qk_norm for qwen3, BPE and tied for both. */
void tiny_defaults(struct tiny_spec *s, const char *arch);
/* Write the file. A dtype whose encoder is missing, or a length that is no multiple of its block,
 * is an error. Holds one tensor at a time in memory. */
int tiny_write(const char *path, const struct tiny_spec *s, struct err *e);

#endif
