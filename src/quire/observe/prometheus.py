"""Prometheus metrics of running caches, read when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from quire.core import CacheManager
from quire.errors import ConfigError, QuireError
from quire.extras import lacking
from quire.ops import block_states

try:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
    from prometheus_client.registry import Collector
except ModuleNotFoundError as error:
    raise ConfigError(
        lacking("quire.observe.prometheus", "prometheus_client", "observe")
    ) from error

Family = GaugeMetricFamily | CounterMetricFamily


class Metric:
    """A metric as the documentation has it: its name without `quire_`, what kind it is, what it says, its labels.

    Every metric has the label `cache` first.
    """

    def __init__(self, kind: type[Family], name: str, says: str, *labels: str) -> None:
        self.kind, self.name, self.says, self.labels = kind, name, says, labels

    def family(self) -> Family:
        """Return it without samples."""
        return self.kind(f"quire_{self.name}", self.says, labels=["cache", *self.labels])


def _gauge(name: str, says: str, *labels: str) -> Metric:
    return Metric(GaugeMetricFamily, name, says, *labels)


def _counter(name: str, says: str, *labels: str) -> Metric:
    return Metric(CounterMetricFamily, name, says, *labels)


METRICS = (
    _gauge("up", "1; 0 after a call was cut off half-way, until reset"),
    _gauge(
        "blocks",
        "Blocks of a layer group's pool by state: free, active (requests use them), pinned (pins alone keep them) or cached",
        "group",
        "state",
    ),
    _gauge("sequences", "Open and suspended requests", "state"),
    _counter("requests", "Requests that had room"),
    _counter("prompt_tokens", "Prompt tokens of all requests"),
    _counter("hit_tokens", "Prompt tokens that were found cached"),
    _counter("missed_tokens", "Prompt tokens that were not found, by reason", "reason"),
    _counter("computed_tokens", "Tokens whose K and V were computed"),
    _counter("recomputed_tokens", "Tokens computed again after a request was suspended"),
    _counter("published_blocks", "Blocks that became findable"),
    _counter("restored_blocks", "Blocks that came back from tiers"),
    _counter("deduplicated_blocks", "Blocks computed that the cache had already"),
    _counter("evicted_blocks", "Blocks that left to make room"),
    _counter("invalidated_blocks", "Blocks that were dropped on request"),
    _counter("copied_blocks", "Blocks copied because others read them too"),
    _gauge("tier_records", "Records in a tier", "tier"),
    _gauge("tier_bytes", "Bytes in a tier", "tier"),
    _gauge("tier_capacity_bytes", "The most bytes that a tier keeps", "tier"),
    _counter("tier_loads", "Keys asked of a tier, by what became of them", "tier", "outcome"),
    _counter("tier_stores", "Records given to a tier, by what became of them", "tier", "outcome"),
    _counter("tier_loaded_bytes", "Bytes loaded from a tier", "tier"),
    _counter("tier_stored_bytes", "Bytes stored in a tier", "tier"),
    _counter("tier_load_seconds", "Time of loads, added up over threads", "tier"),
    _counter("tier_store_seconds", "Time of stores, added up over threads", "tier"),
    _gauge("tier_queued_bytes", "Bytes that wait to be written to a tier", "tier"),
    _counter("tier_dropped_records", "Records that found no room to wait", "tier"),
    _counter("tier_late_reads", "Reads that came after their request had gone on", "tier"),
    _counter(
        "tier_joined_keys", "Keys that a second request had from the first one's read", "tier"
    ),
    _gauge(
        "tier_called", "1 where a tier is called, 0 where it is left alone", "tier", "direction"
    ),
    _counter("tier_left_alone", "Times that a tier was begun to be left alone", "tier"),
    _gauge("tier_latency_seconds", "What a load costs beside its bytes, as learned", "tier"),
    _gauge("tier_bandwidth_bytes_per_second", "What a load brings, as learned", "tier"),
    _counter("loads", "Keys asked of all tiers, by what became of them", "outcome"),
    _counter("refused_keys", "Keys that were found in a tier and computed, since that is faster"),
)
"""All metrics. A counter's name ends in `_total` where Prometheus shows it."""

SAME_NAME = frozenset(metric.name for metric in METRICS)


class Stack(Protocol):
    """Tiers with counters: a `quire.tiers.TierStack`."""

    def stats(self) -> Any:
        """Return `StackStats`."""
        ...


