"""The disk and Redis tiers beside LMCache's storages and the raw file or socket: MB/s of payload (10^6 bytes), in one run.

    python benchmarks/peers/environment.py lmcache
    python benchmarks/tiers/beside_lmcache.py [--scenes direct,cached,cold,redis] [--block-bytes 256KiB,1MiB,4MiB]
                                              [--path /mnt/nvme] [--rounds 9] [--json]

A round stores 64 MiB under new keys, 32 blocks a call, and loads them again: quire, LMCache and the raw way in turn, who begins
changes with the round. Nobody syncs for what is timed, and nobody has more to promise than that it outlives the process; what waits to be
written is written between the turns. Checksums are on in quire; LMCache and the raw way check nothing.

    direct   past the page cache, all of them
    cached   as each opens a directory by default; loads follow the stores
    cold     the same, and the page cache is emptied of all files before the loads
    redis    a server each on loopback
"""

import argparse
import gc
import json
import os
import sys
import tempfile
import time
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from statistics import geometric_mean, median

from lmcache import LMCache
from measure import RawRecords
from raw import RawRedis, RawSlab
from redis import Redis
from redis_here import redis_server

from quire import tiers
from quire.bench.tier_rows import BATCH_KEYS, CALL_TIMEOUT_S, check_all
from quire.config import parse_bytes
from quire.tiers.base import Outcome
from quire.tiers.format import record_bytes

ROUND_BYTES = 64 << 20
KEPT_ROUNDS = 6
"""Rounds that fit the disk tier, which is full before anything is timed: putting includes evicting."""

SCENES = ("direct", "cached", "cold", "redis")


class Quire:
    """Our tier; full, where it makes room by itself."""

    def __init__(self, tier, records):
        self._tier, self._records = tier, records
        held = -1
        while tier.stats().num_records > held:
            held = tier.stats().num_records
            self.store()

    def store(self):
        self._records.fresh()
        return self._timed(self._tier.put, self._records.records, Outcome.STORED)

    def load(self):
        for buffer in self._records.buffers:
            buffer[:] = bytes(len(buffer))
        seconds = self._timed(self._tier.get, self._records.buffers, Outcome.HIT)
        if self._records.buffers != self._records.records:
            raise RuntimeError("other bytes were loaded than were stored")
        return seconds

    def forget(self):
        """Nothing: it makes room by itself."""

    def _timed(self, call, buffers, expected):
        gc.collect()
        began = time.perf_counter()
        for part in self._records.batches():
            check_all(call(self._records.keys[part], buffers[part], CALL_TIMEOUT_S), expected)
        return time.perf_counter() - began


class Raw:
    """The raw way, one request after another."""

    def __init__(self, raw, records):
        self._raw, self._records = raw, records

    def store(self):
        return self._timed(self._raw.put, self._records.raw_sources)

    def load(self):
        for buffer in self._records.raw_buffers:
            buffer[:] = bytes(len(buffer))
        return self._timed(self._raw.get, self._records.raw_buffers)

    def forget(self):
        """Nothing: it writes over what it wrote."""

    def _timed(self, call, views):
        began = time.perf_counter()
        for part in self._records.batches():
            call(range(*part.indices(len(views))), views[part])
        return time.perf_counter() - began


def main(arguments=None):
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--scenes", default=",".join(SCENES))
    parser.add_argument("--block-bytes", default="256KiB,1MiB,4MiB")
    parser.add_argument("--path", type=Path)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args(arguments)
    rows = []
    with closing(LMCache()) as lmcache:
        for scene in asked.scenes.split(","):
            for size in map(parse_bytes, asked.block_bytes.split(",")):
                print(f"{scene}, {size >> 10} KiB", file=sys.stderr)
                rows += rows_of(scene, size, asked, lmcache)
    print(json.dumps(rows, indent=2) if asked.json else table(rows))


