"""Each detector on data where its cause was made, on every other cause, and on pairs without a mistake.

tests/doctor_scores.safetensors holds a part of what dev/doctor_study.py was run on: 16 sequences of a 135M model, 20
tokens of each response, scored rightly in several ways and wrongly in known ones. docs/doctor.md has the whole.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from comparison_fixtures import scored
from conftest import ROOT
from doctor_fixtures import Held, evidence, held, subset
from tolerances import DOCTOR_TEMPERATURE_RELATIVE

from libxd import pairs
from libxd.doctor import finding, registry, repeats, series, text
from libxd.doctor.evidence import Evidence
from libxd.doctor.registry import examined
from libxd.sequences import Sequences


def _study() -> Any:
    """dev/doctor_study.py, which made the tables of docs/doctor.md."""
    spec = importlib.util.spec_from_file_location("doctor_study", ROOT / "dev" / "doctor_study.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


study = _study()
SCORES = study.FrozenScores(ROOT / "tests" / "doctor_scores.safetensors")
THIRD = SCORES.third()
MADE = {(each.name, each.dtype): each for each in study.made(SCORES)}
S = SCORES.sequences


def causes(name: str, dtype: str = "float32", third: bool = False) -> list[str]:
    return [each.cause for each in study.look(MADE[name, dtype], THIRD if third else None).findings]


def found(rollout: Held, training: Held, **known: Any) -> dict[str, finding.Finding]:
    return {each.cause: each for each in examined(evidence(rollout, training, **known)).findings}


def pair(dtype: str = "float32", **changed: Any) -> tuple[Held, Held]:
    """A right pair; `changed` is another of both files."""
    return (held("rollout", SCORES.right("decode-8", dtype), S, dtype, **changed),
            held("training", SCORES.right("pass-8", dtype), S, dtype, **changed))  # fmt: skip


# -- every cause that was made


@pytest.mark.parametrize(("name", "dtype", "cause"), [
    ("attention_unscaled", "float32", "not-these-tokens"),
    ("one_token", "float32", "few-tokens"),
    ("weight", "float32", "more-than-rounding"),
    ("one_prompt", "float32", "outlying-prompt"),
    ("top-p 0.8", "float32", "truncation"),
    ("top-k 20", "bfloat16", "truncation"),
    ("padded by 16384", "float32", "padded-vocabulary"),
    ("the likeliest token's", "float32", "wrong-token"),
    ("the likeliest token's", "bfloat16", "wrong-token"),
    ("the next token's", "bfloat16", "not-these-tokens"),
    ("fill value 0", "bfloat16", "fill-values"),
    ("fill value -3.4e+38", "float32", "fill-values"),
    ("fill value nan", "bfloat16", "fill-values"),
    ("0.0 at each last token", "bfloat16", "fill-values"),
    ("moved by one", "bfloat16", "lag"),
    ("4 decimals", "bfloat16", "rounded-on-the-way"),
    ("2 decimals", "float32", "rounded-on-the-way"),
    ("stored in bfloat16", "bfloat16", "rounded-on-the-way"),
    ("stored in float16", "float32", "rounded-on-the-way"),
    ("mask inverted", "bfloat16", "masks"),
    ("mask of one side moved", "float32", "masks"),
    ("nothing active", "float32", "nothing-compared"),
    ("other ids", "float32", "token-ids"),
    ("id beyond the vocabulary", "bfloat16", "id-beyond-vocabulary"),
    ("begin token twice, in the file", "float32", "double-bos"),
    ("probability called logprob", "bfloat16", "aggregate"),
    ("declared temperature 0.7", "float32", "semantics"),
    ("copied from the rollout", "bfloat16", "copied"),
])  # fmt: skip
def test_a_cause_that_was_made_is_named_first(name, dtype, cause):
    named = causes(name, dtype)
    assert cause in named[:2] if name == "nothing active" else named[0] == cause, named


@pytest.mark.parametrize(("name", "dtype", "cause"), [
    ("temperature 0.70", "float32", "temperature"),
    ("temperature 0.70", "bfloat16", "temperature"),
    ("temperature 1.20", "bfloat16", "temperature"),
    ("logprobs over 0.7", "bfloat16", "logprobs-scaled"),
    ("top-p 0.95", "bfloat16", "top-p"),
    ("top-k 20", "float32", "top-k"),
    ("logits in bfloat16", "float32", "head-rounding"),
    ("logits_bfloat16", "float32", "head-rounding"),
    ("padded by 16384", "float32", "padded-vocabulary"),
    ("double_bos", "bfloat16", "double-bos"),
    ("the likeliest token's", "bfloat16", "wrong-token"),
    ("the next token's", "float32", "labels"),
    ("label_shift", "bfloat16", "labels"),
    ("temperature_low", "bfloat16", "temperature"),
])  # fmt: skip
def test_with_a_third_scorer_the_one_change_is_named(name, dtype, cause):
    named = causes(name, dtype, third=True)
    assert named[0] == cause, named
    if cause in ("temperature", "top-p", "top-k", "labels"):  # and only with one
        assert cause not in causes(name, dtype)


def test_of_a_mistake_without_a_shape_the_model_says_whose_it_is():
    made = MADE["rope_scaled", "float32"]
    told = {finding.cause: finding for finding in study.look(made, THIRD).findings}["more-than-rounding"]
    assert "look at the other findings first" in told.next[0] and "of training, which is further" in told.next[0]
    swapped = found(held("rollout", made.training.logprobs, S), pair()[1], rescored=THIRD)["more-than-rounding"]
    assert "of rollout, which is further" in swapped.next[0]
    apart = [float(each.split(" on ")[0]) for each in told.evidence[1].partition(": ")[2].split(", ")]
    assert apart[1] > 10 * apart[0]
    alone = {finding.cause: finding for finding in study.look(made, None).findings}["more-than-rounding"]
    assert len(alone.evidence) == 1 and "--rescore" in alone.next[1]


def test_the_temperature_is_the_one_that_was_set():
    cold = MADE["temperature 0.70", "bfloat16"]
    first = study.look(cold, THIRD).findings[0]
    assert first.evidence[0].endswith("nearer in 100% of the sequences")
    swapped = found(held("rollout", cold.training.logprobs, S, "bfloat16"), pair("bfloat16")[1], rescored=THIRD)
    for side, named in (("training", first), ("rollout", swapped["temperature"])):
        said, _, value = named.summary.rpartition(" ")
        assert said == f"{side} is the model with temperature"
        assert float(value) == pytest.approx(0.7, rel=DOCTOR_TEMPERATURE_RELATIVE)


def test_a_temperature_of_both_sides_is_no_difference():
    both = [held(side, MADE["temperature 0.70", "float32"].training.logprobs, S) for side in ("rollout", "training")]
    assert found(*both, rescored=THIRD) == {}


def test_rounding_of_the_head_goes_with_the_logit():
    first = study.look(MADE["logits in bfloat16", "float32"], THIRD).findings[0]
    (line,) = [line for line in first.evidence if "by |logit|" in line]
    sizes = {tuple(map(float, part.split(":")[0].split(" to "))): float(part.split(":")[1])
             for part in line.split(", ")[1:]}  # fmt: skip
    assert sizes[16.0, 32.0] > 1.4 * sizes[8.0, 16.0]


def test_what_rounding_hides_is_not_named():
    assert causes("stale_weights", "float32") == []
    assert causes("temperature 0.97", "bfloat16") == []
    assert causes("padded by 128", "bfloat16", third=True) == []


@pytest.mark.parametrize("dtype", study.DTYPES)
def test_no_cause_is_called_a_fact_that_was_not_made(dtype):
    """Cross-talk at the top: what names another cause there is listed here."""
    astray = {}
    for (name, of), each in MADE.items():
        if of == dtype:
            named = [f for f in study.look(each, THIRD).findings if f.likelihood >= finding.FIT]
            others = {f.cause for f in named} - set(each.expected)
            if others:
                astray[name] = others
    assert astray == {
        "other ids": {"nothing-compared"},
        "begin token twice, in the file": {"lengths"},
    }


# -- several attempts


def test_batch_1_against_8_is_a_side_that_differs_from_itself(tmp_path):
    """The decoding side in batches of eight, and one by one: in float32 as much as it is apart from the other side."""
    given = {"lengths": tuple(np.diff(S.cu_seqlens).tolist()), "active": S.active_mask}
    training = SCORES.right("pass-8", "float32")
    eight = scored(tmp_path, SCORES.right("decode-8", "float32"), training, **given)
    one = scored(tmp_path, SCORES.right("decode-1", "float32"), training, change=("batch.size", 1), **given)
    evidences = [Evidence.of_pair(pairs.of_attempt(each)) for each in (eight, one)]
    (named,) = repeats.examine(evidences)
    assert (named.cause, named.likelihood) == ("batch-shape", finding.SHAPE)
    assert named.evidence[0].startswith("rollout of") and "(another batch size)" in named.evidence[0]
    assert len(named.evidence) == 1  # the training side is the same to the bit
    assert repeats.examine([evidences[0]]) == []


def test_updates_that_the_rollout_missed_are_a_jump():
    """Steps of four sequences each; from the third on the training side's weights are some twenty updates on."""
    steps = []
    for number in range(4):
        part, cells = subset(S, list(range(4 * number, 4 * number + 4)))
        training = (SCORES.right("pass-8", "float32") if number < 2 else SCORES.wrong("stale_more", "float32"))[cells]
        sides = held("rollout", SCORES.right("decode-8", "float32")[cells], part), held("training", training, part)
        for side in sides:
            side.metadata["observed"] = {"weights_before": None}
        steps.append(evidence(*sides))
    (named,) = series.examine(steps)
    assert named.cause == "jump" and named.evidence[0].startswith("from step 2")


