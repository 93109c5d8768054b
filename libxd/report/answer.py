"""What a reader wants to know first, in sentences: what is wrong, which knob, how sure."""

from __future__ import annotations

from typing import Any, Literal

from libxd.plain import number

Case = dict[str, Any]
_FEW_SEQUENCES = 8
_MANY = 10  # changes from which on it is said that chance shows some
_MOST = 5


def of(value: dict[str, Any]) -> dict[str, Any]:
    """state: good, bad, invalid or nothing; what: one sentence; which: sentences, each with cases; sure: sentences."""
    cases = value["cases"]
    state, what = _what(value, cases)
    return {"state": state, "what": what, "which": _which(value, cases), "sure": _sure(value, cases)}


def baseline(cases: list[Case]) -> Case | None:
    """The first attempt at the baseline that was judged."""
    return next((case for case in cases if case["baseline"] and not case["repeat"] and _judged(case)), None)


def ranked(value: dict[str, Any]) -> list[tuple[Case, dict[str, Any]]]:
    """Every effect of a changed knob that is surely above the noise floor, or has none beside it: the largest first."""
    found = [
        (case, effect)
        for case in value["cases"]
        if not _unchanged(case)
        for effect in case["effects"]
        if effect["standing"] in ("above", "?") and effect["mean_absolute"] is not None and _above(value, effect)
    ]
    return sorted(found, key=lambda pair: -pair[1]["mean_absolute"]["value"])


def _above(value: dict[str, Any], effect: dict[str, Any]) -> bool:
    """Whether the mean's interval lies above what a repeat moves on average; a floor that is not known is none."""
    sides = [floors["sides"][effect["side"]] for floors in value["floors"]]
    noise = max((side["mean_absolute"] for side in sides if side), default=0.0)
    mean = effect["mean_absolute"]
    return (mean["value"] if mean["low"] is None else mean["low"]) > noise


def _judged(case: Case) -> bool:
    return case["verdict"] in ("PASS", "MISMATCH")


def _unchanged(case: Case) -> bool:
    return not case["intervention"]


def _what(value: dict[str, Any], cases: list[Case]) -> tuple[Literal["good", "bad", "invalid", "nothing"], str]:
    invalid = [case for case in cases if case["verdict"].startswith("INVALID")]
    judged = [case for case in cases if _judged(case)]
    wrong = [case for case in judged if case["verdict"] == "MISMATCH"]
    if not judged and not invalid:
        empty = any(case["verdict"] == "ZERO_ACTIVE_TOKENS" for case in cases)
        return "nothing", f"Nothing can be said: {'no token is active' if empty else 'no case was judged'}."
    said = [_compared(value, judged, wrong, baseline(cases))] if judged else []
    if invalid:
        kinds = " and ".join(sorted({case["verdict"] for case in invalid}))
        are, of = ("case is", "it") if len(invalid) == 1 else ("cases are", "them")
        said.append(f"{len(invalid)} {are} {kinds}: no number of {of} counts.")
        if value["imported"] and kinds == "INVALID_IDENTITY":
            why = "for which the table has the reasons; the differences are there all the same"
            said[-1] = f"{len(invalid)} {are} {kinds}, {why}."
    if invalid and (not wrong or baseline(cases) is None):
        return "invalid", " ".join(reversed(said))
    return "bad" if wrong else "good", " ".join(said)


def _compared(value: dict[str, Any], judged: list[Case], wrong: list[Case], base: Case | None) -> str:
    """How many of the judged cases differ, and how far the baseline is off."""
    limit = f"{value['threshold']:g} nats"
    one = len(judged) == 1
    if not wrong:
        agree = "The one judged case agrees" if one else f"All {len(judged)} judged cases agree"
        return f"{agree}: no active token differs by more than {limit}."
    off = _worth(base) if base is not None and base["verdict"] == "MISMATCH" else ""
    if len(wrong) == len(judged):
        differ = "The one judged case differs" if one else f"All {len(judged)} judged cases differ"
        return f"{differ} beyond {limit}{off}."
    if base is not None and not off:
        off = ", the baseline does not"
    differ = "differs" if len(wrong) == 1 else "differ"
    return f"{len(wrong)} of {len(judged)} judged cases {differ} beyond {limit}{off}."


def _worth(base: Case) -> str:
    """How far the baseline is off."""
    counts, difference = base["counts"], base["logprob_difference"]
    share = counts["mismatches"] / counts["active"]
    return (
        f"; in the baseline {counts['mismatches']} of {counts['active']} tokens ({100 * share:.3g} %), "
        f"{number(difference['mean_absolute'])} nats on average"
    )


