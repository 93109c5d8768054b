"""Slots on devices: all at once, first come first served, free when their holder is gone."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tempfile
import threading

import pytest

from libxd import slots
from libxd.devices import Device
from libxd.errors import Status, XdError
from libxd.runtimes.ranks.processes import Processes
from libxd.slots import Line

PATIENCE_S = 60.0


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """A host's directory of its own."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def named(text):
    return [Device(name, f"key-{name}") for name in text.split(",")]


def taken(line):
    with line:
        return line.take()


def names(held):
    return [device.name for device in held.devices]


def test_a_slot_is_free_again_when_it_is_released():
    first = taken(Line(named("0"), 1))
    assert names(first) == ["0"] and first.variables == {"CUDA_VISIBLE_DEVICES": "0"}
    line = Line(named("0"), 1)
    assert taken(line) is None
    assert line.obstacle == f"process {os.getpid()} holds it"
    first.release()
    assert names(taken(line)) == ["0"]


def test_two_slots_on_one_device_and_no_third():
    lines = [Line(named("0,0"), 1) for _ in range(3)]
    held = [taken(line) for line in lines]
    assert [each and names(each) for each in held] == [["0"], ["0"], None]
    held[0].release()
    assert names(taken(lines[2])) == ["0"]


def test_who_names_a_device_once_takes_no_part_of_one_that_is_in_use():
    assert taken(Line(named("0,0"), 1)) is not None
    assert taken(Line(named("0"), 1)) is None


def test_slots_are_spread_over_devices_before_one_serves_two():
    assert [names(taken(Line(named("0,0,1,1"), 1))) for _ in range(4)] == [["0"], ["1"], ["0"], ["1"]]


def test_four_slots_are_on_four_devices_all_at_once():
    """Three that are free are not kept from others while the fourth is in use, nor is one device taken twice."""
    one = taken(Line(named("0,1,2,3"), 1))
    four = Line(named("0,1,2,3"), 4)
    assert taken(four) is None
    others = [taken(Line(named("0,1,2,3"), 1)) for _ in range(3)]
    assert None not in others
    for each in (one, *others):
        each.release()
    assert names(taken(four)) == ["0", "1", "2", "3"]


@pytest.mark.parametrize("devices", ["0,1,2", "0,0,1,1,2,2"])
def test_more_devices_than_there_are_is_refused_and_nobody_waits(devices):
    with pytest.raises(XdError) as caught:
        Line(named(devices), 4)
    assert (caught.value.status, caught.value.code, caught.value.expected) == (Status.REFUSED, "too-few-devices", 4)
    assert len(caught.value.line().splitlines()) == 1


def test_no_devices_at_all_is_refused():
    with pytest.raises(XdError, match="more devices"):
        Line([], 1)


def test_two_halves_of_two_requests_do_not_wait_for_each_other():
    """Each would hold two of four devices, had it taken what was free."""
    busy = [taken(Line(named(name), 1)) for name in ("1", "2")]
    with Line(named("0,1,2,3"), 4) as first, Line(named("3,2,1,0"), 4) as second:
        assert first.take() is None and second.take() is None
        for each in busy:
            each.release()
        assert second.take() is None, "the first in line is served first"
        held = first.take()
        assert names(held) == ["0", "1", "2", "3"]
    with second:
        assert second.take() is None
        held.release()
        assert names(second.take()) == ["3", "2", "1", "0"]


def test_a_request_for_four_is_not_overtaken_by_a_stream_of_requests_for_one():
    running = [taken(Line(named("0,1,2,3"), 1)) for _ in range(4)]
    with Line(named("0,1,2,3"), 4) as four:
        for each in running:
            each.release()
            assert taken(Line(named("0,1,2,3"), 1)) is None
            assert taken(Line(named("0"), 1)) is None
        assert names(four.take()) == ["0", "1", "2", "3"]


def test_first_come_first_served():
    held = taken(Line(named("0"), 1))
    with Line(named("0"), 1) as first, Line(named("0"), 1) as second:
        held.release()
        assert second.take() is None
        assert second.obstacle == "1 before it in line"
        assert first.take() is not None


def test_who_waits_for_other_devices_is_not_in_the_way():
    assert taken(Line(named("0"), 1)) is not None
    with Line(named("0"), 1) as waiting:
        assert waiting.take() is None
        assert names(taken(Line(named("0,1"), 1))) == ["1"]
        assert taken(Line(named("2,0"), 2)) is None


def test_a_holder_knows_that_somebody_waits_for_its_device():
    held, other = taken(Line(named("0"), 1)), taken(Line(named("1"), 1))
    assert not held.wanted()
    with Line(named("0"), 1):
        assert held.wanted() and not other.wanted()
    assert not held.wanted()


def holder(count, then, *inherited):
    """A process that takes a slot of device 0, or a place in line for it, says so, and then does something."""
    code = (
        "import subprocess, sys, time\nfrom libxd.devices import Device\nfrom libxd.slots import Line\n"
        f"line = Line([Device('0', 'key-0')] * {count}, 1)\nline.__enter__()\nheld = line.take()\n"
        "print('held' if held else 'waits', flush=True)\n" + then
    )
    process = subprocess.Popen([sys.executable, "-P", "-c", code], stdout=subprocess.PIPE, text=True,
                               env={**os.environ, "TMPDIR": tempfile.gettempdir()})  # fmt: skip
    return process, process.stdout.readline().strip()


