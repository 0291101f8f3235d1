"""Guard of a cache or an engine: one thread at a time uses it, and none after a cut-off call."""

import functools
import threading
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from time import monotonic
from typing import Any, NoReturn, ParamSpec, Self, TypeVar, cast

from quire.errors import CacheBusy, ConfigError, Interrupted

P = ParamSpec("P")
R = TypeVar("R")


class ThreadGuard:
    """Lock of a cache or an engine: one thread at a time holds it, and may enter again.

        with guard: ...                  a call
        with guard, guard.lending(): ...  a session: between its ends the thread is outside, and may call

    A thread that enters while another is inside, or has lent something out, waits up to `wait_s` seconds, in the
    order of arrival; then `CacheBusy` is raised. A thread that is inside, or has lent something
    out, enters again at once. Any thread may give back what was lent: that waits for the running call,
    and needs no turn.

    Ctrl-C may come at any call, and where a function begins: the turn is then free for others, also on the way out. A
    lock of C, unlike a `Condition`, is taken and given back by `with` without such a place.

    `cut_off`      the call that was cut off (`undivided`), and its cause: nobody enters until the object is emptied
    `is_stepping`  whether an undivided call is under way, from within which code of the caller's may run
    """

    cut_off = ""
    is_stepping = False

    def __init__(self, what: str = "cache", wait_s: object = None) -> None:
        self._what = what
        self._wait_s = _seconds(wait_s)
        # Who waits, and until when: a place that Ctrl-C left behind is none after that.
        self._queue: deque[tuple[threading.Thread, float]] = deque()
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._inside = threading.current_thread()  # where `_depth` is not 0
        self._depth = 0
        self._lenders: dict[object, threading.Thread] = {}

    def __enter__(self) -> Self:
        depth = self.own_depth()
        try:
            if (other := self._come_in(self._wait_s)) is not None:
                self._refuse(other)
            if self.cut_off:
                self._refuse_cut_off()
            return self  # noqa: TRY300 - in an `else`, Ctrl-C before it would leave the thread inside
        except BaseException:  # also Ctrl-C on the way in
            self.leave_to(depth)
            raise

    def __exit__(self, *_: object) -> None:
        with self._lock:
            is_inside = True
            try:
                # Not so for a thread that Ctrl-C has kept from taking back what it lent.
                is_inside = self._inside is threading.current_thread()
                self._changed.notify_all()
            finally:
                if is_inside and self._depth:
                    self._depth -= 1

    def own_depth(self) -> int:
        """Return how often this thread is inside."""
        return self._depth if self._inside is threading.current_thread() else 0

    def leave_to(self, depth: int) -> None:
        """Leave until this thread is inside so often: after Ctrl-C where `__exit__` begins, which nothing else sees."""
        while self.own_depth() > depth:
            self.__exit__()

    @contextmanager
    def mending(self) -> Generator[None, None, None]:
        """Enter after an interrupted call to reset state; a second interrupt leaves the object barred."""
        depth = self.own_depth()
        try:
            if (other := self._come_in(self._wait_s)) is not None:
                self._refuse(other)
            self.cut_off = "a reset was cut off half-way"
            yield
            self.cut_off = ""
            self.leave_to(depth)
        except BaseException:  # also Ctrl-C on the way out
            self.leave_to(depth)
            raise

    @contextmanager
    def if_free(self) -> Generator[bool, None, None]:
        """Come in unless that would turn the thread away; say whether it has."""
        depth = self.own_depth()
        try:
            yield self._come_in() is None
            self.leave_to(depth)
        except BaseException:  # also Ctrl-C on the way out
            self.leave_to(depth)
            raise

    @contextmanager
    def lending(self) -> Generator[None, None, None]:
        """Be outside until the end of the block, where this thread or another comes in again."""
        lender, loan = threading.current_thread(), object()
        try:
            with self._lock:
                # Both or none: there is no call between the two.
                self._depth -= 1
                self._lenders[loan] = lender
                self._changed.notify_all()
            yield
        finally:
            with self._lock:
                me = lender
                try:
                    me = threading.current_thread()
                    self._changed.wait_for(lambda: not self._depth or self._inside is me)
                finally:  # after Ctrl-C while another is inside, this thread is not: what it lent is given back
                    if loan in self._lenders:
                        del self._lenders[loan]
                        if not self._depth or self._inside is me:
                            self._inside = me
                            self._depth += 1

    def _refuse_cut_off(self) -> NoReturn:
        raise Interrupted(
            f"{self.cut_off}: what this {self._what} holds is not to be relied on; call reset(), which "
            "ends all requests and empties the cache, and ask again"
        )

    def _refuse(self, other: threading.Thread) -> NoReturn:
        lent = " or has a session open" if other in self._lenders.values() else ""
        waited = f", also after {self._wait_s:g} s" if self._wait_s else ""
        wait = (
            ""
            if self._what == "engine" or self._wait_s
            else ", or give it wait_s seconds to wait for its turn"
        )
        raise CacheBusy(
            f"thread {other.name!r} is using this {self._what}{lent}{waited}, and one thread does at a time: "
            f"make calls one after the other, or one {self._what} for each thread (over one model){wait}"
        )

    def _come_in(self, wait_s: float = 0.0) -> threading.Thread | None:
        """Come in, or return the thread that is in the way also after so many seconds."""
        me = threading.current_thread()
        with self._lock:
            other = self._before(me)
            if other is not None and wait_s:
                other = self._waited(me, wait_s)
            if other is None:
                self._inside = me
                self._depth += 1
                self.is_stepping &= self._depth > 1  # what Ctrl-C on the way out has left
        return other

    def _waited(self, me: threading.Thread, wait_s: float) -> threading.Thread | None:
        """Wait for this thread's turn; return the thread that is in the way also then."""
        place = me, monotonic() + wait_s
        try:
            self._queue.append(place)
            self._changed.wait_for(lambda: self._before(me) is None, wait_s)
            return self._before(me)
        finally:  # also after Ctrl-C: those behind go on
            if place in self._queue:
                self._queue.remove(place)
            self._changed.notify_all()

    def _before(self, me: threading.Thread) -> threading.Thread | None:
        """Return a thread that is inside, has lent something out or came earlier; None: it is this one's turn."""
        if not self._lenders and not self._queue:  # as a rule
            return self._inside if self._depth and self._inside is not me else None
        held = [*([self._inside] if self._depth else []), *self._lenders.values()]
        # Who is inside comes in again, whoever waits; else the one that has waited longest is next.
        now = monotonic()
        ahead = held or [thread for thread, until in self._queue if until > now][:1]
        return next((each for each in ahead if each is not me), None)


