"""What a pair is credited with: advantages made of rewards, and rewards that none can be made of."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from impact_fixtures import ACTIVE, SEQUENCE_OF, TOKENS, figures, layout, pair_of, write
from tolerances import FUNCTIONAL_RELATIVE

from libxd import credit, impact
from libxd.errors import Status, XdError
from libxd.functional.estimators import ESTIMATORS, NEEDS


@pytest.fixture
def pair(tmp_path):
    return pair_of(tmp_path)


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
        ({"group": "nobody"}, Status.INVALID, "has no nobody"),
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
    with pytest.raises(XdError, match=r"names no group|uid is null") as caught:
        credit.of_rewards(write(tmp_path / name, *rows), layout(pair), group="uid")
    assert caught.value.status == Status.INVALID
    named = [re.sub(r"^1, *$", "1,b", row).replace("null", "0").replace('""', '"b"') for row in rows]
    credit.of_rewards(write(tmp_path / f"named-{name}", *named), layout(pair), group="uid")


@pytest.mark.parametrize("estimator", [name for name in ESTIMATORS if NEEDS[name] != "values"])
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


def test_gae_has_the_reward_at_a_sequences_last_active_token(tmp_path, pair):
    path = write(tmp_path / "r.csv", "reward", 1, 2, 3, 4, 5)
    values = np.random.default_rng(1).normal(size=TOKENS)
    critic = write(tmp_path / "v.csv", "value", *values)
    found = credit.of_values(path, critic, layout(pair), gamma=0.9, lam=0.8)
    assert (found.level, found.estimator, found.groups) == ("token", "gae", None)
    assert np.isnan(found.values).tolist() == (~ACTIVE).tolist()
    for sequence, reward in enumerate((1, 2, 3, 4, 5)):
        places = np.flatnonzero(ACTIVE & (sequence == SEQUENCE_OF))
        after, advantage = 0.0, 0.0
        for turn, place in enumerate(places[::-1]):
            delta = reward * (turn == 0) + 0.9 * after - values[place]
            advantage = delta + 0.9 * 0.8 * advantage
            assert found.values[place] == pytest.approx(advantage, rel=FUNCTIONAL_RELATIVE)
            after = values[place]
    plain = credit.of_values(path, critic, layout(pair)).values
    assert not np.allclose(plain[ACTIVE], found.values[ACTIVE])  # the control: the discounts say something
    active = np.flatnonzero(ACTIVE & (SEQUENCE_OF == 3))
    assert plain[active] == pytest.approx(4 - values[active], rel=FUNCTIONAL_RELATIVE)  # the reward to go
    late = credit.of_values(path, critic, layout(pair), overlong=(6, 4)).values
    assert late[active] == pytest.approx(plain[active] - 1, rel=FUNCTIONAL_RELATIVE)  # six tokens: the whole punishment
    alone = np.zeros(TOKENS)
    alone[[active[-1] for active in (np.flatnonzero(ACTIVE & (s == SEQUENCE_OF)) for s in (0, 1, 3, 4))]] = 1, 2, 4, 5
    tokens = credit.of_values(write(tmp_path / "t.csv", "reward", *alone), critic, layout(pair)).values
    np.testing.assert_array_equal(tokens, plain)


def test_values_that_no_advantage_can_be_made_of(tmp_path, pair):
    path, critic = write(tmp_path / "r.csv", "reward", *range(5)), write(tmp_path / "v.csv", "value", *range(TOKENS))
    for values, given, status, what in (
        (write(tmp_path / "s.csv", "value", *range(5)), {}, Status.INVALID, "a token's, one each"),
        (critic, {"gamma": 1.5}, Status.USAGE, "from 0 to 1"),
        (critic, {"lam": -0.1}, Status.USAGE, "from 0 to 1"),
        (critic, {"lam": math.nan}, Status.USAGE, "from 0 to 1"),
        (critic, {"overlong": (3, 4)}, Status.USAGE, "cache"),
    ):
        with pytest.raises(XdError, match=what) as caught:
            credit.of_values(path, values, layout(pair), **given)
        assert caught.value.status == status
