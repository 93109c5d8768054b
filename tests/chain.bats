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
    mkdir "$place/slow" # its torch never comes, so that it is at work when it is killed
    echo 'import time; time.sleep(600)' > "$place/slow/torch.py"
    PYTHONPATH=$place/slow xd-score --side rollout "$attempt" > "$place/out" 2> "$place/err" &
    scorer=$!
    child=
    for _ in $(seq 600); do
        child=$(pgrep -P "$scorer" -f libxd.scoring.child || true)
        [ -n "$child" ] && break
        sleep 0.05
    done
    [ -n "$child" ]
    kill -9 $child
    status=0; wait "$scorer" || status=$?
    [ "$status" = 75 ]
    [ ! -s "$place/out" ]
    [ "$(wc -l < "$place/err")" = 1 ]
    [[ "$(cat "$place/err")" == *SIGKILL* ]]
    [ "$(cd "$attempt" && echo *)" = "identity.json materialized.json requested.json" ]
    [ -z "$(find "$attempt" -name '.tmp-*')" ]
    run -0 bash -o pipefail -c "xd-resume -q --runs $place/runs ${smoke[*]} $place/row | head -n 1"
    [ "$output" = "$(cat "$place/row")" ]
    chain "$place/runs" < "$place/row"
    [ -z "$(xd-resume -q --runs "$place/runs" "${smoke[@]}" "$place/row")" ]
}

@test "Ctrl-C of make leaves no half file and no process, and the next run finishes" {
    # A shell starts what runs in the background with SIGINT ignored, and make would hand that on to all of the chain:
    # python gives the default back. A session of its own, because scorers lead process groups of their own.
    setsid python -P -c 'import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execvp(sys.argv[1], sys.argv[1:])' \
        make -C "$root" VENV="$VIRTUAL_ENV" RUNS="$place/runs" EXP=s0 run > "$place/log" 2>&1 &
    pid=$!
    for _ in $(seq 600); do [ -n "$(find "$place/runs" -name 'score_*' 2> /dev/null | head -n 1)" ] && break; sleep 0.05; done
    [ "$(pgrep -c -s "$pid")" -gt 4 ] # make, shells, the stages of a pipe
    kill -INT -- -"$pid"
    status=0; wait "$pid" || status=$?
    [ "$status" -ne 0 ]
    for _ in $(seq 100); do [ -z "$(pgrep -s "$pid" || true)" ] && break; sleep 0.1; done
    [ -z "$(pgrep -s "$pid" || true)" ]
    run -1 grep Traceback "$place/log"
    [ -z "$(find "$place/runs" -name '.tmp-*' -o -name '.make*')" ]
    [ -n "$(xd-resume -q --runs "$place/runs" "${smoke[@]}" "$place/runs/s0/plan.jsonl")" ] # it was cut short
    sealed=$(find "$place/runs" -name COMPLETE -exec sha256sum {} + | sort)
    run -0 run_make run
    [ -z "$(comm -23 <(echo "$sealed") <(find "$place/runs" -name COMPLETE -exec sha256sum {} + | sort))" ]
    [ -z "$(xd-resume -q --runs "$place/runs" "${smoke[@]}" "$place/runs/s0/plan.jsonl")" ]
}

@test "Ctrl-C of make while a pipe starts: nothing but make itself says so" { # beside what rows had come to by then
    for moment in 0.2 0.5 0.8 1.1 1.4 1.7; do
        setsid python -P -c 'import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execvp(sys.argv[1], sys.argv[1:])' \
            make -C "$root" VENV="$VIRTUAL_ENV" RUNS="$place/early$moment" EXP=s0 run > "$place/log" 2>&1 &
        pid=$!
        for _ in $(seq 600); do [ "$(ps -o comm= -p "$pid")" = make ] && break; sleep 0.02; done # until then it is deaf to it
        sleep "$moment"
        kill -INT -- -"$pid"
        status=0; wait "$pid" || status=$?
        [ "$status" -ne 0 ]
        run -1 grep -vE '^(make(\[[0-9]\])?: |xd-resume: [0-9]+ to score|xd-materialize: .*: refused: )' "$place/log"
    done
}

