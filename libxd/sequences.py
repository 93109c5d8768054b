"""Frozen sequences: the tokens that every case of an experiment scores, in one flat array over all of them.

T tokens of B sequences; sequence i is cells cu_seqlens[i] : cu_seqlens[i + 1]. `identity` reads a file without numpy,
for planning; `read` checks every value, for scoring.
"""

from __future__ import annotations

import itertools
import os
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from libxd import canon, schema, tensors
from libxd.errors import XdError
from libxd.tensors import TensorFile

if TYPE_CHECKING:
    import numpy as np

SCHEMA_VERSION = "xd.sequences.v1"
PACKING = "none"  # no sequence sees another
#: tensor -> dtype and length, in the order of the file: wide ones first, so that all are aligned
LAYOUT = {
    "cu_seqlens": ("int64", "B+1"),
    "token_ids": ("int32", "T"),
    "positions": ("int32", "T"),
    "prompt_lens": ("int32", "B"),
    "prompt_index": ("int32", "B"),
    "logprobs": ("float32", "T"),
    "active_mask": ("bool", "T"),
    "attention_mask": ("bool", "T"),
}
_PINNED = ("token_ids", "cu_seqlens", "active_mask", "attention_mask", "positions", "prompt_lens")


@dataclass(frozen=True)
class Sequences:
    """What is scored, and what was seen when it was sampled.

    token_ids int32 [T]; cu_seqlens int64 [B+1]; active_mask bool [T] (response tokens, which alone decide);
    attention_mask bool [T]; positions int32 [T]; prompt_lens int32 [B]; prompt_index int32 [B] (samples of one prompt
    share it); logprobs float32 [T], in nats, of the active tokens while they were sampled, NaN elsewhere.
    """

    token_ids: np.ndarray
    cu_seqlens: np.ndarray
    active_mask: np.ndarray
    attention_mask: np.ndarray
    positions: np.ndarray
    prompt_lens: np.ndarray
    prompt_index: np.ndarray
    logprobs: np.ndarray
    metadata: dict[str, Any] = field(default_factory=lambda: {"schema_version": SCHEMA_VERSION})

    @property
    def num_sequences(self) -> int:
        return len(self.cu_seqlens) - 1

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def span(self, sequence: int) -> slice:
        """The cells of one sequence."""
        return slice(int(self.cu_seqlens[sequence]), int(self.cu_seqlens[sequence + 1]))

    def answered(self) -> set[int]:
        """The sequences that have a token behind their prompt."""
        ends = self.cu_seqlens[:-1] + self.prompt_lens
        return {s for s, (end, stop) in enumerate(zip(ends, self.cu_seqlens[1:], strict=True)) if end < stop}


def read(path: str | os.PathLike[str]) -> Sequences:
    """The sequences of a file, validated; arrays are read-only views into it. XdError 66 or 65."""
    with TensorFile(path) as file:
        _check_layout(file)
        metadata = schema.validate("sequences_metadata", file.metadata, f"{path} (header key xd)")
        sequences = Sequences(**{name: file.array(name) for name in LAYOUT}, metadata=metadata)
    validate(sequences, str(path))
    return sequences


def write(path: str | os.PathLike[str], sequences: Sequences) -> bool:
    """Publish a sequences file, validated first. True: written. False: it was there. XdError 73: another was."""
    schema.validate("sequences_metadata", sequences.metadata, str(path))
    validate(sequences, str(path))
    return tensors.write(path, {name: getattr(sequences, name) for name in LAYOUT}, sequences.metadata)


