"""How well xd-doctor tells causes apart, and how often it speaks of nothing: the tables of docs/doctor.md.

    python -P dev/doctor_study.py crosstalk SEQUENCES SCORES
    python -P dev/doctor_study.py clean SEQUENCES SCORES [SEQUENCES SCORES]...
    python -P dev/doctor_study.py freeze SEQUENCES SCORES OUT

SCORES is what dev/doctor_arms.py wrote for SEQUENCES. `crosstalk` shows every detector on every cause that was made:
what is not named was silent. `clean` counts alarms on pairs without a mistake. `freeze` writes a part of the
scorings into one file, which the tests read.
"""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "dev")]
import doctor_arms  # noqa: E402
from doctor_arms import FEWER, VOCABULARY, Scorer  # noqa: E402
from doctor_fixtures import Held, evidence, held, subset  # noqa: E402

from libxd import sequences, tensors  # noqa: E402
from libxd.doctor.registry import Examined, examined  # noqa: E402
from libxd.doctor.rescoring import Rescored  # noqa: E402
from libxd.sequences import Sequences  # noqa: E402
from libxd.tensors import TensorFile  # noqa: E402

DTYPES = ("float32", "bfloat16")
_MOST_NAMED = 8


@dataclass
class Made:
    """A pair whose cause is known. expected: causes that name it."""

    name: str
    dtype: str
    rollout: Held
    training: Held
    expected: tuple[str, ...]
    known: dict[str, Any] = field(default_factory=dict)


#: what names a mistake of dev/doctor_arms.py, without and with a third scorer; () where no cause of its own is named
EXPECTED: dict[str, tuple[str, ...]] = {
    "attention_unscaled": ("not-these-tokens", "more-than-rounding"),
    "label_shift": ("labels", "not-these-tokens"),
    "logits_bfloat16": ("head-rounding", "more-than-rounding"),
    "one_token": ("few-tokens",),
    "other_id": ("more-than-rounding",),
    "positions_shifted": ("position", "more-than-rounding"),
    "positions_late": ("position",),
    "rope_scaled": ("more-than-rounding",),
    "temperature_low": ("temperature", "temperature-like", "more-than-rounding"),
    "double_bos": ("double-bos", "more-than-rounding"),
    "left_padding": ("padded-batch", "outlying-sequences"),
    "packed": ("pack",),
    "one_prompt": ("outlying-prompt",),
    "weight": ("more-than-rounding",),
    "half_cache": ("more-than-rounding",),
    "norm_epsilon": ("more-than-rounding",),
    "rotary_bfloat16": ("more-than-rounding",),
    "stale_more": ("more-than-rounding",),
    "stale_weights": (),
}
OF_LOGITS = {
    "temperature": ("temperature", "temperature-like"), "logprobs over": ("logprobs-scaled", "temperature-like"),
    "padded by": ("padded-vocabulary",), "top-p": ("top-p", "truncation"), "top-k": ("top-k", "truncation"),
    "logits in": ("head-rounding", "more-than-rounding"), "the likeliest": ("wrong-token",),
    "the next": ("labels", "not-these-tokens"),
}  # fmt: skip


def made(scorer: Scorer) -> Iterator[Made]:
    """Every cause, with the mistake on the training side, and the right side decoding."""
    s = scorer.sequences
    for dtype in DTYPES:
        right = held("rollout", scorer.right("decode-8", dtype), s, dtype)
        for name in doctor_arms.arms(dtype):
            yield Made(name, dtype, right, held("training", scorer.wrong(name, dtype), s, dtype), EXPECTED[name])
        # in float32 the third scorer is of that very pass: there with another engine's rounding, to be fair
        moved = np.zeros(s.num_tokens, np.float32)
        if dtype == "float32":
            moved = scorer.right("pass-8", dtype) - scorer.of_logits(dtype, plain=True)["plain"]
        for name, column in scorer.of_logits(dtype).items():
            expected = next(causes for word, causes in OF_LOGITS.items() if name.startswith(word))
            yield Made(name, dtype, right, held("training", np.minimum(column + moved, 0), s, dtype),
                       expected)  # fmt: skip
        yield from _files(scorer, dtype, right)


