"""The scheduler: continuous batching with chunked prefill over one cache manager."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Items
from contextlib import suppress
from heapq import heapify, heappop, heappush
from math import inf

import numpy as np

from quire.core import CacheManager
from quire.core.room import least
from quire.core.terms import terms_of
from quire.core.tokens import IntArray
from quire.errors import (
    CopyError,
    DeadlinePassed,
    InvariantError,
    OutOfBlocks,
    QueueTimeout,
    SequenceError,
)
from quire.scheduling.admission import check_fits, has_leader, is_held_back, lacking
from quire.scheduling.fairness import yielding
from quire.scheduling.job import BY_RANK, Job, Limits
from quire.scheduling.queues import Tenant, Turn
from quire.scheduling.room import Hook, Room
from quire.scheduling.step import Step
from quire.scope import ScopePart

LOOK_AHEAD = 8
"""The number of waiting jobs without room that an admission looks at; of each tenant it looks at one at least."""

MOST_LOOKS = 64
"""The number of waiting jobs without room behind which an admission ends, however many tenants there are."""

MOST_PASSED = 64
"""The number of jobs within their tenants' shares that pass an overdue one larger than its own; then nobody does."""

MAX_BACK = 6
"""2 to the power of this: the most steps that a job which yielded to another one stays away."""