def _which(value: dict[str, Any], cases: list[Case]) -> list[dict[str, Any]]:
    changed = [case for case in cases if not _unchanged(case) and _judged(case)]
    base = baseline(cases)
    doctor = _doctor([base] if base is not None else cases)
    if value["imported"]:
        return [*doctor, _said("Others scored this, and what they changed is unknown: nothing points to a knob.")]
    if not changed:
        return [*doctor, _said("No case with a changed knob was judged, so nothing points to one.")]
    out = []
    if base is not None:
        turned = [case for case in changed if case["verdict"] != base["verdict"]]
        for verdict, what in (("PASS", "The difference is gone with"), ("MISMATCH", "The difference comes with")):
            if some := [case for case in turned if case["verdict"] == verdict]:
                out.append(_said(f"{what}:", some))
        if not turned and base["verdict"] == "MISMATCH":
            out.append(_said("No single change makes it go away, so no verdict names a cause; the effects may."))
    out = [*out, *doctor]
    moved = ranked(value)
    if moved:
        what = "Moves its side most, in nats a token, over a floor that was not measured:"
        if all(effect["standing"] == "above" for _, effect in moved):
            what = "Moves its side most, in nats a token, above the noise floor:"
        said = [f"{effect['side']} {interval(effect['mean_absolute'])}" for _, effect in moved]
        out.append(_said(what, [case for case, _ in moved], said))
    if base is not None:
        out += _nearer(changed)
    if still := [case for case in changed if {effect["standing"] for effect in case["effects"]} == {"0"}]:
        out.append(_said("Moves not a bit:", still))
    shown = [id(case) for case, _ in moved] + [id(case) for case in still]
    if within := [case for case in changed if case["effects"] and id(case) not in shown]:
        out.append(_said("Moves no more than a repeat does, or not surely more:", within))
    if out == doctor:
        out.append(_said("No changed knob could be set beside the baseline; the notes of the table say why."))
    return out


def _doctor(cases: list[Case]) -> list[dict[str, Any]]:
    """The first candidate cause of the first case that has one."""
    for case in cases:
        for first in case.get("findings", ())[:1]:
            of = f"{case['name']}: {first['cause']}, {first['summary']}"
            return [_said(f"The doctor's first candidate cause for {of}.")]
    return []


def _said(what: str, cases: list[Case] | None = None, said: list[str] | None = None) -> dict[str, Any]:
    """A sentence, the first few of the cases that it is about, each with what is said of it, and how many more."""
    cases = cases or []
    said = said or [""] * len(cases)
    named = [{"case": case["name"], "said": each} for case, each in zip(cases, said, strict=True)]
    return {"said": what, "cases": named[:_MOST], "more": max(0, len(named) - _MOST)}


def _nearer(cases: list[Case]) -> list[dict[str, Any]]:
    """Which changes bring the two sides nearer, and which take them apart, surely."""
    found = [(case, change) for case in cases if (change := case["change_of_difference"])]
    out = []
    for sign, what in ((-1, "Brings the two sides nearer"), (1, "Takes the two sides further apart")):
        some = sorted(
            ((case, _turned(change, sign)) for case, change in found if _sign(change) == sign),
            key=lambda pair: -pair[1]["value"],
        )
        if some:
            out.append(_said(f"{what}, in nats a token:", [case for case, _ in some], [interval(c) for _, c in some]))
    return out


def _sign(change: dict[str, Any]) -> int | None:
    """Of a change whose interval does not hold 0; None for others."""
    if change["low"] is None or change["low"] <= 0 <= change["high"]:
        return None
    return 1 if change["value"] > 0 else -1


def _turned(change: dict[str, Any], sign: int) -> dict[str, Any]:
    if sign > 0:
        return change
    return {"value": -change["value"], "low": -change["high"], "high": -change["low"]}


def _sure(value: dict[str, Any], cases: list[Case]) -> list[str]:
    said = []
    if not value["floors"] and not value["imported"]:
        said.append("The noise floor was not measured: no repeat of the baseline (xd-plan --repeats 1 plans one).")
    for floors in value["floors"]:
        times = "1 repeat" if floors["repeats"] == 1 else f"{floors['repeats']} repeats"
        sides = [(side, noise) for side, noise in floors["sides"].items() if noise]
        if all(noise["max_absolute"] == 0 for _, noise in sides):
            both = _list([side for side, _ in sides])
            said.append(f"Noise floor: {times} of {floors['baseline']} gave the same values on {both}.")
        else:
            each = [f"{side} {number(noise['mean_absolute'])} on average, {number(noise['max_absolute'])} at most"
                    for side, noise in sides]  # fmt: skip
            said.append(f"Noise floor, {times} of {floors['baseline']}, in nats: {'; '.join(each)}.")
    sequences, active = value["identity"]["num_sequences"], value["identity"]["num_active"]
    if sequences is not None and active is not None and any(case["effects"] for case in cases):
        few = "; with so few they are rough" if sequences < _FEW_SEQUENCES else ""
        said.append(f"Brackets are 95 % of bootstrap draws over {sequences} sequences ({active} active tokens), paired "
                    f"with the baseline, each by itself{few}.")  # fmt: skip
    changed = sum(case["change_of_difference"] is not None and not _unchanged(case) for case in cases)
    if changed >= _MANY:
        some = round(changed / 20)
        said.append(f"If none of {changed} changes did anything, the brackets of some {some} would still not hold 0.")
    left = [case for case in cases if not _judged(case) and not case["verdict"].startswith("INVALID")]
    if left:
        names = [f"{case['name']} ({case['verdict']})" for case in left]
        said.append(f"Not judged: {_list(names)}.")
    if differing := value["conditions"]["differing"]:
        said.append(f"Not all cases were scored in the same environment: {len(differing)} differences, listed below.")
    unsealed = [case["name"] for case in cases if case["counts"] is not None and not case["sealed"]]
    if unsealed:
        said.append(f"Not sealed, so not final: {_list(unsealed)}.")
    return [*said, f"{value['claim']}."]


def interval(found: dict[str, Any]) -> str:
    """A value with its interval."""
    if found["low"] is None:
        return number(found["value"])
    return f"{number(found['value'])} [{number(found['low'])}, {number(found['high'])}]"


def _list(names: list[str]) -> str:
    """Names in a sentence: the first few of many."""
    if len(names) > 2 * _MOST:
        return f"{', '.join(names[: 2 * _MOST])} and {len(names) - 2 * _MOST} more"
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
