"""The queues and counters of an engine at one moment."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import msgspec


class EngineView(NamedTuple):
    """Queues and counters of an engine at one moment, taken in its thread.

    `running`, `waiting`  sequences by tenant
    `counters`            of `EngineStats`, with the preemptions of requests that run or wait
    `figures`             of companions by name, such as "passages"
    """

    running: Counter[Any]
    waiting: Counter[Any]
    counters: dict[str, int]
    figures: dict[str, Any]

    @classmethod
    def of(cls, engine: Any) -> EngineView:
        """Return the view of a `quire.engines.loop.Engine`."""
        queues, counters = engine.scheduler.queues, msgspec.to_builtins(engine.stats())
        counters["preemptions"] += sum(
            job.num_preempted for job in (*queues.running, *queues.waiting)
        )
        tenants = queues.tenants.items()
        running = Counter({name: tenant.num_running for name, tenant in tenants})
        waiting = Counter({name: len(tenant.waiting) for name, tenant in tenants})
        return cls(running, waiting, counters, engine.figures)
