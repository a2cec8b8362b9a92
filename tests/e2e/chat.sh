#!/bin/bash
# The chat as a person meets it: typed into a terminal (tmux) and read off its screen. Also: an idle
# prompt uses no processor time. Skipped without tmux or a model. Ends with the line of counts.
cd "$(dirname "$0")/../.." || exit 2
INGOT=$(realpath "${INGOT:-build/ingot}")
MODEL=$(realpath -m "${INGOT_SHARED:-../shared}")/cases/loader/ok-base.gguf
if ! command -v tmux >/dev/null || [ ! -f "$MODEL" ]; then
    echo "skipped chat: needs tmux and $MODEL"
    echo "0 passed, 0 failed, 1 skipped"
    exit 0
fi
TMP=$(mktemp -d)
T=
n_starts=0
stop_tmux() { [ -z "$T" ] || $T kill-server 2>/dev/null; }
trap 'stop_tmux; rm -rf "$TMP"' EXIT
export INGOT_HOME=$TMP/home LC_ALL=C.UTF-8
passed=0 failed=0 ENV=

screen() { $T capture-pane -p -S -200; }
# see NAME PATTERN: the screen shows it within ten seconds.
see() {
    local i
    for i in $(seq 100); do
        if screen | grep -Eq -- "$2"; then
            passed=$((passed + 1))
            return
        fi
        sleep 0.1
    done
    failed=$((failed + 1))
    echo "FAILED $1: no '$2' on the screen:"
    screen | grep -v '^$' | tail -n 25
}
is() { # NAME GOT WANT
    if [ "$2" = "$3" ]; then passed=$((passed + 1)); else
        failed=$((failed + 1))
        echo "FAILED $1: '$2', not '$3'"
    fi
}
keys() { $T send-keys "$@"; }
type_text() { $T send-keys -l -- "$1"; }
prompt_again() { # until the last line of the screen is an empty prompt
    local i
    for i in $(seq 150); do
        [ "$(screen | grep -v '^$' | tail -n 1)" = '>>>' ] && return
        sleep 0.1
    done
    failed=$((failed + 1))
    echo "FAILED $1: no prompt"
    screen | grep -v '^$' | tail -n 25
}
begin() { # ARGS...: a chat on a fresh screen, with a server of its own
    stop_tmux
    n_starts=$((n_starts + 1))
    T="tmux -L ingot-chat-$$-$n_starts -f /dev/null"
    $T new-session -d -x 60 -y 20 "env $ENV '$INGOT' run '$MODEL' --seed 3 $*; echo \"status \$?\"; sleep 60"
    prompt_again start
    [ $failed = 0 ] || { echo "$passed passed, $failed failed, 0 skipped"; exit 1; }
}

talk() {
    begin -n 6
    see 'the greeting names the way out' '/bye leaves'
    type_text 'Hello'
    keys Enter
    see 'the answer is measured' 'answer 6 at .* tok/s'
    prompt_again 'after an answer'
    keys Up
    see 'Up brings the line back' '^>>> Hello$'
    keys C-u
    type_text 'one\'
    keys Enter
    type_text 'two'
    see 'a backslash goes on' '^\.\.\. two$'
    keys C-c
    see 'Ctrl-C hints at the way out' '/bye or Ctrl-D leaves'
    prompt_again 'after Ctrl-C'
    type_text '"""first'
    keys Enter
    type_text 'second"""'
    keys Enter
    see 'a block is one message' 'prompt [0-9]+ .*answer 6'
    prompt_again 'after a block'
    type_text "$(printf 'x%.0s' $(seq 150))"
    see 'a line wider than the screen wraps' '^x{34}$'
    keys C-u
    keys C-r
    type_text 'Hel'
    see 'Ctrl-R searches' '^\(search\) Hel: Hello'
    keys C-g
    prompt_again 'after a search'
}

slash_commands() {
    type_text '/help'
    keys Enter
    see '/help lists commands' '/system \[TEXT\]'
    type_text '/st'
    keys Tab Enter
    see 'Tab completes; /stats answers' 'Speeds after every answer: off'
    type_text '/set temp 0.5'
    keys Enter
    see '/set sets' 'temp +0.5'
    type_text '/set tpo-k 5'
    keys Enter
    see '/set suggests' 'did you mean top-k'
    type_text '/set ctx 5'
    keys Enter
    see '/set explains what is fixed' 'ctx is fixed once the model is loaded'
    type_text '/system Be brief.'
    keys Enter
    see '/system sets' 'System prompt set'
    type_text '/save talk'
    keys Enter
    see '/save keeps' '/load talk'
    type_text '/clear'
    keys Enter
    see '/clear clears' 'Cleared; the system prompt stays'
    type_text '/load talk'
    keys Enter
    see '/load brings back' 'Loaded [0-9]+ messages'
    type_text '/show'
    keys Enter
    see '/show shows' 'context +[0-9]+ tokens'
    type_text '/hlep'
    keys Enter
    see 'an unknown command is hinted at' 'did you mean /help'
    type_text '/load'
    keys Enter
    see '/load alone lists' 'talk +(just now|[0-9]+ minutes? ago)'
    type_text '/save /tmp/talk'
    keys Enter
    see '/save takes no path' 'looks like a path'
    type_text '/system """Be'
    keys Enter
    type_text 'kind."""'
    keys Enter
    see 'a system prompt of several lines' 'kind\."""'
    type_text '/system'
    keys Enter
    see 'is set as such' '^kind\.$'
    type_text '/stats'
    keys Enter
    see '/stats, on again' 'after every answer: on'
    type_text '/etc/hosts has no command'
    keys Enter
    see 'a path is text' 'prompt [0-9]+ .*answer 6'
    prompt_again 'after a path'
    type_text '/clear'
    keys Enter
    prompt_again 'after /clear'
    type_text ' /clear is not meant'
    keys Enter
    prompt_again 'after a text with a blank'
    type_text '/show'
    keys Enter
    see 'a blank before makes it text' 'chat +3 messages'
    type_text '/?'
    keys Enter
    see '/? is help, its lines broken between words' '^ +command$'
    see 'a long line of ours is broken between words' '^/help lists the commands, /bye leaves\.$'
    keys Escape
    sleep 0.2
    type_text 'bye'
    see 'Escape alone swallows no key' '^>>> bye$'
    keys C-u
}

