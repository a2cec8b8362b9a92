/* What the tokenizer's files share: the vocabulary, its look-ups, the split rules and one call's
 * working state. Nothing here is for other folders; text.h is the contract.
 * A tokenizer owns everything it points to (its arena, its maps, its compiled split rules) and is
 * never changed after tokenizer_new, but for `whole`, a memo whose every write stores the same
 * value whichever thread gets there first. */
#ifndef INGOT_TEXT_INTERNAL_H
#define INGOT_TEXT_INTERNAL_H

#include <stdatomic.h>

#include "text/text.h"

/* Numbers of `tokenizer.ggml.token_type`. */
enum token_type {
    TOKEN_UNDEFINED,
    TOKEN_NORMAL,
    TOKEN_UNKNOWN,
    TOKEN_CONTROL,
    TOKEN_USER, /* found in any text, whatever the flags */
    TOKEN_UNUSED,
    TOKEN_BYTE, /* "<0xHH>" in SentencePiece vocabularies */
    TOKEN_TYPE_END,
};

struct piece {
    const char *p; /* bytes in the tokenizer's arena, not NUL-terminated */
    uint32_t n;
};

/* Bytes of a piece -> id. Open addressing; grows by doubling; the seed differs from process to
 * process, so that a file cannot be made to collide. */
struct piece_map {
    struct piece_slot {
        uint32_t hash;
        uint32_t id1; /* id + 1; 0 = free */
    } * slots;
    uint32_t mask, n_used;
};

/* (left id, right id) -> rank and merged id, for byte-level BPE. Sized once. */
struct pair_map {
    struct pair_slot {
        int32_t left1, right; /* left id + 1; 0 = free */
        uint32_t rank;
        int32_t to;
    } * slots;
    uint64_t mask;
};

/* A token that is looked for in the text itself, by its spelling. */
struct special {
    struct piece text;
    int32_t id;
    bool control;        /* only with TOKENIZE_PARSE_SPECIAL */
    bool lstrip, rstrip; /* swallows white space before, after */
};

struct special_set {
    struct special *items; /* [n], sorted by spelling */
    uint32_t n;
    uint32_t first[257]; /* items that start with byte b: first[b] .. first[b + 1] */
    bool starts[2][256]; /* [parse_special][b]: some item that counts starts with b */
};

enum tokenizer_kind { TOKENIZER_BPE, TOKENIZER_SPM };

struct tokenizer {
    enum tokenizer_kind kind;
    struct arena arena;
    uint64_t seed;
    uint32_t n_vocab;
    uint32_t n_pieces;    /* n_vocab, and BPE intermediates that are no tokens */
    uint32_t cap_pieces;  /* of pieces */
    struct piece *pieces; /* [n_pieces], what the look-up goes by; mem_* memory */
    struct piece *texts;  /* [n_vocab], what each token stands for in text; BPE: NULL, = pieces */
    uint8_t *types;       /* [n_vocab] enum token_type */
    bool *eog;            /* [n_vocab] */
    struct piece_map words;
    struct special_set specials;
    int32_t bos, eos, unk; /* or -1 */
    bool add_bos, add_eos;
    uint32_t longest;       /* bytes of the longest piece in words */
    int32_t byte_id[256];   /* BPE: always >= 0, maybe >= n_vocab; SPM: or -1 */
    _Atomic uint8_t *whole; /* [n_vocab] does merging the piece's bytes give it: enum whole_memo */
    const int32_t *suppress;
    size_t n_suppress;
    /* byte-level BPE */
    struct pair_map pairs;
    struct pre *pre;
    bool whole_first; /* a word that is a token is that token, whatever the merges say */
    bool nfc;
    /* SentencePiece */
    uint32_t *ranks; /* [n_vocab], the score as an order: lower merges first */
    bool space_prefix, has_unused;
    bool word_bounded; /* no piece spans the start of a word: words can be merged one by one */
};

enum whole_memo { WHOLE_UNKNOWN, WHOLE_YES, WHOLE_NO };

/* ---- merging (tokenizer_merge.c) ---- */

enum { RANK_NONE = -1, MERGE_SMALL = 48 };

struct symbol {
    uint32_t off;  /* of its first byte in the word */
    int32_t id;    /* SPM: -1 when the text is no piece */
    uint32_t rank; /* of merging it with its right neighbour; (uint32_t)RANK_NONE: cannot */
    int32_t to;    /* what that gives */
};

struct merge_work {
    struct symbol small[MERGE_SMALL + 1];
    struct symbol *syms; /* small, or `large` */
    uint32_t n;          /* symbols */
    struct symbol *large;
    uint32_t *prev, *next; /* links between alive symbols, with large */
    uint32_t cap_large;
    uint64_t *heap; /* rank << 32 | index */
    size_t n_heap, cap_heap;
    struct span {
        uint32_t off, n;
    } * spans; /* SPM: parts still to be emitted */
    uint32_t cap_spans;
    uint32_t *left_bytes; /* [n_vocab] SPM: how an unused piece came about, 0 = not yet */
};

