"""The queues and counters of an engine at one moment."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import msgspec


class EngineView(NamedTuple):
    """Queues and counters of an engine at one moment, taken in its thread.

    `running`, `waiting`  sequences by tenant
    `counters`            of `EngineStats`, with the preemptions of requests that run or wait
    """

    running: Counter[Any]
    waiting: Counter[Any]
    counters: dict[str, int]

    @classmethod
    def of(cls, engine: Any) -> EngineView:
        """Return the view of a `quire.engines.loop.Engine`."""
        scheduler, counters = engine.scheduler, msgspec.to_builtins(engine.stats())
        running, waiting = [*scheduler.prefilling, *scheduler.decoding], [*scheduler.waiting]
        counters["preemptions"] += sum(job.num_preempted for job in (*running, *waiting))
        return cls(_by_tenant(running), _by_tenant(waiting), counters)


def _by_tenant(jobs: list[Any]) -> Counter[Any]:
    return Counter(None if job.scope is None else job.scope.tenant for job in jobs)
