"""What computing a prompt takes, learned from prompts that were computed."""

import numpy as np

UNKNOWN_S_PER_TOKEN = 0.01
"""Before anything was measured: slow, so that what is stored is loaded, and then measured."""

FORGET = 0.97
"""What an observation still counts when one more has come."""


class PrefillCost:
    """Seconds for computing tokens [start, stop) of a prompt, as a + b * tokens + c * pairs.

    `pairs` are (token, earlier token) pairs, what attention computes. Least squares on relative errors, older
    observations forgotten step by step; coefficients that come out negative are left out.
    """

    def __init__(self) -> None:
        self.num_observed = 0
        self._products = np.diag([1e-9, 1e-9, 1e-9])
        self._sums = np.zeros(3)
        self._weights = np.zeros(3)

    def observe(self, start: int, stop: int, seconds: float) -> None:
        """Learn from one forward over tokens [start, stop) of a prompt."""
        if stop <= start or not seconds > 0:
            return
        features = _features(start, stop) / seconds
        self._products = self._products * FORGET + np.outer(features, features)
        self._sums = self._sums * FORGET + features
        self.num_observed += 1
        self._solve()

    def seconds(self, start: int, stop: int) -> float:
        """Return what computing tokens [start, stop) will take."""
        if stop <= start:
            return 0.0
        if not self.num_observed:
            return UNKNOWN_S_PER_TOKEN * (stop - start)
        return float(_features(start, stop) @ self._weights)

    def _solve(self) -> None:
        used = [0, 1, 2]
        while used:
            scale = np.sqrt(np.diag(self._products))[used]
            products = self._products[np.ix_(used, used)] / np.outer(scale, scale)
            # A little of each one's own square: with few observations, all share in explaining them.
            solved = np.linalg.solve(products + 1e-3 * np.eye(len(used)), self._sums[used] / scale)
            if solved.min() >= 0:
                self._weights = np.zeros(3)
                self._weights[used] = solved / scale
                return
            del used[int(np.argmin(solved))]


def _features(start: int, stop: int) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    return np.array([1.0, stop - start, (stop - start) * (stop + start) / 2])
