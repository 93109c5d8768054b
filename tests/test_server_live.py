"""Runtime server with a live vLLM server: XD_PYTHON_VLLM names an interpreter that has vLLM; skipped without.

Nothing of xd is in that process: it is vLLM's own api_server, on a tiny random Llama in float32.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
import tolerances
from hf_fixtures import Bench, frozen, greatest, row
from vllm_live import save_model

from libxd import environment
from libxd.errors import XdError
from libxd.operators.session import EnginesOwn
from libxd.runtimes import registry
from libxd.runtimes.protocol import Request

PYTHON = os.environ.get("XD_PYTHON_VLLM") and os.path.abspath(os.environ["XD_PYTHON_VLLM"])
pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="no vLLM here: XD_PYTHON_VLLM=PATH of an interpreter that has it"),
    pytest.mark.xdist_group("vllm"),
]
RUNTIME = registry.load("server")
FROZEN = frozen()
START_TIMEOUT_S = 300


@contextlib.contextmanager
def api_server(model: Path, log: Path):
    """The address of a server of vLLM's on that checkpoint."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--dtype", "float32", "--enforce-eager",
        "--no-enable-prefix-caching", "--skip-tokenizer-init", "--host", "127.0.0.1", "--port", port,
    ]  # fmt: skip
    settings = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1",
                "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}  # fmt: skip
    with log.open("wb") as said:
        process = subprocess.Popen([*map(str, command)], stdout=said, stderr=said, start_new_session=True,
                                   env={**os.environ, **settings})  # fmt: skip
    try:
        yield f"http://127.0.0.1:{port}", process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    """What a live server says of itself, and what it answers, by batch size."""
    place = tmp_path_factory.mktemp("server")
    save_model(place / "tiny")
    with api_server(place / "tiny", place / "log") as (url, process), pytest.MonkeyPatch.context() as patch:
        patch.setenv("XD_SERVER_URL", url)
        until = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                account = RUNTIME.account()
                break
            except XdError:
                assert process.poll() is None and time.monotonic() < until, (place / "log").read_text()[-3000:]
                time.sleep(1)
        engine = RUNTIME.open("rollout", {"engine": {"server": account}}, None)
        engine.bind(EnginesOwn("native"))
        semantics = row()["identity"]["semantics"]
        found = {
            "model": place / "tiny", "account": account, "settings": engine.settings(),
            "scores": {size: engine.score(FROZEN, Request(size, "prefill", "canonical", semantics)) for size in (1, 4)},
            "environment": environment.describe(), "url": url,
        }  # fmt: skip
        process.kill()
        process.wait()
        try:
            engine.score(FROZEN, Request(4, "prefill", "canonical", semantics))
        except XdError as error:
            found["after"] = error
        engine.close()
    return found


def test_it_says_what_it_was_started_with(asked):
    shown = {knob: seen.value for knob, seen in asked["settings"].items()}
    assert shown == {
        "rollout.dtype": "float32", "rollout.tensor_parallel_size": 1, "rollout.context_parallel_size": 1,
        "rollout.enable_prefix_caching": False, "rollout.enforce_eager": True, "logp.backend": None,
    }  # fmt: skip
    account = asked["account"]
    assert (account["model"], account["max_model_len"]) == ("tiny", 128)
    assert account["version"] and account["config"]["logprobs_mode"] == "raw_logprobs"


def test_neither_its_address_nor_a_path_is_in_the_environment(asked):
    assert asked["environment"]["servers"] == {"server": asked["account"]}
    assert str(asked["model"].parent) not in str(asked["environment"]["servers"])
    assert asked["url"].rpartition(":")[2] not in str(asked["environment"]["servers"])


@pytest.mark.parametrize("size", [1, 4])
def test_logprobs_are_those_of_teacher_forcing(asked, size):
    scores = asked["scores"][size]
    theirs = Bench(asked["model"]).logprobs("training", FROZEN)
    assert greatest(scores.logprobs, theirs) < tolerances.TINY_LLAMA_FLOAT32_NATS
    assert np.array_equal(scores.observed.token_ids, FROZEN.token_ids)
    # the control: the same numbers a token further on
    shifted = np.where(np.isnan(theirs), np.nan, np.nan_to_num(np.roll(theirs, 1)))
    assert greatest(scores.logprobs, shifted) > 1


def test_a_server_that_died_is_75(asked):
    assert asked["after"].status == 75 and "$XD_SERVER_URL" in asked["after"].line()
