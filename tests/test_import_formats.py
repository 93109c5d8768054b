"""Each format that xd-import reads, from a dump in tests/dumps (README.md there): what records come out of it."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tolerances import DECODE_AGAINST_ONE_PASS_FLOAT32_NATS

from libxd import tensors
from libxd.errors import Status, XdError
from libxd.imports import formats
from libxd.imports.batch import Batch
from libxd.imports.formats import columns
from libxd.imports.record import Record
from libxd.imports.rows import Notes
from libxd.rundir import SIDES

DUMPS = Path(__file__).parent / "dumps"
NAN = float("nan")
#: what all hand-written dumps hold: ids, prompt, what the model wrote, and each side's logprobs of the response
FIRST = ([5, 6, 7, 8, 9, 10], 3, [0, 0, 0, 1, 1, 1], [-0.5, -1.25, -2.0], [-0.5, -1.5, -2.25])
SECOND = ([5, 11, 12, 13], 1, [0, 1, 0, 1], [-0.75, NAN, NAN], [-0.75, -6.0, -0.125])
TRAINERS = ["trl", "verl", "openrlhf", "slime", "prime-rl", "nemo-rl"]


def read(name: str, path: Path, sides: Sequence[str] = SIDES, mapping: dict[str, str] | None = None) -> list[Record]:
    return list(formats.records(formats.named(name, mapping or {}), [path], sides, Notes()))


def noted(name: str, path: Path, sides: Sequence[str] = SIDES) -> list[str]:
    notes = Notes()
    assert list(formats.records(formats.named(name, {}), [path], sides, notes))
    return notes.lines()


def dump_of(name: str) -> Path:
    return DUMPS / f"{name.replace('-', '_')}.jsonl"


def assert_is(record: Record, expected: Any, sides: Sequence[str] = SIDES, of_prompt: bool = False) -> None:
    """The record is that sequence, bit for bit; with of_prompt its prompt may be scored, too."""
    ids, prompt_len, active, *logprobs = expected
    assert record.token_ids.tolist() == ids and record.token_ids.dtype == np.int32
    assert (record.prompt_len, record.active.tolist()) == (prompt_len, [bool(each) for each in active])
    assert set(record.logprobs) == set(sides)
    for side, values in zip(SIDES, logprobs, strict=True):
        if side in sides:
            found = record.logprobs[side]
            assert found.dtype == np.float32 and found.shape == (len(ids),) and np.isnan(found[0])
            np.testing.assert_array_equal(found[prompt_len:], np.array(values, np.float32))
            assert of_prompt or np.isnan(found[:prompt_len]).all()


def test_every_format_has_a_module_and_no_other_name_is_known():
    assert [formats.named(name, {}).name for name in formats.NAMES] == list(formats.NAMES)
    with pytest.raises(KeyError):
        formats.named("another", {})


# -- trainers: both sides in one dump


@pytest.mark.parametrize("name", TRAINERS)
def test_a_trainers_dump_gives_both_sides(name):
    first, second = read(name, dump_of(name))
    whole = name in ("prime-rl", "nemo-rl")  # score the prompt, too
    assert_is(first, FIRST, of_prompt=whole)
    if name == "openrlhf":  # which multiplies by the mask, so that a tool's token has no logprob
        assert_is(second, (*SECOND[:4], [-0.75, NAN, -0.125]))
    else:
        assert_is(second, SECOND, of_prompt=whole)
    if whole:
        np.testing.assert_array_equal(first.logprobs["training"][1:3], np.array([-3.0, -0.25], np.float32))
    assert first.where.endswith(".jsonl:1") and second.where.endswith(".jsonl:2")


@pytest.mark.parametrize("name", TRAINERS)
@pytest.mark.parametrize("side", SIDES)
def test_one_side_of_it_reads_no_field_of_the_other(name, side, tmp_path):
    of_side = {"rollout": ("rollout_log_probs", "sampling_per_token_logps", "inference_logprobs",
                           "generation_logprobs"),
               "training": ("old_log_probs", "old_per_token_logps", "action_log_probs", "log_probs", "trainer_logprobs",
                            "prev_logprobs")}  # fmt: skip
    other = next(each for each in SIDES if each != side)
    rows = [json.loads(line) for line in dump_of(name).read_text().splitlines()]
    path = tmp_path / "one.jsonl"
    path.write_text("\n".join(json.dumps({k: v for k, v in row.items() if k not in of_side[other]}) for row in rows))
    assert_is(read(name, path, [side])[0], FIRST, [side], of_prompt=True)
    with pytest.raises(XdError) as caught:
        read(name, path)
    assert caught.value.code == "missing-field" and caught.value.where == f"{path}:1"


@pytest.mark.parametrize(
    ("name", "prompts", "advantages", "rewards", "versions"),
    [("trl", [None, None], [1.5, -1.5], [None, None], [None, None]),
     ("verl", ["g0", "g1"], [[1.5] * 3, [-1.5, 0.0, -1.5]], [1.0, -1.0], [7, None]),
     ("openrlhf", ["a b c", "a"], [[1.5] * 3, [-1.5, 0.0, -1.5]], [1.0, -1.0], [None, None]),
     ("slime", [0, 1], [[1.5] * 3, [-1.5, 0.0, -1.5]], [1.0, None], [7, None]),
     ("prime-rl", [None, None], [[1.5] * 3, [-1.5] * 3], [1.0, -1.0], [None, None]),
     ("nemo-rl", [None, None], [[1.5] * 3, [-1.5] * 3], [1.0, -1.0], [None, None])],
)  # fmt: skip
def test_what_stands_beside_the_logprobs_comes_along(name, prompts, advantages, rewards, versions):
    records = read(name, dump_of(name))
    assert [record.prompt for record in records] == prompts
    assert [record.reward for record in records] == rewards
    assert [record.version for record in records] == versions
    for record, expected in zip(records, advantages, strict=True):
        if isinstance(expected, list):
            np.testing.assert_array_equal(record.advantage[record.prompt_len :], np.array(expected, np.float32))
            assert len(record.advantage) == len(record.token_ids)
        else:
            assert record.advantage == expected


# -- the same as tensors


def padded(name: str) -> dict[str, np.ndarray]:
    """The dump as the tensors that a trainer holds: rows padded on the right to one length, null as NaN."""
    rows = [json.loads(line) for line in dump_of(name).read_text().splitlines()]
    if name == "trl":  # completions are padded on the right, prompts on the left: as the dump's second row is
        for field in rows[0]:
            if field.startswith(("completion", "tool", "sampling", "old")):
                rows[0][field] = [*rows[0][field], 0]
    result = {}
    for field in rows[0]:
        values = [row.get(field) for row in rows]
        if not any(isinstance(value, str | None) for value in values):
            of_ids = field.endswith(("ids", "sequences", "prompts", "responses"))
            array = np.array([[NAN if v is None else v for v in row] if isinstance(row, list) else row
                              for row in values])  # fmt: skip
            result[field] = array.astype(np.int64 if of_ids else np.float32)
    return result


@pytest.mark.parametrize("name", ["trl", "verl", "openrlhf"])
@pytest.mark.parametrize("kind", ["safetensors", "pt", "rows of pt"])
def test_tensors_give_what_the_rows_give(name, kind, tmp_path):
    arrays = padded(name)
    if kind == "safetensors":
        path = tmp_path / "batch.safetensors"
        tensors.write(path, arrays, {})
    else:
        torch = pytest.importorskip("torch")
        path = tmp_path / "batch.pt"
        values = {field: torch.from_numpy(array) for field, array in arrays.items()}
        rows = [{field: value[index] for field, value in values.items()} for index in range(2)]
        torch.save(values if kind == "pt" else rows, path)
    of_json, of_tensors = read(name, dump_of(name)), read(name, path)
    for one, other in zip(of_json, of_tensors, strict=True):
        assert other.token_ids.tolist() == one.token_ids.tolist()
        assert (other.prompt_len, other.active.tolist()) == (one.prompt_len, one.active.tolist())
        for side in SIDES:
            assert other.logprobs[side].tobytes() == one.logprobs[side].tobytes()
    assert [record.where for record in of_tensors] == [f"{path}[0]", f"{path}[1]"]


def test_bfloat16_and_float64_become_the_float32_that_they_are_or_are_near(tmp_path):
    torch = pytest.importorskip("torch")
    values = {"prompt_ids": torch.tensor([[5]]), "completion_ids": torch.tensor([[8, 9]])}
    given = torch.tensor([[-0.1, -2.0]], dtype=torch.float64)
    for path, dtype in ((tmp_path / "double.pt", torch.float64), (tmp_path / "half.pt", torch.bfloat16)):
        torch.save({**values, "old_per_token_logps": given.to(dtype)}, path)
        (record,) = read("trl", path, ["training"])
        assert record.logprobs["training"][1:].tolist() == given.to(dtype).float()[0].tolist()
    assert noted("trl", tmp_path / "double.pt", ["training"]) == [
        "1 values of old_per_token_logps are no float32 and were rounded to the nearest"
    ]
    assert noted("trl", tmp_path / "half.pt", ["training"]) == []
    file = tmp_path / "half.safetensors"
    bits = tensors.Lazy("bfloat16", (1, 2), [np.array([0xBDCD, 0xC000], np.uint16)])
    ids = {"prompt_ids": np.array([[5]]), "completion_ids": np.array([[8, 9]])}
    tensors.write(file, {**ids, "old_per_token_logps": bits}, {})
    assert read("trl", file, ["training"])[0].logprobs["training"][1:].tolist() == [-0.10009765625, -2.0]


def test_slimes_dumps_as_torch_saves_them(tmp_path):
    torch = pytest.importorskip("torch")
    rows = [json.loads(line) for line in dump_of("slime").read_text().splitlines()]
    rollout, train, columns_ = tmp_path / "rollout.pt", tmp_path / "train.pt", tmp_path / "old.pt"
    torch.save({"rollout_id": 3, "samples": rows}, rollout)
    trained = [
        {"tokens": torch.tensor(row["tokens"]), "response_lengths": 3, "total_lengths": len(row["tokens"]),
         "loss_masks": torch.tensor(row["loss_mask"] or [1, 1, 1]), "log_probs": torch.tensor(row["log_probs"]),
         "rollout_log_probs": torch.tensor([NAN if v is None else v for v in row["rollout_log_probs"]])}
        for row in rows
    ]  # fmt: skip
    torch.save({"format_version": 2, "samples": trained, "dp_shards": [{"rank": 0}]}, train)
    torch.save({"rank": 0, "rollout_data": {key: [row[key] for row in trained] for key in trained[0]}}, columns_)
    for path in (rollout, train, columns_):
        for record, expected in zip(read("slime", path), (FIRST, SECOND), strict=True):
            assert_is(record, expected)


def test_what_trls_trainer_really_had():
    """A batch of GRPOTrainer: the rollout's logprobs are near the trainer's, and a token further they are not."""
    records = read("trl", DUMPS / "trl_batch.safetensors")
    assert [(len(record.token_ids), record.prompt_len) for record in records] == [(48, 36)] * 4
    rollout, training = (np.stack([record.logprobs[side][36:] for record in records]) for side in SIDES)
    assert 0 < np.abs(training - rollout).max() < DECODE_AGAINST_ONE_PASS_FLOAT32_NATS
    assert np.abs(training[:, 1:] - rollout[:, :-1]).max() > 1, "the control"
    assert len({record.advantage for record in records}) == 4


# -- engines: one side


def test_what_vllm_really_gave():
    """Each logprob is the one of the sampled token, and their sum is what vLLM counted up."""
    dumped = json.loads((DUMPS / "vllm.json").read_text())[0]
    records = read("vllm", DUMPS / "vllm.json", ["rollout"])
    assert len(records) == len(dumped["outputs"]) == 2
    own_of_all, best_of_all = [], []
    for record, output in zip(records, dumped["outputs"], strict=True):
        prompt = dumped["prompt_token_ids"]
        assert record.token_ids.tolist() == prompt + output["token_ids"]
        assert (record.prompt_len, int(record.active.sum())) == (len(prompt), 8)
        logprobs = record.logprobs["rollout"]
        own = [position[str(token)]["logprob"] for position, token in zip(output["logprobs"], output["token_ids"],
                                                                         strict=True)]  # fmt: skip
        assert logprobs[record.active].tolist() == own
        assert sum(own) == pytest.approx(output["cumulative_logprob"])
        own_of_all += own
        best_of_all += [max(entry["logprob"] for entry in position.values()) for position in output["logprobs"]]
        assert np.isnan(logprobs[0]) and np.isfinite(logprobs[1:]).all()
        assert record.prompt == dumped["request_id"]
    assert own_of_all != best_of_all, "the control: the likeliest token is not always the one drawn"


def test_flat_logprobs_of_vllm_are_found_too():
    dumped = json.loads((DUMPS / "vllm_flat.json").read_text())[0]
    (record,) = read("vllm", DUMPS / "vllm_flat.json", ["training"])
    flat = dumped["outputs"][0]["logprobs"]
    own = [flat["logprobs"][flat["token_ids"].index(token, start)]
           for start, token in zip(flat["start_indices"], dumped["outputs"][0]["token_ids"], strict=True)]  # fmt: skip
    assert record.logprobs["training"][record.active].tolist() == own
    assert np.isfinite(record.logprobs["training"][1:]).all()


@pytest.mark.parametrize(
    ("dump", "prompt_len", "scored_prompt"),
    [("openai_chat", 31, True), ("openai_completions", 3, False), ("openai_echo", 3, True),
     ("openai_echo_ids", 3, True)],
)  # fmt: skip
def test_what_vllms_server_really_answered(dump, prompt_len, scored_prompt):
    answer = json.loads((DUMPS / f"{dump}.json").read_text())
    records = read("openai", DUMPS / f"{dump}.json", ["rollout"])
    assert len(records) == len(answer["choices"])
    for record, choice in zip(records, answer["choices"], strict=True):
        logprobs = record.logprobs["rollout"]
        if "content" in choice["logprobs"]:
            own = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        else:
            own = choice["logprobs"]["token_logprobs"][-int(record.active.sum()) :]
        assert record.prompt_len == prompt_len
        assert logprobs[record.active].tolist() == [np.float32(value) for value in own]
        assert np.isfinite(logprobs[1:prompt_len]).all() == scored_prompt
        if choice.get("token_ids"):
            assert record.token_ids[record.active].tolist() == choice["token_ids"]


def test_ids_from_the_names_of_tokens_are_those_that_are_listed_elsewhere():
    """`token_id:N` with echo, against the ids that the completions of the same prompt were listed with."""
    named = read("openai", DUMPS / "openai_echo.json", ["rollout"])[0]
    listed = read("openai", DUMPS / "openai_completions.json", ["rollout"])[0]
    assert named.token_ids.tolist() == listed.token_ids.tolist()
    other = read("openai", DUMPS / "openai_completions.json", ["rollout"])[1]
    assert other.token_ids.tolist() != listed.token_ids.tolist() and other.prompt != listed.prompt


def test_a_line_of_run_batch_and_the_floor_that_says_none():
    (record,) = read("openai", DUMPS / "openai_batch.jsonl", ["rollout"])
    assert_is(record, (*FIRST[:3], [-0.5, NAN, -2.0], []), ["rollout"])
    assert record.version == 7
    (note,) = noted("openai", DUMPS / "openai_batch.jsonl", ["rollout"])
    assert note.startswith("1 logprobs are -9999.0")


def test_vllms_generate_names_tokens_by_id():
    (record,) = read("openai", DUMPS / "openai_generate.json", ["rollout"])
    assert_is(record, FIRST, ["rollout"], of_prompt=True)
    np.testing.assert_array_equal(record.logprobs["rollout"][1:3], np.array([-3.0, -0.25], np.float32))


def test_a_response_whose_prompt_nobody_kept_is_compared_by_itself(tmp_path):
    answer = json.loads((DUMPS / "openai_generate.json").read_text())
    del answer["prompt_token_ids"], answer["prompt_logprobs"]
    path = tmp_path / "answer.json"
    path.write_text(json.dumps(answer))
    (record,) = read("openai", path, ["rollout"])
    assert (record.token_ids.tolist(), record.prompt_len) == ([8, 9, 10], None)
    assert record.logprobs["rollout"].tolist() == [-0.5, -1.25, -2.0]


def test_sglangs_answers():
    first, second = read("sglang", DUMPS / "sglang.json", ["rollout"])
    assert_is(first, FIRST, ["rollout"], of_prompt=True)
    assert first.logprobs["rollout"][1:3].tolist() == [-3.0, -0.25]
    assert_is(second, ([5, 11, 12, 13], 1, [0, 1, 1, 1], [-0.75, -4.0, NAN], []), ["rollout"])
    assert (first.version, second.version) == (7, None)


def test_sglangs_prompt_is_unknown_where_its_logprobs_begin_later(tmp_path):
    answer = json.loads((DUMPS / "sglang.json").read_text())[0]
    answer["meta_info"]["input_token_logprobs"] = answer["meta_info"]["input_token_logprobs"][2:]
    path = tmp_path / "answer.json"
    path.write_text(json.dumps(answer))
    (record,) = read("sglang", path, ["rollout"])
    assert (record.prompt_len, record.token_ids.tolist()) == (None, [8, 9, 10])
    path.write_text(json.dumps({**answer, "prompt_token_ids": [5, 6, 7]}))
    (record,) = read("sglang", path, ["rollout"])
    assert record.prompt_len == 3
    assert record.logprobs["rollout"][2] == -0.25 and np.isnan(record.logprobs["rollout"][:2]).all()


@pytest.mark.parametrize(
    ("name", "dump", "count"),
    [("vllm", "vllm.json", 1), ("vllm", "vllm_flat.json", 1), ("openai", "openai_chat.json", 1),
     ("openai", "openai_echo.json", 1), ("openai", "openai_echo_ids.json", 1), ("openai", "openai_generate.json", 1)],
)  # fmt: skip
def test_sequences_that_went_in_as_prompts_are_scored_there(name, dump, count):
    """What stands over the prompt of a plain reading, and nothing behind it."""
    plain = read(name, DUMPS / dump, ["training"])[0]
    of = formats.named(name, {}, of_prompts=True)
    records = list(formats.records(of, [DUMPS / dump], ["training"], Notes()))
    assert len(records) == count
    prompt = slice(0, plain.prompt_len)
    assert records[0].token_ids.tolist() == plain.token_ids[prompt].tolist()
    assert records[0].logprobs["training"].tobytes() == plain.logprobs["training"][prompt].tobytes()
    assert np.isfinite(records[0].logprobs["training"][1:]).all()
    assert (records[0].active, records[0].prompt_len) == (None, None)


def test_prompts_that_were_not_scored_are_not_taken_for_scored():
    for name, dump in (("openai", "openai_completions.json"), ("sglang", "sglang.json"), ("trl", "trl.jsonl")):
        with pytest.raises(XdError):
            of = formats.named(name, {}, of_prompts=True)
            records = formats.records(of, [DUMPS / dump], ["training"], Notes())
            assert next(records).logprobs["training"][1:].tolist() == [-3.0, -0.25], "sglang's first answer has them"
            next(records)


def test_one_sides_dump_is_not_both():
    with pytest.raises(XdError) as caught:
        read("vllm", DUMPS / "vllm.json")
    assert caught.value.status == Status.USAGE


# -- tables


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet of tokens", "parquet of sequences"])
def test_tables_give_both_sides(kind, tmp_path):
    name, path, mapping = kind.partition(" ")[0], DUMPS / "tokens.csv", {"version": "step"}
    if name == "jsonl":
        path, mapping = DUMPS / "sequences.jsonl", {}
    elif name == "parquet":
        path, mapping = parquet_of(kind, tmp_path), mapping if "tokens" in kind else {}
    first, second = read(name, path, mapping=mapping)
    assert_is(first, FIRST, of_prompt=True)
    assert first.logprobs["training"][1:3].tolist() == [-3.0, -0.25]
    assert_is(second, SECOND)
    assert [record.reward for record in (first, second)] == [1.0, -1.0]
    assert [record.version for record in (first, second)] == [7, 7]


def parquet_of(kind: str, folder: Path) -> Path:
    pytest.importorskip("pyarrow")
    from pyarrow import Table, csv, parquet

    path = folder / "table.parquet"
    if "tokens" in kind:
        parquet.write_table(csv.read_csv(DUMPS / "tokens.csv"), path)
    else:
        rows = [json.loads(line) for line in (DUMPS / "sequences.jsonl").read_text().splitlines()]
        rows[0]["active"] = FIRST[2]  # a column has all of its cells
        parquet.write_table(Table.from_pylist(rows), path)
    return path


def test_columns_of_other_names_are_mapped(tmp_path):
    text = (DUMPS / "tokens.csv").read_text().replace("sequence,position,token_id", "seq,pos,id")
    text = text.replace("rollout_logprob", "lp")
    path = tmp_path / "t.csv"
    path.write_text(text)
    mapping = columns.mapping(["sequence=seq", "position=pos", "token_id=id", "logprob=lp"])
    assert_is(read("csv", path, ["rollout"], mapping)[0], FIRST, ["rollout"])
    with pytest.raises(XdError, match="has no sequence"):
        read("csv", path, ["rollout"], {})


def test_a_table_without_a_mask_leaves_that_open(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("sequence,token_id,logprob\na,5,\na,8,-0.5\na,9,-1.25\nb,6,\nb,7,-1\n")
    records = read("csv", path, ["training"])
    assert [record.token_ids.tolist() for record in records] == [[5, 8, 9], [6, 7]]
    assert [(record.active, record.prompt_len) for record in records] == [(None, None)] * 2


@pytest.mark.parametrize("pair", ["logprob", "logprob=", "another=x", "=x"])
def test_a_mapping_of_another_form_is_a_mistake_of_usage(pair):
    with pytest.raises(XdError) as caught:
        columns.mapping([pair])
    assert caught.value.status == Status.USAGE
    with pytest.raises(XdError, match="twice"):
        columns.mapping(["logprob=a", "logprob=b"])
    assert columns.mapping(["logprob=a", "active=b"]) == {"logprob": "a", "active": "b"}


# -- numbers


def test_numbers_that_are_no_float32_are_rounded_once_and_said(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text('{"token_ids":[1,2,3],"prompt_len":1,"logprobs":[null,-0.10000000012,-0.5]}\n')
    (record,) = read("jsonl", path, ["rollout"])
    assert record.logprobs["rollout"][1:].tolist() == [float(np.float32(-0.1)), -0.5]
    assert noted("jsonl", path, ["rollout"]) == ["1 values of logprobs are no float32 and were rounded to the nearest"]


@pytest.mark.parametrize("write", [str, "{:.9g}".format, lambda value: repr(float(value))])
def test_a_float32_as_any_program_writes_it_is_one(tmp_path, write):
    """By the fewest digits that tell it apart, by nine, or by those of its float64."""
    draw = np.random.default_rng(0)
    values = (-(10.0 ** draw.uniform(-12, 3, 2000))).astype(np.float32)
    values[:3] = np.float32(-2e-38), np.float32(-3e38), np.float32(-1e-37)
    path = tmp_path / "t.jsonl"
    ids = [1] * (values.size + 1)
    given = f"[null,{','.join(map(write, values))}]"
    path.write_text(f'{{"token_ids":{ids},"prompt_len":1,"logprobs":{given}}}\n')
    (record,) = read("jsonl", path, ["rollout"])
    np.testing.assert_array_equal(record.logprobs["rollout"][1:], values)
    assert noted("jsonl", path, ["rollout"]) == []
    # the control: float64 of their own, and decimals for which a float32 has no room
    wide = f"[null,{','.join(repr(float(value) * (1 + 1e-10)) for value in values)}]"
    path.write_text(f'{{"token_ids":{ids},"prompt_len":1,"logprobs":{wide}}}\n')
    (note,) = noted("jsonl", path, ["rollout"])
    assert int(note.split()[0]) > 1990
    path.write_text('{"token_ids":[1,1,1],"prompt_len":1,"logprobs":[null,-1e-300,-1e-50]}\n')
    assert noted("jsonl", path, ["rollout"])[0].startswith("2 values")


def test_files_follow_one_another_and_a_file_may_be_laid_out_in_any_way(tmp_path):
    rows = [json.loads(line) for line in (DUMPS / "sequences.jsonl").read_text().splitlines()]
    texts = {"lines.jsonl": "\n\n".join(map(json.dumps, rows)), "list.json": json.dumps(rows),
             "indented.json": json.dumps(rows, indent=1), "one after another.json": " ".join(map(json.dumps, rows)),
             "indented objects.json": "\n".join(json.dumps(row, indent=2) for row in rows)}  # fmt: skip
    for name, text in texts.items():
        path = tmp_path / name
        path.write_text(text)
        first, second = read("jsonl", path)
        assert_is(first, FIRST, of_prompt=True)
        assert_is(second, SECOND)
    of = formats.named("jsonl", {})
    paths = [tmp_path / name for name in texts]
    assert len(list(formats.records(of, paths, SIDES, Notes()))) == 2 * len(texts)


@pytest.mark.parametrize("name", ["lines.jsonl", "list.json"])
def test_memory_does_not_grow_with_the_file(name, tmp_path):
    """What reading and gathering takes at most, of a file and of one five times as long."""
    row = {"token_ids": [1] * 99, "prompt_len": 1, "logprobs": [-0.5] * 99, "text": "x" * 100_000}
    peaks, bytes_ = [], []
    for count in (30, 150):
        path = tmp_path / f"{count} {name}"
        path.write_text("\n".join([json.dumps(row)] * count) if name.endswith("l") else json.dumps([row] * count))
        of = formats.named("jsonl", {})
        tracemalloc.start()
        batch = Batch.of_records(formats.records(of, [path], ["rollout"], Notes()), "dump")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        bytes_.append(path.stat().st_size)
        assert len(batch.token_ids) == 99 * count
    assert peaks[1] < peaks[0] * 1.25
    assert bytes_[1] > peaks[1] * 1.25, "the control: what was read is more than what was held"


def test_an_object_of_a_list_may_be_longer_than_what_is_read_at_once(tmp_path, monkeypatch):
    from libxd.imports import json_rows

    monkeypatch.setattr(json_rows, "_CHUNK", 7)
    rows = [json.loads(line) for line in (DUMPS / "sequences.jsonl").read_text().splitlines()]
    rows[0]["text"] = 'quotes " and \\ and ] } 😀 ' * 3
    path = tmp_path / "list.json"
    path.write_text(json.dumps(rows, ensure_ascii=False, indent=1))
    assert_is(read("jsonl", path)[0], FIRST, of_prompt=True)
