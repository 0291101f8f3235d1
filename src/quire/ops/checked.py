"""A block pool that checks every block that it gives or takes back."""

from __future__ import annotations

import numpy as np

from quire.core.blocks import BlockPool
from quire.core.tokens import BoolArray, IntArray
from quire.errors import InvariantError


class CheckedPool(BlockPool):
    """A pool for tests, `CacheManager(..., pool=CheckedPool)`: block by block, nothing is taken or freed twice.

    Raises `InvariantError` at the call that is wrong, where `quire.ops.check` sees it afterwards.
    """

    def __init__(self, num_blocks: int, name: str = "full") -> None:
        super().__init__(num_blocks, name)
        self._held = np.zeros(num_blocks, dtype=np.bool_)

    def take(self, num_blocks: int) -> memoryview[int]:
        taken = super().take(num_blocks)
        ids = np.frombuffer(taken, dtype=np.int32)
        if self._held[ids].any():
            raise InvariantError(f"blocks {ids[self._held[ids]]} are on the free stack but held")
        self._held[ids] = True
        return taken

    def give_back(self, block_ids: memoryview[int]) -> None:
        self._check_held(np.array(block_ids, dtype=np.int32))
        super().give_back(block_ids)
        self._held[np.array(block_ids, dtype=np.int32)] = False

    def resize(self, num_blocks: int, held: BoolArray, renamed: IntArray) -> None:
        super().resize(num_blocks, held, renamed)
        self._held = held

    def _check_held(self, ids: IntArray) -> None:
        outside = (ids < 0) | (ids >= self.num_blocks)
        if outside.any():
            raise InvariantError(f"unknown blocks {ids[outside]} of {self.num_blocks}")
        if not self._held[ids].all():
            raise InvariantError(f"double free of blocks {ids[~self._held[ids]]}")
        if len(np.unique(ids)) != len(ids):
            raise InvariantError(f"a block stands twice in one free: {ids}")
        for block in self.shared:
            if (ids == block).any():
                raise InvariantError(f"block {block} freed with {self.shared[block]} holders")
