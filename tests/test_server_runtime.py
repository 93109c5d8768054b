"""Runtime server against a small server of the tests: what it shows, what it answers, and each way to answer wrongly.

test_server_chain.py goes through the tools; test_server_live.py asks a live vLLM.
"""

from __future__ import annotations

import copy
import json
import socket
import threading

import numpy as np
import pytest
import server_fixtures
from hf_fixtures import frozen, row
from materialize_fixtures import ENVIRONMENT
from server_fixtures import INFO, METRICS, pairs, serving

from libxd import environment
from libxd.errors import Status, XdError
from libxd.operators.session import EnginesOwn
from libxd.runtimes import registry
from libxd.runtimes.protocol import Request, submission_batches
from libxd.scoring.evidence import Snapshot

RUNTIME = registry.load("server")
FROZEN = frozen()
RAW = row()["identity"]["semantics"]


def plan(said, **changes):
    """The rollout side's plan beside what a server says of itself (None: no server)."""
    given = {**ENVIRONMENT, **({"servers": {"server": said}} if said else {})}
    return RUNTIME.materialize("rollout", row(**{"rollout_mode": "prefill", **changes}), given, frozenset())


def statuses(made):
    return {record.knob: record.status for record in made.knobs}


def reason(made, knob):
    return next(record.evidence for record in made.knobs if record.knob == knob)


def request(batch_size=4, submission="canonical"):
    return Request(batch_size, "prefill", submission, RAW)


@pytest.fixture
def server(monkeypatch):
    with serving() as standing:
        monkeypatch.setenv("XD_SERVER_URL", standing.url)
        yield standing


@pytest.fixture
def opened(server):
    """(server, engine, operator)."""
    engine = RUNTIME.open("rollout", {"engine": plan(RUNTIME.account()).engine}, None)
    operator = EnginesOwn("native")
    engine.bind(operator)
    yield server, engine, operator
    engine.close()


# -- what it says of itself


def test_the_account_holds_what_changes_numbers_and_no_path(server):
    server.names = ["/home/someone/models/tiny/"]
    assert RUNTIME.account() == {
        "model": "tiny", "max_model_len": 64, "version": "9.9",
        "config": {"dtype": "float32", "tensor_parallel_size": 1, "context_parallel_size": 1, "block_size": 16,
                   "enable_prefix_caching": False, "enforce_eager": True, "logprobs_mode": "raw_logprobs",
                   "variables": {"VLLM_BATCH_INVARIANT": False}},
    }  # fmt: skip


def test_a_server_without_its_own_pages_shows_nothing_more(server):
    server.info = None
    assert RUNTIME.account()["config"] == {"enable_prefix_caching": False}  # by its metrics
    server.metrics = None
    assert RUNTIME.account() == {"model": server_fixtures.NAME, "max_model_len": 64, "version": "9.9", "config": {}}
    server.metrics = METRICS + METRICS.replace('engine="0"', 'engine="1"')
    assert RUNTIME.account()["config"] == {}


@pytest.mark.parametrize(
    ("part", "key", "value", "knob"),
    [
        ("model_config", "dtype", "torch.float8", "dtype"),
        ("model_config", "dtype", 32, "dtype"),
        ("model_config", "enforce_eager", 1, "enforce_eager"),
        ("parallel_config", "tensor_parallel_size", True, "tensor_parallel_size"),
        ("parallel_config", "tensor_parallel_size", "1", "tensor_parallel_size"),
        ("parallel_config", "prefill_context_parallel_size", None, "context_parallel_size"),
    ],
)
def test_a_setting_of_another_type_is_not_shown(server, part, key, value, knob):
    assert knob in RUNTIME.account()["config"]
    server.info = copy.deepcopy(INFO)
    server.info["vllm_config"][part][key] = value
    assert knob not in RUNTIME.account()["config"]


