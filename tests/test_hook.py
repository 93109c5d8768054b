"""libxd.write_scores: the same tokens in every layout give the same files; wrong arguments write none."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings

import numpy as np
import pytest
from comparison_fixtures import floats, snapshot

import libxd
from libxd import comparison, seal, sequences
from libxd.errors import Status, XdError
from libxd.imports.batch import ZERO_TAIL
from libxd.rundir import Attempt
from libxd.tensors import TensorFile

# two sequences of five columns: prompts of 2 and 1, padding (_) on the left of one and on the right of the other
IDS = np.array([[0, 11, 12, 13, 14], [21, 22, 23, 24, 0]])
HELD = np.array([[0, 1, 1, 1, 1], [1, 1, 1, 1, 0]])
ACTIVE = np.array([[0, 0, 0, 1, 1], [0, 1, 0, 1, 0]])
ROLLOUT = floats(0, 0, 0, -1, -2, 0, -3, 0, -4, 0).reshape(2, 5)
TRAINING = floats(0, 0, -9, -1, -2.5, 0, -3, -7, -4, 0).reshape(2, 5)
SAID = {"dtype": "float32", "checkpoint": "a" * 64, "semantics": "raw", "step": 3}

FLAT_IDS = [11, 12, 13, 14, 21, 22, 23, 24]
FLAT_ACTIVE = [False, False, True, True, False, True, False, True]
FLAT_ROLLOUT = floats(np.nan, np.nan, -1, -2, np.nan, -3, np.nan, -4)
FLAT_TRAINING = floats(np.nan, -9, -1, -2.5, np.nan, -3, -7, -4)


def padded() -> dict:
    return {"token_ids": IDS, "attention_mask": HELD, "active_mask": ACTIVE, "rollout": ROLLOUT, "training": TRAINING}


def narrower(width: int) -> dict:
    whole = padded()
    return {name: array[:, 5 - width :] if name in ("active_mask", "rollout", "training") else array
            for name, array in whole.items()}  # fmt: skip


def flat() -> dict:
    return {"token_ids": np.array(FLAT_IDS), "cu_seqlens": [0, 4, 8], "active_mask": FLAT_ACTIVE,
            "rollout": FLAT_ROLLOUT, "training": FLAT_TRAINING}  # fmt: skip


def ragged() -> dict:
    """Lists, the values of the responses alone."""
    return {
        "token_ids": [FLAT_IDS[:4], FLAT_IDS[4:]], "active_mask": [[1, 1], [1, 0, 1]],
        "rollout": [[-1.0, -2.0], [-3.0, float("nan"), -4.0]],
        "training": [FLAT_TRAINING[:4], FLAT_TRAINING[5:]],
    }  # fmt: skip


def tensors_of(given: dict, dtype: str = "float32") -> dict:
    torch = pytest.importorskip("torch")
    out = {name: torch.as_tensor(np.asarray(value)) for name, value in given.items()}
    for side in ("rollout", "training"):
        out[side] = out[side].to(getattr(torch, dtype)).requires_grad_()
    return out


def scores(path, side: str) -> dict:
    with TensorFile(Attempt(path).file(f"score_{side}.safetensors")) as file:
        return {name: np.array(file.array(name)) for name in file.names}


LAYOUTS = {
    "padded": padded, "without the first column": lambda: narrower(4), "flat": flat, "ragged": ragged,
    "torch": lambda: tensors_of(padded()), "torch, bfloat16": lambda: tensors_of(padded(), "bfloat16"),
    "masks of booleans": lambda: {**padded(), "active_mask": ACTIVE > 0, "attention_mask": HELD > 0},
    "float64": lambda: {**padded(), "rollout": ROLLOUT.astype(np.float64)},
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_batch_in_every_layout_is_one_attempt(tmp_path, layout):
    path = libxd.write_scores(tmp_path, "mine", **LAYOUTS[layout](), **SAID)
    for side, wanted in (("rollout", FLAT_ROLLOUT), ("training", FLAT_TRAINING)):
        found = scores(path, side)
        assert found["token_ids"].tolist() == FLAT_IDS and found["cu_seqlens"].tolist() == [0, 4, 8]
        assert found["active_mask"].tolist() == FLAT_ACTIVE
        np.testing.assert_array_equal(found["logprobs"], wanted)
        assert found["logprobs"].dtype == np.float32
    attempt = Attempt(path)
    frozen = sequences.read(attempt.requested()["locations"]["sequences"])
    assert frozen.prompt_lens.tolist() == [2, 1]
    judged = comparison.compare(attempt)
    assert (judged["status"], judged["counts"]["mismatches"]) == ("MISMATCH", 1)
    assert seal.seal(attempt)
    reference = Attempt(libxd.write_scores(tmp_path / "again", "mine", **padded(), **SAID))
    comparison.compare(reference)
    names = [name for name in snapshot(reference) if name != "requested.json"]  # which says where its sequences lie
    assert {n: snapshot(attempt)[n] for n in names} == {n: snapshot(reference)[n] for n in names}


def test_a_narrow_block_is_the_last_columns(tmp_path):
    """The control: the same block beside ids that are shifted by one belongs to other tokens."""
    path = libxd.write_scores(tmp_path, "mine", **{**narrower(4), "token_ids": np.roll(IDS, 1, 1)}, **SAID)
    assert scores(path, "rollout")["token_ids"].tolist() != FLAT_IDS


def test_each_step_and_rank_is_an_attempt_of_its_own(tmp_path):
    def name(**said):
        path = libxd.write_scores(tmp_path, "mine", **padded(), **{**SAID, **said})
        return Attempt(path).requested()["scenario_id"], path

    assert name()[0] == "step 3" and name(rank=2)[0] == "step 3, rank 2" and name(step=None)[0] == "imported"
    first, second = name(step=4)[1], name(step=4)[1]
    assert first.parent == second.parent and (first.name, second.name) == ("a0001", "a0002")


def test_ranks_write_side_by_side(tmp_path):
    """Processes that begin together, the same tokens and step from two of them: nobody writes into another's."""
    code = (
        "import sys, numpy as np, libxd\n"
        "for i in range(4):\n"
        "    print(libxd.write_scores(sys.argv[1], 'mine', token_ids=[[1, 2, 3]], active_mask=[[1, 1]], step=i,\n"
        "          rollout=[[-1.0, -int(sys.argv[2])]], training=[[-1.0, -2.0]], dtype='float32'))"
    )
    ranks = [subprocess.Popen([sys.executable, "-c", code, tmp_path, str(rank)], stdout=subprocess.PIPE, text=True)
             for rank in (1, 2)]  # fmt: skip
    paths = [rank.communicate(timeout=120)[0].split() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0] and len({*paths[0], *paths[1]}) == 8
    for number, found in enumerate(paths, 1):
        for path in found:
            assert scores(path, "rollout")["logprobs"].tolist()[1:] == [-1, -number]


