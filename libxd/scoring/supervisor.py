"""The parent of a side's scorer: decides which child and which engine a case gets. Imports no engine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from libxd import environment, policy, strictjson
from libxd.errors import Status, XdError, XdErrors
from libxd.runtimes.ranks import launch
from libxd.runtimes.ranks.launch import Launch
from libxd.scoring import lifecycle, room
from libxd.scoring.lifecycle import Needs
from libxd.scoring.process import Child, ChildDied
from libxd.scoring.task import Task

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

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            if self._launched:
                self._dismiss()
            self._end_child()
        elif self._child is not None:  # Ctrl-C, SIGTERM, a closed pipe: nothing is waited for
            self._child.kill()

    def score(self, task: Task, before_engine: Callable[[], None]) -> dict[str, int]:
        """Have a task scored and published; the counters of its readback's `reuse`.

        before_engine is called when an engine must be started and finds no room. XdError 69 when the task is refused or
        was materialised for another interpreter, or for another number of ranks than was launched; 75 when the child
        was killed or memory ran out, 70 when the engine fails: the child is ended then, and the next task gets a new
        one.
        """
        launch.require_world(self._launched, task.plan["engine"].get("world_size", 1), str(task.attempt))
        python = self._python or policy.default_python(task.plan["runtime"])
        require_environment(task, environment.of(python))
        needs = task.needs
        self._replace_dead_child()
        if lifecycle.step(self._process, self._held, needs) == "restart":
            self._end_child()
            self._child = Child(python, self.side, self._follow)
            self._process = needs.process
        step = lifecycle.step(self._process, self._held, needs)
        if step != "reuse":
            needed = self._ask(task, ask="bytes")["needed_bytes"]
            free = room.free_bytes(task.plan["engine"].get("device", "cpu"), python)
            if not room.has_room(needed, free, self._held_bytes):
                before_engine()
            self._held_bytes = needed
        try:
            return self._ask(task, engine=step, needs=needs)["reuse"]
        finally:
            if self._held is None:
                self._held_bytes = 0

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
