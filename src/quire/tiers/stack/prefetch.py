"""Prefetch: a waiting request's records come into the fastest tier before its turn."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from quire.tiers.base import Keys, Outcome
from quire.tiers.stack.fetching import Fetch
from quire.tiers.stack.lanes import Deadline, Signal
from quire.tiers.stack.level import Level, Shared
from quire.tiers.stack.reading import Reader

CHUNKS = 4
"""Chunks that one prefetch reads at a time."""

MOST_ACTIVE = 8
"""Prefetches that read at a time; the others wait for one of them to end."""

READ_S = 30.0
"""The longest that one read of some chunks may take."""

LEASE_S = 30.0
"""How long prefetched records are kept from making room."""


class Prefetch:
    """Records on their way into the fastest tier, for a request that waits for its turn.

    `finish` is called when its turn has come, or `cancel` when it went away. Without either it
    goes on to its end, and leaves nothing behind but a lease that runs out.

    `num_ready`  leading keys that are in the fastest tier, or were when they arrived
    """

    def __init__(self, owner: Prefetching, keys: Keys, sizes: Sequence[int]) -> None:
        self.num_ready = 0
        self._keys = list(keys)
        self._sizes = list(sizes)
        self._owner = owner
        self._done: Signal = owner.shared.lanes.signal()
        self._fetch: Fetch | None = None
        self._is_over = False

    @property
    def done(self) -> bool:
        """Whether nothing more is on its way."""
        return self._done.wait(0)

    def finish(self, wait_s: float = 0.0) -> int:
        """Wait so long at most for what is still on its way, stop, and return `num_ready`."""
        self._done.wait(wait_s)
        self.cancel()
        return self.num_ready

    def cancel(self) -> None:
        """Stop at once; what has arrived stays. Twice does nothing."""
        with self._owner.shared.lock:
            self._is_over = True
            fetch = self._fetch
        if fetch is not None:
            self._owner.reader.end(fetch)
        self._end()

    # For `Prefetching` and its lanes

    def advance(self) -> None:
        """Read the next records that are not there, or end at a key that no tier has."""
        owner = self._owner
        window, buffers = self._next_window()
        if not window:
            self._end()
            return
        keys = self._keys[window[0] : window[-1] + 1]
        fetch = Fetch(owner.shared, keys, buffers, Deadline(owner.shared.lanes, READ_S))
        fetch.when_done = self._arrived
        with owner.shared.lock:
            is_over = self._is_over
            self._fetch = None if is_over else fetch
        if is_over:
            owner.shared.pool.give_back(buffers)
        else:
            owner.reader.begin(fetch, list(range(len(keys))), [1] * len(keys))

    def _next_window(self) -> tuple[range, list[memoryview]]:
        owner = self._owner
        self.num_ready += self._kept(self._keys[self.num_ready :])
        first, most = self.num_ready, CHUNKS * int(owner.shared.settings.chunk_bytes)
        stop = first
        while stop < len(self._keys) and (most > 0 or stop == first):
            most -= self._sizes[stop]
            stop += 1
        return range(first, stop), owner.shared.pool.take(self._sizes[first:stop])

    def _arrived(self, fetch: Fetch) -> None:
        """Go on behind what has arrived and was kept, if that is all that was asked for."""
        owner = self._owner
        hits = [outcome is Outcome.HIT for outcome in fetch.outcomes]
        whole = hits.index(False) if False in hits else len(hits)
        if owner.top.in_memory:
            whole = self._kept(fetch.keys[:whole])  # less where the tier was full
        with owner.shared.lock:
            is_over = self._is_over
            self._fetch = None
            self.num_ready += whole
        owner.shared.pool.give_back(fetch.buffers)
        if whole < len(hits) or is_over:
            self._end()
        else:
            self.advance()

    def _kept(self, keys: Keys) -> int:
        """Return the number of leading keys that the fastest tier has, leased from now on; 0 where it is not in memory."""
        top = self._owner.top
        if not top.in_memory:
            return 0
        there = top.tier.contains(keys)
        whole = there.index(False) if False in there else len(there)
        top.tier.lease(keys[:whole], LEASE_S)
        return whole

    def _end(self) -> None:
        with self._owner.shared.lock:
            self._is_over = True
        self._done.set()
        self._owner.ended(self)


class Prefetching:
    """Begins prefetches, `MOST_ACTIVE` at a time.

    What is read is kept in the fastest tier by the reader, as every read of a slower tier is.
    """

    def __init__(self, shared: Shared, reader: Reader, levels: Sequence[Level]) -> None:
        self.shared = shared
        self.reader = reader
        self.top = levels[0]
        self._is_of_use = len(levels) > 1 and self.top.writes and shared.settings.promote
        self._active: list[Prefetch] = []
        self._waiting: deque[Prefetch] = deque()

    @property
    def num_active(self) -> int:
        """Prefetches that read or wait to."""
        with self.shared.lock:
            return len(self._active) + len(self._waiting)

    def begin(self, keys: Keys, sizes: Sequence[int]) -> Prefetch:
        """Begin to load keys into the fastest tier; see `TierStack.prefetch`."""
        prefetch = Prefetch(self, keys, sizes)
        if not self._is_of_use or self.shared.is_closed:
            prefetch.cancel()
            return prefetch
        with self.shared.lock:
            begins = len(self._active) < MOST_ACTIVE
            (self._active if begins else self._waiting).append(prefetch)
        if begins:
            prefetch.advance()
        return prefetch

    def ended(self, prefetch: Prefetch) -> None:
        """Let the next one begin."""
        following: Prefetch | None = None
        with self.shared.lock:
            if prefetch in self._waiting:
                self._waiting.remove(prefetch)
            if prefetch in self._active:
                self._active.remove(prefetch)
                if self._waiting:
                    following = self._waiting.popleft()
                    self._active.append(following)
        if following is not None:
            following.advance()

    def close(self) -> None:
        """Cancel all."""
        with self.shared.lock:
            prefetches = [*self._active, *self._waiting]
        for prefetch in prefetches:
            prefetch.cancel()
