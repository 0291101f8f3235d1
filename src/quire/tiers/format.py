"""The record: how a block's bytes look in every tier, and the key that they are found by.

A record is a header of 192 bytes, the payload, and zeros up to the record's size. All numbers
are little-endian.

    offset  bytes  field
         0      8  magic             b"quire-kv"
         8      2  major             2; a reader refuses any other
        10      2  minor             0; a higher one may give the reserved bytes a meaning
        12      2  group             index of the layer group in its model
        14      2  dtype             see `DTYPES`; 0 where parts have several
        16      4  token count       tokens whose KV the payload holds; a recurrent state: 0
        20      4  reserved          0
        24      8  payload length    bytes
        32      8  generation        a number that its writer gave to this writing of the key
        40      8  payload checksum  xxh3-64 of all bytes behind the header
        48     32  fingerprint       `Namespace.digest`: model, dtype, block size, layout, part
        80     32  key               `Namespace.key(block hash)`, echoed
       112      8  MAC key id        `TierKey.write_id` of the signer; 0 without a MAC
       120     32  MAC               keyed BLAKE2b of every byte but these and the header checksum; 0 without
       152     32  reserved          0
       184      8  header checksum   xxh3-64 of bytes 0 to 183

Records of at least 64 KiB are padded to a multiple of 4,096 bytes, so that they can be written past the page
cache, smaller ones to 64. Golden files: `tests/golden/records/`.

The last 8 bytes of a key are its tenant tag (`quire.exchange.hashing`): a tier finds all records of a tenant by it.

A key names content: model, layout, and every token from the start of the prompt. So a record that
carries its own key, and whose checksums hold, is right wherever it was found; nothing else is trusted.
Checksums find damage, no intent: only the MAC tells a record of a key's holder from a forged one (`keys.py`).
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from enum import IntEnum
from functools import lru_cache
from hashlib import sha256
from hmac import compare_digest
from struct import Struct

import msgspec
import xxhash

from quire.errors import ConfigError, RecordError
from quire.exchange.hashing import TAG_BYTES, tag_of
from quire.tiers.keys import KEY_ID_BYTES, MAC_BYTES, TierKey

MAGIC = b"quire-kv"
MAJOR, MINOR = 2, 0
HEADER_BYTES = 192
KEY_BYTES = 32
KEY_OFFSET = 80
TENANT_AT = KEY_BYTES - TAG_BYTES
"""Where a key's tenant tag begins."""
KEY_ID_AT = 112
MAC_AT = KEY_ID_AT + KEY_ID_BYTES
MAC_END = MAC_AT + MAC_BYTES
TAG_AT = 184
"""Where the header's checksum begins: it covers key, generation and payload checksum."""
PAGE_BYTES = 4096
PAGED_FROM = 1 << 16
MAX_RECORD_BYTES = 1 << 32
"""No size of a record above this is taken for meant."""

_FIELDS = Struct("<8sHHHHII QQQ 32s32s 8s32s32s".replace(" ", ""))
_CHECKSUM = Struct("<Q")
_KIND = Struct("<HHI")
_CLAIMS = Struct("<10s4xH8xQ8xQ32x32s72xQ")
"""Magic and major, dtype, payload length, payload checksum, key and header checksum."""


class DType(IntEnum):
    """The type of the numbers of a payload."""

    MIXED = 0
    FLOAT32 = 1
    FLOAT16 = 2
    BFLOAT16 = 3
    FLOAT8 = 4
    INT8 = 5
    INT4 = 6
    FLOAT64 = 7


_BEGINNING = MAGIC + MAJOR.to_bytes(2, "little")
_KNOWN_DTYPES = frozenset(map(int, DType))


class Namespace(msgspec.Struct, frozen=True):
    """The identity of a record's layout: all that must be equal for its bytes to mean the same.

    It names no process and no rank.

    `model`       the model that computed it: a fingerprint of config and weights
    `dtype`       of the payload, for instance "bfloat16", or a quantization with its parameters
    `block_size`  tokens per block
    `layout`      order of the payload's tensors, in words
    `layers`      the layers whose KV it holds, counted over the whole model
    `heads`       first KV head and the one behind the last; (0, 0) for states

    A model split over several devices stores its heads in groups that the finest split has in
    common; then any degree finds them.
    """

    model: str
    dtype: str
    block_size: int
    layout: str
    layers: tuple[int, ...]
    heads: tuple[int, int]

    @property
    def digest(self) -> bytes:
        """SHA-256 of the fields, each by its length: 32 bytes."""
        layers, heads = ",".join(map(str, self.layers)), "{}-{}".format(*self.heads)
        parts = (self.model, self.dtype, str(self.block_size), self.layout, layers, heads)
        text = b"quire-namespace-1"
        for part in map(str.encode, parts):
            text += len(part).to_bytes(8, "little") + part
        return sha256(text).digest()

    def key(self, block_hash: bytes) -> bytes:
        """Return the 32-byte key of a block, from its chained hash."""
        return record_key(self.digest, block_hash, tag_of(block_hash))


