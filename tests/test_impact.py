"""The impact of a pair against the same figures token by token, and xd-impact over attempts and files."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import numpy as np
import pytest
from comparison_fixtures import floats, refused, rewrite_json, rewrite_score, score_path, scored
from tolerances import FLOAT32_RELATIVE, FUNCTIONAL_RELATIVE, NEAR_POLICIES_RELATIVE, POLICY_FLOAT64

from libxd import comparison, credit, impact, impact_settings, impact_text, pairs, schema, scores, seal
from libxd.cmd.impact import cli
from libxd.columns import Layout
from libxd.credit import Credit
from libxd.errors import Status, XdError
from libxd.functional.corrections import CORRECTIONS
from libxd.functional.objectives import OBJECTIVES
from libxd.impact_settings import Settings
from libxd.rundir import SIDES

ROOT = Path(__file__).resolve().parent.parent
LENGTHS = (7, 5, 1, 9, 4)
TOKENS = sum(LENGTHS)
BOUNDS = np.cumsum((0, *LENGTHS))
#: turns of the sequences: 2, 1, 0, 3, 1
ACTIVE = np.array([0, 1, 1, 0, 0, 1, 1, 0, 0, 1, 1, 1, 0, 0, 1, 0, 1, 1, 1, 0, 1, 1, 0, 1, 1, 1], bool)
TURNS = 7
BY_SEQUENCE = np.array([1.5, -0.5, 7.0, -2.0, 0.0])
SEQUENCE_OF = np.repeat(np.arange(5), LENGTHS)


def drawn(spread: float = 0.4, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Logprobs float32 [TOKENS] of both sides, some ratios out of every bound; NaN where nothing is active."""
    generator = np.random.default_rng(seed)
    rollout = -generator.exponential(1.0, TOKENS)
    training = rollout + spread * generator.standard_normal(TOKENS)
    training[[1, 9, 17]] = rollout[[1, 9, 17]] + [1.9, -1.2, -0.9]
    rollout[~ACTIVE] = training[~ACTIVE] = np.nan
    return rollout.astype(np.float32), training.astype(np.float32)


def pair_of(root, rollout=None, training=None, active=ACTIVE, lengths=LENGTHS):
    if rollout is None:
        rollout, training = drawn()
    return pairs.of_attempt(scored(root, rollout, training, active=active, lengths=lengths))


@pytest.fixture
def pair(tmp_path):
    return pair_of(tmp_path)


def figures(pair, *given):
    return schema.validate("impact", impact.of_pair(pair, *given).as_json(), "impact")


def close(found, wanted):
    assert found == pytest.approx(wanted, rel=FUNCTIONAL_RELATIVE, abs=POLICY_FLOAT64)


def alike(ones, others):
    """Two values of JSON, numbers within a tolerance."""
    if isinstance(ones, dict):
        assert ones.keys() == others.keys()
        for name in ones:
            alike(ones[name], others[name])
    elif isinstance(ones, list):
        for one, other in zip(ones, others, strict=True):
            alike(one, other)
    elif isinstance(ones, float):
        close(ones, others)
    else:
        assert ones == others


def by_hand():
    """d, sequence and turn of every active token, as lists."""
    rollout, training = (side.astype(float) for side in drawn())
    places = [t for t in range(TOKENS) if ACTIVE[t]]
    turns, last = [], None
    for t in places:
        new = last is None or t != last + 1 or SEQUENCE_OF[t] != SEQUENCE_OF[last]
        turns.append((turns[-1] if turns else -1) + new)
        last = t
    return [training[t] - rollout[t] for t in places], [int(SEQUENCE_OF[t]) for t in places], turns, places


def members(of, which):
    return [i for i, each in enumerate(of) if each == which]


