"""xd-rollout: draws that depend on nothing but the seed and the place, and what is refused leaves no file."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import tolerances

from libxd import canon, prompts, sampling, schema, sequences
from libxd.errors import XdError

HERE = Path(__file__).resolve().parent
EOS = 0

#: uniform(seed, prompt id, sample, step) of a few keys: they may never change, or frozen sequences could not be remade
PINNED = {
    (0, "a", 0, 0): 0.02807426372108668,
    (1, "a", 0, 0): 0.38603253476713995,
    (0, "b", 0, 0): 0.9046403501957542,
    (0, "a", 1, 0): 0.06270198442321917,
    (0, "a", 0, 1): 0.7775557783751154,
}


class ToyGenerator:
    """Logits float32 [B, V] that are a function of a row's ids alone; text is ids separated by spaces."""

    vocab_size, max_positions, eos_ids = 11, 40, frozenset([EOS])

    def __init__(self, model: str, dtype: str, device: str = "cpu") -> None:
        if device != "cpu":
            raise XdError("no such device", status=69, code="no-device", where=device)
        if model == "absent":
            raise XdError("no such model", status=66, code="missing", where=model)
        self._model = model
        self._rows: list[list[int]] = []

    def encode(self, prompt):
        return [int(word) for word in prompt["text"].split()]

    def prefill(self, prompts):
        self._rows = [list(ids) for ids in prompts]
        return self._logits()

    def step(self, ids):
        self._rows = [[*row, token] for row, token in zip(self._rows, ids, strict=True)]
        return self._logits()

    def _logits(self):
        logits = np.stack([np.random.default_rng(row).standard_normal(self.vocab_size) for row in self._rows])
        if self._model == "broken":
            logits[0, 3] = np.nan
        return logits.astype(np.float32)

    def describe(self):
        return {
            "model": {"digest": canon.digest(self._model), "synthetic": None},
            "tokenizer": {"policy": "token_ids", "digest": None},
            "engine": {},
        }

    def close(self):
        self._rows = []


class ToyRuntime:
    name = "toy"
    generator = staticmethod(ToyGenerator)


class MuteRuntime:
    name = "mute"


ROWS = [{"id": f"p{n}", "text": " ".join(str(2 + (n * k) % 7) for k in range(1, 2 + n))} for n in range(5)]


@pytest.fixture
def rollout(xd, tmp_path):
    """`rollout(rows, *options)`: xd-rollout over a file of rows with the toy runtime, into out.safetensors."""
    metadata = tmp_path / "site" / "xd_toy-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: xd-toy\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[xd.runtimes]\ntoy = test_cmd_rollout:ToyRuntime\nmute = test_cmd_rollout:MuteRuntime\n"
    )
    place = {"PYTHONPATH": f"{metadata.parent}{os.pathsep}{HERE}"}

    def call(rows, *options, out="out.safetensors", model="toy-1", runtime="toy"):
        text = rows if isinstance(rows, str) else "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / "prompts.jsonl").write_text(text)
        return xd("xd-rollout", "prompts.jsonl", "--runtime", runtime, "--model", model, "--out", out, *options,
                  env=place)  # fmt: skip

    return call


