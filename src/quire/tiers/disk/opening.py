"""Opening of a directory: its slabs, and the records that the logs still name."""

from __future__ import annotations

import os
import re
from pathlib import Path

import msgspec
import numpy as np

from quire.tiers.disk.files import DiskFiles
from quire.tiers.disk.lines import SIZE_UNIT
from quire.tiers.disk.log import LogContents, records_in
from quire.tiers.disk.slab import Slab
from quire.tiers.places.recency import Recency

_NAME = re.compile(r"slab-(\d+)\.quire")


class Recovered(msgspec.Struct, frozen=True):
    """Counts of what was found in a directory.

    `num_records`  records that the logs name; each is verified when it is read
    `lost_lines`   lines of logs that did not hold; each is at most a record
    `lost_logs`    logs whose head did not hold
    `in_vain`      records named where none can be: beyond a slab's end, or twice
    """

    num_records: int
    lost_lines: int
    lost_logs: int
    in_vain: int

    @property
    def is_clean(self) -> bool:
        """Whether the logs say what the indexes say, and nothing else."""
        return not (self.lost_lines or self.lost_logs or self.in_vain)


def slab_path(directory: Path, record_bytes: int) -> Path:
    """Return the path of the slab of a record size."""
    return directory / f"slab-{record_bytes}.quire"


def open_slabs(directory: Path, files: DiskFiles, recency: Recency, flags: int) -> dict[int, Slab]:
    """Open the slabs of a directory, by record size, with indexes that hold nothing yet."""
    slabs: dict[int, Slab] = {}
    for path in sorted(directory.iterdir()):
        match = _NAME.fullmatch(path.name)
        size = int(match[1]) if match else 0
        if size and not size % SIZE_UNIT and path.is_file():
            slabs[size] = Slab(files, path, size, recency, flags)
    return slabs


def fill_indexes(slabs: dict[int, Slab], contents: LogContents) -> Recovered:
    """Publish the records that logs name in the slabs that were opened."""
    num_places = {size: slab.index.num_places for size, slab in slabs.items()}
    found, in_vain = records_in(contents.lines, num_places)
    lines = contents.lines
    for size, rows in found.items():
        slabs[size].index.load(
            lines["place"][rows].astype(np.int64),
            lines["key"][rows],
            lines["tag"][rows],
            lines["stamp"][rows],
        )
    num_records = sum(map(len, found.values()))
    return Recovered(num_records, contents.lost_lines, contents.lost_logs, in_vain)


def remove_empty(slabs: dict[int, Slab], files: DiskFiles) -> None:
    """Remove the slabs without places, from the directory too."""
    for size in [size for size, slab in slabs.items() if not slab.index.num_places]:
        slab = slabs.pop(size)
        slab.close()
        files.unlink(slab.path)


def open_flags(*, direct: bool) -> int:
    """Return the flags that slabs are opened with for writing."""
    return os.O_RDWR | os.O_CREAT | (getattr(os, "O_DIRECT", 0) if direct else 0)
