"""Ways in which the bytes of a record go wrong (`damages.py`: the files of a disk tier), and how to find records in the files of a tier.

Used by `test_corruption.py` and by `benchmarks/fuzz_records.py`. Each mutation takes a source of
chance and a `Victim`, and returns what a reader would find instead, possibly of another length. What it
returns may by chance be the record itself, or an older one of the same key: those are no wrong bytes.
"""

import random
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import msgspec
import xxhash

from quire.tiers.format import (
    HEADER_BYTES,
    KEY_BYTES,
    KEY_ID_AT,
    KEY_OFFSET,
    MAC_AT,
    MAC_END,
    MAGIC,
    PAGE_BYTES,
    TAG_AT,
    Header,
    describes,
    new_buffer,
    payload_of,
    record_bytes,
    seal,
)

SECTOR_BYTES = 512
KEY_AT = KEY_OFFSET
CHECKSUM_AT = TAG_AT

WRITTEN = Header(bytes(KEY_BYTES), sha256(b"model").digest(), 0, token_count=16)
"""What all records say of themselves but key and payload."""

SIZES = (0, 1, 64, 500, 1_000, 4_000, 16_000, 65_343, 65_344, 70_000)
"""Payloads around what matters: nothing, one byte, the padding to 64, the step to whole pages."""


class Victim(NamedTuple):
    """A record, what stood there before, and records that do not belong there.

    `older`  was put under the same key before, has the same size
    `other`  has another key and the same size
    `alien`  has another key and another size
    """

    key: bytes
    record: bytes
    older: bytes
    other: bytes
    alien: bytes

    def may_be_read(self, found: bytes | memoryview) -> bool:
        """Whether this payload was put under the key once."""
        return found[HEADER_BYTES:] in (self.record[HEADER_BYTES:], self.older[HEADER_BYTES:])

    def reads(self, found: bytes | memoryview) -> bool:
        """Whether a record that a tier found is taken for what was put: as the engine does that puts it."""
        return describes(memoryview(found), WRITTEN)


def key_of(number: int) -> bytes:
    """Return a key that no other number has."""
    return sha256(b"victim" + number.to_bytes(8, "little")).digest()


