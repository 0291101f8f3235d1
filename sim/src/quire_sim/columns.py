"""Growing arrays with a number per block id."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import numpy as np

Scalar = TypeVar("Scalar", bound="np.generic[Any]")


class Column(Generic[Scalar]):
    """A number per block id, `fill` at first; as long as the ids that were asked for."""

    def __init__(self, fill: float, dtype: type[Scalar]) -> None:
        self._fill = fill
        self.values: np.ndarray[tuple[int], np.dtype[Scalar]] = np.full(1024, fill, dtype=dtype)

    def upto(self, end: int) -> np.ndarray[tuple[int], np.dtype[Scalar]]:
        """Return the numbers of the ids below `end` and maybe more, to read and write."""
        if end > len(self.values):
            grown = np.full(2 * end, self._fill, dtype=self.values.dtype)
            grown[: len(self.values)] = self.values
            self.values = grown
        return self.values
