"""The engine of a world, as the scorer's child sees it: one engine, of which every rank runs a part.

What the ranks show is compared: one that saw something else, or holds something else, is what the whole shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from libxd.errors import Status, XdError
from libxd.runtimes.protocol import EngineContext, Observation, Request, Scores
from libxd.runtimes.ranks import agreement
from libxd.runtimes.ranks.rank import Rank, Work, same_inputs
from libxd.runtimes.ranks.world import World
from libxd.sequences import Sequences

Held = tuple[str, str, tuple[int, ...], bytes]


class Everywhere:
    """Implements `libxd.runtimes.protocol.Engine`; the ranks are `world_size` processes of a runtime with `open_rank`.

    XdError 69 when the ranks' numeric states or builds of xd differ, or what they computed.
    """

    def __init__(
        self, runtime: str, side: str, plan: dict[str, Any], context: EngineContext, world_size: int
    ) -> None:  # fmt: skip
        self._here = Rank()
        self._world = World(side, world_size)
        self._ask("open", runtime, side, plan, context)
        self._require_same_conditions()

    # -- protocol

    def bind(self, operator: Any) -> None:
        record = {name: getattr(operator, name) for name in ("backend", "version", "build", "options")}
        self._world.ask("bind", record, here=lambda: self._here.bind(operator))

    def settings(self) -> dict[str, Observation]:
        return _merged(self._ask("settings"))

    def behaviour(self) -> dict[str, Observation]:
        return _merged(self._ask("behaviour"))

    def state(self) -> dict[str, Any]:
        return agreement.state(self._ask("state"))

    def parameters(self) -> Iterator[Held]:
        """Whole weights; where a rank's copy of a part is another than the first rank's, that copy in its place."""
        odd = {name: held for name, held in self._odd_copies()}
        with self._world.all_doing("parameters") as gather:
            for whole in self._here.engine.parameters():
                yield odd.get(whole[0], whole)
            gather(None)

    def buffers(self) -> Iterator[Held]:
        yield from agreement.odd_one(self._ask("buffers"))

    def score(self, sequences: Sequences, request: Request) -> Scores:
        """Rank 0's scores; with what another rank was fed, where that is something else, so that it is judged."""
        found: list[tuple[Scores, Work]] = self._ask("score", sequences, request)
        self._require_same_conditions()
        (first, work), *others = found
        for rank, (scores, its_work) in enumerate(others, 1):
            if not same_inputs(first.observed, scores.observed):
                seen = replace(scores.observed, head_outputs=first.observed.head_outputs)
                return replace(first, observed=seen)
            if (scores.logprobs.tobytes(), scores.logits_dtype) != (first.logprobs.tobytes(), first.logits_dtype):
                raise _disagree(rank, "computed other logprobs than rank 0 of the same tokens")
            if its_work != work:
                raise _disagree(rank, "called the operator otherwise than rank 0")
        return first

    def describe(self) -> dict[str, Any]:
        found = self._ask("describe")
        same = all(each == found[0] for each in found)
        return {**found[0], "world_size": len(found), **({} if same else {"ranks": found})}

    def not_parameters(self) -> list[str]:
        return self._here.engine.not_parameters()

    def close(self) -> None:
        self._here.close()
        self._world.close()

    # -- the ranks

    def _ask(self, command: str, *arguments: Any) -> list[Any]:
        return self._world.ask(command, *arguments, here=lambda: self._here.do(command, *arguments))

    def _require_same_conditions(self) -> None:
        first, *others = self._ask("conditions")
        for rank, found in enumerate(others, 1):
            for what in first:
                for name, value in first[what].items():
                    if found[what].get(name) != value:
                        raise _disagree(rank, f"has other {what} than rank 0: {name}", found[what].get(name), value)

    def _odd_copies(self) -> Iterator[tuple[str, Held]]:
        """Name and held part of every weight of which two ranks hold different copies: that of the later rank."""
        first_held: dict[tuple[str, Any], str] = {}
        odd: dict[tuple[str, Any], int] = {}
        for rank, copies in enumerate(self._ask("copies")):
            for part, digest in copies.items():
                if first_held.setdefault(part, digest) != digest:
                    odd[part] = rank
        for part, rank in odd.items():
            yield part[0], self._ask("part", part)[rank]


def _merged(found: list[dict[str, Observation]]) -> dict[str, Observation]:
    """What all ranks show alike; a knob that they show differently has no value, and all evidence stands beside it."""
    merged = {}
    for name, first in found[0].items():
        shown = [each.get(name, Observation(None)) for each in found]
        same = all(type(each.value) is type(first.value) and each.value == first.value for each in shown)
        alike = all(each.evidence == first.evidence for each in shown)
        evidence = first.evidence if alike else {"ranks": [each.evidence for each in shown]}
        if not same:
            evidence = {**evidence, "shown": [each.value for each in shown]}
        merged[name] = Observation(first.value if same else None, evidence)
    return merged


def _disagree(rank: int, what: str, found: Any = None, expected: Any = None) -> XdError:
    return XdError(f"rank {rank} {what}", status=Status.REFUSED, code="ranks-disagree", found=found, expected=expected)
