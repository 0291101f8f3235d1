"""Pages of memory, taken from the system before anybody waits for them."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

STEP_BYTES = 8 << 20
MADV_POPULATE_WRITE = 23
"""Linux 5.14 and later: makes pages present as if written to, and leaves what they hold."""


def take_pages(memory: NDArray[np.uint8], is_wanted: Callable[[], bool]) -> None:
    """Make memory present, from its start on, in a thread of its own; return at once.

    The first write to a page costs a few microseconds, many times the copy into it. At most half
    of the memory that the machine has to spare is taken ahead; what is left comes with the first write,
    as all of it does where the system cannot do this.
    """
    if sys.platform == "linux" and memory.size >= STEP_BYTES:
        threading.Thread(
            target=_take, args=(memory, is_wanted), name="quire host pages", daemon=True
        ).start()


def _take(memory: NDArray[np.uint8], is_wanted: Callable[[], bool]) -> None:
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    stop = min(memory.size, _spare_bytes() // 2)
    for start in range(0, stop, STEP_BYTES):
        size = min(STEP_BYTES, memory.size - start)
        if not is_wanted() or madvise(memory.ctypes.data + start, size, MADV_POPULATE_WRITE):
            return


def _spare_bytes() -> int:
    """Return how much memory the machine could give out, 0 if it does not say."""
    try:
        for line in Path("/proc/meminfo").read_text("ascii").splitlines():
            name, _, amount = line.partition(":")
            if name == "MemAvailable":
                return int(amount.split()[0]) << 10
    except (OSError, ValueError, IndexError):
        pass
    return 0
