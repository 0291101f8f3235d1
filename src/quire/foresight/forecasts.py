"""Forecasts: when callers say that they come back, and how far theirs are to be believed.

A forecast of f seconds within a factor w is right if the return comes between f / w and f x w seconds after the end of the
request; then one time in it is as likely as another on a scale of logarithms. Every caller and every session has its
credit, the share of its forecasts that were right. One that comes back early, or has not come back when the time is over,
was wrong, and its blocks have no forecast any more.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

from quire.core.terms import Hint
from quire.foresight.forecast import Credit, Forecast, Found, log
from quire.foresight.reentry import Record
from quire.heaps import LazyHeap
from quire.scope import Scope

LEAST_WITHIN = 1.1
"""No forecast is taken to be closer than by this factor."""

GIVEN = 4.0
"""So many right forecasts are taken for granted of every caller; of a session, as many of its caller's."""

BELIEVED = 0.25
"""Who is right less often is not believed: what it uses is ranked without forecast."""

MAX_CREDITS = 4096
"""So many sessions and callers are remembered, the ones that spoke latest."""


class Forecasts:
    """The forecasts of one manager: credits by caller and session, and the returns that are due.

    A caller is a scope: tenants, keys and models that share no blocks share no credit. `unmet` is told of a record whose
    time is over.
    """

    def __init__(self, unmet: Callable[[Record], None] = lambda _: None) -> None:
        self._unmet = unmet
        self._credits: dict[tuple[Scope, str | None], Credit] = {}
        self._kinds: dict[int, Found] = {}
        self._lasts = LazyHeap[tuple[float, int, Record]](_is_expected)
        self._tick = count().__next__

    @property
    def spoken(self) -> bool:
        """Whether any caller has given a forecast."""
        return bool(self._credits)

    def expect(self, record: Record, kind: int, scope: Scope, hint: Hint, now: float) -> None:
        """Note the end of a request of a kind, with its caller's forecast if any."""
        if hint.returns_in_s is None:
            record.silent = self.spoken and (scope, None) in self._credits
            return
        caller = self._credit(scope, None)
        of_caller = (caller.right + GIVEN) / (caller.seen + GIVEN)
        trust, noted = of_caller, (caller,)
        if hint.session_id is not None:
            session = self._credit(scope, hint.session_id)
            trust = (session.right + GIVEN * of_caller) / (session.seen + GIVEN)
            noted = caller, session
        within = max(hint.within, LEAST_WITHIN)
        first, last = hint.returns_in_s / within, hint.returns_in_s * within
        due = (last - first) / log(last / first)
        found = self._kinds.setdefault(kind, Found())
        times = now + first, now + due, now + last
        record.forecast = Forecast(*times, trust, noted, now, found, found.share)
        self._lasts.push((now + last, self._tick(), record))

    def found(self, record: Record, reached: int) -> None:
        """A prompt begins like that of a record, for so many blocks: those of it that are new in it."""
        forecast, stored = record.forecast, record.prompt - record.found
        if forecast is not None and reached > record.found:
            forecast.kind.found += min(reached - record.found, stored)
            forecast.kind.stored += stored

    def returned(self, record: Record, now: float) -> None:
        """Somebody has come back to a record."""
        forecast = record.forecast
        if forecast is not None:
            record.forecast = None
            for credit in forecast.credits:
                credit.note(right=forecast.first <= now <= forecast.last)

    def advance(self, now: float) -> None:
        """Give up the forecasts whose time is over."""
        while self._lasts.items and (head := self._lasts.first()) is not None and head[0] < now:
            self.returned(head[2], now)
            self._unmet(head[2])

    def _credit(self, scope: Scope, session: str | None) -> Credit:
        name = scope, session
        credit = self._credits.pop(name, None)
        if credit is None:
            credit = Credit()
            if len(self._credits) >= MAX_CREDITS:
                del self._credits[next(iter(self._credits))]
        self._credits[name] = credit  # behind all others
        return credit


def _is_expected(item: tuple[float, int, Record]) -> bool:
    forecast = item[2].forecast
    return forecast is not None and forecast.last == item[0]
