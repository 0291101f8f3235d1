"""Native calls that may block for long, made on threads that can be left behind."""

from __future__ import annotations

import mmap
import queue
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np

from quire.errors import TierError

Result = TypeVar("Result")
Register = Callable[[int, int], int]
"""(address, bytes) -> 0 where the memory may be read and written by the native library."""


class Caller:
    """A thread for native calls, and memory of its own that they read from and write to.

    What a call that was left behind still reads or writes is this memory, never its caller's.
    `running` is the last call, done or not; whoever waits for it waits until `deadline`, of `time.monotonic`.
    """

    def __init__(self, register: Register) -> None:
        self._register = register
        self.deadline = 0.0
        self.is_taken = False
        self.running: Future[Any] = Future()
        self.running.set_result(None)
        self.registered: dict[int, memoryview] = {}
        """By address. What was outgrown stays registered, so it must stay mapped; it is smaller."""
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], object]] | None]
        self._jobs = queue.SimpleQueue()
        self.memory = memoryview(b"")
        self.address = 0
        threading.Thread(target=self._work, name="quire-mooncake", daemon=True).start()

    @property
    def is_left(self) -> bool:
        """Whether nobody waits for its call any more, which still runs."""
        return not self.is_taken and not self.running.done()

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
        """Run a native call. Raises what it raises, and `TimeoutError` at the deadline: then it is left behind."""
        answer: Future[Result] = Future()
        self.running = answer
        self._jobs.put((answer, job))
        return answer.result(max(0.0, self.deadline - time.monotonic()))

    def end(self) -> None:
        """End the thread."""
        self._jobs.put(None)

    def _work(self) -> None:
        while (given := self._jobs.get()) is not None:
            answer, job = given
            try:
                answer.set_result(job())
            except Exception as error:  # noqa: BLE001 - whatever it is, the caller gets it
                answer.set_exception(error)
            # What is over keeps nothing alive.
            del given, answer, job


class Callers:
    """`count` callers: at most so many calls run or hang, and where all hang, further ones fail at once."""

    def __init__(self, count: int, register: Register) -> None:
        self._is_closed = False
        self._all = [Caller(register) for _ in range(count)]
        self._free: queue.LifoQueue[Caller] = queue.LifoQueue()
        for caller in self._all:
            self._free.put(caller)

    @property
    def num_hanging(self) -> int:
        """Calls that were left behind and have not ended."""
        return sum(caller.is_left for caller in self._all)

    @contextmanager
    def taken(self, timeout_s: float) -> Generator[Caller]:
        """Give a caller to this thread alone, for calls until then. Raises `TimeoutError` and `TierError`.

        One that was left behind is free again when its call ends.
        """
        deadline = time.monotonic() + timeout_s
        self._check_open()
        if self.num_hanging == len(self._all):
            raise TimeoutError(f"{self.num_hanging} calls hang: no further one is tried")
        try:
            caller = self._free.get(timeout=max(0.0, timeout_s))
        except queue.Empty:
            raise TimeoutError("all callers are busy") from None
        caller.is_taken, caller.deadline = True, deadline
        try:
            self._check_open()
            yield caller
        finally:
            caller.is_taken = False
            caller.running.add_done_callback(lambda _: self._free.put(caller))

    def close(self, job: Callable[[list[Caller]], object], deadline: float) -> None:
        """Take no further calls; when none runs any more, run a last job and end the threads.

        Returns at the deadline at the latest. Where calls hang then, the job runs when they end: until then their memory stays.
        """
        self._is_closed = True

        def last() -> None:
            for _ in self._all:
                self._free.get()
            job(self._all)
            for caller in self._all:
                caller.end()

        closing = threading.Thread(target=last, name="quire-mooncake-close", daemon=True)
        closing.start()
        closing.join(max(0.0, deadline - time.monotonic()))

    def _check_open(self) -> None:
        if self._is_closed:
            raise TierError("the tier is closed")
