"""Runtime vllm with a live vLLM: `make setup-vllm`, then XD_PYTHON_VLLM names its interpreter; skipped without.

What the engine does is asked of one process there (vllm_live.py) on a tiny random Llama; what the chain makes of it, of
the tools, on the real model.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import tolerances
from conftest import ROOT, Tools

PYTHON = os.environ.get("XD_PYTHON_VLLM") and os.path.abspath(os.environ["XD_PYTHON_VLLM"])
pytestmark = [
    pytest.mark.skipif(
        not PYTHON, reason="no vLLM here: make setup-vllm, then XD_PYTHON_VLLM=.venv-vllm/bin/python"
    ),
    pytest.mark.xdist_group("vllm"),  # one process is asked for all of them
]
ENGINES = ROOT / "tests" / "engines"
#: runtimes that are vllm but for one thing -> what the verdict blames
DISHONEST = {"vllm-reloads-weights": "weights", "vllm-feeds-other-id": "token-ids"}


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    """answer name -> what vllm_live.py says of it."""
    place = tmp_path_factory.mktemp("vllm")
    done = subprocess.run(
        [str(PYTHON), "-P", str(ROOT / "tests" / "vllm_live.py"), str(place)], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}, check=False, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def answer(asked, request):
    """What stands under the name of the test's marker."""
    (name,) = request.node.get_closest_marker("answer").args
    assert "error" not in asked[name], asked[name]["error"]
    return asked[name]


# -- weights


@pytest.mark.answer("weights")
def test_weights_are_those_of_the_checkpoint_in_every_dtype(answer):
    """Fused, prepacked, tied, padded and biased ones, bit for bit."""
    assert len(answer) == 6
    for name, (held, expected, dtype) in answer.items():
        assert held == expected and len(held) > 10, name
        assert name.endswith(dtype)


@pytest.mark.answer("reloaded")
def test_other_weights_are_seen_inside_the_engine(answer):
    assert answer["same"] == {}
    assert answer["other"] == [answer["expected"]]  # one element of one part of a fused, packed layer


@pytest.mark.answer("packed_twice")
def test_a_packed_layer_is_recovered_once_and_again_when_its_product_is_another_one(answer):
    first, second, third = answer["counts"]
    assert first == second == 9 and third == 10  # 2 layers of 4 matrices, and the head
    assert answer["changed"] == [[], ["model.layers.0.self_attn.o_proj.weight"]]


@pytest.mark.answer("head_alone")
def test_a_tied_head_that_holds_something_else_than_its_embedding_shows(answer):
    assert answer == ["lm_head.weight", "model.embed_tokens.weight"]


# -- numbers


@pytest.mark.answer("own_logprobs")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("semantics", ["raw", "processed"])
def test_native_gives_bitwise_what_vllm_said_while_it_sampled(answer, dtype, semantics):
    found = answer[f"{dtype} {semantics}"]
    assert len(found["own"]) > 30
    assert found["replayed"] == found["own"]
    assert all(ours != theirs for ours, theirs in zip(found["other"], found["own"], strict=True))  # negative control


@pytest.mark.answer("prompt_logprobs")
def test_native_gives_bitwise_vllms_own_prompt_logprobs(answer):
    assert answer["prefilled"] == answer["own"] and len(answer["own"]) > 20
    assert answer["apart"] < tolerances.TINY_LLAMA_FLOAT32_NATS
    assert answer["forwards"] == 1
    shown = {name: seen["value"] for name, seen in answer["behaviour"].items()}
    assert shown["batch.size"] == 6 and shown["rollout.enable_prefix_caching"] is False


@pytest.mark.answer("operators")
@pytest.mark.parametrize("backend", ["xd.reference_logp", "xd.triton_logp", "xd.fused_linear_logp"])
def test_an_operator_stands_in_the_sampler(answer, backend):
    found, native = answer[backend], answer["native"]
    assert found["behaviour"]["value"] == backend
    assert found["calls"] == native["calls"] and found["returned"] == len(native["logprobs"])
    assert found["untouched"]
    assert np.abs(np.subtract(found["logprobs"], native["logprobs"])).max() < tolerances.TINY_LLAMA_FLOAT32_NATS
    hidden = backend != "xd.triton_logp"
    assert found["logits_dtype"] == (None if hidden else "float32")


@pytest.mark.answer("not_numbers")
def test_logprobs_that_are_no_numbers_are_scores(answer):
    assert answer["nan"] == answer["scored"] > 0
    assert answer["minus infinity"] == answer["ruled out"] != []
    assert answer["finite"] == answer["scored"] - len(answer["ruled out"])


# -- evidence


