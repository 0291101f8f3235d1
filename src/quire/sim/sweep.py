"""Sweeps: one trace, many capacities and policies.

Every pair of them is a replay of its own, so they can run anywhere; the results come back in the
order they were asked for, and are the same whoever computed them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from functools import partial
from typing import Any, Protocol, TypeAlias

import msgspec

from quire.core.policies import POLICIES
from quire.errors import ConfigError
from quire.sim.concurrent import replay_concurrent
from quire.sim.executors import Executor, Serial
from quire.sim.foresight import check_kind
from quire.sim.optimum import OPTIMUM, optimum_results
from quire.sim.replay import ReplayResult, check_capacity, replay
from quire.sim.service import Service
from quire.sim.trace.rows import Trace, TraceRequest


class Pair(msgspec.Struct, frozen=True):
    """A replay to be done: a policy of `POLICIES` or the optimum, and a capacity in blocks."""

    capacity_blocks: int
    policy: str


Task: TypeAlias = tuple[Pair, ...]
"""Pairs that are computed together: one replay, or the optimum at every capacity."""


class Measuring(Protocol):
    """An observer that says what it found as plain data, by name."""

    def __call__(self, request: TraceRequest, hit_tokens: int) -> None: ...

    def found(self) -> dict[str, Any]:
        """Return the columns that it adds to a row."""
        ...


Measure: TypeAlias = Callable[[], Measuring]
"""Makes an observer; pickled on its way to another process."""

Done: TypeAlias = Callable[[Pair], None]


def pairs_of(capacities: Iterable[int], policies: Sequence[str]) -> list[Pair]:
    """Return every policy at every capacity, capacity by capacity."""
    return [Pair(capacity, policy) for capacity in capacities for policy in policies]


def sweep(
    trace: Trace,
    pairs: Sequence[Pair],
    *,
    hints: str = "none",
    measures: Sequence[Measure] = (),
    service: Service | None = None,
    executor: Executor | None = None,
    done: Done | None = None,
) -> list[ReplayResult]:
    """Replay a trace once for each pair, and return the results in that order.

    `hints`     see `quire.sim.foresight.foresee`; the optimum needs none
    `measures`  make an observer for every pair; what it found stands in `result.measured`
    `service`   lets requests overlap, see `replay_concurrent`; the optimum stays that of one
                request at a time
    `executor`  where the replays run, `Serial()` without one; the trace is pickled on the way
                to another process
    `done`      is told of each pair when its result is there

    Raises `ConfigError` before anything runs, and whatever a replay raises.
    """
    check_kind(hints)
    for pair in pairs:
        check_capacity(pair.capacity_blocks)
        check_policy(pair.policy)
    plan = _Plan(trace, hints, tuple(measures), service)
    tasks = _tasks(pairs)
    results: dict[Pair, ReplayResult] = {}
    runs = (executor or Serial()).run(partial(_run, plan), tasks)
    for number, found in runs:
        for pair, result in zip(tasks[number], found, strict=True):
            results[pair] = result
            if done is not None:
                done(pair)
    return [results[pair] for pair in pairs]


def check_policy(policy: str) -> None:
    """Raise `ConfigError` for a name that is neither a policy's nor the optimum's."""
    known = [*sorted(POLICIES), OPTIMUM]
    if policy not in known:
        near = get_close_matches(policy, known, n=1)
        meant = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(f"unknown policy {policy!r}; {meant}There are {', '.join(known)}")


def _tasks(pairs: Sequence[Pair]) -> list[Task]:
    """Share out pairs, each once. The optimum comes first: it takes longest."""
    distinct = list(dict.fromkeys(pairs))
    optimum = tuple(pair for pair in distinct if pair.policy == OPTIMUM)
    replays: list[Task] = [(pair,) for pair in distinct if pair.policy != OPTIMUM]
    return [optimum, *replays] if optimum else replays


class _Plan(msgspec.Struct, frozen=True):
    """What all replays of a sweep have in common; goes to other processes."""

    trace: Trace
    hints: str
    measures: tuple[Measure, ...]
    service: Service | None


def _run(plan: _Plan, task: Task) -> list[ReplayResult]:
    observers = [[measure() for measure in plan.measures] for _ in task]
    if task[0].policy == OPTIMUM:
        capacities = [pair.capacity_blocks for pair in task]
        results = optimum_results(plan.trace, capacities, observers=observers)
    else:
        (pair,) = task
        capacity, policy, hints = pair.capacity_blocks, pair.policy, plan.hints
        if plan.service is None:
            result = replay(plan.trace, capacity, policy, hints=hints, observers=observers[0])
        else:
            result = replay_concurrent(
                plan.trace,
                capacity,
                policy,
                service=plan.service,
                hints=hints,
                observers=observers[0],
            )
        results = [result]
    return [_with(result, found) for result, found in zip(results, observers, strict=True)]


def _with(result: ReplayResult, observers: Sequence[Measuring]) -> ReplayResult:
    measured = dict(result.measured)
    for observer in observers:
        measured |= observer.found()
    return msgspec.structs.replace(result, measured=measured)
