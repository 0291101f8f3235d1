"""The event loop: arrivals and ends of runs, in order of virtual time."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import msgspec

from quire.config import check_count
from quire.errors import ConfigError
from quire.routing import LeastLoaded, Router, Target
from quire_sim.distributions import check_positive
from quire_sim.hardware import MemoryTier
from quire_sim.names import unknown
from quire_sim.serving.arrivals import Arrivals, TraceArrivals
from quire_sim.serving.firstcome import FirstCome
from quire_sim.serving.metrics import Collector, Objective, ServingResult
from quire_sim.serving.ranks import Ranks
from quire_sim.serving.replica import Replica, ReplicaLimits, Timing
from quire_sim.serving.requests import LiveRequest, Served, arriving
from quire_sim.serving.scheduled import Scheduled
from quire_sim.serving.tiers import Tiers
from quire_sim.trace.rows import TraceRequest

Observer: TypeAlias = Callable[[Served], None]
"""Told of every finished request, in the order in which they finish."""


SCHEDULERS: dict[str, type[Replica]] = {"first-come": FirstCome, "quire": Scheduled}
"""Replicas by who decides what each step computes."""


class Cluster(msgspec.Struct, frozen=True):
    """Replicas that are alike. Raises `ConfigError`.

    `block_bytes`  bytes of KV in one block, needed where there are tiers
    `scheduler`    "first-come", or "quire": the engine's own
    `num_ranks`    of each replica: groups of devices that step together, with a queue and blocks each; `limits`
                   are those of one
    """

    limits: ReplicaLimits
    timing: Timing
    num_replicas: int = 1
    tiers: tuple[MemoryTier, ...] = ()
    block_bytes: int = 0
    scheduler: str = "first-come"
    num_ranks: int = 1

    def __post_init__(self) -> None:
        check_count("num_replicas", self.num_replicas)
        if self.tiers and self.block_bytes < 1:
            raise ConfigError(f"tiers need the bytes of a block, got {self.block_bytes}")
        if self.scheduler not in SCHEDULERS:
            raise unknown("scheduler", self.scheduler, SCHEDULERS)
        check_count("num_ranks", self.num_ranks)
        if self.num_ranks > 1 and (self.tiers or self.scheduler != "first-come"):
            raise ConfigError(
                f"{self.num_ranks} ranks step together by the scheduler first-come and without tiers; "
                "leave out the tiers and other schedulers, or simulate 1 rank"
            )

    def replicas(self) -> list[Replica]:
        """Make the replicas, empty."""
        made: list[Replica] = []
        for number in range(self.num_replicas):
            tiers = Tiers(self.tiers, self.block_bytes) if self.tiers else None
            if self.num_ranks > 1:
                made.append(Ranks(number, self.limits, self.timing, self.num_ranks))
                continue
            made.append(SCHEDULERS[self.scheduler](number, self.limits, self.timing, tiers))
        return made


class Load(msgspec.Struct, frozen=True):
    """Requests and their arrivals. Raises `ConfigError`.

    `requests`      a trace, or any iterable of its requests, with the cluster's block size
    `duration_s`    nothing arrives later; what has arrived is finished
    """

    requests: Iterable[TraceRequest]
    arrivals: Arrivals = TraceArrivals()
    duration_s: float | None = None

    def __post_init__(self) -> None:
        if self.duration_s is not None:
            check_positive("duration", self.duration_s)


def simulate(
    cluster: Cluster,
    load: Load,
    router: Router | None = None,
    *,
    objective: Objective | None = None,
    observers: Iterable[Observer] = (),
) -> ServingResult:
    """Serve a load and return the latencies, throughput and hits.

    Virtual time only: equal arguments, equal result. At equal times arrivals come before the
    ends of runs, and replicas in their order. Raises `OutOfBlocks` before anything is simulated
    if a request does not fit a replica, `ConfigError`, and what reading the trace raises.
    """
    requests = list(load.requests)
    for request in requests:
        cluster.limits.check(request)
    simulation = Simulation(cluster, load, router or LeastLoaded(), observers)
    simulation.run(requests)
    return simulation.collector.result(simulation.replicas, objective)


class Simulation:
    """One simulation in progress.

    `_turns` holds (time, replica) for every end of a run and every replica that is to begin
    one. A run that was cut leaves a turn behind that nobody has; it is passed over.
    """

    def __init__(
        self, cluster: Cluster, load: Load, router: Router, observers: Iterable[Observer]
    ) -> None:
        self.replicas = cluster.replicas()
        self.collector = Collector()
        self._load = load
        self._router = router
        self._observers = tuple(observers)
        self._arrivals: list[float] = []
        self._turns: list[tuple[float, int]] = []

    def run(self, requests: Sequence[TraceRequest]) -> None:
        """Serve all requests, to the last token."""
        for arrival_s in self._load.arrivals.start(requests):
            self._expect(arrival_s)
        arrivals, turns = self._arrivals, self._turns
        number = 0
        while arrivals or turns:
            if arrivals and (not turns or arrivals[0] <= turns[0][0]):
                now = heapq.heappop(arrivals)
                if number < len(requests):
                    self._arrive(arriving(number, requests[number], now), now)
                    number += 1
            else:
                now, replica = heapq.heappop(turns)
                self._turn(self.replicas[replica], now)

    def _arrive(self, request: LiveRequest, now: float) -> None:
        replica = self._chosen(request, now)
        ends_s = replica.next_s
        replica.submit(request, now)
        self.collector.arrived(now, self.replicas)
        if ends_s is None:
            heapq.heappush(self._turns, (now, replica.number))
        elif replica.next_s != ends_s:
            self._schedule(replica)

    def _chosen(self, request: LiveRequest, now: float) -> Replica:
        targets = [
            Target(
                str(replica.number),
                replica.load,
                replica.cached_blocks(request, now) if self._router.sees_prefix else (),
            )
            for replica in self.replicas
        ]
        return self.replicas[self._router(targets, request.trace.session)]

    def _turn(self, replica: Replica, now: float) -> None:
        if replica.next_s is None:
            replica.plan(now)
            self._schedule(replica)
        elif replica.next_s == now:
            for request in replica.complete(now):
                request.account.replica, request.account.finished_s = replica.number, now
                self._finish(request.account)
            heapq.heappush(self._turns, (now, replica.number))
        else:
            return
        self.collector.sample(now, self.replicas)

    def _finish(self, served: Served) -> None:
        self.collector.finished(served)
        for observe in self._observers:
            observe(served)
        follows_s = self._load.arrivals.after(served.finished_s)
        if follows_s is not None:
            self._expect(follows_s)

    def _expect(self, arrival_s: float) -> None:
        limit_s = self._load.duration_s
        if limit_s is None or arrival_s <= limit_s:
            heapq.heappush(self._arrivals, arrival_s)

    def _schedule(self, replica: Replica) -> None:
        if replica.next_s is not None:
            heapq.heappush(self._turns, (replica.next_s, replica.number))