def make_record(chance: random.Random, key: bytes, payload_bytes: int, generation: int) -> bytes:
    """Return a sealed record: zeros, repeated patterns or noise, as KV has them."""
    record = new_buffer(record_bytes(payload_bytes))
    kind = chance.randrange(4)
    if kind == 0:
        payload = bytes(payload_bytes)
    elif kind == 1:
        payload = (chance.randbytes(16) * (payload_bytes // 16 + 1))[:payload_bytes]
    else:
        payload = chance.randbytes(payload_bytes)
    payload_of(record, payload_bytes)[:] = payload
    fields = {"key": key, "payload_bytes": payload_bytes, "generation": generation}
    seal(record, msgspec.structs.replace(WRITTEN, **fields))
    return bytes(record)


def make_victim(chance: random.Random, number: int, payload_bytes: int | None = None) -> Victim:
    """Return a record with its neighbours, all different, sizes by chance unless given."""
    size = chance.choice(SIZES) if payload_bytes is None else payload_bytes
    key, stranger = key_of(number), key_of(-1 - number & (1 << 62) - 1)
    return Victim(
        key,
        make_record(chance, key, size, generation=2),
        make_record(chance, key, size, generation=1),
        make_record(chance, stranger, size, generation=3),
        make_record(chance, stranger, chance.choice(SIZES) + 777, generation=4),
    )


def bits_flip(chance: random.Random, victim: Victim) -> bytes:
    changed = bytearray(victim.record)
    for _ in range(chance.choice((1, 1, 1, 2, 3, 8, 64))):
        changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def header_bits_flip(chance: random.Random, victim: Victim) -> bytes:
    changed = bytearray(victim.record)
    for _ in range(chance.choice((1, 1, 2, 3))):
        changed[chance.randrange(HEADER_BYTES)] ^= 1 << chance.randrange(8)
    return bytes(changed)


def is_cut(chance: random.Random, victim: Victim) -> bytes:
    return victim.record[: _place(chance, victim.record)]


def ends_in_zeros(chance: random.Random, victim: Victim) -> bytes:
    place = _place(chance, victim.record)
    return victim.record[:place] + bytes(len(victim.record) - place)


def ends_in_noise(chance: random.Random, victim: Victim) -> bytes:
    place = _place(chance, victim.record)
    return victim.record[:place] + chance.randbytes(len(victim.record) - place)


def is_too_long(chance: random.Random, victim: Victim) -> bytes:
    extra = chance.choice((1, 63, 64, 128, SECTOR_BYTES, PAGE_BYTES))
    return victim.record + (bytes(extra) if chance.random() < 0.5 else chance.randbytes(extra))


def is_spliced(chance: random.Random, victim: Victim) -> bytes:
    place = _place(chance, victim.record)
    parts = [victim.record, chance.choice((victim.other, victim.older, victim.alien))]
    chance.shuffle(parts)
    return parts[0][:place] + parts[1][place:]


def is_torn(chance: random.Random, victim: Victim) -> bytes:
    """An overwrite of which only some sectors or pages reached the disk."""
    unit = chance.choice((64, SECTOR_BYTES, PAGE_BYTES))
    return b"".join(
        chance.choice((victim.record, victim.older, victim.record))[at : at + unit]
        for at in range(0, len(victim.record), unit)
    )


def swaps_header(chance: random.Random, victim: Victim) -> bytes:
    before, behind = chance.choice(
        (
            (victim.record, victim.other),
            (victim.record, victim.older),
            (victim.older, victim.record),
            (victim.record, victim.alien),
            (victim.other, victim.record),
        )
    )
    return before[:HEADER_BYTES] + behind[HEADER_BYTES:]


def is_shifted(chance: random.Random, victim: Victim) -> bytes:
    by = chance.choice((1, 2, 7, 64, HEADER_BYTES, SECTOR_BYTES))
    size = len(victim.record)
    if chance.random() < 0.5:
        return (chance.randbytes(by) + victim.record)[:size]
    return (victim.record[by:] + bytes(by))[-size:]


def loses_bytes(chance: random.Random, victim: Victim) -> bytes:
    """Some bytes in the middle are not there; what follows moves up."""
    start = _place(chance, victim.record)
    by = chance.choice((1, 4, 64, SECTOR_BYTES))
    kept = victim.record[:start] + victim.record[start + by :]
    return kept + bytes(len(victim.record) - len(kept))


def has_zero_pages(chance: random.Random, victim: Victim) -> bytes:
    unit = chance.choice((64, SECTOR_BYTES, PAGE_BYTES))
    changed = bytearray(victim.record)
    start = chance.randrange(0, len(changed), unit)
    end = min(len(changed), start + unit * chance.choice((1, 1, 2, 8)))
    changed[start:end] = bytes(end - start)
    return bytes(changed)


def swaps_pages(chance: random.Random, victim: Victim) -> bytes:
    unit = chance.choice((64, SECTOR_BYTES, PAGE_BYTES))
    pages = [victim.record[at : at + unit] for at in range(0, len(victim.record), unit)]
    first, second = chance.randrange(len(pages)), chance.randrange(len(pages))
    pages[first], pages[second] = pages[second], pages[first]
    return b"".join(pages)


def is_another_record(chance: random.Random, victim: Victim) -> bytes:
    """A replay: a good record of another key stands where this one was."""
    return chance.choice((victim.other, victim.alien))


def is_an_older_record(_: random.Random, victim: Victim) -> bytes:
    """A replay under the same key: it was put once, so it may be read."""
    return victim.older


def is_rubbish(chance: random.Random, victim: Victim) -> bytes:
    size = chance.choice((0, 1, HEADER_BYTES - 1, HEADER_BYTES, len(victim.record)))
    return chance.choice((bytes(size), b"\xff" * size, chance.randbytes(size)))


FIELDS = {
    "magic": (0, 8),
    "major": (8, 2),
    "minor": (10, 2),
    "group": (12, 2),
    "dtype": (14, 2),
    "token count": (16, 4),
    "reserved": (20, 4),
    "length": (24, 8),
    "generation": (32, 8),
    "payload checksum": (40, 8),
    "fingerprint": (48, 32),
    "key": (KEY_AT, KEY_BYTES),
    "key id": (KEY_ID_AT, MAC_AT - KEY_ID_AT),
    "MAC": (MAC_AT, MAC_END - MAC_AT),
    "reserved behind": (MAC_END, TAG_AT - MAC_END),
}
"""Offset and bytes of each field of a header that its checksum covers."""


def header_is_sealed_again(chance: random.Random, victim: Victim) -> bytes:
    """A field changes, and the header's checksum fits it."""
    changed = bytearray(victim.record)
    field = chance.choice(list(FIELDS))
    start, size = FIELDS[field]
    if field == "length":
        moved = int.from_bytes(changed[24:32], "little") + chance.choice((-64, -1, 1, 63, 1 << 40))
        changed[24:32] = (moved % (1 << 64)).to_bytes(8, "little")
        # a payload that ends elsewhere within the padding is the same payload with zeros more or less
        if record_bytes(moved % (1 << 64)) == len(changed):
            changed[CHECKSUM_AT] ^= 1
            return bytes(changed)
    elif chance.random() < 0.5:
        changed[start + chance.randrange(size)] ^= 1 << chance.randrange(8)
    else:
        changed[start : start + size] = chance.choice(
            (bytes(size), b"\xff" * size, chance.randbytes(size))
        )
    digest = xxhash.xxh3_64_intdigest(bytes(changed[:CHECKSUM_AT]))
    changed[CHECKSUM_AT:HEADER_BYTES] = digest.to_bytes(8, "little")
    return bytes(changed)


MUTATIONS: dict[str, Callable[[random.Random, Victim], bytes]] = {
    each.__name__: each
    for each in (
        bits_flip,
        header_bits_flip,
        is_cut,
        ends_in_zeros,
        ends_in_noise,
        is_too_long,
        is_spliced,
        is_torn,
        swaps_header,
        is_shifted,
        loses_bytes,
        has_zero_pages,
        swaps_pages,
        is_another_record,
        is_an_older_record,
        is_rubbish,
        header_is_sealed_again,
    )
}


def mutated(chance: random.Random, victim: Victim) -> tuple[str, bytes]:
    """Return the name of a mutation and what it makes of the record, which is never what it was."""
    while True:
        name = chance.choice(list(MUTATIONS))
        content = MUTATIONS[name](chance, victim)
        if content != victim.record:
            return name, content


def records_in(content: bytes) -> Iterator[tuple[bytes, int]]:
    """Yield the key and the offset of everything that begins as a record does."""
    at = content.find(MAGIC)
    while at >= 0:
        key = content[at + KEY_AT : at + KEY_AT + KEY_BYTES]
        if len(key) == KEY_BYTES:
            yield key, at
        at = content.find(MAGIC, at + 8)


def key_in(record: bytes) -> bytes:
    """Return the key that a record carries."""
    return record[KEY_AT : KEY_AT + KEY_BYTES]


def files_in(folder: Path) -> list[Path]:
    """Return all files below a folder."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _place(chance: random.Random, record: bytes) -> int:
    """Return an offset within a record: any, or the ends of fields, sectors and pages."""
    if chance.random() < 0.5:
        return chance.randrange(len(record))
    unit = chance.choice((8, 32, 64, HEADER_BYTES, SECTOR_BYTES, PAGE_BYTES))
    return min(chance.randrange(0, len(record) + unit, unit), len(record) - 1)
