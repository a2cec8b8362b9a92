#!/bin/sh
# From a built ingot to a first answer: fetch the small model, import it, ask it something.
set -eu
ingot=${1:-build/ingot}
model=$("$(dirname "$0")/smollm2.sh") || {
    echo "cannot fetch the model; ingot itself is built: $ingot run your.gguf" >&2
    exit 1
}
if ! "$ingot" show smollm2 >/dev/null 2>&1; then
    "$ingot" import "$model" --name smollm2
fi
echo
echo "\$ $ingot run smollm2 \"What is gravity? Answer in one sentence.\""
"$ingot" run smollm2 --stats --temp 0 --max-tokens 120 "What is gravity? Answer in one sentence."
echo
echo "Chat with it:      $ingot run smollm2"
echo "Your own model:    $ingot run path/to/model.gguf"
