"""The disk tier: records in slabs of recycled places, found again after a restart.

A directory belongs to one process at a time, which holds the lock; one that is `read_only` reads beside it. A forked process has
no part in it.

    quire-tier            the marker (`quire.tiers.directory`)
    lock                  locked by the process that writes, which leaves its number there
    slab-<bytes>.quire    places of that many bytes, one behind the other (`slab.py`)
    index-<bytes>.quire   which record lies in which of these places (`index_file.py`)

Nothing is synced for a record: after the end of a process, however sudden, all is there for which this tier's `put` returned
`STORED` (a `TierStack` says so of what waits in its queue, too); after a loss of power most of it, and all that was there
at the last `flush`; what was deleted may be back then, as it was put.
Every record is verified when it is read. A full disk costs what would be stored, and nothing else: what is written to run on and to
open again has its space reserved.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar
from weakref import WeakSet

from quire.config import parse_bytes
from quire.errors import ConfigError, InvariantError, TierError
from quire.interrupts import mutating
from quire.tiers.addresses import directory_of
from quire.tiers.base import Answers, Buffers, Keys, ListedRecord, Outcome, Tier
from quire.tiers.directory import TierDirectory
from quire.tiers.disk.crew import Crew
from quire.tiers.disk.files import (
    O_DIRECT,
    DirectoryLock,
    DiskFiles,
    is_forbidden,
    is_full,
    takes_direct,
)
from quire.tiers.disk.opening import check_strangers, open_slabs
from quire.tiers.disk.page_cache import PageCache, limit_here
from quire.tiers.disk.purging import DiskPurge
from quire.tiers.disk.reading import RecordReader
from quire.tiers.disk.records import DiskRecords
from quire.tiers.disk.renewal import Renewal, prepare
from quire.tiers.disk.room import Clock, DiskRoom
from quire.tiers.disk.slab import Slab, Slabs
from quire.tiers.disk.writing import DiskWriter
from quire.tiers.purging import Purge
from quire.tiers.threads import Background, Permit

_log = logging.getLogger(__name__)

Result = TypeVar("Result")

_HELPERS = 3
_USES_KEPT = 1 << 16
"""Uses that are in memory only, at least, before entries are written anew for their stamps."""

_CLOSE_S = 60.0


class Disk(Tier):
    """Records in a directory of a local file system.

    `capacity`      bytes of all slabs together ("200GiB"); their indexes add 64 bytes per place
    `direct`        past the page cache: True, False, or None: where a probe says that it works, but for bursts of writes,
                    which wait there for a moment, and for what the system still has there when it is read
                    (`page_cache.py`); only slabs of records that are multiples of 4,096 bytes
    `ahead`         how much of each slab is written before it is needed, in the background, again
                    when half of it is used; at most a quarter of the capacity

    `evicting` is called while room is made: it must not put into this tier.

    `group`         name or number of a group that may read and write the files; None: as its marker says, at first the owner alone
    `read_only`     nothing is written, every put is `SKIPPED`, and no other process is kept out; so it is in any case where
                    nothing may be written (a read-only file system, no permission)

    Raises `TierBusy` where another process has the directory open, `TierError` where it cannot
    be read or a later version wrote it.
    """

    answers_at_once = True

    def __init__(
        self,
        path: str | Path,
        capacity: int | str | None = None,
        *,
        group: str | int | None = None,
        read_only: bool = False,
        direct: bool | None = None,
        ahead: int | str = "128MiB",
        clock: Clock = time.monotonic,
        files: DiskFiles | None = None,
        name: str = "disk",
    ) -> None:
        super().__init__()
        self.name = name
        if capacity is None and not read_only:
            raise ConfigError(
                "a disk tier needs a capacity, as '200GiB', unless it is opened to read only"
            )
        num_bytes = 1 if capacity is None else parse_bytes(capacity)
        self._home = TierDirectory(directory_of(path), "disk", group)
        self.path = self._home.path
        self._clock = clock
        self._files = files if files is not None else DiskFiles()
        self._calls: WeakSet[Permit] = WeakSet()
        self._is_closed = False
        self._process = os.getpid()
        ahead_bytes = min(parse_bytes(ahead), num_bytes // 4)
        try:
            self._lock = None if read_only else self._locked()
            if self._lock is None:
                self._home.look()
            try:
                self._open(num_bytes, ahead_bytes, direct)
            except BaseException:
                if self._lock is not None:
                    self._lock.release()
                raise
        except OSError as error:
            raise TierError(f"{self.path} cannot be opened as a tier: {error}") from error
        self._background = Background(self._chore, f"quire-{name}")

    def _locked(self) -> DirectoryLock | None:
        """Take the directory to write in; None where nothing can be written."""
        try:
            self._home.begin(check_strangers)
            self._files.access = self._home.access
            return DirectoryLock(self.path, self._files)
        except OSError as error:
            if not (is_forbidden(error) or is_full(error)) or not self.path.is_dir():
                raise
            _log.warning("%s is opened to read only, nothing is stored: %s", self.path, error)
            return None

    def _open(self, capacity: int, ahead: int, direct: bool | None) -> None:
        self._flags = os.O_RDONLY
        if not self.is_read_only:
            works = direct is not False and takes_direct(self.path)
            if direct and not works:
                raise TierError(f"{self.path} takes no O_DIRECT; leave `direct` out, or False")
            self._flags = os.O_RDWR | os.O_CREAT | (O_DIRECT if works else 0)
        by_cache = self.is_direct and direct is None
        self._cache = PageCache(limit_here()) if by_cache else None
        slabs = Slabs(self._files, self.path, self._flags, self._cache, self._lock)
        opens = open_slabs if self.is_read_only else prepare
        self.recovered = opens(slabs, capacity)
        self._records = DiskRecords(slabs)
        self._room = DiskRoom(self, self._records, capacity, ahead, self._clock)
        self._renewal = Renewal(self._home, self._records, self._room)
        self._crew = Crew(_HELPERS if self.is_direct else 0, f"quire-{self.name}")
        self._reader = RecordReader(
            self._records, self._crew, self._clock, self._note, not self.is_read_only
        )
        self._writer = DiskWriter(self._records, self._room, self._crew, self._clock, self._note)
        if not self.is_read_only:
            with suppress(OSError):
                self._room.fit()

    @property
    def num_renewed(self) -> int:
        """Times the directory was emptied, replaced or lost files while open, and was begun anew."""
        return self._home.num_renewed

    @property
    def is_direct(self) -> bool:
        """Whether slabs of whole pages can be read and written past the page cache."""
        return bool(self._flags & O_DIRECT)

    @property
    def is_read_only(self) -> bool:
        """Whether nothing is stored, as nothing can be written where it is."""
        return self._lock is None

    @mutating
    def touch(self, keys: Keys) -> None:
        with suppress(TierError):
            self._in_call(lambda: self._records.touch(keys))

    def scan(self) -> Iterator[ListedRecord]:
        return self._in_call(self._records.entries)

    def settle(self, timeout_s: float) -> bool:
        """Wait until slabs are written ahead and uses written down; return whether they are."""
        self._background.wake()
        return self._background.settle(timeout_s)

    def flush(self) -> None:
        """Return when all records would survive a loss of power. Raises `TierError`."""
        if self.is_read_only:
            return
        try:
            self._in_call(self._flush)
        except OSError as error:
            raise TierError(f"{self.path} cannot be synced: {error}") from error

    def _flush(self) -> None:
        if self._lacks(list(self._records.slabs)):
            self._renews()
        self._records.slabs.sync()

    def check(self) -> None:
        self._in_call(self._records.check)
        if self._room.used > self._room.capacity and not self.is_read_only:
            raise InvariantError(
                f"{self._room.used} bytes of slabs; the limit is {self._room.capacity}"
            )

    def close(self) -> None:
        """Close the tier when all calls have ended.

        If a call hangs for a minute, its files stay open: another file could get their descriptors.
        """
        if os.getpid() != self._process:  # locks and threads are the parent's
            if not self._is_closed:
                self._is_closed = True
                self._close_files()
            return
        with self._records.lock:
            if self._is_closed:
                return
            self._is_closed = True
        self._background.stop()
        give_up = time.monotonic() + _CLOSE_S
        while self._in_progress() and time.monotonic() < give_up:
            time.sleep(0.001)
        if self._in_progress():
            _log.warning("%s: calls hang in it; its files stay open and locked for them", self.name)
            return
        self._crew.close()
        if self._records.num_touches and not self.is_read_only:
            with suppress(OSError):  # then the files say what they said
                self._records.write_all()
        if not self.is_read_only and len(self._records):
            with suppress(OSError):  # a cleaner may have taken the marker
                self._home.renew()
        self._close_files()

    def _close_files(self) -> None:
        self._records.close()
        if (lock := self._records.slabs.lock) is not None:
            lock.release()

    def _get(self, keys: Keys, buffers: Buffers, timeout_s: float, answers: Answers) -> None:
        until = self._clock() + timeout_s
        self._in_call(lambda: self._reader.get(keys, buffers, until, answers))

    def _put(self, keys: Keys, records: Buffers, timeout_s: float, done: list[Outcome]) -> None:
        if self._lock is None:
            return
        until = self._clock() + timeout_s
        self._in_call(partial(self._write, keys, records, until, done))
        self._wake(set(map(len, records)))

    def _write(self, keys: Keys, records: Buffers, until: float, done: list[Outcome]) -> None:
        """Write records, once more where the directory had to be made anew."""
        try:
            self._writer.put(keys, records, until, done)
            is_lost = Outcome.ERROR in done or self._lacks(set(map(len, records)))
        except TimeoutError:
            raise
        except OSError:
            if not self._renews():
                raise
            is_lost = True
        else:
            is_lost = is_lost and self._renews()
        if is_lost:
            before = list(done)
            self._writer.put(keys, records, until, done)
            for index, outcome in enumerate(before):
                if outcome is Outcome.STORED and done[index] is Outcome.PRESENT:
                    done[index] = outcome

    def _lacks(self, sizes: Iterable[int]) -> bool:
        """Whether files of records of these sizes were removed, so that what they hold is lost with this process."""
        slabs = filter(None, map(self._records.slabs.get, sizes))
        return any(map(Slab.is_removed, slabs))

    def _renews(self) -> bool:
        """Make anew what others removed of the directory; return whether there was anything. Raises `OSError` and `TierError`."""
        what = self._renewal.renew()
        if what:
            self.last_failure = self._home.say_renewed(what)
        return bool(what)

    def _note(self, error: OSError) -> None:
        """Say what failed last, for people."""
        self.last_failure = str(error)

    def _contains(self, keys: Keys, timeout_s: float) -> list[bool]:
        return self._in_call(lambda: self._records.contains(keys))

    def _delete(self, keys: Keys, timeout_s: float) -> None:
        if self.is_read_only:
            return

        def drop() -> None:
            self._records.drop_keys(keys)
            if self.evicting is not None:  # who is told of what makes room is told by now
                self._room.wait(timeout_s)

        self._in_call(drop)
        self._wake(())

    def _purge(self, purge: Purge) -> None:
        if self.is_read_only:
            raise TierError(f"{self.path} is open to read only")
        others: list[Permit] = []

        def wipe() -> None:
            DiskPurge(self._records, self._room, purge, is_alone).run()

        def is_alone() -> bool:
            still = self._in_progress()
            return not any(each in still for each in others)

        others += self._in_progress()
        self._in_call(wipe)

    def _size(self) -> tuple[int, int, int]:
        capacity = -1 if self.is_read_only else self._room.capacity
        return len(self._records), self._records.num_bytes, capacity

    def _in_call(self, work: Callable[[], Result]) -> Result:
        """Do the work of a call, which `close` waits for. Raises `TierError` where there can be none."""
        if os.getpid() != self._process:
            raise TierError(
                f"{self.path} is open in process {self._process}, from which this one was "
                "forked; open a tier after the fork"
            )
        call = Permit()
        try:
            with self._records.lock:
                if self._is_closed:
                    raise TierError(f"{self.path} was closed")
                self._calls.add(call)
            return work()
        finally:
            call.is_over = True

    def _in_progress(self) -> list[Permit]:
        with self._records.lock:
            return [call for call in list(self._calls) if not call.is_over]

    def _mend(self, why: str) -> None:
        """Let the indexes agree with themselves; places that were given out and not used yet are free after the next start."""
        _log.warning("%s: %s", self.name, why)
        with self._records.lock:
            for slab in self._records.slabs.values():
                slab.mend()

    def _wake(self, sizes: Iterable[int]) -> None:
        """See to it that slabs of these record sizes are ahead, and the files not behind."""
        if self._room.wants(sizes) or self._has_many_uses() or self._is_behind():
            self._background.wake()

    def _is_behind(self) -> bool:
        """Whether so much waits in the page cache that it is to be written out."""
        return self._cache is not None and self._cache.is_behind

    def _has_many_uses(self) -> bool:
        """Whether so many uses are untold that writing all entries costs next to nothing for each."""
        num_touches = self._records.num_touches
        return num_touches > _USES_KEPT and num_touches > len(self._records)

    def _chore(self) -> bool:
        if self._has_many_uses():
            with suppress(OSError):
                self._records.write_all()
        if self._is_behind():
            for slab in list(self._records.slabs.values()):
                slab.write_out()
        return self._room.prewrite()
