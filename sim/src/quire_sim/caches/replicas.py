"""The caches of a server's replicas: a request finds what the replica has that answered it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from quire_sim.caches.asking import CacheHit, ServerCache
from quire_sim.caches.prompts import CachePrompt
from quire_sim.caches.radix import SeenPrompts

LEAST = 16
"""Tokens that another replica has more at least, to be the reason; fewer are chance."""


class ReplicaCaches:
    """A cache for each replica that a log names, all of the same kind; without names, one.

    `opened` opens an empty cache.
    """

    def __init__(self, opened: Callable[[], ServerCache]) -> None:
        self._opened = opened
        self._spare: ServerCache | None = opened()  # wrong options are told at once
        self._caches: dict[str, ServerCache] = {}
        self._sent: dict[str, SeenPrompts] = {}
        self._elsewhere: dict[int, tuple[int, int, str]] = {}

    def at(self, replica: str) -> ServerCache:
        """Return the cache of a replica."""
        cache = self._caches.get(replica)
        if cache is None:
            cache, self._spare = self._spare or self._opened(), None
            self._caches[replica] = cache
        return cache

    def add(self, number: int, prompt: CachePrompt) -> Iterator[CacheHit]:
        """Take the next request; yield the hits of requests that start meanwhile."""
        if prompt.replica:
            self._note(number, prompt)
        for hit in self.at(prompt.replica).add(number, prompt):
            yield self._beside(hit, prompt.replica)

    def rest(self) -> Iterator[CacheHit]:
        """Yield the hits of the requests that have not started yet."""
        for replica, cache in self._caches.items():
            for hit in cache.rest():
                yield self._beside(hit, replica)

    def _note(self, number: int, prompt: CachePrompt) -> None:
        """Note what other replicas were asked before, and what this one is asked."""
        scope, key = (prompt.model, prompt.scope), prompt.tokens.tobytes()
        others = [
            (*seen.longest(scope, key), name)
            for name, seen in self._sent.items()
            if name != prompt.replica
        ]
        if others:
            self._elsewhere[number] = max(others)
        seen = self._sent.setdefault(prompt.replica, SeenPrompts())
        seen.add(scope, key + prompt.output[:-1].tobytes(), prompt.row)

    def _beside(self, hit: CacheHit, replica: str) -> CacheHit:
        """Say of a hit that another replica has more, if that is more than what its own one has lost."""
        tokens, row, name = self._elsewhere.pop(hit.number, (0, 0, ""))
        more = tokens - hit.seen_tokens
        missed = 0 if hit.why == "rounding" else hit.seen_tokens - hit.hit_tokens
        if more >= max(LEAST, missed):
            hit.why, hit.seen_tokens, hit.earlier_row = "other-replica", tokens, row
            hit.replica, hit.own_replica = name, replica
        return hit
