/* The persistent prefix tier under faults: killed at any moment, bits flipped anywhere in its file,
 * the disk full at any write, no memory at any allocation. Each time: no crash, never other bytes
 * than were put, and the next start works. INGOT_KILLS and INGOT_FLIPS set how often. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>

#include "tests/unit/prefix_pages.h"

static int asked(const char *name, int or_else)
{
    const char *v = getenv(name);
    return v ? atoi(v) : or_else;
}

static size_t size_of(uint64_t i)
{
    return 3000 + i * 7919 % 40000;
}

static void remove_files(const char *home)
{
    static const char *const names[] = {"prefix.db", "prefix.db-wal", "prefix.db-shm",
                                        "prefix.db-journal"};
    for (size_t i = 0; i < ARRAY_LEN(names); i++)
        unlink(path_in(home, names[i]));
}

/* The store opens, what it has is right, and it takes and keeps a new page. Returns the hits among
 * pages 0..n-1; *replaced says that it started anew. */
static int check_store(bool *replaced, const char *home, uint64_t n)
{
    int hits = 0;
    struct prefix_store *p = open_prefix(home, 1 << 26, 1 << 22);
    for (uint64_t i = 0; i < n; i++)
        hits += get_page(p, i, size_of(i)) == PREFIX_HIT;
    for (int tries = 0; tries < 3 && get_page(p, 5000, 9000) != PREFIX_HIT; tries++) {
        put_page(p, 5000, 9000);
        prefix_flush(p, NULL);
    }
    OK(get_page(p, 5000, 9000) == PREFIX_HIT);
    *replaced = stats_of(p).replaced > 0;
    prefix_close(p);
    /* And from the file. */
    p = open_prefix(home, 1 << 26, 1 << 22);
    OK(stats_of(p).replaced == 0);
    OK(get_page(p, 5000, 9000) == PREFIX_HIT);
    prefix_close(p);
    return hits;
}

static bool sound_db(const char *home)
{
    sqlite3 *db = NULL;
    sqlite3_stmt *st = NULL;
    struct err e = {0};
    char word[200] = "";
    bool row = false;
    OK_CALL(db_open(&db, path_in(home, "prefix.db"), DB_WRITE, &e), e);
    OK_CALL(db_query(&st, db, &e, "PRAGMA integrity_check", ""), e);
    OK_CALL(db_step(&row, st, &e), e);
    if (row)
        db_text(word, sizeof word, st, 0);
    sqlite3_finalize(st);
    db_close(db);
    return OK_MSG(!strcmp(word, "ok"), "integrity: %s", word);
}

/* ---- kill ---- */

/* Put pages for ever under a small cap, and tell the parent what is flushed. */
static void child_writes(const char *home, int fd, uint64_t seed)
{
    struct prefix_store *p = open_prefix(home, 1 << 26, 1 << 22);
    for (uint64_t i = 0; p && i < 400; i++) {
        while (!put_page(p, i, size_of(i)))
            usleep(100);
        if (unit_rand(&seed) % 8 == 0 && prefix_flush(p, NULL) == 0)
            CHECK(write(fd, &i, sizeof i) == sizeof i);
    }
    prefix_close(p);
    _exit(0);
}

static void test_kill_at_random_moments_loses_nothing_that_was_flushed(void)
{
    int kills = asked("INGOT_KILLS", 20), ended = 0, hits = 0;
    uint64_t seed = now_ns();
    const char *home = unit_memdir();
    for (int k = 0; k < kills; k++) {
        int fd[2], status;
        uint64_t us = unit_rand(&seed) % 60000, flushed = 0, v;
        bool replaced;
        CHECK(pipe(fd) == 0);
        pid_t pid = fork();
        if (pid == 0) {
            close(fd[0]);
            child_writes(home, fd[1], seed);
        }
        close(fd[1]);
        nanosleep(&(struct timespec){0, (long)us * 1000}, NULL);
        kill(pid, SIGKILL);
        OK(waitpid(pid, &status, 0) == pid);
        ended += !WIFSIGNALED(status);
        while (read(fd[0], &v, sizeof v) == sizeof v)
            flushed = v + 1;
        close(fd[0]);
        if (access(path_in(home, "prefix.db"), F_OK) == 0 && k % 4 == 0)
            sound_db(home);
        int got = check_store(&replaced, home, 400);
        OK_MSG(!replaced, "kill %d: the file was damaged", k);
        OK_MSG((uint64_t)got >= flushed, "kill %d: %d pages of %d flushed", k, got, (int)flushed);
        hits += got;
        if (k % 3 == 2) /* else the next one goes on with what is there */
            remove_files(home);
    }
    OK_MSG(kills < 20 || hits > kills, "%d pages in all", hits);
    printf("  %d kills, %d after the end; %d pages found\n", kills, ended, hits);
}

