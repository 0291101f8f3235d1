"""LMCache's own benchmark of its storage, `lmcache bench l2`, in the peers' environment."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.bench.peers.environment import LMCACHE, Prepared
from quire.errors import TierError

TIMEOUT_S = 120
KEYS = 32
"""Keys of one submit: LMCache's default, and what a call of ours has in `quire bench tiers`."""

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


def is_there(prepared: Prepared) -> str:
    """Return why LMCache cannot be measured; an empty text where it can."""
    if LMCACHE.name in prepared.installed:
        return ""
    return prepared.missing.get(LMCACHE.name, "not installed")


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
            done = subprocess.run(  # noqa: S603 - LMCache's command, in the environment we made
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
