"""What each token is credited with in an update: advantages as they are given, or made of rewards."""

from __future__ import annotations

import os
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from libxd import at_hand, columns, sequences
from libxd.columns import Layout
from libxd.errors import Status, XdError
from libxd.functional import advantages, estimators, gae, rewards
from libxd.functional.segments import Segments
from libxd.pairs import Pair


@dataclass(frozen=True)
class Credit:
    """Advantages: `values` float64 [B] (level "sequence") or [T] ("token"; where inactive they mean nothing).

    source: "advantages" or "rewards"; estimator, groups and constant_groups (those whose rewards are all equal, so that
    nothing is learnt from them) of rewards alone.
    """

    level: str
    values: np.ndarray
    source: str
    estimator: str | None = None
    groups: int | None = None
    constant_groups: int | None = None

    def at(self, places: np.ndarray, sequences: np.ndarray) -> np.ndarray:
        """float64 [N]: those of the tokens at flat indices `places`, in `sequences` (int64 [N] each)."""
        return self.values[places if self.level == "token" else sequences]


def of_advantages(path: str | os.PathLike[str], layout: Layout) -> Credit:
    """The advantages of a file, a sequence or a token. XdError as `columns.read`."""
    column = columns.read(path, "advantage", layout)
    return Credit(column.level, column.values, "advantages")


def of_rewards(
    path: str | os.PathLike[str],
    layout: Layout,
    *,
    estimator: str = "grpo",
    group: str | None = None,
    prompt_index: Sequence[int] | None = None,
    overlong: tuple[int, int] | None = None,
) -> Credit:
    """Advantages of a file's rewards, one a sequence, by an estimator that needs no values of a critic.

    Samples of one group are those with an equal value in the file's column `group`, else in prompt_index [B]. overlong:
    the longest response and the cache of the soft overlong punishment, in active tokens. XdError 2 where groups are
    needed and there are none; 65 for a group of one, or as `columns.read`.
    """
    where = str(path)
    column = columns.read(path, "reward", layout, group=group)
    if column.level != "sequence":
        raise XdError("rewards are a sequence's, one each", code="bad-column", where=where,
                      found=f"{len(column.values)} tokens", expected=layout.sequences)  # fmt: skip
    lengths = layout.lengths()
    values = column.values + _overlong(lengths, overlong)
    if estimators.NEEDS[estimator] != "groups":
        return Credit("sequence", _reinforce(values, lengths, where), "rewards", estimator)
    groups = _groups(column.groups if group is not None else prompt_index, where, estimator)
    made = {
        "grpo": lambda: advantages.grpo(values, groups),
        "dr_grpo": lambda: advantages.dr_grpo(values, groups),
        "rloo": lambda: advantages.rloo(values, groups),
        "reinforce_plus_plus_baseline": lambda: _reinforce(advantages.dr_grpo(values, groups), lengths, where),
    }[estimator]()
    varied = np.unique(groups.index[advantages.dr_grpo(values, groups) != 0])
    return Credit("sequence", made, "rewards", estimator, groups.size, groups.size - len(varied))


def of_values(
    path: str | os.PathLike[str],
    values_path: str | os.PathLike[str],
    layout: Layout,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    overlong: tuple[int, int] | None = None,
) -> Credit:
    """Generalised advantages, one a token, of a file's rewards and of a critic's values, one a token.

    A sequence's reward stands at its last active token. overlong: as `of_rewards`, at that token. XdError 65 for values
    that are not a token's, or as `columns.read`; 2 for a discount out of 0 to 1.
    """
    for name, number in (("gamma", gamma), ("lambda", lam)):
        if not 0 <= number <= 1:
            raise XdError("is from 0 to 1", status=Status.USAGE, code="usage", where=f"--discount {name}", found=number)
    values = columns.read(values_path, "value", layout)
    if values.level != "token":
        raise XdError("values are a token's, one each", code="bad-column", where=str(values_path),
                      found=f"{len(values.values)} sequences")  # fmt: skip
    given, lengths = columns.read(path, "reward", layout), layout.lengths()
    places = np.flatnonzero(layout.active)
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    ends, some = bounds[1:] - 1, lengths > 0
    earned = given.values[places] if given.level == "token" else np.zeros(len(places))
    if given.level == "sequence":
        earned[ends[some]] = given.values[some]
    earned[ends[some]] += _overlong(lengths, overlong)[some]
    made = np.full(len(layout.active), np.nan)
    made[places], _ = gae.gae(earned, values.values[places], bounds, gamma, lam)
    return Credit("token", made, "rewards", "gae")


def prompt_index(pair: Pair, path: str | os.PathLike[str] | None = None) -> Sequence[int] | None:
    """int32 [B]: the prompt of each sequence, from the sequences file at `path`, else from where an attempt says it is;
    None where nothing does. XdError 66 when it is not there, 65 for other tokens than the pair's."""
    if path is None and pair.attempt is not None:
        row = pair.attempt.requested()
        return at_hand.sequences(row).prompt_index if row["locations"]["sequences"] is not None else None
    if path is None:
        return None
    found = sequences.read(path)
    for name in ("cu_seqlens", "token_ids"):
        if not np.array_equal(getattr(found, name), getattr(pair.rollout, name)):
            raise XdError("holds other tokens than were scored", code="other-tokens", where=str(path), path=f"/{name}",
                          expected=f"those of {pair.rollout.path}")  # fmt: skip
    return found.prompt_index


def _overlong(lengths: np.ndarray, given: tuple[int, int] | None) -> np.ndarray:
    """What is added to rewards, float64 [B]. XdError 2 for a cache that is none."""
    if given is None:
        return np.zeros(len(lengths))
    try:
        return rewards.soft_overlong(lengths, *given)
    except ValueError as error:
        raise XdError(str(error), status=Status.USAGE, code="usage", where="--overlong") from error


def _reinforce(values: np.ndarray, lengths: np.ndarray, where: str) -> np.ndarray:
    try:
        return advantages.reinforce_plus_plus(values, lengths)
    except ValueError as error:
        raise XdError(str(error), code="bad-column", where=where) from error


def _groups(keys: Sequence[Any] | None, where: str, estimator: str) -> Segments:
    if keys is None:
        raise XdError(f"{estimator} compares the samples of a group, and nothing says the groups", status=Status.USAGE,
                      code="no-groups", where=where,
                      hint="--group COLUMN names a column of the rewards, --sequences the frozen tokens")  # fmt: skip
    numbers: dict[Hashable, int] = {}
    index = np.array([numbers.setdefault(_key(key), len(numbers)) for key in keys], np.int64)
    groups = Segments(index, len(numbers))
    if (alone := np.flatnonzero(groups.counts == 1)).size:
        sequence = int(np.flatnonzero(index == alone[0])[0])
        raise XdError("a group of one: no other sample to compare it with", code="group-of-one", where=where,
                      found=f"group {keys[sequence]} with sequence {sequence} alone, {alone.size} such in all",
                      hint="reinforce_plus_plus needs no groups")  # fmt: skip
    return groups


def _key(value: Any) -> Hashable:
    return value if isinstance(value, Hashable) else repr(value)
