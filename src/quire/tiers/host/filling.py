"""Keys whose records are being written, and who waits for that."""

from __future__ import annotations

import threading


class Filling:
    """Keys that are written by one thread each, from `begin` to `end`. Not thread-safe: its owner locks."""

    def __init__(self) -> None:
        self._ended: dict[bytes, threading.Event | None] = {}

    def __contains__(self, key: bytes) -> bool:
        return key in self._ended

    def begin(self, key: bytes) -> None:
        """Say that a key is being written from now on."""
        self._ended[key] = None

    def ended(self, key: bytes) -> threading.Event:
        """Return what is set when a key that is being written is there, or will not be."""
        ended = self._ended[key] = self._ended[key] or threading.Event()
        return ended

    def end(self, *keys: bytes) -> None:
        """Let those go on who wait for keys."""
        for key in keys:
            if ended := self._ended.pop(key, None):
                ended.set()

    def end_all(self) -> None:
        """Let all go on who wait."""
        self.end(*self._ended)