/* ---- a seam in SQLite's own: its writes, counted ---- */

typedef ssize_t (*pwrite_fn)(int, const void *, size_t, off_t);
static pwrite_fn real_pwrite;
static _Atomic long writes_left; /* the write that takes it to 0 fails, and all after it */
static bool kill_there;          /* ... by SIGKILL in the middle of the write */

static ssize_t failing_pwrite(int fd, const void *p, size_t n, off_t at)
{
    if (writes_left && --writes_left == 0) {
        if (kill_there && pwrite(fd, p, n / 2, at) >= 0)
            kill(getpid(), SIGKILL);
        writes_left = 1; /* a full disk stays full */
        errno = ENOSPC;
        return -1;
    }
    return real_pwrite(fd, p, n, at);
}

static void hook_writes(void)
{
    static const char *const names[] = {"pwrite64", "pwrite"};
    prefix_close(open_prefix(unit_memdir(), 0, 0)); /* the library is configured first */
    sqlite3_vfs *v = sqlite3_vfs_find(NULL);
    for (size_t i = 0; i < ARRAY_LEN(names) && !real_pwrite; i++) {
        real_pwrite = (pwrite_fn)v->xGetSystemCall(v, names[i]);
        if (real_pwrite)
            OK(v->xSetSystemCall(v, names[i], (sqlite3_syscall_ptr)failing_pwrite) == SQLITE_OK);
    }
    CHECK(real_pwrite);
}

static void test_kill_in_every_write_leaves_a_file_that_opens(void)
{
    int n = 0, hits = 0;
    const char *home = unit_memdir();
    hook_writes();
    for (bool killed = true; killed && n < 1000; n++) {
        int status;
        bool replaced;
        remove_files(home);
        pid_t pid = fork();
        if (pid == 0) {
            kill_there = true;
            writes_left = n + 1;
            struct prefix_store *p = open_prefix(home, 300000, 1 << 20);
            for (uint64_t i = 0; i < 12; i++) { /* with evictions */
                put_page(p, i, size_of(i));
                if (i % 3 == 0)
                    prefix_flush(p, NULL);
            }
            prefix_close(p);
            _exit(0);
        }
        OK(waitpid(pid, &status, 0) == pid);
        killed = WIFSIGNALED(status);
        hits += check_store(&replaced, home, 12);
        OK_MSG(!replaced, "write %d: the file was damaged", n);
    }
    OK_MSG(n > 30 && n < 1000 && hits > n, "%d writes, %d hits", n, hits);
    printf("  %d writes\n", n);
}

/* ---- full disk ---- */

static void test_full_disk_at_any_write_rests_and_goes_on(void)
{
    const char *home = unit_memdir();
    int n = 0, faults = 0, unopened = 0;
    hook_writes();
    for (bool met = true; met && n < 1000; n += 1 + n / 40) {
        struct prefix_store *p = NULL;
        struct err e = {0};
        remove_files(home);
        writes_left = n + 1;
        if (prefix_open(&p, home, &(struct prefix_config){300000, 1 << 20}, &e)) {
            OK_MSG(e.code == ERR_FULL || strstr(e.msg, "No space"), "write %d: %s", n, e.msg);
            unopened++;
            writes_left = 0;
            continue;
        }
        p->pause_ms = 1;
        for (uint64_t i = 0; i < 12; i++) {
            put_page(p, i, size_of(i));
            e = (struct err){0};
            if (i % 3 == 0 && prefix_flush(p, &e)) {
                OK_MSG(e.code == ERR_FULL && strstr(e.msg, "full"), "write %d: %s", n, e.msg);
                faults++;
                usleep(1500);
            }
            get_page(p, i, size_of(i));
        }
        met = writes_left == 1;
        writes_left = 0;
        usleep(2000);
        /* The disk has room again: so it is used, without a new start. */
        put_page(p, 30, size_of(30));
        prefix_flush(p, NULL);
        OK_MSG(get_page(p, 30, size_of(30)) == PREFIX_HIT, "write %d: still resting", n);
        OK(stats_of(p).replaced == 0 && stats_of(p).corrupt == 0);
        prefix_close(p);
        sound_db(home);
    }
    OK_MSG(n > 30 && n < 1000 && faults > 10, "%d writes, %d faults", n, faults);
}

