"""Routing: the choice of a replica for a request, for the simulator, the proxy and Ray Serve.

A router is a pure function: it sees the facts of each replica and returns the index of one. It has no clock and
draws nothing: choices that look random follow from a counter, so equal calls give equal answers.
"""

from collections.abc import Callable, Sequence
from hashlib import blake2b
from itertools import count
from typing import NamedTuple, Protocol

from quire.config import nearest
from quire.errors import ConfigError

WORTH = (1.0, 0.75, 0.5)
"""What a cached token saves by its tier, of what computing it costs: device, host, storage."""


class Target(NamedTuple):
    """The facts of one replica when a request comes.

    `name`    tells it from the others, and stays the same
    `load`    requests that wait or run there
    `cached`  tokens of the prompt that it holds from its first one on, by tier, nearest first;
              any unit that is the same for all replicas will do
    """

    name: str
    load: int
    cached: tuple[int, ...] = ()


class Router(Protocol):
    """Chooses a replica. `sees_prefix`: whether `Target.cached` is looked at."""

    sees_prefix: bool

    def __call__(self, replicas: Sequence[Target], session: str | None = None) -> int:
        """Return the place of one of the replicas, of which there is at least one."""
        ...


class RoundRobin:
    """Each in turn."""

    sees_prefix = False

    def __init__(self) -> None:
        self._turns = count()

    def __call__(self, replicas: Sequence[Target], session: str | None = None) -> int:
        return next(self._turns) % len(replicas)


class LeastLoaded:
    """The one with the fewest requests; of equals the first."""

    sees_prefix = False

    def __call__(self, replicas: Sequence[Target], session: str | None = None) -> int:
        return min(range(len(replicas)), key=lambda at: replicas[at].load)


class PowerOfTwo:
    """The less loaded of two random replicas; stale loads then do not send all to one.

    Mitzenmacher, The Power of Two Choices in Randomized Load Balancing (2001, doi:10.1109/71.963420).
    """

    sees_prefix = False

    def __init__(self) -> None:
        self._draws = count()

    def __call__(self, replicas: Sequence[Target], session: str | None = None) -> int:
        num = len(replicas)
        if num == 1:
            return 0
        draw = _digest(str(next(self._draws)))
        one = draw % num
        other = (one + 1 + draw // num % (num - 1)) % num
        return min(one, other, key=lambda at: replicas[at].load)


class SessionAffinity:
    """A session stays where its name leads it; who has none goes to the less loaded of two.

    By rendezvous hashing: when a replica goes, only its own sessions move (Thaler, Ravishankar,
    Using Name-Based Mappings to Increase Hit Rates, 1998, doi:10.1109/90.663936).
    """

    sees_prefix = False

    def __init__(self) -> None:
        self._others = PowerOfTwo()

    def __call__(self, replicas: Sequence[Target], session: str | None = None) -> int:
        if session is None:
            return self._others(replicas)
        return max(range(len(replicas)), key=lambda at: _digest(replicas[at].name, session))


class PrefixAware:
    """The one whose cached prefix saves most, unless it has too much to do.

    A replica takes part while it has fewer requests than `load_limit` times what would be its
    share, rounded up: Mirrokni, Thorup, Zadimoghaddam, Consistent Hashing with Bounded Loads
    (SODA 2018, doi:10.1137/1.9781611975031.39). Of these the one is chosen whose cached tokens, each
    by the `worth` of its tier, are most; among equals, first the one to which the session leads, then
    the least loaded, then the first. Where no replica holds any of the prompt and there is no
    session, the less loaded of two is. Raises `ConfigError`.
    """

    sees_prefix = True

    def __init__(self, load_limit: float = 1.25, worth: Sequence[float] = WORTH) -> None:
        if not 1 <= load_limit < float("inf"):
            raise ConfigError(f"the load limit is 1 or more, got {load_limit:g}")
        if not worth or not all(0 <= each <= 1 for each in worth):
            raise ConfigError(f"the worth of a tier is from 0 to 1, got {list(worth)}")
        self.load_limit = load_limit
        self.worth = tuple(worth)
        self._affinity, self._others = SessionAffinity(), PowerOfTwo()

    def __call__(self, replicas: Sequence[Target], session: str | None = None) -> int:
        total = sum(replica.load for replica in replicas) + 1
        limit = -(-self.load_limit * total // len(replicas))
        able = [at for at, replica in enumerate(replicas) if replica.load < limit]
        saved = {at: self._saved(replicas[at]) for at in able}
        most = max(saved.values())
        best = [at for at in able if saved[at] == most]
        among = [replicas[at] for at in best]
        if session is not None:
            return best[self._affinity(among, session)]
        if most == 0:
            return best[self._others(among)]
        return min(best, key=lambda at: replicas[at].load)

    def _saved(self, replica: Target) -> float:
        last = self.worth[-1]
        return sum(
            tokens * (self.worth[tier] if tier < len(self.worth) else last)
            for tier, tokens in enumerate(replica.cached)
        )


ROUTERS: dict[str, Callable[[], Router]] = {
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "power-of-two": PowerOfTwo,
    "session": SessionAffinity,
    "prefix": PrefixAware,
}


def router_named(name: str, *, load_limit: float = 1.25) -> Router:
    """Return a router by name; `load_limit` is of "prefix". Raises `ConfigError`."""
    if name == "prefix":
        return PrefixAware(load_limit)
    if name not in ROUTERS:
        near = nearest(name, ROUTERS)
        raise ConfigError(f"unknown router {name!r}{near} There are {', '.join(ROUTERS)}")
    return ROUTERS[name]()


def _digest(*names: str) -> int:
    return int.from_bytes(blake2b("\0".join(names).encode(), digest_size=8).digest(), "big")
