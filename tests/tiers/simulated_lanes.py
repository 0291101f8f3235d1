"""Lanes in virtual time: real threads that take turns by a seed, so that a history can be repeated.

One thread runs at a time. It gives way where it waits, sleeps or takes a lock; who goes on is
drawn. Time stands still while anybody can go on, then it jumps to the next timer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from heapq import heappop, heappush
from random import Random
from typing import TypeVar

from quire.errors import InvariantError
from quire.tiers.stack.lanes import Lanes, Work

T = TypeVar("T")


class _Ended(BaseException):
    """The simulation is over; unwinds a thread that still waits."""


class _Task:
    """A thread and its turn. `wait_id` tells a timer whether its wait is still on."""

    def __init__(self, name: str, *, may_stall: bool) -> None:
        self.name = name
        self.may_stall = may_stall
        self.turn = threading.Semaphore(0)
        self.wait_id = 0


class SimulatedLanes(Lanes):
    """Virtual time and threads that take turns.

    `switching`  the chance that a thread gives way where it takes a lock
    `stall_s`    a stack's own threads may stand still for so long there, as on a busy machine
    """

    def __init__(self, seed: int = 0, *, switching: float = 0.05, stall_s: float = 0.0) -> None:
        self.switching = switching
        self.stall_s = stall_s
        self.num_switches = 0
        self.random = Random(seed)
        self._time = 0.0
        self._jumped = 0.0
        self._ready: list[_Task] = []
        self._timers: list[tuple[float, int, _Task, int]] = []
        self._num_timers = 0
        self.current = _Task("main", may_stall=False)
        self._tasks: list[tuple[_Task, threading.Thread]] = []
        self._is_over = False
        self._main = self.current
        self._failures: list[BaseException] = []

    @property
    def time_s(self) -> float:
        """Virtual seconds since the start, without jumps of the clock."""
        return self._time

    def now(self) -> float:
        return self._time + self._jumped

    def jump(self, seconds: float) -> None:
        """Set the clock that the stack sees forward; no time passes."""
        self._jumped += seconds

    def sleep(self, seconds: float) -> None:
        """Let so much time pass for this thread."""
        task = self.current
        self.set_timer(task, max(0.0, seconds))
        self.give_way(task)

    def pause(self) -> None:
        """Give way to any other thread that can go on, or not, as it is drawn."""
        task = self.current
        self._ready.append(task)
        self.give_way(task)

    def signal(self) -> _Signal:
        return _Signal(self)

    def lock(self) -> AbstractContextManager[object]:
        return _Lock(self)

    def spawn(self, name: str, work: Work) -> None:
        self._start(_Task(name, may_stall=True), work)

    def spawn_client(self, name: str, work: Work) -> None:
        """Run `work` beside the caller; it never stalls, so that what it waits can be judged."""
        self._start(_Task(name, may_stall=False), work)

    def run(self, work: Callable[[], T]) -> T:
        """Run `work` as the first thread; then end all others, wherever they wait.

        What another thread raises is raised here, and ends it as well.
        """
        try:
            return work()
        finally:
            self._is_over = True
            main = self.current
            for task, thread in self._tasks:
                if thread.is_alive():
                    self.current = task
                    task.turn.release()
                    thread.join()
            self.current = main

    def _start(self, task: _Task, work: Work) -> None:
        def run() -> None:
            task.turn.acquire()
            try:
                if not self._is_over:
                    work()
            except _Ended:
                pass
            except BaseException as error:  # noqa: BLE001 - raised in `run`
                self._failures.append(error)
            self._end(task)

        thread = threading.Thread(target=run, name=task.name, daemon=True)
        self._tasks.append((task, thread))
        thread.start()
        self._ready.append(task)

    # What signals and locks use

    def maybe_switch(self) -> None:
        """Give way or stall, as it is drawn."""
        if self.random.random() >= self.switching or self._is_over:
            return
        if self.stall_s and self.current.may_stall:
            self.sleep(self.random.random() * self.stall_s)
        else:
            self.pause()

    def set_timer(self, task: _Task, seconds: float) -> None:
        """Wake a thread after so long, if it still waits for the same."""
        self._num_timers += 1
        heappush(self._timers, (self._time + seconds, self._num_timers, task, task.wait_id))

    def wake(self, task: _Task) -> None:
        """Let a thread go on when it is drawn."""
        self._ready.append(task)

    def give_way(self, task: _Task) -> None:
        """Let another thread run; return when it is this one's turn again."""
        if self._is_over:
            raise _Ended
        other = self._pick()
        if other is task:
            task.wait_id += 1
            return
        self._resume(other)
        task.turn.acquire()
        task.wait_id += 1
        if self._is_over:
            raise _Ended
        if self._failures and task is self._main:
            raise self._failures[0]

    def _pick(self) -> _Task:
        while not self._ready:
            if not self._timers:
                raise InvariantError(
                    f"at {self._time:.6f} s nobody can go on and no timer is set: a deadlock"
                )
            when, _, task, wait_id = heappop(self._timers)
            if wait_id == task.wait_id:
                self._time = max(self._time, when)
                self._ready.append(task)
        if len(self._ready) == 1:
            return self._ready.pop()
        return self._ready.pop(self.random.randrange(len(self._ready)))

    def _resume(self, task: _Task) -> None:
        self.num_switches += 1
        self.current = task
        task.turn.release()

    def _end(self, task: _Task) -> None:
        self._tasks = [each for each in self._tasks if each[0] is not task or self._is_over]
        if self._is_over:
            return
        if self._failures:
            self._ready = [self._main]
        self._resume(self._pick())


class _Signal:
    def __init__(self, lanes: SimulatedLanes) -> None:
        self._lanes = lanes
        self._is_set = False
        self._waiting: list[_Task] = []

    def set(self) -> None:
        self._is_set = True
        waiting, self._waiting = self._waiting, []
        for task in waiting:
            self._lanes.wake(task)

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout_s: float | None = None) -> bool:
        if self._is_set:
            return True
        task = self._lanes.current
        if timeout_s is not None:
            self._lanes.set_timer(task, max(0.0, timeout_s))
        self._waiting.append(task)
        self._lanes.give_way(task)
        if task in self._waiting:
            self._waiting.remove(task)
        return self._is_set


class _Lock(AbstractContextManager[object]):
    def __init__(self, lanes: SimulatedLanes) -> None:
        self._lanes = lanes
        self._holder: _Task | None = None
        self._waiting: list[_Task] = []

    def __enter__(self) -> None:
        lanes = self._lanes
        task = lanes.current
        lanes.maybe_switch()
        if self._holder is task:
            raise InvariantError(f"{task.name} takes a lock that it holds")
        while self._holder is not None:
            self._waiting.append(task)
            lanes.give_way(task)
        self._holder = task

    def __exit__(self, *_: object) -> None:
        self._holder = None
        if self._waiting:
            self._lanes.wake(self._waiting.pop(0))
