"""Score files in shards: written by one rule, read as one, whole or not at all, and sealed each."""

from __future__ import annotations

import functools
import json
import os
import shutil

import numpy as np
import pytest
from comparison_fixtures import arrays_of, floats, scored, snapshot
from scoring_fixtures import Bench

import libxd
from libxd import canon, columns, comparison, effect, impact, pairs, resume, seal, shards, verdict
from libxd.doctor import Evidence, diagnosis
from libxd.errors import Status, XdError
from libxd.joined import Joined, join
from libxd.records import Case
from libxd.report import content
from libxd.rundir import PAYLOADS, SEAL, SIDES, Attempt, RunDirectory, payloads
from libxd.scores import BLOCK, ScoreFile
from libxd.tensors import TensorFile

LENGTHS = (5, 1, 0, 9, 4, 7, 3, 8, 2, 6)  # 45 tokens; of at most 10 a shard: 5 1 0 | 9 | 4 | 7 3 | 8 2 | 6
SHARDS = 6


@pytest.fixture
def made(tmp_path):
    """`made(name, most, **other)`: an attempt of the same drawn logprobs, in shards of at most so many tokens."""
    draw = np.random.default_rng(3)
    tokens = sum(LENGTHS)
    rollout = -draw.standard_exponential(tokens, np.float32)
    training = rollout + 1e-5 * draw.standard_normal(tokens, np.float32)
    active = arrays_of(tokens)["active_mask"].copy()
    active[np.cumsum((0, *LENGTHS[:-1]))] = False

    def make(name, most=10, lengths=LENGTHS, shift=0.0, **other):
        return scored(tmp_path / name, rollout, training + np.float32(shift), active=active, lengths=lengths,
                      shard_tokens=most, **other)  # fmt: skip

    return make


def names(attempt, side="rollout"):
    return [path.name for path in attempt.scores(side)]


# -- names


def test_the_rule_is_whole_sequences_up_to_so_many_tokens(made):
    assert names(made("a")) == [shards.shard("rollout", number, SHARDS) for number in range(1, SHARDS + 1)]
    assert names(made("a"))[0] == "score_rollout-00001-of-00006.safetensors"
    assert names(made("b", sum(LENGTHS))) == ["score_rollout.safetensors"]  # no more than that: one file
    assert len(names(made("c", sum(LENGTHS) - 1))) == 2
    assert len(names(made("d", 1))) == sum(length > 0 for length in LENGTHS)
    assert names(made("e", 10, (sum(LENGTHS),))) == ["score_rollout.safetensors"]  # a sequence is never cut


def test_more_shards_than_names_can_count_are_refused_before_one_is_written(made, monkeypatch):
    monkeypatch.setattr(shards, "MOST_SHARDS", SHARDS)
    assert len(names(made("a"))) == SHARDS
    monkeypatch.setattr(shards, "MOST_SHARDS", SHARDS - 1)
    with pytest.raises(XdError, match="more shards than a name can count") as caught:
        made("b")
    assert caught.value.status == Status.USAGE
    assert shards._SHARD.match(shards.shard("rollout", 99_999, 99_999))
    assert not shards._SHARD.match(shards.shard("rollout", 1, 100_000))


def test_a_shard_is_a_score_file_of_its_sequences(made):
    attempt = made("a")
    whole = made("b", 1000).scores("rollout")[0]
    with TensorFile(attempt.scores("rollout")[3]) as part, TensorFile(whole) as file:
        assert part.array("cu_seqlens").tolist() == [0, 7, 10]
        np.testing.assert_array_equal(part.array("logprobs"), file.array("logprobs")[19:29])
        assert part.metadata == {**file.metadata, "shard": {"number": 4, "of": SHARDS}}


