"""Masks: active tokens that no policy sampled, or sampled ones that are left out."""

from __future__ import annotations

import numpy as np

from libxd.doctor.evidence import Evidence
from libxd.doctor.finding import FACT, Finding, Rule

RULE = Rule(
    "masks",
    ("masks",),
    "Masks that differ between the sides. A sequence's first token active. With the sequences file: a prompt token "
    "active. With the tokenizer: an active token behind an active end token that closes the last turn, an active "
    "padding id that is no end token, a turn of another role (user, system, tool) opened by an active token, and end "
    "tokens that are left out although the token before each is active, in every sequence that has one.",
    "None: facts, under the usual meaning of a mask. A mask that trains on end tokens of inner turns or leaves them "
    "out on purpose is named, too.",
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
    behind, left_out, closed = [], [], 0
    for begin, end in zip(evidence.cu_seqlens[:-1], evidence.cu_seqlens[1:], strict=True):
        cells = np.arange(begin, end)
        runs = cells[ends[begin:end]]
        repeated = runs[1:][(np.diff(runs) == 1) & active[runs[1:]] & active[runs[:-1]]]
        behind += repeated.tolist()  # an end token right behind an active one: padding whose id is the end's
        last = runs[runs > begin]
        if last.size and active[last[-1] - 1] and not ends[last[-1] - 1]:
            closed += 1
            if not active[last[-1]]:
                left_out.append(int(last[-1]))
    if behind:
        lines.append(f"{len(behind)} end tokens are active behind an active end token, as padding by that id is; first "
                     f"{evidence.place(behind[0])}")  # fmt: skip
    if closed and len(left_out) == closed:
        lines.append(f"the end token of all {closed} sequences that have one behind an active token is not active; "
                     f"first {evidence.place(left_out[0])}")  # fmt: skip
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
