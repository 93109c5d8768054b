"""A side's scores in one file, or in shards that are read as one: their names, their headers, how they are written.

A shard is a score file of some whole sequences, in order, with boundaries of its own from 0. All that is said of the
tokens in its header is of the whole: the headers of a set differ in the shard's number alone.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from libxd import schema, tensors
from libxd.errors import Status, XdError, of_exception
from libxd.tensors import TensorFile

if TYPE_CHECKING:
    import numpy as np

    from libxd.rundir import Attempt

#: tokens above which scores are written in shards of no more than so many (2.4 GB), but for a sequence that is longer
SHARD_TOKENS = 1 << 28
#: of a set, by the digits of their names
MOST_SHARDS = 99_999
#: tensors of a score file that hold a number a sequence; all others but cu_seqlens hold one a token
OF_SEQUENCES = ("rewards", "prompt_index", "versions")

_SHARD = re.compile(
    r"score_(?P<side>rollout|training)-(?P<number>[0-9]{5})-of-(?P<of>(?!00000)[0-9]{5})\.safetensors\Z"
)


def whole(side: str) -> str:
    """The name of a side's scores in one file."""
    return f"score_{side}.safetensors"


def shard(side: str, number: int, of: int) -> str:
    """The name of one shard, counted from 1."""
    return f"score_{side}-{number:05d}-of-{of:05d}.safetensors"


def present(names: Iterable[str], side: str) -> list[str]:
    """Those of the names that are of a side's scores, sorted."""
    return sorted(name for name in names if name == whole(side) or (_place(name) or ("",))[0] == side)


def wanted(names: Iterable[str], side: str) -> tuple[str, ...]:
    """The files that a side's scores must be, by what is there of them: one, or all shards of a set that was begun."""
    found = present(names, side)
    if not found or whole(side) in found:
        return (whole(side),)
    of = _place(found[0])[2]
    return tuple(shard(side, number, of) for number in range(1, of + 1))


def complete(names: Iterable[str], side: str, where: str) -> tuple[str, ...]:
    """`wanted`, found to be there; the one file where nothing is. where: what holds them, for messages.

    XdError 66 when shards of the set are missing, 65 when files are of another set, or stand beside the whole.
    """
    found = present(names, side)
    files = wanted(found, side)
    if stray := [name for name in found if name not in files]:
        raise XdError(f"the {side} side's scores lie there more than once: {stray[0]} is none of {_set(files)}",
                      code="shards-mixed", where=where, hint="take a new attempt")  # fmt: skip
    if found and (missing := [name for name in files if name not in found]):
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise XdError(f"the {side} side is not scored yet: it lacks {len(missing)} of {len(files)} shards",
                      status=Status.MISSING, code="shards-missing", where=where, found=", ".join(missing[:3]) + more,
                      hint="score the side again: the shards that stand are kept")  # fmt: skip
    return files


def beside(path: str | os.PathLike[str]) -> tuple[Path, ...]:
    """The files of the scores that a path names: a shard stands for its set, any other file for itself."""
    path = Path(path)
    if (place := _place(path.name)) is None:
        return (path,)
    try:
        names = os.listdir(path.parent)
    except OSError as error:
        raise of_exception(error, str(path)) from error
    return tuple(path.parent / name for name in complete({*names, path.name}, place[0], str(path.parent)))


def metadata(files: Sequence[TensorFile]) -> dict[str, Any]:
    """What the header of a side's files says of the whole. XdError 65 unless each is the shard that its name says, and
    all say the same of the rest."""
    shared: dict[str, Any] = {}
    for file in files:
        about = schema.validate("score_metadata", file.metadata, str(file.path))
        said = about.pop("shard", None)
        place = _place(file.path.name)
        named = place and {"number": place[1], "of": place[2]}
        if said != named:
            raise XdError("is not the shard that its name says", code="foreign-file", where=str(file.path),
                          path="/xd/shard", found=_words(said), expected=_words(named))  # fmt: skip
        shared = shared or about
        if about != shared:
            key = next(key for key in sorted(about.keys() | shared.keys()) if about.get(key) != shared.get(key))
            raise XdError(f"is a shard of other scores than {files[0].path.name}", code="foreign-file",
                          where=str(file.path), path=f"/xd/{key}")  # fmt: skip
    return shared


def read_metadata(attempt: Attempt, side: str) -> dict[str, Any]:
    """`metadata` of a side of an attempt; needs no numpy."""
    files: list[TensorFile] = []
    try:
        for path in attempt.scores(side):
            files.append(TensorFile(path))
        return metadata(files)
    finally:
        for file in files:
            file.close()


def write(
    attempt: Attempt, side: str, arrays: dict[str, np.ndarray], about: dict[str, Any], most: int = SHARD_TOKENS
) -> bool:
    """Publish a side's scores: one file, or of more than `most` tokens shards of whole sequences, one after another.

    The files depend on the arguments alone, so that who was stopped between two shards writes the rest. False: all were
    there. XdError 73 when scores stand there that are cut otherwise, or other ones.
    """
    where = str(attempt)
    cuts = list(whole_sequences(arrays["cu_seqlens"], most))
    if len(cuts) > MOST_SHARDS:
        raise XdError("more shards than a name can count", status=Status.USAGE, code="too-many-shards", where=where,
                      found=len(cuts), expected=f"at most {MOST_SHARDS}",
                      hint="--shard-tokens larger")  # fmt: skip
    names = [shard(side, number, len(cuts)) for number in range(1, len(cuts) + 1)] if len(cuts) > 1 else [whole(side)]
    for name in names:
        attempt.refuse_growth(name)
    if stray := [name for name in present(attempt.names(), side) if name not in names]:
        raise XdError(f"the scores there are cut otherwise and were kept: {stray[0]}", status=Status.CONFLICT,
                      code="output-differs", where=where, found=stray[0], expected=_set(names),
                      hint="score with the --shard-tokens of before, or take a new attempt")  # fmt: skip
    if len(names) == 1:
        return tensors.write(attempt.file(names[0]), arrays, about)
    written = False
    for number, (name, cut) in enumerate(zip(names, cuts, strict=True), 1):
        said = {**about, "shard": {"number": number, "of": len(names)}}
        written |= tensors.write(attempt.file(name), _part(arrays, cut), said)
    return written


def whole_sequences(cu_seqlens: np.ndarray, most: int) -> Iterator[slice]:
    """Sequences in order, as many together as have up to `most` tokens, at least one: slices of their numbers."""
    first, end = 0, len(cu_seqlens) - 1
    while first < end:
        last = int(cu_seqlens.searchsorted(cu_seqlens[first] + most, side="right")) - 1
        yield slice(first, max(last, first + 1))
        first = max(last, first + 1)


def _part(arrays: dict[str, np.ndarray], sequences: slice) -> dict[str, np.ndarray]:
    bounds = arrays["cu_seqlens"][sequences.start : sequences.stop + 1]
    tokens = slice(int(bounds[0]), int(bounds[-1]))
    parts = {name: array[sequences if name in OF_SEQUENCES else tokens] for name, array in arrays.items()}
    return {**parts, "cu_seqlens": bounds - bounds[0]}


def _place(name: str) -> tuple[str, int, int] | None:
    """Side, number and how many, of a shard's name; None for any other."""
    found = _SHARD.match(name)
    return found and (found["side"], int(found["number"]), int(found["of"]))


def _set(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"


def _words(place: dict[str, int] | None) -> str:
    return f"{place['number']} of {place['of']}" if place else "no shard"
