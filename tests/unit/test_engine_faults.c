/* The whole engine under faults: model, persistent prefix tier, too few KV pages, three requests at
 * a time. No memory at any allocation, a read or a write that fails anywhere, the disk full while
 * pages are written behind, killed in the middle of such a write, bits flipped in what was written.
 * Each time: no crash, never a wrong token, what cannot be done says why, and the next start works.
 * INGOT_KILLS and INGOT_FLIPS set how often. What the tier does alone is in test_prefix_faults.c. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sqlite3.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>

#include "store/prefix.h"
#include "tests/unit/asks.h"
#include "tests/unit/spy.h"

enum { N_ASKS = 3, N_TEXTS = 4, N_CTX = 256, N_ANSWER = 60 };

static struct backend spied;
static struct ask want[N_TEXTS][N_ASKS]; /* computed plainly, each alone */

static int asked(const char *name, int or_else)
{
    const char *v = getenv(name);
    return v ? atoi(v) : or_else;
}

/* Two begin alike, for one page and a half. */
static void asks_init(struct ask *a, uint64_t text)
{
    for (int i = 0; i < N_ASKS; i++) {
        ask_init(&a[i], text, 75 + (size_t)i * 13, i < 2 ? 50 : 0,
                 1000 + text * 10 + (uint64_t)i);
        a[i].r.max_tokens = N_ANSWER;
    }
}

static void make_wants(void)
{
    static bool made;
    struct engine_config c = {.n_ctx = N_CTX};
    if (made)
        return;
    made = true;
    spied = spy_backend();
    struct engine *en = asks_engine(asks_model(1, N_CTX), &c, &backend_cpu);
    for (uint64_t t = 0; en && t < N_TEXTS; t++) {
        asks_init(want[t], t);
        for (int i = 0; i < N_ASKS; i++) {
            want[t][i].r.no_reuse = true;
            ask_run(&want[t][i], en);
        }
    }
    engine_close(en);
}

/* ---- one life of an engine: open, three requests at the same moment, close ---- */

struct life {
    const char *home; /* of the persistent tier */
    struct store *store; /* to take the model from, or NULL */
    const char *model;
    const struct backend *be;
    uint64_t text;
    uint64_t fail_alloc;               /* the n-th; counted ... */
    bool late;                         /* ... when the tier is open */
    bool (*fair)(const struct err *e); /* an error that may be, for what was done to it */
    /* what became of it */
    struct err stopped; /* it did not open */
    struct err no_tier; /* the persistent tier did not; it goes on without */
    int n_right, n_failed;
    uint64_t n_cached, n_swapped, n_allocs;
};

static void check_error(const struct life *l, const struct err *e, const char *what)
{
    OK_MSG(e->code && *e->msg && l->fair(e), "%s failed with code %d: '%s'", what, (int)e->code,
           e->msg);
}

static void judge(struct life *l, const struct ask *a, int i)
{
    const struct ask *w = &want[l->text][i];
    OK_MSG(ask_agrees(a, w), "request %d: a wrong token among %zu", i, a->n_got);
    bool whole = a->n_got == w->n_got && a->s.finish == FINISH_LENGTH;
    l->n_right += whole;
    l->n_failed += !whole;
    l->n_cached += a->s.n_cached;
    if (a->e.code)
        check_error(l, &a->e, "submitting");
    else if (!whole && OK(a->s.finish == FINISH_ERROR))
        check_error(l, &a->s.err, "a request");
}

static void ask_all(struct life *l, struct engine *en)
{
    static struct ask a[N_ASKS];
    struct engine_counters k;
    asks_init(a, l->text);
    for (int i = 0; i < N_ASKS; i++)
        ask_submit(&a[i], en);
    for (int i = 0; i < N_ASKS; i++)
        if (!a[i].e.code)
            ask_wait(&a[i]);
    engine_counters(en, &k);
    l->n_swapped = k.n_swapped_out;
    OK_MSG(!k.n_active && !k.n_waiting && !k.n_held_pages && !k.n_swapped,
           "%u active, %u waiting, %u pages held, %u swapped out", k.n_active, k.n_waiting,
           k.n_held_pages, k.n_swapped);
    for (int i = 0; i < N_ASKS; i++)
        judge(l, &a[i], i);
}

