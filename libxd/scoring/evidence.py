"""What a scoring showed of the identity: digests of what went into the model and of the weights it held."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from libxd import canon, checkpoint

if TYPE_CHECKING:
    import numpy as np

    from libxd.runtimes.protocol import Engine, Request, Scores
    from libxd.sequences import Sequences

#: the observed identity before anything was observed; null means that it could not be seen
UNSEEN: dict[str, Any] = dict.fromkeys((
    "token_ids", "selected_ids", "cu_seqlens", "active_mask", "attention_mask", "positions",
    "weights_before", "weights_after", "weights_dtype", "mode_before", "mode_after", "optimizer", "cache",
    "scoring_mode", "semantics", "model_state",
))  # fmt: skip


@dataclass(frozen=True)
class Snapshot:
    """The model at one moment: a digest a parameter (by Hugging Face name), their dtypes, mode, optimizer.

    buffers: digests of what else the model holds (a table of rotary frequencies). The checkpoint does not pin them, but
    scoring must leave them as they were, too.
    """

    parameters: dict[str, str]
    dtype: str
    mode: str
    optimizer: bool
    buffers: dict[str, str] = field(default_factory=dict)

    @property
    def weights(self) -> str:
        """The root digest over all parameters."""
        return canon.digest(self.parameters)

    @classmethod
    def take(cls, engine: Engine) -> Snapshot:
        """Digest every weight and buffer the engine holds now. Several dtypes of weights are named joined by "+"."""
        digests, dtypes = {}, set()
        for name, dtype, shape, raw in engine.parameters():
            digests[name] = checkpoint.parameter_digest(dtype, shape, [raw])
            dtypes.add(dtype)
        state = engine.state()
        buffers = {
            name: checkpoint.parameter_digest(dtype, shape, [raw]) for name, dtype, shape, raw in engine.buffers()
        }
        return cls(digests, "+".join(sorted(dtypes)), state["mode"], bool(state["optimizer"]), buffers)

    def changed(self, after: Snapshot) -> dict[str, str | None]:
        """Parameters and buffers with another digest afterwards, or new then; None for one that is gone."""
        held, left = {**self.buffers, **self.parameters}, {**after.buffers, **after.parameters}
        return {name: left.get(name) for name in sorted(held.keys() | left.keys()) if held.get(name) != left.get(name)}


def observed_identity(
    sequences: Sequences, request: Request, scores: Scores, before: Snapshot, after: Snapshot,
    temperatures: set[float], expected_weights: str | None,
) -> dict[str, Any]:
    """The `observed` block of readback and score file.

    temperatures: those the operator was called with. expected_weights: the root digest that the checkpoint must give on
    this side (None: not known). cu_seqlens and active_mask are those that the score file holds.
    """
    fed = scores.observed
    return {
        "token_ids": _digest(fed.token_ids, "<i4"),
        "selected_ids": _digest(fed.selected_ids, "<i4"),
        "cu_seqlens": _digest(sequences.cu_seqlens, "<i8"),
        "active_mask": _digest(sequences.active_mask, "|b1"),
        "attention_mask": _digest(fed.attention_mask, "|b1"),
        "positions": _digest(fed.positions, "<i4"),
        "weights_before": before.weights,
        "weights_after": after.weights,
        "weights_dtype": before.dtype,
        "mode_before": before.mode,
        "mode_after": after.mode,
        "optimizer": before.optimizer or after.optimizer,
        "cache": fed.cache,
        "scoring_mode": _mode(request.mode, fed.cache),
        "semantics": _semantics(request.semantics, temperatures),
        "model_state": _model_state(before, after, expected_weights),
    }


def _digest(array: np.ndarray, dtype: str) -> str:
    import numpy as np

    return canon.digest_bytes(memoryview(np.ascontiguousarray(array, dtype=dtype)).cast("B"))


def _mode(asked: str, cache: str) -> str:
    """Decoding means that keys and values outlive a step: without them the tokens went through in one pass."""
    return "prefill" if asked == "decode" and cache == "none" else asked


def _semantics(asked: dict[str, Any], temperatures: set[float]) -> dict[str, Any] | None:
    """The semantics as the operator saw them: raw logprobs are taken at 1, whatever temperature sampled the tokens."""
    if len(temperatures) != 1:
        return None
    (seen,) = temperatures
    if asked["logprobs"] == "processed":
        return {**asked, "temperature": seen}
    return asked if seen == 1.0 else {**asked, "logprobs": "processed", "temperature": seen}


def _model_state(before: Snapshot, after: Snapshot, expected_weights: str | None) -> str | None:
    """pre_update: the checkpoint's weights, unchanged, and nothing there that could update them."""
    touched = before.optimizer or after.optimizer or before.changed(after)
    foreign = expected_weights is not None and before.weights != expected_weights
    return None if touched or foreign else "pre_update"
