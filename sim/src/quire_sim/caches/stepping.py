"""The cache of `quire serve` by the steps that its answers tell."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush
from math import inf
from typing import Any, cast

from quire.scheduling import Job, Scheduler, Step
from quire_sim.caches.asking import CacheHit
from quire_sim.caches.kernel import BEHIND_S, KernelCache
from quire_sim.caches.logged_jobs import LoggedJob, SteppedJob
from quire_sim.caches.prompts import CachePrompt


class ToldScheduler(Scheduler):
    """A `Scheduler` whose steps start requests, and compute so much of their prompts, as these tell.

    `number`  of the step that is planned next
    """

    number = 0

    def plan_told(self, now: float) -> Step | None:
        """Return the step of this number, with room reserved for all of it; None without work."""
        self._num_steps, queues = self.number - 1, self.queues
        jobs = [*queues.waiting, *queues.prefilling]
        told = [job.part(self.number) for job in jobs if isinstance(job, SteppedJob)]
        self.prompt_tokens = self.limits.max_step_tokens
        if any(tokens and left for tokens, left in told):  # it was full
            self.prompt_tokens = min(sum(tokens for tokens, _ in told), self.prompt_tokens)
        return self.plan(now)

    def _can_start(self, tenant: Any, job: Job) -> bool:
        can = super()._can_start(
            tenant, job
        )  # those that yield to it do so though others of them do not
        if can and isinstance(job, SteppedJob) and not job.may_start(self.number):
            self._room_seen = None  # it is looked at again, though no room comes
            return False
        return can

    def _cut(self, job: Job, budget: int, parts: dict[Job, int]) -> int:
        if isinstance(job, SteppedJob):
            budget = min(budget, job.tokens_in(self.number) - parts.get(job, 0))
        return super()._cut(job, budget, parts)


class SteppedCache(KernelCache):
    """A `KernelCache` that does the steps of the log's server, as far as answers tell them.

    A told request comes, starts and is computed in its told steps. The scheduler decides all else: what is found and
    evicted, and who is preempted. Requests without steps are there once a told request starts or ends behind them; with
    no told request in flight, the times decide. Another engine begins with an empty cache.
    """

    def __init__(self, num_blocks: int | None = None, block_size: int = 16) -> None:
        super().__init__(num_blocks, block_size)
        self._scheduler = self._steps = ToldScheduler(self.manager, opened=self._note_hit)
        self._told: list[SteppedJob] = []
        self._engines: list[str] = []
        self._server_s = -inf  # the time of the step, by the log's clock
        self._known = 0  # the last step of which all requests are known
        self._ends: list[tuple[float, int]] = []  # when requests ended, and with which step
        self._is_stuck = False

    def add(self, number: int, prompt: CachePrompt) -> Iterator[CacheHit]:
        """Yield the hits of requests that start before this one is sent; without a time, its own too."""
        if prompt.steps is not None and prompt.steps.engine not in self._engines:
            if self._engines:
                yield from self.rest()
                self.manager.reset()
                self._steps.number = self._known = 0
                self._ends.clear()
            self._engines.append(prompt.steps.engine)
        yield from super().add(number, prompt)

    def _job(self, number: int, prompt: CachePrompt) -> LoggedJob:
        if prompt.steps is None or prompt.steps.engine != self._engines[-1]:
            return super()._job(number, prompt)
        job = SteppedJob(number, prompt)
        self._told.append(job)
        heappush(self._ends, (job.known_s, job.steps.last_step))
        return job

    def _run(self, until: float) -> Iterator[CacheHit]:
        while self._ends and self._ends[0][0] <= until + BEHIND_S:
            self._known = max(self._known, heappop(self._ends)[1])
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
        after = self._steps.number
        nexts = [job.next_step(after) for job in self._told]
        told = [each for each in nexts if each is not None]
        number = min(told, default=after + 1)
        if None in nexts and not self._is_stuck:
            number = after + 1
        in_it = (job.known_s for job in self._told if job.next_step(after) in {number, None})
        if number > self._known and min(in_it) > until:
            return False
        if self._step is not None:
            self._complete(self._step)
            self._step = None
        while (left := number - 1 - self._steps.number) and self._scheduler.queues.num_running:
            if not self._does(self._num_at_once(left)):
                break
        self._steps.number = number - 1
        self._is_stuck = not self._does(1)
        return True

    def _num_at_once(self, most: int) -> int:
        """Return how many of the next steps can be done at once: those that decode alone, with room for all."""
        queues, size = self._scheduler.queues, self.manager.block_size
        if queues.num_waiting or queues.num_prefilling or not queues.decoding:
            return 1
        (pool,), most = self.manager.pools, min(most, self._most_drafts())
        ends = ((job, job.num_computed + most + 1) for job in queues.decoding)
        lacking = sum(max(-(-end // size) - job.open_seq.num_blocks, 0) for job, end in ends)
        return most if lacking <= pool.num_available else 1

    def _most_drafts(self) -> int:
        return self._scheduler.limits.max_step_tokens // len(self._scheduler.queues.decoding) or 1

    def _does(self, num_steps: int) -> bool:
        """Do steps at once, of which the last one alone computes prompts; return whether there was any to do."""
        steps, queues = self._steps, self._scheduler.queues
        steps.number += num_steps
        self._queue_come()
        for job in cast("list[LoggedJob]", queues.decoding):
            if isinstance(job, SteppedJob):
                job.drafts = job.tokens_through(steps.number, num_steps)
            else:
                job.drafts = job.answer[job.num_generated :][: num_steps - 1]
        step = steps.plan_told(
            self._now
        )  # once: each plan counts for what the oldest prompt is owed
        self._settle()
        self._step_begin_s = self._now
        if step is not None:
            self._complete(step)
        coming, told = {*self._coming}, self._told
        self._told = [job for job in told if job in coming or job.state in {"waiting", "running"}]
        for job in told:
            if job.state == "finished":
                self._server_s = max(self._server_s, job.known_s)
        return step is not None

    def _queue_come(self) -> None:
        """Queue the requests that the server has when it plans the next step."""
        number = self._steps.number
        for job in self._told:
            if job.started is None and job.steps.prompts[0][0] == number:
                self._server_s = max(self._server_s, job.queued_s)
        self._now = max(self._now, self._server_s)
        told = [job for job in self._told if job.state == "new" and job.steps.arrived_step < number]
        others = [job for job in self._coming if not isinstance(job, SteppedJob)]
        told.sort(key=lambda job: job.steps.arrived_s)
        for job in [*told, *(job for job in others if job.sent_s <= self._server_s)]:
            self._coming.remove(job)
            self._queue(job)
