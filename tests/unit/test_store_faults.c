/* The store under faults: killed at any moment, disk full at any write, no memory at any
 * allocation, unreadable source. Each time: one clear line or none, the catalogue as it was or with
 * the whole model, and the next try succeeds. INGOT_KILLS sets the number of random
 * kills. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <time.h>

#include "store/store_internal.h"
#include "tests/unit/store_model.h"

static const struct test_model tiny = {.title = "Tiny", .seed = 1, .n_tensors = 2, .rows = 1300};

static int import_file(struct store *s, struct store_model *m, const char *path, struct err *e)
{
    struct store_import in = {.path = path, .name = "m"};
    s->batch_chunks = 1; /* more commits, more places to fail */
    return store_import(s, m, &in, e);
}

/* ---- after a fault ---- */

static bool sound_db(const char *path)
{
    sqlite3 *db = NULL;
    sqlite3_stmt *st = NULL;
    struct err e = {0};
    char word[200] = "";
    bool row = false;
    OK_CALL(db_open(&db, path, DB_WRITE, &e), e);
    OK_CALL(db_query(&st, db, &e, "PRAGMA integrity_check", ""), e);
    OK_CALL(db_step(&row, st, &e), e);
    if (row)
        db_text(word, sizeof word, st, 0);
    sqlite3_finalize(st);
    db_close(db);
    return OK_MSG(!strcmp(word, "ok"), "%s: %s", path, word);
}

static void check_databases(const char *home)
{
    char path[900];
    snprintf(path, sizeof path, "%s/models", home);
    DIR *d = opendir(path);
    for (struct dirent *f; d && (f = readdir(d));) {
        size_t n = strlen(f->d_name);
        snprintf(path, sizeof path, "%s/models/%s", home, f->d_name);
        if (n > 3 && !strcmp(f->d_name + n - 3, ".db"))
            sound_db(path);
    }
    if (d)
        closedir(d);
    if (access(in_dir(home, "ingot.db"), F_OK) == 0)
        sound_db(in_dir(home, "ingot.db"));
}

/* No model or a whole one; returns whether there is one. */
static bool none_or_whole(const char *home, const char *path)
{
    struct store *s = NULL;
    struct store_model m;
    struct err e = {0};
    check_databases(home);
    if (!OK_CALL(store_open(&s, home, &e), e))
        return false;
    bool found = store_find(s, &m, "m", &e) == 0;
    OK_MSG(found || e.code == ERR_NOT_FOUND, "%s", e.msg);
    if (found)
        reads_like(s, "m", path);
    store_close(s);
    return found;
}

/* The next try must succeed and leave nothing behind. */
static void finish_import(const char *home, const char *path, const char *digest)
{
    struct store *s = NULL;
    struct store_model m = {0};
    struct err e = {0};
    const char *out = in_dir(home, "out.gguf");
    if (!OK_CALL(store_open(&s, home, &e), e))
        return;
    OK_CALL(import_file(s, &m, path, &e), e);
    OK(!strcmp(m.digest, digest));
    OK_CALL(store_export(s, "m", out, true, NULL, NULL, &e), e);
    OK(same_files(path, out));
    OK_MSG(count_files(home, "partial*") == 0, "a partial database is left");
    OK_MSG(count_files(home, "[0-9a-f]*.db") == 1, "not one model database");
    store_close(s);
}

static void digest_of(char digest[65], const char *home, const char *path)
{
    struct store *s = NULL;
    struct store_model m = {0};
    struct err e = {0};
    OK_CALL(store_open(&s, home, &e), e);
    OK_CALL(import_file(s, &m, path, &e), e);
    memcpy(digest, m.digest, 65);
    store_close(s);
}

static void remove_tree(const char *path)
{
    DIR *d = opendir(path);
    for (struct dirent *f; d && (f = readdir(d));)
        if (strcmp(f->d_name, ".") && strcmp(f->d_name, ".."))
            remove_tree(in_dir(path, f->d_name));
    if (d)
        closedir(d);
    remove(path);
}

