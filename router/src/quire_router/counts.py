"""A proxy's own metrics for Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate

from prometheus_client import Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from quire.observe.requests import SECONDS, Times
from quire_router.upstreams import Upstream

STATES = ("closed", "half-open", "open")


class ProxyCounts:
    """Counters of a proxy: plain numbers, read by a scrape.

    `answers`   answers of upstreams, by name and status
    `refused`   requests that the proxy answered with an error of its own, by status
    `retries`   requests sent to another upstream, by reason
    `gone`      clients that went before their answer had begun
    `first`, `whole`  seconds from a request to the first bytes of its answer, and to its end
    `looked`, `found` requests whose prompt was looked up, and those of which an upstream held something
    """

    def __init__(self) -> None:
        self.answers = Counter[tuple[str, int]]()
        self.refused = Counter[int]()
        self.retries = Counter[str]()
        self.num_gone = self.num_looked = self.num_found = 0
        self.first, self.whole = Times(), Times()

    def text(
        self,
        upstreams: Iterable[Upstream],
        mended: Mapping[str, int],
        limited: Mapping[tuple[str, str], int],
    ) -> bytes:
        """Return all of it, requests by mend and by limit, and the state of each upstream, as Prometheus reads it."""
        by_limit = CounterMetricFamily(
            "quire_router_limited",
            "Requests that a limit of their key refused",
            labels=["key", "limit"],
        )
        for labels, num in limited.items():
            by_limit.add_metric(labels, num)
        families = (*self._own(mended), by_limit, *_of_upstreams([*upstreams]))
        return generate_latest(Families(families))

    def _own(self, mended: Mapping[str, int]) -> Iterator[Metric]:
        answers = CounterMetricFamily(
            "quire_router_answers", "Answers of upstreams", labels=["upstream", "status"]
        )
        for (name, status), num in self.answers.items():
            answers.add_metric([name, str(status)], num)
        yield answers
        for name, says, label, counts in (
            ("refused", "Requests that the router answered with an error", "status", self.refused),
            ("retries", "Requests sent again to another upstream", "reason", self.retries),
            ("mended", "Requests that a mend changed, each time they were sent", "mend", mended),
        ):
            family = CounterMetricFamily(f"quire_router_{name}", says, labels=[label])
            for key, num in counts.items():
                family.add_metric([str(key)], num)
            yield family
        for name, says, num in (
            ("gone", "Clients that went before their answer began", self.num_gone),
            ("looked_up", "Requests whose prompt was looked up", self.num_looked),
            ("found", "Requests of whose prompt an upstream held a part", self.num_found),
        ):
            yield CounterMetricFamily(f"quire_router_{name}", says, value=num)
        for name, says, times in (
            ("first_byte", "Seconds from a request to its answer's first bytes", self.first),
            ("answer", "Seconds from a request to its answer's end", self.whole),
        ):
            ends = [*(str(float(end)) for end in SECONDS), "+Inf"]
            buckets = list(zip(ends, accumulate(times.counts), strict=True))
            yield HistogramMetricFamily(
                f"quire_router_{name}_seconds", says, buckets=buckets, sum_value=times.sum_s
            )


class Families(Collector):
    """Families of metrics as they are, for `generate_latest`."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _of_upstreams(upstreams: list[Upstream]) -> Iterator[Metric]:
    for name, says, values in (
        ("up", "1 while an upstream is well", [float(each.is_well) for each in upstreams]),
        ("inflight", "Requests that an upstream has", [each.num_inflight for each in upstreams]),
    ):
        gauge = GaugeMetricFamily(f"quire_router_upstream_{name}", says, labels=["upstream"])
        for each, value in zip(upstreams, values, strict=True):
            gauge.add_metric([each.name], value)
        yield gauge
    state = GaugeMetricFamily(
        "quire_router_upstream_breaker",
        "1 for the state of an upstream's breaker",
        labels=["upstream", "state"],
    )
    for each in upstreams:
        for name in STATES:
            state.add_metric([each.name, name], float(each.breaker.state == name))
    yield state
    failures = CounterMetricFamily(
        "quire_router_upstream_failures",
        "Connections that an upstream broke or did not take",
        labels=["upstream"],
    )
    for each in upstreams:
        failures.add_metric([each.name], each.num_failures)
    yield failures
