#!/bin/bash
# What the commands promise, seen from outside: results, exit statuses, and one line of error that
# names the bad input and leaves the store as it was. INGOT= is the binary; test data is read from
# INGOT_SHARED. Ends with `N passed, N failed, N skipped`.
cd "$(dirname "$0")/../.." || exit 2
INGOT=$(realpath "${INGOT:-build/ingot}")
SHARED=$(realpath -m "${INGOT_SHARED:-../shared}")
LOADER=$SHARED/cases/loader
TMP=$(mktemp -d)
trap 'umount "$TMP/disk" 2>/dev/null; rm -rf "$TMP"' EXIT
export INGOT_HOME=$TMP/home LC_ALL=C.UTF-8
unset NO_COLOR
passed=0 failed=0 skipped=0

pass() { passed=$((passed + 1)); }
fail() { failed=$((failed + 1)); echo "FAILED $1: ${2:0:600}"; }
skip() { skipped=$((skipped + 1)); echo "skipped $1: $2"; }

# run ARGS...: sets rc, out, err (with $INPUT as standard input).
run() {
    timeout 60 "$INGOT" "$@" <"${INPUT:-/dev/null}" >"$TMP/out" 2>"$TMP/err"
    rc=$?
    out=$(tr -d '\0' <"$TMP/out") err=$(tr -d '\0' <"$TMP/err")
}
# ok NAME PATTERN ARGS...: exit status 0 and output that matches.
ok() {
    local name=$1 want=$2
    shift 2
    run "$@"
    if [ $rc = 0 ] && grep -Eq -- "$want" "$TMP/out"; then pass; else fail "$name" "status $rc, '$out', '$err'"; fi
}
# refused NAME STATUS PATTERN ARGS...: that status, nothing on standard output, one line that matches.
refused() {
    local name=$1 status=$2 want=$3
    shift 3
    run "$@"
    if [ $rc = "$status" ] && [ -z "$out" ] && [ "$(wc -l <"$TMP/err")" = 1 ] &&
        grep -Eqi -- "^ingot: .*($want)" "$TMP/err" && ! grep -q '[[:cntrl:]]' "$TMP/err"; then
        pass
    else
        fail "$name" "status $rc, '$out', '$err'"
    fi
}
is() { # NAME GOT WANT
    if [ "$2" = "$3" ]; then pass; else fail "$1" "'$2', not '$3'"; fi
}
store_state() { find "$INGOT_HOME" -type f ! -name '*-wal' ! -name '*-shm' -printf '%P %s\n' 2>/dev/null | sort; "$INGOT" list --json; }

usage() {
    ok 'no command shows first steps' 'First steps' 
    ok 'version' '^ingot [0-9]' --version
    ok 'help names every command' 'tokenize' help
    local c
    for c in run import export list show copy remove verify devices bench eval tokenize template version help; do
        ok "$c --help has usage, options and examples" "Usage:.* ingot $c" "$c" --help
        is "$c --help shows examples" "$(grep -c '^Examples:' "$TMP/out")" 1
    done
    refused 'unknown command' 2 "did you mean .ingot run." rnu
    refused 'a word of other programs' 2 'pull. comes later; .* .ingot import FILE.gguf' pull m
    refused 'another one' 2 'chat. is .ingot run MODEL' chat
    ok 'options before the command' '^\[\]' -q --home "$TMP/none" list --json
    ok 'options before the command, with =' '^\[\]' "--home=$TMP/none" -v list --json
    ok 'options before a command of two words' 'ingot bench serve' -q bench serve --help
    refused 'only options that every command has' 2 'unknown command .--temp' --temp 1 run m hi
    refused 'an option before the command without its value' 2 'a command is missing' --home
    refused 'an empty store names the next step' 1 'empty; .ingot import FILE.gguf' --home "$TMP/none" show m
    refused 'unknown option' 2 'unknown option .--temprature.; did you mean --temp' run m --temprature 1 hi
    refused 'value out of range' 2 'top-p' run m --top-p 3 hi
    refused 'missing argument' 2 'usage: ingot show' show
    refused 'surplus argument' 2 "unexpected 'x'" list x
    INGOT_TEMP=warm refused 'bad setting in the environment' 2 "INGOT_TEMP: 'warm'" run m hi
    refused 'a bad bias is found before the model is loaded' 2 'logit-bias' run m --logit-bias x hi
    "$INGOT" help >/dev/full 2>"$TMP/err"
    is 'a full disk behind standard output is an error' $? 1
}

