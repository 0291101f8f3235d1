"""Lanes: each tier's calls run in threads of its own, so that a tier that hangs holds up nobody else.

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
from typing import Protocol, TypeAlias
from weakref import WeakSet

Work: TypeAlias = Callable[[], object]


RESOLUTION_S = 1e-6
"""Less is no time: clocks are not that exact, and threads do not wake that soon."""


class Lanes:
    """The source of a stack's time and threads. Tests have another one.

    Threads are daemons: one that hangs in a tier does not keep the process from ending.
    """

    def now(self) -> float:
        """Seconds, from any start."""
        return time.monotonic()

    def signal(self) -> threading.Event:
        """Return a new signal, not set."""
        return threading.Event()

    def lock(self) -> AbstractContextManager[object]:
        """Return a new lock. Nobody waits or calls a tier while it is held."""
        return threading.Lock()

    def spawn(self, name: str, work: Work) -> None:
        """Run `work` in another thread."""
        threading.Thread(target=work, name=name, daemon=True).start()


class Deadline:
    """A point in time that stays so many seconds away at most, whatever the clock does.

    A clock that jumps forward ends it early. One that jumps back moves it as well, as soon as
    it is looked at.
    """

    def __init__(self, lanes: Lanes, seconds: float) -> None:
        self._lanes = lanes
        self._seen = lanes.now()
        self._end = self._seen + seconds

    @property
    def left_s(self) -> float:
        """Seconds that are left, 0 if none."""
        now = self._lanes.now()
        if now < self._seen:
            self._end -= self._seen - now
        self._seen = now
        left_s = self._end - now
        return left_s if left_s > RESOLUTION_S else 0.0

    @property
    def passed(self) -> bool:
        """Whether none are left."""
        return not self.left_s


class TierLane:
    """Jobs of one tier and the threads that run them, at most `num_threads`.

    Each owner's jobs run in order, and owners take turns: one with a thousand jobs does not
    hold up another with one. A job that hangs occupies one thread of this lane.
    """

    def __init__(self, lanes: Lanes, name: str, num_threads: int) -> None:
        self.name = name
        self.num_threads = num_threads
        self._lanes = lanes
        self.ended = lanes.signal()
        """Set when it is closed and no thread of it is left."""
        self._lock = lanes.lock()
        self._turns: deque[tuple[object, deque[tuple[Work, Work]]]] = deque()
        self._idle: list[threading.Event] = []
        self._num_alive = 0
        self._is_closed = False

    @property
    def num_waiting(self) -> int:
        """Jobs that have not begun."""
        with self._lock:
            return sum(len(jobs) for _, jobs in self._turns)

    @property
    def num_alive(self) -> int:
        """Threads, idle ones included."""
        with self._lock:
            return self._num_alive

    def submit(self, owner: object, run: Work, drop: Work) -> None:
        """Call `run` when it is its owner's turn, or `drop` where the lane is closed first or no thread can be had.

        Neither raises.
        """
        wake: threading.Event | None = None
        spawn = False
        with self._lock:
            refused = self._is_closed
            if not refused:
                for other, jobs in self._turns:
                    if other is owner:
                        jobs.append((run, drop))
                        break
                else:
                    self._turns.append((owner, deque(((run, drop),))))
                if self._idle:
                    wake = self._idle.pop()
                elif self._num_alive < self.num_threads:
                    self._num_alive += 1
                    spawn = True
        if refused:
            drop()
        elif wake is not None:
            wake.set()
        elif spawn:
            try:
                self._lanes.spawn(f"quire {self.name}", self._work)
            except RuntimeError:  # the system has no thread left
                self._do_without_one()

    def close(self) -> None:
        """Drop what waits, and end each thread when its job ends. Twice does nothing."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            dropped = self._take_all()
            idle, self._idle = self._idle, []
            none_alive = not self._num_alive
        for _, drop in dropped:
            drop()
        for signal in idle:
            signal.set()
        if none_alive:
            self.ended.set()

    def _do_without_one(self) -> None:
        """Count a thread off that could not begin; without any other, nobody would do what waits."""
        with self._lock:
            self._num_alive -= 1
            is_last = not self._num_alive
            dropped = self._take_all() if is_last else []
            is_over = is_last and self._is_closed
        for _, drop in dropped:
            drop()
        if is_over:
            self.ended.set()

    def _work(self) -> None:
        signal = self._lanes.signal()
        while True:
            with self._lock:
                run = self._next()
                if run is None and self._is_closed:
                    self._num_alive -= 1
                    is_last = not self._num_alive
                    break
                if run is None:
                    signal.clear()
                    self._idle.append(signal)
                    run = signal.wait
            run()
        if is_last:
            self.ended.set()

    # The lock is held

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
    """What can be closed, twice too, and what a forked process can let be."""

    def close(self) -> None:
        """End it."""

    def abandon(self) -> None:
        """Do nothing any more: the threads and what is below belong to another process."""


_open: WeakSet[Closable] = WeakSet()


def close_at_exit(opened: Closable) -> None:
    """Close it when this process ends, if nobody has done so before; one that is forked from it abandons it."""
    _open.add(opened)


@atexit.register
def close_all() -> None:
    """Close what this process has opened."""
    for opened in list(_open):
        opened.close()


def abandon_all() -> None:
    """Abandon what the process has opened that this one is forked from: none of its threads is here."""
    for opened in list(_open):
        opened.abandon()
    _open.clear()


os.register_at_fork(after_in_child=abandon_all)
