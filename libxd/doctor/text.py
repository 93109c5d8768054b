"""A diagnosis, and the rules, as text of at most 120 columns."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from libxd.doctor.diagnosis import Diagnosis
from libxd.doctor.finding import Finding, Rule
from libxd.plain import number, wrapped

Style = Callable[[str, str], str]


def lines(diagnosis: Diagnosis, verbose: bool, style: Style = lambda text, _: text) -> list[str]:
    """style(text, kind) may colour what is of kind "bug", "rounding", "undecided", "nothing" or "cause"."""
    out = wrapped(_title(diagnosis))
    answer = diagnosis.answer
    if answer is not None:
        said = "nothing differs" if answer.answer == "nothing" else answer.answer
        first, *others = wrapped(f"Bug or rounding? {said}: {answer.why}.", rest="  ")
        out += [first.replace(f" {said}:", f" {style(said, answer.answer)}:", 1), *others]
        out += [line for each in answer.next for line in wrapped(each, "  - ")]
    for place, finding in enumerate(diagnosis.findings, 1):
        out += ["", *_finding(place, finding, style)]
    if not diagnosis.findings:
        out += ["", style(_nothing(diagnosis), "nothing")]
    out += _silent(diagnosis.silent, verbose)
    return out


def _title(diagnosis: Diagnosis) -> str:
    several = len(diagnosis.subject) > 2
    subject = f"{len(diagnosis.subject)} attempts together" if several else " ".join(diagnosis.subject)
    title = f"{subject}: {diagnosis.tokens} tokens of {diagnosis.sequences} sequences"
    if diagnosis.figures is not None:
        f = diagnosis.figures
        title += (f", |training - rollout| mean {number(f['mean_absolute'])}, p99 {number(f['p99_absolute'])}, max "
                  f"{number(f['max_absolute'])} nats")  # fmt: skip
    if diagnosis.dtypes is not None:
        said = (f"{dtype or 'unknown dtype'} on {side}" for side, dtype in diagnosis.dtypes.items())
        title += f" ({', '.join(said)})"
    return title


def _nothing(diagnosis: Diagnosis) -> str:
    if diagnosis.answer is not None and diagnosis.answer.answer == "bug":
        return "No detector names a cause."
    return "Nothing wrong was found in what was looked at." if diagnosis.silent else "Nothing wrong was found."


def _finding(place: int, finding: Finding, style: Style) -> list[str]:
    out = wrapped(f"{place}. {finding.cause} ({finding.likelihood:g}): {finding.summary}", rest="   ")
    out[0] = out[0].replace(finding.cause, style(finding.cause, "cause"), 1)
    for line in finding.evidence:
        out += wrapped(line, "   - ")
    for line in finding.next:
        out += wrapped(line, "   > ")
    return out


def _silent(silent: dict[str, str], verbose: bool) -> list[str]:
    if not silent:
        return []
    if verbose:
        return ["", "Not looked at:", *(f"  {detector}: {why}" for detector, why in silent.items())]
    reasons: dict[str, list[str]] = {}
    for detector, why in silent.items():
        reasons.setdefault(why, []).append(detector)
    said = "; ".join(f"{', '.join(detectors)} ({why})" for why, detectors in reasons.items())
    return ["", *wrapped(f"Not looked at: {said}.", rest="  ")]


def rules(given: Iterable[Rule]) -> list[str]:
    """What `--rules` prints."""
    out: list[str] = []
    for rule in given:
        tokens = [f"{rule.least_tokens} active tokens"] if rule.least_tokens > 1 else []
        sample = " of ".join(tokens + ([f"{rule.least_sequences} sequences"] if rule.least_sequences > 1 else []))
        out += [f"{rule.detector}: {', '.join(rule.causes)}"]
        out += wrapped(rule.decides, "  rule: ", "    ")
        out += wrapped(rule.false_alarms, "  false alarms: ", "    ")
        needs = f"; needs {', '.join(rule.needs)}" if rule.needs else ""
        out += [f"  smallest sample: {sample or 'any'}{needs}", ""]
    return out[:-1]
