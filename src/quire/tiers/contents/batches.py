"""Many records at a time, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from quire.tiers.base import ListedRecord, Outcome, Tier
from quire.tiers.format import new_buffer

BATCH_BYTES = 32 << 20
BATCH_RECORDS = 4096
"""Each has a mapping of its own, of which systems allow a process some 65,000."""
_TIMEOUT_S = 60.0

_T = TypeVar("_T")


def read_batches(
    tier: Tier, entries: Sequence[ListedRecord]
) -> Iterator[tuple[int, list[tuple[ListedRecord, memoryview, Outcome]]]]:
    """Read records in batches; yield how many are read, and the bytes and the outcome of each of a batch."""
    done = 0
    for batch in batches(entries, [entry.num_bytes for entry in entries]):
        done += len(batch)
        buffers = [new_buffer(entry.num_bytes) for entry in batch]
        outcomes = tier.get([entry.key for entry in batch], buffers, _TIMEOUT_S)
        yield done, list(zip(batch, buffers, outcomes, strict=True))


def batches(
    items: Sequence[_T],
    sizes: Sequence[int],
    limit_bytes: int = BATCH_BYTES,
    limit: int = BATCH_RECORDS,
) -> Iterator[Sequence[_T]]:
    """Yield items in runs of up to `limit` items and `limit_bytes`, at least one."""
    first = held = 0
    for index, size in enumerate(sizes):
        if index > first and (held + size > limit_bytes or index - first == limit):
            yield items[first:index]
            first, held = index, 0
        held += size
    if first < len(items):
        yield items[first:]
