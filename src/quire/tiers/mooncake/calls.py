"""Native calls that may block for long, made on threads that can be left behind."""

from __future__ import annotations

import mmap
import queue
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from quire.errors import TierError

Result = TypeVar("Result")
Register = Callable[[int, int], int]
"""(address, bytes) -> 0 where the memory may be read and written by the native library."""


class Caller:
    """A thread for native calls, and memory of its own that they read from and write to.

    What a call that was left behind still reads or writes is this memory, never its caller's.
    """

    def __init__(self, finished: Callable[[Caller, object], None], register: Register) -> None:
        self._finished = finished
        self._register = register
        self.registered: dict[int, memoryview] = {}
        """By address. What was outgrown stays registered, so it must stay mapped; it is smaller."""
        self._jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self.answers: queue.SimpleQueue[object] = queue.SimpleQueue()
        self.memory = memoryview(b"")
        self.address = 0
        self.thread = threading.Thread(target=self._work, name="quire-mooncake", daemon=True)
        self.thread.start()

    def reserve(self, num_bytes: int) -> None:
        """Make the memory at least so large. Raises `TierError` where the library refuses it."""
        if num_bytes > len(self.memory):
            memory = memoryview(mmap.mmap(-1, num_bytes))
            address = int(np.frombuffer(memory, np.uint8).ctypes.data)
            if code := self._register(address, num_bytes):
                raise TierError(f"Mooncake does not register {num_bytes} bytes: error {code}")
            self.registered[address] = memory
            self.memory, self.address = memory, address

    def submit(self, job: Callable[[], object] | None) -> None:
        """Hand over a call; None ends the thread."""
        self._jobs.put(job)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                answer = job()
            except Exception as error:  # noqa: BLE001 - whatever it is, the caller gets it
                answer = error
            self._finished(self, answer)
            # What is over keeps nothing alive.
            del job, answer


class Callers:
    """`count` callers: at most so many calls run or hang, and where all hang, further ones fail at once.

    Every caller is free, taken by a thread of the tier's user, or left behind.
    """

    def __init__(self, count: int, register: Register) -> None:
        self._changed = threading.Condition()
        self._left: set[Caller] = set()
        self._is_closed = False
        self._all = [Caller(self._finished, register) for _ in range(count)]
        self._free = list(self._all)

    def take(self, deadline: float) -> Caller:
        """Return a caller for this thread alone, until `give`. Raises `TimeoutError` and `TierError`."""
        with self._changed:
            while True:
                if self._is_closed:
                    raise TierError("the tier is closed")
                if self._free:
                    return self._free.pop()
                if len(self._left) == len(self._all):
                    raise TimeoutError(f"{len(self._left)} calls hang: no further one is tried")
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError("all callers are busy")

    def give(self, caller: Caller) -> None:
        """Give a caller back; one that was left behind gives itself back when its call ends."""
        with self._changed:
            if caller not in self._left:
                self._free.append(caller)
                self._changed.notify_all()

    def call(self, caller: Caller, job: Callable[[], Result], deadline: float) -> Result:
        """Run a native call. Raises what it raises; at the deadline leaves it behind: `TimeoutError`."""
        caller.submit(job)
        try:
            answer = caller.answers.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            with self._changed:
                if caller.answers.empty():
                    self._left.add(caller)
                    self._changed.notify_all()
                    raise TimeoutError("Mooncake did not answer in time") from None
            answer = caller.answers.get()
        if isinstance(answer, Exception):
            raise answer
        return answer  # pyright: ignore[reportReturnType] - what `job` returned

    @property
    def num_hanging(self) -> int:
        """Calls that were left behind and have not ended."""
        with self._changed:
            return len(self._left)

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
                while len(self._free) < len(self._all):
                    self._changed.wait()
            job(self._all)
            for caller in self._all:
                caller.submit(None)
            ended.set()

        threading.Thread(target=last, name="quire-mooncake-close", daemon=True).start()
        ended.wait(max(0.0, deadline - time.monotonic()))

    def _finished(self, caller: Caller, answer: object) -> None:
        with self._changed:
            if caller in self._left:
                self._left.discard(caller)
                self._free.append(caller)
                self._changed.notify_all()
            else:
                caller.answers.put(answer)
