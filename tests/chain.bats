#!/usr/bin/env bats
# The chain as make and a pipe run it: what a make user expects of -j, -k, Ctrl-C, a killed scorer, a second run.

bats_require_minimum_version 1.5.0
load helper

run_make() { make -C "$root" VENV="$VIRTUAL_ENV" RUNS="$place/runs" EXP=s0 "$@"; }

@test "make -j run seals every case, shows the table; a second run scores nothing and says so" {
    run -0 run_make -j2 run
    [[ "$output" == *"PASS"* && "$output" == *"MISMATCH"* && "$output" == *"unsupported"* ]]
    before=$(snapshot "$place/runs/s0")
    attempts=$(find "$place/runs/s0/cases" -name 'a0*' | wc -l)
    run -0 run_make -j2 run
    [[ "$output" == *"nothing to score"* ]]
    [ "$(snapshot "$place/runs/s0")" = "$before" ]
    [ "$(find "$place/runs/s0/cases" -name 'a0*' | wc -l)" = "$attempts" ]

    # the same run directory, moved: still answered, still the same verdicts
    mv "$place/runs" "$place/moved"
    run -0 make -C "$root" VENV="$VIRTUAL_ENV" RUNS="$place/moved" EXP=s0 compare
    [[ "$output" == *"reproduced"* ]]
    run -0 xd-resume --runs "$place/moved" "${smoke[@]}" "$place/moved/s0/plan.jsonl"
    [ -z "$(xd-resume -q --runs "$place/moved" "${smoke[@]}" "$place/moved/s0/plan.jsonl")" ]

    # the offline judge works with neither torch nor a model in reach
    mkdir "$place/blocked"
    for name in torch transformers triton; do echo "raise ImportError('no $name here')" > "$place/blocked/$name.py"; done
    run -0 env PYTHONPATH="$place/blocked" make -C "$root" VENV="$VIRTUAL_ENV" RUNS="$place/moved" EXP=s0 compare

    # verdicts fail on anything but PASS
    run make -C "$root" VENV="$VIRTUAL_ENV" RUNS="$place/moved" EXP=s0 verdicts
    [ "$status" -ne 0 ]
    [[ "$output" == *"MISMATCH"* ]]
}

@test "a verdict that would change is refused with 73 and kept" {
    xd-plan -q experiments/s0.json | head -n 1 | chain "$place/runs" > "$place/attempt"
    attempt=$(cat "$place/attempt")
    chmod u+w "$attempt"/*
    python - "$attempt/comparison.json" <<'PY'
import json, sys
path = sys.argv[1]
value = json.load(open(path)); value["counts"]["mismatches"] += 1
json.dump(value, open(path, "w"))
PY
    before=$(sha256sum "$attempt/comparison.json")
    run -73 xd-compare "$attempt"
    [[ "$output" == *"comparison.json"*"other content"* ]]
    [ "$(sha256sum "$attempt/comparison.json")" = "$before" ]
    run -1 xd-seal --verify "$attempt"
}

@test "rows stream: the first attempt is sealed before the second row is written" {
    mkfifo "$place/rows"
    xd-plan -q experiments/s0.json > "$place/plan"
    chain "$place/runs" < "$place/rows" > "$place/sealed" &
    exec 9> "$place/rows"
    head -n 1 "$place/plan" >&9
    for _ in $(seq 300); do [ -s "$place/sealed" ] && break; sleep 0.1; done
    [ "$(wc -l < "$place/sealed")" = 1 ]
    sed -n 2p "$place/plan" >&9
    exec 9>&-
    wait
    [ "$(wc -l < "$place/sealed")" = 2 ]
}

@test "a scorer killed half-way: one line, 75, nothing under a final name, the next run finishes" {
    xd-plan -q experiments/s0.json | head -n 1 > "$place/row"
    xd-materialize --runs "$place/runs" "${smoke[@]}" "$place/row" > "$place/attempt"
    attempt=$(cat "$place/attempt")
    # no stdin is closed while it waits for more: the child is alive and idle, or at work
    mkfifo "$place/in"
    xd-score --side rollout < "$place/in" > "$place/out" 2> "$place/err" &
    scorer=$!
    exec 9> "$place/in"
    cat "$place/attempt" >&9
    for _ in $(seq 300); do child=$(pgrep -P "$scorer" -f libxd.scoring.child || true); [ -n "$child" ] && break; sleep 0.02; done
    [ -n "$child" ]
    kill -9 $child
    exec 9>&-
    status=0; wait "$scorer" || status=$?
    if [ ! -s "$place/out" ]; then # it was killed before it had published
        [ "$status" = 75 ]
        [ "$(wc -l < "$place/err")" = 1 ]
        [[ "$(cat "$place/err")" == *SIGKILL* ]]
        [ ! -e "$attempt/score_rollout.safetensors" ]
    fi
    run -0 bash -o pipefail -c "xd-resume -q --runs $place/runs ${smoke[*]} $place/row | head -n 1"
    [ "$output" = "$(cat "$place/row")" ]
    chain "$place/runs" < "$place/row"
    [ -z "$(xd-resume -q --runs "$place/runs" "${smoke[@]}" "$place/row")" ]
}

@test "Ctrl-C of make leaves no half file, and the next run finishes" {
    setsid make -C "$root" VENV="$VIRTUAL_ENV" RUNS="$place/runs" EXP=s0 run > "$place/log" 2>&1 &
    pid=$!
    for _ in $(seq 600); do [ -n "$(find "$place/runs" -name 'score_*' 2> /dev/null | head -n 1)" ] && break; sleep 0.05; done
    kill -INT -- -"$pid"
    wait "$pid" || true
    [ -z "$(pgrep -g "$pid" || true)" ]
    [ -z "$(find "$place/runs" -name '.tmp-*')" ]
    sealed=$(find "$place/runs" -name COMPLETE -exec sha256sum {} + | sort)
    run -0 run_make run
    [ -z "$(comm -23 <(echo "$sealed") <(find "$place/runs" -name COMPLETE -exec sha256sum {} + | sort))" ]
    [ -z "$(xd-resume -q --runs "$place/runs" "${smoke[@]}" "$place/runs/s0/plan.jsonl")" ]
}

@test "make -k goes on with the other groups when one fails" {
    # one case's directory cannot be read or written: a file stands in its place
    xd-plan -q experiments/s0.json --runs "$place/runs" > "$place/plan"
    case_id=$(grep '"path":"rollout.dtype"' "$place/plan" | head -n 1 | grep -o '"case_id":"c-[0-9a-f]*' | cut -d '"' -f 4)
    mkdir -p "$place/runs/s0/cases" && touch "$place/runs/s0/cases/$case_id"
    run run_make -k run
    [ "$status" -ne 0 ]
    [[ "$output" == *"$case_id"* ]]
    [ "$(find "$place/runs" -name COMPLETE | wc -l)" -ge 8 ]
}

@test "a closed pipe at the end of the chain is no traceback" {
    run bash -o pipefail -c "xd-plan -q experiments/s0.json | xd-materialize --runs $place/runs ${smoke[*]} 2> $place/err | head -n 1"
    ! grep -q Traceback "$place/err"
}
