"""Keeping up with the names in an object store, and making new ones."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable

from quire.tiers.objects.client import Client
from quire.tiers.objects.index import BundleIndex
from quire.tiers.objects.names import make_id, milliseconds_of

PREFIX = "quire-2"
OVERLAP_MS = 60_000
"""The longest that writing an object may take to be seen: so far behind the newest name, names are listed again."""

AHEAD_MS = 86_400_000
"""Names further in the future than this are a broken clock's, and do not move anything."""


class Listing:
    """The names that were listed so far, and the newest time among them.

    A new name is never older than the newest that was listed: so names sort as they were written even where
    clocks differ, and listing from shortly before the newest on finds all that came since.
    `refresh` runs on the client's thread, the rest anywhere.
    """

    def __init__(
        self, client: Client, index: BundleIndex, writer: str, clock: Callable[[], float]
    ) -> None:
        self._client = client
        self._index = index
        self._writer = writer
        self._clock = clock
        self._lock = threading.Lock()
        self._count = 0
        self._stamp = 0
        self._newest = 0
        self._listed_at = float("-inf")
        """When the last listing that ended well began, by `time.monotonic`."""
        self._settled: deque[tuple[float, int]] = deque([(float("-inf"), 0)])
        """(when a listing began, the newest name it left), back to the last one older than the overlap."""
        self._running: asyncio.Task[None] | None = None

    def new_id(self) -> str:
        """Return a unique id, not older than any that was listed."""
        with self._lock:
            self._stamp = max(int(self._clock() * 1000), self._newest, self._stamp)
            self._count += 1
            return make_id(self._stamp, self._count, self._writer)

    async def refresh(self, max_age_s: float) -> None:
        """Learn new names, unless a listing began less than `max_age_s` ago. Raises the store's exceptions."""
        oldest = time.monotonic() - max_age_s
        while self._listed_at < oldest:
            if self._running is None or self._running.done():
                self._running = asyncio.create_task(self._list())
            # Several callers wait for one listing; the one that gives up does not end it.
            await asyncio.shield(self._running)

    async def _list(self) -> None:
        began = time.monotonic()
        latest = int(self._clock() * 1000) + AHEAD_MS
        newest = 0

        def see(path: str, size: int) -> None:
            nonlocal newest
            name = self._index.learn(path, size)
            if name is not None and newest < (time_ms := milliseconds_of(name.id)) <= latest:
                newest = time_ms

        floor = self._floor(began)
        with self._index.listed():
            await self._client.names(PREFIX, f"{PREFIX}/{floor:011x}" if floor else None, see)
        with self._lock:
            self._newest = max(self._newest, newest)
            self._settled.append((began, self._newest))
        self._listed_at = began

    def _floor(self, now: float) -> int:
        """Return the time from which on names may be new."""
        while len(self._settled) > 1 and self._settled[1][0] <= now - OVERLAP_MS / 1000:
            self._settled.popleft()
        if self._listed_at == float("-inf"):
            return 0
        return max(self._newest - OVERLAP_MS, self._settled[0][1])