def test_it_prints_the_path_of_valid_sequences_and_says_how_they_came_about(rollout, tmp_path):
    ran = rollout(ROWS, "--samples", 3, "--max-new-tokens", 6, "--top-p", 0.9, "--temperature", 0.8, "--seed", 5)
    assert (ran.status, ran.out) == (0, "out.safetensors\n")
    assert ran.err.count("\n") == 1 and "15 sequences" in ran.err  # no bar where there is no terminal
    frozen = sequences.read(tmp_path / "out.safetensors")
    assert frozen.prompt_index.tolist() == [n for n in range(5) for _ in range(3)]
    assert frozen.metadata["sampling"] == {
        "samples": 3, "max_new_tokens": 6, "temperature": 0.8, "top_p": 0.9, "seed": 5, "batch_size": 8,
        "dtype": "bfloat16", "draws": "blake3-53",
    }  # fmt: skip
    assert frozen.metadata["prompts"]["ids"] == [row["id"] for row in ROWS]
    assert frozen.metadata["semantics"]["logprobs"] == "raw"
    generator = ToyGenerator("toy-1", "float32")
    for n in range(frozen.num_sequences):
        ids = frozen.token_ids[frozen.span(n)].tolist()
        length = int(frozen.prompt_lens[n])
        assert ids[:length] == generator.encode(ROWS[frozen.prompt_index[n]])
        response = ids[length:]
        assert frozen.active_mask[frozen.span(n)].tolist() == [False] * length + [True] * len(response)
        assert frozen.positions[frozen.span(n)].tolist() == list(range(len(ids)))
        assert EOS not in response[:-1]
        assert response[-1] == EOS or len(response) == 6
        for k, token in enumerate(response):
            (logits,) = generator.prefill([ids[: length + k]]).astype(np.float64)
            wanted = logits[token] - np.log(np.exp(logits).sum())
            assert abs(frozen.logprobs[frozen.span(n)][length + k] - wanted) < tolerances.LOGPROB_FLOAT32_NATS
    ends = [ids[-1] == EOS for n in range(15) if (ids := frozen.token_ids[frozen.span(n)]) is not None]
    assert any(ends) and not all(ends)


@pytest.mark.parametrize(("out", "status"), [("there", 73), ("", 2), ("a\nb", 2)])
def test_a_place_that_is_none_is_refused_before_anything_is_sampled(rollout, tmp_path, out, status):
    (tmp_path / "there").mkdir()
    ran = rollout(ROWS, "--max-new-tokens", 2, out=out, model="no such model")
    assert (ran.status, ran.out, len(ran.err.splitlines())) == (status, "", 1)


def test_a_rerun_is_the_same_file_and_another_seed_is_refused(rollout, tmp_path):
    assert rollout(ROWS, "--max-new-tokens", 9).status == 0
    before = (tmp_path / "out.safetensors").read_bytes()
    again = rollout(ROWS, "--max-new-tokens", 9)
    assert (again.status, again.out) == (0, "out.safetensors\n")
    other = rollout(ROWS, "--max-new-tokens", 9, "--seed", 1)
    assert (other.status, other.out, other.err.count("\n")) == (73, "", 1)
    assert (tmp_path / "out.safetensors").read_bytes() == before


def responses(rows, batch_size=8, seed=0, samples=2):
    chosen = sampling.Sampling(samples, 8, 1.0, 1.0, seed, batch_size, "float32")
    parsed = prompts.parse(((str(n), json.dumps(row)) for n, row in enumerate(rows)), "rows")
    done = sampling.sample(ToyGenerator("toy-1", "float32"), parsed, chosen, lambda _: None)
    return {(r.prompt_id, r.sample): r.ids for r in done}


def test_draws_do_not_depend_on_the_batch_or_on_other_prompts():
    wanted = responses(ROWS)
    assert len({tuple(ids) for ids in wanted.values()}) > 5
    assert responses(ROWS, batch_size=3) == wanted
    assert responses(ROWS[::-1], batch_size=4) == wanted
    assert responses(ROWS[2:3]).items() <= wanted.items()
    assert responses(ROWS, samples=4).items() >= wanted.items()
    assert responses(ROWS, seed=1) != wanted


def test_each_response_is_told_of_once():
    chosen, told = sampling.Sampling(2, 8, 1.0, 1.0, 0, 4, "float32"), []
    parsed = prompts.parse(((str(n), json.dumps(row)) for n, row in enumerate(ROWS)), "rows")
    done = sampling.sample(ToyGenerator("toy-1", "float32"), parsed, chosen, told.append)
    assert sorted(map(id, told)) == sorted(map(id, done))


def test_the_uniform_numbers_are_pinned():
    assert {key: sampling.uniform(*key) for key in PINNED} == PINNED
    numbers = [sampling.uniform(0, "a", 0, step) for step in range(4000)]
    assert min(numbers) >= 0 and max(numbers) < 1
    counts = np.histogram(numbers, 10, (0, 1))[0]
    assert (np.abs(counts - 400) < 5 * np.sqrt(400 * 0.9)).all()


