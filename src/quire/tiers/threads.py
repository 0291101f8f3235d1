"""Threads: waiting, and work in the background, that the exception of a signal may cut off between any two bytecodes.

`threading.Condition`, and what is made of it (`Semaphore`, `Event`, `queue.Queue`, `Future`), takes and returns its lock in
functions of Python. An exception in one of them leaves the lock held for ever. `Bell` and `Permits` hold a lock only in a `with`
statement on `threading.Lock`, which no signal can cut in two.
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TypeVar
from weakref import ref

from quire.interrupts import interrupt_in

AGAIN_S, MOST_AGAIN_S = 0.05, 1.0
"""The time between two looks of a waiting thread, at first and at most: a thread that was cut off rings no bell."""

Result = TypeVar("Result")


class Bell:
    """Threads that wait for a change; `ring` lets them look again."""

    def __init__(self) -> None:
        self._gates: deque[threading.Lock] = deque()
        """Locks that are held, each by a thread that waits until it is released."""

    def wait_for(self, is_so: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until `is_so()`; return whether it came to be in time."""
        if is_so():
            return True
        deadline = time.monotonic() + timeout_s
        gate = threading.Lock()
        gate.acquire()
        is_listed = False
        pause_s = AGAIN_S
        try:
            while True:
                if not is_listed:
                    self._gates.append(gate)
                    is_listed = True
                if is_so():  # it may have changed before the gate was listed
                    return True
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    return False
                if gate.acquire(timeout=min(left_s, pause_s)):
                    is_listed = False
                else:
                    pause_s = min(2 * pause_s, MOST_AGAIN_S)
        finally:
            with suppress(ValueError):
                self._gates.remove(gate)

    def ring(self, count: int | None = None) -> None:
        """Let all waiting threads look again, or so many of those that wait longest."""
        with suppress(IndexError):
            for _ in range(len(self._gates) if count is None else count):
                self._gates.popleft().release()


class Signal:
    """A flag that threads wait for: `threading.Event` without a lock that a signal may leave held."""

    def __init__(self) -> None:
        self._is_set = False
        self._bell = Bell()

    def is_set(self) -> bool:
        """Return whether it is set."""
        return self._is_set

    def set(self) -> None:
        """Let all go on who wait for it, now and later."""
        self._is_set = True
        self._bell.ring()

    def clear(self) -> None:
        """Have those wait who come later."""
        self._is_set = False

    def wait(self, timeout_s: float | None = None) -> bool:
        """Return whether it is set, now or within so long."""
        return self._bell.wait_for(self.is_set, float("inf") if timeout_s is None else timeout_s)


class Permit:
    """The right of one call to a resource. It ends with `is_over`, or when no frame refers to it."""

    is_over = False


