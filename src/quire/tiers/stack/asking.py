"""Asking: whether a tier is asked and waited for, and when one that is left alone is tried again.

A tier is left alone while it is out of service (`Breaker`), and by every request that would wait longer for its
answer than it can expect to gain (`Asking.pays`). Either way nobody waits for it, and what it does is found out beside:
`Asking.take_trial` says when.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from enum import StrEnum
from typing import Literal, TypeAlias

LONGEST_PAUSES = 64
"""A tier that goes on failing is left alone for so many times its first cool-down."""

FREE_S = 0.2e-3
"""A tier that answers as fast as this is always asked."""

CHEAP_SHARE = 0.02
"""So is one whose answer takes at most this share of computing what is asked for."""

NEWEST = 0.5
"""The weight of the newest answer in the share of what is asked for that a tier has."""

ASKED_BESIDE_SHARE = 0.2
"""The most of the time that a question which nobody waits for is under way."""

PROBE_S = 10.0
"""How often a tier that is not loaded from is measured beside."""

Kind: TypeAlias = Literal["lookup", "load", "store"]


class BreakerState(StrEnum):
    """The state of a breaker."""

    CLOSED = "closed"
    """Calls go on."""
    TRYING = "trying"
    """They do not, and one call finds out whether they would be answered."""
    OPEN = "open"
    """They do not."""


class Breaker:
    """Opens for `cool_down_s` after `failures` calls of one kind failed in a row, or one that was waited for hung.

    Then one trial is due. If it fails, the breaker opens again for twice as long, up to
    `LONGEST_PAUSES` times as long; if it succeeds, the breaker closes, but the first failure of the following
    `failures` calls opens it for longer again: a tier that answers lookups and hangs on loads is not
    trusted for each lookup anew.

    Not thread-safe; its owner locks.
    """

    def __init__(self, now: Callable[[], float], failures: int, cool_down_s: float) -> None:
        self.num_opened = 0
        self.state = BreakerState.CLOSED
        self._now = now
        self._failures = failures
        self._first_s = self._pause_s = self._next_s = cool_down_s
        self._in_a_row: Counter[Kind] = Counter()
        self._since = 0.0
        self._proved = 0

    @property
    def allows(self) -> bool:
        """Whether calls may go on."""
        return self.state is BreakerState.CLOSED

    def take_trial(self) -> bool:
        """Return whether a trial is due; then it is the caller's to make and to record."""
        if self.allows or self._now() - self._since < self._pause_s:
            return False
        self.state = BreakerState.TRYING
        self._since = self._now()
        return True

    def succeeded(self, kind: Kind) -> None:
        """Record a call that was answered."""
        self._in_a_row[kind] = 0
        if self.state is BreakerState.TRYING:
            self.state = BreakerState.CLOSED
        elif self.allows and self._is_watched and kind != "lookup":
            self._proved += 1
            if self._proved >= self._failures:
                self._next_s = self._first_s

    def failed(self, kind: Kind) -> None:
        """Record a call that was answered with a failure."""
        self._in_a_row[kind] += 1
        is_trial = self.state is BreakerState.TRYING
        if is_trial or self._is_watched or self._in_a_row[kind] >= self._failures:
            self.open()

    def open(self) -> None:
        """Let no call through until a trial succeeds: the one that is recorded was not answered at all."""
        if self.state is BreakerState.OPEN:
            return
        self.num_opened += 1
        self.state = BreakerState.OPEN
        self._since = self._now()
        self._in_a_row.clear()
        self._proved = 0
        self._pause_s = self._next_s
        self._next_s = min(2 * self._next_s, LONGEST_PAUSES * self._first_s)

    @property
    def _is_watched(self) -> bool:
        return self._next_s > self._first_s


class Asking:
    """Statistics of one tier's answers, which say whether to wait for the next one.

    `ask_s`    seconds of an answer: the shorter of the last two, so that one hiccup does not count
    `share`    share of hits among the keys asked for and not known to be there; recent answers weigh more
    `sample`   some keys that it has, and the sizes of their records, to measure it with

    Not thread-safe; its owner locks.
    """

    def __init__(self, now: Callable[[], float], breaker: Breaker, most_trials: int) -> None:
        self.breaker = breaker
        self.ask_s = 0.0
        self.share = 1.0
        self.sample: tuple[list[bytes], list[int]] = ([], [])
        self.num_trials = 0
        """Trials that have not come back."""
        self._now = now
        self._most_trials = most_trials
        self._last_s = 0.0
        self._asked_at = -math.inf
        self._tried_at: dict[Kind, float] = {}

    def pays(self, saved_s: float, load_s: float, known: Callable[[], float]) -> bool:
        """Return whether to wait for an answer: the expected gain is more than the wait.

        `saved_s`  what having all that is asked for would save
        `load_s`   what loading it would take
        `known`    returns the share of it that the tier is known to have had
        """
        if self.ask_s <= FREE_S or saved_s == math.inf:
            return True
        gain_s = saved_s - load_s
        if gain_s <= self.ask_s:  # only a load can change that: without a sample, one that is found
            return not self.sample[0] and self._now() - self._asked_at >= PROBE_S
        return self.ask_s <= CHEAP_SHARE * saved_s or max(known(), self.share) * gain_s > self.ask_s

    def answered(self, took_s: float, known: float, found: float) -> None:
        """Note an answer: its seconds, and the shares of known and of found keys."""
        self.ask_s, self._last_s = min(self._last_s, took_s), took_s
        self._asked_at = self._now()
        if known < NEWEST:
            self.share += NEWEST * (found - self.share)

    def take_trial(self, kind: Kind) -> bool:
        """Return whether to try the tier beside; the caller does, and takes 1 from `num_trials` when it has come back.

        One that is out of service when its cool-down is over; others by a load each `PROBE_S`, and by lookups which
        take `ASKED_BESIDE_SHARE` of the time. Where all threads hang, trials would only queue up.
        """
        if self.num_trials >= self._most_trials:
            return False
        if not self.breaker.allows:
            is_due = self.breaker.take_trial()
        else:
            pause_s = PROBE_S if kind == "load" else self._last_s / ASKED_BESIDE_SHARE
            passed = self._now() - self._tried_at.get(kind, -math.inf)
            is_due = passed >= pause_s and not self.num_trials
        if is_due:
            self._tried_at[kind] = self._now()
            self.num_trials += 1
        return is_due
