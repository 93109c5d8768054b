"""A comparison that is read again: what decides must follow from the files beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from comparison_fixtures import floats, rewrite_json, rewrite_score, scored
from materialize_fixtures import environments, policy

from libxd import canon, comparison, materialize, resume, seal, table, tensors, verdict
from libxd.errors import Status, XdError
from libxd.records import Case
from libxd.rundir import Attempt, RunDirectory


def drifting(root: Path) -> Attempt:
    """Judged: a mismatch, and a violation of identity that is said and true."""
    attempt = scored(root, floats(-1, -2, -3), floats(-1, -2.5, -3), lengths=(2, 1))
    rewrite_score(attempt, "training", metadata={"mode": "decode"})
    comparison.compare(attempt)
    return attempt


def without_the_violation(attempt: Attempt) -> None:
    rewrite_json(attempt, "comparison.json", violations=[], status="MISMATCH")


def without_the_mismatch(attempt: Attempt) -> None:
    counts = attempt.comparison()["counts"] | {"mismatches": 0}
    rewrite_json(attempt, "comparison.json", counts=counts, mismatch_ratio=0.0)


def another_mask(attempt: Attempt) -> None:
    """All that says how many mismatches there are; but the mask is not the file's that was written."""
    without_the_mismatch(attempt)
    path = attempt.file("token_diffs.safetensors")
    with tensors.TensorFile(path) as file:
        arrays, metadata = {name: np.array(file.array(name)) for name in file.names}, file.metadata
    path.unlink()
    arrays["mismatch_mask"][:] = False
    tensors.write(path, arrays, metadata)


def another_history(attempt: Attempt) -> None:
    """actual.json and its digest: no engine showed this."""
    followed = attempt.read("actual.json")
    followed["knobs"][0]["actual"] = 99
    rewrite_json(attempt, "actual.json", **followed)
    rewrite_json(attempt, "comparison.json", actual=canon.digest(followed))


EDITS = {
    without_the_violation: "comparison.json#/violations",
    without_the_mismatch: "comparison.json#/counts/mismatches",
    another_history: "actual.json",
    "status": ("PASS", "comparison.json#/status"),
    "threshold": (0.5, "comparison.json#/threshold"),
    "threshold_bits": ("3f000000", "comparison.json#/threshold_bits"),
    "contract": ({"source": "ws1", "version": "1", "digest": "0" * 64, "dtype": "bfloat16"},
                 "comparison.json#/contract"),
    "mismatch_ratio": (0.125, "comparison.json#/mismatch_ratio"),
    "bitwise_equal_share": (1.0, "comparison.json#/bitwise_equal_share"),
}  # fmt: skip


def edited(root: Path, edit: Any) -> tuple[Attempt, str]:
    attempt = drifting(root)
    if callable(edit):
        edit(attempt)
        return attempt, EDITS[edit]
    rewrite_json(attempt, "comparison.json", **{edit: EDITS[edit][0]})
    return attempt, EDITS[edit][1]


def test_a_comparison_is_read_as_it_was_made(tmp_path: Path) -> None:
    attempt = drifting(tmp_path)
    found = verdict.read(attempt, Case.read(attempt))
    assert found == attempt.comparison()
    assert found["status"] == "INVALID_IDENTITY" and found["counts"]["mismatches"] == 1
    assert seal.seal(attempt)


@pytest.mark.parametrize("change", ["dtype", "shape", "ids", "not-finite"])
def test_so_is_one_without_numbers_or_with_wrong_tensors(tmp_path: Path, change: str) -> None:
    changed = {
        "dtype": {"logprobs": np.zeros(2, np.float64)},
        "shape": {"logprobs": np.zeros(3, np.float32)},
        "ids": {"token_ids": np.array([5, 6], np.int32)},
        "not-finite": {"logprobs": floats(-1, np.nan)},
    }[change]
    attempt = scored(tmp_path, floats(-1, -2), floats(-1, -2))
    rewrite_score(attempt, "training", **changed)
    made = comparison.compare(attempt)
    assert made["status"].startswith("INVALID")
    assert verdict.read(attempt, Case.read(attempt)) == made


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: getattr(edit, "__name__", edit))
def test_an_edited_comparison_is_neither_sealed_nor_printed_nor_an_answer(tmp_path: Path, edit: Any) -> None:
    attempt, place = edited(tmp_path, edit)
    for work in (seal.seal, table.read):
        with pytest.raises(XdError) as caught:
            work(attempt)
        assert caught.value.status == Status.INVALID
        assert place in caught.value.line() or caught.value.code == "seal-inconsistent"
    assert not attempt.sealed
    row = attempt.requested()
    files = {name: seal._facts(attempt, name) for name in seal.PAYLOADS}
    attempt.write_json("COMPLETE", {
        "schema_version": "xd.seal.v1", "experiment_id": "test", "case_id": attempt.case_id, "repeat": 0,
        "execution_key": attempt.materialized()["execution_key"], "files": files,
    })  # fmt: skip
    found = resume.outcome(row, RunDirectory(tmp_path, "test"), materialize.materialized(row, policy(), environments()))
    assert found.state == "pending"
    assert place in found.passed_over[0][1]


def test_a_mask_that_was_edited_with_the_counts_is_not_the_one_that_was_written(tmp_path: Path) -> None:
    attempt = drifting(tmp_path)
    another_mask(attempt)
    with pytest.raises(XdError, match="token_diffs"):
        seal.seal(attempt)


@pytest.mark.parametrize("name", ["cu_seqlens", "sequence_active", "sequence_mismatches"])
@pytest.mark.parametrize("spoil", [lambda array: array.astype(np.int32)[:1], lambda array: array[:0]])
def test_counts_of_another_form_are_65_and_no_bug(tmp_path: Path, name: str, spoil: Any) -> None:
    attempt = drifting(tmp_path)
    path = attempt.file("token_diffs.safetensors")
    with tensors.TensorFile(path) as file:
        arrays, metadata = {each: np.array(file.array(each)) for each in file.names}, file.metadata
    path.unlink()
    tensors.write(path, {**arrays, name: spoil(arrays[name])}, metadata)
    with pytest.raises(XdError) as caught:
        verdict.read(attempt, Case.read(attempt))
    assert caught.value.status == Status.INVALID