/* ---- a seam in SQLite's own: its writes, counted ---- */

typedef ssize_t (*pwrite_fn)(int, const void *, size_t, off_t);
static pwrite_fn real_pwrite;
static long writes_left;           /* the write that takes it to 0 fails, and all after it */
static bool kill_there;            /* ... by SIGKILL in the middle of the write */
static const char *no_room_beside; /* while this file is there, every write fails */

static ssize_t failing_pwrite(int fd, const void *p, size_t n, off_t at)
{
    if (no_room_beside && access(no_room_beside, F_OK) == 0) {
        errno = ENOSPC;
        return -1;
    }
    if (writes_left && --writes_left == 0) {
        if (kill_there) {
            if (pwrite(fd, p, n / 2, at) >= 0)
                kill(getpid(), SIGKILL);
        }
        writes_left = 1; /* a full disk stays full */
        errno = ENOSPC;
        return -1;
    }
    return real_pwrite(fd, p, n, at);
}

static void hook_writes(void)
{
    sqlite3_vfs *v;
    if (real_pwrite || sqlite3_initialize() || !(v = sqlite3_vfs_find(NULL)))
        return;
    static const char *const names[] = {"pwrite64", "pwrite"};
    for (size_t i = 0; i < ARRAY_LEN(names) && !real_pwrite; i++) {
        real_pwrite = (pwrite_fn)v->xGetSystemCall(v, names[i]);
        if (real_pwrite)
            OK(v->xSetSystemCall(v, names[i], (sqlite3_syscall_ptr)failing_pwrite) == SQLITE_OK);
    }
    CHECK(real_pwrite);
}

/* A store that has seen the library configured, so that the hook does not come first. */
static const char *hooked_home(void)
{
    const char *home = in_dir(unit_memdir(), "home");
    struct store *s = NULL;
    struct err e = {0};
    OK_CALL(store_open(&s, home, &e), e);
    store_close(s);
    hook_writes();
    return home;
}

/* ---- kill ---- */

static int run_child(const char *home, const char *path)
{
    struct store *s = NULL;
    struct store_model m;
    int rc = store_open(&s, home, NULL) || import_file(s, &m, path, NULL);
    store_close(s);
    return rc;
}

static void test_kill_at_random_moments_leaves_none_or_whole(void)
{
    const char *dir = unit_memdir(), *home = in_dir(dir, "home"), *a = in_dir(dir, "a.gguf");
    const char *asked = getenv("INGOT_KILLS");
    int kills = asked ? atoi(asked) : 20, whole = 0, resumed = 0;
    char digest[65];
    uint64_t seed = now_ns();
    struct test_model t = tiny;
    t.n_tensors = 5;
    t.rows = 4096; /* 20 MB */
    write_model(a, t);
    uint64_t t0 = now_ns();
    digest_of(digest, home, a);
    uint64_t took_us = (now_ns() - t0) / 1000;
    remove_tree(home);
    for (int i = 0; i < kills; i++) {
        uint64_t us = unit_rand(&seed) % (took_us + took_us / 8);
        pid_t pid = fork();
        if (pid == 0)
            _exit(run_child(home, a));
        nanosleep(&(struct timespec){(time_t)(us / 1000000), (long)(us % 1000000) * 1000}, NULL);
        kill(pid, SIGKILL);
        int status;
        OK(waitpid(pid, &status, 0) == pid);
        OK_MSG(WIFSIGNALED(status) || WEXITSTATUS(status) == 0, "import failed: %x",
               (unsigned)status);
        bool found = none_or_whole(home, a);
        whole += found;
        resumed += !found && count_files(home, "partial-*.db") == 1;
        /* Half of them go on with what the last left, so that kills hit resumed imports too. */
        if (found || i % 2) {
            finish_import(home, a, digest);
            remove_tree(home);
        }
    }
    OK_MSG(kills < 20 || resumed > kills / 5, "only %d of %d kills left a partial import", resumed,
           kills);
    printf("  %d kills: %d after the end, %d left a partial import\n", kills, whole, resumed);
}