def rows_of(scene, size, asked, lmcache):
    """Return the rows of one scene and block size, one for storing and one for loading."""
    count = max(BATCH_KEYS, ROUND_BYTES // size)
    records = RawRecords(size, count)
    with (
        ExitStack() as stack,
        tempfile.TemporaryDirectory(prefix="quire-bench-", dir=asked.path) as name,
    ):
        folder = Path(name)
        if scene == "redis":
            ports = [stack.enter_context(redis_server()) for _ in range(3)]
            tier = tiers.Redis(f"redis://127.0.0.1:{ports[0]}")
            raw = RawRedis("127.0.0.1", ports[1])
            settings = {"type": "resp", "host": "127.0.0.1", "port": ports[2]}
        else:
            direct = scene == "direct"
            capacity = record_bytes(size) * KEPT_ROUNDS * count
            tier = tiers.Disk(folder / "disk", capacity, direct=direct or None)
            raw = RawSlab(folder / "raw", size, count, direct=direct)
            settings = {"type": "fs_native", "base_path": str(folder / "lmcache")}
            settings |= {"use_odirect": direct}
        stack.enter_context(tier)
        stack.enter_context(closing(raw))
        lmcache.open(settings, size, count // BATCH_KEYS, BATCH_KEYS)
        stack.callback(lmcache.end)
        sides = {"quire": Quire(tier, records), "raw": Raw(raw, records), "lmcache": lmcache}
        if scene == "redis":
            sides["quire"].forget = partial(_empty, Redis(port=ports[0]))
            sides["raw"].forget = partial(_empty, Redis(port=ports[1]))
        is_cold = scene == "cold"
        rates = measured(sides, asked.rounds, folder, is_cold=is_cold)
    rows = []
    for way in ("store", "load"):
        row = {"scene": scene, "block_bytes": size, "way": way}
        for name in sides:
            seconds = rates[way, name]
            row[name] = records.num_bytes / min(seconds) / 1e6
            row[f"{name}_median"] = records.num_bytes / median(seconds) / 1e6
        rows.append(row)
    return rows


def measured(sides, rounds, folder, *, is_cold):
    """Return the seconds of each round by way and side; the first round does not count."""
    taken = {(way, name): [] for way in ("store", "load") for name in sides}
    names = list(sides)
    for number in range(-1, rounds):
        order = names[number % len(names) :] + names[: number % len(names)]
        for way in ("store", "load"):
            _settle(folder, drop=is_cold and way == "load")
            for name in order:
                seconds = getattr(sides[name], way)()
                _settle(folder, drop=False)
                if number >= 0:
                    taken[way, name].append(seconds)
        for side in sides.values():
            side.forget()
    return taken


def _empty(client):
    """Delete all keys as LMCache does: at once, so that the server has the memory again."""
    client.delete(*client.keys())


def _settle(folder, *, drop):
    """Write what waits to be written; `drop` takes the files out of the page cache, too."""
    for path in folder.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            os.fdatasync(file)
            if drop:
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def table(rows):
    """Return a table in Markdown: best rounds, their ratios, and the ratios of the medians."""
    lines = [
        "| scene | block | way | quire | raw | LMCache | of raw | of LMCache | by medians |",
        "|---" * 9 + "|",
    ]
    over = []
    for row in rows:
        over.append(row["quire"] / row["lmcache"])
        cells = [row["scene"], f"{row['block_bytes'] >> 10} KiB", row["way"]]
        cells += [f"{row[name]:,.0f}" for name in ("quire", "raw", "lmcache")]
        cells += [f"{row['quire'] / row['raw']:.2f}", f"{over[-1]:.2f}"]
        cells += [f"{row['quire_median'] / row['lmcache_median']:.2f}"]
        lines.append("| " + " | ".join(cells) + " |")
    lines.append(
        f"\nGeometric mean over LMCache: {geometric_mean(over):.2f}, lowest {min(over):.2f}."
    )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
