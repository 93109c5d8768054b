"""What a checkpoint's parameters are after a cast: bit for bit what torch makes of them."""

from __future__ import annotations

import json

import numpy as np
import pytest
from blake3 import blake3

from libxd import checkpoint, tensors
from libxd.errors import Status, XdError

torch = pytest.importorskip("torch")
from safetensors.torch import save_file  # noqa: E402

TORCH = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}


def awkward_float32() -> np.ndarray:
    """Ties, neighbours of ties, subnormals, overflow, zeros of both signs, infinities, NaN, and random bit patterns."""
    rng = np.random.default_rng(1)
    patterns = rng.integers(0, 2**32, 200_000, dtype=np.uint32)
    tops = rng.integers(0, 2**16, 20_000, dtype=np.uint32) << np.uint32(16)
    ties = np.concatenate([tops | np.uint32(low) for low in (0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x0FFF, 0x1000, 0x1001)])
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 65504, 65519.996, 65520, -65520, 6e-8, 2.98e-8, 2.99e-8,
                        3.4028235e38, 3.39e38, 1e-40, -1e-45], np.float32)  # fmt: skip
    return np.concatenate([patterns.view(np.float32), ties.view(np.float32), special])


def bits(tensor: torch.Tensor) -> np.ndarray:
    return tensor.view(torch.int16 if tensor.element_size() == 2 else torch.int32).numpy()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrowing_is_torch_s_bit_for_bit(dtype):
    values = awkward_float32()
    ours = checkpoint.from_float32(values, dtype)
    theirs = torch.from_numpy(values).to(TORCH[dtype])
    nan = np.isnan(values)
    assert nan.any() and not nan.all()
    np.testing.assert_array_equal(ours.view(np.int16)[~nan], bits(theirs)[~nan])
    back = checkpoint.to_float32(ours, dtype)
    assert np.isnan(back[nan]).all() and torch.isnan(theirs[torch.from_numpy(nan)]).all()
    assert not np.isnan(back[~nan]).any()


def test_truncation_would_not_pass_for_rounding():
    values = awkward_float32()
    values = values[~np.isnan(values)]
    truncated = (values.view(np.uint32) >> 16).astype(np.uint16)
    assert (truncated != checkpoint.from_float32(values, "bfloat16")).mean() > 0.3


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_widening_is_torch_s_for_every_bit_pattern(dtype):
    patterns = np.arange(2**16, dtype=np.uint16)
    held = patterns.view(np.float16) if dtype == "float16" else patterns
    ours = checkpoint.to_float32(held, dtype)
    theirs = torch.from_numpy(patterns.view(np.int16)).view(TORCH[dtype]).float()
    nan = np.isnan(ours)
    np.testing.assert_array_equal(nan, torch.isnan(theirs).numpy())
    np.testing.assert_array_equal(ours.view(np.int32)[~nan], bits(theirs)[~nan])


def make(directory, parts: dict[str, dict[str, torch.Tensor]], **config: object) -> None:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    for file, content in parts.items():
        save_file(content, directory / file, {"format": "pt"})


def parameters() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(3, 5, generator=generator) * 1e-3
    large = torch.randn(1100, 1000, generator=generator)  # more than one block of the cast
    return {"a.weight": values, "b.weight": values.bfloat16(), "c.weight": values.half(), "d.weight": values.double(),
            "e.weight": large, "scalar": torch.tensor(1.5), "count": torch.tensor([3], dtype=torch.int64)}  # fmt: skip


@pytest.mark.parametrize("dtype", checkpoint.DTYPES)
def test_digests_are_those_of_what_torch_holds_after_the_cast(tmp_path, dtype):
    make(tmp_path / "c", {"model.safetensors": parameters()})
    found = checkpoint.parameter_digests(tmp_path / "c", dtype)
    wanted = {}
    for name, tensor in parameters().items():
        cast = tensor.to(TORCH[dtype]) if tensor.is_floating_point() else tensor
        what = str(cast.dtype).removeprefix("torch.")
        shape = json.dumps(list(cast.shape), separators=(",", ":"))
        raw = cast.reshape(-1).view(torch.uint8).numpy().tobytes()
        wanted[name] = blake3(f"{what}{shape}\n".encode() + raw).hexdigest()
    assert found == wanted
    other = checkpoint.parameter_digests(tmp_path / "c", "float32" if dtype == "float16" else "float16")
    assert all(found[name] != other[name] for name in found if name != "count")
    assert found["count"] == other["count"]


def test_a_digest_depends_on_dtype_shape_and_bytes_and_not_on_chunks():
    data = np.arange(6, dtype=np.float32)
    one = checkpoint.parameter_digest("float32", (2, 3), [data])
    assert one == checkpoint.parameter_digest("float32", (2, 3), [data[:1], data[1:].tobytes()])
    assert one != checkpoint.parameter_digest("float32", (3, 2), [data])
    assert one != checkpoint.parameter_digest("int32", (2, 3), [data])
    assert one != checkpoint.parameter_digest("float32", (2, 3), [data + 1])


