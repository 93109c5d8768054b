"""The numeric state of a scorer's process: read before anything is made, and what it may be afterwards."""

from __future__ import annotations

import pytest

from libxd.scoring.numerics import Numerics


class Process:
    def __init__(self, **state):
        self.state = state

    def __call__(self):
        return dict(self.state)


def told(numerics, **engine):
    return [(r.stage, r.expected, r.observed) for r in numerics.refusals("behaviour", engine)]


def test_what_stays_as_it_was_is_no_refusal():
    assert told(Numerics(Process(threads=2, tf32=False))) == []
    assert told(Numerics(None)) == []  # a runtime without such state


def test_what_was_changed_is_refused_by_name():
    process = Process(threads=2, tf32=False)
    numerics = Numerics(process)
    process.state["tf32"] = True
    (found,) = numerics.refusals("settings", {})
    assert (found.expected, found.observed) == (False, True) and found.reason.endswith("tf32")
    process.state["tf32"] = 0  # not the same as False
    assert len(told(numerics)) == 1
    del process.state["tf32"]
    assert told(numerics) == [("behaviour", False, None)]


def test_what_the_plan_says_must_be_so():
    process = Process(threads=2)
    numerics = Numerics(process)
    assert told(numerics, threads=1, device="cpu") == [("behaviour", 1, 2)]
    process.state["threads"] = 1
    assert told(numerics, threads=1) == []


@pytest.mark.parametrize(
    ("change", "undo", "name"),
    [
        (lambda torch: torch.set_float32_matmul_precision("high"),
         lambda torch: torch.set_float32_matmul_precision("highest"), "float32_matmul_precision"),
        (lambda torch: torch.set_flush_denormal(True), lambda torch: torch.set_flush_denormal(False), "denormals"),
        (lambda torch: torch.set_default_dtype(torch.float64),
         lambda torch: torch.set_default_dtype(torch.float32), "default_dtype"),
        (lambda torch: torch.use_deterministic_algorithms(True),
         lambda torch: torch.use_deterministic_algorithms(False), "deterministic_algorithms"),
    ],
)  # fmt: skip
def test_torchs_settings_are_read_from_torch(change, undo, name):
    torch = pytest.importorskip("torch")
    from libxd.runtimes import live

    before = live.numerics()
    assert live.numerics() == before
    change(torch)
    try:
        assert name in {key for key, value in live.numerics().items() if value != before[key]}
    finally:
        undo(torch)
    assert live.numerics() == before
