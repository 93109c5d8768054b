"""Statements over sealed attempts: what they hold, what is not stated, and that they can be signed and checked."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from comparison_fixtures import arrays_of, floats, request, rewrite_json, scored, scored_row
from conftest import ROOT
from materialize_fixtures import signed

from libxd import canon, comparison, seal, statement
from libxd.errors import Status, XdError
from libxd.rundir import PAYLOADS, SEAL, Attempt


def sealed(root: Path, rollout: float = -2.0, **facts) -> Attempt:
    attempt = scored(root, floats(-1, rollout), floats(-1, -2), **facts)
    comparison.compare(attempt)
    seal.seal(attempt)
    return attempt


def stated(*attempts: Attempt) -> bytes:
    return statement.dumps([statement.read(attempt) for attempt in attempts])


def test_it_names_every_file_by_both_digests(tmp_path):
    attempt = sealed(tmp_path)
    value = json.loads(stated(attempt))
    found = {subject["name"]: subject["digest"] for subject in value["subject"]}
    assert len(found) == len(value["subject"]) == len(PAYLOADS) + 1
    for name in (*PAYLOADS, SEAL):
        data = attempt.file(name).read_bytes()
        digests = found[f"test/cases/{attempt.case_id}/{attempt.attempt_id}/{name}"]
        assert digests == {"blake3": canon.digest_bytes(data), "sha256": hashlib.sha256(data).hexdigest()}


def test_it_says_what_the_attempt_proves(tmp_path):
    attempt = sealed(tmp_path, -2.5, change=("rollout.dtype", "float16"))
    value = json.loads(stated(attempt))
    assert (value["_type"], value["predicateType"]) == (statement.TYPE, statement.PREDICATE_TYPE)
    (entry,) = value["predicate"]["attempts"]
    judged, requested = attempt.comparison(), attempt.requested()
    assert entry["status"] == judged["status"] == "MISMATCH"
    for name in ("counts", "threshold", "threshold_bits", "contract", "execution_key"):
        assert entry[name] == judged[name], name
    for name in ("experiment_id", "case_id", "case_digest", "repeat", "intervention"):
        assert entry[name] == requested[name], name
    assert entry["identity"]["sequences"] == attempt.identity()["sequences"]["digest"]
    assert entry["scenario"] == {"id": "test", "level": "S0", "device": "cpu"}
    assert entry["claim"].startswith("S0 on cpu shows plumbing only")
    assert entry["runtimes"] == {"rollout": "test", "training": "test"}


def test_the_same_attempts_give_the_same_bytes(tmp_path):
    one, other = sealed(tmp_path), sealed(tmp_path, -2.5)
    data = stated(one, other)
    assert data == stated(other, one)
    assert data == canon.dumps(json.loads(data)) + b"\n"
    shutil.move(tmp_path / "test", tmp_path / "moved" / "test")
    assert data == stated(*(Attempt(tmp_path / "moved" / each.path.relative_to(tmp_path)) for each in (one, other)))
    assert data != stated(Attempt(tmp_path / "moved" / one.path.relative_to(tmp_path))), "the control"


@pytest.mark.parametrize(
    ("touch", "status", "what"),
    [
        (lambda a: a.file(SEAL).unlink(), Status.MISSING, "is not sealed"),
        (lambda a: a.file("comparison.json").write_bytes(a.file("comparison.json").read_bytes() + b" "),
         Status.INVALID, "comparison.json: changed"),
        (lambda a: a.file("more").touch(), Status.INVALID, "more: added"),
        (lambda a: a.file("actual.json").unlink(), Status.INVALID, "actual.json: missing"),
        (lambda a: rewrite_json(a, SEAL, repeat=3), Status.INVALID, "repeat is not the attempt's"),
    ],
)  # fmt: skip
def test_what_is_not_sealed_or_was_touched_is_not_stated(tmp_path, touch, status, what):
    attempt = sealed(tmp_path)
    touch(attempt)
    with pytest.raises(XdError, match=re.escape(what)) as caught:
        statement.read(attempt)
    assert caught.value.status == status


def test_a_seal_over_a_verdict_that_does_not_follow_is_not_stated(tmp_path):
    """Somebody forged the seal, and left the rest as it does not fit."""
    attempt = sealed(tmp_path, -2.5)
    rewrite_json(attempt, "comparison.json", status="PASS")
    files = attempt.read(SEAL)["files"]
    data = attempt.file("comparison.json").read_bytes()
    files["comparison.json"] = {"blake3": canon.digest_bytes(data), "bytes": len(data)}
    rewrite_json(attempt, SEAL, files=files)
    assert seal.verify(attempt) == []
    with pytest.raises(XdError, match="not what the files of the attempt give"):
        statement.read(attempt)


def test_one_name_for_two_attempts_is_refused(tmp_path):
    one = statement.read(sealed(tmp_path / "here"))
    other = statement.read(sealed(tmp_path / "there", -2.5))
    with pytest.raises(XdError, match="twice"):
        statement.dumps([one, other])
    with pytest.raises(XdError, match="one at least"):
        statement.dumps([])


# -- the walk of docs/trust.md


def experiment(place: Path) -> list[Attempt]:
    """Two sealed attempts and one left off of an experiment s0 under `place`/runs."""
    attempts = []
    for change, rollout in ((None, -2), (("batch.size", 1), -2.5), (("rollout.dtype", "float16"), -2)):
        arrays = arrays_of(2)
        row = request(arrays, change, 0, "ws1", "float32", True)
        row = signed({**row, "experiment_id": "s0"})
        attempts.append(scored_row(place / "runs", row, arrays, floats(-1, rollout), floats(-1, -2)))
    for attempt in attempts[:2]:
        comparison.compare(attempt)
        seal.seal(attempt)
    return attempts


def walk() -> list[str]:
    """The blocks of the page: sign, check with xd, check without."""
    page = (ROOT / "docs" / "trust.md").read_text()
    return re.findall(r"^```sh\n(.*?)^```$", page[page.index("## Signing") :], re.M | re.S)


def shell(place: Path, script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-s"], input=script, cwd=place, capture_output=True, text=True,
        env={**os.environ, "PATH": f"{ROOT / 'tools'}:{os.environ['PATH']}", "XD_PYTHON": sys.executable},
    )  # fmt: skip


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="no ssh-keygen here")
def test_the_page_signs_and_checks(tmp_path):
    sign, check, check_without_xd = walk()
    attempts = experiment(tmp_path)
    ran = shell(tmp_path, sign)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[0] == "s0.statement.json"
    verified = shell(tmp_path, check)
    assert verified.returncode == 0, verified.stderr
    assert 'Good "xd-statement" signature for alice@lab.example' in verified.stdout
    assert shell(tmp_path, check_without_xd).returncode == 0

    data = (tmp_path / "s0.statement.json").read_bytes()
    (tmp_path / "s0.statement.json").write_bytes(data.replace(b'"MISMATCH"', b'"PASS"'))
    other = shell(tmp_path, check)
    assert other.returncode != 0
    assert "Could not verify signature" in other.stdout + other.stderr
    (tmp_path / "s0.statement.json").write_bytes(data)
    assert shell(tmp_path, check).returncode == 0

    scores = attempts[0].file("score_rollout.safetensors")
    whole = scores.read_bytes()
    scores.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert shell(tmp_path, check).returncode != 0
    assert shell(tmp_path, check_without_xd).returncode != 0
    scores.write_bytes(whole)
    assert shell(tmp_path, check).returncode == 0

    assert shell(tmp_path, "ssh-keygen -q -t ed25519 -N '' -C mallory -f mallory\n"
                 "ssh-keygen -q -Y sign -f mallory -n xd-statement - < s0.statement.json > s0.statement.json.sig\n"
                 ).returncode == 0  # fmt: skip
    assert shell(tmp_path, check).returncode != 0, "another's key"
