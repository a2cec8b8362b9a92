/* The 232 loader cases: model files, valid and not, opened the way `run` and `serve` do. Each runs
 * in a child process, so that a signal, the time and the peak memory are seen. A valid one must go
 * on to generate a token. Cases that need a server's flags are named and left to the server's
 * tests. */
#include "engine/engine.h"
#include "tests/unit/unit.h"

#include <ctype.h>
#include <fcntl.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { SANITIZED = 1 };
#else
enum { SANITIZED = 0 };
#endif

struct outcome {
    bool loaded;
    bool request_failed; /* loaded, but the request ended with an error */
    char msg[1200];
    int status; /* of wait4 */
    double seconds;
    long peak_kib;
};

/* ---- in the child ---- */

static int generate_one(struct engine *en, struct err *e)
{
    struct ids ids = {0};
    struct request r = {.max_tokens = 1, .ignore_eog = true};
    struct request_stats stats;
    const char text[] = "Hello world \xc3\xa9\xe2\x82\xac";
    if (tokenizer_encode(&ids, engine_tokenizer(en), text, sizeof text - 1,
                         TOKENIZE_ADD_SPECIAL | TOKENIZE_PARSE_SPECIAL, e))
        return -1;
    engine_sample_defaults(&r.sample, en);
    r.ids = ids.v;
    r.n_ids = ids.n;
    int rc = engine_run(en, &r, &stats, e);
    ids_fini(&ids);
    return rc;
}

static void open_and_report(int fd, const char *path)
{
    struct err e = {0};
    struct model_file *f = NULL;
    struct engine *en = NULL;
    struct engine_config c = {.backend = "cpu", .n_threads = 1, .quiet_load = true};
    char state = 'R';
    if (!model_file_open(&f, NULL, path, &e) && !engine_open(&en, f, &c, &e))
        state = generate_one(en, &e) ? 'F' : 'L';
    engine_close(en);
    model_file_close(f);
    char line[1024];
    int n = snprintf(line, sizeof line, "%c%s", state, e.msg);
    if (write(fd, line, (size_t)n) != n)
        _exit(9);
}

/* ---- in the parent ---- */

static void try_file(struct outcome *o, const char *path)
{
    int fds[2];
    struct rusage ru;
    *o = (struct outcome){0};
    CHECK(pipe(fds) == 0);
    uint64_t t0 = now_ns();
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (!pid) {
        close(fds[0]);
        if (!SANITIZED)
            alarm(20);
        open_and_report(fds[1], path);
        _exit(0);
    }
    close(fds[1]);
    char line[1200] = {0};
    size_t n = 0;
    for (ssize_t got;
         n < sizeof line - 1 && (got = read(fds[0], line + n, sizeof line - 1 - n)) > 0;)
        n += (size_t)got;
    close(fds[0]);
    CHECK(wait4(pid, &o->status, 0, &ru) == pid);
    o->seconds = (double)(now_ns() - t0) / 1e9;
    o->peak_kib = ru.ru_maxrss;
    o->loaded = line[0] == 'L' || line[0] == 'F';
    o->request_failed = line[0] == 'F';
    snprintf(o->msg, sizeof o->msg, "%.1100s", line[0] ? line + 1 : "");
}

static bool has_word(const char *text, const char *word)
{
    size_t n = strlen(word);
    for (; *text; text++)
        if (!strncasecmp(text, word, n))
            return true;
    return false;
}

static bool message_fits(const char *msg, const json_t *words)
{
    size_t i;
    json_t *w;
    json_array_foreach(words, i, w) if (has_word(msg, json_string_value(w))) return true;
    return !json_array_size(words);
}

static bool message_clean(const char *msg)
{
    size_t n = strlen(msg);
    for (size_t i = 0; i < n; i++)
        if ((unsigned char)msg[i] < 0x20 || msg[i] == 0x7f)
            return false;
    return n > 0 && n < 1000 && utf8_valid(msg, n);
}

