"""One thread at a time in a cache or an engine, seen to."""

import functools
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, ParamSpec, Self, TypeVar, cast

from quire.errors import CacheBusy

P = ParamSpec("P")
R = TypeVar("R")


class Turn:
    """Whose turn it is to use a cache or an engine: one thread's at a time, which may come in again from within.

        with turn: ...                  a call
        with turn, turn.lending(): ...  a session: between its ends the thread is outside, and may call

    A thread that comes in while another is inside, or has lent something out, is turned away. What was
    lent may be given back by any thread: that waits for the call that runs, and needs no turn.
    """

    def __init__(self, what: str = "cache") -> None:
        self._what = what
        self._changed = threading.Condition()
        self._inside: threading.Thread | None = None
        self._depth = 0
        self._lenders: list[threading.Thread] = []

    def __enter__(self) -> Self:
        if (other := self._come_in()) is not None:
            lent = " or has a session open" if other in self._lenders else ""
            raise CacheBusy(
                f"thread {other.name!r} is using this {self._what}{lent}, and one thread does at a time: "
                f"make calls one after the other, or one {self._what} for each thread (over one model)"
            )
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._depth -= 1
            if not self._depth:
                self._inside = None
                self._changed.notify()

    @contextmanager
    def if_free(self) -> Generator[bool, None, None]:
        """Come in unless that would turn the thread away; say whether it has."""
        if self._come_in() is not None:
            yield False
            return
        try:
            yield True
        finally:
            self.__exit__()

    @contextmanager
    def lending(self) -> Generator[None, None, None]:
        """Be outside until the end of the block, where this thread or another comes in again."""
        lender = threading.current_thread()
        with self._changed:
            self._lenders.append(lender)
        self.__exit__()
        try:
            yield
        finally:
            me = threading.current_thread()
            with self._changed:
                self._changed.wait_for(lambda: self._inside in (None, me))
                self._inside = me
                self._depth += 1
                self._lenders.remove(lender)

    def _come_in(self) -> threading.Thread | None:
        """Come in, or return the thread that is in the way."""
        me = threading.current_thread()
        with self._changed:
            for other in (self._inside, *self._lenders):
                if other not in (None, me):
                    return other
            self._inside = me
            self._depth += 1
        return None


def in_turn(method: Callable[P, R]) -> Callable[P, R]:
    """Make a method of an object with a `_turn` one that takes it."""

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with cast("Any", args[0])._turn:  # noqa: SLF001 - the method's own object
            return method(*args, **kwargs)

    return call