def test_ratios_at_every_level_are_those_by_hand(pair):
    d, sequences, turns, _ = by_hand()
    found = figures(pair)
    assert found["counts"] == {
        "active": len(d), "turns": TURNS, "sequences": 4, "tokens": TOKENS, "sequences_without": 1
    }  # fmt: skip
    wanted = {
        "token": [math.exp(x) for x in d],
        "turn": [math.exp(np.mean([d[i] for i in members(turns, turn)])) for turn in range(TURNS)],
        "sequence": [math.exp(np.mean([d[i] for i in members(sequences, s)])) for s in sorted(set(sequences))],
        "sequence_product": [math.prod(math.exp(d[i]) for i in members(sequences, s)) for s in sorted(set(sequences))],
    }
    for level, values in wanted.items():
        r, of = np.array(values), found["ratio"][level]
        assert of["count"] == len(r)
        for name, value in (("min", r.min()), ("max", r.max()), ("mean", r.mean())):
            close(of[name], value)
        close(of["ess_fraction"], r.sum() ** 2 / (len(r) * (r**2).sum()))
        close(of["chi_square"], ((r - 1) ** 2).mean())
        for name, q in (("p01", 0.01), ("p50", 0.5), ("p99", 0.99)):
            assert of[name] == pytest.approx(np.quantile(r, q, method="inverted_cdf"), rel=FLOAT32_RELATIVE)
    assert found["ratio"]["turn"] != found["ratio"]["sequence"]


def test_kl_is_that_of_the_comparison_and_has_two_directions(tmp_path, pair):
    comparison.compare(pair.attempt)
    beside = pair.attempt.comparison()["kl"]
    found = figures(pair)["kl"]
    for estimator in ("k1", "k2", "k3"):
        assert found["rollout_training"][estimator] == pytest.approx(beside[estimator], rel=FLOAT32_RELATIVE)
    swapped = figures(pair_of(tmp_path / "swapped", *drawn()[::-1]))["kl"]["rollout_training"]
    assert swapped["k1"] == pytest.approx(-found["rollout_training"]["k1"], rel=FLOAT32_RELATIVE)
    assert swapped["k3"] != pytest.approx(found["rollout_training"]["k3"], rel=NEAR_POLICIES_RELATIVE)
    d = np.array(by_hand()[0])
    close(found["training_rollout"]["k1"], (np.exp(d) * d).mean())
    close(found["training_rollout"]["k3"], (1 - np.exp(d) + np.exp(d) * d).mean())


def test_corrections_are_those_by_hand(pair):
    d, sequences, _, _ = by_hand()
    found = {each["name"]: each for each in figures(pair, Credit("sequence", BY_SEQUENCE, "advantages"))["corrections"]}
    assert list(found) == [each.name for each in CORRECTIONS]
    for correction in CORRECTIONS:
        weights, low, high, touched = [], 0, 0, set()
        for i, x in enumerate(d):
            group = [d[j] for j in members(sequences, sequences[i])]
            r = math.exp({"token": x, "product": sum(group), "geometric_mean": np.mean(group)}[correction.ratio])
            out = r < (correction.low or 0) or r > correction.high
            low += r < (correction.low or 0)
            high += r > correction.high
            touched |= {sequences[i]} if out else set()
            kept = 1.0 if correction.action == "reject" else r
            weights.append((correction.high if correction.action == "truncate" else 0.0) if out else kept)
        w, a, seen = np.array(weights), BY_SEQUENCE[sequences], found[correction.name]
        assert (seen["tokens_low"], seen["tokens_high"], seen["sequences"]) == (low, high, len(touched))
        close(seen["mean_weight"], w.mean())
        if w.any():
            close(seen["ess_fraction"], w.sum() ** 2 / (len(w) * (w**2).sum()))
        close(seen["change"]["relative_norm"], np.linalg.norm(w * a - a) / np.linalg.norm(a))
        close(seen["change"]["norm_ratio"], np.linalg.norm(w * a) / np.linalg.norm(a))
    assert found["token_mask"]["tokens_low"] and found["token_truncate"]["tokens_high"]


