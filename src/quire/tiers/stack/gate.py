"""The cost gate: it loads only where loading is faster than recomputing, by measured loads."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import msgspec
import numpy as np

FORGET = 0.95
"""The weight of an observation falls to this share when one more comes."""

FORGET_AT_ONCE = 0.3
"""The same, when two in a row were more than twice, or less than half, of what was expected, and of the guess."""

FIRST = 2
"""So many loads are believed against the guess."""

SURPRISE = 2.0
UNIT = float(1 << 20)

LEARNED = 4
"""With fewer loads an estimate is believed as it is."""

CAUTION = 1.0
"""Standard errors that are added to an estimate before it is believed."""

MOST_POINTS = 256

FEW_KEYS = 16
"""Up to so many, every length is compared, one by one."""


class Estimate:
    """Seconds for loading n bytes, as latency + n / bandwidth, learned from loads.

    Least squares on relative errors, older loads forgotten step by step, both numbers kept from
    falling below 0. A change is noticed when two loads in a row are off by more than a factor of
    `SURPRISE` in the same direction; then what was known is nearly all forgotten.

    The first loads weigh against a guess: `latency_s` and `bandwidth`, in bytes per second.
    Not thread-safe; its owner locks.
    """

    def __init__(self, latency_s: float, bandwidth: float) -> None:
        self.num_observed = 0
        self.latency_s = latency_s
        self._slope = UNIT / bandwidth
        # Sums over loads of weight * (1, x, x^2, y, x y), with x in MiB and y in seconds.
        self._sums = np.zeros(5)
        self._variance = 0.25**2
        self._surprises = 0
        for num_bytes in (UNIT / 16, UNIT * 64):
            expected = self._expected(num_bytes / UNIT)
            self._add(num_bytes / UNIT, expected, expected)

    @property
    def bandwidth(self) -> float:
        """Bytes per second, without the latency."""
        return UNIT / self._slope if self._slope else math.inf

    def observe(self, num_bytes: int, seconds: float) -> None:
        """Learn from a load that took `seconds`, from asking to having all of it."""
        x, y = num_bytes / UNIT, max(seconds, 1e-9)
        expected = self._expected(x)
        ratio = y / expected
        towards = 1 if ratio > SURPRISE else -1 if ratio < 1 / SURPRISE else 0
        is_change = towards != 0 and towards * self._surprises > 0
        self._surprises = self._surprises + towards if is_change else towards
        is_first = self.num_observed < FIRST
        keep = FORGET_AT_ONCE if is_change or is_first else FORGET
        self.num_observed += 1
        if not is_first:
            # One stray load, a pause of the machine, counts as an expected one that took some times as long.
            y = min(y, (16.0 if is_change else 4.0) * expected)
        self._sums *= keep
        if not is_first:
            error = min(abs(y / expected - 1), 1.0)
            newest = max(1 - min(keep, 0.9), 1 / self.num_observed)
            self._variance += newest * (error**2 - self._variance)
        scale = expected
        if is_change or is_first:  # errors are relative to what is new
            scale = max(y, expected / 100)
            self._sums *= min(1.0, (expected / scale) ** 2)
        self._add(x, y, scale)
        self._solve()

    def seconds(self, num_bytes: float) -> float:
        """Return the mean seconds of a load."""
        return self._expected(num_bytes / UNIT) if num_bytes else 0.0

    def careful_seconds(self, num_bytes: float) -> float:
        """Return the seconds that its mean will hardly exceed: the estimate and its uncertainty.

        The first loads are not refused for that: they are how it becomes certain.
        """
        x = num_bytes / UNIT
        if not num_bytes or self.num_observed < LEARNED:
            return self.seconds(num_bytes)
        weight, weight_x = self._sums[0], self._sums[1]
        centre = float(weight_x / weight)
        # More bytes never take less, and no more than in proportion: so far as that, what is known of
        # the sizes that were loaded holds for any other.
        bound = self._with_error(centre) * max(1.0, x / centre)
        return max(self._expected(x), min(self._with_error(x), bound))

    def _with_error(self, x: float) -> float:
        n, sx, sxx = map(float, self._sums[:3])
        determinant = max(n * sxx - sx * sx, 1e-12 * n * sxx, 1e-300)
        variance = self._variance * (sxx - 2 * x * sx + x * x * n) / determinant
        return self._expected(x) + CAUTION * math.sqrt(max(variance, 0.0))

    def _expected(self, x: float) -> float:
        return max(self.latency_s + self._slope * x, 1e-9)

    def _add(self, x: float, y: float, scale: float) -> None:
        self._sums += scale**-2 * np.array([1, x, x * x, y, x * y])

    def _solve(self) -> None:
        n, sx, sxx, sy, sxy = map(float, self._sums)
        determinant = n * sxx - sx * sx
        if determinant <= 1e-9 * n * sxx:  # one size only: no more than in proportion
            self.latency_s, self._slope = 0.0, sxy / sxx
            return
        slope = (n * sxy - sx * sy) / determinant
        latency = (sy - slope * sx) / n
        if slope < 0:
            slope, latency = 0.0, sy / n
        elif latency < 0:
            slope, latency = sxy / sxx, 0.0
        self.latency_s, self._slope = latency, slope


class Choice(msgspec.Struct, frozen=True):
    """The number of leading keys to load, of those found; `refused`: tiers that have some and load none."""

    num_keys: int
    num_found: int
    refused: tuple[int, ...]


class CostGate:
    """Chooses n so that loading n keys and computing the rest takes least.

    Loads from several tiers are taken to add up: they share the machine that copies and checks.
    An estimate enters with its uncertainty, so that a tie goes to computing.
    """

    def __init__(
        self,
        estimates: Sequence[Estimate],
        limit_s: float,
        lock: AbstractContextManager[object] | None = None,
    ) -> None:
        self.estimates = tuple(estimates)
        self._lock = lock or nullcontext()
        self.limit_s = limit_s
        """No load that is expected to take longer."""

    def choose(
        self,
        found: Sequence[int],
        sizes: Sequence[int],
        recompute_s: Callable[[int], float],
        step: int = 1,
    ) -> Choice:
        """Return the number of leading keys to load; see `TierStack.choose`."""
        whole = next((at for at, level in enumerate(found) if level < 0), len(found))
        whole -= whole % step
        behind = dict.fromkeys(sorted(set(found[:whole])), 0)
        best, num_keys, at = math.inf, 0, 0
        for point in _points(found[:whole], step):
            while at < point:
                behind[found[at]] += sizes[at]
                at += 1
            with self._lock:
                load_s = sum(
                    self.estimates[level].careful_seconds(num_bytes)
                    for level, num_bytes in behind.items()
                )
            total_s = recompute_s(point) + (load_s if load_s <= self.limit_s else math.inf)
            if total_s < best:
                best, num_keys = total_s, point
        used = set(found[:num_keys])
        return Choice(num_keys, whole, tuple(level for level in behind if level not in used))


def _points(found: Sequence[int], step: int) -> list[int]:
    """Return the lengths to compare, multiples of `step`: all, or where tiers change and some between.

    Within a run of one tier the load is linear and recomputing, whose cost per token grows with the
    prefix, is concave; so the least lies at an end, and the points between are for engines whose cost is not.
    """
    whole = len(found)
    if whole <= FEW_KEYS:
        return list(range(0, whole + 1, step))
    ends = [at for at in range(1, whole) if found[at] != found[at - 1]]
    between = [whole * part // 16 for part in range(17)]
    points = sorted({at - at % step for at in (*ends, *between)})
    return points[:: -(-len(points) // MOST_POINTS)] + points[-1:]
