/* The persistent prefix tier's contract: what was put comes back bit for bit or not at all, every
 * miss says why, bounds hold, several threads and processes share one file, and a file that is not
 * what it should be costs its pages and nothing else. Faults: test_prefix_faults.c. */
#include <pthread.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "tests/unit/prefix_pages.h"

#define GETS(p, i, n, want)                                                                        \
    do {                                                                                           \
        enum prefix_get r_ = get_page(p, i, n);                                                    \
        OK_MSG(r_ == (want), "page %d: %s, not %s", (int)(i), prefix_get_name(r_),                 \
               prefix_get_name(want));                                                             \
    } while (0)

static void exec_sql(const char *home, const char *sql)
{
    sqlite3 *db = NULL;
    struct err e = {0};
    OK_CALL(db_open(&db, path_in(home, "prefix.db"), DB_WRITE, &e), e);
    OK_CALL(db_exec(db, sql, &e), e);
    db_close(db);
}

/* ---- in and out ---- */

/* Another process's transaction keeps the writer waiting. */
static sqlite3 *hold_writer(const char *home)
{
    sqlite3 *db = NULL;
    struct err e = {0};
    OK_CALL(db_open(&db, path_in(home, "prefix.db"), DB_WRITE, &e), e);
    OK_CALL(db_exec(db, "BEGIN IMMEDIATE", &e), e);
    return db;
}

static void test_pages_come_back_bit_for_bit(void)
{
    static const size_t sizes[] = {1, 7, 255, 256, 4096, 70001, 300000, 300001, PAGE_MAX};
    const char *home = unit_tmpdir();
    struct prefix_store *p = open_prefix(home, 1 << 28, 0);
    for (uint64_t round = 0; round < 3; round++) {
        for (uint64_t i = 0; i < 3 * ARRAY_LEN(sizes); i++) {
            if (round == 0)
                OK(put_page(p, i, sizes[i % ARRAY_LEN(sizes)]));
            GETS(p, i, sizes[i % ARRAY_LEN(sizes)], PREFIX_HIT);
        }
        if (round == 1) { /* by then from the file; the last round from a new start */
            prefix_close(p);
            p = open_prefix(home, 1 << 28, 0);
        }
        flush(p);
    }
    struct prefix_stats s = stats_of(p);
    OK(s.pages == 27 && s.gets[PREFIX_HIT] == 27 && s.corrupt == 0);
    GETS(p, 27, 100, PREFIX_ABSENT);
    prefix_close(p);
}

static void test_only_what_shrinks_by_a_tenth_is_packed(void)
{
    const char *home = unit_tmpdir();
    struct prefix_store *p = open_prefix(home, 1 << 28, 0);
    struct prefix_row r;
    enum row_state st;
    for (uint64_t i = 0; i < 3; i++)
        OK(put_page(p, i, 500000));
    flush(p);
    for (uint64_t i = 0; i < 3; i++) {
        struct prefix_key k = make_key(i);
        OK(row_find(&st, &r, &p->reader, &k, NULL) == 0 && st == ROW_OK);
        OK(r.packed == (i == 0) && r.kv_bytes == 500000);
        OK(i == 0 ? r.stored_bytes <= 450000 : r.stored_bytes == 500000);
    }
    prefix_close(p);
}

static void test_every_miss_says_why(void)
{
    const char *home = unit_tmpdir();
    struct prefix_store *p = open_prefix(home, 1 << 28, 0);
    struct made *m = malloc(sizeof *m);
    static uint8_t kv[5000];
    CHECK(m);
    for (int round = 0; round < 3; round++) { /* waiting, written, from a new start */
        sqlite3 *db = round == 0 ? hold_writer(home) : NULL;
        if (round == 0)
            OK(put_page(p, 4, 5000));
        make_page(m, 4, 5000);
        OK(prefix_get(p, kv, &m->page) == PREFIX_HIT);
        m->ids[31]++;
        OK(prefix_get(p, kv, &m->page) == PREFIX_OTHER_TEXT);
        m->ids[31]--;
        m->page.n_ids--;
        OK(prefix_get(p, kv, &m->page) == PREFIX_OTHER_TEXT);
        m->page.n_ids++;
        m->page.parent.b[3] ^= 1;
        OK(prefix_get(p, kv, &m->page) == PREFIX_OTHER_TEXT);
        m->page.parent.b[3] ^= 1;
        m->page.kv_bytes--;
        OK(prefix_get(p, kv, &m->page) == PREFIX_OTHER_SIZE);
        m->page.key.b[0] ^= 1;
        OK(prefix_get(p, kv, &m->page) == PREFIX_ABSENT);
        db_close(db);
        flush(p);
        if (round == 1) {
            prefix_close(p);
            p = open_prefix(home, 1 << 28, 0);
        }
    }
    OK(prefix_trim(p, 0, NULL) == 0);
    GETS(p, 4, 5000, PREFIX_EVICTED);
    OK(put_page(p, 4, 5000));
    flush(p);
    GETS(p, 4, 5000, PREFIX_HIT);
    struct prefix_stats s = stats_of(p);
    OK(s.gets[PREFIX_EVICTED] == 1 && s.evicted == 1 && s.written == 1);
    free(m);
    prefix_close(p);
}