static void live(struct life *l)
{
    struct model_file *f = NULL;
    struct engine *en = NULL;
    struct engine_config c = {.n_ctx = N_CTX,
                              .n_seqs = N_ASKS,
                              .n_threads = 1,
                              .kv_pages = N_CTX / P,
                              .prefix_ram_bytes = 1,
                              .swap_bytes = 1,
                              .quiet_load = true};
    l->stopped = l->no_tier = (struct err){0};
    l->n_right = l->n_failed = 0;
    l->n_cached = l->n_swapped = 0;
    mem_fail_at(l->late ? 0 : l->fail_alloc);
    uint64_t before = mem_alloc_count();
    if (prefix_open(&c.prefix_store, l->home, &(struct prefix_config){1 << 26, 1 << 20},
                    &l->no_tier))
        check_error(l, &l->no_tier, "the tier");
    if (l->late) {
        mem_fail_at(l->fail_alloc);
        before = mem_alloc_count();
    }
    if (model_file_open(&f, l->store, l->model, &l->stopped) ||
        engine_open_on(&en, f, &c, l->be, &l->stopped))
        check_error(l, &l->stopped, "opening");
    model_file_close(f);
    if (en)
        ask_all(l, en);
    engine_close(en);
    prefix_close(c.prefix_store);
    l->n_allocs = mem_alloc_count() - before;
    mem_fail_at(0);
}

static bool none_is_fair(const struct err *e)
{
    return false;
}

static bool memory_is_fair(const struct err *e)
{
    return e->code == ERR_MEMORY;
}

static bool io_is_fair(const struct err *e)
{
    return e->code == ERR_IO || e->code == ERR_FULL || e->code == ERR_CORRUPT;
}

static struct life new_life(const char *home)
{
    return (struct life){
        .home = home, .model = asks_model(1, N_CTX), .be = &spied, .fair = none_is_fair};
}

/* The next start, with nothing in its way: all is well. Gives the prompt tokens found. */
static uint64_t live_well(const struct life *before, const char *what, uint64_t n)
{
    struct life l = *before;
    l.be = &spied;
    l.fair = none_is_fair;
    l.fail_alloc = 0;
    live(&l);
    OK_MSG(l.n_right == N_ASKS, "%s %d: after it only %d of %d answers", what, (int)n, l.n_right,
           N_ASKS);
    OK_MSG(!spy.n_differ, "%s %d: %d of %d logits differ", what, (int)n, spy.n_differ, spy.n_again);
    spy.n_differ = 0;
    return l.n_cached;
}

/* ---- no memory ---- */

/* From the start, or from where the tier is open, until there is no fault: each of the first
 * n_each allocations, and beyond them one in so many more that the time stays bounded. */
static void fail_allocations(bool late, uint64_t n_each)
{
    char home[160];
    int n_stopped = 0, n_failed = 0, n_right = 0, n_no_tier = 0, n_lives = 0;
    uint64_t found = 0, swapped = 0, n = 1;
    bool whole = false;
    snprintf(home, sizeof home, "%s", unit_memdir());
    struct life l = new_life(home);
    l.be = &backend_cpu; /* the spy has memory of its own, and no way without it */
    l.fair = memory_is_fair;
    l.late = late;
    for (; !whole && n < 100000; n += n < n_each ? 1 : 1 + n / 24) {
        asks_forget(home);
        l.fail_alloc = n;
        live(&l);
        whole = l.n_allocs < n;
        n_lives++;
        n_stopped += l.stopped.code != 0;
        n_no_tier += l.no_tier.code != 0;
        n_failed += l.stopped.code ? 0 : l.n_failed;
        n_right += l.n_right;
        OK(!late || !l.no_tier.code);
        OK_MSG(!whole || l.n_right == N_ASKS, "without a fault %d answers", l.n_right);
        swapped += l.n_swapped;
        found += live_well(&l, "allocation", n);
    }
    OK(whole && n_right > 10 && found > 0 && swapped > 0);
    OK(late ? n_stopped > 10 && n_failed > 0 : n_no_tier > 10);
    printf("  %d of %d allocations%s: %d times not opened, %d times without the tier, %d answers "
           "right, %d failed\n",
           n_lives, (int)l.n_allocs, late ? " after the tier's" : "", n_stopped, n_no_tier, n_right,
           n_failed);
}

static void test_no_memory_at_any_allocation_is_an_error_or_the_right_answer(void)
{
    make_wants();
    fail_allocations(true, SANITIZED ? 1 : 300);
    fail_allocations(false, 1); /* test_prefix_faults.c has each of the tier's */
}

/* ---- reads through the file seam: a linked model whose file has another time than it had ---- */

static void touch_file(const char *path, int n)
{
    struct timespec t[2] = {{.tv_sec = 1000000 + n}, {.tv_sec = 1000000 + n}};
    OK(utimensat(AT_FDCWD, path, t, 0) == 0);
}

