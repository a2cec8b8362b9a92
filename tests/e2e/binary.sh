#!/usr/bin/env bash
# The binary as a thing to copy: static, small, quick to start, alive in an empty root. Then a real
# model (SmolLM2, fetched by pip): import, answers, the second run's first token, load times.
cd "$(dirname "$0")/../.." || exit 2
ingot=${INGOT:-build/ingot}
case $ingot in /*) ;; *) ingot=$PWD/$ingot ;; esac
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
export INGOT_HOME=$tmp/home

. tests/e2e/check.inc
median() { sort -n | awk '{v[NR] = $1} END {print v[int((NR + 1) / 2)]}'; }

seen=$(file -b "$ingot")
[[ $seen == *"statically linked"* ]]
check "file says statically linked" $? "$seen"

cp "$ingot" "$tmp/stripped" && strip "$tmp/stripped"
size=$(stat -c %s "$ingot")
[ "$size" -lt 15000000 ]
check "size below 15 MB" $? "$size"
echo "size $size bytes ($(stat -c %s "$tmp/stripped") stripped)"

for _ in $(seq 21); do
    a=$(date +%s%N)
    "$ingot" --version >"$tmp/out"
    echo $((($(date +%s%N) - a) / 1000))
done | median >"$tmp/us"
[ "$(cat "$tmp/us")" -lt 20000 ]
check "--version in under 20 ms (median of 21)" $? "$(cat "$tmp/us") us"
echo "--version takes $(cat "$tmp/us") us"

if [ "$(id -u)" = 0 ]; then
    mkdir -p "$tmp/root"
    cp "$ingot" "$tmp/root/ingot"
    seen=$(env -i "$(command -v chroot)" "$tmp/root" /ingot --version 2>&1)
    [[ $seen == ingot\ * ]]
    check "runs under env -i in an empty root" $? "$seen"
    seen=$(env -i "$(command -v chroot)" "$tmp/root" /ingot devices 2>&1)
    check "finds its devices there" $? "$seen"
else
    skip "empty root: needs to be root"
fi

model=$(deploy/smollm2.sh 2>"$tmp/err")
if [ -z "$model" ]; then
    skip "the real model: $(tail -n 1 "$tmp/err")"
else
    "$ingot" import "$model" --name smollm2 >"$tmp/out" 2>&1
    check "import" $? "$(cat "$tmp/out")"
    ask="What is gravity? Answer in one sentence."
    first=$("$ingot" run smollm2 --temp 0 --max-tokens 60 "$ask" 2>"$tmp/err")
    check "an answer" $? "$(cat "$tmp/err")"
    [[ $first == *[Gg]ravity* ]]
    check "the answer is about the question" $? "$first"
    a=$(date +%s%N)
    "$ingot" run smollm2 --temp 0 --max-tokens 1 "$ask" >"$tmp/out" 2>&1
    ms=$((($(date +%s%N) - a) / 1000000))
    [ $ms -lt 3000 ]
    check "second run: process to first token in under 3 s" $? "$ms ms"
    echo "second run: $ms ms from start to the end of a one-token answer"
    again=$("$ingot" run "$model" --temp 0 --max-tokens 60 "$ask" 2>&1)
    [ "$again" = "$first" ]
    check "the plain file answers the same" $? "$again"
    "$ingot" run smollm2 --stats --temp 0 --max-tokens 8 "$ask" >"$tmp/out" 2>"$tmp/err"
    grep -q 'tok/s' "$tmp/err"
    check "--stats prints the speeds" $? "$(cat "$tmp/err")"
    seconds() { "$ingot" bench "$1" --prompt 0 --gen 1 --reps 1 --json | python3 -c 'import json,sys; print(json.load(sys.stdin)["load_s"])'; }
    ratio=9
    for _ in 1 2 3; do # a busy machine may spoil one series
        rm -f "$tmp/store" "$tmp/plain"
        for _ in 1 2 3 4 5 6 7; do
            seconds smollm2 >>"$tmp/store"
            seconds "$model" >>"$tmp/plain"
        done
        ratio=$(echo "$(median <"$tmp/store") $(median <"$tmp/plain")" | awk '{printf "%.2f", $1 / $2}')
        echo "load: store $(median <"$tmp/store") s, file $(median <"$tmp/plain") s, ratio $ratio (medians of 7)"
        awk -v r="$ratio" 'BEGIN {exit !(r > 0 && r <= 1.25)}' && break
    done
    awk -v r="$ratio" 'BEGIN {exit !(r > 0 && r <= 1.25)}'
    check "loading from the store takes at most 1.25 times loading the file" $? "$ratio"
    "$ingot" export smollm2 "$tmp/back.gguf" >"$tmp/out" 2>&1 && cmp "$model" "$tmp/back.gguf"
    check "export gives the file back" $? "$(cat "$tmp/out")"
fi
echo "$passed passed, $failed failed, $skipped skipped"
[ $failed -eq 0 ]