@pytest.mark.parametrize("level", ["sequence", "token"])
def test_objectives_are_those_by_hand(pair, level):
    d, sequences, _, places = by_hand()
    values = BY_SEQUENCE if level == "sequence" else np.random.default_rng(5).normal(size=TOKENS)
    a = values[sequences] if level == "sequence" else values[places]
    found = {each["name"]: each for each in figures(pair, Credit(level, values, "advantages"))["objectives"]}
    for objective in OBJECTIVES:
        seen = found[objective.name]
        if objective.name == "gspo" and level == "token":
            assert seen["change"] is None and seen["clipped"] is None and "sequence's" in seen["why"]
            assert seen["outside"]["low"] + seen["outside"]["high"] == len(d)
            continue
        c, before, clipped = [], [], {("low", 1): 0, ("low", -1): 0, ("high", 1): 0, ("high", -1): 0}
        lower, upper = objective.bounds
        for i, x in enumerate(d):
            group = members(sequences, sequences[i])
            r = math.exp(np.mean([d[j] for j in group]) if objective.ratio == "sequence" else x)
            weight = 1 / len(group) if objective.average == "sequences" else 1.0
            before.append(-a[i] * weight)
            bounded = min(max(r, lower), upper)
            acts = bounded != r and a[i] != 0 and (objective.clips_weight or (r > upper) == (a[i] > 0))
            if acts:
                clipped["high" if r > upper else "low", 1 if a[i] > 0 else -1] += 1
            c.append(-a[i] * weight * (bounded if objective.clips_weight else 0.0 if acts else r))
        c, before = np.array(c), np.array(before)
        assert seen["why"] is None
        assert seen["clipped"] == {
            bound: {"positive": clipped[bound, 1], "negative": clipped[bound, -1]} for bound in ("low", "high")
        }
        assert seen["sign"] == {
            "to_zero": int(((c == 0) & (before != 0)).sum()), "from_zero": 0, "reversed": 0
        }  # fmt: skip
        assert seen["weight"]["over_10_percent"] == int((abs(c - before) > 0.1 * abs(before)).sum())
        assert seen["weight"]["changed"] == int((before != 0).sum())
        close(seen["change"]["relative_norm"], np.linalg.norm(c - before) / np.linalg.norm(before))
        close(seen["change"]["norm_ratio"], np.linalg.norm(c) / np.linalg.norm(before))
        if c.any():
            close(seen["change"]["cosine"], c @ before / np.linalg.norm(c) / np.linalg.norm(before))
    assert found["ppo"]["clipped"]["low"]["positive"] == found["ppo"]["clipped"]["high"]["negative"] == 0
    assert found["ppo"]["clipped"]["low"]["negative"] and found["ppo"]["clipped"]["high"]["positive"]


def test_without_a_difference_nothing_changes(tmp_path):
    rollout, _ = drawn()
    found = figures(pair_of(tmp_path, rollout, rollout), Credit("sequence", BY_SEQUENCE, "advantages"))
    for ratio in found["ratio"].values():
        assert {ratio[name] for name in ("min", "p01", "p50", "p99", "max", "mean", "ess_fraction")} == {1.0}
        assert ratio["chi_square"] == 0
    assert {value for terms in found["kl"].values() for value in terms.values()} == {0.0}
    for each in (*found["corrections"], *found["objectives"]):
        assert each["change"]["relative_norm"] == 0 and each["change"]["norm_ratio"] == 1
    for each in found["objectives"]:
        assert not any(each["weight"].values()) and not any(each["sign"].values())


def test_the_penalty_is_in_the_coefficients_and_alone_reverses_some(pair):
    d, sequences, _, places = by_hand()
    reference = np.full(TOKENS, -1.0, np.float32)
    given = Credit("sequence", BY_SEQUENCE / 50, "advantages")
    found = figures(pair, given, Settings(beta=0.1, reference=reference))
    rollout, training = (side.astype(float)[places] for side in drawn())
    a = BY_SEQUENCE[sequences] / 50
    clipped = ((a > 0) & (np.exp(d) > 1.2)) | ((a < 0) & (np.exp(d) < 0.8))
    c = np.where(clipped, 0, -a * np.exp(d)) + 0.1 * (1 - np.exp(-1 - training))
    before = -a + 0.1 * (1 - np.exp(-1 - rollout))
    ppo = found["objectives"][0]
    close(ppo["change"]["relative_norm"], np.linalg.norm(c - before) / np.linalg.norm(before))
    assert ppo["sign"]["reversed"] == int((c * before < 0).sum()) > 0
    assert figures(pair, given)["objectives"][0]["sign"]["reversed"] == 0
    assert found["beta"] == 0.1


@pytest.mark.parametrize("block", [1, 6, 12])
def test_figures_do_not_depend_on_the_blocks(pair, monkeypatch, block):
    given = Credit("sequence", BY_SEQUENCE, "advantages")
    whole = figures(pair, given)
    monkeypatch.setattr(scores, "BLOCK", block)
    assert len(list(impact._blocks(pair, check=True))) > 1
    alike(figures(pair, given), whole)


