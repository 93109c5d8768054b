# Shared by the black-box tests: the tools on PATH, a place of its own a test.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PATH="$root/tools:$PATH"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # as `make run` does
export VIRTUAL_ENV=${VIRTUAL_ENV:-$root/.venv}
smoke=(--runtime cpu-smoke --allow-smoke-operators)

setup() {
    place=$(mktemp -d "$BATS_TEST_TMPDIR/XXXX")
    cd "$root" || return 1
}

# The whole chain over plan rows on stdin.
chain() {
    xd-materialize --runs "$1" "${smoke[@]}" | xd-score --side rollout | xd-score --side training | xd-compare | xd-seal
}

# Every file of every attempt below, with its digest.
snapshot() { (cd "$1" && find . -type f ! -path '*/.make-*/*' -exec sha256sum {} + | sort -k 2); }

# A small experiment of that name at $place/NAME.json: s0's baseline and the batch size, after a change of `config`.
small() {
    python -P - "$root" "$1" "$place/$1.json" "${2:-}" <<'PY'
import json, sys
root, name, path, change = sys.argv[1:]
config = json.load(open(f"{root}/experiments/s0.json"))
config["experiment_id"] = name
config["identity"]["sequences"]["path"] = f"{root}/experiments/sequences/s0.safetensors"
config["interventions"] = [{"path": "batch.size", "values": [1]}]
exec(change)
json.dump(config, open(path, "w"))
PY
}

# make as of the environment of the tests, on the small experiment NAME: small_make NAME ARGUMENT…
small_make() {
    make -C "$root" VENV="$VIRTUAL_ENV" RUNS="$place/runs" EXP="$1" CONFIG="$place/$1.json" POLICY="${policy:-${smoke[*]}}" "${@:2}"
}
