"""Planned block copies: what the data plane does before the next forward."""

from __future__ import annotations

from typing import NamedTuple

from quire.core.blocks import BlockPool
from quire.errors import CopyError


class BlockCopy(NamedTuple):
    """Copy the KV of the first `num_tokens` tokens of block `src` to block `dst` of a group.

    In a recurrent group a block is a state and is copied whole; `num_tokens` is 1.
    """

    group: int
    src: int
    dst: int
    num_tokens: int


class CopyPlan:
    """The copies planned since the last `take`, as one simultaneous assignment.

    Every source is read before any destination is written, and destinations are distinct.
    So a plan stays right when a source is evicted and given out again before it is taken:
    nothing writes to a block before the copies are done. A copy from a block that is itself
    a destination reads that block's source; a block that is freed waits for no copy, which
    is why its pool keeps what it waits for (`BlockPool.waiting`).
    """

    def __init__(self, pools: tuple[BlockPool, ...]) -> None:
        self._waiting = tuple(pool.waiting for pool in pools)

    def __bool__(self) -> bool:
        return any(self._waiting)

    def plan(self, copy: BlockCopy) -> None:
        """Add a copy into a block that was just allocated."""
        waiting = self._waiting[copy.group]
        src, num_tokens = copy.src, copy.num_tokens
        earlier = waiting.get(src)
        if earlier is not None:
            src, num_tokens = earlier[0], min(num_tokens, earlier[1])
        waiting[copy.dst] = (src, num_tokens)

    def check_done(self, group: int, block: int) -> None:
        """Raise `CopyError` if this block waits for a copy or is read by one."""
        waiting = self._waiting[group]
        if block in waiting or any(src == block for src, _ in waiting.values()):
            msg = (
                f"block {block} of group {group} waits for a planned copy; call take_copies() "
                "and do them before the forward whose tokens are committed"
            )
            raise CopyError(msg)

    def take(self) -> list[BlockCopy]:
        """Return the plan and start an empty one.

        A source that was evicted and given out as its own destination needs no copy.
        """
        if not any(self._waiting):
            return []
        plan = [copy for copy in self.peek() if copy.src != copy.dst]
        for waiting in self._waiting:
            waiting.clear()
        return plan

    def peek(self) -> list[BlockCopy]:
        """Return the plan and leave it as it is."""
        return [
            BlockCopy(group, src, dst, num_tokens)
            for group, waiting in enumerate(self._waiting)
            for dst, (src, num_tokens) in waiting.items()
        ]
