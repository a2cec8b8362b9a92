#!/usr/bin/env bash
# The memory that the placement states is the memory that the process has: 1,000 mixed requests on a
# made model and on SmolLM2 (when it is in cache/), from a file and with the persistent prefix tier;
# and 2,000 requests more take no more. Ends with the line of counts.
cd "$(dirname "$0")/../.." || exit 2
ingot=$(realpath "${INGOT:-build/ingot}")
make_model=${MKMODEL:-$(dirname "$ingot")/tools/mkmodel}
smollm2=${MEMORY_MODEL:-cache/SmolLM2-135M-Instruct.Q4_1.gguf}
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
export INGOT_HOME=$tmp/home

. tests/e2e/check.inc

# run MODEL REQUESTS ARGS...: bench serve; sets placed and resident
run() {
    local model=$1 n=$2
    shift 2
    placed=0 resident=0
    "$ingot" bench serve "$model" --requests "$n" --concurrency 4 --json "$@" >"$tmp/out" 2>"$tmp/err" &&
        read -r placed resident done_ < <(python3 -c 'import json, sys
j = json.load(sys.stdin); m = j["memory"]
print(m["placed"], m["resident"], j["outcomes"]["done"])' <"$tmp/out")
}
# within NAME REQUESTS: resident is placed, but for 5 % and 64 MiB
within() {
    awk -v p="$placed" -v r="$resident" 'BEGIN {
        d = r > p ? r - p : p - r; exit !(p > 0 && r > 0 && d <= 0.05 * p + 64 * 1048576) }'
    check "$1: resident within 5 % and 64 MiB of placed" $? "placed $placed, resident $resident; $(tail -n 1 "$tmp/err")"
    [ "${done_:-0}" = "$2" ]
    check "$1: all requests were done" $? "${done_:-none}"
    awk -v n="$1" -v p="$placed" -v r="$resident" 'BEGIN {
        printf "%-34s placed %7.1f MiB, resident %7.1f MiB\n", n, p / 1048576, r / 1048576 }'
}
# grows NAME BEFORE: less than 2 MiB
grows() {
    [ "$resident" -gt 0 ] && [ $((resident - $2)) -lt $((2 << 20)) ]
    check "$1: 2,000 requests more take less than 2 MiB more" $? "$2, then $resident"
}

if [ -x "$make_model" ]; then
    "$make_model" "$tmp/made.gguf" Q4_K_M --width 512 --layers 4 --heads 8 --kv-heads 2 --ffn 1024 --vocab 32000 >"$tmp/out" 2>&1
    check "a model is made" $? "$(cat "$tmp/out")"
    mix="--prompt 4:160 --gen 1:12 --shared-prefix 0.3:3"
    # shellcheck disable=SC2086
    {
        run "$tmp/made.gguf" 1000 $mix
        within "made model" 1000
        before=$resident
        run "$tmp/made.gguf" 3000 $mix
        grows "made model" "$before"
        run "$tmp/made.gguf" 1000 $mix --prefix-cache
        within "made model, prefix.db" 1000
        before=$resident
        run "$tmp/made.gguf" 3000 $mix --prefix-cache --seed 43
        within "made model, prefix.db, 3,000" 3000
        "$ingot" import "$tmp/made.gguf" --name made >"$tmp/out" 2>&1
        run made 1000 $mix
        within "made model from the store" 1000
    }
else
    skip "the made model: needs $make_model"
fi
if [ -f "$smollm2" ]; then
    run "$smollm2" 1000 --prompt 4:64 --gen 1:4
    within SmolLM2 1000
    before=$resident
    run "$smollm2" 3000 --prompt 4:64 --gen 1:4
    grows SmolLM2 "$before"
else
    skip "SmolLM2: needs $smollm2 (make quickstart fetches it)"
fi
echo "$passed passed, $failed failed, $skipped skipped"
[ $failed -eq 0 ]