/* One call of tokenizer_encode. */
struct encode {
    const struct tokenizer *t;
    struct ids *out;
    struct err *e;
    struct buf text;     /* a segment, normalized or escaped */
    struct pre_run *run; /* BPE */
    struct merge_work work;
};

/* Room for n symbols in work.syms; sets work.n. */
int merge_begin(struct encode *c, uint32_t n);
/* Merge work.syms over the n_bytes at p until nothing merges; leaves the result in work.syms. */
int merge_run(struct encode *c, const char *p, uint32_t n_bytes);
void merge_fini(struct merge_work *w);

/* ---- vocabulary (tokenizer_vocab.c) ---- */

int piece_map_init(struct piece_map *m, uint32_t n_expected);
uint64_t piece_map_slots(uint64_t n_expected);
uint64_t pair_map_slots(uint64_t n_expected);
int32_t piece_find(const struct tokenizer *t, const char *p, size_t n); /* or -1 */
/* Enter pieces[id] unless its bytes are there already (the first one wins) or empty. */
int piece_put(struct tokenizer *t, int32_t id);
/* A new piece that is no token: its id is >= n_vocab. -1 when out of memory. */
int32_t piece_add(struct tokenizer *t, const char *p, size_t n);
/* Ask for the memory that looking p up will touch, in three steps with other work in between. */
struct piece_warm {
    uint32_t slot, id1;
};
struct piece_warm piece_warm_slot(const struct tokenizer *t, const char *p, size_t n);
void piece_warm_entry(const struct tokenizer *t, struct piece_warm *w);
void piece_warm_bytes(const struct tokenizer *t, const struct piece_warm *w);
void pair_warm(const struct tokenizer *t, int32_t left, int32_t right);
int pair_map_init(struct tokenizer *t, uint64_t n_expected);
void pair_put(struct tokenizer *t, const struct pair_slot *pair);
const struct pair_slot *pair_find(const struct tokenizer *t, int32_t left, int32_t right);

/* ---- special tokens (tokenizer_special.c) ---- */

/* Special ids, BOS/EOS flags (the defaults are in *t already), the ends of generation, the set. */
int specials_load(struct tokenizer *t, const struct gguf *g, struct err *e);
/* The leftmost, then longest special token at or after p + at, or NULL; *pos is where. */
const struct special *special_next(size_t *pos, const struct tokenizer *t, const char *p, size_t n,
                                   bool parse_special);

/* The special token spelled so, or -1. */
int32_t special_find(const struct tokenizer *t, const char *p, size_t n);

/* ---- algorithms ---- */

int bpe_load(struct tokenizer *t, const struct gguf *g, struct err *e);
int bpe_segment(struct encode *c, const char *p, size_t n);
int spm_load(struct tokenizer *t, const struct gguf *g, struct err *e);
int spm_segment(struct encode *c, const char *p, size_t n);
/* The token whose text is these bytes, or -1. */
int32_t spm_find(const struct tokenizer *t, const char *p, size_t n);
/* Emit the tokens of single bytes, or once the unknown token when one of them has none. */
int emit_bytes(struct encode *c, const char *p, size_t n);

/* NFC of n bytes of valid UTF-8 into out (replaced). Linear time. */
int nfc_normalize(struct buf *out, const char *p, size_t n, struct err *e);
bool nfc_is_trivial(const char *p, size_t n); /* certainly NFC already */

/* ---- split rules (pre.c) ---- */

enum { PRE_MAX_STEPS = 6 };
enum {
    PRE_NFC = 1,         /* text is normalized first */
    PRE_WHOLE_FIRST = 2, /* sets tokenizer.whole_first */
    PRE_ADD_BOS = 4,     /* default of add_bos_token */
};

struct pre_rule {
    const char *name;         /* `tokenizer.ggml.pre` */
    const char *const *steps; /* patterns, applied one inside the other; NULL ends */
    unsigned flags;
};

typedef int (*pre_word)(void *user, const char *p, size_t n);

struct pre_run;
const struct pre_rule *pre_find(const char *name, size_t n); /* NULL: unknown */
int pre_new(struct pre **out, const struct pre_rule *rule, struct err *e);
void pre_free(struct pre *pre);
uint64_t pre_bytes(const struct pre *pre);
int pre_run_new(struct pre_run **out, const struct pre *pre, pre_word word, void *user,
                struct err *e);
void pre_run_free(struct pre_run *r);
/* Cut n bytes of valid UTF-8 into words and hand each over in order; no byte is left out. */
int pre_run_split(struct pre_run *r, const char *p, size_t n);

bool unicode_is_space(uint32_t cp); /* Unicode White_Space */

#endif
