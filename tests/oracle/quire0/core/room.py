"""Making room: blocks are taken out of the cache when an operation needs more than are free."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items

from quire0.core.blocks import BlockPool
from quire0.core.events import EventLog, RemovalReason
from quire0.core.evictions import EvictionLog
from quire0.core.node import Node
from quire0.core.radix import PrefixTree
from quire0.core.sparse import SparseGroup
from quire0.core.stats import Counters
from quire.errors import InvariantError


class Room:
    """Evicts cached blocks, tail first, in the order that the policy decides."""

    def __init__(
        self,
        pools: tuple[BlockPool, ...],
        tree: PrefixTree,
        counters: Counters,
        events: EventLog | None,
    ) -> None:
        self._pools = pools
        self._tree = tree
        self._counters = counters
        self._events = events
        self.log: EvictionLog | None = None

    def make(self, needed: Items[int], release_expired: Callable[[], None]) -> None:
        """Make so many blocks free in each group; raise `OutOfBlocks` and change nothing."""
        for pool, num_blocks in zip(self._pools, needed, strict=True):
            if pool.num_free < num_blocks:
                break
        else:
            return
        if any(map(_is_short, self._pools, needed)):
            release_expired()
            self._refuse_if_short(needed)
        short = max((needed[g] - pool.num_free for g, pool in self._tree.full), default=0)
        if short > 0:
            self.evict(short)
        for group in self._tree.sparse:
            num_blocks = needed[group.index]
            if group.pool.num_free < num_blocks:
                self.evict_sparse(group, num_blocks - group.pool.num_free)
            while group.pool.num_free < num_blocks:
                if not self.evict(1):
                    raise InvariantError(f"group {group.index} has cached blocks and no victim")

    def evict_sparse(self, group: SparseGroup, num_blocks: int) -> int:
        """Evict up to `num_blocks` of one sparse group and return how many were."""
        before = group.pool.num_free
        group.evict(num_blocks, self._drop_spent)
        done = group.pool.num_free - before
        self._counters.evicted_blocks += done
        return done

    def evict(self, num_blocks: int) -> int:
        """Evict up to `num_blocks` of every leaf's path by policy and return how many were."""
        done = 0
        evictor, sparse = self._tree.evictor, self._tree.sparse
        while done < num_blocks:
            node = evictor.victim()
            if node is None:
                break
            parent = node.parent
            if parent is None or not node.evictable:
                raise InvariantError(f"the policy's victim {node!r} is referenced or has branches")
            take = min(node.end - parent.end, num_blocks - done)
            if evictor.remembers:
                evictor.evicting(node, take)
            self._drop(node, take, "evicted")
            done += take
            if sparse:
                self._drop_spent(node if node.parent is not None else parent)
        self._counters.evicted_blocks += done
        return done

    def invalidate_below(self, node: Node) -> int:
        """Drop everything below a node that nobody references; return the blocks dropped."""
        below = [node]
        for each in below:
            below.extend(each.children.values())
        dropped = 0
        for each in reversed(below[1:]):
            dropped += self.invalidate_node(each)
        return dropped

    def invalidate_path(self, node: Node) -> int:
        """Drop the blocks from a node upwards, as far as nothing else needs them."""
        dropped = 0
        while node.evictable:
            parent = node.parent
            assert parent is not None
            dropped += self.invalidate_node(node)
            node = parent
        return dropped

    def invalidate_node(self, node: Node) -> int:
        """Drop a whole node, unless something references it or hangs below it."""
        if not node.evictable:
            return 0
        num_blocks = node.num_blocks
        self._drop(node, num_blocks, "invalidated")
        self._counters.invalidated_blocks += num_blocks
        return num_blocks

    def _drop(self, node: Node, num_blocks: int, reason: RemovalReason) -> None:
        if self._events is not None:
            self._events.removed(node, num_blocks, reason)
        if self.log is not None and reason == "evicted":
            self._note(self.log, node, num_blocks)
        self._tree.drop_tail(node, num_blocks)

    def _note(self, log: EvictionLog, node: Node, num_blocks: int) -> None:
        """Tell of the last blocks of a leaf, in every group, the first one first."""
        first = node.end - num_blocks
        ends = range(first + 1, node.end + 1)
        for group, _ in self._tree.full:
            log.add(group, node, ends, node.blocks[group][first - node.start :])
        for group in self._tree.sparse:
            held = [pair for pair in group.held(node) if pair[0] > first]
            log.add(group.index, node, [end for end, _ in held], [block for _, block in held])

    def _drop_spent(self, node: Node) -> None:
        """Drop a leaf in which no hit can end any more, and what that exposes of the same."""
        while node.evictable and any(group.is_spent(node) for group in self._tree.sparse):
            parent = node.parent
            assert parent is not None
            self._counters.evicted_blocks += node.num_blocks
            if self._tree.evictor.remembers:
                self._tree.evictor.evicting(node, node.num_blocks)
            self._drop(node, node.num_blocks, "evicted")
            node = parent

    def _refuse_if_short(self, needed: Items[int]) -> None:
        for pool, num_blocks in zip(self._pools, needed, strict=True):
            if pool.num_available < num_blocks:
                mend = "close or suspend sequences, release pins, or enlarge the pool"
                raise pool.shortage("no room", num_blocks, mend)


def _is_short(pool: BlockPool, num_blocks: int) -> bool:
    return pool.num_available < num_blocks