# -- pairs without a mistake


def test_two_right_scorings_raise_no_alarm():
    """Every two of the frozen right ones, either way round, whole and in parts; all in docs/doctor.md."""
    alarms, pairs = [], 0
    for name, rollout, training, known in study.real([SCORES], draws=1):
        pairs += 1
        alarms += [f"{name}: {each.cause}" for each in examined(evidence(rollout, training, **known)).findings]
    assert pairs >= 300
    assert alarms == []


def test_synthetic_noise_raises_no_alarm():
    alarms = [
        f"{name}: {each.cause}"
        for name, rollout, training, known in study.synthetic([SCORES], pairs=150)
        for each in examined(evidence(rollout, training, **known)).findings
    ]
    assert alarms == []


def test_right_scorings_beside_a_third_scorer_raise_no_alarm():
    for name, rollout, training, known in study.thirds([SCORES]):
        assert examined(evidence(rollout, training, **known)).findings == [], name


# -- where each detector begins to speak


SAMPLED = [rule for rule, _ in registry.DETECTORS if rule.least_tokens > 1]  # a fact needs no sample


@pytest.mark.parametrize("rule", SAMPLED, ids=lambda rule: rule.detector)
def test_below_its_smallest_sample_a_detector_is_silent_and_says_so(rule):
    rollout, training = pair("bfloat16")
    few = rollout.active_mask & (np.cumsum(rollout.active_mask) < rule.least_tokens)
    silent = examined(evidence(replace(rollout, active_mask=few), replace(training, active_mask=few),
                               rescored=THIRD)).silent  # fmt: skip
    assert f"of the {rule.least_tokens} that it takes" in silent[rule.detector]
    assert rule.detector not in examined(evidence(rollout, training, rescored=THIRD)).silent


