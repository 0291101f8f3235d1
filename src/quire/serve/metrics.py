"""What a server counts of its requests and shows of its cache, for Prometheus and for the page."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from heapq import nlargest
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from quire.core import CacheManager, Watcher
from quire.core.node import Node, NodePart
from quire.core.sequence import Sequence as Running
from quire.core.stats import Missed
from quire.core.tokens import Key
from quire.engines.loop import AsyncEngine, Engine, RequestOutput
from quire.errors import QuireError
from quire.foresight import LiveCurve
from quire.observe.prometheus import CacheCollector

FACTORS = (0.5, 1, 2, 4)
"""Memories that the page asks about, as factors of what there is."""

CURVE_REST = 20
"""The curve is not made again for so many times as long as making it took."""

EVERY_S = 2.0
NUM_SAMPLES = 450
NUM_BRANCHES = 8
MAX_NODES = 4_000
"""Nodes of the tree that are looked at for the hottest branches, so that a step does not wait long."""

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """The figures of one server."""

    def __init__(self, running: AsyncEngine) -> None:
        self._call, engine = running.call, running.engine
        self._manager, self._curve, self._curve_due = engine.manager, None, 0.0
        self.registry = registry = CollectorRegistry()
        registry.register(CacheCollector(engine.manager, getattr(engine, "tiers", None)))
        self._first = Histogram(
            "quire_ttft_seconds", "From request to first token", registry=registry, buckets=SECONDS
        )
        self._between = Histogram(
            "quire_itl_seconds", "Between tokens of a request", registry=registry, buckets=SECONDS
        )
        self._ended = Counter(
            "quire_finished", "Sequences that ended, by why", ["reason"], registry=registry
        )
        self._made = Counter("quire_generation_tokens", "Tokens generated", registry=registry)
        self._samples = deque[dict[str, Any]](maxlen=NUM_SAMPLES)

    def took(self) -> Callable[[RequestOutput], None]:
        """Return what is to be told each output of a request that begins now."""
        begun, latest = time.monotonic(), dict[str, tuple[float, int]]()

        def told(output: RequestOutput) -> None:
            now, num_tokens = time.monotonic(), sum(each.num_tokens for each in output.outputs)
            before, num_told = latest.get(output.request_id, (begun, 0))
            if num_tokens > num_told:
                latest[output.request_id] = now, num_tokens
                self._made.inc(num_tokens - num_told)
                (self._between if num_told else self._first).observe(now - before)
            if output.finished:
                for each in output.outputs:
                    self._ended.labels(each.finish_reason or "none").inc()

        return told

    async def prometheus(self) -> bytes:
        """Return all figures as Prometheus reads them."""
        return await self._call(lambda _: generate_latest(self.registry))

    @asynccontextmanager
    async def sampled(self) -> AsyncGenerator[None]:
        """Take a sample of the cache's counters every two seconds, for the curves of the page."""

        async def sample() -> None:
            while True:
                with suppress(QuireError):  # of a cache that was cut off there is none
                    self._samples.append(await self._call(_sample))
                await asyncio.sleep(EVERY_S)

        task = asyncio.create_task(sample())
        try:
            yield
        finally:
            task.cancel()

    async def state(self) -> dict[str, Any]:
        """Return what the page shows, and `/v1/cache`: no prompt's text or ids."""
        begun = time.monotonic()
        if begun >= self._curve_due:
            self._curve = await self.what_if(FACTORS)
            ended = time.monotonic()
            self._curve_due = ended + CURVE_REST * (ended - begun)
        state = await self._call(_state)
        more = {"what_if": self._curve, "samples": list(self._samples), "every_s": EVERY_S}
        return state | more

    async def what_if(self, factors: Sequence[float]) -> dict[str, Any] | None:
        """Return the hit rate that other capacities would have had; None where no `LiveCurve` watches."""
        watcher = self._manager.kernel.watchers.find(LiveCurve)
        if watcher is None:
            return None
        # Not on the engine's thread, which it would hold up: a request that is opened meanwhile may count or not.
        curve = await asyncio.to_thread(watcher.what_if)
        points = [
            {"factor": factor, "hit_rate": curve.at(curve.capacity_blocks * factor)}
            for factor in factors
        ]
        return {"points": points, "ceiling": curve.ceiling, "says": str(curve)}


def _sample(engine: Engine) -> dict[str, Any]:
    stats = engine.manager.stats
    return {
        "at": time.time(),
        "prompt_tokens": stats.prompt_tokens,
        "hit_tokens": stats.hit_tokens,
        "missed": stats.missed,
        "computed_tokens": stats.computed_tokens,
    }


def _state(engine: Engine) -> dict[str, Any]:
    manager, tiers = engine.manager, getattr(engine, "tiers", None)
    stats = manager.stats
    counts = {name: getattr(stats, name) for name in stats.__struct_fields__}
    return {
        "block_size": manager.block_size,
        "groups": [
            {
                "name": pool.name,
                "num_blocks": pool.num_blocks,
                "free": pool.num_free,
                "active": pool.num_active,
                "cached": pool.num_cached,
            }
            for pool in manager.pools
        ],
        "stats": counts | {"hit_rate": stats.hit_rate},
        "engine": asdict(engine.stats()),
        "branches": branches(manager),
        "tiers": [
            {"name": each.tier.name, "records": each.tier.num_records, "bytes": each.tier.num_bytes}
            for each in (tiers.stats().tiers if tiers is not None else ())
        ],
    }


class HeatPart(NodePart, gc=False, eq=False):
    """How many requests found a node."""

    uses: int = 0

    def split(self, upper: Node, lower: Node) -> "HeatPart":
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


def branches(manager: CacheManager) -> list[dict[str, Any]]:
    """Return the branches of the prefix tree that saved most, and no word of what they hold; none where no `Heat` watches."""
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
