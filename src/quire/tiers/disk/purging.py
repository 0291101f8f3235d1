"""Purging of slabs: deletes one tenant's records and overwrites its bytes in free places."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

import msgspec
import numpy as np

from quire.errors import RecordError, TierError
from quire.tiers.disk.records import DiskRecords, Spot, runs_of
from quire.tiers.disk.room import DiskRoom
from quire.tiers.disk.slab import Slab
from quire.tiers.format import new_buffer, verify
from quire.tiers.purging import Purge, owned

WINDOW_BYTES = 8 << 20
"""Free places that are taken at once to be looked at."""

PAUSE_S = 0.002
"""How long places that others have are left alone before they are looked at again."""


class DiskPurge(msgspec.Struct, frozen=True):
    """One purge of a disk tier.

    Every free place is read. What is not zero there, and is no whole record of another tenant, is overwritten with zeros: a
    record may have been evicted, moved, torn or deleted long ago. A place that others fill or read
    meanwhile is looked at when they are done.

    `is_alone`  says whether every call that was under way when it was made has ended
    """

    _records: DiskRecords
    _room: DiskRoom
    _purge: Purge
    _is_alone: Callable[[], bool]

    def run(self) -> None:
        """Purge, and return when that would survive a loss of power. Raises `OSError`."""
        self._forget()
        self._room.wait(self._purge.left_s)  # who is told of what makes room is told by now
        slabs = list(self._records.slabs.values())
        taken = {slab.record_bytes: self._wipe_free(slab) for slab in slabs}
        while any(taken.values()):
            alone = self._is_alone()
            for slab in slabs:
                taken[slab.record_bytes] = self._wipe_left(
                    slab, taken[slab.record_bytes], are_lost=alone
                )
            if any(taken.values()):
                time.sleep(min(PAUSE_S, self._purge.left_s))
        self._records.write_all()  # entries of places without a record become zeros
        self._records.slabs.sync()
        if left := sum(len(self._keys_in(slab)) for slab in list(self._records.slabs.values())):
            raise TierError(f"{left} records of the tenant were stored meanwhile")

    def _forget(self) -> None:
        for slab in list(self._records.slabs.values()):
            keys = self._keys_in(slab)
            self._records.drop_keys(keys)
            self._purge.count += len(keys)
            self._purge.num_bytes += len(keys) * slab.record_bytes

    def _keys_in(self, slab: Slab) -> list[bytes]:
        """Return the keys of the tenant's records in a slab."""
        with self._records.lock:
            keys = slab.index.keys_of(slab.index.published())
        return [key.tobytes() for key in keys.reshape(-1, 32)[owned(keys, self._purge.tag)]]

    def _wipe_free(self, slab: Slab) -> list[int]:
        """Wipe all free places of a slab; return those that others had meanwhile."""
        step = max(1, WINDOW_BYTES // slab.record_bytes)
        taken: list[int] = []
        first = 0
        while first < slab.index.num_places:
            stop = first + step
            with self._records.lock:
                others = slab.index.reserved()
                places = slab.index.reserve_within(first, stop, step).tolist()
            taken += others[(others >= first) & (others < stop)].tolist()
            self._wipe(slab, places)
            first = stop
            assert self._purge.left_s
        return taken

    def _wipe_left(self, slab: Slab, taken: list[int], *, are_lost: bool) -> list[int]:
        """Wipe those of some places that others have given back; return those that others still have.

        Where `are_lost`, nobody is left who could have them: calls that were cut off had.
        """
        for place in taken:
            with self._records.lock:
                mine = slab.index.reserve_within(place, place + 1, 1).tolist()
            self._wipe(slab, mine)
        with self._records.lock:
            still = set(slab.index.reserved().tolist())
        still &= set(taken)
        if are_lost:
            for place in still:
                self._zero(slab, place)
            return []
        return sorted(still)

    def _wipe(self, slab: Slab, places: list[int]) -> None:
        """Zero those of some reserved places that hold a tenant's bytes, and release all. Raises `OSError`."""
        try:
            spots = [Spot(slab, place, 0) for place in places]
            for run in runs_of(spots, WINDOW_BYTES):
                own = [places[at] for at in run]
                for place, is_clean in zip(own, self._are_clean(slab, own), strict=True):
                    if not is_clean:
                        self._zero(slab, place)
        finally:
            with self._records.lock:
                slab.index.wipe(np.array(places, np.int64))
                slab.index.release(*places[::-1])

    def _are_clean(self, slab: Slab, places: list[int]) -> list[bool]:
        """Return which of some places, side by side, hold zeros or a whole record of somebody else."""
        size = slab.record_bytes
        memory = new_buffer(len(places) * size)
        parts = [memory[at * size : (at + 1) * size] for at in range(len(places))]
        with suppress(OSError):  # one by one it is seen which fails
            if slab.read(places[0], *parts):
                return [self._is_clean(part) for part in parts]
        clean: list[bool] = []
        for place, part in zip(places, parts, strict=True):
            try:
                clean.append(slab.read(place, part) and self._is_clean(part))
            except OSError:
                clean.append(False)
        return clean

    def _is_clean(self, data: memoryview) -> bool:
        if not np.frombuffer(data, np.uint8).any():
            return True
        try:
            return not self._purge.owns(verify(data).key)
        except RecordError:
            return False

    def _zero(self, slab: Slab, place: int) -> None:
        slab.write(place, new_buffer(slab.record_bytes))