/* Every write that SQLite does, the last one torn in the middle: no luck is needed to hit the
 * moments between rename and commit. */
static void test_kill_in_every_write_leaves_none_or_whole(void)
{
    const char *home = hooked_home(), *a = in_dir(unit_memdir(), "a.gguf");
    char digest[65];
    int n = 0, orphans = 0, n_found = 0;
    write_model(a, tiny);
    digest_of(digest, home, a);
    for (bool killed = true; killed && n < 2000; n++) {
        int status;
        remove_tree(home);
        pid_t pid = fork();
        if (pid == 0) {
            writes_left = n + 1;
            kill_there = true;
            _exit(run_child(home, a));
        }
        OK(waitpid(pid, &status, 0) == pid);
        killed = WIFSIGNALED(status);
        bool found = none_or_whole(home, a);
        OK_MSG(found || killed, "write %d: finished, but nothing there", n);
        n_found += found;
        bool orphan = !found && count_files(home, "[0-9a-f]*.db") == 1;
        orphans += orphan;
        if (orphan || n % 3 == 0)
            finish_import(home, a, digest);
    }
    OK_MSG(n > 30 && n < 2000, "%d writes", n);
    OK_MSG(orphans > 0, "no kill between rename and commit");
    OK_MSG(n_found < n / 2, "a whole model after %d of %d kills", n_found, n);
    printf("  %d writes, %d kills between rename and commit\n", n, orphans);
}

/* The same for removal: the name is gone or the model is whole, and no file stays for ever. */
static void test_kill_during_removal_leaves_no_file_behind(void)
{
    const char *home = hooked_home(), *a = in_dir(unit_memdir(), "a.gguf");
    char digest[65];
    struct store *s = NULL;
    struct err e = {0};
    write_model(a, tiny);
    for (int n = 0, killed = 1; killed && n < 200; n++) {
        int status;
        remove_tree(home);
        digest_of(digest, home, a);
        pid_t pid = fork();
        if (pid == 0) {
            int rc = store_open(&s, home, NULL);
            writes_left = n + 1;
            kill_there = true;
            rc = rc || store_remove(s, "m", NULL);
            store_close(s);
            _exit(rc);
        }
        OK(waitpid(pid, &status, 0) == pid);
        killed = WIFSIGNALED(status);
        bool found = none_or_whole(home, a); /* opening the store sweeps */
        OK_MSG(count_files(home, "[0-9a-f]*.db") == found, "write %d: the file was left", n);
        OK(killed || !found);
        OK_CALL(store_open(&s, home, &e), e);
        store_close(s);
    }
}

/* ---- full disk ---- */

static void test_full_disk_at_any_write_is_one_clear_line(void)
{
    const char *home = hooked_home(), *a = in_dir(unit_memdir(), "a.gguf");
    char digest[65];
    int n = 0, rc = -1;
    write_model(a, tiny);
    digest_of(digest, home, a);
    for (; rc && n < 2000; n++) {
        struct store *s = NULL;
        struct store_model m;
        struct err e = {0};
        remove_tree(home);
        OK_CALL(store_open(&s, home, &e), e);
        writes_left = n + 1;
        rc = import_file(s, &m, a, &e);
        writes_left = 0;
        OK_MSG(rc ? e.code == ERR_FULL && strstr(e.msg, "full") : !e.code, "write %d: %d '%s'", n,
               e.code, e.msg);
        e = (struct err){0};
        bool found = store_find(s, &m, "m", &e) == 0;
        OK_MSG(found == !rc, "write %d: the catalogue is wrong", n);
        store_close(s);
        none_or_whole(home, a);
        if (n % 4 == 0)
            finish_import(home, a, digest);
    }
    OK_MSG(n > 30 && n < 2000, "%d writes", n);
}

