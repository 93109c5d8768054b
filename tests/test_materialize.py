"""Rows to materialisations: records, refusals, fingerprints, execution keys."""

from __future__ import annotations

import pytest
from materialize_fixtures import FakeRuntime, environments, policy, refusing, row
from operator_fixtures import descriptor

from libxd import environment, knobs, materialize, planner, schema
from libxd.errors import Status, XdError
from libxd.operators import catalog
from libxd.policy import default_python
from libxd.rundir import SIDES

OTHER = {
    "batch.size": 8,
    "rollout.tensor_parallel_size": 2,
    "rollout.context_parallel_size": 2,
    "rollout.dtype": "bfloat16",
    "rollout.enable_prefix_caching": True,
    "rollout.enforce_eager": False,
    "training.attention_backend": "sdpa",
    "training.compute_dtype": "bfloat16",
    "logp.backend": "xd.reference_logp",
    "training.sharding": "fsdp",
}


def of(request=None, runtime=None, **options):
    value = materialize.materialized(request or row(), policy(runtime, **options), environments())
    return schema.validate("materialized", value, "materialized")


def record(value, side, knob):
    return next(r for r in value["sides"][side]["knobs"] if r["knob"] == knob)


def reasons(value):
    return [(r["side"], r["knob"], r["status"]) for r in value["refusals"]]


def test_the_fixture_row_is_a_plan_row():
    """The rows of these tests are such as xd-plan writes."""
    for request in (row(), row(("batch.size", 1)), row(repeat=1), row(missing=("/identity/sequences: …",))):
        schema.validate("plan_row", request, "row")
        assert list(planner._contradictions(request, "row")) == []


def test_a_row_that_everything_applies_to_is_ready():
    value = of()
    assert (value["status"], value["refusals"], value["strict"]) == ("ready", [], True)
    for side in SIDES:
        found = value["sides"][side]
        assert [r["knob"] for r in found["knobs"]] == [knob.path for knob in knobs.of_side(side)]
        assert {r["status"] for r in found["knobs"]} == {"applied"}
        assert all(r["materialized"] == r["requested"] for r in found["knobs"])
        assert found["operator"]["backend"] == "native"
        assert "xd" not in found["environment"]
        assert found["scorer"] == {"name": "xd-score/test", "version": "0.1.0", "build": "a" * 64}
    assert value["catalog"] == catalog.load(False).digest
    assert value["execution_key"] == materialize.execution_key(value)


def test_it_is_pure():
    request, runtime = row(), FakeRuntime()
    assert of(request, runtime) == of(request, runtime)
    assert request == row()


# -- refusals of the row and of its knobs


def test_what_was_not_at_hand_is_unsupported():
    value = of(row(missing=("/identity/checkpoint: no such directory", "/identity/sequences: no such file")))
    assert value["status"] == "refused"
    assert reasons(value) == [(None, None, "unsupported")] * 2
    assert "no such directory" in value["refusals"][0]["reason"]


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("status", ["unsupported", "error"])
def test_what_cannot_be_done_is_refused_strict_or_not(strict, status):
    runtime = FakeRuntime(answers={"rollout.dtype": {"status": status, "materialized": None, "evidence": "no bf16"}})
    value = of(row(strict=strict), runtime)
    assert reasons(value) == [("rollout", "rollout.dtype", status)]
    assert value["refusals"][0]["reason"] == "no bf16"


FELL_BACK = {"status": "fallback", "materialized": "eager", "evidence": "flash is not installed"}
ATTENTION = ("training.attention_backend", "flash_attention_2")


@pytest.mark.parametrize("strict", [True, False])
def test_a_fallback_is_measured_only_when_it_is_declared(strict):
    runtime = FakeRuntime(answers={"training.attention_backend": FELL_BACK})
    value = of(row(ATTENTION, strict=strict), runtime)
    assert reasons(value) == [("training", "training.attention_backend", "fallback")]
    assert "allow_fallback" in value["refusals"][0]["reason"]
    declared = of(row(ATTENTION, strict=strict, allow_fallback=True), runtime)
    assert declared["status"] == "ready"
    assert record(declared, "training", "training.attention_backend")["materialized"] == "eager"


