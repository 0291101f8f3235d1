"""Giving back: the blocks of a sequence when it ends or is preempted."""

from __future__ import annotations

from quire.core.blocks import GAP
from quire.core.kernel import Kernel
from quire.core.sequence import Pending, Sequence
from quire.core.tokens import TOKEN_BYTES
from quire.core.waiting import give_source, wait_no_more


def close(kernel: Kernel, seq: Sequence) -> None:
    """End a sequence that is open or suspended; see `CacheManager.close`."""
    if seq.state == "open":
        let_go(kernel, seq)
    kernel.owners.close(seq.terms)
    forget(kernel, seq)


def forget(kernel: Kernel, seq: Sequence) -> None:
    """A sequence that holds nothing any more is closed."""
    seq.state = "closed"
    if seq.script.media:
        kernel.tree.media.release(seq.script.media)
    seq.root.locks -= 1
    del kernel.sequences[id(seq)]


def suspend(kernel: Kernel, seq: Sequence) -> None:
    """Give back the blocks of an open sequence, which goes on later; see `CacheManager.suspend`."""
    script = seq.script
    script.key = seq.token_bytes() + script.key[(seq.computed - script.start) * TOKEN_BYTES :]
    script.start = 0
    seq.num_cached = seq.computed  # until resumed: the tokens that had KV
    if seq.pending is not None and seq.number:
        seq.num_cached += seq.pending.missed.num_tokens  # no room for those since it was resumed
    let_go(kernel, seq)
    seq.state = "suspended"


def let_go(kernel: Kernel, seq: Sequence) -> None:
    """Release all that an open sequence holds, and its row."""
    tree, rows, node = kernel.tree, kernel.rows, seq.node
    if seq.pending is not None:
        stop_waiting(kernel, seq, seq.pending)
    else:
        free(kernel, seq, node.end, seq.num_blocks)
        tree.leave(node, rows.standing(seq.row))
        free_states(kernel, seq)
        while node.parent is not None:
            if seq.terms.retain_s:
                tree.order.retain(node, seq.terms.retain_s)
                for group in tree.sparse:
                    group.touched(node)
            tree.unlock(node)
            node = node.parent
    rows.give_back(seq.row)
    seq.node = seq.root
    seq.private_key = b""
    seq.unfilled = 0


def stop_waiting(kernel: Kernel, seq: Sequence, pending: Pending) -> None:
    """Release the hit of a waiting sequence, and undo its cuts."""
    tree, node = kernel.tree, seq.node
    if pending.source is None:
        free(kernel, seq, node.end, seq.num_blocks)
    give_source(kernel, seq, pending)
    tree.leave(node, tree.sparse, refused=True)
    while node.parent is not None:
        tree.unlend(node)
        node = node.parent
    wait_no_more(tree, seq.node, stays=False)


def free(kernel: Kernel, seq: Sequence, start: int, stop: int) -> None:
    """Give up private blocks [start, stop) of a sequence's table."""
    for group in kernel.rows.token_groups if start < stop else ():
        kernel.pools[group].drop_hold(kernel.rows.slots(group, seq.row, start, stop))


def free_states(kernel: Kernel, seq: Sequence) -> None:
    """Give up the states that a sequence works on."""
    for state in kernel.rows.states:
        slot = kernel.rows.slots(state.index, seq.row, 0, 1)
        state.pool.drop_hold(slot)
        slot[0] = GAP
