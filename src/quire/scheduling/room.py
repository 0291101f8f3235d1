"""Room: the tokens and blocks that running jobs get for a step, and the jobs preempted where blocks are short."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import TypeAlias

from quire.core import CacheManager, DecodeBatch
from quire.core.tokens import IntArray
from quire.errors import OutOfBlocks, QuireError
from quire.ops import fits
from quire.scheduling.admission import granted
from quire.scheduling.fairness import divided, last_of
from quire.scheduling.job import Job, Limits
from quire.scheduling.queues import JobQueues, Tenant
from quire.scheduling.step import Step

Hook: TypeAlias = Callable[[Job], None]

MOST_OWED = 4
"""A tenant's oldest prompt lags at most so many steps behind the half that it is owed of each one of its adapter."""


class Room:
    """The jobs of a schedule, with the blocks of those that run."""

    def __init__(self, manager: CacheManager, limits: Limits, keep: Hook | None) -> None:
        self.manager, self.limits = manager, limits
        self.queues = JobQueues(limits.max_passed)
        self.given_up: list[tuple[Job, QuireError]] = []
        self.scored_tokens = limits.max_step_tokens
        self._keep = keep
        self._batch: DecodeBatch | None = None
        self._appends: list[Callable[[int], None]] = []  # of the tokens of those in the batch
        self._next: Step | None = None
        self._room_seen: list[int] | None = None  # by jobs that wait still; None: to be looked at

    def finish(self, job: Job) -> None:
        """End a job at whatever point it is. Raises `SequenceError` if it is none of the jobs here."""
        self._leave(job)
        self.queues.forget(job)
        if job.seq is not None:
            self.manager.close(job.seq)
        job.seq, job.state = None, "finished"

    # -- within ----------------------------------------------------------------------------

    def _begin_decoding(self, job: Job) -> None:
        self.queues.decode(job)
        self._batch = self._next = None

    def _reserve_decodes(self) -> None:
        """Reserve a token for every job that decodes; where there is no room, the last ones are preempted."""
        while self.queues.decoding:
            if self._batch is None:
                self._batch = self.manager.batch([job.open_seq for job in self.queues.decoding])
                self._appends = [job.tokens.append for job in self.queues.decoding]
            try:
                self.manager.reserve_step(self._batch)
                break
            except OutOfBlocks as error:
                self._make_way(error)

    def _take_drafts(self, budget: int) -> dict[Job, IntArray]:
        """Reserve room for drafts, as far as there is any; those that find none are left out."""
        taken: dict[Job, IntArray] = {}
        for job in self.queues.decoding:
            if job.drafts is None:
                continue
            most = min(len(job.drafts), budget, job.max_tokens - job.num_generated - 1)
            drafts, job.drafts = job.drafts[: max(most, 0)], None
            if len(drafts) and fits(self.manager, job.open_seq, 1 + len(drafts)):
                self.manager.reserve(job.open_seq, 1 + len(drafts))
                taken[job] = drafts
                budget -= len(drafts)
        return taken

    def _cut(self, job: Job, budget: int, parts: dict[Job, int]) -> int:
        """Reserve as much of a prompt as this step has budget and room for, and return how many tokens that is.

        Where the step would compute nothing at all otherwise, the last jobs are preempted for it.
        """
        has = parts.get(job, 0)
        wanted = min(has + budget, self.limits.max_prefill_tokens or job.num_left, job.num_left)
        if job.scores:
            others = sum(part for each, part in parts.items() if each.scores and each is not job)
            wanted = min(wanted, self.scored_tokens - others)
        while wanted > has and job.state == "running":
            num_tokens = granted(self.manager, job, wanted)
            if num_tokens <= has and (parts or self.queues.decoding or self.queues.resting):
                break
            try:
                self.manager.reserve(job.open_seq, num_tokens or 1)
            except OutOfBlocks as error:
                self._make_way(error)
            else:
                parts[job] = num_tokens
                return num_tokens - has
        return 0

    def _divide(self, budget: int, parts: dict[Job, int]) -> None:
        """Divide the tokens of a step among prompts: by priority, then by tenant as evenly as can be, then by rank.

        A tenant's share has the tokens of its jobs that decode in it; what one leaves goes to the others.
        """
        queues: dict[int, dict[Tenant, list[Job]]] = {}
        tenants = self.queues.tenants.values()
        for tenant in sorted(tenants, key=attrgetter("num_prefilled")):
            for priority, job in tenant.by_priority():  # from the last one, which is popped last
                if job.adapter == self.queues.adapter:
                    queues.setdefault(priority, {}).setdefault(tenant, []).append(job)
        spent = {tenant: tenant.num_decoding for tenant in tenants}
        for priority in sorted(queues, reverse=True):
            left = queues[priority]
            while left and budget > 0:
                shares = divided(budget, [spent[tenant] for tenant in left])
                for (tenant, jobs), share in zip([*left.items()], shares, strict=True):
                    used = self._cut_each(jobs, share, parts)
                    budget -= used
                    spent[tenant] += used
                    if not jobs:
                        del left[tenant]

    def _cut_each(self, jobs: list[Job], share: int, parts: dict[Job, int]) -> int:
        """Give a tenant's prompts tokens of this step, and return how many; take away those that can use no more.

        The first by rank comes first. The oldest, of those of one adapter, is owed half of each share, as far as it can use
        it. It gets what it is owed beyond `MOST_OWED` shares before all others, however many shorter ones come meanwhile.
        """
        oldest, used = min(jobs, key=attrgetter("number")), 0
        had = parts.get(oldest, 0)
        half = min(share / 2, self.limits.max_prefill_tokens or share, oldest.num_left)
        oldest.num_owed = min(oldest.num_owed + half, (MOST_OWED + 1) * share)
        if (due := int(oldest.num_owed - MOST_OWED * share)) > 0:
            used = self._cut(oldest, min(due, share), parts)
        while jobs and used < share:
            used += self._cut(jobs[-1], share - used, parts)
            if used < share:
                jobs.pop()
        oldest.num_owed = max(oldest.num_owed - parts.get(oldest, 0) + had, 0)
        return used

    def _make_way(self, error: OutOfBlocks) -> None:
        """Preempt the job that is the last to be served; if it is the only one, it is given up."""
        job = last_of(self.queues.running)
        if self.queues.num_running == 1:
            self._give_up(job, error)
        else:
            self._preempt(job)

    def _preempt(self, job: Job) -> None:
        """Take a running job back among those that wait."""
        self._leave(job)
        self.manager.suspend(job.open_seq)
        job.num_preempted += 1
        self.queues.wait(job)

    def _give_up(self, job: Job, error: QuireError) -> None:
        self.finish(job)
        self.given_up.append((job, error))

    def _leave(self, job: Job) -> None:
        """Take a job out of where it is; the sequence of one that runs is still open."""
        place = self.queues.place(job)
        if place != "waiting":
            if self._keep is not None:
                self._keep(job)
            self._batch = self._next = None
        self.queues.take(job)
        self._room_seen = None
