"""Parts: which bytes of a block make one record, and the keys under which they are found."""

from collections.abc import Sequence
from functools import partial

import msgspec

from quire.engines.tiered.record_form import RecordForm
from quire.exchange.spill import NamedBlock
from quire.tensors.layout import KVLayout
from quire.tensors.model import ModelLayout
from quire.tensors.pool import Pool
from quire.tensors.records import BlockCodec
from quire.tensors.transfers import Step
from quire.tiers.format import Namespace
from quire.tiers.keys import TierKey


class Origin(msgspec.Struct, frozen=True):
    """The origin of the bytes, and how they are stored.

    `model`   a name that equal weights, config and code have in common, and no others
    `dtype`   None stores what pools hold; "fp8", "int8", "int4" store K and V in fewer bits
    """

    model: str
    dtype: str | None = None


class BlockPart(RecordForm):
    """The record of a block in one layer group: K and V of its layers, or its states.

    `group`      index of the layer group
    `codec`      between the group's pool and payloads

    Raises `ConfigError` for an unknown dtype.
    """

    def __init__(
        self, layout: ModelLayout, index: int, origin: Origin, tier_key: TierKey | None = None
    ) -> None:
        group = layout.groups[index]
        self.group = index
        self.codec = BlockCodec(group.memory, origin.dtype)
        namespace = Namespace(
            model=origin.model,
            dtype=self.codec.dtype_name,
            block_size=layout.block_size,
            layout=self.codec.layout_name,
            layers=group.layers,
            heads=(0, self.codec.num_heads),
        )
        tokens = layout.block_size if isinstance(self.codec.memory, KVLayout) else 0
        of_records = self.codec.payload_bytes, tokens, index
        super().__init__(namespace, *of_records, dtype=self.codec.dtype_code, tier_key=tier_key)

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

        def filled(at: int) -> None:
            self.seal(buffers[at], self.key(blocks[at].digest), signer)

        payloads = [*map(self.payload, buffers)]
        self.codec.encode(pool, [each.block for each in blocks], payloads, filled)

    def decoding(self, buffers: Sequence[memoryview], pool: Pool, block_ids: Sequence[int]) -> Step:
        """Return the step that writes verified records into blocks of the pool."""
        return partial(self.codec.decode, [*map(self.payload, buffers)], pool, block_ids)
