"""Step series: attempts in the order of their steps. A jump, and whether both sides took each update."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from libxd.doctor.evidence import Evidence
from libxd.doctor.finding import FACT, SHAPE, Finding, Rule
from libxd.doctor.statistics import ranks
from libxd.rundir import SIDES

_TIMES, _ABOVE, _EACH = 2.0, 0.9, 8

RULE = Rule(
    "series",
    ("stale-weights", "jump"),
    "Of attempts in the order of their steps (--series), which imports say, and else as they are given: one side's "
    "weights changed from a step to the next, by the digests that were seen, and the other's did not: stale-weights. "
    "Otherwise a step from which on the sequences' mean |d| have a median at least 2 times that before, and a sequence "
    "from there on is above one from before in 90 % of the pairs of them, of 8 sequences or more on either side: jump.",
    "Digests: none. A jump: 8 sequences against 8 of one distribution do so once in 300 times by the pairs alone.",
    least_sequences=16,
)


def ordered(evidences: Sequence[Evidence]) -> tuple[list[Evidence], str | None]:
    """By the steps that imported attempts say, and None; else as they are given, and why. XdError for bad records."""
    steps = [_step(each) for each in evidences]
    if None in steps:
        return list(evidences), "in the order given: not every attempt says its step"
    places = sorted(range(len(steps)), key=steps.__getitem__)  # stable: ranks of one step stay as they are given
    return [evidences[place] for place in places], None


def _step(evidence: Evidence) -> int | None:
    """What `libxd.write_scores` was told; None where nothing says it, or the sides say two."""
    if evidence.attempt is None:
        return None
    said = {(evidence.attempt.readback(side)["engine"].get("imported") or {}).get("step") for side in SIDES}
    step = said.pop() if len(said) == 1 else None
    return step if type(step) is int else None


def examine(evidences: Sequence[Evidence]) -> list[Finding]:
    """evidences: a step each, in order."""
    stale = _stale(evidences)
    jump = _jump(evidences)
    if stale:
        lines = stale + (jump[1] if jump else [])
        return [Finding("stale-weights", FACT, "an update reached one side alone", lines, [
            "see that weights are pushed after every update and after a resume, and that adapters are merged in",
        ])]  # fmt: skip
    if jump is None:
        return []
    step, lines = jump
    updated = _updated(evidences)
    if updated is False:
        lines.append("no side's weights changed over these steps: the jump is no update's (an lr = 0 control)")
        return [Finding("jump", SHAPE, "the difference jumps at a step without any update", lines, [
            f"look at what else changed at step {step}: lengths, batches, a restart of an engine",
        ])]  # fmt: skip
    return [Finding("jump", SHAPE, "the difference jumps at a step", lines, [
        "run the same steps with lr = 0: a jump that is gone is the update's, one that stays is not",
        "compare the two sides' weights by digest after that step (xd-score records them)",
    ])]  # fmt: skip


def _weights(evidence: Evidence, side: str) -> str | None:
    return next(file for file in evidence.files if file.side == side).metadata["observed"]["weights_before"]


def _stale(evidences: Sequence[Evidence]) -> list[str]:
    lines = []
    for step in range(1, len(evidences)):
        digests = {side: [_weights(evidences[at], side) for at in (step - 1, step)] for side in SIDES}
        if any(None in pair for pair in digests.values()):
            continue
        changed = [side for side, (before, after) in digests.items() if before != after]
        if len(changed) == 1:
            other = next(side for side in SIDES if side not in changed)
            mean = evidences[step].brief.mean if evidences[step].brief.count else float("nan")
            lines.append(f"step {step}: weights changed on {changed[0]} and not on {other}; mean |training - rollout| "
                         f"{mean:.3g}")  # fmt: skip
    return lines


def _updated(evidences: Sequence[Evidence]) -> bool | None:
    """Whether any side's weights changed; None where they were not seen."""
    seen = [[_weights(each, side) for each in evidences] for side in SIDES]
    if any(None in digests for digests in seen):
        return None
    return any(len(set(digests)) > 1 for digests in seen)


def _jump(evidences: Sequence[Evidence]) -> tuple[int, list[str]] | None:
    means = [each.brief.by_sequence for each in evidences]
    best: tuple[float, int] | None = None
    for step in range(1, len(means)):
        before, after = np.concatenate(means[:step]), np.concatenate(means[step:])
        if min(before.size, after.size) < _EACH or not np.median(before):
            continue
        times = float(np.median(after) / np.median(before))
        placed = ranks(np.concatenate([before, after]))[before.size :]
        above = (placed.sum() - after.size * (after.size - 1) / 2) / (before.size * after.size)
        if times >= _TIMES and above >= _ABOVE and (best is None or times > best[0]):
            best = times, step
    if best is None:
        return None
    times, step = best
    said = ", ".join(f"{each.mean():.3g}" if each.size else "-" for each in means)
    return step, [
        f"from step {step} (counted from 0) on, {times:.3g} times as much: mean |training - rollout| by step {said}",
    ]
