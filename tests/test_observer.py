"""The observer tells what a module was fed, whatever anybody meant to feed it."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from libxd.scoring.observer import Observer, Row  # noqa: E402

#: two sequences, of 3 and 5 tokens
CU_SEQLENS = np.array([0, 3, 8])
IDS = np.array([11, 12, 13, 21, 22, 23, 24, 25], np.int32)
POSITIONS = np.array([0, 1, 2, 0, 1, 2, 3, 4], np.int32)
LENGTHS = (3, 5)
WIDTH = 5


class Module(torch.nn.Module):
    """Takes what a transformers model takes."""

    def forward(self, input_ids, position_ids, attention_mask):
        """Nothing is computed: it is the inputs that matter."""


def right_padded() -> dict[str, torch.Tensor]:
    """Both sequences in one batch: ids, positions and masks [2, 5], padded on the right."""
    fed = {name: torch.zeros(2, WIDTH, dtype=torch.long) for name in ("input_ids", "position_ids", "attention_mask")}
    for row, length in enumerate(LENGTHS):
        cells = slice(CU_SEQLENS[row], CU_SEQLENS[row + 1])
        fed["input_ids"][row, :length] = torch.from_numpy(IDS[cells].astype(np.int64))
        fed["position_ids"][row, :length] = torch.from_numpy(POSITIONS[cells].astype(np.int64))
        fed["attention_mask"][row, :length] = 1
    return fed


def left_padded() -> dict[str, torch.Tensor]:
    """The same, padded on the left."""
    fed = right_padded()
    return {name: torch.stack([x[0].roll(2), x[1]]) for name, x in fed.items()}


ROWS_RIGHT = [Row(0, 0, 0, 3), Row(1, 1, 0, 5)]
ROWS_LEFT = [Row(0, 0, 0, 3, 2), Row(1, 1, 0, 5)]


def seen(fed: dict[str, torch.Tensor], rows: list[Row], observer: Observer | None = None) -> Observer:
    observer, module = observer or Observer(CU_SEQLENS), Module()
    with observer.on(module, rows):
        module(**fed)
    return observer


@pytest.mark.parametrize(("fed", "rows"), [(right_padded(), ROWS_RIGHT), (left_padded(), ROWS_LEFT)])
def test_what_is_fed_whole_is_seen_whole(fed, rows):
    observer = seen(fed, rows)
    observed = observer.observed("none")
    assert (observed.token_ids == IDS).all() and observed.token_ids.dtype == np.int32
    assert (observed.positions == POSITIONS).all() and observed.positions.dtype == np.int32
    assert observed.attention_mask.all() and observed.attention_mask.dtype == np.bool_
    assert (observed.selected_ids == IDS).all()
    assert (observed.cache, observer.forwards) == ("none", 1)


def test_the_watch_ends_with_the_forward():
    observer, module, fed = Observer(CU_SEQLENS), Module(), right_padded()
    with observer.on(module, ROWS_RIGHT):
        module(**fed)
    fed["input_ids"] += 1
    module(**fed)
    assert observer.forwards == 1 and (observer.observed("none").token_ids == IDS).all()


@pytest.mark.parametrize("cell", range(8))
def test_an_altered_id_and_a_shifted_position_are_seen_where_they_are(cell):
    row = int(cell >= 3)
    column = cell - int(CU_SEQLENS[row])
    for name in ("input_ids", "position_ids"):
        fed = right_padded()
        fed[name][row, column] += 1
        observed = seen(fed, ROWS_RIGHT).observed("none")
        array, right = (observed.token_ids, IDS) if name == "input_ids" else (observed.positions, POSITIONS)
        assert np.flatnonzero(array != right).tolist() == [cell]
        other, right = (observed.positions, POSITIONS) if name == "input_ids" else (observed.token_ids, IDS)
        assert (other == right).all()


def test_padding_that_is_attended_to_is_seen():
    fed = left_padded()
    fed["attention_mask"][0, 1] = 1  # before the first sequence, so that each of its tokens sees it
    assert seen(fed, ROWS_LEFT).attention_mask.tolist() == [False] * 3 + [True] * 5
    fed = right_padded()
    fed["attention_mask"][0, 4] = 1  # behind it: no token of the sequence looks there
    assert seen(fed, ROWS_RIGHT).attention_mask.all()


def test_a_hidden_token_is_seen():
    fed = right_padded()
    fed["attention_mask"][1, 2] = 0
    assert seen(fed, ROWS_RIGHT).attention_mask.tolist() == [True] * 3 + [True, True, False, True, True]


def test_an_unfed_token_keeps_minus_one():
    observed = seen(right_padded(), [Row(0, 0, 0, 3), Row(1, 1, 0, 4)]).observed("none")
    assert (observed.token_ids[7], observed.positions[7], observed.attention_mask[7]) == (-1, -1, False)
    assert observed.selected_ids[7] == -1
    assert (observed.token_ids[:7] == IDS[:7]).all()


# -- steps through a cache: a prompt of two tokens each, then a token a step


def prefilled() -> Observer:
    return seen({name: fed[:, :2] for name, fed in right_padded().items()}, [Row(0, 0, 0, 2), Row(1, 1, 0, 2)])


def step(observer: Observer, column: int, **changes: torch.Tensor) -> None:
    """Feed the second sequence's token at `column` under a mask over the cache so far and itself."""
    fed = {
        "input_ids": torch.tensor([[int(IDS[3 + column])]]),
        "position_ids": torch.tensor([[column]]),
        "attention_mask": torch.ones(1, column + 1, dtype=torch.long),
    }
    seen({**fed, **changes}, [Row(0, 1, column, 1)], observer)


