"""The precision ladder on the real model, few short sequences: a right pair, and pairs of which one side is wrong."""

from __future__ import annotations

import importlib.util
import json

import pytest
from conftest import ROOT, Tools

pytest.importorskip("torch")
pytestmark = pytest.mark.xdist_group("real-ladder")

MODEL = ROOT / "models" / "smollm2-135m-instruct"


def _climb():
    """dev/climb.py, which makes docs/ladder.md's table."""
    spec = importlib.util.spec_from_file_location("climb", ROOT / "dev" / "climb.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


climb = _climb()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """With sequences.safetensors: three prompts, a few tokens each."""
    assert (MODEL / "model.safetensors").exists(), "run `make model`"
    found = tmp_path_factory.mktemp("ladder")
    ran = Tools(found)("xd-rollout", "-q", ROOT / "experiments" / "prompts" / "short.jsonl", "--model", MODEL,
                       "--limit", 3, "--max-new-tokens", 8, "--seed", 3, "--out", "sequences.safetensors")  # fmt: skip
    assert ran.status == 0, ran.err
    return found


@pytest.fixture(scope="module")
def right(place):
    return climb.climbed("decode", place / "sequences.safetensors", place / "decode")


def test_a_right_pair_is_rounding(right):
    assert right["answer"] == "rounding"
    assert [rung["status"] in ("PASS", "MISMATCH") for rung in right["rungs"]] == [True] * 3
    assert 0.6 < right["slope"]["value"] < 1.1


@pytest.mark.parametrize("mistake", ["weight", "temperature"])
def test_a_mistake_that_no_read_back_shows_is_a_bug(place, right, mistake):
    found = climb.climbed(mistake, place / "sequences.safetensors", place / mistake)
    assert {rung["status"] for rung in found["rungs"]} <= {"PASS", "MISMATCH"}  # identity and read-back saw nothing
    assert found["answer"] == "bug"
    assert found["slope"]["high"] < right["slope"]["low"]


def test_float16_scores_are_right_and_nearer_to_float32_than_bfloat16_ones(place, right):
    """By the ratio of their roundoffs, 8, on both sides."""
    attempts = [rung["attempt"] for rung in right["rungs"]]
    ran = Tools(place)("xd-ladder", "--json", "--reference", attempts[-1], *attempts)
    assert ran.status == 0, ran.err
    coarse, half, _ = json.loads(ran.out)["rungs"]
    assert (coarse["dtypes"]["training"], half["dtypes"]["training"]) == ("bfloat16", "float16")
    for side in ("rollout", "training"):
        assert 4 < coarse["reference"][side]["mean_absolute"] / half["reference"][side]["mean_absolute"] < 16
