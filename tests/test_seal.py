"""The seal: over whole attempts alone, and every way of touching one afterwards is seen."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
from comparison_fixtures import floats, refused, rewrite_json, rewrite_score, score_path, scored, snapshot

from libxd import canon, comparison, publish, seal
from libxd.errors import Status, XdError
from libxd.rundir import PAYLOADS, SEAL, Attempt


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    """A compared attempt."""
    made = scored(tmp_path, floats(-1, -2, -3), floats(-1, -2.5, -3))
    comparison.compare(made)
    return made


def kinds(attempt: Attempt) -> list[tuple[str, str]]:
    return [(problem.name, problem.kind) for problem in seal.verify(attempt)]


def test_the_seal_holds_every_file_and_nothing_else(attempt: Attempt) -> None:
    assert seal.seal(attempt) is True
    value = attempt.read(SEAL)
    assert set(value["files"]) == set(PAYLOADS)
    for name, facts in value["files"].items():
        data = attempt.file(name).read_bytes()
        assert facts == {"blake3": canon.digest_bytes(data), "bytes": len(data)}
    assert (value["experiment_id"], value["repeat"]) == ("test", 0)
    assert seal.verify(attempt) == []


def test_sealing_again_is_fine(attempt: Attempt) -> None:
    seal.seal(attempt)
    before = snapshot(attempt)
    assert seal.seal(attempt) is False
    assert snapshot(attempt) == before


def test_a_sealed_attempt_can_be_compared_again(attempt: Attempt) -> None:
    seal.seal(attempt)
    before = snapshot(attempt)
    comparison.compare(attempt)
    assert snapshot(attempt) == before


def test_an_attempt_can_be_moved(attempt: Attempt, tmp_path: Path) -> None:
    seal.seal(attempt)
    moved = tmp_path / "elsewhere" / attempt.case_id
    moved.mkdir(parents=True)
    attempt.path.rename(moved / "a0007")
    assert seal.verify(Attempt(moved / "a0007")) == []


@pytest.mark.parametrize("name", PAYLOADS)
def test_any_changed_byte_is_seen(attempt: Attempt, name: str) -> None:
    seal.seal(attempt)
    path = attempt.file(name)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert kinds(attempt) == [(name, "changed")]
    path.write_bytes(data + b"\n")
    assert kinds(attempt) == [(name, "changed")]
    path.unlink()
    assert kinds(attempt) == [(name, "missing")]


@pytest.mark.parametrize("name", [*PAYLOADS, SEAL])
def test_a_symlink_to_the_very_file_is_seen(attempt: Attempt, name: str, tmp_path: Path) -> None:
    seal.seal(attempt)
    path = attempt.file(name)
    path.rename(tmp_path / "kept")
    path.symlink_to(tmp_path / "kept")
    assert kinds(attempt) == [(name, "symlink")]


@pytest.mark.parametrize(
    ("add", "kind"),
    [
        (lambda path: path.write_text("more"), "added"),
        (lambda path: path.mkdir(), "added"),
        (lambda path: path.symlink_to("requested.json"), "symlink"),
    ],
)
def test_an_added_name_is_seen_and_never_sealed(attempt: Attempt, add, kind: str) -> None:
    add(attempt.file("notes.txt"))
    with pytest.raises(XdError, match=f"notes.txt: {kind}") as caught:
        seal.seal(attempt)
    assert caught.value.status == Status.INVALID
    assert not attempt.sealed
    attempt.file("notes.txt").rename(attempt.path.parent / "notes.txt")
    seal.seal(attempt)
    (attempt.path.parent / "notes.txt").rename(attempt.file("notes.txt"))
    assert kinds(attempt) == [("notes.txt", kind)]


def test_what_a_killed_writer_left_behind_is_no_part_of_an_attempt(attempt: Attempt) -> None:
    attempt.file(f"{publish.TEMPORARY_PREFIX}comparison.json-1-abcd").write_text("half")
    seal.seal(attempt)
    assert seal.verify(attempt) == []
    assert not any(name.startswith(publish.TEMPORARY_PREFIX) for name in attempt.read(SEAL)["files"])


@pytest.mark.parametrize("content", [b"", b"{}\n", b"{", b'{"a": 1, "a": 2}', b"\xff\n"])
def test_a_seal_that_cannot_be_read_is_malformed(attempt: Attempt, content: bytes) -> None:
    seal.seal(attempt)
    attempt.file(SEAL).write_bytes(content)
    assert kinds(attempt) == [(SEAL, "malformed")]


@pytest.mark.parametrize(
    "other",
    [
        lambda data: data + b" ",
        lambda data: data.rstrip(b"\n"),
        lambda data: data.replace(b"\n", b"\t"),
        lambda data: json.dumps(json.loads(data)).encode() + b"\n",
        lambda data: data.replace(b"blake3", rb"\u0062lake3", 1),
    ],
)
def test_a_seal_that_says_the_same_in_other_bytes_is_malformed(attempt: Attempt, other) -> None:
    seal.seal(attempt)
    data = attempt.file(SEAL).read_bytes()
    assert json.loads(other(data)) == json.loads(data)
    attempt.file(SEAL).write_bytes(other(data))
    assert kinds(attempt) == [(SEAL, "malformed")]
    attempt.file(SEAL).write_bytes(data)
    assert kinds(attempt) == []


@pytest.mark.parametrize("change", [{"repeat": 1}, {"execution_key": "0" * 64}, {"experiment_id": "other"}])
def test_a_seal_whose_own_fields_were_edited_is_seen(attempt: Attempt, change: dict) -> None:
    seal.seal(attempt)
    rewrite_json(attempt, SEAL, **change)
    assert kinds(attempt) == [(SEAL, "changed")]


def test_another_attempts_seal_is_malformed(attempt: Attempt, tmp_path: Path) -> None:
    seal.seal(attempt)
    rewrite_json(attempt, SEAL, case_id="c-" + "0" * 16)
    assert kinds(attempt) == [(SEAL, "malformed")]


def test_no_seal_is_said(attempt: Attempt) -> None:
    assert kinds(attempt) == [(SEAL, "missing")]


def test_a_tampered_attempt_is_not_sealed_over(attempt: Attempt) -> None:
    seal.seal(attempt)
    rewrite_json(attempt, "readback_rollout.json", engine={"threads": 4})
    sealed = attempt.file(SEAL).read_bytes()
    with pytest.raises(XdError, match="sealed over other content") as caught:
        seal.seal(attempt)
    assert caught.value.status == Status.CONFLICT
    assert attempt.file(SEAL).read_bytes() == sealed


@pytest.mark.parametrize("name", [name for name in PAYLOADS if name != "comparison.json"])
def test_nothing_that_the_verdict_rests_on_can_be_edited_before_the_seal(attempt: Attempt, name: str) -> None:
    """A second attempt's file has the right form, and for a record the right case; one value of it is another."""
    if name.endswith(".json"):
        value = json.loads(attempt.file(name).read_bytes())
        place, key = next(_leaves(value, EDITED[name]))
        place[key] = place[key] + 1 if isinstance(place[key], int) else place[key] + " indeed"
        rewrite_json(attempt, name, **value)
    else:
        data = bytearray(attempt.file(name).read_bytes())
        data[-1] ^= 1
        attempt.file(name).write_bytes(data)
    with pytest.raises(XdError) as caught:
        seal.seal(attempt)
    assert (caught.value.status, name in caught.value.line()) == (Status.INVALID, True)
    assert not attempt.sealed


