"""Blocks: which are free, active or cached, which have several holders, and which are about to be copied."""

from __future__ import annotations

from array import array
from typing import NamedTuple

import numpy as np

from quire.core.tokens import BoolArray, IntArray
from quire.errors import CopyError, InvariantError, OutOfBlocks

GAP = -1
"""Stands in a list of blocks where there is none."""


class BlockPool:
    """The physical blocks of one layer group, `name`.

    A block is free, active (referenced by a sequence or a pin) or cached (in the tree,
    referenced by nobody):

        num_free + num_active + num_cached == num_blocks

    Free ids lie on a stack, `_stack[_top:]`; a run of them is one copy, whatever its length.
    A block outside the stack has one holder; the few with more (a partly filled block shared
    by forks) stand in `shared` with their number of holders. `waiting` are the planned copies
    into blocks of this pool: destination -> (source, tokens).

        free -- take --> active -- cache --> cached -- drop --> free
        free <- give_back - active <-- use --- cached

    Only these five change the state of a block (`protect` is `use` or `cache`, `drop_hold` goes through `give_back`, `resize`
    renumbers): a test looks at every assignment. Totals are counted always; `quire.ops.CheckedPool` sees too that no block
    is taken or given back twice.
    """

    def __init__(self, num_blocks: int, name: str = "full") -> None:
        self.name = name
        self.num_blocks = num_blocks
        self.num_cached = 0
        self.shared: dict[int, int] = {}
        self.waiting: dict[int, tuple[int, int]] = {}
        self._stack: IntArray = np.arange(num_blocks, dtype=np.int32)
        self.ids: memoryview[int] = self._stack.data
        self._top = 0

    @property
    def num_free(self) -> int:
        return self.num_blocks - self._top

    @property
    def num_active(self) -> int:
        return self._top - self.num_cached

    @property
    def num_available(self) -> int:
        """Blocks that an allocation can get: free now, or cached and thus evictable."""
        return self.num_blocks - self._top + self.num_cached

    def shortage(
        self, what: str, needed: int, mend: str, kind: type[OutOfBlocks] = OutOfBlocks
    ) -> OutOfBlocks:
        """Return the `OutOfBlocks` error with the missing blocks, the state of the pool, and a remedy."""
        free, cached, active = self.num_free, self.num_cached, self.num_active
        msg = (
            f"{what}: {needed} blocks of group {self.name!r} needed; of its {self.num_blocks} blocks {free} "
            f"are free, {cached} cached, {active} active; {mend}"
        )
        return kind(msg, group=self.name, needed=needed, free=free, cached=cached, active=active)

    def take(self, num_blocks: int) -> memoryview[int]:
        """Free to active: take blocks; the returned view of ids is valid until the next call that frees.

        The caller has made sure that so many are free (`InvariantError` otherwise).
        """
        start = self._top
        end = start + num_blocks
        if end > self.num_blocks:
            raise InvariantError(f"{num_blocks} blocks taken, {self.num_blocks - start} are free")
        self._top = end
        return self.ids[start:end]

    def give_back(self, block_ids: memoryview[int]) -> None:
        """Active to free: give back blocks that have one holder, as one run of ids."""
        start = self._top - len(block_ids)
        if start < 0:
            raise InvariantError(f"{len(block_ids)} blocks freed, only {self._top} are held")
        if self.waiting:
            for block in block_ids:
                self.waiting.pop(block, None)
        self.ids[start : self._top] = block_ids
        self._top = start

    def drop_hold(self, block_ids: memoryview[int]) -> None:
        """Take one holder away from each of these blocks; those without another are given back. Gaps are passed over."""
        if self.shared or GAP in block_ids:
            own = array("i")
            for block in block_ids:
                if block in self.shared:
                    self.unshare(block)
                elif block != GAP:
                    own.append(block)
            block_ids = memoryview(own)
        self.give_back(block_ids)

    def cache(self, num_blocks: int) -> None:
        """Active to cached: `num_blocks` blocks of the tree lost their last reference."""
        self.num_cached += num_blocks

    def use(self, num_blocks: int) -> None:
        """Cached to active: `num_blocks` blocks are referenced again, or an active caller takes them out of the tree."""
        self.num_cached -= num_blocks

    def protect(self, before: int, after: int) -> None:
        """Cached to active, or back: of some run in the tree `before` blocks were referenced, `after` are now."""
        self.num_cached += before - after

    def drop(self, block_ids: memoryview[int]) -> None:
        """Cached to free: give back blocks of the tree that nobody references."""
        self.num_cached -= len(block_ids)
        self.give_back(block_ids)

    def share(self, block_id: int) -> None:
        """Add a holder to a block."""
        self.shared[block_id] = self.shared.get(block_id, 1) + 1

    def unshare(self, block_id: int) -> None:
        """Take one of several holders away from a block."""
        left = self.shared[block_id] - 1
        if left == 1:
            del self.shared[block_id]
        else:
            self.shared[block_id] = left

    def free_ids(self) -> IntArray:
        """Return the free ids in the order in which they will be given out, as a copy."""
        return self._stack[self._top :].copy()

    def resize(self, num_blocks: int, held: BoolArray, renamed: IntArray) -> None:
        """Resize the pool to `num_blocks` blocks; old block b becomes `renamed[b]`.

        bool `held[b]` says whether block b of the new pool is held. The caller makes sure that all held
        blocks fit, and renames the blocks everywhere else.
        """
        self._stack = np.zeros(num_blocks, dtype=np.int32)
        self._stack[self._top :] = (~held).nonzero()[0]
        self.ids = self._stack.data
        self.num_blocks = num_blocks
        self.shared = {int(renamed[block]): count for block, count in self.shared.items()}


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
