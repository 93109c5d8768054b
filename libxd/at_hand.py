"""The files that a row names, where it is materialised and scored: they must be what it was planned with.

A row's digests say what its files are, and its counts and sizes what is in them; all of it is compared with the files
themselves before anything is computed from them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from libxd import canon, checkpoint, resolution, strictjson
from libxd import sequences as frozen
from libxd.errors import Status, XdError

if TYPE_CHECKING:
    from libxd.sequences import Sequences

_AGAIN = "put the planned file back, or plan again"


def require(row: Mapping[str, Any]) -> None:
    """XdError 65 unless sequences, checkpoint and the model's sizes are those of the row; 66 when they are not there.

    What the row does not say a place of is not looked for. Files are read once a process.
    """
    location = row["locations"]["sequences"]
    if location is not None:
        _require_sequences(location, row["identity"]["sequences"], _identity(location))
    if row["locations"]["checkpoint"] is not None:
        require_checkpoint(row, weights=True)
        checkpoint.require_sound(row["locations"]["checkpoint"])
        require_model(row["identity"]["model"], resolution.model_facts(row["locations"]["checkpoint"]))


def sequences(row: Mapping[str, Any]) -> Sequences:
    """The frozen tokens of a row, found to be those. XdError 66 when they are not at hand, 65 when they are others."""
    location = row["locations"]["sequences"]
    if location is None:
        raise XdError("the row does not say where its sequences are", status=Status.MISSING, code="missing",
                      path="/locations/sequences")  # fmt: skip
    read = _located(frozen.read, location)
    _require_sequences(location, row["identity"]["sequences"], frozen.identity_of(read))
    return read


def require_checkpoint(row: Mapping[str, Any], *, weights: bool) -> None:
    """XdError 65 when a checkpoint's file is not what was planned with. weights False: but for the tensor files."""
    location, planned = row["locations"]["checkpoint"], row["identity"]["checkpoint"]["files"]
    if location is not None:
        _require_files(location, canon.dumps(planned), weights)


def require_model(declared: Mapping[str, int] | None, found: Mapping[str, int]) -> None:
    """XdError 65 where sizes that a row computes layouts from are not those of its model (`found`: those known)."""
    for name, size in found.items():
        if declared is not None and declared[name] != size:
            raise XdError("is not what the model has", code="model-differs", path=f"/identity/model/{name}",
                          found=declared[name], expected=size, hint="plan again with its own sizes")  # fmt: skip


@cache
def _identity(location: str) -> dict[str, Any]:
    return _located(frozen.identity, location)


def _located(read: Any, location: str) -> Any:
    try:
        return read(location)
    except XdError as error:
        if error.status == Status.MISSING and not os.path.isabs(location):
            error.hint = f"a row's path is relative to where xd-plan ran; this is {os.getcwd()}"
        raise


def _require_sequences(location: str, planned: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    for name, value in found.items():
        if planned[name] != value:
            raise XdError("the sequences have changed since planning", code="digest-differs", where=location,
                          path=f"/{name}", found=value, expected=planned[name], hint=_AGAIN)  # fmt: skip


@cache
def _require_files(location: str, planned: bytes, weights: bool) -> None:
    wanted = strictjson.loads(planned, location)
    if not weights:
        wanted = {name: digest for name, digest in wanted.items() if not resolution.holds_weights(name)}
    found = resolution.checkpoint_files(location, weights=weights)
    for name in sorted(wanted.keys() | found.keys()):
        if wanted.get(name) != found.get(name):
            raise XdError("the checkpoint has changed since planning", code="digest-differs", where=location,
                          path=strictjson.pointer_to("", name), found=found.get(name), expected=wanted.get(name),
                          hint=_AGAIN)  # fmt: skip
