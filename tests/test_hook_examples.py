"""examples/hooks/: each one's own logic against a stand-in of the shape of its trainer, and TRL's against TRL itself.

The stand-ins hold what the hooks touch, named and laid out as the trainers' released packages have it.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from comparison_fixtures import floats
from tolerances import DECODE_AGAINST_ONE_PASS_FLOAT32_NATS

from libxd import comparison
from libxd.errors import XdError
from libxd.rundir import Attempt
from libxd.tensors import TensorFile

HOOKS = Path(__file__).resolve().parent.parent / "examples" / "hooks"
torch = pytest.importorskip("torch")


def hook(name: str, monkeypatch: pytest.MonkeyPatch, **modules: object) -> ModuleType:
    """A hook's module, with these in the place of what it imports: dotted names with _ for the dots."""
    for place, module in modules.items():
        parts = place.split("__")
        for i in range(1, len(parts)):
            monkeypatch.setitem(sys.modules, ".".join(parts[:i]), ModuleType(".".join(parts[:i])))
        monkeypatch.setitem(sys.modules, ".".join(parts), module)
        if len(parts) > 1:
            setattr(sys.modules[".".join(parts[:-1])], parts[-1], module)
    spec = importlib.util.spec_from_file_location(f"xd_hook_{name}", HOOKS / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def attempts(runs: Path) -> list[Attempt]:
    return [Attempt(path) for path in sorted(runs.glob("*/cases/*/*"))]


def logprobs(attempt: Attempt, side: str) -> np.ndarray:
    with TensorFile(attempt.file(f"score_{side}.safetensors")) as file:
        return np.array(file.array("logprobs"))


# -- verl: nested rows out of TransferQueue


def nested(*rows: list) -> object:
    return torch.nested.as_nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)


@pytest.fixture
def verl(monkeypatch, tmp_path):
    class Trainer:
        """What PPOTrainerSync does with a batch when its turn comes."""

        def _update_actor(self, batch, metrics):
            assert attempts(tmp_path), "written before the update"
            return "updated"

    registered: dict[str, type] = {}
    stored = {
        "input_ids": nested([1, 2, 3, 4], [5, 6, 7], [0, 0]),
        "response_mask": nested([1, 1], [1], [0]),
        "rollout_log_probs": nested([-1.0, -2.0], [-3.0], [0.0]),
        "old_log_probs": nested([-1.0, -2.5], [-3.0], [0.0]),
        "advantages": nested([1.0, 1.0], [-1.0], [0.0]),
        "uid": ["a", "a", "pad"],
    }
    asked = []

    def kv_batch_get(keys, partition_id, select_fields):
        asked.append((keys, partition_id))
        return {name: stored[name] for name in select_fields}

    monkeypatch.setenv("XD_RUNS", str(tmp_path))
    monkeypatch.setenv("XD_TRAINING_DTYPE", "float32")
    module = hook(
        "verl_ppo", monkeypatch, transfer_queue=SimpleNamespace(kv_batch_get=kv_batch_get),
        verl__trainer__ppo__v1__trainer_base=SimpleNamespace(
            register_trainer=lambda name: lambda cls: registered.setdefault(name, cls)),
        verl__trainer__ppo__v1__trainer_sync=SimpleNamespace(PPOTrainerSync=Trainer),
    )  # fmt: skip
    return SimpleNamespace(module=module, trainer=registered["scored"], asked=asked)


def test_verl_writes_each_real_sequence_before_the_update(verl, tmp_path):
    trainer = verl.trainer()
    trainer.global_steps = 2
    model = SimpleNamespace(path=str(tmp_path / "no such model"))
    trainer.config = SimpleNamespace(
        trainer=SimpleNamespace(experiment_name="gsm8k"),
        actor_rollout_ref=SimpleNamespace(model=model, rollout=SimpleNamespace(
            dtype="bfloat16", logprobs_mode="processed_logprobs", top_p=1.0, top_k=-1, temperature=0.7)),
    )  # fmt: skip
    batch = SimpleNamespace(keys=["k"], partition_id="train", tags=[{}, {"status": "success"}, {"is_padding": True}])
    assert trainer._update_actor(batch, {}) == "updated" and verl.asked == [(["k"], "train")]
    (attempt,) = attempts(tmp_path)
    row = attempt.requested()
    assert (row["experiment_id"], row["scenario_id"]) == ("gsm8k", "step 2")
    assert row["contract"]["dtype"] == "bfloat16" and row["identity"]["checkpoint"]["digest"] is None
    assert row["identity"]["semantics"]["temperature"] == 0.7
    rollout = trainer.config.actor_rollout_ref.rollout
    for name, value in (("logprobs_mode", "raw_logprobs"), ("top_p", 0.9), ("top_k", 20)):
        assert verl.module.meant(SimpleNamespace(**{**vars(rollout), name: value})) is None, "one side does it alone"
    np.testing.assert_array_equal(logprobs(attempt, "training"), floats(np.nan, np.nan, -1, -2.5, np.nan, np.nan, -3))
    with TensorFile(attempt.file("score_rollout.safetensors")) as file:
        assert file.array("prompt_index").tolist() == [0, 0]
    assert comparison.compare(attempt)["logprob_difference"]["max_absolute"] == 0.5
    trainer.global_steps = 1  # the first step's weights are the checkpoint's, and it is not there
    with pytest.raises(XdError, match="checkpoint"):
        trainer._update_actor(batch, {})


# -- OpenRLHF: label-aligned rectangles, zero outside the actions


