#!/usr/bin/env bats
# make as a make user meets it: names it cannot take, a plan that is another's, half-made environments, two runs at once.

bats_require_minimum_version 1.5.0
load helper

in_root() { make -C "$root" VENV="$VIRTUAL_ENV" "$@"; }

# Everything below a directory, with its kind and content.
tree() { (cd "$1" && find . -printf '%y %p\n' | sort -k 2; snapshot .); }

@test "make of another version: 4.2 and all later ones by number, none before" {
    for version in 4.2 4.2.1 4.9 4.10 4.10.1 5.0 10.0; do run -0 in_root MAKE_VERSION="$version" help; done
    for version in 3.82 4.0 4.1 4.1.90; do
        run -2 in_root MAKE_VERSION="$version" help
        [[ "$output" == *"4.2 or newer is needed, this is $version"* ]]
    done
}

refused() { # VARIABLE VALUE
    run -2 --separate-stderr make -C "$root" "$1=$2" compare
    [ "$(wc -l <<< "$stderr")" = 1 ]
    [[ "$stderr" == *"$1='"*"give one name"* ]]
}

@test "values that make or a shell would take apart, run, or read as an option: one clear line, nothing made" {
    for value in 'a b' 'a;touch x' "a'b" 'a"b' "a\$\$b" 'a*' 'a:b' 'a=b' '-a' '#a' "\$(shell touch $place/x)" \
        "\$\$(touch $place/x)" "\`touch $place/x\`"; do
        for variable in RUNS EXP VENV REPEATS CONFIG; do refused "$variable" "$value"; done
    done
    for variable in RUNS EXP VENV CONFIG; do refused "$variable" ''; done
    for value in ../x x/y / ..; do refused EXP "$value"; done
    [ ! -e "$root/x" ] && [ ! -e "$place/x" ]
}

@test "the same from the environment" {
    for variable in RUNS EXP VENV REPEATS; do
        run -2 --separate-stderr env "$variable=\$(shell touch $place/x)" make -C "$root" compare
        [[ "$stderr" == *"$variable='"*"give one name"* ]]
    done
    [ ! -e "$place/x" ]
    run -0 env REPEATS=3 make -C "$root" VENV="$VIRTUAL_ENV" -n plan
    [[ "$output" == *"--repeats 3"* ]]
}

@test "RUNS with slashes at its end is the same directory" {
    small slash 'config["interventions"] = []'
    run -0 small_make slash RUNS="$place/runs//" run
    [[ "$output" == *"baseline "*PASS* ]]
    run -0 small_make slash RUNS="$place/runs/" compare
    [[ "$output" == *"reproduced, byte for byte: 1"* ]]
    [ -z "$(find "$place/runs" -name '.make*' -o -name '.tmp-*')" ] # and nothing of make's own is left
}

@test "a checkout in a place with a space" {
    mkdir "$place/check out"
    cp -a "$root"/{Makefile,constraints.txt,pyproject.toml,tools,experiments} "$place/check out/"
    cd "$place/check out" || return 1
    run -0 make VENV="$VIRTUAL_ENV" REPEATS=0 EXP=s0 plan
    run -0 make -n VENV="$VIRTUAL_ENV" run
    python -P - <<'PY'
import json
config = json.load(open("experiments/s0.json"))
config["interventions"] = []
json.dump(config, open("experiments/s0.json", "w"))
PY
    run -0 make VENV="$VIRTUAL_ENV" REPEATS=0 run
    [[ "$output" == *"baseline "*PASS* ]]
    run -0 make VENV="$VIRTUAL_ENV" verdicts
    run -0 make VENV="$VIRTUAL_ENV" compare
    python -P -m venv --without-pip .venv
    unset XD_PYTHON
    run -70 --separate-stderr env -u VIRTUAL_ENV tools/xd-plan experiments/s0.json # its own environment is found, and is bare
    [ "$(wc -l <<< "$stderr")" = 1 ]
    [[ "$stderr" == *"check out/.venv/bin/python"* ]]
}

