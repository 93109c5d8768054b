"""However a sealed attempt was touched, xd-seal --verify and xd-resume notice: dev/torture/tamper.py in its short form.

What no digest can notice is told apart, and shows beside a statement that was made before.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import pytest
from tamper_fixtures import NAMES, NOTICED, SAME, UNFINISHED, Ground, Seen, sealed, ways

from libxd import seal, statement

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "dev" / "torture"))

import tamper


@pytest.fixture
def open_place():
    """A directory that a nobody may go through, as pytest's own are not."""
    with tempfile.TemporaryDirectory(prefix="xd-tamper-") as place:
        os.chmod(place, 0o711)
        yield Path(place)


def test_every_way_of_touching_a_sealed_attempt_is_noticed(open_place):
    counts = tamper.short(open_place)
    assert {kind: count.wrong for kind, count in counts.items() if count.wrong} == {}
    assert sum(count.tried for count in counts.values()) > 500
    flipped = {kind.removeprefix("a byte of ") for kind in counts if kind.startswith("a byte of ")}
    assert flipped == set(NAMES)


def test_what_goes_unnoticed_is_counted_wrong(tmp_path, monkeypatch):
    """The control: with a verifier that looks at sizes alone, the proof fails just where only content differs."""
    ground, counts = Ground(tmp_path), defaultdict(tamper.Count)
    digest = seal.canon.digest_file
    monkeypatch.setattr(seal.canon, "digest_file", lambda path: digest(ground.kept(path.name)))
    tamper.in_process(ground, [way for way in ways(ground) if way.kind == "truncated"][:8], counts)
    assert not counts["truncated"].wrong
    tamper.flipped(ground, counts, every=499)
    assert counts["a byte of score_rollout.safetensors"].wrong
    assert any("WRONG" in line for line in tamper.lines(counts))


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (Seen([], ["sealed, but …"], False), NOTICED),
        (Seen(["a: changed"], [], False), NOTICED),
        (Seen(["a: changed"], ["sealed, but …"], True), NOTICED),
        (Seen(["a: changed\nb: changed"], ["sealed, but …"], False), NOTICED),
        (Seen([], [], False), UNFINISHED),
        (Seen([], [], False), SAME),
        (Seen([], ["…"], True), SAME),
    ],
)
def test_half_a_notice_is_none(seen, expected):
    assert not seen.is_(expected)


def test_a_forgery_that_is_consistent_is_beyond_a_digest_and_not_beyond_a_signed_statement(tmp_path):
    """One attempt, and one of the same name with invented scores and everything after them made anew."""
    honest, lie = sealed(tmp_path / "true", -2.5), sealed(tmp_path / "false", -2)
    assert (honest.comparison()["status"], lie.comparison()["status"]) == ("MISMATCH", "PASS")
    assert seal.verify(lie) == []
    then, now = (statement.dumps([statement.read(attempt)]) for attempt in (honest, lie))
    assert then != now
    assert then == statement.dumps([statement.read(honest)]), "the control: it is made again byte for byte"
