"""Making room: blocks are taken out of the cache when an operation needs more than are free."""

from __future__ import annotations

from collections.abc import Callable

from quire.core.blocks import BlockPool
from quire.core.events import EventLog, RemovalReason
from quire.core.radix import Node, PrefixTree
from quire.core.stats import Counters
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

    def make(self, num_blocks: int, release_expired: Callable[[], None]) -> None:
        """Make so many blocks free in every group; raise `OutOfBlocks` and change nothing."""
        for pool in self._pools:
            if pool.num_free < num_blocks:
                break
        else:
            return
        if any(pool.num_available < num_blocks for pool in self._pools):
            release_expired()
            self._refuse_if_short(num_blocks)
        self.evict(max(num_blocks - pool.num_free for pool in self._pools))

    def evict(self, num_blocks: int) -> int:
        """Evict up to `num_blocks` by policy and return how many were."""
        done = 0
        victim = self._tree.evictor.victim
        while done < num_blocks:
            node = victim()
            if node is None:
                break
            if not node.evictable:
                raise InvariantError(f"the policy's victim {node!r} is referenced or has branches")
            take = min(len(node.blocks[0]), num_blocks - done)
            self._drop(node, take, "evicted")
            done += take
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
        num_blocks = len(node.blocks[0])
        self._drop(node, num_blocks, "invalidated")
        self._counters.invalidated_blocks += num_blocks
        return num_blocks

    def _drop(self, node: Node, num_blocks: int, reason: RemovalReason) -> None:
        if self._events is not None:
            self._events.removed(node, num_blocks, reason)
        self._tree.drop_tail(node, num_blocks)

    def _refuse_if_short(self, num_blocks: int) -> None:
        for pool in self._pools:
            if pool.num_available < num_blocks:
                mend = "close or suspend sequences, release pins, or enlarge the pool"
                raise pool.shortage("no room", num_blocks, mend)