@test "make -n run shows and does nothing" {
    small dry
    run -0 small_make dry -n run
    [[ "$output" == *xd-plan* && "$output" == *xd-resume* ]]
    [ ! -e "$place/runs" ]
    small_make dry run
    rm "$(find "$place/runs" -name COMPLETE | head -n 1)"
    before=$(tree "$place/runs")
    run -0 small_make dry -n run
    [ "$(tree "$place/runs")" = "$before" ]
}

@test "a config that bears another experiment's id is refused before it takes that one's place" {
    small mine 'config["experiment_id"] = "yours"'
    run -2 --separate-stderr small_make mine run
    [[ "$stderr" == *"mine.json: its experiment_id is not mine"* ]]
    [ ! -e "$place/runs" ]
    small mine
    sed -i 's/"experiment_id": /"experiment_id"  :\t/' "$place/mine.json"
    run -0 small_make mine -n run
    small_make mine plan > /dev/null
}

@test "two runs at once both end well, and nothing of make's own is left" {
    small twice
    small_make twice -j2 run > "$place/one" 2>&1 &
    first=$!
    second=0
    small_make twice -j2 run > "$place/two" 2>&1 || second=$?
    one=0
    wait "$first" || one=$?
    [ "$one" = 0 ] && [ "$second" = 0 ]
    for log in one two; do grep -q 'batch.size=1 .*PASS' "$place/$log"; run -1 grep -E 'cannot|No such|\*\*\*' "$place/$log"; done
    [ -z "$(find "$place/runs" -name '.make*' -o -name '.tmp-*')" ]
    run -0 small_make twice run
    [[ "$output" == *"nothing to score"* ]]
}

@test "below the table of a ladder stands its answer" {
    small climb 'config["strategy"] = "pairwise"; config["interventions"] = [
    {"path": path, "values": ["float16", "bfloat16"]} for path in ("rollout.dtype", "training.compute_dtype")]
config["pairs"] = [["rollout.dtype", "training.compute_dtype"]]'
    run -0 small_make climb run
    [[ "$output" == *"changed knob"* && "$output" != *"Answer:"* ]]
    run -0 small_make climb AFTER_climb=xd-ladder table
    [[ "$output" == *"changed knob"*"Answer: rounding "* ]]
    run -0 make -C "$root" VENV="$VIRTUAL_ENV" -n EXP=ladder table # and the shipped one is such
    [[ "$output" == *"| xd-ladder;"* ]]
}

@test "make bisect: one dtype breaks it, both repaired make it good; once more, nothing is scored" {
    small halves 'config["strategy"] = "bisect"; config["interventions"] = [
    {"path": path, "values": ["bfloat16"]} for path in ("rollout.dtype", "training.compute_dtype")]'
    question="BISECT=--by mean --above 1e-3 --repeats 0"
    run -0 small_make halves "$question" bisect
    [[ "$output" == *"Breaking the good setting: 1 knob makes it bad."*"rollout.dtype: float32 -> bfloat16"* ]]
    [[ "$output" == *"Repairing the bad setting: 2 knobs together make it good."* ]]
    [ "$(find "$place/runs" -name COMPLETE | wc -l)" = 4 ]
    run -0 --separate-stderr small_make halves "$question" bisect
    [[ "$output" == *"2 knobs together"* && "$stderr" == *"nothing to score: 4 cases tested"* ]]
    [ "$(find "$place/runs" -name COMPLETE | wc -l)" = 4 ]

    # the loop as a shell has it, over the same attempts: it ends, with the answer "no"
    cd "$place" || return 1
    asked=(halves/plan.jsonl --runs . --by mean --above 1e-3 --repeats 0 "${smoke[@]}")
    cd runs || return 1
    set -o pipefail
    while xd-bisect -q --next "${asked[@]}" | chain .; do false; done
    run -1 xd-bisect -q --next "${asked[@]}"
    [ -z "$output" ]
    # another question of the same attempts, answered by no more of them
    run -0 xd-bisect -q --exit-code halves/plan.jsonl --runs . --by max --above 1e-3 --repeats 0
    [[ "$output" == *"2 knobs together"* ]]

    run -2 --separate-stderr small_make halves BISECT="--by mean" bisect # a question that makes none is no end of a loop
    [[ "$stderr" == *"--above"* ]]
}

