"""A replica that runs the scheduler of quire's engine, step by step, on prompts made of the trace's blocks."""

from __future__ import annotations

import numpy as np

from quire.core import CacheManager
from quire.core.terms import NO_HINT
from quire.core.tokens import INT32, IntArray
from quire.exchange import restore
from quire.scheduling import Job, Limits, Scheduler, Step
from quire_sim.serving.replica import Replica, ReplicaLimits, Timing
from quire_sim.serving.requests import OWN, LiveRequest
from quire_sim.serving.tiers import Tiers

WATERMARK = 0.01
"""Share of the blocks that an admission leaves free while others run."""


class Scheduled(Replica):
    """Admits, waits for prefixes, cuts prompts and preempts as the engine does, in blocks of the trace's size."""

    def __init__(
        self, number: int, limits: ReplicaLimits, timing: Timing, tiers: Tiers | None = None
    ) -> None:
        super().__init__(number, limits, timing, tiers)
        self.manager = CacheManager(
            limits.num_blocks,
            limits.block_size,
            policy=limits.policy,
            sub_block=False,
            clock=lambda: self.now,
            watchers=[] if tiers is None else [tiers],
        )
        schedule = Limits(limits.max_sequences, limits.max_step_tokens, watermark=WATERMARK)
        self._scheduler = Scheduler(
            self.manager, schedule, bring_up=self._bring_up, keep=self._note_lost
        )
        self._requests: dict[Job, LiveRequest] = {}
        self._fetched: list[tuple[int, int]] = []
        self._step: Step | None = None
        self._tokens: IntArray = np.empty(0, INT32)

    @property
    def num_waiting(self) -> int:
        return self._scheduler.queues.num_waiting

    @property
    def num_running(self) -> int:
        return self._scheduler.queues.num_running

    def submit(self, request: LiveRequest, now: float) -> None:
        trace = request.trace
        if self.next_s is not None:
            request.account.queued_s = self.next_s
        job = Job(
            self._prompt(request),
            max(trace.output_tokens, 1),
            terms={"hint": trace.hint or NO_HINT, "store_until": trace.prompt_tokens},
        )
        self._requests[job] = request
        self._scheduler.add(job)

    def cached_blocks(self, request: LiveRequest, now: float) -> tuple[int, ...]:
        self.now = now
        found = self.manager.probe(self._prompt(request)).num_blocks
        below = self._below(request, found)
        return (found, *self.tiers.by_tier(below)) if self.tiers is not None else (found,)

    def complete(self, now: float) -> list[LiveRequest]:
        self.now = now
        step, self._step, self._ends = self._step, None, self._ends[:0]
        if step is None:
            return []
        self.num_steps += 1
        for at in range(step.num_decodes, len(step.jobs)):
            self._requests[step.jobs[at]].account.computed_tokens += int(step.lengths[at])
        if not step.repeats:
            own = [OWN - self._requests[job].account.number for job in step.sampled]
            self._tokens = np.array(own, INT32)
        self._scheduler.complete(step, self._tokens)
        finished: list[LiveRequest] = []
        for job in step.sampled:
            if job.num_generated == 1:
                self._requests[job].account.first_token_s = now
            if job.num_generated == job.max_tokens:
                self._scheduler.finish(job)
                request = self._requests.pop(job)
                request.account.preemptions = job.num_preempted
                self.preemptions += job.num_preempted
                finished.append(request)
        return finished

    def plan(self, now: float) -> None:
        self.now = now
        self._fetched = []
        self._step = step = self._scheduler.plan(now)
        for _, error in self._scheduler.given_up:
            raise error
        self.manager.take_copies()
        if self._is_idle(now) or step is None:
            return
        starts, num = step.starts, step.num_decodes
        chunks = list(zip(step.lengths[num:].tolist(), starts[num:].tolist(), strict=True))
        step_s = self._timing.step_s(chunks, starts[:num].astype(np.int64))
        fetch_s = self.tiers.fetch_s(self._fetched) if self.tiers is not None else 0.0
        self._ends = np.array([now + max(step_s, fetch_s)])

    def _prompt(self, request: LiveRequest) -> IntArray:
        """Return token ids that are equal as far as the trace's blocks are: a block begins with its id."""
        size, num_tokens = self.limits.block_size, request.trace.prompt_tokens
        tokens = np.full(num_tokens, OWN - request.account.number, INT32)
        named = tokens[: request.num_named_blocks * size]
        named[:] = 0
        named[::size] = request.key[: -(-len(named) // size)]
        return tokens

    def _bring_up(self, job: Job) -> None:
        """Fetch the blocks of an admitted job that pay, and note its hits."""
        request, known = self._requests[job], job.known()
        account, size = request.account, self.limits.block_size
        hit = self.manager.probe(known)
        num_blocks = self._fetched_blocks(request, hit.num_blocks, len(known))
        if num_blocks:
            end = hit.num_blocks + num_blocks
            with restore(self.manager, known, end, {0: range(hit.num_blocks, end)}) as restoring:
                restoring.commit()
        found = hit.num_tokens + num_blocks * size
        if account.admitted_s is None:
            account.admitted_s = self.now
            account.cached_tokens = hit.num_tokens
        account.fetched_tokens += num_blocks * size
        account.recomputed_tokens += max(request.lost - found, 0)
        request.lost = 0

    def _fetched_blocks(self, request: LiveRequest, found: int, num_tokens: int) -> int:
        """Choose how many blocks come up, so that the prompt is there first; note from where."""
        if self.tiers is None:
            return 0
        size, num_blocks, best = self.limits.block_size, 0, 0
        segments = self._below(request, found)
        best_s = self._timing.prefill_s(num_tokens - found * size, found * size)
        taken: list[tuple[int, int]] = []
        for place, (_, count) in enumerate(segments, 1):
            num_blocks += count
            have = (found + num_blocks) * size
            fetch_s = self.tiers.fetch_s(segments[:place])
            total_s = max(self._timing.prefill_s(num_tokens - have, have), fetch_s)
            if total_s < best_s:
                taken, best, best_s = segments[:place], num_blocks, total_s
        for tier, count in taken:
            self.tiers.fetched_blocks[tier] += count
        self._fetched += taken
        return best

    def _below(self, request: LiveRequest, found: int) -> list[tuple[int, int]]:
        """Return where the blocks of a prompt behind those found are, all but what holds its last token."""
        if self.tiers is None:
            return []
        whole = (request.trace.prompt_tokens - 1) // self.limits.block_size
        return self.tiers.segments(request.key[found : min(whole, request.num_named_blocks)])

    def _note_lost(self, job: Job) -> None:
        """Remember the computed tokens of a job that is preempted, or ends."""
        self._requests[job].lost = job.num_computed
