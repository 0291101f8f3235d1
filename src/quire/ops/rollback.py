"""Rollback: a sequence goes back to fewer tokens, as if it had not computed the rest."""

from __future__ import annotations

from operator import index

from quire.core.blocks import GAP
from quire.core.give import free, free_states, stop_waiting
from quire.core.kernel import Kernel
from quire.core.manager import CacheManager
from quire.core.node import Node
from quire.core.sequence import Pending, Sequence
from quire.core.take import attach
from quire.core.tokens import TOKEN_BYTES
from quire.errors import TruncateError
from quire.interrupts import mutating


@mutating
def truncate(manager: CacheManager, seq: Sequence, num_tokens: int) -> None:
    """Take a sequence back to its first `num_tokens` tokens, reservations included.

    Blocks beyond are freed, or stay cached where others use them too. Raises
    `TruncateError` beyond what is computed, or inside a published block that is not the
    sequence's alone; `SequenceError`.
    """
    manager.check_open(seq)
    go_back(manager.kernel, seq, num_tokens)


def go_back(kernel: Kernel, seq: Sequence, num_tokens: int) -> None:
    """Take a sequence that is known to be open back to its first tokens."""
    rows, row, size = kernel.rows, seq.row, kernel.rows.block_size
    computed = rows.computed[row]
    try:
        is_there = 0 <= index(num_tokens) <= computed
    except TypeError:
        is_there = False
    if not is_there:
        msg = f"truncate to {num_tokens!r} tokens, but the sequence has 0 to {computed}"
        raise TruncateError(msg)
    num_tokens = index(num_tokens)
    if seq.pending is not None:
        _wait_with_less(kernel, seq, seq.pending, num_tokens)
        return
    seq.fill()
    keep, in_tail = divmod(num_tokens, size)
    published = seq.node.end
    goes_back, reopens = num_tokens < computed, keep < computed // size
    head = _head(kernel, seq, keep, in_tail) if reopens and in_tail else b""
    if goes_back:
        _check_sparse(kernel, seq, num_tokens)
        kernel.tree.leave(seq.node, rows.standing(row))
        free_states(kernel, seq)
    _keep_known(seq, num_tokens)
    free(kernel, seq, max(published, keep + (in_tail > 0)), seq.num_blocks)
    if reopens:
        rows.write_tail(row, 0, head)
        seq.private_key = seq.private_key[: max(keep - published, 0) * kernel.tree.block_bytes]
    if keep < published:
        # behind a window others may have healed gaps
        seq.read_table([window.index for window in rows.windows], keep + 1)
        _unpublish(kernel, seq, keep, in_tail)
    if goes_back:
        kernel.tree.stand(seq.node, rows.standing(row))
    rows.computed[row] = rows.capacity[row] = num_tokens
    rows.version += 1
    rows.epoch += 1


def _wait_with_less(kernel: Kernel, seq: Sequence, pending: Pending, num_tokens: int) -> None:
    """Shorten the hit of a waiting sequence."""
    num_cached, rows = seq.num_cached, kernel.rows
    key = memoryview(seq.token_bytes() + seq.script.key)
    found = kernel.lookup.find(seq.root, key, num_tokens)
    length = found.num_blocks * rows.block_size + found.partial_tokens
    if length != num_tokens:
        msg = (
            f"truncate to {num_tokens} of the {seq.computed} tokens that were found, but a hit cannot end there: "
            f"truncate to {length}, or reserve first"
        )
        raise TruncateError(msg)
    stop_waiting(kernel, seq, pending)  # which may join the run where the match ended
    attach(kernel, seq, key, kernel.lookup.find(seq.root, key, num_tokens), pending.missed)
    seq.num_cached = num_cached
    rows.version += 1
    rows.epoch += 1


