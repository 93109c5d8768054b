"""Descriptors, catalog, sessions, and the four operators that ship."""

from __future__ import annotations

import dataclasses
import pickle
import subprocess
import sys
import types

import pytest
from operator_fixtures import Logp, descriptor
from tolerances import LINEAR_LOGPROB_FLOAT32_NATS, LOGPROB_FLOAT32_NATS

from libxd import contract, knobs, plugins
from libxd.errors import Status, XdError
from libxd.operators import catalog, installed
from libxd.operators.catalog import SemanticOperatorCatalog
from libxd.operators.descriptor import OperatorDescriptor
from libxd.operators.session import OperatorSession, checksum

PLAIN = {"tensor_parallel_size": 1, "context_parallel_size": 1}


def binding(backend="test.logp", **options):
    return {"backend": backend, "options": options}


# -- descriptors


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"operation": "attention"}, "/operation"),
        ({"backend": "Not A Name"}, "/backend"),
        ({"targets": frozenset({"critic"})}, "/targets"),
        ({"targets": frozenset()}, "/targets"),
        ({"devices": frozenset({"tpu"})}, "/devices"),
        ({"dtypes": frozenset({"fp8"})}, "/dtypes"),
        ({"inputs": "probabilities"}, "/inputs"),
        ({"lifecycle": "never"}, "/lifecycle"),
        ({"properties": ("fast",)}, "/properties"),
        ({"topology": {"rollout": {"pipeline_parallel_size": (1,)}}}, "/topology/rollout"),
        ({"topology": {"rollout": {"tensor_parallel_size": ()}}}, "/topology/rollout/tensor_parallel_size"),
        ({"targets": frozenset({"rollout"}), "topology": {"training": {"sharding": ("fsdp",)}}}, "/topology"),
        ({"factory": "somewhere"}, "/factory"),
        ({"version": ""}, "/version"),
        ({"fallback": "test.logp"}, "/fallback"),
        ({"is_smoke_only": True}, "/is_smoke_only"),
        ({"backend": "smoke_only.x"}, "/is_smoke_only"),
        ({"backend": "smoke_only.x", "is_smoke_only": True}, "/devices"),
    ],
)
def test_a_wrong_descriptor_cannot_be_made(changes, place):
    with pytest.raises(XdError) as raised:
        descriptor(**changes)
    assert (raised.value.code, raised.value.path) == ("bad-descriptor", place)


def test_a_descriptor_is_frozen():
    made = descriptor(topology={"rollout": {"tensor_parallel_size": (1, 2)}})
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.backend = "other"
    with pytest.raises(TypeError):
        made.topology["rollout"]["tensor_parallel_size"] = (4,)
    assert hash(made) == hash(descriptor(topology={"rollout": {"tensor_parallel_size": (1, 2)}}))


def test_the_build_follows_the_sources(tmp_path, monkeypatch):
    from libxd import environment

    monkeypatch.syspath_prepend(tmp_path)
    builds = []
    for text in ("x = 1\n", "x = 2\n", "x = 1\n"):
        (tmp_path / "an_operator.py").write_text(text)
        environment.sources_digest.cache_clear()
        builds.append(descriptor(factory="an_operator:make").build)
    assert builds[0] != builds[1]
    assert builds[0] == builds[2]
    alone = descriptor(factory="an_operator:make").build
    assert descriptor(factory="an_operator:make", sources=("xdkernels.reference.logprob",)).build != alone


def test_a_lost_source_is_an_error():
    with pytest.raises(XdError, match="module of the operator cannot be found: no_such_module"):
        _ = descriptor(factory="no_such_module:make").build


# -- what a descriptor allows


@pytest.mark.parametrize(
    ("changes", "asked", "reason"),
    [
        ({"targets": frozenset({"training"})}, {}, "does not serve the rollout side"),
        ({"devices": frozenset({"cuda"})}, {}, "device cpu"),
        ({"dtypes": frozenset({"float32"})}, {"dtype": "bfloat16"}, "dtype bfloat16"),
        (
            {"topology": {"rollout": {"tensor_parallel_size": (1, 2)}}},
            {"topology": {**PLAIN, "tensor_parallel_size": 4}},
            "tensor_parallel_size 4 (supports 1, 2)",
        ),
        ({"topology": {"rollout": {"tensor_parallel_size": (1,)}}}, {"topology": {}}, "tensor_parallel_size None"),
        (
            {"topology": {"training": {"sharding": ("unsharded",)}}},
            {"side": "training", "topology": {"sharding": "fsdp"}},
            "sharding fsdp",
        ),
    ],
)
def test_refusals_by_descriptor(changes, asked, reason):
    setting = {"side": "rollout", "device": "cpu", "dtype": "float32", "topology": PLAIN, **asked}
    (found,) = catalog.check(descriptor(**changes), **setting)
    assert reason in found
    assert catalog.check(descriptor(), **setting) == []


