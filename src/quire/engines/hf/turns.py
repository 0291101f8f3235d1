"""One thread at a time in a cache or an engine, seen to; and none where a call was cut off half-way."""

import functools
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, ParamSpec, Self, TypeVar, cast

from quire.errors import CacheBusy, Interrupted, InvariantError, QuireError

P = ParamSpec("P")
R = TypeVar("R")


class Turn:
    """Whose turn it is to use a cache or an engine: one thread's at a time, which may come in again from within.

        with turn: ...                  a call
        with turn, turn.lending(): ...  a session: between its ends the thread is outside, and may call

    A thread that comes in while another is inside, or has lent something out, is turned away. What was
    lent may be given back by any thread: that waits for the call that runs, and needs no turn.

    `cut_off`  what was cut off half-way (`undivided`), and by what: then nobody comes in until it is emptied again
    """

    cut_off = ""

    def __init__(self, what: str = "cache") -> None:
        self._what = what
        self._changed = threading.Condition()
        self._inside: threading.Thread | None = None
        self._depth = 0
        self._lenders: list[threading.Thread] = []

    def __enter__(self) -> Self:
        self._admit()
        if self.cut_off:
            self.__exit__()
            raise Interrupted(
                f"{self.cut_off}: what this {self._what} holds is not to be relied on; call reset(), which "
                "ends all requests and empties the cache, and ask again"
            )
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._depth -= 1
            if not self._depth:
                self._inside = None
                self._changed.notify()

    @contextmanager
    def mending(self) -> Generator[None, None, None]:
        """Come in also after a call that was cut off, and do away with what it left; half of that is a cut as well."""
        self._admit()
        try:
            self.cut_off = "a reset was cut off half-way"
            yield
            self.cut_off = ""
        finally:
            self.__exit__()

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

    def _admit(self) -> None:
        """Come in, or raise `CacheBusy`."""
        if (other := self._come_in()) is not None:
            lent = " or has a session open" if other in self._lenders else ""
            raise CacheBusy(
                f"thread {other.name!r} is using this {self._what}{lent}, and one thread does at a time: "
                f"make calls one after the other, or one {self._what} for each thread (over one model)"
            )

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


def undivided(
    refusals: type[Exception] = QuireError,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a method of an object with a `_turn` one that ends all turns when it is cut off half-way.

    `refusals`  what it raises before it has changed anything
    """

    def undivided_one(method: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(method)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return method(*args, **kwargs)
            except BaseException as error:
                if not isinstance(error, refusals) or isinstance(error, InvariantError):
                    turn = cast("Any", args[0])._turn  # noqa: SLF001 - the method's own object
                    turn.cut_off = f"a call was cut off half-way by {type(error).__name__}"
                raise

        return call

    return undivided_one
