"""Timers of the rows: CPU time, medians, batches that swamp the clock.

Standard library only: `benchmarks/peers` imports it by path, in an environment that has no quire.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from time import process_time_ns
from typing import Any, TypeVar

T = TypeVar("T")
Row = dict[str, float | str]
Progress = Callable[[str], None]

BATCH_NS = 2_000_000
"""A timed batch of calls lasts at least this long."""
ROW_BUDGET_NS = 2_500_000_000
"""A row stops sampling after this long, once it has `MIN_SAMPLES`."""
SAMPLES = 31
MIN_SAMPLES = 5


def check_names(wanted: Iterable[str], known: Iterable[str]) -> None:
    """Raise `ValueError` for names of rows that do not exist."""
    unknown = sorted(set(wanted) - set(known))
    if unknown:
        raise ValueError(f"no rows named {', '.join(unknown)}; there are {', '.join(known)}")


def repeat_us(call: Callable[[], object], *, samples: int = SAMPLES) -> float:
    """Return the median CPU time of one call that may be repeated, in microseconds."""
    call()
    start = process_time_ns()
    call()
    batch = max(1, BATCH_NS // max(1, process_time_ns() - start))
    times: list[float] = []
    begin = process_time_ns()
    while len(times) < samples:
        start = process_time_ns()
        for _ in range(batch):
            call()
        now = process_time_ns()
        times.append((now - start) / batch)
        if now - begin > ROW_BUDGET_NS and len(times) >= MIN_SAMPLES:
            break
    return statistics.median(times) / 1_000


def each_us(call: Callable[[T], object], inputs: Iterable[T], *, batch: int = 8) -> float:
    """Return the median CPU time of one call over fresh `inputs`, `batch` calls per sample."""
    source = iter(inputs)
    times: list[float] = []
    while len(group := list(islice(source, batch))) == batch:
        start = process_time_ns()
        for item in group:
            call(item)
        times.append((process_time_ns() - start) / batch)
    return statistics.median(times[1:]) / 1_000


def once_us(call: Callable[[], object]) -> float:
    """Return the CPU time of a single call in microseconds."""
    start = process_time_ns()
    call()
    return (process_time_ns() - start) / 1_000


class Stopwatch:
    """CPU time summed over `with` blocks; what stands between them is not counted."""

    def __init__(self) -> None:
        self.total_ns = 0
        self._start = 0

    def __enter__(self) -> None:
        self._start = process_time_ns()

    def __exit__(self, *_: object) -> None:
        self.total_ns += process_time_ns() - self._start


class Stamp:
    """A streamer that notes the times of its making and of the first new token.

    It passes everything on to another streamer.
    generate puts the prompt first, then each new token. `first_at` is 0 until there is one.
    """

    def __init__(self, then: Any = None) -> None:
        self.first_at = 0.0
        self._num_puts = 0
        self._then = then
        self.started = time.perf_counter()

    def put(self, value: Any) -> None:
        """Take the prompt, or the new tokens of one step."""
        self._num_puts += 1
        if self._num_puts == 2:
            self.first_at = time.perf_counter()
        if self._then is not None:
            self._then.put(value)

    def end(self) -> None:
        """Take the end of the text."""
        if self._then is not None:
            self._then.end()


def resident_bytes() -> int:
    """Return this process's resident set in bytes (Linux)."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def growth_bytes(build: Callable[[], T]) -> tuple[T, int]:
    """Return what `build` returns and by how much the resident set grew while it ran."""
    gc.collect()
    before = resident_bytes()
    built = build()
    gc.collect()
    return built, resident_bytes() - before