def test_a_draw_inverts_the_cumulative_distribution():
    logits = np.log(np.array([0.1, 0.2, 0.3, 0.4], np.float32))
    for number, wanted in ((0.0, 0), (0.0999, 0), (0.1001, 1), (0.2999, 1), (0.3001, 2), (0.6001, 3), (1 - 2**-53, 3)):
        assert sampling.draw(logits, 1.0, 1.0, number) == wanted
    assert sampling.draw(logits, 0.01, 1.0, 0.001) == 3  # nearly greedy
    assert sampling.draw(logits, 100.0, 1.0, 0.26) == 1  # nearly uniform
    assert sampling.draw(np.float32([0.0, -1e30, -1e30]), 1.0, 1.0, 1 - 2**-53) == 0  # never an id without mass


def test_top_p_keeps_the_smallest_set_that_reaches_it():
    logits = np.log(np.array([0.1, 0.2, 0.3, 0.4], np.float32))

    def kept(top_p):
        return {sampling.draw(logits, 1.0, top_p, number) for number in np.linspace(0, 1 - 2**-53, 200)}

    assert kept(1e-9) == kept(0.39) == {3}
    assert kept(0.41) == kept(0.69) == {2, 3}
    assert kept(0.71) == kept(0.89) == {1, 2, 3}
    assert kept(0.91) == kept(1.0) == {0, 1, 2, 3}
    ties = np.zeros(4, np.float32)
    assert {sampling.draw(ties, 1.0, 0.5, number) for number in np.linspace(0, 0.999, 50)} == {0, 1}


@pytest.mark.parametrize(
    ("rows", "status", "says"),
    [
        ("", 65, "no prompt"),
        ("\n \n", 65, "no prompt"),
        ("{", 65, "prompts.jsonl:1"),
        ('{"id":"a","text":"1","text":"2"}', 65, "stands twice"),
        ([{"id": "a", "text": "1", "weight": 2}], 65, "weight"),
        ([{"id": "a", "text": "1"}, {"id": "b", "text": "2"}, {"id": "a", "text": "3"}], 65, "prompts.jsonl:3"),
        ([{"id": "a"}], 65, "either messages or text"),
        ([{"id": "a", "text": "1", "messages": []}], 65, "either messages or text"),
        ([{"id": "a", "text": "1"}, {"id": "b", "messages": [{"role": "user", "content": "1"}]}], 65, "in one input"),
        ([{"id": 3, "text": "1"}], 65, "#/id"),
        ([{"id": "a", "text": " "}], 65, "no token"),
        ([{"id": "a", "text": "1 " * 30}], 65, "do not fit"),
        ("[1]", 65, "prompts.jsonl:1"),
    ],
)
def test_bad_prompts_are_one_line_and_no_file(rollout, tmp_path, rows, status, says):
    ran = rollout(rows, "--max-new-tokens", 12)
    assert (ran.status, ran.out) == (status, "")
    assert ran.err.count("\n") == 1 and says in ran.err
    assert [path.name for path in tmp_path.iterdir() if "safetensors" in path.name] == []


@pytest.mark.parametrize(
    ("options", "status"),
    [
        (("--temperature", "0"), 2),
        (("--temperature", "-1"), 2),
        (("--temperature", "nan"), 2),
        (("--temperature", "inf"), 2),
        (("--top-p", "0"), 2),
        (("--top-p", "1.01"), 2),
        (("--top-p", "nan"), 2),
        (("--samples", "0"), 2),
        (("--max-new-tokens", "0"), 2),
        (("--batch-size", "0"), 2),
        (("--seed", "-1"), 2),
        (("--seed", str(2**53)), 2),
        (("--limit", "0"), 2),
        (("--dtype", "int8"), 2),
        (("--model", "absent"), 66),
        (("--device", "cuda"), 69),
        (("--model", "broken"), 65),
        (("--runtime", "no-such"), 2),
        (("--runtime", "mute"), 69),
        (("--out", "no/such/place"), 73),
    ],
)
def test_bad_options_are_one_line_and_no_file(rollout, tmp_path, options, status):
    ran = rollout(ROWS, "--max-new-tokens", 3, *options)
    assert (ran.status, ran.out, ran.err.count("\n")) == (status, "", 1), ran.err
    assert [path.name for path in tmp_path.iterdir() if "safetensors" in path.name] == []


def test_every_flaw_of_the_prompts_is_said_at_once(rollout):
    ran = rollout([{"id": "a"}, {"id": "b", "text": "1"}, {"id": "b", "text": "2"}])
    assert (ran.status, ran.err.count("\n")) == (65, 2)


