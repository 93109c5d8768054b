"""The live engine: vLLM's scheduler in this process, frozen tokens through its ranks' model, cache and attention."""

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
from libxd.runtimes.protocol import BytesElsewhere, Observation, Request, Scores
from libxd.runtimes.ranks import agreement
from libxd.runtimes.torch_engine import TorchEngine
from libxd.runtimes.vllm import prefixes, rank, ranks, shards
from libxd.runtimes.vllm.forwards import SEQUENCE
from libxd.runtimes.vllm.loading import load
from libxd.scoring.observer import Observer
from libxd.sequences import Sequences


class RolloutEngine(TorchEngine):
    """`engine` are the arguments that materialising wrote down. The model is where vLLM's ranks are."""

    def __init__(self, locations: dict[str, Any], engine: dict[str, Any]) -> None:
        self.llm: LLM = load(locations, engine)
        self._checkpoint_tensors = checkpoint.tensor_names(locations["checkpoint"])
        self._described = self._ask("described")[0]
        self._require_whole()
        super().__init__()

    def _forget_run(self) -> None:
        super()._forget_run()
        self._seen: list[rank.Seen] = []
        self._cached: list[int] = []

    def _ask(self, question: str, *arguments: Any) -> list[Any]:
        """Each rank's answer, in rank order. XdError 75 when a worker died."""
        with self._living():
            return self.llm.collective_rpc(rank.ask, args=(question, *arguments))

    @contextlib.contextmanager
    def _living(self) -> Iterator[None]:
        """What fails because a worker died says so."""
        try:
            yield
        except Exception as error:
            workers = getattr(self._core().model_executor, "workers", None) or []
            if isinstance(error, XdError) or all(worker.proc.is_alive() for worker in workers):
                raise
            raise XdError("a worker of vLLM died; nothing was scored", status=Status.RETRY, code="rank-died",
                          hint="-v shows what it said; run again, and if it recurs see whether memory ran out",
                          ) from error  # fmt: skip

    # -- protocol

    def bind(self, operator: Any) -> None:
        """XdError 69 for an operator of hidden states when the logits are more than the head's product."""
        if operator.inputs == "hidden" and not all(self._ask("head_is_plain")):
            raise XdError("takes hidden states and the head's weight, and this model scales or caps its logits, or "
                          "adds a bias", status=Status.REFUSED, code="unsupported-model",
                          where=f"operator {operator.backend}", found=self._architecture())  # fmt: skip
        super().bind(operator)

    def settings(self) -> dict[str, Observation]:
        worlds = self._ask("world")
        return {
            "rollout.dtype": self._parameter_dtype(),
            "rollout.tensor_parallel_size": ranks.tensor_parallel(worlds),
            "rollout.context_parallel_size": ranks.context_parallel(worlds),
        }

    def state(self) -> dict[str, Any]:
        return agreement.state(self._ask("state"))

    def parameters(self) -> Iterator[tuple[str, str, tuple[int, ...], bytes | BytesElsewhere]]:
        groups = self._ask("weight_groups")
        for index, parts in enumerate(groups[0]):
            if len(groups) == 1:
                of_rank = self._ask("whole_weights", index)[0]
                yield from ((part.name, *found) for part, found in zip(parts, of_rank, strict=bool(of_rank)))
                continue
            held = [found for found in self._ask("weights", index) if found]  # what is tied, a rank does not tell
            for part, of_ranks in zip(parts, zip(*held, strict=True), strict=bool(held)):
                whole = shards.whole(part, [bits for _, bits in of_ranks])
                yield part.name, "+".join(sorted({dtype for dtype, _ in of_ranks})), whole.shape, whole.tobytes()

    def buffers(self) -> Iterator[tuple[str, str, tuple[int, ...], bytes]]:
        yield from agreement.odd_one(self._ask("buffers"))

    def not_parameters(self) -> list[str]:
        return sorted(self._checkpoint_tensors - self._weight_names())

    def score(self, sequences: Sequences, request: Request) -> Scores:
        """As TorchEngine. XdError 69 for sequences that vLLM cannot be given as they are, 75 when memory runs out or a
        worker dies."""
        _require_plain(sequences)
        if not self.llm.reset_prefix_cache():
            raise XdError("vLLM does not empty its prefix cache", status=Status.BUG, code="engine-error")
        try:
            with self._living():
                return super().score(sequences, request)
        except Exception as error:
            if isinstance(error, XdError) or not ran_out_of_memory(error):
                raise
            raise XdError(f"vLLM ran out of memory: {' '.join(str(error).split())}", status=Status.RETRY,
                          code="out-of-memory", hint="a smaller batch.size needs less") from error  # fmt: skip

    def behaviour(self) -> dict[str, Observation]:
        assert self._observer is not None and self._sequences is not None
        described, forwards = self._described, len(self._observer.forwards)
        not_fed = agreement.agreed([seen.shared_tokens for seen in self._seen])
        modes = {name: described[name] for name in ("compilation", "graphs")}
        return {
            "batch.size": self._batch_size(),
            "rollout.dtype": self._compute_dtype(),
            "rollout.enable_prefix_caching": prefixes.observed(
                self._sequences, described["block_size"], self._caches(), not_fed, sum(self._cached)
            ),
            "rollout.enforce_eager": ranks.enforce_eager([seen.runs for seen in self._seen], forwards, modes),
            "logp.backend": self._logp_backend(),
        }

    def describe(self) -> dict[str, Any]:
        """As the first rank describes itself; numeric states of the ranks where they are processes of their own."""
        apart = {"rank_numerics": self._ask("numerics")} if len(self._ask("world")) > 1 else {}
        return {**self._ask("described")[0], **apart, "torch": torch.__version__, "vllm": vllm.__version__}

    def close(self) -> None:
        self._operator = None
        self._forget_run()
        core = self.llm.llm_engine.engine_core
        del self.llm
        core.shutdown()
        cleanup_dist_env_and_memory()

    # -- one scoring

    @contextlib.contextmanager
    def _watched(self, observer: Observer) -> Iterator[None]:
        self._ask("begin", self._sequences, self._request, self._operator)
        yield
        self._seen = self._ask("end")
        _require_agreement(self._seen)
        observer.take_over([seen.observer for seen in self._seen])
        self._operator.take_over(self._seen[0].operator)
        if self._operator.inputs == "logits":
            self._logits_dtypes = set().union(*(seen.logits_dtypes for seen in self._seen))

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
        return min(self._ask("caches")) > 0

    def _vocabulary(self) -> int:
        return min(self._ask("vocabulary"))

    def _architecture(self) -> str:
        return self._described["class"]

    # -- read-back

    def _parameter_dtype(self) -> Observation:
        held = sorted(set().union(*self._ask("parameter_dtypes")))
        return Observation(held[0] if len(held) == 1 else None, {"parameters": held})

    def _compute_dtype(self) -> Observation:
        """What hidden states and logits came out in."""
        seen = sorted(set().union(*(each.hidden_dtypes | each.logits_dtypes for each in self._seen)))
        return Observation(seen[0] if len(seen) == 1 else None, {"computed": seen, **self._parameter_dtype().evidence})

    def _caches(self) -> bool:
        """Whether the scheduler's cache manager is one that keeps prefixes."""
        return self._core().scheduler.kv_cache_manager.enable_caching

    def _core(self) -> Any:
        """The engine core, which has the scheduler and the executor of the ranks."""
        return self.llm.llm_engine.engine_core.engine_core

    def _weight_names(self) -> set[str]:
        return {part.name for parts in self._ask("weight_groups")[0] for part in parts}

    def _require_whole(self) -> None:
        """XdError 69 for a model whose head is not where a language model has it; 65 when vLLM holds weights that the
        checkpoint lacks, as it does where a part of a fused one is missing."""
        if not all(self._ask("has_head")):
            raise XdError("this model has no head of its own that could be observed", status=Status.REFUSED,
                          code="unsupported-model", where=self._architecture())  # fmt: skip
        missing = sorted(self._weight_names() - self._checkpoint_tensors - {shards.HEAD})
        if missing:
            raise XdError("the checkpoint lacks weights of the model, or vLLM knows them under other names",
                          code="bad-checkpoint", where=self._architecture(), found=missing)  # fmt: skip


def _require_agreement(seen: list[rank.Seen]) -> None:
    """XdError 69 where ranks ran other forwards than the first, or computed under another numeric state than before."""
    if agreement.agreed([each.observer.forwards for each in seen]) is None:
        raise XdError("the ranks ran different forwards", status=Status.REFUSED, code="ranks-differ",
                      found=[len(each.observer.forwards) for each in seen])  # fmt: skip
    for place, (before, after) in enumerate(each.numerics for each in seen):
        if before != after:
            changed = sorted(name for name in before if before[name] != after[name])
            raise XdError("a rank's numeric state was changed while it scored", status=Status.REFUSED,
                          code="numerics-changed", where=f"rank {place}", found=changed)  # fmt: skip


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
