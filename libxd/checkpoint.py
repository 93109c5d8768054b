"""What a checkpoint's weights are once an engine holds them in its own dtype: a digest a parameter, numpy only.

The casts are those every engine makes on loading: widening bfloat16 and float16 to float32 is exact, narrowing rounds
to nearest, ties to even; what is too large becomes infinity, a NaN stays a NaN. Parameters that are no floating-point
numbers keep their dtype.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from libxd import canon, strictjson
from libxd.errors import Status, XdError
from libxd.tensors import TensorFile, raw_bytes

if TYPE_CHECKING:
    import numpy as np

    from libxd.runtimes.protocol import BytesElsewhere

DTYPES = ("float32", "float16", "bfloat16")
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
#: the token embedding of a decoder, alone or beside other towers
_EMBEDDINGS = ("model.embed_tokens.weight", "model.language_model.embed_tokens.weight")
_BLOCK = 1 << 20  # values cast at a time
_QUIET_NAN_BFLOAT16 = 0x7FC0


def parameter_digest(dtype: str, shape: Iterable[int], chunks: Iterable[bytes | memoryview | np.ndarray]) -> str:
    """BLAKE3 over `<dtype><shape as JSON>\\n` and a parameter's raw little-endian bytes, given in chunks."""
    hasher = blake3(_header(dtype, shape), max_threads=blake3.AUTO)
    for chunk in chunks:
        hasher.update(raw_bytes(chunk))
    return hasher.hexdigest()


def held_digest(dtype: str, shape: Iterable[int], raw: bytes | BytesElsewhere) -> str:
    """`parameter_digest` of what an engine holds: bytes here, or where they lie."""
    return begin_digest(dtype, shape, raw)()


def begin_digest(dtype: str, shape: Iterable[int], raw: bytes | BytesElsewhere) -> Callable[[], str]:
    """`held_digest`, begun; what is returned waits for it. A device is given the next one to do meanwhile."""
    if isinstance(raw, bytes):
        digest = parameter_digest(dtype, shape, [raw])
        return lambda: digest
    return raw.begin_blake3(_header(dtype, shape))


def _header(dtype: str, shape: Iterable[int]) -> bytes:
    return f"{dtype}{canon.dumps([int(size) for size in shape]).decode()}\n".encode()


def parameter_digests(directory: str | os.PathLike[str], dtype: str) -> dict[str, str]:
    """Hugging Face name -> digest, of every parameter cast to `dtype` ("float32", "float16", "bfloat16").

    Streams: memory stays constant. A head that the config ties to the embedding is one parameter, under its name.
    XdError 66 when weights are missing, 65 when they are malformed, 69 for a quantised dtype.
    """
    assert dtype in DTYPES, dtype
    digests = {}
    for path, names in weight_files(directory).items():
        with TensorFile(path, follow_symlinks=True) as file:
            for name in names if names is not None else file.names:
                digests[name] = _digest(file, name, dtype)
    if _tied(directory) and digests.get("lm_head.weight") == digests.get("model.embed_tokens.weight"):
        digests.pop("lm_head.weight", None)
    return dict(sorted(digests.items()))


def require_sound(directory: str | os.PathLike[str]) -> None:
    """XdError 65, naming the file, for a checkpoint that no engine can hold: of its config and headers. No numpy.

    The config is an object, every weight file is whole, and the embedding has the shape that the config gives it.
    """
    config = config_of(directory)
    text = config["text_config"] if isinstance(config.get("text_config"), dict) else config
    sizes = [text.get("vocab_size"), text.get("hidden_size")]
    for path, names in weight_files(directory).items():
        with TensorFile(path, follow_symlinks=True) as file:
            for name in names if names is not None else file.names:
                shape = list(file.shape(name))
                if name in _EMBEDDINGS and None not in sizes and shape != sizes:
                    raise XdError("is not of the shape that config.json gives it", code="bad-checkpoint",
                                  where=str(path), path=strictjson.pointer_to("", name), found=shape,
                                  expected=sizes)  # fmt: skip


def config_of(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """A checkpoint's config.json. XdError 66 when it is not there, 65 when it is no JSON object."""
    path = Path(directory) / "config.json"
    config = strictjson.load(path)
    if not isinstance(config, dict):
        raise XdError("a model's config is a JSON object", code="bad-checkpoint", where=str(path), found=config)
    return config


def tensor_names(directory: str | os.PathLike[str]) -> set[str]:
    """The names of all tensors of a checkpoint. XdError as `parameter_digests`."""
    found: set[str] = set()
    for path, names in weight_files(directory).items():
        with TensorFile(path, follow_symlinks=True) as file:
            found.update(names if names is not None else file.names)
    return found


def weight_files(directory: str | os.PathLike[str]) -> dict[Path, list[str] | None]:
    """The safetensors files of a checkpoint; of a sharded one with the parameters that its index says are there.

    A single file goes before an index, as transformers has it.
    """
    directory = Path(directory)
    index = directory / INDEX
    if (directory / SINGLE).exists() or not index.exists():
        return {directory / SINGLE: None}
    value = strictjson.load(index)
    weight_map = value.get("weight_map") if isinstance(value, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise XdError("the index maps no parameter", code="bad-index", where=str(index), path="/weight_map")
    shards: dict[Path, list[str] | None] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise XdError("not the name of a safetensors file beside the index", code="bad-index", where=str(index),
                          path=strictjson.pointer_to("/weight_map", name), found=file)  # fmt: skip
        shards.setdefault(directory / file, []).append(name)
    return shards


def to_float32(array: np.ndarray, dtype: str) -> np.ndarray:
    """Values of `dtype` (bfloat16 as uint16 bit patterns) as float32; exact."""
    import numpy as np

    if dtype == "bfloat16":
        return (array.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return array.astype(np.float32)


def from_float32(values: np.ndarray, dtype: str) -> np.ndarray:
    """float32 values rounded to `dtype` (bfloat16 as uint16 bit patterns), to nearest, ties to even."""
    import numpy as np

    if dtype == "float32":
        return values
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16)
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    # Half a unit in the last kept place, less one where that place is even: ties then carry only into even results.
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(_QUIET_NAN_BFLOAT16), rounded)


def _digest(file: TensorFile, name: str, dtype: str) -> str:
    held, shape = file.dtype(name), file.shape(name)
    if held.startswith("float8"):
        raise XdError("quantised weights are not supported", status=Status.REFUSED, code="quantised",
                      where=str(file.path), path=strictjson.pointer_to("", name), found=held)  # fmt: skip
    if held == dtype or held not in (*DTYPES, "float64"):
        return parameter_digest(held, shape, [file.raw(name)])
    return parameter_digest(dtype, shape, _cast(file.array(name).reshape(-1), held, dtype))


def _cast(flat: np.ndarray, held: str, wanted: str) -> Iterator[np.ndarray]:
    for start in range(0, flat.size, _BLOCK):
        yield from_float32(to_float32(flat[start : start + _BLOCK], held), wanted)


def _tied(directory: str | os.PathLike[str]) -> bool:
    return config_of(directory).get("tie_word_embeddings") is True
