"""Random numbers of made-up traffic: the same for a seed on every machine.

Drawn with PCG64, whose bits no platform changes; what is drawn is rounded (tokens to whole ones,
times to microseconds), so that the last bits of a logarithm do not show.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from itertools import accumulate

import msgspec
from numpy.random import PCG64, Generator, SeedSequence

from quire.errors import ConfigError


class Lognormal(msgspec.Struct, frozen=True):
    """A lognormal distribution by its mean; `sigma` is the deviation of the logarithm.

    The median is mean * exp(-sigma² / 2). 0.5 is a narrow spread, 1 a wide one, 1.5 has a tail
    that dominates. Raises `ConfigError`.
    """

    mean: float
    sigma: float

    def __post_init__(self) -> None:
        check_positive("mean", self.mean)
        if not 0 <= self.sigma <= 4:
            raise ConfigError(f"sigma is between 0 and 4, got {self.sigma}")

    def draw(self, rng: Generator) -> float:
        """Return a number above 0."""
        log_mean = math.log(self.mean) - self.sigma * self.sigma / 2
        return math.exp(log_mean + self.sigma * rng.standard_normal())

    def draw_tokens(self, rng: Generator) -> int:
        """Return a number of tokens, at least 1."""
        return max(1, round(self.draw(rng)))


class Zipf:
    """A Zipf distribution over ranks 0 to n - 1, with weights 1 / (rank + 1) ** exponent."""

    def __init__(self, count: int, exponent: float) -> None:
        self.count = count
        weights = [math.pow(rank, -exponent) for rank in range(1, count + 1)]
        self._reach = list(accumulate(weights))

    def draw(self, rng: Generator) -> int:
        """Return a rank."""
        return bisect_right(self._reach, rng.random() * self._reach[-1])


def generator(seed: int, *stream: int) -> Generator:
    """Return the generator of a seed; other `stream` numbers give independent ones.

    Raises `ConfigError` for a seed that is no whole number from 0.
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"a seed is a whole number from 0, got {seed!r}")
    return Generator(PCG64(SeedSequence(seed, spawn_key=stream)))


def draw_gap(rng: Generator, per_s: float) -> float:
    """Return seconds to the next arrival of a Poisson process of rate `per_s`."""
    return -math.log1p(-rng.random()) / per_s


def draw_count(rng: Generator, mean: float) -> int:
    """Return a whole number from 1, geometric with this mean (1 or more)."""
    if mean <= 1:
        return 1
    return 1 + int(math.log1p(-rng.random()) / math.log1p(-1 / mean))


def check_positive(name: str, value: float) -> None:
    """Raise `ConfigError` unless this is a finite number above 0."""
    if not 0 < value < math.inf:
        raise ConfigError(f"{name} is a number above 0, got {value:g}")
