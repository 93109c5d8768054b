"""Dumps that are not as their format says: one line that names file, line and field; nothing run, nothing written."""

from __future__ import annotations

import base64
import json
import os
import pickle
import random
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from libxd import tensors
from libxd.errors import Status, XdError, XdErrors
from libxd.imports import formats
from libxd.imports.formats import columns
from libxd.imports.rows import Notes
from libxd.rundir import SIDES

DUMPS = Path(__file__).parent / "dumps"


def fails(
    name: str, path: Path, sides: tuple[str, ...] | None = None, mapping: dict[str, str] | None = None
) -> XdError:
    of = formats.named(name, mapping or {})
    with pytest.raises(XdError) as caught:
        list(formats.records(of, [path], sides or of.sides or ("rollout",), Notes()))
    (issue,) = caught.value.issues
    assert "\n" not in issue.line() and len(issue.line()) < 900
    return issue


def row(**changed: Any) -> str:
    """A sound line of trl, of which fields are another (None: absent)."""
    whole = {**json.loads((DUMPS / "trl.jsonl").read_text().splitlines()[0]), **changed}
    return json.dumps({name: value for name, value in whole.items() if value is not None})


GOOD = row()
#: case -> (second line of a JSONL file whose first is sound, place within the line, words of the message)
LINES: dict[str, tuple[str, str, str]] = {
    "a field that is missing": (row(completion_ids=None), "", "has no completion_ids .found .*tool_mask.*text alone"),
    "a field that is null": (GOOD.replace("[8, 9, 10]", "null"), "", "completion_ids is null"),
    "one logprob too few": (row(old_per_token_logps=[-0.5, -1.5]), "/old_per_token_logps",
                            r"another length than the tokens \(found 2, expected 3"),
    "one logprob too many": (row(sampling_per_token_logps=[-1.0] * 4), "/sampling_per_token_logps",
                             "found 4, expected 3"),
    "a mask of another length": (row(completion_mask=[1, 1]), "/completion_mask", "found 2, expected 3"),
    "base64": (row(completion_ids=base64.b64encode(np.arange(9).tobytes()).decode()), "/completion_ids",
               "is base64, not a list of numbers"),
    "a printed numpy array": (row(old_per_token_logps="[-0.5 -1.5 ... -2.25]"), "/old_per_token_logps",
                              "is a printed array"),
    "a printed tensor": (row(completion_ids="tensor([8, 9, 10])"), "/completion_ids", "is a printed array.*tolist"),
    "another text": (row(completion_ids="8 9 10"), "/completion_ids", "is a text, not a list"),
    "numbers as texts": (row(old_per_token_logps=["-0.5", "-1.5", "-2.25"]), "/old_per_token_logps/0", "holds a text"),
    "lists in a list": (row(completion_ids=[[8, 9, 10]]), "/completion_ids/0", "holds a list"),
    "true for an id": (GOOD.replace("[8, 9, 10]", "[8, true, 10]"), "/completion_ids/1", "holds true or false"),
    "a fraction for an id": (row(completion_ids=[8, 9.5, 10]), "/completion_ids/1", "holds a number"),
    "null for an id": (row(completion_ids=[8, None, 10]), "/completion_ids/1", "holds null"),
    "an id below zero": (row(completion_ids=[8, -100, 10]), "/completion_ids/1", "no token id .found -100"),
    "an id beyond int32": (row(completion_ids=[8, 2**31, 10]), "/completion_ids/1", "no token id .found 2147483648"),
    "an id beyond int64": (row(completion_ids=[8, 2**70, 10]), "/completion_ids/1", "no token id"),
    "a weight in a mask": (row(completion_mask=[1, 0.5, 0]), "/completion_mask/1", "neither 0 nor 1 .found 0.5"),
    "a hole in a mask of padding": (row(completion_mask=[1, 0, 1]), "/completion_mask/1", "padding on the right"),
    "padding on the wrong side": (row(prompt_mask=[1, 1, 0]), "/prompt_mask/2", "padding on the left"),
    "NaN": (GOOD.replace("-1.5,", "NaN,"), "/old_per_token_logps/1", "NaN is not JSON .write null"),
    "-Infinity": (GOOD.replace("-1.5,", "-Infinity,"), "/old_per_token_logps/1", "-Infinity is not JSON"),
    "a number beyond a float64": (GOOD.replace("-1.5,", "-1e999,"), "/old_per_token_logps/1", "does not fit a float32"),
    "a number beyond a float32": (row(old_per_token_logps=[-0.5, -1e39, -2.0]), "/old_per_token_logps/1",
                                  "does not fit a float32 .found -1e.39"),
    "a key twice": (GOOD[:-1] + ', "prompt_ids": [1]}', "/prompt_ids", "stands twice"),
    "a line cut off": (GOOD[: len(GOOD) // 2], "", "cut off: the line that begins here does not end"),
    "a line cut off in a number": (GOOD[: GOOD.index("-2.25") + 2], "", "cut off"),
    "no JSON": (GOOD.replace('"prompt_ids":', '"prompt_ids"'), "", "not JSON"),
    "a list for a line": ("[1, 2]", "", "is no JSON object"),
    "too deep": ('{"x": ' + "[" * 5000 + "]" * 5000 + "}", "", "nested too deeply"),
    "bytes that are no UTF-8": ('{"x": "\udcff"}', "", "not UTF-8"),
    "a number for a list": (row(completion_ids=8), "/completion_ids", "is an integer, not a list"),
    "a text for a number": (row(advantages="high"), "/advantages", "is a text, not a number"),
    "no tokens": (row(completion_ids=[], completion_mask=[], tool_mask=[], sampling_per_token_logps=[],
                      old_per_token_logps=[], prompt_ids=[], prompt_mask=[]), "", "holds no tokens"),
}  # fmt: skip


@pytest.mark.parametrize("case", LINES)
def test_a_bad_line_is_named_with_its_field(case, tmp_path):
    line, place, words = LINES[case]
    path = tmp_path / "rollouts.jsonl"
    path.write_bytes(b"\n".join(os.fsencode(text) for text in (GOOD, line, GOOD)) + b"\n")
    error = fails("trl", path)
    assert (error.where, error.path, error.status) == (f"{path}:2", place, Status.INVALID)
    assert re.search(words, error.line()), error.line()


def test_the_line_that_is_changed_is_sound(tmp_path):
    """The control: it is the change that is refused."""
    path = tmp_path / "rollouts.jsonl"
    path.write_text(f"{GOOD}\n{GOOD}")
    of = formats.named("trl", {})
    assert len(list(formats.records(of, [path], SIDES, Notes()))) == 2


#: case -> (text of a .json file, line that is named, words of the message)
LAID: dict[str, tuple[str, int, str]] = {
    "a list that does not end": (f"[\n{GOOD},\n{GOOD}", 1, "cut off: the list"),
    "an object that does not end": (f'[\n{GOOD},\n{{"prompt_ids": [5,\n6', 3, "cut off: the object"),
    "a text that does not end": (f'[\n{GOOD},\n{{"prompt_ids": "x', 3, "cut off: the object"),
    "an error within an object": (f'[\n{GOOD},\n{{"prompt_ids":\n [5 6],\n "x": 1}}\n]', 4, "not JSON: Expecting ','"),
    "NaN within a list": ("[\n" + GOOD.replace("-1.5,", "NaN,") + "\n]", 2, "NaN is not JSON"),
    "something after the list": (f"[\n{GOOD}\n]\n{GOOD}", 4, "nothing was expected after the list"),
    "commas before a list's first": (f"[,,\n{GOOD}]", 1, "an object or a list of objects was expected"),
    "a comma behind a list's last": (f"[{GOOD},\n]", 2, "an object was expected after the comma"),
    "two commas": (f"[{GOOD},\n,{GOOD}]", 2, "an object or a list of objects was expected"),
    "no comma": (f"[{GOOD}\n{GOOD}]", 2, "a comma or the end of the list"),
    "commas without a list": (f"{GOOD},\n{GOOD}", 1, "an object or a list of objects was expected"),
    "a list of numbers": ("[\n1, 2]", 2, "an object or a list of objects was expected"),
    "a text": ('"x"', 1, "an object or a list of objects was expected"),
    "a byte order mark": ("\ufeff[]", 1, "an object or a list of objects was expected"),
}


@pytest.mark.parametrize("case", LAID)
def test_a_file_of_another_layout_says_on_which_line(case, tmp_path):
    text, line, words = LAID[case]
    path = tmp_path / "rollouts.json"
    path.write_text(text)
    error = fails("trl", path)
    assert error.where == f"{path}:{line}" and re.search(words, error.line()), error.line()


@pytest.mark.parametrize("text", ["", "\n\n", "[]", "[ ]\n"])
def test_a_file_without_an_entry_is_refused(text, tmp_path):
    path = tmp_path / "rollouts.json"
    path.write_text(text)
    assert fails("trl", path).code == "empty"


#: case -> (format, text of the dump with one entry, place, words): what the formats themselves ask
ENTRIES: dict[str, tuple[str, Any, str, str]] = {}


def entry(case: str, name: str, dump: str, change: Callable[[Any], None], place: str, words: str) -> None:
    text = (DUMPS / dump).read_text()
    value = json.loads(text if dump.endswith(".json") else text.splitlines()[0])
    value = value[0] if isinstance(value, list) else value
    change(value)
    ENTRIES[case] = (name, value, place, words)


entry("vllm without logprobs", "vllm", "vllm.json", lambda v: v["outputs"][0].update(logprobs=None), "/outputs/0",
      r"logprobs is null .*SamplingParams\(logprobs=0\)")  # fmt: skip
entry("vllm, another token's logprob", "vllm", "vllm.json",
      lambda v: v["outputs"][0].update(token_ids=[1, *v["outputs"][0]["token_ids"][1:]]), "/outputs/0/logprobs/0",
      "no logprob of the token itself")  # fmt: skip
entry("vllm, a position too few", "vllm", "vllm.json", lambda v: v["outputs"][0]["logprobs"].pop(),
      "/outputs/0/logprobs", "another length than the tokens .found 7, expected 8")  # fmt: skip
entry("vllm, a server's answer", "vllm", "openai_chat.json", lambda v: None, "/choices", "xd-import openai")
entry("openai, a RequestOutput", "openai", "vllm.json", lambda v: None, "/outputs", "xd-import vllm")
entry("openai by text", "openai", "openai_text.json", lambda v: None, "/choices/0/logprobs",
      "names its tokens by text.*return_token_ids")  # fmt: skip
entry("openai without logprobs", "openai", "openai_chat.json", lambda v: v["choices"][1].update(logprobs=None),
      "/choices/1", "logprobs is null")  # fmt: skip
entry("openai, ids that contradict", "openai", "openai_batch.jsonl",
      lambda v: v["response"]["body"]["choices"][0].update(token_ids=[8, 9, 11]),
      "/response/body/choices/0/token_ids/2",
      "not the token whose logprob stands beside it .found 11, expected 10")  # fmt: skip
entry("openai, a failed request", "openai", "openai_batch.jsonl", lambda v: v.update(error={"message": "no"}), "/error",
      "the request failed")  # fmt: skip
entry("openai, a stream's piece", "openai", "openai_chat.json", lambda v: v["choices"][0].update(delta={}),
      "/choices/0/delta", "a piece of a stream")  # fmt: skip
entry("openai, an echo without an end", "openai", "openai_echo.json", lambda v: v.pop("usage"), "/choices/0/logprobs",
      "nothing says where that ends")  # fmt: skip
entry("sglang without logprobs", "sglang", "sglang.json", lambda v: v["meta_info"].pop("output_token_logprobs"),
      "/meta_info", "return_logprob")  # fmt: skip
entry("sglang, no pair", "sglang", "sglang.json", lambda v: v["meta_info"]["output_token_logprobs"].insert(1, -0.5),
      "/meta_info/output_token_logprobs/1", r"is no \[logprob, token id, text\]")  # fmt: skip
entry("sglang, another id", "sglang", "sglang.json", lambda v: v.update(output_ids=[8, 9, 11]), "/output_ids/2",
      "found 11, expected 10")  # fmt: skip
entry("sglang, fewer than generated", "sglang", "sglang.json", lambda v: v["meta_info"].update(completion_tokens=4),
      "/meta_info/output_token_logprobs", "found 3, expected 4")  # fmt: skip
entry("sglang, another prompt", "sglang", "sglang.json", lambda v: v.update(prompt_token_ids=[5, 6, 8]),
      "/meta_info/input_token_logprobs", "not of the last tokens")  # fmt: skip
entry("verl by text", "verl", "verl.jsonl", lambda v: [v.pop(name) for name in ("prompts", "responses")], "",
      "has no prompts .*writes text without ids")  # fmt: skip
entry("verl, a mask of another length", "verl", "verl.jsonl", lambda v: v["attention_mask"].pop(), "/attention_mask",
      "found 6, expected 7")  # fmt: skip
entry("openrlhf, a mask that is too long", "openrlhf", "openrlhf.jsonl", lambda v: v["action_mask"].extend([1, 1]),
      "/action_mask", "longer than sequences .found 7")  # fmt: skip
entry("slime, a response that is too long", "slime", "slime.jsonl", lambda v: v.update(response_length=7),
      "/response_length", "found 7, expected 0 to 6")  # fmt: skip
entry("prime-rl, messages", "prime-rl", "prime_rl.jsonl", lambda v: v.pop("token_ids"), "", "token export")
entry("nemo-rl, text", "nemo-rl", "nemo_rl.jsonl", lambda v: v.pop("token_ids"), "", "the text is not enough")
entry("nemo-rl, a length beyond", "nemo-rl", "nemo_rl.jsonl", lambda v: v.update(input_lengths=[9]), "/input_lengths",
      "found 9, expected 1 to 6")  # fmt: skip
entry("a prompt beyond its sequence", "jsonl", "sequences.jsonl", lambda v: v.update(prompt_len=7), "/prompt_len",
      "found 7")  # fmt: skip
entry("a prompt's token that counts", "jsonl", "sequences.jsonl", lambda v: v.update(active=[0, 1, 0, 1, 1, 1]),
      "/active/1", "is 1 within the prompt")  # fmt: skip


@pytest.mark.parametrize("case", ENTRIES)
def test_what_a_format_asks_of_an_entry(case, tmp_path):
    name, value, place, words = ENTRIES[case]
    path = tmp_path / "dump.jsonl"
    path.write_text(json.dumps(value))
    error = fails(name, path)
    assert (error.where, error.path) == (f"{path}:1", place)
    assert re.search(words, error.line()), error.line()


#: case -> (old text in tests/dumps/tokens.csv, new text, line that is named, words)
CELLS = {
    "NaN for none": ("b,2,12,0,,-6.0", "b,2,12,0,NaN,-6.0", 10, "is no number .*leave a cell empty"),
    "a text for an id": ("b,2,12,0", "b,2,x,0", 10, "is no integer"),
    "no id": ("b,2,12,0", "b,2,,0", 10, "token_id is null"),
    "another number of cells": ("a,4,9,1,", "a,4,9,", 6, "found 7, expected 8"),
    "cut off": ("b,3,13,1,,-0.125,-1.0,7\n", "b,3,1", 11, "found 3, expected 8"),
    "a position too far": ("a,4,9,1", "a,5,9,1", 6, "count up from 0 .*found 5, expected 4"),
    "a mask that is none": ("a,4,9,1", "a,4,9,yes", 6, "neither 0 nor 1"),
    "a sequence in two places": ("b,3,13,1", "a,0,13,1", 11, "stand apart"),
    "another reward within a sequence": ("b,3,13,1,,-0.125,-1.0", "b,3,13,1,,-0.125,-2.0", 11, "differs within"),
    "an underscore in an id": ("b,2,12,0", "b,2,1_2,0", 10, "is no integer"),
    "an underscore in a logprob": ("b,3,13,1,,-0.125", "b,3,13,1,,-0.1_25", 11, "is no number"),
    "other digits": ("b,2,12,0", "b,2,\uff11\uff12,0", 10, "is no integer"),
    "an id of 5000 digits": ("b,2,12,0", f"b,2,{'9' * 5000},0", 10, "is no integer"),
    "a version of 400 digits": ("b,3,13,1,,-0.125,-1.0,7", f"b,3,13,1,,-0.125,-1.0,{'9' * 400}", 11, "is no integer"),
    "a column twice": ("sequence,position", "sequence,sequence", 1, "stands twice"),
    "a quote that does not end": ("b,3,13,1", 'b,"3,13,1', 11, "not CSV"),
}


@pytest.mark.parametrize("case", CELLS)
def test_a_bad_cell_is_named_with_its_line(case, tmp_path):
    old, new, line, words = CELLS[case]
    text = (DUMPS / "tokens.csv").read_text()
    assert text.count(old) == 1
    path = tmp_path / "tokens.csv"
    path.write_text(text.replace(old, new))
    error = fails("csv", path, mapping={"version": "step"})
    assert error.where == f"{path}:{line}" and re.search(words, error.line()), error.line()


def test_a_column_that_was_mapped_must_be_there(tmp_path):
    error = fails("csv", DUMPS / "tokens.csv", mapping=columns.mapping(["advantage=adv"]))
    assert re.search("has no adv .*--map advantage=adv", error.line())


def test_a_mapping_is_for_tables():
    with pytest.raises(XdError) as caught:
        formats.named("trl", {"logprob": "x"})
    assert caught.value.status == Status.USAGE


# -- files


class _Runs:
    """What would write a file if it was unpickled by somebody who does not look."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("suffix", [".pkl", ".pickle", ".json", ".jsonl", ".pt", ".pth"])
@pytest.mark.parametrize("form", ["pickle", "torch"])
def test_a_pickle_that_would_run_something_runs_nothing(suffix, form, tmp_path):
    trace = tmp_path / "ran"
    path = tmp_path / f"rollouts{suffix}"
    if form == "torch":
        torch = pytest.importorskip("torch")
        torch.save({"completion_ids": _Runs(trace)}, path)
    else:
        path.write_bytes(pickle.dumps({"completion_ids": _Runs(trace)}, protocol=2))
    error = fails("trl", path)
    assert error.status == Status.INVALID and not trace.exists()
    if suffix in (".pt", ".pth"):
        assert error.code == "pickle" and error.found == f"{os.system.__module__}.system"
    elif suffix in (".pkl", ".pickle") or form == "pickle":
        assert error.code == "pickle"
    else:
        assert error.code in ("not-json", "not-utf8")  # a zip file under another name
    pickle.loads(pickle.dumps(_Runs(trace)))
    assert trace.exists(), "the control: it does run"


def test_tensors_that_do_not_fit_together_are_refused(tmp_path):
    arrays = {"prompt_ids": np.array([[5], [6]]), "completion_ids": np.array([[8], [9]]),
              "old_per_token_logps": np.zeros((3, 1), np.float32)}  # fmt: skip
    path = tmp_path / "batch.safetensors"

    def refused(**changed: Any) -> XdError:
        path.unlink(missing_ok=True)
        tensors.write(path, {name: array for name, array in {**arrays, **changed}.items() if array is not None}, {})
        return fails("trl", path, ("training",))

    error = refused()
    assert (error.path, error.found, error.expected) == ("/old_per_token_logps/0", 3, 2)
    assert "lacks a column of token ids" in refused(completion_ids=None).line()
    assert "3 dimensions" not in refused(old_per_token_logps=np.zeros((2, 1, 4), np.float32)).line()
    error = refused(old_per_token_logps=np.zeros((2, 1, 4), np.float32))
    assert error.path == "/old_per_token_logps/0" and "2 dimensions a row" in error.line()
    assert "not integers" in refused(completion_ids=np.zeros((2, 1), np.float32)).line()
    assert "holds no entry" in refused(**{name: array[:0] for name, array in arrays.items()}).line()


def test_what_torch_saved_must_be_plain_values(tmp_path):
    torch = pytest.importorskip("torch")
    path = tmp_path / "batch.pt"
    for value, code in (([1, 2], "not-an-object"), (torch.zeros(2), "not-columns"), ({"x": 1}, "missing-field")):
        torch.save(value, path)
        assert fails("trl", path).code == code
    path.write_bytes(b"no such thing")
    assert fails("trl", path).code == "bad-torch-file"
    whole = tmp_path / "whole.pt"
    torch.save({"completion_ids": torch.zeros(2, 9, dtype=torch.long)}, whole)
    path.write_bytes(whole.read_bytes()[:-200])
    assert fails("trl", path).code == "bad-torch-file"


def test_without_torch_or_pyarrow_a_file_of_theirs_says_so(tmp_path, monkeypatch):
    for suffix, name, module in ((".pt", "trl", "torch"), (".parquet", "parquet", "pyarrow")):
        monkeypatch.setitem(sys.modules, module, None)
        path = tmp_path / f"batch{suffix}"
        path.write_bytes(b"x")
        error = fails(name, path)
        assert error.status == Status.REFUSED and f"needs {module}" in error.line()


def test_a_damaged_parquet_is_refused(tmp_path):
    pytest.importorskip("pyarrow")
    path = tmp_path / "table.parquet"
    path.write_bytes(b"PAR1 and nothing that follows")
    assert fails("parquet", path).code == "not-parquet"


@pytest.mark.parametrize(
    ("name", "status"),
    [("nowhere.jsonl", Status.MISSING), ("folder.jsonl", Status.MISSING), ("dump.txt", Status.INVALID),
     ("dump", Status.INVALID)],
)  # fmt: skip
def test_what_is_no_file_of_the_format(name, status, tmp_path):
    (tmp_path / "folder.jsonl").mkdir()
    for other in ("dump.txt", "dump"):
        (tmp_path / other).write_text(GOOD)
    error = fails("trl", tmp_path / name)
    assert error.status == status and error.where == str(tmp_path / name)


_VALUES = (None, True, 0, -1, 2**31, 2**70, 1.5, 1e300, "", "x", "[1 2]", [], {}, [None], [[]], ["a"], "token_id:5")


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of everything in it."""
    for key, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
        yield value, key
        if isinstance(item, dict | list):
            yield from _places(item)


def _broken(rng: random.Random, dump: Path) -> bytes:
    """The dump with a member replaced or left out, or with bytes changed, left out, or cut off."""
    data = dump.read_bytes()
    if dump.suffix in (".json", ".jsonl") and rng.random() < 0.75:
        lines = [data] if dump.suffix == ".json" else data.splitlines()
        at = rng.randrange(len(lines))
        value = json.loads(lines[at])
        container, key = rng.choice(list(_places(value)))
        if rng.random() < 0.25:
            del container[key]
        else:
            container[key] = rng.choice(_VALUES)
        lines[at] = json.dumps(value).encode()
        return b"\n".join(lines)
    changed, at = bytearray(data), rng.randrange(len(data))
    match rng.randrange(3):
        case 0:
            changed[at] = rng.randrange(256)
        case 1:
            del changed[at : at + rng.randrange(1, 50)]
        case 2:
            del changed[at:]
    return bytes(changed)


def test_whatever_is_broken_is_an_error_and_no_accident(tmp_path):
    """Of 600 broken dumps, a good part of them still sound, each is read whole or refused by an XdError of one line."""
    of_dump = {dump: next((name for name in formats.NAMES if dump.stem.replace("_", "-").startswith(name)), "jsonl")
               for dump in sorted(DUMPS.iterdir()) if dump.suffix != ".md"}  # fmt: skip
    of_dump[DUMPS / "tokens.csv"] = "csv"
    assert set(of_dump.values()) == {*formats.NAMES} - {"parquet"}
    rng, outcomes = random.Random(0), Counter()
    for number in range(600):
        dump = rng.choice(list(of_dump))
        path = tmp_path / f"{number}{dump.suffix}"
        path.write_bytes(_broken(rng, dump))
        of = formats.named(of_dump[dump], {})
        try:
            list(formats.records(of, [path], of.sides or ("rollout",), Notes()))
            outcomes["read"] += 1
        except XdError as error:
            outcomes[error.code] += 1
            assert all("\n" not in issue.line() for issue in error.issues)
        path.unlink()
    assert outcomes["read"] > 50 and outcomes["bad-field"] > 50 and outcomes["truncated"] > 5, outcomes


@pytest.mark.parametrize("digits", [400, 5000])
def test_an_integer_of_any_length_anywhere_is_read_or_refused(digits, tmp_path):
    """In place of each number of each dump; a text of as many digits would be another thing."""
    refused = Counter()
    for dump in sorted(DUMPS.glob("*.json*")):
        name = next((name for name in formats.NAMES if dump.stem.replace("_", "-").startswith(name)), "jsonl")
        text = dump.read_text()
        whole = json.loads(text if dump.suffix == ".json" else text.splitlines()[0])
        of = formats.named(name, {})
        for container, key in list(_places(whole)):
            if type(kept := container[key]) not in (int, float):
                continue
            container[key] = "@"
            path = tmp_path / "dump.json"
            path.write_text(json.dumps(whole, indent=1).replace('"@"', "9" * digits))
            container[key] = kept
            try:
                list(formats.records(of, [path], of.sides or ("rollout",), Notes()))
            except XdError as error:
                assert error.status == Status.INVALID and len(error.issues[0].line()) < 900, error.line()
                refused[name] += 1
    assert set(refused) == {*formats.NAMES} - {"csv", "parquet"} and min(refused.values()) > 8, refused


def test_tensors_of_other_kinds_are_refused(tmp_path):
    torch = pytest.importorskip("torch")
    path = tmp_path / "batch.pt"
    plain = torch.tensor([[-0.5, -1.0], [-1.5, -2.0]])
    columns = {"prompt_ids": torch.tensor([[5], [6]]), "completion_ids": torch.tensor([[8, 9], [8, 9]])}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of nested and quantised ones being young or old
        kinds = {
            "plain": plain, "bfloat16": plain.bfloat16(), "sparse": plain.to_sparse(), "meta": plain.to("meta"),
            "float8": plain.to(torch.float8_e4m3fn), "nested": torch.nested.nested_tensor(list(plain)),
            "conj": plain.to(torch.complex64).conj(),
            "quantised": torch.quantize_per_tensor(plain, 0.1, 0, torch.qint8),
        }  # fmt: skip
        for kind, tensor in kinds.items():
            torch.save({**columns, "old_per_token_logps": tensor}, path)
            if kind in ("plain", "bfloat16"):
                assert len(list(formats.records(formats.named("trl", {}), [path], ["training"], Notes()))) == 2
            else:
                error = fails("trl", path, ("training",))
                assert error.status == Status.INVALID and error.code in ("bad-tensor", "bad-torch-file"), error.line()


@pytest.mark.parametrize("sequence", [[[0], [0]], [{"a": 0}, {"a": 0}]])
def test_a_sequence_of_a_parquet_is_named_by_one_value(sequence, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "table.parquet"
    parquet.write_table(pyarrow.table({"sequence": sequence, "token_id": [1, 2], "logprob": [-1.0, -2.0]}), path)
    error = fails("parquet", path)
    assert error.path == "/sequence" and "no number and no text" in error.line()


def test_a_fifo_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "dump.jsonl")
    assert fails("trl", tmp_path / "dump.jsonl").code == "not-a-file"


def test_several_flaws_of_one_line_are_one_error_each_of_its_own_line(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    path.write_text(GOOD.replace("-1.5,", "NaN,").replace("-1.25,", "NaN,"))
    with pytest.raises(XdErrors) as caught:
        list(formats.records(formats.named("trl", {}), [path], SIDES, Notes()))
    assert len(caught.value.issues) == 2
