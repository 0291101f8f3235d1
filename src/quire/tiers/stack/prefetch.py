"""Prefetch: what a waiting request will need comes into the fastest tier before its turn."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Literal, TypeAlias

from quire.tiers.base import Keys, Outcome
from quire.tiers.stack.fetching import Fetch
from quire.tiers.stack.lanes import Deadline, Signal
from quire.tiers.stack.level import Level, Shared
from quire.tiers.stack.reading import Reader

Mode: TypeAlias = Literal["best_effort", "complete", "timeout"]
"""What a request whose turn has come does about what has not arrived.

`best_effort`  goes without it
`complete`     waits for it, up to `prefetch_complete_s`
`timeout`      waits until `prefetch_base_s` and `prefetch_per_1k_tokens_s` for each 1,000 tokens have
               passed since the prefetch began
"""

CHUNKS = 4
"""Chunks that one prefetch reads at a time."""

MOST_ACTIVE = 8
"""Prefetches that read at a time; the others wait for one of them to end."""


class Prefetch:
    """Records on their way into the fastest tier, for a request that waits for its turn.

    `finish` is called when its turn has come, or `cancel` when it went away. Without either it
    goes on to its end, and leaves nothing behind but a lease that runs out.
    """

    def __init__(self, owner: Prefetching, keys: Keys, sizes: Sequence[int], wait_s: float) -> None:
        self.keys = list(keys)
        self.num_ready = 0
        """Leading keys that are in the fastest tier, or were when they arrived."""
        self._sizes = list(sizes)
        self._owner = owner
        self._wait = Deadline(owner.shared.lanes, wait_s)
        self._done: Signal = owner.shared.lanes.signal()
        self._fetch: Fetch | None = None
        self._is_over = False

    @property
    def done(self) -> bool:
        """Whether nothing more is on its way."""
        return self._done.wait(0)

    def finish(self) -> int:
        """Stop by the rule of the mode, and return `num_ready`."""
        self._done.wait(self._wait.left_s)
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

    # What the prefetcher and its lanes call

    def advance(self) -> None:
        """Read the next records that are not there, or end at a key that no tier has."""
        owner = self._owner
        window, buffers = self._next_window()
        if not window:
            self._end()
            return
        keys = self.keys[window[0] : window[-1] + 1]
        deadline = Deadline(owner.shared.lanes, owner.shared.settings.prefetch_complete_s)
        fetch = Fetch(owner.shared, keys, buffers, deadline, self._arrived)
        with owner.shared.lock:
            is_over = self._is_over
            self._fetch = None if is_over else fetch
        if is_over:
            owner.shared.pool.give_back(buffers)
        else:
            owner.reader.begin(fetch, list(range(len(keys))), [1] * len(keys))

    def _next_window(self) -> tuple[range, list[memoryview]]:
        owner = self._owner
        first, most = self.num_ready, CHUNKS * int(owner.shared.settings.chunk_bytes)
        if owner.top.in_memory:
            there = owner.top.tier.contains(self.keys[first:])
            have = there.index(False) if False in there else len(there)
            owner.top.tier.lease(self.keys[first : first + have], owner.shared.settings.lease_s)
            first += have
            self.num_ready = first
        stop = first
        while stop < len(self.keys) and (most > 0 or stop == first):
            most -= self._sizes[stop]
            stop += 1
        return range(first, stop), owner.shared.pool.take(self._sizes[first:stop])

    def _arrived(self, fetch: Fetch) -> None:
        """Go on behind what has arrived and was kept, if that is all that was asked for."""
        owner = self._owner
        hits = [outcome is Outcome.HIT for outcome in fetch.outcomes]
        whole = hits.index(False) if False in hits else len(hits)
        if whole and owner.top.in_memory:
            there = owner.top.tier.contains(fetch.keys[:whole])  # not where it was full
            whole = there.index(False) if False in there else whole
            owner.top.tier.lease(fetch.keys[:whole], owner.shared.settings.lease_s)
        with owner.shared.lock:
            is_over = self._is_over
            self._fetch = None
            self.num_ready += whole
        owner.shared.pool.give_back(fetch.buffers)
        if whole < len(hits) or is_over:
            self._end()
        else:
            self.advance()

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
        self._levels = levels
        self._active: list[Prefetch] = []
        self._waiting: deque[Prefetch] = deque()

    @property
    def num_active(self) -> int:
        """Prefetches that read or wait to."""
        with self.shared.lock:
            return len(self._active) + len(self._waiting)

    def __call__(self, keys: Keys, sizes: Sequence[int], num_tokens: int, mode: Mode) -> Prefetch:
        """Begin to load keys into the fastest tier; see `TierStack.prefetch`."""
        settings = self.shared.settings
        wait_s = {
            "best_effort": 0.0,
            "complete": settings.prefetch_complete_s,
            "timeout": settings.prefetch_base_s
            + settings.prefetch_per_1k_tokens_s * num_tokens / 1000,
        }[mode]
        prefetch = Prefetch(self, keys, sizes, wait_s)
        is_of_use = (
            num_tokens >= settings.prefetch_min_tokens
            and len(self._levels) > 1
            and self.top.writes
            and settings.promote
            and not self.shared.is_closed
        )
        with self.shared.lock:
            begins = is_of_use and len(self._active) < MOST_ACTIVE
            if begins:
                self._active.append(prefetch)
            elif is_of_use:
                self._waiting.append(prefetch)
        if begins:
            prefetch.advance()
        elif not is_of_use:
            prefetch.cancel()
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
