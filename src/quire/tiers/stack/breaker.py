"""Circuit breaker: a tier that fails again and again is left alone for a while."""

from __future__ import annotations

from collections import Counter
from enum import StrEnum
from typing import Literal, TypeAlias

from quire.tiers.stack.lanes import Lanes

LONGEST_PAUSES = 64
"""A tier that goes on failing is left alone for so many times its first cool-down."""

Kind: TypeAlias = Literal["lookup", "load", "store"]


class BreakerState(StrEnum):
    """Whether a tier is called."""

    CLOSED = "closed"
    """It is."""
    TRYING = "trying"
    """It was not, and one call finds out whether it answers again."""
    OPEN = "open"
    """It is not."""


class Breaker:
    """Opens after `failures` calls of one kind failed in a row, for `cool_down_s`.

    Then one trial is due. If it fails, the breaker opens again for twice as long, up to
    `LONGEST_PAUSES` times as long; if it succeeds, the breaker closes, but the first failure of the following
    `failures` calls opens it for longer again: a tier that answers lookups and hangs on loads is not
    trusted for each lookup anew.

    Not thread-safe; its owner locks.
    """

    def __init__(self, lanes: Lanes, failures: int, cool_down_s: float) -> None:
        self.num_opened = 0
        self._lanes = lanes
        self._failures = failures
        self._first_s = cool_down_s
        self._longest_s = LONGEST_PAUSES * cool_down_s
        self._pause_s = cool_down_s
        self._next_s = cool_down_s
        self._in_a_row: Counter[Kind] = Counter()
        self._since = 0.0
        self._proved = 0
        self.state = BreakerState.CLOSED

    @property
    def allows(self) -> bool:
        """Whether calls may go on."""
        return self.state is BreakerState.CLOSED

    def take_trial(self) -> bool:
        """Return whether a trial is due; then it is the caller's to make and to record."""
        if self.state is BreakerState.CLOSED:
            return False
        passed = self._lanes.now() - self._since
        if passed < 0:  # the clock was set back
            self._since += passed
        if passed < self._pause_s:
            return False
        self.state = BreakerState.TRYING
        self._since = self._lanes.now()
        return True

    def succeeded(self, kind: Kind) -> None:
        """Record a call that was answered."""
        self._in_a_row[kind] = 0
        if self.state is BreakerState.TRYING:
            self.state = BreakerState.CLOSED
        elif self.state is BreakerState.CLOSED and self._is_watched and kind != "lookup":
            self._proved += 1
            if self._proved >= self._failures:
                self._next_s = self._first_s

    def failed(self, kind: Kind) -> None:
        """Record a call that timed out or failed."""
        self._in_a_row[kind] += 1
        if self.state is BreakerState.OPEN:
            return
        enough = self._is_watched or self._in_a_row[kind] >= self._failures
        if self.state is BreakerState.TRYING or enough:
            self.num_opened += 1
            self.state = BreakerState.OPEN
            self._since = self._lanes.now()
            self._in_a_row.clear()
            self._proved = 0
            self._pause_s = self._next_s
            self._next_s = min(2 * self._next_s, self._longest_s)

    @property
    def _is_watched(self) -> bool:
        return self._next_s > self._first_s
