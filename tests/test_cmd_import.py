"""xd-import as its users meet it: dumps in, attempts out, through the chain; exit statuses; nothing half-written."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from comparison_fixtures import floats, scored, snapshot

from libxd.imports import formats
from libxd.rundir import Attempt
from libxd.tensors import TensorFile

ROOT = Path(__file__).resolve().parent.parent
DUMPS = ROOT / "tests" / "dumps"
NEW = ("--runs", "runs", "--experiment", "mine", "--dtype", "bfloat16")


def trainer_csv(path: Path, shift: float = 0.0) -> None:
    """What a trainer might say of the tokens that tests/dumps/vllm.json holds, a token a row."""
    (request,) = json.loads((DUMPS / "vllm.json").read_text())
    lines = ["seq,id,mask,logp"]
    for number, output in enumerate(request["outputs"]):
        lines += [f"{number},{token},0," for token in request["prompt_token_ids"]]
        for token, position in zip(output["token_ids"], output["logprobs"], strict=True):
            lines.append(f"{number},{token},1,{position[str(token)]['logprob'] + shift!r}")
    path.write_text("\n".join(lines) + "\n")


def rescored(path: Path, changed: dict[int, int] | None = None) -> None:
    """What vLLM gives for the sequences of tests/dumps/vllm.json as prompts: each token's logprob, one token behind."""
    (request,) = json.loads((DUMPS / "vllm.json").read_text())
    answers = []
    for output in request["outputs"]:
        ids = [*request["prompt_token_ids"], *output["token_ids"]]
        own = [None, *([-1.0] * (len(request["prompt_token_ids"]) - 1)),
               *(position[str(token)]["logprob"] for position, token in zip(output["logprobs"], output["token_ids"],
                                                                           strict=True))]  # fmt: skip
        ids = [(changed or {}).get(at, token) for at, token in enumerate(ids)]
        answers.append({
            "prompt_token_ids": ids,
            "prompt_logprobs": [value and {str(token): {"logprob": value}}
                                for token, value in zip(ids, own, strict=True)],
            "outputs": [{"token_ids": [2], "logprobs": None}],
        })  # fmt: skip
    path.write_text(json.dumps(answers))


MAPPED = ("--map", "sequence=seq", "--map", "token_id=id", "--map", "active=mask", "--map", "logprob=logp")


def piped(xd, *tools: tuple[object, ...]) -> subprocess.CompletedProcess[str]:
    """The tools in one pipe, as a shell starts them."""
    line = " | ".join(" ".join(f"'{word}'" for word in (ROOT / "tools" / str(tool), *words)) for tool, *words in tools)
    return subprocess.run(["bash", "-o", "pipefail", "-c", line], cwd=xd.cwd, capture_output=True, text=True)


