"""score_<side>.safetensors: what one side says of every token, and under which conditions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from libxd import schema, tensors
from libxd.errors import Status, XdError

if TYPE_CHECKING:
    import numpy as np

    from libxd.runtimes.protocol import Scores
    from libxd.sequences import Sequences

SCHEMA_VERSION = "xd.score.v1"
#: dtype and shape (T tokens) of what an engine hands over
_FED = {
    "token_ids": "int32", "selected_ids": "int32", "positions": "int32", "attention_mask": "bool", "scored": "bool"
}  # fmt: skip
_MAY_BE_UNSEEN = ("positions", "attention_mask")
_CACHES = ("kv_cache", "none", None)


def name(side: str) -> str:
    """The file's name in an attempt."""
    return f"score_{side}.safetensors"


def check(scores: Scores, num_tokens: int) -> None:
    """XdError 70 when an engine's scores have another form than promised. Their values are for the verdict to judge."""
    found = {"logprobs": scores.logprobs, **{key: getattr(scores.observed, key) for key in _FED}}
    wanted = {"logprobs": "float32", **_FED}
    for key, array in found.items():
        if array is None and key in _MAY_BE_UNSEEN:
            continue
        form = (str(getattr(array, "dtype", type(array).__name__)), tuple(getattr(array, "shape", ())))
        if form != (wanted[key], (num_tokens,)):
            raise XdError(
                f"the engine handed over {key} of another form than it promised", status=Status.BUG,
                code="engine-output", found=f"{form[0]} {list(form[1])}", expected=f"{wanted[key]} [{num_tokens}]",
            )
    if scores.observed.cache not in _CACHES:
        raise XdError("the engine says nothing usable about its cache", status=Status.BUG, code="engine-output",
                      found=scores.observed.cache, expected=list(_CACHES))


def write(path: Path, sequences: Sequences, scores: Scores, metadata: dict[str, Any]) -> bool:
    """Publish a score file. token_ids are those whose logprobs were taken. False: the same bytes were there."""
    schema.validate("score_metadata", metadata, str(path))
    arrays = {
        "cu_seqlens": sequences.cu_seqlens.astype("int64", copy=False),
        "token_ids": scores.observed.selected_ids,
        "logprobs": _one_nan(scores.logprobs),
        "active_mask": sequences.active_mask.astype("bool", copy=False),
    }
    return tensors.write(path, arrays, metadata)


def _one_nan(values: np.ndarray) -> np.ndarray:
    """All NaNs as the same quiet one: what was not scored must not differ in its bits."""
    import numpy as np

    return np.where(np.isnan(values), np.float32(np.nan), values).astype(np.float32, copy=False)
