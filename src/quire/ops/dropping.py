"""Dropping by hand: a number of cached blocks by policy, or those of a prefix, of a scope, or all."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items

from quire.config import check_count
from quire.core.groups import check_group
from quire.core.kernel import Kernel
from quire.core.manager import CacheManager
from quire.core.node import Node
from quire.core.room import drop, evict, evict_in
from quire.core.sparse import sparse_at
from quire.core.tokens import Key, TokenIds
from quire.interrupts import mutating
from quire.media import MediaItem
from quire.scope import NO_SCOPE, Scope


@mutating
def reclaim(manager: CacheManager, num_blocks: int, group: int | None = None) -> int:
    """Evict up to `num_blocks` cached blocks by policy, as for room; return how many. For a prefix see `invalidate`.

    Without a group, leaves lose their last blocks in every group. In one group with a
    window or a state, blocks go where they are missed least, and the prefixes stay.
    """
    kernel, sparse = manager.kernel, None
    num_blocks = check_count("num_blocks", num_blocks)
    if group is not None:
        check_group(group, len(manager.pools))
        sparse = sparse_at(kernel.tree.sparse, group)
    kernel.holds.let_go_expired()
    if sparse is not None:
        return evict_in(kernel, sparse, num_blocks)
    return evict(kernel, num_blocks)


@mutating
def invalidate(
    manager: CacheManager,
    tokens: TokenIds | None = None,
    scope: Scope | None = None,
    *,
    media: Items[MediaItem] = (),
) -> int:
    """Drop a cached prefix and all that continues it; return the blocks per group. For room see `reclaim`.

    What other prompts share with it stays, and so does what a sequence or pin references.
    Without tokens the whole scope is dropped. Raises what `probe` raises.
    """
    kernel = manager.kernel
    if tokens is None:
        root = manager.root(scope)
        kernel.holds.let_go_expired()
        return drop_below(kernel, root)
    root, key = manager.read_whole(tokens, scope, media)
    kernel.holds.let_go_expired()
    return _invalidate(kernel, root, key)


@mutating
def clear(manager: CacheManager) -> int:
    """Drop all that is cached and not referenced, in every scope; return blocks per group.

    Of a running sequence's path, that is what lies behind its windows.
    """
    kernel, tree = manager.kernel, manager.kernel.tree
    kernel.holds.let_go_expired()
    dropped = sum(drop_below(kernel, root) for root in tree.roots.values())
    for group in tree.sparse:
        evict_in(kernel, group, group.pool.num_cached, "invalidated")
    for tell in kernel.watchers.leaving:
        tell(tree.root(NO_SCOPE), range(0), None, "cleared")
    return dropped


def drop_below(kernel: Kernel, top: Node) -> int:
    """Drop a node and all below it that nothing references; return the blocks per group."""
    return _drop_all(kernel, reversed(below(top)))


def _invalidate(kernel: Kernel, root: Node, key: Key) -> int:
    tree = kernel.tree
    whole = len(key) - len(key) % tree.block_bytes
    found, rest = tree.match(root, key, whole), key[whole:]
    covered = found.num_blocks * tree.block_bytes == whole
    if found.into:
        if not covered or not found.last.key.startswith(rest, found.into * tree.block_bytes):
            return 0
        tops = [found.last]
    else:
        children = found.node.children.values() if covered else ()
        tops = [child for child in children if child.key.startswith(rest)]
    dropped = sum(drop_below(kernel, top) for top in tops)
    return dropped + _drop_all(kernel, reversed(found.node.path()))  # what nothing else needs


def _drop_all(kernel: Kernel, nodes: Iterable[Node]) -> int:
    """Drop the nodes, children first, that nothing references or hangs below; return their blocks."""
    dropped = 0
    for node in nodes:
        if node.evictable:
            dropped += node.num_blocks
            drop(kernel, node, node.num_blocks, "invalidated")
    kernel.counters.invalidated_blocks += dropped
    return dropped


def below(top: Node) -> list[Node]:
    """Return a node and all below it, parents first."""
    nodes = [top]
    for each in nodes:
        nodes.extend(each.children.values())
    return nodes