@pytest.mark.parametrize(
    ("there", "wanted"),
    [
        ([], ["score_rollout.safetensors"]),
        (["score_training-00001-of-00002.safetensors", "comparison.json"], ["score_rollout.safetensors"]),
        (["score_rollout-00002-of-00002.safetensors"], [f"score_rollout-0000{n}-of-00002.safetensors" for n in (1, 2)]),
        (["score_rollout.safetensors", "score_rollout-00001-of-00002.safetensors"], ["score_rollout.safetensors"]),
        (["score_rollout-1-of-2.safetensors", "score_rollout-00001-of-00000.safetensors"], [shards.whole("rollout")]),
        (["score_rollout-00001-of-00001.safetensors"], ["score_rollout-00001-of-00001.safetensors"]),
    ],
)
def test_what_a_side_must_be_follows_from_what_is_there(there, wanted):
    assert list(shards.wanted(there, "rollout")) == wanted
    others = [name for name in PAYLOADS if name != "score_rollout.safetensors"]
    found = payloads(name for name in there if name.startswith("score_rollout"))
    assert [name for name in found if name not in others] == wanted


# -- read as one


def test_parts_laid_end_to_end_are_an_array():
    whole = np.arange(40, dtype=np.int32) * 3
    joined = join([whole[:7], whole[7:7], whole[7:30], whole[30:]])
    assert isinstance(joined, Joined)
    assert (len(joined), joined.size, joined.shape, joined.dtype) == (40, 40, (40,), np.int32)
    for start in range(-3, 42, 3):
        for stop in range(-3, 45, 4):
            np.testing.assert_array_equal(joined[start:stop], whole[start:stop])
    draw = np.random.default_rng(0)
    for _ in range(20):
        index = draw.integers(0, 40, 11)
        np.testing.assert_array_equal(joined[index], whole[index])
    assert [joined[at] for at in (0, 6, 7, 39, -1)] == [whole[at] for at in (0, 6, 7, 39, -1)]
    np.testing.assert_array_equal(np.asarray(joined), whole)
    assert join([whole]) is whole
    with pytest.raises(IndexError):
        joined[40]


def judged(attempt):
    """What every reader makes of an attempt, without the names and digests of its score files."""
    value = comparison.compare(attempt)
    seal.seal(attempt)
    pair = pairs.of_attempt(attempt)
    figures = impact.of_pair(pair).figures
    diagnosed = diagnosis.of_pair(Evidence.of_pair(pair)).as_json()
    reported = content.read([content.table.read(attempt)], None, False, lambda: None).value
    for case in reported["cases"]:
        case["digests"] = {name: found for name, found in case["digests"].items() if not name.startswith("score_")
                           and name != "comparison.json"}  # fmt: skip
    inputs = {name: found for name, found in value["inputs"].items() if not name.startswith("score_")}
    assert len(value["inputs"]) == len(inputs) + len(attempt.scores("rollout")) + len(attempt.scores("training"))
    return {
        "comparison": canon.dumps({**value, "inputs": inputs}),
        "token_diffs": attempt.file("token_diffs.safetensors").read_bytes(),
        "identity": [file.identity() for file in (pair.rollout, pair.training)],
        "impact": canon.dumps(figures),
        "doctor": canon.dumps({**diagnosed, "subject": []}).replace(str(attempt).encode(), b"ATTEMPT"),
        "report": canon.dumps(reported),
    }


def test_shards_and_one_file_say_the_same_byte_for_byte(made):
    whole, cut, finer = (judged(made(name, most)) for name, most in (("a", 1000), ("b", 10), ("c", 1)))
    assert cut == whole
    assert finer == whole
    other = judged(made("d", 10, shift=1e-4))  # the control: the same tokens, other numbers
    for name in ("comparison", "token_diffs", "impact", "doctor", "report"):
        assert other[name] != whole[name]
    assert other["identity"] != [] and [found["token_ids"] for found in other["identity"]] == [
        found["token_ids"] for found in whole["identity"]
    ]