/* A disk that another program filled: what is in the store is read, exported and removed. */
static void test_store_on_a_full_disk_is_read_and_emptied(void)
{
    const char *home = hooked_home(), *dir = unit_memdir(), *a = in_dir(dir, "a.gguf");
    char digest[65], rel[100];
    struct store *s = NULL;
    struct store_model m, *all = NULL;
    struct err e = {0};
    size_t n = 0;
    write_model(a, tiny);
    digest_of(digest, home, a);
    snprintf(rel, sizeof rel, "models/%s.db", digest);
    no_room_beside = in_dir(home, rel);
    if (!OK_CALL(store_open(&s, home, &e), e))
        goto out;
    OK_CALL(store_list(s, &all, &n, &e), e);
    OK(n == 1);
    reads_like(s, "m", a);
    OK_CALL(store_export(s, "m", in_dir(dir, "o.gguf"), false, NULL, NULL, &e), e);
    OK(same_files(a, in_dir(dir, "o.gguf")));
    OK(store_copy(s, "m", "copy", &e) && e.code == ERR_FULL && strstr(e.msg, "free some space"));
    e = (struct err){0};
    OK(store_remove(s, "x", &e) && e.code == ERR_NOT_FOUND);
    e = (struct err){0};
    OK_CALL(store_remove(s, "m", &e), e);
    OK(store_find(s, &m, "m", &e) && e.code == ERR_NOT_FOUND);
    OK(count_files(home, "[0-9a-f]*.db") == 0);
    e = (struct err){0};
    no_room_beside = NULL;
    OK_CALL(import_file(s, &m, a, &e), e); /* the same store goes on... */
    OK_CALL(store_copy(s, "m", "copy", &e), e);
    store_close(s);
    no_room_beside = in_dir(home, rel);
    OK_CALL(store_open(&s, home, &e), e);
    /* ... and a file that has another name stays. */
    OK(store_remove(s, "m", &e) && e.code == ERR_FULL && reads_like(s, "copy", a));
out:
    no_room_beside = NULL;
    mem_free(all);
    store_close(s);
    none_or_whole(home, a);
}

static void test_new_store_on_a_full_disk_says_so(void)
{
    const char *home = hooked_home(), *other = in_dir(unit_memdir(), "other");
    struct store *s = NULL;
    struct err e = {0};
    no_room_beside = home; /* always there */
    OK(store_open(&s, other, &e) && e.code == ERR_FULL && strstr(e.msg, "free some space"));
    no_room_beside = NULL;
    e = (struct err){0};
    OK_CALL(store_open(&s, other, &e), e);
    store_close(s);
}

/* ---- no memory, no reading ---- */

/* Everything a load does, as one call that fails or succeeds. */
static int whole_round(const char *home, const char *path, struct err *e)
{
    struct store *s = NULL;
    struct store_model m, *all = NULL;
    struct model_file *f = NULL;
    size_t n;
    static uint8_t got[300000];
    int rc = store_open(&s, home, e);
    if (!rc)
        rc = import_file(s, &m, path, e);
    if (!rc)
        rc = store_list(s, &all, &n, e);
    if (!rc)
        rc = model_file_open(&f, s, "m", e);
    if (!rc)
        rc = model_file_read(f, &model_file_gguf(f)->tensors[1], got, 5, sizeof got, e);
    if (!rc)
        rc = store_export(s, "m", in_dir(home, "o.gguf"), true, NULL, NULL, e);
    if (!rc)
        rc = store_copy(s, "m", "copy", e);
    if (!rc)
        rc = store_remove(s, "copy", e);
    mem_free(all);
    model_file_close(f);
    store_close(s);
    return rc;
}

