"""What a change did to one side, and the noise floor it is held against."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import numpy as np
import pytest
from comparison_fixtures import floats, rewrite_score, scored
from materialize_fixtures import SYNTHETIC, environments, policy, row

from libxd import canon, effect, materialize, schema, scores
from libxd.effect import SideEffect
from libxd.errors import Status, XdError


def seen(mean: float | None, largest: float | None, equal: float | None = 0.5) -> SideEffect:
    return SideEffect(4, equal, mean, mean, largest, largest)


def test_each_side_is_set_beside_the_same_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scores, "BLOCK", 3)
    active = np.array([False, True, True, True, True])
    base = scored(tmp_path, floats(0, -1, -2, -3, -4), floats(0, -1, -1, -1, -1), active=active)
    other = scored(
        tmp_path, floats(9, -1, -2.5, -2, -4), floats(9, -1, -1, -1, -1), active=active, change=("batch.size", 1)
    )
    found = schema.validate("effect", effect.effect(other, base), "effect")
    assert found["rollout"] == {
        "count": 4, "bitwise_equal_share": 0.5, "mean_signed": 0.125, "mean_absolute": 0.375,
        "p99_absolute": 1.0, "max_absolute": 1.0,
    }  # fmt: skip
    assert found["training"] == {
        "count": 4, "bitwise_equal_share": 1.0, "mean_signed": 0.0, "mean_absolute": 0.0, "p99_absolute": 0.0,
        "max_absolute": 0.0,
    }  # fmt: skip
    assert effect.effect(base, other)["rollout"]["mean_signed"] == -0.125


def test_other_tokens_cannot_be_set_side_by_side(tmp_path: Path) -> None:
    base = scored(tmp_path, floats(-1, -2), floats(-1, -2))
    for other in (
        scored(tmp_path, floats(-1, -2, -3), floats(-1, -2, -3)),
        scored(tmp_path, floats(-1, -2), floats(-1, -2), active=np.array([True, False])),
        scored(tmp_path, floats(-1, -2), floats(-1, -2), lengths=(1, 1)),
    ):
        with pytest.raises(XdError, match="other tokens") as caught:
            effect.effect(other, base)
        assert caught.value.status == Status.INVALID


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("checkpoint", {"synthetic": SYNTHETIC | {"seed": 8}, "digest": canon.digest(SYNTHETIC | {"seed": 8})}),
        ("semantics", {"temperature": 0.5}),
        ("tokenizer", {"id": "other"}),
    ],
)
def test_another_identity_cannot_be_set_side_by_side(tmp_path: Path, part: str, value: dict) -> None:
    base = scored(tmp_path, floats(-1, -2), floats(-1, -2))
    other = scored(tmp_path, floats(-1, -2), floats(-1, -2), pinned={part: value})
    with pytest.raises(XdError, match="other identity") as caught:
        effect.effect(other, base)
    assert caught.value.path == f"/identity.json/{part}"


def test_other_conditions_are_said(tmp_path: Path) -> None:
    base = scored(tmp_path, floats(-1, -2), floats(-1, -2))
    there = {"python": "3.13.0"}
    other = scored(tmp_path, floats(-1, -2), floats(-1, -2), rollout_environment=there, change=("batch.size", 1))
    found = schema.validate("effect", effect.effect(other, base), "effect")
    assert found["conditions"] == {"rollout": "another environment", "training": None}
    assert effect.effect(other, other)["conditions"] == {"rollout": None, "training": None}


def test_the_conditions_of_a_side() -> None:
    plan = materialize.materialized(row(), policy(), environments())

    def changed(*names: str, to: object) -> dict:
        value = copy.deepcopy(plan)
        place = value
        for name in names[:-1]:
            place = place[name]
        place[names[-1]] = to
        return value

    rollout = ("sides", "rollout")
    for where, said in [
        (("strict",), "another strict"),
        ((*rollout, "runtime"), "another runtime"),
        ((*rollout, "scorer"), "another scorer"),
        ((*rollout, "environment"), "another environment"),
        ((*rollout, "operator", "build"), "another operator's build"),
    ]:
        assert effect.difference_of_conditions(changed(*where, to="other"), plan, "rollout") == said
    for where in [(*rollout, "operator", "backend"), (*rollout, "knobs"), ("sides", "training", "environment")]:
        assert effect.difference_of_conditions(changed(*where, to="other"), plan, "rollout") is None


def test_a_score_file_of_another_form_is_an_error(tmp_path: Path) -> None:
    base, other = (scored(tmp_path, floats(-1, -2), floats(-1, -2)) for _ in range(2))
    rewrite_score(other, "rollout", logprobs=np.zeros(2))
    with pytest.raises(XdError, match="float64"):
        effect.side_effect(other, base, "rollout")
    assert effect.side_effect(other, base, "training").bitwise_equal_share == 1.0


def test_undefined_is_none(tmp_path: Path) -> None:
    idle = np.zeros(2, bool)
    nothing = [scored(tmp_path, floats(-1, -2), floats(-1, -2), active=idle) for _ in range(2)]
    found = effect.side_effect(*nothing, "rollout")
    assert vars(found) == {
        "count": 0, "bitwise_equal_share": None, "mean_signed": None, "mean_absolute": None, "p99_absolute": None,
        "max_absolute": None,
    }  # fmt: skip
    broken = [scored(tmp_path, floats(-1, math.nan), floats(-1, -2)) for _ in range(2)]
    found = effect.side_effect(*broken, "rollout")
    assert (found.count, found.bitwise_equal_share, found.mean_absolute) == (2, 1.0, None)


def test_the_floor_is_the_largest_of_the_repeats() -> None:
    assert effect.floor([]) is None
    assert effect.floor([seen(None, None)]) is None
    assert effect.floor([seen(0.1, 5.0), seen(0.2, 1.0), seen(None, None)]) == (0.2, 5.0)


@pytest.mark.parametrize(
    ("measured", "noise", "standing"),
    [
        (seen(0.0, 0.0, 1.0), (0.0, 0.0), "0"),
        (seen(0.0, 0.0, 1.0), None, "0"),
        (seen(0.0, 0.0, 0.5), (0.0, 0.0), "within"),  # -0.0 beside 0.0: bits moved, the difference is none
        (seen(0.1, 1.0), (0.1, 1.0), "within"),
        (seen(0.1, 1.1), (0.1, 1.0), "above"),
        (seen(0.11, 1.0), (0.1, 1.0), "above"),
        (seen(1e-9, 1e-9), (0.0, 0.0), "above"),
        (seen(0.1, 1.0), None, "?"),
        (seen(None, None), (0.0, 0.0), "?"),
    ],
)
def test_standing(measured: SideEffect, noise: tuple[float, float] | None, standing: str) -> None:
    assert effect.standing(measured, noise) == standing
