"""Timers of the peer adapters: CPU time, medians, batches that swamp the clock.

Standard library only; the adapters import it by path inside the peers' environment.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from time import process_time_ns, thread_time_ns
from typing import TypeVar

T = TypeVar("T")
Row = dict[str, float | str]

BATCH_NS = 2_000_000
"""A timed batch of calls lasts at least this long."""
ROW_BUDGET_NS = 2_500_000_000
"""A row stops sampling after this long, once it has `MIN_SAMPLES`."""
SAMPLES = 31
MIN_SAMPLES = 5


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


def traced_bytes(build: Callable[[], object]) -> int:
    """Return the Python heap that what `build` returns holds, by tracemalloc."""
    gc.collect()
    tracemalloc.start()
    built = build()
    gc.collect()
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    del built
    return size


def import_row(arguments: list[str]) -> Row:
    """Return `import_core`: a script run with `arguments`, which imports and prints its cost."""
    command = [sys.executable, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)  # noqa: S603  # our own script
    return {"name": "import_core", **json.loads(done.stdout.splitlines()[-1])}


def print_import_cost(load: Callable[[], object]) -> None:
    """Print what `load` costs in a fresh interpreter: CPU seconds, modules, resident bytes."""
    modules, resident = len(sys.modules), resident_bytes()
    start = thread_time_ns()  # worker threads of NumPy and torch spin beside the import
    load()
    seconds = (thread_time_ns() - start) / 1e9
    print(  # noqa: T201  # standard output is the protocol
        json.dumps(
            {
                "median_us": round(seconds * 1e6),
                "modules": len(sys.modules) - modules,
                "bytes": resident_bytes() - resident,
            }
        )
    )


Measurement = tuple[tuple[str, ...], Callable[[], Iterable[Row]]]
"""The names of some rows, and what measures them."""


def measured(measurements: Iterable[Measurement], wanted: str) -> Iterator[Row]:
    """Yield the rows named in `wanted`, separated by commas (all if empty); measure no others."""
    names = set(wanted.split(",")) - {""}
    for known, measure in measurements:
        if not names or names & set(known):
            yield from (row for row in measure() if not names or row["name"] in names)


def rounded(rows: Iterable[Row]) -> list[Row]:
    """Return `rows` with every float cut to four significant digits or more."""
    return [
        {key: _round(value) if isinstance(value, float) else value for key, value in row.items()}
        for row in rows
    ]


def _round(value: float) -> float:
    return round(value, 1) if abs(value) >= 1_000 else float(f"{value:.4g}")
