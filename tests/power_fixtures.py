"""A file system that keeps nothing but what was synced: what of a trace of file operations would outlast a power loss.

The rules of POSIX and no more: a file's bytes last once it was fsynced after they were written, a name (of a file, a
directory, a link) once its directory was fsynced after it was made. File systems keep more, each something else.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from fault_fixtures import CHANGING, Operation


@dataclass(eq=False)
class Node:
    """A file, link or directory. synced: its bytes last; durable: of a directory, the names that last."""

    directory: bool = False
    synced: bool = True
    names: dict[str, Node] = field(default_factory=dict)
    durable: dict[str, Node] = field(default_factory=dict)

    def lasting(self, place: str = "") -> dict[str, Node]:
        """Path -> node of all that is there after a power loss."""
        found: dict[str, Node] = {}
        for name, node in self.durable.items():
            found[place + name] = node
            found |= node.lasting(f"{place}{name}/")
        return found


class Disk:
    """The tree below `root`, of which what is in `paths` is there already, and lasts."""

    def __init__(self, root: str, paths: Iterable[tuple[str, bool]]) -> None:
        """paths: (path below the root, whether it is a directory), parents first."""
        self.root = root
        self.top = Node(directory=True)
        for path, directory in paths:
            parent, name = self._place(f"{root}/{path}")
            parent.names[name] = parent.durable[name] = Node(directory)

    def do(self, operation: Operation) -> str | None:
        """One operation of a trace; what it does wrong: a final name for bytes that may be lost."""
        if operation.result < 0 or operation.stream or operation.name not in CHANGING:
            return None
        name, path, other = operation.name, operation.path, operation.other
        if name == "fsync":
            node = self._node(path)
            node.synced = True
            node.durable = dict(node.names)
            return None
        parent, last = self._place(path)
        if name in ("create", "mkdir", "symlink"):
            parent.names.setdefault(last, Node(directory=name == "mkdir"))
        elif name in ("write", "truncate"):
            parent.names[last].synced = False
        elif name in ("unlink", "rmdir"):
            del parent.names[last]
        elif name in ("link", "rename"):
            to, new = self._place(other)
            node = to.names[new] = parent.names[last] if name == "link" else parent.names.pop(last)
            if not node.synced:
                return f"{os.path.relpath(other, self.root)} gets its name before its bytes are synced"
        return None

    def not_lasting(self, below: str = "") -> list[str]:
        """The final names at or below a path (from the root) that a power loss now would take, or empty."""
        lasting = self.top.lasting()
        return [
            place for place, node in self.all()
            if (place == below or place.startswith(f"{below}/") or below.startswith(f"{place}/") or not below)
            and not os.path.basename(place).startswith(".tmp-")
            and (lasting.get(place) is not node or not node.synced)
        ]  # fmt: skip

    def all(self, node: Node | None = None, place: str = "") -> Iterator[tuple[str, Node]]:
        """Path -> node of all that is there now."""
        for name, inner in (node or self.top).names.items():
            yield place + name, inner
            yield from self.all(inner, f"{place}{name}/")

    def _place(self, path: str) -> tuple[Node, str]:
        directory, name = os.path.split(path)
        return self._node(directory), name

    def _node(self, path: str) -> Node:
        node = self.top
        for name in os.path.relpath(path, self.root).split("/") if path != self.root else ():
            node = node.names[name]
        return node


def printed_at(operation: Operation, out: bytes, position: int) -> tuple[list[str], int]:
    """The whole lines that a write on stdout ends, and where `out` stands after it."""
    if operation.path != "<stdout>" or operation.name != "write" or operation.result < 0:
        return [], position
    after = position + operation.result
    begin = out.rfind(b"\n", 0, position) + 1
    return [os.fsdecode(line) for line in out[begin:after].split(b"\n")[:-1]], after
