"""Logprobs of frozen sequences by a real model, right and wrong in known ways: what dev/doctor_study.py is made of.

    python -P dev/doctor_arms.py SEQUENCES OUT [right]
    $XD_PYTHON_VLLM -P dev/doctor_arms.py SEQUENCES OUT vllm

The engines are called in this process, as the scorer's child would. OUT gets a file a scoring, float32 [T] each; those
that are there are not scored again, and with `right` none with a mistake is. `right-…` are scorings without one,
`wrong-…` those with one, by the name of what was made; a name ends in the dtype of the model. With `vllm` another
engine decodes, without a mistake.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from libxd import sequences as frozen
from libxd.doctor.rescoring import Otherwise, Rescored, of_other_places
from libxd.doctor.vocabulary import Vocabulary
from libxd.operators import catalog
from libxd.operators.session import OperatorSession
from libxd.runtimes import registry
from libxd.runtimes.protocol import EngineContext, Request
from libxd.runtimes.vllm.runtime import BLOCK_SIZE
from libxd.sequences import Sequences

ROOT = Path(__file__).resolve().parent.parent
MODEL = str(ROOT / "models" / "smollm2-135m-instruct")
SEMANTICS = {"logprobs": "raw", "temperature": 1.0, "top_p": 1.0, "top_k": 0,
             "penalties": {"repetition": 1.0, "presence": 0.0, "frequency": 0.0}}  # fmt: skip
BOS, EOS = 1, 2
VOCABULARY = Vocabulary(size=49152, bos=BOS, eos=frozenset({EOS}), pad=EOS)
#: name -> side, batch size, attention, operator
RIGHT = {
    "decode-8": ("rollout", 8, "sdpa", "native"),
    "pass-8": ("training", 8, "sdpa", "native"),
    "eager-8": ("training", 8, "eager", "native"),
    "pass-1": ("training", 1, "sdpa", "native"),
    "reference-8": ("training", 8, "sdpa", "xd.reference_logp"),
}
FEWER = ("decode-8", "pass-8", "eager-8")  # in float16, which a CPU computes slowly
#: decoding by vLLM, where its interpreter scored, too
VLLM = "vllm-8"


# -- mistakes inside the model, beside those of xd_mistakes


def stale_more(engine: Any) -> None:
    """Every matrix some twenty updates behind: 2e-5 an element."""
    import torch

    for number, module in enumerate(m for m in engine.base.modules() if isinstance(m, torch.nn.Linear)):
        draw = torch.Generator().manual_seed(number)
        module.weight.data += 2e-5 * torch.randn(module.weight.shape, generator=draw).to(module.weight.dtype)


def rope_scaled(engine: Any) -> None:
    """Rotary frequencies of a context four percent longer."""
    engine.base.rotary_emb.inv_freq /= 1.04


def positions_late(engine: Any) -> None:
    """From position 72 on, which lies in most responses, each token stands eight places later than it does."""

    def shifted(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, {**kwargs, "position_ids": kwargs["position_ids"] + 8 * (kwargs["position_ids"] >= 72)}

    engine.base.rotary_emb.register_forward_pre_hook(shifted, with_kwargs=True)


def temperature_low(engine: Any) -> None:
    _shipped("temperature")(engine, 0.9)


def _shipped(name: str) -> Callable[..., None]:
    """One of tests/engines/xd_mistakes.py, whose folder stays off the path otherwise."""
    place = str(ROOT / "tests" / "engines")
    if place not in sys.path:
        sys.path.insert(0, place)
    import xd_mistakes

    return getattr(xd_mistakes, name)


OWN = {
    "stale_more": stale_more, "rope_scaled": rope_scaled, "positions_late": positions_late,
    "temperature_low": temperature_low,
}  # fmt: skip
MISTAKES = (
    "stale_weights", "weight", "positions_shifted", "attention_unscaled", "half_cache", "norm_epsilon",
    "rotary_bfloat16", "other_id", "one_token", "label_shift", "logits_bfloat16", *OWN,
)  # fmt: skip


# -- mistakes of what goes into the model: sequences -> other sequences, and how many tokens were put before each


def double_bos(given: Sequences) -> tuple[Sequences, np.ndarray]:
    """The begin token once more."""
    return _grown(given, [[BOS]] * given.num_sequences)


def left_padding(given: Sequences) -> tuple[Sequences, np.ndarray]:
    """Padded on the left to the longest, and the padding attended to."""
    lengths = np.diff(given.cu_seqlens)
    return _grown(given, [[EOS] * int(lengths.max() - length) for length in lengths])


def packed(given: Sequences) -> tuple[Sequences, np.ndarray]:
    """Four sequences a row, each of which sees those before it."""
    before: list[list[int]] = []
    for sequence in range(given.num_sequences):
        known = [] if sequence % 4 == 0 else before[-1] + given.token_ids[given.span(sequence - 1)].tolist()
        before.append(known)
    return _grown(given, before)


def one_prompt(given: Sequences) -> tuple[Sequences, np.ndarray]:
    """The samples of the second prompt get another template: a line break before it."""
    other = [[198] if index == np.unique(given.prompt_index)[1] else [] for index in given.prompt_index]
    return _grown(given, other)


FED = {"double_bos": double_bos, "left_padding": left_padding, "packed": packed, "one_prompt": one_prompt}


#: what rounding to bfloat16 hides from one pair, as docs/ladder.md shows
HIDDEN = ("stale_weights", "half_cache", "norm_epsilon", "one_token")


def arms(dtype: str) -> list[str]:
    """The mistakes inside the model and in what it is fed that are scored in a dtype."""
    return [name for name in (*MISTAKES, *FED) if dtype == "float32" or name not in HIDDEN]


def _grown(given: Sequences, before: list[list[int]]) -> tuple[Sequences, np.ndarray]:
    """With these ids before each sequence, and where the old cells then are: int [T]."""
    parts: dict[str, list[np.ndarray]] = {name: [] for name in ("token_ids", "active_mask", "logprobs")}
    lengths, places, at = [], [], 0
    for sequence, ids in enumerate(before):
        cells = given.span(sequence)
        more = len(ids)
        parts["token_ids"].append(np.concatenate([np.array(ids, np.int32), given.token_ids[cells]]))
        parts["active_mask"].append(np.concatenate([np.zeros(more, bool), given.active_mask[cells]]))
        parts["logprobs"].append(np.concatenate([np.full(more, np.nan, np.float32), given.logprobs[cells]]))
        lengths.append(more + cells.stop - cells.start)
        places.append(at + more + np.arange(cells.stop - cells.start))
        at += lengths[-1]
    made = Sequences(
        **{name: np.concatenate(values) for name, values in parts.items()},
        cu_seqlens=np.cumsum([0, *lengths], dtype=np.int64),
        attention_mask=np.ones(at, bool),
        positions=np.concatenate([np.arange(length) for length in lengths]).astype(np.int32),
        prompt_lens=np.array([n + len(ids) for n, ids in zip(given.prompt_lens, before, strict=True)], np.int32),
        prompt_index=np.arange(given.num_sequences, dtype=np.int32),
    )
    return made, np.concatenate(places)


# -- scoring


class Scorer:
    """Engines of one sequences file; what was scored lies in `out`."""

    def __init__(self, path: Path, out: Path) -> None:
        self.path = path
        self.sequences = frozen.read(path)
        self.out = out
        out.mkdir(parents=True, exist_ok=True)

    def all_right(self) -> None:
        for dtype in ("bfloat16", "float32"):
            for name in RIGHT:
                self.right(name, dtype)
        for name in FEWER:
            self.right(name, "float16")
        self.third()

    def all_wrong(self) -> None:
        for dtype in ("bfloat16", "float32"):
            self._rescored(dtype)
        for dtype in ("float32", "bfloat16"):
            for name in arms(dtype):
                self.wrong(name, dtype)

    def of_vllm(self) -> None:
        for dtype in ("bfloat16", "float32", "float16"):
            self._kept(f"right-{VLLM}-{dtype}", lambda dtype=dtype: self._by_vllm(dtype))

    def rights(self) -> list[tuple[str, str]]:
        """(name, dtype) of the scorings without a mistake that are there."""
        names = [(name, dtype) for dtype in ("float32", "bfloat16") for name in RIGHT]
        names += [(name, "float16") for name in FEWER]
        names += [(VLLM, dtype) for dtype in ("float32", "bfloat16", "float16")]
        return [(name, dtype) for name, dtype in names if (self.out / f"right-{name}-{dtype}.npy").exists()]

    def one_by_one(self) -> np.ndarray:
        """Decoding in float32, a sequence at a time: the batch's part in a right scoring. Slow, and so not in RIGHT."""
        made = ("rollout", 1, "sdpa", "native", "float32", self.sequences)
        return self._kept("right-decode-1-float32", lambda: self._score(*made))

    def right(self, name: str, dtype: str) -> np.ndarray:
        return self._kept(f"right-{name}-{dtype}", lambda: self._score(*RIGHT[name], dtype, self.sequences))

    def wrong(self, name: str, dtype: str) -> np.ndarray:
        """A training side with a mistake in its model, or in what goes into it."""

        def score() -> np.ndarray:
            given, places = FED[name](self.sequences) if name in FED else (self.sequences, slice(None))
            mistake = None if name in FED else OWN.get(name) or _shipped(name)
            return self._score("training", 8, "sdpa", "native", dtype, given, mistake)[places]

        return self._kept(f"wrong-{name}-{dtype}", score)

    def of_logits(self, dtype: str, plain: bool = False) -> dict[str, np.ndarray]:
        """What is done otherwise with the logits of one pass, eager attention: name -> float32 [T]. plain: nothing."""
        kept = self._rescored(dtype)
        if plain:
            return {"plain": self._laid_out(kept.cells, kept.plain)}
        columns = {f"temperature {t:.2f}": kept.at_temperature(t) for t in (0.7, 0.49, 0.97, 1.2)}
        columns["logprobs over 0.7"] = kept.plain / 0.7
        columns |= {f"padded by {n}": kept.padded(n) for n in (128, 16384)}
        columns |= {name: kept.otherwise[name] for name in ("top-p 0.95", "top-p 0.8", "top-k 20", "logits in bfloat16",
                                                            "the likeliest token's", "the next token's")}  # fmt: skip
        return {name: self._laid_out(kept.cells, column) for name, column in columns.items()}

    def has_third(self) -> bool:
        return (self.out / "third-bos-float32.npy").exists()

    def third(self) -> Rescored:
        """The third scorer: a float32 pass with eager attention, a sequence at a time."""
        kept = self._rescored("float32")

        def begun() -> np.ndarray:
            given, places = double_bos(self.sequences)
            return self._score("training", 1, "eager", "native", "float32", given)[places]

        more = of_other_places(kept.otherwise, self.sequences, kept.cells)
        more["begun with another BOS"] = self._kept("third-bos-float32", begun)[kept.cells]
        return Rescored(**{**vars(kept), "otherwise": {**kept.otherwise, **more}})

    def _rescored(self, dtype: str) -> Rescored:
        path = self.out / f"logits-{dtype}.npz"
        if not path.exists():
            operator = Otherwise()
            said = self._score("training", 1, "eager", operator, dtype, self.sequences)
            np.savez(path, **operator.taken(), cells=np.flatnonzero(~np.isnan(said)))
            print(path.name, flush=True)
        with np.load(path) as file:
            found = dict(file)
        parts = {name: found.pop(name) for name in ("cells", "plain", "logit", "log_sum_exp", "by_temperature")}
        return Rescored(**parts, otherwise=found)

    def _laid_out(self, cells: np.ndarray, values: np.ndarray) -> np.ndarray:
        whole = np.full(self.sequences.num_tokens, np.nan, np.float32)
        whole[cells] = values
        return whole

    def _kept(self, name: str, make: Callable[[], np.ndarray]) -> np.ndarray:
        path = self.out / f"{name}.npy"
        if not path.exists():
            np.save(path, make())
            print(path.name, flush=True)
        return np.load(path)

    def _score(
        self, side: str, batch: int, attention: str, operator: Any, dtype: str, given: Sequences,
        mistake: Callable[[Any], None] | None = None,
    ) -> np.ndarray:  # fmt: skip
        arguments = {"device": "cpu", "devices": 1, "dtype": dtype, "attention": attention, "world_size": 1,
                     "tensor_parallel_size": 1, "context_parallel_size": 1, "vocabulary_rows": None,
                     "enable_prefix_caching": False, "enforce_eager": True, "sharding": "unsharded"}  # fmt: skip
        context = EngineContext({}, {"checkpoint": MODEL})
        engine = registry.load("hf").open(side, {"engine": arguments}, context)
        try:
            engine.bind(_operator(side, operator) if isinstance(operator, str) else operator)
            if mistake:
                mistake(engine)
            mode = "decode" if side == "rollout" else "teacher_forced"
            return engine.score(given, Request(batch, mode, "canonical", SEMANTICS)).logprobs
        finally:
            engine.close()

    def _by_vllm(self, dtype: str) -> np.ndarray:
        arguments = {"device": "cpu", "dtype": dtype, "enable_prefix_caching": False, "enforce_eager": True,
                     "block_size": BLOCK_SIZE, "mode": "decode", "tensor_parallel_size": 1,
                     "context_parallel_size": 1}  # fmt: skip
        context = EngineContext({}, {"checkpoint": MODEL, "sequences": str(self.path)})
        engine = registry.load("vllm").open("rollout", {"engine": arguments}, context)
        try:
            engine.bind(_operator("rollout", "native"))
            return engine.score(self.sequences, Request(8, "decode", "canonical", SEMANTICS)).logprobs
        finally:
            engine.close()


def _operator(side: str, backend: str) -> Any:
    session = OperatorSession(catalog.load(False))
    session.resolve(side, {"backend": backend, "options": {}})
    return session.instance(side)


if __name__ == "__main__":
    scorer = Scorer(Path(sys.argv[1]), Path(sys.argv[2]))
    if sys.argv[3:] == ["vllm"]:
        scorer.of_vllm()
        sys.exit()
    import torch

    torch.set_num_threads(1)
    scorer.all_right()
    if sys.argv[3:] != ["right"]:
        scorer.all_wrong()
