"""A whole chain of two small s0 cases, disturbed somewhere and then finished, and what must hold of it then.

The tree below `root` is small, so its state is kept in memory: a disturbed tool starts from the state that the stages
before it have left, and a state that was finished once need not be finished again.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import importlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import scoring_fixtures
import smoke_fixtures
from fault_fixtures import UNDISTURBED, Fault, Injector, Operation, Ran, temporary, under_faults

from libxd import canon, environment, seal, sequences
from libxd.rundir import PAYLOADS, SEAL, SIDES, Attempt

POLICY = ("--runtime", "cpu-smoke")
#: what of an attempt stands once a tool has printed its path
STANDING = {
    "materialize": PAYLOADS[:3], "score rollout": PAYLOADS[:5], "score training": PAYLOADS[:7], "compare": PAYLOADS,
    "seal": (*PAYLOADS, SEAL),
}  # fmt: skip

Item = TypeVar("Item")
Tree = dict[str, bytes | str | None]  # path below the root -> a file's bytes, where a link leads, None: a directory


class Broken(AssertionError):
    """What must hold and does not."""


@dataclass(frozen=True)
class Stage:
    """A tool of the chain, as it is called."""

    name: str
    tool: str
    arguments: tuple[object, ...]


@dataclass(frozen=True)
class Start:
    """How a stage finds the world: the tree and its stdin; `ran`: how it ends there, undisturbed.

    traces: what each of its processes does there, "tool" and the scorer's "child".
    """

    stage: Stage
    title: str
    tree: Tree
    stdin: bytes
    ran: Ran
    traces: dict[str, tuple[Operation, ...]]


class Every:
    """Every n-th of all that it is asked about, wherever: a sample that is spread over a whole table."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.asked = 0

    def takes(self) -> bool:
        self.asked += 1
        return self.asked % self.n == 0

    def __call__(self, items: Iterable[Item]) -> Iterator[Item]:
        return (item for item in items if self.takes())


@contextlib.contextmanager
def chain_under_faults() -> Iterator[Chain]:
    """For a program: start it anew with the injector, load all that a tool would load, and run the chain once."""
    under_faults()
    modules = [f"libxd.cmd.{tool}" for tool in ("plan", "resume", "materialize", "score", "compare", "seal")]
    modules += [f"libxd.runtimes.cpu_smoke.{side}" for side in SIDES]
    for module in (*modules, "torch", "libxd.comparison", "libxd.scoring.child"):
        importlib.import_module(module)
    environment.of()
    gc.collect()
    gc.freeze()  # a collection in a forked process would copy all of it
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # what is fsynced there need not be waited for
    with tempfile.TemporaryDirectory(prefix="xd-torture-", dir=memory) as place:
        yield Chain(Path(place))