def test_an_environment_holds_the_account_of_a_named_server_alone(server, monkeypatch):
    described = environment.describe()
    assert described["servers"] == {"server": RUNTIME.account()} and server.url not in json.dumps(described)
    assert environment.numeric(described, "server")["servers"] == described["servers"]
    assert "servers" not in environment.numeric(described, "hf")
    monkeypatch.delenv("XD_SERVER_URL")
    assert "servers" not in environment.describe()


# -- materialising


def test_what_the_server_shows_is_applied(server):
    made = plan(RUNTIME.account())
    assert made.refusals == [] and statuses(made).pop("logp.backend") == "unobservable"
    assert {status for knob, status in statuses(made).items() if knob != "logp.backend"} == {"applied"}


def test_what_it_does_not_show_is_unobservable(server):
    server.info = server.metrics = None
    found = statuses(plan(RUNTIME.account()))
    assert found.pop("batch.size") == "applied" and set(found.values()) == {"unobservable"} and len(found) == 6


@pytest.mark.parametrize(
    ("changes", "knob", "words"),
    [
        ({"rollout__dtype": "bfloat16"}, "rollout.dtype", 'runs with "float32"; start one with "bfloat16"'),
        ({"rollout__tensor_parallel_size": 2}, "rollout.tensor_parallel_size", "runs with 1; start one with 2"),
        ({"rollout__enforce_eager": False}, "rollout.enforce_eager", "runs with true; start one with false"),
        ({"rollout__enable_prefix_caching": True}, "rollout.enable_prefix_caching", "shares no prefix"),
        ({"logp__backend": "xd.reference_logp"}, "logp.backend", "cannot be bound into it from outside"),
    ],
)
def test_what_it_does_otherwise_is_unsupported(server, changes, knob, words):
    made = plan(RUNTIME.account(), **changes)
    assert [name for name, status in statuses(made).items() if status == "unsupported"] == [knob]
    assert words in reason(made, knob)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rollout_mode": "decode"}, "takes no tokens to decode"),
        ({"synthetic": {"name": "xd-test", "seed": 7}}, "no synthetic model"),
        ({"semantics": {"logprobs": "processed"}}, "raw ones"),
    ],
)
def test_a_side_is_refused_with_the_reason(server, changes, words):
    (found,) = plan(RUNTIME.account(), **changes).refusals
    assert words in found


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [("logprobs_mode", "processed_logits", "in the place of logprobs"), ("quantization", "awq", "quantised (awq)")],
)
def test_a_server_of_other_numbers_is_refused(server, key, value, words):
    server.info = copy.deepcopy(INFO)
    server.info["vllm_config"]["model_config"][key] = value
    (found,) = plan(RUNTIME.account()).refusals
    assert words in found


def test_without_an_address_the_side_is_refused():
    (found,) = plan(None).refusals
    assert "set XD_SERVER_URL" in found


# -- scoring


def expected(model, held=FROZEN):
    """float32 [T] of a model of pairs, NaN within prompts."""
    values = np.full(held.num_tokens, np.nan, np.float32)
    for s in range(held.num_sequences):
        span, prompt = held.span(s), int(held.prompt_lens[s])
        values[span.start + prompt : span.stop] = model(held.token_ids[span].tolist())[prompt - 1 :]
    return values


def test_logprobs_are_the_models_bit_for_bit(opened):
    _, engine, operator = opened
    scores = engine.score(FROZEN, request())
    assert np.array_equal(scores.logprobs.view(np.int32), expected(pairs()).view(np.int32))
    assert not np.array_equal(scores.logprobs, expected(pairs(seed=4)), equal_nan=True)
    assert np.array_equal(scores.observed.token_ids, FROZEN.token_ids)
    assert np.array_equal(scores.observed.scored, ~np.isnan(scores.logprobs))
    ids, values = operator.returned()
    assert np.array_equal(ids, FROZEN.token_ids[scores.observed.scored])
    assert np.array_equal(values, scores.logprobs[scores.observed.scored])