static void test_a_page_with_the_same_key_and_other_text_takes_its_place(void)
{
    struct prefix_store *p = open_prefix(unit_tmpdir(), 1 << 28, 0);
    struct made *m = malloc(sizeof *m);
    static uint8_t kv[5000];
    CHECK(m);
    OK(put_page(p, 4, 5000));
    flush(p);
    make_page(m, 4, 4000);
    m->ids[0] = 7;
    OK(prefix_put(p, &m->page));
    OK(prefix_get(p, kv, &m->page) == PREFIX_HIT); /* the younger one, before it is written */
    flush(p);
    OK(prefix_get(p, kv, &m->page) == PREFIX_HIT && !memcmp(kv, m->kv, 4000));
    GETS(p, 4, 5000, PREFIX_OTHER_TEXT);
    OK(stats_of(p).pages == 1);
    free(m);
    prefix_close(p);
}

static void test_the_same_page_is_written_once(void)
{
    const char *home = unit_tmpdir();
    struct prefix_store *p = open_prefix(home, 1 << 28, 0);
    struct prefix_key k5 = make_key(5), k6 = make_key(6);
    for (int i = 0; i < 10; i++)
        OK(put_page(p, 5, 50000));
    OK(prefix_has(p, &k5) && !prefix_has(p, &k6));
    flush(p);
    OK(put_page(p, 5, 50000) && prefix_has(p, &k5));
    flush(p);
    struct prefix_stats s = stats_of(p);
    OK(s.pages == 1 && s.written == 1 && s.known == 10 && s.puts == 11);
    prefix_close(p);
}

/* ---- bounds ---- */

static void test_dirty_pages_are_bounded_and_found(void)
{
    const char *home = unit_tmpdir();
    struct prefix_store *p = open_prefix(home, 1 << 28, 1 << 20);
    sqlite3 *db = hold_writer(home);
    int kept = 0;
    put_page(p, 0, 50000);
    usleep(50000); /* the writer has taken it, and waits */
    uint64_t allocs = mem_alloc_count();
    for (uint64_t i = 1; i < 40; i++)
        kept += put_page(p, i, 50000);
    OK_MSG(mem_alloc_count() == allocs, "prefix_put allocates");
    OK_MSG(kept >= 17 && kept <= 20, "%d of 50 kB kept in 1 MiB", kept);
    for (uint64_t i = 0; i < 40; i++)
        GETS(p, i, 50000, i <= (uint64_t)kept ? PREFIX_HIT : PREFIX_ABSENT);
    struct prefix_stats s = stats_of(p);
    OK(s.dirty_pages == (uint64_t)kept + 1 && s.dirty_bytes <= 1 << 20);
    OK(s.refused == 39 - (uint64_t)kept && s.pages == 0);
    db_close(db);
    flush(p);
    s = stats_of(p);
    OK(s.dirty_pages == 0 && s.dirty_bytes == 0 && s.pages == (uint64_t)kept + 1);
    /* Around the ring many times, with sizes that leave gaps. */
    for (uint64_t i = 100; i < 400; i++) {
        size_t n = 1000 + i * 7919 % 90000;
        while (!put_page(p, i, n))
            usleep(200);
        GETS(p, i, n, PREFIX_HIT);
        GETS(p, i - i % 10, 1000 + (i - i % 10) * 7919 % 90000, PREFIX_HIT);
    }
    flush(p);
    OK(stats_of(p).written == (uint64_t)kept + 301);
    prefix_close(p);
}

