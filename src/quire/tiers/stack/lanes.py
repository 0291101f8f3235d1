"""Lanes: each tier's calls run in threads of its own, so that a tier that hangs blocks no other.

Whoever has such threads and is not closed is closed when the interpreter ends, so that what waits is written.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Protocol, TypeAlias
from weakref import WeakSet

from quire.tiers.threads import Signal, start

Work: TypeAlias = Callable[[], object]


RESOLUTION_S = 1e-6
"""Less is no time: clocks are not that exact, and threads do not wake that soon."""


class Lanes:
    """The source of a stack's time and threads. Tests have another one.

    Threads are daemons: one that hangs in a tier does not keep the process from ending.
    """

    def now(self) -> float:
        """Seconds from any start, never less than before."""
        return time.monotonic()

    def signal(self) -> Signal:
        """Return a new signal, not set."""
        return Signal()

    def lock(self) -> AbstractContextManager[object]:
        """Return a new lock. No thread waits or calls a tier while it holds one."""
        return threading.Lock()

    def spawn(self, name: str, work: Work) -> None:
        """Run `work` in another thread."""
        start(threading.Thread(target=work, name=name, daemon=True))


class Deadline:
    """A point in time that is `seconds` away."""

    def __init__(self, lanes: Lanes, seconds: float) -> None:
        self._lanes = lanes
        self._end = lanes.now() + seconds

    @property
    def left_s(self) -> float:
        """Seconds that are left, 0 if none."""
        left_s = self._end - self._lanes.now()
        return left_s if left_s > RESOLUTION_S else 0.0

    @property
    def passed(self) -> bool:
        """Whether none are left."""
        return not self.left_s


class _Worker:
    """A thread of a lane, as the lane knows it.

    `signal`     wakes it where it is idle
    `is_called`  whether it was woken, and has not looked since
    `has_begun`  whether it runs: one that has not may be given up
    """

    def __init__(self, lanes: Lanes) -> None:
        self.signal = lanes.signal()
        self.is_called = self.has_begun = False


class TierLane:
    """Jobs of one tier and the threads that run them, at most `num_threads`.

    Each owner's jobs run in order, and owners take turns: one with a thousand jobs does not
    hold up another with one. A job that hangs occupies one thread of this lane.

    A `submit` that a signal cuts off has given its job or not; either way the next one is served.
    """

    def __init__(self, lanes: Lanes, name: str, num_threads: int) -> None:
        self.name = name
        self.num_threads = num_threads
        self._lanes = lanes
        self.ended = lanes.signal()
        """Set when it is closed and no thread of it is left."""
        self._lock = lanes.lock()
        self._turns: deque[tuple[object, deque[tuple[Work, Work]]]] = deque()
        self._alive: set[_Worker] = set()
        self._idle: list[_Worker] = []
        self._is_closed = False

    @property
    def num_waiting(self) -> int:
        """Jobs that have not begun."""
        with self._lock:
            return sum(len(jobs) for _, jobs in self._turns)

    def submit(self, owner: object, run: Work, drop: Work) -> None:
        """Call `run` at its owner's turn, or `drop` if the lane is closed or no thread can be had.

        Neither raises.
        """
        worker = _Worker(self._lanes)
        try:
            with self._lock:
                refused = self._is_closed
                is_new = not refused and self._has_to_begin(worker)
                if not refused:
                    self._queue(owner, (run, drop))
            if is_new:
                self._begin(worker)
        except BaseException:
            self._give_up(worker)
            raise
        if refused:
            drop()

    def close(self) -> None:
        """Drop queued jobs, and end each thread when its job ends. Twice does nothing."""
        with self._lock:
            self._is_closed = True
            dropped = self._take_all()
            for worker in self._idle:
                worker.signal.set()
            none_alive = not self._alive
        for _, drop in dropped:
            drop()
        if none_alive:
            self.ended.set()

    def _begin(self, worker: _Worker) -> None:
        try:
            self._lanes.spawn(f"quire {self.name}", partial(self._work, worker))
        except RuntimeError:  # the system has no thread left
            self._give_up(worker)

    def _give_up(self, worker: _Worker) -> None:
        """Count a thread off that could not begin; without any other, nobody would do what waits."""
        with self._lock:
            if worker.has_begun:
                return
            self._alive.discard(worker)
            is_last = not self._alive
            dropped = self._take_all() if is_last else []
            is_over = is_last and self._is_closed
        for _, drop in dropped:
            drop()
        if is_over:
            self.ended.set()

    def _work(self, worker: _Worker) -> None:
        is_last = False
        while True:
            with self._lock:
                if worker not in self._alive:  # given up before it began
                    break
                worker.has_begun = True
                if worker in self._idle:
                    self._idle.remove(worker)
                run = self._next()
                if run is None and self._is_closed:
                    self._alive.discard(worker)
                    is_last = not self._alive
                    break
                if run is None:
                    worker.signal.clear()
                    worker.is_called = False
                    self._idle.append(worker)
                    run = worker.signal.wait
            run()
        if is_last:
            self.ended.set()

    # The lock is held

    def _has_to_begin(self, worker: _Worker) -> bool:
        """Wake an idle thread; return whether there is none, and a further one, `worker`, is to begin."""
        for each in self._idle:
            if not each.is_called:
                each.signal.set()  # first: a signal may come right behind it
                each.is_called = True
                return False
        if len(self._alive) >= self.num_threads:
            return False
        self._alive.add(worker)
        return True

    def _queue(self, owner: object, job: tuple[Work, Work]) -> None:
        for other, jobs in self._turns:
            if other is owner:
                jobs.append(job)
                return
        self._turns.append((owner, deque((job,))))

    def _take_all(self) -> list[tuple[Work, Work]]:
        jobs = [job for _, jobs in self._turns for job in jobs]
        self._turns.clear()
        return jobs

    def _next(self) -> Work | None:
        if not self._turns:
            return None
        owner, jobs = self._turns.popleft()
        run, _ = jobs.popleft()
        if jobs:
            self._turns.append((owner, jobs))
        return run


class Closable(Protocol):
    """An object that can be closed, twice too, and that a forked process can abandon."""

    def close(self) -> None:
        """End it."""

    def abandon(self) -> None:
        """Become inert: the threads and tiers below belong to another process."""


_open: WeakSet[Closable] = WeakSet()


def close_at_exit(opened: Closable) -> None:
    """Close it when this process ends, unless it is closed; a forked process abandons it."""
    _open.add(opened)


@atexit.register
def close_all() -> None:
    """Close everything that this process has opened."""
    for opened in list(_open):
        opened.close()


def abandon_all() -> None:
    """Abandon everything that the parent of this fork has opened: none of its threads is here."""
    for opened in list(_open):
        opened.abandon()
    _open.clear()


os.register_at_fork(after_in_child=abandon_all)