def test_semantics_are_what_was_done_to_the_logits(tmp_path):
    def declared(semantics):
        path = libxd.write_scores(tmp_path, "mine", **padded(), **{**SAID, "semantics": semantics})
        found = Attempt(path).identity()["semantics"]
        return found and (found["logprobs"], found["temperature"], found["top_p"])

    assert declared("raw") == ("raw", 1.0, 1.0) and declared({"temperature": 0.9}) == ("processed", 0.9, 1.0)
    assert declared(None) is None


def test_a_side_can_come_later(tmp_path):
    both = padded()
    first = libxd.write_scores(tmp_path, "mine", **{k: v for k, v in both.items() if k != "training"}, **SAID)
    rest = {k: v for k, v in both.items() if k != "rollout"}
    assert libxd.write_scores(tmp_path, "mine", **rest, into=first) == first
    assert comparison.compare(Attempt(first))["counts"]["mismatches"] == 1
    with pytest.raises(XdError, match="another token"):
        libxd.write_scores(tmp_path, "mine", **{**rest, "token_ids": IDS + HELD}, into=first)


def test_what_is_said_beside_the_scores(tmp_path):
    path = libxd.write_scores(tmp_path, "mine", **padded(), **SAID, advantages=[0.5, -0.5], rewards=[1, 0],
                              prompts=["b", "a"], versions=[2, 3])  # fmt: skip
    found = scores(path, "rollout")
    assert found["advantages"].tolist() == [0.5] * 4 + [-0.5] * 4 and found["rewards"].tolist() == [1, 0]
    assert found["prompt_index"].tolist() == [0, 1] and found["versions"].tolist() == [2, 3]
    assert "advantages" not in scores(path, "training"), "once an attempt"
    by_token = libxd.write_scores(tmp_path, "mine", **padded(), **SAID, advantages=ROLLOUT[:, 3:])
    np.testing.assert_array_equal(
        scores(by_token, "rollout")["advantages"], floats(np.nan, np.nan, -1, -2, np.nan, np.nan, np.nan, -4)
    )