static void test_the_cap_holds_and_the_file_does_not_grow(void)
{
    const char *home = unit_tmpdir();
    const uint64_t cap = 8 << 20;
    struct prefix_store *p = open_prefix(home, cap, 0);
    struct stat st;
    for (uint64_t i = 0; i < 400; i++) {
        while (!put_page(p, i, 100000))
            usleep(200);
        if (i % 50 == 49) {
            flush(p);
            OK_MSG(stats_of(p).bytes <= cap, "%d bytes", (int)stats_of(p).bytes);
        }
    }
    struct prefix_stats s = stats_of(p);
    OK_MSG(s.pages + s.evicted + s.outvalued == 400 && s.pages > 60, "%d pages, %d evicted",
           (int)s.pages, (int)s.evicted);
    for (uint64_t i = 1, end = 0; i < 400; i++) { /* one chain: its beginning is what stays */
        end += get_page(p, i, 100000) != PREFIX_HIT;
        OK_MSG(!end || get_page(p, i, 100000) == PREFIX_EVICTED, "page %d", (int)i);
    }
    OK(!put_page(p, 1000, PAGE_MAX) || s.max_bytes / 2 >= PAGE_MAX);
    prefix_close(p);
    OK(stat(path_in(home, "prefix.db"), &st) == 0 && (uint64_t)st.st_size <= cap + (1 << 20));
    OK(access(path_in(home, "prefix.db-wal"), F_OK) != 0);
    p = open_prefix(home, 2 << 20, 0); /* a lower cap is kept without being asked */
    for (int i = 0; i < 500 && stats_of(p).bytes > 2 << 20; i++)
        usleep(10000);
    OK(stats_of(p).bytes <= 2 << 20 && stats_of(p).pages > 10);
    prefix_close(p);
    OK(stat(path_in(home, "prefix.db"), &st) == 0 && (uint64_t)st.st_size <= 3 << 20);
}

/* Chain a: pages 0..19, used again and again. Chain b: 100..119, dear to compute. Then c: many
 * cheap ones, once each. */
static void test_eviction_keeps_what_is_dear_and_used_and_never_orphans(void)
{
    struct prefix_store *p = open_prefix(unit_tmpdir(), 8 << 20, 0);
    struct made *m = malloc(sizeof *m);
    CHECK(m);
    for (uint64_t i = 0; i < 20; i++)
        OK(put_page(p, i, 90001));
    for (uint64_t i = 100; i < 120; i++) {
        make_page(m, i, 90001);
        m->page.cost_us = 100000;
        OK(prefix_put(p, &m->page));
    }
    flush(p);
    for (int k = 0; k < 30; k++)
        for (uint64_t i = 0; i < 20; i++)
            GETS(p, i, 90001, PREFIX_HIT);
    flush(p);
    for (uint64_t i = 200; i < 300; i++)
        OK(put_page(p, i, 90001));
    flush(p);
    for (uint64_t i = 0; i < 20; i++)
        GETS(p, i, 90001, PREFIX_HIT);
    for (uint64_t i = 100; i < 120; i++)
        GETS(p, i, 90001, PREFIX_HIT);
    OK(stats_of(p).evicted + stats_of(p).outvalued > 20);
    /* In a chain the last page goes first: what is left is always a beginning. */
    OK(prefix_trim(p, 2 << 20, NULL) == 0);
    bool ended[2] = {false, false};
    for (uint64_t i = 0; i < 40; i++) {
        bool hit = get_page(p, i < 20 ? i : i + 80, 90001) == PREFIX_HIT;
        OK_MSG(!hit || !ended[i / 20], "page %d is left without the one before", (int)i);
        ended[i / 20] = ended[i / 20] || !hit;
    }
    free(m);
    prefix_close(p);
}

static void test_among_equals_the_oldest_goes(void)
{
    struct prefix_store *p = open_prefix(unit_tmpdir(), 4 << 20, 0);
    for (uint64_t i = 1; i <= 60; i++) { /* none follows another, none shrinks */
        while (!put_page(p, i * 30 + 1, 90000))
            usleep(200);
        flush(p);
    }
    OK(stats_of(p).evicted > 10 && stats_of(p).outvalued == 0);
    for (uint64_t i = 1; i <= 60; i++)
        if (i < 15 || i > 35)
            GETS(p, i * 30 + 1, 90000, i < 15 ? PREFIX_EVICTED : PREFIX_HIT);
    prefix_close(p);
}

/* Even where the ranks say otherwise. */
static void test_a_page_goes_after_those_that_follow_it(void)
{
    const char *home = unit_tmpdir();
    struct prefix_store *p = open_prefix(home, 1 << 28, 0);
    for (uint64_t i = 0; i < 40; i++)
        OK(put_page(p, i, 90000));
    flush(p);
    exec_sql(home, "UPDATE page SET rank = id");
    OK(prefix_trim(p, 2 << 20, NULL) == 0);
    OK(stats_of(p).pages > 10 && stats_of(p).pages < 30);
    for (uint64_t i = 0; i < stats_of(p).pages; i++)
        GETS(p, i, 90000, PREFIX_HIT);
    prefix_close(p);
}

static void test_old_fame_fades(void)
{
    struct prefix_store *p = open_prefix(unit_tmpdir(), 4 << 20, 0);
    struct prefix_key k = make_key(0);
    OK(put_page(p, 0, 90001));
    flush(p);
    for (int i = 0; i < 5; i++)
        prefix_touch(p, &k);
    flush(p);
    for (uint64_t i = 10; i < 1500 && get_page(p, 0, 1) == PREFIX_OTHER_SIZE; i += 1) {
        while (!put_page(p, i * 10, 90001)) /* chains of one */
            usleep(200);
        flush(p);
    }
    OK(get_page(p, 0, 90001) == PREFIX_EVICTED);
    prefix_close(p);
}

