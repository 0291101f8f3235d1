"""Counts of a stack, tier by tier."""

from __future__ import annotations

from collections import Counter

import msgspec

from quire.tiers.base import Outcome, TierStats


class TierReport(msgspec.Struct, frozen=True):
    """One tier of a stack: its contents, the requests to it through the stack, and its health.

    `loads`, `stores`   what became of keys, by `Outcome`; a load that found a tier switched off: "skipped";
                        a question that was not answered: "lookup_timeout" or "lookup_error"
    `loaded_bytes`, `stored_bytes`, `load_s`, `store_s`
                        what went through, and the time of the calls, added up over threads
    `queued_bytes`      records that wait to be written
    `dropped`           records that found no room to wait, by number
    `late`              reads that came after their request had gone on
    `joined`            keys that were given to a second request from the first one's read
    `reading`, `writing` whether it is called: "closed" (it is), "open" (it is not) or "trying"
    `num_opened`        times that either was switched off
    `latency_s`, `bandwidth`  what a load costs, as the gate has learned it: seconds, bytes per second
    """

    tier: TierStats
    loads: dict[str, int]
    stores: dict[str, int]
    loaded_bytes: int
    stored_bytes: int
    load_s: float
    store_s: float
    queued_bytes: int
    dropped: int
    late: int
    joined: int
    reading: str
    writing: str
    num_opened: int
    latency_s: float
    bandwidth: float

    @property
    def load_mb_s(self) -> float:
        """Megabytes per second of loads, while they ran."""
        return self.loaded_bytes / 1e6 / self.load_s if self.load_s else 0.0

    @property
    def store_mb_s(self) -> float:
        """Megabytes per second of stores, while they ran."""
        return self.stored_bytes / 1e6 / self.store_s if self.store_s else 0.0


class StackStats(msgspec.Struct, frozen=True):
    """A stack's tiers, fastest first.

    `loads`       what became of the keys that `load` was asked for: "hit", or the first cause that was
                  more than absence, else "absent"
    `refused_keys`  keys that were found and that the gate did not load, since computing is faster
    `passed_over`   times that a prompt was not handed down: there was no time for it, and no hits have saved any
    """

    tiers: list[TierReport]
    loads: dict[str, int]
    refused_keys: int
    passed_over: int

    def __str__(self) -> str:
        head = (
            f"{'tier':<12}{'records':>10}{'hits':>10}{'misses':>10}{'load MB/s':>11}"
            f"{'stored':>10}{'store MB/s':>12}{'queued':>12}{'dropped':>9}  reading/writing"
        )
        rows = [head]
        for each in self.tiers:
            hits = each.loads.get(Outcome.HIT, 0)
            rows.append(
                f"{each.tier.name:<12}{each.tier.num_records:>10}{hits:>10}"
                f"{sum(each.loads.values()) - hits:>10}{each.load_mb_s:>11.0f}"
                f"{each.stores.get(Outcome.STORED, 0):>10}{each.store_mb_s:>12.0f}"
                f"{each.queued_bytes:>12}{each.dropped:>9}  {each.reading}/{each.writing}"
            )
        if self.passed_over:
            rows.append(
                f"{self.passed_over:,} times a prompt was not handed down: it would have taken more of the time than "
                "busy_share and what hits have saved; busy_share=1 hands all down"
            )
        return "\n".join(rows)


def counted(counts: Counter[str]) -> dict[str, int]:
    """Return counts as plain data, sorted by name."""
    return {str(name): counts[name] for name in sorted(counts)}


class Meter(msgspec.Struct):
    """Counts of one tier, as in `TierReport`. Not thread-safe; its owner locks."""

    loads: Counter[str] = msgspec.field(default_factory=Counter[str])
    stores: Counter[str] = msgspec.field(default_factory=Counter[str])
    loaded_bytes: int = 0
    stored_bytes: int = 0
    load_s: float = 0.0
    store_s: float = 0.0
    dropped: int = 0
    late: int = 0
    joined: int = 0