@pytest.mark.parametrize("submission", ["canonical", "rotated"])
@pytest.mark.parametrize("size", [1, 4, 9, 50])
def test_a_batch_is_a_request(opened, size, submission):
    server, engine, _ = opened
    engine.score(FROZEN, request(size, submission))
    batches = submission_batches(FROZEN.num_sequences, submission, size)
    asked = [[FROZEN.token_ids[FROZEN.span(s)].tolist() for s in batch] for batch in batches]
    assert [made["prompt"] for made in server.requests] == asked
    shown = engine.behaviour()["batch.size"]
    assert (shown.value, shown.evidence) == (size, {"prompts_of_requests": [len(batch) for batch in batches]})


def test_what_cannot_be_seen_from_outside_is_not_made_up(opened):
    _, engine, _ = opened
    scores, snapshot = engine.score(FROZEN, request()), Snapshot.take(engine)
    fed = scores.observed
    assert (fed.positions, fed.attention_mask, fed.cache, fed.forwards) == (None, None, None, None)
    assert (snapshot.weights, snapshot.dtype, snapshot.mode, snapshot.optimizer) == (None, None, None, None)
    assert scores.logits_dtype is None and engine.settings()["logp.backend"].value is None


def test_one_connection_is_kept_and_made_anew_when_the_server_closed_it(opened):
    server, engine, _ = opened
    before = server.connections
    engine.score(FROZEN, request(1))
    assert server.connections == before and len(server.requests) == FROZEN.num_sequences
    server.close_after_answer = True
    assert np.array_equal(engine.score(FROZEN, request(1)).logprobs, expected(pairs()), equal_nan=True)
    assert server.connections > before + FROZEN.num_sequences


# -- answers that are none