/* The fault is still to come, and is spent. */
static bool fault_waits(const char *file)
{
    struct buf b = {0};
    struct err e = {0};
    bool waits = file_read_all(&b, file, 1 << 28, &e) != 0;
    buf_fini(&b);
    file_fail_at(0, 0);
    return waits;
}

static void damage_header(const char *home)
{
    char path[300];
    snprintf(path, sizeof path, "%s/prefix.db", home);
    int fd = open(path, O_RDWR);
    if (fd >= 0) /* of the tables, not of the first line by which it is known */
        OK(pwrite(fd, "no table", 8, 100) == 8);
    if (fd >= 0)
        close(fd);
}

static void fail_reads(int error, enum err_code code)
{
    char dir[160], home[200];
    struct err e = {0};
    struct store_model m;
    int n_stopped = 0;
    uint64_t n = 1;
    snprintf(dir, sizeof dir, "%s", unit_memdir());
    snprintf(home, sizeof home, "%s/home", dir);
    struct life l = new_life(home);
    l.fair = io_is_fair;
    const char *path = l.model;
    if (!OK_CALL(store_open(&l.store, home, &e), e) ||
        !OK_CALL(store_import(l.store, &m,
                              &(struct store_import){.path = path, .name = "m", .link = true}, &e),
                 e))
        return;
    l.model = "m";
    for (bool fired = true; fired && n < 100; n++) {
        damage_header(home); /* judging it is a read, too */
        touch_file(path, (int)n);
        file_fail_at(n, error);
        live(&l);
        fired = !fault_waits(path);
        n_stopped += l.stopped.code != 0;
        OK_MSG(!l.stopped.code || (l.stopped.code == code && strstr(l.stopped.msg, "model.gguf")),
               "read %d: code %d: %s", (int)n, (int)l.stopped.code, l.stopped.msg);
        OK(l.stopped.code || l.n_right == N_ASKS);
        live_well(&l, "read", n);
    }
    OK_MSG(n > 3 && n < 100 && n_stopped > 0, "%d reads, %d times not opened", (int)n, n_stopped);
    store_close(l.store);
}

static void test_a_read_that_fails_is_an_error_by_name_or_no_matter(void)
{
    make_wants();
    fail_reads(EIO, ERR_IO);
    fail_reads(ENOSPC, ERR_FULL);
}

/* ---- a seam in SQLite's own: its reads and writes, counted ---- */

typedef ssize_t (*pwrite_fn)(int, const void *, size_t, off_t);
typedef ssize_t (*pread_fn)(int, void *, size_t, off_t);
static pwrite_fn real_pwrite;
static pread_fn real_pread;
static struct {
    _Atomic long left; /* the call that takes it to 0 fails; 0: none does */
    bool reads;        /* it is reads that are counted, else writes */
    bool stays;        /* all after it fail, too */
    bool kills;        /* by SIGKILL in the middle of the write */
    int error;
} seam;

static bool seam_fails(void)
{
    if (!seam.left || --seam.left)
        return false;
    seam.left = seam.stays;
    errno = seam.error;
    return true;
}

static ssize_t seam_pwrite(int fd, const void *p, size_t n, off_t at)
{
    if (seam.reads || !seam_fails())
        return real_pwrite(fd, p, n, at);
    if (seam.kills && pwrite(fd, p, n / 2, at) >= 0)
        kill(getpid(), SIGKILL);
    return -1;
}

static ssize_t seam_pread(int fd, void *p, size_t n, off_t at)
{
    return seam.reads && seam_fails() ? -1 : real_pread(fd, p, n, at);
}

static void seam_hook(void)
{
    sqlite3_vfs *v;
    if (real_pwrite)
        return;
    prefix_close(asks_store(unit_memdir())); /* the library is configured first */
    v = sqlite3_vfs_find(NULL);
    for (int wide = 1; wide >= 0 && !real_pwrite; wide--) {
        real_pwrite = (pwrite_fn)v->xGetSystemCall(v, wide ? "pwrite64" : "pwrite");
        real_pread = (pread_fn)v->xGetSystemCall(v, wide ? "pread64" : "pread");
        if (real_pwrite)
            OK(!v->xSetSystemCall(v, wide ? "pwrite64" : "pwrite",
                                  (sqlite3_syscall_ptr)seam_pwrite) &&
               !v->xSetSystemCall(v, wide ? "pread64" : "pread", (sqlite3_syscall_ptr)seam_pread));
    }
    CHECK(real_pwrite && real_pread);
}

