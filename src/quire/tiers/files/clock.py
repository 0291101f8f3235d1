"""Time stamps that processes on several machines can compare."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

STEP_NS = 1000
"""Time between the stamps of one prompt's records."""

TICK_NS = 20_000_000
"""Time by which a file system may be behind its own clock when it stamps a file: two ticks of a kernel's timer."""


class SharedClock:
    """A clock in the time of the file system, which all processes that share it have in common.

    The time the file system gives a file sets it; in between it goes on evenly, so that a step of the own clock
    changes nothing. It never goes back, and stamps only grow.

    `clock`  seconds since the epoch, read once: the time until the file system has told its own
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._begun_ns = int(clock() * 1e9) - time.monotonic_ns()
        self._last_ns = 0
        self._lock = threading.Lock()

    def set(self, now_ns: int) -> None:
        """Take the time of the file system. It goes in ticks: one below a tick ago says nothing new."""
        begun_ns = now_ns - time.monotonic_ns()
        if not 0 <= self._begun_ns - begun_ns <= TICK_NS:
            self._begun_ns = begun_ns

    def now_ns(self) -> int:
        """Return the time on the file system since its epoch, at least that of all calls and stamps so far."""
        return self._take(0)

    def stamps(self, count: int) -> int:
        """Take `count` stamps, `STEP_NS` apart, all above any so far; return the newest."""
        return self._take((count + 1) * STEP_NS)

    def _take(self, step_ns: int) -> int:
        with self._lock:
            self._last_ns = max(self._begun_ns + time.monotonic_ns(), self._last_ns + step_ns)
            return self._last_ns
