#!/bin/sh
# Kill the writer of the prefix cache at many random moments and in every single write, and check after
# each that nothing flushed is lost, no page is wrong, and the next start works.
# usage: tests/fault/kill_prefix.sh [KILLS] [BUILD-FOLDER]
set -eu
cd "$(dirname "$0")/../.."
kills=${1:-200}
build=${2:-build}
make -s B="$build" "$build/unit/test_prefix_faults"
INGOT_KILLS=$kills exec "$build/unit/test_prefix_faults" kill
