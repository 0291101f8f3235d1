"""Block hashes: the names of blocks outside the process.

    tenant tag   = SHA-256("quire-tenant-1" + tenant)[:8]   the scope's tenant, else its salt; zeros without either
    root digest  = SHA-256("quire-scope-2" + parts)         tenant, salt, lora, model
    block digest = SHA-256(parent digest + tokens + media)  tokens: int32 little-endian

Bytes 16 to 23 of every digest are the tenant tag, in place of the hash's own: a tier can find and purge all
records of a tenant, though keys name nothing else. 24 bytes of the hash are left. They include the last 8,
which consumers of events take for the whole, and the first 16.

Each scope part is one type byte (0 None, 1 str, 2 bytes, 3 int as decimal text) followed by
its length (8 bytes, little-endian) and its bytes, so no two scopes have the same encoding.
`media` is empty for plain text. Otherwise each run of one media item inside the block adds:
index of its first token in the block and number of tokens (4 bytes each, little-endian),
then SHA-256 of the item (digest length as 8 bytes, digest, placeholder tokens); at media
positions `tokens` holds -1. The golden vectors are in `tests/golden/block_hashes.json`.

Inside the process nothing trusts a hash: a match compares tokens.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Sequence as Items

import numpy as np

from quire.config import check_count
from quire.core.media import MediaTable
from quire.core.tokens import INT32, Key, TokenIds, check_sign, key_of
from quire.media import NO_MEDIA, MediaItem, check_media
from quire.scope import Scope, ScopePart, check_scope

TAG_BYTES = 8
NO_TENANT = bytes(TAG_BYTES)
"""The tag of scopes with neither tenant nor salt: everybody's."""

_TAG_AT, _TAG_END = 16, 24

LITTLE_ENDIAN = sys.byteorder == "little"


def block_hashes(
    tokens: TokenIds,
    block_size: int,
    scope: Scope | None = None,
    media: Items[MediaItem] = NO_MEDIA,
) -> list[bytes]:
    """Return the 32-byte digests of the whole blocks of a prompt, first block first.

    A digest names its block and all before it: equal digests mean equal tokens, media and
    scope from the start of the prompt. Raises as `CacheManager.open` does.
    """
    key = key_of(tokens)
    check_sign(key)
    check_count("block_size", block_size)
    check_scope(scope := scope if scope is not None else Scope())
    table = MediaTable()
    if media is not NO_MEDIA:
        check_media(media, len(key) // 4)
    if media:
        key = table.encode(key, media)
    return chain(root_digest(scope), key, block_size * 4, table)


def root_digest(scope: Scope) -> bytes:
    """Return the digest that stands for the empty prefix of a scope."""
    parts = (scope.tenant, scope.salt, scope.lora, scope.model)
    return _tagged(_digest(b"quire-scope-2" + b"".join(map(_part, parts))), tenant_tag(scope))


def tenant_tag(scope: Scope) -> bytes:
    """Return the 8 bytes that name the tenant of a scope in digests and keys; zeros without a tenant."""
    tenant = scope.tenant if scope.tenant is not None else scope.salt
    return NO_TENANT if tenant is None else _digest(b"quire-tenant-1" + _part(tenant))[:TAG_BYTES]


def tag_of(digest: bytes) -> bytes:
    """Return the tenant tag that a digest carries."""
    return digest[_TAG_AT:_TAG_END]


def chain(parent: bytes, key: Key | bytearray, block_bytes: int, media: MediaTable) -> list[bytes]:
    """Hash the whole blocks of a key, each over the digest before it."""
    from hashlib import sha256  # noqa: PLC0415 - OpenSSL is loaded when something is hashed

    digests: list[bytes] = []
    if not key:
        return digests
    tag = tag_of(parent)
    if len(media) and int(np.frombuffer(key, INT32).min()) < 0:
        tokens = np.frombuffer(key, INT32)
        per_block = block_bytes // 4
        for start in range(0, len(tokens) - per_block + 1, per_block):
            block = tokens[start : start + per_block]
            parent = _tagged(sha256(parent + _encode_block(block, media)).digest(), tag)
            digests.append(parent)
        return digests
    data = bytes(key) if LITTLE_ENDIAN else np.frombuffer(key, INT32).astype("<i4").tobytes()
    for start in range(0, len(data) - block_bytes + 1, block_bytes):
        parent = _tagged(sha256(parent + data[start : start + block_bytes]).digest(), tag)
        digests.append(parent)
    return digests


def _tagged(digest: bytes, tag: bytes) -> bytes:
    return digest[:_TAG_AT] + tag + digest[_TAG_END:]


def _part(part: ScopePart) -> bytes:
    match part:
        case None:
            kind, data = 0, b""
        case str():
            kind, data = 1, part.encode()
        case bytes():
            kind, data = 2, part
        case int():
            kind, data = 3, str(part).encode()
    return struct.pack("<BQ", kind, len(data)) + data


def _digest(data: bytes) -> bytes:
    from hashlib import sha256  # noqa: PLC0415 - see `chain`

    return sha256(data).digest()


def _encode_block(block: np.ndarray[tuple[int], np.dtype[np.int32]], media: MediaTable) -> bytes:
    tokens = np.maximum(block, -1)
    parts = [tokens.astype("<i4").tobytes()]
    edges = np.flatnonzero(np.diff(block)) + 1
    for run in np.split(np.arange(len(block)), edges):
        number = int(block[run[0]])
        if number < 0:
            digest, placeholders = media.contents[number]
            item = struct.pack("<Q", len(digest)) + digest + placeholders
            parts.append(struct.pack("<II", run[0], len(run)) + _digest(item))
    return b"".join(parts)