def identity(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The "sequences" object of a resolved identity: digests and counts. Needs no numpy.

    Looks at shapes, boundaries and masks; ids and logprobs are for `read` to check.
    """
    with TensorFile(path) as file:
        _check_layout(file)
        schema.validate("sequences_metadata", file.metadata, f"{path} (header key xd)")
        _check_boundaries(_unpack(file, "cu_seqlens"), file.shape("token_ids")[0], str(path))
        digests = tensor_digests(**{name: file.raw(name) for name in _PINNED})
        active = bytes(file.raw("active_mask"))
        for name in ("active_mask", "attention_mask"):
            if bytes(file.raw(name)).translate(None, b"\0\1"):
                raise _bad(str(path), name, "a bool tensor holds bytes other than 0 and 1")
        return digests | {
            "digest": digest(digests),
            "num_sequences": file.shape("cu_seqlens")[0] - 1,
            "num_tokens": len(active),
            "num_active": active.count(1),
            "packing": PACKING,
        }


def header(path: str | os.PathLike[str]) -> dict[str, Any]:
    """How the tokens came about, as the file's header says (schema `sequences_metadata`). Needs no numpy."""
    with TensorFile(path) as file:
        return schema.validate("sequences_metadata", file.metadata, f"{path} (header key xd)")


def tensor_digests(
    token_ids: np.ndarray | memoryview,
    cu_seqlens: np.ndarray | memoryview,
    active_mask: np.ndarray | memoryview,
    attention_mask: np.ndarray | memoryview,
    positions: np.ndarray | memoryview,
    prompt_lens: np.ndarray | memoryview,
) -> dict[str, str]:
    """BLAKE3 over each tensor's raw little-endian bytes, given as arrays of the file's dtypes or as the bytes."""
    given = {
        "token_ids": token_ids, "selected_ids": token_ids, "cu_seqlens": cu_seqlens, "active_mask": active_mask,
        "attention_mask": attention_mask, "positions": positions, "prompt_lens": prompt_lens,
    }  # fmt: skip
    return {name: canon.digest_bytes(_raw(name, value)) for name, value in given.items()}


def digest(digests: dict[str, str]) -> str:
    """The digest of the whole, over the tensor digests and the packing."""
    return canon.digest({**digests, "packing": PACKING})


def validate(sequences: Sequences, where: str) -> None:
    """XdError 65 unless the arrays are what the class says and agree with one another."""
    import numpy as np

    for name, (dtype, length) in LAYOUT.items():
        array = getattr(sequences, name)
        wanted = {"T": sequences.num_tokens, "B": sequences.num_sequences, "B+1": sequences.num_sequences + 1}[length]
        if array.dtype.name != dtype or array.shape != (wanted,):
            raise _bad(where, name, "another dtype or shape", found=f"{array.dtype.name} {list(array.shape)}",
                       expected=f"{dtype} [{wanted}]")  # fmt: skip
    _check_boundaries(sequences.cu_seqlens.tolist(), sequences.num_tokens, where)
    starts, lengths = sequences.cu_seqlens[:-1], np.diff(sequences.cu_seqlens)
    within = np.arange(sequences.num_tokens) - np.repeat(starts, lengths)  # [T] index inside the own sequence
    prompts = np.repeat(sequences.prompt_lens, lengths)
    active = sequences.active_mask
    for name, what, bad in (
        ("token_ids", "an id is negative", sequences.token_ids < 0),
        ("positions", "a position is negative", sequences.positions < 0),
        ("prompt_index", "a prompt number is negative", sequences.prompt_index < 0),
        ("prompt_lens", "a prompt is empty or longer than its sequence",
         (sequences.prompt_lens < 1) | (sequences.prompt_lens > lengths)),
        ("active_mask", "a sequence's first token is active, but nothing comes before it", active & (within == 0)),
        ("active_mask", "a prompt token is active", active & (within < prompts)),
        ("active_mask", "a token outside the attention mask is active", active & ~sequences.attention_mask),
        ("logprobs", "the logprob of an active token is not finite", active & ~np.isfinite(sequences.logprobs)),
    ):  # fmt: skip
        if bad.any():
            index = int(np.argmax(bad))
            raise _bad(where, f"{name}/{index}", what, found=str(getattr(sequences, name)[index]))
    _check_shared_prompts(sequences, where)


def _check_shared_prompts(sequences: Sequences, where: str) -> None:
    """Samples of one prompt begin with the same ids: a runtime may compute them once."""
    first: dict[int, bytes] = {}
    for sequence in range(sequences.num_sequences):
        begin = int(sequences.cu_seqlens[sequence])
        prompt = sequences.token_ids[begin : begin + int(sequences.prompt_lens[sequence])].tobytes()
        if first.setdefault(int(sequences.prompt_index[sequence]), prompt) != prompt:
            raise _bad(where, f"prompt_index/{sequence}", "two sequences of one prompt begin with other ids",
                       found=int(sequences.prompt_index[sequence]))  # fmt: skip


def _check_layout(file: TensorFile) -> None:
    tokens, boundaries = file.shape("token_ids"), file.shape("cu_seqlens")
    lengths = {
        "T": tokens[0] if tokens else None,
        "B": max(boundaries[0] - 1, 0) if boundaries else None,
        "B+1": boundaries[0] if boundaries else None,
    }
    for name, (dtype, length) in LAYOUT.items():
        file.expect(name, dtype, (lengths[length],))
    unknown = sorted(set(file.names) - set(LAYOUT))
    if unknown:
        raise _bad(str(file.path), unknown[0], "a tensor that sequences do not have", expected=" ".join(LAYOUT))


def _check_boundaries(cu_seqlens: Any, num_tokens: int, where: str) -> None:
    if len(cu_seqlens) < 2:
        raise _bad(where, "cu_seqlens", "no sequence")
    if cu_seqlens[0] != 0 or cu_seqlens[-1] != num_tokens:
        raise _bad(where, "cu_seqlens", "boundaries do not go from 0 to the number of tokens",
                   found=[cu_seqlens[0], cu_seqlens[-1]], expected=[0, num_tokens])  # fmt: skip
    for index, (begin, end) in enumerate(itertools.pairwise(cu_seqlens)):
        if begin >= end:
            raise _bad(where, f"cu_seqlens/{index + 1}", "boundaries do not rise", found=[begin, end])


def _unpack(file: TensorFile, name: str) -> tuple[int, ...]:
    return struct.unpack(f"<{file.shape(name)[0]}q", file.raw(name))


def _raw(name: str, value: Any) -> bytes | memoryview:
    if isinstance(value, (bytes, memoryview)):
        return value
    dtype = LAYOUT["token_ids" if name == "selected_ids" else name][0]
    assert value.dtype.name == dtype, f"{name} is {value.dtype}, not {dtype}"
    return value.astype(value.dtype.newbyteorder("<"), copy=False).tobytes()


def _bad(where: str, path: str, what: str, **facts: Any) -> XdError:
    return XdError(what, code="bad-sequences", where=where, path=f"/{path}", **facts)
