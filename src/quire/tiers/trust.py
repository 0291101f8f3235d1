"""The verification of records by a stack with a tier key."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

from quire.errors import RecordError
from quire.tiers.format import is_signed, key_id_of
from quire.tiers.keys import TierKey
from quire.tiers.outcomes import Outcome

DOUBT_S = 30.0
"""So long a record that was not accepted counts as absent: who holds the key may have put it anew meanwhile."""

MOST_DOUBTS = 1 << 16
"""Keys that are remembered so; the oldest are forgotten."""

_DOUBTED = (Outcome.UNTRUSTED, Outcome.FORGED, Outcome.FOREIGN, Outcome.CORRUPT)
"""The last of these are dropped, if the tier can: it may fail just then."""

_TOLD = (Outcome.UNTRUSTED, Outcome.FORGED)

_log = logging.getLogger(__name__)


class Trust:
    """Verifies records against a tier key, and remembers for one tier which keys have others' records.

    A doubted key counts as absent, so that its record is computed and put; and a put of it replaces the record, so
    that nobody keeps a key from being stored by being there first. `clock`: seconds.
    """

    def __init__(self, key: TierKey, clock: Callable[[], float] = time.monotonic) -> None:
        self.key = key
        self._clock = clock
        self._until: dict[bytes, float] = {}
        self._lock = threading.Lock()
        self._counts: Counter[Outcome] = Counter()

    def judge(self, record: memoryview) -> Outcome:
        """Return `HIT` for a whole record that a tier key has signed, else `UNTRUSTED` or `FORGED`."""
        signed = is_signed(record, self.key)
        if signed is None:
            return Outcome.UNTRUSTED
        return Outcome.HIT if signed else Outcome.FORGED

    def check(self, records: Sequence[memoryview]) -> None:
        """Raise `RecordError` for a record that no tier key has signed."""
        for record in records:
            if self.judge(record) is not Outcome.HIT:
                raise _unsigned(record, self.key)

    def note(self, name: str, keys: Sequence[bytes], outcomes: Sequence[Outcome]) -> None:
        """Remember which keys of the tier of this name have records that were not accepted, and warn."""
        if not (self._until or any(each in outcomes for each in _DOUBTED)):
            return
        found = Counter(each for each in outcomes if each in _TOLD)
        with self._lock:
            until = self._clock() + DOUBT_S
            for key, outcome in zip(keys, outcomes, strict=True):
                self._until.pop(key, None)
                if outcome in _DOUBTED:
                    self._until[key] = until
            while len(self._until) > MOST_DOUBTS:
                del self._until[next(iter(self._until))]
            before = self._counts.copy()
            self._counts += found
        for outcome, count in found.items():
            total = before[outcome] + count
            if total.bit_length() > before[outcome].bit_length():
                _log.warning(_WARNINGS[outcome], name, total)

    def doubted(self, keys: Sequence[bytes]) -> list[bytes]:
        """Return those of the keys whose record was not accepted just now."""
        if not self._until:
            return []
        with self._lock:
            now = self._clock()
            return [key for key in keys if self._until.get(key, now) > now]

    def replaced(
        self, doubted: Sequence[bytes], keys: Sequence[bytes], outcomes: list[Outcome]
    ) -> None:
        """Doubt no more what has been stored. What is `PRESENT` still is none of ours: then it was `SKIPPED`."""
        were = set(doubted)
        with self._lock:
            for at, key in enumerate(keys):
                if key in were and outcomes[at] is Outcome.STORED:
                    self._until.pop(key, None)
                elif key in were and outcomes[at] is Outcome.PRESENT:
                    outcomes[at] = Outcome.SKIPPED


_WARNINGS = {
    Outcome.UNTRUSTED: "%s has given %d records so far that none of the tier keys here has signed; they read as misses "
    "and are put anew. Either it was filled without a key, or with another one, or somebody else writes to it",
    Outcome.FORGED: "%s has given %d records so far that claim to be signed with a tier key of this process and are not; "
    "they read as misses and are dropped. Somebody else writes to it",
}


def check_signer(records: Sequence[memoryview], key: TierKey) -> None:
    """Raise `RecordError` for a record that does not say that one of these tier keys signed it.

    Its MAC is not computed again: who calls has sealed it.
    """
    for record in records:
        if key_id_of(record) not in key.ids:
            raise _unsigned(record, key)


def _unsigned(record: memoryview, key: TierKey) -> RecordError:
    said = key_id_of(record)
    what = f"signed with {said.hex()}" if any(said) else "not signed"
    return RecordError(
        f"a record that is {what}, for tiers of {key!r}; seal it with the stack's tier key, `stack.settings.key`"
    )
