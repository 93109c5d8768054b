#!/usr/bin/env bash
# The README's pipe on s0, run as it stands there, must give byte for byte what `make -j run` gives.
set -euo pipefail
cd "$(dirname "$0")/.."
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT

pipe=$(awk '/^<!-- pipe -->/ {on = 1; next} on && /^```/ {if (++fences == 2) exit; next} on' README.md)
[ -n "$pipe" ] || { echo "README.md has no pipe after <!-- pipe -->" >&2; exit 1; }

make -j2 run EXP=s0 RUNS="$place/make" > "$place/table"
status=0
env PATH="$PWD/tools:$PATH" VIRTUAL_ENV="$PWD/.venv" RUNS="$place/pipe" bash -o pipefail -c "$pipe" || status=$?
[ "$status" = 0 ] || [ "$status" = 69 ] || { echo "the README's pipe ended with $status" >&2; exit 1; }

# Case, file, digest. Not the attempt's number: under -j the baseline's repeat may be the first to get one.
judged() {
    (cd "$1/s0/cases" && find . \( -name comparison.json -o -name token_diffs.safetensors -o -name actual.json \) \
        -exec sha256sum {} + | sed -E 's#^([0-9a-f]+) .*/(c-[0-9a-f]+)/a[0-9]+/(.*)#\2 \3 \1#' | sort)
}
judged "$place/make" > "$place/made"
judged "$place/pipe" > "$place/piped"
[ "$(grep -c comparison.json "$place/made")" -ge 12 ] || { echo "too few comparisons to mean anything" >&2; exit 1; }
diff "$place/made" "$place/piped" || { echo "the two ways judged something else" >&2; exit 1; }
cat "$place/table"
echo "pipe and make agree, byte for byte"
