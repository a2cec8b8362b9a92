#!/usr/bin/env bash
# A process with a loaded model that nobody asks anything uses less than 0.1 % of one core, with and
# without the persistent prefix tier. Ends with the line of counts.
cd "$(dirname "$0")/../.." || exit 2
ingot=$(realpath "${INGOT:-build/ingot}")
tools=$(dirname "$ingot")/tools
tmp=$(mktemp -d)
pid=
trap '[ -z "$pid" ] || kill "$pid" 2>/dev/null; rm -rf "$tmp"' EXIT

. tests/e2e/check.inc

seconds=10
# ticks PID: user and system time of all its threads; fields 14 and 15, behind the name in brackets
ticks() { sed 's/.*) //' "/proc/$1/stat" | awk '{print $12 + $13}'; }

idle() { # NAME HOME|-
    mkfifo "$tmp/in"
    "$tools/prefix_run" "$tmp/made.gguf" "$2" 100 16 2 wait <"$tmp/in" >"$tmp/out" 2>"$tmp/err" &
    pid=$!
    exec 9>"$tmp/in"
    for _ in $(seq 300); do
        [ "$(wc -l <"$tmp/out")" -ge 2 ] && break
        sleep 0.1
    done
    [ "$(wc -l <"$tmp/out")" -ge 2 ]
    check "$1: it has answered" $? "$(cat "$tmp/err")"
    sleep 2 # what is written behind is written, and threads sleep
    local before after
    before=$(ticks $pid)
    sleep $seconds
    after=$(ticks $pid)
    awk -v n="$((after - before))" -v hz="$(getconf CLK_TCK)" -v s=$seconds \
        'BEGIN {exit !(n >= 0 && n / hz / s < 0.001)}'
    check "$1: under 0.1 % of a core in $seconds s" $? "$before ticks before, $after after"
    echo "$1: $((after - before)) ticks in $seconds s"
    exec 9>&-
    wait $pid
    check "$1: it ends well" $? "$(cat "$tmp/err")"
    pid=
    rm "$tmp/in"
}

if [ -x "$tools/mkmodel" ] && [ -x "$tools/prefix_run" ]; then
    "$tools/mkmodel" "$tmp/made.gguf" Q8_0 --width 256 --layers 2 --heads 4 --kv-heads 2 --ffn 512 --vocab 4096 >"$tmp/out" 2>&1
    check "a model is made" $? "$(cat "$tmp/out")"
    mkdir "$tmp/home"
    idle "no store" -
    idle "with prefix.db" "$tmp/home"
else
    skip "idle: needs $tools/mkmodel and $tools/prefix_run"
fi
echo "$passed passed, $failed failed, $skipped skipped"
[ $failed -eq 0 ]