def test_two_dumps_become_a_sealed_attempt(xd, tmp_path):
    trainer_csv(tmp_path / "t.csv", shift=0.125)
    ran = piped(
        xd, ("xd-import", "vllm", DUMPS / "vllm.json", "--side", "rollout", *NEW),
        ("xd-import", "csv", "t.csv", "--side", "training", *MAPPED), ("xd-compare",), ("xd-seal",),
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    attempt = Attempt.open(tmp_path / ran.stdout.strip())
    judged = attempt.comparison()
    assert (judged["status"], judged["counts"]["active"]) == ("INVALID_IDENTITY", 16)
    assert judged["logprob_difference"]["mean_signed"] == pytest.approx(0.125)
    assert judged["threshold"] == pytest.approx(0.06)
    assert len(re.findall("^xd-import: not known from it: what was done to the logits", ran.stderr, re.M)) == 2
    with TensorFile(attempt.file("score_rollout.safetensors")) as file:
        assert np.isfinite(file.array("logprobs")[file.array("active_mask")]).all()
    assert xd("xd-seal", "--verify", ran.stdout.strip()).status == 0


def blocks() -> dict[str, str]:
    """The commands of docs/import.md, and those of the README about it."""
    page, readme = ((ROOT / name).read_text() for name in ("docs/import.md", "README.md"))
    shown = re.findall(r"^```sh\n(.*?)^```$", page, re.M | re.S)
    shown += re.findall(r"^(    xd-import (?:.*\n)+?)$", readme, re.M)
    assert len(shown) == 4
    return {f"{number}: {text.split(chr(10))[0].strip()}": text for number, text in enumerate(shown)}


@pytest.mark.parametrize("name", blocks())
def test_the_pages_commands_run(xd, tmp_path, name):
    shutil.copy(DUMPS / "vllm.json", tmp_path / "r.json")
    shutil.copy(DUMPS / "prime_rl.jsonl", tmp_path / "rank_0.jsonl")
    rescored(tmp_path / "again.json")
    trainer_csv(tmp_path / "t.csv")
    text = (tmp_path / "t.csv").read_text()
    header = "sequence,token_id,active," + ("logp" if "logprob=logp" in blocks()[name] else "logprob")
    (tmp_path / "t.csv").write_text(text.replace("seq,id,mask,logp", header))
    env = {**os.environ, "PATH": f"{ROOT / 'tools'}:{os.environ['PATH']}"}
    ran = subprocess.run(["bash", "-o", "pipefail", "-c", blocks()[name]], cwd=tmp_path, env=env, capture_output=True,
                         text=True)  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert xd("xd-seal", "--verify", ran.stdout.strip()).status == 0


def test_what_is_declared_is_judged_by(xd, tmp_path):
    ran = xd("xd-import", "-q", "prime-rl", DUMPS / "prime_rl.jsonl", "--side", "both", *NEW, "--checkpoint", "c" * 64,
             "--semantics", "temperature=0.7,top_k=5", "--name", "step 3", "--rollout-mode", "decode")  # fmt: skip
    assert (ran.status, ran.err) == (0, "")
    row = Attempt.open(tmp_path / ran.out.strip()).requested()
    assert row["scenario_id"] == "step 3" and row["identity"]["checkpoint"]["digest"] == "c" * 64
    assert row["identity"]["semantics"] == {
        "logprobs": "processed", "temperature": 0.7, "top_p": 1.0, "top_k": 5,
        "penalties": {"repetition": 1.0, "presence": 0.0, "frequency": 0.0},
    }  # fmt: skip
    assert xd("xd-compare", ran.out.strip()).status == 0
    # a null among active tokens is no score: the verdict says so, and 0 it is not
    assert Attempt.open(tmp_path / ran.out.strip()).comparison()["status"] == "INVALID_ARTIFACT"


def test_each_side_may_have_a_dtype_of_its_own(xd, tmp_path):
    new = (*NEW[:4], "--dtype", "rollout=bf16", "--dtype", "training=float32")
    ran = xd("xd-import", "slime", DUMPS / "slime.jsonl", "--side", "both", *new)
    values = Attempt.open(tmp_path / ran.out.strip()).requested()["values"]
    assert (values["rollout.dtype"], values["training.compute_dtype"]) == ("bfloat16", "float32")


def test_the_other_side_may_be_added_by_option_and_again(xd, tmp_path):
    first = xd("xd-import", "trl", DUMPS / "trl.jsonl", "--side", "rollout", *NEW)
    attempt = Attempt.open(tmp_path / first.out.strip())
    added = xd("xd-import", "trl", DUMPS / "trl.jsonl", "--side", "training", "--into", first.out.strip())
    assert (added.status, added.out) == (0, first.out)
    before = snapshot(attempt)
    assert xd("xd-import", "trl", DUMPS / "trl.jsonl", "--side", "training", "--into", first.out.strip()).status == 0
    assert snapshot(attempt) == before
    other = tmp_path / "other.jsonl"
    other.write_text((DUMPS / "trl.jsonl").read_text().replace("-2.25", "-2.5"))
    again = xd("xd-import", "trl", other, "--side", "training", "--into", first.out.strip())
    assert (again.status, again.out) == (73, "") and snapshot(attempt) == before


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [("[8,9,10]", "[8,9,99]", "another token .*sequence 0, position 5"),
     ('"tool_mask":[1,0,1,1]', '"tool_mask":[1,1,1,1]', "another mask .*sequence 1, position 2")],
)  # fmt: skip
def test_other_tokens_are_refused_and_the_first_is_named(xd, tmp_path, old, new, words):
    first = xd("xd-import", "trl", DUMPS / "trl.jsonl", "--side", "rollout", *NEW)
    attempt = Attempt.open(tmp_path / first.out.strip())
    before = snapshot(attempt)
    text = (DUMPS / "trl.jsonl").read_text()
    assert old in text
    (tmp_path / "other.jsonl").write_text(text.replace(old, new))
    ran = xd("xd-import", "trl", "other.jsonl", "--side", "training", stdin=first.out)
    assert (ran.status, ran.out) == (65, "") and re.search(words, ran.err), ran.err
    assert len(ran.err.splitlines()) == 1 and snapshot(attempt) == before


