"""score_<side>.safetensors: what one side says of every token, and under which conditions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from libxd import schema, shards
from libxd.errors import Status, XdError

if TYPE_CHECKING:
    import numpy as np

    from libxd.rundir import Attempt
    from libxd.runtimes.protocol import Scores
    from libxd.sequences import Sequences

SCHEMA_VERSION = "xd.score.v1"
#: dtype and shape (T tokens) of what an engine hands over
_FED = {
    "token_ids": "int32", "selected_ids": "int32", "positions": "int32", "attention_mask": "bool", "scored": "bool"
}  # fmt: skip
_MAY_BE_UNSEEN = ("positions", "attention_mask")
_CACHES = ("kv_cache", "none", None)


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


def write(
    attempt: Attempt, sequences: Sequences, scores: Scores, metadata: dict[str, Any], most: int = shards.SHARD_TOKENS
) -> bool:  # fmt: skip
    """Publish a side's scores as `shards.write` does. token_ids are those whose logprobs were taken."""
    schema.validate("score_metadata", metadata, str(attempt))
    arrays = {
        "cu_seqlens": sequences.cu_seqlens.astype("int64", copy=False),
        "token_ids": scores.observed.selected_ids,
        "logprobs": _one_nan(scores.logprobs),
        "active_mask": sequences.active_mask.astype("bool", copy=False),
    }
    return shards.write(attempt, metadata["side"], arrays, metadata, most)


def _one_nan(values: np.ndarray) -> np.ndarray:
    """All NaNs as the same quiet one: what was not scored must not differ in its bits."""
    import numpy as np

    return np.where(np.isnan(values), np.float32(np.nan), values).astype(np.float32, copy=False)
