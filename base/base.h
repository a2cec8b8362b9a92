/* base: what every folder needs. Errors, checked sizes, memory, arenas, byte buffers, a bounded
 * reader for untrusted bytes, file access behind one seam, hashing, time, logging.
 * It knows nothing of models. Nothing here prints (but the log, when the command asked for it)
 * or exits (but CHECK, on a bug of ours). */
#ifndef INGOT_BASE_H
#define INGOT_BASE_H

#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define INGOT_VERSION "0.1.0"

#define ARRAY_LEN(a)      (sizeof(a) / sizeof((a)[0]))
#define MIN(a, b)         ((a) < (b) ? (a) : (b))
#define MAX(a, b)         ((a) > (b) ? (a) : (b))
#define PRINTF_LIKE(f, a) __attribute__((format(printf, f, a)))

/* ---- errors: 0 is success everywhere; struct err is filled once, where most is known ---- */

enum err_code {
    ERR_NONE = 0,
    ERR_USAGE,       /* the caller's words are wrong */
    ERR_NOT_FOUND,   /* no such file, model, key */
    ERR_EXISTS,      /* already there */
    ERR_CORRUPT,     /* bytes that break their format, or fail their checksum */
    ERR_UNSUPPORTED, /* well formed, but ingot cannot do it */
    ERR_MEMORY,      /* allocation failed, or would not fit */
    ERR_IO,          /* the operating system said no */
    ERR_FULL,        /* disk or queue full */
    ERR_LIMIT,       /* over a stated bound (context length, ...) */
    ERR_CANCELLED,
    ERR_BUSY,
    ERR_DEVICE, /* a backend failed */
};

struct err {
    enum err_code code;
    char msg[500]; /* one line: what, where, what to do. No control bytes, valid text */
};

/* Fill e (which may be NULL) and return -1, so that `return err_set(...)` reads well. Control
 * bytes in the result become '?'. An error already set is kept: the first one knows most. */
int err_set(struct err *e, enum err_code code, const char *fmt, ...) PRINTF_LIKE(3, 4);
/* Put "prefix: " in front of the message; returns -1. */
int err_prefix(struct err *e, const char *fmt, ...) PRINTF_LIKE(2, 3);
/* As err_set with ": " and the text of errno appended; ENOSPC gives ERR_FULL, ENOENT gives
 * ERR_NOT_FOUND, anything else ERR_IO. */
int err_errno(struct err *e, const char *fmt, ...) PRINTF_LIKE(2, 3);

/* A bug in ingot, never bad input. Always compiled in. */
#define CHECK(cond) ((cond) ? (void)0 : check_failed(#cond, __FILE__, __LINE__))
void check_failed(const char *cond, const char *file, int line) __attribute__((noreturn));

/* ---- sizes: true when the result overflowed (*r is then unspecified) ---- */
#define mul_over(a, b, r) __builtin_mul_overflow(a, b, r)
#define add_over(a, b, r) __builtin_add_overflow(a, b, r)

/* ---- memory: one seam for every allocation, so that tests can make the n-th one fail ---- */
void *mem_alloc(size_t n_bytes);              /* uninitialised; NULL when out of memory */
void *mem_zalloc(size_t n_bytes);             /* zeroed */
void *mem_array(size_t n, size_t item_bytes); /* zeroed, NULL on overflow too */
void *mem_realloc(void *p, size_t n_bytes);   /* p stays valid on failure */
void mem_free(void *p);                       /* NULL is fine */
char *mem_strdup(const char *s);              /* NULL when out of memory */
void *mem_pages(size_t n_bytes);              /* page-aligned, zero, huge pages where offered */
void mem_pages_free(void *p, size_t n_bytes); /* for mem_pages only */
uint64_t mem_alloc_count(void);               /* allocations so far, all threads */
uint64_t mem_live_bytes(void);                /* taken and not given back, all threads */
uint64_t mem_resident_bytes(void);            /* of the process, as the system counts; 0: unknown */
void mem_trim(void);                          /* give the system what the allocator keeps unused */
void mem_fail_at(uint64_t n);                 /* tests: the n-th from now fails; 0 = none */

/* Bump allocator: everything of one lifetime, freed together. */
struct arena {
    struct arena_block *head;
    size_t used_bytes; /* handed out in all */
};
void *arena_alloc(struct arena *a, size_t n_bytes); /* zeroed, 16-aligned; NULL on failure */
char *arena_strdup(struct arena *a, const char *s, size_t n); /* NUL added */
void arena_fini(struct arena *a);                             /* a zeroed arena is a valid one */