def _files(scorer: Scorer, dtype: str, right: Held) -> Iterator[Made]:
    """What goes wrong between an engine and a file."""
    s, other = scorer.sequences, scorer.right("pass-8", dtype)
    active = np.flatnonzero(s.active_mask)

    def pair(name: str, values: np.ndarray, expected: tuple[str, ...], **changed: Any) -> Made:
        return Made(name, dtype, right, held("training", values, s, dtype, **changed), expected)

    for fill in (0.0, 1.0, float(np.finfo(np.float32).min), float("nan")):
        filled = other.copy()
        filled[active[::40]] = fill
        yield pair(f"fill value {fill:.3g}", filled, ("fill-values",))
    appended = other.copy()
    appended[s.cu_seqlens[1:] - 1] = 0.0
    yield pair("0.0 at each last token", appended, ("fill-values",))
    yield pair("moved by one", _moved(other, s), ("lag",))
    yield pair("4 decimals", np.round(other.astype(np.float64), 4), ("rounded-on-the-way",))
    yield pair("2 decimals", np.round(other.astype(np.float64), 2), ("rounded-on-the-way",))
    yield pair("stored in bfloat16", _bfloat16(other), ("rounded-on-the-way",))
    yield pair("stored in float16", other.astype(np.float16), ("rounded-on-the-way",))
    zeros = np.nan_to_num(other)
    everywhere = held("rollout", np.nan_to_num(right.logprobs), s, dtype, active_mask=~s.active_mask)
    yield Made("mask inverted", dtype, everywhere, held("training", zeros, s, dtype, active_mask=~s.active_mask),
               ("masks", "fill-values"), {"sequences": s})  # fmt: skip
    ends = s.active_mask & ~np.isin(s.token_ids, list(VOCABULARY.eos))
    if (ends != s.active_mask).any():
        sides = [held(side, values, s, dtype, active_mask=ends)
                 for side, values in (("rollout", right.logprobs), ("training", other))]  # fmt: skip
        yield Made("end token left out", dtype, *sides, ("masks",), {"vocabulary": VOCABULARY})
    yield pair("mask of one side moved", other, ("masks",), active_mask=np.roll(s.active_mask, 1))
    yield pair("nothing active", other, ("nothing-compared", "masks"), active_mask=np.zeros_like(s.active_mask))
    yield pair("other ids", other, ("token-ids",), token_ids=np.where(s.active_mask, s.token_ids ^ 1, s.token_ids))
    foreign = s.token_ids.copy()
    foreign[active[5]] = VOCABULARY.size
    beyond = held("rollout", right.logprobs, s, dtype, token_ids=foreign)
    yield Made("id beyond the vocabulary", dtype, beyond, held("training", other, s, dtype, token_ids=foreign),
               ("id-beyond-vocabulary",), {"vocabulary": VOCABULARY})  # fmt: skip
    grown, places = doctor_arms.double_bos(s)
    values = np.full(grown.num_tokens, np.nan, np.float32)
    values[places] = other
    yield Made("begin token twice, in the file", dtype, right, held("training", values, grown, dtype), ("double-bos",))
    exact = float(np.abs(np.exp(other[active]) - np.exp(right.logprobs[active])).mean())
    yield Made("probability called logprob", dtype, right, held("training", other, s, dtype), ("aggregate",),
               {"reported": {"mean_absolute": exact}})  # fmt: skip
    yield pair("declared temperature 0.7", other, ("semantics", "temperature"), semantics={"temperature": 0.7})
    copy = held("training", right.logprobs, s, "float16")
    yield Made("copied from the rollout", dtype, right, copy, ("copied",))


def _moved(values: np.ndarray, s: Any) -> np.ndarray:
    """Each sequence's values one place later; what is pushed out comes back at its first active token."""
    moved = values.copy()
    for sequence in range(s.num_sequences):
        cells = np.arange(*s.cu_seqlens[sequence : sequence + 2])
        cells = cells[s.active_mask[cells]]
        moved[cells] = np.roll(values[cells], 1)
    return moved