def test_ratios_beyond_every_float_are_null_and_the_others_stay(tmp_path):
    rollout, training = drawn()
    training[1] = rollout[1] + 800
    found = figures(pair_of(tmp_path, rollout, training), Credit("sequence", -BY_SEQUENCE, "advantages"))
    token = found["ratio"]["token"]
    assert token["max"] is None and token["chi_square"] is None and token["mean"] is None
    assert token["p50"] < 2 and token["ess_fraction"] == pytest.approx(1 / int(ACTIVE.sum()))
    assert found["kl"]["rollout_training"]["k3"] is None and found["kl"]["rollout_training"]["k1"] is not None
    assert found["objectives"][0]["change"]["relative_norm"] is None


# -- what a pair is credited with


def layout(pair):
    return Layout(pair.cu_seqlens, pair.rollout.active_mask)


def write(path, *lines):
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def test_rewards_become_advantages_by_the_groups(tmp_path, pair):
    path = write(tmp_path / "r.csv", "reward,uid", "1,a", "0,a", "1,b", "1,b", "1,b")
    found = credit.of_rewards(path, layout(pair), group="uid", estimator="dr_grpo")
    assert (found.values.tolist(), found.groups, found.constant_groups) == ([0.5, -0.5, 0, 0, 0], 2, 1)
    assert (
        credit.of_rewards(path, layout(pair), prompt_index=[0, 1, 0, 1, 1], estimator="rloo").values[0] == 0  # 1 and 1
    )
    late = credit.of_rewards(path, layout(pair), group="uid", estimator="dr_grpo", overlong=(6, 4))
    # 4, 3, 0, 6 and 3 active tokens
    assert late.values == pytest.approx([0.375, -0.375, 5 / 12, -7 / 12, 1 / 6])
    whole = credit.of_rewards(path, layout(pair), estimator="reinforce_plus_plus")
    assert whole.groups is None and whole.values[1] < 0 < whole.values[0]
    shown = figures(pair, found)["advantages"]
    assert shown == {
        "source": "rewards", "level": "sequence", "estimator": "dr_grpo", "groups": 2, "constant_groups": 1,
        "tokens": {"positive": 4, "negative": 3, "zero": 9},
    }  # fmt: skip


def test_rewards_that_no_advantage_can_be_made_of(tmp_path, pair):
    path = write(tmp_path / "r.csv", "reward,uid", "1,a", "0,a", "1,b", "1,c", "1,c")
    for given, status, what in (
        ({"group": "uid"}, Status.INVALID, "group of one"),
        ({}, Status.USAGE, "nothing says the groups"),
        ({"prompt_index": [0, 0, 1, 1, 1], "overlong": (3, 4)}, Status.USAGE, "cache"),
        ({"group": "nobody"}, Status.INVALID, "has no group"),
    ):
        with pytest.raises(XdError, match=what) as caught:
            credit.of_rewards(path, layout(pair), **given)
        assert caught.value.status == status
    tokens = write(tmp_path / "t.csv", "reward", *range(TOKENS))
    with pytest.raises(XdError, match="a sequence's, one each"):
        credit.of_rewards(tokens, layout(pair), prompt_index=[0] * 5)


@pytest.mark.parametrize(("name", "rows"), [
    ("r.csv", ("reward,uid", "1,a", "0,a", "1,", "1,", "1,a")),
    ("r.csv", ("reward,uid", "1,a", "0,a", "1, ", "1, ", "1,a")),
    ("r.jsonl", ('{"reward": 1, "uid": null}',) * 5),
    ("r.jsonl", ('{"reward": 1, "uid": ""}',) * 5),
])  # fmt: skip
def test_a_group_without_a_name_is_none(tmp_path, pair, name, rows):
    with pytest.raises(XdError, match="names no group") as caught:
        credit.of_rewards(write(tmp_path / name, *rows), layout(pair), group="uid")
    assert caught.value.status == Status.INVALID
    named = [re.sub(r"^1, *$", "1,b", row).replace("null", "0").replace('""', '"b"') for row in rows]
    credit.of_rewards(write(tmp_path / f"named-{name}", *named), layout(pair), group="uid")


@pytest.mark.parametrize("estimator", credit.ESTIMATORS)
@pytest.mark.filterwarnings("error")
def test_numbers_too_large_to_reckon_with_are_refused(tmp_path, pair, estimator):
    def rewards(value):
        each = (f"{value * at},{value * at}" for at in (1, 0, 1, 0.5, 0))
        return write(tmp_path / "r.csv", "reward,advantage", *each)

    def made(path):
        return credit.of_rewards(path, layout(pair), estimator=estimator, prompt_index=[0] * 5)

    for value in (1e307, -1e307):
        with pytest.raises(XdError, match="too large") as caught:
            made(rewards(value))
        assert caught.value.status == Status.INVALID
        with pytest.raises(XdError, match="too large"):
            credit.of_advantages(rewards(value), layout(pair))
    for found in (made(rewards(1e99)), credit.of_advantages(rewards(1e99), layout(pair))):
        assert np.isfinite(found.values).all() and found.values.any()
        impact.of_pair(pair, found).as_json()