def test_blocks_across_the_bounds_of_shards(tmp_path):
    """More tokens than one block of sums, cut where no block ends."""
    tokens = BLOCK + 1000
    draw = np.random.default_rng(5)
    rollout = -draw.standard_exponential(tokens, np.float32)
    training = rollout + 1e-5 * draw.standard_normal(tokens, np.float32)
    lengths = (tokens // 3, tokens // 3, tokens - 2 * (tokens // 3))
    whole, cut = (scored(tmp_path / name, rollout, training, lengths=lengths, shard_tokens=most)
                  for name, most in (("a", tokens), ("b", tokens // 2)))  # fmt: skip
    assert len(cut.scores("training")) == 3
    for attempt in (whole, cut):
        comparison.compare(attempt)
    assert comparison_numbers(cut) == comparison_numbers(whole)
    diffs = [attempt.file("token_diffs.safetensors").read_bytes() for attempt in (whole, cut)]
    assert diffs[0] == diffs[1]


def comparison_numbers(attempt):
    return {key: value for key, value in attempt.comparison().items() if key != "inputs"}


def test_an_effect_is_the_same_however_each_is_cut(made):
    change = ("batch.size", 2)
    pairs_of = [(made(f"{name}0", most), made(f"{name}1", other, shift=1e-4, change=change))
                for name, most, other in (("a", 1000, 1000), ("b", 10, 3), ("c", 1000, 10))]  # fmt: skip
    effects = [effect.side_effect(changed, base, "training") for base, changed in pairs_of]
    assert effects[0] == effects[1] == effects[2]
    assert effects[0].mean_absolute
    assert effect.side_effect(pairs_of[1][1], pairs_of[1][0], "rollout").mean_absolute == 0  # nothing was changed there


def test_two_files_by_themselves_may_be_shards(made, xd):
    attempt = made("a")
    one = [attempt.scores(side)[2] for side in SIDES]  # any shard stands for its set
    every = [path for side in SIDES for path in attempt.scores(side)]
    for paths in (one, every):
        pair = pairs.of_files(paths)
        assert pair.tokens == sum(LENGTHS)
        assert len(pair.cu_seqlens) == len(LENGTHS) + 1
    np.testing.assert_array_equal(pairs.of_files(one).difference, pairs.of_attempt(made("b", 1000)).difference)
    np.testing.assert_array_equal(pairs.of_files(one).active, pairs.of_attempt(made("c", 1000)).active)
    with pytest.raises(XdError, match="two score files make a pair"):
        pairs.of_files(attempt.scores("rollout"))
    for tool in ("xd-impact", "xd-doctor"):
        assert xd(tool, *every).status == 0


# -- whole or not at all


def test_a_side_counts_as_scored_with_all_of_its_shards(made, xd):
    attempt = made("a")
    assert attempt.scored("rollout")
    lost = attempt.scores("rollout")[1]
    kept = lost.read_bytes()
    lost.unlink()
    assert not attempt.scored("rollout")
    ran = xd("xd-compare", attempt)
    assert (ran.status, ran.out, len(ran.err.splitlines())) == (Status.MISSING, "", 1)
    assert "the rollout side is not scored yet: it lacks 1 of 6 shards" in ran.err
    assert lost.name in ran.err
    assert xd("xd-seal", attempt).status == Status.MISSING
    assert sorted(os.listdir(attempt.path)) == sorted(set(os.listdir(attempt.path)) - set(comparison.OUTPUTS))
    lost.write_bytes(kept)
    assert xd("xd-compare", attempt).status == 0


@pytest.mark.parametrize("stray", ["score_rollout.safetensors", "score_rollout-00001-of-00007.safetensors",
                                   "score_rollout-00007-of-00006.safetensors"])  # fmt: skip
def test_scores_that_lie_there_twice_are_refused(made, stray):
    attempt = made("a")
    shutil.copy(attempt.scores("rollout")[0], attempt.file(stray))
    with pytest.raises(XdError) as caught:
        comparison.compare(attempt)
    assert (caught.value.status, caught.value.code) == (Status.INVALID, "shards-mixed")


def test_shards_in_each_others_place_are_noticed(made):
    attempt = made("a", 10, (9, 9, 9, 9, 9))
    first, second = attempt.scores("rollout")[:2]
    one, other = first.read_bytes(), second.read_bytes()
    first.write_bytes(other)
    second.write_bytes(one)
    with pytest.raises(XdError) as caught:
        comparison.compare(attempt)
    assert (caught.value.code, caught.value.issues[0].path) == ("foreign-file", "/xd/shard")


def test_a_shard_of_other_scores_is_noticed(made):
    attempt, other = made("a"), made("b", dtype="bfloat16")
    path = attempt.scores("training")[4]
    path.unlink()
    shutil.copy(other.scores("training")[4], path)
    with pytest.raises(XdError) as caught:
        comparison.compare(attempt)
    assert caught.value.code == "foreign-file"
    assert path.name in str(caught.value.where)


def test_a_shard_under_the_name_of_the_whole_is_none(made):
    attempt = made("a", 1000)
    path = attempt.scores("training")[0]
    path.unlink()
    shutil.copy(made("b").scores("training")[0], path)
    with pytest.raises(XdError, match="is not the shard that its name says"):
        ScoreFile.alone(path)


@pytest.mark.parametrize("name", ["logprobs", "active_mask"])
def test_tensors_cut_otherwise_are_no_numbers_to_compare(made, name):
    """The whole has the right length, and the parts do not lie beside one another."""
    attempt = made("a", 30, (15, 15, 15))
    from libxd import tensors

    for path, step in zip(attempt.scores("rollout"), (-1, 1), strict=True):
        with TensorFile(path) as file:
            arrays, about = {each: np.array(file.array(each)) for each in file.names}, file.metadata
        arrays[name] = arrays[name][:step] if step < 0 else np.append(arrays[name][:1], arrays[name])
        path.unlink()
        tensors.write(path, arrays, about)
    found = comparison.compare(attempt)
    assert found["status"] in ("INVALID_ARTIFACT", "INVALID_IDENTITY")
    assert [problem["code"] for problem in found["artifact_problems"]] == ["shape"]
    assert "cut into shards otherwise" in found["artifact_problems"][0]["detail"]
    assert found["counts"] is None


# -- sealed each


@pytest.fixture
def sealed(made):
    attempt = made("sealed")
    comparison.compare(attempt)
    seal.seal(attempt)
    return attempt


def test_every_shard_is_sealed(sealed):
    files = sealed.read(SEAL)["files"]
    assert set(files) == set(os.listdir(sealed.path)) - {SEAL}
    assert len(files) == len(PAYLOADS) - 2 + 2 * SHARDS
    assert seal.verify(sealed) == []
    assert not seal.seal(sealed)
    assert verdict.read(sealed, Case.read(sealed))["status"] == "MISMATCH"


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda path: path.unlink(), "missing"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1])), "another digest"),
        (lambda path: path.write_bytes(path.read_bytes() + b"\1"), "changed"),
        (lambda path: path.rename(path.with_name("score_rollout-00003-of-00009.safetensors")), "missing"),
        (lambda path: (path.rename(path.parent.parent / "x"), path.symlink_to(path.parent.parent / "x")), "symlink"),
        (lambda path: shutil.copy(path, path.with_name("score_rollout-00007-of-00006.safetensors")), "added"),
        (lambda path: shutil.copy(path, path.with_name("score_rollout.safetensors")), "added"),
    ],
)  # fmt: skip
def test_verify_names_what_happened_to_a_shard(sealed, spoil, problem):
    row = sealed.requested()
    run = RunDirectory(sealed.path.parents[3], row["experiment_id"])
    assert resume.outcome(row, run, None).state == "answered"
    spoil(sealed.scores("rollout")[1])
    assert problem in " ".join(map(str, seal.verify(sealed)))
    assert resume.outcome(row, run, None).state != "answered"