def test_every_reason_is_given_at_once():
    narrow = descriptor(
        devices=frozenset({"cuda"}), dtypes=frozenset({"float16"}), topology={"rollout": {"tensor_parallel_size": (2,)}}
    )
    assert len(catalog.check(narrow, "rollout", "cpu", "float32", PLAIN)) == 3


# -- catalog


def test_registering_gives_another_catalog():
    first = SemanticOperatorCatalog([descriptor()])
    digest = first.digest
    second = first.register(descriptor(backend="test.other"))
    assert first.backends("selected_logprob") == ["test.logp"]
    assert second.backends("selected_logprob") == ["test.logp", "test.other"]
    assert first.digest == digest != second.digest


def test_the_digest_does_not_depend_on_the_order_but_on_each_descriptor():
    a, b = descriptor(), descriptor(backend="test.other")
    assert SemanticOperatorCatalog([a, b]).digest == SemanticOperatorCatalog([b, a]).digest
    changed = descriptor(backend="test.other", version="2")
    assert SemanticOperatorCatalog([a, changed]).digest != SemanticOperatorCatalog([a, b]).digest


def test_a_backend_is_registered_once():
    with pytest.raises(XdError) as raised:
        SemanticOperatorCatalog([descriptor(), descriptor(version="2")])
    assert raised.value.code == "duplicate-operator"


def test_an_unknown_backend_is_refused_with_the_known_ones():
    with pytest.raises(XdError) as raised:
        catalog.load(False).get("selected_logprob", "test.logp")
    assert (raised.value.code, raised.value.status) == ("unknown-operator", Status.REFUSED)
    assert "native" in raised.value.line()


def test_smoke_operators_are_unregistered_by_default():
    production = catalog.load(False).backends("selected_logprob")
    assert production == ["native", "xd.fused_linear_logp", "xd.reference_logp", "xd.triton_logp"]
    assert installed.smoke_backends() == ["smoke_only.logp_offset", "smoke_only.logp_reference"]
    assert set(catalog.load(True).backends("selected_logprob")) == {*production, *installed.smoke_backends()}
    assert catalog.load(True).digest != catalog.load(False).digest
    assert all(found.devices == {"cpu"} for found in catalog.load(True) if found.is_smoke_only)


class Entry(types.SimpleNamespace):
    def load(self):
        if isinstance(self.found, Exception):
            raise self.found
        return self.found


@pytest.mark.parametrize(
    ("group", "name", "found", "what"),
    [
        ("xd.operators", "test.logp", ImportError("no such library"), "no such library"),
        ("xd.operators", "test.other", descriptor(), "must name its backend"),
        ("xd.operators", "test.logp", object(), "must name its backend"),
        (
            "xd.operators", "smoke_only.x",
            descriptor(backend="smoke_only.x", is_smoke_only=True, devices=frozenset({"cpu"})), "belongs into",
        ),
        ("xd.smoke_operators", "test.logp", descriptor(), "belongs into"),
    ],
)  # fmt: skip
def test_a_broken_registration_is_named(monkeypatch, group, name, found, what):
    entries = {group: {name: Entry(name=name, value="somewhere:X", found=found, dist=None)}}
    monkeypatch.setattr(plugins, "entries", lambda asked: entries.get(asked, {}))
    with pytest.raises(XdError, match=what) as raised:
        catalog.load.__wrapped__(True)
    assert raised.value.status == Status.BUG


def test_listing_operators_loads_no_torch():
    code = "import sys; from libxd.operators import catalog; catalog.load(True).digest; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


# -- sessions


@pytest.fixture
def session():
    with OperatorSession(SemanticOperatorCatalog([descriptor(options=("scale",)), descriptor(
        backend="test.training", targets=frozenset({"training"}))])) as made:
        yield made  # fmt: skip


def test_a_side_gets_one_instance_with_its_options(session):
    session.resolve("rollout", binding(scale=2))
    session.resolve("training", binding())
    rollout = session.instance("rollout")
    assert session.instance("rollout") is rollout
    assert session.instance("training") is not rollout
    assert (rollout._function.side, rollout._function.options) == ("rollout", {"scale": 2})


def test_binding_another_operator_drops_the_instance(session):
    session.resolve("training", binding())
    first = session.instance("training")
    session.resolve("training", binding())
    assert session.instance("training") is first
    session.resolve("training", binding("test.training"))
    assert session.instance("training").backend == "test.training"


