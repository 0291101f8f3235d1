"""Run the peers' adapters beside quire's own rows, in one schedule.

Every adapter is a script that runs in the peers' environment and prints a JSON array of rows. A row
is a dict with `name` and numbers: `median_us`, `requests_per_s`, `hit_rate`, `bytes`. A
peer that could not be measured has one row, `not_installed` or `failed`, with the `reason`.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.bench.peers import environment

Row = dict[str, Any]
Rows = list[Row]
Progress = Callable[[str], None]

ADAPTER_TIMEOUT_S = 300
"""Wall-clock limit of one adapter; on a quiet machine one takes under 60 s."""

OURS = "quire"


@dataclass(frozen=True)
class Adapter:
    """A script beside this file, its argument, and the peer it measures."""

    peer: str
    script: str
    argument: str


ADAPTERS = {
    "sglang-legacy": Adapter("sglang", "sglang_rows.py", "legacy"),
    "sglang-unified": Adapter("sglang", "sglang_rows.py", "unified"),
    "sglang-rust": Adapter("sglang", "sglang_rows.py", "rust"),
    "vllm-16": Adapter("vllm", "vllm_rows.py", "16"),
    "vllm-64": Adapter("vllm", "vllm_rows.py", "64"),
}
"""What can be measured, by the name it has in a report."""

QUIET = {
    "CUDA_VISIBLE_DEVICES": "",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


def peer_rows(
    names: Iterable[str] | None = None,
    progress: Progress | None = None,
    *,
    folder: Path = environment.DEFAULT_FOLDER,
) -> dict[str, Rows]:
    """Return the rows of each adapter in `names` (all of them, by default), run one by one.

    The environment in `folder` is made first if it is missing. Wanted peers that are not
    installed stand in the answer with the reason.
    """
    return _measure({}, names, progress, folder)


def run_schedule(
    ours: Callable[[], Rows],
    rounds: int = 3,
    *,
    names: Iterable[str] | None = None,
    progress: Progress | None = None,
    folder: Path = environment.DEFAULT_FOLDER,
) -> dict[str, Rows]:
    """Return medians over `rounds` of `ours` (under `quire`) and of the peers, measured in turns.

    All of them run once a round, in an order that is reversed every other round, so that what
    else the machine does falls on all of them alike. Peers measure the rows that `ours` has; one
    that has none of them is left out.
    """
    collected: dict[str, list[Rows]] = {}
    wanted: list[str] = []
    chosen = list(ADAPTERS) if names is None else list(names)
    for number in range(rounds):
        if progress:
            progress(f"round {number + 1} of {rounds}")
        order = chosen if number % 2 == 0 else chosen[::-1]
        first = {OURS: ours()} if number % 2 == 0 else {}
        wanted = wanted or [str(row["name"]) for row in first[OURS]]
        measured = _measure(first, order, progress, folder, wanted)
        if not first:
            measured[OURS] = ours()
        for name, rows in measured.items():
            if not rows:
                continue
            collected.setdefault(name, []).append(rows)
    return {name: median_rows(runs) for name, runs in sorted(collected.items())}


def median_rows(runs: Iterable[Rows]) -> Rows:
    """Return each row once, every number the median of that number over `runs`."""
    seen: dict[str, Rows] = {}
    for rows in runs:
        for row in rows:
            seen.setdefault(str(row["name"]), []).append(row)
    return [_median_row(rows) for rows in seen.values()]


def _median_row(rows: Rows) -> Row:
    merged = dict(rows[0])
    for field, value in merged.items():
        if isinstance(value, int | float):
            merged[field] = statistics.median(row[field] for row in rows if field in row)
    return merged


def _measure(
    measured: dict[str, Rows],
    names: Iterable[str] | None,
    progress: Progress | None,
    folder: Path,
    rows: Iterable[str] = (),
) -> dict[str, Rows]:
    chosen = list(ADAPTERS) if names is None else list(names)
    wanted = tuple(dict.fromkeys(ADAPTERS[name].peer for name in chosen))
    prepared = environment.prepare(folder, names=wanted, progress=progress)
    for name in chosen:
        adapter = ADAPTERS[name]
        if adapter.peer in prepared.installed:
            if progress:
                progress(f"measuring {name}")
            measured[name] = _run_adapter(adapter, prepared.python, rows)
    for name, reason in prepared.missing.items():
        for shown in [n for n in chosen if ADAPTERS[n].peer == name] or [name]:
            measured[shown] = [{"name": "not_installed", "reason": reason}]
        if progress:
            progress(f"not measured: {name}: {reason}")
    return measured


def _run_adapter(adapter: Adapter, python: Path, rows: Iterable[str]) -> Rows:
    script = Path(__file__).with_name(adapter.script)
    try:
        done = subprocess.run(  # noqa: S603  # our script, in the environment we made
            [str(python), str(script), adapter.argument, ",".join(rows)],
            capture_output=True,
            text=True,
            check=True,
            timeout=ADAPTER_TIMEOUT_S,
            env=os.environ | QUIET,
        )
        return json.loads(done.stdout.splitlines()[-1])
    except subprocess.CalledProcessError as error:
        lines = str(error.stderr).strip().splitlines()
        reason = lines[-1] if lines else f"ended with status {error.returncode}"
    except (subprocess.TimeoutExpired, OSError, ValueError, IndexError) as error:
        reason = str(error)
    return [{"name": "failed", "reason": reason}]
