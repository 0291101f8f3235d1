"""Records that follow from numbers, for tests of tiers: who knows the key knows the bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import sha256

import numpy as np
import xxhash

from quire.exchange.hashing import NO_TENANT
from quire.tiers.format import (
    HEADER_BYTES,
    MAJOR,
    TAG_AT,
    TENANT_AT,
    Header,
    new_buffer,
    payload_of,
    record_bytes,
    seal,
)

PAYLOADS = (0, 1, 64, 1000, 65_343, 65_344, 65_345, 200_000, 1 << 20, 2_000_005)
"""Sizes around what matters: nothing, one byte, the step to whole pages, megabytes."""


def name_of(number: int, tag: bytes = NO_TENANT) -> bytes:
    """Return a unique key of 32 bytes, with a tenant tag."""
    return sha256(b"contract" + number.to_bytes(8, "little") + tag).digest()[:TENANT_AT] + tag


def names_of(numbers: Iterable[int], tag: bytes = NO_TENANT) -> list[bytes]:
    """Return `name_of` each."""
    return [name_of(number, tag) for number in numbers]


def record_of(key: bytes, payload_bytes: int = 1000, generation: int = 0) -> memoryview:
    """Return a sealed record whose payload follows from its key and generation."""
    record = new_buffer(record_bytes(payload_bytes))
    numbers = np.random.default_rng([generation, *key])
    payload_of(record, payload_bytes)[:] = numbers.bytes(payload_bytes)
    fingerprint = sha256(b"contract").digest()
    seal(record, Header(key, fingerprint, payload_bytes, 16, generation=generation))
    return record


def records_of(keys: Sequence[bytes], payload_bytes: int = 1000) -> list[memoryview]:
    """Return `record_of` each."""
    return [record_of(key, payload_bytes) for key in keys]


def buffers_like(records: Sequence[memoryview]) -> list[memoryview]:
    """Return an empty buffer for each record."""
    return [new_buffer(len(record)) for record in records]


def later_version(record: memoryview) -> bytes:
    """Return a record as a later major version of the format would have sealed it."""
    changed = bytearray(record)
    changed[8:10] = (MAJOR + 1).to_bytes(2, "little")
    tag = xxhash.xxh3_64_intdigest(changed[:TAG_AT]).to_bytes(8, "little")
    changed[TAG_AT:HEADER_BYTES] = tag
    return bytes(changed)


def flipped(record: memoryview, offset: int) -> bytes:
    """Return a record with the lowest bit of one byte turned."""
    changed = bytearray(record)
    changed[offset] ^= 1
    return bytes(changed)
