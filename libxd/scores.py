"""A side's scores as evidence: whose they are, whether their tensors can be compared, blocks of them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from libxd import canon, schema, shards
from libxd.errors import XdError
from libxd.joined import Joined, join
from libxd.rundir import Attempt
from libxd.tensors import TensorFile, raw_bytes

#: tokens (or bytes of a digest) that are looked at together; sums are formed block by block, so it is part of the
#: format
BLOCK = 1 << 17
_RELEASE_EVERY = 4  # blocks

_DTYPES = {"token_ids": "int32", "logprobs": "float32", "active_mask": "bool", "cu_seqlens": "int64"}
#: which tensor of the file the observed identity has the digest of
_WITNESSED = {"token_ids": "selected_ids", "cu_seqlens": "cu_seqlens", "active_mask": "active_mask"}


class ScoreFile:
    """`score_<side>.safetensors`, of an attempt or by itself (T tokens, B sequences), or all shards of it as one.

    `path` is the first shard's, then, which stands for them all. `problems` says, as entries of comparison.json's
    artifact_problems, what keeps its numbers from being compared: another dtype, shapes that do not agree with each
    other or with `tokens`. XdError 66 or 65 when it is missing, cannot be parsed, lacks a tensor, or is the other
    side's.
    """

    def __init__(self, paths: Sequence[Path], side: str, tokens: int | None = None) -> None:
        self.side = side
        self.path = paths[0]
        self._files = [TensorFile(path) for path in paths]
        self.metadata = shards.metadata(self._files)
        self._require({"side": side}, "are the other side's")
        self.problems = [
            self._problem("dtype", f"{name} is {wrong[0]}, not {dtype}")
            for name, dtype in _DTYPES.items()
            if (wrong := [found for file in self._files if (found := file.dtype(name)) != dtype])
        ]
        self.tokens = tokens if tokens is not None else int(np.prod(self._shape("token_ids")))
        self.problems += self._shape_problems()
        if not self.problems:
            self.logprobs = self._joined("logprobs")  # float32 [T]
            self.active_mask = self._joined("active_mask")  # bool [T]
            self.token_ids = self._joined("token_ids")  # int32 [T]
            self.cu_seqlens = self._boundaries()  # int64 [B+1]
            self.problems += self._bound_problems()

    @classmethod
    def of(cls, attempt: Attempt, side: str, materialized: dict[str, Any], tokens: int | None) -> ScoreFile:
        """An attempt's. XdError 65, too, when it was written for another case, repeat or execution key."""
        file = cls(attempt.scores(side), side, tokens)
        file._require(
            {key: materialized[key] for key in ("case_id", "repeat", "execution_key")}, "belong to another attempt"
        )
        return file

    @classmethod
    def alone(cls, path: str | os.PathLike[str]) -> ScoreFile:
        """A file by itself, which says whose side it is; a shard stands for all of its set."""
        paths = shards.beside(path)
        with TensorFile(paths[0]) as file:
            about = schema.validate("score_metadata", file.metadata, str(paths[0]))
        return cls(paths, about["side"])

    def _require(self, expected: dict[str, Any], otherwise: str) -> None:
        for key, value in expected.items():
            if self.metadata[key] != value:
                raise XdError(f"the scores {otherwise}", code="foreign-file", where=str(self.path), path=f"/{key}",
                              found=self.metadata[key], expected=value)  # fmt: skip

    def identity(self) -> dict[str, Any]:
        """What `judge.violations` wants to know: metadata, and digests of the tensors that have the right form.

        A tensor of another dtype or shape is a problem of the artifact; its bytes say nothing about identity.
        """
        facts: dict[str, Any] = {"metadata": self.metadata}
        if not self.problems:
            for name in _WITNESSED:
                facts[name] = canon.digest_stream(self._raw_blocks(name))
        return facts

    def require_sound(self) -> None:
        """XdError 65 when there are `problems`."""
        if self.problems:
            raise XdError(f"scores of another form than the format's: {self.problems[0]['detail']}", code="bad-tensor",
                          where=str(self.path))  # fmt: skip

    def require(self, observed: dict[str, Any]) -> None:
        """XdError 65 unless it can be compared and is what a readback speaks of (`observed`: that block of it)."""
        self.require_sound()
        where = str(self.path)
        if self.metadata["observed"] != observed:
            raise XdError("a score file of something else", code="foreign-file", where=where, path="/xd/observed",
                          hint="take a new attempt")  # fmt: skip
        facts = self.identity()
        for name, witness in _WITNESSED.items():
            if facts[name] != observed[witness]:
                raise XdError("a tensor is not the one that was observed", code="tampered", where=where,
                              path=f"/{name}", found=facts[name], expected=observed[witness])  # fmt: skip

    def release(self) -> None:
        """Give the pages touched so far back to the page cache, so that resident memory does not grow with the file."""
        for file in self._files:
            file.release()

    def _joined(self, name: str) -> np.ndarray | Joined:
        return join([file.array(name) for file in self._files])

    def _boundaries(self) -> np.ndarray:
        """int64 [B+1], counted through all files: a view into the file where it is one."""
        bounds = [file.array("cu_seqlens") for file in self._files]
        if len(bounds) == 1:
            return bounds[0]
        offsets = np.cumsum([0, *(file.shape("token_ids")[0] for file in self._files)])
        return np.concatenate([[0], *(each[1:] + offset for each, offset in zip(bounds, offsets, strict=False))])

    def _raw_blocks(self, name: str) -> Iterator[memoryview]:
        """The bytes of a tensor of the whole."""
        whole = name == "cu_seqlens"
        for raw in [raw_bytes(self.cu_seqlens)] if whole else (file.raw(name) for file in self._files):
            for index, start in enumerate(range(0, len(raw), BLOCK * 4)):
                yield raw[start : start + BLOCK * 4]
                if index % _RELEASE_EVERY == 0:
                    self.release()

    def _shape(self, name: str) -> tuple[int, ...]:
        """Of the whole, which is flat where all parts of it are; else the first part's that is not."""
        shapes = [file.shape(name) for file in self._files]
        return next((shape for shape in shapes if len(shape) != 1), (sum(shape[0] for shape in shapes if shape),))

    def _shape_problems(self) -> Iterator[dict[str, str]]:
        for name in ("token_ids", "logprobs", "active_mask"):
            if self._shape(name) != (self.tokens,):
                yield self._problem("shape", f"{name} has shape {list(self._shape(name))}, not [{self.tokens}]")
            elif len(self._files) > 1 and any(file.shape(name) != file.shape("token_ids") for file in self._files):
                yield self._problem("shape", f"{name} is cut into shards otherwise than token_ids")
        for shape in (file.shape("cu_seqlens") for file in self._files):
            if len(shape) != 1 or shape[0] < 1:
                yield self._problem("shape", f"cu_seqlens has shape {list(shape)}, not [B+1]")

    def _bound_problems(self) -> Iterator[dict[str, str]]:
        for file in self._files:
            bounds, tokens = file.array("cu_seqlens"), file.shape("token_ids")[0]
            falls = any(
                (bounds[i + 1 : i + 1 + BLOCK] < bounds[i : i + BLOCK][: bounds.size - i - 1]).any()
                for i in range(0, bounds.size - 1, BLOCK)
            )
            if bounds[0] != 0 or bounds[-1] != tokens or falls:
                yield self._problem("bounds", f"cu_seqlens does not rise from 0 to {tokens}")

    def _problem(self, code: str, detail: str) -> dict[str, str]:
        return {"code": code, "side": self.side, "detail": detail}


def blocks(tokens: int, *files: ScoreFile) -> Iterator[slice]:
    """The blocks of `tokens` tokens, in order; lets go of the files' pages on the way."""
    for index, start in enumerate(range(0, tokens, BLOCK)):
        yield slice(start, min(start + BLOCK, tokens))
        if index % _RELEASE_EVERY == _RELEASE_EVERY - 1:
            for file in files:
                file.release()
