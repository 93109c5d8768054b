"""The scorer's child process: holds an engine and answers its parent, a JSON line a request.

    python -P -m libxd.scoring.child --side rollout --fd 7 --parent 4242

Requests come on stdin, answers leave on the given descriptor. stdout is turned into stderr and stdin into /dev/null
before any engine is imported: whatever an engine prints or reads does not meet the protocol.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import sys
import traceback
from typing import Any, BinaryIO, NoReturn

from libxd import __version__, slots
from libxd.errors import of_exception
from libxd.rundir import SIDES
from libxd.scoring.scorer import Scorer
from libxd.scoring.task import Task

_PR_SET_PDEATHSIG = 1  # prctl(2)


def main() -> int:
    """Serve the parent until it closes stdin."""
    parser = argparse.ArgumentParser(prog="libxd.scoring.child", description=__doc__)
    parser.add_argument("--side", choices=SIDES, required=True)
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--slot", type=int, action="append", default=[], help="Descriptor of a slot that it holds.")
    arguments = parser.parse_args()
    slots.keep(arguments.slot)
    end_with_parent(arguments.parent)
    for signum in (signal.SIGTERM, signal.SIGHUP):  # a scheduler sends them to all processes of a job
        if signal.getsignal(signum) != signal.SIG_IGN:
            signal.signal(signum, _terminated)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends this process
    requests, answers = _take_streams(arguments.fd)
    serve(Scorer(arguments.side), requests, answers)
    return 0


def serve(scorer: Scorer, requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer each request line; say first that requests are welcome."""
    _answer(answers, {"ready": __version__})
    while line := requests.readline():
        _answer(answers, respond(scorer, json.loads(line)))
    scorer.close()


def respond(scorer: Scorer, request: dict[str, Any]) -> dict[str, Any]:
    """The answer to one request.

    {"attempt": path, "shard_tokens": n, "engine": "reuse" | "rebuild"}: score it. With "ask": "bytes" instead of
    "engine": what its engine will need. An answer holds "ok", with "errors" when not, "holds": whether an engine is
    held now, and "spent": whether this process may serve no other case. {"dismiss": true}: give the engine up, and let
    a launcher's other ranks go.
    """
    if request.get("dismiss"):
        from libxd.runtimes.ranks.world import dismiss

        scorer.close()
        dismiss(scorer.side)
        return {"ok": True, "holds": False, "spent": True}
    try:
        task = Task.read(request["attempt"], scorer.side, request["shard_tokens"])
        if request.get("ask") == "bytes":
            answer: dict[str, Any] = {"needed_bytes": scorer.estimate_bytes(task)}
        else:
            answer = {"reuse": scorer.score(task, reuse=request["engine"] == "reuse")}
        return {"ok": True, "holds": scorer.held is not None, "spent": scorer.spent, **answer}
    except Exception as error:
        if os.environ.get("XD_DEBUG") == "1":
            traceback.print_exception(error)
        issue = of_exception(error)
        records = [{**found.record(), "where": found.where or request["attempt"]} for found in issue.issues]
        return {"ok": False, "holds": scorer.held is not None, "spent": scorer.spent, "errors": records}


def end_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent is gone, however that ended (Linux; elsewhere end of stdin)."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it went before we asked
        os._exit(128 + signal.SIGKILL)


def _take_streams(answers_fd: int) -> tuple[BinaryIO, BinaryIO]:
    """The protocol's two streams, out of an engine's reach and not inherited by its ranks."""
    requests_fd = os.dup(sys.stdin.fileno())
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, sys.stdin.fileno())
    os.close(nothing)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    for descriptor in (requests_fd, answers_fd, *slots.kept()):  # ranks are given these by name
        os.set_inheritable(descriptor, False)
    return os.fdopen(requests_fd, "rb"), os.fdopen(answers_fd, "wb")


def _answer(answers: BinaryIO, value: dict[str, Any]) -> None:
    """What an engine printed goes first: the parent may end this process as soon as it has the answer."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    answers.write(json.dumps(value).encode() + b"\n")
    answers.flush()


def _terminated(signum: int, _frame: Any) -> NoReturn:
    """Leave by an exception, so that no temporary file stays behind."""
    raise SystemExit(128 + signum)


if __name__ == "__main__":
    sys.exit(main())
