"""What hf makes sure of before it computes with a model: its attention, its head, the memory it needs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hf_fixtures import VOCABULARY, Bench, frozen, plan, save_model

from libxd import sequences
from libxd.errors import Status, XdError
from libxd.runtimes import sizes
from libxd.runtimes.hf import memory

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64}  # fmt: skip


def change_config(directory, **changes) -> None:
    file = Path(directory) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def save(directory, config) -> Bench:
    torch.manual_seed(3)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return Bench(directory)


# -- the head


@pytest.mark.parametrize(
    "config",
    [
        lambda scale: transformers.GraniteConfig(**SIZES, logits_scaling=8.0 if scale else 1.0),
        lambda scale: transformers.CohereConfig(**SIZES, logit_scale=0.0625 if scale else 1.0),
        lambda scale: transformers.Gemma2Config(**SIZES, final_logit_softcapping=30.0 if scale else None,
                                                 attn_logit_softcapping=None),
    ],
    ids=["granite", "cohere", "gemma2"],
)  # fmt: skip
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_that_does_more_behind_its_head_is_refused(tmp_path, config, dtype):
    asked = {"training__compute_dtype": dtype, "training__attention_backend": "eager"}
    with pytest.raises(XdError, match="not its head's product alone") as refused:
        save(tmp_path / "scaled", config(True)).open("training", **asked)
    assert refused.value.status == Status.REFUSED
    assert save(tmp_path / "plain", config(False)).open("training", **asked) is not None


def test_what_is_behind_the_head_is_found_under_any_name(tmp_path, monkeypatch):
    """No list of names: the forward of the model decides."""
    save_model(tmp_path / "tiny")
    bench = Bench(tmp_path / "tiny")
    assert bench.open("rollout") is not None
    forward = transformers.LlamaForCausalLM.forward

    def multiplied(model, *arguments, **options):
        out = forward(model, *arguments, **options)
        out.logits = out.logits * 1.0009765625
        return out

    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", multiplied)
    with pytest.raises(XdError, match="not its head's product alone"):
        bench.open("rollout")


# -- attention


def flash(**changes):
    machine = {"device": "cuda", "packages": {"flash-attn": "2.8", "flash-attn-3": "3.0"},
               "cuda": {"driver": "13.0", "devices": [{"name": "a GPU", "capability": changes.pop("capability")}]}}
    made = plan("training", **{"training__compute_dtype": "bfloat16", **changes}, **machine)
    return next(record for record in made.knobs if record.knob == "training.attention_backend")


@pytest.mark.parametrize(
    ("backend", "capability", "dtype", "reason"),
    [
        ("flash_attention_2", "9.0", "bfloat16", None),
        ("flash_attention_2", "8.0", "float16", None),
        ("flash_attention_2", "9.0", "float32", "not in float32"),
        ("flash_attention_3", "9.0", "float32", "not in float32"),
        ("flash_attention_2", "7.5", "float16", "capability 8.0"),
        ("flash_attention_3", "9.0", "bfloat16", None),
        ("flash_attention_3", "8.0", "bfloat16", "capability 9.0"),
        ("flash_attention_3", "10.0", "bfloat16", "below 10.0"),
    ],
)
def test_flash_attention_needs_a_dtype_and_a_device_that_it_has_kernels_for(backend, capability, dtype, reason):
    record = flash(training__attention_backend=backend, training__compute_dtype=dtype, capability=capability)
    assert record.status == ("applied" if reason is None else "unsupported")
    assert reason is None or reason in record.evidence


@pytest.mark.parametrize(("capability", "status"), [("7.0", "applied"), ("6.1", "unsupported")])
def test_triton_needs_a_device_that_it_compiles_for(capability, status):
    machine = {"device": "cuda", "packages": {"triton": "3.6"},
               "cuda": {"driver": "13.0", "devices": [{"name": "a GPU", "capability": capability}]}}  # fmt: skip
    for side, knob in (("rollout", "rollout__enforce_eager"), ("training", "training__attention_backend")):
        made = plan(side, **{knob: False if side == "rollout" else "flex_attention"}, **machine)
        assert next(r.status for r in made.knobs if r.knob == knob.replace("__", ".")) == status


@pytest.mark.parametrize("attention", ["flash_attention_2", "sdpa"])
def test_an_attention_that_the_model_lacks_is_refused_and_no_broken_checkpoint(tmp_path, monkeypatch, attention):
    save_model(tmp_path / "tiny")
    bench = Bench(tmp_path / "tiny")
    if attention == "sdpa":
        assert bench.open("training", training__attention_backend="sdpa") is not None
        monkeypatch.setattr(transformers.LlamaForCausalLM, "_supports_sdpa", False)
        with pytest.raises(XdError, match="cannot be run with sdpa") as refused:
            bench.open("training", training__attention_backend="sdpa")
    else:
        from libxd.runtimes.hf.loading import load

        with pytest.raises(XdError, match="cannot be run with flash_attention_2") as refused:
            load(str(bench.directory), torch.bfloat16, attention)
    assert refused.value.status == Status.REFUSED


def test_an_attention_that_lacks_what_the_model_asks_of_it_is_refused(tmp_path):
    bench = save(tmp_path / "capped", transformers.Gemma2Config(**SIZES, attn_logit_softcapping=50.0,
                                                                final_logit_softcapping=None))  # fmt: skip
    with pytest.raises(XdError, match="cannot be run with sdpa") as refused:
        bench.open("training", training__attention_backend="sdpa")
    assert refused.value.status == Status.REFUSED
    assert bench.open("training", training__attention_backend="eager") is not None


# -- memory

ENGINES = {
    "rollout": {"device": "cpu", "dtype": "float32", "attention": "sdpa", "enable_prefix_caching": False,
                "world_size": 1, "tensor_parallel_size": 1, "context_parallel_size": 1},
    "training": {"device": "cpu", "dtype": "float32", "attention": "sdpa", "world_size": 1},
}


@pytest.fixture
def place(tmp_path):
    save_model(tmp_path / "tiny")
    sequences.write(tmp_path / "short.safetensors", frozen())
    return {"checkpoint": str(tmp_path / "tiny"), "sequences": str(tmp_path / "short.safetensors")}


def test_weights_are_counted_by_their_headers(place):
    """Neither by what config.json calls their dtype, nor with a file that nothing loads."""
    from safetensors.torch import load_file, save_file

    directory = place["checkpoint"]
    held = load_file(f"{directory}/model.safetensors")
    elements = sum(tensor.numel() for tensor in held.values())
    assert sizes.weights(directory, 4) == 4 * elements and sizes.weights(directory, 2) == 2 * elements
    before = memory.estimate("training", ENGINES["training"], place)
    change_config(directory, dtype="float16", torch_dtype="float16")
    save_file(held, f"{directory}/consolidated.safetensors")
    assert memory.estimate("training", ENGINES["training"], place) == before
    assert memory.estimate("training", ENGINES["training"], {"checkpoint": None}) == 0


@pytest.mark.parametrize("side", ["rollout", "training"])
def test_longer_sequences_and_a_larger_vocabulary_need_more(place, side, tmp_path):
    def estimate(**changes):
        return memory.estimate(side, {**ENGINES[side], **changes}, place)

    before = estimate()
    change_config(place["checkpoint"], vocab_size=VOCABULARY + 1000)
    tokens = frozen().num_tokens
    assert estimate() - before == 1000 * tokens * (4 + 12)  # logits, upcast, scaled, log-softmax
    change_config(place["checkpoint"], vocab_size=VOCABULARY)
    sequences.write(tmp_path / "long.safetensors", frozen(response_lens=((50, 9, 4), (6, 6, 2), (8, 3, 5))))
    place["sequences"] = str(tmp_path / "long.safetensors")
    cells = 9 * (3 + 50) - 9 * 16  # the longest was 8 + 8
    assert estimate() - before > cells * 64 * 4
    if side == "rollout":
        cached = 2 * 2 * 2 * 16 * 4  # keys and values, layers, heads, head_dim, bytes
        assert estimate(enable_prefix_caching=True) - estimate() == 9 * 53 * cached
    else:
        assert estimate(attention="eager") - estimate() == 9 * 53 * 53 * 4 * 8


def test_ranks_on_a_cpu_share_its_memory_and_devices_hold_a_part(place):
    """On the CPU every rank loads the whole before it keeps its part; of a device the greatest rank's need counts."""
    whole = sizes.weights(place["checkpoint"], 4)

    def estimate(side, **changes):
        return memory.estimate(side, {**ENGINES[side], **changes}, place)

    assert estimate("training", world_size=2) == 2 * estimate("training")
    assert estimate("rollout", world_size=2, tensor_parallel_size=2) < 2 * estimate("rollout")  # a cache is split
    cuda = {"device": "cuda"}
    cached = 9 * 13 * 2 * 2 * 2 * 16 * 4  # rows, columns, keys and values, layers, heads, head_dim, bytes
    split = estimate("rollout", world_size=2, tensor_parallel_size=2, **cuda)
    assert estimate("rollout", **cuda) - split == whole - whole // 2 + cached // 2
    assert estimate("training", **cuda) >= estimate("training", world_size=2, **cuda)
