#!/bin/bash
# No prompt is computed twice: a prompt of 2,000 tokens on a real model, the process killed by
# kill -9 after its answer and started again. Prints the table of a RAM hit, a disk hit and a miss.
# Needs the small model in cache/ (make quickstart fetches it). Ends with the line of counts.
cd "$(dirname "$0")/../.." || exit 2
INGOT=$(realpath "${INGOT:-build/ingot}")
TOOL=${PREFIX_RUN:-$(dirname "$INGOT")/tools/prefix_run}
MODEL=${PREFIX_MODEL:-cache/SmolLM2-135M-Instruct.Q4_1.gguf}
if [ ! -f "$MODEL" ] || [ ! -x "$TOOL" ]; then
    echo "skipped prefix: needs $MODEL and $TOOL"
    echo "0 passed, 0 failed, 1 skipped"
    exit 0
fi
TMP=$(mktemp -d)
trap 'rm -rf "$TMP"' EXIT
export LC_ALL=C.UTF-8
passed=0 failed=0
is() { # NAME GOT WANT
    if [ "$2" = "$3" ]; then passed=$((passed + 1)); else
        failed=$((failed + 1))
        echo "FAILED $1: '$2', not '$3'"
    fi
}
ok() { # NAME CONDITION (of awk)
    is "$1" "$(awk "BEGIN { print ($2) ? \"yes\" : \"no\" }")" yes
}
field() { sed -n "$1p" "$TMP/out" | cut -d' ' -f"$2"; }

the_table() {
    mkdir "$TMP/home"
    "$TOOL" "$MODEL" - 2000 32 1 >"$TMP/out" || return
    local miss cold
    miss=$(field 1 1) cold=$(field 1 3)
    # a shell of its own, so that its remark on the kill is not ours
    bash -c '"$0" "$@"; exit $?' "$TOOL" "$MODEL" "$TMP/home" 2000 32 2 kill >"$TMP/out" 2>/dev/null
    is 'it was killed' $? 137
    local first ram=0 n_ram
    first=$(field 1 1) ram=$(field 2 1) n_ram=$(field 2 2)
    is 'the same tokens with an empty store' "$(field 1 3)" "$cold"
    is 'the same tokens from RAM' "$(field 2 3)" "$cold"
    local disk n_disk # the best of seven: what else the machine does only ever adds to it
    for _ in 1 2 3 4 5 6 7; do
        "$TOOL" "$MODEL" "$TMP/home" 2000 32 1 >"$TMP/out"
        field 1 1
    done >"$TMP/disk"
    disk=$(sort -n "$TMP/disk" | head -n 1) n_disk=$(field 1 2)
    is 'the same tokens from the disk after kill -9' "$(field 1 3)" "$cold"
    is 'every whole page came from the disk' "$n_disk" 1984
    is 'all but the last token came from RAM' "$n_ram" 1999
    awk -v miss="$miss" -v first="$first" -v ram="$ram" -v disk="$disk" 'BEGIN {
        printf "  %-34s %12s %8s\n", "2,000-token prompt", "first token", "ratio"
        printf "  %-34s %9.1f ms\n", "miss (no store)", miss
        printf "  %-34s %9.1f ms %8s\n", "miss (empty store)", first, "1/" int(miss / first + 0.5)
        printf "  %-34s %9.1f ms %8s\n", "RAM hit", ram, "1/" int(miss / ram)
        printf "  %-34s %9.1f ms %8s\n", "disk hit after kill -9", disk, "1/" int(miss / disk) }'
    awk "BEGIN { exit !($first < $miss) }" && miss=$first # the better one of a miss too
    ok 'a disk hit takes at most 1/20 of a miss' "$disk * 20 <= $miss"
    ok 'a RAM hit takes at most 1/20 of a miss' "$ram * 20 <= $miss"
}

# ask ARGS...: the answer in $TMP/answer, what --stats says in $stats.
ask() {
    "$INGOT" run "$MODEL" --home "$TMP/cli" --temp 0 --max-tokens 24 --stats "$@" \
        <"$TMP/prompt" >"$TMP/answer" 2>"$TMP/err"
    stats=$(cat "$TMP/err")
}
known() { echo "$stats" | sed -n 's/.*prompt [0-9]* (\([0-9]*\) known).*/\1/p'; }

the_command() {
    local i
    for i in $(seq 40); do
        echo "Line $i: the quick brown fox jumps over the lazy dog and writes it down."
    done >"$TMP/prompt"
    ask --no-prefix-cache
    cp "$TMP/answer" "$TMP/want"
    is 'nothing is known without the cache' "$(known)" ''
    is '--no-prefix-cache keeps nothing' "$(find "$TMP/cli" -name 'prefix.db' 2>/dev/null)" ''
    ask
    is 'the first time nothing is known' "$(known)" ''
    is 'the same answer with the cache' "$(cmp "$TMP/answer" "$TMP/want" && echo same)" same
    ask
    ok 'the next start knows the prompt' "0$(known) > 500"
    is 'the same answer from the disk' "$(cmp "$TMP/answer" "$TMP/want" && echo same)" same
    ask --kv f32
    is 'another KV type finds nothing' "$(known)" ''
    printf 'no database' >"$TMP/cli/prefix.db"
    ask
    is 'a damaged prefix.db costs time only' "$(cmp "$TMP/answer" "$TMP/want" && echo same)" same
}

the_table
the_command
echo "$passed passed, $failed failed, 0 skipped"
[ $failed = 0 ]
