#!/usr/bin/env bash
# `ingot cache`: what is in it, by model; a warmed cache goes to another store and is hit there.
cd "$(dirname "$0")/../.." || exit 2
ingot=${INGOT:-build/ingot}
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
export INGOT_HOME=$tmp/home

. tests/e2e/check.inc

"$ingot" cache bogus >"$tmp/out" 2>&1
check "an unknown action is wrong usage" $(($? != 2)) "$(cat "$tmp/out")"
"$ingot" cache trim many >"$tmp/out" 2>&1
check "a size that is none is wrong usage" $(($? != 2)) "$(cat "$tmp/out")"
"$ingot" cache import "$tmp/nothing" >"$tmp/out" 2>&1
check "a missing file is an error" $(($? != 1)) "$(cat "$tmp/out")"

model=$(deploy/smollm2.sh 2>"$tmp/err")
if [ -z "$model" ]; then
    echo "skipped: no model to warm the cache with: $(tail -n 1 "$tmp/err")"
    echo "$passed passed, $failed failed, 1 skipped"
    exit $((failed > 0))
fi
ask="A goat, a fox and a raven live in a forest near the sea. $(seq -s ' ' 40) What do they do all day?"
known() { grep -o '[0-9]* known' "$tmp/err" | tr -dc 0-9; }
"$ingot" import "$model" --name smollm2 --link >"$tmp/out" 2>&1
first=$("$ingot" run smollm2 --stats --temp 0 -n 8 "$ask" 2>"$tmp/err")
check "the first run knows nothing" "$(known | grep -c .)" "$(cat "$tmp/err")"
"$ingot" cache >"$tmp/out" 2>&1
grep -q smollm2 "$tmp/out"
check "show names the model" $? "$(cat "$tmp/out")"
"$ingot" cache --json | python3 -c 'import json,sys; c = json.load(sys.stdin); sys.exit(not c["pages"] >= 3)'
check "show --json counts the pages" $?
"$ingot" cache export "$tmp/warm.db" >"$tmp/out" 2>&1
check "export" $? "$(cat "$tmp/out")"
"$ingot" cache export "$tmp/warm.db" >"$tmp/out" 2>&1
check "export does not overwrite" $(($? != 1)) "$(cat "$tmp/out")"
"$ingot" cache clear smollm2 && "$ingot" run smollm2 --no-prefix-cache --temp 0 -n 8 "$ask" >"$tmp/out" 2>&1
[ "$(cat "$tmp/out")" = "$first" ]
check "without the cache the answer is the same" $? "$(cat "$tmp/out")"

export INGOT_HOME=$tmp/other
"$ingot" import "$model" --name here --link >"$tmp/out" 2>&1
"$ingot" cache import "$tmp/warm.db" >"$tmp/out" 2>&1
check "import into another store" $? "$(cat "$tmp/out")"
second=$("$ingot" run here --stats --temp 0 -n 8 "$ask" 2>"$tmp/err")
[ "$(known)" -ge 96 ] 2>/dev/null
check "the warmed cache is hit there" $? "$(cat "$tmp/err")"
[ "$second" = "$first" ]
check "and the answer is the same" $? "$second"
"$ingot" cache trim 0 >"$tmp/out" 2>&1 && "$ingot" cache --json | python3 -c 'import json,sys; sys.exit(json.load(sys.stdin)["pages"])'
check "trim to nothing" $?
echo "$passed passed, $failed failed, 0 skipped"
[ $failed -eq 0 ]
