#!/bin/sh
# Builds and runs every test that needs no GPU, and ends with the plain line of all counts. Steps go
# on after a failure, so that one run shows everything.
cd "$(dirname "$0")/.." || exit 2
B=${1:-build}
log=$(mktemp)
trap 'rm -f "$log"' EXIT
passed=0 failed=0 skipped=0

count() { # name, rc, numbers of the closing line
    if [ $# -eq 2 ] || { [ "$2" -ne 0 ] && [ "${4:-0}" -eq 0 ]; }; then
        [ "$2" -eq 0 ] && passed=$((passed + 1)) || failed=$((failed + 1))
        [ "$2" -eq 0 ] || echo "FAILED step $1: exit status $2"
    fi
    passed=$((passed + ${3:-0})) failed=$((failed + ${4:-0})) skipped=$((skipped + ${5:-0}))
}

step() { # name, command...
    name=$1
    shift
    echo "==== $name"
    start=$(date +%s)
    "$@" >"$log" 2>&1
    rc=$?
    if [ $rc -eq 0 ] && [ -z "${VERBOSE:-}" ]; then
        grep -vE '^  (CC  |LINK) |^make\[|^[0-9]+ passed, [0-9]+ failed' "$log" | tail -n 400
    else
        cat "$log"
    fi
    # shellcheck disable=SC2046
    count "$name" $rc $(grep -E '^[0-9]+ passed, [0-9]+ failed' "$log" | tail -n 1 | tr -dc '0-9 ')
    echo "==== $name: $(($(date +%s) - start)) s"
}

make="make --no-print-directory -j2 B=$B WERROR=-Werror"
step build $make all unit tools
step tidy tests/tidy.sh
step unit $make test-unit
step avx-512-emulated $make emulated
step end-to-end $make e2e
step asan $make asan
step tsan $make tsan
step fuzz $make fuzz
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
