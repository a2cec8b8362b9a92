/* The store's contract: what goes in comes out, names find what they should, what is damaged or
 * changed is refused by name, and a failed call changes nothing. */
#define _GNU_SOURCE /* memmem */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "store/store_internal.h"
#include "tests/unit/store_model.h"

static const struct test_model small = {
    .title = "Tiny Test", .seed = 1, .n_tensors = 3, .rows = 1500};

/* Import with defaults; returns the store_import result. */
static int import_as(struct store *s, struct store_model *m, const char *path, const char *name,
                     struct err *e)
{
    struct store_import in = {.path = path, .name = name};
    struct err unused = {0};
    return store_import(s, m, &in, e ? e : &unused);
}

static struct store *open_store(const char *home)
{
    struct store *s = NULL;
    struct err e = {0};
    OK_CALL(store_open(&s, home, &e), e);
    return s;
}

static void refused(struct err *e, enum err_code code, const char *word, int line)
{
    unit_check(e->code == code && strstr(e->msg, word), __FILE__, line,
               "code %d, '%s'; want %d, '%s'", e->code, e->msg, code, word);
    *e = (struct err){0};
}
#define REFUSED(call, e, code, word) (OK((call) != 0), refused(&(e), code, word, __LINE__))

/* ---- in and out ---- */

static void test_export_gives_back_every_byte(void)
{
    const char *dir = unit_tmpdir(), *a = in_dir(dir, "a.gguf"), *b = in_dir(dir, "b.gguf");
    struct store *s = open_store(in_dir(dir, "home"));
    struct store_model m;
    struct err e = {0};
    write_model(a, small);
    OK_CALL(import_as(s, &m, a, NULL, &e), e);
    OK(!strcmp(m.name, "tiny-test:f32") && !strcmp(m.arch, "llama") && !strcmp(m.quant, "F32"));
    OK(m.n_ctx == 2048 && m.n_params == 256 * (1500 + 1501 + 1502) && m.n_shards == 1);
    OK(!*m.link_path && m.added > 1600000000 && strlen(m.digest) == 64);
    OK_CALL(store_export(s, m.name, b, false, NULL, NULL, &e), e);
    OK(same_files(a, b));
    char cmd[900];
    snprintf(cmd, sizeof cmd, "echo '%s  %s' | sha256sum --quiet -c", m.digest, a);
    OK(system(cmd) == 0);
    REFUSED(store_export(s, m.name, b, false, NULL, NULL, &e), e, ERR_EXISTS, "b.gguf");
    OK_CALL(store_export(s, m.name, b, true, NULL, NULL, &e), e);
    OK(access(in_dir(dir, "b.gguf.partial"), F_OK) != 0);
    OK(reads_like(s, m.name, a));
    store_close(s);
}

static void test_shards_come_and_go_as_a_set(void)
{
    const char *dir = unit_tmpdir();
    char path[600], out[600];
    struct store *s = open_store(in_dir(dir, "home"));
    struct store_model m;
    struct err e = {0};
    for (uint32_t i = 0; i < 3; i++) {
        struct test_model t = small;
        t.title = NULL;
        t.shard = i;
        t.n_shards = 3;
        snprintf(path, sizeof path, "%s/Big-F32-%05u-of-00003.gguf", dir, i + 1);
        write_model(path, t);
    }
    snprintf(path, sizeof path, "%s/Big-F32-00001-of-00003.gguf", dir);
    OK_CALL(import_as(s, &m, path, NULL, &e), e);
    OK(m.n_shards == 3 && !strcmp(m.name, "big:f32"));
    OK_CALL(store_export(s, "big", in_dir(dir, "out.gguf"), false, NULL, NULL, &e), e);
    for (uint32_t i = 0; i < 3; i++) {
        snprintf(path, sizeof path, "%s/Big-F32-%05u-of-00003.gguf", dir, i + 1);
        snprintf(out, sizeof out, "%s/out-%05u-of-00003.gguf", dir, i + 1);
        OK(same_files(path, out));
    }
    snprintf(path, sizeof path, "%s/Big-F32-00001-of-00003.gguf", dir);
    OK(reads_like(s, "big", path));
    struct store_import in = {.path = path, .name = "linked", .link = true};
    OK_CALL(store_import(s, &m, &in, &e), e);
    OK(reads_like(s, "linked", path));
    store_close(s);
}

struct second_export {
    struct store *s;
    const char *path;
    uint64_t at;         /* start it once so many bytes are written */
    enum err_code found; /* how it ended */
};

static int export_meanwhile(void *user, uint64_t done, uint64_t total)
{
    struct second_export *x = user;
    struct err e = {0};
    if (done < x->at || x->found)
        return 0;
    store_export(x->s, "big", x->path, true, NULL, NULL, &e);
    x->found = e.code;
    return 0;
}

static void test_two_exports_to_one_path_do_not_mix(void)
{
    const char *dir = unit_tmpdir(), *out = in_dir(dir, "out.gguf");
    char path[600];
    struct store *s = open_store(in_dir(dir, "home"));
    struct store_model m;
    struct err e = {0};
    for (uint32_t i = 0; i < 3; i++) {
        struct test_model t = {.seed = 7, .n_tensors = 1, .rows = 900, .shard = i, .n_shards = 3};
        snprintf(path, sizeof path, "%s/in-%05u-of-00003.gguf", dir, i + 1);
        write_model(path, t);
    }
    snprintf(path, sizeof path, "%s/in-00001-of-00003.gguf", dir);
    OK_CALL(import_as(s, &m, path, "big", &e), e);
    /* The last shard is being written: the first ones are whole, but not published. */
    struct second_export x = {s, out, m.n_bytes * 5 / 6, ERR_NONE};
    OK_CALL(store_export(s, "big", out, false, export_meanwhile, &x, &e), e);
    OK_MSG(x.found == ERR_BUSY, "code %d", x.found);
    snprintf(path, sizeof path, "%s/out-00001-of-00003.gguf", dir);
    OK(reads_like(s, "big", path));
    store_close(s);
}

