"""What is asked of a rank, of its own model, in the process that holds it: the only one, or a worker of vLLM.

Answers are plain data, and the same kind whichever process it is.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from libxd.operators.session import Operator
from libxd.runtimes import live
from libxd.runtimes.protocol import Request
from libxd.runtimes.vllm import weights
from libxd.runtimes.vllm.compiled import Runs
from libxd.runtimes.vllm.forwards import Forwards
from libxd.runtimes.vllm.replay import Replay, replaying
from libxd.runtimes.vllm.shards import Part
from libxd.scoring.observer import Observer
from libxd.sequences import Sequences


def ask(worker: Any, question: str, *arguments: Any) -> Any:
    """What vLLM's collective_rpc has its workers call: `question` is a method of their Rank."""
    if not hasattr(worker, "xd_rank"):
        worker.xd_rank = Rank(worker.model_runner)
    return getattr(worker.xd_rank, question)(*arguments)


@dataclass
class Seen:
    """One scoring as a rank saw it.

    operator: the instance that was called here. numerics: the process's numeric state, before and after.
    """

    observer: Observer
    operator: Operator
    shared_tokens: int
    runs: Runs
    hidden_dtypes: set[str]
    logits_dtypes: set[str]
    numerics: tuple[dict[str, Any], dict[str, Any]]


class Rank:
    """A model runner of vLLM, and the scoring that is watched on it."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.model = runner.get_model()
        self._groups: list[weights.Group] = []
        self._watching = contextlib.ExitStack()
        self._begun: tuple[Observer, Operator, Forwards, Replay, Runs, dict[str, Any]] | None = None

    # -- what it is

    def has_head(self) -> bool:
        """Whether the model's head is where a language model has it."""
        return hasattr(self.model, "lm_head") and hasattr(self.model, "logits_processor")

    def head_is_plain(self) -> bool:
        """Whether the logits are the head's product and nothing else."""
        head, processor = self.model.lm_head, self.model.logits_processor
        return processor.scale == 1.0 and processor.soft_cap is None and getattr(head, "bias", None) is None

    def vocabulary(self) -> int:
        return self.model.lm_head.org_vocab_size

    def block_size(self) -> int:
        return self.runner.input_batch.block_table[0].block_size

    def caches(self) -> int:
        """Tensors of keys and values."""
        return len(self.runner.kv_caches)

    def parameter_dtypes(self) -> set[str]:
        return {live.DTYPE_NAMES.get(p.dtype, str(p.dtype)) for p in self.model.parameters()}

    def world(self) -> dict[str, Any]:
        """The sizes of the groups that it belongs to, over how many ranks its layers are split, and its place."""
        from vllm.distributed import get_dcp_group, get_pcp_group, get_tp_group

        group = get_tp_group()
        layers = {module.tp_size for module in self.model.modules() if hasattr(module, "tp_size")}
        return {"rank": group.rank_in_group, "tensor": group.world_size, "layers": sorted(layers),
                "decode": get_dcp_group().world_size, "prefill": get_pcp_group().world_size}  # fmt: skip

    def described(self) -> dict[str, Any]:
        from vllm import envs

        runner = self.runner
        return {
            "class": type(self.model).__name__,
            "device": str(runner.device),
            "attention": sorted({group.backend.__name__ for groups in runner.attn_groups for group in groups}),
            "model_runner": type(runner).__name__,
            "block_size": self.block_size(),
            "cache_blocks": runner.kv_cache_config.num_blocks,
            "cache_dtypes": sorted({str(cache.dtype).removeprefix("torch.") for cache in runner.kv_caches}),
            "compilation": runner.compilation_config.mode.name,
            "graphs": runner.compilation_config.cudagraph_mode.name,
            "batch_invariant": bool(envs.VLLM_BATCH_INVARIANT),
            "max_requests": runner.max_num_reqs,
            "max_length": runner.max_model_len,
            "max_forward_tokens": runner.max_num_tokens,
        }

    def numerics(self) -> dict[str, Any]:
        return live.numerics()

    def state(self) -> dict[str, Any]:
        return live.state(self.model)

    def buffers(self) -> list[tuple[str, str, tuple[int, ...], bytes]]:
        return list(live.buffers(self.model))

    # -- weights

    def weight_groups(self) -> list[list[Part]]:
        """The parts of weights by the parameter that holds them now."""
        self._groups = weights.groups(self.model)
        return [group.parts for group in self._groups]

    def weights(self, index: int) -> list[tuple[str, np.ndarray]]:
        """Of a group that was told last: dtype and the elements' bits of each part; none of a head that stays tied."""
        return [(live.DTYPE_NAMES[held.dtype], live.raw_integers(held)) for held in self._groups[index].take()]

    def whole_weights(self, index: int) -> list[tuple[str, tuple[int, ...], bytes | live.DeviceBytes]]:
        """The same of an only rank, which holds all of each, and in this process: dtype, shape, raw bytes."""
        return [
            (live.DTYPE_NAMES[held.dtype], tuple(held.shape), live.raw_bytes(held))
            for held in self._groups[index].take()
        ]

    # -- one scoring

    def begin(self, sequences: Sequences, request: Request, operator: Operator) -> None:
        """Replay the sequences from now on, and watch. What a scoring that failed left is undone first."""
        self._watching.close()
        observer, runs = Observer(sequences.cu_seqlens), Runs()
        head = weights.head(self.model) if operator.inputs == "hidden" else None
        forwards = Forwards(self.runner, sequences, observer)
        replay = Replay(sequences, request, operator, observer, forwards, head)
        with contextlib.ExitStack() as watching:
            watching.enter_context(forwards.watching())
            watching.enter_context(replaying(self.runner, replay))
            watching.enter_context(runs.counting(self.model))
            self._watching = watching.pop_all()
        self._begun = observer, operator, forwards, replay, runs, live.numerics()

    def end(self) -> Seen:
        """What was seen since `begin`; the runner is as it was before."""
        assert self._begun is not None
        self._watching.close()
        (observer, operator, forwards, replay, runs, before), self._begun = self._begun, None
        return Seen(observer, operator, forwards.shared_tokens, runs, replay.hidden_dtypes,
                    replay.logits_dtypes, (before, live.numerics()))  # fmt: skip