def test_a_declaration_covers_its_own_knob_alone():
    runtime = FakeRuntime(answers={"training.attention_backend": FELL_BACK})
    value = of(row(("batch.size", 1), allow_fallback=True), runtime)
    assert reasons(value) == [("training", "training.attention_backend", "fallback")]


def test_the_adapter_is_told_what_may_fall_back():
    runtime = FakeRuntime()
    of(row(ATTENTION, allow_fallback=True), runtime)
    of(row(ATTENTION), runtime)
    declared = frozenset({"training.attention_backend"})
    assert runtime.asked == [(s, declared) for s in SIDES] + [(s, frozenset()) for s in SIDES]


UNSEEN = {"rollout.enforce_eager": {"status": "unobservable", "evidence": "the engine does not tell"}}


@pytest.mark.parametrize(
    ("config_strict", "flag", "status"),
    [(True, False, "refused"), (True, True, "refused"), (False, True, "refused"), (False, False, "ready")],
)
def test_strict_refuses_what_cannot_be_observed_and_the_flag_only_tightens(config_strict, flag, status):
    value = of(row(strict=config_strict), FakeRuntime(answers=UNSEEN), strict=flag)
    assert value["status"] == status
    assert value["strict"] is (config_strict or flag)
    if status == "refused":
        assert reasons(value) == [("rollout", "rollout.enforce_eager", "unobservable")]


@pytest.mark.parametrize(
    ("answer", "what"),
    [
        ({"materialized": "float16"}, "calls 'float16' applied"),
        ({"requested": "float16", "materialized": "float16"}, "answered another request"),
        ({"lifecycle": "request"}, "would change it within a request"),
    ],
)
def test_an_adapter_that_ignores_a_request_is_caught(answer, what):
    value = of(runtime=FakeRuntime(answers={"rollout.dtype": answer}))
    assert reasons(value) == [("rollout", "rollout.dtype", "error")]
    assert what in value["refusals"][0]["reason"]


def test_a_knob_that_the_adapter_forgot_is_an_error():
    value = of(runtime=FakeRuntime(omit=("rollout.dtype",)))
    assert reasons(value) == [("rollout", "rollout.dtype", "error")]
    assert record(value, "rollout", "rollout.dtype")["materialized"] is None


def test_a_knob_of_the_other_side_is_an_error():
    value = of(runtime=FakeRuntime(answers={"batch.size": {"knob": "training.sharding"}}))
    assert ("rollout", "training.sharding", "error") in reasons(value)


def test_a_reason_of_the_whole_side():
    value = of(runtime=FakeRuntime(refusals=("no CUDA device here",)))
    assert reasons(value) == [(side, None, "unsupported") for side in SIDES]
    value = of(runtime=refusing("no engine on this system"))
    assert (
        value["refusals"][0]["knob"], value["refusals"][0]["side"], value["refusals"][0]["reason"]
    ) == (None, "rollout", "no engine on this system")  # fmt: skip
    assert {r["status"] for side in SIDES for r in value["sides"][side]["knobs"]} == {"unsupported"}


def test_a_broken_row_or_adapter_is_no_refusal():
    with pytest.raises(XdError, match="malformed"):
        of(runtime=FakeRuntime(error=XdError("malformed")))
    with pytest.raises(XdError, match="runtime test cannot plan the rollout side: ZeroDivisionError") as caught:
        of(runtime=FakeRuntime(error=ZeroDivisionError("1 / 0")))
    assert caught.value.status == Status.BUG


# -- operators


