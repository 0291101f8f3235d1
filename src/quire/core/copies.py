"""Planned block copies: what the data plane does before the next forward."""

from __future__ import annotations

from typing import NamedTuple


class BlockCopy(NamedTuple):
    """Copy the KV of the first `num_tokens` tokens of block `src` to block `dst` of a group."""

    group: int
    src: int
    dst: int
    num_tokens: int


class CopyPlan:
    """The copies planned since the last `take`, as one simultaneous assignment.

    Every source is read before any destination is written, and destinations are distinct.
    So a plan stays right when a source is evicted and given out again before it is taken:
    nothing writes to a block before the copies are done. A copy from a block that is itself
    a destination reads that block's source; a destination that is freed needs no copy.
    """

    def __init__(self) -> None:
        self._source: dict[tuple[int, int], tuple[int, int]] = {}

    def __len__(self) -> int:
        return len(self._source)

    def plan(self, copy: BlockCopy) -> None:
        """Add a copy into a block that was just allocated."""
        src, num_tokens = copy.src, copy.num_tokens
        earlier = self._source.get((copy.group, src))
        if earlier is not None:
            src, num_tokens = earlier[0], min(num_tokens, earlier[1])
        self._source[copy.group, copy.dst] = (src, num_tokens)

    def pending(self, group: int, block_id: int) -> bool:
        """Whether this block waits for a copy."""
        return (group, block_id) in self._source

    def forget(self, group: int, block_id: int) -> None:
        """Drop the copy into a block that is freed, if there is one."""
        self._source.pop((group, block_id), None)

    def take(self) -> list[BlockCopy]:
        """Return the plan and start an empty one.

        A source that was evicted and given out as its own destination needs no copy.
        """
        plan = [
            BlockCopy(group, src, dst, num_tokens)
            for (group, dst), (src, num_tokens) in self._source.items()
            if src != dst
        ]
        self._source.clear()
        return plan

    def peek(self) -> list[BlockCopy]:
        """Return the plan and leave it as it is."""
        return [BlockCopy(g, src, dst, n) for (g, dst), (src, n) in self._source.items()]
