"""The live engine: vLLM in this process, frozen tokens through its scheduler, cache and attention."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import vllm
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

from libxd import checkpoint
from libxd.errors import Status, XdError, ran_out_of_memory
from libxd.runtimes import live
from libxd.runtimes.protocol import Observation, Request, Scores
from libxd.runtimes.torch_engine import TorchEngine
from libxd.runtimes.vllm import prefixes, weights
from libxd.runtimes.vllm.compiled import Runs
from libxd.runtimes.vllm.forwards import SEQUENCE, Forwards
from libxd.runtimes.vllm.loading import load
from libxd.runtimes.vllm.replay import Replay, replaying
from libxd.scoring.observer import Observer
from libxd.sequences import Sequences


class RolloutEngine(TorchEngine):
    """`engine` are the arguments that materialising wrote down."""

    def __init__(self, locations: dict[str, Any], engine: dict[str, Any]) -> None:
        self.llm: LLM = load(locations, engine)
        (worker,) = self.llm.collective_rpc(lambda worker: worker)
        self.runner = worker.model_runner
        self.model = self.runner.get_model()
        self._checkpoint_tensors = checkpoint.tensor_names(locations["checkpoint"])
        super().__init__()
        _require_whole(self.model, self._checkpoint_tensors)

    def _forget_run(self) -> None:
        super()._forget_run()
        self._forwards: Forwards | None = None
        self._replay: Replay | None = None
        self._runs = Runs()
        self._cached: list[int] = []

    # -- protocol

    def bind(self, operator: Any) -> None:
        """XdError 69 for an operator of hidden states when the logits are more than the head's product."""
        head, processor = self.model.lm_head, self.model.logits_processor
        plain = processor.scale == 1.0 and processor.soft_cap is None and getattr(head, "bias", None) is None
        if operator.inputs == "hidden" and not plain:
            raise XdError("takes hidden states and the head's weight, and this model scales or caps its logits, or "
                          "adds a bias", status=Status.REFUSED, code="unsupported-model",
                          where=f"operator {operator.backend}", found=type(self.model).__name__)  # fmt: skip
        super().bind(operator)

    def settings(self) -> dict[str, Observation]:
        return {
            "rollout.dtype": self._parameter_dtype(),
            "rollout.tensor_parallel_size": self._tensor_parallel(),
            "rollout.context_parallel_size": self._context_parallel(),
        }

    def parameters(self) -> Iterator[tuple[str, str, tuple[int, ...], bytes]]:
        for name, held in weights.named(self.model):
            yield name, live.DTYPE_NAMES[held.dtype], tuple(held.shape), live.raw_bytes(held)

    def not_parameters(self) -> list[str]:
        return sorted(self._checkpoint_tensors - weights.names(self.model))

    def score(self, sequences: Sequences, request: Request) -> Scores:
        """As TorchEngine. XdError 69 for sequences that vLLM cannot be given as they are, 75 when memory runs out."""
        _require_plain(sequences)
        if not self.llm.reset_prefix_cache():
            raise XdError("vLLM does not empty its prefix cache", status=Status.BUG, code="engine-error")
        try:
            return super().score(sequences, request)
        except Exception as error:
            if isinstance(error, XdError) or not ran_out_of_memory(error):
                raise
            raise XdError(f"vLLM ran out of memory: {' '.join(str(error).split())}", status=Status.RETRY,
                          code="out-of-memory", hint="a smaller batch.size needs less") from error  # fmt: skip

    def behaviour(self) -> dict[str, Observation]:
        assert self._observer is not None and self._forwards is not None and self._sequences is not None
        ran = len(self._observer.forwards)
        counted = {"forwards": ran, "first_layer_calls": self._runs.layers, "graph_runs": self._runs.graphs,
                   "mode": self.runner.compilation_config.mode.name}  # fmt: skip
        return {
            "batch.size": self._batch_size(),
            "rollout.dtype": self._compute_dtype(),
            "rollout.enable_prefix_caching": prefixes.observed(
                self._sequences, self._block_size(), self._caches(), self._forwards.shared_tokens, sum(self._cached)
            ),
            "rollout.enforce_eager": Observation(self._runs.eager(ran), counted),
            "logp.backend": self._logp_backend(),
        }

    def describe(self) -> dict[str, Any]:
        from vllm.envs import VLLM_BATCH_INVARIANT

        backends = {group.backend.__name__ for groups in self.runner.attn_groups for group in groups}
        return {
            "class": type(self.model).__name__,
            "device": str(self.runner.device),
            "attention": sorted(backends),
            "model_runner": type(self.runner).__name__,
            "block_size": self._block_size(),
            "cache_blocks": self.runner.kv_cache_config.num_blocks,
            "cache_dtypes": sorted({str(cache.dtype).removeprefix("torch.") for cache in self.runner.kv_caches}),
            "compilation": self.runner.compilation_config.mode.name,
            "batch_invariant": bool(VLLM_BATCH_INVARIANT),
            "max_requests": self.runner.max_num_reqs,
            "max_length": self.runner.max_model_len,
            "max_forward_tokens": self.runner.max_num_tokens,
            "torch": torch.__version__,
            "vllm": vllm.__version__,
        }

    def close(self) -> None:
        self._operator = None
        self._forget_run()
        core = self.llm.llm_engine.engine_core
        del self.model, self.runner, self.llm
        core.shutdown()
        cleanup_dist_env_and_memory()

    # -- one scoring

    @contextlib.contextmanager
    def _watched(self, observer: Observer) -> Iterator[None]:
        assert self._sequences is not None and self._request is not None
        head_weight = weights.head(self.model) if self._operator.inputs == "hidden" else None
        forwards = self._forwards = Forwards(self.runner, self._sequences, observer)
        replay = self._replay = Replay(
            self._sequences, self._request, self._operator, observer, forwards, head_weight
        )
        with forwards.watching(), replaying(self.runner, replay), self._runs.counting(self.model):
            yield
        self._logits_dtypes = replay.logits_dtypes if head_weight is None else set()

    def _score_batch(
        self, sequences: Sequences, batch: list[int], request: Request, observer: Observer, logprobs: np.ndarray
    ) -> None:
        """One submission to the scheduler. Logprobs are those that come out of vLLM's own results."""
        decoding = request.mode == "decode"
        prompts, asked = [], []
        for s in batch:
            span = sequences.span(s)
            fed = int(sequences.prompt_lens[s]) if decoding else span.stop - span.start
            prompts.append({"prompt_token_ids": sequences.token_ids[span][:fed].tolist()})
            # one more than is frozen: only so is the last frozen token fed, too
            asked.append(SamplingParams(
                max_tokens=span.stop - span.start - fed + 1, ignore_eos=True, detokenize=False,
                logprobs=0 if decoding else None, prompt_logprobs=None if decoding else 0, extra_args={SEQUENCE: s},
            ))  # fmt: skip
        for s, result in zip(batch, self.llm.generate(prompts, asked, use_tqdm=False), strict=True):
            self._cached.append(result.num_cached_tokens or 0)
            span = sequences.span(s)
            first = span.start + int(sequences.prompt_lens[s])
            ids = sequences.token_ids[first : span.stop].tolist()
            given = result.outputs[0].logprobs if decoding else result.prompt_logprobs[first - span.start :]
            logprobs[first : span.stop] = _of_ids(given, ids, 1 if decoding else 0, s)

    def _kept_cache(self) -> bool:
        """vLLM writes keys and values into its cache whatever the mode."""
        return len(self.runner.kv_caches) > 0

    def _vocabulary(self) -> int:
        return self.model.lm_head.org_vocab_size

    # -- read-back

    def _parameter_dtype(self) -> Observation:
        held = sorted({live.DTYPE_NAMES.get(p.dtype, str(p.dtype)) for p in self.model.parameters()})
        return Observation(held[0] if len(held) == 1 else None, {"parameters": held})

    def _compute_dtype(self) -> Observation:
        """What hidden states and logits came out in."""
        assert self._replay is not None
        seen = sorted(self._replay.hidden_dtypes | self._replay.logits_dtypes)
        return Observation(seen[0] if len(seen) == 1 else None, {"computed": seen, **self._parameter_dtype().evidence})

    def _tensor_parallel(self) -> Observation:
        from vllm.distributed import get_tp_group

        sizes = sorted({module.tp_size for module in self.model.modules() if hasattr(module, "tp_size")})
        group = get_tp_group().world_size
        return Observation(group if sizes in ([], [group]) else None, {"group": group, "layers": sizes})

    def _context_parallel(self) -> Observation:
        from vllm.distributed import get_dcp_group, get_pcp_group

        found = {"decode": get_dcp_group().world_size, "prefill": get_pcp_group().world_size}
        return Observation(max(found.values()), found)

    def _block_size(self) -> int:
        return self.runner.input_batch.block_table[0].block_size

    def _caches(self) -> bool:
        """Whether the scheduler's cache manager is one that keeps prefixes."""
        core = self.llm.llm_engine.engine_core.engine_core
        return core.scheduler.kv_cache_manager.enable_caching