def test_a_rescoring_by_prompts_takes_the_mask_of_the_other_side(xd, tmp_path):
    rescored(tmp_path / "again.json")
    words = ("vllm", "again.json", "--side", "training", "--of-prompts")
    first = xd("xd-import", "vllm", DUMPS / "vllm.json", "--side", "rollout", *NEW)
    ran = xd("xd-import", *words, stdin=first.out)
    assert (ran.status, ran.out) == (0, first.out), ran.err
    assert xd("xd-compare", ran.out.strip()).status == 0
    judged = Attempt.open(tmp_path / ran.out.strip()).comparison()
    assert (judged["counts"]["active"], judged["counts"]["bitwise_equal"]) == (16, 16)
    alone = xd("xd-import", *words, *NEW)
    assert (alone.status, alone.out) == (65, "") and "does not say which tokens count" in alone.err
    rescored(tmp_path / "again.json", {60: 3})
    other = xd("xd-import", *words, stdin=xd("xd-import", "vllm", DUMPS / "vllm.json", "--side", "rollout", *NEW).out)
    assert other.status == 65 and "another token" in other.err


def test_a_table_without_a_mask_takes_it_too(xd, tmp_path):
    trainer_csv(tmp_path / "t.csv")
    text = re.sub(r"^(\w+,\w+),\w+,", r"\1,", (tmp_path / "t.csv").read_text(), flags=re.M)
    assert text.startswith("seq,id,logp")
    (tmp_path / "t.csv").write_text(text)
    mapped = [word for word in MAPPED if word not in ("active=mask",)]
    mapped.pop(mapped.index("token_id=id") + 1)
    first = xd("xd-import", "vllm", DUMPS / "vllm.json", "--side", "rollout", *NEW)
    ran = xd("xd-import", "csv", "t.csv", "--side", "training", *mapped, stdin=first.out)
    assert ran.status == 0, ran.err
    with TensorFile(Attempt.open(tmp_path / ran.out.strip()).file("score_training.safetensors")) as file:
        assert int(file.array("active_mask").sum()) == 16


def test_a_bad_dump_writes_nothing(xd, tmp_path):
    text = (DUMPS / "trl.jsonl").read_text()
    (tmp_path / "bad.jsonl").write_text(text + text.splitlines()[0][:99])
    ran = xd("xd-import", "trl", "bad.jsonl", "--side", "both", *NEW)
    assert (ran.status, ran.out) == (65, "")
    assert ran.err.startswith("xd-import: bad.jsonl:3: cut off") and len(ran.err.splitlines()) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.jsonl"]
    one = xd("xd-import", "trl", DUMPS / "trl.jsonl", "bad.jsonl", "--side", "both", *NEW)
    assert one.status == 65 and not (tmp_path / "runs").exists()


