"""Parts: which bytes of a block make one record, and the keys under which they are found."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import TypeAlias

import msgspec

from quire.exchange.spill import NamedBlock
from quire.tensors.layout import KVLayout
from quire.tensors.model import ModelLayout
from quire.tensors.pool import Pool
from quire.tensors.records import BlockCodec
from quire.tensors.transfers import Step
from quire.tiers.format import (
    DType,
    Header,
    Namespace,
    payload_of,
    record_bytes,
    record_key,
    seal,
)

CHUNK_BYTES = 32 << 20
"""So many bytes of records are encoded at a time."""

REMEMBERED_KEYS = 1 << 15
"""Keys that a part remembers by block digest: hashing each one anew is most of a lookup."""


class Origin(msgspec.Struct, frozen=True):
    """The origin of the bytes, and the pieces in which they are stored.

    `model`   a name that equal weights, config and code have in common, and no others
    `dtype`   None stores what pools hold; "fp8", "int8", "int4" store K and V in fewer bits
    `splits`  records per block that the KV heads are split over, where their number allows: the
              largest degree of tensor parallelism under which they are to be found
    """

    model: str
    dtype: str | None = None
    splits: int = 1


class BlockPart:
    """Some KV heads of the layers of one group, or its states: what one record holds of a block.

    `group`      index of the layer group
    `codec`      between the group's pool and payloads
    `namespace`  what must be equal for a record to be read
    """

    def __init__(self, group: int, codec: BlockCodec, namespace: Namespace) -> None:
        self.group = group
        self.codec = codec
        self.namespace = namespace
        self._digest = self.namespace.digest
        self._keys: dict[bytes, bytes] = {}
        self._dtype = DType[self.codec.dtype_code]
        self.record_bytes = record_bytes(codec.payload_bytes)
        """Bytes of each record."""

    def key(self, digest: bytes) -> bytes:
        """Return the key of the block with this digest."""
        known = self._keys.get(digest)
        if known is None:
            if len(self._keys) >= REMEMBERED_KEYS:
                self._keys.clear()
            known = self._keys[digest] = record_key(self._digest, digest)
        return known

    def encode(
        self, pool: Pool, blocks: Sequence[NamedBlock], buffers: Sequence[memoryview]
    ) -> None:
        """Write blocks of the pool into sealed records."""
        size = self.codec.payload_bytes
        tokens = self.namespace.block_size if isinstance(self.codec.memory, KVLayout) else 0

        def filled(at: int) -> None:
            key = self.key(blocks[at].digest)
            seal(buffers[at], Header(key, self._digest, size, tokens, self.group, self._dtype))

        payloads = [payload_of(each, size) for each in buffers]
        self.codec.encode(pool, [each.block for each in blocks], payloads, filled)

    def decoding(self, buffers: Sequence[memoryview], pool: Pool, block_ids: Sequence[int]) -> Step:
        """Return the step that writes verified records into blocks of the pool."""
        size = self.codec.payload_bytes
        payloads = [payload_of(each, size) for each in buffers]
        return partial(self.codec.decode, payloads, pool, block_ids)


def make_parts(layout: ModelLayout, origin: Origin) -> list[list[BlockPart]]:
    """Return the parts of each layer group of a model. Raises `ConfigError` for an unknown dtype."""
    return [list(_parts_of(layout, index, origin)) for index in range(len(layout.groups))]


def _parts_of(layout: ModelLayout, index: int, origin: Origin) -> Iterable[BlockPart]:
    group = layout.groups[index]
    spans: list[tuple[int, int] | None] = [None]
    if isinstance(group.memory, KVLayout):
        heads = group.memory.kv_heads
        step = heads if heads % origin.splits else heads // origin.splits
        spans = [(first, first + step) for first in range(0, heads, step)]
    for span in spans:
        codec = BlockCodec(group.memory, origin.dtype, span)
        namespace = Namespace(
            model=origin.model,
            dtype=codec.dtype_name,
            block_size=layout.block_size,
            layout=codec.layout_name,
            layers=group.layers,
            heads=codec.heads,
        )
        yield BlockPart(index, codec, namespace)


Piece: TypeAlias = tuple[NamedBlock, BlockPart]
"""What one record holds."""


def keys_of(pieces: Sequence[Piece]) -> list[bytes]:
    """Return the key of each piece's record."""
    return [part.key(block.digest) for block, part in pieces]


def first_chunk(pieces: Sequence[Piece]) -> Sequence[Piece]:
    """Return the first pieces, of at most `CHUNK_BYTES` together, but at least one."""
    num_bytes = 0
    for index, (_, part) in enumerate(pieces):
        num_bytes += part.record_bytes
        if num_bytes > CHUNK_BYTES and index:
            return pieces[:index]
    return pieces
