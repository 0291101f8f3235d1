"""Purging: all records of one tenant leave a tier, and no write that began before brings one back.

A tier is told by tenant tag (`quire.exchange.hashing`). While it purges one, puts of that tag are left out, and those
under way are waited for; one that still hangs when the time is over purges again when it ends.

Other processes that write to a shared tier are told by a *mark* that each purge sets first: behind a put its process reads the
mark of the tag, and takes the records back where that is another one than it knew. So the first put of a tenant behind
a purge by another process may be lost, which costs a miss.
"""

from __future__ import annotations

import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256
from operator import itemgetter
from weakref import WeakSet

import msgspec
import numpy as np
from numpy.typing import NDArray

from quire.errors import ConfigError, InvariantError, QuireError, TierError
from quire.exchange.hashing import TAG_BYTES
from quire.interrupts import interrupt_in
from quire.tiers.format import KEY_BYTES, TENANT_AT, tag_of_key
from quire.tiers.outcomes import ListedRecord, Outcome
from quire.tiers.threads import Bell

_TAG_OF = itemgetter(slice(TENANT_AT, None))

_UNWRITTEN = {Outcome.PRESENT, Outcome.FULL}

ROUNDS = 3
"""How often a tier that others write to is looked through again."""

AT_ONCE = 1000
"""Records that are deleted in one call."""

PURGE_TIMEOUT_S = 600.0
"""The longest that a purge of one tier takes where its caller does not say."""


class Purged(msgspec.Struct, frozen=True):
    """The result of a purge.

    `count`        records that were deleted
    `num_bytes`    bytes of these; of a tier that does not say how many, 0
    `is_complete`  whether nothing of the tenant is left, as far as the tier can say
    `reason`       why not; empty where it is complete
    """

    count: int = 0
    num_bytes: int = 0
    is_complete: bool = True
    reason: str = ""

    def __add__(self, other: Purged) -> Purged:
        return Purged(
            self.count + other.count,
            self.num_bytes + other.num_bytes,
            self.is_complete and other.is_complete,
            "; ".join(filter(None, (self.reason, other.reason))),
        )


class Purge:
    """A purge of one tag that is under way, until its deadline."""

    def __init__(self, tag: bytes, timeout_s: float) -> None:
        self.tag = tag
        self.count = self.num_bytes = 0
        self.reasons: list[str] = []
        self._deadline = time.monotonic() + timeout_s

    @property
    def left_s(self) -> float:
        """Seconds that are left. Raises `TimeoutError` where there are none."""
        if (left_s := self._deadline - time.monotonic()) <= 0:
            raise TimeoutError
        return left_s

    def owns(self, key: bytes) -> bool:
        """Return whether a key has the tag."""
        return tag_of_key(key) == self.tag

    def repeat(self, delete: Callable[[], int]) -> None:
        """Delete records until there are no more: others may write meanwhile."""
        for _ in range(ROUNDS):
            if not delete():
                return
        self.reasons.append("others keep writing records of the tenant")

    def result(self) -> Purged:
        """Return the counts so far, complete where no reason says otherwise."""
        reason = "; ".join(dict.fromkeys(self.reasons))
        return Purged(self.count, self.num_bytes, not reason, reason)


class Write:
    """A put, by its keys, and once it has begun: marks as they were known then.

    `tags`     of its keys
    `barred`   tags that it is not to write
    `purged`   tags whose purge began since
    `late`     of these, those whose purge has not waited for it
    `is_over`  whether it writes no more; one whose frames are gone does not either
    """

    def __init__(self, keys: Iterable[bytes]) -> None:
        self.tags = frozenset(map(_TAG_OF, keys))
        self.barred: frozenset[bytes] = frozenset()
        self.marks: dict[bytes, bytes] = {}
        self.purged: set[bytes] = set()
        self.late: set[bytes] = set()
        self.is_over = False


class Bar:
    """The bar of a tag for puts that begin, until `is_over`, or no frame refers to it."""

    def __init__(self, tag: bytes) -> None:
        self.tag = tag
        self.is_over = False


