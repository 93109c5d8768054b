"""safetensors without torch: what is written can be read by the reference library, what is malformed is refused."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from libxd import tensors
from libxd.errors import Status, XdError

F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def assemble(header: object, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


@pytest.fixture
def file(tmp_path: Path):
    def make(content: bytes) -> Path:
        path = tmp_path / "x.safetensors"
        path.write_bytes(content)
        return path

    return make


def sample() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "offsets": np.array([0, 3, 7], np.int64),
        "logprobs": rng.standard_normal(7).astype(np.float32),
        "half": rng.standard_normal((2, 3)).astype(np.float16),
        "mask": np.array([True, False, True]),
        "nothing": np.zeros((0, 4), np.float32),
        "one": np.array(3.5, np.float64),
    }


def test_written_file_reads_back_the_same_here_and_in_the_reference_library(tmp_path):
    path = tmp_path / "a.safetensors"
    metadata = {"schema_version": "xd.test.v1", "z": 1, "a": "é"}
    assert tensors.write(path, sample(), metadata) is True
    reference = safetensors.numpy.load_file(path)
    with tensors.TensorFile(path) as file:
        assert file.metadata == metadata
        assert file.names == list(sample())
        for name, array in sample().items():
            assert file.dtype(name) == array.dtype.name
            assert file.shape(name) == array.shape
            assert bytes(file.raw(name)) == array.tobytes()
            for got in (file.array(name), reference[name]):
                assert got.dtype == array.dtype and got.shape == array.shape
                assert got.tobytes() == array.tobytes()
    assert not np.array_equal(reference["logprobs"], -sample()["logprobs"])  # the comparison can fail


def test_reference_library_s_file_is_read(tmp_path):
    path = tmp_path / "a.safetensors"
    safetensors.numpy.save_file(sample(), path, metadata={"xd": '{"k":[1]}'})
    with tensors.TensorFile(path) as file:
        assert file.metadata == {"k": [1]}
        for name, array in sample().items():
            assert file.array(name).tobytes() == array.tobytes()


def test_bfloat16_is_shown_as_bit_patterns_both_ways(tmp_path):
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file, save_file

    values = torch.tensor([1.0, -2.5, float("inf")], dtype=torch.bfloat16)
    save_file({"w": values}, tmp_path / "torch.safetensors")
    with tensors.TensorFile(tmp_path / "torch.safetensors") as file:
        assert file.dtype("w") == "bfloat16"
        assert file.array("w").tolist() == [0x3F80, 0xC020, 0x7F80]
        tensors.write(tmp_path / "xd.safetensors", {"w": tensors.Lazy("bfloat16", (3,), [file.array("w")])}, {})
    assert torch.equal(load_file(tmp_path / "xd.safetensors")["w"], values)


def test_arrays_cannot_be_written_to_and_outlive_the_file(tmp_path):
    tensors.write(tmp_path / "a.safetensors", sample(), {})
    with tensors.TensorFile(tmp_path / "a.safetensors") as file:
        array = file.array("logprobs")
    assert array.tobytes() == sample()["logprobs"].tobytes()
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 0


def test_lazy_chunks_give_the_bytes_of_the_whole_array(tmp_path):
    array = np.arange(10, dtype=np.float32)
    lazy = tensors.Lazy("float32", (10,), (array[i : i + 3] for i in range(0, 10, 3)))
    tensors.write(tmp_path / "whole", {"x": array}, {"k": 1})
    tensors.write(tmp_path / "lazy", {"x": lazy}, {"k": 1})
    assert (tmp_path / "whole").read_bytes() == (tmp_path / "lazy").read_bytes()
    strided = np.stack([array, array], axis=1)[:, 0]
    assert tensors.write(tmp_path / "whole", {"x": strided}, {"k": 1}) is False
    assert tensors.write(tmp_path / "whole", {"x": array.astype(">f4")}, {"k": 1}) is False


def test_chunks_that_do_not_fill_the_shape_leave_no_file(tmp_path):
    with pytest.raises(AssertionError, match="8 bytes"):
        tensors.write(tmp_path / "a", {"x": tensors.Lazy("float32", (3,), [np.zeros(2, np.float32)])}, {})
    assert list(tmp_path.iterdir()) == []


def test_same_content_passes_and_other_content_is_refused_and_kept(tmp_path):
    path = tmp_path / "a.safetensors"
    tensors.write(path, sample(), {"k": 1})
    before = path.read_bytes()
    assert tensors.write(path, sample(), {"k": 1}) is False
    with pytest.raises(XdError) as caught:
        tensors.write(path, sample(), {"k": 2})
    assert caught.value.status == Status.CONFLICT
    assert path.read_bytes() == before


def test_the_header_is_padded_so_that_wide_tensors_are_aligned(tmp_path):
    for text in ("", "x", "xx", "xxxxxxx"):
        path = tmp_path / f"a{text}"
        tensors.write(path, {"x": np.zeros(1)}, {"k": text})
        assert tensors.TensorFile(path).array("x").flags.aligned
        assert (path.stat().st_size - 8) % 8 == 0


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", "bad-safetensors"),
        (b"1234567", "bad-safetensors"),
        (struct.pack("<Q", 1 << 40), "bad-safetensors"),
        (struct.pack("<Q", 100) + b"{}", "bad-safetensors"),
        (assemble(b"{", b""), "not-json"),
        (assemble(b"[]", b""), "bad-safetensors"),
        (assemble(b'{"x":1,"x":1}', b""), "duplicate-key"),
        (assemble(b"\xff\xfe", b""), "not-utf8"),
        (assemble(b"[" * 100 + b"]" * 100, b""), "too-deep"),
        (assemble({"x": F32}, bytes(7)), "bad-safetensors"),
        (assemble({"x": F32}, bytes(9)), "bad-safetensors"),
        (assemble({"x": {**F32, "dtype": "F31"}}, bytes(8)), "bad-safetensors"),
        (assemble({"x": {**F32, "dtype": ["F32"]}}, bytes(8)), "bad-safetensors"),
        (assemble({"x": {**F32, "shape": [-2]}}, bytes(8)), "bad-safetensors"),
        (assemble({"x": {**F32, "shape": [2.0]}}, bytes(8)), "bad-safetensors"),
        (assemble({"x": {**F32, "shape": [True, 2]}}, bytes(8)), "bad-safetensors"),
        (assemble({"x": {**F32, "shape": [2**53 - 1] * 16}}, bytes(8)), "bad-safetensors"),
        (assemble({"x": {**F32, "shape": [1] * 17 + [2]}}, bytes(8)), "bad-safetensors"),
        (assemble({"x": {**F32, "data_offsets": [8, 0]}}, bytes(8)), "bad-safetensors"),
        (assemble({"x": {**F32, "data_offsets": [-8, 0]}}, bytes(8)), "bad-safetensors"),
        (assemble({"x": {**F32, "data_offsets": [0, 8, 16]}}, bytes(8)), "bad-safetensors"),
        (assemble({"x": {**F32, "data_offsets": [8, 16]}}, bytes(16)), "bad-safetensors"),
        (assemble({"x": F32, "y": F32}, bytes(8)), "bad-safetensors"),
        (assemble({"x": F32, "y": {**F32, "data_offsets": [4, 12]}}, bytes(12)), "bad-safetensors"),
        (assemble({"x": {**F32, "more": 1}}, bytes(8)), "bad-safetensors"),
        (assemble({"x": None}, bytes(8)), "bad-safetensors"),
        (assemble({"x": F32, "__metadata__": {"xd": 1}}, bytes(8)), "bad-safetensors"),
        (assemble({"x": F32, "__metadata__": []}, bytes(8)), "bad-safetensors"),
    ],
)
def test_malformed_file_is_invalid_input(file, content, code):
    with pytest.raises(XdError) as caught:
        tensors.TensorFile(file(content))
    assert (caught.value.status, caught.value.code) == (Status.INVALID, code)
    assert "\n" not in caught.value.line()


@settings(max_examples=150, deadline=None)
@given(position=st.integers(0, 400), byte=st.integers(0, 255), cut=st.integers(0, 400))
def test_any_flipped_or_cut_byte_gives_an_error_or_a_file_never_a_crash(tmp_path_factory, position, byte, cut):
    path = tmp_path_factory.mktemp("f") / "a"
    tensors.write(path, sample(), {"k": 1})
    content = bytearray(path.read_bytes())
    content[position % len(content)] = byte
    path.write_bytes(content[: len(content) - cut])
    try:
        with tensors.TensorFile(path) as file:
            for name in file.names:
                file.array(name)
            assert file.metadata is not None
    except XdError as error:
        assert error.status == Status.INVALID


def test_bool_bytes_are_zero_or_one(file):
    path = file(assemble({"m": {"dtype": "BOOL", "shape": [3], "data_offsets": [0, 3]}}, b"\0\1\2"))
    with pytest.raises(XdError, match="other than 0 and 1"):
        tensors.TensorFile(path).array("m")


def test_missing_file_directory_symlink_and_fifo(tmp_path, file):
    with pytest.raises(XdError) as caught:
        tensors.TensorFile(tmp_path / "absent")
    assert caught.value.status == Status.MISSING
    os.mkfifo(tmp_path / "fifo")
    real = file(assemble({"x": F32}, bytes(8)))
    (tmp_path / "link").symlink_to(real)
    for name, code in (("fifo", "not-a-file"), ("link", "symlink"), (".", "not-a-file")):
        with pytest.raises(XdError) as caught:
            tensors.TensorFile(tmp_path / name)
        assert (caught.value.status, caught.value.code) == (Status.INVALID, code)
    assert tensors.TensorFile(tmp_path / "link", follow_symlinks=True).names == ["x"]


def test_missing_tensor_foreign_metadata_and_unexpected_shape(file):
    opened = tensors.TensorFile(file(assemble({"x": F32, "__metadata__": {"format": "pt"}}, bytes(8))))
    for ask, code in (
        (lambda: opened.array("y"), "missing-tensor"),
        (lambda: opened.metadata, "foreign-file"),
        (lambda: opened.expect("x", "float32", (3,)), "bad-tensor"),
        (lambda: opened.expect("x", "int32", (2,)), "bad-tensor"),
        (lambda: opened.expect("x", "float32", (2, 1)), "bad-tensor"),
    ):
        with pytest.raises(XdError) as caught:
            ask()
        assert caught.value.code == code
    opened.expect("x", "float32", (None,))


def test_raw_bytes_and_header_need_no_numpy(tmp_path):
    tensors.write(tmp_path / "a", sample(), {"k": 1})
    script = (
        "import sys; sys.modules['numpy'] = None\n"
        "from libxd.tensors import TensorFile\n"
        "file = TensorFile(sys.argv[1]); print(file.metadata['k'], len(file.raw('logprobs')), file.dtype('mask'))"
    )
    ran = subprocess.run(
        [sys.executable, "-P", "-c", script, tmp_path / "a"], capture_output=True, text=True, check=True
    )
    assert ran.stdout == "1 28 bool\n"