# Lines that are typed while an answer runs are sent one after the other, a paste is one.
ahead() {
    ENV=INGOT_ISA=scalar begin --ctx 512 -n 120
    $T send-keys -l 'first' \; send-keys Enter
    sleep 0.02
    $T send-keys -l 'second' \; send-keys Enter \; send-keys -l 'third' \; send-keys Enter
    see 'the second line typed ahead' '^>>> second$'
    see 'the third line typed ahead' '^>>> third$'
    prompt_again 'after lines typed ahead'
    is 'all were answered' "$(screen | grep -c 'answer [0-9]')" 3
    $T set-buffer "$(printf 'paste one\npaste two\n')"
    type_text '/clear'
    keys Enter
    prompt_again 'after /clear'
    type_text 'fourth'
    keys Enter
    sleep 0.02
    $T paste-buffer -p
    see 'a paste is one draft' '^\.\.\. paste two$'
    keys C-c
    prompt_again 'after a paste'
    type_text '/bye'
    keys Enter
    see '/bye leaves' 'status 0'
    is 'the terminal echoes again' "$($T send-keys -l 'visible'; sleep 0.3; screen | grep -c visible)" 1
}

# Processor time of a process in clock ticks: fields 14 and 15 of its stat line (proc(5)).
ticks() { sed 's/.*) //' "/proc/$1/stat" | awk '{print $12 + $13}'; }

idle() {
    local pid before after
    prompt_again idle
    pid=$(pgrep -P "$($T list-panes -F '#{pane_pid}')" -f "$MODEL" | head -n 1)
    sleep 0.5
    before=$(ticks "$pid")
    sleep 3
    after=$(ticks "$pid")
    if [ -n "$before" ] && [ $((after - before)) -le 1 ]; then passed=$((passed + 1)); else
        failed=$((failed + 1))
        echo "FAILED an idle prompt uses no processor time: $before to $after ticks in 3 s"
    fi
}

leave() {
    keys C-d
    see 'Ctrl-D leaves with status 0' 'status 0'
    is 'the history is kept, for its owner only' "$(stat -c %a "$INGOT_HOME/history")" 600
    is 'the history has the block as one entry' "$(grep -c '^"""first\\nsecond"""$' "$INGOT_HOME/history")" 1
    begin -n 6
    keys $(printf 'Up %.0s' $(seq 40))
    see 'the history survives' '^>>> Hello$'
    keys C-u
    type_text '/bye'
    keys Enter
    see '/bye leaves with status 0' 'status 0'
}

interrupt() {
    ENV=INGOT_ISA=scalar begin --ctx 512 --temp 1.5
    local i
    for i in 1 2 3 4 5 6 7 8; do # the tiny model is quick: try until one is caught
        type_text 'Hello'
        keys Enter
        sleep 0.0$i
        keys C-c C-c # an impatient person presses it twice
        prompt_again 'after the answer was stopped'
        screen | grep -q '(stopped)' && break
        type_text '/clear'
        keys Enter
        prompt_again 'after /clear'
    done
    see 'Ctrl-C stops the answer' '\(stopped\)'
    is 'Ctrl-C while answering does not end the program' "$(screen | grep -c 'status')" 0
    type_text 'Hello again'
    keys Enter
    prompt_again 'a second answer'
    # A short context fills up: a message says what to do, and the chat goes on.
    type_text "$(printf 'word %.0s' $(seq 150))"
    keys Enter
    see 'a full context says what to do' '/clear starts over'
    prompt_again 'after a full context'
    type_text '/bye'
    keys Enter
    see '/bye leaves' 'status 0'
}

plain() {
    ENV=TERM=dumb begin -n 4
    type_text 'Hello'
    keys Enter
    see 'a dumb terminal gets an answer' 'answer 4'
    is 'a dumb terminal gets no escape sequences' "$($T capture-pane -p -e | grep -c $'\033')" 0
    type_text '/bye'
    keys Enter
    see 'and /bye' 'status 0'
}

talk
slash_commands
idle
leave
interrupt
ahead
plain
echo "$passed passed, $failed failed, 0 skipped"
[ $failed = 0 ]
