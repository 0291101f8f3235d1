"""Hints made from a trace: the knowledge that its callers had.

A first pass over the trace looks at the future; the replay is then told what a caller could
have said at that moment. What such hints are worth is a bound for those that real callers give.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TypeAlias

import msgspec
import numpy as np

from quire.core.terms import MAX_WITHIN, NO_HINT, Hint
from quire.errors import ConfigError
from quire_sim.columns import Column
from quire_sim.names import unknown
from quire_sim.returns import blind_returns, returns, wrong_returns
from quire_sim.trace.rows import Trace, TraceRequest, end_id

NOBODY = -1

ALL = 1 << 62
"""More blocks than a prompt has."""

MAX_TURNS = 64
"""Blocks that more requests than these use are taken for a system prompt, not for a session's."""


class Advice(msgspec.Struct, frozen=True):
    """The hints of one request.

    `hint`           with it, it is opened
    `stored_blocks`  so many blocks of its prompt may be kept, the others are not stored
    `ends`           the session that is over when it closes
    """

    hint: Hint = NO_HINT
    stored_blocks: int = ALL
    ends: str | None = None


NOTHING, NEVER = Advice(), Advice(Hint("never"))

Foresight: TypeAlias = Callable[[int], Advice]
"""Gives what is said of a request, by its number in the trace, from 0."""


def foresee(trace: Trace, kind: str) -> Foresight:
    """Return the advice on each request of a trace, of one of `KINDS`, else `ConfigError`.

    none         nothing; the others read the trace once
    recorded     the hints that stand in the trace
    never        `Hint("never")` of requests whose new blocks nobody uses again
    no-store     `store_until` before the blocks that one request alone uses, in all
                 the trace
    session-end  whose turn a request is, and after the last turn that the session is over. Where
                 the trace names no sessions, a request belongs to the one that stored the
                 deepest block of its prompt, unless more than `MAX_TURNS` requests use that
    last-use     no-store and session-end together
    return-time  when each request is gone on from, and "never" where it is not; where the trace names sessions,
                 also whose turn it is, and their ends in place of "never". `return-time:2` is wrong by
                 up to a factor of 2, and says so
    return-time-wrong    each forecast 10 times too long or too short, and said to be right within 2
    return-time-blind    as return-time; what nobody returns to is forecast like the rest
    """
    name, noise = _parts_of(kind)
    if name in TIMED:
        hints = TIMED[name](trace, noise)
        if name == "return-time":
            uses = _Uses(trace)
            if uses.names_sessions:
                return lambda number: uses.returning(number, hints[number])
        return lambda number: Advice(hints[number])
    return KINDS[name](trace)


def check_kind(kind: str) -> None:
    """Raise `ConfigError` unless this is one of `KINDS`, or of `TIMED` with the factor of its noise."""
    _parts_of(kind)


def _parts_of(kind: str) -> tuple[str, float]:
    """Return the name of a kind and the factor of its noise, 1 for none."""
    name, colon, factor = kind.partition(":")
    if name not in TIMED and kind not in KINDS:
        raise unknown("hints", name, (*KINDS, *TIMED))
    try:
        noise = float(factor) if colon else 1.0
    except ValueError:
        noise = 0.0
    if not 1 <= noise <= MAX_WITHIN:
        raise ConfigError(
            f"the noise of a forecast is a factor from 1 to {MAX_WITHIN:g}, as in {name}:2; got {factor!r}"
        )
    return name, noise


def _recorded(trace: Trace) -> Foresight:
    hints = [request.hint or NO_HINT for request in trace]
    return lambda number: Advice(hints[number])