class Chain:
    """The chain over one place; `starts` holds where each of its stages starts, undisturbed."""

    def __init__(self, place: Path) -> None:
        self.root = place / "root"
        self.injector = Injector(self.root, place / "scratch")
        runs = self.root / "runs"
        self.stages = {
            stage.name: stage
            for stage in (
                Stage("plan", "plan", (_experiment(self.root), "--runs", runs)),
                Stage("resume", "resume", ("--runs", runs, *POLICY)),
                Stage("materialize", "materialize", ("--runs", runs, *POLICY)),
                Stage("score rollout", "score", ("--side", "rollout")),
                Stage("score training", "score", ("--side", "training")),
                Stage("compare", "compare", ()),
                Stage("seal", "seal", ()),
            )
        }
        self._finished: set[str] = set()
        #: every stage where it has all to do, and those that can find it done already
        self.starts: list[Start] = []
        stdin = b""
        for stage in self.stages.values():
            self.starts.append(self._start(stage, stage.name, stdin))
            if stage.tool in ("plan", "score", "compare", "seal"):
                self.starts.append(self._start(stage, f"{stage.name} again", stdin))
            stdin = self.starts[-1].ran.out
        self.rows = self.starts[0].ran.out
        self.starts.append(self._start(self.stages["resume"], "resume again", self.rows))
        self.reference = essences(self.tree())

    def start(self, title: str) -> Start:
        return next(start for start in self.starts if start.title == title)

    def _start(self, stage: Stage, title: str, stdin: bytes) -> Start:
        tree = self.tree()
        traces = {}
        for role in ("child", "tool") if stage.tool == "score" else ("tool",):
            self.restore(tree)
            ran = self.run(stage, stdin, Fault(traced=(role,)))
            traces[role] = ran.trace
            if ran.status or (ran.err and stage.tool != "resume"):
                raise Broken(f"the undisturbed {title} ended with {ran.status}: {ran.err}")
        return Start(stage, title, tree, stdin, ran, {role: trace for role, trace in traces.items() if trace})

    def run(
        self, stage: Stage, stdin: bytes, fault: Fault = UNDISTURBED, before: Callable[[], None] = lambda: None
    ) -> Ran:
        """One stage on the tree as it is."""
        return self.injector.run(stage.tool, stage.arguments, stdin, fault, before)

    def disturb(self, start: Start, fault: Fault, before: Callable[[], None] = lambda: None) -> Ran:
        """One stage from its undisturbed start."""
        self.restore(start.tree)
        return self.run(start.stage, start.stdin, fault, before)

    def finish(self, stage: Stage, printed: bytes) -> bool:
        """What comes after a disturbed stage: the rest of its pipe, then everything again from the plan.

        Broken where a final name holds what it does not undisturbed, a sealed attempt changes, or other verdicts come
        out. False: just this was finished before.
        """
        tree = self.tree()
        key = canon.digest_bytes(repr((stage.name, printed, sorted(_unnamed(tree).items()))).encode())
        if key in self._finished:
            return False
        self.require_whole(tree)
        stages = list(self.stages.values())
        sealed = self.sealed()
        for later in stages[stages.index(stage) + 1 :]:
            if not printed:  # a tool that reads nothing does nothing
                break
            printed = self.run(later, printed).out
            sealed = self.require_kept(sealed)
        self.resume()
        self.require_kept(sealed)
        self._finished.add(key)
        return True

    def resume(self) -> None:
        """`xd-plan | xd-resume | …`: Broken unless each stage succeeds and the verdicts are those of the reference."""
        stdin = b""
        for stage in self.stages.values():
            if stage.tool != "plan" and not stdin:  # all was answered
                break
            ran = self.run(stage, stdin)
            if ran.status:
                raise Broken(f"resumed, {stage.name} ended with {ran.status}: {ran.err}")
            if stage.tool == "plan" and ran.out != self.rows:
                raise Broken("the plan's rows are other ones")
            stdin = ran.out
        self.require_verdicts()

    def require_verdicts(self) -> None:
        """Broken unless a sealed, untampered attempt answers each row, with the bytes of the reference."""
        arguments = ("--runs", self.root / "runs", *POLICY, "--answers")
        answers = self.injector.run("resume", arguments, self.rows).out.decode().splitlines()
        if len(answers) != self.rows.count(b"\n"):
            raise Broken(f"{len(answers)} answers")
        for path in answers:
            if problems := seal.verify(Attempt.open(path)):
                raise Broken(f"{path}: {problems[0]}")
            for file in STANDING["seal"]:
                place = os.path.relpath(Path(path) / file, self.root)
                if essence(place, (Path(path) / file).read_bytes()) != self.reference[_without_attempt(place)]:
                    raise Broken(f"{place}: other bytes than in an undisturbed run")

    def require_whole(self, tree: Tree) -> None:
        """Broken where a final name holds other bytes than it does in an undisturbed run."""
        for place, found in essences(tree).items():
            if found != self.reference.get(place):
                raise Broken(f"{place}: a final name with {'other' if place in self.reference else 'unknown'} content")

    def require_standing(self, stage: Stage, printed: bytes) -> None:
        """Broken unless all that a path stands for that was printed to its end is there (whole: require_whole)."""
        for path in printed.decode().split("\n")[:-1] if stage.name in STANDING else ():
            if lacking := [file for file in STANDING[stage.name] if not (Path(path) / file).is_file()]:
                raise Broken(f"{path} was printed and lacks {lacking}")

    def require_kept(self, sealed: dict[str, bytes]) -> dict[str, bytes]:
        """Broken unless every file of the attempts that were sealed is as it was. The files that are sealed now."""
        found = self.sealed()
        for place, content in sealed.items():
            if found.get(place) != content:
                raise Broken(f"{place}: of a sealed attempt, and changed")
        return found

    def sealed(self) -> dict[str, bytes]:
        """Every file of the attempts that bear a seal."""
        tree = self.tree()
        sealed = {os.path.dirname(place) for place in tree if os.path.basename(place) == SEAL}
        return {place: content for place, content in tree.items()
                if isinstance(content, bytes) and os.path.dirname(place) in sealed}  # fmt: skip

    def tree(self) -> Tree:
        """What lies below the root."""
        found: Tree = {}
        for directory, names, files in os.walk(self.root):
            for entry in (*names, *files):
                path = Path(directory) / entry
                place = str(path.relative_to(self.root))
                found[place] = (
                    os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
                )
        return found

    def restore(self, tree: Tree) -> None:
        """Put the root back to how it was; root itself stays, it may be a mount point."""
        for entry in os.scandir(self.root):
            shutil.rmtree(entry) if entry.is_dir(follow_symlinks=False) else os.unlink(entry)
        for place, content in sorted(tree.items()):
            if content is None:
                (self.root / place).mkdir()
            elif isinstance(content, str):
                (self.root / place).symlink_to(content)
            else:
                (self.root / place).write_bytes(content)


