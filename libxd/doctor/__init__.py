"""From a difference to its cause: `examine_pair` gives candidate causes of two score files, most likely first."""

from __future__ import annotations

from libxd.doctor.evidence import Evidence, Known
from libxd.doctor.finding import Finding
from libxd.doctor.registry import examined
from libxd.pairs import Pair

__all__ = ["Evidence", "Finding", "Known", "examine_pair"]


def examine_pair(pair: Pair, known: Known | None = None) -> list[Finding]:
    """Candidate causes of the difference, most likely first; [] where nothing is wrong. `known`: what else is at hand.

    `Finding` says what one holds; docs/doctor.md has the rules.
    """
    return examined(Evidence.of_pair(pair, known)).findings