REFUSED, BUG, RETRY = Status.REFUSED, Status.BUG, Status.RETRY
LAST = f"sequence {FROZEN.num_sequences - 1}"
FAULTS = {
    "hangs-up": (RETRY, "$XD_SERVER_URL: the server broke off while it answered"),
    "dies": (RETRY, "$XD_SERVER_URL: the server broke off while it answered"),
    "in-parts-and-no-end": (RETRY, "$XD_SERVER_URL: the server broke off while it answered"),
    "status-307": (REFUSED, "$XD_SERVER_URL: the server sends on to another address"),
    "status-500": (RETRY, "HTTP status 500: it will not do"),
    "status-429": (RETRY, "HTTP status 429: it will not do"),
    "status-400": (REFUSED, "$XD_SERVER_URL: the server answers with HTTP status 400: it will not do"),
    "status-401": (REFUSED, "HTTP status 401"),
    "broken-json": (BUG, "$XD_SERVER_URL: the server's answer cannot be read: not JSON"),
    "a-page": (BUG, "the server's answer cannot be read: not JSON"),
    "nan": (BUG, "$XD_SERVER_URL#/choices/0/prompt_logprobs/"),
    "minus-infinity": (BUG, "$XD_SERVER_URL#/choices/0/prompt_logprobs/"),
    "null": (BUG, f"{LAST}#/9: the server gives no finite logprob of a token (found null"),
    "stands-in-for-minus-infinity": (BUG, f"{LAST}#/9: the server gives no finite logprob of a token (found -9999"),
    "a-text": (BUG, f"{LAST}#/9: the server gives no finite logprob of a token (found -1.5"),
    "a-logit": (BUG, f"{LAST}#/9: the server gives no finite logprob of a token (found 3.5"),
    "fewer-logprobs": (BUG, f"{LAST}: the server gives another number of logprobs than there are tokens (found 9"),
    "no-logprobs": (REFUSED, f"{LAST}: the server gives no prompt logprobs"),
    "no-ids": (REFUSED, f"{LAST}: the server does not say which ids it was fed"),
    "other-id": (BUG, f"{LAST}: the server was fed other ids than the frozen ones"),
    "other-ids-logprob": (BUG, f"{LAST}#/9: the server gives the logprob of another id than the frozen one"),
    "other-model": (BUG, "the server answers for another model (found another, expected a-lab/tiny)"),
    "fewer-choices": (BUG, "the server answers another number of prompts (found 8, expected 9)"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_answer_is_one_clear_error(opened, fault):
    server, engine, _ = opened
    server.fault = fault
    with pytest.raises(XdError) as raised:
        engine.score(FROZEN, request(9))
    status, words = FAULTS[fault]
    line = raised.value.line()
    assert raised.value.status == status and words in line and "\n" not in line and server.url not in line
    server.fault = ""
    assert np.array_equal(engine.score(FROZEN, request(9)).logprobs, expected(pairs()), equal_nan=True)


def test_an_answer_may_come_in_parts(opened):
    server, engine, _ = opened
    server.fault = "in-parts"
    assert np.array_equal(engine.score(FROZEN, request(9)).logprobs, expected(pairs()), equal_nan=True)


def test_an_answer_beyond_all_measure_is_refused_and_asks_for_smaller_batches(opened, monkeypatch):
    from libxd.runtimes.server import client

    server, engine, _ = opened
    for fault in ("", "in-parts"):
        server.fault = fault
        monkeypatch.setattr(client, "MOST_BYTES", 3000)
        with pytest.raises(XdError, match="too long to be read") as raised:
            engine.score(FROZEN, request(9))
        assert raised.value.status == REFUSED and "smaller batch.size" in raised.value.line()
        assert np.array_equal(engine.score(FROZEN, request(1)).logprobs, expected(pairs()), equal_nan=True)


def test_a_sequence_that_the_server_cannot_hold_is_65_before_anything_is_asked(opened):
    server, engine, _ = opened
    longest = int(np.diff(FROZEN.cu_seqlens).max())
    for limit, fits in ((longest + 1, True), (longest, False)):
        server.max_model_len = limit
        engine = RUNTIME.open("rollout", {"engine": plan(RUNTIME.account()).engine}, None)
        engine.bind(EnginesOwn("native"))
        if fits:
            engine.score(FROZEN, request())
            server.requests.clear()
            continue
        with pytest.raises(XdError, match="longer than the server takes") as raised:
            engine.score(FROZEN, request())
        assert raised.value.status == Status.INVALID and server.requests == []


@pytest.mark.parametrize("name", ["attention_mask", "positions"])
def test_sequences_that_are_laid_out_otherwise_are_refused(opened, name):
    _, engine, _ = opened
    held = copy.deepcopy(FROZEN)
    cell = held.span(4).start
    getattr(held, name)[cell] = 1 if name == "positions" else False
    with pytest.raises(XdError, match="laid out otherwise") as raised:
        engine.score(held, request())
    assert (raised.value.status, raised.value.where) == (Status.REFUSED, "sequence 4")


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_another_server_than_the_materialised_one_is_refused(opened, when):
    """Restarted with another setting, before a case or while it is scored."""
    server, engine, _ = opened
    other = copy.deepcopy(INFO)
    other["vllm_config"]["model_config"]["dtype"] = "torch.bfloat16"
    engine.settings()
    if when == "before":
        server.info = other
    else:
        honest = server.completion
        server.completion = lambda asked: (setattr(server, "info", other), honest(asked))[1]
    with pytest.raises(XdError, match="another than the one it was materialised for") as raised:
        engine.settings() if when == "before" else engine.score(FROZEN, request())
    assert raised.value.status == Status.REFUSED


# -- what listens there


@pytest.mark.parametrize("url", [
    "127.0.0.1:8000", "ftp://host", "http://", "http://h:port", "http://h:99999", "http://user:secret@h",
    "http://:secret@h", "http://secret@h", "http://user:secret@h:port", "http://h?key=secret", "http://h#secret",
    "http://h st", "http://h/a b", "http://h/\u00e4", "http://[::1",
])  # fmt: skip
def test_an_address_that_is_none_is_65_and_shows_no_password(monkeypatch, url):
    monkeypatch.setenv("XD_SERVER_URL", url)
    with pytest.raises(XdError, match="is no address of a server") as raised:
        RUNTIME.account()
    assert raised.value.status == Status.INVALID
    assert "secret" not in json.dumps([raised.value.record(), environment.describe()["servers"]])


@pytest.mark.parametrize("host", ["a..b", "a" * 64 + ".example"])
def test_a_name_that_cannot_be_looked_up_is_66(monkeypatch, host):
    monkeypatch.setenv("XD_SERVER_URL", f"http://{host}:80")
    with pytest.raises(XdError, match="there is no such host") as raised:
        RUNTIME.account()
    assert raised.value.status == Status.MISSING


def test_an_ipv6_address_is_one_with_and_without_a_port():
    from libxd.runtimes.server import client

    assert [client.Client(url)._connection.port for url in ("http://[::1]", "https://[::1]", "http://[::1]:7")] == [
        80, 443, 7,
    ]  # fmt: skip
    assert client.Client("http://[::1]")._connection.host == "::1"


def test_a_proxy_is_not_asked(server, monkeypatch):
    account = RUNTIME.account()
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{closed.getsockname()[1]}")
        assert RUNTIME.account() == account


def test_a_server_without_tls_is_not_waited_for(server, monkeypatch):
    monkeypatch.setenv("XD_SERVER_URL", server.url.replace("http:", "https:"))
    with pytest.raises(XdError, match="cannot be talked to over TLS") as raised:
        RUNTIME.account()
    assert raised.value.status == Status.INVALID


def test_an_address_may_end_in_the_apis_own_prefix(server, monkeypatch):
    plain = RUNTIME.account()
    for ending in ("/", "/v1", "/v1/"):
        monkeypatch.setenv("XD_SERVER_URL", server.url + ending)
        assert RUNTIME.account() == plain


def test_nobody_listens(monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("XD_SERVER_URL", f"http://127.0.0.1:{free.getsockname()[1]}")
        with pytest.raises(XdError, match="no server answers there: Connection refused") as raised:
            RUNTIME.account()
    assert raised.value.status == Status.RETRY


def test_what_listens_is_no_openai_server(server):
    server.page = lambda path: "<html>welcome</html>"
    with pytest.raises(XdError, match="no OpenAI-compatible server") as raised:
        RUNTIME.account()
    assert raised.value.status == Status.INVALID


def test_what_listens_speaks_no_http(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        monkeypatch.setenv("XD_SERVER_URL", f"http://127.0.0.1:{listening.getsockname()[1]}")

        def answer():
            connection, _ = listening.accept()
            with connection:
                connection.recv(1024)
                connection.sendall(b"220 mail.example ESMTP\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(XdError, match="speaks no HTTP") as raised:
            RUNTIME.account()
        thread.join()
    assert raised.value.status == Status.INVALID


def test_a_server_that_says_nothing_is_75(monkeypatch):
    from libxd.runtimes.server import client

    monkeypatch.setattr(client, "ASK_TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listening:  # the kernel accepts, and nobody reads
        monkeypatch.setenv("XD_SERVER_URL", f"http://127.0.0.1:{listening.getsockname()[1]}")
        with pytest.raises(XdError, match=r"does not answer within 0\.2 s") as raised:
            RUNTIME.account()
    assert raised.value.status == Status.RETRY


@pytest.mark.parametrize("names", [[], ["one", "two"]])
def test_which_of_several_models_is_meant_cannot_be_told(server, names):
    server.names = names
    with pytest.raises(XdError, match="several models, or none") as raised:
        RUNTIME.account()
    assert raised.value.status == Status.REFUSED
