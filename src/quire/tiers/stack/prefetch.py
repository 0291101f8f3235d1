"""Prefetch: a waiting request's records come into the fastest tier before its turn."""

from __future__ import annotations

from collections.abc import Sequence

from quire.tiers.base import Keys, Outcome
from quire.tiers.contents.batches import batches
from quire.tiers.stack.fetching import Fetch
from quire.tiers.stack.lanes import Deadline, TierLane
from quire.tiers.stack.member import Shared, StackMember
from quire.tiers.stack.reading import Reader

BATCHES = 4
"""Chunks that one prefetch reads at a time."""

MOST_ACTIVE = 8
"""Prefetches that read at a time; the others wait for one of them to end."""

READ_S = 30.0
"""The longest that one read of some batches may take."""

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
        self._done = owner.shared.lanes.signal()
        self._fetch: Fetch | None = None
        self._is_over = False

    @property
    def done(self) -> bool:
        """Whether nothing more is on its way."""
        return self._done.wait(0)

    def finish(self, wait_s: float = 0.0) -> int:
        """Wait up to `wait_s` for records on their way, stop, and return `num_ready`."""
        self._done.wait(wait_s)
        self.cancel()
        return self.num_ready

    def cancel(self) -> None:
        """Stop at once; records that have arrived stay. Twice does nothing."""
        with self._owner.shared.lock:
            self._is_over = True
            self._owner.active.pop(self, None)
            fetch = self._fetch
        if fetch is not None:
            self._owner.reader.end(fetch)
        self._done.set()

    def run(self) -> None:
        """Read the missing records in batches, up to a key that no tier has. Runs in a lane."""
        while self._reads_some():
            pass
        self.cancel()

    def _reads_some(self) -> bool:
        """Read the next records; return whether all of them came, and there were any."""
        shared, reader = self._owner.shared, self._owner.reader
        self.num_ready += self._kept(self._keys[self.num_ready :])
        first = self.num_ready
        sizes = self._sizes[first:]
        most = BATCHES * int(shared.settings.batch_bytes)
        keys = next(batches(self._keys[first:], sizes, most), ())
        sizes = sizes[: len(keys)]
        fetch = Fetch(shared, keys, sizes, Deadline(shared.lanes, READ_S), is_patient=True)
        with shared.lock:
            if not keys or self._is_over:
                return False
            self._fetch = fetch
        reader.read(fetch, [1] * len(keys))
        hits = [outcome is Outcome.HIT for outcome in fetch.outcomes]
        whole = hits.index(False) if False in hits else len(hits)
        if self._owner.top.in_memory:
            whole = self._kept(fetch.keys[:whole])  # less where the tier was full
        with shared.lock:
            self._fetch = None
            self.num_ready += whole
        shared.give_back(fetch.buffers)
        return whole == len(keys)

    def _kept(self, keys: Keys) -> int:
        """Return the number of leading keys that the fastest tier has, leased from now on; 0 where it is not in memory."""
        top = self._owner.top
        if not top.in_memory:
            return 0
        there = top.tier.contains(keys)
        whole = there.index(False) if False in there else len(there)
        top.tier.lease(keys[:whole], LEASE_S)
        return whole


class Prefetching:
    """Runs prefetches, `MOST_ACTIVE` at a time, the others in turn.

    What is read is kept in the fastest tier by the reader, as every read of a slower tier is.
    """

    def __init__(self, shared: Shared, reader: Reader, levels: Sequence[StackMember]) -> None:
        self.shared = shared
        self.reader = reader
        self.top = levels[0]
        self.active: dict[Prefetch, None] = {}
        """Prefetches that read or wait to."""
        self._is_of_use = len(levels) > 1 and self.top.writes and shared.settings.promote
        self._lane = TierLane(shared.lanes, "prefetch", MOST_ACTIVE)

    def begin(self, keys: Keys, sizes: Sequence[int]) -> Prefetch:
        """Begin to load keys into the fastest tier; see `TierStack.prefetch`."""
        prefetch = Prefetch(self, keys, sizes)
        if not self._is_of_use or self.shared.is_closed:
            prefetch.cancel()
            return prefetch
        with self.shared.lock:
            self.active[prefetch] = None
        self._lane.submit(prefetch, prefetch.run, prefetch.cancel)
        return prefetch

    def close(self) -> None:
        """Cancel all."""
        with self.shared.lock:
            prefetches = list(self.active)
        for prefetch in prefetches:
            prefetch.cancel()
        self._lane.close()