# -- what is no pair of one update


def test_sides_that_scored_other_tokens_are_refused_with_the_first_place(tmp_path):
    rollout, training = drawn()
    ids = np.arange(TOKENS, dtype=np.int32) % 97
    ids[9] = 1
    mask = ACTIVE.copy()
    mask[10] = False
    for number, (changed, what) in enumerate((
        ({"token_ids": ids}, r"token_ids: .*found 1 at sequence 1, position 2, expected 9"),
        ({"active_mask": mask}, r"active_mask: .*False at sequence 1, position 3"),
        ({"cu_seqlens": np.array([0, 7, 11, 13, 22, 26])}, r"cu_seqlens: .*11 at boundary 2, expected 12"),
        ({"cu_seqlens": np.array([0, 7, 26])}, r"3 boundaries, expected 6"),
        ({"logprobs": np.where(np.arange(TOKENS) == 5, np.nan, training).astype(np.float32)},
         r"no finite logprob .*sequence 0, position 5: nan"),
        ({"logprobs": np.where(np.arange(TOKENS) == 5, -np.inf, training).astype(np.float32)}, r"5: -inf"),
    )):  # fmt: skip
        attempt = scored(tmp_path / str(number), rollout, training, active=ACTIVE, lengths=LENGTHS)
        rewrite_score(attempt, "training", **changed)
        with pytest.raises(XdError) as caught:
            impact.of_pair(pairs.of_attempt(attempt))
        assert caught.value.status == Status.INVALID
        assert re.search(what, caught.value.line()), caught.value.line()


def test_no_active_token_is_no_update(tmp_path):
    nothing = np.zeros(2, bool)
    made = pairs.of_attempt(scored(tmp_path, floats(-1, -2), floats(-1, -2), active=nothing))
    with pytest.raises(XdError, match="no token is active"):
        impact.of_pair(made)


def test_the_state_of_the_weights_is_what_the_identity_and_both_files_say(pair):
    assert figures(pair)["model_state"] == "pre_update"
    assert "lr = 0" in "\n".join(impact_text.lines(impact.of_pair(pair)))
    paths = [score_path(pair.attempt, side) for side in SIDES]
    assert impact.model_state(pairs.of_files(paths)) == "pre_update"
    observed = {**pair.training.metadata["observed"], "model_state": None}
    rewrite_score(pair.attempt, "training", metadata={"observed": observed})
    for again in (pairs.of_files(paths), pairs.of_attempt(pair.attempt)):
        assert impact.model_state(again) is None
        assert "Nobody saw" in "\n".join(impact_text.lines(impact.of_pair(again)))


# -- settings


def test_epsilons_and_thresholds_by_name():
    told = {each.name: each for each in impact_settings.objectives(["dapo=0.1,0.3", "grpo=0.4", "cispo=2", "ppo=0,1"])}
    assert told["dapo"].bounds == (0.9, 1.3) and told["grpo"].bounds == (0.6, 1.4) and told["ppo"].bounds == (1, 2)
    assert told["cispo"].bounds == (-math.inf, 3.0)
    assert impact_settings.objectives(["cispo=0.5,2"])[4].bounds == (0.5, 3.0)
    told = {each.name: each for each in impact_settings.corrections(["token_mask=0.8,1.2", "sequence_reject=4"])}
    assert (told["token_mask"].low, told["token_mask"].high) == (0.8, 1.2)
    assert (told["sequence_reject"].low, told["sequence_reject"].high) == (0.25, 4.0)
    assert [each.name for each in impact_settings.corrections([])] == [each.name for each in CORRECTIONS]
    for make, text, what in (
        (impact_settings.objectives, "a2c=1", "no such name"),
        (impact_settings.objectives, "ppo", "not of the form"),
        (impact_settings.objectives, "ppo=1,2,3", "not of the form"),
        (impact_settings.objectives, "ppo=x", "not of the form"),
        (impact_settings.objectives, "ppo=-1", "an epsilon"),
        (impact_settings.objectives, "ppo=nan", "an epsilon"),
        (impact_settings.corrections, "token_mask=2,1", "thresholds"),
        (impact_settings.corrections, "sequence_reject=0", "thresholds"),
        (impact_settings.beta, -1.0, "no finite number"),
        (impact_settings.beta, math.nan, "no finite number"),
    ):
        with pytest.raises(XdError, match=what) as caught:
            make([text] if isinstance(text, str) else text)
        assert caught.value.status == Status.USAGE


