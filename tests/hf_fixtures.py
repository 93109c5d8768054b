"""A tiny random Llama on disk, sequences for it, and hf engines as the scorer's child would open them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
from materialize_fixtures import row as plan_row

from libxd import environment
from libxd.operators import catalog
from libxd.operators.session import OperatorSession
from libxd.runtimes import registry
from libxd.runtimes.protocol import EngineContext, Request, Scores, SidePlan
from libxd.sequences import Sequences

RUNTIME = registry.load("hf")
ENVIRONMENT = environment.describe()
VOCABULARY = 128
LAYERS = 2
PROMPT_LENS = (3, 7, 5)
#: of three samples a prompt, prompt by prompt
RESPONSE_LENS = ((1, 9, 4), (6, 6, 2), (8, 3, 5))


def save_model(directory: Path) -> None:
    """Two layers, tied embeddings, float32, weights wide enough that tokens tell."""
    import torch
    import transformers

    torch.manual_seed(7)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=True, initializer_range=0.2,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(directory)


def frozen(prompt_lens: tuple[int, ...] = PROMPT_LENS, response_lens: Any = RESPONSE_LENS) -> Sequences:
    """Several samples a prompt; every prompt is of ids of its own."""
    draw = np.random.default_rng(5)
    ids, lens, index, lengths = [], [], [], []
    for prompt, (prompt_len, responses) in enumerate(zip(prompt_lens, response_lens, strict=True)):
        shared = draw.integers(0, VOCABULARY, prompt_len)
        for response_len in responses:
            ids.append(np.concatenate([shared, draw.integers(0, VOCABULARY, response_len)]))
            lens.append(prompt_len)
            index.append(prompt)
            lengths.append(prompt_len + response_len)
    positions = np.concatenate([np.arange(length) for length in lengths])
    active = np.concatenate([np.arange(length) >= first for length, first in zip(lengths, lens, strict=True)])
    return Sequences(
        token_ids=np.concatenate(ids).astype(np.int32), cu_seqlens=np.cumsum([0, *lengths], dtype=np.int64),
        active_mask=active, attention_mask=np.ones(len(active), bool), positions=positions.astype(np.int32),
        prompt_lens=np.array(lens, np.int32), prompt_index=np.array(index, np.int32),
        logprobs=np.where(active, np.float32(-1), np.float32(np.nan)),
    )  # fmt: skip


def only(given: Sequences, sequence: int) -> Sequences:
    """One of the sequences, by itself."""
    cells = given.span(sequence)
    flat = ("token_ids", "active_mask", "attention_mask", "positions", "logprobs")
    return Sequences(
        **{name: getattr(given, name)[cells] for name in flat},
        cu_seqlens=np.array([0, cells.stop - cells.start]),
        prompt_lens=given.prompt_lens[sequence : sequence + 1],
        prompt_index=given.prompt_index[sequence : sequence + 1],
    )


def joined(given: list[Sequences]) -> Sequences:
    """Several sequences in this order."""
    flat = ("token_ids", "active_mask", "attention_mask", "positions", "logprobs", "prompt_lens", "prompt_index")
    lengths = [length for each in given for length in np.diff(each.cu_seqlens)]
    return Sequences(
        **{name: np.concatenate([getattr(each, name) for each in given]) for name in flat},
        cu_seqlens=np.cumsum([0, *lengths], dtype=np.int64),
    )


def row(**changes: Any) -> dict[str, Any]:
    """A row over a checkpoint directory; a double underscore stands for the dot. `semantics`, `rollout_mode`,
    `device` and `synthetic` change what is no knob."""
    made = copy.deepcopy(plan_row())
    identity = made["identity"]
    identity["model"] = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCABULARY}
    identity["checkpoint"] = {"digest": "c" * 64, "files": {}, "synthetic": changes.pop("synthetic", None)}
    identity["semantics"] |= changes.pop("semantics", {})
    identity["rollout_mode"] = changes.pop("rollout_mode", "decode")
    made["scenario"]["device"] = changes.pop("device", "cpu")
    for name, value in changes.items():
        made["values"][name.replace("__", ".")] = value
    for binding in made["operators"]["selected_logprob"].values():
        binding["backend"] = made["values"]["logp.backend"]
    return made


def plan(side: str, allow_fallback: tuple[str, ...] = (), *, lacks: tuple[str, ...] = (), **changes: Any) -> SidePlan:
    """`lacks`: what this machine's environment is said to be without: "compiler", or a package."""
    given = copy.deepcopy(ENVIRONMENT)
    given["compiler"] = None if "compiler" in lacks else {"path": "c++", "version": "13"}
    given["packages"] = {name: version for name, version in given["packages"].items() if name not in lacks}
    given["cuda"] = changes.pop("cuda", {"driver": None, "devices": []})
    given["packages"] |= changes.pop("packages", {})
    given["variables"] |= changes.pop("variables", {})
    return RUNTIME.materialize(side, row(**changes), given, frozenset(allow_fallback))


class Bench:
    """Opens and runs engines on one checkpoint directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @classmethod
    def tiny(cls, tmp_path_factory: Any) -> Bench:
        """A bench of its own tiny model (pytest's factory of directories says where)."""
        directory = tmp_path_factory.mktemp("models") / "tiny"
        save_model(directory)
        return cls(directory)

    def open(self, side: str, **changes: Any) -> Any:
        """An engine with its operator bound."""
        made = row(**changes)
        session = OperatorSession(catalog.load(False))
        session.resolve(side, made["operators"]["selected_logprob"][side])
        context = EngineContext(made["identity"], {"checkpoint": str(self.directory)})
        engine = RUNTIME.open(side, {"engine": plan(side, **changes).engine}, context)
        engine.bind(session.instance(side))
        return engine

    def run(self, side: str, given: Sequences, **changes: Any) -> tuple[Any, Scores]:
        """The engine, and what it scored."""
        submission = changes.pop("submission", "canonical")
        engine = self.open(side, **changes)
        return engine, engine.score(given, request(side, submission, **changes))

    def logprobs(self, side: str, given: Sequences, **changes: Any) -> np.ndarray:
        """float32 [T], in nats."""
        return self.run(side, given, **changes)[1].logprobs


def request(side: str, submission: str = "canonical", **changes: Any) -> Request:
    made = row(**changes)
    mode = made["identity"]["rollout_mode"] if side == "rollout" else "teacher_forced"
    return Request(made["values"]["batch.size"], mode, submission, made["identity"]["semantics"])


def greatest(a: np.ndarray, b: np.ndarray) -> float:
    """max |a - b| over what both score; both score the same cells."""
    assert (np.isnan(a) == np.isnan(b)).all()
    return float(np.nanmax(np.abs(a.astype(np.float64) - b.astype(np.float64))))
