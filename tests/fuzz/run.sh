#!/bin/sh
# Runs each fuzz target in the folder for a while: the GGUF one 60 s, the others 20 s (FUZZ_SECONDS
# sets another time for all). A finding is printed with the input that made it. Seeds are the shared
# cases, where they are.
cd "$(dirname "$0")/../.." || exit 2
dir=$1
shared=${INGOT_SHARED:-../shared}
passed=0 failed=0
for t in "$dir"/fuzz_*; do
    case $t in *.o | *.d) continue ;; esac
    name=$(basename "$t")
    seconds=20 seeds=
    [ "$name" = fuzz_gguf ] && seconds=60 && seeds="$shared/cases/loader"
    [ -d "$seeds" ] || seeds=
    corpus=$(mktemp -d)
    # shellcheck disable=SC2086
    if "$t" -max_total_time="${FUZZ_SECONDS:-$seconds}" -timeout=10 -rss_limit_mb=2048 -max_len=65536 \
        -print_final_stats=1 -verbosity=0 -artifact_prefix="$corpus/" "$corpus" $seeds >"$corpus.log" 2>&1; then
        echo "$name: $(grep -o 'number_of_executed_units: *[0-9]*' "$corpus.log" | tr -dc 0-9) runs, no finding"
        passed=$((passed + 1))
    else
        cat "$corpus.log"
        for f in "$corpus"/crash-* "$corpus"/timeout-* "$corpus"/oom-*; do
            [ -f "$f" ] && echo "input in base64:" && base64 "$f" | head -n 40
        done
        failed=$((failed + 1))
    fi
    rm -rf "$corpus" "$corpus.log"
done
echo "$passed passed, $failed failed, 0 skipped"
[ $failed -eq 0 ]
