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
    """Counts since the last time, by the names in `COUNTERS`."""

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, count in other.data.items():
            self.data[name] = self.data.get(name, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not self.data


class QuirePromMetrics(KVConnectorPromMetrics):
    """A counter `vllm:quire_...` for each of `COUNTERS`, by engine."""

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

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, count in transfer_stats_data.items():
            self._counters[name][engine_idx].inc(count)

    def _by_engine(self, metric: Counter) -> dict[int, Counter]:
        return {
            engine: metric.labels(*labels) for engine, labels in self.per_engine_labelvalues.items()
        }