static void test_export_replaces_files_only(void)
{
    const char *dir = unit_tmpdir(), *a = in_dir(dir, "a.gguf"), *pipe = in_dir(dir, "pipe");
    struct store *s = open_store(in_dir(dir, "home"));
    struct store_model m;
    struct stat st;
    struct err e = {0};
    write_model(a, small);
    OK_CALL(import_as(s, &m, a, "m", &e), e);
    OK(mkfifo(pipe, 0600) == 0);
    REFUSED(store_export(s, "m", pipe, true, NULL, NULL, &e), e, ERR_USAGE, "not a regular file");
    OK(stat(pipe, &st) == 0 && S_ISFIFO(st.st_mode));
    store_close(s);
}

static void test_same_bytes_are_stored_once(void)
{
    const char *dir = unit_tmpdir(), *home = in_dir(dir, "home"), *a = in_dir(dir, "a.gguf");
    struct store *s = open_store(home);
    struct store_model m, again;
    struct err e = {0};
    write_model(a, small);
    OK_CALL(import_as(s, &m, a, "one", &e), e);
    OK_CALL(import_as(s, &again, a, "two", &e), e);
    OK_CALL(import_as(s, &again, a, "two", &e), e);
    OK(!strcmp(m.digest, again.digest) && count_files(home, "[0-9a-f]*.db") == 1);
    OK_CALL(store_copy(s, "one", "three", &e), e);
    REFUSED(store_copy(s, "one", "TWO", &e), e, ERR_EXISTS, "two");
    struct store_model *all;
    size_t n;
    OK_CALL(store_list(s, &all, &n, &e), e);
    OK(n == 3 && !strcmp(all[0].name, "one") && !strcmp(all[1].name, "three"));
    mem_free(all);
    OK_CALL(store_remove(s, "one", &e), e);
    OK_CALL(store_remove(s, "two", &e), e);
    OK(count_files(home, "[0-9a-f]*.db") == 1 && reads_like(s, "three", a));
    OK_CALL(store_remove(s, "three", &e), e);
    OK(count_files(home, "[0-9a-f]*.db") == 0);
    REFUSED(store_remove(s, "three", &e), e, ERR_NOT_FOUND, "three");
    OK_CALL(import_as(s, &m, a, "one", &e), e);
    OK(reads_like(s, "one", a));
    store_close(s);
}

static void test_taken_names_are_kept_unless_replaced(void)
{
    const char *dir = unit_tmpdir(), *home = in_dir(dir, "home");
    const char *a = in_dir(dir, "a.gguf"), *b = in_dir(dir, "b.gguf");
    struct store *s = open_store(home);
    struct store_model m, other;
    struct err e = {0};
    struct test_model t = small;
    write_model(a, t);
    t.seed = 2; /* the same header and size */
    write_model(b, t);
    OK_CALL(import_as(s, &m, a, "it", &e), e);
    REFUSED(import_as(s, &other, b, "it", &e), e, ERR_EXISTS, "'it' is taken");
    OK_CALL(store_find(s, &other, "it", &e), e);
    OK(!strcmp(other.digest, m.digest) && count_files(home, "[0-9a-f]*.db") == 1);
    struct store_import in = {.path = b, .name = "IT", .replace = true};
    OK_CALL(store_import(s, &other, &in, &e), e);
    OK(strcmp(other.digest, m.digest) && count_files(home, "[0-9a-f]*.db") == 1);
    OK(reads_like(s, "it", b));
    OK(count_files(home, "partial*") == 0);
    store_close(s);
}

static void test_wrong_digest_is_refused(void)
{
    const char *dir = unit_tmpdir(), *home = in_dir(dir, "home"), *a = in_dir(dir, "a.gguf");
    struct store *s = open_store(home);
    struct store_model m, *all;
    struct err e = {0};
    size_t n;
    char wrong[65];
    memset(wrong, 'a', 64);
    wrong[64] = 0;
    write_model(a, small);
    struct store_import in = {.path = a, .expect_sha256 = wrong};
    REFUSED(store_import(s, &m, &in, &e), e, ERR_CORRUPT, wrong);
    in.link = true;
    REFUSED(store_import(s, &m, &in, &e), e, ERR_CORRUPT, wrong);
    in.expect_sha256 = "12";
    REFUSED(store_import(s, &m, &in, &e), e, ERR_USAGE, "12");
    OK_CALL(store_list(s, &all, &n, &e), e);
    OK(n == 0 && count_files(home, "[0-9a-fp]*.db") == 0);
    mem_free(all);
    in = (struct store_import){.path = a};
    OK_CALL(store_import(s, &m, &in, &e), e);
    in.expect_sha256 = m.digest;
    OK_CALL(store_import(s, &m, &in, &e), e);
    store_close(s);
}

static void test_no_gguf_is_refused(void)
{
    const char *dir = unit_tmpdir(), *a = in_dir(dir, "a.gguf");
    struct store *s = open_store(in_dir(dir, "home"));
    struct store_model m;
    struct err e = {0};
    REFUSED(import_as(s, &m, a, NULL, &e), e, ERR_NOT_FOUND, "a.gguf");
    OK_CALL(file_write_all(a, "GGUFnonsense", 12, &e), e);
    OK(import_as(s, &m, a, NULL, NULL) != 0);
    REFUSED(import_as(s, &m, dir, NULL, &e), e, ERR_USAGE, "directory");
    OK_CALL(file_write_all(a, "", 0, &e), e);
    OK(import_as(s, &m, a, NULL, NULL) != 0);
    store_close(s);
}

static void test_reference_models_come_back(void)
{
    static const char *const names[] = {"refs/llama.gguf", "refs/bert.gguf", "refs/llama_moe.gguf",
                                        "refs/deepseek2_mla-Q8_0.gguf"};
    const char *dir = unit_tmpdir();
    struct store *s = open_store(in_dir(dir, "home"));
    for (size_t i = 0; i < ARRAY_LEN(names); i++) {
        struct store_model m;
        struct err e = {0};
        const char *path = unit_shared(names[i]), *out = in_dir(dir, "out.gguf");
        if (!path)
            break;
        OK_CALL(import_as(s, &m, path, "ref", &e), e);
        OK(*m.arch && *m.quant && m.n_params && reads_like(s, "ref", path));
        OK_CALL(store_export(s, "ref", out, true, NULL, NULL, &e), e);
        OK(same_files(path, out));
        OK_CALL(store_remove(s, "ref", &e), e);
    }
    store_close(s);
}

