"""One change that makes a float32 model's logprobs a side's: temperature, truncation, labels, head, padding, BOS."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from libxd.doctor import truncation
from libxd.doctor.evidence import Evidence
from libxd.doctor.finding import FIT, Finding, Rule
from libxd.doctor.rescoring import TEMPERATURES
from libxd.doctor.statistics import medians_by, two_sided
from libxd.rundir import SIDES

_HALVED = 0.5
_LEFT = 0.125  # nats: more than bfloat16 leaves
#: nats: what float32 rounding makes of a mean
_LEAST = 1.5e-5
_SCALES = ("temperature", "logprobs-scaled")
_AGREE = 0.9  # of the sequences
_PADS = tuple(2**k for k in range(5, 18))
#: of log T: below, a fit to rounding is as far from 1
_LEAST_LOG_T = 0.01
_P = 0.01

RULE = Rule(
    "third-scorer",
    ("temperature", "logprobs-scaled", "top-p", "top-k", "labels", "wrong-token", "head-rounding",
     "padded-vocabulary", "double-bos"),
    "Each side beside a float32 model with one thing done otherwise: 28 temperatures (a parabola between them), "
    "logprobs times a factor, 5 nuclei, 4 top-k, labels or logits one place off, the likeliest token's logprob, "
    "logits rounded to bfloat16 or float16, 2^5 to 2^17 padded columns, one more begin token. The one with the "
    "smallest median |residual| is named where that is more than 1.5e-5 nats with nothing done otherwise, at most "
    "half of that with it, at most 0.125 nats, and smaller in 90 % of the sequences. A temperature is also named "
    "where it leaves more than half: when it is 1 % or more from the declared one, and each sequence's own best "
    "temperature falls on that side of it in so many sequences that coins would do so once in 100 times. Neither it "
    "nor a factor is named where truncation speaks.",
    "Of the clean scorings none (docs/doctor.md). A side whose rounding is much larger than the change hides it.",
    least_tokens=32,
    least_sequences=2,
    needs=("rescored",),
)  # fmt: skip


@dataclass(frozen=True)
class _Fit:
    """A side under one hypothesis. plain, best: median |residual| in nats without and with it; agree: share of
    sequences that are nearer with it."""

    side: str
    cause: str
    name: str
    plain: float
    best: float
    agree: float

    @property
    def done(self) -> str:
        """What was done otherwise, behind "the model"."""
        if self.cause == "double-bos":
            return self.name
        return f"with {self.name}" + (" logprob" if self.name.endswith("'s") else "")

    def line(self) -> str:
        return (f"{self.side}: median |logprob - float32 model's| is {self.plain:.3g}, and {self.best:.3g} "
                f"{self.done}; nearer in {self.agree:.0%} of the sequences")  # fmt: skip


def examine(evidence: Evidence) -> Finding | None:
    fits = [fit for side in SIDES if (fit := _best(evidence, side)) is not None]
    if not fits or (len(fits) == len(SIDES) and fits[0].name == fits[1].name):  # of both sides alike: no difference
        return None
    fits.sort(key=lambda fit: fit.best / fit.plain)
    lines = [fit.line() for fit in fits]
    if fits[0].cause == "head-rounding":
        lines += _by_logit(evidence, fits[0].side)
    return Finding(fits[0].cause, FIT, f"{fits[0].side} is the model {fits[0].done}", lines,
                   _NEXT[fits[0].cause])  # fmt: skip


def _best(evidence: Evidence, side: str) -> _Fit | None:
    ours, theirs = evidence.rescored_index
    if ours.size < RULE.least_tokens:
        return None
    rescored = evidence.known.rescored
    assert rescored is not None
    values, sequence = evidence.of_side(side)[ours], evidence.index[ours]
    declared = (evidence.semantics[side] or {}).get("temperature") or 1.0
    plain = rescored.plain if declared == 1.0 else rescored.at_temperature(declared)
    without = np.abs(values - plain[theirs])
    cut = truncation.examine(evidence) is not None  # which no scale makes, and rounding may make look like one
    found = [
        fit
        for cause, name, column in _hypotheses(evidence, values, theirs)
        if (declared == 1.0 or cause == "temperature")  # the others are of raw logprobs
        and not (cut and cause in _SCALES)
        if (fit := _fit(side, cause, name, values, without, column, sequence)) is not None
    ]
    if found:
        return min(found, key=lambda fit: fit.best)
    return None if cut else _temperature(evidence, side, values, theirs, without, sequence, declared)


def _fit(
    side: str, cause: str, name: str, values: np.ndarray, without: np.ndarray, column: np.ndarray, sequence: np.ndarray
) -> _Fit | None:
    with np.errstate(invalid="ignore"):
        apart = np.abs(values - column)
    apart = np.where(np.isfinite(apart), apart, np.inf)
    usable = ~np.isnan(column)
    if usable.sum() < RULE.least_tokens:
        return None
    middle, best = float(np.median(without[usable])), float(np.median(apart[usable]))
    if middle <= _LEAST or best > _HALVED * middle or best > _LEFT:
        return None
    size = int(sequence.max()) + 1
    before = medians_by(sequence[usable], without[usable], size)
    after = medians_by(sequence[usable], apart[usable], size)
    agree = float(np.mean((after < before)[~np.isnan(before)]))
    return _Fit(side, cause, name, middle, best, agree) if agree >= _AGREE else None


def _hypotheses(
    evidence: Evidence, values: np.ndarray, theirs: np.ndarray
) -> Iterator[tuple[str, str, np.ndarray]]:
    """(cause, in words, logprobs [N] of the tokens that were rescored)."""
    rescored = evidence.known.rescored
    assert rescored is not None
    for name, column in rescored.otherwise.items():
        cause = next(cause for word, cause in _CAUSES if name.startswith(word))
        yield cause, name, column[theirs].astype(np.float64)
    for columns in _PADS:
        yield "padded-vocabulary", f"{columns} padded columns in the vocabulary's sum", rescored.padded(columns)[theirs]
    t = _fitted_temperature(evidence, values, theirs)
    yield "temperature", f"temperature {_rounded(t)}", rescored.at_temperature(t)[theirs]
    plain = rescored.plain[theirs].astype(np.float64)
    far = np.abs(plain) > 0.1
    if far.sum() >= RULE.least_tokens:
        factor = float(np.median(values[far] / plain[far]))
        if abs(factor - 1) > 0.05:
            yield "logprobs-scaled", f"logprobs times {factor:.3g} (over {1 / factor:.3g})", plain * factor


def _fitted_temperature(evidence: Evidence, values: np.ndarray, theirs: np.ndarray) -> float:
    """The temperature with the smallest median |residual|: by golden section between the neighbours of the best of
    the grid."""
    rescored = evidence.known.rescored
    assert rescored is not None
    columns = rescored.by_temperature[theirs].astype(np.float64)
    cost = np.median(np.abs(values[:, None] - columns), axis=0)
    at = int(np.clip(cost.argmin(), 1, len(TEMPERATURES) - 2))
    low, high = math.log(TEMPERATURES[at - 1]), math.log(TEMPERATURES[at + 1])

    def residual(x: float) -> float:
        return float(np.mean(np.minimum(np.abs(values - rescored.at_temperature(math.exp(x))[theirs]), 1.0)))

    ratio = (math.sqrt(5) - 1) / 2
    for _ in range(24):
        a, b = high - ratio * (high - low), low + ratio * (high - low)
        if residual(a) < residual(b):
            high = b
        else:
            low = a
    return math.exp((low + high) / 2)


def _temperature(
    evidence: Evidence, side: str, values: np.ndarray, theirs: np.ndarray, without: np.ndarray, sequence: np.ndarray,
    declared: float,
) -> _Fit | None:  # fmt: skip
    """One that rounding half hides: by the signs of each sequence's own best one."""
    rescored = evidence.known.rescored
    assert rescored is not None
    t = _fitted_temperature(evidence, values, theirs)
    log_t = math.log(t / declared)
    if abs(log_t) < _LEAST_LOG_T or np.median(without) <= _LEAST:
        return None
    own = [math.log(_fitted_temperature(evidence, values[sequence == s], theirs[sequence == s]) / declared)
           for s in range(int(sequence.max()) + 1) if (sequence == s).sum() >= 8]  # fmt: skip
    along = sum(x * log_t > 0 for x in own)
    if not own or along < _AGREE * len(own) or two_sided(along, len(own)) > _P:
        return None
    best = float(np.median(np.abs(values - rescored.at_temperature(t)[theirs])))
    if best > min(_LEFT, float(np.median(without))):
        return None
    return _Fit(side, "temperature", f"temperature {_rounded(t)}", float(np.median(without)), best, along / len(own))


