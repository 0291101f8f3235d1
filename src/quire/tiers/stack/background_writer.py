"""BackgroundWriter: a background thread that seals and stores records, which lookups see as stored at once.

On a CPU this competes with the model. A budget of time bounds it, which grows by a small share of the time that
passes and by the time that hits save. Work beyond the budget waits. Prompts without room in the queue are passed over.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from quire.tiers.base import Keys
from quire.tiers.stack.lanes import Deadline, TierLane, Work
from quire.tiers.stack.member import Shared
from quire.tiers.stack.placement import Placer

FIRST_S = 1.0
"""The budget of a new stack: some hundred prompts go down without a pause."""

MOST_S = 60.0
"""The largest budget."""

PATIENCE_S = 30.0
"""So long work waits for a tier that is behind with writing."""

REST_S = 5.0
"""So long work waits for the engine to rest, where the engine says when it does, before it is done beside it."""

SETTLED_S = 0.03
"""So long an engine rests before work is done: the next request may follow at once."""

LOOK_S = 0.03
"""How often that is looked at."""


class FeedJob:
    """A job that is queued, running or over. Then `error` is its exception, or None."""

    def __init__(self, feeding: BackgroundWriter, keys: Keys, work: Work, num_bytes: int) -> None:
        self.keys = frozenset(keys)
        self.num_bytes = num_bytes
        self.error: Exception | None = None
        self.is_over = False
        self.patience = Deadline(feeding.lanes, PATIENCE_S)
        self.rest = Deadline(feeding.lanes, REST_S)
        self.done = feeding.lanes.signal()
        self._feeding = feeding
        self._work = work

    def wait(self, timeout_s: float | None = None) -> bool:
        """Return whether it is over: a job that has not begun runs here at once, whatever the budget."""
        return self.is_over or self._feeding.do(self) or self.done.wait(timeout_s)

    def run(self) -> None:
        """Run the job. Ctrl-C is raised here, not in waiting threads."""
        try:
            if not self.is_over:
                self._work()
        except Exception as error:  # noqa: BLE001 - whoever waits raises it
            self.error = error
        finally:
            self.end()

    def end(self) -> None:
        """Say that it is done, or never will be."""
        self.is_over = True
        self.done.set()


class BackgroundWriter:
    """A queue of work that ends in `TierStack.store`, the oldest first, and one thread that does it within a budget.

    It copies and seals in memory, which takes milliseconds. A lookup of a key that waits here runs its job first, or waits
    for the thread that does, and so sees it as stored; that costs no budget.

    `passed_over`  prompts that were not stored, or not to the end, for want of time

    Without hits, and with a `busy_share` below 1, the jobs that nobody waited for take at most `FIRST_S`, that share of
    the time that has gone by, and one job more. Of an engine that says when it computes, no `FIRST_S`: that share of the
    time that it has computed, and one job more; when it has rested for `SETTLED_S`, all that waits is done, and costs no budget. What comes
    while it computes waits for that, up to `REST_S`, and as long as not half of what may wait does.
    """

    def __init__(self, shared: Shared, placing: Placer) -> None:
        self.passed_over = 0
        self.lanes = shared.lanes
        self._placing = placing
        self._shared = shared
        self._lane = TierLane(shared.lanes, "feeding", 1)
        self._wake = shared.lanes.signal()
        self._waiting: dict[FeedJob, None] = {}
        self._running: dict[FeedJob, None] = {}
        self._is_awake = False
        self._is_resting: bool | None = None  # not known
        self._settled_s = 0.0
        self._most_bytes = 0
        self._share = shared.settings.busy_share
        self._budget_s, self._counted_s = FIRST_S, shared.lanes.now()

    def has_room(self, most_bytes: int) -> bool:
        """Return whether to `begin` work of one more prompt: while less than this waits, or there is time for it."""
        if self._shared.is_closed:
            return False
        with self._shared.lock:
            self._most_bytes = most_bytes
            has_room = self._waiting_bytes() < most_bytes or self._has_time()
            self.passed_over += not has_room
        return has_room

    def begin(self, keys: Keys, work: Work, num_bytes: int) -> FeedJob:
        """Queue `work`, which makes and stores these keys, `num_bytes` of records. It must wait for nothing but memory.

        To all who ask the stack it is as if that were done: who looks for one of the keys, drains or closes waits.
        """
        job = FeedJob(self, keys, work, num_bytes)
        with self._shared.lock:
            self._waiting[job] = None
            is_first, self._is_awake = not self._is_awake, True
            is_full = self._is_filling()
        if is_first:
            self._lane.submit(self, self._feed, self._drop)
        elif is_full:
            self._wake.set()
        return job

    def finish(self, job: FeedJob) -> None:
        """Wait until a job is done, at the cost of the budget.

        A job that has not begun is passed over if the budget is spent.
        """
        with self._shared.lock:
            is_passed_over = job in self._waiting and not self._has_time()
            if is_passed_over:
                job.end()  # first: Ctrl-C may come at any time, and others wait for it
                del self._waiting[job]
                self.passed_over += 1
                return
        begun_s = self.lanes.now()
        job.wait()
        self.adjust_budget(begun_s - self.lanes.now())

    def adjust_budget(self, seconds: float) -> None:
        """Add the seconds that a hit has saved; below 0, those that work has taken."""
        with self._shared.lock:
            self._budget_s = min(self._budget_s + seconds, MOST_S)
        self._wake.set()

    def engine_computes(self) -> None:
        """Say that the engine computes from now on, for an engine that also says when it rests."""
        self._engine_turns(is_resting=False)

    def engine_rests(self) -> None:
        """Say that the engine has nothing to compute: until it has, jobs disturb no request."""
        self._engine_turns(is_resting=True)

    def has(self, keys: Keys) -> NDArray[np.bool_]:
        """Return the keys that jobs will store or are storing: bool [keys]. They need not be given again."""
        asked = frozenset(keys)
        with self._shared.lock:
            under_way = frozenset[bytes]().union(*(asked & job.keys for job in self._under_way()))
        return np.array([key in under_way for key in keys], np.bool_)

    def do(self, job: FeedJob) -> bool:
        """Run a job on this thread if it has not begun; return whether it ran here.

        A job that Ctrl-C cuts off is over.
        """
        is_own = False
        try:
            with self._shared.lock:
                is_own = job in self._waiting
                if is_own:
                    self._take(job)
            if is_own:
                self._run(job)
        except BaseException:
            if is_own:
                job.end()
                with self._shared.lock:
                    self._waiting.pop(job, None)
                    self._running.pop(job, None)
            raise
        return is_own

    def wait(self, timeout_s: float, keys: Keys) -> bool:
        """Wait for the job that makes one of these keys; return whether it is done."""
        if not (self._waiting or self._running):
            return True
        with self._shared.lock:
            wanted = [job for job in self._under_way() if not job.keys.isdisjoint(keys)]
        deadline = Deadline(self.lanes, timeout_s)
        return all(job.wait(deadline.left_s) for job in wanted)

    def catch_up(self) -> None:
        """Wait until all jobs are done; some seconds at most."""
        self.drain(Deadline(self.lanes, self._shared.settings.load_timeout_s))

    def drain(self, deadline: Deadline) -> bool:
        """Do all that is under way now, the oldest first, not faster than tiers write it; return whether it is."""
        with self._shared.lock:
            under_way = self._under_way()
        for job in under_way:
            with self._shared.lock:
                is_filling = self._placing.is_filling
            if is_filling:
                self._placing.drain(deadline)
            if deadline.passed or not job.wait(deadline.left_s):
                return False
        return True

    def purge(self, is_own: Callable[[bytes], bool], deadline: Deadline) -> bool:
        """Drop a tenant's queued jobs and wait for its running ones; return whether all are over."""
        with self._shared.lock:
            own = [job for job in self._under_way() if any(map(is_own, job.keys))]
            for job in own:
                if self._waiting.pop(job, job) is None:
                    job.end()
        return all(job.done.wait(deadline.left_s) for job in own)

    def abandon(self) -> None:
        """Take all that is under way for over, in a forked process."""
        for job in self._under_way():
            job.is_over = True
        self._waiting, self._running, self._is_awake = {}, {}, False

    def close(self) -> None:
        """Drop the jobs that have not begun."""
        self._drop()
        self._wake.set()
        self._lane.close()

    def _drop(self) -> None:
        with self._shared.lock:
            dropped, self._waiting = self._waiting, {}
            self._is_awake = False
        for job in dropped:
            job.end()

    def _feed(self) -> None:
        """Do what waits, the oldest first, as there is time. In the lane."""
        while True:
            with self._shared.lock:
                self._wake.clear()
                job = next(iter(self._waiting), None)
                if job is None:
                    self._is_awake = False
                    return
                pause_s = self._pause_s(job)
                if not pause_s:
                    self._take(job)
            if pause_s:
                self._wake.wait(pause_s)
            else:
                begun_s, is_free = self.lanes.now(), self._is_resting
                self._run(job)
                if not is_free:
                    self.adjust_budget(begun_s - self.lanes.now())

    def _engine_turns(self, *, is_resting: bool) -> None:
        if self._is_resting is is_resting:
            return
        with self._shared.lock:
            if self._is_resting is None:
                self._budget_s -= FIRST_S
            self._count_time()
            self._is_resting = is_resting
            self._settled_s = self._counted_s + SETTLED_S
        self._wake.set()

    def _run(self, job: FeedJob) -> None:
        try:
            job.run()
        finally:
            with self._shared.lock:
                self._running.pop(job, None)

    # The lock is held

    def _take(self, job: FeedJob) -> None:
        self._running[job] = None  # first: `wait` looks at both without the lock
        del self._waiting[job]

    def _under_way(self) -> list[FeedJob]:
        return [*self._running, *self._waiting]

    def _waiting_bytes(self) -> int:
        return sum(job.num_bytes for job in self._waiting)

    def _is_filling(self) -> bool:
        """Whether half of what may wait does, or more."""
        return 2 * self._waiting_bytes() >= self._most_bytes

    def _waits_for_rest(self, job: FeedJob) -> bool:
        is_told = self._is_resting is not None and self._share < 1
        return is_told and not self._rests() and not job.rest.passed and not self._is_filling()

    def _rests(self) -> bool:
        """Whether the engine rests, and has for a while."""
        return bool(self._is_resting) and self.lanes.now() >= self._settled_s

    def _count_time(self) -> None:
        """Let the budget grow by the time that went by, unless the engine rested."""
        now_s = self.lanes.now()
        if not self._is_resting:
            grown_s = self._share * max(0.0, now_s - self._counted_s)
            self._budget_s = min(self._budget_s + grown_s, MOST_S)
        self._counted_s = now_s

    def _has_time(self) -> bool:
        """Count the time that went by, and return whether work may be done now."""
        self._count_time()
        return self._rests() or self._budget_s > 0 or self._share >= 1

    def _pause_s(self, job: FeedJob) -> float:
        """Return how long to wait before this is looked at again; 0 where it may begin."""
        if self._placing.is_filling and not job.patience.passed:
            return LOOK_S
        waits_for_rest = self._waits_for_rest(job)
        if not waits_for_rest and self._has_time():
            return 0.0
        if self._is_resting:
            return SETTLED_S
        return max(LOOK_S, job.rest.left_s if waits_for_rest else -self._budget_s / self._share)