def _experiment(root: Path) -> Path:
    """s0's baseline and one dtype, on three sequences of some tokens, all below the root."""
    root.mkdir(parents=True)
    sequences.write(root / "sequences.safetensors", scoring_fixtures.frozen())
    config: dict[str, Any] = copy.deepcopy(json.loads(smoke_fixtures.S0.read_text()))
    config["identity"]["sequences"]["path"] = "sequences.safetensors"
    config["interventions"] = [{"path": "training.compute_dtype", "values": ["bfloat16"]}]
    path = root / "s0.json"
    path.write_text(json.dumps(config))
    return path


# -- what of a tree is the same in every run


def _without_attempt(place: str) -> str:
    return re.sub(r"/a\d{4}/", "/", place)


def essence(place: str, content: bytes) -> bytes:
    """A file's bytes without what two attempts that measured the same differ in: the counters of an engine's reuse, and
    with them the digest of a readback in the seal (which `seal.verify` looks at)."""
    name = os.path.basename(place)
    try:
        if name.startswith("readback_"):
            return canon.dumps({key: value for key, value in json.loads(content).items() if key != "reuse"})
        if name == SEAL:
            value = json.loads(content)
            return canon.dumps({**value, "files": {key: facts for key, facts in value["files"].items()
                                                   if not key.startswith("readback_")}})  # fmt: skip
    except (ValueError, KeyError):
        pass  # a half file: it is what it is
    return content


def essences(tree: Tree) -> dict[str, bytes | str]:
    """Of every file and link that bears a final name; attempts of one case are one."""
    return {
        _without_attempt(place): essence(place, content) if isinstance(content, bytes) else content
        for place, content in tree.items()
        if content is not None and not temporary(place)
    }


def _unnamed(tree: Tree) -> dict[str, bytes | str | None]:
    """Temporary names without their random part, and of their content only whether there is any."""
    return {
        re.sub(r"-\d+-[0-9a-f]{8}$", "", place) if temporary(place) else place:
            bool(content) if temporary(place) else content
        for place, content in tree.items()
    }  # fmt: skip
