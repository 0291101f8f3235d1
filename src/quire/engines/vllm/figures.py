"""Figures of tiers for vLLM's metrics: counts since the last time, and how each tier is now."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from quire.tiers.base import Outcome
from quire.tiers.stack.stack import TierStack
from quire.tiers.stack.stats import TierReport

EVERY_S = 1.0
"""Tiers are asked at most so often."""

Figures: TypeAlias = dict[str, dict[str, float]]
"""Figures by tier and name, those of `COUNTS` and `STATES`."""

COUNTS = {
    "hits": "Records that a tier of quire's gave.",
    "misses": "Records that a tier was asked for and did not give.",
    "loaded_bytes": "Bytes that a tier gave.",
    "stored_bytes": "Bytes that a tier took.",
    "load_seconds": "Time of loads from a tier, added up over threads.",
    "dropped": "Records that found no room to wait for a tier.",
}
STATES = {
    "records": "Records in a tier; -1 where it cannot know.",
    "bytes": "Bytes of these records; -1 where it cannot know.",
    "queued_bytes": "Bytes that wait to be written to a tier.",
    "latency_seconds": "Time that a load from a tier takes at least, as the gate has learned it.",
    "in_service": "1 where a tier is read from and written to, 0 where it is left alone.",
}


class TierFigures:
    """Tells what became of tiers since the last time."""

    def __init__(self, stack: TierStack, now: Callable[[], float]) -> None:
        self._stack, self._now = stack, now
        self._counted: Figures = {}
        self._asked_s = -EVERY_S

    def take(self) -> Figures:
        """Return counts since the last time and states now; nothing within `EVERY_S`."""
        if self._now() - self._asked_s < EVERY_S:
            return {}
        self._asked_s = self._now()
        told: Figures = {}
        for report in self._stack.stats(is_settled=False).tiers:
            counts = _counts(report)
            before = self._counted.get(report.tier.name, {})
            self._counted[report.tier.name] = counts
            told[report.tier.name] = {
                name: count - before.get(name, 0) for name, count in counts.items()
            } | _states(report)
        return told


def _counts(report: TierReport) -> dict[str, float]:
    hits = report.loads.get(Outcome.HIT, 0)
    return {
        "hits": hits,
        "misses": sum(report.loads.values()) - hits,
        "loaded_bytes": report.loaded_bytes,
        "stored_bytes": report.stored_bytes,
        "load_seconds": report.load_s,
        "dropped": report.dropped,
    }


def _states(report: TierReport) -> dict[str, float]:
    return {
        "records": report.tier.num_records,
        "bytes": report.tier.num_bytes,
        "queued_bytes": report.queued_bytes,
        "latency_seconds": report.latency_s,
        "in_service": float(report.reading == report.writing == "closed"),
    }