def test_decoding_steps_are_seen_token_by_token():
    observer = prefilled()
    step(observer, 2)
    assert observer.token_ids.tolist() == [11, 12, -1, 21, 22, 23, -1, -1]
    step(observer, 3)
    step(observer, 4)
    assert (observer.token_ids[3:] == IDS[3:]).all() and (observer.positions[3:] == POSITIONS[3:]).all()
    assert observer.attention_mask.tolist() == [True, True, False] + [True] * 5
    assert observer.observed("kv_cache").cache == "kv_cache"


@pytest.mark.parametrize(
    ("mask", "what"),
    [
        ([0, 1, 1], "a token of the cache is hidden"),
        ([1, 1, 0], "the token itself is hidden"),
        ([1, 1, 1, 1], "a column of padding is seen"),
        ([1, 0, 1, 1], "padding is seen instead of a token: as many as there should be"),
        ([1, 1], "the cache has lost a token"),
    ],
)
def test_a_wrong_view_of_the_cache_is_seen(mask, what):
    observer = prefilled()
    step(observer, 2, attention_mask=torch.tensor([mask]))
    assert not observer.attention_mask[5], what
    right = prefilled()
    step(right, 2, attention_mask=torch.tensor([[0, 0, 1, 1, 1]]))  # negative control: padding that is not seen
    assert right.attention_mask[5]


def test_a_token_that_the_sequence_itself_hides_stays_hidden_without_spoiling_the_rest():
    fed = {name: tensor[:, :2].clone() for name, tensor in right_padded().items()}
    fed["attention_mask"][1, 0] = 0
    observer = seen(fed, [Row(0, 0, 0, 2), Row(1, 1, 0, 2)])
    step(observer, 2, attention_mask=torch.tensor([[0, 1, 1]]))
    assert observer.attention_mask[3:6].tolist() == [False, True, True]
    step(observer, 3)  # now it is seen after all
    assert not observer.attention_mask[6]


def test_shared_prefixes_are_what_was_fed_at_their_origin():
    observer = Observer(np.array([0, 4, 8]))
    fed = {
        "input_ids": torch.tensor([[5, 6, 7]]),
        "position_ids": torch.tensor([[0, 1, 9]]),
        "attention_mask": torch.tensor([[1, 1, 0]]),
    }
    seen(fed, [Row(0, 0, 0, 3)], observer)
    observer.shared(1, 0, 3)
    assert observer.token_ids.tolist() == [5, 6, 7, -1, 5, 6, 7, -1]
    assert observer.positions.tolist() == [0, 1, 9, -1, 0, 1, 9, -1]
    assert observer.attention_mask.tolist() == [True, True, False, False] * 2


def test_selected_ids_are_those_whose_logprobs_were_taken():
    observer = seen(right_padded(), ROWS_RIGHT)
    observer.selected(np.array([1, 6]), np.array([12, 99]))
    expected = IDS.copy()
    expected[6] = 99
    assert (observer.observed("none").selected_ids == expected).all()
    assert (observer.observed("none").token_ids == IDS).all()
