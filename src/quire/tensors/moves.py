"""Moving the KV of single tokens: accepted drafts, brought to consecutive positions."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from quire.errors import ConfigError
from quire.tensors.pool import KVPool
from quire.tensors.slots import block_array, on_device


class Move(Protocol):
    """What a planned token move says; `quire.core.TokenMove` does."""

    @property
    def group(self) -> int:
        """Index of the layer group."""
        ...

    @property
    def src_block(self) -> int:
        """Block id to read."""
        ...

    @property
    def src_offset(self) -> int:
        """Token of that block."""
        ...

    @property
    def dst_block(self) -> int:
        """Block id to write."""
        ...

    @property
    def dst_offset(self) -> int:
        """Token of that block."""
        ...


def move_tokens(pool: KVPool, moves: Sequence[Move], group: int = 0) -> None:
    """Do the moves of one layer group, over all its layers, as one simultaneous assignment.

    Every source is read before any destination is written. Moves of other groups are left
    out: call once per group with the pool of each. Raises `ConfigError`, and writes nothing,
    for a block outside the pool, an offset outside the block, or two moves to one place.
    """
    ours = [move for move in moves if move.group == group]
    if not ours:
        return
    size = pool.layout.block_size
    src = block_array([move.src_block for move in ours], pool.num_blocks)
    dst = block_array([move.dst_block for move in ours], pool.num_blocks)
    offsets = np.array([(move.src_offset, move.dst_offset) for move in ours], dtype=np.int64)
    if offsets.min() < 0 or offsets.max() >= size:
        bad = int(offsets[(offsets < 0) | (offsets >= size)][0])
        raise ConfigError(f"token offset {bad} is not within a block of {size} tokens")
    written = dst * size + offsets[:, 1]
    if np.unique(written).size != written.size:
        raise ConfigError("two moves have the same destination; a token has one place only")
    read = on_device(src * size + offsets[:, 0], pool.device)
    write = on_device(written, pool.device)
    for states in (pool.k, pool.v):
        slots = states.flatten(1, 2)
        slots.index_copy_(1, write, slots.index_select(1, read))
