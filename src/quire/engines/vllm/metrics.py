"""Metrics of the connector that vLLM logs and exports, as for its own connectors."""

# vLLM is not there where types are checked: it has an environment of its own.
# pyright: basic, reportMissingImports=false

from __future__ import annotations

from typing import Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from quire.engines.vllm.figures import COUNTS, STATES, Figures

COUNTERS = {
    "loaded_requests": "Requests that got tokens from quire's tiers.",
    "loaded_tokens": "Tokens that came from quire's tiers.",
    "saved_blocks": "Blocks that were copied out of the KV cache for quire's tiers.",
    "passed_over_blocks": "Blocks that were not, for want of room or time.",
    "failed_blocks": "Blocks that were found and did not come whole; they were computed.",
    "cut_blocks": "Blocks that were not loaded because `staging` had no room; they were computed.",
    "refused_blocks": "Blocks that were found and that the gate did not load: computing them is faster.",
    "late": "Prompts whose blocks did not come in time; they were computed.",
}


class QuireStats(KVConnectorStats):
    """Counts since the last time, by the names in `COUNTERS`; under `tiers` the `Figures` of each tier."""

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, count in other.data.items():
            if name == "tiers":
                self._add(count)
            else:
                self.data[name] = self.data.get(name, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        told = {name: count for name, count in self.data.items() if name != "tiers"}
        for tier, figures in self.data.get("tiers", {}).items():
            told |= {f"{tier} {name}": figure for name, figure in figures.items() if figure}
        return told

    def is_empty(self) -> bool:
        return not self.data

    def _add(self, tiers: Figures) -> None:
        mine: Figures = self.data.setdefault("tiers", {})
        for tier, figures in tiers.items():
            before = mine.get(tier, {})
            mine[tier] = {
                name: figure + before.get(name, 0) if name in COUNTS else figure
                for name, figure in figures.items()
            }


class QuirePromMetrics(KVConnectorPromMetrics):
    """A counter `vllm:quire_...` for each of `COUNTERS`, by engine; `vllm:quire_tier_...` by engine and tier."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._counters = {
            name: self._by_engine(
                self._counter_cls(
                    f"vllm:quire_{name}", documentation=text, labelnames=self._labelnames
                )
            )
            for name, text in COUNTERS.items()
        }
        labels = [*self._labelnames, "tier"]
        self._tier_counts = {
            name: self._counter_cls(
                f"vllm:quire_tier_{name}", documentation=text, labelnames=labels
            )
            for name, text in COUNTS.items()
        }
        self._tier_states = {
            name: self._gauge_cls(
                f"vllm:quire_tier_{name}",
                documentation=text,
                labelnames=labels,
                multiprocess_mode="mostrecent",
            )
            for name, text in STATES.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, count in transfer_stats_data.items():
            if name != "tiers":
                self._counters[name][engine_idx].inc(count)
        labels = self.per_engine_labelvalues[engine_idx]
        for tier, figures in transfer_stats_data.get("tiers", {}).items():
            for name, metric in self._tier_counts.items():
                metric.labels(*labels, tier).inc(max(figures[name], 0))
            for name, metric in self._tier_states.items():
                metric.labels(*labels, tier).set(figures[name])

    def _by_engine(self, metric: Counter) -> dict[int, Counter]:
        return {
            engine: metric.labels(*labels) for engine, labels in self.per_engine_labelvalues.items()
        }