def test_missing_prompts_file_is_66(xd):
    ran = xd("xd-rollout", "absent.jsonl", "--runtime", "hf", "--model", "m", "--out", "o")
    assert (ran.status, ran.out, ran.err.count("\n")) == (66, "", 1)


def test_shipped_prompts_are_valid_and_differ_in_length(root):
    for name, least in (("mix", 16), ("short", 4)):
        path = root / "experiments" / "prompts" / f"{name}.jsonl"
        found = prompts.parse(prompts.rows(path.read_bytes(), name), name)
        assert len(found) >= least
        assert len({len(canon.dumps(prompt.content)) for prompt in found}) > len(found) // 2


def test_the_real_model_samples_and_its_logprobs_are_those_of_one_pass(xd, root, tmp_path):
    model = root / "models" / "smollm2-135m-instruct"
    if not model.exists():
        pytest.skip("no model: run `make model`")
    torch = pytest.importorskip("torch")
    arguments = ("xd-rollout", root / "experiments" / "prompts" / "short.jsonl", "--model", model, "--dtype", "float32",
                 "--limit", 3, "--max-new-tokens", 6)  # fmt: skip
    ran = xd(*arguments, "--batch-size", 3, "--out", "three")
    assert ran.status == 0 and ran.err.count("\n") == 1, ran.err
    assert xd(*arguments, "--batch-size", 1, "--out", "one").status == 0
    three, one = sequences.read(tmp_path / "three"), sequences.read(tmp_path / "one")
    assert three.token_ids.tolist() == one.token_ids.tolist()
    assert len(set(three.prompt_lens.tolist())) > 1  # so that the batch was padded
    schema.validate("sequences_metadata", three.metadata, "three")

    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    for n in range(three.num_sequences):
        ids = torch.tensor(three.token_ids[three.span(n)].astype(np.int64))
        with torch.no_grad():
            logprobs = loaded(ids[None]).logits[0].double().log_softmax(-1)
        one_pass = logprobs[:-1].gather(1, ids[1:, None])[:, 0].numpy()
        active = three.active_mask[three.span(n)][1:]
        seen = three.logprobs[three.span(n)][1:]
        assert np.abs(one_pass - seen)[active].max() < tolerances.DECODE_AGAINST_ONE_PASS_FLOAT32_NATS
        shifted = logprobs[:-1].gather(1, (ids[1:, None] + 1) % logprobs.shape[1])[:, 0].numpy()
        assert np.abs(shifted - seen)[active].min() > tolerances.DECODE_AGAINST_ONE_PASS_FLOAT32_NATS


def test_a_prompt_on_stdin_may_be_long_and_is_named_by_its_physical_line(rollout, xd, tmp_path):
    """As in a file: blank lines count, and a prompt is no path, that would end at 4096 bytes."""
    long = json.dumps({"id": "long", "text": " ".join(["3"] * 20) + " " * 6000})
    assert rollout(long + "\n", "--max-new-tokens", 2).status == 0
    rows = f"\n{long}\n \n\nnonsense\n"
    from_file = rollout(rows).err
    place = {"PYTHONPATH": f"{tmp_path / 'site'}{os.pathsep}{HERE}"}
    words = ("--runtime", "toy", "--model", "toy-1", "--max-new-tokens", "2", "--out")
    from_stdin = xd("xd-rollout", *words, "other.safetensors", stdin=rows, env=place)
    assert from_file.startswith("xd-rollout: prompts.jsonl:5: ")
    assert (from_stdin.status, from_stdin.err) == (65, from_file.replace("prompts.jsonl", "stdin"))
    good = xd("xd-rollout", "-", *words, "out.safetensors", stdin=long, env=place)
    assert (good.status, good.err.endswith("the same file was there already\n")) == (0, True)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("temperature", [5e-324, 1e-320, 1e-300])
def test_the_coldest_draw_takes_the_most_probable_without_a_warning(temperature):
    logits = np.array([-3e38, 1, 2, 3e38], np.float32)
    assert {sampling.draw(logits, temperature, p, number) for p in (1.0, 0.5) for number in (0.0, 0.999)} == {3}