@pytest.mark.parametrize(
    ("side", "asked", "code"),
    [
        ("rollout", binding("test.absent"), "unknown-operator"),
        ("rollout", binding("test.training"), "wrong-side"),
        ("rollout", binding(threshold=1), "unknown-option"),
        ("rollout", {**binding(), "version": "0"}, "stale-operator"),
        ("rollout", {**binding(), "build": "0" * 64}, "stale-operator"),
    ],
)
def test_a_failed_resolution_is_refused_and_leaves_nothing(session, side, asked, code):
    with pytest.raises(XdError) as raised:
        session.resolve(side, asked)
    assert (raised.value.code, raised.value.status) == (code, Status.REFUSED)
    with pytest.raises(XdError, match="no operator is bound"):
        session.instance(side)


def test_a_failed_resolution_does_not_bring_back_the_last_one(session):
    """What was bound stays bound: never the operator that failed."""
    session.resolve("rollout", binding())
    with pytest.raises(XdError):
        session.resolve("rollout", binding("test.absent"))
    assert session.instance("rollout").backend == "test.logp"


def test_there_is_no_fallback_in_a_session():
    narrow = descriptor(backend="test.narrow", targets=frozenset({"training"}), fallback="test.logp")
    with OperatorSession(SemanticOperatorCatalog([descriptor(), narrow])) as session:
        with pytest.raises(XdError):
            session.resolve("rollout", binding("test.narrow"))
        with pytest.raises(XdError, match="no operator is bound"):
            session.instance("rollout")


def test_the_materialised_record_resolves_to_itself(session):
    record = descriptor(options=("scale",)).record({})
    assert session.resolve("rollout", record).build == record["build"]


def test_nothing_leaks_into_the_next_session():
    torch = pytest.importorskip("torch")
    operators = SemanticOperatorCatalog([descriptor()])
    with OperatorSession(operators) as first:
        first.resolve("rollout", binding())
        kept = first.instance("rollout")
        kept(torch.zeros(1, 2), torch.tensor([0]))
    with OperatorSession(operators) as second:
        with pytest.raises(XdError, match="no operator is bound"):
            second.instance("rollout")
        second.resolve("rollout", binding())
        assert second.instance("rollout") is not kept
        assert second.instance("rollout").calls == 0 == len(second.instance("rollout").returned()[0])
    with pytest.raises(XdError, match="closed"):
        first.instance("rollout")


def test_an_operator_counts_its_calls_and_keeps_what_it_gave(session):
    torch = pytest.importorskip("torch")
    session.resolve("rollout", binding(scale=3))
    operator = session.instance("rollout")
    given, kept = [], []
    for step in range(3):
        logits = torch.randn(2, 4, generator=torch.Generator().manual_seed(step))
        given.append(checksum(logits))
        logprobs = operator(logits, torch.tensor([step, 1]), 0.5)
        kept.append(logprobs.numpy().copy())
        logprobs.fill_(7)  # whoever holds the tensor cannot change what was returned
    assert (operator.calls, operator.options, operator.backend) == (3, {"scale": 3}, "test.logp")
    assert operator.implementation == f"{Logp.__module__}:Logp"
    assert operator.build == descriptor().build
    assert operator.temperatures == {0.5} and operator.logits_given == set(given)
    ids, values = operator.returned()
    assert ids.tolist() == [0, 1, 1, 1, 2, 1] and values.tolist() == [v for each in kept for v in each.tolist()]


def test_calls_of_a_copy_in_another_process_count_as_its_own():
    torch = pytest.importorskip("torch")
    session = OperatorSession(catalog.load(False))
    session.resolve("rollout", binding("native"))
    operator = session.instance("rollout")
    logits, ids = torch.randn(2, 5), torch.tensor([1, 4])
    operator(logits, ids)
    copy = pickle.loads(pickle.dumps(operator))
    copy(logits + 1, ids, 0.5)
    operator.take_over(copy)
    assert operator.calls == 2 and operator.temperatures == {1.0, 0.5} and len(operator.logits_given) == 2
    assert operator.returned()[0].tolist() == [1, 4, 1, 4]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_checksum_moves_with_any_element_and_with_nothing_else(dtype):
    """Neither with the layout in memory nor with where there a tensor begins; the last elements are no eight bytes."""
    torch = pytest.importorskip("torch")
    wider = torch.randn(16, generator=torch.Generator().manual_seed(1)).to(getattr(torch, dtype))
    logits = wider[1:].view(3, 5)
    for same in (logits.clone(), logits.T.contiguous().T, torch.cat([wider[:4], wider])[5:].view(3, 5)):
        assert checksum(same) == checksum(logits)
    for cell in range(15):
        other = logits.clone()
        other.view(-1)[cell] += 1
        assert checksum(other) != checksum(logits), cell
    assert checksum(logits.double()) is None and checksum("no tensor") is None