class Writes:
    """The puts of a tier that are under way, and the tags that are barred meanwhile.

    A put ends with the first assignment of `finally`, whatever a signal does (`tiers.threads`), and so does a bar:

        write = Write(keys)
        try:
            writes.begin(write)
            ...
        finally:
            write.is_over = True
            writes.ended()
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changed = Bell()
        self._under_way: WeakSet[Write] = WeakSet()
        self._bars: WeakSet[Bar] = WeakSet()
        self.ended = self._changed.ring
        """To be called when a put is over: purges look again."""
        self.marks: dict[bytes, bytes] = {}
        """Marks of purges as they were last read, by tag."""

    def begin(self, write: Write) -> None:
        """Note a put. Keys of its `barred` tags are not to be written."""
        with self._lock:
            if self._bars:
                write.barred = write.tags.intersection(self._barred())
            write.marks = dict(self.marks)
            self._under_way.add(write)

    def bar(self, bar: Bar) -> None:
        """Let no further put write a tag; those under way are told that it is purged."""
        with self._lock:
            self._bars.add(bar)
            for write in self._writing():
                if bar.tag in write.tags - write.barred:
                    write.purged.add(bar.tag)

    @contextmanager
    def barring(self, tag: bytes) -> Generator[None]:
        """Bar a tag until the end of the block."""
        bar = Bar(tag)
        try:
            self.bar(bar)
            yield
        finally:
            bar.is_over = True

    def is_barred(self, tag: bytes) -> bool:
        """Return whether a tag is barred now."""
        with self._lock:
            return tag in self._barred()

    def is_writing(self, tag: bytes) -> bool:
        """Return whether a put is under way that began before the tag was barred."""
        with self._lock:
            return any(tag in write.purged for write in self._writing())

    def wait(self, tag: bytes, timeout_s: float) -> bool:
        """Return whether no put of a tag is under way that could still write it, before the time is over."""
        is_over = self._changed.wait_for(lambda: not self.is_writing(tag), timeout_s)
        with self._lock:
            for write in self._writing():
                if tag in write.purged:
                    write.late.add(tag)
        return is_over

    def late(self, write: Write) -> frozenset[bytes]:
        """Return the tags of a put that is over whose purges have not waited for it."""
        with self._lock:  # a purge that saw it under way has noted that by now
            return frozenset(write.late)

    # The lock is held

    def _barred(self) -> set[bytes]:
        return {bar.tag for bar in list(self._bars) if not bar.is_over}

    def _writing(self) -> list[Write]:
        return [write for write in list(self._under_way) if not write.is_over]


class Purgeable(ABC):
    """The part of a tier that purges: by scanning and deleting, where a subclass has no better `_purge`."""

    marks_purges: bool = False
    """Whether other processes that write to it learn of a purge, by `_read_mark` and `_set_mark`."""

    def __init__(self) -> None:
        self.writes = Writes()

    def purge(self, tag: bytes, timeout_s: float = PURGE_TIMEOUT_S) -> Purged:
        """Delete all records whose keys end with a tenant tag, and overwrite their bytes where the tier can.

        Puts of the tag that are under way land before it is done or not at all; those that begin meanwhile are
        left out. Raises `ConfigError` for a tag that is none; a tier that fails is `is_complete=False`, with the reason.
        """
        if type(tag) is not bytes or len(tag) != TAG_BYTES:
            raise ConfigError(
                f"a tenant tag is {TAG_BYTES} bytes, as quire.exchange.tenant_tag returns them, got {tag!r:.80}"
            )
        handled = sys.exc_info()[1]
        purge, bar = Purge(tag, timeout_s), Bar(tag)
        try:
            self.writes.bar(bar)
            self._run(purge)
        except BaseException as error:  # noqa: BLE001 - raised where it is no failure of the tier
            self._judge("a purge", error, handled)
            said = isinstance(error, (QuireError, OSError))
            reason = str(error) if said else f"{type(error).__name__}: {error}"
            is_late = isinstance(error, TimeoutError)
            purge.reasons.append(f"not done within {timeout_s:g} s" if is_late else reason)
        finally:
            bar.is_over = True
        return purge.result()

    def _run(self, purge: Purge) -> None:
        if self.marks_purges:
            name = mark_name(purge.tag)
            self._set_mark(name, purge.left_s)
            self.writes.marks[purge.tag] = self._read_mark(name, purge.left_s)
        if not self.writes.wait(purge.tag, purge.left_s / 2):
            purge.reasons.append("a write hangs; its records are deleted when it ends")
        self._purge(purge)

    def _purge(self, purge: Purge) -> None:
        """Delete the records of a tag, until there are no more."""
        purge.repeat(lambda: self._purge_found(purge))

    def _purge_found(self, purge: Purge) -> int:
        """Delete the records of a tag that are there now; return how many there were."""
        found = list(self._listed_of(purge))
        for start in range(0, len(found), AT_ONCE):
            some = found[start : start + AT_ONCE]
            self._delete([each.key for each in some], purge.left_s)
            purge.count += len(some)
            purge.num_bytes += sum(each.num_bytes for each in some)
        return len(found)

    def _listed_of(self, purge: Purge) -> Iterator[ListedRecord]:
        """List the records of a tag, maybe several times. Raises `TierError` where that fails."""
        return (each for each in self.scan() if purge.owns(each.key))

    @abstractmethod
    def scan(self) -> Iterator[ListedRecord]:
        """List the records."""

    @abstractmethod
    def _delete(self, keys: Sequence[bytes], timeout_s: float) -> None:
        """Forget keys."""

    @abstractmethod
    def _put(
        self,
        keys: Sequence[bytes],
        records: Sequence[memoryview],
        timeout_s: float,
        done: list[Outcome],
    ) -> None:
        """Keep records and set `done[i]` for each."""

    def _judge(self, call: str, error: BaseException, handled: BaseException | None) -> None:
        """Mend what an error of a call left, and raise what is no failure of the tier: an interrupt, a broken invariant.

        An interrupt comes out also where what tidied up behind it failed. `handled` was being handled before the call.
        """
        interrupt = interrupt_in(error, handled)
        if interrupt is None and isinstance(error, TimeoutError):
            return
        self.cut_off(call, interrupt or error)
        if interrupt is not None:
            raise interrupt
        if isinstance(error, InvariantError):
            raise error

    @abstractmethod
    def cut_off(self, call: str, error: BaseException) -> None:
        """Restore order after an exception."""

    def _read_mark(self, name: str, timeout_s: float) -> bytes:
        """Return the mark that `_set_mark` has set last under a name; empty where there is none."""
        raise NotImplementedError

    def _set_mark(self, name: str, timeout_s: float) -> None:
        """Set a mark that nobody has set before, for all processes."""
        raise NotImplementedError

    # What a put does around writing

    def _put_but(
        self,
        write: Write,
        keys: Sequence[bytes],
        records: Sequence[memoryview],
        timeout_s: float,
        done: list[Outcome],
    ) -> None:
        """Put records of tags that are not barred."""
        if not write.barred:
            self._put(keys, records, timeout_s, done)
            return
        own = [at for at, key in enumerate(keys) if tag_of_key(key) not in write.barred]
        some = [Outcome.SKIPPED] * len(own)
        try:
            self._put([keys[at] for at in own], [records[at] for at in own], timeout_s, some)
        finally:
            for at, outcome in zip(own, some, strict=True):
                done[at] = outcome

    def _end_write(
        self, write: Write, keys: Sequence[bytes], timeout_s: float, done: Sequence[Outcome]
    ) -> list[int]:
        """Note the end of a put, and take back what it has written of tags that were purged meanwhile.

        Returns the indices of the keys of these.
        """
        changed = set[bytes]()
        if self.marks_purges and not _UNWRITTEN.issuperset(done):
            changed = self._purged_elsewhere(write, timeout_s)
        write.is_over = True
        self.writes.ended()
        tags = self.writes.late(write) | changed
        lost = [at for at, key in enumerate(keys) if tag_of_key(key) in tags] if tags else []
        if self.marks_purges and lost:
            with suppress(TimeoutError, OSError, TierError):
                self._delete([keys[at] for at in lost], timeout_s)
        elif lost:
            for tag in tags:
                self.purge(tag, timeout_s)
        return lost

    def _purged_elsewhere(self, write: Write, timeout_s: float) -> set[bytes]:
        """Return the tags of a put that another process has purged since it began."""
        changed: set[bytes] = set()
        for tag in write.tags - write.barred:
            before = write.marks.get(tag, b"")
            try:
                now = self._read_mark(mark_name(tag), timeout_s)
            except (TimeoutError, OSError, TierError):
                continue  # who sets a mark there meets the same
            self.writes.marks[tag] = now
            if now != before:
                changed.add(tag)
        return changed


def owned(keys: NDArray[np.uint8], tag: bytes) -> NDArray[np.bool_]:
    """Return which of keys, uint8 [n, 32], have a tag: bool [n]."""
    tags = np.ascontiguousarray(keys.reshape(-1, KEY_BYTES)).view(np.uint64)[:, TENANT_AT // 8]
    return tags == np.frombuffer(tag, np.uint64)[0]


def mark_name(tag: bytes) -> str:
    """Return the name of the mark of a tag, which does not show the tag itself."""
    return sha256(b"quire-purged-1" + tag).hexdigest()[:32]
