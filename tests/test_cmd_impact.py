"""xd-impact over attempts and files, and its page."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import numpy as np
import pytest
from comparison_fixtures import floats, refused, rewrite_json, rewrite_score, score_path, scored
from impact_fixtures import ACTIVE, BY_SEQUENCE, LENGTHS, drawn, pair_of, write

from libxd import comparison, seal
from libxd.cmd.impact import cli
from libxd.functional.corrections import CORRECTIONS
from libxd.functional.estimators import ESTIMATORS
from libxd.functional.objectives import OBJECTIVES
from libxd.rundir import SIDES

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def pair(tmp_path):
    return pair_of(tmp_path)


def test_the_tool_over_attempts_and_files(xd, tmp_path, pair):
    one, two = str(pair.attempt), str(scored(tmp_path, *drawn(seed=3), active=ACTIVE, lengths=LENGTHS))
    files = [str(score_path(pair.attempt, side)) for side in SIDES]
    ran = xd("xd-impact", "--json", stdin=f"{one}\n{two}\n")
    assert (ran.status, ran.err) == (0, "")
    lines = [json.loads(line) for line in ran.out.splitlines()]
    assert [line["attempt"] for line in lines] == [one, two] and lines[0]["kl"] != lines[1]["kl"]
    ran = xd("xd-impact", "--json", *files[::-1])
    assert (ran.status, ran.err) == (0, "")
    assert json.loads(ran.out) == {**lines[0], "attempt": None}
    path = write(tmp_path / "a.jsonl", *(json.dumps({"advantage": value}) for value in BY_SEQUENCE))
    ran = xd("xd-impact", "--advantages", path, "--epsilon", "ppo=0.5", "--threshold", "token_truncate=5", one, two)
    assert (ran.status, ran.err) == (0, "")
    assert ran.out.count("importance") == 0 and ran.out.count("training / rollout - 1") == 2
    assert ran.out.count("0.5 .. 1.5") == 2 and ran.out.count("up to 5") == 4


ONE_LINE = [
    # options, status, what stands on stderr
    ("--advantages {bad}", 65, "neither sequences nor tokens"),
    ("--advantages gone.csv", 66, "gone.csv: no such file"),
    ("--rewards {good} --group uid", 65, "has no uid"),
    ("--rewards {good} --estimator gae", 2, "gae needs --values"),
    ("--rewards {good} --values {good}", 2, "--estimator gae"),
    ("--rewards {good} --discount 1 1", 2, "--estimator gae"),
    ("--rewards {good} --values {good} --estimator gae", 65, "holds no value"),
    ("--rewards {good} --group uid --estimator reinforce_plus_plus", 2, "compares no groups"),
    ("--rewards {good}", 2, "nothing says the groups"),
    ("--rewards {good} --advantages {good}", 2, "exclude one another"),
    ("--group uid", 2, "--group is about rewards"),
    ("--overlong 3 1", 2, "--overlong is about rewards"),
    ("--estimator rloo", 2, "--estimator is about rewards"),
    ("--beta 0.1", 2, "belong together"),
    ("--beta nan --reference {score}", 2, "no finite number"),
    ("--epsilon a2c=1", 2, "no such name"),
    ("--threshold token_mask=2,1", 2, "thresholds"),
    ("--beta 0.1 --reference {other}", 65, "the reference scored other tokens"),
]


@pytest.mark.parametrize(("options", "status", "what"), ONE_LINE)
def test_what_is_wrong_is_one_line_and_no_figures(xd, tmp_path, pair, options, status, what):
    bad = write(tmp_path / "bad.csv", "advantage,reward", "1,1", "2,2")
    good = write(tmp_path / "good.csv", "reward,advantage", *(f"{i},{i}" for i in range(5)))
    other = score_path(scored(tmp_path / "other", floats(-1, -2), floats(-1, -2)), "rollout")
    rewrite_json(pair.attempt, "requested.json", locations=dict.fromkeys(("checkpoint", "tokenizer", "sequences")))
    score = score_path(pair.attempt, "rollout")
    told = shlex.split(options.format(bad=bad, good=good, other=other, score=score))
    ran = xd("xd-impact", *told, pair.attempt)
    assert (ran.status, ran.out) == (status, "")
    assert what in ran.err and ran.err.count("\n") == 1


def test_a_bad_attempt_does_not_stop_the_next_one(xd, tmp_path, pair):
    gone = tmp_path / "c-0123456789abcdef" / "a0001"
    no = refused(tmp_path / "refused", ("batch.size", 1), "no room")
    ran = xd("xd-impact", "--json", no, gone, pair.attempt)
    assert (ran.status, ran.out.count("\n"), ran.err.count("\n")) == (66, 1, 2)
    ran = xd("xd-impact", *(score_path(pair.attempt, side) for side in ("rollout", "rollout")))
    assert (ran.status, ran.out) == (65, "") and "both of one side" in ran.err
    ran = xd("xd-impact", score_path(pair.attempt, "rollout"))
    assert ran.status == 2 and "two score files make a pair" in ran.err


def test_a_tampered_attempt_is_passed_over(xd, pair, tmp_path):
    whole = scored(tmp_path / "whole", *drawn(), active=ACTIVE, lengths=LENGTHS)
    for attempt in (pair.attempt, whole):
        comparison.compare(attempt)
        assert seal.seal(attempt)
    rewrite_score(pair.attempt, "training", logprobs=pair.training.logprobs + np.float32(1e-3))
    ran = xd("xd-impact", "--json", pair.attempt, whole)
    assert (ran.status, ran.out.count("\n"), ran.err.count("\n")) == (65, 1, 1)
    assert "sealed, but score_training.safetensors: changed" in ran.err
    pair.attempt.file("COMPLETE").unlink()
    assert xd("xd-impact", "--json", pair.attempt).status == 0


def test_the_tool_needs_no_torch(xd, tmp_path, pair):
    shadow = tmp_path / "shadow"
    shadow.mkdir()
    for name in ("torch", "transformers", "xdkernels"):
        write(shadow / f"{name}.py", "raise ImportError('not here')")
    ran = xd("xd-impact", pair.attempt, env={"PYTHONPATH": str(shadow)})
    assert (ran.status, ran.err) == (0, "")


# -- the page


def test_the_commands_of_the_page_print_what_stands_there():
    """docs/impact.md: each block of commands, run beside the example's files, and the block of text below it."""
    page = (ROOT / "docs" / "impact.md").read_text()
    blocks = re.findall(r"^```sh\n(.*?)^```\n\n```text\n(.*?)^```$", page, re.M | re.S)
    assert len(blocks) == page.count("```sh") == 3
    env = {**os.environ, "PATH": f"{ROOT / 'tools'}:{os.environ['PATH']}", "XD_PYTHON": sys.executable}
    for command, wanted in blocks:
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, env=env,
            cwd=ROOT / "examples" / "impact",
        )  # fmt: skip
        assert (done.returncode, done.stderr, done.stdout) == (0, "", wanted)


def test_the_page_names_every_default():
    """Thresholds and epsilons, as the code has them, in docs/impact.md and in the options' help."""
    page = (ROOT / "docs" / "impact.md").read_text()
    told = " ".join(option.help or "" for option in cli.params if isinstance(option, click.Option))
    for correction in CORRECTIONS:
        bounds = ", ".join(f"{each:g}" for each in (correction.low, correction.high) if each is not None)
        assert re.search(rf"^\| `{correction.name}` \|[^|]*\|[^|]*\| {bounds} \|", page, re.M), correction.name
        assert f"{correction.name} {bounds.replace(', ', ',')}" in told
    for objective in OBJECTIVES:
        low, high = objective.bounds
        within = f"up to {high:g}" if objective.eps_low is None else f"{low:g} .. {high:g}"
        assert re.search(rf"^\| `{objective.name}` \|[^|]*\| {within} \|", page, re.M), objective.name
    estimators = next(option for option in cli.params if option.name == "estimator").type.choices
    assert tuple(estimators) == ESTIMATORS
    assert all(f"| `{name}` |" in page for name in ESTIMATORS)
