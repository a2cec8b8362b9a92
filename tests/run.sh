#!/bin/sh
# Runs test programs, shows their output, adds up their closing lines, and ends with the plain line.
# A program that ends without such a line, or not with 0, counts as failed.
passed=0 failed=0 skipped=0
out=$(mktemp)
trap 'rm -f "$out"' EXIT

add_up() { # rc, then the numbers of the closing line (none: it has none)
    rc=$1 p=${2:-0} f=${3:-0} s=${4:-0}
    if [ $# -eq 1 ] || { [ "$rc" -ne 0 ] && [ "$f" -eq 0 ]; }; then
        echo "FAILED: exit status $rc"
        f=$((f + 1))
    fi
    passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
}

for t in "$@"; do
    echo "== $t"
    timeout "${TEST_TIMEOUT:-900}" "$t" >"$out" 2>&1
    rc=$?
    grep -vE '^[0-9]+ passed, [0-9]+ failed' "$out"
    # shellcheck disable=SC2046
    add_up $rc $(grep -E '^[0-9]+ passed, [0-9]+ failed' "$out" | tail -n 1 | tr -dc '0-9 ')
done
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
