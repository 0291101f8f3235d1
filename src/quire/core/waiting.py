"""Waiting: a request keeps its hit until it is admitted, and a refused one leaves no trace."""

from __future__ import annotations

from quire.core.joining import mend
from quire.core.kernel import Kernel
from quire.core.node import Node
from quire.core.sequence import Pending, Sequence
from quire.core.tree import PrefixTree


def wait_at(tree: PrefixTree, node: Node, end: int) -> Node:
    """Return the node that ends at a boundary of this path, and count a waiting request there."""
    held = node.holding(end - 1)
    node = tree.cut(held, end)
    count, alone = tree.waiting.get(id(node), (0, node is not held))
    tree.waiting[id(node)] = count + 1, alone
    return node


def wait_no_more(tree: PrefixTree, node: Node, *, stays: bool) -> None:
    """Count one waiting request less at the end of a node.

    `stays`  the request was admitted there; otherwise a cut that only waiting requests needed is undone
    """
    count, alone = tree.waiting.pop(id(node))
    if count > 1:
        tree.waiting[id(node)] = count - 1, alone and not stays
    elif alone and not stays:
        mend(tree, node)


def give_source(kernel: Kernel, seq: Sequence, pending: Pending) -> None:
    """Release the block whose head a waiting request found."""
    source, tree, rows = pending.source, kernel.tree, kernel.rows
    if source is None:
        return
    pending.source = None
    for group in rows.token_groups:
        kernel.pools[group].unshare(rows.slots(group, seq.row, seq.node.end, source.end)[0])
    for window in tree.windows:
        window.lend(source, -1)
    tree.unlend(source)
    wait_no_more(tree, source, stays=False)
