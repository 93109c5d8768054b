"""What the difference between two sides does to a policy update: ratios, KL, corrections, objectives.

Read from a pair of score files, whole sequences at a time, so that memory grows with the longest of them and not with
their number. r = training / rollout of the token that rollout sampled; docs/impact.md defines every figure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from libxd import diagnostics, scores, shards
from libxd.credit import Credit
from libxd.errors import XdError
from libxd.functional import kl, objectives, ratios, segments
from libxd.functional.objectives import Objective
from libxd.functional.segments import Segments
from libxd.impact_settings import DEFAULT, Settings
from libxd.impact_tallies import CorrectionTally, ObjectiveTally, RatioTally
from libxd.pairs import Pair

#: levels at which ratios are reported, and what one ratio of them is made of
LEVELS = {
    "token": "a token's",
    "turn": "geometric mean over a turn",
    "sequence": "geometric mean over a sequence",
    "sequence_product": "product over a sequence",
}


@dataclass(frozen=True)
class Block:
    """Active tokens of whole sequences, `first` and on: flat indices `places`, logprobs of training float64 [N], d =
    log r [N]. `sequences` are counted from the first one of the block."""

    first: int
    places: np.ndarray
    training: np.ndarray
    d: np.ndarray
    sequences: Segments
    turns: Segments

    def at_level(self, level: str) -> np.ndarray:
        """float64: log r of every token, of every turn, or of every sequence that has a token."""
        if level == "token":
            return self.d
        if level == "turn":
            return ratios.geometric_mean(self.d, self.turns)
        made = ratios.geometric_mean if level == "sequence" else ratios.product
        return made(self.d, self.sequences)[self.sequences.counts > 0]


@dataclass(frozen=True)
class Impact:
    """The figures of a pair, in the terms of `xd-impact --json` (schema impact)."""

    pair: Pair
    figures: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        return {
            "schema_version": "xd.impact.v1",
            "attempt": str(self.pair.attempt) if self.pair.attempt else None,
            "scores": {side: str(getattr(self.pair, side).path) for side in ("rollout", "training")},
            **self.figures,
        }


def of_pair(pair: Pair, credit: Credit | None = None, settings: Settings = DEFAULT) -> Impact:
    """The impact of a pair's difference. credit: the advantages; without them what needs none is reported alone.

    XdError 65 when the sides disagree in ids, boundaries or masks, when an active token has no finite logprob, or when
    no token is active.
    """
    levels = {level: RatioTally() for level in LEVELS}
    estimates = {name: dict.fromkeys(terms, 0.0) for name, terms in kl.ESTIMATORS.items()}
    corrected = [CorrectionTally(each) for each in settings.corrections]
    optimised = [ObjectiveTally(each) for each in settings.objectives]
    counts = dict.fromkeys(("active", "turns", "sequences"), 0)
    signs = dict.fromkeys(("positive", "negative", "zero"), 0)
    for block in _blocks(pair, check=True):
        counts["active"] += len(block.d)
        counts["turns"] += block.turns.size
        counts["sequences"] += int(np.count_nonzero(block.sequences.counts))
        for level, tally in levels.items():
            tally.add(block.at_level(level))
        with np.errstate(over="ignore", invalid="ignore"):
            for name, terms in kl.ESTIMATORS.items():
                for estimator, term in terms.items():
                    estimates[name][estimator] += float(term(block.d).sum())
        advantages = None
        if credit is not None:
            advantages = credit.at(block.places, block.first + block.sequences.index)
            for name, count in (("positive", advantages > 0), ("negative", advantages < 0), ("zero", advantages == 0)):
                signs[name] += int(np.count_nonzero(count))
        for tally in corrected:
            tally.add(block.d, block.sequences, advantages)
        penalty = _penalty(block, settings)
        for tally in optimised:
            given = advantages if credit is None or _admits(tally.objective, credit) else None
            tally.add(block.training, block.d, block.sequences, given, penalty)
    if not counts["active"]:
        raise XdError("no token is active, so there is nothing to update", code="nothing-active", where=str(pair))
    _select(pair, levels)
    return Impact(pair, {
        "model_state": model_state(pair),
        "counts": counts | {
            "tokens": pair.tokens, "sequences_without": len(pair.cu_seqlens) - 1 - counts["sequences"],
        },
        "ratio": {level: tally.as_json() for level, tally in levels.items()},
        "kl": {name: {estimator: diagnostics.finite(total / counts["active"]) for estimator, total in totals.items()}
               for name, totals in estimates.items()},
        "advantages": None if credit is None else {
            "source": credit.source, "level": credit.level, "estimator": credit.estimator, "groups": credit.groups,
            "constant_groups": credit.constant_groups, "tokens": signs,
        },
        "beta": settings.beta,
        "corrections": [tally.as_json() for tally in corrected],
        "objectives": [
            tally.as_json(None if credit is None or _admits(tally.objective, credit) else
                          "its ratio is the sequence's, and these advantages are a token's")
            for tally in optimised
        ],
    })  # fmt: skip


def model_state(pair: Pair) -> str | None:
    """Which state of the parameters was scored: an attempt's identity says which it must be, and both files which it
    was; None unless all that there are agree."""
    found = {file.metadata["observed"]["model_state"] for file in (pair.rollout, pair.training)}
    if pair.attempt is not None:
        found.add(pair.attempt.identity()["model_state"])
    return found.pop() if len(found) == 1 else None


def _admits(objective: Objective, credit: Credit) -> bool:
    """A ratio must not be coarser than its advantage: each token would get the mean credit of its sequence."""
    return objective.ratio == "token" or credit.level == "sequence"


def _penalty(block: Block, settings: Settings) -> tuple[np.ndarray, np.ndarray] | None:
    """beta times the penalty's derivative with training's logprobs, and with rollout's: without the difference."""
    if not settings.beta or settings.reference is None:
        return None
    reference = np.asarray(settings.reference[block.places], np.float64)
    if (bad := np.flatnonzero(~np.isfinite(reference))).size:
        raise XdError("the reference has no finite logprob of an active token", code="not-finite",
                      found=f"token {int(block.places[bad[0]])}: {reference[bad[0]]}")  # fmt: skip
    sides = block.training, block.training - block.d
    with np.errstate(over="ignore"):
        of_training, of_rollout = (settings.beta * objectives.k3_penalty(side, reference)[1] for side in sides)
    return of_training, of_rollout


