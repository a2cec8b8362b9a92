/* Allocation behind one seam (so that tests can fail the n-th call, and the bytes that are taken can
 * be compared with those that were announced), arenas and byte buffers. */
#include "base/base.h"

#include <malloc.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static atomic_uint_fast64_t n_allocs, n_live;
static atomic_uint_fast64_t fail_countdown;

static bool must_fail(void)
{
    atomic_fetch_add_explicit(&n_allocs, 1, memory_order_relaxed);
    if (!atomic_load_explicit(&fail_countdown, memory_order_relaxed))
        return false;
    return atomic_fetch_sub(&fail_countdown, 1) == 1;
}

void mem_fail_at(uint64_t n)
{
    atomic_store(&fail_countdown, n);
}

uint64_t mem_alloc_count(void)
{
    return atomic_load_explicit(&n_allocs, memory_order_relaxed);
}

/* What the allocator set aside for p, which is what the process has of it. */
static void *count_in(void *p)
{
    if (p)
        atomic_fetch_add_explicit(&n_live, malloc_usable_size(p), memory_order_relaxed);
    return p;
}

static void count_out(size_t n_bytes)
{
    atomic_fetch_sub_explicit(&n_live, n_bytes, memory_order_relaxed);
}

uint64_t mem_live_bytes(void)
{
    return atomic_load_explicit(&n_live, memory_order_relaxed);
}

void *mem_alloc(size_t n_bytes)
{
    return must_fail() ? NULL : count_in(malloc(n_bytes ? n_bytes : 1));
}

void *mem_zalloc(size_t n_bytes)
{
    return must_fail() ? NULL : count_in(calloc(1, n_bytes ? n_bytes : 1));
}

void *mem_array(size_t n, size_t item_bytes)
{
    size_t bytes;
    if (mul_over(n, item_bytes, &bytes))
        return NULL;
    return mem_zalloc(bytes);
}

void *mem_realloc(void *p, size_t n_bytes)
{
    if (must_fail())
        return NULL;
    size_t before = malloc_usable_size(p);
    void *r = realloc(p, n_bytes ? n_bytes : 1);
    if (r)
        count_out(before);
    return count_in(r);
}

void mem_free(void *p)
{
    count_out(malloc_usable_size(p));
    free(p);
}

char *mem_strdup(const char *s)
{
    size_t n = strlen(s) + 1;
    char *r = mem_alloc(n);
    return r ? memcpy(r, s, n) : NULL;
}

void *mem_pages(size_t n_bytes)
{
    if (must_fail())
        return NULL;
    n_bytes = n_bytes ? n_bytes : 1;
    void *p = mmap(NULL, n_bytes, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED)
        return NULL;
    atomic_fetch_add_explicit(&n_live, n_bytes, memory_order_relaxed);
    madvise(p, n_bytes, MADV_HUGEPAGE); /* advice only: a kernel without it is fine */
    return p;
}

void mem_pages_free(void *p, size_t n_bytes)
{
    if (!p)
        return;
    n_bytes = n_bytes ? n_bytes : 1;
    munmap(p, n_bytes);
    count_out(n_bytes);
}

uint64_t mem_resident_bytes(void)
{
    unsigned long long all, resident = 0;
    FILE *f = fopen("/proc/self/statm", "re");
    if (f && fscanf(f, "%llu %llu", &all, &resident) != 2)
        resident = 0;
    if (f)
        fclose(f);
    return resident * (uint64_t)sysconf(_SC_PAGESIZE);
}

void mem_trim(void)
{
#ifdef __GLIBC__
    malloc_trim(0);
#endif
}

/* ---- arena: a list of blocks, newest first; each block is header + bytes ---- */

struct arena_block {
    struct arena_block *next;
    size_t cap, used;
    _Alignas(16) char data[];
};

enum { ARENA_BLOCK_BYTES = 64 * 1024 };

void *arena_alloc(struct arena *a, size_t n_bytes)
{
    if (n_bytes > SIZE_MAX - 64)
        return NULL;
    size_t need = (n_bytes + 15) & ~(size_t)15;
    struct arena_block *b = a->head;
    if (!b || b->cap - b->used < need) {
        size_t cap = MAX(need, (size_t)ARENA_BLOCK_BYTES);
        size_t total;
        if (add_over(cap, sizeof *b, &total) || !(b = mem_zalloc(total)))
            return NULL;
        b->cap = cap;
        /* A block made for one large object goes behind the head, which may have room left. */
        if (a->head && need > ARENA_BLOCK_BYTES / 2) {
            b->next = a->head->next;
            a->head->next = b;
        } else {
            b->next = a->head;
            a->head = b;
        }
    }
    void *p = b->data + b->used;
    b->used += need;
    a->used_bytes += need;
    return p;
}

char *arena_strdup(struct arena *a, const char *s, size_t n)
{
    size_t need;
    if (add_over(n, (size_t)1, &need))
        return NULL;
    char *p = arena_alloc(a, need);
    if (p && n)
        memcpy(p, s, n);
    return p;
}

void arena_fini(struct arena *a)
{
    for (struct arena_block *b = a->head, *next; b; b = next) {
        next = b->next;
        mem_free(b);
    }
    *a = (struct arena){0};
}

/* ---- byte buffer ---- */

static bool buf_room(struct buf *b, size_t n)
{
    size_t need;
    if (b->failed || add_over(b->n, n, &need) || add_over(need, (size_t)1, &need))
        return !(b->failed = true);
    if (need <= b->cap)
        return true;
    size_t cap = MAX(need, b->cap > SIZE_MAX / 2 ? need : b->cap * 2);
    cap = MAX(cap, (size_t)64);
    char *p = mem_realloc(b->data, cap);
    if (!p)
        return !(b->failed = true);
    b->data = p;
    b->cap = cap;
    return true;
}

void buf_put(struct buf *b, const void *p, size_t n)
{
    if (!buf_room(b, n))
        return;
    if (n)
        memcpy(b->data + b->n, p, n);
    b->n += n;
    b->data[b->n] = 0;
}

void buf_puts(struct buf *b, const char *s)
{
    buf_put(b, s, strlen(s));
}

void buf_putc(struct buf *b, char c)
{
    buf_put(b, &c, 1);
}

void buf_printf(struct buf *b, const char *fmt, ...)
{
    va_list ap, again;
    va_start(ap, fmt);
    va_copy(again, ap);
    int n = vsnprintf(NULL, 0, fmt, ap);
    va_end(ap);
    if (n >= 0 && buf_room(b, (size_t)n)) {
        vsnprintf(b->data + b->n, (size_t)n + 1, fmt, again);
        b->n += (size_t)n;
    } else {
        b->failed = true;
    }
    va_end(again);
}

const char *buf_str(struct buf *b)
{
    return b->failed || !b->data ? "" : b->data;
}

void buf_clear(struct buf *b)
{
    b->n = 0;
    b->failed = false;
    if (b->data)
        b->data[0] = 0;
}

void buf_fini(struct buf *b)
{
    mem_free(b->data);
    *b = (struct buf){0};
}