def end(process):
    process.kill()
    process.communicate()


def test_a_killed_holder_and_a_killed_waiter_leave_nothing_behind(place):
    first, said = holder(1, "time.sleep(600)")
    assert said == "held"
    waiter, said = holder(1, "time.sleep(600)")
    assert said == "waits"
    with Line(named("0"), 1) as line:
        assert line.take() is None  # both live
        end(first)
        assert line.take() is None and line.obstacle == "1 before it in line"
        end(waiter)
        assert line.take() is not None
    assert [path.name for path in place.glob("*/place-*")] == []


def test_a_slot_is_held_for_as_long_as_the_engine_lives_whatever_became_of_the_parent():
    parent, said = holder(
        1, "child = subprocess.Popen(['sleep', '600'], pass_fds=held.files)\nprint(child.pid, flush=True)\n"
        "line.__exit__()\ntime.sleep(600)"
    )  # fmt: skip
    child = int(parent.stdout.readline())
    assert said == "held"
    parent.kill()
    parent.wait()
    assert taken(Line(named("0"), 1)) is None
    os.kill(child, signal.SIGKILL)
    with Line(named("0"), 1) as line:
        assert names(line.wait()) == ["0"]


def test_a_closed_parent_alone_does_not_free_what_was_never_handed_on():
    """Negative control: a child that does not inherit the slot does not hold it."""
    parent, _ = holder(1, "child = subprocess.Popen(['sleep', '600'])\nprint(child.pid, flush=True)\n"
                          "line.__exit__()\ntime.sleep(600)")  # fmt: skip
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    assert taken(Line(named("0"), 1)) is not None
    os.kill(child, signal.SIGKILL)


def test_waiting_ends_when_it_is_ones_turn():
    """The second in line waits for the first, and the first for the slot."""
    held = taken(Line(named("0"), 1))
    served, entered = [], [threading.Event(), threading.Event()]

    def wait(number):
        if number:
            assert entered[0].wait(PATIENCE_S)
        with Line(named("0"), 1) as line:
            entered[number].set()
            got = line.wait()
            served.append(number)
        got.release()

    threads = [threading.Thread(target=wait, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    assert entered[1].wait(PATIENCE_S)
    assert served == []
    held.release()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert served == [0, 1]


def test_a_lock_file_that_was_cleaned_away_is_made_again(place):
    held = taken(Line(named("0"), 1))
    held.release()
    for path in place.glob("*/slot-*"):
        path.unlink()
    held = taken(Line(named("0"), 1))
    assert held is not None and taken(Line(named("0"), 1)) is None


@pytest.mark.parametrize("make", [
    lambda path: path.write_text(""), lambda path: path.symlink_to("/tmp"),
    lambda path: (path.mkdir(), path.chmod(0o777)),
], ids=["a file", "a symlink", "a directory for all"])  # fmt: skip
def test_what_somebody_else_put_there_is_not_used(place, make):
    made = slots.directory()
    made.rmdir()
    make(made)
    with pytest.raises(XdError) as caught:
        taken(Line(named("0"), 1))
    assert caught.value.status == Status.CONFLICT and str(made) in caught.value.line()


def test_a_place_that_cannot_be_written_is_one_line(place, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(place / "none"))
    with pytest.raises(XdError) as caught:
        taken(Line(named("0"), 1))
    assert (caught.value.status, caught.value.code) == (Status.CONFLICT, "cannot-write")


def refusing(monkeypatch, call, ordinal):
    """`os.<call>` fails for want of a descriptor or of room, at its n-th time from now."""
    honest, times = getattr(os, call), iter(range(1, 1000))

    def refuse(*arguments, **options):
        if next(times) == ordinal:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return honest(*arguments, **options)

    monkeypatch.setattr(slots.os, call, refuse)


@pytest.mark.parametrize("call", ["open", "pwrite", "ftruncate", "unlink", "fstat"])
@pytest.mark.parametrize("ordinal", range(1, 9))
def test_a_refused_call_leaves_no_lock_behind(place, monkeypatch, call, ordinal):
    """flock belongs to the open file: a lock that was left open would keep this very process waiting for ever."""
    with monkeypatch.context() as patched:
        refusing(patched, call, ordinal)
        try:
            held = taken(Line(named("0,1,1"), 2))
        except XdError as error:
            assert error.status in (Status.CONFLICT, Status.RETRY)
        else:
            held.release()
    assert names(taken(Line(named("0,1,1"), 2))) == ["0", "1"]
    assert slots._line(slots.directory()) == []


def test_ranks_hold_the_slots_of_their_engine(place, monkeypatch):
    """Whoever computes on a device keeps it: the slot is free when the last of them is gone."""
    held = taken(Line(named("0"), 1))
    slots.keep(held.files)
    try:
        ranks = Processes("rollout", 2, "127.0.0.1", 1)
    finally:
        slots.keep(())
    held.release()
    assert taken(Line(named("0"), 1)) is None
    ranks.end(at_once=True)
    assert names(taken(Line(named("0"), 1))) == ["0"]