@test "a half-made environment is made again, a whole one is not" {
    half=$place/half
    mkdir -p "$half/bin"
    printf '#!/bin/sh\nexit 1\n' > "$half/bin/python" # as Ctrl-C leaves it: an interpreter without pip
    chmod +x "$half/bin/python"
    cat > "$place/python" <<EOS
#!/bin/sh
echo "\$*" >> "$place/log"
[ "\$1 \$2" = "-m venv" ] && printf '#!/bin/sh\nexit 0\n' > "\$3/bin/python"
exit 0
EOS
    chmod +x "$place/python"
    run -0 make -C "$root" PYTHON="$place/python" VENV="$half" "$half/.base"
    grep -q -- "-m venv $half" "$place/log"
    rm "$place/log" "$half/.base"
    run -0 make -C "$root" PYTHON="$place/python" VENV="$half" "$half/.base"
    run -1 grep -- "-m venv" "$place/log"
}

@test "make compare: no verdict there is no success, what was never judged stays so" {
    small judged
    run -2 small_make judged compare
    [[ "$output" == *"no verdict"* && "$output" != *reproduced* ]]
    xd-plan -q "$place/judged.json" | head -n 1 | xd-materialize --runs "$place/runs" "${smoke[@]}" |
        xd-score --side rollout | xd-score --side training > "$place/scored"
    run -2 small_make judged compare
    [[ "$output" == *"no verdict"* ]]
    [ ! -e "$(cat "$place/scored")/comparison.json" ]
    small_make judged run
    scored=$(cat "$place/scored")
    rm "$scored/readback_training.json" # a scorer that was killed between its two files
    before=$(tree "$place/runs")
    run -0 small_make judged compare
    [[ "$output" == *"reproduced, byte for byte: 2"* ]]
    [ "$(tree "$place/runs")" = "$before" ]
    find "$place/runs" -name comparison.json | head -n 1 | xargs sed -i 's/"mismatches":0/"mismatches":1/'
    run -2 small_make judged compare
    [[ "$output" == *"other content"* && "$output" != *reproduced* ]]
}

@test "an INVALID row, an unfinished one and a missing one stand in the tables, and make verdicts fails" {
    export PYTHONPATH=$root/tests/engines
    small invalid
    policy="--runtime-rollout cpu-smoke --runtime-training trains" run -0 small_make invalid run
    [ "$(grep -cE '^(baseline|batch.size=1) +INVALID_IDENTITY' <<< "$output")" = 2 ]
    run -2 small_make invalid verdicts
    [ "$(grep -cE '^(baseline|batch.size=1) +INVALID_IDENTITY' <<< "$output")" = 2 ]

    # honest attempts answer; then one is left off, and one is gone
    small_make invalid run
    run -0 small_make invalid verdicts
    [ "$(grep -cE '^(baseline|batch.size=1) +PASS' <<< "$output")" = 2 ]
    find "$place/runs" \( -name COMPLETE -o -name comparison.json \) -path '*/a0002/*' -delete
    first=$(head -n 1 "$place/runs/invalid/plan.jsonl" | grep -o '"case_id":"c-[0-9a-f]*' | cut -d '"' -f 4)
    rm -r "$place/runs/invalid/cases/$first"
    run -2 small_make invalid verdicts
    grep -qE '^baseline +missing' <<< "$output"
    grep -qE '^batch.size=1 +incomplete' <<< "$output"
}

@test "the stage that failed is the one that is named, not those that it left with a closed pipe" {
    cat > "$place/stages.mk" <<'EOS'
include Makefile
stages:
	@(exit 69) | (exit 141) | (exit 70) | true; $(CHECK_STAGES)
left:
	@(exit 141) | true; $(CHECK_STAGES)
refused:
	@(exit 69) | true; $(CHECK_STAGES)
EOS
    run -2 --separate-stderr in_root -f "$place/stages.mk" stages; [[ "$stderr" == *"Error 70"* ]]
    run -2 --separate-stderr in_root -f "$place/stages.mk" left; [[ "$stderr" == *"Error 141"* ]]
    run -0 in_root -f "$place/stages.mk" refused
}
