"""Attempts as rungs of the precision ladder, and xd-ladder over them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from comparison_fixtures import refused, rewrite_json, rewrite_score, scored
from materialize_fixtures import SYNTHETIC

from libxd import canon, comparison, ladder, ladder_text, roundoff, schema, tensors
from libxd.errors import Status, XdError
from libxd.knobs import DTYPES
from libxd.rundir import Attempt

LENGTHS = (6, 10, 8)
TOKENS = sum(LENGTHS)
FACTOR = 9.0  # of rounding, in nats
OTHER = SYNTHETIC | {"seed": 8}  # another model


def drawn(seed: int = 0) -> np.ndarray:
    """Logprobs float32 [TOKENS] whose neighbours are 2^-25 apart, so that float32 differences are as they are made."""
    return (-np.random.default_rng(seed).uniform(0.3, 0.49, TOKENS)).astype(np.float32)


def attempt(root: Path, dtype: str, mistake: float = 0.0, judge: bool = True, **given: Any) -> Attempt:
    """A judged attempt whose two sides are apart by rounding, and by a mistake in nats."""
    rollout = drawn()
    apart = FACTOR * roundoff.UNIT_ROUNDOFF[dtype] * np.random.default_rng(1).standard_normal(TOKENS)
    made = scored(root, rollout, (rollout + apart + mistake).astype(np.float32), dtype=dtype, lengths=LENGTHS, **given)
    if judge:
        comparison.compare(made)
    return made


def rungs(root: Path, mistake: float = 0.0, **given: Any) -> list[Attempt]:
    return [attempt(root, dtype, mistake, **given) for dtype in DTYPES]


def climbed(attempts: list[Attempt], reference: Attempt | None = None) -> list[dict[str, Any]]:
    """The lines of --json, each valid."""
    beside = ladder.Reference(reference) if reference else None
    found = ladder.ladders([ladder.read(each, beside) for each in attempts])
    return [schema.validate("ladder", each.as_json(), "ladder") for each in found]


def test_attempts_that_are_equal_but_for_the_dtypes_are_a_ladder(tmp_path):
    (found,) = climbed(rungs(tmp_path))
    assert found["answer"] == "rounding"
    assert [rung["dtypes"]["rollout"] for rung in found["rungs"]] == ["bfloat16", "float16", "float32"]
    assert [rung["unit_roundoff"] for rung in found["rungs"]] == [2.0**-8, 2.0**-11, 2.0**-24]
    for rung in found["rungs"]:
        read = Attempt.open(rung["attempt"]).comparison()
        for name in ladder.FIGURES:
            assert rung[name] == read["logprob_difference"][name]
    assert found["mean"]["left"] == pytest.approx(found["rungs"][-1]["mean_absolute"])
    assert found["max"]["left"] == found["rungs"][-1]["max_absolute"]


def test_what_stays_is_a_bug(tmp_path):
    (found,) = climbed(rungs(tmp_path, mistake=1e-3))
    assert found["answer"] == "bug"
    assert found["mean"]["left"] == pytest.approx(1e-3, rel=1e-2)


def test_another_knob_runtime_environment_or_sequence_is_another_ladder(tmp_path):
    base = rungs(tmp_path)
    others = [
        attempt(tmp_path, "float32", change=("batch.size", 1)),
        attempt(tmp_path, "float32", rollout_environment={"python": "3.13.0"}),
        attempt(tmp_path, "float32", pinned={"semantics": {"temperature": 0.5}}),
        attempt(tmp_path, "float32", active=np.arange(TOKENS) % 2 == 0),
    ]
    found = climbed([*base, *others])
    assert [len(each["rungs"]) for each in found] == [3, 1, 1, 1, 1]
    assert [each["answer"] for each in found] == ["rounding", *["undecided"] * 4]


def test_what_keeps_rungs_from_being_one_ladder_is_said(xd, tmp_path):
    """Not of knobs, which a title names."""
    base = attempt(tmp_path / "a", "bfloat16")
    fine = attempt(tmp_path / "b", "float32", rollout_environment={"python": "3.13.0"})
    knob = attempt(tmp_path / "c", "float32", change=("batch.size", 1))
    ran = xd("xd-ladder", "--json", base, fine)
    assert ran.out.count("\n") == 2 and ran.err.count("\n") == 1
    assert "2 ladders, not one: they differ in conditions.rollout" in ran.err and "3.13.0" in ran.err
    assert xd("xd-ladder", "-q", base, fine).err == ""
    assert xd("xd-ladder", base, knob).err == ""


def test_one_side_may_climb_alone(tmp_path):
    """The other stays in float32; a rung is as coarse as its coarser side."""
    base = attempt(tmp_path, "float32")
    others = []
    for dtype in ("float16", "bfloat16"):
        apart = FACTOR * roundoff.UNIT_ROUNDOFF[dtype] * np.random.default_rng(1).standard_normal(TOKENS)
        made = scored(tmp_path, (drawn() - apart).astype(np.float32), drawn(), lengths=LENGTHS,
                      change=("rollout.dtype", dtype))  # fmt: skip
        comparison.compare(made)
        others.append(made)
    (found,) = climbed([base, *others])
    assert found["answer"] == "rounding"
    assert [rung["dtypes"] for rung in found["rungs"]] == [
        {"rollout": dtype, "training": "float32"} for dtype in ("bfloat16", "float16", "float32")
    ]
    assert [rung["unit_roundoff"] for rung in found["rungs"]] == [2.0**-8, 2.0**-11, 2.0**-24]
    (undecided,) = climbed(others)
    assert undecided["answer"] == "undecided"


def test_a_rung_is_where_the_engines_computed_not_what_was_asked(tmp_path):
    """A side that showed bfloat16 under a float32 case."""
    fallen = attempt(tmp_path, "float32", judge=False)
    readback = fallen.readback("rollout")
    for record in readback["knobs"]:
        if record["knob"] == "rollout.dtype":
            record["actual"] = "bfloat16"
    rewrite_json(fallen, "readback_rollout.json", knobs=readback["knobs"])
    comparison.compare(fallen)
    rung = ladder.read(fallen)
    assert (rung.dtypes["rollout"], rung.unit_roundoff) == ("bfloat16", 2.0**-8)


@pytest.mark.parametrize("tf32", [True, False])
def test_tf32_products_are_no_float32(tmp_path, monkeypatch, tf32):
    made = attempt(tmp_path, "float32", judge=False)
    rewrite_json(made, "readback_training.json", engine={"numerics": {"matmul_tf32": tf32}})
    comparison.compare(made)
    assert ladder.read(made).unit_roundoff == 2.0**-24  # on a CPU the setting says nothing
    honest = Attempt.materialized

    def on_cuda(self: Attempt) -> dict[str, Any]:
        found = honest(self)
        found["sides"]["training"]["engine"]["device"] = "cuda"
        return found

    shown = ladder.read(made).dtypes
    monkeypatch.setattr(Attempt, "materialized", on_cuda)
    assert ladder._precision(made, "training") == (shown["training"], 2.0**-11 if tf32 else 2.0**-24)


def test_what_was_not_measured_stands_there_with_its_reason_and_is_not_climbed(tmp_path):
    spoilt = scored(tmp_path, drawn(), np.where(np.arange(TOKENS) == 3, np.inf, drawn()).astype(np.float32),
                    dtype="float16", lengths=LENGTHS)  # fmt: skip
    comparison.compare(spoilt)
    rest = [attempt(tmp_path, dtype) for dtype in ("float32", "bfloat16")]
    (found,) = climbed([spoilt, *rest])
    assert found["answer"] == "rounding"
    status, reason = found["rungs"][1]["status"], found["rungs"][1]["reason"]
    assert (status, found["rungs"][1]["mean_absolute"]) == ("INVALID_ARTIFACT", None)
    assert "not finite" in reason


def test_an_attempt_of_another_identity_is_never_climbed(tmp_path):
    """However well its numbers would fit."""
    wrong = attempt(tmp_path, "float32", judge=False)
    observed = wrong.readback("training")["observed"] | {"weights_before": "0" * 64, "weights_after": "0" * 64}
    rewrite_json(wrong, "readback_training.json", observed=observed)
    rewrite_score(wrong, "training", metadata={"observed": observed})
    assert comparison.compare(wrong)["status"] == "INVALID_IDENTITY"
    (found,) = climbed([wrong, *(attempt(tmp_path, dtype) for dtype in ("float16", "bfloat16"))])
    assert (found["answer"], found["rungs"][-1]["status"]) == ("undecided", "INVALID_IDENTITY")


def test_refused_and_unjudged_attempts_are_named(tmp_path):
    unjudged = attempt(tmp_path, "float32", judge=False)
    no = refused(tmp_path, ("rollout.dtype", "float16"), "no float16 on this device")
    found = {rung["status"]: rung for each in climbed([unjudged, no]) for rung in each["rungs"]}
    assert set(found) == {"incomplete", "unsupported"}
    assert "no float16 on this device" in found["unsupported"]["reason"]
    assert found["unsupported"]["dtypes"] == {"rollout": "float16", "training": "float32"}


def test_no_active_token_is_undecided(tmp_path):
    (found,) = climbed(rungs(tmp_path, active=np.zeros(TOKENS, bool)))
    assert (found["answer"], found["why"]) == ("undecided", "no rung holds valid scores of active tokens")
    assert {rung["status"] for rung in found["rungs"]} == {"ZERO_ACTIVE_TOKENS"}


def test_sums_that_do_not_give_the_verdicts_mean_are_refused(tmp_path):
    made = attempt(tmp_path, "float32", mistake=1e-3)
    path = made.file("token_diffs.safetensors")
    with tensors.TensorFile(path) as file:
        arrays = {name: np.array(file.array(name)) for name in file.names}
        metadata = file.metadata
    path.unlink()
    tensors.write(path, {**arrays, "sequence_sum_absolute": arrays["sequence_sum_absolute"] / 1000}, metadata)
    with pytest.raises(XdError, match="not what the comparison was made of") as caught:
        ladder.read(made)
    assert caught.value.status == Status.INVALID


# -- the reference


def test_the_reference_says_which_side_is_further(tmp_path):
    reference = attempt(tmp_path / "third", "float32", rollout_environment={"python": "3.13.0"})
    (found,) = climbed(rungs(tmp_path), reference)
    for rung in found["rungs"]:
        beside = rung["reference"]
        assert beside["rollout"]["count"] == TOKENS
        assert rung["nearer"] == min(("rollout", "training"), key=lambda side: beside[side]["mean_absolute"])
    coarsest = found["rungs"][0]  # the rollout logprobs are the exact ones of all rungs
    assert coarsest["nearer"] == "rollout"
    with tensors.TensorFile(reference.file("score_training.safetensors")) as file:
        exact = np.array(file.array("logprobs"))
    with tensors.TensorFile(Attempt.open(coarsest["attempt"]).file("score_training.safetensors")) as file:
        apart = np.abs(np.array(file.array("logprobs")) - exact)
    assert coarsest["reference"]["training"]["mean_absolute"] == pytest.approx(apart.mean(), rel=1e-6)
    assert coarsest["reference"]["training"]["max_absolute"] == apart.max()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_coarser_reference_is_refused(tmp_path, dtype):
    with pytest.raises(XdError, match="no reference") as caught:
        ladder.Reference(attempt(tmp_path, dtype))
    assert (caught.value.status, caught.value.found, caught.value.expected) == (Status.INVALID, dtype, "float32")


def test_a_reference_without_valid_scores_is_refused(tmp_path):
    with pytest.raises(XdError, match="holds no valid scores"):
        ladder.Reference(attempt(tmp_path, "float32", judge=False))
    with pytest.raises(XdError) as caught:
        ladder.Reference(refused(tmp_path, ("rollout.dtype", "float16"), "no float16"))
    assert caught.value.status == Status.REFUSED


@pytest.mark.parametrize(
    ("other", "what"),
    [
        ({"active": np.arange(TOKENS) > 2}, "other tokens"),
        ({"pinned": {"checkpoint": {"synthetic": OTHER, "digest": canon.digest(OTHER)}}}, "other identity"),
        ({"pinned": {"semantics": {"temperature": 0.5}}}, "other identity"),
    ],
)
def test_a_reference_of_other_tokens_weights_or_semantics_is_refused(tmp_path, other, what):
    beside = ladder.Reference(attempt(tmp_path, "float32", **other))
    with pytest.raises(XdError, match=what) as caught:
        ladder.read(attempt(tmp_path, "bfloat16"), beside)
    assert caught.value.status == Status.INVALID


# -- the text


def test_the_text_is_at_most_120_columns_and_says_what_differs(tmp_path):
    reference = ladder.Reference(attempt(tmp_path / "third", "float32"))
    attempts = [*rungs(tmp_path), attempt(tmp_path, "float32", change=("batch.size", 1))]
    found = ladder.ladders([ladder.read(each, reference) for each in attempts])
    texts = ["\n".join(ladder_text.lines(each, found)) for each in found]
    assert all(len(line) <= 120 for text in texts for line in text.splitlines())
    assert "batch.size=4 (rollout)" in texts[0] and "batch.size=1 (rollout)" in texts[1]
    assert "batch.size" not in "\n".join(ladder_text.lines(found[0], found[:1]))
    assert "Answer: rounding (" in texts[0] and "2^-24" in texts[0] and "nearer" in texts[0]
    assert "Answer: undecided (no rung is coarser than float32" in texts[1]
    alone = ladder.ladders([ladder.read(each) for each in attempts[:3]])
    assert "nearer" not in "\n".join(ladder_text.lines(alone[0], alone))


# -- the tool


def test_the_tool_prints_an_answer_a_ladder(xd, tmp_path):
    good, bad = rungs(tmp_path / "good"), rungs(tmp_path / "bad", mistake=1e-3)
    ran = xd("xd-ladder", *good)
    assert (ran.status, ran.err) == (0, "")
    assert "Answer: rounding" in ran.out
    ran = xd("xd-ladder", "--json", "--exit-code", stdin="\n".join(map(str, good)))
    assert (ran.status, json.loads(ran.out)["answer"]) == (0, "rounding")
    ran = xd("xd-ladder", "--exit-code", *bad)
    assert (ran.status, "Answer: bug" in ran.out) == (1, True)
    assert xd("xd-ladder", *bad).status == 0


def test_what_is_undecided_or_nothing_is_no_yes(xd, tmp_path):
    one = attempt(tmp_path, "bfloat16")
    assert xd("xd-ladder", "--exit-code", one).status == 1
    ran = xd("xd-ladder", "--exit-code", stdin="\n")
    assert (ran.status, ran.out) == (1, "")
    assert "no attempts, no ladder" in ran.err


def test_an_attempt_that_cannot_be_read_is_named_and_the_others_are_climbed(xd, tmp_path):
    ran = xd("xd-ladder", *rungs(tmp_path), tmp_path / "c-0123456789abcdef" / "a0001")
    assert ran.status == Status.MISSING
    assert ran.err.count("\n") == 1 and "no such attempt" in ran.err
    assert "Answer: rounding" in ran.out


def test_a_bad_reference_is_one_line_and_no_ladder(xd, tmp_path):
    attempts = rungs(tmp_path)
    ran = xd("xd-ladder", "--reference", attempts[-1], *attempts)
    assert (ran.status, ran.out, ran.err.count("\n")) == (Status.INVALID, "", 1)
    assert "bfloat16" in ran.err and "float32" in ran.err
    other = attempt(tmp_path / "other", "float32", active=np.arange(TOKENS) > 2)
    ran = xd("xd-ladder", "--reference", other, *attempts)
    assert (ran.status, ran.out, ran.err.count("\n")) == (Status.INVALID, "", 4)
    assert "scored other tokens" in ran.err


def test_nothing_is_written(xd, tmp_path):
    attempts = rungs(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    xd("xd-ladder", *attempts)
    assert sorted(tmp_path.rglob("*")) == before


def test_it_needs_no_torch(xd, tmp_path):
    (tmp_path / "shadow").mkdir()
    (tmp_path / "shadow" / "torch.py").write_text("raise AssertionError('torch was imported')\n")
    ran = xd("xd-ladder", *rungs(tmp_path), env={"PYTHONPATH": str(tmp_path / "shadow")})
    assert (ran.status, ran.err) == (0, "")


