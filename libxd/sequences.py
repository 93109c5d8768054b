"""Frozen sequences: the tokens that every case of an experiment scores, in one flat array over all of them.

T tokens of B sequences; sequence i is cells cu_seqlens[i] : cu_seqlens[i + 1]. `identity` reads a file without numpy,
for planning; `read` gives its arrays, for scoring. Both check every value.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from libxd import canon, schema, tensors
from libxd.errors import XdError
from libxd.tensors import TensorFile

if TYPE_CHECKING:
    import numpy as np

SCHEMA_VERSION = "xd.sequences.v1"
PACKING = "none"  # no sequence sees another
_BLOCK = 1 << 20  # bytes
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
    share it); logprobs float32 [T], in nats, of the active tokens while they were sampled, NaN elsewhere (and
    everywhere, where they were not recorded).
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

    def unusual(self) -> int | None:
        """The first sequence that masks a token or does not count its positions from 0; None: there is none."""
        first = self.cu_seqlens[:-1].repeat(self.cu_seqlens[1:] - self.cu_seqlens[:-1])
        usual = self.attention_mask & (self.positions == range(len(first)) - first)
        return None if usual.all() else int(self.cu_seqlens.searchsorted(usual.argmin(), "right")) - 1


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
    """The "sequences" object of a resolved identity: digests and counts. Checks what `read` does. Needs no numpy."""
    with TensorFile(path) as file:
        _check_layout(file)
        schema.validate("sequences_metadata", file.metadata, f"{path} (header key xd)")
        _check_values({name: file.raw(name) for name in LAYOUT}, str(path))
        return _identity({name: file.raw(name) for name in LAYOUT})


def identity_of(sequences: Sequences) -> dict[str, Any]:
    """What `identity` gives of a file with these arrays."""
    return _identity({name: tensors.raw_bytes(getattr(sequences, name)) for name in LAYOUT})


def _identity(raw: Mapping[str, memoryview]) -> dict[str, Any]:
    digests = tensor_digests(**{name: raw[name] for name in _PINNED})
    return digests | {
        "digest": digest(digests),
        "num_sequences": len(raw["prompt_lens"]) // 4,
        "num_tokens": len(raw["active_mask"]),
        "num_active": sum(block.count(1) for _, block in _blocks(raw["active_mask"])),
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
    for name, (dtype, length) in LAYOUT.items():
        array = getattr(sequences, name)
        wanted = {"T": sequences.num_tokens, "B": sequences.num_sequences, "B+1": sequences.num_sequences + 1}[length]
        if array.dtype.name != dtype or array.shape != (wanted,):
            raise _bad(where, name, "another dtype or shape", found=f"{array.dtype.name} {list(array.shape)}",
                       expected=f"{dtype} [{wanted}]")  # fmt: skip
    _check_values({name: tensors.raw_bytes(getattr(sequences, name)) for name in LAYOUT}, where)


def _check_values(raw: Mapping[str, memoryview], where: str) -> None:
    """XdError 65 unless tensors of the right dtypes and shapes, as little-endian bytes, agree with one another.

    The one check of a file, for planning, which has no numpy, as for scoring.
    """
    for name in ("active_mask", "attention_mask"):
        if any(block.translate(None, b"\0\1") for _, block in _blocks(raw[name])):
            raise _bad(where, name, "a bool tensor holds bytes other than 0 and 1")
    token_ids, active = raw["token_ids"], raw["active_mask"]
    boundaries, prompt_lens = _values(raw, "cu_seqlens"), _values(raw, "prompt_lens")
    _check_boundaries(boundaries, len(active), where)
    for name, what in (
        ("token_ids", "an id is negative"),
        ("positions", "a position is negative"),
        ("prompt_index", "a prompt number is negative"),
    ):
        values = _values(raw, name)
        if min(values) < 0:
            index = next(index for index, value in enumerate(values) if value < 0)
            raise _bad(where, f"{name}/{index}", what, found=str(values[index]))
    for sequence, (begin, end) in enumerate(itertools.pairwise(boundaries)):
        if not 1 <= prompt_lens[sequence] <= end - begin:
            raise _bad(where, f"prompt_lens/{sequence}", "a prompt is empty or longer than its sequence",
                       found=str(prompt_lens[sequence]))  # fmt: skip
        index = bytes(active[begin : begin + prompt_lens[sequence]]).find(1)
        if index >= 0:
            index += begin
            what = "a prompt token" if index > begin else "a sequence's first token, which nothing comes before,"
            raise _bad(where, f"active_mask/{index}", f"{what} is active")
    for begin, block in _blocks(active):
        attended = int.from_bytes(raw["attention_mask"][begin : begin + len(block)], "little")
        if outside := int.from_bytes(block, "little") & ~attended:
            raise _bad(where, f"active_mask/{begin + (outside.bit_length() - 1) // 8}",
                       "a token outside the attention mask is active")  # fmt: skip
    logprobs = _values(raw, "logprobs")
    if all(map(math.isnan, logprobs)):
        pass  # none were recorded
    elif not all(map(math.isfinite, itertools.compress(logprobs, active))):
        index = next(i for i, value in enumerate(logprobs) if active[i] and not math.isfinite(value))
        raise _bad(where, f"logprobs/{index}", "the logprob of an active token is not finite",
                   found=str(logprobs[index]))  # fmt: skip
    _check_shared_prompts(token_ids, boundaries, prompt_lens, _values(raw, "prompt_index"), where)


def _blocks(data: memoryview) -> Iterator[tuple[int, bytes]]:
    """A tensor's bytes a block at a time, each with its place: what is copied is small however large the file."""
    for begin in range(0, len(data), _BLOCK):
        yield begin, bytes(data[begin : begin + _BLOCK])


def _values(raw: Mapping[str, memoryview], name: str) -> memoryview:
    """A tensor's numbers, as Python's; the files are little-endian, as are the machines that xd runs on."""
    return raw[name].cast({"int64": "q", "int32": "i", "float32": "f"}[LAYOUT[name][0]])


def _check_shared_prompts(
    token_ids: memoryview, boundaries: Sequence[int], prompt_lens: memoryview, prompt_index: memoryview, where: str
) -> None:
    """Samples of one prompt begin with the same ids: a runtime may compute them once."""
    first: dict[int, str] = {}
    for sequence, begin in enumerate(boundaries[:-1]):
        prompt = canon.digest_bytes(token_ids[4 * begin : 4 * (begin + prompt_lens[sequence])])
        if first.setdefault(prompt_index[sequence], prompt) != prompt:
            raise _bad(where, f"prompt_index/{sequence}", "two sequences of one prompt begin with other ids",
                       found=prompt_index[sequence])  # fmt: skip


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


def _raw(name: str, value: Any) -> bytes | memoryview:
    if isinstance(value, (bytes, memoryview)):
        return value
    dtype = LAYOUT["token_ids" if name == "selected_ids" else name][0]
    assert value.dtype.name == dtype, f"{name} is {value.dtype}, not {dtype}"
    return value.astype(value.dtype.newbyteorder("<"), copy=False).tobytes()


def _bad(where: str, path: str, what: str, **facts: Any) -> XdError:
    return XdError(what, code="bad-sequences", where=where, path=f"/{path}", **facts)