def test_sharded_checkpoint_is_read_by_its_index(tmp_path):
    make(tmp_path / "whole", {"model.safetensors": parameters()})
    items = list(parameters().items())
    first, second = dict(items[:3]), dict(items[3:])
    names = {"model-00001-of-00002.safetensors": first, "model-00002-of-00002.safetensors": second}
    make(tmp_path / "sharded", names)
    index = {"metadata": {"total_size": 1}, "weight_map": {n: file for file, part in names.items() for n in part}}
    (tmp_path / "sharded" / checkpoint.INDEX).write_text(json.dumps(index))
    whole = checkpoint.parameter_digests(tmp_path / "whole", "bfloat16")
    assert checkpoint.parameter_digests(tmp_path / "sharded", "bfloat16") == whole
    (tmp_path / "sharded" / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(XdError) as caught:
        checkpoint.parameter_digests(tmp_path / "sharded", "bfloat16")
    assert caught.value.status == Status.MISSING


@pytest.mark.parametrize("file", ["../model.safetensors", "sub/model.safetensors", "model.bin", 3])
def test_index_names_files_beside_it_only(tmp_path, file):
    make(tmp_path, {"model-00001-of-00001.safetensors": parameters()})
    (tmp_path / checkpoint.INDEX).write_text(json.dumps({"weight_map": {"a.weight": file}}))
    with pytest.raises(XdError) as caught:
        checkpoint.parameter_digests(tmp_path, "float32")
    assert (caught.value.status, caught.value.path) == (Status.INVALID, "/weight_map/a.weight")


def test_a_single_file_goes_before_an_index_as_in_transformers(tmp_path):
    make(tmp_path, {"model.safetensors": parameters(), "other.safetensors": {"other.weight": torch.zeros(2, 2)}})
    single = checkpoint.parameter_digests(tmp_path, "float32")
    (tmp_path / checkpoint.INDEX).write_text(json.dumps({"weight_map": {"other.weight": "other.safetensors"}}))
    assert checkpoint.parameter_digests(tmp_path, "float32") == single
    assert checkpoint.tensor_names(tmp_path) == set(parameters())
    (tmp_path / "model.safetensors").unlink()
    digests = checkpoint.parameter_digests(tmp_path, "float32")
    assert checkpoint.tensor_names(tmp_path) == {"other.weight"} == set(digests)


def test_tied_head_is_one_parameter_when_it_is_the_embedding(tmp_path):
    embedding = torch.randn(4, 2, generator=torch.Generator().manual_seed(0))
    both = {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding.clone()}
    make(tmp_path / "tied", {"model.safetensors": both}, tie_word_embeddings=True)
    make(tmp_path / "untied", {"model.safetensors": both}, tie_word_embeddings=False)
    make(tmp_path / "odd", {"model.safetensors": both | {"lm_head.weight": embedding + 1}}, tie_word_embeddings=True)
    names = {d: list(checkpoint.parameter_digests(tmp_path / d, "float32")) for d in ("tied", "untied", "odd")}
    assert names["tied"] == ["model.embed_tokens.weight"]
    assert names["untied"] == names["odd"] == ["lm_head.weight", "model.embed_tokens.weight"]


def test_missing_weights_and_quantised_weights(tmp_path):
    make(tmp_path / "empty", {})
    make(tmp_path / "fp8", {"model.safetensors": {"w": torch.ones(2).to(torch.float8_e4m3fn)}})
    for name, status in (("empty", Status.MISSING), ("fp8", Status.REFUSED), ("absent", Status.MISSING)):
        with pytest.raises(XdError) as caught:
            checkpoint.parameter_digests(tmp_path / name, "float32")
        assert caught.value.status == status, name


def test_a_cast_needs_no_more_memory_than_a_block(tmp_path):
    import tracemalloc

    array = np.zeros(16 << 20, np.float32)
    tensors.write(tmp_path / "model.safetensors", {"w": array}, {})
    (tmp_path / "config.json").write_text("{}")
    del array
    tracemalloc.start()
    checkpoint.parameter_digests(tmp_path, "bfloat16")
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 32 << 20  # the tensor has 64 MiB


def test_what_lies_on_a_device_has_the_digest_of_its_bytes():
    torch = pytest.importorskip("torch")
    from libxd.runtimes.live import DeviceBytes, raw_bytes

    held = torch.randn(7, 3, generator=torch.Generator().manual_seed(0)).bfloat16().mT
    here = checkpoint.held_digest("bfloat16", (3, 7), raw_bytes(held))
    assert here == checkpoint.held_digest("bfloat16", (3, 7), DeviceBytes(held))
    assert here != checkpoint.held_digest("bfloat16", (7, 3), DeviceBytes(held))
    assert here != checkpoint.held_digest("bfloat16", (3, 7), DeviceBytes(held.mT))