def test_a_detector_that_needs_more_says_which_option_gives_it():
    silent = examined(evidence(*pair())).silent
    assert silent.pop("provenance").startswith("needs an attempt")
    assert silent == {"third-scorer": "needs --rescore MODEL"}


def test_every_rule_is_whole():
    names = [rule.detector for rule, _ in registry.DETECTORS]
    assert len(set(names)) == len(names) >= 20
    for rule, _ in registry.DETECTORS:
        assert rule.causes and len(rule.decides) > 20 and rule.false_alarms


def test_what_bfloat16_makes_is_no_alarm_where_no_dtype_is_known():
    """The limits are then the coarsest dtype's, and the one detector that goes by the dtype alone says so."""
    rollout = held("rollout", SCORES.right("decode-8", "bfloat16"), S, None)
    for apart, named in ((1.0, []), (60.0, ["few-tokens"])):
        values = SCORES.right("pass-8", "bfloat16").copy()
        if apart > 1:
            values[np.flatnonzero(S.active_mask)[5]] -= apart
        looked = examined(evidence(rollout, held("training", values, S, None)))
        assert [each.cause for each in looked.findings if each.cause != "aggregate"] == named
        assert looked.silent["size"] == "unknown dtype on rollout and training"
    half = examined(evidence(replace(rollout), pair("bfloat16")[1]))
    assert half.findings == [] and half.silent["size"] == "unknown dtype on rollout"
    bias = held("training", rollout.logprobs + np.float32(0.02), S, None)
    assert examined(evidence(rollout, bias)).findings == []  # 1300 times what float32 makes
    assert "bias" in {each.cause for each in examined(evidence(*(
        replace(side, metadata={**side.metadata, "dtypes": {"parameters": "float32", "logits": "float32"}})
        for side in (rollout, bias)))).findings}  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", None])