def _check_sparse(kernel: Kernel, seq: Sequence, num_tokens: int) -> None:
    """Raise `TruncateError` unless every sparse group can continue from this length."""
    rows, node = kernel.rows, seq.node
    keep, in_tail = divmod(num_tokens, rows.block_size)
    end = keep + (in_tail > 0)
    for window in rows.windows:
        first = window.first_read(num_tokens)
        lost = any(window.block_at(node, at) == GAP for at in range(first, min(end, node.end)))
        start = max(first, node.end)
        lost |= end > start and GAP in rows.slots(window.index, seq.row, start, end)
        if lost:
            msg = (
                f"truncate to {num_tokens} tokens, but group {window.index} no longer has "
                f"all of the window of tokens from {first * rows.block_size} on that the next "
                "token needs; suspend and resume the sequence to compute it again"
            )
            raise TruncateError(msg)
    for state in rows.states:
        if num_tokens and (in_tail or state.block_at(node, keep - 1) == GAP):
            msg = (
                f"truncate to {num_tokens} tokens, but recurrent group {state.index} has no "
                f"snapshot of exactly that length; the longest below is "
                f"{state.accepted(node, min(keep, node.end)) * rows.block_size} tokens"
            )
            raise TruncateError(msg)


def _head(kernel: Kernel, seq: Sequence, keep: int, in_tail: int) -> bytes:
    """Return the first tokens of full block `keep`, which must be the sequence's alone if it is published."""
    path = [node for node in seq.node.path() if keep < node.end]
    branches = sum(len(node.children) for node in path) - len(path) + 1
    if path and (branches or any(node.locks > 1 for node in path)):
        size = kernel.rows.block_size
        msg = (
            f"truncate to {keep * size + in_tail} tokens ends inside block {keep}, which is "
            f"published and used by others; truncate to {keep * size} or {keep * size + size}"
            ", or fork"
        )
        raise TruncateError(msg)
    start, key = (path[0].start, path[0].key) if path else (seq.node.end, seq.private_key)
    at = (keep - start) * kernel.tree.block_bytes
    return bytes(key[at : at + in_tail * TOKEN_BYTES])


def _keep_known(seq: Sequence, num_tokens: int) -> None:
    """Make the rest of the prompt known again; forget what is beyond it."""
    if num_tokens < seq.script.start:
        again = seq.token_bytes()[num_tokens * TOKEN_BYTES : seq.script.start * TOKEN_BYTES]
        seq.script.key = again + seq.script.key
        seq.script.start = num_tokens
    end = max(seq.prompt_len, num_tokens)
    seq.script.key = seq.script.key[: max(end - seq.script.start, 0) * TOKEN_BYTES]
    if seq.known_end <= num_tokens:
        seq.script.key, seq.script.start = b"", num_tokens


def _unpublish(kernel: Kernel, seq: Sequence, keep: int, in_tail: int) -> None:
    """Leave the path beyond block `keep`.

    Blocks that this sequence published and nobody else uses leave the tree; what it found
    cached stays, except a block that it goes on writing to.
    """
    tree, node = kernel.tree, seq.node
    own = keep if in_tail else max(keep, seq.num_cached // kernel.rows.block_size)
    while (parent := node.parent) is not None and node.end > keep:
        if node.locks == 1 and not node.children and node.end > own:
            first = max(own, parent.end)
            _withdraw(kernel, seq, node, first, freed_from=keep + (in_tail > 0))
            if first > parent.end:
                continue
        else:
            if parent.end < keep:
                parent = tree.split(node, keep - parent.end)
            tree.unlock(node)
        node = parent
    seq.node = node


def _withdraw(kernel: Kernel, seq: Sequence, node: Node, start: int, freed_from: int) -> None:
    """Take the blocks of a leaf from `start` on out of the tree; free those to be freed."""
    end = node.end
    for tell in kernel.watchers.leaving:
        tell(node, range(start, end), None, "truncated")
    kernel.tree.cut_tail(node, end - start, freed_from)
    first = max(start, freed_from)
    if first < end:
        for g, pool in kernel.tree.full:
            pool.give_back(kernel.rows.slots(g, seq.row, first, end))
