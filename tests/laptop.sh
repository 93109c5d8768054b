#!/usr/bin/env bash
# Plan, resume, compare and seal under an environment that has no torch ($XD_LAPTOP, a base install).
set -euo pipefail
cd "$(dirname "$0")/.."
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
bin=${XD_LAPTOP:?an environment with the base install}/bin

if "$bin/python" -P -c 'import torch' 2> /dev/null; then echo "this environment has torch" >&2; exit 1; fi

for name in s0 s1 s2 s3 s3-eager smollm2 smollm2-fp32 smollm2-cuda; do
    "$bin/xd-plan" "experiments/$name.json" > "$place/$name.jsonl"
    echo "$name: $(wc -l < "$place/$name.jsonl") rows"
done

# measured where torch is, judged and sealed where it is not
export PATH="$PWD/tools:$PATH"
head -n 2 "$place/s0.jsonl" | VIRTUAL_ENV="$PWD/.venv" xd-materialize --runs "$place/runs" --runtime cpu-smoke |
    VIRTUAL_ENV="$PWD/.venv" xd-score --side rollout | VIRTUAL_ENV="$PWD/.venv" xd-score --side training > "$place/attempts"
"$bin/xd-compare" < "$place/attempts" | "$bin/xd-seal" | "$bin/xd-seal" --verify > "$place/sealed"
[ "$(wc -l < "$place/sealed")" = 2 ]
head -n 2 "$place/s0.jsonl" | "$bin/xd-resume" --runs "$place/runs" --answers | "$bin/xd-compare" --table
head -n 2 "$place/s0.jsonl" | "$bin/xd-resume" --runs "$place/runs" --runtime cpu-smoke > "$place/left"
[ "$(wc -l < "$place/left")" = 2 ] # another environment: what was measured elsewhere does not answer here
echo "a base install plans, resumes, compares and seals"