@pytest.mark.parametrize("factory", ["make_double", "make_rectangle"])
def test_an_operator_that_gives_something_else_is_caught(factory):
    torch = pytest.importorskip("torch")
    with OperatorSession(SemanticOperatorCatalog([descriptor(factory=f"operator_fixtures:{factory}")])) as session:
        session.resolve("rollout", binding())
        operator = session.instance("rollout")
        with pytest.raises(XdError, match="one float32 logprob a token"):
            operator(torch.zeros(2, 4), torch.tensor([0, 1]))
        assert operator.calls == 0


@pytest.mark.parametrize("factory", ["no_such_module:make", "operator_fixtures:absent"])
def test_a_factory_that_cannot_be_loaded_is_named(factory):
    with OperatorSession(SemanticOperatorCatalog([descriptor()])) as session:
        session.resolve("rollout", binding())
        session._bound["rollout"] = (dataclasses.replace(descriptor(), factory=factory), {})
        with pytest.raises(XdError, match="factory cannot be loaded"):
            session.instance("rollout")


# -- the operators that ship


@pytest.fixture
def shipped():
    with OperatorSession(catalog.load(True)) as session:

        def get(backend, side="rollout"):
            session.resolve(side, binding(backend))
            return session.instance(side)

        yield get


@pytest.fixture
def logits_and_ids():
    torch = pytest.importorskip("torch")
    generator = torch.Generator().manual_seed(3)
    return torch.randn(9, 101, generator=generator) * 3, torch.randint(101, (9,), generator=generator)


@pytest.mark.parametrize("backend", ["native", "xd.triton_logp", "smoke_only.logp_reference"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logits_operators_match_float64(shipped, logits_and_ids, backend, temperature):
    logits, ids = logits_and_ids
    found = shipped(backend)(logits.bfloat16(), ids, temperature)
    wanted = (logits.bfloat16().double() / temperature).log_softmax(-1).gather(-1, ids[:, None])[:, 0]
    assert float((found.double() - wanted).abs().max()) < LOGPROB_FLOAT32_NATS
    other = shipped(backend)(logits.bfloat16(), ids, temperature=2.0)
    assert float((other.double() - wanted).abs().max()) > LOGPROB_FLOAT32_NATS


def test_batch_invariance_is_kept_where_it_is_promised(shipped):
    """A row's bits alone, in company, and in another place; on the CPU by the twin."""
    torch = pytest.importorskip("torch")
    generator = torch.Generator().manual_seed(3)
    logits = (torch.randn(7, 5003, generator=generator) * 3).bfloat16()
    ids = torch.randint(5003, (7,), generator=generator)
    promising = [found.backend for found in catalog.load(False) if "batch_invariant" in found.properties]
    assert "xd.triton_logp" in promising
    for backend in promising:
        whole = shipped(backend)(logits, ids, 0.9)
        for rows in ([0], [6], [2, 1], [6, 5, 4, 3, 2, 1, 0]):
            assert torch.equal(shipped(backend)(logits[rows], ids[rows], 0.9), whole[rows])
        assert not torch.equal(shipped(backend)(logits, ids, 0.9001), whole)


def test_the_reference_computes_its_own_logits(shipped):
    torch = pytest.importorskip("torch")
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(9, 64, generator=generator).bfloat16()
    weight = torch.randn(101, 64, generator=generator).bfloat16()
    ids = torch.randint(101, (9,), generator=generator)
    wanted = (hidden.double() @ weight.double().mT).log_softmax(-1).gather(-1, ids[:, None])[:, 0]
    found = shipped("xd.reference_logp")(hidden, weight, ids, 1.0)
    assert float((found.double() - wanted).abs().max()) < LINEAR_LOGPROB_FLOAT32_NATS
    native = shipped("native")(hidden @ weight.mT, ids)
    assert float((native.double() - wanted).abs().max()) > LINEAR_LOGPROB_FLOAT32_NATS


def test_the_smoke_reference_equals_native_and_the_offset_does_not(shipped, logits_and_ids):
    torch = pytest.importorskip("torch")
    native = shipped("native")(*logits_and_ids)
    assert torch.equal(shipped("smoke_only.logp_reference")(*logits_and_ids), native)
    assert torch.equal(shipped("smoke_only.logp_offset", "training")(*logits_and_ids), native)
    apart = shipped("smoke_only.logp_offset", "rollout")(*logits_and_ids) - native
    assert bool((apart > 0).all())


def test_the_offset_exceeds_every_threshold(shipped, logits_and_ids):
    apart = shipped("smoke_only.logp_offset")(*logits_and_ids) - shipped("native")(*logits_and_ids)
    found = [contract.lookup(source, "current") for source in contract.sources()]
    assert float(apart.min()) > max(each.threshold(dtype) for each in found for dtype in knobs.DTYPES)


def test_every_alias_leads_to_an_operator():
    for backend in knobs.BACKEND_ALIASES.values():
        assert isinstance(catalog.load(False).get("selected_logprob", backend), OperatorDescriptor)
