"""Masks: active tokens that no policy sampled, or sampled ones that are left out."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from libxd.doctor.evidence import Evidence
from libxd.doctor.finding import FACT, Finding, Rule

RULE = Rule(
    "masks",
    ("masks",),
    "Masks that differ between the sides. A sequence's first token active. With the sequences file: a prompt token "
    "active. With the tokenizer: an active end token right behind another, as padding by that id is; an active padding "
    "id that is no end token; a turn of another role (user, system, tool) opened by an active token; and end tokens "
    "that are left out, in every sequence that ends with one behind an active token.",
    "None: facts, under the usual meaning of a mask. A mask that leaves end tokens out on purpose is named, too.",
)


def examine(evidence: Evidence) -> Finding | None:
    if not evidence.side_by_side:
        return None
    lines = [*_differ(evidence), *_first(evidence), *_prompt(evidence), *_special(evidence)]
    if not lines:
        return None
    return Finding("masks", FACT, "the active mask holds what was not sampled, or lacks what was", lines, [
        "print one sequence's tokens beside its mask, and mend the mask before any number is looked at",
    ])  # fmt: skip


def _differ(evidence: Evidence) -> list[str]:
    rollout, training = (file.active_mask for file in evidence.files)
    differ = evidence.find(lambda where: rollout[where] != training[where])
    if not differ.size:
        return []
    ours = evidence.find(lambda where: rollout[where] & ~training[where]).size
    line = (f"{differ.size} tokens are active on one side alone: {ours} on rollout, {differ.size - ours} on training; "
            f"first {evidence.place(differ.first[0])}")  # fmt: skip
    if differ.size == rollout.size:
        line += "; one mask is the other's inverse"
    elif any(not evidence.find(lambda where, by=step: _moved(rollout, where, by) != training[where]).size
             for step in (-1, 1)):  # fmt: skip
        line += "; one mask is the other's, moved by one token"
    return [line]


def _moved(values: np.ndarray, where: slice, step: int) -> np.ndarray:
    """A block of `values` [T] rolled by `step`."""
    return values[np.arange(where.start - step, where.stop - step) % values.size]


def _first(evidence: Evidence) -> list[str]:
    wrong = evidence.find(lambda where: evidence.active(where) & evidence.marked(evidence.firsts, where))
    return [f"the first token of {wrong.size} sequences is active, and nothing comes before it"] if wrong.size else []


def _prompt(evidence: Evidence) -> list[str]:
    known = evidence.known.sequences
    if known is None or not np.array_equal(known.cu_seqlens, evidence.cu_seqlens):
        return []
    ends = evidence.cu_seqlens[:-1] + known.prompt_lens

    def prompt(where: slice) -> np.ndarray:
        index = np.arange(where.start, where.stop)
        return index < ends[np.searchsorted(evidence.cu_seqlens, index, side="right") - 1]

    wrong = evidence.find(lambda where: evidence.active(where) & prompt(where))
    if not wrong.size:
        return []
    line = f"{wrong.size} prompt tokens are active; first {evidence.place(wrong.first[0])}"
    if wrong.size == evidence.find(evidence.active).size:
        line += "; no response token is: the mask is inverted"
    return [line]


def _special(evidence: Evidence) -> list[str]:
    vocabulary = evidence.known.vocabulary
    if vocabulary is None:
        return []
    ids = evidence.rollout.token_ids
    eos = list(vocabulary.eos)
    lines = []
    if vocabulary.pad is not None and vocabulary.pad not in vocabulary.eos:
        pads = evidence.find(lambda where: evidence.active(where) & (ids[where] == vocabulary.pad))
        if pads.size:
            where = evidence.place(pads.first[0])
            lines.append(f"{pads.size} active tokens are padding (id {vocabulary.pad}); first {where}")

    def ends(where: slice) -> np.ndarray:
        return np.isin(ids[where], eos)

    behind = evidence.find(lambda where: evidence.active(where) & ends(where) & _before(
        evidence, where, lambda last: evidence.active(last) & ends(last)
    ))  # fmt: skip
    if behind.size:
        lines.append(f"{behind.size} end tokens are active behind an active end token, as padding by that id is; first "
                     f"{evidence.place(behind.first[0])}")  # fmt: skip
    lasts = (evidence.cu_seqlens[1:] - 1)[np.diff(evidence.cu_seqlens) > 1]

    def closing(where: slice) -> np.ndarray:
        return evidence.marked(lasts, where) & ends(where) & _before(
            evidence, where, lambda last: evidence.active(last) & ~ends(last)
        )  # fmt: skip

    closed = evidence.find(closing)
    if closed.size and not evidence.find(lambda where: closing(where) & evidence.active(where)).size:
        lines.append(f"the end token of all {closed.size} sequences that end with one behind an active token is not "
                     f"active; first {evidence.place(closed.first[0])}")  # fmt: skip
    return lines + _roles(evidence)


def _before(evidence: Evidence, where: slice, holds: Callable[[slice], np.ndarray]) -> np.ndarray:
    """Whether the token before each of a block is so, in the same sequence: bool [N]."""
    before = np.zeros(where.stop - where.start, bool)
    begin = max(where.start - 1, 0)
    before[begin + 1 - where.start :] = holds(slice(begin, where.stop - 1))
    return before & ~evidence.marked(evidence.firsts, where)


def _roles(evidence: Evidence) -> list[str]:
    vocabulary = evidence.known.vocabulary
    assert vocabulary is not None
    ids = evidence.rollout.token_ids
    openers, others = list(vocabulary.openers), list(vocabulary.other_roles)
    seen: set[int] = set()

    def opened(where: slice) -> np.ndarray:
        """The opening token of a turn whose role, the token behind it, is active and another's."""
        behind = slice(where.start + 1, min(where.stop + 1, ids.size))
        roles = evidence.active(behind) & np.isin(ids[behind], others)
        wrong = np.zeros(where.stop - where.start, bool)
        wrong[: roles.size] = roles & np.isin(ids[where][: roles.size], openers)
        seen.update(ids[behind][wrong[: roles.size]].tolist())
        return wrong

    wrong = evidence.find(opened)
    if not wrong.size:
        return []
    words = sorted({vocabulary.other_roles[role] for role in seen})
    return [f"{wrong.size} turns of another role ({', '.join(words)}) are active; first "
            f"{evidence.place(wrong.first[0])}"]  # fmt: skip