# -- the tool


def test_the_text_fits_and_says_what_was_not_given(pair):
    bare = impact_text.lines(impact.of_pair(pair))
    full = impact_text.lines(impact.of_pair(pair, Credit("token", np.ones(TOKENS), "advantages")))
    assert max(map(len, bare + full)) <= 120
    assert "Without advantages" in "\n".join(bare) and "cosine" not in "\n".join(bare)
    assert "Advantages, one a token; tokens: 16 above 0, 0 below, 0 at 0." in "\n".join(full)
    assert "gspo: its ratio is the sequence's" in "\n".join(full)


def test_the_tool_over_attempts_and_files(xd, tmp_path, pair):
    one, two = str(pair.attempt), str(scored(tmp_path, *drawn(seed=3), active=ACTIVE, lengths=LENGTHS))
    files = [str(score_path(pair.attempt, side)) for side in SIDES]
    ran = xd("xd-impact", "--json", stdin=f"{one}\n{two}\n")
    assert (ran.status, ran.err) == (0, "")
    lines = [json.loads(line) for line in ran.out.splitlines()]
    assert [line["attempt"] for line in lines] == [one, two] and lines[0]["kl"] != lines[1]["kl"]
    ran = xd("xd-impact", "--json", *files[::-1])
    assert (ran.status, ran.err) == (0, "")
    assert json.loads(ran.out) == {**lines[0], "attempt": None}
    path = write(tmp_path / "a.jsonl", *(json.dumps({"advantage": value}) for value in BY_SEQUENCE))
    ran = xd("xd-impact", "--advantages", path, "--epsilon", "ppo=0.5", "--threshold", "token_truncate=5", one, two)
    assert (ran.status, ran.err) == (0, "")
    assert ran.out.count("importance") == 0 and ran.out.count("training / rollout - 1") == 2
    assert ran.out.count("0.5 .. 1.5") == 2 and ran.out.count("up to 5") == 4


ONE_LINE = [
    # options, status, what stands on stderr
    ("--advantages {bad}", 65, "neither sequences nor tokens"),
    ("--advantages gone.csv", 66, "gone.csv: cannot be read"),
    ("--rewards {good} --group uid", 65, "has no group"),
    ("--rewards {good}", 2, "nothing says the groups"),
    ("--rewards {good} --advantages {good}", 2, "exclude one another"),
    ("--group uid", 2, "--group is about rewards"),
    ("--overlong 3 1", 2, "--overlong is about rewards"),
    ("--estimator rloo", 2, "--estimator is about rewards"),
    ("--beta 0.1", 2, "belong together"),
    ("--beta nan --reference {score}", 2, "no finite number"),
    ("--epsilon a2c=1", 2, "no such name"),
    ("--threshold token_mask=2,1", 2, "thresholds"),
    ("--beta 0.1 --reference {other}", 65, "the reference scored other tokens"),
]


@pytest.mark.parametrize(("options", "status", "what"), ONE_LINE)
def test_what_is_wrong_is_one_line_and_no_figures(xd, tmp_path, pair, options, status, what):
    bad = write(tmp_path / "bad.csv", "advantage,reward", "1,1", "2,2")
    good = write(tmp_path / "good.csv", "reward,advantage", *(f"{i},{i}" for i in range(5)))
    other = score_path(scored(tmp_path / "other", floats(-1, -2), floats(-1, -2)), "rollout")
    rewrite_json(pair.attempt, "requested.json", locations=dict.fromkeys(("checkpoint", "tokenizer", "sequences")))
    score = score_path(pair.attempt, "rollout")
    told = shlex.split(options.format(bad=bad, good=good, other=other, score=score))
    ran = xd("xd-impact", *told, pair.attempt)
    assert (ran.status, ran.out) == (status, "")
    assert what in ran.err and ran.err.count("\n") == 1