class Permits:
    """Permits of which at most `limit` hold at a time; further threads wait.

    A call takes one as follows. No signal is handled between an exception and the first assignment of `finally`:

        permit = Permit()
        try:
            if permits.take(permit, timeout_s): ...
        finally:
            permit.is_over = True
            permits.ended()
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._taken: list[ref[Permit]] = []
        self._bell = Bell()

    @property
    def num_taken(self) -> int:
        """Permits that are not over."""
        return sum(map(is_on, self._taken))

    def take(self, permit: Permit, timeout_s: float) -> bool:
        """Make a permit hold; return whether there was one in time."""

        def has_one() -> bool:
            with self._lock:
                if len(self._taken) >= self._limit:
                    self._taken = list(filter(is_on, self._taken))
                if len(self._taken) < self._limit:
                    self._taken.append(ref(permit))
                    return True
                return False

        return self._bell.wait_for(has_one, timeout_s)

    def ended(self) -> None:
        """Let the next thread look: a permit is over."""
        self._bell.ring(1)


class TimedLock:
    """A lock that is waited for no longer than a timeout, and that no signal leaves held. Not reentrant."""

    def __init__(self) -> None:
        self._permits = Permits(1)

    def run(self, work: Callable[[], Result], timeout_s: float = float("inf")) -> Result:
        """Return the result of `work`, run under the lock. Raises `TimeoutError`."""
        permit = Permit()
        try:
            if not self._permits.take(permit, timeout_s):
                raise TimeoutError
            return work()
        finally:
            permit.is_over = True
            self._permits.ended()


class Background:
    """Runs `chore` again and again in a thread of its own until it returns False.

    It is one piece of work of a few milliseconds, so that `stop` does not take long.
    """

    def __init__(self, chore: Callable[[], bool], name: str) -> None:
        self._chore = chore
        self._name = name
        self._lock = threading.Lock()
        self._ended = Bell()
        self._thread: threading.Thread | None = None
        self._is_awake = False
        self._is_stopped = False

    def wake(self) -> None:
        """Say that there may be something to do."""
        with self._lock:
            self._is_awake = True
            if self._is_running() or self._is_stopped:
                return
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            with suppress(RuntimeError):  # the system has none left: the next time, maybe
                start(self._thread)

    def settle(self, timeout_s: float) -> bool:
        """Wait until nothing is left to do; return whether that came to be in time."""
        return self._ended.wait_for(lambda: not self._is_running(), timeout_s)

    def stop(self) -> None:
        """Begin nothing more, and return when the piece of work at hand is done."""
        self._is_stopped = True
        self._ended.wait_for(lambda: not self._is_running(), float("inf"))

    def _is_running(self) -> bool:
        """Whether there is a thread: one that a signal kept from beginning is none."""
        thread = self._thread
        return thread is not None and thread.is_alive()

    def _run(self) -> None:
        try:
            while self._goes_on():
                while not self._is_stopped and self._chore():
                    pass
        except BaseException:
            with self._lock:
                self._end()
            raise

    def _goes_on(self) -> bool:
        with self._lock:
            is_own = self._thread is threading.current_thread()  # and not one that began too late
            if is_own and self._is_awake and not self._is_stopped:
                self._is_awake = False
                return True
            self._end()
            return False

    def _end(self) -> None:
        """Say that this thread does nothing more. The lock is held."""
        if self._thread is threading.current_thread():
            self._thread = None
        self._ended.ring()


class BusyKeys(dict[bytes, Signal | None]):
    """Keys that one thread each writes, or tells that they go, from `begin` to `end`. Not thread-safe: its owner locks."""

    def begin(self, keys: Iterable[bytes]) -> None:
        """Say that it begins for these keys."""
        self.update(dict.fromkeys(keys))

    def ended(self, key: bytes) -> Signal:
        """Return what is set when it has ended for a key, whether it is there then or not."""
        ended = self[key] = self[key] or Signal()
        return ended

    def end(self, keys: Iterable[bytes]) -> None:
        """Let those go on who wait for keys."""
        for key in keys:
            if ended := self.get(key):
                ended.set()  # first: a signal may come right behind `pop`
            self.pop(key, None)

    def end_all(self) -> None:
        """Let all go on who wait."""
        self.end(list(self))


def wait_for(ended: Sequence[Signal], timeout_s: float) -> None:
    """Wait until all are set, so long at most."""
    deadline = time.monotonic() + timeout_s
    for each in ended:
        each.wait(max(0.0, deadline - time.monotonic()))


_LAST: list[Callable[[], object]] = []


@atexit.register  # before the modules that close tiers at the end, so it runs behind them
def _end() -> None:
    for call in _LAST:
        call()


def last_at_exit(call: Callable[[], object]) -> None:
    """Have a function called when the process ends, behind all that closes tiers; once, however often it is given."""
    if call not in _LAST:
        _LAST.append(call)


def start(thread: threading.Thread) -> None:
    """Start a thread. Raises `RuntimeError` where the system has none left.

    An interrupt of the wait for its beginning is raised as such: `threading` may make a `RuntimeError` of it.
    """
    handled = sys.exc_info()[1]
    try:
        thread.start()
    except RuntimeError as error:
        if interrupt := interrupt_in(error, handled):
            raise interrupt from None
        raise


def is_on(permit: ref[Permit] | None) -> bool:
    """Return whether a permit is not over."""
    held = permit() if permit is not None else None
    return held is not None and not held.is_over
