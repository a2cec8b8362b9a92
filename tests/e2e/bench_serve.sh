#!/usr/bin/env bash
# ingot bench serve on a made model: tenants find their own prefixes only, unless they are shared;
# few KV pages swap and lose nothing; what a scheduler costs one stream. Ends with the line of counts.
cd "$(dirname "$0")/../.." || exit 2
ingot=$(realpath "${INGOT:-build/ingot}")
make_model=${MKMODEL:-$(dirname "$ingot")/tools/mkmodel}
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
export INGOT_HOME=$tmp/home

. tests/e2e/check.inc

# serve ARGS...: the report in $tmp/out
serve() {
    "$ingot" bench serve "$tmp/made.gguf" --json "$@" >"$tmp/out" 2>"$tmp/err"
}
# value EXPRESSION: of the report j
value() {
    python3 -c 'import json, sys
j = json.load(open(sys.argv[1])); print(eval(sys.argv[2]))' "$tmp/out" "$1"
}
holds() { # name, condition on j
    [ "$(value "$2" 2>>"$tmp/err")" = True ]
    check "$1" $? "$2: $(tail -n 1 "$tmp/err") $(cut -c1-400 "$tmp/out")"
}
refused() { # name, exit status, what the error says, ARGS...
    local name=$1 status=$2 says=$3
    shift 3
    serve "$@"
    [ $? = "$status" ] && grep -q -- "$says" "$tmp/err" && [ "$(wc -l <"$tmp/err")" = 1 ]
    check "$name" $? "$(cat "$tmp/err")"
}

if [ ! -x "$make_model" ]; then
    skip "bench serve: needs $make_model"
    echo "$passed passed, $failed failed, $skipped skipped"
    exit 0
fi
"$make_model" "$tmp/made.gguf" Q4_K_M --width 1024 --layers 4 --heads 16 --kv-heads 4 --ffn 2048 --vocab 8000 >"$tmp/out" 2>&1
check "a model is made" $? "$(cat "$tmp/out")"

shared="-n 1 --requests 6 -w 0 -p 160 -g 4 --shared-prefix 1:128 --prefix-ram 16"
# shellcheck disable=SC2086
{
    serve $shared --tenants 6
    holds "six tenants, six prompts alike: nothing is found" \
        'sum(j["prefix"]["hit_tokens"].values()) == 0 and j["tokens_cached"] == 0'
    holds "and the reason is counted" 'j["prefix"]["missed_pages"]["other_tenant"] == 20'
    serve $shared --tenants 6 --share-prefix
    holds "shared, all but the first find the prefix" 'j["tokens_cached"] == 5 * 128'
    serve $shared --tenants 2
    holds "two tenants: each finds its own" 'j["tokens_cached"] == 4 * 128'
    serve $shared
    holds "without tenants all are one" 'j["tokens_cached"] == 5 * 128'
}
serve -n 4 --requests 12 -w 0 -p 32:64 -g 150 --kv-pages 8 --prefix-ram 1
holds "few pages: sequences are swapped out" 'j["swapped_out"] > 0'
holds "and every answer is whole" 'j["outcomes"]["done"] == 12 and j["tokens_out"] == 12 * 150'
serve -n 1 --requests 2 -w 1 -p 16 -g 96
holds "one stream: under 2 % of the time is the scheduler's" '0 < j["outside_device"] < 0.02'
refused "fewer pages than a context" 1 "KV pages" -p 64 -g 64 --kv-pages 1
refused "no tenants" 2 "out of range" --tenants 0

echo "$passed passed, $failed failed, $skipped skipped"
[ $failed -eq 0 ]
