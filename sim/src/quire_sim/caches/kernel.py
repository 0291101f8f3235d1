"""The cache of `quire serve`: quire's own manager and scheduler."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate
from math import inf
from operator import attrgetter
from typing import cast

import numpy as np

from quire.core import CacheManager
from quire.core.tokens import INT32
from quire.errors import OutOfBlocks
from quire.ops import resize
from quire.scheduling import Job, Scheduler, Step, StepPace
from quire_sim.caches.asking import CacheHit, answer_times
from quire_sim.caches.logged_jobs import LoggedJob
from quire_sim.caches.prompts import CachePrompt
from quire_sim.caches.tracking import TrackedCache

FIRST_BLOCKS = 1 << 10
"""Blocks that a pool without a limit begins with."""

BEFORE_S = 0.005
"""Requests sent so shortly before a step begins may miss it; the time of their answer decides."""

BEHIND_S = 0.02
"""Requests sent so shortly behind the last step's answers may be in the next step."""

LATER_S = 0.05
"""Seconds by which an answer begins later than others of its step at most."""

AHEAD_S = 2.0
"""A request that waits is overtaken by those that are sent up to so many seconds behind it."""

SAME_S = 0.004
"""Answers of one step begin within so many seconds."""

STEP_S = 0.25
"""Seconds that a step may take, as `quire serve --max-inter-token` has it by default."""


