"""Sweeps: one trace, many capacities and policies.

Every capacity and policy is a replay of its own, so they can run anywhere; the results come back in
the order they were asked for, and are the same whoever computed them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol, TypeAlias

import msgspec

from quire.core.policies import policy_names
from quire_sim.concurrent import Service, replay_concurrent
from quire_sim.executors import Executor, Serial
from quire_sim.foresight import check_kind
from quire_sim.names import unknown
from quire_sim.optimum import BOUNDS, optimum_results
from quire_sim.replay import ReplayResult, check_capacity, replay
from quire_sim.trace.rows import Trace, TraceRequest


class SweepPoint(msgspec.Struct, frozen=True):
    """A replay to be done: a policy or a bound by name, and a capacity in blocks."""

    capacity_blocks: int
    policy: str


Task: TypeAlias = tuple[SweepPoint, ...]
"""Pairs that are computed together: one replay, or a bound at every capacity."""


class Measuring(Protocol):
    """An observer that returns its results as plain data, by name."""

    def __call__(self, request: TraceRequest, hit_tokens: int) -> None: ...

    def found(self) -> dict[str, Any]:
        """Return the columns that it adds to a row."""
        ...


Measure: TypeAlias = Callable[[], Measuring]
"""Makes an observer; pickled on its way to another process."""


def points_of(capacities: Iterable[int], policies: Sequence[str]) -> list[SweepPoint]:
    """Return every policy at every capacity, capacity by capacity."""
    return [SweepPoint(capacity, policy) for capacity in capacities for policy in policies]


class Experiment(msgspec.Struct, frozen=True):
    """The common part of all replays of a sweep; it is pickled on the way to another process.

    `hints`     see `quire_sim.foresight.foresee`; the optimum needs none
    `measures`  make an observer for every point; what it found stands in `result.measured`
    `service`   lets requests overlap, see `replay_concurrent`; the optimum stays that of one
                request at a time
    """

    trace: Trace
    hints: str = "none"
    measures: Sequence[Measure] = ()
    service: Service | None = None


def sweep(
    experiment: Experiment,
    points: Sequence[SweepPoint],
    *,
    executor: Executor | None = None,
    done: Callable[[SweepPoint], None] | None = None,
) -> list[ReplayResult]:
    """Replay a trace once for each point, and return the results in that order.

    `executor`  runs the replays, `Serial()` without one
    `done`      is told of each point when its result is there

    Raises `ConfigError` before anything runs, and whatever a replay raises.
    """
    check_kind(experiment.hints)
    for point in points:
        check_capacity(point.capacity_blocks)
        check_policy(point.policy)
    tasks = _tasks(points)
    results: dict[SweepPoint, ReplayResult] = {}
    for number, found in (executor or Serial()).run(partial(_run, experiment), tasks):
        for point, result in zip(tasks[number], found, strict=True):
            results[point] = result
            if done is not None:
                done(point)
    return [results[point] for point in points]


def check_policy(policy: str) -> None:
    """Raise `ConfigError` for a name that is neither a policy's nor a bound's."""
    known = [*policy_names(), *BOUNDS]
    if policy not in known:
        raise unknown("policy", policy, known)


def _tasks(points: Sequence[SweepPoint]) -> list[Task]:
    """Share out points, each once. The bounds come first: they take longest."""
    distinct = list(dict.fromkeys(points))
    bounds = [tuple(point for point in distinct if point.policy == bound) for bound in BOUNDS]
    replays: list[Task] = [(point,) for point in distinct if point.policy not in BOUNDS]
    return [*filter(None, bounds), *replays]


def _run(experiment: Experiment, task: Task) -> list[ReplayResult]:
    trace, hints, service = experiment.trace, experiment.hints, experiment.service
    observers = [[measure() for measure in experiment.measures] for _ in task]
    if task[0].policy in BOUNDS:
        capacities = [point.capacity_blocks for point in task]
        results = optimum_results(trace, capacities, task[0].policy, observers=observers)
    else:
        ((capacity, policy),) = ((point.capacity_blocks, point.policy) for point in task)
        told = observers[0]
        if service is None:
            results = [replay(trace, capacity, policy, hints=hints, observers=told)]
        else:
            results = [
                replay_concurrent(
                    trace, capacity, policy, service=service, hints=hints, observers=told
                )
            ]
    return [_with(result, found) for result, found in zip(results, observers, strict=True)]


def _with(result: ReplayResult, observers: Sequence[Measuring]) -> ReplayResult:
    measured = dict(result.measured)
    for observer in observers:
        measured |= observer.found()
    return msgspec.structs.replace(result, measured=measured)
