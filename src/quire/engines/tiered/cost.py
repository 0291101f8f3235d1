"""The cost of computing a prompt, learned from prompts that were computed."""

import math

import numpy as np

UNKNOWN_S_PER_TOKEN = 0.01
"""Before anything was measured: slow, so that what is stored is loaded, and then measured."""

FORGET = 0.97
"""What an observation still counts when one more has come."""

SHARED = 1e-3
"""A little of each feature's own square: with few observations, all share in explaining them."""

SURPRISE = 2.0
"""One observation counts as at most so many times what was expected; a second one in a row counts as it is."""

ALIKE = 32
"""After so many observations in a row of which none was short, what a short one takes is not believed any more."""


class PrefillCost:
    """Seconds for computing tokens [start, stop) of a prompt, as a + b * tokens + c * pairs.

    `pairs` are (token, earlier token) pairs, what attention computes. Least squares on relative errors, older
    observations forgotten step by step; coefficients that come out negative are left out.

    Only what is computed behind a hit tells `a` from the rest. Who finds by it that no hit pays would never see one again: one
    that a pause of the machine made slow would decide for long. So after `ALIKE` observations all costs are the tokens', until
    a short one is seen. A hit that is tried for that loses less than computing takes.
    """

    def __init__(self) -> None:
        self.num_observed = 0
        self._usual_tokens = 0.0
        self._num_alike = 0
        self._was_surprise = False
        self._products = 1e-9 * np.eye(3)
        self._sums = np.zeros(3)
        self._weights = [0.0, 0.0, 0.0]

    def observe(self, start: int, stop: int, seconds: float) -> None:
        """Learn from one forward over tokens [start, stop) of a prompt."""
        if stop <= start or not seconds > 0:
            return
        self._count(stop - start)
        seconds = self._believed(seconds, self._fitted(start, stop))
        features = np.array(_features(start, stop)) / seconds
        self._products = FORGET * self._products + np.outer(features, features)
        self._sums = FORGET * self._sums + features
        self.num_observed += 1
        self._solve()

    def seconds(self, start: int, stop: int) -> float:
        """Return the seconds of computing tokens [start, stop)."""
        if stop <= start:
            return 0.0
        if not self.num_observed:
            return UNKNOWN_S_PER_TOKEN * (stop - start)
        if self._num_alike >= ALIKE:
            return self._fitted(0, stop) * (stop - start) / stop
        return self._fitted(start, stop)

    def saved(self, start: int, end: int, num_tokens: int) -> float:
        """Return the seconds that having tokens [start, end) of a prompt saves; infinite before anything was measured."""
        if not self.num_observed:
            return math.inf
        return self.seconds(start, num_tokens) - self.seconds(end, num_tokens)

    def _count(self, num_tokens: int) -> None:
        """Note whether an observation is a short one: of less than half as many tokens as is usual."""
        if not self.num_observed:
            self._usual_tokens = num_tokens
        is_short = 2 * num_tokens < self._usual_tokens
        self._num_alike = 0 if is_short else self._num_alike + 1
        self._usual_tokens += (1 - FORGET) * (num_tokens - self._usual_tokens)

    def _believed(self, seconds: float, expected_s: float) -> float:
        is_surprise = bool(self.num_observed) and seconds > SURPRISE * expected_s
        is_first, self._was_surprise = is_surprise and not self._was_surprise, is_surprise
        return SURPRISE * expected_s if is_first else seconds

    def _fitted(self, start: int, stop: int) -> float:
        pairs = zip(_features(start, stop), self._weights, strict=True)
        return sum(feature * weight for feature, weight in pairs)

    def _solve(self) -> None:
        used = [0, 1, 2]
        while used:
            products = self._products[np.ix_(used, used)]
            scale = np.sqrt(products.diagonal())
            products = products / np.outer(scale, scale) + SHARED * np.eye(len(used))
            solved = np.linalg.solve(products, self._sums[used] / scale)
            if solved.min() >= 0:
                self._weights = [0.0, 0.0, 0.0]
                for i, weight in zip(used, (solved / scale).tolist(), strict=True):
                    self._weights[i] = weight
                return
            del used[int(solved.argmin())]


def _features(start: int, stop: int) -> tuple[float, float, float]:
    return 1.0, stop - start, (stop - start) * (stop + start) / 2