/* ---- interrupted and concurrent imports ---- */

struct stop_at {
    uint64_t bytes;
    int calls;
    struct store *inner; /* import the same file through it, from within */
    const char *path;
};

static int stop(void *user, uint64_t done, uint64_t total)
{
    struct stop_at *at = user;
    at->calls++;
    if (at->inner && at->calls == 2) {
        struct store_model m;
        struct err e = {0};
        at->inner->lock_wait_ms = 60;
        REFUSED(import_as(at->inner, &m, at->path, "other", &e), e, ERR_BUSY, "being imported");
    }
    return OK(done <= total) && at->bytes && done >= at->bytes;
}

/* The one file in <home>/models with a name of this pattern. */
static const char *only_file(const char *home, const char *pattern)
{
    const char *models = in_dir(home, "models"), *path = "/nowhere";
    DIR *d = opendir(models);
    for (struct dirent *f; d && (f = readdir(d));)
        if (fnmatch(pattern, f->d_name, 0) == 0)
            path = in_dir(models, f->d_name);
    if (d)
        closedir(d);
    return path;
}

/* Leave a mark in a model database, to know it again; with `look`, is it there? */
static bool mark(const char *path, bool look)
{
    sqlite3 *db = NULL;
    chmod(path, 0600);
    bool there = !db_open(&db, path, DB_WRITE, NULL) &&
                 !db_exec(db, look ? "SELECT * FROM mark" : "CREATE TABLE mark(x)", NULL);
    db_close(db);
    return there;
}

static void test_cancelled_import_goes_on_where_it_was(void)
{
    const char *dir = unit_tmpdir(), *home = in_dir(dir, "home"), *a = in_dir(dir, "a.gguf");
    struct store *s = open_store(home);
    struct store_model m;
    struct err e = {0};
    struct stop_at at = {.bytes = 3 << 20};
    struct store_import in = {.path = a, .name = "m", .progress = stop, .user = &at};
    write_model(a, small);
    REFUSED(store_import(s, &m, &in, &e), e, ERR_CANCELLED, "cancelled");
    REFUSED(store_find(s, &m, "m", &e), e, ERR_NOT_FOUND, "'m'");
    OK(count_files(home, "partial-*.db") == 1);
    OK(count_files(home, "partial-*.db-journal") == 0);
    OK(mark(only_file(home, "partial-*.db"), false));
    at.bytes = 0;
    OK_CALL(store_import(s, &m, &in, &e), e);
    OK(mark(only_file(home, "[0-9a-f]*.db"), true));
    OK(count_files(home, "partial*") == 0 && reads_like(s, "m", a));
    store_close(s);
}

/* What a kill between the rename and the catalogue's commit leaves. */
static void test_whole_model_without_a_name_is_adopted(void)
{
    const char *dir = unit_tmpdir(), *home = in_dir(dir, "home"), *a = in_dir(dir, "a.gguf");
    struct store *s = open_store(home);
    struct store_model m;
    struct err e = {0};
    write_model(a, small);
    OK_CALL(import_as(s, &m, a, "m", &e), e);
    OK(mark(only_file(home, "[0-9a-f]*.db"), false));
    OK_CALL(db_exec(s->db, "DELETE FROM name; DELETE FROM model", &e), e);
    store_close(s);
    s = open_store(home);
    OK(count_files(home, "[0-9a-f]*.db") == 1); /* nothing is deleted that was not asked for */
    OK_CALL(import_as(s, &m, a, "m", &e), e);
    OK(mark(only_file(home, "[0-9a-f]*.db"), true) && reads_like(s, "m", a));
    store_close(s);
}

/* That what was stored is really used: change it behind the import's back where a comparison must
 * notice, and see that it starts afresh rather than mixing two files. */
static void test_resume_notices_another_file(void)
{
    const char *dir = unit_tmpdir(), *home = in_dir(dir, "home"), *a = in_dir(dir, "a.gguf");
    struct store *s = open_store(home);
    struct store_model m;
    struct err e = {0};
    struct stop_at at = {.bytes = 3 << 20};
    struct store_import in = {.path = a, .name = "m", .progress = stop, .user = &at};
    struct test_model t = small;
    write_model(a, t);
    REFUSED(store_import(s, &m, &in, &e), e, ERR_CANCELLED, "cancelled");
    t.seed = 7;
    write_model(a, t);
    at = (struct stop_at){0};
    OK_CALL(store_import(s, &m, &in, &e), e);
    /* one chunk compared, then five chunks and the header again */
    OK_MSG(at.calls == 8, "%d calls", at.calls);
    OK(reads_like(s, "m", a) && count_files(home, "partial*") == 0);
    OK_CALL(store_export(s, "m", in_dir(dir, "b.gguf"), false, NULL, NULL, &e), e);
    store_close(s);
}

static void test_second_import_of_a_file_is_told_to_wait(void)
{
    const char *dir = unit_tmpdir(), *home = in_dir(dir, "home"), *a = in_dir(dir, "a.gguf");
    struct store *s = open_store(home), *s2 = open_store(home);
    struct store_model m;
    struct err e = {0};
    struct stop_at at = {.inner = s2, .path = a};
    struct store_import in = {.path = a, .progress = stop, .user = &at};
    write_model(a, small);
    OK_CALL(store_import(s, &m, &in, &e), e);
    OK_CALL(import_as(s2, &m, a, "other", &e), e);
    store_close(s2);
    store_close(s);
}

