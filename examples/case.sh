#!/usr/bin/env bash
# One row of a plan, from its engines to its seal: what a task of GNU parallel or a pod of Kubernetes does.
#
#     POLICY='--runtime hf' examples/case.sh runs/s1/plan.jsonl 3        # row 3; the first is 0
#     POLICY='--runtime hf' examples/case.sh runs/s1/plan.jsonl 3 64     # rows 3, 67, 131 …: share 3 of 64
#
# POLICY: what scores, as xd-materialize takes it. RUNS: the directory of all runs (default: runs). A row that is answered,
# and one beyond the plan, leaves nothing to do. Exit status: 0, also where a case was refused (69), which is a result; else
# that of the last stage that failed, for the ones before it may only have lost their reader.
set -uo pipefail
plan=${1:?give a plan} index=${2:?give the number of a row, from 0} stride=${3:+--stride $3}
runs=${RUNS:-runs}
read -ra policy <<< "${POLICY:?say what scores: POLICY='--runtime NAME'}"
export PATH="$PWD/tools:$PATH" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

# shellcheck disable=SC2086 # words
xd-resume -q "$plan" --index "$index" $stride --runs "$runs" "${policy[@]}" |
    xd-materialize -q --runs "$runs" "${policy[@]}" | xd-score -q --side rollout | xd-score -q --side training |
    xd-compare -q | xd-seal -q
codes=("${PIPESTATUS[@]}") failed=0
for code in "${codes[@]}"; do [ "$code" = 0 ] || [ "$code" = 69 ] || failed=$code; done
exit "$failed"
