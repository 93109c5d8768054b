"""Engines over ranks: the figures against one process, what a rank that differs shows, and how a world ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
import tolerances
from conftest import ROOT
from rank_fixtures import CHANGES, SIDE_OF, RankChain, ranks_of

from libxd.errors import Status, XdError
from libxd.runtimes.ranks import launch

pytest.importorskip("torch")
pytest.importorskip("transformers")

NEAR = tolerances.TINY_LLAMA_FLOAT32_NATS
TENSOR, CONTEXT, SHARDING = CHANGES
#: how long a process may take to appear or to be gone; only a failing test waits so long
PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def chain(tmp_path_factory) -> RankChain:
    return RankChain(tmp_path_factory.mktemp("ranks"))


# -- figures


@pytest.fixture(scope="module")
def judged(chain) -> dict[tuple[str | None, str], tuple[str, dict, dict]]:
    """(change, runtime) -> attempt, comparison, effect against the baseline in one process."""
    wanted = [(None, "hf"), *((change, "hf") for change in CHANGES),
              (TENSOR, "ranks-drop-a-part"), (CONTEXT, "ranks-drop-a-part"),
              (CONTEXT, "rank-feeds-other-id"), (SHARDING, "rank-feeds-other-id"),
              (TENSOR, "rank-holds-other-weight"), (SHARDING, "rank-holds-other-weight")]  # fmt: skip
    attempts = {key: chain.attempt(*key) for key in wanted}
    paths = "".join(f"{attempt}\n" for attempt in attempts.values())
    for side in ("rollout", "training"):
        assert chain.run("xd-score", "--side", side, stdin=paths) == paths
    comparisons = chain.run("xd-compare", "--json", stdin=paths).splitlines()
    chain.run("xd-seal", stdin=paths)
    effects = chain.run("xd-compare", "--against", attempts[None, "hf"], stdin=paths).splitlines()
    return {
        key: (attempts[key], json.loads(comparison), json.loads(effect))
        for key, comparison, effect in zip(wanted, comparisons, effects, strict=True)
    }


@pytest.mark.parametrize("change", [TENSOR, CONTEXT])
def test_a_split_rollout_says_what_one_process_says(judged, change):
    _, comparison, effect = judged[change, "hf"]
    assert (comparison["status"], comparison["violations"]) == ("PASS", [])
    assert 0 < effect["rollout"]["max_absolute"] < NEAR
    assert effect["training"]["max_absolute"] == 0


def test_sharded_training_is_bit_for_bit_that_of_one_process(judged):
    _, comparison, effect = judged[SHARDING, "hf"]
    assert (comparison["status"], comparison["violations"]) == ("PASS", [])
    assert effect["training"]["max_absolute"] == effect["rollout"]["max_absolute"] == 0


@pytest.mark.parametrize("change", [TENSOR, CONTEXT])
def test_a_world_that_loses_a_ranks_part_is_far_off(judged, change):
    """Negative control of the figures: the same inputs and weights, but a part of each sum does not arrive."""
    _, comparison, effect = judged[change, "ranks-drop-a-part"]
    assert (comparison["status"], comparison["violations"]) == ("MISMATCH", [])
    assert effect["rollout"]["max_absolute"] > 1000 * NEAR


# -- what a rank that differs shows


@pytest.mark.parametrize("change", [CONTEXT, SHARDING])
def test_a_rank_that_is_fed_another_id_makes_the_identity_invalid(judged, change):
    _, comparison, _ = judged[change, "rank-feeds-other-id"]
    assert comparison["status"] == "INVALID_IDENTITY"
    assert {(v["side"], v["code"]) for v in comparison["violations"]} >= {(SIDE_OF[change], "token-ids")}


@pytest.mark.parametrize("change", [TENSOR, SHARDING])
def test_a_rank_that_holds_another_weight_makes_the_identity_invalid(judged, change):
    """A copy on one rank of two, and a shard that no other rank holds."""
    _, comparison, _ = judged[change, "rank-holds-other-weight"]
    assert comparison["status"] == "INVALID_IDENTITY"
    named = {v["path"].rpartition("/")[2] for v in comparison["violations"] if v["code"] == "weights"}
    assert named == {"model.norm.weight"}


def test_the_world_is_planned_and_read_back(chain, judged):
    attempt, _, _ = judged[TENSOR, "hf"]
    engine = chain.read(attempt, "materialized.json")["sides"]["rollout"]["engine"]
    assert (engine["world_size"], engine["vocabulary_rows"]) == (2, [[0, 64], [64, 128]])
    readback = chain.read(attempt, "readback_rollout.json")
    assert readback["engine"]["world_size"] == 2
    (shown,) = (each for each in readback["knobs"] if each["knob"] == TENSOR)
    assert shown["actual"] == 2
    assert [each["rank"] for each in shown["evidence"]["ranks"]] == [0, 1]
    for rank in shown["evidence"]["ranks"]:
        assert rank["vocabulary_rows"] == engine["vocabulary_rows"]
        assert rank["parameters"] == {"S(0) of 2": 11, "S(1) of 2": 4, "whole": 5}
    attempt, _, _ = judged[CONTEXT, "hf"]
    (shown,) = (k for k in chain.read(attempt, "readback_rollout.json")["knobs"] if k["knob"] == CONTEXT)
    assert (shown["actual"], shown["evidence"]["merges"]) == (2, {"2": shown["evidence"]["attention_calls"]})
    attempt, _, _ = judged[SHARDING, "hf"]
    (shown,) = (k for k in chain.read(attempt, "readback_training.json")["knobs"] if k["knob"] == SHARDING)
    assert [each["parameters"] for each in shown["evidence"]["ranks"]] == [{"S(0) of 2": 20}] * 2


# -- how a world ends


def test_a_rank_that_raises_ends_the_attempt_with_its_own_error(chain):
    marker = f"ranks-{uuid.uuid4()}"
    bad, good = chain.attempt(TENSOR, "rank-raises"), chain.attempt(CONTEXT)
    ran = chain.ran("xd-score", "--side", "rollout", bad, good, XD_TEST_MARKER=marker)
    assert (ran.status, ran.out) == (Status.BUG, f"{good}\n")
    assert f"xd-score: {bad}: rank 1: the engine failed: RuntimeError: the kernel did not launch" in ran.err
    assert chain.files(bad) == set()
    assert ranks_of(marker) == []


def test_a_rank_that_refuses_alone_ends_the_attempt(chain):
    bad = chain.attempt(SHARDING, "rank-refuses")
    ran = chain.ran("xd-score", "--side", "training", bad)
    assert (ran.status, ran.out) == (Status.BUG, "")
    assert "rank 1: this rank's device is another" in ran.err
    assert chain.files(bad) == set()


class Running:
    """xd-score at work on an engine whose rank 1 sleeps while the others wait for it."""

    def __init__(self, chain: RankChain, attempt: str, *arguments: str) -> None:
        self.marker = f"ranks-{uuid.uuid4()}"
        note = chain.place / f"{self.marker}.pid"
        environment = {
            **os.environ, "PYTHONPATH": str(ROOT / "tests" / "engines"), "XD_PYTHON": sys.executable,
            "XD_TEST_MARKER": self.marker, "XD_TEST_PID": str(note),
        }  # fmt: skip
        self.process = subprocess.Popen(
            [ROOT / "tools" / "xd-score", "--side", SIDE_OF[TENSOR], *arguments, attempt], cwd=chain.place,
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        wait_for(lambda: note.exists() and note.read_text())
        self.sleeper = int(note.read_text())
        (self.scorer,) = set(ranks_of(self.marker)) - {self.sleeper}


def wait_for(there) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not there():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_rank_that_is_killed_ends_the_attempt(chain):
    attempt = chain.attempt(TENSOR, "rank-sleeps")
    running = Running(chain, attempt)
    os.kill(running.sleeper, signal.SIGKILL)
    out, err = running.process.communicate(timeout=PATIENCE_S)
    assert (running.process.returncode, out) == (Status.RETRY, "")
    assert "rank 1 was killed by SIGKILL" in err
    assert chain.files(attempt) == set()
    assert ranks_of(running.marker) == []


def test_a_rank_that_is_killed_while_it_starts_ends_the_attempt(chain):
    attempt, marker = chain.attempt(TENSOR), f"ranks-{uuid.uuid4()}"
    process = subprocess.Popen(
        [ROOT / "tools" / "xd-score", "--side", "rollout", attempt], cwd=chain.place, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
        env={**os.environ, "XD_PYTHON": sys.executable, "XD_TEST_MARKER": marker},
    )  # fmt: skip
    wait_for(lambda: len(ranks_of(marker)) == 2)
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in ranks_of(marker)}
    os.kill(next(pid for pid, command in commands.items() if "ranks.worker" in command), signal.SIGKILL)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out) == (Status.RETRY, "")
    assert "rank 1 was killed by SIGKILL" in err
    assert chain.files(attempt) == set() and ranks_of(marker) == []


def test_no_rank_outlives_the_scorer(chain):
    attempt = chain.attempt(TENSOR, "rank-sleeps")
    running = Running(chain, attempt)
    os.kill(running.scorer, signal.SIGKILL)
    out, err = running.process.communicate(timeout=PATIENCE_S)
    assert (running.process.returncode, out) == (Status.RETRY, "")
    assert "the scorer was killed by SIGKILL" in err
    wait_for(lambda: not ranks_of(running.marker))
    assert chain.files(attempt) == set()


def test_no_rank_outlives_xd_score(chain):
    running = Running(chain, chain.attempt(TENSOR, "rank-sleeps"))
    running.process.kill()
    running.process.communicate()
    wait_for(lambda: not ranks_of(running.marker))


def test_a_rank_that_dies_between_two_attempts_costs_neither(chain):
    """The engine goes with it; the next attempt gets another one, and why is said."""
    first, second = chain.attempt(TENSOR), chain.attempt(TENSOR)
    marker = f"ranks-{uuid.uuid4()}"
    process = subprocess.Popen(
        [ROOT / "tools" / "xd-score", "--side", "rollout"], cwd=chain.place, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "XD_PYTHON": sys.executable, "XD_TEST_MARKER": marker},
    )  # fmt: skip
    process.stdin.write(f"{first}\n")
    process.stdin.flush()
    assert process.stdout.readline() == f"{first}\n"
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in ranks_of(marker)}
    (worker,) = (pid for pid, command in commands.items() if "ranks.worker" in command)
    (scorer,) = commands.keys() - {worker}
    os.kill(worker, signal.SIGKILL)
    state = Path(f"/proc/{scorer}/status")  # dead to its parent when all its threads are
    wait_for(lambda: "(zombie)" in state.read_text() and len(os.listdir(f"/proc/{scorer}/task")) == 1)
    out, err = process.communicate(f"{second}\n", timeout=PATIENCE_S)
    assert (process.returncode, out) == (0, f"{second}\n"), err
    assert "rank 1 was killed by SIGKILL" in err and "started anew" in err
    scores = [(chain.place / attempt / "score_rollout.safetensors").read_bytes() for attempt in (first, second)]
    assert scores[0] == scores[1]


# -- under a launcher


def alone(monkeypatch, rank: int, port: int | None = None) -> None:
    """Be the one process of a world of two, as by variables that are left over."""
    if port is None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
    given = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in given.items():
        monkeypatch.setenv(name, str(value))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_launchers_lone_rank_waits_no_longer_than_it_may(monkeypatch, rank):
    from libxd.runtimes.ranks.group import Group

    alone(monkeypatch, rank)
    with pytest.raises(XdError, match=f"this is rank {rank} of 2, and .* did not come within 1 s") as raised:
        Group.join("rollout", 1.0)
    assert (raised.value.status, raised.value.code) == (Status.RETRY, "no-meeting")
    assert "unset RANK and WORLD_SIZE" in raised.value.line()


def test_more_ranks_than_a_machine_holds_are_not_started(monkeypatch):
    """A number that slipped in, of XD_RANKS or of a knob: a process each would be started."""
    from libxd.runtimes.ranks import processes, world

    monkeypatch.setattr(processes.subprocess, "Popen", lambda *_, **__: pytest.fail("a process was started"))
    with pytest.raises(XdError, match="more ranks than xd-score starts on one machine") as raised:
        world.World("rollout", processes.MOST + 1)
    assert (raised.value.status, raised.value.found) == (Status.REFUSED, processes.MOST + 1)
    with pytest.raises(pytest.fail.Exception, match="was started"):
        world.World("rollout", processes.MOST)


def test_a_port_in_use_is_75_with_the_port(chain):
    """Through the tools: a world of two is planned, and rank 0 cannot listen."""
    attempt = chain.attempt(TENSOR)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        ran = chain.ran("xd-score", "--side", "rollout", attempt, RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1",
                        MASTER_PORT=port)  # fmt: skip
    assert (ran.status, ran.out) == (Status.RETRY, "")
    assert f"$MASTER_PORT: rank 0 cannot listen there: the port is in use (found {port}" in ran.err
    assert chain.files(attempt) == set()


def launched(chain: RankChain, *arguments: str) -> subprocess.CompletedProcess:
    """xd-score under torchrun with two ranks."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
                "--no-python"]  # fmt: skip
    return subprocess.run(
        [*torchrun, str(ROOT / "tools" / "xd-score"), *arguments], cwd=chain.place, capture_output=True, text=True,
        timeout=300, env={**os.environ, "XD_PYTHON": sys.executable, "PYTHONPATH": str(ROOT / "tests" / "engines")},
    )  # fmt: skip


