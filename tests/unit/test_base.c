/* base's promises that the folders above lean on without testing them: messages are clean text,
 * readers and writers of files take files only, bounds hold. */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/base.h"
#include "tests/unit/unit.h"

/* ---- errors ---- */

static bool is_clean(const char *s)
{
    for (size_t i = 0, n = strlen(s); i < n;) {
        uint32_t cp;
        int len = utf8_decode(&cp, s + i, n - i);
        if (len < 0 || cp < 0x20 || (cp >= 0x7f && cp < 0xa0))
            return false;
        i += (size_t)len;
    }
    return true;
}

static void test_messages_are_one_line_of_valid_text(void)
{
    static const struct {
        const char *in, *out;
    } cases[] = {
        {"a\nb\x1b[31m\x7f", "a?b?[31m?"},
        {"\xc2\x9b"
         "31m",
         "??31m"},                  /* U+009B starts an escape sequence */
        {"caf\xe9 \xff", "caf? ?"}, /* Latin-1 */
        {"\xed\xa0\x80.", "???."},  /* a surrogate */
        {"\xe2\x82\xac \xc3\xa9\xc2\xa0", "\xe2\x82\xac \xc3\xa9\xc2\xa0"},
        {"cut \xe2\x82", "cut "},
    };
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        struct err e = {0};
        OK(err_set(&e, ERR_CORRUPT, "%s", cases[i].in) == -1 && e.code == ERR_CORRUPT);
        OK_MSG(!strcmp(e.msg, cases[i].out), "case %zu: '%s'", i, e.msg);
        OK(err_prefix(&e, "%s", cases[i].in) == -1 && is_clean(e.msg));
    }
    char noise[700];
    uint64_t rng = 1;
    for (int round = 0; round < 2000; round++) {
        struct err e = {0};
        size_t n = (size_t)(unit_rand(&rng) % (sizeof noise - 1));
        for (size_t i = 0; i < n; i++)
            noise[i] = (char)(unit_rand(&rng) % 255 + 1);
        noise[n] = 0;
        err_set(&e, ERR_IO, "%s", noise);
        OK(is_clean(e.msg));
        err_prefix(&e, "%.*s", round % 400, noise);
        OK(is_clean(e.msg) && e.code == ERR_IO);
    }
}

static void test_the_first_error_is_kept_and_a_prefix_costs_no_more_than_its_length(void)
{
    struct err e = {0};
    char text[450];
    memset(text, 'x', sizeof text);
    text[sizeof text - 1] = 0;
    err_set(&e, ERR_IO, "%s", text);
    err_set(&e, ERR_MEMORY, "later");
    OK(e.code == ERR_IO && !strcmp(e.msg, text));
    err_prefix(&e, "model '%s'", "m");
    OK(!strncmp(e.msg, "model 'm': ", 11) && !strcmp(e.msg + 11, text));
    err_prefix(&e, "%s", text);
    OK(strlen(e.msg) == sizeof e.msg - 1);
    OK(err_set(NULL, ERR_IO, "x") == -1 && err_prefix(NULL, "x") == -1);
}

/* ---- files ---- */

static void path_in(char out[300], const char *dir, const char *name)
{
    snprintf(out, 300, "%s/%s", dir, name);
}

static bool still_a_pipe(const char *path)
{
    struct stat st;
    return stat(path, &st) == 0 && S_ISFIFO(st.st_mode);
}

static void test_pipes_and_directories_are_refused_without_waiting(void)
{
    const char *dir = unit_tmpdir();
    char pipe[300];
    struct mapped m;
    struct buf b = {0};
    struct err e = {0};
    path_in(pipe, dir, "pipe");
    OK(mkfifo(pipe, 0600) == 0);
    alarm(5); /* a reader that waits for a writer dies here */
    OK(file_map(&m, pipe, &e) != 0 && e.code == ERR_USAGE && strstr(e.msg, "not a regular file"));
    e = (struct err){0};
    OK(file_read_all(&b, pipe, 100, &e) != 0 && e.code == ERR_USAGE);
    e = (struct err){0};
    OK(file_map(&m, dir, &e) != 0 && e.code == ERR_USAGE && strstr(e.msg, "directory"));
    e = (struct err){0};
    OK(file_write_all(pipe, "x", 1, &e) != 0 && e.code == ERR_USAGE && still_a_pipe(pipe));
    e = (struct err){0};
    OK(file_write_all(dir, "x", 1, &e) != 0 && e.code == ERR_USAGE && strstr(e.msg, "directory"));
    alarm(0);
    buf_fini(&b);
}

