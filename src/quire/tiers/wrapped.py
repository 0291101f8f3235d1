"""A tier around another one, and the tier that could not be opened yet."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator

from quire.errors import TierError
from quire.tiers.base import Answers, Buffers, Keys, ListedRecord, Outcome, Tier
from quire.tiers.purging import Purge

RETRY_S = 1.0
"""A tier that could not be opened is not tried again sooner."""

_log = logging.getLogger(__name__)


class Wrapped(Tier):
    """Forwards to the tier within. Closing it closes that one."""

    def __init__(self, tier: Tier) -> None:
        super().__init__()
        self._take(tier)

    @property
    def tier(self) -> Tier:
        """The tier within."""
        return self._within

    def _take(self, tier: Tier) -> None:
        self._within = tier
        self.name = tier.name
        self.is_local = tier.is_local
        tier.evicting = self._tell
        tier.evicting_of = self.worth_telling

    def _tell(self, keys: list[bytes], records: list[memoryview]) -> None:
        if self.evicting is not None:
            self.evicting(keys, records)

    def _get(self, keys: Keys, buffers: Buffers, timeout_s: float, answers: Answers) -> None:
        for index, outcome in enumerate(self.tier.get(keys, buffers, timeout_s, answers.came)):
            settle_as_within(answers, index, outcome)

    def _put(self, keys: Keys, records: Buffers, timeout_s: float, done: list[Outcome]) -> None:
        done[:] = self.tier.put_sealed(keys, records, timeout_s)

    def _contains(self, keys: Keys, timeout_s: float) -> list[bool]:
        there, failures = self.tier.lookup(keys, timeout_s)
        if failures:
            raise TimeoutError if failures[0] is Outcome.TIMEOUT else TierError(self.name)
        return there

    def _delete(self, keys: Keys, timeout_s: float) -> None:
        self.tier.delete(keys, timeout_s)

    def _purge(self, purge: Purge) -> None:
        done = self.tier.purge(purge.tag, purge.left_s)
        purge.count += done.count
        purge.num_bytes += done.num_bytes
        if not done.is_complete:
            purge.reasons.append(done.reason)

    def _size(self) -> tuple[int, int, int]:
        stats = self.tier.stats()
        return stats.num_records, stats.num_bytes, stats.capacity_bytes

    def touch(self, keys: Keys) -> None:
        self.tier.touch(keys)

    def lease(self, keys: Keys, seconds: float) -> None:
        self.tier.lease(keys, seconds)

    def scan(self) -> Iterator[ListedRecord]:
        return self.tier.scan()

    def flush(self) -> None:
        self.tier.flush()

    def check(self) -> None:
        self.tier.check()

    def close(self) -> None:
        self.tier.close()


def settle_as_within(answers: Answers, index: int, outcome: Outcome) -> None:
    """Settle an answer as the tier within has said it: what is damaged there, that one has dropped."""
    answers.settle(index, outcome)
    if outcome is Outcome.CORRUPT:
        answers.dropped.add(index)


class Late(Wrapped):
    """A tier that could not be opened yet; calls retry it every `RETRY_S` and fail until then.

    `opens`  opens it, or raises `TierError`
    """

    is_local = False

    def __init__(self, name: str, opens: Callable[[], Tier], error: TierError) -> None:
        Tier.__init__(self)
        self.name = name
        self._opens = opens
        self._error = error
        self._opened: Tier | None = None
        self._is_closed = False
        self._tried_at = time.monotonic()
        self._trying = threading.Lock()
        _log.warning("%s could not be opened, and is left alone until it can be: %s", name, error)

    @property
    def tier(self) -> Tier:
        """The tier within. Raises `TierError` until it can be opened."""
        if self._opened is None:
            self._try()
        return self._within

    def _try(self) -> None:
        with self._trying:
            if self._opened is not None:
                return
            waited_s = time.monotonic() - self._tried_at
            if self._is_closed or waited_s < RETRY_S:
                raise self._error
            try:
                tier = self._opens()
            except TierError as error:
                self._error = error
                raise
            finally:
                self._tried_at = time.monotonic()
            name = self.name
            self._take(tier)
            self.name = name
            self._opened = tier
            if self._is_closed:  # meanwhile, by who did not see it
                tier.close()
        _log.info("%s is open now", name)

    def _size(self) -> tuple[int, int, int]:
        return super()._size() if self._opened else (0, 0, -1)

    def check(self) -> None:
        if self._opened is not None:
            self._opened.check()

    def close(self) -> None:
        self._is_closed = True
        if self._opened is not None:
            self._opened.close()
