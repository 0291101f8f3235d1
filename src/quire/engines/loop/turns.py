"""Turns: an engine belongs to one thread at a time."""

from collections.abc import Callable
from functools import wraps
from threading import RLock
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from quire.errors import CacheBusy

P = ParamSpec("P")
R = TypeVar("R")


class HasTurn(Protocol):
    """What one thread uses at a time: who uses it holds `turn`."""

    turn: Any


Taker = TypeVar("Taker", bound=HasTurn)


def new_turn() -> Any:
    """Return a turn that nobody has."""
    return RLock()


def in_turn(method: Callable[Concatenate[Taker, P], R]) -> Callable[Concatenate[Taker, P], R]:
    """Have a method raise `CacheBusy` while another thread is in one, and change nothing then."""

    @wraps(method)
    def call(self: Taker, *given: P.args, **named: P.kwargs) -> R:
        if not self.turn.acquire(blocking=False):
            raise CacheBusy(
                "another thread uses this engine; ask through one AsyncEngine, or make an engine each"
            )
        try:
            return method(self, *given, **named)
        finally:
            self.turn.release()

    return call
