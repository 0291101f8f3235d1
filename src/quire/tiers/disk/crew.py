"""A few threads that help a call with its reads or writes, so that a device has several at once."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable

from quire.tiers.threads import Bell, start

_CLOSE_S = 10.0
"""The longest that each thread is waited for at the end: it has nothing to do then."""


class Crew:
    """Does numbered work in the calling thread and in up to `helpers` more.

    Threads begin with the first call that needs them. A call that a signal cuts off holds no lock of theirs (`tiers.threads`).
    """

    def __init__(self, helpers: int, name: str) -> None:
        self.helpers = helpers
        self._name = name
        self._lock = threading.Lock()
        self._bell = Bell()
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        """Calls to help; None ends a thread."""
        self._threads: list[threading.Thread] = []

    def each(self, count: int, work: Callable[[int], None], helpers: int) -> None:
        """Call `work` with 0 to `count` - 1, begun in that order, on this thread and `helpers` others.

        It returns when all is done. If a call is cut off, none is under way any more either.
        """
        call = _Call(count, work, self._bell)
        try:
            try:
                self._ask(call, min(helpers, self.helpers, count - 1))
                call.share()
            finally:
                call.end()
        finally:
            call.end()  # once more: a signal may cut the first one off
        if call.errors:
            error = call.errors[0]
            call.errors.clear()
            try:
                raise error
            finally:
                del error  # or its frames would keep each other, and all buffers

    def close(self) -> None:
        """End the threads."""
        for _ in self._threads:
            self._calls.put(None)
        for thread in self._threads:
            if thread.is_alive():  # and not one that a signal kept from beginning
                thread.join(_CLOSE_S)

    def _ask(self, call: _Call, helpers: int) -> None:
        """Have so many threads help with a call, as far as they can be had."""
        with self._lock:
            while len(self._threads) < helpers:
                thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._threads.append(thread)
                try:
                    start(thread)
                except RuntimeError:  # the system has no thread left
                    self._threads.remove(thread)
                    break
        for _ in range(helpers):
            self._calls.put(call)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call.help()
            del call  # what is over keeps nothing alive


class _Call:
    """The numbers of a call that nobody has taken, and the threads that help with it.

    `errors`  what helpers raised
    """

    def __init__(self, count: int, work: Callable[[int], None], bell: Bell) -> None:
        self._numbers = iter(
            range(count)
        )  # handing out the next one is one step of the interpreter
        self._work, self._bell = work, bell
        self._helping: deque[object] = deque()
        self.errors: deque[BaseException] = deque()

    def share(self) -> None:
        """Do what nobody has taken, one after the other."""
        for number in self._numbers:
            self._work(number)

    def help(self) -> None:
        """Do so on the thread of a helper."""
        share = object()
        self._helping.append(share)  # before it takes any
        try:
            self.share()
        except BaseException as error:  # noqa: BLE001 - whatever it is, the caller gets it
            self.errors.append(error)
        finally:
            self._helping.remove(share)
            self._bell.ring()

    def end(self) -> None:
        """Let nobody take a further number, and wait for those that were taken. Twice does nothing."""
        deque(self._numbers, maxlen=0)
        self._bell.wait_for(lambda: not self._helping, float("inf"))
