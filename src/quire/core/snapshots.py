"""Snapshots: a commit keeps the states of recurrent groups where later prompts will want them."""

from __future__ import annotations

from quire.core.blocks import GAP
from quire.core.copies import BlockCopy
from quire.core.kernel import Kernel
from quire.core.room import evict_in
from quire.core.sequence import Sequence
from quire.errors import DraftError


def keep_if_due(kernel: Kernel, seq: Sequence) -> None:
    """Keep a snapshot if the sequence has come to one of its stops."""
    computed, size = seq.computed, kernel.rows.block_size
    if computed % size or not computed or seq.private_key:
        return
    regular = (computed in state.due(computed, computed + size) for state in kernel.rows.states)
    if computed in natural_ends(seq) or any(regular):
        keep(kernel, seq, passing=False)


def check_settled(kernel: Kernel, seq: Sequence, what: str) -> None:
    """Raise `DraftError` where drafts wait and a state of a recurrent group may have gone on with them."""
    drafted, computed = kernel.drafts.get(seq.row), kernel.rows.computed[seq.row]
    if kernel.rows.states and drafted is not None and drafted.computed == computed:
        msg = (
            f"{what} of a sequence with {drafted.num_tokens} drafts: the state of a recurrent group has gone "
            f"on with them and is not that of its {computed} tokens; accept first, or "
            "truncate(manager, seq, seq.computed)"
        )
        raise DraftError(msg)


def keep(kernel: Kernel, seq: Sequence, *, passing: bool) -> bool:
    """Keep a snapshot where the sequence stands in every recurrent group, or in none; return whether it is there.

    `passing`: one that matters only while its node ends there.
    """
    rows = kernel.rows
    last = seq.node.end - 1
    missing = [state for state in rows.states if state.block_at(seq.node, last) == GAP]
    if any(state.pool.num_available < 1 for state in missing):
        return False
    for state in missing:
        if not state.pool.num_free:
            evict_in(kernel, state, 1)
        block = state.pool.take(1)[0]
        state.keep(seq.node, block, passing=passing)
        working = rows.flat[state.index][seq.row]
        kernel.copies.plan(BlockCopy(state.index, working, block, 1))
    return True


def natural_ends(seq: Sequence) -> tuple[int, int]:
    """Return where a prompt like this can still start: at its end, and at its branch point."""
    size = seq.rows.block_size
    return (seq.prompt_len - 1) // size * size, seq.script.branch // size * size
