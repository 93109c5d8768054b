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
snapshot() { (cd "$1" && find . -type f ! -path '*/.make/*' -exec sha256sum {} + | sort -k 2); }