def test_torchrun_brings_the_ranks(chain, judged):
    """Rank 0 publishes and prints, once; the numbers are those of ranks that xd-score starts itself."""
    again = chain.attempt(SHARDING)
    ran = launched(chain, "--side", "training", again)
    assert (ran.returncode, ran.stdout) == (0, f"{again}\n"), ran.stderr
    itself, _, _ = judged[SHARDING, "hf"]
    scores = [(chain.place / attempt / "score_training.safetensors").read_bytes() for attempt in (again, itself)]
    assert scores[0] == scores[1]
    ran = launched(chain, "--side", "training", again)  # nothing is left to do: the other rank is let go
    assert (ran.returncode, ran.stdout) == (0, f"{again}\n"), ran.stderr


def test_another_world_than_the_plans_is_refused(chain):
    one_process = chain.attempt(None)
    ran = launched(chain, "--side", "training", one_process)
    assert ran.returncode != 0 and ran.stdout == ""
    line = next(line for line in ran.stderr.splitlines() if line.startswith("xd-score: "))
    assert "another number of ranks" in line and "found 2, expected 1" in line
    assert chain.files(one_process) == set()


def test_a_launchers_variables():
    torchrun = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "here", "MASTER_PORT": "1"}
    slurm = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0", "MASTER_ADDR": "here",
             "MASTER_PORT": "1"}  # fmt: skip
    assert launch.of(torchrun) == launch.Launch(1, 2, 1)
    assert launch.of(slurm).variables == {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    assert launch.of({}) is None and launch.of({**torchrun, "RANK": "0", "WORLD_SIZE": "1"}) is None
    for spoilt in ({"MASTER_ADDR": ""}, {"RANK": "2"}, {"WORLD_SIZE": "two"}, {"MASTER_PORT": "some"},
                   {"MASTER_PORT": "65536"}):  # fmt: skip
        with pytest.raises(XdError) as refused:
            launch.of({**torchrun, **spoilt})
        assert (refused.value.status, refused.value.code) == (Status.INVALID, "bad-variable")