def test_zeros_under_a_mask_that_is_too_wide_are_warned_of(tmp_path):
    def written(zeros: int) -> list[str]:
        values = [[-1.0, *[0.0] * zeros]]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            libxd.write_scores(tmp_path, "mine", token_ids=[list(range(zeros + 2))], active_mask=[[1] * (zeros + 1)],
                               rollout=values, training=[[-1.0] * (zeros + 1)], dtype="bf16")  # fmt: skip
        return [str(each.message) for each in caught]

    assert written(ZERO_TAIL - 1) == []
    (said,) = written(ZERO_TAIL)
    assert "rollout: logprobs of 0.0" in said


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"rollout": None, "training": None}, "neither rollout nor training"),
        ({"attention_mask": None}, "attention_mask for"),
        ({"attention_mask": HELD[:, 1:]}, "another shape than token_ids"),
        ({"attention_mask": HELD * 0.5}, "true and false"),
        ({"active_mask": ACTIVE * 2.5}, "true and false"),
        ({"active_mask": np.ones((2, 5))}, "holds no token.*found .0, 0."),
        ({"rollout": ROLLOUT[:1]}, "laid out as token_ids"),
        ({"rollout": ROLLOUT[0]}, "laid out as token_ids"),
        ({"rollout": np.ones((2, 5), int)}, "no floating-point"),
        ({"rollout": [["a"]]}, "no floating-point|laid out"),
        ({"token_ids": IDS * 1.0}, "no integers"),
        ({"token_ids": IDS[0], "attention_mask": None}, "cu_seqlens for"),
        ({"attention_mask": HELD * [[1], [0]], "active_mask": ACTIVE * [[1], [0]]}, "without tokens"),
        ({"dtype": None}, "no default"),
        ({"dtype": {"rollout": "float32"}}, "no default"),
        ({"dtype": "int8"}, "no default"),
        ({"semantics": "cooked"}, "no such semantics"),
        ({"semantics": {"heat": 1.0}}, "heat"),
        ({"rollout_mode": "sampled"}, "sampled"),
        ({"contract": "mine"}, "unknown numerical contract"),
        ({"advantages": [1.0]}, "one a sequence"),
        ({"rewards": [[1.0], [2.0]]}, "one a sequence"),
        ({"token_ids": IDS - 30}, "no token id"),
        ({"step": -1}, "/step: is no whole number from 0"),
        ({"step": 1.5}, "no whole number"),
        ({"step": "x"}, "no whole number"),
        ({"step": True}, "no whole number"),
        ({"step": np.True_}, "no whole number"),
        ({"step": 10**5000}, "beyond int64"),
        ({"rank": {"a": 1}}, "/rank: is no whole number"),
        ({"cu_seqlens": [0, 4, 8]}, "beside attention_mask"),
        ({"token_ids": IDS.tolist(), "attention_mask": None, "cu_seqlens": [0, 5, 10]}, "have their own bounds"),
        ({"token_ids": [[1, 2], [3]]}, "several lengths"),
        ({"token_ids": [[[1, 2]], [3]], "attention_mask": None}, "no sequence of ids"),
        ({"token_ids": IDS[0], "attention_mask": None, "cu_seqlens": np.array([0, 4, 2, 5], np.uint64)}, "rise"),
        ({"attention_mask": [[0, 1, 0, 1, 1], [1, 1, 1, 1, 0]]}, "has a hole.*found .0, 3."),
        ({"active_mask": [["a"] * 5] * 2}, "true and false"),
        ({"rollout": np.ma.masked_equal(ROLLOUT, -2)}, "masked array.*filled"),
        ({"rollout": list(np.ma.masked_equal(ROLLOUT, -2))}, "masked array"),
        ({"prompts": [[1], [1]]}, "no keys"),
        ({"prompts": 5}, "no keys"),
        ({"advantages": []}, "one a sequence"),
        ({"advantages": ["a", "b"]}, "no numbers"),
        ({"advantages": [1e39, 0.0]}, "fit a float32"),
        ({"rewards": ["a", "b"]}, "no numbers"),
        ({"rewards": [10**400, 1]}, "no number"),
        ({"versions": [1.5, np.nan]}, "no integers"),
        ({"versions": np.array([1, 2**63], np.uint64)}, "64 bits"),
        ({"semantics": 5}, "no such semantics"),
        ({"checkpoint": 5}, "/checkpoint: is no path"),
        ({"tokenizer": "a\nb"}, "/tokenizer: no line"),
        ({"into": 5}, "/into: is no path"),
        ({"dtype": int}, "no default"),
        ({"dtype": {"rollout": "float32", "training": "float32", "trainer": "bf16"}}, "names no side"),
    ],
)
def test_wrong_arguments_write_nothing(tmp_path, change, what):
    with pytest.raises(XdError) as caught:
        libxd.write_scores(tmp_path, "mine", **{**padded(), **SAID, **change})
    assert re.search(what, caught.value.line()), caught.value.line()
    assert caught.value.status in (Status.USAGE, Status.INVALID)
    assert not list(tmp_path.iterdir())


