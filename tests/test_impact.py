"""The impact of a pair against the same figures token by token."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest
from comparison_fixtures import floats, rewrite_score, score_path, scored
from impact_fixtures import ACTIVE, BY_SEQUENCE, LENGTHS, SEQUENCE_OF, TOKENS, TURNS, drawn, figures, pair_of
from tolerances import FLOAT32_RELATIVE, FUNCTIONAL_RELATIVE, NEAR_POLICIES_RELATIVE, POLICY_FLOAT64

from libxd import comparison, impact, impact_settings, impact_text, pairs, scores
from libxd.credit import Credit
from libxd.errors import Status, XdError
from libxd.functional.corrections import CORRECTIONS
from libxd.functional.objectives import OBJECTIVES
from libxd.impact_settings import Settings
from libxd.rundir import SIDES


@pytest.fixture
def pair(tmp_path):
    return pair_of(tmp_path)


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


def test_log_ratios_beyond_float32_are_ratios_of_zero_and_none(tmp_path: Path) -> None:
    """Fill values on both sides, whose difference no float32 holds."""
    attempt = scored(tmp_path, floats(-3e38, 3e38, -1, -1), floats(3e38, -3e38, -1, -1))
    found = impact.of_pair(pairs.of_attempt(attempt)).figures["ratio"]["token"]
    assert (found["min"], found["p01"], found["p50"], found["p99"], found["max"]) == (0.0, 0.0, 1.0, None, None)


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


# -- the text


def test_the_text_fits_and_says_what_was_not_given(pair):
    bare = impact_text.lines(impact.of_pair(pair))
    full = impact_text.lines(impact.of_pair(pair, Credit("token", np.ones(TOKENS), "advantages")))
    assert max(map(len, bare + full)) <= 120
    assert "Without advantages" in "\n".join(bare) and "cosine" not in "\n".join(bare)
    assert "Advantages, one a token; tokens: 16 above 0, 0 below, 0 at 0." in "\n".join(full)
    assert "gspo: its ratio is the sequence's" in "\n".join(full)
