"""BLAKE3 by kernels against the blake3 package: every kind of last block, chunk and tree."""

from __future__ import annotations

import pytest
import torch
from blake3 import blake3
from xdkernels.digest import blake3_hexdigest
from xdkernels.jit import blake3 as kernels

CHUNK = kernels.CHUNK_BYTES
#: bytes: within a block, a block, within a chunk, chunks, uneven trees
SIZES = (0, 1, 64, 65, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 3 * CHUNK - 5, 7 * CHUNK + 64)


def message(size, seed=0):
    return torch.randint(256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def expected(data, prefix=b""):
    return blake3(prefix + data.numpy().tobytes()).hexdigest()


@pytest.mark.parametrize("size", SIZES)
def test_is_that_of_the_package(device, size):
    data = message(size)
    assert blake3_hexdigest(data.to(device)) == expected(data)


@pytest.mark.parametrize("prefix", [b"bfloat16[3,5]\n", b"p" * 1025], ids=len)
@pytest.mark.parametrize("size", [0, 130])
def test_a_prefix_goes_before_it(device, size, prefix):
    data = message(size)
    assert blake3_hexdigest(data.to(device), prefix) == expected(data, prefix)


@pytest.mark.parametrize("chunks", [4, 5, 11, 17])
def test_trees_of_trees(device, monkeypatch, chunks):
    monkeypatch.setattr(kernels, "SUBTREE", 4)
    data = message(chunks * CHUNK - 7)
    assert blake3_hexdigest(data.to(device)) == expected(data)


@pytest.mark.parametrize("chunks", [129, kernels.SUBTREE - 1, kernels.SUBTREE, kernels.SUBTREE + 1, 3_000_001])
def test_large_trees(device, chunks):
    if device == "cpu":
        pytest.skip("takes minutes in the interpreter")
    data = message(chunks * CHUNK - 7)
    assert blake3_hexdigest(data.to(device), b"header") == expected(data, b"header")


@pytest.mark.parametrize("prefix", [b"", b"hea", b"head", b"header"], ids=len)
def test_data_off_a_word(device, prefix):
    whole = message(99).to(device)
    for first in range(4):
        assert blake3_hexdigest(whole[first:], prefix) == expected(whole[first:].cpu(), prefix)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.bool])
def test_any_dtype_and_strides(device, dtype):
    data = torch.randint(2, (7, 5), generator=torch.Generator().manual_seed(1)).to(dtype)
    assert blake3_hexdigest(data.to(device).mT) == expected(data.mT.contiguous().view(-1).view(torch.uint8))


@pytest.mark.parametrize("place", [0, 1023, 1200])
def test_one_bit_changes_it(device, place):
    """Negative control of the equalities above."""
    data = message(1201).to(device)
    before = blake3_hexdigest(data)
    data[place] ^= 1
    assert blake3_hexdigest(data) != before
