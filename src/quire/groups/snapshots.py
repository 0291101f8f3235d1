"""Snapshots on request: at which lengths a forward should end, and one kept where the caller says."""

from __future__ import annotations

from quire.core.blocks import GAP
from quire.core.manager import CacheManager
from quire.core.publish import keep_states, natural_ends
from quire.core.sequence import Sequence
from quire.errors import CheckpointError
from quire.interrupts import mutating


def stops(manager: CacheManager, seq: Sequence) -> list[int]:
    """Return the lengths, rising, at which a forward over the prompt should end.

    A commit that ends there keeps a snapshot of the states: at multiples of the interval,
    at a branch point that `open` found, at the last block boundary before the end of the
    prompt. Empty without recurrent groups. Raises `SequenceError`.
    """
    manager.check_open(seq)
    rows = manager.kernel.rows
    if not rows.states:
        return []
    last = max(seq.known_end, seq.computed)
    found = set(natural_ends(seq))
    for state in rows.states:
        found.update(state.due(seq.computed, last))
    return sorted(stop for stop in found if seq.computed < stop < last)


@mutating
def checkpoint(manager: CacheManager, seq: Sequence) -> bool:
    """Keep a snapshot of the states at the computed length; False if no block is to be had.

    Take the copies before the next forward. Raises `CheckpointError` where no block
    ends, or before anything was computed; `SequenceError`.
    """
    manager.check_open(seq)
    kernel, rows = manager.kernel, manager.kernel.rows
    if not rows.states:
        raise CheckpointError("no layer group is recurrent; there is no state to keep")
    computed, size = seq.computed, rows.block_size
    slots = [rows.flat[state.index][seq.row] for state in rows.states]
    if computed % size or not computed or GAP in slots:
        msg = (
            f"checkpoint at {computed} computed tokens; a state can be kept where a block of "
            f"{size} tokens ends that this sequence has computed: commit up to one of "
            "stops(manager, seq) first"
        )
        raise CheckpointError(msg)
    return not seq.private_key and keep_states(kernel, seq, passing=True)
