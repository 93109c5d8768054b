"""libxd: which configuration change makes rollout and training log probabilities differ.

`write_scores` is what a training loop calls (docs/hooks.md); all else is reached through the tools.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from libxd.imports.hook import write_scores as write_scores

__version__ = "0.1.0"
__all__ = ["__version__", "write_scores"]


def __getattr__(name: str) -> Any:
    """The hook when it is asked for: most tools start without numpy."""
    if name == "write_scores":
        from libxd.imports.hook import write_scores

        return write_scores
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
