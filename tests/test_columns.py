"""Numbers a sequence or a token from JSONL, CSV and safetensors, and every way in which a file of them is wrong."""

from __future__ import annotations

import json

import numpy as np
import pytest

from libxd import columns, tensors
from libxd.columns import Layout
from libxd.errors import Status, XdError

#: three sequences of 3, 0 and 2 tokens; of the first the last two are active, of the third the last one
LAYOUT = Layout(np.array([0, 3, 3, 5]), np.array([False, True, True, False, True]))
GIVEN = [0.5, -1.0, 2.0]


def text(path, *lines):
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def jsonl(path, *rows):
    return text(path, *(row if isinstance(row, str) else json.dumps(row) for row in rows))


def read(path, **given):
    return columns.read(path, "advantage", LAYOUT, **given)


def test_a_number_a_sequence_in_every_form(tmp_path):
    files = (
        jsonl(tmp_path / "a.jsonl", *({"advantage": value, "other": None} for value in GIVEN)),
        jsonl(tmp_path / "b.jsonl", *({"sequence": i, "advantages": GIVEN[i]} for i in (2, 0, 1))),
        text(tmp_path / "a.csv", "advantage, note", *(f'{value},"a, b"' for value in GIVEN)),
        text(tmp_path / "c.csv", "note,advantage", *(f'"two\n\nlines, of {i}",{GIVEN[i]}' for i in range(3))),
        text(tmp_path / "b.csv", "\ufeffsequence,advantage", *(f"{i},{GIVEN[i]}" for i in (1, 2, 0))),
    )
    for path in files:
        found = read(path)
        assert (found.level, found.values.tolist(), found.groups) == ("sequence", GIVEN, None)
    path = text(tmp_path / "a.json", json.dumps([{"advantage": value} for value in GIVEN], indent=1))
    assert read(path).values.tolist() == GIVEN
    for dtype in (np.float16, np.float32, np.float64):
        path = tmp_path / f"{dtype.__name__}.safetensors"
        tensors.write(path, {"advantages": np.array(GIVEN, dtype)}, {})
        assert read(path).values.tolist() == GIVEN and read(path).values.dtype == np.float64


def test_a_number_a_token_in_every_form(tmp_path):
    nan = np.nan
    files = (
        jsonl(tmp_path / "all.jsonl", {"advantage": [None, 1, 2]}, {"advantage": []}, {"advantage": [3, 4]}),
        jsonl(tmp_path / "active.jsonl", {"advantage": [1, 2]}, {"advantage": []}, {"advantage": [4]}),
        text(tmp_path / "all.csv", "advantage", 9, 1, 2, 3, 4),
        text(tmp_path / "placed.csv", "sequence,position,advantage", "2,1,4", "0,2,2", "0,1,1"),
    )
    for path in files:
        found = read(path)
        assert found.level == "token" and found.values[LAYOUT.active].tolist() == [1, 2, 4]
    four = Layout(np.array([0, 3, 5]), LAYOUT.active)  # two sequences: three numbers are the active tokens'
    path = tmp_path / "active.safetensors"
    tensors.write(path, {"advantage": np.array([1.0, 2, 4])}, {})
    np.testing.assert_array_equal(columns.read(path, "advantage", four).values, [nan, 1, 2, nan, 4])
    tensors.write(tmp_path / "all.safetensors", {"advantage": np.array([nan, 1, 2, nan, 4])}, {})
    assert read(tmp_path / "all.safetensors").values[LAYOUT.active].tolist() == [1, 2, 4]