def test_lists_with_a_mask_are_padded(tmp_path):
    """A rectangle of lists, also of tensors, holds padding, which is none of the tokens."""
    rows = {name: [list(row) for row in values] for name, values in padded().items()}
    whole = tensors_of(padded())
    for number, given in enumerate((rows, {name: list(values) for name, values in whole.items()})):
        found = scores(libxd.write_scores(tmp_path / str(number), "mine", **given, **SAID), "rollout")
        assert found["token_ids"].tolist() == FLAT_IDS and found["cu_seqlens"].tolist() == [0, 4, 8]
        np.testing.assert_array_equal(found["logprobs"], FLAT_ROLLOUT)
    unmasked = {name: values for name, values in rows.items() if name != "attention_mask"}
    found = scores(libxd.write_scores(tmp_path / "ragged", "mine", **unmasked, **SAID), "rollout")
    assert found["token_ids"].size == IDS.size, "the control: it is the mask that says what is padding"


def test_a_step_is_an_integer_of_any_type(tmp_path):
    torch = pytest.importorskip("torch")
    for step in (np.int64(3), np.array(3), torch.tensor(3)):
        path = libxd.write_scores(tmp_path, "mine", **padded(), **{**SAID, "step": step, "rank": np.uint8(1)})
        assert Attempt(path).requested()["scenario_id"] == "step 3, rank 1"
        assert Attempt(path).readback("rollout")["engine"]["imported"]["step"] == 3
    with pytest.raises(XdError, match="no whole number"):
        libxd.write_scores(tmp_path, "mine", **padded(), **{**SAID, "step": torch.tensor(True)})


def test_a_dtype_is_named_by_numpys_and_torchs_own(tmp_path):
    torch = pytest.importorskip("torch")
    for dtype in (np.float32, np.dtype("float32"), torch.float32, "fp32"):
        path = libxd.write_scores(tmp_path, "mine", **padded(), **{**SAID, "dtype": dtype})
        assert Attempt(path).requested()["contract"]["dtype"] == "float32"


def test_tensors_that_numpy_cannot_hold_are_refused(tmp_path):
    torch = pytest.importorskip("torch")
    rollout = torch.tensor(ROLLOUT)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of nested and quantised ones being young or old
        kinds = {
            "sparse": rollout.to_sparse(), "float8": rollout.to(torch.float8_e4m3fn), "meta": rollout.to("meta"),
            "nested": torch.nested.nested_tensor(list(rollout)), "conj": rollout.to(torch.complex64).conj(),
            "jagged": torch.nested.nested_tensor(list(rollout), layout=torch.jagged),
            "quantised": torch.quantize_per_tensor(rollout, 0.1, 0, torch.qint8),
        }  # fmt: skip
        ids = [FLAT_IDS[:4], FLAT_IDS[4:]]
        for given in (padded(), {**flat(), "active_mask": np.array(FLAT_ACTIVE)}, {**ragged(), "token_ids": ids}):
            for kind, tensor in kinds.items():
                for name in ("rollout", "advantages"):
                    with pytest.raises(XdError) as caught:
                        libxd.write_scores(tmp_path, "mine", **{**given, **SAID, name: tensor})
                    assert caught.value.status == Status.USAGE, kind
    assert not list(tmp_path.iterdir())


