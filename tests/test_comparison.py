"""The verdict: the one rule, what comes before it, what is an error instead, and that all of it can be recomputed."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import struct
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from comparison_fixtures import floats, rewrite_json, rewrite_score, score_path, scored, snapshot
from tolerances import SEQUENCE_SUM_RELATIVE

from libxd import canon, comparison, contract, schema, scores, tensors
from libxd.errors import Status, XdError
from libxd.rundir import Attempt

NAN, INF = math.nan, math.inf
THRESHOLD = np.float32(contract.lookup("ws1", "current").threshold("float32"))
RESULTS = ("actual.json", "comparison.json", "token_diffs.safetensors")


def drifting(tokens: int, scale: float = 1e-5, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    rollout = (-np.abs(random.standard_normal(tokens)) * 2).astype(np.float32)
    return rollout, (rollout + random.standard_normal(tokens).astype(np.float32) * np.float32(scale)).astype(np.float32)


def token_diffs(attempt: Attempt) -> dict[str, np.ndarray]:
    with tensors.TensorFile(attempt.file("token_diffs.safetensors")) as file:
        schema.validate("token_diffs_metadata", file.metadata, "token_diffs")
        return {name: np.array(file.array(name)) for name in file.names}


# -- the rule


def test_equality_with_the_threshold_is_no_mismatch_and_one_ulp_above_is(tmp_path: Path) -> None:
    above = np.nextafter(THRESHOLD, np.float32(1))
    training = np.array([THRESHOLD, -THRESHOLD, above, -above, 0.0], np.float32)
    found = comparison.compare(scored(tmp_path, np.zeros(5, np.float32), training))
    assert found["status"] == "MISMATCH"
    assert found["counts"]["mismatches"] == 2
    assert found["first_mismatch"]["position"] == 2
    at = comparison.compare(scored(tmp_path, np.zeros(2, np.float32), training[:2]))
    assert (at["status"], at["counts"]["mismatches"]) == ("PASS", 0)
    assert at["logprob_difference"]["max_absolute"] == float(THRESHOLD)


def test_the_difference_is_formed_in_float32(tmp_path: Path) -> None:
    """In float64 this difference is above the threshold, in float32 it is exactly the threshold."""
    rollout, training = floats(-THRESHOLD), floats(1e-15)
    assert float(training[0]) - float(rollout[0]) > float(THRESHOLD)
    attempt = scored(tmp_path, rollout, training)
    assert comparison.compare(attempt)["status"] == "PASS"


@pytest.mark.parametrize(
    ("source", "dtype", "bits"),
    [("ws1", "float32", "3727c5ac"), ("ws1", "float16", "3ba3d70a"), ("ws1", "bfloat16", "3d75c28f"),
     ("bitwise", "bfloat16", "00000000")],
)  # fmt: skip
def test_the_threshold_is_the_contracts(tmp_path: Path, source: str, dtype: str, bits: str) -> None:
    rollout, training = drifting(64, 1e-3)
    attempt = scored(tmp_path, rollout, training, source=source, dtype=dtype)
    found = comparison.compare(attempt)
    assert found["threshold_bits"] == bits
    assert struct.pack(">f", found["threshold"]).hex() == bits
    expected = int((np.abs(training - rollout) > np.float32(found["threshold"])).sum())
    assert found["counts"]["mismatches"] == expected
    assert token_diffs(attempt)["threshold"].tobytes() == bytes.fromhex(bits)[::-1]


def test_bitwise_contract_lets_only_equal_numbers_pass(tmp_path: Path) -> None:
    same = floats(-1, -2, -3)
    assert comparison.compare(scored(tmp_path, same, same.copy(), source="bitwise"))["status"] == "PASS"
    other = same.copy()
    other[1] = np.nextafter(other[1], np.float32(0))
    assert comparison.compare(scored(tmp_path, same, other, source="bitwise"))["status"] == "MISMATCH"


def test_a_contract_that_changed_since_planning_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt = scored(tmp_path, floats(-1), floats(-1))
    now = contract.lookup("ws1", "current")
    monkeypatch.setattr(contract, "lookup", lambda *_: dataclasses.replace(now, digest="0" * 64))
    before = snapshot(attempt)
    with pytest.raises(XdError, match="contract has changed"):
        comparison.compare(attempt)
    assert snapshot(attempt) == before


def test_inactive_tokens_do_not_decide(tmp_path: Path) -> None:
    active = np.array([False, True, True])
    rollout, training = floats(NAN, -1, -2), floats(5, -1, -2)
    found = comparison.compare(scored(tmp_path, rollout, training, active=active))
    assert found["status"] == "PASS"
    assert found["counts"] == {
        "tokens": 3, "active": 2, "mismatches": 0, "bitwise_equal": 2, "nonfinite_rollout": 0, "nonfinite_training": 0,
    }  # fmt: skip


@pytest.mark.parametrize("strange", [NAN, INF, -INF])
@pytest.mark.parametrize("side", ["rollout", "training"])
def test_a_non_finite_active_logprob_is_an_invalid_artifact(tmp_path: Path, side: str, strange: float) -> None:
    values = {"rollout": floats(-1, -2, -3, -4), "training": floats(-1, -2, -3, -4)}
    values[side][2] = strange
    attempt = scored(tmp_path, **values, lengths=(1, 3))
    found = comparison.compare(attempt)
    assert found["status"] == "INVALID_ARTIFACT"
    assert found["counts"][f"nonfinite_{side}"] == 1
    (problem,) = found["artifact_problems"]
    assert (problem["code"], problem["side"]) == ("not-finite", side)
    assert "sequence 1 at position 1" in problem["detail"]
    assert all(value is None for key, value in found["logprob_difference"].items() if key != "definition")
    assert found["kl"]["k1"] is found["kl"]["k2"] is found["kl"]["k3"] is found["worst"] is None
    assert found["value_grid"][side] is None
    assert token_diffs(attempt)[f"{side}_logprobs"].tobytes() == values[side].tobytes()


def test_equal_infinities_are_no_pass(tmp_path: Path) -> None:
    found = comparison.compare(scored(tmp_path, floats(-1, -INF), floats(-1, -INF)))
    assert found["status"] == "INVALID_ARTIFACT"
    assert found["counts"]["bitwise_equal"] == 2


def test_an_all_false_mask_is_zero_active_tokens(tmp_path: Path) -> None:
    found = comparison.compare(scored(tmp_path, floats(-1, -2), floats(-3, NAN), active=np.zeros(2, bool)))
    assert found["status"] == "ZERO_ACTIVE_TOKENS"
    assert found["mismatch_ratio"] is None
    assert found["bitwise_equal_share"] is None
    assert found["value_grid"] == {"rollout": None, "training": None}
    assert found["worst"] is found["first_mismatch"] is found["logprob_difference"]["mean_signed"] is None


def test_no_tokens_at_all_are_zero_active_tokens(tmp_path: Path) -> None:
    nothing = np.zeros(0, np.float32)
    assert comparison.compare(scored(tmp_path, nothing, nothing))["status"] == "ZERO_ACTIVE_TOKENS"


# -- artifacts


@pytest.mark.parametrize(
    ("name", "array", "code"),
    [
        ("logprobs", np.zeros(4, np.float64), "dtype"),
        ("logprobs", np.zeros(4, np.float16), "dtype"),
        ("logprobs", np.zeros(4, np.int32), "dtype"),
        ("active_mask", np.ones(4, np.uint8), "dtype"),
        ("token_ids", np.zeros(4, np.int64), "dtype"),
        ("logprobs", np.zeros(3, np.float32), "shape"),
        ("logprobs", np.zeros((1, 4), np.float32), "shape"),
        ("active_mask", np.ones(5, bool), "shape"),
        ("cu_seqlens", np.zeros((1, 2), np.int64), "shape"),
        ("cu_seqlens", np.array([0, 3]), "bounds"),
        ("cu_seqlens", np.array([1, 4]), "bounds"),
        ("cu_seqlens", np.array([0, 3, 2, 4]), "bounds"),
    ],
)
def test_tensors_of_another_form_are_an_invalid_artifact(
    tmp_path: Path, name: str, array: np.ndarray, code: str
) -> None:
    attempt = scored(tmp_path, floats(-1, -2, -3, -4), floats(-1, -2, -3, -4))
    rewrite_score(attempt, "training", **{name: array})
    found = comparison.compare(attempt)
    assert found["status"] == "INVALID_ARTIFACT"
    assert [(p["code"], p["side"]) for p in found["artifact_problems"]] == [(code, "training")]
    assert name in found["artifact_problems"][0]["detail"]
    assert found["counts"] is None
    stored = token_diffs(attempt)
    assert stored["rollout_logprobs"].size == stored["mismatch_mask"].size == 0
    assert stored["threshold"].tolist() == [THRESHOLD]


def test_both_sides_of_another_length_disagree_with_the_frozen_tokens(tmp_path: Path) -> None:
    attempt = scored(tmp_path, floats(-1, -2, -3), floats(-1, -2, -3))
    for side in ("rollout", "training"):
        rewrite_score(attempt, side, logprobs=floats(-1, -2))
    found = comparison.compare(attempt)
    assert found["status"] == "INVALID_ARTIFACT"
    assert len(found["artifact_problems"]) == 2


def test_both_sides_may_agree_on_another_length_and_still_be_invalid(tmp_path: Path) -> None:
    """Each file is sound and equal to the other: what they hold is not as long as the frozen tokens."""
    attempt = scored(tmp_path, floats(-1, -2, -3), floats(-1, -2, -3))
    ids, active = np.arange(2, dtype=np.int32), np.ones(2, bool)
    for side in ("rollout", "training"):
        rewrite_score(attempt, side, logprobs=floats(-1, -2), token_ids=ids, active_mask=active,
                      cu_seqlens=np.array([0, 2]))  # fmt: skip
    found = comparison.compare(attempt)
    assert found["status"] == "INVALID_ARTIFACT"
    assert {problem["code"] for problem in found["artifact_problems"]} == {"shape"}


# -- identity


def test_identity_comes_before_every_number(tmp_path: Path) -> None:
    """Other ids on one side, and NaN on the other: INVALID_IDENTITY; token differences are written all the same."""
    rollout, training = floats(-1, NAN, -3), floats(-1.5, -2, -3)
    attempt = scored(tmp_path, rollout, training)
    rewrite_score(attempt, "training", token_ids=np.array([0, 1, 3], np.int32))
    found = comparison.compare(attempt)
    assert found["status"] == "INVALID_IDENTITY"
    assert [(v["code"], v["side"]) for v in found["violations"]] == [("token-ids", "training")]
    assert found["artifact_problems"]
    stored = token_diffs(attempt)
    assert stored["rollout_logprobs"].tobytes() == rollout.tobytes()
    assert stored["mismatch_mask"].tolist() == [True, False, False]


def test_masks_that_differ_are_a_violation_and_the_common_tokens_are_shown(tmp_path: Path) -> None:
    attempt = scored(tmp_path, floats(-1, -2, -3), floats(-2, -3, -4), active=np.array([False, True, True]))
    rewrite_score(attempt, "rollout", active_mask=np.array([True, True, False]))
    found = comparison.compare(attempt)
    assert found["status"] == "INVALID_IDENTITY"
    assert found["violations"][0]["code"] == "active-mask"
    assert found["counts"]["active"] == 1
    assert token_diffs(attempt)["active_mask"].tolist() == [False, True, False]


def test_a_violation_seen_at_read_back_decides(tmp_path: Path) -> None:
    attempt = scored(tmp_path, floats(-1), floats(-1))
    readback = attempt.readback("training")
    rewrite_json(attempt, "readback_training.json", observed={**readback["observed"], "mode_after": "train"})
    found = comparison.compare(attempt)
    assert found["status"] == "INVALID_IDENTITY"
    assert "mode-changed" in [v["code"] for v in found["violations"]]
    assert found["counts"]["active"] == 1


def test_what_was_not_observed_is_strict_business(tmp_path: Path) -> None:
    for strict, status in ((True, "INVALID_IDENTITY"), (False, "PASS")):
        attempt = scored(tmp_path / str(strict), floats(-1), floats(-1), strict=strict)
        observed = {**attempt.readback("rollout")["observed"], "positions": None}
        rewrite_json(attempt, "readback_rollout.json", observed=observed)
        rewrite_score(attempt, "rollout", metadata={"observed": observed})
        assert comparison.compare(attempt)["status"] == status


# -- what is reported


def test_every_figure_against_a_plain_computation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over several blocks, with sequences that cross their borders, empty ones among them, and idle tokens."""
    tokens = 5000
    rollout, training = drifting(tokens)
    training[::7] = rollout[::7]
    active = np.random.default_rng(1).random(tokens) < 0.8
    lengths = (1, 0, 1500, 999, 0, 2000, 500)
    monkeypatch.setattr(scores, "BLOCK", 256)
    attempt = scored(tmp_path, rollout, training, active=active, lengths=lengths)
    found = comparison.compare(attempt)

    d = (training - rollout)[active]
    magnitudes = np.sort(np.abs(d))
    mismatch = active & (np.abs(training - rollout) > THRESHOLD)
    assert found["status"] == "MISMATCH"
    assert found["counts"]["active"] == d.size
    assert found["counts"]["mismatches"] == mismatch.sum() > 0
    assert found["counts"]["bitwise_equal"] == (d == 0).sum() > 0
    assert found["mismatch_ratio"] == mismatch.sum() / d.size
    assert found["bitwise_equal_share"] == (d == 0).sum() / d.size
    difference = found["logprob_difference"]
    assert difference["mean_signed"] == float(sum(map(Fraction, d.tolist())) / d.size)
    assert difference["mean_absolute"] == float(sum(map(Fraction, magnitudes.tolist())) / d.size)
    for key, ratio in (("p50", (1, 2)), ("p90", (9, 10)), ("p99", (99, 100)), ("p99_9", (999, 1000))):
        assert difference[f"{key}_absolute"] == magnitudes[math.ceil(Fraction(*ratio) * d.size) - 1]
    assert difference["max_absolute"] == magnitudes[-1]
    assert found["kl"]["k1"] == -difference["mean_signed"]
    bounds = np.cumsum((0, *lengths))
    for key, index in (
        ("worst", int(np.where(active, np.abs(training - rollout), -1).argmax())),
        ("first_mismatch", int(mismatch.argmax())),
    ):
        sequence = int(np.searchsorted(bounds, index, side="right")) - 1
        assert found[key] == {
            "sequence": sequence, "position": index - int(bounds[sequence]), "token_id": index % 97,
            "rollout_logprob": float(rollout[index]), "training_logprob": float(training[index]),
        }  # fmt: skip
    stored = token_diffs(attempt)
    for i, (start, stop) in enumerate(itertools.pairwise(bounds)):
        inside = (training - rollout)[start:stop][active[start:stop]].tolist()
        assert stored["sequence_active"][i] == len(inside)
        assert stored["sequence_mismatches"][i] == np.count_nonzero(stored["mismatch_mask"][start:stop])
        for name, values in (("signed", inside), ("absolute", map(abs, inside))):
            assert stored[f"sequence_sum_{name}"][i] == pytest.approx(
                math.fsum(values), rel=SEQUENCE_SUM_RELATIVE, abs=0
            )