/* ---- the file ---- */

static void test_an_unknown_file_is_moved_aside(void)
{
    const char *home = unit_tmpdir(), *path = path_in(home, "prefix.db");
    struct err e = {0};
    char cmd[700];
    OK_CALL(file_write_all(path, "my notes, nothing else", 22, &e), e);
    struct prefix_store *p = open_prefix(home, 0, 0);
    OK(put_page(p, 1, 1000));
    flush(p);
    OK(stats_of(p).replaced == 1);
    prefix_close(p);
    snprintf(cmd, sizeof cmd, "grep -q notes '%s.aside'", path);
    OK(system(cmd) == 0);

    static const char *const odd[] = {
        "PRAGMA user_version = 999", "PRAGMA application_id = 5", "CREATE TABLE extra(a)",
        "DROP INDEX page_rank; CREATE INDEX page_rank ON page(rank)",
        "DROP TABLE data; CREATE VIEW data AS SELECT 1 AS id, 2 AS kv"};
    for (size_t i = 0; i < ARRAY_LEN(odd); i++) {
        exec_sql(home, odd[i]);
        p = open_prefix(home, 0, 0);
        OK_MSG(stats_of(p).replaced == 1 && stats_of(p).pages == 0, "%s", odd[i]);
        OK(put_page(p, 1, 1000));
        prefix_close(p);
        p = open_prefix(home, 0, 0);
        OK(stats_of(p).replaced == 0);
        GETS(p, 1, 1000, PREFIX_HIT);
        prefix_close(p);
        OK(access(path_in(home, "prefix.db.aside"), F_OK) == 0);
    }
}

static void test_a_directory_that_cannot_be_written_is_an_error(void)
{
    struct prefix_store *p = (void *)1;
    struct err e = {0};
    OK(prefix_open(&p, "/nonexistent/ingot", NULL, &e) && !p && strstr(e.msg, "/nonexistent"));
    const char *home = unit_tmpdir();
    OK(mkdir(path_in(home, "prefix.db"), 0755) == 0);
    e = (struct err){0};
    OK(prefix_open(&p, home, NULL, &e) && !p && strstr(e.msg, "prefix.db"));
}

static void test_a_damaged_row_is_a_miss_and_goes(void)
{
    static const char *const harm[] = {
        "UPDATE data SET kv = zeroblob(length(kv)) WHERE id = 1",
        "UPDATE data SET kv = substr(kv, 2) WHERE id = 1",
        "DELETE FROM data WHERE id = 1",
        "UPDATE page SET ids = zeroblob(128) WHERE id = 1",
        "UPDATE page SET parent = zeroblob(16) WHERE id = 1",
        "UPDATE page SET parent = 5, key = key WHERE id = 1",
        "UPDATE page SET kv_bytes = kv_bytes + 1 WHERE id = 1",
        "UPDATE page SET kv_bytes = -1, stored = -1 WHERE id = 1",
        "UPDATE page SET packed = 1 - packed WHERE id = 1",
        "UPDATE page SET sums = zeroblob(32) WHERE id = 1",
        "UPDATE page SET sums = '' WHERE id = 1",
        "UPDATE data SET kv = (SELECT kv FROM data WHERE id = 2) WHERE id = 1",
    };
    for (size_t i = 0; i < 2 * ARRAY_LEN(harm); i++) {
        const char *home = unit_tmpdir();
        struct prefix_store *p = open_prefix(home, 1 << 28, 0);
        uint64_t a = i % 2 ? 4 : 3; /* as it is, and packed */
        struct prefix_key k = make_key(a);
        OK(put_page(p, a, 40000));
        flush(p);
        OK(put_page(p, 7, 40000));
        flush(p);
        exec_sql(home, harm[i / 2]);
        OK_MSG(get_page(p, a, 40000) == PREFIX_CORRUPT, "%s", harm[i / 2]);
        GETS(p, 7, 40000, PREFIX_HIT);
        flush(p);
        OK(!prefix_has(p, &k));
        struct prefix_stats s = stats_of(p);
        OK_MSG(s.pages == 1 && s.corrupt == 1 && s.replaced == 0, "%s: %d pages, %d corrupt",
               harm[i / 2], (int)s.pages, (int)s.corrupt);
        OK(put_page(p, a, 40000));
        flush(p);
        GETS(p, a, 40000, PREFIX_HIT);
        prefix_close(p);
    }
}

/* ---- together ---- */

struct worker {
    struct prefix_store *p;
    uint64_t seed;
    uint64_t hits;
};

