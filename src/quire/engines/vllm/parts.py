"""Parts: the layer groups of vLLM's KV cache, and the records of their blocks."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from quire.errors import ConfigError
from quire.exchange.hashing import tag_of
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

_DTYPES = {"float32": DType.FLOAT32, "float16": DType.FLOAT16, "bfloat16": DType.BFLOAT16}


class GroupShape(msgspec.Struct, frozen=True):
    """The shape of one layer group, as the workers' tensors have it.

    `layers`  names of its layers in order
    `heads`   KV heads of one worker
    `inner`   elements of a block, of one head in one layer
    `layout`  how they lie: the attention that reads them
    `window`  tokens before the next one that are read; 0: all
    """

    layers: tuple[str, ...]
    heads: int
    inner: tuple[int, ...]
    dtype: str
    itemsize: int
    layout: str
    window: int = 0

    @property
    def head_bytes(self) -> int:
        """Bytes of a block of one head in all layers."""
        num = self.itemsize * len(self.layers)
        for size in self.inner:
            num *= size
        return num


class GroupPart:
    """The records of one layer group: `[heads, layers, ...]` of a block, all workers' heads in order.

    Heads come first, so that the bytes do not say how many workers there were: each writes its own heads.
    """

    def __init__(
        self,
        index: int,
        shape: GroupShape,
        model: str,
        block_size: int,
        num_workers: int,
        *,
        tier_key: TierKey | None = None,
    ) -> None:
        self._tier_key = tier_key
        heads = shape.heads * num_workers
        self.index = index
        self.window = shape.window
        self.payload_bytes = heads * shape.head_bytes
        self.record_bytes = record_bytes(self.payload_bytes)
        self.namespace = Namespace(
            model=model,
            dtype=shape.dtype,
            block_size=block_size,
            layout=f"vllm {shape.layout} heads-first {shape.inner} {','.join(shape.layers)}",
            layers=tuple(range(len(shape.layers))),
            heads=(0, heads),
        )
        self._digest = self.namespace.digest
        kind = _DTYPES.get(shape.dtype, DType.MIXED)
        self._header = Header(
            bytes(KEY_BYTES), self._digest, self.payload_bytes, block_size, index, kind
        )
        self._keys: dict[bytes, bytes] = {}

    def key(self, digest: bytes) -> bytes:
        """Return the key of the block with this digest."""
        known = self._keys.get(digest)
        if known is None:
            if len(self._keys) >= REMEMBERED_KEYS:
                self._keys.clear()
            known = record_key(self._digest, digest, tag_of(digest), self._tier_key)
            self._keys[digest] = known
        return known

    def write(
        self, record: memoryview, payload: memoryview, key: bytes, signer: TierKey | None = None
    ) -> None:
        """Make a sealed record of a payload, signed with a tier key."""
        payload_of(record, self.payload_bytes)[:] = payload
        seal(record, replace(self._header, key=key), signer)

    def reads(self, record: memoryview) -> bool:
        """Return whether a verified record says that it is of this group."""
        return describes(record, self._header)

    def first_needed(self, end: int) -> int:
        """Return the first block that a request reads that has `end` blocks computed."""
        if not self.window:
            return 0
        block_size = self.namespace.block_size
        return max(0, end * block_size - self.window + 1) // block_size


def make_parts(
    shapes: Sequence[Sequence[GroupShape]],
    model: str,
    block_size: int,
    tier_key: TierKey | None = None,
) -> list[GroupPart]:
    """Return a part for each layer group, from the shapes that each worker has reported.

    Raises `ConfigError` where workers differ.
    """
    first = shapes[0]
    if any(list(each) != list(first) for each in shapes):
        raise ConfigError(
            "the workers' KV caches differ in shape: quire needs workers that share the heads evenly"
        )
    return [
        GroupPart(index, shape, model, block_size, len(shapes), tier_key=tier_key)
        for index, shape in enumerate(first)
    ]
