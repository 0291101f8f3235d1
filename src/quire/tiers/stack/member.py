"""One tier as part of a stack: its lanes, its counts, and the statistics of its answers.

And what all tiers of a stack share: settings, a lock, memory of keys, and buffers that are used again.
"""

from __future__ import annotations

import logging
import mmap
import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from quire.errors import ConfigError
from quire.tiers.base import Keys, Outcome, Tier, TierStats
from quire.tiers.format import PAGED_FROM, PRIVATE, prefer_huge_pages
from quire.tiers.purging import Writes
from quire.tiers.stack.asking import Asking, Breaker, Kind
from quire.tiers.stack.deletions import Deletions
from quire.tiers.stack.gate import Estimate
from quire.tiers.stack.key_table import KeyTable
from quire.tiers.stack.lanes import Lanes, TierLane
from quire.tiers.stack.settings import StackSettings
from quire.tiers.stack.stats import Meter, TierReport, counted
from quire.tiers.wrapped import Late

PATIENCE_S = 0.02
"""A call that was given up sooner says more about its caller than about the tier."""

REMEMBERED_KEYS = 1 << 19
"""Keys whose whereabouts and uses are remembered: 9 bytes each."""

REFUSED_KEYS = 1 << 16
"""Keys that are remembered as not worth loading."""

_log = logging.getLogger(__name__)

_FAILED = {Outcome.TIMEOUT, Outcome.ERROR}


class _Pages(mmap.mmap):
    """Memory of a pool. `is_lent` from `take` until it comes back, so that twice does nothing."""

    is_lent: bool
    epoch: int


class _Few(bytearray):
    """The same for less than `PAGED_FROM` bytes: a process may have some 65,000 maps, all in all."""

    is_lent: bool
    epoch: int


def _new_pages(num_bytes: int) -> _Pages:
    pages = _Pages(-1, num_bytes, **PRIVATE)
    prefer_huge_pages(pages)
    return pages


class BufferPool:
    """Buffers by size, used again: fresh memory costs more than the copy into it.

    At most `limit_bytes` lie idle, what comes back beyond is freed.

    Counts as lent what nobody gave back, also where it was dropped: that is harmless.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.idle_bytes = 0
        self._idle: dict[int, list[memoryview]] = {}
        self._epoch = 0
        self._lock = threading.Lock()

    def take(self, sizes: Sequence[int]) -> list[memoryview]:
        """Return writable buffers of these sizes with any content, large ones at the start of a page."""
        buffers: list[memoryview] = []
        with self._lock:
            for size in sizes:
                idle = self._idle.get(size)
                if idle:
                    buffer = idle.pop()
                    self.idle_bytes -= size
                else:
                    buffer = memoryview(_new_pages(size) if size >= PAGED_FROM else _Few(size))
                pages: Any = buffer.obj
                pages.is_lent, pages.epoch = True, self._epoch
                buffers.append(buffer)
        return buffers

    def give_back(self, buffers: Sequence[memoryview]) -> None:
        """Take back buffers that are no longer in use; other buffers are left alone."""
        with self._lock:
            for buffer in buffers:
                pages = buffer.obj
                if not isinstance(pages, (_Pages, _Few)) or not pages.is_lent:
                    continue
                pages.is_lent = False
                size = len(buffer)
                if pages.epoch != self._epoch:
                    buffer[:] = bytes(size)  # what was purged meanwhile may lie in it
                    continue
                if self.idle_bytes + size <= self.limit_bytes:
                    self._idle.setdefault(size, []).append(buffer)
                    self.idle_bytes += size

    def wipe(self) -> None:
        """Zero idle buffers, and free them; lent ones are zeroed when they come back."""
        with self._lock:
            self._epoch += 1
            idle, self._idle, self.idle_bytes = self._idle, {}, 0
        for buffer in (each for some in idle.values() for each in some):
            buffer[:] = bytes(len(buffer))


class Shared:
    """State that all parts of a stack share. `lock` guards all that is counted and remembered."""

    def __init__(self, lanes: Lanes, settings: StackSettings) -> None:
        self.lanes = lanes
        self.settings = settings
        self.lock = lanes.lock()
        self.pool = BufferPool(int(settings.queue_bytes))
        self.whereabouts = KeyTable(REMEMBERED_KEYS)
        """A bit per tier that had the key when it was last asked or written."""
        self.refused = KeyTable(REFUSED_KEYS)
        """Bit 0: requests computed the key lately, as its tier takes too long to give it."""
        self.uses = KeyTable(REMEMBERED_KEYS)
        self.deletions = Deletions(self.lock)
        self.writes = Writes()
        self.epoch = 0
        """Counts purges."""
        self.purged: dict[bytes, int] = {}
        """The epoch in which each tag was purged last: what was made before is not written."""
        self.is_closed = False
        self.is_abandoned = False
        """Whether the tiers are another process's: nothing of them is called, not even to count."""
        self.lender: Tier | None = None
        """The tier that lends memory for what is to be stored."""

    def abandon(self) -> None:
        """Be closed at once, in a forked process: locks may be held by threads that are not here."""
        self.is_closed = self.is_abandoned = True
        self.lock = self.lanes.lock()
        self.deletions = Deletions(self.lock)
        self.pool = BufferPool(self.pool.limit_bytes)
        self.writes = Writes()
        self.lender = None

    def note_refused(self, refused: Keys, loaded: Keys = ()) -> None:
        """Note the keys that are computed although a tier may have them, and those that are loaded."""
        with self.lock:
            self.refused.clear(loaded, 0)
            self.refused.mark(refused, 0)

    def give_back(self, buffers: Sequence[memoryview | None]) -> None:
        """Take back buffers that are no longer in use."""
        given = [each for each in buffers if each is not None]
        self.pool.give_back(given)
        if self.lender is not None:
            self.lender.take_back(given)


