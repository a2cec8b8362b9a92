/* The oracle: a plain forward pass in double precision, straight from a GGUF, sharing no code with
 * the engine or a backend (only the block decoders of gguf). Slow and obvious. Knows the
 * architectures llama, qwen2 and qwen3 without experts, and refuses what it does not know by name.
 */
#ifndef INGOT_ORACLE_H
#define INGOT_ORACLE_H

#include "gguf/gguf.h"

struct oracle_layer {  /* weights row-major [outputs][inputs]; NULL where the model has none */
    double *attn_norm; /* [width] */
    double *q, *k, *v; /* [n_heads * head_dim][width], [n_kv_heads * head_dim][width] */
    double *q_bias, *k_bias, *v_bias;
    double *q_norm, *k_norm;      /* [head_dim] */
    double *output, *output_bias; /* [width][n_heads * head_dim], [width] */
    double *ffn_norm;             /* [width] */
    double *gate, *up;            /* [n_ffn][width] */
    double *down;                 /* [width][n_ffn] */
};

struct oracle {
    uint32_t n_layers, width, n_heads, n_kv_heads, head_dim, n_ffn, n_vocab;
    uint32_t n_rot;   /* leading numbers of a head that are rotated */
    uint32_t window;  /* a position sees so many, itself the last; 0: all */
    bool rope_halves; /* pairs (i, i + n_rot / 2); else (2i, 2i + 1) */
    double rope_base, epsilon;
    double *rope_factors; /* [n_rot / 2] divisors of the frequencies, or NULL */
    double *embedding;    /* [n_vocab][width] */
    double *output_norm;  /* [width] */
    double *output;       /* [n_vocab][width]; the embedding when tied */
    struct oracle_layer *layers;
    struct arena arena;
};
int oracle_init(struct oracle *o, const struct gguf *g, struct err *e); /* g: by gguf_open */
void oracle_fini(struct oracle *o);

/* Called with every intermediate result, `rows` positions of `width` numbers. In each layer, in
 * order: attn_norm, q, k, v (projections with bias), q_rope, k_rope (after their norm, if any, and
 * the rotation), attention (the heads side by side), attn_output, attn_residual, ffn_norm,
 * ffn_gate, ffn_up, ffn_act (silu(gate) * up), ffn_output, layer_output. Outside: embedding,
 * output_norm, logits, with layer -1. */
typedef void (*oracle_see)(void *user, const char *name, int layer, const double *v, size_t rows,
                           size_t width);
/* Logits [n][n_vocab] of ids at positions 0 .. n-1 under a causal mask. `see` may be NULL. */
int oracle_run(double *logits, const struct oracle *o, const int32_t *ids, size_t n, oracle_see see,
               void *user);
/* The same from a file: open, read, run, close. *logits is the caller's, by mem_free. */
int oracle_file(double **logits, uint32_t *n_vocab, const char *path, const int32_t *ids, size_t n,
                struct err *e);

#endif
