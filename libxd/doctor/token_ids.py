"""Token identity: other ids on the two sides, another begin token, ids that the vocabulary does not have."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from libxd import scores
from libxd.doctor.evidence import Evidence
from libxd.doctor.finding import FACT, Finding, Rule
from libxd.doctor.places import Places
from libxd.scores import ScoreFile

RULE = Rule(
    "token-ids",
    ("double-bos", "token-ids", "id-beyond-vocabulary"),
    "An id that differs between the sides, in any token, active or not. One sequence that is the other's with its "
    "first id once more: double-bos. Both begin with the begin token twice, where the tokenizer is known: double-bos. "
    "An id at or beyond the vocabulary's size, where that is known: id-beyond-vocabulary.",
    "None: facts.",
)
_SHOWN = 3
_RELEASE_EVERY = 4096  # sequences


def examine(evidence: Evidence) -> Finding | None:
    return _beyond(evidence) or _doubled(evidence) or _differing(evidence)


def _beyond(evidence: Evidence) -> Finding | None:
    size = evidence.known.vocabulary.size if evidence.known.vocabulary else None
    if size is None:
        return None
    lines = []
    for file in evidence.files:
        wrong = Places()
        for where in scores.blocks(file.tokens, file):
            ids = file.token_ids[where]
            wrong.add(where.start + np.flatnonzero((ids >= size) | (ids < 0)))
        if wrong.size:
            first = wrong.first[0]
            lines.append(
                f"{file.side}: {wrong.size} ids beyond the vocabulary of {size}, first {int(file.token_ids[first])} "
                f"at {_place(file, first)}"
            )
    if not lines:
        return None
    return Finding("id-beyond-vocabulary", FACT, "ids that the model has no row for", lines, [
        "check which tokenizer made the ids, and added tokens that the checkpoint was not resized for",
    ])  # fmt: skip


def _doubled(evidence: Evidence) -> Finding | None:
    """Sequences of one side that are the other's with their first id once more; or both sides', by the tokenizer."""
    rollout, training = evidence.files
    count = min(rollout.cu_seqlens.size, training.cu_seqlens.size) - 1
    doubled = {
        file.side: [s for s in range(count) if _is_doubled(_ids(file, s), _ids(other, s))]
        for file, other in ((rollout, training), (training, rollout))
    }
    lines = [
        f"{side}: {len(found)} of {count} sequences begin with id {int(_ids(_file(evidence, side), found[0])[0])} "
        "twice, and are the other side's but for that"
        for side, found in doubled.items()
        if found
    ]
    bos = evidence.known.vocabulary.bos if evidence.known.vocabulary else None
    if not lines and bos is not None and (twice := sum(_begins_with(rollout, count, bos))):
        lines = [f"both sides: {twice} of {count} sequences begin with the begin token {bos} twice"]
    if not lines:
        return None
    return Finding("double-bos", FACT, "a begin token was put before ids that had one", lines, [
        "tokenise with add_special_tokens=False where a chat template has written the begin token",
    ])  # fmt: skip


def _begins_with(file: ScoreFile, count: int, bos: int) -> Iterator[bool]:
    """Of the first `count` sequences, whether each begins with that id twice."""
    for sequence in range(count):
        yield _ids(file, sequence)[:2].tolist() == [bos, bos]
        if sequence % _RELEASE_EVERY == _RELEASE_EVERY - 1:
            file.release()


def _file(evidence: Evidence, side: str) -> ScoreFile:
    return next(file for file in evidence.files if file.side == side)


def _is_doubled(ids: np.ndarray, others: np.ndarray) -> bool:
    return (
        ids.size == others.size + 1
        and others.size > 0
        and ids[0] == ids[1]
        and np.array_equal(ids[1:], others)
    )  # fmt: skip


def _differing(evidence: Evidence) -> Finding | None:
    rollout, training = evidence.files
    count = min(rollout.cu_seqlens.size, training.cu_seqlens.size) - 1
    if evidence.side_by_side:
        differ = evidence.find(lambda where: rollout.token_ids[where] != training.token_ids[where])
        if not differ.size:
            return None
        active = evidence.find(
            lambda where: evidence.active(where) & (rollout.token_ids[where] != training.token_ids[where])
        ).size
        lines = [f"{differ.size} of {rollout.tokens} ids differ, {active} of them at active tokens"]
        lines += [f"{evidence.place(i)} on rollout, id {int(training.token_ids[i])} on training"
                  for i in differ.first]  # fmt: skip
        if active == differ.size and _neighbours(evidence):
            lines.append("there the one side's id is the other's next or last one: labels are off by one")
    else:
        lines = []
        for s in range(count):
            ours, theirs = _ids(rollout, s), _ids(training, s)
            shared = min(ours.size, theirs.size)
            unequal = np.flatnonzero(ours[:shared] != theirs[:shared])
            if unequal.size:
                at = int(unequal[0])
                lines.append(f"sequence {s} differs from position {at} on: id {int(ours[at])} on rollout, "
                             f"{int(theirs[at])} on training")  # fmt: skip
        if not lines:
            return None
        lines = lines[:_SHOWN] + ([f"and {len(lines) - _SHOWN} sequences more"] if len(lines) > _SHOWN else [])
    return Finding("token-ids", FACT, "the two sides hold other tokens", lines,
                   ["hand the rollout's own ids on to training instead of tokenising its text again",
                    "look at templates: stripped reasoning, re-tokenised turns, another chat template"])  # fmt: skip


def _neighbours(evidence: Evidence) -> bool:
    """Whether the ids of one side that differ are the other's next ones, or its last ones."""
    rollout, training = (file.token_ids for file in evidence.files)
    count, equal = 0, {-1: 0, 1: 0}
    for where in evidence.blocks():
        inner = where.start + np.flatnonzero(rollout[where] != training[where])
        inner = inner[(inner > 0) & (inner < rollout.size - 1)]
        count += inner.size
        for step in equal:
            equal[step] += int(np.count_nonzero(rollout[inner + step] == training[inner]))
    return count > 1 and any(number / count > 0.9 for number in equal.values())


def _ids(file: ScoreFile, sequence: int) -> np.ndarray:
    return file.token_ids[file.cu_seqlens[sequence] : file.cu_seqlens[sequence + 1]]


def _place(file: ScoreFile, index: int) -> str:
    sequence = int(np.searchsorted(file.cu_seqlens, index, side="right")) - 1
    return f"sequence {sequence}, position {index - int(file.cu_seqlens[sequence])}"
