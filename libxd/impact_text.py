"""An impact as text of at most 120 columns."""

from __future__ import annotations

from typing import Any

from libxd.impact import Impact
from libxd.plain import number, wrapped

_LEVELS = {
    "token": "token",
    "turn": "turn (geometric mean)",
    "sequence": "sequence (geometric mean)",
    "sequence_product": "sequence (product)",
}
_STATES = {
    "pre_update": "Pre-update, lr = 0: no update lies between the sides, so all of this is the engines' difference.",
    None: "Nobody saw the same weights on both sides: an update, or another checkpoint, may be a part of this.",
}
_APART = ("min", "p01", "p50", "p99", "max", "mean")  # of a ratio, as its distance from 1
_CREDIT = ("clipped -", "clipped +", "> 10 %", "to zero", "change", "cosine")


def lines(impact: Impact) -> list[str]:
    """The figures, table under table."""
    found = impact.as_json()
    counts = found["counts"]
    title = f"{impact.pair}: {_many(counts['sequences'], 'sequence')}, {_many(counts['turns'], 'turn')}, "
    title += _many(counts["active"], "active token")
    if counts["sequences_without"]:
        title += f"; {counts['sequences_without']} more without one"
    out = [*wrapped(title), *wrapped(_STATES[found["model_state"]]), *wrapped(_credit(found)), ""]
    out += _table([
        ("training / rollout - 1", "count", *_APART, "ESS", "chi-square"),
        *((_LEVELS[level], str(ratio["count"]), *(_apart(ratio[name]) for name in _APART),
           *(number(ratio[name]) for name in ("ess_fraction", "chi_square")))
          for level, ratio in found["ratio"].items()),
    ])  # fmt: skip
    out += ["", *_table([
        ("KL, nats a token", "k1", "k2", "k3"),
        *((name.replace("_", " || "), *(number(value) for value in estimates.values()))
          for name, estimates in found["kl"].items()),
    ])]  # fmt: skip
    credited = found["advantages"] is not None
    out += ["", "If the trainer computes the old logprobs anew: what a correction makes of the ratios", *_table([
        ("correction", "within", "tokens below", "above", "sequences", "mean weight", "ESS",
         *(("change", "cosine") if credited else ())),
        *(_correction(each, credited) for each in found["corrections"]),
    ])]  # fmt: skip
    out += ["", "If rollout's logprobs are the old ones: what the ratios do to an objective", *_table([
        ("objective", "within", "ratios below", "above", *(_CREDIT if credited else ())),
        *(_objective(each, credited) for each in found["objectives"]),
    ])]  # fmt: skip
    return [*out, "", *_notes(found)]


def _credit(found: dict[str, Any]) -> str:
    credit = found["advantages"]
    if credit is None:
        return "Without advantages or rewards: nothing is said of clipping by sign, nor of coefficients."
    tokens = credit["tokens"]
    said = f"Advantages, one a {credit['level']}"
    if credit["source"] == "rewards":
        said += f", made of rewards by {credit['estimator']}"
        if credit["groups"] is not None:
            said += f" over {credit['groups']} groups ({credit['constant_groups']} of equal rewards)"
    return f"{said}; tokens: {tokens['positive']} above 0, {tokens['negative']} below, {tokens['zero']} at 0."


def _correction(each: dict[str, Any], credited: bool) -> tuple[str, ...]:
    change = each["change"]
    return (
        each["name"], _within(each["low"], each["high"]), str(each["tokens_low"]), str(each["tokens_high"]),
        str(each["sequences"]), number(each["mean_weight"]), number(each["ess_fraction"]),
        *(_change(change) if credited else ()),
    )  # fmt: skip


def _objective(each: dict[str, Any], credited: bool) -> tuple[str, ...]:
    low = None if each["eps_low"] is None else 1 - each["eps_low"]
    cells = (
        each["name"], _within(low, 1 + each["eps_high"]), str(each["outside"]["low"]), str(each["outside"]["high"])
    )  # fmt: skip
    if not credited:
        return cells
    if each["change"] is None:
        return (*cells, *("-" for _ in _CREDIT))
    clipped = [sum(bound[sign] for bound in each["clipped"].values()) for sign in ("negative", "positive")]
    return (
        *cells, *map(str, clipped), str(each["weight"]["over_10_percent"]), str(each["sign"]["to_zero"]),
        *_change(each["change"]),
    )  # fmt: skip


def _change(change: dict[str, float | None]) -> tuple[str, str]:
    return number(change["relative_norm"]), number(change["cosine"])


def _apart(ratio: float | None) -> str:
    return number(None if ratio is None else ratio - 1)


def _within(low: float | None, high: float) -> str:
    return f"up to {high:.6g}" if low is None else f"{low:.6g} .. {high:.6g}"


def _notes(found: dict[str, Any]) -> list[str]:
    said = "ESS: Kish's effective sample size over the count. chi-square: mean (ratio - 1)^2."
    if found["advantages"] is not None:
        said += (
            " clipped -, +: tokens on which a bound acts, of an advantage below and above 0. > 10 %, to zero: tokens"
            " whose coefficient has changed by more than a tenth, or vanished. change, cosine: the norm of the change"
            " of all coefficients over their norm without the difference, and the cosine of the angle between the two."
        )
    out = wrapped(said)
    out += [line for each in found["objectives"] if each["why"] for line in wrapped(f"{each['name']}: {each['why']}.")]
    if reversed_ := sum(each["sign"]["reversed"] for each in found["objectives"] if each["sign"]):
        out.append(f"The KL penalty (beta {number(found['beta'])}) reverses {reversed_} coefficients in all.")
    return out


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    """Head, rule and rows; the first column to the left."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    out = []
    for row in rows:
        numbers = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
        out.append("  ".join((row[0].ljust(widths[0]), *numbers)))
    return [out[0].rstrip(), "-" * len(out[0]), *(line.rstrip() for line in out[1:])]
