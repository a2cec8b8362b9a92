#!/bin/sh
# Kill whole engines in the middle of many random writes of their prefix cache, and check after each
# that the next start answers with the right tokens.
# usage: tests/fault/kill_engine.sh [KILLS] [BUILD-FOLDER]
set -eu
cd "$(dirname "$0")/../.."
kills=${1:-200}
build=${2:-build}
make -s B="$build" "$build/unit/test_engine_faults"
INGOT_KILLS=$kills exec "$build/unit/test_engine_faults" kill
