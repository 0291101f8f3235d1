"""Costs learned from what was measured: seconds as a weighted sum of features."""

from collections.abc import Sequence

import numpy as np

FORGET = 0.97
"""The weight of an observation falls to this share when one more comes."""

SHARED = 1e-3
"""The regularisation of the fit: with few observations, all features share in explaining them."""


class CostFit:
    """Seconds as a sum of features, each times a weight from 0.

    Least squares on relative errors, older observations forgotten step by step; features whose weights come out
    negative are left out. One thread observes; others may ask meanwhile.
    """

    def __init__(self, num_features: int) -> None:
        self.num_observed = 0
        self.weights = [0.0] * num_features
        self._products = 1e-9 * np.eye(num_features)
        self._sums = np.zeros(num_features)

    def observe(self, features: Sequence[float], seconds: float) -> None:
        """Learn from something that took more than 0 seconds."""
        relative = np.array(features) / seconds
        self._products = FORGET * self._products + np.outer(relative, relative)
        self._sums = FORGET * self._sums + relative
        self._solve()
        self.num_observed += 1  # last: other threads ask meanwhile

    def seconds(self, features: Sequence[float]) -> float:
        """Return what these features are expected to take."""
        pairs = zip(features, self.weights, strict=True)
        return sum(feature * weight for feature, weight in pairs)

    def _solve(self) -> None:
        used = [*range(len(self.weights))]
        while used:
            products = self._products[np.ix_(used, used)]
            scale = np.sqrt(products.diagonal())
            products = products / np.outer(scale, scale) + SHARED * np.eye(len(used))
            solved = np.linalg.solve(products, self._sums[used] / scale)
            if solved.min() >= 0:
                weights = np.zeros(len(self.weights))
                weights[used] = solved / scale
                self.weights = weights.tolist()
                return
            del used[int(solved.argmin())]