def test_help_and_page_name_every_format(xd):
    ran, page = xd("xd-import", "--help"), (ROOT / "docs" / "import.md").read_text()
    for name in formats.NAMES:
        assert re.search(rf"\b{name}\b", " ".join(ran.out.split())) and f"`{name}`" in page
    assert xd("xd-import", "another", "x", "--side", "both").status == 2


def test_a_message_is_an_object_with_log_json(xd):
    ran = xd("xd-import", "--log-json", "trl", DUMPS / "openai_chat.json", "--side", "rollout", *NEW)
    (record,) = map(json.loads, ran.err.splitlines())
    assert (ran.status, record["code"], record["where"]) == (65, "missing-field", f"{DUMPS / 'openai_chat.json'}:1")


@pytest.mark.parametrize(
    "words",
    [("--runs", "runs"), ("--experiment", "mine"), (*NEW, "--into", "x"), ("--into", "x", "--dtype", "float32"),
     ("--into", "x", "--semantics", "raw"), (*NEW, "--map", "logprob=x"), NEW[:4],
     (*NEW, "--dtype", "float32"), (*NEW[:5], "middle=float32"), (*NEW[:5], "float8"),
     (*NEW, "--semantics", "warm"), (*NEW, "--semantics", "temperature=x"), (*NEW, "--semantics", "top_k=1.5"),
     (*NEW, "--semantics", "temperature=1,temperature=2"), (*NEW, "--semantics", "temperature=0"),
     (*NEW, "--semantics", "top_p=1.5"), (*NEW, "--semantics", "top_k=-1"), (*NEW, "--semantics", "repetition=0"),
     (*NEW, "--contract", "x"), (*NEW[:3], "../x", *NEW[4:])],
)  # fmt: skip
def test_mistakes_of_usage(xd, tmp_path, words):
    ran = xd("xd-import", "trl", DUMPS / "trl.jsonl", "--side", "both", *words)
    assert (ran.status, ran.out) == (2, ""), ran.err
    assert len(ran.err.splitlines()) == 1 and not (tmp_path / "runs").exists()
    if words[: len(NEW)] == NEW or "../x" in words:
        assert (words[len(NEW)] if len(words) > len(NEW) else "--experiment ../x") in ran.err


def test_an_attempt_that_was_scored_or_is_sealed_takes_no_import(xd, tmp_path):
    attempt = scored(tmp_path, floats(-1, -2), floats(-1, -2))
    ran = xd("xd-import", "trl", DUMPS / "trl.jsonl", "--side", "rollout", "--into", attempt.path)
    assert (ran.status, "is no imported attempt" in ran.err) == (65, True)
    nowhere = tmp_path / attempt.case_id / "a0009"
    assert xd("xd-import", "trl", DUMPS / "trl.jsonl", "--side", "rollout", "--into", nowhere).status == 66


def test_no_attempt_on_stdin_is_nothing_to_do_and_two_are_one_too_many(xd):
    none = xd("xd-import", "trl", DUMPS / "trl.jsonl", "--side", "rollout", stdin="\n")
    assert (none.status, none.out) == (0, "") and "nothing imported" in none.err
    two = xd("xd-import", "trl", DUMPS / "trl.jsonl", "--side", "rollout", stdin="a\nb\n")
    assert (two.status, two.out) == (2, "")


def test_it_starts_and_reads_json_without_torch(xd, tmp_path):
    """A torch that cannot be imported stands before the real one on the path."""
    (tmp_path / "torch.py").write_text("raise RuntimeError('imported')\n")
    env = {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    ran = xd("xd-import", "slime", DUMPS / "slime.jsonl", "--side", "both", *NEW, env=env)
    assert ran.status == 0, ran.err
    shutil.copy(DUMPS / "slime.jsonl", tmp_path / "slime.pt")
    control = xd("xd-import", "slime", "slime.pt", "--side", "both", *NEW, env=env)
    assert control.status == 70, "the control: a tensor file needs it"
