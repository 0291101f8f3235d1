"""Prometheus metrics of an engine's requests: by tenant class in quire's names, in all in vLLM's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import accumulate
from typing import Any

from prometheus_client import Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from quire.core import CacheManager
from quire.errors import QuireError
from quire.observe.engine_view import EngineView
from quire.observe.prometheus import CacheCollector
from quire.observe.requests import SECONDS, RequestLog, Times
from quire.ops import block_states

REASONS = ("stop", "length", "abort", "error")
"""Why sequences end; each has its counter from the start, so that its rate is complete."""

_AS_VLLM = "As vLLM counts it"


class ServerMetrics:
    """The text of a server's `/metrics`, made in two parts: the engine's thread reads, any other one writes.

    `seen` costs the engine a fraction of a millisecond; the text of many tenants costs some.
    """

    def __init__(self, engine: Any, log: RequestLog, model: str) -> None:
        self._cache, self._log = CacheCollector(engine.manager, engine.tiers), log
        self._own = {"model_name": model, "engine": "0"}

    def seen(self, engine: Any) -> list[Metric]:
        """Return the metrics of the cache, and those of its engine; in the engine's thread.

        The latter are left out where the cache was cut off: `quire_up` says so.
        """
        families: list[Metric] = [*self._cache.collect()]
        with suppress(QuireError):
            view = EngineView.of(engine)
            families += [*self._queues(view), *_counters_as_vllm(view, engine.manager, self._own)]
            families += _passages(view.figures.get("passages"))
        return families

    def text(self, seen: Iterable[Metric]) -> bytes:
        """Return all metrics as Prometheus reads them; in the thread that tells the log, or any other one."""
        return generate_latest(_Scrape([*seen, *self._by_class(), *self._times_as_vllm()]))

    def _queues(self, view: EngineView) -> Iterator[Metric]:
        """Return running and waiting sequences of each tenant class."""
        for name, says, counts in (
            ("running", "Sequences that run", view.running),
            ("waiting", "Sequences that wait for a turn, or were preempted", view.waiting),
        ):
            gauge = GaugeMetricFamily(f"quire_requests_{name}", says, labels=["tenant"])
            for tenant, num in self._log.by_class(counts).items():
                gauge.add_metric([tenant], num)
            yield gauge

    def _by_class(self) -> Iterator[Metric]:
        """Return the figures of each tenant class; its label is empty, which Prometheus takes for none, without keys."""
        classes = dict(self._log.classes)
        for name, says, part in (
            ("ttft", "From request to first token", "first"),
            ("itl", "Between tokens of a request", "between"),
            ("queue", "From request to its turn", "queue"),
        ):
            family = HistogramMetricFamily(f"quire_{name}_seconds", says, labels=["tenant"])
            for tenant, figures in classes.items():
                _add(family, [tenant], getattr(figures, part))
            yield family
        for name, says, part in (
            ("generation_tokens", "Tokens generated", "generated_tokens"),
            ("tenant_prompt_tokens", "Prompt tokens of requests with a token", "prompt_tokens"),
            ("tenant_cached_tokens", "Of these, tokens found cached", "cached_tokens"),
            ("tenant_preemptions", "Preemptions of requests that ended", "preemptions"),
        ):
            counter = CounterMetricFamily(f"quire_{name}", says, labels=["tenant"])
            for tenant, figures in classes.items():
                counter.add_metric([tenant], getattr(figures, part))
            yield counter
        ended = CounterMetricFamily(
            "quire_finished", "Sequences that ended, by why", labels=["tenant", "reason"]
        )
        for tenant, figures in classes.items():
            for reason in REASONS:
                ended.add_metric([tenant, reason], figures.ended[reason])
        yield ended
        asked = "Prompts by the adapter that computed them; empty for the model alone"
        by_adapter = CounterMetricFamily("quire_adapter_prompts", asked, labels=["adapter"])
        for adapter, num in self._log.num_by_adapter.copy().items():
            by_adapter.add_metric([adapter], num)
        yield by_adapter
        mended = CounterMetricFamily(
            "quire_mended_requests", "Requests that a mend changed", labels=["mend"]
        )
        for mend, num in self._log.num_by_mend.copy().items():
            mended.add_metric([mend], num)
        yield mended
        ignored = "Fields of requests that were ignored, as their names are unknown"
        yield CounterMetricFamily(
            "quire_ignored_fields", ignored, value=self._log.num_ignored_fields
        )

    def _times_as_vllm(self) -> Iterator[Metric]:
        """Return times and ends of all requests as vLLM has them."""
        own = self._own
        every = list(self._log.classes.values())
        for name, part in (
            ("time_to_first_token_seconds", "first"),
            ("inter_token_latency_seconds", "between"),
            ("request_queue_time_seconds", "queue"),
            ("e2e_request_latency_seconds", "whole"),
        ):
            histogram = HistogramMetricFamily(f"vllm:{name}", _AS_VLLM, labels=[*own])
            _add(histogram, [*own.values()], Times.total(getattr(each, part) for each in every))
            yield histogram
        ended = sum((each.ended for each in every), Counter[str]())
        success = CounterMetricFamily(
            "vllm:request_success", _AS_VLLM, labels=[*own, "finished_reason"]
        )
        for reason in ("stop", "length", "abort"):
            success.add_metric([*own.values(), reason], ended[reason])
        yield success


def _counters_as_vllm(
    view: EngineView, manager: CacheManager, own: Mapping[str, str]
) -> Iterator[Metric]:
    """Return what vLLM has too, in its names and with its labels alone: one series each, as autoscalers need."""
    engine, cache = view.counters, manager.stats
    used = max(
        (counts["active"] + counts["pinned"]) / max(sum(counts.values()), 1)
        for counts in block_states(manager)
    )
    for kind, name, value in (
        (GaugeMetricFamily, "num_requests_running", engine["running"]),
        (GaugeMetricFamily, "num_requests_waiting", engine["waiting"]),
        (GaugeMetricFamily, "kv_cache_usage_perc", used),
        (CounterMetricFamily, "num_preemptions", engine["preemptions"]),
        (CounterMetricFamily, "prompt_tokens", engine["prompt_tokens"]),
        (CounterMetricFamily, "generation_tokens", engine["generated_tokens"]),
        (CounterMetricFamily, "prefix_cache_queries", cache.prompt_tokens),
        (CounterMetricFamily, "prefix_cache_hits", cache.hit_tokens),
    ):
        family = kind(f"vllm:{name}", _AS_VLLM, labels=[*own])
        family.add_metric([*own.values()], value)
        yield family


def _passages(told: Mapping[str, Any] | None) -> Iterator[Metric]:
    """Return the verdicts on passages, and their estimate over all tenants with its bounds of 95 % confidence."""
    if told is None:
        return
    says = "Tenants by the verdict on reuse of their passages"
    verdicts = GaugeMetricFamily("quire_passage_verdicts", says, labels=["verdict"])
    for name in ("served", "declined", "open"):
        verdicts.add_metric([name], told[name])
    yield verdicts
    says = "Prompts that were compared with a full forward"
    yield CounterMetricFamily("quire_passage_prompts", says, value=told["prompts"])
    for part, says in (
        ("agreement", "Next tokens behind reused passages that are those of a full forward"),
        ("kl", "Nats per token from a full forward's distributions behind reused passages"),
    ):
        family = GaugeMetricFamily(f"quire_passage_{part}", says, labels=["bound"])
        for bound, suffix in (("estimate", ""), ("low", "_low"), ("high", "_high")):
            if told["estimate"]:
                family.add_metric([bound], told["estimate"][part + suffix])
        yield family


class _Scrape(Collector):
    """The metrics of one scrape, for `generate_latest`."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _add(family: HistogramMetricFamily, labels: list[str], times: Times) -> None:
    ends = [*(str(float(end)) for end in SECONDS), "+Inf"]
    family.add_metric(labels, list(zip(ends, accumulate(times.counts), strict=True)), times.sum_s)
