"""The output of every adapter: the rows asked for, as one JSON array. Standard library only."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from time import thread_time_ns

from timing import Row, resident_bytes


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
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return {"name": "import_core", **json.loads(done.stdout.splitlines()[-1])}


def print_import_cost(load: Callable[[], object]) -> None:
    """Print what `load` costs in a fresh interpreter: CPU seconds, modules, resident bytes."""
    modules, resident = len(sys.modules), resident_bytes()
    start = thread_time_ns()  # worker threads of NumPy and torch spin beside the import
    load()
    seconds = (thread_time_ns() - start) / 1e9
    print(
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