def test_a_seal_over_a_part_of_a_set_is_none(sealed):
    value = sealed.read(SEAL)
    left = sealed.scores("training")[-1]
    del value["files"][left.name]
    sealed.file(SEAL).write_bytes(canon.dumps(value) + b"\n")
    left.unlink()
    problems = [str(problem) for problem in seal.verify(sealed)]
    assert problems[-1] == "COMPLETE: malformed (seals a set of files that no attempt has)"


def test_a_comparison_of_other_score_files_is_not_the_verdict(made):
    """The same numbers, cut otherwise: the digests that the comparison pins are of files that are not there."""
    attempt, other = made("a"), made("b", 20)
    for each in (attempt, other):
        comparison.compare(each)
    for name in comparison.OUTPUTS:
        shutil.copy(other.file(name), attempt.file(name))
    with pytest.raises(XdError, match="score_rollout-00001-of-0000"):
        seal.seal(attempt)
    with pytest.raises(XdError, match="is not what the files of the attempt give"):
        verdict.read(attempt, Case.read(attempt))


# -- written


@pytest.fixture
def bench(xd, tmp_path):
    return Bench(xd, tmp_path)


def score(bench, attempt, *options, side="rollout"):
    return bench.xd("xd-score", "--side", side, *options, attempt, env=bench.environment)


