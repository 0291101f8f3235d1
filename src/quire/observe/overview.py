"""A cache and its engine as plain data for a page: pools, counters, tiers, hit-rate curve, and samples over time.

Nothing here tells what prompts were about.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from math import inf
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar, cast

import msgspec

from quire.core import CacheManager
from quire.errors import ConfigError, QuireError
from quire.foresight import LiveCurve
from quire.observe.engine_view import EngineView
from quire.observe.heat import TreePicture
from quire.observe.requests import RequestLog
from quire.ops import block_states

Call: TypeAlias = Callable[[Callable[[Any], Any]], Awaitable[Any]]

CURVE_REST, TREE_REST = 100, 300
"""Curve and tree are not made again for so many times as long as making them took."""

EVERY_S = 2.0
NUM_SAMPLES = 450
SAMPLED = ("num_requests", "prompt_tokens", "hit_tokens", "missed", "computed_tokens")
"""Counters of a manager that samples have."""


class Overview:
    """The contents and counters of a cache, with samples over time: plain data for a page.

    manager  a `CacheManager`; all that reads it is for the thread that has it
    tiers    the `TierStack` below it, if there is one
    log      the requests of its engine; `keep` and `state` are for the thread that tells it
    """

    def __init__(
        self, manager: CacheManager, tiers: Any = None, log: RequestLog | None = None
    ) -> None:
        self._manager, self._tiers, self._log = manager, tiers, log or RequestLog()
        self._samples: deque[dict[str, Any]] = deque(maxlen=NUM_SAMPLES)
        self._gains = _Rarely[Gains | None](CURVE_REST)
        self._tree = _Rarely[list[dict[str, Any]]](TREE_REST)

    def seen(self, engine: Any = None) -> dict[str, Any]:
        """Return pools, tiers and counters at present; with an `Engine`, its counters and queues too."""
        manager, stats = self._manager, self._manager.stats
        tiers = self._tiers.stats().tiers if self._tiers is not None else ()
        told: dict[str, Any] = {}
        if engine is not None:
            view = EngineView.of(engine)
            told = {"engine": view.counters, "queues": [view.running, view.waiting]} | view.figures
        return told | {
            "block_size": manager.block_size,
            "groups": [
                {"name": pool.name, "num_blocks": pool.num_blocks} | states
                for pool, states in zip(manager.pools, block_states(manager), strict=True)
            ],
            "stats": msgspec.structs.asdict(stats) | {"hit_rate": stats.hit_rate},
            "tiers": [
                {
                    "name": each.tier.name,
                    "records": each.tier.num_records,
                    "bytes": each.tier.num_bytes,
                    "capacity_bytes": each.tier.capacity_bytes,
                    "queued_bytes": each.queued_bytes,
                }
                for each in tiers
            ],
        }

    def keep(self, seen: dict[str, Any]) -> None:
        """Keep a sample of what was seen, with the log's percentiles; of many, the latest are kept."""
        states = ("free", "active", "pinned", "cached")
        sample = {"at": time.time()} | {name: seen["stats"][name] for name in SAMPLED}
        sample["groups"] = [[each[name] for name in states] for each in seen["groups"]]
        sample["tiers"] = [each["bytes"] for each in seen["tiers"]]
        for name in ("running", "waiting", "preemptions", "generated_tokens"):
            sample[name] = seen.get("engine", {}).get(name, 0)
        self._samples.append(sample | self._log.sample())

    @asynccontextmanager
    async def sampling(self, call: Call) -> AsyncGenerator[None]:
        """Take a sample every two seconds meanwhile; `call` has a function done by the thread that has the manager."""

        async def samples() -> None:
            while True:
                with suppress(QuireError):  # of a cache that was cut off there is none
                    self.keep(await call(self.seen))
                await asyncio.sleep(EVERY_S)

        task = asyncio.create_task(samples())
        try:
            yield
        finally:
            task.cancel()

    def state(
        self, seen: dict[str, Any], gains: Gains | None = None, since: float = 0.0
    ) -> dict[str, Any]:
        """Return what was seen, the samples after a time, and the log's rates, percentiles, tenants and requests."""
        told, kept = self._log.state(), [each for each in self._samples if each["at"] > since]
        for name, queue in zip(("running", "waiting"), seen.get("queues", ()), strict=False):
            by_class = self._log.by_class(queue)
            for each in told["tenants"]:
                each[name] = by_class.get(each["tenant"], 0)
        here = {name: part for name, part in seen.items() if name != "queues"}
        what_if = gains and gains.beside(here["stats"]["hit_rate"])
        return here | {"samples": kept, "every_s": EVERY_S, "what_if": what_if} | told

    def tree(self) -> list[dict[str, Any]]:
        """Return the prefix tree as a picture, made anew only where that takes little of the time."""
        return self._tree.get(lambda: TreePicture(self._manager).data())

    def gains(self, factors: Sequence[float]) -> Gains | None:
        """Return what so many times the memory would have added to the hit rate; None where no `LiveCurve` watches.

        It may be called on any thread: a request that is opened meanwhile counts or does not.
        """
        watcher = self._manager.kernel.watchers.find(LiveCurve)
        if watcher is None:
            return None
        curve = watcher.what_if()
        at = [curve.at(curve.capacity_blocks * factor) - curve.hit_rate for factor in factors]
        return Gains([*factors], at, curve.ceiling - curve.hit_rate)

    def what_if(self, factors: Sequence[float]) -> dict[str, Any] | None:
        """Return the hit rates that so many times the memory would have given; None where no `LiveCurve` watches."""
        gains = self.gains(factors)
        return gains and gains.beside(self._manager.stats.hit_rate)

    def latest_gains(self, factors: Sequence[float]) -> Gains | None:
        """Return the same, made anew only where that takes little of the time that has gone since."""
        return self._gains.get(lambda: self.gains(factors))


class Gains(NamedTuple):
    """Differences from the present hit rate: at `factors` of the memory, and without a limit (`most`)."""

    factors: list[float]
    at: list[float]
    most: float

    def beside(self, hit_rate: float) -> dict[str, Any]:
        """Return the hit rates beside the measured one, which is that of factor 1."""
        rates = [min(max(hit_rate + gain, 0.0), 1.0) for gain in (*self.at, self.most)]
        points = [
            {"factor": factor, "hit_rate": rate}
            for factor, rate in zip(self.factors, rates[:-1], strict=True)
        ]
        return {"points": points, "ceiling": rates[-1]}


T = TypeVar("T")


class _Rarely(Generic[T]):
    """A value that is made anew only after `rest` times as long as making it took."""

    def __init__(self, rest: float) -> None:
        self._rest, self._due, self._made = rest, 0.0, None

    def get(self, make: Callable[[], T]) -> T:
        begun = time.monotonic()
        if begun >= self._due:
            self._made: T | None = make()
            ended = time.monotonic()
            self._due = ended + self._rest * (ended - begun)
        return cast("T", self._made)


def read_numbers(name: str, text: str) -> list[float]:
    """Return the numbers that a field has as text, between commas. Raises `ConfigError`."""
    try:
        numbers = [float(each) for each in text.split(",")]
    except ValueError:
        numbers = [-1.0]
    if not all(0 <= each < inf for each in numbers):
        raise ConfigError(f"{name} is one or more numbers from 0 on, as 0.5,2; got {text[:60]!r}")
    return numbers
