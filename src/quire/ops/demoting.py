"""Demoting: cached blocks that nobody is expected to come back to, though no hint said so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Items

from quire.core.manager import CacheManager
from quire.core.node import Mark, Match, Node
from quire.core.order import Order
from quire.core.terms import MAX_PRIORITY
from quire.core.tokens import Key, TokenIds
from quire.core.tree import PrefixTree
from quire.interrupts import mutating
from quire.media import MediaItem
from quire.scope import Scope

LOWEST = -MAX_PRIORITY


@mutating
def demote(
    manager: CacheManager,
    tokens: TokenIds,
    start: int,
    scope: Scope | None = None,
    *,
    media: Items[MediaItem] = (),
) -> int:
    """Give cached blocks of a text behind its first `start` tokens the lowest priority.

    Returns how many of them have it now. They are found like any others until they are evicted. A request that uses
    them gives them its own priority again. Blocks that a request works with, and those that other cached texts go on
    from, stay as they are. Raises what `probe` raises.
    """
    root, key = manager.read_whole(tokens, scope, media)
    kernel, tree = manager.kernel, manager.kernel.tree
    found = tree.match(root, key, len(key) - len(key) % tree.block_bytes)
    first, node = -(-start // manager.block_size), found.last
    if found.into:  # another text has more of its last run
        return 0
    held = Counter(id(each) for hold in kernel.holds.all.values() for each in hold.node.path())
    while node.end > first and node.locks == held[id(node)] and _ends_demoted(node):
        if node.start < first:
            tree.split(node, first - node.start)
        if node.priority != LOWEST:
            _demote(tree.order, node)
        node = node.parent or root
    return max(found.num_blocks - max(node.end, first), 0)


def goes_on_demoted(tree: PrefixTree, found: Match, key: Key) -> bool:
    """Whether another text, of which the head of a key is cached, goes on with demoted blocks where that ends.

    It may end within a block, which both texts need.
    """
    end = found.num_blocks * tree.block_bytes
    partial = tree.match_partial(found, key[end : end + tree.block_bytes])
    if partial is None:
        after = [found.edge] if found.edge and found.into else [*found.node.children.values()]
    elif (node := partial[0]).end == found.num_blocks + 1:
        after = [node, *node.children.values()]
    else:
        after = [node]
    return any(node.priority == LOWEST for node in after)


def _ends_demoted(node: Node) -> bool:
    return all(child.priority == LOWEST for child in node.children.values())


def _demote(order: Order, node: Node) -> None:
    """Give a node the lowest priority; a cached one changes its class, and keeps the place of its last use."""
    if not node.locks:
        order.referenced(node)
    node.mark = node.mark or Mark()
    node.mark.priority = LOWEST
    if not node.locks:
        order.joined(node).returned(node)