@pytest.fixture
def extra(monkeypatch):
    """Adds descriptors to what the installation has."""

    def add(*descriptors):
        load = catalog.load.__wrapped__

        def extended(smoke):
            found = load(smoke)
            for each in descriptors:
                found = found.register(each)
            return found

        monkeypatch.setattr(catalog, "load", extended)

    return add


def test_each_side_has_its_operator():
    value = of(row(operators={"rollout": "xd.reference_logp", "training": "native"}))
    assert [value["sides"][side]["operator"]["backend"] for side in SIDES] == ["xd.reference_logp", "native"]
    assert record(value, "rollout", "logp.backend")["requested"] == "xd.reference_logp"
    assert record(value, "training", "logp.backend")["requested"] == "native"


def test_an_unknown_operator_is_refused_with_the_known_ones():
    value = of(row(operators={"rollout": "native", "training": "acme.logp"}))
    assert reasons(value) == [("training", "logp.backend", "unsupported")]
    assert "native" in value["refusals"][0]["reason"]
    assert value["sides"]["training"]["operator"]["build"] is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"targets": frozenset({"training"})}, "does not serve the rollout side"),
        ({"devices": frozenset({"cuda"})}, "device cpu"),
        ({"dtypes": frozenset({"bfloat16"})}, "dtype float32"),
        ({"topology": {"rollout": {"tensor_parallel_size": (2, 4)}}}, "tensor_parallel_size 1"),
        ({"topology": {"rollout": {"context_parallel_size": (2,)}}}, "context_parallel_size 1"),
    ],
)
def test_an_operator_that_does_not_fit_the_side(extra, changes, reason):
    extra(descriptor(**changes))
    value = of(row(operators={"rollout": "test.logp", "training": "native"}))
    assert reasons(value) == [("rollout", "logp.backend", "unsupported")]
    assert reason in value["refusals"][0]["reason"]


def test_an_operator_that_fits(extra):
    extra(descriptor(topology={"rollout": {"tensor_parallel_size": (1,)}, "training": {"sharding": ("unsharded",)}}))
    assert of(row(("logp.backend", "test.logp")))["status"] == "ready"


def test_training_topology(extra):
    extra(descriptor(topology={"training": {"sharding": ("unsharded",)}}))
    request = row(("training.sharding", "fsdp"), operators={"rollout": "test.logp", "training": "test.logp"})
    assert reasons(of(request)) == [("training", "logp.backend", "unsupported")]


def test_the_device_is_the_engines(extra):
    extra(descriptor(devices=frozenset({"cuda"})))
    request = row(("logp.backend", "test.logp"))
    assert of(request, FakeRuntime(device="cuda"))["status"] == "ready"
    assert of(request, FakeRuntime(device="cpu"))["status"] == "refused"


def test_a_runtime_that_has_logits_alone():
    value = of(row(("logp.backend", "xd.reference_logp")), FakeRuntime(inputs=frozenset({"logits"})))
    assert reasons(value) == [(side, "logp.backend", "unsupported") for side in SIDES]
    assert "hidden" in value["refusals"][0]["reason"]


def test_options_that_an_operator_does_not_take():
    value = of(row(options={"threshold": 1}))
    assert reasons(value) == [(side, "logp.backend", "unsupported") for side in SIDES]
    assert "option threshold" in value["refusals"][0]["reason"]


def test_a_knob_that_is_refused_makes_no_second_reason():
    """The reference needs tensor_parallel_size 1; that is what was asked, though this adapter cannot do even that."""
    answers = {"rollout.tensor_parallel_size": {"status": "unsupported", "materialized": None}}
    value = of(row(("logp.backend", "xd.reference_logp")), FakeRuntime(answers=answers))
    assert reasons(value) == [("rollout", "rollout.tensor_parallel_size", "unsupported")]


def test_the_adapters_own_refusal_of_an_operator_stands():
    answers = {"logp.backend": {"status": "unsupported", "materialized": None, "evidence": "no hook for it"}}
    value = of(runtime=FakeRuntime(answers=answers))
    assert {r["reason"] for r in value["refusals"]} == {"no hook for it"}


