"""What tools that look at differences take: attempts, or two score files by themselves."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from libxd.console import Console
from libxd.rundir import Attempt

if TYPE_CHECKING:
    from libxd.scores import ScoreFile


@dataclass(frozen=True)
class Given:
    """An attempt's path, or two score files. `where`: as a message names it."""

    where: str
    files: tuple[str, ...] = ()

    def attempt(self) -> Attempt | None:
        """None: two files by themselves. XdError as `Attempt.open`."""
        return None if self.files else Attempt.open(self.where)

    def scores(self) -> tuple[ScoreFile, ScoreFile]:
        """Rollout's and training's, of two files. XdError as `pairs.two_files`."""
        from libxd import pairs

        return pairs.two_files(self.files)


def given(console: Console, operands: Iterable[str]) -> Iterator[Given]:
    """Attempts as they come, operands or lines of stdin; score files among them make a pair when all were seen."""
    files = []
    for path in console.operands(operands, "attempts, or two score files"):
        if os.path.isfile(path) or path.endswith(".safetensors"):
            files.append(path)
        else:
            yield Given(path)
    if files:
        yield Given(" ".join(files), tuple(files))
