"""LMCache's storages beside ours: rows of `quire bench tiers --with-peers`."""

from __future__ import annotations

import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from statistics import mean
from typing import Any

from quire.bench.peers import environment, lmcache_tiers
from quire.bench.peers.lmcache_tiers import ADAPTERS, Adapter, Figures
from quire.bench.tier_measure import Row
from quire.bench.tier_servers import redis_server
from quire.errors import TierError

ROUNDS = 3


class Peers:
    """LMCache's environment, made on the first call, and a disk to measure on.

    Raises `TierError` where LMCache is not installed and cannot be.
    """

    def __init__(self, path: Path | None, progress: environment.Progress | None = None) -> None:
        names = (environment.LMCACHE.name,)
        self._prepared = environment.prepare(names=names, progress=progress)
        self._path = path
        reason = lmcache_tiers.is_there(self._prepared)
        if reason:
            raise TierError(f"LMCache {environment.LMCACHE.version}: {reason}")

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
            return lmcache_tiers.run(
                adapter, self._prepared.python, block_bytes, place, rounds=ROUNDS
            )

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
        rows.append(peer | {"rounds": ROUNDS * len(good), "mode": "LMCache 0.5.6"})
    return rows
