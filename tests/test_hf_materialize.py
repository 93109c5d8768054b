"""Runtime hf: what it would build for a row, and why not; no model is loaded."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from conftest import ROOT
from hf_fixtures import (
    plan,
)

from libxd import environment, knobs
from libxd.errors import XdError
from libxd.runtimes.hf import runtime as hf_runtime

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")


GPU = {"driver": "13.0", "devices": [{"name": "a GPU", "capability": "9.0"}]}
GPUS = {**GPU, "devices": GPU["devices"] * 2}


@pytest.mark.parametrize("side", knobs.SIDES)
def test_every_knob_of_a_side_has_a_record_and_the_baseline_is_applied(side):
    made = plan(side)
    assert [record.knob for record in made.knobs] == [knob.path for knob in knobs.of_side(side)]
    for record in made.knobs:
        assert (record.status, record.materialized) == ("applied", record.requested), record
        assert record.lifecycle == knobs.CATALOG[record.knob].lifecycle and record.evidence
    assert made.refusals == []


@pytest.mark.parametrize(
    ("side", "changes"),
    [
        ("rollout", {"batch__size": 1}),
        ("training", {"batch__size": 1}),
        ("rollout", {"rollout__tensor_parallel_size": 2}),
        ("rollout", {"rollout__context_parallel_size": 2}),
        ("rollout", {"rollout__tensor_parallel_size": 2, "device": "cuda", "cuda": GPUS}),
        ("training", {"training__sharding": "fsdp"}),
        ("training", {"training__sharding": "fsdp", "device": "cuda", "cuda": GPUS}),
        ("rollout", {"rollout__dtype": "bfloat16"}),
        ("rollout", {"rollout__enable_prefix_caching": True}),
        ("rollout", {"rollout__enforce_eager": False}),
        ("training", {"training__attention_backend": "sdpa"}),
        ("training", {"training__attention_backend": "flex_attention"}),
        ("training", {"training__compute_dtype": "float16"}),
        ("training", {"logp__backend": "xd.reference_logp"}),
        ("rollout", {"rollout__enforce_eager": False, "lacks": ("compiler",), "device": "cuda", "cuda": GPU,
                     "packages": {"triton": "3.6"}}),
    ],
)  # fmt: skip
def test_what_can_be_done_is_applied(side, changes):
    made = plan(side, **changes)
    (name,) = (name.replace("__", ".") for name in changes if "__" in name)
    (record,) = (record for record in made.knobs if record.knob == name)
    asked = changes[name.replace(".", "__")]
    assert (record.status, record.requested, record.materialized) == ("applied", asked, asked)
    assert made.refusals == []
    # a knob of a request leaves the engine as it is; one of construction is in its fingerprint
    fingerprints = (made.construction, made.context, made.process)
    unchanged = plan(side, **{key: value for key, value in changes.items() if "__" not in key})
    same = fingerprints == (unchanged.construction, unchanged.context, unchanged.process)
    assert same == (name in ("batch.size", "logp.backend"))


@pytest.mark.parametrize(
    ("side", "changes", "reason"),
    [
        ("rollout", {"rollout__tensor_parallel_size": 4}, "2 key-value heads"),
        ("rollout", {"rollout__tensor_parallel_size": 2, "device": "cuda", "cuda": GPU}, "this machine has 1"),
        ("rollout", {"rollout__context_parallel_size": 2, "device": "cuda", "cuda": GPU}, "this machine has 1"),
        ("rollout", {"rollout__enforce_eager": False, "lacks": ("compiler",)}, "C++ compiler"),
        ("rollout", {"rollout__enforce_eager": False, "rollout_mode": "prefill"}, "decoding steps"),
        ("rollout", {"rollout__enable_prefix_caching": True, "rollout_mode": "prefill"}, "prefill"),
        ("training", {"training__sharding": "fsdp", "device": "cuda", "cuda": GPU}, "two ranks"),
        ("training", {"training__attention_backend": "flash_attention_2"}, "CUDA alone"),
        ("training", {"training__attention_backend": "flash_attention_3", "device": "cuda", "cuda": GPU},
         "flash-attn-3"),
        ("training", {"training__attention_backend": "flex_attention", "lacks": ("compiler",)}, "C++ compiler"),
        ("rollout", {"rollout__enforce_eager": False, "lacks": ("triton",), "device": "cuda", "cuda": GPU}, "triton"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_unsupported_with_the_reason(side, changes, reason):
    made = plan(side, **changes)
    (record,) = (record for record in made.knobs if record.status != "applied")
    assert record.knob.replace(".", "__") in changes
    assert (record.status, record.materialized) == ("unsupported", None)
    assert reason in record.evidence


def test_a_compiled_path_and_ranks_do_not_go_together():
    made = plan("rollout", rollout__enforce_eager=False, rollout__context_parallel_size=2)
    (record,) = (record for record in made.knobs if record.status != "applied")
    assert record.knob == "rollout.enforce_eager" and "other ranks" in record.evidence


def test_a_world_is_planned():
    made = plan("rollout", rollout__tensor_parallel_size=2, rollout__context_parallel_size=3)
    assert made.process == {"device": "cpu", **made.context}
    assert made.context == {
        "world_size": 6, "tensor_parallel_size": 2, "context_parallel_size": 3, "rank_order": ["context", "tensor"],
        "vocabulary_rows": [[0, 64], [64, 128]],
    }  # fmt: skip
    assert plan("training", training__sharding="fsdp").context == {"world_size": 2, "sharding": "fsdp"}


def test_a_launcher_brings_devices_that_this_machine_lacks():
    asked = {"training__sharding": "fsdp", "rollout__tensor_parallel_size": 2, "device": "cuda", "cuda": GPU}
    for side, change in (("training", "training.sharding"), ("rollout", "rollout.tensor_parallel_size")):
        (record,) = (r for r in plan(side, variables={"XD_RANKS": "2"}, **asked).knobs if r.knob == change)
        assert record.status == "applied"
    assert plan("training", variables={"XD_RANKS": "16"}, **asked).engine["world_size"] == 16
    with pytest.raises(XdError, match="no number of ranks"):
        plan("training", variables={"XD_RANKS": "\uff12"}, **asked)


def test_packages_go_by_the_names_that_an_environment_has():
    assert set(hf_runtime._PACKAGE_OF.values()) <= set(environment.PACKAGES)


def test_only_a_declared_fallback_falls_back():
    asked = {"training__attention_backend": "flash_attention_2"}
    knob = "training.attention_backend"
    (record,) = (record for record in plan("training", (knob,), **asked).knobs if record.knob == knob)
    assert (record.status, record.requested, record.materialized) == ("fallback", "flash_attention_2", "sdpa")
    assert "CUDA alone" in record.evidence and "sdpa" in record.evidence
    declared = plan("rollout", ("rollout.tensor_parallel_size",), rollout__tensor_parallel_size=4)  # there is none
    assert [r.status for r in declared.knobs if r.knob == "rollout.tensor_parallel_size"] == ["unsupported"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device": "cuda"}, "CUDA device"),
        ({"synthetic": {"name": "xd-smoke-1", "seed": 7}}, "no synthetic model"),
        ({"lacks": ("transformers",)}, "transformers is not installed"),
        ({"lacks": ("torch",)}, "torch is not installed"),
        ({"semantics": {"logprobs": "processed", "top_k": 5}}, "top-k"),
        ({"semantics": {"logprobs": "processed", "top_p": 0.9}}, "top-p"),
    ],
)
@pytest.mark.parametrize("side", knobs.SIDES)
def test_reasons_of_no_knob_refuse_the_side(side, changes, reason):
    (refusal,) = plan(side, **changes).refusals
    assert reason in refusal


def test_materialising_imports_no_torch():
    code = (
        "import sys; from hf_fixtures import plan\n"
        "assert plan('rollout').knobs and plan('training', training__attention_backend='flash_attention_2').knobs\n"
        "sys.exit(' '.join({'torch', 'transformers', 'libxd.runtimes.hf.engine'} & set(sys.modules)) or 0)"
    )
    path = {"PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), str(ROOT)])}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **path})
    assert ran.returncode == 0, ran.stderr