def test_a_parquet_file_is_a_table_too(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for name, column, wanted in (
        ("sequence", GIVEN, ("sequence", GIVEN)),
        ("token", [[None, 1.0, 2.0], [], [4.0]], ("token", [1, 2, 4])),
    ):
        path = tmp_path / f"{name}.parquet"
        parquet.write_table(pyarrow.table({"advantage": column, "uid": ["a", "a", "b"]}), path)
        found = read(path, group="uid")
        values = found.values if found.level == "sequence" else found.values[LAYOUT.active]
        assert (found.level, values.tolist(), found.groups) == (*wanted, ["a", "a", "b"])


def test_groups_come_in_the_order_of_the_sequences(tmp_path):
    rows = [{"sequence": i, "advantage": 0, "prompt": f"p{i}"} for i in (2, 0, 1)]
    assert read(jsonl(tmp_path / "a.jsonl", *rows), group="prompt").groups == ["p0", "p1", "p2"]
    path = tmp_path / "a.safetensors"
    tensors.write(path, {"advantage": np.array(GIVEN), "uid": np.array([4, 4, 5])}, {})
    assert read(path, group="uid").groups == [4, 4, 5]


ROW = {"advantage": 1}
WRONG = [
    # name, lines, where, what
    ("a.txt", [""], "a.txt", "in no form"),
    ("a.jsonl", [], "a.jsonl", "holds no entry"),
    ("a.csv", ["advantage"], "a.csv", "holds no rows"),
    ("a.jsonl", [ROW, ROW], "a.jsonl", "neither sequences nor tokens"),
    ("a.csv", ["advantage", 1, 2, 3, 4], "a.csv", "neither sequences nor tokens"),
    ("a.jsonl", [ROW, {"reward": 1}], "a.jsonl:2", "holds no advantage"),
    ("a.jsonl", [{"advantage": 1, "advantages": 1}], "a.jsonl:1", "holds both"),
    ("a.jsonl", [ROW, '{"advantage": NaN}', ROW], "a.jsonl:2", "NaN is not JSON"),
    ("a.jsonl", [ROW, {"advantage": None}, ROW], "a.jsonl:2", "advantage is null"),
    ("a.jsonl", [ROW, {"advantage": True}, ROW], "a.jsonl:2", "no finite number"),
    ("a.jsonl", [ROW, {"advantage": "1"}, ROW], "a.jsonl:2", "no finite number"),
    ("a.jsonl", [ROW, {"advantage": {}}, ROW], "a.jsonl:2", "no finite number"),
    ("a.jsonl", [{**ROW, "sequence": "0"}], "a.jsonl:1", "a sequence is a whole number"),
    ("a.csv", ["advantage", 1, "1_0", 2], "a.csv:3", "no finite number"),
    ("a.csv", ["advantage", 1, "nan", 2], "a.csv:3", "no finite number"),
    ("a.csv", ["advantage", 1, "inf", 2], "a.csv:3", "no finite number"),
    ("a.csv", ["advantage", 1, "x", 2], "a.csv:3", "no finite number"),
    ("a.csv", ["advantage,b", "1,2", "1"], "a.csv:3", "another number of cells"),
    ("a.csv", ["advantage,advantage", "1,2"], "a.csv:1", "stands twice in the header"),
    ("a.csv", ["advantage", '"1'], "a.csv:2", "not CSV"),
    ("a.jsonl", ["[1]"], "a.jsonl:1", "no JSON object"),
    ("a.jsonl", ['{"advantage": 1'], "a.jsonl:1", "cut off"),
    ("a.jsonl", [{**ROW, "sequence": i} for i in (0, 1, 3)], "a.jsonl:3", "no sequence there is"),
    ("a.jsonl", [{**ROW, "sequence": i} for i in (0, 1, 1)], "a.jsonl:3", "second row of its sequence"),
    ("a.jsonl", [{**ROW, "sequence": "x"}], "a.jsonl:1", "a sequence is a whole number"),
    ("a.jsonl", [{**ROW, "sequence": -1}], "a.jsonl:1", "a sequence is a whole number"),
    ("a.jsonl", [{**ROW, "sequence": 1.5}], "a.jsonl:1", "a sequence is a whole number"),
    ("a.jsonl", [{**ROW, "sequence": 0}, {**ROW, "sequence": 1}], "a.jsonl", "another number of rows"),
    ("a.jsonl", [{"advantage": [1, 2]}, {"advantage": []}, ROW], "a.jsonl:3", "holds a number, and other rows lists"),
    ("a.jsonl", [{"advantage": [1]}, {"advantage": []}, {"advantage": [1]}], "a.jsonl:1", "list of another length"),
    ("a.jsonl", [{"advantage": [1, None]}, {"advantage": []}, {"advantage": [1]}], "a.jsonl", "active token has no"),
    ("a.csv", ["sequence,advantage", f"{10**20},1"], "a.csv:2", "a sequence is a whole number"),
    ("a.csv", ["sequence,advantage", f"{'9' * 5000},1"], "a.csv:2", "a sequence is a whole number"),
    ("a.csv", ["sequence,advantage", "\uff10,1"], "a.csv:2", "a sequence is a whole number"),
    ("a.csv", ["sequence,position,advantage", f"0,{10**20},1"], "a.csv:2", "a position is a whole number"),
    ("a.csv", ["advantage", 1, "\uff11", 2], "a.csv:3", "no finite number"),
    ("a.csv", ["advantage", 1, "9" * 5000, 2], "a.csv:3", "no finite number"),
    ("a.csv", ["sequence,position,advantage", "0,3,1"], "a.csv:2", "no token there is"),
    ("a.csv", ["sequence,position,advantage", "1,0,1"], "a.csv:2", "no token there is"),
    ("a.csv", ["sequence,position,advantage", "0,1,1", "0,1,1"], "a.csv:3", "second row of its token"),
    ("a.csv", ["sequence,position,advantage", "0,1,1", "0,2,1"], "a.csv", "active token has no finite"),
]


@pytest.mark.parametrize(("name", "lines", "where", "what"), WRONG)
def test_a_file_that_is_wrong_is_one_line_with_its_place(tmp_path, name, lines, where, what):
    path = jsonl(tmp_path / name, *map(lambda each: each if isinstance(each, dict) else str(each), lines))
    with pytest.raises(XdError, match=what) as caught:
        read(path)
    assert caught.value.status == Status.INVALID
    (issue,) = caught.value.issues
    assert issue.where == str(tmp_path / where)


def test_a_missing_file_and_tensors_that_are_wrong(tmp_path):
    for name in ("a.csv", "a.safetensors"):
        with pytest.raises(XdError) as caught:
            read(tmp_path / name)
        assert caught.value.status == Status.MISSING
    for number, (tensor, what) in enumerate((
        ({"reward": np.array(GIVEN)}, "holds no advantage"),
        ({"advantage": np.array([1, 2, 3])}, "no tensor of float16"),
        ({"advantage": np.ones((3, 1))}, "no flat tensor"),
        ({"advantage": np.ones(4)}, "neither sequences nor tokens"),
        ({"advantage": np.array([1.0, np.nan, 1.0])}, "sequence has no finite"),
        ({"advantage": np.array([1.0, 1, np.inf, 1, 1])}, "active token has no finite"),
    )):  # fmt: skip
        path = tmp_path / f"{number}.safetensors"
        tensors.write(path, tensor, {})
        with pytest.raises(XdError, match=what):
            read(path)
    with pytest.raises(XdError, match="lacks a tensor"):
        read(tmp_path / "4.safetensors", group="uid")
    with pytest.raises(XdError, match="has no prompt"):
        read(jsonl(tmp_path / "a.jsonl", ROW), group="prompt")
