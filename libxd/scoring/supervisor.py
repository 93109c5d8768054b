"""The parent of a side's scorer: decides which child and which engine a case gets. Imports no engine."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from libxd import devices, environment, policy, signals, strictjson
from libxd.errors import Status, XdError, XdErrors
from libxd.runtimes.ranks import launch
from libxd.runtimes.ranks.launch import Launch
from libxd.scoring import lifecycle, room
from libxd.scoring.lifecycle import Needs
from libxd.scoring.process import Child, ChildDied
from libxd.scoring.task import Task
from libxd.slots import Held, Line

#: how long an engine keeps devices that others wait for, while it waits for an attempt itself
IDLE_S = 5.0
#: statuses of an engine that failed: what it said last may help, and its process is not to be trusted with another
#: case (a CUDA context stays broken; the traceback of an exception holds the memory that ran out)
_ENGINE_FAILURES = (Status.BUG, Status.RETRY)


class Supervisor:
    """Scores tasks one after another; an engine, and a child, is kept for as long as the next task can use it.

    python: the interpreter of the child (None: that of the task's runtime, by policy). follow: takes every line an
    engine says; without it `say` gets the last lines when an engine fails. timeout_s: how long a task may take (None:
    as long as it likes); a collective that hangs would otherwise be waited for without end. launched: the place in a
    launcher's world, whose other ranks wait for the scorer's child.
    """

    def __init__(
        self, side: str, python: str | None, say: Callable[[str], None], follow: Callable[[str], None] | None = None,
        timeout_s: float | None = None, launched: Launch | None = None,
    ) -> None:  # fmt: skip
        self.side = side
        self._python = environment.interpreter(python) if python else None
        self._say = say
        self._follow = follow
        self._timeout_s = timeout_s
        self._launched = launched
        self._child: Child | None = None
        self._process: str | None = None
        self._held: Needs | None = None
        self._held_bytes = 0
        #: the slots of the child's devices; None: it needs none
        self.slots: Held | None = None

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            if self._launched:
                self._dismiss()
            self._end_child()
        elif self._child is not None:  # Ctrl-C, SIGTERM, a closed pipe: nothing is waited for
            self._child.kill()

    def attending(self, lines: Iterable[str]) -> Iterator[str]:
        """The lines as they come. An engine that waits for one gives its devices to others that wait for them: who
        writes the lines may be among those, and nobody holds what it does not use while another cannot go on."""
        coming = iter(lines)
        while True:
            with signals.each(IDLE_S, self._give_way) if self.slots else contextlib.nullcontext():
                line = next(coming, None)
            if line is None:
                return
            yield line

    def score(self, task: Task, read_all: Callable[[], None]) -> dict[str, int]:
        """Have a task scored and published; the counters of its readback's `reuse`.

        read_all is called when an engine must be started and finds no room, or no device that is free. XdError 69 when
        the task is refused or was materialised for another interpreter, for another number of ranks than was launched,
        or for more devices than there are; 75 when the child was killed or memory ran out, 70 when the engine fails:
        the child is ended then, and the next task gets a new one.
        """
        launch.require_world(self._launched, task.plan["engine"].get("world_size", 1), str(task.attempt))
        python = self._python or policy.default_python(task.plan["runtime"])
        require_environment(task, environment.of(python))
        needs = task.needs
        self._replace_dead_child()
        count = self._slots_for(task)
        held = len(self.slots.devices) if self.slots else 0
        if lifecycle.step(self._process, self._held, needs) == "restart" or held != count:
            self._end_child()
            self._start(python, needs, count, read_all)
        step = lifecycle.step(self._process, self._held, needs)
        if step != "reuse":
            needed = self._ask(task, ask="bytes")["needed_bytes"]
            if not self._has_room(task, python, needed):
                self._say("no room for another engine yet: reading all attempts first")
                if self.slots:  # which whoever writes the attempts may be waiting for
                    self._end_child()
                read_all()
                if self._child is None:
                    self._start(python, needs, count, read_all)
            self._held_bytes = needed
        try:
            return self._ask(task, engine=step, needs=needs)["reuse"]
        finally:
            if self._held is None:
                self._held_bytes = 0

    def _start(self, python: str, needs: Needs, count: int, read_all: Callable[[], None]) -> None:
        """A child that sees `count` devices, of which this process then holds the slots; 0: whatever there is."""
        self.slots = self._take(count, read_all) if count else None
        try:
            self._child = Child(python, self.side, self._follow, self.slots)
        except BaseException:
            self._forget_child()
            raise
        self._process = needs.process

    def _slots_for(self, task: Task) -> int:
        """How many devices its engine takes: none on a CPU; under a launcher, each rank has its own already."""
        engine = task.plan["engine"]
        if engine.get("device") != "cuda":
            return 0
        if self._launched is None:
            return engine.get("devices") or 1
        if devices.named(os.environ):
            raise XdError("has no say under a launcher, where each rank takes the device of its place",
                          code="bad-variable", where=f"${devices.VARIABLE}",
                          hint=f"unset it; {devices.VISIBLE_VARIABLE} says which devices the ranks see")  # fmt: skip
        return 0

    def _take(self, count: int, read_all: Callable[[], None]) -> Held:
        """Slots on as many devices: at once, or after whoever came before.

        Who waits has read its input to the end, and holds none: so it keeps nobody from going on.
        """
        line = Line(devices.of(os.environ), count)
        with line:
            held = line.take()
        if held is None:
            self._say(f"waits for {line} ({line.obstacle}): reading all attempts first")
            read_all()
            with line:
                held = line.wait()
        return held

    def _give_way(self) -> None:
        wanted = False
        with contextlib.suppress(XdError):  # it cannot be told, for want of a descriptor: then they are kept
            wanted = self.slots is not None and self.slots.wanted()
        if wanted:
            self._say(f"waits for the next attempt, and gives {self.slots} back that others wait for")
            self._end_child()

    def _has_room(self, task: Task, python: str, needed_bytes: int) -> bool:
        device = task.plan["engine"].get("device", "cpu")
        free = room.free_bytes(device, python, self.slots.variables if self.slots else None)
        return room.has_room(needed_bytes, free, self._held_bytes)

    def _ask(self, task: Task, needs: Needs | None = None, **request: Any) -> dict[str, Any]:
        """One request to the child about a task; what the child holds afterwards is what it was asked to build."""
        assert self._child is not None
        child = self._child
        try:
            about = {"attempt": str(task.attempt), "shard_tokens": task.shard_tokens}
            answer = child.ask({**about, **request}, self._timeout_s)
        except TimeoutError as error:
            self._tell(child, ended=False)
            child.kill()
            self._forget_child()
            raise XdError(f"the scorer took longer than {self._timeout_s:g} s and was ended; nothing was published",
                          status=Status.RETRY, code="timed-out", where=str(task.attempt),
                          hint="a collective may hang; -v shows what the engine says") from error
        except ChildDied as death:
            self._forget_child()
            self._tell(child, ended=True)
            raise _killed(task, death) from death
        except BaseException:
            self._held = None
            raise
        if needs is not None:
            self._held = needs if answer["holds"] else None
        issues = [] if answer["ok"] else [XdError.from_record(record) for record in answer["errors"]]
        if any(issue.status in _ENGINE_FAILURES for issue in issues):
            child.kill()
            self._tell(child, ended=True)
            self._forget_child()
        elif answer["spent"]:
            self._end_child()
        if not issues:
            return answer
        raise XdErrors(issues) if len(issues) > 1 else issues[0]

    def _replace_dead_child(self) -> None:
        """One that died while it waited for the next task, as when a rank of its engine was killed, is no matter of
        that task. A launcher's world cannot be had again: there the task is told of it."""
        if self._child is None or self._child.alive:
            return
        self._tell(self._child, ended=True)
        if not self._launched:
            self._say("the scorer died while it waited for the next attempt, and is started anew")
            self._child.kill()
            self._forget_child()

    def _dismiss(self) -> None:
        """Let a launcher's other ranks go, even where no attempt has needed them."""
        if self._child is None:
            self._child = Child(self._python or environment.interpreter(), self.side, self._follow)
        with contextlib.suppress(ChildDied):  # then its world has ended, too
            self._child.ask({"dismiss": True})

    def _tell(self, child: Child, ended: bool) -> None:
        for line in child.chatter.last(ended):
            self._say(f"engine: {line}")

    def _end_child(self) -> None:
        if self._child is not None:
            self._child.close()
        self._forget_child()

    def _forget_child(self) -> None:
        self._child, self._process, self._held, self._held_bytes = None, None, None, 0
        if self.slots:
            self.slots.release()
            self.slots = None


def require_environment(task: Task, described: dict[str, Any]) -> None:
    """XdError 69 with every difference between the interpreter that would score and the one materialised for."""
    expected = {"environment": task.plan["environment"], "scorer": task.plan["scorer"]}
    found = {
        "environment": environment.numeric(described, task.plan["runtime"]),
        "scorer": environment.scorer(described, task.plan["runtime"]),
    }
    differing = differences(expected, found)
    if differing:
        raise XdErrors(
            XdError(
                "the interpreter that would score is not the one it was materialised for", status=Status.REFUSED,
                code="environment-differs", where=str(task.attempt.file("materialized.json")),
                path=f"/sides/{task.side}{pointer}", found=there, expected=wanted,
                hint="materialise the row again, or score with that interpreter (--python)",
            )
            for pointer, wanted, there in differing
        )


def differences(expected: Any, found: Any, pointer: str = "") -> list[tuple[str, Any, Any]]:
    """Where two JSON values differ: (JSON pointer, expected, found), None for what one of them lacks."""
    if isinstance(expected, Mapping) and isinstance(found, Mapping):
        return [
            difference
            for key in sorted(expected.keys() | found.keys())
            for difference in differences(expected.get(key), found.get(key), strictjson.pointer_to(pointer, key))
        ]
    return [] if expected == found else [(pointer, expected, found)]


def _killed(task: Task, death: ChildDied) -> XdError:
    hint = "run again; if it recurs, see whether memory ran out" if death.by_signal else "-v shows what the engine says"
    return XdError(
        f"the scorer {death.how} while scoring it; nothing was published",
        status=Status.RETRY if death.by_signal else Status.BUG, code="scorer-died", where=str(task.attempt), hint=hint,
    )