@test "make -k goes on with the other rows when one fails, and the table comes" {
    small broken 'config["interventions"].append({"path": "rollout.dtype", "values": ["bfloat16", "float16"]})'
    xd-plan -q "$place/broken.json" --runs "$place/runs" > "$place/plan"
    # one row's directory is a link, which nobody writes through
    case_id=$(grep '"value":"bfloat16"' "$place/plan" | grep -o '"case_id":"c-[0-9a-f]*' | cut -d '"' -f 4)
    mkdir -p "$place/runs/broken/cases"
    ln -s nowhere "$place/runs/broken/cases/$case_id"
    run -2 small_make broken -k run
    [[ "$output" == *"$case_id: a case is no symlink"* && "$output" == *"Error 65"* ]]
    [ "$(grep -cE '^(baseline|batch.size=1|rollout.dtype=float16) +(PASS|MISMATCH)' <<< "$output")" = 3 ]
    grep -qE '^rollout.dtype=bfloat16 +missing' <<< "$output"
    # a row that cannot even be looked for: the others are scored, the status tells
    rm "$place/runs/broken/cases/$case_id"
    touch "$place/runs/broken/cases/$case_id"
    run -2 small_make broken -k run
    [[ "$output" == *"$case_id"* && "$output" == *"Error 66"* ]]
    grep -qE '^rollout.dtype=bfloat16 +missing' <<< "$output"
    rm "$place/runs/broken/cases/$case_id"
    run -0 small_make broken -k run
    grep -qE '^rollout.dtype=bfloat16 +MISMATCH' <<< "$output"
}

@test "make run with options that are wrong ends in what is wrong, and in no table" {
    small options
    run -0 small_make options run POLICY="--runtime cpu-smoke"
    [[ "$output" == *"changed knob"* ]]
    run -2 small_make options run POLICY="--runtime cpu-smok"
    [[ "$output" == *"no such runtime"* && "$output" != *"changed knob"* ]]
}

@test "make -k goes on with the other groups when a pipe fails, and the next run finishes" {
    small dies 'config["interventions"].append({"path": "rollout.dtype", "values": ["bfloat16", "float16"]})'
    cat > "$place/python" <<EOS # the first engine that is started dies at once
#!/bin/sh
case "\$*" in *libxd.scoring.child*) if mkdir "$place/once" 2> /dev/null; then kill -KILL \$\$; fi ;; esac
exec "$VIRTUAL_ENV/bin/python" "\$@"
EOS
    chmod +x "$place/python"
    export XD_PYTHON_CPU_SMOKE=$place/python
    run -2 small_make dies -k run
    [[ "$output" == *SIGKILL* && "$output" == *".done] Error 75"* ]]
    [ "$(grep -cE ' (PASS|MISMATCH) ' <<< "$output")" = 3 ]
    [ "$(grep -cE ' incomplete ' <<< "$output")" = 1 ]
    run -0 small_make dies -k run
    [ "$(grep -cE ' (PASS|MISMATCH) ' <<< "$output")" = 4 ]
}

@test "a closed pipe at the end of the chain is no traceback" {
    run bash -o pipefail -c "xd-plan -q experiments/s0.json | xd-materialize --runs $place/runs ${smoke[*]} 2> $place/err | head -n 1"
    run -1 grep Traceback "$place/err"
}

@test "the README's lines of completion, in bash" {
    completion=$(awk '/^<!-- completion -->/ {on = 1; next} on && /^```/ {if (++fences == 2) exit; next} on' README.md)
    [ -n "$completion" ]
    for tool in plan resume materialize score compare seal rollout; do
        run -0 bash -c "$completion"'
            complete -p "$1" > /dev/null || exit
            COMP_WORDS=("$1" --ver) COMP_CWORD=1
            "_${1//-/_}_completion" "$1"
            echo "${COMPREPLY[@]}"' _ "xd-$tool"
        [[ "$output" == *--version* && "$output" == *--verbose* && "$output" != *--quiet* ]]
    done
}
