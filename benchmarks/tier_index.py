"""The disk tier's index at size: memory, time to open, lookups and evictions per second.

    python benchmarks/tier_index.py [--records 1000000 10000000]

A directory with that many records is made without their bytes (a sparse slab and its index), and opened in a process
of its own. Times are wall and CPU seconds of that process.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

RECORD_BYTES = 4096
LOOKUPS = 200_000


def make(directory, count):
    """Leave a directory with `count` records of 4 KiB."""
    from quire.tiers.disk.files import DiskFiles
    from quire.tiers.disk.slab import Slabs

    slab = Slabs(DiskFiles(), directory, os.O_RDWR | os.O_CREAT).open(RECORD_BYTES)
    slab.index_file.reserve(count)
    rng = np.random.default_rng(0)
    for start in range(0, count, 1 << 16):
        places = np.arange(start, min(start + (1 << 16), count))
        keys = rng.integers(0, 256, (len(places), 32), np.uint8)
        slab.index_file.write_many(places, places.astype(np.uint64), places + 1, keys)
    slab.close()
    os.truncate(slab.path, count * RECORD_BYTES)


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def timed(call):
    wall, cpu = time.perf_counter(), time.process_time()
    result = call()
    return result, time.perf_counter() - wall, time.process_time() - cpu


def measure(directory, count):
    """Open the directory and measure; return figures by name."""
    from quire.tiers.disk import Disk
    from quire.tiers.disk.room import EVICTED_SHARE

    before = resident()
    disk, wall, cpu = timed(lambda: Disk(directory, count * RECORD_BYTES, direct=False, ahead=1))
    index = disk._records.slabs[RECORD_BYTES].index
    assert len(index) == count
    figures = {"records": count, "open_s": wall, "open_cpu_s": cpu}
    figures["bytes_per_record"] = (resident() - before) / count
    figures["peak_bytes_per_record"] = (
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    ) / count
    slots = np.random.default_rng(1).integers(0, count, LOOKUPS)
    keys = [key.tobytes() for key in index.keys_of(slots)]
    absent = [bytes(reversed(key)) for key in keys]
    for name, call in {
        "find_us": lambda: [index.find(key) for key in keys],
        "find_absent_us": lambda: [index.find(key) for key in absent],
        "find_many_us": lambda: [
            index.find_many(keys[at : at + 1000]) for at in range(0, LOOKUPS, 1000)
        ],
        "tier_contains_us": lambda: [
            disk.contains(keys[at : at + 100]) for at in range(0, LOOKUPS, 100)
        ],
        "tier_touch_us": lambda: [disk.touch(keys[at : at + 100]) for at in range(0, LOOKUPS, 100)],
    }.items():
        figures[name] = timed(call)[2] / LOOKUPS * 1e6
    evicted = count // EVICTED_SHARE
    room, before = disk._room, disk._records.recency.now + 1
    chosen, wall, _ = timed(lambda: room._oldest(before, room._slabs))
    figures["choose_victims_s"] = wall
    figures["chosen_of_asked"] = len(chosen) / evicted
    room._chosen, room._chosen_from = chosen, room._slabs
    _, figures["evict_1024_s"], _ = timed(lambda: room._evicts(before, room._slabs))
    _, wall, _ = timed(lambda: [room._evicts(before, room._slabs) for _ in range(20)])
    figures["evict_us"] = wall / 20 / 1024 * 1e6
    _, figures["write_all_s"], _ = timed(disk._records.write_all)
    _, figures["close_s"], _ = timed(disk.close)
    return figures


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=int, nargs="+", default=[1_000_000, 10_000_000])
    parser.add_argument("--directory", type=Path)
    options = parser.parse_args()
    if options.directory:
        print(json.dumps(measure(options.directory, options.records[0])))
        return
    for count in options.records:
        directory = Path(tempfile.mkdtemp(prefix="quire-index-"))
        try:
            make(directory, count)
            command = [sys.executable, __file__, "--directory", directory, "--records", str(count)]
            output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            for name, value in json.loads(output).items():
                print(f"{name:24} {value:12.3f}" if value != count else f"{name:24} {count:12,}")
            print()
        finally:
            shutil.rmtree(directory)


if __name__ == "__main__":
    main()
