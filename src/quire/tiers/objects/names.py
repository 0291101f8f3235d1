"""The names of objects in an object store, which together describe the contents of every object.

Two kinds of objects lie under one prefix:

    <id>.<tag>.<records>.kv      a bundle: up to 20 records of one size and one tenant, then its footer
    <id>.<bundle id>.<mask>.x    empty: says that some records of a bundle are deleted

    id       23 hex digits: 11 of milliseconds, 4 of a counter, 8 of the writer; so names sort by time
    tag      the tenant tag that the keys of all records end with, 16 hex digits
    records  for each record the first 60 bits of its key, as 10 characters of URL-safe base64
    mask     hex; bit i: record i
    footer   the full keys, 32 bytes each, and the xxh3-64 checksum of them, little-endian

Offsets need not be written down: `record size = (object size - footer) / records`. Nothing else is
under the prefix that means anything: other names, and sizes that do not come out even, are passed over.
"""

from __future__ import annotations

import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Sequence

import msgspec
import xxhash

from quire.exchange.hashing import TAG_BYTES
from quire.tiers.format import HEADER_BYTES, KEY_BYTES, tag_of_key

MAX_RECORDS = 20
"""Per bundle: a name stays below 255 bytes, the limit of file systems."""

ID_CHARS = 23
SHORT_CHARS = 10
_CHECKSUM_BYTES = 8
_BUNDLE = re.compile(
    rf"([0-9a-f]{{{ID_CHARS}}})\.([0-9a-f]{{{2 * TAG_BYTES}}})\.([A-Za-z0-9_-]+)\.kv"
)
_BURIAL = re.compile(
    rf"([0-9a-f]{{{ID_CHARS}}})\.([0-9a-f]{{{ID_CHARS}}})\.([0-9a-f]{{1,{MAX_RECORDS // 4}}})\.x"
)


class BundleName(msgspec.Struct, frozen=True):
    """A bundle as its name tells it; `shorts` are numbers of 60 bits."""

    id: str
    tag: bytes
    shorts: tuple[int, ...]


class BurialName(msgspec.Struct, frozen=True):
    """The records of `bundle` that are deleted: the bits of `mask`."""

    id: str
    bundle: str
    mask: int


def short_of(key: bytes) -> int:
    """Return the first 60 bits of a key: 10 million keys share one with a probability of 1 in 20,000."""
    return int.from_bytes(key[:8], "big") >> 4


def make_id(milliseconds: int, count: int, writer: str) -> str:
    """Return an id; `writer` has 8 hex digits."""
    return f"{milliseconds:011x}{count & 0xFFFF:04x}{writer}"


def milliseconds_of(object_id: str) -> int:
    """Return the time in an id."""
    return int(object_id[:11], 16)


def bundle_name(object_id: str, keys: Sequence[bytes]) -> str:
    """Return the name of a bundle of these records, which are of one tenant."""
    tag = tag_of_key(keys[0]).hex()
    shorts = "".join(urlsafe_b64encode(key[:9]).decode()[:SHORT_CHARS] for key in keys)
    return f"{object_id}.{tag}.{shorts}.kv"


def burial_name(object_id: str, bundle: str, mask: int) -> str:
    """Return the name that deletes records of a bundle."""
    return f"{object_id}.{bundle}.{mask:x}.x"


def parse_name(name: str) -> BundleName | BurialName | None:
    """Return the content of a name, or None where it is none of ours."""
    if match := _BUNDLE.fullmatch(name):
        text = match[3]
        count, rest = divmod(len(text), SHORT_CHARS)
        if rest or not 1 <= count <= MAX_RECORDS:
            return None
        return BundleName(
            match[1],
            bytes.fromhex(match[2]),
            tuple(
                int.from_bytes(urlsafe_b64decode(text[at : at + SHORT_CHARS] + "AA"), "big") >> 12
                for at in range(0, len(text), SHORT_CHARS)
            ),
        )
    if match := _BURIAL.fullmatch(name):
        return BurialName(match[1], match[2], int(match[3], 16))
    return None


def footer_bytes(num_records: int) -> int:
    """Return the size of a bundle's footer."""
    return num_records * KEY_BYTES + _CHECKSUM_BYTES


def make_footer(keys: Sequence[bytes]) -> bytes:
    """Return the footer of a bundle."""
    text = b"".join(keys)
    return text + xxhash.xxh3_64_intdigest(text).to_bytes(_CHECKSUM_BYTES, "little")


def parse_footer(footer: bytes) -> list[bytes] | None:
    """Return the keys of a bundle, or None where the checksum does not hold."""
    text, checksum = footer[:-_CHECKSUM_BYTES], footer[-_CHECKSUM_BYTES:]
    if xxhash.xxh3_64_intdigest(text).to_bytes(_CHECKSUM_BYTES, "little") != checksum:
        return None
    return [text[at : at + KEY_BYTES] for at in range(0, len(text), KEY_BYTES)]


def record_size(object_size: int, num_records: int) -> int | None:
    """Return the size of each record of a bundle, or None where the object's size cannot be."""
    size, rest = divmod(object_size - footer_bytes(num_records), num_records)
    return None if rest or size < HEADER_BYTES else size
