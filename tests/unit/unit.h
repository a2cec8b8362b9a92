/* The unit tests' small frame: a test is a function; a program lists its tests in a table and calls
 * unit_main. It prints one line per failure, names what was skipped, and ends with the plain line
 * `N passed, N failed, N skipped`. With arguments, only tests whose name contains one of them run. */
#ifndef INGOT_UNIT_H
#define INGOT_UNIT_H

#include "base/base.h"

struct unit_test {
    const char *name;
    void (*fn)(void);
};
int unit_main(int argc, char **argv, const struct unit_test *tests, size_t n);

/* Record a failure with its place and go on; returns cond. */
bool unit_check(bool cond, const char *file, int line, const char *fmt, ...) PRINTF_LIKE(4, 5);
#define OK(cond)           unit_check(!!(cond), __FILE__, __LINE__, "%s", #cond)
#define OK_MSG(cond, ...)  unit_check(!!(cond), __FILE__, __LINE__, __VA_ARGS__)
#define OK_CALL(call, err) unit_check((call) == 0, __FILE__, __LINE__, "%s: %s", #call, (err).msg)
/* Mark the running test as skipped, with the reason (printed). */
void unit_skip(const char *fmt, ...) PRINTF_LIKE(1, 2);

/* Deterministic generator for test data (splitmix64). */
uint64_t unit_rand(uint64_t *state);
float unit_randn(uint64_t *state); /* normal, mean 0, deviation 1 */

/* "<shared>/<rel>" where shared is $INGOT_SHARED or ../shared; NULL (and the test is marked
 * skipped) when it is not there. The result is a static buffer, four deep. */
const char *unit_shared(const char *rel);
/* A fresh empty temporary directory, removed at exit; static buffer, eight deep. */
const char *unit_tmpdir(void);
/* The same in memory where there is such a place: thousands of syncs take minutes on a disk, and a
 * kill leaves the same files either way. */
const char *unit_memdir(void);

#endif
