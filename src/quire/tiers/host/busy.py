"""Keys that something is being done to, and who waits for that."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from quire.tiers.waiting import Signal


class BusyKeys:
    """Keys that one thread each writes, or tells that they go, from `begin` to `end`. Not thread-safe: its owner locks."""

    def __init__(self) -> None:
        self._ended: dict[bytes, Signal | None] = {}

    def __contains__(self, key: bytes) -> bool:
        return key in self._ended

    def __iter__(self) -> Iterator[bytes]:
        return iter(list(self._ended))

    def begin(self, *keys: bytes) -> None:
        """Say that it begins for these keys."""
        self._ended |= dict.fromkeys(keys)

    def ended(self, key: bytes) -> Signal:
        """Return what is set when it has ended for a key, whether it is there then or not."""
        ended = self._ended[key] = self._ended[key] or Signal()
        return ended

    def end(self, *keys: bytes) -> None:
        """Let those go on who wait for keys."""
        for key in keys:
            if ended := self._ended.get(key):
                ended.set()  # first: a signal may come right behind `pop`
            self._ended.pop(key, None)

    def end_all(self) -> None:
        """Let all go on who wait."""
        self.end(*self._ended)


def wait_for(ended: Sequence[Signal], timeout_s: float) -> None:
    """Wait until all are set, so long at most."""
    deadline = time.monotonic() + timeout_s
    for each in ended:
        each.wait(max(0.0, deadline - time.monotonic()))
