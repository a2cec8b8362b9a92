#!/bin/sh
# Prints what strays from the style (long files, long functions, long headers) and fails on an
# include that goes up the dependency list: cli -> web -> engine -> {text store backends} -> gguf -> base.
cd "$(dirname "$0")/.." || exit 2
bad=0
rank() {
    case $1 in
    base/*) echo 0 ;; gguf/*) echo 1 ;; text/*) echo 2t ;; store/*) echo 2s ;; backends/*) echo 2b ;;
    engine/*) echo 3 ;; web/*) echo 4 ;; cli/*) echo 5 ;; main.c) echo 6 ;; *) echo 9 ;;
    esac
}
for f in $(git ls-files -co --exclude-standard -- '*.c' '*.h' | grep -v '^tests/'); do
    [ -f "$f" ] || continue
    from=$(rank "$f")
    for inc in $(sed -n 's/^#include "\([^"]*\)".*/\1/p' "$f"); do
        to=$(rank "$inc")
        if [ "${to%[a-z]}" -gt "${from%[a-z]}" ] || { [ "${to%[a-z]}" = "${from%[a-z]}" ] && [ "$to" != "$from" ]; }; then
            echo "$f includes $inc, which is above it in the dependency list"
            bad=1
        fi
    done
done
for f in $(git ls-files -co --exclude-standard -- '*.c' '*.h'); do
    [ -f "$f" ] || continue
    n=$(wc -l <"$f")
    [ "$n" -gt 1000 ] && echo "$f: $n lines (1000 is the mark)"
    # A function starts at a '{' in column 1 and ends at a '}' in column 1.
    awk -v f="$f" '/^{/ {s = NR} /^}/ {if (s && NR - s > 71) print f ":" s ": function of " NR - s - 1 " lines (70 is the mark)"; s = 0}' "$f"
done
for h in base/base.h gguf/gguf.h text/text.h store/store.h engine/engine.h backends/backend.h; do
    n=$(wc -l <$h)
    [ "$n" -gt 220 ] && echo "$h: $n lines (a public header stays near 200)"
done
exit $bad
