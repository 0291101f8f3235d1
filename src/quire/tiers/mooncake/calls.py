"""Native calls that may block for long, made on threads that can be left behind."""

from __future__ import annotations

import mmap
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast
from weakref import ref

import msgspec
import numpy as np

from quire.errors import TierError
from quire.tiers.threads import Bell, Permit, is_on, start

Result = TypeVar("Result")
Register = Callable[[int, int], int]
"""(address, bytes) -> 0 where the memory may be read and written by the native library."""


class NativeCall(msgspec.Struct, Generic[Result], eq=False):
    """A call of the library, with its result or exception once it `is_done`. Its caller waits until `deadline`."""

    _job: Callable[[], Result]
    _deadline: float
    _result: Result | None = None
    _error: Exception | None = None
    has_begun: bool = False
    is_done: bool = False

    def run(self) -> None:
        """Do it, on the thread of a caller, which says when it is done."""
        self.has_begun = True
        try:
            self._result = self._job()
        except Exception as error:  # noqa: BLE001 - whatever it is, the caller gets it
            self._error = error

    @property
    def hangs(self) -> bool:
        """Whether it runs beyond its deadline: one whose caller a signal cut off is only under way until then."""
        return self.has_begun and not self.is_done and time.monotonic() >= self._deadline

    def result(self) -> Result:
        """Return the result, or raise the exception, of the call."""
        if self._error is not None:
            raise self._error
        return cast("Result", self._result)


class Caller:
    """A thread for native calls, and memory of its own that they read from and write to.

    What a call that was left behind still reads or writes is this memory, never its caller's. Whoever waits for a call
    waits until `deadline`, of `time.monotonic`. `permit` says who has it.
    """

    def __init__(self, register: Register, bell: Bell) -> None:
        self._register, self._bell = register, bell
        self.deadline = 0.0
        self.permit: ref[Permit] | None = None
        self.registered: dict[int, memoryview] = {}
        """By address. What was outgrown stays registered, so it must stay mapped; it is smaller."""
        self._calls: deque[NativeCall[Any]] = deque()
        """What was given to the thread and has not ended: given in one step, whatever a signal does."""
        self._wakes: queue.SimpleQueue[bool] = queue.SimpleQueue()
        """Says to look for calls, or (False) to end."""
        self.memory = memoryview(b"")
        self.address = 0
        start(threading.Thread(target=self._work, name="quire-mooncake", daemon=True))

    @property
    def is_free(self) -> bool:
        """Whether no thread has it, and no abandoned call runs."""
        return not is_on(self.permit) and not self._calls

    @property
    def is_left(self) -> bool:
        """Whether its call was abandoned and has not ended."""
        return not is_on(self.permit) and bool(self._calls)

    @property
    def hangs(self) -> bool:
        """Whether a call that was left behind still runs behind its deadline."""
        calls = list(self._calls)
        return self.is_left and bool(calls) and calls[0].hangs

    def reserve(self, num_bytes: int) -> None:
        """Make the memory at least so large. Raises `TierError` where the library refuses it."""
        if num_bytes > len(self.memory):
            memory = memoryview(mmap.mmap(-1, num_bytes))
            address = int(np.frombuffer(memory, np.uint8).ctypes.data)
            # Noted first: what a signal keeps from being noted would be unmapped while the library knows it.
            self.registered[address] = memory
            if code := self._register(address, num_bytes):
                del self.registered[address]
                raise TierError(f"Mooncake does not register {num_bytes} bytes: error {code}")
            self.memory, self.address = memory, address

    def call(self, job: Callable[[], Result]) -> Result:
        """Run a native call. Raises its exception, and `TimeoutError` at the deadline: then it is abandoned."""
        call = NativeCall(job, self.deadline)
        self._calls.append(call)
        self.wake()
        if not self._bell.wait_for(lambda: call.is_done, self.deadline - time.monotonic()):
            raise TimeoutError
        return call.result()

    def wake(self) -> None:
        """Let the thread look for calls: one whose caller a signal cut off may not have done it."""
        self._wakes.put(True)

    def end(self) -> None:
        """End the thread."""
        self._wakes.put(False)

    def _work(self) -> None:
        while self._wakes.get():
            while self._calls:
                call = self._calls[0]
                call.run()
                self._calls.popleft()  # the caller is free before anybody is told
                call.is_done = True
                self._bell.ring()
                del call  # what is over keeps nothing alive


class Callers:
    """`count` callers: at most `count` calls run or hang, and where all hang, further ones fail at once."""

    def __init__(self, count: int, register: Register) -> None:
        self._is_closed = self._is_ending = self._has_ended = False
        self._lock = threading.Lock()
        self._bell = Bell()
        self._all = [Caller(register, self._bell) for _ in range(count)]

    @property
    def num_hanging(self) -> int:
        """Calls that were left behind and have not ended by their deadlines."""
        return sum(caller.hangs for caller in self._all)

    def use(self, timeout_s: float, work: Callable[[Caller], Result]) -> Result:
        """Give a caller to this thread alone, for calls until then; return what `work` returns.

        Raises `TimeoutError` and `TierError`. A caller that was left behind is free again when its call ends.
        """
        deadline = time.monotonic() + timeout_s
        self._check_open()
        if self.num_hanging == len(self._all):
            raise TimeoutError(f"{self.num_hanging} calls hang: no further one is tried")
        permit = Permit()
        try:
            caller = self._taken(permit, timeout_s)
            caller.deadline = deadline
            self._check_open()
            return work(caller)
        finally:
            permit.is_over = True
            self._bell.ring()

    def close(self, job: Callable[[list[Caller]], bool], deadline: float) -> None:
        """Take no further calls; when none runs any more, run a last job and end the threads.

        Returns at the deadline at the latest. Where calls hang then, the job runs when they end: until then their memory
        stays; for ever, where the job says False. Closing once more waits as well, and changes nothing else.
        """
        self._is_closed = True

        def last() -> None:
            self._bell.wait_for(self._are_all_free, float("inf"))
            with self._lock:
                if self._is_ending:
                    return
                self._is_ending = True
            may_go = job(self._all)
            for caller in self._all:
                caller.end()
            self._has_ended = True
            self._bell.ring()
            if not may_go:
                threading.Event().wait()

        if not self._has_ended:
            start(threading.Thread(target=last, name="quire-mooncake-close", daemon=True))
            self._bell.wait_for(lambda: self._has_ended, deadline - time.monotonic())

    def _taken(self, permit: Permit, timeout_s: float) -> Caller:
        """Return a caller that has this permit. Raises `TimeoutError`."""
        found: list[Caller] = []

        def is_there() -> bool:
            with self._lock:
                for caller in self._all:
                    if caller.is_free:
                        caller.permit = ref(permit)
                        found.append(caller)
                        return True
            self._wake_left()
            return False

        if not self._bell.wait_for(is_there, timeout_s):
            raise TimeoutError("all callers are busy")
        return found[0]

    def _are_all_free(self) -> bool:
        self._wake_left()
        return all(caller.is_free for caller in self._all)

    def _wake_left(self) -> None:
        for caller in self._all:
            if caller.is_left:
                caller.wake()

    def _check_open(self) -> None:
        if self._is_closed:
            raise TierError("the tier is closed")