start_up_is_quick() {
    local best=1000000 i t0 t1
    for i in 1 2 3 4 5 6 7; do
        t0=$(date +%s%N); "$INGOT" --version >"$TMP/out"; t1=$(date +%s%N)
        [ $(((t1 - t0) / 1000)) -lt $best ] && best=$(((t1 - t0) / 1000))
    done
    if [ $best -lt 20000 ]; then pass; else fail 'ingot --version takes under 20 ms' "$best us"; fi
}

bad_files() {
    refused 'missing file' 1 "no file '$TMP/nope.gguf'" run "$TMP/nope.gguf" hi
    refused 'missing file, import' 1 'nope.gguf' import "$TMP/nope.gguf"
    refused 'missing name' 1 "no model 'nobody'" run nobody hi
    refused 'directory' 1 "$TMP.* is a directory" run "$TMP/" hi
    refused 'directory, import' 1 'directory' import "$TMP"
    refused 'directory, verify' 1 'directory' verify "$TMP"
    refused 'empty file' 1 'empty.gguf' verify "$TMP/empty.gguf"
    refused 'not a model' 1 'text.gguf' import "$TMP/text.gguf"
    refused 'missing jinja file' 1 'nope.jinja' template "$TMP/nope.jinja" --messages -
}

with_model() {
    local m=$LOADER/ok-base.gguf
    [ -f "$m" ] || { skip 'commands on a model' "no $m"; return; }
    ok 'import' '^base: llama' import "$m" --name base
    ok 'the list has it' '^base ' list
    is 'list --json is JSON' "$("$INGOT" list --json | tr -d ' \n' | grep -c '"name":"base"')" 1
    refused 'an unknown name names the next step' 1 'ingot list. shows' show nobody
    refused 'a name that comes near' 1 'did you mean base' show bsae
    refused 'a name is not overwritten' 1 'base.*--replace' import "$LOADER/ok-align-64.gguf" --name BASE
    ok 'show' 'architecture +llama' show base
    ok 'show --template' 'message' show base --template
    ok 'show --metadata cuts arrays' 'tokens = .*283 in all' show "$m" --metadata
    ok 'show --json' '"license"' show base --json
    refused 'show --template with --json' 2 'do not go with it' show base --template --json
    odd_texts "$m"
    ok 'copy' 'also called' copy base other
    ok 'export' 'written' export base "$TMP/back.gguf"
    is 'export gives the same bytes' "$(cmp "$m" "$TMP/back.gguf" && echo same)" same
    refused 'export does not overwrite' 1 'back.gguf.*--replace' export base "$TMP/back.gguf"
    refused 'export to standard output' 2 'give a file name' export base -
    refused 'export into nowhere' 1 "the directory '$TMP/nowhere' does not exist" export base "$TMP/nowhere/x.gguf"
    mkdir "$TMP/dir"
    ok 'export into a directory' 'written to .*/dir/base.gguf' export base "$TMP/dir/"
    is 'under the name of the model' "$(cmp "$m" "$TMP/dir/base.gguf" && echo same)" same
    ok 'verify a file' ': header and sizes ok, weights not read' verify "$m"
    ok 'verify --deep' ': ok, every weight read: no NaN or infinite scale' verify --deep "$m"
    ok 'verify a model of the store' ': ok, every weight read and every checksum right' verify base
    run verify "$TMP/text.gguf" --json
    is 'verify --json tells an error once' "$rc $(grep -c '"error": ' "$TMP/out") $err" '1 1 '
    links "$m"
    full_disk "$m"
    refused 'verify --deep of a model of the store' 2 'deep is for files' verify base --deep
    ok 'remove' 'removed other' remove other
    refused 'removed' 1 "no model 'other'" show other
    ok 'devices names the choice' '^\* ' devices
    ok 'devices --json' '"chosen": true' devices --json
    refused 'unknown backend' 2 "no backend 'cuda'" run base --backend cuda hi
    refused 'unknown backend, devices' 2 "no backend 'cuda'" devices --backend cuda
    tokens_and_templates "$m"
    answers "$m"
}