static void test_processes_share_a_store(void)
{
    enum { N = 4 };
    const char *dir = unit_tmpdir(), *home = in_dir(dir, "home");
    char path[N][600], name[32];
    pid_t pid[N];
    for (int i = 0; i < N; i++) {
        struct test_model t = small;
        t.seed = (uint64_t)i;
        t.rows = 700;
        snprintf(path[i], sizeof path[i], "%s/%d.gguf", dir, i % 3); /* two import one file */
        write_model(path[i], t);
    }
    for (int i = 0; i < N; i++) {
        snprintf(name, sizeof name, "m%d", i);
        if ((pid[i] = fork()) == 0) {
            struct store *s = NULL;
            struct store_model m;
            struct err e = {0};
            char copy[40];
            snprintf(copy, sizeof copy, "copy-of-%s", name);
            int rc = store_open(&s, home, &e) || import_as(s, &m, path[i], name, &e) ||
                     store_copy(s, name, copy, &e);
            if (rc)
                fprintf(stderr, "%s\n", e.msg);
            store_close(s);
            _exit(rc);
        }
    }
    for (int i = 0; i < N; i++) {
        int status = -1;
        OK(waitpid(pid[i], &status, 0) == pid[i]);
        OK_MSG(status == 0, "process %d: %x", i, (unsigned)status);
    }
    struct store *s = open_store(home);
    for (int i = 0; i < N; i++) {
        snprintf(name, sizeof name, "m%d", i);
        OK(reads_like(s, name, path[i]));
    }
    struct store_model *all;
    size_t n = 0;
    OK(store_list(s, &all, &n, NULL) == 0 && n == 2 * N);
    mem_free(all);
    OK(count_files(home, "[0-9a-f]*.db") == 3);
    store_close(s);
}

static void test_old_partials_are_swept(void)
{
    const char *dir = unit_tmpdir(), *home = in_dir(dir, "home"), *a = in_dir(dir, "a.gguf");
    struct store *s = open_store(home);
    struct store_model m;
    struct err e = {0};
    struct stop_at at = {.bytes = 1 << 20};
    struct store_import in = {.path = a, .progress = stop, .user = &at};
    write_model(a, small);
    REFUSED(store_import(s, &m, &in, &e), e, ERR_CANCELLED, "cancelled");
    store_close(s);
    store_close(open_store(home));
    OK(count_files(home, "partial-*.db") == 1);
    char cmd[700];
    snprintf(cmd, sizeof cmd, "touch -d '8 days ago' '%s'/models/partial-*.db", home);
    OK(system(cmd) == 0);
    store_close(open_store(home));
    OK(count_files(home, "partial*") == 0);
}

/* ---- links ---- */

static void test_link_is_refused_once_its_file_changed(void)
{
    const char *dir = unit_tmpdir(), *home = in_dir(dir, "home"), *a = in_dir(dir, "a.gguf");
    struct store *s = open_store(home);
    struct store_model m, m2;
    struct model_file *f;
    struct err e = {0};
    struct stop_at at = {0};
    struct store_import in = {.path = a, .name = "l", .link = true, .progress = stop, .user = &at};
    write_model(a, small);
    OK_CALL(store_import(s, &m, &in, &e), e);
    OK(at.calls > 0 && count_files(home, "[0-9a-f]*.db") == 0 && !strcmp(m.link_path, a));
    OK(reads_like(s, "l", a));
    at.calls = 0; /* an unchanged file is not hashed twice */
    in.name = "l2";
    OK_CALL(store_import(s, &m2, &in, &e), e);
    OK(at.calls == 0 && !strcmp(m.digest, m2.digest));
    OK_CALL(model_file_open(&f, s, "l", &e), e);
    OK(f && !strcmp(model_file_digest(f), m.digest) && !strcmp(model_file_name(f), "l"));
    OK(f && model_file_map(f, &model_file_gguf(f)->tensors[0]));
    model_file_close(f);
    OK_CALL(store_export(s, "l", in_dir(dir, "b.gguf"), false, NULL, NULL, &e), e);
    OK(same_files(a, in_dir(dir, "b.gguf")));

    struct test_model t = small;
    t.seed = 5;
    write_model(a, t);
    REFUSED(model_file_open(&f, s, "l", &e), e, ERR_CORRUPT, "changed");
    REFUSED(store_export(s, "l", in_dir(dir, "c.gguf"), false, NULL, NULL, &e), e, ERR_CORRUPT,
            "'l'");
    OK(access(in_dir(dir, "c.gguf"), F_OK) && access(in_dir(dir, "c.gguf.partial"), F_OK));
    in.replace = true;
    OK_CALL(store_import(s, &m2, &in, &e), e);
    OK(at.calls > 0 && strcmp(m.digest, m2.digest) && reads_like(s, "l2", a));
    unlink(a);
    REFUSED(model_file_open(&f, s, "l2", &e), e, ERR_NOT_FOUND, "gone");
    OK_CALL(store_remove(s, "l2", &e), e);
    store_close(s);
}

static void test_link_whose_file_was_only_touched_is_the_same(void)
{
    const char *dir = unit_tmpdir(), *home = in_dir(dir, "home"), *a = in_dir(dir, "a.gguf");
    struct store *s = open_store(home);
    struct store_model m;
    struct model_file *f = NULL;
    struct err e = {0};
    struct stop_at at = {0};
    struct store_import in = {.path = a, .name = "l", .link = true, .progress = stop, .user = &at};
    struct timespec times[2] = {{.tv_sec = 1700000000}, {.tv_sec = 1700000000}};
    write_model(a, small);
    OK_CALL(store_import(s, &m, &in, &e), e);
    OK(utimensat(AT_FDCWD, a, times, 0) == 0);
    OK(reads_like(s, "l", a));
    OK_CALL(model_file_open(&f, s, "l", &e), e);
    OK(f && !strcmp(model_file_digest(f), m.digest));
    model_file_close(f);
    at.calls = 0; /* the new time is known now: nothing is hashed */
    OK_CALL(store_import(s, &m, &in, &e), e);
    OK(at.calls == 0);
    store_close(s);
}

/* ---- names ---- */