@pytest.mark.answer("evidence")
def test_every_frozen_token_is_fed_or_shared_and_seen(answer):
    frozen_tokens = 253
    for scored, size in zip(answer["scored"], (4, 1, 4), strict=True):
        assert scored["fed"] and scored["outside"] == 0 and scored["cache"] == "kv_cache"
        batch, caching = scored["behaviour"]["batch.size"], scored["behaviour"]["rollout.enable_prefix_caching"]
        assert batch["value"] == size and max(batch["evidence"]["batches"]) == size
        assert caching["value"] is True
        assert caching["evidence"]["hits"] == caching["evidence"]["not_fed"] == frozen_tokens - scored["fed_tokens"] > 0
        eager = scored["behaviour"]["rollout.enforce_eager"]
        assert eager["value"] is True and eager["evidence"]["first_layer_calls"] == [eager["evidence"]["forwards"]]


@pytest.mark.answer("crossed")
def test_keys_of_another_sequence_leave_a_token_unattended(answer):
    assert answer["honest"] == []
    assert answer["unattended"] == answer["decoded_together"] and len(answer["decoded_together"]) == 12
    assert answer["moved"] > 0  # vLLM did use those keys


@pytest.mark.answer("evidence")
def test_one_engine_serves_several_batch_sizes_and_remembers_nothing(answer):
    first, _, again = answer["scored"]
    assert again["bits"] == first["bits"]
    assert again["fed_tokens"] == first["fed_tokens"]  # the prefix cache was emptied in between
    assert answer["changed"] == {} and answer["numerics"] == []


@pytest.mark.answer("evidence")
def test_the_live_engine_describes_itself(answer):
    assert answer["describe"]["attention"] == ["CPUAttentionBackend"]
    assert answer["describe"]["block_size"] == 32 and answer["describe"]["cache_blocks"] > 0
    assert answer["describe"]["batch_invariant"] is False
    assert answer["settings"]["rollout.tensor_parallel_size"]["value"] == 1
    assert answer["settings"]["rollout.context_parallel_size"]["value"] == 1
    assert answer["state"] == {"mode": "eval", "optimizer": False}


@pytest.mark.answer("uncached")
def test_without_prefix_caching_every_token_is_fed(answer, asked):
    assert answer["fed_tokens"] == 253
    caching = answer["behaviour"]["rollout.enable_prefix_caching"]
    assert caching["value"] is False and caching["evidence"]["could_hit"] is True
    assert answer["bits"] == asked["evidence"]["scored"][0]["bits"]


@pytest.mark.answer("compiled")
def test_a_compiled_forward_is_counted_and_depends_on_no_scoring_before(answer):
    seen = answer["behaviour"]["rollout.enforce_eager"]
    assert seen["value"] is False
    (graph_runs,) = seen["evidence"]["graph_runs"]
    assert seen["evidence"]["first_layer_calls"] == [0] and graph_runs >= seen["evidence"]["forwards"]
    first, _, again = answer["runs"]
    assert again == first


# -- tensor parallel


@pytest.mark.answer("two_ranks")
@pytest.mark.parametrize("size", [1, 2])
def test_the_world_is_read_back_from_the_ranks(answer, size):
    found = answer[str(size)]
    shown = {name: seen["value"] for name, seen in {**found["settings"], **found["behaviour"]}.items()}
    assert shown == {
        "rollout.tensor_parallel_size": size, "rollout.context_parallel_size": 1, "rollout.dtype": "float32",
        "rollout.enable_prefix_caching": True, "rollout.enforce_eager": True, "batch.size": 4, "logp.backend": "native",
    }  # fmt: skip
    assert found["settings"]["rollout.tensor_parallel_size"]["evidence"]["ranks"] == list(range(size))
    assert found["fed"] and found["changed"] == {} and found["state"] == {"mode": "eval", "optimizer": False}
    assert len(found["described"].get("rank_numerics", [])) == (size if size > 1 else 0)


@pytest.mark.answer("two_ranks")
def test_weights_that_are_split_over_ranks_are_put_together(answer):
    """Fused, packed, biased ones, split by rows or columns, and a vocabulary whose last rank has fewer rows."""
    held, expected = answer["digests"]
    assert held == expected and len(held) > 20 and answer["buffers"] > 0


@pytest.mark.answer("two_ranks")
def test_two_ranks_say_what_one_says_but_for_rounding(answer):
    assert 0 < answer["apart"] < tolerances.TINY_LLAMA_FLOAT32_NATS


@pytest.mark.answer("two_ranks")
def test_what_one_rank_alone_does_shows(answer):
    assert answer["norm"] == ["model.norm.weight"]
    assert answer["unattended"] == 12 and answer["not fed"] == 253


@pytest.mark.answer("two_ranks")
def test_a_rank_that_dies_ends_the_scoring_and_the_other_ranks(answer):
    status, line = answer["death"]
    assert status == 75 and "a worker of vLLM died" in line and "\n" not in line
    assert answer["workers"] == 2 and answer["left"] == []


# -- bad input


