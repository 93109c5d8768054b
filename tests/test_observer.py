"""The observer tells what a module was fed, whatever anybody meant to feed it."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from libxd.runtimes.protocol import Piece, submission_batches  # noqa: E402
from libxd.scoring.observer import Observer, Row, batches, fits_mode, ran_as_asked  # noqa: E402

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
    observed = observer.observed(kept=False)
    assert (observed.token_ids == IDS).all() and observed.token_ids.dtype == np.int32
    assert (observed.positions == POSITIONS).all() and observed.positions.dtype == np.int32
    assert observed.attention_mask.all() and observed.attention_mask.dtype == np.bool_
    assert (observed.selected_ids == IDS).all()
    assert (observed.cache, len(observer.forwards)) == ("none", 1)


def test_the_watch_ends_with_the_forward():
    observer, module, fed = Observer(CU_SEQLENS), Module(), right_padded()
    with observer.on(module, ROWS_RIGHT):
        module(**fed)
    fed["input_ids"] += 1
    module(**fed)
    assert len(observer.forwards) == 1 and (observer.observed(kept=False).token_ids == IDS).all()


@pytest.mark.parametrize("cell", range(8))
def test_an_altered_id_and_a_shifted_position_are_seen_where_they_are(cell):
    row = int(cell >= 3)
    column = cell - int(CU_SEQLENS[row])
    for name in ("input_ids", "position_ids"):
        fed = right_padded()
        fed[name][row, column] += 1
        observed = seen(fed, ROWS_RIGHT).observed(kept=False)
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
    observed = seen(right_padded(), [Row(0, 0, 0, 3), Row(1, 1, 0, 4)]).observed(kept=False)
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
    assert observer.observed(kept=False).cache == "kv_cache"


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
    assert (observer.observed(kept=False).selected_ids == expected).all()
    assert (observer.observed(kept=False).token_ids == IDS).all()


# -- several ranks


def test_what_all_ranks_saw_is_what_is_seen():
    ranks = [seen(right_padded(), ROWS_RIGHT) for _ in range(2)]
    for rank in ranks:
        rank.selected(np.array([1, 6]), IDS[[1, 6]])
    observer = Observer(CU_SEQLENS)
    observer.take_over(ranks)
    shown, alone = observer.observed(kept=False), ranks[0].observed(kept=False)
    assert (shown.token_ids == IDS).all() and (shown.positions == POSITIONS).all() and shown.attention_mask.all()
    assert (shown.selected_ids == alone.selected_ids).all() and (shown.scored == alone.scored).all()
    assert shown.forwards == alone.forwards


@pytest.mark.parametrize(
    ("what", "value", "shown"),
    [("token_ids", 99, -1), ("positions", 0, -1), ("selected_ids", 99, -1), ("attention_mask", False, False),
     ("scored", False, False)],
)  # fmt: skip
@pytest.mark.parametrize("odd", [0, 1])
def test_what_one_rank_saw_otherwise_was_not_seen(what, value, shown, odd):
    ranks = [seen(right_padded(), ROWS_RIGHT) for _ in range(2)]
    for rank in ranks:
        rank.selected(np.arange(8), IDS)
    getattr(ranks[odd], what)[6] = value
    observer = Observer(CU_SEQLENS)
    observer.take_over(ranks)
    found = getattr(observer.observed(kept=False), what)
    assert found[6] == shown and (np.delete(found, 6) == np.delete(getattr(ranks[1 - odd], what), 6)).all()


# -- what the forwards tell


PROMPTS = np.array([2, 3])
DECODED = [[Piece(0, 0, 2), Piece(1, 0, 3)], [Piece(0, 2, 1), Piece(1, 3, 1)], [Piece(1, 4, 1)]]
WHOLE = [[Piece(0, 0, 3), Piece(1, 0, 5)]]


@pytest.mark.parametrize(
    ("forwards", "modes"),
    [
        (DECODED, {"decode"}),
        (WHOLE, {"prefill", "teacher_forced"}),
        ([[piece] for piece in WHOLE[0]], {"prefill", "teacher_forced"}),
        (DECODED[1:], {"decode"}),  # prompts that came from elsewhere
        ([DECODED[0], [Piece(0, 2, 1), Piece(1, 3, 2)]], set()),  # two response tokens at once
        ([[Piece(0, 0, 3), Piece(1, 0, 3)], *DECODED[1:]], set()),  # a response token in the prompts' forward
        (DECODED[:2], set()),  # the last one left out
        ([*DECODED, [Piece(1, 4, 1)]], set()),  # one fed twice
        ([DECODED[0], DECODED[2], DECODED[1]], set()),  # out of order
    ],
)
def test_how_the_tokens_went_through_shows_by_what_was_fed_together(forwards, modes):
    asked = ("decode", "prefill", "teacher_forced")
    assert {mode for mode in asked if fits_mode(mode, forwards, CU_SEQLENS, PROMPTS)} == modes


def test_where_nothing_is_behind_a_prompt_every_mode_fits():
    assert all(fits_mode(mode, WHOLE, CU_SEQLENS, np.array([3, 5])) for mode in ("decode", "prefill"))


def test_keys_outlived_a_forward_where_a_sequence_was_gone_on_with():
    observer = Observer(CU_SEQLENS)
    for pieces in WHOLE:
        observer.forward(pieces, IDS, POSITIONS, np.ones(8, bool))
    assert observer.observed(kept=False).cache == "none"
    observer.forward([Piece(1, 3, 2)], IDS[6:], POSITIONS[6:], np.ones(2, bool))
    assert observer.observed(kept=False).cache == "kv_cache"


def steps(*batches):
    return [[Piece(s, 0, 2) for s in batch] for batch in batches]


@pytest.mark.parametrize(
    ("forwards", "found"),
    [
        (steps([0, 1], [2, 3]), [[0, 1], [2, 3]]),
        (steps([2, 3], [0, 1]), [[2, 3], [0, 1]]),
        (steps([0, 1, 2], [0, 2], [2]), [[0, 1, 2]]),  # finished ones leave
        (steps([0], [2], [0, 1, 2, 3]), [[0, 1, 2, 3]]),  # prompts that are shared go first
        (steps([1], [0], [1, 0], [2]), [[1, 0], [2]]),
        (steps([0, 1], [1, 2], [2, 3]), [[0, 1, 2, 3]]),
    ],
)
def test_batches_are_what_met_in_a_forward(forwards, found):
    assert batches(forwards) == found


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 15, 16, 17, 40])
@pytest.mark.parametrize("total", [1, 2, 3, 12, 16, 17])
def test_rotated_submission_gives_sequences_other_neighbours(total, size):
    canonical, rotated = (submission_batches(total, order, size) for order in ("canonical", "rotated"))
    assert [len(batch) for batch in canonical] == [len(batch) for batch in rotated]
    assert sorted(s for batch in rotated for s in batch) == list(range(total))
    assert (rotated == canonical) == (total == 1)
    if 1 < size < total:  # else a batch holds one, or all
        together = {frozenset(batch) for batch in canonical}
        assert not together & {frozenset(batch) for batch in rotated}


def test_another_order_and_other_company_are_told_apart():
    asked = [[0, 1], [2, 3]]
    assert ran_as_asked(asked, asked, {0, 1, 2, 3}) == (True, True)
    assert ran_as_asked(asked, [[2, 3], [0, 1]], {0, 1, 2, 3}) == (True, False)
    assert ran_as_asked(asked, [[1, 0], [2, 3]], {0, 1, 2, 3}) == (True, False)
    assert ran_as_asked(asked, [[0, 1, 2, 3]], {0, 1, 2, 3}) == (False, True)
    assert ran_as_asked(asked, [[0], [1], [2, 3]], {2, 3}) == (True, True)  # prompts alone tell nothing
