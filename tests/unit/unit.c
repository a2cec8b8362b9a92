/* The unit tests' frame; see unit.h. */
#include "tests/unit/unit.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static int n_bad;    /* failures in the running test */
static bool skipped; /* the running test said so */
static char tmpdir[64];

bool unit_check(bool cond, const char *file, int line, const char *fmt, ...)
{
    if (cond)
        return true;
    n_bad++;
    if (n_bad > 20)
        return false;
    va_list ap;
    va_start(ap, fmt);
    printf("  %s:%d: ", file, line);
    vprintf(fmt, ap);
    printf("\n");
    va_end(ap);
    return false;
}

void unit_skip(const char *fmt, ...)
{
    va_list ap;
    skipped = true;
    va_start(ap, fmt);
    printf("  skipped: ");
    vprintf(fmt, ap);
    printf("\n");
    va_end(ap);
}

uint64_t unit_rand(uint64_t *state)
{
    uint64_t z = (*state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

float unit_randn(uint64_t *state)
{
    double u = ((double)(unit_rand(state) >> 11) + 1) / 9007199254740993.0;
    double v = (double)(unit_rand(state) >> 11) / 9007199254740992.0;
    return (float)(sqrt(-2 * log(u)) * cos(6.283185307179586 * v));
}

const char *unit_shared(const char *rel)
{
    static char paths[4][1024];
    static int at;
    char *p = paths[at++ & 3];
    const char *root = getenv("INGOT_SHARED");
    snprintf(p, sizeof paths[0], "%s/%s", root ? root : "../shared", rel);
    if (access(p, R_OK) == 0)
        return p;
    unit_skip("%s is not there", p);
    return NULL;
}

static char memdir[64];

static void remove_dir(const char *dir)
{
    char cmd[128];
    snprintf(cmd, sizeof cmd, "rm -rf '%s'", dir);
    if (dir[0] && system(cmd))
        fprintf(stderr, "cannot remove %s\n", dir);
}

static void remove_dirs(void)
{
    remove_dir(tmpdir);
    remove_dir(memdir);
}

static const char *fresh_dir(char root[64], const char *pattern)
{
    static char sub[8][128];
    static int n;
    char *dir = sub[n & 7];
    if (!root[0]) {
        strcpy(root, pattern);
        CHECK(mkdtemp(root));
        if (!tmpdir[0] || !memdir[0])
            atexit(remove_dirs);
    }
    snprintf(dir, sizeof sub[0], "%s/%d", root, n++);
    CHECK(mkdir(dir, 0755) == 0);
    return dir;
}

const char *unit_tmpdir(void)
{
    return fresh_dir(tmpdir, "/tmp/ingot-unit-XXXXXX");
}

const char *unit_memdir(void)
{
    return access("/dev/shm", W_OK) ? unit_tmpdir()
                                    : fresh_dir(memdir, "/dev/shm/ingot-unit-XXXXXX");
}

static bool wanted(const char *name, int argc, char **argv)
{
    for (int i = 1; i < argc; i++)
        if (strstr(name, argv[i]))
            return true;
    return argc <= 1;
}

int unit_main(int argc, char **argv, const struct unit_test *tests, size_t n)
{
    int passed = 0, failed = 0, n_skipped = 0;
    setvbuf(stdout, NULL, _IOLBF, 0);
    for (size_t i = 0; i < n; i++) {
        if (!wanted(tests[i].name, argc, argv))
            continue;
        n_bad = 0;
        skipped = false;
        uint64_t t0 = now_ns();
        tests[i].fn();
        double s = (double)(now_ns() - t0) * 1e-9;
        if (n_bad || skipped || s > 1)
            printf("%s %s (%.1f s)\n",
                   n_bad     ? "FAILED"
                   : skipped ? "skipped"
                             : "passed",
                   tests[i].name, s);
        failed += n_bad > 0;
        n_skipped += !n_bad && skipped;
        passed += !n_bad && !skipped;
    }
    printf("%d passed, %d failed, %d skipped\n", passed, failed, n_skipped);
    return failed > 0;
}
