"""xd-seal as its users meet it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from comparison_fixtures import floats, refused, rewrite_json, scored

from libxd import comparison
from libxd.rundir import Attempt


def compared(root: Path) -> Attempt:
    attempt = scored(root, floats(-1, -2), floats(-1, -2))
    comparison.compare(attempt)
    return attempt


def test_paths_in_paths_out(xd, tmp_path: Path) -> None:
    first, second = compared(tmp_path), compared(tmp_path)
    ran = xd("xd-seal", stdin=f"{first}\n{second}\n")
    assert (ran.status, ran.out, ran.err) == (0, f"{first}\n{second}\n", "")
    assert first.sealed
    assert second.sealed
    assert xd("xd-seal", first, second).out == ran.out


def test_verify_answers(xd, tmp_path: Path) -> None:
    whole, open_, touched = compared(tmp_path), compared(tmp_path), compared(tmp_path)
    assert xd("xd-seal", whole, touched).status == 0
    rewrite_json(touched, "comparison.json", status="MISMATCH")
    touched.file("more").write_text("")
    assert xd("xd-seal", "--verify", whole).status == 0
    ran = xd("xd-seal", "--verify", whole, touched, open_)
    assert (ran.status, ran.out) == (1, f"{whole}\n")
    assert f"{touched}: comparison.json: changed" in ran.err
    assert f"{touched}: more: added" in ran.err
    assert f"{open_}: COMPLETE: missing" in ran.err
    assert not open_.sealed, "--verify writes nothing"
    assert xd("xd-seal", "--verify", tmp_path / "test" / "cases" / whole.case_id / "a0099").status == 66


def test_an_incomplete_attempt_is_66_and_a_refused_one_69(xd, tmp_path: Path) -> None:
    incomplete = scored(tmp_path, floats(-1), floats(-1))
    ran = xd("xd-seal", incomplete, compared(tmp_path))
    assert ran.status == 66
    assert len(ran.out.splitlines()) == 1
    assert xd("xd-seal", refused(tmp_path, ("rollout.dtype", "float16"), "no")).status == 69


def test_a_tampered_attempt_is_73(xd, tmp_path: Path) -> None:
    attempt = compared(tmp_path)
    xd("xd-seal", attempt)
    rewrite_json(attempt, "readback_rollout.json", engine={"changed": True})
    ran = xd("xd-seal", attempt)
    assert (ran.status, ran.out) == (73, "")
    assert "xd-seal --verify" in ran.err


def test_a_statement_goes_to_stdout_or_into_a_file(xd, tmp_path: Path) -> None:
    first, second = compared(tmp_path), compared(tmp_path)
    xd("xd-seal", first, second)
    ran = xd("xd-seal", "--statement", first, second)
    assert (ran.status, ran.err) == (0, "")
    assert [entry["name"][-5:] for entry in json.loads(ran.out)["predicate"]["attempts"]] == ["a0001", "a0002"]
    out = tmp_path / "s.json"
    written = xd("xd-seal", "--statement", "--out", out, stdin=f"{second}\n{first}\n")
    assert (written.status, written.out) == (0, f"{out}\n")
    assert out.read_text() == ran.out
    assert xd("xd-seal", "--statement", "--out", out, second, first).status == 0, "the same again"
    other = xd("xd-seal", "--statement", "--out", out, second)
    assert (other.status, other.out, out.read_text()) == (73, "", ran.out)


def test_of_an_imported_attempt_nothing_is_stated_that_nobody_knows(xd, tmp_path: Path) -> None:
    (tmp_path / "both.csv").write_text("seq,id,active,rollout,training\n0,5,0,,\n0,6,1,-1.0,-1.25\n")
    mapped = [word for target, column in (("sequence", "seq"), ("token_id", "id"), ("active", "active"),
                                          ("rollout_logprob", "rollout"), ("training_logprob", "training"))
              for word in ("--map", f"{target}={column}")]  # fmt: skip
    made = xd("xd-import", "csv", "both.csv", "--side", "both", *mapped, "--runs", "runs", "--experiment", "mine",
              "--dtype", "bfloat16")  # fmt: skip
    assert made.status == 0, made.err
    for tool in ("xd-compare", "xd-seal"):
        assert xd(tool, stdin=made.out).out == made.out
    ran = xd("xd-seal", "--statement", stdin=made.out)
    assert ran.status == 0, ran.err
    (entry,) = json.loads(ran.out)["predicate"]["attempts"]
    assert (entry["scenario"], entry["strict"], entry["status"]) == (None, False, "INVALID_IDENTITY")
    assert entry["identity"]["checkpoint"] is None
    assert entry["claim"].startswith("Scored by others")


def test_no_statement_over_a_part(xd, tmp_path: Path) -> None:
    whole, touched, open_ = compared(tmp_path), compared(tmp_path), compared(tmp_path)
    xd("xd-seal", whole, touched)
    touched.file("more").write_text("")
    out = tmp_path / "s.json"
    for bad, status in ((touched, 65), (open_, 66)):
        ran = xd("xd-seal", "--statement", "--out", out, whole, bad)
        assert (ran.status, ran.out, out.exists()) == (status, "", False)
        assert f"{bad}: " in ran.err
        assert xd("xd-seal", "--statement", whole, bad).out == ""
    assert xd("xd-seal", "--statement", stdin="").status == 66
    assert xd("xd-seal", "--statement", "--verify", whole).status == 2
    assert xd("xd-seal", "--out", out, whole).status == 2


def test_sealing_and_verifying_load_no_numpy(tmp_path: Path) -> None:
    attempt = compared(tmp_path)
    code = (
        "import sys; from libxd import seal; from libxd.rundir import Attempt; a = Attempt(sys.argv[1]); "
        "seal.seal(a); assert seal.verify(a) == []; print('numpy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, attempt.path], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