#: a value that no other file repeats and no digest inside the attempt covers
EDITED = {
    "requested.json": "experiment_id", "identity.json": "num_sequences", "materialized.json": "evidence",
    "readback_rollout.json": "calls", "readback_training.json": "calls", "actual.json": "calls",
}  # fmt: skip


def _leaves(value, name: str):
    """(object, key) of the members of that name, whose values are no objects; a list counts by its own members."""
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        if key == name:
            yield value, key
        elif isinstance(item, dict | list):
            yield from _leaves(item, name)


def test_what_differs_between_two_attempts_of_one_measurement_is_not_pinned(attempt: Attempt) -> None:
    rewrite_json(attempt, "requested.json", locations=attempt.requested()["locations"] | {"sequences": "elsewhere"})
    rewrite_json(attempt, "readback_rollout.json", reuse={"engine_serial": 7, "case_serial": 9})
    assert seal.seal(attempt)


@pytest.mark.parametrize("name", PAYLOADS)
def test_an_attempt_that_lacks_a_file_is_not_sealed(attempt: Attempt, name: str) -> None:
    attempt.file(name).unlink()
    with pytest.raises(XdError, match=name) as caught:
        seal.seal(attempt)
    assert caught.value.status == Status.MISSING
    assert not attempt.sealed