static void test_a_name_has_the_time_it_was_given(void)
{
    const char *dir = unit_tmpdir(), *home = in_dir(dir, "home"), *a = in_dir(dir, "a.gguf");
    struct store *s = open_store(home);
    struct store_model m, copy;
    struct err e = {0};
    write_model(a, small);
    OK_CALL(import_as(s, &m, a, "m", &e), e);
    OK_CALL(db_exec(s->db, "UPDATE name SET added = 1000; UPDATE model SET added = 1000", &e), e);
    OK_CALL(store_copy(s, "m", "copy", &e), e);
    OK_CALL(store_find(s, &copy, "copy", &e), e);
    OK(copy.added > 1600000000);
    OK_CALL(import_as(s, &m, a, "m", &e), e); /* the same under the same name: nothing new */
    OK_MSG(m.added == 1000, "%lld", (long long)m.added);
    OK_CALL(db_exec(s->db, "ALTER TABLE name DROP COLUMN added; PRAGMA user_version = 1", &e), e);
    store_close(s);
    s = open_store(home); /* the first layout had the model's time alone */
    OK_CALL(store_find(s, &copy, "copy", &e), e);
    OK(copy.added == 1000);
    store_close(s);
}

static void test_names_follow_the_rules(void)
{
    static const char *const good[] = {"a",      "Llama3.2:3b", "hf.co/owner/repo:Q4_K_M",
                                       "x-1.5b", "0",           "_x"};
    static const char *const bad[] = {"",     "a b",  "a:",   ":a",    "/a",     "a/",
                                      "a//b", "../a", "a/..", "a:b:c", "m.gguf", "\xc3\xa9",
                                      "-a",   ".a",   "a\n",  "a'b"};
    char longest[200];
    for (size_t i = 0; i < ARRAY_LEN(good); i++) {
        struct err e = {0};
        OK_CALL(name_check(good[i], &e), e);
    }
    for (size_t i = 0; i < ARRAY_LEN(bad); i++) {
        struct err e = {0};
        OK_MSG(name_check(bad[i], &e) && e.code == ERR_USAGE, "'%s' was accepted", bad[i]);
    }
    memset(longest, 'a', sizeof longest);
    longest[128] = 0;
    OK(name_check(longest, NULL) != 0);
    longest[127] = 0;
    OK(name_check(longest, NULL) == 0);
}

static void test_unnamed_models_get_sensible_names(void)
{
    static const struct {
        const char *title, *file, *want;
    } cases[] = {
        {"SmolLM2 135M Instruct", "x.gguf", "smollm2-135m-instruct:f32"},
        {"  A/b: c!! ", "x.gguf", "a-b-c:f32"},
        {NULL, "Tiny_Model-F32.gguf", "tiny_model:f32"},
        {"...", "q.F32.gguf", "q:f32"},
        {"\xe6\xa8\xa1\xe5\x9e\x8b", "--.gguf", "model:f32"},
    };
    const char *dir = unit_tmpdir();
    struct store *s = open_store(in_dir(dir, "home"));
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        struct store_model m = {0};
        struct err e = {0};
        const char *path = in_dir(dir, cases[i].file);
        write_model(path,
                    (struct test_model){.title = cases[i].title, .n_tensors = 1, .rows = i + 1});
        struct store_import in = {.path = path, .link = true};
        OK_CALL(store_import(s, &m, &in, &e), e);
        OK_MSG(!strcmp(m.name, cases[i].want), "'%s' is not '%s'", m.name, cases[i].want);
    }
    store_close(s);
}

static void test_find_knows_what_was_meant(void)
{
    const char *dir = unit_tmpdir(), *a = in_dir(dir, "a.gguf"), *b = in_dir(dir, "b.gguf");
    struct store *s = open_store(in_dir(dir, "home"));
    struct store_model m, x;
    struct err e = {0};
    REFUSED(store_find(s, &m, "what", &e), e, ERR_NOT_FOUND, "empty");
    write_model(a, (struct test_model){.seed = 1, .n_tensors = 1, .rows = 3});
    write_model(b, (struct test_model){.seed = 2, .n_tensors = 1, .rows = 4});
    OK_CALL(import_as(s, &m, a, "Smollm2:q4_1", &e), e);
    static const char *const ways[] = {"smollm2:q4_1", "SMOLLM2", "smollm2:latest"};
    for (size_t i = 0; i < ARRAY_LEN(ways); i++)
        OK(store_find(s, &x, ways[i], &e) == 0 && !strcmp(x.name, "Smollm2:q4_1"));
    char hex[80];
    snprintf(hex, sizeof hex, "sha256:%.12s", m.digest);
    OK(store_find(s, &x, hex, &e) == 0 && store_find(s, &x, hex + 7, &e) == 0);
    hex[14] = 0; /* seven digits are too few */
    REFUSED(store_find(s, &x, hex + 7, &e), e, ERR_NOT_FOUND, "no model");
    REFUSED(store_find(s, &x, "smolm2", &e), e, ERR_NOT_FOUND, "did you mean Smollm2:q4_1?");
    REFUSED(store_find(s, &x, "smollm2:q8_0", &e), e, ERR_NOT_FOUND, "did you mean Smollm2:q4_1?");
    REFUSED(store_find(s, &x, "qwen", &e), e, ERR_NOT_FOUND, "'qwen' in the store");
    OK_CALL(import_as(s, &m, b, "smollm2:q8_0", &e), e);
    REFUSED(store_find(s, &x, "smollm2", &e), e, ERR_USAGE, "Smollm2:q4_1, smollm2:q8_0");
    OK(store_find(s, &x, "smollm2", NULL) != 0);
    OK_CALL(store_copy(s, "smollm2:q8_0", "smollm2", &e), e);
    OK(store_find(s, &x, "smollm2:latest", &e) == 0 && !strcmp(x.digest, m.digest));
    /* names with a slash, and files, by model_file_open */
    struct model_file *f;
    OK_CALL(store_copy(s, "smollm2:q8_0", "hf.co/o/r:q8_0", &e), e);
    OK_CALL(model_file_open(&f, s, "hf.co/o/r", &e), e);
    model_file_close(f);
    REFUSED(model_file_open(&f, s, "hf.co/o/none", &e), e, ERR_NOT_FOUND, "hf.co/o/none");
    REFUSED(model_file_open(&f, NULL, "smollm2", &e), e, ERR_NOT_FOUND, "not a path");
    OK_CALL(model_file_open(&f, NULL, a, &e), e);
    OK(f && !strncmp(model_file_digest(f), "x-", 2) && strlen(model_file_digest(f)) == 34);
    model_file_close(f);
    store_close(s);
}