static void *work(void *arg)
{
    struct worker *w = arg;
    for (int i = 0; i < 300; i++) {
        uint64_t page = unit_rand(&w->seed) % 60;
        struct prefix_key k = make_key(page);
        switch (unit_rand(&w->seed) % 8) {
        case 0:
            prefix_touch(w->p, &k);
            break;
        case 1:
            prefix_has(w->p, &k);
            break;
        case 2:
            if (i % 16 == 0)
                prefix_flush(w->p, NULL);
            break;
        case 3:
            if (i % 32 == 0)
                prefix_trim(w->p, 1 << 20, NULL);
            stats_of(w->p);
            break;
        case 4:
        case 5:
            put_page(w->p, page, 20000);
            break;
        default:
            w->hits += get_page(w->p, page, 20000) == PREFIX_HIT;
        }
    }
    return NULL;
}

static void test_threads_share_a_store(void)
{
    struct prefix_store *p = open_prefix(unit_tmpdir(), 1 << 20, 1 << 19);
    struct worker w[4];
    pthread_t t[4];
    uint64_t hits = 0;
    for (int i = 0; i < 4; i++) {
        w[i] = (struct worker){p, (uint64_t)i, 0};
        CHECK(pthread_create(&t[i], NULL, work, &w[i]) == 0);
    }
    for (int i = 0; i < 4; i++) {
        pthread_join(t[i], NULL);
        hits += w[i].hits;
    }
    struct prefix_stats s = stats_of(p);
    OK_MSG(hits > 50 && s.corrupt == 0 && s.replaced == 0, "%d hits", (int)hits);
    flush(p);
    prefix_close(p);
}

/* `run` beside `serve`: both write and read, and each finds what the other one wrote. */
static void test_processes_share_a_file(void)
{
    const char *home = unit_tmpdir();
    struct prefix_store *p;
    pid_t pid[2];
    int status;
    for (uint64_t k = 0; k < 2; k++) {
        pid[k] = fork();
        if (pid[k])
            continue;
        struct worker w = {open_prefix(home, 4 << 20, 0), 5 + k, 0};
        bool ok = w.p != NULL;
        for (uint64_t i = 0; i < 100; i++)
            ok = put_page(w.p, 1000 * (k + 1) + i, 10000) && ok;
        work(&w);
        ok = prefix_flush(w.p, NULL) == 0 && ok;
        struct prefix_stats s = stats_of(w.p);
        ok = ok && s.corrupt == 0 && s.replaced == 0 && s.gets[PREFIX_CORRUPT] == 0 && w.hits > 0;
        prefix_close(w.p);
        _exit(!ok);
    }
    for (int k = 0; k < 2; k++) {
        OK(waitpid(pid[k], &status, 0) == pid[k]);
        OK_MSG(WIFEXITED(status) && WEXITSTATUS(status) == 0, "child %d: %x", k, (unsigned)status);
    }
    p = open_prefix(home, 4 << 20, 0);
    OK(stats_of(p).replaced == 0 && stats_of(p).pages > 20);
    prefix_close(p);
}

static void test_a_running_process_sees_what_another_writes(void)
{
    const char *home = unit_tmpdir();
    struct prefix_store *a = open_prefix(home, 1 << 28, 0), *b = open_prefix(home, 1 << 28, 0);
    GETS(b, 3, 30000, PREFIX_ABSENT);
    OK(put_page(a, 3, 30000));
    flush(a);
    GETS(b, 3, 30000, PREFIX_HIT);
    OK(prefix_clear(b, NULL, NULL) == 0);
    GETS(a, 3, 30000, PREFIX_ABSENT);
    prefix_close(a);
    OK(put_page(b, 3, 30000));
    flush(b);
    GETS(b, 3, 30000, PREFIX_HIT);
    prefix_close(b);
}

/* A damaged file is not taken from under another process: the one that found out goes without until
 * it is alone. */
static void test_a_damaged_file_stays_while_another_process_has_it(void)
{
    const char *home = unit_tmpdir();
    struct prefix_store *a = open_prefix(home, 1 << 28, 0), *b = open_prefix(home, 1 << 28, 0);
    struct err e = {0};
    OK(put_page(a, 3, 30000));
    flush(a);
    a->pause_ms = 30;
    pthread_mutex_lock(&a->lock);
    a->damaged = true;
    pthread_cond_signal(&a->work);
    pthread_mutex_unlock(&a->lock);
    for (int i = 0; i < 6000 && !stats_of(a).paused; i++)
        usleep(1000);
    GETS(a, 3, 30000, PREFIX_UNAVAILABLE);
    GETS(b, 3, 30000, PREFIX_HIT);
    prefix_close(b);
    usleep(40000);
    OK(put_page(a, 4, 30000));
    OK_CALL(prefix_flush(a, &e), e);
    GETS(a, 4, 30000, PREFIX_HIT);
    OK(stats_of(a).replaced == 1);
    prefix_close(a);
}

