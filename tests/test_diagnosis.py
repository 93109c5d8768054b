"""The walk of docs/diagnosis.md: its commands, in order, print what stands there; and where its figures are from."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
from conftest import ROOT

#: each command goes on from the one before it, in one directory: one worker runs them all
pytestmark = pytest.mark.xdist_group("diagnosis")
PAGE = (ROOT / "docs" / "diagnosis.md").read_text()
BLOCKS = re.findall(r"^```sh\n(.*?)^```\n\n```text\n(.*?)^```$", PAGE, re.M | re.S)
MODEL = ROOT / "models" / "smollm2-135m-instruct" / "model.safetensors"
#: of a command that wants the real model, or what such a one has made
OF_MODEL = re.compile(r"models/|step0-fixed|(cat|<) fixed")
#: engines of the synthetic model: their last bits are the machine's
OF_ENGINES = re.compile(r"cpu-smoke|runs/knobs")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A directory like the checkout, whose runs/ is new."""
    made = tmp_path_factory.mktemp("diagnosis")
    for name in ("examples", "experiments", "models"):
        (made / name).symlink_to(ROOT / name)
    return made


def without_figures(text: str) -> str:
    """Without decimals, and the widths that go by them."""
    return re.sub(r"-{2,}| +", " ", re.sub(r"\b\d\.\d+(e-\d+)?\b", "#", text))


def test_every_command_is_one_that_is_run():
    assert len(BLOCKS) == PAGE.count("```sh") == PAGE.count("```text") == 10
    assert sum(bool(OF_MODEL.search(command)) for command, _ in BLOCKS) == 5


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_a_command_prints_what_stands_there(place, number):
    """Each goes on from those before it; stderr stands before stdout."""
    pytest.importorskip("torch")
    command, wanted = BLOCKS[number]
    if OF_MODEL.search(command) and not MODEL.exists():
        pytest.skip("no real model here: make model")
    env = {**os.environ, "PATH": f"{ROOT / 'tools'}:{os.environ['PATH']}", "XD_PYTHON": sys.executable}
    ran = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], cwd=place, env=env, capture_output=True, text=True
    )
    seen = ran.stderr + ran.stdout
    if OF_ENGINES.search(command):
        seen, wanted = without_figures(seen), without_figures(wanted)
        assert "#" in wanted and without_figures(wanted.replace("good", "bad").replace("PASS", "MISMATCH")) != seen
    assert (ran.returncode, seen) == (0, wanted)


def test_the_dumps_are_of_the_same_tokens_and_differ_by_what_was_made():
    """step0 and step0-fixed have one rollout side, bit for bit, and another training side."""
    step, fixed, finer = (
        [json.loads(line) for line in (ROOT / "examples" / "diagnosis" / f"{name}.jsonl").read_text().splitlines()]
        for name in ("step0", "step0-fixed", "step0-float32")
    )
    for name in ("prompt_ids", "completion_ids", "advantages"):
        assert [row[name] for row in step] == [row[name] for row in fixed] == [row[name] for row in finer]
    assert [row["sampling_per_token_logps"] for row in step] == [row["sampling_per_token_logps"] for row in fixed]
    assert [row["sampling_per_token_logps"] for row in step] != [row["sampling_per_token_logps"] for row in finer]
    assert all(a["old_per_token_logps"] != b["old_per_token_logps"] for a, b in zip(step, fixed, strict=True))


def test_the_figures_of_the_ten_knobs_are_those_of_the_bisection():
    """The table of repairs and breaks, row by row, beside the outcomes in docs/bisect.md."""
    bisected = (ROOT / "docs" / "bisect.md").read_text()
    shown = bisected[bisected.index("smollm2-bisect: 10 knobs differ") :]
    outcomes = dict(re.findall(r"^((?:[.x] +){10}) *(?:good|bad) +(\S+)", shown, re.M))
    means = {"".join(marks.split()): float(mean) for marks, mean in outcomes.items()}
    rows = dict(re.findall(r"^\| ([^|]*?) \| ([^|]* \| [^|]*?) \|$", PAGE[PAGE.index("| SmolLM2") :], re.M))
    said = {name: [float(cell) for cell in re.findall(r"\d\S*", cells)] for name, cells in rows.items()}
    assert said == {
        "nothing changed": [means["xxxxxxxxxx"], pytest.approx(means[".........."], abs=5e-8)],
        "`rollout.dtype` alone": [means["xxxxx.xxxx"], means[".....x...."]],
        "`training.compute_dtype` alone": [means["xxxxxxx.xx"], means[".......x.."]],
        "both dtypes": [means["xxxxx.x.xx"]],
        "the eight others": [means["xxxxx.x.xx"]],
    }