/* ---- reading ---- */

struct read_job {
    struct model_file *f;
    struct model_file *plain;
    uint64_t seed;
    int bad;
};

static void *read_random(void *arg)
{
    struct read_job *j = arg;
    const struct gguf *g = model_file_gguf(j->f);
    enum { MOST = 3 << 20 };
    uint8_t *got = mem_alloc(MOST);
    for (int i = 0; got && i < 30; i++) {
        const struct gguf_tensor *t = &g->tensors[unit_rand(&j->seed) % g->n_tensors];
        uint64_t at = unit_rand(&j->seed) % (t->n_bytes + 1);
        size_t most = i % 2 ? MOST : 5000;
        size_t n = (size_t)(unit_rand(&j->seed) % (MIN(t->n_bytes - at, (uint64_t)most) + 1));
        const uint8_t *want =
            model_file_map(j->plain, gguf_find_tensor(model_file_gguf(j->plain), t->name));
        if (model_file_read(j->f, t, got, at, n, NULL) || memcmp(got, want + at, n))
            j->bad++;
    }
    mem_free(got);
    return NULL;
}

static void test_many_threads_read_the_right_bytes(void)
{
    enum { N = 20 }; /* more than there are readers */
    const char *dir = unit_tmpdir(), *a = in_dir(dir, "a.gguf");
    struct store *s = open_store(in_dir(dir, "home"));
    struct store_model m;
    struct err e = {0};
    struct test_model t = small;
    struct read_job jobs[N];
    pthread_t thread[N];
    t.rows = 4000;
    write_model(a, t);
    OK_CALL(import_as(s, &m, a, "m", &e), e);
    struct model_file *f, *plain;
    OK_CALL(model_file_open(&f, s, "m", &e), e);
    OK_CALL(model_file_open(&plain, s, a, &e), e);
    store_close(s); /* an open model does not need it */
    OK(!model_file_map(f, &model_file_gguf(f)->tensors[0]));
    OK(!strcmp(model_file_digest(f), m.digest));
    for (int i = 0; i < N; i++) {
        jobs[i] = (struct read_job){f, plain, (uint64_t)i, 0};
        OK(pthread_create(&thread[i], NULL, read_random, &jobs[i]) == 0);
    }
    for (int i = 0; i < N; i++) {
        pthread_join(thread[i], NULL);
        OK(jobs[i].bad == 0);
    }
    const struct gguf_tensor *t0 = &model_file_gguf(f)->tensors[0];
    uint8_t byte;
    REFUSED(model_file_read(f, t0, &byte, t0->n_bytes, 1, &e), e, ERR_USAGE, "past the end");
    REFUSED(model_file_read(f, t0, &byte, UINT64_MAX, 1, &e), e, ERR_USAGE, "past the end");
    OK_CALL(model_file_read(f, t0, &byte, t0->n_bytes, 0, &e), e);
    model_file_close(f);
    model_file_close(plain);
}

/* What was written at another time may be other bytes where no sample lies. */
static void test_plain_identity_follows_the_weights(void)
{
    const char *dir = unit_tmpdir(), *a = in_dir(dir, "a.gguf"), *b = in_dir(dir, "b.gguf");
    char first[65], next[65];
    struct test_model t = small;
    write_model(a, t);
    write_model(b, t);
    plain_digest(first, a, 1000);
    plain_digest(next, b, 1000);
    OK(!strcmp(first, next));
    plain_digest(next, b, 1001);
    OK(strcmp(first, next));
    t.seed = 3;
    write_model(b, t);
    plain_digest(next, b, 1000);
    OK(strcmp(first, next));
}

/* ---- damage ---- */

static void model_db_of(char out[700], const char *home, const char *digest)
{
    snprintf(out, 700, "%s/models/%s.db", home, digest);
    chmod(out, 0600);
}

/* Flip a byte of the weights where they lie in the database file. */
static bool flip_weight(const char *db, const char *plain, uint64_t from_end)
{
    struct mapped d, p;
    if (file_map(&d, db, NULL) || file_map(&p, plain, NULL))
        return false;
    const uint8_t *needle = p.data + p.n - from_end;
    const uint8_t *hit = memmem(d.data, d.n, needle, 24);
    size_t at = hit ? (size_t)(hit - d.data) : 0;
    uint8_t byte = hit ? *hit ^ 1 : 0;
    file_unmap(&d);
    file_unmap(&p);
    int fd = hit ? open(db, O_WRONLY) : -1;
    bool done = fd >= 0 && pwrite(fd, &byte, 1, (off_t)at) == 1;
    if (fd >= 0)
        close(fd);
    return done;
}

static void test_flipped_byte_is_refused_by_name(void)
{
    const char *dir = unit_tmpdir(), *home = in_dir(dir, "home"), *a = in_dir(dir, "a.gguf");
    struct store *s = open_store(home);
    struct store_model m;
    struct err e = {0};
    char db[700];
    write_model(a, small);
    OK_CALL(import_as(s, &m, a, "m", &e), e);
    model_db_of(db, home, m.digest);
    OK(flip_weight(db, a, 5000)); /* the last of five chunks, the last tensor */
    struct model_file *f;
    OK_CALL(model_file_open(&f, s, "m", &e), e);
    const struct gguf_tensor *t = gguf_find_tensor(model_file_gguf(f), "blk.2.weight");
    uint8_t *got = mem_alloc(t->n_bytes);
    OK(model_file_read(f, t, got, 0, t->n_bytes, &e) != 0);
    OK_MSG(strstr(e.msg, "'m'") && strstr(e.msg, "blk.2.weight") && strstr(e.msg, "chunk 5"), "%s",
           e.msg);
    refused(&e, ERR_CORRUPT, "checksum", __LINE__);
    OK(model_file_read(f, t, got, t->n_bytes - 10, 10, &e) != 0); /* away from the flipped byte */
    refused(&e, ERR_CORRUPT, "checksum", __LINE__);
    OK_CALL(model_file_read(f, t, got, 0, 1000, &e), e); /* chunk 4 is whole */
    mem_free(got);
    model_file_close(f);
    REFUSED(store_export(s, "m", in_dir(dir, "b.gguf"), false, NULL, NULL, &e), e, ERR_CORRUPT,
            "chunk 5");
    OK(access(in_dir(dir, "b.gguf"), F_OK) && access(in_dir(dir, "b.gguf.partial"), F_OK));
    /* importing the good file again repairs it */
    OK_CALL(import_as(s, &m, a, "m", &e), e);
    OK(reads_like(s, "m", a));
    store_close(s);
}

