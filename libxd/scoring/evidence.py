"""What a scoring showed of the identity: digests of what went into the model and of the weights it held."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from libxd import canon, checkpoint
from libxd.identity import UNPROCESSED
from libxd.scoring import observer

if TYPE_CHECKING:
    import numpy as np

    from libxd.operators.session import EnginesOwn, Operator
    from libxd.runtimes.protocol import Engine, ObservedInputs, Request, Scores
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

    None: it cannot be seen. buffers: dtype and digest of what else the model holds (a table of rotary frequencies). No
    checkpoint pins them, but scoring must leave them as they were, too, and both sides must hold the same.
    """

    parameters: dict[str, str] | None
    dtype: str | None
    mode: str | None
    optimizer: bool | None
    buffers: dict[str, dict[str, str]] = field(default_factory=dict)

    @property
    def weights(self) -> str | None:
        """The root digest over all parameters."""
        return None if self.parameters is None else canon.digest(self.parameters)

    @classmethod
    def take(cls, engine: Engine) -> Snapshot:
        """Digest every weight and buffer the engine holds now. Several dtypes of weights are named joined by "+"."""
        begun, dtypes = {}, set()
        held = engine.parameters()
        for name, dtype, shape, raw in held or ():
            begun[name] = checkpoint.begin_digest(dtype, shape, raw)
            dtypes.add(dtype)
        digests = {name: digest() for name, digest in begun.items()}
        state = engine.state()
        buffers = {
            name: {"dtype": dtype, "digest": checkpoint.held_digest(dtype, shape, raw)}
            for name, dtype, shape, raw in engine.buffers()
        }
        if held is None:
            return cls(None, None, state["mode"], state["optimizer"], buffers)
        return cls(digests, "+".join(sorted(dtypes)), state["mode"], bool(state["optimizer"]), buffers)

    def changed(self, after: Snapshot) -> dict[str, str | None]:
        """Parameters and buffers with another digest afterwards, or new then; None for one that is gone."""
        held, left = ({**snapshot._buffer_digests(), **(snapshot.parameters or {})} for snapshot in (self, after))
        return {name: left.get(name) for name in sorted(held.keys() | left.keys()) if held.get(name) != left.get(name)}

    def _buffer_digests(self) -> dict[str, str]:
        return {name: buffer["digest"] for name, buffer in self.buffers.items()}


def observed_identity(
    sequences: Sequences, request: Request, scores: Scores, before: Snapshot, after: Snapshot,
    operator: Operator | EnginesOwn, expected_weights: str | None,
) -> dict[str, Any]:  # fmt: skip
    """The `observed` block of readback and score file.

    expected_weights: the root digest that the checkpoint must give on this side (None: not known). cu_seqlens and
    active_mask are those that the score file holds: engines are given boundaries and show none, and know no mask.
    """
    fed = scores.observed
    return {
        "token_ids": _digest(fed.token_ids, "<i4"),
        "selected_ids": _digest(fed.selected_ids, "<i4"),
        "cu_seqlens": _digest(sequences.cu_seqlens, "<i8"),
        "active_mask": _digest(sequences.active_mask, "|b1"),
        "attention_mask": None if fed.attention_mask is None else _digest(fed.attention_mask, "|b1"),
        "positions": None if fed.positions is None else _digest(fed.positions, "<i4"),
        "weights_before": before.weights,
        "weights_after": after.weights,
        "weights_dtype": before.dtype,
        "mode_before": before.mode,
        "mode_after": after.mode,
        "optimizer": True if before.optimizer else after.optimizer,
        "cache": fed.cache,
        "scoring_mode": _mode(sequences, request.mode, fed),
        "semantics": _semantics(operator, fed.head_outputs),
        "model_state": _model_state(before, after, expected_weights),
    }


def _digest(array: np.ndarray, dtype: str) -> str:
    import numpy as np

    return canon.digest_bytes(memoryview(np.ascontiguousarray(array, dtype=dtype)).cast("B"))


def _mode(sequences: Sequences, asked: str, fed: ObservedInputs) -> str | None:
    """How the tokens went through, by what was fed together; "mixed" when as no mode says, None when it was not seen.

    One pass is "prefill" where decoding was asked. Where there is nothing behind a prompt, that asked fits as well.
    """
    if fed.forwards is None:
        return None
    for mode in (asked, "decode", "prefill"):
        fits = observer.fits_mode(mode, fed.forwards, sequences.cu_seqlens, sequences.prompt_lens)
        if fits and (mode != "decode" or fed.cache == "kv_cache"):
            return mode
    return "mixed"


def _semantics(operator: Operator | EnginesOwn, head_outputs: frozenset[int] | None) -> dict[str, Any] | None:
    """What was done to the logits before the softmax, as far as it was seen; None when no logprob was taken.

    That there was no truncation and no penalty shows where the operator was given just what the head returned, or
    hidden states, from which it makes the logits itself.
    """
    if not operator.calls:
        return None
    untouched = operator.inputs == "hidden" or (
        None not in operator.logits_given and operator.logits_given <= (head_outputs or frozenset())
    )
    temperature = next(iter(operator.temperatures)) if len(operator.temperatures) == 1 else None
    return {**(UNPROCESSED if untouched else dict.fromkeys(UNPROCESSED)), "temperature": temperature}


def _model_state(before: Snapshot, after: Snapshot, expected_weights: str | None) -> str | None:
    """pre_update: the checkpoint's weights, unchanged, and nothing there that could update them."""
    if before.parameters is None:
        return None
    touched = before.optimizer or after.optimizer or before.changed(after)
    foreign = expected_weights is not None and before.weights != expected_weights
    return None if touched or foreign else "pre_update"
