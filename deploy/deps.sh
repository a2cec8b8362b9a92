#!/bin/sh
# Installs the Debian or Ubuntu packages that ingot is built with (and, with `check`, tested with), if
# any is missing. Needs root or sudo for that, and says so.
set -eu
build="gcc make libc6-dev libsqlite3-dev libmbedtls-dev libjansson-dev libpcre2-dev libutf8proc-dev
libzstd-dev zlib1g-dev libxxhash-dev ca-certificates python3 python3-pip"
check="clang libclang-rt-dev libsimde-dev clang-format tmux file procps binutils git"
want=$build
[ "${1:-}" = check ] && want="$build $check"

missing=
for p in $want; do
    dpkg-query -W -f '${Status}' "$p" 2>/dev/null | grep -q 'ok installed' || missing="$missing $p"
done
[ -z "$missing" ] && exit 0
echo "installing packages:$missing"
if [ "$(id -u)" = 0 ]; then
    as_root=
elif command -v sudo >/dev/null; then
    as_root=sudo
else
    echo "deps: not root and no sudo; install these packages by hand:$missing" >&2
    exit 1
fi
$as_root apt-get update -qq
# shellcheck disable=SC2086
DEBIAN_FRONTEND=noninteractive $as_root apt-get install -y -qq --no-install-recommends $missing >/dev/null