def test_openrlhf_writes_each_micro_batch_and_takes_no_masked_zero(monkeypatch, tmp_path):
    class Maker:
        def __init__(self, experiences):
            self.experiences = experiences

        def make_experience_batch(self, rollout_samples):
            return self.experiences

    ppo_trainer = SimpleNamespace(RemoteExperienceMaker=Maker)
    module = hook(
        "openrlhf_ppo", monkeypatch, openrlhf__trainer__ppo_trainer=ppo_trainer,
        openrlhf__trainer__ppo_utils__experience_maker=SimpleNamespace(RemoteExperienceMaker=Maker),
    )  # fmt: skip
    module.install(runs=tmp_path, experiment="ppo", dtype="bfloat16")
    assert ppo_trainer.RemoteExperienceMaker is module.ScoredExperienceMaker
    action_mask = torch.tensor([[0, 1, 1], [0, 1, 0]])  # [B, T - 1], right-padded
    experience = SimpleNamespace(
        sequences=torch.tensor([[1, 2, 3, 4], [5, 6, 7, 0]]), attention_mask=torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]]),
        action_mask=action_mask, rollout_log_probs=torch.tensor([[0.0, -1, -2], [0, -3, 0]]),
        action_log_probs=torch.tensor([[-9.0, -1, -2.5], [-9, -3, -9]]) * action_mask.float(),
        advantages=torch.zeros(2, 3), rewards=torch.tensor([1.0, 0.0]), prompts=["p", "q"],
    )  # fmt: skip
    maker = ppo_trainer.RemoteExperienceMaker([experience])
    assert maker.make_experience_batch([]) == [experience]
    assert maker.make_experience_batch([]) == [experience]
    found = {attempt.requested()["scenario_id"]: attempt for attempt in attempts(tmp_path)}
    assert set(found) == {"step 0", "step 1"}
    wanted = floats(np.nan, np.nan, -1, -2.5, np.nan, np.nan, -3)
    np.testing.assert_array_equal(logprobs(found["step 1"], "training"), wanted)
    assert comparison.compare(found["step 1"])["counts"]["active"] == 3


# -- Megatron: the loss of the label beside each token


@pytest.fixture
def megatron(monkeypatch):
    ranks = {"tensor": 0, "last": True, "context": 1}
    state = SimpleNamespace(
        is_pipeline_last_stage=lambda: ranks["last"], get_tensor_model_parallel_rank=lambda: ranks["tensor"],
        get_context_parallel_world_size=lambda: ranks["context"], get_data_parallel_rank=lambda: 1,
    )  # fmt: skip
    return hook("megatron_loss", monkeypatch, megatron__core=SimpleNamespace(parallel_state=state)), ranks


def test_megatron_writes_minus_the_loss_once_for_ranks_that_hold_the_same(megatron, tmp_path):
    module, ranks = megatron
    tokens = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 0]])
    labels = torch.tensor([[2, 3, 4, 0], [6, 7, 0, 0]])
    loss = torch.tensor([[9.0, 1, 2.5, 99], [9, 3, 99, 99]], requires_grad=True)
    arguments = (loss, tokens, labels, torch.tensor([[0, 1, 1, 0], [0, 1, 0, 0]]), torch.tensor([4, 3]),
                 torch.tensor([[0.0, -1, -2, 0], [0, -3, 0, 0]]))  # fmt: skip
    said = {"runs": tmp_path, "experiment": "m", "dtype": torch.bfloat16, "step": 5}
    for name, value in (("tensor", 1), ("last", False)):
        kept, ranks[name] = ranks[name], value
        module.write(*arguments, **said)
        ranks[name] = kept
    assert attempts(tmp_path) == []
    module.write(*arguments, **said)
    (attempt,) = attempts(tmp_path)
    assert attempt.requested()["scenario_id"] == "step 5, rank 1"
    np.testing.assert_array_equal(logprobs(attempt, "training"), floats(np.nan, -9, -1, -2.5, np.nan, -9, -3))
    np.testing.assert_array_equal(
        logprobs(attempt, "rollout"), floats(np.nan, np.nan, -1, -2, np.nan, np.nan, -3)
    )
    with pytest.raises(ValueError, match="other tokens"):
        module.write(loss, tokens, tokens, *arguments[3:], **said)
    ranks["context"] = 2
    with pytest.raises(ValueError, match="gather"):
        module.write(*arguments, **said)


# -- TRL itself


def test_trl_on_the_real_model(tmp_path, root):
    """Two steps of GRPO: an attempt a step, and rounding alone: the trainer's own model samples through its cache."""
    pytest.importorskip("trl")
    model = root / "models" / "smollm2-135m-instruct"
    assert (model / "model.safetensors").exists(), "run `make model`"
    driver = root / "dev" / "hook_trl.py"
    done = subprocess.run([sys.executable, driver, tmp_path, model, "--steps", "2"], capture_output=True, text=True,
                          timeout=600, env={**os.environ, "TRL_EXPERIMENTAL_SILENCE": "1"})  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = {attempt.requested()["scenario_id"]: attempt for attempt in attempts(tmp_path)}
    assert set(found) == {"step 0", "step 1"}
    first, second = (comparison.compare(found[name]) for name in sorted(found))
    assert first["status"] in ("PASS", "MISMATCH") and first["violations"] == []
    assert second["status"] == "INVALID_IDENTITY", "its weights are in no checkpoint"
    for judged in (first, second):
        assert judged["counts"]["active"] > 20
        assert 0 < judged["logprob_difference"]["max_absolute"] < DECODE_AGAINST_ONE_PASS_FLOAT32_NATS