class CacheCollector(Collector):
    """The metrics of one cache or several, for a registry of prometheus_client.

        collector = CacheCollector(cache.manager, cache.tiers)
        prometheus_client.REGISTRY.register(collector)
        prometheus_client.start_http_server(9464)

    manager  a `CacheManager`, or the `manager` of a `PrefixCache`
    tiers    what lies below it, None for nothing
    name     the label `cache`; each of several caches (`add`) has one of its own

    A scrape reads counts that are there anyway: a cache does nothing for it between scrapes. A part that cannot be read
    (a cache that was cut off, a tier whose count fails) is left out of that scrape. Raises `ConfigError`.
    """

    def __init__(
        self, manager: CacheManager, tiers: Stack | None = None, name: str = "main"
    ) -> None:
        self._caches: dict[str, tuple[CacheManager, Stack | None]] = {}
        self.add(manager, tiers, name)

    def add(self, manager: CacheManager, tiers: Stack | None = None, name: str = "main") -> None:
        """Show another cache too. Raises `ConfigError` for a name that is taken."""
        if not isinstance(manager, CacheManager):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(
                f"manager is a CacheManager, cache.manager for instance; got {manager!r}"
            )
        if tiers is not None and not hasattr(tiers, "stats"):
            raise ConfigError(
                f"tiers is a TierStack, cache.tiers for instance, or None; got {tiers!r}"
            )
        if name in self._caches:
            raise ConfigError(
                f"a cache named {name!r} is shown already; give each a name of its own"
            )
        self._caches[name] = (manager, tiers)

    def describe(self) -> Iterator[Family]:
        """Return all metrics without samples, so that registering reads no cache."""
        return (metric.family() for metric in METRICS)

    def collect(self) -> Iterator[Family]:
        """Return all metrics with their present values."""
        families = {metric.name: metric.family() for metric in METRICS}
        for name, (manager, tiers) in self._caches.items():
            samples = _Samples(families, name)
            try:
                _of_manager(samples, manager)
            except QuireError:
                samples.put("up", 0)
            if tiers is not None:
                _of_tiers(samples, tiers)
        return iter(families.values())


class _Samples:
    """Puts the samples of one cache into the families."""

    def __init__(self, families: Mapping[str, Family], cache: str) -> None:
        self._families, self._cache = families, cache

    def put(self, metric: str, value: float, *labels: str) -> None:
        self._families[metric].add_metric([self._cache, *labels], value)

    def put_each(self, metric: str, counts: Mapping[str, int], *labels: str) -> None:
        """Put one sample per name; a new counter starts at 0, so that its rate is complete."""
        for name, count in counts.items():
            self.put(metric, count, *labels, name)


def _of_manager(samples: _Samples, manager: CacheManager) -> None:
    stats = manager.stats
    blocks = list(zip(manager.pools, block_states(manager), strict=True))
    states = [seq.state for seq in list(manager.sequences.values())]
    samples.put("up", 1)
    for pool, counts in blocks:
        for state, count in counts.items():
            samples.put("blocks", count, pool.name, state)
    for state in ("open", "suspended"):
        samples.put("sequences", states.count(state), state)
    samples.put("requests", stats.num_requests)
    samples.put_each("missed_tokens", stats.missed)
    for name in stats.__struct_fields__:
        if name in SAME_NAME:
            samples.put(name, getattr(stats, name))


def _of_tiers(samples: _Samples, tiers: Stack) -> None:
    try:
        stats = tiers.stats()
    except Exception:  # noqa: BLE001 - a tier may be anybody's, and a scrape shows what it can
        return
    samples.put_each("loads", stats.loads)
    samples.put("refused_keys", stats.refused_keys)
    for each in stats.tiers:
        tier: str = each.tier.name
        held = {"records": each.tier.num_records, "bytes": each.tier.num_bytes}
        for name, value in {**held, "capacity_bytes": each.tier.capacity_bytes}.items():
            if value >= 0:  # else it cannot know
                samples.put(f"tier_{name}", value, tier)
        samples.put_each("tier_loads", each.loads, tier)
        samples.put_each("tier_stores", each.stores, tier)
        for name in ("loaded_bytes", "stored_bytes", "queued_bytes"):
            samples.put(f"tier_{name}", getattr(each, name), tier)
        samples.put("tier_load_seconds", each.load_s, tier)
        samples.put("tier_store_seconds", each.store_s, tier)
        samples.put("tier_dropped_records", each.dropped, tier)
        samples.put("tier_late_reads", each.late, tier)
        samples.put("tier_joined_keys", each.joined, tier)
        for direction, state in (("read", each.reading), ("write", each.writing)):
            samples.put("tier_called", state == "closed", tier, direction)
        samples.put("tier_left_alone", each.num_opened, tier)
        samples.put("tier_latency_seconds", each.latency_s, tier)
        samples.put("tier_bandwidth_bytes_per_second", each.bandwidth, tier)