def test_advantages_of_flat_tokens_are_flat(tmp_path):
    by_token = np.arange(8, dtype=np.float32)
    path = libxd.write_scores(tmp_path, "mine", **flat(), **SAID, advantages=by_token)
    assert scores(path, "rollout")["advantages"].tolist() == by_token.tolist()
    path = libxd.write_scores(tmp_path, "mine", **flat(), **SAID, advantages=[0.5, -0.5])
    assert scores(path, "rollout")["advantages"].tolist() == [0.5] * 4 + [-0.5] * 4
    with pytest.raises(XdError, match="one a sequence"):
        libxd.write_scores(tmp_path, "mine", **flat(), **SAID, advantages=by_token[1:])


@pytest.mark.parametrize("declared", [{"dtype": "float32"}, {"semantics": "raw"}, {"checkpoint": "a" * 64},
                                      {"tokenizer": "x"}, {"rollout_mode": "decode"}, {"contract": "x"}])  # fmt: skip
def test_nothing_is_declared_of_an_attempt_that_is_there(tmp_path, declared):
    first = libxd.write_scores(tmp_path, "mine", **{k: v for k, v in padded().items() if k != "training"}, **SAID)
    rest = {k: v for k, v in padded().items() if k != "rollout"}
    with pytest.raises(XdError, match="is declared when an attempt is made"):
        libxd.write_scores(tmp_path, "mine", **rest, into=first, **declared)
    assert not Attempt(first).has("score_training.safetensors")
    assert libxd.write_scores(tmp_path, "mine", **rest, into=first) == first


def test_a_path_that_no_line_holds_is_refused(tmp_path):
    with pytest.raises(XdError, match="no line of a pipe"):
        libxd.write_scores(tmp_path / "a\nb", "mine", **padded(), **SAID)
    assert not list(tmp_path.iterdir())


def test_an_experiment_is_named_and_a_place_can_be_written(tmp_path):
    with pytest.raises(XdError, match="bad experiment id"):
        libxd.write_scores(tmp_path, "../mine", **padded(), **SAID)
    for runs, experiment in ((tmp_path, 5), (5, "mine")):
        with pytest.raises(XdError, match=r"is no name|is no path"):
            libxd.write_scores(runs, experiment, **padded(), **SAID)  # type: ignore[arg-type]
    (tmp_path / "file").write_text("")
    with pytest.raises(XdError) as caught:
        libxd.write_scores(tmp_path / "file", "mine", **padded(), **SAID)
    assert caught.value.status == Status.CONFLICT


def test_the_page_runs(xd, tmp_path, root, monkeypatch):
    """docs/hooks.md: its loop's call, and the tools after it."""
    page = (root / "docs" / "hooks.md").read_text()
    call, command = (re.search(rf"^```{kind}\n(.*?)^```$", page, re.M | re.S)[1] for kind in ("python", "sh"))
    monkeypatch.chdir(tmp_path)
    given = {"ids": IDS, "attention_mask": HELD, "loss_mask": ACTIVE[:, 1:], "old_logps": ROLLOUT[:, 1:],
             "logps": TRAINING[:, 1:]}  # fmt: skip
    for step in (1, 2):
        exec(call, {"step": step, **given})
    env = {**os.environ, "PATH": f"{root / 'tools'}:{os.environ['PATH']}", "XD_PYTHON": sys.executable}
    ran = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, env=env)
    assert ran.returncode == 0, ran.stderr
    assert "grpo (imported)" in ran.stdout and ran.stdout.index("step 1") < ran.stdout.index("step 2")


def test_neither_torch_nor_numpy_is_taken_for_the_asking(tmp_path):
    """`import libxd` stays light, and the hook works where no torch is."""
    light = "import sys, libxd; assert 'numpy' not in sys.modules; assert libxd.__version__"
    hook = (
        "import sys; sys.modules['torch'] = None; import libxd\n"
        f"libxd.write_scores({str(tmp_path)!r}, 'mine', token_ids=[[1, 2]], active_mask=[[1]], rollout=[[-1.0]],\n"
        "                   training=[[-1.0]], dtype='float32')"
    )
    for code in (light, hook):
        assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
    with pytest.raises(AttributeError):
        libxd.write_score  # noqa: B018