def test_a_bad_attempt_does_not_stop_the_next_one(xd, tmp_path, pair):
    gone = tmp_path / "c-0123456789abcdef" / "a0001"
    no = refused(tmp_path / "refused", ("batch.size", 1), "no room")
    ran = xd("xd-impact", "--json", no, gone, pair.attempt)
    assert (ran.status, ran.out.count("\n"), ran.err.count("\n")) == (66, 1, 2)
    ran = xd("xd-impact", *(score_path(pair.attempt, side) for side in ("rollout", "rollout")))
    assert (ran.status, ran.out) == (65, "") and "both of one side" in ran.err
    ran = xd("xd-impact", score_path(pair.attempt, "rollout"))
    assert ran.status == 2 and "two score files make a pair" in ran.err


def test_a_tampered_attempt_is_passed_over(xd, pair, tmp_path):
    whole = scored(tmp_path / "whole", *drawn(), active=ACTIVE, lengths=LENGTHS)
    for attempt in (pair.attempt, whole):
        comparison.compare(attempt)
        assert seal.seal(attempt)
    rewrite_score(pair.attempt, "training", logprobs=pair.training.logprobs + np.float32(1e-3))
    ran = xd("xd-impact", "--json", pair.attempt, whole)
    assert (ran.status, ran.out.count("\n"), ran.err.count("\n")) == (65, 1, 1)
    assert "sealed, but score_training.safetensors: changed" in ran.err
    pair.attempt.file("COMPLETE").unlink()
    assert xd("xd-impact", "--json", pair.attempt).status == 0


def test_the_tool_needs_no_torch(xd, tmp_path, pair):
    shadow = tmp_path / "shadow"
    shadow.mkdir()
    for name in ("torch", "transformers", "xdkernels"):
        write(shadow / f"{name}.py", "raise ImportError('not here')")
    ran = xd("xd-impact", pair.attempt, env={"PYTHONPATH": str(shadow)})
    assert (ran.status, ran.err) == (0, "")


# -- the page


def test_the_commands_of_the_page_print_what_stands_there():
    """docs/impact.md: each block of commands, run beside the example's files, and the block of text below it."""
    page = (ROOT / "docs" / "impact.md").read_text()
    blocks = re.findall(r"^```sh\n(.*?)^```\n\n```text\n(.*?)^```$", page, re.M | re.S)
    assert len(blocks) == page.count("```sh") == 3
    env = {**os.environ, "PATH": f"{ROOT / 'tools'}:{os.environ['PATH']}", "XD_PYTHON": sys.executable}
    for command, wanted in blocks:
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, env=env,
            cwd=ROOT / "examples" / "impact",
        )  # fmt: skip
        assert (done.returncode, done.stderr, done.stdout) == (0, "", wanted)


def test_the_page_names_every_default():
    """Thresholds and epsilons, as the code has them, in docs/impact.md and in the options' help."""
    page = (ROOT / "docs" / "impact.md").read_text()
    told = " ".join(option.help or "" for option in cli.params if isinstance(option, click.Option))
    for correction in CORRECTIONS:
        bounds = ", ".join(f"{each:g}" for each in (correction.low, correction.high) if each is not None)
        assert re.search(rf"^\| `{correction.name}` \|[^|]*\|[^|]*\| {bounds} \|", page, re.M), correction.name
        assert f"{correction.name} {bounds.replace(', ', ',')}" in told
    for objective in OBJECTIVES:
        low, high = objective.bounds
        within = f"up to {high:g}" if objective.eps_low is None else f"{low:g} .. {high:g}"
        assert re.search(rf"^\| `{objective.name}` \|[^|]*\| {within} \|", page, re.M), objective.name
    estimators = next(option for option in cli.params if option.name == "estimator").type.choices
    assert tuple(estimators) == credit.ESTIMATORS
    assert all(f"| `{name}` |" in page for name in credit.ESTIMATORS)


def test_log_ratios_beyond_float32_are_ratios_of_zero_and_none(tmp_path: Path) -> None:
    """Fill values on both sides, whose difference no float32 holds."""
    attempt = scored(tmp_path, floats(-3e38, 3e38, -1, -1), floats(3e38, -3e38, -1, -1))
    found = impact.of_pair(pairs.of_attempt(attempt)).figures["ratio"]["token"]
    assert (found["min"], found["p01"], found["p50"], found["p99"], found["max"]) == (0.0, 0.0, 1.0, None, None)
