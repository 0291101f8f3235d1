"""The cache of `quire serve` by the steps that its answers tell."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from typing import cast

from quire_sim.caches.asking import CacheHit
from quire_sim.caches.kernel import BEHIND_S, KernelCache
from quire_sim.caches.logged_jobs import LoggedJob, SteppedJob
from quire_sim.caches.prompts import CachePrompt

NEVER = 1 << 62
"""The step before which a request that the server started later is not admitted."""


class SteppedCache(KernelCache):
    """A `KernelCache` that does the steps of the log's server, as far as answers tell them.

    A told request starts in its told step, and each step computes as many tokens of prompts as are told. The scheduler
    decides all else. Requests without steps are there once a told step begins behind them; without any told request in
    flight, the times decide. Another engine begins with an empty cache.
    """

    def __init__(self, num_blocks: int | None = None, block_size: int = 16) -> None:
        super().__init__(num_blocks, block_size)
        self._told: list[SteppedJob] = []
        self._number = 0
        self._engines: list[str] = []
        self._server_s, self._ahead_s = -inf, inf  # the server's clock, and what it is ahead of the log's

    def add(self, number: int, prompt: CachePrompt) -> Iterator[CacheHit]:
        """Yield the hits of requests that start before this one is sent; without a time, its own too."""
        if prompt.steps is not None and prompt.steps.engine not in self._engines:
            if self._engines:
                yield from self.rest()
                self.manager.reset()
                self._number, self._server_s, self._ahead_s = 0, -inf, inf
            self._engines.append(prompt.steps.engine)
        yield from super().add(number, prompt)

    def _job(self, number: int, prompt: CachePrompt) -> LoggedJob:
        steps = prompt.steps
        if steps is None or prompt.time_s is None or steps.engine != self._engines[-1]:
            return super()._job(number, prompt)
        job = SteppedJob(number, prompt)
        self._ahead_s = min(self._ahead_s, steps.arrived_s - job.sent_s)
        self._told.append(job)
        return job

    def _run(self, until: float) -> Iterator[CacheHit]:
        while self._told and self._does_next(until + BEHIND_S):
            pass
        if self._told:
            yield from self._found
            self._found.clear()
            return
        if self._step is None and len(self._scheduler):
            self._plan()
        yield from super()._run(until)

    def _does_next(self, until: float) -> bool:
        """Do the next step that any request tells, and those before it; False if one sent later may be in it."""
        nexts = [job.next_step(self._number) for job in self._told]
        number = min(nexts)
        in_it = (job for job, each in zip(self._told, nexts, strict=True) if each == number)
        if min(job.known_s for job in in_it) > until:
            return False
        if self._step is not None:
            self._complete(self._step)
            self._step = None
        if number > self._number + 1 and self._scheduler.queues.num_running:
            self._do(number - 1)
        self._do(number)
        return True

    def _do(self, last: int) -> None:
        """Do the steps up to one at once, of which it alone computes told prompts."""
        scheduler, self._number = self._scheduler, last
        self._queue_come()
        scheduler.prompt_tokens = max(self._prompt_tokens(), 1)
        for job in cast("list[LoggedJob]", scheduler.queues.decoding):
            is_told = isinstance(job, SteppedJob)
            job.drafts = job.tokens_through(last) if is_told else job.tokens_by(self._now)
        step = scheduler.plan(self._now)  # once: each plan counts for what the oldest prompt is owed
        self._settle()
        self._step_begin_s = self._now
        if step is not None:
            self._complete(step)
        coming, told = {*self._coming}, self._told
        self._told = [job for job in told if job in coming or job.state in {"waiting", "running"}]
        for job in told:
            if job.state == "finished":
                self._server_s = max(self._server_s, job.steps.arrived_s + job.steps.answered_s)

    def _queue_come(self) -> None:
        """Queue the requests that the server has when it plans the next step."""
        for job in self._coming:
            if isinstance(job, SteppedJob) and job.next_step(0) <= self._number:
                self._server_s = max(self._server_s, job.steps.arrived_s + job.steps.queued_s)
        if self._ahead_s < inf:
            self._now = max(self._now, self._server_s - self._ahead_s)
        come = [job for job in self._coming if self._arrived_s(job) <= self._server_s]
        for job in sorted(come, key=self._arrived_s):
            self._coming.remove(job)
            self._queue(job)

    def _arrived_s(self, job: LoggedJob) -> float:
        """Return when the server took a request, by its clock."""
        return job.steps.arrived_s if isinstance(job, SteppedJob) else job.sent_s + self._ahead_s

    def _prompt_tokens(self) -> int:
        """Return the tokens of prompts in the next step; requests that start later are held back from it."""
        queues, num_tokens = self._scheduler.queues, 0
        for job in [*queues.waiting, *queues.prefilling]:
            num_left = job.num_left
            if job.state == "waiting":
                num_left -= self.manager.probe(job.known(), job.scope).num_tokens
            if isinstance(job, SteppedJob):
                job.back_at = NEVER if job.next_step(self._number - 1) > self._number else 0
                num_left = job.tokens_in(self._number, num_left) if not job.back_at else 0
            num_tokens += num_left
        return num_tokens