class StackMember:
    """A tier at its place in the stack: 0 is the fastest.

    Whether calls run at once (`in_memory`) or in its lanes: one for what requests wait for, one
    for what they do not.
    """

    def __init__(self, shared: Shared, index: int, tier: Tier, name: str) -> None:
        settings = shared.settings
        self.shared = shared
        self.index = index
        self.tier = tier
        self.name = name
        self.settings = settings.of(name)
        self.in_memory = tier.in_memory
        self.answers_at_once = tier.in_memory or tier.answers_at_once
        self.writes = not (self.settings.read_only or settings.read_only)
        """Whether anything may be written to it."""
        self.meter = Meter()
        self.estimate = Estimate(*_first_guess(tier))
        self.reading, self.writing = (
            Breaker(shared.lanes.now, settings.failures, settings.cool_down_s) for _ in range(2)
        )
        if isinstance(tier, Late):  # which has said so itself
            self.reading.open()
            self.writing.open()
        self._said = self.reading.allows, self.writing.allows
        threads = self.settings.threads or settings.threads
        self.asking = Asking(shared.lanes.now, self.reading, threads)
        self.loads = TierLane(shared.lanes, f"{name} loads", threads)
        self.stores = TierLane(shared.lanes, f"{name} stores", 1)
        """Its owner is this level, for all that must come in order: records, touches, deletions, flushes."""

        self.closed = shared.lanes.signal()
        """Set when its tier is closed."""
        self._closes = False

    @property
    def patience_s(self) -> float:
        """The shortest wait that is held against the tier."""
        return min(PATIENCE_S, self.shared.settings.lookup_timeout_s / 4)

    def answered(self, kind: Kind, outcomes: Sequence[Outcome]) -> None:
        """Tell the breaker how a call went. The lock is held."""
        breaker = self.writing if kind == "store" else self.reading
        if not _FAILED.isdisjoint(outcomes):
            breaker.failed(kind)
        else:
            breaker.succeeded(kind)

    def given_up(self, kind: Kind, waited_s: float) -> None:
        """Tell the breaker that a call had not ended at its deadline. The lock is held."""
        if waited_s >= self.patience_s:
            self.reading.failed(kind)

    def hung(self, waited_s: float) -> None:
        """Tell the breaker that nothing at all came of a call for so long. The lock is held."""
        if waited_s >= self.patience_s:
            self.reading.open()

    def begins_to_close(self) -> bool:
        """Return whether the caller is the one to close this tier. The lock is not held.

        Of several threads that close the stack at once, one is.
        """
        with self.shared.lock:
            begins, self._closes = not self._closes, True
        return begins

    def say_changes(self) -> None:
        """Log when the tier stops or resumes being used for reads or writes. The lock is not held."""
        is_used = self.reading.allows, self.writing.allows
        if is_used == self._said:
            return
        with self.shared.lock:  # one of several threads says it
            before, self._said = self._said, is_used
        for what, was, now in zip(("reading", "writing"), before, is_used, strict=True):
            if now and not was:
                _log.info("%s is used again for %s", self.name, what)
            elif was and not now:
                _log.warning(
                    "%s failed or hung, and is left alone for %s; it is tried again beside%s",
                    self.name,
                    what,
                    f": {why}" if (why := self.tier.last_failure) else "",
                )

    def report(self, queued_bytes: int) -> TierReport:
        """Return its counts. The lock is not held."""
        stats = TierStats(self.name, -1, -1, -1, {})
        if not self.shared.is_abandoned:
            stats = msgspec.structs.replace(self.tier.stats(), name=self.name)
        with self.shared.lock:
            counts = msgspec.structs.asdict(self.meter)
            counts |= {name: counted(counts[name]) for name in ("loads", "stores")}
            return TierReport(
                tier=stats,
                **counts,
                queued_bytes=queued_bytes,
                reading=self.reading.state.value,
                writing=self.writing.state.value,
                num_opened=self.reading.num_opened + self.writing.num_opened,
                latency_s=self.estimate.latency_s,
                bandwidth=self.estimate.bandwidth,
            )


def _first_guess(tier: Tier) -> tuple[float, float]:
    """Return latency and bandwidth before anything was measured, seconds and bytes per second: orders of magnitude."""
    if tier.in_memory:
        return 20e-6, 4e9
    return (0.5e-3, 800e6) if tier.is_local else (3e-3, 300e6)


def guarded(call: Callable[[], list[Outcome]], num_keys: int) -> list[Outcome]:
    """Call a tier. An exception that it should not raise, a library's, is `ERROR` as well."""
    try:
        return call()
    except Exception:  # noqa: BLE001 - whatever a tier raises, a request goes on without it
        return [Outcome.ERROR] * num_keys


def tier_names(tiers: Sequence[Tier], settings: StackSettings) -> tuple[str, ...]:
    """Return a name for each tier: its own, numbered where several have the same."""
    names: list[str] = []
    for tier in tiers:
        same = sum(other.name == tier.name for other in tiers[: len(names)])
        names.append(f"{tier.name}-{same + 1}" if same else tier.name)
    unknown = [name for name in settings.tiers if name not in names]
    if unknown:
        raise ConfigError(f"settings for a tier {unknown[0]!r}; the tiers are {', '.join(names)}")
    return tuple(names)
