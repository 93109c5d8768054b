"""Frozen sequences: what is written is read, digests agree with and without numpy, contradictions are refused."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields, replace

import numpy as np
import pytest
from blake3 import blake3

from libxd import canon, schema, sequences, tensors
from libxd.errors import Status, XdError


def sample() -> sequences.Sequences:
    """Two samples of one prompt (2 ids), one of another (3 ids)."""
    active = np.array([0, 0, 1, 1, 0, 0, 1, 0, 0, 0, 1, 1], bool)
    return sequences.Sequences(
        token_ids=np.array([5, 6, 7, 8, 5, 6, 9, 1, 2, 3, 4, 0], np.int32),
        cu_seqlens=np.array([0, 4, 7, 12], np.int64),
        active_mask=active,
        attention_mask=np.ones(12, bool),
        positions=np.array([0, 1, 2, 3, 0, 1, 2, 0, 1, 2, 3, 4], np.int32),
        prompt_lens=np.array([2, 2, 3], np.int32),
        prompt_index=np.array([0, 0, 1], np.int32),
        logprobs=np.where(active, np.float32(-0.5), np.float32(np.nan)),
    )


@pytest.fixture
def path(tmp_path):
    sequences.write(tmp_path / "s.safetensors", sample())
    return tmp_path / "s.safetensors"


def test_what_is_written_is_read(path):
    got = sequences.read(path)
    for field in fields(sequences.Sequences):
        wanted, found = getattr(sample(), field.name), getattr(got, field.name)
        if field.name == "metadata":
            assert found == wanted
        else:
            assert found.tobytes() == wanted.tobytes() and found.dtype == wanted.dtype, field.name
    assert (got.num_sequences, got.num_tokens, got.span(1)) == (3, 12, slice(4, 7))
    assert sequences.write(path, sample()) is False
    with pytest.raises(XdError) as caught:
        sequences.write(path, replace(sample(), positions=sample().positions + np.int32(1)))
    assert caught.value.status == Status.CONFLICT


def test_identity_is_the_digests_of_raw_bytes_and_the_counts(path):
    s, found = sample(), sequences.identity(path)
    tensors = {
        "token_ids": blake3(s.token_ids.tobytes()).hexdigest(),
        "selected_ids": blake3(s.token_ids.tobytes()).hexdigest(),
        "cu_seqlens": blake3(s.cu_seqlens.tobytes()).hexdigest(),
        "active_mask": blake3(s.active_mask.tobytes()).hexdigest(),
        "attention_mask": blake3(s.attention_mask.tobytes()).hexdigest(),
        "positions": blake3(s.positions.tobytes()).hexdigest(),
        "prompt_lens": blake3(s.prompt_lens.tobytes()).hexdigest(),
    }
    assert found == tensors | {
        "digest": canon.digest(tensors | {"packing": "none"}),
        "num_sequences": 3, "num_tokens": 12, "num_active": 5, "packing": "none",
    }  # fmt: skip
    definition = schema.load("common")["$defs"]["identity_sequences"]
    assert set(found) == set(definition["required"])


def test_digests_of_arrays_are_those_of_the_file(path):
    s = sample()
    arrays = sequences.tensor_digests(s.token_ids, s.cu_seqlens, s.active_mask, s.attention_mask, s.positions,
                                      s.prompt_lens)
    assert arrays.items() <= sequences.identity(path).items()
    changed = sequences.tensor_digests(s.token_ids + np.int32(1), s.cu_seqlens, s.active_mask, s.attention_mask,
                                       s.positions, s.prompt_lens)  # fmt: skip
    assert {name for name in arrays if arrays[name] != changed[name]} == {"token_ids", "selected_ids"}
    with pytest.raises(AssertionError, match="int64"):
        sequences.tensor_digests(s.token_ids.astype(np.int64), s.cu_seqlens, s.active_mask, s.attention_mask,
                                 s.positions, s.prompt_lens)  # fmt: skip


def test_where_a_prompt_ends_is_identity(path, tmp_path):
    """It decides what is prefilled and what is decoded, and so the numbers."""
    other = tmp_path / "o.safetensors"
    sequences.write(other, replace(sample(), prompt_lens=np.array([2, 2, 2], np.int32)))
    mine, others = sequences.identity(path), sequences.identity(other)
    assert {name for name in mine if mine[name] != others[name]} == {"prompt_lens", "digest"}


def test_logprobs_and_metadata_are_not_identity(path, tmp_path):
    other = tmp_path / "o.safetensors"
    metadata = {"schema_version": "xd.sequences.v1", "runtime": "hf"}
    sequences.write(other, replace(sample(), logprobs=sample().logprobs * 2, metadata=metadata))
    assert other.read_bytes() != path.read_bytes()
    assert sequences.identity(other) == sequences.identity(path)


def test_identity_needs_no_numpy(path):
    script = (
        "import sys; sys.modules['numpy'] = None\n"
        "from libxd import sequences; print(sequences.identity(sys.argv[1])['digest'])"
    )
    ran = subprocess.run([sys.executable, "-P", "-c", script, path], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == sequences.identity(path)["digest"]


def changed(name: str, index: int, value: object) -> sequences.Sequences:
    array = getattr(sample(), name).copy()
    array[index] = value
    return replace(sample(), **{name: array})


@pytest.mark.parametrize(
    ("flawed", "place"),
    [
        (changed("cu_seqlens", 0, 1), "/cu_seqlens"),
        (changed("cu_seqlens", 3, 11), "/cu_seqlens"),
        (changed("cu_seqlens", 1, 7), "/cu_seqlens/2"),
        (changed("cu_seqlens", 1, 9), "/cu_seqlens/2"),
        (changed("cu_seqlens", 1, -4), "/cu_seqlens/1"),
        (changed("token_ids", 3, -1), "/token_ids/3"),
        (changed("positions", 2, -1), "/positions/2"),
        (changed("active_mask", 4, True), "/active_mask/4"),
        (changed("active_mask", 8, True), "/active_mask/8"),
        (changed("attention_mask", 10, False), "/active_mask/10"),
        (changed("logprobs", 11, np.nan), "/logprobs/11"),
        (changed("logprobs", 11, -np.inf), "/logprobs/11"),
        (changed("prompt_lens", 0, 0), "/prompt_lens/0"),
        (changed("prompt_lens", 1, 4), "/prompt_lens/1"),
        (changed("prompt_index", 2, -1), "/prompt_index/2"),
        (changed("prompt_index", 2, 0), "/prompt_index/2"),
        (changed("token_ids", 5, 3), "/prompt_index/1"),
        (replace(sample(), token_ids=sample().token_ids.astype(np.int64)), "/token_ids"),
        (replace(sample(), prompt_lens=sample().prompt_lens[:2]), "/prompt_lens"),
        (replace(sample(), logprobs=sample().logprobs[:, None]), "/logprobs"),
    ],
)
def test_contradictions_are_refused_on_write_and_on_read(tmp_path, flawed, place):
    path = tmp_path / "f.safetensors"
    with pytest.raises(XdError) as caught:
        sequences.write(path, flawed)
    assert (caught.value.status, caught.value.path) == (Status.INVALID, place)
    assert not path.exists()
    tensors.write(path, {name: getattr(flawed, name) for name in sequences.LAYOUT}, flawed.metadata)
    for function in (sequences.read, sequences.identity):  # what cannot be scored cannot be planned
        with pytest.raises(XdError) as caught:
            function(path)
        assert caught.value.status == Status.INVALID and caught.value.path.startswith("/" + place.split("/")[1])


@pytest.mark.parametrize("function", [sequences.read, sequences.identity])
def test_files_of_another_kind_are_refused(tmp_path, function):
    good = {name: getattr(sample(), name) for name in sequences.LAYOUT}
    metadata = {"schema_version": "xd.sequences.v1"}
    flawed = {
        "no-tensor": ({k: v for k, v in good.items() if k != "positions"}, metadata, "missing-tensor"),
        "extra-tensor": (good | {"entropy": good["logprobs"]}, metadata, "bad-sequences"),
        "scalar-boundaries": (good | {"cu_seqlens": np.array(12, np.int64)}, metadata, "bad-tensor"),
        "no-sequence": (good | {"cu_seqlens": np.zeros(0, np.int64), "prompt_lens": good["prompt_lens"][:0],
                                "prompt_index": good["prompt_index"][:0]}, metadata, "bad-sequences"),
        "other-version": (good, {"schema_version": "xd.score.v1"}, "schema"),
        "unknown-field": (good, metadata | {"host": "x"}, "unknown-field"),
    }  # fmt: skip
    for name, (content, meta, code) in flawed.items():
        tensors.write(tmp_path / name, content, meta)
        with pytest.raises(XdError) as caught:
            function(tmp_path / name)
        assert (caught.value.status, caught.value.issues[0].code) == (Status.INVALID, code), name
    with pytest.raises(XdError) as caught:
        function(tmp_path / "absent")
    assert caught.value.status == Status.MISSING


def test_identity_refuses_a_mask_that_is_no_bool(path):
    content = bytearray(path.read_bytes())
    content[-1] = 2  # the last byte of attention_mask
    path.write_bytes(content)
    for function in (sequences.identity, sequences.read):
        with pytest.raises(XdError, match="other than 0 and 1"):
            function(path)