/* ---- tools ---- */

static void test_models_are_listed_and_cleared_apart(void)
{
    const char *home = unit_tmpdir();
    struct prefix_store *p = open_prefix(home, 1 << 28, 0);
    struct prefix_model *m = NULL;
    struct err e = {0};
    size_t n = 0;
    for (uint64_t i = 0; i < 30; i++)
        OK(put_page(p, i < 10 ? i : 100 + i, 20000)); /* 10 of model 0, 20 of model 1 */
    flush(p);
    GETS(p, 2, 20000, PREFIX_HIT);
    flush(p);
    OK_CALL(prefix_models(p, &m, &n, &e), e);
    OK(n == 2 && m[0].model_tag == 1 && m[0].pages == 20 && m[0].tokens == 640);
    OK(m[1].pages == 10 && m[1].kv_bytes == 200000 && m[1].stored_bytes < 200000);
    OK(m[1].hits == 1 && m[0].hits == 0 && m[0].last_used > 1600000000);
    mem_free(m);
    OK_CALL(prefix_clear(p, &(uint64_t){1}, &e), e);
    OK(stats_of(p).pages == 10);
    GETS(p, 120, 20000, PREFIX_ABSENT);
    GETS(p, 2, 20000, PREFIX_HIT);
    OK(put_page(p, 50, 20000));
    OK_CALL(prefix_clear(p, NULL, &e), e);
    OK(stats_of(p).pages == 0);
    GETS(p, 2, 20000, PREFIX_ABSENT);
    GETS(p, 50, 20000, PREFIX_ABSENT);
    OK_CALL(prefix_models(p, &m, &n, &e), e);
    OK(n == 0);
    mem_free(m);
    prefix_close(p);
}

static void test_trim_gives_space_back(void)
{
    const char *home = unit_tmpdir();
    struct prefix_store *p = open_prefix(home, 1 << 28, 0);
    struct stat st;
    struct err e = {0};
    for (uint64_t i = 0; i < 100; i++)
        OK(put_page(p, i, 200000));
    flush(p);
    OK_CALL(prefix_trim(p, 5 << 20, &e), e);
    OK(stats_of(p).bytes <= 5 << 20 && stats_of(p).pages > 20);
    OK(stat(path_in(home, "prefix.db"), &st) == 0 && st.st_size <= 5 << 20);
    GETS(p, 0, 200000, PREFIX_HIT); /* the beginning of the chain stays */
    prefix_close(p);
}

static int count_calls(void *user, uint64_t done, uint64_t total)
{
    OK(done <= total);
    return --*(int *)user == 0;
}

static void test_export_and_import_move_a_warm_cache(void)
{
    const char *dir = unit_tmpdir(), *out = path_in(dir, "cache.db");
    struct prefix_store *p = open_prefix(unit_tmpdir(), 1 << 28, 0);
    struct prefix_store *q = open_prefix(unit_tmpdir(), 1 << 28, 0);
    struct prefix_moved m;
    struct err e = {0};
    int calls = 1;
    for (uint64_t i = 0; i < 150; i++)
        OK(put_page(p, i, 20000 + i));
    OK(prefix_export(p, &m, out, count_calls, &calls, &e) && e.code == ERR_CANCELLED);
    OK(access(out, F_OK) && rmdir(dir) == 0 && mkdir(dir, 0700) == 0); /* nothing is left of it */
    e = (struct err){0};
    OK_CALL(prefix_export(p, &m, out, NULL, NULL, &e), e);
    OK(m.pages == 150 && m.corrupt == 0);
    OK(prefix_export(p, &m, out, NULL, NULL, &e) && e.code == ERR_EXISTS);
    e = (struct err){0};
    for (uint64_t i = 0; i < 20; i++)
        OK(put_page(q, i, 20000 + i));
    flush(q);
    OK_CALL(prefix_import(q, &m, out, NULL, NULL, &e), e);
    OK(m.pages == 130 && m.known == 20 && m.corrupt == 0);
    for (uint64_t i = 0; i < 150; i++)
        GETS(q, i, 20000 + i, PREFIX_HIT);
    prefix_close(q);
    q = open_prefix(unit_tmpdir(), 1 << 20, 0); /* the cap holds */
    OK_CALL(prefix_import(q, &m, out, NULL, NULL, &e), e);
    OK(stats_of(q).bytes <= 1 << 20 && stats_of(q).pages > 10);
    prefix_close(q);
    prefix_close(p);
}

/* A stranger's file: bits flipped, cut off, with rows that lie. None may crash, hang, or bring in a
 * page that differs from the original. */