static void seam_set(long n, bool reads, bool stays, int error)
{
    seam.reads = reads;
    seam.stays = stays;
    seam.error = error;
    seam.left = n;
}

/* How many are made in a life without faults. */
static long seam_count(struct life l, bool reads)
{
    seam_set(1000000, reads, false, 0);
    live(&l);
    long n = 1000000 - seam.left;
    seam.left = 0;
    return n;
}

/* ---- full disk ---- */

/* What the log says while it runs; *n_lines about the prefix cache. */
static void live_and_listen(struct life *l, char *log, size_t n_max, int *n_lines)
{
    FILE *tmp = tmpfile();
    int kept = dup(2);
    CHECK(tmp && kept >= 0 && dup2(fileno(tmp), 2) == 2);
    log_threshold = LOG_WARN;
    live(l);
    log_threshold = LOG_ERROR;
    CHECK(dup2(kept, 2) == 2);
    close(kept);
    rewind(tmp);
    size_t n = fread(log, 1, n_max - 1, tmp);
    log[n] = 0;
    fclose(tmp);
    *n_lines = 0;
    for (const char *p = log; (p = strstr(p, "prefix cache: ")); p++)
        ++*n_lines;
}

static void test_a_disk_that_fills_up_while_writing_behind_costs_no_answer(void)
{
    char home[160], log[8192];
    int n_said = 0, n_no_tier = 0, n_lines;
    make_wants();
    seam_hook();
    snprintf(home, sizeof home, "%s", unit_memdir());
    struct life l = new_life(home);
    long all = seam_count(l, false);
    l.fair = io_is_fair;
    for (long n = 1; n <= all; n += SANITIZED ? 9 : 1 + n / 50) {
        asks_forget(home);
        seam_set(n, false, true, ENOSPC);
        live_and_listen(&l, log, sizeof log, &n_lines);
        seam.left = 0;
        OK_MSG(l.n_right == N_ASKS, "write %d: %d answers: %s", (int)n, l.n_right, l.stopped.msg);
        OK_MSG(!l.no_tier.code || l.no_tier.code == ERR_FULL, "write %d: code %d: %s", (int)n,
               (int)l.no_tier.code, l.no_tier.msg);
        OK_MSG(n_lines <= 1, "write %d: %d lines: %s", (int)n, n_lines, log);
        OK_MSG(!n_lines || strstr(log, "full"), "write %d: %s", (int)n, log);
        n_said += n_lines;
        n_no_tier += l.no_tier.code != 0;
        live_well(&l, "write", (uint64_t)n);
    }
    OK_MSG(all > 20 && n_said > 5 && n_no_tier > 0, "%d of %d writes were said, %d opened nothing",
           n_said, (int)all, n_no_tier);
    printf("  %d writes; %d times a line in the log, %d times no tier\n", (int)all, n_said,
           n_no_tier);
}

/* ---- the device under the files fails, once or for good; the model is in the store as well ---- */

static void fail_sqlite(struct life l, bool reads, bool stays)
{
    int n_stopped = 0, n_no_tier = 0, n_right = 0;
    asks_forget(l.home);
    live_well(&l, "filling", 0); /* there is something to read */
    if (!reads)
        asks_forget(l.home);
    long all = seam_count(l, reads);
    l.fair = io_is_fair;
    for (long n = 1; n <= all; n += SANITIZED ? 1 + n / 4 : 1 + n / 40) {
        if (!reads)
            asks_forget(l.home);
        seam_set(n, reads, stays, EIO);
        live(&l);
        seam.left = 0;
        n_stopped += l.stopped.code != 0;
        n_no_tier += l.no_tier.code != 0;
        n_right += l.n_right;
        OK_MSG(l.stopped.code ? reads : l.n_right == N_ASKS, "call %d: %d answers: %s", (int)n,
               l.n_right, l.stopped.msg);
        live_well(&l, reads ? "read" : "write", (uint64_t)n);
    }
    OK_MSG(all > 20 && n_right > 5 && n_no_tier + n_stopped > 0,
           "%d calls, %d right, %d not opened, %d without the tier", (int)all, n_right, n_stopped,
           n_no_tier);
    printf("  %s, %s: %d calls; %d times not opened, %d times without the tier\n",
           reads ? "reads" : "writes", stays ? "for good" : "once", (int)all, n_stopped, n_no_tier);
}