/* A file that is not stored: holes, with pieces written into it. */
static bool make_sparse(char path[256], const json_t *c)
{
    const json_t *recipe = json_object_get(c, "recipe");
    snprintf(path, 256, "%s/%s", unit_tmpdir(), json_string_value(json_object_get(c, "file")));
    int fd = open(path, O_CREAT | O_RDWR, 0600);
    if (!OK(fd >= 0) ||
        !OK(ftruncate(fd, json_integer_value(json_object_get(recipe, "sparse_size"))) == 0))
        return false;
    size_t i;
    json_t *p;
    json_array_foreach(json_object_get(recipe, "pieces"), i, p)
    {
        char rel[160];
        struct err e = {0};
        struct buf b = {0};
        snprintf(rel, sizeof rel, "cases/loader/%s", json_string_value(json_object_get(p, "file")));
        const char *src = unit_shared(rel);
        if (src && OK_CALL(file_read_all(&b, src, 1 << 24, &e), e))
            OK_CALL(file_pwrite(fd, b.data, b.n,
                                (uint64_t)json_integer_value(json_object_get(p, "at")), path, &e),
                    e);
        buf_fini(&b);
    }
    close(fd);
    return true;
}

/* What this build refuses although it is legal: named in the output, and held to a clean refusal.
 */
static const char *const not_supported[] = {"ok-unigram-base.gguf"};

static bool is_not_supported(const char *file)
{
    for (size_t i = 0; i < ARRAY_LEN(not_supported); i++)
        if (!strcmp(not_supported[i], file))
            return true;
    return false;
}

static void judge(const json_t *c, const struct outcome *o, uint64_t file_bytes)
{
    const char *file = json_string_value(json_object_get(c, "file"));
    const char *expect = json_string_value(json_object_get(c, "expect"));
    const json_t *words = json_object_get(c, "message_has_any");
    OK_MSG(WIFEXITED(o->status) && !WEXITSTATUS(o->status), "%s: child ended with status %#x", file,
           (unsigned)o->status);
    if (!SANITIZED) {
        OK_MSG(o->seconds < 1, "%s: took %.2f s", file, o->seconds);
        OK_MSG((uint64_t)o->peak_kib << 10 <= file_bytes + (64u << 20), "%s: peak %ld KiB", file,
               o->peak_kib);
    }
    if (is_not_supported(file)) {
        printf("  not supported: %s: %s\n", file, o->msg);
        OK_MSG(!o->loaded, "%s loads: take it off the list of what is not supported", file);
    } else if (!strcmp(expect, "load"))
        OK_MSG(o->loaded && !o->request_failed, "%s must load: %s", file, o->msg);
    if (!strcmp(expect, "refuse"))
        OK_MSG(!o->loaded, "%s must be refused", file);
    if (!o->loaded) {
        OK_MSG(message_clean(o->msg), "%s: message not clean: %s", file, o->msg);
        OK_MSG(is_not_supported(file) || message_fits(o->msg, words),
               "%s: message names none of the words: %s", file, o->msg);
    }
}

static void test_every_loader_case_is_answered_as_it_should_be(void)
{
    const char *manifest = unit_shared("cases/loader/manifest.jsonl");
    FILE *in = manifest ? fopen(manifest, "re") : NULL;
    char *line = NULL;
    size_t cap = 0, n = 0, n_serve = 0;
    while (in && getline(&line, &cap, in) > 0) {
        json_error_t je;
        json_t *c = json_loads(line, 0, &je);
        if (!OK(c))
            continue;
        const char *file = json_string_value(json_object_get(c, "file"));
        char path[1024], rel[256];
        bool ready = true;
        if (!strcmp(json_string_value(json_object_get(c, "by")), "serve")) {
            n_serve++;
            ready = false;
        } else if (json_object_get(c, "recipe")) {
            ready = make_sparse(path, c);
        } else {
            snprintf(rel, sizeof rel, "cases/loader/%s", file);
            const char *p = unit_shared(rel);
            ready = OK_MSG(p, "%s is not there", rel);
            snprintf(path, sizeof path, "%s", p ? p : "");
        }
        if (ready) {
            struct outcome o;
            struct stat st = {0};
            stat(path, &st);
            try_file(&o, path);
            judge(c, &o, json_object_get(c, "recipe") ? 0 : (uint64_t)st.st_size);
            n++;
        }
        json_decref(c);
    }
    free(line);
    if (in) {
        fclose(in);
        OK_MSG(n + n_serve == 232, "%zu cases of 232 were run", n + n_serve);
        printf("  %zu cases run, %zu need a server\n", n, n_serve);
    }
}

int main(int argc, char **argv)
{
    static const struct unit_test tests[] = {
        {"every_loader_case_is_answered_as_it_should_be",
         test_every_loader_case_is_answered_as_it_should_be},
    };
    log_threshold = LOG_ERROR;
    return unit_main(argc, argv, tests, ARRAY_LEN(tests));
}