links() {
    cp "$1" "$TMP/link.gguf"
    run import "$TMP/link.gguf" --link --name touched
    touch -d '2001-01-01' "$TMP/link.gguf"
    ok 'a linked file that was only touched' . run touched Hello -n 4 --seed 7 --raw
    rm "$TMP/link.gguf"
    ok 'a link whose file is gone is marked' '^touched .*linked, but the file is gone' list
    ok 'and for programs' '"link_gone": true' list --json
    run remove touched
}

# A store on a disk that something else has filled.
full_disk() {
    local m=$1 disk=$TMP/disk
    mkdir "$disk"
    mount -t tmpfs -o size=2m ingot-test "$disk" 2>/dev/null || { skip 'a full disk' 'cannot mount a tmpfs'; return; }
    run --home "$disk/home" import "$m" --name full
    cat /dev/zero >"$disk/filler" 2>/dev/null
    ok 'full disk: list' '^full ' --home "$disk/home" list
    ok 'full disk: show' 'architecture +llama' --home "$disk/home" show full
    ok 'full disk: run' . --home "$disk/home" run full Hello -n 4 --seed 7
    ok 'full disk: verify' 'checksum right' --home "$disk/home" verify full
    ok 'full disk: export' 'written' --home "$disk/home" export full "$TMP/full.gguf"
    refused 'full disk: copy' 1 'free some space' --home "$disk/home" copy full other
    refused 'full disk: import' 1 'free' --home "$disk/home" import "$LOADER/ok-align-64.gguf"
    ok 'full disk: remove' 'removed full' --home "$disk/home" rm full
    is 'full disk: it is gone' "$(find "$disk/home/models" -name '*.db' | wc -l)" 0
    umount "$disk"
}

# Names that no terminal and no JSON takes as they are.
odd_texts() {
    local m=$1 at dir=$TMP/d$'\377'
    mkdir "$dir" && cp "$m" "$dir/m.gguf"
    run import "$dir/m.gguf" --link --name linked
    ok 'list --json has a model whose path is no UTF-8' '"name": "linked"' list --json
    ok 'show of it' 'linked to .*d\?/m' show linked
    ok 'show --json of it' '"link"' show linked --json
    run remove linked
    # A name of 170 bytes in the place of one of 10: the data keep their alignment of 32.
    at=$(LC_ALL=C grep -abo 'general.name' "$m" | head -n 1 | cut -d: -f1)
    { head -c $((at + 16)) "$m"; printf '\252\0\0\0\0\0\0\0aa'; printf 'm\314\201%.0s' $(seq 56)
        tail -c +$((at + 16 + 8 + 10 + 1)) "$m"; } >"$TMP/marks.gguf"
    ok 'show --json has the whole of a long name' '"name": "aa.*m.?.?"' show "$TMP/marks.gguf" --json
    ok 'a long name does not break the table' '^name +aam' show "$TMP/marks.gguf"
}

