"""Least squares with coefficients that are not below zero."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

SAME = 1e-18
"""A squared error that is rounding."""


def least_squares(rows: Floats, target: Floats, unknown: Sequence[int]) -> tuple[Floats, float]:
    """Return the coefficients whose sums are nearest to the target, [columns], and the squared error.

    None is below zero, and those of columns that are not `unknown` are zero. With a handful of
    unknowns every choice of those above zero is tried, the fewest first.
    """
    size = np.abs(rows).max(axis=0)
    size[size == 0] = 1.0
    best, least = np.zeros(rows.shape[1]), float(target @ target)
    for count in range(1, len(unknown) + 1):
        for chosen in map(list, combinations(unknown, count)):
            part = rows[:, chosen] / size[chosen]
            solved = np.asarray(np.linalg.lstsq(part, target, rcond=None)[0], np.float64)
            error: Floats = part @ solved - target
            squared = float(error @ error)
            if float(solved.min()) >= 0 and squared < least * (1 - 1e-9) - SAME:
                best, least = np.zeros(rows.shape[1]), squared
                best[chosen] = solved / size[chosen]
    return best, least