def _seconds(wait_s: object) -> float:
    """Return the seconds that a thread waits for its guard, None being 0. Raises `ConfigError`."""
    if wait_s is None:
        return 0.0
    if isinstance(wait_s, int | float) and not isinstance(wait_s, bool):
        seconds = float(wait_s)
        if 0 <= seconds <= threading.TIMEOUT_MAX:
            return seconds
    raise ConfigError(
        f"wait_s is {wait_s!r}; it is the seconds that a call waits for another thread's, from 0 to "
        f"{threading.TIMEOUT_MAX:.0f}, or None: not at all"
    )


def guarded(method: Callable[P, R]) -> Callable[P, R]:
    """Make a method of an object with a `_guard` one that takes it."""

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        guard: ThreadGuard = cast("Any", args[0])._guard  # noqa: SLF001 - the method's own object
        depth = guard.own_depth()
        try:
            with guard:
                return method(*args, **kwargs)
        except BaseException:  # also Ctrl-C on the way out
            guard.leave_to(depth)
            raise

    return call


def undivided(
    refusals: type[Exception] | tuple[()] = (),
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a method of an object with a `_guard` one behind whose exceptions nobody enters until a reset.

    `refusals`  what it raises before it has changed anything
    """

    def undivided_one(method: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(method)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            guard: ThreadGuard = cast("Any", args[0])._guard  # noqa: SLF001 - the method's own object
            outer = guard.is_stepping
            try:
                guard.is_stepping = True
                return method(*args, **kwargs)
            except refusals:
                raise
            except BaseException as error:
                guard.cut_off = f"a call was cut off half-way by {type(error).__name__}"
                raise
            finally:
                guard.is_stepping = outer

        return call

    return undivided_one
