"""Planned block copies: what the data plane does before the next forward."""

from __future__ import annotations

from typing import NamedTuple


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
    a destination reads that block's source; a destination that is freed needs no copy.

    `sources`: (group, destination) -> (source, tokens)
    """

    def __init__(self) -> None:
        self.sources: dict[tuple[int, int], tuple[int, int]] = {}

    def plan(self, copy: BlockCopy) -> None:
        """Add a copy into a block that was just allocated."""
        src, num_tokens = copy.src, copy.num_tokens
        earlier = self.sources.get((copy.group, src))
        if earlier is not None:
            src, num_tokens = earlier[0], min(num_tokens, earlier[1])
        self.sources[copy.group, copy.dst] = (src, num_tokens)

    def pending(self, group: int, block_id: int) -> bool:
        """Whether this block waits for a copy."""
        return (group, block_id) in self.sources

    def reads(self, group: int, block_id: int) -> bool:
        """Whether a planned copy reads this block."""
        return any(g == group and src == block_id for (g, _), (src, _) in self.sources.items())

    def forget(self, group: int, block_id: int) -> None:
        """Drop the copy into a block that is freed, if there is one."""
        self.sources.pop((group, block_id), None)

    def take(self) -> list[BlockCopy]:
        """Return the plan and start an empty one.

        A source that was evicted and given out as its own destination needs no copy.
        """
        plan = [
            BlockCopy(group, src, dst, num_tokens)
            for (group, dst), (src, num_tokens) in self.sources.items()
            if src != dst
        ]
        self.sources.clear()
        return plan

    def peek(self) -> list[BlockCopy]:
        """Return the plan and leave it as it is."""
        return [BlockCopy(g, src, dst, n) for (g, dst), (src, n) in self.sources.items()]
