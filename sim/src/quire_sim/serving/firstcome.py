"""A replica that serves first come, first served: its queue, its running batch."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import deque
from typing import NamedTuple

import numpy as np

from quire import ops
from quire.core.terms import NO_HINT
from quire.core.tokens import INT32
from quire_sim.hardware.roofline import Chunk, Contexts, Seconds
from quire_sim.replay import manager_of, tell_sizes
from quire_sim.serving.decoding import Decoding
from quire_sim.serving.replica import Replica, ReplicaLimits, Timing
from quire_sim.serving.requests import LiveRequest
from quire_sim.serving.tiers import Tiers

MAX_RUN = 1024
"""Decode steps that are simulated at once, at most."""

FIRST_NAME = 1 << 30
"""The first name of a block that only its own request can find: no trace has so many."""


class RunPlan(NamedTuple):
    """A decided run: parts of prompts, contexts of decoding sequences, its steps, seconds of fetching."""

    chunks: list[Chunk]
    contexts: Contexts
    num_steps: int
    fetch_s: float


class FirstCome(Replica):
    """Admits in order of arrival, and preempts the newest. A block of the trace is a token of its manager.

    Where steps are planned ahead, a plan knows what was known when the step before it began: who
    came or ended during that step comes in, and leaves room, one step later.
    """

    def __init__(
        self, number: int, limits: ReplicaLimits, timing: Timing, tiers: Tiers | None = None
    ) -> None:
        super().__init__(number, limits, timing, tiers)
        self.waiting: deque[LiveRequest] = deque()
        self.running: list[LiveRequest] = []
        told = [] if tiers is None else [tiers]
        self.manager = manager_of(limits.num_blocks, limits.policy, lambda: self.now, told)
        self._pool = self.manager.pools[0]
        self._decoding = Decoding(limits.max_sequences, limits.block_size)
        self._prefilling: list[LiveRequest] = []
        self._chunks: list[tuple[LiveRequest, int]] = []
        self._leaving: list[LiveRequest] = []
        self._names = itertools.count(FIRST_NAME)
        self._num_admitted = 0
        self._began = 0.0

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def num_running(self) -> int:
        return len(self.running)

    def submit(self, request: LiveRequest, now: float) -> None:
        may_enter = not self.waiting and self._seats
        self.waiting.append(request)
        if not len(self._ends):
            return
        under_way = int(np.searchsorted(self._ends, now))
        request.account.queued_s = float(self._ends[under_way])
        if may_enter:
            self._ends = self._ends[: under_way + 1 + self.limits.plans_ahead]

    def cached_blocks(self, request: LiveRequest, now: float) -> tuple[int, ...]:
        if len(self._ends) > 1:
            self._make_room(min(int(np.searchsorted(self._ends, now)) + 1, len(self._ends)))
        self.now = now
        found = self.manager.probe(request.key).num_blocks
        if self.tiers is None:
            return (found,)
        return (found, *self.tiers.by_tier(self.tiers.segments(request.key[found:-1])))

    def complete(self, now: float) -> list[LiveRequest]:
        self.now = now
        num_steps = len(self._ends)
        if num_steps > 1:
            self._began = float(self._ends[-2])
        self._ends = self._ends[:0]
        self._close_leaving()
        decoding = self._decoding
        finished: list[LiveRequest] = []
        if len(decoding):
            self._make_room(num_steps)
            decoding.steps += num_steps
            finished = decoding.finished()
            for request in finished:
                decoding.remove(request)
        self.num_steps += num_steps
        for request, num_tokens in self._chunks:
            self._compute(request, num_tokens)
            if request.computed < request.target:
                continue
            self._prefilling.remove(request)
            if not request.generated:
                request.account.first_token_s = now
            request.generated += 1
            if request.generated < request.trace.output_tokens:
                decoding.add(request)
            else:
                finished.append(request)
        self._chunks = []
        for request in finished:
            self.running.remove(request)
        self._leaving = finished
        if not self.limits.plans_ahead:
            self._close_leaving()
        return finished

    def plan(self, now: float) -> None:
        work = self.decide(now)
        if work is None:
            return
        if work.chunks:
            step_s = self._timing.step_s(work.chunks, work.contexts)
            self.begin(np.array([now + max(step_s, work.fetch_s)]))
        else:
            steps_s = self._timing.decode_run_s(work.contexts, work.num_steps)
            self.begin(ends_of(now, steps_s))

    def decide(self, now: float) -> RunPlan | None:
        """Admit, preempt and cut prompts for the next run; None: nothing runs."""
        self.now = now
        decoding = self._decoding
        preempted = False
        while len(decoding) and decoding.blocks_short(1) > self._pool.num_available:
            self._preempt(max(self.running, key=_order))
            preempted = True
        if len(decoding):
            self._make_room(1)
        known_s = self._began if self.limits.plans_ahead else now
        if not self.running:
            known_s = now
            self._close_leaving()
        fetch_s = 0.0 if preempted else self._admit(known_s)
        if self._is_idle(now):
            return None
        self._began = now
        self._chunks = self._cut_prompts()
        if self._chunks:
            chunks: list[Chunk] = [(num, request.computed) for request, num in self._chunks]
            return RunPlan(chunks, decoding.contexts, 1, fetch_s)
        comes = self.waiting and self.waiting[0].account.queued_s > known_s
        longest = 1 if comes or self._leaving else MAX_RUN
        num_steps = self._affordable(min(decoding.steps_left, longest))
        return RunPlan([], decoding.contexts, num_steps, 0.0)

    def begin(self, ends: Seconds) -> None:
        """Begin the decided run: at most its steps, which end at these times."""
        self._ends = ends

    # -- admission -------------------------------------------------------------------------

    @property
    def _seats(self) -> bool:
        return len(self.running) + len(self._leaving) < self.limits.max_sequences

    def _close_leaving(self) -> None:
        """Give back the blocks of requests that have ended."""
        for request in self._leaving:
            assert request.seq is not None
            self.manager.close(request.seq)
        self._leaving = []

    def _admit(self, known_s: float) -> float:
        """Let waiting requests in that came until then, in their order; return how long fetches take."""
        limits, tiers = self.limits, self.tiers
        budget = limits.max_step_tokens - len(self._decoding)
        budget -= sum(request.target - request.computed for request in self._prefilling)
        fetched: list[tuple[int, int]] = []
        while self.waiting and budget > 0 and self._seats:
            request = self.waiting[0]
            if request.account.queued_s > known_s or not self._give_blocks(request):
                break
            self.waiting.popleft()
            if tiers is not None:
                fetched += self._fetch(request, tiers)
            request.account.recomputed_tokens += max(request.lost - request.computed, 0)
            request.lost = 0
            request.order = self._num_admitted
            self._num_admitted += 1
            if request.account.admitted_s is None:
                request.account.admitted_s = self.now
            self.running.append(request)
            self._prefilling.append(request)
            budget -= request.target - request.computed
        return tiers.fetch_s(fetched) if tiers is not None else 0.0

    def _give_blocks(self, request: LiveRequest) -> bool:
        """Reference the cached part of a prompt and reserve the rest, if there is room for it."""
        manager, size = self.manager, self.limits.block_size
        request.target = request.trace.prompt_tokens + request.generated
        wanted = -(-request.target // size)
        seq = request.seq
        fit = ops.fits(manager, request.key if seq is None else seq)
        missing = wanted - fit.num_cached
        if missing > fit.room[0]:
            return False
        if seq is None:
            seq = manager.open(request.key, hint=request.trace.hint or NO_HINT)
        else:
            manager.resume(seq)
        if missing:
            manager.reserve(seq, missing)
        else:
            ops.admit(manager, seq)
        if request.seq is None:
            tell_sizes(manager, seq, request.target, request.trace.output_tokens, size)
        request.num_blocks = wanted
        request.computed = request.found_tokens(seq.computed, size)
        if request.seq is None:
            request.account.cached_tokens = request.computed
        request.seq = seq
        return True

    def _fetch(self, request: LiveRequest, tiers: Tiers) -> list[tuple[int, int]]:
        """Bring up as much of a prompt from below as makes its prefill shortest."""
        seq, size = request.seq, self.limits.block_size
        assert seq is not None
        start = seq.computed
        segments = tiers.segments(request.key[start:-1])
        taken: list[tuple[int, int]] = []
        best_s = self._timing.prefill_s(request.target - request.computed, request.computed)
        num_blocks = 0
        for place, (_, count) in enumerate(segments, 1):
            num_blocks += count
            have = request.found_tokens(start + num_blocks, size)
            compute_s = self._timing.prefill_s(request.target - have, have)
            total_s = max(compute_s, tiers.fetch_s(segments[:place]))
            if total_s < best_s:
                taken, best_s = segments[:place], total_s
        if taken:
            num_blocks = sum(count for _, count in taken)
            for tier, count in taken:
                tiers.fetched_blocks[tier] += count
            self.manager.commit(seq, request.key[start : start + num_blocks])
            before = request.computed
            request.computed = request.found_tokens(start + num_blocks, size)
            request.account.fetched_tokens += request.computed - before
        return taken

    # -- steps -----------------------------------------------------------------------------

    def _cut_prompts(self) -> list[tuple[LiveRequest, int]]:
        """Share the tokens of the next step out among prompts, in order of admission."""
        budget = self.limits.max_step_tokens - len(self._decoding)
        chunks: list[tuple[LiveRequest, int]] = []
        for request in self._prefilling:
            if budget <= 0:
                break
            num_tokens = min(budget, request.target - request.computed)
            chunks.append((request, num_tokens))
            budget -= num_tokens
        return chunks

    def _compute(self, request: LiveRequest, num_tokens: int) -> None:
        """Account for a part of a prompt; named blocks that are complete now can be found."""
        seq = request.seq
        assert seq is not None
        request.computed += num_tokens
        request.account.computed_tokens += num_tokens
        ready = request.num_named_blocks
        if request.computed < request.trace.prompt_tokens:
            ready = min(request.computed // self.limits.block_size, ready)
        if ready > seq.computed:
            self.manager.commit(seq, request.key[seq.computed : ready])

    def _make_room(self, num_steps: int) -> None:
        """Reserve the blocks that the next steps of the decoding requests write to."""
        for request, _ in self._decoding.extend(num_steps):
            seq = request.seq
            assert seq is not None
            self.manager.reserve(seq, request.num_blocks - seq.computed)

    def _affordable(self, num_steps: int) -> int:
        """Return the number of steps that there are blocks for; the first has them."""
        steps = range(num_steps + 1)
        short = self._decoding.blocks_short
        return max(1, bisect_right(steps, self._pool.num_available, key=short) - 1)

    def _preempt(self, request: LiveRequest) -> None:
        """Take the blocks of a running request; it waits in front, to compute them again."""
        assert request.seq is not None
        if request.slot >= 0:
            self._decoding.remove(request)
        else:
            self._prefilling.remove(request)
        self.running.remove(request)
        self._name_own_blocks(request)
        self.manager.suspend(request.seq)
        request.lost = request.computed
        request.num_blocks = request.computed = 0
        request.account.preemptions += 1
        self.preemptions += 1
        self.waiting.appendleft(request)

    def _name_own_blocks(self, request: LiveRequest) -> None:
        """Publish the full blocks behind those that the trace names, so that they may be found again."""
        seq, size, named = request.seq, self.limits.block_size, request.num_named_blocks
        assert seq is not None
        full = request.computed // size
        if full <= seq.computed or named * size > request.trace.prompt_tokens:
            return
        own = request.own_names
        own += (next(self._names) for _ in range(full - named - len(own)))
        names = [*request.key[:named].tolist(), *own]
        self.manager.commit(seq, np.array(names[seq.computed : full], INT32))


def ends_of(now: float, steps_s: Seconds) -> Seconds:
    """Return the times at which steps end that begin now."""
    return np.cumsum(np.concatenate(((now,), steps_s)))[1:]


def _order(request: LiveRequest) -> int:
    return request.order