SMOKE = ("logp.backend", "smoke_only.logp_offset")


@pytest.mark.parametrize(
    ("registered", "authorised", "said", "unsaid"),
    [
        (True, False, ["not authorised (--allow-smoke-operators)"], ["registers no smoke operators"]),
        (False, True, ["registers no smoke operators"], ["not authorised"]),
        (False, False, ["registers no smoke operators", "not authorised"], []),
    ],
)
def test_smoke_operators_need_registration_and_authorisation(registered, authorised, said, unsaid):
    value = of(row(SMOKE), FakeRuntime(smoke=registered), allow_smoke_operators=authorised)
    assert reasons(value) == [(side, "logp.backend", "unsupported") for side in SIDES]
    assert all(text in value["refusals"][0]["reason"] for text in said)
    assert not any(text in value["refusals"][0]["reason"] for text in unsaid)
    assert value["smoke_operators"] is False
    assert value["catalog"] == catalog.load(False).digest


def test_smoke_operators_with_both():
    value = of(row(SMOKE), FakeRuntime(smoke=True), allow_smoke_operators=True)
    assert value["status"] == "ready"
    assert value["smoke_operators"] is True
    assert value["catalog"] == catalog.load(True).digest


def test_one_side_registering_does_not_open_the_other():
    both = policy(FakeRuntime(smoke=True), FakeRuntime("other"), allow_smoke_operators=True)
    value = materialize.materialized(row(SMOKE), both, environments())
    assert reasons(value) == [("training", "logp.backend", "unsupported")]


@pytest.mark.parametrize("strict", [True, False])
def test_an_operators_fallback_is_taken_only_when_declared(extra, strict):
    extra(descriptor(devices=frozenset({"cuda"}), fallback="native"))
    refused = of(row(("logp.backend", "test.logp"), strict=strict))
    assert reasons(refused) == [(side, "logp.backend", "unsupported") for side in SIDES]
    taken = of(row(("logp.backend", "test.logp"), strict=strict, allow_fallback=True))
    assert taken["status"] == "ready"
    found = record(taken, "rollout", "logp.backend")
    assert (found["requested"], found["materialized"], found["status"]) == ("test.logp", "native", "fallback")
    assert taken["sides"]["rollout"]["operator"]["backend"] == "native"


def test_a_fallback_that_does_not_fit_either_is_not_taken(extra):
    extra(descriptor(devices=frozenset({"cuda"}), fallback="test.other"),
          descriptor(backend="test.other", devices=frozenset({"cuda"})))  # fmt: skip
    value = of(row(("logp.backend", "test.logp"), allow_fallback=True))
    assert reasons(value) == [(side, "logp.backend", "unsupported") for side in SIDES]


# -- fingerprints, groups, execution keys


def prints(value):
    return {side: value["sides"][side]["fingerprints"] for side in SIDES}


@pytest.mark.parametrize("path", list(OTHER))
def test_a_fingerprint_changes_where_the_lifecycle_says(path):
    before, after = prints(of()), prints(of(row((path, OTHER[path]))))
    changed = {side for side in SIDES if before[side] != after[side]}
    knob = knobs.CATALOG[path]
    assert changed == (set() if knob.lifecycle == "request" else set(knob.sides))


@pytest.mark.parametrize("path", list(OTHER))
def test_rows_share_a_group_when_only_the_request_differs(path):
    same = materialize.group(of()) == materialize.group(of(row((path, OTHER[path]))))
    assert same is (knobs.CATALOG[path].lifecycle == "request")


def test_another_checkpoint_is_another_engine():
    before, after = prints(of()), prints(of(row(seed=8)))
    assert all(before[side]["construction"] != after[side]["construction"] for side in SIDES)
    assert all(before[side][name] == after[side][name] for side in SIDES for name in ("context", "process"))