static void test_files_come_back_whole_or_not_at_all(void)
{
    const char *dir = unit_tmpdir();
    char path[300], text[40000];
    struct buf b = {0};
    struct err e = {0};
    uint64_t rng = 2;
    path_in(path, dir, "f");
    for (size_t i = 0; i < sizeof text; i++)
        text[i] = (char)unit_rand(&rng);
    OK_CALL(file_write_all(path, text, sizeof text, &e), e);
    OK_CALL(file_read_all(&b, path, sizeof text, &e), e);
    OK(b.n == sizeof text && !memcmp(b.data, text, b.n));
    buf_clear(&b);
    OK(file_read_all(&b, path, sizeof text - 1, &e) != 0 && e.code == ERR_LIMIT);
    for (uint64_t n = 1; n <= 4; n++) { /* three pieces, and the look that finds the end */
        e = (struct err){0};
        buf_clear(&b);
        file_fail_at(n, EIO);
        OK(file_read_all(&b, path, sizeof text, &e) != 0 && e.code == ERR_IO);
        file_fail_at(0, 0);
    }
    e = (struct err){0};
    file_fail_at(1, ENOSPC);
    OK(file_write_all(path, "short", 5, &e) != 0 && e.code == ERR_FULL);
    file_fail_at(0, 0);
    e = (struct err){0};
    buf_clear(&b);
    OK_CALL(file_read_all(&b, path, sizeof text, &e), e);
    OK(b.n == sizeof text && !memcmp(b.data, text, b.n));
    OK_CALL(file_write_all(path, "", 0, &e), e);
    buf_clear(&b);
    OK(file_read_all(&b, path, 0, &e) == 0 && b.n == 0);
    buf_fini(&b);
}

/* ---- bytes ---- */

static void test_a_cursor_never_leaves_its_bytes(void)
{
    static const uint8_t bytes[] = {1, 2, 3, 4, 5, 6, 7, 8, 9};
    struct cursor c = {.p = bytes, .n = sizeof bytes};
    OK(cursor_u8(&c) == 1 && cursor_u16(&c) == 0x0302 && cursor_u32(&c) == 0x07060504);
    OK(!cursor_u32(&c) && c.bad && !cursor_left(&c) && !cursor_u8(&c));
    c = (struct cursor){.p = bytes, .n = sizeof bytes, .at = 1};
    OK(!cursor_bytes(&c, UINT64_MAX) && c.bad);
    c = (struct cursor){.p = bytes, .n = sizeof bytes, .at = 1};
    OK(cursor_u64(&c) == 0x0908070605040302 && !c.bad && !cursor_left(&c));
}

static void test_utf8_agrees_with_its_encoder_and_counts_bad_parts_as_whatwg(void)
{
    for (uint32_t cp = 0; cp <= 0x110000; cp++) {
        char s[4];
        uint32_t back = 0;
        bool real = cp < 0x110000 && (cp < 0xd800 || cp > 0xdfff);
        int n = utf8_encode(s, cp), got = utf8_decode(&back, s, (size_t)n);
        if (got != n || back != (real ? cp : 0xfffd) || utf8_tail(s, (size_t)n) ||
            utf8_tail(s, (size_t)n - 1) != (size_t)n - 1) {
            OK_MSG(false, "U+%04X", (unsigned)cp);
            return;
        }
    }
    static const struct {
        const char *s;
        int n;
    } bad[] = {{"\x80", -1},        {"\xc0\x80", -1},     {"\xe0\x80\x80", -1},
               {"\xe2\x82", -2},    {"\xf0\x9f\x98", -3}, {"\xf4\x90\x80\x80", -1},
               {"\xf1\x80\x41", -2}};
    for (size_t i = 0; i < ARRAY_LEN(bad); i++) {
        uint32_t cp;
        OK_MSG(utf8_decode(&cp, bad[i].s, strlen(bad[i].s)) == bad[i].n, "case %zu", i);
    }
}

/* ---- memory ---- */

