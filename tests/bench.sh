#!/bin/sh
# Our speed on SmolLM2 (if it can be had) and on random models of 1.2B shape, beside the machine's
# limits. The models are made once, in cache/.
set -eu
cd "$(dirname "$0")/.."
B=${1:-build}
mkdir -p cache
for type in Q4_K_M Q8_0; do
    [ -f cache/bench-1b-$type.gguf ] || "$B/tools/mkmodel" cache/bench-1b-$type.gguf $type
done
model=$(deploy/smollm2.sh) && "$B/ingot" bench "$model"
for type in Q4_K_M Q8_0; do
    "$B/ingot" bench cache/bench-1b-$type.gguf
done
