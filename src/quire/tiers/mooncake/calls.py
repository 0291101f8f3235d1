"""Native calls that may block for long, made on threads that can be left behind."""

from __future__ import annotations

import mmap
import queue
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TypeVar

import numpy as np

from quire.errors import TierError

Result = TypeVar("Result")
Register = Callable[[int, int], int]
"""(address, bytes) -> 0 where the memory may be read and written by the native library."""

LEFT = object()
"""Holds a caller whose call was left behind."""


class Caller:
    """A thread for native calls, and memory of its own that they read from and write to.

    What a call that was left behind still reads or writes is this memory, never its caller's.
    `holder`, under the lock of `Callers`: who has taken it, `LEFT` while a call hangs, None where it is free.
    """

    def __init__(self, changed: threading.Condition, register: Register) -> None:
        self._changed = changed
        self._register = register
        self.holder: object = None
        self.deadline = 0.0
        self.registered: dict[int, memoryview] = {}
        """By address. What was outgrown stays registered, so it must stay mapped; it is smaller."""
        self._jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[object] = queue.SimpleQueue()
        self.memory = memoryview(b"")
        self.address = 0
        threading.Thread(target=self._work, name="quire-mooncake", daemon=True).start()

    def reserve(self, num_bytes: int) -> None:
        """Make the memory at least so large. Raises `TierError` where the library refuses it."""
        if num_bytes > len(self.memory):
            memory = memoryview(mmap.mmap(-1, num_bytes))
            address = int(np.frombuffer(memory, np.uint8).ctypes.data)
            if code := self._register(address, num_bytes):
                raise TierError(f"Mooncake does not register {num_bytes} bytes: error {code}")
            self.registered[address] = memory
            self.memory, self.address = memory, address

    def call(self, job: Callable[[], Result]) -> Result:
        """Run a native call. Raises what it raises; at the deadline leaves it behind: `TimeoutError`."""
        self._jobs.put(job)
        try:
            answer = self._answers.get(timeout=max(0.0, self.deadline - time.monotonic()))
        except queue.Empty:
            with self._changed:
                if self._answers.empty():
                    self.holder = LEFT
                    self._changed.notify_all()
                    raise TimeoutError("Mooncake did not answer in time") from None
            answer = self._answers.get()
        if isinstance(answer, Exception):
            raise answer
        return answer  # pyright: ignore[reportReturnType] - what `job` returned

    def end(self) -> None:
        """End the thread."""
        self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                answer = job()
            except Exception as error:  # noqa: BLE001 - whatever it is, the caller gets it
                answer = error
            with self._changed:
                if self.holder is LEFT:
                    self.holder = None
                    self._changed.notify_all()
                else:
                    self._answers.put(answer)
            # What is over keeps nothing alive.
            del job, answer


class Callers:
    """`count` callers: at most so many calls run or hang, and where all hang, further ones fail at once."""

    def __init__(self, count: int, register: Register) -> None:
        self._changed = threading.Condition()
        self._is_closed = False
        self._all = [Caller(self._changed, register) for _ in range(count)]

    @property
    def num_hanging(self) -> int:
        """Calls that were left behind and have not ended."""
        return sum(caller.holder is LEFT for caller in self._all)

    @contextmanager
    def taken(self, timeout_s: float) -> Generator[Caller]:
        """Give a caller to this thread alone, for calls until then. Raises `TimeoutError` and `TierError`.

        One that was left behind is free again when its call ends.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not (free := [caller for caller in self._all if caller.holder is None]):
                self._check_open()
                if self.num_hanging == len(self._all):
                    raise TimeoutError(f"{self.num_hanging} calls hang: no further one is tried")
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError("all callers are busy")
            self._check_open()
            caller = free[0]
            holder = object()
            caller.holder, caller.deadline = holder, deadline
        try:
            yield caller
        finally:
            with self._changed:
                if caller.holder is holder:
                    caller.holder = None
                    self._changed.notify_all()

    def close(self, job: Callable[[list[Caller]], object], deadline: float) -> None:
        """Take no further calls; when none runs any more, run a last job and end the threads.

        Returns at the deadline at the latest. Where calls hang then, the job runs when they end: until then their memory stays.
        """
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        ended = threading.Event()

        def last() -> None:
            with self._changed:
                while any(caller.holder is not None for caller in self._all):
                    self._changed.wait()
            job(self._all)
            for caller in self._all:
                caller.end()
            ended.set()

        threading.Thread(target=last, name="quire-mooncake-close", daemon=True).start()
        ended.wait(max(0.0, deadline - time.monotonic()))

    def _check_open(self) -> None:
        if self._is_closed:
            raise TierError("the tier is closed")