static void test_while_the_disk_is_full_puts_are_refused_and_gets_work(void)
{
    const char *home = unit_memdir();
    hook_writes();
    struct prefix_store *p = open_prefix(home, 1 << 26, 1 << 20);
    struct err e = {0};
    put_page(p, 1, 9000);
    flush(p);
    writes_left = 1;
    OK(put_page(p, 2, 9000));
    OK(prefix_flush(p, &e) && e.code == ERR_FULL);
    OK(stats_of(p).paused && stats_of(p).given_up == 1);
    OK(!put_page(p, 3, 9000));
    OK(get_page(p, 1, 9000) == PREFIX_HIT && get_page(p, 2, 9000) == PREFIX_ABSENT);
    OK(prefix_flush(p, NULL) == 0);
    prefix_close(p);
    writes_left = 0;
}

/* ---- flipped bits ---- */

static void fill_home(const char *home)
{
    struct prefix_store *p = open_prefix(home, 1 << 26, 1 << 22);
    for (uint64_t i = 0; i < 40; i++)
        OK(put_page(p, i, size_of(i)));
    flush(p);
    prefix_close(p);
}

static void test_a_flipped_bit_anywhere_gives_no_wrong_page(void)
{
    int flips = asked("INGOT_FLIPS", 200), lost = 0, anew = 0, unharmed = 0;
    uint64_t seed = 5;
    const char *home = unit_memdir();
    struct buf b = {0};
    struct err e = {0};
    fill_home(home);
    OK_CALL(file_read_all(&b, path_in(home, "prefix.db"), 1 << 28, &e), e);
    for (int k = 0; k < flips; k++) {
        /* Half of them where the structure is: at the start of a page of SQLite's. */
        size_t at = unit_rand(&seed) % b.n;
        if (k % 2)
            at = at / PREFIX_DB_PAGE * PREFIX_DB_PAGE + unit_rand(&seed) % 64;
        char bit = (char)(1 << unit_rand(&seed) % 8);
        remove_files(home);
        b.data[at] ^= bit;
        OK_CALL(file_write_all(path_in(home, "prefix.db"), b.data, b.n, &e), e);
        b.data[at] ^= bit;
        bool replaced;
        int hits = check_store(&replaced, home, 40);
        anew += replaced;
        unharmed += hits == 40;
        lost += 40 - hits;
        OK_MSG(replaced || hits >= 10, "byte %d: only %d of 40", (int)at, hits);
    }
    OK_MSG(flips < 100 || (unharmed < flips * 9 / 10 && anew > 0), "%d unharmed", unharmed);
    printf("  %d flips: %d harmless, %d pages lost, %d times started anew\n", flips, unharmed, lost,
           anew);
    buf_fini(&b);
}

