"""Figures of a simulated service: times that users saw, work of its replicas."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence

import msgspec
import numpy as np

from quire_sim.distributions import check_positive
from quire_sim.hardware.roofline import Seconds
from quire_sim.serving.replica import Replica
from quire_sim.serving.requests import Served

BINS = 60
"""Points of a timeline."""

HISTOGRAM_BARS = 12

BACKLOG = 0.05
"""A service is overloaded if this share of all requests still waits when the last one arrives."""

MIN_BACKLOG = 8
"""Fewer requests that wait are no sign of anything."""

TOKENS = ("prompt_tokens", "output_tokens", "cached_tokens", "fetched_tokens", "computed_tokens",
          "recomputed_tokens")  # fmt: skip
"""What the accounts of requests count, and a result sums up."""


class Objective(msgspec.Struct, frozen=True):
    """The times of a good request, at most. None: any. Raises `ConfigError`."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("ttft_s", "tpot_s"):
            value = getattr(self, name)
            if value is not None:
                check_positive(name, value)

    def met(self, served: Served) -> bool:
        """Whether a request reached it; one output token has no time per token to miss."""
        if self.ttft_s is not None and served.ttft_s > self.ttft_s:
            return False
        tpot_s = served.tpot_s
        return self.tpot_s is None or tpot_s is None or tpot_s <= self.tpot_s


