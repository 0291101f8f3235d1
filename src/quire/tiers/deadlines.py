"""Work in pieces, as long as there is time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator


def in_time(
    count: int, timeout_s: float, clock: Callable[[], float] = time.monotonic
) -> Iterator[int]:
    """Count up to `count` while there is time, but at least to the first. Raises `TimeoutError`."""
    deadline = clock() + timeout_s
    for index in range(count):
        if index and clock() > deadline:
            raise TimeoutError
        yield index
