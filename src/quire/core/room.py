"""Eviction: blocks leave the cache to make room, or there is none to be had."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Items

from quire.core.kernel import Kernel, Leaving
from quire.core.node import FOREVER, Match, Node
from quire.core.sparse import SparseGroup, Standing
from quire.errors import InvariantError


def make_room(kernel: Kernel, needed: Items[int]) -> None:
    """Make so many blocks free in each group; where that cannot be, evict nothing and raise `OutOfBlocks`."""
    if is_short(kernel, needed):
        evict_for(kernel, needed)


def is_short(kernel: Kernel, needed: Items[int], source: Node | None = None) -> bool:
    """Whether blocks must be evicted for so many in each group; raise `OutOfBlocks` where that would not be enough.

    Holds that are due are let go first, unless it raises: then nothing has changed. The `source` of a waiting request
    counts as released; the caller releases it afterwards.
    """
    if kernel.holds.first_due < FOREVER and kernel.holds.first_due <= kernel.tree.order.now():
        let_go_expired(kernel, needed, source)
    for pool, num_blocks in zip(kernel.pools, needed, strict=True):
        if pool.num_free < num_blocks:
            break
    else:
        return False
    if any(pool.num_available < n for pool, n in zip(kernel.pools, needed, strict=True)):
        let_go_expired(kernel, needed, source)  # which refuses
    return True


def evict_for(kernel: Kernel, needed: Items[int]) -> None:
    """Evict until so many blocks are free in each group, which `is_short` has found possible."""
    missing = max((needed[g] - pool.num_free for g, pool in kernel.tree.full), default=0)
    if missing > 0:
        evict(kernel, missing)
    for group in kernel.tree.sparse:
        num_blocks = needed[group.index]
        if group.pool.num_free < num_blocks:
            evict_in(kernel, group, num_blocks - group.pool.num_free)
        while group.pool.num_free < num_blocks:
            if not evict(kernel, 1):
                raise InvariantError(f"group {group.index} has cached blocks and no victim")


def let_go_expired(kernel: Kernel, needed: Items[int], source: Node | None = None) -> None:
    """Let go of the holds that have expired; raise `OutOfBlocks` and keep them where that would not be enough."""
    expired = Counter(hold.node for hold in kernel.holds.expired())
    room = room_left(kernel, None, expired, source)
    for pool, num_blocks, left in zip(kernel.pools, needed, room, strict=True):
        if left < num_blocks:
            mend = "close or suspend sequences, release pins, or enlarge the pool"
            raise pool.shortage("no room", num_blocks, mend)
    kernel.holds.let_go_expired()


def room_left(
    kernel: Kernel, match: Match | None, gone: Mapping[Node, int], source: Node | None = None
) -> list[int]:
    """Return the blocks that each group can give once a match is referenced.

    `gone`    holds that are released too: how many, by the node where they end
    `source`  a node whose reference is released too
    """
    tree = kernel.tree
    room = [pool.num_available for pool in kernel.pools]
    found = dict(match.nodes()) if match is not None else {}
    unlocked: Counter[Node] = Counter()
    for node, count in gone.items():
        unlocked.update(dict.fromkeys(node.path(), count))
    if source is not None:
        unlocked[source] += 1
    taken = sum(num_blocks for node, num_blocks in found.items() if not node.locks)
    for node, count in unlocked.items():
        if node.locks == count:
            taken -= node.num_blocks - found.get(node, 0)
    for group, _ in tree.full:
        room[group] -= taken
    standing = Standing(gone, unlocked, lent=source)
    if match is not None and found:
        standing = Standing(gone, unlocked, match.last, match.num_blocks, source)
    for sparse in tree.sparse:
        room[sparse.index] -= sparse.would_guard(standing)
    return room


def evict_in(kernel: Kernel, group: SparseGroup, num_blocks: int, why: Leaving = "evicted") -> int:
    """Evict up to `num_blocks` of one sparse group and return how many were."""
    before = group.pool.num_free
    leaving = kernel.watchers.leaving

    def drop(node: Node) -> None:
        _drop_spent(kernel, node, why)

    def tell(node: Node, blocks: range, index: int) -> None:
        for hook in leaving:
            hook(node, blocks, index, why)

    group.evict(num_blocks, drop, tell if leaving else None)
    done = group.pool.num_free - before
    kernel.counters.evicted_blocks += done
    return done


def evict(kernel: Kernel, num_blocks: int) -> int:
    """Evict up to `num_blocks` blocks in every full group, from the ends of the policy's victims; return how many."""
    done = 0
    order, sparse = kernel.tree.order, kernel.tree.sparse
    while done < num_blocks:
        found = order.victim()
        if found is None:
            break
        node, most = found
        parent = node.parent
        if parent is None or not node.evictable:
            raise InvariantError(f"the policy's victim {node!r} is referenced or has branches")
        take = min(node.end - parent.end, num_blocks - done, most)
        drop(kernel, node, take, "evicted")
        done += take
        if sparse:
            _drop_spent(kernel, node if node.parent is not None else parent, "evicted")
    kernel.counters.evicted_blocks += done
    return done


def least(kernel: Kernel, num_tokens: int) -> tuple[int, ...]:
    """Return the least number of blocks that each group needs for `num_tokens` tokens."""
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


def drop(kernel: Kernel, node: Node, num_blocks: int, why: Leaving) -> None:
    """Cached to free: the last blocks of a leaf leave the tree."""
    for tell in kernel.watchers.leaving:
        tell(node, range(node.end - num_blocks, node.end), None, why)
    for g, pool in kernel.tree.full:
        pool.drop(memoryview(node.blocks[g])[-num_blocks:])
    kernel.tree.cut_tail(node, num_blocks)


def _drop_spent(kernel: Kernel, node: Node, why: Leaving) -> None:
    """Drop a leaf in which no hit can end any more, then its ancestors of the same kind."""
    while node.evictable and any(group.is_spent(node) for group in kernel.tree.sparse):
        parent = node.parent
        assert parent is not None
        kernel.counters.evicted_blocks += node.num_blocks
        drop(kernel, node, node.num_blocks, why)
        node = parent
