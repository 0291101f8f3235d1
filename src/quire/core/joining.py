"""Joining: runs that a branch divided, and nothing divides any more, become one run again."""

from __future__ import annotations

from quire.core.node import NO_CHILDREN, Node
from quire.core.tree import PrefixTree

MAX_JOINED_BYTES = 1 << 16
"""Key bytes of the longest run that is appended to the one above it: what a join costs at most, and so
what the cut that came before it has paid for. Comparing so many takes longer than passing a node."""


def join_path(tree: PrefixTree, node: Node) -> None:
    """Merge the mergeable nodes on the path to a node that a request has just used and locked."""
    path = node.path()
    upper = path[0]
    for lower in path[1:]:
        kept = len(lower.key) > MAX_JOINED_BYTES or not all(s.joinable(upper) for s in tree.sparse)
        if not kept and _are_alike(tree, upper, lower):
            _join(tree, upper, lower, used=True)
        upper = lower


def mend(tree: PrefixTree, upper: Node) -> None:
    """Undo the cut at the end of a node, unless something needs it; the orders of eviction stay."""
    lower = next(iter(upper.children.values()), upper)
    if _are_alike(tree, upper, lower):
        if not upper.locks:
            tree.order.referenced(upper)
        _join(tree, upper, lower, used=False)


def _are_alike(tree: PrefixTree, upper: Node, lower: Node) -> bool:
    """Whether a node and its only child differ in nothing that a run has once.

    As many locks as the child has: nobody stands where they meet.
    """
    alone = len(upper.children) == 1 and upper.locks == lower.locks
    return alone and id(upper) not in tree.waiting and tree.order.joinable(upper, lower)


def _join(tree: PrefixTree, upper: Node, lower: Node, *, used: bool) -> None:
    """Let `lower`, to which the references of sequences and pins point, take over the run of `upper`."""
    parent = upper.parent
    assert parent is not None
    for group in tree.sparse:
        group.forget(upper)
    upper.key += lower.key
    for ids, more in zip(upper.blocks, lower.blocks, strict=True):
        ids.extend(more)
    lower.key, lower.name, lower.blocks = upper.key, upper.name, upper.blocks
    lower.parent = parent
    parent.children[upper.name] = lower
    tree.order.lent.pop(id(upper), None)  # by the same requests as `lower`
    if upper.mark is not None:
        tree.order.gone(upper)
    for group in tree.sparse:
        group.joined(lower, upper.parts[group.place], upper.end, used=used)
    first = len(tree.sparse)
    for part, above in zip(lower.parts[first:], upper.parts[first:], strict=True):
        part.join(above, upper.end)
    upper.parent = upper.note = None
    upper.children = NO_CHILDREN
    tree.wide.pop(id(upper), None)