/* The same while the store is open: it heals itself, or keeps answering. */
static void test_damage_while_open_is_healed(void)
{
    for (int k = 0; k < 30; k++) {
        const char *home = unit_memdir(), *path = path_in(home, "prefix.db");
        fill_home(home);
        struct prefix_store *p = open_prefix(home, 1 << 26, 1 << 22);
        struct stat st;
        uint64_t seed = (uint64_t)k;
        p->pause_ms = 1;
        int fd = open(path, O_RDWR);
        OK(fd >= 0 && fstat(fd, &st) == 0);
        for (int f = 0; f < 1 << (k % 8); f++) {
            uint8_t junk[64];
            for (size_t i = 0; i < sizeof junk; i++)
                junk[i] = (uint8_t)unit_rand(&seed);
            off_t at = (off_t)(unit_rand(&seed) % ((uint64_t)st.st_size / PREFIX_DB_PAGE)) *
                       PREFIX_DB_PAGE;
            OK(pwrite(fd, junk, sizeof junk, at ? at : PREFIX_DB_PAGE) > 0);
        }
        close(fd);
        for (uint64_t i = 0; i < 60; i++) {
            get_page(p, i % 40, size_of(i % 40));
            put_page(p, 100 + i, size_of(i));
        }
        for (int i = 0; i < 5; i++) {
            usleep(1500);
            put_page(p, 200, 9000);
            prefix_flush(p, NULL);
        }
        OK(get_page(p, 200, 9000) == PREFIX_HIT);
        prefix_close(p);
        bool replaced;
        check_store(&replaced, home, 40);
    }
}

/* ---- no memory ---- */

static void test_no_memory_at_any_allocation_is_a_miss(void)
{
    const char *home = unit_memdir();
    int unopened = 0, missed = 0;
    uint64_t total = 1000;
    for (uint64_t n = 0; n <= total; n += 1 + n / 64) {
        struct prefix_store *p = NULL;
        struct err e = {0};
        struct prefix_moved m;
        struct prefix_model *models = NULL;
        size_t n_models;
        uint64_t before = mem_alloc_count();
        remove_files(home);
        unlink(path_in(home, "out.db"));
        mem_fail_at(n);
        if (prefix_open(&p, home, &(struct prefix_config){1 << 26, 1 << 20}, &e)) {
            mem_fail_at(0);
            OK_MSG(*e.msg, "allocation %d: no message", (int)n);
            unopened++;
            continue;
        }
        for (uint64_t i = 0; i < 6; i++) {
            put_page(p, i, size_of(i));
            if (i == 3)
                prefix_flush(p, NULL);
        }
        prefix_flush(p, NULL);
        for (uint64_t i = 0; i < 6; i++)
            missed += get_page(p, i, size_of(i)) != PREFIX_HIT;
        prefix_models(p, &models, &n_models, &e);
        mem_free(models);
        prefix_export(p, &m, path_in(home, "out.db"), NULL, NULL, &e);
        prefix_import(p, &m, path_in(home, "out.db"), NULL, NULL, &e);
        prefix_trim(p, 100000, &e);
        prefix_clear(p, NULL, &e);
        mem_fail_at(0);
        if (n == 0)
            total = mem_alloc_count() - before;
        OK(stats_of(p).replaced == 0 && stats_of(p).corrupt == 0);
        OK_MSG(put_page(p, 9, 9000) && prefix_flush(p, NULL) == 0, "allocation %d", (int)n);
        OK(get_page(p, 9, 9000) == PREFIX_HIT);
        prefix_close(p);
    }
    OK_MSG(unopened > 20 && missed > 5, "%d unopened, %d misses", unopened, missed);
}

static const struct unit_test tests[] = {
    {"kill_at_random_moments_loses_nothing_that_was_flushed",
     test_kill_at_random_moments_loses_nothing_that_was_flushed},
    {"kill_in_every_write_leaves_a_file_that_opens",
     test_kill_in_every_write_leaves_a_file_that_opens},
    {"full_disk_at_any_write_rests_and_goes_on", test_full_disk_at_any_write_rests_and_goes_on},
    {"while_the_disk_is_full_puts_are_refused_and_gets_work",
     test_while_the_disk_is_full_puts_are_refused_and_gets_work},
    {"a_flipped_bit_anywhere_gives_no_wrong_page", test_a_flipped_bit_anywhere_gives_no_wrong_page},
    {"damage_while_open_is_healed", test_damage_while_open_is_healed},
    {"no_memory_at_any_allocation_is_a_miss", test_no_memory_at_any_allocation_is_a_miss},
};

int main(int argc, char **argv)
{
    log_threshold = getenv("INGOT_LOG") ? LOG_WARN : LOG_ERROR;
    return unit_main(argc, argv, tests, ARRAY_LEN(tests));
}
