"""The scheduler: continuous batching with chunked prefill over one cache manager."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from contextlib import suppress
from itertools import chain
from math import inf
from typing import TypeAlias

import numpy as np

from quire.core import CacheManager, DecodeBatch
from quire.core.terms import terms_of
from quire.core.tokens import IntArray
from quire.errors import (
    CopyError,
    DeadlinePassed,
    InvariantError,
    OutOfBlocks,
    QueueTimeout,
    QuireError,
    SequenceError,
)
from quire.ops import fits
from quire.scheduling.admission import check_fits, granted, has_leader, has_room
from quire.scheduling.job import BY_RANK, Job, Limits
from quire.scheduling.step import Step

LOOK_AHEAD = 8
"""So many waiting jobs that find no room are looked at before admission ends."""

Hook: TypeAlias = Callable[[Job], None]


class Scheduler:
    """Plans each step: admission, parts of prompts, preemption.

    `bring_up`  called before a job's blocks are looked up, so that tiers can restore some
    `opened`    called when a job's sequence was opened, or resumed; K and V that it commits are not computed
    `keep`      called before a job's sequence gives its blocks back, so that tiers can store some

    Every job of it is in one of three lists, the first two by rank; in the last two its sequence is open:

        waiting -- plan --> prefilling -- complete --> decoding -- finish --> finished
           ▲                    │                         │
           └──── preempted ─────┴─────────────────────────┘

        plan(now) -> step; manager.take_copies(), done; the forward; complete(step, sampled); finish(job) ...

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
        self.manager = manager
        self.limits = limits or Limits()
        self.waiting: list[Job] = []
        self.prefilling: list[Job] = []
        self.decoding: list[Job] = []
        self.given_up: list[tuple[Job, QuireError]] = []
        self._bring_up, self._opened, self._keep = bring_up, opened, keep
        self._num_jobs = 0
        self._next_deadline, self._now = inf, 0.0
        self._batch: DecodeBatch | None = None
        self._appends: list[Callable[[int], None]] = []  # of the tokens of those in the batch
        self._step: Step | None = None
        self._next: Step | None = None
        self._room_seen: list[int] | None = None  # by jobs that wait still; None: to be looked at

    @property
    def num_running(self) -> int:
        return len(self.prefilling) + len(self.decoding)

    def __len__(self) -> int:
        """Jobs that are not finished."""
        return len(self.waiting) + self.num_running

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

    def finish(self, job: Job) -> None:
        """End a job at whatever point it is. Raises `SequenceError` if it is none of the jobs here."""
        self._leave(job)
        if job.seq is not None:
            self.manager.close(job.seq)
        job.seq, job.state = None, "finished"

    def plan(self, now: float = 0.0) -> Step | None:
        """Return the next step, with room reserved for all of it; None without work.

        `now`  seconds on the clock of the deadlines
        """
        self._step, self._now = None, now
        if now >= self._next_deadline:
            self._give_up_late(now)
        self._reserve_decodes()
        budget = self.limits.max_step_tokens - len(self.decoding)
        drafts = self._take_drafts(budget)
        budget -= sum(map(len, drafts.values()))
        parts: dict[Job, int] = {}
        for job in self.prefilling.copy():
            budget -= self._cut(job, budget, parts)
        if self.waiting:
            self._admit(budget, parts)
        if self._next is not None and not drafts and not parts:
            self._step = self._next
        elif self.decoding or parts:
            self._step = Step(self.decoding, drafts, parts)
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
        if new and not is_decoding:
            self.prefilling.remove(job)
            self._begin_decoding(job)
            for twin in job.twins:
                twin.tokens.extend(results[twin])
                self._fork(job, twin)
            job.twins = ()

    def _fork(self, job: Job, twin: Job) -> None:
        """Have a twin share the blocks of a job that begins to decode; where it finds no slot, it waits."""
        twin.num_found, twin.start_by = job.num_found, inf
        self._enter(twin)
        if self.num_running < self.limits.max_running:
            with suppress(OutOfBlocks):
                twin.seq = self.manager.fork(job.open_seq)
                self.waiting.remove(twin)
                self._begin_decoding(twin)

    def _begin_decoding(self, job: Job) -> None:
        job.state = "running"
        self.decoding.append(job)
        self._batch = self._next = None

    # -- room ------------------------------------------------------------------------------

    def _reserve_decodes(self) -> None:
        """Reserve a token for every job that decodes; where there is no room, the last ones are preempted."""
        while self.decoding:
            if self._batch is None:
                self._batch = self.manager.batch([job.open_seq for job in self.decoding])
                self._appends = [job.tokens.append for job in self.decoding]
            try:
                self.manager.reserve_step(self._batch)
                break
            except OutOfBlocks as error:
                self._make_way(error)

    def _take_drafts(self, budget: int) -> dict[Job, IntArray]:
        """Reserve room for drafts, as far as there is any; those that find none are left out."""
        taken: dict[Job, IntArray] = {}
        for job in self.decoding:
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
        wanted = min(budget, self.limits.max_prefill_tokens or budget, job.num_left)
        while budget > 0 and job.state == "running":
            num_tokens = granted(self.manager, job, wanted)
            if not num_tokens and (parts or self.decoding):
                break
            try:
                self.manager.reserve(job.open_seq, num_tokens or 1)
            except OutOfBlocks as error:
                self._make_way(error)
            else:
                parts[job] = num_tokens
                return num_tokens
        return 0

    def _make_way(self, error: OutOfBlocks) -> None:
        """Preempt the job that ranks last; if it is the only one, it is given up."""
        job = max(chain(self.prefilling, self.decoding), key=BY_RANK)
        if self.num_running == 1:
            self._give_up(job, error)
            return
        self._leave(job)
        self.manager.suspend(job.open_seq)
        job.state = "waiting"
        job.num_preempted += 1
        insort(self.waiting, job, key=BY_RANK)

    # -- admission -------------------------------------------------------------------------

    def _admit(self, budget: int, parts: dict[Job, int]) -> None:
        """Admit waiting jobs in order of rank; those that find no room, or wait for a prefix, are passed.

        Nobody is looked at again before a job came, went or was computed further, or blocks became free.
        """
        room = [pool.num_available for pool in self.manager.pools]
        seen, self._room_seen = self._room_seen, room
        if seen is not None and self.num_running and not any(map(int.__gt__, room, seen)):
            return
        at, look = 0, LOOK_AHEAD
        while at < len(self.waiting) and look and self.num_running < self.limits.max_running:
            if budget <= 0:
                self._room_seen = None
                break
            if not self.waiting[0].patience:
                at = 0
            job = self.waiting[at]
            if has_leader(self.manager, job, self.prefilling) or not self._has_room(job):
                if not job.patience:
                    break
                look -= job.behind is None
                at += 1
                continue
            self._start(job)
            budget -= self._cut(job, budget, parts)

    def _has_room(self, job: Job) -> bool:
        """Whether all its known tokens find room beside what is promised; where nothing runs there is nothing to wait for."""
        share = self.limits.watermark
        return not self.num_running or has_room(self.manager, job, self.prefilling, share)

    def _start(self, job: Job) -> None:
        """Begin to compute a waiting job; who came before it and waits loses patience, and at last ranks first."""
        if self._bring_up is not None:
            self._bring_up(job)
        if job.seq is not None:
            self.manager.resume(job.seq)
        else:
            job.seq = self.manager.open(job.known(), job.scope, **job.terms)
            job.num_found = min(job.seq.num_cached, job.prompt_len)
            job.missed = job.seq.pending and job.seq.pending.missed
        self.waiting.remove(job)
        job.start_by = inf
        job.started = self._now if job.started is None else job.started
        passed = [other for other in self.waiting if other.number < job.number]
        for other in passed:
            other.patience -= 1
        if not all(other.patience for other in passed):
            self.waiting.sort(key=BY_RANK)
        job.state = "running"
        insort(self.prefilling, job, key=BY_RANK)
        if self._opened is not None:
            self._opened(job)

    # -- ends ------------------------------------------------------------------------------

    def _give_up_late(self, now: float) -> None:
        jobs = [*self.waiting, *self.prefilling, *self.decoding]
        for job in jobs:
            if job.deadline <= now:
                late = f"{job.num_generated} of {job.max_tokens} tokens were there at the deadline"
                self._give_up(job, DeadlinePassed(f"{late}; allow more time, or send less at once"))
            elif job.start_by <= now:
                late = f"it waited behind {self.num_running} that run, and its turn had not come"
                self._give_up(job, QueueTimeout(f"{late}; ask again later"))
        self._next_deadline = min((job.ends_by for job in jobs if job.ends_by > now), default=inf)

    def _give_up(self, job: Job, error: QuireError) -> None:
        self.finish(job)
        self.given_up.append((job, error))

    def _leave(self, job: Job) -> None:
        """Take a job out of where it is; the sequence of one that runs is still open."""
        places = (self.waiting, self.prefilling, self.decoding)
        place = next((jobs for jobs in places if job in jobs), None)
        if place is None:
            raise SequenceError(f"{job!r} is none of the jobs here")
        if place is not self.waiting:
            if self._keep is not None:
                self._keep(job)
            self._batch = self._next = None
        place.remove(job)
        self._room_seen = None

    # -- more ------------------------------------------------------------------------------

    def _enter(self, job: Job) -> None:
        """Number a job and queue it."""
        self._num_jobs += 1
        job.number, job.patience, job.state = self._num_jobs, self.limits.max_passed, "waiting"
        insort(self.waiting, job, key=BY_RANK)
        self._room_seen = None
        self._next_deadline = min(self._next_deadline, job.ends_by)

    def check(self) -> None:
        """Raise `InvariantError` unless every job is in one queue, in order, with its sequence in the right state."""
        for jobs, state in ((self.waiting, "waiting"), (self.prefilling, "running")):
            if jobs != sorted(jobs, key=BY_RANK) or any(job.state != state for job in jobs):
                raise InvariantError(f"jobs out of order, or in another state than {state}: {jobs}")
        for job in self.decoding:
            if job.state != "running" or job.num_left != 1:
                raise InvariantError(f"{job!r} decodes with {job.num_left} tokens to compute")
        for job in self.waiting:
            if job.seq is not None and job.seq.state != "suspended":
                raise InvariantError(f"{job!r} waits with an open sequence")
        if self._batch is not None and [job.seq for job in self.decoding] != [*self._batch.seqs]:
            raise InvariantError("the batch is not of the jobs that decode")