@pytest.mark.answer("refused")
@pytest.mark.parametrize(
    ("name", "status", "words"),
    [
        ("architecture", 69, "no model of this architecture"),
        ("context", 65, "longer than the model's context"),
        ("no weights", 66, "model.safetensors"),
        ("fewer layers", 65, "model.layers.2"),
        ("a part of a fused weight", 65, "model.layers.0.self_attn.q_proj.weight"),
        ("no memory for the cache", 75, "fewer or shorter ones"),
        ("a worker that does not start", 70, "a worker of vLLM does not start"),
        ("a worker that is killed while it starts", 70, "a worker of vLLM does not start"),
        ("no memory to score", 75, "smaller batch.size"),
        ("fewer logprobs", 70, "another number of logprobs"),
        ("another id", 70, "another id than the frozen one"),
        ("vocabulary", 65, "beyond the vocabulary"),
        ("masked", 69, "masks nothing"),
        ("shifted", 69, "positions from 0"),
    ],
)
def test_what_cannot_be_scored_says_why_in_one_line(answer, name, status, words):
    found, line = answer[name]
    assert found == status and words in line and "\n" not in line


@pytest.mark.answer("refused")
def test_a_sequence_may_be_as_long_as_the_context(answer):
    assert answer["full context"] is None


# -- the chain, on the real model


@pytest.fixture(scope="module")
def judged(root, tmp_path_factory):
    """Case or dishonest runtime -> (comparison, rollout readback); float32 on both sides."""
    model = root / "models" / "smollm2-135m-instruct"
    assert (model / "model.safetensors").exists(), "run `make model`"
    place = tmp_path_factory.mktemp("chain")
    tools = Tools(place)
    # where both interpreters find xd and the dishonest runtimes, and what those runtimes run in
    paths = [str(ENGINES), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    installed = {"PYTHONPATH": os.pathsep.join(paths)}
    installed |= {f"XD_PYTHON_{name.upper().replace('-', '_')}": str(PYTHON) for name in DISHONEST}

    def ran(tool, *arguments, stdin=""):
        done = tools(tool, "-q", *arguments, stdin=stdin, env=installed)
        assert done.status == 0, done.err
        return done.out

    ran("xd-rollout", root / "experiments" / "prompts" / "short.jsonl", "--model", model, "--samples", 2,
        "--max-new-tokens", 6, "--seed", 1, "--out", place / "sequences.safetensors")  # fmt: skip
    config = json.loads((root / "experiments" / "smollm2-vllm.json").read_text())
    config["experiment_id"] = "chain"
    config["identity"]["checkpoint"]["path"] = config["identity"]["tokenizer"]["path"] = str(model)
    config["identity"]["sequences"]["path"] = "sequences.safetensors"
    config["baseline"]["rollout"]["dtype"] = config["baseline"]["training"]["compute_dtype"] = "float32"
    config["interventions"] = [{"path": "batch.size", "values": [1]}]
    (place / "chain.json").write_text(json.dumps(config))
    rows = ran("xd-plan", place / "chain.json").splitlines()
    cases = {"baseline": (rows[0], "vllm"), "batch.size": (rows[1], "vllm")}
    cases |= {name: (rows[0], name) for name in DISHONEST}
    attempts = {
        name: ran("xd-materialize", "--runs", "runs", "--runtime-rollout", runtime, "--runtime-training", "hf",
                  stdin=row + "\n").strip()
        for name, (row, runtime) in cases.items()
    }  # fmt: skip
    text = "".join(f"{attempt}\n" for attempt in attempts.values())
    for side in ("rollout", "training"):
        text = ran("xd-score", "--side", side, stdin=text)
    ran("xd-compare", stdin=text)
    found = {}
    for name, attempt in attempts.items():
        where = Path(place / attempt)
        found[name] = [json.loads((where / f).read_text()) for f in ("comparison.json", "readback_rollout.json")]
    return found


@pytest.mark.parametrize("case", ["baseline", "batch.size"])
def test_the_chain_judges_vllm_against_transformers(judged, case):
    comparison, readback = judged[case]
    assert comparison["status"] in ("PASS", "MISMATCH")
    assert comparison["violations"] == [] and comparison["artifact_problems"] == []
    assert comparison["logprob_difference"]["max_absolute"] < tolerances.DECODE_AGAINST_ONE_PASS_FLOAT32_NATS
    assert {knob["status"] for knob in readback["knobs"]} == {"applied"}
    assert readback["engine"]["class"] == "LlamaForCausalLM" and readback["not_parameters"] == []


def test_batch_sizes_share_an_engine(judged):
    serials = [judged[case][1]["reuse"]["engine_serial"] for case in ("baseline", "batch.size")]
    assert serials == [1, 1]


@pytest.mark.parametrize(("runtime", "code"), DISHONEST.items())
def test_an_engine_that_scores_something_else_is_invalid(judged, runtime, code):
    comparison, _ = judged[runtime]
    assert comparison["status"] == "INVALID_IDENTITY"
    assert code in {violation["code"] for violation in comparison["violations"]}
    assert {violation["side"] for violation in comparison["violations"]} == {"rollout"}