static void test_import_takes_no_wrong_page_from_a_strange_file(void)
{
    const char *dir = unit_tmpdir(), *out = path_in(dir, "cache.db"), *bad = path_in(dir, "bad.db");
    struct prefix_store *p = open_prefix(unit_tmpdir(), 1 << 28, 0);
    struct prefix_moved m;
    struct err e = {0};
    struct buf b = {0};
    uint64_t seed = 11;
    int whole = 0;
    for (uint64_t i = 0; i < 30; i++)
        OK(put_page(p, i, 5000 + i));
    OK_CALL(prefix_export(p, &m, out, NULL, NULL, &e), e);
    OK_CALL(file_read_all(&b, out, 1 << 28, &e), e);
    for (int k = 0; k < 100; k++) {
        size_t n = k % 10 ? b.n : b.n * (size_t)(k + 3) / 110;
        char *copy = malloc(n);
        CHECK(copy);
        memcpy(copy, b.data, n);
        for (int f = 0; f < 20; f++)
            copy[unit_rand(&seed) % n] ^= (char)(1 << unit_rand(&seed) % 8);
        OK_CALL(file_write_all(bad, copy, n, &e), e);
        free(copy);
        OK(prefix_clear(p, NULL, NULL) == 0);
        struct err why = {0};
        whole += prefix_import(p, &m, bad, NULL, NULL, &why) == 0;
        OK(!why.code || *why.msg);
        for (uint64_t i = 0; i < 30; i++)
            get_page(p, i, 5000 + i);
        OK_MSG(stats_of(p).corrupt == 0 && stats_of(p).replaced == 0, "damage came in");
    }
    OK_MSG(whole > 10 && whole < 100, "%d", whole);
    OK(prefix_import(p, &m, path_in(dir, "none"), NULL, NULL, &e) && e.code == ERR_NOT_FOUND);
    buf_fini(&b);
    prefix_close(p);
}

/* ---- speed ---- */

static void test_speed_of_1_mib_pages(void)
{
    enum { N = 200 };
    struct prefix_store *p = open_prefix(unit_tmpdir(), (uint64_t)1 << 30, 0);
    struct made *m = malloc(sizeof *m);
    uint8_t *kv = malloc(PAGE_MAX);
    uint64_t put_ns = 0, t0, t1, t2, has0;
    CHECK(m && kv);
    t0 = now_ns();
    uint64_t made_ns = 0;
    for (uint64_t i = 0; i < N; i++) {
        uint64_t a = now_ns();
        make_page(m, i * 3 + 1, PAGE_MAX);
        uint64_t c = now_ns();
        made_ns += c - a;
        OK(prefix_put(p, &m->page));
        put_ns += now_ns() - c;
        if (i % 16 == 15) /* a prompt's worth: the same memory again and again */
            flush(p);
    }
    flush(p);
    t1 = now_ns();
    for (uint64_t i = 0; i < N; i++) {
        struct prefix_page want = {.key = make_key(i * 3 + 1),
                                   .parent = make_key(i * 3),
                                   .ids = m->ids,
                                   .n_ids = PAGE_IDS,
                                   .kv_bytes = PAGE_MAX};
        for (int k = 0; k < PAGE_IDS; k++)
            m->ids[k] = (int32_t)((i * 3 + 1) * 100 + (uint64_t)k);
        OK(prefix_get(p, kv, &want) == PREFIX_HIT);
    }
    t2 = now_ns();
    for (uint64_t i = 0; i < 1000; i++) {
        struct prefix_key k = make_key(i + 5000);
        prefix_has(p, &k);
    }
    has0 = now_ns();
    printf("  1 MiB pages: put %.0f us a call, written %.0f pages/s; get %.0f pages/s; absent %.1f "
           "us\n",
           (double)put_ns / N / 1e3, N / ((double)(t1 - t0 - made_ns) * 1e-9),
           N / ((double)(t2 - t1) * 1e-9), (double)(has0 - t2) / 1e6);
    free(kv);
    free(m);
    prefix_close(p);
}

/* Chains of pages, each worth a little more than the one before, beside as many without chains. */
static void test_a_long_chain_takes_no_longer_than_its_pages(void)
{
    enum { N = 1000, BYTES = 4096 };
    double seconds[2];
    for (int chain = 0; chain < 2; chain++) {
        struct prefix_store *p = open_prefix(unit_memdir(), 1 << 26, 0);
        struct made *m = malloc(sizeof *m);
        CHECK(m);
        uint64_t t0 = now_ns();
        for (uint64_t i = 0; i < N; i++) {
            make_page(m, i, BYTES);
            m->page.cost_us = 1000 + (uint32_t)i;
            if (!chain)
                m->page.parent = make_key(1000000);
            OK(prefix_put(p, &m->page));
        }
        flush(p);
        seconds[chain] = (double)(now_ns() - t0) / 1e9;
        OK(stats_of(p).pages == N);
        free(m);
        prefix_close(p);
    }
    printf("  %d pages: %.0f ms side by side, %.0f ms in a chain\n", N, 1e3 * seconds[0],
           1e3 * seconds[1]);
    OK_MSG(seconds[1] < 10 * seconds[0] + 0.1, "%.2f s, and %.2f s in a chain", seconds[0],
           seconds[1]);
}

