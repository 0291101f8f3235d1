"""The cost of computing a prompt, learned from prompts that were computed."""

import math

import numpy as np

UNKNOWN_S_PER_TOKEN = 0.01
"""Before anything was measured: slow, so that what is stored is loaded, and then measured."""

FORGET = 0.97
"""What an observation still counts when one more has come."""

SHARED = 1e-3
"""A little of each feature's own square: with few observations, all share in explaining them."""

DOUBT = 3.0
"""With so many short observations, what short ones take is half believed."""

FADE = 15 / 16
"""What one short observation still counts for that when one more has come that is not short."""


class PrefillCost:
    """Seconds for computing tokens [start, stop) of a prompt, as a + b * tokens + c * pairs.

    `pairs` are (token, earlier token) pairs, what attention computes. Least squares on relative errors, older
    observations forgotten step by step; coefficients that come out negative are left out.

    Only what is computed behind a hit tells `a` from the rest. Who finds by it that no hit pays sees none again: a few that
    other work on the machine made slow would decide for long. So as far as there were no short ones lately, all costs are
    taken to be the tokens'. A hit that is loaded for that loses less than computing takes.

    One thread observes; others may ask meanwhile.
    """

    def __init__(self) -> None:
        self.num_observed = 0
        self._usual_tokens = 0.0
        self._num_short = 0.0
        self._products = 1e-9 * np.eye(3)
        self._sums = np.zeros(3)
        self._weights = [0.0, 0.0, 0.0]

    def observe(self, start: int, stop: int, seconds: float) -> None:
        """Learn from one forward over tokens [start, stop) of a prompt."""
        if stop <= start or not seconds > 0:
            return
        self._count(stop - start)
        features = np.array(_features(start, stop)) / seconds
        self._products = FORGET * self._products + np.outer(features, features)
        self._sums = FORGET * self._sums + features
        self._solve()
        self.num_observed += 1  # last: other threads ask meanwhile

    def seconds(self, start: int, stop: int) -> float:
        """Return the seconds of computing tokens [start, stop)."""
        if stop <= start:
            return 0.0
        if not self.num_observed:
            return UNKNOWN_S_PER_TOKEN * (stop - start)
        belief = self._num_short / (self._num_short + DOUBT)
        by_tokens = self._fitted(0, stop) * (stop - start) / stop
        return belief * self._fitted(start, stop) + (1 - belief) * by_tokens

    def saved(self, start: int, end: int, num_tokens: int) -> float:
        """Return the seconds that having tokens [start, end) of a prompt saves; infinite before anything was measured."""
        if not self.num_observed:
            return math.inf
        return self.seconds(start, num_tokens) - self.seconds(end, num_tokens)

    def _count(self, num_tokens: int) -> None:
        """Note whether an observation is a short one: of less than half as many tokens as others usually have."""
        if 2 * num_tokens < self._usual_tokens:
            self._num_short += 1
            return
        self._num_short *= FADE
        newest = 1 - FORGET if self._usual_tokens else 1.0
        self._usual_tokens += newest * (num_tokens - self._usual_tokens)

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
                weights = np.zeros(3)
                weights[used] = solved / scale
                self._weights = weights.tolist()
                return
            del used[int(solved.argmin())]


def _features(start: int, stop: int) -> tuple[float, float, float]:
    return 1.0, stop - start, (stop - start) * (stop + start) / 2