static void test_no_memory_at_any_allocation_is_an_error(void)
{
    const char *dir = unit_memdir(), *home = in_dir(dir, "home"), *a = in_dir(dir, "a.gguf");
    struct err e = {0};
    char digest[65];
    int failed = 0;
    write_model(a, (struct test_model){.title = "T", .seed = 1, .n_tensors = 2, .rows = 550});
    digest_of(digest, home, a);
    remove_tree(home);
    uint64_t before = mem_alloc_count();
    OK_CALL(whole_round(home, a, &e), e);
    uint64_t total = mem_alloc_count() - before;
    /* Every one of the first, then ever fewer: the same places come again and again. */
    for (uint64_t n = 1; n <= total; n += 1 + n / 64) {
        e = (struct err){0};
        remove_tree(home);
        mem_fail_at(n);
        int rc = whole_round(home, a, &e);
        mem_fail_at(0);
        failed += rc != 0;
        OK_MSG(!rc == !e.code && (!rc || *e.msg), "allocation %d: %d '%s'", (int)n, rc, e.msg);
        if (rc && e.code != ERR_MEMORY)
            OK_MSG(e.code == ERR_IO || e.code == ERR_CORRUPT, "allocation %d: %s", (int)n, e.msg);
        if (rc && n % 8 == 0) {
            none_or_whole(home, a);
            finish_import(home, a, digest);
        }
    }
    OK_MSG(failed > 50, "only %d of %d allocations mattered", failed, (int)total);
}

static void test_unreadable_source_is_an_error(void)
{
    const char *dir = unit_memdir(), *home = in_dir(dir, "home"), *a = in_dir(dir, "a.gguf");
    char digest[65];
    int rc = -1;
    uint64_t n = 1;
    write_model(a, tiny);
    digest_of(digest, home, a);
    for (; rc && n < 100; n++) {
        struct store *s = NULL;
        struct store_model m;
        struct err e = {0};
        remove_tree(home);
        OK_CALL(store_open(&s, home, &e), e);
        file_fail_at(n, EIO);
        rc = import_file(s, &m, a, &e);
        file_fail_at(0, 0);
        OK_MSG(rc ? e.code == ERR_IO && strstr(e.msg, "a.gguf") : !e.code, "read %d: '%s'", (int)n,
               e.msg);
        store_close(s);
        none_or_whole(home, a);
        finish_import(home, a, digest);
    }
    OK_MSG(n > 4 && n < 100, "%d reads", (int)n);
}

static void test_failed_export_leaves_no_file(void)
{
    const char *dir = unit_memdir(), *home = in_dir(dir, "home"), *a = in_dir(dir, "a.gguf");
    char digest[65];
    struct store *s = NULL;
    struct err e = {0};
    int rc = -1;
    write_model(a, tiny);
    digest_of(digest, home, a);
    OK_CALL(store_open(&s, home, &e), e);
    for (uint64_t n = 1; rc && n < 100; n++) {
        e = (struct err){0};
        file_fail_at(n, ENOSPC);
        rc = store_export(s, "m", in_dir(dir, "o.gguf"), false, NULL, NULL, &e);
        file_fail_at(0, 0);
        OK_MSG(rc ? e.code == ERR_FULL && strstr(e.msg, "o.gguf") : !e.code, "write %d: '%s'",
               (int)n, e.msg);
        OK(access(in_dir(dir, "o.gguf.partial"), F_OK) != 0);
        OK((access(in_dir(dir, "o.gguf"), F_OK) == 0) == !rc);
    }
    OK(rc == 0 && same_files(a, in_dir(dir, "o.gguf")));
    store_close(s);
}

int main(int argc, char **argv)
{
    static const struct unit_test tests[] = {
        {"kill_at_random_moments_leaves_none_or_whole",
         test_kill_at_random_moments_leaves_none_or_whole},
        {"kill_in_every_write_leaves_none_or_whole", test_kill_in_every_write_leaves_none_or_whole},
        {"kill_during_removal_leaves_no_file_behind",
         test_kill_during_removal_leaves_no_file_behind},
        {"full_disk_at_any_write_is_one_clear_line", test_full_disk_at_any_write_is_one_clear_line},
        {"store_on_a_full_disk_is_read_and_emptied", test_store_on_a_full_disk_is_read_and_emptied},
        {"new_store_on_a_full_disk_says_so", test_new_store_on_a_full_disk_says_so},
        {"no_memory_at_any_allocation_is_an_error", test_no_memory_at_any_allocation_is_an_error},
        {"unreadable_source_is_an_error", test_unreadable_source_is_an_error},
        {"failed_export_leaves_no_file", test_failed_export_leaves_no_file},
    };
    return unit_main(argc, argv, tests, ARRAY_LEN(tests));
}
