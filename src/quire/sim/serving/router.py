"""Routers: the choice of a replica for a request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import TypeAlias

from quire.errors import ConfigError
from quire.sim.names import unknown
from quire.sim.serving.replica import Replica
from quire.sim.serving.requests import LiveRequest

Router: TypeAlias = Callable[[LiveRequest, Sequence[Replica], float], Replica]
"""Chooses one of the replicas for an arrival: called with it, all of them, and the time."""


def round_robin() -> Router:
    """Return a router that takes each in turn."""
    turns = count()
    return lambda _job, replicas, _now: replicas[next(turns) % len(replicas)]


def least_loaded(_job: LiveRequest, replicas: Sequence[Replica], _now: float) -> Replica:
    """Return the replica with the fewest requests waiting or running; of equals the first."""
    return min(replicas, key=_load)


class PrefixAware:
    """The one that holds the longest prefix of the prompt, unless it has too much to do.

    A replica takes part while it has fewer requests than `load_limit` times what would be its
    share, rounded up: Mirrokni, Thorup, Zadimoghaddam, Consistent Hashing with Bounded Loads
    (SODA 2018, doi:10.1137/1.9781611975031.39). Among equal prefixes the least loaded one is
    chosen, of equals the first. Raises `ConfigError`.
    """

    def __init__(self, load_limit: float = 1.25) -> None:
        if not 1 <= load_limit < float("inf"):
            raise ConfigError(f"the load limit is 1 or more, got {load_limit:g}")
        self.load_limit = load_limit

    def __call__(self, job: LiveRequest, replicas: Sequence[Replica], now: float) -> Replica:
        total = sum(replica.load for replica in replicas) + 1
        limit = -(-self.load_limit * total // len(replicas))
        able = [replica for replica in replicas if replica.load < limit]
        return max(able, key=lambda replica: (replica.cached_blocks(job, now), -replica.load))


def router_named(name: str, *, load_limit: float = 1.25) -> Router:
    """Return a router by name. Raises `ConfigError`."""
    made = {
        "round-robin": round_robin,
        "least-loaded": lambda: least_loaded,
        "prefix": lambda: PrefixAware(load_limit),
    }
    if name not in made:
        raise unknown("router", name, made, "write a function like these")
    return made[name]()


def _load(replica: Replica) -> int:
    return replica.load