class Spread(msgspec.Struct, frozen=True):
    """The spread of a duration over requests, in seconds."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Spread | None:
        """Return the spread of some durations; None without any."""
        if not len(seconds):
            return None
        mean = float(np.asarray(seconds, np.float64).mean())
        return cls(mean, *np.percentile(seconds, (50, 90, 95, 99, 100)).tolist())


class Histogram(msgspec.Struct, frozen=True):
    """Requests by duration: `counts[i]` lie between `edges[i]` and `edges[i + 1]` seconds.

    Edges are evenly spaced in the logarithm. Empty without requests.
    """

    edges: list[float]
    counts: list[int]

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Histogram:
        """Return the histogram of durations above 0."""
        if not len(seconds):
            return cls([], [])
        low, high = min(seconds), max(seconds)
        edges = np.geomspace(low, high, HISTOGRAM_BARS + 1) if low < high else np.array([low, high])
        at = np.clip(np.searchsorted(edges, seconds, side="right") - 1, 0, len(edges) - 2)
        return cls(edges.tolist(), np.bincount(at, minlength=len(edges) - 1).tolist())


class Goodput(msgspec.Struct, frozen=True):
    """Requests that met the objective: their share, and how many per second."""

    share: float
    requests_per_s: float


class Timeline(msgspec.Struct, frozen=True):
    """Means over equal spans of time; `until_s` is where each ends. Over all replicas."""

    until_s: list[float]
    waiting: list[float]
    running: list[float]


class TierUse(msgspec.Struct, frozen=True):
    """Blocks that went down into a tier, and that came up from it to the device."""

    name: str
    demoted_blocks: int
    fetched_blocks: int


class ServingResult(msgspec.Struct, frozen=True):
    """The outcome of a simulation. Seconds of virtual time; tokens unless it says otherwise.

    `makespan_s`       from time 0 to the last token
    `hit_rate`         cached_tokens / prompt_tokens, found on the device at first admission
    `fetched_tokens`   came from a tier below
    `computed_tokens`  prompt tokens that were computed, those computed again included
    `recomputed_tokens`  lost to preemption and computed again
    `utilisation`      share of the makespan in which each replica was computing
    `mean_in_system`   requests that wait or run, mean over the makespan
    `overloaded`       says so if requests came faster than they were served; else None
    """

    num_requests: int
    num_replicas: int
    makespan_s: float
    ttft_s: Spread | None
    tpot_s: Spread | None
    e2e_s: Spread | None
    waited_s: Spread | None
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    goodput: Goodput | None
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    fetched_tokens: int
    computed_tokens: int
    recomputed_tokens: int
    hit_rate: float
    preemptions: int
    utilisation: list[float]
    requests_by_replica: list[int]
    num_steps: int
    mean_in_system: float
    max_waiting: int
    timeline: Timeline
    ttft_histogram: Histogram
    tiers: list[TierUse]
    overloaded: str | None


class Collector:
    """Takes events in order of time, and makes a `ServingResult` of them."""

    def __init__(self) -> None:
        self._served: list[Served] = []
        self._times = array("d")
        self._waiting = array("q")
        self._running = array("q")
        self._first_arrival_s = self._last_arrival_s = 0.0
        self._num_arrived = self._waiting_then = self._finished_then = 0

    def arrived(self, now: float, replicas: Sequence[Replica]) -> None:
        """A request was queued."""
        if not self._num_arrived:
            self._first_arrival_s = now
        self._num_arrived += 1
        self._last_arrival_s = now
        self._finished_then = len(self._served)
        self.sample(now, replicas)
        self._waiting_then = self._waiting[-1]

    def finished(self, served: Served) -> None:
        """A request has its last token."""
        self._served.append(served)

    def sample(self, now: float, replicas: Sequence[Replica]) -> None:
        """Queues may have changed."""
        waiting = sum(replica.num_waiting for replica in replicas)
        running = sum(replica.num_running for replica in replicas)
        if not self._times or waiting != self._waiting[-1] or running != self._running[-1]:
            self._times.append(now)
            self._waiting.append(waiting)
            self._running.append(running)

    def result(self, replicas: Sequence[Replica], objective: Objective | None) -> ServingResult:
        """Return the figures of all that was served."""
        served = self._served
        makespan_s = max((each.finished_s for each in served), default=0.0)
        rate = 1 / makespan_s if makespan_s else 0.0
        tokens = {name: sum(getattr(each, name) for each in served) for name in TOKENS}
        prompt_tokens, output_tokens = tokens["prompt_tokens"], tokens["output_tokens"]
        ttfts = [each.ttft_s for each in served]
        goodput = None
        if objective is not None:
            good = sum(objective.met(each) for each in served)
            goodput = Goodput(good / len(served) if served else 0.0, good * rate)
        by_replica = Counter(each.replica for each in served)
        waiting, running = self._means(makespan_s, BINS)
        in_system = self._means(makespan_s, 1)
        return ServingResult(
            num_requests=len(served),
            num_replicas=len(replicas),
            makespan_s=makespan_s,
            ttft_s=Spread.of(ttfts),
            tpot_s=Spread.of([each.tpot_s for each in served if each.tpot_s is not None]),
            e2e_s=Spread.of([each.e2e_s for each in served]),
            waited_s=Spread.of([each.waited_s for each in served]),
            requests_per_s=len(served) * rate,
            output_tokens_per_s=output_tokens * rate,
            total_tokens_per_s=(prompt_tokens + output_tokens) * rate,
            goodput=goodput,
            **tokens,
            hit_rate=tokens["cached_tokens"] / prompt_tokens if prompt_tokens else 0.0,
            preemptions=sum(replica.preemptions for replica in replicas),
            utilisation=[replica.busy_s * rate for replica in replicas],
            requests_by_replica=[by_replica[number] for number in range(len(replicas))],
            num_steps=sum(replica.num_steps for replica in replicas),
            mean_in_system=sum(float(mean[0]) for mean in in_system if len(mean)),
            max_waiting=max(self._waiting, default=0),
            timeline=Timeline(
                (np.arange(1, len(waiting) + 1) * (makespan_s / BINS)).tolist(),
                waiting.tolist(),
                running.tolist(),
            ),
            ttft_histogram=Histogram.of(ttfts),
            tiers=_tier_use(replicas),
            overloaded=self._overload(len(replicas)),
        )

    def _means(self, makespan_s: float, bins: int) -> tuple[Seconds, Seconds]:
        """Return the mean numbers of requests that wait and that run, in equal spans of time."""
        if not makespan_s:
            return np.empty(0), np.empty(0)
        times = np.frombuffer(self._times, np.float64)
        edges = np.linspace(0.0, makespan_s, bins + 1)
        found: list[Seconds] = []
        for column in (self._waiting, self._running):
            counts = np.frombuffer(column, np.int64)
            areas = np.concatenate(((0.0,), np.cumsum(counts[:-1] * np.diff(times))))
            at = np.searchsorted(times, edges, side="right") - 1
            known = np.maximum(at, 0)
            until = areas[known] + counts[known] * (edges - times[known])
            found.append(np.diff(np.where(at < 0, 0.0, until)) / (makespan_s / bins))
        return found[0], found[1]

    def _overload(self, num_replicas: int) -> str | None:
        span_s = self._last_arrival_s - self._first_arrival_s
        waiting = self._waiting_then
        if not span_s or waiting < max(MIN_BACKLOG, BACKLOG * self._num_arrived):
            return None
        offered = self._num_arrived / span_s
        done = self._finished_then / span_s
        many = f"{num_replicas} replicas finish" if num_replicas > 1 else "one replica finishes"
        enough = f"about {-(-num_replicas * offered // done):.0f}" if done else "many more"
        return (
            f"overloaded: {offered:.3g} requests/s arrive, {many} {done:.3g}/s; {waiting:,} of "
            f"{self._num_arrived:,} still waited when the last one came, and times to the first "
            f"token say more about the length of the trace than about the service; it takes "
            f"{enough} replicas"
        )


def _tier_use(replicas: Sequence[Replica]) -> list[TierUse]:
    stacks = [replica.tiers for replica in replicas if replica.tiers is not None]
    if not stacks:
        return []
    demoted = np.sum([stack.demoted_blocks for stack in stacks], axis=0).tolist()
    fetched = np.sum([stack.fetched_blocks for stack in stacks], axis=0).tolist()
    names = [tier.name for tier in stacks[0].tiers]
    return [TierUse(*row) for row in zip(names, demoted, fetched, strict=True)]