def record_key(
    namespace_digest: bytes, name: bytes, tag: bytes, key: TierKey | None = None
) -> bytes:
    """Return the key of a tenant's block under `Namespace.digest`: 24 bytes of SHA-256 over both, then the tag.

    `name` is a block's chained hash, or whatever else names content. With a tier key that has `tenants` both parts are
    keyed, but nobody's: else who lists a tier could try names of tenants, by their tags or by prompts that are known.
    """
    if key is not None and key.hides(tag):
        return key.name(namespace_digest + name, TENANT_AT) + key.tag(tag)
    return sha256(namespace_digest + name).digest()[:TENANT_AT] + tag


def tag_of_key(key: bytes) -> bytes:
    """Return the tenant tag that a key ends with."""
    return key[TENANT_AT:]


class Header(msgspec.Struct, frozen=True):
    """The fields of a record that its writer chooses; see the module."""

    key: bytes
    fingerprint: bytes
    payload_bytes: int
    token_count: int
    group: int = 0
    dtype: DType = DType.MIXED
    generation: int = 0


@lru_cache(1024)
def record_bytes(payload_bytes: int) -> int:
    """Return the size of a record with such a payload, header and padding included."""
    size = HEADER_BYTES + payload_bytes
    unit = PAGE_BYTES if size >= PAGED_FROM else 64
    return -(-size // unit) * unit


def new_buffer(num_bytes: int) -> memoryview:
    """Return zeros for a record, writable, at the start of a page, not shared with a forked process."""
    pages = mmap.mmap(-1, max(num_bytes, 1), **PRIVATE)
    prefer_huge_pages(pages)
    return memoryview(pages)[:num_bytes]


PRIVATE: dict[str, int] = (
    {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if os.name == "posix" else {}
)
"""What `mmap.mmap` is called with for memory that a forked process has no part in."""


def prefer_huge_pages(pages: mmap.mmap) -> None:
    """Ask the system for huge pages, where it has them; neighbouring buffers share one.

    A disk reads into them, and writes from them, twice as fast as pages of 4 KiB (`docs/decisions/tiers.md`).
    """
    if len(pages) >= PAGED_FROM and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)


def payload_of(record: memoryview, payload_bytes: int) -> memoryview:
    """View the payload of a record buffer, to fill or to read it."""
    return record[HEADER_BYTES : HEADER_BYTES + payload_bytes]


def seal(record: memoryview, header: Header, signer: TierKey | None = None) -> None:
    """Write the header in front of a payload that is in place; zero the padding, and sign with a signer.

    Raises `ConfigError` where sizes do not fit.
    """
    if len(record) != record_bytes(header.payload_bytes):
        raise ConfigError(
            f"a record with a payload of {header.payload_bytes} bytes takes "
            f"{record_bytes(header.payload_bytes)}; the buffer has {len(record)}"
        )
    if len(header.key) != KEY_BYTES or len(header.fingerprint) != KEY_BYTES:
        raise ConfigError(
            f"key and fingerprint take {KEY_BYTES} bytes, got {len(header.key)} and "
            f"{len(header.fingerprint)}"
        )
    end = HEADER_BYTES + header.payload_bytes
    record[end:] = bytes(len(record) - end)
    kind = (MAGIC, MAJOR, MINOR, header.group, header.dtype, header.token_count, 0)
    checksum = xxhash.xxh3_64_intdigest(record[HEADER_BYTES:])
    content = (header.payload_bytes, header.generation, checksum, header.fingerprint, header.key)
    key_id = b"" if signer is None else signer.write_id
    _FIELDS.pack_into(record, 0, *kind, *content, key_id, b"", b"")
    if signer is not None:
        record[MAC_AT:MAC_END] = _mac(record, signer, key_id) or b""
    _CHECKSUM.pack_into(record, _FIELDS.size, xxhash.xxh3_64_intdigest(record[: _FIELDS.size]))


def read_header(record: memoryview | bytes) -> Header:
    """Return the header of a record, verified on its own. Raises `RecordError`."""
    if len(record) < HEADER_BYTES:
        raise RecordError(f"{len(record)} bytes; a record's header alone takes {HEADER_BYTES}")
    fields = _FIELDS.unpack_from(record)
    magic, major, _, group, dtype, tokens, _, length, generation, _, fingerprint, key = fields[:12]
    if magic != MAGIC:
        raise RecordError(f"begins with {magic!r}, not with {MAGIC!r}: no record")
    (checksum,) = _CHECKSUM.unpack_from(record, _FIELDS.size)
    if checksum != xxhash.xxh3_64_intdigest(record[: _FIELDS.size]):
        raise RecordError("the header's checksum does not hold")
    if major != MAJOR:
        raise RecordError(
            f"version {major} of the record format; this reader knows {MAJOR}", is_foreign=True
        )
    try:
        kind = DType(dtype)
    except ValueError:
        raise RecordError(f"dtype {dtype}; known: 0 to {max(DType)}") from None
    return Header(key, fingerprint, length, tokens, group, kind, generation)


def verify(record: memoryview | bytes) -> Header:
    """Return the header of a record whose every byte was checked. Raises `RecordError`."""
    header = read_header(record)
    if len(record) != record_bytes(header.payload_bytes):
        raise RecordError(
            f"{len(record)} bytes for a payload of {header.payload_bytes}, which takes "
            f"{record_bytes(header.payload_bytes)}"
        )
    if _CHECKSUM.unpack_from(record, 40)[0] != xxhash.xxh3_64_intdigest(
        memoryview(record)[HEADER_BYTES:]
    ):
        raise RecordError("the payload's checksum does not hold")
    return header


def key_id_of(record: memoryview | bytes) -> bytes:
    """Return the id of the key that a record says it is signed with: 8 bytes, zeros for none."""
    return bytes(record[KEY_ID_AT:MAC_AT])


def is_signed(record: memoryview, key: TierKey) -> bool | None:
    """Return whether a whole record's MAC holds; None where it has none of a key that is read."""
    mac = _mac(record, key, key_id_of(record))
    return None if mac is None else compare_digest(mac, record[MAC_AT:MAC_END])


def _mac(record: memoryview, key: TierKey, key_id: bytes) -> bytes | None:
    """Return the MAC of a record under the key of an id, of all bytes but MAC and header checksum."""
    return key.mac(key_id, record[:MAC_AT], record[MAC_END:TAG_AT], record[HEADER_BYTES:])


def carries(record: memoryview, key: bytes) -> bool:
    """Return whether a record is whole and of this key.

    It takes a third of the time of `verify`, which also says what is wrong.
    """
    claimed = _claimed((record,), (key,))
    return bool(claimed) and claimed[0] == xxhash.xxh3_64_intdigest(record[HEADER_BYTES:])


def describes(record: memoryview, header: Header) -> bool:
    """Return whether a record that `carries` its key has a header's fingerprint, group, dtype and token count."""
    kind = _KIND.pack(header.group, header.dtype, header.token_count)
    return record[12:20].tobytes() == kind and record[48:KEY_OFFSET].tobytes() == header.fingerprint


def num_begun(records: Sequence[memoryview], keys: Sequence[bytes]) -> int:
    """Return how many records, from the first on, have a header that holds, for their key and size."""
    return len(_claimed(records, keys))


def _claimed(records: Iterable[memoryview], keys: Iterable[bytes]) -> list[int]:
    """Return the payload checksums of headers, up to the first that does not hold for its key and the record's size."""
    claimed: list[int] = []
    for record, key in zip(records, keys, strict=True):
        header = record[:HEADER_BYTES].tobytes()
        if len(header) < HEADER_BYTES:
            break
        beginning, dtype, length, checksum, held, tag = _CLAIMS.unpack(header)
        holds = (
            held == key
            and tag == xxhash.xxh3_64_intdigest(header[:TAG_AT])
            and beginning == _BEGINNING
            and dtype in _KNOWN_DTYPES
            and len(record) == record_bytes(length)
        )
        if not holds:
            break
        claimed.append(checksum)
    return claimed