/* Damage of every kind at many places: an error or the right bytes, never a crash, never others. */
static void test_database_that_shrinks_while_open_is_an_error(void)
{
    const char *dir = unit_tmpdir(), *home = in_dir(dir, "home"), *a = in_dir(dir, "a.gguf");
    struct store *s = open_store(home);
    struct store_model m;
    struct model_file *f;
    struct err e = {0};
    struct test_model t = small;
    char db[700];
    t.rows = 9000; /* nine chunks a tensor */
    write_model(a, t);
    OK_CALL(import_as(s, &m, a, "m", &e), e);
    model_db_of(db, home, m.digest);
    if (OK_CALL(model_file_open(&f, s, "m", &e), e)) {
        const struct gguf_tensor *w = model_file_gguf(f)->tensors;
        size_t n = (size_t)w[2].n_bytes;
        uint8_t *bytes = mem_alloc(n);
        OK_CALL(model_file_read(f, &w[0], bytes, 0, (size_t)w[0].n_bytes, &e), e);
        OK(truncate(db, 12 << 20) == 0);
        REFUSED(model_file_read(f, &w[2], bytes, 0, n, &e), e, ERR_CORRUPT, "blk.2.weight");
        mem_free(bytes);
    }
    model_file_close(f);
    store_close(s);
}

static void test_damaged_database_never_gives_wrong_bytes(void)
{
    const char *dir = unit_tmpdir(), *home = in_dir(dir, "home"), *a = in_dir(dir, "a.gguf");
    struct store *s = open_store(home);
    struct store_model m;
    struct err e = {0};
    struct buf whole = {0};
    char db[700];
    uint64_t seed = 4;
    int n_refused = 0;
    write_model(a, (struct test_model){.seed = 1, .n_tensors = 2, .rows = 1100});
    OK_CALL(import_as(s, &m, a, "m", &e), e);
    model_db_of(db, home, m.digest);
    OK_CALL(file_read_all(&whole, db, 100 << 20, &e), e);
    struct mapped plain;
    OK_CALL(file_map(&plain, a, &e), e);
    for (int i = 0; i < 150; i++) {
        struct model_file *f = NULL;
        struct err why = {0};
        size_t n = whole.n, at = unit_rand(&seed) % n;
        uint8_t *copy = mem_alloc(n);
        memcpy(copy, whole.data, n);
        if (i % 5 == 0)
            n = at; /* cut off */
        else if (i % 5 < 3)
            at %= 65536 * 4; /* where the small tables are */
        for (size_t k = at; k < MIN(n, at + (i % 3 ? 1 : 300)); k++)
            copy[k] = (uint8_t)(i % 2 ? unit_rand(&seed) : 0xff);
        OK_CALL(file_write_all(db, copy, n, &e), e);
        mem_free(copy);
        int rc = model_file_open(&f, s, "m", &why);
        for (uint64_t k = 0; !rc && k < model_file_gguf(f)->n_tensors; k++) {
            const struct gguf_tensor *t = &model_file_gguf(f)->tensors[k];
            const struct gguf_shard *sh = &model_file_gguf(f)->shards[0];
            uint8_t *got = mem_alloc(t->n_bytes);
            rc = model_file_read(f, t, got, 0, t->n_bytes, &why);
            OK_MSG(rc || !memcmp(got, plain.data + sh->header_bytes + t->offset, t->n_bytes),
                   "wrong bytes after damage %d", i);
            mem_free(got);
        }
        OK_MSG(!rc || (why.code && strstr(why.msg, "'m'")), "damage %d: '%s'", i, why.msg);
        n_refused += rc != 0;
        model_file_close(f);
    }
    OK_MSG(n_refused > 60, "only %d of 150 refused", n_refused);
    file_unmap(&plain);
    buf_fini(&whole);
    unlink(db);
    struct model_file *f;
    REFUSED(model_file_open(&f, s, "m", &e), e, ERR_NOT_FOUND, "gone");
    OK_CALL(store_remove(s, "m", &e), e);
    store_close(s);
}

static void test_foreign_and_newer_catalogues_are_refused(void)
{
    const char *dir = unit_tmpdir();
    struct store *s = NULL;
    struct err e = {0};
    char cmd[900];
    OK_CALL(
        file_write_all(in_dir(dir, "ingot.db"), "not a database, but long enough to look", 39, &e),
        e);
    REFUSED(store_open(&s, dir, &e), e, ERR_CORRUPT, "ingot.db");
    OK(s == NULL);
    const char *home = in_dir(dir, "home");
    store_close(open_store(home));
    sqlite3 *db;
    OK_CALL(db_open(&db, in_dir(home, "ingot.db"), DB_WRITE, &e), e);
    OK_CALL(db_exec(db, "PRAGMA user_version = 99", &e), e);
    db_close(db);
    REFUSED(store_open(&s, home, &e), e, ERR_UNSUPPORTED, "newer");
    const char *other = in_dir(dir, "other");
    snprintf(cmd, sizeof cmd, "mkdir '%s'", other);
    OK(system(cmd) == 0);
    OK_CALL(db_open(&db, in_dir(other, "ingot.db"), DB_CREATE, &e), e);
    OK_CALL(db_exec(db, "CREATE TABLE theirs(x)", &e), e);
    db_close(db);
    REFUSED(store_open(&s, other, &e), e, ERR_CORRUPT, "another program");
    REFUSED(store_open(&s, in_dir(dir, "ingot.db"), &e), e, ERR_USAGE, "file");
}