tokens_and_templates() {
    local ids
    ids=$("$INGOT" tokenize base 'Hello you')
    is 'tokenize and back' "$("$INGOT" tokenize base --decode "${ids// /,}" | tail -c 10)" 'Hello you'
    printf 'Hello you' >"$TMP/in"
    INPUT=$TMP/in run tokenize base
    is 'text from standard input' "$out" "$ids"
    printf '%s\n' '{"text": "Hello you"}' '{"bytes_hex": "48656c6c6f20796f75"}' "{\"ids\": [${ids// /, }]}" '{"text": 1}' >"$TMP/in"
    INPUT=$TMP/in run tokenize base --jsonl
    is 'a bad line fails at the end' $rc 1
    is 'ids of a line' "$(sed -n 1p <<<"$out")" "[${ids// /, }]"
    is 'ids of hexadecimal bytes' "$(sed -n 2p <<<"$out")" "[${ids// /, }]"
    is 'bytes of ids' "$(sed -n 3p <<<"$out" | grep -c '48656c6c6f20796f75"}')" 1
    is 'a bad line has an error in its place' "$(sed -n 4p <<<"$out" | grep -c '"error"')" 1
    refused 'an id outside the vocabulary' 2 'token 99999 is outside' tokenize base --decode 1,99999
    refused 'lines with --decode' 2 'jsonl does not go with' tokenize base --jsonl --decode 1
    refused 'special tokens with --decode' 2 'do not go with --decode' tokenize base --special --decode 1
    refused 'text with --decode' 2 'TEXT does not go with' tokenize base x --decode 1

    printf '[{"role":"user","content":"Hi"}]' >"$TMP/chat.json"
    ok 'template of a model' 'Hi' template base --messages "$TMP/chat.json"
    printf "{{ messages[0]['content'] }}|{{ strftime_now('%%Y-%%m-%%d') }}" >"$TMP/t.jinja"
    ok 'a jinja file, with a fixed clock' '^Hi\|2026-01-15$' template "$TMP/t.jinja" -m "$TMP/chat.json" --now 2026-01-15
    printf '%s\n' '{"messages": [{"role": "user", "content": "A"}]}' '{"messages": 3}' >"$TMP/in"
    INPUT=$TMP/in run template "$TMP/t.jinja" --jsonl --now 2026-01-15
    is 'lines: text' "$(sed -n 1p <<<"$out")" '{"text": "A|2026-01-15"}'
    is 'lines: error' "$(sed -n 2p <<<"$out" | grep -c '^{"error": ')" 1
    refused 'lines with --extra' 2 'leave out --tools and --extra' template "$TMP/t.jinja" --jsonl --extra '{}'
    printf '{%% for' >"$TMP/bad.jinja"
    refused 'a template with a fault' 1 'bad.jinja' template "$TMP/bad.jinja" -m "$TMP/chat.json"
    refused 'a bad clock' 2 '--now' template "$TMP/t.jinja" -m "$TMP/chat.json" --now yesterday
    refused 'messages that are no JSON' 1 't.jinja is not JSON' template base --messages "$TMP/t.jinja"
}