def _bfloat16(values: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def crosstalk(scorer: Scorer) -> None:
    third = scorer.third()
    rows: dict[str, dict[str, str]] = {}
    counts: Counter[str] = Counter()
    named: dict[str, tuple[list[str], list[str]]] = {}
    for each in made(scorer):
        for which, known in (("", None), (" +", third)):
            found = look(each, known)
            rows.setdefault(each.name, {})[each.dtype + which] = _named(found, each.expected)
            counts[f"{'with' if known else 'without'} a third scorer: {_how(found, each.expected)}"] += 1
            for finding in found.findings if known else ():
                side = named.setdefault(finding.cause, ([], []))[finding.cause not in each.expected]
                side.append(f"{each.name} ({each.dtype})")
    columns = [dtype + which for which in ("", " +") for dtype in DTYPES]
    print(f"| made | {' | '.join(columns)} |\n{'|---' * (1 + len(columns))}|")
    for name, cells in rows.items():
        shown = [cells.get(column, "") for column in columns]
        shown = [text if i < len(DTYPES) or text != shown[i - len(DTYPES)] else "same" for i, text in enumerate(shown)]
        print(f"| {name} | {' | '.join(shown)} |")
    print("\n| named | where it was made | elsewhere |\n|---|---|---|")
    for cause, (rightly, elsewhere) in sorted(named.items()):
        where = ", ".join(elsewhere) if len(elsewhere) <= _MOST_NAMED else f"{len(elsewhere)} pairs"
        print(f"| {cause} | {len(rightly)} | {where or '-'} |")
    print("\n" + "\n".join(f"{name} {count}" for name, count in sorted(counts.items())), file=sys.stderr)


def _how(found: Examined, expected: tuple[str, ...]) -> str:
    """Where the made cause stands among what is named."""
    causes = [finding.cause for finding in found.findings]
    if not causes:
        return "silent"
    return "first" if causes[0] in expected else "later" if set(causes) & set(expected) else "other"


def look(each: Made, third: Rescored | None) -> Examined:
    return examined(evidence(each.rollout, each.training, **{"rescored": third, **each.known}))


def _named(found: Examined, expected: tuple[str, ...]) -> str:
    said = [f"**{f.cause}**" if f.cause in expected else f.cause for f in found.findings]
    return "<br>".join(said) or "-"


# -- pairs without a mistake


def clean(scorers: list[Scorer]) -> None:
    total: Counter[str] = Counter()
    alarms: list[str] = []
    for kind, pairs in (("real", real(scorers)), ("by prompt", by_prompt(scorers)), ("third scorer", thirds(scorers)),
                        ("synthetic", synthetic(scorers))):  # fmt: skip
        for name, rollout, training, known in pairs:
            total[kind] += 1
            found = examined(evidence(rollout, training, **known)).findings
            alarms += [f"{kind}: {name}: {finding.cause}: {finding.evidence[0]}" for finding in found]
            for finding in found:
                total[f"{kind}, alarm {finding.cause}"] += 1
    print("| pairs | how many | alarms |\n|---|---|---|")
    for kind in ("real", "by prompt", "third scorer", "synthetic"):
        causes = {key.rpartition(" ")[2]: n for key, n in total.items() if key.startswith(f"{kind}, alarm")}
        print(f"| {kind} | {total[kind]} | {', '.join(f'{c} {n}' for c, n in causes.items()) or '0'} |")
    print("\n".join(alarms[:60]), file=sys.stderr)


Pair = tuple[str, Held, Held, dict[str, Any]]


def _rights(scorer: Scorer) -> list[tuple[str, str, np.ndarray]]:
    return [(name, dtype, scorer.right(name, dtype)) for name, dtype in scorer.rights()]


def _cut(scorer: Scorer, a: Any, b: Any, chosen: list[int], most: int | None) -> Pair:
    part, cells = subset(scorer.sequences, chosen, most)
    name = f"{a[0]}-{a[1]} {b[0]}-{b[1]}, sequences {chosen}, at most {most}"
    return (name, held("rollout", a[2][cells], part, a[1]), held("training", b[2][cells], part, b[1]),
            {"sequences": part, "vocabulary": VOCABULARY})  # fmt: skip


def real(scorers: list[Scorer], draws: int = 8) -> Iterator[Pair]:
    """Every two right scorings, either way round: all sequences, and drawn ones, cut after a drawn number of tokens."""
    for scorer in scorers:
        draw = np.random.default_rng(1)
        count = scorer.sequences.num_sequences
        for a, b in itertools.permutations(_rights(scorer), 2):
            yield _cut(scorer, a, b, list(range(count)), None)
            for _ in range(draws):
                size = int(draw.choice([2, 4, 6, 8, 12]))
                chosen = sorted(draw.choice(count, min(size, count), replace=False).tolist())
                yield _cut(scorer, a, b, chosen, int(draw.choice([4, 8, 16, 32, 64])))


def by_prompt(scorers: list[Scorer]) -> Iterator[Pair]:
    """The samples of one prompt, of all but one, of either half of the prompts."""
    for scorer in scorers:
        index = scorer.sequences.prompt_index
        prompts = np.unique(index)
        half = prompts.size // 2
        groups = [*([p] for p in prompts), *(prompts[prompts != p] for p in prompts), prompts[:half], prompts[half:]]
        for a, b in itertools.combinations(_rights(scorer), 2):
            for group in groups:
                yield _cut(scorer, a, b, np.flatnonzero(np.isin(index, group)).tolist(), None)


def thirds(scorers: list[Scorer]) -> Iterator[Pair]:
    """Every two right scorings beside the third scorer, where it was asked."""
    for scorer in scorers:
        if not scorer.has_third():
            continue
        third = scorer.third()
        everything = list(range(scorer.sequences.num_sequences))
        for a, b in itertools.combinations(_rights(scorer), 2):
            name, rollout, training, known = _cut(scorer, a, b, everything, None)
            yield name, rollout, training, {**known, "rescored": third}


def synthetic(scorers: list[Scorer], pairs: int = 1500) -> Iterator[Pair]:
    """Noise fitted on real pairs: each token's |d| is drawn from the real ones of tokens as likely, times a Student t
    factor in a third of the pairs and a factor a sequence (log-normal), with a random sign; 2 to 64 sequences of 4 to
    200 tokens."""
    pools = []
    for scorer in scorers:
        rights = {(name, dtype): values for name, dtype, values in _rights(scorer)}
        if not all((name, "float16") in rights for name in FEWER):
            continue
        cells = np.flatnonzero(scorer.sequences.active_mask)
        for (first, second), dtypes in itertools.product(
            (("decode-8", "pass-8"), ("decode-8", "eager-8"), ("pass-8", "eager-8")),
            (("float32",) * 2, ("bfloat16",) * 2, ("float16",) * 2, ("bfloat16", "float32")),
        ):
            r, t = rights[first, dtypes[0]][cells], rights[second, dtypes[1]][cells]
            order = np.argsort(r)
            pools.append((dtypes, r[order], np.abs(t - r)[order]))
    draw = np.random.default_rng(2)
    for number in range(pairs if pools else 0):
        dtypes, levels, sizes = pools[number % len(pools)]
        lengths = draw.integers(4, 201, int(draw.choice([2, 4, 8, 16, 32, 64])))
        count = int(lengths.sum())
        at = draw.integers(0, levels.size, count)
        near = np.clip(at + draw.integers(-20, 21, count), 0, levels.size - 1)
        d = sizes[near] * draw.choice([-1.0, 1.0], count)
        d *= np.repeat(np.exp(draw.normal(0, 0.25, lengths.size)), lengths)
        if number % 3 == 0:
            d *= np.abs(draw.standard_t(4, count))
        r = np.minimum(levels[at], -1e-6)
        made = _synthetic_sequences(lengths, draw)
        values = [np.full(made.num_tokens, np.nan, np.float32) for _ in range(2)]
        values[0][made.active_mask], values[1][made.active_mask] = r, np.where(r + d > 0, r - d, r + d)
        yield (f"{number} of {dtypes}", held("rollout", values[0], made, dtypes[0]),
               held("training", values[1], made, dtypes[1]), {"sequences": made})  # fmt: skip


def _synthetic_sequences(lengths: np.ndarray, draw: np.random.Generator) -> Any:
    from libxd.sequences import Sequences

    prompts = draw.integers(3, 9, lengths.size)
    whole = lengths + prompts
    positions = np.concatenate([np.arange(n) for n in whole])
    active = positions >= np.repeat(prompts, whole)
    return Sequences(
        token_ids=draw.integers(10, 40000, positions.size).astype(np.int32),
        cu_seqlens=np.cumsum([0, *whole], dtype=np.int64), active_mask=active,
        attention_mask=np.ones(positions.size, bool), positions=positions.astype(np.int32),
        prompt_lens=prompts.astype(np.int32), prompt_index=np.arange(lengths.size, dtype=np.int32) // 2,
        logprobs=np.where(active, np.float32(-1), np.float32(np.nan)),
    )  # fmt: skip


# -- a part of it for the tests


class FrozenScores:
    """What a `Scorer` gives, from the one file that `freeze` wrote."""

    def __init__(self, path: Path) -> None:
        with TensorFile(path) as file:
            self._held = {name: np.array(file.array(name)) for name in file.names}
        self.sequences = Sequences(**{name: self._held[f"sequences/{name}"] for name in sequences.LAYOUT})

    def _whole(self, name: str) -> np.ndarray:
        """float32 [T] of what was kept of the responses alone."""
        whole = np.full(self.sequences.num_tokens, np.nan, np.float32)
        whole[self.sequences.active_mask] = self._held[name]
        return whole

    def has_third(self) -> bool:
        return True

    def rights(self) -> list[tuple[str, str]]:
        names = [name.split("/")[1:] for name in self._held if name.startswith("right/")]
        return [(name, dtype) for name, dtype in names if name != "decode-1"]

    def right(self, name: str, dtype: str) -> np.ndarray:
        return self._whole(f"right/{name}/{dtype}")

    def wrong(self, name: str, dtype: str) -> np.ndarray:
        return self._whole(f"wrong/{name}/{dtype}")

    def of_logits(self, dtype: str, plain: bool = False) -> dict[str, np.ndarray]:
        begin = f"{'plain' if plain else 'logits'}/{dtype}/"
        return {name.removeprefix(begin): self._whole(name) for name in self._held if name.startswith(begin)}

    def third(self) -> Rescored:
        columns = {name.removeprefix("third/"): values for name, values in self._held.items() if "third/" in name}
        parts = {name: columns.pop(name) for name in ("cells", "plain", "logit", "log_sum_exp", "by_temperature")}
        return Rescored(**parts, otherwise=columns)


def freeze(scorer: Scorer, out: Path, most: int = 20) -> None:
    """Every sequence, cut after `most` tokens of its response."""
    part, cells = subset(scorer.sequences, list(range(scorer.sequences.num_sequences)), most)
    kept: dict[str, np.ndarray] = {f"sequences/{name}": getattr(part, name) for name in sequences.LAYOUT}
    answers = cells[part.active_mask]
    for name, dtype, values in _rights(scorer):
        kept[f"right/{name}/{dtype}"] = values[answers]
    kept["right/decode-1/float32"] = scorer.one_by_one()[answers]
    for dtype in DTYPES:
        for name in doctor_arms.arms(dtype):
            kept[f"wrong/{name}/{dtype}"] = scorer.wrong(name, dtype)[answers]
        for kind, plain in (("logits", False), ("plain", True)):
            for name, values in scorer.of_logits(dtype, plain).items():
                kept[f"{kind}/{dtype}/{name}"] = values[answers]
    third = scorer.third()
    inside = np.isin(third.cells, cells)
    kept["third/cells"] = np.searchsorted(cells, third.cells[inside])
    for name in ("plain", "logit", "log_sum_exp", "by_temperature"):
        kept[f"third/{name}"] = getattr(third, name)[inside]
    for name, column in third.otherwise.items():
        kept[f"third/{name}"] = column[inside].astype(np.float32)
    tensors.write(out, dict(sorted(kept.items(), key=lambda item: -item[1].dtype.itemsize)), {})


def main() -> None:
    what, *places = sys.argv[1:]
    if what == "freeze":
        freeze(Scorer(Path(places[0]), Path(places[1])), Path(places[2]))
        return
    scorers = [Scorer(Path(a), Path(b)) for a, b in zip(places[::2], places[1::2], strict=True)]
    if what == "clean":
        clean(scorers)
    else:
        crosstalk(scorers[0])


if __name__ == "__main__":
    main()
