"""A cache as plain data for a page: pools, counters, hottest branches, tiers, hit-rate curve.

Nothing here tells what prompts were about.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from heapq import nlargest
from typing import Any, TypeAlias

import msgspec

from quire.core import CacheManager, Watcher
from quire.core.node import Node, NodePart
from quire.core.sequence import Sequence as Running
from quire.core.stats import Missed
from quire.core.tokens import Key
from quire.errors import ConfigError, QuireError
from quire.foresight import LiveCurve
from quire.ops import block_states

Call: TypeAlias = Callable[[Callable[[Any], None]], Awaitable[None]]

NUM_BRANCHES = 8
MAX_NODES = 4_000
"""Nodes of the tree that are looked at for the hottest branches, so that a step does not wait long."""


CURVE_REST = 20
"""The curve is not made again for so many times as long as making it took."""

EVERY_S = 2.0
NUM_SAMPLES = 450
SAMPLED = ("prompt_tokens", "hit_tokens", "missed", "computed_tokens")


class Overview:
    """The contents and counters of a cache, with samples over time: plain data for a page.

    `tiers` is the `TierStack` below it, if there is one. `sample` and `state` are for the thread that has the manager.
    """

    def __init__(self, manager: CacheManager, tiers: Any = None) -> None:
        self._manager, self._tiers = manager, tiers
        self._samples = deque[dict[str, Any]](maxlen=NUM_SAMPLES)
        self._curve: dict[str, Any] | None = None
        self._curve_due = 0.0

    def sample(self) -> None:
        """Note the counters as they are now; of many samples, the latest are kept."""
        stats = self._manager.stats
        self._samples.append({"at": time.time()} | {name: getattr(stats, name) for name in SAMPLED})

    @asynccontextmanager
    async def sampling(self, call: Call) -> AsyncGenerator[None]:
        """Take a sample every two seconds meanwhile; `call` has a function done by the thread that has the manager."""

        async def samples() -> None:
            while True:
                with suppress(QuireError):  # of a cache that was cut off there is none
                    await call(lambda _: self.sample())
                await asyncio.sleep(EVERY_S)

        task = asyncio.create_task(samples())
        try:
            yield
        finally:
            task.cancel()

    def state(self) -> dict[str, Any]:
        """Return all but the curve."""
        manager, stats = self._manager, self._manager.stats
        tiers = self._tiers.stats().tiers if self._tiers is not None else ()
        return {
            "block_size": manager.block_size,
            "groups": [
                {"name": pool.name, "num_blocks": pool.num_blocks} | states
                for pool, states in zip(manager.pools, block_states(manager), strict=True)
            ],
            "stats": msgspec.structs.asdict(stats) | {"hit_rate": stats.hit_rate},
            "branches": branches(manager),
            "tiers": [
                {
                    "name": each.tier.name,
                    "records": each.tier.num_records,
                    "bytes": each.tier.num_bytes,
                }
                for each in tiers
            ],
            "samples": list(self._samples),
            "every_s": EVERY_S,
        }

    def what_if(self, factors: Sequence[float]) -> dict[str, Any] | None:
        """Return the hit rate that so many times the memory would have given; None where no `LiveCurve` watches.

        It may be called on any thread: a request that is opened meanwhile counts or does not.
        """
        watcher = self._manager.kernel.watchers.find(LiveCurve)
        if watcher is None:
            return None
        curve = watcher.what_if()
        points = [
            {"factor": factor, "hit_rate": curve.at(curve.capacity_blocks * factor)}
            for factor in factors
        ]
        return {"points": points, "ceiling": curve.ceiling, "says": str(curve)}

    def latest_what_if(self, factors: Sequence[float]) -> dict[str, Any] | None:
        """Return the same, made anew only where that takes little of the time that has gone since."""
        begun = time.monotonic()
        if begun >= self._curve_due:
            self._curve = self.what_if(factors)
            ended = time.monotonic()
            self._curve_due = ended + CURVE_REST * (ended - begun)
        return self._curve


def read_factors(text: str) -> list[float]:
    """Return factors of memory as text has them, between commas. Raises `ConfigError`."""
    try:
        factors = [float(each) for each in text.split(",")]
    except ValueError:
        factors = [-1.0]
    if not all(0 <= factor <= 1e6 for factor in factors):
        raise ConfigError(f"memory is one or more factors, as 0.5,2; got {text[:60]!r}")
    return factors


def branches(manager: CacheManager) -> list[dict[str, Any]]:
    """Return the branches of the prefix tree that saved most, without their tokens.

    The list is empty without a `Heat` watcher.
    """
    heat = manager.kernel.watchers.find(Heat)
    if heat is None:
        return []
    nodes = deque(manager.kernel.tree.roots.values())
    seen: list[tuple[int, int, Node]] = []
    while nodes and len(seen) < MAX_NODES:
        node = nodes.popleft()
        seen.append((node.parts[heat.place].uses * node.num_blocks, len(seen), node))
        nodes.extend(node.children.values())
    return [
        {
            "start": node.start * manager.block_size,
            "end": node.end * manager.block_size,
            "uses": node.parts[heat.place].uses,
            "branches": len(node.children),
            "running": node.locks,
        }
        for saved, _, node in nlargest(NUM_BRANCHES, seen)
        if saved
    ]


class HeatPart(NodePart, gc=False, eq=False):
    """The number of requests that found a node."""

    uses: int = 0

    def split(self, upper: Node, lower: Node) -> HeatPart:
        return HeatPart(self.uses)

    def cut(self, node: Node) -> None:
        pass

    def join(self, upper: Any, at: int) -> None:
        self.uses = max(self.uses, upper.uses)


class Heat(Watcher):
    """Counts of every branch of the prefix tree the requests that found it."""

    part = HeatPart

    def opened(self, seq: Running, key: Key, missed: Missed) -> None:
        for node in seq.node.path():
            node.parts[self.place].uses += 1
