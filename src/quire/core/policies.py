"""Least recently used, the policy of the core, and the ones that names stand for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from quire.core.policy import ENDLESS, Capacity, Entry, Policy, PolicyFactory, Tick
from quire.plugins import chosen, names_offered

GROUP = "quire.policies"
"""Entry points of packages that offer a policy, quire's own in `quire.foresight` among them."""


class Lru(Policy):
    """Evicts the least recently used block first.

    All cached entries stand in one linked list, oldest first, and a release appends from the
    deepest entry upwards. So a parent is never older than its child and the head of the list
    is always evictable: every step is O(1), with no heap and no search. On prefix chains
    this is exact block-wise LRU, and a stack algorithm. `uses` holds the tick of the release.
    Source: Mattson et al., Evaluation techniques for storage hierarchies, IBM Systems
    Journal 9(2), 1970, doi:10.1147/sj.92.0078.
    """

    def __init__(self, tick: Tick, capacity: Capacity) -> None:
        super().__init__(tick, capacity)
        self._ends = Entry()
        self._ends.older = self._ends.newer = self._ends
        self._near = (
            self._ends
        )  # where the last entry came back, or went: the next to come back is near

    def released(self, entry: Entry) -> None:
        ends = self._ends
        newest = ends.older
        entry.older, entry.newer = newest, ends
        newest.newer = ends.older = entry
        entry.uses = self.tick()

    def returned(self, entry: Entry) -> None:
        hint = self._near
        newer = (hint if hint.uses <= entry.uses else self._ends).newer
        while newer is not self._ends and newer.uses <= entry.uses:
            newer = newer.newer
        older = newer.older
        entry.older, entry.newer = older, newer
        older.newer = newer.older = entry
        self._near = entry

    def referenced(self, entry: Entry) -> None:
        self._near = older = entry.older
        older.newer, entry.newer.older = entry.newer, older
        entry.older = entry.newer = None

    def split(self, upper: Entry, lower: Entry) -> None:
        upper.older, upper.newer = lower, lower.newer
        lower.newer.older = upper
        lower.newer = upper

    def victim(self) -> tuple[Entry, int] | None:
        oldest = self._ends.newer
        return (oldest, ENDLESS) if oldest is not self._ends else None

    def order(self) -> Iterator[Entry]:
        entry = self._ends.newer
        while entry is not self._ends:
            yield entry
            entry = entry.newer


def policy_names() -> list[str]:
    """Return the policy names that `CacheManager` takes: the core's own, and those of entry points."""
    return sorted({"lru"} | names_offered(GROUP))


def factory_of(policy: object) -> PolicyFactory:
    """Return the factory of policy objects, given itself or by a policy's name. Raises `ConfigError`.

    A class that is no `Policy` is made first, without arguments: `quire.foresight.Learned` is a factory then.
    """
    return cast("PolicyFactory", chosen(policy, Policy, GROUP, {"lru": Lru}))
