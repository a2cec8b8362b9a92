/* SHA-256 on a thread of its own, so that hashing a file costs the larger of hashing and writing,
 * not their sum. A ring of chunk buffers: the caller fills one, pushes it and may go on reading it
 * while it is hashed. Owns the buffers and the thread. */
#include <string.h>

#include "store/store_internal.h"

enum { RING = 4 };

struct hasher {
    pthread_t thread;
    bool running;
    pthread_mutex_t lock;
    pthread_cond_t moved;
    uint8_t *buffers;        /* [RING][STORE_CHUNK_BYTES] */
    size_t n[RING];          /* bytes to hash in each */
    unsigned pushed, hashed; /* counts; buffers hashed..pushed-1 are waiting */
    bool stop, drop;         /* no more comes; what waits is not wanted either */
    struct sha256 sha;
};

static uint8_t *ring_buffer(struct hasher *h, unsigned i)
{
    return h->buffers + (size_t)(i % RING) * STORE_CHUNK_BYTES;
}

static void *hash_all(void *arg)
{
    struct hasher *h = arg;
    pthread_mutex_lock(&h->lock);
    for (;;) {
        while (h->hashed == h->pushed && !h->stop)
            pthread_cond_wait(&h->moved, &h->lock);
        if (h->drop || h->hashed == h->pushed)
            break;
        unsigned i = h->hashed;
        pthread_mutex_unlock(&h->lock);
        sha256_add(&h->sha, ring_buffer(h, i), h->n[i % RING]);
        pthread_mutex_lock(&h->lock);
        h->hashed++;
        pthread_cond_signal(&h->moved);
    }
    pthread_mutex_unlock(&h->lock);
    return NULL;
}

int hasher_new(struct hasher **out, struct err *e)
{
    struct hasher *h = mem_zalloc(sizeof *h);
    *out = NULL;
    if (!h || !(h->buffers = mem_array(RING, STORE_CHUNK_BYTES))) {
        mem_free(h);
        return err_set(e, ERR_MEMORY, "out of memory for hashing");
    }
    pthread_mutex_init(&h->lock, NULL);
    pthread_cond_init(&h->moved, NULL);
    sha256_init(&h->sha);
    h->running = pthread_create(&h->thread, NULL, hash_all, h) == 0;
    if (!h->running) {
        hasher_free(h);
        return err_set(e, ERR_MEMORY, "cannot start a thread for hashing");
    }
    *out = h;
    return 0;
}

uint8_t *hasher_buffer(struct hasher *h)
{
    pthread_mutex_lock(&h->lock);
    while (h->pushed - h->hashed >= RING)
        pthread_cond_wait(&h->moved, &h->lock);
    pthread_mutex_unlock(&h->lock);
    return ring_buffer(h, h->pushed);
}

void hasher_push(struct hasher *h, size_t n)
{
    pthread_mutex_lock(&h->lock);
    h->n[h->pushed % RING] = n;
    h->pushed++;
    pthread_cond_signal(&h->moved);
    pthread_mutex_unlock(&h->lock);
}

void hasher_put(struct hasher *h, const void *p, size_t n)
{
    for (const uint8_t *at = p; n;) {
        size_t part = MIN(n, (size_t)STORE_CHUNK_BYTES);
        memcpy(hasher_buffer(h), at, part);
        hasher_push(h, part);
        at += part;
        n -= part;
    }
}

static void join(struct hasher *h, bool drop)
{
    if (!h->running)
        return;
    pthread_mutex_lock(&h->lock);
    h->stop = true;
    h->drop = drop;
    pthread_cond_signal(&h->moved);
    pthread_mutex_unlock(&h->lock);
    pthread_join(h->thread, NULL);
    h->running = false;
}

void hasher_digest(char digest[65], struct hasher *h)
{
    uint8_t raw[32];
    join(h, false);
    sha256_done(&h->sha, raw);
    sha256_init(&h->sha); /* hasher_free ends it again */
    hex_encode(digest, raw, 32);
}

void hasher_free(struct hasher *h)
{
    uint8_t unused[32];
    if (!h)
        return;
    join(h, true);
    sha256_done(&h->sha, unused);
    pthread_cond_destroy(&h->moved);
    pthread_mutex_destroy(&h->lock);
    mem_free(h->buffers);
    mem_free(h);
}
