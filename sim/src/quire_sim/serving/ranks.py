"""A replica of data-parallel ranks: each has its own queue and blocks, and all step together."""

from __future__ import annotations

import numpy as np

from quire_sim.hardware.roofline import NOBODY, Seconds
from quire_sim.serving.firstcome import FirstCome, RunPlan, ends_of
from quire_sim.serving.replica import Replica, ReplicaLimits, Timing
from quire_sim.serving.requests import LiveRequest

WAITING_WEIGHT = 4
"""A request that waits counts as so many that run when a rank is chosen: vLLM's rule."""

NOTHING = RunPlan([], NOBODY, 0, 0.0)


class Ranks(Replica):
    """Groups of devices that share routed experts, with a scheduler each.

    A request goes to the rank with the least `4 x waiting + running`. The layers with experts need all
    ranks, so a step of one is a step of all and ends for all at once; a rank without work takes part
    with nothing. `limits` are those of a rank. Source: vLLM's data parallel deployment.
    """

    def __init__(self, number: int, limits: ReplicaLimits, timing: Timing, num_ranks: int) -> None:
        super().__init__(number, limits, timing)
        self.ranks: list[FirstCome] = [FirstCome(number, limits, timing) for _ in range(num_ranks)]
        self.manager = self.ranks[0].manager

    @property
    def num_waiting(self) -> int:
        return sum(rank.num_waiting for rank in self.ranks)

    @property
    def num_running(self) -> int:
        return sum(rank.num_running for rank in self.ranks)

    def submit(self, request: LiveRequest, now: float) -> None:
        rank = min(self.ranks, key=_burden)
        rank.submit(request, now)
        until = rank.next_s
        if until is not None and until != self.next_s:
            self._begin(self._ends[: int(np.searchsorted(self._ends, until)) + 1])

    def cached_blocks(self, request: LiveRequest, now: float) -> tuple[int, ...]:
        return max(rank.cached_blocks(request, now) for rank in self.ranks)

    def complete(self, now: float) -> list[LiveRequest]:
        self.now = now
        self.num_steps += len(self._ends)
        self._ends = self._ends[:0]
        finished = [request for rank in self.ranks for request in rank.complete(now)]
        self.preemptions = sum(rank.preemptions for rank in self.ranks)
        return finished

    def plan(self, now: float) -> None:
        self.now = now
        decided = [rank.decide(now) for rank in self.ranks]
        work = [each for each in decided if each is not None]
        if self._is_idle(now) or not work:
            return
        num_steps = min(each.num_steps for each in work)
        parts = [(each.chunks, each.contexts) for each in (one or NOTHING for one in decided)]
        self._begin(ends_of(now, self._timing.ranks_s(parts, num_steps)))

    def _begin(self, ends: Seconds) -> None:
        self._ends = ends
        for rank in self.ranks:
            rank.begin(ends)


def _burden(rank: FirstCome) -> int:
    return WAITING_WEIGHT * rank.num_waiting + rank.num_running