/* As another user, so that the directory's permissions count (root may write anywhere). */
static void test_read_only_store_can_be_read(void)
{
    const char *dir = unit_tmpdir(), *home = in_dir(dir, "home"), *a = in_dir(dir, "a.gguf");
    struct store *s = open_store(home);
    struct store_model m;
    struct err e = {0};
    char cmd[1200];
    write_model(a, small);
    OK_CALL(import_as(s, &m, a, "m", &e), e);
    store_close(s);
    snprintf(cmd, sizeof cmd, "chmod -R a+rX '%s'/.. && chmod -R a-w '%s' && chmod a+rX '%s'", dir,
             home, home);
    OK(system(cmd) == 0);
    pid_t pid = fork();
    if (pid == 0) {
        if (geteuid() == 0 && (setgid(65534) || setuid(65534)))
            _exit(77);
        struct model_file *f = NULL;
        bool good = store_open(&s, home, &e) == 0 && model_file_open(&f, s, "m", &e) == 0;
        if (!good)
            fprintf(stderr, "%s\n", e.msg);
        model_file_close(f);
        good = good && import_as(s, &m, a, "x", &e) && e.code == ERR_IO && strstr(e.msg, "written");
        e = (struct err){0};
        good = good && store_remove(s, "m", &e) && strstr(e.msg, "cannot be written");
        e = (struct err){0};
        good = good && store_set_setting(s, "a", "b", &e) && strstr(e.msg, "cannot be written");
        store_close(s);
        e = (struct err){0};
        snprintf(cmd, sizeof cmd, "%s/new", home);
        good = good && store_open(&s, cmd, &e) != 0 && !strchr(e.msg, '\n');
        _exit(good ? 0 : 1);
    }
    int status = -1;
    waitpid(pid, &status, 0);
    OK_MSG(WIFEXITED(status) && WEXITSTATUS(status) == 0, "status %x", (unsigned)status);
    snprintf(cmd, sizeof cmd, "chmod -R u+w '%s'", home);
    OK(system(cmd) == 0);
}

/* ---- settings ---- */

static void test_settings_and_chats_are_kept(void)
{
    const char *home = in_dir(unit_tmpdir(), "home");
    struct store *s = open_store(home);
    struct buf b = {0};
    struct err e = {0};
    OK_CALL(store_get_setting(s, &b, "history", &e), e);
    OK(!strcmp(buf_str(&b), ""));
    OK_CALL(store_set_setting(s, "history", "off", &e), e);
    OK_CALL(store_set_setting(s, "history", "on\n\xc3\xa9", &e), e);
    OK_CALL(store_save_chat(s, "trip", "{\"messages\":[]}", &e), e);
    OK_CALL(store_save_chat(s, "Trip", "[1]", &e), e);
    store_close(s);
    s = open_store(home);
    OK_CALL(store_get_setting(s, &b, "history", &e), e);
    OK(!strcmp(buf_str(&b), "on\n\xc3\xa9"));
    OK_CALL(store_load_chat(s, &b, "trip", &e), e);
    OK(!strcmp(buf_str(&b), "[1]"));
    REFUSED(store_load_chat(s, &b, "none", &e), e, ERR_NOT_FOUND, "none");
    REFUSED(store_set_setting(s, "", "x", &e), e, ERR_USAGE, "setting");
    buf_fini(&b);
    store_close(s);
}

int main(int argc, char **argv)
{
    static const struct unit_test tests[] = {
        {"export_gives_back_every_byte", test_export_gives_back_every_byte},
        {"shards_come_and_go_as_a_set", test_shards_come_and_go_as_a_set},
        {"two_exports_to_one_path_do_not_mix", test_two_exports_to_one_path_do_not_mix},
        {"export_replaces_files_only", test_export_replaces_files_only},
        {"same_bytes_are_stored_once", test_same_bytes_are_stored_once},
        {"taken_names_are_kept_unless_replaced", test_taken_names_are_kept_unless_replaced},
        {"wrong_digest_is_refused", test_wrong_digest_is_refused},
        {"no_gguf_is_refused", test_no_gguf_is_refused},
        {"reference_models_come_back", test_reference_models_come_back},
        {"cancelled_import_goes_on_where_it_was", test_cancelled_import_goes_on_where_it_was},
        {"whole_model_without_a_name_is_adopted", test_whole_model_without_a_name_is_adopted},
        {"resume_notices_another_file", test_resume_notices_another_file},
        {"second_import_of_a_file_is_told_to_wait", test_second_import_of_a_file_is_told_to_wait},
        {"processes_share_a_store", test_processes_share_a_store},
        {"old_partials_are_swept", test_old_partials_are_swept},
        {"link_is_refused_once_its_file_changed", test_link_is_refused_once_its_file_changed},
        {"names_follow_the_rules", test_names_follow_the_rules},
        {"unnamed_models_get_sensible_names", test_unnamed_models_get_sensible_names},
        {"find_knows_what_was_meant", test_find_knows_what_was_meant},
        {"many_threads_read_the_right_bytes", test_many_threads_read_the_right_bytes},
        {"plain_identity_follows_the_weights", test_plain_identity_follows_the_weights},
        {"flipped_byte_is_refused_by_name", test_flipped_byte_is_refused_by_name},
        {"database_that_shrinks_while_open_is_an_error",
         test_database_that_shrinks_while_open_is_an_error},
        {"damaged_database_never_gives_wrong_bytes", test_damaged_database_never_gives_wrong_bytes},
        {"foreign_and_newer_catalogues_are_refused", test_foreign_and_newer_catalogues_are_refused},
        {"read_only_store_can_be_read", test_read_only_store_can_be_read},
        {"link_whose_file_was_only_touched_is_the_same",
         test_link_whose_file_was_only_touched_is_the_same},
        {"a_name_has_the_time_it_was_given", test_a_name_has_the_time_it_was_given},
        {"settings_and_chats_are_kept", test_settings_and_chats_are_kept},
    };
    return unit_main(argc, argv, tests, ARRAY_LEN(tests));
}