class KernelCache(TrackedCache):
    """A `CacheManager` under the engine's `Scheduler`, whose steps end when the log's answers begin or end.

    A step with prompts has the requests whose answers begin together. Between prompts a step decodes all tokens up to
    the next event at once, as accepted drafts. Without `num_blocks` the pool grows before any block would be evicted.
    """

    def __init__(self, num_blocks: int | None = None, block_size: int = 16) -> None:
        super().__init__()
        self._now = 0.0
        self.manager = CacheManager(num_blocks or FIRST_BLOCKS, block_size, clock=lambda: self._now)
        self._grows, self._open_blocks = num_blocks is None, 0
        self._scheduler = Scheduler(self.manager, opened=self._note_hit)
        self._coming: list[LoggedJob] = []
        self._found: list[CacheHit] = []
        self._step: Step | None = None
        self._step_begin_s, self._step_end_s = 0.0, inf
        self._pace, self._is_timed = StepPace(STEP_S), False

    def add(self, number: int, prompt: CachePrompt) -> Iterator[CacheHit]:
        """Yield the hits of requests that start before this one is sent; without a time, its own too."""
        self._is_timed |= prompt.time_s is not None and bool(prompt.duration_s)
        if prompt.time_s is not None:
            self._coming.append(self._job(number, prompt))
            yield from self._run(prompt.time_s - BEHIND_S)
            return
        yield from self.rest()
        self._coming.append(LoggedJob(number, prompt))
        yield from self.rest()

    def rest(self) -> Iterator[CacheHit]:
        """Yield the hits of all other requests."""
        yield from self._run(inf)

    def _job(self, number: int, prompt: CachePrompt) -> LoggedJob:
        """Return a request as a job of the scheduler."""
        return LoggedJob(number, prompt)

    def _run(self, until: float) -> Iterator[CacheHit]:
        """Do steps that begin up to a time; all requests sent until `BEHIND_S` later are known."""
        while self._step is not None or self._coming:
            event_s = self._step_end_s
            if self._step is None:
                event_s = min(job.sent_s for job in self._starting())
            if event_s > until or not self._knows_all(event_s, until):
                break
            self._now = max(self._now, event_s)
            if self._step is not None:
                self._complete(self._step)
            self._queue_coming()
            self._plan()
        yield from self._found
        self._found.clear()

    def _knows_all(self, event_s: float, until: float) -> bool:
        """Whether all requests that could overtake those sent by then are known."""
        near = (each for each in self._coming if each.sent_s <= event_s + BEHIND_S)
        ends = (min(each.told_s, each.sent_s + AHEAD_S) for each in near if each.told_s < inf)
        return max(ends, default=event_s) <= until + BEHIND_S

    def _starting(self) -> list[LoggedJob]:
        """Return coming requests that none overtakes.

        A later one that has not started overtakes if it is answered sooner: the server had no room for this one before.
        """
        waiting = cast("list[LoggedJob]", self._scheduler.queues.waiting)
        others = sorted((*self._coming, *waiting), key=attrgetter("sent_s"))
        sent = [each.sent_s for each in others]
        least = list(accumulate((each.told_s for each in others), min))
        return [
            job
            for job in self._coming
            if job.told_s == inf
            or job.told_s - LATER_S <= least[bisect_right(sent, job.sent_s + AHEAD_S) - 1]
        ]

    def _queue_coming(self) -> None:
        """Queue the requests that the server has when it plans the next step."""
        now, queues = self._now, self._scheduler.queues
        near = [job for job in self._starting() if job.sent_s <= now + BEHIND_S]
        begun = cast("list[LoggedJob]", [*near, *queues.waiting, *queues.prefilling])
        told = [job.told_s for job in begun]
        told += [job.end_s for job in cast("list[LoggedJob]", queues.decoding)]
        answers_s = min((each for each in told if each > now), default=now)
        for job in near:
            if job.told_s == inf:
                is_here = job.sent_s <= now
            else:
                is_here = job.sent_s <= now - BEFORE_S or job.told_s <= answers_s + SAME_S
            if is_here:
                self._coming.remove(job)
                self._queue(job)

    def _queue(self, job: LoggedJob) -> None:
        self._grow(job)
        try:
            self._scheduler.add(job)
        except OutOfBlocks:  # larger than the pool: the server refuses it
            self._open_blocks -= self._most_blocks(job)
            size = self.manager.block_size
            self._found.append(self._hit(job.place, job.prompt, 0, size))

    def _grow(self, job: Job) -> None:
        """Note a request that comes; enlarge a pool without a limit until twice what all can hold is free."""
        (pool,) = self.manager.pools
        self._open_blocks += self._most_blocks(job)
        lacking = 2 * self._open_blocks - pool.num_free
        if self._grows and lacking > 0:
            resize(self.manager, {pool.name: pool.num_blocks + max(lacking, pool.num_blocks)})

    def _most_blocks(self, job: Job) -> int:
        """Return the blocks that a request can hold, one that is copied included."""
        return (job.prompt_len + job.max_tokens) // self.manager.block_size + 2

    def _plan(self) -> None:
        """Plan the next step and its end."""
        scheduler, self._step_begin_s = self._scheduler, self._now
        if self._is_timed:
            self._pace.before_step(scheduler)
        step = scheduler.plan(self._now)
        if step is not None:
            self._step_end_s = max(self._end_of(step), self._now)
            for job in cast("list[LoggedJob]", step.jobs[: step.num_decodes]):
                job.drafts = job.tokens_by(self._step_end_s)
            if step.num_decodes:
                step = scheduler.plan(self._now)
        self._settle()
        self._step = step

    def _settle(self) -> None:
        """End the requests that the scheduler gave up, and do the copies of a planned step."""
        for job, _ in self._scheduler.given_up:
            self._open_blocks -= self._most_blocks(job)
            self._ended(cast("LoggedJob", job).place)
        self._scheduler.given_up = []
        self.manager.take_copies()

    def _end_of(self, step: Step) -> float:
        jobs = cast("list[LoggedJob]", step.jobs)
        prompts = zip(jobs, step.lengths.tolist(), strict=True)
        ends = [
            self._now + (max(job.next_s, self._now) - self._now) * length / job.num_left
            for job, length in list(prompts)[step.num_decodes :]
        ]
        if not ends:  # until one ends, or the next one comes
            ends = [job.end_s for job in jobs]
            ends += [job.sent_s for job in self._coming if job.sent_s > self._now]
        return min(ends)

    def _complete(self, step: Step) -> None:
        """Give a step its tokens, and end the requests that have all of theirs."""
        jobs = cast("list[LoggedJob]", step.sampled)
        drafts = step.drafts or [()] * len(jobs)
        told = [
            job.answer[job.num_generated :][: len(each) + 1]
            for job, each in zip(jobs, drafts, strict=True)
        ]
        self._scheduler.complete(step, told if step.drafts else np.array(told, INT32).ravel())
        if len(step.jobs) > step.num_decodes and self._now > self._step_begin_s:
            self._pace.observe(step, self._now - self._step_begin_s)
        for job in jobs:
            self._computed(job.place)
            if job.num_generated == job.max_tokens:
                self._scheduler.finish(job)
                self._open_blocks -= self._most_blocks(job)
                self._ended(job.place)

    def _note_hit(self, job: Job) -> None:
        """Note the hit of a request that starts for the first time, and when its answer comes."""
        if job.num_preempted:
            return
        job = cast("LoggedJob", job)
        size = self.manager.block_size
        hit = self._hit(job.place, job.prompt, job.num_found, size)
        self._found.append(hit)
        prefill_s, whole_s = answer_times(job.prompt, hit)
        sent_s = self._now if job.prompt.time_s is None else job.sent_s
        job.first_s, job.end_s = sent_s + prefill_s, sent_s + whole_s
