"""Making room: blocks are taken out of the cache when an operation needs more than are free."""

from __future__ import annotations

from collections.abc import Sequence as Items

from quire.core.blocks import BlockPool
from quire.core.events import RemovalReason
from quire.core.evictions import EvictionLog
from quire.core.kernel import Kernel
from quire.core.node import Node
from quire.core.sparse import SparseGroup
from quire.core.tokens import Key
from quire.errors import InvariantError


def make_room(kernel: Kernel, needed: Items[int]) -> None:
    """Make so many blocks free in each group; raise `OutOfBlocks` and change nothing."""
    for pool, num_blocks in zip(kernel.pools, needed, strict=True):
        if pool.num_free < num_blocks:
            break
    else:
        return
    if any(map(_is_short, kernel.pools, needed)):
        kernel.pins.release_expired()
        _refuse_if_short(kernel, needed)
    short = max((needed[g] - pool.num_free for g, pool in kernel.tree.full), default=0)
    if short > 0:
        evict(kernel, short)
    for group in kernel.tree.sparse:
        num_blocks = needed[group.index]
        if group.pool.num_free < num_blocks:
            evict_in(kernel, group, num_blocks - group.pool.num_free)
        while group.pool.num_free < num_blocks:
            if not evict(kernel, 1):
                raise InvariantError(f"group {group.index} has cached blocks and no victim")


def evict_in(kernel: Kernel, group: SparseGroup, num_blocks: int) -> int:
    """Evict up to `num_blocks` of one sparse group and return how many were."""
    before = group.pool.num_free
    group.evict(num_blocks, lambda node: _drop_spent(kernel, node))
    done = group.pool.num_free - before
    kernel.counters.evicted_blocks += done
    return done


def evict(kernel: Kernel, num_blocks: int) -> int:
    """Evict up to `num_blocks` of every leaf's path by policy and return how many were."""
    done = 0
    evictor, sparse = kernel.tree.evictor, kernel.tree.sparse
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
        _drop(kernel, node, take, "evicted")
        done += take
        if sparse:
            _drop_spent(kernel, node if node.parent is not None else parent)
    kernel.counters.evicted_blocks += done
    return done


def clear(kernel: Kernel) -> int:
    """Drop all that is cached; see `CacheManager.clear`."""
    tree = kernel.tree
    kernel.pins.release_expired()
    dropped = sum(invalidate_below(kernel, root) for root in tree.roots.values())
    for group in tree.sparse:
        evict_in(kernel, group, group.pool.num_cached)
    if kernel.log is not None:
        kernel.log.take()
    if kernel.events is not None and not any(root.children for root in tree.roots.values()):
        kernel.events.cleared()
    return dropped


def invalidate(kernel: Kernel, root: Node, key: Key) -> int:
    """Drop the prefix that a key names, and all that continues it; see `CacheManager.evict`."""
    tree = kernel.tree
    kernel.pins.release_expired()
    if not key:
        return invalidate_below(kernel, root)
    whole = len(key) - len(key) % tree.block_bytes
    found = tree.match(root, key, whole)
    covered = found.num_bytes == whole
    rest = key[whole:]
    if found.edge is not None and found.into:
        if not covered or not found.edge.key.startswith(rest, found.into):
            return 0
        return invalidate_below(kernel, found.edge) + invalidate_path(kernel, found.edge)
    dropped = 0
    for child in list(found.node.children.values()) if covered else ():
        if child.key.startswith(rest):
            dropped += invalidate_below(kernel, child) + invalidate_node(kernel, child)
    return dropped + invalidate_path(kernel, found.node)


def invalidate_below(kernel: Kernel, node: Node) -> int:
    """Drop everything below a node that nobody references; return the blocks dropped."""
    below = [node]
    for each in below:
        below.extend(each.children.values())
    dropped = 0
    for each in reversed(below[1:]):
        dropped += invalidate_node(kernel, each)
    return dropped


def invalidate_path(kernel: Kernel, node: Node) -> int:
    """Drop the blocks from a node upwards, as far as nothing else needs them."""
    dropped = 0
    while node.evictable:
        parent = node.parent
        assert parent is not None
        dropped += invalidate_node(kernel, node)
        node = parent
    return dropped


def invalidate_node(kernel: Kernel, node: Node) -> int:
    """Drop a whole node, unless something references it or hangs below it."""
    if not node.evictable:
        return 0
    num_blocks = node.num_blocks
    _drop(kernel, node, num_blocks, "invalidated")
    kernel.counters.invalidated_blocks += num_blocks
    return num_blocks


def _drop(kernel: Kernel, node: Node, num_blocks: int, reason: RemovalReason) -> None:
    if kernel.events is not None:
        kernel.events.removed(node, num_blocks, reason)
    if kernel.log is not None and reason == "evicted":
        _note(kernel, kernel.log, node, num_blocks)
    kernel.tree.drop_tail(node, num_blocks)


def _note(kernel: Kernel, log: EvictionLog, node: Node, num_blocks: int) -> None:
    """Tell of the last blocks of a leaf, in every group, the first one first."""
    first = node.end - num_blocks
    ends = range(first + 1, node.end + 1)
    for group, _ in kernel.tree.full:
        log.add(group, node, ends, node.blocks[group][first - node.start :])
    for group in kernel.tree.sparse:
        held = [pair for pair in group.held(node) if pair[0] > first]
        log.add(group.index, node, [end for end, _ in held], [block for _, block in held])


def _drop_spent(kernel: Kernel, node: Node) -> None:
    """Drop a leaf in which no hit can end any more, and what that exposes of the same."""
    while node.evictable and any(group.is_spent(node) for group in kernel.tree.sparse):
        parent = node.parent
        assert parent is not None
        kernel.counters.evicted_blocks += node.num_blocks
        if kernel.tree.evictor.remembers:
            kernel.tree.evictor.evicting(node, node.num_blocks)
        _drop(kernel, node, node.num_blocks, "evicted")
        node = parent


def _refuse_if_short(kernel: Kernel, needed: Items[int]) -> None:
    for pool, num_blocks in zip(kernel.pools, needed, strict=True):
        if pool.num_available < num_blocks:
            mend = "close or suspend sequences, release pins, or enlarge the pool"
            raise pool.shortage("no room", num_blocks, mend)


def _is_short(pool: BlockPool, num_blocks: int) -> bool:
    return pool.num_available < num_blocks


def least(kernel: Kernel, num_tokens: int) -> tuple[int, ...]:
    """Return the blocks that each group must have at least for so many tokens."""
    whole = -(-num_tokens // kernel.rows.block_size)
    needed = [whole] * len(kernel.pools)
    for sparse in kernel.tree.sparse:
        needed[sparse.index] = min(whole, sparse.least(whole))
    return tuple(needed)


def check_fits(kernel: Kernel, num_tokens: int) -> None:
    """Raise `OutOfBlocks` for a prompt that no empty pool could hold."""
    whole = -(-num_tokens // kernel.rows.block_size)
    for pool in kernel.pools:
        if whole > pool.num_blocks:
            break
    else:
        return
    for pool, needed in zip(kernel.pools, least(kernel, num_tokens), strict=True):
        if needed > pool.num_blocks:
            what = f"a prompt of {num_tokens} tokens is larger than the pool"
            raise pool.shortage(what, needed, "enlarge the pool or shorten the prompt")