class _Uses:
    """The users of each block of a trace: eight bytes per distinct block, and a row per request.

    Ids are numbered by first appearance: what is new in a request is the end of its chain, and
    its ids are the next ones.
    """

    def __init__(self, trace: Trace) -> None:
        self._last = Column(NOBODY, np.int32)
        self._uses = Column(0, np.int32)
        self._num_blocks: list[int] = []
        self._first_new: list[int] = []
        self._deepest_seen: list[int] = []
        self._sessions: list[str | None] = []
        self._rows: list[int] = []
        for number, request in enumerate(trace):
            self._see(number, request)
        self._end = self._first_new[-1] if self._first_new else 0

    def _see(self, number: int, request: TraceRequest) -> None:
        first_new = self._first_new[-1] if number else 0
        num_blocks, deepest_seen = 0, NOBODY
        for first, length in request.runs.tolist():
            end = first + length
            self._last.upto(end)[first:end] = number
            self._uses.upto(end)[first:end] += 1
            num_blocks += length
            if first < first_new:
                deepest_seen = min(end, first_new) - 1
        if not number:
            self._first_new.append(0)
        self._num_blocks.append(num_blocks)
        self._deepest_seen.append(deepest_seen)
        self._first_new.append(max(first_new, end_id(request)))
        self._sessions.append(request.session)
        self._rows.append(request.row)

    def never(self, number: int) -> Advice:
        """Say never where a request has new blocks, and no later one uses any of them."""
        new = self.new_ids(number)
        gone = new.start < new.stop and self._last.values[new.start] == number
        return NEVER if gone else NOTHING

    def no_store(self, number: int) -> Advice:
        """Leave out the blocks at the end of a prompt that no other request uses."""
        new = self._uses.values[self.new_ids(number)]
        alone = len(new) - int(np.count_nonzero(new > 1))
        return Advice(stored_blocks=self._num_blocks[number] - alone)

    def session_end(self, number: int) -> Advice:
        """Say whose turn a request is, and after the last one that the session is over."""
        names, last = self._turns
        name = names[number]
        return Advice(Hint(session_id=name), ends=name if last[name] == number else None)

    def last_use(self, number: int) -> Advice:
        """Say both."""
        said = self.session_end(number)
        return Advice(said.hint, self.no_store(number).stored_blocks, said.ends)

    @property
    def names_sessions(self) -> bool:
        """Whether the trace says whose turns its requests are."""
        return any(name is not None for name in self._sessions)

    def returning(self, number: int, hint: Hint) -> Advice:
        """Say when the session returns, and after its last turn that it is over.

        "Never" would take the turns before, which the request found, out of their session, and its end would
        then free none of them.
        """
        said = self.session_end(number)
        if said.ends is not None:
            return said
        return Advice(
            msgspec.structs.replace(hint, reuse="unknown", session_id=said.hint.session_id)
        )

    def new_ids(self, number: int) -> slice:
        """The ids that a request is the first to use."""
        return slice(self._first_new[number], self._first_new[number + 1])

    @cached_property
    def _turns(self) -> tuple[list[str], dict[str, int]]:
        """The session of each request, and the last request of each session."""
        names = self.sessions()
        return names, {name: number for number, name in enumerate(names)}

    def sessions(self) -> list[str]:
        """Return the session of each request."""
        names: list[str] = []
        owner = np.full(self._end, NOBODY, dtype=np.int32)
        for number, (recorded, deepest) in enumerate(
            zip(self._sessions, self._deepest_seen, strict=True)
        ):
            if recorded is not None:
                names.append(recorded)
            elif deepest != NOBODY and self._uses.values[deepest] <= MAX_TURNS:
                names.append(names[int(owner[deepest])])
            else:
                names.append(f"row {self._rows[number]}")
            owner[self.new_ids(number)] = number
        return names


KINDS: dict[str, Callable[[Trace], Foresight]] = {
    "none": lambda _: lambda _: NOTHING,
    "recorded": _recorded,
    "never": lambda trace: _Uses(trace).never,
    "no-store": lambda trace: _Uses(trace).no_store,
    "session-end": lambda trace: _Uses(trace).session_end,
    "last-use": lambda trace: _Uses(trace).last_use,
}
"""Kinds of hints, by the name they are asked for with."""

TIMED: dict[str, Callable[[Trace, float], list[Hint]]] = {
    "return-time": returns,
    "return-time-wrong": wrong_returns,
    "return-time-blind": blind_returns,
}
"""Kinds that say when somebody returns; a factor of noise may stand behind a colon."""