def test_another_environment_is_another_process_on_its_side():
    changed = environments(variables={"NVIDIA_TF32_OVERRIDE": "0"})
    before, after = of(), materialize.materialized(row(), policy(), changed)
    assert prints(before)["rollout"]["process"] != prints(after)["rollout"]["process"]
    assert prints(before)["training"] == prints(after)["training"]
    assert before["execution_key"] != after["execution_key"]


def test_a_repeat_is_another_process_on_both_sides():
    """What two repeats differ in is noise from run to run, not from case to case of one process."""
    before, after = of(row()), of(row(repeat=1))
    for side in SIDES:
        assert prints(before)[side]["process"] != prints(after)[side]["process"]
        assert prints(before)[side]["construction"] == prints(after)[side]["construction"]
    assert materialize.group(before) != materialize.group(after)


def test_an_operators_lifecycle_decides_where_it_enters(extra):
    extra(*(descriptor(backend=f"test.{name}", lifecycle=name) for name in ("construction", "process")),
          descriptor(backend="test.other"))  # fmt: skip
    plain = prints(of(row(("logp.backend", "test.other"))))["rollout"]
    for name in ("construction", "process"):
        found = prints(of(row(("logp.backend", f"test.{name}"))))["rollout"]
        assert found[name] != plain[name]


def test_request_level_operators_share_fingerprints_but_no_group(extra):
    extra(descriptor(backend="test.one", lifecycle="request"), descriptor(backend="test.two", lifecycle="request"))
    one, two = (of(row(("logp.backend", f"test.{name}"))) for name in ("one", "two"))
    assert prints(one) == prints(two)
    assert materialize.group(one) != materialize.group(two)


def test_the_execution_key_covers_what_was_run():
    key = of()["execution_key"]
    other_build = environments(xd={"version": "0.1.0", "scorers": {"test": "c" * 64}})
    others = {
        "value": of(row(("batch.size", 1))),
        "repeat": of(row(repeat=1)),
        "strict": of(row(strict=False)),
        "runtime": of(runtime=FakeRuntime("other")),
        "device": of(runtime=FakeRuntime(device="cuda")),
        "smoke operators": of(runtime=FakeRuntime(smoke=True), allow_smoke_operators=True),
        "scorer": materialize.materialized(row(), policy(), other_build),
    }
    keys = {name: value["execution_key"] for name, value in others.items()}
    assert key not in keys.values()
    assert len(set(keys.values())) == len(keys)


def test_prose_does_not_enter_the_execution_key():
    worded = FakeRuntime(answers={"batch.size": {"evidence": "in other words"}})
    assert of(runtime=worded)["execution_key"] == of()["execution_key"]
    assert of(runtime=worded) != of()


def test_locations_do_not_enter_anything():
    moved = row()
    moved["locations"]["sequences"] = "/elsewhere/sequences.safetensors"
    assert of(moved) == of()


def test_a_tampered_materialisation_has_another_key():
    value = of()
    value["sides"]["rollout"]["engine"]["device"] = "cuda"
    assert materialize.execution_key(value) != value["execution_key"]


# -- policy


def test_a_runtime_is_not_put_on_a_side_it_lacks():
    with pytest.raises(XdError) as raised:
        policy(FakeRuntime(), FakeRuntime("rollout-only", sides=frozenset({"rollout"})))
    assert (raised.value.status, raised.value.code) == (Status.USAGE, "wrong-side")


def test_the_interpreter_of_a_runtime_comes_from_its_variable(monkeypatch, tmp_path):
    monkeypatch.delenv("XD_PYTHON_CPU_SMOKE", raising=False)
    assert default_python("cpu-smoke") == environment.interpreter()
    other = tmp_path / "python"
    other.symlink_to(environment.interpreter())
    monkeypatch.setenv("XD_PYTHON_CPU_SMOKE", str(other))
    assert default_python("cpu-smoke") == str(other)
    assert default_python("hf") == environment.interpreter()
