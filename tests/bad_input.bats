#!/usr/bin/env bats
# Bad input to the chain: one clear line on stderr, the right status, nothing lost, no half output.
# (What a config can do wrong is in test_config.py and test_cmd_plan.py.)

bats_require_minimum_version 1.5.0
load helper

setup_file() {
    # One scored attempt, copied by each test: scoring is the slow part.
    source "$BATS_TEST_DIRNAME/helper.bash"
    cd "$root" || return 1
    xd-plan -q experiments/s0.json | head -n 1 > "$BATS_FILE_TMPDIR/row"
    xd-materialize --runs "$BATS_FILE_TMPDIR/runs" "${smoke[@]}" "$BATS_FILE_TMPDIR/row" |
        xd-score --side rollout | xd-score --side training > "$BATS_FILE_TMPDIR/attempt"
}

# A private copy of the scored attempt; $attempt is its path.
scored() {
    cp -r "$BATS_FILE_TMPDIR/runs" "$place/runs"
    attempt=$(cat "$BATS_FILE_TMPDIR/attempt")
    attempt=${attempt/#"$BATS_FILE_TMPDIR"/$place}
}

spoil() { python -P "$root/tests/spoil.py" "$1" "$attempt/score_$2.safetensors"; }

one_line() { [ "$(printf '%s\n' "$stderr" | wc -l)" = 1 ] && [[ "$stderr" != *Traceback* ]]; }

unjudged() { [ ! -e "$attempt/comparison.json" ] && [ ! -e "$attempt/token_diffs.safetensors" ]; }

@test "an attempt that is not there, is no attempt, or hides behind .. or a symlink" {
    scored
    run --separate-stderr -66 xd-compare "$(dirname "$attempt")/a0999"; one_line
    run --separate-stderr -65 xd-compare "$place"; one_line
    run --separate-stderr -65 xd-compare "$attempt/.."; one_line
    mkdir -p "$place/other/$(basename "$(dirname "$attempt")")"
    ln -s "$attempt" "$place/other/$(basename "$(dirname "$attempt")")/a0001"
    run --separate-stderr -65 xd-compare "$place/other/$(basename "$(dirname "$attempt")")/a0001"; one_line
    [[ "$stderr" == *symlink* ]]
    unjudged
}

@test "a score file that is missing, truncated, foreign, or lacks a tensor" {
    for way in missing truncate foreign no-logprobs; do
        scored
        if [ "$way" = missing ]; then rm "$attempt/score_training.safetensors"; expected=66
        else spoil "$way" training; expected=65; fi
        run --separate-stderr "-$expected" xd-compare "$attempt"; one_line
        [[ "$stderr" == *score_training.safetensors* ]]
        [ -z "$output" ]
        unjudged
        rm -rf "$place/runs"
    done
}

@test "NaN or infinity in an active place, another dtype or shape, an all-false mask are verdicts" {
    for pair in nan=INVALID_ARTIFACT inf=INVALID_ARTIFACT float64=INVALID_ARTIFACT shorter=INVALID_ARTIFACT; do
        scored
        spoil "${pair%=*}" rollout
        run --separate-stderr -0 xd-compare --json "$attempt"
        [[ "$output" == *"\"status\":\"${pair#*=}\""* ]]
        run -1 xd-compare --exit-code "$attempt"
        rm -rf "$place/runs"
    done
    # the observed identity says that other ids or masks were scored: no drift, another question
    for way in other-id no-active; do
        scored
        spoil "$way" rollout
        run -0 xd-compare --json "$attempt"
        [[ "$output" == *"INVALID_"* ]]
        rm -rf "$place/runs"
    done
}

@test "a score file changed after the verdict: 73, and the verdict is kept" {
    scored
    xd-compare "$attempt" > /dev/null
    before=$(snapshot "$attempt")
    spoil nan rollout
    run --separate-stderr -73 xd-compare "$attempt"
    [[ "$stderr" == *"other content"* ]]
    [ "$(snapshot "$attempt" | grep -v score_)" = "$(grep -v score_ <<< "$before")" ]
}

@test "an attempt is not sealed when a file is missing, or was changed after it was judged" {
    scored
    run --separate-stderr xd-seal "$attempt"
    [ "$status" = 66 ]; one_line
    [ ! -e "$attempt/COMPLETE" ]
    xd-compare "$attempt" > /dev/null
    spoil flip training
    run --separate-stderr xd-seal "$attempt"
    [ "$status" = 65 ]; one_line
    [ ! -e "$attempt/COMPLETE" ]
}

@test "a sealed attempt does not grow, and answers again when it is sealed again" {
    scored
    xd-compare "$attempt" | xd-seal > /dev/null
    run -0 xd-seal "$attempt"
    run -0 xd-seal --verify "$attempt"
    touch "$attempt/notes"
    run --separate-stderr -1 xd-seal --verify "$attempt"; [[ "$stderr" == *notes* ]]
    rm "$attempt/notes" "$attempt/score_rollout.safetensors" "$attempt/readback_rollout.json"
    run --separate-stderr -73 xd-score --side rollout "$attempt"; one_line
    [ ! -e "$attempt/score_rollout.safetensors" ]
}

@test "the newest attempt is tampered with, an older valid one is there: it counts" {
    scored
    xd-compare "$attempt" | xd-seal > /dev/null
    newer=$(chain "$place/runs" < "$BATS_FILE_TMPDIR/row")
    [ "$newer" != "$attempt" ]
    [ "$(xd-resume -q --runs "$place/runs" --answers "$BATS_FILE_TMPDIR/row")" = "$newer" ]
    printf 'x' >> "$newer/comparison.json"
    [ "$(xd-resume -q --runs "$place/runs" --answers "$BATS_FILE_TMPDIR/row")" = "$attempt" ]
    [ -z "$(xd-resume -q --runs "$place/runs" "${smoke[@]}" "$BATS_FILE_TMPDIR/row")" ]
    printf 'x' >> "$attempt/comparison.json"
    [ "$(xd-resume -q --runs "$place/runs" "${smoke[@]}" "$BATS_FILE_TMPDIR/row")" = "$(cat "$BATS_FILE_TMPDIR/row")" ]
    run -1 xd-resume -q --exit-code --runs "$place/runs" "${smoke[@]}" "$BATS_FILE_TMPDIR/row"
}

@test "two writers at once on the same attempt write the same bytes: both pass, neither is lost" {
    scored
    rm "$attempt"/score_rollout.safetensors "$attempt"/readback_rollout.json
    xd-score --side rollout "$attempt" > "$place/one" 2> "$place/one.err" &
    first=$!
    xd-score --side rollout "$attempt" > "$place/two" 2> "$place/two.err" || second=$?
    wait "$first" || one=$?
    [ "${one:-0}" = 0 ] && [ "${second:-0}" = 0 ]
    [ "$(cat "$place/one")" = "$attempt" ] && [ "$(cat "$place/two")" = "$attempt" ]
    run -0 xd-compare "$attempt"
}

@test "a smoke operator without authorisation is refused, and stands in the attempt" {
    xd-plan -q experiments/s0.json | grep smoke_only.logp_offset > "$place/rows"
    run --separate-stderr -69 xd-materialize --runs "$place/runs" --runtime cpu-smoke "$place/rows"
    one_line
    [[ "$stderr" == *allow-smoke-operators* ]]
    [ -z "$output" ]
    [ "$(find "$place/runs" -name materialized.json | wc -l)" = 1 ]
    [ -z "$(xd-resume -q --runs "$place/runs" --runtime cpu-smoke "$place/rows")" ]                  # withheld
    [ "$(xd-resume -q --runs "$place/runs" "${smoke[@]}" "$place/rows")" = "$(cat "$place/rows")" ]  # other conditions
}

@test "a bad row is reported and not passed on, the others go on" {
    { echo '{"not": "a row"}'; cat "$BATS_FILE_TMPDIR/row"; echo '{"a": 1'; } > "$place/rows"
    run --separate-stderr -65 xd-materialize --runs "$place/runs" "${smoke[@]}" "$place/rows"
    [ "$(printf '%s\n' "$output" | wc -l)" = 1 ]
    [[ "$stderr" == *rows*1* && "$stderr" == *rows*3* ]]
    sed 's/"batch.size":[0-9]*/"batch.size":3/' "$BATS_FILE_TMPDIR/row" > "$place/forged"
    run --separate-stderr -65 xd-materialize --runs "$place/runs" "${smoke[@]}" "$place/forged"
}

@test "a bad byte, an endless row, a broken one: reported with their line, the rows around them are done" {
    second=$(xd-plan -q experiments/s0.json | sed -n 2p)
    {
        cat "$BATS_FILE_TMPDIR/row"
        printf '{"experiment_id": "\xff"}\n'
        head -c 80000000 /dev/zero | tr '\0' x
        printf '\n%s\n' "$second"
    } > "$place/rows"
    for tool in "xd-resume --runs $place/none" "xd-materialize --runs $place/runs"; do
        for way in file stdin; do
            if [ "$way" = file ]; then run --separate-stderr -65 $tool "${smoke[@]}" -q "$place/rows"
            else run --separate-stderr -65 bash -c "$tool ${smoke[*]} -q < $place/rows"; fi
            [ "$(wc -l <<< "$output")" = 2 ]
            [ "$(wc -l <<< "$stderr")" = 2 ]
            [[ "$stderr" == *:2:*UTF-8*:3:*"too large"* ]]
        done
    done
}

# A small disk, mounted at $place/disk; skipped where nobody may mount.
disk() {
    mkdir "$place/disk"
    mount -t tmpfs -o size="$1" tmpfs "$place/disk" 2> "$place/mount" || skip "mounting a small disk: $(cat "$place/mount")"
}

teardown() { umount "$place/disk" 2> /dev/null || true; }

@test "a run directory that is full, at every stage: one line, 73, nothing half written; with room again it goes on" {
    disk 1m
    run --separate-stderr -0 xd-materialize --runs "$place/disk" "${smoke[@]}" "$BATS_FILE_TMPDIR/row"
    attempt=$output
    for stage in "xd-score --side rollout" "xd-score --side training" xd-compare xd-seal; do
        head -c 2000000 /dev/zero > "$place/disk/fill" || true
        before=$(snapshot "$attempt")
        run --separate-stderr -73 $stage "$attempt"; one_line
        [[ "$stderr" == *"No space left"* ]]
        [ -z "$output" ]
        [ "$(snapshot "$attempt")" = "$before" ]
        rm "$place/disk/fill"
        run -0 $stage "$attempt"
    done
    head -c 2000000 /dev/zero > "$place/disk/fill" || true
    run --separate-stderr -73 xd-materialize --runs "$place/disk" "${smoke[@]}" "$BATS_FILE_TMPDIR/row"; one_line
    run --separate-stderr -73 xd-plan -q experiments/s0.json --runs "$place/disk"; one_line
    [ -z "$(find "$place/disk" -name '.tmp-*')" ]
}

@test "a run directory that is read-only: 73 where something is to be written, 0 where it stands there already" {
    disk 1m
    scored
    xd-compare "$attempt" | xd-seal > "$place/sealed"
    cp -a "$place/runs" "$place/disk/"
    sealed=$place/disk/${attempt#"$place"/}
    fresh=$(xd-materialize --runs "$place/disk/runs" "${smoke[@]}" "$BATS_FILE_TMPDIR/row")
    mount -o remount,ro,size=1m "$place/disk"
    for stage in "xd-score --side rollout" "xd-score --side training" xd-compare xd-seal "xd-seal --verify"; do
        run -0 $stage "$sealed"
    done
    run --separate-stderr -73 xd-score --side rollout "$fresh"; one_line
    [[ "$stderr" == *"Read-only"* ]]
    for tool in "xd-materialize ${smoke[*]} $BATS_FILE_TMPDIR/row" "xd-plan -q experiments/s0.json"; do
        run --separate-stderr -73 $tool --runs "$place/disk/runs"; one_line
        [[ "$stderr" == *"Read-only"* ]]
    done
}