def _require_whole(model: Any, tensors: set[str]) -> None:
    """XdError 69 for a model whose head is not where a language model has it; 65 when vLLM holds weights that the
    checkpoint lacks, as it does where a part of a fused one is missing."""
    if not hasattr(model, "lm_head") or not hasattr(model, "logits_processor"):
        raise XdError("this model has no head of its own that could be observed", status=Status.REFUSED,
                      code="unsupported-model", where=type(model).__name__)  # fmt: skip
    missing = sorted(weights.names(model) - tensors - {weights.HEAD})
    if missing:
        raise XdError("the checkpoint lacks weights of the model, or vLLM knows them under other names",
                      code="bad-checkpoint", where=type(model).__name__, found=missing)  # fmt: skip


def _require_plain(sequences: Sequences) -> None:
    """XdError 69: vLLM counts positions from zero and masks nothing, and that is not what the sequences say."""
    for s in range(sequences.num_sequences):
        span = sequences.span(s)
        counted = np.arange(span.stop - span.start)
        if not sequences.attention_mask[span].all() or not np.array_equal(sequences.positions[span], counted):
            raise XdError("vLLM counts positions from 0 and masks nothing, and these tokens are laid out otherwise",
                          status=Status.REFUSED, code="unsupported-sequences", where=f"sequence {s}")  # fmt: skip


def _of_ids(given: list[Any], ids: list[int], behind: int, sequence: int) -> list[float]:
    """The logprobs of these ids in vLLM's results, which go on for `behind` more tokens.

    XdError 70 when it gives another number of them, or none of an id.
    """
    if len(given) != len(ids) + behind:
        raise XdError("vLLM gives another number of logprobs than there are tokens", status=Status.BUG,
                      code="engine-output", where=f"sequence {sequence}", found=len(given),
                      expected=len(ids) + behind)  # fmt: skip
    entries = list(zip((entry or {} for entry in given), ids, strict=False))
    missing = next((i for i, (entry, asked) in enumerate(entries) if asked not in entry), None)
    if missing is not None:
        raise XdError("vLLM gives the logprob of another id than the frozen one", status=Status.BUG,
                      code="engine-output", where=f"sequence {sequence}", path=f"/{missing}",
                      found=sorted(entries[missing][0]), expected=ids[missing])  # fmt: skip
    return [entry[asked].logprob for entry, asked in entries]