class Scheduler(Room):
    """Plans each step: admission, parts of prompts, preemption.

    `bring_up`  called before a job's blocks are looked up, so that tiers can restore some
    `opened`    called when a job's sequence was opened, or resumed; K and V that it commits are not computed
    `keep`      called before a job's sequence gives its blocks back, so that tiers can store some

    Jobs are divided by tenant, and each of them is in one of three lists, the first two by rank; in the last two its
    sequence is open:

        waiting -- plan --> prefilling -- complete --> decoding -- finish --> finished
           ▲                    │                         │
           └──── preempted ─────┴─────────────────────────┘

        plan(now) -> step; manager.take_copies(), done; the forward; complete(step, sampled); finish(job) ...

    `prompt_tokens`  most tokens of prompts in a step, from 1, within the limits: set before it is planned
    `scored_tokens`  most of these of prompts that are scored, from 1
    `given_up`  jobs that ended by themselves and why: `DeadlinePassed`, or `OutOfBlocks` though nothing else ran;
                the caller takes them away
    It has no clock and no random numbers: the same calls make the same steps. `plan` begins anew when a step was not
    completed. It belongs to the manager's thread.
    """

    def __init__(
        self,
        manager: CacheManager,
        limits: Limits | None = None,
        *,
        bring_up: Hook | None = None,
        opened: Hook | None = None,
        keep: Hook | None = None,
    ) -> None:
        super().__init__(manager, limits or Limits(), keep)
        self.prompt_tokens = self.limits.max_step_tokens
        self._bring_up, self._opened = bring_up, opened
        self._num_jobs = self._num_steps = 0
        self._next_deadline, self._now = inf, 0.0
        self._step: Step | None = None

    def __len__(self) -> int:
        """Jobs that are not finished."""
        return self.queues.num_waiting + self.queues.num_running

    def add(self, job: Job) -> None:
        """Queue a job.

        Raises `SequenceError` for one that was added before, or whose twins have other tokens, `ConfigError`, and
        `OutOfBlocks` if no empty pool could hold it.
        """
        for each in (job, *job.twins):
            if each.state != "new":
                raise SequenceError(f"{each!r} was added before; make a new job")
            if each.tokens != job.tokens:
                raise SequenceError(f"{each!r} has another prompt than its twin {job!r}")
        terms_of(self.manager.settings.clock, job.terms)
        check_fits(self.manager, job)
        self._enter(job)

    def plan(self, now: float = 0.0) -> Step | None:
        """Return the next step, with room reserved for all of it; None without work.

        `now`  seconds on the clock of the deadlines
        """
        self._step, self._now = None, now
        if is_late := now >= self._next_deadline:
            self._end_late()
        queues, most = self.queues, self.limits.max_step_tokens
        self._take_turn()
        if queues.num_waiting:
            self._admit(min(most - len(queues.decoding), self.prompt_tokens))
        if is_late:
            self._end_waits()
        tried = set[ScopePart]()
        while self._compose(most) is None and queues.turns.keys() - (
            tried := tried | {queues.adapter}
        ):
            self._take_turn()  # those of that adapter have no room, or none of them runs
        return self._step

    def _take_turn(self) -> None:
        """Have the next adapter take its turn, and reserve room for its jobs that decode."""
        if self.queues.turns.keys() - {self.queues.adapter}:
            self.queues.take_turn()
            self._batch = self._next = None
        self._reserve_decodes()

    def _compose(self, most: int) -> Step | None:
        """Return the step of the adapter that has its turn, with room reserved; None for nothing to compute."""
        queues, parts = self.queues, dict[Job, int]()
        if queues.num_prefilling:
            self._divide(min(most - len(queues.decoding), self.prompt_tokens), parts)
        drafts = self._take_drafts(most - len(queues.decoding) - sum(parts.values()))
        if self._next is not None and not drafts and not parts:
            self._step = self._next
        elif queues.decoding or parts:
            self._step = Step(queues.decoding, drafts, parts)
        return self._step

    def complete(self, step: Step, sampled: Items[IntArray] | IntArray) -> None:
        """Take the results of a step: its tokens have KV, and these tokens follow.

        `sampled`  int32 [S], one for each of `step.samples`; with drafts S arrays, of accepted drafts and one token more
        Jobs that ended since the plan are passed over. Raises `SequenceError`, `TokensError`, `CopyError`, and changes nothing.
        """
        if step is not self._step:
            raise SequenceError(f"{step!r} is not the step planned last, or was completed before")
        new = step.results(sampled)
        if self.manager.kernel.copies:
            raise CopyError("blocks wait for copies; take_copies() and do them before the forward")
        self._step = self._next = None
        self._num_steps += 1
        num_batched = 0
        if isinstance(new, np.ndarray):
            tokens: list[int] = new.tolist()
            if self._batch is not None:
                num_batched = step.num_decodes
                self.manager.commit_step(self._batch, step.tokens[:num_batched])
                for append, token in zip(self._appends, tokens, strict=False):
                    append(token)
                if num_batched == len(step.jobs):
                    self._next = step.next(new)
                    return
            new = [[token] for token in tokens]
        self._room_seen = None
        results = dict(zip(step.sampled, new, strict=True))
        for at in range(num_batched, len(step.jobs)):
            if step.jobs[at].state == "running":
                self._complete_one(step, at, results)

    def _complete_one(self, step: Step, at: int, results: Mapping[Job, list[int]]) -> None:
        """Commit the tokens of one job, of drafts those accepted; it decodes once all that is known of it is computed."""
        job, start = step.jobs[at], int(step.starts[at])
        new, is_decoding = results.get(job, []), at < step.num_decodes
        end = start + (len(new) if is_decoding else int(step.lengths[at]))
        job.tokens.extend(new)
        self.manager.commit(job.open_seq, job.known(start, end))
        job.num_scored = max(job.num_scored, min(end, job.prompt_len - 1))
        if not is_decoding:
            self.queues.tenant(job).num_prefilled += end - start
        if new and not is_decoding:
            self.queues.take(job)
            self._begin_decoding(job)
            for twin in job.twins:
                twin.tokens.extend(results[twin])
                self._fork(job, twin)
            job.twins = ()

    def _fork(self, job: Job, twin: Job) -> None:
        """Have a twin share the blocks of a job that begins to decode; where it finds no slot, it waits."""
        twin.num_found, twin.start_by = job.num_found, inf
        self._enter(twin)
        if self.queues.num_running < self.limits.max_running:
            with suppress(OutOfBlocks):
                twin.seq = self.manager.fork(job.open_seq)
                self.queues.take(twin)
                self._begin_decoding(twin)

    # -- admission -------------------------------------------------------------------------

    def _admit(self, budget: int) -> None:
        """Admit waiting jobs: by priority, then of the tenant with the fewest that run, then by rank.

        Those that find no room, or wait for a prefix, are passed; so are those behind prompts that use up their tenant's
        share. Nobody is looked at again before a job came, went or was computed further, or blocks became free.
        """
        room = [pool.num_available for pool in self.manager.pools]
        seen, self._room_seen = self._room_seen, room
        tenants = self.queues.tenants.values()
        if seen is not None and self.queues.num_running and not any(map(int.__gt__, room, seen)):
            return
        share = budget / sum(bool(tenant.waiting or tenant.prefilling) for tenant in tenants)
        waiting = [tenant for tenant in tenants if tenant.waiting]
        most_each, most = max(LOOK_AHEAD // len(waiting), 1), MOST_LOOKS
        looks, overdue = Counter[Tenant](), list[Tenant]()
        queue: list[Turn] = [
            Turn(tenant.turn(0), number, 0, tenant) for number, tenant in enumerate(waiting)
        ]
        heapify(queue)
        while queue and most:
            turn, number, at, tenant = heappop(queue)
            at = at if tenant.waiting[0].patience else 0
            if (now := tenant.turn(at)) > turn:
                heappush(queue, Turn(now, number, at, tenant))
                continue
            job, num_running = tenant.waiting[at], self.queues.num_running
            if job.patience and self._num_steps < job.back_at and num_running:
                self._room_seen = None
                at += 1
            elif self._is_behind(tenant, job, share):
                self._room_seen = None
                at = len(tenant.waiting)
            elif any(self._goes_before(other, tenant, job) for other in overdue):
                at = len(tenant.waiting)
            elif self._can_start(tenant, job):
                self._start(tenant, job)
                if (
                    self.queues.num_running <= num_running
                ):  # others of fewer running ones come sooner
                    queue = [each._replace(turn=each.tenant.turn(each.at)) for each in queue]
                    heapify(queue)
            else:
                if job.behind is None:
                    looks[tenant] += 1
                    most -= 1
                if not tenant.patience > 0:
                    overdue.append(tenant)
                can_pass = job.patience and tenant.patience > 0 and looks[tenant] < most_each
                at = at + 1 if can_pass else len(tenant.waiting)
            while 0 < at < len(tenant.waiting) and is_held_back(tenant.waiting[at]):
                at += 1
            if at < len(tenant.waiting):
                heappush(queue, Turn(tenant.turn(at), number, at, tenant))
        if self._batch is None:
            self._reserve_decodes()

    def _goes_before(self, other: Tenant, tenant: Tenant, job: Job) -> bool:
        """Whether a tenant that is overdue keeps a job of another one waiting, which has its share, or passed it too often."""
        if tenant.priority(job) > other.priority(other.waiting[0]):
            return False
        return other.patience <= -MOST_PASSED or not self._is_in_share(tenant, job)

    def _is_behind(self, tenant: Tenant, job: Job, share: float) -> bool:
        """Whether a waiting job would compute nothing yet, as those before it need its tenant's share of a step."""
        most = self.limits.max_prefill_tokens or self.limits.max_step_tokens
        others = [each for each in tenant.prefilling if each.adapter == job.adapter]
        before = (min(each.num_left, most) for each in others if BY_RANK(each) < BY_RANK(job))
        return sum(before) >= share

    def _is_in_share(self, tenant: Tenant, job: Job) -> bool:
        """Whether a tenant has no more than its part of all blocks and places with a waiting job."""
        pools, num = self.manager.pools, len(self.queues.tenants)
        blocks = [0] * len(pools)
        for each in (job, *(each for each in self.queues.running if each.tenant == job.tenant)):
            blocks = [*map(int.__add__, blocks, least(self.manager.kernel, each.num_tokens))]
        has_slot = (tenant.num_running + 1) * num <= self.limits.max_running
        fits = (n * num <= pool.num_blocks for n, pool in zip(blocks, pools, strict=True))
        return has_slot and all(fits)

    def _can_start(self, tenant: Tenant, job: Job) -> bool:
        """Whether a waiting job finds a place and room, once running ones that yield to it were preempted.

        It has its own priority, or that of one that it holds up. One waits for another that computes its prefix. Where
        nothing runs there is nothing to wait for.
        """
        queues, priority = self.queues, tenant.priority(job)
        if has_leader(self.manager, job, tenant.prefilling):
            return False
        while queues.num_running:
            slots = queues.num_running + 1 - self.limits.max_running
            blocks = lacking(self.manager, job, queues.prefilling, self.limits.watermark)
            if slots <= 0 and blocks <= 0:
                break
            lacks, size = (slots, blocks), self.manager.block_size
            victims = yielding(job, priority, queues.running, lacks, size)
            if not victims:
                return False
            victim = victims[0]  # and then the next: others may read some of its blocks, too
            self._preempt(victim)
            victim.num_yielded += 1
            victim.back_at = self._num_steps + 2 ** min(victim.num_yielded, MAX_BACK)
        return True

    def _start(self, tenant: Tenant, job: Job) -> None:
        """Begin to compute a waiting job; who came before it and waits loses patience, and at last ranks first.

        So do tenants that have no more running jobs.
        """
        if self._bring_up is not None and not job.scores:
            self._bring_up(job)
        if job.seq is not None:
            self.manager.resume(job.seq)
        else:
            # Of one token nothing is found; the others are committed behind it.
            known = job.known(0, 1 if job.scores else None)
            job.seq = self.manager.open(known, job.scope, **job.terms)
            job.num_found = min(job.seq.num_cached, job.prompt_len)
            if job.seq.pending is not None and not job.scores:
                job.missed = job.seq.pending.missed
        job.start_by, job.urgency = inf, tenant.priority(job)
        job.started = self._now if job.started is None else job.started
        self.queues.take(job)
        self.queues.compute(job)
        lower = [other for other in tenant.prefilling if other.urgency < job.urgency]
        passed = [*tenant.waiting, *lower]
        passed = [other for other in passed if other.number < job.number and other.patience]
        for other in passed:
            other.patience -= 1
        if not all(other.patience for other in passed):
            tenant.waiting.sort(key=BY_RANK)
            tenant.prefilling.sort(key=BY_RANK)
        for other in self.queues.tenants.values():
            if other is not tenant and other.waiting and other.num_running < tenant.num_running:
                other.patience = max(other.patience - 1, -MOST_PASSED)
        job.is_overdue |= tenant.patience <= -MOST_PASSED
        tenant.patience = self.limits.max_passed
        if self._opened is not None:
            self._opened(job)

    # -- ends ------------------------------------------------------------------------------

    def _end_late(self) -> None:
        """Give up the jobs whose deadlines have passed."""
        for job in [*self.queues.waiting, *self.queues.running]:
            if job.deadline <= self._now:
                late = f"{job.num_generated} of {job.max_tokens} tokens were there at the deadline"
                self._give_up(job, DeadlinePassed(f"{late}; allow more time, or send less at once"))

    def _end_waits(self) -> None:
        """Give up the jobs that have waited too long, but those that are held back for one that computes their prefix."""
        for job in self.queues.waiting:
            prefilling = self.queues.tenant(job).prefilling
            if job.start_by <= self._now and not has_leader(self.manager, job, prefilling):
                late = f"it waited behind {self.queues.num_running} that run, and its turn had not come"
                self._give_up(job, QueueTimeout(f"{late}; ask again later"))
        jobs = [*self.queues.waiting, *self.queues.running]
        self._next_deadline = min((job.ends_by for job in jobs), default=inf)

    def _enter(self, job: Job) -> None:
        """Number a job and queue it: a short one before those of its tenant that had more left to compute."""
        self._num_jobs += 1
        job.number, job.patience = self._num_jobs, self.limits.max_passed
        found = 0 if job.scores else self.manager.probe(job.known(), job.scope).num_tokens
        job.num_due = job.num_tokens - found
        self.queues.wait(job)
        self._room_seen = None
        self._next_deadline = min(self._next_deadline, job.ends_by)

    def check(self) -> None:
        """Raise `InvariantError` unless every job is in one queue, in order, with its sequence in the right state."""
        self.queues.check()
        seqs = [job.seq for job in self.queues.decoding]
        if self._batch is not None and seqs != [*self._batch.seqs]:
            raise InvariantError("the batch is not of the jobs that decode")