def _rounded(t: float) -> str:
    """A temperature as somebody would have set it, where that is within half a percent."""
    near = round(t, 1)
    near = near if near and abs(t / near - 1) < 0.005 else round(t, 2)
    return f"{near:g}" if abs(t / near - 1) < 0.005 else f"{t:.3g}"


def _by_logit(evidence: Evidence, side: str) -> list[str]:
    """How the side's distance from the model goes with |logit|, octave by octave."""
    ours, theirs = evidence.rescored_index
    rescored = evidence.known.rescored
    assert rescored is not None
    apart = np.abs(evidence.of_side(side)[ours] - rescored.plain[theirs])
    octave = np.frexp(np.abs(rescored.logit[theirs]))[1]
    said = [f"{2.0 ** (e - 1):g} to {2.0**e:g}: {apart[octave == e].mean():.2g}"
            for e in np.unique(octave) if (octave == e).sum() >= 8]  # fmt: skip
    return [f"mean |difference| by |logit|, {', '.join(said)}"] if said else []


_CAUSES = (
    ("top-p", "top-p"),
    ("top-k", "top-k"),
    ("the likeliest token's", "wrong-token"),
    ("the next token's", "labels"),
    ("the last token's", "labels"),
    ("logits of the place", "labels"),
    ("logits in", "head-rounding"),
    ("begun with", "double-bos"),
)
_NEXT = {
    "temperature": ["give both sides the same temperature: divide logits by it once, before the log-softmax"],
    "logprobs-scaled": ["divide logits by the temperature, not logprobs: these are no logprobs any more"],
    "top-p": ["ask the engine for raw logprobs, or sample without top-p"],
    "top-k": ["ask the engine for raw logprobs, or sample without top-k"],
    "labels": ["shift logits against labels by one, once: the logits at token i - 1 score token i"],
    "wrong-token": ["take the logprob of the sampled id, not of the first entry that the engine lists"],
    "head-rounding": ["compute logits in float32 on both sides: a head with float32 output, or xd.fused_linear_logp"],
    "padded-vocabulary": ["cut the padding off the logits before the log-softmax, or set it to -inf"],
    "double-bos": ["tokenise with add_special_tokens=False where a chat template has written the begin token"],
}
