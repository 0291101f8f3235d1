"""The cost of computing a prompt, learned from prompts that were computed."""

import math

from quire.scheduling.fit import FORGET, CostFit

UNKNOWN_S_PER_TOKEN = 0.01
"""Before anything was measured: slow, so that what is stored is loaded, and then measured."""

DOUBT = 3.0
"""With so many short observations, what short ones take is half believed."""

FADE = 15 / 16
"""The weight of a short observation falls to this share when one comes that is not short."""


class PrefillCost:
    """Seconds for computing tokens [start, stop) of a prompt, as a + b * tokens + c * pairs.

    `pairs` are (token, earlier token) pairs, what attention computes. The coefficients are those of a `CostFit`.

    Only what is computed behind a hit tells `a` from the rest. Who finds by it that no hit pays sees none again: a few that
    other work on the machine made slow would decide for long. So as far as there were no short ones lately, all costs are
    taken to be the tokens'. A hit that is loaded for that loses less than computing takes.

    One thread observes; others may ask meanwhile.
    """

    def __init__(self) -> None:
        self._fit = CostFit(3)
        self._usual_tokens = 0.0
        self._num_short = 0.0

    @property
    def num_observed(self) -> int:
        return self._fit.num_observed

    def observe(self, start: int, stop: int, seconds: float) -> None:
        """Learn from one forward over tokens [start, stop) of a prompt."""
        if stop <= start or not seconds > 0:
            return
        self._count(stop - start)
        self._fit.observe(_features(start, stop), seconds)

    def seconds(self, start: int, stop: int) -> float:
        """Return the seconds of computing tokens [start, stop)."""
        if stop <= start:
            return 0.0
        if not self.num_observed:
            return UNKNOWN_S_PER_TOKEN * (stop - start)
        belief = self._num_short / (self._num_short + DOUBT)
        by_tokens = self._fit.seconds(_features(0, stop)) * (stop - start) / stop
        return belief * self._fit.seconds(_features(start, stop)) + (1 - belief) * by_tokens

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


def _features(start: int, stop: int) -> tuple[float, float, float]:
    return 1.0, stop - start, (stop - start) * (stop + start) / 2