def _select(pair: Pair, levels: dict[str, RatioTally]) -> None:
    """The second pass: exact quantiles."""
    for tally in levels.values():
        tally.select()
    for block in _blocks(pair, check=False):
        for level, tally in levels.items():
            tally.add_again(block.at_level(level))


def _blocks(pair: Pair, check: bool) -> Iterator[Block]:
    """Whole sequences, up to `scores.BLOCK` tokens of them at a time; one that is longer by itself."""
    if check:
        _require_same(pair, "cu_seqlens", 0, len(pair.cu_seqlens))
    for sequences in shards.whole_sequences(pair.cu_seqlens, scores.BLOCK):
        if check:
            begin, end = (int(pair.cu_seqlens[at]) for at in (sequences.start, sequences.stop))
            _require_same(pair, "token_ids", begin, end)
            _require_same(pair, "active_mask", begin, end)
        yield _block(pair, sequences, check)
        for file in (pair.rollout, pair.training):
            file.release()


def _block(pair: Pair, which: slice, check: bool) -> Block:
    bounds = pair.cu_seqlens[which.start : which.stop + 1]
    places = bounds[0] + np.flatnonzero(pair.rollout.active_mask[bounds[0] : bounds[-1]])
    sides = {}
    for side in ("rollout", "training"):
        file = getattr(pair, side)
        sides[side] = file.logprobs[places].astype(np.float64)
        if check and (bad := np.flatnonzero(~np.isfinite(sides[side]))).size:
            sequence, position = diagnostics.locate(int(places[bad[0]]), pair.cu_seqlens)
            raise XdError("an active token has no finite logprob", code="not-finite", where=str(file.path),
                          found=f"sequence {sequence}, position {position}: {sides[side][bad[0]]}")  # fmt: skip
    of_sequence = segments.by_sequence(places, bounds)
    d = ratios.log_ratios(sides["training"], sides["rollout"])
    return Block(which.start, places, sides["training"], d, of_sequence, segments.by_turn(places, of_sequence))


def _require_same(pair: Pair, name: str, begin: int, end: int) -> None:
    """XdError 65 with the first place where the two files disagree."""
    ours, theirs = (getattr(file, name)[begin:end] for file in (pair.rollout, pair.training))
    if len(ours) == len(theirs) and (ours == theirs).all():
        return
    if len(ours) != len(theirs):
        found = f"{len(theirs)} boundaries"
        expected = f"{len(ours)} as on the rollout side"
    else:
        at = int(np.flatnonzero(ours != theirs)[0])
        place = f"boundary {at}"
        if name != "cu_seqlens":
            place = "sequence {}, position {}".format(*diagnostics.locate(begin + at, pair.cu_seqlens))
        found, expected = f"{theirs[at]} at {place}", f"{ours[at]} as on the rollout side"
    raise XdError("the two sides scored other tokens, so no ratio of them means anything", code="other-tokens",
                  where=str(pair.training.path), path=f"/{name}", found=found, expected=expected)  # fmt: skip
