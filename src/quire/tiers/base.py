"""A tier: a place that keeps records by key, may lose them, and never changes them unseen."""

from __future__ import annotations

import logging
import sys
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Self, TypeAlias

from quire.errors import ConfigError, InvariantError, QuireError, RecordError, SlotError, TierError
from quire.tiers.format import (
    KEY_BYTES,
    carries,
    num_begun,
    read_header,
    record_bytes,
    verify,
)
from quire.tiers.outcomes import ListedRecord, Outcome, TierStats
from quire.tiers.purging import Purgeable, Write
from quire.tiers.trust import Trust

_log = logging.getLogger(__name__)

Keys: TypeAlias = Sequence[bytes]
"""Keys of 32 bytes. Where they belong to one prompt, its head comes first."""

Buffers: TypeAlias = Sequence[memoryview]
"""One buffer per key, of exactly the record's size; from `format.new_buffer`, so that it is aligned."""


Evicting: TypeAlias = Callable[[list[bytes], list[memoryview]], None]
"""Takes keys and records, which are valid during the call."""


class Tier(Purgeable):
    """Records by key. All tiers pass `quire.tiers.contract.TierContract`.

    - `get` returns `HIT` only for bytes that were put under this very key: every record is verified,
      here, for every tier. A record that fails is dropped and counted, and reads as a miss.
    - No call raises because the tier fails; it returns an outcome. Bad arguments raise, before anything.
    - A call returns within `timeout_s` plus the time of one small piece of work, whatever happens.
    - Calls may come from several threads at once. What one could not finish leaves no record that is found and wrong.
    - Where a tier makes room by itself, a prompt's tail goes before its head.

    A subclass implements the methods with an underscore. They may raise `TimeoutError`, `OSError` or `TierError`, which
    become `TIMEOUT` and `ERROR` for the keys that were not answered; so does a bug in them, after `_mend`.

    A subclass calls `super().__init__()`. `name` is for people and metrics; `is_local` says that nobody else writes to it.
    """

    name: str = "tier"
    is_local: bool = True
    in_memory: bool = False
    """Whether its records lie in this process's memory: no call waits for anything but a copy."""
    answers_at_once: bool = False
    """Whether `contains` and `touch` look at memory only: then they are called on the caller's thread."""
    last_failure: str = ""
    """What went wrong last, for people, where the tier knows it."""
    drops_damaged: bool = True
    """Whether `_get` may drop what it finds damaged; what it does not is deleted by its key."""
    evicting: Evicting | None = None
    """Told of records that are about to make room, while their bytes are there; for a local tier."""
    evicting_of: Callable[[list[bytes]], list[int]] | None = None
    """Says which of the keys that are about to make room it is of use to tell, by index; None: all.

    Who asks first (`worth_telling`) reads only what somebody wants."""

    trust: Trust | None = None  # what a stack with a tier key accepts of it

    def __init__(self) -> None:
        super().__init__()
        self._outcomes: Counter[str] = Counter()

    def get(
        self,
        keys: Keys,
        buffers: Buffers,
        timeout_s: float = 1.0,
        came: Callable[[], None] | None = None,
    ) -> list[Outcome]:
        """Fill a buffer for each key. A buffer whose outcome is not `HIT` holds nothing of use.

        `came` is called on the way, on any thread, whenever a key is answered or a part of a record has come.
        """
        check_keys(keys, buffers)
        deadline = time.monotonic() + timeout_s
        trust = None if self.in_memory else self.trust
        answers = Answers(keys, buffers, came, may_drop=self.drops_damaged, trust=trust)
        outcomes = self._guarded(answers.outcomes, self._get, keys, buffers, timeout_s, answers)
        if answers.damaged:
            if left := [keys[index] for index in sorted(answers.damaged - answers.dropped)]:
                left_s = max(deadline - time.monotonic(), 0.0)
                self._guarded([], self._delete, left, left_s)
            damaged = [at for at in sorted(answers.damaged) if outcomes[at] is Outcome.CORRUPT]
            self._say_damaged([keys[at] for at in damaged])
        if trust is not None:
            trust.note(self.name, keys, outcomes)
        self._outcomes.update(outcomes)
        return outcomes

    def put(self, keys: Keys, records: Buffers, timeout_s: float = 1.0) -> list[Outcome]:
        """Keep sealed records: `STORED` or `PRESENT`, else why not. The records stay the caller's.

        Raises `RecordError` where a record is not sealed under its key, or not signed with a tier key that it needs.
        """
        check_sealed(keys, records)
        if self.trust is not None:
            self.trust.check(records)
        return self.put_sealed(keys, records, timeout_s)

    def put_sealed(self, keys: Keys, records: Buffers, timeout_s: float) -> list[Outcome]:
        """Do what `put` does with records that went through `check_sealed`.

        Of a key that comes twice the first record is meant: `_put` sees each key once.
        """
        first: dict[bytes, memoryview] = {}
        for key, record in zip(keys, records, strict=True):
            first.setdefault(key, record)
        once, kept = list(first), list(first.values())
        doubted = self.trust.doubted(once) if self.trust is not None else []
        if doubted:  # what is kept as present would else be what was not accepted
            timeout_s /= 2
            self.delete(doubted, timeout_s)
        skipped = [Outcome.SKIPPED] * len(once)
        outcomes = self._guarded(skipped, self._write_all, once, kept, timeout_s, skipped)
        if doubted and self.trust is not None:
            self.trust.replaced(doubted, once, outcomes)
        if Outcome.FULL in outcomes:
            self._say_full()
        if len(once) < len(keys):
            left = dict(zip(once, outcomes, strict=True))
            outcomes = [_and_then(left, key) for key in keys]
        self._outcomes.update(outcomes)
        return outcomes

    def contains(self, keys: Keys, timeout_s: float = 1.0) -> list[bool]:
        """Return the keys that a `get` would likely find: bool per key. A hint: nothing is read."""
        return self.lookup(keys, timeout_s)[0]

    def lookup(self, keys: Keys, timeout_s: float = 1.0) -> tuple[list[bool], list[Outcome]]:
        """Return the answer of `contains`, and the failures: none, or one of `TIMEOUT` and `ERROR`."""
        check_keys(keys)
        found = [False] * len(keys)
        failures = self._guarded(
            [], lambda: found.__setitem__(slice(None), self._contains(keys, timeout_s))
        )
        self._outcomes.update(failures)
        if self.trust is not None and (doubted := set(self.trust.doubted(keys))):
            found = [here and key not in doubted for here, key in zip(found, keys, strict=True)]
        return found, failures

    def touch(self, keys: Keys) -> None:
        """Say that a prompt's records were used just now, the head first: all it is made of."""

    def lease(self, keys: Keys, seconds: float) -> None:
        """Keep these records from making room for so long; asked of tiers in memory."""

    def lend(self, sizes: Sequence[int]) -> list[memoryview]:
        """Return memory of the tier's own for the leading records, as far as it has any.

        What is put from there needs no copy. It stays as it is until `take_back`, kept or not.
        """
        return []

    def take_back(self, records: Sequence[memoryview]) -> None:
        """Take back buffers of `lend` that are no longer in use; other buffers are left alone."""

    def delete(self, keys: Keys, timeout_s: float = 1.0) -> None:
        """Forget these keys, whether they are there or not."""
        check_keys(keys)
        self._outcomes.update(self._guarded([], self._delete, keys, timeout_s))

    def scan(self) -> Iterator[ListedRecord]:
        """List the records, in any order. Raises `TierError` where the tier fails or cannot."""
        raise NotImplementedError

    def stats(self) -> TierStats:
        """Return its counts."""
        return TierStats(self.name, *self._size(), dict(sorted(self._outcomes.items())))

    def flush(self) -> None:
        """Return when everything that was put would survive the end of this process, if it can."""

    def check(self) -> None:
        """Verify the tier's invariants; raises `InvariantError`."""

    def close(self) -> None:
        """Give back files, sockets and memory. Closing twice does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        records, used, capacity = self._size()
        why = f"; last failure: {self.last_failure}" if self.last_failure else ""
        return f"<{type(self).__name__} {self.name}: {records} records, {used} of {capacity} bytes{why}>"

    def cut_off(self, call: str, error: BaseException) -> None:
        """Restore order after an exception that is no failure of the tier: Ctrl-C for instance, in `call`."""
        # What tidied up behind a cut may fail.
        is_broken = isinstance(error, (InvariantError, SlotError))
        if is_broken or not isinstance(error, (QuireError, OSError)):
            self._mend(f"{call} was cut off by {type(error).__name__}")

    def _mend(self, why: str) -> None:
        """Make the tier fit for use again, whatever it was at."""

    def _write_all(
        self, keys: Keys, records: Buffers, timeout_s: float, done: list[Outcome]
    ) -> None:
        """Put records, but none of a tenant that is being purged; see `quire.tiers.purging`."""
        write = Write(keys)
        try:
            try:
                self.writes.begin(write)
                self._put_but(write, keys, records, timeout_s, done)
            finally:
                for at in self._end_write(write, keys, timeout_s, done):
                    done[at] = Outcome.SKIPPED
        finally:
            if not write.is_over:
                write.is_over = True
                self.writes.ended()

    @abstractmethod
    def _get(self, keys: Keys, buffers: Buffers, timeout_s: float, answers: Answers) -> None:
        """Fill buffers and settle the answer of each key, as `HIT` where all of a record was read."""

    @abstractmethod
    def _put(self, keys: Keys, records: Buffers, timeout_s: float, done: list[Outcome]) -> None:
        """Keep records and set `done[i]` for each."""

    @abstractmethod
    def _contains(self, keys: Keys, timeout_s: float) -> list[bool]:
        """Return the presence of each key."""

    @abstractmethod
    def _delete(self, keys: Keys, timeout_s: float) -> None:
        """Forget keys."""

    @abstractmethod
    def _size(self) -> tuple[int, int, int]:
        """Return records, bytes and capacity in bytes, as in `TierStats`."""

    def worth_telling(self, keys: list[bytes]) -> list[int]:
        """Return the indices of the victims that `evicting` wants."""
        if self.evicting is None:
            return []
        return list(range(len(keys))) if self.evicting_of is None else self.evicting_of(keys)

    def _say_damaged(self, keys: list[bytes]) -> None:
        """Warn of damaged records, but not who only looks: of the first, and each time that they are twice as many."""
        before = self._outcomes[Outcome.CORRUPT]
        count = before + len(keys)
        if self.drops_damaged and count.bit_length() > before.bit_length():
            _log.warning(
                "%s has given %d damaged records so far, the last of key %s; they read as misses and "
                "are dropped, but what it stands on changes bytes",
                self.name,
                count,
                keys[-1].hex(),
            )

    def _say_full(self) -> None:
        """Warn, the first time that there is no room; in memory that passes."""
        if not self._outcomes[Outcome.FULL] and not self.in_memory:
            _log.warning(
                "%s has no room left for more, and can make none; what is there is found, and what is new is "
                "not stored until there is room",
                self.name,
            )

    def _guarded(
        self, outcomes: list[Outcome], call: Callable[..., object], *given: object
    ) -> list[Outcome]:
        """Run a call that sets outcomes; what it left `SKIPPED` becomes what went wrong."""
        handled = sys.exc_info()[1]
        try:
            call(*given)
        except BaseException as error:  # noqa: BLE001 - raised where it is no failure of the tier
            self._judge("a call", error, handled)
            if isinstance(error, TimeoutError):
                return _failed(outcomes, Outcome.TIMEOUT)
            is_known = isinstance(error, (TierError, OSError)) and str(error)
            self.last_failure = str(error) if is_known else f"{type(error).__name__}: {error}"
            return _failed(outcomes, Outcome.ERROR)
        return outcomes


class Answers:
    """Outcomes of the keys of one `get`, `SKIPPED` until they are settled.

    `outcomes`  by index
    `damaged`   indices of records that are `CORRUPT` or `FORGED`
    `dropped`   of these, those that the tier has claimed to drop; the others' keys are deleted by `Tier.get`
    `came`      to be called where a part of a record has come: who waits gives up a tier of which nothing comes
    """

    def __init__(
        self,
        keys: Keys,
        buffers: Buffers,
        came: Callable[[], None] | None = None,
        *,
        may_drop: bool = True,
        trust: Trust | None = None,
    ) -> None:
        self.came = came or (lambda: None)
        self.outcomes = [Outcome.SKIPPED] * len(keys)
        self.damaged: set[int] = set()
        self.dropped: set[int] = set()
        self._keys, self._buffers, self._may_drop, self._trust = keys, buffers, may_drop, trust

    def claims_drop(self, index: int) -> bool:
        """Claim to drop the damaged record that was read, not one put since; return whether the tier must."""
        if claims := self._may_drop and index in self.damaged:
            self.dropped.add(index)
        return claims

    def settle(self, index: int, outcome: Outcome) -> None:
        """Note the outcome of a key, and verify a `HIT`; its buffer is not written after that.

        Its bytes are in the processor's cache now: four times as fast as behind the whole call.
        """
        self.came()
        self.damaged.discard(index)
        if outcome is Outcome.HIT:
            outcome = checked(self._keys[index], self._buffers[index])
            if self._trust is not None and outcome is Outcome.HIT:
                outcome = self._trust.judge(self._buffers[index])
        if outcome in (Outcome.CORRUPT, Outcome.FORGED):
            self.damaged.add(index)
        self.outcomes[index] = outcome


def _failed(outcomes: list[Outcome], failed: Outcome) -> list[Outcome]:
    """Return what became of a call that failed: of its keys, or of it where it has none."""
    return [failed if each is Outcome.SKIPPED else each for each in outcomes] or [failed]


def _and_then(outcomes: dict[bytes, Outcome], key: bytes) -> Outcome:
    """Return the outcome of a key; where it comes again, it is there."""
    outcome = outcomes[key]
    if outcome is Outcome.STORED:
        outcomes[key] = Outcome.PRESENT
    return outcome


def checked(key: bytes, record: memoryview) -> Outcome:
    """Return `HIT` where a record is whole and carries its key, else `CORRUPT` or `FOREIGN`."""
    if carries(record, key):
        return Outcome.HIT
    try:
        verify(record)
    except RecordError as error:
        return Outcome.FOREIGN if error.is_foreign else Outcome.CORRUPT
    return Outcome.CORRUPT


def check_keys(keys: Keys, buffers: Buffers | None = None) -> None:
    """Raise `ConfigError` for keys of a wrong length or buffers that do not pair with them."""
    for key in keys:
        if len(key) != KEY_BYTES:
            raise ConfigError(f"a key has {KEY_BYTES} bytes, got {len(key)}: {bytes(key[:40])!r}")
    if buffers is None:
        return
    if len(buffers) != len(keys):
        raise ConfigError(f"{len(keys)} keys and {len(buffers)} buffers; give one for each")
    for buffer in buffers:
        if type(buffer) is not memoryview or buffer.format != "B" or not buffer.c_contiguous:
            raise ConfigError(f"a record lies in a contiguous memoryview of bytes, got {buffer!r}")


def check_sealed(keys: Keys, records: Buffers) -> None:
    """Raise `RecordError` where a record's header does not hold, or is not of its key and size."""
    check_keys(keys, records)
    for key, record in list(zip(keys, records, strict=True))[num_begun(records, keys) :]:
        header = read_header(record)
        if header.key != key:
            raise RecordError(f"a record of key {header.key.hex()} put as {key.hex()}")
        if len(record) != record_bytes(header.payload_bytes):
            raise RecordError(
                f"a record of {len(record)} bytes; with its payload of {header.payload_bytes} "
                f"it takes {record_bytes(header.payload_bytes)}"
            )