def test_blocks_change_no_figure_and_no_mask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is exact is the same whatever the block; so the block is chosen for speed alone."""
    rollout, training = drifting(3001)
    results = []
    for block in (1, 1000, 3001, 1 << 20):
        monkeypatch.setattr(scores, "BLOCK", block)
        attempt = scored(tmp_path / str(block), rollout, training)
        found = comparison.compare(attempt)
        exact = {key: value for key, value in found.items() if key not in ("kl", "token_diffs")}
        results.append((exact, token_diffs(attempt)["mismatch_mask"].tobytes()))
    assert all(result == results[0] for result in results)


def test_the_verdict_can_be_recomputed_from_token_diffs_alone(tmp_path: Path) -> None:
    rollout, training = drifting(2000)
    active = np.random.default_rng(2).random(2000) < 0.5
    attempt = scored(tmp_path, rollout, training, active=active, lengths=(700, 1300))
    found = comparison.compare(attempt)
    from safetensors.numpy import load_file

    stored = load_file(attempt.file("token_diffs.safetensors"))
    mask = stored["active_mask"] & (
        np.abs(stored["training_logprobs"] - stored["rollout_logprobs"]) > stored["threshold"][0]
    )
    assert mask.tobytes() == stored["mismatch_mask"].tobytes()
    assert mask.sum() == found["counts"]["mismatches"] > 0
    assert stored["sequence_mismatches"].sum() == found["counts"]["mismatches"]
    assert stored["sequence_active"].sum() == found["counts"]["active"]
    assert canon.digest_file(attempt.file("token_diffs.safetensors")) == found["token_diffs"]


def test_actual_follows_every_knob_to_what_the_engine_showed(tmp_path: Path) -> None:
    attempt = scored(tmp_path, floats(-1), floats(-1))
    readback = attempt.readback("rollout")
    knobs = [
        {**knob, "actual": 3, "stage": "behaviour"} if knob["knob"] == "batch.size" else knob
        for knob in readback["knobs"]
        if knob["knob"] != "rollout.dtype"
    ]
    rewrite_json(attempt, "readback_rollout.json", knobs=knobs)
    comparison.compare(attempt)
    records = {(k["knob"], k["side"]): k for k in attempt.read("actual.json")["knobs"]}
    assert len(records) == 12, "ten knobs, two of them on both sides"
    batch = records["batch.size", "rollout"]
    assert (batch["requested"], batch["materialized"], batch["actual"], batch["stage"]) == (4, 4, 3, "behaviour")
    assert records["batch.size", "training"]["actual"] == 4
    unseen = records["rollout.dtype", "rollout"]
    assert (unseen["actual"], unseen["status"], unseen["stage"]) == (None, "unobservable", None)


# -- files: once, whole, and nothing on an error


def test_comparing_again_changes_nothing_and_other_results_are_kept(tmp_path: Path) -> None:
    rollout, training = drifting(100)
    attempt = scored(tmp_path, rollout, training)
    comparison.compare(attempt)
    before = snapshot(attempt)
    comparison.compare(attempt)
    assert snapshot(attempt) == before
    rewrite_json(attempt, "comparison.json", status="PASS")
    edited = snapshot(attempt)
    with pytest.raises(XdError) as caught:
        comparison.compare(attempt)
    assert caught.value.status == Status.CONFLICT
    assert snapshot(attempt) == edited


def test_scores_that_change_after_the_verdict_are_a_conflict(tmp_path: Path) -> None:
    rollout, training = drifting(100)
    attempt = scored(tmp_path, rollout, training)
    comparison.compare(attempt)
    rewrite_score(attempt, "training", logprobs=rollout)
    before = snapshot(attempt)
    with pytest.raises(XdError) as caught:
        comparison.compare(attempt)
    assert caught.value.status == Status.CONFLICT
    assert snapshot(attempt) == before


def test_results_do_not_depend_on_place_or_attempt(tmp_path: Path) -> None:
    rollout, training = drifting(100)
    first, second = (scored(tmp_path / "one", rollout, training) for _ in range(2))
    third = scored(tmp_path / "elsewhere" / "deep", rollout, training)
    contents = []
    for attempt in (first, second, third):
        comparison.compare(attempt)
        contents.append([attempt.file(name).read_bytes() for name in RESULTS])
    assert contents[0] == contents[1] == contents[2]
    assert (first.attempt_id, second.attempt_id) == ("a0001", "a0002")


def test_a_sealed_attempt_does_not_grow(tmp_path: Path) -> None:
    attempt = scored(tmp_path, floats(-1), floats(-1))
    attempt.file("COMPLETE").write_bytes(b"{}\n")
    before = snapshot(attempt)
    with pytest.raises(XdError) as caught:
        comparison.compare(attempt)
    assert (caught.value.status, caught.value.code) == (Status.CONFLICT, "sealed")
    assert snapshot(attempt) == before


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def _swap(attempt: Attempt) -> None:
    rollout, training = (score_path(attempt, side) for side in ("rollout", "training"))
    content = training.read_bytes()
    training.write_bytes(rollout.read_bytes())
    rollout.write_bytes(content)


def _symlink(attempt: Attempt) -> None:
    path = score_path(attempt, "rollout")
    elsewhere = attempt.path.parent / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


@pytest.mark.parametrize(
    ("spoil", "status", "code"),
    [
        (lambda a: score_path(a, "training").unlink(), 66, "missing"),
        (lambda a: a.file("readback_rollout.json").unlink(), 66, "missing"),
        (lambda a: a.file("identity.json").unlink(), 66, "missing"),
        (lambda a: _truncate(score_path(a, "training")), 65, "bad-safetensors"),
        (lambda a: score_path(a, "training").write_bytes(b""), 65, "bad-safetensors"),
        (lambda a: score_path(a, "training").write_bytes(b"\xff" * 64), 65, "bad-safetensors"),
        (lambda a: rewrite_score(a, "rollout", logprobs=None), 65, "missing-tensor"),
        (lambda a: rewrite_score(a, "rollout", active_mask=None), 65, "missing-tensor"),
        (lambda a: rewrite_score(a, "rollout", cu_seqlens=None), 65, "missing-tensor"),
        (lambda a: rewrite_score(a, "rollout", metadata={"case_id": "c-" + "1" * 16}), 65, "foreign-file"),
        (lambda a: rewrite_score(a, "rollout", metadata={"execution_key": "1" * 64}), 65, "foreign-file"),
        (lambda a: rewrite_score(a, "rollout", metadata={"repeat": 1}), 65, "foreign-file"),
        (_swap, 65, "foreign-file"),
        (_symlink, 65, "symlink"),
        (lambda a: rewrite_json(a, "readback_training.json", execution_key="1" * 64), 65, "foreign-file"),
        (lambda a: rewrite_json(a, "readback_training.json", case_id="c-" + "1" * 16), 65, "foreign-file"),
        (lambda a: rewrite_json(a, "requested.json", repeat=1), 65, "forged-row"),
        (lambda a: a.file("identity.json").write_bytes(b'{"a": 1, "a": 2}'), 65, "duplicate-key"),
        (lambda a: a.file("materialized.json").write_bytes(b"{"), 65, "not-json"),
    ],
)  # fmt: skip
def test_what_is_missing_damaged_or_foreign_is_an_error_and_writes_nothing(tmp_path: Path, spoil, status, code) -> None:
    attempt = scored(tmp_path, floats(-1, -2), floats(-1, -2))
    spoil(attempt)
    before = snapshot(attempt)
    with pytest.raises(XdError) as caught:
        comparison.compare(attempt)
    assert (caught.value.status, caught.value.code) == (status, code)
    assert snapshot(attempt) == before


def test_a_mask_of_bytes_that_are_no_booleans_is_damaged(tmp_path: Path) -> None:
    attempt = scored(tmp_path, floats(-1, -2), floats(-1, -2))
    data = bytearray(score_path(attempt, "rollout").read_bytes())
    data[-1] = 2
    score_path(attempt, "rollout").write_bytes(data)
    with pytest.raises(XdError) as caught:
        comparison.compare(attempt)
    assert caught.value.status == Status.INVALID


def test_the_status_is_in_the_file_as_returned(tmp_path: Path) -> None:
    attempt = scored(tmp_path, floats(-1), floats(-1))
    found = comparison.compare(attempt)
    assert json.loads(attempt.file("comparison.json").read_bytes()) == found
    assert attempt.file("comparison.json").read_bytes() == canon.dumps(found) + b"\n"