static void test_a_failing_disk_is_an_error_or_no_matter(void)
{
    char dir[160], home[200];
    struct err e = {0};
    struct store_model m;
    make_wants();
    seam_hook();
    snprintf(dir, sizeof dir, "%s", unit_memdir());
    snprintf(home, sizeof home, "%s/home", dir);
    struct life l = new_life(home);
    if (!OK_CALL(store_open(&l.store, home, &e), e) ||
        !OK_CALL(store_import(l.store, &m, &(struct store_import){.path = l.model, .name = "m"},
                              &e),
                 e))
        return;
    l.model = "m";
    for (int k = 0; k < 4; k++)
        fail_sqlite(l, k % 2, k / 2);
    store_close(l.store);
}

/* ---- killed while writing behind ---- */

static void test_killed_in_the_middle_of_a_write_the_next_start_answers_right(void)
{
    int kills = asked("INGOT_KILLS", SANITIZED ? 10 : 40), n_killed = 0;
    char home[160];
    uint64_t seed = now_ns(), found = 0;
    make_wants();
    seam_hook();
    snprintf(home, sizeof home, "%s", unit_memdir());
    struct life l = new_life(home);
    long all = seam_count(l, false);
    asks_forget(home);
    for (int k = 0; n_killed < kills && k < kills * 4; k++) {
        int status;
        l.text = (uint64_t)k % N_TEXTS; /* what came before is found, or is in the way */
        long at = 1 + (long)(unit_rand(&seed) % (uint64_t)all);
        pid_t pid = fork();
        CHECK(pid >= 0);
        if (pid == 0) {
            seam.kills = true;
            seam_set(at, false, false, EIO);
            live(&l);
            _exit(0);
        }
        OK(waitpid(pid, &status, 0) == pid);
        n_killed += WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
        OK_MSG(!WIFSIGNALED(status) || WTERMSIG(status) == SIGKILL, "signal %d",
               WTERMSIG(status));
        found += live_well(&l, "kill", (uint64_t)k);
        if (k % N_TEXTS == N_TEXTS - 1)
            asks_forget(home);
    }
    OK_MSG(n_killed == kills && found > 0, "%d killed, not %d", n_killed, kills);
    printf("  %d killed; %d prompt tokens found after it\n", n_killed, (int)found);
}

/* ---- flipped bits ---- */

static void test_a_flipped_bit_anywhere_gives_no_wrong_token(void)
{
    int flips = asked("INGOT_FLIPS", SANITIZED ? 20 : 200), n_whole = 0, n_less = 0;
    char home[160], path[200];
    uint64_t seed = 5, most;
    struct buf b = {0};
    struct err e = {0};
    make_wants();
    snprintf(home, sizeof home, "%s", unit_memdir());
    snprintf(path, sizeof path, "%s/prefix.db", home);
    struct life l = new_life(home);
    live_well(&l, "filling", 0);
    most = live_well(&l, "reading", 0);
    OK_MSG(most >= 3 * 2 * P, "%d prompt tokens found", (int)most);
    OK_CALL(file_read_all(&b, path, 1 << 28, &e), e);
    for (int k = 0; k < flips && b.n; k++) {
        size_t at = unit_rand(&seed) % b.n;
        char bit = (char)(1 << unit_rand(&seed) % 8);
        asks_forget(home);
        b.data[at] ^= bit;
        OK_CALL(file_write_all(path, b.data, b.n, &e), e);
        b.data[at] ^= bit;
        uint64_t found = live_well(&l, "flip", (uint64_t)k);
        n_whole += found == most;
        n_less += found < most;
        OK_MSG(found <= most, "flip %d: %d tokens found of %d", k, (int)found, (int)most);
    }
    OK_MSG(flips < 100 || (n_whole && n_less > 10), "%d with all, %d with less", n_whole, n_less);
    printf("  %d flips: %d times all was found, %d times less\n", flips, n_whole, n_less);
    buf_fini(&b);
}

int main(int argc, char **argv)
{
#define T(f)                                                                                       \
    {                                                                                              \
#f, test_##f                                                                               \
    }
    static const struct unit_test tests[] = {
        T(no_memory_at_any_allocation_is_an_error_or_the_right_answer),
        T(a_read_that_fails_is_an_error_by_name_or_no_matter),
        T(a_disk_that_fills_up_while_writing_behind_costs_no_answer),
        T(a_failing_disk_is_an_error_or_no_matter),
        T(killed_in_the_middle_of_a_write_the_next_start_answers_right),
        T(a_flipped_bit_anywhere_gives_no_wrong_token),
    };
    log_threshold = LOG_ERROR;
    int rc = unit_main(argc, argv, tests, ARRAY_LEN(tests));
    spy_reset();
    return rc;
}
