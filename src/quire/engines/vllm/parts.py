"""Parts: the layer groups of vLLM's KV cache, and the records of their blocks."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from quire.engines.tiered.record_form import RecordForm
from quire.errors import ConfigError
from quire.tiers.format import Namespace
from quire.tiers.keys import TierKey


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


class GroupPart(RecordForm):
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
        heads = shape.heads * num_workers
        self.index = index
        self.window = shape.window
        namespace = Namespace(
            model=model,
            dtype=shape.dtype,
            block_size=block_size,
            layout=f"vllm {shape.layout} heads-first {shape.inner} {','.join(shape.layers)}",
            layers=tuple(range(len(shape.layers))),
            heads=(0, heads),
        )
        of_records = heads * shape.head_bytes, block_size, index
        super().__init__(namespace, *of_records, dtype=shape.dtype, tier_key=tier_key)

    def needed(self, end: int) -> range:
        """Return the blocks that a request reads that has `end` blocks computed."""
        block_size = self.namespace.block_size
        first = max(0, end * block_size - self.window + 1) // block_size if self.window else 0
        return range(first, end)


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
