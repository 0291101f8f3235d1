"""How a tier is timed beside the raw thing it stands on: the same bytes, in turns."""

from __future__ import annotations

import gc
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from statistics import median
from typing import TypeAlias

import numpy as np

from quire.errors import TierError
from quire.tiers.base import Outcome, Tier
from quire.tiers.format import Header, new_buffer, payload_of, record_bytes, seal

Row: TypeAlias = dict[str, float | str]
Views: TypeAlias = Sequence[memoryview]

BATCH_KEYS = 32
"""Keys of one call, as a prompt of 512 tokens at 16 per block has."""

CALL_TIMEOUT_S = 60.0
LOOKUP_KEYS = 256
LOOKUP_SECONDS = 0.15
MIN_ROUNDS = 3
FINGERPRINT = sha256(b"quire bench tiers").digest()


class Raw(ABC):
    """What a tier stands on, used as plainly as it can be: payloads in places by number, no checks."""

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


class Records:
    """Sealed records of one payload size in pages of their own, and as many buffers to read into.

    Payloads are noise, so that nothing on the way can make them smaller. `fresh` gives all of them new keys.
    """

    def __init__(self, payload_bytes: int, count: int) -> None:
        self.payload_bytes = payload_bytes
        size = record_bytes(payload_bytes)
        noise = np.random.default_rng(payload_bytes)
        self.records = [new_buffer(size) for _ in range(count)]
        self.buffers = [new_buffer(size) for _ in range(count)]
        self.payloads = [payload_of(record, payload_bytes) for record in self.records]
        for payload in self.payloads:
            payload[:] = noise.bytes(payload_bytes)
        self.raw_sources = [_aligned(payload) for payload in self.payloads]
        self.raw_buffers = [new_buffer(payload_bytes) for _ in range(count)]
        self._round = 0
        self.keys: list[bytes] = []

    def fresh(self) -> None:
        """Seal all records under keys that were never used before."""
        self._round += 1
        self.keys = [
            sha256(b"%d %d %d" % (self.payload_bytes, self._round, index)).digest()
            for index in range(len(self.records))
        ]
        for key, record in zip(self.keys, self.records, strict=True):
            seal(record, Header(key, FINGERPRINT, self.payload_bytes, 16))

    @property
    def num_bytes(self) -> int:
        """Payload bytes of all records together: what a figure counts."""
        return self.payload_bytes * len(self.records)


def measure(pair: Pair, records: Records, *, rounds: int, budget_s: float) -> Row:
    """Return the row of one tier and one block size.

    A round puts all records under new keys, then gets them again, `BATCH_KEYS` a call. The raw thing moves the
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
    lookups_s = _lookups(pair.tier, records)
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


def _round(pair: Pair, records: Records, number: int) -> dict[str, float]:
    """Put all, then get all, both ways batch by batch; return the seconds of each."""
    records.fresh()
    taken: dict[str, float] = {}
    gc.collect()
    for way in ("put", "get"):
        ways = [
            (way, _tier_way(pair.tier, records, way)),
            (f"raw_{way}", _raw_way(pair.raw, records, way)),
        ]
        for batch, start in enumerate(range(0, len(records.records), BATCH_KEYS)):
            numbers = range(start, min(start + BATCH_KEYS, len(records.records)))
            for name, call in ways if (batch + number) % 2 else reversed(ways):
                begun = time.perf_counter()
                call(numbers)
                taken[name] = taken.get(name, 0.0) + time.perf_counter() - begun
    return taken


def _fill(pair: Pair, records: Records) -> None:
    """Put new records until the tier makes room for them."""
    held = -1
    while pair.keeps and pair.tier.stats().num_records > held:
        held = pair.tier.stats().num_records
        records.fresh()
        pair.tier.put(records.keys, records.records, CALL_TIMEOUT_S)


def _tier_way(tier: Tier, records: Records, way: str) -> Callable[[range], None]:
    call, buffers, expected = (
        (tier.put, records.records, Outcome.STORED)
        if way == "put"
        else (tier.get, records.buffers, Outcome.HIT)
    )

    def batch(numbers: range) -> None:
        part = slice(numbers.start, numbers.stop)
        outcomes = call(records.keys[part], buffers[part], CALL_TIMEOUT_S)
        if outcomes.count(expected) != len(outcomes):
            others = sorted({each.value for each in outcomes if each is not expected})
            raise TierError(f"{tier!r}: {way} of {len(outcomes)} records gave {', '.join(others)}")

    return batch


def _raw_way(raw: Raw, records: Records, way: str) -> Callable[[range], None]:
    call, views = (raw.put, records.raw_sources) if way == "put" else (raw.get, records.raw_buffers)
    return lambda numbers: call(numbers, views[numbers.start : numbers.stop])


def _forget(pair: Pair, records: Records) -> None:
    if not pair.keeps:
        pair.tier.delete(records.keys, CALL_TIMEOUT_S)
        pair.raw.forget()


def _compare(records: Records) -> None:
    """Raise `TierError` unless both ways read what was written."""
    if any(got != put for got, put in zip(records.buffers, records.records, strict=True)):
        raise TierError("the tier read other bytes than were put")
    if any(got != put for got, put in zip(records.raw_buffers, records.payloads, strict=True)):
        raise TierError("the raw way read other bytes than were written")


def _lookups(tier: Tier, records: Records) -> float:
    """Return how many keys `contains` answers in a second, half of them absent, 256 a call."""
    there = records.keys[: LOOKUP_KEYS // 2]
    keys = [*there, *(sha256(key).digest() for key in there)]
    keys = (keys * (LOOKUP_KEYS // len(keys) + 1))[:LOOKUP_KEYS]
    calls, began = 0, time.perf_counter()
    while (taken := time.perf_counter() - began) < LOOKUP_SECONDS:
        tier.contains(keys, CALL_TIMEOUT_S)
        calls += 1
    return calls * len(keys) / taken


def _aligned(payload: memoryview) -> memoryview:
    """Return a copy that begins at a page, as direct writes ask."""
    copy = new_buffer(len(payload))
    copy[:] = payload
    return copy