/* What is too large for the cap is left out, and clears nothing away. */
static void test_import_of_a_page_over_the_cap_leaves_the_rest(void)
{
    enum { CAP = 1 << 20, BIG = 1 << 19 };
    const char *out = path_in(unit_tmpdir(), "big.db");
    struct prefix_store *p = open_prefix(unit_tmpdir(), 1 << 28, 0);
    struct prefix_store *q = open_prefix(unit_tmpdir(), CAP, 0);
    struct made *m = malloc(sizeof *m);
    struct prefix_moved moved;
    struct err e = {0};
    CHECK(m && BIG + 1000 <= sizeof m->kv);
    make_page(m, 1, BIG + 1000);
    m->page.cost_us = 4000000000u;
    OK(prefix_put(p, &m->page));
    flush(p);
    OK_CALL(prefix_export(p, &moved, out, NULL, NULL, &e), e);
    for (uint64_t i = 10; i < 30; i++)
        OK(put_page(q, i, 20000));
    flush(q);
    OK_CALL(prefix_import(q, &moved, out, NULL, NULL, &e), e);
    OK(moved.pages == 0 && moved.outvalued == 1 && stats_of(q).pages == 20);
    free(m);
    prefix_close(q);
    prefix_close(p);
}

static void test_open_and_close_take_milliseconds(void)
{
    const char *home = unit_tmpdir();
    prefix_close(open_prefix(home, 0, 0));
    uint64_t t0 = now_ns();
    for (int i = 0; i < 20; i++)
        prefix_close(open_prefix(home, 0, 0));
    double ms = (double)(now_ns() - t0) / 20e6;
    OK_MSG(ms < 100, "%.1f ms", ms);
    printf("  open and close: %.1f ms\n", ms);
}

static const struct unit_test tests[] = {
    {"pages_come_back_bit_for_bit", test_pages_come_back_bit_for_bit},
    {"only_what_shrinks_by_a_tenth_is_packed", test_only_what_shrinks_by_a_tenth_is_packed},
    {"every_miss_says_why", test_every_miss_says_why},
    {"a_page_with_the_same_key_and_other_text_takes_its_place",
     test_a_page_with_the_same_key_and_other_text_takes_its_place},
    {"the_same_page_is_written_once", test_the_same_page_is_written_once},
    {"dirty_pages_are_bounded_and_found", test_dirty_pages_are_bounded_and_found},
    {"the_cap_holds_and_the_file_does_not_grow", test_the_cap_holds_and_the_file_does_not_grow},
    {"eviction_keeps_what_is_dear_and_used_and_never_orphans",
     test_eviction_keeps_what_is_dear_and_used_and_never_orphans},
    {"among_equals_the_oldest_goes", test_among_equals_the_oldest_goes},
    {"a_page_goes_after_those_that_follow_it", test_a_page_goes_after_those_that_follow_it},
    {"old_fame_fades", test_old_fame_fades},
    {"an_unknown_file_is_moved_aside", test_an_unknown_file_is_moved_aside},
    {"a_directory_that_cannot_be_written_is_an_error",
     test_a_directory_that_cannot_be_written_is_an_error},
    {"a_damaged_row_is_a_miss_and_goes", test_a_damaged_row_is_a_miss_and_goes},
    {"threads_share_a_store", test_threads_share_a_store},
    {"processes_share_a_file", test_processes_share_a_file},
    {"a_running_process_sees_what_another_writes", test_a_running_process_sees_what_another_writes},
    {"a_damaged_file_stays_while_another_process_has_it",
     test_a_damaged_file_stays_while_another_process_has_it},
    {"models_are_listed_and_cleared_apart", test_models_are_listed_and_cleared_apart},
    {"trim_gives_space_back", test_trim_gives_space_back},
    {"export_and_import_move_a_warm_cache", test_export_and_import_move_a_warm_cache},
    {"import_takes_no_wrong_page_from_a_strange_file",
     test_import_takes_no_wrong_page_from_a_strange_file},
    {"speed_of_1_mib_pages", test_speed_of_1_mib_pages},
    {"a_long_chain_takes_no_longer_than_its_pages",
     test_a_long_chain_takes_no_longer_than_its_pages},
    {"import_of_a_page_over_the_cap_leaves_the_rest",
     test_import_of_a_page_over_the_cap_leaves_the_rest},
    {"open_and_close_take_milliseconds", test_open_and_close_take_milliseconds},
};

int main(int argc, char **argv)
{
    log_threshold = LOG_ERROR;
    return unit_main(argc, argv, tests, ARRAY_LEN(tests));
}
