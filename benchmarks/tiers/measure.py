"""Timing of a tier beside its raw medium: the same bytes, in turns."""

from __future__ import annotations

import gc
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeAlias

from quire.bench.tier_rows import CALL_TIMEOUT_S, Records, Row, check_all, lookups
from quire.errors import TierError
from quire.tiers.base import Outcome, Tier
from quire.tiers.format import new_buffer

Views: TypeAlias = Sequence[memoryview]

MIN_ROUNDS = 3


class Raw(ABC):
    """The raw medium of a tier, used as plainly as possible: payloads in places by number, no checks."""

    @abstractmethod
    def put(self, numbers: range, payloads: Views) -> None:
        """Write payloads to these places."""

    @abstractmethod
    def get(self, numbers: range, buffers: Views) -> None:
        """Read these places, which were written in the same round."""

    def forget(self) -> None:  # noqa: B027 - most have nothing to forget
        """Remove what the round wrote where the next one would otherwise write over it; not timed."""

    def close(self) -> None:  # noqa: B027 - nor to close
        """Give back what it holds."""


@dataclass(frozen=True)
class Pair:
    """A tier and the raw thing beside it, both empty and open.

    `keeps`  whether the tier makes room by itself: then it is filled before anything is timed, and its records
             are left to be evicted; else they are deleted between rounds, which is not timed
    `mode`   how both open what they write to, for people
    """

    tier: Tier
    raw: Raw
    keeps: bool = False
    mode: str = ""


class RawRecords(Records):
    """Records, and for the raw way their payloads in pages of their own, as direct writes ask."""

    def __init__(self, payload_bytes, count):
        super().__init__(payload_bytes, count)
        self.raw_sources = [_aligned(payload) for payload in self.payloads]
        self.raw_buffers = [new_buffer(payload_bytes) for _ in range(count)]


def measure(pair: Pair, records: RawRecords, *, rounds: int, budget_s: float) -> Row:
    """Return the row of one tier and one block size.

    A round puts all records under new keys, then gets them again, a batch of keys a call. The raw thing moves the
    same payloads in the same batches; tier and raw take turns batch by batch, and so does who goes first.
    Figures are medians over rounds in MB/s (10^6 bytes of payload), ratios the medians of the rounds' ratios. Two rounds
    before that are not counted. After `budget_s` seconds no further round begins, once there are three.

    Raises `TierError` where a record was not stored, not found again, or not the same.
    """
    _round(pair, records, 0)
    _compare(records)
    _forget(pair, records)
    _fill(pair, records)
    _round(pair, records, 1)
    lookups_s = lookups(pair.tier, records)
    _forget(pair, records)
    rates: dict[str, list[float]] = {}
    began = time.perf_counter()
    for number in range(rounds):
        for name, seconds in _round(pair, records, number).items():
            rates.setdefault(name, []).append(records.num_bytes / seconds / 1e6)
        _forget(pair, records)
        if number + 1 >= MIN_ROUNDS and time.perf_counter() - began > budget_s:
            break
    row: Row = {"tier": pair.tier.name, "block_bytes": records.payload_bytes}
    row |= {f"{name}_mb_s": median(values) for name, values in rates.items()}
    for name in ("put", "get"):
        turns = zip(rates[name], rates[f"raw_{name}"], strict=True)
        row[f"{name}_ratio"] = median(mine / raw for mine, raw in turns)
    return row | {"lookups_s": lookups_s, "rounds": len(rates["put"]), "mode": pair.mode}


def _round(pair: Pair, records: RawRecords, number: int) -> dict[str, float]:
    """Put all, then get all, both ways batch by batch; return the seconds of each."""
    records.fresh()
    taken: dict[str, float] = {}
    gc.collect()
    for way in ("put", "get"):
        ways = [
            (way, _tier_way(pair.tier, records, way)),
            (f"raw_{way}", _raw_way(pair.raw, records, way)),
        ]
        for batch, part in enumerate(records.batches()):
            numbers = range(*part.indices(len(records.records)))
            for name, call in ways if (batch + number) % 2 else reversed(ways):
                begun = time.perf_counter()
                call(numbers)
                taken[name] = taken.get(name, 0.0) + time.perf_counter() - begun
    return taken


def _fill(pair: Pair, records: RawRecords) -> None:
    """Put new records until the tier makes room for them."""
    held = -1
    while pair.keeps and pair.tier.stats().num_records > held:
        held = pair.tier.stats().num_records
        records.fresh()
        pair.tier.put(records.keys, records.records, CALL_TIMEOUT_S)


def _tier_way(tier: Tier, records: RawRecords, way: str) -> Callable[[range], None]:
    call, buffers, expected = (
        (tier.put, records.records, Outcome.STORED)
        if way == "put"
        else (tier.get, records.buffers, Outcome.HIT)
    )

    def batch(numbers: range) -> None:
        part = slice(numbers.start, numbers.stop)
        check_all(call(records.keys[part], buffers[part], CALL_TIMEOUT_S), expected)

    return batch


def _raw_way(raw: Raw, records: RawRecords, way: str) -> Callable[[range], None]:
    call, views = (raw.put, records.raw_sources) if way == "put" else (raw.get, records.raw_buffers)
    return lambda numbers: call(numbers, views[numbers.start : numbers.stop])


def _forget(pair: Pair, records: RawRecords) -> None:
    if not pair.keeps:
        pair.tier.delete(records.keys, CALL_TIMEOUT_S)
        pair.raw.forget()


def _compare(records: RawRecords) -> None:
    """Raise `TierError` unless both ways read what was written."""
    if any(got != put for got, put in zip(records.buffers, records.records, strict=True)):
        raise TierError("the tier read other bytes than were put")
    if any(got != put for got, put in zip(records.raw_buffers, records.payloads, strict=True)):
        raise TierError("the raw way read other bytes than were written")


def _aligned(payload: memoryview) -> memoryview:
    """Return a copy that begins at a page, as direct writes ask."""
    copy = new_buffer(len(payload))
    copy[:] = payload
    return copy
