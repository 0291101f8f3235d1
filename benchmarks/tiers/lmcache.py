"""LMCache's storages beside ours: its own benchmark, `lmcache bench l2`, in the peers' environment.

python benchmarks/peers/environment.py lmcache
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from redis_here import redis_server

from quire.bench.tier_rows import Row
from quire.errors import TierError

sys.path.append(str(Path(__file__).parents[1] / "peers"))
import environment

TIMEOUT_S = 120
ROUNDS = 3
KEYS = 32
"""Keys of one submit: LMCache's default, and what a call of ours has in `beside_raw.py`."""

QUIET = {
    "LMCACHE_TRACK_USAGE": "false",
    "DO_NOT_TRACK": "1",
    "LMCACHE_DISABLE_BANNER": "1",
    "LMCACHE_LOG_LEVEL": "ERROR",
    "CUDA_VISIBLE_DEVICES": "",
}
"""No telemetry, no banner, no look for a GPU."""


@dataclass(frozen=True)
class Adapter:
    """A storage of LMCache: its `type`, its settings, and the tier of ours it stands beside."""

    name: str
    beside: str
    settings: dict[str, Any]


ADAPTERS = (
    Adapter("lmcache-file", "disk", {"type": "fs"}),
    Adapter("lmcache-direct", "disk", {"type": "fs_native", "use_odirect": True}),
    Adapter("lmcache-redis", "redis", {"type": "resp", "host": "127.0.0.1"}),
)


@dataclass(frozen=True)
class Figures:
    """MB/s (10^6 bytes) of one run, the median of its rounds, and lookups per second."""

    put_mb_s: float
    get_mb_s: float
    lookups_s: float


def run(
    adapter: Adapter, python: Path, block_bytes: int, place: dict[str, Any], *, rounds: int
) -> Figures:
    """Store and load `KEYS` blocks a round, one submit in flight.

    `place` is what the adapter's settings lack: `base_path` or `port`. Raises `TierError` where it
    fails or does not store and load everything.
    """
    settings = json.dumps(adapter.settings | place)
    command = [str(python), "-m", "lmcache.cli.main", "bench", "l2", "--l2-adapter", settings]
    command += ["--num-keys", str(KEYS), "--data-size-kb", str(block_bytes >> 10), "--quiet"]
    command += ["--rounds", str(rounds), "--l1-align-bytes", "4096", "--format", "json"]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        try:
            done = subprocess.run(
                [*command, "--output", str(report)],
                capture_output=True,
                text=True,
                check=False,
                timeout=TIMEOUT_S,
                env=os.environ | QUIET,
            )
            measured = json.loads(report.read_text("utf-8"))["metrics"]
        except (subprocess.TimeoutExpired, OSError, ValueError, KeyError) as error:
            raise TierError(f"{adapter.name} gave no figures: {error}") from error
    if done.returncode:
        raise TierError(f"{adapter.name} ended with status {done.returncode}: {done.stderr[-200:]}")
    by_name = {op["operation"]: op for key, op in measured.items() if key.startswith("op_")}
    for name in ("Store", "Load"):
        if by_name[name]["total_success"] != by_name[name]["total_keys"]:
            raise TierError(f"{adapter.name}: {name} of {by_name[name]['total_keys']} keys failed")
    put, get = (
        KEYS * block_bytes / by_name[name]["duration_p50_ms"] / 1e3 for name in ("Store", "Load")
    )
    return Figures(put, get, by_name["Lookup"]["ops_per_sec_avg"])


class Peers:
    """LMCache, and a disk to measure on. Raises `TierError` where it is not installed."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        if reason := environment.lacks("lmcache"):
            raise TierError(f"LMCache: {reason}")

    def beside(self, name: str, block_bytes: int) -> dict[str, Figures | str]:
        """Run what stands beside our tier of this name, once; figures or the reason, by name."""
        found: dict[str, Figures | str] = {}
        for adapter in ADAPTERS:
            if adapter.beside == name and block_bytes % 4096 == 0:
                try:
                    found[adapter.name] = self._run(adapter, block_bytes)
                except TierError as error:
                    found[adapter.name] = str(error)
        return found

    def _run(self, adapter: Adapter, block_bytes: int) -> Figures:
        with self._place(adapter) as place:
            return run(adapter, environment.python(), block_bytes, place, rounds=ROUNDS)

    @contextmanager
    def _place(self, adapter: Adapter) -> Generator[dict[str, Any]]:
        if adapter.beside == "redis":
            with redis_server() as port:
                yield {"port": port}
            return
        with tempfile.TemporaryDirectory(prefix="quire-bench-", dir=self._path) as folder:
            yield {"base_path": folder}


def with_peers(row: Row, runs: list[dict[str, Figures | str]]) -> list[Row]:
    """Return our row and one for each peer: means over the runs before and after ours.

    Our row says how much faster it is, `put_over_*` and `get_over_*`; a peer's has the raw figures of ours.
    """
    rows: list[Row] = [row]
    for name in runs[0]:
        figures = [run[name] for run in runs]
        failed = [each for each in figures if isinstance(each, str)]
        if failed:
            rows.append({"tier": name, "block_bytes": row["block_bytes"], "reason": failed[0]})
            continue
        good = [each for each in figures if not isinstance(each, str)]
        peer: Row = {"tier": name, "block_bytes": row["block_bytes"]}
        for way in ("put", "get"):
            rate = mean(getattr(each, f"{way}_mb_s") for each in good)
            raw = float(row[f"raw_{way}_mb_s"])
            peer |= {f"{way}_mb_s": rate, f"raw_{way}_mb_s": raw, f"{way}_ratio": rate / raw}
            row[f"{way}_over_{name}"] = float(row[f"{way}_mb_s"]) / rate
        peer["lookups_s"] = mean(each.lookups_s for each in good)
        rows.append(
            peer
            | {
                "rounds": ROUNDS * len(good),
                "mode": f"LMCache {environment.PEERS['lmcache'].version}",
            }
        )
    return rows