def test_a_refused_attempt_is_refused_here_too(tmp_path: Path) -> None:
    attempt = refused(tmp_path, ("rollout.dtype", "float16"), "no half precision here")
    with pytest.raises(XdError, match="no half precision here") as caught:
        seal.seal(attempt)
    assert caught.value.status == Status.REFUSED


@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (lambda a: rewrite_json(a, "requested.json", repeat=1), "requested.json#/request_digest"),
        (lambda a: rewrite_json(a, "actual.json", repeat=1), "actual.json"),
        (lambda a: rewrite_json(a, "readback_training.json", execution_key="0" * 64), "execution key"),
        (lambda a: rewrite_json(a, "readback_training.json", side="rollout"), "other side"),
        (lambda a: rewrite_json(a, "comparison.json", execution_key="0" * 64), "execution key"),
        (lambda a: rewrite_score(a, "rollout", logprobs=floats(-3, -2, -1)), "score_rollout.safetensors"),
        (lambda a: a.file("token_diffs.safetensors").write_bytes(b"other"), "token_diffs.safetensors"),
        (lambda a: rewrite_json(a, "identity.json", model=None), "identity.json"),
        (lambda a: rewrite_json(a, "actual.json", extra=1), "extra"),
        (lambda a: score_path(a, "rollout").write_bytes(b""), "score_rollout.safetensors"),
    ],
)
def test_files_that_do_not_belong_together_are_not_sealed(attempt: Attempt, spoil, what: str) -> None:
    spoil(attempt)
    with pytest.raises(XdError) as caught:
        seal.seal(attempt)
    assert caught.value.status == Status.INVALID
    assert what in caught.value.line()
    assert not attempt.sealed


def test_the_seal_is_canonical_json(attempt: Attempt) -> None:
    seal.seal(attempt)
    data = attempt.file(SEAL).read_bytes()
    assert data == canon.dumps(json.loads(data)) + b"\n"


def test_a_file_that_cannot_be_read_is_told_from_one_that_changed(attempt: Attempt, monkeypatch) -> None:
    seal.seal(attempt)
    _reading_fails(monkeypatch, errno.EIO)
    assert {kind for _, kind in kinds(attempt)} == {"unreadable"}
    with pytest.raises(XdError, match="the seal cannot be checked") as caught:
        seal.seal(attempt)
    assert caught.value.status == Status.MISSING


def test_without_a_free_descriptor_nothing_is_said_of_an_attempt(attempt: Attempt, monkeypatch) -> None:
    """Not that it was touched, nor that it is as it was: 75, and the next time it is looked at again."""
    seal.seal(attempt)
    _reading_fails(monkeypatch, errno.EMFILE)
    for ask in (seal.verify, seal.seal):
        with pytest.raises(XdError, match="Too many open files") as caught:
            ask(attempt)
        assert caught.value.status == Status.RETRY


def _reading_fails(monkeypatch, code: int) -> None:
    def refuse(path):
        raise OSError(code, os.strerror(code), str(path))

    monkeypatch.setattr(canon, "digest_file", refuse)