def test_zeros_on_both_sides_are_no_agreement(dtype):
    zeros = [held(side, np.zeros(S.num_tokens), S, dtype) for side in ("rollout", "training")]
    (one,) = examined(evidence(*zeros)).findings
    assert one.cause == "fill-values" and "exactly 0 on both sides" in one.evidence[0]
    few = S.active_mask & (np.cumsum(S.active_mask) < 8)  # a handful of sure tokens
    assert examined(evidence(*(replace(side, active_mask=few) for side in zeros))).findings == []
    values = np.zeros(S.num_tokens, np.float32)
    values[np.flatnonzero(S.active_mask)[3]] = -1e-6
    assert examined(evidence(*(replace(side, logprobs=values) for side in zeros))).findings == []


def test_what_goes_with_the_logprob_says_its_smallest_sample():
    (rule,) = [rule for rule, _ in registry.DETECTORS if "temperature-like" in rule.causes]
    assert (rule.least_tokens, rule.least_sequences) == (128, 8)
    shown = "\n".join(text.rules([rule]))
    assert "smallest sample: 128 active tokens of 8 sequences" in shown


# -- single facts


def test_a_prompt_token_in_the_mask_is_named_with_the_sequences_alone():
    mask = S.active_mask.copy()
    last = int(S.prompt_lens[0]) - 1
    mask[last] = True
    rollout, training = pair(active_mask=mask)
    for side in (rollout, training):
        side.logprobs = np.where(np.isnan(side.logprobs), np.float32(-1), side.logprobs)
    assert "masks" not in found(rollout, training)
    assert f"sequence 0, position {last}" in found(rollout, training, sequences=S)["masks"].evidence[0]


def _one(ids: list[int], active: list[int]) -> Evidence:
    made = Sequences(
        token_ids=np.array(ids, np.int32), cu_seqlens=np.array([0, len(ids)]),
        active_mask=np.isin(range(len(ids)), active),
        attention_mask=np.ones(len(ids), bool), positions=np.arange(len(ids), dtype=np.int32),
        prompt_lens=np.array([1], np.int32), prompt_index=np.zeros(1, np.int32),
        logprobs=np.full(len(ids), -1, np.float32),
    )  # fmt: skip
    values = -np.arange(1, len(ids) + 1, dtype=np.float32) / 7
    vocabulary = study.doctor_arms.VOCABULARY
    vocabulary = replace(vocabulary, openers=frozenset({1}), other_roles={4093: "user"})
    return evidence(held("rollout", values, made), held("training", values, made), vocabulary=vocabulary)


@pytest.mark.parametrize(("ids", "active", "said"), [
    ([5, 6, 7, 2, 2, 2], [1, 2, 3, 4, 5], "2 end tokens are active behind an active end token"),
    ([5, 6, 7, 2], [1, 2], "the end token of all 1 sequences"),
    ([5, 6, 7, 2, 2, 2], [1, 2], None),  # cut off, and padded by that id
    ([5, 6, 2, 1, 4093, 8], [1, 2, 3, 4, 5], "1 turns of another role (user)"),
    ([5, 6, 7], [0, 1, 2], "the first token of 1 sequences is active"),
    ([5, 6, 7, 2, 2, 2], [1, 2, 3], None),
    ([5, 6, 2, 1, 4093, 8], [1, 2], None),
])  # fmt: skip
def test_masks_against_special_tokens(ids, active, said):
    named = {each.cause: each for each in examined(_one(ids, active)).findings}
    if said is None:
        assert named == {}
    else:
        assert named["masks"].evidence[0].startswith(said)


