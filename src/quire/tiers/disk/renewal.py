"""Beginning a disk tier's directory anew while it is open: others emptied it, replaced it, or removed files of it."""

from __future__ import annotations

from contextlib import suppress

import msgspec

from quire.errors import TierBusy
from quire.tiers.directory import TierDirectory
from quire.tiers.disk.files import DirectoryLock
from quire.tiers.disk.opening import Recovered, check_strangers, open_slabs, remove_empty
from quire.tiers.disk.records import DiskRecords
from quire.tiers.disk.room import DiskRoom
from quire.tiers.disk.slab import Slabs


class Renewal(msgspec.Struct, frozen=True):
    """Restores missing parts of a directory: forgets lost records, leaves others' files alone."""

    _home: TierDirectory
    _records: DiskRecords
    _room: DiskRoom

    def renew(self) -> str:
        """Make anew what is missing; return what was, "" where nothing was.

        Raises `OSError` where it cannot be, `TierBusy` where another process has the directory that has this name now.
        """
        return self._room.lock.run(self._renew)

    def _renew(self) -> str:
        """Do what `renew` does. The lock of the room is held."""
        lock = self._records.slabs.lock
        if lock is None:
            return ""
        if not lock.is_here:
            return self._move_in(lock)
        is_new = self._home.renew()
        try:
            lock.renew()
        except TierBusy:  # its slabs are that process's
            self._room.forget(list(self._records.slabs.values()))
            raise
        gone = [slab for slab in self._records.slabs.values() if slab.is_removed()]
        self._room.forget(gone)
        if is_new:
            return "it was emptied"
        return f"{gone[0].path.name} or its index was removed" if gone else ""

    def _move_in(self, lock: DirectoryLock) -> str:
        """Use the directory that has the name now, and what is in it, instead of one that was moved or removed."""
        slabs = self._records.slabs
        self._home.renew(check_strangers)
        fresh = slabs.beside(DirectoryLock(slabs.directory, slabs.files))
        try:
            prepare(fresh, self._room.capacity)
        except BaseException:
            if fresh.lock is not None:
                fresh.lock.release()
            raise
        self._room.forget(list(slabs.values()))
        self._records.take_over(fresh)
        lock.release()
        with suppress(OSError):
            self._room.fit()
        return "it was removed or replaced"


def prepare(slabs: Slabs, capacity: int) -> Recovered:
    """Open all slabs of a directory to write, and make their files what the indexes say. Raises `OSError` and `TierError`."""
    recovered = open_slabs(slabs, capacity)
    remove_empty(slabs)
    with suppress(OSError):  # on a full or failing disk it stays as it is
        for slab in slabs.values():
            slab.cut()
            slab.index_file.reserve(slab.index.num_places)
        if not recovered.is_clean:
            DiskRecords(slabs).write_all()
    return recovered