static void test_arenas_give_zeroed_aligned_bytes_or_nothing(void)
{
    struct arena a = {0};
    uint64_t rng = 3;
    for (int i = 0; i < 400; i++) {
        size_t n = (size_t)(unit_rand(&rng) % (i % 20 ? 3000 : 200000));
        uint8_t *p = arena_alloc(&a, n);
        if (!OK(p && (uintptr_t)p % 16 == 0))
            break;
        uint8_t any = 0;
        for (size_t k = 0; k < n; k++)
            any |= p[k];
        OK(!any);
        memset(p, 0xff, n); /* the next one must not see it */
    }
    OK(!arena_alloc(&a, SIZE_MAX) && !arena_alloc(&a, SIZE_MAX - 63) &&
       !arena_strdup(&a, "", SIZE_MAX));
    mem_fail_at(1);
    OK(!arena_alloc(&a, 1 << 20));
    mem_fail_at(0);
    OK(arena_alloc(&a, 16));
    arena_fini(&a);
    OK(!mem_array(SIZE_MAX / 2, 3));
}

static void test_a_buffer_that_failed_stays_failed_and_keeps_what_it_had(void)
{
    struct buf b = {0};
    OK(!strcmp(buf_str(&b), ""));
    buf_puts(&b, "ab");
    buf_putc(&b, 'c');
    buf_printf(&b, "%d", 12);
    OK(!strcmp(buf_str(&b), "abc12") && b.n == 5);
    mem_fail_at(1);
    buf_put(&b, (char[300]){0}, 300);
    mem_fail_at(0);
    buf_puts(&b, "d");
    OK(b.failed && b.n == 5 && !strcmp(buf_str(&b), ""));
    buf_clear(&b);
    buf_printf(&b, "%0500d", 7);
    OK(!b.failed && b.n == 500 && b.data[499] == '7' && !b.data[500]);
    buf_fini(&b);
}

/* ---- hashes ---- */

static void sha_hex(char hex[65], const char *p, size_t n, size_t step)
{
    struct sha256 s;
    uint8_t raw[32];
    sha256_init(&s);
    for (size_t i = 0, part; i < n; i += part) { /* in pieces of many lengths */
        part = MIN(n - i, i % step + 1);
        sha256_add(&s, p + i, part);
    }
    sha256_done(&s, raw);
    hex_encode(hex, raw, 32);
}

static void test_digests_are_the_published_ones(void)
{
    enum { MILLION = 1000000 };
    char hex[65], *a = mem_alloc(MILLION);
    memset(a, 'a', MILLION);
    sha_hex(hex, "abc", 3, 1); /* FIPS 180-2, appendix B */
    OK(!strcmp(hex, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"));
    sha_hex(hex, a, MILLION, 1000);
    OK(!strcmp(hex, "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0"));
    sha_hex(hex, a, 0, 1);
    OK(!strcmp(hex, "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"));
    mem_free(a);
    /* The value that xxHash's own program prints for an empty file. */
    struct hash128 h = hash_xxh3("", 0, 0);
    OK(h.hi == 0x99aa06d3014798d8 && h.lo == 0x6001c324468d497f);
}

static void test_hexadecimal_takes_whole_bytes_that_fit(void)
{
    uint8_t raw[2];
    OK(hex_decode(raw, 2, "00fF", 4) == 2 && raw[0] == 0 && raw[1] == 255);
    OK(hex_decode(raw, 2, "00f", 3) < 0 && hex_decode(raw, 2, "0g", 2) < 0 &&
       hex_decode(raw, 2, "000000", 6) < 0 && hex_decode(raw, 2, "", 0) == 0);
}

int main(int argc, char **argv)
{
#define TEST(name)                                                                                 \
    {                                                                                              \
#name, test_##name                                                                         \
    }
    static const struct unit_test tests[] = {
        TEST(messages_are_one_line_of_valid_text),
        TEST(the_first_error_is_kept_and_a_prefix_costs_no_more_than_its_length),
        TEST(pipes_and_directories_are_refused_without_waiting),
        TEST(files_come_back_whole_or_not_at_all),
        TEST(a_cursor_never_leaves_its_bytes),
        TEST(utf8_agrees_with_its_encoder_and_counts_bad_parts_as_whatwg),
        TEST(arenas_give_zeroed_aligned_bytes_or_nothing),
        TEST(a_buffer_that_failed_stays_failed_and_keeps_what_it_had),
        TEST(digests_are_the_published_ones),
        TEST(hexadecimal_takes_whole_bytes_that_fit),
    };
    return unit_main(argc, argv, tests, ARRAY_LEN(tests));
}
