"""The detectors of a pair, in the order in which they are asked, and one asking of them all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from libxd.doctor import (
    aggregates,
    batches,
    bias,
    few_tokens,
    grid,
    head,
    labels,
    lag,
    lengths,
    masks,
    outliers,
    padding,
    positions,
    provenance,
    semantics,
    sentinels,
    size,
    temperature,
    third_scorer,
    token_ids,
    truncation,
    vacuous,
    wrong_token,
)  # fmt: skip
from libxd.doctor.evidence import Evidence
from libxd.doctor.finding import Finding, Rule

#: facts first; of findings as likely, the earlier one is the nearer to a cause
_MODULES = (
    provenance, token_ids, lengths, vacuous, masks, sentinels, semantics, temperature, aggregates, third_scorer, grid,
    lag, truncation, wrong_token, labels, padding, head, positions, batches, outliers, few_tokens, bias, size,
)  # fmt: skip
DETECTORS: tuple[tuple[Rule, Callable[[Evidence], Finding | None]], ...] = tuple(
    (module.RULE, module.examine) for module in _MODULES
)
#: how a need is met
_MET_BY = {"rescored": "--rescore MODEL", "sequences": "--sequences FILE", "vocabulary": "--tokenizer DIR"}


@dataclass(frozen=True)
class Examined:
    """findings: most likely first. silent: why a detector did not speak, that could not have."""

    findings: list[Finding]
    silent: dict[str, str]


def examined(evidence: Evidence) -> Examined:
    """Every detector asked, as far as its sample and its needs are met; of a tampered attempt none but
    `provenance`."""
    if evidence.tampered:
        why = "the attempt is not what was sealed"
        return Examined(list(filter(None, [provenance.examine(evidence)])),
                        {rule.detector: why for rule, _ in DETECTORS if rule is not provenance.RULE})  # fmt: skip
    findings, silent = [], {}
    for rule, examine in DETECTORS:
        if (why := _cannot(rule, evidence)) is not None:
            silent[rule.detector] = why
        elif (finding := examine(evidence)) is not None:
            findings.append(finding)
    if (why := provenance.not_shown(evidence)) is not None:
        silent[provenance.RULE.detector] = why
    if (why := size.not_looked_at(evidence)) is not None:
        silent[size.RULE.detector] = why
    return Examined(_merged(sorted(findings, key=lambda finding: -finding.likelihood)), silent)


def _merged(findings: list[Finding]) -> list[Finding]:
    """Findings of one cause as one: the likeliest's, with the evidence and the advice of all."""
    merged: dict[str, Finding] = {}
    for finding in findings:
        held = merged.get(finding.cause)
        if held is not None:
            more = {name: list(dict.fromkeys([*getattr(held, name), *getattr(finding, name)]))
                    for name in ("evidence", "next")}  # fmt: skip
            finding = replace(held, **more)
        merged[finding.cause] = finding
    return list(merged.values())


def _cannot(rule: Rule, evidence: Evidence) -> str | None:
    numeric = rule.least_tokens > 1 or rule.least_sequences > 1
    if numeric and not evidence.side_by_side:
        return "the tokens do not lie side by side"
    missing = [need for need in rule.needs if not evidence.known.has(need)]
    if missing:
        return f"needs {' '.join(_MET_BY[need] for need in missing)}"
    if numeric and evidence.count < rule.least_tokens:
        return f"{evidence.count} tokens of the {rule.least_tokens} that it takes"
    if numeric and evidence.sequences.size < rule.least_sequences:
        return f"{evidence.sequences.size} sequences of the {rule.least_sequences} that it takes"
    return None
