"""The scheduler: continuous batching with chunked prefill over one cache manager."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from collections.abc import Sequence as Items
from contextlib import suppress
from itertools import chain
from math import inf
from typing import TypeAlias

import numpy as np

from quire.core import CacheManager, DecodeBatch, Sequence
from quire.core.terms import terms_of
from quire.core.tokens import INT32, IntArray, array_of, check_sign, key_of
from quire.errors import (
    CopyError,
    DeadlinePassed,
    InvariantError,
    OutOfBlocks,
    QuireError,
    SequenceError,
)
from quire.scheduling.job import BY_RANK, Job, Limits
from quire.scheduling.queue import JobQueue, has_leader
from quire.scheduling.room import check_fits, fit_of, granted, has_room
from quire.scheduling.step import Step

LOOK_AHEAD = 8
"""So many waiting jobs that find no room are looked at before admission ends."""

Hook: TypeAlias = Callable[[Job], None]


class Scheduler:
    """Decides what each step computes: who is admitted, which parts of prompts, who is preempted.

    `bring_up`  called before a job's blocks are looked up, so that tiers can restore some
    `keep`      called before a job's sequence gives its blocks back, so that tiers can store some

    Every job of it is in one of three places, in `decoding` and `prefilling` with an open sequence:

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
        keep: Hook | None = None,
    ) -> None:
        self.manager = manager
        self.limits = limits or Limits()
        self.waiting = JobQueue(self.limits.max_passed)
        self.prefilling: list[Job] = []
        self.decoding: list[Job] = []
        self.given_up: list[tuple[Job, QuireError]] = []
        self._bring_up, self._keep = bring_up, keep
        self._num_jobs = 0
        self._next_deadline = inf
        self._batch: DecodeBatch | None = None
        self._step: Step | None = None
        self._next: Step | None = None
        self._look = False
        self._room_then: tuple[int, ...] = ()

    @property
    def num_running(self) -> int:
        return len(self.prefilling) + len(self.decoding)

    def __len__(self) -> int:
        """Jobs that are not finished."""
        return len(self.waiting) + len(self.prefilling) + len(self.decoding)

    # -- jobs ------------------------------------------------------------------------------

    def add(self, job: Job) -> None:
        """Queue a job. Raises `SequenceError` for one that was added before, `ConfigError`, and `OutOfBlocks` if no empty pool could hold it."""
        if job.state != "new":
            raise SequenceError(f"{job!r} was added before; make a new job")
        terms_of(self.manager.settings.clock, job.terms)
        check_fits(self.manager, job)
        self._enter(job)

    def finish(self, job: Job) -> None:
        """End a job at whatever point it is. Raises `SequenceError` if it is none of the jobs here."""
        self._leave(job)
        self._close(job)

    def fork(self, job: Job, next_tokens: Items[int]) -> list[Job]:
        """Return more jobs at the tokens that a job has computed, each with another token next than its own.

        They share its blocks; those that find no slot wait. Raises `SequenceError` unless the job decodes, `TokensError`.
        """
        if job not in self.decoding:
            raise SequenceError(
                f"{job!r} does not decode here; fork it when its prompt is computed"
            )
        key = key_of(next_tokens)
        check_sign(key)
        return [self._fork(job, token) for token in array_of(key).tolist()]

    def _fork(self, job: Job, token: int) -> Job:
        twin = job.twin(token)
        self._enter(twin)
        if self.num_running < self.limits.max_running:
            with suppress(OutOfBlocks):
                twin.seq = self.manager.fork(_open(job))
                self.waiting.remove(twin)
                self._begin_decoding(twin)
        return twin

    # -- steps -----------------------------------------------------------------------------

    def plan(self, now: float = 0.0) -> Step | None:
        """Return what to compute next, with room reserved for all of it; None where there is nothing to do.

        `now`  seconds on the clock of the deadlines
        """
        self._step = None
        if now >= self._next_deadline:
            self._give_up_late(now)
        self._reserve_decodes()
        budget = self.limits.max_step_tokens - len(self.decoding)
        drafts = self._take_drafts(budget)
        budget -= sum(map(len, drafts.values()))
        parts: list[tuple[Job, int]] = []
        for job in self.prefilling.copy():
            if budget > 0 and job.state == "running":
                budget -= self._cut(job, budget, parts)
        if self.waiting and budget > 0 and self._may_admit():
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
        if self._batch is not None and not step.has_drafts:
            num_batched = step.num_decodes
            self.manager.commit_step(self._batch, step.tokens[:num_batched])
            for job, (token,) in zip(self.decoding, new, strict=False):
                job.tokens.append(token)
            if num_batched == len(step.jobs):
                self._next = step.next(np.array(new, INT32).reshape(-1))
                return
        self._look = True
        results = dict(zip(step.samples.tolist(), new, strict=True))
        for at in range(num_batched, len(step.jobs)):
            if step.jobs[at].state == "running":
                self._complete_one(step, at, results.get(at, []))

    def _complete_one(self, step: Step, at: int, new: list[int]) -> None:
        """Commit the tokens of one job, of drafts those accepted; it decodes once all that is known of it is computed."""
        job, start = step.jobs[at], int(step.starts[at])
        is_decoding = at < step.num_decodes
        end = start + (len(new) if is_decoding else int(step.lengths[at]))
        job.tokens.extend(new)
        self.manager.commit(_open(job), job.known(start, end))
        if new and not is_decoding:
            self.prefilling.remove(job)
            self._begin_decoding(job)

    def _begin_decoding(self, job: Job) -> None:
        job.state = "running"
        self.decoding.append(job)
        self._batch = self._next = None

    # -- room ------------------------------------------------------------------------------

    def _reserve_decodes(self) -> None:
        """Reserve a token for every job that decodes; where there is no room, the last ones are preempted."""
        while self.decoding:
            if self._batch is None:
                self._batch = self.manager.batch([_open(job) for job in self.decoding])
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
            if len(drafts) and fit_of(self.manager, job, 1 + len(drafts)):
                self.manager.reserve(_open(job), 1 + len(drafts))
                taken[job] = drafts
                budget -= len(drafts)
        return taken

    def _cut(self, job: Job, budget: int, parts: list[tuple[Job, int]]) -> int:
        """Reserve as much of a prompt as this step has budget and room for, and return how many tokens that is.

        Where the step would compute nothing at all otherwise, the last jobs are preempted for it.
        """
        wanted = min(budget, self.limits.max_chunk or budget, job.num_left)
        while not (num_tokens := granted(self.manager, job, wanted)):
            if parts or self.decoding:
                return 0
            try:
                self.manager.reserve(_open(job), 1)
            except OutOfBlocks as error:
                self._make_way(error)
            if job.state != "running":
                return 0
        self.manager.reserve(_open(job), num_tokens)
        parts.append((job, num_tokens))
        return num_tokens

    def _make_way(self, error: OutOfBlocks) -> None:
        """Preempt the job that ranks last; if it is the only one, it is given up."""
        job = max(chain(self.prefilling, self.decoding), key=BY_RANK)
        self._leave(job)
        if not self.num_running:
            self._give_up(job, error)
            return
        self.manager.suspend(_open(job))
        job.state = "waiting"
        job.num_preempted += 1
        self.waiting.add(job)

    # -- admission -------------------------------------------------------------------------

    def _may_admit(self) -> bool:
        """Whether something has changed since waiting jobs were refused."""
        room = tuple(pool.num_available for pool in self.manager.pools)
        grown = any(map(int.__gt__, room, self._room_then))
        self._room_then = room
        return (grown or self._look or not self.num_running) and (
            self.num_running < self.limits.max_running
        )

    def _admit(self, budget: int, parts: list[tuple[Job, int]]) -> None:
        """Admit waiting jobs in order of rank; those that find no room, or wait for a prefix, are passed."""
        at, look, self._look = 0, LOOK_AHEAD, False
        while at < len(self.waiting) and look and self.num_running < self.limits.max_running:
            job = self.waiting.jobs[at]
            if budget <= 0:
                self._look = True
                break
            if has_leader(self.manager, job, self.prefilling) or not self._has_room(job):
                if job.is_urgent:
                    break
                look -= job.behind is None
                at += 1
                continue
            if self._start(job):
                at = 0
            budget -= self._cut(job, budget, parts)

    def _has_room(self, job: Job) -> bool:
        """Whether all its known tokens find room beside what is promised; where nothing runs there is nothing to wait for."""
        share = self.limits.watermark
        return not self.num_running or has_room(self.manager, job, self.prefilling, share)

    def _start(self, job: Job) -> bool:
        """Open or resume the sequence of a job that was admitted; return whether one that it passed is urgent now."""
        if self._bring_up is not None:
            self._bring_up(job)
        if job.seq is not None:
            self.manager.resume(job.seq)
        else:
            job.seq = self.manager.open(job.known(0, job.num_tokens), job.scope, **job.terms)
            job.first_hit = min(job.seq.num_cached, job.prompt_len)
        urgent = self.waiting.admit(job)
        job.state = "running"
        insort(self.prefilling, job, key=BY_RANK)
        return urgent

    # -- ends ------------------------------------------------------------------------------

    def _give_up_late(self, now: float) -> None:
        self._next_deadline = inf
        for job in [*self.waiting, *self.prefilling, *self.decoding]:
            if job.deadline is None:
                continue
            if job.deadline > now:
                self._next_deadline = min(self._next_deadline, job.deadline)
                continue
            self._leave(job)
            late = f"{job.num_generated} of {job.max_tokens} tokens were there at the deadline"
            self._give_up(job, DeadlinePassed(f"{late}; allow more time, or send less at once"))

    def _give_up(self, job: Job, error: QuireError) -> None:
        self._close(job)
        self.given_up.append((job, error))

    def _leave(self, job: Job) -> None:
        """Take a job out of where it is; the sequence of one that runs is still open."""
        if job in self.decoding or job in self.prefilling:
            if self._keep is not None:
                self._keep(job)
            (self.decoding if job in self.decoding else self.prefilling).remove(job)
            self._batch = self._next = None
        elif job in self.waiting:
            self.waiting.remove(job)
        else:
            raise SequenceError(f"{job!r} is none of the jobs here")
        self._look = True

    def _close(self, job: Job) -> None:
        if job.seq is not None:
            self.manager.close(job.seq)
        job.seq, job.state = None, "finished"

    # -- more ------------------------------------------------------------------------------

    def _enter(self, job: Job) -> None:
        """Number a job and queue it."""
        self._num_jobs += 1
        job.number, job.state = self._num_jobs, "waiting"
        self.waiting.add(job)
        self._look = True
        if job.deadline is not None:
            self._next_deadline = min(self._next_deadline, job.deadline)

    def check(self) -> None:
        """Raise `InvariantError` unless every job is in one place, in order, and its sequence in the state that it should be."""
        for jobs, state in ((self.waiting.jobs, "waiting"), (self.prefilling, "running")):
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


def _open(job: Job) -> Sequence:
    """Return the sequence of a job that runs."""
    assert job.seq is not None
    return job.seq
