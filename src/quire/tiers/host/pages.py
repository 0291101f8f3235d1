"""Pages of memory, taken from the system before anybody waits for them."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.tiers.background import Background

AHEAD_BYTES = 256 << 20
"""So much is taken ahead of what is used, again when half of it is left."""

STEP_BYTES = 8 << 20

MADV_POPULATE_WRITE = 23
"""Linux 5.14 and later: makes pages present as if written to, and leaves what they hold."""


class PagesAhead:
    """Makes memory present ahead of its use, in the background, from its start on, which begins a page.

    The first write to a page costs a few microseconds, many times the copy into it. Where the system
    cannot do this, pages come with the first write. `background` takes them; when it has stopped, the memory may go.
    """

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        self._memory = memory
        self._taken = 0
        self._wanted = 0
        self._madvise = _madvise()
        self.background = Background(self._take, "quire host pages")
        self.reach(0)

    def reach(self, end: int) -> None:
        """Say that the memory is used as far as `end`, in bytes. Does not wait."""
        if self._madvise is not None and 2 * (self._taken - end) < AHEAD_BYTES:
            steps = -(-(end + AHEAD_BYTES) // STEP_BYTES)
            self._wanted = min(steps * STEP_BYTES, self._memory.size)
            if self._taken < self._wanted:
                self.background.wake()

    def give_up(self) -> None:
        """Take no more than what is being taken."""
        self._wanted = 0

    def _take(self) -> bool:
        size = min(STEP_BYTES, self._wanted - self._taken)
        if self._madvise is None or size <= 0:
            return False
        start = self._memory.ctypes.data + self._taken
        if self._madvise(start, size, MADV_POPULATE_WRITE):
            self._madvise = None  # an older system, or no memory left: the first write will tell
            return False
        self._taken += size
        return True


def _madvise() -> Callable[[int, int, int], int] | None:
    """Return the system's function; with it, others run meanwhile, unlike with that of `mmap`."""
    if sys.platform != "linux":
        return None
    madvise: Any = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return madvise
