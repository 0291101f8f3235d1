"""Rows of tiers: how fast records go in and come back, checksums included."""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from statistics import median

import numpy as np

from quire.bench.timing import Progress, Row
from quire.errors import ConfigError, TierError
from quire.tiers import Tier, TierKey
from quire.tiers.base import Outcome
from quire.tiers.format import Header, new_buffer, payload_of, record_bytes, seal
from quire.tiers.opening import open_tier
from quire.tiers.trust import Trust

BATCH_KEYS = 32
"""Keys of one call, as a prompt of 512 tokens at 16 per block has."""

LOOKUP_KEYS = 256
LOOKUP_SECONDS = 0.15
CALL_TIMEOUT_S = 60.0
FINGERPRINT = sha256(b"quire bench tiers").digest()
SIGNING = Trust(TierKey(sha256(b"a tier key").digest()))


class Records:
    """Sealed records of one payload size, and as many buffers to read into.

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
        self._round = 0
        self.keys: list[bytes] = []

    def fresh(self, signer: TierKey | None = None) -> None:
        """Seal all records under keys that were never used before, signed with a tier key."""
        self._round += 1
        self.keys = [
            sha256(b"%d %d %d" % (self.payload_bytes, self._round, index)).digest()
            for index in range(len(self.records))
        ]
        for key, record in zip(self.keys, self.records, strict=True):
            seal(record, Header(key, FINGERPRINT, self.payload_bytes, 16), signer)

    @property
    def num_bytes(self) -> int:
        """Payload bytes of all records together: what a figure counts."""
        return self.payload_bytes * len(self.records)

    def batches(self) -> list[slice]:
        """Return the records of each call."""
        return [slice(at, at + BATCH_KEYS) for at in range(0, len(self.records), BATCH_KEYS)]


def rows(
    lines: Sequence[str] = (),
    progress: Progress | None = None,
    *,
    block_bytes: Sequence[int] = (64 << 10, 1 << 20),
    round_bytes: int = 64 << 20,
    rounds: int = 9,
) -> list[Row]:
    """Measure tiers, one row per tier and block size: wall time, medians of rounds, MB/s (10^6 bytes of payload).

    `lines` say which, as `open_tier` takes them; without any: memory, and a disk tier among the temporary files. A round
    puts and gets `round_bytes` of payload and then deletes them, which is not timed; the first one does not count. Every
    second round is of records that are signed with a tier key, verified when they are read; signing counts as putting. A tier
    that fails has one row with the `reason`. Raises `ConfigError` for tiers and sizes that cannot be.
    """
    if not block_bytes or min(block_bytes) < 1:
        raise ConfigError(f"block sizes are at least 1 byte, not {block_bytes}")
    if round_bytes < max(block_bytes):
        raise ConfigError(
            f"a round of {round_bytes} bytes holds no block of {max(block_bytes)}; give --bytes"
        )
    measured: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as folder:
        for line in lines or _local_tiers(Path(folder), round_bytes):
            try:
                for size in block_bytes:
                    with open_tier(line) as tier:
                        if progress is not None:
                            progress(f"{tier.name}, {size >> 10} KiB")
                        measured.append(_row(tier, Records(size, round_bytes // size), rounds))
            except TierError as error:
                measured.append({"tier": line.partition(":")[0], "reason": str(error)})
    return measured


def _local_tiers(folder: Path, round_bytes: int) -> tuple[str, ...]:
    """Return the tiers that are measured where none is named, with room for two rounds."""
    capacity = 2 * round_bytes + (64 << 20)
    return f"host:{capacity}", f"disk:{folder / 'kv'}?capacity={capacity}"


def _row(tier: Tier, records: Records, rounds: int) -> Row:
    """Return the row of one tier and one block size. Raises `TierError` where records do not come back."""
    _round(tier, records)
    if any(got != put for got, put in zip(records.buffers, records.records, strict=True)):
        raise TierError(f"{tier.name} read other bytes than were put")
    lookups_s = lookups(tier, records)
    rates: dict[str, list[float]] = {"put": [], "get": [], "signed_put": [], "signed_get": []}
    for _ in range(rounds):
        for kind, trust in (
            ("", None),
            ("signed_", SIGNING),
        ):  # in turn, so that both meet the same machine
            tier.delete(records.keys, CALL_TIMEOUT_S)
            tier.trust = trust
            for way, seconds in _round(tier, records).items():
                rates[kind + way].append(records.num_bytes / seconds / 1e6)
    tier.trust = None
    tier.delete(records.keys, CALL_TIMEOUT_S)
    return {
        "tier": tier.name,
        "block_bytes": records.payload_bytes,
        "put_mb_s": median(rates["put"]),
        "get_mb_s": median(rates["get"]),
        "signed_put_mb_s": median(rates["signed_put"]),
        "signed_get_mb_s": median(rates["signed_get"]),
        "lookups_s": lookups_s,
    }


def _round(tier: Tier, records: Records) -> dict[str, float]:
    """Put all records under new keys, then get them, `BATCH_KEYS` a call; return the seconds of each.

    Sealing is timed for a tier with a tier key alone, where it is most of the price.
    """
    key = None if tier.trust is None else tier.trust.key
    began = time.perf_counter()
    records.fresh()
    sealed = time.perf_counter()
    records.fresh(key)
    signing_s = max(0.0, time.perf_counter() - sealed - (sealed - began)) if key else 0.0
    gc.collect()
    started = time.perf_counter() - signing_s
    for part in records.batches():
        check_all(
            tier.put_sealed(records.keys[part], records.records[part], CALL_TIMEOUT_S),
            Outcome.STORED,
        )
    stored = time.perf_counter()
    for part in records.batches():
        check_all(tier.get(records.keys[part], records.buffers[part], CALL_TIMEOUT_S), Outcome.HIT)
    return {"put": stored - started, "get": time.perf_counter() - stored}


def check_all(outcomes: Sequence[Outcome], expected: Outcome) -> None:
    """Raise `TierError` unless all records of a call fared as expected."""
    others = sorted({each.value for each in outcomes if each is not expected})
    if others:
        raise TierError(
            f"of {len(outcomes)} records some were {', '.join(others)}, not {expected.value}"
        )


def lookups(tier: Tier, records: Records) -> float:
    """Return how many keys `contains` answers in a second, half of them absent, 256 a call."""
    there = records.keys[: LOOKUP_KEYS // 2]
    keys = [*there, *(sha256(key).digest() for key in there)]
    keys = (keys * (LOOKUP_KEYS // len(keys) + 1))[:LOOKUP_KEYS]
    calls, began = 0, time.perf_counter()
    while (taken := time.perf_counter() - began) < LOOKUP_SECONDS:
        tier.contains(keys, CALL_TIMEOUT_S)
        calls += 1
    return calls * len(keys) / taken
