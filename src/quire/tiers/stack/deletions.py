"""Keys that are deleted while their records may be on their way to a faster tier."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from weakref import WeakSet

from quire.tiers.base import Keys
from quire.tiers.stack.lanes import Deadline
from quire.tiers.threads import Signal


@dataclass(slots=True, eq=False, weakref_slot=True)
class Rise:
    """A read of records that a faster tier may keep.

    `gone`  keys that were deleted since it began: they are not kept
    """

    over: Signal
    gone: set[bytes] = field(default_factory=set[bytes])
    keeps: frozenset[bytes] = frozenset()


class Deletions:
    """Deletions and reads under way: no read brings back a record deleted since it began.

    A deletion says which keys it is of, waits for those that are just being kept, and only then deletes; a read
    that comes to keep its records after that leaves these out, and nobody joins it for them. `lock` is its owner's.
    """

    def __init__(self, lock: AbstractContextManager[object]) -> None:
        self._lock = lock
        self._deleting: list[frozenset[bytes]] = []
        self._rises: WeakSet[Rise] = WeakSet()  # one that is cut off is gone with its frames

    @contextmanager
    def of(self, keys: Keys, deadline: Deadline) -> Generator[None]:
        """While entered, keys are deleted: no read that goes on keeps one of them. The lock is not held."""
        deleted = frozenset(keys)
        with self._lock:
            self._deleting.append(deleted)
            for rise in self._rises:
                rise.gone |= deleted
            being_kept = [rise for rise in self._rises if not rise.keeps.isdisjoint(deleted)]
        try:
            for rise in being_kept:
                rise.over.wait(deadline.left_s)
            yield
        finally:
            with self._lock:
                self._deleting.remove(deleted)

    # The lock is held

    def read(self, over: Signal) -> Rise:
        """Note a read that begins; `over` is set when its records are kept."""
        rise = Rise(over, set[bytes]().union(*self._deleting))
        self._rises.add(rise)
        return rise

    def kept(self, rise: Rise, keys: Keys) -> list[int]:
        """Return, by index, the keys of a finished read that may be kept, and mark them as being kept."""
        chosen = [at for at, key in enumerate(keys) if key not in rise.gone]
        rise.keeps = frozenset(keys[at] for at in chosen)
        return chosen

    def over(self, rise: Rise) -> None:
        """Say that a read keeps nothing any more."""
        self._rises.discard(rise)
        rise.over.set()