def test_a_scorer_stopped_between_two_shards_writes_the_rest(bench):
    one, other = bench.materialize(bench.case(), bench.case())
    ran = score(bench, one, "--shard-tokens", 5)
    assert (ran.status, ran.out) == (0, f"{one}\n"), ran.err
    attempt = Attempt(bench.place / one)
    undisturbed = snapshot(attempt)
    assert len(attempt.scores("rollout")) == 3
    lost = attempt.scores("rollout")[1]
    for name in (lost.name, "readback_rollout.json"):  # what was not yet written, though one after it was
        attempt.file(name).unlink()
    assert score(bench, one, "--shard-tokens", 5).status == 0
    assert snapshot(attempt) == undisturbed
    assert score(bench, other).status == 0  # and the control: without the option it is one file
    assert names(Attempt(bench.place / other)) == ["score_rollout.safetensors"]


def test_a_set_that_was_begun_is_not_mixed_with_another(bench):
    (path,) = bench.materialize(bench.case())
    score(bench, path, "--shard-tokens", 5)
    attempt = Attempt(bench.place / path)
    for name in (names(attempt)[0], "readback_rollout.json"):
        attempt.file(name).unlink()
    before = snapshot(attempt)
    for options in (["--shard-tokens", 9], []):
        ran = score(bench, path, *options)
        assert (ran.status, ran.out, len(ran.err.splitlines())) == (Status.CONFLICT, "", 1)
        assert "cut otherwise" in ran.err
        assert snapshot(attempt) == before
    (whole,) = bench.materialize(bench.case())
    score(bench, whole)
    assert score(bench, whole, "--shard-tokens", 5).status == 0  # all of it is there: it passes, however it is cut


def test_an_import_is_cut_with_all_that_stands_beside_its_scores(tmp_path, monkeypatch):
    ids = [[5, 6, 7, 8], [5, 9, 10], [5, 11, 12, 13, 14]]
    active = [[False, *([True] * (len(row) - 1))] for row in ids]
    logprobs = [np.full(len(row), -0.5, np.float32) for row in ids]
    advantages = [np.arange(len(row), dtype=np.float32) for row in ids]
    given = {"token_ids": ids, "active_mask": active, "rollout": logprobs, "training": logprobs, "dtype": "float32",
             "rewards": floats(1, 0, 2), "advantages": advantages}  # fmt: skip
    whole = Attempt(libxd.write_scores(tmp_path, "mine", step=1, **given))
    monkeypatch.setattr(shards, "write", functools.partial(shards.write, most=5))
    cut = Attempt(libxd.write_scores(tmp_path, "mine", step=2, **given))
    assert len(cut.scores("rollout")) == len(ids)
    for name in ("advantage", "reward"):
        read = [columns.read(attempt.scores("rollout")[-1], name, layout(attempt)) for attempt in (whole, cut)]
        np.testing.assert_array_equal(read[0].values, read[1].values)
    again = libxd.write_scores(tmp_path, "mine", **{**given, "training": None}, step=3)
    other = {"token_ids": ids, "active_mask": active, "training": logprobs}
    assert libxd.write_scores(tmp_path, "mine", into=again, **other) == again
    with pytest.raises(XdError, match="another token"):
        libxd.write_scores(tmp_path, "mine", into=again, **{**other, "token_ids": [*ids[:2], [5, 0, 0, 0, 0]]})


def layout(attempt):
    pair = pairs.of_attempt(attempt)
    return columns.Layout(pair.cu_seqlens, pair.rollout.active_mask)


def test_the_schema_of_a_comparison_takes_shards(made):
    attempt = made("a")
    value = json.loads(canon.dumps(comparison.compare(attempt)))
    assert {name for name in value["inputs"] if name.startswith("score_")} == {
        path.name for side in SIDES for path in attempt.scores(side)
    }
