/* text: bytes <-> tokens <-> messages. Tokenizers (from the keys of a GGUF), a streaming decoder,
 * the Jinja chat template engine. Knows nothing of engines, stores or devices. All objects are
 * immutable after creation and may be used by many threads at once, but for struct decoder. */
#ifndef INGOT_TEXT_H
#define INGOT_TEXT_H

#include "base/base.h"
#include "gguf/gguf.h"

struct json_t; /* jansson */

/* ---- token ids ---- */

struct ids { /* growing array; sticky failure like struct buf */
    int32_t *v;
    size_t n, cap;
    bool failed;
};
void ids_put(struct ids *s, int32_t id);
void ids_fini(struct ids *s);

/* ---- tokenizers ---- */

struct tokenizer;

/* Build from `tokenizer.ggml.*`. Algorithms: "gpt2" (byte-level BPE; split pattern chosen by
 * `tokenizer.ggml.pre`) and "llama" (SentencePiece BPE with byte fallback). An unknown model or pre
 * is an error that names it. The gguf may be freed afterwards. */
int tokenizer_new(struct tokenizer **out, const struct gguf *g, struct err *e);
void tokenizer_free(struct tokenizer *t); /* NULL is fine */
uint64_t tokenizer_bytes(const struct tokenizer *t); /* of memory that it takes */
/* What tokenizer_new would take of this file, from the lengths of its lists alone; 0 if it has none. */
uint64_t tokenizer_bytes_of(const struct gguf *g);

enum {
    TOKENIZE_ADD_SPECIAL = 1,   /* BOS / EOS as the model's flags say */
    TOKENIZE_PARSE_SPECIAL = 2, /* text that spells a control token gives that token */
};
/* Append the ids of n bytes at p. Linear time in n for any input. Invalid UTF-8 is handled, never
 * refused: each maximal bad part counts as U+FFFD for BPE, as its bytes for SentencePiece. */
int tokenizer_encode(struct ids *out, const struct tokenizer *t, const char *p, size_t n,
                     unsigned flags, struct err *e);

uint32_t tokenizer_n_vocab(const struct tokenizer *t);
/* The bytes that the token stands for in text; "" with *n = 0 for ids outside the vocabulary.
 * Control tokens give their spelling. Lives as long as t. */
const char *tokenizer_piece(const struct tokenizer *t, int32_t id, size_t *n);
bool tokenizer_is_control(const struct tokenizer *t, int32_t id);
bool tokenizer_is_eog(const struct tokenizer *t, int32_t id); /* any end of generation: EOS, EOT, .. */
int32_t tokenizer_bos(const struct tokenizer *t);             /* or -1 */
int32_t tokenizer_eos(const struct tokenizer *t);             /* or -1 */
/* Ids that the model's makers want never sampled (`tokenizer.ggml.suppress_tokens`); *n may be 0. */
const int32_t *tokenizer_suppressed(const struct tokenizer *t, size_t *n);
int32_t tokenizer_find(const struct tokenizer *t, const char *piece, size_t n); /* id or -1 */

/* All ids to bytes, exactly the pieces' bytes one after the other. */
void tokenizer_decode(struct buf *out, const struct tokenizer *t, const int32_t *ids, size_t n);

/* Streaming: emits only whole characters. Bad bytes inside come out as U+FFFD; an unfinished
 * character is held until it is complete or decoder_end is called. */
struct decoder {
    char held[4];
    uint8_t n_held;
    bool skip_control; /* leave control tokens out of the text */
};
void decoder_put(struct decoder *d, struct buf *out, const struct tokenizer *t, int32_t id);
void decoder_end(struct decoder *d, struct buf *out);

/* ---- chat templates ---- */

struct template;

/* Parse Jinja source (trim_blocks and lstrip_blocks on, as the model makers' tools render it).
 * Errors name the line. */
int template_new(struct template **out, const char *src, size_t n, struct err *e);
void template_free(struct template *t); /* NULL is fine */
uint64_t template_bytes(const struct template *t); /* of memory that it takes */

struct template_args {
    const struct json_t *messages; /* array of {"role", "content", ...} */
    const struct json_t *tools;    /* array, or NULL for none */
    const struct json_t *extra;    /* object of further variables, or NULL */
    bool add_generation_prompt;
    const char *bos_token, *eos_token; /* NULL gives "" */
    int64_t now;                       /* seconds since 1970, UTC, for strftime_now; 0 = the clock */
    uint64_t max_steps;                /* evaluation budget; 0 = 10 million */
    size_t max_bytes;                  /* of output and of values alive; 0 = 64 MiB */
};
/* Render. `raise_exception` in the template gives ERR_USAGE with its words; an engine error gives
 * ERR_CORRUPT with the line; over a budget gives ERR_LIMIT. The template itself is not changed. */
int template_render(struct buf *out, const struct template *t, const struct template_args *a,
                    struct err *e);

#endif
