"""Time stamps that processes on several machines can compare."""

from __future__ import annotations

import threading
from collections.abc import Callable

STEP_NS = 1000
"""Time between the stamps of one prompt's records."""


class SharedClock:
    """A clock in the time of the file system, which is one for all who share it, whatever the own clock says.

    What the file system says when a file is written sets it; in between it goes as the own clock goes.
    Stamps only grow.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ahead_ns = 0
        self._last_ns = 0
        self._lock = threading.Lock()

    def set(self, now_ns: int) -> None:
        """Say what time it is on the file system."""
        self._ahead_ns = now_ns - int(self._clock() * 1e9)

    def now_ns(self) -> int:
        """Return the time on the file system, since its epoch."""
        return int(self._clock() * 1e9) + self._ahead_ns

    def stamps(self, count: int) -> int:
        """Take so many stamps, `STEP_NS` apart, all above any before; return the newest."""
        with self._lock:
            after = self._last_ns + (count + 1) * STEP_NS
            self._last_ns = max(self.now_ns(), after)
            return self._last_ns
