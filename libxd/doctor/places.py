"""Tokens at which something holds: how many, and the first few."""

from __future__ import annotations

import numpy as np


class Places:
    """Flat indices that were found block by block: their number `size`, and the `first` SHOWN of them."""

    SHOWN = 3

    def __init__(self) -> None:
        self.size = 0
        self.first: list[int] = []

    def add(self, index: np.ndarray) -> None:
        """Take in further ones, which rise."""
        self.size += index.size
        self.first += index[: self.SHOWN - len(self.first)].tolist()
