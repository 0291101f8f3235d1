"""A look into a disk tier's directory that changes nothing, also while a process writes to it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from quire.errors import TierError
from quire.tiers.base import Answers, Buffers, Keys, ListedRecord, Outcome, in_time
from quire.tiers.contents.readers import ReadOnlyTier
from quire.tiers.disk.files import DiskFiles
from quire.tiers.disk.opening import Recovered, open_slabs
from quire.tiers.disk.records import Spot, entries_of, spot_in, tag_of
from quire.tiers.places.recency import Recency


class DiskReader(ReadOnlyTier):
    """The records that were in a directory when it was opened.

    It takes no lock. A record whose place was given to another since reads as `ABSENT`, one
    whose place is being written just then as `CORRUPT`; what is stored later is not seen.
    Raises `TierError` where the directory cannot be read, or a later version wrote it.
    """

    is_local = False
    answers_at_once = True

    def __init__(self, path: str | os.PathLike[str], *, name: str = "disk") -> None:
        super().__init__()
        self.name = name
        self.path: Path | None = Path(path)
        self.recovered: Recovered
        recency = Recency()
        try:
            self._slabs, self.recovered = open_slabs(
                self.path, DiskFiles(), recency, os.O_RDONLY, room=0
            )
        except OSError as error:
            raise TierError(f"{path} cannot be read as a disk tier: {error}") from error
        self._is_closed = False

    def scan(self) -> Iterator[ListedRecord]:
        return entries_of(list(self._slabs.values()))

    def check(self) -> None:
        for slab in self._slabs.values():
            slab.check()

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            for slab in self._slabs.values():
                slab.close()

    def _get(self, keys: Keys, buffers: Buffers, timeout_s: float, answers: Answers) -> None:
        if self._is_closed:
            raise TierError(f"the reader of {self.path} was closed")
        for index in in_time(len(keys), timeout_s):
            spot = spot_in(self._slabs.values(), keys[index])
            answers.settle(index, Outcome.ABSENT if spot is None else _read(spot, buffers[index]))

    def _contains(self, keys: Keys, timeout_s: float) -> list[bool]:
        return [spot_in(self._slabs.values(), key) is not None for key in keys]

    def _size(self) -> tuple[int, int, int]:
        slabs = self._slabs.values()
        held = sum(len(slab.index) * slab.record_bytes for slab in slabs)
        return sum(len(slab.index) for slab in slabs), held, -1


def _read(spot: Spot, buffer: memoryview) -> Outcome:
    if spot.slab.record_bytes != len(buffer):
        return Outcome.FOREIGN
    try:
        is_whole = spot.slab.read(spot.place, buffer)
    except OSError:
        return Outcome.ERROR
    # Another tag: another record has the place by now. The same: the caller verifies the rest.
    return Outcome.HIT if is_whole and tag_of(buffer) == spot.tag else Outcome.ABSENT
