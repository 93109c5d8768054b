"""Runtime server through the tools, against a small server of the tests."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import server_fixtures
from hf_fixtures import frozen, save_model
from server_fixtures import INFO, serving

from libxd import sequences

FROZEN = frozen()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """(A checkpoint directory, its own model as a server's: teacher-forced in float32.)"""
    import torch
    import transformers

    directory = tmp_path_factory.mktemp("tiny") / "model"
    save_model(directory)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    def logprobs(ids):
        with torch.inference_mode():
            found = torch.log_softmax(model(torch.tensor([ids])).logits[0, :-1], -1)
        return found.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()

    return directory, logprobs


@pytest.fixture
def planned(tiny, tmp_path, xd):
    """The row of a tiny experiment, not strict, planned into `tmp_path`."""
    sequences.write(tmp_path / "held.safetensors", FROZEN)
    value = json.loads((Path(__file__).parent.parent / "experiments" / "smollm2-server.json").read_text())
    identity = value["identity"]
    identity["checkpoint"]["path"], identity["sequences"]["path"] = str(tiny[0]), "held.safetensors"
    identity["tokenizer"] = {"id": "tiny", "policy": "token_ids", "path": None, "digest": None}
    identity["model"] = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": server_fixtures.VOCABULARY}
    value["baseline"]["rollout"]["dtype"] = value["baseline"]["training"]["compute_dtype"] = "float32"
    value |= {"experiment_id": "tiny", "interventions": []}
    (tmp_path / "tiny.json").write_text(json.dumps(value))
    done = xd("xd-plan", "tiny.json")
    assert done.status == 0, done.err
    return done.out


POLICY = ("--runs", "runs", "--runtime-rollout", "server", "--runtime-training", "hf")


def test_the_chain_scores_and_says_what_was_not_shown(planned, tiny, xd, tmp_path):
    with serving(tiny[1]) as server:
        server.names = ["/home/someone/models/tiny"]
        env = {"XD_SERVER_URL": server.url}
        made = xd("xd-materialize", *POLICY, stdin=planned, env=env)
        rollout = xd("xd-score", "--side", "rollout", stdin=made.out, env=env)
        assert (made.status, rollout.status) == (0, 0), made.err + rollout.err
    # a server that is gone meanwhile is no matter of the training side
    training = xd("xd-score", "--side", "training", stdin=rollout.out, env=env)
    sealed = xd("xd-seal", stdin=xd("xd-compare", stdin=training.out).out)
    assert sealed.status == 0, training.err + sealed.err
    attempt = tmp_path / made.out.strip()
    comparison = json.loads((attempt / "comparison.json").read_text())
    assert (comparison["status"], comparison["violations"]) == ("PASS", [])
    assert comparison["counts"]["active"] == int(FROZEN.active_mask.sum())
    readback = json.loads((attempt / "readback_rollout.json").read_text())
    planned_operator = json.loads((attempt / "materialized.json").read_text())["sides"]["rollout"]["operator"]
    for operator, unknown in ((planned_operator, ("version", "build", "inputs")),
                              (readback["operator"], ("version", "build", "instance"))):  # fmt: skip
        assert operator["backend"] == "native" and [operator[name] for name in unknown] == [None] * 3
    assert readback["operator"]["logprobs"] == comparison["counts"]["active"]
    assert readback["observed"]["token_ids"] and readback["observed"]["weights_before"] is None
    assert [knob["knob"] for knob in readback["knobs"] if knob["status"] == "unobservable"] == ["logp.backend"]
    table = " ".join(xd("xd-compare", "--table", stdin=sealed.out).out.split())
    assert "rollout: as declared, for it was not shown:" in table and "weights_before" in table
    written = b"".join(path.read_bytes() for path in attempt.iterdir())
    assert b"someone" not in written and server.url.rpartition("/")[2].encode() not in written


def test_other_numbers_are_a_mismatch(planned, xd, tmp_path):
    """The control of the test above: any other model behind the server shows."""
    with serving() as server:
        env = {"XD_SERVER_URL": server.url}
        made = xd("xd-materialize", *POLICY, stdin=planned, env=env)
        training = xd("xd-score", "--side", "training",
                      stdin=xd("xd-score", "--side", "rollout", stdin=made.out, env=env).out, env=env)  # fmt: skip
    assert xd("xd-compare", stdin=training.out).status == 0
    comparison = json.loads((tmp_path / made.out.strip() / "comparison.json").read_text())
    assert comparison["status"] == "MISMATCH" and comparison["violations"] == []


def test_strict_refuses_all_that_the_server_does_not_show(planned, xd):
    with serving() as server:
        shown = xd("xd-materialize", *POLICY, "--strict", stdin=planned, env={"XD_SERVER_URL": server.url})
        server.info = server.metrics = None
        hidden = xd("xd-materialize", *POLICY, "--strict", stdin=planned, env={"XD_SERVER_URL": server.url})
    assert (shown.status, shown.out, hidden.status, hidden.out) == (69, "", 69, "")
    assert shown.err.count("strict mode refuses what cannot be observed") == 1 and "logp.backend" in shown.err
    assert hidden.err.count("strict mode refuses what cannot be observed") == 6
    for knob in ("dtype", "tensor_parallel_size", "context_parallel_size", "enable_prefix_caching", "enforce_eager"):
        assert f"rollout.{knob}: a setting of the running server, which does not show it" in hidden.err


@pytest.mark.parametrize(
    ("fault", "status", "words"),
    [("dies", 75, "broke off"), ("status-400", 69, "HTTP status 400"), ("other-id", 70, "was fed other ids")],
)
def test_a_server_that_fails_half_way_leaves_no_scores(planned, xd, tmp_path, fault, status, words):
    with serving() as server:
        env = {"XD_SERVER_URL": server.url}
        made = xd("xd-materialize", *POLICY, stdin=planned, env=env)
        server.fault = fault
        failed = xd("xd-score", "--side", "rollout", stdin=made.out, env=env)
        attempt = tmp_path / made.out.strip()
        left = {path.name for path in attempt.iterdir()} - {"requested.json", "identity.json", "materialized.json"}
        assert (failed.status, failed.out) == (status, "") and words in failed.err
        # a refusal is recorded, as of every engine that finds out what it cannot do; of a failure nothing is written
        assert left == ({"readback_rollout.json"} if status == 69 else set())
        server.fault = ""
        again = xd("xd-score", "--side", "rollout", stdin=made.out, env=env)
        assert (again.status, again.out) == ((69, "") if status == 69 else (0, made.out)), again.err


def test_a_server_that_is_gone_is_75_in_one_line(planned, xd, tmp_path):
    with serving() as server:
        env = {"XD_SERVER_URL": server.url}
        made = xd("xd-materialize", *POLICY, stdin=planned, env=env)
    for gone in (xd("xd-score", "--side", "rollout", stdin=made.out, env=env),
                 xd("xd-materialize", *POLICY, stdin=planned, env=env),
                 xd("xd-resume", *POLICY, stdin=planned, env=env)):  # fmt: skip
        assert (gone.status, gone.out) == (75, "") and len(gone.err.splitlines()) == 1
        assert "$XD_SERVER_URL: no server answers there: Connection refused" in gone.err
    assert len(list((tmp_path / "runs" / "tiny" / "cases").glob("*/*"))) == 1
    assert not list((tmp_path / "runs").rglob("*_rollout*"))


def test_a_server_that_was_restarted_otherwise_is_not_the_materialised_one(planned, xd):
    with serving() as server:
        env = {"XD_SERVER_URL": server.url}
        made = xd("xd-materialize", *POLICY, stdin=planned, env=env)
        server.info = copy.deepcopy(INFO)
        server.info["vllm_config"]["cache_config"]["block_size"] = 32
        failed = xd("xd-score", "--side", "rollout", stdin=made.out, env=env)
    assert (failed.status, failed.out) == (69, "")
    assert "/sides/rollout/environment/servers/server/config/block_size" in failed.err