answers() {
    local m=$1 a b
    run run base 'Hello' -n 8 --seed 7
    a=$out
    is 'an answer ends with status 0' $rc 0
    run run "$m" 'Hello' -n 8 --seed 7 --threads 1
    is 'the same seed, the same answer; file or store, any threads' "$out" "$a"
    printf 'Hello\n' >"$TMP/in"
    INPUT=$TMP/in run run base -n 8 --seed 7
    is 'the prompt from standard input' "$out" "$a"
    INGOT_SEED=7 INGOT_MAX_TOKENS=8 run run base Hello
    is 'settings from the environment' "$out" "$a"
    run run base Hello -n 8 --seed 7 --stats
    is 'the answer alone on standard output' "$out" "$a"
    is '--stats on standard error' "$(grep -c 'prompt [0-9]*.*tok/s; answer 8.*first token' "$TMP/err")" 1
    head -c 4000 /dev/zero | tr '\0' 'x' >"$TMP/in"
    INPUT=$TMP/in refused 'a prompt longer than the context' 1 'context' run base
    printf '\377' >"$TMP/in"
    INPUT=$TMP/in refused 'a prompt that is not text' 1 'UTF-8' run base
    INPUT=/dev/null refused 'an empty prompt' 2 'standard input is empty' run base
    refused 'an empty word as the prompt' 2 'the prompt is empty' run base ''
    head -c 400 /dev/zero | tr '\0' 'x' >"$TMP/in"
    INPUT=$TMP/in refused 'a context that can be larger' 1 'context holds 64; shorten it or use --ctx [0-9]+$' run base --ctx 64
    head -c 4000 /dev/zero | tr '\0' 'x' >"$TMP/in"
    INPUT=$TMP/in refused 'a context that can not' 1 'context holds [0-9]+; shorten it$' run base
    # The same model with a stated context whose keys and values no machine holds.
    local at
    at=$(LC_ALL=C grep -abo 'llama.context_length' "$m" | head -n 1 | cut -d: -f1)
    cp "$m" "$TMP/huge.gguf" && chmod u+w "$TMP/huge.gguf"
    printf '\377\377\377\177' | dd of="$TMP/huge.gguf" bs=1 seek=$((at + 24)) conv=notrunc 2>/dev/null
    refused 'no room for its memory' 1 'memory|fit' run "$TMP/huge.gguf" hi --ctx 1073741824
    run eval base --tokens 1,2,3 --logits "$TMP/logits"
    is 'logits: rows of the vocabulary' "$(stat -c %s "$TMP/logits")" $((3 * 283 * 4))
    run eval base --tokens 1,2,3 --logits "$TMP/logits1" --max-batch 1 --threads 1
    is 'logits do not depend on chunks or threads' "$(cmp "$TMP/logits" "$TMP/logits1" && echo same)" same
    refused 'an id outside the vocabulary, eval' 1 '99999' eval base --tokens 1,99999 --logits "$TMP/l"
    is 'nothing is left of a failed eval' "$(ls "$TMP/l" 2>/dev/null)" ''
    echo kept >"$TMP/l"
    run eval base --tokens 1,99999 --logits "$TMP/l"
    is 'a file is not overwritten before the ids are checked' "$(cat "$TMP/l")" kept
    rm "$TMP/l"
    refused 'eval without a task' 2 '--text' eval base
    refused 'logits of a text' 2 '--text' eval base --text "$TMP/in" --logits "$TMP/l"
    refused 'a window too short to score' 2 'ctx 3 is too short' eval base --text "$TMP/in" --ctx 3
    for i in $(seq 60); do echo "Hello you, said number $i to the others."; done >"$TMP/book"
    ok 'perplexity' '"perplexity": [0-9.e]+,' eval base --text "$TMP/book" --json --ctx 128
    ok 'the type of keys' '"keys": "bf16"' bench base --prompt 16 --gen 4 --reps 1 --json --kv-k bf16 --kv f32
    is 'and of values' "$(grep -Ec '"values": "f32"' "$TMP/out")" 1
    ok 'the memory that they take' '^kv +[0-9.]+ .B of bf16 keys and f32 values' bench base --prompt 16 --gen 4 --reps 1 --kv-keys bf16 --kv-values f32
    refused 'a KV type that the heads are too short for' 1 'q8_0 keeps blocks of 32 values.*use f16, bf16 or f32' run base hi --kv q8_0
    refused 'a KV type that there is not' 2 'q3. is not one of f16.bf16.f32.q8_0.q4_0' run base hi --kv q3
    ok 'bench' '^answer +4 ' bench base --prompt 16 --gen 4 --reps 1
    ok 'bench --json' '"part_of_peak"' bench base --prompt 16 --gen 4 --reps 1 --json
    # Of this model: q and output 32 x 32, k and v 32 x 16, three of 32 x 64; no embeddings, no output.
    is 'a prompt token costs the matrices of the layers' "$(grep -o '"prompt_macs": [0-9]*' "$TMP/out")" '"prompt_macs": 9216'
    refused 'an answer longer than the context' 1 'context of 16 tokens ends before' bench base --prompt 4 --gen 40 --ctx 16
}

hostile() {
    [ -f "$LOADER/manifest.jsonl" ] || { skip 'hostile model files' "no $LOADER"; return; }
    local before after
    before=$(store_state)
    refused 'truncated' 1 'cut-06' import "$LOADER/bpe-cut-06.gguf"
    refused 'unknown architecture' 1 'architecture' run "$LOADER/arch-unknown.gguf" hi
    refused 'unknown block type' 1 'type' run "$LOADER/ttype-99.gguf" hi
    refused 'wrong digest' 1 'digest|sha' import "$LOADER/ok-base.gguf" --name other --sha256 "$(printf '%064d' 0)"
    after=$(store_state)
    is 'the store is as it was' "$after" "$before"
}

touch "$TMP/empty.gguf"
echo 'this is no model' >"$TMP/text.gguf"
usage
start_up_is_quick
bad_files
with_model
hostile
echo "$passed passed, $failed failed, $skipped skipped"
[ $failed = 0 ]
