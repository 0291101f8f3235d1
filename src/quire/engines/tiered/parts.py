"""Parts: which bytes of a block make one record, and the keys under which they are found."""

from collections.abc import Sequence
from functools import partial

import msgspec
from msgspec.structs import replace

from quire.exchange.hashing import tag_of
from quire.exchange.spill import NamedBlock
from quire.tensors.layout import KVLayout
from quire.tensors.model import ModelLayout
from quire.tensors.pool import Pool
from quire.tensors.records import BlockCodec
from quire.tensors.transfers import Step
from quire.tiers.format import (
    KEY_BYTES,
    DType,
    Header,
    Namespace,
    describes,
    payload_of,
    record_bytes,
    record_key,
    seal,
)
from quire.tiers.keys import TierKey

REMEMBERED_KEYS = 1 << 15
"""Keys that a part remembers by block digest: hashing each one anew is most of a lookup."""


class Origin(msgspec.Struct, frozen=True):
    """The origin of the bytes, and how they are stored.

    `model`   a name that equal weights, config and code have in common, and no others
    `dtype`   None stores what pools hold; "fp8", "int8", "int4" store K and V in fewer bits
    """

    model: str
    dtype: str | None = None


class BlockPart:
    """The record of a block in one layer group: K and V of its layers, or its states.

    `group`      index of the layer group
    `codec`      between the group's pool and payloads
    `namespace`  identity that must be equal for a record to be read

    `tier_key`   keys the tenant tags in records' keys, if it has `tenants`

    Raises `ConfigError` for an unknown dtype.
    """

    def __init__(
        self, layout: ModelLayout, index: int, origin: Origin, tier_key: TierKey | None = None
    ) -> None:
        group = layout.groups[index]
        self._tier_key = tier_key
        self.group = index
        self.codec = BlockCodec(group.memory, origin.dtype)
        self.namespace = Namespace(
            model=origin.model,
            dtype=self.codec.dtype_name,
            block_size=layout.block_size,
            layout=self.codec.layout_name,
            layers=group.layers,
            heads=self.codec.heads,
        )
        self._digest = self.namespace.digest
        self._keys: dict[bytes, bytes] = {}
        tokens = layout.block_size if isinstance(self.codec.memory, KVLayout) else 0
        self._header = Header(
            bytes(KEY_BYTES),
            self._digest,
            self.codec.payload_bytes,
            tokens,
            index,
            DType[self.codec.dtype_code],
        )
        self.record_bytes = record_bytes(self.codec.payload_bytes)
        """Bytes of each record."""

    def key(self, digest: bytes) -> bytes:
        """Return the key of the block with this digest."""
        known = self._keys.get(digest)
        if known is None:
            if len(self._keys) >= REMEMBERED_KEYS:
                self._keys.clear()
            known = record_key(self._digest, digest, tag_of(digest), self._tier_key)
            self._keys[digest] = known
        return known

    def forget(self) -> None:
        """Forget the keys that it has made, and overwrite what lies between pools and records."""
        self._keys.clear()
        self.codec.wipe()

    def encode(
        self,
        pool: Pool,
        blocks: Sequence[NamedBlock],
        buffers: Sequence[memoryview],
        signer: TierKey | None = None,
    ) -> None:
        """Write blocks of the pool into sealed records, signed with a tier key."""
        size = self.codec.payload_bytes

        def filled(at: int) -> None:
            seal(buffers[at], replace(self._header, key=self.key(blocks[at].digest)), signer)

        payloads = [payload_of(each, size) for each in buffers]
        self.codec.encode(pool, [each.block for each in blocks], payloads, filled)

    def reads(self, record: memoryview) -> bool:
        """Return whether a verified record says that it is of this part.

        Its key alone does not prove that: a writer may give any record any key.
        """
        return describes(record, self._header)

    def decoding(self, buffers: Sequence[memoryview], pool: Pool, block_ids: Sequence[int]) -> Step:
        """Return the step that writes verified records into blocks of the pool."""
        size = self.codec.payload_bytes
        payloads = [payload_of(each, size) for each in buffers]
        return partial(self.codec.decode, payloads, pool, block_ids)
