#!/bin/sh
# Kill imports at many random moments and in every single write, and check after each that the store
# holds no model or a whole one, that its databases are sound, and that the next import finishes.
# usage: tests/fault/kill_import.sh [KILLS] [BUILD-FOLDER]
set -eu
cd "$(dirname "$0")/../.."
kills=${1:-200}
build=${2:-build}
make -s B="$build" "$build/unit/test_store_faults"
INGOT_KILLS=$kills exec "$build/unit/test_store_faults" kill
