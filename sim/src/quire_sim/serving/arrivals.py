"""Arrivals of requests: those of the trace, a Poisson process, or users who come back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec
import numpy as np

from quire.errors import ConfigError
from quire_sim.distributions import check_positive
from quire_sim.names import unknown
from quire_sim.trace.rows import TraceRequest

KINDS = ("trace", "poisson", "closed")


class Arrivals(Protocol):
    """Gives the requests of a trace, taken in its order, their times of arrival."""

    def start(self, requests: Sequence[TraceRequest]) -> list[float]:
        """Return the arrivals that are known before the first request: seconds, rising."""
        ...

    def after(self, finished_s: float) -> float | None:
        """Return the arrival that follows from a request's end, if one does."""
        ...


class TraceArrivals(msgspec.Struct, frozen=True):
    """The times of the trace, `speed` times as fast. Raises `ConfigError`."""

    speed: float = 1.0

    def __post_init__(self) -> None:
        check_positive("speed", self.speed)

    def start(self, requests: Sequence[TraceRequest]) -> list[float]:
        return [request.time_s / self.speed for request in requests]

    def after(self, finished_s: float) -> None:
        return None

    def __str__(self) -> str:
        return "the trace's times" + (f", {self.speed:g} times as fast" if self.speed != 1 else "")


class PoissonArrivals:
    """Independent arrivals at `rate` requests per second. Raises `ConfigError`."""

    def __init__(self, rate: float, seed: int = 0) -> None:
        check_positive("rate", rate)
        self.rate = rate
        self._random = np.random.default_rng(seed)

    def start(self, requests: Sequence[TraceRequest]) -> list[float]:
        gaps = self._random.exponential(1 / self.rate, len(requests))
        return np.cumsum(gaps).tolist()

    def after(self, finished_s: float) -> None:
        return None

    def __str__(self) -> str:
        return f"Poisson, {self.rate:g} requests/s"


class ClosedLoop:
    """`users` who each ask, wait for the answer, think, and ask again. Raises `ConfigError`.

    Thinking takes `think_s` on average, exponentially distributed; 0 is no time at all. Each
    begins by thinking.
    """

    def __init__(self, users: int, think_s: float = 0.0, seed: int = 0) -> None:
        if users < 1:
            raise ConfigError(f"a closed loop has 1 user or more, got {users}")
        if not 0 <= think_s < float("inf"):
            raise ConfigError(f"a think time is 0 seconds or more, got {think_s:g}")
        self.users = users
        self.think_s = think_s
        self._random = np.random.default_rng(seed)

    def start(self, requests: Sequence[TraceRequest]) -> list[float]:
        return sorted(self._think() for _ in range(min(self.users, len(requests))))

    def after(self, finished_s: float) -> float:
        return finished_s + self._think()

    def _think(self) -> float:
        return float(self._random.exponential(self.think_s)) if self.think_s else 0.0

    def __str__(self) -> str:
        pause = f", {self.think_s:g} s of thought between" if self.think_s else ""
        return f"{self.users} users in a closed loop{pause}"


def parse_arrivals(text: str, *, speed: float = 1.0, seed: int = 0) -> Arrivals:
    """Read `trace`, `poisson:RATE`, `closed:USERS` or `closed:USERS:THINK_SECONDS`.

    Raises `ConfigError`.
    """
    kind, *numbers = text.split(":")
    try:
        match kind, [float(number) for number in numbers]:
            case "trace", []:
                return TraceArrivals(speed)
            case "poisson", [rate]:
                return PoissonArrivals(rate, seed)
            case "closed", [users] if users == int(users):
                return ClosedLoop(int(users), seed=seed)
            case "closed", [users, think_s] if users == int(users):
                return ClosedLoop(int(users), think_s, seed)
            case _:
                pass
    except (ValueError, OverflowError) as error:
        if isinstance(error, ConfigError):
            raise
    how = "poisson:RATE (requests per second), closed:USERS or closed:USERS:THINK_SECONDS"
    if kind not in KINDS:
        raise unknown("way to arrive", kind, KINDS, f"write {how}")
    raise ConfigError(f"{text!r} does not say when requests arrive; write trace, {how}")
