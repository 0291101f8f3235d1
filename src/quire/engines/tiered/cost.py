"""What computing a prompt takes, learned from prompts that were computed."""

import math

UNKNOWN_S_PER_TOKEN = 0.01
"""Before anything was measured: slow, so that what is stored is loaded, and then measured."""

FORGET = 0.97
"""What an observation still counts when one more has come."""

SHARED = 1e-3
"""A little of each feature's own square: with few observations, all share in explaining them."""


class PrefillCost:
    """Seconds for computing tokens [start, stop) of a prompt, as a + b * tokens + c * pairs.

    `pairs` are (token, earlier token) pairs, what attention computes. Least squares on relative errors, older
    observations forgotten step by step; coefficients that come out negative are left out.
    """

    def __init__(self) -> None:
        self.num_observed = 0
        # Plain numbers: requests wait for every step here, and three of them are too few for arrays.
        self._products = [[1e-9 if i == j else 0.0 for j in range(3)] for i in range(3)]
        self._sums = [0.0, 0.0, 0.0]
        self._weights = [0.0, 0.0, 0.0]

    def observe(self, start: int, stop: int, seconds: float) -> None:
        """Learn from one forward over tokens [start, stop) of a prompt."""
        if stop <= start or not seconds > 0:
            return
        features = [each / seconds for each in _features(start, stop)]
        for row, one in zip(self._products, features, strict=True):
            row[:] = [FORGET * old + one * other for old, other in zip(row, features, strict=True)]
        self._sums = [FORGET * old + one for old, one in zip(self._sums, features, strict=True)]
        self.num_observed += 1
        self._solve()

    def seconds(self, start: int, stop: int) -> float:
        """Return what computing tokens [start, stop) will take."""
        if stop <= start:
            return 0.0
        if not self.num_observed:
            return UNKNOWN_S_PER_TOKEN * (stop - start)
        pairs = zip(_features(start, stop), self._weights, strict=True)
        return sum(feature * weight for feature, weight in pairs)

    def saved(self, start: int, end: int, num_tokens: int) -> float:
        """Return what having tokens [start, end) of a prompt saves; 0 as long as nothing was measured."""
        if not self.num_observed:
            return 0.0
        return self.seconds(start, num_tokens) - self.seconds(end, num_tokens)

    def _solve(self) -> None:
        used = [0, 1, 2]
        while used:
            scale = [math.sqrt(self._products[i][i]) for i in used]
            products = [
                [
                    self._products[i][j] / (one * other) + (SHARED if i == j else 0.0)
                    for j, other in zip(used, scale, strict=True)
                ]
                for i, one in zip(used, scale, strict=True)
            ]
            sums = [self._sums[i] / one for i, one in zip(used, scale, strict=True)]
            solved = _solution(products, sums)
            if min(solved) >= 0:
                self._weights = [0.0, 0.0, 0.0]
                for i, weight, one in zip(used, solved, scale, strict=True):
                    self._weights[i] = weight / one
                return
            del used[solved.index(min(solved))]


def _solution(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Solve a small system with a positive definite matrix, which needs no pivots. Uses up both."""
    size = len(right)
    for at in range(size):
        for row in range(at + 1, size):
            factor = matrix[row][at] / matrix[at][at]
            for column in range(at, size):
                matrix[row][column] -= factor * matrix[at][column]
            right[row] -= factor * right[at]
    for at in reversed(range(size)):
        known = sum(matrix[at][column] * right[column] for column in range(at + 1, size))
        right[at] = (right[at] - known) / matrix[at][at]
    return right


def _features(start: int, stop: int) -> tuple[float, float, float]:
    return 1.0, stop - start, (stop - start) * (stop + start) / 2
