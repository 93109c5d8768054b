"""Masks: active tokens that no policy sampled, or sampled ones that are left out."""

from __future__ import annotations

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
    differ = np.flatnonzero(rollout != training)
    if not differ.size:
        return []
    line = (f"{differ.size} tokens are active on one side alone: {int(np.count_nonzero(rollout[differ]))} on rollout, "
            f"{int(np.count_nonzero(training[differ]))} on training; first {evidence.place(differ[0])}")  # fmt: skip
    if differ.size == rollout.size:
        line += "; one mask is the other's inverse"
    elif any(np.array_equal(np.roll(rollout, step), training) for step in (-1, 1)):
        line += "; one mask is the other's, moved by one token"
    return [line]


def _first(evidence: Evidence) -> list[str]:
    firsts = evidence.cu_seqlens[:-1][np.diff(evidence.cu_seqlens) > 0]
    wrong = firsts[evidence.both_active[firsts]]
    return [f"the first token of {wrong.size} sequences is active, and nothing comes before it"] if wrong.size else []


def _prompt(evidence: Evidence) -> list[str]:
    known = evidence.known.sequences
    if known is None or not np.array_equal(known.cu_seqlens, evidence.cu_seqlens):
        return []
    starts = evidence.cu_seqlens[:-1]
    position = np.arange(evidence.both_active.size) - np.repeat(starts, np.diff(evidence.cu_seqlens))
    in_prompt = position < np.repeat(known.prompt_lens, np.diff(evidence.cu_seqlens))
    wrong = np.flatnonzero(evidence.both_active & in_prompt)
    if not wrong.size:
        return []
    line = f"{wrong.size} prompt tokens are active; first {evidence.place(wrong[0])}"
    if wrong.size == np.count_nonzero(evidence.both_active):
        line += "; no response token is: the mask is inverted"
    return [line]


def _special(evidence: Evidence) -> list[str]:
    vocabulary = evidence.known.vocabulary
    if vocabulary is None:
        return []
    ids, active = evidence.rollout.token_ids, evidence.both_active
    lines = []
    ends = np.isin(ids, list(vocabulary.eos))
    if vocabulary.pad is not None and vocabulary.pad not in vocabulary.eos:
        pads = np.flatnonzero(active & (ids == vocabulary.pad))
        if pads.size:
            where = evidence.place(pads[0])
            lines.append(f"{pads.size} active tokens are padding (id {vocabulary.pad}); first {where}")
    starts, lasts = evidence.cu_seqlens[:-1], evidence.cu_seqlens[1:] - 1
    before = np.zeros(ids.size, bool)  # an active end token is right before, in the same sequence
    before[1:] = (active & ends)[:-1]
    before[starts[starts < ids.size]] = False
    behind = np.flatnonzero(active & ends & before)
    if behind.size:
        lines.append(f"{behind.size} end tokens are active behind an active end token, as padding by that id is; first "
                     f"{evidence.place(behind[0])}")  # fmt: skip
    lasts = lasts[lasts > starts]
    closed = lasts[ends[lasts] & active[lasts - 1] & ~ends[lasts - 1]]
    if closed.size and not active[closed].any():
        lines.append(f"the end token of all {closed.size} sequences that end with one behind an active token is not "
                     f"active; first {evidence.place(closed[0])}")  # fmt: skip
    return lines + _roles(evidence)


def _roles(evidence: Evidence) -> list[str]:
    vocabulary = evidence.known.vocabulary
    assert vocabulary is not None
    ids = evidence.rollout.token_ids
    opened = np.flatnonzero(np.isin(ids[:-1], list(vocabulary.openers)) & evidence.both_active[1:])
    wrong = [i for i in opened if int(ids[i + 1]) in vocabulary.other_roles]
    if not wrong:
        return []
    words = sorted({vocabulary.other_roles[int(ids[i + 1])] for i in wrong})
    return [f"{len(wrong)} turns of another role ({', '.join(words)}) are active; first {evidence.place(wrong[0])}"]
