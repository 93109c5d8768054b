"""What a checkpoint, sequences and a process decide, through the real chain: hf on a tiny model, and cpu-smoke."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ROOT, Tools

from libxd import sequences
from libxd.errors import Status
from libxd.rundir import SIDES

pytest.importorskip("torch")
pytest.importorskip("transformers")

from hf_fixtures import frozen, save_model

ENVIRONMENT = {"PYTHONPATH": str(ROOT / "tests" / "engines"), "OMP_NUM_THREADS": "1"}


class Chain:
    """The tiny experiment in one place; each stage is a tool."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.model = place / "model"
        save_model(self.model)
        self.tools = Tools(place)
        sequences.write(place / "tiny.safetensors", frozen())

    def run(self, *command: object, stdin: str = "", status: int = 0) -> Any:
        done = self.tools(*command, stdin=stdin, env=ENVIRONMENT)
        assert done.status == status, done.err
        return done

    def plan(self, **identity: Any) -> str:
        return self.planned(**identity).out

    def planned(self, status: int = 0, **identity: Any) -> Any:
        config = json.loads((ROOT / "experiments" / "smollm2-fp32.json").read_text())
        config |= {"experiment_id": "tiny", "scenario_id": "tiny-decode-fp32", "interventions": []}
        config["identity"] |= {
            "checkpoint": {"path": "model", "digest": None},
            "tokenizer": {"id": "none", "policy": "token_ids"},
            "sequences": {"path": "tiny.safetensors", "digest": None},
            "model": {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128},
            **identity,
        }
        (self.place / "tiny.json").write_text(json.dumps(config))
        return self.run("xd-plan", "tiny.json", status=status)

    def attempts(self, rows: str, runtime: str = "hf", training: str | None = None) -> list[str]:
        return self.materialized(rows, runtime, training).out.splitlines()

    def materialized(self, rows: str, runtime: str = "hf", training: str | None = None, status: int = 0) -> Any:
        return self.run("xd-materialize", "--runs", "runs", "--runtime-rollout", runtime, "--runtime-training",
                        training or runtime, stdin=rows, status=status)  # fmt: skip

    def score(self, side: str, *attempts: str, status: int = 0) -> Any:
        return self.run("xd-score", "--side", side, *attempts, status=status)

    def compared(self, *attempts: str) -> list[dict[str, Any]]:
        for side in SIDES:
            self.score(side, *attempts)
        self.run("xd-compare", *attempts)
        return [json.loads((self.place / path / "comparison.json").read_text()) for path in attempts]

    def readback(self, attempt: str, side: str) -> dict[str, Any]:
        return json.loads((self.place / attempt / f"readback_{side}.json").read_text())


@pytest.fixture
def chain(tmp_path) -> Chain:
    return Chain(tmp_path)


def test_a_config_that_was_edited_since_planning_is_not_computed_with(chain):
    (attempt,) = chain.attempts(chain.plan())
    path = chain.model / "config.json"
    planned = path.read_text()
    config = json.loads(planned)
    config["rms_norm_eps"] *= 10
    path.write_text(json.dumps(config))
    for side in SIDES:
        ran = chain.score(side, attempt, status=Status.INVALID)
        assert "the checkpoint has changed since planning" in ran.err and "/config.json" in ran.err
    path.write_text(planned)
    (chain.model / "adapter_config.json").write_text("{}")  # transformers would look for an adapter
    assert "/adapter_config.json" in chain.score("rollout", attempt, status=Status.INVALID).err
    (chain.model / "adapter_config.json").unlink()
    assert chain.compared(attempt)[0]["status"] == "PASS"  # negative control: what was planned


def broken(model: Path, how: str) -> None:
    """Each planned as it is: only what reads it finds out."""
    config, weights = model / "config.json", model / "model.safetensors"
    if how == "truncated weights":
        weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    elif how == "a config of other sizes":
        config.write_text(json.dumps(json.loads(config.read_text()) | {"hidden_size": 512}))
    elif how == "a config of wrong types":
        config.write_text(json.dumps(json.loads(config.read_text()) | {"num_hidden_layers": "two"}))
    elif how == "an unknown model":
        config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": "nope"}))
    else:
        config.write_text("[]")


@pytest.mark.parametrize(
    ("how", "named", "stage"),
    [
        ("a list for a config", "config.json", "plan"),
        ("truncated weights", "model.safetensors", "materialize"),
        ("a config of other sizes", "model.safetensors#/model.embed_tokens.weight", "materialize"),
        ("a config of wrong types", "num_hidden_layers", "score"),
        ("an unknown model", "nope", "score"),
    ],
)
def test_a_broken_checkpoint_is_the_users_to_mend_and_named_where_it_can_be_known(chain, how, named, stage):
    broken(chain.model, how)
    if stage == "plan":
        ran = chain.planned(status=Status.INVALID)
    elif stage == "materialize":
        ran = chain.materialized(chain.plan(), status=Status.INVALID)
    else:
        (attempt,) = chain.attempts(chain.plan())
        ran = chain.score("training", attempt, status=Status.INVALID)
    assert named in ran.err and len(ran.err.splitlines()) == 1