/* ---- growing byte buffer; sticky failure: test `failed` once at the end ---- */
struct buf {
    char *data; /* NUL-terminated when n > 0 or after buf_str; owned */
    size_t n, cap;
    bool failed;
};
void buf_put(struct buf *b, const void *p, size_t n);
void buf_puts(struct buf *b, const char *s);
void buf_putc(struct buf *b, char c);
void buf_printf(struct buf *b, const char *fmt, ...) PRINTF_LIKE(2, 3);
const char *buf_str(struct buf *b); /* "" when empty or failed; owned by b */
void buf_clear(struct buf *b);      /* keep the memory */
void buf_fini(struct buf *b);

/* ---- bounded little-endian reader of untrusted bytes; sticky: read on, test `bad` once ---- */
struct cursor {
    const uint8_t *p;
    size_t n, at;
    bool bad; /* a read went past the end; every later read gives zero */
};
uint8_t cursor_u8(struct cursor *c);
uint16_t cursor_u16(struct cursor *c);
uint32_t cursor_u32(struct cursor *c);
uint64_t cursor_u64(struct cursor *c);
const void *cursor_bytes(struct cursor *c, uint64_t n); /* NULL (and bad) if not there */
static inline size_t cursor_left(const struct cursor *c)
{
    return c->bad ? 0 : c->n - c->at;
}

/* ---- UTF-8 ---- */
/* Decode one character at p (n > 0 bytes there): returns its length 1..4 and sets *cp, or returns
 * -(length of the maximal bad part, 1..3) as WHATWG replacement counts it. */
int utf8_decode(uint32_t *cp, const char *p, size_t n);
/* 1..4; surrogates and above 10FFFF give U+FFFD. (libjansson.a exports this name as well.) */
int utf8_encode(char out[4], uint32_t cp) __asm__("ingot_utf8_encode");
bool utf8_valid(const char *p, size_t n);
/* How many bytes at the end of p are the unfinished but so far valid start of one character. */
size_t utf8_tail(const char *p, size_t n);
int utf8_width(uint32_t cp); /* terminal columns: 0, 1 or 2 */

/* ---- files: everything goes through this seam, so that tests can inject faults ---- */
struct mapped {
    const uint8_t *data; /* read-only */
    size_t n;
    int64_t mtime_ns; /* when the file was changed last, at the time of mapping */
};
int file_map(struct mapped *m, const char *path, struct err *e); /* directories refused by name */
void file_unmap(struct mapped *m);
/* The mapping stays, but its pages no longer count as this process's: they are read again when they
 * are looked at. */
void file_forget(const struct mapped *m);
int file_read_all(struct buf *out, const char *path, size_t max_bytes, struct err *e);
int file_write_all(const char *path, const void *p, size_t n, struct err *e); /* atomic: rename */
/* Before a rename onto path: it must be absent or a regular file (never a device or a pipe). */
int file_check_target(const char *path, struct err *e);
int file_pread(int fd, void *dst, size_t n, uint64_t off, const char *name, struct err *e);
int file_pwrite(int fd, const void *src, size_t n, uint64_t off, const char *name, struct err *e);
void file_fail_at(uint64_t n, int error); /* tests: the n-th read or write from now fails so */

/* ---- hashing ---- */
struct sha256 {
    uint64_t state[32]; /* opaque */
};
void sha256_init(struct sha256 *s);
void sha256_add(struct sha256 *s, const void *p, size_t n);
void sha256_done(struct sha256 *s, uint8_t out[32]);
void hex_encode(char *out, const uint8_t *p, size_t n);              /* 2n + 1 bytes, lower case */
int hex_decode(uint8_t *out, size_t max, const char *hex, size_t n); /* bytes, or -1 */
struct hash128 {
    uint64_t lo, hi;
};
struct hash128 hash_xxh3(const void *p, size_t n, uint64_t seed); /* XXH3-128, canonical halves */

/* ---- time and logging ---- */
uint64_t now_ns(void); /* monotonic */
enum log_level { LOG_ERROR, LOG_WARN, LOG_INFO, LOG_DEBUG };
extern enum log_level log_threshold; /* default LOG_WARN; set by the command line */
/* One line to standard error with a level; used for what an operator wants to know later. */
void log_line(enum log_level level, const char *fmt, ...) PRINTF_LIKE(2, 3);

#endif