def test_padding_that_is_no_end_token():
    looked = _one([5, 6, 7, 9], [1, 2, 3])
    vocabulary = replace(looked.known.vocabulary, pad=9)
    named = examined(looked.with_known(replace(looked.known, vocabulary=vocabulary))).findings
    assert [each.cause for each in named] == ["masks"]


def test_one_masks_are_each_others_inverse():
    rollout, training = pair()
    named = found(rollout, replace(training, active_mask=~training.active_mask))
    assert "one mask is the other's inverse" in named["masks"].evidence[0]
    assert "nothing-compared" in named


@pytest.mark.parametrize("reported", ["mean_absolute", "mean_signed", "max_absolute", "k1", "k2", "k3"])
def test_a_figure_of_the_tokens_is_none_to_complain_of(reported):
    rollout, training = pair("bfloat16")
    d = (training.logprobs.astype(np.float64) - rollout.logprobs)[S.active_mask]
    right = {"mean_absolute": np.abs(d).mean(), "mean_signed": d.mean(), "max_absolute": np.abs(d).max(),
             "k1": -d.mean(), "k2": (d * d).mean() / 2, "k3": np.mean(np.exp(d) - 1 - d)}[reported]  # fmt: skip
    assert found(rollout, training, reported={reported: float(right)}) == {}
    assert "aggregate" in found(rollout, training, reported={reported: float(right) * 1.5})
    one_digit = float(f"{right:.1g}")
    assert found(rollout, training, reported={reported: one_digit}) == {}
    last = 10.0 ** math.floor(math.log10(abs(one_digit)))
    assert "aggregate" in found(rollout, training, reported={reported: float(f"{one_digit + 2 * last:.1g}")})


def test_a_figure_that_is_another_aggregate_is_recognised():
    rollout, training = pair("bfloat16")
    d = (training.logprobs.astype(np.float64) - rollout.logprobs)[S.active_mask]
    diluted = float(np.abs(d).sum() / S.num_tokens)
    (line,) = found(rollout, training, reported={"mean_absolute": diluted})["aggregate"].evidence
    assert "over all tokens, zeros where inactive" in line


def test_lengths_and_an_appended_end_token():
    longer = study.doctor_arms._grown(S, [[7]] * S.num_sequences)[0]
    values = np.full(longer.num_tokens, np.nan, np.float32)
    named = found(pair()[0], held("training", values, longer))
    assert f"each of the {S.num_sequences} is 1 longer on training" in named["lengths"].evidence[-1]
    assert "lengths" not in found(*pair())


def test_heads_of_other_dtypes_are_named():
    rollout, training = pair("bfloat16")
    training = held("training", training.logprobs, S, "bfloat16", logits="float32")
    assert list(found(rollout, training)) == ["head-rounding"]


def test_a_jump_at_a_position_is_named_with_the_first_bad_token():
    draw = np.random.default_rng(3)
    made = study._synthetic_sequences(np.full(12, 40), draw)
    position = made.positions
    rollout = np.where(made.active_mask, -draw.exponential(1, made.num_tokens), np.nan).astype(np.float32)
    noise = draw.normal(0, 2e-6, made.num_tokens) * np.where(position >= 25, 100, 1)
    sides = held("rollout", rollout, made), held("training", np.minimum(rollout + noise, 0), made)
    named = found(*sides)["position"]
    assert "from position 2" in named.evidence[0] and named.evidence[0].endswith("it is in 12 of 12 sequences")
    assert "position 2" in named.evidence[2]
    flat = draw.normal(0, 1e-4, made.num_tokens)  # the control: as large everywhere
    assert "position" not in found(sides[0], held("training", np.minimum(rollout + flat, 0), made))
