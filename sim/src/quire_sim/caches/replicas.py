"""The caches of a server's replicas and tenants: a request finds what its own ones have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec

from quire_sim.caches.asking import CacheHit, ServerCache
from quire_sim.caches.prompts import CachePrompt
from quire_sim.caches.radix import SeenPrompts

LEAST = 16
"""Tokens that another replica or tenant has more at least, to be the reason; fewer are chance."""


class _Asker(NamedTuple):
    """The row of a request, and who sent it."""

    row: int
    tenant: str


class _Elsewhere(NamedTuple):
    """Tokens of a prompt that another replica or tenant has, the row that has them, and that replica."""

    tokens: int = 0
    row: int = 0
    replica: str = ""


class ReplicaCaches:
    """A cache for each replica that a log names, all of the same kind; without names, one.

    `opened` opens an empty cache. Tenants share nothing if the server `divides_tenants`.
    """

    def __init__(self, opened: Callable[[], ServerCache], *, divides_tenants: bool) -> None:
        self._opened, self._divides_tenants = opened, divides_tenants
        self._spare: ServerCache | None = opened()  # wrong options are told at once
        self._caches: dict[str, ServerCache] = {}
        self._sent: dict[str, SeenPrompts] = {}
        self._askers: list[_Asker] = [_Asker(0, "")]
        self._elsewhere: dict[int, _Elsewhere] = {}

    def at(self, replica: str) -> ServerCache:
        """Return the cache of a replica."""
        cache = self._caches.get(replica)
        if cache is None:
            cache, self._spare = self._spare or self._opened(), None
            self._caches[replica] = cache
        return cache

    def add(self, number: int, prompt: CachePrompt) -> Iterator[CacheHit]:
        """Take the next request; yield the hits of requests that start meanwhile."""
        if not self._divides_tenants:
            prompt = msgspec.structs.replace(prompt, tenant="")
        if prompt.replica or prompt.tenant:
            self._note(number, prompt)
            scope = f"{prompt.tenant}\0{prompt.scope}"
            prompt = msgspec.structs.replace(prompt, scope=scope)
        for hit in self.at(prompt.replica).add(number, prompt):
            yield self._beside(hit, prompt.replica)

    def rest(self) -> Iterator[CacheHit]:
        """Yield the hits of the requests that have not started yet."""
        for replica, cache in self._caches.items():
            for hit in cache.rest():
                yield self._beside(hit, replica)

    def _note(self, number: int, prompt: CachePrompt) -> None:
        """Note what others were asked before, and what this request asks."""
        scope, key = (prompt.model, prompt.scope), prompt.tokens.tobytes()
        own = prompt.replica
        for name, seen in self._sent.items():
            tokens, place = seen.longest(scope, key)
            asker = self._askers[place]
            if tokens > self._elsewhere.get(number, _Elsewhere()).tokens and (name != own or asker.tenant != prompt.tenant):  # fmt: skip
                self._elsewhere[number] = _Elsewhere(tokens, asker.row, name)
        seen = self._sent.setdefault(own, SeenPrompts())
        seen.add(scope, key + prompt.output[:-1].tobytes(), len(self._askers))
        self._askers.append(_Asker(prompt.row, prompt.tenant))

    def _beside(self, hit: CacheHit, replica: str) -> CacheHit:
        """Say of a hit that another replica or tenant has more, if that is more than what its own cache has lost."""
        other = self._elsewhere.pop(hit.number, _Elsewhere())
        more = other.tokens - hit.seen_tokens
        missed = 0 if hit.why == "rounding" else hit.seen_tokens - hit.hit_tokens
        if more >= max(LEAST, missed):
            hit.why, hit.seen_tokens, hit.earlier_row = "other-tenant", other.tokens, other.row
            if other.replica != replica:
                hit.why, hit.replica, hit.own_replica = "other-replica", other.replica, replica
        return hit