def test_a_buffer_of_hf_that_only_one_side_holds_is_seen(chain):
    rows = chain.plan()
    (honest,) = chain.attempts(rows)
    (other,) = chain.attempts(rows, training="hf-holds-other-buffer")
    found = chain.compared(honest, other)
    assert [each["status"] for each in found] == ["PASS", "INVALID_IDENTITY"]
    assert {(each["code"], each["path"]) for each in found[1]["violations"]} == {
        ("buffers", "readback_training.json#/buffers/model.rotary_emb.inv_freq/digest")
    }
    assert chain.readback(honest, "rollout")["buffers"].keys() == chain.readback(other, "training")["buffers"].keys()


def test_a_tensor_of_the_checkpoint_that_is_no_parameter_is_recorded_and_no_violation(chain):
    """Old exports of Llama hold the table of rotary frequencies, a layer each."""
    import torch
    from safetensors.torch import load_file, save_file

    path = chain.model / "model.safetensors"
    leftovers = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.ones(8) for layer in range(2)}
    save_file({**load_file(path), **leftovers}, path, {"format": "pt"})
    (attempt,) = chain.attempts(chain.plan())
    (found,) = chain.compared(attempt)
    assert (found["status"], found["violations"]) == ("PASS", [])
    assert [chain.readback(attempt, side)["not_parameters"] for side in SIDES] == [sorted(leftovers)] * 2


def test_the_numeric_state_of_the_process_is_read_back(chain):
    (attempt,) = chain.attempts(chain.plan())
    chain.compared(attempt)
    for side in SIDES:
        found = chain.readback(attempt, side)["engine"]["numerics"]
        assert found["threads"] == 1 and found["float32_matmul_precision"] == "highest" and found["denormals"] is True


# -- no response, and repeats


def unanswered() -> sequences.Sequences:
    """s0's tokens with all of each sequence as its prompt."""
    given = sequences.read(ROOT / "experiments" / "sequences" / "s0.safetensors")
    lengths = np.diff(given.cu_seqlens).astype(np.int32)
    nothing = np.zeros(given.num_tokens, bool)
    silent = np.full(given.num_tokens, np.nan, np.float32)
    return dataclasses.replace(given, prompt_lens=lengths, active_mask=nothing, logprobs=silent,
                               prompt_index=np.arange(len(lengths), dtype=np.int32))  # fmt: skip


def smoke(place: Path, *flags: str, **identity: Any) -> str:
    config = json.loads((ROOT / "experiments" / "s0.json").read_text())
    config["identity"] |= {"sequences": {"path": "s.safetensors", "digest": None}, **identity}
    config["interventions"] = []
    (place / "s0.json").write_text(json.dumps(config))
    return Tools(place)("xd-plan", "s0.json", *flags).out


@pytest.mark.parametrize("mode", ["decode", "prefill"])
def test_without_a_response_there_is_a_verdict_and_it_is_zero_active_tokens(tmp_path, mode):
    chain = Chain(tmp_path)
    sequences.write(tmp_path / "s.safetensors", unanswered())
    row = smoke(tmp_path, rollout_mode=mode)
    (attempt,) = chain.attempts(row, "cpu-smoke")
    (found,) = chain.compared(attempt)
    assert (found["status"], found["violations"]) == ("ZERO_ACTIVE_TOKENS", [])
    assert chain.readback(attempt, "rollout")["operator"]["calls"] == 0


def test_without_a_response_hf_is_judged_alike(chain):
    given = frozen(response_lens=((0,), (0,), (0,)))
    (chain.place / "tiny.safetensors").unlink()
    sequences.write(chain.place / "tiny.safetensors", given)
    (found,) = chain.compared(*chain.attempts(chain.plan()))
    assert (found["status"], found["violations"]) == ("ZERO_ACTIVE_TOKENS", [])


def test_a_repeat_is_scored_by_a_process_of_its_own(tmp_path):
    """Its noise is that from run to run; and rotated, its batches are others."""
    chain = Chain(tmp_path)
    sequences.write(tmp_path / "s.safetensors", sequences.read(ROOT / "experiments" / "sequences" / "s0.safetensors"))
    attempts = chain.attempts(smoke(tmp_path, "--repeats", "2", "--repeat-order", "rotated"), "cpu-smoke")
    found = chain.compared(*attempts)
    assert [each["status"] for each in found] == ["PASS"] * 3
    for side in SIDES:
        # the first case of the first engine of its process, each
        assert [chain.readback(attempt, side)["reuse"] for attempt in attempts] == [
            {"engine_serial": 1, "case_serial": 1}] * 3  # fmt: skip
    sizes = [
        next(knob for knob in chain.readback(attempt, "rollout")["knobs"] if knob["knob"] == "batch.size")["evidence"]
        for attempt in attempts
    ]
    assert sizes == [{"batches": [8, 4]}] * 3
