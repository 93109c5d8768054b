"""Engines that break a promise, through the real chain: knobs ignored are refused, identities violated are INVALID.

Each engine is cpu-smoke with one thing done behind its back (tests/engines). All attempts of a kind go through one
xd-score a side, which starts a new process for each runtime.
"""

from __future__ import annotations

import importlib.util
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import ROOT, Tools

from libxd import knobs

ENGINES = ROOT / "tests" / "engines"


def _plugin():
    """The plugin's module. Its folder stays off sys.path: this process would take its runtimes for installed ones."""
    spec = importlib.util.spec_from_file_location("xd_test_engines", ENGINES / "xd_test_engines.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


xd_test_engines = _plugin()

#: knobs whose true value stands in the live objects before anything is scored
SEEN_BEFORE = {
    "rollout.tensor_parallel_size", "rollout.dtype", "training.compute_dtype", "training.sharding",
}  # fmt: skip
#: a value other than the one that an engine ignoring the knob uses, and than s0's baseline
ASKED = {
    "batch.size": 1,
    "rollout.tensor_parallel_size": 2,
    "rollout.context_parallel_size": 2,
    "rollout.dtype": "bfloat16",
    "rollout.enable_prefix_caching": False,
    "rollout.enforce_eager": False,
    "training.attention_backend": "eager",
    "training.compute_dtype": "bfloat16",
    "logp.backend": "xd.reference_logp",
    "training.sharding": "fsdp",
}
#: violation -> the code that must be among those found, for each side that can do it
CODES = {
    "alters-id": "token-ids",
    "alters-selected-id": "selected-ids",
    "alters-mask": "attention-mask",
    "shifts-positions": "positions",
    "holds-other-weight": "weights",
    "changes-weight": "weights-changed",
    "holds-other-buffer": "buffers",
    "changes-buffer": "weights-changed",
    "trains": "mode-before",
    "ends-training": "mode-changed",
    "owns-optimizer": "optimizer",
    "uses-cache": "cache",
    "prefills": "scoring-mode",
    "other-temperature": "semantics",
    "masks-logits": "unobservable",
}
ONE_SIDED = {"uses-cache": "training", "prefills": "rollout"}
VIOLATIONS = [
    (violation, side, code)
    for violation, code in CODES.items()
    for side in knobs.SIDES
    if ONE_SIDED.get(violation, side) == side
]
#: what an engine does that publishes nothing -> where it is seen, and words of the reason
REFUSED = {
    "ignores-submission": ("behaviour", "another order"),
    "counts-the-schedule": ("behaviour", "another value"),
    "calls-operator-once": ("operator", "another number of logprobs"),
    "corrects-operator": ("operator", "did not give"),
    "sets-numerics": ("behaviour", "float32_matmul_precision"),
}
HONEST = "cpu-smoke"


class Chain:
    """Attempts of s0 under chosen runtimes, and where they lie."""

    def __init__(self, place: Path) -> None:
        self._tools = Tools(place)
        self._env = {"PYTHONPATH": str(ENGINES), "OMP_NUM_THREADS": "1"}
        plan = self.run("xd-plan", ROOT / "experiments" / "s0.json", "--repeats", "1", "--repeat-order", "rotated",
                        status=0)  # fmt: skip
        rows = {line: json.loads(line)["repeat"] for line in plan.splitlines()}
        self.rows = {self._change(line): line for line, repeat in rows.items() if not repeat}
        (self.repeat,) = (line for line, repeat in rows.items() if repeat)
        self.place = place

    def run(self, tool: str, *arguments: object, status: int, stdin: str = "") -> str:
        done = self._tools(tool, *arguments, stdin=stdin, env=self._env)
        assert done.status == status, done.err
        return done.out

    def attempt(self, row: str, rollout: str, training: str) -> Path:
        out = self.run("xd-materialize", "--runs", "runs", "--runtime-rollout", rollout, "--runtime-training", training,
                       stdin=row + "\n", status=0)  # fmt: skip
        return self.place / out.strip()

    def score(self, side: str, attempts: list[Path], status: int) -> list[Path]:
        out = self.run("xd-score", "--side", side, stdin="".join(f"{each}\n" for each in attempts), status=status)
        return [self.place / line for line in out.splitlines()]

    def score_both(self, attempts: dict[str, list[Path]], status: int) -> dict[str, list[Path]]:
        """Both sides at once: they need nothing of each other. side -> what was passed on."""
        with ThreadPoolExecutor(len(attempts)) as pool:
            return dict(zip(attempts, pool.map(lambda item: self.score(*item, status), attempts.items()), strict=True))

    @staticmethod
    def _change(line: str) -> tuple[str, object] | None:
        (change,) = json.loads(line)["intervention"] or [None]
        return change and (change["path"], change["value"])


def one_side(runtime: str, side: str) -> tuple[str, str]:
    """(rollout, training): the runtime on its side, the honest one on the other."""
    return (runtime, HONEST) if side == "rollout" else (HONEST, runtime)


# -- knobs ignored


@pytest.fixture(scope="module")
def ignored(tmp_path_factory) -> dict[tuple[str, str], tuple[Path, bool]]:
    """(knob, side) -> the attempt scored by an engine that ignores the knob, and whether xd-score passed it on."""
    chain = Chain(tmp_path_factory.mktemp("ignored"))
    attempts = {
        (knob, side): chain.attempt(chain.rows[knob, value], *one_side(f"ignores-{knob}", side))
        for knob, value in ASKED.items()
        for side in knobs.CATALOG[knob].sides
    }
    passed = chain.score_both(
        {side: [path for (_, s), path in attempts.items() if s == side] for side in knobs.SIDES}, status=69
    )
    return {(knob, side): (path, path in passed[side]) for (knob, side), path in attempts.items()}


@pytest.mark.parametrize(("knob", "side"), [(knob, side) for knob in ASKED for side in knobs.CATALOG[knob].sides])
def test_an_engine_that_ignores_a_knob_is_caught(ignored, knob, side):
    attempt, passed_on = ignored[knob, side]
    assert not passed_on
    assert not (attempt / f"score_{side}.safetensors").exists()
    readback = json.loads((attempt / f"readback_{side}.json").read_text())
    assert readback["status"] == "refused"
    refusal = next(each for each in readback["refusals"] if each["knob"] == knob)
    assert refusal["stage"] == ("settings" if knob in SEEN_BEFORE else "behaviour")
    assert (refusal["expected"], refusal["observed"]) == (ASKED[knob], seen(knob))
    assert {each["knob"] for each in readback["refusals"]} <= {knob, None}  # and of nothing else
    # what is seen before scoring spares the scoring
    assert (readback["observed"]["token_ids"] is None) == (knob in SEEN_BEFORE)


def seen(knob: str) -> object:
    return xd_test_engines.IGNORED[knob]


def test_every_knob_is_ignored_by_some_engine():
    assert set(ASKED) == set(xd_test_engines.IGNORED) == set(knobs.CATALOG)
    assert all(ASKED[knob] != value for knob, value in xd_test_engines.IGNORED.items())


def test_the_same_engines_pass_where_the_knob_asks_for_what_they_do(tmp_path):
    """Negative control: an engine that ignores the dtype is right about the one dtype it has."""
    chain = Chain(tmp_path)
    attempt = chain.attempt(chain.rows[None], *one_side("ignores-rollout.dtype", "rollout"))
    assert chain.score("rollout", [attempt], status=0) == [attempt]
    assert (attempt / "score_rollout.safetensors").exists()


# -- identities violated


@pytest.fixture(scope="module")
def judged(tmp_path_factory) -> dict[tuple[str, str], dict]:
    """(violation, side) -> comparison.json of s0's baseline with the violator on that side; "" is the honest one."""
    chain = Chain(tmp_path_factory.mktemp("violations"))
    attempts = {
        (violation, side): chain.attempt(chain.rows[None], *one_side(violation or HONEST, side))
        for violation, side in [("", "rollout"), *((violation, side) for violation, side, _ in VIOLATIONS)]
    }
    # honest ones of a side together: they share an engine
    paths = {side: [attempts[key] for key in sorted(attempts, key=lambda key: key[1] == side)] for side in knobs.SIDES}
    assert chain.score_both(paths, status=0) == paths  # a violation is a verdict, not an error
    chain.run("xd-compare", *attempts.values(), status=0)
    return {key: json.loads((path / "comparison.json").read_text()) for key, path in attempts.items()}


@pytest.mark.parametrize(("violation", "side", "code"), VIOLATIONS)
def test_a_violated_identity_is_invalid(judged, violation, side, code):
    comparison = judged[violation, side]
    assert comparison["status"] == "INVALID_IDENTITY"
    blamed = {each["side"] for each in comparison["violations"]}
    # the honest side is not blamed; of two buffers that differ nobody knows whose is right, and training's is named
    assert blamed == ({"training"} if violation == "holds-other-buffer" else {side})
    assert code in {each["code"] for each in comparison["violations"]}


def test_a_weight_that_is_not_the_checkpoints_is_named(judged):
    for side in knobs.SIDES:
        found = [v for v in judged["holds-other-weight", side]["violations"] if v["code"] == "weights"]
        assert [v["path"].rpartition("/")[2] for v in found] == ["model.layers.1.mlp.down_proj.weight"]


def test_the_honest_engine_is_valid(judged):
    """Negative control: the same row, the same chain, nobody dishonest."""
    assert judged["", "rollout"]["status"] == "PASS"
    assert judged["", "rollout"]["violations"] == []


def test_every_violation_is_judged():
    assert set(CODES) == set(xd_test_engines.VIOLATIONS)
    assert set(REFUSED) == set(xd_test_engines.REFUSED)


# -- no scoring of the case at all


def _rows(chain: Chain, act: str) -> list[str]:
    """A spoilt process shows at the second case that it would serve."""
    if act == "sets-numerics":
        return [chain.rows[None], chain.rows["batch.size", 1]]
    return [chain.repeat if act == "ignores-submission" else chain.rows[None]]


@pytest.fixture(scope="module")
def unpublished(tmp_path_factory) -> dict[tuple[str, str], list[dict]]:
    """(what the engine does, side) -> the readbacks of what it scored."""
    chain = Chain(tmp_path_factory.mktemp("refused"))
    attempts = {
        (act, side): [
            chain.attempt(row, *one_side(act, side))
            for row in _rows(chain, act)
        ]
        for act in REFUSED
        for side in knobs.SIDES
    }
    paths = {side: [path for (_, s), pair in attempts.items() if s == side for path in pair] for side in knobs.SIDES}
    honest = {side: chain.attempt(chain.repeat, HONEST, HONEST) for side in knobs.SIDES}  # negative control
    passed = chain.score_both({side: [*paths[side], honest[side]] for side in knobs.SIDES}, status=69)
    assert passed == {side: [honest[side]] for side in knobs.SIDES}
    return {
        (act, side): [json.loads((path / f"readback_{side}.json").read_text()) for path in pair]
        for (act, side), pair in attempts.items()
    }


@pytest.mark.parametrize("side", knobs.SIDES)
@pytest.mark.parametrize("act", list(REFUSED))
def test_what_is_no_scoring_of_the_case_publishes_nothing(unpublished, act, side):
    stage, words = REFUSED[act]
    for readback in unpublished[act, side]:  # the second attempt, too: a process that was spoilt serves no other case
        assert readback["status"] == "refused"
        assert {each["stage"] for each in readback["refusals"]} == {stage}
        assert any(words in each["reason"] for each in readback["refusals"])
